"""From a reading to named mistakes: each is an edit of one factor, so two mistakes at once are two factors read apart.

`named(reading)` returns (name, severity, evidence) with names of the audit's catalogue. A factor without a name is
printed as a formula and is no finding.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from extensions.audit.reading.closed import RATIO
from extensions.audit.reading.gates import GATES, KL_FORMS, LIKELIHOOD
from extensions.audit.reading.reading import Reading
from extensions.audit.reading.written import written_out


class Named(NamedTuple):
    name: str
    severity: str
    evidence: str
    rows: tuple[int, ...] = ()


def named(reading: Reading) -> list[Named]:
    """Mistakes in the factors that were read. Nothing is said of a reading that leaves many tokens open."""
    if reading.gate is None:
        return []
    found = _factor_by_factor(reading)
    if found or not reading.complete:
        whole = written_out(reading.account.guess.facts, reading.value_recorded)
        if whole is not None:
            return [Named(whole[0], "mistake", whole[1])]
    return found


def _factor_by_factor(reading: Reading) -> list[Named]:
    if not _is_close(reading):
        return []
    found = [*_mask(reading), *_sign(reading), *_advantages(reading)]
    if reading.value_agrees is not False:  # a mistake of the loss itself must give the reported value, too
        found += [*_gate(reading), *_clip(reading), *_kl(reading)]
    found += _value(reading)
    return list({x.name: x for x in found}.values())


def _is_close(r: Reading) -> bool:
    return r.unexplained_tokens <= 0.02 * len(r.account.h) and not any(x.kind == "row" for x in r.factors)


def _mask(r: Reading) -> list[Named]:
    if r.mask != "recorded":
        return [Named(r.mask, "mistake", f"The gradient is accounted for on that mask: {r.unexplained_tokens} tokens are left.")]
    for x in r.closed:
        if x.side == "any A" and x.quantity in ("tokens to the answer's end", "end-of-sequence token") and x.tokens >= 2:
            is_last = x.quantity == "end-of-sequence token" and x.above or not x.above and x.high < 1
            if is_last:
                return [Named("eos_dropped", "mistake", f"{x.tokens} last tokens are counted and have no gradient.")]
    return []


def _sign(r: Reading) -> list[Named]:
    if r.sign < 0 and r.value_agrees is not False:
        return [Named("loss_sign", "mistake", "Gradient and value are those of + A: the advantage is pushed down.")]
    return []


def _advantages(r: Reading) -> list[Named]:
    f = r.account.guess.facts
    if f.A_rows is not None:
        rows = np.flatnonzero(f.A_rows != np.arange(len(f.A_rows)))
        shown = ", ".join(f"{i} has that of {f.A_rows[i]}" for i in rows[:6])
        return [Named("advantages_of_other_rows", "mistake", f"Row {shown}{' ...' if len(rows) > 6 else ''}.", tuple(map(int, rows)))]
    if r.advantages != "advantages":
        return [Named("advantages_not_used", "mistake", f"The gradient follows {r.advantages}, not the recorded advantages.")]
    return []


def _gate(r: Reading) -> list[Named]:
    mistake = GATES[r.gate].mistake if r.gate in GATES else None
    return [Named(mistake, "mistake", f"The gradient is that of: {GATES[r.gate].words}.")] if mistake else []


def _clip(r: Reading) -> list[Named]:
    """What is closed on which side. A > 0 above and A < 0 below is a clip; A < 0 above too is a dual clip."""
    dropped = r.value.dropped if r.value else ()  # tokens that count 0 in the value were left out, not clipped
    on = {(x.side, x.above): x for k, x in enumerate(r.closed) if x.quantity == RATIO and k not in dropped}
    inner = [x for (side, above), x in on.items() if side == "A > 0" and not above and x.tokens >= 1]
    usual = [x for (side, above), x in on.items() if side != "any A" and above == (side == "A > 0")]
    both = [x for (side, above), x in on.items() if side == "any A" and _closes_both_signs(r, x)]
    if inner and usual or both:
        worst = (inner or both)[0]
        return [Named("clip_without_min", "mistake", f"No gradient on the side where the clip must keep it: {worst.words()}.")]
    if inner:
        return [Named("max_for_min", "mistake", f"Closed only where the clip must keep its gradient: {inner[0].words()}.")]
    return _widths(r, on)


def _closes_both_signs(r: Reading, x) -> bool:
    """Whether this threshold closes tokens of either sign of A, at least two each: one sign alone is a usual clip."""
    t = r.account.t
    level = GATES[r.gate].level(t) if r.gate in GATES else t.r
    closed = t.A[r.account.is_closed & ((level > x.low) if x.above else (level < x.low))]
    return bool((closed > 0).sum() >= 2 and (closed < 0).sum() >= 2)


def _widths(r: Reading, on: dict) -> list[Named]:
    number = r.account.guess.facts.recording.number
    low, high = number("clip_low"), number("clip_high")
    low = high if low is None else low
    high = low if high is None else high
    if low is None or r.account.guess.solved is not None:
        return []
    if r.complete and any(x.quantity != RATIO for x in r.closed):
        return []  # the recorded widths are those of another quantity, and the loss is explained in full
    wanted = {("A > 0", True): 1 + high, ("A < 0", False): 1 - low}
    exchanged = {("A > 0", True): 1 + low, ("A < 0", False): 1 - high}
    off = [k for k, x in on.items() if k in wanted and not _holds(x, wanted[k])]
    off += [k for k in wanted if k not in on and _crossed(r, k, wanted[k])]
    if not off or r.gate not in ("token", "sequence_mean", "sequence_mean_token"):
        return []
    if low != high and all(_holds(on[k], exchanged[k]) for k in off if k in on) and any(k in on for k in off):
        return [Named("clip_sides_swapped", "mistake", f"Recorded widths {low:g} and {high:g}; {'; '.join(on[k].words() for k in off if k in on)}.")]
    seen = "; ".join(on[k].words() if k in on else f"{k[0]}: no clip is seen" for k in off)
    return [Named("clip_range_differs", "warning", f"Recorded clip_low {low:g}, clip_high {high:g}; {seen}.")]


def _holds(x, edge: float) -> bool:
    low, high = sorted((x.low, x.high))
    return low - 1e-5 <= edge <= high + 1e-5


def _crossed(r: Reading, key, edge: float) -> bool:
    """Whether open tokens lie clearly beyond where the recorded clip would close them."""
    side, above = key
    t, a = r.account.t, r.account
    level = GATES[r.gate].level(t) if r.gate in GATES else t.r
    here = (a.h == 1.0) & ((t.A > 0) if side == "A > 0" else (t.A < 0))
    beyond = (level > edge * (1 + 1e-4)) if above else (level < edge * (1 - 1e-4))
    return bool((here & beyond).sum() >= 2) and not any(x.kind in ("cap", "floor") for x in r.factors) and r.value_form.startswith("r A")


def _kl(r: Reading) -> list[Named]:
    if r.kl is None or r.kl in LIKELIHOOD:
        return []
    found, number = [], r.account.guess.facts.recording.number
    form = KL_FORMS[r.kl]
    if form.mistake:
        found.append(Named(form.mistake, "mistake", f"+ {r.kl_coef:.6g} times {form.words} has the recorded gradient."))
    if r.kl_coef < 0 and r.kl in ("k1", "k2", "k3", "abs"):
        found.append(Named("kl_sign", "mistake", f"Its coefficient is {r.kl_coef:.6g}."))
    if r.kl == "k1" and r.kl_anchor == "ref":
        found.append(Named("kl_estimator_gradient", "mistake", f"+ {r.kl_coef:.6g} k1 in the loss: its gradient does not depend on the reference."))
    beta = number("beta")
    if beta and r.kl_anchor == "ref" and not found and abs(r.kl_coef - beta) > 1e-3 * beta:
        twice = abs(r.kl_coef - beta**2) < 1e-3 * beta**2
        evidence = f"beta is recorded as {beta:g}, the gradient has {r.kl_coef:.6g} times {r.kl}."
        found.append(Named("beta_twice" if twice else "kl_coef_differs", "mistake" if twice else "warning", evidence))
    return found


def _value(r: Reading) -> list[Named]:
    """Value and gradient that belong to different losses."""
    if r.value_agrees is not False or r.unexplained_tokens or not math.isfinite(r.value_predicted or math.nan):
        return []
    evidence = f"The gradient's own loss would be {r.value_predicted:.6g}, {r.value_recorded:.6g} was reported."
    return [Named("gradient_value_disagree", "warning", evidence)]
