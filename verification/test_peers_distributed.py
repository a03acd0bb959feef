"""extensions/distributed against accelerate, which divides every loss by its accumulation steps, and DDP by the ranks.

    python -m pip install -r verification/requirements.txt
    python -B -m unittest -v verification.test_peers_distributed

Its own Accelerator runs, with prepare, accumulate and backward, in one process and on two real ranks, on the toy of the
extension. Skipped where accelerate is absent or has another version than verification/requirements.txt names.
"""

from __future__ import annotations

import os
import unittest

import torch
from torch import Tensor

from extensions.distributed import mistakes, rules, toy
from extensions.distributed.mistakes import AGREES
from extensions.distributed.ranks import Rank, Ranks
from extensions.distributed.rules import Engine
from verification.test_peers import needs

SPLITS = ((1, 1), (1, 2), (2, 1), (2, 2), (2, 4))


def gradient_by_accelerate(rank: int, ranks: int, group: object, M: int, divides_by: int) -> Tensor:
    """The toy's token mean through accelerate, its losses made for an engine that divides by `divides_by`."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # its settings are one for the whole process
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=M)
    scores = torch.nn.Linear(toy.FEATURES, 1, bias=False, dtype=torch.float64)
    model = accelerator.prepare(scores)
    index = toy.of_rank(rank, ranks)
    totals = rules.count(toy.rows(index).tokens, len(index), M, group)
    A = torch.tensor(toy.ADVANTAGES, dtype=torch.float64)
    for rows in toy.micro_batches(index, M):
        with accelerator.accumulate(model):
            batch = toy.rows(rows)
            S = (-A[rows][batch.row] * model(batch.X).squeeze(1)).sum()
            accelerator.backward(rules.mean_over_tokens(S, totals, Engine(group, divides_by=divides_by)))
    return scores.weight.grad.flatten().clone()


def on_a_rank(rank: Rank, splits: list[tuple[int, int]]) -> dict[tuple[int, int, bool], Tensor]:
    """(ranks, M, whether the rule was told that the framework divides) -> gradient, on two ranks."""
    os.environ |= {"RANK": str(rank.rank), "LOCAL_RANK": str(rank.rank), "WORLD_SIZE": str(rank.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # read, not used: the ranks are connected
    return {
        (W, M, told): gradient_by_accelerate(rank.rank, W, rank.group, M, M if told else 1)
        for W, M in splits
        for told in (True, False)
    }


@needs("accelerate")
class Accelerate(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.right = mistakes.one_process("mean over tokens")
        cls.got = {
            (W, M, told): gradient_by_accelerate(0, 1, None, M, M if told else 1)
            for W, M in SPLITS
            if W == 1
            for told in (True, False)
        }
        with Ranks(2) as ranks:
            cls.got |= ranks.run(on_a_rank, [split for split in SPLITS if split[0] == 2], timeout=300.0)[0]

    def error(self, W, M, told):
        return ((self.got[W, M, told] - self.right).norm() / self.right.norm()).item()

    def test_it_divides_by_the_accumulation_steps_and_ddp_by_the_ranks(self):
        for W, M in SPLITS:
            self.assertLess(self.error(W, M, True), AGREES, f"loss S W M / N at {W} rank(s), {M} micro-batch(es)")

    def test_differs_when_the_rule_is_not_told(self):
        # S W / N, which is right under DDP alone, becomes S W / (N M): the step is 1/M of the right one.
        for W, M in SPLITS:
            self.assertAlmostEqual(self.error(W, M, False), 1 - 1 / M, delta=AGREES, msg=f"{W} rank(s), {M} micro-batch(es)")


if __name__ == "__main__":
    unittest.main()
