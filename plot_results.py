"""Draw the lab's figures: training curves from CSV files, or the shapes of the atoms. Trains nothing.

`--input DIR ...` reads every CSV in each folder, by column name; one that is not a result of this lab is refused. Several
folders are overlaid and labelled by folder; a folder with `seed-N/` inside becomes a median and a 5-95 % band. `--atoms`
draws four formulas.
This file imports nothing of the lab: a figure can be redrawn wherever the CSV files are.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import os
import sys
from pathlib import Path
from typing import NamedTuple, Sequence

try:
    import numpy as np
except KeyboardInterrupt:
    print("interrupted: no figure was changed", file=sys.stderr)
    sys.exit(130)
except ModuleNotFoundError as problem:
    if __name__ != "__main__" or problem.name != "numpy":
        raise
    sys.exit("plot_results.py: error: numpy is not installed for this Python; python -m pip install -r requirements.txt")

FORMATS = (".svg", ".png", ".pdf")

# ------------------------------------------------------------------------------------------ what is drawn

X_LABEL_OF_SEVERAL_METHODS = "each method's own iteration (not an equal budget)"

# One kind of run per key: the column that tells it apart, and its panels in order. A panel whose column no run has is left
# out.
PANELS = {
    "bandit": {
        "expected_reward": "expected reward",
        "optimal_action_probability": "probability of the best action",
        "entropy": "entropy (nats)",
        "kl_old_current": "KL(old || current) (nats)",
        "kl_current_reference": "KL(current || reference) (nats)",
        "zero_group_fraction": "share of groups without reward difference",
        "dpo_training_loss": "DPO loss on the training labels",
        "dpo_original_loss": "DPO loss on the original labels",
    },
    "chain": {
        "expected_return": "expected return",
        "probability_state_1": "probability of state 1 at the start",
        "value_start": "critic: value of the start",
        "kl_old_current": "KL(old || current) (nats)",
    },
    "language model": {
        "sampled_accuracy": "sampled held-out accuracy",
        "greedy_accuracy": "greedy held-out accuracy",
        "reward": "reward",
        "kl_current_reference": "KL(current || reference) (nats)",
        "kl_old_current": "KL(old || current) (nats)",
        "entropy": "entropy (nats)",
        "response_length": "response length (tokens)",
        "truncated_fraction": "share of truncated responses",
    },
}

# Row 0 of these columns is a placeholder, not a measurement.
MEASURED_FROM_STEP_1 = {"zero_group_fraction"}


class PlotProblem(Exception):
    """An input that cannot be read or an output that cannot be written: one line, exit 1."""


class Curves(NamedTuple):
    """One method in one folder: columns [runs, steps]; more than one run where the folder holds several seeds."""

    kind: str
    method: str
    folder: str
    columns: dict[str, np.ndarray]


# ------------------------------------------------------------------------------------------ reading


def read_csv(path: Path) -> dict[str, np.ndarray]:
    """The numeric columns of one CSV by name. Raises PlotProblem naming the file, the line and the column."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
            names = reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise PlotProblem(f"{path}: cannot be read as CSV ({problem})") from problem
    if "step" not in names or not rows:
        raise PlotProblem(f"{path}: wanted a header with a column `step` and at least one row")
    if len(set(names)) < len(names):
        raise PlotProblem(f"{path}: the header names a column twice")
    for line, row in enumerate(rows, start=2):
        if None in row:
            raise PlotProblem(f"{path}: line {line} has more cells than the header")
    columns = {}
    for name in names:
        try:
            columns[name] = np.array([float(row[name]) for row in rows])
        except (TypeError, ValueError):
            line = next(i for i, row in enumerate(rows, start=2) if not _is_number(row[name]))
            raise PlotProblem(f"{path}: line {line}, column {name}: got {rows[line - 2][name]!r}, wanted a number") from None
    return columns


def _is_number(text: str | None) -> bool:
    try:
        float(text)
    except (TypeError, ValueError):
        return False
    return True


def read_folder(folder: Path) -> list[Curves]:
    """Every method's curves in a folder, or across its `seed-N/` subfolders where it has any."""
    if not folder.is_dir():
        raise PlotProblem(f"{folder}: is not a folder; run rl_lab.py or ppo_chain.py with --output {folder} first")
    seeds = sorted(path for path in folder.glob("seed-*") if path.is_dir())
    runs_of_method: dict[str, list[dict[str, np.ndarray]]] = {}
    for run in seeds or [folder]:
        for path in sorted(run.glob("*.csv")):
            runs_of_method.setdefault(path.stem, []).append(read_csv(path))
    if not runs_of_method:
        raise PlotProblem(f"{folder}: holds no CSV file; run rl_lab.py or ppo_chain.py with --output {folder} first")
    return [stack_runs(method, str(folder), runs) for method, runs in runs_of_method.items()]


