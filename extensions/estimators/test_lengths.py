"""Lengths: the known table, every group against a batch of its own, closed forms of mean and drift."""

import unittest

import numpy as np

from extensions import objectives
from extensions.estimators import lengths
from extensions.estimators.policy import finite_difference
from extensions.estimators.sequences import S1, Sequences
from extensions.estimators.testing import AS_PRINTED, FROM_FINITE_DIFFERENCES, NumberCase

LOO, DR_GRPO, GRPO, TOKEN_MEAN = (
    "leave-one-out, sum", "centred, sum (Dr. GRPO)", "std, per-response mean (GRPO)", "std, token mean (DAPO's)",
)  # fmt: skip


class World(NumberCase):
    def test_s1(self):
        self.assertEqual(len(S1.answers), 15)
        # J: a (.5), then EOS (.4); or a (.5), then a or b (.6), then EOS (.5).
        self.assertClose([S1.J, S1.expected(S1.lengths), S1.chances.sum()], [0.5 * 0.4 + 0.5 * 0.6 * 0.5, 2.28, 1])
        right = S1.chances * S1.rewards
        wrong = S1.chances - right
        self.assertClose([right @ S1.lengths / S1.J, wrong @ S1.lengths / (1 - S1.J)], [2.4286, 2.2], 5e-5)

    def test_gradients_against_finite_differences(self):
        for gradient, function in (
            (S1.policy_gradient, lambda world: world.J),
            (S1.gradient_of_expected(S1.lengths), lambda world: world.expected(world.lengths)),
        ):
            got = finite_difference(lambda step: function(S1.moved(step)), np.zeros(9))
            self.assertClose(gradient, got, FROM_FINITE_DIFFERENCES)

    def test_drift_is_the_change_of_the_expected_length(self):
        step = 1e-6 * S1.policy_gradient / np.linalg.norm(S1.policy_gradient)
        moved = S1.moved(step)
        self.assertClose(S1.drift(S1.policy_gradient), (moved.expected(moved.lengths) - 2.28) / 1e-6, 1e-5)
        self.assertEqual(S1.drift(np.zeros(9)), 0.0)


class Table(NumberCase):
    @classmethod
    def setUpClass(cls):
        cls.lines = {line.estimator: line for line in lengths.table()}

    def test_known_numbers(self):
        for name, cosines, scales, drifts in (
            (LOO, (1, 1), (1, 1), (0.072803, 0.072803)),
            (DR_GRPO, (1, 1), (0.5, 0.666667), (0.072803, 0.072803)),
            (GRPO, (0.952605, 0.952605), (0.497702, 0.703856), (0.154971, 0.154971)),
            (TOKEN_MEAN, (0.993075, 0.996999), (0.464377, 0.645751), (0.098510, 0.090078)),
        ):
            for size, cosine, scale, drift in zip((2, 3), cosines, scales, drifts):
                line = self.lines[f"G={size}: {name}"]
                got = [line.cosine, line.scale, lengths.drift_of(line)]
                self.assertClose(got, [cosine, scale, drift], AS_PRINTED, f"G={size}: {name}")

    def test_constant_denominators_are_factors(self):
        for size in (2, 3):
            centred = np.array(self.lines[f"G={size}: {DR_GRPO}"].mean)
            self.assertClose(centred, (size - 1) / size * S1.policy_gradient, formula="(G-1)/G of leave-one-out")
            self.assertClose(self.lines[f"G={size}: centred, sum / constant"].mean, centred / 3)
            self.assertClose(self.lines[f"G={size}: {LOO}"].mean, S1.policy_gradient)

    def test_two_groups_in_a_batch_are_nearer_to_a_constant(self):
        # The longer the batch, the less its number of tokens depends on one answer.
        one, two = self.lines[f"G=2: {TOKEN_MEAN}"], self.lines[f"two groups of 2: {TOKEN_MEAN}"]
        self.assertLess(one.cosine, two.cosine)
        self.assertLess(two.cosine, 1)
        self.assertLess(lengths.drift_of(two), lengths.drift_of(one))

    def test_the_std_alone_turns_nothing_here(self):
        # Rewards are 0 or 1 and there is one prompt: dividing by the std is a factor w_G(q) on the mean.
        self.assertClose(self.lines["G=3: std, sum"].cosine, 1)
        self.assertClose(self.lines["G=3: centred, per-response mean"].cosine, self.lines[f"G=3: {GRPO}"].cosine, 1e-8)

    def test_meanings_are_short_and_rows_unchanged(self):
        self.assertEqual(self.lines[f"G=2: {GRPO}"].row, "grpo")
        self.assertIsNone(self.lines["G=2: std, sum"].row, "no row of the table divides by std and sums")
        for line in self.lines.values():
            self.assertTrue(0 < len(line.meaning) <= 90, f"{line.estimator}: {line.meaning}")


