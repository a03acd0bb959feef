"""Draw the lab's figures: training curves from CSV files, or the shapes of the atoms. Trains nothing.

`--input DIR ...` reads every CSV in each folder, by column name; one that is not a result of this lab is refused. Each method
has one colour in every figure. Several folders are overlaid, a line style each, and labelled by the settings that differ (read
from the JSON beside the CSV); a folder with `seed-N/` inside becomes a median and a 5-95 % band. `--atoms` draws six formulas.
This file imports nothing of the lab: a figure can be redrawn wherever the files are. To add a panel, add an entry to PANELS.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import csv
import io
import itertools
import json
import math
import os
import signal
import stat
import sys
import warnings
from pathlib import Path
from typing import NamedTuple, Sequence


def end_before_the_start(number: int, frame: object) -> None:
    """What Ctrl-C and SIGTERM do while the imports, most of a short run, are going on: end it with one line."""
    os.write(2, b"interrupted: no figure was changed\n")
    os._exit(128 + number)


if __name__ == "__main__":
    for _number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(_number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(_number, end_before_the_start)

try:
    import numpy as np
except ModuleNotFoundError as problem:
    if __name__ != "__main__" or problem.name != "numpy":
        raise
    sys.exit("plot_results.py: error: numpy is not installed for this Python; python -m pip install -r requirements.txt")

FORMATS = (".svg", ".png", ".pdf")
LARGEST_FILE = 2**26  # bytes: the longest run that the lab offers writes about 20 MB
LARGEST_NUMBER = 1e15  # beyond it an axis has no ticks left

# ------------------------------------------------------------------------------------------ what is drawn

X_LABEL_OF_SEVERAL_METHODS = "each method's own iteration (not an equal budget)"

# --x: what stands on the horizontal axis -> its label and the column that holds it, whatever the kind of run calls it.
X_AXES = {
    "iterations": ("iteration", ("step",)),
    "samples": ("actions or answers sampled", ("sampled_actions", "samples", "environment_steps")),
    "updates": ("optimizer updates", ("optimizer_steps",)),
    "pairs": ("preference pairs used", ("pair_presentations", "pairs")),
}

# Method -> colour, in the order in which methods are drawn and listed. Others follow with the colours that are left.
COLOURS = {"ppo": "C0", "ppo_chain": "C0", "dpo": "C1", "grpo": "C2", "rloo": "C3", "online-dpo": "C4", "sft": "C7"}
OTHER_COLOURS = ("C5", "C6", "C8", "C9")
LINE_STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 3)))  # one per folder

# What a setting is called in a label; others keep their own name.
SHORT_NAMES = {"gae_lambda": "lambda", "group_size": "G", "online_batch_prompts": "prompts", "preference_flips": "flips"}


class Panel(NamedTuple):
    """One panel: the columns that it draws (the second dotted), against the common x axis or a column of their own."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[str, ...] = ()  # reference lines by name, see reference_values
    gap: bool = False  # draw best - value on a logarithmic axis: curves that meet at the best stay apart
    error_of: str = ""  # draw the column minus this one
    x: str = ""
    measured_from: int = 0  # 1: row 0 of the column is a placeholder, not a measurement
    without: tuple[str, ...] = ()  # methods that would squeeze the others flat
    unlike: str = ""  # the panel is left out where its column equals this one in every run


UPDATES = (
    Panel("gradient norm before clipping", ("gradient_norm",), measured_from=1),
    Panel("clip fraction (ratios outside the band)", ("clip_fraction",), measured_from=1),
    Panel("critic: mean squared error", ("value_loss",), measured_from=1),
    Panel("share of groups without reward difference", ("zero_group_fraction",), measured_from=1),
)
KL_TO_REFERENCE, KL_TO_OLD = "KL(current || reference) (nats)", "KL(old || current) (nats)"

