"""What the command does with --env: train, print who stays inside delta, write trpo.csv and trpo.json, draw."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Sequence

import plot_results
from extensions.gymnasium_ppo.environments import MISSING, import_gymnasium
from extensions.gymnasium_ppo.files import run_document, summary
from extensions.trust_region.environment import TrustRegionTrainer, run_of
from extensions.trust_region.figure import draw_environment
from rl_lab import FileProblem, LabParser, check_writable, csv_text, json_text, progress_line, replace_files


def paths_of(folder: Path) -> dict[str, Path]:
    return {"history": folder / "trpo.csv", "document": folder / "trpo.json"}


def inside_delta(history: Sequence[dict[str, float]], delta: float) -> dict[str, float]:
    """How the updates of a run kept the limit: counts, and the largest KL(old || new) of a step that was taken."""
    return {
        "delta": delta,
        "updates": len(history),
        "largest_kl_old_current": max(row["kl_old_current"] for row in history),
        "largest_full_kl": max(row["full_kl"] for row in history),
        "above_delta": sum(row["kl_old_current"] > delta for row in history),
        "accepted": sum(row["accepted"] for row in history),
        "shrunk": sum(row["moved"] - row["accepted"] for row in history),
        "not_moved": sum(1 - row["moved"] for row in history),
    }


def step_text(counts: dict[str, float]) -> str:
    """`inside_delta` in two lines."""
    return (
        f"KL(old || new) of the {counts['updates']} updates: {counts['above_delta']} above delta {counts['delta']:g}, "
        f"largest {counts['largest_kl_old_current']:.6f}.\n"
        f"Full step taken {counts['accepted']} times, shrunk {counts['shrunk']} times "
        f"(its KL was up to {counts['largest_full_kl']:.6f}), no step {counts['not_moved']} times."
    )


def new_trainer(parser: LabParser, env: str, settings: dict[str, float]) -> TrustRegionTrainer:
    """The trainer, or the end of the command with one line that names the flag."""
    try:
        return TrustRegionTrainer(run_of(env, **settings))
    except ValueError as problem:
        name, _, rest = str(problem).partition(": ")
        parser.error(f"argument --{name.replace('_', '-')}: {rest}" if name in settings else f"argument --env: {problem}")


def train_and_write(trainer: TrustRegionTrainer, folder: Path, label: str) -> float:
    """Train to the end, evaluate, write both files, print -> deterministic mean return."""
    show = progress_line(label, trainer.run.updates, "episode_return")
    while not trainer.finished:
        row = trainer.advance()
        if show:
            show(row)
    evaluation, sampled = trainer.evaluate(True), trainer.evaluate(False)
    counts = inside_delta(trainer.history, trainer.run.settings.delta)
    document = {**run_document(trainer, evaluation, sampled), "trust_region": counts}
    paths = paths_of(folder)
    replace_files({paths["history"]: csv_text(trainer.history), paths["document"]: json_text(document)})
    print(f"{summary(trainer, evaluation, sampled)}\n{step_text(counts)}")
    return evaluation["mean_return"]


def curves_beside(folder: Path | None) -> list[plot_results.Curves]:
    """The runs in environments that a folder holds, to be drawn beside this one. Raises FileProblem."""
    if folder is None:
        return []
    try:
        curves = [c for c in plot_results.read_folder(folder) if c.kind == "environment" and "environment_steps" in c.columns]
    except plot_results.PlotProblem as problem:
        raise FileProblem(str(problem)) from problem
    if not curves:
        raise FileProblem(f"{folder}: holds no run in an environment; python -m extensions.gymnasium_ppo writes one")
    return curves


def save_figure(output: Path, beside: Sequence[plot_results.Curves], path: Path) -> None:
    try:
        (own,) = (c for c in plot_results.read_folder(output) if c.method == "trpo")
        plot_results.save(draw_environment([own, *beside]), path)
    except plot_results.PlotProblem as problem:
        raise FileProblem(str(problem)) from problem


def run(parser: LabParser, arguments: argparse.Namespace, settings: dict[str, float]) -> None:
    """Everything that --env asks for."""
    try:
        import_gymnasium()
    except FileProblem:
        parser.error(f"argument --env: {MISSING}")
    folders = {None: arguments.output}
    if arguments.seeds:
        folders = {seed: arguments.output / f"seed-{seed}" for seed in arguments.seeds}
    files = [path for folder in folders.values() for path in paths_of(folder).values()]
    check_writable([*files, *([arguments.plot] if arguments.plot else [])], 2**20)
    beside = curves_beside(arguments.beside)

    returns = []
    for seed, folder in folders.items():
        trainer = new_trainer(parser, arguments.env, settings | ({} if seed is None else {"seed": seed}))
        label = arguments.env + (f"  seed {seed}" if seed is not None else "")
        returns.append(train_and_write(trainer, folder, label))
        trainer.close()
    if len(returns) > 1:
        middle, low, high = statistics.median(returns), min(returns), max(returns)
        print(f"\n{arguments.env}, {len(returns)} seeds: median {middle:.2f}, from {low:.2f} to {high:.2f}")
    written = list(paths_of(arguments.output / "seed-N" if arguments.seeds else arguments.output).values())
    if arguments.plot:
        save_figure(arguments.output, beside, arguments.plot)
        written.append(arguments.plot)
    print(f"Files: {', '.join(map(str, written))}")
