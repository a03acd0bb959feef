"""The figure: what a prompt weighs, bias against noise, where each form of the KL points, how the length drifts."""

from __future__ import annotations

import textwrap
from typing import Sequence

import numpy as np

import plot_results
from extensions.estimators.binary import weight, weight_limit
from extensions.estimators.kl import FORMS, USES
from extensions.estimators.lengths import GROUP_SIZES as GROUP_SIZES_OF_LENGTHS
from extensions.estimators.lengths import drift_of
from extensions.estimators.line import Line
from extensions.estimators.policy import Case, kl_gradient, policy_gradient, shown
from extensions.estimators.sequences import S1

GROUP_SIZES = (2, 4, 8, 16, 32, 64)
CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, np.sqrt(3) / 2]])  # of the triangle of all policies of three answers
ARROW = 0.42  # of the side of the triangle: only the direction is drawn, the length is what a coefficient makes of it


def draw(advantages: Sequence[Line], case: Case, kl: Sequence[Line], kl_case: Case, lengths: Sequence[Line]):
    """Four panels from the lines of three tables; advantages are those of `case`, kl those of `kl_case`."""
    figure, axes = plot_results.new_figure(4, columns=2, panel_size=(6.2, 4.6))
    draw_weights(axes[0])
    draw_bias_and_noise(axes[1], advantages, policy_gradient(case.p, case.R))
    draw_kl(axes[2], kl, kl_case)
    draw_drift(axes[3], lengths)
    for axis in axes:
        axis.title.set_fontsize(10)
    about = f"bias and noise: p {shown(case.probabilities)}, R {shown(case.rewards)}, G {case.group_size}"
    figure.supxlabel(f"{about}; KL: p {shown(kl_case.probabilities)}; lengths: 15 answers of 1 to 3 tokens", fontsize=9)
    return figure


def draw_weights(axis) -> None:
    """w_G(q) for / std, ddof 0, and its limit."""
    q = np.linspace(0.005, 0.995, 397)
    for shade, size in zip(np.linspace(0.25, 0.95, len(GROUP_SIZES)), GROUP_SIZES):
        axis.plot(q, [weight(x, size) for x in q], color=(0.1, 0.3, 0.6, shade), label=f"G = {size}")
    axis.plot(q, [weight_limit(x) for x in q], "k--", linewidth=1, label="1 / sqrt(q (1 - q)), slope of 2 arcsin(sqrt q)")
    axis.set(title="/ std: what a prompt weighs, w_G(q)", xlabel="q, chance of a right answer", ylabel="weight on grad q")
    axis.set_ylim(0, 8)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, loc="upper center", ncol=2)


def draw_bias_and_noise(axis, lines: Sequence[Line], truth: np.ndarray) -> None:
    """Each estimator by its bias and its standard deviation, both in lengths of the true gradient; arcs of equal error."""
    length = float(np.linalg.norm(truth))
    points: dict[tuple[float, float], list[str]] = {}
    for line in lines:
        bias = float(np.linalg.norm(np.subtract(line.mean, truth))) / length
        points.setdefault((round(bias, 3), round(np.sqrt(line.trace_cov) / length, 3)), []).append(line.estimator)
    widest = max(max(x for x, _ in points), 0.2) * 1.5
    highest = max(y for _, y in points) * 1.3
    angles = np.linspace(0, np.pi / 2, 100)
    for radius in np.arange(0.25, np.hypot(widest, highest), 0.25):
        axis.plot(radius * np.cos(angles), radius * np.sin(angles), color="0.85", linewidth=0.8, zorder=0)
    for spot, (text, height) in zip(sorted(points, key=lambda p: p[1]), spread_labels(points, 0.045 * highest)):
        axis.plot(*spot, "o", color="C3" if spot[0] > 0 else "C0", markersize=5)
        right = spot[0] > 0.5 * widest
        at = min(spot[0] + 0.03 * widest, 0.98 * widest) if not right else 0.98 * widest
        axis.annotate(text, spot, (at, height), fontsize=7, va="center", ha="right" if right else "left",
                      arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.5})  # fmt: skip
    axis.set(title="bias and noise of one group (grey: equal error; blue: unbiased)", xlim=(-0.02 * widest, widest),
             ylim=(0, highest), xlabel="|E[g] - grad J| / |grad J|", ylabel="sqrt(tr Cov) / |grad J|")  # fmt: skip


