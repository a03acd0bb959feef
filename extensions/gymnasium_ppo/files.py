"""What a run says and writes: its summary, ppo.csv, ppo.json, checkpoint.npz; and how a checkpoint is read without running anything in it."""

from __future__ import annotations

import io
import json
import statistics
from pathlib import Path

import numpy as np

from extensions.gymnasium_ppo.environments import import_gymnasium
from extensions.gymnasium_ppo.settings import Run, run_of
from extensions.gymnasium_ppo.training import Trainer, config_of
from extensions.read import read_arrays
from rl_lab import FileProblem, csv_text, format_table, json_text, replace_files, software

CHECKPOINT_FORMAT = 1
"""Raised by one whenever the arrays of Trainer.arrays change their meaning."""

GROWING = {"recent", "actions_taken", "history"}
"""Arrays of a checkpoint whose first axis grows with the run."""


def paths_of(folder: Path) -> dict[str, Path]:
    return {"history": folder / "ppo.csv", "document": folder / "ppo.json", "checkpoint": folder / "checkpoint.npz"}


def run_document(trainer: Trainer, evaluation: dict, sampled: dict) -> dict:
    """What ppo.json holds: everything to run it again, and how it ended. No wall-clock time: equal runs, equal bytes."""
    versions = {**software(), "numpy": np.__version__, "gymnasium": import_gymnasium().__version__}
    return {
        "algorithm": trainer.algorithm,
        "config": config_of(trainer.run),
        "software": versions,
        "parameters": trainer.policy.flat.numel(),
        "final_metrics": {name: value if value == value else None for name, value in trainer.history[-1].items()},
        "evaluation": evaluation,
        "evaluation_sampled": sampled,
    }


def summary(trainer: Trainer, evaluation: dict, sampled: dict) -> str:
    """How the run ended, and what it cost: the text that a command prints."""
    run, last = trainer.run, trainer.history[-1]
    rows = [
        [name, f"{e['mean_return']:.2f}", f"{e['std_return']:.2f}", f"{e['mean_length']:.1f}", str(e["episodes"])]
        for name, e in (("evaluation, deterministic", evaluation), ("evaluation, sampled", sampled))
    ]
    recent = [pair[0] for pair in trainer.recent]
    if recent:
        spread = statistics.pstdev(recent)
        length = f"{last['episode_length']:.1f}"
        rows.append(["last training episodes", f"{last['episode_return']:.2f}", f"{spread:.2f}", length, str(len(recent))])
    lines = [
        f"{run.env}, seed {run.settings.seed}: {last['step']} updates, {last['environment_steps']} steps, "
        f"{last['episodes']} episodes, {last['optimizer_steps']} optimizer steps",
        "",
        format_table(["", "mean return", "std", "length", "episodes"], rows),
    ]
    threshold = import_gymnasium().spec(run.env).reward_threshold
    if threshold is not None:
        verdict = "reached" if evaluation["mean_return"] >= threshold else "not reached"
        lines.append(f"Gymnasium calls the task solved at {threshold:g}: {verdict} by the deterministic policy.")
    unfinished = evaluation["unfinished"] + sampled["unfinished"]
    if unfinished:
        lines.append(f"{unfinished} evaluation episodes did not end and were given up: their returns are partial.")
    return "\n".join(lines)


def checkpoint_bytes(trainer: Trainer) -> bytes:
    """The state of a run as an .npz file: arrays of numbers only, the settings as JSON text."""
    header = json.dumps({"format": CHECKPOINT_FORMAT, "config": config_of(trainer.run)}).encode()
    buffer = io.BytesIO()
    np.savez(buffer, header=np.frombuffer(header, dtype=np.uint8), **trainer.arrays())
    return buffer.getvalue()


def save_checkpoint(folder: Path, trainer: Trainer) -> None:
    replace_files({paths_of(folder)["checkpoint"]: checkpoint_bytes(trainer)})


def save_results(folder: Path, trainer: Trainer, evaluation: dict, sampled: dict) -> None:
    """All three files of a finished run, all or none."""
    paths = paths_of(folder)
    replace_files(
        {
            paths["history"]: csv_text(trainer.history),
            paths["document"]: json_text(run_document(trainer, evaluation, sampled)),
            paths["checkpoint"]: checkpoint_bytes(trainer),
        }
    )


def read_checkpoint(folder: Path) -> tuple[Run, dict[str, np.ndarray]]:
    """The run that a checkpoint belongs to, and its arrays. Raises FileProblem; nothing in the file is executed."""
    path = paths_of(folder)["checkpoint"]
    try:
        if not path.exists():
            raise FileProblem(f"{path}: there is no checkpoint to resume; run without --resume first")
        arrays = {name: np.array(value) for name, value in read_arrays(path).items()}  # copies that may be written to
        header = json.loads(arrays.pop("header").tobytes())
        if header["format"] != CHECKPOINT_FORMAT:
            raise FileProblem(f"{path}: has format {header['format']}, wanted {CHECKPOINT_FORMAT}; it is of another version")
        return run_of(**header["config"]), arrays
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as problem:
        raise FileProblem(f"{path}: is no checkpoint of this command ({str(problem) or type(problem).__name__})") from problem


def restored(folder: Path, env: str | None = None) -> Trainer:
    """A trainer that goes on where the checkpoint in `folder` was written. Raises FileProblem.

    env: the environment that the caller expects. An id of the form module:id makes Gymnasium import that module; the file
    alone may not ask for that.
    """
    run, arrays = read_checkpoint(folder)
    path = paths_of(folder)["checkpoint"]
    if env not in (None, run.env):
        raise FileProblem(f"{path}: is of {run.env}, not of {env}")
    if ":" in run.env and env is None:
        raise FileProblem(f"{path}: its environment {run.env} names a module to import; give --env, too, if you trust it")
    try:
        trainer = Trainer(run)
        for name, fresh in trainer.arrays().items():
            if name not in arrays:
                raise ValueError(f"{name} is missing")
            saved, skip = arrays[name], int(name in GROWING)
            if saved.dtype.kind not in "fiub" or not np.isfinite(saved[..., :0] if name == "history" else saved).all():
                raise ValueError(f"{name} holds something else than finite numbers")
            if name != "actions_taken" and (saved.shape[skip:] != fresh.shape[skip:] or saved.ndim != fresh.ndim):
                raise ValueError(f"{name} has shape {saved.shape}, wanted {fresh.shape}")
        if len(arrays["actions_taken"]) != len(arrays["history"]) * run.settings.rollout_rows:
            raise ValueError("the actions taken do not match the history")
        trainer.restore(arrays)
    except (ValueError, RuntimeError, AssertionError, TypeError, IndexError) as problem:
        raise FileProblem(f"{path}: cannot be resumed ({problem})") from problem
    return trainer
