"""How good the audit is: plant every mistake into every shipped capture, and throw damaged files at the reader.

    python -m extensions.audit --self-test                     the table: mistake by mistake, how often it was named
    python -m extensions.audit --self-test --damaged 10000     truncated, random, wrong and hostile files

A planted batch is a capture whose reported numbers were computed again by `naive_loss`, with the mistake in it. naive_loss
shares nothing with the audit or with objectives.py: it is the loss as a trainer writes it, in float32, and its gradient is
autograd's. That the right version of naive_loss reproduces the recorded loss and gradient of each capture is a test.

A row of the table counts the planted batches in which the mistake changes a number. Named: the audit has a finding of that
name; wrong: it has none as severe, and another name as a mistake. Each batch is audited with the gradient and with loss and
advantages only, with the right row declared and (in a second pair of columns) without. A mistake that is a right choice
elsewhere (a sum for a mean, ddof 1 for 0) can only be one against a declaration, so without one it is not counted.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import random
import struct
import sys
import tempfile
import textwrap
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Callable, Iterator

import numpy as np
import torch

import rl_lab
from extensions.audit.run import audit
from extensions.audit.search.advantages import is_environment
from extensions.audit.declared import Declared
from extensions.audit.search.forms import shifted
from extensions.audit.search.pairs import is_preference
from extensions.audit.read.recording import read_recording, recording_from
from extensions.audit.say.report import Report, printed
from extensions.objectives import PREFERENCE_ROWS, ROWS

CAPTURES = Path(__file__).parents[1] / "captures"
INF = math.inf


def manifest() -> list[dict]:
    lines = (CAPTURES / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry for entry in map(json.loads, lines) if (CAPTURES / entry["file"]).exists()]


def load(file: str) -> dict[str, np.ndarray]:
    with np.load(CAPTURES / file, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


# ------------------------------------------------------------------------------------------ what each capture is


@dataclass(frozen=True)
class Truth:
    """What the trainer of a capture computes, from its configuration alone."""

    row: str
    ratio: str = "token"
    surrogate: str = "clip"
    low: float = 0.2
    high: float = 0.2
    cap: float = 3.0
    kl: str = "none"
    beta: float = 0.0
    kl_weight: str = "none"
    reduction: str = "mean_per_response"
    rows_counted: str = "all"
    accumulation: int = 1
    divides: bool = False  # the returned loss is divided by the accumulation steps
    window: float | None = None
    budget: float | None = None
    entropy_coef: float = 0.0
    off_policy: float | None = None
    advantage: tuple[tuple[str, object], ...] = ()  # fields of the row's advantage part that the configuration changes

    def fields(self) -> dict:
        made = {"ratio": self.ratio, "reduction": self.reduction, "kl": self.kl}
        if self.ratio != "none":
            made["surrogate"] = self.surrogate
        if self.surrogate in ("clip", "dual_clip", "cispo") and self.ratio != "none":
            made |= {"clip_low": self.low, "clip_high": self.high}
        if self.kl != "none":
            made |= {"kl_coef": self.beta, "kl_weight": self.kl_weight}
        if self.off_policy is not None:
            made["off_policy_rows"] = "drop"
        return made

    def numbers(self) -> dict[str, float]:
        """What an engineer would set: the trainer's configuration."""
        made = {"accumulation_steps": float(self.accumulation)}
        if self.surrogate in ("clip", "dual_clip"):
            made |= {"clip_low": self.low, "clip_high": self.high}
        if self.kl != "none":
            made["beta"] = self.beta
        if self.budget:
            made["budget"] = self.budget
        return made

    def declared(self) -> Declared:
        row = ROWS[self.row]
        changes: dict = {"ratio": self.ratio, "surrogate": self.surrogate, "reduction": self.reduction}
        if self.surrogate in ("clip", "dual_clip", "cispo"):
            changes |= {"clip_low": self.low, "clip_high": self.high}
        changes |= {"kl": self.kl if self.kl != "none" else row.kl, "kl_coef": self.beta}
        if self.kl != "none":
            changes |= {"kl_weight": self.kl_weight, "kl_place": "loss"}
        if row.kl_place == "reward":
            changes = {k: v for k, v in changes.items() if not k.startswith("kl")}
        if self.off_policy is not None:
            changes |= {"off_policy_rows": "drop", "off_policy_threshold": self.off_policy}
        changes |= {"entropy_coef": self.entropy_coef} if self.entropy_coef else {}
        changes |= dict(self.advantage)
        changes["accumulation"] = "divide" if self.divides else "none"
        return Declared(replace(row, **changes), ("clip_low", "clip_high"))


TRL_REDUCTIONS = {
    "grpo": "mean_per_response",
    "sapo": "mean_per_response",
    "bnpo": "mean_over_tokens",
    "dapo": "mean_over_window",
    "cispo": "mean_over_window",
    "vespo": "mean_over_window",
    "dr_grpo": "sum_over_budget",
    "luspo": "sum_per_response",
}
VERL_REDUCTIONS = {
    "token-mean": "mean_over_tokens",
    "token-sum": "sum_over_tokens",
    "seq-mean-token-sum": "sum_per_response",
    "seq-mean-token-sum-norm": "sum_over_width",
    "seq-mean-token-mean": "mean_per_response",
}


def truth_of(entry: dict, arrays: dict) -> Truth | None:
    """The right answer for a capture that holds a policy loss; None for the other kinds."""
    config, kind = entry["config_effective"], entry["kind"]
    if kind == "grpo":
        loss = config["loss_type"]
        is_sequence = config["importance_sampling_level"] == "sequence"
        name = {"grpo": "gspo"}.get(loss, loss) if is_sequence else loss
        steps = entry["capture"]["current_gradient_accumulation_steps"]
        made = Truth(
            f"{name}@trl-1.16.0",
            ratio="sequence_mean" if is_sequence else "token",
            low=config["epsilon"],
            high=config["epsilon_high"],
            reduction=TRL_REDUCTIONS[loss],
            accumulation=steps,
            divides=TRL_REDUCTIONS[loss] != "mean_over_window",
            window=float(arrays["num_items_in_batch"]) * steps / config["steps_per_generation"],
            budget=float(config["max_completion_length"]),
            entropy_coef=config["entropy_coef"],
            off_policy=config["off_policy_mask_threshold"],
        )
        scale = {"group": "group_std", "batch": "batch_std_of_raw_rewards", "none": "none"}[config["scale_rewards"]]
        made = replace(made, advantage=(("scale", scale), ("std_ddof", 1), ("std_eps", 1e-4)))
        if config["multi_objective_aggregation"] == "normalize_then_sum":
            made = replace(made, row="gdpo@trl-1.16.0", advantage=())
        if loss in ("sapo", "vespo"):
            made = replace(made, surrogate=loss)
        if loss == "cispo":
            made = replace(made, surrogate="cispo", low=INF, high=config["epsilon_high"] - 1)
        if config["beta"]:
            made = replace(
                made, kl="k3", beta=config["beta"], kl_weight="ratio" if config["use_bias_correction_kl"] else "none"
            )
        return made
    if kind == "rloo":
        return Truth(
            "rloo@trl-1.16.0",
            ratio="sequence_product",
            low=config["epsilon"],
            high=config["epsilon_high"],
            accumulation=entry["capture"]["current_gradient_accumulation_steps"],
        )
    if kind == "policy_loss":
        mode = entry["config"]["loss_mode"]
        if mode not in ("vanilla", "gspo", "cispo", "gpg"):
            return None
        low, high = config["clip_ratio_low"], config["clip_ratio_high"]
        made = Truth(
            {"vanilla": "grpo"}.get(mode, mode) + "@verl-0.9.1",
            low=low,
            high=high,
            reduction=VERL_REDUCTIONS[config["loss_agg_mode"]],
            rows_counted="nonempty",
        )
        made = replace(
            made,
            **{
                "vanilla": {"surrogate": "dual_clip"},
                "gspo": {"ratio": "sequence_mean_token"},
                "cispo": {"surrogate": "cispo"},
                "gpg": {"ratio": "none", "surrogate": "plain"},
            }[mode],
        )
        window = config["global_batch_info"]
        if window.get("batch_num_tokens"):
            made = replace(made, reduction="mean_over_window", window=window["batch_num_tokens"] / window.get("dp_size", 1))
        return made
    if kind == "ppo" and "rho" in arrays:
        return Truth(
            "ppo@rlax-0.1.9", low=entry["config"]["epsilon"], high=entry["config"]["epsilon"], reduction="mean_over_tokens"
        )
    return None


