"""Worked examples: every number that the command prints, computed here and set beside the known one."""

from __future__ import annotations

import math

import numpy as np

from extensions.control import contract, qp, wbc
from extensions.control.mpc import Condensed, Model, clipped_feedback, condense, plan, quadcopter, receding_horizon
from extensions.control.riccati import Regulator, double_integrator, solve_riccati
from rl_lab import WorkedExample


def example(title: str, formula: str, inputs: str, result, expected, digits: int = 6) -> WorkedExample:
    numbers = [float(x) + 0.0 for x in np.ravel(result)]
    return WorkedExample("", title, formula, inputs, [round(x, 12) + 0.0 for x in numbers], list(expected), digits)


def regulator(dt: float = 1.0) -> Regulator:
    """The double integrator's, with Q = I and R = 1."""
    return solve_riccati(*double_integrator(dt), np.eye(2), np.eye(1))


def limited(horizon: int = 10, limit: float | None = 1.0, terminal: bool = True) -> Condensed:
    """The double integrator's MPC, |u| <= limit, last state weighted by the Riccati P (or by Q)."""
    A, B = double_integrator()
    box = {} if limit is None else dict(u_low=np.array([-limit]), u_high=np.array([limit]))
    return condense(Model(A, B, np.eye(2), np.eye(1), regulator().P if terminal else np.eye(2), horizon, **box))


def riccati_examples() -> list[WorkedExample]:
    one = np.eye(1)
    golden = (1 + math.sqrt(5)) / 2
    scalar, r = solve_riccati(one, one, one, one), regulator()
    A, B = double_integrator()
    poles = np.linalg.eigvals(A - B @ r.K)
    return [
        example(
            "Riccati, one state",
            "P = 1 + P - P^2 / (1 + P): P^2 = P + 1",
            "a = b = q = r = 1",
            [scalar.P, scalar.K],
            [golden, golden - 1],
        ),
        example(
            "Riccati, double integrator",
            "P = Q + A'P(A - BK), K = (R + B'PB)^-1 B'PA",
            "dt 1, Q = I, R = 1: P11, P12, P22, K",
            [r.P[0, 0], r.P[0, 1], r.P[1, 1], *r.K[0]],
            [2.36710149, math.sqrt(5) / 2, 2.58748293, 0.43448324, 1.02846593],
        ),
        example(
            "its closed loop",
            "poles of A - BK",
            "real and imaginary part",
            [poles[0].real, abs(poles[0].imag)],
            [0.377146, 0.215723],
        ),
    ]


def mpc_examples() -> list[WorkedExample]:
    A, B = double_integrator()
    r, start = regulator(), np.array([5.0, 0.0])
    firsts = [plan(limited(N, None), start).u[0, 0] for N in (1, 3, 10)]
    box = limited()
    planned = plan(box, start)
    starts = ((5, 0), (10, 0), (10, 2), (20, 0))
    loops = [receding_horizon(box, np.array(s, dtype=float), 60).cost for s in starts]
    clipped = [clipped_feedback(box.model, r.K, np.array(s, dtype=float), 60) for s in starts]
    model, x0, target = quadcopter()
    drone = condense(model)
    flight = receding_horizon(drone, x0, 15, target)
    return [
        example(
            "MPC without limits is the regulator",
            "with the Riccati P at the end u_0 = -K x_0 at every horizon",
            "x_0 = (5, 0), N = 1, 3, 10",
            firsts,
            [-2.1724162164] * 3,
        ),
        example(
            "what the last weight is for",
            "with Q in its place a short horizon is short-sighted",
            "N = 3",
            plan(limited(3, None, False), start).u[0],
            [-2.13027584],
        ),
        example("cost to go", "x_0' P x_0", "x_0 = (5, 0)", [start @ r.P @ start], [59.1775372737]),
        example(
            "MPC with |u| <= 1, N = 10",
            "min U'HU/2 + f'U over the box",
            "x_0 = (5, 0): first four inputs, objective",
            [*planned.u[:4, 0], planned.solution.objective],
            [-1.0, -0.92670866, 0.66218256, 0.67441937, -242.7185550534],
        ),
        example(
            "60 steps in closed loop",
            "plan, apply the first input, measure, plan again",
            "x_0 = (5,0), (10,0), (10,2), (20,0)",
            loops,
            [66.4590, 320.2835, 729.9697, 1644.3503],
            4,
        ),
        example(
            "a regulator that is clipped",
            "u = clip(-K x): does not plan for its limit",
            "the same starts",
            clipped,
            [66.4590, 320.3400, 731.6420, 1744.7090],
            4,
        ),
        example(
            "quadcopter, first plan",
            "12 states, 4 inputs, N = 10, limits on both",
            "first input, objective",
            [*flight.plans[0].u[0], flight.plans[0].solution.objective],
            [-0.9916, 1.74838767, -0.9916, 1.74838767, -40.983485977],
        ),
        example("quadcopter, height after 15 steps", "target 1", "from 0", [flight.x[-1, 2]], [0.99949599]),
    ]


