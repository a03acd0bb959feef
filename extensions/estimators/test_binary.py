"""Weights of prompts by difficulty: the engine against closed forms, and the limit of large groups."""

import math
import unittest
from dataclasses import replace

import numpy as np

from extensions.estimators import binary, policy
from extensions.estimators.advantages import ESTIMATORS
from extensions.estimators.binary import line_at, mean_of_mixed, mixed_chance, table, weight, weight_limit, weight_of_mean
from extensions.estimators.enumerate import multisets
from extensions.estimators.line import line_of
from extensions.estimators.policy import BINARY, E1, Case
from extensions.estimators.sampled import row_gradients
from extensions.estimators.testing import AS_PRINTED, NumberCase

FOUR_DECIMALS = 5.01e-5
OF_A_GUARD = 1e-4  # how far std + eps moves a weight: eps is 1e-8 to 1e-6 in the rows, std at least 0.24


class ReferenceNumbers(NumberCase):
    def test_weights(self):
        wanted = {
            (0.05, 2): 1.0, (0.05, 4): 1.7100, (0.05, 8): 2.4731, (0.05, 16): 3.2671,
            (0.1, 2): 1.0, (0.1, 4): 1.6903, (0.1, 8): 2.3277, (0.1, 16): 2.8478,
            (0.5, 2): 1.0, (0.5, 4): 1.6160, (0.5, 8): 1.8557, (0.5, 16): 1.9341,
        }  # fmt: skip
        for (q, G), number in wanted.items():
            self.assertClose(weight(q, G), number, FOUR_DECIMALS, "w_G(q) = E[sqrt(k(G-k))] / (G q (1-q))", "no square root")
            self.assertClose(weight(1 - q, G), weight(q, G), 1e-12, "symmetric in q")
        for q, number in {0.05: 4.5883, 0.1: 3.3333, 0.5: 2.0}.items():
            self.assertClose(weight_limit(q), number, FOUR_DECIMALS)

    def test_the_filter(self):
        wanted = {0.01: (33.77, 12.94, 0.005), 0.1: (4.087, 1.756, 0.0005), 0.5: (1.870, 1.008, 0.0005)}
        for q, (made, draws, atol) in wanted.items():
            self.assertClose(weight(q, 8) / mixed_chance(q, 8), made, atol, "w / (1 - q^G - (1-q)^G)")
            self.assertClose(1 / mixed_chance(q, 8), draws, atol)
        self.assertClose(mean_of_mixed(0.1, 8), 0.1756, FOUR_DECIMALS, "(q - q^G) / (1 - q^G - (1-q)^G)")
        self.assertClose(mean_of_mixed(0.9, 8), 0.8244, FOUR_DECIMALS)

    def test_two_answers_by_hand(self):
        """G = 2: only a mixed group counts, chance 2 q (1-q), sqrt(1 * 1) = 1: w = 2 q (1-q) / (2 q (1-q)) = 1."""
        for q in (0.01, 0.3, 0.5, 0.97):
            self.assertClose(weight(q, 2), 1.0)


