"""Power: the formula by hand and by simulation, the exact variances behind it, and the lab's runs."""

import math
import unittest
from dataclasses import replace

import numpy as np

from extensions.estimators import policy, power
from extensions.estimators.policy import E1
from extensions.estimators.power import Seeds, between, needed, of_gradients, of_lab_runs, of_rewards, power_of
from extensions.estimators.testing import NumberCase


class Formula(NumberCase):
    def test_by_hand(self):
        # (1.959964 + 0.841621)^2 = 7.848880; va + vb = 2, effect 0.5: 7.848880 * 2 / 0.25 = 62.79
        self.assertEqual(needed(2.0, 0.5), 63)
        self.assertEqual(needed(2.0, 0.5, few=True), 64)  # + 1.96^2 / 4 = 0.96
        self.assertEqual(needed(2.0, 0.5, pairs=True, few=True), 65)  # + 1.96^2 / 2 = 1.92
        self.assertIsNone(needed(2.0, 0.0))
        self.assertEqual(needed(0.0, 0.5), 1)

    def test_a_public_comparison_that_could_not_have_seen_its_effect(self):
        """A difference of .0078 read against a standard error of .0332: it wants 143 times the data, and had 6 % power."""
        self.assertEqual(needed(0.0332**2, 0.0078), 143)
        self.assertClose(power_of(0.0332**2, 0.0078, 1), 0.0563, 5e-5)

    def test_simulated_tests_find_the_effect_four_times_out_of_five(self):
        generator, trials, variance, size = np.random.default_rng(3), 100_000, 1.7, 0.3
        n = needed(2 * variance, size)
        difference = size + generator.normal(size=trials) * math.sqrt(2 * variance / n)
        found = np.abs(difference) / math.sqrt(2 * variance / n) > power._Z_LEVEL
        wanted = power_of(2 * variance, size, n)
        self.assertClose(found.mean(), wanted, 4 * math.sqrt(0.16 / trials))
        self.assertGreaterEqual(wanted, 0.8)
        self.assertLess(power_of(2 * variance, size, n - 1), 0.8)


class Gradients(NumberCase):
    def test_gains_and_their_variance(self):
        found = {x.estimator: x for x in of_gradients(E1, 0.1)}
        g = policy.policy_gradient(E1.p, E1.R)
        along = (E1.R - 0.46) * (policy.scores(E1.p) @ g) / (g @ g)
        self.assertClose(found["V = J"].sd, math.sqrt((E1.p @ along**2 - 1) / 4), formula="sd of g . grad J / |grad J|^2")
        self.assertClose(found["group mean"].scale, 0.75)
        variance = found["group mean"].sd ** 2 + found["leave-one-out"].sd ** 2
        self.assertEqual(found["group mean"].for_difference, needed(variance, 0.25, few=True))

    def test_the_same_groups_need_fewer(self):
        found = {x.estimator: x for x in of_gradients(E1, 0.1)}
        mean = found["group mean"]
        paired = (found["leave-one-out"].sd / 4) ** 2
        self.assertEqual(mean.for_difference_same_groups, needed(paired, 0.25, pairs=True, few=True))
        self.assertLess(10 * mean.for_difference_same_groups, mean.for_difference)
        self.assertIsNone(found["/ std, mixed only"].for_difference_same_groups, "it sees other groups")

    def test_no_difference_no_number(self):
        found = {x.estimator: x for x in of_gradients(E1, 0.1)}
        self.assertIsNone(found["V = J"].for_difference)

    def test_no_gradient_is_refused(self):
        with self.assertRaises(ValueError):
            of_gradients(replace(E1, rewards=(1.0, 1.0, 1.0)), 0.1)

    def test_rewards(self):
        found = of_rewards(E1, 0.0078)
        self.assertClose(found.variance, 0.3504, formula="Var(R) = .5 + .3 * .04 + .2 * .25 - .46^2")
        self.assertEqual(found.answers, 90410)


class Lab(NumberCase):
    def test_runs_of_the_lab(self):
        found = {x.algorithm: x for x in of_lab_runs(0.001, seeds=4, steps=3)}
        self.assertGreater(found["ppo"].sd, 0)
        self.assertClose(found["dpo"].sd, 0.0, formula="DPO on all pairs draws nothing")
        self.assertEqual(found["grpo"].seeds, needed(2 * found["grpo"].sd ** 2, 0.001, few=True))

    def test_two_algorithms(self):
        self.assertEqual(between(Seeds("a", 0.9, 0.02, 1), Seeds("b", 0.88, 0.03, 1)), needed(0.0013, 0.02, few=True))


if __name__ == "__main__":
    unittest.main()
