"""The audit on public bug reports in small numbers."""

from __future__ import annotations

import math
import unittest

import numpy as np

from extensions.audit.read.recording import recording_from
from extensions.audit.testing import audited
from rl_lab import FileProblem
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)

NAN = math.nan


class PublicReports(unittest.TestCase):
    """One test for each public bug report that a recorded batch can show: the wrong number is named, the right is not."""

    def assert_named(self, name: str, report, severity: str | None = "mistake"):
        found = {f.name: f.severity for f in report.findings}
        self.assertIn(name, found, f"findings {found}, loss {report.loss.get('matches', [])[:2]}")
        if severity:
            self.assertEqual(found[name], severity)

    def assert_clean(self, report, but: tuple[str, ...] = ()):
        """No warning and no mistake; but: what a batch of so few arrays is allowed to say."""
        self.assertEqual([f for f in report.findings if f.severity != "note" and f.name not in but], [])

    # ---- masks

    def test_eos_dropped_since_pad_has_its_id(self):
        # Ids 5, 7, EOS, PAD, PAD with EOS = PAD = 2. Right mask 1 1 1 0 0, mean NLL (.5 + .3 + 1.2) / 3; else (.5 + .3) / 2.
        batch = {"completion_ids": [[5, 7, 2, 2, 2]], "logps": [[-0.5, -0.3, -1.2, -4.0, -4.0]], "eos_id": 2, "pad_id": 2}
        self.assert_named("eos_dropped", audited({**batch, "mask": [[1, 1, 0, 0, 0]]}))
        # The value .4 is also 2 / 5, a mean over all slots: only the gradient tells.
        self.assert_named(
            "eos_dropped",
            audited({**batch, "mask": [[1, 1, 1, 0, 0]], "loss": 0.4, "dloss_dlogps": [[-0.5, -0.5, 0, 0, 0]]}),
        )
        self.assert_clean(audited({**batch, "mask": [[1, 1, 1, 0, 0]], "loss": 2 / 3}))

    def test_mask_one_step_late(self):
        batch = {"logps": [[-2.0, -0.5, -0.7, -6.0]], "mask": [[0, 1, 1, 0]]}
        self.assert_named("mask_one_step_late", audited({**batch, "seq_logps": [-6.7]}))  # -.7 - 6
        self.assert_clean(audited({**batch, "seq_logps": [-1.2]}))

    def test_prompt_in_the_likelihood(self):
        batch = {"logps": [[-2.0, -0.5, -0.7, -6.0]], "mask": [[0, 1, 1, 0]], "attention_mask": [[1, 1, 1, 0]]}
        self.assert_named("prompt_counted", audited({**batch, "loss": 3.2 / 3}))  # (2 + .5 + .7) / 3
        self.assert_clean(audited({**batch, "loss": 0.6}))

    def test_tool_text_in_the_loss(self):
        batch = {"per_token_loss": [[-1.0, 4.0, -1.0]], "mask": [[1, 0, 1]], "attention_mask": [[1, 1, 1]]}
        self.assert_named("tool_tokens_counted", audited({**batch, "loss": 2 / 3}))
        self.assert_clean(audited({**batch, "loss": -1.0}))

    def test_tool_mask_of_a_trainer(self):
        batch = {"per_token_loss": [[-1.0, 4.0, -1.0]], "completion_mask": [[1, 1, 1]], "tool_mask": [[1, 0, 1]]}
        self.assert_named("tool_tokens_counted", audited({**batch, "loss": 2 / 3}))
        self.assert_clean(audited({**batch, "loss": -1.0}))

    def test_nan_in_a_masked_slot(self):
        batch = {"logps": [[-0.2, -3.0]], "old_logps": [[-0.2, NAN]], "advantages": [[2.0, 2.0]], "mask": [[1, 0]]}
        self.assert_named("nonfinite_in_masked_slots", audited({**batch, "loss": NAN}))
        self.assert_named("nonfinite_in_masked_slots", audited({**batch, "loss": -2.0}), "warning")

    def test_dropped_rows_in_the_denominator(self):
        # Two kept tokens of -1, four dropped ones: -2 / 2 is right, -2 / 6 is not.
        batch = {
            "loss_mat": [[-1.0, -1.0, 0.0, 0.0], [-5.0, -5.0, -5.0, -5.0]],
            "mask": [[1, 1, 0, 0], [0, 0, 0, 0]],
            "attention_mask": [[1, 1, 0, 0], [1, 1, 1, 1]],
        }
        self.assert_named(
            "dropped_rows_in_denominator", audited({**batch, "loss": -1 / 3}), "warning"
        )  # or 3 tokens a row, by accident
        self.assert_named("dropped_rows_in_denominator", audited({**batch, "loss": -1 / 3}, "bnpo"))
        self.assert_clean(audited({**batch, "loss": -1.0}))

    def test_mean_over_padding(self):
        batch = {"loss_mat": [[1.0, 3.0, 5.0, 7.0]], "mask": [[1, 1, 0, 0]]}
        self.assert_named(
            "padding_in_denominator", audited({**batch, "loss": 1.0}), "warning"
        )  # (1 + 3) / 4: verl does it on purpose
        self.assert_named("padding_in_denominator", audited({**batch, "loss": 1.0}, "bnpo"))
        self.assert_clean(audited({**batch, "loss": 2.0}))

    def test_positive_log_probabilities(self):
        self.assert_named("positive_logps", audited({"logps": [[-0.5, -0.7, 1.0, 1.0]], "mask": [[1, 1, 0, 0]]}))
        self.assert_clean(audited({"logps": [[-0.5, -0.7, 0.0, 0.0]], "mask": [[1, 1, 0, 0]]}), but=("nothing_checked",))

    # ---- reductions

    REDUCED = {"loss_mat": [[3.0, 0.0, 0.0], [1.0, 1.0, 1.0]], "mask": [[1, 0, 0], [1, 1, 1]]}

    def test_reduction_is_named(self):
        # Tokens 3 | 1 1 1: per response (3 + 1) / 2, over tokens 6 / 4.
        for loss, reduction in ((2.0, "mean_per_response"), (1.5, "mean_over_tokens")):
            report = audited({**self.REDUCED, "loss": loss})
            self.assertEqual(report.loss["matches"][0]["reduction"], reduction)
            self.assert_clean(report)
        self.assert_named("reduction_differs", audited({**self.REDUCED, "loss": 2.0}, "bnpo"))

    def test_divided_by_accumulation_steps_again(self):
        # A window of 8 tokens, 4 4 | 1 1 1 | 1 1 1: 14 / 8 = 1.75, and 0.875 after another division by 2.
        batch = {
            "loss_mat": [[4.0, 4.0, 0], [1.0, 1, 1], [1.0, 1, 1]],
            "mask": [[1, 1, 0], [1, 1, 1], [1, 1, 1]],
            "num_items_in_batch": 8,
            "accumulation_steps": 2,
        }
        self.assert_named("extra_division", audited({**batch, "loss": 0.875}, "dapo@trl-1.16.0"))
        self.assert_clean(audited({**batch, "loss": 1.75}, "dapo@trl-1.16.0"))

    def test_averaged_over_ranks_again(self):
        batch = {**self.REDUCED, "accumulation_steps": 1}
        self.assert_named("extra_division", audited({**batch, "loss": 0.75}, "bnpo"))  # 1.5 / 2 ranks

    def test_mean_of_micro_batch_means(self):
        # Rows 3 | 1 1 1 | 2, the last two in one micro-batch: (3 / 1 + 5 / 4) / 2. Mean per response 2, over tokens 8 / 5.
        batch = {"loss_mat": [[3.0, 0, 0], [1.0, 1, 1], [2.0, 0, 0]], "mask": [[1, 0, 0], [1, 1, 1], [1, 0, 0]]}
        batch |= {"micro_batch_ids": [0, 1, 1], "loss": (3 + 5 / 4) / 2}
        self.assertEqual(audited(batch).loss["matches"][0]["reduction"], "mean_of_micro_batch_means")
        self.assert_named("reduction_differs", audited(batch, "bnpo"))

    def test_sum_over_answers(self):
        # Dr. GRPO with a budget of 5: 6 / (2 * 5) = 0.6; without the 2 answers 1.2.
        batch = {**self.REDUCED, "budget": 5}
        self.assert_named("sum_for_mean", audited({**batch, "loss": 1.2}, "dr_grpo@trl-1.16.0"))
        self.assert_clean(audited({**batch, "loss": 0.6}, "dr_grpo@trl-1.16.0"))

    # ---- ratio and clip

    @staticmethod
    def tokens(ratios, advantages, **more):
        old = np.full((len(ratios), 1), -3.0)
        return {
            "logps": old + np.log(np.array(ratios))[:, None],
            "old_logps": old,
            "advantages": np.array(advantages, dtype=float),
            "mask": np.ones((len(ratios), 1), dtype=bool),
            **more,
        }

    def test_old_logps_recomputed(self):
        # Ratio e^0.5 = 1.6487 with A = 1: loss -1.2 and no gradient; with a ratio of 1 it is -1 and -1.
        batch = {
            "logps": [[-0.5]],
            "old_logps": [[-1.0]],
            "advantages": [1.0],
            "mask": [[1]],
            "clip_low": 0.2,
            "clip_high": 0.2,
        }
        self.assert_named("old_logps_recomputed", audited({**batch, "loss": -1.0, "dloss_dlogps": [[-1.0]]}))
        self.assert_clean(audited({**batch, "loss": -1.2, "dloss_dlogps": [[0.0]]}, "bnpo"))

    def test_a_right_value_without_gradient(self):
        batch = self.tokens([1.0, 1.0], [1.0, 0.5], loss=-0.75, dloss_dlogps=np.zeros((2, 1)))
        self.assert_named("old_logps_not_detached", audited(batch))
        self.assert_named("ratio_detached", audited(batch))  # on a first pass the two are one: both are named
        self.assertTrue(any("ratio_detached" in line for line in audited(batch).cannot_tell))

    def test_lower_bound_epsilon(self):
        # clamp(r, .2, 1.2): r = .5, A = -1 keeps .5 instead of .8; r = 1.5, A = 1 stops at 1.2 in both. (.5 - 1.2) / 2.
        self.assert_named("clip_lower_bound_wrong", audited(self.tokens([0.5, 1.5], [-1.0, 1.0], loss=-0.35), "bnpo"))
        self.assert_clean(audited(self.tokens([0.5, 1.5], [-1.0, 1.0], loss=-0.2), "bnpo"))  # (.8 - 1.2) / 2

    def test_dual_clip_floor_for_positive_advantages(self):
        # r = 1, A = 1: max(1, 3) = 3; r = 5, A = -1: max(-5, -3) = -3. Mean of (-3, 3, ...) with r = .9, A = -.5: .45.
        self.assert_named(
            "dual_clip_on_positive",
            audited(
                self.tokens([1.0, 5.0, 0.9], [1.0, -1.0, -0.5], loss=(-3 + 3 + 0.45) / 3),
                "grpo@verl-0.9.1",
                ("reduction=mean_over_tokens",),
            ),
        )
        self.assert_named("clip_widths_unusual", audited(self.tokens([1.0], [1.0], ratio_cap=0.5)), "warning")

    def test_clip_sides_exchanged(self):
        # .2/.28: r = 1.25, A = 1 keeps its gradient and r = .75, A = -1 loses it; exchanged it is the other way round.
        batch = self.tokens([1.25, 0.75], [1.0, -1.0], clip_low=0.2, clip_high=0.28)
        self.assert_named(
            "clip_sides_swapped", audited({**batch, "loss": (-1.2 + 0.75) / 2, "dloss_dlogps": [[0.0], [0.375]]}, "bnpo")
        )
        self.assert_clean(audited({**batch, "loss": (-1.25 + 0.8) / 2, "dloss_dlogps": [[-0.625], [0.0]]}, "bnpo"))
        self.assert_named("clip_widths_unusual", audited({**batch, "clip_low": 0.28, "clip_high": 0.2}), "warning")

    def test_which_ratio_of_an_answer(self):
        # Four log-ratios of .1 with A = -1: exp(.1) = 1.1052 is the mean's, exp(.4) = 1.4918 the sum's.
        batch = {
            "logps": np.full((1, 4), -0.9),
            "old_logps": np.full((1, 4), -1.0),
            "advantages": [-1.0],
            "mask": np.ones((1, 4), dtype=bool),
            "clip_low": 0.2,
            "clip_high": 0.2,
        }
        self.assert_named("sequence_sum_for_mean", audited({**batch, "loss": math.exp(0.4)}, "gspo@trl-1.16.0"))
        self.assert_clean(audited({**batch, "loss": math.exp(0.1)}, "gspo@trl-1.16.0"))

    def test_first_pass_ratio(self):
        # Logits 2, 0: the sampler at temperature .5 has log p = -log(1 + e^-4), the trainer -log(1 + e^-2): ratio .8969.
        sampler, trainer = -math.log1p(math.exp(-4)), -math.log1p(math.exp(-2))
        batch = {"old_logps": [[sampler]], "mask": [[1]], "pass_index": 0, "temperature": 0.5}
        report = audited({**batch, "logps": [[trainer]]})
        self.assert_named("first_pass_ratio_not_one", report, "warning")
        self.assertIn("0.896929", report.findings[0].evidence)
        self.assertIn("temperature 0.5", report.findings[0].evidence)
        # p = .5 .3 .2 cut to the first two: the sampler has .5 / .8, the trainer .5, and the ratio is .8.
        top = {"old_logps": [[math.log(0.625)]], "logps": [[math.log(0.5)]], "mask": [[1]], "pass_index": 0, "top_k": 2}
        (found,) = audited(top).findings
        self.assertIn("Ratios 0.8 to 0.8", found.evidence)
        self.assertIn("top_k 2", found.evidence)
        self.assert_clean(audited({**batch, "logps": [[sampler]]}))

    def test_old_equal_on_a_later_pass(self):
        batch = {"logps": [[-0.5, -1.25]], "old_logps": [[-0.5, -1.25]], "mask": [[1, 1]]}
        self.assert_named("old_logps_equal_logps", audited({**batch, "pass_index": 1}), "warning")
        self.assert_clean(audited({**batch, "pass_index": 0}))

    def test_bf16_grid(self):
        # bfloat16 spacing is 0.0625 in [8, 16): -12.34 becomes -12.3125.
        self.assert_named(
            "stored_in_bf16", audited({"logps": [[-12.34]], "old_logps": [[-12.3125]], "mask": [[1]]}), "warning"
        )
        self.assert_clean(audited({"logps": [[-12.34]], "old_logps": [[-12.34]], "mask": [[1]]}), but=("nothing_checked",))

    # ---- KL

    def test_kl_direction(self):
        # KL([.5 .5] || [.9 .1]) = .510826, the other way .368064.
        batch = {"logits": np.log([[[0.5, 0.5]]]), "ref_logits": np.log([[[0.9, 0.1]]]), "mask": [[1]]}
        self.assert_named("kl_direction", audited({**batch, "kl": 0.3680642}))
        self.assert_clean(audited({**batch, "kl": 0.5108256}))

    def test_ratio_for_log_ratio(self):
        # R = 1.25 in the place of its logarithm: exp(1.25) - 1.25 - 1 = 1.240343; right: 1.25 - log 1.25 - 1 = .026856.
        batch = {"logps": [[-1.0]], "ref_logps": [[-1.0 + math.log(1.25)]], "mask": [[1]]}
        self.assert_named("kl_ratio_for_log_ratio", audited({**batch, "kl": 1.240343}))
        self.assert_clean(audited({**batch, "kl": 0.0268564}))

    def test_kl_subtracted(self):
        # Policy loss .5, k1 = .2, beta .1: .52 is right, .48 rewards distance.
        batch = {
            "logps": [[-1.0]],
            "old_logps": [[-1.0]],
            "ref_logps": [[-1.2]],
            "advantages": [-0.5],
            "mask": [[1]],
            "beta": 0.1,
        }
        self.assert_named("kl_sign", audited({**batch, "loss": 0.48}))
        self.assertNotIn("kl_sign", audited({**batch, "loss": 0.52}).named())

    def test_kl_in_the_reward(self):
        # k1 = l0 - lr = .5 and -.2 on the two tokens, coefficient .1, score 1 on the last.
        batch = {
            "old_logps": [[-1.0, -1.2]],
            "ref_logps": [[-1.5, -1.0]],
            "mask": [[1, 1]],
            "token_level_scores": [[0.0, 1.0]],
        }
        self.assert_named("kl_sign", audited({**batch, "token_level_rewards": [[0.05, 0.98]]}))
        self.assert_clean(audited({**batch, "token_level_rewards": [[-0.05, 1.02]]}))

    def test_negative_k1_is_noise(self):
        # Old -1 -1, new -.5 -1.2: k1 = (-.5 + .2) / 2 = -.15, k3 = .083726.
        report = audited({"old_logps": [[-1.0, -1.0]], "logps": [[-0.5, -1.2]], "mask": [[1, 1]], "approx_kl": -0.15})
        self.assert_named("negative_k1", report, "note")
        self.assert_clean(report)
        self.assertIn("0.08373", report.findings[0].evidence)

    # ---- advantages

    @staticmethod
    def rewarded(rewards, groups, advantages):
        return {
            "rewards": np.array(rewards, dtype=float),
            "group_ids": groups,
            "advantages": np.array(advantages, dtype=float),
            "mask": np.ones((len(rewards), 1), dtype=bool),
        }

    def test_baseline_over_the_batch(self):
        # Mean 2.5 of all four. Some trainers mean that, so it is a mistake only beside a declared rule of groups.
        pooled = self.rewarded([1, 0, 5, 4], [0, 0, 1, 1], [-1.5, -2.5, 2.5, 1.5])
        self.assert_named("groups_pooled", audited(pooled), "warning")
        self.assert_named("groups_pooled", audited(pooled, "dr_grpo"))
        self.assert_clean(audited(self.rewarded([1, 0, 5, 4], [0, 0, 1, 1], [0.5, -0.5, 0.5, -0.5])))

    def test_which_standard_deviation(self):
        # Rewards 0 0 1: population std sqrt(2) / 3, sample std 1 / sqrt(3).
        population, sample = [-0.7071068, -0.7071068, 1.4142136], [-0.5773503, -0.5773503, 1.1547005]
        batch = self.rewarded([0, 0, 1], [0, 0, 0], sample)
        self.assert_named("sample_for_population_std", audited(batch, "grpo", ("std_eps=0",)))
        self.assert_clean(audited(self.rewarded([0, 0, 1], [0, 0, 0], population), "grpo", ("std_eps=0",)))
        self.assertEqual(audited(batch).advantages["matches"][0]["std_ddof"], 1)

    def test_group_of_one(self):
        self.assert_named("group_of_one", audited(self.rewarded([2.0], [0], [NAN])))
        self.assert_named("group_of_one", audited(self.rewarded([2.0], [0], [2.0])), "warning")

    def test_whitening_over_padding(self):
        # Values 1 3 | 2 pad: the mean over 4 slots is 1.5, the variance over the 3 counted (.25 + 2.25 + .25) / 3.
        batch = {"advantages_raw": [[1.0, 3.0], [2.0, 0.0]], "mask": [[1, 1], [1, 0]]}
        self.assert_named(
            "padding_in_whitening", audited({**batch, "advantages": [[-0.5222330, 1.5666989], [0.5222330, 0.0]]})
        )
        self.assert_clean(audited({**batch, "advantages": [[-1.2247449, 1.2247449], [0.0, 0.0]]}))

    def test_rounding_divided_by_its_own_size(self):
        rewards, groups = [0.1, 0.1, 0.1, 1.0, 0.0, 0.0], [0, 0, 0, 1, 1, 1]
        right = [0, 0, 0, 1.4142136, -0.7071068, -0.7071068]
        self.assert_named("roundoff_std", audited(self.rewarded(rewards, groups, [-0.58, -0.58, -0.58, *right[3:]])))
        self.assert_named("equal_groups", audited(self.rewarded(rewards, groups, right)), "note")

    def test_share_of_equal_groups(self):
        report = audited(self.rewarded([1, 1, 0, 0, 1, 0], [0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 0.5, -0.5]))
        self.assert_named("equal_groups", report, "note")
        self.assertIn("2 of 3 groups (67 %)", report.findings[0].evidence)
        self.assert_clean(report)

    def test_transposed_rewards_are_refused(self):
        with self.assertRaisesRegex(FileProblem, r"rewards: got shape \(2, 1\).*broadcast"):
            recording_from({"rewards": np.array([[1.0], [4.0]]), "logps": np.zeros((2, 3)), "mask": np.ones((2, 3), bool)})

    # ---- time

    STEPS = {"rewards": [1.0, 1.0, 1.0], "values": [1.0, 2.0, 3.0], "last_values": [4.0], "gamma": 1.0, "lam": 0.5}

    def test_flag_read_one_step_late(self):
        batch = {**self.STEPS, "terminated": [0, 1, 0], "truncated": [0, 0, 0]}
        self.assert_named("shifted_flags", audited({**batch, "advantages": [0.0, 3.0, 2.0]}))
        self.assert_clean(audited({**batch, "advantages": [1.5, -1.0, 2.0]}))  # -1 = 1 - 2; 1.5 = 2 + .5 * -1

    TIME_LIMIT = {**STEPS, "terminated": [0, 0, 0], "truncated": [0, 1, 0], "terminal_values": [NAN, 5.0, NAN]}

    def test_time_limit_as_an_end(self):
        self.assert_named("one_flag_for_two", audited({**self.TIME_LIMIT, "advantages": [1.5, -1.0, 2.0]}))
        self.assert_clean(audited({**self.TIME_LIMIT, "advantages": [4.0, 4.0, 2.0]}))  # 4 = 1 + 5 - 2; 4 = 2 + .5 * 4

    def test_value_after_the_reset(self):
        self.assert_named("reset_value_used", audited({**self.TIME_LIMIT, "advantages": [3.0, 2.0, 2.0]}))  # 2 = 1 + 3 - 2

    def test_final_value_and_both_flags_are_asked_for(self):
        without = {name: value for name, value in self.TIME_LIMIT.items() if name != "terminal_values"}
        report = audited({**without, "advantages": [3.0, 2.0, 2.0]})
        self.assert_named("final_value_missing", report, "warning")
        self.assertNotIn("flags_missing", report.named())  # both flags are there
        self.assertTrue(any("terminal_values" in m for m in report.missing))
        report = audited({**self.STEPS, "done": [0, 1, 0], "advantages": [1.5, -1.0, 2.0]})
        self.assert_named("flags_missing", report, "warning")
        self.assertTrue(any("two flags" in m for m in report.missing))

    def test_last_bootstrap(self):
        batch = {**self.STEPS, "terminated": [0, 0, 0], "truncated": [0, 0, 0]}
        self.assert_named("last_bootstrap_trimmed", audited({**batch, "advantages": [3.25, 2.5, 1.0]}))  # 1 = 1 + 3 - 3
        self.assert_clean(audited({**batch, "advantages": [3.5, 3.0, 2.0]}))

    def test_reset_rows(self):
        batch = self.tokens([1.0, 1.0, 1.0], [1.0, 5.0, -1.0], reset_rows=[0, 1, 0], loss=-5 / 3)
        self.assert_named("reset_rows_counted", audited(batch))
        batch["mask"] = np.array([[1], [0], [1]], dtype=bool)
        self.assert_clean(audited({**batch, "loss": 0.0}))

    def test_rewards_stored_late(self):
        batch = {
            "rewards": [1.0, 2.0, 3.0],
            "values": [0.0, 0.0, 0.0],
            "last_values": [0.0],
            "gamma": 1.0,
            "lam": 1.0,
            "terminated": [0, 0, 1],
            "truncated": [0, 0, 0],
        }
        self.assert_named("rewards_one_slot_late", audited({**batch, "returns": [3.0, 3.0, 2.0]}))
        self.assert_clean(audited({**batch, "returns": [6.0, 5.0, 3.0]}))

    def test_reward_minus_value(self):
        batch = {
            "rewards": [0.0, 0.0, 1.0],
            "values": [0.2, 0.4, 0.6],
            "last_values": [0.0],
            "gamma": 1.0,
            "lam": 1.0,
            "terminated": [0, 0, 1],
            "truncated": [0, 0, 0],
        }
        self.assert_named("reward_minus_value", audited({**batch, "advantages": [-0.2, -0.4, 0.4]}))
        self.assert_clean(audited({**batch, "advantages": [0.8, 0.6, 0.4]}))

    # ---- pairs

    @staticmethod
    def pair(chosen=1.5, rejected=-0.5, **more):
        """Log-ratios chosen and rejected: a margin of 2."""
        return {
            "chosen_logps": [chosen - 5],
            "rejected_logps": [rejected - 5],
            "ref_chosen_logps": [-5.0],
            "ref_rejected_logps": [-5.0],
            "beta": 0.1,
            **more,
        }

    def test_ipo_on_sums(self):
        # Log-ratios .3 x4 and -.3 x2: means differ by .6, sums by 1.8; (.6 - 1)^2 = .16, (1.8 - 1)^2 = .64.
        l = np.array([[-0.7, -0.7, -0.7, -0.7], [-1.3, -1.3, 0, 0]])
        batch = {
            "logps": l,
            "ref_logps": np.full((2, 4), -1.0),
            "mask": [[1, 1, 1, 1], [1, 1, 0, 0]],
            "beta": 0.5,
            "chosen_logps": [-2.8],
            "rejected_logps": [-2.6],
        }
        self.assert_named("ipo_sum_or_mean", audited({**batch, "loss": 0.64}, "ipo_mean"))
        report = audited({**batch, "loss": 0.16}, "ipo_mean")
        self.assertEqual([f.name for f in report.findings if f.severity == "mistake"], [])

    def test_loss_type_not_passed_on(self):
        self.assert_named("preference_loss_differs", audited(self.pair(loss=0.5981389), "ipo"))
        self.assert_clean(audited(self.pair(loss=9.0), "ipo"))  # (2 - 5)^2

    def test_beta_twice_in_the_logged_margin(self):
        self.assert_named("beta_twice", audited(self.pair(loss=0.5981389, margin=0.02)))
        self.assert_clean(audited(self.pair(loss=0.5981389, margin=0.2)))

    def test_chosen_and_rejected_exchanged(self):
        self.assert_named("chosen_rejected_exchanged", audited(self.pair(loss=0.7981389)))  # .5981389 + .1 * 2
        self.assert_named("low_accuracy", audited(self.pair(chosen=-0.5, rejected=1.5, loss=0.7981389, accuracy=0.0)), None)

    def test_smoothing(self):
        # z = .2, e = .1: cDPO .9 * .598139 + .1 * .798139 = .618139; weights exchanged .778139; robust .573139.
        self.assert_named("smoothing_reversed", audited(self.pair(loss=0.7781389), "cdpo"))
        self.assert_named("smoothing_variant", audited(self.pair(loss=0.5731389), "cdpo"))
        self.assert_clean(audited(self.pair(loss=0.6181389), "cdpo"))

    def test_padding_in_the_sum(self):
        batch = {
            "logps": [[-1.0, -1.0, -3.0], [-2.0, -2.0, -2.0]],
            "ref_logps": [[-1.0, -1.0, -1.0], [-2.0, -2.0, -2.0]],
            "mask": [[1, 1, 0], [1, 1, 1]],
            "beta": 0.1,
            "chosen_logps": [-2.0],
            "rejected_logps": [-6.0],
        }
        self.assert_named("padding_counted", audited({**batch, "loss": 0.7981389}))  # margin -2 through the pad
        self.assertNotIn("padding_counted", audited({**batch, "loss": math.log(2)}).named())

    def test_prompt_cancels_in_a_margin(self):
        # A shared prompt token in front: counting it adds the same number on both sides.
        batch = {
            "logps": [[-3.0, -1.0], [-3.0, -2.0]],
            "ref_logps": [[-2.5, -1.5], [-2.5, -1.0]],
            "mask": [[0, 1], [0, 1]],
            "attention_mask": [[1, 1], [1, 1]],
            "beta": 0.1,
            "chosen_logps": [-1.0],
            "rejected_logps": [-2.0],
        }
        loss = math.log1p(math.exp(-0.1 * (0.5 + 1.0)))
        report = audited({**batch, "loss": loss})
        self.assert_named("prompt_cancels", report, "note")
        self.assert_clean(report)

    # ---- metrics, zero losses, logs

    def test_loss_zero_is_healthy_or_silent(self):
        healthy = self.tokens([1.0, 1.0], [1.0, -1.0], loss=0.0, dloss_dlogps=[[-0.5], [0.5]])
        report = audited(healthy)
        self.assert_named("loss_zero_healthy", report, "note")
        self.assert_clean(report)
        self.assertIn("0.7071", report.findings[0].evidence)
        report = audited(self.tokens([1.0, 1.0], [0.0, 0.0], loss=0.0, dloss_dlogps=[[0.0], [0.0]]))
        self.assert_named("no_signal", report, "note")
        self.assert_clean(report)

    def test_flat_mean_of_a_log(self):
        batch = {"log_values": [1.0, 1.0, 4.0], "log_windows": [0, 0, 1]}
        self.assert_named("flat_log_mean", audited({**batch, "logged_mean": 2.0}))
        self.assert_clean(audited({**batch, "logged_mean": 2.5}))

    def test_step_column(self):
        self.assert_named("log_steps_not_increasing", audited({"log_steps": [[0, 1], [2, 3], [4, 5]]}), "warning")
        self.assert_named("log_steps_not_increasing", audited({"log_steps": [0, 1, 1, 2]}), "warning")
        self.assert_clean(audited({"log_steps": [[0, 0], [1, 1], [2, 2]]}))

    def test_sign_of_the_entropy_loss(self):
        batch = {"logps": [[-0.5, -1.5]], "mask": [[1, 1]]}
        # A log may name the entropy an entropy loss: only the gradient says which sign the loss has.
        plus = {**batch, "reported_entropy_loss": 1.0}
        self.assert_named("entropy_sign", audited(plus), "warning")
        self.assert_named("entropy_sign", audited({**plus, "dloss_dentropies": [[0.01, 0.01]]}), "mistake")
        self.assert_clean(audited({**plus, "dloss_dentropies": [[-0.01, -0.01]]}))
        self.assert_clean(audited({**batch, "reported_entropy_loss": -1.0}))
