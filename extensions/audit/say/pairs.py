"""From the search for a preference loss to words and findings."""

from __future__ import annotations

from dataclasses import replace

from extensions.audit.catalogue import CATALOGUE, Finding, finding
from extensions.audit.checks.healthy import pair_findings
from extensions.audit.declared import Declared
from extensions.audit.read.recording import Recording
from extensions.audit.say.report import MOST_MATCHES, Report, cannot_tell_from, row_names, tie_lines
from extensions.audit.search.pairs import PairMatch, search_preferences
from extensions.objectives import PreferenceRow

DECIDES_PAIRS = {
    "loss": "margins that differ from 0 (a later step), with the gradient",
    "score": "answers of unequal length",
    "beta": "beta",
    "label_smoothing": "label_smoothing and the gradient",
    "tail_weight": "pairs of unequal length",
    "gamma": "gamma",
    "sft_coef": "the coefficient",
    "divergence": "a later step",
}


def say_pairs(recording: Recording, declared: Declared | None, report: Report) -> None:
    """Search, then fill the loss, the gradient, the lines and the findings of the report."""
    lines = report.lines.setdefault("loss", [])
    report.lines["advantages"] = ["a preference loss has none"]
    row = declared.row if declared is not None and declared.is_pairs else None
    if row is not None and "beta" in declared.set_fields:
        recording = replace(recording, numbers={"beta": row.beta, **recording.numbers})
    result = search_preferences(recording, declared=row.name if row is not None else None)
    has_gradient = any(name in recording.arrays for name in ("dloss_dlogps", "dloss_dchosen_logps"))
    is_reported = recording.number("loss") is not None or has_gradient
    report.remarks += result.remarks
    report.missing += [name for name in result.missing if name != "beta" or not result.matches]
    if is_reported and not has_gradient:
        report.missing.append("dloss_dlogps (or dloss_dchosen_logps and dloss_drejected_logps)")

    def is_declared(match: PairMatch) -> bool:
        return row is None or row.name in match.names() or _same_loss(match.row, row)

    matches = sorted(result.matches, key=lambda m: (row is not None and row.name not in m.names(), m.order))
    report.loss = {
        "matches": [_as_json(m) for m in matches[:MOST_MATCHES]],
        "with_a_mistake": [_as_json(m) for m in result.mistakes[:MOST_MATCHES]],
        "tried": result.tried,
        "expected_by_accident": result.chance,
        "reported": recording.number("loss"),
    }
    report.gradient = {"agrees": None, "recorded": has_gradient}
    fits = list(filter(is_declared, matches))
    mistakes = list(filter(is_declared, result.mistakes)) or ([] if matches else result.mistakes)
    if fits:
        _say_match(recording, fits, report)
    elif mistakes:
        _say_mistakes(recording, declared, mistakes, report)
    elif matches:
        lines.append(f"{matches[0].label()}{row_names(matches[0].names())}")
        report.gradient["agrees"] = True if matches[0].residual is not None else None
        report.findings.append(_declared_differs(matches[0], declared))
    elif is_reported:
        lines.append("none of the hypotheses gives what was reported")
        report.findings.append(finding("not_reproduced", "warning", f"Loss: {result.tried} hypotheses tried."))
    else:
        lines.append("not checked: no loss and no gradient recorded")
    by_accident = "" if has_gradient else f"; {result.chance:.2g} expected by accident"
    lines.append(f"{result.tried} hypotheses tried{by_accident}")
    report.findings += pair_findings(recording, result)


def _as_json(match: PairMatch) -> dict:
    return {
        **match.fields,
        "factor": match.factor,
        "by": match.by,
        "gradient_residual": match.residual,
        "loss_difference": match.gap,
        "rows": match.names(),
        "in_words": match.label(),
        **({"mistakes": list(match.mistakes)} if match.mistakes else {}),
    }


def _say_match(recording: Recording, fits: list[PairMatch], report: Report) -> None:
    lines, best = report.lines["loss"], fits[0]
    same = [m for m in fits if m.by == best.by]
    lines.append(f"{best.label()}{row_names(list(dict.fromkeys(name for m in same for name in m.names())))}")
    if best.gap is not None:
        lines.append(f"reported {recording.number('loss'):.6g}, recomputed within {abs(best.gap):.1e}")
    ties = tie_lines([m.fields for m in same], DECIDES_PAIRS, {})
    lines += ties
    report.cannot_tell += [f"loss: {line}" for line in ties]
    if best.residual is not None:
        agrees = best.by == "gradient and value" or best.gap is None
        report.gradient |= {"agrees": agrees, "residual": best.residual}
        if not agrees:
            report.gradient["differs"] = "agrees with the best match, whose value is not the reported one"
            evidence = f"{best.label()}: value differs by {best.gap:.3g}."
            report.findings.append(finding("gradient_value_disagree", "warning", evidence))


def _say_mistakes(recording: Recording, declared: Declared | None, mistakes: list[PairMatch], report: Report) -> None:
    best = mistakes[0]
    same = [m for m in mistakes if m.by == best.by]
    names = list(dict.fromkeys(name for m in same for name in m.mistakes))
    report.lines["loss"].append(f"{best.label()}, with a mistake: {CATALOGUE[names[0]].what}")
    if best.residual is not None:
        report.gradient |= {"agrees": False, "residual": best.residual}
    if len(names) > 1:
        report.cannot_tell.append(f"mistake: {', '.join(names)}")
    for name in names:
        match = next(m for m in same if name in m.mistakes)
        key, severity, advice = name, "mistake", None
        if name == "extra_division" and declared is None and "accumulation_steps" not in recording.numbers:
            key, severity, advice = "divided_by_whole_number", "warning", "record accumulation_steps"
        evidence = "; ".join([f"With it, {match.label()} gives what was reported", *match.remarks]) + "."
        report.findings.append(finding(key, severity, evidence + cannot_tell_from(name, names), advice=advice))


def _same_loss(got: PreferenceRow, row: PreferenceRow) -> bool:
    return all(getattr(got, name) == getattr(row, name) for name in ("loss", "score", "reference", "divergence"))


def _declared_differs(match: PairMatch, declared: Declared) -> Finding:
    got, row = match.row, declared.row
    name = "preference_loss_differs"
    if row.loss == got.loss and row.score != got.score:
        name = "ipo_sum_or_mean" if row.loss == "ipo" else "dpo_mean_for_sum"
    elif {row.loss, got.loss} <= {"sigmoid", "cdpo", "robust"}:
        name = "smoothing_variant"
    return finding(name, "mistake", f"Declared {row.name}, reproduced by {match.label()}.")
