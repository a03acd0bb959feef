"""A large batch in pieces of rows of like length."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from extensions.objectives import Batch

PART_SLOTS = 65_536  # a batch is worked through in pieces of about this many slots


class Part(NamedTuple):
    """Some rows of the batch, without the columns that none of them counts."""

    rows: Tensor
    first: int
    batch: Batch


def parts_of(batch: Batch, rows: Tensor | None = None, slots: int = PART_SLOTS) -> list[Part]:
    """The batch in pieces of rows that end at like positions, each trimmed to the columns it counts (not a square batch)."""
    rows = torch.arange(len(batch.mask)) if rows is None else rows
    width = batch.mask.shape[1]
    if len(rows) == len(batch.mask) and batch.mask.numel() <= slots:
        return [Part(rows, 0, batch)]
    any_counted = batch.mask[rows].any(1)
    end = torch.where(any_counted, width - batch.mask[rows].flip(1).to(torch.uint8).argmax(1), 0)
    start = torch.where(any_counted, batch.mask[rows].to(torch.uint8).argmax(1), width)
    order = end.argsort(stable=True)
    parts: list[Part] = []
    at = 0
    while at < len(order):
        count = max(1, slots // max(int(end[order[min(at + slots // width + 64, len(order) - 1)]]), 1))
        chosen = order[at : at + count].sort().values
        at += count
        low, high = min(int(start[chosen].min()), width - 1), max(int(end[chosen].max()), 1)
        low = min(low, high - 1)
        if len(batch.mask) == width:  # one of the mistakes puts the answers' advantages along time, where they have a place
            low, high = 0, width
        parts.append(Part(rows[chosen], low, take(batch, rows[chosen], low, high)))
    return parts


def take(batch: Batch, rows: Tensor, low: int, high: int) -> Batch:
    """Rows and columns of a batch, the per-token arrays that forms read."""
    changes = {}
    for name in ("logps", "old_logps", "ref_logps", "mask", "entropies", "logits", "ref_logits"):
        value = getattr(batch, name)
        if value is not None:
            changes[name] = value[rows, low:high]
    A = batch.advantages[rows]
    return Batch(**changes, advantages=A if A.shape[1] == 1 else A[:, low:high])
