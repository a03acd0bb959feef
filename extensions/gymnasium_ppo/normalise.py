"""Running statistics that scale observations and rewards. They move between rollouts only, and never in an evaluation.

Within one rollout and all updates on it a statistic stays fixed: the actor sees the same inputs when it acts and when
its log-probability is computed again, and the first ratio is exactly 1. stable-baselines3 moves them at every step.
"""

from __future__ import annotations

import numpy as np

LIMIT = 10.0
"""Scaled observations and rewards are clipped to +-LIMIT, as stable-baselines3 and the PPO2 baselines do."""
EPSILON = 1e-8


class RunningMoments:
    """Mean and variance of all rows seen, combined batch by batch (Chan, Golub, LeVeque 1979). Starts as mean 0, variance 1."""

    def __init__(self, size: int):
        self.count, self.mean, self.variance = 0.0, np.zeros(size), np.ones(size)

    def update(self, rows: np.ndarray) -> None:
        """Take in rows [n, size]."""
        if not len(rows):
            return
        mean, variance, count = rows.mean(axis=0), rows.var(axis=0), float(len(rows))
        total, gap = self.count + count, mean - self.mean
        # With count 0 the start's variance has weight 0 and is forgotten.
        squares = self.variance * self.count + variance * count + gap**2 * self.count * count / total
        self.count, self.mean, self.variance = total, self.mean + gap * count / total, squares / total


class ObservationNormaliser:
    """(s - mean) / std, clipped; before the first rollout, and when switched off, s itself."""

    def __init__(self, size: int, active: bool):
        self.active, self.moments = active, RunningMoments(size)

    def __call__(self, observations: np.ndarray) -> np.ndarray:
        """[..., D] -> [..., D]. Changes nothing in the statistics."""
        if not self.active or not self.moments.count:
            return observations
        scaled = (observations - self.moments.mean) / np.sqrt(self.moments.variance + EPSILON)
        return np.minimum(np.maximum(scaled, -LIMIT), LIMIT)

    def update(self, observations: np.ndarray) -> None:
        if self.active:
            self.moments.update(observations)


class RewardNormaliser:
    """r / std of the discounted sum of the past rewards of the running episode, clipped. The mean is not subtracted: that
    would pay an agent for staying alive or for ending, whatever it does."""

    def __init__(self, environments: int, gamma: float, active: bool):
        self.active, self.gamma, self.moments = active, gamma, RunningMoments(1)
        self.running = np.zeros(environments)

    def scale(self, rewards: np.ndarray, ended: np.ndarray, valid: np.ndarray) -> np.ndarray:
        """Take in a rollout's rewards [T, N], then scale them with what is known now -> [T, N]. Garbage rows stay out."""
        if not self.active:
            return rewards
        sums = np.empty_like(rewards)
        for t in range(len(rewards)):
            self.running = self.gamma * self.running + rewards[t]
            sums[t] = self.running
            self.running = np.where(ended[t] | ~valid[t], 0.0, self.running)
        self.moments.update(sums[valid][:, None])
        scaled = rewards / np.sqrt(self.moments.variance + EPSILON)
        return np.minimum(np.maximum(scaled, -LIMIT), LIMIT)
