"""The command: python -m extensions.distributed, alone or under torchrun."""

import rl_lab
from extensions.distributed.command import main

if __name__ == "__main__":
    rl_lab.run_command(main)
