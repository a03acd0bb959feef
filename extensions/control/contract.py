"""The action contract u = C(s, a): which action a ratio may be about, decided exactly for a Gaussian and a clip.

a ~ N(m, s^2) is sampled, u = clip(a, -1, 1) is executed, and the reward is R(u). Four ways to write PPO's ratio:

    sampled    p_new(a) / p_old(a)         right: the policy made a; C belongs to the environment
    executed   p_new(u) / p_old(u)         wrong: p(u) is not the density with which u occurred
    mixed      p_new(u) / p_old(a)         wrong: stored log p(a), new log p(u): not 1 even where nothing has changed
    capg       P_new(u) / P_old(u)         right: the distribution of u itself, with its point masses at the limits

Right means: mean ratio 1 under the old policy, and the gradient of E[R(u)]. All numbers are integrals, computed by Gauss-Legendre
quadrature split at the limits and at the mean, not sampled. Sources: clipped action policy gradient, arXiv 1802.07564.
"""

from __future__ import annotations

import math
from typing import Callable, NamedTuple

import numpy as np

LOW, HIGH = -1.0, 1.0
MEAN, SPREAD, NEW_MEAN = 0.5, 0.8, 0.6
BAND = 1.2  # upper end of PPO's band at epsilon .2
CONTRACTS = ("sampled", "executed", "mixed", "capg")
REWARDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "R = u": lambda u: u,
    "R = -(u - 0.3)^2": lambda u: -((u - 0.3) ** 2),
}

NODES, WEIGHTS = np.polynomial.legendre.leggauss(80)


def log_density(a: np.ndarray, mean: float, spread: float = SPREAD) -> np.ndarray:
    """log N(a; mean, spread^2)."""
    return -0.5 * ((a - mean) / spread) ** 2 - math.log(spread) - 0.5 * math.log(2 * math.pi)


def below(x: float, mean: float, spread: float = SPREAD) -> float:
    """P(a <= x)."""
    return 0.5 * (1 + math.erf((x - mean) / spread / math.sqrt(2)))


def integral(function: Callable[[np.ndarray], np.ndarray], mean: float = MEAN, spread: float = SPREAD) -> float:
    """The integral of function(a) N(a; mean, spread^2) da over 12 spreads to either side, in pieces."""
    ends = sorted({mean - 12 * spread, LOW, mean, HIGH, mean + 12 * spread})
    total = 0.0
    for low, high in zip(ends, ends[1:]):
        for start, end in ((low, (low + high) / 2), ((low + high) / 2, high)):
            a = (start + end) / 2 + (end - start) / 2 * NODES
            total += (end - start) / 2 * float(WEIGHTS @ (function(a) * np.exp(log_density(a, mean, spread))))
    return total


def executed(a: np.ndarray) -> np.ndarray:
    """u = clip(a, -1, 1)."""
    return np.clip(a, LOW, HIGH)


def log_probability_of_executed(a: np.ndarray, mean: float, spread: float = SPREAD) -> np.ndarray:
    """log of the distribution of u: a density between the limits, a mass at each of them."""
    at_low, at_high = math.log(below(LOW, mean, spread)), math.log(1 - below(HIGH, mean, spread))
    return np.where(a <= LOW, at_low, np.where(a >= HIGH, at_high, log_density(a, mean, spread)))


def score(contract: str, a: np.ndarray, mean: float = MEAN, spread: float = SPREAD) -> np.ndarray:
    """d log(numerator of the ratio) / d mean, at the old policy."""
    if contract == "sampled":
        return (a - mean) / spread**2
    if contract == "capg":
        at_low = -math.exp(log_density(np.array(LOW), mean, spread)) / below(LOW, mean, spread)
        at_high = math.exp(log_density(np.array(HIGH), mean, spread)) / (1 - below(HIGH, mean, spread))
        return np.where(a <= LOW, at_low, np.where(a >= HIGH, at_high, (a - mean) / spread**2))
    return (executed(a) - mean) / spread**2


