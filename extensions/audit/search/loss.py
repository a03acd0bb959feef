"""Which objective gives the reported loss and gradient: every choice of the table, its usual constants, and named edits.

A loss of this family is sum_it w_i (-J_it) + coef * sum_it w_i k_it: J a surrogate with slope G = dJ/dl, k a KL estimate
with slope H, w_i one weight a row. So one hypothesis is a form of J, a form of k, and a row of weights; J, k and their
slopes are computed once, and weights are tried on row sums. With a recorded gradient g the two scalars of

    g = factor * (-w G) + factor * coef * w H

are solved by least squares over the tokens, and then explained: a factor of 1 is the row itself, 1/2 a division too many.
Without a gradient the value alone is compared, with coefficients from a list of those that trainers use. The best match is
computed again by objectives.evaluate itself, whose formulas are the ones this search borrows.

Mistakes are tried one at a time and only where no combination of plain choices fits (or a declared row does not).

A large batch is worked through in pieces of rows of like length, and gradients are compared on some of its rows first: every
number that decides (the value, the denominators) is that of the whole batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Iterator, NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor

import rl_lab
from extensions.audit.search.forms import (
    CLIP_PAIRS,
    INF,
    KL_COEFS,
    Form,
    Spec,
    Traits,
    build_batch,
    clip_pairs,
    kl_specs,
    mask_edits,
    mistaken_reductions,
    mistaken_specs,
    plain_choices,
    plain_spec,
    reductions,
    seen_thresholds,
    without_far_rows,
)
from extensions.audit.read.recording import Recording
from extensions.objectives import ROWS, Batch, Row

ENTROPY_COEFS = (0.01, 0.001, 0.005, 0.02, 0.05, 0.1, 0.002, 0.003, 0.0005, 0.0001)
VALUE_COEFS = (0.5, 1.0, 0.1, 0.25)
VALUE_CLIPS = (0.2, 0.5, 0.1, 0.3, 0.4, 0.6, 1.0)
FACTORS = tuple(range(2, 17)) + (32, 64)
VALUE_TOLERANCE = 8e-7
SAMPLE_TOKENS = 20_000  # gradients are compared on about this many slots first
PART_SLOTS = 65_536  # a batch is worked through in pieces of about this many slots


Extra = tuple[dict, float, "str | None"]
"""An entropy or critic term beside the policy loss: its fields, its amount, the mistake in it."""


@dataclass(frozen=True)
class Match:
    """One hypothesis that reproduces what was reported. fields: choices and numbers under the names of Row."""

    fields: dict
    mistakes: tuple[str, ...] = ()
    factor: float = 1.0
    by: str = "value"  # "gradient and value", "gradient", "value"
    residual: float | None = None  # relative, of the gradient
    gap: float | None = None  # reported minus recomputed loss
    remarks: tuple[str, ...] = ()
    order: tuple = ()
    weak: bool = False  # a number was solved that the recording should hold

    def label(self) -> str:
        return describe(self.fields) + (f", times {self.factor:.6g}" if abs(self.factor - 1) > 1e-4 else "")


@dataclass
class LossResult:
    matches: list[Match] = field(default_factory=list)  # without a mistake, best first
    mistakes: list[Match] = field(default_factory=list)  # with one, best first
    tried: int = 0
    nearest: Match | None = None  # smallest residual when nothing matches
    proportional: Match | None = None  # the gradient fits up to a factor that nothing recorded explains
    chance: float = 0.0  # expected number of matches by accident among the values compared
    zero: bool = False  # the reported loss is 0 within rounding: its value tells nothing
    remarks: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------------------ comparing


@dataclass
class Target:
    """What was reported."""

    loss: float | None
    gradient: Tensor | None  # (N, T)
    eps: float
    extras: list[Extra] = field(default_factory=list)  # entropy and critic: fields, loss, mistake

    @property
    def gradient_tolerance(self) -> float:
        return max(1e-5, 4 * self.eps if self.eps > 1e-5 else 0)

    def value_tolerance(self, size):
        """A float32 sum of terms of this total size; half precision is as coarse as its own grid."""
        return max(VALUE_TOLERANCE, 2 * self.eps if self.eps > 1e-5 else 0) * size + 1e-9


def describe(fields: dict) -> str:
    """The choices of a hypothesis in one line."""
    f = fields
    if "value_loss" in f and "ratio" not in f and "kl" not in f:
        parts = [
            f"value loss {f['value_loss']}"
            + (f" clip {f['value_clip']:g}" if "value_clip" in f else "")
            + f" times {f.get('value_coef', 1):g}"
        ]
    elif f.get("token_losses"):
        parts = ["token losses as recorded"]
    elif f.get("ratio") == "none":
        parts = ["A l (no ratio)"]
    else:
        text = f"{f.get('ratio', 'token')} ratio, {f.get('surrogate', 'clip')}"
        if "clip_low" in f:
            text += f" -{f['clip_low']:g}/+{f['clip_high']:g}"
        if "ratio_cap" in f and f.get("surrogate") in ("dual_clip", "capped_clip"):
            text += f" c {f['ratio_cap']:g}"
        parts = [text]
    if f.get("off_policy_rows") == "drop":
        parts.append(f"answers with A < 0 and lag above {f['off_policy_threshold']:g} dropped")
    if f.get("reduction"):
        text = f["reduction"].replace("_", " ")
        if f["reduction"] == "sum_over_budget":
            text += f" {f['budget']:g}"
        if f.get("rows_counted") == "nonempty":
            text += " (non-empty rows)"
        if f.get("accumulation") == "divide":
            text += " / accumulation steps"
        parts.append(text)
    if f.get("kl", "none") != "none":
        text = f"+ {f.get('kl_coef', 0):.4g} {f['kl']}"
        text += " times ratio" if f.get("kl_weight") == "ratio" else ""
        text += " with the gradient of k2" if f.get("kl_gradient") == "k2" else ""
        text += " to the old policy" if f.get("kl_anchor") == "old" else ""
        parts.append(text)
    if f.get("entropy_coef"):
        parts.append(f"- {f['entropy_coef']:g} entropy")
    if f.get("value_coef") and "ratio" in f:
        parts.append(
            f"+ {f['value_coef']:g} value loss {f['value_loss']}"
            + (f" clip {f['value_clip']:g}" if "value_clip" in f else "")
        )
    return ", ".join(parts)


_NO_EXTRA: list[Extra] = [({}, 0.0, None)]
_OWN_DENOMINATOR = ("sum_over_tokens", "sum_over_width")
"""Reductions for which a division by a whole number says nothing: a count of the batch would do it."""


class Part(NamedTuple):
    """Some rows of the batch, without the columns that none of them counts."""

    rows: Tensor
    first: int
    batch: Batch


def parts_of(batch: Batch, rows: Tensor | None = None, slots: int = PART_SLOTS) -> list[Part]:
    """The batch in pieces of rows that end at like positions, each trimmed to the columns it counts (not a square batch)."""
    rows = torch.arange(len(batch.mask)) if rows is None else rows
    width = batch.mask.shape[1]
    if len(rows) == len(batch.mask) and batch.mask.numel() <= slots:
        return [Part(rows, 0, batch)]
    any_counted = batch.mask[rows].any(1)
    end = torch.where(any_counted, width - batch.mask[rows].flip(1).to(torch.uint8).argmax(1), 0)
    start = torch.where(any_counted, batch.mask[rows].to(torch.uint8).argmax(1), width)
    order = end.argsort(stable=True)
    parts: list[Part] = []
    at = 0
    while at < len(order):
        count = max(1, slots // max(int(end[order[min(at + slots // width + 64, len(order) - 1)]]), 1))
        chosen = order[at : at + count].sort().values
        at += count
        low, high = min(int(start[chosen].min()), width - 1), max(int(end[chosen].max()), 1)
        low = min(low, high - 1)
        if len(batch.mask) == width:  # one of the mistakes puts the answers' advantages along time, where they have a place
            low, high = 0, width
        parts.append(Part(rows[chosen], low, take(batch, rows[chosen], low, high)))
    return parts


def take(batch: Batch, rows: Tensor, low: int, high: int) -> Batch:
    """Rows and columns of a batch, the per-token arrays that forms read."""
    changes = {}
    for name in ("logps", "old_logps", "ref_logps", "mask", "entropies", "logits", "ref_logits"):
        value = getattr(batch, name)
        if value is not None:
            changes[name] = value[rows, low:high]
    A = batch.advantages[rows]
    return Batch(**changes, advantages=A if A.shape[1] == 1 else A[:, low:high])


class Digest:
    """A form of J (as a loss: -J) or of the KL that has met the batch: its row sums, and its slopes on the compared rows."""

    def __init__(self, index: int, spec: Spec, screen: "Screen", sign: float):
        self.index, self.fields, self.mistake = index, spec.fields, spec.mistake
        self._spec, self._screen, self._sign, self._sums = spec, screen, sign, None
        self.slope: Tensor | None = None
        if screen.sample is not None:
            form = spec.make(screen.sample.batch)
            self.slope = None if form.slope is None else sign * form.slope
            if (
                len(screen.parts) == 1
                and len(screen.sample.rows) == len(screen.batch.mask)
                and screen.sample.batch is screen.parts[0].batch
            ):
                self._take([(screen.parts[0], form)])

    def _take(self, forms: Sequence[tuple[Part, Form]]) -> None:
        sums = torch.zeros(len(self._screen.batch.mask), dtype=torch.float64)
        sizes = torch.zeros_like(sums)
        for part, form in forms:
            sums[part.rows], sizes[part.rows] = self._sign * form.value.sum(1), form.value.abs().sum(1)
        self._sums = sums, sizes

    @property
    def sums(self) -> Tensor:
        """Sum over each row's tokens, (N,)."""
        if self._sums is None:
            self._take([(part, self._spec.make(part.batch)) for part in self._screen.parts])
        return self._sums[0]

    @property
    def sizes(self) -> Tensor:
        """Sum of the absolute values, (N,)."""
        return self.sums is not None and self._sums[1]