def stack_runs(method: str, folder: str, runs: Sequence[dict[str, np.ndarray]]) -> Curves:
    """Several runs of one method as columns [runs, steps]. Raises PlotProblem when they do not line up."""
    first = runs[0]
    for run in runs:
        if run.keys() != first.keys() or not np.array_equal(run["step"], first["step"]):
            raise PlotProblem(
                f"{folder}: the seeds of {method} differ in steps or columns; run them all with the same settings"
            )
    kind = next((kind for kind, panels in PANELS.items() if next(iter(panels)) in first), None)
    if kind is None:
        known = ", ".join(next(iter(panels)) for panels in PANELS.values())
        raise PlotProblem(f"{folder}/{method}.csv: has none of the columns {known}; it is not a result of this lab")
    columns = {name: np.stack([run[name] for run in runs]) for name in first}
    for name in ("step", *PANELS[kind]):
        if np.isinf(columns.get(name, 0)).any():  # NaN, a number that was not measured, leaves a gap
            raise PlotProblem(f"{folder}/{method}.csv: column {name} holds an infinite number, which cannot be drawn")
    return Curves(kind, method, folder, columns)


# ------------------------------------------------------------------------------------------ formulas of the atoms

# The same formulas as in rl_lab.py, in NumPy; a test holds them together.


def clipped_surrogate(ratio: np.ndarray, advantage: float, epsilon: float = 0.2) -> np.ndarray:
    """min(rho A, clip(rho, 1 - epsilon, 1 + epsilon) A)."""
    return np.minimum(ratio * advantage, np.clip(ratio, 1 - epsilon, 1 + epsilon) * advantage)


def kl_statistics(policy: np.ndarray, reference: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Mean and standard deviation of k1, k2, k3 for one sample of the policy. policy [..., A], reference [A] -> [...]."""
    d = np.log(policy) - np.log(reference)
    estimates = {"k1": d, "k2": d**2 / 2, "k3": np.expm1(-d) + d}
    statistics = {}
    for name, estimate in estimates.items():
        mean = (policy * estimate).sum(axis=-1)
        variance = (policy * (estimate - mean[..., None]) ** 2).sum(axis=-1)
        statistics[name] = (mean, np.sqrt(variance))
    return statistics


def exact_kl(policy: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """KL(policy || reference) = sum_a p_a (log p_a - log q_a). policy [..., A], reference [A] -> [...]."""
    return (policy * (np.log(policy) - np.log(reference))).sum(axis=-1)


def gae_weights(lam: float, steps: int, gamma: float = 1.0) -> np.ndarray:
    """Weight (gamma lam)^l of the residual l steps ahead, l = 0 .. steps - 1."""
    return (gamma * lam) ** np.arange(steps)


def equal_group_probability(success: np.ndarray, group_size: int) -> np.ndarray:
    """p^G + (1 - p)^G: chance that G independent binary rewards are all equal."""
    return success**group_size + (1 - success) ** group_size


# ------------------------------------------------------------------------------------------ drawing


def new_figure(panels: int, columns: int = 4, panel_size: tuple[float, float] = (4.2, 3.2)):
    """An empty figure with a grid of that many axes (inches each), and the axes in reading order."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as problem:
        raise PlotProblem("matplotlib is not installed; python -m pip install -r requirements.txt brings it") from problem
    columns = min(columns, panels)
    rows = -(-panels // columns)
    width, height = panel_size
    figure = Figure(figsize=(width * columns, height * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for unused in axes[panels:]:
        unused.set_axis_off()
    return figure, axes[:panels]


def draw_curves(curves: Sequence[Curves]):
    """Training curves: one panel per metric, one line per method and folder, a band where there are several seeds."""
    panels = [
        (kind, column, title)
        for kind, titles in PANELS.items()
        for column, title in titles.items()
        if any(c.kind == kind and column in c.columns for c in curves)
    ]
    figure, axes = new_figure(len(panels))
    kinds = {c.kind for c in curves}
    several_folders = len({c.folder for c in curves}) > 1
    several_methods = len({c.method for c in curves}) > 1
    for axis, (kind, column, title) in zip(axes, panels):
        for number, c in enumerate(curves):
            if c.kind != kind or column not in c.columns:
                continue
            first = 1 if column in MEASURED_FROM_STEP_1 and len(c.columns["step"][0]) > 1 else 0
            steps, values = c.columns["step"][0, first:], c.columns[column][:, first:]
            low, median, high = np.quantile(values, (0.05, 0.5, 0.95), axis=0)
            label = " ".join([c.method] * (several_methods or not several_folders) + [c.folder] * several_folders)
            label += f" (median of {len(values)} seeds)" * (len(values) > 1)
            style = dict(color=f"C{number % 10}", linestyle=("-", "--", ":")[number // 10 % 3])
            # Earlier lines are thicker, so that one that lies under another still shows.
            axis.plot(steps, median, label=label, linewidth=1.2 + 2.4 * (1 - (number + 1) / len(curves)), **style)
            if len(values) > 1:
                axis.fill_between(steps, low, high, color=style["color"], alpha=0.2, linewidth=0)
        axis.set_title(f"{kind}: {title}" if len(kinds) > 1 else title, fontsize=10)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=8)
    handles = {}
    for axis in axes:
        handles.update(zip(*reversed(axis.get_legend_handles_labels())))
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=min(4, len(handles)), fontsize=9)
    x_label = X_LABEL_OF_SEVERAL_METHODS if several_methods else "iteration"
    has_bands = any(len(c.columns["step"]) > 1 for c in curves)
    figure.supxlabel(x_label + "; band: 5-95 % of the seeds" * has_bands, fontsize=10)
    return figure


def draw_atoms():
    """Four formulas: clipped surrogate, KL estimates, GAE weights, chance of a group without spread."""
    figure, (surrogate, kl, gae, groups) = new_figure(4, columns=2, panel_size=(5.6, 4.2))

    ratio = np.linspace(0, 2, 401)
    for advantage in (1.0, -1.0):
        surrogate.plot(ratio, clipped_surrogate(ratio, advantage), label=f"A = {advantage:+.0f}")
        surrogate.plot(ratio, ratio * advantage, color="grey", linewidth=0.8, linestyle=":")
    surrogate.axvspan(0.8, 1.2, color="grey", alpha=0.15, linewidth=0)
    surrogate.set(
        title="clipped surrogate, epsilon 0.2 (dotted: rho A)", xlabel="ratio rho", ylabel="min(rho A, clip(rho) A)"
    )

    p = np.linspace(0.01, 0.99, 197)
    policy, reference = np.stack([p, 1 - p], axis=-1), np.array([0.3, 0.7])
    kl.plot(p, exact_kl(policy, reference), color="black", linewidth=4, alpha=0.3, label="exact KL(policy || reference)")
    for (name, (mean, spread)), style in zip(kl_statistics(policy, reference).items(), ("--", "-.", ":")):
        (line,) = kl.plot(p, mean, linestyle=style, label=f"mean of {name}")
        kl.plot(p, spread, color=line.get_color(), linewidth=0.8, alpha=0.7)
    kl.set(
        title="KL estimates, reference (0.3, 0.7); thin: std of one sample",
        xlabel="policy's probability of action 0", ylabel="nats", ylim=(-0.05, 1.6),
    )  # fmt: skip

    for lam, marker in ((0.0, "o"), (0.95, "s"), (1.0, "^")):
        gae.plot(np.arange(40), gae_weights(lam, 40), marker=marker, markersize=3, linewidth=0.8, label=f"lambda {lam:g}")
    gae.set(title="GAE: weight of later residuals, gamma 1", xlabel="steps ahead l", ylabel="(gamma lambda)^l")

    p = np.linspace(0, 1, 401)
    for size in (2, 4, 8, 16):
        groups.plot(p, equal_group_probability(p, size), label=f"G = {size}")
    groups.set(title="chance that a group's rewards are all equal", xlabel="success probability p", ylabel="p^G + (1 - p)^G")

    for axis in (surrogate, kl, gae, groups):
        axis.title.set_fontsize(10.5)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=9)
    return figure


def save(figure, path: Path) -> None:
    """Write the figure whole or not at all; the same data give the same bytes. Raises PlotProblem."""
    import matplotlib

    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}[path.suffix.lower()]
    drawn = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "rl_lab"}):
        figure.savefig(drawn, format=path.suffix.lower()[1:], metadata=undated, dpi=130)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if path.exists() and not path.is_file():
            raise PlotProblem(f"{path}: exists and is not a regular file; choose another --output")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(drawn.getvalue())
        os.replace(partial, path.resolve())
    except OSError as problem:
        raise PlotProblem(f"{path}: cannot be written ({problem.strerror})") from problem
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------ command line

