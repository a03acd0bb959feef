"""The loss predicted from what was read, against the recorded one. Nothing was fitted to it except widths of a clip."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np

from extensions.audit.reading.digits import round_between
from extensions.audit.reading.closed import RATIO
from extensions.audit.reading.explain import Account, weights
from extensions.audit.reading.gates import GATES, KL_FORMS, LIKELIHOOD

VALUE_AGREES = 1e-5  # of the sum of the terms' sizes; float32 sums of a thousand terms are off by less


@dataclass
class Value:
    predicted: float | None
    recorded: float | None
    agrees: bool | None  # None: no loss recorded
    policy: str = ""  # which value of the gate
    second: str = ""  # which value of the KL form
    edges: list[float | None] = field(default_factory=list)  # of each threshold, where solved or confirmed
    solved: int = 0  # widths that were fitted to this one number
    factor: str = ""
    dropped: list[int] = field(default_factory=list)  # thresholds whose tokens count 0 in the value


def edge_candidates(threshold, number) -> list[float]:
    low, high = sorted((threshold.low, threshold.high))
    slack = 2e-6 * max(abs(low if math.isfinite(low) else high), 1e-3)
    made = [1 + number("clip_high", math.nan), 1 - number("clip_low", math.nan), number("ratio_cap", math.nan),
            1 + number("clip_low", math.nan), 1 - number("clip_high", math.nan)]
    made = [x for x in made if low - slack <= x <= high + slack]
    if math.isfinite(low) and math.isfinite(high) and high > low:
        shift = 1.0 if threshold.quantity == RATIO else 0.0
        rounded = round_between(abs(low - shift), abs(high - shift)) if (low - shift) * (high - shift) > 0 else None
        lo2, hi2 = sorted((abs(low - shift), abs(high - shift)))
        if lo2 < hi2 and (low - shift) * (high - shift) > 0:
            rounded = round_between(lo2, hi2)
            made.append(shift + math.copysign(rounded, low - shift))
    return list(dict.fromkeys(made))


def predict(account: Account, other_terms: float, blind: bool = False) -> Value:
    """other_terms: entropy bonus and critic's loss, already weighed. blind: without looking at the recorded loss."""
    guess, t = account.guess, account.t
    recorded = None if blind else guess.facts.recording.number("loss")
    kappa, kb = guess.fit.kappa, guess.fit.kb
    w = weights(guess.facts)[guess.weight](t) * np.ones(len(t.l))
    seconds = {"": np.zeros(len(t.l))}
    if guess.form:
        form = KL_FORMS.get(guess.form) or LIKELIHOOD[guess.form]
        d = t.anchor(guess.anchor) if guess.anchor else t.l
        seconds = {name: fn(d, t) for name, fn in form.values.items()}
    values = guess.solved.values if guess.solved else GATES[guess.gate].values
    t.mean_of = None
    h = np.where(account.is_closed, 0.0, np.where(account.silent, 1.0, np.where(np.isfinite(account.h), account.h, 0.0)))
    if guess.solved and guess.solved.keeps_closed:
        h = np.where(account.is_closed, 1.0, h)
    # Tokens closed by each threshold, the first that closes them.
    from extensions.audit.reading.closed import quantities, sides_of

    closing, edges = [], []
    if account.thresholds and not (guess.solved and guess.solved.keeps_closed):
        table, sides = quantities(t, guess.gate), sides_of(t.A)
        for x in account.thresholds:
            v = table[x.quantity]
            closing.append(account.is_closed & sides[x.side] & ((v > x.low) if x.above else (v < x.low)))
            edges.append(x)
    weight = account.law * w * t.A
    best = None
    for (policy, value), (second, kl) in itertools.product(values.items(), seconds.items()):
        J = np.nan_to_num(value(t) * w * h)
        terms = -kappa * account.law * J + (kb * account.law * kl)
        fixed = float(terms.sum()) + other_terms
        size = float(abs(terms).sum()) + abs(other_terms) + abs(kappa) * float(abs(weight[account.is_closed]).sum())
        slack = VALUE_AGREES * (guess.facts.tolerance / 3e-5) * size + 1e-9
        made = _best_edges(fixed, -kappa, weight, closing, edges, recorded, slack, guess.facts.recording.number)
        made.policy, made.second = policy, second
        if made.agrees or recorded is None:
            return made
        made.factor = _factor(guess.facts, made.predicted, recorded, slack)
        if made.factor:
            made.agrees = True
            return made
        if best is None or abs(made.predicted - recorded) < abs(best.predicted - recorded):
            best = made
    return best


