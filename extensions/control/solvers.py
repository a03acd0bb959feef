"""Solvers by name: the lab's own, and packaged ones through qpsolvers (optional) as cross-checks and choices for --solver.

A packaged solver's answer becomes a Solution of qp.py: its status is translated, and "solved" is kept only where the residual of
qp.kkt_residual is small too, since some report success on an answer that is not one, or a finite x for a problem that has none.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import Callable

import numpy as np

from extensions.control import qp
from extensions.control.qp import Problem, Solution

PACKAGED = {  # name -> settings for a small residual
    "quadprog": {},
    "clarabel": {"tol_gap_abs": 1e-12, "tol_gap_rel": 1e-12, "tol_feas": 1e-12},
    "osqp": {"eps_abs": 1e-9, "eps_rel": 1e-9, "max_iter": 200_000, "polishing": True},
    "proxqp": {"eps_abs": 1e-10, "eps_rel": 0.0},
}
OWN = {"active-set": qp.active_set, "projected-gradient": qp.projected_gradient}
NAMES = (*OWN, *PACKAGED)
# The residual that a packaged answer must reach, relative to the size of its objective's gradient, to count as solved.
ACCEPTED = 1e-6


class SolverMissing(Exception):
    """The package of a solver is not installed: one line."""


def solver(name: str) -> Callable[[Problem], Solution]:
    """A solver by name. Raises SolverMissing where its package is absent."""
    if name in OWN:
        return OWN[name]
    for package in ("qpsolvers", {"proxqp": "proxsuite"}.get(name, name)):
        if importlib.util.find_spec(package) is None:
            raise SolverMissing(
                f"--solver {name}: the package {package} is not installed; python -m pip install -r extensions/requirements.txt"
            )
    return lambda problem: packaged(name, problem)


def packaged(name: str, problem: Problem, settings: dict | None = None) -> Solution:
    """Solve with a packaged solver; whatever it raises or returns becomes a status."""
    import qpsolvers
    from scipy import sparse

    qp.check_problem(problem)
    H, G, E = problem.H, problem.G, problem.E
    if name in ("osqp", "clarabel"):
        H, G, E = (None if matrix is None else sparse.csc_matrix(matrix) for matrix in (H, G, E))
    try:
        asked = qpsolvers.Problem(H, problem.f, G, problem.h, E, problem.e, problem.low, problem.high)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they warn of is the status, which is read below
            answer = qpsolvers.solve_problem(asked, solver=name, **(PACKAGED[name] if settings is None else settings))
    except (ValueError, qpsolvers.exceptions.SolverError):  # quadprog says "infeasible" by raising
        return Solution(np.full(len(problem.f), np.nan), qp.INFEASIBLE, np.inf, 0, np.nan)
    x = answer.x
    if x is None or not np.isfinite(x).all():
        return Solution(np.full(len(problem.f), np.nan), qp.INFEASIBLE, np.inf, 0, np.nan)
    residual = qp.kkt_residual(problem, x)
    scale = 1 + np.abs(problem.f).max()
    good = answer.found and residual <= ACCEPTED * scale
    status = qp.SOLVED if good else qp.UNFINISHED if answer.found else qp.INFEASIBLE
    return Solution(x, status, residual, 0, problem.value(x))


def raw_osqp_answer(problem: Problem) -> tuple[str, np.ndarray]:
    """What OSQP itself returns at its defaults: (its status, its x). For the example of an infeasible problem."""
    import osqp
    from scipy import sparse

    rows, limits, _ = qp.rows_of(problem)
    worker = osqp.OSQP()
    worker.setup(
        sparse.csc_matrix(problem.H), problem.f, sparse.csc_matrix(rows), limits, np.full(len(limits), np.inf), verbose=False
    )
    result = worker.solve(raise_error=False)
    return result.info.status, np.asarray(result.x, dtype=float)
