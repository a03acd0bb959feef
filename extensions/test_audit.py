"""The audit on public bug reports in small numbers, on shipped captures, on planted mistakes and on damaged files."""

from __future__ import annotations

import contextlib
import io
import json
import math
import tempfile
import unittest
from pathlib import Path

import numpy as np
import torch

from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)
from extensions import audit as audit_module
from extensions import audit_selftest
from extensions.audit import audit, parse_declared
from extensions.audit_advantages import _gae, in_level_group
from extensions.audit_mistakes import CATALOGUE, NOTES
from extensions.audit_read import ALIASES, read_recording, recording_from
from extensions.audit_forms import Traits, mask_edits, mistaken_specs, round_between, shifted
from extensions.audit_search import parts_of
from extensions.objectives import make_batch
from rl_lab import FileProblem, gae

NAN = math.nan


def audited(arrays: dict, declared: str | None = None, settings: tuple[str, ...] = ()):
    row, numbers = parse_declared(declared, settings)
    return audit(recording_from({name: np.asarray(value) for name, value in arrays.items()}), row, numbers)


class PublicReports(unittest.TestCase):
    """One test for each public bug report that a recorded batch can show: the wrong number is named, the right is not."""

    def assert_named(self, name: str, report, severity: str | None = "mistake"):
        found = {f.name: f.severity for f in report.findings}
        self.assertIn(name, found, f"findings {found}, loss {report.loss.get('matches', [])[:2]}")
        if severity:
            self.assertEqual(found[name], severity)

    def assert_clean(self, report):
        self.assertEqual([f for f in report.findings if f.severity != "note"], [])

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
        self.assert_clean(audited({"logps": [[-0.5, -0.7, 0.0, 0.0]], "mask": [[1, 1, 0, 0]]}))

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
        self.assert_clean(audited({"logps": [[-12.34]], "old_logps": [[-12.34]], "mask": [[1]]}))

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
        self.assert_named(
            "groups_pooled", audited(self.rewarded([1, 0, 5, 4], [0, 0, 1, 1], [-1.5, -2.5, 2.5, 1.5]))
        )  # mean 2.5
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
        self.assert_named("flags_missing", report, "warning")
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
        self.assert_named("entropy_sign", audited({**batch, "reported_entropy_loss": 1.0}))
        self.assert_clean(audited({**batch, "reported_entropy_loss": -1.0}))


