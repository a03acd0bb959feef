"""python -m extensions.why LINE_OR_FILE"""

import rl_lab
from extensions.why.command import main

if __name__ == "__main__":
    rl_lab.run_command(main, problem_status=2)
