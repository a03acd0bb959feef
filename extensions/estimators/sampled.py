"""Rows of the objectives table on groups of sampled answers: every outcome goes through objectives.evaluate itself.

One prompt, answers of one token. A group a_1 ... a_G gives the row's loss, whose gradient with respect to the logits is

    g = -sum_i (d loss / d log p_{a_i}) s_{a_i} - (the parts that entropy and exact KL send to the logits)

the direction of ascent. Many groups are prompts of one batch, as long as the row looks at each group alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, NamedTuple

import numpy as np
import torch

from extensions import objectives
from extensions.estimators.enumerate import Outcomes, TooMany, multisets, pairs
from extensions.estimators.policy import Case, entropy_gradient, expected_reward, kl_gradient, policy_gradient, scores
from extensions.objectives import Batch, Row

# An advantage of the reader's or this table's own goes through the engine as it is: g = (1/G) sum A_i s_i.
GIVEN = Row("advantages as given", baseline="given", ratio="none", surrogate="plain", reduction="sum_per_response")

BATCH = 1_000_000  # numbers of one array that go through the engine at once
CALLS = 2_000  # batches of their own that one row may need: a second of time

Rule = Callable[[np.ndarray], np.ndarray]
"""Rewards (M, G), one group per row -> advantages (M, G)."""


class Drawn(NamedTuple):
    """What an estimator gives for every outcome that it uses, and how many draws it takes for one used."""

    vectors: np.ndarray  # (M, n)
    probabilities: np.ndarray  # (M,), sum one: given that the outcome is used
    draws_for_one: float  # 1 / chance that a group is used


def arrays_of(row: Row, case: Case, members: np.ndarray) -> dict[str, np.ndarray]:
    """What the row reads of the answers `members` (M, G), as arrays of make_batch with M * G rows of one token.

    The critic gives J, the greedy baseline is the reward of the likeliest answer, without a reference the reference is p.
    """
    flat, p, R, log_p = members.ravel(), case.p, case.R, np.log(case.p)
    log_r = log_p if case.r is None else np.log(case.r)
    rows, J = len(flat), expected_reward(p, R)
    known = {
        "old_logps": lambda: np.log(case.b)[flat], "sampler_logps": lambda: np.log(case.b)[flat],
        "ref_logps": lambda: log_r[flat], "rewards": lambda: R[flat], "rewards_per_func": lambda: R[flat, None],
        "reward_baselines": lambda: np.full(rows, R[p.argmax()]), "advantages": lambda: R[flat] - J,
        "values": lambda: np.full(rows, J), "vpreds": lambda: np.full(rows, J),
        "entropies": lambda: np.full(rows, -p @ log_p), "truncated": lambda: np.zeros(rows, dtype=bool),
        "selected_tokens": lambda: np.ones(rows, dtype=bool), "sampler_weights": lambda: np.ones(rows),
        "logits": lambda: np.tile(log_p, (rows, 1, 1)), "ref_logits": lambda: np.tile(log_r, (rows, 1, 1)),
    }  # fmt: skip
    groups = np.repeat(np.arange(len(members)), members.shape[1])
    wanted = {*row.needs, "rewards", "values"}  # values: a critic's target, where advantages are given
    return {"logps": log_p[flat], "group_ids": groups} | {name: make() for name, make in known.items() if name in wanted}


def batch_of(*prompts: dict[str, np.ndarray]) -> Batch:
    """One batch of the answers of several draws; their groups stay apart."""
    joined = {name: np.concatenate([prompt[name] for prompt in prompts]) for name in prompts[0]}
    sizes = [len(np.unique(prompt["group_ids"])) for prompt in prompts]
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    joined["group_ids"] = np.concatenate([prompt["group_ids"] + start for prompt, start in zip(prompts, first)])
    weights = np.ones(1) if "rewards_per_func" in joined else None
    return objectives.make_batch(**joined, reward_weights=weights, budget=1)


def looks_at_the_batch(row: Row) -> bool:
    """Whether a group's gradient depends on the other groups of the batch beyond how many they are."""
    return (
        row.scale in ("batch_std", "batch_std_of_raw_rewards", "token_std")
        or row.baseline == "batch_mean"
        or {row.token_selection, row.kl_tokens} - {"all", "given"} != set()
        or row.nll != "none"
        or row.sampler_dropped == "left_out"
    )


def ascent(row: Row, batch: Batch, actions: np.ndarray, p: np.ndarray) -> np.ndarray:
    """Each answer's part of -d loss / d logits, (N, K): scores times slopes, and what else reaches the logits."""
    result = objectives.evaluate(row, batch)
    loss_gradient = result.dloss_dlogps.numpy() * scores(p)[actions]
    if result.dloss_dentropies is not None:
        loss_gradient = loss_gradient + result.dloss_dentropies.numpy() * entropy_gradient(p)
    if result.dloss_dlogits is not None:
        loss_gradient = loss_gradient + result.dloss_dlogits[:, 0].numpy()
    return -loss_gradient


