"""One PPO update: from a rollout to a batch, from a mini-batch to a loss, from a gradient to a step.

Same as the paper (arXiv 1707.06347): clipped surrogate, GAE, several epochs of mini-batches, entropy bonus as an option.
Beside stable-baselines3 2.9.2 with equal settings: loss, gradient and parameters after an update agree (tested). What
differs: the KL that stops is exact, over the whole distribution, and is compared with the limit itself (there the k3 estimate
from the samples, with 1.5 times the limit); mini-batches are of about equal size (there the last one holds the remainder).
"""

from __future__ import annotations

import math
import statistics
from typing import Iterator, NamedTuple

import torch
from torch import Tensor

from extensions.gymnasium_ppo.boundaries import Steps, advantages_of, kept_rows
from extensions.gymnasium_ppo.environments import Rollout
from extensions.gymnasium_ppo.policy import Policy
from extensions.gymnasium_ppo.settings import EnvironmentSettings, Run
from rl_lab import Adam, clip_fraction, clipped_policy_loss, clipped_value_loss

STD_EPSILON = 1e-8
"""Added to the standard deviation that advantages are divided by, as stable-baselines3 and CleanRL do."""


class Batch(NamedTuple):
    """M transitions with everything that stays fixed while they are reused."""

    observations: Tensor  # [M, D] as the networks see them
    actions: Tensor  # [M] integer, or [M, A] raw
    old_parameters: Tensor  # [M, X] of the distribution that acted
    old_logps: Tensor  # [M]
    old_values: Tensor  # [M]
    advantages: Tensor  # [M]
    returns: Tensor  # [M]

    def take(self, rows: Tensor | slice) -> Batch:
        return Batch(*(column[rows] for column in self))


@torch.no_grad()
def batch_of(policy: Policy, rollout: Rollout, run: Run) -> Batch:
    """A rollout (observations and rewards already normalised) with old log-probabilities, values, advantages and returns.

    All are computed here at once with the weights that acted. Gradient: none.
    """
    observations, actions, rewards, following, terminated, truncated, valid = map(torch.from_numpy, rollout[:7])
    steps = Steps(
        *(column.T for column in (rewards, policy.values(observations), policy.values(following))),
        *(column.T for column in (terminated, truncated, valid)),
    )
    advantages, returns = advantages_of(steps, run.settings.gamma, run.settings.gae_lambda, run.boundary_mistake)
    if run.advantage_normalisation == "rollout":
        advantages = standardised(advantages, kept_rows(steps.valid, run.boundary_mistake))
    parameters = policy.parameters_at(observations)
    logps = policy.distribution.logps(parameters, actions)
    kept = kept_rows(valid, run.boundary_mistake)
    columns = (observations, actions, parameters, logps, steps.values.T, advantages.T, returns.T)
    return Batch(*(column[kept] for column in columns))


def standardised(advantages: Tensor, used: Tensor | None = None) -> Tensor:
    """(A - mean) / (std + 1e-8), std with n - 1, over the rows `used`; a single row stays as it is. Gradient: none."""
    chosen = advantages if used is None else advantages[used]
    if chosen.numel() < 2:
        return advantages
    return (advantages - chosen.mean()) / (chosen.std() + STD_EPSILON)


class Loss(NamedTuple):
    """Scalars of one mini-batch; `total` is minimised, the others are its parts and what to watch."""

    total: Tensor
    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    logps: Tensor  # [M]
    parameters: Tensor  # [M, X]


