"""Ratios, surrogates, KL estimates and reductions: values by hand, and what tells neighbours apart."""

from __future__ import annotations

import math
import unittest
from dataclasses import replace

import numpy as np
import torch

import rl_lab
from extensions import objectives
from extensions.objectives import ROWS, evaluate, make_batch
from extensions.objectives.oracle import small_batch
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)


class SurrogatesAndKl(unittest.TestCase):
    def bandit(self, row: objectives.Row, ratios, advantages) -> objectives.Evaluation:
        """One token an answer, weight 1 each, at these ratios."""
        logps = torch.tensor(ratios, dtype=torch.float64).log()
        row = replace(
            row,
            baseline="given",
            scale="none",
            kl="none",
            kl_coef=0.0,
            group_filter="none",
            overlong="none",
            reduction="sum_over_tokens",
            value_loss="none",
        )
        return evaluate(
            row, make_batch(logps=logps - 1, old_logps=torch.full_like(logps, -1.0), advantages=np.array(advantages))
        )

    def test_clip_and_its_three_fractions(self):
        """r = 1.5, .5, 1.5, .5; A = 1, -1, -1, 1: J = 1.2, -.8, -1.5, .5, gradient 0, 0, 1.5, -.5. All four ratios are
        outside, two took the clipped branch. With A = 0 added: the gradient is 0 without any clip."""
        result = self.bandit(ROWS["grpo"], [1.5, 0.5, 1.5, 0.5, 1.0], [1.0, -1, -1, 1, 0])
        torch.testing.assert_close(-result.token_losses[:4, 0], torch.tensor([1.2, -0.8, -1.5, 0.5], dtype=torch.float64))
        torch.testing.assert_close(result.dloss_dlogps[:, 0], torch.tensor([0, 0, 1.5, -0.5, 0], dtype=torch.float64))
        self.assertEqual(result.flat[:, 0].tolist(), [True, True, False, False, False])
        fractions = result.ratio_outside_fraction, result.clipped_branch_fraction, result.zero_gradient_fraction
        self.assertEqual(fractions, (0.8, 0.4, 0.6))

    def test_cispo_clips_without_losing_a_gradient(self):
        """Weights clip(r) = 1.2 and 0.8 and 1: gradient -w A; two clipped branches, no zero gradient, nothing flat."""
        row = replace(ROWS["cispo"], clip_low=0.2, clip_high=0.2)
        result = self.bandit(row, [1.5, 0.5, 1.1], [1.0, -1, 1])
        torch.testing.assert_close(result.dloss_dlogps[:, 0], torch.tensor([-1.2, 0.8, -1.1], dtype=torch.float64))
        self.assertAlmostEqual(result.clipped_branch_fraction, 2 / 3)
        self.assertEqual((result.zero_gradient_fraction, int(result.flat.sum())), (0.0, 0))

    def test_cispo_of_trl_left_at_its_default(self):
        """epsilon_high = 0.2 without 1 +: every on-policy weight is 0.2, the gradient a fifth of dapo's."""
        batch = make_batch(
            logps=np.full((2, 2), -1.0), mask=np.ones((2, 2), dtype=bool), rewards=np.array([1.0, 0.0]), group_ids=[0, 0]
        )
        fifth = evaluate(ROWS["cispo@trl-1.16.0"], batch).dloss_dlogps
        torch.testing.assert_close(fifth * 5, evaluate(ROWS["dapo@trl-1.16.0"], batch).dloss_dlogps)

    def test_dual_clip(self):
        """r = 1, 5; A = 1, -1; c = 3: losses -1 and 3; flat beyond c. TRL's delta is the same while delta > 1 + high, and a
        smaller one lowers the top of A > 0."""
        result = self.bandit(ROWS["dual_clip"], [1.0, 5.0], [1.0, -1.0])
        self.assertEqual(result.token_losses[:, 0].tolist(), [-1.0, 3.0])
        self.assertEqual(result.dloss_dlogps[:, 0].tolist(), [-1.0, 0.0])
        ratios, advantages = [0.3, 0.9, 1.25, 2.0, 5.0] * 2, [1.0] * 5 + [-1.0] * 5
        dual, capped = (
            self.bandit(replace(ROWS["grpo"], surrogate=name), ratios, advantages) for name in ("dual_clip", "capped_clip")
        )
        torch.testing.assert_close(dual.dloss_dlogps, capped.dloss_dlogps)
        below = self.bandit(replace(ROWS["grpo"], surrogate="capped_clip", ratio_cap=1.1), [1.15, 1.15], [1.0, -1.0])
        torch.testing.assert_close(below.token_losses[:, 0], torch.tensor([-1.1, 1.15], dtype=torch.float64))
        wide = self.bandit(replace(ROWS["grpo"], surrogate="dual_clip", ratio_cap=1e9), ratios, advantages)
        torch.testing.assert_close(wide.dloss_dlogps, self.bandit(ROWS["grpo"], ratios, advantages).dloss_dlogps)

    def test_clip_higher(self):
        """low 0.2, high 0.28; r = 1.25 with A = 1 and r = 0.75 with A = -1: losses -1.25 and 0.8; exchanged: -1.2, 0.75."""
        result = self.bandit(ROWS["dapo"], [1.25, 0.75], [1.0, -1.0])
        torch.testing.assert_close(result.token_losses[:, 0], torch.tensor([-1.25, 0.8], dtype=torch.float64))

    def test_sapo(self):
        """At r = 1: value 2 / tau (2 and 1.90476), slope A. Beyond: 4 p (1 - p) r A, never 0."""
        result = self.bandit(ROWS["sapo"], [1.0, 1.0, 3.0], [1.0, -1.0, 1.0])
        p = 1 / (1 + math.exp(-2.0))
        wanted = torch.tensor([-2.0, 2 / 1.05, -4 * p], dtype=torch.float64)
        torch.testing.assert_close(result.token_losses[:, 0], wanted)
        torch.testing.assert_close(
            result.dloss_dlogps[:, 0], torch.tensor([-1.0, 1.0, -4 * p * (1 - p) * 3], dtype=torch.float64)
        )

    def test_vespo_cuts_its_logarithms(self):
        """Token log-ratios 30 and -45 are cut to 20 and -20, their sum to 0: weight exp(lam - lam) = 1. A sum below log 1e-8 is
        cut there: w = 1e-8, weight w^2 exp(3 - 3e-8) = 2.0e-15 with k 2 and lam 3."""
        row = replace(ROWS["vespo@trl-1.16.0"], baseline="given", scale="none", reduction="sum_over_tokens")
        for ratios, weight in (([30.0, -45.0], 1.0), ([-19.0, -19.0], 1e-16 * math.exp(3 - 3e-8)), ([25.0, 0.0], 0.0)):
            batch = make_batch(
                logps=[[-50.0 + r for r in ratios]], old_logps=[[-50.0, -50.0]], mask=[[True, True]], advantages=[1.0],
                dtype=torch.float64,
            )  # fmt: skip
            slope = evaluate(row, batch).dloss_dlogps
            torch.testing.assert_close(slope, torch.full_like(slope, -weight), rtol=1e-12, atol=0)

    def test_gspo_forms_agree_while_the_advantage_is_one_per_answer(self):
        batch = small_batch()
        for low, high in ((3e-4, 4e-4), (0.2, 0.2), (5.0, 5.0)):
            first, second = (
                evaluate(replace(ROWS[name], clip_low=low, clip_high=high), batch) for name in ("gspo", "gspo_token")
            )
            self.assertAlmostEqual(first.loss.item(), second.loss.item(), 13)
            torch.testing.assert_close(first.dloss_dlogps, second.dloss_dlogps)
        given = {"baseline": "given", "scale": "none", "clip_low": 5.0, "clip_high": 5.0}
        first, second = (evaluate(replace(ROWS[name], **given), batch) for name in ("gspo", "gspo_token"))
        self.assertGreater((first.dloss_dlogps - second.dloss_dlogps).abs().max().item(), 1e-4)

    def test_ratio_levels(self):
        """Token ratios 2, 0.5, 1.5: geometric mean 1.5^(1/3), product 1.5."""
        batch = make_batch(
            logps=np.log([[2.0, 0.5, 1.5]]) - 2,
            old_logps=np.full((1, 3), -2.0),
            mask=np.ones((1, 3), dtype=bool),
            advantages=np.array([1.0]),
        )
        row = replace(ROWS["gspo"], baseline="given", scale="none")
        self.assertAlmostEqual(evaluate(row, batch).ratios[0, 1].item(), 1.5 ** (1 / 3), 12)
        self.assertAlmostEqual(evaluate(replace(row, ratio="sequence_product"), batch).ratios[0, 1].item(), 1.5, 12)

    def test_without_old_logps_it_is_a_first_pass(self):
        batch = replace(small_batch(), old_logps=None)
        result = evaluate(ROWS["grpo@trl-1.16.0"], batch)
        self.assertTrue((result.ratios[batch.mask] == 1).all())
        self.assertAlmostEqual(result.loss.item(), 0.0, 12)  # centred advantages, each answer one share
        self.assertGreater(result.dloss_dlogps.norm().item(), 0.1)

    def test_kl_estimators_in_value_and_gradient(self):
        """Exact expectations over 5 actions sampled from the policy, samples held fixed. Value: k1 and k3 give
        KL(pi || ref). Gradient: k1 gives 0, k2 that of KL(pi || ref), k3 that of KL(ref || pi). With the weight ratio,
        k1 and k3 give that of KL(pi || ref)."""
        z = torch.tensor([0.3, -0.4, 0.8, 0.1, -1.0], dtype=torch.float64).requires_grad_()
        ref = torch.tensor([0.5, 0.2, -0.3, -0.1, 0.4], dtype=torch.float64)
        forward, backward = rl_lab.categorical_kl(z, ref), None
        (to_reference,) = torch.autograd.grad(forward, z)
        q, p = ref.softmax(0), z.softmax(0).detach()
        backward = (q * (ref.log_softmax(0) - z.log_softmax(0))).sum()
        (from_reference,) = torch.autograd.grad(backward, z)
        jacobian = torch.eye(5, dtype=torch.float64) - p  # d log p_a / d z_b, rows a

        def expected(kl: str, weight: str = "none") -> tuple[float, torch.Tensor]:
            row = replace(
                ROWS["grpo"],
                baseline="given",
                scale="none",
                kl=kl,
                kl_coef=1.0,
                kl_weight=weight,
                reduction="sum_over_tokens",
            )
            batch = make_batch(logps=p.log(), ref_logps=ref.log_softmax(0), advantages=torch.zeros(5, dtype=torch.float64))
            result = evaluate(row, batch)
            return (p * result.kl[:, 0]).sum().item(), (p * result.dloss_dlogps[:, 0]) @ jacobian

        for kl in ("k1", "k3"):
            self.assertAlmostEqual(expected(kl)[0], forward.item(), 12)
        self.assertNotAlmostEqual(expected("k2")[0], forward.item(), 2)
        for kl, weight, gradient in (
            ("k1", "none", 0 * to_reference),
            ("k2", "none", to_reference),
            ("k3", "none", from_reference),
            ("k1", "ratio", to_reference),
            ("k3", "ratio", to_reference),
        ):
            torch.testing.assert_close(expected(kl, weight)[1], gradient, rtol=1e-10, atol=1e-12, msg=f"{kl} {weight}")

    def test_limits_of_the_kl(self):
        """verl: logarithm cut at 20, value at 10, both without gradient beyond; d = -3: e^3 - 4 = 16.1 is cut to 10."""
        row = ROWS["grpo_kl@verl-0.9.1"]
        kl, slope = objectives.kl_estimate(row, torch.tensor([-3.0, -1.0, -50.0]), torch.zeros(3))
        torch.testing.assert_close(kl, torch.tensor([10.0, math.e - 2, 10.0]))
        torch.testing.assert_close(slope, torch.tensor([0.0, 1 - math.e, 0.0]))

    def test_extremes_stay_finite(self):
        """A ratio that would overflow: the clip is flat, its gradient 0 and not NaN."""
        result = self.bandit(ROWS["grpo"], [1.0, 1.0], [1.0, 1.0])
        far = evaluate(
            replace(ROWS["bnpo"], baseline="given", scale="none"),
            make_batch(logps=np.array([0.0, -1e4]), old_logps=np.array([-1e4, 0.0]), advantages=np.array([1.0, -1.0])),
        )
        self.assertTrue(far.dloss_dlogps.isfinite().all() and far.loss.isfinite())
        self.assertEqual(far.flat[:, 0].tolist(), [True, True])
        self.assertEqual(result.dloss_dlogps[:, 0].tolist(), [-1.0, -1.0])


