"""The command line of the audit: python -m extensions.audit."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Sequence

import rl_lab
from extensions.audit.catalogue import CATALOGUE, NOTES, SEVERITIES
from extensions.audit.declared import parse_declared
from extensions.audit.read.recording import ALIASES, SUFFIXES, read_recording
from extensions.audit.recipes import RECIPES
from extensions.audit.run import audit
from extensions.audit.say.report import printed
from extensions.audit.search.pairs import is_preference


def names_table() -> str:
    """The names accepted for every array and number, for --help."""
    lines = []
    for name, others in ALIASES.items():
        lines += textwrap.wrap(
            f"{name}" + (f" = {', '.join(others)}" if others else ""), 100, initial_indent="  ", subsequent_indent="      "
        )
    return "\n".join(lines)


def list_mistakes() -> str:
    out = []
    for name, mistake in CATALOGUE.items():
        out += [
            name,
            *textwrap.wrap(mistake.what, 110, initial_indent="    ", subsequent_indent="    "),
            *textwrap.wrap(f"change: {mistake.advice}", 110, initial_indent="    ", subsequent_indent="      "),
        ]
    out += ["", "Not mistakes"]
    for name, text in NOTES.items():
        out += [name, *textwrap.wrap(text, 110, initial_indent="    ", subsequent_indent="    ")]
    return "\n".join(out)


def build_parser() -> rl_lab.LabParser:
    parser = rl_lab.LabParser(
        prog="python -m extensions.audit",
        description="Recompute one recorded batch of a trainer: which advantage rule, objective, reduction and KL it "
        "follows, whether the gradient agrees, and which known mistakes are in it.",
        epilog=f"formats: {', '.join(SUFFIXES)} (.npz without pickles, .pt weights only, .jsonl one response a line)\n\n"
        f"names (each with the other names that are accepted; N rows, T tokens):\n{names_table()}\n\n"
        "example:\n  python -m extensions.audit extensions/audit/captures/trl_grpo_grpo_pass2.npz --declared grpo@trl-1.16.0",
    )
    parser.add_argument("batch", nargs="?", type=Path, metavar="BATCH", help="the recorded batch")
    parser.add_argument(
        "--declared", metavar="ROW", help="the row the trainer is said to follow; differences become findings"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="a number that was not recorded (beta, clip_high, accumulation_steps, budget, ...), or a field of the declared "
        "row; repeatable",
    )
    parser.add_argument(
        "--fail-on",
        choices=("mistake", "warning", "never"),
        default="mistake",
        help="exit 1 for a finding of this severity or above; default mistake",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--recipes", action="store_true", help="print the lines that record a batch in TRL or verl")
    parser.add_argument("--list", action="store_true", help="print every mistake it knows, and what is none")
    parser.add_argument(
        "--self-test", action="store_true", help="plant each mistake into each shipped capture and print what was named"
    )
    parser.add_argument(
        "--damaged", type=int, metavar="N", help="with --self-test: N damaged, random or hostile files instead"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.list or arguments.recipes:
        print(list_mistakes() if arguments.list else RECIPES)
        return
    if arguments.damaged is not None and (not arguments.self_test or arguments.damaged < 1):
        parser.error(f"argument --damaged: got {arguments.damaged}, wanted a number above 0, with --self-test")
    if arguments.self_test:
        from extensions.audit.proof import damaged, table  # minutes of work: not a part of the usual start

        is_good = damaged.run_damaged(arguments.damaged) if arguments.damaged else table.run(arguments.json)
        sys.exit(0 if is_good else 1)
    if arguments.batch is None:
        parser.error("the following arguments are required: BATCH (a recorded batch), or --recipes, --list or --self-test")
    try:
        declared, numbers = parse_declared(arguments.declared, arguments.settings)
    except ValueError as problem:
        parser.error(str(problem))
    try:
        if arguments.json is not None:
            rl_lab.check_writable([arguments.json], expected_bytes=20_000)
        recording = read_recording(arguments.batch)
        if declared is not None and declared.is_pairs != is_preference(recording):
            kind = "pairs" if declared.is_pairs else "rollouts"
            parser.error(
                f"argument --declared: {arguments.declared} is a row for {kind}, and {arguments.batch} holds the other kind"
            )
        report = audit(recording, declared, numbers)
        if arguments.json is not None:
            rl_lab.replace_files({arguments.json: rl_lab.json_text(report.as_json())})
    except rl_lab.FileProblem as problem:
        parser.exit(2, f"{parser.prog}: error: {problem}\n")
    except (ValueError, TypeError, IndexError, KeyError, RuntimeError, ArithmeticError) as problem:
        # What no check has foreseen still ends in one line: the arrays came from outside.
        short = " ".join(str(problem).split())[:200]
        parser.exit(2, f"{parser.prog}: error: {arguments.batch}: its arrays do not fit together ({short})\n")
    except MemoryError:
        parser.exit(2, f"{parser.prog}: error: {arguments.batch}: does not fit into memory\n")
    print(printed(report, str(arguments.batch)))
    worst = report.worst()
    if arguments.fail_on != "never" and worst is not None and SEVERITIES.index(worst) >= SEVERITIES.index(arguments.fail_on):
        sys.stdout.flush()
        sys.exit(1)
