"""A step as a whole: which denominator each file used, and whether all of them together are one objective's gradient."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace
from typing import Sequence

import numpy as np

from extensions.audit.catalogue import SEVERITIES, Finding, finding
from extensions.audit.declared import Declared
from extensions.audit.read.recording import Recording
from extensions.audit.run import audit
from extensions.audit.say.report import Report, cannot_tell_from, listed
from extensions.audit.search.advantages import search_advantages
from extensions.audit.search.pairs import is_preference, search_preferences
from extensions.audit.step.denominators import (
    KINDS,
    RECORDED_WINDOW,
    SAME,
    SHAPE,
    Solved,
    clipped,
    hypotheses,
    numerators,
    pair_numerators,
    recorded,
    same,
    solve,
)
from extensions.audit.step.folder import Part
from extensions.objectives import PreferenceRow, Row

OF_ONE_FILE = ("extra_division", "sum_for_mean", "divided_by_whole_number", "gradient_value_disagree")
"""Findings about a factor: a file alone cannot know what its step divides by, so a step that is right puts them aside."""


@dataclass
class StepReport:
    """as_json: {"step": ..., "files": {name: report}, "findings": [...]}."""

    parts: list[Part]
    files: list[Report]
    kind: str = ""
    solved: list[Solved] = field(default_factory=list)
    used: list[list[str]] = field(default_factory=list)  # names whose denominator a file has
    fits: list[str] = field(default_factory=list)  # names that fit every file
    agrees: bool | None = None
    relative_error: float | None = None
    cosine: float | None = None
    findings: list[Finding] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def worst(self) -> str | None:
        found = [f.severity for f in self.findings] + [f.severity for report in self.files for f in report.findings]
        return max(found, key=SEVERITIES.index, default=None)

    def named(self) -> list[str]:
        return [f.name for f in self.findings]

    def as_json(self) -> dict:
        denominators = [None if np.isnan(s.denominator) else float(s.denominator) for s in self.solved]
        return {
            "step": {
                "agrees": self.agrees,
                "relative_error": self.relative_error,
                "cosine": self.cosine,
                "counts": self.kind,
                "fits": self.fits,
                "denominators": [
                    {"file": part.name, "denominator": d, "names": names}
                    for part, d, names in zip(self.parts, denominators, self.used)
                ],
                "in_words": self.lines,
            },
            "findings": [f.as_json() for f in self.findings],
            "files": {part.name: report.as_json() for part, report in zip(self.parts, self.files)},
        }


def audit_step(
    parts: Sequence[Part],
    declared: Declared | None = None,
    numbers: dict[str, float] | None = None,
    averaged: bool = True,
) -> StepReport:
    """Audit each file, then the step. averaged: the ranks' gradients are averaged (DDP), else summed. Gradient: none."""
    parts = list(parts)
    ranks = len({part.rank for part in parts})
    files = [audit(part.recording, declared, _window(parts, ranks, averaged) | (numbers or {})) for part in parts]
    report = StepReport(parts, files)
    _say_clip(report, averaged)
    if any("mask" not in part.recording.arrays or "logps" not in part.recording.arrays for part in parts):
        report.lines.append("denominators: not compared: every file needs logps and mask, rows x tokens")
        return report
    are_pairs = [is_preference(part.recording) for part in parts]
    if not any(are_pairs):
        _say_advantages(report, declared)
    row = declared.row if declared is not None else _pair_row_of(parts) if any(are_pairs) else _row_of(files)
    if row is None:
        report.lines.append("denominators: not compared: no file's objective is known; declare one (--declared ROW)")
    elif any(recorded(part, ranks, averaged) is None for part in parts):
        report.lines.append("denominators: not compared: every file needs dloss_dlogps (or backward_dlogps)")
    else:
        _say_denominators(report, row, declared, ranks, averaged)
    if report.agrees:
        for file in files:
            file.findings = [f for f in file.findings if f.name not in OF_ONE_FILE]
    return report