class Captures(unittest.TestCase):
    """Clean recordings of real trainers are read right, and planted mistakes are named (a part of what --self-test runs)."""

    FILES = (
        "trl_grpo_grpo_pass2_cliphigher_beta_rho_kl",
        "trl_grpo_bnpo_accum2_mb1",
        "trl_grpo_gspo_wide_pass2_beta",
        "trl_dpo_robust",
        "verl_adv_gae_tool",
        "sb3_gae_terminate",
        "verl_loss_vanilla_seq_mean_token_sum.",
        "verl_value_loss_token_mean",
        "sb3_ppo_loss_ppo_two",
        "trl_rloo_accum2_mb0",
    )

    def entries(self):
        return [entry for entry in audit_selftest.manifest() if entry["file"].startswith(self.FILES)]

    def test_clean_captures(self):
        self.assertEqual(len(self.entries()), len(self.FILES))
        for entry in self.entries():
            with self.subTest(entry["file"]):
                arrays = audit_selftest.load(entry["file"])
                report = audit(read_recording(audit_selftest.CAPTURES / entry["file"]))
                self.assertIsNone(audit_selftest.clean_problem(entry, arrays, report, False))

    def test_the_planters_right_version_is_the_trainers(self):
        for entry in audit_selftest.manifest():
            arrays = audit_selftest.load(entry["file"])
            truth = audit_selftest.truth_of(entry, arrays)
            if truth is None or "rho" in arrays:
                continue
            with self.subTest(entry["file"]):
                loss, gradient = audit_selftest.naive_loss(audit_selftest.Plant(truth, arrays))
                self.assertAlmostEqual(loss, float(arrays["loss"]), delta=2e-6)
                np.testing.assert_allclose(gradient, arrays["dloss_dlogps"], atol=2e-7)

    def test_planted_mistakes(self):
        plants = [p for p in audit_selftest.all_plants(lambda file: file.startswith(self.FILES))]
        chosen = list({p.mistake: p for p in plants}.values())
        self.assertGreater(len(chosen), 35)
        for column, plants_here, bar in ((0, chosen[::3], 0.95), (1, chosen[1::6], 0.8)):
            scores = audit_selftest.measure(iter(plants_here), audit_selftest.COLUMNS[column : column + 1])
            (scores,) = scores.values()
            planted, named, wrong = audit_selftest.totals(scores)
            self.assertGreaterEqual(
                named, bar * planted, {name: score.missed for name, score in scores.items() if score.missed}
            )
            self.assertEqual(wrong, 0, {name: score.wrong for name, score in scores.items() if score.wrong})

    def test_a_report_without_the_mistake_does_not_pass(self):
        # The broken twin of the judge: an audit that finds nothing must score 0.
        planted = next(
            p for p in audit_selftest.all_plants(lambda file: "grpo_pass2." in file) if p.mistake == "ratio_detached"
        )
        original = audit_selftest.audit
        audit_selftest.audit = lambda *arguments: audit_module.Report()
        try:
            self.assertEqual(audit_selftest.judge(planted, True, True)[:2], (False, False))
        finally:
            audit_selftest.audit = original
        self.assertEqual(audit_selftest.judge(planted, True, True)[:2], (True, False))

    def test_more_confident_wrong_names_are_counted(self):
        planted = next(
            p for p in audit_selftest.all_plants(lambda file: "grpo_pass2." in file) if p.mistake == "ratio_detached"
        )
        renamed = audit_selftest.replace(planted, mistake="groups_pooled", names=())
        self.assertEqual(audit_selftest.judge(renamed, True, True)[:2], (False, True))

    def test_rows_and_padding_in_any_order(self):
        arrays = audit_selftest.load("trl_grpo_grpo_pass2.npz")
        order = np.random.default_rng(0).permutation(len(arrays["logps"]))
        per_row = {
            name
            for name, value in arrays.items()
            if value.ndim and len(value) == len(order) and not name.startswith("gen_") and name != "reward_weights"
        }
        mixed = {name: value[order] if name in per_row else value for name, value in arrays.items()}
        left = {
            name: value[:, ::-1] if name in per_row and value.shape == arrays["mask"].shape else value
            for name, value in mixed.items()
        }
        for batch in (mixed, left):
            report = audited(batch)
            self.assertEqual(report.loss["matches"][0]["reduction"], "mean_per_response")
            self.assertTrue(report.gradient["agrees"])
            self.assertEqual([f for f in report.findings if f.severity != "note"], [])

    def test_ties_are_said_and_what_decides_them(self):
        report = audit(read_recording(audit_selftest.CAPTURES / "trl_grpo_grpo_scale_batch.npz"))
        self.assertTrue(any("every ratio is 1" in line for line in report.cannot_tell))
        self.assertIn("loss_zero_healthy", report.named())
        self.assertGreater(report.loss["tried"], 100)

    def test_rounding_is_judged_group_by_group(self):
        # A group whose rewards differ by 0.002 loses five digits in float32; its advantages are right all the same.
        rewards = np.array([1.0, 0.0, 3.0, 4.0, 0.912, 0.914, 0.913, 0.912], dtype=np.float32)
        groups = np.arange(8) // 4
        mean = np.array([rewards[groups == g].mean() for g in groups], dtype=np.float32)
        std = np.array([rewards[groups == g].std(ddof=1) for g in groups], dtype=np.float32)
        right = (rewards - mean) / (std + np.float32(1e-6))
        batch = {"rewards": rewards, "group_ids": groups, "mask": np.ones((8, 1), dtype=bool)}
        self.assertEqual(audited({**batch, "advantages": right}).named(), [])
        wrong = right.copy()
        wrong[0] += 1e-4  # in the group with spread this is no rounding
        self.assertEqual(audited({**batch, "advantages": wrong}).named(), ["not_reproduced"])

    def test_gradient_of_a_large_batch_is_confirmed_on_every_row(self):
        rng = np.random.default_rng(0)
        rows, width = 700, 100  # more slots than one part holds
        advantages = rng.choice((-1.0, 1.0), rows)
        logps = -rng.exponential(1.0, (rows, width)) - 0.01
        slope = -advantages[:, None] / (rows * width) * np.ones((rows, width))
        batch = {"logps": logps, "old_logps": logps, "advantages": advantages, "mask": np.ones((rows, width), dtype=bool)}
        batch |= {"loss": -advantages.mean(), "dloss_dlogps": slope}
        self.assertTrue(audited(batch).gradient["agrees"])
        slope[349:351] = 0.0  # not among the rows that are compared first
        report = audited(batch)
        self.assertIs(report.gradient["agrees"], False)
        (found,) = [f for f in report.findings if f.name == "gradient_differs_in_rows"]
        self.assertEqual(found.rows, (349, 350))

    def test_many_accidents_name_nothing(self):
        # No trainer made this number: 64 answers of many terms, a value, and every setting unknown.
        rng = np.random.default_rng(1)
        logps = -rng.exponential(1.0, (64, 40)) - 0.01
        batch = {"logps": logps, "mask": np.ones((64, 40), dtype=bool), "advantages": rng.standard_normal(64)}
        for name, size in (("old_logps", 0.3), ("ref_logps", 0.4)):
            batch[name] = np.minimum(logps + size * rng.standard_normal(logps.shape), -0.001)
        report = audited({**batch, "loss": 0.01234567})
        self.assertGreater(report.loss["expected_by_accident"], 10)
        self.assertEqual([f.name for f in report.findings if f.severity != "note"], ["value_decides_nothing"])

    def test_value_alone_reports_accidents(self):
        arrays = {k: v for k, v in audit_selftest.load("trl_grpo_grpo_pass2.npz").items() if k != "dloss_dlogps"}
        report = audited(arrays)
        self.assertIsNone(report.gradient["agrees"])
        self.assertLess(report.loss["expected_by_accident"], 0.1)
        self.assertTrue(any(m.startswith("dloss_dlogps") for m in report.missing))


