"""The guide's acceptance suite: 19 tests, in the order of the guide; more cases are subtests.

Expected numbers carry their arithmetic. A `*_wrong` function is a broken twin: the test shows that it can tell the two
apart.
"""

import math
import unittest

import torch
from torch import Tensor

import token_objectives as tokens
from ppo_chain import episode_by_episode, train_chain
from rl_lab import (
    REWARDS,
    action_logps,
    categorical_kl,
    clipped_policy_loss,
    dpo_loss,
    gae,
    group_advantages,
    kl_estimates,
    response_logps,
    response_token_logps,
    train,
)

SEEDS = (0, 7, 19)
THREADS = torch.get_num_threads()


def setUpModule():
    torch.set_num_threads(1)  # as the commands do: a second thread only slows tensors of this size


def tearDownModule():
    torch.set_num_threads(THREADS)


def f64(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def leaf(*numbers: float) -> Tensor:
    return f64(*numbers).requires_grad_()


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


class Case(unittest.TestCase):
    def assertClose(self, got, wanted, atol: float = 1e-12) -> None:
        wanted = torch.as_tensor(wanted, dtype=torch.float64)
        torch.testing.assert_close(torch.as_tensor(got, dtype=torch.float64).detach(), wanted, rtol=0, atol=atol)


class Gae(Case):
    def test_terminal_reward_reaches_every_step(self):
        end = flags(0, 0, 1)
        # delta = (0, 0, 1); A_2 = 1, A_1 = 0 + lam * 1, A_0 = 0 + lam * A_1.
        for lam, wanted in ((1.0, [1, 1, 1]), (0.5, [0.25, 0.5, 1]), (0.0, [0, 0, 1])):
            with self.subTest(lam=lam):
                advantages, returns = gae(f64(0, 0, 1), f64(0, 0, 0), f64(0, 0, 0), end, end, gamma=1.0, lam=lam)
                self.assertClose(advantages, wanted)
                self.assertClose(returns, wanted)
        with self.subTest("gamma acts twice: in delta and in the recursion"):
            # gamma .9, lam .5: delta = (1 + .9*2 - 1, 1 - 2) = (1.8, -1); A = (1.8 + .45 * -1, -1); returns = A + V.
            advantages, returns = gae(f64(1, 1), f64(1, 2), f64(2, 9), flags(0, 1), flags(0, 1), gamma=0.9, lam=0.5)
            self.assertClose(advantages, [1.35, -1.0])
            self.assertClose(returns, [2.35, 1.0])
        with self.subTest("no gradient leaves"):
            values = leaf(0.1, 0.2, 0.3)
            for output in gae(leaf(0, 0, 1), values, values, end, end):
                self.assertFalse(output.requires_grad)

    def test_truncation_bootstraps_from_the_final_observation(self):
        # Nothing terminated: delta = (0 + .4 - .5, 0 + .7 - .4) = (-.1, .3); lam 1: A = (-.1 + .3, .3).
        arguments = f64(0, 0), f64(0.5, 0.4), f64(0.4, 0.7)
        advantages, returns = gae(*arguments, flags(0, 0), flags(0, 1), gamma=1.0, lam=1.0)
        self.assertClose(advantages, [0.2, 0.3])
        self.assertClose(returns, [0.7, 0.7])
        with self.subTest("one flag for both is another number"):
            # Terminated at the limit: delta_1 = 0 - .4; A = (-.1 - .4, -.4).
            merged, _ = gae(*arguments, flags(0, 1), flags(0, 1), gamma=1.0, lam=1.0)
            self.assertClose(merged, [-0.5, -0.4])
        with self.subTest("a value after a real end is never read"):
            advantages, _ = gae(f64(0, 1), f64(0.5, 0.4), f64(0.4, math.nan), flags(0, 1), flags(0, 1), gamma=1.0, lam=1.0)
            self.assertClose(advantages, [0.5, 0.6])  # delta = (-.1, 1 - .4)
        with self.subTest("terminated without boundary is refused"):
            with self.assertRaisesRegex(ValueError, "terminated is True"):
                gae(*arguments, flags(0, 1), flags(0, 0))

    def test_episodes_in_one_flat_batch_do_not_mix(self):
        generator = torch.Generator().manual_seed(0)
        rewards, values, next_values = torch.randn(3, 6, dtype=torch.float64, generator=generator)
        terminated, boundary = flags(0, 1, 0, 0, 0, 1), flags(0, 1, 0, 1, 0, 1)
        whole, _ = gae(rewards, values, next_values, terminated, boundary, gamma=0.9, lam=0.8)
        for start in (0, 2, 4):
            part = slice(start, start + 2)
            of_part = (series[part] for series in (rewards, values, next_values, terminated, boundary))
            alone, _ = gae(*of_part, gamma=0.9, lam=0.8)
            self.assertClose(whole[part], alone)
        with self.subTest("rows of a batch are episodes of their own"):
            rows = [x.reshape(3, 2) for x in (rewards, values, next_values, terminated, boundary)]
            batched, _ = gae(*rows, gamma=0.9, lam=0.8)
            self.assertClose(batched.flatten(), whole)
        with self.subTest("stacking all first steps before all second steps leaks"):
            first, second, zero = f64(0, 0), f64(0, 1), f64(0, 0, 0, 0)
            end = episode_by_episode(flags(0, 0), flags(1, 1))
            right, _ = gae(episode_by_episode(first, second), zero, zero, end, end, gamma=1.0, lam=1.0)
            self.assertClose(right, [0, 0, 1, 1])
            stacked_end = torch.cat([flags(0, 0), flags(1, 1)])
            wrong, _ = gae(torch.cat([first, second]), zero, zero, stacked_end, stacked_end, gamma=1.0, lam=1.0)
            self.assertNotEqual(wrong[[0, 2, 1, 3]].tolist(), right.tolist())


class PolicyObjectives(Case):
    def test_clipped_loss_four_cases_value_and_gradient(self):
        logp, old_logp, advantages = f64(1.5, 0.5, 1.5, 0.5).log().requires_grad_(), leaf(0, 0, 0, 0), leaf(1, -1, -1, 1)
        loss = clipped_policy_loss(logp, old_logp, advantages)
        # objective min(rho A, clip(rho) A): min(1.5, 1.2), min(-.5, -.8), min(-1.5, -1.2), min(.5, .8).
        self.assertClose(-loss, [1.2, -0.8, -1.5, 0.5])
        gradient, *others = torch.autograd.grad(loss.sum(), [logp, old_logp, advantages], allow_unused=True)
        self.assertClose(gradient, [0.0, 0.0, 1.5, -0.5])  # -rho A where the clip is not flat
        self.assertEqual(others, [None, None])
        with self.subTest("other widths"):
            # epsilon .6: nothing is clipped any more, so every row is rho A.
            self.assertClose(-clipped_policy_loss(logp, old_logp, advantages, epsilon=0.6), [1.5, -0.5, -1.5, 0.5])
        with self.subTest("clipping without the minimum is another objective"):
            without_minimum_wrong = logp.exp().clamp(0.8, 1.2) * advantages
            self.assertNotEqual(without_minimum_wrong.tolist(), (-loss).tolist())  # its third row is -1.2
        with self.subTest("an old log-probability recomputed from the current policy makes every ratio 1"):
            self.assertClose(-clipped_policy_loss(logp, logp, advantages), [1, -1, -1, 1])

    def test_exact_kl_value_direction_and_gradient(self):
        p, q = f64(0.5, 0.5), f64(0.9, 0.1)
        # KL(p || q) = .5 log(.5/.9) + .5 log(.5/.1) = .510826; KL(q || p) = .9 log 1.8 + .1 log .2 = .368064.
        self.assertClose(categorical_kl(p.log(), q.log()), 0.510826, atol=5e-7)
        self.assertClose(categorical_kl(q.log(), p.log()), 0.368064, atol=5e-7)
        logits, reference = leaf(1.0, -0.5, 0.3), leaf(0.2, 0.4, -1.0)
        kl = categorical_kl(logits, reference)
        gradient, of_reference = torch.autograd.grad(kl, [logits, reference], allow_unused=True)
        # d KL / d z_a = p_a (log p_a - log q_a - KL).
        probability, gap = logits.softmax(-1), logits.log_softmax(-1) - reference.log_softmax(-1)
        self.assertClose(gradient, (probability * (gap - kl)).detach())
        self.assertIsNone(of_reference)
        with self.subTest("zero, with zero gradient, at equality"):
            kl = categorical_kl(logits, logits.detach())
            self.assertClose(kl, 0)
            self.assertClose(torch.autograd.grad(kl, logits)[0], [0, 0, 0])
        with self.subTest("k1 and k3 average to it under the policy; k3 reversed does not"):
            policy, other = f64(0.7, 0.2, 0.1), f64(0.3, 0.3, 0.4)
            k1, _, k3 = kl_estimates(policy.log(), other.log())
            exact = categorical_kl(policy.log(), other.log())  # .373386
            self.assertClose((policy * k1).sum(), exact)
            self.assertClose((policy * k3).sum(), exact)
            reversed_k3_wrong = kl_estimates(other.log(), policy.log())[2]
            self.assertGreater(abs((policy * reversed_k3_wrong).sum() - exact), 0.04)  # .4183

    def test_dpo_loss_at_the_reference_and_away_from_it(self):
        chosen, rejected, ref_chosen, ref_rejected = leaf(-2), leaf(-2), leaf(-2), leaf(-2)
        loss = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.5)
        self.assertClose(loss, [math.log(2)])
        gradients = torch.autograd.grad(loss.sum(), [chosen, rejected, ref_chosen, ref_rejected], allow_unused=True)
        self.assertClose(gradients[0], [-0.25])  # -beta sigmoid(-beta h) = -.5 * .5
        self.assertClose(gradients[1], [0.25])
        self.assertEqual(gradients[2:], (None, None))
        # margin 2, beta .2: log(1 + exp(-.4)) = .513015; chosen .4 -> .3, rejected .3 -> .1: log(1 + 1 / 2.25) = .367725.
        self.assertClose(dpo_loss(f64(2), f64(0), f64(0), f64(0), beta=0.2), [0.513015], atol=5e-7)
        fallen = dpo_loss(f64(0.3).log(), f64(0.1).log(), f64(0.4).log(), f64(0.3).log(), beta=1.0)
        self.assertClose(fallen, [0.367725], atol=5e-7)
        with self.subTest("linear, not infinite, at a margin of -10000"):
            far = leaf(-1e4)
            loss = dpo_loss(far, f64(0), f64(0), f64(0), beta=0.5)
            self.assertClose(loss, [5000.0])
            self.assertClose(torch.autograd.grad(loss.sum(), far)[0], [-0.5])
            naive_wrong = -torch.sigmoid(0.5 * far.detach()).log()
            self.assertTrue(torch.isinf(naive_wrong).all())

    def test_group_advantages(self):
        rewards = torch.stack([f64(0, 0, 1, 1), f64(5, 5, 5, 5)])
        # mean .5, population std .5: (R - .5) / (.5 + 1e-8).
        self.assertClose(group_advantages(rewards), [[-1, -1, 1, 1], [0, 0, 0, 0]], atol=3e-8)
        self.assertEqual(group_advantages(rewards)[1].tolist(), [0.0] * 4)
        # [0, 1, 0, 0]: mean .25, variance (3 * .0625 + .5625) / 4 = .1875, std .433013: -.57735, 1.73205.
        self.assertClose(group_advantages(f64(0, 1, 0, 0)), [-0.57735, 1.73205, -0.57735, -0.57735], atol=5e-6)
        with self.subTest("the sample standard deviation is another convention"):
            sample_std_wrong = (rewards[0] - 0.5) / rewards[0].std(correction=1)
            self.assertClose(sample_std_wrong, [-0.866025, -0.866025, 0.866025, 0.866025], atol=5e-7)
        with self.subTest("rewards of two prompts never mix"):
            alone = group_advantages(f64(1, 0))
            self.assertClose(group_advantages(torch.stack([f64(1, 0), f64(5, 4)])), torch.stack([alone, alone]))
        with self.subTest("equal up to rounding is equal"):
            self.assertEqual(group_advantages(f64(0.1 + 0.2, 0.3)).tolist(), [0.0, 0.0])
        with self.subTest("adding a constant changes nothing; a group of one and NaN are refused"):
            self.assertClose(group_advantages(rewards + 3), group_advantages(rewards), atol=1e-7)
            self.assertFalse(group_advantages(leaf(0, 1)).requires_grad)
            with self.assertRaisesRegex(ValueError, "one answer"):
                group_advantages(f64(1))
            with self.assertRaisesRegex(ValueError, "nan"):
                group_advantages(f64(1, math.nan))

    def test_zero_loss_with_gradient_and_zero_group_without(self):
        # Two answers of probability 1/2, one parameter: loss = 1 - 2 sigmoid(theta), slope -2 * .25 = -.5 at 0.
        theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
        logp = torch.stack([theta, torch.zeros_like(theta)]).log_softmax(dim=-1)
        loss = clipped_policy_loss(logp, logp.detach(), group_advantages(f64(1, 0))).mean()
        self.assertClose(loss, 0, atol=1e-8)
        slope = torch.autograd.grad(loss, theta, retain_graph=True)[0]
        self.assertClose(slope, -0.5, atol=2e-8)
        self.assertClose(torch.sigmoid(-0.2 * slope), 0.524979, atol=5e-7)  # SGD, learning rate .2: theta = .1
        with self.subTest("logp - logp cancels the gradient; the atom detaches the denominator itself"):
            wrong = -((logp - logp).exp() * f64(1, -1)).mean()
            self.assertClose(torch.autograd.grad(wrong, theta, retain_graph=True)[0], 0)
            right = clipped_policy_loss(logp, logp, f64(1, -1)).mean()
            self.assertClose(torch.autograd.grad(right, theta, retain_graph=True)[0], -0.5)
        with self.subTest("equal rewards: no gradient from the surrogate, some from a KL in the loss"):
            equal = clipped_policy_loss(logp, logp.detach(), group_advantages(f64(1, 1))).mean()
            self.assertClose(torch.autograd.grad(equal, theta, retain_graph=True)[0], 0)
            kl = categorical_kl(torch.stack([theta, torch.zeros_like(theta)]), f64(1, 0))
            self.assertNotEqual(torch.autograd.grad(kl, theta)[0].item(), 0)


