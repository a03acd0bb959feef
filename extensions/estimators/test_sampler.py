"""Samplers: known numbers, what a cut does to every ratio, who is unbiased, and the temperature in both programs."""

import unittest

import numpy as np

from extensions.estimators import sampler
from extensions.estimators.policy import E1, expected_reward, finite_difference, kl, policy_gradient, scores, softmax
from extensions.estimators.sequences import tempered
from extensions.estimators.testing import AS_PRINTED, FROM_FINITE_DIFFERENCES, NumberCase

FOUR = np.array([0.5, 0.25, 0.15, 0.1])


class Known(NumberCase):
    def test_temperature(self):
        # .5^(1/.6) : .25^(1/.6) : .15^(1/.6) : .1^(1/.6) = .31498 : .09921 : .04235 : .02154, sum .47808.
        q = tempered(FOUR, 0.6)
        self.assertClose(q, [0.658839, 0.207521, 0.088576, 0.045064], AS_PRINTED)
        self.assertClose(kl(q, FOUR), 0.060529, AS_PRINTED, "KL(sampler || trainer)")
        self.assertClose(sampler.ratio_variance(FOUR, q), 0.1566, 6e-5)
        self.assertClose(sampler.ratio_variance(FOUR, q), q @ (FOUR / q - 1) ** 2)
        self.assertClose(tempered(FOUR, 1.0), FOUR)

    def test_top_p(self):
        q = sampler.top_p(FOUR, 0.9)
        self.assertClose(q, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0])
        self.assertClose(FOUR[:3] / q[:3], [0.9] * 3, formula="every kept token's ratio is the kept mass")
        self.assertClose(sampler.kept_mass(FOUR, q), 0.9)
        self.assertClose(sampler.after_tokens(0.9), 2.66e-5, 5e-8, ".9^100: an answer of 100 tokens")
        self.assertClose(sampler.top_p(FOUR, 0.91), FOUR)
        self.assertClose(sampler.top_p(FOUR, 0.1), [1, 0, 0, 0])

    def test_top_k_and_greedy(self):
        self.assertClose(sampler.top_k(np.array([0.2, 0.5, 0.3]), 2), [0, 0.625, 0.375])
        self.assertClose(sampler.greedy_share(FOUR, 0.25), [0.625, 0.1875, 0.1125, 0.075])


class Table(NumberCase):
    p, R = E1.p, E1.R
    true = policy_gradient(E1.p, E1.R)

    def setUp(self):
        self.lines = {line.estimator: line for line in sampler.table(E1)}

    def test_a_weight_repairs_what_has_support(self):
        for name in ("temperature 0.6", "temperature 1.3", "greedy share 0.25"):
            self.assertClose(self.lines[f"{name}, w = p/q"].mean, self.true, formula=name)
            self.assertGreater(np.abs(np.subtract(self.lines[f"{name}, no weight"].mean, self.true)).max(), 0.004, name)

    def test_no_weight_repairs_a_cut(self):
        # top-k 2 of (.5, .3, .2): q = (.625, .375, 0), w = .8 for both, so the weight is only a factor.
        bare, weighed = self.lines["top-k 2, no weight"], self.lines["top-k 2, w = p/q"]
        self.assertClose(weighed.mean, 0.8 * np.array(bare.mean))
        self.assertClose(weighed.cosine, bare.cosine)
        self.assertLess(weighed.cosine, 0.9)
        self.assertIn("keeps 0.8 of p", weighed.meaning)

    def test_by_hand(self):
        A = self.R - expected_reward(self.p, self.R)
        for name, make in sampler.SAMPLERS.items():
            q = make(self.p)
            self.assertClose(self.lines[f"{name}, no weight"].mean, (q * A) @ scores(self.p), formula=name)
            cut = np.minimum(self.p, q)  # q min(p / q, 1)
            self.assertClose(self.lines[f"{name}, p/q cut to 1"].mean, (cut * A) @ scores(self.p), formula=name)

    def test_temperature_in_both_programs_is_another_objective(self):
        for temperature in sampler.TEMPERATURES:
            wanted = finite_difference(lambda z: float(softmax(z / temperature) @ self.R), np.log(self.p))
            got = self.lines[f"temperature {temperature:g} in the trainer too"]
            self.assertClose(got.mean, wanted, FROM_FINITE_DIFFERENCES, "d J of softmax(z / T) / d z")
            self.assertGreater(np.abs(wanted - self.true).max(), 0.01, "which is not d J of softmax(z)")

    def test_meanings_are_short(self):
        for line in self.lines.values():
            self.assertTrue(0 < len(line.meaning) <= 90, f"{line.estimator}: {line.meaning}")


if __name__ == "__main__":
    unittest.main()
