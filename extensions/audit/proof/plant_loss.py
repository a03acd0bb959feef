"""Mistakes planted into the loss of a capture, by formulas that share nothing with the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Iterator

import numpy as np
import torch

from extensions.audit.declared import Declared
from extensions.audit.proof.truth import Truth, truth_of
from extensions.audit.search.masks import shifted


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