class ResponseLogps(Case):
    def test_causal_shift_and_mask(self):
        generator = torch.Generator().manual_seed(1)
        logits = torch.randn(1, 5, 6, dtype=torch.float64, generator=generator).requires_grad_()
        ids = torch.tensor([[0, 1, 2, 4, 4]])  # prompt, prompt, answer, EOS, PAD
        mask = flags(0, 0, 1, 1, 0).unsqueeze(0)
        logp = logits.log_softmax(-1)[0]
        token_logps, valid = response_token_logps(logits, ids, mask)
        self.assertEqual(valid.tolist(), [[False, True, True, False]])
        # The answer (id 2, position 2) is scored by row 1, the EOS (id 4, position 3) by row 2.
        self.assertClose(token_logps, [[0, logp[1, 2].item(), logp[2, 4].item(), 0]])
        self.assertClose(response_logps(logits, ids, mask), [(logp[1, 2] + logp[2, 4]).item()])
        touched = torch.autograd.grad(response_logps(logits, ids, mask).sum(), logits)[0].abs().sum(-1)[0] > 0
        self.assertEqual(touched.tolist(), [False, True, True, False, False])
        with self.subTest("the mask follows the target, not the row"):
            late_wrong = logp[:-1].gather(-1, ids[0, 1:, None]).squeeze(-1)[mask[0, :-1]].sum()
            self.assertNotAlmostEqual(late_wrong.item(), response_logps(logits, ids, mask).item())
        with self.subTest("NaN in unused slots changes neither value nor gradient"):
            poisoned = logits.detach().clone()
            poisoned[0, [0, 3, 4]] = math.nan
            poisoned.requires_grad_()
            total = response_logps(poisoned, ids, mask)
            self.assertClose(total, response_logps(logits, ids, mask).detach())
            self.assertTrue(torch.isfinite(torch.autograd.grad(total.sum(), poisoned)[0]).all())

    def test_bad_shapes_masks_and_ids_are_refused(self):
        logits, ids = torch.zeros(2, 4, 5, dtype=torch.float64), torch.tensor([[0, 1, 2, 3]] * 2)
        mask = flags(0, 0, 1, 1).repeat(2, 1)
        self.assertClose(response_logps(logits, ids, mask), [-2 * math.log(5)] * 2)
        first, empty, labels = mask.clone(), mask.clone(), ids.clone()
        first[1, 0], empty[1], labels[0, 0] = True, False, -100
        refused = (
            ("shifted ids", (logits, ids[:, 1:], mask), ValueError, "unshifted"),
            ("shifted mask", (logits, ids, mask[:, 1:]), ValueError, "unshifted"),
            ("no batch axis", (logits[0], ids[0], mask[0]), ValueError, "B, T, V"),
            ("mask of numbers", (logits, ids, mask.int()), TypeError, "response_mask"),
            ("ids as floats", (logits, ids.double(), mask), TypeError, "input_ids"),
            ("mask at position 0", (logits, ids, first), ValueError, "row 1"),
            ("no response token", (logits, ids, empty), ValueError, "row 1"),
            ("labels for ids", (logits, labels, mask), ValueError, "-100"),
            ("id beyond the vocabulary", (logits, ids + 2, mask), ValueError, "0 to 4"),
        )
        for name, arguments, error, words in refused:
            for function in (response_token_logps, response_logps):
                with self.subTest(name, function=function.__name__), self.assertRaisesRegex(error, words):
                    function(*arguments)
        with self.subTest("a column against a row broadcasts silently"), self.assertRaisesRegex(ValueError, "broadcast"):
            clipped_policy_loss(f64(1, 2), f64(1, 2), f64(1, 2).unsqueeze(1))


