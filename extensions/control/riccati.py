"""The discrete Riccati recursion and the linear-quadratic gain it gives.

Minimise sum_k x_k' Q x_k + u_k' R u_k with x_(k+1) = A x_k + B u_k. The cost to go is x' P x; one step backwards is

    K = (R + B' P B)^-1 B' P A
    P = Q + A' P (A - B K)

and u = -K x is optimal with the P ahead. Repeated from P = Q until nothing changes, P is the infinite-horizon cost. Arrays are
float64: A [n, n], B [n, m], Q [n, n], R [m, m]. Source: any text on LQR; Kalman 1960.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# The recursion ends when a step changes no entry of P by more than this part of its largest entry.
SETTLED = 1e-15


class Regulator(NamedTuple):
    P: np.ndarray  # cost to go
    K: np.ndarray  # gain: u = -K x
    steps: int


def riccati_step(A: np.ndarray, B: np.ndarray, Q: np.ndarray, R: np.ndarray, P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One step backwards: (P before, gain K used there)."""
    K = np.linalg.solve(R + B.T @ P @ B, B.T @ P @ A)
    before = Q + A.T @ P @ (A - B @ K)
    return (before + before.T) / 2, K  # rounding must not let P drift from symmetry


def solve_riccati(A: np.ndarray, B: np.ndarray, Q: np.ndarray, R: np.ndarray, most_steps: int = 100_000) -> Regulator:
    """The fixed point of the recursion. Raises ValueError where it does not settle: (A, B) cannot be stabilised."""
    P = Q
    for step in range(1, most_steps + 1):
        before, K = riccati_step(A, B, Q, R, P)
        if not np.isfinite(before).all():
            break
        change, P = np.abs(before - P).max(), before
        if change <= SETTLED * np.abs(P).max():
            return Regulator(P, np.linalg.solve(R + B.T @ P @ B, B.T @ P @ A), step)
        if step > 200 and change > 1e12:
            break
    raise ValueError("the Riccati recursion does not settle; likely (A, B) cannot be stabilised, or Q does not see a mode")


def double_integrator(dt: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Position and velocity under an acceleration held for dt: x' = x + dt v + dt^2 u / 2, v' = v + dt u."""
    return np.array([[1.0, dt], [0.0, 1.0]]), np.array([[dt * dt / 2], [dt]])
