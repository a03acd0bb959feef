"""Rewards and advantages against the statistics module, by hand, and at their edges."""

from __future__ import annotations

import itertools
import math
import unittest
from dataclasses import replace

import numpy as np
import torch

import rl_lab
from extensions import objectives
from extensions.objectives import ROWS, evaluate, make_batch
from extensions.objectives.oracle import slow_advantages
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)


class Advantages(unittest.TestCase):
    REWARDS, GROUPS, LENGTHS = [1.0, 0.0, 0.3, 0.2, -0.5, 1.0, 0.7], [7, 2, 7, 2, 2, 7, 7], [2, 6, 4, 3, 5, 2, 1]

    def batch(self, rewards=None, groups=None, **more) -> objectives.Batch:
        lengths = torch.tensor(self.LENGTHS)
        rewards = torch.tensor(self.REWARDS if rewards is None else rewards, dtype=torch.float64)
        groups = self.GROUPS if groups is None else groups
        lengths = lengths[: len(rewards)]
        mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
        return make_batch(
            logps=-torch.ones(mask.shape, dtype=torch.float64), mask=mask, rewards=rewards, group_ids=groups, **more
        )

    def of(self, row: objectives.Row, **more) -> list[float]:
        return objectives.compute_advantages(row, self.batch(**more))[:, 0].tolist()

    def assert_all_close(self, got, wanted, places=12):
        self.assertEqual(len(got), len(wanted))
        for x, y in zip(got, wanted):
            self.assertAlmostEqual(x, y, places)

    def test_against_the_statistics_module(self):
        """Groups of 4 and 3, interleaved; every baseline, scale, divisor and guard."""
        base = replace(ROWS["grpo"], kl="none")
        batch = self.batch()
        baselines = ("none", "batch_mean", *objectives.GROUP_BASELINES)
        scales = ("none", "batch_std_of_raw_rewards", "batch_std", *objectives.GROUP_SCALES)
        for baseline, scale, ddof in itertools.product(baselines, scales, (0, 1)):
            for guard in objectives.CHOICES["std_guard"] if scale != "none" else ("add",):
                if baseline not in objectives.GROUP_BASELINES and scale in objectives.GROUP_SCALES:
                    continue  # refused, see test_rows_that_make_no_sense
                # 0.3 is above the smallest and below the largest std and variance here, so that both floors act somewhere.
                row = replace(base, baseline=baseline, scale=scale, std_ddof=ddof, std_guard=guard, std_eps=0.3)
                rows = [row] if scale != "batch_std" else [row, replace(row, centre="none")]
                rows += [replace(row, reward_clip=place, reward_limit=0.4) for place in ("before_baseline", "after_baseline")]
                for row in rows:
                    wanted = slow_advantages(row, self.REWARDS, self.GROUPS, self.LENGTHS)
                    self.assert_all_close(objectives.compute_advantages(row, batch)[:, 0].tolist(), wanted)

    def test_grpo_is_the_atom(self):
        rewards = [1.0, 0.0, 0.5, 0.2, 0.0, 1.0]
        wanted = rl_lab.group_advantages(torch.tensor(rewards, dtype=torch.float64).view(2, 3)).flatten().tolist()
        self.assert_all_close(
            self.of(ROWS["dr_grpo"], rewards=rewards, groups=[0, 0, 0, 1, 1, 1]), [0.5, -0.5, 0, -0.2, -0.4, 0.6]
        )  # means 0.5 and 0.4
        self.assert_all_close(self.of(replace(ROWS["grpo"], kl="none"), rewards=rewards, groups=[0, 0, 0, 1, 1, 1]), wanted)

    def test_a_group_without_spread_gets_zero(self):
        """Also where rounding leaves a few ulps, also without a guard; a KL in the loss still has a gradient."""
        rewards = [0.1 + 0.2, 0.3, 0.1 + 0.2]
        row = replace(ROWS["grpo"], std_eps=0.0, kl="none")
        self.assertEqual(self.of(row, rewards=rewards, groups=[0, 0, 0]), [0.0, 0.0, 0.0])
        batch = self.batch(rewards=rewards, groups=[0, 0, 0])
        batch = replace(batch, ref_logps=batch.logps - 0.5 * batch.mask.double())
        result = evaluate(ROWS["grpo"], batch)
        self.assertEqual(result.policy_loss.item(), 0.0)
        self.assertGreater(result.dloss_dlogps.norm().item(), 0.0)
        self.assertEqual(result.zero_gradient_fraction, 1.0)  # of the policy term
        self.assertEqual(result.clipped_branch_fraction, 0.0)

    def test_groups_of_one(self):
        """verl: 2.0 stays 2.0, over 1 + 1e-6 where it is scaled (1.999998); rloo_vectorized: 0; elsewhere refused."""
        rewards, groups = [2.0, 1.0, 0.0], [5, 6, 6]
        self.assertAlmostEqual(self.of(ROWS["grpo@verl-0.9.1"], rewards=rewards, groups=groups)[0], 2 / (1 + 1e-6), 12)
        self.assertEqual(self.of(ROWS["rloo@verl-0.9.1"], rewards=rewards, groups=groups)[0], 2.0)
        self.assertEqual(self.of(ROWS["rloo_vectorized@verl-0.9.1"], rewards=rewards, groups=groups)[0], 0.0)
        with self.assertRaisesRegex(ValueError, "row 0 is alone in its group"):
            self.of(replace(ROWS["grpo"], kl="none"), rewards=rewards, groups=groups)

    def test_missing_rewards(self):
        """A NaN row takes no part in mean and std, and gets 0; without the choice it is refused with its row."""
        row = replace(ROWS["grpo"], kl="none", missing_reward="exclude", scale="none")
        got = self.of(row, rewards=[1.0, math.nan, 0.0, 4.0], groups=[0, 0, 0, 0])
        self.assert_all_close(got, [1 - 5 / 3, 0.0, -5 / 3, 4 - 5 / 3])
        with self.assertRaisesRegex(ValueError, "got nan at row 1"):
            self.of(replace(row, missing_reward="refuse"), rewards=[1.0, math.nan, 0.0, 4.0], groups=[0, 0, 0, 0])
        with self.assertRaisesRegex(ValueError, "got inf at row 2"):
            self.of(row, rewards=[1.0, 2.0, math.inf, 4.0], groups=[0, 0, 0, 0])
        with self.subTest("the group filter looks at the rewards that are there"):
            row = replace(row, group_filter="spread")
            rewards, groups = [1.0, math.nan, 1.0, 4.0, 2.0, math.nan, math.nan], [0, 0, 0, 1, 1, 2, 2]
            kept = objectives.kept_rows(row, self.batch(rewards, groups)).tolist()
            self.assertEqual(kept, [False, False, False, True, True, False, False])
            self.assert_all_close(self.of(row, rewards=rewards, groups=groups)[3:5], [1.0, -1.0])

    def test_reinforce_pp_counts_tokens_or_answers(self):
        """A' = +-0.5, lengths 1 and 3. Over tokens: mean (0.5 - 1.5)/4 = -0.25, var (0.75^2 + 3 * 0.25^2)/3 = 0.25, so
        0.75/0.5 = 1.5 and -0.25/0.5 = -0.5. Over answers (population): 0.5/0.5 = +-1."""
        mask = torch.tensor([[True, False, False], [True, True, True]])
        batch = make_batch(
            logps=-torch.ones(2, 3, dtype=torch.float64), mask=mask, rewards=np.array([1.0, 0.0]), group_ids=[0, 0]
        )
        by_token = objectives.compute_advantages(ROWS["reinforce_pp_baseline@verl-0.9.1"], batch)[:, 0].tolist()
        self.assert_all_close(by_token, [1.5, -0.5], 6)
        by_answer = objectives.compute_advantages(ROWS["reinforce_pp_baseline"], batch)[:, 0].tolist()
        self.assert_all_close(by_answer, [1.0, -1.0], 6)

    def test_kl_in_the_reward(self):
        """RLOO: R - 0.05 * sum_t(l0 - lr); REINFORCE++: each token carries its own KL. l0 - lr = 0.4 on every token."""
        batch = self.batch(rewards=[1.0, 0.0], groups=[0, 0])
        batch = replace(batch, old_logps=batch.logps, ref_logps=batch.logps - 0.4 * batch.mask.double())
        # lengths 2 and 6: 1 - 0.05 * 0.8 = 0.96 and -0.05 * 2.4 = -0.12; difference 1.08
        self.assert_all_close(objectives.compute_advantages(ROWS["rloo"], batch)[:, 0].tolist(), [1.08, -1.08])
        row = replace(ROWS["reinforce_pp"], scale="none", kl_coef=0.05)
        # to go: 1 - 0.05 * 0.4 * 2 = 0.96, then 0.98
        self.assert_all_close(objectives.compute_advantages(row, batch)[0, :2].tolist(), [0.96, 0.98])

    def test_leave_one_out_std_and_maxrl_by_hand(self):
        """[1, 0, 0.5]: the others of 1 are 0 and 0.5 (mean 0.25, sample std 0.353553): (1 - 0.25) / 0.353553 = 2.121320.
        MaxRL, [1, 0, 0, 1]: (1 - 0.5) / 0.5 = 1; [1, 0, 0, 0]: 0.75 / 0.25 = 3, so the rare success weighs G - 1."""
        row = replace(ROWS["grpo"], kl="none", baseline="leave_one_out", scale="leave_one_out_std", std_ddof=1, std_eps=0.0)
        self.assertAlmostEqual(self.of(row, rewards=[1.0, 0.0, 0.5], groups=[0, 0, 0])[0], 0.75 / math.sqrt(0.125), 12)
        with self.assertRaisesRegex(ValueError, "fewer than three answers"):
            self.of(row, rewards=[1.0, 0.0], groups=[0, 0])
        # [1, 0, 0]: the others of 1 agree. Left alone it is 1 - 0; divided by 0 + 1e-6 it would be a million.
        left = replace(row, std_guard="add_or_leave", std_eps=1e-6)
        self.assert_all_close(self.of(left, rewards=[1.0, 0, 0], groups=[0] * 3), [1.0, *[-0.5 / (math.sqrt(0.5) + 1e-6)] * 2])
        self.assertGreater(self.of(replace(left, std_guard="add"), rewards=[1.0, 0, 0], groups=[0] * 3)[0], 9e5)
        row = replace(ROWS["grpo"], kl="none", scale="group_mean", std_eps=0.0)
        self.assert_all_close(self.of(row, rewards=[1.0, 0, 0, 1], groups=[0] * 4), [1.0, -1.0, -1.0, 1.0])
        self.assert_all_close(self.of(row, rewards=[1.0, 0, 0, 0], groups=[0] * 4), [3.0, -1.0, -1.0, -1.0])
        self.assert_all_close(self.of(row, rewards=[0.0] * 4, groups=[0] * 4), [0.0] * 4)  # no success, no signal

    def test_kl_after_the_baseline(self):
        """A = +-0.5, l0 - lr = 0.4, coef 0.05: each token loses 0.02 (outcome), or all that is still to come (to go). Before
        the baseline the KL of the group would take part in the mean."""
        batch = self.batch(rewards=[1.0, 0.0], groups=[0, 0])
        batch = replace(batch, old_logps=batch.logps, ref_logps=batch.logps - 0.4 * batch.mask.double())
        row = replace(ROWS["dr_grpo"], kl="k1", kl_coef=0.05, kl_place="after_baseline")
        self.assert_all_close(objectives.compute_advantages(row, batch)[0, :2].tolist(), [0.48, 0.48])
        row = replace(row, credit="reward_to_go", gamma=0.5)
        # lengths 2: last token 0.5 - 0.02 = 0.48, first 0.5 * 0.48 - 0.02 = 0.22
        self.assert_all_close(objectives.compute_advantages(row, batch)[0, :2].tolist(), [0.22, 0.48])
        before = replace(row, kl_place="reward")  # R 0.96 and -0.12, A +-0.54, first token half of it
        self.assert_all_close(objectives.compute_advantages(before, batch)[0, :2].tolist(), [0.27, 0.54])
        clipped = replace(row, credit="outcome", reward_clip="after_baseline", reward_limit=0.3)
        self.assert_all_close(objectives.compute_advantages(clipped, batch)[0, :2].tolist(), [0.28, 0.28])
        kept = replace(row, baseline="none", credit="outcome", scale="none")
        self.assert_all_close(objectives.compute_advantages(kept, batch)[0, :2].tolist(), [0.98, 0.98])

    def test_reward_clip_before_a_reward_to_go(self):
        """Rewards 5 and -0.2 cut to +-1 before the KL of 0.02 a token: the first tokens of two get 1 - 0.04 and -0.2 - 0.04."""
        batch = self.batch(rewards=[5.0, -0.2], groups=[0, 0])
        batch = replace(batch, old_logps=batch.logps, ref_logps=batch.logps - 0.4 * batch.mask.double())
        row = replace(ROWS["reinforce_pp"], scale="none", kl_coef=0.05, reward_clip="before_baseline", reward_limit=1.0)
        got = objectives.compute_advantages(row, batch)
        self.assert_all_close([got[0, 0].item(), got[1, 4].item()], [0.96, -0.24])

    def test_whitening_over_padding_and_without_centring(self):
        """A 1 on one token, -1 on three, two slots of padding. Counted: mean -0.5, var 3/4. Slots: sum -2 over 6, squares 4:
        mean -1/3, var 4/6 - 1/9 = 5/9. Without centring: A / std."""
        mask = torch.tensor([[True, False, False], [True, True, True]])
        batch = make_batch(logps=-torch.ones(2, 3, dtype=torch.float64), mask=mask, advantages=[1.0, -1.0])
        base = replace(ROWS["ppo@sb3-2.9.2"], std_ddof=0, std_eps=0.0, value_loss="none")
        for changes, mean, std in (
            ({}, -0.5, math.sqrt(3 / 4)),
            ({"whiten_over": "slots"}, -1 / 3, math.sqrt(5 / 9)),
            ({"centre": "none"}, 0.0, math.sqrt(3 / 4)),
            ({"whiten_over": "slots", "centre": "none"}, 0.0, math.sqrt(5 / 9)),
        ):
            got = objectives.compute_advantages(replace(base, **changes), batch)[:, 0].tolist()
            self.assert_all_close(got, [(1 - mean) / std, (-1 - mean) / std])

    def test_advantages_averaged_before_a_ratio_of_answers(self):
        """A_t = 1, 0 and 2, 2, -1: means 0.5 and 1, on every token of the answer."""
        mask = torch.tensor([[True, True, False], [True, True, True]])
        given = torch.tensor([[1.0, 0.0, 9.0], [2.0, 2.0, -1.0]], dtype=torch.float64)
        batch = make_batch(logps=-torch.ones(2, 3, dtype=torch.float64), mask=mask, advantages=given)
        row = replace(ROWS["gspo"], baseline="given", scale="none", advantage_level="answer_mean")
        self.assertEqual(objectives.compute_advantages(row, batch).tolist(), [[0.5, 0.5, 0.0], [1.0, 1.0, 1.0]])

    def test_reward_to_go_and_greedy_baseline(self):
        """gamma 0.5, rewards 1, 0, 2: 1 + 0 + 0.25 * 2 = 1.5, then 1, then 2; less the greedy 0.5. A hole is skipped."""
        mask = torch.tensor([[True, True, False, True]])
        batch = make_batch(
            logps=-torch.ones(1, 4, dtype=torch.float64),
            mask=mask,
            reward_baselines=np.array([0.5]),
            token_level_rewards=np.array([[1.0, 0.0, math.nan, 2.0]]),
        )
        row = replace(ROWS["remax"], gamma=0.5)
        self.assert_all_close(objectives.compute_advantages(row, batch)[0].tolist(), [1.0, 0.5, 0.0, 1.5])

    def test_gae_is_the_atom_and_skips_holes(self):
        """Reward 1 on the last token, V = 0.2, 0.4, 0.6, gamma = lam = 1: A = 1 - V. A hole in the mask changes nothing."""
        mask = torch.tensor([[True, False, True, True]])
        values = np.array([[0.2, math.nan, 0.4, 0.6]])
        batch = make_batch(logps=-torch.ones(1, 4, dtype=torch.float64), mask=mask, rewards=np.array([1.0]), values=values)
        row = replace(ROWS["ppo"], lam=1.0)
        self.assert_all_close(objectives.compute_advantages(row, batch)[0].tolist(), [0.8, 0.0, 0.6, 0.4])
        wanted = rl_lab.gae(
            *(torch.tensor(x, dtype=torch.float64) for x in ([0.0, 0, 1], [0.2, 0.4, 0.6], [0.4, 0.6, 0])),
            *[torch.tensor([False, False, True])] * 2,
            0.9,
            0.8,
        )[0]
        got = objectives.compute_advantages(replace(row, gamma=0.9, lam=0.8), batch)[0][mask[0]]
        self.assert_all_close(got.tolist(), wanted.tolist())

    def test_overlong_penalty(self):
        """Lmax 10, Lc 4: 0 up to 6; (6 - 8)/4 = -0.5; -1 from 10 on; and it reaches the reward of the row's answer."""
        penalty = objectives.soft_overlong_penalty(torch.tensor([1, 6, 8, 10, 12]), 10, 4)
        self.assertEqual(penalty.tolist(), [0.0, 0.0, -0.5, -1.0, -1.0])
        row = replace(ROWS["dr_grpo"], overlong="soft", overlong_max=6, overlong_cache=4)
        # lengths 2 and 6: penalties 0 and -1; rewards 0 and 0 become 0 and -1, centred +-0.5
        self.assert_all_close(self.of(row, rewards=[0.0, 0.0], groups=[0, 0]), [0.5, -0.5])

    def test_group_filter(self):
        """A group without spread leaves every denominator: the loss is that of the batch without it."""
        row = replace(ROWS["dapo"], overlong="none")
        rewards = [1.0, 0.0, 0.5, 0.5, 1.0, 0.0]
        whole = replace(self.batch(rewards=rewards, groups=[0, 0, 1, 1, 2, 2]), accumulation_steps=1)
        whole = replace(whole, old_logps=whole.logps - 0.1 * whole.mask.double())
        part = replace(self.batch(rewards=rewards[:2], groups=[0, 0]))
        for reduction in ("mean_per_response", "mean_over_tokens", "sum_per_response"):
            result = evaluate(replace(row, reduction=reduction), whole)
            rest = torch.tensor([0, 1, 4, 5])
            without = make_batch(
                logps=whole.logps[rest],
                old_logps=whole.old_logps[rest],
                mask=whole.mask[rest],
                rewards=whole.rewards[rest],
                group_ids=whole.group_ids[rest],
            )
            wanted = evaluate(replace(row, reduction=reduction), without)
            self.assertAlmostEqual(result.loss.item(), wanted.loss.item(), 14)
            torch.testing.assert_close(result.dloss_dlogps[rest], wanted.dloss_dlogps)
            self.assertFalse(result.dloss_dlogps[2:4].any())
        self.assertEqual(result.kept.tolist(), [True, True, False, False, True, True])
        self.assertIsNotNone(part)
        with self.assertRaisesRegex(ValueError, "leaves nothing"):
            evaluate(row, self.batch(rewards=[1.0, 1.0], groups=[0, 0]))
        with self.subTest("nor does it count in the batch's mean and std"):
            # [2, 1] alone: A = +-0.5; std of A 0.5, of R 0.5. With [1, 1] beside it the stds would be smaller.
            of_batch = replace(row, baseline="batch_mean", scale="none")
            self.assert_all_close(self.of(of_batch, rewards=[1.0, 1.0, 2.0, 1.0], groups=[0, 0, 1, 1])[2:], [0.5, -0.5])
            for scale, wanted in (("batch_std", 1.0), ("batch_std_of_raw_rewards", 1.0)):
                scaled = replace(row, scale=scale, std_eps=0.0)
                got = self.of(scaled, rewards=[1.0, 1.0, 2.0, 1.0], groups=[0, 0, 1, 1])
                self.assert_all_close(got[2:], [wanted, -wanted])

    def test_group_filter_of_a_micro_batch(self):
        """Groups are those of the generation batch: rows 3, 0, 5 of rewards 1 1 | 1 0 | 0.5 0.5 keep row 3 alone."""
        batch = make_batch(
            logps=-torch.ones(3, dtype=torch.float64),
            gen_rewards=[1.0, 1.0, 1.0, 0.0, 0.5, 0.5],
            gen_group_ids=[0, 0, 1, 1, 2, 2],
            row_ids=[3, 0, 5],
        )
        row = replace(ROWS["dapo"], overlong="none")
        self.assertEqual(objectives.kept_rows(row, batch).tolist(), [True, False, False])
        self.assert_all_close(evaluate(row, batch).weights[:, 0].tolist(), [1.0, 0.0, 0.0])

    def test_a_micro_batch_uses_its_generation_batch(self):
        """Advantages of the four generated answers, of which rows 3 and 0 are here: (0 - 0.5), (1 - 0.5)."""
        batch = self.batch(
            rewards=[0.0, 1.0],
            groups=[0, 0],
            gen_rewards=np.array([1.0, 0.0, 1.0, 0.0]),
            gen_group_ids=[4, 4, 4, 4],
            row_ids=[3, 0],
        )
        self.assert_all_close(objectives.compute_advantages(ROWS["dr_grpo"], batch)[:, 0].tolist(), [-0.5, 0.5])
        with self.subTest("rewards per token are those of the rows that are here, too"):
            batch = replace(batch, gen_rewards=torch.tensor([1.0, 9.0, 9.0, 3.0], dtype=torch.float64))
            rows = (ROWS["remax"], replace(ROWS["reinforce_pp"], scale="none", kl="none"), replace(ROWS["ppo"], lam=1.0))
            batch = replace(batch, reward_baselines=torch.zeros(2).double(), values=torch.zeros_like(batch.logps))
            for row in rows:  # without a critic, at gamma 1, every token's reward to go is the answer's
                self.assert_all_close(objectives.compute_advantages(row, batch)[:, 0].tolist(), [3.0, 1.0])


if __name__ == "__main__":
    unittest.main()
