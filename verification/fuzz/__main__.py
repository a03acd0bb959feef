"""The command: python -m verification.fuzz."""

import rl_lab
from verification.fuzz.command import main

if __name__ == "__main__":
    rl_lab.run_command(main)