def spread_labels(points: dict[tuple[float, float], list[str]], gap: float) -> list[tuple[str, float]]:
    """Labels from the lowest point up, each moved up where the one below would touch it."""
    made, last = [], -np.inf
    for spot in sorted(points, key=lambda p: p[1]):
        last = max(spot[1], last + gap)
        named = points[spot]
        made.append((", ".join(named[:2]) + (f" and {len(named) - 2} more" if len(named) > 2 else ""), last))
    return made


def draw_kl(axis, lines: Sequence[Line], case: Case) -> None:
    """A step down each form's expected gradient, as the policy moves: dp = -p (v - p . v) for dlogits = -v."""
    if case.answers != 3:
        axis.text(0.5, 0.5, "drawn for three answers", ha="center")
        axis.axis("off")
        return
    here = case.p
    reference = np.full(3, 1 / 3) if case.r is None else case.r
    moves: dict[tuple, list[str]] = {}
    for line in lines:
        if line.estimator in {f"{form} {use}" for form in FORMS for use in USES}:
            v = np.array(line.mean)
            dp = -here * (v - here @ v)
            moves.setdefault(tuple(np.round(dp, 6)), []).append(line.estimator)
    axis.plot(*np.vstack([CORNERS, CORNERS[:1]]).T, color="0.6", linewidth=1)
    for corner, name in zip(CORNERS, ("answer 1", "answer 2", "answer 3")):
        axis.annotate(name, corner, ha="center", va="bottom" if corner[1] else "top", fontsize=8)
    for name, spot, colour in (("p", here, "k"), ("reference", reference, "C2")):
        axis.plot(*(spot @ CORNERS), "o", color=colour, markersize=6)
        axis.annotate(f" {name}", spot @ CORNERS, fontsize=9, va="top", color=colour)
    right = tuple(np.round(-here * (kl_gradient(here, reference) - here @ kl_gradient(here, reference)), 6))
    order = sorted(moves, key=lambda dp: (dp != right, moves[dp]))
    for number, dp in enumerate(order):
        step, label = np.array(dp) @ CORNERS, ", ".join(moves[dp])
        if not np.any(step):
            axis.plot([], [], " ", label=f"nowhere: {label}")
            continue
        step = step * ARROW / np.linalg.norm(step)
        axis.annotate("", here @ CORNERS + step, here @ CORNERS,
                      arrowprops={"arrowstyle": "->", "color": f"C{number}", "linewidth": 2.4 if dp == right else 1.2})
        axis.plot([], [], color=f"C{number}", label=wrapped(("exact: " if dp == right else "") + label))
    axis.set(title="KL(p || reference): where a step down each form's gradient leads", xlim=(-0.08, 1.65), ylim=(-0.3, 0.95))
    axis.set_aspect("equal")
    axis.axis("off")
    axis.legend(fontsize=6.5, loc="upper right", frameon=False)


def wrapped(text: str, width: int = 36) -> str:
    return "\n".join(textwrap.wrap(text, width))


def draw_drift(axis, lines: Sequence[Line]) -> None:
    """How the expected length moves along a step of length one, against the true gradient's."""
    size = f"G={max(GROUP_SIZES_OF_LENGTHS)}: "
    drifts = {line.estimator: drift_of(line) for line in lines if line.estimator.startswith(size)}
    names = list(drifts)[::-1]
    true = S1.drift(S1.policy_gradient)
    colours = ["C0" if abs(drifts[name] - true) < 1e-9 else "C3" for name in names]
    axis.barh(range(len(names)), [drifts[name] for name in names], color=colours)
    axis.axvline(true, color="k", linestyle="--", linewidth=1, label="the true gradient")
    axis.set_yticks(range(len(names)), [name.removeprefix(size) for name in names], fontsize=7)
    axis.set(title=f"how the expected length drifts ({size[:-2]}; blue: as with the true gradient)",
             xlabel="d E[length] along a step of length one")  # fmt: skip
    axis.legend(fontsize=7)