# One kind of run per key: the first column of its first panel tells it apart. A panel whose column no run has is left out.
PANELS = {
    "bandit": (
        Panel("expected reward", ("expected_reward",), ("best", "uniform", "worst")),
        Panel("best - expected reward (log axis)", ("expected_reward",), gap=True),
        Panel("probability of the best action", ("optimal_action_probability",), ("one action of all",)),
        Panel("entropy (nats)", ("entropy",), ("log actions",)),
        Panel(KL_TO_OLD, ("kl_old_current",), ("KL stop",)),
        Panel(KL_TO_REFERENCE, ("kl_current_reference",), ("log actions",)),
        Panel("expected reward against " + KL_TO_REFERENCE, ("expected_reward",), ("best",), x="kl_current_reference"),
        *UPDATES,
        Panel("DPO loss on the training labels", ("dpo_training_loss",), ("log 2",)),
        Panel("DPO loss on the original labels", ("dpo_original_loss",), ("log 2",), unlike="dpo_training_loss"),
    ),
    "chain": (
        Panel("expected return", ("expected_return",), ("best", "uniform")),
        Panel("best - expected return (log axis)", ("expected_return",), gap=True),
        Panel("probability of state 1 at the start", ("probability_state_1",)),
        Panel("critic: value of the start", ("value_start",), ("best",)),
        Panel("critic's error at the start: V(0) - J", ("value_start",), ("zero",), error_of="expected_return"),
        Panel("entropy (nats)", ("entropy",), ("log actions",)),
        Panel(KL_TO_OLD, ("kl_old_current",), ("KL stop",)),
        *UPDATES,
    ),
    "language model": (
        Panel("exact held-out accuracy, sampled; dotted: what the verifier pays", ("sampled_accuracy", "reward")),
        Panel("greedy held-out accuracy", ("greedy_accuracy",)),
        Panel(KL_TO_REFERENCE, ("kl_current_reference",), without=("sft",)),
        Panel(
            "sampled accuracy against " + KL_TO_REFERENCE, ("sampled_accuracy",), x="kl_current_reference", without=("sft",)
        ),
        Panel(KL_TO_OLD, ("kl_old_current",), without=("sft",)),
        Panel("entropy (nats)", ("entropy",)),
        Panel("response length (tokens)", ("response_length",)),
        Panel("share of truncated responses", ("truncated_fraction",)),
        *UPDATES,
    ),
    "environment": (
        Panel("episode return while training (last 100 episodes)", ("episode_return",)),
        Panel("episode length (steps)", ("episode_length",)),
        Panel("critic: explained variance", ("explained_variance",)),
        Panel("entropy (nats)", ("entropy",)),
        Panel(KL_TO_OLD, ("kl_old_current",)),
        Panel("learning rate", ("learning_rate",)),
        *UPDATES,
    ),
}


class PlotProblem(Exception):
    """An input that cannot be read or an output that cannot be written: one line, exit 1."""


class Curves(NamedTuple):
    """One method in one folder: columns [runs, steps]; more than one run where the folder holds several seeds."""

    kind: str
    method: str
    folder: str
    columns: dict[str, np.ndarray]
    settings: dict = {}  # `config` of the JSON beside the CSV, with `reward_table`; seeds as a list; empty without a JSON


# ------------------------------------------------------------------------------------------ reading


def printable(text: object) -> str:
    """A name on one line whatever it holds: no line break, nothing that a terminal or a font takes as a command."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


def read_regular_file(path: Path) -> str:
    """The text of a regular file of bounded size. Raises PlotProblem: a pipe or a device could be read without end."""
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise PlotProblem(f"{printable(path)}: is not a regular file")
            if status.st_size > LARGEST_FILE:
                raise PlotProblem(f"{printable(path)}: has {status.st_size} bytes, wanted at most {LARGEST_FILE}")
            return file.read(LARGEST_FILE).decode("utf-8")
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise PlotProblem(f"{printable(path)}: cannot be read as text ({reason})") from problem


def read_csv(path: Path) -> dict[str, np.ndarray]:
    """The numeric columns of one CSV by name. Raises PlotProblem naming the file, the line and the column."""
    where = printable(path)
    try:
        rows = filter(None, csv.reader(io.StringIO(read_regular_file(path), newline="")))  # no empty lines
        names = next(rows, [])
        if "step" in names and len(set(names)) < len(names):
            raise PlotProblem(f"{where}: the header names a column twice")
        numbers = array.array("d")  # 8 bytes each: all rows as text would take fifty times the file
        for line, row in enumerate(rows if "step" in names else (), start=2):
            if len(row) > len(names):
                raise PlotProblem(f"{where}: line {line} has more cells than the header")
            for name, cell in itertools.zip_longest(names, row):
                try:
                    numbers.append(float(cell))
                except (TypeError, ValueError):
                    column = f"line {line}, column {printable(name)}"
                    raise PlotProblem(f"{where}: {column}: got {cell!r:.80}, wanted a number") from None
    except csv.Error as problem:
        raise PlotProblem(f"{where}: cannot be read as CSV ({problem})") from problem
    if not numbers:
        raise PlotProblem(f"{where}: wanted a header with a column `step` and at least one row")
    table = np.frombuffer(numbers).reshape(-1, len(names))
    return {name: np.ascontiguousarray(table[:, number]) for number, name in enumerate(names)}


def read_settings(path: Path) -> dict:
    """`config` of a run's JSON with its reward table; empty where there is none: a figure needs the CSV only."""
    try:
        run = json.loads(read_regular_file(path))
        settings = dict(run["config"])
    except (PlotProblem, ValueError, TypeError, KeyError, RecursionError):
        return {}
    # What reference lines are drawn from must be numbers that an axis can show; what is not gives no line.
    for name, source, axes in (("reward_table", run, 2), ("kl_stop", settings, 0)):
        value = source.get(name)
        settings.pop(name, None)
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            numbers = np.asarray(value, dtype=float)
            if numbers.ndim == axes and numbers.size and (np.abs(numbers) <= LARGEST_NUMBER).all():
                settings[name] = value
    return settings


