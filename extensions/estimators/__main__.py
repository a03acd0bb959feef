"""The command: python -m extensions.estimators."""

import rl_lab
from extensions.estimators.command import main

if __name__ == "__main__":
    rl_lab.run_command(main)
