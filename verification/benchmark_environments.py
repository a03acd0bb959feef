"""extensions/gymnasium_ppo against stable-baselines3's PPO: return and time, in pairs, in one run on one machine.

    python -m verification.benchmark_environments [--env CartPole-v1 ...] [--seeds 0-4] [--steps 100000] [--episodes 20]
    python -m verification.benchmark_environments --trpo    extensions/trust_region against sb3-contrib's TRPO (2.9.2)

Needs stable-baselines3 and gymnasium in the versions of verification/requirements.txt. Theirs runs with the settings that
rl-baselines3-zoo tuned for the environment (hyperparams/ppo.yml @00128b5), with the plain Gaussian where the zoo uses
state-dependent noise (gSDE), since ours has the plain one; ours with its preset. Seeds alternate between the programs, so that
a busy machine disturbs both; one thread each. Time is that of the training, evaluation apart: seconds of this process on the
CPU, and on the clock. Both are evaluated by the same loop: deterministic actions, whole episodes, seeds of their own.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Callable, NamedTuple

import numpy as np
import torch

from extensions.gymnasium_ppo.settings import run_of
from extensions.gymnasium_ppo.training import EVALUATION_SEEDS, Trainer, seeds_for
from extensions.trust_region.environment import TrustRegionTrainer
from extensions.trust_region.environment import run_of as trust_region_run
from rl_lab import LabParser, format_table, parse_seeds

ZOO = {
    "CartPole-v1": dict(
        environments=8, n_steps=32, batch_size=256, gae_lambda=0.8, gamma=0.98, n_epochs=20, ent_coef=0.0,
        learning_rate=lambda left: 0.001 * left, clip_range=lambda left: 0.2 * left,
    ),
    "Pendulum-v1": dict(
        environments=4, n_steps=1024, gae_lambda=0.95, gamma=0.9, n_epochs=10, ent_coef=0.0, learning_rate=1e-3, clip_range=0.2,
    ),
    "Acrobot-v1": dict(environments=16, normalise=True, n_steps=256, gae_lambda=0.94, gamma=0.99, n_epochs=4, ent_coef=0.0),
}  # fmt: skip


THEIR_TRPO = {
    "CartPole-v1": dict(environments=2, n_steps=512, batch_size=512, cg_damping=1e-3, gae_lambda=0.98, gamma=0.99,
        learning_rate=1e-3, n_critic_updates=20),
    "Pendulum-v1": dict(environments=2, n_steps=1024, gae_lambda=0.95, gamma=0.9, n_critic_updates=15, learning_rate=1e-3,
        sub_sampling_factor=1),
    "Acrobot-v1": dict(environments=2, normalise=True, n_steps=1024, gae_lambda=0.95, gamma=0.99, n_critic_updates=20,
        learning_rate=1e-3),
}  # fmt: skip
"""Chosen here: sb3-contrib's defaults, with rollouts, lambda and passes of the critic that suit the task; not the zoo's."""


class Result(NamedTuple):
    mean: float
    std: float
    cpu_seconds: float
    seconds: float


class Timed(NamedTuple):
    """What a training left behind: how it acts, and what it took."""

    act: Callable[[np.ndarray], np.ndarray]
    cpu_seconds: float
    seconds: float


def timed(work: Callable[[], None]) -> tuple[float, float]:
    cpu, clock = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - clock


def train_ours(env: str, seed: int, steps: int, trpo: bool = False) -> Timed:
    if trpo:
        trainer = TrustRegionTrainer(trust_region_run(env, seed=seed, steps=steps))
    else:
        trainer = Trainer(run_of(env, seed=seed, steps=steps))
    spaces = trainer.collector.spaces

    def work() -> None:
        while not trainer.finished:
            trainer.advance()

    took = timed(work)
    trainer.close()
    return Timed(lambda batch: spaces.write(trainer.policy.act(trainer.observations(spaces.read(batch)), None)), *took)


def train_theirs(env: str, seed: int, steps: int, trpo: bool = False) -> Timed:
    if trpo:
        from sb3_contrib import TRPO as Method
    else:
        from stable_baselines3 import PPO as Method
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    settings = dict((THEIR_TRPO if trpo else ZOO)[env])
    environments = make_vec_env(env, n_envs=settings.pop("environments"), seed=seed)
    if settings.pop("normalise", False):
        environments = VecNormalize(environments, gamma=settings["gamma"])
    model = Method("MlpPolicy", environments, seed=seed, device="cpu", **settings)
    took = timed(lambda: model.learn(total_timesteps=steps))

    def act(batch: np.ndarray) -> np.ndarray:
        if isinstance(environments, VecNormalize):
            batch = environments.normalize_obs(batch)
        return model.predict(batch, deterministic=True)[0]

    return Timed(act, *took)


def evaluate(env: str, act: Callable[[np.ndarray], np.ndarray], seed: int, episodes: int) -> tuple[float, float]:
    """Mean and standard deviation of the returns of whole episodes, one for each evaluation seed."""
    import gymnasium

    environments = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make(env)] * episodes)
    observations, _ = environments.reset(seed=seeds_for(seed, EVALUATION_SEEDS, episodes))
    returns, running = np.zeros(episodes), np.ones(episodes, dtype=bool)
    while running.any():
        observations, rewards, terminated, truncated, _ = environments.step(act(observations))
        returns += running * rewards
        running &= ~(terminated | truncated)
    environments.close()
    return float(returns.mean()), float(returns.std())


def compare(env: str, seeds: list[int], steps: int, episodes: int, trpo: bool) -> dict[str, list[Result]]:
    """Both programs on every seed; the one that goes first alternates."""
    programs = {"ours": train_ours, "sb3-contrib" if trpo else "stable-baselines3": train_theirs}
    results: dict[str, list[Result]] = {name: [] for name in programs}
    for number, seed in enumerate(seeds):
        for name in list(programs)[:: 1 if number % 2 == 0 else -1]:
            training = programs[name](env, seed, steps, trpo)
            result = Result(*evaluate(env, training.act, seed, episodes), *training[1:])
            results[name].append(result)
            print(
                f"{env:14} seed {seed}  {name:18} return {result.mean:9.2f} +- {result.std:7.2f}  "
                f"{result.cpu_seconds:6.1f} s CPU {result.seconds:6.1f} s",
                flush=True,
            )
    return results


def main() -> None:
    parser = LabParser(prog="python -m verification.benchmark_environments", description=__doc__.splitlines()[0])
    parser.add_argument("--env", nargs="+", choices=tuple(ZOO), default=list(ZOO), help="environments; default all three")
    parser.add_argument("--seeds", type=parse_seeds, default=list(range(5)), metavar="A-B", help="default 0-4")
    parser.add_argument("--steps", type=int, default=100_000, help="environment steps of each training; default 100000")
    parser.add_argument("--episodes", type=int, default=20, help="evaluation episodes; default 20")
    parser.add_argument("--trpo", action="store_true", help="TRPO of both, instead of PPO; needs sb3-contrib==2.9.2")
    arguments = parser.parse_args()
    try:
        import stable_baselines3  # noqa: F401
    except ModuleNotFoundError:
        sys.exit("stable-baselines3 is not installed; python -m pip install -r verification/requirements.txt brings it")
    if arguments.trpo:
        try:
            import sb3_contrib  # noqa: F401
        except ModuleNotFoundError:
            sys.exit("sb3-contrib is not installed: python -m pip install sb3-contrib==2.9.2")
    torch.set_num_threads(1)
    rows = []
    for env in arguments.env:
        results = compare(env, arguments.seeds, arguments.steps, arguments.episodes, arguments.trpo)
        for name, of_program in results.items():
            means = [result.mean for result in of_program]
            times = [statistics.median(column) for column in list(zip(*of_program))[2:]]
            spread = f"{min(means):.1f} to {max(means):.1f}"
            rows.append([f"{env} {name}", f"{statistics.median(means):.2f}", spread, *(f"{t:.1f}" for t in times)])
    print(f"\n{len(arguments.seeds)} seeds, {arguments.steps} steps; medians over the seeds\n")
    print(format_table(["", "return", "seeds", "CPU s", "clock s"], rows))


if __name__ == "__main__":
    main()