def read_folder(folder: Path) -> list[Curves]:
    """Every method's curves in a folder, or across its `seed-N/` subfolders where it has any."""
    if not folder.is_dir():
        name = printable(folder)
        raise PlotProblem(f"{name}: is not a folder; run rl_lab.py or ppo_chain.py with --output {name} first")
    seeds = sorted(path for path in folder.glob("seed-*") if path.is_dir())
    runs_of_method: dict[str, list[tuple[dict[str, np.ndarray], dict]]] = {}
    for run in seeds or [folder]:
        for path in sorted(run.glob("*.csv")):
            runs_of_method.setdefault(path.stem, []).append((read_csv(path), read_settings(path.with_suffix(".json"))))
    if not runs_of_method:
        name = printable(folder)
        raise PlotProblem(f"{name}: holds no CSV file; run rl_lab.py or ppo_chain.py with --output {name} first")
    curves = []
    for method, runs in runs_of_method.items():
        settings = dict(runs[0][1])
        if settings:
            settings["seed"] = [one.get("seed") for _, one in runs]
        stacked = stack_runs(method, printable(folder), [columns for columns, _ in runs])
        curves.append(stacked._replace(folder=str(folder), settings=settings))
    return curves


def stack_runs(method: str, folder: str, runs: Sequence[dict[str, np.ndarray]]) -> Curves:
    """Several runs of one method as columns [runs, steps]. Raises PlotProblem when they do not line up."""
    first = runs[0]
    for run in runs:
        if run.keys() != first.keys() or not np.array_equal(run["step"], first["step"]):
            raise PlotProblem(
                f"{folder}: the seeds of {method} differ in steps or columns; run them all with the same settings"
            )
    kind = next((kind for kind, panels in PANELS.items() if panels[0].columns[0] in first), None)
    if kind is None:
        known = ", ".join(panels[0].columns[0] for panels in PANELS.values())
        raise PlotProblem(f"{folder}/{method}.csv: has none of the columns {known}; it is not a result of this lab")
    columns = {name: np.stack([run[name] for run in runs]) for name in first}
    drawn = {name for panel in PANELS[kind] for name in (*panel.columns, panel.x, panel.error_of)}
    for name in (*drawn, *(name for _, names in X_AXES.values() for name in names)):
        if np.isinf(columns.get(name, 0)).any():  # NaN, a number that was not measured, leaves a gap
            raise PlotProblem(f"{folder}/{method}.csv: column {name} holds an infinite number, which cannot be drawn")
        if (np.abs(columns.get(name, 0)) > LARGEST_NUMBER).any():
            raise PlotProblem(
                f"{folder}/{method}.csv: column {name} holds a number above {LARGEST_NUMBER:g}: cannot be drawn"
            )
    return Curves(kind, method, folder, columns)


# ------------------------------------------------------------------------------------------ labels


def folder_names(folders: Sequence[str]) -> dict[str, str]:
    """Each folder by the shortest tail of its path that tells it from the others: a figure shows nobody's directories."""
    names = {}
    for folder in folders:
        parts = Path(folder).resolve().parts
        tails = [Path(other).resolve().parts for other in folders if other != folder]
        length = next((n for n in range(1, len(parts)) if all(parts[-n:] != tail[-n:] for tail in tails)), len(parts))
        names[folder] = printable(os.path.join(*parts[-length:])) if parts else folder
    return names


