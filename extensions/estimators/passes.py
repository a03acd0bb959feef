"""The table of passes: the same group of answers serves the second and the third step, and its ratio is stale by then.

A group of G answers comes from p. Each pass moves the logits by RATE times the row's gradient, so that after it every
group has a policy of its own, p_k. The ratio is p_k / p. A is leave-one-out, so the first pass is unbiased. A new
line is an entry in ROWS_OF.

The truth is d J at p_k, which depends on the group as well: mean is E[g], the truth E[d J], and trace_cov and mse are
those of the error g - d J, group by group. Two controls draw a second group that the policy has not been fitted to:
one from p_1, one from p with its ratio. They are unbiased; the ratio on the group that made the step is not, because
the step has gone where that group's luck was.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from extensions import objectives
from extensions.estimators.enumerate import multisets
from extensions.estimators.line import Line
from extensions.estimators.policy import Case, expected_reward, softmax
from extensions.estimators.through import told
from extensions.objectives import ROWS, Row

PASSES = 3
RATE = 1.0  # a step of all logits
CHUNK = 20_000  # groups that go through evaluate at once
CONTROLLED = 200  # groups; with more the controls, which pair every group with every other, are left out

_RATIO = replace(ROWS["rloo"], ratio="token", kl="none", kl_coef=0.0)
ROWS_OF: dict[str, Row] = {
    "no ratio": ROWS["rloo"],
    "ratio": _RATIO,
    "clip 0.2": ROWS["rloo@trl-1.16.0"],
    "dual clip 0.2, 3": ROWS["rloo@verl-0.9.1"],
    "CISPO 0.2": replace(_RATIO, surrogate="cispo"),
    "SAPO": replace(_RATIO, surrogate="sapo"),
}


def policy_gradients(p: np.ndarray, R: np.ndarray) -> np.ndarray:
    """d J / d logits = p (R - J) of many policies p (M, K)."""
    return p * (R - (p @ R)[:, None])


def gradients(row: Row, p: np.ndarray, old: np.ndarray, R: np.ndarray, members: np.ndarray) -> np.ndarray:
    """(M, K): the ascent direction of each group `members` (M, G) at its own policy p (M, K), drawn from old (M, K)."""
    parts = np.array_split(np.arange(len(members)), -(-len(members) // CHUNK))
    return np.concatenate([_of_chunk(row, p[part], old[part], R, members[part]) for part in parts])


def _of_chunk(row: Row, p: np.ndarray, old: np.ndarray, R: np.ndarray, members: np.ndarray) -> np.ndarray:
    groups, size = members.shape
    logps, old_logps = (np.log(np.take_along_axis(x, members, axis=1)).ravel() for x in (p, old))
    # The reference is the policy that sampled, so a KL in the reward is 0.
    batch = objectives.make_batch(
        logps=logps, old_logps=old_logps, ref_logps=old_logps, rewards=R[members.ravel()],
        group_ids=np.repeat(np.arange(groups), size),
    )  # fmt: skip
    slope = -objectives.evaluate(row, batch).dloss_dlogps.numpy().reshape(groups, size)
    # One batch of M groups weighs each 1 / M; s_i = e_i - p, so sum_i c_i s_i = (c at each answer) - p sum_i c_i.
    at_answers = np.zeros_like(p)
    np.add.at(at_answers, (np.arange(groups)[:, None], members), slope)
    return groups * (at_answers - p * slope.sum(axis=1, keepdims=True))


class Pass(NamedTuple):
    """One pass of every group: the policies before it (M, K), the gradients there, and the policies after it."""

    before: np.ndarray
    gradients: np.ndarray
    after: np.ndarray


def passes(row: Row, case: Case, members: np.ndarray, count: int = PASSES) -> list[Pass]:
    """The row's own trajectory over each group, step by step."""
    old = np.tile(case.p, (len(members), 1))
    made, p = [], old
    for _ in range(count):
        g = gradients(row, p, old, case.R, members)
        made.append(Pass(p, g, softmax(np.log(p) + RATE * g)))
        p = made[-1].after
    return made


def moving(estimator: str, g: np.ndarray, true: np.ndarray, chances: np.ndarray, row: str | None, more: str) -> Line:
    """A line of an estimator whose truth (M, K) moves with the outcome: mean E[g], truth E[true], variance of the error."""
    truth = chances @ true
    return told(estimator, g - true + truth, chances, truth, row, more=more)


def control_lines(case: Case, members: np.ndarray, chances: np.ndarray, moved: np.ndarray) -> list[Line]:
    """A second group at p_1 (M, K), the policies `moved` by the first pass over the first group."""
    M, R = len(members), case.R
    first, second = (index.ravel() for index in np.indices((M, M)))
    p, old = moved[first], np.tile(case.p, (M * M, 1))
    true = policy_gradients(p, R)
    made = []
    for name, drawn, row in (("a new group", p, ROWS["rloo"]), ("another old group, ratio", old, _RATIO)):
        # The multinomial chance under p_1 is that under p times the product of the answers' ratios.
        ratios = np.take_along_axis(drawn / old, members[second], axis=1).prod(axis=1)
        both = chances[first] * chances[second] * ratios
        g = gradients(row, p, drawn, R, members[second])
        made.append(moving(f"pass 2 with {name}", g, true, both, named_row(row), "not the group that made the step"))
    return made


def named_row(row: Row) -> str | None:
    return row.name if ROWS.get(row.name) == row else None


def table(case: Case) -> list[Line]:
    """The second and third pass over one group, each at the policy that its own step has made.

    Raises ValueError for a group of one.
    """
    if case.group_size < 2:
        raise ValueError(f"--group-size: got {case.group_size}, wanted at least 2: leave-one-out needs another answer")
    members, chances = multisets(case.p, case.group_size)
    R = case.R
    made = []
    for name, row in ROWS_OF.items():
        for number, (p, g, after) in enumerate(passes(row, case, members), start=1):
            if number == 1 and made:
                continue  # every ratio is 1: the first pass is the same for all
            label = "pass 1" if number == 1 else f"pass {number}: {name}"
            gain = f"E[J] {float(chances @ (after @ R)):.4f}, from {expected_reward(case.p, R):.4f}"
            made.append(moving(label, g, policy_gradients(p, R), chances, named_row(row), gain))
    if len(members) <= CONTROLLED:
        moved = passes(ROWS_OF["ratio"], case, members, 1)[0].after
        made += control_lines(case, members, chances, moved)
    return made
