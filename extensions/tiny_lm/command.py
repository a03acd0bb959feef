"""The command line of extensions.tiny_lm."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Iterator, Sequence

from extensions.distributed.ranks import Rank, speak_once, torchrun_rank, torchrun_ranks
from extensions.tiny_lm.files import paths_of, save
from extensions.tiny_lm.methods import METHODS, objective_row, own_steps
from extensions.tiny_lm.stage import MISTAKES, TinySettings
from extensions.tiny_lm.task import VERIFIERS
from extensions.tiny_lm.training import TrainingRun, check_names, train
from rl_lab import FileProblem, LabParser, OnStep, add_settings, check_writable, chosen_settings, format_table, progress_line

DESCRIPTION = """\
Train a transformer of 100,000 parameters to write the distinct digits of a prompt in ascending order.
Every run begins with a supervised start from 64 demonstrations (about half of its samples are right);
then PPO, DPO, online DPO, GRPO or RLOO learn from a rule that checks answers. CPU, float32, seconds.
Writes OUTPUT/ALGORITHM.csv (metrics), .json (settings) and -samples.jsonl (answers before and after)."""

EXAMPLES = """\
examples:
  python -m extensions.tiny_lm --algorithm all
  python -m extensions.tiny_lm --algorithm grpo --objective dr_grpo --output results-dr-grpo
  python plot_results.py --input results-tiny-lm --output tiny-lm.svg

on several processes, with the answers and, up to rounding, the steps of one
  torchrun --standalone --nproc-per-node 2 -m extensions.tiny_lm --algorithm grpo

a reward that can be cheated: full reward, accuracy 0; then the same held back by the KL to the reference
  python -m extensions.tiny_lm --algorithm grpo --verifier sorted-only --kl 0 --output results-hacked
  python -m extensions.tiny_lm --algorithm grpo --verifier sorted-only --kl 0.05 --output results-held

an exact checker on too few prompts (try 4, 16 and 64)
  python -m extensions.tiny_lm --algorithm grpo --verifier public-tests --public-tests 4 --kl 0 --output results-public4

too few preference pairs: pair accuracy 1.0, yet worse answers than before
  python -m extensions.tiny_lm --algorithm dpo --dpo-prompts 128 --output results-few-pairs

verifiers (what each forgets):
{verifiers}

mistakes, made in the named algorithm while the supervised start before it stays right:
{mistakes}

