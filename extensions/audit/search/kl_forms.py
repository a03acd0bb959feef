"""The KL terms that a loss may hold, the plain and the mistaken ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Iterator

import torch
from torch import Tensor

from extensions.audit.search.forms import Form, Spec, Traits
from extensions.objectives import Batch, Row, evaluate

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
