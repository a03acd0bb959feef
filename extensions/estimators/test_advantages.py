"""Baselines and scales through the engine: against closed forms, finite differences, plain loops and drawn samples."""

import math
import unittest
from dataclasses import replace
from functools import lru_cache

import numpy as np

from extensions.estimators import advantages, policy, sampled
from extensions.estimators.advantages import ESTIMATORS, estimates, lines_and_left_out, table
from extensions.estimators.enumerate import TooMany, multisets, tuples
from extensions.estimators.line import line_of
from extensions.estimators.policy import E1, E2, E3, Case
from extensions.estimators.testing import AS_PRINTED, NumberCase
from extensions.objectives import ROWS, Row

SAMPLES = 100_000
STANDARD_ERRORS = 4


@lru_cache
def lines_of(case):
    return {line.estimator: line for line in table(case)}


def drawn_of(name, case):
    what = (ESTIMATORS | ROWS)[name]
    outcomes = multisets(case.b, case.group_size)
    if isinstance(what, Row):
        return sampled.row_gradients(what, case, outcomes)
    return sampled.rule_gradients(what(case), case, outcomes)


def group_gradients(advantages_of, case, members):
    """(1/G) sum A_i s_i written out: the oracle that does not use the engine."""
    A = advantages_of(case.R[members])
    return np.einsum("mg,mgk->mk", A, policy.scores(case.p)[members]) / members.shape[1]


class ReferenceNumbers(NumberCase):
    """Six decimals of E[g] and tr Cov for the policies E1 and E3."""

    TRACE_COV_E1 = {  # G = 2, 4, 8
        "no baseline": (0.066256, 0.033128, 0.016564),
        "V = J": (0.068004, 0.034002, 0.017001),
        "best constant b*": (0.050719, 0.025360, 0.012680),
        "leave-one-out": (0.234552, 0.061760, 0.022949),
        "group mean": (0.058638, 0.034740, 0.017570),
        "/ std, ddof 0": (0.213800, 0.128454, 0.052989),
        "/ std, ddof 1": (0.106900, 0.096340, 0.046366),
    }
    TRACE_COV_E3 = dict(zip(TRACE_COV_E1, (0.002458, 0.018517, 0.002370, 0.019075, 0.014604, 0.080295, 0.070258)))

    def test_variances(self):
        wanted = {(E1, G): {name: row[i] for name, row in self.TRACE_COV_E1.items()} for i, G in enumerate((2, 4, 8))}
        wanted[E3, 8] = self.TRACE_COV_E3
        for (case, size), numbers in wanted.items():
            for name, number in numbers.items():
                with self.subTest(name, p=case.probabilities, G=size):
                    drawn = drawn_of(name, replace(case, group_size=size))
                    made = line_of(name, drawn.vectors, drawn.probabilities, policy.policy_gradient(case.p, case.R))
                    self.assertClose(made.trace_cov, number, AS_PRINTED, "tr Cov(g)", "sum over answers instead of 1/G")

    def test_directions_of_a_group_of_four(self):
        lines = lines_of(E1)
        for name, mean in {
            "/ std, ddof 0": (0.385794, -0.145876, -0.239918),
            "/ std, ddof 1": (0.334107, -0.126332, -0.207775),
        }.items():
            self.assertClose(lines[name].mean, mean, AS_PRINTED, "E[g]", "the other divisor of the variance")
            self.assertClose(lines[name].cosine, 0.995075, AS_PRINTED)
        self.assertClose(lines["group mean"].mean, 0.75 * np.array([0.27, -0.078, -0.192]))

    def test_a_perfect_critic_has_seven_times_the_variance_of_none_on_a_settled_policy(self):
        lines = lines_of(replace(E3, group_size=8))
        self.assertClose(lines["V = J"].trace_cov / lines["no baseline"].trace_cov, 7.53, 0.01)
        self.assertLess(lines["best constant b*"].trace_cov, lines["no baseline"].trace_cov)