Ranges in this text were measured over seeds 0, 7 and 19, single numbers with seed 7."""


def examples() -> str:
    """The end of the help text, with what the tables say about verifiers and mistakes."""
    verifiers = {
        name: "forgets " + ", ".join(part for part in VERIFIERS["exact"] if part not in parts)
        for name, parts in VERIFIERS.items()
        if parts != VERIFIERS["exact"]
    }
    verifiers = {"exact": "forgets nothing", **verifiers, "public-tests": "forgets nothing, but knows few prompts"}
    mistakes = {name: f"{mistake.what}\n{'':22}watch {mistake.watch}" for name, mistake in MISTAKES.items()}
    lines = ["\n".join(f"  {name:19} {text}" for name, text in explained.items()) for explained in (verifiers, mistakes)]
    return EXAMPLES.format(verifiers=lines[0], mistakes=lines[1])


def build_parser() -> LabParser:
    parser = LabParser(prog="python -m extensions.tiny_lm", description=DESCRIPTION, epilog=examples())
    parser.add_argument("--algorithm", choices=(*METHODS, "all"), default="all", help="what to train; default all")
    parser.add_argument(
        "--objective", metavar="ROW", help="grpo only: train on this row of extensions/objectives; any without a critic"
    )
    parser.add_argument("--verifier", choices=tuple(VERIFIERS), default="exact", help="what gives the reward; default exact")
    parser.add_argument("--mistake", choices=tuple(MISTAKES), help="switch on a well-known bug in the named algorithm")
    folder = Path("results-tiny-lm")
    parser.add_argument("--output", type=Path, default=folder, metavar="DIR", help=f"folder to write; default {folder}")
    add_settings(parser, TinySettings)
    # Whether these were given matters: a row of --objective has a KL weight of its own, and one verifier has public tests.
    parser.set_defaults(kl=None, public_tests=None)
    return parser


def summary(runs: Sequence[TrainingRun]) -> str:
    """Before and after, and what it cost."""
    header = ["", "sampled accuracy", "greedy accuracy", "reward", "KL to ref", "length", "updates", "samples", "seconds"]
    rows = []
    for run in runs:
        before, after = run.history[0], run.history[-1]
        changes = [f"{before[name]:.3f} -> {after[name]:.3f}" for name in ("sampled_accuracy", "greedy_accuracy", "reward")]
        rows.append(
            [run.algorithm, *changes, f"{after['kl_current_reference']:.2f}", f"{after['response_length']:.2f}"]
            + [f"{after[name]:.0f}" for name in ("optimizer_steps", "samples")]
            + [f"{after['seconds']:.1f}"]
        )
    return format_table(header, rows)


def remarks(run: TrainingRun) -> Iterator[str]:
    """What a reader should not overlook in this run, from its own numbers."""
    before, after = run.history[0], run.history[-1]
    if run.mistake:
        mistake = MISTAKES[run.mistake]
        yield f"{run.algorithm}, mistake {run.mistake}: {mistake.what}. Watch {mistake.watch}."
        yield "Compare with the same command without --mistake and with another --output."
    gap_before, gap_after = (row["reward"] - row["sampled_accuracy"] for row in (before, after))
    if gap_after - gap_before > 0.2:
        yield (
            f"{run.algorithm}: the verifier {run.verifier} gives {after['reward']:.3f}, the exact accuracy is "
            f"{after['sampled_accuracy']:.3f}: the policy learned what is checked, which is not what was meant."
        )
    if run.algorithm == "ppo" and run.settings.steps <= run.settings.critic_rounds:
        yield f"ppo: the policy never moved: {run.settings.critic_rounds} rounds are the critic's (--critic-rounds)."
    pair_accuracy = after.get("pair_accuracy", 0)
    if pair_accuracy > 0.95 and after["greedy_accuracy"] < before["greedy_accuracy"]:
        yield (
            f"{run.algorithm}: pair accuracy {pair_accuracy:.3f}, yet greedy accuracy fell from "
            f"{before['greedy_accuracy']:.3f} to {after['greedy_accuracy']:.3f}: {after['pairs']:.0f} pairs learned by heart"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    speak_once(parser)
    arguments = parser.parse_args(argv)
    if torchrun_ranks() < 2:
        run(parser, arguments, None)
        return
    with torchrun_rank() as rank:
        flags = {name: value for name, value in vars(arguments).items() if name in arguments.given}
        rank.watch.agree("flags", " ".join(f"{name}={value}" for name, value in sorted(flags.items())) or "none")
        with rank.watch.collectives("the start of the training"):
            run(parser, arguments, rank)


def run(parser: LabParser, arguments: argparse.Namespace, rank: Rank | None) -> None:
    """The command on one process, or as one rank of several: rank 0 writes, prints and shows progress."""
    speaks = rank is None or rank.rank == 0
    settings = {name: value for name, value in chosen_settings(arguments, TinySettings).items() if value is not None}
    named = arguments.algorithm
    if named == "all" and (arguments.mistake or arguments.objective):
        flag = "--mistake" if arguments.mistake else "--objective"
        parser.error(f"argument {flag}: name one --algorithm to use it in")
    if "public_tests" in settings and arguments.verifier != "public-tests":
        parser.error(f"argument --public-tests: the verifier {arguments.verifier} has none; add --verifier public-tests")
    algorithms = tuple(METHODS) if named == "all" else (named,)
    kl = settings.get("kl", None if arguments.objective else TinySettings.kl)
    try:
        for algorithm in algorithms:
            verifier = "exact" if named == "all" and algorithm == "sft" else arguments.verifier
            check_names(algorithm, verifier, arguments.objective, arguments.mistake)
            objective_row(algorithm, arguments.objective, kl)
    except ValueError as problem:
        parser.error(f"argument --{problem}")
    paths = [path for name in algorithms for path in paths_of(arguments.output, name).values()]
    if speaks:
        check_writable(paths, expected_bytes=500_000)
    keep = save if speaks else lambda *nothing: None
    shown = progress if speaks else lambda *nothing: None

    shared = {name: settings[name] for name in ("seed", "max_gradient_norm", "demonstrations", "evaluation_prompts")}
    if named in ("sft", "all"):
        own = settings if named == "sft" else {**shared, "evaluate_every": settings["evaluate_every"]}
        start = train(
            "sft", mistake=arguments.mistake if named == "sft" else None, on_step=shown("sft", own), rank=rank, **own
        )
        keep(arguments.output, start, start)
        runs = [start]
    else:
        # The supervised start is always right: a mistake is made in the training that was named.
        on_step = shown("sft", shared)
        start = train("sft", on_step=on_step, rank=rank, **shared, evaluate_every=METHODS["sft"].steps)
        runs = []
    for algorithm in algorithms:
        if algorithm == "sft":
            continue
        try:
            trained = train(
                algorithm,
                start.policy,
                verifier=arguments.verifier,
                objective=arguments.objective,
                mistake=arguments.mistake,
                on_step=shown(algorithm, settings, arguments.verifier),
                rank=rank,
                **settings,
            )
        except ValueError as problem:  # found by sampling, after other trainings may have been written
            raise FileProblem(f"{algorithm}: {problem}") from problem
        keep(arguments.output, trained, start)
        runs.append(trained)
    if speaks:
        print_report(arguments, settings, runs)


def print_report(arguments: argparse.Namespace, settings: dict[str, float], runs: Sequence[TrainingRun]) -> None:
    details = [f"seed {settings['seed']}", f"verifier {arguments.verifier}"]
    details += [f"objective {arguments.objective}"] if arguments.objective else []
    details += [f"mistake {arguments.mistake}"] if arguments.mistake else []
    print(", ".join(details) + f"; accuracy on {settings['evaluation_prompts']} held-out prompts\n")
    print(summary(runs))
    print()
    for run in runs:
        for remark in remarks(run):
            print(remark)
    if len(runs) > 1:
        print("The trainings differ in samples, updates and learning rates: this is a check of each, not a ranking.")
    tables = ", ".join(str(paths_of(arguments.output, run.algorithm)["history"]) for run in runs)
    print(f"Files: {tables}; beside each .json and -samples.jsonl")


def progress(algorithm: str, settings: dict[str, float], verifier: str = "exact") -> OnStep | None:
    return progress_line(f"{algorithm:10}", settings.get("steps") or own_steps(algorithm, verifier), "sampled_accuracy")
