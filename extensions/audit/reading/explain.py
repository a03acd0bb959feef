"""One guess (gate, weight, row law, second term) worked out on a view: what each token is, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from extensions.audit.reading import closed as closed_tokens
from extensions.audit.reading.closed import Threshold
from extensions.audit.reading.factors import Factor, leftovers
from extensions.audit.reading.facts import Facts, Tokens, is_rollout
from extensions.audit.reading.fit import NOISE, Fit, scale_of
from extensions.audit.reading.gates import GATES, KL_FORMS, LAWS, LIKELIHOOD
from extensions.audit.reading.solved import SolvedGate

NO_WEIGHT = "1"


def weights(f: Facts) -> dict[str, object]:
    """Name -> function of a view: constant factors that a recorded array may be."""
    made = {NO_WEIGHT: lambda t: 1.0}
    for name, x in f.extras.items():
        per_token = x.shape == f.mask.shape and f.mask.shape[1] > 1
        counted = x[f.mask] if per_token else x
        if is_rollout(name, counted):
            made[f"exp(old - {name})"] = lambda t, x=x: np.exp(np.clip(t.old - t.take(x), -80, 80))
            if per_token and f.old is not None:
                gap = f.row_sum(f.old - x)
                made[f"exp(mean over the answer of old - {name})"] = lambda t, v=np.exp(gap / f.lengths): v[t.row]
                made[f"exp(sum over the answer of old - {name})"] = lambda t, v=np.exp(np.clip(gap, -80, 80)): v[t.row]
        elif (counted >= 0).all() and np.ptp(counted) > 1e-9 and counted.max() < 1e6:
            made[name] = lambda t, x=x: t.take(x)
    return made


def row_mean_of(f: Facts, anchor: str, fn) -> np.ndarray:
    """Mean over each answer of a function of l minus an anchor's log-probability."""
    other = {"ref": f.ref, "old": f.old}.get(anchor)
    return f.row_mean(fn(np.where(f.mask, f.l - (f.extras[anchor] if other is None else other), 0.0)))


@dataclass
class Guess:
    facts: Facts
    gate: str
    law: str
    weight: str = NO_WEIGHT
    form: str | None = None
    anchor: str | None = None
    fit: Fit | None = None
    solved: SolvedGate | None = None  # a gate with constants of its own, instead of GATES[gate]
    ties: list["Guess"] = field(default_factory=list)  # other gates and laws with the same gradient on this batch

    def parts(self, t: Tokens) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
        """y = g / law, p and q with y = kappa p + kb q, and the law at each token."""
        law = LAWS[self.law][1](self.facts)[t.row]
        slope = self.solved.slope(t) if self.solved else GATES[self.gate].slope(t)
        p = -slope * weights(self.facts)[self.weight](t)
        return t.g / law, p, self.second(t), law

    def second(self, t: Tokens) -> np.ndarray | None:
        if self.form is None:
            return None
        t.mean_of = lambda fn: row_mean_of(self.facts, self.anchor, fn)[t.row]
        form = KL_FORMS.get(self.form) or LIKELIHOOD[self.form]
        return form.slope(t.anchor(self.anchor) if self.anchor else t.l, t) * np.ones(len(t.l))


@dataclass
class Account:
    """What each token of a view is under a guess."""

    guess: Guess
    t: Tokens
    p: np.ndarray
    q: np.ndarray | None
    law: np.ndarray
    h: np.ndarray  # its policy gradient over the read one; 1 open, 0 closed
    is_closed: np.ndarray
    thresholds: list[Threshold] = field(default_factory=list)
    factors: list[Factor] = field(default_factory=list)
    unexplained: np.ndarray = None
    uncovered: np.ndarray = None
    silent: np.ndarray = None  # the formula gives it nothing, and it has nothing

    @cached_property
    def cost(self) -> float:
        g = self.guess
        price = list(GATES).index(g.gate) * 0.05 if g.gate in GATES else 0.5 + 0.5 * len(g.solved.numbers)
        price += list(LAWS).index(g.law) * 0.02 + (1.2 if g.weight != NO_WEIGHT else 0)
        if g.form:
            price += 1.2 + 0.03 * (list(KL_FORMS) + list(LIKELIHOOD)).index(g.form) + (0.3 if g.anchor != "ref" else 0)
        price += sum(0.6 if x.natural else 1.2 for x in self.thresholds)
        price += sum(1.2 if x.kind != "row" else 2 + x.inside.sum() / 2 for x in self.factors)
        if g.fit.kappa < 0:
            price += 1.0
        return price + float(self.unexplained.sum() + self.uncovered.sum())

    def levels(self) -> dict[str, np.ndarray]:
        return levels(self.guess, self.t)


def levels(g: Guess, t: Tokens) -> dict[str, np.ndarray]:
    """What a cap may stop: the ratio, the weight, their product."""
    made = {}
    if g.facts.old is not None and g.gate in GATES and g.gate != "none":
        made["ratio"] = GATES[g.gate].level(t)
    if g.weight != NO_WEIGHT:
        w = weights(g.facts)[g.weight](t)
        made[g.weight] = w
        if "ratio" in made:
            made[f"ratio x {g.weight}"] = w * made["ratio"]
    return made


