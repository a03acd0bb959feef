"""The recorded mask and its named edits."""

from __future__ import annotations

import numpy as np

from extensions.audit.read.recording import Recording


def shifted(mask: np.ndarray, steps: int) -> np.ndarray:
    """The mask moved along time: steps 1 is one later."""
    moved = np.zeros_like(mask)
    if steps > 0:
        moved[:, steps:] = mask[:, :-steps]
    else:
        moved[:, :steps] = mask[:, -steps:]
    return moved


def last_counted(mask: np.ndarray) -> np.ndarray:
    return mask & (np.cumsum(mask[:, ::-1], axis=1)[:, ::-1] == 1)


def eos_ids(recording: Recording) -> np.ndarray | None:
    """Recorded EOS ids, else the id that ends most of the rows that are shorter than the batch."""
    if "eos_id" in recording.arrays:
        return recording.arrays["eos_id"].reshape(-1)
    ids, mask = recording.get("completion_ids"), recording.get("mask")
    if ids is None:
        return None
    ends = ids[last_counted(mask) & ~mask[:, -1:]]
    if not len(ends):
        return None
    values, counts = np.unique(ends, return_counts=True)
    return values[counts.argmax()][None] if counts.max() * 2 > len(ends) else None


def mask_edits(recording: Recording) -> dict[str, np.ndarray]:
    """Mask mistakes that change the recorded mask: name -> mask the loss would have used."""
    mask, attention = recording.arrays["mask"], recording.get("attention_mask")
    edits = {"mask_one_step_late": shifted(mask, 1), "mask_one_step_early": shifted(mask, -1)}
    last = last_counted(mask)
    ids, ends = recording.get("completion_ids"), eos_ids(recording)
    if ids is not None and ends is not None:
        edits["eos_dropped"] = mask & ~np.isin(ids, ends)
    else:
        edits["eos_dropped"] = mask & ~last
    first = np.where(mask.any(1), mask.argmax(1), mask.shape[1])[:, None]
    end = np.where(mask.any(1), mask.shape[1] - mask[:, ::-1].argmax(1), 0)[:, None]
    position = np.arange(mask.shape[1])
    span = (position >= first) & (position < end)
    edits["tool_tokens_counted"] = mask | span
    if attention is not None:
        edits["prompt_counted"] = mask | (attention & (position < first))
    elif "prompt_lengths" in recording:
        edits["prompt_counted"] = mask | (position < first)
    edits["padding_counted"] = np.ones_like(mask) if "prompt_counted" not in edits else mask | (position >= first)
    return {name: edit for name, edit in edits.items() if (edit != mask).any() and edit.any()}