def differing_settings(curves: Sequence[Curves]) -> dict[str, str]:
    """Folder -> the settings that tell it from the other folders, as "G 4, prompts 32"; empty where none are recorded."""
    by_folder = {c.folder: {key: value for key, value in c.settings.items() if key != "reward_table"} for c in curves}
    if len(by_folder) < 2 or not all(by_folder.values()):
        return {}
    keys = dict.fromkeys(key for settings in by_folder.values() for key in settings)
    values = {key: [settings.get(key) for settings in by_folder.values()] for key in keys}
    differ = [key for key in keys if any(value != values[key][0] for value in values[key])]
    labels = {
        folder: ", ".join(f"{SHORT_NAMES.get(key, key)} {shown(settings.get(key))}" for key in differ)
        for folder, settings in by_folder.items()
    }
    return labels if len(set(labels.values())) == len(labels) else {}


def shown(value: object) -> str:
    """A setting in a label: whole ranges of seeds as 0-19."""
    if isinstance(value, list):
        whole = sorted(v for v in value if isinstance(v, int))
        if len(whole) > 1 and len(whole) == len(value) == whole[-1] - whole[0] + 1:
            return f"{whole[0]}-{whole[-1]}"
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else printable(value)


def in_order(curves: Sequence[Curves]) -> list[Curves]:
    """ppo, dpo, grpo, then the others as they came."""
    order = list(COLOURS)
    return sorted(curves, key=lambda c: order.index(c.method) if c.method in order else len(order))


def styles_of(curves: Sequence[Curves]) -> list[dict]:
    """A colour per method, a line style per folder; where one method stands alone the folders also run from light to dark."""
    from matplotlib.colors import to_rgb

    folders = list(dict.fromkeys(c.folder for c in curves))
    others = [method for method in dict.fromkeys(c.method for c in curves) if method not in COLOURS]
    alone = len({c.method for c in curves}) == 1 and len(folders) > 1
    styles = []
    for c in curves:
        number = folders.index(c.folder)
        base = COLOURS.get(c.method) or OTHER_COLOURS[others.index(c.method) % len(OTHER_COLOURS)]
        colour = np.array(to_rgb(base))
        if alone:
            place = number / (len(folders) - 1)
            colour = colour + (1 - colour) * 0.55 * (1 - place) if place < 0.5 else colour * (1 - 0.9 * (place - 0.5))
        styles.append(dict(color=tuple(colour), linestyle=LINE_STYLES[number % len(LINE_STYLES)], linewidth=1.8))
    return styles


def label_of(c: Curves, curves: Sequence[Curves]) -> str:
    """Method, then the settings (or the folder) where several are drawn, then how many seeds."""
    several_folders = len({one.folder for one in curves}) > 1
    several_methods = len({one.method for one in curves}) > 1
    names = differing_settings(curves) or folder_names(list(dict.fromkeys(one.folder for one in curves)))
    words = [c.method] * (several_methods or not several_folders) + [names.get(c.folder, c.folder)] * several_folders
    label = " ".join(words).replace("$", r"\$")
    runs = len(c.columns["step"])
    if runs == 1:
        return label
    same = all(np.array_equal(column, column[:1].repeat(runs, 0), equal_nan=True) for column in c.columns.values())
    return label + (f" ({runs} seeds, all the same: nothing is sampled)" if same else f" (median of {runs} seeds)")


def provenance(curves: Sequence[Curves]) -> str:
    """Seed and length of what is drawn, in small print."""
    seeds = dict.fromkeys(shown(c.settings["seed"]) for c in curves if c.settings.get("seed"))
    steps = dict.fromkeys(f"{c.columns['step'].max():g}" for c in curves)
    return ("seed " + "; ".join(seeds) + ", " if seeds else "") + "steps " + ", ".join(steps)


def reference_values(c: Curves) -> dict[str, tuple[float, str]]:
    """Name -> height and text of the reference lines that the settings of a run give."""
    values = {"log 2": (math.log(2), "log 2: no preference yet"), "zero": (0.0, "")}
    if "kl_stop" in c.settings:
        values["KL stop"] = (float(c.settings["kl_stop"]), "KL stop")
    if "reward_table" in c.settings:
        table = np.asarray(c.settings["reward_table"], dtype=float)
        best = table.max() if c.kind == "chain" else table.max(axis=1).mean()
        actions = table.shape[1]
        values["best"] = (best, f"best {best:.4g}")
        values["worst"] = (table.min(axis=1).mean(), "worst")
        values["uniform"] = (table.mean(), f"uniform {table.mean():.4g}")
        values["log actions"] = (math.log(actions), f"log {actions}")
        values["one action of all"] = (1 / actions, f"1/{actions}")
    return values


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


