"""Steps 1 and 2 of an objective: which answers, which reward, which advantage. A new baseline is an entry in BASELINES."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import rl_lab
from extensions.objectives.batch import Batch, required
from extensions.objectives.choices import GROUP_BASELINES, Row
from extensions.objectives.surrogates import kl_estimate

INF = math.inf

# ------------------------------------------------------------------------------------------ step 1: answers and rewards


def soft_overlong_penalty(lengths: Tensor, longest: float, cache: float) -> Tensor:
    """DAPO's length penalty: 0 if y <= Lmax - Lc; (Lmax - Lc - y) / Lc up to Lmax; -1 beyond.

    lengths [...] counted tokens -> [...] in [-1, 0]; longest Lmax and cache Lc in tokens.
    Source: arXiv 2503.14476 equation 13.
    """
    return ((longest - cache - lengths) / cache).clamp(-1.0, 0.0)


class Groups(NamedTuple):
    """Answers arranged one group a row, (P, G); a shorter group is filled up, and `real` marks what is not filling."""

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
        kl = _kl_in_reward(row, batch).sum(dim=1)
    return Answers(rewards, batch.group_ids, batch.lengths, batch.rewards_per_func, kl)


def _kl_in_reward(row: Row, batch: Batch) -> Tensor:
    """KL estimate of the policy that sampled, per token (N, T), 0 in unused slots."""
    value, _ = kl_estimate(row, sampling_logps(batch), required(row, batch, "ref_logps"))
    return value.masked_fill(~batch.mask, 0.0)


def sampling_logps(batch: Batch) -> Tensor:
    return batch.logps if batch.old_logps is None else batch.old_logps


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

# A baseline takes the rewards one group a row (P, G), which of them are real, the lengths, and returns what is left.


def _mean(table: Tensor, real: Tensor) -> Tensor:
    return torch.where(real, table, 0.0).sum(dim=-1, keepdim=True) / real.sum(dim=-1, keepdim=True).clamp(min=1)


def group_mean(rewards: Tensor, real: Tensor, lengths: Tensor) -> Tensor:
    """A_i = R_i - mean of the group."""
    return rewards - _mean(rewards, real)


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


BASELINES = {
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "length_weighted_mean": length_weighted_mean,
    "best_minus_second": best_minus_second,
}

GUARDS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "add": lambda x, variance, eps: x / (variance.sqrt() + eps),
    "inside": lambda x, variance, eps: x / (variance + eps).sqrt(),
    "floor": lambda x, variance, eps: x / variance.sqrt().clamp(min=eps),
    "floor_variance": lambda x, variance, eps: x / variance.clamp(min=eps).sqrt(),
}


def divide_by_std(row: Row, x: Tensor, variance: Tensor) -> Tensor:
    """x over a guarded standard deviation; 0 where x is 0, also with eps 0."""
    return torch.where(x == 0, 0.0, GUARDS[row.std_guard](x, variance, row.std_eps))


def variance_of(values: Tensor, real: Tensor, ddof: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of the real entries along the last axis, each [..., 1]; divisor n - ddof, NaN if that is 0."""
    mean = _mean(values, real)
    squares = torch.where(real, values - mean, 0.0).square().sum(dim=-1, keepdim=True)
    return mean, squares / (real.sum(dim=-1, keepdim=True) - ddof).clamp(min=0)


def compute_advantages(row: Row, batch: Batch) -> Tensor:
    """The advantage of every token, (N, T), 0 in unused slots. Gradient: none.

    Steps: rewards (parts, length penalty, KL), baseline, scale. Over the generation batch if the batch brings one.
    Raises ValueError for an array the row needs and the batch lacks, a group of one (unless the row says otherwise), and a
    reward that is not finite.
    """
    advantages, _ = advantages_and_targets(row, batch, batch.mask & kept_rows(row, batch).unsqueeze(1))
    return torch.where(batch.mask, advantages, 0.0)


