"""Each verdict on a line made for it; the relation of the first pass on a batch; key names of four trainers."""

from __future__ import annotations

import math
import unittest
from dataclasses import replace

import torch

from extensions.objectives import ROWS, evaluate, small_batch
from extensions.why import explain_records, first_pass_token_mean_loss, read_records
from extensions.why.reader import parse_line
from rl_lab import FileProblem
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)


def verdicts(text: str, **known) -> dict[str, str]:
    return {said.key: said.verdict for said in explain_records(read_records(text), **known)}


class Why(unittest.TestCase):
    def test_first_pass_loss_of_the_token_mean(self):
        """-Cov(A, T) / mean T = the engine's loss at ratio 1; plus beta * KL with a KL term."""
        batch, _ = small_batch()
        batch = replace(batch, logps=batch.old_logps)
        row = replace(ROWS["grpo"], kl="none", kl_coef=0.0, reduction="mean_over_tokens")
        result = evaluate(row, batch)
        advantages, lengths = result.advantages[:, 0], batch.lengths.double()
        covariance = ((advantages - advantages.mean()) * (lengths - lengths.mean())).mean()
        self.assertAlmostEqual(float(result.loss), float(-covariance / lengths.mean()), 9)
        self.assertAlmostEqual(float(result.loss), first_pass_token_mean_loss(advantages.tolist(), lengths.tolist()), 12)
        with_kl = evaluate(replace(row, kl="k3", kl_coef=0.04), batch)
        self.assertAlmostEqual(float(with_kl.loss), float(result.loss) + 0.04 * with_kl.kl_mean, 12)

    def test_verdicts(self):
        for text, key, wanted in (
            ("{'loss': 0.0, 'grad_norm': 0.1, 'reward_std': 0.3}", "loss", "fine"),
            ("{'loss': 0.0, 'grad_norm': 0.0, 'reward_std': 0.3}", "loss", "mistake"),
            ("{'loss': 0.0}", "loss", "cannot tell"),
            ("{'loss': nan}", "loss", "mistake"),
            ("{'reward_std': 0.0, 'rewards/a/std': 5.08, 'rewards/b/std': 5.08}", "reward_std", "mistake"),
            ("{'reward_std': 0.0}", "reward_std", "look"),
            ("{'completions/clipped_ratio': 1.0}", "completions/clipped_ratio", "mistake"),
            ("{'kl': -0.2}", "kl", "look"),
            ("\n".join(["{'kl': -0.2}"] * 5), "kl", "mistake"),
            ("{'loss': 0.6931, 'rewards/margins': 0.0}", "loss", "fine"),
            ("{'reward': 0.5}", "reward", "cannot tell"),
        ):
            self.assertEqual(verdicts(text)[key], wanted, text)
        line = "{'clip_ratio/region_mean': 0.0}"
        self.assertEqual([verdicts(line, updates=n)["clip_ratio/region_mean"] for n in (None, 1, 4)], ["cannot tell", "fine", "look"])
        self.assertEqual(verdicts("{'loss': 0.004, 'kl': 0.1}", beta=0.04)["loss"], "fine")

    def test_keys_of_four_trainers_and_formats(self):
        for text, key in (
            ("step:3 - actor/pg_loss:0.1 - actor/ppo_kl:0.001", "actor/ppo_kl"),
            ("{'policy_loss': 0.1, 'actor_grad_norm': 0.2}", "actor_grad_norm"),
            ("| train/approx_kl | 0.01 |\n| train/clip_fraction | 0.1 |", "train/clip_fraction"),
            ('{"kl": 0.1}\n{"kl": 0.2}', "kl"),
            ("step,reward,kl_current_reference\n0,0.1,0.0\n1,0.2,0.01\n", "kl_current_reference"),
        ):
            self.assertIn(key, verdicts(text), text)

    def test_a_row_of_a_table(self):
        for line, made in (
            ("| train/ | |", {}), ("|    approx_kl | 0.01 |", {"approx_kl": 0.01}), (" | loss | nan | ", {"loss": math.nan}),
            ("| loss | x |", {}), ("| a | b | 1 |", {}), ("x | loss | 1 |", {}), ("| -1 | 1e-3 |", {}), ("| fps | 1e3 |", {"fps": 1e3}),
        ):  # fmt: skip
            self.assertEqual(str(parse_line(line)), str(made), line)

    def test_hostile_input(self):
        for text in ("/no/such/file", "{" * 5000, "x" * 2_000_000, "{'a': __import__('os')}", ",\r ", "a,b\n" + "x" * 200_000):
            with self.assertRaises(FileProblem):
                explain_records(read_records(text))


    def test_a_number_of_many_digits_and_infinity(self):
        digits = "7" * 400
        self.assertEqual(read_records(f'{{"loss": {digits}, "kl": -{digits}}}'), [{"loss": math.inf, "kl": -math.inf}])
        self.assertEqual(read_records('{"loss": Infinity, "kl": -Infinity}'), [{"loss": math.inf, "kl": -math.inf}])


if __name__ == "__main__":
    unittest.main()
