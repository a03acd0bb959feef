"""Step 7 of an objective: the squared error of the critic and its clip."""

from __future__ import annotations

import torch
from torch import Tensor

import rl_lab
from extensions.objectives.choices import Row

def value_loss_and_slope(row: Row, vpreds: Tensor, old_values: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error of the critic with its clip, and its slope with respect to vpreds. [...] -> [...], [...].

    square: (V - G)^2, slope 2 (V - G). With V' = V0 + clip(V - V0, -c, c): clip_max takes the larger of both squares and
    keeps the slope in the band, where both are the same in mathematics but not after rounding, and where the unclipped one is
    as large; clip_replace takes the square of V' and keeps the slope in the band.
    """
    error = vpreds - targets
    if row.value_loss == "square":
        return error.square(), 2 * error
    inside = (vpreds - old_values).abs() <= row.value_clip
    clipped_error = old_values + (vpreds - old_values).clamp(-row.value_clip, row.value_clip) - targets
    if row.value_loss == "clip_replace":
        return clipped_error.square(), torch.where(inside, 2 * clipped_error, 0.0)
    loss = rl_lab.clipped_value_loss(vpreds, old_values, targets, row.value_clip)
    return loss, torch.where(inside | (error.square() >= clipped_error.square()), 2 * error, 0.0)
