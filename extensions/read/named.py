"""Arrays under the names of a trainer -> under the names of the table, with the dtypes that their roles have."""

from __future__ import annotations

from typing import Mapping, NamedTuple

import numpy as np
import torch

from extensions.read.limits import Array
from extensions.read.names import CANONICAL, FIELDS, FLAGS, MAY_BE_TEXT, NOT_NEEDED, NUMBERS, SETTINGS, WHOLE, roles
from rl_lab import FileProblem


class Named(NamedTuple):
    """arrays: float64, bool or int64; numbers: single numbers; dtypes: what each came in; renamed: name in the file -> role."""

    arrays: dict[str, np.ndarray]
    numbers: dict[str, float]
    dtypes: dict[str, str]
    renamed: dict[str, str]
    unread: list[str]
    remarks: list[str]


def named(raw: Mapping[str, Array]) -> Named:
    """Every array under the name of its role. Raises FileProblem: no name known, no such numbers, two arrays for one role."""
    claimed = roles(raw)
    if not claimed:
        raise FileProblem(
            f"holds {', '.join(sorted(map(str, raw))[:8]) or 'nothing'}; none of these names is known "
            "(python -m extensions.audit --help lists them)"
        )
    read = {name for names in claimed.values() for name in names}
    made = Named({}, {}, {}, {}, sorted(str(n) for n in raw if n not in read and n not in NOT_NEEDED), [])
    for role, names in claimed.items():
        name, (value, made.dtypes[role]) = _one_of(role, names, raw, made.remarks)
        if name != role:
            made.renamed[name] = role
        if value.ndim == 3 and value.shape[-1] == 1:
            value = value[..., 0]
        if role in NUMBERS or (role == "kl" and value.size == 1):
            made.numbers[role] = _as_number(role, value, made.dtypes[role])
        elif role in FLAGS:
            made.arrays[role] = _as_flags(role, value)
        elif role in WHOLE:
            made.arrays[role] = _as_whole(role, value)
        else:
            made.arrays[role] = value.astype(np.float64)
    return made


def _one_of(role: str, names: list[str], raw: dict, remarks: list[str]) -> tuple[str, tuple[np.ndarray, str]]:
    """The array that takes a role: the canonical name first. Two that differ are refused, since either may be meant."""
    names = sorted(names, key=lambda name: (name != role, name))
    made = {name: _plain(name, raw[name]) for name in names}
    first = made[names[0]][0]
    for name in names[1:]:
        if not _same(role, first, made[name][0]):
            raise FileProblem(
                f"{names[0]} and {name} both mean {role} ({FIELDS[role].meaning}) and differ: leave one out, or rename it"
            )
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
        text = " or strings" if CANONICAL.get(name) in MAY_BE_TEXT else ""
        raise FileProblem(f"{name}: got dtype {value.dtype}, wanted numbers{text}")
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
