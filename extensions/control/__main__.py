"""The command: python -m extensions.control."""

import rl_lab
from extensions.control.command import main

if __name__ == "__main__":
    rl_lab.run_command(main)
