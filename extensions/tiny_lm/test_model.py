"""The task and the transformer: prompts, verifiers, masks, positions, cache."""

from __future__ import annotations

import unittest

import torch

from extensions.tiny_lm.fixtures import prompts_of, random_policy, responses_of, seeded, stage_of
from extensions.tiny_lm.model import Decoder, Sequences, generate, join
from extensions.tiny_lm.task import (
    EOS,
    FAILURES,
    PAD,
    PROMPT_LENGTH,
    RESPONSE_LENGTH,
    SEPARATOR,
    VERIFIERS,
    VOCABULARY,
    Prompts,
    correct_responses,
    describe,
    draw_prompts,
    is_held_out,
    rewards,
    written,
)
from rl_lab import action_logps, response_token_logps
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)


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


if __name__ == "__main__":
    unittest.main()
