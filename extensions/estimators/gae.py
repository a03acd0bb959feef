"""GAE's lambda on a tree of two steps with a wrong critic: exact bias and variance. Four trajectories, three logits.

           root, left .6              s at each node: d log pi / d its logit of left = 1 - pi(left), or -pi(left)
          /             \\
     L, left .5      R, left .3       true values V(L) = .5, V(R) = .01, J = V(root) = .304
     /      \\        /      \\
    1        0     .5       -.2       the wrong critic says .304 at the root, .2 at L and .4 at R: the wrong way round

The estimator is one trajectory's sum_t A_t s_t through objectives.evaluate (baseline gae). At the root

    E[A_0 | L] - E[A_0 | R] = (1 - lam) (critic(L) - critic(R)) + lam (V(L) - V(R)),

so that lambda slides the first step's gradient from the critic's opinion (lambda 0) to the truth (lambda 1). Any critic at
all is harmless at lambda 1, where it is a baseline. The tree does not read the case. Lambdas are LAMBDAS, critics CRITICS.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from extensions import objectives
from extensions.estimators.line import Line, line_of
from extensions.estimators.policy import Case
from extensions.estimators.through import verdict

LEFT = np.array([0.6, 0.5, 0.3])  # chance of left at root, L, R
REWARDS = np.array([[1.0, 0.0], [0.5, -0.2]])  # [first step, second step], left before right
LAMBDAS = (0.0, 0.5, 0.8, 0.95, 1.0)


def values_of(left: np.ndarray) -> np.ndarray:
    """V at root, L, R."""
    second = left[1:] * REWARDS[:, 0] + (1 - left[1:]) * REWARDS[:, 1]
    return np.array([left[0] * second[0] + (1 - left[0]) * second[1], *second])


CRITICS: dict[str, np.ndarray] = {
    "true": values_of(LEFT),
    "none": np.zeros(3),
    "wrong": np.array([0.304, 0.2, 0.4]),
}
"""Critic -> what it says at root, L, R."""


def return_of_logits(logits: np.ndarray) -> float:
    """J as a function of the three logits of left: what finite differences differentiate."""
    return float(values_of(1 / (1 + np.exp(-logits)))[0])


def tree_gradient(left: np.ndarray = LEFT) -> np.ndarray:
    """d J / d logits: at each node chance of reaching it * p (1 - p) * (value of left - value of right)."""
    V = values_of(left)
    reached = np.array([1.0, left[0], 1 - left[0]])
    gain = np.array([V[1] - V[2], *(REWARDS[:, 0] - REWARDS[:, 1])])
    return reached * left * (1 - left) * gain


def trajectories() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The four trajectories: nodes (4, 2), scores (4, 2, 3), chances (4,)."""
    first, second = (index.ravel() for index in np.indices((2, 2)))  # 0 left, 1 right
    nodes = np.stack([np.zeros(4, dtype=int), 1 + first], axis=1)
    actions = np.stack([first, second], axis=1)
    of_left = LEFT[nodes]
    scores = np.eye(3)[nodes] * ((actions == 0) - of_left)[:, :, None]
    return nodes, scores, np.where(actions == 0, of_left, 1 - of_left).prod(axis=1)


def estimate(lam: float, critic: np.ndarray) -> np.ndarray:
    """sum_t A_t s_t of each trajectory, (4, 3), through objectives.evaluate."""
    nodes, scores, _ = trajectories()
    row = replace(
        objectives.ROWS["ppo"], lam=lam, value_loss="none", value_coef=0.0, reduction="sum_per_response"
    )
    batch = objectives.make_batch(
        logps=np.zeros((4, 2)), mask=np.ones((4, 2), dtype=bool), rewards=REWARDS.ravel(), values=critic[nodes]
    )
    slopes = objectives.evaluate(row, batch).dloss_dlogps.numpy()
    return -len(nodes) * (slopes[:, :, None] * scores).sum(axis=1)


def table(case: Case) -> list[Line]:
    """On a tree of two steps: lambda against a true, a missing and a wrong critic. The tree has numbers of its own."""
    truth, chances = tree_gradient(), trajectories()[2]
    lines = []
    for name, critic in CRITICS.items():
        for lam in LAMBDAS:
            made = line_of(f"lambda {lam:g}, critic {name}", estimate(lam, critic), chances, truth)
            lines.append(replace(made, meaning=verdict(made, truth) + first_step(made, truth)))
    return lines


def first_step(made: Line, truth: np.ndarray) -> str:
    return "; the first step is pushed the wrong way" if made.mean[0] * truth[0] < 0 else ""
