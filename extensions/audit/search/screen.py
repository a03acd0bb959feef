"""Forms compared with the reported loss and gradient on one batch: one mask, one set of advantages."""

from __future__ import annotations

import itertools
import math
from typing import Iterator, Sequence

import torch
from torch import Tensor

from extensions.audit.read.recording import Recording
from extensions.audit.search.digest import Digest, Fit, Target
from extensions.audit.search.forms import INF, KL_COEFS, Spec, Traits
from extensions.audit.search.kl_forms import kl_specs
from extensions.audit.search.match import Extra, LossResult, Match
from extensions.audit.search.pieces import Part, parts_of
from extensions.audit.search.reductions import mistaken_reductions, reductions
from extensions.audit.tolerance import NOTHING, SETTING, TERM
from extensions.objectives import Batch

FACTORS = tuple(range(2, 17)) + (32, 64)
SAMPLE_TOKENS = 20_000  # gradients are compared on about this many slots first


_NO_EXTRA: list[Extra] = [({}, 0.0, None)]
DEGENERATE = 1e-9
"""Below this share the policy's and the KL's slopes are parallel: their two amounts cannot be solved for."""
FACTOR_MISTAKES = (
    *("dropped_rows_in_denominator", "padding_in_denominator", "sum_for_mean", "extra_division", "loss_sign"),
    "generation_tokens_for_step",
)
"""Mistakes that amount to a factor of the whole loss, or of its KL."""
_OWN_DENOMINATOR = ("sum_over_tokens", "sum_over_width")
"""Reductions for which a division by a whole number says nothing: a count of the batch would do it."""


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
                sources = (self.mask_mistake, group[form].mistake, weights[r].mistake, None if k < 0 else kls[k].mistake)
                self.result.nearest = Match(
                    {**group[form].fields, **weights[r].fields, **extra},
                    mistakes=tuple(mistake for mistake in sources if mistake),
                    factor=factor,
                    residual=best,
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
            both = (a > 0) & (determinant > DEGENERATE * a * b)
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
            off = (loss - f * V - amount).abs() <= tolerance + TERM * amount.abs()
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

    def _recorded_ratios(self) -> list[float]:
        """What a window of several micro-batches, ranks or steps may multiply a mean by: ratios of their recorded counts."""
        names = ("accumulation_steps", "steps_per_generation", "world_size")
        counts = [n for n in (self.recording.number(name, 1) for name in names) if n > 1]
        products = {math.prod(chosen) for k in range(len(counts) + 1) for chosen in itertools.combinations(counts, k)}
        return sorted({a / b for a in products for b in products} - {1.0})

    def _share_of_generation(self) -> float:
        """Tokens of one optimiser step over those of the generation batch that num_items_in_batch counts; 0: not recorded."""
        number = self.recording.number
        generation = number("steps_per_generation", 0)
        if not generation or not number("num_items_in_batch") or generation == self.batch.accumulation_steps:
            return 0.0
        return self.batch.accumulation_steps / generation

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
            return next((c for c in usual if abs(value - c) <= SETTING * c), None)

        squared = next((c for c in usual if abs(coef - c * c) <= SETTING * c * c), None)
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
        slack = 3 * self.target.gradient_tolerance if by_gradient else NOTHING
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
        if fields["reduction"] == "mean_over_window" and near(f, self._share_of_generation()):
            fit.mistakes.append("generation_tokens_for_step")
            fit.remarks.append(
                f"num_items_in_batch counts the generation batch; one step has {self._share_of_generation():.4g} of it "
                "(accumulation_steps / steps_per_generation)"
            )
            return True
        whole = round(1 / f) if f and abs(1 / f) < 1e9 else 0
        is_whole = whole > 0 and near(f * whole, 1)
        if not fit.mistakes:
            self._solve_denominators(fit, whole if is_whole else 0, slack)
            if by_gradient and self.result.proportional is None:
                self.result.proportional = Match(fields, (), f, "gradient", fit.residual, remarks=tuple(fit.remarks))
        if by_gradient and fit.mistakes and not is_whole and not near(f, -1):
            self._note_mistake_times_a_factor(fit)
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
        elif with_factors and not fit.mistakes and any(near(f, value) for value in self._recorded_ratios()):
            fit.remarks.append(f"times {f:.6g}, a ratio of recorded counts (accumulation, steps per generation, ranks)")
            fit.weak = True
        elif with_factors and any(near(f, n) or near(f * steps, n) for n in self._sums()):
            fit.mistakes.append("sum_for_mean")
            fit.remarks.append(f"{f:.6g} times the declared mean")
        else:
            return False
        return True

    def _note_mistake_times_a_factor(self, fit: Fit) -> None:
        """Keep the first form with a mistake whose gradient and value fit at one unexplained factor.

        A mistake that is a factor itself (a reduction's, a division's) is no evidence at a free one.
        """
        has_form = any(name not in FACTOR_MISTAKES for name in fit.mistakes)
        if self.result.proportional_mistake is not None or not has_form or len(fit.mistakes) > 1 or fit.factor <= 0:
            return
        left = 0.0 if self.target.loss is None else self.target.loss - fit.value
        if abs(left) <= self.target.value_tolerance(fit.span) + abs(fit.value) * self.target.gradient_tolerance:
            gap = None if self.target.loss is None else left
            self.result.proportional_mistake = Match(
                dict(fit.fields), tuple(fit.mistakes), fit.factor, "gradient and value", fit.residual, gap, tuple(fit.remarks)
            )

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
                loose = TERM * abs(amount) + abs(fit.value) * target.gradient_tolerance
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
