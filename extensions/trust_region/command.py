"""The command line of extensions.trust_region."""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

import plot_results
from extensions.trust_region import table
from extensions.trust_region.figure import draw
from extensions.trust_region.training import METHODS, TASKS, TrainingRun, TrustRegionSettings, train
from rl_lab import (
    FileProblem,
    LabParser,
    add_settings,
    check_writable,
    chosen_settings,
    format_table,
    json_text,
    progress_line,
    replace_files,
)

DESCRIPTION = """\
The step that PPO replaced: TRPO's natural step under a limit on KL(old || new), worked by hand on a
table, then trained beside PPO with a KL penalty and PPO-Clip at one budget of samples. CPU, seconds."""

EXAMPLES = """\
examples:
  python -m extensions.trust_region
  python -m extensions.trust_region --task chain --plot trust-region.svg
  python -m extensions.trust_region --delta 0.05 --no-training
  python -m extensions.trust_region --json trust-region.json"""


def build_parser() -> LabParser:
    parser = LabParser(prog="python -m extensions.trust_region", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--task", choices=tuple(TASKS), default="bandit", help="what to train on; default bandit")
    parser.add_argument("--no-training", action="store_true", help="only the worked steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the worked steps and the trainings as JSON")
    parser.add_argument("--plot", type=plot_results.figure_path, metavar="FILE", help="draw the trainings: .svg, .png, .pdf")
    add_settings(parser, TrustRegionSettings)
    return parser


def numbers(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:.6f}" for value in values) + "]"


def worked_step(name: str, step: table.NaturalStep, delta: float) -> str:
    """One natural step, line by line, with the exact policies beside it."""
    p, rewards = table.f64(step.start), table.f64(table.REWARDS)
    gradient = table.policy_gradient(p, rewards)
    exact_eta = table.eta_at(p, rewards, delta)
    rows = {
        f"tilt with KL exactly delta (eta {exact_eta:.6f})": table.tilted(p, rewards, exact_eta),
        "best policy at that KL": table.best_at(p, rewards, delta),
        "plain gradient at that KL": table.moved_along(p, gradient, table.length_at(p, gradient, delta)),
    }
    verdict = "accepted" if step.accepted else f"rejected: above delta; shrunk {step.shrinks} time(s) by the line search"
    after = step.after_line_search
    return "\n".join([
        f"From {name}: p = {numbers(step.start)}, R = {list(table.REWARDS)}, delta {delta:g}",
        f"  gradient of J     g = p (R - J)             {numbers(gradient.tolist())}",
        f"  F^+ g = R - J, x'Fx = Var_p(R)              {step.variance:.9f}",
        f"  eta = sqrt(2 delta / Var)                   {step.eta:.9f}",
        f"  new policy p exp(eta R) / Z                 {numbers(step.probabilities)}",
        f"  KL(old || new)                              {step.kl_old_new:.9f}   {verdict}",
        f"  KL(new || old)                              {step.kl_new_old:.9f}",
        f"  gain of J (first order)                     {step.gain:.9f} ({step.first_order_gain:.9f})",
        f"  taken in the end                            {numbers(after['probabilities'])}, KL {after['kl_old_new']:.6f}",
        *(f"  {words:<43} gain {table.gain(p, q, rewards):.9f}" for words, q in rows.items()),
    ])  # fmt: skip


def mistakes_table(delta: float) -> str:
    rows = []
    for start in table.STARTS.values():
        for m in table.mistakes(table.f64(start), table.f64(table.REWARDS), delta):
            rows.append([m.name, m.quantity, f"{m.right:.6f}", f"{m.wrong:.6f}"])
    half = len(rows) // 2
    lines = []
    for (name, *_), of_start in zip(table.STARTS.items(), (rows[:half], rows[half:])):
        lines += ["", f"Wrong versions, from {name}:", "", format_table(["mistake", "quantity", "right", "wrong"], of_start)]
    what = {m.name: m.what for m in table.mistakes(table.f64((0.5, 0.3, 0.2)), table.f64(table.REWARDS), delta)}
    return "\n".join([*lines, "", *(f"{name}: {text}." for name, text in what.items())])


def trainings_table(runs: Sequence[TrainingRun]) -> str:
    """Return and drift of each method, and who stays inside delta."""
    rows = []
    for run in runs:
        drift = [row["kl_old_current"] for row in run.history[1:]]
        value = run.history[-1][TASKS[run.task].column]
        above = sum(x > run.settings.delta for x in drift)
        rows.append([
            run.method, f"{value:.4f}", f"{max(drift):.6f}", f"{above} of {len(drift)}",
            str(sum(row["shrinks"] for row in run.history)), str(run.history[-1]["sampled_actions"]),
        ])  # fmt: skip
    header = [
        "method",
        TASKS[runs[0].task].column.replace("_", " "),
        "largest KL(old || new)",
        "above delta",
        "shrinks",
        "samples",
    ]
    return format_table(header, rows)


def as_json(steps: Sequence[table.NaturalStep], runs: Sequence[TrainingRun], delta: float) -> dict:
    wrong = {
        name: [m._asdict() for m in table.mistakes(table.f64(start), table.f64(table.REWARDS), delta)]
        for name, start in table.STARTS.items()
    }
    return {
        "delta": delta,
        "natural_step": [step._asdict() for step in steps],
        "mistakes": wrong,
        "trainings": [{"method": run.method, "task": run.task, "history": run.history} for run in runs],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    settings = chosen_settings(arguments, TrustRegionSettings)
    if arguments.plot and arguments.no_training:
        parser.error("--plot: draws the trainings, which --no-training leaves out")
    check_writable([path for path in (arguments.json, arguments.plot) if path], 2**20)
    delta = settings["delta"]
    rewards = table.f64(table.REWARDS)
    steps = [table.natural_step(table.f64(start), rewards, delta) for start in table.STARTS.values()]
    print("\n\n".join(worked_step(name, step, delta) for name, step in zip(table.STARTS, steps)))
    print(mistakes_table(delta))
    runs = []
    if not arguments.no_training:
        for method in METHODS:
            column = TASKS[arguments.task].column
            progress = progress_line(method, settings["steps"], column)
            runs.append(train(method, arguments.task, on_step=progress, **settings))
        print(f"\nTrained on the {arguments.task}, {settings['steps']} iterations:\n\n{trainings_table(runs)}")
        print(
            "\nOnly the trust region promises its delta; the penalty corrects itself after the fact; the clip does not know delta."
        )
    if arguments.json:
        replace_files({arguments.json: json_text(as_json(steps, runs, delta))})
        print(f"wrote {arguments.json}")
    if arguments.plot:
        try:
            plot_results.save(draw(runs), arguments.plot)
        except plot_results.PlotProblem as problem:
            raise FileProblem(str(problem)) from problem
        print(f"wrote {arguments.plot}")
