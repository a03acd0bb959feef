"""The reading in the report: the section "What the gradient says", its findings, and what it settles of the search."""

from __future__ import annotations

from extensions.audit.catalogue import Finding, finding
from extensions.audit.reading.compare import named
from extensions.audit.reading.reading import Reading
from extensions.audit.reading.words import gradient_lines
from extensions.audit.say.report import Report

NOT_EXPLAINED = ("not_reproduced", "declared_not_seen", "gradient_value_disagree")


def say_reading(reading: Reading | None, report: Report) -> None:
    """Add the reading to the report. Where the search names nothing, the reading decides: a mistake, or explained."""
    if reading is None:
        return
    report.reading = reading.as_json()
    report.lines["reading"] = gradient_lines(reading)
    unexplained = [f for f in report.findings if f.name in NOT_EXPLAINED]
    if not unexplained or reading.gate is None:
        return
    mistakes = [finding(x.name, x.severity, x.evidence, x.rows) for x in named(reading)]
    if mistakes:
        _replace(report, unexplained, mistakes)
    elif reading.complete:
        kept = [f for f in unexplained if f.name == "declared_not_seen"]
        _replace(report, [f for f in unexplained if f not in kept], [])
        report.loss["explained_by"] = "reading"
        report.gradient = {"agrees": True if report.gradient.get("agrees") is False else report.gradient.get("agrees")}
        loss = report.lines.get("loss", [])
        loss[:] = [line for line in loss if not line.startswith(("none of the hypotheses", "nearest gradient"))]
        loss.insert(0, "no named combination of the table; explained in full by what the gradient says (below)")


def _replace(report: Report, old: list[Finding], new: list[Finding]) -> None:
    report.findings = [f for f in report.findings if f not in old] + [f for f in new if f.name not in report.named()]