class Reading(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def test_damaged_files(self):
        outcome = audit_selftest.survive(120, self.folder)
        refused = sum(kinds["refused"] for kinds in outcome.values())
        self.assertGreater(refused, 53)
        self.assertEqual(outcome["objects"]["audited"], 0)
        self.assertEqual(outcome["lying_header"]["audited"], 0)
        self.assertEqual(outcome["bomb"]["audited"], 0)

    def test_a_small_file_does_not_become_a_large_array(self):
        # 3 MB of zeros in 3 kB, allowed as flags, would be 24 MB as numbers.
        path = self.folder / "zeros.npz"
        np.savez_compressed(path, mask=np.ones((3000, 1000), dtype=bool), loss=0.5)
        self.assertEqual(read_recording(path).arrays["mask"].shape, (3000, 1000))
        np.savez_compressed(path, logps=np.zeros((3000, 1000), dtype=np.int8), loss=0.5)
        with self.assertRaisesRegex(FileProblem, "would become 24000008, wanted at most"):
            read_recording(path)

    def test_the_trap_works(self):
        # What the hostile files carry would write the file that survive() looks for.
        import pickle

        path = str(self.folder / "run")
        pickle.loads(pickle.dumps(audit_selftest._Hostile(path)))
        self.assertTrue(Path(path).exists())

    def test_every_format_gives_the_same_report(self):
        arrays = audit_selftest.load("trl_grpo_grpo_pass2.npz")
        arrays = {name: arrays[name] for name in ("logps", "old_logps", "mask", "advantages", "loss", "dloss_dlogps")}
        np.savez(self.folder / "a.npz", **arrays)
        torch.save(
            {name: torch.as_tensor(np.ascontiguousarray(value)) for name, value in arrays.items()}, self.folder / "a.pt"
        )
        lines = []
        for row in range(len(arrays["mask"])):
            entry = {name: arrays[name][row].tolist() for name in ("logps", "old_logps", "dloss_dlogps")}
            lines.append(
                json.dumps(
                    {
                        **entry,
                        "mask": arrays["mask"][row].astype(int).tolist(),
                        "advantages": float(arrays["advantages"][row]),
                        "loss": float(arrays["loss"]),
                    }
                )
            )
        (self.folder / "a.jsonl").write_text("\n".join(lines))
        names = ["a.npz", "a.pt", "a.jsonl"]
        try:
            from safetensors.torch import save_file
        except ImportError:
            (self.folder / "a.safetensors").write_bytes(b"x" * 20)
            with self.assertRaisesRegex(FileProblem, "needs the package safetensors"):
                read_recording(self.folder / "a.safetensors")
        else:
            save_file(
                {name: torch.as_tensor(np.ascontiguousarray(value)) for name, value in arrays.items()},
                self.folder / "a.safetensors",
            )
            names.append("a.safetensors")
        for name in names:
            report = audit(read_recording(self.folder / name))
            self.assertEqual(report.loss["matches"][0]["reduction"], "mean_per_response", name)
            self.assertTrue(report.gradient["agrees"], name)

    def test_names_of_trainers(self):
        verl = {
            "log_prob": [[-1.0, -2.0]],
            "old_log_probs": [[-1.1, -2.0]],
            "response_mask": [[1, 1]],
            "uid": np.array(["a"]),
            "advantages": [[1.0, 1.0]],
        }
        recording = recording_from({name: np.asarray(value) for name, value in verl.items()})
        self.assertEqual(set(recording.arrays), {"logps", "old_logps", "mask", "group_ids", "advantages"})
        seen = [name for name, others in ALIASES.items() for name in (name, *others)]
        self.assertEqual(len(seen), len(set(seen)), "one name for two arrays")

    def test_errors_say_what_was_wanted(self):
        for arrays, words in (
            ({"logps": np.zeros((2, 3)), "old_logps": np.zeros((3, 2))}, "old_logps: got shape"),
            ({"logps": np.zeros((2, 3)), "mask": np.full((2, 3), 7)}, "wanted 0 and 1"),
            ({"logps": np.zeros((2, 3)) + 1j}, "wanted numbers"),
            ({"nothing": np.zeros(3)}, "none of these names is known"),
            ({"logps": np.zeros((0, 3))}, "an array of nothing"),
            ({"loss": np.zeros(3)}, "wanted one number"),
        ):
            with self.assertRaisesRegex(FileProblem, words):
                recording_from(arrays)


class CommandLine(unittest.TestCase):
    def run_main(self, *arguments: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                audit_module.main(list(arguments))
                status = 0
            except SystemExit as stop:
                status = stop.code or 0
        return status, out.getvalue(), err.getvalue()

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.clean = str(audit_selftest.CAPTURES / "trl_grpo_grpo_pass2.npz")

    def wrong(self) -> str:
        arrays = audit_selftest.load("trl_grpo_grpo_pass2.npz")
        arrays["dloss_dlogps"] = np.zeros_like(arrays["dloss_dlogps"])
        np.savez(self.folder / "wrong.npz", **arrays)
        return str(self.folder / "wrong.npz")

    def test_exit_status_and_report(self):
        status, out, _ = self.run_main(self.clean, "--json", str(self.folder / "report.json"))
        self.assertEqual(status, 0)
        for title in ("Batch", "Advantages", "Loss", "Gradient", "Findings"):
            self.assertIn(f"\n{title}\n", out)
        document = json.loads((self.folder / "report.json").read_text())
        self.assertEqual(document["loss"]["matches"][0]["reduction"], "mean_per_response")
        self.assertIs(document["gradient"]["agrees"], True)
        self.assertEqual(document["findings"], [])
        self.assertEqual(document["batch"]["rows"], 8)
        self.assertGreater(document["loss"]["tried"], 100)
        self.assertTrue(document["advantages"]["matches"])
        status, out, _ = self.run_main(self.wrong())
        self.assertEqual(status, 1)
        self.assertIn("ratio_detached", out)
        self.assertEqual(self.run_main(self.wrong(), "--fail-on", "never")[0], 0)

    def test_usage_and_file_errors_exit_2_in_one_line(self):
        for arguments, words in (
            ([], "BATCH"),
            ([str(self.folder / "none.npz")], "No such file"),
            ([self.clean, "--declared", "grop"], "near: "),
            ([self.clean, "--declared", "dpo"], "row for pairs"),
            ([self.clean, "--set", "clip_high"], "key=value"),
            ([self.clean, "--set", "clip_high=much"], "wanted a number"),
            ([self.clean, "--set", "colour=1"], "no number of a recording"),
            ([self.clean, "--declared", "grpo", "--set", "ratio=tokens"], "ratio: got 'tokens'"),
            ([self.clean, "--damaged", "5"], "--self-test"),
            (["--fail-on", "note", self.clean], "invalid choice"),
        ):
            status, _, err = self.run_main(*arguments)
            self.assertEqual(status, 2, arguments)
            self.assertIn(words, err)
            self.assertEqual(err.count("\n"), 1, err)

    def test_same_bytes(self):
        first, second = (self.run_main(self.clean)[1] for _ in range(2))
        self.assertEqual(first, second)

    def test_help_and_list(self):
        status, out, _ = self.run_main("--help")
        self.assertEqual(status, 0)
        self.assertIn("old_log_probs", out)
        status, out, _ = self.run_main("--list")
        for name in (*CATALOGUE, *NOTES):
            self.assertIn(name, out)
        status, out, _ = self.run_main("--recipes")
        self.assertEqual(status, 0)
        for name in ("RecordingGRPOTrainer", "RecordingDPOTrainer", "policy_loss_fn"):
            self.assertIn(name, out)

    def test_global_state_is_left_alone(self):
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), torch.get_default_dtype(), torch.get_num_threads()
        self.run_main(self.clean)
        after = torch.get_rng_state(), np.random.get_state()[1].tolist(), torch.get_default_dtype(), torch.get_num_threads()
        self.assertTrue(torch.equal(before[0], after[0]))
        self.assertEqual(before[1:], after[1:])


class Pieces(unittest.TestCase):
    def test_the_recursion_over_time_is_the_labs(self):
        rng = np.random.default_rng(2)
        rewards, values, following = (rng.standard_normal((3, 7)) for _ in range(3))
        terminated = rng.random((3, 7)) < 0.2
        boundary = terminated | (rng.random((3, 7)) < 0.2)
        boundary[:, -1] = True
        numbers = [torch.as_tensor(x) for x in (rewards, values, following, terminated, boundary)]
        expected = gae(*numbers, 0.9, 0.8)[0].numpy()
        made = _gae(rewards, values, following, terminated, boundary, 0.9, 0.8)
        np.testing.assert_allclose(made, expected, atol=1e-12)

    def test_shifted(self):
        mask = np.array([[0, 1, 1, 0]], dtype=bool)
        self.assertEqual(shifted(mask, 1).astype(int).tolist(), [[0, 0, 1, 1]])
        self.assertEqual(shifted(mask, -1).astype(int).tolist(), [[1, 1, 0, 0]])

    def test_round_between(self):
        self.assertEqual(round_between(0.1713, 0.2311), 0.2)
        self.assertEqual(round_between(0.2771, 0.2846), 0.28)

    def test_level_groups(self):
        ids, rewards = np.array([0, 1, 0, 1, 2]), np.array([0.1, 1.0, 0.1, 0.0, 5.0])
        self.assertEqual(in_level_group(ids, rewards).tolist(), [True, False, True, False, False])
        self.assertEqual(
            in_level_group(ids, np.array([0.1, NAN, 0.1, 0.0, NAN])).tolist(), [True, False, True, False, False]
        )

    def test_mask_edits_differ_from_the_mask(self):
        recording = recording_from({"logps": np.zeros((2, 4)), "mask": np.array([[1, 1, 0, 0], [1, 1, 1, 1]], dtype=bool)})
        for name, edit in mask_edits(recording).items():
            self.assertTrue((edit != recording.arrays["mask"]).any(), name)


class Parts(unittest.TestCase):
    """Large batches are looked at in pieces of rows."""

    def batch(self, rows: int):
        rng = np.random.default_rng(0)
        mask = np.arange(8) < np.array([2, 8, 3, 5, 2, 8, 3, 5])[:rows, None]
        logps = -rng.exponential(size=mask.shape)
        return make_batch(logps=logps, old_logps=logps + 0.1, mask=mask, advantages=rng.normal(size=rows))

    def test_pieces_hold_every_row_once_without_the_columns_that_none_of_them_counts(self):
        batch = self.batch(6)
        parts = parts_of(batch, slots=16)
        self.assertGreater(len(parts), 1)
        self.assertEqual(sorted(torch.cat([part.rows for part in parts]).tolist()), list(range(6)))
        self.assertLess(min(part.batch.mask.shape[1] for part in parts), 8)
        self.assertEqual(sum(int(part.batch.mask.sum()) for part in parts), int(batch.mask.sum()))

    def test_in_a_square_batch_advantages_may_stand_along_time_in_every_piece(self):
        batch = self.batch(8)
        recording = recording_from({"logps": batch.logps.numpy(), "mask": batch.mask.numpy()})
        specs = [s for s in mistaken_specs(recording, Traits.of(batch)) if s.mistake == "advantages_aligned_with_time"]
        self.assertTrue(specs)
        for spec in specs:
            whole = spec.make(batch).value
            for part in parts_of(batch, slots=16):
                torch.testing.assert_close(spec.make(part.batch).value, whole[part.rows])



if __name__ == "__main__":
    unittest.main()
