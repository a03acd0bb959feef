"""No training objective adds a constraint: PPO's, a preference loss and a group rule, each run through the same buffer.

One Gaussian action a ~ N(m, .3^2), u = clip(a, -1, 1), and a feedback that likes more a (a faster motion, say, by somebody who
does not see the limit). Every objective moves m past the limit; u never leaves it, because the stack clips.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rl_lab import Adam, clipped_policy_loss, dpo_loss, group_advantages

SPREAD = 0.3


class Outcome(NamedTuple):
    objective: str
    mean: float  # of a, after training
    a_outside: float  # share of sampled a beyond the limits
    u_outside: float  # share of executed u beyond the limits


def density(a: Tensor, mean: Tensor) -> Tensor:
    """log N(a; mean, SPREAD^2) without its constant."""
    return -0.5 * ((a - mean) / SPREAD).square()


def outcomes(updates: int = 100, samples: int = 64, seed: int = 0) -> list[Outcome]:
    """Train m from .5 with each objective on fresh buffers; all numbers from one local generator."""

    def surrogate(a: Tensor, advantages: Tensor, mean: Tensor) -> Tensor:
        return clipped_policy_loss(density(a, mean), density(a, mean).detach(), advantages).mean()

    def preferences(a: Tensor, mean: Tensor) -> Tensor:
        first, second = a.view(2, -1)
        chosen, rejected = torch.maximum(first, second), torch.minimum(first, second)
        start = torch.tensor(0.5, dtype=torch.float64)
        return dpo_loss(
            density(chosen, mean), density(rejected, mean), density(chosen, start), density(rejected, start), 0.1
        ).mean()

    losses = {
        "PPO, A = a - mean a": lambda a, mean: surrogate(a, a - a.mean(), mean),
        "GRPO, groups of 8": lambda a, mean: surrogate(a.view(-1, 8), group_advantages(a.view(-1, 8)), mean),
        "DPO, larger a preferred": preferences,
    }
    results = []
    for name, loss in losses.items():
        generator = torch.Generator().manual_seed(seed)
        mean = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        optimizer = Adam([mean], 0.02)
        for _ in range(updates):
            a = mean.detach() + SPREAD * torch.randn(samples, dtype=torch.float64, generator=generator)
            optimizer.step(torch.autograd.grad(loss(a, mean), [mean]))
        a = mean.detach() + SPREAD * torch.randn(100_000, dtype=torch.float64, generator=generator)
        u = a.clamp(-1, 1)
        results.append(
            Outcome(name, mean.item(), (a.abs() > 1).double().mean().item(), (u.abs() > 1).double().mean().item())
        )
    return results
