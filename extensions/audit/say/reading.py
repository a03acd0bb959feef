"""The reading in the report: the section "What the gradient says", its findings, and what it settles of the search."""

from __future__ import annotations

import numpy as np

from extensions.audit.catalogue import Finding, finding
from extensions.audit.reading.compare import named
from extensions.audit.reading.reading import Reading
from extensions.audit.reading.words import gradient_lines
from extensions.audit.say.report import Report
from extensions.audit.tolerance import RATIO

NOT_EXPLAINED = ("not_reproduced", "declared_not_seen", "gradient_value_disagree")


def say_reading(reading: Reading | None, report: Report) -> None:
    """Add the reading to the report. Where the search names nothing, the reading decides: a mistake, or explained."""
    if reading is None:
        return
    report.reading = reading.as_json()
    report.lines["reading"] = gradient_lines(reading)
    report.findings += _sampler_not_used(reading)
    unexplained = [f for f in report.findings if f.name in NOT_EXPLAINED]
    if not unexplained and "unexplained_factor" not in report.named() or reading.gate is None:
        return
    mistakes = [finding(x.name, x.severity, x.evidence, x.rows) for x in named(reading)]
    if mistakes:
        _replace(report, unexplained, mistakes)
    elif reading.complete and unexplained:
        kept = [f for f in unexplained if f.name == "declared_not_seen"]
        _replace(report, [f for f in unexplained if f not in kept], [])
        report.loss["explained_by"] = "reading"
        report.gradient = {"agrees": True if report.gradient.get("agrees") is False else report.gradient.get("agrees")}
        loss = report.lines.get("loss", [])
        loss[:] = [line for line in loss if not line.startswith(("none of the hypotheses", "nearest gradient"))]
        loss.insert(0, "no named combination of the table; explained in full by what the gradient says (below)")


def _sampler_not_used(reading: Reading) -> list[Finding]:
    """A loss explained in full without the sampler's log-probabilities, which are there and are others than the trainer's."""
    if not reading.complete or reading.account is None:
        return []
    f = reading.account.guess.facts
    read = f"{reading.weight} {reading.kl_anchor} {[x.quantity for x in (*reading.closed, *reading.factors)]}"
    found = []
    for name in ("sampler_logps", "sampler_weights"):
        x = f.extras.get(name)
        if x is None or name in read:
            continue
        ratio = np.exp(np.where(f.mask, f.old - x, 0.0)) if name == "sampler_logps" and f.old is not None else x
        counted = np.broadcast_to(ratio, f.mask.shape)[f.mask]
        if np.ptp(counted) > RATIO:
            evidence = f"old / sampler is {counted.min():.4g} to {counted.max():.4g}" if name == "sampler_logps" else f"{name} is recorded"
            found.append(finding("sampler_correction_absent", "note", f"{evidence}, and no factor of the gradient has it."))
    return found


def _replace(report: Report, old: list[Finding], new: list[Finding]) -> None:
    report.findings = [f for f in report.findings if f not in old] + [f for f in new if f.name not in report.named()]
