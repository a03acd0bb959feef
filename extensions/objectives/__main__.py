"""The command: python -m extensions.objectives."""

import rl_lab
from extensions.objectives.command import main

if __name__ == "__main__":
    rl_lab.run_command(main)
