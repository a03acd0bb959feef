"""Two small solvers for convex quadratic programs, and the residual that tells whether an answer is one.

    minimise x' H x / 2 + f' x   subject to   G x <= h,   E x = e,   low <= x <= high

H [n, n] symmetric positive definite. `active_set` (Goldfarb and Idnani's dual method) solves all of it and proves infeasibility;
`projected_gradient` (accelerated) solves the box alone. Whether a problem has no solution is told by `status`, and whether x is
one by `residual`; never by x itself: a solver's iterate on an infeasible problem may be any number.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

SOLVED, INFEASIBLE, UNFINISHED, TIMED_OUT = "solved", "infeasible", "unfinished", "timed out"
# A constraint counts as violated, and a direction as zero, beyond this part of the problem's own scale.
ROUNDING = 1e-12


class Problem(NamedTuple):
    """A quadratic program; what is absent is None. Boxes are part of it, so that a solver may use them as such."""

    H: np.ndarray
    f: np.ndarray
    G: np.ndarray | None = None
    h: np.ndarray | None = None
    E: np.ndarray | None = None
    e: np.ndarray | None = None
    low: np.ndarray | None = None
    high: np.ndarray | None = None

    def value(self, x: np.ndarray) -> float:
        """x' H x / 2 + f' x."""
        return float(x @ self.H @ x / 2 + self.f @ x)


class Solution(NamedTuple):
    """`x` is to be used only where `status` is "solved"; `residual` is then below what was asked for."""

    x: np.ndarray
    status: str
    residual: float
    iterations: int
    objective: float

    @property
    def usable(self) -> bool:
        return self.status == SOLVED


def rows_of(problem: Problem) -> tuple[np.ndarray, np.ndarray, int]:
    """All constraints as C x >= b, equalities first, and how many equalities there are. Infinite bounds are left out."""
    n = len(problem.f)
    C, b = [np.zeros((0, n))], [np.zeros(0)]
    equalities = 0 if problem.E is None else len(problem.E)
    for rows, limits, sign in ((problem.E, problem.e, 1), (problem.G, problem.h, -1)):
        if rows is not None:
            C.append(sign * np.asarray(rows, dtype=float))
            b.append(sign * np.asarray(limits, dtype=float))
    for limit, sign in ((problem.low, 1), (problem.high, -1)):
        if limit is not None:
            finite = np.isfinite(limit)
            C.append(sign * np.eye(n)[finite])
            b.append(sign * np.asarray(limit, dtype=float)[finite])
    C, b = np.concatenate(C), np.concatenate(b)
    kept = np.isfinite(b)
    return C[kept], b[kept], equalities


def kkt_residual(problem: Problem, x: np.ndarray) -> float:
    """The largest violation of the optimality conditions at x, with the best multipliers for it.

    Constraints C x >= b with multipliers u: stationarity |H x + f - C' u|, violation max(b - C x, 0). Multipliers of
    inequalities are not negative and belong to constraints that hold with equality at x (within the violation tolerance): they are
    found by least squares, so that the residual judges x alone, whoever computed it.
    """
    if not np.isfinite(x).all():
        return np.inf
    C, b, equalities = rows_of(problem)
    slack = C @ x - b
    scale = 1 + np.abs(C).max(axis=1, initial=1) if len(C) else np.ones(0)
    violation = max([np.abs(slack[:equalities]).max(initial=0.0), np.maximum(-slack[equalities:], 0).max(initial=0.0)])
    gradient = problem.H @ x + problem.f
    active = np.flatnonzero((np.arange(len(b)) < equalities) | (slack <= 1e-7 * scale))
    while len(active):
        u, *_ = np.linalg.lstsq(C[active].T, gradient, rcond=None)
        wrong = (u < -1e-9) & (active >= equalities)
        if not wrong.any():
            return float(max(violation, np.abs(gradient - C[active].T @ u).max()))
        active = np.delete(active, int(np.argmin(np.where(wrong, u, 0))))
    return float(max(violation, np.abs(gradient).max()))


def check_problem(problem: Problem) -> None:
    """Raises ValueError for numbers that are not finite, shapes that do not fit, or an H that is not positive definite."""
    n = len(problem.f)
    if problem.H.shape != (n, n) or not np.allclose(problem.H, problem.H.T):
        raise ValueError(f"H: got shape {problem.H.shape}, wanted a symmetric ({n}, {n})")
    for name in ("H", "f", "G", "h", "E", "e"):
        value = getattr(problem, name)
        if value is not None and name not in ("h",) and not np.isfinite(value).all():
            raise ValueError(f"{name}: holds a number that is not finite; likely the state is not")
    for rows, limits, names in ((problem.G, problem.h, "G, h"), (problem.E, problem.e, "E, e")):
        if (rows is None) != (limits is None) or (rows is not None and rows.shape != (len(limits), n)):
            raise ValueError(f"{names}: shapes do not fit {n} variables")
    for name in ("low", "high"):
        limit = getattr(problem, name)
        if limit is not None and (len(limit) != n or np.isnan(limit).any()):
            raise ValueError(f"{name}: wanted {n} numbers, none of them NaN")
    try:
        np.linalg.cholesky(problem.H)
    except np.linalg.LinAlgError:
        raise ValueError("H: is not positive definite, so the minimum is not one point") from None


def active_set(problem: Problem, most_iterations: int = 10_000, seconds: float = np.inf) -> Solution:
    """Goldfarb and Idnani's dual method: start at the free minimum, add the most violated constraint, drop what blocks.

    Every iterate is optimal for the constraints it holds, so the objective only grows and the method ends after finitely many
    steps: at the solution, or at a constraint that no step can reach, which proves that there is none. Raises ValueError as
    check_problem. Source: Goldfarb and Idnani 1983; differs in that small systems are solved anew instead of updated.
    """
    check_problem(problem)
    started = time.monotonic()
    C, b, equalities = rows_of(problem)
    factor = np.linalg.cholesky(problem.H)
    # In y = L' x the objective is |y|^2 / 2 + ...: projections there are plain geometry.
    inverse = np.linalg.inv(factor)
    N = C @ inverse.T  # rows are constraint normals in y
    lengths = np.linalg.norm(N, axis=1)
    y = -inverse @ problem.f
    held: list[int] = []
    signs: dict[int, float] = {}
    u = np.zeros(0)
    for iteration in range(1, most_iterations + 1):
        if time.monotonic() - started > seconds:
            return _answer(problem, inverse.T @ y, TIMED_OUT, iteration)
        p = _most_violated(N, b, y, lengths, held, equalities)
        if p is None:
            return _answer(problem, inverse.T @ y, SOLVED, iteration)
        signs[p] = -1.0 if p < equalities and N[p] @ y - b[p] > 0 else 1.0
        n = signs[p] * N[p]
        u_new = 0.0
        while True:
            basis = np.array([signs[i] * N[i] for i in held]).T.reshape(len(n), len(held))
            r = np.linalg.lstsq(basis, n, rcond=None)[0] if held else np.zeros(0)
            z = n - basis @ r
            gap = signs[p] * b[p] - n @ y  # what is missing, positive
            full = gap / (z @ n) if np.linalg.norm(z) > 1e-9 * lengths[p] else np.inf
            blocking = [(u[k] / r[k], k) for k, i in enumerate(held) if i >= equalities and r[k] > ROUNDING]
            partial, k = min(blocking, default=(np.inf, -1))
            step = min(full, partial)
            if np.isinf(step):
                return _answer(problem, inverse.T @ y, INFEASIBLE, iteration)
            if np.isfinite(full):
                y = y + step * z
            u, u_new = u - step * r, u_new + step
            if step == full:
                held, u = [*held, p], np.append(u, u_new)
                break
            del held[k]
            u = np.delete(u, k)
    return _answer(problem, inverse.T @ y, UNFINISHED, most_iterations)


def _most_violated(N, b, y, lengths, held: list[int], equalities: int) -> int | None:
    """The constraint farthest from holding, measured in its own length; equalities before inequalities."""
    slack = N @ y - b
    slack[:equalities] = -np.abs(slack[:equalities])
    far = slack / np.maximum(lengths, 1e-300)
    far[held] = 0.0
    scale = ROUNDING * (1 + np.abs(y).max(initial=0))
    open_equalities = [i for i in range(equalities) if i not in held and far[i] < -scale]
    if open_equalities:
        return open_equalities[0]
    if not len(far):
        return None
    p = int(np.argmin(far))
    return p if far[p] < -scale else None


def _answer(problem: Problem, x: np.ndarray, status: str, iterations: int) -> Solution:
    return Solution(x, status, kkt_residual(problem, x), iterations, problem.value(x))


def projected_gradient(
    problem: Problem, tolerance: float = 1e-15, most_iterations: int = 100_000, start: np.ndarray | None = None
) -> Solution:
    """Nesterov's accelerated gradient with projection onto the box, for problems without G and E.

    x+ = clip(y - (H y + f) / L), y = x+ + m (x+ - x), L the largest and mu the smallest eigenvalue of H,
    m = (sqrt L - sqrt mu) / (sqrt L + sqrt mu). Stops when x stays where one plain projected step puts it, to `tolerance`.
    """
    check_problem(problem)
    if problem.G is not None or problem.E is not None:
        raise ValueError("projected_gradient: takes a box only; active_set takes the other constraints")
    n = len(problem.f)
    low = np.full(n, -np.inf) if problem.low is None else problem.low
    high = np.full(n, np.inf) if problem.high is None else problem.high
    if (low > high).any():
        return Solution(np.clip(np.zeros(n), low, high), INFEASIBLE, np.inf, 0, np.nan)
    eigenvalues = np.linalg.eigvalsh(problem.H)
    L, mu = eigenvalues[-1], eigenvalues[0]
    momentum = (np.sqrt(L) - np.sqrt(mu)) / (np.sqrt(L) + np.sqrt(mu))
    x = y = np.clip(np.zeros(n) if start is None else start, low, high)
    for iteration in range(1, most_iterations + 1):
        new = np.clip(y - (problem.H @ y + problem.f) / L, low, high)
        x, y = new, new + momentum * (new - x)
        if iteration % 10 == 0:
            still = np.clip(x - (problem.H @ x + problem.f) / L, low, high)
            if np.abs(still - x).max() <= tolerance * (1 + np.abs(x).max()):
                return _answer(problem, x, SOLVED, iteration)
    return _answer(problem, x, UNFINISHED, most_iterations)


def hock_schittkowski() -> dict[str, tuple[Problem, float, float]]:
    """HS21, HS35 and HS76 as (problem, constant of the objective, known optimum). Source: Hock and Schittkowski 1981."""
    inf = np.inf
    return {
        "HS21": (
            Problem(
                np.diag([0.02, 2.0]), np.zeros(2), G=np.array([[-10.0, 1.0]]), h=np.array([-10.0]),
                low=np.array([2.0, -50.0]), high=np.array([50.0, 50.0]),
            ), -100.0, -99.96,
        ),
        "HS35": (
            Problem(
                np.array([[4.0, 2, 2], [2, 4, 0], [2, 0, 2]]), np.array([-8.0, -6, -4]),
                G=np.array([[1.0, 1, 2]]), h=np.array([3.0]), low=np.zeros(3), high=np.full(3, inf),
            ), 9.0, 1 / 9,
        ),
        "HS76": (
            Problem(
                np.array([[2.0, 0, -1, 0], [0, 1, 0, 0], [-1, 0, 2, 1], [0, 0, 1, 1]]), np.array([-1.0, -3, 1, -1]),
                G=np.array([[1.0, 2, 1, 1], [3, 1, 2, -1], [0, -1, -4, 0]]), h=np.array([5.0, 4, -1.5]),
                low=np.zeros(4), high=np.full(4, inf),
            ), 0.0, -4.6818181818181818,
        ),
    }  # fmt: skip
