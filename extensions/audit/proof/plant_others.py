"""Mistakes planted into metrics, logs, masks and settings."""

from __future__ import annotations

import math
from typing import Iterator

import numpy as np
import torch

from extensions.audit.proof.plant_loss import Planted


# ---- critic, KL metric, score


def other_plants(entry: dict, arrays: dict) -> Iterator[Planted]:
    """The critic's minimum, a reported KL, a score on the wrong token, whitening over padding."""
    name = entry["file"][:-4]
    if entry["kind"] == "value_loss":
        V = torch.as_tensor(arrays["vpreds"]).clone().requires_grad_()
        V0, G, mask = (torch.as_tensor(arrays[n]) for n in ("values", "returns", "mask"))
        clipped = V0 + (V - V0).clamp(-0.5, 0.5)
        x = torch.minimum((V - G) ** 2, (clipped - G) ** 2) * mask
        loss = 0.5 * (
            x.sum() / mask.sum()
            if "token_mean" in name and "seq" not in name
            else (x.sum(1) / mask.sum(1).clamp(min=1)).sum() / (mask.sum(1) > 0).sum()
        )
        (gradient,) = torch.autograd.grad(loss, V)
        if not math.isclose(float(loss.detach()), float(arrays["loss"]), rel_tol=1e-4):
            yield Planted(
                name,
                "value_min_for_max",
                {**arrays, "loss": np.float32(loss.detach()), "dloss_dvpreds": gradient.numpy()},
                None,
                {},
                True,
                True,
            )
    if entry["kind"] == "kl" and "abs" not in name:
        l, lr, mask = arrays["logps"], arrays["ref_logps"], arrays["mask"]
        d = np.clip(np.where(mask, l - lr, 0), -30, 30).astype(np.float32)
        R = np.exp(np.clip(-d, -20, 5))
        with np.errstate(over="ignore"):  # what overflows is left out below
            k3_of_ratio = np.exp(R) - R - 1
        for mistake, kl in (
            ("kl_sign", -d),
            ("kl_direction", np.exp(d) - d - 1),
            ("kl_ratio_for_log_ratio", k3_of_ratio),
        ):
            kept = {k: v for k, v in arrays.items() if k != "dkl_dlogps"}
            if not np.isfinite(np.where(mask, kl, 0).astype(np.float32)).all():
                continue
            yield Planted(
                name, mistake, {**kept, "kl": np.where(mask, kl, 0).astype(np.float32)}, None, {}, True, True, is_loss=False
            )
    if entry["kind"] == "advantage" and entry["config"]["adv_estimator"] == "gae":
        gamma, lam = entry["config"]["gamma"], entry["config"]["lam"]
        mask, values, rewards = arrays["mask"], arrays["values"], arrays["rewards"]
        made = {}
        for mistake in (None, "score_on_wrong_token"):
            out = np.zeros(mask.shape, dtype=np.float32)
            for row in range(len(mask)):
                counted = np.flatnonzero(mask[row])
                following, after = 0.0, 0.0
                where = counted[-1] if mistake is None else mask.shape[1] - 1
                for t in reversed(counted):
                    delta = (rewards[row] if t == where else 0.0) + gamma * after - values[row, t]
                    following = delta + gamma * lam * following
                    after, out[row, t] = values[row, t], following
            made[mistake] = out
        if np.abs(made[None] - made["score_on_wrong_token"]).max() > 1e-4:
            kept = {k: v for k, v in arrays.items() if k not in ("token_level_rewards", "returns")}
            yield Planted(
                name,
                "score_on_wrong_token",
                {**kept, "advantages": made["score_on_wrong_token"]},
                None,
                {},
                True,
                True,
                is_loss=False,
            )
        raw = np.where(mask, made[None], 0)
        mean = raw.mean()
        std = math.sqrt((np.where(mask, raw - mean, 0) ** 2).sum() / mask.sum())
        kept = {k: v for k, v in arrays.items() if k not in ("returns", "values", "token_level_rewards")}
        yield Planted(
            name,
            "padding_in_whitening",
            {**kept, "advantages_raw": raw, "advantages": np.where(mask, (raw - mean) / (std + 1e-8), 0).astype(np.float32)},
            None,
            {},
            True,
            True,
            is_loss=False,
        )
