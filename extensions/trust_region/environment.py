"""TRPO in Gymnasium environments, with a network as policy: the trainer of extensions.gymnasium_ppo with another update.

Rollouts, time limits, GAE, networks, running statistics and evaluation are those of PPO there, so that two runs differ in one
thing only: how a batch becomes a new policy. A new preset is one entry of PRESETS.

Same as the paper (arXiv 1502.05477): the surrogate mean(rho A), the limit on the mean KL(old || new), conjugate gradients on
Fisher-vector products, the line search. Different: advantages by GAE and standardised over the rollout, a critic by Adam, the
Fisher matrix on all states of the batch. Importing this file does not import Gymnasium.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

import torch
from torch import Tensor

from extensions.gymnasium_ppo import Batch, Policy, RolloutSettings, Run, Trainer, make_run, minibatches
from extensions.trust_region.step import Step, kl_old_current, trust_region_step
from extensions.trust_region.training import StepSettings
from rl_lab import Adam, Range, importance_ratio, setting

COLUMNS = (
    "step", "environment_steps", "episodes", "episode_return", "episode_length", "value_loss", "explained_variance", "entropy",
    "kl_old_current", "full_kl", "surrogate_gain", "accepted", "moved", "shrinks", "step_length", "cg_residual",
    "garbage_fraction", "optimizer_steps",
)  # fmt: skip
"""Of trpo.csv, one row per update; the names that ppo.csv has, too, mean the same.

full_kl, accepted: KL(old || new) of the full step, and whether it was taken as it was; shrinks: how often the line search made it
smaller; moved: 0 where no try was accepted; kl_old_current, surrogate_gain: of the step taken; step_length: sqrt(2 delta / x'Fx);
cg_residual: |(F + damping I) x - g| / |g|; optimizer_steps: of the critic, cumulative."""


@dataclasses.dataclass(frozen=True)
class EnvironmentSettings(RolloutSettings, StepSettings):
    """Every number of a TRPO run in an environment."""

    critic_epochs: int = setting(10, Range(int, 0, 1000), "passes of the critic over each rollout", "critic")
    batch_size: int = setting(128, Range(int, 1, 10**7), "rows per mini-batch of the critic", "critic")
    learning_rate: float = setting(1e-3, Range(float, 0, 100, above=True), "Adam learning rate of the critic", "critic")


PRESETS: dict[str, dict[str, float | str]] = {
    "Acrobot-v1": dict(normalise_observations=1, normalise_rewards=1),
    "Pendulum-v1": dict(gamma=0.9, environments=2, rollout_rows=512, normalise_rewards=1),
}
"""Settings that differ from the defaults, per environment; a flag on the command line wins over its preset."""

FIXED = {"advantage_normalisation": "rollout", "schedule": "constant"}
"""Choices of a run that are no choice here: the step sees the whole rollout at once, and the critic's learning rate stays."""


def run_of(env: str, **given: float) -> Run:
    """The TRPO run of an environment: given settings, then its preset, then the defaults.

    Raises ValueError, naming the setting, for a value outside its range, and TypeError for one that does not exist.
    """
    return make_run(env, EnvironmentSettings, {**FIXED, **PRESETS.get(env, {}), **given})


def mean_kl(policy: Policy, batch: Batch) -> Tensor:
    """Mean over the batch's states of KL(old || current), exact over the actions. Scalar, gradient to policy.actor_leaves."""
    # The categorical `distribution.kl` is the lab's atom, whose gradient goes to the first argument; here the second learns.
    kl = policy.distribution.kl if policy.distribution.continuous else kl_old_current
    return kl(batch.old_parameters, policy.parameters_at(batch.observations)).mean()


def surrogate(policy: Policy, batch: Batch) -> Tensor:
    """mean(rho A), rho = p(a) / p_old(a): what the step raises. Scalar, gradient to policy.actor_leaves."""
    logps = policy.distribution.logps(policy.parameters_at(batch.observations), batch.actions)
    return (importance_ratio(logps, batch.old_logps) * batch.advantages).mean()


def step_on_batch(policy: Policy, batch: Batch, settings: StepSettings) -> Step:
    """One trust-region step of the actor, in place: mean KL(old || new) on the batch is at most delta afterwards."""
    return trust_region_step(
        lambda: surrogate(policy, batch), lambda: mean_kl(policy, batch), policy.actor_leaves,
        settings.delta, settings.damping, settings.cg_steps, settings.shrink, settings.tries,
    )  # fmt: skip


class TrustRegionTrainer(Trainer):
    """A TRPO run in progress: `advance` makes one rollout, one trust-region step of the actor, then several of the critic."""

    algorithm = "trpo"
    columns = COLUMNS

    def make_optimizer(self) -> Adam:
        """Adam for the critic, whose parameters are the last part of `flat`. The actor has none."""
        actor = sum(leaf.numel() for leaf in self.policy.actor_leaves)
        return Adam([self.policy.flat[actor:]], self.run.settings.learning_rate)

    def update(self, batch: Batch, where: str) -> dict[str, float]:
        """Step, then critic: the advantages are those of the critic before. Raises FloatingPointError naming `where`."""
        step = step_on_batch(self.policy, batch, self.run.settings)
        value_losses = [
            self.train_critic(part, where)
            for _ in range(self.run.settings.critic_epochs)
            for part in minibatches(batch, self.run.settings.batch_size, self.generator)
        ]
        with torch.no_grad():
            entropy = self.policy.distribution.entropy(self.policy.parameters_at(batch.observations)).mean().item()
        return {
            "value_loss": statistics.fmean(value_losses) if value_losses else math.nan,
            "entropy": entropy,
            "kl_old_current": step.kl_old_current,
            "full_kl": step.full_kl,
            "surrogate_gain": step.gain if step.moved else 0.0,
            "accepted": int(step.accepted),
            "moved": int(step.moved),
            "shrinks": step.shrinks,
            "step_length": step.length,
            "cg_residual": step.residual,
            "optimizer_steps": len(value_losses),
        }

    def train_critic(self, part: Batch, where: str) -> float:
        """One Adam step on mean (V - R)^2 -> the loss before it."""
        loss = (self.policy.values(part.observations) - part.returns).square().mean()
        if not math.isfinite(loss.item()):
            raise FloatingPointError(
                f"{where}: the critic's loss is {loss.item()}; try --normalise-rewards 1 or a smaller --learning-rate"
            )
        gradients = torch.autograd.grad(loss, self.policy.critic_leaves)
        self.optimizer.step([torch.cat([gradient.flatten() for gradient in gradients])])
        return loss.item()
