"""Steps 3 to 5 of an objective: the ratio, the surrogate with its slope, the KL estimate. See SURROGATES."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

import rl_lab
from extensions.objectives.batch import Batch
from extensions.objectives.choices import Row

INF = math.inf

# ------------------------------------------------------------------------------------------ step 3: ratio


def choose(condition: Tensor, yes: float, no: float, dtype: torch.dtype) -> Tensor:
    """One of two numbers at every place. torch.where of two plain numbers would round them to float32."""
    return torch.where(condition, torch.tensor(yes, dtype=dtype), torch.tensor(no, dtype=dtype))


class Ratio(NamedTuple):
    """A ratio, (N, T) or one an answer (N, 1), and how far a slope with respect to its logarithm reaches."""

    value: Tensor
    share: Tensor | float  # d log r / d l_t
    of_answer: bool  # the slopes of an answer's tokens are summed before they reach each of them
    cut: Tensor | bool  # tokens or answers whose log-ratio a limit, or a clip inside the ratio, has cut


def _exp(log_ratio: Tensor) -> Tensor:
    return rl_lab.importance_ratio(log_ratio, torch.zeros((), dtype=log_ratio.dtype).expand_as(log_ratio))


def compute_ratio(row: Row, l: Tensor, l0: Tensor, lengths: Tensor, advantages: Tensor) -> Ratio:
    """The ratio that row.ratio asks for. l, l0 (N, T) with 0 in unused slots, lengths (N, 1), advantages (N, 1) or (N, T).

    d log r / d l_t: token and sequence_mean_token 1, sequence_mean 1 / T_i, sequence_product 1; 0 where something has cut.
    """
    lengths = lengths.clamp(min=1)
    has_limit = not (math.isinf(row.log_ratio_min) and math.isinf(row.log_ratio_max))
    if row.ratio == "none" or (row.ratio == "token" and not has_limit):
        return Ratio(rl_lab.importance_ratio(l, l0), 1.0, False, False)
    log_ratio = l - l0
    if row.ratio == "sequence_mean_of_clipped":
        low, high = choose(advantages < 0, -row.clip_low, -INF, l.dtype), choose(advantages > 0, row.clip_high, INF, l.dtype)
        clipped = log_ratio.clamp(low, high)
        cut = clipped != log_ratio
        return Ratio(_exp(clipped.sum(dim=1, keepdim=True) / lengths), (~cut).to(l.dtype) / lengths, True, cut)
    share: Tensor | float = 1.0
    if row.ratio == "sequence_product":
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    elif row.ratio in ("sequence_mean", "sequence_mean_token"):
        log_ratio = log_ratio.sum(dim=1, keepdim=True) / lengths
        share = 1 / lengths if row.ratio == "sequence_mean" else 1.0
    cut = False
    if has_limit:
        limited = log_ratio.clamp(row.log_ratio_min, row.log_ratio_max)
        cut, log_ratio = limited != log_ratio, limited
        share = share * (~cut).to(l.dtype)
    return Ratio(_exp(log_ratio), share, row.ratio in ("sequence_mean", "sequence_product"), cut)


# ------------------------------------------------------------------------------------------ step 4: surrogate

# A surrogate takes the row, r, A and l, l0. It returns J and one slope: with respect to log r, or with respect to l where r
# is only a weight on the token. `effective` is what stands in for r; the clipped branch is where it is not r.


class Surrogate(NamedTuple):
    value: Tensor
    slope_log_ratio: Tensor | None = None
    slope_logp: Tensor | None = None
    effective: Tensor | None = None


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


def cispo(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """J = sg[w] A l, w = clip(r, 1 - low, 1 + high); dJ / dl = w A: cutting w never takes a gradient away."""
    w = r.clamp(1 - row.clip_low, 1 + row.clip_high)
    slope = w * A
    return Surrogate(slope * l, slope_logp=slope, effective=w)


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


def dppo_tv(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """J = sg[min(r, c)] A l; 0 where p - p0 > high (A > 0) or p0 - p > low (A <= 0), p = exp(l), p0 = exp(l0)."""
    moved = l.exp() - l0.exp()
    return _trusted(row, r, A, l, torch.where(A > 0, moved > row.clip_high, moved < -row.clip_low))


def dppo_kl(row: Row, r: Tensor, A: Tensor, l: Tensor, l0: Tensor) -> Surrogate:
    """As dppo_tv, with p0 log(p0 / p) + (1 - p0) log((1 - p0) / (1 - p)) in place of the distance."""
    p, p0 = l.exp(), l0.exp()
    distance = p0 * (l0 - l) + (1 - p0) * ((1 - p0 + 1e-8) / (1 - p + 1e-8)).log()
    beyond = torch.where(A > 0, (distance > row.clip_high) & (p > p0), (distance > row.clip_low) & (p < p0))
    return _trusted(row, r, A, l, beyond)


def _trusted(row: Row, r: Tensor, A: Tensor, l: Tensor, beyond: Tensor) -> Surrogate:
    w = torch.where(beyond, 0.0, r.clamp(max=row.ratio_cap))
    return Surrogate(w * A * l, slope_logp=w * A, effective=w)


SURROGATES = {
    "plain": plain,
    "clip": clip,
    "dual_clip": dual_clip,
    "capped_clip": capped_clip,
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
}


# ------------------------------------------------------------------------------------------ step 5: KL


def kl_estimate(row: Row, logps: Tensor, anchor_logps: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate of KL(policy || anchor) at each sampled token, and its slope d KL_t / d l_t. [...] -> [...], [...].

    d = l - lr. k1: d, slope 1. k2: d^2/2, slope d. k3: exp(-d) + d - 1, slope 1 - exp(-d). abs: |d|, slope sign(d).
    A limit cuts the value and its slope. kl_gradient "k2" keeps the value and takes slope d, which no limit cuts.
    """
    d = logps - anchor_logps
    limited = d if math.isinf(row.kl_log_limit) else d.clamp(-row.kl_log_limit, row.kl_log_limit)
    k1, k2, k3 = rl_lab.kl_estimates(limited, torch.zeros((), dtype=d.dtype).expand_as(d))
    if row.kl == "k1":
        value, slope = k1, torch.ones_like(d)
    elif row.kl == "k2":
        value, slope = k2, k1
    elif row.kl == "k3":
        value, slope = k3, k1 - k3  # 1 - exp(-d) = d - (exp(-d) + d - 1)
    else:
        value, slope = limited.abs(), limited.sign()
    if not math.isinf(row.kl_limit):
        slope = torch.where(value.abs() > row.kl_limit, 0.0, slope)
        value = value.clamp(-row.kl_limit, row.kl_limit)
    if limited is not d:
        slope = torch.where(limited != d, 0.0, slope)
    return value, d if row.kl_gradient == "k2" else slope


def exact_kl(batch: Batch, mask: Tensor) -> tuple[Tensor, Tensor]:
    """KL(policy || reference) at each counted prefix, and its slope d KL / d z_a = p_a (log p_a - log q_a - KL).

    -> (N, T), (N, T, V), 0 in unused slots. logits of unused slots are never read.
    """
    logits, reference = batch.logits[mask], batch.ref_logits[mask]
    kl = rl_lab.categorical_kl(logits, reference)
    logp = logits.log_softmax(dim=-1)
    p = logp.exp()
    gap = (logp - reference.log_softmax(dim=-1)).masked_fill(p == 0, 0.0)
    slope = p * (gap - kl.unsqueeze(-1))
    everywhere = torch.zeros_like(batch.logits)
    everywhere[mask] = slope
    return torch.zeros_like(batch.logps).masked_scatter(mask, kl), everywhere
