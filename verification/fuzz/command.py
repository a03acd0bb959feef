"""The command line of verification.fuzz."""

from __future__ import annotations

import collections
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Sequence

import torch

import rl_lab
from verification.fuzz import atoms, files, interrupts, lines
from verification.fuzz.case import Failure, Kind, case_of, shrink

KINDS = {kind.name: kind for kind in (atoms.KIND, lines.KIND, files.KIND, interrupts.KIND)}
SHRINKING = 20.0  # seconds for one finding

DESCRIPTION = """\
Random cases against what the lab promises of all of them: calls of the atoms, command lines, damaged
files, interrupts. For the time given, in turns; then counts, and the smallest case of each finding."""

EXAMPLES = """\
examples:
  python -B -m verification.fuzz
  python -B -m verification.fuzz --seconds 600 --seed 1
  python -B -m verification.fuzz --only atoms --cases 20000
  python -B -m verification.fuzz --seed 0 --only lines --case 12

exit status: 0 nothing found, 1 a finding, 2 a wrong flag"""


def build_parser() -> rl_lab.LabParser:
    def whole(text: str) -> int:
        number = int(text)
        if number < 0:
            raise ValueError
        return number

    def seconds(text: str) -> float:
        number = float(text)
        if not 0 < number < 1e7:
            raise ValueError
        return number

    whole.__name__, seconds.__name__ = "whole number", "number of seconds"
    parser = rl_lab.LabParser(prog="python -m verification.fuzz", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--seconds", type=seconds, default=60.0, metavar="X", help="how long to look; default 60")
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="what the cases are drawn from; default 0")
    parser.add_argument("--only", choices=tuple(KINDS), help="one kind of case")
    parser.add_argument("--cases", type=whole, metavar="N", help="this many of each kind, however long that takes")
    parser.add_argument("--case", type=whole, metavar="N", help="with --only: this one case, shown with what it breaks")
    return parser


class Tally:
    """What was tried, and what was found: for each finding the first case, and how often it came."""

    def __init__(self, seed: int):
        self.seed = seed
        self.tried: dict[str, int] = collections.Counter()
        self.times: dict[tuple, int] = collections.Counter()
        self.first: dict[tuple, tuple[Kind, int, Any, Failure]] = {}

    def add(self, kind: Kind, number: int, case: Any, failure: Failure | None) -> None:
        self.tried[kind.name] += 1
        if failure is not None:
            key = (kind.name, *failure.finding)
            self.times[key] += 1
            self.first.setdefault(key, (kind, number, case, failure))

    def text(self, judged) -> str:
        counts = ", ".join(f"{number} {name}" for name, number in self.tried.items())
        parts = [f"seed {self.seed}: {counts} tried, {len(self.first)} findings"]
        parts += [text for name in self.tried if (text := KINDS[name].more())]
        for key, (kind, number, case, failure) in self.first.items():
            small, failure = shrink(kind, case, failure, lambda other: judged(kind, other), SHRINKING)
            again = f"python -B -m verification.fuzz --seed {self.seed} --only {kind.name} --case {number}"
            parts.append(
                f"\n{failure.rule}: {failure.where} ({self.times[key]} of {self.tried[kind.name]} {kind.name})\n"
                f"  {failure.detail}\n  smallest: {kind.show(small)}\n  again:    {again}"
            )
        return "\n".join(parts)


def judged_in(box: Path, kind: Kind, case: Any) -> Failure | None:
    """A case judged in an empty folder, which is removed again."""
    folder = Path(tempfile.mkdtemp(dir=box))
    try:
        return kind.judge(case, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def look(tally: Tally, kinds: Sequence[Kind], judged, seconds: float, cases: int | None, show=None) -> None:
    """Cases of each kind in turns, until the time is over, or until there were `cases` of each."""
    end = time.monotonic() + seconds
    numbers = dict.fromkeys((kind.name for kind in kinds), 0)
    while any(numbers[kind.name] < cases for kind in kinds) if cases is not None else time.monotonic() < end:
        for kind in kinds:
            turn = min(time.monotonic() + kind.turn, end if cases is None else float("inf"))
            while time.monotonic() < turn and (cases is None or numbers[kind.name] < cases):
                number = numbers[kind.name]
                numbers[kind.name] += 1
                case = case_of(kind, tally.seed, number)
                tally.add(kind, number, case, judged(kind, case))
            if show:
                show(tally)


def progress(tally: Tally) -> None:
    counts = ", ".join(f"{number} {name}" for name, number in tally.tried.items())
    print(f"\r{counts}; {len(tally.first)} findings ", end="", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.case is not None and not arguments.only:
        parser.error("argument --case: wanted together with --only, which says of which kind")
    torch.set_num_threads(1)
    kinds = [KINDS[arguments.only]] if arguments.only else list(KINDS.values())
    with tempfile.TemporaryDirectory(prefix="fuzz-") as box:
        judged = lambda kind, case: judged_in(Path(box), kind, case)  # noqa: E731
        if arguments.case is not None:
            (kind,) = kinds
            case = case_of(kind, arguments.seed, arguments.case)
            failure = judged(kind, case)
            print(kind.show(case))
            print(f"{failure.rule}: {failure.where}\n  {failure.detail}" if failure else "keeps every promise")
            found = failure is not None
        else:
            tally = Tally(arguments.seed)
            terminal = rl_lab.is_terminal(sys.stderr)
            look(tally, kinds, judged, arguments.seconds, arguments.cases, progress if terminal else None)
            if terminal:
                print(file=sys.stderr)
            print(tally.text(judged))
            found = bool(tally.first)
    if found:
        sys.stdout.flush()
        sys.exit(1)
