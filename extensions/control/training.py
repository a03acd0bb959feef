"""PPO in a closed loop with the stack: the policy chooses a, the stack executes u, and the reward is that of the whole loop.

Task: move the hand to a goal within 20 steps. Observation: goal - hand (2), q (3). The action a [2] is the wanted displacement of
the hand for the next period. Reward: the distance to the goal that the hand really gained, in units of .1 m, minus a price for |u - a|.

The buffer keeps a and log pi_old(a) apart from u: `--contract` says which of them the ratio is made of (contract.py). Nothing here
is a constraint of the policy: that nothing leaves the limits is the stack's doing, whatever the objective.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Callable, NamedTuple

import numpy as np
import torch
from torch import Tensor

from extensions.control.qp import Problem, Solution
from extensions.control.stack import Stack
from rl_lab import Adam, OnStep, Range, Settings, clipped_policy_loss, gae, importance_ratio, setting

OBSERVATION, ACTION, EPISODE = 5, 2, 20
REACH = 0.1  # m: what a period can cover, the unit of the policy's action
CLOSE = 0.05  # m: an episode counts as complete when the hand ends this near its goal


@dataclasses.dataclass(frozen=True)
class ControlSettings(Settings):
    """Every number of the training."""

    seed: int = setting(0, Range(int, 0, 2**31 - 1), "seed of goals, policy and noise", "run")
    updates: int = setting(40, Range(int, 1, 10_000), "iterations, each with fresh episodes", "run")
    episodes: int = setting(16, Range(int, 1, 1000), "episodes per iteration", "run")
    learning_rate: float = setting(0.02, Range(float, 0, 1, above=True), "Adam learning rate", "PPO")
    passes: int = setting(6, Range(int, 1, 100), "full-batch updates on the same episodes", "PPO")
    clip_epsilon: float = setting(0.2, Range(float, 0, 1, above=True), "half width of the ratio band", "PPO")
    correction_price: float = setting(0.05, Range(float, 0, 100), "reward taken for |u - a|, per reach", "task")


class Policy:
    """A Gaussian over a / REACH with a small network for its mean, and a critic; float64, made from one seed."""

    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(seed)

        def layer(inputs: int, outputs: int, gain: float) -> list[Tensor]:
            weight = torch.randn(inputs, outputs, dtype=torch.float64, generator=generator) * gain / math.sqrt(inputs)
            return [weight.requires_grad_(), torch.zeros(outputs, dtype=torch.float64, requires_grad=True)]

        self.actor = [*layer(OBSERVATION, 32, 1.0), *layer(32, ACTION, 0.01)]
        self.critic = [*layer(OBSERVATION, 32, 1.0), *layer(32, 1, 0.1)]
        self.log_spread = torch.full((ACTION,), math.log(0.6), dtype=torch.float64, requires_grad=True)

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.actor, *self.critic, self.log_spread]

    def mean(self, observations: Tensor) -> Tensor:
        w1, b1, w2, b2 = self.actor
        return (observations @ w1 + b1).tanh() @ w2 + b2

    def value(self, observations: Tensor) -> Tensor:
        w1, b1, w2, b2 = self.critic
        return ((observations @ w1 + b1).tanh() @ w2 + b2).squeeze(-1)

    def logp(self, observations: Tensor, points: Tensor) -> Tensor:
        """log density of points [..., 2] (in reaches), summed over the two coordinates."""
        z = (points - self.mean(observations)) / self.log_spread.exp()
        return (-0.5 * z.square() - self.log_spread - 0.5 * math.log(2 * math.pi)).sum(-1)

    def logp_of_clipped(self, observations: Tensor, points: Tensor) -> Tensor:
        """log of the distribution of clip(a, -1, 1): densities inside, point masses at the limits, per coordinate."""
        mean, spread = self.mean(observations), self.log_spread.exp()
        density = -0.5 * ((points - mean) / spread).square() - self.log_spread - 0.5 * math.log(2 * math.pi)
        above, under = (torch.special.log_ndtr(sign * (mean - limit) / spread) for sign, limit in ((1, 1.0), (-1, -1.0)))
        return torch.where(points >= 1, above, torch.where(points <= -1, under, density)).sum(-1)


class Buffer(NamedTuple):
    """One iteration, [episodes, EPISODE, ...]. a and u are in reaches; log-probabilities are those of the old policy."""

    observations: Tensor
    a: Tensor
    u: Tensor
    old_logp: Tensor  # log pi_old(a)
    rewards: Tensor
    values: Tensor
    last_values: Tensor  # of the observation after the last step
    correction: Tensor  # |u - a|
    margin: Tensor
    failures: Tensor  # planner failures
    stale: Tensor  # references that were refused
    age: Tensor
    latency: Tensor
    completed: Tensor  # [episodes]


def observe(stack: Stack, goal: np.ndarray) -> np.ndarray:
    return np.concatenate([(goal - stack.arm.hand(stack.q)) / REACH / 3, stack.q])


def collect(stack: Stack, policy: Policy, settings: ControlSettings, generator: np.random.Generator) -> Buffer:
    """Episodes of the current policy through the stack. a is clipped to one reach by the first line of the stack's own limits."""
    rows: dict[str, list] = {name: [] for name in Buffer._fields}
    for _ in range(settings.episodes):
        stack.reset(generator.uniform([0.0, 0.4, 0.4], [0.8, 1.2, 1.0]))
        goal = stack.arm.hand(stack.q) + generator.uniform(-0.35, 0.35, 2)
        episode: dict[str, list] = {name: [] for name in rows}
        for _ in range(EPISODE):
            seen = observe(stack, goal)
            observation = torch.from_numpy(seen)
            with torch.no_grad():
                noise = torch.from_numpy(generator.standard_normal(ACTION))
                a = policy.mean(observation) + policy.log_spread.exp() * noise
                old_logp, value = policy.logp(observation, a).item(), policy.value(observation).item()
            before = np.linalg.norm(goal - stack.arm.hand(stack.q))
            # The contract's clip, C's first part: no reference farther than one reach.
            done = stack.step(REACH * np.clip(a.numpy(), -1, 1))
            u = done.u / REACH
            gained = (before - np.linalg.norm(goal - stack.arm.hand(stack.q))) / REACH
            correction = float(np.linalg.norm(u - a.numpy()))
            bad_plans = sum(event not in ("expired reference", "missing reference") for event in done.events)
            values = (
                seen, a.numpy(), u, old_logp, gained - settings.correction_price * correction, value, 0.0, correction, done.margin,
                bad_plans, len(done.events) - bad_plans, done.age, done.latency, 0.0,
            )  # fmt: skip
            for name, item in zip(rows, values):
                episode[name].append(item)
        with torch.no_grad():
            last = policy.value(torch.from_numpy(observe(stack, goal))).item()
        close = float(np.linalg.norm(goal - stack.arm.hand(stack.q)) < CLOSE)
        for name, items in episode.items():
            rows[name].append({"last_values": last, "completed": close}.get(name, items))
    return Buffer(*(torch.from_numpy(np.asarray(items, dtype=float)) for items in rows.values()))


