"""The figures: KL(old || new) of every update, method by method, and what each reached: on a table, and in environments."""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

import numpy as np

import plot_results
from extensions.trust_region.training import TASKS, TrainingRun

COLOURS = {"trpo": "C3", "ppo-kl": "C4", "ppo-clip": "C0", "ppo": "C0"}


def draw(runs: Sequence[TrainingRun]):
    """One panel per method with the line delta; return against iterations; KL against return gained; the penalty's weight."""
    delta, column = runs[0].settings.delta, TASKS[runs[0].task].column
    figure, axes = plot_results.new_figure(len(runs) + 2, columns=3, panel_size=(4.6, 3.4))
    highest = max(row["kl_old_current"] for run in runs for row in run.history)
    for axis, run in zip(axes, runs):
        steps = np.array([row["step"] for row in run.history[1:]])
        drift = np.array([row["kl_old_current"] for row in run.history[1:]])
        outside = drift > delta
        axis.bar(steps, drift, width=1.0, color=COLOURS[run.method], alpha=0.8)
        axis.bar(steps[outside], drift[outside], width=1.0, color="black", alpha=0.8)
        axis.axhline(delta, color="grey", linestyle="--", linewidth=1)
        title = f"{run.method}: {outside.sum()} of {len(steps)} updates above delta (black)"
        axis.set(title=title, xlabel="iteration", ylabel="KL(old || new) of the update", ylim=(0, 1.05 * highest))
    value, weight = axes[len(runs) :]
    best = 1.0  # both tasks pay at most 1
    for run in runs:
        steps = [row["step"] for row in run.history]
        value.plot(steps, [best - row[column] for row in run.history], color=COLOURS[run.method], label=run.method)
        if run.method == "ppo-kl":
            weight.plot(steps[1:], [row["beta"] for row in run.history[1:]], color=COLOURS[run.method], label="ppo-kl: beta")
        if run.method == "trpo":
            weight.step(steps, [row["shrinks"] for row in run.history], color=COLOURS[run.method], label="trpo: shrinks")
    value.set(title=f"best - {column.replace('_', ' ')} (log axis)", xlabel="iteration", yscale="log")
    weight.set(title="what each adapts: the penalty, or the step", xlabel="iteration")
    weight.set_yscale("symlog", linthresh=0.1)
    for axis in axes:
        axis.title.set_fontsize(10)
        axis.grid(alpha=0.3)
    for axis in (value, weight):
        axis.legend(fontsize=8)
    s = runs[0].settings
    figure.supxlabel(f"{runs[0].task}, seed {s.seed}, {s.samples} samples an iteration, delta {delta:g}", fontsize=9)
    return figure


def draw_environment(curves: Sequence[plot_results.Curves]):
    """Runs in environments, TRPO's first, each with all its seeds: one panel each with KL(old || new) of every update and the
    line delta of the first; the first without its line search; returns against steps."""
    settings = curves[0].settings
    delta = settings["delta"]
    methods = [c.method for c in curves]
    names = [f"{c.method} ({Path(c.folder).name})" if methods.count(c.method) > 1 else c.method for c in curves]
    colours = [COLOURS.get(c.method, f"C{5 + number}") for number, c in enumerate(curves)]
    panels = [(c, "kl_old_current", name, colour) for c, name, colour in zip(curves, names, colours)]
    panels.insert(1, (curves[0], "full_kl", f"{names[0]} without its line search", colours[0]))
    figure, axes = plot_results.new_figure(len(panels) + 1, columns=2, panel_size=(5.6, 3.4))
    highest = max(c.columns[column].max() for c, column, _, _ in panels)
    for axis, (c, column, name, colour) in zip(axes, panels):
        drift, steps = c.columns[column], c.columns["environment_steps"]
        outside = drift > delta
        axis.plot(steps[~outside], drift[~outside], ".", color=colour, markersize=4)
        axis.plot(steps[outside], drift[outside], ".", color="black", markersize=4)
        axis.axhline(delta, color="grey", linestyle="--", linewidth=1)
        axis.set(title=f"{name}: {outside.sum()} of {outside.size} updates above delta (black)", ylim=(0, 1.05 * highest))
        axis.set(xlabel="steps of the environments", ylabel="KL(old || new) of the update")
    returns = axes[-1]
    for c, name, colour in zip(curves, names, colours):
        for number, (steps, value) in enumerate(zip(c.columns["environment_steps"], c.columns["episode_return"])):
            returns.plot(steps, value, color=colour, linewidth=1, label=name if number == 0 else None)
    returns.set(title="episode return while training (last 100 episodes)", xlabel="steps of the environments")
    for axis in axes:
        axis.title.set_fontsize(10)
        axis.grid(alpha=0.3)
    returns.legend(fontsize=8)
    figure.supxlabel(f"{settings['env']}, seed {plot_results.shown(settings['seed'])}, delta {delta:g}", fontsize=9)
    return figure
