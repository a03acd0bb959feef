"""Mistakes planted into the loss of pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Iterator

import numpy as np
import torch

from extensions.audit.declared import Declared
from extensions.audit.proof.plant_loss import NEEDS_DECLARED, Planted, _differs
from extensions.audit.search.masks import shifted
from extensions.objectives import PREFERENCE_ROWS


# ---- pairs


def naive_pair_loss(kind: str, l, mask, lr, beta: float, mistake: str | None, e: float) -> torch.Tensor:
    """A preference loss as a trainer writes it. l (2P, T) with gradient."""
    m = mask.float()
    if kind == "dpo_mean" or kind == "ipo_mean":
        score = lambda x: (x * m).sum(1) / m.sum(1)  # noqa: E731
    else:
        score = lambda x: (x * m).sum(1)  # noqa: E731
    reference = score(lr)
    if mistake == "reference_missing":
        reference = torch.zeros_like(reference)
    if mistake == "reference_live":
        reference = score(l.detach())
    u, v = (score(l) - reference).chunk(2)
    if mistake == "chosen_rejected_exchanged":
        u, v = v, u
    if mistake == "beta_twice":
        beta = beta * beta
    z = beta * (u - v)
    log = torch.nn.functional.logsigmoid
    if kind in ("dpo", "dpo_mean"):
        losses = -log(z)
    elif kind in ("ipo", "ipo_mean"):
        losses = (u - v - 1 / (2 * beta)) ** 2
    elif kind == "hinge":
        losses = torch.relu(1 - z)
    elif kind == "robust":
        losses = (-(1 - e) * log(z) + e * log(-z)) / (1 - 2 * e)
    elif kind == "cdpo":
        right, flipped = (e, 1 - e) if mistake == "smoothing_reversed" else (1 - e, e)
        losses = -right * log(z) - flipped * log(-z)
    else:
        raise ValueError(kind)
    return losses.sum() if mistake == "sum_for_mean" else losses.mean() / (2 if mistake == "extra_division" else 1)


def pair_plants(entry: dict, arrays: dict) -> Iterator[Planted]:
    """Mistakes of pairs on the log-probabilities of one DPO capture; the objective is DPO, IPO or cDPO in turn."""
    if entry["kind"] != "dpo" or "first_step" in entry["file"] or "ld_alpha" in entry["file"]:
        return
    mask = torch.as_tensor(arrays["mask"])
    noise = np.random.default_rng(9)
    pad = -noise.exponential(1.0, mask.shape).astype(np.float32)
    l_all = torch.as_tensor(np.where(arrays["mask"], arrays["logps"], pad).astype(np.float32))
    lr = torch.as_tensor(
        np.where(arrays["mask"], arrays["ref_logps"], pad - 0.2 * noise.random(mask.shape)).astype(np.float32)
    )
    beta, e = float(arrays["beta"]), 0.1
    P = len(mask) // 2

    def loss_of(kind: str, mistake: str | None, used=mask) -> tuple[float, np.ndarray]:
        l = l_all.clone().requires_grad_()
        loss = naive_pair_loss(
            kind, torch.where(used, l, torch.zeros(())), used, torch.where(used, lr, torch.zeros(())), beta, mistake, e
        )
        (gradient,) = torch.autograd.grad(loss, l)
        return float(loss.detach()), gradient.numpy()

    def planted(mistake: str, declared: str, made, right, needs_declared=False, names=()) -> Iterator[Planted]:
        value, gradient = _differs(made, right, abs(right[0]))
        if not (value or gradient):
            return
        out = {
            "logps": l_all.numpy(),
            "ref_logps": lr.numpy(),
            "mask": arrays["mask"],
            "beta": np.float64(beta),
            "loss": np.float32(made[0]),
            "dloss_dlogps": made[1],
        }
        sums = torch.where(mask, l_all, torch.zeros(())).sum(1).numpy()
        ref = torch.where(mask, lr, torch.zeros(())).sum(1).numpy()
        out |= {
            "chosen_logps": sums[:P],
            "rejected_logps": sums[P:],
            "ref_chosen_logps": ref[:P],
            "ref_rejected_logps": ref[P:],
        }
        row = replace(PREFERENCE_ROWS[declared], beta=beta)
        yield Planted(
            entry["file"][:-4],
            mistake,
            out,
            Declared(row),
            {},
            value,
            gradient,
            needs_declared or mistake in NEEDS_DECLARED,
            names=names,
        )

    right = loss_of("dpo", None)
    for mistake in (
        "chosen_rejected_exchanged",
        "reference_missing",
        "reference_live",
        "beta_twice",
        "sum_for_mean",
        "extra_division",
    ):
        yield from planted(mistake, "dpo", loss_of("dpo", mistake), right)
    yield from planted("dpo_mean_for_sum", "dpo", loss_of("dpo_mean", None), right, True)
    yield from planted("ipo_sum_or_mean", "ipo", loss_of("ipo_mean", None), loss_of("ipo", None), True)
    yield from planted("ipo_sum_or_mean", "ipo_mean", loss_of("ipo", None), loss_of("ipo_mean", None), True)
    yield from planted("preference_loss_differs", "ipo", right, loss_of("ipo", None), True)
    yield from planted("smoothing_variant", "cdpo", loss_of("robust", None), loss_of("cdpo", None), True)
    yield from planted("smoothing_reversed", "cdpo", loss_of("cdpo", "smoothing_reversed"), loss_of("cdpo", None))
    array = arrays["mask"]
    last = array & (np.cumsum(array[:, ::-1], axis=1)[:, ::-1] == 1)
    for mistake, used in (
        ("padding_counted", np.ones_like(array)),
        ("mask_one_step_late", shifted(array, 1)),
        ("mask_one_step_early", shifted(array, -1)),
        ("eos_dropped", array & ~last),
    ):
        if used.any(1).all():
            yield from planted(mistake, "dpo", loss_of("dpo", None, torch.as_tensor(used)), right)
