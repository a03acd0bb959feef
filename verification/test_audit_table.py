"""Every row of the objectives table, evaluated by the engine on one batch, is named by the audit from its numbers alone."""

from __future__ import annotations

import unittest
from dataclasses import replace

import numpy as np
import torch

from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)
from extensions.audit import audit
from extensions.audit.read.recording import recording_from
from extensions.objectives import (
    CAPTURED_ROWS,
    LATER_ROWS,
    PREFERENCE_ROWS,
    ROWS,
    evaluate,
    evaluate_preference,
    make_batch,
    make_preferences,
)


class Table(unittest.TestCase):
    """A row counts as named where it stands among the matches that explain the numbers equally well."""

    LENGTHS = np.array([3, 9, 5, 7, 2, 6, 4, 8, 9, 2, 5, 6])

    def setUp(self):
        rng = np.random.default_rng(4)
        N, T = len(self.LENGTHS), 9
        self.mask = np.arange(T) < self.LENGTHS[:, None]

        def near(l: np.ndarray, by: float) -> np.ndarray:
            return np.minimum(l + by * rng.standard_normal((N, T)), -0.01)

        self.logps = near(-rng.exponential(1.2, (N, T)), 0.0)
        parts, weights = rng.random((N, 2)), np.array([1.0, 0.5])
        rewards, values = parts @ weights, rng.standard_normal((N, T))
        logits = rng.standard_normal((N, T, 5))
        self.always = {"logps": self.logps, "mask": self.mask, "rewards": rewards, "group_ids": np.arange(N) // 4}
        self.always |= {"old_logps": near(self.logps, 0.35)}
        self.needed = {"ref_logps": near(self.logps, 0.4), "rewards_per_func": parts, "reward_weights": weights}
        self.needed |= {"values": values, "vpreds": values + 0.4 * rng.standard_normal((N, T)), "returns": values + 1}
        self.needed |= {"entropies": rng.random((N, T)), "reward_baselines": 0.5 * rewards + 0.1}
        self.needed |= {"logits": logits, "ref_logits": logits + 0.3 * rng.standard_normal((N, T, 5))}
        self.needed |= {"advantages": rng.standard_normal(N), "sampler_logps": near(self.logps, 0.3)}
        self.needed |= {"sampler_weights": 1 + 0.2 * rng.random(N), "truncated": self.LENGTHS == 9}

    def test_rows_of_rollouts(self):
        tokens = float(self.mask.sum())
        for name, row in ROWS.items():
            if row.kl_in_loss and not row.kl_coef:
                row = replace(row, kl_coef=0.04)
            needs = {*row.needs, *(("values", "returns") if row.value_coef else ())}
            if row.reward_parts == "normalise_then_sum":
                needs |= {"rewards_per_func", "reward_weights"}
            given = self.always | {key: value for key, value in self.needed.items() if key in needs}
            made = evaluate(row, make_batch(**given, window_tokens=tokens, budget=16.0, dtype=torch.float64))
            recorded = given | {"num_items_in_batch": tokens, "budget": 16.0, "loss": made.loss.numpy()}
            recorded |= {"dloss_dlogps": made.dloss_dlogps.numpy(), "advantages": made.advantages.numpy()}
            recorded |= {"advantages_raw": given["advantages"]} if "advantages" in given else {}
            with self.subTest(name):
                report = audit(recording_from({key: np.asarray(value) for key, value in recorded.items()}))
                best = [m for m in report.loss["matches"] if m["by"] == report.loss["matches"][0]["by"]]
                if name not in CAPTURED_ROWS | LATER_ROWS:  # these use constants and corrections that the search has no list of
                    self.assertTrue(any(name in m["rows"] for m in best), best[:2])
                    self.assertTrue(any(name in m["rows"] for m in report.advantages["matches"]), report.advantages)
                self.assertEqual([f for f in report.findings if f.severity == "mistake"], [])

    def test_rows_of_pairs(self):
        for name, row in PREFERENCE_ROWS.items():
            smoothing = 0.1 if row.loss in ("cdpo", "robust", "exo") else row.label_smoothing
            row = replace(row, beta=0.1, label_smoothing=smoothing)
            recorded = {"logps": self.logps, "mask": self.mask}
            if row.reference == "used":
                recorded["ref_logps"] = self.needed["ref_logps"]
            sums = np.where(self.mask, self.logps, 0.0).sum(1)
            if row.of_labels:
                recorded |= {"labels": np.arange(len(sums)) % 2 == 0, "kl_seq_logps": sums, "ref_kl_seq_logps": sums - 0.1}
            made = evaluate_preference(row, make_preferences(**recorded, dtype=torch.float64))
            recorded |= {"loss": made.loss.numpy(), "dloss_dlogps": made.dloss_dlogps.numpy(), "beta": 0.1}
            if not row.of_labels:
                recorded |= dict(zip(("chosen_logps", "rejected_logps"), np.split(sums, 2)))
            with self.subTest(name):
                report = audit(recording_from({key: np.asarray(value) for key, value in recorded.items()}))
                best = [m for m in report.loss["matches"] if m["by"] == report.loss["matches"][0]["by"]]
                self.assertTrue(any(name in m["rows"] for m in best), best[:2])
                self.assertEqual([f for f in report.findings if f.severity == "mistake"], [])


if __name__ == "__main__":
    unittest.main()
