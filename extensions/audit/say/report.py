"""The report: what it holds, how ties are said, how it is printed and written as JSON.

Where several hypotheses explain a recording equally well, one line names the alternatives and the recording that would
decide between them (DECIDES_*).
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, field
from typing import Callable, NamedTuple, Sequence

from extensions.audit.catalogue import MISTAKES, NOTES, SEVERITIES, Finding
from extensions.audit.search.match import Match, rows_with


@dataclass
class Report:
    """Everything the audit says; `as_json` is what --json writes."""

    batch: dict = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    advantages: dict = field(default_factory=dict)
    loss: dict = field(default_factory=dict)
    gradient: dict = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    cannot_tell: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    lines: dict[str, list[str]] = field(default_factory=dict)
    reading: dict | None = None  # what the recorded gradient says, solved
    quantities: dict[str, dict] = field(default_factory=dict)  # name -> verdict (fits, does not fit, not compared), why

    def worst(self) -> str | None:
        return max((f.severity for f in self.findings), key=SEVERITIES.index, default=None)

    def named(self) -> list[str]:
        return [f.name for f in self.findings]

    def as_json(self) -> dict:
        return _finite(
            {
                "batch": {**self.batch, "in_words": self.words},
                "advantages": {"matches": [], **self.advantages},
                "loss": {"matches": [], "tried": 0, **self.loss},
                "gradient": {"agrees": None, **self.gradient},
                "reading": self.reading,
                "quantities": self.quantities,
                "findings": [f.as_json() for f in self.findings],
                "cannot_tell": self.cannot_tell,
                "record_next": self.missing,
                "remarks": self.remarks,
            }
        )


def _finite(value):
    """JSON has no infinities: they become strings."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


MOST_MATCHES = 40


def match_json(m: Match) -> dict:
    return {
        **m.fields,
        "factor": m.factor,
        "by": m.by,
        "gradient_residual": m.residual,
        "loss_difference": m.gap,
        "rows": rows_with(m.fields),
        "in_words": m.label(),
        **({"mistakes": list(m.mistakes)} if m.mistakes else {}),
        **({"remarks": list(m.remarks)} if m.remarks else {}),
    }


# ------------------------------------------------------------------------------------------ ties


DECIDES_LOSS = {
    "ratio": "a batch of a later pass, where ratios differ from 1, with dloss_dlogps",
    "surrogate": "a batch of a later pass with ratios outside the band",
    "clip_low": "a batch of a later pass with ratios between the widths, or clip_low and clip_high themselves",
    "clip_high": "a batch of a later pass with ratios between the widths, or clip_low and clip_high themselves",
    "ratio_cap": "a token with A < 0 and a ratio above the cap",
    "off_policy_rows": "answers with A < 0 further from the policy that sampled",
    "off_policy_threshold": "the threshold itself (off_policy_threshold)",
    "reduction": "rows of unequal length with dloss_dlogps, num_items_in_batch, budget (max_completion_length)",
    "budget": "budget (max_completion_length)",
    "window_tokens": "num_items_in_batch",
    "rows_counted": "a batch with an empty row",
    "kl": "ref_logps that differ from logps, with dloss_dlogps",
    "kl_weight": "ratios that differ from 1, with dloss_dlogps",
    "kl_gradient": "dloss_dlogps",
    "kl_coef": "beta",
    "kl_anchor": "old_logps that differ from ref_logps",
    "entropy_coef": "dloss_dentropies",
    "value_loss": "dloss_dvpreds",
    "value_coef": "dloss_dvpreds",
    "value_clip": "dloss_dvpreds, with values that moved beyond the clip",
}


_DECIDES_BETWEEN = (
    ("surrogate", {"clip", "dual_clip", "capped_clip"}, "a token with A < 0 and a ratio above the cap c"),
    (
        "reduction",
        {"mean_over_window", "mean_over_tokens"},
        "a micro-batch of a larger window (accumulation_steps above 1), with num_items_in_batch",
    ),
)
"""What decides when only these values are left; it comes before the text for the field in general."""


DECIDES_ADVANTAGES = {
    "baseline": "rewards that differ within groups",
    "std_ddof": "groups with spread",
    "std_eps": "a group whose spread is small",
    "std_guard": "a group whose spread is small",
    "singleton": "a group of one",
    "scale": "groups of different spread",
    "credit": "rewards on several tokens",
    "gamma": "gamma",
    "lam": "lam",
}