class Reductions(unittest.TestCase):
    def test_the_guides_case(self):
        """A = +1, -1; 2 and 3 tokens; ratio 1; losses -2/2 and 3/3: 0; (-2 + 3)/5 = 0.2; (-2 + 3)/2 = 0.5; /3 = 1/6; 1."""
        batch = make_batch(
            logps=np.full((2, 3), -1.0),
            mask=np.array([[1, 1, 0], [1, 1, 1]]) != 0,
            advantages=np.array([1.0, -1.0]),
            budget=3,
        )
        row = replace(ROWS["bnpo"], baseline="given", scale="none")
        for reduction, wanted in (
            ("mean_per_response", 0.0),
            ("mean_over_tokens", 0.2),
            ("mean_over_window", 0.2),
            ("sum_per_response", 0.5),
            ("sum_over_budget", 1 / 6),
            ("sum_over_width", 1 / 6),
            ("sum_over_tokens", 1.0),
        ):
            self.assertAlmostEqual(evaluate(replace(row, reduction=reduction), batch).loss.item(), wanted, 14, reduction)

    def test_one_token_answers_make_all_means_equal(self):
        batch = make_batch(
            logps=np.log([0.6, 0.3, 0.9]), old_logps=np.log([0.5, 0.5, 0.5]), advantages=np.array([1.0, -2.0, 0.5])
        )
        row = replace(ROWS["bnpo"], baseline="given", scale="none")
        means = ("mean_per_response", "mean_over_tokens", "mean_over_window", "sum_per_response", "sum_over_width")
        losses = {round(evaluate(replace(row, reduction=name), batch).loss.item(), 14) for name in means}
        self.assertEqual(len(losses), 1)

    def test_micro_batches_of_a_window_add_up(self):
        """TRL dapo: two micro-batches, each over the window's tokens, sum to the loss of the whole; bnpo's do not."""
        whole = small_batch()
        result = evaluate(ROWS["dapo@trl-1.16.0"], whole)

        def parts(name: str) -> float:
            total = 0.0
            for rows in (torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5])):
                part = make_batch(
                    **{n: getattr(whole, n)[rows] for n in ("logps", "old_logps", "mask", "rewards", "group_ids")},
                    num_items_in_batch=22,
                    accumulation_steps=2,
                    steps_per_generation=2,
                )
                total += evaluate(ROWS[name], part).loss.item()
            return total

        self.assertAlmostEqual(parts("dapo@trl-1.16.0"), result.loss.item(), 13)
        self.assertGreater(abs(parts("bnpo@trl-1.16.0") - result.loss.item()), 1e-3)

    def test_a_row_without_tokens(self):
        """TRL counts it in B, verl does not: 1/2 or 1 of the loss of the other row."""
        batch = make_batch(
            logps=np.full((2, 2), -1.0),
            mask=np.array([[True, True], [False, False]]),
            advantages=np.array([1.0, 1.0]),
            allow_empty_rows=True,
        )
        row = replace(ROWS["grpo"], baseline="given", scale="none", kl="none")
        self.assertEqual(evaluate(row, batch).loss.item(), -0.5)
        self.assertEqual(evaluate(replace(row, rows_counted="nonempty"), batch).loss.item(), -1.0)
        with self.subTest("and where a filter leaves only rows without tokens, it is said"):
            batch = make_batch(
                logps=np.full((4, 1), -1.0),
                mask=np.array([[True], [True], [False], [False]]),
                rewards=np.array([1.0, 1.0, 1.0, 0.0]),
                group_ids=[0, 0, 1, 1],
                allow_empty_rows=True,
            )
            with self.assertRaisesRegex(ValueError, "'mean_over_tokens' divides by 0: no row that is left"):
                evaluate(replace(ROWS["dapo"], overlong="none"), batch)

    def test_no_budget(self):
        batch = replace(small_batch(), budget=None)
        with self.assertRaisesRegex(ValueError, "no budget"):
            evaluate(ROWS["dr_grpo@trl-1.16.0"], batch)


if __name__ == "__main__":
    unittest.main()
