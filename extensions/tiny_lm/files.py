"""The three files that a training leaves."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import torch

from extensions.tiny_lm.stage import Diagnostics
from extensions.tiny_lm.task import VOCABULARY
from extensions.tiny_lm.training import TrainingRun
from rl_lab import csv_text, json_text, replace_files, software


def without_seconds(history: list[Diagnostics]) -> list[Diagnostics]:
    """The history as its CSV holds it: equal runs write the same bytes."""
    return [{name: value for name, value in row.items() if name != "seconds"} for row in history]


def without_nan(metrics: Diagnostics) -> dict:
    """A row of the history for JSON, which has no NaN; the seconds stand by themselves there."""
    return {name: None if math.isnan(value) else value for name, value in metrics.items() if name != "seconds"}


def without_infinity(fields: dict) -> dict:
    """A row's fields for JSON, which has no infinity: a limit that is not there becomes "inf" or "-inf"."""
    return {name: str(value) if value in (math.inf, -math.inf) else value for name, value in fields.items()}


def run_document(run: TrainingRun, start: TrainingRun) -> dict:
    """What OUTPUT/ALGORITHM.json holds: everything needed to run it again, and how it began and ended.

    `seconds`, the wall clock, is the only entry that differs between equal runs.
    """
    parameters = sum(parameter.numel() for parameter in run.policy.parameters())
    return {
        "algorithm": run.algorithm,
        "verifier": run.verifier,
        "mistake": run.mistake,
        "objective": None if run.row is None else without_infinity(dataclasses.asdict(run.row)),
        "config": dataclasses.asdict(run.settings),
        "supervised_start": {"mistake": start.mistake, "config": dataclasses.asdict(start.settings)},
        "model": {"parameters": parameters, "dtype": str(run.policy.output.weight.dtype), "vocabulary": VOCABULARY},
        "software": {**software(), "threads": torch.get_num_threads()},
        "supervised_metrics": without_nan(start.history[-1]),
        "initial_metrics": without_nan(run.history[0]),
        "final_metrics": without_nan(run.history[-1]),
        "seconds": run.history[-1]["seconds"],
    }


def paths_of(folder: Path, algorithm: str) -> dict[str, Path]:
    """The three files of one training."""
    return {
        "history": folder / f"{algorithm}.csv",
        "document": folder / f"{algorithm}.json",
        "samples": folder / f"{algorithm}-samples.jsonl",
    }


def save(folder: Path, run: TrainingRun, start: TrainingRun) -> None:
    """Write the three files of a training, all or none."""
    paths = paths_of(folder, run.algorithm)
    replace_files(
        {
            paths["history"]: csv_text(without_seconds(run.history)),
            paths["document"]: json_text(run_document(run, start)),
            paths["samples"]: "".join(json.dumps(record, allow_nan=False) + "\n" for record in run.samples),
        }
    )