def dpo_of_margin(margin: np.ndarray, beta: float) -> tuple[np.ndarray, np.ndarray]:
    """-log sigmoid(beta h) and its slope -beta sigmoid(-beta h)."""
    return np.logaddexp(0, -beta * margin), -beta / (1 + np.exp(beta * margin))


def group_advantage_of(right: bool, count: int, group_size: int) -> float:
    """(R - mean) / std of a right (R 1) or wrong (R 0) answer where `count` of the group are right: 0 < count < G."""
    share = count / group_size
    return (right - share) / math.sqrt(share * (1 - share))


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


def x_of(c: Curves, axis: str) -> np.ndarray | None:
    """The column of a run that --x names, from one of its runs; None where it never moves: nothing of that kind was used."""
    name = next((name for name in X_AXES[axis][1] if name in c.columns), None)
    if name is None or (axis != "iterations" and not np.nanmax(c.columns[name]) > 0):
        return None
    return np.median(c.columns[name], axis=0)


def draws(panel: Panel, c: Curves) -> bool:
    """Whether a panel has something to show of a run."""
    needed = {panel.columns[0], panel.x, panel.error_of} - {""}
    return (
        c.method not in panel.without
        and needed <= c.columns.keys()
        and not (panel.gap and "best" not in reference_values(c))
    )


def says_something_new(panel: Panel, c: Curves) -> bool:
    """Whether the column differs from the one that another panel shows already."""
    return not np.array_equal(c.columns[panel.columns[0]], c.columns.get(panel.unlike))


def drawn_values(panel: Panel, c: Curves, column: str) -> np.ndarray:
    """What a panel draws of a column, [runs, steps]."""
    values = c.columns[column]
    if panel.error_of:
        return values - c.columns[panel.error_of]
    if panel.gap:
        gap = reference_values(c)["best"][0] - values
        return np.where(gap > 0, gap, np.nan)
    return values


def draw_panel(
    axis, panel: Panel, curves: Sequence[Curves], styles: Sequence[dict], labels: Sequence[str], x_axis: str
) -> None:
    """One panel: a line for each method and folder, a band where there are several seeds, and the reference lines."""
    heights: list[float] = []
    for c, style, label in zip(curves, styles, labels):
        if not draws(panel, c):
            continue
        first = panel.measured_from if len(c.columns["step"][0]) > 1 else 0
        x = (np.median(c.columns[panel.x], axis=0) if panel.x else x_of(c, x_axis))[first:]
        for column in panel.columns:
            if column not in c.columns:
                continue
            values = drawn_values(panel, c, column)[:, first:]
            middle = np.median(values, axis=0)
            heights += middle[np.isfinite(middle)].tolist()
            own = {"label": label} if column == panel.columns[0] else {"linestyle": ":"}
            sparse = len(x) < 30 and not panel.x  # points far apart are no continuous line
            axis.plot(x, middle, marker="." if sparse else None, **{**style, **own})
            if len(values) > 1 and not panel.x:
                low, high = np.quantile(values, (0.05, 0.95), axis=0)
                axis.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)
    if panel.gap and heights:
        axis.set_yscale("log")
    draw_reference_lines(axis, panel.lines, curves, heights)
    axis.set_title(panel.title, fontsize=10)
    if panel.x:
        axis.set_xlabel(KL_TO_REFERENCE, fontsize=8)
    axis.grid(alpha=0.3)
    axis.tick_params(labelsize=8)


def draw_reference_lines(axis, names: Sequence[str], curves: Sequence[Curves], heights: Sequence[float]) -> None:
    """Thin grey lines with their names, where all runs agree on the height."""
    for name in names:
        values = {reference_values(c).get(name) for c in curves}
        value = values.pop()
        if values or value is None:
            continue
        if name == "worst" and not any(height < reference_values(curves[0])["uniform"][0] - 0.05 for height in heights):
            continue  # nothing comes near it: it would only press the curves together
        axis.axhline(value[0], color="grey", linewidth=0.8, linestyle=(0, (2, 3)))
        place = dict(xy=(0.99, value[0]), xycoords=("axes fraction", "data"), xytext=(0, 1), textcoords="offset points")
        axis.annotate(value[1], **place, ha="right", va="bottom", fontsize=7, color="grey")


