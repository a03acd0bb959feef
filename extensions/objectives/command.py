"""The command line of extensions.objectives."""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path
from typing import Iterator

import plot_results
import rl_lab
from extensions.objectives.choices import Row
from extensions.objectives.engine import evaluate
from extensions.objectives.explain import (
    compare,
    explain,
    explain_preference,
    family_table,
    lacking,
    list_choices,
    preference_table,
    suited,
)
from extensions.objectives.figure import draw
from extensions.objectives.pairs import PreferenceRow, evaluate_preference
from extensions.objectives.reader import read_batch
from extensions.objectives.rows import ROWS
from extensions.objectives.rows_pairs import PREFERENCE_ROWS
from extensions.objectives.small import small_batch, small_preferences
from extensions.objectives.worked import print_examples
EXAMPLES = """\
examples:
  python -m extensions.objectives
  python -m extensions.objectives --objective grpo --versus dapo@trl-1.16.0
  python -m extensions.objectives --objective dpo --versus ipo
  python -m extensions.objectives --batch my_batch.npz --objective gspo
  python -m extensions.objectives --plot surrogates.svg"""


def row_named(name: str) -> Row | PreferenceRow:
    """A row of either table. Raises ValueError with the nearest names."""
    known = ROWS | PREFERENCE_ROWS
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        raise ValueError(f"no objective {name!r}" + (f"; near: {', '.join(near)}" if near else "") + "; --list shows all")
    return known[name]


def build_parser() -> rl_lab.LabParser:
    def named(text: str) -> Row | PreferenceRow:
        try:
            return row_named(text)
        except ValueError as problem:
            raise argparse.ArgumentTypeError(str(problem)) from None

    parser = rl_lab.LabParser(
        prog="python -m extensions.objectives",
        description="PPO, GRPO, DPO and their relatives as one table of choices, evaluated on one batch.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--objective", type=named, metavar="NAME", help="explain one row step by step")
    parser.add_argument(
        "--versus", type=named, metavar="OTHER", help="with --objective: what the other row does differently"
    )
    parser.add_argument(
        "--batch", type=Path, metavar="FILE", help="your batch instead of the small one (.npz, .pt, .safetensors, .jsonl); names as the audit's --help"
    )
    parser.add_argument(
        "--plot", type=plot_results.figure_path, metavar="FILE", help="draw gradients and weights to .svg, .png or .pdf"
    )
    parser.add_argument("--examples", action="store_true", help="worked examples by the engine beside their arithmetic")
    parser.add_argument(
        "--list", action="store_true", help="every choice with its formula, every named row, what is left out"
    )
    return parser


def report(arguments: argparse.Namespace) -> Iterator[str]:
    """The report on one batch: the table, or one row."""
    row, other = arguments.objective, arguments.versus
    if arguments.batch is None:
        batch, ids = small_batch()
        data = small_preferences(batch)
        if row is None:
            yield "A small batch: two prompts, three answers each. EOS and PAD share id 4; bars end the counted tokens.\n"
            for number in range(len(ids)):
                length = int(batch.lengths[number])
                tokens = [str(token) for token in ids[number].tolist()]
                text = " ".join(tokens[:length]) + " | " + " ".join(tokens[length:])
                prompt, reward = int(batch.group_ids[number]), batch.rewards[number].item()
                yield f"  row {number}  prompt {prompt}  reward {reward:.1f}  tokens {text}"
            yield ""
    else:
        batch, data, unread = read_batch(arguments.batch)
        if unread:
            yield f"{arguments.batch}: not read: {', '.join(unread)}\n"
        if batch is not None and batch.old_logps is None:
            yield "No old_logps in the file: taken as the first pass over the batch, every ratio 1.\n"
    if row is None:
        if batch is not None:
            yield family_table(batch)
        if data is not None:
            yield ("" if batch is None else "\n") + preference_table(data)
        return
    results = []
    if batch is not None:
        row, other = (r if r is None or isinstance(r, PreferenceRow) else suited(r, batch) for r in (row, other))
        if row is not arguments.objective:
            yield "The batch holds no rewards: its advantages are taken as they are.\n"
    for chosen in (row, other):
        if chosen is None:
            continue
        source = data if isinstance(chosen, PreferenceRow) else batch
        missing = lacking(chosen, source) if source is not None else list(chosen.needs)
        if missing:
            raise rl_lab.FileProblem(f"--batch {arguments.batch}: {chosen.name} also needs {', '.join(missing)}")
        try:
            if isinstance(chosen, PreferenceRow):
                results.append(evaluate_preference(chosen, source))
            else:
                results.append(evaluate(chosen, source))
        except ValueError as problem:
            raise rl_lab.FileProblem(str(problem)) from problem
    yield explain_preference(row, data) if isinstance(row, PreferenceRow) else explain(row, batch)
    if other is not None:
        yield "\n" + compare(row, other, tuple(results))


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.versus and not arguments.objective:
        parser.error("--versus: wanted together with --objective")
    if arguments.versus and type(arguments.versus) is not type(arguments.objective):
        parser.error(
            f"--versus: {arguments.objective.name} and {arguments.versus.name} read different data; compare like with like"
        )
    if arguments.plot:
        try:
            plot_results.save(draw(), arguments.plot)
        except plot_results.PlotProblem as problem:
            raise rl_lab.FileProblem(str(problem)) from problem
        print(f"wrote {arguments.plot}")
    if arguments.examples:
        print_examples()
    if arguments.list:
        print(list_choices())
    if arguments.objective or arguments.batch or not (arguments.plot or arguments.examples or arguments.list):
        for text in report(arguments):
            print(text)
