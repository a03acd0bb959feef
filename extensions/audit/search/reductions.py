"""Reductions as one weight per row, the plain and the mistaken ones."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from extensions.audit.read.recording import Recording
from extensions.objectives import Batch, Row, evaluate


# ------------------------------------------------------------------------------------------ reductions


class Reduction(NamedTuple):
    fields: dict
    weights: Tensor  # (N,)
    mistake: str | None = None


def reductions(recording: Recording, batch: Batch) -> list[Reduction]:
    """Row weights of every reduction that differs on this batch; equal ones stand side by side (they tie)."""
    lengths = batch.lengths
    row = Row("hypothesis", baseline="given")
    has_empty = bool((lengths == 0).any())
    zeros = torch.zeros_like(batch.advantages)
    made = []

    def add(fields: dict, within: Batch = batch, mistake: str | None = None) -> None:
        chosen = replace(row, **{k: v for k, v in fields.items() if k in ("reduction", "rows_counted")})
        weights = evaluate(chosen, replace(within, advantages=zeros)).weights
        made.append(Reduction(fields, weights.amax(dim=1), mistake))

    own_rows = replace(batch, window_rows=None)
    add({"reduction": "mean_per_response"}, own_rows)
    if has_empty:
        add({"reduction": "mean_per_response", "rows_counted": "nonempty"}, own_rows)
    if batch.window_tokens is not None:
        add({"reduction": "mean_over_window"})
    add({"reduction": "mean_over_tokens"})
    if batch.budget is not None:
        add({"reduction": "sum_over_budget", "budget": batch.budget}, own_rows)
    add({"reduction": "sum_per_response"}, own_rows)
    if has_empty:
        add({"reduction": "sum_per_response", "rows_counted": "nonempty"}, own_rows)
    add({"reduction": "sum_over_width"}, own_rows)
    add({"reduction": "sum_over_tokens"})
    parts = recording.get("micro_batch_ids")
    if parts is not None and len(np.unique(parts)) > 1:
        names, inverse = np.unique(parts, return_inverse=True)
        tokens = torch.zeros(len(names), dtype=torch.float64).index_add(0, torch.as_tensor(inverse), lengths.double())
        weights = 1 / (len(names) * tokens.clamp(min=1))
        made.append(Reduction({"reduction": "mean_of_micro_batch_means"}, weights[torch.as_tensor(inverse)]))
    if batch.window_rows is not None:
        for name in ("mean_per_response", "sum_per_response"):
            add({"reduction": name, "global_batch_size": batch.window_rows})
    if batch.mask.shape[1] == 1:  # samples of an environment: who averages them averages over samples
        made.sort(key=lambda reduction: reduction.fields["reduction"] != "mean_over_tokens")
    return made


def mistaken_reductions(recording: Recording, batch: Batch) -> list[Reduction]:
    """Denominators that count what the numerator leaves out."""
    mask = recording.arrays["mask"]
    everything = recording.get("attention_mask")
    if everything is None and "lengths" in recording:
        everything = np.arange(mask.shape[1]) < recording.arrays["lengths"][:, None]
    if everything is None:
        return []
    extra = torch.as_tensor(everything & ~mask).sum(1)
    dropped = (batch.lengths == 0) & (extra > 0)
    if not dropped.any():
        return []
    total = float(batch.lengths.sum() + extra[dropped].sum())
    ones = torch.full((len(mask),), 1.0 / total, dtype=torch.float64)
    return [Reduction({"reduction": "mean_over_tokens"}, ones, "dropped_rows_in_denominator")]
