"""Step 7 of an objective: the squared error of the critic and its clip. A new form is an entry in VALUE_LOSSES."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

import rl_lab
from extensions.objectives.table import VALUE_CLIP, VALUE_COEF, Choice

if TYPE_CHECKING:
    from extensions.objectives.choices import Row


def square(V: Tensor, V0: Tensor | None, G: Tensor, c: float) -> tuple[Tensor, Tensor]:
    """(V - G)^2, slope 2 (V - G)."""
    return (V - G).square(), 2 * (V - G)


def clip_max(V: Tensor, V0: Tensor, G: Tensor, c: float) -> tuple[Tensor, Tensor]:
    """The larger of two squares; the slope stays in the band, and where the unclipped square is as large as the other.

    In the band both are the same in mathematics but not after rounding, so that comparing them there decides nothing.
    """
    error, clipped_error = V - G, V0 + (V - V0).clamp(-c, c) - G
    inside = (V - V0).abs() <= c
    slope = torch.where(inside | (error.square() >= clipped_error.square()), 2 * error, 0.0)
    return rl_lab.clipped_value_loss(V, V0, G, c), slope


def clip_replace(V: Tensor, V0: Tensor, G: Tensor, c: float) -> tuple[Tensor, Tensor]:
    """The square of the clipped prediction alone; the slope stays in the band."""
    clipped_error = V0 + (V - V0).clamp(-c, c) - G
    return clipped_error.square(), torch.where((V - V0).abs() <= c, 2 * clipped_error, 0.0)


VALUE_LOSSES: dict[str, Choice] = {
    "none": Choice("no critic"),
    "square": Choice("(V - G)^2, G the value target", square, (VALUE_COEF,)),
    "clip_max": Choice(
        "max((V - G)^2, (V0 + clip(V - V0, -c, c) - G)^2)", clip_max, (VALUE_COEF, VALUE_CLIP), needs=("values",)
    ),
    "clip_replace": Choice(
        "(V0 + clip(V - V0, -c, c) - G)^2", clip_replace, (VALUE_COEF, VALUE_CLIP), needs=("values",)
    ),
}


def value_loss_and_slope(row: Row, vpreds: Tensor, old_values: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error of the critic with its clip, and its slope with respect to vpreds. [...] -> [...], [...].

    Raises KeyError for value_loss "none", which has no error.
    """
    return VALUE_LOSSES[row.value_loss](vpreds, old_values, targets, row.value_clip)
