"""One line of a table: an estimator's mean, direction, scale, variance and error, from its outcomes and their probabilities.

Add a column here: every table and the JSON take their columns from Line.
"""

from dataclasses import dataclass

import numpy as np

ZERO_NORM = 1e-12  # a mean this short (of a gradient of order one) has no direction: cosine and scale are None


@dataclass(frozen=True)
class Line:
    """What enumeration says about one estimator of the vector `truth` (n,).

    mean: E[g], (n,).  cosine: E[g] . truth / (|E[g]| |truth|), None where E[g] or truth is zero.
    scale: E[g] . truth / |truth|^2, the factor on the true gradient along it, None where truth is zero.
    trace_cov: sum of the variances of the coordinates.  mse: E|g - truth|^2 = trace_cov + |E[g] - truth|^2.
    row: the name in objectives.ROWS, or None.  meaning: one sentence.
    """

    estimator: str
    row: str | None
    mean: tuple
    cosine: float | None
    scale: float | None
    trace_cov: float
    mse: float
    meaning: str = ""


def line_of(estimator, outcomes, probabilities, truth, row=None, meaning=""):
    """The Line of an estimator that gives outcomes[k] (n,) with chance probabilities[k]; exact, no sampling.

    outcomes (K, n), probabilities (K,) sum to one, truth (n,).
    """
    outcomes, probabilities, truth = (np.asarray(x, dtype=float) for x in (outcomes, probabilities, truth))
    mean = probabilities @ outcomes
    # Centred first: the difference E|g|^2 - |E g|^2 would lose the digits of a small variance.
    trace_cov = float(probabilities @ ((outcomes - mean) ** 2).sum(axis=1))
    mse = trace_cov + float(((mean - truth) ** 2).sum())
    along, length, wanted = float(mean @ truth), float(np.linalg.norm(mean)), float(np.linalg.norm(truth))
    cosine = None if min(length, wanted) < ZERO_NORM else along / (length * wanted)
    scale = None if wanted < ZERO_NORM else along / wanted**2
    return Line(estimator, row, tuple(mean.tolist()), cosine, scale, trace_cov, mse, meaning)