def row_gradients(row: Row, case: Case, outcomes: Outcomes) -> Drawn:
    """The row's gradient for every group that its filter leaves, through objectives.evaluate.

    Raises ValueError, as evaluate, for a row that cannot be evaluated on these groups; TooMany for one that looks at its
    whole batch, where that would be more than CALLS batches.
    """
    members, chances = outcomes
    used = 1.0
    if row.group_filter != "none":
        kept = np.concatenate([_kept(row, case, part) for part in parts_of(case, members)])
        members, chances = members[kept], chances[kept]
        used = chances.sum()
    if not len(members):
        raise ValueError("the filter leaves no group: no two answers have different rewards")
    if looks_at_the_batch(row):
        check_calls(len(members))
        parts = [group[None] for group in members]
    else:
        parts = parts_of(case, members)
    return Drawn(np.concatenate([_of_one_batch(row, case, part) for part in parts]), chances / used, 1 / used)


def rule_gradients(rule: Rule, case: Case, outcomes: Outcomes) -> Drawn:
    """g = (1/G) sum A_i s_i for advantages of one's own, through the engine as given ones."""
    members, chances = outcomes
    vectors = [
        _of_one_batch(GIVEN, case, part, advantages=np.ravel(rule(case.R[part]))) for part in parts_of(case, members)
    ]
    return Drawn(np.concatenate(vectors), chances, 1.0)


def parts_of(case: Case, members: np.ndarray) -> list[np.ndarray]:
    """The groups in parts that go through the engine one after the other, so that memory stays bounded."""
    together = max(1, BATCH // (members.shape[1] * case.answers))
    return np.array_split(members, -(-len(members) // together))


def _kept(row: Row, case: Case, members: np.ndarray) -> np.ndarray:
    """Which groups the row's filter leaves, (M,) bool. evaluate refuses a batch of which nothing is left."""
    if (case.R[members] == case.R[members[:, :1]]).all():
        return np.zeros(len(members), dtype=bool)
    return objectives.kept_rows(row, batch_of(arrays_of(row, case, members))).reshape(members.shape)[:, 0].numpy()


def _of_one_batch(row: Row, case: Case, members: np.ndarray, **arrays: np.ndarray) -> np.ndarray:
    """All groups as prompts of one batch; its loss is the mean over them, so each counts 1 / M."""
    parts = ascent(row, batch_of(arrays_of(row, case, members) | arrays), members.ravel(), case.p)
    return len(members) * parts.reshape(*members.shape, -1).sum(axis=1)


def check_calls(count: int) -> None:
    """Refuse more than CALLS batches that would have to be evaluated one by one. Raises TooMany."""
    if count > CALLS:
        raise TooMany(f"looks at its whole batch: {count:,} batches to evaluate one by one, wanted at most {CALLS:,}")


def settled(case: Case) -> Case:
    """A second prompt for a batch of two: the same answers and rewards, nearly settled, p2 = p^4 / sum p^4."""
    powers = case.p**4
    return replace(case, probabilities=tuple((powers / powers.sum()).tolist()), behaviour=None)


def two_prompt_gradients(row: Row, case: Case) -> tuple[Drawn, np.ndarray]:
    """A batch of two prompts, case and settled(case), with logits of their own: vectors (M, 2K), and the true gradient.

    A row that looks at each group alone is evaluated once per prompt; one that looks at the batch, for every pair of groups.
    """
    both = (case, settled(case))
    first, second = (multisets(prompt.p, case.group_size) for prompt in both)
    left, right, chances = pairs(first, second)
    if looks_at_the_batch(row):
        check_calls(len(chances))
        vectors = np.array([_of_pair(row, both, first.members[i], second.members[j]) for i, j in zip(left, right)])
    else:
        halves = [_of_one_batch(row, prompt, draw.members) / 2 for prompt, draw in zip(both, (first, second))]
        vectors = np.concatenate([halves[0][left], halves[1][right]], axis=1)
    truth = np.concatenate([policy_gradient(prompt.p, prompt.R) / 2 for prompt in both])
    return Drawn(vectors, chances, 1.0), truth


def _of_pair(row: Row, both: tuple[Case, Case], *groups: np.ndarray) -> np.ndarray:
    batch = batch_of(*(arrays_of(row, prompt, group[None]) for prompt, group in zip(both, groups)))
    result = objectives.evaluate(row, batch)
    slopes = torch.chunk(result.dloss_dlogps[:, 0], 2)
    return np.concatenate([-slope.numpy() @ scores(prompt.p)[group] for slope, prompt, group in zip(slopes, both, groups)])


def truth_of(row: Row, case: Case) -> np.ndarray:
    """The gradient of what the row says it maximises: J - kl_coef KL(p || reference) + entropy_coef H(p).

    A KL to the policy that sampled has no gradient where that is the policy itself; the critic has parameters of its own.
    """
    gradient = policy_gradient(case.p, case.R)
    if row.has_kl and case.r is not None and row.kl_anchor == "reference":
        gradient = gradient - row.kl_coef * kl_gradient(case.p, case.r)
    return gradient + row.entropy_coef * entropy_gradient(case.p)
