"""KL forms: known numbers, finite differences, identities sample by sample, other samplers, whole answers, Gaussians."""

import math
import unittest

import numpy as np

from extensions.estimators import kl, policy
from extensions.estimators.policy import E1, finite_difference, scores, softmax
from extensions.estimators.sequences import S1, Sequences
from extensions.estimators.testing import AS_PRINTED, FROM_FINITE_DIFFERENCES, NumberCase

p, r = policy.KL.p, policy.KL.r


def lines():
    return {line.estimator: line for line in kl.table(policy.KL)}


class Known(NumberCase):
    def setUp(self):
        self.lines = lines()

    def test_the_two_kls_and_their_gradients(self):
        self.assertClose([policy.kl(p, r), policy.kl(r, p)], [0.373386, 0.421968], AS_PRINTED)
        self.assertClose(policy.kl_gradient(p, r), [0.331738, -0.155770, -0.175968], AS_PRINTED)
        self.assertClose(policy.reverse_kl_gradient(p, r), [0.4, -0.1, -0.3])
        z = np.log(p)
        for function, wanted in (
            (lambda z: policy.kl(softmax(z), r), policy.kl_gradient(p, r)),
            (lambda z: policy.kl(r, softmax(z)), p - r),
        ):
            self.assertClose(finite_difference(function, z), wanted, FROM_FINITE_DIFFERENCES)

    def test_values(self):
        # k1 at a: .7 log(.7/.3) + .2 log(.2/.3) + .1 log(.1/.4) = .593109 - .081093 - .138629 = .373386
        for form, mean, deviation in (("k1", 0.373386, 0.766932), ("k2", 0.363801, 0.227001), ("k3", 0.373386, 0.419580)):
            line = self.lines[f"{form}, value"]
            self.assertClose([line.mean[0], line.trace_cov**0.5], [mean, deviation], AS_PRINTED, form)

    def test_gradients_cosines_and_variances(self):
        true = (0.331738, -0.155770, -0.175968)
        for name, mean, trace, cosine in (
            ("k1 in the loss", (0, 0, 0), 0.460000, None),
            ("k2 in the loss", true, 0.200083, 1),
            ("k3 in the loss", (0.4, -0.1, -0.3), 1.035000, 0.9699),
            ("k1 times the ratio", true, 0.269734, 1),
            ("k2 times the ratio", (0.328348, -0.212090, -0.116257), 0.024359, 0.9797),
            ("k3 times the ratio", true, 0.200083, 1),
            ("k1 in the reward", true, 0.200083, 1),
            ("k2 in the reward", (-0.003391, -0.056320, 0.059711), 0.131147, -0.0856),
            ("k3 in the reward", (-0.068262, -0.055770, 0.124032), 0.335284, -0.5784),
        ):
            with self.subTest(name):
                line = self.lines[name]
                self.assertClose(line.mean, mean, AS_PRINTED)
                self.assertClose(line.trace_cov, trace, AS_PRINTED)
                if cosine is None:
                    self.assertIsNone(line.cosine, "E[s] = 0: no direction")
                else:
                    self.assertClose(line.cosine, cosine, 6e-5)
        self.assertIn("AWAY", self.lines["k3 in the reward"].meaning)

    def test_rows_are_those_that_make_the_choice(self):
        for name, row in (
            ("k3 in the loss", "grpo"),
            ("k3 times the ratio", "grpo@trl-1.16.0"),
            ("k1 in the reward", "rloo"),
            ("exact in the loss", "grpo@lab"),
            ("k1 times the ratio", "dapo@open-instruct-e6c3044"),
            ("k2 times the ratio", None),
        ):
            self.assertEqual(self.lines[name].row, row, name)

    def test_a_logged_kl_that_stays_negative_is_a_sampler(self):
        # E_r[log p/r] = -KL(r || p), whatever the noise; E_uniform = mean(d).
        self.assertClose(self.lines["k1, value, samples of the reference"].mean, [-0.421968], AS_PRINTED)
        self.assertClose(self.lines["k1, value, samples of the reference"].mean, [-policy.kl(r, p)])
        self.assertClose(self.lines["k1, value, uniform samples"].mean, [-0.314821], AS_PRINTED)
        self.assertClose(self.lines["k1, value, uniform samples"].mean, [np.log(p / r).mean()])
        self.assertGreater(min(kl.values("k3", p, r)), 0, "k3 is never negative, so it hides a wrong sampler")

    def test_meanings_are_short(self):
        for line in self.lines.values():
            self.assertTrue(0 < len(line.meaning) <= 80, f"{line.estimator}: {line.meaning}")


