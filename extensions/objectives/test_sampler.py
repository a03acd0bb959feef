"""Corrections between sampler and trainer, selections of tokens, smaller terms: numbers by hand, and where they act."""

from __future__ import annotations

import math
import unittest
from dataclasses import replace

import numpy as np
import torch

from extensions import objectives
from extensions.objectives import ROWS, evaluate, make_batch
from extensions.objectives.oracle import small_batch
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)

PLAIN = replace(
    ROWS["grpo"], name="plain", baseline="given", scale="none", kl="none", kl_coef=0.0, reduction="mean_over_tokens"
)


def batch_of(weights, advantages=(1.0, 1.0), **more) -> objectives.Batch:
    """Two answers of two tokens; r = 1 everywhere, w = exp(old - sampler) as given."""
    logps = np.full((2, 2), -1.0)
    sampler = logps - np.log(np.array(weights))
    return make_batch(
        logps=logps, mask=np.ones((2, 2), dtype=bool), sampler_logps=sampler, advantages=list(advantages), **more
    )


class SamplerCorrection(unittest.TestCase):
    W = [[2.0, 0.5], [1.5, 1.2]]

    def gradient(self, **choices) -> list[float]:
        """-4 times the gradient: the weight of each of the four tokens."""
        result = evaluate(replace(PLAIN, **choices), batch_of(self.W))
        return [round(x, 12) + 0.0 for x in (-4 * result.dloss_dlogps).flatten().tolist()]

    def test_levels_and_bounds(self):
        """Token 2, .5, 1.5, 1.2; product 1 and 1.8; geometric mean 1 and sqrt(1.8); capped at 1.4, floored at .8."""
        root = round(math.sqrt(1.8), 12)
        bounds = {"sampler_low": 0.8, "sampler_high": 1.4}
        for wanted, choices in (
            ([2.0, 0.5, 1.5, 1.2], {"sampler_correction": "token"}),
            ([1.0, 1.0, 1.8, 1.8], {"sampler_correction": "product"}),
            ([1.0, 1.0, root, root], {"sampler_correction": "geometric"}),
            ([1.4, 0.5, 1.4, 1.2], {"sampler_correction": "token", "sampler_bound": "capped", **bounds}),
            ([2.0, 0.8, 1.5, 1.2], {"sampler_correction": "token", "sampler_bound": "floored", **bounds}),
            ([1.4, 0.8, 1.4, 1.2], {"sampler_correction": "token", "sampler_bound": "banded", **bounds}),
            ([1.0, 1.0, 1.4, 1.4], {"sampler_correction": "product", "sampler_bound": "capped", **bounds}),
        ):
            with self.subTest(**choices):
                self.assertEqual(self.gradient(**choices), wanted)

    def test_given_weights(self):
        for given, wanted in (([2.0, 3.0], [[2.0, 2.0], [3.0, 3.0]]), (self.W, self.W)):
            result = evaluate(replace(PLAIN, sampler_correction="given"), batch_of(self.W, sampler_weights=given))
            torch.testing.assert_close(-4 * result.dloss_dlogps, torch.tensor(wanted, dtype=torch.float64))

    def test_dropping_counts_or_leaves(self):
        """Ratio outside [.8, 1.3]: tokens 2, .5 and 1.5 go. Counted they leave 1/4 for the fourth, left out all of it."""
        drop = {"sampler_drop": "ratio", "sampler_drop_low": 0.8, "sampler_drop_high": 1.3}
        self.assertEqual(self.gradient(**drop), [0.0, 0.0, 0.0, 1.0])
        self.assertEqual(self.gradient(**drop, sampler_dropped="left_out"), [0.0, 0.0, 0.0, 4.0])
        self.assertEqual(self.gradient(**drop, sampler_correction="token"), [0.0, 0.0, 0.0, 1.2])
        # answers: geometric means 1 and 1.34, products 1 and 1.8
        self.assertEqual(self.gradient(**drop, sampler_drop_level="mean"), [1.0, 1.0, 0.0, 0.0])
        self.assertEqual(self.gradient(**drop | {"sampler_drop_high": 1.9}, sampler_drop_level="sum"), [1.0] * 4)
        self.assertEqual(self.gradient(**drop | {"sampler_drop_high": 1.6}, sampler_drop_level="worst"), [0.0, 0.0, 1.0, 1.0])

    def test_padding_drops_no_answer(self):
        """Ratios 1.2 | padding and 1.2, 1.2 against a band [1.1, 1.3]: padding, whose ratio would be 1, is no worst token."""
        logps = np.full((2, 2), -1.0)
        batch = make_batch(
            logps=logps, sampler_logps=logps - math.log(1.2), mask=[[True, False], [True, True]], advantages=[1.0, 1.0]
        )
        for level in ("token", "mean", "worst"):
            row = replace(PLAIN, sampler_drop="ratio", sampler_drop_level=level, sampler_drop_low=1.1, sampler_drop_high=1.3)
            got = evaluate(row, batch).dloss_dlogps * -3
            torch.testing.assert_close(got, batch.mask.double(), msg=level)

    def test_measures(self):
        """d = log 2: k1 -0.693, k2 0.240, k3 2 - 1 - 0.693 = 0.307, |p0 - ps| = e^-1 - e^-1 / 2 = 0.184. Each by a hair."""
        d, p0 = math.log(2.0), math.exp(-1.0)
        for measure, x in (("k1", -d), ("k2", d * d / 2), ("k3", 1 - d), ("tv", p0 / 2), ("ratio", 2.0)):
            for edge, kept in ((1e-9, True), (-1e-9, False)):
                row = replace(PLAIN, sampler_drop=measure, sampler_drop_high=x + edge)
                gradient = evaluate(row, batch_of([[2.0, 2.0], [2.0, 2.0]])).dloss_dlogps
                self.assertEqual(bool(gradient.any()), kept, (measure, edge))

    def test_inside_and_outside_the_kl(self):
        """w = 2 everywhere: the policy term doubles always, the KL only with sampler_place loss."""
        more = {"ref_logps": np.full((2, 2), -1.3)}
        row = replace(PLAIN, kl="k1", kl_coef=0.1, sampler_correction="token")
        plain = evaluate(replace(row, sampler_correction="none"), batch_of([[2.0] * 2] * 2, **more))
        for place, factor in (("policy", 1), ("loss", 2)):
            result = evaluate(replace(row, sampler_place=place), batch_of([[2.0] * 2] * 2, **more))
            self.assertAlmostEqual(result.policy_loss.item(), 2 * plain.policy_loss.item(), 12)
            self.assertAlmostEqual(result.kl_loss.item(), factor * plain.kl_loss.item(), 12)

    def test_what_is_missing_is_named(self):
        for choices, name in (
            ({"sampler_correction": "token"}, "sampler_logps"),
            ({"sampler_correction": "given"}, "sampler_weights"),
            ({"sampler_drop": "tv"}, "sampler_logps"),
        ):
            row = replace(PLAIN, **choices)
            self.assertIn(name, row.needs)
            batch = make_batch(logps=[[-1.0]], mask=[[True]], advantages=[1.0])
            with self.assertRaisesRegex(ValueError, f"no {name}"):
                evaluate(row, batch)


