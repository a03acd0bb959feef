"""Tokens without a gradient, covered by as few thresholds as possible, each on one quantity and one side of A.

A threshold is a bracket: the last value that kept its gradient and the first that lost it.
A new quantity is one line in `quantities`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from extensions.audit.reading.facts import Facts, Tokens, is_rollout
from extensions.audit.reading.gates import GATES

SIDES = ("A > 0", "A < 0", "any A")


@dataclass
class Threshold:
    side: str
    quantity: str
    above: bool  # closed above it, else below
    low: float
    high: float
    tokens: int
    natural: bool = False  # what a clip does: A > 0 above, A < 0 below, or A < 0 above (dual clip)

    def as_json(self) -> dict:
        return {"side": self.side, "quantity": self.quantity, "above": self.above, "low": self.low, "high": self.high,
                "tokens": self.tokens}

    def words(self) -> str:
        relation = ">" if self.above else "<"
        names = {1: "1 token"}
        what = names.get(self.tokens, f"{self.tokens} tokens")
        return f"{self.side}: no gradient where {self.quantity} {relation} {self.low:.6g}..{self.high:.6g} ({what})"


RATIO = "ratio"
MOVES = (RATIO, "p - p_old", "KL of token against rest, old to new")
"""Quantities that a trust region is drawn in: closed above where A > 0, below where A < 0."""


def quantities(t: Tokens, gate: str) -> dict[str, np.ndarray]:
    """Name -> value at every token, likeliest first."""
    f = t.facts
    made: dict[str, np.ndarray] = {}
    if f.old is not None:
        made[RATIO] = GATES[gate].level(t) if gate in GATES else t.r
        p, p0 = np.exp(np.minimum(t.l, 0)), np.exp(np.minimum(t.old, 0))
        if gate != "token":
            made["token ratio r"] = t.r
        made["p - p_old"] = p - p0
        with np.errstate(all="ignore"):
            made["KL of token against rest, old to new"] = np.nan_to_num(
                np.sign(p - p0) * (p0 * (t.old - t.l) + (1 - p0) * np.log((1 - p0 + 1e-8) / (1 - p + 1e-8))))
        made["mean over the answer of l0 - l"] = -t.mean_gap
    made |= structure(t)
    for name, values in f.extras.items():
        v = t.take(values)
        if is_rollout(name, f.extras[name][f.mask] if f.extras[name].shape == f.mask.shape else f.extras[name]):
            gap = t.old - v
            made[f"exp(old - {name})"] = np.exp(np.clip(gap, -80, 80))
            made[f"exp(logps - {name})"] = np.exp(np.clip(t.l - v, -80, 80))
            if f.extras[name].shape == f.mask.shape and f.old is not None:
                rows = f.row_sum(f.old - f.extras[name])
                made[f"mean over the answer of old - {name}"] = (rows / f.lengths)[t.row]
                made[f"sum over the answer of old - {name}"] = rows[t.row]
                made[f"largest exp(old - {name}) of the answer"] = np.where(f.mask, np.exp(f.old - f.extras[name]), 0).max(1)[t.row]
                made[f"smallest exp(old - {name}) of the answer"] = np.where(f.mask, np.exp(f.old - f.extras[name]), np.inf).min(1)[t.row]
            made[f"p_old - p_{name}"] = np.exp(np.minimum(t.old, 0)) - np.exp(np.minimum(v, 0))
        else:
            made[name] = v
    ent = f.recording.arrays.get("entropies")
    if ent is not None:
        made["entropy"] = np.nan_to_num(t.take(ent))
    A, l = t.A, t.l
    made["covariance of logp and A"] = (l - l.mean()) * (A - A.mean())
    return made


def structure(t: Tokens) -> dict[str, np.ndarray]:
    """What is known of a slot without its numbers: place, answer, flags."""
    f, arrays = t.facts, t.facts.recording.arrays
    counted = f.mask
    width = counted.shape[1]
    last = np.where(counted.any(1), width - 1 - counted[:, ::-1].argmax(1), 0)
    first = np.where(counted.any(1), counted.argmax(1), 0)
    made = {
        "tokens to the answer's end": (last[t.row] - t.position).astype(float),
        "tokens from the answer's start": (t.position - first[t.row]).astype(float),
        "length of the answer": t.T,
    }
    for name in ("rewards", "row_truncated", "labels"):
        if name in arrays and arrays[name].shape == (len(f.l),):
            made[{"rewards": "reward", "row_truncated": "truncated answer"}.get(name, name)] = np.nan_to_num(
                arrays[name].astype(float))[t.row]
    if "row_truncated" not in made and width > 1:
        made["answer that fills the width"] = (last == width - 1).astype(float)[t.row]
    if "completion_ids" in arrays and arrays["completion_ids"].shape == counted.shape:
        from extensions.audit.read.masks import eos_ids

        ends = eos_ids(f.recording)
        if ends is not None:
            made["end-of-sequence token"] = np.isin(t.take(arrays["completion_ids"]), ends).astype(float)
    return made


def sides_of(A: np.ndarray) -> dict[str, np.ndarray]:
    return {"A > 0": A > 0, "A < 0": A < 0, "any A": np.ones(len(A), bool)}


def cover(closed: np.ndarray, alive: np.ndarray, A: np.ndarray, table: dict[str, np.ndarray]) -> tuple[list[Threshold], np.ndarray]:
    """Thresholds that explain the closed tokens, and the closed tokens that none explains: the cheaper of two orders."""
    options = [_greedy(closed, alive, A, table, first) for first in ((), MOVES[:1], MOVES)]
    return min(options, key=lambda x: (sum(0.6 if y.natural else 1.4 for y in x[0]) + x[1].sum()))


def _greedy(closed, alive, A, table, first: tuple[str, ...]) -> tuple[list[Threshold], np.ndarray]:
    """Always the threshold that covers most; those a clip makes on the quantities of `first` before all others."""
    left, found = closed.copy(), []
    sides = sides_of(A)
    only = bool(first)
    while left.any() and len(found) < 6:
        best = None
        for place, (name, values) in enumerate(table.items()):
            if only and name not in first:
                continue
            for side, member in sides.items():
                for above in (True, False):
                    made = _threshold(name, place, values, side, member, above, closed, alive, left)
                    if made and (made[1].natural or not only) and (best is None or made[0] > best[0]):
                        best = made
        if best is None or best[0] <= 0:
            if not only:
                break
            only = False
            continue
        found.append(best[1])
        left &= ~best[2]
    return found, left


def _threshold(name, place, values, side, member, above, closed, alive, left):
    """(score, threshold, tokens it closes) of one quantity on one side; None where it covers nothing that is left."""
    v = values if above else -values
    on = v[alive & member]
    edge = on.max() if len(on) else -np.inf
    hit = closed & member & (v > edge)
    gained = int((hit & left).sum())
    if not gained:
        return None
    beyond = v[hit].min()
    still = 1.0 if name == RATIO else 0.0  # where the policy has not moved
    outward = beyond >= still - 1e-6 if above else -beyond <= still + 1e-6
    usual = above == (side == "A > 0")
    natural = name in MOVES and side != "any A" and outward and (usual or above and name == RATIO)
    price = 0.5 + 0.1 * MOVES.index(name) if natural and usual else 0.9 if natural else 1.5 + 0.05 * place + 0.3 * (side != "any A")
    bounds = (edge, beyond) if above else (-edge, -beyond)
    return gained - price, Threshold(side, name, above, *map(float, bounds), int(hit.sum()), natural), hit