class Identities(NumberCase):
    def of(self, form, use, b=p):
        return kl.contributions(kl.kl_row(form, use), p, b, r)

    def test_sample_by_sample_while_the_policy_itself_samples(self):
        d, s = np.log(p / r)[:, None], scores(p)
        for form, use in (("k2", "in the loss"), ("k1", "in the reward"), ("k3", "times the ratio"), ("k1", "as a score")):
            self.assertClose(self.of(form, use), d * s, formula=f"{form} {use}: weight d on the score")
        self.assertClose(self.of("k1", "times the ratio"), (d + 1) * s, formula="k1 times the ratio: weight d + 1")
        self.assertClose(self.of("k3", "in the loss"), (1 - np.exp(-d)) * s, formula="k3 in the loss: weight 1 - r/p")

    def test_they_part_on_old_samples(self):
        b = np.array([0.2, 0.3, 0.5])
        d, d_b, rho, s = np.log(p / r)[:, None], np.log(b / r)[:, None], (p / b)[:, None], scores(p)
        self.assertClose(self.of("k3", "times the ratio", b), rho * d * s)
        self.assertClose(self.of("k2", "in the loss", b), d * s, formula="no ratio: the loss alone does not know b")
        self.assertClose(self.of("k1", "in the reward", b), rho * d_b * s, formula="the reward holds the KL of b, not of p")
        true = policy.kl_gradient(p, r)
        self.assertClose(b @ self.of("k3", "times the ratio", b), true)
        self.assertClose(b @ self.of("k1", "times the ratio", b), true)
        for form, use in (("k2", "in the loss"), ("k1", "in the reward")):
            self.assertGreater(np.abs(b @ self.of(form, use, b) - true).max(), 0.1, f"{form} {use}: biased off-policy")

    def test_mean_of_old_samples_against_finite_differences(self):
        # With the ratio, E_b[rho k] = E_p[k]: a function of the logits, whose derivative needs no score.
        b, z = np.array([0.2, 0.3, 0.5]), np.log(p)

        def expected(form):
            return lambda z: float(softmax(z) @ kl.values(form, softmax(z), r))

        for form in ("k1", "k2", "k3"):
            got, wanted = b @ self.of(form, "times the ratio", b), finite_difference(expected(form), z)
            self.assertClose(got, wanted, FROM_FINITE_DIFFERENCES, f"d E_p[{form}] / d logits")

    def test_a_broken_k3_is_caught(self):
        # The commonest slip: log r - log p inside exp turned round. Its mean is not KL(p || r).
        d = np.log(p / r)
        broken = np.exp(d) - 1 - d
        self.assertGreater(abs(p @ broken - policy.kl(p, r)), 0.04, "its mean is .418281")
        self.assertClose(p @ kl.values("k3", p, r), policy.kl(p, r))

    def test_a_cut_takes_the_gradient_where_the_policy_has_gone_furthest(self):
        # d = (.847, -.405, -1.386): only the third is beyond 1, so its answer adds nothing: E = sum of the other two.
        d, s = np.log(p / r), scores(p)
        wanted = sum(p[a] * (1 - math.exp(-d[a])) * s[a] for a in (0, 1))
        got = {line.estimator: line for line in kl.clamped_lines(policy.KL)}
        self.assertClose(got["k3 in the loss, d in +-1"].mean, wanted)
        self.assertClose(got["k3 in the loss, as verl cuts"].mean, p - r, formula="limits of 20 and 10 cut nothing here")
        self.assertEqual(got["k3 in the loss, as verl cuts"].row, "grpo_kl@verl-0.9.1")

    def test_a_case_of_its_own(self):
        # No reference: uniform. A behaviour: its samples take the place of the uniform ones.
        self.assertClose(kl.reference_of(E1), [1 / 3] * 3)
        old = policy.Case(E1.probabilities, E1.rewards, behaviour=(0.2, 0.3, 0.5))
        names = [line.estimator for line in kl.table(old)]
        self.assertIn("k1, value, samples of b", names)
        self.assertNotIn("k1, value, uniform samples", names)


