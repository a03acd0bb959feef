"""The rules by hand numbers, on real processes; and that one process is the identity."""

from __future__ import annotations

import math
import unittest

import torch

from extensions.distributed import fixtures, rules
from extensions.distributed.rules import Counted, Engine, Moments, Totals
from extensions.distributed.testing import RANKS, run


class NumberCase(unittest.TestCase):
    def assertNumbers(self, got, wanted, digits=1e-12, says=""):
        got, wanted = (torch.as_tensor(x, dtype=torch.float64) for x in (got, wanted))
        self.assertEqual(got.shape, wanted.shape, says)
        worst = (got - wanted).abs().max().item()
        self.assertLessEqual(worst, digits, f"{says}: got {got}, wanted {wanted}")


class Denominators(NumberCase):
    def test_token_mean_of_two_ranks(self):
        # loss -A x: gradient -(1*10 + -1*100)/110 = 90/110. Mean of means: -(10/10 - 100/100)/2 = 0. Without W: half.
        for A, T, right, means, forgot in (([1, -1], [10, 100], 0.818182, 0, 0.409091), ([1, -1], [2, 3], 0.2, 0, 0.1)):
            for got in run(fixtures.token_means, A, T)[:2]:
                self.assertNumbers(got["right"], right, 5e-7, "S W / N, DDP means over ranks")
                self.assertNumbers(got["mean of means"], means, 5e-7, "twin: every answer weighs the same")
                self.assertNumbers(got["forgot W"], forgot, 5e-7, "twin: DDP's mean divides by W once more")

    def test_what_undoes_the_engine(self):
        # S = 6, N = 4, B = 3, C = 5.
        S, totals = torch.tensor(6.0), Totals(tokens=4, rows=3, micro_batches=2)
        for engine, factor in ((Engine(), 1), (Engine(divides_by=2), 2), (Engine(averages=False, divides_by=2), 2)):
            self.assertEqual(engine.factor, factor)
            self.assertEqual(rules.mean_over_tokens(S, totals, engine).item(), factor * 1.5)
            self.assertEqual(rules.mean_per_response(S, totals, engine).item(), factor * 2.0)
            self.assertNumbers(rules.sum_over_constant(S, totals, 5.0, engine), factor * 0.4, 1e-7)
            self.assertEqual(rules.sums(S, engine).item(), factor * 6.0)

    def test_rows_are_dealt_out_whole(self):
        for n in (0, 3, 8, 11):
            for W in (1, 2, 3, 4):
                parts = [list(range(n))[rules.share(n, r, W)] for r in range(W)]
                self.assertEqual(sum(parts, []), list(range(n)), "every row once, in order")
                self.assertLessEqual(max(map(len, parts)) - min(map(len, parts)), 1, "as even as can be")
        with self.assertRaisesRegex(ValueError, "got 4 of 4"):
            rules.share(8, 4, 4)

    def test_fewer_micro_batches_are_filled_up(self):
        self.assertEqual(list(rules.padded(["a"], Totals(4, 3, 3))), ["a", None, None])
        weight = torch.nn.Parameter(torch.tensor([1.0, math.inf]))
        rules.zero_loss([weight]).backward()
        self.assertEqual(weight.grad.tolist(), [0.0, 0.0])
        twin = torch.nn.Parameter(torch.tensor([1.0, math.inf]))
        (0 * twin).sum().backward()
        self.assertEqual((0 * twin).sum().isnan().item(), True, "twin: 0 * p is NaN where p is infinite")


