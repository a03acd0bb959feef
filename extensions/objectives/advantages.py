"""Steps 1 and 2 of an objective: which answers, which reward, which advantage.

A new baseline is an entry in BASELINES, a new scale of a group one in GROUP_SCALES, a new guard one in GUARDS.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import rl_lab
from extensions.objectives.batch import Batch, required, sampling_logps
from extensions.objectives.kl import kl_estimate
from extensions.objectives.table import GAMMA, INF, STD_DDOF, STD_EPS, Choice, Number, plain_choices

if TYPE_CHECKING:
    from extensions.objectives.choices import Row

# ------------------------------------------------------------------------------------------ step 1: answers and rewards


def soft_overlong_penalty(lengths: Tensor, longest: float, cache: float) -> Tensor:
    """DAPO's length penalty: 0 if y <= Lmax - Lc; (Lmax - Lc - y) / Lc up to Lmax; -1 beyond.

    lengths [...] counted tokens -> [...] in [-1, 0]; longest Lmax and cache Lc in tokens.
    Source: arXiv 2503.14476 equation 13.
    """
    return ((longest - cache - lengths) / cache).clamp(-1.0, 0.0)


class Groups(NamedTuple):
    """Answers arranged one group per row, (P, G); a shorter group is filled up, and `real` marks what is not filling."""

    members: Tensor  # (P, G) row numbers
    real: Tensor  # (P, G) bool
    group: Tensor  # (M,) where each answer stands: its group
    place: Tensor  # (M,) and its place there

    def table(self, per_row: Tensor) -> Tensor:
        """(M, ...) -> (P, G, ...)."""
        return per_row[self.members]

    def per_row(self, table: Tensor) -> Tensor:
        """(P, G) -> (M,)."""
        return table[self.group, self.place]


def arrange_groups(group_ids: Tensor) -> Groups:
    """Groups by equal id, wherever the rows stand. group_ids (M,) integer."""
    _, group, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    first = sizes.cumsum(0) - sizes
    order = group.argsort(stable=True)
    place = torch.empty_like(group)
    place[order] = torch.arange(len(group)) - first[group[order]]
    members = order[first].unsqueeze(1).repeat(1, int(sizes.max()))
    members[group, place] = torch.arange(len(group))
    return Groups(members, torch.arange(members.shape[1]) < sizes.unsqueeze(1), group, place)


class Answers(NamedTuple):
    """The rewards that advantages are computed from: the rows of the batch, or of the generation batch it was cut from."""

    rewards: Tensor  # (M,) NaN: missing
    group_ids: Tensor | None
    lengths: Tensor  # (M,)
    parts: Tensor | None  # (M, F)
    kl: Tensor | None  # (M,) sum over the answer of l0 - lr


def _answers(row: Row, batch: Batch) -> Answers:
    if batch.from_generation:
        lengths = batch.gen_lengths
        if lengths is None and (row.overlong == "soft" or row.baseline == "length_weighted_mean"):
            raise ValueError(f"{row.name}: the batch has gen_rewards but no gen_lengths, which this row reads")
        if row.kl_in_reward and batch.gen_kl is None:
            raise ValueError(f"{row.name}: the batch has gen_rewards but no gen_kl, which this row reads")
        lengths = torch.ones_like(batch.gen_rewards) if lengths is None else lengths
        return Answers(batch.gen_rewards, batch.gen_group_ids, lengths, batch.gen_rewards_per_func, batch.gen_kl)
    rewards = batch.rewards
    if rewards is None and batch.token_level_rewards is not None:
        rewards = batch.token_level_rewards.sum(dim=1)
    if rewards is None and batch.rewards_per_func is not None:
        parts = batch.rewards_per_func
        rewards = (parts * batch.reward_weights).nansum(dim=1).masked_fill(parts.isnan().all(dim=1), math.nan)
    if rewards is None:
        required(row, batch, "rewards")
    kl = None
    if row.kl_in_reward:
        kl = kl_of_sampling(row, batch).sum(dim=1)
    return Answers(rewards, batch.group_ids, batch.lengths, batch.rewards_per_func, kl)


def kl_of_sampling(row: Row, batch: Batch) -> Tensor:
    """KL estimate of the policy that sampled, per token (N, T), 0 in unused slots."""
    value, _ = kl_estimate(row, sampling_logps(batch), required(row, batch, "ref_logps"))
    return value.masked_fill(~batch.mask, 0.0)


def _check_rewards(row: Row, rewards: Tensor) -> None:
    missing_allowed = row.missing_reward == "exclude"
    bad = rewards.isinf() if missing_allowed else ~rewards.isfinite()
    if bad.any():
        where = int(bad.nonzero()[0])
        raise ValueError(
            f"{row.name}: rewards: got {rewards[where].item()} at row {where}, wanted finite numbers; likely a failed "
            "verifier"
            + ("" if missing_allowed else " (missing_reward='exclude' leaves a NaN row out)")
        )


def kept_rows(row: Row, batch: Batch) -> Tensor:
    """Rows that stay in the batch, (N,) bool: all, or with group_filter "spread" those whose group has unequal rewards.

    A row that leaves counts in no denominator: a trainer would have sampled another group in its place.
    """
    if row.group_filter == "none":
        return torch.ones(len(batch.mask), dtype=torch.bool)
    kept = _kept_answers(row, _answers(row, batch))
    kept = kept[batch.row_ids] if batch.from_generation else kept
    if not kept.any():
        raise ValueError(f"{row.name}: no group of this batch has unequal rewards, so group_filter 'spread' leaves nothing")
    return kept


def counted_mask(row: Row, batch: Batch, kept: Tensor) -> Tensor:
    """Tokens that count, (N, T) bool: those of kept rows; with overlong "mask" none of an answer that was cut off."""
    if row.group_filter == "none" and row.overlong != "mask":
        return batch.mask
    mask = batch.mask & kept.unsqueeze(1)
    return mask & ~required(row, batch, "truncated").unsqueeze(1) if row.overlong == "mask" else mask


def _kept_answers(row: Row, answers: Answers) -> Tensor:
    """Answers that the group filter leaves, (M,) bool."""
    _check_rewards(row, answers.rewards)
    if row.group_filter == "none":
        return torch.ones(len(answers.rewards), dtype=torch.bool)
    groups = arrange_groups(_group_ids(row, answers))
    present = answers.rewards.isfinite()
    table = groups.table(torch.where(present, answers.rewards, 0.0))
    return ~_all_equal(table, groups.real & groups.table(present))[groups.group]


def _all_equal(table: Tensor, real: Tensor) -> Tensor:
    """Groups whose real entries are all equal up to rounding, or that have none. (P, G), (P, G) bool -> (P,) bool."""
    filled = torch.where(real, table, table.gather(1, real.long().argmax(dim=1, keepdim=True)))
    return rl_lab.groups_without_spread(filled)


def _group_ids(row: Row, answers: Answers) -> Tensor:
    if answers.group_ids is None:
        raise ValueError(f"{row.name}: the batch has no group_ids, which this row reads; it reads {', '.join(row.needs)}")
    return answers.group_ids


# ------------------------------------------------------------------------------------------ step 2: advantage

# A baseline takes the rewards one group per row (P, G), which of them are real, the lengths, and returns what is left.


def mean_of(table: Tensor, real: Tensor) -> Tensor:
    return torch.where(real, table, 0.0).sum(dim=-1, keepdim=True) / real.sum(dim=-1, keepdim=True).clamp(min=1)


def group_mean(rewards: Tensor, real: Tensor, lengths: Tensor) -> Tensor:
    """A_i = R_i - mean of the group."""
    return rewards - mean_of(rewards, real)


def leave_one_out(rewards: Tensor, real: Tensor, lengths: Tensor) -> Tensor:
    """A_i = R_i - mean of the others = G / (G - 1) * (R_i - mean of the group)."""
    others = (real.sum(dim=-1, keepdim=True) - 1).clamp(min=1)
    total = torch.where(real, rewards, 0.0).sum(dim=-1, keepdim=True)
    return rewards - (total - rewards) / others


def length_weighted_mean(rewards: Tensor, real: Tensor, lengths: Tensor) -> Tensor:
    """A_i = R_i - sum_j T_j R_j / sum_j T_j."""
    weights = torch.where(real, lengths, 0.0)
    return rewards - (weights * rewards).sum(dim=-1, keepdim=True) / weights.sum(dim=-1, keepdim=True).clamp(min=1)


def best_minus_second(rewards: Tensor, real: Tensor, lengths: Tensor) -> Tensor:
    """A = largest - second largest for the best answer, 0 for the others; a tie for the best gives 0."""
    ranked = torch.where(real, rewards, -INF)
    top, where = ranked.topk(min(2, ranked.shape[1]), dim=-1)
    gap = torch.where(top[:, -1:].isfinite(), top[:, :1] - top[:, -1:], 0.0)
    return torch.zeros_like(rewards).scatter(-1, where[:, :1], gap)


_GROUP = ("rewards", "group_ids")
BASELINES: dict[str, Choice] = {
    "group_mean": Choice("A_i = R_i - mean of the group", group_mean, needs=_GROUP),
    "leave_one_out": Choice("A_i = R_i - mean of the others in the group", leave_one_out, needs=_GROUP),
    "length_weighted_mean": Choice(
        "A_i = R_i - sum_j T_j R_j / sum_j T_j over the group", length_weighted_mean, needs=_GROUP
    ),
    "best_minus_second": Choice(
        "A = largest - second largest R for the best answer of the group, 0 for the others", best_minus_second, needs=_GROUP
    ),
}
"""Baselines of a group: function(rewards (P, G), real (P, G) bool, lengths) -> what is left."""
GROUP_BASELINES = tuple(BASELINES)

OTHER_BASELINES: dict[str, Choice] = {
    "given": Choice(
        "A as the batch holds it: a length penalty or a KL in the reward is in it already", needs=("advantages",)
    ),
    "none": Choice("A = R", needs=("rewards",)),
    "batch_mean": Choice("A_i = R_i - mean of the whole batch", needs=("rewards",)),
    "greedy": Choice("A = R - reward of the greedy answer to the same prompt", needs=("rewards", "reward_baselines")),
    "gae": Choice(
        "A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t",
        numbers=(GAMMA, Number("lam", 0.95, 0, 1, "GAE's lambda")),
        needs=("rewards", "values"),
    ),
}


def variance_in_group(table: Tensor, real: Tensor, ddof: int) -> Tensor:
    return variance_of(table, real, ddof)[1]


def squared_mean_of_group(table: Tensor, real: Tensor, ddof: int) -> Tensor:
    """mean(R)^2, so that its root is |mean(R)|."""
    return mean_of(table, real).square()


def variance_of_others(table: Tensor, real: Tensor, ddof: int) -> Tensor:
    """Variance of R_j over the others of the group, (P, G). Raises ValueError for a group of one or two."""
    members = real.sum(dim=-1)
    if ((members < 3) & (members > 0)).any():
        raise ValueError("scale leave_one_out_std: a group has fewer than three answers: the others of one have no spread")
    others = real.unsqueeze(1) & ~torch.eye(real.shape[1], dtype=torch.bool)
    return variance_of(table.unsqueeze(1).expand(others.shape), others, ddof)[1].squeeze(-1)


_STD = (STD_DDOF, STD_EPS)
GROUP_SCALES: dict[str, Choice] = {
    "group_std": Choice("A / std(R of the group)", variance_in_group, _STD, ("group_ids",)),
    "leave_one_out_std": Choice("A / std(R of the others in the group)", variance_of_others, _STD, ("group_ids",)),
    "group_mean": Choice("A / mean(R of the group), of rewards that are not negative", squared_mean_of_group, (STD_EPS,),
        ("group_ids",)),
}  # fmt: skip
"""Scales of a group: function(rewards (P, G), real, ddof) -> the square of what A is divided by."""

OTHER_SCALES: dict[str, Choice] = {
    "none": Choice("A is left as it is"),
    "batch_std_of_raw_rewards": Choice("A / std(R of the whole batch)", numbers=_STD),
    "batch_std": Choice("(A - mean over answers) / std over answers", numbers=_STD),
    "token_std": Choice("(A - mean over tokens) / std over tokens, so long answers count more", numbers=_STD),
}
CENTRES = plain_choices(
    mean="batch_std and token_std subtract the mean first",
    none="batch_std and token_std divide alone: A / std",
)
WHITEN_OVER = plain_choices(
    counted="token_std takes mean and std over counted tokens",
    slots="token_std takes them over all slots of the batch: padding counts as A = 0",
)
ADVANTAGE_LEVELS = plain_choices(
    as_is="A_t as it is",
    answer_mean="the mean of A_t over the answer's tokens, one number for the answer",
)
REWARD_LIMIT = Number("reward_limit", 10.0, 0, INF, "rewards are cut to +- this")
REWARD_CLIPS: dict[str, Choice] = {
    "none": Choice("rewards are not cut"),
    "before_baseline": Choice("R cut to [-limit, limit] before a KL is subtracted and before any baseline",
        numbers=(REWARD_LIMIT,)),
    "after_baseline": Choice("what baseline and group scale leave is cut to [-limit, limit], before a KL after the baseline",
        numbers=(REWARD_LIMIT,)),
}  # fmt: skip

NO_SPREAD = 1e-30  # of a variance of rewards of order one: what the rounding of equal rewards leaves, squared
GUARDS: dict[str, Choice] = {
    "add": Choice("x / (std + eps)", lambda x, variance, eps: x / (variance.sqrt() + eps)),
    "inside": Choice("x / sqrt(var + eps)", lambda x, variance, eps: x / (variance + eps).sqrt()),
    "floor": Choice("x / max(std, eps)", lambda x, variance, eps: x / variance.sqrt().clamp(min=eps)),
    "floor_variance": Choice("x / sqrt(max(var, eps))", lambda x, variance, eps: x / variance.clamp(min=eps).sqrt()),
    "add_or_leave": Choice("x / (std + eps), and x itself where std is 0",
        lambda x, variance, eps: torch.where(variance <= NO_SPREAD, x, x / (variance.sqrt() + eps))),
}  # fmt: skip


def divide_by_std(row: Row, x: Tensor, variance: Tensor) -> Tensor:
    """x over a guarded standard deviation; 0 where x is 0, also with eps 0."""
    return torch.where(x == 0, 0.0, GUARDS[row.std_guard](x, variance, row.std_eps))


def variance_of(values: Tensor, real: Tensor, ddof: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of the real entries along the last axis, each [..., 1]; divisor n - ddof, NaN if that is 0."""
    mean = mean_of(values, real)
    squares = torch.where(real, values - mean, 0.0).square().sum(dim=-1, keepdim=True)
    return mean, squares / (real.sum(dim=-1, keepdim=True) - ddof).clamp(min=0)


