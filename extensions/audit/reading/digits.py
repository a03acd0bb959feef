"""Numbers as people type them."""

from __future__ import annotations

import math


def round_between(low: float, high: float) -> float:
    """The number with the fewest digits in [low, high)."""
    for digits in range(0, 12):
        step = 10.0**-digits
        candidate = math.ceil(low / step - 1e-9) * step
        if low <= candidate < high and candidate > 0:
            return round(candidate, digits)
    return (low + high) / 2
