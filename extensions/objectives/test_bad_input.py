"""Bad input is refused with the row and the position named, and unused slots are never read."""

from __future__ import annotations

import math
import unittest
from dataclasses import replace

import numpy as np
import torch

from extensions.objectives import ROWS, evaluate, make_batch
from extensions.objectives.oracle import small_batch
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)


class BadInput(unittest.TestCase):
    def setUp(self):
        self.arrays = {
            "logps": np.full((2, 3), -1.0),
            "mask": np.array([[True, True, False], [True, True, True]]),
            "old_logps": np.full((2, 3), -1.2),
            "rewards": np.array([1.0, 0.0]),
            "group_ids": np.array([0, 0]),
        }

    def test_unused_slots_change_nothing(self):
        """NaN and -inf outside the mask: same loss and gradient, and 0 there, for every row of the table."""
        clean = small_batch()
        spoiled = {}
        arrays = ("logps", "old_logps", "ref_logps", "values", "vpreds", "entropies", "advantages", "sampler_logps")
        for number, name in enumerate((*arrays, "sampler_weights")):
            spoiled[name] = torch.where(clean.mask, getattr(clean, name), (math.nan, -math.inf, math.inf)[number % 3])
        for name in ("logits", "ref_logits"):
            spoiled[name] = torch.where(clean.mask.unsqueeze(2), getattr(clean, name), math.nan)
        same = ("mask", "truncated", "selected_tokens", "rewards", "group_ids", "reward_baselines", "rewards_per_func")
        same += ("reward_weights", "budget")
        dirty = make_batch(**spoiled, **{name: getattr(clean, name) for name in same})
        for name, row in ROWS.items():
            one, two = evaluate(row, clean), evaluate(row, dirty)
            self.assertEqual(one.loss.item(), two.loss.item(), name)
            self.assertTrue(torch.equal(one.dloss_dlogps, two.dloss_dlogps), name)
            self.assertFalse(two.dloss_dlogps[~clean.mask].any(), name)

    def test_non_finite_in_a_used_slot(self):
        for name in ("logps", "old_logps"):
            self.arrays[name][1, 2] = math.nan
            with self.assertRaisesRegex(ValueError, f"{name}: got nan at row 1, position 2"):
                make_batch(**self.arrays)
            self.arrays[name][1, 2] = -1.0

    def test_shapes_dtypes_and_names(self):
        for wrong, error, message in (
            ({"old_logps": np.zeros((2, 1))}, ValueError, r"old_logps: got shape \(2, 1\), wanted \(2, 3\)"),
            ({"mask": np.ones((2, 3))}, TypeError, "mask: got dtype torch.float64, wanted bool"),
            ({"mask": None}, ValueError, "mask: missing"),
            ({"mask": np.array([[True, True, True], [False, False, False]])}, ValueError, "row 1 has no counted token"),
            ({"rewards": np.zeros((2, 1))}, ValueError, r"rewards: got shape \(2, 1\)"),
            ({"group_ids": np.array([0.0, 0.0])}, TypeError, "group_ids: got dtype torch.float64"),
            ({"old_logp": np.zeros((2, 3))}, TypeError, "did you mean 'old_logps'"),
            ({"logps": np.zeros((2, 3), dtype=int)}, TypeError, "logps: got dtype torch.int64"),
            ({"advantages": np.zeros(3)}, ValueError, r"advantages: got shape \(3,\)"),
            ({"accumulation_steps": 0}, ValueError, "accumulation_steps: got 0"),
            ({"row_ids": [0, 1]}, ValueError, "belong together"),
            ({"row_ids": [0, 9], "gen_rewards": np.zeros(4)}, ValueError, "row_ids: got numbers from 0 to 9"),
            ({"accumulation_steps": 2.7}, ValueError, "accumulation_steps: got 2.7, wanted a whole number"),
            ({"budget": math.inf}, ValueError, "budget: got inf"),
            ({"old_logps": np.ones((2, 3), dtype=bool)}, TypeError, "old_logps: got dtype torch.bool"),
            ({"reward_baselines": np.array([0.0, math.nan])}, ValueError, "reward_baselines: row 1 is not finite"),
            ({"logits": np.full((2, 3, 4), math.nan)}, ValueError, "logits: got NaN or inf"),
            ({"rewards_per_func": np.zeros((2, 2))}, ValueError, "with reward_weights None"),
            ({"rewards_per_func": np.zeros((7, 2)), "reward_weights": np.ones(2)}, ValueError, r"wanted \(2, F\)"),
            (
                {"gen_rewards_per_func": np.zeros((4, 2)), "gen_rewards": np.zeros(4), "row_ids": [0, 1]},
                ValueError,
                r"gen_rewards_per_func: got \(4, 2\) with reward_weights None",
            ),
        ):
            with self.subTest(wrong=wrong), self.assertRaisesRegex(error, message):
                make_batch(**(self.arrays | wrong))

    def test_a_forbidden_token_may_have_a_logit_of_minus_infinity(self):
        logits = np.zeros((2, 3, 4))
        logits[:, :, 1] = -math.inf
        kept = make_batch(**self.arrays, logits=logits).logits
        self.assertEqual(kept[:, :, 1].isinf().tolist(), self.arrays["mask"].tolist())

    def test_a_batch_that_lacks_what_the_row_reads(self):
        batch = make_batch(**self.arrays)
        for name, missing in (
            ("grpo", "ref_logps"),
            ("remax", "reward_baselines"),
            ("ppo", "values"),
            ("grpo@lab", "logits"),
            ("ppo@sb3-2.9.2", "advantages"),
        ):
            with self.subTest(name=name), self.assertRaisesRegex(ValueError, f"{name}: the batch has no {missing}"):
                evaluate(ROWS[name], batch)
        with self.assertRaisesRegex(ValueError, "no group_ids"):
            evaluate(ROWS["dr_grpo"], replace(batch, group_ids=None))
        with self.assertRaisesRegex(ValueError, "no rewards"):
            evaluate(ROWS["dr_grpo"], replace(batch, rewards=None))

    def test_a_list_keeps_its_digits(self):
        """0.1 and -1.1 from a list are doubles, as from numpy; the dtype of a tensor is kept."""
        batch = make_batch(logps=[[-1.1]], mask=[[True]], advantages=[0.1])
        self.assertEqual((batch.logps.item(), batch.advantages.item()), (-1.1, 0.1))
        single = make_batch(logps=torch.tensor([[-1.1]]), mask=[[True]], advantages=[0.1])
        self.assertEqual(single.advantages.dtype, torch.float32)

    def test_rows_that_make_no_sense(self):
        for wrong, message in (
            ({"surrogate": "clpi"}, "surrogate: got 'clpi', wanted one of plain, clip"),
            ({"clip_low": -0.1}, "clip_low: got -0.1"),
            ({"std_ddof": 2}, "std_ddof: got 2"),
            ({"gamma": math.nan}, "gamma: got nan"),
            ({"ratio": "none"}, "without a ratio the surrogate is plain"),
            ({"baseline": "given", "scale": "none", "credit": "reward_to_go"}, "has advantages of its own"),
            ({"baseline": "gae", "scale": "none", "kl_place": "after_baseline"}, "after_baseline needs a baseline of answers"),
            ({"centre": "none"}, "centre none is a way of batch_std and token_std"),
            ({"scale": "batch_std", "whiten_over": "slots"}, "whiten_over slots is a way of token_std"),
            ({"baseline": "gae", "scale": "none", "reward_clip": "after_baseline"}, "reward_clip after_baseline needs"),
            ({"sampler_bound": "capped"}, "no weight that sampler_bound could cut"),
            ({"surrogate": "region_tv", "ratio": "sequence_mean"}, "compares tokens: ratio token"),
            ({"baseline": "given"}, "scaled by none or token_std"),
            ({"kl": "exact", "kl_place": "reward"}, "exact KL is that of the current policy"),
            ({"kl_place": "reward", "kl_weight": "ratio"}, "no gradient and no weight"),
            ({"kl_place": "reward", "kl_anchor": "old"}, "to itself it is 0"),
            ({"baseline": "none"}, "group_std needs a baseline of the group"),
            ({"baseline": "greedy"}, "group_std needs a baseline of the group"),
            (
                {"baseline": "none", "credit": "reward_to_go", "scale": "none", "reward_parts": "normalise_then_sum"},
                "one number per answer",
            ),
            ({"surrogate": "vespo", "ratio": "sequence_mean"}, "its own ratio of answers"),
        ):
            with self.subTest(wrong=wrong), self.assertRaisesRegex(ValueError, message):
                replace(ROWS["grpo"], **wrong)


if __name__ == "__main__":
    unittest.main()
