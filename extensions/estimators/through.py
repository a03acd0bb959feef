"""Steps of a row of the objectives table, taken out and sent through objectives.evaluate; and what a line says in words.

An answer is alone in its batch here, so what comes back is the part of one sampled answer: with G answers the mean is
the same and the variance 1/G of it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from extensions import objectives
from extensions.estimators.line import Line, line_of
from extensions.objectives import ROWS, STEPS, Evaluation, Row

EXACT = 1e-9  # relative to the true vector: closer than this, two vectors are the same

# What is silent unless asked for: advantages as given, every token weighs 1.
QUIET = {"baseline": "given", "reduction": "sum_over_tokens"}


def only(row: Row, steps: str, **fields) -> Row:
    """The row's choices in the steps that `steps` names ("34": ratio and surrogate); the rest is QUIET and `fields`."""
    kept = {name: getattr(row, name) for title, names in STEPS if title[0] in steps for name in names}
    return Row(row.name, **QUIET | kept | fields)


def named(**fields) -> str | None:
    """The first row of the table with these choices: the name that a line carries. None where nobody makes them."""
    return next((name for name, row in ROWS.items() if all(getattr(row, f) == value for f, value in fields.items())), None)


def on_answers(row: Row, logps: np.ndarray, **arrays) -> Evaluation:
    """The row on all answers at once, logps (N, T) or (N,) of one token each; other arrays as make_batch takes them."""
    return objectives.evaluate(row, objectives.make_batch(logps=logps, **arrays))


def slopes(row: Row, logps: np.ndarray, **arrays) -> np.ndarray:
    """d loss / d log p of every token, (N, T), or (N,) for answers of one token."""
    return on_answers(row, logps, **arrays).dloss_dlogps.numpy().reshape(logps.shape)


def same(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two vectors are equal up to EXACT of the second's length (of 1, where that is 0)."""
    second = np.asarray(second, dtype=float)
    length = float(np.linalg.norm(second))
    return float(np.linalg.norm(np.asarray(first) - second)) <= EXACT * (length or 1.0)


def verdict(line: Line, truth: np.ndarray, what: str = "direction") -> str:
    """What the numbers of a line say, in few words."""
    if same(line.mean, truth):
        return "unbiased"
    if line.cosine is None:
        return "mean 0: says nothing" if line.scale is not None else "there the true one is 0"
    if len(line.mean) == 1:
        return f"biased: {line.scale:.4g} times the true one"
    if 1 - line.cosine <= EXACT:
        return f"true {what}, {line.scale:.3g} times as long"
    degrees = math.degrees(math.acos(max(-1.0, line.cosine)))
    return f"turned by {degrees:.3g} degrees" + (": points AWAY from it" if line.cosine < 0 else "")


def told(estimator: str, outcomes, probabilities, truth, row: str | None = None, formula: str = "", more: str = "") -> Line:
    """line_of with a meaning made of the formula, the verdict and `more`."""
    line = line_of(estimator, outcomes, probabilities, truth, row)
    return replace(line, meaning="; ".join(part for part in (formula, verdict(line, truth), more) if part))