@dataclass
class Fit:
    """A hypothesis that reproduces the numbers, while its factor and its coefficient are being explained."""

    fields: dict
    mistakes: list[str]
    factor: float
    residual: float | None
    value: float  # recomputed loss, without entropy and critic
    span: float  # sum of the absolute terms
    extra: Extra | None  # the entropy and critic terms that the value was compared with
    remarks: list[str] = field(default_factory=list)
    weak: bool = False

    def solved(self, fields: dict, words: str) -> "Fit":
        """The same with a denominator in it that was solved for."""
        remarks = [*self.remarks, f"{words}, solved, not recorded"]
        return Fit(fields, [], 1.0, self.residual, self.value, self.span, self.extra, remarks, weak=True)


class Screen:
    """Compares forms with the target on one batch (one mask, one set of advantages)."""

    def __init__(
        self,
        recording: Recording,
        batch: Batch,
        target: Target,
        result: LossResult,
        mask_mistake: str | None = None,
        declared: dict | None = None,
    ):
        self.declared = declared or {}
        self.recording, self.batch, self.target, self.result = recording, batch, target, result
        self.mask_mistake = mask_mistake
        self.traits = Traits.of(batch)
        self.weights = reductions(recording, batch)
        self.odd_weights = [] if mask_mistake else mistaken_reductions(recording, batch)
        self.parts = parts_of(batch)
        self.sample: Part | None = None
        self.rows: Tensor | None = None
        if target.gradient is not None:
            self.sample = self.parts[0]
            if len(self.parts) > 1:
                count = max(8, SAMPLE_TOKENS // batch.mask.shape[1])
                (self.sample,) = parts_of(
                    batch, torch.linspace(0, len(batch.mask) - 1, count).round().long().unique(), batch.mask.numel() + 1
                )
            self.rows = self.sample.rows
            whole = target.gradient[self.rows]
            self.g = whole[:, self.sample.first : self.sample.first + self.sample.batch.mask.shape[1]]
            self.gg = float((whole * whole).sum())
            self.entries = int((whole != 0).sum())
        self.kl_cache: dict = {}
        self.place: tuple = ()
        self.use_extras = self.solve_budget = False
        # A recording that holds every token of its window is no micro-batch: nothing is left to divide it by.
        self.is_whole_window = (
            batch.window_tokens is not None and abs(float(batch.lengths.sum()) - batch.window_tokens) < 0.5
        )
        self.phase = 0

    def kls(self, ratio: str, with_mistakes: bool) -> list[Digest]:
        key = (ratio, with_mistakes)
        if key not in self.kl_cache:
            specs = kl_specs(self.traits, ratio, with_mistakes, self.rows is None)
            self.kl_cache[key] = [Digest(index, spec, self, 1.0) for index, spec in enumerate(specs)]
        return self.kl_cache[key]

    def digest(self, specs: Iterator[Spec] | Sequence[Spec]) -> list[Digest]:
        return [Digest(index, spec, self, -1.0) for index, spec in enumerate(specs)]

    def try_forms(self, digests: Sequence[Digest], *, with_factors: bool = False, kl: str = "plain") -> None:
        """Every form with every KL form and reduction; matches go to the result. kl: "none", "plain" or "mistaken" alone."""
        weights = self.weights + (self.odd_weights if with_factors else [])
        W = torch.stack([reduction.weights for reduction in weights])
        by_ratio: dict[str, list[Digest]] = {}
        for digest in digests:
            by_ratio.setdefault(digest.fields.get("ratio", "token"), []).append(digest)
        for group in by_ratio.values():
            kls: list[Digest] = []
            if kl != "none" and (self.traits.has_reference or self.traits.moved or self.traits.has_logits):
                kls = [
                    k
                    for k in self.kls(group[0].fields.get("ratio", "token"), kl == "mistaken")
                    if kl == "plain" or k.mistake
                ]
            if kl == "mistaken" and not kls:
                continue
            if self.rows is not None:
                self._by_gradient(group, kls, weights, W, with_factors, alone=kl != "mistaken")
            elif self.target.loss is not None:
                self._by_value(group, kls, weights, W, with_factors, alone=kl != "mistaken")

    def _by_gradient(self, group, kls, weights, W, with_factors, alone) -> None:
        """Solve factor and coefficient for all forms, KL forms and reductions at once; look closer where one fits."""
        tolerance = self.target.gradient_tolerance
        Ws, g, gg = W[:, self.rows], self.g, self.gg
        squares = Ws * Ws
        zero = torch.zeros_like(g)
        P = torch.stack([zero if d.slope is None else d.slope for d in group])  # (F, n, T)
        x, a = (P * g).sum(2) @ Ws.T, (P * P).sum(2) @ squares.T  # (F, R)
        tiny = 1e-300
        fits: list[tuple[int, int, int, float, float, float]] = []

        def note(k: int, f: Tensor, c: Tensor, left: Tensor, allowed: Tensor) -> None:
            residual = (left.clamp(min=0) / max(gg, tiny)).sqrt() if gg > 0 else torch.where(left == 0, 0.0, INF)
            residual = torch.where(allowed, residual, INF)
            self.result.tried += residual.numel()
            best = float(residual.min())
            if self.result.nearest is None or best < self.result.nearest.residual:
                where = int(residual.argmin())
                form, r = divmod(where, residual.shape[1])
                factor, slope = float(f[form, r]), float(c[form, r])
                extra = {} if k < 0 else {**kls[k].fields, "kl_coef": slope / factor if factor else 0.0}
                self.result.nearest = Match(
                    {**group[form].fields, **weights[r].fields, **extra}, factor=factor, residual=best
                )
            for form, r in (residual <= tolerance).nonzero().tolist():
                fits.append((form, k, r, float(f[form, r]), float(c[form, r]), float(residual[form, r])))

        without = torch.where(a > 0, x / a.clamp(min=tiny), 1.0)
        if alone:
            left = torch.where(a > 0, gg - x * without, gg)
            note(-1, without, torch.zeros_like(x), left, torch.ones_like(x, dtype=torch.bool) if gg > 0 else a == 0)
        for k, kl_form in enumerate(kls):
            H = torch.zeros_like(g) if kl_form.slope is None else kl_form.slope
            y, b = Ws @ (H * g).sum(1), squares @ (H * H).sum(1)  # (R,)
            if float(b.max()) == 0:
                if kl_form.mistake == "kl_without_gradient" or kl_form.fields["kl"] == "exact":
                    note(
                        k,
                        without,
                        torch.zeros_like(x),
                        torch.where(a > 0, gg - x * without, gg),
                        torch.ones_like(x, dtype=torch.bool),
                    )
                continue
            if gg == 0:
                continue  # a KL term with a slope would have sent a gradient
            cross = (P * H).sum(2) @ squares.T  # (F, R)
            determinant = a * b - cross * cross
            both = (a > 0) & (determinant > 1e-12 * a * b)
            safe = torch.where(both, determinant, 1.0)
            f = torch.where(both, (x * b - y * cross) / safe, 1.0)
            c = torch.where(both, (y * a - x * cross) / safe, y / b)
            left = gg - torch.where(both, f * x + c * y, c * y)
            note(k, f, c, left, both | (a == 0))
        for form, k, r, f, c, residual in sorted(fits):
            d, kl_form = group[form], None if k < 0 else kls[k]
            free = 1 if kl_form is None else 2
            if free >= self.entries and abs(f - 1) > tolerance and float(a[form, r]) > 0:
                continue  # fewer numbers than unknowns: no evidence
            self.place = (d.index, k, r)
            if kl_form is not None and (kl_form.mistake == "kl_without_gradient" or kl_form.fields["kl"] == "exact"):
                self._value_decides_coef(d, kl_form, weights[r], f, with_factors, residual)
                continue
            if kl_form is not None:
                length = math.sqrt(float(squares[r] @ (kl_form.slope * kl_form.slope).sum(1)))
                if abs(c) * length < 3 * tolerance * math.sqrt(gg):
                    continue  # a coefficient of 0: the form without KL says the same
            w = W[r]
            V, span = float(w @ d.sums), float(w @ d.sizes)
            rest, rest_span = (0.0, 0.0) if kl_form is None else (c * float(w @ kl_form.sums), float(w @ kl_form.sizes))
            if d.slope is None:
                f = self._factor_by_value(V, rest, span + abs(c) * rest_span)
            V, span = f * V + rest, abs(f) * span + abs(c) * rest_span
            coef = c / f if kl_form is not None and f else 0.0
            self._accept(d, kl_form, weights[r], f, coef, residual, V, span, with_factors)

    def _factor_by_value(self, policy: float, rest: float, span: float) -> float:
        """The factor of a policy term without a gradient: 1, or the division that the value asks for."""
        divisors = (1, self.batch.accumulation_steps, *FACTORS)
        near = (
            1.0 / n
            for n in divisors
            if self.target.loss is not None
            and abs(self.target.loss - policy / n - rest) <= self.target.value_tolerance(span / n)
        )
        return next(near, 1.0)

    def _value_decides_coef(self, d, kl_form, reduction, f, with_factors, residual) -> None:
        """A KL term without gradient: the policy part fits the gradient, and the rest of the value is coef * KL."""
        if self.target.loss is None or abs(f - 1) > self.target.gradient_tolerance:
            return
        policy, kl = float(reduction.weights @ d.sums), float(reduction.weights @ kl_form.sums)
        span = float(reduction.weights @ d.sizes)
        if kl == 0:
            return
        coef = (self.target.loss - policy) / kl
        known = self.recording.number("beta")
        near = [
            c
            for c in ([known] if known else KL_COEFS)
            if abs(coef - c) * abs(kl) <= self.target.value_tolerance(span + abs(coef * kl))
        ]
        if near and abs(coef * kl) > 10 * self.target.value_tolerance(span):
            self._accept(
                d, kl_form, reduction, 1.0, near[0], residual, policy + near[0] * kl, span + abs(coef * kl), with_factors
            )

    def _by_value(self, group, kls, weights, W, with_factors, alone) -> None:
        """Compare the value of every form, KL form, coefficient and reduction; no gradient was recorded."""
        target, steps = self.target, self.batch.accumulation_steps
        policy, spans = torch.stack([d.sums for d in group]) @ W.T, torch.stack([d.sizes for d in group]) @ W.T  # (F, R)
        known = self.recording.number("beta")
        extras = target.extras if self.use_extras else _NO_EXTRA
        factors = [1.0] if steps <= 1 or self.is_whole_window else [1.0, 1.0 / steps]
        if with_factors:
            factors += [
                -1.0,
                *([-1.0 / steps] if steps > 1 else []),
                *(1.0 / k for k in FACTORS if k != steps or self.is_whole_window),
                *self._sums(),
                *(n / steps for n in self._sums() if steps > 1),
            ]
        loss = target.loss

        def compare(k: int, coef: float, V: Tensor, size: Tensor, allowed: Tensor) -> None:
            tolerance = target.value_tolerance(size)
            clear = V.abs() > 20 * tolerance
            # Beside a KL term, a factor and an entropy or critic term at once would be one guess too many.
            tried: list[tuple[float, Extra]] = [
                (f, e)
                for f in factors
                for e in extras
                if (with_factors or not e[2]) and (k < 0 or not e[0] or f in (1.0, 1.0 / steps))
            ]
            self.result.tried += V.numel() * len(tried)
            self.result.chance += len(tried) * float((tolerance / V.abs().clamp(min=max(abs(loss), 1e-12))).sum())
            if self.solve_budget and k < 0 and loss:
                for r, reduction in enumerate(weights):
                    if reduction.fields == {"reduction": "sum_per_response"}:
                        budgets = (V[:, r] / loss).round().unique().tolist()
                        longest = int(self.batch.lengths.max())
                        tried += [(1.0 / n, extras[0]) for n in budgets if longest <= n <= 4096 and n > 1]
            f, amount = torch.tensor([(f, extra[1]) for f, extra in tried], dtype=V.dtype).T[..., None, None]
            off = (loss - f * V - amount).abs() <= tolerance + 2e-6 * amount.abs()
            off &= allowed & (clear | (f == 1) | (f == 1 / steps))
            for place, form, r in off.nonzero().tolist():
                (factor, extra), d, kl_form = tried[place], group[form], None if k < 0 else kls[k]
                self.place = (d.index, k, r)
                value, span = factor * float(V[form, r]), float(size[form, r])
                self._accept(d, kl_form, weights[r], factor, coef, None, value, span, with_factors, extra=extra)

        if alone:
            compare(-1, 0.0, policy, spans, torch.ones_like(policy, dtype=torch.bool))
        for k, kl_form in enumerate(kls):
            value, span = W @ kl_form.sums, W @ kl_form.sizes
            coefs = [known] + ([-known, known * known] if with_factors else []) if known else list(KL_COEFS)
            if not known and with_factors and kl_form.fields["kl_anchor"] == "reference":
                coefs += [-c for c in KL_COEFS]
            for coef in coefs:
                size = spans + abs(coef) * span
                tolerance = target.value_tolerance(size)
                compare(k, coef, policy + coef * value, size, (coef * value).abs() > 3 * tolerance)

    def _sums(self) -> list[float]:
        rows, tokens = len(self.batch.mask), int(self.batch.lengths.sum())
        return [float(n) for n in dict.fromkeys((rows, tokens)) if n > 1]

    def _accept(self, form, kl_form, reduction, f, coef, residual, V, span, with_factors, *, extra=None) -> None:
        """Explain the factor and the coefficient of a fit, and file it as a plain match or under the mistakes it takes."""
        mistakes = [m for m in (self.mask_mistake, form.mistake, reduction.mistake) if m]
        fit = Fit({**form.fields, **reduction.fields}, mistakes, f, residual, V, span, extra)
        if kl_form is not None:
            fit.fields |= kl_form.fields
            fit.mistakes += [kl_form.mistake] if kl_form.mistake else []
            if not self._explain_coef(fit, coef):
                return
        if not self._explain_factor(fit, with_factors):
            return
        if len(fit.mistakes) < 2 or set(fit.mistakes) == {"kl_direction", "kl_sign"}:
            self._file(fit)

    def _explain_coef(self, fit: Fit, coef: float) -> bool:
        """Name the KL coefficient: the recorded one, a usual one, or what a mistake makes of it. False: no explanation."""
        known = self.recording.number("beta")
        usual = [known] if known else list(KL_COEFS)

        def among(value: float) -> float | None:
            return next((c for c in usual if abs(value - c) <= 1e-3 * c), None)

        squared = next((c for c in usual if abs(coef - c * c) <= 1e-3 * c * c), None)
        if among(coef) is not None:
            fit.fields["kl_coef"] = among(coef)
        elif fit.factor < 0 and among(-coef) is not None:
            # Only the policy term is turned: seen from it, the KL's coefficient is negative.
            fit.fields["kl_coef"] = among(-coef)
            fit.remarks.append("the KL term has the right sign")
        elif coef < 0:
            if known and among(-coef) is None:
                return False
            fit.mistakes.append("kl_sign")
            fit.fields["kl_coef"] = -coef if among(-coef) is None else among(-coef)
        elif squared is not None:
            fit.mistakes.append("beta_twice")
            fit.fields["kl_coef"] = squared
            fit.remarks.append(f"coefficient {coef:.4g} is {squared:g} squared")
        elif known:
            fit.mistakes.append("kl_coef_differs")
            fit.fields["kl_coef"] = coef
            fit.remarks.append(f"coefficient {coef:.4g}, recorded {known:g}")
        elif fit.residual is None:
            return False
        else:
            fit.fields["kl_coef"] = float(f"{coef:.4g}")
            fit.remarks.append(f"coefficient {coef:.4g} is none of the usual ones")
        return True

    def _explain_factor(self, fit: Fit, with_factors: bool) -> bool:
        """Name the factor: 1, recorded accumulation steps, a denominator to be solved, or a mistake. False: none of them."""
        f, fields, by_gradient = fit.factor, fit.fields, fit.residual is not None
        steps = self.batch.accumulation_steps
        slack = 3 * self.target.gradient_tolerance if by_gradient else 1e-9
        per_batch = fields["reduction"] not in ("mean_over_window", "sum_over_tokens")

        def near(value: float, wanted: float) -> bool:
            return abs(value - wanted) <= slack * abs(wanted)

        if near(f, 1):
            fit.factor = 1.0
            return True
        if steps > 1 and per_batch and not self.is_whole_window and near(f * steps, 1):
            fields["accumulation"] = "divide"
            fit.factor = 1.0
            return True
        whole = round(1 / f) if f and abs(1 / f) < 1e9 else 0
        is_whole = whole > 0 and near(f * whole, 1)
        if not fit.mistakes:
            self._solve_denominators(fit, whole if is_whole else 0, slack)
            if by_gradient and self.result.proportional is None:
                self.result.proportional = Match(fields, (), f, "gradient", fit.residual, remarks=tuple(fit.remarks))
        if not with_factors and not is_whole:
            return False
        is_declared = fields["reduction"] == self.declared.get("reduction")
        if near(f, -1) or steps > 1 and per_batch and near(f * steps, -1):
            fit.mistakes.append("loss_sign")
        elif is_whole and whole in FACTORS and (is_declared or fields["reduction"] not in _OWN_DENOMINATOR):
            fit.remarks.append(f"divided by {whole}")
            if fit.mistakes and by_gradient and per_batch and "accumulation_steps" not in self.recording.numbers:
                fit.weak = True  # beside a mistake, steps that were not recorded are no second one
                fit.remarks.append("the accumulation steps, which are not recorded, may be these")
            else:
                fit.mistakes.append("extra_division")
        elif with_factors and any(near(f, n) or near(f * steps, n) for n in self._sums()):
            fit.mistakes.append("sum_for_mean")
            fit.remarks.append(f"{f:.6g} times the declared mean")
        else:
            return False
        return True

    def _solve_denominators(self, fit: Fit, whole: int, slack: float) -> None:
        """File the fit with a denominator that the recording lacks and the factor gives: a budget, a window's tokens.

        whole: 1 / factor where that is a whole number, else 0.
        """
        fields, lengths = fit.fields, self.batch.lengths
        if fields["reduction"] == "sum_per_response" and self.batch.budget is None and whole >= max(int(lengths.max()), 1):
            if "rows_counted" not in fields and "global_batch_size" not in fields:
                budget = {**fields, "reduction": "sum_over_budget", "budget": float(whole)}
                self._file(fit.solved(budget, f"{whole} tokens a row"))
        if fields["reduction"] == "mean_over_tokens" and self.batch.window_tokens is None and fit.residual is not None:
            tokens = int(lengths.sum()) / fit.factor if 0 < fit.factor < 1 else math.inf
            for ranks in (1, 2, 4, 8):
                total = tokens * ranks
                if tokens < 1e6 and abs(total - round(total)) <= slack * total:
                    window = {**fields, "reduction": "mean_over_window", "window_tokens": round(total) / ranks}
                    words = f"a window of {round(total)} tokens" + (f" over {ranks} ranks" if ranks > 1 else "")
                    self._file(fit.solved(window, words))
                    break

    def _file(self, fit: Fit) -> None:
        """Add the fit to the matches or to the mistakes, with the entropy or critic term that completes its value."""
        target, extra = self.target, fit.extra
        gap, by = None, "value" if fit.residual is None else "gradient"
        if fit.residual is not None and target.loss is not None:

            def tolerance(amount: float) -> float:
                loose = 2e-6 * abs(amount) + abs(fit.value) * target.gradient_tolerance
                return target.value_tolerance(fit.span) + loose

            def left(term: Extra) -> float:
                return target.loss - fit.value - term[1]

            terms = target.extras or _NO_EXTRA
            extra = next((term for term in terms if abs(left(term)) <= tolerance(term[1])), None)
            if extra is not None:
                by = "gradient and value"
            elif not bool(target.gradient.any()):
                return  # a gradient of zero fits every form that has none: then the value must fit, too
            gap = left(extra or min(terms, key=lambda term: abs(left(term))))
        elif fit.residual is None:
            gap = target.loss - fit.value - (extra[1] if extra else 0.0)
        fields, mistakes = dict(fit.fields), list(fit.mistakes)
        if extra is not None:
            fields |= extra[0]
            mistakes += [extra[2]] if extra[2] else []
        order = (
            len(mistakes),
            1 if by == "gradient" else 0,
            1 if fit.weak else 0,
            sum(term in fields for term in ("kl", "entropy_coef", "value_coef")),
            self.phase,
            *self.place,
        )
        mistakes = tuple(dict.fromkeys(mistakes))
        match = Match(fields, mistakes, fit.factor, by, fit.residual, gap, tuple(fit.remarks), order, fit.weak)
        (self.result.mistakes if mistakes else self.result.matches).append(match)


# ------------------------------------------------------------------------------------------ extras: entropy and critic


def value_forms(recording: Recording, mask: Tensor) -> Iterator[tuple[dict, Tensor, Tensor, str | None]]:
    """Squared errors of the critic: fields, value and slope per token, mistake."""
    arrays = recording.arrays
    V, G = (torch.where(mask, torch.as_tensor(arrays[name]), 0.0) for name in ("vpreds", "returns"))
    yield {"value_loss": "square"}, (V - G).square(), 2 * (V - G), None
    if "values" not in arrays:
        return
    V0 = torch.where(mask, torch.as_tensor(arrays["values"]), 0.0)
    for width in dict.fromkeys([w for w in (recording.number("value_clip"), *VALUE_CLIPS) if w]):
        clipped = V0 + (V - V0).clamp(-width, width)
        inside = (V - V0).abs() <= width
        larger = rl_lab.clipped_value_loss(V, V0, G, width)
        slope = torch.where(larger == (V - G).square(), 2 * (V - G), 0.0)
        yield {"value_loss": "clip_max", "value_clip": width}, larger, slope, None
        slope = torch.where(inside, 2 * (clipped - G), 0.0)
        yield {"value_loss": "clip_replace", "value_clip": width}, (clipped - G).square(), slope, None
        smaller = torch.minimum((V - G).square(), (clipped - G).square())
        slope = torch.where(smaller == (V - G).square(), 2 * (V - G), 0.0)
        yield {"value_loss": "clip_max", "value_clip": width}, smaller, slope, "value_min_for_max"


def extra_terms(recording: Recording, mask: Tensor) -> list[Extra]:
    """Entropy and critic terms that may stand beside the policy loss: ({}, 0) first, then coefficients in use.

    Recorded gradients with respect to entropies and vpreds fix the coefficients instead.
    """
    arrays = recording.arrays
    counted = float(mask.sum())
    entropy: list[Extra] = [({}, 0.0, None)]
    if "entropies" in arrays:
        mean = float(torch.where(mask, torch.as_tensor(arrays["entropies"]), 0.0).sum()) / counted
        coefs = list(ENTROPY_COEFS)
        if "dloss_dentropies" in arrays:
            coefs = [-float(torch.as_tensor(arrays["dloss_dentropies"])[mask].sum())]
            coefs = [float(f"{coefs[0]:.5g}")] if abs(coefs[0]) > 1e-12 else []
            entropy = entropy if not coefs else []
        entropy += [({"entropy_coef": c}, -c * mean, None if c > 0 else "entropy_sign") for c in coefs]
        if "dloss_dentropies" not in arrays:
            entropy += [({"entropy_coef": c}, c * mean, "entropy_sign") for c in ENTROPY_COEFS]
    critic: list[Extra] = [({}, 0.0, None)]
    if "vpreds" in arrays and "returns" in arrays:
        gradient = arrays.get("dloss_dvpreds")
        for fields, value, slope, mistake in value_forms(recording, mask):
            mean = float(torch.where(mask, value, 0.0).sum()) / counted
            coefs = VALUE_COEFS
            if gradient is not None:
                g, s = torch.as_tensor(gradient)[mask], slope[mask] / counted
                coef = float((g * s).sum() / (s * s).sum()) if bool((s != 0).any()) else 0.0
                if not coef or float((g - coef * s).norm()) > 1e-5 * float(g.norm()):
                    continue
                coefs = (float(f"{coef:.5g}"),)
            critic += [({**fields, "value_coef": c}, c * mean, mistake) for c in coefs]
        if gradient is not None and len(critic) > 1:
            critic = critic[1:]
    return [({**a[0], **b[0]}, a[1] + b[1], a[2] or b[2]) for a in entropy for b in critic if not (a[2] and b[2])]


# ------------------------------------------------------------------------------------------ the search


def make_target(recording: Recording) -> Target:
    gradient = recording.get("dloss_dlogps")
    mask = torch.as_tensor(recording.arrays["mask"])
    if gradient is not None:
        gradient = torch.as_tensor(gradient)
    return Target(recording.number("loss"), gradient, recording.eps, extra_terms(recording, mask))


def search_loss(
    recording: Recording, advantages: np.ndarray | None, *, look_for_mistakes: bool = True, declared: dict | None = None
) -> LossResult:
    """All hypotheses for the reported loss and gradient of a rollout, with these advantages (None: A = 1, a likelihood)."""
    result = LossResult()
    target = make_target(recording)
    if target.loss is None and target.gradient is None:
        result.missing.append("loss, and dloss_dlogps with it: torch.autograd.grad(loss, logps)")
        return result
    if "logps" not in recording.arrays and "loss_mat" not in recording.arrays:
        result.missing.append("logps (rows x tokens)")
        return result
    if target.gradient is not None and not bool(torch.isfinite(target.gradient).all()):
        bad = (~torch.isfinite(target.gradient)).any(1).nonzero().flatten().tolist()
        result.remarks.append(f"dloss_dlogps is not finite in rows {bad[:10]}; the gradient is left out of the search")
        target.gradient = None
    if target.loss is not None and not math.isfinite(target.loss):
        result.remarks.append(f"the reported loss is {target.loss}")
        target.loss = None
        if target.gradient is None:
            return result
    rows = len(recording.arrays["mask"])
    A = np.ones(rows) if advantages is None else advantages
    loss_mat = recording.get("loss_mat")

    def screen(mask=None, mistake=None):
        try:
            batch = build_batch(recording, mask, A, **({} if loss_mat is None else {"logps": loss_mat}))
        except (ValueError, TypeError) as problem:
            if mistake is None:
                result.remarks.append(str(problem))
            return None
        return Screen(recording, batch, target, result, mistake, declared)

    def specs_for(batch: Batch) -> list[Spec]:
        if loss_mat is not None:
            return [Spec({"token_losses": True}, None, lambda b: Form(-b.logps, -b.mask.to(torch.float64)))]
        return [plain_spec(fields) for fields in plain_choices(recording, batch, target.gradient)]

    if loss_mat is not None:
        gradient = recording.get("dloss_dloss_mat")
        target = Target(target.loss, None if gradient is None else torch.as_tensor(gradient), recording.eps)
    first = screen()
    if first is None:
        return result
    specs = specs_for(first.batch)
    forms = first.digest(specs)
    first.try_forms(forms)
    by_value = first.rows is None
    if by_value and not result.matches:
        # A second look only where the first found nothing: more hypotheses mean more matches by accident.
        first.use_extras, first.solve_budget, first.phase = len(target.extras) > 1, first.batch.budget is None, 1
        if first.use_extras or first.solve_budget:
            first.try_forms(forms)
    result.zero = _is_zero(target, first)
    sure = [match for match in result.matches if not match.weak and match.by != "gradient"]
    fits = [match for match in result.matches if declared is None or not against(match.fields, declared)]
    if look_for_mistakes and (not sure and not (fits and target.loss is None) or not fits):
        pairs = clip_pairs(recording)[:2]

        def worth(candidates: Sequence) -> list:
            return [c for c in candidates if not by_value or likely(c.fields, declared, pairs)]

        first.use_extras, first.phase = len(target.extras) > 1, 2
        first.try_forms(worth(forms), with_factors=True)
        # Beside an edit, an entropy term is looked for only where one is declared: else it is one guess too many.
        first.use_extras, with_extras = False, bool((declared or {}).get("entropy_coef"))
        if loss_mat is None:
            if first.batch.ref_logps is not None:
                first.try_forms(
                    [d for d in worth(forms) if d.fields.get("surrogate") in ("clip", "plain", "dual_clip")],
                    with_factors=True,
                    kl="mistaken",
                )
            edits = list(mistaken_specs(recording, first.traits, declared))
            known = (declared or {}).get("off_policy_threshold")
            thresholds = [known] if known else seen_thresholds(first.batch, target.gradient)
            edits += [without_far_rows(spec, threshold) for spec in edits for threshold in thresholds]
            first.use_extras = with_extras
            first.try_forms(first.digest(worth(edits)))
        for name, mask in mask_edits(recording).items():
            edited = screen(mask, name)
            if edited is not None:
                edited.phase, edited.use_extras = 2, with_extras
                edited.try_forms(
                    edited.digest([spec for spec in specs_for(edited.batch) if likely(spec.fields, declared, pairs)])
                )
    if any(match.by != "gradient" for match in result.matches):
        result.matches = [match for match in result.matches if match.by != "gradient"]
    elif any(match.by == "gradient and value" for match in result.mistakes):
        result.matches = []  # both have the gradient, and the mistake has the value as well
    if any(match.by != "gradient" for match in result.mistakes):
        result.mistakes = [match for match in result.mistakes if match.by != "gradient"]
    result.mistakes = _unique(sorted(result.mistakes, key=lambda match: match.order))
    result.matches = _unique(sorted(result.matches, key=lambda match: match.order))
    return result


def likely(fields: dict, declared: dict | None, pairs: Sequence[tuple[float, float]]) -> bool:
    """Whether a form is worth an edit of its mask, or any edit when only a value was recorded.

    The declared one is, else the common ones.
    """
    if fields.get("token_losses"):
        return True
    if declared is not None:
        if "ratio" not in declared:
            return True
        return fields.get("ratio") == declared["ratio"] and (
            declared["ratio"] == "none" or fields.get("surrogate") == declared.get("surrogate")
        )
    common = (
        fields.get("ratio") == "none"
        or fields.get("surrogate") in ("clip", "dual_clip", "cispo", "sapo")
        or fields.get("surrogate") == "plain"
        and fields.get("ratio") == "token"
    )
    return (
        common
        and fields.get("off_policy_rows") != "drop"
        and (
            fields.get("surrogate") == "cispo"
            or (fields.get("clip_low"), fields.get("clip_high")) in (*pairs, CLIP_PAIRS[0], CLIP_PAIRS[6], (None, None))
        )
    )


def _unique(matches: list[Match]) -> list[Match]:
    seen, kept = set(), []
    for match in matches:
        key = (tuple(sorted((k, str(v)) for k, v in match.fields.items())), match.mistakes, round(match.factor, 9))
        if key not in seen:
            seen.add(key)
            kept.append(match)
    return kept


def _is_zero(target: Target, screen: Screen) -> bool:
    if target.loss is None:
        return False
    typical = float(screen.batch.advantages.abs().mean()) if screen.batch.advantages is not None else 1.0
    return abs(target.loss) <= 1e-6 * max(typical, 1e-3)


LOSS_DEFAULTS = {"kl": "none", "accumulation": "none", "off_policy_rows": "keep"}
"""What a match means by a field that it leaves out."""
_BANDED = ("clip", "dual_clip", "capped_clip", "cispo", "dppo_tv", "dppo_kl")


def against(fields: dict, declared: dict) -> list[str]:
    """Names of the declared choices that a match contradicts. A choice without effect in either is not compared."""
    full = {**LOSS_DEFAULTS, **fields}
    names = differing(full, declared)
    if full.get("token_losses"):
        return [name for name in names if name == "reduction"]
    if declared.get("window_unknown") and full.get("reduction") in ("mean_over_tokens", "mean_over_window"):
        names = [name for name in names if name != "reduction"]
    if full.get("surrogate") not in _BANDED:
        names = [name for name in names if name not in ("clip_low", "clip_high")]
    if full["kl"] == "none" and declared.get("kl", "none") == "none":
        names = [name for name in names if not name.startswith("kl")]
    return names


def differing(fields: dict, declared: dict) -> list[str]:
    """Names that both hold with unequal values; numbers are equal within a thousandth."""
    out = []
    for name in declared.keys() & fields.keys():
        got, wanted = fields[name], declared[name]
        if isinstance(wanted, float) and isinstance(got, (int, float)):
            same = got == wanted or math.isclose(got, wanted, rel_tol=1e-3)
        else:
            same = got == wanted
        if not same:
            out.append(name)
    return sorted(out, key=list(declared).index)


_SETTABLE = frozenset(
    "clip_low clip_high kl_coef ratio_cap value_coef value_clip value_loss entropy_coef off_policy_threshold tau_positive "
    "tau_negative".split()
)


def rows_with(fields: dict) -> list[str]:
    """Named rows of the table whose loss part makes the choices of a match (constants that a user sets are not compared)."""
    return [name for name, row in ROWS.items() if _makes(row, fields)]


def _makes(row: Row, fields: dict) -> bool:
    kl = row.kl if row.kl_place == "loss" else "none"
    if fields.get("kl", "none") == "none":
        if row.kl_in_loss:  # a row's KL may be listed and off: its coefficient is 0 until it is set
            return False
    elif kl != fields["kl"]:
        return False
    for name, value in fields.items():
        if name in _SETTABLE or name.startswith("kl") and fields.get("kl", "none") == "none" or not hasattr(row, name):
            continue
        own = kl if name == "kl" else getattr(row, name)
        if name == "surrogate" and fields.get("ratio") == "none":
            continue
        if name == "reduction" and own == "mean_over_window" and value == "mean_over_tokens":
            continue  # the window may be this batch
        if own != value:
            return False
    return fields.get("off_policy_rows", "keep") == row.off_policy_rows or "off_policy_rows" not in fields
