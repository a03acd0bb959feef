"""Small policies and the enumeration of groups: by hand, against finite differences, against closed forms."""

import itertools
import math
import unittest

import numpy as np

from extensions.estimators import enumerate as enumeration
from extensions.estimators import policy
from extensions.estimators.enumerate import TooMany, multisets, pairs, tuples
from extensions.estimators.policy import CASES, E1, E2, E3, Case
from extensions.estimators.testing import AS_PRINTED, NumberCase


class Policies(NumberCase):
    def test_by_hand(self):
        J = 0.5 * 1 + 0.3 * 0.2 + 0.2 * -0.5
        self.assertClose(J, 0.46)
        self.assertClose(policy.expected_reward(E1.p, E1.R), J, formula="J = sum p R")
        by_hand = [0.5 * (1 - 0.46), 0.3 * (0.2 - 0.46), 0.2 * (-0.5 - 0.46)]
        self.assertClose(policy.policy_gradient(E1.p, E1.R), by_hand, formula="grad J = p (R - J)", mistake="R without - J")
        self.assertClose(by_hand, [0.27, -0.078, -0.192])
        self.assertClose(np.linalg.norm(by_hand), 0.340365, AS_PRINTED)

    def test_reference_numbers(self):
        self.assertClose(policy.best_baseline(E1.p, E1.R), 0.223871, AS_PRINTED, "b* = sum p |s|^2 R / sum p |s|^2")
        self.assertClose(policy.policy_gradient(E2.p, E2.R), [0.255556, -0.011111, -0.244444], AS_PRINTED)
        self.assertClose(policy.best_baseline(E2.p, E2.R), 0.7 / 3, formula="uniform: all scores as long, so b* = J")
        self.assertClose(policy.expected_reward(E2.p, E2.R), 0.233333, AS_PRINTED)
        self.assertClose(policy.expected_reward(E3.p, E3.R), 0.899, AS_PRINTED)
        self.assertClose(policy.best_baseline(E3.p, E3.R), 0.061586, AS_PRINTED)

    def test_scores_are_derivatives_and_have_mean_zero(self):
        for name, case in CASES.items():
            with self.subTest(name):
                self.assertClose(case.p @ policy.scores(case.p), np.zeros(case.answers), formula="sum p s = 0")
                logits = np.log(case.p)
                for answer in range(case.answers):
                    slope = policy.finite_difference(lambda z: math.log(policy.softmax(z)[answer]), logits)
                    self.assertRelative(policy.scores(case.p)[answer], slope, formula="s_a = e_a - p")

    def test_gradients_against_finite_differences(self):
        functions = {
            "J": (lambda p, q, R: p @ R, lambda p, q, R: policy.policy_gradient(p, R)),
            "KL(p || q)": (lambda p, q, R: policy.kl(p, q), lambda p, q, R: policy.kl_gradient(p, q)),
            "KL(q || p)": (lambda p, q, R: policy.kl(q, p), lambda p, q, R: policy.reverse_kl_gradient(p, q)),
            "H(p)": (lambda p, q, R: -p @ np.log(p), lambda p, q, R: policy.entropy_gradient(p)),
        }
        for (name, case), (what, (value, gradient)) in itertools.product(CASES.items(), functions.items()):
            with self.subTest(name, what=what):
                q = np.arange(1.0, case.answers + 1)
                q = (q + 0.3 * q**2) / (q + 0.3 * q**2).sum()
                slope = policy.finite_difference(lambda z: float(value(policy.softmax(z), q, case.R)), np.log(case.p))
                if what == "H(p)" and name == "E2":
                    self.assertClose(gradient(case.p, q, case.R), np.zeros(3), formula="0 at the uniform policy")
                else:
                    self.assertRelative(gradient(case.p, q, case.R), slope, formula=f"d {what} / d logits")

    def test_b_star_has_the_least_variance_of_all_constants(self):
        for case in (E1, E2, E3):
            best = policy.best_baseline(case.p, case.R)
            least = policy.constant_baseline_variance(case.p, case.R, best, 1)
            for b in (best - 0.01, best + 0.01, 0.0, policy.expected_reward(case.p, case.R) + 1e-3):
                self.assertLess(least, policy.constant_baseline_variance(case.p, case.R, b, 1))

    def test_bad_numbers_are_refused_in_one_line(self):
        bad = {
            "--probabilities: the numbers sum to 0.9": ((0.5, 0.4), (1, 0)),
            "--probabilities: got 1,0": ((1.0, 0.0), (1, 0)),
            "--probabilities: got 1 number": ((1.0,), (1,)),
            "--rewards: got 3 numbers for 2": ((0.5, 0.5), (1, 0, 2)),
            "--rewards: got nan": ((0.5, 0.5), (math.nan, 0)),
            "--reference: got 3 numbers, wanted 2": ((0.5, 0.5), (1, 0), 4, (0.2, 0.3, 0.5)),
            "--behaviour: the numbers sum to 1.1": ((0.5, 0.5), (1, 0), 4, None, (0.6, 0.5)),
            "--group-size: got 0": ((0.5, 0.5), (1, 0), 0),
            "--group-size: got 1001": ((0.5, 0.5), (1, 0), 1001),
        }
        for says, arguments in bad.items():
            with self.subTest(says), self.assertRaises(ValueError) as caught:
                Case(*arguments)
            self.assertIn(says, str(caught.exception))
            self.assertNotIn("\n", str(caught.exception))


