"""Rewards of two values: what a prompt weighs by its difficulty, for each way to scale a group.

With success probability q, R in {0, 1} and k successes in a group of G, k ~ Bin(G, q), every estimator gives
E[g] = w grad q, with a weight w on the prompt:

    leave-one-out                 1
    group mean                    (G - 1) / G
    / std, ddof 0                 w_G(q) = E[sqrt(k (G - k))] / (G q (1 - q)); G = 2: 1; G -> inf: 1 / sqrt(q (1 - q))
    / std, ddof 1                 sqrt((G - 1) / G) w_G(q)
    / std, mixed groups only      w_G(q) / (1 - q^G - (1 - q)^G), at that many times the draws
    / mean                        (1 - (1 - q)^(G - 1)) / q; G -> inf: 1 / q

1 / sqrt(q (1 - q)) is the derivative of 2 arcsin(sqrt q): the objective that a large group divided by its std ascends
(arXiv 2510.13651). The difficulties shown are SUCCESSES, the group sizes GROUP_SIZES, the estimators SHOWN.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from extensions.estimators.enumerate import multisets
from extensions.estimators.line import Line, line_of
from extensions.estimators.policy import Case, policy_gradient
from extensions.estimators.sampled import row_gradients
from extensions.estimators.through import EXACT, verdict
from extensions.objectives import ROWS

SUCCESSES = (0.01, 0.05, 0.1, 0.5, 0.9)
GROUP_SIZES = (2, 4, 8, 16)
SHOWN = {
    "leave-one-out": "rloo",
    "group mean": "dr_grpo",
    "/ std, ddof 0": "grpo",
    "/ std, ddof 1": "grpo@verl-0.9.1",
    "/ std, mixed only": "dapo",
    "/ mean": "maxrl",
}
"""Name of an estimator -> the row of objectives.ROWS that shows it at the group size of the case."""


def binomial(q: float, group_size: int) -> np.ndarray:
    """Chances of k = 0 ... G successes."""
    k = np.arange(group_size + 1)
    return np.array([math.comb(group_size, i) for i in k], dtype=float) * q**k * (1 - q) ** (group_size - k)


def weight(q: float, group_size: int, ddof: int = 0) -> float:
    """w_G(q) = E[sqrt(k (G - k))] / (G q (1 - q)) with k ~ Bin(G, q); ddof 1: times sqrt((G - 1) / G)."""
    k = np.arange(group_size + 1)
    made = float(binomial(q, group_size) @ np.sqrt(k * (group_size - k)) / (group_size * q * (1 - q)))
    return made * math.sqrt((group_size - ddof) / group_size)


def weight_limit(q: float) -> float:
    """w of an endless group, 1 / sqrt(q (1 - q)) = d/dq 2 arcsin(sqrt q)."""
    return 1 / math.sqrt(q * (1 - q))


def mixed_chance(q: float, group_size: int) -> float:
    """1 - q^G - (1 - q)^G, the chance that a group has both rewards."""
    return 1 - q**group_size - (1 - q) ** group_size


def mean_of_mixed(q: float, group_size: int) -> float:
    """E[mean reward | the group is mixed] = (q - q^G) / (1 - q^G - (1 - q)^G)."""
    return (q - q**group_size) / mixed_chance(q, group_size)


def weight_of_mean(q: float, group_size: int) -> float:
    """w of A = (R - mean) / mean: (1 - (1 - q)^(G - 1)) / q."""
    return (1 - (1 - q) ** (group_size - 1)) / q


def success_of(case: Case) -> float | None:
    """The chance of the higher reward, where the rewards of the case take two values."""
    values = sorted(set(case.rewards))
    return float(case.p[case.R == values[1]].sum()) if len(values) == 2 else None


def line_at(q: float, group_size: int, estimator: str) -> Line:
    """One estimator at one difficulty: two answers, right with chance q. Its scale is w."""
    case = Case((q, 1 - q), (1.0, 0.0), group_size)
    row = ROWS[SHOWN[estimator]]
    drawn = row_gradients(row, case, multisets(case.p, group_size))
    truth = policy_gradient(case.p, case.R)
    made = line_of(f"q={q:g} G={group_size}: {estimator}", drawn.vectors, drawn.probabilities, truth, row.name)
    says = f"this prompt weighs {made.scale:.4f}" if abs(made.scale - 1) > EXACT else verdict(made, truth)
    if estimator == "/ std, ddof 0":
        says += f"; an endless group {weight_limit(q):.4f}"
    if drawn.draws_for_one > 1:
        says += f"; {drawn.draws_for_one:.4g} groups drawn for one used"
        says += f", mean reward there {mean_of_mixed(q, group_size):.4f}"
    return replace(made, meaning=says)


def table(case: Case) -> list[Line]:
    """The weight w(q) of a prompt with success probability q, rewards of two values.

    First w_G(q) of / std at every q and G, then every estimator at the group size of the case. With rewards of two values
    the case's own q stands first. Raises ValueError for a group of one.
    """
    if case.group_size < 2:
        raise ValueError(f"--group-size: got {case.group_size}, wanted at least 2: leave-one-out needs another answer")
    own = success_of(case)
    successes = dict.fromkeys([round(q, 12) for q in (*([] if own is None else [own]), *SUCCESSES)])
    lines = [line_at(q, G, "/ std, ddof 0") for q in successes for G in dict.fromkeys((*GROUP_SIZES, case.group_size))]
    others = [name for name in SHOWN if name != "/ std, ddof 0"]
    return lines + [line_at(q, case.group_size, name) for q in successes for name in others]