class ClosedForms(NumberCase):
    CASES = [replace(case, group_size=size) for case in (E1, E2, E3) for size in (2, 3, 4, 8)]

    def line(self, name, case):
        drawn = drawn_of(name, case)
        return line_of(name, drawn.vectors, drawn.probabilities, policy.policy_gradient(case.p, case.R))

    def test_unbiased_ones_are_the_finite_difference_of_J(self):
        for case in self.CASES:
            slope = policy.finite_difference(lambda z: float(policy.softmax(z) @ case.R), np.log(case.p))
            for name in ("no baseline", "V = J", "best constant b*", "leave-one-out", "leave-one-out, shrunk"):
                with self.subTest(name, p=case.probabilities, G=case.group_size):
                    self.assertRelative(self.line(name, case).mean, slope, formula="E[g] = d J / d logits")

    def test_constant_baselines(self):
        for case in self.CASES:
            J, best = policy.expected_reward(case.p, case.R), policy.best_baseline(case.p, case.R)
            for name, b in {"no baseline": 0.0, "V = J": J, "V = J + 0.5": J + 0.5, "best constant b*": best}.items():
                wanted = policy.constant_baseline_variance(case.p, case.R, b, case.group_size)
                formula = "tr Cov = (1/G) (sum p (R - b)^2 |s|^2 - |grad J|^2)"
                self.assertClose(self.line(name, case).trace_cov, wanted, formula=formula)

    def test_leave_one_out_is_a_u_statistic(self):
        for case in self.CASES:
            p, R, s, G = case.p, case.R, policy.scores(case.p), case.group_size
            gradient = policy.policy_gradient(p, R)
            one = (R - p @ R)[:, None] * s
            kernel = (R[:, None] - R)[:, :, None] * (s[:, None] - s) / 2
            V1 = p @ (one**2).sum(axis=1) - gradient @ gradient
            V2 = p @ (kernel**2).sum(axis=2) @ p - gradient @ gradient
            wanted = (G - 2) / (G * (G - 1)) * V1 + 2 / (G * (G - 1)) * V2
            formula = "tr Cov = (G-2)/(G(G-1)) V1 + 2/(G(G-1)) V2, V1 of (R-J)s, V2 of (R_i-R_j)(s_i-s_j)/2"
            self.assertClose(self.line("leave-one-out", case).trace_cov, wanted, formula=formula)

    def test_group_mean_is_leave_one_out_times_a_number_in_every_single_group(self):
        for case in self.CASES:
            factor = (case.group_size - 1) / case.group_size
            pair = [drawn_of(name, case).vectors for name in ("group mean", "leave-one-out")]
            self.assertClose(pair[0], factor * pair[1], formula="g(group mean) = (G-1)/G g(leave-one-out), group by group")

    def test_the_two_divisors_of_the_variance_differ_by_a_number(self):
        for case in self.CASES:
            factor = math.sqrt((case.group_size - 1) / case.group_size)
            pair = [drawn_of(name, case).vectors for name in ("/ std, ddof 1", "/ std, ddof 0")]
            self.assertClose(pair[0], factor * pair[1], formula="ddof 1 = sqrt((G-1)/G) times ddof 0")

    def test_a_constant_added_to_all_rewards_changes_no_group_estimator(self):
        moved = replace(E1, rewards=tuple(r + 3.0 for r in E1.rewards))
        for name in ("group mean", "leave-one-out", "/ std, ddof 0", "group median"):
            pair = drawn_of(name, moved).vectors, drawn_of(name, E1).vectors
            self.assertClose(*pair, formula="g(R + c) = g(R)", mistake="R instead of R - mean")

    def test_mixed_only_is_the_same_sum_over_fewer_groups(self):
        """Groups of equal rewards have gradient 0, so leaving them out divides the mean by the chance of the others."""
        for with_, without in (("group mean, mixed only", "group mean"), ("/ std, mixed only", "/ std, ddof 0")):
            mixed = drawn_of(with_, E1)
            chance = 1 - (E1.p**4).sum()
            self.assertClose(mixed.draws_for_one, 1 / chance, formula="1 / (1 - sum p^G)")
            whole = drawn_of(without, E1)
            self.assertClose(mixed.probabilities @ mixed.vectors, whole.probabilities @ whole.vectors / chance)

    def test_a_broken_baseline_is_seen(self):
        """Leave-one-out with the group's own divisor, a real mistake: the sum of the others over G."""
        def broken(R):
            return R - (R.sum(axis=1, keepdims=True) - R) / R.shape[1]
        drawn = sampled.rule_gradients(broken, E1, multisets(E1.p, 4))
        self.assertClose(drawn.probabilities @ drawn.vectors, policy.policy_gradient(E1.p, E1.R), formula="still unbiased")
        made = line_of("", drawn.vectors, drawn.probabilities, policy.policy_gradient(E1.p, E1.R))
        self.assertGreater(abs(made.trace_cov - 0.061760), 1e-3, "a mean alone would not have told the two apart")


