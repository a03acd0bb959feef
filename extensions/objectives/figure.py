"""The figure: gradient against ratio, weight against length."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

import plot_results
from extensions.objectives.batch import make_batch
from extensions.objectives.choices import CHOICES
from extensions.objectives.engine import evaluate
from extensions.objectives.reduction import reduction_weights
from extensions.objectives.rows import ROWS
from extensions.objectives.surrogates import SURROGATES

NOT_DRAWN = {
    "capped_clip": "as dual_clip while c > 1 + high",
    "region_tv": "as dppo_tv up to its cap",
    "region_kl": "as dppo_kl up to its cap",
    "mean_over_window": "as mean_over_tokens while the batch is the window",
    "mean_per_prompt": "as mean_per_response while a prompt has one answer",
}
"""Curves that lie on another one here, and on which."""


def gradient_curves(sign: float, ratios: np.ndarray, old_probability: float = 0.2) -> dict[str, np.ndarray]:
    """d loss / d logp of one token with weight 1, for every surrogate, A = sign. ratios (K,) -> name -> (K,)."""
    old_logps = torch.full((len(ratios),), math.log(old_probability), dtype=torch.float64)
    batch = make_batch(
        logps=old_logps + torch.as_tensor(ratios).log(), old_logps=old_logps, advantages=torch.full_like(old_logps, sign)
    )
    row = replace(ROWS["grpo"], baseline="given", scale="none", kl="none", reduction="sum_over_tokens", clip_high=0.28)
    return {
        name: evaluate(replace(row, surrogate=name), batch).dloss_dlogps.squeeze(1).numpy()
        for name in SURROGATES
        if name not in NOT_DRAWN
    }


def weight_curves(lengths: np.ndarray, budget: float) -> dict[str, np.ndarray]:
    """What one token weighs, by the length of its answer, in a batch with one answer of each length."""
    width = int(lengths.max())
    mask = torch.arange(width) < torch.as_tensor(lengths).unsqueeze(1)
    batch = make_batch(logps=torch.zeros(mask.shape, dtype=torch.float64), mask=mask, budget=budget)
    return {
        name: reduction_weights(ROWS["grpo"], batch, name).squeeze(1).numpy()
        for name in CHOICES["reduction"]
        if name not in NOT_DRAWN
    }


def draw():
    """Gradient against ratio for both signs of A, one line per surrogate; weight against length, one line per reduction."""
    figure, (positive, negative, weight) = plot_results.new_figure(3, columns=3, panel_size=(5.2, 4.6))
    ratios = np.linspace(0.02, 4.0, 1991)
    for axis, sign in ((positive, 1.0), (negative, -1.0)):
        curves = gradient_curves(sign, ratios)
        # Thick lines first, so that lines that coincide stay visible.
        for width, (name, slope) in zip(np.linspace(6.5, 1.3, len(curves)), curves.items()):
            axis.plot(ratios, slope, label=name, linewidth=width, alpha=0.85)
        axis.axvspan(0.8, 1.28, color="grey", alpha=0.15, linewidth=0)
        axis.set(title=f"gradient of one token, A = {sign:+.0f}", xlabel="ratio r", ylabel="d loss / d logp")
    negative.set_ylim(-0.2, 4.2)
    positive.set_ylim(-4.2, 0.2)
    lengths = np.unique(np.geomspace(8, 1024, 40).astype(int))
    curves = weight_curves(lengths, budget=4096)
    for width, (name, values) in zip(np.linspace(3.0, 1.2, len(curves)), curves.items()):
        weight.plot(lengths, values, label=name, linewidth=width, marker="o", markersize=2.5)
    weight.set(
        title="weight of one token in a batch of one answer per length",
        xlabel="length of its answer (tokens)",
        ylabel="weight",
        xscale="log",
        yscale="log",
    )
    weight.set_ylim(top=300)  # room for the legend above the largest weight
    for axis in (positive, negative, weight):
        axis.title.set_fontsize(10.5)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.supxlabel("band 1 - 0.2 to 1 + 0.28, c = 3; old probability 0.2 (dppo); budget 4096 tokens", fontsize=9)
    return figure
