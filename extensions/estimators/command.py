"""The command line of extensions.estimators."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import textwrap
from pathlib import Path
from typing import Callable, Iterator, Sequence

import plot_results
from extensions.estimators import advantages, of, power
from extensions.estimators.figure import draw
from extensions.estimators.line import Line
from extensions.estimators.policy import E1, KL, Case, shown
from extensions.estimators.tables import DEFAULT_CASES, TABLES
from extensions.objectives import ROWS
from rl_lab import (
    FileProblem,
    LabParser,
    check_writable,
    format_table,
    is_terminal,
    json_text,
    path_argument,
    replace_files,
)

DESCRIPTION = """\
Exact bias and variance of the estimators that PPO, GRPO, RLOO, KL penalties,
off-policy corrections and DPO use: on a small policy every group that can be
drawn is enumerated, so nothing is sampled. CPU, seconds."""

EXAMPLES = """\
examples:
  python -m extensions.estimators
  python -m extensions.estimators --table kl
  python -m extensions.estimators --table advantages \\
      --probabilities 0.9,0.07,0.03 --rewards 1,0.2,-0.5 --group-size 8
  python -m extensions.estimators --of my_rules:advantages
  python -m extensions.estimators --power 0.05
  python -m extensions.estimators --json out.json --plot out.svg

columns: E[g] the expected gradient with respect to the logits; cosine with the
true one; scale along it (a factor on the learning rate); tr Cov the variance,
summed over coordinates; MSE = tr Cov + |E[g] - truth|^2."""

ALL = "all"
# Tables with numbers of their own, which the reader's do not move.
OWN_NUMBERS = ("lengths", "gae")
DIGITS = 6
WIDTH = 80


def numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted numbers with commas between, such as 0.5,0.3,0.2") from None


def effect(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a number above 0, such as 0.05")
    return value


def build_parser() -> LabParser:
    parser = LabParser(prog="python -m extensions.estimators", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--table", choices=(*TABLES, ALL), help="which table; default all, with --of or --power none")
    own = parser.add_argument_group("your own policy (default: each table's own small one)")
    own.add_argument("--probabilities", type=numbers, metavar="P,P,...", help="chance of each answer, sum 1")
    own.add_argument("--rewards", type=numbers, metavar="R,R,...", help="reward of each answer")
    own.add_argument("--group-size", type=int, metavar="G", help="answers in a group; default 4, table binary 8")
    own.add_argument("--reference", type=numbers, metavar="P,P,...", help="reference policy, for the KL")
    own.add_argument("--behaviour", type=numbers, metavar="P,P,...", help="policy that sampled, where it is another")
    more = parser.add_argument_group("more")
    more.add_argument("--of", metavar="MODULE:FUNCTION",
                      help="put your own function through the enumeration: rewards [G] -> advantages [G], or"
                      " logps, old_logps, ref_logps, rewards -> loss; torch float64. It RUNS IN THIS PROCESS,"
                      " as your own code")  # fmt: skip
    more.add_argument("--power", type=effect, metavar="EFFECT",
                      help="prompts, answers and seeds that show a difference of EFFECT with 80 %% power")  # fmt: skip
    more.add_argument("--json", type=path_argument, metavar="FILE", help="write the tables as JSON")
    more.add_argument("--plot", type=plot_results.figure_path, metavar="FILE", help="draw them: .svg, .png or .pdf")
    return parser


def case_of(arguments: argparse.Namespace, default: Case) -> Case:
    """The reader's numbers in place of a table's own. Raises ValueError as Case, and for rewards without probabilities.

    A reference or behaviour alone does not reach a table whose own policy has another number of answers.
    """
    if (arguments.probabilities is None) != (arguments.rewards is None):
        given, missing = ("probabilities", "rewards") if arguments.rewards is None else ("rewards", "probabilities")
        raise ValueError(f"--{given}: wants --{missing} beside it, one number per answer")
    wanted = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Case)}
    given = {name: value for name, value in wanted.items() if value is not None}
    if arguments.probabilities is not None:
        given = {"reference": None, "behaviour": None} | given
    elif default.answers != E1.answers:
        given = {name: value for name, value in given.items() if name not in ("reference", "behaviour")}
    return dataclasses.replace(default, **given)


# ------------------------------------------------------------------------------------------ words


def number(x: float | None) -> str:
    return "none" if x is None else f"{x:.{DIGITS}f}".replace("-0.000000", "0.000000")


def merged(lines: Sequence[Line]) -> Iterator[tuple[Line, list[str]]]:
    """Lines that print the same numbers become one, the first, with the names of the others."""
    found: dict[tuple, tuple[Line, list[str]]] = {}
    for line in lines:
        key = (*(number(x) for x in (*line.mean, line.cosine, line.scale, line.trace_cov, line.mse)), line.meaning)
        if key in found:
            found[key][1].append(line.estimator)
        else:
            found[key] = line, []
    yield from found.values()


def block(line: Line, others: Sequence[str] = ()) -> str:
    """One estimator: its numbers, what they mean, and what else is the same."""
    mean = " ".join(number(x) for x in line.mean)
    row = f"  [{line.row}]" if line.row and line.row != line.estimator else ""
    text = [line.estimator + row]
    text += textwrap.wrap(f"E[g] {mean}", WIDTH - 2, initial_indent="  ", subsequent_indent="       ")
    stats = ("cosine", line.cosine), ("scale", line.scale), ("tr Cov", line.trace_cov), ("MSE", line.mse)
    text.append("  " + "  ".join(f"{name} {number(x)}" for name, x in stats))
    if line.meaning:
        text += textwrap.wrap(line.meaning, WIDTH - 2, initial_indent="  ", subsequent_indent="  ")
    if others:
        text += textwrap.wrap("same: " + ", ".join(others), WIDTH - 2, initial_indent="  ", subsequent_indent="        ")
    return "\n".join(text)


def heading(name: str, case: Case) -> str:
    about = (TABLES[name].__doc__ or "").strip().splitlines()
    title = textwrap.wrap(f"{name}: {about[0] if about else ''}", WIDTH)
    if name in OWN_NUMBERS:
        return "\n".join(["=" * WIDTH, *title])
    parts = [f"p {shown(case.probabilities)}", f"R {shown(case.rewards)}", f"G {case.group_size}"]
    parts += [f"reference {shown(case.reference)}"] if case.reference else []
    parts += [f"behaviour {shown(case.behaviour)}"] if case.behaviour else []
    return "\n".join(["=" * WIDTH, *title, "; ".join(parts)])


def of_text(found: of.Verdict, kind: str) -> str:
    """The reader's function beside the known estimators."""
    truth = "rule for advantages" if kind == "rule" else "loss"
    table = [[line.estimator, number(line.cosine), number(line.scale), number(line.trace_cov), number(line.mse)]
             for line in (found.line, *found.known)]  # fmt: skip
    said = [textwrap.fill(text, WIDTH, subsequent_indent="  ") for text in of.sentences(found)]
    return "\n".join([
        "=" * WIDTH, f"--of, a {truth}", block(found.line), *said, "",
        format_table(["estimator", "cosine", "scale", "tr Cov", "MSE"], table),
    ])  # fmt: skip


