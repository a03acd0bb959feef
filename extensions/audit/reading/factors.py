"""What is left on tokens that have a gradient of another size: caps and floors, one weight per side of A, one per answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from extensions.audit.reading.closed import SIDES, sides_of
from extensions.audit.reading.fit import mode


@dataclass
class Factor:
    """kind: cap, floor, side, row, answer, weight. value: what stands in for the quantity, or multiplies the slope."""

    kind: str
    quantity: str
    side: str
    value: float
    tokens: int
    low: float = float("nan")
    high: float = float("nan")
    inside: np.ndarray | None = None  # which tokens of the view

    def as_json(self) -> dict:
        return {"kind": self.kind, "quantity": self.quantity, "side": self.side, "value": self.value, "tokens": self.tokens}

    def words(self) -> str:
        where = "" if self.side == "any A" else f" where {self.side}"
        if self.kind in ("cap", "floor"):
            bound = "above" if self.kind == "cap" else "below"
            return f"{self.quantity} counts as {self.value:.6g} {bound} it{where} ({self.tokens} tokens)"
        if self.kind == "side":
            return f"tokens with {self.side} weigh {self.value:.6g} times the others ({self.tokens} tokens)"
        if self.kind == "row":
            return f"each answer has a weight of its own ({self.tokens} tokens)"
        return f"times {self.quantity}"


def caps(h, left, alive, A, levels: dict[str, np.ndarray], tolerance: float) -> list[Factor]:
    """Bounds at which a quantity stops: every token beyond has the same h * quantity, and no open token lies beyond."""
    found = []
    for name, level in levels.items():
        e = h * level
        for side in reversed(SIDES):
            member = sides_of(A)[side]
            for kind in ("cap", "floor"):
                here = left & member & ((h < 1) if kind == "cap" else (h > 1)) & (h > 0)
                if not here.any():
                    continue
                c, _ = mode(e[here], tolerance)
                inside = left & member & (abs(e - c) <= 2 * tolerance * abs(c)) & ((level > c) if kind == "cap" else (level < c))
                openly = level[alive & ~left & member]
                slack = 4 * tolerance * abs(c)
                if not inside.any() or len(openly) and (openly.max() > c + slack if kind == "cap" else openly.min() < c - slack):
                    continue
                if inside.sum() == 1 and not len(openly):
                    continue
                found.append(Factor(kind, name, side, float(c), int(inside.sum()), inside=inside))
    return sorted(found, key=lambda x: -x.tokens)


def leftovers(h, left, alive, A, rows, levels, tolerance) -> tuple[list[Factor], np.ndarray]:
    """Factors for tokens whose gradient is h times the read one, and the tokens that none explains."""
    left, found = left.copy(), []
    while left.any():
        options = caps(h, left, alive, A, levels, tolerance)
        if not options:
            break
        found.append(options[0])
        left &= ~options[0].inside
    for side in SIDES[:2]:
        member = sides_of(A)[side]
        here = left & member
        if here.sum() >= 3 and not (alive & member & ~left).any():
            c, count = mode(h[here], tolerance)
            inside = here & (abs(h - c) <= 2 * tolerance * abs(c))
            if count >= 0.9 * here.sum():
                found.append(Factor("side", "A", side, float(c), int(inside.sum()), inside=inside))
                left &= ~inside
    if left.sum() >= 4:
        inside = np.zeros(len(left), bool)
        for row in np.unique(rows[left])[:2000]:
            here = left & (rows == row)
            centre = np.median(h[here])
            if here.sum() >= 2 and (abs(h[here] - centre) <= 3 * tolerance * abs(centre)).all() and not (alive & ~left & (rows == row)).any():
                inside |= here
        if inside.sum() >= 0.8 * left.sum():
            found.append(Factor("row", "answer", "any A", float("nan"), int(inside.sum()), inside=inside))
            left &= ~inside
    return found, left
