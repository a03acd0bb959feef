"""The command line of extensions.trust_region: the tables, and what goes with --env (environment_command.py does that)."""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from pathlib import Path
from typing import Sequence

import plot_results
from extensions.trust_region import environment_command, table
from extensions.trust_region.environment import PRESETS, EnvironmentSettings
from extensions.trust_region.figure import draw
from extensions.trust_region.training import METHODS, TASKS, TrainingRun, TrustRegionSettings, train
from rl_lab import (
    FileProblem,
    LabParser,
    Settings,
    add_settings,
    check_writable,
    format_table,
    json_text,
    parse_seeds,
    path_argument,
    progress_line,
    replace_files,
    setting,
)

DESCRIPTION = """\
The step that PPO replaced: TRPO's natural step under a limit on KL(old || new).

Without --env: worked by hand on a table, then trained beside PPO with a KL
penalty and PPO-Clip at one budget of samples. CPU, seconds.
With --env: TRPO with a network in a Gymnasium environment, on the rollouts,
networks and evaluation of extensions.gymnasium_ppo. Writes OUTPUT/trpo.csv (one
row per update) and trpo.json (settings, evaluation). CPU, seconds to minutes."""

EXAMPLES = """\
examples:
  python -m extensions.trust_region
  python -m extensions.trust_region --task chain --plot trust-region.svg
  python -m extensions.trust_region --delta 0.05 --no-training
  python -m extensions.trust_region --json trust-region.json

in an environment, with PPO's run drawn beside it:
  python -m extensions.gymnasium_ppo --env CartPole-v1 --output results-ppo
  python -m extensions.trust_region --env CartPole-v1 --output results-trpo \\
      --beside results-ppo --plot who-stays-inside.svg
  python plot_results.py --input results-ppo results-trpo --x samples \\
      --output cartpole.svg

presets, which a flag overrules (other environments take the defaults):
{presets}"""

TABLES, ENVIRONMENT = "tables", "--env"
SETTINGS = {TABLES: TrustRegionSettings, ENVIRONMENT: EnvironmentSettings}
"""What is trained on -> its settings."""

DEFAULTS = {
    TABLES: {"task": "bandit", "no_training": False, "json": None},
    ENVIRONMENT: {"output": Path("results-trust-region"), "seeds": None, "beside": None},
}
"""What is trained on -> the other flags that belong to it alone."""


def flags_of_settings() -> type[Settings]:
    """One field per flag. Where tables and environments differ in its meaning or default, the help says both."""
    modes = {mode: {field.name: field for field in dataclasses.fields(c)} for mode, c in SETTINGS.items()}
    flags = []
    for name in dict.fromkeys(name for fields in modes.values() for name in fields):
        own = {mode: fields[name] for mode, fields in modes.items() if name in fields}
        texts = {mode: f"{field.metadata['meaning']}; default {field.default:g}" for mode, field in own.items()}
        together = texts[TABLES] if len(set(texts.values())) < len(own) else ". ".join(map(": ".join, texts.items()))
        field = list(own.values())[-1]  # the environment's range is the wider one; each class checks its own
        meaning = together.removesuffix(f"; default {field.default:g}")  # add_settings says the last default itself
        flags.append((name, field.type, setting(field.default, field.metadata["allowed"], meaning, field.metadata["group"])))
    return dataclasses.make_dataclass("Flags", flags, bases=(Settings,), frozen=True)


def presets_text() -> str:
    lines = []
    for name, preset in PRESETS.items():
        settings = [f"{key.replace('_', '-')} {value}" for key, value in preset.items()]
        lines.append(textwrap.fill(f"  {name}: " + ", ".join(settings), 80, subsequent_indent=" " * 4))
    return "\n".join(lines)


def build_parser() -> LabParser:
    examples = EXAMPLES.format(presets=presets_text())
    parser = LabParser(prog="python -m extensions.trust_region", description=DESCRIPTION, epilog=examples)
    parser.add_argument("--task", choices=tuple(TASKS), help="what to train on; default bandit")
    parser.add_argument("--no-training", action="store_true", help="only the worked steps")
    parser.add_argument("--json", type=path_argument, metavar="FILE", help="write the worked steps and the trainings as JSON")
    parser.add_argument("--plot", type=plot_results.figure_path, metavar="FILE", help="draw the trainings: .svg, .png, .pdf")
    group = parser.add_argument_group("an environment in place of the tables")
    group.add_argument("--env", metavar="ID", help="any Gymnasium id with Box or Discrete spaces, such as CartPole-v1")
    group.add_argument(
        "--output", type=path_argument, metavar="DIR", help=f"folder to write; default {DEFAULTS[ENVIRONMENT]['output']}"
    )
    group.add_argument(
        "--seeds", type=parse_seeds, metavar="A-B", help="run several seeds (0-4, or 0,7), each into OUTPUT/seed-N/"
    )
    group.add_argument(
        "--beside", type=path_argument, metavar="DIR", help="draw the PPO run in this folder beside, with --plot"
    )
    add_settings(parser, flags_of_settings())
    return parser


def settings_of(parser: LabParser, arguments: argparse.Namespace, mode: str) -> dict[str, float]:
    """What was given of the mode's settings; flags of the other mode end the command with one line."""
    own, *others = (mode, *(other for other in SETTINGS if other != mode))
    fields = {field.name for field in dataclasses.fields(SETTINGS[own])}
    foreign = {f.name for other in others for f in dataclasses.fields(SETTINGS[other])} - fields
    foreign |= {name for other in others for name in DEFAULTS[other]}
    for name in arguments.given | ({"no_training"} if arguments.no_training else set()):
        if name in foreign:
            rule = "not allowed with --env" if mode == ENVIRONMENT else "needs --env"
            parser.error(f"argument --{name.replace('_', '-')}: {rule}")
    for name, default in DEFAULTS[own].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    return {name: getattr(arguments, name) for name in arguments.given & fields}


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
    mode = TABLES if arguments.env is None else ENVIRONMENT
    given = settings_of(parser, arguments, mode)
    if arguments.plot and arguments.no_training:
        parser.error("argument --plot: draws the trainings, which --no-training leaves out")
    if arguments.beside and not arguments.plot:
        parser.error("argument --beside: is drawn by --plot, which is not given")
    if arguments.seeds and "seed" in given:
        parser.error(f"argument --seeds: not allowed with --seed {given['seed']}; give the seeds once")
    if mode == ENVIRONMENT:
        environment_command.run(parser, arguments, given)
        return
    try:
        settings = TrustRegionSettings(**given)
    except ValueError as problem:
        name, _, rest = str(problem).partition(": ")
        parser.error(f"argument --{name.replace('_', '-')}: {rest}")
    run_tables(arguments, settings)


def run_tables(arguments: argparse.Namespace, settings: TrustRegionSettings) -> None:
    """Everything without --env: the worked steps, the trainings, the files."""
    check_writable([path for path in (arguments.json, arguments.plot) if path], 2**20)
    delta, rewards = settings.delta, table.f64(table.REWARDS)
    steps = [table.natural_step(table.f64(start), rewards, delta) for start in table.STARTS.values()]
    print("\n\n".join(worked_step(name, step, delta) for name, step in zip(table.STARTS, steps)))
    print(mistakes_table(delta))
    runs = []
    if not arguments.no_training:
        for method in METHODS:
            progress = progress_line(method, settings.steps, TASKS[arguments.task].column)
            runs.append(train(method, arguments.task, on_step=progress, **dataclasses.asdict(settings)))
        print(f"\nTrained on the {arguments.task}, {settings.steps} iterations:\n\n{trainings_table(runs)}")
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
