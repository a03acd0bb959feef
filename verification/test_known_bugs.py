"""Mistakes found in public PPO, DPO and GRPO code: the lab has none of them, and each test would notice.

`known_bugs.jsonl` holds one case a line: id, kind, inputs, the right result, the recorded wrong one, and a note with its
source (GitHub owner/repo#number). A test `test_Bnn_*` computes the right result with the lab and the wrong one with the
mistake written out beside it, both from the inputs of its line. Cases about something the core lab does not do are in
`WAITING`, with the extension they belong to. To add a case: append its line, then write its test or its WAITING entry.
"""

from __future__ import annotations

import csv
import io
import json
import math
import random
import unittest
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rl_lab import (
    BanditSettings,
    Rollout,
    action_logps,
    categorical_kl,
    clip_fraction,
    clipped_policy_loss,
    clipped_value_loss,
    csv_text,
    dpo_loss,
    evaluate,
    gae,
    group_advantages,
    groups_without_spread,
    grpo_loss,
    importance_ratio,
    kl_estimates,
    make_task,
    preference_probability,
    response_logps,
    response_token_logps,
    sample_ppo,
    train,
)
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)
from token_objectives import mean_over_tokens, mean_per_response, token_id_mask

CASES = {
    case["id"]: case
    for case in map(json.loads, Path(__file__).with_name("known_bugs.jsonl").read_text(encoding="utf-8").splitlines())
}

# Nothing in rl_lab.py, ppo_chain.py or token_objectives.py could make these mistakes: id -> (extension, why it waits).
WAITING = {
    "B16": ("objectives", "the core takes no micro-batches; `accumulation` and the reduction `mean_over_window` do"),
    "B17": ("distributed_loss", "the core runs in one process; averaging over ranks is the extension's subject"),
    "B18": ("objectives", "the core has no fixed token budget; the reduction `sum_over_budget` has"),
    "B25": ("objectives", "the core clips once; the surrogate `dual_clip` has the second bound"),
    "B26": ("objectives", "the core's band is symmetric; `clip_low` and `clip_high` are two numbers there"),
    "B29": ("objectives", "the core's ratio is per token; `sequence_mean` and `sequence_product` are choices there"),
    "B45": ("objectives", "the core never whitens advantages over tokens; the scale `token_std` does"),
    "B56": ("gymnasium_ppo", "the core's tasks have no reset rows; an environment with automatic resets has"),
    "B63": ("objectives", "IPO is no core objective; preference rows `ipo` (sums) and `ipo_mean`"),
    "B64": (
        "objectives",
        "the core has one preference loss, so no loss type could get lost; preference rows `ipo`, `hinge`, `dpo`",
    ),
    "B67": ("objectives", "the core has no label smoothing; preference rows `cdpo` and `robust`"),
    "B72": ("audit", "the core logs the last update of an iteration, never a mean over accumulation windows"),
    "B75": ("objectives", "the core has no entropy bonus; `entropy_coef` has its sign"),
    "B76": (
        "tiny_lm",
        "the core draws a fixed number of groups; right and wrong differ only in the limit of a resampling loop",
    ),
}

# ------------------------------------------------------------------------------------------ from a case to tensors


def f64(numbers: object) -> Tensor:
    """Numbers of a case, the strings "nan" and "-inf" among them, as float64."""
    if isinstance(numbers, list):
        return torch.stack([f64(number) for number in numbers])
    return torch.tensor(float(numbers), dtype=torch.float64)


def flags(values: list) -> Tensor:
    return torch.tensor(values).bool()


