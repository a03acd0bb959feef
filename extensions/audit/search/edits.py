"""Edits of the ratio and the clip, each with the name of its mistake."""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Iterator

import torch
from torch import Tensor

import rl_lab
from extensions.audit.read.recording import Recording
from extensions.audit.search.forms import CAPS, INF, Form, Spec, Traits, clip_pairs, plain_spec
from extensions.objectives import Batch


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
