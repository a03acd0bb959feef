"""Which advantages the loss used, where they are not the recorded ones: another row's, the raw ones, the rewards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from extensions.audit.reading.counts import counts
from extensions.audit.reading.facts import Facts
from extensions.audit.reading.fit import mode

MOST_ROWS = 4096
SAME = 1e-4  # relative: an implied advantage is a recorded one


def variants(f: Facts) -> list[Facts]:
    """The same batch with other recorded numbers in the place of the advantages."""
    found = []
    arrays = f.recording.arrays
    for name in ("advantages_raw", "rewards", "returns"):
        x = arrays.get(name)
        if x is None or x.shape not in (f.mask.shape, (len(f.l),), (len(f.l), 1)) or not np.isfinite(x).all():
            continue
        x = x.reshape(len(f.l), -1) if x.shape != f.mask.shape else x
        if not np.allclose(np.broadcast_to(x, f.mask.shape)[f.mask], np.broadcast_to(f.A, f.mask.shape)[f.mask]):
            found.append(replace(f, A=x, A_name=name))
    order = other_rows(f)
    if order is not None:
        found.append(replace(f, A=f.row_A[order][:, None], A_name="another row's", A_rows=order))
    return found


def other_rows(f: Facts) -> np.ndarray | None:
    """order with: the gradient of row i is that of the advantage of row order[i]. None: no such order is seen."""
    n = len(f.l)
    A = f.row_A
    if n > MOST_ROWS or n < 3 or np.ptp(np.where(f.mask, f.A - A[:, None], 0.0)) > 1e-6 or not A.any():
        return None
    r = np.exp(np.clip(f.l - f.old, -80, 80)) if f.old is not None else np.ones_like(f.l)
    implied = np.full(n, np.nan)
    for i in range(n):
        here = f.mask[i] & (f.g[i] != 0)
        if here.any():
            implied[i], votes = mode(-(f.g[i] / r[i])[here], f.tolerance)
    alive = np.isfinite(implied)
    if alive.sum() < 3:
        return None
    sorted_A = np.argsort(A)
    for law in (np.ones(n), 1 / f.lengths):
        for count in dict.fromkeys(counts(f).values()):
            wanted = implied / law * count
            place = np.clip(np.searchsorted(A[sorted_A], wanted[alive]), 1, n - 1)
            left, right = sorted_A[place - 1], sorted_A[place]
            nearest = np.where(abs(A[left] - wanted[alive]) < abs(A[right] - wanted[alive]), left, right)
            if (abs(A[nearest] - wanted[alive]) > SAME * abs(A[nearest])).any():
                continue
            order = np.arange(n)
            order[alive] = nearest
            order[~alive] = _left_over(order[alive], np.flatnonzero(~alive))
            own = abs(A[order] - A) <= SAME * abs(A)
            if (~own[alive]).sum() >= 2:
                # Rows with the same advantage are taken in order, so that each is used once where it can be.
                return order
    return None


def _left_over(taken: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """For rows without an open token, by elimination: an advantage that no other row has, its own where that is left."""
    left = [i for i in range(len(taken) + len(rows)) if i not in set(taken.tolist())]
    own = [row for row in rows.tolist() if row in left]
    others = iter([i for i in left if i not in own])
    return np.array([row if row in own else next(others, row) for row in rows.tolist()], dtype=int)
