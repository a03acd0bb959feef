"""The forms that a loss may take: ratios, surrogates, KL terms, reductions, and the named edits of each.

A form is a function from a batch to the value of J (or of the KL) and its slope, token by token. The plain ones are
objectives.evaluate itself with every token weighing 1; the mistaken ones are written out here, formula beside name. Which
forms are worth trying is read off the whole batch once (`Traits`), so that they can be evaluated on parts of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Callable, Iterator, NamedTuple

import numpy as np
import torch
from torch import Tensor

import rl_lab
from extensions.audit.read.recording import Recording
from extensions.objectives import Batch, Row, evaluate, make_batch

INF = math.inf

CLIP_PAIRS = ((0.2, 0.2), (0.2, 0.28), (0.1, 0.1), (0.3, 0.3), (0.2, 0.3), (0.4, 0.4), (3e-4, 4e-4))
CAPS = (3.0, 10.0)
KL_COEFS = (0.04, 0.001, 0.01, 0.02, 0.05, 0.1, 0.005, 0.002, 0.2, 0.5, 1.0, 0.0001, 0.0005)
OFF_POLICY_THRESHOLDS = (0.5, 0.1, 0.05, 0.02, 0.01, 1.0, 2.0)


class Form(NamedTuple):
    """One way of writing J, or a KL term, on one batch: value and slope per token, 0 outside the mask."""

    value: Tensor
    slope: Tensor | None  # None: no gradient at all


class Spec(NamedTuple):
    """A form before it meets a batch: its choices under the names of Row, the mistake in it, and how it is computed."""

    fields: dict
    mistake: str | None
    make: Callable[[Batch], Form]


@dataclass(frozen=True)
class Traits:
    """What decides which forms can differ, read off the whole batch."""

    has_old: bool
    moved: bool  # some ratio is not 1
    largest_ratio: float
    has_reference: bool  # and it is not the policy itself
    wide_kl: bool  # some |l - lr| or |l - l0| is above 2
    along_time: Tensor | None  # (T,) as many answers as positions: their advantages, as if they stood along time
    has_logits: bool

    @staticmethod
    def of(batch: Batch) -> "Traits":
        A, is_square = batch.advantages, batch.mask.shape[0] == batch.mask.shape[1]
        l, old, ref = batch.logps, batch.old_logps, batch.ref_logps
        gaps = [(l - x) for x in (old, ref) if x is not None]
        return Traits(
            old is not None,
            old is not None and not torch.equal(l, old),
            1.0 if old is None else float((l - old).max().clamp(max=600).exp()),
            ref is not None and not torch.equal(l, ref),
            any(float(gap.abs().max()) > 2 for gap in gaps),
            A[:, 0] if is_square and A is not None and A.shape[1] == 1 else None,
            batch.logits is not None and batch.ref_logits is not None,
        )


# ------------------------------------------------------------------------------------------ the batch and its edits


def build_batch(recording: Recording, mask: np.ndarray | None = None, advantages=None, **overrides) -> Batch:
    """The recording as an objectives.Batch, under another mask if given. Raises ValueError as make_batch."""
    arrays = recording.arrays
    mask = arrays["mask"] if mask is None else mask
    given = {name: arrays[name] for name in ("old_logps", "ref_logps", "entropies") if name in arrays}
    for name in ("logits", "ref_logits"):
        if "logits" in arrays and "ref_logits" in arrays:
            given[name] = arrays[name]
    given |= overrides
    lead = given.pop("logps", arrays.get("logps"))
    lead = np.zeros(mask.shape) if lead is None else lead
    return make_batch(
        logps=lead,
        mask=mask,
        advantages=advantages,
        allow_empty_rows=True,
        dtype=torch.float64,
        **window(recording),
        **given,
    )


def window(recording: Recording) -> dict:
    """window_tokens, window_rows, accumulation_steps, budget, from the recorded counts."""
    number = recording.number
    steps = int(max(number("accumulation_steps", 1), 1))
    ranks = max(number("world_size", 1), 1)
    made: dict = {"accumulation_steps": steps}
    if number("num_items_in_batch"):
        made["window_tokens"] = number("num_items_in_batch") / ranks * steps / max(number("steps_per_generation", steps), 1)
    if number("global_batch_size"):
        made["window_rows"] = number("global_batch_size") / ranks
    if number("budget"):
        made["budget"] = number("budget")
    return {name: value for name, value in made.items() if value > 0}


def shifted(mask: np.ndarray, steps: int) -> np.ndarray:
    """The mask moved along time: steps 1 is one later."""
    moved = np.zeros_like(mask)
    if steps > 0:
        moved[:, steps:] = mask[:, :-steps]
    else:
        moved[:, :steps] = mask[:, -steps:]
    return moved


def last_counted(mask: np.ndarray) -> np.ndarray:
    return mask & (np.cumsum(mask[:, ::-1], axis=1)[:, ::-1] == 1)


def eos_ids(recording: Recording) -> np.ndarray | None:
    """Recorded EOS ids, else the id that ends most of the rows that are shorter than the batch."""
    if "eos_id" in recording.arrays:
        return recording.arrays["eos_id"].reshape(-1)
    ids, mask = recording.get("completion_ids"), recording.get("mask")
    if ids is None:
        return None
    ends = ids[last_counted(mask) & ~mask[:, -1:]]
    if not len(ends):
        return None
    values, counts = np.unique(ends, return_counts=True)
    return values[counts.argmax()][None] if counts.max() * 2 > len(ends) else None


def mask_edits(recording: Recording) -> dict[str, np.ndarray]:
    """Mask mistakes that change the recorded mask: name -> mask the loss would have used."""
    mask, attention = recording.arrays["mask"], recording.get("attention_mask")
    edits = {"mask_one_step_late": shifted(mask, 1), "mask_one_step_early": shifted(mask, -1)}
    last = last_counted(mask)
    ids, ends = recording.get("completion_ids"), eos_ids(recording)
    if ids is not None and ends is not None:
        edits["eos_dropped"] = mask & ~np.isin(ids, ends)
    else:
        edits["eos_dropped"] = mask & ~last
    first = np.where(mask.any(1), mask.argmax(1), mask.shape[1])[:, None]
    end = np.where(mask.any(1), mask.shape[1] - mask[:, ::-1].argmax(1), 0)[:, None]
    position = np.arange(mask.shape[1])
    span = (position >= first) & (position < end)
    edits["tool_tokens_counted"] = mask | span
    if attention is not None:
        edits["prompt_counted"] = mask | (attention & (position < first))
    elif "prompt_lengths" in recording:
        edits["prompt_counted"] = mask | (position < first)
    edits["padding_counted"] = np.ones_like(mask) if "prompt_counted" not in edits else mask | (position >= first)
    return {name: edit for name, edit in edits.items() if (edit != mask).any() and edit.any()}


# ------------------------------------------------------------------------------------------ forms of J


def clip_pairs(recording: Recording) -> list[tuple[float, float]]:
    low, high = recording.number("clip_low"), recording.number("clip_high")
    pairs = list(CLIP_PAIRS)
    if low is not None or high is not None:
        low = high if low is None else low
        pairs.insert(0, (low, low if high is None else high))
    return list(dict.fromkeys(pairs))


def plain_spec(fields: dict) -> Spec:
    """J and its slope for one row of choices: what the engine returns when every token weighs 1."""
    row = Row("hypothesis", baseline="given", reduction="sum_over_tokens", **fields)

    def make(batch: Batch) -> Form:
        result = evaluate(row, replace(batch, ref_logps=None))
        return Form(-result.token_losses, -result.dloss_dlogps)

    return Spec(fields, None, make)


def plain_choices(recording: Recording, batch: Batch, gradient: Tensor | None) -> Iterator[dict]:
    """Every ratio and surrogate of the table with the constants that trainers use, likeliest first."""
    pairs = clip_pairs(recording)
    pairs += [pair for pair in seen_bounds(batch, gradient) if pair not in pairs]
    if batch.old_logps is None:
        pairs = pairs[:1]
    caps = list(dict.fromkeys([c for c in (recording.number("ratio_cap"), *CAPS) if c]))

    def clip(pair: tuple[float, float]) -> dict:
        return {"clip_low": pair[0], "clip_high": pair[1]}

    has_logps = bool(batch.logps.any()) or batch.old_logps is not None
    if has_logps:
        for pair in pairs:
            yield {"ratio": "token", "surrogate": "clip", **clip(pair)}
        for pair in pairs:
            for cap in caps[:1] if recording.number("ratio_cap") is None else caps:
                yield {"ratio": "token", "surrogate": "dual_clip", **clip(pair), "ratio_cap": cap}
        if recording.number("ratio_cap"):
            yield {"ratio": "token", "surrogate": "capped_clip", **clip(pairs[0]), "ratio_cap": caps[0]}
        for ratio in ("sequence_mean", "sequence_product", "sequence_mean_token"):
            for pair in pairs:
                yield {"ratio": ratio, "surrogate": "clip", **clip(pair)}
        for ratio in ("token", "sequence_mean", "sequence_product"):
            yield {"ratio": ratio, "surrogate": "plain"}
    yield {"ratio": "none", "surrogate": "plain"}
    if not has_logps:
        return
    tops = [(INF, -0.8), (INF, 4.0), (1.0, 4.0), (1.0, 0.28), (INF, 0.2), (INF, 0.28), (INF, 1.0), (INF, 2.0), (INF, 3.0)]
    if recording.number("clip_high") is not None:
        tops += [(INF, recording.number("clip_high") - 1)]
    for pair in dict.fromkeys([*pairs[:3], *tops]):
        yield {"ratio": "token", "surrogate": "cispo", **clip(pair)}
    yield {"ratio": "token", "surrogate": "sapo", "tau_positive": 1.0, "tau_negative": 1.05}
    yield {"ratio": "token", "surrogate": "vespo"}
    for surrogate, bands in (("dppo_tv", ((0.15, 0.15), (0.2, 0.2))), ("dppo_kl", ((0.05, 0.05), (0.2, 0.2)))):
        for pair in dict.fromkeys([*bands, *pairs[:1]]):
            yield {"ratio": "token", "surrogate": surrogate, **clip(pair), "ratio_cap": caps[0]}
    for pair in dict.fromkeys([(0.4, 0.4), *pairs[:1]]):
        yield {"ratio": "sequence_mean_of_clipped", "surrogate": "plain", **clip(pair)}
    if batch.old_logps is not None:
        lag = (batch.old_logps - batch.logps).sum(1) / batch.lengths.clamp(min=1)
        lag = lag[(batch.advantages < 0).any(1) & (batch.lengths > 0)]
        for threshold in dict.fromkeys([*seen_thresholds(batch, gradient), *OFF_POLICY_THRESHOLDS]):
            if bool((lag > threshold).any()):
                yield {
                    "ratio": "token",
                    "surrogate": "clip",
                    **clip(pairs[0]),
                    "off_policy_rows": "drop",
                    "off_policy_threshold": threshold,
                }


def seen_bounds(batch: Batch, gradient: Tensor | None) -> list[tuple[float, float]]:
    """Clip widths read off a recorded gradient: between the last ratio that keeps it and the first that loses it."""
    if gradient is None or batch.old_logps is None or batch.ref_logps is not None:
        return []
    g, mask = gradient, batch.mask
    r = (batch.logps - batch.old_logps).exp()
    A = batch.advantages.expand_as(r)
    flat = (g == 0) & mask & (A != 0)
    sides = []
    for sign, cut in ((1, flat & (A > 0) & (r > 1)), (-1, flat & (A < 0) & (r < 1))):
        kept = (g != 0) & mask & (A * sign > 0)
        distance = sign * (r - 1)
        if not cut.any():
            sides.append(None)
            continue
        beyond = float(distance[cut].min())
        below = float(distance[kept & (distance < beyond)].max()) if (kept & (distance < beyond)).any() else 0.0
        sides.append(round_between(max(below, 0.0), beyond))
    if sides == [None, None] or not all(side is None or side > 0 for side in sides):
        return []
    high, low = sides
    return [(high if low is None else low, low if high is None else high)]


def without_far_rows(spec: Spec, threshold: float) -> Spec:
    """The form with answers of A < 0 left out that have moved further than this: mean_t(l0 - l) > threshold."""

    def make(batch: Batch) -> Form:
        form = spec.make(batch)
        lag = (batch.old_logps - batch.logps).sum(1, keepdim=True) / batch.lengths.unsqueeze(1).clamp(min=1)
        left_out = (batch.advantages < 0) & (lag > threshold)
        slope = None if form.slope is None else torch.where(left_out, 0.0, form.slope)
        return Form(torch.where(left_out, 0.0, form.value), slope)

    fields = {**spec.fields, "off_policy_rows": "drop", "off_policy_threshold": threshold}
    return Spec(fields, spec.mistake, make)


def seen_thresholds(batch: Batch, gradient: Tensor | None) -> list[float]:
    """A lag beyond which answers with A < 0 have lost their whole gradient."""
    if gradient is None or batch.old_logps is None:
        return []
    A = batch.advantages.expand_as(batch.logps)
    lag = (batch.old_logps - batch.logps).sum(1) / batch.lengths.clamp(min=1)
    negative = ((A < 0) & batch.mask).any(1)
    silent = negative & (gradient == 0).all(1)
    loud = negative & ~silent
    if not silent.any() or not loud.any() or lag[silent].min() <= lag[loud].max():
        return []
    return [round_between(float(lag[loud].max()), float(lag[silent].min()))]


def round_between(low: float, high: float) -> float:
    """The number with the fewest digits in [low, high)."""
    for digits in range(0, 12):
        step = 10.0**-digits
        candidate = math.ceil(low / step - 1e-9) * step
        if low <= candidate < high and candidate > 0:
            return round(candidate, digits)
    return (low + high) / 2


def mistaken_specs(recording: Recording, traits: Traits, declared: dict | None = None) -> Iterator[Spec]:
    """Edits of the ratio and the clip, each with the name of its mistake; of the declared surrogate, else of the plain clip.

    r = exp(l - l0), A the advantage, J the surrogate, G = dJ / dl. A slope that is not the right one is written out.
    """
    named = (declared or {}).get("surrogate")
    cap = recording.number("ratio_cap", CAPS[0])
    is_dual = named == "dual_clip"
    base = {"surrogate": "dual_clip", "ratio_cap": cap} if is_dual else {"surrogate": "clip"}
    ratio = (declared or {}).get("ratio", "token")
    pairs = clip_pairs(recording)[:4]

    def written(name: str, fields: dict, formula: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]) -> Spec:
        """formula(r, A, l) -> J, G."""

        def make(batch: Batch) -> Form:
            l, mask = batch.logps, batch.mask
            r = rl_lab.importance_ratio(l, l if batch.old_logps is None else batch.old_logps)
            value, slope = formula(r, batch.advantages.expand_as(l), l)
            zero = torch.zeros((), dtype=l.dtype)
            return Form(torch.where(mask, value, zero), None if slope is None else torch.where(mask, slope, zero))

        return Spec(fields, name, make)

    def other(name: str, fields: dict, changes: dict, keeps_slope: bool = True) -> Spec:
        """The right formula with other numbers in it, or without its slope."""
        plain = plain_spec({**fields, **changes})
        return Spec(fields, name, plain.make if keeps_slope else lambda batch: Form(plain.make(batch).value, None))

    def kept(J: Tensor, rA: Tensor) -> tuple[Tensor, Tensor]:
        """J with the slope r A where the unclipped product was chosen, 0 elsewhere."""
        return J, rA.masked_fill(J != rA, 0.0)

    def floor(J: Tensor, A: Tensor) -> Tensor:
        return torch.where(A < 0, torch.maximum(J, cap * A), J) if is_dual else J

    if not traits.moved:
        # On a first pass the clip does nothing; what remains to be seen is whether a gradient flows, and which way.
        fields = {"ratio": ratio, **base, "clip_low": pairs[0][0], "clip_high": pairs[0][1]}
        yield written("ratio_detached", fields, lambda r, A, l: (A, None))
        yield written("old_logps_not_detached", fields, lambda r, A, l: (A, None))
        yield written("ratio_inverted", fields, lambda r, A, l: (A, -A))
        yield written("dual_clip_on_positive", fields, lambda r, A, l: kept(torch.maximum(A, cap * A), A))
    for low, high in pairs if traits.moved else ():
        fields = {"ratio": "token", **base, "clip_low": low, "clip_high": high}

        def clipped(r: Tensor, low=low, high=high) -> Tensor:
            return r.clamp(1 - low, 1 + high)

        of_ratio = {**fields, "ratio": "token" if ratio == "none" else ratio}
        if low != high:
            yield other("clip_sides_swapped", of_ratio, {"clip_low": high, "clip_high": low})
        yield other("clip_one_sided", of_ratio, {"clip_low": INF})
        yield other("clip_one_sided", of_ratio, {"clip_high": INF})
        if low < 0.5:
            yield other("clip_lower_bound_wrong", of_ratio, {"clip_low": 1 - low})
        yield written("clip_without_min", fields, lambda r, A, l, c=clipped: (c(r) * A, (r * A).masked_fill(c(r) != r, 0.0)))
        yield written("max_for_min", fields, lambda r, A, l, c=clipped: kept(torch.maximum(r * A, c(r) * A), r * A))
        yield written("min_before_multiplying", fields, lambda r, A, l, c=clipped: kept(torch.minimum(r, c(r)) * A, r * A))
        yield written(
            "dual_clip_on_positive",
            fields,
            lambda r, A, l, c=clipped: kept(torch.maximum(torch.minimum(r * A, c(r) * A), cap * A), r * A),
        )
        for limit in (10.0, 20.0):
            if traits.largest_ratio > limit:
                yield written(
                    "cap_after_exp",
                    fields,
                    lambda r, A, l, c=clipped, limit=limit: kept(
                        floor(torch.minimum(r.clamp(max=limit) * A, c(r.clamp(max=limit)) * A), A), r * A
                    ),
                )
        for level in ("token", "sequence_mean", "sequence_product"):
            yield other("ratio_detached", {**fields, "ratio": level}, {}, keeps_slope=False)

        def inverted(r: Tensor, A: Tensor, l: Tensor, c=clipped) -> tuple[Tensor, Tensor]:
            inverse = 1 / r
            J = floor(torch.minimum(inverse * A, c(inverse) * A), A)
            return J, (-inverse * A).masked_fill(J != inverse * A, 0.0)

        yield written("ratio_inverted", fields, inverted)
    if traits.moved:
        fields = {"ratio": "token", **base, "clip_low": pairs[0][0], "clip_high": pairs[0][1]}
        yield written("old_logps_recomputed", fields, lambda r, A, l: (A, A))
        yield written("old_logps_not_detached", fields, lambda r, A, l: (A, None))
        for low, high in dict.fromkeys([*pairs, (INF, -0.8), (1.0, 4.0), (INF, 4.0), (INF, 0.2)]):

            def live(r: Tensor, A: Tensor, l: Tensor, low=low, high=high) -> tuple[Tensor, Tensor]:
                w = r.clamp(1 - low, 1 + high)
                return w * A * l, w * A + torch.where(w == r, r * A * l, 0.0)

            yield written(
                "missing_stop_gradient", {"ratio": "token", "surrogate": "cispo", "clip_low": low, "clip_high": high}, live
            )
        fields = {"ratio": "sequence_mean_token", "surrogate": "clip", "clip_low": pairs[0][0], "clip_high": pairs[0][1]}
        own, mean = plain_spec(fields), plain_spec({**fields, "ratio": "sequence_mean"})
        # Without sg[.] both factors of the token form carry gradient: the mean's and the token's own.
        yield Spec(
            fields,
            "missing_stop_gradient",
            lambda batch: Form(own.make(batch).value, own.make(batch).slope + mean.make(batch).slope),
        )
    if traits.along_time is not None:

        def turned(spec: Spec) -> Spec:
            def make(batch: Batch) -> Form:
                return spec.make(replace(batch, advantages=traits.along_time.expand(batch.mask.shape).clone()))

            return Spec(spec.fields, "advantages_aligned_with_time", make)

        clip = {**base, "clip_low": pairs[0][0], "clip_high": pairs[0][1]}
        for level in dict.fromkeys([ratio, "token"]):
            if level != "none":
                yield turned(plain_spec({"ratio": level, **clip}))
        yield turned(plain_spec({"ratio": "none", "surrogate": "plain"}))


# ------------------------------------------------------------------------------------------ forms of the KL term

_KL_PLAIN = tuple(
    {"kl": kl, "kl_weight": weight, "kl_gradient": gradient}
    for kl in ("k3", "k2", "k1", "abs")
    for weight in ("none", "ratio")
    for gradient in ("own", "k2")
    if not (weight == "ratio" and gradient == "k2") and not (kl == "k2" and gradient == "k2")
)


def kl_specs(traits: Traits, ratio: str, with_mistakes: bool, value_only: bool) -> Iterator[Spec]:
    """KL estimates of the current policy to the reference (or to the old policy), beside a J with this ratio.

    The engine with advantages of 0 and a coefficient of 1 leaves the KL term alone.
    """
    no_clip = {"surrogate": "plain"} if ratio in ("none", "sequence_mean_of_clipped") else {}
    weighs = traits.has_old and ratio != "none"

    def evaluated(fields: dict, batch: Batch):
        silent = replace(batch, advantages=torch.zeros_like(batch.advantages[:, :1]), window_tokens=None, window_rows=None)
        row = Row("hypothesis", baseline="given", reduction="sum_over_tokens", ratio=ratio, kl_coef=1.0, **no_clip, **fields)
        return evaluate(row, silent)

    def of(fields: dict) -> Spec:
        def make(batch: Batch) -> Form:
            result = evaluated(fields, batch)
            value = result.kl * result.ratios if fields.get("kl_weight") == "ratio" else result.kl
            return Form(torch.where(batch.mask, value, 0.0), result.dloss_dlogps)

        return Spec(fields, None, make)

    if traits.has_logits:
        yield of({"kl": "exact", "kl_weight": "none", "kl_gradient": "own", "kl_anchor": "reference"})
    anchors = ["reference"] * traits.has_reference + ["old"] * (traits.moved and ratio == "none")
    for anchor in anchors:
        for fields in _KL_PLAIN:
            if value_only and (fields["kl_gradient"] == "k2" or anchor == "old" and fields["kl"] != "k2"):
                continue
            if fields["kl_weight"] == "none" or weighs:
                yield of({**fields, "kl_anchor": anchor})
        k3 = {"kl": "k3", "kl_weight": "none", "kl_gradient": "own", "kl_anchor": anchor}
        if traits.wide_kl:
            yield of({**k3, "kl_log_limit": 20.0, "kl_limit": 10.0})
        if not with_mistakes or anchor != "reference":
            continue

        def exchanged(batch: Batch) -> Form:
            """k3 with its two policies exchanged: exp(d) - d - 1, slope exp(d) - 1."""
            d = batch.logps - batch.ref_logps
            return Form(torch.where(batch.mask, d.exp() - d - 1, 0.0), torch.where(batch.mask, d.exp() - 1, 0.0))

        def exchanged_times_ratio(batch: Batch, k3=k3) -> Form:
            """r k: slope r dk/dl + k dr/dl, the latter summed over the answer where one ratio serves all its tokens."""
            form, r = exchanged(batch), evaluated(k3, batch).ratios
            through = r * form.value
            if ratio in ("sequence_mean", "sequence_product"):
                through = torch.where(batch.mask, through.sum(1, keepdim=True), 0.0)
                through = through / batch.lengths.unsqueeze(1).clamp(min=1) if ratio == "sequence_mean" else through
            return Form(r * form.value, r * form.slope + through)

        def ratio_inside(batch: Batch) -> Form:
            value, slope = _ratio_in_k3(batch.ref_logps - batch.logps)
            return Form(torch.where(batch.mask, value, 0.0), torch.where(batch.mask, slope, 0.0))

        def still(fields: dict) -> Spec:
            spec = of(fields)

            def make(batch: Batch) -> Form:
                form = spec.make(batch)
                return Form(form.value, torch.zeros_like(form.slope))

            return Spec(fields, "kl_without_gradient", make)

        yield Spec(k3, "kl_direction", exchanged)
        yield Spec(k3, "kl_ratio_for_log_ratio", ratio_inside)
        yield still(k3)
        if weighs and not no_clip:
            weighted = {**k3, "kl_weight": "ratio"}
            yield Spec(weighted, "kl_direction", exchanged_times_ratio)
            yield still(weighted)


def _ratio_in_k3(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """exp(R) - R - 1 with R = exp(lr - l) in the place of lr - l; d/dl = -(exp(R) - 1) R. R is held below 50."""
    R = log_ratio.clamp(max=math.log(50.0)).exp()
    return R.exp() - R - 1, -(R.exp() - 1) * R


# ------------------------------------------------------------------------------------------ reductions


class Reduction(NamedTuple):
    fields: dict
    weights: Tensor  # (N,)
    mistake: str | None = None


def reductions(recording: Recording, batch: Batch) -> list[Reduction]:
    """Row weights of every reduction that differs on this batch; equal ones stand side by side (they tie)."""
    lengths = batch.lengths
    row = Row("hypothesis", baseline="given")
    has_empty = bool((lengths == 0).any())
    zeros = torch.zeros_like(batch.advantages)
    made = []

    def add(fields: dict, within: Batch = batch, mistake: str | None = None) -> None:
        chosen = replace(row, **{k: v for k, v in fields.items() if k in ("reduction", "rows_counted")})
        weights = evaluate(chosen, replace(within, advantages=zeros)).weights
        made.append(Reduction(fields, weights.amax(dim=1), mistake))

    own_rows = replace(batch, window_rows=None)
    add({"reduction": "mean_per_response"}, own_rows)
    if has_empty:
        add({"reduction": "mean_per_response", "rows_counted": "nonempty"}, own_rows)
    if batch.window_tokens is not None:
        add({"reduction": "mean_over_window"})
    add({"reduction": "mean_over_tokens"})
    if batch.budget is not None:
        add({"reduction": "sum_over_budget", "budget": batch.budget}, own_rows)
    add({"reduction": "sum_per_response"}, own_rows)
    if has_empty:
        add({"reduction": "sum_per_response", "rows_counted": "nonempty"}, own_rows)
    add({"reduction": "sum_over_width"}, own_rows)
    add({"reduction": "sum_over_tokens"})
    parts = recording.get("micro_batch_ids")
    if parts is not None and len(np.unique(parts)) > 1:
        names, inverse = np.unique(parts, return_inverse=True)
        tokens = torch.zeros(len(names), dtype=torch.float64).index_add(0, torch.as_tensor(inverse), lengths.double())
        weights = 1 / (len(names) * tokens.clamp(min=1))
        made.append(Reduction({"reduction": "mean_of_micro_batch_means"}, weights[torch.as_tensor(inverse)]))
    if batch.window_rows is not None:
        for name in ("mean_per_response", "sum_per_response"):
            add({"reduction": name, "global_batch_size": batch.window_rows})
    if batch.mask.shape[1] == 1:  # samples of an environment: who averages them averages over samples
        made.sort(key=lambda reduction: reduction.fields["reduction"] != "mean_over_tokens")
    return made


def mistaken_reductions(recording: Recording, batch: Batch) -> list[Reduction]:
    """Denominators that count what the numerator leaves out."""
    mask = recording.arrays["mask"]
    everything = recording.get("attention_mask")
    if everything is None and "lengths" in recording:
        everything = np.arange(mask.shape[1]) < recording.arrays["lengths"][:, None]
    if everything is None:
        return []
    extra = torch.as_tensor(everything & ~mask).sum(1)
    dropped = (batch.lengths == 0) & (extra > 0)
    if not dropped.any():
        return []
    total = float(batch.lengths.sum() + extra[dropped].sum())
    ones = torch.full((len(mask),), 1.0 / total, dtype=torch.float64)
    return [Reduction({"reduction": "mean_over_tokens"}, ones, "dropped_rows_in_denominator")]