# ------------------------------------------------------------------------------------------ the loss as a trainer writes it


class Plant:
    """Arrays and switches that a mistake turns; everything that naive_loss reads."""

    def __init__(self, truth: Truth, arrays: dict[str, np.ndarray]):
        self.truth = truth
        as_float = lambda name: (
            None if name not in arrays else torch.as_tensor(np.asarray(arrays[name], dtype=np.float32))
        )  # noqa: E731
        self.l, self.l0, self.lr, self.A = (as_float(n) for n in ("logps", "old_logps", "ref_logps", "advantages"))
        self.entropies = as_float("entropies")
        self.mask = torch.as_tensor(np.asarray(arrays["mask"], dtype=bool))
        self.mistake: str | None = None
        self.denominator_mask: torch.Tensor | None = None
        self.factor = 1.0


def naive_loss(p: Plant) -> tuple[float, np.ndarray]:
    """The loss of a trainer, with p.mistake in it, and autograd's gradient with respect to the token log-probabilities."""
    t, m = p.truth, p.mistake
    l = p.l.clone().requires_grad_()
    mask = p.mask.float()
    A = p.A[:, None] if p.A.dim() == 1 else p.A
    if m == "advantages_aligned_with_time":
        A = p.A[None, :]
    l0 = l.detach() if p.l0 is None else p.l0
    if m == "old_logps_recomputed":
        l0 = l.detach()
    if m == "old_logps_not_detached":
        l0 = l
    d = torch.where(p.mask, l - l0, torch.zeros(()))
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    if t.ratio == "token":
        log_ratio = d
    elif t.ratio == "sequence_product" or m == "sequence_sum_for_mean":
        log_ratio = d.sum(1, keepdim=True)
    else:
        log_ratio = d.sum(1, keepdim=True) / lengths
        if t.ratio == "sequence_mean_token":
            log_ratio = l - l.detach() + log_ratio.detach()
    r = torch.exp(-log_ratio if m == "ratio_inverted" else log_ratio)
    if m == "ratio_detached":
        r = r.detach()
    if m == "cap_after_exp":
        r = r.clamp(max=10.0)
    low, high = (t.high, t.low) if m == "clip_sides_swapped" else (t.low, t.high)
    if t.ratio == "none":
        J = A * l
    elif t.surrogate in ("clip", "dual_clip"):
        if m == "clip_one_sided":
            clipped = r.clamp(max=1 + high)
        elif m == "clip_lower_bound_wrong":
            clipped = r.clamp(low, 1 + high)
        else:
            clipped = r.clamp(1 - low, 1 + high)
        if m == "clip_without_min":
            J = clipped * A
        elif m == "max_for_min":
            J = torch.maximum(r * A, clipped * A)
        elif m == "min_before_multiplying":
            J = torch.minimum(r, clipped) * A
        else:
            J = torch.minimum(r * A, clipped * A)
        if m == "dual_clip_on_positive":
            J = torch.maximum(J, t.cap * A)
        elif t.surrogate == "dual_clip" and m not in ("max_for_min", "clip_without_min", "min_before_multiplying"):
            J = torch.where(A < 0, torch.maximum(J, t.cap * A), J)
        if t.off_policy is not None:
            lag = torch.where(p.mask, l0 - l, torch.zeros(())).sum(1, keepdim=True) / lengths
            J = torch.where((A < 0) & (lag > t.off_policy), torch.zeros(()), J)
    elif t.surrogate == "cispo":
        w = r.clamp(max=1 + high) if math.isinf(low) else r.clamp(1 - low, 1 + high)
        J = (w if m == "missing_stop_gradient" else w.detach()) * A * l
    elif t.surrogate == "sapo":
        tau = torch.where(A > 0, 1.0, 1.05)
        J = torch.sigmoid(tau * (r - 1)) * 4 / tau * A
    else:  # vespo
        k, lam = torch.where(A >= 0, 2.0, 3.0), torch.where(A >= 0, 3.0, 2.0)
        log_w = d.clamp(-20, 20).sum(1, keepdim=True).clamp(math.log(1e-8), 20)
        J = torch.exp(lam + k * log_w - lam * torch.exp(log_w)).detach() * A * l
    x = -J.expand(l.shape)
    if m == "loss_sign":
        x = -x
    if t.kl != "none":
        dk = torch.where(p.mask, l - p.lr, torch.zeros(()))
        if m == "kl_direction":
            dk = -dk
        k = torch.exp(-dk) + dk - 1
        if m == "kl_ratio_for_log_ratio":
            R = torch.exp(-dk)
            k = torch.exp(R) - R - 1
        if m == "kl_estimator_gradient":
            k = dk
        if t.kl_weight == "ratio" and m not in ("kl_ratio_for_log_ratio", "kl_estimator_gradient"):
            k = r * k
        if m == "kl_without_gradient":
            k = k.detach()
        beta = t.beta**2 if m == "beta_twice" else t.beta
        x = x + (-beta if m == "kl_sign" else beta) * k
    x = torch.where(p.mask, x, torch.zeros(()))
    below = mask if p.denominator_mask is None else p.denominator_mask.float()
    rows = float((mask.sum(1) > 0).sum()) if t.rows_counted == "nonempty" else float(len(mask))
    if t.reduction == "mean_per_response":
        loss = (x.sum(1) / below.sum(1).clamp(min=1)).sum() / rows
    elif t.reduction == "mean_over_window" and m not in ("padding_in_denominator", "dropped_rows_in_denominator"):
        loss = x.sum() / (t.window if t.window is not None else below.sum())
    elif t.reduction in ("mean_over_tokens", "mean_over_window"):
        loss = x.sum() / (below.sum() if m != "padding_in_denominator" else float(mask.numel()))
    elif t.reduction == "sum_over_budget":
        loss = x.sum() / rows / t.budget
    elif t.reduction == "sum_over_width":
        loss = x.sum() / rows / mask.shape[1]
    elif t.reduction == "sum_per_response":
        loss = x.sum() / rows
    else:
        loss = x.sum()
    if t.divides:
        loss = loss / t.accumulation
    loss = loss * p.factor
    (gradient,) = torch.autograd.grad(loss, l, retain_graph=True, allow_unused=True) if loss.requires_grad else (None,)
    if t.entropy_coef and p.entropies is not None:
        sign = 1 if m == "entropy_sign" else -1
        loss = loss + sign * t.entropy_coef * (p.entropies * mask).sum() / mask.sum()
    return float(loss.detach()), np.zeros(l.shape, np.float32) if gradient is None else gradient.numpy()


# ------------------------------------------------------------------------------------------ planting


@dataclass
class Planted:
    """One planted batch: raw arrays as a trainer would have recorded them, and what must be named."""

    capture: str
    mistake: str
    arrays: dict[str, np.ndarray]
    declared: Declared | None
    numbers: dict[str, float]
    changed_value: bool
    changed_gradient: bool
    needs_declared: bool = False
    is_loss: bool = True
    names: tuple[str, ...] = ()  # accepted besides the mistake's own

    @property
    def accepted(self) -> tuple[str, ...]:
        return (self.mistake, *self.names)


def _recorded(arrays: dict, loss: float, gradient: np.ndarray, **changes) -> dict:
    drop = ("loss", "dloss_dlogps", "dloss_dentropies", "backward_dlogps", "logits", "dloss_drho", "rho")
    made = {name: value for name, value in arrays.items() if name not in drop}
    return made | {"loss": np.float32(loss), "dloss_dlogps": gradient} | changes


def _differs(a: tuple[float, np.ndarray], b: tuple[float, np.ndarray], size: float) -> tuple[bool, bool]:
    """Whether a value and a gradient differ by more than rounding; a change of 1e-4 of the terms counts."""
    value = not abs(a[0] - b[0]) <= 1e-4 * max(size, abs(b[0]))
    gradient = float(np.linalg.norm(a[1] - b[1])) > 1e-3 * max(float(np.linalg.norm(b[1])), 1e-12)
    return value, gradient


