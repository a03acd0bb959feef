"""All outcomes of a draw with their chances: groups without order, tuples with it. Bounded, so that memory is.

A group of G answers out of K has (K + G - 1)! / (G! (K - 1)!) outcomes without order, K^G with it.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple, Sequence

import numpy as np

LIMIT = 5_000_000  # outcomes that are enumerated at most
NUMBERS = 20_000_000  # and numbers that one array over all outcomes may hold: a gradient, or the places of a group


class TooMany(ValueError):
    """An enumeration that would not fit; one line with the count and what to lower."""


class Outcomes(NamedTuple):
    """members (M, G): which answer stands at each place. probabilities (M,), sum one."""

    members: np.ndarray
    probabilities: np.ndarray


def check_count(count: int, each: int, lower: str) -> None:
    """Refuse more than LIMIT outcomes, or NUMBERS numbers of `each` an outcome. Raises TooMany, count and what to lower."""
    if count > LIMIT:
        raise TooMany(f"{count:,} outcomes to enumerate, wanted at most {LIMIT:,}: lower {lower}")
    if count * each > NUMBERS:
        raise TooMany(f"{count:,} outcomes of {each} numbers each, wanted at most {NUMBERS:,} numbers: lower {lower}")


def multisets(p: Sequence[float], group_size: int) -> Outcomes:
    """Every group of G independent draws from p, order left out: chance G! / (c_1! ... c_K!) * p_1^c_1 ... p_K^c_K.

    For what depends on a group as a set: every estimator that treats its answers alike. Members are sorted.
    Raises TooMany beyond LIMIT.
    """
    p = np.asarray(p, dtype=float)
    answers = len(p)
    count = math.comb(answers + group_size - 1, group_size)
    check_count(count, max(answers, group_size), f"the group size ({group_size}) or the number of answers ({answers})")
    chosen = itertools.chain.from_iterable(itertools.combinations_with_replacement(range(answers), group_size))
    members = np.fromiter(chosen, dtype=np.int16, count=count * group_size).reshape(count, group_size)
    # G! / (c_1! ... c_K!) as a product of binomials, each beside its power, so that no factor overflows.
    choose = np.zeros((group_size + 1, group_size + 1))  # Pascal's triangle
    choose[:, 0] = 1.0
    for n in range(1, group_size + 1):
        choose[n, 1:] = choose[n - 1, 1:] + choose[n - 1, :-1]
    probabilities, left = np.ones(count), np.full(count, group_size)
    for answer in range(answers):
        times = (members == answer).sum(axis=1)
        probabilities *= choose[left, times] * p[answer] ** times
        left -= times
    return Outcomes(members, probabilities)


def tuples(p: Sequence[float] | Sequence[Sequence[float]], draws: int) -> Outcomes:
    """Every ordered tuple of `draws` independent draws: from p (K,), or draw t from p[t], (draws, K). Chance: the product.

    For what depends on the order. Raises TooMany beyond LIMIT.
    """
    p = np.asarray(p, dtype=float)
    rows = np.broadcast_to(p, (draws, len(p))) if p.ndim == 1 else p
    answers = rows.shape[1]
    check_count(answers**draws, max(answers, draws), f"the number of draws ({draws}) or of answers ({answers})")
    members = np.indices((answers,) * draws).reshape(draws, -1).T
    return Outcomes(members, rows[np.arange(draws), members].prod(axis=1))


def pairs(first: Outcomes, second: Outcomes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two independent draws together: indices into the first and the second, and the chances of both. Raises TooMany."""
    count = len(first.probabilities) * len(second.probabilities)
    check_count(count, 1, "the group size or the number of answers")
    left, right = (index.ravel() for index in np.indices((len(first.probabilities), len(second.probabilities))))
    return left, right, first.probabilities[left] * second.probabilities[right]