EXAMPLES = """\
examples:
  python -B plot_results.py --input results --output training-curves.svg
  python -B plot_results.py --input results-grpo-g2 results-grpo-g16 --output group-sizes.png
  python -B plot_results.py --input results-chain --output chain.svg
  python -B plot_results.py --atoms --output atoms.svg"""


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


def figure_path(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in FORMATS:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a file name ending in {', '.join(FORMATS)}")
    return path


def main(argv: Sequence[str] | None = None) -> None:
    parser = OneLineParser(
        description="Draw training curves from the CSV files of one or several runs, or the shapes of the atoms.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", type=Path, nargs="+", metavar="DIR", help="folders written by --output of a training")
    source.add_argument("--atoms", action="store_true", help="draw the formulas instead of results")
    parser.add_argument(
        "--output", type=figure_path, required=True, metavar="FILE", help="figure to write: .svg, .png or .pdf"
    )
    arguments = parser.parse_args(argv)
    if arguments.atoms:
        figure = draw_atoms()
    else:
        figure = draw_curves([curves for folder in dict.fromkeys(arguments.input) for curves in read_folder(folder)])
    save(figure, arguments.output)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    try:
        main()
        if sys.stdout is not None:
            sys.stdout.flush()
    except PlotProblem as problem:
        sys.exit(f"plot_results.py: error: {problem}")
    except OSError as problem:  # nobody reads the output, or a full disk behind `> file`; the figure is written by then
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(f"plot_results.py: error: cannot print ({problem.strerror})")
    except KeyboardInterrupt:
        print("interrupted: no figure was changed", file=sys.stderr)
        sys.exit(130)
