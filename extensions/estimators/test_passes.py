"""Several passes over one group: an example by hand, the controls, ordered outcomes, and a ratio that is always 1."""

import unittest

import numpy as np

from extensions.estimators import passes
from extensions.estimators.enumerate import multisets, tuples
from extensions.estimators.policy import E1, Case, expected_reward, finite_difference, policy_gradient, softmax
from extensions.estimators.testing import FROM_FINITE_DIFFERENCES, NumberCase

COIN = Case((0.5, 0.5), (1.0, 0.0), group_size=2)


def lines(case):
    return {line.estimator: line for line in passes.table(case)}


class ByHand(NumberCase):
    """p = (.5, .5), R = (1, 0), two answers. Of the groups aa, ab, bb (.25, .5, .25) only ab has a gradient:

    pass 1: (1 s_a - 1 s_b) / 2 = (e_a - e_b) / 2, so the logits go .5 up and .5 down and p_1(a) = 1 / (1 + e^-1) = .731059.
    pass 2: w = (1.462117, .537883), s_a = .268941 (1, -1), s_b = -.731059 (1, -1):
            g = (1.462117 * .268941 + .537883 * .731059) / 2 = .393224, twice what d J = p_1 (1 - p_1) = .196612 is there.
    """

    p1 = 1 / (1 + np.exp(-1))

    def setUp(self):
        self.lines = lines(COIN)

    def test_ratio(self):
        line = self.lines["pass 2: ratio"]
        self.assertClose(line.mean[0], 0.5 * 2 * self.p1 * (1 - self.p1), formula="half of the groups, g = 2 p1 (1 - p1)")
        # Groups aa and bb stay at p, where d J = .25 and g = 0. Errors: ab +.196612, aa and bb -.25, on both coordinates.
        true = self.p1 * (1 - self.p1)
        self.assertClose(line.mse, 2 * (0.5 * true**2 + 0.5 * 0.25**2), formula="mse = E|g - d J at p_1|^2")
        self.assertClose(line.scale, true / (0.5 * true + 0.5 * 0.25), formula="E[g] / E[d J]")

    def test_clip(self):
        # 1.46 > 1.2 with A > 0, .54 < .8 with A < 0: both answers are flat, and pass 2 does nothing.
        self.assertClose(self.lines["pass 2: clip 0.2"].mean, [0, 0])
        self.assertIsNone(self.lines["pass 2: clip 0.2"].cosine)


class Exact(NumberCase):
    @classmethod
    def setUpClass(cls):
        cls.lines = lines(E1)

    def test_the_first_pass_is_unbiased(self):
        true = policy_gradient(E1.p, E1.R)
        self.assertClose(self.lines["pass 1"].mean, true)
        self.assertEqual(self.lines["pass 1"].meaning.split(";")[0], "unbiased")

    def test_the_second_is_not_and_a_second_group_would_be(self):
        self.assertClose(self.lines["pass 2 with a new group"].scale, 1)
        self.assertClose(self.lines["pass 2 with another old group, ratio"].scale, 1)
        self.assertLess(self.lines["pass 2: ratio"].scale, 0.95, "the right ratio, on answers that the step was fitted to")
        self.assertLess(self.lines["pass 3: ratio"].scale, self.lines["pass 2: ratio"].scale, "and more so at the next step")

    def test_both_controls_have_the_same_mean(self):
        self.assertClose(
            self.lines["pass 2 with a new group"].mean,
            self.lines["pass 2 with another old group, ratio"].mean,
            formula="E over p_1 of d J, once from p_1 and once from p with the ratio",
        )

    def test_truth_is_the_gradient_at_each_policy(self):
        members, _ = multisets(E1.p, E1.group_size)
        second = passes.passes(passes.ROWS_OF["ratio"], E1, members)[1]
        got = passes.policy_gradients(second.before, E1.R)
        for m in (0, 4, 9):
            z = np.log(second.before[m])
            self.assertRelative(got[m], finite_difference(lambda z: expected_reward(softmax(z), E1.R), z))
            # And the surrogate's gradient is a derivative too: of (1/G) sum_i p(a_i) / p_old(a_i) A_i.
            R = E1.R[members[m]]
            A = R - (R.sum() - R) / (len(R) - 1)

            def surrogate(z):
                return float((softmax(z)[members[m]] / E1.p[members[m]] * A).mean())

            self.assertClose(second.gradients[m], finite_difference(surrogate, z), FROM_FINITE_DIFFERENCES)

    def test_ordered_groups_give_the_same_means(self):
        members, chances = tuples(E1.p, E1.group_size)
        for name in ("ratio", "clip 0.2", "SAPO"):
            third = passes.passes(passes.ROWS_OF[name], E1, members)[2]
            wanted = self.lines[f"pass 3: {name}"].mean
            self.assertClose(chances @ third.gradients, wanted, formula=f"81 ordered groups, {name}")

    def test_a_denominator_recomputed_every_pass_is_caught(self):
        # The slip: old_logps taken from the policy of the pass. Every ratio is 1, and the clip never acts.
        members, chances = multisets(E1.p, E1.group_size)
        p = passes.passes(passes.ROWS_OF["clip 0.2"], E1, members, 1)[0].after
        broken = passes.gradients(passes.ROWS_OF["clip 0.2"], p, p, E1.R, members)
        self.assertClose(chances @ broken, self.lines["pass 2: no ratio"].mean, formula="ratio 1: as no ratio at all")
        self.assertGreater(np.abs(chances @ broken - self.lines["pass 2: clip 0.2"].mean).max(), 0.1)

    def test_bounds(self):
        with self.assertRaisesRegex(ValueError, "--group-size: got 1"):
            passes.table(Case(E1.probabilities, E1.rewards, group_size=1))
        names = lines(Case(tuple([0.1] * 10), tuple(range(10)), group_size=3))
        self.assertNotIn("pass 2 with a new group", names, "220 groups: their 48,400 pairs are left out")

    def test_in_chunks_it_is_the_same(self):
        members, _ = multisets(E1.p, 4)
        p = np.tile(E1.p, (len(members), 1))
        whole = passes.gradients(passes.ROWS_OF["ratio"], p, p, E1.R, members)
        kept, passes.CHUNK = passes.CHUNK, 4
        try:
            self.assertClose(passes.gradients(passes.ROWS_OF["ratio"], p, p, E1.R, members), whole)
        finally:
            passes.CHUNK = kept

    def test_meanings_are_short(self):
        for line in self.lines.values():
            self.assertTrue(0 < len(line.meaning) <= 90, f"{line.estimator}: {line.meaning}")


if __name__ == "__main__":
    unittest.main()
