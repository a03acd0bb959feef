"""The robust fit: kappa and kappa beta from one or two tokens, kept where most tokens agree.

A clipped, masked or weighted token is an outlier and costs nothing. A system of two tokens that nearly repeats itself is
refused by its condition number.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

PAIRS = 96  # trial pairs of tokens for a fit of two numbers: where a fifth of the tokens fit, one pair in 25 does
FEWEST = 4  # tokens that must agree with a trial pair, or LEAST of them, whichever is more; of a few tokens, MOST_OF_FEW
LEAST, MOST_OF_FEW = 0.08, 0.6
TRIED_ON = 400  # tokens that trial pairs are judged on
WORST_CONDITION = 1e4
NOISE = 2e-6  # of a KL slope: float32 log-probabilities around 10 differ by this


class Fit(NamedTuple):
    kappa: float
    kb: float  # kappa times the second term's coefficient
    agree: int  # tokens that the fit explains, open or closed
    open: int


def scale_of(kappa: float, kb: float, p: np.ndarray, q: np.ndarray | None, tolerance: float) -> np.ndarray:
    """What each token may be off by."""
    size = abs(kappa * p)
    return tolerance * size if q is None else tolerance * np.maximum(size, abs(kb * q)) + NOISE * abs(kb)


def judge(kappa: float, kb: float, y: np.ndarray, p: np.ndarray, q: np.ndarray | None, tolerance: float) -> Fit:
    rest = y if q is None else y - kb * q
    within = scale_of(kappa, kb, p, q, tolerance)
    is_open = abs(rest - kappa * p) <= within
    is_closed = rest == 0 if q is None else abs(rest) <= tolerance * abs(kb * q) + NOISE * abs(kb)
    return Fit(kappa, kb, int((is_open | is_closed).sum()), int((is_open & (p != 0)).sum()))


def mode(values: np.ndarray, tolerance: float) -> tuple[float, int]:
    """The number that most of the values agree with to a relative tolerance, and how many do."""
    best, count = 0.0, 0
    for sign in (1.0, -1.0):
        logs = np.sort(np.log(sign * values[sign * values > 0]))
        if not len(logs):
            continue
        ends = np.searchsorted(logs, logs + 2 * tolerance, side="right")
        here = ends - np.arange(len(logs))
        start = int(here.argmax())
        if here[start] > count:
            count = int(here[start])
            best = sign * float(np.exp(np.median(logs[start : ends[start]])))
    return best, count


def fit_one(y: np.ndarray, p: np.ndarray, tolerance: float) -> Fit | None:
    """y = kappa p on the tokens that agree."""
    with np.errstate(all="ignore"):
        ratios = y / p
    ratios = ratios[np.isfinite(ratios) & (ratios != 0)]
    if not len(ratios):
        return None
    kappa, _ = mode(ratios, tolerance)
    return _refined(kappa, y, p, tolerance)


def _refined(kappa: float, y: np.ndarray, p: np.ndarray, tolerance: float) -> Fit:
    near = (abs(y - kappa * p) <= 2 * tolerance * abs(kappa * p)) & (p != 0)
    if near.any():
        kappa = float((y[near] @ p[near]) / (p[near] @ p[near]))
    return judge(kappa, 0.0, y, p, None, tolerance)


def fit_two(y: np.ndarray, p: np.ndarray, q: np.ndarray, tolerance: float) -> Fit | None:
    """y = kappa p + kb q on the tokens that agree; tokens with y = kb q count as closed."""
    n = len(y)
    if n < 4:
        return None
    rng = np.random.default_rng(1)
    few = np.arange(n) if n <= TRIED_ON else np.sort(rng.choice(n, TRIED_ON, replace=False))
    yf, pf, qf = y[few], p[few], q[few]
    m = len(few)
    i, j = rng.integers(0, m, PAIRS), rng.integers(0, m, PAIRS)
    with np.errstate(all="ignore"):
        det = pf[i] * qf[j] - pf[j] * qf[i]
        kappa = (yf[i] * qf[j] - yf[j] * qf[i]) / det
        kb = (pf[i] * yf[j] - pf[j] * yf[i]) / det
        size = np.hypot(pf[i], qf[i]) * np.hypot(pf[j], qf[j])
    good = (abs(det) * WORST_CONDITION > size) & np.isfinite(kappa) & np.isfinite(kb) & (kappa != 0)
    kappa, kb = kappa[good], kb[good]
    if not len(kappa):
        return None
    rest = yf - kb[:, None] * qf
    slack = 10 * tolerance * np.maximum(abs(kappa[:, None] * pf), abs(kb[:, None] * qf)) + 10 * NOISE * abs(kb[:, None])
    is_open = (abs(rest - kappa[:, None] * pf) <= slack) & (pf != 0)
    # A closed token shows kb alone; it speaks for the pair only beside open ones.
    is_closed = abs(rest) <= 10 * (tolerance * abs(kb[:, None] * qf) + NOISE * abs(kb[:, None]))
    votes = is_open.sum(1) + (is_closed & ~is_open).sum(1) * (is_open.sum(1) > 2)
    best = int(votes.argmax())
    if votes[best] < min(max(FEWEST, LEAST * m), MOST_OF_FEW * m):
        return None  # two tokens always agree with their own solution
    return _refined_two(kappa[best], kb[best], y, p, q, tolerance)


def is_seen(fit: Fit, y: np.ndarray, p: np.ndarray, q: np.ndarray, tolerance: float) -> bool:
    """Whether both terms are more than rounding on at least three tokens."""
    seen = [int((abs(c * x) > 30 * tolerance * abs(y) + 30 * NOISE * abs(fit.kb)).sum()) for c, x in ((fit.kappa, p), (fit.kb, q))]
    return min(seen) >= min(3, len(y)) and fit.open > 0


def _refined_two(kappa: float, kb: float, y, p, q, tolerance) -> Fit:
    slack = 10.0
    for _ in range(3):
        rest = y - kb * q
        within = slack * scale_of(kappa, kb, p, q, tolerance)
        is_open = (abs(rest - kappa * p) <= within) & (p != 0)
        is_closed = ~is_open & (abs(rest) <= slack * (tolerance * abs(kb * q) + NOISE * abs(kb))) & (y != 0)
        keep = is_open | is_closed
        if keep.sum() < 3:
            break
        M = np.stack([np.where(is_open, p, 0.0)[keep], q[keep]], 1)
        # Every token counts by its own size: the error is relative.
        weight = 1 / np.maximum(abs(y[keep]), 1e-3 * abs(y[keep]).max())
        M, right = M * weight[:, None], y[keep] * weight
        if not (np.isfinite(M).all() and np.isfinite(right).all()):
            break
        try:
            solved, _, rank, singular = np.linalg.lstsq(M, right, rcond=None)
        except np.linalg.LinAlgError:  # numbers too far apart for a solution: the trial pair stands as it is
            break
        if rank < 2 or singular[0] > 1e7 * singular[-1]:
            break
        kappa, kb = float(solved[0]), float(solved[1])
        slack = 3.0
    return judge(kappa, kb, y, p, q, tolerance)