class Statistics(NumberCase):
    R, IDS = [1.0, 0.0, 0.0, 0.0], [7, 7, 7, 7]
    RIGHT = [1.7321, -0.5774, -0.5774, -0.5774]  # mean 1/4, std sqrt(3)/4: (3/4) / (sqrt(3)/4) = sqrt(3)

    def advantages(self, R, ids, counts, local=False):
        return sum(run(fixtures.group_advantages, R, ids, counts, local), [])

    def test_group_statistics_by_prompt_id(self):
        for counts in ([2, 2, 0, 0], [0, 1, 3, 0], [1, 1, 1, 1], [0, 0, 0, 4]):
            self.assertNumbers(self.advantages(self.R, self.IDS, counts), self.RIGHT, 5e-5, f"answers of each rank {counts}")
        twin = self.advantages(self.R, self.IDS, [2, 2, 0, 0], local=True)
        self.assertNumbers(twin, [1.0, -1.0, 0.0, 0.0], 5e-5, "twin: each half alone")

    def test_ids_and_not_places_make_a_group(self):
        R, ids = [1.0, 5.0, 0.0, 9.0, 0.0, 2.0, 0.0, 9.0], [3, 8, 3, 4, 3, 8, 3, 4]
        got = self.advantages(R, ids, [1, 4, 0, 3])
        self.assertNumbers(got[::2][:1] + got[2::4], [math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)], 1e-7)
        self.assertNumbers([got[1], got[5]], [1.0, -1.0], 1e-7, "R = 5, 2: mean 3.5, std 1.5")
        self.assertEqual([got[3], got[7]], [0.0, 0.0], "equal rewards have no spread")
        tenths = self.advantages([0.1] * 6, [1] * 6, [3, 3, 0, 0])
        self.assertEqual(tenths, [0.0] * 6, "also where their mean is rounded: no 1e-17 / 1e-8")

    def test_sample_std_and_sizes(self):
        of = rules.group_statistics(torch.tensor([1.0, 3.0, 4.0]), torch.tensor([5, 5, 6]), ddof=1)
        self.assertEqual(of.size.tolist(), [2, 2, 1])
        self.assertEqual(of.mean.tolist(), [2, 2, 4])
        self.assertNumbers(of.std, [math.sqrt(2), math.sqrt(2), 0.0])  # sqrt((1 + 1) / 1); one answer has none

    def test_whitening(self):
        x, counts = [1.0, 1.0, 1.0, -1.0, -1.0, 2.0, -0.5], [5, 2, 0, 0]
        got = run(fixtures.whiten, x, counts)
        self.assertNumbers(got[1], [1.3920, -0.7263], 5e-5, "mean 2.5/7, std sqrt(8.3571/6)")
        whole = torch.tensor(x, dtype=torch.float64)
        self.assertNumbers(sum(got, []), (whole - whole.mean()) / whole.std(), 1e-7)
        local = [rules.whiten(part).tolist() for part in (whole[:5], whole[5:])]
        self.assertNumbers(local[1], [0.7071, -0.7071], 5e-5, "twin: the rank's own two numbers")
        self.assertNumbers(max(abs(a - b) for a, b in zip(got[0] + got[1], local[0] + local[1])), 0.6849, 5e-5)

    def test_combined_moments_keep_their_digits(self):
        # Around 1e8 the squares are 1e16, and their difference has no digit left for a variance of 1.25.
        x = [1e8 + k for k in (0.0, 1.0, 2.0, 3.0)]
        for got in run(fixtures.moments_of_all, x, [1, 0, 3, 0]):
            self.assertNumbers(got, [4, 1e8 + 1.5, 5.0], 1e-6, "M2 = sum M2_r + sum n_r (m_r - m)^2")
        twin = sum(v * v for v in x) - sum(x) ** 2 / 4
        self.assertGreater(abs(twin - 5.0), 1.0, "twin: sum x^2 - (sum x)^2 / n")
        without_means = sum(rules.moments(torch.tensor(part)).M2 for part in ([0.0], [1.0, 2.0, 3.0]))
        self.assertNumbers(without_means, 2.0, says="twin: the ranks' own M2 alone")
        self.assertEqual(rules.combine([Moments(0, 0, 0)]), Moments(0, 0, 0))

    def test_masked_entries_do_not_count(self):
        x, mask = torch.tensor([[1.0, 9.0], [3.0, 9.0]]), torch.tensor([[True, False], [True, False]])
        self.assertEqual(rules.moments(x, mask), Moments(2, 2.0, 2.0))
        self.assertNumbers(rules.whiten(x, mask), [[-math.sqrt(0.5), 0.0], [math.sqrt(0.5), 0.0]], 1e-7)


