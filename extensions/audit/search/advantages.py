"""Which rule gives the reported advantages: baselines and scales of the table over answers, GAE over tokens or time.

Every rule is a objectives.Row, computed by objectives.compute_advantages, and compared with what was reported, within the
rounding of the trainer's float32. Mistakes are edits of what the rule reads (groups, missing rewards, flags, the token that
holds the score) or of its standard deviation, and are tried where no rule fits.

Environments (terminated and truncated steps) have their own search: rewards, values, the true next values and the two flags
are laid out with time last, and each mistake is an edit of one of them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from extensions.audit.read.recording import Recording
from extensions.audit.search.level import in_level_group
from extensions.audit.read.masks import last_counted, mask_edits
from extensions.audit.search.rules import KL_IN_REWARD, AdvantageMatch, AdvantageResult, advantage_batch, rules
from extensions.audit.tolerance import ADVANTAGE, COARSE, TWO_ULPS
from extensions.objectives import Batch, Row, arrange_groups, compute_advantages, standardise_over_tokens


class _Reported(NamedTuple):
    values: Tensor  # (N, T)
    mask: Tensor
    tolerance: Tensor  # (N, 1)

    def gap(self, made: Tensor, slack: float = 1.0) -> float | None:
        """Largest difference, or None where one is beyond the rounding of its row."""
        apart = torch.where(self.mask, made - self.values, 0.0).abs()
        return float(apart.max()) if bool((apart <= slack * self.tolerance).all()) else None


def _reported(recording: Recording) -> _Reported:
    mask = torch.as_tensor(recording.arrays["mask"])
    A = torch.as_tensor(recording.arrays["advantages"])
    A = A.unsqueeze(1).expand(mask.shape) if A.dim() == 1 else A
    used = A[mask]
    largest = float(used.abs().max()) if used.numel() else 0.0
    scale = 1 if recording.eps < COARSE else 4 * recording.eps / ADVANTAGE
    noise = torch.as_tensor(_reward_noise(recording.arrays, len(mask))).unsqueeze(1)
    return _Reported(torch.where(mask, A, 0.0), mask, scale * (ADVANTAGE * max(1.0, largest) + noise))


def _reward_noise(arrays: dict[str, np.ndarray], rows: int) -> np.ndarray:
    """Rounding of each row's advantage that float32 rewards bring with them, (N,).

    A mean of rewards far from 0 loses digits, 2 ulps of the largest |R|, and a small standard deviation magnifies what was
    lost: that of the batch, or that of the row's own group where it has a spread.
    """
    generation = "gen_rewards" in arrays
    raw, ids = (arrays.get(f"gen_{name}" if generation else name) for name in ("rewards", "group_ids"))
    if raw is None or not np.isfinite(raw).any():
        return np.zeros(rows)
    finite = np.isfinite(raw)
    lost = TWO_ULPS * np.abs(raw[finite]).max()
    noise = np.full(len(raw), min(lost / max(raw[finite].std(), 1e-3), 1e-5))
    if ids is not None and ids.shape == raw.shape:
        _, inverse = np.unique(ids, return_inverse=True)
        known = np.where(finite, raw, 0.0)
        count, total = np.bincount(inverse, finite), np.bincount(inverse, known)
        centred = np.where(finite, known - (total / np.maximum(count, 1))[inverse], 0.0)
        std = np.sqrt(np.bincount(inverse, centred**2) / np.maximum(count, 1))[inverse]
        has_spread = ~in_level_group(ids, raw) & (std > 0)
        noise = np.where(has_spread, np.clip(lost / np.where(has_spread, std, 1.0), noise, 1e-3), noise)
    if generation and "row_ids" in arrays:
        return noise[arrays["row_ids"]]
    return noise if len(noise) == rows else np.zeros(rows)


def search_advantages(
    recording: Recording, *, look_for_mistakes: bool = True, declared: dict | None = None
) -> AdvantageResult:
    """The rules that give the reported advantages of a rollout; mistakes where none does.

    declared: fields of the rule that the trainer is said to follow, tried first with its own constants.
    """
    result = AdvantageResult()
    arrays = recording.arrays
    if "advantages" not in arrays:
        result.missing.append("advantages, as the loss used them")
        return result
    if not np.isfinite(
        arrays["advantages"][arrays["mask"].any(1)]
        if arrays["advantages"].ndim == 1
        else arrays["advantages"][arrays["mask"]]
    ).all():
        result.remarks.append("reported advantages are not finite")
        return result
    sources = [
        n for n in ("rewards", "token_level_rewards", "rewards_per_func", "gen_rewards", "advantages_raw") if n in arrays
    ]
    if not sources:
        result.missing.append("rewards (and group_ids), from which the advantages were made")
        return result
    if (
        "group_ids" not in arrays
        and "gen_group_ids" not in arrays
        and "values" not in arrays
        and "advantages_raw" not in arrays
    ):
        result.missing.append("group_ids, one number a row, equal for answers to the same prompt")
    reported = _reported(recording)
    overrides = {}
    if "advantages_raw" in arrays:
        overrides["advantages"] = arrays["advantages_raw"]
    try:
        batch = advantage_batch(recording, **overrides)
    except (ValueError, TypeError) as problem:
        result.remarks.append(str(problem))
        return result
    result.checked = True
    try:
        if declared:
            _try_declared(declared, batch, reported, result)
        _search(recording, batch, reported, result, look_for_mistakes)
    finally:
        _unscaled.cache_clear()
    return result


def _try_declared(declared: dict, batch: Batch, reported: _Reported, result: AdvantageResult) -> None:
    """The declared rule, whose std_eps may stand on no list."""
    raw = batch.gen_rewards if batch.gen_rewards is not None else batch.rewards
    has_gaps = raw is not None and bool(raw.isnan().any())
    fields = {**declared, "singleton": "zero", **({"missing_reward": "exclude"} if has_gaps else {})}
    result.tried += 1
    try:
        gap = _gap(fields, batch, reported)
    except TypeError:
        return
    if gap is not None:
        if not _has_singletons(batch):
            del fields["singleton"]
        result.matches.append(AdvantageMatch(fields, (), gap))


def _search(
    recording: Recording, batch: Batch, reported: _Reported, result: AdvantageResult, look_for_mistakes: bool
) -> None:
    _try_all(recording, batch, reported, result, None)
    if not result.matches:
        _kl_in_reward(recording, batch, reported, result)
    if not result.matches and look_for_mistakes:
        _mistakes(recording, batch, reported, result)


def _gap(fields: dict, batch: Batch, reported: _Reported, slack: float = 1.0) -> float | None:
    """Largest difference to the advantages of a rule; None if the rule does not give the reported ones."""
    try:
        return reported.gap(_made({"singleton": "zero", **fields}, batch), slack)
    except ValueError:
        return None


def _before_the_scale(fields: dict) -> dict:
    """A rule's choices up to its baseline."""
    return {name: value for name, value in fields.items() if name not in ("scale", "std_ddof", "std_eps", "std_guard")}


