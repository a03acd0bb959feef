"""The six trainings: their losses, what is measured, what they reach, what each well-known mistake does."""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import math
import multiprocessing
import unittest
from unittest import mock

import torch

import rl_lab
from extensions import tiny_lm
from extensions.objectives import ROWS, evaluate, loss_to_backpropagate, make_batch
from extensions.tiny_lm import METHODS, TRAINABLE_ROWS, Stage, TinySettings, train
from extensions.tiny_lm import stage as stage_module
from extensions.tiny_lm.fixtures import SEEDS, SMALL, random_policy, rounds_of, seeded, stage_of, start_and_rise, supervised
from extensions.tiny_lm.model import generate, join
from extensions.tiny_lm.task import PROMPT_LENGTH, RESPONSE_LENGTH, Prompts, draw_prompts, is_held_out, rewards, written
from rl_lab import categorical_kl, clipped_policy_loss, group_advantages
from token_objectives import mean_per_response
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)


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
        with mock.patch.object(stage_module, "rewards", lambda verifier, prompts, responses: torch.ones(len(responses))):
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


if __name__ == "__main__":
    unittest.main()