def draw_curves(curves: Sequence[Curves], x_axis: str = "iterations"):
    """Training curves: one panel per metric, one line per method and folder, a band where there are several seeds."""
    curves = in_order(curves)
    left_out = [c for c in curves if x_of(c, x_axis) is None]
    curves = [c for c in curves if x_of(c, x_axis) is not None]
    if not curves:
        names = ", ".join(dict.fromkeys(c.method for c in left_out))
        raise PlotProblem(f"--x {x_axis}: {names} used none, so there is nothing to draw; choose another --x")
    panels = [
        (kind, panel)
        for kind, of_kind in PANELS.items()
        for panel in of_kind
        if any(c.kind == kind and draws(panel, c) and says_something_new(panel, c) for c in curves)
    ]
    figure, axes = new_figure(len(panels))
    kinds = {c.kind for c in curves}
    labels, styles = [label_of(c, curves) for c in curves], styles_of(curves)
    for axis, (kind, panel) in zip(axes, panels):
        chosen = [row for row in zip(curves, styles, labels) if row[0].kind == kind]
        draw_panel(axis, panel, *zip(*chosen), x_axis)
        if len(kinds) > 1:
            axis.set_title(f"{kind}: {panel.title}", fontsize=10)
    handles = {}
    for axis in axes:
        handles.update(zip(*reversed(axis.get_legend_handles_labels())))
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=min(4, len(handles)), fontsize=9)
    label = X_AXES[x_axis][0]
    if x_axis == "iterations" and len({c.method for c in curves}) > 1:
        label = X_LABEL_OF_SEVERAL_METHODS
    if any(len(c.columns["step"]) > 1 for c in curves):
        label += "; band: 5-95 % of the seeds"
    if left_out:
        label += f"; not drawn, since it used none: {', '.join(dict.fromkeys(c.method for c in left_out))}"
    figure.supxlabel(label, fontsize=10)
    figure.get_layout_engine().set(rect=(0, 0.02, 1, 0.98))
    figure.text(0.997, 0.004, provenance(curves), ha="right", va="bottom", fontsize=6.5, color="grey")
    return figure


def draw_surrogate(axis) -> None:
    """min(rho A, clip(rho) A) for both signs, with the guide's four points."""
    ratio = np.linspace(0, 2, 401)
    for advantage in (1.0, -1.0):
        (line,) = axis.plot(ratio, clipped_surrogate(ratio, advantage), label=f"A = {advantage:+.0f}")
        unclipped = "rho A, without clip" if advantage > 0 else None
        axis.plot(ratio, ratio * advantage, color="grey", linewidth=0.8, linestyle=":", label=unclipped)
        points = np.array([0.5, 1.5])
        heights = clipped_surrogate(points, advantage)
        axis.plot(
            points, heights, "o", color=line.get_color(), label="guide 4.2: ratios 0.5 and 1.5" if advantage > 0 else None
        )
        for x, y in zip(points, heights):
            axis.annotate(f"{y:g}", (x, y), xytext=(5, 5), textcoords="offset points", fontsize=8)
    axis.axvspan(0.8, 1.2, color="grey", alpha=0.15, linewidth=0, label="band 1 - epsilon to 1 + epsilon")
    axis.set(title="PPO: clipped surrogate, epsilon 0.2", xlabel="ratio rho", ylabel="min(rho A, clip(rho) A)")


def draw_kl(axis) -> None:
    """Mean and spread of the three one-sample estimates beside the exact KL."""
    p = np.linspace(0.01, 0.99, 197)
    policy, reference = np.stack([p, 1 - p], axis=-1), np.array([0.3, 0.7])
    axis.plot(p, exact_kl(policy, reference), color="black", linewidth=4, alpha=0.3, label="exact KL(policy || reference)")
    for (name, (mean, spread)), style in zip(kl_statistics(policy, reference).items(), ("--", "-.", ":")):
        (line,) = axis.plot(p, mean, linestyle=style, label=f"mean of {name}")
        axis.plot(p, spread, color=line.get_color(), linewidth=0.8, alpha=0.7, label=f"std of one {name}")
    axis.set(title="KL estimates, reference (0.3, 0.7)", ylabel="nats", ylim=(-0.05, 1.6))
    axis.set_xlabel("policy's probability of action 0")


