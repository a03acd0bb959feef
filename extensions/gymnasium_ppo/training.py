"""The training loop, the evaluation, and the state that a checkpoint holds."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Iterator

import numpy as np
import torch

from extensions.gymnasium_ppo.environments import Collector, make_environments
from extensions.gymnasium_ppo.normalise import ObservationNormaliser, RewardNormaliser
from extensions.gymnasium_ppo.policy import Policy
from extensions.gymnasium_ppo.settings import Run
from extensions.gymnasium_ppo.update import Batch, batch_of, update_on_batch
from rl_lab import Adam

COLUMNS = (
    "step", "environment_steps", "episodes", "episode_return", "episode_length", "policy_loss", "value_loss",
    "explained_variance", "entropy", "kl_old_current", "clip_fraction", "gradient_norm", "learning_rate", "garbage_fraction",
    "optimizer_steps", "stopped_early",
)  # fmt: skip
"""Of ppo.csv, one row per update. episode_return and episode_length: mean over the last RECENT episodes that ended; nan
before the first. Counts of episodes, steps and optimizer steps are cumulative. No wall-clock time: equal runs, equal bytes."""

WHOLE = {"step", "environment_steps", "episodes", "optimizer_steps", "stopped_early"}
"""Columns that hold whole numbers."""

RECENT = 100
TRAINING_SEEDS, EVALUATION_SEEDS, EVALUATION_NOISE = range(3)
LONGEST_EVALUATION = 20_000
"""Steps after which an evaluation gives up on episodes that do not end; it says how many."""


def seeds_for(seed: int, purpose: int, count: int) -> list[int]:
    """Seeds of `count` environments; those of different purposes have nothing in common."""
    return np.random.SeedSequence([seed, purpose]).generate_state(count).tolist()


class Trainer:
    """A run in progress. `advance` makes one rollout and the updates on it; `arrays` and `restore` are the checkpoint.

    Another method is a subclass with its own `algorithm`, `columns`, `make_optimizer` and `update`.
    """

    algorithm = "ppo"
    columns = COLUMNS

    def __init__(self, run: Run):
        """Raises ValueError, naming the environment, when it cannot be made or has spaces that are not supported."""
        self.run, settings = run, run.settings
        self.environments, spaces = make_environments(run.env, settings.environments, run.autoreset, settings.time_limit)
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.policy = Policy(
            spaces.observation_size, spaces.action_size, spaces.continuous, settings.hidden, self.generator
        )
        self.optimizer = self.make_optimizer()
        self.observations = ObservationNormaliser(spaces.observation_size, bool(settings.normalise_observations))
        self.rewards = RewardNormaliser(settings.environments, settings.gamma, bool(settings.normalise_rewards))
        seeds = seeds_for(settings.seed, TRAINING_SEEDS, settings.environments)
        self.collector = Collector(self.environments, spaces, run.autoreset, seeds)
        self.history: list[dict[str, float]] = []
        self.recent: list[tuple[float, float]] = []  # return and length of the last episodes
        self.episodes = 0

    def make_optimizer(self) -> Adam:
        return Adam([self.policy.flat], self.run.settings.learning_rate, eps=self.run.settings.adam_epsilon)

    def update(self, batch: Batch, where: str) -> dict[str, float]:
        """Learn from one batch -> what to write down, `optimizer_steps` among it. Raises FloatingPointError naming `where`."""
        return update_on_batch(self.policy, self.optimizer, batch, self.run, self.generator, where)

    def close(self) -> None:
        self.environments.close()

    @property
    def finished(self) -> bool:
        return len(self.history) >= self.run.updates

    def advance(self) -> dict[str, float]:
        """One rollout, the updates on it, one row of the history (returned).

        Raises FloatingPointError, naming the update, for a reward, value, loss or gradient that is not finite.
        """
        settings, done = self.run.settings, len(self.history)
        self.optimizer.lr = settings.learning_rate
        if self.run.schedule == "linear":
            self.optimizer.lr *= 1 - done / self.run.updates
        noise = self.policy.distribution.noise(settings.rollout_rows, settings.environments, self.generator)
        act = self.policy.act
        raw = self.collector.collect(settings.rollout_rows, lambda row, seen: act(self.observations(seen), noise[row]))
        rollout = raw._replace(
            observations=self.observations(raw.observations),
            next_observations=self.observations(raw.next_observations),
            rewards=self.rewards.scale(raw.rewards, raw.terminated | raw.truncated, raw.valid),
        )
        where = f"{self.run.env}, update {done + 1}"
        try:
            batch = batch_of(self.policy, rollout, self.run)
        except ValueError as problem:  # a reward or a value that is not finite
            raise FloatingPointError(f"{where}: {problem}") from problem
        report = self.update(batch, where)
        self.observations.update(raw.observations[raw.valid])

        self.episodes += len(raw.episode_returns)
        self.recent = (self.recent + list(zip(raw.episode_returns, raw.episode_lengths)))[-RECENT:]
        mean_return, mean_length = map(statistics.fmean, zip(*self.recent)) if self.recent else (math.nan, math.nan)
        before = self.history[-1] if self.history else {"environment_steps": 0, "optimizer_steps": 0}
        unexplained = (batch.returns - batch.old_values).var(correction=0)
        row = {
            **report,
            "step": done + 1,
            "environment_steps": before["environment_steps"] + raw.valid.size,
            "optimizer_steps": before["optimizer_steps"] + report["optimizer_steps"],
            "episodes": self.episodes,
            "episode_return": mean_return,
            "episode_length": mean_length,
            "explained_variance": (1 - unexplained / batch.returns.var(correction=0).clamp_min(1e-300)).item(),
            "learning_rate": self.optimizer.lr,
            "garbage_fraction": 1 - float(raw.valid.mean()),
        }
        self.history.append({name: row[name] for name in self.columns})
        return self.history[-1]

    def evaluate(self, deterministic: bool) -> dict[str, float]:
        return evaluate(self.run, self.policy, self.observations, deterministic)

    # -------------------------------------------------------------------------------------- checkpoint

    def arrays(self) -> dict[str, np.ndarray]:
        """Every number that the rest of the run depends on. The environments: all actions taken, to be replayed."""
        return {
            "parameters": self.policy.flat.numpy(),
            "adam_means": self.optimizer.means[0].numpy(),
            "adam_squares": self.optimizer.squares[0].numpy(),
            "adam_steps": np.array(self.optimizer.steps),
            "generator": self.generator.get_state().numpy(),
            "observation_count": np.array(self.observations.moments.count),
            "observation_mean": self.observations.moments.mean,
            "observation_variance": self.observations.moments.variance,
            "reward_count": np.array(self.rewards.moments.count),
            "reward_mean": self.rewards.moments.mean,
            "reward_variance": self.rewards.moments.variance,
            "reward_running": self.rewards.running,
            "recent": np.array(self.recent, dtype=np.float64).reshape(-1, 2),
            "episodes": np.array(self.episodes),
            "actions_taken": np.array(self.collector.taken),
            "current_observations": self.collector.current,
            "history": np.array([[row[name] for name in self.columns] for row in self.history]).reshape(-1, len(self.columns)),
        }

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """Go on where `arrays` was made: a fresh Trainer of the same run becomes that one, bit for bit.

        Raises ValueError when the environments, replayed, are not where they were: they draw from elsewhere than their seed.
        """
        self.policy.flat.copy_(torch.from_numpy(arrays["parameters"]))
        self.optimizer.means[0].copy_(torch.from_numpy(arrays["adam_means"]))
        self.optimizer.squares[0].copy_(torch.from_numpy(arrays["adam_squares"]))
        self.optimizer.steps = int(arrays["adam_steps"])
        self.generator.set_state(torch.from_numpy(arrays["generator"]))
        for moments, name in ((self.observations.moments, "observation"), (self.rewards.moments, "reward")):
            moments.count = float(arrays[f"{name}_count"])
            moments.mean, moments.variance = arrays[f"{name}_mean"], arrays[f"{name}_variance"]
        self.rewards.running = arrays["reward_running"]
        self.recent = [tuple(pair) for pair in arrays["recent"].tolist()]
        self.episodes = int(arrays["episodes"])
        self.history = [
            {name: int(value) if name in WHOLE else value for name, value in zip(self.columns, row)}
            for row in arrays["history"].tolist()
        ]
        self.collector.replay(arrays["actions_taken"])
        if not np.array_equal(self.collector.current, arrays["current_observations"]):
            raise ValueError(
                f"{self.run.env}: replaying the actions led to other observations, so the run cannot go on bit for bit; "
                "likely another version of the environment, or one that draws from elsewhere than its seed"
            )


def evaluate(run: Run, policy: Policy, normaliser: ObservationNormaliser, deterministic: bool) -> dict[str, float]:
    """Returns of whole episodes on seeds that training never saw, one episode per environment; statistics stay frozen.

    deterministic: the likeliest action or the mean; else sampled. Rewards and time limit are the environment's own.
    -> mean_return, std_return (n), episodes, deterministic, mean_length, unfinished (given up after LONGEST_EVALUATION).
    """
    settings, count = run.settings, run.settings.evaluation_episodes
    environments, spaces = make_environments(run.env, count, "next-step")
    collector = Collector(environments, spaces, "next-step", seeds_for(settings.seed, EVALUATION_SEEDS, count))
    (noise_seed,) = seeds_for(settings.seed, EVALUATION_NOISE, 1)
    generator = torch.Generator().manual_seed(noise_seed)
    returns, lengths, running = np.zeros(count), np.zeros(count), np.ones(count, dtype=bool)

    def act(row: int, seen: np.ndarray) -> np.ndarray:
        noise = None if deterministic else policy.distribution.noise(1, count, generator)[0]
        return policy.act(normaliser(seen), noise)

    while running.any() and lengths.max() < LONGEST_EVALUATION:
        rollout = collector.collect(1, act)
        returns += running * rollout.rewards[0]
        lengths += running
        running &= ~(rollout.terminated | rollout.truncated)[0]
    environments.close()
    return {
        "mean_return": float(returns.mean()),
        "std_return": float(returns.std()),
        "episodes": count,
        "deterministic": deterministic,
        "mean_length": float(lengths.mean()),
        "unfinished": int(running.sum()),
    }


def train(run: Run) -> Iterator[dict[str, float]]:
    """Run to the end, row by row, for those who want no files: `trainer = Trainer(run)` gives more."""
    trainer = Trainer(run)
    try:
        while not trainer.finished:
            yield trainer.advance()
    finally:
        trainer.close()


def config_of(run: Run) -> dict[str, object]:
    """Every setting of a run as one flat table, for JSON."""
    document = dataclasses.asdict(run)
    return {**{name: value for name, value in document.items() if name != "settings"}, **document["settings"]}