def _made(fields: dict, batch: Batch) -> Tensor:
    """The advantages of a rule, (N, T). Rules that differ only in how they standardise over tokens share what comes before.

    So do those that differ in the coefficient of a KL in the reward, for what is standardised is linear in it.
    """
    row = Row("rule", **fields)
    if row.scale != "token_std" or row.baseline == "given":
        return compute_advantages(row, batch)
    before = _before_the_scale(fields)
    coef = before.pop("kl_coef", 0.0) if row.kl_in_reward else 0.0
    plain = _unscaled(batch, **{**before, "kl": "none"})
    if coef:
        plain = plain + coef * (_unscaled(batch, **{**before, "kl_coef": 1.0}) - plain)
    return torch.where(batch.mask, standardise_over_tokens(row, plain, batch.mask), 0.0)


@lru_cache(maxsize=2)  # rules that share it follow each other; two are what a KL in the reward needs
def _unscaled(batch: Batch, **fields) -> Tensor:
    return compute_advantages(Row("rule", scale="none", **fields), batch)


def _try_all(
    recording: Recording,
    batch: Batch,
    reported: _Reported,
    result: AdvantageResult,
    mistake: str | None,
    rows=(),
    remark: str = "",
) -> None:
    short = _one_slot_an_answer(batch, reported)
    found = result.mistakes if mistake else result.matches
    for fields in rules(recording, batch):
        if short is not None and not _is_per_answer(fields) and any(_is_per_answer(m.fields) for m in found):
            continue  # one advantage an answer, and a rule for answers gives it
        result.tried += 1
        gap = _gap(fields, *(short if short is not None and _is_per_answer(fields) else (batch, reported)))
        if gap is None:
            continue
        if not _has_singletons(batch):
            fields = {name: value for name, value in fields.items() if name != "singleton"}
        match = AdvantageMatch(fields, (mistake,) if mistake else (), gap, tuple(rows), remark)
        if not any(m.fields == match.fields and m.mistakes == match.mistakes for m in (*result.mistakes, *result.matches)):
            found.append(match)


