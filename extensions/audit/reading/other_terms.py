"""Terms of the loss that have an array of their own: entropy bonus and critic's loss, read off their own gradients."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from extensions.audit.reading.fit import mode


@dataclass
class OtherTerms:
    value: float = 0.0
    words: list[dict] = field(default_factory=list)
    complete: bool = True
    width: "Width | None" = None  # the critic's clip, to be solved from the value of the loss


@dataclass
class Width:
    """The clipped part of a critic's loss as a function of its width: a + b c + e c^2."""

    a: float
    b: float
    e: float
    most: float
    least: float = 0.0

    def solve(self, wanted: float) -> float | None:
        """The width in (0, most] at which the clipped part is `wanted`."""
        roots = np.roots([self.e, self.b, self.a - wanted]) if self.e else np.array([])
        found = [float(x.real) for x in roots if abs(x.imag) < 1e-9 and self.least - 1e-6 <= x.real <= self.most * (1 + 1e-5)]
        return found[0] if len(found) == 1 else None


def laws(mask: np.ndarray) -> dict[str, np.ndarray]:
    T = np.maximum(mask.sum(1, keepdims=True), 1)
    return {"equal": np.ones_like(T, float), "1/T": 1 / T}


def read_other_terms(recording) -> OtherTerms:
    made = OtherTerms()
    arrays, mask = recording.arrays, recording.arrays["mask"]
    tolerance = 1e-4 * max(recording.eps / 2.0**-23, 1)
    g, H = arrays.get("dloss_dentropies"), arrays.get("entropies")
    if g is not None and H is not None and g.any():
        for name, law in laws(mask).items():
            y = (g / law)[mask]
            c, count = mode(y[y != 0], tolerance)
            if count == mask.sum():
                break
        else:
            made.complete = False
        made.value += float((g * np.nan_to_num(H))[g != 0].sum())
        made.words.append({"term": "entropy", "row_law": name, "weight": c, "tokens": int(count)})
    _critic(recording, made, tolerance)
    return made


def _critic(recording, made: OtherTerms, tolerance: float) -> None:
    """dL/dV = 2 c law (V - G) where the larger of two squares moves with V; 0 or the clipped error elsewhere."""
    arrays, mask = recording.arrays, recording.arrays["mask"]
    g, V, G = (arrays.get(n) for n in ("dloss_dvpreds", "vpreds", "returns"))
    if g is None or V is None or G is None or not g.any():
        return
    old = arrays.get("values")
    best = None
    for name, law in laws(mask).items():
        error = (V - G)[mask]
        y = (g / law)[mask]
        with np.errstate(all="ignore"):
            ratio = y / error
        c, count = mode(ratio[np.isfinite(ratio) & (ratio != 0)], tolerance)
        closed = (y == 0) & (error != 0)
        left = int((~closed & (abs(y - c * error) > tolerance * abs(c * error) + 1e-6 * abs(c))).sum())
        # The value: open tokens are c/2 error^2; closed ones lie in the clipped square, whose width is solved below.
        if best is None or count > best[0]:
            best = (count, name, c, closed, left, law)
    count, name, c, closed, left, law = best
    weight = np.broadcast_to(law, V.shape)[mask]
    error = (V - G)[mask]
    value = float((c / 2 * weight * error**2)[~closed].sum())
    words = {"term": "critic", "row_law": name, "coefficient": c / 2, "tokens": int(count), "closed": int(closed.sum())}
    if closed.any() and old is not None:
        v, v0, target = V[mask][closed], old[mask][closed], G[mask][closed]
        gap = abs(v - v0)
        width = recording.number("value_clip")
        words["clip"] = {"low": None, "high": float(gap.min())}
        if width is None or width > gap.min() + 1e-6:
            width = None
        words["clip"]["value"] = width
        if width is not None:
            clipped = v0 + np.clip(v - v0, -width, width)
            value += float((c / 2 * weight[closed] * (clipped - target) ** 2).sum())
        else:
            sign, start = np.sign(v - v0), v0 - target
            c2 = c / 2 * weight[closed]
            made.width = Width(float((c2 * start**2).sum()), float((2 * c2 * start * sign).sum()), float(c2.sum()), float(gap.min()))
            still = abs(V - old)[mask][~closed & (error != 0)]
            if len(still) and still.max() < gap.min():  # closed by distance alone: no larger of two squares
                made.width.least = words["clip"]["low"] = float(still.max())
    made.value += value
    made.complete &= left == 0
    words["unexplained"] = left
    made.words.append(words)
