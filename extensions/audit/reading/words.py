"""The reading in sentences: the section "What the gradient says"."""

from __future__ import annotations

import math

import numpy as np

from extensions.audit.reading.closed import RATIO, sides_of, structure
from extensions.audit.reading.explain import Account, levels
from extensions.audit.reading.gates import GATES, KL_FORMS, LAWS, LIKELIHOOD
from extensions.audit.reading.reading import Reading

ANCHORS = {"ref": "the reference", "old": "the policy that sampled"}


def gradient_lines(reading: Reading | None) -> list[str]:
    """What the report prints, whether or not anything is named."""
    if reading is None:
        return ["not recorded"]
    if reading.gate is None:
        return [*reading.remarks] or ["nothing can be read off it"]
    lines = [_formula(reading), *_constants(reading)]
    lines += [x.words() + _edge(x) for x in reading.closed]
    lines += [x.words() for x in reading.factors]
    lines += _never(reading.account)
    lines += [_term(x) for x in reading.other_terms]
    lines += _value(reading)
    if reading.unexplained_tokens:
        lines += _unexplained(reading.account)
    lines += reading.remarks
    state = "every counted token is accounted for" if not reading.unexplained_tokens else \
        f"{reading.unexplained_tokens} of {len(reading.account.h)} tokens are not accounted for"
    return [*lines, state + ("" if reading.complete or reading.unexplained_tokens else ", and not the whole loss")]


def _formula(r: Reading) -> str:
    solved = r.account.guess.solved
    gate = GATES[r.gate].words if solved is None else f"{r.gate} ({', '.join(f'{k} {v:.6g}' for k, v in solved.numbers.items())})"
    text = ("" if r.sign > 0 else "sign turned: + A; ") + f"{gate}; {LAWS[r.row_law][0]}"
    if r.advantages != "advantages":
        text += f"; with {r.advantages} {'advantage' if r.account.guess.facts.A_rows is not None else ''} in place of A"
    if r.mask != "recorded":
        text += f"; mask: {r.mask.replace('_', ' ')}"
    return text + (f"; times {r.weight}" if r.weight else "")


def _constants(r: Reading) -> list[str]:
    n = r.normaliser
    names = " = ".join(n["names"][:3]) or "no recorded count"
    lines = [f"divided by {n['value']:.7g}: {names}"]
    if r.kl:
        form = KL_FORMS.get(r.kl) or LIKELIHOOD[r.kl]
        anchor = ANCHORS.get(r.kl_anchor, r.kl_anchor)
        lines.append(f"plus {r.kl_coef:.6g} times {r.kl}: {form.words}" + (f", d to {anchor}" if r.kl_anchor else ""))
    return lines


def _edge(x) -> str:
    value = getattr(x, "value", None)
    return "" if value is None else f"; the value of the loss has it at {value:.6g}"


def _never(a: Account) -> list[str]:
    """Bounds that this batch cannot show."""
    t, named = a.t, levels(a.guess, a.t)
    if RATIO not in named or a.guess.solved is not None:
        return []
    r, lines = named[RATIO], []
    for side, above, what in (("A > 0", True, "upper clip"), ("A < 0", False, "lower clip"), ("A < 0", True, "dual clip")):
        here = sides_of(t.A)[side]
        if any(x.side in (side, "any A") and x.above == above and x.quantity == RATIO for x in a.thresholds):
            continue
        if any(x.kind == ("cap" if above else "floor") for x in a.factors):
            continue
        if not here.any():
            lines.append(f"no token has {side}: a {what} cannot be seen")
            continue
        edge = r[here].max() if above else r[here].min()
        lines.append(f"no {what} up to {edge:.6g}" if above else f"no {what} down to {edge:.6g}")
    return ["; ".join(lines)] if lines else []


def _term(x: dict) -> str:
    if x["term"] == "entropy":
        return f"entropy: weight {x['weight']:.6g} a token ({'mean of each answer' if x['row_law'] == '1/T' else 'every token alike'})"
    clip = x.get("clip")
    at = "" if clip is None else f", held within {clip['value']:.6g} of the old value" if clip.get("value") else ", clipped"
    return f"critic: {x['coefficient']:.6g} (V - G)^2 a token{at}; {x['closed']} tokens without gradient"


def _value(r: Reading) -> list[str]:
    if r.value_recorded is None:
        return ["the loss itself was not recorded: the value is not checked"]
    if r.value_agrees:
        solved = r.value.solved if r.value else 0
        note = f"; {solved} width{'s' if solved != 1 else ''} solved from this one number" if solved else ""
        return [f"value as {r.value_form}: {r.value_predicted:.6g}, as recorded{note}"]
    return [f"value as {r.value_form}: {r.value_predicted:.6g}, recorded {r.value_recorded:.6g}: they disagree"]


def _unexplained(a: Account) -> list[str]:
    """Tokens that the formula does not give: where they are, what they share, whose advantage their sign follows."""
    t, f = a.t, a.guess.facts
    bad = a.unexplained | a.uncovered
    lines = []
    none = bad & (t.g == 0)
    if none.any():
        lines.append(f"{int(none.sum())} counted tokens have no gradient and no threshold covers them: {_places(t, none)}")
    odd = bad & (t.g != 0)
    if odd.any():
        h = a.h[odd]
        h = h[np.isfinite(h)]
        if len(h):
            low, mid, high = np.quantile(h, (0.05, 0.5, 0.95))
            lines.append(f"{int(odd.sum())} tokens have {mid:.4g} times the gradient of this formula (5 to 95 %: {low:.4g} to {high:.4g}): {_places(t, odd)}")
    for name, values in structure(t).items():
        inside, outside = values[bad], values[~bad]
        if len(outside) and inside.size and (inside.min() > outside.max() or inside.max() < outside.min()):
            lines.append(f"what they share: {name} from {inside.min():g} to {inside.max():g}, the others {outside.min():g} to {outside.max():g}")
    alive = (t.g != 0) & (t.A != 0)
    if alive.any():
        agree = np.mean(np.sign(-t.g[alive]) == np.sign(t.A[alive]))
        text = f"sign of the gradient: {100 * agree:.0f} % of tokens push as their own advantage asks"
        if f.A.shape[1] == 1 and len(f.l) > 2 and agree < 0.95:
            shifts = {k: np.mean(np.sign(-t.g[alive]) == np.sign(np.roll(f.A[:, 0], k)[t.row[alive]])) for k in (-1, 1)}
            best = max(shifts, key=shifts.get)
            text += f"; {100 * shifts[best]:.0f} % as the advantage of row i {'-' if best > 0 else '+'} 1"
        lines.append(text)
    lines.append(_row_weights(a))
    return lines


def _places(t, chosen: np.ndarray) -> str:
    rows, positions = t.row[chosen], t.position[chosen]
    text = ", ".join(f"row {r} token {p}" for r, p in zip(rows[:4], positions[:4]))
    return text + (" ..." if chosen.sum() > 4 else "")


def _row_weights(a: Account) -> str:
    """-g / (r A) of each answer, as multiples of the first."""
    t = a.t
    with np.errstate(all="ignore"):
        weight = -t.g / (t.r * t.A)
    use = np.isfinite(weight) & (weight != 0)
    shown = []
    for row in np.unique(t.row[use])[:8]:
        shown.append(float(np.median(weight[use & (t.row == row)])))
    if not shown or not math.isfinite(shown[0]):
        return "no token has both a gradient and an advantage"
    return "weight of an answer's tokens, -g / (r A), median: " + ", ".join(f"{x:.4g}" for x in shown)