def _is_per_answer(fields: dict) -> bool:
    """Whether the rule gives all tokens of an answer one advantage, whatever their number."""
    over_tokens = fields["scale"] == "token_std" or fields.get("credit") == "reward_to_go"
    return not over_tokens and fields["baseline"] not in ("gae", "given")


def _one_slot_an_answer(batch: Batch, reported: _Reported) -> tuple[Batch, _Reported] | None:
    """The batch with one slot for each answer, for rules that give one advantage an answer.

    None if the reported advantages vary within an answer.
    """
    first = reported.mask.to(torch.uint8).argmax(1, keepdim=True)
    per_answer = reported.values.gather(1, first)
    if bool((torch.where(reported.mask, reported.values - per_answer, 0.0) != 0).any()):
        return None
    counted = reported.mask.any(1, keepdim=True)
    rewards, parts = batch.rewards, batch.rewards_per_func
    if rewards is None and batch.token_level_rewards is not None:
        rewards = batch.token_level_rewards.sum(1)
    elif rewards is None and parts is not None:
        rewards = (parts * batch.reward_weights).nansum(1).masked_fill(parts.isnan().all(1), math.nan)
    kl = None if batch.old_logps is None or batch.ref_logps is None else (batch.old_logps - batch.ref_logps).sum(1)
    own = (
        {}
        if batch.row_ids is not None
        else {
            "gen_rewards": rewards,
            "gen_rewards_per_func": parts,
            "gen_group_ids": batch.group_ids,
            "gen_lengths": batch.lengths,
            "gen_kl": kl,
            "row_ids": torch.arange(len(counted)),
        }
    )
    slim = {name: None for name in ("old_logps", "ref_logps", "token_level_rewards", "values", "advantages")}
    short = replace(batch, logps=torch.zeros(counted.shape, dtype=torch.float64), mask=counted, **slim, **own)
    return short, _Reported(torch.where(counted, per_answer, 0.0), counted, reported.tolerance)


def _has_singletons(batch: Batch) -> bool:
    ids = batch.gen_group_ids if batch.gen_group_ids is not None else batch.group_ids
    return ids is not None and bool((ids.unique(return_counts=True)[1] == 1).any())


def _kl_in_reward(recording: Recording, batch: Batch, reported: _Reported, result: AdvantageResult) -> None:
    """Rules without a division are linear in the reward, so the KL coefficient can be solved for; the others take a list."""
    if batch.ref_logps is None or batch.old_logps is None:
        if batch.gen_kl is None:
            return
    known = recording.number("beta")
    short = _one_slot_an_answer(batch, reported)
    for fields in rules(recording, batch):
        if fields.get("reward_parts") or fields["baseline"] in ("given", "best_minus_second"):
            continue
        used, wanted = short if short is not None and _is_per_answer(fields) else (batch, reported)
        linear = fields["scale"] == "none"
        coefs = [known] if known else list(KL_IN_REWARD[:4])
        if linear and not known:
            try:
                before = _before_the_scale(fields)
                plain = _unscaled(used, **before, kl="none", kl_place="reward")
                one = _unscaled(used, **before, kl="k1", kl_coef=1.0, kl_place="reward")
            except ValueError:
                continue
            step = one - plain
            size = float((step * step).sum())
            if size == 0:
                continue
            coef = float(((wanted.values - plain) * step).sum()) / size
            near = [c for c in KL_IN_REWARD if abs(coef - c) < 2e-3 * c]
            coefs = near or ([coef] if coef > 1e-6 else [])
        for coef in coefs:
            result.tried += 1
            with_kl = {**fields, "kl": "k1", "kl_coef": coef, "kl_place": "reward"}
            gap = _gap(with_kl, used, wanted, slack=3.0)
            if gap is not None:
                if not _has_singletons(batch):
                    with_kl.pop("singleton", None)
                if not any(m.fields == with_kl for m in result.matches):
                    result.matches.append(AdvantageMatch(with_kl, (), gap))