def compute_advantages(row: Row, batch: Batch) -> Tensor:
    """The advantage of every token, (N, T), 0 in unused slots. Gradient: none.

    Steps: rewards (parts, length penalty, KL), baseline, scale. Over the generation batch if the batch brings one.
    Raises ValueError for an array the row needs and the batch lacks, a group of one (unless the row says otherwise), and a
    reward that is not finite.
    """
    advantages, _ = advantages_and_targets(row, batch, counted_mask(row, batch, kept_rows(row, batch)))
    return torch.where(batch.mask, advantages, 0.0)


def advantages_and_targets(row: Row, batch: Batch, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Advantages (N, 1) or (N, T), and the value targets A + V where there is a critic. mask: tokens of kept rows."""
    targets = None
    if row.baseline == "given":
        advantages = required(row, batch, "advantages")
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        targets = None if batch.values is None else advantages + batch.values
    elif row.baseline == "gae":
        advantages, targets = gae_over_tokens(row, batch)
    elif row.credit == "reward_to_go" and row.baseline in ("none", "greedy") and not row.kl_after_baseline:
        advantages = reward_to_go(token_rewards(row, batch), batch.mask, row.gamma)
        if row.baseline == "greedy":
            advantages = advantages - required(row, batch, "reward_baselines").unsqueeze(1)
    else:
        advantages = after_the_baseline(row, batch, outcome_advantages(row, batch).unsqueeze(1))
    if row.scale == "token_std":
        advantages = standardise_over_tokens(row, advantages, mask)
    if row.advantage_level == "answer_mean":
        total = torch.where(batch.mask, advantages, 0.0).sum(dim=1, keepdim=True)
        advantages = total / batch.lengths.clamp(min=1).unsqueeze(1)
    return advantages, targets


def after_the_baseline(row: Row, batch: Batch, advantages: Tensor) -> Tensor:
    """What becomes of one number per answer (N, 1): spread over time, less a KL that is subtracted now. (N, 1) or (N, T).

    reward_to_go: the number is the reward of the last token, A_t = sum_{j >= t} gamma^(j - t) (x_j - coef KL_j).
    outcome: A_t = x - coef KL_t.
    """
    kl = row.kl_coef * kl_of_sampling(row, batch) if row.kl_after_baseline else 0.0
    if row.credit == "reward_to_go":
        rewards = torch.where(_last_token(batch.mask), advantages, 0.0) - kl
        return reward_to_go(rewards, batch.mask, row.gamma)
    return advantages - kl


def standardise_over_tokens(row: Row, advantages: Tensor, mask: Tensor) -> Tensor:
    """(A - mean over counted tokens) / guarded std over them. advantages (N, 1) or (N, T), mask (N, T) -> (N, T).

    whiten_over "slots": mean and std over all slots, of which those outside the mask hold 0. centre "none": the mean stays.
    """
    flat, real = advantages.expand_as(mask).reshape(1, -1), mask.reshape(1, -1)
    if row.whiten_over == "slots":
        flat, real = torch.where(real, flat, 0.0), torch.ones_like(real)
    mean, variance = variance_of(flat, real, row.std_ddof)
    return divide_by_std(row, flat if row.centre == "none" else flat - mean, variance).reshape(mask.shape)


def outcome_advantages(row: Row, batch: Batch) -> Tensor:
    """One advantage an answer, (N,): baseline, then scale, over answers."""
    answers = _answers(row, batch)
    kept = _kept_answers(row, answers)
    rewards, groups = _final_rewards(row, batch, answers)
    present = rewards.isfinite()
    rewards = torch.where(present, rewards, 0.0)
    if groups is not None:
        advantages = _in_groups(row, rewards, present, groups, answers.lengths)
    else:
        advantages = rewards
        if row.baseline == "greedy":
            advantages = advantages - required(row, batch, "reward_baselines")
        elif row.baseline == "batch_mean":
            advantages = advantages - mean_of(rewards, present & kept)
    if row.reward_clip == "after_baseline":
        advantages = advantages.clamp(-row.reward_limit, row.reward_limit)
    if row.scale == "batch_std_of_raw_rewards":
        advantages = divide_by_std(row, advantages, variance_of(rewards, present & kept, row.std_ddof)[1])
    elif row.scale == "batch_std":
        mean, variance = variance_of(advantages, present & kept, row.std_ddof)
        advantages = divide_by_std(row, advantages if row.centre == "none" else advantages - mean, variance)
    advantages = torch.where(present, advantages, 0.0)
    return advantages[batch.row_ids] if batch.from_generation else advantages


def _final_rewards(row: Row, batch: Batch, answers: Answers) -> tuple[Tensor, Groups | None]:
    """Rewards as the baseline reads them, (M,), NaN where missing; and the groups, if the row looks at any."""
    rewards = answers.rewards
    groups = arrange_groups(_group_ids(row, answers)) if row.is_grouped else None
    if row.reward_parts == "normalise_then_sum":
        if answers.parts is None:
            raise ValueError(f"{row.name}: the batch has no rewards_per_func, which reward_parts 'normalise_then_sum' reads")
        rewards = normalised_parts(row, answers.parts, batch.reward_weights, groups).masked_fill(rewards.isnan(), math.nan)
    if row.overlong == "soft":
        rewards = rewards + soft_overlong_penalty(answers.lengths, row.overlong_max, row.overlong_cache)
    if row.reward_clip == "before_baseline":
        rewards = rewards.clamp(-row.reward_limit, row.reward_limit)
    return (rewards - row.kl_coef * answers.kl if row.kl_in_reward else rewards), groups


def _in_groups(row: Row, rewards: Tensor, present: Tensor, groups: Groups, lengths: Tensor) -> Tensor:
    """Baseline and scale of each group, (M,) -> (M,). Raises ValueError for a group of one, unless the row allows it."""
    table, real = groups.table(rewards), groups.real & groups.table(present)
    members = real.sum(dim=1, keepdim=True)
    if row.singleton == "refuse" and (members == 1).any():
        where = int(groups.members[int((members == 1).nonzero()[0, 0]), 0])
        raise ValueError(
            f"{row.name}: row {where} is alone in its group, wanted at least two answers to a prompt: one answer has "
            "nothing to be compared with (singleton='raw' or 'zero' says what it gets instead)"
        )
    advantages = table
    if row.baseline in BASELINES:
        advantages = BASELINES[row.baseline](table, real, groups.table(lengths.to(table.dtype)))
        # Rounding leaves a few ulps where all rewards are equal, and dividing by a tiny std would blow them up.
        advantages = torch.where(_all_equal(table, real).unsqueeze(1), 0.0, advantages)
        advantages = torch.where(members == 1, table if row.singleton == "raw" else 0.0, advantages)
    if row.scale in GROUP_SCALES:
        variance = GROUP_SCALES[row.scale](table, real, row.std_ddof)
        variance = torch.where(members == 1, 1.0, variance) if row.singleton == "raw" else variance
        advantages = divide_by_std(row, advantages, variance)
    return groups.per_row(advantages)


def normalised_parts(row: Row, parts: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    """R = sum_k weight_k (r_k - group mean) / (group std + eps); a missing part adds nothing. parts (M, F) -> (M,)."""
    total = torch.zeros(len(parts), dtype=parts.dtype)
    for part, weight in zip(parts.unbind(dim=1), weights):
        table, real = groups.table(part), groups.real & groups.table(part.isfinite())
        mean, variance = variance_of(torch.where(real, table, 0.0), real, row.std_ddof)
        total += weight * torch.where(real, divide_by_std(row, table - mean, variance), 0.0)[groups.group, groups.place]
    return total


def token_rewards(row: Row, batch: Batch) -> Tensor:
    """Reward of every token, (N, T): as given, or the answer's on its last counted token; less a KL in the reward."""
    rewards = batch.token_level_rewards
    if rewards is None:
        answer = _answers(replace(row, kl="none"), batch).rewards
        _check_rewards(replace(row, missing_reward="refuse"), answer)
        answer = answer[batch.row_ids] if batch.from_generation else answer
        last = _last_token(batch.mask)
        rewards = torch.zeros_like(batch.logps).masked_scatter(last, answer[batch.mask.any(dim=1)])
    if row.reward_clip == "before_baseline":
        rewards = rewards.clamp(-row.reward_limit, row.reward_limit)
    if row.overlong == "soft":
        penalty = soft_overlong_penalty(batch.lengths, row.overlong_max, row.overlong_cache).to(rewards.dtype)
        rewards = rewards + torch.where(_last_token(batch.mask), penalty.unsqueeze(1), 0.0)
    if row.kl_in_reward:
        rewards = rewards - row.kl_coef * kl_of_sampling(row, batch)
    return rewards


def _last_token(mask: Tensor) -> Tensor:
    """True on the last counted token of each row."""
    return mask & (mask.flip(1).cumsum(dim=1).flip(1) == 1)


def reward_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = sum_{j >= t} gamma^(j - t) r_j over counted tokens: GAE without a critic and with lambda 1. (N, T) -> (N, T)."""
    nothing = torch.zeros_like(rewards)
    return _gae_over_counted_tokens(rewards, nothing, mask, gamma, 1.0)[0]


def gae_over_tokens(row: Row, batch: Batch) -> tuple[Tensor, Tensor]:
    """GAE and its value targets, each (N, T); the answer's last counted token is terminal, tokens in a hole are skipped.

    With next_values, terminated and boundary in the batch the rows are stretches of an environment instead.
    """
    rewards, values = token_rewards(row, batch), required(row, batch, "values")
    if batch.next_values is not None:
        if batch.terminated is None or batch.boundary is None:
            raise ValueError(f"{row.name}: next_values needs terminated and boundary beside it")
        return rl_lab.gae(rewards, values, batch.next_values, batch.terminated, batch.boundary, row.gamma, row.lam)
    return _gae_over_counted_tokens(rewards, values, batch.mask, row.gamma, row.lam)


def _gae_over_counted_tokens(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float):
    # Counted tokens move to the left, so that a hole (tool output) is no step in time.
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
    counted = mask.gather(1, order)
    ends = ~F.pad(counted[:, 1:], (0, 1))
    rewards, values = (torch.where(counted, series.gather(1, order), 0.0) for series in (rewards, values))
    packed = rl_lab.gae(rewards, values, F.pad(values[:, 1:], (0, 1)), ends, ends, gamma, lam)
    return tuple(torch.where(mask, torch.zeros_like(series).scatter(1, order, series), 0.0) for series in packed)
