"""Preferences: the population gradient, batches, noise, optima, what beta does; and the step in which both answers fall."""

import math
import unittest
from dataclasses import replace

import numpy as np

from extensions.estimators import preference, shared_features
from extensions.estimators.policy import E1, Case, finite_difference, softmax
from extensions.estimators.testing import AS_PRINTED, FROM_FINITE_DIFFERENCES, NumberCase
from extensions.objectives import PREFERENCE_ROWS

REFERENCED = replace(E1, reference=(0.3, 0.3, 0.4))


def bradley_terry(case, i, j):
    return 1 / (1 + math.exp(case.R[j] - case.R[i]))


def expected_loss(case, z, beta=0.1, flipped=0.0):
    """E of -log sigmoid(beta (u - v)) over two different draws, written out: the independent way to the population loss."""
    p, r = softmax(z), preference.reference_of(case)
    total = mass = 0.0
    for i in range(len(p)):
        for j in range(len(p)):
            if i == j:
                continue
            right = bradley_terry(case, i, j)
            chance = case.p[i] * case.p[j] * ((1 - flipped) * right + flipped * (1 - right))
            margin = math.log(p[i] / r[i]) - math.log(p[j] / r[j])
            total, mass = total + chance * math.log1p(math.exp(-beta * margin)), mass + chance
    return total / mass


class Population(NumberCase):
    def test_gradient_against_finite_differences(self):
        for case in (E1, REFERENCED):
            got = finite_difference(lambda z: -expected_loss(case, z), np.log(case.p))
            self.assertRelative(preference.population(case), got, formula="- d E[-log sigmoid(beta D)] / d logits")

    def test_one_pair_by_hand(self):
        # At the reference D = 0, so a pair moves the logits by beta sigmoid(0) (e_c - e_r) = .05 (e_c - e_r).
        got = preference.contributions(preference.DPO, E1.p, E1.p, np.array([0]), np.array([2]))
        self.assertClose(got, [[0.05, 0, -0.05]])

    def test_chances_of_pairs(self):
        pairs = preference.pairs_of(E1)
        self.assertEqual(len(pairs.chances), 6)
        # Two different draws: mass 1 - (.25 + .09 + .04) = .62; (a, b) and (b, a) share 2 * .5 * .3 = .3 of it.
        ab = pairs.chances[(pairs.chosen == 0) & (pairs.rejected == 1)][0]
        self.assertClose(ab, 0.3 / 0.62 * bradley_terry(E1, 0, 1))
        self.assertClose(pairs.chances.sum(), 1)

    def test_unbiased_at_any_batch(self):
        lines = {line.estimator: line for line in preference.batch_lines(REFERENCED)}
        one = lines["dpo, batch of 1"]
        for size in preference.BATCHES:
            line = lines[f"dpo, batch of {size}"]
            self.assertClose(line.mean, preference.population(REFERENCED), formula="no group, no baseline: E does not see n")
            self.assertClose(line.trace_cov, one.trace_cov / size, formula="tr Cov / n")

    def test_a_batch_that_divides_by_its_own_spread_is_caught(self):
        # The twin: each batch's gradient divided by its length, as a group std would.
        pairs = preference.pairs_of(E1)
        each = preference.contributions(preference.DPO, E1.p, E1.p, pairs.chosen, pairs.rejected)
        i, j = (index.ravel() for index in np.indices((6, 6)))
        mean = (each[i] + each[j]) / 2
        length = np.linalg.norm(mean, axis=1, keepdims=True)
        broken = (pairs.chances[i] * pairs.chances[j]) @ (mean / np.where(length > 1e-12, length, 1)) * 0.05
        direction = broken @ preference.population(E1) / np.linalg.norm(broken) / np.linalg.norm(preference.population(E1))
        self.assertLess(direction, 1 - 1e-6)

    def test_large_batches_are_left_out(self):
        wide = Case(tuple([0.1] * 10), tuple(range(10)))
        names = [line.estimator for line in preference.batch_lines(wide)]
        self.assertEqual(names, ["dpo, batch of 1", "dpo, batch of 2"], "90 pairs: a batch of 4 has 2,919,735 outcomes")