def draw_dpo(axis) -> None:
    """-log sigmoid(beta h) and its slope for three betas."""
    margin = np.linspace(-8, 8, 321)
    for beta in (0.1, 0.5, 1.0):
        (line,) = axis.plot(margin, dpo_of_margin(margin, beta)[0], label=f"loss, beta {beta:g}")
        axis.plot(
            margin, dpo_of_margin(margin, beta)[1], color=line.get_color(), linestyle="--", label=f"slope, beta {beta:g}"
        )
    axis.plot(0, math.log(2), "ko", label="at the reference: log 2")
    axis.set(title="DPO: -log sigmoid(beta h) and its slope", xlabel="margin h against the reference", ylim=(-1.1, 4))


def draw_group_advantages(axis) -> None:
    """Advantage of the right and of the wrong answers of a group of eight, by how many are right."""
    size = 8
    for right, marker in ((True, "o"), (False, "v")):
        heights = [group_advantage_of(right, count, size) for count in range(1, size)]
        label = f"{'right' if right else 'wrong'} answer (G {size}; other sizes lie on the same curve)"
        axis.plot(np.arange(1, size) / size, heights, marker=marker, markersize=5, linewidth=0.8, label=label)
    axis.plot([0, 1], [0, 0], "kx", label="all wrong, all right: exactly 0")
    axis.set(title="GRPO: advantage by the share of right answers", xlabel="share of right answers in the group")
    axis.set_ylabel("(R - mean) / std")


def draw_gae(axis) -> None:
    for lam, marker in ((0.0, "o"), (0.95, "s"), (1.0, "^")):
        axis.plot(np.arange(40), gae_weights(lam, 40), marker=marker, markersize=3, linewidth=0.8, label=f"lambda {lam:g}")
    axis.set(title="GAE: weight of later residuals, gamma 1", xlabel="steps ahead l", ylabel="(gamma lambda)^l")


def draw_equal_groups(axis) -> None:
    p = np.linspace(0, 1, 401)
    for size in (2, 4, 8, 16):
        axis.plot(p, equal_group_probability(p, size), label=f"G = {size}")
    axis.set(title="chance that a group's rewards are all equal", xlabel="success probability p", ylabel="p^G + (1 - p)^G")


def draw_atoms():
    """Six formulas, a panel each."""
    draw_each = (draw_surrogate, draw_kl, draw_dpo, draw_group_advantages, draw_gae, draw_equal_groups)
    figure, axes = new_figure(len(draw_each), columns=3, panel_size=(5.4, 4.2))
    for axis, draw in zip(axes, draw_each):
        draw(axis)
        axis.title.set_fontsize(10.5)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    return figure


# The first of these families that is installed draws what DejaVu Sans has no glyph for.
FALLBACK_FONTS = ("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Microsoft YaHei", "PingFang SC", "SimHei")


def rendered(figure, suffix: str) -> tuple[bytes, bool]:
    """The figure as bytes, the same for the same data, and whether every character had a glyph.

    An .svg keeps its text as text: whoever looks at it sees it in a font of their own.
    """
    import matplotlib
    from matplotlib import font_manager

    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}[suffix]
    installed = set(font_manager.get_font_names())
    families = ["DejaVu Sans", *(name for name in FALLBACK_FONTS if name in installed)]
    drawn = io.BytesIO()
    settings = {"svg.hashsalt": "rl_lab", "svg.fonttype": "none", "font.family": families}
    with matplotlib.rc_context(settings), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for text in figure.findobj(matplotlib.text.Text):
            text.set_fontfamily(families)
        figure.savefig(drawn, format=suffix[1:], metadata=undated, dpi=130)
    missing = any("missing from" in str(warning.message) for warning in said)
    return drawn.getvalue(), suffix == ".svg" or not missing


