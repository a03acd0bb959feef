"""Between steps 4 and 6: which tokens the policy term, or the KL, is taken over. A new rule is an entry in SELECTIONS.

A token that is not selected has loss 0 and stays in the denominators. What a rule reads carries no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from extensions.objectives.batch import Batch, required
from extensions.objectives.table import INF, Choice, Number

if TYPE_CHECKING:
    from extensions.objectives.choices import Row

SHARE = Number("selected_share", 0.2, 0, 1, "share of the counted tokens")


def covariance(batch: Batch, A: Tensor, mask: Tensor) -> Tensor:
    """(A - mean A)(l - mean l) over counted tokens, (N, T): where a step would move the entropy most."""
    A = A.expand_as(mask)
    return (A - A[mask].mean()) * (batch.logps - batch.logps[mask].mean())


def top_entropy(row: Row, batch: Batch, A: Tensor, mask: Tensor) -> Tensor:
    """Tokens whose entropy is at or above the 1 - share quantile of the counted ones (linear between neighbours)."""
    entropies = required(row, batch, "entropies")
    return entropies >= torch.quantile(entropies[mask], 1 - row.selected_share)


def outside_covariance(row: Row, batch: Batch, A: Tensor, mask: Tensor) -> Tensor:
    """Tokens whose covariance is not in the open band (low, high)."""
    cov = covariance(batch, A, mask)
    return ~((cov > row.covariance_low) & (cov < row.covariance_high))


def top_covariance(row: Row, batch: Batch, A: Tensor, mask: Tensor) -> Tensor:
    """The share of tokens with the largest covariance, at least one."""
    cov = covariance(batch, A, mask).masked_fill(~mask, -INF).flatten()
    count = max(1, int(int(mask.sum()) * row.selected_share))
    chosen = torch.zeros_like(mask).flatten()
    chosen[cov.topk(count).indices] = True
    return chosen.reshape(mask.shape)


def given(row: Row, batch: Batch, A: Tensor, mask: Tensor) -> Tensor:
    return required(row, batch, "selected_tokens")


# function(row, batch, A, mask) -> (N, T) bool
SELECTIONS: dict[str, Choice] = {
    "all": Choice("every counted token"),
    "top_entropy": Choice("the share of tokens with the largest entropy", top_entropy, (SHARE,), ("entropies",)),
    "outside_covariance": Choice(
        "tokens whose (A - mean A)(l - mean l) is not between two bounds (Clip-Cov, which draws some of those between)",
        outside_covariance,
        (Number("covariance_low", 1.0, -INF, INF, "Clip-Cov's bounds"), Number("covariance_high", 5.0, -INF, INF)),
    ),
    "top_covariance": Choice(
        "the share of tokens with the largest (A - mean A)(l - mean l) (KL-Cov)", top_covariance, (SHARE,)
    ),
    "given": Choice("the tokens that the batch marks: a random draw, for example", given, needs=("selected_tokens",)),
}


def selected(row: Row, rule: str, batch: Batch, A: Tensor, mask: Tensor) -> Tensor | None:
    """Tokens that the rule selects, (N, T) bool; None for all."""
    return None if rule == "all" else SELECTIONS[rule](row, batch, A, mask)