class WholeAnswers(NumberCase):
    uniform = np.full((3, 3), 1 / 3)

    def test_the_gradient_of_the_kl_of_whole_answers(self):
        got = finite_difference(lambda step: S1.moved(step).kl(self.uniform), np.zeros(9))
        self.assertClose(S1.kl_gradient(self.uniform), got, FROM_FINITE_DIFFERENCES, "d KL / d logits = E[d s]")

    def test_the_sum_of_token_gradients_is_a_part_of_it(self):
        got = {line.estimator: line for line in kl.sequence_lines()}
        exact, reward = got["S1: exact in the loss"], got["S1: k1 in the reward"]
        self.assertClose(exact.cosine, 0.997322, AS_PRINTED)
        self.assertClose([reward.mean[2], exact.mean[2]], [-0.128601, -0.115957], AS_PRINTED, "EOS at position 0")
        self.assertClose(reward.mean, S1.kl_gradient(self.uniform), formula="a KL in the reward is exact")
        for name in ("k2 in the loss", "k3 times the ratio"):
            self.assertClose(got[f"S1: {name}"].mean, exact.mean, formula="the token form of the same mean")

    def test_the_missing_part_is_what_a_token_does_to_later_states(self):
        # With one position there are no later states: nothing is missing.
        one = Sequences(rows=((0.5, 0.3, 0.2),))
        line = {line.estimator: line for line in kl.sequence_lines(one)}["S1: exact in the loss"]
        self.assertClose(line.mean, one.kl_gradient(np.full((1, 3), 1 / 3)))
        gap = np.abs(lines()["S1: exact in the loss"].mean - S1.kl_gradient(self.uniform)).max()
        self.assertGreater(gap, 0.01)


class Gaussians(NumberCase):
    def test_schulmans_table(self):
        for mu, form, bias, deviation in (
            (0.1, "k1", 0, 20.0000), (0.1, "k2", 0.0025, 1.4177), (0.1, "k3", 0, 1.4166),
            (1, "k1", 0, 2.0000), (1, "k2", 0.2500, 1.7321), (1, "k3", 0, 1.6950),
        ):  # fmt: skip
            self.assertClose(kl.schulman(mu)[form], [bias, deviation], 6e-5, f"{form}, mu {mu}")

    def test_the_closed_form_is_what_quadrature_of_the_estimators_gives(self):
        got = {line.estimator: line for line in kl.gaussian_lines()}
        for mu in kl.GAUSSIAN_SHIFTS:
            for form, (bias, deviation) in kl.schulman(mu).items():
                line = got[f"N(0,1) | N({mu:g},1): {form}, value / KL"]
                self.assertClose([line.mean[0] - 1, line.trace_cov], [bias, deviation**2], 1e-9, f"{form}, mu {mu}")


class MonteCarlo(NumberCase):
    def test_draws_agree(self):
        draws = np.random.default_rng(7).choice(3, size=100_000, p=p)
        for form, use in (("k3", "in the loss"), ("k2", "in the reward"), ("k1", "times the ratio")):
            each = kl.contributions(kl.kl_row(form, use), p, p, r)
            sample = each[draws]
            error = np.sqrt(p @ (each - p @ each) ** 2 / len(draws))
            self.assertLess((np.abs(sample.mean(axis=0) - p @ each) / error).max(), 4, f"{form} {use}: 4 standard errors")


if __name__ == "__main__":
    unittest.main()
