"""TRPO, PPO with an adaptive KL penalty, and PPO-Clip on the bandit and on the chain, with one budget of samples.

The three share samples per iteration, advantages, critic and evaluation; they differ in how a batch becomes a new policy only:

    trpo      one trust-region step: KL(old || new) <= delta after every accepted step, by construction
    ppo-kl    `updates` Adam steps on -mean(rho A) + beta KL(old || current); then beta doubles where the KL ended above
              1.5 delta and halves where it ended below delta / 1.5 (arXiv 1707.06347, section 4)
    ppo-clip  `updates` Adam steps on the clipped loss; nothing in it knows delta

To add a method, add an entry to METHODS; to add a small environment, an entry to TASKS.
"""

from __future__ import annotations

import dataclasses
from typing import Callable, NamedTuple

import torch
from torch import Tensor

import ppo_chain
from extensions.trust_region.step import kl_old_current, trust_region_step
from rl_lab import (
    REWARDS,
    Adam,
    OnStep,
    Range,
    Settings,
    action_logps,
    clipped_policy_loss,
    gae,
    importance_ratio,
    setting,
)


@dataclasses.dataclass(frozen=True)
class StepSettings(Settings):
    """The numbers of the step itself."""

    # A KL of 1e-9 still has seven digits in float64; of a smaller one rounding is soon all that is left.
    delta: float = setting(0.01, Range(float, 1e-9, 10), "largest mean KL(old || new) of an update", "trust region")
    damping: float = setting(0.1, Range(float, 0, 1000), "added to the Fisher matrix while solving", "trust region")
    cg_steps: int = setting(10, Range(int, 1, 1000), "most steps of the conjugate gradients", "trust region")
    shrink: float = setting(0.8, Range(float, 0.01, 0.99), "factor of the line search", "trust region")
    tries: int = setting(10, Range(int, 0, 1000), "how often the line search shrinks before it gives up", "trust region")


@dataclasses.dataclass(frozen=True)
class TrustRegionSettings(StepSettings):
    """Every number of the trainings on the bandit and the chain."""

    seed: int = setting(7, Range(int, 0, 2**63 - 1), "seed of the local random generator", "run")
    steps: int = setting(120, Range(int, 1, 100_000), "iterations, each with fresh samples", "run")
    samples: int = setting(128, Range(int, 2, 1_000_000), "actions sampled per iteration", "run")
    beta: float = setting(1.0, Range(float, 0, 1e6, above=True), "first weight of the KL penalty", "PPO-KL")
    updates: int = setting(4, Range(int, 1, 1000), "Adam steps on a batch (PPO-KL, PPO-Clip, critics)", "PPO")
    learning_rate: float = setting(0.08, Range(float, 0, 100, above=True), "Adam learning rate", "PPO")
    clip_epsilon: float = setting(0.2, Range(float, 0, 1, above=True), "half width of the ratio band", "PPO")


class Batch(NamedTuple):
    """Samples of the old policy, flat [N]; all detached."""

    states: Tensor
    actions: Tensor
    old_logp: Tensor
    advantages: Tensor
    value_targets: Tensor
    old_logits: Tensor  # [N, A]


class Task(NamedTuple):
    """A small environment with an exact evaluation."""

    shape: tuple[int, int]  # states, actions
    sample: Callable[[Tensor, Tensor, TrustRegionSettings, torch.Generator], Batch]
    expected: Callable[[Tensor], Tensor]  # of a policy's logits
    column: str


def sample_bandit(policy: Tensor, critic: Tensor, settings: TrustRegionSettings, generator: torch.Generator) -> Batch:
    """Contexts drawn uniformly, one action each; A = R - V(x). No KL in the reward: delta is the only limit here."""
    contexts = torch.randint(len(REWARDS), (settings.samples,), generator=generator)
    logits = policy[contexts]
    actions = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    rewards = REWARDS[contexts, actions]
    return Batch(contexts, actions, action_logps(logits, actions), rewards - critic[contexts], rewards, logits)