def contract_logps(contract: str, policy: Policy, buffer: Buffer) -> tuple[Tensor, Callable[[], Tensor]]:
    """(stored log-probability, function that gives the current one) of a contract, each [episodes, EPISODE].

    sampled: log p(a), log p(a). executed: log p(u), log p(u). mixed: stored log p(a), then log p(u). capg: both of clip(a).
    """
    clipped = buffer.a.clamp(-1, 1)
    current = {
        "sampled": lambda: policy.logp(buffer.observations, buffer.a),
        "executed": lambda: policy.logp(buffer.observations, buffer.u),
        "mixed": lambda: policy.logp(buffer.observations, buffer.u),
        "capg": lambda: policy.logp_of_clipped(buffer.observations, clipped),
    }[contract]
    with torch.no_grad():
        stored = buffer.old_logp if contract in ("sampled", "mixed") else current()
    return stored, current


def update(contract: str, policy: Policy, optimizer: Adam, buffer: Buffer, settings: ControlSettings) -> dict[str, float]:
    """PPO's passes on one buffer -> what the first pass and the last one showed."""
    boundary = torch.zeros_like(buffer.rewards, dtype=torch.bool)
    boundary[:, -1] = True  # a time limit, no real end: the bootstrap goes on
    next_values = torch.cat([buffer.values[:, 1:], buffer.last_values[:, None]], dim=1)
    advantages, targets = gae(
        buffer.rewards, buffer.values, next_values, torch.zeros_like(boundary), boundary, gamma=0.95, lam=0.9
    )
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    stored, current = contract_logps(contract, policy, buffer)
    with torch.no_grad():
        first = importance_ratio(current(), stored)
    for _ in range(settings.passes):
        loss = clipped_policy_loss(current(), stored, advantages, settings.clip_epsilon).mean()
        loss = loss + 0.5 * (policy.value(buffer.observations) - targets).square().mean()
        gradients = torch.autograd.grad(loss, policy.parameters)
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]))
        optimizer.step([g * min(1.0, 0.5 / max(norm.item(), 1e-12)) for g in gradients])
    above = (first > 1 + settings.clip_epsilon).double().mean().item()
    return {"first_ratio_mean": first.mean().item(), "first_ratio_above_band": above, "loss": loss.item()}


COLUMNS = (
    "step", "completed", "mean_reward", "correction", "margin", "planner_failures", "stale_references", "reference_age",
    "policy_spread", "first_ratio_mean", "first_ratio_above_band", "loss", "sampled_actions",
)  # fmt: skip


class TrainingRun(NamedTuple):
    contract: str
    settings: ControlSettings
    history: list[dict[str, float]]
    latency: float  # seconds a plan took on average: wall clock, so it is no column
    example: Buffer  # the last buffer

    def __repr__(self) -> str:
        return f"<{self.contract}: {self.history[-1]['completed']:.0%} of the goals reached>"


def train(
    contract: str = "sampled",
    *,
    solver: Callable[[Problem], Solution] | None = None,
    on_step: OnStep | None = None,
    **settings,
) -> TrainingRun:
    """Train one policy. A row is measured on the iteration's own episodes, before its update."""
    settings = ControlSettings(**settings)
    policy, stack = Policy(settings.seed), Stack(solver=solver)
    optimizer = Adam(policy.parameters, settings.learning_rate)
    generator = np.random.default_rng(settings.seed)
    history, latency = [], 0.0
    for step in range(1, settings.updates + 1):
        buffer = collect(stack, policy, settings, generator)
        measured = update(contract, policy, optimizer, buffer, settings)
        latency += buffer.latency.mean().item() / settings.updates
        row = dict(
            step=step, completed=buffer.completed.mean().item(), mean_reward=buffer.rewards.mean().item(),
            correction=buffer.correction.mean().item(), margin=buffer.margin.min().item(),
            planner_failures=int(buffer.failures.sum()), stale_references=int(buffer.stale.sum()),
            reference_age=buffer.age.mean().item(), policy_spread=policy.log_spread.detach().exp().mean().item(),
            sampled_actions=step * buffer.rewards.numel(), **measured,
        )  # fmt: skip
        history.append({name: row[name] for name in COLUMNS})
        if on_step:
            on_step(history[-1])
    return TrainingRun(contract, settings, history, latency, buffer)