class TokenObjectives(Case):
    """token_objectives.py: two answers of 2 and 3 tokens, a zero 5x5 table, EOS = PAD = 4."""

    def setUp(self):
        self.table = torch.zeros(5, 5, dtype=torch.float64)
        self.ids, self.mask = tokens.INPUT_IDS, tokens.RESPONSE_MASK

    def dpo(self, table: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        ids, mask = (self.ids, self.mask) if ids is None else (ids, mask)
        return tokens.dpo_sequence_loss(table, self.table, ids, mask)

    def grpo(self, table: Tensor, ids: Tensor | None = None, mask: Tensor | None = None, **reduction) -> Tensor:
        ids, mask = (self.ids, self.mask) if ids is None else (ids, mask)
        return tokens.grpo_sequence_loss(table, self.table, self.table, ids, mask, **reduction)

    def test_mask_from_token_ids_loses_one_eos_in_each_answer(self):
        self.assertEqual(self.ids.tolist(), [[0, 1, 2, 4, 4], [0, 1, 3, 3, 4]])
        self.assertEqual(self.mask.int().tolist(), [[0, 0, 1, 1, 0], [0, 0, 1, 1, 1]])
        wrong = tokens.token_id_mask(self.ids, self.mask)
        self.assertEqual(wrong.int().tolist(), [[0, 0, 1, 0, 0], [0, 0, 1, 1, 0]])
        logits = tokens.bigram_logits(self.table, self.ids)
        # Every token has log-probability -log 5: 2 and 3 tokens right, 1 and 2 with the mistake.
        self.assertClose(response_logps(logits, self.ids, self.mask), [-2 * math.log(5), -3 * math.log(5)])
        self.assertClose(response_logps(logits, self.ids, wrong), [-math.log(5), -2 * math.log(5)])
        gradient = tokens.sgd_step(lambda t: self.dpo(t, self.ids, wrong), self.table).gradient_norm
        self.assertNotAlmostEqual(gradient, tokens.sgd_step(self.dpo, self.table).gradient_norm)

    def test_appended_padding_changes_neither_loss_nor_gradient(self):
        padding = torch.full((2, 4), tokens.PAD)
        ids = torch.cat([self.ids, padding], dim=1)
        mask = torch.cat([self.mask, torch.zeros(2, 4, dtype=torch.bool)], dim=1)
        generator = torch.Generator().manual_seed(3)
        start = torch.randn(5, 5, dtype=torch.float64, generator=generator)
        for name, objective in (("dpo", self.dpo), ("grpo", self.grpo)):
            with self.subTest(name):
                short, long = (start.clone().requires_grad_() for _ in range(2))
                loss, padded = objective(short), objective(long, ids, mask)
                self.assertClose(padded, loss.detach())
                self.assertClose(torch.autograd.grad(padded, long)[0], torch.autograd.grad(loss, short)[0])
        with self.subTest("counting the padding does change it"):
            counted_wrong = torch.cat([self.mask, torch.ones(2, 4, dtype=torch.bool)], dim=1)
            self.assertNotAlmostEqual(self.grpo(start, ids, counted_wrong).item(), self.grpo(start).item())

    def test_reductions_differ_on_unequal_lengths(self):
        # Ratio 1: token losses -1 -1 and +1 +1 +1. Per response (-1 + 1) / 2; over tokens (-2 + 3) / 5.
        self.assertClose(self.grpo(self.table), 0, atol=1e-8)
        self.assertClose(self.grpo(self.table, reduction=tokens.mean_over_tokens), 0.2, atol=1e-8)
        values = torch.tensor([[1.0, math.nan, math.nan], [3.0, 4.0, 5.0]]).double()
        valid = flags(1, 0, 0, 1, 1, 1).reshape(2, 3)
        self.assertClose(tokens.mean_per_response(values, valid), (1 + 4) / 2)
        self.assertClose(tokens.mean_over_tokens(values, valid), 13 / 4)
        with self.subTest("answers of 10 and 100 tokens: the long one weighs 1/2 or 100/110"):
            lengths = torch.arange(100) < torch.tensor([[10], [100]])
            ones_in_long = torch.stack([torch.zeros(100), torch.ones(100)]).double()
            self.assertClose(tokens.mean_per_response(ones_in_long, lengths), 1 / 2)
            self.assertClose(tokens.mean_over_tokens(ones_in_long, lengths), 100 / 110)
        with self.subTest("a row without tokens has no mean"), self.assertRaisesRegex(ValueError, "row 0"):
            tokens.mean_per_response(values, ~flags(1, 1, 1, 0, 0, 0).reshape(2, 3))

    def test_one_update_of_each_objective(self):
        dpo, grpo = tokens.sgd_step(self.dpo, self.table), tokens.sgd_step(self.grpo, self.table)
        self.assertClose([dpo.loss_before, dpo.loss_after], [0.693147, 0.668435], atol=5e-7)
        self.assertClose([grpo.loss_before, grpo.gradient_norm, grpo.loss_after], [0, 0.414997, -0.017285], atol=5e-7)
        margin = tokens.preference_margin(dpo.table_after, self.table, self.ids, self.mask)
        self.assertGreater(margin.item(), 0)
        with self.subTest("old and reference receive no gradient and stay where they were"):
            table, old, reference = (self.table.clone().requires_grad_() for _ in range(3))
            loss = tokens.grpo_sequence_loss(table, old, reference, self.ids, self.mask)
            loss = loss + tokens.dpo_sequence_loss(table, reference, self.ids, self.mask)
            gradients = torch.autograd.grad(loss, [table, old, reference], allow_unused=True)
            self.assertGreater(gradients[0].norm().item(), 0)
            self.assertEqual(gradients[1:], (None, None))
            self.assertEqual(self.table.abs().max().item(), 0)
        with self.subTest("answers to different prompts are refused"), self.assertRaisesRegex(ValueError, "one prompt"):
            self.dpo(self.table, torch.tensor([[0, 1, 2, 4, 4], [1, 1, 3, 3, 4]]), self.mask)


class Training(Case):
    def test_each_method_learns_the_reward_table(self):
        for algorithm in ("ppo", "dpo", "grpo"):
            for seed in SEEDS:
                with self.subTest(algorithm=algorithm, seed=seed):
                    run = train(algorithm, seed=seed)
                    first, last = run.history[0], run.history[-1]
                    self.assertEqual([row["step"] for row in run.history], list(range(121)))
                    # Uniform start: (1 + .2 - .5) / 3 and 1/3.
                    self.assertAlmostEqual(first["expected_reward"], 0.7 / 3)
                    self.assertAlmostEqual(first["optimal_action_probability"], 1 / 3)
                    self.assertEqual((first["loss"], first["optimizer_steps"], first["kl_current_reference"]), (0, 0, 0))
                    self.assertGreater(last["expected_reward"], 0.99)
                    self.assertGreater(last["optimal_action_probability"], 0.99)
                    # Evaluation is exact and after the update: the last row is the final policy's.
                    exact = (run.policy.softmax(-1) * REWARDS).sum(-1).mean()
                    self.assertClose(last["expected_reward"], exact)
                    # Near-deterministic policy: KL to uniform close to log 3, while no batch drifted past the stop.
                    self.assertGreater(last["kl_current_reference"], 1.0)
                    self.assertLess(max(row["kl_old_current"] for row in run.history), 0.05)
                    self.assertEqual(run.task.reference.abs().max().item(), 0)
        with self.subTest("same seed, same numbers; another seed, others; the global generator is not touched"):
            torch.manual_seed(5)
            state = torch.get_rng_state()
            again, other = train("ppo", seed=7, steps=3), train("ppo", seed=8, steps=3)
            self.assertEqual(again.history, train("ppo", seed=7, steps=3).history)
            self.assertNotEqual(again.history, other.history)
            self.assertTrue(torch.equal(state, torch.get_rng_state()))

    def test_grpo_budget_and_counters(self):
        for group_size, prompts in ((8, 16), (2, 64), (16, 8), (4, 16)):
            with self.subTest(group_size=group_size, prompts=prompts):
                run = train("grpo", steps=3, group_size=group_size, online_batch_prompts=prompts)
                sampled = [row["sampled_actions"] for row in run.history]
                self.assertEqual(sampled, [0] + [group_size * prompts * step for step in (1, 2, 3)])
                self.assertEqual([row["optimizer_steps"] for row in run.history], [0, 4, 8, 12])
                self.assertEqual({row["pair_presentations"] for row in run.history}, {0})
                self.assertEqual((run.settings.group_size, run.settings.online_batch_prompts), (group_size, prompts))
        with self.subTest("a batch that drifts past the stop gets no further update"):
            stopped = train("grpo", steps=1, learning_rate=0.5).history[1]
            self.assertEqual((stopped["optimizer_steps"], stopped["stopped_early"]), (1, 1))
            self.assertGreater(stopped["kl_old_current"], 0.05)
        with self.subTest("the trace repeats the arithmetic of the first group"):
            trace = train("grpo", steps=1).first_batch_trace
            rewards = f64(*(row["reward"] for row in trace))
            self.assertEqual({row["group"] for row in trace}, {0})
            self.assertClose([row["advantage"] for row in trace], group_advantages(rewards))
            self.assertClose([row["old_logp"] for row in trace], [-math.log(3)] * 8)

    def test_partial_flips_count_and_reproducibility(self):
        clean = train("dpo", steps=1).task.clean_pairs.rows()
        self.assertEqual(len(clean), 12)
        for context, chosen, rejected in clean:
            self.assertGreater(REWARDS[context, chosen], REWARDS[context, rejected])
        for flips in (1, 3, 6):
            with self.subTest(flips=flips):
                task = train("dpo", steps=1, seed=7, preference_flips=flips).task
                indices, training = task.flipped_pair_indices, task.training_pairs.rows()
                self.assertEqual(len(set(indices)), flips)
                for i, (context, chosen, rejected) in enumerate(clean):
                    wanted = [context, rejected, chosen] if i in indices else [context, chosen, rejected]
                    self.assertEqual(training[i], wanted)
                self.assertEqual(task.clean_pairs.rows(), clean)
                again = train("dpo", steps=1, seed=7, preference_flips=flips).task
                self.assertEqual(again.flipped_pair_indices, indices)
        with self.subTest("the seed chooses which; too many are refused; other methods are untouched"):
            runs = [train("dpo", steps=1, seed=seed, preference_flips=3) for seed in range(5)]
            chosen = {tuple(run.task.flipped_pair_indices) for run in runs}
            self.assertGreater(len(chosen), 1)
            with self.assertRaisesRegex(ValueError, "from 0 to 12"):
                train("dpo", preference_flips=13)
            self.assertEqual(train("ppo", steps=2, preference_flips=6).history, train("ppo", steps=2).history)

    def test_full_flip_lowers_the_loss_and_the_reward(self):
        for seed in SEEDS:
            with self.subTest(seed=seed):
                right, flipped = train("dpo", seed=seed).history, train("dpo", seed=seed, preference_flips=12).history
                for history in (right, flipped):
                    self.assertClose([history[0]["dpo_training_loss"], history[0]["dpo_original_loss"]], [math.log(2)] * 2)
                    self.assertAlmostEqual(history[-1]["dpo_training_loss"], 0.0525, places=4)
                    self.assertEqual((history[-1]["optimizer_steps"], history[-1]["pair_presentations"]), (120, 1440))
                self.assertAlmostEqual(flipped[-1]["dpo_original_loss"], 3.4445, places=3)
                self.assertAlmostEqual(flipped[-1]["expected_reward"], -0.4957, places=3)
                self.assertAlmostEqual(right[-1]["expected_reward"], 0.9950, places=3)
                self.assertEqual([row["dpo_training_loss"] for row in right], [row["dpo_original_loss"] for row in right])
                # A row's loss is the loss before its update: the training loss of the row above.
                self.assertClose([row["loss"] for row in right[1:]], [row["dpo_training_loss"] for row in right[:-1]])

    def test_chain_learns_through_time(self):
        for seed in SEEDS:
            with self.subTest(seed=seed):
                run = train_chain(seed=seed)
                first, last = run.history[0], run.history[-1]
                start = [first[name] for name in ("expected_return", "probability_state_1", "value_start")]
                self.assertClose(start, [0.3, 0.5, 0])
                self.assertGreater(last["expected_return"], 0.99)
                self.assertGreater(last["probability_state_1"], 0.99)
                self.assertEqual((last["sampled_actions"], last["optimizer_steps"]), (15360, 480))
        for lam in (0.0, 0.95, 1.0):
            with self.subTest("first rollout, critic zero", lam=lam):
                trace = train_chain(steps=1, gae_lambda=lam).first_rollout_trace
                self.assertEqual([(row["episode"], row["t"]) for row in trace], [(e, t) for e in range(4) for t in range(2)])
                for start, end in zip(trace[::2], trace[1::2]):
                    # A_1 = R, A_0 = lam * R: nothing of the next episode; the flags are set at the second step only.
                    self.assertClose([start["advantage"], end["advantage"]], [lam * end["reward"], end["reward"]])
                    self.assertEqual(end["state"], 1 + start["action"])
                    self.assertEqual([start["terminated"], start["boundary"]], [False, False])
                    self.assertEqual([end["terminated"], end["boundary"]], [True, True])
        with self.subTest("lambda 0 learns too, through the critic"):
            self.assertGreater(train_chain(gae_lambda=0.0).history[-1]["expected_return"], 0.99)


if __name__ == "__main__":
    unittest.main()
