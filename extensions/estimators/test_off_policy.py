"""Off-policy corrections: known numbers, closed forms without the engine, what binds and what does not, whole answers."""

import unittest
from dataclasses import replace

import numpy as np

from extensions.estimators import off_policy, policy
from extensions.estimators.policy import OFF_POLICY, expected_reward, finite_difference, policy_gradient, scores, softmax
from extensions.estimators.sequences import S1, tempered
from extensions.estimators.testing import AS_PRINTED, FROM_CLOSED_FORM, FROM_FINITE_DIFFERENCES, NumberCase
from extensions.objectives import ROWS

p, b, R = OFF_POLICY.p, OFF_POLICY.b, OFF_POLICY.R
w, s, A = p / b, scores(p), R - expected_reward(p, R)
TRUE = policy_gradient(p, R)


def lines(case=OFF_POLICY):
    return {line.estimator: line for line in off_policy.table(case)}


class Known(NumberCase):
    @classmethod
    def setUpClass(cls):
        cls.lines = lines()

    def test_weights_and_effective_share(self):
        self.assertClose(w, [2.5, 1, 0.4])
        # E_b w^2 = .2 * 6.25 + .3 * 1 + .5 * .16 = 1.63 = 1 + chi2; the share is 1 / 1.63.
        self.assertClose(off_policy.effective_share(p, b), 0.613497, AS_PRINTED)
        self.assertClose(off_policy.effective_share(p, p), 1)

    def test_the_table(self):
        grad = (0.27, -0.078, -0.192)
        for name, mean, cosine, trace, mse in (
            ("none", (0.333, 0.057, -0.390), 0.913006, 0.223326, 0.284724),
            ("IS", grad, 1, 0.110734, 0.110734),
            ("TIS, cap 1", (0.189, -0.0294, -0.1596), 0.990294, 0.048176, 0.058149),
            ("TIS, cap 1.5", (0.216, -0.0456, -0.1704), 0.996569, 0.060164, 0.064596),
            ("TIS, cap 2", (0.243, -0.0618, -0.1812), 0.999304, 0.081017, 0.082125),
            ("masked above 1.5", (0.135, 0.003, -0.138), 0.954289, 0.050794, 0.078496),
            ("masked above 2", (0.135, 0.003, -0.138), 0.954289, 0.050794, 0.078496),
            ("ppo", (0.039, -0.0546, 0.0156), 0.502991, 0.011073, 0.108079),
            ("cispo@verl-0.9.1", (0.2958, 0.02172, -0.31752), 0.940820, 0.147957, 0.174322),
        ):
            with self.subTest(name):
                line = self.lines[name]
                self.assertClose(line.mean, mean, AS_PRINTED)
                self.assertClose([line.cosine, line.trace_cov, line.mse], [cosine, trace, mse], AS_PRINTED)

    def test_self_normalised(self):
        for draws, bias, trace in (
            (2, (0.0289, 0.0727, -0.1016), 0.123906),
            (4, (0.0112, 0.0342, -0.0453), 0.048033),
            (8, (0.0043, 0.0155, -0.0198), 0.016997),
        ):
            line = self.lines[f"self-normalised, {draws} draws"]
            self.assertClose(np.subtract(line.mean, TRUE), bias, 6e-5, f"bias of {draws} draws")
            self.assertClose(line.trace_cov, trace, AS_PRINTED)

    def test_truncated_is_biased_and_nearer(self):
        self.assertIn("turned", self.lines["TIS, cap 2"].meaning, "once the cap binds it is biased")
        self.assertLess(self.lines["TIS, cap 2"].mse, self.lines["IS"].mse)
        self.assertEqual(self.lines["masked above 3"].meaning, "w A s, 0 where w > 3; unbiased", "2.5 is the largest weight")

    def test_rows(self):
        self.assertEqual(self.lines["none"].row, "reinforce")
        self.assertEqual(self.lines["tis"].mean, self.lines["TIS, cap 2"].mean, "the row caps at 2 and has not moved yet")
        for name in ("dual_clip", "sapo", "topr", "dppo_tv@verl-0.9.1", "vespo@trl-1.16.0", "gspo", "mis"):
            self.assertEqual(self.lines[name].row, name)

    def test_every_surrogate_of_the_objectives_table_is_here(self):
        reached = {ROWS[line.row].surrogate for line in self.lines.values() if line.row}
        missing = {row.surrogate for row in ROWS.values() if row.token_selection == "all"} - reached
        self.assertEqual(missing, set(), "a surrogate that a row uses and no line shows")

    def test_meanings_are_short(self):
        for line in self.lines.values():
            self.assertTrue(0 < len(line.meaning) <= 90, f"{line.estimator}: {line.meaning}")


