"""The .jsonl format: one response per line."""

from __future__ import annotations

import array
import json
import math
from pathlib import Path
from typing import Sequence

import numpy as np

from extensions.read.limits import limit
from extensions.read.names import CANONICAL, NUMBERS
from rl_lab import FileProblem


def read_jsonl(path: Path, size: int) -> dict[str, np.ndarray]:
    """One response per line. Lists are padded on the right; a number that belongs to the batch may stand on any line."""
    # Columns of (row, value, row, value, ...): a dictionary for each of many short lines would take thirty times the file.
    lines, columns, shared = array.array("q"), {}, {}
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
                for name, value in entry.items():
                    columns.setdefault(name, []).extend((len(lines), value))
                if entry:
                    lines.append(number)
        except (ValueError, RecursionError) as problem:
            raise FileProblem(f"not JSON lines ({_short(problem)})") from problem
    if not lines and not shared:
        raise FileProblem("no response in it")
    arrays = {name: _json_array(name, value) for name, value in shared.items()}
    left, lengths = limit(size), {}
    for name in list(columns):
        cells = columns.pop(name)
        values = cells[1::2]
        if len(values) < len(lines):
            given = dict(zip(cells[::2], values))
            values = [given.get(row) for row in range(len(lines))]
        arrays[name] = _json_column(name, lines, values, left)
        left -= arrays[name].nbytes
        if arrays[name].ndim == 2:
            lengths[name] = np.array([len(value) for value in values])
    if lengths and not any(CANONICAL.get(name) == "mask" for name in arrays):
        first = next((name for name in lengths if CANONICAL.get(name) == "logps"), next(iter(lengths)))
        arrays["mask"] = np.arange(arrays[first].shape[1]) < lengths[first][:, None]
    return arrays


def _json_array(name: str, value) -> np.ndarray:
    try:
        made = np.asarray(value, dtype=None if value is not None else float)
    except (ValueError, OverflowError) as problem:
        raise FileProblem(f"{name}: wanted a number or a list of numbers") from problem
    if made.dtype.hasobject:
        raise FileProblem(f"{name}: wanted a number or a list of numbers")
    return made


def _json_column(name: str, lines: Sequence[int], values: list, left: int) -> np.ndarray:
    """One column, a value from each line: numbers or strings give (N,), lists are padded on the right to (N, T)."""
    if any(isinstance(value, list) for value in values):
        wrong = next((line for line, value in zip(lines, values) if not isinstance(value, list)), None)
        if wrong is not None:
            raise FileProblem(f"line {wrong}: {name} is no list, and it is one on other lines")
        width = max(map(len, values))
        if 8 * len(values) * width > left:
            raise FileProblem(
                f"{name}: one response is {width} long and most are short: padding would need {len(values) * width} slots"
            )
        table = np.full((len(values), width), np.nan)
        for row, (line, value) in enumerate(zip(lines, values)):
            if any(item is not None and not isinstance(item, (int, float)) for item in value):
                raise FileProblem(f"line {line}: {name} holds something that is not a number")
            try:
                table[row, : len(value)] = [math.nan if item is None else item for item in value]
            except OverflowError as problem:
                raise FileProblem(f"line {line}: {name} holds a number that is too large") from problem
        return table
    missing = next((line for line, value in zip(lines, values) if value is None), None)
    if missing is not None and CANONICAL.get(name) != "rewards":
        raise FileProblem(f"line {missing}: {name} is missing, and it is there on other lines")
    if all(isinstance(value, str) for value in values):
        if len(values) * 4 * max(map(len, values)) > left:
            raise FileProblem(f"{name}: one text is {max(map(len, values))} long; an array of them would not be in proportion")
        return np.array(values)
    if any(not isinstance(value, (int, float, type(None))) for value in values):
        raise FileProblem(f"{name}: wanted a number, a string or a list of numbers on every line")
    try:
        whole = all(isinstance(value, int) for value in values)
        return np.array(values) if whole else np.array([math.nan if value is None else value for value in values], dtype=float)
    except OverflowError as problem:
        raise FileProblem(f"{name}: holds a number that is too large") from problem


def _short(problem: BaseException) -> str:
    return " ".join(str(problem).split())[:100] or type(problem).__name__
