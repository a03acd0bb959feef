"""The step in words: a line a file, then the step as a whole."""

from __future__ import annotations

import textwrap
from dataclasses import replace

from extensions.audit.say.report import ENGLISH, Language
from extensions.audit.step.verdict import StepReport


def printed_step(report: StepReport, path: str, language: Language = ENGLISH) -> str:
    """The report as text; titles stay English, findings are in the language."""
    out = [f"Audit of the step in {path}: {len(report.parts)} files", "", "Files (audit one alone for its whole report)"]
    for part, file in zip(report.parts, report.files):
        rows, tokens = file.batch.get("rows"), file.batch.get("tokens")
        about = next((line for line in file.lines.get("loss", []) if line), "not checked")
        count = "" if rows is None else f"{rows} answers" + ("" if tokens is None else f", {tokens} tokens") + ": "
        out += _wrapped(f"{part.name}  {count}{about}")
        out += [f"  {line}" for f in file.findings for line in language.finding_lines(replace(f, rows=(), advice=""))]
    out += ["", "Step", *(line for text in report.lines for line in _wrapped(text)), "", "Findings of the step"]
    if not report.findings:
        out.append("  none")
    for f in report.findings:
        out += language.finding_lines(f)
    return "\n".join(out)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 116, initial_indent="  ", subsequent_indent="    ") or [""]
