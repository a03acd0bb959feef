"""Model-predictive control: condense a linear prediction into one quadratic program, solve it, apply the first input, again.

Prediction x_(k+1) = A x_k + B u_k from x_0 gives all states X = Phi x_0 + Gamma U, so that the cost

    sum_(k=0)^(N-1) (x_k - x_ref)' Q (x_k - x_ref) + u_k' R u_k  +  (x_N - x_ref)' P (x_N - x_ref)

is U' H U / 2 + f' U plus what U does not move, with H = 2 (Gamma' Qb Gamma + Rb), f = 2 Gamma' Qb (Phi x_0 - X_ref). It is not
PPO's reuse of a batch: each solve plans from the state just measured, and all but its first input is thrown away.
"""

from __future__ import annotations

from typing import Callable, NamedTuple

import numpy as np

from extensions.control.qp import Problem, Solution, active_set


class Model(NamedTuple):
    """A linear model, its cost, and its limits (None: no limit; entries may be infinite)."""

    A: np.ndarray
    B: np.ndarray
    Q: np.ndarray
    R: np.ndarray
    P: np.ndarray  # weight of the last state
    horizon: int
    u_low: np.ndarray | None = None
    u_high: np.ndarray | None = None
    x_low: np.ndarray | None = None
    x_high: np.ndarray | None = None


class Condensed(NamedTuple):
    """What does not depend on the state: made once, used at every step."""

    model: Model
    Phi: np.ndarray  # [N n, n]
    Gamma: np.ndarray  # [N n, N m]
    weights: np.ndarray  # Qb [N n, N n]
    H: np.ndarray

    def problem(self, x0: np.ndarray, x_ref: np.ndarray | None = None) -> Problem:
        """The quadratic program of one state; x_ref [n] is the same at every step of the horizon."""
        model, N = self.model, self.model.horizon
        free = self.Phi @ x0
        target = np.zeros_like(free) if x_ref is None else np.tile(x_ref, N)
        f = 2 * self.Gamma.T @ self.weights @ (free - target)
        G, h = [], []
        for limit, sign in ((model.x_high, 1.0), (model.x_low, -1.0)):
            if limit is not None:
                kept = np.isfinite(np.tile(limit, N))
                G.append(sign * self.Gamma[kept])
                h.append(sign * (np.tile(limit, N) - free)[kept])
        low, high = (None if limit is None else np.tile(limit, N) for limit in (model.u_low, model.u_high))
        rows = (np.concatenate(G), np.concatenate(h)) if G else (None, None)
        return Problem(self.H, f, *rows, low=low, high=high)


def condense(model: Model) -> Condensed:
    """Phi, Gamma and H of a model. Row block k of Phi is A^(k+1); block (k, j) of Gamma is A^(k-j) B for j <= k."""
    n, m, N = len(model.A), model.B.shape[1], model.horizon
    powers = [np.eye(n)]
    for _ in range(N):
        powers.append(model.A @ powers[-1])
    Phi = np.concatenate(powers[1:])
    Gamma = np.zeros((N * n, N * m))
    for k in range(N):
        for j in range(k + 1):
            Gamma[k * n : (k + 1) * n, j * m : (j + 1) * m] = powers[k - j] @ model.B
    weights = np.kron(np.eye(N), model.Q)
    weights[-n:, -n:] = model.P
    H = 2 * (Gamma.T @ weights @ Gamma + np.kron(np.eye(N), model.R))
    return Condensed(model, Phi, Gamma, weights, (H + H.T) / 2)


Solver = Callable[[Problem], Solution]


class Plan(NamedTuple):
    u: np.ndarray  # [N, m]
    x: np.ndarray  # [N + 1, n], predicted, x_0 first
    solution: Solution


def plan(condensed: Condensed, x0: np.ndarray, x_ref: np.ndarray | None = None, solver: Solver = active_set) -> Plan:
    """Inputs and predicted states over the horizon. Look at `solution.usable` before using them."""
    solution = solver(condensed.problem(x0, x_ref))
    model = condensed.model
    states = (condensed.Phi @ x0 + condensed.Gamma @ solution.x).reshape(model.horizon, -1)
    return Plan(solution.x.reshape(model.horizon, -1), np.concatenate([x0[None], states]), solution)


