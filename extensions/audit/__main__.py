"""The command: python -m extensions.audit, or python PATH/TO/extensions/audit from any folder."""

if not __package__:  # run by its path: Python then looks for modules in this folder, in place of the lab's
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])

import rl_lab
from extensions.audit.command import main

if __name__ == "__main__":
    rl_lab.run_command(main, problem_status=2)
