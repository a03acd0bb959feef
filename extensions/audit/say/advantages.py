"""From the search for an advantage rule to words and findings: over answers, and over time in an environment."""

from __future__ import annotations

import numpy as np

from extensions.audit.catalogue import CATALOGUE, finding
from extensions.audit.declared import ADVANTAGE_DEFAULTS, Declared
from extensions.audit.read.recording import Recording
from extensions.audit.say.report import DECIDES_ADVANTAGES, MOST_MATCHES, Report, cannot_tell_from, row_names, tie_lines
from extensions.audit.search.match import differing
from extensions.audit.search.over_time import search_time
from extensions.audit.search.rules import AdvantageMatch, AdvantageResult, rows_with


_ADVANTAGE_FINDINGS = {"std_eps": "std_eps_differs", "std_guard": "std_eps_differs"}


def say_advantages(recording: Recording, declared: Declared | None, result: AdvantageResult, report: Report) -> None:
    """Fill the advantages, their lines and their findings of the report."""
    lines = report.lines.setdefault("advantages", [])
    report.remarks += result.remarks
    matches, mistakes = result.matches, result.mistakes
    report.advantages = _as_json(result)
    if not result.checked:
        _say_unchecked(result, report)
    elif matches:
        for match in matches[:3]:
            names = rows_with(match.fields)
            lines.append(f"{match.label()}{row_names(names)}" + (f"  ({match.remark})" if match.remark else ""))
        ties = tie_lines([m.fields for m in matches], DECIDES_ADVANTAGES, {})
        lines += ties
        report.cannot_tell += [f"advantages: {line}" for line in ties]
        lines.append(f"{result.tried} rules tried; largest difference {matches[0].gap:.1e}")
        if declared is not None and not declared.is_pairs:
            _declared_advantages(declared, matches, report)
        elif report.batch.get("groups", 1) > 1 and all(
            m.fields.get("baseline") == "batch_mean"
            or m.fields.get("baseline") == "none"
            and m.fields.get("scale") == "batch_std"
            for m in matches
        ):
            evidence = f"{report.batch['groups']} groups are recorded and not used: {matches[0].label()}; "
            evidence += "right for REINFORCE++ and for a mean of the batch, wrong for GRPO."
            report.findings.append(finding("groups_pooled", "warning", evidence))
        _baseline_notes(recording, matches, report)
    elif mistakes:
        report.missing += result.missing
        _say_mistakes(result, report)
    else:
        report.missing += result.missing
        lines.append(f"none of {result.tried} rules gives the reported advantages")
        advice = (
            "record rewards before any shaping, group_ids, and for a micro-batch gen_rewards, gen_group_ids and row_ids of "
            "the whole generation batch"
        )
        evidence = f"Advantages: {result.tried} rules tried."
        report.findings.append(finding("not_reproduced", "warning", evidence, advice=advice))


def _as_json(result: AdvantageResult) -> dict:
    def one(m: AdvantageMatch) -> dict:
        mistake = {"mistake": m.mistakes[0]} if m.mistakes else {"rows": rows_with(m.fields)}
        return {**m.fields, **mistake, "largest_difference": m.gap, "reads": m.reads}

    return {
        "matches": [one(m) for m in result.matches[:MOST_MATCHES]],
        "with_a_mistake": [one(m) for m in result.mistakes[:MOST_MATCHES]],
        "tried": result.tried,
    }


def _say_unchecked(result: AdvantageResult, report: Report) -> None:
    report.missing += result.missing
    wanted = f": record {'; '.join(result.missing)}" if result.missing else ""
    report.lines["advantages"].append(f"not checked{wanted}")


def _say_mistakes(result: AdvantageResult, report: Report) -> None:
    names = list(dict.fromkeys(m.mistakes[0] for m in result.mistakes))
    if len(names) > 1:
        report.cannot_tell.append(f"mistake: {', '.join(names)}")
    for name in names:
        match = next(m for m in result.mistakes if m.mistakes[0] == name)
        report.lines["advantages"].append(f"{match.label()}, with a mistake: {CATALOGUE[name].what}")
        parts = [f"With it, {match.label()} gives the reported {match.reads} within {match.gap:.1e}"]
        parts += [match.remark] if match.remark else []
        evidence = f"{'; '.join(parts)} ({result.tried} rules tried).{cannot_tell_from(name, names)}"
        report.findings.append(finding(name, "mistake", evidence, match.rows))


