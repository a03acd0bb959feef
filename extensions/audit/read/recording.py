"""From named arrays to a Recording: canonical names, dtypes, one layout, shapes checked against each other.

`read_recording(path)` reads a file (extensions.read: nothing is executed, memory stays proportional to the file);
`recording_from(arrays)` takes arrays that are in memory. Names, shapes and ranges are those of extensions.read.names.
Every problem is a rl_lab.FileProblem of one line that says what was found, what was wanted and the likely cause.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from extensions.audit.read.layout import arrange
from extensions.read import read_arrays
from extensions.read.named import named
from extensions.read.names import FIELDS, RANGES
from rl_lab import FileProblem, one_line


@dataclass
class Recording:
    """One recorded batch under canonical names.

    arrays: float64, bool or int64; numbers: single numbers; eps: the spacing of the trainer's own arithmetic at 1, from
    the dtype of what it reported; renamed: name in the file -> canonical; unread: names nothing here reads; remarks:
    what was assumed.
    """

    arrays: dict[str, np.ndarray]
    numbers: dict[str, float]
    eps: float
    renamed: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    low_precision: dict[str, str] = field(default_factory=dict)  # arrays stored below float32
    extras: dict[str, np.ndarray] = field(default_factory=dict)  # arrays under names nothing here reads: a weight may be one

    def __contains__(self, name: str) -> bool:
        return name in self.arrays or name in self.numbers

    def get(self, name: str):
        return self.arrays.get(name)

    def number(self, name: str, default: float | None = None) -> float | None:
        return self.numbers.get(name, default)


def read_recording(path: Path) -> Recording:
    """A recorded batch from .npz, .pt, .safetensors or .jsonl. Raises rl_lab.FileProblem."""
    raw = read_arrays(path)
    try:
        return recording_from(raw)
    except FileProblem as problem:
        raise FileProblem(f"{one_line(path)}: {one_line(problem)}") from problem


# ------------------------------------------------------------------------------------------ names, dtypes, shapes

_EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


def recording_from(raw: dict[str, np.ndarray | torch.Tensor]) -> Recording:
    """Arrays under the names of a trainer -> a Recording: canonical names, float64, bool, int64, shapes checked.

    Raises rl_lab.FileProblem for an array that cannot be what its name says, and for two arrays that claim one role and
    differ.
    """
    read = named(raw)
    check_numbers(read.numbers)
    low = {name: kind for name, kind in read.dtypes.items() if kind in ("float16", "bfloat16")}
    recording = Recording(
        read.arrays, read.numbers, _spacing(read.dtypes), read.renamed, read.unread, read.remarks, low
    )
    arrange(recording)
    for name in read.unread:
        value = raw[name]
        value = value.double().numpy() if isinstance(value, torch.Tensor) and value.is_floating_point() else np.asarray(value)
        if value.dtype.kind == "f":
            recording.extras[name] = value.astype(np.float64)
    return recording


def _spacing(dtypes: dict[str, str]) -> float:
    """The spacing at 1 of the trainer's own arithmetic, at least float32's: the coarsest of what it reported."""
    reported = ("loss", "dloss_dlogps", "logps", "advantages", "loss_mat", "kl", "chosen_logps", "vpreds")
    float32 = _EPS["float32"]
    return max([float32, *(_EPS.get(dtypes[name], float32) for name in reported if name in dtypes)])


def check_numbers(numbers: dict[str, float]) -> None:
    """Raise FileProblem for a setting that no trainer can have."""
    for name, (low, high) in RANGES.items():
        value = numbers.get(name, low)
        if not low <= value <= high or math.isinf(value) and not FIELDS[name].may_be_infinite:
            raise FileProblem(
                f"{name}: got {value:g}, wanted a number from {low:g}" + (f" to {high:g}" if high < 1e11 else "")
            )