def log_ratio(contract: str, a: np.ndarray, new_mean: float, old_mean: float = MEAN, spread: float = SPREAD) -> np.ndarray:
    """The logarithm of the ratio that a trainer with this contract computes for a sampled a."""
    if contract == "sampled":
        return log_density(a, new_mean, spread) - log_density(a, old_mean, spread)
    if contract == "executed":
        return log_density(executed(a), new_mean, spread) - log_density(executed(a), old_mean, spread)
    if contract == "mixed":
        return log_density(executed(a), new_mean, spread) - log_density(a, old_mean, spread)
    return log_probability_of_executed(a, new_mean, spread) - log_probability_of_executed(a, old_mean, spread)


def true_gradient(reward: Callable[[np.ndarray], np.ndarray], mean: float = MEAN) -> float:
    """d E[R(clip(a))] / d mean by a central difference of the integral, with its error below 1e-9."""
    h = 1e-4

    def at(shift: float) -> float:
        return integral(lambda a: reward(executed(a)), mean + shift)

    return (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)


class Exact(NamedTuple):
    """What a contract gives. None: the integral does not exist."""

    contract: str
    ratio_mean: float | None  # E[ratio] under the old policy, new mean .6: 1 where the ratio is one
    share_above_band: float  # of ratios above 1.2 while new = old: 0 where the ratio is one
    gradients: dict[str, float | None]  # of E[R(u)] in the mean, per reward
    variances: dict[str, float | None]


def clipped_share() -> float:
    """P(a outside the limits)."""
    return below(LOW, MEAN) + 1 - below(HIGH, MEAN)


def share_above_band(contract: str) -> float:
    """P(ratio > 1.2) at the unchanged policy. Only the mixed ratio leaves 1: p(u) / p(a) > 1.2 where a is far beyond a limit.

    log p(u) - log p(a) = ((a - m)^2 - (u - m)^2) / (2 s^2) > log 1.2 gives |a - m| > sqrt((u - m)^2 + 2 s^2 log 1.2).
    """
    if contract != "mixed":
        return 0.0
    far = [math.sqrt((limit - MEAN) ** 2 + 2 * SPREAD**2 * math.log(BAND)) for limit in (LOW, HIGH)]
    return below(MEAN - far[0], MEAN) + 1 - below(MEAN + far[1], MEAN)


def exact(contract: str) -> Exact:
    """All numbers of one contract. For `mixed` p(u) / p(a) weighted by p(a) is p(clip(a)), constant outside: no finite mean."""
    if contract == "mixed":
        nothing = dict.fromkeys(REWARDS)
        return Exact(contract, None, share_above_band(contract), nothing, dict(nothing))
    gradients, variances = {}, {}
    for name, reward in REWARDS.items():
        mean = integral(lambda a: reward(executed(a)) * score(contract, a))
        gradients[name] = mean
        variances[name] = integral(lambda a: (reward(executed(a)) * score(contract, a)) ** 2) - mean**2
    ratio_mean = integral(lambda a: np.exp(log_ratio(contract, a, NEW_MEAN)))
    return Exact(contract, ratio_mean, share_above_band(contract), gradients, variances)


def mixed_mean_within(spreads: float) -> float:
    """E[mixed ratio; |a - m| <= spreads * s] at the unchanged policy: it grows without end as the window does.

    Beyond a limit the integrand p(u) / p(a) * p(a) = p(limit) is constant, so each spread more adds the same again.
    """
    low, high = MEAN - spreads * SPREAD, MEAN + spreads * SPREAD
    ends = sorted({low, high, *(limit for limit in (LOW, HIGH) if low < limit < high)})
    total = 0.0
    for start, end in zip(ends, ends[1:]):
        a = (start + end) / 2 + (end - start) / 2 * NODES
        total += (end - start) / 2 * float(WEIGHTS @ np.exp(log_ratio("mixed", a, MEAN) + log_density(a, MEAN)))
    return total
