"""A reader's own batch, from an .npz file."""

from __future__ import annotations

import dataclasses
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

import rl_lab
from extensions.objectives.batch import Batch, make_batch
from extensions.objectives.pairs import Preferences, make_preferences
FILE_NUMBERS = (
    "num_items_in_batch",
    "steps_per_generation",
    "num_processes",
    "accumulation_steps",
    "budget",
    "window_tokens",
    "window_rows",
)
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
    """A batch from an .npz file whose arrays have the names of Batch, or of make_preferences. float32 becomes float64.

    Nothing is unpickled. Raises rl_lab.FileProblem for a file that cannot be read or whose arrays do not fit.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            if not isinstance(stored, np.lib.npyio.NpzFile):
                raise rl_lab.FileProblem(
                    f"--batch {path}: one array without a name; wanted an .npz file with logps, mask, ..."
                )
            arrays = {name: stored[name] for name in stored.files}
    except OSError as problem:
        raise rl_lab.FileProblem(f"--batch {path}: {problem.strerror or 'not an .npz file'}") from problem
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as problem:
        raise rl_lab.FileProblem(f"--batch {path}: not an .npz file of plain arrays (numpy.savez writes one)") from problem
    arrays = {name: values.astype(np.float64) if values.dtype.kind == "f" else values for name, values in arrays.items()}
    rollout = {field.name for field in dataclasses.fields(Batch)} | set(FILE_NUMBERS)
    is_preference = any(name in arrays for name in PREFERENCE_ARRAYS)
    wanted = {"logps", "mask", "ref_logps", *PREFERENCE_ARRAYS} if is_preference else rollout
    used = {name: values for name, values in arrays.items() if name in wanted}
    if is_preference and "logps" in used:
        used = {name: values for name, values in used.items() if "chosen" not in name and "rejected" not in name}
    if "logps" not in used and "chosen_logps" not in used:
        raise rl_lab.FileProblem(
            f"--batch {path}: holds {', '.join(sorted(arrays)) or 'nothing'}; wanted at least logps and mask"
        )
    unread = sorted(set(arrays) - set(used))
    try:
        used = {name: values.item() if name in FILE_NUMBERS else values for name, values in used.items()}
        if is_preference:
            return ReadersBatch(None, make_preferences(**used), unread)
        return ReadersBatch(make_batch(**used, allow_empty_rows=True), None, unread)
    except (TypeError, ValueError) as problem:
        raise rl_lab.FileProblem(f"--batch {path}: {problem}") from problem
