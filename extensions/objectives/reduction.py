"""Step 6 of an objective: what one token weighs in the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from extensions.objectives.advantages import kept_rows
from extensions.objectives.batch import Batch
from extensions.objectives.choices import Row

def reduction_weights(row: Row, batch: Batch, reduction: str | None = None) -> Tensor:
    """Weight of a token of each answer, (N, 1): a reduced loss is sum(weight * mask * x). See CHOICES["reduction"].

    B is batch.window_rows if given, else the rows that row.rows_counted counts; Nw is batch.window_tokens if given, else
    the tokens of this batch. Every weight is divided by the accumulation steps where row.accumulation says so. Rows that a
    filter took out are in no count. Raises ValueError for sum_over_budget without a budget.
    """
    kept = kept_rows(row, batch)
    return row_weights(row, batch, reduction or row.reduction, batch.lengths.unsqueeze(1) * kept.unsqueeze(1), kept)


def row_weights(row: Row, batch: Batch, reduction: str, lengths: Tensor, kept: Tensor) -> Tensor:
    lengths = lengths.to(batch.logps.dtype)
    tokens = float(lengths.sum(dtype=torch.float64))
    rows = (
        float((kept if row.rows_counted == "all" else lengths > 0).sum()) if batch.window_rows is None else batch.window_rows
    )
    if reduction == "mean_per_response":
        # A row without tokens has no token to weigh; the floor only keeps its division finite.
        weights = 1 / (rows * (lengths + row.length_eps).clamp(min=row.length_eps or 1.0))
    else:
        denominator = {
            "mean_over_tokens": tokens,
            "mean_over_window": tokens if batch.window_tokens is None else batch.window_tokens,
            "sum_per_response": rows,
            "sum_over_budget": rows * (batch.budget or 0.0),
            "sum_over_width": rows * batch.mask.shape[1],
            "sum_over_tokens": 1.0,
        }[reduction]
        if reduction == "sum_over_budget" and batch.budget is None:
            raise ValueError(f"{row.name}: the batch has no budget, the C of reduction 'sum_over_budget'")
        if not denominator:
            raise ValueError(f"{row.name}: reduction {reduction!r} divides by 0: no row that is left has a counted token")
        weights = torch.full_like(lengths, 1 / denominator)
    return weights / accumulation_divisor(row, batch)


def accumulation_divisor(row: Row, batch: Batch) -> int:
    return batch.accumulation_steps if row.accumulation == "divide" else 1
