"""The command line of the audit: python -m extensions.audit."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Sequence

import rl_lab
from extensions.audit.catalogue import MISTAKES, NOTES, SEVERITIES
from extensions.audit.declared import parse_declared
from extensions.audit.read.recording import read_recording
from extensions.audit.recipes import RECIPES
from extensions.audit.run import audit
from extensions.audit.say.chinese import CHINESE
from extensions.audit.say.report import ENGLISH, Language, printed
from extensions.audit.search.pairs import is_preference
from extensions.audit.step.folder import read_step
from extensions.audit.step.report import printed_step
from extensions.audit.step.verdict import audit_step
from extensions.read import SUFFIXES
from extensions.read.names import table_text


LANGUAGES = {"en": ENGLISH, "zh": CHINESE}
"""The values of --lang. A further language: its words beside catalogue_zh.py, a Language in say/, an entry here."""


def list_mistakes(language: Language = ENGLISH) -> str:
    out = [line for name in MISTAKES for line in language.listed_lines(name)]
    out += ["", language.word("Not mistakes")]
    return "\n".join(out + [line for name in NOTES for line in language.listed_lines(name)])


def build_parser() -> rl_lab.LabParser:
    parser = rl_lab.LabParser(
        prog="python -m extensions.audit",
        description="Recompute one recorded batch of a trainer: which advantage rule, objective, reduction and KL it "
        "follows, whether the gradient agrees, and which known mistakes are in it.",
        epilog=f"formats: {', '.join(SUFFIXES)} (.npz without pickles, .pt weights only, .jsonl one response a line)\n\n"
        f"names, with shape, meaning and the other names that are accepted; dloss_d + any of them is a gradient\n"
        "(N rows, T tokens, M rows of the generation batch, P pairs, F reward functions, V vocabulary, E environments):\n"
        f"{table_text()}\n\n"
        "example:\n"
        "  python -m extensions.audit extensions/audit/captures/trl_grpo_grpo_pass2.npz --declared grpo@trl-1.16.0\n"
        "  python -m extensions.audit recorded/step_000010/            one step: every rank and micro-batch",
    )
    parser.add_argument(
        "batch",
        nargs="?",
        type=Path,
        metavar="BATCH",
        help="the recorded batch, or a folder: one optimiser step, rank0_mb0.npz ...",
    )
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
    parser.add_argument(
        "--averaging",
        choices=("mean", "sum"),
        help="with a folder: how the ranks' gradients are joined; default mean, as DDP does",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--recipes", action="store_true", help="print the lines that record a trainer: TRL, verl, any loop")
    parser.add_argument(
        "--lang",
        choices=tuple(LANGUAGES),
        default="en",
        help="language of titles, finding names and advice in the report and in --list; names, numbers, evidence and JSON "
        "stay the same; default en",
    )
    parser.add_argument("--list", action="store_true", help="print every mistake it knows, and what is none")
    parser.add_argument(
        "--self-test", action="store_true", help="plant each mistake into each shipped capture and print what was named"
    )
    parser.add_argument(
        "--damaged", type=int, metavar="N", help="with --self-test: N damaged, random or hostile files instead"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """The command. Exit 0, 1 only for a finding at or above --fail-on, 2 for everything else that ends it."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        text, is_clean = _work(parser, arguments)
        if text:
            print(text)
        if sys.stdout is not None:  # closed by whoever started it
            sys.stdout.flush()
    except rl_lab.FileProblem as problem:
        parser.exit(2, f"{parser.prog}: error: {rl_lab.one_line(problem)}\n")
    except MemoryError:
        parser.exit(2, f"{parser.prog}: error: {rl_lab.one_line(arguments.batch)}: does not fit into memory\n")
    except BrokenPipeError:
        _silence_stdout()  # the reader went away (head, less): what it has not read, it does not know
        sys.exit(2)
    except OSError as problem:
        _silence_stdout()
        parser.exit(2, f"{parser.prog}: error: cannot print ({problem.strerror or problem})\n")
    except Exception as problem:
        parser.exit(2, f"{parser.prog}: error: {_own_error(problem)}\n")
    if not is_clean:
        sys.exit(1)


def _silence_stdout() -> None:
    """What is left in the buffer must not fail again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _own_error(problem: Exception) -> str:
    """An exception that no check has foreseen is a bug of ours, never the file's fault: which, and where."""
    frame = traceback.extract_tb(problem.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return (
        f"an error inside the audit ({type(problem).__name__} at {place}: {rl_lab.one_line(problem)[:160]}); "
        "please report it, with the file if you can"
    )


def _work(parser: rl_lab.LabParser, arguments) -> tuple[str, bool]:
    """What the arguments ask for: the text to print, and whether no finding reaches --fail-on."""
    language = LANGUAGES[arguments.lang]
    if language is not ENGLISH and (arguments.self_test or arguments.recipes and not arguments.list):
        parser.error("argument --lang: only a report and --list are printed in other languages")
    if arguments.list or arguments.recipes:
        return (list_mistakes(language) if arguments.list else RECIPES), True
    if arguments.damaged is not None and not arguments.self_test:
        parser.error("argument --damaged: goes with --self-test")
    if arguments.damaged is not None and arguments.damaged < 1:
        parser.error(f"argument --damaged: got {arguments.damaged}, wanted a number above 0")
    if arguments.self_test:
        from extensions.audit.proof import damaged, table  # minutes of work: not a part of the usual start

        return "", damaged.run_damaged(arguments.damaged) if arguments.damaged else table.run(arguments.json)
    if arguments.batch is None:
        options = "--recipes, --list or --self-test"
        parser.error(f"the following arguments are required: BATCH (a recorded batch or a folder), or {options}")
    try:
        declared, numbers = parse_declared(arguments.declared, arguments.settings)
    except ValueError as problem:
        parser.error(str(problem))
    if arguments.json is not None:
        rl_lab.check_writable([arguments.json], expected_bytes=20_000)
    shown = rl_lab.one_line(arguments.batch)
    is_step = arguments.batch.is_dir()
    if arguments.averaging is not None and not is_step:
        parser.error(f"argument --averaging: goes with a folder, and {shown} is none")
    parts = read_step(arguments.batch) if is_step else []
    recording = parts[0].recording if is_step else read_recording(arguments.batch)
    if declared is not None and declared.is_pairs != is_preference(recording):
        kind = "pairs" if declared.is_pairs else "rollouts"
        parser.error(f"argument --declared: {arguments.declared} is a row for {kind}, and {shown} holds the other kind")
    if is_step:
        report = audit_step(parts, declared, numbers, averaged=arguments.averaging != "sum")
    else:
        report = audit(recording, declared, numbers)
    if arguments.json is not None:
        rl_lab.replace_files({arguments.json: rl_lab.json_text(report.as_json())})
    worst = report.worst()
    fails = arguments.fail_on != "never" and worst is not None
    text = printed_step(report, shown, language) if is_step else printed(report, shown, language)
    return text, not (fails and SEVERITIES.index(worst) >= SEVERITIES.index(arguments.fail_on))
