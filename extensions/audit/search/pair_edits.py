"""Edits of a preference loss that are no edit of the pairs: two masks in one mean, another constant in the odds.

Each makes (loss, gradient with respect to logps, size) and hands it to the comparison of search/pairs.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from extensions.audit.read.masks import mask_edits
from extensions.audit.read.recording import Recording
from extensions.audit.tolerance import PAIR_GRADIENT
from extensions.objectives import PreferenceRow, Preferences

ODDS_GRID = np.logspace(-8, -1, 71)  # c - 1: from where float32 cannot tell it from 0 to where p = 0.9 is past it
HALVINGS = 40  # of the bracket around the best point of the grid


def other_lengths(recording: Recording, plain: list[PreferenceRow], compare, build) -> None:
    """Means whose sum runs over one mask and whose length is the count of another: s = sum_over / n_by = (n / n_by) mean."""
    recorded = recording.arrays["mask"]
    for name, edit in mask_edits(recording).items():
        for over, by, words in ((edit, recorded, "summed"), (recorded, edit, "counted in the length")):
            n, n_by = over.sum(1, keepdims=True), by.sum(1, keepdims=True)
            if (n == n_by).all() or not (n.all() and n_by.all()):
                continue
            try:
                data = build(recording, over)
            except (ValueError, TypeError):
                continue
            scale = torch.as_tensor(n / n_by)
            scaled = replace(
                data,
                logps=data.logps * scale,
                ref_logps=None if data.ref_logps is None else data.ref_logps * scale,
            )
            remark = f"mask edit {name.replace('_', ' ')}, {words} only"
            for row in plain:
                made = compare.evaluated(row, scaled) if row.score == "mean" and not row.sft_coef else None
                if made is not None:
                    edited = (made[0], made[1] * scale, made[2])
                    compare.try_row(row, scaled, ("length_of_other_tokens",), made=edited, remark=remark)


def odds_with_another_constant(plain: list[PreferenceRow], data: Preferences, compare) -> None:
    """ORPO with odds(s) = s - log(c - exp(s)): c is solved by the gradient, and stands for the 1 of 1 - p."""
    if compare.gradient is None or compare.per_score:
        return
    for row in plain:
        made = compare.evaluated(row, data) if row.loss == "orpo" else None
        if made is None:
            continue
        lengths = data.mask.sum(1, keepdim=True).clamp(min=1) if row.score == "mean" else torch.ones(len(data.logps), 1)
        slots = data.mask / lengths
        s = (torch.where(data.mask, data.logps, 0.0) * slots).sum(1)
        right = _odds_term(row, s, 1.0)

        def edited(c: float) -> tuple[float, Tensor, float]:
            value, slope = _odds_term(row, s, c)
            return made[0] - right[0] + value, made[1] + (slope - right[1]).unsqueeze(1) * slots, made[2]

        def off(c: float) -> float:
            return float((edited(c)[1] - compare.gradient).norm() / compare.gradient.norm())

        c = _lowest(off)
        if off(c) <= PAIR_GRADIENT < off(1.0):
            compare.try_row(row, data, ("odds_constant",), made=edited(c), remark=f"log({c:.7g} - p) in place of log(1 - p)")


def _odds_term(row: PreferenceRow, s: Tensor, c: float) -> tuple[float, Tensor]:
    """mean over pairs of -beta log sigmoid(odds(chosen) - odds(rejected)), and its slope in every s, (2P,)."""
    P = len(s) // 2
    left = -torch.expm1(s) + (c - 1)  # c - p, without the loss of digits of 1 - p near p = 1
    odds = s - left.log()
    gap = odds[:P] - odds[P:]
    pull = -row.beta * torch.sigmoid(-gap) / P
    return float(-row.beta * F.logsigmoid(gap).mean()), torch.cat([pull, -pull]) * c / left


def _lowest(off) -> float:
    """The c of the smallest distance: the best point of the grid, then thirds of the bracket around it."""
    at = int(np.argmin([off(1 + x) for x in ODDS_GRID]))
    low, high = np.log(ODDS_GRID[max(at - 1, 0)]), np.log(ODDS_GRID[min(at + 1, len(ODDS_GRID) - 1)])
    for _ in range(HALVINGS):
        third = (high - low) / 3
        if off(1 + np.exp(low + third)) < off(1 + np.exp(high - third)):
            high -= third
        else:
            low += third
    return float(1 + np.exp((low + high) / 2))