class Selections(unittest.TestCase):
    def chosen(self, rule: str, **more) -> list[bool]:
        logps = torch.tensor([[-1.0, -2.0, -3.0, -4.0]], dtype=torch.float64)
        batch = make_batch(
            logps=logps,
            mask=[[True] * 4],
            entropies=[[0.1, 0.4, 0.3, 0.2]],
            advantages=torch.tensor([[1.0, -1.0, 2.0, -2.0]], dtype=torch.float64),
            selected_tokens=[[True, False, False, True]],
        )
        row = replace(PLAIN, token_selection=rule, **more)
        return (evaluate(row, batch).dloss_dlogps != 0)[0].tolist()

    def test_rules(self):
        """Entropies .1 .4 .3 .2; covariances A (l + 2.5) = 1.5, -0.5, -1, 3 (mean A is 0)."""
        self.assertEqual(self.chosen("top_entropy", selected_share=0.5), [False, True, True, False])
        self.assertEqual(self.chosen("top_covariance", selected_share=0.25), [False, False, False, True])
        self.assertEqual(self.chosen("top_covariance", selected_share=0.0), [False, False, False, True])  # at least one
        self.assertEqual(self.chosen("outside_covariance", covariance_low=1.0, covariance_high=2.0), [False, True, True, True])
        self.assertEqual(self.chosen("given"), [True, False, False, True])

    def test_kl_cov(self):
        """|l - l0| on the quarter with the largest covariance alone: the fourth token, coef 0.5, a mean over 4 tokens."""
        logps = torch.tensor([[-1.0, -2.0, -3.0, -4.0]], dtype=torch.float64)
        given = torch.tensor([[1.0, -1.0, 2.0, -2.0]], dtype=torch.float64)
        batch = make_batch(logps=logps, old_logps=logps - 0.2, mask=[[True] * 4], advantages=given)
        row = replace(PLAIN, surrogate="plain", kl="abs", kl_anchor="old", kl_coef=0.5, kl_tokens="top_covariance",
            selected_share=0.25)  # fmt: skip
        self.assertAlmostEqual(evaluate(row, batch).kl_loss.item(), 0.5 * 0.2 / 4, 12)

    def test_answers_that_were_cut_off(self):
        """overlong "mask": the tokens of a cut answer leave, its row stays: a mean over two rows, of which one is empty."""
        batch = replace(batch_of([[1.0] * 2] * 2), truncated=torch.tensor([False, True]))
        row = replace(PLAIN, overlong="mask", reduction="mean_per_response")
        self.assertEqual(evaluate(row, batch).dloss_dlogps.tolist(), [[-0.25, -0.25], [0.0, 0.0]])
        self.assertEqual(evaluate(replace(row, rows_counted="nonempty"), batch).dloss_dlogps[0].tolist(), [-0.5, -0.5])