LOSS_PLANTS = (
    "old_logps_recomputed",
    "old_logps_not_detached",
    "ratio_detached",
    "ratio_inverted",
    "clip_sides_swapped",
    "clip_one_sided",
    "clip_lower_bound_wrong",
    "clip_without_min",
    "max_for_min",
    "min_before_multiplying",
    "dual_clip_on_positive",
    "sequence_sum_for_mean",
    "cap_after_exp",
    "missing_stop_gradient",
    "kl_sign",
    "kl_direction",
    "kl_ratio_for_log_ratio",
    "kl_estimator_gradient",
    "kl_without_gradient",
    "beta_twice",
    "loss_sign",
    "padding_in_denominator",
    "entropy_sign",
)
NEEDS_DECLARED = (
    "clip_sides_swapped",
    "sequence_sum_for_mean",
    "padding_in_denominator",
    "beta_twice",
    "sum_for_mean",
    "sample_for_population_std",
    "population_for_sample_std",
    "ipo_sum_or_mean",
    "dpo_mean_for_sum",
    "smoothing_variant",
    "preference_loss_differs",
    "clip_one_sided",
    "extra_division",
    "kl_estimator_gradient",
    "loss_sign",
)


def applies(name: str, t: Truth) -> bool:
    clipped = t.surrogate in ("clip", "dual_clip") and t.ratio != "none"
    return {
        "sequence_sum_for_mean": t.ratio == "sequence_mean",
        "clip_sides_swapped": clipped and t.low != t.high,
        "clip_lower_bound_wrong": clipped and t.low < 0.5 and t.ratio == "token",
        "cap_after_exp": clipped and t.ratio == "token",
        "missing_stop_gradient": t.surrogate == "cispo",
        "padding_in_denominator": t.reduction in ("mean_over_tokens", "mean_over_window"),
        "entropy_sign": t.entropy_coef != 0,
        "loss_sign": True,
        "ratio_inverted": clipped and t.ratio == "token",
        "old_logps_recomputed": clipped and t.ratio == "token",
        "old_logps_not_detached": clipped and t.ratio == "token",
        "ratio_detached": clipped and t.ratio != "sequence_mean_token",
        "dual_clip_on_positive": clipped and t.ratio == "token",
    }.get(name, t.kl != "none" if name.startswith("kl_") or name == "beta_twice" else clipped and t.ratio == "token")


def loss_plants(entry: dict, arrays: dict) -> Iterator[Planted]:
    """Every mistake of mask, reduction, ratio, clip and KL in one capture."""
    t = truth_of(entry, arrays)
    if (
        t is None
        or t.reduction == "mean_over_window"
        and "num_items_in_batch" not in arrays
        and t.row.endswith("verl-0.9.1")
    ):
        return
    arrays = dict(arrays)
    if "rho" in arrays:
        arrays |= {
            "logps": np.log(arrays["rho"])[:, None],
            "old_logps": np.zeros_like(arrays["rho"])[:, None],
            "mask": np.ones((len(arrays["rho"]), 1), bool),
        }
        arrays["advantages"] = arrays["advantages"][:, None]
        # Log-ratios stand for log-probabilities here: move both so that none is above 0.
        top = max(0.0, float(arrays["logps"].max())) + 0.5
        arrays["logps"], arrays["old_logps"] = arrays["logps"] - top, arrays["old_logps"] - top
    base = Plant(t, arrays)
    right = naive_loss(base)
    size = float(np.abs(arrays["advantages"]).mean()) / (t.accumulation if t.divides else 1)
    name = entry["file"][:-4]
    common = dict(capture=name, declared=t.declared(), numbers=t.numbers())
    mask = base.mask.numpy()

    def planted(mistake: str, plant: Plant, reference=right, *, arrays=arrays, names=(), **changes) -> Iterator[Planted]:
        made = naive_loss(plant)
        value, gradient = _differs(made, reference, size)
        if value or gradient:
            yield Planted(
                mistake=mistake,
                arrays=_recorded(arrays, *made, **changes),
                changed_value=value,
                changed_gradient=gradient,
                needs_declared=mistake in NEEDS_DECLARED,
                names=names,
                **common,
            )

    def turned(**attributes) -> Plant:
        plant = Plant(t, arrays)
        for key, value in attributes.items():
            setattr(plant, key, value)
        return plant

    for mistake in LOSS_PLANTS:
        if applies(mistake, t):
            twins = {
                "ratio_detached": ("old_logps_not_detached",),
                "old_logps_not_detached": ("ratio_detached",),
                "entropy_sign": (),
                "kl_sign": (),
                "kl_direction": (),
            }.get(mistake, ())
            yield from planted(mistake, turned(mistake=mistake), names=twins)
    for number in (2, 4):
        yield from planted("extra_division", turned(factor=1 / number))
    rows = int((mask.sum(1) > 0).sum()) if t.rows_counted == "nonempty" else len(mask)
    if t.reduction == "mean_per_response" or t.reduction == "sum_over_budget":
        yield from planted("sum_for_mean", turned(factor=float(rows)))
    elif t.reduction == "mean_over_tokens":
        yield from planted("sum_for_mean", turned(factor=float(mask.sum())))
    if mask.shape[1] == 1:
        return
    filled = dict(arrays)
    quiet = not np.abs(np.where(mask, 0.0, arrays["logps"])).any()
    if quiet:
        # A trainer leaves the model's numbers in unused slots; a capture that zeroed them gets some.
        noise = np.random.default_rng(5)
        extra = -noise.exponential(1.0, mask.shape).astype(np.float32)
        filled["logps"] = np.where(mask, arrays["logps"], extra)
        if "old_logps" in arrays:
            filled["old_logps"] = np.where(
                mask,
                arrays["old_logps"],
                np.minimum(extra + 0.05 * noise.standard_normal(mask.shape).astype(np.float32) - 0.1, -0.01),
            )
        if "ref_logps" in arrays:
            filled["ref_logps"] = np.where(mask, arrays["ref_logps"], extra - 0.1)
        if "entropies" in filled:
            filled["entropies"] = np.where(mask, filled["entropies"], 0.0).astype(np.float32)

    def with_mask(used: np.ndarray, source: dict) -> Plant:
        plant = Plant(t, {**source, "mask": used})
        if t.window is not None:  # the trainer counts its window with the same mask
            plant.truth = (
                replace(t, window=t.window + float(used.sum() - source["mask"].sum()))
                if "num_items_in_batch" not in arrays
                else t
            )
        if plant.A.dim() == 2:
            per_row = np.where(mask, np.asarray(arrays["advantages"]), 0.0).sum(1) / np.maximum(mask.sum(1), 1)
            if np.allclose(np.where(mask, arrays["advantages"] - per_row[:, None], 0.0), 0, atol=1e-5):
                plant.A = torch.as_tensor(per_row.astype(np.float32))
        return plant

    ids = arrays.get("completion_ids")
    last = mask & (np.cumsum(mask[:, ::-1], axis=1)[:, ::-1] == 1)
    eos = entry["config_effective"].get("eos_token_id")
    no_eos = mask & ~(np.isin(ids, eos) if ids is not None and eos is not None else last)
    for mistake, used in (
        ("mask_one_step_late", shifted(mask, 1)),
        ("mask_one_step_early", shifted(mask, -1)),
        ("eos_dropped", no_eos),
        ("padding_counted", np.ones_like(mask)),
    ):
        if not (used != mask).any() or not used.any():
            continue
        plant = with_mask(used, filled)
        if plant.A.dim() == 2:
            continue
        advantages = {"advantages": plant.A.numpy()}
        extras = {"eos_id": np.asarray(eos)} if eos is not None and ids is not None else {}
        recorded = {**{k: v for k, v in filled.items()}, **advantages, **extras}
        yield from planted(mistake, plant, arrays=recorded)
    # Layouts that a capture of responses does not have: a hole for a tool's tokens, a prompt in front, a dropped row.
    long = mask.sum(1) >= 5
    if long.any():
        tool = mask & long[:, None] & (np.cumsum(mask, axis=1) == 3)
        prompt = mask & long[:, None] & (np.cumsum(mask, axis=1) <= 2)
        dropped = mask & (np.arange(len(mask)) == np.flatnonzero(long)[0])[:, None]
        for mistake, hidden in (("tool_tokens_counted", tool), ("prompt_counted", prompt)):
            kept = mask & ~hidden
            reference = naive_loss(with_mask(kept, arrays))
            plant = with_mask(mask, arrays)
            if plant.A.dim() == 2:
                continue
            yield from planted(
                mistake, plant, reference, arrays={**arrays, "advantages": plant.A.numpy()}, mask=kept, attention_mask=mask
            )
        if t.reduction in ("mean_over_tokens", "mean_over_window") and len(mask) > 1:
            kept = mask & ~dropped
            plant = with_mask(kept, arrays)
            reference = naive_loss(plant)
            wrong = with_mask(kept, arrays)
            wrong.mistake, wrong.denominator_mask = "dropped_rows_in_denominator", torch.as_tensor(mask)
            if wrong.A.dim() == 1:
                without = {k: v for k, v in arrays.items() if k != "num_items_in_batch"}
                yield from planted(
                    "dropped_rows_in_denominator",
                    wrong,
                    reference,
                    arrays={**without, "advantages": wrong.A.numpy()},
                    mask=kept,
                    attention_mask=mask,
                )
    side = min(mask.shape)
    if (
        arrays["advantages"].ndim == 1
        and side >= 4
        and t.window is None
        or t.row.startswith(("grpo@trl", "dr_grpo@trl"))
        and side >= 4
    ):
        square = {
            k: (
                v[:side, :side]
                if v.ndim == 2 and v.shape == mask.shape
                else v[:side] if v.ndim >= 1 and len(v) == len(mask) else v
            )
            for k, v in arrays.items()
            if not k.startswith("gen_") and k != "row_ids"
        }
        if square["advantages"].ndim == 1 and square["mask"].any(1).all():
            right_plant, wrong = Plant(t, square), Plant(t, square)
            wrong.mistake = "advantages_aligned_with_time"
            yield from planted("advantages_aligned_with_time", wrong, naive_loss(right_plant), arrays=square)


