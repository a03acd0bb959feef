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
from extensions.read.limits import one_line
from extensions.read.names import (
    CANONICAL,
    FIELDS,
    FLAGS,
    MAY_BE_TEXT,
    NOT_NEEDED,
    NUMBERS,
    RANGES,
    SETTINGS,
    WHOLE,
    roles,
)
from rl_lab import FileProblem


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
    claimed = roles(raw)
    read = {name for names in claimed.values() for name in names}
    unread = sorted(str(name) for name in raw if name not in read and name not in NOT_NEEDED)
    if not claimed:
        raise FileProblem(
            f"holds {', '.join(sorted(map(str, raw))[:8]) or 'nothing'}; none of these names is known (--help lists them)"
        )
    arrays, numbers, dtypes, renamed, remarks = {}, {}, {}, {}, []
    for role, names in claimed.items():
        name, (value, dtypes[role]) = _one_of(role, names, raw, remarks)
        if name != role:
            renamed[name] = role
        if value.ndim == 3 and value.shape[-1] == 1:
            value = value[..., 0]
        if role in NUMBERS or (role == "kl" and value.size == 1):
            numbers[role] = _as_number(role, value, dtypes[role])
        elif role in FLAGS:
            arrays[role] = _as_flags(role, value)
        elif role in WHOLE:
            arrays[role] = _as_whole(role, value)
        else:
            arrays[role] = value.astype(np.float64)
    check_numbers(numbers)
    low = {name: kind for name, kind in dtypes.items() if kind in ("float16", "bfloat16")}
    recording = Recording(arrays, numbers, _spacing(dtypes), renamed, unread, remarks, low)
    arrange(recording)
    return recording


def _one_of(role: str, names: list[str], raw: dict, remarks: list[str]) -> tuple[str, tuple[np.ndarray, str]]:
    """The array that takes a role: the canonical name first. Two that differ are refused, since either may be meant."""
    names = sorted(names, key=lambda name: (name != role, name))
    made = {name: _plain(name, raw[name]) for name in names}
    first = made[names[0]][0]
    for name in names[1:]:
        if not _same(role, first, made[name][0]):
            raise FileProblem(f"{names[0]} and {name} both mean {role} ({FIELDS[role].meaning}) and differ: leave one out, or rename it")
        remarks.append(f"{names[0]} and {name} are equal: read once, as {role}")
    return names[0], made[names[0]]


def _same(role: str, one: np.ndarray, other: np.ndarray) -> bool:
    if one.size != other.size:
        return False
    one, other = one.reshape(-1), other.reshape(-1)
    if role in MAY_BE_TEXT:  # ids are equal if they part the rows in the same way
        parts = {len(np.unique(x)) for x in (one, other)}
        return parts == {len(np.unique(np.stack([one, other]), axis=1).T)}
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f" and other.dtype.kind == "f"))


def _as_number(role: str, value: np.ndarray, dtype: str) -> float:
    if value.size == 1:
        number = float(value.reshape(()))
        # A setting stored as float32 is the decimal it was typed as; a reported value keeps its digits.
        return float(f"{number:.7g}") if role in SETTINGS and dtype == "float32" else number
    if role in ("beta", "clip_low", "clip_high") and value.size and (value == value.flat[0]).all():
        return float(value.flat[0])
    raise FileProblem(f"{role}: got shape {value.shape}, wanted one number")


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


def _plain(name: str, value) -> tuple[np.ndarray, str]:
    """float64, int64, bool or string array, and the dtype it came in. Complex numbers and objects are refused."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        kind = str(value.dtype).removeprefix("torch.")
        if value.is_complex() or value.is_quantized:
            raise FileProblem(f"{name}: got dtype {kind}, wanted real numbers")
        value = value.to(torch.float64).numpy() if value.is_floating_point() else value.numpy()
    else:
        value = np.asarray(value)
        kind = value.dtype.name
    if value.dtype.kind not in "fiubU":
        raise FileProblem(f"{name}: got dtype {value.dtype}, wanted numbers" + (" or strings" if CANONICAL.get(name) in WHOLE else ""))
    if value.dtype.kind == "U":
        if CANONICAL.get(name) not in MAY_BE_TEXT:
            raise FileProblem(f"{name}: holds strings, wanted numbers")
        value = np.unique(value, return_inverse=True)[1].reshape(value.shape)
    with np.errstate(all="ignore"):
        value = value.astype(np.float64 if value.dtype.kind == "f" else bool if value.dtype.kind == "b" else np.int64)
    if value.size == 0:
        raise FileProblem(f"{name}: got shape {value.shape}, an array of nothing")
    return value, kind


def _as_flags(name: str, value: np.ndarray) -> np.ndarray:
    if value.dtype == bool:
        return value
    value = np.where(np.isnan(value), 0, value) if value.dtype.kind == "f" else value
    if not ((value == 0) | (value == 1)).all():
        bad = value[(value != 0) & (value != 1)].flat[0]
        raise FileProblem(f"{name}: holds {bad}, wanted 0 and 1 (or bool); likely another array under this name")
    return value != 0


def _as_whole(name: str, value: np.ndarray) -> np.ndarray:
    if value.dtype.kind == "f":
        value = np.where(np.isnan(value), -1, value) if value.ndim == 2 else value
        if not np.isfinite(value).all() or (np.abs(value) > 2**53).any() or (value != np.round(value)).any():
            raise FileProblem(f"{name}: wanted whole numbers")
    return value.astype(np.int64)