class ClosedForms(NumberCase):
    def of(self, row, **fields):
        return off_policy.contributions(replace(off_policy.only(row, "34"), **fields), p, b, A)

    def test_importance_sampling_is_the_gradient(self):
        got = finite_difference(lambda z: float(softmax(z) @ R), np.log(p))
        self.assertClose(b @ self.of(off_policy.IS), got, FROM_FINITE_DIFFERENCES, "E_b[w A s] = d J")

    def test_surrogates_by_hand(self):
        A_ = A[:, None] * s
        up, down = A > 0, A < 0
        flat = (up & (w > 1.2)) | (down & (w < 0.8))
        sig = 1 / (1 + np.exp(-np.where(up, 1.0, 1.05) * (w - 1)))
        for name, weight in (
            ("ppo", np.where(flat, 0, w)),
            ("dual_clip", np.where(flat | (down & (w > 3)), 0, w)),
            ("cispo@verl-0.9.1", np.clip(w, 0.8, 1.2)),
            ("topr", np.where(up, 1, np.minimum(w, 1))),
            ("sapo", 4 * sig * (1 - sig) * w),
            ("tis", np.minimum(w, 2)),
            ("tis@openrlhf-0.11.2", np.clip(w, 0.8, 1.25)),
            ("mis", np.where((w < 0.5) | (w > 2), 0, w)),
        ):
            self.assertClose(self.of(ROWS[name]), weight[:, None] * A_, formula=f"{name}: its weight times A s")

    def test_a_weight_with_gradient_is_caught(self):
        # w = p / b depends on the logits: differentiating min(w, 2) A log p through w as well adds w A log p s where uncut.
        uncut = (w < 2)[:, None]
        broken = self.of(off_policy.tis(2.0)) + uncut * (w * A * np.log(p))[:, None] * s
        self.assertGreater(np.abs(b @ broken - b @ self.of(off_policy.tis(2.0))).max(), 0.05)

    def test_self_normalised_by_hand(self):
        # Two draws: g = (w_i A_i s_i + w_j A_j s_j) / (w_i + w_j), chance b_i b_j.
        g = w[:, None] * A[:, None] * s
        mean = sum(b[i] * b[j] * (g[i] + g[j]) / (w[i] + w[j]) for i in range(3) for j in range(3))
        outcomes, chances = off_policy.self_normalised(OFF_POLICY, A, 2)
        self.assertClose(chances @ outcomes, mean)

    def test_on_policy_nothing_is_corrected(self):
        single = [line for line in lines(policy.E1).values() if not line.estimator.startswith("S1")]
        true = policy_gradient(policy.E1.p, R)
        biased = {line.estimator for line in single if not np.allclose(line.mean, true, atol=FROM_CLOSED_FORM)}
        self.assertEqual(biased, {"cispo@trl-1.16.0"}, "every ratio is 1, so every correction is 1 as well")

    def test_cispo_of_trl_left_at_its_default_is_a_fifth(self):
        # min(r, epsilon_high) with epsilon_high .2 instead of 1 + .2: every on-policy weight is .2.
        self.assertClose(lines(policy.E1)["cispo@trl-1.16.0"].scale, 0.2)

    def test_three_policies(self):
        o = np.sqrt(p * b) / np.sqrt(p * b).sum()
        got = {line.estimator: line for line in off_policy.crossed(OFF_POLICY)}
        self.assertClose(got["IS of o/b, plain of p/o"].mean, TRUE, formula="o/b times p/o is p/b")
        self.assertClose(got["no weight of o/b, plain of p/o"].mean, (b * (p / o) * A) @ s)
        cut = np.minimum(o / b, 1.2) * np.clip(p / o, 0.8, 1.2)
        self.assertClose(got["TIS 1.2 of o/b, cispo of p/o"].mean, (b * cut * A) @ s)