def _window(parts: Sequence[Part], ranks: int, averaged: bool) -> dict[str, float]:
    """The counts of the step, for the audit of a file that does not hold them."""
    masks = [part.recording.arrays.get("mask") for part in parts]
    if any(mask is None for mask in masks) or any("num_items_in_batch" in part.recording.numbers for part in parts):
        return {}
    tokens = float(sum(mask.sum() for mask in masks))
    return {"window_tokens": tokens / (ranks if averaged else 1)} if tokens else {}


def _row_of(files: Sequence[Report]) -> Row | None:
    """The objective that the files were matched with, by gradient before by value, without a mistake before with one."""
    names = {f.name for f in dataclasses.fields(Row)}
    found = [m for report in files for key in ("matches", "with_a_mistake") for m in report.loss.get(key, [])[:1]]
    found = [m for m in found if "ratio" in m]  # a policy's loss
    found.sort(key=lambda m: (m.get("by") != "gradient and value", bool(m.get("mistakes"))))
    for match in found:
        try:
            return Row("step", **{k: v for k, v in match.items() if k in names and k not in ("rows", "accumulation")})
        except (ValueError, TypeError):
            continue
    return None


def _pair_row_of(parts: Sequence[Part]) -> PreferenceRow | None:
    """The loss of pairs that the first file to be matched was matched with."""
    found = (search_preferences(part.recording) for part in parts)
    return next((m.row for result in found for m in [*result.matches, *result.mistakes][:1]), None)


def _slopes(report: StepReport, row: Row | PreferenceRow, declared: Declared | None) -> tuple[str, str, list[np.ndarray]]:
    """What the objective counts, its reduction in words, and its undivided gradient in each file. Raises ValueError."""
    if isinstance(row, PreferenceRow):
        beta = report.parts[0].recording.number("beta")
        if declared is not None and beta and "beta" not in declared.set_fields:
            row = replace(row, beta=beta)
        return "pairs", "mean over pairs", [pair_numerators(row, part) for part in report.parts]
    row = _with_numbers(row, report.parts[0].recording, declared)
    kind, slopes = KINDS.get(row.reduction, "tokens"), []
    for part in report.parts:
        A = part.recording.get("advantages")
        slopes.append(numerators(row, part, kind, np.ones(len(part.recording.arrays["mask"])) if A is None else A))
    return kind, row.reduction.replace("_", " "), slopes


def _with_numbers(row: Row, recording: Recording, declared: Declared | None) -> Row:
    """A declared row takes the recorded widths and coefficient, unless they were set; without a reference it has no KL."""
    if declared is None:
        return row
    if row.kl_in_loss and "ref_logps" not in recording:
        row = replace(row, kl="none", kl_coef=0.0)
    names = {"clip_low": "clip_low", "clip_high": "clip_high", "kl_coef": "beta", "ratio_cap": "ratio_cap"}
    known = {k: recording.number(n) for k, n in names.items() if k not in declared.set_fields and row.reads(k)}
    kept = ("kl_coef",) if row.surrogate == "cispo" else tuple(known)
    return replace(row, **{k: v for k, v in known.items() if v is not None and k in kept})


