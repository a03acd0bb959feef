"""A reader's own batch, from a file: .npz, .pt, .safetensors or .jsonl, under any of the names of extensions.read.names."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import rl_lab
from extensions.objectives.batch import Batch, make_batch
from extensions.objectives.pairs import Preferences, make_preferences
from extensions.read import read_arrays
from extensions.read.named import named

COUNTS = ("num_items_in_batch", "steps_per_generation", "world_size", "accumulation_steps", "budget", "window_tokens")
"""Numbers of a file that say what one optimiser step averages over."""
NAMES_HERE = {"world_size": "num_processes", "row_truncated": "truncated"}
"""Role in a file -> name in make_batch, where the two differ."""
PREFERENCE_ARRAYS = (
    "chosen_logps",
    "rejected_logps",
    "ref_chosen_logps",
    "ref_rejected_logps",
    "labels",
    "kl_seq_logps",
    "ref_kl_seq_logps",
)


class ReadersBatch(NamedTuple):
    """What a file held: a rollout, or preferences; and the names in it that nothing reads."""

    batch: Batch | None
    preferences: Preferences | None
    unread: list[str]


def read_batch(path: Path) -> ReadersBatch:
    """A batch from a file, read safely (extensions.read: nothing is unpickled, memory stays proportional to the file).

    Raises rl_lab.FileProblem for a file that cannot be read or whose arrays do not fit.
    """
    try:
        raw = read_arrays(path)
    except rl_lab.FileProblem as problem:
        raise rl_lab.FileProblem(f"--batch {problem}") from problem
    try:
        read = named(raw)
        held = {NAMES_HERE.get(role, role): value for role, value in read.arrays.items()}
        held |= {NAMES_HERE.get(role, role): read.numbers[role] for role in COUNTS if role in read.numbers}
        if "window_rows" in raw and "global_batch_size" in read.numbers:
            held["window_rows"] = read.numbers["global_batch_size"]
        batch, preferences, used = _made(held)
    except (rl_lab.FileProblem, TypeError, ValueError) as problem:
        raise rl_lab.FileProblem(f"--batch {rl_lab.one_line(path)}: {rl_lab.one_line(problem)}") from problem
    roles = {role: name for name, role in read.renamed.items()}
    here = {theirs: ours for ours, theirs in NAMES_HERE.items()}
    names = {roles.get(here.get(name, name), here.get(name, name)) for name in used} | {"window_rows"}
    return ReadersBatch(batch, preferences, sorted(set(raw) - names))


def _made(held: dict) -> tuple[Batch | None, Preferences | None, list[str]]:
    """The batch, or the preferences, and the names that were used. Raises as make_batch and make_preferences."""
    is_preference = any(name in held for name in PREFERENCE_ARRAYS)
    wanted = {"logps", "mask", "ref_logps", *PREFERENCE_ARRAYS}
    if not is_preference:
        wanted = {field.name for field in dataclasses.fields(Batch)} | {NAMES_HERE.get(name, name) for name in COUNTS}
    used = {name: values for name, values in held.items() if name in wanted}
    if is_preference and "logps" in used:
        used = {name: values for name, values in used.items() if "chosen" not in name and "rejected" not in name}
    if "logps" not in used and "chosen_logps" not in used:
        raise ValueError(f"holds {', '.join(sorted(held)) or 'nothing'}; wanted at least logps and mask")
    if is_preference:
        return None, make_preferences(**used), list(used)
    used = {name: int(v) if name == "accumulation_steps" else v for name, v in used.items()}
    return make_batch(**used, allow_empty_rows=True), None, list(used)
