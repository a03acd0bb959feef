"""The .jsonl format: one response per line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from extensions.read.limits import limit
from extensions.read.names import CANONICAL, NUMBERS
from rl_lab import FileProblem


def read_jsonl(path: Path, size: int) -> dict[str, np.ndarray]:
    """One response per line. Lists are padded on the right; a number that belongs to the batch may stand on any line."""
    rows, shared = [], {}
    with open(path, encoding="utf-8", errors="strict") as file:
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                entry = json.loads(line)
                if not isinstance(entry, dict):
                    raise FileProblem(f"line {number}: got {type(entry).__name__}, wanted an object with one response")
                for name in [name for name in entry if CANONICAL.get(name) in (*NUMBERS, "eos_id", "kl")]:
                    value = entry.pop(name)
                    if CANONICAL[name] == "kl" and isinstance(value, list):
                        entry[name] = value
                    elif shared.setdefault(name, value) != value:
                        raise FileProblem(
                            f"line {number}: {name} is {value!r}, and {shared[name]!r} on an earlier line; it "
                            "belongs to the batch, not to a response"
                        )
                if entry:
                    rows.append((number, entry))
        except (ValueError, RecursionError) as problem:
            raise FileProblem(f"not JSON lines ({_short(problem)})") from problem
    if not rows and not shared:
        raise FileProblem("no response in it")
    arrays = {name: _json_array(name, value) for name, value in shared.items()}
    names = dict.fromkeys(name for _, entry in rows for name in entry)
    left = limit(size)
    for name in names:
        arrays[name] = _json_column(name, [(number, entry.get(name)) for number, entry in rows], left)
        left -= arrays[name].nbytes
    token_names = [n for n in names if arrays[n].ndim == 2]
    if token_names and not any(CANONICAL.get(name) == "mask" for name in names):
        first = next((n for n in token_names if CANONICAL.get(n) == "logps"), token_names[0])
        lengths = np.array([len(entry.get(first) or ()) for _, entry in rows])
        arrays["mask"] = np.arange(arrays[first].shape[1]) < lengths[:, None]
    return arrays


def _json_array(name: str, value) -> np.ndarray:
    try:
        made = np.asarray(value, dtype=None if value is not None else float)
    except (ValueError, OverflowError) as problem:
        raise FileProblem(f"{name}: wanted a number or a list of numbers") from problem
    if made.dtype.hasobject:
        raise FileProblem(f"{name}: wanted a number or a list of numbers")
    return made


def _json_column(name: str, cells: list[tuple[int, object]], left: int) -> np.ndarray:
    """One column of the lines: numbers or strings give (N,), lists are padded on the right to (N, T)."""
    missing = [number for number, value in cells if value is None]
    if any(isinstance(value, list) for _, value in cells):
        wrong = [number for number, value in cells if not isinstance(value, list)]
        if wrong:
            raise FileProblem(f"line {wrong[0]}: {name} is no list, and it is one on other lines")
        width = max(len(value) for _, value in cells)
        if 8 * len(cells) * width > left:
            raise FileProblem(
                f"{name}: one response is {width} long and most are short: padding would need {len(cells) * width} slots"
            )
        table = np.full((len(cells), width), np.nan)
        for row, (number, value) in enumerate(cells):
            if any(item is not None and (isinstance(item, str) or not isinstance(item, (int, float))) for item in value):
                raise FileProblem(f"line {number}: {name} holds something that is not a number")
            try:
                table[row, : len(value)] = [math.nan if item is None else item for item in value]
            except OverflowError as problem:
                raise FileProblem(f"line {number}: {name} holds a number that is too large") from problem
        return table
    if missing and CANONICAL.get(name) != "rewards":
        raise FileProblem(f"line {missing[0]}: {name} is missing, and it is there on other lines")
    values = [math.nan if value is None else value for _, value in cells]
    if all(isinstance(value, str) for value in values):
        return np.array(values)
    if any(not isinstance(value, (int, float)) for value in values):
        raise FileProblem(f"{name}: wanted a number, a string or a list of numbers on every line")
    try:
        return np.array(values) if all(isinstance(v, int) for v in values) else np.array(values, dtype=float)
    except OverflowError as problem:
        raise FileProblem(f"{name}: holds a number that is too large") from problem


def _short(problem: BaseException) -> str:
    return " ".join(str(problem).split())[:100] or type(problem).__name__