def _say_denominators(
    report: StepReport, row: Row | PreferenceRow, declared: Declared | None, ranks: int, averaged: bool
) -> None:
    parts = report.parts
    gradients = [recorded(part, ranks, averaged) for part in parts]
    try:
        kind, words, slopes = _slopes(report, row, declared)
    except ValueError as problem:
        report.lines.append(f"denominators: not compared: {problem}")
        return
    report.kind = kind
    report.solved = [solve(g, s) for g, s in zip(gradients, slopes)]
    D = np.array([s.denominator for s in report.solved])
    names = hypotheses(parts, kind, averaged)
    hits = {name: same(D, values) for name, values in names.items()}
    report.used = [[name for name, hit in hits.items() if hit[i]] for i in range(len(parts))]
    shaped = all(s.rest <= SHAPE for s in report.solved)
    report.fits = [name for name, hit in hits.items() if hit.all()] if shaped and not np.isnan(D).all() else []
    total = names["right"][0]
    whole, wanted = (np.concatenate([x.ravel() for x in each]) for each in (gradients, [s / total for s in slopes]))
    size = float(np.linalg.norm(wanted))
    if size:
        report.relative_error = float(np.linalg.norm(whole - wanted)) / size
        report.cosine = float(whole @ wanted) / max(size * float(np.linalg.norm(whole)), 1e-300)
        report.agrees = report.relative_error <= SAME
    how = "averaged over" if averaged else "summed over"
    report.lines.append(f"objective: {words}; counts {kind}; gradients {how} {ranks} rank(s)")
    for part, s, used in zip(parts, report.solved, report.used):
        if np.isnan(s.denominator) and s.rest == 0:
            report.lines.append(f"{part.name} has no gradient: every token is closed or has advantage 0; any count fits")
            continue
        rest = f"; {s.rest:.1e} of its gradient is no multiple of the objective's" if s.rest > SHAPE else ""
        report.lines.append(f"{part.name} divides by {s.denominator:.6g}: {', '.join(used) or 'none of the known counts'}{rest}")
    # Some trainers take a mean a micro-batch and say so in their row: that is no mistake of theirs.
    by_design = declared is not None and averaged and getattr(declared.row, "accumulation", "none") == "divide"
    _say_step(report, total, "mean_of_means" if by_design else None, is_declared=declared is not None)


def _say_step(report: StepReport, total: float, by_design: str | None, is_declared: bool) -> None:
    if report.relative_error is None:
        report.lines.append("the step: every gradient is 0, nothing to compare")
        return
    off = f"relative error {report.relative_error:.4g}, cosine {report.cosine:.4g}"
    mistakes = [name for name in report.fits if name not in ("right", RECORDED_WINDOW)]
    if report.agrees:
        report.lines.append(f"the step: the recorded gradients add up to the objective on the joined batch ({off})")
        if mistakes:
            report.lines.append(f"cannot tell from this split: {listed(mistakes)} would give the same numbers here")
        return
    if RECORDED_WINDOW in report.fits:
        line = "the step: every file divides by the step's share of the generation batch (num_items_in_batch), by number of "
        report.lines.append(line + f"micro-batches, not by its own count of {total:g}: the trainer's convention ({off})")
        return
    report.lines.append(f"the step: the recorded gradients are not the objective on the joined batch ({off})")
    if not mistakes:
        evidence = f"Right is one count of {total:g} in every file; {off}."
        what = "the files' gradients are not those of one objective on the joined batch, and no known mistake gives them"
        advice = "check that the averaging is the right one (--averaging mean or sum) and record backward_dlogps"
        report.findings.append(Finding("step_not_reproduced", "warning", f"{what}. {evidence}", (), advice))
        return
    severity = "mistake" if is_declared and by_design not in mistakes else "warning"
    values = sorted({f"{s.denominator:.6g}" for s in report.solved if not np.isnan(s.denominator)}, key=float)
    evidence = f"Divides by {', '.join(values[:6])}; right is {total:.6g} in every file ({off})."
    report.findings.append(finding(mistakes[0], severity, evidence + cannot_tell_from(mistakes[0], mistakes)))


# ------------------------------------------------------------------------------------------ advantages


_JOINED = ("rewards", "group_ids", "advantages", "advantages_raw")
_WHITENED = ("batch_std", "token_std", "batch_std_of_raw_rewards")


def _joined(parts: Sequence[Part]) -> Recording:
    """The rows of several files under each other, with what an advantage rule reads."""
    width = max(part.recording.arrays["mask"].shape[1] for part in parts)
    names = [n for n in _JOINED if all(n in part.recording.arrays for part in parts)]

    def wide(x: np.ndarray) -> np.ndarray:
        return np.pad(x, ((0, 0), (0, width - x.shape[1]))) if x.ndim == 2 else x

    arrays = {name: np.concatenate([wide(part.recording.arrays[name]) for part in parts]) for name in ("mask", *names)}
    return Recording(arrays, {}, max(part.recording.eps for part in parts))


