"""The language-model extension: masks, cache, split and verifiers by hand; trainings by what they must and must not move."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import csv
import dataclasses
import io
import json
import math
import multiprocessing
import tempfile
import unittest
from functools import lru_cache
from pathlib import Path
from unittest import mock

import torch

import rl_lab
from extensions import tiny_lm
from extensions.objectives import ROWS, evaluate, loss_to_backpropagate, make_batch
from extensions.tiny_lm import METHODS, MISTAKES, TRAINABLE_ROWS, Stage, TinySettings, train
from extensions.tiny_lm_model import Decoder, Sequences, generate, join
from extensions.tiny_lm_task import (
    EOS,
    FAILURES,
    PAD,
    PROMPT_LENGTH,
    RESPONSE_LENGTH,
    SEPARATOR,
    VERIFIERS,
    VOCABULARY,
    Prompts,
    check,
    correct_responses,
    describe,
    digits_present,
    draw_prompts,
    is_held_out,
    rewards,
    written,
)
from rl_lab import action_logps, categorical_kl, clipped_policy_loss, group_advantages, response_token_logps
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)
from token_objectives import mean_per_response

SMALL = dict(
    evaluate_every=1000, evaluation_prompts=32, group_size=4, group_prompts=4, ppo_prompts=8, online_prompts=8,
    dpo_prompts=16, dpo_batch=8, critic_rounds=0,
)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_policy(seed: int = 0, outputs: int = VOCABULARY) -> Decoder:
    """A float64 policy that is far from uniform, so that a wrong mask shows."""
    policy = Decoder(outputs, seeded(seed)).double()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(5 if parameter.dim() == 2 else 1)
    return policy


@lru_cache
def supervised(seed: int) -> tiny_lm.TrainingRun:
    return train("sft", seed=seed, evaluate_every=1000, evaluation_prompts=400)


SEEDS = (7, 0, 19)


def start_and_rise(seed: int) -> tuple[dict, dict, dict]:
    """After the supervised start; before and after some rounds of GRPO from there."""
    start = supervised(seed)
    run = train("grpo", start.policy, seed=seed, steps=15, evaluate_every=15, evaluation_prompts=300)
    return start.history[-1], run.history[0], run.history[-1]


def prompts_of(*rows: list[int]) -> Prompts:
    """Prompts written out by hand, for example [3, 1, 3]."""
    ids = [[PAD] * (PROMPT_LENGTH - 1 - len(row)) + row + [SEPARATOR] for row in rows]
    masks = [[False] * (PROMPT_LENGTH - 1 - len(row)) + [True] * (len(row) + 1) for row in rows]
    return Prompts(torch.tensor(ids), torch.tensor(masks))


def responses_of(*rows: list[int]) -> torch.Tensor:
    return torch.tensor([row + [PAD] * (RESPONSE_LENGTH - len(row)) for row in rows])


def stage_of(algorithm: str, policy: Decoder, mistake: str | None = None, **settings: float) -> Stage:
    reference = copy.deepcopy(policy).requires_grad_(False)
    chosen = TinySettings(**{**SMALL, **settings})
    counts = dict.fromkeys(("optimizer_steps", "samples", "tokens", "pair_presentations"), 0)
    row = tiny_lm.objective_row(algorithm, None, chosen.kl)
    return Stage(algorithm, chosen, policy, reference, seeded(chosen.seed), "exact", None, row, mistake, counts)


def rounds_of(algorithm: str, mistake: str | None = None, row=None, **settings: float) -> tuple[list[dict], Stage]:
    """The reports of a few rounds from the supervised policy, without the measuring that train adds."""
    stage = stage_of(algorithm, copy.deepcopy(supervised(7).policy), mistake, learning_rate=1e-3, **settings)
    stage.row = row or stage.row
    with torch.random.fork_rng(devices=[]):
        return list(METHODS[algorithm].run(stage)), stage


class Task(unittest.TestCase):
    def test_right_answers_by_hand(self):
        # 5 3 5 1 -> 1 3 5 EOS; six different digits fill all seven places.
        answers = correct_responses(prompts_of([5, 3, 5, 1], [7, 7, 7], [9, 8, 0, 2, 1, 5]))
        self.assertEqual(answers.tolist(), responses_of([1, 3, 5], [7], [0, 1, 2, 5, 8, 9]).tolist())
        self.assertEqual(written(answers).sum(dim=1).tolist(), [4, 2, 7])

    def test_held_out_and_training_prompts_share_no_multiset_of_digits(self):
        def multisets(prompts: Prompts) -> set:
            return {tuple(sorted(i for i in row if i < 10)) for row in prompts.ids.tolist()}

        training, held_out = (multisets(draw_prompts(8_000, seeded(1), side)) for side in (False, True))
        self.assertEqual(training & held_out, set())
        self.assertGreater(len(training), 3000)
        self.assertGreater(len(held_out), 500)

    def test_all_orders_of_the_same_digits_are_on_one_side_and_padding_does_not_count(self):
        for digits in ([1, 2, 3], [4, 4, 9], [0, 5, 0]):
            orders = [[digits[i] for i in order] for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0))]
            self.assertEqual(len(set(is_held_out(prompts_of(*orders)).tolist())), 1)
        prompts = draw_prompts(200, seeded(1), False)
        other_padding = Prompts(torch.where(prompts.attention_mask, prompts.ids, 4), prompts.attention_mask)
        self.assertEqual(is_held_out(prompts).tolist(), is_held_out(other_padding).tolist())

    def test_one_prompt_in_eight_is_held_out_and_lengths_are_uniform(self):
        training, held_out = draw_prompts(8000, seeded(2), False), draw_prompts(1000, seeded(2), True)
        self.assertFalse(is_held_out(training).any())
        self.assertTrue(is_held_out(held_out).all())
        lengths = training.attention_mask.sum(dim=1) - 1
        shares = torch.bincount(lengths, minlength=7)[3:7] / len(lengths)
        self.assertTrue(((shares > 0.22) & (shares < 0.28)).all(), shares)

    # Answer to the prompt 3 1 3 5, whose right answer is 1 3 5: what fails, and which verifiers are content.
    TABLE = {
        "right": ([1, 3, 5, EOS], [], {"exact", "sorted-only", "subset", "non-empty", "public-tests"}),
        "wrong order": ([3, 1, 5, EOS], ["wrong order"], {"subset"}),
        "repeated": ([1, 3, 3, 5, EOS], ["repeated digit"], {"subset"}),
        "repeated apart": ([1, 3, 5, 3, EOS], ["wrong order", "repeated digit"], {"subset"}),
        "missing": ([1, 5, EOS], ["missing digit"], {"sorted-only", "subset", "non-empty"}),
        "extra": ([1, 3, 5, 8, EOS], ["digit not in the prompt"], {"sorted-only", "non-empty"}),
        "truncated": ([1, 3, 5, 5, 5, 5, 5], ["truncated", "repeated digit"], set()),
        "empty": ([EOS], ["empty", "missing digit"], {"sorted-only", "subset"}),
        "separator": ([1, SEPARATOR, 3, 5, EOS], ["separator in the answer"], set()),
        "text after EOS is padding": ([1, 3, EOS, 5, EOS], ["missing digit"], {"sorted-only", "subset", "non-empty"}),
    }

    def test_verifier_table(self):
        for name, (answer, failures, content) in self.TABLE.items():
            prompts, responses = prompts_of([3, 1, 3, 5]), responses_of(answer)
            passed = {verifier for verifier in VERIFIERS if rewards(verifier, prompts, responses).item() == 1}
            record = describe("exact", prompts, responses)[0]
            with self.subTest(name):
                self.assertEqual(record["failures"], failures)
                self.assertEqual(passed, content)
                self.assertEqual(record["exact"], not failures)
                self.assertEqual(record["reward"], float(not failures))

    def test_six_digits_and_eos_fit_and_rows_do_not_mix(self):
        prompts = prompts_of([0, 1, 2, 3, 4, 5], [3, 1, 3, 5])
        full = responses_of([0, 1, 2, 3, 4, 5, EOS], [1, 3, 5, EOS])
        self.assertEqual(rewards("exact", prompts, full).tolist(), [1, 1])
        self.assertEqual(rewards("exact", prompts, full.flip(0)).tolist(), [0, 0])

    def test_record_keeps_raw_answer_beside_its_parse(self):
        record = describe("subset", prompts_of([3, 1, 3, 5]), responses_of([1, SEPARATOR, 3, EOS]))[0]
        self.assertEqual((record["prompt"], record["answer"]), ("3 1 3 5 =", "1 = 3 <eos>"))
        self.assertEqual((record["parsed_digits"], record["wanted_digits"]), ([1, 3], [1, 3, 5]))
        self.assertEqual({FAILURES[name] for name, holds in record["parts"].items() if not holds}, set(record["failures"]))


class Model(unittest.TestCase):
    def test_about_a_hundred_thousand_parameters_in_float32(self):
        policy = Decoder(VOCABULARY, seeded(0))
        self.assertEqual(sum(parameter.numel() for parameter in policy.parameters()), 102_540)
        self.assertEqual({parameter.dtype for parameter in policy.parameters()}, {torch.float32})

    def test_cached_generation_equals_the_full_forward_pass_token_for_token(self):
        policy, prompts = random_policy(), draw_prompts(64, seeded(3), False)
        for greedy in (False, True):
            responses, token_logps = generate(policy, prompts, None if greedy else seeded(4))
            generator = seeded(4)
            ids, mask, running = prompts.ids, prompts.attention_mask, torch.ones(64, dtype=torch.bool)
            for t in range(RESPONSE_LENGTH):
                with torch.no_grad():
                    logits = policy(ids, mask)[:, -1]
                sampled = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(1)
                token = (logits.argmax(dim=-1) if greedy else sampled).masked_fill(~running, PAD)
                self.assertEqual(token.tolist(), responses[:, t].tolist())
                expected = torch.where(running, action_logps(logits, token), 0.0)
                torch.testing.assert_close(token_logps[:, t], expected, atol=1e-10, rtol=0)
                running = running & (token != EOS)
                ids, mask = torch.cat([ids, token.unsqueeze(1)], dim=1), torch.cat([mask, running.unsqueeze(1)], dim=1)
            self.assertGreater(len(set(written(responses).sum(dim=1).tolist())), 2)  # lengths vary, or this tested little

    def test_training_pass_scores_what_generation_recorded(self):
        policy, prompts = random_policy(), draw_prompts(64, seeded(5), False)
        responses, token_logps = generate(policy, prompts, seeded(6))
        scored = stage_of("grpo", policy).score(policy, join(prompts, responses))
        torch.testing.assert_close(scored.logps.detach(), token_logps, atol=1e-10, rtol=0)
        self.assertEqual(scored.counted.tolist(), written(responses).tolist())
        broken = stage_of("grpo", policy, "ignore-left-padding").score(policy, join(prompts, responses))
        self.assertGreater((broken.logps - token_logps).abs().max().item(), 0.1)

    def test_left_padding_leaves_log_probabilities_unchanged(self):
        policy, response = random_policy(), [1, 2, 4, EOS]
        padded = join(prompts_of([4, 1, 2]), responses_of(response))
        bare_ids = torch.tensor([[4, 1, 2, SEPARATOR, *response]])
        bare = Sequences(bare_ids, torch.ones_like(bare_ids).bool(), torch.arange(8).unsqueeze(0) >= 4)

        def logps(sequences: Sequences, attention_mask: torch.Tensor) -> list[float]:
            scores, valid = response_token_logps(
                policy(sequences.input_ids, attention_mask), sequences.input_ids, sequences.response_mask
            )
            return scores[valid]

        expected = logps(bare, bare.attention_mask)
        torch.testing.assert_close(logps(padded, padded.attention_mask), expected, atol=1e-12, rtol=0)
        other = padded._replace(input_ids=torch.where(padded.attention_mask, padded.input_ids, 6))
        torch.testing.assert_close(logps(other, padded.attention_mask), expected, atol=1e-12, rtol=0)
        ignored = logps(padded, torch.ones_like(padded.attention_mask))
        self.assertGreater((ignored - expected).abs().max().item(), 0.1)

    def test_no_token_sees_a_later_one(self):
        policy, sequences = random_policy(), join(prompts_of([4, 1, 2]), responses_of([1, 2, 4, EOS]))
        changed = sequences.input_ids.clone()
        changed[0, PROMPT_LENGTH + 2] = 9
        before, after = (policy(ids, sequences.attention_mask) for ids in (sequences.input_ids, changed))
        torch.testing.assert_close(before[:, : PROMPT_LENGTH + 2], after[:, : PROMPT_LENGTH + 2], atol=0, rtol=0)
        self.assertFalse(torch.equal(before[:, PROMPT_LENGTH + 2], after[:, PROMPT_LENGTH + 2]))

    def test_loss_mask_against_attention_mask(self):
        # positions 0-6: three times PAD, digits, separator; 7-13: answer 1 2 EOS, then padding with EOS's id
        sequences = join(prompts_of([2, 1, 2]), responses_of([1, 2, EOS, EOS]))
        read, counted = sequences.attention_mask[0].tolist(), sequences.response_mask[0].tolist()
        self.assertEqual(read, [False] * 3 + [True] * 4 + [True] * 3 + [False] * 4)
        self.assertEqual(counted, [False] * 7 + [True] * 3 + [False] * 4)
        _, by_id = stage_of("grpo", random_policy(), "pad-mask").masks(sequences)
        self.assertEqual(by_id[0].tolist(), [False] * 7 + [True] * 2 + [False] * 5)  # the mistake drops the real EOS
        only_eos = join(prompts_of([2, 1, 2]), responses_of([EOS]))
        self.assertEqual(stage_of("grpo", random_policy(), "pad-mask").masks(only_eos)[1].sum().item(), 1)

    def test_prompt_and_padding_get_no_gradient_of_the_loss_but_the_prompt_is_read(self):
        policy = random_policy()
        sequences = join(prompts_of([4, 1, 2]), responses_of([1, 2, 4, EOS]))
        logits = policy(sequences.input_ids, sequences.attention_mask)
        logps, _ = response_token_logps(logits, sequences.input_ids, sequences.response_mask)
        (slope,) = torch.autograd.grad(logps.sum(), logits, retain_graph=True)
        scored = [t for t in range(14) if slope[0, t].abs().sum() > 0]
        self.assertEqual(scored, [6, 7, 8, 9])  # separator predicts the first answer token; the last digit predicts EOS
        (embedding,) = torch.autograd.grad(logps.sum(), policy.position_embedding.weight)
        self.assertTrue((embedding[:4].abs().sum(dim=1) > 0).all())  # the four prompt positions matter

    def test_building_a_model_moves_no_global_random_state(self):
        before = torch.random.get_rng_state()
        weights = [Decoder(VOCABULARY, seeded(3)).output.weight for _ in range(2)]
        self.assertTrue(torch.equal(*weights))
        self.assertTrue(torch.equal(before, torch.random.get_rng_state()))


class Losses(unittest.TestCase):
    @staticmethod
    def token_advantages(rewards, old, ref, values, counted, **settings) -> tuple[torch.Tensor, torch.Tensor]:
        answers = tiny_lm.Answers(None, old, rewards, None)
        reference = tiny_lm.Scored(None, ref, counted)
        return tiny_lm.token_advantages(TinySettings(**settings), answers, reference, values)

    def test_token_rewards_and_gae_by_hand(self):
        counted = torch.tensor([[True, True, True, False], [True, False, False, False]])
        old = torch.tensor([[-1.0, -0.5, -0.2, 0.0], [-2.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
        ref = torch.tensor([[-1.5, -0.5, -0.4, 0.0], [-1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
        rewards = torch.tensor([1.0, 0.0], dtype=torch.float64)
        values = torch.tensor([[0.5, 0.6, 0.7, 9.0], [0.2, 9.0, 9.0, 9.0]], dtype=torch.float64)
        advantages, returns = self.token_advantages(rewards, old, ref, values, counted, kl=0.1, gae_lambda=0.5)
        # Rewards -0.1 * (old - ref): -0.05, 0, -0.02, and +1 at the last token; second row 0.1.
        # delta_2 = 0.98 - 0.7 = 0.28; delta_1 = 0 + 0.7 - 0.6 = 0.1; delta_0 = -0.05 + 0.6 - 0.5 = 0.05
        # A_2 = 0.28; A_1 = 0.1 + 0.5 * 0.28 = 0.24; A_0 = 0.05 + 0.5 * 0.24 = 0.17. Second row 0.1 - 0.2 = -0.1
        expected = torch.tensor([[0.17, 0.24, 0.28, 0.0], [-0.1, 0.0, 0.0, 0.0]], dtype=torch.float64)
        torch.testing.assert_close(advantages, expected)
        torch.testing.assert_close(returns, (expected + values).masked_fill(~counted, 0.0))

    def test_the_reward_of_an_answer_is_paid_once_whatever_its_length(self):
        counted = torch.arange(RESPONSE_LENGTH) < torch.arange(1, RESPONSE_LENGTH + 1).unsqueeze(1)
        zero = torch.zeros(counted.shape)
        # Without a critic and with lambda 0 the advantage of a token is its own reward.
        paid, _ = self.token_advantages(torch.ones(RESPONSE_LENGTH), zero, zero, zero, counted, gae_lambda=0.0)
        self.assertEqual(paid.tolist(), torch.eye(RESPONSE_LENGTH).tolist())

    def test_grpo_through_its_row_equals_the_atoms_in_loss_and_parameter_gradient(self):
        policy, old, reference = random_policy(1), random_policy(2), random_policy(3)
        stage = stage_of("grpo", policy)
        prompts = draw_prompts(3, seeded(7), False).repeat(4)
        sequences = join(prompts, generate(old, prompts, seeded(8))[0])
        reward = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 1, 0], dtype=torch.float64)
        scored = stage.score(policy, sequences)
        with torch.no_grad():
            old_logps, reference_pass = stage.score(old, sequences).logps, stage.score(reference, sequences)
        row = tiny_lm.objective_row("grpo", None, 0.05)
        batch = make_batch(
            logps=scored.logps.detach(), old_logps=old_logps, ref_logps=reference_pass.logps, mask=scored.counted,
            rewards=reward, group_ids=torch.arange(3).repeat_interleave(4),
            logits=scored.logits.detach(), ref_logits=reference_pass.logits,
        )
        through_row = loss_to_backpropagate(evaluate(row, batch), scored.logps, logits=scored.logits)
        advantages = group_advantages(reward.view(3, 4)).view(12, 1).expand_as(scored.logps)
        kl = categorical_kl(scored.logits, reference_pass.logits)
        by_atoms = mean_per_response(clipped_policy_loss(scored.logps, old_logps, advantages) + 0.05 * kl, scored.counted)
        torch.testing.assert_close(through_row, by_atoms)
        parameters = list(policy.parameters())
        both = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in (through_row, by_atoms)]
        for got, wanted in zip(*both):
            torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-8)
        self.assertGreater(max(gradient.abs().max().item() for gradient in both[1]), 1e-3)

    def test_pairs_share_their_prompt_and_differ_in_reward(self):
        stage = stage_of("dpo", copy.deepcopy(supervised(7).policy), group_size=8)
        pairs, _ = tiny_lm.make_pairs(stage, 64)
        prompts = [Prompts(side.input_ids[:, :PROMPT_LENGTH], side.attention_mask[:, :PROMPT_LENGTH]) for side in pairs[:2]]
        self.assertTrue(torch.equal(prompts[0].ids, prompts[1].ids))
        self.assertGreater(len(prompts[0].ids), 20)
        for side, prompt, reward in zip(pairs, prompts, (1.0, 0.0)):
            self.assertEqual(set(rewards("exact", prompt, side.input_ids[:, PROMPT_LENGTH:]).tolist()), {reward})

    def test_a_group_answers_one_prompt_and_its_cached_scores_are_its_own(self):
        stage = stage_of("grpo", random_policy(), group_size=3)
        answers = stage.answer(5, 3)
        prompts = answers.sequences.input_ids[:, :PROMPT_LENGTH]
        self.assertEqual(torch.bincount(answers.group_ids).tolist(), [3] * 5)
        for group in range(5):
            self.assertEqual(len(prompts[answers.group_ids == group].unique(dim=0)), 1)
        self.assertEqual(len(prompts.unique(dim=0)), 5)
        rescored = stage.score(stage.policy, answers.sequences).logps.detach()
        torch.testing.assert_close(answers.old_logps, rescored, atol=1e-10, rtol=0)

    def test_first_dpo_loss_is_log_2(self):
        for algorithm in ("dpo", "online-dpo"):
            reports, _ = rounds_of(algorithm, dpo_prompts=64, group_size=8, steps=1)
            self.assertAlmostEqual(reports[0]["loss"], math.log(2), places=5)
            self.assertAlmostEqual(reports[0]["chosen_log_ratio"], 0, places=4)

    def test_explained_variance(self):
        returns = torch.tensor([1.0, 2.0, 3.0])
        self.assertEqual(tiny_lm.explained_variance(returns, returns), 1.0)
        self.assertEqual(tiny_lm.explained_variance(torch.zeros(3), returns), 0.0)
        self.assertLess(tiny_lm.explained_variance(-returns, returns), 0.0)
        self.assertTrue(math.isnan(tiny_lm.explained_variance(returns, torch.ones(3))))


class Measuring(unittest.TestCase):
    def test_kl_entropy_and_length_by_the_definition(self):
        policy, old, reference = (random_policy(seed) for seed in (1, 2, 3))
        stage, held_out = stage_of("grpo", policy), draw_prompts(12, seeded(9), True)
        measured = tiny_lm.measure(policy, old, reference, stage, held_out)
        answers, _ = generate(policy, held_out, seeded(stage.settings.seed + 1))
        kl_reference = kl_old = entropy = tokens = 0.0
        for row in range(12):
            ids = held_out.ids[row][held_out.attention_mask[row]].tolist()
            for token in answers[row][written(answers)[row]].tolist():
                context = torch.tensor([ids])
                with torch.no_grad():
                    p, q_old, q_ref = (
                        model(context, torch.ones_like(context).bool())[0, -1].softmax(dim=-1).tolist()
                        for model in (policy, old, reference)
                    )
                kl_reference += sum(a * math.log(a / b) for a, b in zip(p, q_ref)) / 12
                kl_old += sum(b * math.log(b / a) for a, b in zip(p, q_old)) / 12
                entropy -= sum(a * math.log(a) for a in p)
                tokens += 1
                ids.append(token)
        self.assertAlmostEqual(measured["kl_current_reference"], kl_reference, places=6)
        self.assertAlmostEqual(measured["kl_old_current"], kl_old, places=6)
        self.assertAlmostEqual(measured["entropy"], entropy / tokens, places=6)
        self.assertAlmostEqual(measured["response_length"], tokens / 12, places=6)

    def test_measuring_moves_neither_policy_nor_the_trainings_random_numbers(self):
        policy = random_policy()
        stage = stage_of("grpo", policy, "dropout")
        before, state = copy.deepcopy(policy.state_dict()), stage.generator.get_state()
        rows = [tiny_lm.measure(policy, policy, policy, stage, draw_prompts(8, seeded(1), True)) for _ in range(2)]
        self.assertEqual(*rows)
        self.assertEqual(rows[0]["kl_current_reference"], rows[0]["kl_old_current"])
        self.assertTrue(torch.equal(state, stage.generator.get_state()))
        self.assertTrue(all(torch.equal(before[name], weight) for name, weight in policy.state_dict().items()))


class Training(unittest.TestCase):
    def test_learning_rate_falls_linearly(self):
        stage = stage_of("rloo", random_policy(), steps=9, learning_rate=1.0)
        optimizer = rl_lab.Adam([torch.zeros(1)], 0.0)
        rates = [optimizer.lr for _ in stage.rounds(optimizer)]
        # from 1, by (1 - 0.1) / 9 = 0.1 a round
        torch.testing.assert_close(torch.tensor(rates), torch.linspace(1.0, 0.2, 9))

    def test_start_is_half_right_and_then_reward_and_held_out_accuracy_rise_over_seeds(self):
        with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as two_at_a_time:
            for seed, (start, first, last) in zip(SEEDS, two_at_a_time.map(start_and_rise, SEEDS)):
                with self.subTest(seed=seed):
                    self.assertTrue(0.40 <= start["sampled_accuracy"] <= 0.62, start["sampled_accuracy"])
                    self.assertGreater(start["greedy_accuracy"], start["sampled_accuracy"])
                    self.assertGreater(last["reward"], first["reward"] + 0.08)
                    self.assertGreater(last["sampled_accuracy"], first["sampled_accuracy"] + 0.08)
                    self.assertLess(last["entropy"], first["entropy"])

    def test_every_method_runs_counts_and_leaves_start_and_reference_alone(self):
        start = supervised(7).policy
        before = copy.deepcopy(start.state_dict())
        state, threads = torch.random.get_rng_state(), torch.get_num_threads()
        for algorithm in METHODS:
            # Two updates: the first starts at the reference, where a KL gradient would be zero.
            run = train(algorithm, start, **SMALL, steps=2)
            with self.subTest(algorithm):
                self.assertEqual(tuple(run.history[0]), tiny_lm.columns_of(algorithm))
                self.assertEqual([row["step"] for row in run.history], [0, 2])
                self.assertFalse(any(parameter.requires_grad for parameter in run.reference.parameters()))
                for name, weight in before.items():
                    self.assertTrue(torch.equal(start.state_dict()[name], weight), name)
                    self.assertTrue(torch.equal(run.reference.state_dict()[name], weight), name)
                self.assertFalse(torch.equal(run.policy.output.weight, start.output.weight))
                last = run.history[-1]
                self.assertGreater(last["kl_current_reference"], 0)
                self.assertEqual(run.history[0]["kl_current_reference"], 0)
                answers = {"sft": 0, "ppo": 2 * 8, "dpo": 16 * 4, "online-dpo": 2 * 32, "grpo": 2 * 16, "rloo": 2 * 16}
                updates = {"ppo": 8, "grpo": 4}  # two rounds of two passes; PPO moves actor and critic in each
                self.assertEqual(last["samples"], answers[algorithm])
                self.assertEqual(last["optimizer_steps"], updates.get(algorithm, 2))
        self.assertTrue(torch.equal(state, torch.random.get_rng_state()))
        self.assertEqual(threads, torch.get_num_threads())

    def test_own_number_of_rounds(self):
        self.assertEqual(tiny_lm.own_steps("grpo", "exact"), METHODS["grpo"].steps)
        self.assertEqual(tiny_lm.own_steps("grpo", "public-tests"), METHODS["grpo"].steps)  # forgets nothing
        self.assertEqual(tiny_lm.own_steps("grpo", "subset"), METHODS["grpo"].steps // 2)
        steps = dict.fromkeys(METHODS, 4) | {"rloo": 6}
        with mock.patch.dict(METHODS, {name: method._replace(steps=steps[name]) for name, method in METHODS.items()}):
            for verifier, last in (("exact", 6), ("non-empty", 3)):
                run = train("rloo", random_policy(), verifier=verifier, **SMALL)
                self.assertEqual((run.settings.steps, run.history[-1]["step"]), (last, last))

    def test_columns_begin_as_the_plots_expect(self):
        fixed = (
            "step sampled_accuracy greedy_accuracy reward kl_current_reference kl_old_current entropy response_length "
            "truncated_fraction"
        )
        for algorithm in METHODS:
            self.assertEqual(" ".join(tiny_lm.columns_of(algorithm)[:9]), fixed)

    def test_old_log_probabilities_equal_the_current_ones_on_the_first_pass(self):
        for algorithm in ("ppo", "grpo", "rloo"):
            # Also in later rounds, when the policy has moved: the cache must be of the policy that sampled.
            for report in rounds_of(algorithm, steps=3)[0]:
                self.assertLess(report["first_pass_ratio_error"], 1e-5, algorithm)
            for mistake in ("dropout", "ignore-left-padding"):
                for report in rounds_of(algorithm, mistake, steps=2)[0]:
                    self.assertGreater(report["first_pass_ratio_error"], 1e-2, (algorithm, mistake))

    def test_recomputed_old_log_probabilities_hide_the_ratio(self):
        def clip_fraction(**extra) -> float:
            return rounds_of("grpo", **extra, group_size=8, passes=8, steps=1)[0][0]["clip_fraction"]

        self.assertGreater(clip_fraction(), 0.05)
        self.assertEqual(clip_fraction(mistake="recompute-old"), 0.0)

    def test_loss_by_token_id_never_learns_to_stop(self):
        run = train("sft", seed=7, mistake="pad-mask", evaluate_every=1000, evaluation_prompts=200)
        self.assertGreater(run.history[-1]["truncated_fraction"], 0.8)
        self.assertLess(run.history[-1]["sampled_accuracy"], 0.1)
        self.assertLess(supervised(7).history[-1]["truncated_fraction"], 0.15)

    def test_cold_samples_look_better_than_the_policy_is(self):
        (cold,), (warm,) = (
            rounds_of("grpo", mistake, group_prompts=32, group_size=8, steps=1)[0] for mistake in ("sample-cold", None)
        )
        self.assertGreater(cold["batch_reward"], warm["batch_reward"] + 0.1)
        self.assertGreater(cold["zero_group_fraction"], warm["zero_group_fraction"])

    def test_weak_verifier_is_satisfied_while_the_task_is_lost(self):
        settings = dict(steps=15, evaluate_every=1000, evaluation_prompts=200, kl=0.0, learning_rate=2e-3)
        last = train("grpo", supervised(7).policy, verifier="sorted-only", **settings).history[-1]
        self.assertGreater(last["reward"], 0.95)
        self.assertLess(last["sampled_accuracy"], 0.1)

    def test_public_tests_are_few_fixed_and_from_the_training_side(self):
        seen = []
        draw = Stage.draw

        def spy(stage: Stage, count: int) -> Prompts:
            seen.append(draw(stage, count))
            return seen[-1]

        with mock.patch.object(Stage, "draw", spy):
            train("grpo", supervised(7).policy, verifier="public-tests", public_tests=3, **SMALL, steps=4)
        ids = torch.cat([prompts.ids for prompts in seen])
        self.assertEqual(len(ids.unique(dim=0)), 3)
        self.assertFalse(any(is_held_out(prompts).any() for prompts in seen))

    def test_every_row_that_needs_no_critic_trains(self):
        self.assertGreater(len(TRAINABLE_ROWS), 30)
        self.assertNotIn("ppo", TRAINABLE_ROWS)
        start = supervised(7).policy
        for name in TRAINABLE_ROWS:
            row = tiny_lm.objective_row("grpo", name, None)
            reports, stage = rounds_of("grpo", row=row, group_size=2, group_prompts=8, steps=1)
            with self.subTest(name):
                self.assertEqual(row, ROWS[name])
                self.assertTrue(math.isfinite(reports[0]["loss"]))
                self.assertGreater(reports[0]["gradient_norm"], 0)
                self.assertFalse(torch.equal(stage.policy.output.weight, start.output.weight))

    def test_the_weight_of_a_rows_own_kl_can_be_set(self):
        self.assertEqual(tiny_lm.objective_row("grpo", "grpo", 0.3), dataclasses.replace(ROWS["grpo"], kl_coef=0.3))
        self.assertEqual(tiny_lm.objective_row("rloo", None, 0.3), dataclasses.replace(ROWS["rloo"], kl_coef=0.3))
        self.assertEqual(tiny_lm.objective_row("grpo", None, 0.3).kl, "exact")

    def test_a_filter_that_leaves_no_group_skips_the_round(self):
        always_right = dict(verifier="public-tests", objective="dapo", public_tests=1)
        with mock.patch.object(tiny_lm, "rewards", lambda verifier, prompts, responses: torch.ones(len(responses))):
            run = train("grpo", supervised(7).policy, **always_right, **SMALL, steps=2)
        self.assertEqual(run.history[-1]["optimizer_steps"], 0)

    def test_same_seed_same_numbers_other_seed_others(self):
        def numbers(seed: int) -> list:
            history = train("ppo", supervised(7).policy, **SMALL, steps=3, seed=seed).history
            return [repr({name: value for name, value in row.items() if name != "seconds"}) for row in history]

        self.assertEqual(numbers(5), numbers(5))
        self.assertNotEqual(numbers(5), numbers(6))

    def test_refusals_name_the_argument(self):
        start = supervised(7).policy
        for wanted, arguments in (
            ("algorithm: got 'pp'", dict(algorithm="pp")),
            ("verifier: got 'weak'", dict(verifier="weak")),
            ("objective: got 'ppo'", dict(objective="ppo")),
            ("objective: dapo trains in the loop of grpo", dict(algorithm="ppo", objective="dapo")),
            ("mistake: recompute-old makes no difference to dpo", dict(algorithm="dpo", mistake="recompute-old")),
            ("kl: the objective dr_grpo has no KL term", dict(objective="dr_grpo", kl=0.1)),
            ("group_size: got 1", dict(group_size=1)),
            ("start: grpo needs a supervised policy", dict(start=None)),
        ):
            with self.assertRaisesRegex(ValueError, wanted.replace("(", r"\(")):
                train(**{"algorithm": "grpo", "start": start, **arguments})


def run_main(*arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            tiny_lm.main(list(arguments))
            status = 0
        except SystemExit as end:
            status = end.code
    return status, out.getvalue(), err.getvalue()


QUICK = ("--evaluation-prompts", "20", "--steps", "2", "--group-prompts", "2", "--group-size", "2", "--evaluate-every", "1")


class CommandLine(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.output = Path(folder.name)

    def test_bad_flags_exit_2_with_one_line(self):
        for wanted, arguments in (
            ("--algorithm", ["--algorithm", "pg"]),
            ("--group-size: got '1'", ["--group-size", "1"]),
            ("--kl: got '-1'", ["--kl", "-1"]),
            ("--steps: got '2.5'", ["--steps", "2.5"]),
            ("--objective: got 'grpp'", ["--algorithm", "grpo", "--objective", "grpp"]),
            ("--objective: dapo trains", ["--algorithm", "ppo", "--objective", "dapo"]),
            ("--objective: name one --algorithm", ["--objective", "dapo"]),
            ("--mistake: name one --algorithm", ["--mistake", "dropout"]),
            ("--mistake: dropout makes no difference to sft", ["--algorithm", "sft", "--mistake", "dropout"]),
            ("--public-tests: the verifier exact has none", ["--algorithm", "grpo", "--public-tests", "4"]),
            ("--verifier: sft learns from right answers", ["--algorithm", "sft", "--verifier", "subset"]),
            ("--kl: the objective dr_grpo", ["--algorithm", "grpo", "--objective", "dr_grpo", "--kl", "0.1"]),
            ("unrecognized arguments", ["--seeed", "7"]),
        ):
            status, out, err = run_main("--output", str(self.output), *arguments)
            with self.subTest(wanted):
                self.assertEqual((status, out, err.count("\n")), (2, "", 1))
                self.assertIn(wanted, err)
        self.assertEqual(list(self.output.iterdir()), [])

    def test_files_of_a_run_can_be_read_back(self):
        status, out, _ = run_main("--algorithm", "grpo", "--output", str(self.output), "--demonstrations", "8", *QUICK)
        self.assertEqual(status, 0)
        self.assertIn("sampled accuracy", out)
        self.assertEqual(
            sorted(path.name for path in self.output.iterdir()), ["grpo-samples.jsonl", "grpo.csv", "grpo.json"]
        )
        with open(self.output / "grpo.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual([row["step"] for row in rows], ["0", "1", "2"])
        self.assertTrue(all(math.isfinite(float(row["sampled_accuracy"])) for row in rows))
        document = json.loads((self.output / "grpo.json").read_text())
        self.assertEqual((document["config"]["steps"], document["config"]["kl"]), (2, 0.005))
        self.assertEqual(document["objective"]["name"], "grpo")
        records = [json.loads(line) for line in (self.output / "grpo-samples.jsonl").read_text().splitlines()]
        self.assertEqual({(record["moment"], record["split"]) for record in records},
                         {(moment, split) for moment in ("before", "after") for split in ("held-out", "training")})

    def test_an_interrupted_run_leaves_the_old_files(self):
        names = [path.name for path in tiny_lm.paths_of(self.output, "grpo").values()]
        for name in names:
            (self.output / name).write_text("old")
        update, calls = Stage.update, []

        def interrupted(stage: Stage, *arguments) -> float:
            calls.append(stage.algorithm)
            if calls.count("grpo") == 3:
                raise KeyboardInterrupt
            return update(stage, *arguments)

        with mock.patch.object(Stage, "update", interrupted), self.assertRaises(KeyboardInterrupt):
            tiny_lm.main(["--algorithm", "grpo", "--output", str(self.output), "--demonstrations", "8", *QUICK])
        self.assertEqual(calls.count("grpo"), 3)
        self.assertEqual(sorted(path.name for path in self.output.iterdir()), sorted(names))
        self.assertEqual({path.read_text() for path in self.output.iterdir()}, {"old"})

    def test_help_names_every_verifier_and_mistake(self):
        status, out, _ = run_main("--help")
        self.assertEqual(status, 0)
        for name in (*VERIFIERS, *MISTAKES):
            self.assertIn(name, out)

    def test_remarks_are_those_of_the_run(self):
        before = {"reward": 0.9, "sampled_accuracy": 0.5, "greedy_accuracy": 0.8}

        def remarks(algorithm="grpo", steps=60, **after) -> str:
            settings = TinySettings(steps=steps)
            run = tiny_lm.TrainingRun(algorithm, "subset", None, settings, None, [before, before | after], [], None, None)
            return "\n".join(tiny_lm.remarks(run))

        self.assertIn("learned what is checked", remarks(reward=1.0, sampled_accuracy=0.1))
        self.assertEqual(remarks(), "")  # the gap was there before: nothing was learned
        self.assertEqual(remarks(reward=1.0, sampled_accuracy=0.55), "")
        self.assertIn("12 pairs learned by heart", remarks("dpo", pair_accuracy=1.0, greedy_accuracy=0.2, pairs=12))
        self.assertEqual(remarks("dpo", pair_accuracy=1.0, greedy_accuracy=0.9, pairs=12), "")
        self.assertIn("the policy never moved", remarks("ppo", steps=10))
        self.assertEqual(remarks("ppo", steps=11), "")


if __name__ == "__main__":
    unittest.main()
