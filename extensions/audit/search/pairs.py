"""Which preference loss gives the reported number: the rows of PREFERENCE_ROWS, their constants, and edits of the pairs.

Hypotheses are whole PreferenceRows, evaluated by objectives.evaluate_preference on the recorded pairs or on an edit of them
(columns exchanged, reference missing or live, another mask). With a recorded gradient one factor is solved by least squares
and explained, as for rollouts; without one the value alone is compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Iterator

import numpy as np
import torch
from torch import Tensor

from extensions.audit.read.recording import Recording
from extensions.audit.read.masks import mask_edits
from extensions.audit.search.pair_edits import odds_with_another_constant, other_lengths
from extensions.audit.search.screen import FACTORS
from extensions.audit.tolerance import COARSE, FACTOR, PAIR_GRADIENT, PAIR_VALUE, SHOWN, TERM
from extensions.objectives import PREFERENCE_ROWS, PreferenceRow, Preferences, evaluate_preference, make_preferences

BETAS = (0.1, 0.01, 0.05, 0.2, 0.3, 0.5, 1.0, 2.0, 2.5, 0.02, 0.04, 0.03, 10.0)
SMOOTHING = (0.1, 0.05, 0.2, 0.01, 0.3)
GAMMAS = (1.0, 0.5, 0.3, 1.4, 1.6)
SFT_COEFS = (0.5, 1.0, 0.1, 0.2, 0.05)
TAIL_WEIGHTS = (0.5, 0.0, 0.3, 0.7)
KTO_WEIGHTS = (1.0, 1.33, 1.5, 0.75, 0.5, 2.0, 1.25)


@dataclass(frozen=True)
class PairMatch:
    row: PreferenceRow
    mistakes: tuple[str, ...] = ()
    factor: float = 1.0
    by: str = "value"
    residual: float | None = None
    gap: float | None = None
    remarks: tuple[str, ...] = ()
    order: tuple = ()

    @property
    def fields(self) -> dict:
        """Choices that matter, under the names of PreferenceRow."""
        row, out = self.row, {"loss": self.row.loss, "score": self.row.score, "beta": self.row.beta}
        if row.reference == "unused":
            out["reference"] = "unused"
        if row.divergence != "reverse_kl":
            out["divergence"] = row.divergence
        if row.loss in ("cdpo", "robust", "exo", "aot", "aot_unpaired"):
            out["label_smoothing"] = row.label_smoothing
        for name, idle in (("gamma", 0.0), ("sft_coef", 0.0), ("tail_weight", 1.0)):
            if getattr(row, name) != idle:
                out[name] = getattr(row, name)
        if row.of_labels:
            out |= {"desirable_weight": row.desirable_weight, "undesirable_weight": row.undesirable_weight}
        return out

    def label(self) -> str:
        f = self.fields
        text = f"{f.pop('loss')} on {'means' if f.pop('score') == 'mean' else 'sums'} over tokens, beta {f.pop('beta'):g}"
        text += "".join(
            f", {name.replace('_', ' ')} {value:g}" if isinstance(value, float) else f", {name} {value}"
            for name, value in f.items()
        )
        return text + (f", times {self.factor:.6g}" if abs(self.factor - 1) > SHOWN else "")

    def names(self) -> list[str]:
        """Named rows that make these choices (constants that a user sets are not compared)."""
        keys = ("loss", "score", "reference", "divergence")
        return [
            name
            for name, row in PREFERENCE_ROWS.items()
            if all(getattr(row, k) == getattr(self.row, k) for k in keys)
            and (row.sft_coef > 0) == (self.row.sft_coef > 0)
            and (row.tail_weight != 1) == (self.row.tail_weight != 1)
            and not (row.name == "cdpo" and self.row.label_smoothing == 0)
        ]


@dataclass
class PairResult:
    matches: list[PairMatch] = field(default_factory=list)
    mistakes: list[PairMatch] = field(default_factory=list)
    tried: int = 0
    missing: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    pairs: int = 0
    margins: Tensor | None = None  # D of the recorded pairs, sums
    beta: float | None = None
    chance: float = 0.0  # expected number of matches by accident among the values compared
    prompt_cancels: bool = False


def is_preference(recording: Recording) -> bool:
    a = recording.arrays
    return "chosen_logps" in a or "labels" in a or "kl_seq_logps" in a or "dloss_dchosen_logps" in a


def build(recording: Recording, mask: np.ndarray | None = None) -> Preferences:
    """Token arrays where they are recorded, whole-answer numbers otherwise. Raises ValueError."""
    a = recording.arrays
    has_tokens = "logps" in a and a["logps"].ndim == 2 and a["logps"].shape[1] > 1
    needs_pairs = "chosen_logps" in a
    if has_tokens and (not needs_pairs or len(a["logps"]) == 2 * a["chosen_logps"].size):
        given = {name: a[name] for name in ("ref_logps", "labels", "kl_seq_logps", "ref_kl_seq_logps") if name in a}
        mask = a["mask"] if mask is None else mask
        if "ref_logps" not in given and "ref_chosen_logps" in a and "ref_rejected_logps" in a:
            given["ref_logps"] = _sums_on_one_token(np.concatenate([a["ref_chosen_logps"], a["ref_rejected_logps"]]), mask)
        return make_preferences(logps=a["logps"], mask=mask, dtype=torch.float64, **given)
    if not needs_pairs and "seq_logps" in a and "labels" in a:
        return _of_labelled_sums(recording)
    if "chosen_logps" not in a or "rejected_logps" not in a:
        raise ValueError("chosen_logps and rejected_logps: both are needed, or logps with the chosen half first")
    sides = {
        name: a[name].reshape(-1)
        for name in ("chosen_logps", "rejected_logps", "ref_chosen_logps", "ref_rejected_logps")
        if name in a
    }
    if ("ref_chosen_logps" in sides) != ("ref_rejected_logps" in sides):
        raise ValueError("ref_chosen_logps and ref_rejected_logps: got one without the other")
    if len({len(side) for side in sides.values()}) > 1:
        raise ValueError(
            f"pairs: got lengths {sorted({len(s) for s in sides.values()})}, wanted one number a pair in every array"
        )
    return make_preferences(dtype=torch.float64, **sides)


def _of_labelled_sums(recording: Recording) -> Preferences:
    """KTO on log-probabilities of whole answers: each answer is one slot. Raises ValueError."""
    a = recording.arrays
    logps = a["seq_logps"].reshape(-1, 1)
    given = {name: a[name] for name in ("labels", "kl_seq_logps", "ref_kl_seq_logps") if name in a}
    if "ref_seq_logps" in a:
        given["ref_logps"] = a["ref_seq_logps"].reshape(-1, 1)
    return make_preferences(logps=logps, mask=np.ones(logps.shape, dtype=bool), dtype=torch.float64, **given)


def _sums_on_one_token(sums: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """A reference of which only the sums are known, as token arrays: all on the first counted token of each answer."""
    made = np.zeros(mask.shape)
    made[np.arange(len(mask)), mask.argmax(1)] = sums
    return made


def with_means(recording: Recording, data: Preferences) -> Preferences | None:
    """Whole-answer numbers divided by recorded lengths, so that rows on means can be tried without token arrays."""
    a = recording.arrays
    if data.logps.shape[1] > 1 or "chosen_lengths" not in a or "rejected_lengths" not in a:
        return None
    lengths = (
        torch.as_tensor(np.concatenate([a["chosen_lengths"].reshape(-1), a["rejected_lengths"].reshape(-1)]))
        .double()
        .unsqueeze(1)
    )
    if len(lengths) != len(data.logps) or bool((lengths < 1).any()):
        return None
    return replace(data, logps=data.logps / lengths, ref_logps=None if data.ref_logps is None else data.ref_logps / lengths)


def rows_to_try(
    recording: Recording, data: Preferences, declared: str | None = None
) -> Iterator[tuple[PreferenceRow, str | None]]:
    """Rows with the constants in use, likeliest first; the mistake beside a row if its constants are one."""
    known = recording.number("beta")
    betas = [known] if known else list(BETAS)
    smoothing = SMOOTHING
    is_pairs = data.labels is None
    for name, row in PREFERENCE_ROWS.items():
        if row.of_labels == is_pairs:
            continue
        if row.loss == "kto" and (data.kl_seq_logps is None or data.ref_kl_seq_logps is None):
            continue
        if row.reference == "used" and data.ref_logps is None:
            continue
        if row.reference == "unused" and data.ref_logps is not None and name != declared:
            continue  # who records a reference uses it
        if row.loss == "orpo" and bool((data.logps.sum(1) >= 0).any()):
            continue
        twice = known * known if known and known != 1 else 0.0
        tried = dict.fromkeys([*betas, *([twice] if 0 < twice < math.inf else [])])
        for beta in tried:
            mistake = "beta_twice" if known and beta != known else None
            variants = [replace(row, beta=beta)]
            if row.loss in ("cdpo", "robust", "exo", "aot", "aot_unpaired"):
                plain = [0.0] if row.loss in ("aot", "aot_unpaired") else []
                variants = [replace(row, beta=beta, label_smoothing=e) for e in (*smoothing, *plain)]
            elif row.loss == "simpo":
                variants = [replace(row, beta=beta, gamma=g) for g in GAMMAS]
            elif row.loss == "sigmoid" and row.sft_coef:
                variants = [replace(row, beta=beta, sft_coef=c) for c in SFT_COEFS]
            elif row.tail_weight != 1:
                variants = [replace(row, beta=beta, tail_weight=w) for w in TAIL_WEIGHTS]
            for variant in variants:
                yield variant, mistake
        if row.loss == "cdpo":
            for beta in betas:
                for e in smoothing:
                    yield replace(row, beta=beta, label_smoothing=1 - e), "smoothing_reversed"


class _Compare:
    def __init__(self, recording: Recording, data: Preferences, result: PairResult):
        self.recording, self.result = recording, result
        a = recording.arrays
        self.loss = recording.number("loss")
        if self.loss is not None and not math.isfinite(self.loss):
            result.remarks.append(f"the reported loss is {self.loss}")
            self.loss = None
        self.gradient, self.per_score = None, False
        if "dloss_dlogps" in a and a["dloss_dlogps"].shape == tuple(data.logps.shape) and data.logps.shape[1] > 1:
            self.gradient = torch.as_tensor(a["dloss_dlogps"])
            # A trainer that zeroes padding before it sums has a slope there that reaches no parameter.
            raw = torch.as_tensor(a["logps"])
            self.gradient = self.gradient.masked_fill(~data.mask & (raw == 0), 0.0)
        elif "dloss_dchosen_logps" in a and "dloss_drejected_logps" in a:
            both = np.concatenate([a["dloss_dchosen_logps"].reshape(-1), a["dloss_drejected_logps"].reshape(-1)])
            if len(both) == len(data.logps):
                self.gradient, self.per_score = torch.as_tensor(both), True
        if self.gradient is not None and not bool(torch.isfinite(self.gradient).all()):
            result.remarks.append("the recorded gradient is not finite")
            self.gradient = None
        self.counter = 0

    def evaluated(self, row: PreferenceRow, data: Preferences):
        try:
            made = evaluate_preference(row, data)
        except ValueError:
            return None
        gradient = (
            made.dloss_dlogps.sum(1)
            if self.per_score and data.logps.shape[1] == 1
            else (made.dloss_dscores if self.per_score else made.dloss_dlogps)
        )
        return float(made.loss), gradient, float(made.losses.abs().mean())

    def try_row(
        self,
        row: PreferenceRow,
        data: Preferences,
        mistakes: tuple[str, ...],
        *,
        factors: bool = False,
        made=None,
        remark: str = "",
    ) -> None:
        made = self.evaluated(row, data) if made is None else made
        self.result.tried += 1
        if made is None or not math.isfinite(made[0]):
            return
        value, gradient, size = made
        tolerance = (
            (TERM if self.gradient is None else PAIR_VALUE) * max(size, abs(value)) + 1e-8
            if self.recording.eps < COARSE
            else 4 * self.recording.eps * size
        )
        fitted = self._fit_gradient(gradient)
        if fitted is None:
            return
        f, residual = fitted
        candidates = [1.0] if residual is None else [f]
        pairs = self.result.pairs
        if factors and residual is None:
            candidates += [-1.0, float(pairs), *(1.0 / k for k in FACTORS)]
            self.result.tried += len(candidates) - 1
        if residual is None and self.loss:
            self.result.chance += len(candidates) * tolerance / max(abs(self.loss), abs(value))
        for f in candidates:
            gap = None if self.loss is None else self.loss - f * value
            by = "gradient" if residual is not None else "value"
            if residual is None and (gap is None or abs(gap) > tolerance * abs(f)):
                continue
            if residual is not None and gap is not None:
                if abs(gap) <= tolerance * abs(f) + FACTOR * abs(value) * (abs(f - 1) > SHOWN):
                    by = "gradient and value"
            all_mistakes, remarks = list(mistakes), [remark] if remark else []
            slack = FACTOR if residual is not None else 1e-12
            factor = 1.0
            if abs(f - 1) > slack:
                named = self._factor_named(f, slack)
                if named is None:
                    continue
                factor = f
                all_mistakes.append(named[0])
                remarks += named[1:]
            if len(all_mistakes) > 1:
                continue
            self.counter += 1
            order = (len(all_mistakes), {"gradient and value": 0, "value": 0, "gradient": 1}[by], self.counter)
            match = PairMatch(row, tuple(all_mistakes), factor, by, residual, gap, tuple(remarks), order)
            (self.result.mistakes if all_mistakes else self.result.matches).append(match)

    def _fit_gradient(self, gradient: Tensor) -> tuple[float, float | None] | None:
        """The factor at which a row's gradient is nearest to the recorded one, and how far off it is; None: it does not fit.

        (1, None) where no gradient was recorded.
        """
        g = self.gradient
        if g is None:
            return 1.0, None
        gg, aa, ga = float((g * g).sum()), float((gradient * gradient).sum()), float((g * gradient).sum())
        if aa == 0:
            return None if gg > 0 else (1.0, 0.0)
        f = ga / aa
        residual = math.sqrt(max(gg - ga * ga / aa, 0.0) / max(gg, 1e-300)) if gg else 1.0
        limit = PAIR_GRADIENT if self.recording.eps < COARSE else 4 * self.recording.eps
        if residual > limit or int((g != 0).sum()) < 2 and abs(f - 1) > limit:
            return None
        return f, residual

    def _factor_named(self, f: float, slack: float) -> tuple[str, ...] | None:
        """The mistake that a factor other than 1 amounts to, and a remark; None: no explanation."""
        inverse, steps, pairs = round(1 / f) if f else 0, int(self.recording.number("accumulation_steps", 1)), self.result.pairs
        if abs(f + 1) <= slack:
            return ("loss_sign",)
        if inverse >= 2 and abs(f * inverse - 1) <= slack and (inverse in FACTORS or inverse == steps):
            return "extra_division", f"divided by {inverse}"
        if pairs > 1 and abs(f - pairs) <= slack * pairs:
            return "sum_for_mean", f"{pairs} pairs, not divided out"
        return None


def search_preferences(recording: Recording, *, look_for_mistakes: bool = True, declared: str | None = None) -> PairResult:
    """All hypotheses for the reported loss and gradient of pairs, or of labelled answers (KTO)."""
    result = PairResult()
    try:
        data = build(recording)
    except (ValueError, TypeError) as problem:
        result.remarks.append(str(problem))
        return result
    result.pairs = len(data.logps) if data.labels is not None else len(data.logps) // 2
    result.beta = recording.number("beta")
    if data.ref_logps is None:
        result.missing.append("ref_chosen_logps and ref_rejected_logps (or ref_logps)")
    if data.labels is None and data.ref_logps is not None:
        u = (data.logps - data.ref_logps).sum(1)
        result.margins = u[: result.pairs] - u[result.pairs :]
    compare = _Compare(recording, data, result)
    if compare.loss is None and compare.gradient is None:
        result.missing.append("loss, and dloss_dchosen_logps, dloss_drejected_logps with it")
        return result
    means = with_means(recording, data)

    def data_for(row: PreferenceRow, base: Preferences = data) -> Preferences | None:
        if row.score == "mean" and base.logps.shape[1] == 1:
            return means if base is data else None
        if row.tail_weight != 1 and base.logps.shape[1] == 1 or row.sft_coef and base.logps.shape[1] == 1:
            return None
        return base

    rows = list(rows_to_try(recording, data, declared))
    if result.beta is None:
        result.missing.append("beta")
    for row, mistake in rows:
        base = data_for(row)
        if base is not None and mistake is None:
            compare.try_row(row, base, ())
    if data.labels is not None:
        _kto_weights(recording, data, compare)
    result.matches.sort(key=lambda match: match.order)
    full = any(match.by != "gradient" for match in result.matches) or compare.loss is None
    fits = result.matches and full and (declared is None or declared in result.matches[0].names())
    if look_for_mistakes and not fits:
        for row, mistake in rows:
            base = data_for(row)
            if base is not None:
                compare.try_row(row, base, (mistake,) if mistake else (), factors=mistake is None)
        _edits(recording, data, rows, compare, data_for)
    result.matches = _once(sorted(result.matches, key=lambda match: match.order))
    result.mistakes = _once(sorted(result.mistakes, key=lambda match: match.order))
    if "attention_mask" in recording.arrays or "prompt_lengths" in recording.arrays:
        edit = mask_edits(recording).get("prompt_counted") if "mask" in recording.arrays else None
        if edit is not None and data.labels is None and data.logps.shape[1] > 1:
            try:
                whole = build(recording, edit)
                u = (whole.logps - whole.ref_logps).sum(1)
                change = (u[: result.pairs] - u[result.pairs :] - result.margins).abs().max()
                result.prompt_cancels = float(change) < 1e-4
            except (ValueError, TypeError):
                pass
    return result


def _once(matches: list[PairMatch]) -> list[PairMatch]:
    return list(
        {
            (replace(m.row, name="", source="", differs=""), m.mistakes, round(m.factor, 9)): m for m in reversed(matches)
        }.values()
    )[::-1]


def _kto_weights(recording: Recording, data: Preferences, compare: _Compare) -> None:
    """The loss is linear in its two weights: solved from a gradient, or taken from a list."""
    if data.kl_seq_logps is None or data.ref_kl_seq_logps is None or data.ref_logps is None:
        return
    for beta in [recording.number("beta")] if recording.number("beta") else BETAS:
        row = replace(PREFERENCE_ROWS["kto"], beta=beta)
        sides = [
            compare.evaluated(replace(row, desirable_weight=d, undesirable_weight=u), data)
            for d, u in ((1.0, 0.0), (0.0, 1.0))
        ]
        weights = [(d, u) for d in KTO_WEIGHTS for u in KTO_WEIGHTS]
        if compare.gradient is not None:
            basis = torch.stack([side[1].reshape(-1) for side in sides], dim=1)
            solved = torch.linalg.lstsq(basis, compare.gradient.reshape(-1, 1)).solution.flatten().tolist()
            weights = [tuple(float(f"{w:.5g}") for w in solved)]
        for desirable, undesirable in weights:
            if desirable > 0 and undesirable > 0 and (desirable, undesirable) != (1.0, 1.0):
                compare.try_row(replace(row, desirable_weight=desirable, undesirable_weight=undesirable), data, ())


def _edits(recording: Recording, data: Preferences, rows, compare: _Compare, data_for) -> None:
    """Edits of the pairs: columns exchanged, reference missing or live, other masks."""
    plain = [row for row, mistake in rows if mistake is None]
    if data.labels is not None:
        for row in plain:
            compare.try_row(row, replace(data, labels=~data.labels), ("chosen_rejected_exchanged",))
        return
    P = len(data.logps) // 2
    swap = torch.cat([torch.arange(P, 2 * P), torch.arange(P)])
    exchanged = replace(
        data,
        logps=data.logps[swap],
        mask=data.mask[swap],
        ref_logps=None if data.ref_logps is None else data.ref_logps[swap],
    )
    for row in plain:
        base = data_for(row)
        if base is None or row.sft_coef:
            continue
        turned = (
            exchanged
            if base is data
            else replace(
                base, logps=base.logps[swap], ref_logps=base.ref_logps[swap] if base.ref_logps is not None else None
            )
        )
        made = compare.evaluated(row, turned)
        if made is not None:
            compare.try_row(row, turned, ("chosen_rejected_exchanged",), made=(made[0], made[1][swap], made[2]))
        if row.reference == "used" and row.loss not in ("kto",):
            compare.try_row(replace(row, reference="unused"), base, ("reference_missing",))
            live = replace(base, ref_logps=base.logps)
            made = compare.evaluated(row, live)
            if made is not None:
                compare.try_row(row, live, ("reference_live",), made=made, remark="reference without gradient")
                compare.try_row(
                    row,
                    live,
                    ("reference_live",),
                    made=(made[0], torch.zeros_like(made[1]), made[2]),
                    remark="reference with gradient: nothing is learned",
                )
    if data.logps.shape[1] > 1 and "mask" in recording.arrays:
        for name, mask in mask_edits(recording).items():
            try:
                edited = build(recording, mask)
            except (ValueError, TypeError):
                continue
            for row in plain:
                compare.try_row(row, edited, (name,))
        other_lengths(recording, plain, compare, build)
        odds_with_another_constant(plain, data, compare)
