"""The figure: predicted against executed, references with their validity, hierarchy against weights, ratios of the contracts."""

from __future__ import annotations

from typing import Sequence

import numpy as np

import plot_results
from extensions.control import contract, wbc
from extensions.control.mpc import receding_horizon
from extensions.control.stack import Stack
from extensions.control.training import TrainingRun
from extensions.control.worked import limited

COLOURS = dict(zip(contract.CONTRACTS, ("C2", "C1", "C3", "C0")))


def draw_mpc(axis) -> None:
    """Closed loop from (10, 0) with the plan made at some of its steps, and the input's limits as a band."""
    loop = receding_horizon(limited(), np.array([10.0, 0.0]), 20)
    axis.axhspan(-1, 1, color="grey", alpha=0.15, linewidth=0, label="limits of u")
    axis.plot(loop.x[:, 0], color="black", label="position, executed")
    axis.step(np.arange(20), loop.u[:, 0], where="post", color="C0", label="input u, executed")
    for number, k in enumerate((0, 3, 6)):
        planned = loop.plans[k]
        style = dict(linestyle=":", linewidth=1.2)
        axis.plot(
            k + np.arange(11), planned.x[:, 0], color="black", alpha=0.6, label="planned" if not number else None, **style
        )
        axis.step(k + np.arange(10), planned.u[:, 0], where="post", color="C0", alpha=0.6, **style)
    axis.set(title="MPC: predicted against executed", xlabel="step")


def draw_references(axis) -> None:
    """One joint's references with their validity, and what happens when planning stops at t = .8 s."""
    stack = Stack()
    stack.reset(np.array([0.3, 0.8, 0.6]))
    times, angles = [0.0], [stack.q[0]]
    for step in range(14):
        stack.step(np.array([-0.08, 0.06]) if step < 8 else np.full(2, np.nan))
        reference = stack.manager.reference
        if step < 8:
            knots = np.linspace(reference.time, reference.valid_until, 10)
            axis.plot(
                knots,
                [reference.at(t)[0] for t in knots],
                color="C0",
                linewidth=3,
                alpha=0.4,
                label="reference, while valid" if not step else None,
            )
        times.append(stack.now)
        angles.append(stack.q[0])
    axis.plot(times, angles, "k.-", label="joint 1, executed")
    axis.axvline(0.8, color="C3", linestyle="--", linewidth=1, label="no plan any more: hold, then stop")
    axis.set(
        title="references, their validity, and a planner that fails", xlabel="time (s)", ylabel="angle of joint 1 (rad)"
    )


def draw_hierarchy(axis) -> None:
    first, second = np.array([[1.0, 0.0]]), np.array([[1.0, 1.0], [1.0, -1.0]])
    weights = np.logspace(0, 8, 33)
    sums = [wbc.weighted([wbc.Task(first, np.ones(1), w), wbc.Task(second, np.zeros(2))]) for w in weights]
    axis.loglog(weights, [1 - s.dq[0] for s in sums], label="weighted sum: error of the first task")
    axis.loglog(weights, [s.condition for s in sums], linestyle="--", label="its condition number")
    axis.axhline(1e-9, color="C2", label="hierarchy: error 0 at any condition")
    axis.set(title="priority bought with weights, or by order", xlabel="weight of the first task")


def draw_ratios(axis) -> None:
    """Ratio by sampled a: right ones are 1 everywhere while nothing has changed."""
    a = np.linspace(-2.2, 3.2, 400)
    for name in contract.CONTRACTS:
        style = dict(linewidth=4 if name == "sampled" else 1.8, alpha=0.5 if name == "sampled" else 1)
        axis.plot(
            a,
            np.exp(contract.log_ratio(name, a, contract.MEAN)),
            color=COLOURS[name],
            label=f"{name}, policy unchanged",
            **style,
        )
    axis.plot(
        a,
        np.exp(contract.log_ratio("executed", a, contract.NEW_MEAN)),
        "--",
        color=COLOURS["executed"],
        label="executed, new mean .6",
    )
    axis.plot(
        a,
        np.exp(contract.log_ratio("sampled", a, contract.NEW_MEAN)),
        "--",
        color=COLOURS["sampled"],
        label="sampled, new mean .6",
    )
    axis.axhline(contract.BAND, color="grey", linestyle=":", linewidth=1)
    axis.axvspan(contract.LOW, contract.HIGH, color="grey", alpha=0.12, linewidth=0)
    axis.set(
        title="the ratio that each contract computes (limits shaded)",
        xlabel="sampled a",
        ylabel="ratio",
        yscale="log",
        ylim=(0.2, 60),
    )


def draw(runs: Sequence[TrainingRun] = ()):
    """Four panels; two more where trainings are given."""
    figure, axes = plot_results.new_figure(4 + 2 * bool(runs), columns=3 if runs else 2, panel_size=(5.6, 4.0))
    for axis, panel in zip(axes, (draw_mpc, draw_references, draw_hierarchy, draw_ratios)):
        panel(axis)
    for axis, column, title in zip(
        axes[4:], ("completed", "mean_reward"), ("share of goals reached", "mean reward of a step")
    ):
        for run in runs:
            steps = [row["step"] for row in run.history]
            axis.plot(steps, [row[column] for row in run.history], color=COLOURS[run.contract], label=run.contract)
        axis.set(title=f"PPO through the stack: {title}", xlabel="iteration")
    for axis in axes:
        axis.title.set_fontsize(10.5)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7.5)
    return figure