def split(guess: Guess, t: Tokens):
    y, p, q, law = guess.parts(t)
    fit, tolerance = guess.fit, guess.facts.tolerance
    rest = y if q is None else y - fit.kb * q
    within = scale_of(fit.kappa, fit.kb, p, q, tolerance)
    quiet = abs(rest) <= (1e-7 * abs(fit.kappa * p) if q is None else tolerance * abs(fit.kb * q) + NOISE * abs(fit.kb))
    # Far outside float32's reach of the answer's own size: nothing can be said of such a token.
    silent = quiet & (abs(fit.kappa * p) <= (1e-12 * abs(fit.kappa) if q is None else within))
    is_open = (abs(rest - fit.kappa * p) <= within) & ~silent & (p != 0)
    is_closed = quiet & ~is_open & ~silent
    with np.errstate(all="ignore"):
        h = np.where(p != 0, rest / (fit.kappa * p), np.inf)
    h = np.where(is_open, 1.0, np.where(is_closed, 0.0, h))
    return y, p, q, law, h, is_open, is_closed, silent


def explain(guess: Guess, t: Tokens) -> Account:
    """Every token of the view: open, closed by a threshold, of another size by a factor, or unexplained."""
    y, p, q, law, h, is_open, is_closed, silent = split(guess, t)
    left = ~(is_open | is_closed | silent)
    made = Account(guess, t, p, q, law, h, is_closed, silent=silent)
    tolerance = guess.facts.tolerance * (20 if q is not None else 1)
    possible = left & np.isfinite(h)
    if possible.any():
        alive = is_open | possible
        made.factors, rest = leftovers(np.where(np.isfinite(h), h, 1), possible, alive, t.A, t.row, levels(guess, t), tolerance)
        made.unexplained = rest | (left & ~possible)
    else:
        made.unexplained = left
    made.uncovered = np.zeros(len(h), bool)
    if is_closed.any():
        made.thresholds, made.uncovered = closed_tokens.cover(
            is_closed, is_open | left, t.A, closed_tokens.quantities(t, guess.gate))
    return made


def has_quantities(guess: Guess, found: Account, t: Tokens) -> bool:
    """Whether a guess has every quantity that the thresholds and bounds of an account name: a tie of another gate may not."""
    bounds = {x.quantity for x in found.factors if x.kind in ("cap", "floor")}
    thresholds = {x.quantity for x in found.thresholds}
    return bounds <= levels(guess, t).keys() and thresholds <= closed_tokens.quantities(t, guess.gate).keys()


def confirm(found: Account, t: Tokens) -> Account:
    """The same account on all tokens: thresholds and factors are held fixed, their brackets tightened."""
    guess = found.guess
    y, p, q, law, h, is_open, is_closed, silent = split(guess, t)
    left = ~(is_open | is_closed | silent)
    made = Account(guess, t, p, q, law, h, is_closed, silent=silent)
    sides = closed_tokens.sides_of(t.A)
    rest = is_closed.copy()
    if found.thresholds:
        table = closed_tokens.quantities(t, guess.gate)
        hits = []
        for x in found.thresholds:
            v = table[x.quantity] if x.above else -table[x.quantity]
            member = sides[x.side]
            on = v[(is_open | left) & member]
            edge = on.max() if len(on) else -np.inf
            # One slot of a million may lie on the edge itself: the sample's bracket stands.
            first = min(abs(x.high), np.inf) if x.above else -x.high
            hits.append((v, edge, first, is_closed & member & (v > edge)))
        for x, (v, edge, first, hit) in zip(found.thresholds, hits):
            others = [h[3] for y, h in zip(found.thresholds, hits) if y.quantity != x.quantity]
            own = hit & ~np.logical_or.reduce(others) if others else hit  # closed by this threshold and by no other
            low, high = (edge, v[own if own.any() else hit].min()) if hit.any() else (edge, first)
            low, high = (low, high) if x.above else (-low, -high)
            made.thresholds.append(Threshold(x.side, x.quantity, x.above, float(low), float(high), int(hit.sum()), x.natural))
            rest &= ~hit
    made.uncovered = rest
    named = levels(guess, t)
    for x in found.factors:
        if x.kind in ("cap", "floor"):
            e = h * named[x.quantity]
            inside = left & sides[x.side] & (abs(e - x.value) <= 40 * guess.facts.tolerance * abs(x.value))
        elif x.kind == "side":
            inside = left & sides[x.side] & (abs(h - x.value) <= 40 * guess.facts.tolerance * abs(x.value))
        else:
            inside = left
        made.factors.append(Factor(x.kind, x.quantity, x.side, x.value, int(inside.sum()), inside=inside))
        left = left & ~inside
    made.unexplained = left
    return made
