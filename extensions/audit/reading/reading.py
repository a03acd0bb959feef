"""From a recording to a Reading: guesses fitted on a sample, the best worked out, confirmed on all tokens and by the value."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from extensions.audit.reading import counts, value
from extensions.audit.reading.explain import NO_WEIGHT, Account, Guess, confirm, explain, has_quantities, weights
from extensions.audit.reading.exchanged import variants
from extensions.audit.reading.facts import Facts, facts_from, is_rollout
from extensions.audit.reading.fit import fit_one, fit_two, is_seen
from extensions.audit.reading.gates import GATES, KL_FORMS, LAWS, LIKELIHOOD, NEEDS_OLD
from extensions.audit.reading.other_terms import OtherTerms, read_other_terms
from extensions.audit.reading.solved import SOLVERS

WORKED_OUT = 6  # guesses that are worked out token by token
DECIDES = 3  # of them, how many are confirmed on all tokens and by the value


@dataclass
class Reading:
    """What the gradient says. `as_json` has the fixed names; `account` keeps the tokens for words and findings."""

    gate: str | None = None
    row_law: str | None = None
    mask: str = "recorded"
    sign: int = 1
    advantages: str = "advantages"  # which recorded numbers stand in for A
    normaliser: dict = field(default_factory=dict)
    kl: str | None = None
    kl_coef: float | None = None
    kl_anchor: str | None = None
    closed: list = field(default_factory=list)
    factors: list = field(default_factory=list)
    weight: str | None = None
    other_terms: list = field(default_factory=list)
    unexplained_tokens: int | None = None
    value_predicted: float | None = None
    value_recorded: float | None = None
    value_form: str = ""
    value_agrees: bool | None = None
    complete: bool = False
    remarks: list[str] = field(default_factory=list)
    account: Account | None = None
    value: value.Value | None = None

    def as_json(self) -> dict:
        names = ("gate row_law mask sign advantages normaliser kl kl_coef kl_anchor weight other_terms unexplained_tokens value_predicted "
                 "value_recorded value_form value_agrees complete remarks").split()
        made = {name: getattr(self, name) for name in names}
        made["closed"] = [x.as_json() for x in self.closed]
        made["factors"] = ([{"kind": "weight", "quantity": self.weight, "side": "any A", "value": None, "tokens": None}] if self.weight else [])
        made["factors"] += [x.as_json() for x in self.factors]
        return plain(made)


def plain(value):
    """The same with Python's own numbers in place of NumPy's."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def read_loss(recording, advantages) -> Reading | None:
    """The reading of one recorded batch of rollouts. None: no gradient of log-probabilities was recorded."""
    arrays = recording.arrays
    if "dloss_dlogps" not in arrays or "logps" not in arrays or advantages is None:
        return None
    if not np.isfinite(arrays["dloss_dlogps"][arrays["mask"]]).all():
        return Reading(remarks=["the recorded gradient holds numbers that are not finite"])
    with np.errstate(all="ignore"):
        other = read_other_terms(recording)
        every = facts_from(recording, advantages)
        if not every[0].g.any():
            return _without_gradient(every[0], other)
        accounts = sorted((a for f in every for a in guesses(f)), key=lambda a: a.cost)
        if accounts and not _is_whole(accounts[0]):
            others = [a for f in every[:2] for g in variants(f) for a in guesses(g, simple=True)]
            accounts = sorted([*accounts, *others], key=lambda a: a.cost + (0.0 if a.guess.facts.A_name == "advantages" else 1.5))
        if not accounts:
            return Reading(remarks=["no token has both an advantage and a gradient"])
        return _decide(accounts[:DECIDES], other)


