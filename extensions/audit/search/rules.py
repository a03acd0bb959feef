"""The advantage rules that are tried, in words and as rows of the objectives table."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Iterator

import numpy as np
import torch

from extensions.audit.read.recording import Recording
from extensions.objectives import ROWS, Batch, make_batch

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
    fits: tuple[str, ...] = ()  # every reported array that it gives, over time
    made: dict | None = field(default=None, compare=False, repr=False)  # those arrays, recomputed

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
    unfit: dict[str, tuple[str, str, str]] = field(default_factory=dict)  # reported array that no match gives -> finding


def describe(fields: dict) -> str:
    f = fields
    words = {
        "none": "R",
        "group_mean": "R - group mean",
        "leave_one_out": "R - mean of the others",
        "batch_mean": "R - mean of the batch",
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
        "leave_one_out_std": "std of the others",
        "group_mean": "mean of the group",
        "batch_std_of_raw_rewards": "std of the batch's raw rewards",
        "batch_std": "std of the batch",
        "token_std": "std over the batch's tokens",
    }
    if f.get("scale") in ("batch_std", "token_std"):  # both are centred first
        text = "R - mean of the batch" if text == "R" else f"{text}, centred"
    if f.get("scale", "none") != "none":
        guard = {
            "add": "+ {:g}",
            "inside": "sqrt(var + {:g})",
            "floor": "floor {:g}",
            "floor_variance": "variance floor {:g}",
            "add_or_leave": "+ {:g}, unscaled where that is 0",
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
        if not row.advantage_extras and all(getattr(row, k) == v for k, v in {**defaults, **keys}.items()):
            names.append(name)
    return names


# ------------------------------------------------------------------------------------------ over answers and tokens


_ADVANTAGE_ARRAYS = (
    "rewards group_ids token_level_rewards rewards_per_func reward_weights reward_baselines gen_rewards "
    "gen_rewards_per_func gen_group_ids gen_lengths gen_kl row_ids old_logps ref_logps"
).split()


def advantage_batch(recording: Recording, mask: np.ndarray | None = None, **overrides) -> Batch:
    arrays = recording.arrays
    mask = arrays["mask"] if mask is None else mask
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


def later_group_rules() -> Iterator[dict]:
    """Rules of newer trainers: the spread of the others, MaxRL's division by the mean, one mean for the whole batch."""
    for ddof, eps, guard in ((1, 1e-6, "add"), (1, 1e-6, "add_or_leave"), (1, 1e-4, "add"), (0, 1e-6, "add")):
        scale = {"scale": "leave_one_out_std", "std_ddof": ddof, "std_eps": eps, "std_guard": guard}
        yield {"baseline": "leave_one_out", **scale, "singleton": "zero"}
    for eps in (1e-6, 1e-8, 0.0):
        yield {"baseline": "group_mean", "scale": "group_mean", "std_ddof": 0, "std_eps": eps, "singleton": "zero"}
    yield {"baseline": "batch_mean", "scale": "none"}


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
        yield from ({**fields, **missing} for fields in later_group_rules())
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
