"""Step 6 of an objective: what one token weighs in the loss. A new reduction is an entry in REDUCTIONS."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from extensions.objectives.advantages import kept_rows
from extensions.objectives.batch import Batch, required
from extensions.objectives.table import Choice, Number

if TYPE_CHECKING:
    from extensions.objectives.choices import Row

LENGTH_EPS = Number("length_eps", 0.0, 0, 1, "added to T_i in mean_per_response")


class Counts(NamedTuple):
    """What a reduction divides by."""

    lengths: Tensor  # (N, 1) counted tokens, 0 for a row that a filter took out
    rows: float  # B
    tokens: float  # N


def per_response(row: Row, batch: Batch, n: Counts) -> Tensor:
    # A row without tokens has no token to weigh; the floor only keeps its division finite.
    return n.rows * (n.lengths + row.length_eps).clamp(min=row.length_eps or 1.0)


def over_budget(row: Row, batch: Batch, n: Counts) -> float:
    if batch.budget is None:
        raise ValueError(f"{row.name}: the batch has no budget, the C of reduction 'sum_over_budget'")
    return n.rows * batch.budget


def per_prompt(row: Row, batch: Batch, n: Counts) -> Tensor:
    """P times the tokens of all answers to the prompt; a prompt without a token counts in no mean."""
    if batch.group_ids is None:
        required(row, batch, "group_ids")
    _, group = torch.unique(batch.group_ids, return_inverse=True)
    tokens = torch.zeros(int(group.max()) + 1, dtype=n.lengths.dtype).index_add(0, group, n.lengths[:, 0])
    return int((tokens > 0).sum()) * tokens.clamp(min=1.0)[group].unsqueeze(1)


# Each gives the denominator of a token's weight: a number, or one per answer (N, 1).
REDUCTIONS: dict[str, Choice] = {
    "mean_per_response": Choice("(1/B) sum_i (1/T_i) sum_t x", per_response),
    "mean_over_tokens": Choice("(1/N) sum_i sum_t x, N tokens of this batch", lambda row, batch, n: n.tokens),
    "mean_over_window": Choice(
        "(1/Nw) sum_i sum_t x, Nw tokens that one optimiser step averages over",
        lambda row, batch, n: n.tokens if batch.window_tokens is None else batch.window_tokens,
    ),
    "mean_per_prompt": Choice(
        "(1/P) sum_p (1/N_p) sum over the tokens of all answers to prompt p", per_prompt, needs=("group_ids",)
    ),
    "sum_per_response": Choice("(1/B) sum_i sum_t x", lambda row, batch, n: n.rows),
    "sum_over_budget": Choice("(1/(B C)) sum_i sum_t x, C a fixed number of tokens", over_budget, needs=("budget",)),
    "sum_over_width": Choice(
        "(1/(B W)) sum_i sum_t x, W the padded width of this batch", lambda row, batch, n: n.rows * batch.mask.shape[1]
    ),
    "total_over_width": Choice("(1/W) sum_i sum_t x: sum_over_width without B", lambda row, batch, n: batch.mask.shape[1]),
    "sum_over_tokens": Choice("sum_i sum_t x", lambda row, batch, n: 1.0),
}


def reduction_weights(row: Row, batch: Batch, reduction: str | None = None) -> Tensor:
    """Weight of a token of each answer, (N, 1): a reduced loss is sum(weight * mask * x). See CHOICES["reduction"].

    B is batch.window_rows if given, else the rows that row.rows_counted counts; Nw is batch.window_tokens if given, else
    the tokens of this batch. Every weight is divided by the accumulation steps where row.accumulation says so. Rows that a
    filter took out are in no count. Raises ValueError for sum_over_budget without a budget.
    """
    kept = kept_rows(row, batch)
    return row_weights(row, batch, reduction or row.reduction, batch.lengths.unsqueeze(1) * kept.unsqueeze(1), kept)


def row_weights(row: Row, batch: Batch, reduction: str, lengths: Tensor, kept: Tensor) -> Tensor:
    """As reduction_weights, for lengths (N, 1) and kept rows (N,) that are known already."""
    lengths = lengths.to(batch.logps.dtype)
    counted = kept if row.rows_counted == "all" else lengths > 0
    rows = float(counted.sum()) if batch.window_rows is None else batch.window_rows
    denominator = REDUCTIONS[reduction](row, batch, Counts(lengths, rows, float(lengths.sum(dtype=torch.float64))))
    if isinstance(denominator, Tensor):
        weights = 1 / denominator
    elif denominator:
        weights = torch.full_like(lengths, 1 / denominator)
    else:
        raise ValueError(f"{row.name}: reduction {reduction!r} divides by 0: no row that is left has a counted token")
    return weights / accumulation_divisor(row, batch)


def accumulation_divisor(row: Row, batch: Batch) -> int:
    return batch.accumulation_steps if row.accumulation == "divide" else 1