def power_text(case: Case, size: float, found: dict) -> str:
    """What --power says: prompts, answers, seeds."""
    def count(n: int | None) -> str:
        return "none" if n is None else str(n)

    rows = [
        [x.estimator, f"{x.scale:.4f}", f"{x.sd:.4f}", f"{x.difference:+.4f}", count(x.for_difference),
         count(x.for_difference_same_groups), str(x.for_effect)]
        for x in found["gradients"] if x.estimator not in ROWS
    ]  # fmt: skip
    answers, seeds = found["rewards"], found["lab"]
    header = ["estimator", "gain", "sd", "differs", "prompts", "paired", f"for {size:g}"]
    lab = [[x.algorithm, f"{x.mean:.4f}", f"{x.sd:.6f}", str(x.seeds)] for x in seeds]
    return "\n".join([
        "=" * WIDTH, f"Power {power.POWER:.0%} at a two-sided level of {power.LEVEL:.0%}, effect {size:g}", "",
        "Gain of one group along the true gradient (1 = that of grad J), held against",
        f"{power.BESIDE}. prompts: how many tell the two apart by what they really",
        f"differ; paired: the same if both read the same groups; for {size:g}: how many",
        "show a difference of that size. none: nothing to see, or not the same groups.", "",
        format_table(header, rows), "",
        f"Mean reward of two policies like p: Var(R) {answers.variance:.6f}. A difference of {size:g}",
        f"needs {answers.answers} answers of each (standard error of the difference then {answers.standard_error:.6f}).", "",
        f"The lab's bandit, expected reward after {power.LAB_STEPS} iterations, {power.LAB_SEEDS} seeds (measured,",
        f"so the sd is known to a sixth): --seeds that show {size:g} between two such.", "",
        format_table(["algorithm", "mean", "sd of seeds", "seeds"], lab),
    ])  # fmt: skip