def save(figure, path: Path) -> bool:
    """Write the figure whole or not at all. Returns whether every character had a glyph. Raises PlotProblem."""
    data, every_glyph = rendered(figure, path.suffix.lower())
    try:
        write_whole(Path(os.path.realpath(path)), data)
    except (OSError, RuntimeError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise PlotProblem(f"{printable(path)}: cannot be written ({printable(reason)})") from problem
    return every_glyph


def write_whole(target: Path, data: bytes) -> None:
    """Write a file beside its target, sync it, and rename it; the target keeps its mode. Leaves no partial, no new folder.

    The twin of rl_lab.replace_files for one file. Raises OSError, FileExistsError for a target that cannot be replaced.
    """
    mode = os.stat(target).st_mode if target.exists() or target.is_symlink() else None
    if mode is not None and not stat.S_ISREG(mode):
        raise FileExistsError("exists and is not a regular file; choose another --output")
    if mode is not None and not (mode & 0o222 and os.access(target, os.W_OK)):
        raise FileExistsError("is read-only; make it writable or choose another --output")
    missing = [folder for folder in (target.parent, *target.parent.parents) if not folder.exists()]
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale_partials(target.parent)
        with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, 0o666 if mode is None else 0o600)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            os.chmod(partial, stat.S_IMODE(mode))
        os.replace(partial, target)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        for folder in missing:  # the deepest first; those that now hold the figure stay
            with contextlib.suppress(OSError):
                folder.rmdir()


def remove_stale_partials(folder: Path) -> None:
    """Remove the partial files of processes that are gone. On Windows os.kill(pid, 0) is no question but an order."""
    for path in [] if os.name == "nt" else folder.glob(".*.partial"):
        number = path.name.split(".")[-2]
        if number.isdecimal() and path.is_file() and not path.is_symlink():
            with contextlib.suppress(PermissionError, OverflowError, FileNotFoundError):
                try:
                    os.kill(int(number), 0)
                except ProcessLookupError:
                    path.unlink()


# ------------------------------------------------------------------------------------------ command line

EXAMPLES = """\
examples:
  python -B plot_results.py --input results --output training-curves.svg
  python -B plot_results.py --input results-grpo-g2 results-grpo-g16 --output g.png
  python -B plot_results.py --input results --x samples --output samples.svg
  python -B plot_results.py --input results-chain --output chain.svg
  python -B plot_results.py --atoms --output atoms.svg"""


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {printable(message)} (see --help)\n")

    def _get_values(self, action, arg_strings):
        if arg_strings == ["--"] or (action.nargs is None and arg_strings == []):
            self.error(f"argument {'/'.join(action.option_strings)}: expected one argument")
        return super()._get_values(action, arg_strings)


def figure_path(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in FORMATS:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a file name ending in {', '.join(FORMATS)}")
    return path


def main(argv: Sequence[str] | None = None) -> None:
    parser = OneLineParser(
        description="Draw training curves from the CSV files of one or several runs,\nor the shapes of the atoms.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", type=Path, nargs="+", metavar="DIR", help="folders written by --output of a training")
    source.add_argument("--atoms", action="store_true", help="draw the formulas instead of results")
    parser.add_argument(
        "--x", choices=X_AXES, help="the horizontal axis: each method's own iterations (the default), or what was used up"
    )
    parser.add_argument(
        "--output", type=figure_path, required=True, metavar="FILE", help="figure to write: .svg, .png or .pdf"
    )
    arguments = parser.parse_args(argv)
    if arguments.atoms:
        if arguments.x:
            parser.error("argument --x: not allowed with argument --atoms, which draws no runs")
        figure = draw_atoms()
    else:
        curves = [curves for folder in dict.fromkeys(arguments.input) for curves in read_folder(folder)]
        figure = draw_curves(curves, *[arguments.x] * bool(arguments.x))
    if not save(figure, arguments.output):
        print(
            "note: no installed font has every character of the labels; an .svg leaves them to the viewer", file=sys.stderr
        )
    print(f"wrote {printable(arguments.output)}")


def interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is end_before_the_start:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is end_before_the_start:
        signal.signal(signal.SIGTERM, interrupted)
    try:
        try:
            main()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except PlotProblem as problem:
        sys.exit(f"plot_results.py: error: {problem}")
    except OSError as problem:  # nobody reads the output, or a full disk behind `> file`; the figure is written by then
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        about = f"{printable(problem.filename)}: " if problem.filename else "cannot print: "
        silent = isinstance(problem, BrokenPipeError)
        sys.exit(1 if silent else f"plot_results.py: error: {about}{problem.strerror}")
    except KeyboardInterrupt as signal_number:
        by = " by SIGTERM" if signal_number.args else ""
        print(f"interrupted{by}: no figure was changed", file=sys.stderr)
        sys.exit(143 if signal_number.args else 130)
