"""Training on two ranks is training on one process: the same answers, and the same parameters up to rounding."""

from __future__ import annotations

import copy
import unittest
from types import SimpleNamespace

import torch

from extensions.distributed.testing import run
from extensions.tiny_lm import train
from extensions.tiny_lm import fixtures_ranks as fixtures
from extensions.tiny_lm.fixtures import SMALL, supervised

DOUBLE, SINGLE = 1e-12, 1e-6  # float64 and float32, after at most 20 updates of Adam


def without_key_bias(name: str, value: torch.Tensor) -> torch.Tensor:
    """A bias of the keys adds q.b to every score of a query, which softmax does not see: its gradient is 0 in exact numbers.

    Adam divides the rounding that is left by itself and walks at full speed in a direction that means nothing.
    """
    if not name.endswith("query_key_value.bias"):
        return value
    third = len(value) // 3
    return torch.cat([value[:third], value[2 * third :]])


def distance(one: dict, other: dict) -> float:
    return max((without_key_bias(n, one[n]) - without_key_bias(n, other[n])).abs().max().item() for n in one)


class Ranks(unittest.TestCase):
    def compare(self, start, trainings, tolerance, objective=None):
        of_ranks = run(fixtures.trained, start, trainings, objective)
        for number, (name, steps) in enumerate(trainings):
            parameters, history = fixtures.outcome(copy.deepcopy(start), name, steps, objective)
            for rank in range(2):
                got, of_rank = of_ranks[rank][number]
                self.assertLess(distance(parameters, got), tolerance, f"{name}, rank {rank} of 2, {steps} rounds")
                for column in ("samples", "tokens", "optimizer_steps", "response_length", "sampled_accuracy"):
                    self.assertEqual(of_rank[-1][column], history[-1][column], f"{name}: other answers: {column}")

    def test_float64(self):
        start = copy.deepcopy(supervised(7).policy).double()
        self.compare(start, [("grpo", 10), ("ppo", 3), ("dpo", 6), ("online-dpo", 2), ("rloo", 2), ("sft", 1)], DOUBLE)

    def test_a_row_that_looks_at_the_whole_batch(self):
        # The 20 % of tokens with the largest entropy, of all ranks.
        self.compare(copy.deepcopy(supervised(7).policy).double(), [("grpo", 3)], DOUBLE, "top_entropy")

    def test_float32(self):
        self.compare(supervised(7).policy, [("grpo", 10)], SINGLE)

    def test_ranks_draw_the_tokens_of_one_process(self):
        probabilities = torch.rand(12, 5, generator=torch.Generator().manual_seed(2)).softmax(dim=-1)
        wanted = torch.multinomial(probabilities, 1, generator=torch.Generator().manual_seed(3)).squeeze(1)
        for unit in (1, 3, 4):
            for got in run(fixtures.drawn, probabilities, unit)[:2]:
                self.assertEqual(got.tolist(), wanted.tolist(), f"groups of {unit} on two ranks")

    def test_more_ranks_than_prompts_and_noise_that_depends_on_the_split(self):
        many = SimpleNamespace(ranks=5)
        with self.assertRaisesRegex(ValueError, "group-prompts: got 4 for 5 ranks, wanted at least one for each"):
            train("grpo", supervised(7).policy, rank=many, steps=1, **SMALL)
        with self.assertRaisesRegex(ValueError, "dropout"):
            train("grpo", supervised(7).policy, rank=SimpleNamespace(ranks=2), mistake="dropout", steps=1, **SMALL)


if __name__ == "__main__":
    unittest.main()