class Enumeration(NumberCase):
    def test_three_answers_two_draws_by_hand(self):
        made = multisets(E1.p, 2)
        self.assertEqual(made.members.tolist(), [[0, 0], [0, 1], [0, 2], [1, 1], [1, 2], [2, 2]])
        by_hand = [0.25, 2 * 0.15, 2 * 0.1, 0.09, 2 * 0.06, 0.04]
        self.assertClose(made.probabilities, by_hand, formula="G! / prod c! * prod p^c", mistake="no multinomial factor")

    def test_eight_draws_of_three_answers_are_45_groups(self):
        self.assertEqual(len(multisets(E1.p, 8).probabilities), 45)

    def test_groups_are_tuples_without_their_order(self):
        for size in (1, 3, 5):
            groups, ordered = multisets(E1.p, size), tuples(E1.p, size)
            chance = {}
            for members, probability in zip(ordered.members, ordered.probabilities):
                key = tuple(sorted(members.tolist()))
                chance[key] = chance.get(key, 0.0) + probability
            self.assertEqual(list(chance), [tuple(m) for m in groups.members.tolist()])
            self.assertClose(groups.probabilities, list(chance.values()))

    def test_chances_sum_to_one_also_in_large_groups(self):
        for p, size in ((E1.p, 64), ([0.1, 0.9], 1000), ([0.01] * 100, 2), (E3.p, 300)):
            self.assertClose(multisets(p, size).probabilities.sum(), 1.0, 1e-12)
        self.assertClose(tuples([[0.2, 0.8], [0.5, 0.5], [0.9, 0.1]], 3).probabilities.sum(), 1.0)

    def test_tuples_of_different_draws(self):
        made = tuples([[0.2, 0.8], [0.5, 0.5]], 2)
        self.assertEqual(made.members.tolist(), [[0, 0], [0, 1], [1, 0], [1, 1]])
        self.assertClose(made.probabilities, [0.1, 0.1, 0.4, 0.4])

    def test_pairs_are_independent(self):
        first, second = multisets([0.2, 0.8], 1), multisets([0.5, 0.5], 2)
        left, right, chances = pairs(first, second)
        self.assertEqual((len(left), left[3], right[3]), (6, 1, 0))
        self.assertClose(chances[3], 0.8 * 0.25)

    def test_more_than_the_limit_is_refused_before_anything_is_made(self):
        wanted = f"{math.comb(29, 20):,} outcomes to enumerate, wanted at most {enumeration.LIMIT:,}: lower the group size"
        with self.assertRaises(TooMany) as caught:
            multisets([0.1] * 10, 20)
        self.assertIn(wanted, str(caught.exception))
        for make in (lambda: tuples([0.1] * 10, 7), lambda: multisets([0.001] * 1000, 2), lambda: multisets(E1.p, 1000)):
            with self.assertRaises(TooMany):
                make()
        one = multisets(E1.p, 100)  # 5,151 groups, so 26 million pairs
        with self.assertRaises(TooMany):
            pairs(one, one)


if __name__ == "__main__":
    unittest.main()