# ---- advantages


def _group_rule(rewards: np.ndarray, ids: np.ndarray, kind: str, ddof: int, eps: float) -> np.ndarray:
    """Group advantages as a trainer writes them, in float32 and group by group."""
    rewards = rewards.astype(np.float32)
    out = np.zeros_like(rewards)
    for group in np.unique(ids):
        chosen = ids == group
        members = rewards[chosen]
        present = np.isfinite(members)
        mean = members[present].mean(dtype=np.float32) if present.any() else np.float32(0)
        values = np.where(present, members - mean, 0)
        if kind == "leave_one_out" and present.sum() > 1:
            values = values * np.float32(present.sum() / (present.sum() - 1))
        if kind == "group_std":
            count = present.sum()
            std = math.sqrt(float((values.astype(np.float64) ** 2).sum()) / max(count - ddof, 1)) if count > ddof else 0.0
            values = values / np.float32(std + eps)
        out[chosen] = values
    return out.astype(np.float32)


def advantage_plants(entry: dict, arrays: dict) -> Iterator[Planted]:
    """Mistakes of the group statistics in one capture with rewards and groups."""
    kind, config = entry["kind"], entry["config_effective"]
    rule = None
    if (
        kind == "grpo"
        and config["multi_objective_aggregation"] == "sum_then_normalize"
        and config["scale_rewards"] in ("group", "none")
    ):
        rule = ("group_std", 1, 1e-4) if config["scale_rewards"] == "group" else ("centre", 1, 0.0)
        name = {"group": "grpo@trl-1.16.0", "none": "dr_grpo@trl-1.16.0"}[config["scale_rewards"]]
    elif kind == "advantage" and entry["config"]["adv_estimator"] in ("grpo", "grpo_vectorized", "rloo"):
        rule = ("leave_one_out", 1, 0.0) if entry["config"]["adv_estimator"] == "rloo" else ("group_std", 1, 1e-6)
        name = {"rloo": "rloo@verl-0.9.1"}.get(entry["config"]["adv_estimator"], "grpo@verl-0.9.1")
    if rule is None:
        return
    generation = "gen_rewards" in arrays
    rewards = arrays["gen_rewards"] if generation else arrays["rewards"]
    ids = arrays["gen_group_ids"] if generation else arrays["group_ids"]
    counts = np.unique(ids, return_counts=True)[1]
    if counts.min() < 2 or len(counts) < 2 or not np.isfinite(rewards).all():
        return
    rows = arrays["row_ids"] if generation else np.arange(len(rewards))
    t = truth_of(entry, arrays)
    mask = arrays["mask"]

    def recorded(
        mistake: str, made: np.ndarray, right: np.ndarray, *, reward=rewards, group=ids, declared=None, needs_declared=False
    ) -> Iterator[Planted]:
        if float(np.abs(made - right).max()) <= 1e-4 * max(1.0, float(np.abs(right).max())) or not np.isfinite(made).all():
            return
        out = dict(arrays)
        for key in (
            "rewards_per_func",
            "reward_weights",
            "gen_rewards_per_func",
            "gen_advantages",
            "token_level_rewards",
            "returns",
            "dloss_dentropies",
        ):
            out.pop(key, None)
        out["rewards"], out["group_ids"] = reward[rows].astype(np.float32), group[rows]
        if generation:
            out["gen_rewards"], out["gen_group_ids"] = reward.astype(np.float32), group
        out["advantages"] = made[rows] if kind == "grpo" else np.where(mask, made[rows][:, None], 0).astype(np.float32)
        if t is not None:
            out = _recorded(out, *naive_loss(Plant(t, out)))
        yield Planted(
            entry["file"][:-4],
            mistake,
            out,
            declared or (t.declared() if t is not None else Declared(ROWS[name])),
            t.numbers() if t is not None else {},
            True,
            True,
            needs_declared,
            is_loss=False,
        )

    right = _group_rule(rewards, ids, *rule)
    yield from recorded("groups_pooled", _group_rule(rewards, np.zeros_like(ids), *rule), right)
    yield from recorded("advantage_sign", -right, right)
    if rule[0] == "group_std":
        yield from recorded(
            "population_for_sample_std", _group_rule(rewards, ids, rule[0], 0, rule[2]), right, needs_declared=True
        )
        other = replace(ROWS[name], std_ddof=0)
        if t is not None:
            other = replace(t.declared().row, std_ddof=0, scale="group_std", std_eps=rule[2])
        population = _group_rule(rewards, ids, rule[0], 0, rule[2])
        yield from recorded(
            "sample_for_population_std",
            right,
            population,
            declared=Declared(other, ("clip_low", "clip_high")),
            needs_declared=True,
        )
    if len(set(counts.tolist())) == 1:
        order = np.random.default_rng(3).permutation(len(ids))
        mixed, scores = ids[order], rewards[order]
        by_place = np.arange(len(ids)) // counts[0]
        yield from recorded(
            "groups_assumed_contiguous",
            _group_rule(scores, by_place, *rule),
            _group_rule(scores, mixed, *rule),
            reward=scores,
            group=mixed,
        )
    if counts.min() > 2:
        holes = rewards.astype(np.float64).copy()
        holes[np.flatnonzero(ids == ids[0])[0]] = np.nan
        yield from recorded(
            "missing_reward_counted",
            _group_rule(np.nan_to_num(holes), ids, *rule),
            _group_rule(holes, ids, *rule),
            reward=holes,
        )
    if rule[0] == "group_std":
        level = rewards.astype(np.float32).copy()
        chosen = ids == ids[0]
        level[chosen] = np.float32(0.1)
        right_level = _group_rule(level, ids, *rule)
        made = right_level.copy()
        # What float32 leaves of equal rewards, over a std of the same size: a mean one ulp off.
        off = np.float32(0.1) - np.nextafter(np.float32(0.1), np.float32(1))
        made[chosen] = off / (abs(off) + np.float32(1e-9))
        yield from recorded("roundoff_std", made, right_level, reward=level)


# ---- time


