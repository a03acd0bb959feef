"""python -m extensions.why LINE_OR_FILE: what the numbers of a log line mean."""

from __future__ import annotations

import json
import math
import sys
import textwrap
from pathlib import Path

import rl_lab
from extensions.why.reader import PART, name_of, read_records
from extensions.why.relations import explain_records

EXAMPLES = """\
examples:
  python -m extensions.why "{'loss': 0.0, 'grad_norm': 0.12, 'reward_std': 0.3, 'kl': 0.0}"
  python -m extensions.why trainer_log.jsonl --beta 0.04 --updates 1
  python -m extensions.why results.csv

Keys of TRL, verl, OpenRLHF, stable-baselines3 and of this lab are known.
Exit status: 0; 1 with --fail-on, when a verdict is that bad; 2 a file or a flag."""


def build_parser() -> rl_lab.LabParser:
    parser = rl_lab.LabParser(
        prog="python -m extensions.why",
        description="What the numbers of a trainer's log line mean: fine, look, mistake, or cannot tell.",
        epilog=EXAMPLES,
    )
    parser.add_argument("log", metavar="LINE_OR_FILE", help="a pasted line, a log file (JSON lines, dictionaries, CSV), or a folder")
    parser.add_argument("--beta", type=float, metavar="B", help="the KL coefficient, which no log line holds")
    parser.add_argument("--updates", type=float, metavar="N", help="optimiser steps per batch of samples (extensions.settings says it)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the verdicts as JSON")
    parser.add_argument("--fail-on", choices=("mistake", "look", "never"), default="never", help="exit with 1 from this verdict on (default never)")
    return parser


def report(records: list[dict[str, float]], beta: float | None, updates: float | None) -> str:
    said = explain_records(records, beta, updates)
    lines = [f"{len(records)} record{'s' if len(records) != 1 else ''}; the last value of each number", ""]
    for one in said:
        lines.append(f"{one.verdict:11s} {one.key} = {one.value:g}")
        if one.relation:
            lines.append(textwrap.fill(one.relation + ".", 80, initial_indent=" " * 12, subsequent_indent=" " * 12))
        if one.record_next:
            lines.append(textwrap.fill("record next: " + one.record_next.rstrip("?") + ".", 80, initial_indent=" " * 12, subsequent_indent=" " * 12))
    unread = [key for key in records[-1] if name_of(key) is None and not PART.fullmatch(key)]
    if unread:
        lines += ["", textwrap.fill("not judged: " + ", ".join(unread[:40]), 80, subsequent_indent="  ")]
    if not said:
        lines.append("cannot tell: no number here has a name that is known")
    return "\n".join(lines)


def document(records: list[dict[str, float]], beta: float | None, updates: float | None) -> dict:
    lines = [
        {"key": one.key, "value": one.value if math.isfinite(one.value) else str(one.value), "verdict": one.verdict,
         "relation": one.relation, "record_next": one.record_next}
        for one in explain_records(records, beta, updates)
    ]  # fmt: skip
    return {"records": len(records), "lines": lines}


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        records = read_records(arguments.log)
        print(report(records, arguments.beta, arguments.updates))
        made = document(records, arguments.beta, arguments.updates)
        if arguments.json:
            rl_lab.replace_files({arguments.json: json.dumps(made, indent=1, allow_nan=False) + "\n"})
    except rl_lab.FileProblem as problem:
        parser.exit(2, f"{parser.prog}: error: {problem}\n")
    bad = {"never": (), "mistake": ("mistake",), "look": ("look", "mistake")}[arguments.fail_on]
    if any(one["verdict"] in bad for one in made["lines"]):
        sys.exit(1)
