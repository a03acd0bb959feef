"""The command line of extensions.distributed."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Sequence

from extensions.distributed import mistakes, toy
from extensions.distributed.mistakes import AGREES, MISTAKES, NAMES, SPLITS, Measured
from extensions.distributed.ranks import TIMEOUT, Rank, Ranks, speak_once, torchrun_rank, torchrun_ranks
from extensions.distributed.watch import RankProblem
from rl_lab import LabParser, check_writable, format_table, is_terminal, json_text, one_line, path_argument, replace_files

ROWS = len(toy.LENGTHS)

DESCRIPTION = """\
The same update on one process and on N ranks with M micro-batches each: what
the right rules give, and what each usual mistake gives, as relative error and
cosine of the gradient against one process with one batch. Eight answers of 1
to 100 tokens, real processes, torch.distributed (gloo). CPU, seconds."""

EXAMPLES = """\
examples:
  python -m extensions.distributed
  python -m extensions.distributed --ranks 4 --micro-batches 2
  python -m extensions.distributed --grid --json distributed.json
  torchrun --standalone --nproc-per-node 2 -m extensions.distributed

The ranks are processes of this machine, started here or by torchrun. With
--grid all of 1, 2 and 4 ranks and micro-batches are measured (under torchrun:
up to its ranks).