def time_plants(entry: dict, arrays: dict) -> Iterator[Planted]:
    """Mistakes of flags, bootstraps and slots in one rollout of an environment, in plain loops over time."""
    from extensions.audit.search.advantages import timeline

    recording = recording_from(arrays)
    if not is_environment(recording):
        return
    x, missing = timeline(recording)
    if (
        x is None
        or missing
        or "done_only" in entry["file"]
        or "td_lambda" in entry["file"]
        or "lambda_returns" in entry["file"]
    ):
        return
    config = entry["config_effective"] | entry["config"]
    gamma = config.get("gamma", config.get("gamma_inside_discounts", 0.99))
    lam = config.get("gae_lambda", config.get("lmbda", config.get("lambda_", 0.95)))
    E, T = x.rewards.shape

    def run(mistake: str | None) -> np.ndarray:
        out = np.zeros((E, T), dtype=np.float32)
        for e in range(E):
            following = 0.0
            for step in reversed(range(T)):
                at = step
                if mistake == "shifted_flags" and step + 1 < T:
                    at = step + 1
                terminated, over = bool(x.terminated[e, at]), bool(x.flagged[e, at]) or step == T - 1
                next_value = x.next_values[e, step]
                cut = bool(x.flagged[e, step]) and not bool(x.terminated[e, step])
                if mistake == "one_flag_for_two" and cut:
                    terminated = True
                if mistake == "reset_value_used" and cut and step + 1 < T:
                    next_value = x.values[e, step + 1]
                if mistake == "leak_across_episodes":
                    over = step == T - 1
                if mistake == "last_bootstrap_trimmed" and step == T - 1:
                    next_value = x.values[e, step]
                reward = x.rewards[e, step]
                if mistake == "rewards_one_slot_late":
                    reward = x.rewards[e, step - 1] if step else 0.0
                delta = reward + (0.0 if terminated else gamma * next_value) - x.values[e, step]
                following = delta + (0.0 if over else gamma * lam * following)
                out[e, step] = following
                if mistake == "reward_minus_value":
                    out[e, step] = reward - x.values[e, step]
        return out

    right = run(None)
    for mistake in (
        "one_flag_for_two",
        "shifted_flags",
        "reset_value_used",
        "leak_across_episodes",
        "last_bootstrap_trimmed",
        "rewards_one_slot_late",
        "reward_minus_value",
    ):
        made = run(mistake)
        if float(np.abs(made - right).max()) <= 1e-4:
            continue
        shape = arrays["advantages"].shape if "advantages" in arrays else arrays["returns"].shape
        laid = made.T if shape == (T, E) and E != 1 else made.reshape(shape)
        out = {name: value for name, value in arrays.items() if name not in ("returns", "advantages", "dones_as_terminated")}
        out["advantages"] = np.ascontiguousarray(laid)
        # lambda 0 hides the recursion: two mistakes may then be one and the same number.
        yield Planted(entry["file"][:-4], mistake, out, None, {}, True, True, is_loss=False)


# ---- pairs


def naive_pair_loss(kind: str, l, mask, lr, beta: float, mistake: str | None, e: float) -> torch.Tensor:
    """A preference loss as a trainer writes it. l (2P, T) with gradient."""
    m = mask.float()
    if kind == "dpo_mean" or kind == "ipo_mean":
        score = lambda x: (x * m).sum(1) / m.sum(1)  # noqa: E731
    else:
        score = lambda x: (x * m).sum(1)  # noqa: E731
    reference = score(lr)
    if mistake == "reference_missing":
        reference = torch.zeros_like(reference)
    if mistake == "reference_live":
        reference = score(l.detach())
    u, v = (score(l) - reference).chunk(2)
    if mistake == "chosen_rejected_exchanged":
        u, v = v, u
    if mistake == "beta_twice":
        beta = beta * beta
    z = beta * (u - v)
    log = torch.nn.functional.logsigmoid
    if kind in ("dpo", "dpo_mean"):
        losses = -log(z)
    elif kind in ("ipo", "ipo_mean"):
        losses = (u - v - 1 / (2 * beta)) ** 2
    elif kind == "hinge":
        losses = torch.relu(1 - z)
    elif kind == "robust":
        losses = (-(1 - e) * log(z) + e * log(-z)) / (1 - 2 * e)
    elif kind == "cdpo":
        right, flipped = (e, 1 - e) if mistake == "smoothing_reversed" else (1 - e, e)
        losses = -right * log(z) - flipped * log(-z)
    else:
        raise ValueError(kind)
    return losses.sum() if mistake == "sum_for_mean" else losses.mean() / (2 if mistake == "extra_division" else 1)


def pair_plants(entry: dict, arrays: dict) -> Iterator[Planted]:
    """Mistakes of pairs on the log-probabilities of one DPO capture; the objective is DPO, IPO or cDPO in turn."""
    if entry["kind"] != "dpo" or "first_step" in entry["file"] or "ld_alpha" in entry["file"]:
        return
    mask = torch.as_tensor(arrays["mask"])
    noise = np.random.default_rng(9)
    pad = -noise.exponential(1.0, mask.shape).astype(np.float32)
    l_all = torch.as_tensor(np.where(arrays["mask"], arrays["logps"], pad).astype(np.float32))
    lr = torch.as_tensor(
        np.where(arrays["mask"], arrays["ref_logps"], pad - 0.2 * noise.random(mask.shape)).astype(np.float32)
    )
    beta, e = float(arrays["beta"]), 0.1
    P = len(mask) // 2

    def loss_of(kind: str, mistake: str | None, used=mask) -> tuple[float, np.ndarray]:
        l = l_all.clone().requires_grad_()
        loss = naive_pair_loss(
            kind, torch.where(used, l, torch.zeros(())), used, torch.where(used, lr, torch.zeros(())), beta, mistake, e
        )
        (gradient,) = torch.autograd.grad(loss, l)
        return float(loss.detach()), gradient.numpy()

    def planted(mistake: str, declared: str, made, right, needs_declared=False, names=()) -> Iterator[Planted]:
        value, gradient = _differs(made, right, abs(right[0]))
        if not (value or gradient):
            return
        out = {
            "logps": l_all.numpy(),
            "ref_logps": lr.numpy(),
            "mask": arrays["mask"],
            "beta": np.float64(beta),
            "loss": np.float32(made[0]),
            "dloss_dlogps": made[1],
        }
        sums = torch.where(mask, l_all, torch.zeros(())).sum(1).numpy()
        ref = torch.where(mask, lr, torch.zeros(())).sum(1).numpy()
        out |= {
            "chosen_logps": sums[:P],
            "rejected_logps": sums[P:],
            "ref_chosen_logps": ref[:P],
            "ref_rejected_logps": ref[P:],
        }
        row = replace(PREFERENCE_ROWS[declared], beta=beta)
        yield Planted(
            entry["file"][:-4],
            mistake,
            out,
            Declared(row),
            {},
            value,
            gradient,
            needs_declared or mistake in NEEDS_DECLARED,
            names=names,
        )

    right = loss_of("dpo", None)
    for mistake in (
        "chosen_rejected_exchanged",
        "reference_missing",
        "reference_live",
        "beta_twice",
        "sum_for_mean",
        "extra_division",
    ):
        yield from planted(mistake, "dpo", loss_of("dpo", mistake), right)
    yield from planted("dpo_mean_for_sum", "dpo", loss_of("dpo_mean", None), right, True)
    yield from planted("ipo_sum_or_mean", "ipo", loss_of("ipo_mean", None), loss_of("ipo", None), True)
    yield from planted("ipo_sum_or_mean", "ipo_mean", loss_of("ipo", None), loss_of("ipo_mean", None), True)
    yield from planted("preference_loss_differs", "ipo", right, loss_of("ipo", None), True)
    yield from planted("smoothing_variant", "cdpo", loss_of("robust", None), loss_of("cdpo", None), True)
    yield from planted("smoothing_reversed", "cdpo", loss_of("cdpo", "smoothing_reversed"), loss_of("cdpo", None))
    array = arrays["mask"]
    last = array & (np.cumsum(array[:, ::-1], axis=1)[:, ::-1] == 1)
    for mistake, used in (
        ("padding_counted", np.ones_like(array)),
        ("mask_one_step_late", shifted(array, 1)),
        ("mask_one_step_early", shifted(array, -1)),
        ("eos_dropped", array & ~last),
    ):
        if used.any(1).all():
            yield from planted(mistake, "dpo", loss_of("dpo", None, torch.as_tensor(used)), right)


# ---- critic, KL metric, score