def advantages_and_targets(row: Row, batch: Batch, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Advantages (N, 1) or (N, T), and the value targets A + V where there is a critic."""
    targets = None
    if row.baseline == "given":
        advantages = required(row, batch, "advantages")
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        targets = None if batch.values is None else advantages + batch.values
    elif row.baseline == "gae":
        advantages, targets = gae_over_tokens(row, batch)
    elif row.credit == "reward_to_go":
        advantages = reward_to_go(token_rewards(row, batch), batch.mask, row.gamma)
        if row.baseline == "greedy":
            advantages = advantages - required(row, batch, "reward_baselines").unsqueeze(1)
    else:
        advantages = outcome_advantages(row, batch).unsqueeze(1)
    if row.scale == "token_std":
        advantages = standardise_over_tokens(row, advantages, mask)
    return advantages, targets


def standardise_over_tokens(row: Row, advantages: Tensor, mask: Tensor) -> Tensor:
    """(A - mean over counted tokens) / guarded std over them. advantages (N, 1) or (N, T), mask (N, T) -> (N, T)."""
    flat, real = advantages.expand_as(mask).reshape(1, -1), mask.reshape(1, -1)
    mean, variance = variance_of(flat, real, row.std_ddof)
    return divide_by_std(row, flat - mean, variance).reshape(mask.shape)


def outcome_advantages(row: Row, batch: Batch) -> Tensor:
    """One advantage an answer, (N,): baseline, then scale, over answers."""
    answers = _answers(row, batch)
    rewards = answers.rewards
    kept = _kept_answers(row, answers)
    grouped = row.baseline in GROUP_BASELINES or row.reward_parts == "normalise_then_sum"
    groups = arrange_groups(_group_ids(row, answers) if grouped else torch.arange(len(rewards)))
    if row.reward_parts == "normalise_then_sum":
        if answers.parts is None:
            raise ValueError(f"{row.name}: the batch has no rewards_per_func, which reward_parts 'normalise_then_sum' reads")
        rewards = normalised_parts(row, answers.parts, batch.reward_weights, groups).masked_fill(rewards.isnan(), math.nan)
    if row.overlong == "soft":
        rewards = rewards + soft_overlong_penalty(answers.lengths, row.overlong_max, row.overlong_cache)
    if row.kl_in_reward:
        rewards = rewards - row.kl_coef * answers.kl

    present = rewards.isfinite()
    rewards = torch.where(present, rewards, 0.0)
    if grouped:
        table, real = groups.table(rewards), groups.real & groups.table(present)
        members = real.sum(dim=1, keepdim=True)
        if row.singleton == "refuse" and (members == 1).any():
            where = int(groups.members[int((members == 1).nonzero()[0, 0]), 0])
            raise ValueError(
                f"{row.name}: row {where} is alone in its group, wanted at least two answers to a prompt: one answer has "
                "nothing to be compared with (singleton='raw' or 'zero' says what it gets instead)"
            )
        if row.baseline in BASELINES:
            advantages = BASELINES[row.baseline](table, real, groups.table(answers.lengths.to(table.dtype)))
            # Rounding leaves a few ulps where all rewards are equal, and dividing by a tiny std would blow them up.
            advantages = torch.where(_all_equal(table, real).unsqueeze(1), 0.0, advantages)
        else:
            advantages = table
        variance = variance_of(table, real, row.std_ddof)[1]
        if row.singleton == "raw":
            advantages = torch.where(members == 1, table, advantages)
            variance = torch.where(members == 1, 1.0, variance)
        elif row.baseline in BASELINES:
            advantages = torch.where(members == 1, 0.0, advantages)
        if row.scale == "group_std":
            advantages = divide_by_std(row, advantages, variance)
        advantages = groups.per_row(advantages)
    else:
        advantages = rewards
        if row.baseline == "greedy":
            advantages = advantages - required(row, batch, "reward_baselines")
    if row.scale == "batch_std_of_raw_rewards":
        advantages = divide_by_std(row, advantages, variance_of(rewards, present & kept, row.std_ddof)[1])
    elif row.scale == "batch_std":
        mean, variance = variance_of(advantages, present & kept, row.std_ddof)
        advantages = divide_by_std(row, advantages - mean, variance)
    advantages = torch.where(present, advantages, 0.0)
    return advantages[batch.row_ids] if batch.from_generation else advantages


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
    if row.overlong == "soft":
        penalty = soft_overlong_penalty(batch.lengths, row.overlong_max, row.overlong_cache).to(rewards.dtype)
        rewards = rewards + torch.where(_last_token(batch.mask), penalty.unsqueeze(1), 0.0)
    if row.kl_in_reward:
        rewards = rewards - row.kl_coef * _kl_in_reward(row, batch)
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