def _declared_advantages(declared: Declared, matches, report: Report) -> None:
    wanted = declared.advantage_fields()
    if not wanted:
        return
    differences = [differing({**ADVANTAGE_DEFAULTS, **m.fields}, wanted) for m in matches]
    if any(not d for d in differences):
        return
    # Of rules that tie, one may differ in this and another in that: only what all of them contradict is a finding.
    shared = [name for name in differences[0] if all(name in d for d in differences)]
    got, names = matches[0], shared
    if not shared:
        evidence = f"Declared {declared.row.name}; the rules that fit are {'; or '.join(m.label() for m in matches[:3])}."
        report.findings.append(finding("advantage_rule_differs", "warning", evidence))
    for name in names:
        value, expected = {**ADVANTAGE_DEFAULTS, **got.fields}.get(name), wanted[name]
        if name == "std_ddof":
            key = "sample_for_population_std" if value == 1 else "population_for_sample_std"
        elif name in ("baseline", "scale", "credit", "reward_parts"):
            # A mean and a std over the whole batch are another estimator's rule, and what pooled groups amount to.
            over_batch = got.fields.get("baseline") == "batch_mean" or (
                got.fields.get("baseline") == "none" and got.fields.get("scale") in ("batch_std", "token_std")
            )
            pooled = over_batch and wanted["baseline"] in ("group_mean", "leave_one_out")
            key = "groups_pooled" if pooled else "advantage_rule_differs"
        else:
            key = _ADVANTAGE_FINDINGS.get(name, "advantage_rule_differs")
        report.findings.append(
            finding(key, "mistake", f"Declared {name} {expected}, the reported advantages follow {value}: {got.label()}.")
        )
        if key in ("advantage_rule_differs", "groups_pooled"):
            break


def _baseline_notes(recording: Recording, matches, report: Report) -> None:
    empty = np.flatnonzero(~recording.arrays["mask"].any(1))
    truncated = recording.get("row_truncated")
    rows = np.union1d(empty, np.flatnonzero(truncated)) if truncated is not None else empty
    if len(rows) and matches[0].fields.get("baseline") in ("group_mean", "leave_one_out") and not matches[0].remark:
        report.findings.append(
            finding("dropped_rows_in_baseline", "note", f"{len(rows)} of {len(recording.arrays['mask'])} rows.", rows)
        )


def say_time(recording: Recording, report: Report) -> None:
    """Search a rollout of an environment, and fill the advantages, their lines and their findings of the report."""
    lines = report.lines.setdefault("advantages", [])
    result = search_time(recording)
    report.remarks += result.remarks
    report.lines["loss"] = ["not checked: a rollout of an environment, no loss in it"]
    report.advantages = _as_json(result)
    if any("two flags" in m for m in result.missing):
        report.findings.append(finding("flags_missing", "warning", "Taken as ends of episodes, all of them."))
    if any(m.startswith("terminal_values") for m in result.missing):
        evidence = "The value after the reset stands in its place."
        report.findings.append(finding("final_value_missing", "warning", evidence))
    if not result.checked:
        _say_unchecked(result, report)
        return
    report.missing += result.missing
    if result.matches:
        for m in result.matches[:3]:
            words = f" ({m.remark})" if m.remark else ""
            lines.append(f"{m.label()}, with terminated and boundary apart, gives the reported {' and '.join(m.fits)}{words}")
        lines.append(f"{result.tried} rules tried; largest difference {result.matches[0].gap:.1e}")
        report.findings += [finding(name, severity, evidence) for name, severity, evidence in result.unfit.values()]
    elif result.mistakes:
        _say_mistakes(result, report)
    else:
        lines.append(f"none of {result.tried} rules gives what was reported")
        advice = "record gamma, lam, terminal_values and both flags"
        evidence = f"Advantages: {result.tried} rules tried."
        report.findings.append(finding("not_reproduced", "warning", evidence, advice=advice))
