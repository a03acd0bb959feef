"""The command: python -m extensions.tiny_lm."""

import rl_lab
from extensions.tiny_lm.command import main

if __name__ == "__main__":
    rl_lab.run_command(main)
