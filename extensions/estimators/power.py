"""How many prompts, answers or seeds it takes to tell two numbers apart, from exact variances.

Two means of n independent observations each, with variances va and vb, are told apart by a two-sided test at 5 % with a
chance of 80 % where

    n >= (z_.975 + z_.8)^2 (va + vb) / effect^2,        z_.975 + z_.8 = 1.9600 + 0.8416

If both sides see the same prompts and groups, va + vb is replaced by Var(a - b). With few observations the variance has to
be estimated as well; Guenther's correction (1981) adds z_.975^2 / 4 to n, z_.975^2 / 2 for pairs.

What is observed: the gain of one group of answers along the true gradient, x = g . grad J / |grad J|^2, whose mean is the
scale of the table of advantages; the reward of one answer; and the expected reward that a run of the lab ends with.
"""

from __future__ import annotations

import math
import statistics
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

import rl_lab
from extensions.estimators.advantages import estimates
from extensions.estimators.policy import Case, policy_gradient

LEVEL = 0.05  # two-sided
POWER = 0.8
LAB_STEPS = 10  # iterations of the lab's runs: later all of them have reached the best policy
LAB_SEEDS = 20  # so that a variance between seeds is known to a third: sqrt(2 / 19)
BESIDE = "leave-one-out"

_Z_LEVEL = NormalDist().inv_cdf(1 - LEVEL / 2)
_Z_POWER = NormalDist().inv_cdf(POWER)


def needed(variance: float, effect: float, pairs: bool = False, few: bool = False) -> int | None:
    """Observations on each side for `effect`; variance: va + vb, or of the difference where they are pairs. None: never.

    few: the variance is estimated from them too (Guenther). At least 1; 2 if few.
    """
    if not effect:
        return None
    n = (_Z_LEVEL + _Z_POWER) ** 2 * variance / effect**2
    if few:
        n += _Z_LEVEL**2 / (2 if pairs else 4)
    return max(2 if few else 1, math.ceil(n * (1 - 1e-12)))


def power_of(variance: float, effect: float, n: float) -> float:
    """The chance that n observations on each side show `effect`."""
    if not variance:
        return 1.0
    shift = abs(effect) / math.sqrt(variance / n)
    normal = NormalDist()
    return normal.cdf(shift - _Z_LEVEL) + normal.cdf(-shift - _Z_LEVEL)


class Prompts(NamedTuple):
    """An estimator against leave-one-out: how many prompts tell their gains along the true gradient apart."""

    estimator: str
    row: str | None
    scale: float
    sd: float  # of the gain that one group shows
    difference: float  # of the scales
    for_difference: int | None  # prompts; None where there is no difference
    for_difference_same_groups: int | None  # where both read the same groups
    for_effect: int


def of_gradients(case: Case, effect: float) -> list[Prompts]:
    """Every estimator and row against leave-one-out. Raises ValueError where the true gradient is 0."""
    truth = policy_gradient(case.p, case.R)
    square = float(truth @ truth)
    if not square:
        raise ValueError("--power: the true gradient is 0 for these rewards, so there is no gain to compare")
    gains = {e.name: (e.row, e.drawn.vectors @ truth / square, e.drawn.probabilities) for e in estimates(case)}
    _, other, chances = gains[BESIDE]
    made = []
    for name, (row, gain, own) in gains.items():
        scale, variance = moments(gain, own)
        beside, theirs = moments(other, chances)
        # Where a filter drops groups the two do not see the same ones.
        paired = moments(gain - other, chances)[1] if len(gain) == len(other) else None
        difference = scale - beside
        # Two estimators with the same mean differ by rounding: no number of prompts can see that.
        real = difference if abs(difference) > 1e-9 else 0.0
        made.append(Prompts(
            name, row, scale, math.sqrt(variance), real,
            needed(variance + theirs, real, few=True),
            None if paired is None else needed(paired, real, pairs=True, few=True),
            needed(variance + theirs, effect, few=True),
        ))  # fmt: skip
    return made


def moments(values: np.ndarray, chances: np.ndarray) -> tuple[float, float]:
    mean = float(chances @ values)
    return mean, float(chances @ (values - mean) ** 2)


class Answers(NamedTuple):
    """Two policies compared by the mean reward of sampled answers."""

    variance: float  # Var_p(R)
    answers: int  # for each policy
    standard_error: float  # of the difference, at that many answers


def of_rewards(case: Case, effect: float) -> Answers:
    """Answers that each of two policies like p must give, for a difference of `effect` in their mean reward."""
    variance = moments(case.R, case.p)[1]
    n = needed(2 * variance, effect)
    return Answers(variance, n, math.sqrt(2 * variance / n))


class Seeds(NamedTuple):
    """Runs of the lab's bandit: how many seeds show `effect` in the expected reward."""

    algorithm: str
    mean: float
    sd: float  # between seeds
    seeds: int  # of each of two such algorithms


def of_lab_runs(effect: float, seeds: int = LAB_SEEDS, steps: int = LAB_STEPS) -> list[Seeds]:
    """Measured, not enumerated: `seeds` runs of every algorithm of the lab, `steps` iterations each.

    The expected reward of a run is exact, so what spreads is the training alone. DPO on all pairs draws nothing: no spread.
    """
    made = []
    for algorithm in rl_lab.METHODS:
        runs = rl_lab.train_seeds(algorithm, range(seeds), steps=steps)
        rewards = [run.history[-1]["expected_reward"] for run in runs]
        variance = statistics.variance(rewards)
        enough = needed(2 * variance, effect, few=True) if variance else 1
        made.append(Seeds(algorithm, statistics.mean(rewards), math.sqrt(variance), enough))
    return made


def between(first: Seeds, second: Seeds) -> int | None:
    """Seeds that tell two algorithms apart by the difference that their runs have shown."""
    return needed(first.sd**2 + second.sd**2, first.mean - second.mean, few=True)