def _mistakes(recording: Recording, batch: Batch, reported: _Reported, result: AdvantageResult) -> None:
    arrays = recording.arrays
    generation = batch.gen_rewards is not None
    ids_name, rewards_name = ("gen_group_ids", "gen_rewards") if generation else ("group_ids", "rewards")
    ids, rewards = getattr(batch, ids_name), getattr(batch, rewards_name)
    raw = {"advantages": arrays["advantages_raw"]} if "advantages_raw" in arrays else {}

    def edited(name: str, remark: str = "", rows=(), **overrides) -> None:
        try:
            _try_all(recording, advantage_batch(recording, **raw, **overrides), reported, result, name, rows, remark)
        except (ValueError, TypeError):
            pass

    if ids is not None and len(ids.unique()) > 1:
        edited(
            "groups_pooled", f"{len(ids.unique())} groups treated as one", **{ids_name: np.zeros(len(ids), dtype=np.int64)}
        )
        sizes = ids.unique(return_counts=True)[1]
        for size in sizes.unique().tolist():
            by_place = torch.arange(len(ids)) // size
            if (
                len(ids) % size == 0
                and size > 1
                and not torch.equal(
                    arrange_groups(by_place).members.sort(1).values, arrange_groups(ids).members.sort(1).values
                )
            ):
                apart = [i for i in range(len(ids)) if len(ids[by_place == by_place[i]].unique()) > 1]
                edited("groups_assumed_contiguous", f"{size} rows at a time", apart, **{ids_name: by_place.numpy()})
    if rewards is not None and bool(rewards.isnan().any()):
        filled = torch.where(rewards.isnan(), 0.0, rewards).numpy()
        extra = {"rewards_per_func": None, "reward_weights": None} if not generation else {"gen_rewards_per_func": None}
        edited(
            "missing_reward_counted", rows=rewards.isnan().nonzero().flatten().tolist(), **{rewards_name: filled}, **extra
        )
    _roundoff(recording, batch, reported, result)
    sign = _Reported(-reported.values, reported.mask, reported.tolerance)
    _try_all(recording, batch, sign, result, "advantage_sign")
    if "row_truncated" in arrays or bool((batch.lengths == 0).any()):
        dropped = arrays.get("row_truncated", batch.lengths.numpy() == 0)
        if not generation and rewards is not None and dropped.any():
            left = np.where(dropped, np.nan, arrays["rewards"])
            edited("dropped_rows_left_out", rows=np.flatnonzero(dropped), rewards=left)
            # Leaving them out is a choice, and a good one: it is a match, not a mistake.
            found = [m for m in result.mistakes if m.mistakes == ("dropped_rows_left_out",)]
            result.mistakes = [m for m in result.mistakes if m not in found]
            result.matches += [
                AdvantageMatch(m.fields, (), m.gap, m.rows, "answers that were dropped are outside the baseline")
                for m in found
            ]
    if raw:
        _padded_whitening(arrays["advantages_raw"], arrays["mask"], reported, result)
    if batch.values is not None:
        _steps_of_tools(recording, raw, reported, result)
    if batch.values is not None or arrays["mask"].shape[1] > 1:
        _misplaced_scores(recording, batch, reported, result, edited)
        _reward_minus_value(recording, batch, reported, result)