class SmallerTerms(unittest.TestCase):
    def test_nll_of_good_answers(self):
        """Two good tokens with l = -1, coef 0.4: + 0.4 * 1, gradient -0.2 on each; nothing without a good answer."""
        for nll in ("positive_advantage", "positive_reward"):
            row = replace(PLAIN, nll=nll, nll_coef=0.4)
            batch = batch_of([[1.0] * 2] * 2, advantages=(1.0, -1.0), rewards=[1.0, 0.0])
            with_nll, without = evaluate(row, batch), evaluate(replace(row, nll="none"), batch)
            self.assertAlmostEqual(with_nll.nll_loss.item(), 0.4, 12)
            wanted = [[-0.2, -0.2], [0.0, 0.0]]
            torch.testing.assert_close(
                with_nll.dloss_dlogps - without.dloss_dlogps, torch.tensor(wanted, dtype=torch.float64)
            )
            bad = batch_of([[1.0] * 2] * 2, advantages=(-1.0, -1.0), rewards=[0.0, 0.0])
            self.assertEqual(evaluate(row, bad).nll_loss.item(), 0.0)

    def test_entropy_per_answer(self):
        """Lengths 1 and 3, entropies 3 | 1 1 1: mean per answer (3 + 1) / 2 = 2, over tokens 6 / 4 = 1.5; loss -= 0.1 of it."""
        batch = make_batch(
            logps=np.full((2, 3), -1.0), mask=[[True, False, False], [True] * 3], advantages=[0.0, 0.0],
            entropies=[[3.0, 7.0, 7.0], [1.0] * 3],
        )  # fmt: skip
        row = replace(PLAIN, entropy_coef=0.1, reduction="mean_per_response")
        for reduction, wanted in (("same", -0.2), ("mean_over_tokens", -0.15), ("sum_over_tokens", -0.6)):
            self.assertAlmostEqual(evaluate(replace(row, entropy_reduction=reduction), batch).entropy_loss.item(), wanted, 12)

    def test_mean_per_prompt_and_total_over_width(self):
        """Prompts of 3 + 1 and 2 tokens: weights 1/2 * 1/4 and 1/2 * 1/2; width 3: 1/3 for every token."""
        mask = torch.arange(3) < torch.tensor([[3], [1], [2]])
        batch = make_batch(logps=-np.ones((3, 3)), mask=mask, group_ids=[5, 5, 2], advantages=[1.0] * 3)
        weights = objectives.reduction_weights(PLAIN, batch, "mean_per_prompt")[:, 0].tolist()
        self.assertEqual(weights, [0.125, 0.125, 0.25])
        torch.testing.assert_close(
            objectives.reduction_weights(PLAIN, batch, "total_over_width"), torch.full((3, 1), 1 / 3, dtype=torch.float64)
        )
        mask = torch.tensor([[True, True], [False, False], [True, False]])
        empty = make_batch(logps=-np.ones((3, 2)), mask=mask, group_ids=[0, 1, 2], advantages=[1.0] * 3, allow_empty_rows=True)
        weights = objectives.reduction_weights(PLAIN, empty, "mean_per_prompt")[:, 0].tolist()
        self.assertEqual((weights[0], weights[2]), (0.25, 0.5))  # the prompt without a token is no third mean
        with self.assertRaisesRegex(ValueError, "no group_ids"):
            evaluate(replace(PLAIN, reduction="mean_per_prompt"), replace(batch, group_ids=None))

    def test_topr_and_capped(self):
        """r = 3 and 0.5. TOPR: weight 1 with A > 0, min(r, 1) with A < 0. Capped at 2: no gradient at 3 on either side."""
        logps = torch.tensor([3.0, 3.0, 0.5, 0.5], dtype=torch.float64).log() - 2
        batch = make_batch(logps=logps, old_logps=torch.full_like(logps, -2.0), advantages=[1.0, -1.0, 1.0, -1.0])
        row = replace(PLAIN, reduction="sum_over_tokens")
        topr = evaluate(replace(row, surrogate="topr"), batch).dloss_dlogps[:, 0].tolist()
        self.assertEqual([round(x, 12) for x in topr], [-1.0, 1.0, -1.0, 0.5])
        capped = evaluate(replace(row, surrogate="capped", ratio_cap=2.0), batch)
        self.assertEqual([round(x, 12) + 0.0 for x in capped.dloss_dlogps[:, 0].tolist()], [0.0, 0.0, -0.5, 0.5])
        self.assertEqual([round(x, 12) for x in capped.token_losses[:, 0].tolist()], [-2.0, 2.0, -0.5, 0.5])

    def test_region_of_probabilities_with_a_live_ratio(self):
        """p0 0.5 -> 0.8 with A > 0 is beyond 0.2, with A < 0 it is not; value and slope are -r A = 1.6 there."""
        batch = make_batch(
            logps=np.log([0.8, 0.8]), old_logps=np.log([0.5, 0.5]), advantages=np.array([1.0, -1.0])
        )
        for surrogate in ("region_tv", "region_kl"):
            result = evaluate(replace(PLAIN, surrogate=surrogate, reduction="sum_over_tokens"), batch)
            self.assertEqual([round(x, 12) + 0.0 for x in result.dloss_dlogps[:, 0].tolist()], [0.0, 1.6])
            self.assertAlmostEqual(result.loss.item(), 1.6, 12)

    def test_score_function_kl(self):
        """k3 at d = 0.5: exp(-0.5) - 0.5 = 0.106531; the score form has that as its gradient, with a ratio of 1 it is what
        kl_weight ratio and no own gradient give too."""
        wanted = math.exp(-0.5) - 0.5
        batch = make_batch(logps=[[-1.0]], old_logps=[[-1.0]], ref_logps=[[-1.5]], mask=[[True]], advantages=[0.0],
            dtype=torch.float64)  # fmt: skip
        for gradient, weight in (("score", "none"), ("none", "ratio")):
            row = replace(PLAIN, kl="k3", kl_coef=1.0, kl_gradient=gradient, kl_weight=weight)
            result = evaluate(row, batch)
            self.assertAlmostEqual(result.kl_loss.item(), wanted, 12)
            self.assertAlmostEqual(result.dloss_dlogps.item(), wanted, 12)
        self.assertEqual(evaluate(replace(PLAIN, kl="k3", kl_coef=1.0, kl_gradient="none"), batch).dloss_dlogps.item(), 0.0)

    def test_new_choices_are_quiet_where_they_do_nothing(self):
        """A row that uses none of them is explained without them, one that uses them with their formulas."""
        plain = objectives.explain(ROWS["grpo"], small_batch())
        self.assertNotIn("sampler_", plain)
        row = replace(ROWS["grpo"], sampler_correction="token", sampler_bound="capped", sampler_high=1.3)
        text = objectives.explain(row, small_batch())
        for part in ("sampler_correction token: w_t = exp(l0_t - ls_t)", "sampler_bound    capped: min(w, high)", "1.3"):
            self.assertIn(part, text)


if __name__ == "__main__":
    unittest.main()
