"""Step 5 of an objective: the KL to a fixed policy, estimate and slope. A new estimator is an entry in KLS."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import rl_lab
from extensions.objectives.batch import Batch
from extensions.objectives.table import KL_COEF, Choice

if TYPE_CHECKING:
    from extensions.objectives.choices import Row


def k1(d: Tensor) -> tuple[Tensor, Tensor]:
    """d, slope 1."""
    return d, torch.ones_like(d)


def k2(d: Tensor) -> tuple[Tensor, Tensor]:
    """d^2 / 2, slope d."""
    return d.square() / 2, d


def k3(d: Tensor) -> tuple[Tensor, Tensor]:
    """exp(-d) + d - 1, slope 1 - exp(-d) = d - (exp(-d) + d - 1)."""
    value = rl_lab.kl_estimates(d, torch.zeros((), dtype=d.dtype).expand_as(d))[2]
    return value, d - value


def absolute(d: Tensor) -> tuple[Tensor, Tensor]:
    """|d|, slope sign(d)."""
    return d.abs(), d.sign()


KLS: dict[str, Choice] = {
    "none": Choice("no KL term"),
    "k1": Choice("d", k1, (KL_COEF,)),
    "k2": Choice("d^2 / 2", k2, (KL_COEF,)),
    "k3": Choice("exp(-d) + d - 1", k3, (KL_COEF,)),
    "abs": Choice("|d|", absolute, (KL_COEF,)),
    "exact": Choice("sum_a p_a (log p_a - log q_a) from logits", None, (KL_COEF,)),
}

# The slope that a gradient form gives, from the estimator's value, its own slope and d.
KL_GRADIENTS: dict[str, Choice] = {
    "own": Choice("gradient of the estimator", lambda value, slope, d: slope),
    "k2": Choice("value of the estimator, gradient of k2", lambda value, slope, d: d),
    "score": Choice("sg[KL_t] l_t: value of the estimator, gradient KL_t at l_t", lambda value, slope, d: value),
    "none": Choice("a constant: no gradient of its own", lambda value, slope, d: torch.zeros_like(value)),
}


def kl_estimate(row: Row, logps: Tensor, anchor_logps: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate of KL(policy || anchor) at each sampled token, and its slope d KL_t / d l_t. [...] -> [...], [...].

    d = l - lr. k1: d, slope 1. k2: d^2/2, slope d. k3: exp(-d) + d - 1, slope 1 - exp(-d). abs: |d|, slope sign(d).
    A limit cuts the value and its slope. kl_gradient "k2" keeps the value and takes slope d, which no limit cuts; "score"
    takes the value as slope (the score-function form); "none" takes no slope.
    """
    d = logps - anchor_logps
    limited = d if math.isinf(row.kl_log_limit) else d.clamp(-row.kl_log_limit, row.kl_log_limit)
    value, slope = KLS[row.kl](limited)
    if not math.isinf(row.kl_limit):
        slope = torch.where(value.abs() > row.kl_limit, 0.0, slope)
        value = value.clamp(-row.kl_limit, row.kl_limit)
    if limited is not d:
        slope = torch.where(limited != d, 0.0, slope)
    return value, KL_GRADIENTS[row.kl_gradient](value, slope, d)


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
