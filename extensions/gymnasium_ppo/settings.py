"""Every setting of a run, and the presets per environment. A new number is one field, a new preset one entry of PRESETS."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from extensions.gymnasium_ppo.boundaries import MISTAKES
from extensions.gymnasium_ppo.environments import AUTORESET
from rl_lab import Range, Settings, setting


@dataclasses.dataclass(frozen=True)
class RolloutSettings(Settings):
    """What any method needs that learns from rollouts with an actor, a critic and GAE."""

    seed: int = setting(0, Range(int, 0, 2**63 - 1), "seed of weights, sampling and environments", "run")
    steps: int = setting(100_000, Range(int, 1, 10**9), "steps of all environments together, rounded up to rollouts", "run")
    evaluation_episodes: int = setting(20, Range(int, 1, 10_000), "episodes of each evaluation, on seeds of their own", "run")
    environments: int = setting(8, Range(int, 1, 1024), "environments that step together", "rollout")
    rollout_rows: int = setting(128, Range(int, 1, 100_000), "steps of each environment per rollout", "rollout")
    time_limit: int = setting(0, Range(int, 0, 10**9), "truncate episodes after so many steps; 0: its own", "rollout")
    normalise_observations: int = setting(0, Range(int, 0, 1), "1: running mean and std, frozen in evaluation", "rollout")
    normalise_rewards: int = setting(0, Range(int, 0, 1), "1: divide by the std of the discounted sum", "rollout")
    gamma: float = setting(0.99, Range(float, 0, 1), "discount", "update")
    gae_lambda: float = setting(0.95, Range(float, 0, 1), "lambda of GAE", "update")
    hidden: int = setting(64, Range(int, 1, 4096), "width of the two hidden layers of actor and critic", "network")


@dataclasses.dataclass(frozen=True)
class EnvironmentSettings(RolloutSettings):
    """Every number of a PPO run."""

    epochs: int = setting(10, Range(int, 1, 1000), "passes over each rollout", "update")
    batch_size: int = setting(256, Range(int, 1, 10**7), "rows per mini-batch; all get about as many", "update")
    learning_rate: float = setting(3e-4, Range(float, 0, 100, above=True), "Adam learning rate at the start", "update")
    clip_epsilon: float = setting(0.2, Range(float, 0, 1, above=True), "half width of the ratio band", "update")
    value_weight: float = setting(0.5, Range(float, 0, 1e6), "weight of the critic's squared error (no 1/2)", "update")
    value_clip: float = setting(0.0, Range(float, 0, 1e6), "clip the critic's move to this; 0: plain square", "update")
    entropy_weight: float = setting(0.0, Range(float, 0, 1e6), "weight of the entropy bonus", "update")
    kl_stop: float = setting(
        0.0, Range(float, 0, 1e6), "exact KL(old || current) of a mini-batch above this ends the updates; 0: never", "update"
    )
    max_gradient_norm: float = setting(0.5, Range(float, 0, 1e6, above=True), "gradient norm is clipped to this", "update")
    adam_epsilon: float = setting(1e-5, Range(float, 0, 1, above=True), "Adam's epsilon", "update")
    checkpoint_every: int = setting(20, Range(int, 1, 10**6), "updates between two checkpoints", "run")


class Choice(NamedTuple):
    """A setting with named values, the first of which is the default."""

    values: dict[str, str]  # name -> meaning
    meaning: str


CHOICES = {
    "autoreset": Choice(dict.fromkeys(AUTORESET, ""), "what the environments do at the end of an episode"),
    "advantage_normalisation": Choice(
        {
            "mini-batch": "minus mean, divided by std (n - 1) + 1e-8 of each mini-batch; stable-baselines3, CleanRL",
            "rollout": "the same over the rollout, once",
            "none": "raw advantages",
        },
        "what advantages are divided by",
    ),
    "schedule": Choice(
        {"linear": "the learning rate falls to 0 over the run", "constant": "it stays"}, "learning rate over the run"
    ),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """All that decides the numbers of a run, and is saved with them."""

    env: str
    settings: RolloutSettings = EnvironmentSettings()
    autoreset: str = "next-step"
    advantage_normalisation: str = "mini-batch"
    schedule: str = "linear"
    boundary_mistake: str | None = None

    def __post_init__(self) -> None:
        for name, choice in CHOICES.items():
            if getattr(self, name) not in choice.values:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, wanted one of {', '.join(choice.values)}")
        if self.boundary_mistake is not None and self.boundary_mistake not in MISTAKES:
            raise ValueError(f"boundary_mistake: got {self.boundary_mistake!r}, wanted one of {', '.join(MISTAKES)}")
        if self.boundary_mistake == "garbage-rows" and self.autoreset != "next-step":
            raise ValueError(f"boundary_mistake: garbage-rows needs autoreset next-step; {self.autoreset} has no such rows")

    @property
    def updates(self) -> int:
        """Rollouts of the run."""
        per_rollout = self.settings.environments * self.settings.rollout_rows
        return -(-self.settings.steps // per_rollout)


PRESETS: dict[str, dict[str, float | str]] = {
    "CartPole-v1": dict(learning_rate=1e-3, gamma=0.98, gae_lambda=0.9, rollout_rows=128, batch_size=256, epochs=8),
    "Acrobot-v1": dict(
        environments=16, rollout_rows=128, epochs=4, learning_rate=5e-4, gae_lambda=0.94, normalise_observations=1,
        normalise_rewards=1,
    ),
    "Pendulum-v1": dict(
        gamma=0.9, gae_lambda=0.95, environments=4, rollout_rows=256, batch_size=64, learning_rate=1e-3, normalise_rewards=1
    ),
    "MountainCarContinuous-v0": dict(normalise_observations=1, normalise_rewards=1),
    "LunarLander-v3": dict(
        environments=16, rollout_rows=256, gamma=0.999, gae_lambda=0.98, epochs=4, batch_size=64, entropy_weight=0.01,
        steps=500_000,
    ),
}  # fmt: skip
"""Settings that differ from the defaults, per environment; a flag on the command line wins over its preset."""


def run_of(env: str, **given: float | str | None) -> Run:
    """The PPO run of an environment: given settings, then its preset, then the defaults.

    Raises ValueError, naming the setting, for a value outside its range, and TypeError for one that does not exist.
    """
    return make_run(env, EnvironmentSettings, {**PRESETS.get(env, {}), **given})


def make_run(env: str, settings_class: type[RolloutSettings], chosen: dict[str, float | str | None]) -> Run:
    """A run from the settings and choices that are not left to their defaults. Raises as `run_of`."""
    choices = {name: chosen[name] for name in (*CHOICES, "boundary_mistake") if name in chosen}
    return Run(env, settings_class(**{name: value for name, value in chosen.items() if name not in choices}), **choices)
