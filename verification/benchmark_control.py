"""Speed of one MPC step (quadcopter, horizon 10) as a ratio to packaged solvers, all in this run, at small residuals.

    python -m verification.benchmark_control
"""

from __future__ import annotations

import statistics
import time

from extensions.control import solvers
from extensions.control.mpc import condense, quadcopter
from rl_lab import format_table

REPEATS = 51


def main() -> None:
    model, x0, target = quadcopter()
    problem = condense(model).problem(x0, target)
    names = [name for name in solvers.NAMES if name != "projected-gradient"]
    solve = {}
    for name in names:
        try:
            solve[name] = solvers.solver(name)
        except solvers.SolverMissing as missing:
            print(missing)
    seconds: dict[str, list[float]] = {name: [] for name in solve}
    residuals = {}
    for _ in range(REPEATS):  # in turn, so that a change of the machine's speed meets all of them
        for name, function in solve.items():
            started = time.perf_counter()
            residuals[name] = function(problem).residual
            seconds[name].append(time.perf_counter() - started)
    own = statistics.median(seconds["active-set"])
    rows = [
        [name, f"{1e3 * statistics.median(times):.2f} ms", f"{own / statistics.median(times):.2f}", f"{residuals[name]:.1e}"]
        for name, times in seconds.items()
    ]
    print(format_table(["solver", "median of one solve", "active-set / it", "KKT residual"], rows))


if __name__ == "__main__":
    main()