# ------------------------------------------------------------------------------------------ files


def as_json(lines: dict[str, list[Line]], own: of.Verdict | None, found: dict | None) -> dict:
    """JSON: a list of lines for each table, with _ for - in its name; and what --of and --power found."""
    document: dict = {}
    for name, table in lines.items():
        document[name.replace("-", "_")] = [dataclasses.asdict(line) for line in table]
    if own is not None:
        document["of"] = {"line": dataclasses.asdict(own.line), "same": own.same, "multiple": own.multiple,
                          "same_mean": own.same_mean}  # fmt: skip
    if found is not None:
        document["power"] = {
            "gradients": [x._asdict() for x in found["gradients"]], "rewards": found["rewards"]._asdict(),
            "lab": [x._asdict() for x in found["lab"]],
        }  # fmt: skip
    return document


def progress() -> Callable[[str], None] | None:
    """Keeps one line on stderr up to date with the estimator that is done, and clears it at the end (an empty name)."""
    if not is_terminal(sys.stderr):
        return None
    return lambda name: print(f"\r\033[K{name}", end="", file=sys.stderr, flush=True)


def lines_of_tables(names: Sequence[str], arguments: argparse.Namespace) -> Iterator[tuple[str, Case, list[Line], dict]]:
    """Each table with its case, and what it leaves out."""
    for name in names:
        case = case_of(arguments, DEFAULT_CASES[name])
        if name == "advantages":
            lines, refused = advantages.lines_and_left_out(case, on_estimate=progress())
        else:
            lines, refused = TABLES[name](case), {}
        yield name, case, lines, refused


def run(arguments: argparse.Namespace) -> None:
    """Everything that is asked for. Raises ValueError, one line, for what the reader can mend."""
    names = list(TABLES) if arguments.table == ALL else [arguments.table] if arguments.table else []
    if not names and arguments.of is None and arguments.power is None:
        names = list(TABLES)
    base = case_of(arguments, E1)
    lines, own, found = {}, None, None
    for name, case, made, refused in lines_of_tables(names, arguments):
        lines[name] = made
        print(heading(name, case) + "\n")
        print("\n".join(block(*one) for one in merged(made)))
        by_reason: dict[str, list[str]] = {}
        for left, reason in refused.items():
            by_reason.setdefault(reason, []).append(left)
        for reason, left in by_reason.items():
            print(textwrap.fill(f"left out: {', '.join(left)}: {reason}", WIDTH, subsequent_indent="  "))
        print()
    if arguments.of is not None:
        given = of.load(arguments.of)
        own = of.compared(given, base)
        print(of_text(own, given.kind) + "\n")
    if arguments.power is not None:
        found = {"gradients": power.of_gradients(base, arguments.power), "rewards": power.of_rewards(base, arguments.power),
                 "lab": power.of_lab_runs(arguments.power)}  # fmt: skip
        print(power_text(base, arguments.power, found) + "\n")
    if arguments.json:
        replace_files({arguments.json: json_text(as_json(lines, own, found))})
        print(f"wrote {arguments.json}")
    if arguments.plot:
        save_figure(arguments, base, lines)


def save_figure(arguments: argparse.Namespace, base: Case, lines: dict[str, list[Line]]) -> None:
    of_kl = case_of(arguments, KL)
    made = lines.get("advantages") or TABLES["advantages"](base)
    shown_lines = [line for line in made if line.estimator in advantages.ESTIMATORS]
    others = [lines.get(name) or TABLES[name](case_of(arguments, DEFAULT_CASES[name])) for name in ("kl", "lengths")]
    try:
        plot_results.save(draw(shown_lines, base, others[0], of_kl, others[1]), arguments.plot)
    except plot_results.PlotProblem as problem:
        raise FileProblem(str(problem)) from problem
    print(f"wrote {arguments.plot}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    check_writable([Path(path) for path in (arguments.json, arguments.plot) if path], 2**20)
    try:
        run(arguments)
    except ValueError as problem:
        parser.error(str(problem))