class Noise(NumberCase):
    def setUp(self):
        self.lines = {line.estimator: line for line in preference.noise_lines(E1)}

    def test_exchanged_labels_shorten_the_first_step(self):
        # P - 1/2 becomes (1 - 2e) (P - 1/2): .8 at 10 %, .4 at 30 %.
        for e, left in ((0.1, 0.8), (0.3, 0.4)):
            self.assertClose(self.lines[f"dpo, {e:.0%} of labels exchanged"].scale, left)
            self.assertClose(self.lines[f"ipo, {e:.0%} of labels exchanged"].scale, left)
            self.assertClose(self.lines[f"cdpo, {e:.0%} of labels exchanged"].scale, left**2, formula="smoothed: once more")
            self.assertClose(self.lines[f"robust, {e:.0%} of labels exchanged"].scale, 1)

    def test_robust_is_unbiased_away_from_the_reference_too_and_dearer(self):
        lines = {line.estimator: line for line in preference.noise_lines(REFERENCED)}
        true = preference.population(REFERENCED)
        self.assertClose(lines["robust, 30% of labels exchanged"].mean, true, formula="(1-e) f - e f' over 1 - 2e, noise e")
        dear, cheap = (lines[f"{name}, 30% of labels exchanged"].trace_cov for name in ("robust", "dpo"))
        self.assertGreater(dear, 4 * cheap)
        got = finite_difference(lambda z: -expected_loss(REFERENCED, z, flipped=0.3), np.log(E1.p))
        self.assertRelative(lines["dpo, 30% of labels exchanged"].mean, got)

    def test_a_wrong_guess_of_the_noise_is_biased(self):
        pairs = preference.pairs_of(E1, 0.3)
        row = replace(PREFERENCE_ROWS["robust"], label_smoothing=0.1)
        got = pairs.chances @ preference.contributions(row, E1.p, E1.p, pairs.chosen, pairs.rejected)
        self.assertClose(got, 0.4 / 0.8 * preference.population(E1), formula="(1 - 2 * .3) / (1 - 2 * .1)")


class Beta(NumberCase):
    def test_known_optima(self):
        for beta, h, kl in (
            (0.1, 13.8629, 0.693133),
            (0.5, 2.7726, 0.469429),
            (1, 1.3863, 0.192745),
            (2, 0.6931, 0.056633),
        ):
            best = preference.dpo_optimum(0.8, beta)
            self.assertClose(best, h, 5.1e-5, formula="h* = logit(.8) / beta")
            self.assertClose(preference.kl_to_half(best), kl, AS_PRINTED)

    def test_the_optimum_is_where_the_engine_says_the_slope_is_0(self):
        chances = np.array([0.8, 0.2])
        for name, optimum in preference.OPTIMA.items():
            for beta in preference.BETAS:
                row, h = replace(PREFERENCE_ROWS[name], beta=beta), optimum(0.8, beta)
                self.assertClose(chances @ preference.margin_slopes(row, h), 0, 1e-12 / min(1, beta))
                below, above = (chances @ preference.margin_slopes(row, h + x) for x in (-0.1, 0.1))
                self.assertTrue(below < 0 < above, f"{name}, beta {beta}: a minimum")

    def test_slope_against_finite_differences(self):
        for h in (-0.7, 0.0, 1.3):
            for sign, got in zip((1, -1), preference.margin_slopes(replace(preference.DPO, beta=0.5), h)):
                wanted = finite_difference(lambda x: float(np.log1p(np.exp(-0.5 * sign * x[0]))), np.array([h]))[0]
                self.assertClose(got, wanted, FROM_FINITE_DIFFERENCES)

    def test_one_step_goes_the_other_way(self):
        lines = {line.estimator: line for line in preference.beta_lines()}
        for beta in preference.BETAS:
            # -(.8 * -beta / 2 + .2 * beta / 2) = .3 beta: with the sign of the loss, the slope is -.3 beta.
            self.assertClose(lines[f"dpo, beta {beta:g}: first step of h"].mean, [0.3 * beta])
        optima = [preference.dpo_optimum(0.8, beta) for beta in preference.BETAS]
        self.assertEqual(optima, sorted(optima, reverse=True), "larger beta: larger step, nearer optimum")

    def test_kl_to_half_by_hand(self):
        # p = sigmoid(logit .8) = .8: .8 log 1.6 + .2 log .4 = .376003 - .183258 = .192745.
        self.assertClose(preference.kl_to_half(math.log(4)), 0.8 * math.log(1.6) + 0.2 * math.log(0.4))


