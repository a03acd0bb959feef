"""The reading on losses made at random: constants off every list, put together by autograd from formulas written here.

Nothing of the audit makes a batch. Each drawn loss is one ratio, one clip, one weight of answers, one denominator and one KL;
the reading must give every constant back, and must say that it cannot where a term is outside everything it knows.
"""

from __future__ import annotations

import unittest

import numpy as np
import torch

from extensions.audit.read.recording import recording_from
from extensions.audit.reading import read_loss
from extensions.audit.testing import audited
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)

SOLVED = 2e-4  # relative: a constant that was solved from a float32 gradient
DRAWS = 24


def batch_of(rng: np.random.Generator, rows: int = 16, width: int = 12) -> dict:
    """Log-probabilities of a later pass, of a reference, advantages of groups of 4; float64, made-up numbers."""
    mask = np.arange(width) < rng.integers(2, width + 1, rows)[:, None]
    old = rng.uniform(-3.0, -0.1, (rows, width))
    logps = np.minimum(old + rng.normal(0, 0.25, old.shape), -1e-3)
    ref = np.minimum(logps + rng.normal(0, 0.4, old.shape), -1e-3)
    rewards = rng.uniform(0, 1, rows).round(2)
    groups = np.arange(rows) // 4
    centred = rewards - np.array([rewards[groups == g].mean() for g in groups])
    return {"logps": logps, "old_logps": old, "ref_logps": ref, "mask": mask, "advantages": centred, "rewards": rewards,
            "group_ids": groups}  # fmt: skip


class Drawn:
    """One loss: ratio, clip widths, weight of answers, denominator, KL and its coefficient. value(l) is what is minimised."""

    def __init__(self, rng: np.random.Generator, batch: dict):
        self.ratio = str(rng.choice(["token", "none", "sequence_mean"]))
        self.law = str(rng.choice(["equal", "1/T"]))
        self.low, self.high = rng.uniform(0.11, 0.24), rng.uniform(0.13, 0.33)
        self.kl = str(rng.choice(["none", "k2", "k3"]))
        self.coef = float(rng.uniform(0.003, 0.3))
        self.denominator = float(rng.uniform(3, 90))
        self.batch = {name: torch.tensor(value) for name, value in batch.items()}

    def value(self, l: torch.Tensor) -> torch.Tensor:
        b, m = self.batch, self.batch["mask"]
        A, n = b["advantages"].unsqueeze(1), m.sum(1, keepdim=True)
        gap = torch.where(m, l - b["old_logps"], 0.0)
        if self.ratio == "none":
            J = A * l
        else:
            r = (gap if self.ratio == "token" else gap.sum(1, keepdim=True) / n).exp().expand_as(l)
            J = torch.minimum(r * A, r.clamp(1 - self.low, 1 + self.high) * A)
        d = l - b["ref_logps"]
        kl = {"none": 0 * d, "k2": d * d / 2, "k3": torch.exp(-d) + d - 1}[self.kl]
        weight = 1.0 if self.law == "equal" else 1 / n
        return (torch.where(m, -J + (self.coef if self.kl != "none" else 0.0) * kl, 0.0) * weight).sum() / self.denominator


def recorded(batch: dict, loss_of, scale: float = 1.0) -> dict:
    leaf = torch.tensor(batch["logps"], requires_grad=True)
    value = loss_of(leaf) * scale
    (gradient,) = torch.autograd.grad(value, leaf)
    made = {**batch, "loss": value.item(), "dloss_dlogps": gradient.numpy()}
    return {name: x.astype(np.float32) if getattr(x, "dtype", None) == np.float64 else x for name, x in made.items()}


def read(arrays: dict):
    recording = recording_from({name: np.asarray(x) for name, x in arrays.items()})
    return read_loss(recording, recording.arrays["advantages"])


class DrawnLosses(unittest.TestCase):
    def test_constants_come_back(self):
        """1 / denominator, the KL's coefficient and the clip's edges of 24 drawn losses, none of them on a list."""
        rng, closed = np.random.default_rng(5), 0
        for draw in range(DRAWS):
            batch = batch_of(rng)
            loss = Drawn(rng, batch)
            got = read(recorded(batch, loss.value))
            with self.subTest(draw=draw, ratio=loss.ratio, law=loss.law, kl=loss.kl):
                self.assertTrue(got.complete, got.as_json())
                self.assertEqual((got.gate, got.row_law, got.sign), (loss.ratio, loss.law, 1))
                self.assertAlmostEqual(got.normaliser["value"] / loss.denominator, 1, delta=SOLVED)
                self.assertEqual(got.kl, None if loss.kl == "none" else loss.kl)
                if loss.kl != "none":
                    self.assertAlmostEqual(got.kl_coef / loss.coef, 1, delta=50 * SOLVED, msg="the KL is the smaller term")
                for x in got.closed:
                    edge = 1 + loss.high if x.above else 1 - loss.low
                    low, high = sorted((x.low, x.high))
                    self.assertTrue(low - 1e-4 <= edge <= high + 1e-4, f"{edge} not in {low}..{high}: {x.words()}")
                closed += len(got.closed)
        self.assertGreater(closed, DRAWS // 3, "the draws must show clips, else the brackets were not tested")

    def test_a_turned_sign_is_named_beside_unlisted_constants(self):
        """Two factors are read apart: the sign of the whole loss and a denominator that nothing recorded explains."""
        rng = np.random.default_rng(6)
        for draw in range(4):
            batch = batch_of(rng)
            loss = Drawn(rng, batch)
            turned = recorded(batch, loss.value, scale=-1.0)
            with self.subTest(draw=draw):
                self.assertEqual(read(turned).sign, -1)
                self.assertIn("loss_sign", [f.name for f in audited(turned).findings])

    def test_a_term_outside_everything_is_left_open(self):
        """+ 0.3 l^3 on every token: no gate, factor or KL form has it, so tokens stay unexplained and nothing is named."""
        rng = np.random.default_rng(7)
        for draw in range(3):
            batch = batch_of(rng)
            loss = Drawn(rng, batch)

            def strange(l):
                cubes = torch.where(loss.batch["mask"], l**3, 0.0).sum()
                return loss.value(l) + 0.3 * cubes / loss.denominator

            arrays = recorded(batch, strange)
            with self.subTest(draw=draw):
                self.assertFalse(read(arrays).complete)
                self.assertEqual([f.name for f in audited(arrays).findings if f.severity == "mistake"], [])

    def test_the_check_sees_a_wrong_reading(self):
        """Broken twin: read with old log-probabilities off by 0.01, no loss that has a ratio is complete."""
        rng = np.random.default_rng(8)
        for _ in range(6):
            batch = batch_of(rng)
            loss = Drawn(rng, batch)
            arrays = recorded(batch, loss.value)
            arrays["old_logps"] = arrays["old_logps"] + rng.normal(0, 0.01, batch["logps"].shape).astype(np.float32)
            if loss.ratio != "none":
                self.assertFalse(read(arrays).complete)