def other_plants(entry: dict, arrays: dict) -> Iterator[Planted]:
    """The critic's minimum, a reported KL, a score on the wrong token, whitening over padding."""
    name = entry["file"][:-4]
    if entry["kind"] == "value_loss":
        V = torch.as_tensor(arrays["vpreds"]).clone().requires_grad_()
        V0, G, mask = (torch.as_tensor(arrays[n]) for n in ("values", "returns", "mask"))
        clipped = V0 + (V - V0).clamp(-0.5, 0.5)
        x = torch.minimum((V - G) ** 2, (clipped - G) ** 2) * mask
        loss = 0.5 * (
            x.sum() / mask.sum()
            if "token_mean" in name and "seq" not in name
            else (x.sum(1) / mask.sum(1).clamp(min=1)).sum() / (mask.sum(1) > 0).sum()
        )
        (gradient,) = torch.autograd.grad(loss, V)
        if not math.isclose(float(loss.detach()), float(arrays["loss"]), rel_tol=1e-4):
            yield Planted(
                name,
                "value_min_for_max",
                {**arrays, "loss": np.float32(loss.detach()), "dloss_dvpreds": gradient.numpy()},
                None,
                {},
                True,
                True,
            )
    if entry["kind"] == "kl" and "abs" not in name:
        l, lr, mask = arrays["logps"], arrays["ref_logps"], arrays["mask"]
        d = np.clip(np.where(mask, l - lr, 0), -30, 30).astype(np.float32)
        R = np.exp(np.clip(-d, -20, 5))
        with np.errstate(over="ignore"):  # what overflows is left out below
            k3_of_ratio = np.exp(R) - R - 1
        for mistake, kl in (
            ("kl_sign", -d),
            ("kl_direction", np.exp(d) - d - 1),
            ("kl_ratio_for_log_ratio", k3_of_ratio),
        ):
            kept = {k: v for k, v in arrays.items() if k != "dkl_dlogps"}
            if not np.isfinite(np.where(mask, kl, 0).astype(np.float32)).all():
                continue
            yield Planted(
                name, mistake, {**kept, "kl": np.where(mask, kl, 0).astype(np.float32)}, None, {}, True, True, is_loss=False
            )
    if entry["kind"] == "advantage" and entry["config"]["adv_estimator"] == "gae":
        gamma, lam = entry["config"]["gamma"], entry["config"]["lam"]
        mask, values, rewards = arrays["mask"], arrays["values"], arrays["rewards"]
        made = {}
        for mistake in (None, "score_on_wrong_token"):
            out = np.zeros(mask.shape, dtype=np.float32)
            for row in range(len(mask)):
                counted = np.flatnonzero(mask[row])
                following, after = 0.0, 0.0
                where = counted[-1] if mistake is None else mask.shape[1] - 1
                for t in reversed(counted):
                    delta = (rewards[row] if t == where else 0.0) + gamma * after - values[row, t]
                    following = delta + gamma * lam * following
                    after, out[row, t] = values[row, t], following
            made[mistake] = out
        if np.abs(made[None] - made["score_on_wrong_token"]).max() > 1e-4:
            kept = {k: v for k, v in arrays.items() if k not in ("token_level_rewards", "returns")}
            yield Planted(
                name,
                "score_on_wrong_token",
                {**kept, "advantages": made["score_on_wrong_token"]},
                None,
                {},
                True,
                True,
                is_loss=False,
            )
        raw = np.where(mask, made[None], 0)
        mean = raw.mean()
        std = math.sqrt((np.where(mask, raw - mean, 0) ** 2).sum() / mask.sum())
        kept = {k: v for k, v in arrays.items() if k not in ("returns", "values", "token_level_rewards")}
        yield Planted(
            name,
            "padding_in_whitening",
            {**kept, "advantages_raw": raw, "advantages": np.where(mask, (raw - mean) / (std + 1e-8), 0).astype(np.float32)},
            None,
            {},
            True,
            True,
            is_loss=False,
        )


PLANTERS: tuple[Callable, ...] = (loss_plants, advantage_plants, time_plants, pair_plants, other_plants)


def all_plants(files: Callable[[str], bool] = lambda file: True) -> Iterator[Planted]:
    for entry in manifest():
        if files(entry["file"]):
            arrays = load(entry["file"])
            for planter in PLANTERS:
                yield from planter(entry, arrays)


# ------------------------------------------------------------------------------------------ judging


GRADIENTS = (
    "dloss_dlogps",
    "dloss_dvpreds",
    "dloss_dentropies",
    "dloss_dchosen_logps",
    "dloss_drejected_logps",
    "dloss_dloss_mat",
    "backward_dlogps",
    "dloss_dseq_logps",
    "dkl_dlogps",
)


def judge(planted: Planted, with_gradient: bool, with_declared: bool) -> tuple[bool, bool, Report]:
    """(named, a wrong name with more confidence, the report)."""
    arrays = planted.arrays if with_gradient else {k: v for k, v in planted.arrays.items() if k not in GRADIENTS}
    recording = recording_from(arrays)
    report = audit(recording, planted.declared if with_declared else None, dict(planted.numbers) if with_declared else None)
    rank = {"note": 0, "warning": 1, "mistake": 2}
    accepted = planted.accepted + (("divided_by_whole_number",) if planted.mistake == "extra_division" else ())
    own = max((rank[f.severity] for f in report.findings if f.name in accepted), default=-1)
    others = [f for f in report.findings if f.name not in accepted and f.name not in ("not_reproduced", "declared_not_seen")]
    other = max((rank[f.severity] for f in others), default=-1)
    return own >= 0, other == 2 and other > own, report


def clean_problem(entry: dict, arrays: dict, report: Report, numbers_given: bool) -> str | None:
    """What is wrong with the report on a clean capture: a mistake, or the right convention not named. None if nothing is."""
    mistakes = [f.name for f in report.findings if f.severity == "mistake"]
    if "done_only" in entry["file"]:
        # torchrl was handed one flag for two, which is the mistake itself.
        return None if mistakes == ["one_flag_for_two"] else f"findings {mistakes}, wanted one_flag_for_two"
    if mistakes:
        return f"mistakes reported: {mistakes}"
    t = truth_of(entry, arrays)
    if t is not None:
        return _loss_problem(t, report)
    if entry["kind"] == "advantage" and not report.advantages.get("matches"):
        return "no advantage rule found"
    if entry["kind"] == "gae" and not report.advantages.get("matches"):
        return "no rule found"
    if entry["kind"] in ("dpo", "kto"):
        wanted = {"sigmoid": "dpo", "exo_pair": "exo", "bco_pair": "bco", "kto": "kto"}
        config = entry["config_effective"]
        loss = config["loss_type"]
        loss = loss if isinstance(loss, str) else loss[0] if len(loss) == 1 else "dpo_sft"
        name = wanted.get(loss, loss)
        name = {"forward_kl": "dpo_forward_kl", "js_divergence": "dpo_js"}.get(config.get("f_divergence_type"), name)
        name = "ld_dpo" if config.get("ld_alpha") else name
        best = [m for m in report.loss["matches"] if m["by"] == report.loss["matches"][0]["by"]]
        return None if any(name in m["rows"] for m in best) else f"{name} not among {[m['in_words'] for m in best][:3]}"
    if entry["kind"] == "kl":
        return (
            None
            if any(line.startswith("kl: ") and "none" not in line for line in report.lines.get("metrics", []))
            else "kl not named"
        )
    if entry["kind"] in ("policy_loss", "reduction", "value_loss", "ppo") and entry["config"].get("loss_mode") not in (
        "clip_cov",
    ):
        return None if report.loss.get("matches") else "no loss rule found"
    return None