def guesses(f: Facts, simple: bool = False) -> list[Account]:
    """Accounts on a sample, best first: the plain ones, and where they leave something, those with a second term or a weight."""
    t = f.sample()
    found = _worked_out(_fitted(f, t, [NO_WEIGHT], [(None, None)]), t)
    if simple and f.ref is not None:
        found += _worked_out(_fitted(f, t, [NO_WEIGHT], [(form, "ref") for form in ("k3", "k2", "k1")]), t)
    found.sort(key=lambda a: a.cost)
    if simple or found and _is_whole(found[0]):
        return found
    found += _worked_out(_solved(f, t), t)
    found.sort(key=lambda a: a.cost)
    if found and _is_whole(found[0]):
        return found
    anchors = [name for name, there in (("ref", f.ref is not None), ("old", f.old is not None and bool(t.d.any()))) if there]
    anchors += [n for n, x in f.extras.items() if is_rollout(n, x[f.mask] if x.shape == f.mask.shape else x)]
    for laws, forms in _STAGES:
        seconds = [(form, anchor) for anchor in anchors for form in forms]
        found += _worked_out(_fitted(f, t, [NO_WEIGHT], seconds, laws), t)
        found.sort(key=lambda a: a.cost)
        if found and _is_whole(found[0]):
            break
    others = [name for name in weights(f) if name != NO_WEIGHT]
    if not (found and _is_whole(found[0])):
        found += _worked_out(_fitted(f, t, others, [(None, None)]), t)
        found.sort(key=lambda a: a.cost)
    if others and f.ref is not None and not (found and _is_whole(found[0])):
        plain = [(form, "ref") for form in ("k3", "k2", "k1", "k3 times ratio", "k1 times ratio")]
        found += _worked_out(_fitted(f, t, others, plain), t)
    if not (found and _is_whole(min(found, key=lambda a: a.cost))):
        found += _worked_out(_fitted(f, t, [NO_WEIGHT], [(form, None) for form in LIKELIHOOD]), t)
    return sorted(found, key=lambda a: a.cost)


COMMON_LAWS = ("equal", "1/T")
COMMON_FORMS = ("k3", "k2", "k1", "k3 times ratio")
_STAGES = (
    (COMMON_LAWS, COMMON_FORMS),
    (COMMON_LAWS, tuple(form for form in KL_FORMS if form not in COMMON_FORMS)),
    (tuple(law for law in LAWS if law not in COMMON_LAWS), tuple(KL_FORMS)),
)
"""(row laws, KL forms) tried beside every gate, likeliest first: what a stage explains whole, no later one explains at less."""


def _is_whole(a: Account) -> bool:
    return not a.unexplained.any() and not a.uncovered.any() and not any(x.kind == "row" for x in a.factors) \
        and not any(not x.natural for x in a.thresholds if x.tokens < 3) and len(a.thresholds) < 4 and len(a.factors) < 3


def _fitted(f: Facts, t, weight_names, seconds, law_names=tuple(LAWS)) -> list[Guess]:
    laws = {name: value for name in law_names if (value := LAWS[name][1](f)) is not None}
    seen, made = [], []
    for name, value in laws.items():
        shape = value / value.max()
        if not any(np.allclose(shape, other, rtol=1e-9) for other in seen):
            seen.append(shape)
        else:
            continue
        law = value[t.row]
        y = t.g / law
        for gate in GATES:
            if f.old is None and gate in NEEDS_OLD and gate != "token":
                continue
            for weight in weight_names:
                p = -GATES[gate].slope(t) * weights(f)[weight](t)
                if not np.isfinite(p).all() or not p.any():
                    continue
                for form, anchor in seconds:
                    guess = Guess(f, gate, name, weight, form, anchor)
                    q = guess.second(t)
                    if q is not None and (not q.any() or not np.isfinite(q).all()):
                        continue
                    guess.fit = fit_one(y, p, f.tolerance) if q is None else fit_two(y, p, q, f.tolerance)
                    if guess.fit is None or guess.fit.kappa == 0 or q is not None and not is_seen(guess.fit, y, p, q, f.tolerance):
                        continue
                    made.append(guess)
    return made


def _solved(f: Facts, t) -> list[Guess]:
    """Gates whose constants are solved first, under the two common laws."""
    made = []
    for law in ("equal", "1/T"):
        y = t.g / LAWS[law][1](f)[t.row]
        for solver in SOLVERS:
            gate = solver(f, t, y)
            if gate is not None:
                guess = Guess(f, gate.name, law, solved=gate)
                guess.fit = fit_one(y, -gate.slope(t), 10 * f.tolerance)
                if guess.fit is not None and guess.fit.kappa > 0:
                    made.append(guess)
    return made