def tie_lines(all_fields: list[dict], decides: dict[str, str], defaults: dict) -> list[str]:
    """One line for each choice in which tied hypotheses differ: the alternatives, and the recording that would decide."""
    lines = []
    for name, recording in decides.items():
        values = []
        for fields in all_fields:
            value = fields.get(name, defaults.get(name))
            if value is not None and value not in values:
                values.append(value)
        if len(values) > 1:
            shown = ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values[:6]) + (
                " ..." if len(values) > 6 else ""
            )
            special = (text for field_, among, text in _DECIDES_BETWEEN if field_ == name and among.issuperset(values))
            lines.append(f"cannot tell {name.replace('_', ' ')}: {shown}. To decide, record {next(special, recording)}")
    return lines


def tied(matches: list[Match]) -> list[Match]:
    """The matches that explain the recording as well as the best one does."""
    if not matches:
        return []
    best = matches[0]
    return [m for m in matches if m.by == best.by and m.weak == best.weak and m.order[3] == best.order[3]]


def row_names(names: Sequence[str]) -> str:
    if not names:
        return ""
    return "  [" + ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") + "]"


def cannot_tell_from(name: str, names: Sequence[str]) -> str:
    """A sentence for evidence that fits several mistakes; empty for one."""
    others = [other for other in names if other != name]
    return f" Cannot tell from: {', '.join(others)}." if others else ""


def listed(names: Sequence[str]) -> str:
    """a, b and c, in words."""
    words = [name.replace("_", " ") for name in names]
    return ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1]


# ------------------------------------------------------------------------------------------ printed


class Language(NamedTuple):
    """How the printed report and --list say things; ENGLISH here, CHINESE in say/chinese.py. The JSON knows no language."""

    word: Callable[[str], str]  # a title or a fixed word, from the English one
    finding_lines: Callable[[Finding], list[str]]
    listed_lines: Callable[[str], list[str]]  # an entry of MISTAKES or NOTES, for --list


def _english_finding(f: Finding) -> list[str]:
    out = textwrap.wrap(f"{f.severity.upper()}  {f.name}: {f.evidence}", 116, initial_indent="  ", subsequent_indent="    ")
    out += [f"    rows: {rows_shown(f)}"] if f.rows else []
    if f.advice:
        out += textwrap.wrap(f"change: {f.advice}", 116, initial_indent="    ", subsequent_indent="      ")
    return out


def rows_shown(f: Finding) -> str:
    return ", ".join(map(str, f.rows[:12])) + (f" and {len(f.rows) - 12} more" if len(f.rows) > 12 else "")


def _english_entry(name: str) -> list[str]:
    if name in NOTES:
        return [name, *textwrap.wrap(NOTES[name], 110, initial_indent="    ", subsequent_indent="    ")]
    what, advice = MISTAKES[name]
    return [
        name,
        *textwrap.wrap(what, 110, initial_indent="    ", subsequent_indent="    "),
        *textwrap.wrap(f"change: {advice}", 110, initial_indent="    ", subsequent_indent="      "),
    ]


ENGLISH = Language(word=str, finding_lines=_english_finding, listed_lines=_english_entry)


def printed(report: Report, path: str, language: Language = ENGLISH) -> str:
    word = language.word
    out = [f"{word('Audit of')} {path}", "", word("Batch"), *_indented(report.words)]
    for title, key in (("Advantages", "advantages"), ("Loss", "loss")):
        out += ["", word(title), *_indented(report.lines.get(key, [word("not checked")]))]
    agrees = report.gradient.get("agrees")
    residual = report.gradient.get("residual")
    words = {
        True: "agrees with the best match",
        False: "differs from every right computation tried; agrees with one that has the mistake below",
        None: "recorded, and not checked: nothing to compare it with" if report.gradient.get("recorded") else "not recorded",
    }[agrees]
    if agrees is False and report.gradient.get("differs"):
        words = report.gradient["differs"]
    off = f" (off by {residual:.1e} of its size)" if residual is not None else ""
    out += ["", word("Gradient"), f"  {word(words)}{off}"]
    if "reading" in report.lines:
        out += ["", word("What the gradient says"), *_indented(report.lines["reading"])]
    if report.lines.get("metrics"):
        out += ["", word("Reported metrics"), *_indented(report.lines["metrics"])]
    out += ["", word("Findings")]
    if not report.findings:
        out.append(f"  {word('none')}")
    for f in report.findings:
        out += language.finding_lines(f)
    if report.missing:
        out += ["", word("To decide more, record"), *_indented([word(text) for text in report.missing])]
    if report.remarks:
        out += ["", word("Remarks"), *_indented(report.remarks)]
    return "\n".join(out)


def _indented(lines: Sequence[str]) -> list[str]:
    return [
        piece
        for line in lines
        for piece in textwrap.wrap(line, 118, initial_indent="  ", subsequent_indent="    ", drop_whitespace=True) or [""]
    ]
