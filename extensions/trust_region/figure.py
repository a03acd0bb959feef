"""The figure: KL(old || new) of every update, method by method, and what each reached."""

from __future__ import annotations

from typing import Sequence

import numpy as np

import plot_results
from extensions.trust_region.training import TASKS, TrainingRun

COLOURS = {"trpo": "C3", "ppo-kl": "C4", "ppo-clip": "C0"}


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
