"""Groups whose rewards are equal up to rounding."""

from __future__ import annotations

import numpy as np

from rl_lab import SPREAD_TOLERANCE


def in_level_group(ids: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """True for answers of a group of two or more whose rewards are all equal, up to the rounding of a sum.

    max - min <= 128 eps max|R| as in rl_lab.groups_without_spread, in float64; a missing reward is not compared.
    """
    _, inverse, sizes = np.unique(ids, return_inverse=True, return_counts=True)
    order = np.argsort(inverse, kind="stable")
    starts = np.cumsum(sizes) - sizes
    finite = np.isfinite(rewards)
    highest = np.maximum.reduceat(np.where(finite, rewards, -np.inf)[order], starts)
    lowest = np.minimum.reduceat(np.where(finite, rewards, np.inf)[order], starts)
    count = np.add.reduceat(finite[order].astype(int), starts)
    with np.errstate(invalid="ignore"):
        level = (count > 1) & (
            highest - lowest <= SPREAD_TOLERANCE * np.finfo(np.float64).eps * np.maximum(np.abs(highest), np.abs(lowest))
        )
    return level[inverse]
