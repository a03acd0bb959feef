"""The audit on shipped captures and on mistakes planted into them."""

from __future__ import annotations

import unittest
from dataclasses import replace

import numpy as np

from extensions.audit import audit
from extensions.audit.proof import table
from extensions.audit.proof.plant_loss import Plant, naive_loss
from extensions.audit.proof.table import COLUMNS, all_plants, clean_problem, judge, measure, totals
from extensions.audit.proof.truth import CAPTURES, load, manifest, truth_of
from extensions.audit.read.recording import read_recording
from extensions.audit.say.report import Report
from extensions.audit.testing import audited
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)


class Captures(unittest.TestCase):
    """Clean recordings of real trainers are read right, and planted mistakes are named (a part of what --self-test runs)."""

    FILES = (
        "trl_grpo_grpo_pass2_cliphigher_beta_rho_kl",
        "trl_grpo_bnpo_accum2_mb1",
        "trl_grpo_gspo_wide_pass2_beta",
        "trl_dpo_robust",
        "verl_adv_gae_tool",
        "sb3_gae_terminate",
        "verl_loss_vanilla_seq_mean_token_sum.",
        "verl_value_loss_token_mean",
        "sb3_ppo_loss_ppo_two",
        "trl_rloo_accum2_mb0",
    )

    def entries(self):
        return [entry for entry in manifest() if entry["file"].startswith(self.FILES)]

    def test_clean_captures(self):
        self.assertEqual(len(self.entries()), len(self.FILES))
        for entry in self.entries():
            with self.subTest(entry["file"]):
                arrays = load(entry["file"])
                report = audit(read_recording(CAPTURES / entry["file"]))
                self.assertIsNone(clean_problem(entry, arrays, report, False))

    def test_the_planters_right_version_is_the_trainers(self):
        for entry in manifest():
            arrays = load(entry["file"])
            truth = truth_of(entry, arrays)
            if truth is None or "rho" in arrays:
                continue
            with self.subTest(entry["file"]):
                loss, gradient = naive_loss(Plant(truth, arrays))
                self.assertAlmostEqual(loss, float(arrays["loss"]), delta=2e-6)
                np.testing.assert_allclose(gradient, arrays["dloss_dlogps"], atol=2e-7)

    def test_planted_mistakes(self):
        plants = [p for p in all_plants(lambda file: file.startswith(self.FILES))]
        chosen = list({p.mistake: p for p in plants}.values())
        self.assertGreater(len(chosen), 35)
        for column, plants_here, bar in ((0, chosen[::3], 0.95), (1, chosen[1::6], 0.8)):
            scores = measure(iter(plants_here), COLUMNS[column : column + 1])
            (scores,) = scores.values()
            planted, named, wrong = totals(scores)
            self.assertGreaterEqual(
                named, bar * planted, {name: score.missed for name, score in scores.items() if score.missed}
            )
            self.assertEqual(wrong, 0, {name: score.wrong for name, score in scores.items() if score.wrong})

    def test_a_report_without_the_mistake_does_not_pass(self):
        # The broken twin of the judge: an audit that finds nothing must score 0.
        planted = next(
            p for p in all_plants(lambda file: "grpo_pass2." in file) if p.mistake == "ratio_detached"
        )
        original = table.audit
        table.audit = lambda *arguments: Report()
        try:
            self.assertEqual(judge(planted, True, True)[:2], (False, False))
        finally:
            table.audit = original
        self.assertEqual(judge(planted, True, True)[:2], (True, False))

    def test_more_confident_wrong_names_are_counted(self):
        planted = next(
            p for p in all_plants(lambda file: "grpo_pass2." in file) if p.mistake == "ratio_detached"
        )
        renamed = replace(planted, mistake="groups_pooled", names=())
        self.assertEqual(judge(renamed, True, True)[:2], (False, True))

    def test_rows_and_padding_in_any_order(self):
        arrays = load("trl_grpo_grpo_pass2.npz")
        order = np.random.default_rng(0).permutation(len(arrays["logps"]))
        per_row = {
            name
            for name, value in arrays.items()
            if value.ndim and len(value) == len(order) and not name.startswith("gen_") and name != "reward_weights"
        }
        mixed = {name: value[order] if name in per_row else value for name, value in arrays.items()}
        left = {
            name: value[:, ::-1] if name in per_row and value.shape == arrays["mask"].shape else value
            for name, value in mixed.items()
        }
        for batch in (mixed, left):
            report = audited(batch)
            self.assertEqual(report.loss["matches"][0]["reduction"], "mean_per_response")
            self.assertTrue(report.gradient["agrees"])
            self.assertEqual([f for f in report.findings if f.severity != "note"], [])

    def test_ties_are_said_and_what_decides_them(self):
        report = audit(read_recording(CAPTURES / "trl_grpo_grpo_scale_batch.npz"))
        self.assertTrue(any("every ratio is 1" in line for line in report.cannot_tell))
        self.assertIn("loss_zero_healthy", report.named())
        self.assertGreater(report.loss["tried"], 100)

    def test_rounding_is_judged_group_by_group(self):
        # A group whose rewards differ by 0.002 loses five digits in float32; its advantages are right all the same.
        rewards = np.array([1.0, 0.0, 3.0, 4.0, 0.912, 0.914, 0.913, 0.912], dtype=np.float32)
        groups = np.arange(8) // 4
        mean = np.array([rewards[groups == g].mean() for g in groups], dtype=np.float32)
        std = np.array([rewards[groups == g].std(ddof=1) for g in groups], dtype=np.float32)
        right = (rewards - mean) / (std + np.float32(1e-6))
        batch = {"rewards": rewards, "group_ids": groups, "mask": np.ones((8, 1), dtype=bool)}
        self.assertEqual(audited({**batch, "advantages": right}).named(), [])
        wrong = right.copy()
        wrong[0] += 1e-4  # in the group with spread this is no rounding
        self.assertEqual(audited({**batch, "advantages": wrong}).named(), ["not_reproduced"])

    def test_gradient_of_a_large_batch_is_confirmed_on_every_row(self):
        rng = np.random.default_rng(0)
        rows, width = 700, 100  # more slots than one part holds
        advantages = rng.choice((-1.0, 1.0), rows)
        logps = -rng.exponential(1.0, (rows, width)) - 0.01
        slope = -advantages[:, None] / (rows * width) * np.ones((rows, width))
        batch = {"logps": logps, "old_logps": logps, "advantages": advantages, "mask": np.ones((rows, width), dtype=bool)}
        batch |= {"loss": -advantages.mean(), "dloss_dlogps": slope}
        self.assertTrue(audited(batch).gradient["agrees"])
        slope[349:351] = 0.0  # not among the rows that are compared first
        report = audited(batch)
        self.assertIs(report.gradient["agrees"], False)
        (found,) = [f for f in report.findings if f.name == "gradient_differs_in_rows"]
        self.assertEqual(found.rows, (349, 350))

    def test_many_accidents_name_nothing(self):
        # No trainer made this number: 64 answers of many terms, a value, and every setting unknown.
        rng = np.random.default_rng(1)
        logps = -rng.exponential(1.0, (64, 40)) - 0.01
        batch = {"logps": logps, "mask": np.ones((64, 40), dtype=bool), "advantages": rng.standard_normal(64)}
        for name, size in (("old_logps", 0.3), ("ref_logps", 0.4)):
            batch[name] = np.minimum(logps + size * rng.standard_normal(logps.shape), -0.001)
        report = audited({**batch, "loss": 0.01234567})
        self.assertGreater(report.loss["expected_by_accident"], 10)
        self.assertEqual([f.name for f in report.findings if f.severity != "note"], ["value_decides_nothing"])

    def test_value_alone_reports_accidents(self):
        arrays = {k: v for k, v in load("trl_grpo_grpo_pass2.npz").items() if k != "dloss_dlogps"}
        report = audited(arrays)
        self.assertIsNone(report.gradient["agrees"])
        self.assertLess(report.loss["expected_by_accident"], 0.1)
        self.assertTrue(any(m.startswith("dloss_dlogps") for m in report.missing))