class EveryRow(NumberCase):
    def test_the_table_grows_with_the_rows(self):
        lines, refused = lines_and_left_out(E1)
        named = [line.row for line in lines if line.row is not None and line.estimator == line.row]
        self.assertEqual(set(named) | set(refused) & set(ROWS), set(ROWS), "a row of objectives.ROWS is in neither list")
        self.assertEqual(set(refused), {"/ mean", "maxrl"}, "on rewards below 0 only the division by the mean is refused")
        _, refused = lines_and_left_out(Case((0.2, 0.8), (1.0, 0.0)))
        self.assertEqual(refused, {}, "rewards of 0 and 1 suit every row")

    def test_rows_through_many_groups_at_once_are_rows_through_one_group_at_a_time(self):
        """looks_at_the_batch is right for every row: all groups as prompts of one batch give what each gives alone."""
        case = replace(E1, rewards=(1.0, 0.2, 0.1), reference=(0.3, 0.3, 0.4))
        for name, row in ROWS.items():
            if not sampled.looks_at_the_batch(row):
                with self.subTest(name):
                    drawn = sampled.row_gradients(row, case, multisets(case.p, 3))
                    members = [m for m in multisets(case.p, 3).members if row.group_filter == "none" or len(set(m)) > 1]
                    alone = [sampled._of_one_batch(row, case, m[None])[0] for m in members]
                    self.assertClose(drawn.vectors, alone, 1e-12, mistake="a statistic of the batch: see looks_at_the_batch")

    def test_rows_that_look_at_the_batch_do(self):
        """The other side: each of them does give something else when other groups stand in its batch."""
        case, members = E1, multisets(E1.p, 4).members
        equal_here = ("top_entropy", "kl_cov")  # one entropy for all tokens; on-policy the KL to the old policy is flat
        for name, row in ROWS.items():
            if sampled.looks_at_the_batch(row) and name not in equal_here:
                with self.subTest(name):
                    together = sampled._of_one_batch(row, case, members)
                    alone = np.array([sampled._of_one_batch(row, case, m[None])[0] for m in members])
                    self.assertGreater(np.abs(together - alone).max(), 1e-6)

    def test_rows_against_a_gradient_written_out(self):
        std = {"grpo": (0, 1e-8), "grpo@trl-1.16.0": (1, 1e-4), "grpo@verl-0.9.1": (1, 1e-6)}
        members = multisets(E1.p, 4).members
        for name, (ddof, eps) in std.items():
            def A(R, ddof=ddof, eps=eps):
                return (R - R.mean(axis=1, keepdims=True)) / (R.std(axis=1, ddof=ddof, keepdims=True) + eps)
            self.assertClose(drawn_of(name, E1).vectors, group_gradients(A, E1, members), 1e-10, "(1/G) sum A_i s_i")

    def test_rows_with_a_kl_are_held_against_the_gradient_with_that_kl(self):
        """rloo has k1 in the reward, which is unbiased for J - 0.05 KL(p || r); grpo's k3 in the loss is not."""
        case = replace(E1, reference=(0.2, 0.3, 0.5))
        lines = lines_of(case)
        def objective(z):
            p = policy.softmax(z)
            return float(p @ case.R - 0.05 * policy.kl(p, case.r))
        slope = policy.finite_difference(objective, np.log(case.p))
        self.assertRelative(lines["rloo"].mean, slope, formula="E[g] = grad (J - 0.05 KL(p || r))")
        self.assertClose(lines["rloo"].cosine, 1.0)
        self.assertClose(lines["leave-one-out"].mean, policy.policy_gradient(case.p, case.R), formula="without any KL")

    def test_a_wrong_default_shows_as_a_number(self):
        """TRL's cispo with epsilon_high left at 0.2 has a fifth of the gradient of what is meant."""
        lines = lines_of(E1)
        ratio = np.divide(lines["cispo@trl-1.16.0"].mean, lines["grpo@trl-1.16.0"].mean)
        self.assertClose(ratio, [0.2] * 3)

    def test_group_of_one_is_refused_in_one_line(self):
        with self.assertRaises(ValueError) as caught:
            table(replace(E1, group_size=1))
        self.assertIn("--group-size: got 1, wanted at least 2: leave-one-out needs another answer", str(caught.exception))

    def test_equal_rewards_teach_nothing(self):
        lines = lines_of(Case((0.5, 0.5), (1.0, 1.0)))
        self.assertIsNone(lines["leave-one-out"].cosine)
        self.assertClose(lines["group mean"].trace_cov, 0.0)
        self.assertGreater(lines["no baseline"].trace_cov, 0.1, "without a baseline there is noise even here")

    def test_rows_that_look_at_the_batch_are_bounded(self):
        with self.assertRaises(TooMany):
            sampled.check_calls(sampled.CALLS + 1)
        case = Case((0.1,) * 10, tuple(range(10)), 6)
        with self.assertRaises(TooMany):
            sampled.row_gradients(ROWS["reinforce_pp"], case, multisets(case.p, 6))