def sample_chain(policy: Tensor, critic: Tensor, settings: TrustRegionSettings, generator: torch.Generator) -> Batch:
    """Complete two-step episodes; advantages from `gae` at lambda .95, gamma 1."""
    steps = ppo_chain.sample_episodes(policy, critic, settings.samples // 2, generator)
    advantages, targets = gae(
        steps.rewards, steps.old_values, steps.next_values, steps.terminated, steps.boundary, gamma=1.0, lam=0.95
    )
    return Batch(steps.states, steps.actions, steps.old_logp, advantages, targets, policy[steps.states])


TASKS = {
    "bandit": Task(
        tuple(REWARDS.shape), sample_bandit, lambda logits: (logits.softmax(-1) * REWARDS).sum(-1).mean(), "expected_reward"
    ),
    "chain": Task((3, 2), sample_chain, ppo_chain.expected_return, "expected_return"),
}


class Update(NamedTuple):
    """What a method did with one batch."""

    accepted: int = 1  # 1: the first proposal was taken as it was
    shrinks: int = 0
    beta: float = 0.0  # weight of the KL penalty during the update


class Learner:
    """The state of one training: policy, critic, their optimizers, and the penalty's weight."""

    def __init__(self, task: Task, settings: TrustRegionSettings):
        states, actions = task.shape
        self.policy = torch.zeros(states, actions, dtype=torch.float64, requires_grad=True)
        self.critic = torch.zeros(states, dtype=torch.float64, requires_grad=True)
        self.optimizer = Adam([self.policy], settings.learning_rate)
        self.critic_optimizer = Adam([self.critic], settings.learning_rate)
        self.beta = settings.beta
        self.settings = settings

    def surrogate(self, batch: Batch) -> Tensor:
        """mean(rho A): the surrogate without any limit, to be maximised."""
        logp = action_logps(self.policy[batch.states], batch.actions)
        return (importance_ratio(logp, batch.old_logp) * batch.advantages).mean()

    def mean_kl(self, batch: Batch) -> Tensor:
        """KL(old || current), exact over the actions, mean over the states of the batch. Gradient to the current policy."""
        return kl_old_current(batch.old_logits, self.policy[batch.states]).mean()

    def train_critic(self, batch: Batch) -> None:
        for _ in range(self.settings.updates):
            loss = (self.critic[batch.states] - batch.value_targets).square().mean()
            self.critic_optimizer.step(torch.autograd.grad(loss, [self.critic]))

    def minimise(self, loss: Callable[[], Tensor]) -> None:
        for _ in range(self.settings.updates):
            self.optimizer.step(torch.autograd.grad(loss(), [self.policy]))


def trpo(learner: Learner, batch: Batch) -> Update:
    """One trust-region step."""
    s = learner.settings
    step = trust_region_step(
        lambda: learner.surrogate(batch), lambda: learner.mean_kl(batch), [learner.policy],
        s.delta, s.damping, s.cg_steps, s.shrink, s.tries,
    )  # fmt: skip
    return Update(int(step.accepted), step.shrinks)


def ppo_kl(learner: Learner, batch: Batch) -> Update:
    """Adam on -surrogate + beta * KL(old || current); beta then follows where the KL ended."""
    used = learner.beta
    learner.minimise(lambda: -learner.surrogate(batch) + used * learner.mean_kl(batch))
    ended = learner.mean_kl(batch).item()
    if ended > 1.5 * learner.settings.delta:
        learner.beta *= 2
    elif ended < learner.settings.delta / 1.5:
        learner.beta /= 2
    return Update(beta=used)


def ppo_clip(learner: Learner, batch: Batch) -> Update:
    """Adam on the clipped loss of rl_lab."""

    def loss() -> Tensor:
        logp = action_logps(learner.policy[batch.states], batch.actions)
        return clipped_policy_loss(logp, batch.old_logp, batch.advantages, learner.settings.clip_epsilon).mean()

    learner.minimise(loss)
    return Update()


METHODS: dict[str, Callable[[Learner, Batch], Update]] = {"trpo": trpo, "ppo-kl": ppo_kl, "ppo-clip": ppo_clip}


class TrainingRun(NamedTuple):
    method: str
    task: str
    settings: TrustRegionSettings
    history: list[dict[str, float]]
    policy: Tensor

    def __repr__(self) -> str:
        column = TASKS[self.task].column
        last = self.history[-1]
        return f"<{self.method} on the {self.task}, {last['step']} steps: {column} {last[column]:.4f}>"


def columns_of(task: str) -> tuple[str, ...]:
    own = TASKS[task].column
    return ("step", own, "entropy", "kl_old_current", "surrogate_gain", "accepted", "shrinks", "beta", "sampled_actions")


def train(method: str, task: str = "bandit", *, on_step: OnStep | None = None, **settings: float) -> TrainingRun:
    """Train one policy with one method; same arguments, same numbers. Row 0 is the state before training.

    `kl_old_current` is the mean KL(old || new) on the states of the batch after the update: the number that delta limits.
    Raises ValueError for an unknown method or task, or a setting out of range.
    """
    for name, value, table in (("method", method, METHODS), ("task", task, TASKS)):
        if value not in table:
            raise ValueError(f"{name}: got {value!r}, wanted one of {', '.join(table)}")
    settings = TrustRegionSettings(**settings)
    generator = torch.Generator().manual_seed(settings.seed)
    learner = Learner(TASKS[task], settings)
    history: list[dict[str, float]] = []

    def record(step: int, drift: float, surrogate_gain: float, update: Update) -> None:
        with torch.no_grad():
            probability = learner.policy.softmax(-1)
            values = (
                step, TASKS[task].expected(learner.policy).item(), torch.special.entr(probability).sum(-1).mean().item(), drift,
                surrogate_gain, *update, step * settings.samples // 2 * 2,
            )  # fmt: skip
        history.append(dict(zip(columns_of(task), values, strict=True)))
        if on_step:
            on_step(history[-1])

    record(0, 0.0, 0.0, Update(0))
    for step in range(1, settings.steps + 1):
        with torch.no_grad():
            batch = TASKS[task].sample(learner.policy, learner.critic, settings, generator)
            before = learner.surrogate(batch).item()
        update = METHODS[method](learner, batch)
        learner.train_critic(batch)
        with torch.no_grad():
            record(step, learner.mean_kl(batch).item(), learner.surrogate(batch).item() - before, update)
    return TrainingRun(method, task, settings, history, learner.policy.detach())
