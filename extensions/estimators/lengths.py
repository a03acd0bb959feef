"""The table of lengths: what the denominator of a loss does to the direction of the gradient, and to the expected length.

The world is S1 (sequences.py), whose right answers are longer. Groups of G answers, every one of them enumerated and
sent through objectives.evaluate; each group is a batch of its own. A new line is an entry in REDUCTIONS: a row of
objectives.ROWS as it stands, or a neighbour of one. The reference is the policy itself, so a KL adds nothing.

Drift: d E[length] along the unit step in the direction of E[g], in tokens; that of the true gradient stands beside
it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from extensions import objectives
from extensions.estimators.enumerate import multisets
from extensions.estimators.line import Line
from extensions.estimators.policy import Case
from extensions.estimators.sequences import S1, Sequences
from extensions.estimators.through import told
from extensions.objectives import ROWS, Batch, Row

GROUP_SIZES = (2, 3)
BUDGET = 3  # C of a constant denominator: the longest answer
PAIRED = 2  # group size where a batch holds two groups

_GRPO, _DR = replace(ROWS["grpo"], kl="none", kl_coef=0.0), ROWS["dr_grpo"]
REDUCTIONS: dict[str, Row] = {
    "leave-one-out, sum": ROWS["rloo"],
    "leave-one-out, sum / constant": replace(ROWS["dr_grpo@trl-1.16.0"], baseline="leave_one_out"),
    "centred, sum (Dr. GRPO)": _DR,
    "centred, sum / constant": ROWS["dr_grpo@trl-1.16.0"],
    "centred, sum / padded width": ROWS["dr_grpo@verl-0.9.1"],
    "centred, per-response mean": replace(_GRPO, scale="none"),
    "centred, token mean": replace(_DR, reduction="mean_over_tokens"),
    "std, sum": replace(_DR, scale="group_std"),
    "std, per-response mean (GRPO)": ROWS["grpo"],
    "std, token mean (DAPO's)": ROWS["bnpo"],
    "std, token mean, mixed only": ROWS["dapo"],
    "length-weighted baseline (OPO)": ROWS["opo@verl-0.9.1"],
    "std, T times the mean (LUSPO)": ROWS["luspo@trl-1.16.0"],
}
IN_BATCH = ("centred, token mean", "std, token mean (DAPO's)")  # also shown with two groups behind one denominator


class Groups(NamedTuple):
    """Every group of G answers of a world."""

    members: np.ndarray  # (M, G)
    probabilities: np.ndarray  # (M,)
    batch: Batch  # M * G rows, one group after the other


def groups_of(world: Sequences, size: int) -> Groups:
    """Every group of `size` answers, drawn by the policy itself."""
    members, probabilities = multisets(world.chances, size)
    flat = members.ravel()
    logps = world.logps[flat]
    batch = objectives.make_batch(
        logps=logps, old_logps=logps, ref_logps=logps, mask=world.mask[flat], rewards=world.rewards[flat],
        group_ids=np.repeat(np.arange(len(members)), size), budget=BUDGET,
    )  # fmt: skip
    return Groups(members, probabilities, batch)


def weight_alone(row: Row, lengths: np.ndarray) -> np.ndarray:
    """What a token of each answer weighs where its group is the whole batch; lengths (M, G) tokens -> (M, G)."""
    answers, whole = lengths.shape[1], lengths.sum(axis=1, keepdims=True)
    by = {
        "mean_per_response": lambda: 1 / (answers * (lengths + row.length_eps)),
        "mean_over_tokens": lambda: 1 / whole,
        "mean_over_window": lambda: 1 / whole,
        "sum_per_response": lambda: 1 / answers,
        "sum_over_budget": lambda: 1 / (answers * BUDGET),
        "sum_over_width": lambda: 1 / (answers * lengths.max(axis=1, keepdims=True)),
    }
    return np.broadcast_to(by[row.reduction](), lengths.shape)


def gradients(row: Row, world: Sequences, groups: Groups) -> np.ndarray:
    """(M, T V): the ascent direction of every group, as if it were a batch of its own.

    All groups go through evaluate at once; a token's gradient is then turned from its weight there into its weight alone.
    """
    members, _, batch = groups
    slope = objectives.evaluate(row, batch).dloss_dlogps.numpy()
    together = objectives.reduction_weights(row, batch).numpy()
    alone = weight_alone(row, world.lengths[members]).reshape(-1, 1)
    parts = world.gradients(slope * alone / together, members.ravel())
    return -parts.reshape(*members.shape, -1).sum(axis=1)


def used_by(row: Row, groups: Groups) -> np.ndarray:
    """(M,) bool: the groups that the row's filter leaves in the batch."""
    return objectives.kept_rows(row, groups.batch).numpy().reshape(groups.members.shape)[:, 0]


def two_in_a_batch(row: Row, world: Sequences, groups: Groups, both: np.ndarray) -> np.ndarray:
    """A token mean over two groups, `both` (M2, 2): (N_1 g_1 + N_2 g_2) / (N_1 + N_2), (M2, T V)."""
    tokens = world.lengths[groups.members].sum(axis=1)
    sums = tokens[:, None] * gradients(row, world, groups)
    return sums[both].sum(axis=1) / tokens[both].sum(axis=1)[:, None]


def drift_of(line: Line, world: Sequences = S1) -> float:
    """d E[length] along the unit step of a line of this table, tokens."""
    return world.drift(np.array(line.mean))


def table(case: Case | None = None, world: Sequences = S1) -> list[Line]:
    """Answers of up to three tokens, right ones longer, in groups of 2 and 3: one policy, whatever numbers are given.

    `case` is not read: the world is S1.
    """
    made = []
    for size in GROUP_SIZES:
        groups = groups_of(world, size)
        for name, row in REDUCTIONS.items():
            used, vectors = used_by(row, groups), gradients(row, world, groups)
            chances = groups.probabilities[used] / groups.probabilities[used].sum()
            made.append(_line(f"G={size}: {name}", row, vectors[used], chances, world))
        if size == PAIRED:
            both, chances = multisets(groups.probabilities, 2)
            for name in IN_BATCH:
                row = REDUCTIONS[name]
                vectors = two_in_a_batch(row, world, groups, both)
                made.append(_line(f"two groups of {size}: {name}", row, vectors, chances, world))
    return made


def _line(name: str, row: Row, vectors: np.ndarray, chances: np.ndarray, world: Sequences) -> Line:
    line = told(name, vectors, chances, world.policy_gradient, row.name if ROWS.get(row.name) == row else None)
    true = world.drift(world.policy_gradient)
    return replace(line, meaning=f"{line.meaning}; length drifts {drift_of(line, world):+.4f} (true {true:+.4f})")