def _loss_problem(t: Truth, report: Report) -> str | None:
    matches = report.loss.get("matches", [])
    wanted = t.fields()
    best = [m for m in matches if m["by"] == matches[0]["by"]]
    best += [m for m in report.loss.get("with_a_mistake", []) if "divided_by_whole_number" in report.named()]
    for m in best:
        got = {"kl": "none", "off_policy_rows": "keep", **m}
        same = all(
            got.get(k) == v
            or isinstance(v, float)
            and isinstance(got.get(k), (int, float))
            and math.isclose(got[k], v, rel_tol=1e-3)
            for k, v in wanted.items()
            if k not in ("reduction", "off_policy_rows")
        )
        if {got.get("ratio"), wanted.get("ratio")} == {"sequence_mean", "sequence_mean_token"}:
            same = all(got.get(k) == v for k, v in wanted.items() if k in ("kl", "surrogate", "clip_low", "clip_high"))
        same &= t.off_policy is None or got["off_policy_rows"] == "drop"
        reductions = {wanted["reduction"]}
        if wanted["reduction"] == "mean_over_window":
            reductions.add("mean_over_tokens")
        if wanted["reduction"] == "sum_over_budget":
            reductions |= {"sum_over_width"}
        same &= (
            m.get("reduction") in reductions
            or m.get("reduction") == "mean_per_response"
            and report.batch.get("width") == 1
            or (report.batch.get("width") == 1)
        )
        factor = m["factor"] * (t.accumulation if t.divides and m.get("accumulation") != "divide" else 1)
        if m.get("budget") and t.budget and not math.isclose(m["budget"], t.budget):
            factor *= t.budget / m["budget"]
        if same and math.isclose(factor, 1, rel_tol=1e-3):
            return None
    return f"{wanted} not among {[m['in_words'] for m in best][:3]}"


# ------------------------------------------------------------------------------------------ the table


@dataclass
class Score:
    planted: dict[str, int] = field(default_factory=dict)
    named: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)


COLUMNS = (
    ("gradient", True, True),
    ("loss only", False, True),
    ("gradient, undeclared", True, False),
    ("loss only, undeclared", False, False),
)


def measure(plants: Iterator[Planted], columns=COLUMNS, progress: bool = False) -> dict[str, dict[str, Score]]:
    """{column: {mistake: Score}} over planted batches."""
    table: dict[str, dict[str, Score]] = {title: {} for title, _, _ in columns}
    for count, planted in enumerate(plants):
        if progress and sys.stderr.isatty() and count % 10 == 0:
            print(
                f"\r{count} planted batches, now {planted.capture} {planted.mistake}        ",
                end="",
                file=sys.stderr,
                flush=True,
            )
        for title, with_gradient, with_declared in columns:
            if not with_declared and planted.needs_declared:
                continue
            if not with_gradient and not planted.changed_value:
                continue
            score = table[title].setdefault(planted.mistake, Score())
            score.planted[planted.capture] = score.planted.get(planted.capture, 0) + 1
            try:
                named, wrong, report = judge(planted, with_gradient, with_declared)
            except Exception as problem:  # counted as a failure, and the rest of the table is still worth something
                score.wrong.append(f"{planted.capture}: ended in {type(problem).__name__}: {problem}")
                continue
            score.named[planted.capture] = score.named.get(planted.capture, 0) + named
            if wrong:
                score.wrong.append(
                    f"{planted.capture}: {', '.join(f.name for f in report.findings if f.severity == 'mistake')}"
                )
            elif not named:
                score.missed.append(planted.capture)
    return table


def totals(scores: dict[str, Score]) -> tuple[int, int, int]:
    """(planted, named, named wrongly with more confidence)."""
    return (
        sum(sum(s.planted.values()) for s in scores.values()),
        sum(sum(s.named.values()) for s in scores.values()),
        sum(len(s.wrong) for s in scores.values()),
    )


def table_text(table: dict[str, dict[str, Score]]) -> str:
    names = list(dict.fromkeys(name for scores in table.values() for name in scores))
    rows = []
    for name in names:
        cells = []
        for scores in table.values():
            s = scores.get(name)
            cells.append(
                "-"
                if s is None
                else f"{sum(s.named.values())}/{sum(s.planted.values())}" + (f" ({len(s.wrong)} wrong)" if s.wrong else "")
            )
        rows.append([name, *cells])
    last = ["all"]
    for scores in table.values():
        planted, named, wrong = totals(scores)
        last.append(f"{named}/{planted} = {100 * named / max(planted, 1):.1f} %, {wrong} wrong")
    return rl_lab.format_table(["mistake planted", *table], [*rows, last])


def clean_report() -> list[tuple[str, str, str]]:
    """(capture, how, what is wrong) for every clean capture that is not read right: bare, and with its configuration set."""
    problems = []
    for entry in manifest():
        arrays = load(entry["file"])
        t = truth_of(entry, arrays)
        runs: list[tuple[str, Declared | None, dict | None]] = [("bare", None, None)]
        if t is not None:
            runs.append(("declared", t.declared(), t.numbers()))
        for how, declared, numbers in runs:
            try:
                report = audit(read_recording(CAPTURES / entry["file"]), declared, numbers)
            except rl_lab.FileProblem as problem:
                problems.append((entry["file"], how, str(problem)))
                continue
            problem = clean_problem(entry, arrays, report, numbers is not None)
            if problem:
                problems.append((entry["file"], how, problem))
    return problems


def run(json_path: Path | None = None) -> bool:
    """Print the table; True if every bar is met."""
    problems = clean_report()
    entries = manifest()
    print(
        f"{len(entries)} clean captures, audited bare and (policy losses) with their configuration declared:"
        f" {len(problems)} read wrongly" + (":" if problems else "")
    )
    for file, how, problem in problems:
        print(f"  {file} ({how}): {problem}")
    table = measure(all_plants(), progress=True)
    print("\nPlanted mistakes, named / planted:")
    print(table_text(table))
    wrong = sum(totals(scores)[2] for scores in table.values())
    for title, scores in table.items():
        for name, score in scores.items():
            if score.wrong:
                print(f"wrong name with more confidence, {title}, {name}: {'; '.join(score.wrong[:4])}")
    for title, scores in table.items():
        missed = [
            f"{name} in {', '.join(score.missed[:3])}"
            + (f" and {len(score.missed) - 3} more" if len(score.missed) > 3 else "")
            for name, score in scores.items()
            if score.missed
        ]
        if missed:
            print("\n".join(textwrap.wrap(f"not named, {title}: {'; '.join(missed)}", 120, subsequent_indent="    ")))
    (with_gradient, named_gradient, _), (with_loss, named_loss, _) = (totals(table[t]) for t in ("gradient", "loss only"))
    is_good = (
        not problems
        and named_gradient >= 0.95 * with_gradient
        and named_loss >= 0.8 * with_loss
        and not wrong
    )
    print(
        f"\nBars: 95 % with the gradient ({100 * named_gradient / with_gradient:.1f} %), 80 % with loss and advantages only "
        f"({100 * named_loss / with_loss:.1f} %), no wrong name with more confidence in any column ({wrong}): "
        f"{'met' if is_good else 'NOT met'}"
    )
    if json_path is not None:
        document = {
            "clean_problems": [list(p) for p in problems],
            **{
                title: [
                    {"mistake": n, "planted": sum(s.planted.values()), "named": sum(s.named.values()), "wrong": s.wrong}
                    for n, s in scores.items()
                ]
                for title, scores in table.items()
            },
        }
        rl_lab.replace_files({json_path: rl_lab.json_text(document)})
    return is_good


# ------------------------------------------------------------------------------------------ damaged files


