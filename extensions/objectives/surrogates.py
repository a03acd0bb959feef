"""Steps 3 and 4 of an objective: the ratio, and the surrogate J with its slope.

A new surrogate is one entry in SURROGATES: formula, function, numbers with their ranges, band, words. Row's fields, the list
of choices, what an explanation prints and what a declaration may set follow from it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

import rl_lab
from extensions.objectives.table import CLIP_HIGH, CLIP_LOW, INF, RATIO_CAP, Choice, Number, SurrogateChoice

if TYPE_CHECKING:
    from extensions.objectives.choices import Row

# ------------------------------------------------------------------------------------------ step 3: ratio


def choose(condition: Tensor, yes: float, no: float, dtype: torch.dtype) -> Tensor:
    """One of two numbers at every place. torch.where of two plain numbers would round them to float32."""
    return torch.where(condition, torch.tensor(yes, dtype=dtype), torch.tensor(no, dtype=dtype))


class Ratio(NamedTuple):
    """The ratio, per token (N, T) or per answer (N, 1), and d log ratio / d logp for each token."""

    value: Tensor
    share: Tensor | float  # d log r / d l_t
    of_answer: bool  # the slopes of an answer's tokens are summed before they reach each of them
    cut: Tensor | bool  # tokens or answers whose log-ratio a limit, or a clip inside the ratio, has cut


def exp_of(log_ratio: Tensor) -> Tensor:
    """exp with the overflow guard of rl_lab.importance_ratio."""
    return rl_lab.importance_ratio(log_ratio, torch.zeros((), dtype=log_ratio.dtype).expand_as(log_ratio))


class LogRatio(NamedTuple):
    """What a kind of ratio makes of d = l - l0 (N, T), before a limit cuts it and exp is taken."""

    value: Tensor
    share: Tensor | float
    of_answer: bool
    cut: Tensor | bool = False


def token(row: Row, d: Tensor, lengths: Tensor, A: Tensor) -> LogRatio:
    return LogRatio(d, 1.0, False)


def sequence_mean(row: Row, d: Tensor, lengths: Tensor, A: Tensor) -> LogRatio:
    return LogRatio(d.sum(dim=1, keepdim=True) / lengths, 1 / lengths, True)


def sequence_product(row: Row, d: Tensor, lengths: Tensor, A: Tensor) -> LogRatio:
    return LogRatio(d.sum(dim=1, keepdim=True), 1.0, True)


def sequence_mean_token(row: Row, d: Tensor, lengths: Tensor, A: Tensor) -> LogRatio:
    return LogRatio(d.sum(dim=1, keepdim=True) / lengths, 1.0, False)


def sequence_mean_of_clipped(row: Row, d: Tensor, lengths: Tensor, A: Tensor) -> LogRatio:
    low, high = choose(A < 0, -row.clip_low, -INF, d.dtype), choose(A > 0, row.clip_high, INF, d.dtype)
    clipped = d.clamp(low, high)
    cut = clipped != d
    return LogRatio(clipped.sum(dim=1, keepdim=True) / lengths, (~cut).to(d.dtype) / lengths, True, cut)


RATIOS: dict[str, Choice] = {
    "token": Choice("r_t = exp(l_t - l0_t)", token),
    "sequence_mean": Choice("r = exp(mean_t(l - l0)), the geometric mean of the token ratios", sequence_mean),
    "sequence_product": Choice("r = exp(sum_t(l - l0)), the ratio of whole answers", sequence_product),
    "sequence_mean_token": Choice(
        "r_t = sg[exp(mean(l - l0))] exp(l_t - sg[l_t]): value of the mean, gradient of the token", sequence_mean_token
    ),
    "sequence_mean_of_clipped": Choice(
        "r = exp(mean_t x_t), x_t = l - l0 clipped to [-low, high] on the side A asks for",
        sequence_mean_of_clipped,
        (CLIP_LOW, CLIP_HIGH),
    ),
    "none": Choice("no ratio: the objective is A l", token),
}


def compute_ratio(row: Row, l: Tensor, l0: Tensor, lengths: Tensor, advantages: Tensor) -> Ratio:
    """The ratio that row.ratio asks for. l, l0 (N, T) with 0 in unused slots, lengths (N, 1), advantages (N, 1) or (N, T).

    d log r / d l_t: token and sequence_mean_token 1, sequence_mean 1 / T_i, sequence_product 1; 0 where something has cut.
    """
    limits = row.log_ratio_min, row.log_ratio_max
    has_limit = row.ratio not in ("none", "sequence_mean_of_clipped") and not all(map(math.isinf, limits))
    if row.ratio in ("none", "token") and not has_limit:
        return Ratio(rl_lab.importance_ratio(l, l0), 1.0, False, False)
    log_ratio, share, of_answer, cut = RATIOS[row.ratio](row, l - l0, lengths.clamp(min=1), advantages)
    if has_limit:
        limited = log_ratio.clamp(*limits)
        cut, log_ratio = limited != log_ratio, limited
        share = share * (~cut).to(l.dtype)
    return Ratio(exp_of(log_ratio), share, of_answer, cut)


# ------------------------------------------------------------------------------------------ step 4: surrogate

# A surrogate takes the row, r, A and l, l0. It returns J and one slope: with respect to log r, or with respect to l where r
# is only a weight on the token. `effective` is what stands in for r; the clipped branch is where it is not r.


class Surrogate(NamedTuple):
    value: Tensor
    slope_log_ratio: Tensor | None = None
    slope_logp: Tensor | None = None
    effective: Tensor | None = None

    def where(self, kept: Tensor | float) -> Surrogate:
        """J and its slope times a factor that carries no gradient; a factor of 0 removes whatever stood there."""
        scaled = (None if x is None else torch.where(kept == 0, 0.0, x * kept) for x in self[:3])
        return Surrogate(*scaled, self.effective)


def plain(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """J = r A, dJ / d log r = r A; without a ratio J = A l, dJ / dl = A."""
    return Surrogate(A * l, slope_logp=A) if row.ratio == "none" else Surrogate(r * A, slope_log_ratio=r * A)


def bounded(r: Tensor, A: Tensor, top_if_positive: float, floor_if_negative: float, top_if_negative: float) -> Surrogate:
    """J = A b, b = r cut at a top where A > 0, at a floor and a top where A < 0; dJ / d log r = r A, 0 where cut.

    min(r A, clip(r) A) is that: with A > 0 only the top of the band can make it smaller, with A < 0 only the floor.
    """
    low = choose(A < 0, floor_if_negative, -INF, r.dtype)
    high = torch.where(A > 0, top_if_positive, choose(A < 0, top_if_negative, INF, r.dtype))
    b = r.clamp(low, high)
    value = A * b
    return Surrogate(value, slope_log_ratio=value.masked_fill(b != r, 0.0), effective=b)


def clip(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """J = min(r A, clip(r, 1 - low, 1 + high) A)."""
    return bounded(r, A, 1 + row.clip_high, 1 - row.clip_low, INF)


def dual_clip(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """J = max(min(r A, clip(r) A), c A) where A < 0: there r also stops at c."""
    return bounded(r, A, 1 + row.clip_high, 1 - row.clip_low, max(row.ratio_cap, 1 - row.clip_low))


def capped_clip(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """J = min(min(r, c) A, clip(r) A): dual clip if c > 1 + high; a smaller c lowers the top of A > 0 instead."""
    return bounded(r, A, min(1 + row.clip_high, row.ratio_cap), 1 - row.clip_low, max(1 + row.clip_high, row.ratio_cap))


def capped(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """J = min(r, c) A on both sides of A; no gradient beyond c."""
    return bounded(r, A, row.ratio_cap, -INF, row.ratio_cap)


def weighted(A: Tensor, l: Tensor, w: Tensor) -> Surrogate:
    """J = sg[w] A l, dJ / dl = w A: the ratio, or what stands in for it, is only a weight."""
    slope = w * A
    return Surrogate(slope * l, slope_logp=slope, effective=w)


def cispo(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """J = sg[w] A l, w = clip(r, 1 - low, 1 + high); dJ / dl = w A: cutting w never takes a gradient away."""
    return weighted(A, l, r.clamp(1 - row.clip_low, 1 + row.clip_high))


def topr(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """J = sg[w] A l, w = 1 where A > 0, min(r, c) elsewhere: what is already unlikely is not pushed down further."""
    return weighted(A, l, torch.where(A > 0, 1.0, r.clamp(max=row.topr_cap)))


def sapo(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """J = (4 / tau) p A, p = sigmoid(tau (r - 1)); dJ / d log r = 4 p (1 - p) r A. tau by the sign of A; 0 is negative."""
    tau = choose(A > 0, row.tau_positive, row.tau_negative, r.dtype)
    p = torch.sigmoid(tau * (r - 1))
    value = p * (4 / tau * A)
    return Surrogate(value, slope_log_ratio=value * (1 - p) * r * tau)


def vespo(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """J = sg[phi] A l, log phi = lam + k log w - lam w, w = exp(sum_t(l - l0)) with logs cut as its trainer cuts them."""
    k = choose(A >= 0, row.vespo_k_positive, row.vespo_k_negative, l.dtype)
    lam = choose(A >= 0, row.vespo_lam_positive, row.vespo_lam_negative, l.dtype)
    log_w = (l - l0).clamp(-20, 20).sum(dim=1, keepdim=True).clamp(math.log(1e-8), 20)
    slope = (lam + k * log_w - lam * log_w.exp()).exp() * A
    return Surrogate(slope * l, slope_logp=slope)


def beyond_tv(row: Row, A: Tensor, l: Tensor, l0: Tensor) -> Tensor:
    """Where p - p0 > high (A > 0) or p0 - p > low (A <= 0), p = exp(l), p0 = exp(l0)."""
    moved = l.exp() - l0.exp()
    return torch.where(A > 0, moved > row.clip_high, moved < -row.clip_low)


def beyond_kl(row: Row, A: Tensor, l: Tensor, l0: Tensor) -> Tensor:
    """As beyond_tv, with p0 log(p0 / p) + (1 - p0) log((1 - p0) / (1 - p)) in place of the distance."""
    p, p0 = l.exp(), l0.exp()
    distance = p0 * (l0 - l) + (1 - p0) * ((1 - p0 + 1e-8) / (1 - p + 1e-8)).log()
    return torch.where(A > 0, (distance > row.clip_high) & (p > p0), (distance > row.clip_low) & (p < p0))


def dppo_tv(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """J = sg[min(r, c)] A l; 0 beyond the region of beyond_tv."""
    return weighted(A, l, torch.where(beyond_tv(row, A, l, l0), 0.0, r.clamp(max=row.ratio_cap)))


def dppo_kl(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """J = sg[min(r, c)] A l; 0 beyond the region of beyond_kl."""
    return weighted(A, l, torch.where(beyond_kl(row, A, l, l0), 0.0, r.clamp(max=row.ratio_cap)))


def region_tv(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """J = r A, 0 beyond the region of beyond_tv; dJ / d log r = J."""
    b = torch.where(beyond_tv(row, A, l, l0), 0.0, r)
    return Surrogate(b * A, slope_log_ratio=b * A, effective=b)


def region_kl(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """J = r A, 0 beyond the region of beyond_kl; dJ / d log r = J."""
    b = torch.where(beyond_kl(row, A, l, l0), 0.0, r)
    return Surrogate(b * A, slope_log_ratio=b * A, effective=b)


_BAND = (CLIP_LOW, CLIP_HIGH)
_TOKENS = {"ratios": ("token",), "because": "a region of probabilities compares tokens"}

SURROGATES: dict[str, SurrogateChoice] = {
    "plain": SurrogateChoice("J = r A (without a ratio: A l)", plain, words="nothing holds the ratio back",
        ratios=(*RATIOS,)),
    "clip": SurrogateChoice("J = min(r A, clip(r, 1 - low, 1 + high) A)", clip, _BAND, has_band=True,
        words="no gradient once the ratio has left the band on the side that A asks for"),
    "dual_clip": SurrogateChoice("J = as clip; where A < 0 not below c A", dual_clip, (*_BAND, RATIO_CAP), has_band=True,
        words="as clip, and a token with A < 0 has no gradient above c"),
    "capped_clip": SurrogateChoice("J = min(min(r, c) A, clip(r, 1 - low, 1 + high) A)", capped_clip, (*_BAND, RATIO_CAP),
        has_band=True, words="as dual_clip while c > 1 + high"),
    "capped": SurrogateChoice("J = min(r, c) A", capped, (RATIO_CAP,), words="no gradient above c, whatever A; no floor"),
    "cispo": SurrogateChoice("J = sg[clip(r, 1 - low, 1 + high)] A l", cispo, _BAND, has_band=True,
        words="the clipped ratio is a weight: no token loses its gradient"),
    "topr": SurrogateChoice("J = sg[w] A l, w = 1 where A > 0, min(r, topr_cap) elsewhere", topr,
        (Number("topr_cap", 1.0, 0, INF, "largest weight of a token with A <= 0"),),
        words="good answers are imitated, bad ones are pushed down only as far as they are still likely"),
    "sapo": SurrogateChoice("J = (4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A", sapo,
        (Number("tau_positive", 1.0, 1e-6, INF, "tau where A > 0"), Number("tau_negative", 1.05, 1e-6, INF, "tau elsewhere")),
        words="a smooth gate in place of the clip"),
    "vespo": SurrogateChoice("J = sg[w^k exp(lam - lam w)] A l, w = exp(sum_t(l - l0)), k and lam by the sign of A", vespo,
        (Number("vespo_k_positive", 2.0, 0, INF), Number("vespo_lam_positive", 3.0, 1e-4, INF),
         Number("vespo_k_negative", 3.0, 0, INF), Number("vespo_lam_negative", 2.0, 1e-4, INF)),
        words="a smooth weight of the whole answer's ratio",
        ratios=("token",), because="vespo makes its own ratio of answers"),
    "dppo_tv": SurrogateChoice("J = sg[min(r, c)] A l; 0 where p - p0 is beyond high (A > 0) or p0 - p beyond low (A <= 0)",
        dppo_tv, (*_BAND, RATIO_CAP), words="the region is one of probabilities, not of ratios", **_TOKENS),
    "dppo_kl": SurrogateChoice(
        "J = sg[min(r, c)] A l; 0 where KL(p0 || p) of token against rest is beyond the band on that side",
        dppo_kl, (*_BAND, RATIO_CAP), words="the region is one of a two-outcome KL", **_TOKENS),
    "region_tv": SurrogateChoice("J = r A; 0 where p - p0 is beyond high (A > 0) or p0 - p beyond low (A <= 0)", region_tv,
        _BAND, words="dppo_tv without a cap, gradient through the ratio", **_TOKENS),
    "region_kl": SurrogateChoice("J = r A; 0 where KL(p0 || p) of token against rest is beyond the band on that side",
        region_kl, _BAND, words="dppo_kl without a cap, gradient through the ratio", **_TOKENS),
}  # fmt: skip
"""What J may be. A surrogate without `ratios` takes every ratio but "none" and "sequence_mean_of_clipped"."""