class AfterTheBackward(NumberCase):
    def test_clipping(self):
        for got in run(fixtures.clipped, [[3.0, 4.0], [0.3, -0.4]], False)[:2]:
            self.assertNumbers(got, [0.675725, 0.737154], 5e-7, "mean (1.65, 1.8), norm 2.441823")
        for got in run(fixtures.clipped, [[3.0, 4.0], [0.3, -0.4]], True)[:2]:
            self.assertNumbers(got, [0.45, 0.2], 1e-12, "twin: (.6, .8) and (.3, -.4) averaged")
        small = torch.nn.Parameter(torch.zeros(2))
        small.grad = torch.tensor([0.3, 0.4])
        self.assertNumbers(rules.clip_after_reduction([small], 1.0), 0.5, 1e-7)
        self.assertNumbers(small.grad, torch.tensor([0.3, 0.4]), 0.0, "a norm below the limit stays")

    def test_stop_and_log_are_the_same_on_every_rank(self):
        # (.1 + .2 + .3 + 3.0) / (1 + 2 + 3 + 10) = .225; the mean of the ranks' means is .15.
        kl, tokens = [0.1, 0.2, 0.3, 3.0], [1, 2, 3, 10]
        got = run(fixtures.decisions, kl, tokens, 0.2)
        self.assertEqual({decision[:2] for decision in got}, {(True, (3.6 / 16).hex())})
        self.assertNumbers(got[0][2], 0.225)
        own = [total / n > 0.2 for total, n in zip(kl, tokens)]
        self.assertEqual(own, [False, False, False, True], "twin: decided alone, one rank would leave")
        self.assertTrue(run(fixtures.decisions, [math.nan, 0, 0, 0], tokens, 0.2)[3][0], "a KL that is NaN stops all")
        self.assertTrue(math.isnan(rules.logged_mean(0.0, 0)))

    def test_a_rank_without_a_gradient_joins_with_zeros(self):
        # a: ranks 1, 2, 3 bring 2, 3, 4; b: rank 0 brings 1.
        self.assertEqual(run(fixtures.reduced_with_a_missing_gradient), [([9.0, 9.0], [1.0, 1.0])] * RANKS)


class OneProcess(NumberCase):
    def test_no_group_communicates_nothing(self):
        group = Counted(None)
        totals = rules.count(4, 3, 2, group)
        self.assertEqual(totals, Totals(4, 3, 2))
        self.assertEqual((rules.world_size(group), rules.rank_in(group), Engine(group).factor), (1, 0, 1))
        x = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
        self.assertNumbers(rules.whiten(x, group=group), (x - x.mean()) / (x.std() + 1e-8), 1e-15)
        self.assertEqual(rules.kl_stop(2.0, 4, 0.5, group), (False, 0.5))
        weight = torch.nn.Parameter(torch.zeros(2))
        weight.grad = torch.tensor([1.0, 2.0])
        rules.reduce_gradients([weight], group)
        self.assertEqual(weight.grad.tolist(), [1.0, 2.0])
        joined, own = rules.gather_rows(x.unsqueeze(1), group)
        self.assertEqual((joined.tolist(), own), (x.unsqueeze(1).tolist(), slice(0, 3)))

    def test_float32_losses_stay_float32(self):
        loss = rules.mean_over_tokens(torch.tensor(3.0), Totals(7, 1, 1), Engine())
        self.assertEqual(loss.dtype, torch.float32)


class Refusals(unittest.TestCase):
    def test_all_ranks_refuse_alike(self):
        for said in run(fixtures.complaints):
            self.assertIn("none of the 4 rank(s) has a counted token", said[0])
            self.assertIn("rank 1 counts [5, -1, 1]", said[1])
            self.assertIn("1 entries over all ranks", said[2])


if __name__ == "__main__":
    unittest.main()