def _factor(facts, predicted: float, recorded: float, slack: float) -> str:
    from extensions.audit.reading.counts import recorded_factors

    if abs(predicted) < 10 * slack:
        return ""
    for name, value in recorded_factors(facts).items():
        for power, text in ((1, f"the loss was recorded before / {name}"), (-1, f"the loss was recorded before x {name}")):
            if abs(predicted * value**power - recorded) <= slack * value:
                return text
    return ""


def _best_edges(fixed, scale, weight, closing, thresholds, recorded, slack, number) -> Value:
    """A token closed by a clip has its threshold times A as value; one that was dropped has 0: each is tried for each."""
    best = None
    ratio = [k for k, x in enumerate(thresholds) if x.quantity == RATIO]
    always = [k for k, x in enumerate(thresholds) if x.quantity != RATIO]
    for few in itertools.chain.from_iterable(itertools.combinations(ratio, n) for n in range(min(len(ratio), 3) + 1)):
        dropped = [*always, *few]
        taken = np.zeros(len(weight), bool)
        for k in dropped:
            taken |= closing[k]
        parts = [0.0] * len(thresholds)
        for k in ratio:
            if k not in few:
                parts[k] = float(weight[closing[k] & ~taken].sum())
                taken = taken | closing[k]
        made = _with_edges(fixed, scale, parts, thresholds, recorded, slack, number)
        made.dropped = dropped
        if made.agrees or recorded is None:
            return made
        if best is None or abs(made.predicted - recorded) < abs(best.predicted - recorded):
            best = made
    return best


def _with_edges(fixed, scale, parts, thresholds, recorded, slack, number) -> Value:
    unknown = [k for k, part in enumerate(parts) if part != 0.0]
    options = {k: edge_candidates(thresholds[k], number) for k in unknown}
    edges: list[float | None] = [None] * len(parts)
    if not unknown or recorded is None:
        guess = [options[k][0] if k in options and options[k] else _middle(thresholds[k]) if k in options else 0.0 for k in range(len(parts))]
        total = fixed + scale * sum(e * p for e, p in zip(guess, parts))
        agrees = None if recorded is None else abs(total - recorded) <= slack
        return Value(total, recorded, agrees, edges=edges)
    nearest = None
    for chosen in itertools.islice(itertools.product(*[options[k] or [_middle(thresholds[k])] for k in unknown]), 200):
        total = fixed + scale * sum(e * parts[k] for e, k in zip(chosen, unknown))
        if abs(total - recorded) <= slack:
            for e, k in zip(chosen, unknown):
                edges[k] = e
            return Value(total, recorded, True, edges=edges)
        if nearest is None or abs(total - recorded) < abs(nearest[0] - recorded):
            nearest = (total, chosen)
    # One width is solved from the one number; two only as a symmetric pair, or as a range that reaches it.
    rest = recorded - fixed
    if len(unknown) == 1:
        k = unknown[0]
        e = rest / (scale * parts[k])
        room = slack / abs(scale * parts[k])
        if _inside(e, thresholds[k], room):
            edges[k] = e
            return Value(recorded, recorded, True, edges=edges, solved=1)
    if len(unknown) == 2:
        a, b = unknown
        with np.errstate(all="ignore"):
            signs = [1 if thresholds[k].above else -1 for k in (a, b)]
            down = signs[0] * parts[a] + signs[1] * parts[b]
            width = (rest / scale - parts[a] - parts[b]) / down if down else math.nan
        if all(_inside(1 + s * width, thresholds[k], slack / max(abs(scale * down), 1e-300)) for s, k in zip(signs, unknown)):
            edges[a], edges[b] = 1 + signs[0] * width, 1 + signs[1] * width
            return Value(recorded, recorded, True, edges=edges, solved=1)
    ends = [sorted((thresholds[k].low * scale * parts[k], thresholds[k].high * scale * parts[k])) for k in unknown]
    low, high = fixed + sum(e[0] for e in ends), fixed + sum(e[1] for e in ends)
    if math.isfinite(low) and math.isfinite(high) and low - slack <= recorded <= high + slack and len(unknown) > 1:
        return Value(recorded, recorded, True, edges=edges, solved=len(unknown))
    for e, k in zip(nearest[1], unknown):
        edges[k] = e
    return Value(nearest[0], recorded, False, edges=edges)


def _middle(x) -> float:
    low, high = x.low, x.high
    if not math.isfinite(low):
        return high
    return (low + high) / 2


def _inside(e: float, x, room: float) -> bool:
    low, high = sorted((x.low, x.high))
    return math.isfinite(e) and low - room - 2e-6 <= e <= high + room + 2e-6