def qp_examples() -> list[WorkedExample]:
    examples = []
    for name, (problem, constant, optimum) in qp.hock_schittkowski().items():
        solution = qp.active_set(problem)
        examples.append(
            example(
                name,
                "active set; objective and largest KKT residual",
                "Hock and Schittkowski's problem",
                [solution.objective + constant, solution.residual],
                [optimum, 0.0],
                8,
            )
        )
    return examples


def infeasible() -> qp.Problem:
    """u <= 1 and u >= 2."""
    return qp.Problem(np.eye(1), np.zeros(1), G=np.array([[1.0], [-1.0]]), h=np.array([1.0, -2.0]))


def wbc_examples() -> list[WorkedExample]:
    first, second = np.array([[1.0, 0.0]]), np.array([[1.0, 1.0], [1.0, -1.0]])

    def tasks(weight: float) -> list[wbc.Task]:
        return [wbc.Task(first, np.ones(1), weight), wbc.Task(second, np.zeros(2))]

    sums = [wbc.weighted(tasks(w)) for w in (1, 1e2, 1e4, 1e8)]
    one = [
        wbc.weighted([wbc.Task(np.eye(1), np.ones(1), w), wbc.Task(np.eye(1), np.zeros(1))]).dq[0] for w in (10, 100, 1000)
    ]
    friction, balance = wbc.contact_demands(6.0, 0.5, 0.8, 0.1)
    return [
        example(
            "weights",
            "x = 1 (weight w) against x = 0: error 1 / (1 + w), never 0",
            "w = 10, 100, 1000",
            [1 - x for x in one],
            [1 / 11, 1 / 101, 1 / 1001],
        ),
        example(
            "hierarchy",
            "second task in the null space of the first",
            "J1 = [1, 0] -> 1, J2 = [[1, 1], [1, -1]] -> 0",
            wbc.hierarchy(tasks(1)),
            [1.0, 0.0],
        ),
        example(
            "weights on the same tasks: error",
            "2 / (w + 2)",
            "w = 1, 1e2, 1e4, 1e8",
            [1 - s.dq[0] for s in sums],
            [2 / 3, 2 / 102, 2 / 10002, 2 / (1e8 + 2)],
            8,
        ),
        example(
            "their price: condition number",
            "(w + 2) / 2",
            "the same weights",
            [s.condition for s in sums],
            [1.5, 51, 5001, 50000001],
            0,
        ),
        example(
            "a velocity controller is blind to forces",
            "tracks at residual 0; needs a <= mu g and h a / g under the foot",
            "a = 6, mu = .5, h = .8: needed, available; shift of the pressure",
            [friction.needs, friction.available, balance.needs],
            [6, 4.905, 0.48929664],
        ),
    ]


def contract_examples() -> list[WorkedExample]:
    results = {name: contract.exact(name) for name in contract.CONTRACTS}
    true = [contract.true_gradient(reward) for reward in contract.REWARDS.values()]
    within = [contract.mixed_mean_within(k) for k in (2, 4, 8)]
    right = ("sampled", "executed", "capg")
    return [
        example(
            "share of actions that the limits clip", "P(|a| > 1)", "a ~ N(.5, .8^2)", [contract.clipped_share()], [0.296382]
        ),
        example(
            "mean ratio to the mean .6: by a, by u, by the distribution of u",
            "1 where the ratio is one",
            "sampled, executed, capg",
            [results[c].ratio_mean for c in right],
            [1.0, 0.977932, 1.0],
        ),
        example(
            "mixed: stored log p(a), new log p(u)",
            "share of ratios above 1.2 although nothing has changed",
            "right: 0",
            [results["mixed"].share_above_band],
            [0.216835],
        ),
        example(
            "mixed: its mean grows without end",
            "E[ratio; |a - m| <= k s]",
            "k = 2, 4, 8",
            within,
            [1.163438, 1.957332, 3.545121],
        ),
        example(
            "gradient of E[u] in the mean: true, by a, by u, capg",
            "sum over a of R(u) d log p / d m",
            "R = u",
            [true[0], *(results[c].gradients["R = u"] for c in right)],
            [0.703618, 0.703618, 0.486477, 0.703618],
        ),
        example(
            "gradient for another reward: true, by a, by u, capg",
            "the same",
            "R = -(u - .3)^2",
            [true[1], *(results[c].gradients["R = -(u - 0.3)^2"] for c in right)],
            [0.133552, 0.133552, 0.207815, 0.133552],
        ),
        example(
            "variance of the right two: by a, capg",
            "knowing the masses at the limits lowers it",
            "R = u; R = -(u - .3)^2",
            [results[c].variances[r] for r in contract.REWARDS for c in ("sampled", "capg")],
            [0.703062, 0.593805, 1.267875, 1.226482],
        ),
    ]


SECTIONS = {
    "Linear-quadratic control": riccati_examples,
    "Model-predictive control": mpc_examples,
    "Quadratic programs": qp_examples,
    "Whole-body control": wbc_examples,
    "The action contract u = C(s, a)": contract_examples,
}