class Engine(NumberCase):
    QS, SIZES = (0.05, 0.3, 0.5, 0.9), (2, 3, 8)

    def test_every_weight_is_its_closed_form(self):
        forms = {
            "leave-one-out": lambda q, G: 1.0,
            "group mean": lambda q, G: (G - 1) / G,
            "/ std, ddof 0": weight,
            "/ std, ddof 1": lambda q, G: weight(q, G, ddof=1),
            "/ std, mixed only": lambda q, G: weight(q, G) / mixed_chance(q, G),
        }
        for name, form in forms.items():
            for q in self.QS:
                for G in self.SIZES:
                    case = Case((q, 1 - q), (1.0, 0.0), G)
                    drawn = row_gradients(ESTIMATORS[name], case, multisets(case.p, G))
                    truth = policy.policy_gradient(case.p, case.R)
                    made = line_of(name, drawn.vectors, drawn.probabilities, truth)
                    self.assertClose(made.scale, form(q, G), 1e-12 * max(1, form(q, G)), f"{name}: w({q}, {G})")
                    self.assertClose(made.mean, made.scale * truth, formula="E[g] is a multiple of grad q")

    def test_the_named_rows_are_those_forms_up_to_their_guards(self):
        for q in self.QS:
            for G in self.SIZES:
                self.assertClose(line_at(q, G, "/ std, ddof 0").scale, weight(q, G), OF_A_GUARD)
                self.assertClose(line_at(q, G, "/ std, ddof 1").scale, weight(q, G, 1), OF_A_GUARD)
                self.assertClose(line_at(q, G, "/ mean").scale, weight_of_mean(q, G), OF_A_GUARD, "(1 - (1-q)^(G-1)) / q")

    def test_two_rollouts_with_a_std_are_exactly_unbiased(self):
        case = Case((0.1, 0.9), (1.0, 0.0), 2)
        drawn = row_gradients(ESTIMATORS["/ std, ddof 0"], case, multisets(case.p, 2))
        slope = policy.finite_difference(lambda z: float(policy.softmax(z)[0]), np.log(case.p))
        self.assertRelative(drawn.probabilities @ drawn.vectors, slope, formula="G = 2, ddof 0: E[g] = grad q")

    def test_more_answers_with_the_same_two_rewards(self):
        """Only q counts: three answers, two of them right, weigh as one right answer of the same chance."""
        case = Case((0.05, 0.05, 0.9), (1.0, 1.0, 0.0), 8)
        drawn = row_gradients(ESTIMATORS["/ std, ddof 0"], case, multisets(case.p, 8))
        truth = policy.policy_gradient(case.p, case.R)
        self.assertClose(line_of("", drawn.vectors, drawn.probabilities, truth).scale, weight(0.1, 8))


class Limits(NumberCase):
    def test_large_groups_ascend_arcsin(self):
        for q in (0.05, 0.1, 0.5):
            slope = policy.finite_difference(lambda x: 2 * math.asin(math.sqrt(x[0])), np.array([q]), 0.005)
            self.assertClose(weight_limit(q), slope[0], 1e-9, "1 / sqrt(q (1-q)) = d/dq 2 arcsin(sqrt q)")
            gaps = [weight_limit(q) - weight(q, G) for G in (16, 64, 256, 1000)]
            self.assertTrue(all(a > b > 0 for a, b in zip(gaps, gaps[1:])), "w_G rises to its limit")
            self.assertLess(gaps[-1] / weight_limit(q), 0.005)

    def test_division_by_the_mean_ascends_log_q(self):
        self.assertClose(weight_of_mean(0.1, 500), 10.0, 1e-9, "(1 - (1-q)^(G-1)) / q -> 1/q")
        self.assertClose(weight_of_mean(0.1, 8), 5.217031, AS_PRINTED)


class Table(NumberCase):
    def test_lines_say_the_weight(self):
        lines = {line.estimator: line for line in table(BINARY)}
        made = lines["q=0.1 G=8: / std, ddof 0"]
        self.assertEqual(made.row, "grpo")
        self.assertEqual(made.meaning, "this prompt weighs 2.3277; an endless group 3.3333")
        filtered = lines["q=0.1 G=8: / std, mixed only"]
        self.assertIn("1.756 groups drawn for one used, mean reward there 0.1756", filtered.meaning)
        self.assertEqual(lines["q=0.1 G=8: leave-one-out"].meaning, "unbiased")

    def test_the_readers_own_difficulty_stands_first(self):
        lines = table(Case((0.25, 0.75), (-1.0, 3.0), 4))
        self.assertTrue(lines[0].estimator.startswith("q=0.75 G=2"))
        self.assertIsNone(binary.success_of(E1))
        self.assertTrue(table(E1)[0].estimator.startswith("q=0.01"))
        with self.assertRaises(ValueError):
            table(replace(BINARY, group_size=1))


if __name__ == "__main__":
    unittest.main()
