"""python -m extensions.settings FILE"""

import rl_lab
from extensions.settings.command import main

if __name__ == "__main__":
    rl_lab.run_command(main, problem_status=2)