mistakes, each with what it calls backward() on. S: sum of a micro-batch's
token losses, n its tokens, N the tokens of all, B the rows of all, W ranks, M
micro-batches a rank. Right is S W / N: DDP takes the mean over ranks.
{mistakes}"""


def whole_number(low: int, high: int):
    """The type of an argument that is a whole number in a range."""

    def parse(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() else -1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"got {text!r}, wanted a whole number from {low} to {high}")
        return value

    return parse


def build_parser() -> LabParser:
    width = max(map(len, MISTAKES))
    text = "\n".join(f"  {name:{width}}  {rule.what}" for name, rule in MISTAKES.items())
    parser = LabParser(
        prog="python -m extensions.distributed", description=DESCRIPTION, epilog=EXAMPLES.format(mistakes=text)
    )
    parser.add_argument("--ranks", type=whole_number(1, ROWS), default=2, metavar="N",
        help=f"processes, at most one for each of the {ROWS} answers; default 2, or torchrun's")  # fmt: skip
    parser.add_argument("--micro-batches", type=whole_number(1, ROWS), default=2, metavar="N",
        help="of each rank; default 2")  # fmt: skip
    parser.add_argument("--grid", action="store_true", help="all of 1, 2 and 4 ranks and micro-batches")
    parser.add_argument("--json", type=path_argument, metavar="FILE", help="write every number")
    parser.add_argument("--port", type=whole_number(0, 65535), default=0, metavar="N",
        help="of the store on 127.0.0.1 where ranks find each other; default 0: any that is free")  # fmt: skip
    return parser


# ------------------------------------------------------------------------------------------ what each rank does


def measure(rank: Rank, grid: bool, micro_batches: int) -> tuple[list[Measured], list[Measured]]:
    """The lines of the table that this rank knows: those of the groups it is in; rank 0 is in all."""
    rank.watch.agree("flags", f"--micro-batches {micro_batches}{' --grid' * grid}")
    with rank.watch.collectives("the measurement"):
        sizes = [size for size in SPLITS if size <= rank.ranks] if grid else [rank.ranks]
        groups = {size: rank.group_of(size) for size in sizes}
        mine = {size: group for size, group in groups.items() if group is not None}
        return mistakes.grid(mine, SPLITS if grid else (micro_batches,))


# ------------------------------------------------------------------------------------------ what is printed


def number(value: float) -> str:
    """Four digits; "same" where it is one process up to rounding."""
    return "same" if abs(value) < AGREES else f"{value:.4g}"


def angle(cosine: float, digits: int) -> str:
    return "none" if math.isnan(cosine) else f"{cosine:.{digits}f}"  # a gradient of 0 has no direction


def single_table(rows: Sequence[Measured], W: int, M: int) -> str:
    lines = [
        [row.rule, number(row.relative_error), angle(row.cosine, 4), MISTAKES[row.rule].what if row.rule in MISTAKES else ""]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(("", "rel. error", "cosine"), *(line[:3] for line in lines))]
    head = f"{'':{widths[0]}}  {'rel. error':>{widths[1]}}  {'cosine':>{widths[2]}}"
    body = [f"{n:{widths[0]}}  {e:>{widths[1]}}  {c:>{widths[2]}}  {what}".rstrip() for n, e, c, what in lines]
    return "\n".join([f"{W} rank(s), {M} micro-batch(es) each, against one process with one batch:", "", head, *body])


def grid_table(rows: Sequence[Measured]) -> str:
    """Two tables, relative error and cosine, a column for each split."""
    splits = list(dict.fromkeys((row.ranks, row.micro_batches) for row in rows))
    by = {(row.rule, row.ranks, row.micro_batches): row for row in rows}
    header = ["ranks x micro-batches", *(f"{W}x{M}" for W, M in splits)]
    errors = [[name, *(number(by[name, *split].relative_error) for split in splits)] for name in NAMES]
    cosines = [[name, *(angle(by[name, *split].cosine, 3) for split in splits)] for name in NAMES]
    return "\n".join([
        "Relative error of the gradient against one process (same: equal up to rounding)\n",
        format_table(header, errors),
        "\nCosine with the gradient of one process\n",
        format_table(header, cosines),
        "\nEvery mistake is invisible in some column, and all of them are in 1x1:\ntest at 2x2, with lengths that differ.",
    ])  # fmt: skip


def report(rows: Sequence[Measured], rights: Sequence[Measured], grid: bool) -> str:
    text = grid_table(rows) if grid else single_table(rows, rows[0].ranks, rows[0].micro_batches)
    worst = max(rights, key=lambda row: row.relative_error)
    kinds = len(dict.fromkeys(row.rule for row in rights))
    return f"{text}\n\nright: the worst of {kinds} right rules, relative error {worst.relative_error:.1e} ({worst.rule})"


def as_json(rows: Sequence[Measured], rights: Sequence[Measured]) -> dict:
    """A cosine of a gradient that is 0 is null."""

    def line(row: Measured) -> dict:
        return row._asdict() | {"cosine": None if math.isnan(row.cosine) else row.cosine}

    return {
        "lengths": list(toy.LENGTHS),
        "advantages": list(toy.ADVANTAGES),
        "rows": [line(row) for row in rows],
        "right_rules": [line(row) for row in rights],
        "what": {name: rule.what for name, rule in MISTAKES.items()},
    }


def finish(measured: tuple[list[Measured], list[Measured]], grid: bool, path: Path | None) -> None:
    rows, rights = measured
    print(report(rows, rights, grid))
    if path:
        replace_files({path: json_text(as_json(rows, rights))})
        print(f"wrote {path}")


# ------------------------------------------------------------------------------------------ how it is started


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    speak_once(parser)
    arguments = parser.parse_args(argv)
    started = torchrun_ranks()
    if started and "ranks" in arguments.given and arguments.ranks != started:
        parser.error(f"argument --ranks: got {arguments.ranks}, but torchrun started {started}; leave the flag out")
    if started > ROWS:
        parser.error(f"torchrun --nproc-per-node: got {started} ranks for {ROWS} answers, wanted at most {ROWS}")
    if arguments.grid and {"ranks", "micro_batches"} & arguments.given:
        parser.error("argument --grid: measures 1, 2 and 4 ranks and micro-batches; leave out --ranks and --micro-batches")
    check_writable([arguments.json] if arguments.json else [], 2**20)
    asked = arguments.grid, arguments.micro_batches
    if started:
        with torchrun_rank() as rank:
            measured = measure(rank, *asked)
            if rank.rank == 0:
                finish(measured, arguments.grid, arguments.json)
        return
    count = max(SPLITS) if arguments.grid else arguments.ranks
    if is_terminal(sys.stderr):
        print(f"starting {count} rank(s) ...", end="\r", file=sys.stderr, flush=True)
    try:
        with Ranks(count, arguments.port) as ranks:
            measured = ranks.run(measure, *asked, timeout=20 * TIMEOUT)[0]
    except RankProblem as problem:
        raise SystemExit(f"{parser.prog}: error: {one_line(problem)}") from None
    finish(measured, arguments.grid, arguments.json)