def _worked_out(found: list[Guess], t) -> list[Account]:
    place = {name: k for k, name in enumerate(GATES)}
    found = sorted(found, key=lambda g: -(g.fit.agree + 0.5 * g.fit.open) + 0.2 * place.get(g.gate, 0))
    chosen: list[tuple[Guess, np.ndarray]] = []
    for g in found:
        _, p, q, law = g.parts(t)
        total = (g.fit.kappa * p + (0 if q is None else g.fit.kb * q)) * law
        for other, shape in chosen:
            # The same gradient on every token of this batch: one account stands for both, and the value may decide.
            if (abs(total - shape) <= 3 * f_tolerance(g) * abs(shape)).all() and (g.form, g.anchor) == (other.form, other.anchor):
                other.ties.append(g)
                break
        else:
            if len(chosen) == WORKED_OUT:
                break
            chosen.append((g, total))
    return sorted((_cheapest_tie(g, t) for g, _ in chosen), key=lambda a: a.cost)


def _cheapest_tie(g: Guess, t) -> Account:
    """Closed tokens tell gates apart that agree on every open one: the ratio they are closed by."""
    best = explain(g, t)
    if best.is_closed.any():
        for tie in g.ties[:8]:
            other = explain(tie, t)
            if other.cost < best.cost - 1e-9:
                other.guess.ties = [x for x in (g, *g.ties) if x is not tie]
                best = other
    return best


def f_tolerance(g: Guess) -> float:
    return g.facts.tolerance


def _decide(accounts: list[Account], other: OtherTerms) -> Reading:
    best = None
    for account in accounts:
        whole, v = _by_value(account, other)
        price = account.cost + (2.0 if v.agrees is False else 0.0)
        if best is None or price < best[0] - 1e-9:
            best = (price, whole, v)
        if v.agrees is not False and not whole.unexplained.any() and not whole.uncovered.any():
            break
    return _reading(best[1], best[2], other)


def _by_value(account: Account, other: OtherTerms) -> tuple[Account, value.Value]:
    """The account on all tokens; where its value does not fit, that of a tie whose value does."""
    t = account.guess.facts.all()
    whole = confirm(account, t)
    v = value.predict(whole, other.value)
    if v.agrees is False:
        for tie in account.guess.ties[:12]:
            if not has_quantities(tie, account, t):
                continue
            twin = confirm(replace(account, guess=tie), t)
            w = value.predict(twin, other.value)
            if w.agrees:
                return twin, w
    if v.agrees is False and other.width is not None:
        blind = value.predict(whole, other.value, blind=True)
        width = other.width.solve(v.recorded - blind.predicted)
        if width is not None:
            critic = next(w for w in other.words if w["term"] == "critic")
            critic["clip"]["value"] = width
            blind.recorded = blind.predicted = v.recorded
            blind.agrees, blind.solved = True, 1
            return whole, blind
    return whole, v


def _reading(a: Account, v: value.Value, other: OtherTerms) -> Reading:
    g = a.guess
    kappa = abs(g.fit.kappa)
    left = int(a.unexplained.sum() + a.uncovered.sum())
    made = Reading(
        gate=g.gate, row_law=g.law, mask=g.facts.mask_name, advantages=g.facts.A_name, sign=1 if g.fit.kappa > 0 else -1,
        normaliser={"value": 1 / kappa, "names": counts.named(1 / kappa, g.facts)},
        closed=a.thresholds, factors=a.factors, weight=None if g.weight == NO_WEIGHT else g.weight,
        other_terms=other.words, unexplained_tokens=left, value_predicted=v.predicted, value_recorded=v.recorded,
        value_form=" + ".join(x for x in (v.policy, v.second) if x), account=a, value=v,
    )
    if g.form is not None:
        made.kl, made.kl_anchor, made.kl_coef = g.form, g.anchor, g.fit.kb / g.fit.kappa
    for x, edge in zip(a.thresholds, v.edges):
        if edge is not None and not math.isinf(edge):
            x.value = edge
    if v.factor:
        made.remarks.append(v.factor)
    made.value_agrees = v.agrees
    made.complete = left == 0 and v.agrees is not False and other.complete and not any(x.kind == "row" for x in a.factors)
    return made


def _without_gradient(f: Facts, other: OtherTerms) -> Reading:
    recorded = f.recording.number("loss")
    made = Reading(value_recorded=recorded, other_terms=other.words, remarks=["every token's gradient is 0"])
    made.unexplained_tokens = int((f.mask & (np.broadcast_to(f.A, f.mask.shape) != 0)).sum())
    made.complete = made.unexplained_tokens == 0
    return made
