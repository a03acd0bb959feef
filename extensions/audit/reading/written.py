"""Wrong losses that no gate, threshold or factor expresses: each written out whole, value and slope, and compared whole.

loss = -kappa sum law J. kappa is solved by least squares from the gradient; it must be one over a count, and the value must
agree with it where it was recorded. To add one: a function from facts and clip widths to (J, dJ/dl), (N, T), in WRITTEN.
"""

from __future__ import annotations

from typing import Callable, Iterator, NamedTuple

import numpy as np

from extensions.audit.reading.counts import named
from extensions.audit.reading.facts import Facts
from extensions.audit.reading.gates import LAWS

USUAL_WIDTHS = ((0.2, 0.2), (0.2, 0.28), (0.1, 0.1), (0.3, 0.3))


class Written(NamedTuple):
    """mistake: its name in the catalogue. makes: (J, slope) pairs with words that say which variant, or nothing."""

    mistake: str
    makes: Callable[[Facts, float, float], Iterator[tuple[str, np.ndarray, np.ndarray]]]


def _products_of_two(f: Facts, low: float, high: float):
    """min(r A', clip(r) A): one product has the advantages before they were standardised, the other those after."""
    raw = f.recording.arrays.get("advantages_raw")
    if raw is None or raw.shape not in (f.mask.shape, (len(f.l),), (len(f.l), 1)) or not np.isfinite(raw).all():
        return
    raw = raw.reshape(len(f.l), -1) if raw.shape != f.mask.shape else raw
    r = np.exp(np.clip(f.l - f.old, -80, 80))
    for words, first, second in (
        ("the unclipped product has advantages_raw", raw, f.A),
        ("the clipped product has advantages_raw", f.A, raw),
    ):
        plain, held = r * first, np.clip(r, 1 - low, 1 + high) * second
        inside = (r > 1 - low) & (r < 1 + high)
        yield words, np.minimum(plain, held), np.where(plain <= held, plain, np.where(inside, r * second, 0.0))


def _part_by_part(f: Facts, low: float, high: float):
    """min(r A, prod_t clip(r_t) A) with r = prod_t r_t: the clip acts on each part of an action, not on their product."""
    if f.mask.shape[1] < 2 or f.A.shape[1] != 1:
        return
    d = np.where(f.mask, f.l - f.old, 0.0)
    held = np.clip(d, np.log(1 - low), np.log(1 + high)) if low < 1 else np.minimum(d, np.log(1 + high))
    plain, clipped = (np.exp(np.clip(x.sum(1, keepdims=True), -80, 80)) * f.A for x in (d, held))
    slope = np.where(plain <= clipped, plain, np.where(held == d, clipped, 0.0))
    # One J an answer, on its first counted slot alone, so that a sum over slots counts it once.
    first = f.mask & (np.cumsum(f.mask, axis=1) == 1)
    yield "", np.where(first, np.minimum(plain, clipped), 0.0), np.where(f.mask, slope, 0.0)


WRITTEN = (Written("advantages_mixed_in_products", _products_of_two), Written("clip_part_by_part", _part_by_part))


def written_out(f: Facts, loss: float | None) -> tuple[str, str] | None:
    """(mistake, evidence) of the written loss that has the recorded gradient and value, or None."""
    if f.old is None or not f.g.any():
        return None
    number = f.recording.number
    low, high = number("clip_low", number("clip_high")), number("clip_high", number("clip_low"))
    for low, high in [(low, high)] if low is not None else USUAL_WIDTHS:
        for entry in WRITTEN:
            for words, J, slope in entry.makes(f, low, high):
                for law_words, law in LAWS.values():
                    weights = law(f)
                    if weights is None:  # this batch has nothing that the law needs
                        continue
                    evidence = _compared(f, loss, J, slope, weights[:, None], law_words)
                    if evidence is not None:
                        return entry.mistake, (f"{words[0].upper()}{words[1:]}: " if words else "") + evidence
    return None


def _compared(f: Facts, loss: float | None, J, slope, law, law_words: str) -> str | None:
    """Evidence in numbers if -kappa law J has the recorded gradient, for a kappa that is one over a count, and the value."""
    made = np.where(f.mask, -law * slope, 0.0)
    size = float((made * made).sum())
    if not size:
        return None
    kappa = float((f.g * made).sum()) / size
    off = np.linalg.norm(f.g - kappa * made) / np.linalg.norm(f.g)
    if kappa <= 0 or off > f.tolerance or not named(1 / kappa, f):
        return None
    value = -kappa * float(np.where(f.mask, law * J, 0.0).sum())
    span = kappa * float(np.where(f.mask, abs(law * J), 0.0).sum())
    if loss is not None and abs(value - loss) > f.tolerance * span:
        return None
    also = "" if loss is None else f", and the value {value:.6g}"
    return f"min of the two products so made has the recorded gradient (off by {off:.1e}){also}; {law_words}, over {named(1 / kappa, f)[0]}."