def _padded_whitening(raw: np.ndarray, mask: np.ndarray, reported: _Reported, result: AdvantageResult) -> None:
    if raw.ndim != 2:
        return
    for ddof, eps, guard in ((0, 0.0, "add"), (0, 1e-8, "add"), (1, 1e-8, "add"), (1, 1e-8, "inside")):
        values = np.where(mask, raw, 0.0)
        mean = values.mean()
        variance = (np.where(mask, values - mean, 0.0) ** 2).sum() / (mask.sum() - ddof)
        made = np.where(
            mask, (values - mean) / (math.sqrt(variance + eps) if guard == "inside" else math.sqrt(variance) + eps), 0.0
        )
        result.tried += 1
        gap = reported.gap(torch.as_tensor(made))
        if gap is not None:
            result.mistakes.append(
                AdvantageMatch(
                    {"baseline": "given", "scale": "token_std", "std_ddof": ddof, "std_eps": eps, "std_guard": guard},
                    ("padding_in_whitening",),
                    gap,
                    (),
                    f"mean over {mask.size} slots, variance over {mask.sum()}",
                )
            )


def _steps_of_tools(recording: Recording, raw: dict, reported: _Reported, result: AdvantageResult) -> None:
    """GAE that takes a tool's tokens for steps of the policy: the recursion runs over the holes, and over what follows."""
    mask, attention = recording.arrays["mask"], recording.get("attention_mask")
    wider = {"tool_tokens": mask_edits(recording).get("tool_tokens_counted")}
    if attention is not None and attention.shape == mask.shape:
        wider["attention_mask"] = mask | attention.astype(bool)
    for words, steps in wider.items():
        if steps is None or (steps == mask).all():
            continue
        try:
            batch = advantage_batch(recording, mask=steps, **raw)
        except (ValueError, TypeError):
            continue
        rows = np.flatnonzero((steps & ~mask).any(1))
        remark = f"{(steps & ~mask).sum()} tokens written by a tool or the environment are steps"
        _try_all(recording, batch, reported, result, "tool_tokens_in_gae", rows, remark)


def _misplaced_scores(recording: Recording, batch: Batch, reported: _Reported, result: AdvantageResult, edited) -> None:
    arrays = recording.arrays
    mask = arrays["mask"]
    if "rewards" not in arrays or not np.isfinite(arrays["rewards"]).all():
        return
    dense = arrays.get("token_level_rewards")
    if dense is not None and (np.count_nonzero(np.where(mask, dense, 0), axis=1) > 1).any():
        return
    last = last_counted(mask)
    first = mask & (np.cumsum(mask, axis=1) == 1)
    early = np.zeros_like(mask)
    early[:, :-1] = last[:, 1:]
    column = np.zeros_like(mask)
    column[:, -1] = True
    for where, words in (
        (early & mask, "one token before the last"),
        (column & mask, "the last column of the batch"),
        (first, "the first token"),
    ):
        edited("score_on_wrong_token", words, token_level_rewards=np.where(where, arrays["rewards"][:, None], 0.0))


def _reward_minus_value(recording: Recording, batch: Batch, reported: _Reported, result: AdvantageResult) -> None:
    values, dense = batch.values, batch.token_level_rewards
    if values is None or dense is None:
        return
    result.tried += 1
    gap = reported.gap(torch.where(batch.mask, dense - values, 0.0))
    if gap is not None:
        result.mistakes.append(
            AdvantageMatch({"baseline": "gae", "gamma": 0.0, "lam": 0.0, "scale": "none"}, ("reward_minus_value",), gap)
        )


def _roundoff(recording: Recording, batch: Batch, reported: _Reported, result: AdvantageResult) -> None:
    """A rule that fits every group with spread, while groups without spread are not 0."""
    generation = batch.gen_rewards is not None
    ids = batch.gen_group_ids if generation else batch.group_ids
    rewards = batch.gen_rewards if generation else batch.rewards
    if ids is None or rewards is None:
        return
    flat_rows = torch.as_tensor(in_level_group(ids.numpy(), rewards.numpy()))
    flat_rows = flat_rows[batch.row_ids] if generation else flat_rows
    wrong = flat_rows & (reported.values.abs() > reported.tolerance).any(1)
    if not wrong.any():
        return
    kept = _Reported(torch.where(wrong.unsqueeze(1), 0.0, reported.values), reported.mask, reported.tolerance)
    largest = float(reported.values[wrong].abs().max())
    _try_all(
        recording,
        batch,
        kept,
        result,
        "roundoff_std",
        wrong.nonzero().flatten().tolist(),
        f"|A| up to {largest:.3g} where all rewards of the group are equal",
    )