class _Hostile:
    """Unpickled, it would write a file: if that file appears, something was run."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return exec, (f"with open({self.path!r}, 'w') as file: file.write('run')",)


def damaged_files(count: int, folder: Path, seed: int = 0) -> Iterator[tuple[Path, str]]:
    """Files to be refused (or audited) without a traceback, one after another. `folder/run` must never appear."""
    rng = random.Random(seed)
    numbers = np.random.default_rng(seed)
    entries = manifest()
    bytes_of = {entry["file"]: (CAPTURES / entry["file"]).read_bytes() for entry in entries}
    files = sorted(bytes_of)
    trap = str(folder / "run")

    def npz(arrays: dict, compressed: bool = True) -> bytes:
        stream = io.BytesIO()
        (np.savez_compressed if compressed else np.savez)(stream, **arrays)
        return stream.getvalue()

    def base() -> dict:
        return load(rng.choice(files))

    def truncated() -> tuple[str, bytes]:
        data = bytes_of[rng.choice(files)]
        return ".npz", data[: rng.randrange(len(data))]

    def flipped() -> tuple[str, bytes]:
        data = bytearray(bytes_of[rng.choice(files)])
        for _ in range(rng.randrange(1, 40)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return ".npz", bytes(data)

    def noise() -> tuple[str, bytes]:
        return rng.choice((".npz", ".pt", ".jsonl", ".safetensors")), rng.randbytes(rng.randrange(0, 3000))

    def wrong_shape() -> tuple[str, bytes]:
        arrays = base()
        for name in rng.sample(sorted(arrays), min(len(arrays), rng.randrange(1, 4))):
            value = arrays[name]
            arrays[name] = rng.choice(
                (
                    lambda: value.reshape(-1)[: rng.randrange(0, value.size + 1)],
                    lambda: np.stack([value, value]),
                    lambda: value.T,
                    lambda: value[..., None],
                    lambda: np.zeros((0,) + value.shape, value.dtype),
                    lambda: np.broadcast_to(value, (3,) + value.shape),
                )
            )()
        return ".npz", npz(arrays)

    def bad_numbers() -> tuple[str, bytes]:
        arrays = base()
        for name in rng.sample(sorted(arrays), min(len(arrays), rng.randrange(1, 4))):
            value = arrays[name]
            if value.dtype.kind == "f" and value.size:
                value = value.copy()
                flat = value.reshape(-1)
                flat[numbers.integers(0, flat.size, size=max(1, flat.size // rng.choice((1, 5, 50))))] = rng.choice(
                    (np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-30, 0.0)
                )
                arrays[name] = value
            elif value.dtype.kind in "iu":
                arrays[name] = value + rng.choice((10**12, -(10**12), 2**40))
        return ".npz", npz(arrays)

    def wrong_dtype() -> tuple[str, bytes]:
        arrays = base()
        name = rng.choice(sorted(arrays))
        with np.errstate(all="ignore"):
            import warnings

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                arrays[name] = arrays[name].astype(rng.choice(("U5", "S3", "c16", "i1", "u8", "f2", "?", "M8[s]")))
        return ".npz", npz(arrays)

    def missing_names() -> tuple[str, bytes]:
        arrays = base()
        for name in rng.sample(sorted(arrays), rng.randrange(0, len(arrays) + 1)):
            del arrays[name]
        if rng.random() < 0.3:
            arrays[rng.choice(("logps", "mask", "loss", "advantages", "x", "../x", "", "rewards"))] = (
                numbers.standard_normal(rng.randrange(1, 9))
            )
        return ".npz", npz(arrays)

    def swapped_names() -> tuple[str, bytes]:
        arrays = base()
        names = sorted(arrays)
        shuffled = names[:]
        rng.shuffle(shuffled)
        return ".npz", npz({new: arrays[old] for new, old in zip(names, shuffled)})

    def objects() -> tuple[str, bytes]:
        arrays = base()
        arrays[rng.choice(("logps", "mask", "rewards", "uid", "extra"))] = np.array([_Hostile(trap), {"a": 1}], dtype=object)
        return ".npz", npz(arrays)

    def hostile_pt() -> tuple[str, bytes]:
        stream = io.BytesIO()
        kind = rng.randrange(5)
        if kind == 0:
            torch.save({"logps": torch.ones(2, 3), "mask": _Hostile(trap)}, stream)
        elif kind == 1:
            torch.save(_Hostile(trap), stream)
        elif kind == 2:
            torch.save({"logps": torch.ones(1).expand(10**6, 10**6)}, stream)
        elif kind == 3:
            return ".pt", pickle.dumps(_Hostile(trap))
        else:
            torch.save(
                {"logps": torch.ones(4, 5), "mask": torch.ones(4, 5, dtype=torch.bool), "loss": torch.tensor(1.0)}, stream
            )
            data = bytearray(stream.getvalue())
            for _ in range(rng.randrange(1, 10)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            return ".pt", bytes(data)
        return ".pt", stream.getvalue()

    def lying_header() -> tuple[str, bytes]:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
            shape = rng.choice(((10**12,), (10**6, 10**6), (-1,), (2, -3), (0, 10**9), (3,)))
            header = str(
                {"descr": rng.choice(("<f8", "|O", "<c16", "<U1000000000", "|V0")), "fortran_order": False, "shape": shape}
            ).encode()
            header += b" " * (64 - (len(header) + 11) % 64) + b"\n"
            body = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + rng.randbytes(rng.randrange(64))
            archive.writestr("logps.npy", body)
            archive.writestr("mask.npy", rng.randbytes(40))
        return ".npz", stream.getvalue()

    def bomb() -> tuple[str, bytes]:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            archive.writestr("logps.npy", bytes(80 * 2**20))
        return rng.choice((".npz", ".pt")), stream.getvalue()

    bombs = [bomb()]

    def json_lines() -> tuple[str, bytes]:
        rows = []
        for _ in range(rng.randrange(1, 6)):
            T = rng.randrange(0, 6)
            entry: dict = {
                "logps": [-rng.random() for _ in range(T)],
                "old_logps": [-rng.random() for _ in range(T)],
                "rewards": rng.random(),
                "group_ids": rng.choice(("a", "b")),
                "advantages": rng.random(),
                "loss": rng.choice((0.5, 0.5, 0.7)),
            }
            change = rng.randrange(9)
            if change == 0:
                entry.pop(rng.choice(sorted(entry)))
            elif change == 1:
                entry[rng.choice(sorted(entry))] = rng.choice((None, "text", [], {}, [[1]], 10**400, [None], True, -1e999))
            rows.append(json.dumps(entry))
        text = "\n".join(rows)
        change = rng.randrange(6)
        if change == 0:
            text = text[: rng.randrange(len(text))]
        elif change == 1:
            text = text.replace(",", rng.choice((";", ",,", "")), 1)
        elif change == 2:
            text = "[" * 100_000
        elif change == 3:
            text += '\n{"logps": [' + ",".join(["0"] * 5000) + "]}" + '\n{"logps": [0]}' * 300
        return ".jsonl", text.encode()

    makers = (
        truncated,
        flipped,
        noise,
        wrong_shape,
        bad_numbers,
        wrong_dtype,
        missing_names,
        swapped_names,
        objects,
        hostile_pt,
        lying_header,
        json_lines,
    )
    for number in range(count):
        maker = makers[number % len(makers)] if number % 97 else None
        suffix, data = bombs[0] if maker is None else maker()
        path = folder / f"damaged{suffix}"
        path.write_bytes(data)
        yield path, "bomb" if maker is None else maker.__name__


def survive(count: int, folder: Path, seed: int = 0, progress: bool = False) -> dict[str, dict[str, int]]:
    """Read, audit and report damaged files: {kind: {"refused": n, "audited": n}}. AssertionError for anything else.

    Every other file is audited against a declared row.
    """
    outcome: dict[str, dict[str, int]] = {}
    rows = {True: Declared(PREFERENCE_ROWS["dpo"]), False: Declared(ROWS["grpo@trl-1.16.0"])}
    for number, (path, kind) in enumerate(damaged_files(count, folder, seed)):
        if progress and sys.stderr.isatty() and number % 50 == 0:
            print(f"\r{number}/{count} ", end="", file=sys.stderr, flush=True)
        kinds = outcome.setdefault(kind, {"refused": 0, "audited": 0})
        try:
            recording = read_recording(path)
            report = audit(recording, rows[is_preference(recording)] if number % 2 else None)
            rl_lab.json_text(report.as_json())
            printed(report, path.name)
            kinds["audited"] += 1
        except rl_lab.FileProblem as problem:
            if "\n" in str(problem) or not str(problem):
                raise AssertionError(f"not one line: {problem!r}") from problem
            kinds["refused"] += 1
        except Exception as problem:
            kept = Path(tempfile.gettempdir()) / f"audit-failed-{os.getpid()}-{number}{path.suffix}"
            kept.write_bytes(path.read_bytes())
            raise AssertionError(
                f"file {number} ({kind}, kept as {kept}) ended in {type(problem).__name__}: {problem}"
            ) from problem
        if (folder / "run").exists():
            raise AssertionError(f"file {number} ({kind}) ran what it carried")
    return outcome


def peak_memory() -> float:
    """Largest memory of this process so far, MB; NaN where the system does not say (Windows)."""
    try:
        import resource
    except ImportError:
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def run_damaged(count: int) -> bool:
    before = peak_memory()
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = survive(count, Path(folder), progress=True)
        except AssertionError as problem:
            print(f"failed: {problem}")
            return False
    print(
        rl_lab.format_table(
            ["kind of damage", "clear error", "audited"],
            [[k, str(v["refused"]), str(v["audited"])] for k, v in outcome.items()],
        )
    )
    print(f"{count} files, no traceback, nothing run, peak memory {peak_memory() - before:.0f} MB above the start")
    return True
