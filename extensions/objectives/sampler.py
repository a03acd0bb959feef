"""Between steps 4 and 6: the program that sampled is not the program that trains, and a second ratio corrects for it.

A trainer computes l0, the log-probability of a token under the policy that sampled; the inference engine that really drew
the token had another one, ls, with other kernels, another precision or an older set of weights. With d = l0 - ls:

    w   how far the two are apart: per token exp(d), or per answer exp(sum d) or exp(mean d); a weight on the token's loss
    x   what decides whether a token or an answer is used at all: the ratio itself, a KL estimate, or |p0 - ps|

Neither carries a gradient. A new level of w is an entry in SAMPLER_CORRECTIONS, a new measure x one in SAMPLER_DROPS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from extensions.objectives.batch import Batch, required, sampling_logps
from extensions.objectives.surrogates import exp_of
from extensions.objectives.table import INF, Choice, Number, plain_choices

if TYPE_CHECKING:
    from extensions.objectives.choices import Row

LOW = Number("sampler_low", 0.0, 0, INF, "smallest weight: floored and banded")
HIGH = Number("sampler_high", 2.0, 0, INF, "largest weight: capped and banded")
_DROP = (
    Number("sampler_drop_low", -INF, -INF, INF, "nothing below is used"),
    Number("sampler_drop_high", INF, -INF, INF, "nothing above is used"),
)
_LOGPS = ("sampler_logps",)

# Weight w from d = l0 - ls (N, T), 0 in unused slots, and the number of counted tokens (N, 1): (N, T) or (N, 1).
SAMPLER_CORRECTIONS: dict[str, Choice] = {
    "none": Choice("w = 1"),
    "token": Choice("w_t = exp(l0_t - ls_t), ls the log-probability in the program that sampled", lambda d, n: exp_of(d),
        needs=_LOGPS),
    "product": Choice("w = exp(sum_t(l0 - ls)), the ratio of whole answers",
        lambda d, n: exp_of(d.sum(dim=1, keepdim=True)), needs=_LOGPS),
    "geometric": Choice("w = exp(mean_t(l0 - ls)), the geometric mean",
        lambda d, n: exp_of(d.sum(dim=1, keepdim=True) / n), needs=_LOGPS),
    "given": Choice("w as the batch holds it", needs=("sampler_weights",)),
}  # fmt: skip

SAMPLER_BOUNDS: dict[str, Choice] = {
    "as_is": Choice("w", lambda w, low, high: w),
    "capped": Choice("min(w, high)", lambda w, low, high: w.clamp(max=high), (HIGH,)),
    "floored": Choice("max(w, low)", lambda w, low, high: w.clamp(min=low), (LOW,)),
    "banded": Choice("clip(w, low, high)", lambda w, low, high: w.clamp(low, high), (LOW, HIGH)),
}

# Measure x of a token from d, l0 and ls. The ratio is measured as its logarithm, so that answers can average it.
SAMPLER_DROPS: dict[str, Choice] = {
    "none": Choice("every token is used"),
    "ratio": Choice("x = exp(l0 - ls)", lambda d, l0, ls: d, _DROP, _LOGPS),
    "k1": Choice("x = ls - l0", lambda d, l0, ls: -d, _DROP, _LOGPS),
    "k2": Choice("x = (l0 - ls)^2 / 2", lambda d, l0, ls: d.square() / 2, _DROP, _LOGPS),
    "k3": Choice("x = exp(l0 - ls) - 1 - (l0 - ls), the KL from the sampler", lambda d, l0, ls: torch.expm1(d) - d, _DROP,
        _LOGPS),
    "tv": Choice("x = |exp(l0) - exp(ls)|, the total variation of token against rest",
        lambda d, l0, ls: (l0.exp() - ls.exp()).abs(), _DROP, _LOGPS),
}  # fmt: skip

SAMPLER_DROP_LEVELS: dict[str, Choice] = {
    "token": Choice("each token by its own x", lambda x, mask: x),
    "mean": Choice("an answer by the mean of its x (ratio: the geometric mean)",
        lambda x, mask: x.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)),
    "sum": Choice("an answer by the sum of its x (ratio: the product)", lambda x, mask: x.sum(dim=1, keepdim=True)),
    "worst": Choice("an answer by its worst token: it goes if one of them would", None),
}  # fmt: skip

SAMPLER_DROPPED = plain_choices(
    counted="what is dropped has loss 0 and stays in the denominators",
    left_out="what is dropped leaves the mask: it is in no denominator",
)
SAMPLER_PLACE = plain_choices(
    policy="w and the dropping act on the policy term alone",
    loss="w and the dropping act on the policy term and on the KL in the loss",
)


class Correction(NamedTuple):
    """The weight of each token, w and 0 where dropped, and what stays in the mask."""

    weight: Tensor  # (N, T) or (N, 1)
    kept: Tensor  # (N, T) bool


def sampler_correction(row: Row, batch: Batch, mask: Tensor) -> Correction | None:
    """What the row makes of the gap between sampler and trainer on the counted tokens `mask`; None without a correction.

    Gradient: none. Raises ValueError if the batch lacks sampler_logps or sampler_weights, where the row reads them.
    """
    if row.sampler_correction == "none" and row.sampler_drop == "none":
        return None
    l0 = sampling_logps(batch)
    weight = torch.ones(len(mask), 1, dtype=l0.dtype)
    if row.sampler_correction != "none":
        weight = sampler_weight(row, batch, mask)
    kept = torch.ones_like(mask)
    if row.sampler_drop != "none":
        ls = required(row, batch, "sampler_logps")
        x = SAMPLER_DROPS[row.sampler_drop](l0 - ls, l0, ls).masked_fill(~mask, 0.0)
        kept = _kept(row, x, mask)
    return Correction(torch.where(kept, weight, 0.0), kept)


def sampler_weight(row: Row, batch: Batch, mask: Tensor) -> Tensor:
    """w within its bounds, (N, T) or (N, 1)."""
    if row.sampler_correction == "given":
        w = required(row, batch, "sampler_weights")
        w = w.unsqueeze(1) if w.dim() == 1 else w
    else:
        d = (sampling_logps(batch) - required(row, batch, "sampler_logps")).masked_fill(~mask, 0.0)
        w = SAMPLER_CORRECTIONS[row.sampler_correction](d, mask.sum(dim=1, keepdim=True).clamp(min=1))
    return SAMPLER_BOUNDS[row.sampler_bound](w, row.sampler_low, row.sampler_high)


def _kept(row: Row, x: Tensor, mask: Tensor) -> Tensor:
    def inside(measure: Tensor) -> Tensor:
        measure = exp_of(measure) if row.sampler_drop == "ratio" else measure
        return (measure >= row.sampler_drop_low) & (measure <= row.sampler_drop_high)

    if row.sampler_drop_level == "worst":
        return (inside(x) | ~mask).all(dim=1, keepdim=True).expand_as(mask)
    return inside(SAMPLER_DROP_LEVELS[row.sampler_drop_level](x, mask)).expand_as(mask)