class Rows(NumberCase):
    def test_every_row_has_a_line_or_a_reason(self):
        named = {line.row for line in preference.row_lines(E1)}
        self.assertEqual(named | set(preference.left_out()), set(PREFERENCE_ROWS))
        self.assertFalse(named & set(preference.left_out()))

    def test_some_rows_at_the_reference(self):
        lines = {line.estimator: line for line in preference.row_lines(E1)}
        # Slopes in D at 0: DPO -beta/2 = -.05; IPO -1/beta = -10; hinge -beta = -.1.
        for name, scale in (("dpo", 1), ("ipo", 200), ("hinge", 2), ("robust", 1.25), ("cdpo", 0.8)):
            self.assertClose(lines[name].scale, scale, 1e-11, formula=name)
        self.assertLess(lines["discopop"].scale, 0, "its loss rises with the margin at 0: known of that loss")
        # m = 1/2 there: slope in z = -(1/2)(1/2) - 1/2 + (1/4)(1 - log 2) / .05, over DPO's -1/2.
        self.assertClose(lines["discopop"].scale, (-0.75 + 5 * (1 - math.log(2))) / -0.5, 1e-11)

    def test_meanings_are_short(self):
        for line in preference.table(E1):
            self.assertTrue(0 < len(line.meaning) <= 90, f"{line.estimator}: {line.meaning}")


class SharedFeatures(NumberCase):
    p = np.array(shared_features.START)

    def test_derivatives_by_hand(self):
        # phi_c - phi_r = (-.2, -.1); E phi = .4 (1, 0) + .3 (1.2, .1) + .3 (0, 1) = (.76, .33).
        # chosen (.24, -.33) . (-.2, -.1) = -.048 + .033 = -.015; rejected (.44, -.23) . (-.2, -.1) = -.088 + .023 = -.065.
        for name, chosen, rejected in (("both fall", -0.015, -0.065), ("both rise", 0.15, 0.05), ("table", 0.9, -1.1)):
            got = shared_features.derivative(shared_features.EXAMPLES[name].phi, self.p)
            self.assertClose(got[:2], [chosen, rejected], formula=name)
            self.assertClose(self.p @ got, 0, formula="sum p d log p = 0")

    def test_derivative_against_finite_differences_of_the_policy(self):
        for example in shared_features.EXAMPLES.values():
            phi = example.phi
            theta = shared_features.parameters_for(phi, self.p)
            self.assertClose(softmax(phi @ theta), self.p)
            along = phi[shared_features.CHOSEN] - phi[shared_features.REJECTED]
            for i, got in enumerate(shared_features.derivative(phi, self.p)):
                wanted = finite_difference(lambda c: float(np.log(softmax(phi @ (theta + c[0] * along))[i])), np.zeros(1))
                self.assertClose(got, wanted[0], FROM_FINITE_DIFFERENCES)

    def test_the_loss_of_the_table_of_rows_makes_that_step(self):
        for example in shared_features.EXAMPLES.values():
            wanted = shared_features.derivative(example.phi, self.p)
            self.assertClose(shared_features.one_step(example.phi, self.p), wanted)
            self.assertClose(shared_features.one_step(example.phi, self.p, PREFERENCE_ROWS["ipo"]), wanted)

    def test_a_run(self):
        fall = shared_features.run(shared_features.EXAMPLES["both fall"].phi, self.p)
        steps = np.diff(fall, axis=0)
        self.assertTrue((steps[:, :2] < 0).all(), "chosen and rejected lose probability at every step")
        self.assertTrue((steps[:, 2] > 0).all(), "what nobody asked for gains")
        margin = np.log(fall[:, 0] / fall[:, 1])
        self.assertTrue((np.diff(margin) > 0).all(), "and still the margin grows, so the loss falls")
        rise = np.diff(shared_features.run(shared_features.EXAMPLES["both rise"].phi, self.p), axis=0)
        self.assertTrue((rise[:, :2] > 0).all())

    def test_a_first_step_of_the_run_is_the_derivative(self):
        # rate beta / 2 along phi_c - phi_r: beta .1, rate 1e-4, so log p moves by 5e-6 times the derivative.
        for example in shared_features.EXAMPLES.values():
            path = shared_features.run(example.phi, self.p, steps=1, rate=1e-4)
            got = np.log(path[1] / path[0]) / (1e-4 * 0.1 / 2)
            self.assertClose(got, shared_features.derivative(example.phi, self.p), 1e-5)

    def test_on_a_table_the_chosen_always_rises(self):
        rng, eye = np.random.default_rng(3), np.eye(5)
        for p in rng.dirichlet(np.full(5, 0.3), size=200):
            got = shared_features.derivative(eye, p, 1, 4)
            self.assertClose(got[[1, 4]], [1 - p[1] + p[4], -(1 + p[1] - p[4])], formula="1 - p_c + p_r, -(1 + p_c - p_r)")
            self.assertGreater(got[1], 0)

    def test_features_that_cannot_give_the_start(self):
        with self.assertRaisesRegex(ValueError, "cannot give the probabilities"):
            shared_features.parameters_for(np.array([[1.0], [1.0], [0.0]]), self.p)


if __name__ == "__main__":
    unittest.main()
