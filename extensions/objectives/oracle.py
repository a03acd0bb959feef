"""What the tests compare with: the recordings, and a slow second way to every number that uses no code of the engine."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import unittest
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from extensions import objectives
from extensions.objectives import ROWS, evaluate
from extensions.objectives.slow_loss import SlowLoss

CAPTURES = Path(objectives.__file__).parents[1] / "audit" / "captures"


@lru_cache
def recordings() -> dict[str, dict]:
    """Manifest row of every recorded batch, by file name."""
    lines = (CAPTURES / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    return {entry["file"]: entry for entry in map(json.loads, lines)}


def arrays_of(file: str) -> dict[str, np.ndarray]:
    """A recorded batch; float32 widened, so that all difference to the recording is the trainer's own rounding."""
    with np.load(CAPTURES / file, allow_pickle=False) as stored:
        return {
            name: stored[name].astype(np.float64) if stored[name].dtype == np.float32 else stored[name] for name in stored
        }


def check_close(test: unittest.TestCase, got, wanted, tolerance: float, what: str) -> None:
    """Largest difference at most `tolerance` times the largest wanted number; the message names the quantity."""
    got, wanted = (np.asarray(x.detach() if isinstance(x, torch.Tensor) else x, dtype=np.float64) for x in (got, wanted))
    test.assertEqual(got.shape, wanted.shape, what)
    scale = np.abs(wanted).max() if wanted.size else 0.0
    test.assertLessEqual(np.abs(got - wanted).max(initial=0.0), tolerance * max(scale, 1e-12), what)


def slow_advantages(row: objectives.Row, rewards: list[float], groups: list[int], lengths: list[int]) -> list[float]:
    """Outcome advantages by the statistics module, one answer at a time. All groups have two answers or more."""
    spread = {0: statistics.pstdev, 1: statistics.stdev}[row.std_ddof]

    def guarded(x: float, std: float) -> float:
        return {
            "add": lambda: x / (std + row.std_eps),
            "inside": lambda: x / math.sqrt(std**2 + row.std_eps),
            "floor": lambda: x / max(std, row.std_eps),
            "floor_variance": lambda: x / math.sqrt(max(std**2, row.std_eps)),
            "add_or_leave": lambda: x / (std + row.std_eps) if std > 1e-15 else x,
        }[row.std_guard]()

    if row.reward_clip == "before_baseline":
        rewards = [min(max(reward, -row.reward_limit), row.reward_limit) for reward in rewards]
    advantages = []
    for i, reward in enumerate(rewards):
        mates = [j for j in range(len(rewards)) if groups[j] == groups[i]]
        ranked = sorted((rewards[j] for j in mates), reverse=True)
        baseline = {
            "none": lambda: reward,
            "batch_mean": lambda: reward - statistics.mean(rewards),
            "group_mean": lambda: reward - statistics.mean(rewards[j] for j in mates),
            "leave_one_out": lambda: reward - statistics.mean(rewards[j] for j in mates if j != i),
            "length_weighted_mean": lambda: (
                reward - sum(lengths[j] * rewards[j] for j in mates) / sum(lengths[j] for j in mates)
            ),
            "best_minus_second": lambda: ranked[0] - ranked[1] if reward == ranked[0] else 0.0,
        }[row.baseline]()
        if row.scale == "group_std":
            baseline = guarded(baseline, spread([rewards[j] for j in mates]))
        if row.scale == "leave_one_out_std":
            baseline = guarded(baseline, spread([rewards[j] for j in mates if j != i]))
        if row.scale == "group_mean":
            baseline = guarded(baseline, abs(statistics.mean(rewards[j] for j in mates)))
        if row.reward_clip == "after_baseline":
            baseline = min(max(baseline, -row.reward_limit), row.reward_limit)
        advantages.append(baseline)
    if row.scale == "batch_std_of_raw_rewards":
        advantages = [guarded(x, spread(rewards)) for x in advantages]
    if row.scale == "batch_std":
        mean = statistics.mean(advantages) if row.centre == "mean" else 0.0
        advantages = [guarded(x - mean, spread(advantages)) for x in advantages]
    return advantages


@lru_cache
def small_batch() -> objectives.Batch:
    return objectives.small_batch()[0]


def combinations_of_choices() -> list[objectives.Row]:
    """Rows that no one named: every ratio with every surrogate it may have, then every KL, weight and reduction."""
    base = replace(ROWS["grpo"], name="combination", kl="none", kl_coef=0.0)
    rows = []
    for ratio in objectives.CHOICES["ratio"]:
        for surrogate in objectives.CHOICES["surrogate"]:
            try:
                rows.append(replace(base, ratio=ratio, surrogate=surrogate))
            except ValueError:
                continue
    rows += [replace(row, baseline="given", scale="none") for row in rows]
    for kl in ("k1", "k2", "k3", "abs"):
        for weight, gradient, anchor in itertools.product(("none", "ratio"), ("own", "k2"), ("reference", "old")):
            for ratio in ("token", "sequence_mean"):
                rows.append(
                    replace(base, ratio=ratio, kl=kl, kl_coef=0.3, kl_weight=weight, kl_gradient=gradient, kl_anchor=anchor)
                )
    for reduction in objectives.CHOICES["reduction"]:
        rows.append(replace(base, reduction=reduction, accumulation="divide"))
        rows.append(replace(base, kl="k3", kl_coef=0.3, kl_reduction=reduction, length_eps=1e-3))
    rows.append(replace(base, off_policy_rows="drop", off_policy_threshold=-0.3))
    rows.append(replace(base, log_ratio_min=-0.1, log_ratio_max=0.5))
    rows.append(replace(base, ratio="sequence_mean", log_ratio_min=-0.1, log_ratio_max=0.2))
    rows.append(replace(base, surrogate="capped_clip", ratio_cap=1.1))
    rows.append(replace(base, overlong="mask", kl="k3", kl_coef=0.3))
    return rows + corrections_of_the_sampler(base) + selections_of_tokens(base)