def ppo_loss(policy: Policy, batch: Batch, settings: EnvironmentSettings, normalise: bool) -> Loss:
    """mean clipped policy loss + value_weight * mean (V - R)^2 - entropy_weight * mean entropy, over the mini-batch.

    `normalise`: standardise the advantages of this mini-batch. Gradient: to policy.leaves.
    """
    parameters, values = policy.parameters_at(batch.observations), policy.values(batch.observations)
    logps = policy.distribution.logps(parameters, batch.actions)
    advantages = standardised(batch.advantages) if normalise else batch.advantages
    policy_loss = clipped_policy_loss(logps, batch.old_logps, advantages, settings.clip_epsilon).mean()
    if settings.value_clip:
        value_loss = clipped_value_loss(values, batch.old_values, batch.returns, settings.value_clip).mean()
    else:
        value_loss = (values - batch.returns).square().mean()
    entropy = policy.distribution.entropy(parameters).mean()
    total = policy_loss + settings.value_weight * value_loss
    if settings.entropy_weight:
        total = total - settings.entropy_weight * entropy
    return Loss(total, policy_loss, value_loss, entropy, logps, parameters)


def gradient_of(loss: Tensor, policy: Policy) -> Tensor:
    """d loss / d policy.flat, as one vector; zeros where the loss does not reach."""
    gradients = torch.autograd.grad(loss, policy.leaves, allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


def descend_flat(loss: Tensor, policy: Policy, optimizer: Adam, max_gradient_norm: float, where: str) -> float:
    """Backward, clip to the norm, Adam on the flat vector -> the norm before clipping.

    Raises FloatingPointError, naming `where`, when loss or norm is not finite; the parameters are then as before.
    """
    gradient = gradient_of(loss, policy)
    norm = torch.linalg.vector_norm(gradient).item()
    if not math.isfinite(norm):
        raise FloatingPointError(
            f"{where}: gradient_norm is {norm}, loss {loss.item()}; try --normalise-rewards 1 or a smaller --learning-rate"
        )
    if norm > max_gradient_norm:
        gradient *= max_gradient_norm / norm
    optimizer.step([gradient])
    return norm


def minibatches(batch: Batch, size: int, generator: torch.Generator) -> Iterator[Batch]:
    """One epoch: all rows once, in random order, in round(M / size) parts of about equal size."""
    count = len(batch.old_logps)
    shuffled = batch.take(torch.randperm(count, generator=generator))
    parts = max(1, round(count / size))
    edges = [count * part // parts for part in range(parts + 1)]
    for first, last in zip(edges, edges[1:]):
        yield shuffled.take(slice(first, last))


def update_on_batch(
    policy: Policy, optimizer: Adam, batch: Batch, run: Run, generator: torch.Generator, where: str
) -> dict[str, float]:
    """All epochs on one batch -> what to write down about them.

    policy_loss, value_loss, gradient_norm, clip_fraction: means over the mini-batches of the last epoch that ran, each at the
    parameters before its step. kl_old_current and entropy: exact, mean over the batch's states, after the last step.
    """
    settings, stopped, steps = run.settings, False, 0
    report: list[tuple[float, ...]] = []
    for epoch in range(settings.epochs):
        so_far = []
        for part in minibatches(batch, settings.batch_size, generator):
            loss = ppo_loss(policy, part, settings, run.advantage_normalisation == "mini-batch")
            if settings.kl_stop and steps:
                with torch.no_grad():
                    kl = policy.distribution.kl(part.old_parameters, loss.parameters).mean().item()
                if kl > settings.kl_stop:
                    stopped = True
                    break
            norm = descend_flat(loss.total, policy, optimizer, settings.max_gradient_norm, where)
            steps += 1
            if epoch == settings.epochs - 1 or settings.kl_stop:
                clipped = clip_fraction(loss.logps, part.old_logps, settings.clip_epsilon).item()
                so_far.append((loss.policy_loss.item(), loss.value_loss.item(), norm, clipped))
        report = so_far or report
        if stopped:
            break
    names = ("policy_loss", "value_loss", "gradient_norm", "clip_fraction")
    with torch.no_grad():
        parameters = policy.parameters_at(batch.observations)
        kl = policy.distribution.kl(batch.old_parameters, parameters).mean().item()
        entropy = policy.distribution.entropy(parameters).mean().item()
    return {
        **{name: statistics.fmean(column) for name, column in zip(names, zip(*report))},
        "kl_old_current": kl,
        "entropy": entropy,
        "optimizer_steps": steps,
        "stopped_early": int(stopped),
    }
