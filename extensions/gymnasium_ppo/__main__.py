"""The command: python -m extensions.gymnasium_ppo."""

import rl_lab
from extensions.gymnasium_ppo.command import main

if __name__ == "__main__":
    rl_lab.run_command(main)