class ByHand(NumberCase):
    def test_per_response_mean(self):
        # E[(R_i - group mean) s_i / T_i] = (G-1)/G (E[R s/T] - J E[s/T]): the answers are independent.
        each = S1.scores / S1.lengths[:, None]
        wanted = S1.chances * (S1.rewards - S1.J) @ each
        for size in (2, 3):
            groups = lengths.groups_of(S1, size)
            row = lengths.REDUCTIONS["centred, per-response mean"]
            got = groups.probabilities @ lengths.gradients(row, S1, groups)
            self.assertClose(got, (size - 1) / size * wanted, formula="1/T stays inside the mean: it does not cancel")

    def test_the_sum_and_1_over_T_do_not_cancel(self):
        # The argument heard: a sum of T terms times 1/T is an average. It holds where all answers have one length.
        always = Sequences(rows=((0.5, 0.3, 0.2),))
        groups = lengths.groups_of(always, 2)
        row = lengths.REDUCTIONS["centred, per-response mean"]
        self.assertClose(groups.probabilities @ lengths.gradients(row, always, groups), always.policy_gradient / 2)
        groups = lengths.groups_of(S1, 2)
        got = groups.probabilities @ lengths.gradients(row, S1, groups)
        along = got @ S1.policy_gradient / np.linalg.norm(S1.policy_gradient) / np.linalg.norm(got)
        self.assertLess(along, 0.96, "with answers of different lengths it turns")

    def test_every_group_is_a_batch_of_its_own(self):
        groups = lengths.groups_of(S1, 3)
        picked = [3, 97, 411]  # of which one at least is mixed
        for name, row in lengths.REDUCTIONS.items():
            used = lengths.used_by(row, groups)
            got = lengths.gradients(row, S1, groups)
            for group in picked:
                if not used[group]:
                    continue
                alone = lengths.Groups(groups.members[[group]], np.ones(1), self.batch(groups.members[group]))
                slope = objectives.evaluate(row, alone.batch).dloss_dlogps.numpy()
                wanted = -S1.gradients(slope, groups.members[group]).sum(axis=0)
                self.assertClose(got[group], wanted, formula=f"{name}, group {group} by itself")
        rewards = S1.rewards[groups.members[picked]]
        self.assertTrue((rewards.max(axis=1) > rewards.min(axis=1)).any())

    def batch(self, members, groups=1):
        logps = S1.logps[members]
        ids = np.repeat(np.arange(groups), len(members) // groups)
        return objectives.make_batch(logps=logps, old_logps=logps, ref_logps=logps, mask=S1.mask[members],
                                     rewards=S1.rewards[members], group_ids=ids, budget=lengths.BUDGET)  # fmt: skip

    def test_two_groups_through_the_engine(self):
        groups, row = lengths.groups_of(S1, 2), lengths.REDUCTIONS[TOKEN_MEAN]
        both = np.array([[5, 70], [12, 99], [33, 33]])
        got = lengths.two_in_a_batch(row, S1, groups, both)
        for pair, vector in zip(both, got):
            members = groups.members[pair].ravel()
            slope = objectives.evaluate(row, self.batch(members, 2)).dloss_dlogps.numpy()
            self.assertClose(vector, -S1.gradients(slope, members).sum(axis=0))

    def test_a_mean_of_means_is_caught(self):
        # Averaging the two groups' token means is another estimator: 1/N inside each group.
        groups, row = lengths.groups_of(S1, 2), lengths.REDUCTIONS[TOKEN_MEAN]
        g = lengths.gradients(row, S1, groups)
        both = np.array([[5, 70], [12, 99]])
        self.assertGreater(np.abs(g[both].mean(axis=1) - lengths.two_in_a_batch(row, S1, groups, both)).max(), 0.01)


class MonteCarlo(NumberCase):
    def test_drawn_groups_agree(self):
        groups, row = lengths.groups_of(S1, 2), lengths.REDUCTIONS[GRPO]
        each = lengths.gradients(row, S1, groups)
        drawn = np.sort(np.random.default_rng(5).choice(15, size=(100_000, 2), p=S1.chances), axis=1)
        where = np.zeros((15, 15), dtype=int)
        where[groups.members[:, 0], groups.members[:, 1]] = np.arange(len(groups.members))
        sample = each[where[drawn[:, 0], drawn[:, 1]]]
        mean = groups.probabilities @ each
        error = np.sqrt(groups.probabilities @ (each - mean) ** 2 / len(drawn))
        self.assertLess((np.abs(sample.mean(axis=0) - mean) / error).max(), 4, "four standard errors of 100,000 groups")


if __name__ == "__main__":
    unittest.main()
