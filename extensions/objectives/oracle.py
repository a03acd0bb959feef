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
        }[row.std_guard]()

    advantages = []
    for i, reward in enumerate(rewards):
        mates = [j for j in range(len(rewards)) if groups[j] == groups[i]]
        ranked = sorted((rewards[j] for j in mates), reverse=True)
        baseline = {
            "none": lambda: reward,
            "group_mean": lambda: reward - statistics.mean(rewards[j] for j in mates),
            "leave_one_out": lambda: reward - statistics.mean(rewards[j] for j in mates if j != i),
            "length_weighted_mean": lambda: (
                reward - sum(lengths[j] * rewards[j] for j in mates) / sum(lengths[j] for j in mates)
            ),
            "best_minus_second": lambda: ranked[0] - ranked[1] if reward == ranked[0] else 0.0,
        }[row.baseline]()
        if row.scale == "group_std":
            baseline = guarded(baseline, spread([rewards[j] for j in mates]))
        advantages.append(baseline)
    if row.scale == "batch_std_of_raw_rewards":
        advantages = [guarded(x, spread(rewards)) for x in advantages]
    if row.scale == "batch_std":
        mean = statistics.mean(advantages)
        advantages = [guarded(x - mean, spread(advantages)) for x in advantages]
    return advantages


def slow_loss(
    row: objectives.Row, batch: objectives.Batch, logps: torch.Tensor, A: torch.Tensor, kept: list[int]
) -> torch.Tensor:
    """The loss as its formula reads, token by token with autograd and explicit stop-gradients; policy and KL term."""
    rows = [(i, [t for t in range(batch.mask.shape[1]) if batch.mask[i, t]]) for i in kept]
    tokens = sum(len(used) for _, used in rows)
    counted = [used for _, used in rows if used or row.rows_counted == "all"]
    B = len(counted) if batch.window_rows is None else batch.window_rows

    def weight(reduction: str, length: int) -> float:
        return {
            "mean_per_response": lambda: 1 / B / (length + row.length_eps),
            "mean_over_tokens": lambda: 1 / tokens,
            "mean_over_window": lambda: 1 / (batch.window_tokens or tokens),
            "sum_per_response": lambda: 1 / B,
            "sum_over_budget": lambda: 1 / B / batch.budget,
            "sum_over_width": lambda: 1 / B / batch.mask.shape[1],
            "sum_over_tokens": lambda: 1.0,
        }[reduction]() / (batch.accumulation_steps if row.accumulation == "divide" else 1)

    def cut(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(row.log_ratio_min, row.log_ratio_max)

    total = torch.zeros((), dtype=logps.dtype)
    for i, used in rows:
        log_ratios = {t: logps[i, t] - batch.old_logps[i, t] for t in used}
        mean = sum(log_ratios.values()) / len(used)
        if row.ratio == "sequence_mean_of_clipped":
            clipped = [
                x
                if A[i, t] == 0
                else torch.minimum(x * A[i, t].sign(), x.clamp(-row.clip_low, row.clip_high) * A[i, t].sign())
                * A[i, t].sign()
                for t, x in log_ratios.items()
            ]
            mean = sum(clipped) / len(used)
        for t in used:
            a, l, l0 = A[i, t], logps[i, t], batch.old_logps[i, t]
            r = {
                "token": lambda: cut(log_ratios[t]).exp(),
                "sequence_mean": lambda: cut(mean).exp(),
                "sequence_product": lambda: cut(sum(log_ratios.values())).exp(),
                "sequence_mean_token": lambda: cut(mean.detach() + l - l.detach()).exp(),
                "sequence_mean_of_clipped": lambda: mean.exp(),
                "none": lambda: None,
            }[row.ratio]()
            low, high = 1 - row.clip_low, 1 + row.clip_high
            clip = lambda: torch.minimum(r * a, r.clamp(low, high) * a)  # noqa: E731

            def vespo():
                w = sum(log_ratios.values()).detach().exp()
                k, lam = (
                    (row.vespo_k_positive, row.vespo_lam_positive)
                    if a >= 0
                    else (row.vespo_k_negative, row.vespo_lam_negative)
                )
                return w**k * math.exp(lam) * (-lam * w).exp() * a * l

            def dppo(distance):
                beyond = distance > row.clip_high and l > l0 if a > 0 else distance > row.clip_low and l < l0
                return 0 * l if beyond else r.detach().clamp(max=row.ratio_cap) * a * l

            p, p0 = l.exp().item(), l0.exp().item()
            J = (
                a * l
                if row.ratio == "none"
                else {
                    "plain": lambda: r * a,
                    "clip": clip,
                    "dual_clip": lambda: torch.maximum(clip(), row.ratio_cap * a) if a < 0 else clip(),
                    "capped_clip": lambda: torch.minimum(r.clamp(max=row.ratio_cap) * a, r.clamp(low, high) * a),
                    "cispo": lambda: r.detach().clamp(low, high) * a * l,
                    "sapo": lambda: (
                        4 / (tau := row.tau_positive if a > 0 else row.tau_negative) * torch.sigmoid(tau * (r - 1)) * a
                    ),
                    "vespo": vespo,
                    "dppo_tv": lambda: dppo(abs(p - p0)),
                    "dppo_kl": lambda: dppo(p0 * math.log(p0 / p) + (1 - p0) * math.log((1 - p0) / (1 - p))),
                }[row.surrogate]()
            )
            if row.off_policy_rows == "drop" and a < 0 and -sum(log_ratios.values()) / len(used) > row.off_policy_threshold:
                J = 0 * l
            total = total - weight(row.reduction, len(used)) * J
            if row.kl_in_loss and row.kl != "exact":
                d = l - (l0 if row.kl_anchor == "old" else batch.ref_logps[i, t])
                kl = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() + d - 1, "abs": d.abs()}[row.kl]
                if row.kl_gradient == "k2":
                    kl = kl.detach() + d**2 / 2 - (d**2 / 2).detach()
                kl = kl * r if row.kl_weight == "ratio" else kl
                reduction = row.reduction if row.kl_reduction == "same" else row.kl_reduction
                total = total + row.kl_coef * weight(reduction, len(used)) * kl
    return total


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
    return rows


class GradientCase(unittest.TestCase):
    def assert_gradient_is_that_of_autograd(self, row: objectives.Row, batch: objectives.Batch | None = None) -> None:
        batch = small_batch() if batch is None else batch
        result = evaluate(row, batch)
        logps = batch.logps.clone().requires_grad_()
        loss = slow_loss(row, batch, logps, result.advantages, result.kept.nonzero()[:, 0].tolist())
        (gradient,) = torch.autograd.grad(loss, logps)
        ours = result.loss - result.value_loss - result.entropy_loss - (result.kl_loss if row.kl == "exact" else 0)
        self.assertAlmostEqual(ours.item(), loss.item(), 11, row)
        torch.testing.assert_close(result.dloss_dlogps, gradient, rtol=1e-10, atol=1e-12, msg=lambda text: f"{row}\n{text}")
