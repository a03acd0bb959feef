"""Which rule gives the reported advantages: baselines and scales of the table over answers, GAE over tokens or time.

Every rule is a objectives.Row, computed by objectives.compute_advantages, and compared with what was reported, within the
rounding of the trainer's float32. Mistakes are edits of what the rule reads (groups, missing rewards, flags, the token that
holds the score) or of its standard deviation, and are tried where no rule fits.

Environments (terminated and truncated steps) have their own search: rewards, values, the true next values and the two flags
are laid out with time last, and each mistake is an edit of one of them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Iterator, NamedTuple

import numpy as np
import torch
from torch import Tensor

from extensions.audit.read.recording import Recording
from extensions.audit.search.forms import last_counted
from extensions.objectives import (
    ROWS,
    Batch,
    Row,
    arrange_groups,
    compute_advantages,
    make_batch,
    standardise_over_tokens,
)

STD_GUARDS = (
    (1, 1e-4, "add"),
    (1, 1e-6, "add"),
    (0, 1e-8, "add"),
    (1, 1e-8, "add"),
    (1, 1e-9, "add"),
    (0, 0.0, "add"),
    (1, 0.0, "add"),
    (0, 1e-4, "add"),
    (0, 1e-6, "add"),
    (0, 1e-5, "add"),
    (1, 1e-5, "add"),
    (0, 1e-9, "add"),
    (1, 1e-3, "add"),
    (0, 1e-3, "add"),
    (1, 1e-8, "inside"),
    (0, 1e-8, "floor_variance"),
    (1, 1e-6, "floor"),
)
"""(ddof, eps, guard) that public trainers use."""
TOKEN_GUARDS = (
    (1, 1e-8, "inside"),
    (1, 1e-8, "add"),
    (0, 1e-8, "add"),
    (0, 1e-8, "floor_variance"),
    (0, 0.0, "add"),
    (1, 0.0, "add"),
)
GAMMAS = (1.0, 0.99, 0.95, 0.9)
LAMS = (0.95, 1.0, 0.97, 0.9, 0.99, 0.0, 0.5)
KL_IN_REWARD = (0.05, 0.001, 0.01, 0.02, 0.04, 0.1, 0.005, 0.2)


@dataclass(frozen=True)
class AdvantageMatch:
    fields: dict
    mistakes: tuple[str, ...] = ()
    gap: float = 0.0  # largest difference to the reported advantages
    rows: tuple[int, ...] = ()
    remark: str = ""
    reads: str = "advantages"  # or "returns"

    def label(self) -> str:
        return describe(self.fields)


@dataclass
class AdvantageResult:
    matches: list[AdvantageMatch] = field(default_factory=list)
    mistakes: list[AdvantageMatch] = field(default_factory=list)
    tried: int = 0
    missing: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    checked: bool = False  # advantages and what a rule needs were there


def describe(fields: dict) -> str:
    f = fields
    words = {
        "none": "R",
        "group_mean": "R - group mean",
        "leave_one_out": "R - mean of the others",
        "length_weighted_mean": "R - length-weighted group mean",
        "best_minus_second": "best - second for the best answer",
        "greedy": "R - reward of the greedy answer",
        "gae": f"GAE gamma {f.get('gamma', 1):g} lambda {f.get('lam', 0.95):g}",
        "given": "advantages_raw",
    }
    text = words[f.get("baseline", "none")]
    if f.get("reward_parts") == "normalise_then_sum":
        text = "weighted sum of each reward's group-normalised value"
    if f.get("credit") == "reward_to_go":
        text = text.replace("R", "reward to go") + f" gamma {f.get('gamma', 1):g}"
    if f.get("kl_coef"):
        text += f", R less {f['kl_coef']:g} times the KL (k1)"
    scales = {
        "group_std": "std of the group",
        "batch_std_of_raw_rewards": "std of the batch's raw rewards",
        "batch_std": "std over answers, centred",
        "token_std": "std over tokens, centred",
    }
    if f.get("scale", "none") != "none":
        guard = {
            "add": "+ {:g}",
            "inside": "sqrt(var + {:g})",
            "floor": "floor {:g}",
            "floor_variance": "variance floor {:g}",
        }
        text = f"({text}) / {scales[f['scale']]}, ddof {f['std_ddof']}, " + guard[f.get("std_guard", "add")].format(
            f["std_eps"]
        )
    if f.get("singleton") in ("raw", "zero") and f.get("baseline") not in ("none", "given", "gae", "greedy"):
        text += f", a group of one {'keeps its reward' if f['singleton'] == 'raw' else 'gets 0'}"
    return text


def rows_with(fields: dict) -> list[str]:
    """Named rows whose advantage part is this rule (a KL in the reward and gamma, lambda are the user's)."""
    names = []
    for name, row in ROWS.items():
        keys = {k: v for k, v in fields.items() if k in ("baseline", "scale", "credit", "reward_parts")}
        if fields.get("scale", "none") != "none":
            keys |= {k: fields[k] for k in ("std_ddof", "std_eps", "std_guard") if k in fields}
        defaults = {"scale": "none", "credit": "outcome", "reward_parts": "sum_then_normalise"}
        if all(getattr(row, k) == v for k, v in {**defaults, **keys}.items()):
            names.append(name)
    return names


# ------------------------------------------------------------------------------------------ over answers and tokens


_ADVANTAGE_ARRAYS = (
    "rewards group_ids token_level_rewards rewards_per_func reward_weights reward_baselines gen_rewards "
    "gen_rewards_per_func gen_group_ids gen_lengths gen_kl row_ids old_logps ref_logps"
).split()


def advantage_batch(recording: Recording, **overrides) -> Batch:
    arrays = recording.arrays
    mask = arrays["mask"]
    given = {name: arrays[name] for name in _ADVANTAGE_ARRAYS if name in arrays}
    if not ("row_ids" in given and "gen_rewards" in given):
        given = {name: value for name, value in given.items() if not name.startswith("gen_") and name != "row_ids"}
    if "rewards_per_func" in given and "reward_weights" not in given:
        given["reward_weights"] = np.ones(given["rewards_per_func"].shape[1])
    if "values" in arrays and arrays["values"].shape == mask.shape and mask.shape[1] > 1:
        given["values"] = arrays["values"]
    given |= overrides
    given = {name: value for name, value in given.items() if value is not None}
    return make_batch(logps=np.zeros(mask.shape), mask=mask, allow_empty_rows=True, dtype=torch.float64, **given)


def rules(recording: Recording, batch: Batch) -> Iterator[dict]:
    """Every rule the batch has the arrays for, likeliest first."""
    has_groups = batch.group_ids is not None or batch.gen_group_ids is not None
    has_rewards = any(
        x is not None for x in (batch.rewards, batch.token_level_rewards, batch.rewards_per_func, batch.gen_rewards)
    )
    raw = batch.gen_rewards if batch.gen_rewards is not None else batch.rewards
    missing = {"missing_reward": "exclude"} if raw is not None and bool(raw.isnan().any()) else {}
    number = recording.number
    gammas = dict.fromkeys([g for g in (number("gamma"), *GAMMAS) if g is not None])
    lams = dict.fromkeys([lam for lam in (number("lam"), *LAMS) if lam is not None])
    if has_rewards and has_groups:
        for ddof, eps, guard in STD_GUARDS:
            for singleton in ("raw", "zero"):
                yield {
                    "baseline": "group_mean",
                    "scale": "group_std",
                    "std_ddof": ddof,
                    "std_eps": eps,
                    "std_guard": guard,
                    "singleton": singleton,
                    **missing,
                }
        for baseline in ("group_mean", "leave_one_out", "length_weighted_mean"):
            for singleton in ("raw", "zero"):
                yield {"baseline": baseline, "scale": "none", "singleton": singleton, **missing}
        for ddof, eps in ((1, 1e-4), (1, 1e-8), (0, 1e-8), (0, 1e-4)):
            yield {
                "baseline": "group_mean",
                "scale": "batch_std_of_raw_rewards",
                "std_ddof": ddof,
                "std_eps": eps,
                "singleton": "zero",
                **missing,
            }
            for baseline in ("group_mean", "leave_one_out"):
                yield {
                    "baseline": baseline,
                    "scale": "batch_std",
                    "std_ddof": ddof,
                    "std_eps": eps,
                    "singleton": "zero",
                    **missing,
                }
        for ddof, eps, guard in TOKEN_GUARDS:
            for singleton in ("raw", "zero"):
                yield {
                    "baseline": "group_mean",
                    "scale": "token_std",
                    "std_ddof": ddof,
                    "std_eps": eps,
                    "std_guard": guard,
                    "singleton": singleton,
                    **missing,
                }
        for ddof, eps in ((1, 1e-6), (1, 1e-4), (0, 1e-8), (1, 1e-8)):
            yield {
                "baseline": "best_minus_second",
                "scale": "group_std",
                "std_ddof": ddof,
                "std_eps": eps,
                "singleton": "zero",
                **missing,
            }
        yield {"baseline": "best_minus_second", "scale": "none", "singleton": "zero", **missing}
        if batch.rewards_per_func is not None and batch.rewards_per_func.shape[1] > 1:
            yield {
                "reward_parts": "normalise_then_sum",
                "baseline": "none",
                "scale": "batch_std",
                "std_ddof": 1,
                "std_eps": 1e-4,
                "singleton": "zero",
                **missing,
            }
    is_whole = batch.row_ids is None or batch.token_level_rewards is not None  # not a micro-batch of a generation batch
    if has_rewards:
        yield {"baseline": "none", "scale": "none", **missing}
        for ddof, eps in ((1, 1e-8), (0, 1e-8), (1, 1e-4)):
            yield {"baseline": "none", "scale": "batch_std", "std_ddof": ddof, "std_eps": eps, **missing}
        if not missing and is_whole:
            credited = [{"baseline": "none", "credit": "reward_to_go", "gamma": gamma} for gamma in gammas]
            for fields in credited:
                yield {**fields, "scale": "none"}
                for ddof, eps, guard in TOKEN_GUARDS:
                    yield {**fields, "scale": "token_std", "std_ddof": ddof, "std_eps": eps, "std_guard": guard}
            if batch.reward_baselines is not None:
                for gamma in gammas:
                    yield {"baseline": "greedy", "credit": "reward_to_go", "gamma": gamma, "scale": "none"}
                yield {"baseline": "greedy", "scale": "none"}
    if batch.values is not None and has_rewards and not missing and is_whole:
        for gamma, lam in itertools.product(gammas, lams):
            fields = {"baseline": "gae", "gamma": gamma, "lam": lam}
            yield {**fields, "scale": "none"}
            for ddof, eps, guard in TOKEN_GUARDS[:4]:
                yield {**fields, "scale": "token_std", "std_ddof": ddof, "std_eps": eps, "std_guard": guard}
    if batch.advantages is not None:
        yield {"baseline": "given", "scale": "none"}
        for ddof, eps, guard in TOKEN_GUARDS:
            yield {"baseline": "given", "scale": "token_std", "std_ddof": ddof, "std_eps": eps, "std_guard": guard}


class _Reported(NamedTuple):
    values: Tensor  # (N, T)
    mask: Tensor
    tolerance: Tensor  # (N, 1)

    def gap(self, made: Tensor, slack: float = 1.0) -> float | None:
        """Largest difference, or None where one is beyond the rounding of its row."""
        apart = (made - self.values).abs()
        return float(apart.max()) if bool((apart <= slack * self.tolerance).all()) else None


def _reported(recording: Recording) -> _Reported:
    mask = torch.as_tensor(recording.arrays["mask"])
    A = torch.as_tensor(recording.arrays["advantages"])
    A = A.unsqueeze(1).expand(mask.shape) if A.dim() == 1 else A
    used = A[mask]
    largest = float(used.abs().max()) if used.numel() else 0.0
    scale = 1 if recording.eps < 1e-5 else 4 * recording.eps / 1.2e-6
    noise = torch.as_tensor(_reward_noise(recording.arrays, len(mask))).unsqueeze(1)
    return _Reported(torch.where(mask, A, 0.0), mask, scale * (1.2e-6 * max(1.0, largest) + noise))


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
    lost = 2.4e-7 * np.abs(raw[finite]).max()
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


def search_advantages(recording: Recording, *, look_for_mistakes: bool = True) -> AdvantageResult:
    """The rules that give the reported advantages of a rollout; mistakes where none does."""
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
        _search(recording, batch, reported, result, look_for_mistakes)
    finally:
        _unscaled.cache_clear()
    return result


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
    if batch.values is not None or arrays["mask"].shape[1] > 1:
        _misplaced_scores(recording, batch, reported, result, edited)
        _reward_minus_value(recording, batch, reported, result)


def in_level_group(ids: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """True for answers of a group of two or more whose rewards are all equal (to a few ulps).

    A missing reward is not compared.
    """
    _, inverse, sizes = np.unique(ids, return_inverse=True, return_counts=True)
    order = np.argsort(inverse, kind="stable")
    starts = np.cumsum(sizes) - sizes
    finite = np.isfinite(rewards)
    highest = np.maximum.reduceat(np.where(finite, rewards, -np.inf)[order], starts)
    lowest = np.minimum.reduceat(np.where(finite, rewards, np.inf)[order], starts)
    count = np.add.reduceat(finite[order].astype(int), starts)
    with np.errstate(invalid="ignore"):
        level = (count > 1) & (
            highest - lowest <= 8 * np.finfo(np.float64).eps * np.maximum(np.abs(highest), np.abs(lowest))
        )
    return level[inverse]


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


# ------------------------------------------------------------------------------------------ environments: time


@dataclass
class Timeline:
    """One layout, time last: rewards, values, values of the true next observation, and the two flags. (E, T)."""

    rewards: np.ndarray
    values: np.ndarray
    next_values: np.ndarray
    terminated: np.ndarray
    boundary: np.ndarray
    reported: dict[str, np.ndarray]
    has_both_flags: bool
    has_final_values: bool
    flagged: np.ndarray  # boundary as recorded, without the end of the buffer
    after_last: np.ndarray  # (E,) value after the last step
    gamma: float | None = None


def is_environment(recording: Recording) -> bool:
    arrays = recording.arrays
    return (
        ("rewards" in arrays or "env_rewards" in arrays)
        and ("values" in arrays or "next_values" in arrays)
        and any(
            name in arrays
            for name in ("last_values", "next_values", "terminated", "discounts", "boundary", "episode_starts")
        )
        and "logps" not in arrays
    )


def timeline(recording: Recording) -> tuple[Timeline | None, list[str]]:
    """Lay a recorded rollout out with time last. Returns what is missing, too."""
    a = {name: value for name, value in recording.arrays.items()}
    time_first = (
        "last_values" in a
        and a.get("values", np.zeros(0)).ndim == 2
        and a["last_values"].ndim == 1
        and (a["last_values"].shape[0] == a["values"].shape[1])
    )
    names = (
        "rewards",
        "env_rewards",
        "values",
        "next_values",
        "terminated",
        "truncated",
        "boundary",
        "terminal_values",
        "episode_starts",
        "advantages",
        "returns",
        "discounts",
    )

    def laid(name: str):
        value = a.get(name)
        if value is None:
            return None
        value = value.T if time_first and value.ndim == 2 else value
        return value if value.ndim == 2 else value.reshape(1, -1) if value.ndim == 1 else None

    x = {name: laid(name) for name in names}
    missing = []
    rewards = x["env_rewards"] if x["env_rewards"] is not None else x["rewards"]
    if rewards is None:
        return None, ["rewards"]
    E, T = rewards.shape
    values = x["values"]
    after = None
    if values is not None and values.shape == (E, T + 1):
        after, values = values[:, -1], values[:, :-1]
    if "last_values" in a and a["last_values"].size == E:
        after = a["last_values"].reshape(E)
    next_values = x["next_values"]
    if next_values is not None and values is None and x["returns"] is not None:
        values = np.zeros_like(next_values)
        values[:, 1:] = next_values[:, :-1]
    shapes = {name: value.shape for name, value in x.items() if value is not None} | {
        name: value.shape for name, value in (("values", values), ("next_values", next_values)) if value is not None
    }
    shapes |= {name: (E, T) if a[name].size == E else a[name].shape for name in ("last_dones", "last_values") if name in a}
    wrong = [f"{name} {shape}" for name, shape in shapes.items() if shape != (E, T)]
    if wrong:
        return None, [f"arrays of one shape {(E, T)}: got {', '.join(wrong)}"]
    if values is None:
        return None, ["values of the critic"]
    terminated, truncated, boundary = x["terminated"], x["truncated"], x["boundary"]
    discounts = x["discounts"]
    gamma = None
    if discounts is not None and discounts.shape == (E, T):
        terminated = discounts == 0 if terminated is None else terminated
        inside = discounts[discounts > 0]
        if inside.size and np.ptp(inside) < 1e-6:
            gamma = float(np.round(inside[0], 6))
    if boundary is None and x["episode_starts"] is not None and terminated is None:
        boundary = np.zeros((E, T), dtype=bool)
        boundary[:, :-1] = x["episode_starts"][:, 1:]
        if "last_dones" in a:
            boundary[:, -1] = a["last_dones"].reshape(E)
    has_both = terminated is not None and (truncated is not None or boundary is not None)
    if boundary is None:
        boundary = (terminated if terminated is not None else np.zeros((E, T), bool)) | (
            truncated if truncated is not None else False
        )
    elif truncated is not None:
        boundary = boundary | truncated
    if terminated is None:
        terminated = boundary & ~truncated if truncated is not None else boundary
        missing.append("terminated and truncated as two flags (one flag was recorded)")
    boundary = boundary | terminated
    has_final = next_values is not None or x["terminal_values"] is not None
    if next_values is None:
        next_values = np.zeros_like(values)
        next_values[:, :-1] = values[:, 1:]
        if after is None:
            missing.append("last_values: the value after the last step")
            after = np.zeros(E)
        next_values[:, -1] = after
        if x["terminal_values"] is not None:
            cut = boundary & ~terminated
            next_values = np.where(cut & np.isfinite(x["terminal_values"]), x["terminal_values"], next_values)
        if (boundary[:, :-1] & ~terminated[:, :-1]).any() and not has_final:
            missing.append("terminal_values: the value of the true final observation at each time limit (before the reset)")
    if after is None:
        after = next_values[:, -1]
    flagged = boundary
    boundary = boundary.copy()
    boundary[:, -1] = True
    reported = {name: x[name] for name in ("advantages", "returns") if x[name] is not None}
    if not reported:
        missing.append("advantages or returns, as the loss used them")
    number = recording.number("gamma")
    return (
        Timeline(
            rewards,
            values,
            next_values,
            terminated,
            boundary,
            reported,
            has_both,
            has_final,
            flagged,
            after,
            number if number is not None else gamma,
        ),
        missing,
    )


def _gae(r, v, vn, terminated, boundary, gamma, lam) -> np.ndarray:
    """The recursion of rl_lab.gae (a test compares them) without its refusals: mistakes need flags it would not take."""
    delta = r + gamma * np.where(terminated, 0.0, vn) - v
    out = np.zeros_like(delta)
    following = np.zeros(delta.shape[0])
    for t in range(delta.shape[1] - 1, -1, -1):
        following = delta[:, t] + gamma * lam * np.where(boundary[:, t], 0.0, following)
        out[:, t] = following
    return out


def _late(flags: np.ndarray) -> np.ndarray:
    """Step t reads the flag of t + 1; the last step keeps its own."""
    moved = flags.copy()
    moved[:, :-1] = flags[:, 1:]
    return moved


def _early(flags: np.ndarray) -> np.ndarray:
    moved = np.zeros_like(flags)
    moved[:, 1:] = flags[:, :-1]
    return moved


def time_edits(x: Timeline) -> Iterator[tuple[str, dict, np.ndarray]]:
    """Name, edited arrays, rows and steps concerned, for every mistake that changes something."""
    base = {"r": x.rewards, "v": x.values, "vn": x.next_values, "terminated": x.terminated, "boundary": x.boundary}
    cut = x.flagged & ~x.terminated  # time limits
    ends = np.zeros_like(x.boundary)
    ends[:, -1] = True
    cut_inside = cut & ~ends
    if cut.any():
        yield "one_flag_for_two", {**base, "terminated": x.terminated | cut}, cut
    if cut_inside.any():
        following = np.zeros_like(x.values)
        following[:, :-1] = x.values[:, 1:]
        following[:, -1] = x.after_last
        reset = np.where(cut_inside, following, x.next_values)
        if (reset != x.next_values).any():
            yield "reset_value_used", {**base, "vn": reset}, cut_inside
    inner = x.boundary & ~ends
    if inner.any():
        yield "leak_across_episodes", {**base, "boundary": ends}, inner
        only_terminal = x.terminated | ends
        if (only_terminal != x.boundary).any():
            yield "leak_across_episodes", {**base, "boundary": only_terminal}, inner & ~x.terminated
        for mover in (_late, _early):
            term, bound = mover(x.terminated), mover(x.flagged) | ends
            yield "shifted_flags", {**base, "terminated": term, "boundary": bound}, inner
            yield "shifted_flags", {**base, "terminated": term, "boundary": term | ends}, inner
            following = np.zeros_like(x.values)
            following[:, :-1] = x.values[:, 1:]
            following[:, -1] = x.after_last
            yield "shifted_flags", {**base, "terminated": term, "boundary": bound, "vn": following}, inner
    trimmed = x.next_values.copy()
    trimmed[:, -1] = x.values[:, -1]
    yield "last_bootstrap_trimmed", {**base, "vn": trimmed}, ends
    late = np.zeros_like(x.rewards)
    late[:, 1:] = x.rewards[:, :-1]
    yield "rewards_one_slot_late", {**base, "r": late}, np.ones_like(ends)


def search_time(recording: Recording) -> AdvantageResult:
    """GAE (advantages) or lambda-returns of an environment's rollout, with two flags; mistakes where that does not fit."""
    result = AdvantageResult()
    x, missing = timeline(recording)
    result.missing += missing
    if x is None or not x.reported:
        return result
    numbers = [x.rewards, x.values, *x.reported.values()]
    if not all(np.isfinite(array).all() for array in numbers) or not np.isfinite(x.next_values[~x.terminated]).all():
        result.remarks.append("rewards, values or advantages are not finite")
        return result
    x.next_values = np.where(np.isfinite(x.next_values), x.next_values, 0.0)
    result.checked = True
    gammas = dict.fromkeys([g for g in (x.gamma, *GAMMAS) if g is not None])
    known = recording.number("lam")
    lams = dict.fromkeys([lam for lam in (known, *LAMS) if lam is not None])
    base = {"r": x.rewards, "v": x.values, "vn": x.next_values, "terminated": x.terminated, "boundary": x.boundary}

    def compare(arrays: dict, mistake: str | None, where: np.ndarray | None) -> None:
        for gamma, lam in itertools.product(gammas, lams):
            result.tried += 1
            A = _gae(**arrays, gamma=gamma, lam=lam)
            for name, reported in x.reported.items():
                made = A if name == "advantages" else A + x.values
                tolerance = (
                    2e-6 * max(1.0, float(np.abs(reported).max())) * (1 if recording.eps < 1e-5 else recording.eps / 1e-6)
                )
                gap = float(np.abs(made - reported).max())
                if gap <= tolerance:
                    rows = () if where is None else tuple(np.flatnonzero(where.any(1)).tolist())
                    steps = [] if where is None else np.argwhere(where)[:6].tolist()
                    words = "" if where is None else "row, step: " + ", ".join(f"({e}, {t})" for e, t in steps)
                    match = AdvantageMatch(
                        {"baseline": "gae", "gamma": gamma, "lam": lam, "scale": "none"},
                        (mistake,) if mistake else (),
                        gap,
                        rows,
                        words,
                        name,
                    )
                    (result.mistakes if mistake else result.matches).append(match)
                    break

    compare(base, None, None)
    if not result.matches:
        for name, arrays, where in time_edits(x):
            if any((arrays[k] != base[k]).any() for k in base):
                compare(arrays, name, where)
        if "advantages" in x.reported:
            result.tried += 1
            gap = float(np.abs(x.rewards - x.values - x.reported["advantages"]).max())
            if gap <= 2e-6 * max(1.0, float(np.abs(x.rewards).max())):
                result.mistakes.append(
                    AdvantageMatch(
                        {"baseline": "gae", "gamma": 0.0, "lam": 0.0, "scale": "none"}, ("reward_minus_value",), gap
                    )
                )
    return result