def _say_advantages(report: StepReport, declared: Declared | None) -> None:
    """Whether the advantages are a rule's on the joined rows, or on each rank's (or file's) rows alone."""
    parts = report.parts
    arrays = [part.recording.arrays for part in parts]
    if any("gen_rewards" in a or "advantages" not in a or not ("rewards" in a or "advantages_raw" in a) for a in arrays):
        return
    rule = declared.advantage_fields() if declared is not None else None

    def matched(some: Sequence[Part]) -> list[dict] | None:
        result = search_advantages(_joined(some), look_for_mistakes=False, declared=rule)
        return [m.fields for m in result.matches if rule is None or all(m.fields.get(k, v) == v for k, v in rule.items())]

    whole = matched(parts)
    ranks = [[p for p in parts if p.rank == rank] for rank in dict.fromkeys(p.rank for p in parts)]
    for each, where in ((ranks, "rank"), ([[p] for p in parts], "micro-batch")):
        if len(each) < 2:
            continue
        local = [matched(some) for some in each]
        shared = [fields for fields in local[0] if all(fields in other for other in local)]
        if not shared:
            continue
        fields = shared[0]
        whitened = fields.get("scale") in _WHITENED or fields.get("baseline") == "given"
        name = "local_whitening" if whitened else "local_group_statistics"
        if any(f in whole for f in shared):
            line = f"advantages: the same from the step's rows and from each {where}'s alone; cannot tell {name}"
            report.lines.append(line)
        elif whole:
            continue
        else:
            evidence = f"Each {where}'s rows alone give its advantages; the {len(parts)} files together do not."
            if name == "local_group_statistics":
                evidence += " (Where group ids are numbered anew on each rank, nothing is wrong.)"
            report.findings.append(finding(name, "mistake" if declared is not None else "warning", evidence))
        return
    if whole:
        report.lines.append("advantages: a rule over the rows of the whole step gives them")


# ------------------------------------------------------------------------------------------ clipping the gradient


def _say_clip(report: StepReport, averaged: bool) -> None:
    """The optimiser's gradient from the ranks' own: reduced, then clipped; or the other way round."""
    ranks = {}
    for part in report.parts:
        if "rank_gradient" in part.recording.arrays:
            ranks[part.rank] = part.recording.arrays["rank_gradient"].ravel()
    first = report.parts[0].recording
    taken, norm = first.get("step_gradient"), first.number("max_grad_norm")
    if taken is None or norm is None or len(ranks) < len({part.rank for part in report.parts}):
        return
    taken, combine = taken.ravel(), np.mean if averaged else np.sum
    if any(len(g) != len(taken) for g in ranks.values()):
        return
    own = list(ranks.values())
    right = clipped(combine(own, axis=0), norm)
    wrong = combine([clipped(g, norm) for g in own], axis=0)
    fits = [float(np.linalg.norm(taken - x)) <= SAME * max(float(np.linalg.norm(x)), 1e-30) for x in (right, wrong)]
    if fits == [True, True]:
        report.lines.append("gradient clip: the same before and after the reduction here; cannot tell clip_before_reduce")
    elif fits[0]:
        report.lines.append(f"gradient clip: to {norm:g}, after the reduction")
    elif fits[1]:
        off = float(np.linalg.norm(taken - right)) / max(float(np.linalg.norm(right)), 1e-30)
        evidence = f"Clipped to {norm:g} on each rank, then combined: {off:.3g} off the reduced and then clipped gradient."
        report.findings.append(finding("clip_before_reduce", "mistake", evidence))
    else:
        report.lines.append("gradient clip: neither order gives the recorded step_gradient")