class ClosedLoop(NamedTuple):
    x: np.ndarray  # [steps + 1, n]
    u: np.ndarray  # [steps, m]
    cost: float
    plans: list[Plan]


def receding_horizon(
    condensed: Condensed, x0: np.ndarray, steps: int, x_ref: np.ndarray | None = None, solver: Solver = active_set
) -> ClosedLoop:
    """Plan, apply the first input, measure, plan again. Raises ValueError where a plan is not usable: see stack for a policy.

    cost: sum of (x - x_ref)' Q (x - x_ref) + u' R u over the steps, without the last state.
    """
    model = condensed.model
    target = np.zeros(len(x0)) if x_ref is None else x_ref
    x, states, inputs, plans, cost = x0, [x0], [], [], 0.0
    for step in range(steps):
        plans.append(plan(condensed, x, x_ref, solver))
        if not plans[-1].solution.usable:
            raise ValueError(f"step {step}: the plan is {plans[-1].solution.status}")
        u = plans[-1].u[0]
        cost += float((x - target) @ model.Q @ (x - target) + u @ model.R @ u)
        x = model.A @ x + model.B @ u
        states.append(x)
        inputs.append(u)
    return ClosedLoop(np.array(states), np.array(inputs), cost, plans)


def clipped_feedback(model: Model, K: np.ndarray, x0: np.ndarray, steps: int) -> float:
    """The cost of u = clip(-K x): what a regulator does that does not know its limits."""
    x, cost = x0, 0.0
    for _ in range(steps):
        u = np.clip(-K @ x, model.u_low, model.u_high)
        cost += float(x @ model.Q @ x + u @ model.R @ u)
        x = model.A @ x + model.B @ u
    return cost


def quadcopter() -> tuple[Model, np.ndarray, np.ndarray]:
    """The 12-state, 4-input quadcopter problem that solvers are compared on: (model, x_0, x_ref).

    Linearised around hover, dt .1, horizon 10; inputs relative to hover. Its cost is written with a factor 1/2 in that example;
    so are Q, R and P here. Source: the OSQP documentation's example on model-predictive control.
    """
    n, g, d = 12, 0.0488, 0.0992
    A = np.eye(n)
    A[[0, 1, 2], [6, 7, 8]] = 0.1
    A[3, [0, 6, 9]] = [g, 0.0016, d]
    A[4, [1, 7, 10]] = [-g, -0.0016, d]
    A[5, 11] = d
    A[9, [0, 6, 9]] = [0.9734, g, 0.9846]
    A[10, [1, 7, 10]] = [-0.9734, -g, 0.9846]
    A[11, 11] = 0.9846
    B = np.zeros((n, 4))
    for row, size in ((0, 0.0726), (3, 0.0006), (6, 1.4512), (9, 0.0236)):
        B[row] = [0, -size, 0, size]
    for row, size in ((1, -0.0726), (4, 0.0006), (7, -1.4512), (10, 0.0236)):
        B[row] = [size, 0, -size, 0]
    for row, size in ((2, 0.0152), (8, 0.3049)):
        B[row] = [-size, size, -size, size]
    B[5], B[11] = 0.0106, 0.2107
    Q = np.diag([0, 0, 10, 10, 10, 10, 0, 0, 0, 5, 5, 5]) / 2.0
    hover = 10.5916
    x_low, x_high = np.full(n, -np.inf), np.full(n, np.inf)
    x_low[[0, 1, 5]], x_high[[0, 1]] = [-np.pi / 6, -np.pi / 6, -1.0], np.pi / 6
    limits = dict(u_low=np.full(4, 9.6 - hover), u_high=np.full(4, 13.0 - hover), x_low=x_low, x_high=x_high)
    return Model(A, B, Q, 0.05 * np.eye(4), Q, 10, **limits), np.zeros(n), np.eye(n)[2]
