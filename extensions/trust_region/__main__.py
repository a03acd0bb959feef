"""The command: python -m extensions.trust_region."""

import rl_lab
from extensions.trust_region.command import main

if __name__ == "__main__":
    rl_lab.run_command(main)