def padded(rows: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Rows of unequal length -> values [B, T], NaN behind the end of each row, and which slots are real [B, T]."""
    values = torch.nn.utils.rnn.pad_sequence([f64(row) for row in rows], batch_first=True, padding_value=math.nan)
    return values, ~values.isnan()


def logits_scoring(ids: Tensor, next_token_logps: list[float], vocabulary: int = 8) -> Tensor:
    """Logits [1, T, V] under which token t + 1 of `ids` [1, T] has log-probability next_token_logps[t]."""
    logits = torch.zeros(1, ids.shape[1], vocabulary, dtype=torch.float64)
    for t, logp in enumerate(next_token_logps):
        logits[0, t] = math.log((1 - math.exp(logp)) / (vocabulary - 1))
        logits[0, t, ids[0, t + 1]] = logp
    return logits


def prompt_and(tokens: list[int]) -> Tensor:
    """A row of ids whose first token is a prompt that nothing predicts."""
    return torch.tensor([[0, *tokens]])


def one_context_task(rewards: list[float], settings: BanditSettings = BanditSettings()):
    return make_task(f64([rewards]), settings)


class KnownBugs(unittest.TestCase):
    """Base: every recorded number of a case is computed, right ones by the lab, wrong ones by the broken twin."""

    def assert_tells_apart(self, case: dict, lab: dict, twin: dict) -> None:
        self.assertEqual(
            (lab.keys(), twin.keys()), (case["right"].keys(), case["wrong"].keys()), "a recorded result is untested"
        )
        self.assert_recorded(lab, case["right"], f"{case['id']}, lab")
        self.assert_recorded(twin, case["wrong"], f"{case['id']}, broken twin")
        self.assertNotEqual(case["right"], case["wrong"])

    def assert_recorded(self, got: object, recorded: object, where: str) -> None:
        """Equal to the six decimals of the record."""
        if isinstance(got, Tensor):
            got = got.tolist()
        if isinstance(recorded, dict):
            self.assertEqual(got.keys(), recorded.keys(), where)
            for name in recorded:
                self.assert_recorded(got[name], recorded[name], f"{where}, {name}")
        elif isinstance(recorded, list):
            self.assertEqual(len(got), len(recorded), where)
            for index, (mine, theirs) in enumerate(zip(got, recorded)):
                self.assert_recorded(mine, theirs, f"{where}[{index}]")
        elif recorded == "nan":
            self.assertTrue(math.isnan(got), f"{where}: got {got}, wanted nan")
        elif isinstance(recorded, str):
            self.assertEqual(got, recorded, where)
        else:
            self.assertLessEqual(abs(got - recorded), 5.1e-7, f"{where}: got {got}, recorded {recorded}")


class Ledger(unittest.TestCase):
    def test_every_case_is_tested_or_waits_with_a_reason(self):
        tested = {
            name.split("_")[1] for kind in KnownBugs.__subclasses__() for name in vars(kind) if name.startswith("test_B")
        }
        self.assertEqual(tested | WAITING.keys(), CASES.keys())
        self.assertEqual(tested & WAITING.keys(), set())

    def test_every_case_names_its_source(self):
        for case in CASES.values():
            with self.subTest(case["id"]):
                self.assertRegex(case["note"], r"\[src: \S+/\S+#\d+")


# ------------------------------------------------------------------------------------------ masks, shift, EOS and PAD


class Masks(KnownBugs):
    def test_B01_eos_that_shares_its_id_with_pad(self):
        case = CASES["B01"]
        given = case["inputs"]
        ids = prompt_and(given["target_ids"])
        mask = (torch.arange(ids.shape[1]) >= 1) & (torch.arange(ids.shape[1]) <= given["length"])
        logits = logits_scoring(ids, given["token_logps"])

        def mean_nll(response_mask: Tensor) -> dict:
            token_logps, valid = response_token_logps(logits, ids, response_mask)
            return {"mask": valid[0], "mean_nll": -mean_over_tokens(token_logps, valid)}

        self.assertEqual((given["eos_id"], given["pad_id"]), (2, 2))
        by_id_wrong = mask.unsqueeze(0) & (ids != given["pad_id"])
        self.assert_tells_apart(case, mean_nll(mask.unsqueeze(0)), mean_nll(by_id_wrong))
        with self.subTest("the same mistake as token_objectives shows it, where EOS and PAD are 4"):
            renamed = torch.where(ids == given["eos_id"], 4, ids)
            self.assertEqual(token_id_mask(renamed, mask.unsqueeze(0)).tolist(), by_id_wrong.tolist())

    def test_B03_mask_follows_the_target_token(self):
        case = CASES["B03"]
        given = case["inputs"]
        ids = torch.arange(len(given["tokens"])).unsqueeze(0)
        logits = logits_scoring(ids, given["next_token_logps"])
        mask = flags([given["token_mask"]])
        token_logps, valid = response_token_logps(logits, ids, mask)
        all_logps = action_logps(logits[:, :-1], ids[:, 1:])
        late_wrong = mask[:, :-1]
        self.assert_tells_apart(
            case,
            {"mask": valid[0], "logp": response_logps(logits, ids, mask)[0]},
            {"mask": late_wrong[0], "logp": all_logps[late_wrong].sum()},
        )
        self.assert_recorded(token_logps.sum(), case["right"]["logp"], "sum of the token log-probabilities")

    def test_B04_prompt_tokens_stay_out_of_the_response_nll(self):
        case = CASES["B04"]
        given = case["inputs"]
        # The masks of the case are already at the targets; position 0 of the row has no target.
        ids = torch.arange(len(given["next_token_logps"]) + 1).unsqueeze(0)
        logits = logits_scoring(ids, given["next_token_logps"])

        def mean_nll(mask: list) -> dict:
            token_logps, valid = response_token_logps(logits, ids, flags([[0, *mask]]))
            return {"mean_nll": -mean_over_tokens(token_logps, valid)}

        self.assert_tells_apart(case, mean_nll(given["response_mask"]), mean_nll(given["attention_mask"]))

    def test_B06_tool_output_is_not_trained_on(self):
        case = CASES["B06"]
        given = case["inputs"]
        losses = f64([given["per_token_loss"]])
        self.assert_tells_apart(
            case,
            {"loss": mean_over_tokens(losses, flags([given["loss_mask"]]))},
            {"loss": mean_over_tokens(losses, flags([given["attention_mask"]]))},
        )

    def test_B08_nan_in_an_unused_slot(self):
        case = CASES["B08"]
        given = case["inputs"]
        mask = flags([given["mask"]])
        old_logps, advantages = f64([given["old_logps"]]), f64([given["advantages"]])
        losses = clipped_policy_loss(f64([given["logps"]]), old_logps, advantages)
        multiplied_wrong = (losses * mask).sum() / mask.sum()
        self.assert_tells_apart(case, {"loss": mean_over_tokens(losses, mask)}, {"loss": multiplied_wrong})
        self.assert_recorded(mean_per_response(losses, mask), case["right"]["loss"], "the other reduction")
        with self.subTest("nor does it reach the gradient of the logits"):
            ids = prompt_and([1, 2])
            logits = logits_scoring(ids, given["logps"]).requires_grad_()
            logps, valid = response_token_logps(logits, ids, flags([[0, *given["mask"]]]))
            loss = mean_over_tokens(clipped_policy_loss(logps, old_logps, advantages), valid)
            gradient = torch.autograd.grad(loss, logits)[0]
            self.assertTrue(gradient.isfinite().all())
            self.assertEqual((gradient != 0).any(dim=-1).tolist(), [[True, False, False]])

    def test_B10_truncated_rows_leave_numerator_and_denominator(self):
        case = CASES["B10"]
        given = case["inputs"]
        losses, mask = f64(given["per_token_loss"]), flags(given["length_mask"])
        kept = ~flags(given["truncated"])
        numerator_only_wrong = losses[kept][mask[kept]].sum() / mask.sum()
        self.assert_tells_apart(case, {"loss": mean_over_tokens(losses[kept], mask[kept])}, {"loss": numerator_only_wrong})
        with self.subTest("a row emptied by the mask is refused: its loss would have no denominator"):
            with self.assertRaisesRegex(ValueError, "row 1 has no valid token"):
                mean_over_tokens(losses, mask & kept.unsqueeze(1))

    def test_B11_a_masked_mean_divides_by_the_valid_slots(self):
        case = CASES["B11"]
        values, mask = f64([case["inputs"]["values"]]), flags([case["inputs"]["mask"]])
        all_slots_wrong = (values * mask).mean()
        self.assert_tells_apart(case, {"mean": mean_over_tokens(values, mask)}, {"mean": all_slots_wrong})
        self.assert_recorded(mean_per_response(values, mask), case["right"]["mean"], "the other reduction")

    def test_B12_padding_adds_nothing_to_a_sum_of_logps(self):
        case = CASES["B12"]
        given = case["inputs"]
        ids = prompt_and([1] * (len(given["logps"]) + given["pad_slots"]))
        mask = flags([[0] + [1] * len(given["logps"]) + [0] * given["pad_slots"]])
        logits = logits_scoring(ids, given["logps"])
        token_logps, valid = response_token_logps(logits, ids, mask)
        sentinel_wrong = token_logps.masked_fill(~valid, given["sentinel"])
        self.assert_tells_apart(
            case,
            {"minus_sum_logp": -response_logps(logits, ids, mask)[0]},
            {"minus_sum_logp": -sentinel_wrong.sum()},
        )


class Reductions(KnownBugs):
    def test_B13_two_reductions_are_two_objectives(self):
        case = CASES["B13"]
        self.assertEqual(case["inputs"]["declared"], "global_token")
        losses, valid = padded(case["inputs"]["per_token_loss"])
        # The lab has both, under names that cannot be confused; here the one is the other's mistake.
        self.assert_tells_apart(case, {"loss": mean_over_tokens(losses, valid)}, {"loss": mean_per_response(losses, valid)})


# ------------------------------------------------------------------------------------------ ratio and clipping


class Ratios(KnownBugs):
    def test_B20_old_logp_is_the_stored_one(self):
        case = CASES["B20"]
        given = case["inputs"]

        def clipped(old_logp: Tensor) -> dict:
            logp = f64(given["logp"]).requires_grad_()
            loss = clipped_policy_loss(logp, old_logp, f64(given["advantage"]), given["eps"])
            slope = torch.autograd.grad(loss, logp)[0]
            return {"ratio": importance_ratio(logp, old_logp), "loss": loss, "dloss_dlogp": slope}

        recomputed_wrong = f64(given["logp"])
        self.assert_tells_apart(case, clipped(f64(given["stored_old_logp"])), clipped(recomputed_wrong))
        with self.subTest("a training keeps the stored one: ratios move from 1 as the batch is reused"):
            ratios = train("ppo", steps=1).first_batch_trace[0]["ratio_after_each_update"]
            self.assertEqual(len(set(ratios) | {1.0}), 5)

    def test_B21_the_gradient_survives_an_undetached_old_logp(self):
        case = CASES["B21"]
        given = case["inputs"]
        advantage = f64(given["advantage"])

        def value_and_gradient(loss_of_logp) -> dict:
            logits = f64(given["logits"]).requires_grad_()
            loss = loss_of_logp(action_logps(logits, torch.tensor(given["action"])))
            return {"loss": loss, "grad": torch.autograd.grad(loss, logits)[0]}

        lab = value_and_gradient(lambda logp: clipped_policy_loss(logp, logp, advantage))
        undetached_wrong = value_and_gradient(lambda logp: -(logp - logp).exp() * advantage)
        self.assert_tells_apart(case, lab, undetached_wrong)
        with self.subTest("the other way to lose it: the whole ratio detached"):
            detached_wrong = value_and_gradient(lambda logp: -(logp - logp).exp().detach() * advantage + 0 * logp)
            self.assert_recorded(detached_wrong, case["wrong"], "ratio detached")

    def test_B23_the_band_is_one_minus_epsilon_to_one_plus_epsilon(self):
        case = CASES["B23"]
        ratio, advantage, epsilon = f64(case["inputs"]["ratio"]), f64(case["inputs"]["advantage"]), case["inputs"]["eps"]
        low_bound_wrong = -torch.minimum(ratio * advantage, ratio.clamp(epsilon, 1 + epsilon) * advantage)
        loss = clipped_policy_loss(ratio.log(), f64(0), advantage, epsilon)
        self.assert_tells_apart(case, {"loss": loss}, {"loss": low_bound_wrong})

    def test_B27_a_clip_share_looks_at_the_right_side_and_the_whole_batch(self):
        case = CASES["B27"]
        given = case["inputs"]
        ratio, advantages, epsilon = f64(given["ratio"]), f64(given["advantages"]), given["eps"]
        # `frac` is the share of samples that the clip deprives of their gradient: it depends on the sign of A.
        logp = ratio.log().requires_grad_()
        loss = clipped_policy_loss(logp, torch.zeros_like(logp), advantages, epsilon)
        flat = torch.autograd.grad(loss.sum(), logp)[0] == 0
        other_side_wrong = torch.where(advantages > 0, ratio < 1 - epsilon, ratio > 1 + epsilon)

        def outside(ratios: Tensor) -> Tensor:
            return clip_fraction(ratios.log(), torch.zeros_like(ratios), epsilon)

        # `epoch_frac`, ten samples a mini-batch: the recorded share of them has a ratio of 2, the others of 1.
        minibatches = [
            torch.where(torch.arange(10) < round(10 * share), f64(2), f64(1)) for share in given["minibatch_fracs"]
        ]
        self.assertEqual([round(outside(part).item(), 12) for part in minibatches], given["minibatch_fracs"])
        last_minibatch_wrong = outside(minibatches[-1])
        self.assert_tells_apart(
            case,
            {"frac": flat.double().mean(), "epoch_frac": outside(torch.cat(minibatches))},
            {"frac": other_side_wrong.double().mean(), "epoch_frac": last_minibatch_wrong},
        )
        with self.subTest("the lab's clip_fraction is by its definition another share: outside the band, whatever the sign"):
            self.assertEqual(outside(ratio).item(), 1.0)

    def test_B30_the_scored_distribution_is_the_sampled_one(self):
        case = CASES["B30"]
        given = case["inputs"]
        action, top_action = torch.tensor(given["action"]), torch.tensor(given["topk_action"])
        plain, tempered = f64(given["logits"]), f64(given["logits"]) / given["temperature"]
        whole = f64(given["topk_probs"]).log()
        # A forbidden action is a logit of -inf: action_logps renormalises over the others.
        top = whole.masked_fill(whole < whole.sort(descending=True).values[given["topk"] - 1], -math.inf)

        def first_ratios(scored: Tensor, scored_top: Tensor) -> dict:
            return {
                "ratio_temperature": importance_ratio(action_logps(scored, action), action_logps(tempered, action)),
                "ratio_topk": importance_ratio(action_logps(scored_top, top_action), action_logps(top, top_action)),
            }

        untempered_and_whole_wrong = first_ratios(plain, whole)
        self.assert_tells_apart(case, first_ratios(tempered, top), untempered_and_whole_wrong)

    def test_B32_old_logp_keeps_its_precision(self):
        case = CASES["B32"]
        logp = f64(case["inputs"]["logp"])
        rounded_wrong = logp.to(getattr(torch, case["inputs"]["stored_dtype"]))
        self.assert_tells_apart(
            case,
            {"ratio": importance_ratio(logp, logp)},
            {"stored": rounded_wrong.double(), "ratio": importance_ratio(logp, rounded_wrong.double())},
        )
        with self.subTest("a rollout stores float64, bit for bit what the first update computes"):
            settings = BanditSettings(seed=0)
            policy = f64([[0.3, -1.2, 2.0]])
            batch = sample_ppo(
                policy, f64([0]), one_context_task([1, 0.2, -0.5]), settings, torch.Generator().manual_seed(0)
            )
            self.assertEqual(batch.old_logp.dtype, torch.float64)
            self.assertTrue(torch.equal(batch.old_logp, action_logps(policy[batch.contexts], batch.actions)))


# ------------------------------------------------------------------------------------------ KL


class Divergences(KnownBugs):
    def test_B33_direction_of_the_exact_kl(self):
        case = CASES["B33"]
        policy, reference = f64(case["inputs"]["policy"]).log(), f64(case["inputs"]["ref"]).log()
        swapped_wrong = torch.nn.functional.kl_div(policy, reference, log_target=True, reduction="sum")
        self.assert_tells_apart(case, {"kl_policy_ref": categorical_kl(policy, reference)}, {"kl_policy_ref": swapped_wrong})
        self.assert_recorded(categorical_kl(reference, policy), case["wrong"]["kl_policy_ref"], "the lab, arguments swapped")

    def test_B34_k3_takes_a_log_ratio(self):
        case = CASES["B34"]
        ratio = f64(case["inputs"]["ratio"])  # reference over policy: exp(-d)
        _, _, k3 = kl_estimates(f64(0), ratio.log())
        ratio_for_its_logarithm_wrong = torch.expm1(ratio) - ratio
        self.assert_tells_apart(case, {"k3": k3}, {"k3": ratio_for_its_logarithm_wrong})

    def test_B35_the_kl_penalty_is_added_to_the_loss(self):
        case = CASES["B35"]
        given = case["inputs"]
        settings = BanditSettings(grpo_kl_weight=given["beta"])
        task = one_context_task([1, 0], settings)
        # KL(policy || uniform) = log 2 - H(p) grows from 0 at logit 0: bisect for the policy that has the case's KL.
        low, high = 0.0, 10.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if categorical_kl(f64([middle, 0]), f64([0, 0])) < given["kl"] else (low, middle)
        policy = f64([[low, 0]])
        actions = torch.tensor([[0, 1]])
        old_logp = action_logps(policy[[0, 0]], actions[0]).unsqueeze(0)
        # On the first pass the ratio is 1, so the policy loss is minus the mean advantage.
        advantages = torch.full((1, 2), -given["policy_loss"], dtype=torch.float64)
        batch = Rollout(torch.zeros_like(actions), actions, advantages, old_logp, advantages)
        loss, _ = grpo_loss(policy, None, batch, task, settings)
        subtracted_wrong = given["policy_loss"] - settings.grpo_kl_weight * categorical_kl(policy, task.reference).mean()
        self.assert_tells_apart(case, {"loss": loss}, {"loss": subtracted_wrong})

    def test_B38_an_early_stop_must_not_rest_on_a_signed_estimate(self):
        case = CASES["B38"]
        given = case["inputs"]
        # Samples of the old policy: KL(old || current) is estimated from old - current.
        k1, _, k3 = (estimate.mean().item() for estimate in kl_estimates(f64(given["old_logps"]), f64(given["logps"])))
        signed_wrong = {"k1": k1, "stop": k1 > given["limit"]}
        self.assert_tells_apart(case, {"k3": k3, "stop": k3 > given["limit"]}, signed_wrong)
        with self.subTest("the trainings stop on the exact KL, which is never negative"):
            run = train("ppo", steps=3, kl_stop=1e-6)
            self.assertEqual([row["optimizer_steps"] for row in run.history], [0, 1, 2, 3])
            self.assertTrue(all(row["kl_old_current"] > 0 for row in run.history[1:]))


# ------------------------------------------------------------------------------------------ advantages, shapes


class Advantages(KnownBugs):
    def test_B39_the_baseline_is_the_mean_of_the_own_group(self):
        case = CASES["B39"]
        rewards, groups = f64(case["inputs"]["rewards"]), case["inputs"]["group_ids"]
        self.assertEqual(groups, sorted(groups))  # contiguous, so that a reshape makes them rows
        rows = rewards.reshape(max(groups) + 1, -1)
        # Both groups have population std 0.5: eps = 1 - 0.5 makes the divisor 1 and leaves the centred reward.
        centred = group_advantages(rows, eps=1 - 0.5).flatten()
        whole_batch_wrong = rewards - rewards.mean()
        self.assert_tells_apart(case, {"adv": centred}, {"adv": whole_batch_wrong})

    def test_B41_the_declared_standard_deviation(self):
        case = CASES["B41"]
        given = case["inputs"]
        self.assertEqual(given["declared"], "population")
        rewards = f64(given["rewards"])
        sample_std_wrong = (rewards - rewards.mean()) / (rewards.std() + given["eps"])
        self.assert_tells_apart(case, {"adv": group_advantages(rewards, given["eps"])}, {"adv": sample_std_wrong})

    def test_B43_a_batch_of_one(self):
        case = CASES["B43"]
        given = case["inputs"]
        advantages = f64(given["advantages"])
        # PPO does not standardise: a batch of one sample keeps its advantage, here the reward over a zero critic.
        settings = BanditSettings(ppo_samples=given["group_size"], ppo_kl_beta=0.0)
        task = one_context_task(given["advantages"] * 2, settings)
        batch = sample_ppo(f64([[0, 0]]), f64([0]), task, settings, torch.Generator().manual_seed(0))
        sample_std = (advantages - advantages.mean()).square().sum() / (len(advantages) - 1)  # 0 / 0
        standardised_wrong = (advantages - advantages.mean()) / (sample_std.sqrt() + 1e-8)
        self.assert_tells_apart(case, {"adv": batch.advantages}, {"adv": standardised_wrong})
        with self.subTest("where a group is needed, a group of one is refused"):
            with self.assertRaisesRegex(ValueError, "one answer has nothing to be compared with"):
                group_advantages(advantages)
            with self.assertRaisesRegex(ValueError, "group_size"):
                train("grpo", group_size=given["group_size"])

    def test_B46_a_column_of_returns_against_a_row_of_values(self):
        case = CASES["B46"]
        values, returns = f64(case["inputs"]["values"]), f64(case["inputs"]["returns"])
        self.assertEqual(
            [list(values.shape), list(returns.shape)], [case["inputs"]["values_shape"], case["inputs"]["returns_shape"]]
        )
        # With V_old = V the clip is idle: the plain squared error.
        mse = clipped_value_loss(values, values, returns.squeeze(1)).mean()
        broadcast_wrong = (values - returns).square()
        self.assert_tells_apart(
            case, {"mse": mse}, {"mse": broadcast_wrong.mean(), "implicit_shape": list(broadcast_wrong.shape)}
        )
        with self.subTest("as given it is refused"), self.assertRaisesRegex(ValueError, r"broadcast against \[B\]"):
            clipped_value_loss(values, values, returns)


# ------------------------------------------------------------------------------------------ time: GAE and returns


class Time(KnownBugs):
    @staticmethod
    def lab_advantages(given: dict) -> Tensor:
        """The lab on scenario S: next_values are the later values, except where the true next observation is recorded."""
        values = f64(given["values"])
        next_values = torch.cat([values[1:], f64([given["value_after_last"]])])
        if "final_obs_value_at_1" in given:
            next_values[1] = given["final_obs_value_at_1"]
        terminated, boundary = flags(given["terminated"]), flags(given["boundary"])
        return gae(f64(given["rewards"]), values, next_values, terminated, boundary, given["gamma"], given["lam"])[0]

    @staticmethod
    def one_flag_recursion(given: dict, bootstraps: list[float], ends: list[int]) -> list[float]:
        """GAE with a single flag: A_t = r_t + gamma (1 - end_t) V' - V_t + gamma lam (1 - end_t) A_{t+1}."""
        following, advantages = 0.0, []
        for t in reversed(range(len(ends))):
            goes_on = given["gamma"] * (1 - ends[t])
            following = (
                given["rewards"][t] + goes_on * bootstraps[t] - given["values"][t] + goes_on * given["lam"] * following
            )
            advantages.insert(0, following)
        return advantages

    def test_B48_the_flag_of_a_step_is_read_at_that_step(self):
        case = CASES["B48"]
        given = case["inputs"]
        bootstraps = [*given["values"][1:], given["value_after_last"]]
        # As the lab reads them, the same flags in this recursion are right: only the shift below is the mistake.
        self.assert_recorded(
            self.one_flag_recursion(given, bootstraps, given["terminated"]), case["right"]["adv"], "unshifted"
        )
        next_steps_flag_wrong = [*given["terminated"][1:], 0]
        self.assert_tells_apart(
            case,
            {"adv": self.lab_advantages(given)},
            {"adv": self.one_flag_recursion(given, bootstraps, next_steps_flag_wrong)},
        )

    def test_B50_a_time_limit_is_not_a_termination(self):
        case = CASES["B50"]
        given = case["inputs"]
        bootstraps = [*given["values"][1:], given["value_after_last"]]
        boundary_for_terminated_wrong = self.one_flag_recursion(given, bootstraps, given["boundary"])
        self.assert_tells_apart(case, {"adv": self.lab_advantages(given)}, {"adv": boundary_for_terminated_wrong})

    def test_B51_bootstrap_from_the_observation_before_the_reset(self):
        case = CASES["B51"]
        given = case["inputs"]
        without_final_observation = {name: value for name, value in given.items() if name != "final_obs_value_at_1"}
        reset_observation_wrong = self.lab_advantages(without_final_observation)  # values[2] belongs to the next episode
        self.assert_tells_apart(case, {"adv": self.lab_advantages(given)}, {"adv": reset_observation_wrong})

    def test_B55_the_last_step_bootstraps_from_the_value_after_it(self):
        case = CASES["B55"]
        given = case["inputs"]
        own_value_wrong = self.lab_advantages({**given, "value_after_last": given["values"][-1]})
        self.assert_tells_apart(case, {"adv": self.lab_advantages(given)}, {"adv": own_value_wrong})

    def test_B57_a_reward_belongs_to_the_step_that_earned_it(self):
        case = CASES["B57"]
        given = case["inputs"]
        end = flags([0] * (len(given["rewards"]) - 1) + [1])

        def returns(rewards: list[float]) -> dict:
            # lambda 1 over a zero critic: the lambda-return is the discounted sum of what follows.
            zero = torch.zeros(len(rewards), dtype=torch.float64)
            return {"returns": gae(f64(rewards), zero, zero, end, end, given["gamma"], lam=1.0)[1]}

        one_slot_late_wrong = [0.0, *given["rewards"][:-1]]
        self.assert_tells_apart(case, returns(given["rewards"]), returns(one_slot_late_wrong))

    def test_B58_the_advantage_is_the_return_minus_the_value(self):
        case = CASES["B58"]
        given = case["inputs"]
        rewards, values = f64(given["rewards"]), f64(given["values"])
        next_values = torch.cat([values[1:], f64([math.nan])])
        end = flags([0] * (len(rewards) - 1) + [1])
        advantages, _ = gae(rewards, values, next_values, end, end, given["gamma"], lam=1.0)
        self.assert_tells_apart(case, {"adv": advantages}, {"adv": rewards - values})

    def test_B61_the_clipped_value_loss_is_the_larger_of_the_two(self):
        case = CASES["B61"]
        given = case["inputs"]
        value, old_value, ret = given["value"], given["stored_old_value"], given["ret"]
        clipped = min(max(value, old_value - given["eps"]), old_value + given["eps"])
        smaller_wrong = min((value - ret) ** 2, (clipped - ret) ** 2)
        loss = clipped_value_loss(f64(value), f64(old_value), f64(ret), given["eps"])
        self.assert_tells_apart(case, {"loss": loss}, {"loss": smaller_wrong})


# ------------------------------------------------------------------------------------------ preferences


class Preferences(KnownBugs):
    def test_B65_beta_is_applied_once(self):
        case = CASES["B65"]
        given = case["inputs"]
        zero, beta = f64(0), given["beta"]

        def margin_in(loss: Tensor) -> dict:
            """The scaled margin m that a loss of log(1 + exp(-m)) was made from."""
            return {"margin": -torch.log(torch.expm1(loss))}

        lab = dpo_loss(f64(given["logratio_chosen"]), f64(given["logratio_rejected"]), zero, zero, beta)
        scaled_already_wrong = dpo_loss(
            beta * f64(given["logratio_chosen"]), beta * f64(given["logratio_rejected"]), zero, zero, beta
        )
        self.assert_tells_apart(case, margin_in(lab), margin_in(scaled_already_wrong))

    def test_B66_chosen_and_rejected_keep_their_columns(self):
        case = CASES["B66"]
        margin, zero, beta = f64(case["inputs"]["margin"]), f64(0), case["inputs"]["beta"]

        def loss_and_accuracy(chosen: Tensor, rejected: Tensor) -> dict:
            prefers_chosen = preference_probability(beta * chosen, beta * rejected) > 0.5
            return {"loss": dpo_loss(chosen, rejected, zero, zero, beta), "accuracy": prefers_chosen.int()}

        lab, exchanged_wrong = loss_and_accuracy(margin, zero), loss_and_accuracy(zero, margin)
        self.assert_tells_apart(case, lab, exchanged_wrong)
        self.assert_recorded(exchanged_wrong["loss"] - lab["loss"], beta * margin.item(), "the difference named in the note")

    def test_B68_padding_stays_out_of_the_response_logp(self):
        case = CASES["B68"]
        given = case["inputs"]
        ids = prompt_and([1, 2, 3])
        names = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")

        def loss(masks: list[list]) -> dict:
            scores = [
                response_logps(logits_scoring(ids, given[name]), ids, flags([[0, *m]])) for name, m in zip(names, masks)
            ]
            return {"loss": dpo_loss(*scores, given["beta"])[0]}

        masks = [given["chosen_mask"], given["rejected_mask"]] * 2
        padding_summed_wrong = [[1] * len(mask) for mask in masks]
        self.assert_tells_apart(case, loss(masks), loss(padding_summed_wrong))


# ------------------------------------------------------------------------------------------ masked actions, zero loss, loops


class LoopsAndMetrics(KnownBugs):
    def test_B70_a_forbidden_action_has_no_entropy(self):
        case = CASES["B70"]
        logits = f64([case["inputs"]["logits"]])
        task = one_context_task([1, 0.2, -0.5])
        logp = logits.log_softmax(-1)
        zero_times_infinity_wrong = -(logp.exp() * logp).sum()
        metrics = evaluate(logits, logits, task)
        self.assert_tells_apart(case, {"entropy": metrics["entropy"]}, {"entropy": zero_times_infinity_wrong})
        with self.subTest("nor does it spoil a KL or its gradient"):
            # p = (1/2, 1/2, 0) against three equal actions: log(3/2).
            self.assert_recorded(metrics["kl_current_reference"], round(math.log(1.5), 6), "KL to uniform")
            self.assert_recorded(metrics["kl_old_current"], 0.0, "KL to itself")
            leaf = logits.clone().requires_grad_()
            gradient = torch.autograd.grad(categorical_kl(leaf, f64([[0.3, -0.2, 0.1]])).sum(), leaf)[0]
            self.assertTrue(gradient.isfinite().all())
            self.assertEqual(gradient[0, 2].item(), 0.0)

    def test_B71_a_loss_of_zero_says_nothing_its_gradient_does(self):
        case = CASES["B71"]
        given = case["inputs"]
        lab, twin = {}, {}
        for name in ("A", "B"):
            logits = f64(given["logits"]).requires_grad_()
            logp = action_logps(logits.expand(2, -1), torch.tensor(given["actions"]))
            advantages = f64(given[f"advantages_{name}"])
            loss = clipped_policy_loss(logp, logp, advantages).mean()
            norm = torch.autograd.grad(loss, logits)[0].norm()
            verdict = "no signal" if groups_without_spread(advantages) else "healthy"
            lab[name] = {"loss": loss, "grad_norm": norm, "verdict": verdict}
            from_the_loss_wrong = "broken" if loss == 0 else "healthy"
            twin[name] = {"loss": loss, "verdict": from_the_loss_wrong}
        self.assert_tells_apart(case, lab, twin)

    def test_B73_every_metric_of_a_step_is_in_the_row_of_that_step(self):
        case = CASES["B73"]
        steps = case["inputs"]["training_steps"]
        self.assertEqual(case["inputs"]["log_calls_per_step"], 2)
        run = train("grpo", steps=steps[-1])
        rows = list(csv.DictReader(io.StringIO(csv_text(run.history))))
        lab = {
            f"x_{name}": [int(row["step"]) for row in rows if row[column]]
            for name, column in (("loss", "loss"), ("reward", "expected_reward"))
        }
        twin, calls = {"x_loss": [], "x_reward": []}, 0
        for _ in steps:
            for name in twin:  # a logger that counts its own calls
                twin[name].append(calls)
                calls += 1
        self.assert_tells_apart(case, lab, twin)

    def test_B74_another_consumer_of_random_numbers_changes_nothing(self):
        case = CASES["B74"]
        given = case["inputs"]
        self.assertEqual(given["rng"], "numpy RandomState(0)")
        own, other = np.random.RandomState(0), np.random.RandomState(0)
        other.rand(given["extra_draws"])
        shared_wrong = np.random.RandomState(0)
        shared_wrong.rand(given["extra_draws"])
        orders = ({"order": rng.permutation(given["n"]).tolist()} for rng in (own, shared_wrong))
        self.assert_tells_apart(case, *orders)
        with self.subTest("a training beside a logger that draws from every global generator"):

            def drawing_logger(row: dict) -> None:
                torch.rand(1)
                np.random.rand()
                random.random()

            states = torch.get_rng_state(), np.random.get_state(), random.getstate()
            try:
                for algorithm in ("ppo", "dpo", "grpo"):
                    flips = {"preference_flips": 3} if algorithm == "dpo" else {}
                    quiet = train(algorithm, steps=3, **flips)
                    logged = train(algorithm, steps=3, on_step=drawing_logger, **flips)
                    self.assertEqual(csv_text(logged.history), csv_text(quiet.history))
                    self.assertEqual(logged.task.flipped_pair_indices, quiet.task.flipped_pair_indices)
            finally:
                torch.set_rng_state(states[0])
                np.random.set_state(states[1])
                random.setstate(states[2])


if __name__ == "__main__":
    unittest.main()
