"""A reader's own function: what it equals, and every way to be wrong."""

import itertools
import sys
import types
import unittest
from dataclasses import replace

import numpy as np
import torch

from extensions.estimators import of
from extensions.estimators.of import Own, compared, factor_between, gradients, load, sentences
from extensions.estimators.policy import E1, OFF_POLICY, Case, policy_gradient
from extensions.estimators.testing import NumberCase


def rule(function):
    return Own("mine:rule", function, "rule")


def loss(function):
    return Own("mine:loss", function, "loss")


def clipped(logps, old_logps, ref_logps, rewards):
    A = rewards - rewards.mean()
    ratio = (logps - old_logps).exp()
    return -torch.min(ratio * A, ratio.clamp(0.8, 1.2) * A).mean()


class Known(NumberCase):
    def test_a_rule_is_recognised_group_by_group(self):
        found = compared(rule(lambda r: r - (r.sum() - r) / (len(r) - 1)), E1)
        self.assertIn("leave-one-out", found.same)
        self.assertIn("rloo", found.same)
        self.assertClose(found.multiple["group mean"], 4 / 3, formula="leave-one-out = G/(G-1) group mean")
        self.assertIn("V = J", found.same_mean)
        self.assertClose(found.line.mean, policy_gradient(E1.p, E1.R))
        self.assertClose(found.line.trace_cov, 0.061760, 5e-7)

    def test_a_loss_is_recognised(self):
        found = compared(loss(clipped), E1)
        self.assertIn("dr_grpo", found.same)
        self.assertNotIn("grpo", found.same)
        self.assertClose(found.line.scale, 0.75)

    def test_a_loss_on_samples_of_another_policy(self):
        """Clipped ratios far from the sampler: the known row on the same samples is dr_grpo."""
        case = replace(OFF_POLICY, group_size=3)
        self.assertIn("dr_grpo", compared(loss(clipped), case).same)

    def test_sample_std_is_not_population_std(self):
        found = compared(rule(lambda r: (r - r.mean()) / (r.std() + 1e-6)), E1)
        self.assertIn("grpo@verl-0.9.1", found.same)
        self.assertNotIn("grpo", found.same)

    def test_nothing_known_is_said(self):
        found = compared(rule(lambda r: r**3 - 0.1), E1)
        self.assertEqual([*sentences(found)], ["No known estimator is the same, in any group or in the mean."])

    def test_the_first_answer_as_baseline_needs_its_order(self):
        """R_i - R_1 has the mean of the group mean; a multiset alone would always make the best answer the first."""
        made, outcomes = gradients(rule(lambda r: r - r[0]), E1)
        self.assertEqual(len(outcomes.members), 3**4)
        self.assertClose(outcomes.probabilities @ made, 0.75 * policy_gradient(E1.p, E1.R))

    def test_numpy_and_lists_are_taken(self):
        for function in (lambda r: np.asarray(r) - np.mean(np.asarray(r)), lambda r: (r - r.mean()).tolist()):
            self.assertIn("group mean", compared(rule(function), E1).same)

    def test_a_factor_is_one_number_for_all_groups(self):
        made = np.arange(6.0).reshape(3, 2)
        self.assertClose(factor_between(2 * made, made), 2.0)
        self.assertIsNone(factor_between(made**2, made))
        self.assertIsNone(factor_between(made, np.zeros((3, 2))))
        self.assertIsNone(factor_between(made, np.ones((2, 2))))


class Wrong(NumberCase):
    def assertSays(self, says, own, case=E1):
        with self.assertRaises(ValueError) as caught:
            gradients(own, case)
        self.assertIn(says, str(caught.exception))
        self.assertTrue(str(caught.exception).startswith("--of: "))

    def test_shapes_numbers_and_failures(self):
        self.assertSays("returns shape (), wanted (4,), one advantage an answer", rule(lambda r: r.mean()))
        self.assertSays("returns shape (4,), wanted (), one loss", loss(lambda l, o, f, r: -l * r))
        self.assertSays("likely a division by a std of 0", rule(lambda r: (r - r.mean()) / r.std()))
        self.assertSays("fails on rewards", rule(lambda r: r.no_such_thing))
        self.assertSays("returns NoneType", rule(lambda r: None))
        self.assertSays("wanted finite numbers", loss(lambda l, o, f, r: (l * r / 0).sum()))
        self.assertSays("has no gradient at logps", loss(lambda l, o, f, r: (l.detach() * r).sum()))
        self.assertSays("does not depend on logps", loss(lambda l, o, f, r: torch.ones((), requires_grad=True) * r.sum()))

    def test_a_gradient_that_is_not_finite(self):
        self.assertSays("the gradient on rewards", loss(lambda l, o, f, r: ((l - o).abs() + 0).sqrt().sum()))

    def test_randomness_and_state(self):
        generator, count = torch.Generator().manual_seed(0), itertools.count()
        says = "gives two results for one group: it draws random numbers or keeps a state"
        self.assertSays(says, rule(lambda r: r * torch.rand(len(r), generator=generator)))
        self.assertSays(says, rule(lambda r: r + next(count)))

    def test_order_matters_where_not_all_orders_can_be_tried(self):
        case = Case((0.2,) * 5, (1.0, 0.5, 0.0, -0.5, 2.0), 5)
        self.assertGreater(5**5, of.ORDERED)
        self.assertSays("depends on the order of the answers", rule(lambda r: r - r[0]), case)
        made, outcomes = gradients(rule(lambda r: r - r.mean()), case)
        self.assertClose(outcomes.probabilities @ made, 0.8 * policy_gradient(case.p, case.R))

    def test_a_function_cannot_change_what_it_is_given(self):
        def greedy(rewards):
            rewards -= rewards.mean()
            return rewards
        self.assertIn("group mean", compared(rule(greedy), E1).same)


class Loading(NumberCase):
    def setUp(self):
        module = types.ModuleType("own_functions_of_a_test")
        module.one, module.four, module.two = (lambda r: r), clipped, (lambda a, b: a)
        module.with_default, module.text = (lambda r, eps=1e-8: r), "no function"
        sys.modules[module.__name__] = module
        self.addCleanup(sys.modules.pop, module.__name__)

    def test_what_it_is_says_the_number_of_arguments(self):
        kinds = {"one": "rule", "four": "loss", "with_default": "rule"}
        for name, kind in kinds.items():
            self.assertEqual(load(f"own_functions_of_a_test:{name}").kind, kind)

    def test_what_is_no_function_is_refused(self):
        bad = {"own_functions_of_a_test:two": "takes 2 arguments", "own_functions_of_a_test:text": "has no function text",
               "own_functions_of_a_test:none": "has no function none", "no_such_module_at_all:f": "cannot be imported",
               "no_colon": "wanted MODULE:FUNCTION", ":f": "wanted MODULE:FUNCTION"}  # fmt: skip
        for text, says in bad.items():
            with self.assertRaises(ValueError) as caught:
                load(text)
            self.assertIn(says, str(caught.exception))


if __name__ == "__main__":
    unittest.main()