class TwoPrompts(NumberCase):
    def test_batch_std_against_all_ordered_draws(self):
        """Two answers to each of two prompts, 3^4 ordered draws, written out without the engine."""
        case, name = replace(E1, group_size=2), "group mean, batch std"
        second = sampled.settled(case)
        self.assertClose(second.p, E1.p**4 / (E1.p**4).sum())
        draws = tuples(np.array([case.p, case.p, second.p, second.p]), 4)
        R = case.R[draws.members]
        A = np.concatenate([half - half.mean(axis=1, keepdims=True) for half in (R[:, :2], R[:, 2:])], axis=1)
        A = A - A.mean(axis=1, keepdims=True)
        spread = A.std(axis=1, keepdims=True)
        A = np.divide(A, spread, out=np.zeros_like(A), where=spread > 1e-9)
        g = []
        for prompt, part in ((case, slice(0, 2)), (second, slice(2, 4))):
            s = policy.scores(prompt.p)[draws.members[:, part]]
            g.append(np.einsum("mg,mgk->mk", A[:, part], s) / 4)
        wanted = draws.probabilities @ np.concatenate(g, axis=1)
        drawn, truth = sampled.two_prompt_gradients(ESTIMATORS[name], case)
        self.assertClose(drawn.probabilities @ drawn.vectors, wanted, 1e-12, "mean and std over the four answers")
        both = [policy.policy_gradient(prompt.p, prompt.R) / 2 for prompt in (case, second)]
        self.assertClose(truth, np.concatenate(both), formula="the mean of two prompts: half of each gradient")

    def test_a_std_of_the_batch_keeps_what_a_std_of_the_group_levels(self):
        """The weight of the settled prompt against the open one: 1 without a std, more with each group's own."""
        lines, of_two = lines_of(E1), lambda name: advantages.two_prompt_name(name, 3)
        def settled_against_open(name):
            mean, truth = np.array(lines[of_two(name)].mean), np.array(lines[of_two("leave-one-out")].mean)
            return (mean[3:] @ truth[3:] / (truth[3:] @ truth[3:])) / (mean[:3] @ truth[:3] / (truth[:3] @ truth[:3]))
        own, whole = settled_against_open("/ std, ddof 0"), settled_against_open("group mean, batch std")
        self.assertClose(settled_against_open("group mean"), 1.0)
        self.assertGreater(own, 1.2, "the group's own std favours the settled prompt")
        self.assertLess(abs(whole - 1), abs(own - 1))


class MonteCarlo(NumberCase):
    def test_a_hundred_thousand_drawn_groups_agree(self):
        """Means inside four standard errors, with a fixed seed; the groups are drawn and summed without the enumeration."""
        generator = np.random.default_rng(12)
        members = generator.choice(3, size=(SAMPLES, 4), p=E1.p)
        rules = {
            "leave-one-out": lambda R: (R - R.mean(axis=1, keepdims=True)) * 4 / 3,
            "group median": lambda R: R - np.median(R, axis=1, keepdims=True),
            "/ (std + 0.1)": lambda R: (R - R.mean(axis=1, keepdims=True)) / (R.std(axis=1, keepdims=True) + 0.1),
        }
        for name, rule in rules.items():
            with self.subTest(name):
                sample = group_gradients(rule, E1, members)
                drawn = drawn_of(name, E1)
                mean = drawn.probabilities @ drawn.vectors
                error = sample.std(axis=0) / math.sqrt(SAMPLES)
                self.assertLess(np.abs((sample.mean(axis=0) - mean) / error).max(), STANDARD_ERRORS)
                made = line_of("", drawn.vectors, drawn.probabilities, mean)
                spread = ((sample - mean) ** 2).sum(axis=1)
                error = spread.std() / math.sqrt(SAMPLES)
                self.assertLess(abs(spread.mean() - made.trace_cov) / error, STANDARD_ERRORS, "tr Cov")
                self.assertGreater(np.abs((sample.mean(axis=0) - 1.05 * mean) / error).max(), STANDARD_ERRORS)


class Names(NumberCase):
    def test_names_are_unique_and_rows_are_real(self):
        lines = table(E1)
        self.assertEqual(len({line.estimator for line in lines}), len(lines))
        self.assertTrue(all(line.row is None or line.row in ROWS for line in lines))
        own = {line.estimator: line.row for line in lines}
        self.assertEqual((own["no baseline"], own["group mean"], own["/ std, ddof 0"]), ("reinforce", "dr_grpo", None))

    def test_refusals_are_told_once_each(self):
        refused = {}
        made = [e.name for e in estimates(E1, refused)]
        self.assertEqual(len(made) + len(refused), len(ESTIMATORS) + len(ROWS))
        self.assertEqual(set(refused), {"/ mean", "maxrl"})
        self.assertTrue(all("\n" not in reason for reason in refused.values()))
        self.assertEqual(made[:2], ["no baseline", "V = J"])


if __name__ == "__main__":
    unittest.main()