# Measure and level of a dropping -> a band that some of the small batch is inside and some is not.
BANDS = {
    ("ratio", "token"): (0.8, 1.25), ("ratio", "mean"): (0.9, 1.05), ("ratio", "sum"): (0.8, 1.2),
    ("ratio", "worst"): (0.8, 1.28), ("k1", "token"): (-0.2, 0.2), ("k1", "mean"): (-0.05, 0.1), ("k1", "sum"): (-0.2, 0.2),
    ("k1", "worst"): (-0.25, 0.22), ("k2", "token"): (-1.0, 0.02), ("k2", "mean"): (-1.0, 0.016),
    ("k2", "sum"): (-1.0, 0.05), ("k2", "worst"): (-1.0, 0.03), ("k3", "token"): (-1.0, 0.02), ("k3", "mean"): (-1.0, 0.016),
    ("k3", "sum"): (-1.0, 0.05), ("k3", "worst"): (-1.0, 0.03), ("tv", "token"): (-1.0, 0.05), ("tv", "mean"): (-1.0, 0.03),
    ("tv", "sum"): (-1.0, 0.1), ("tv", "worst"): (-1.0, 0.05),
}  # fmt: skip


def corrections_of_the_sampler(base: objectives.Row) -> list[objectives.Row]:
    """Every level of the weight with every bound; every measure of the dropping at every level, in and out of the mask."""
    with_kl = replace(base, kl="k3", kl_coef=0.3)
    rows = []
    levels, places = ("token", "product", "geometric", "given"), ("policy", "loss")
    for level, bound, place in itertools.product(levels, objectives.SAMPLER_BOUNDS, places):
        rows.append(replace(with_kl, sampler_correction=level, sampler_bound=bound, sampler_low=0.9, sampler_high=1.1,
            sampler_place=place))  # fmt: skip
    for (measure, level), (low, high) in BANDS.items():
        for dropped, place in (("counted", "policy"), ("counted", "loss"), ("left_out", "policy")):
            rows.append(replace(with_kl, sampler_drop=measure, sampler_drop_level=level, sampler_drop_low=low,
                sampler_drop_high=high, sampler_dropped=dropped, sampler_place=place))  # fmt: skip
    both = {"sampler_drop": "ratio", "sampler_drop_low": 0.8, "sampler_drop_high": 1.25}
    for ratio, surrogate in (("token", "clip"), ("sequence_mean", "dual_clip"), ("none", "plain")):
        rows.append(replace(base, ratio=ratio, surrogate=surrogate, sampler_correction="token", **both))
    return rows


def selections_of_tokens(base: objectives.Row) -> list[objectives.Row]:
    """Every rule for the policy term and for the KL, with the bounds of the covariance inside what the small batch has."""
    near = {"covariance_low": 0.1, "covariance_high": 0.6}
    rows = [replace(base, token_selection=rule, **near) for rule in objectives.SELECTIONS]
    rows += [
        replace(base, surrogate="plain", kl="abs", kl_coef=0.3, kl_anchor="old", kl_tokens=rule, **near)
        for rule in objectives.SELECTIONS
    ]
    rows += [replace(base, nll=good, nll_coef=0.4) for good in ("positive_advantage", "positive_reward")]
    for gradient, weight in itertools.product(("score", "none"), ("none", "ratio")):
        rows.append(replace(base, kl="k3", kl_coef=0.3, kl_gradient=gradient, kl_weight=weight))
    return rows


class GradientCase(unittest.TestCase):
    def assert_gradient_is_that_of_autograd(self, row: objectives.Row, batch: objectives.Batch | None = None) -> None:
        batch = small_batch() if batch is None else batch
        result = evaluate(row, batch)
        logps = batch.logps.clone().requires_grad_()
        loss = SlowLoss(row, batch, logps, result.advantages, result.kept.nonzero()[:, 0].tolist()).total()
        (gradient,) = torch.autograd.grad(loss, logps)
        ours = result.loss - result.value_loss - result.entropy_loss - (result.kl_loss if row.kl == "exact" else 0)
        self.assertAlmostEqual(ours.item(), loss.item(), 11, row)
        torch.testing.assert_close(result.dloss_dlogps, gradient, rtol=1e-10, atol=1e-12, msg=lambda text: f"{row}\n{text}")