class MonteCarlo(NumberCase):
    def test_drawn_answers_agree(self):
        draws = np.random.default_rng(6).choice(3, size=(100_000, 4), p=b)
        weights = w[draws]
        sample = ((weights * A[draws])[..., None] * s[draws]).sum(axis=1) / weights.sum(axis=1, keepdims=True)
        line = lines()["self-normalised, 4 draws"]
        error = sample.std(axis=0) / len(draws) ** 0.5
        self.assertLess((np.abs(sample.mean(axis=0) - line.mean) / error).max(), 4, "four standard errors")
        self.assertClose(sample.var(axis=0).sum(), line.trace_cov, 0.02 * line.trace_cov)


class WholeAnswers(NumberCase):
    sampler = tempered(S1.p, 0.7)

    @classmethod
    def setUpClass(cls):
        cls.lines = {line.estimator.split(": ")[1]: line for line in off_policy.sequence_lines()}

    def test_known_cosines(self):
        for name, cosine in (
            ("none", 0.999339),
            ("token IS", 0.999553),
            ("sequence IS", 1),
            ("prefix IS", 0.997963),
            ("geometric", 0.999579),
        ):
            self.assertClose(self.lines[name].cosine, cosine, AS_PRINTED, name)
        self.assertClose(self.lines["token IS"].scale, 1.070, 6e-4)

    def test_by_hand(self):
        drawn = S1.logps_under(self.sampler)
        d, chances, A = S1.logps - drawn, np.exp(drawn.sum(axis=1)), S1.rewards - S1.J
        ratio, length = np.exp(d), S1.lengths[:, None]
        for name, weight in (
            ("none", np.ones_like(d)),
            ("token IS", ratio),
            ("prefix IS", np.cumprod(ratio, axis=1)),
            ("sequence IS", ratio.prod(axis=1, keepdims=True)),
            ("geometric", np.exp(d.sum(axis=1, keepdims=True) / length)),
            ("sequence TIS, cap 1.2", np.minimum(ratio.prod(axis=1, keepdims=True), 1.2)),
            ("cispo of the answer's ratio", np.clip(ratio.prod(axis=1, keepdims=True), 0.8, 1.2)),
        ):
            slopes = np.where(S1.mask, weight * A[:, None], 0)
            self.assertClose(self.lines[name].mean, chances @ S1.gradients(slopes), formula=name)

    def test_only_the_product_is_the_gradient_and_only_uncut(self):
        got = finite_difference(lambda step: S1.moved(step).J, np.zeros(9))
        self.assertClose(self.lines["sequence IS"].mean, got, FROM_FINITE_DIFFERENCES, "E[w_1 ... w_T A s] = d J")
        largest = np.exp((S1.logps - S1.logps_under(self.sampler)).sum(axis=1)).max()
        self.assertGreater(largest, 1.5, "so a cap of 1.5 binds")
        self.assertLess(self.lines["sequence TIS, cap 1.5"].scale, 1 - 1e-3, "truncated, so not unbiased")
        self.assertLess(self.lines["sequence TIS, cap 1.5"].mse, self.lines["sequence IS"].mse)


if __name__ == "__main__":
    unittest.main()
