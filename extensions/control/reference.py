"""References with a time stamp and an end of validity, and the manager that interpolates and refuses stale ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

FRESH, EARLY, EXPIRED, MISSING = "fresh", "early", "expired", "missing"


class Reference(NamedTuple):
    """A planned path: values [K, n] at times [K] (s, increasing), made at `time`, not to be used after `valid_until`."""

    time: float
    valid_until: float
    times: np.ndarray
    values: np.ndarray

    def at(self, t: float) -> np.ndarray:
        """Linear between the knots, the end values beyond them."""
        return np.array([np.interp(t, self.times, column) for column in self.values.T])

    def slope(self, t: float) -> np.ndarray:
        """Velocity of the path just after t."""
        k = int(np.clip(np.searchsorted(self.times, t, side="right") - 1, 0, len(self.times) - 2))
        return (self.values[k + 1] - self.values[k]) / (self.times[k + 1] - self.times[k])


class Given(NamedTuple):
    """What the manager hands out at a time: value and velocity are None unless the status is "fresh"."""

    status: str
    age: float  # seconds since the reference was made; infinite without one
    value: np.ndarray | None = None
    velocity: np.ndarray | None = None


class ReferenceManager:
    """Keeps the newest reference. An older one that arrives late does not replace it."""

    def __init__(self):
        self.reference: Reference | None = None
        self.late = 0  # references that arrived after a newer one

    def offer(self, reference: Reference) -> bool:
        """Take a reference unless a newer one is there. Raises ValueError for numbers that are not finite or times in disorder."""
        if not (np.isfinite(reference.values).all() and np.isfinite(reference.times).all() and len(reference.times) > 1):
            raise ValueError("reference: wanted at least two knots and finite numbers")
        if not (np.diff(reference.times) > 0).all() or reference.valid_until < reference.time:
            raise ValueError("reference: wanted increasing times and valid_until not before time")
        if self.reference is not None and reference.time < self.reference.time:
            self.late += 1
            return False
        self.reference = reference
        return True

    def at(self, t: float) -> Given:
        """The reference at time t, or why there is none."""
        if self.reference is None:
            return Given(MISSING, np.inf)
        age = t - self.reference.time
        if t < self.reference.time:
            return Given(EARLY, age)
        if t > self.reference.valid_until:
            return Given(EXPIRED, age)
        return Given(FRESH, age, self.reference.at(t), self.reference.slope(t))
