"""The batch on which the mistakes are measured: eight answers of 1 to 100 tokens, four features, a linear score.

    features of answer i     X_i, T_i rows of 4 numbers drawn in order from one generator with seed 0, float64
    token loss               -A_i x.w         so the gradient of an answer is -A_i sum over its rows of X_i, whatever w is
    rank r of W              rows r*8/W to (r+1)*8/W
    micro-batch m of M       its rows m, m + M, m + 2 M, ...; with 4 ranks and 4 micro-batches two of these are empty

Lengths that differ much are what makes the mistakes large; answers of equal length hide half of them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from extensions.distributed.rules import share

FEATURES = 4
LENGTHS = (10, 100, 3, 7, 55, 1, 20, 4)
ADVANTAGES = (1.0, -1.0, 0.5, -0.5, 1.0, -1.0, 2.0, -2.0)
# For the rules that make advantages themselves. Each prompt has four answers, and two ranks hold two of each; the answers
# to prompt 0 are the example of the guide, R = [1, 0, 0, 0].
PROMPTS = (0, 0, 1, 1, 0, 0, 1, 1)
REWARDS = (1.0, 0.0, 0.5, 1.0, 0.0, 0.0, 1.0, 0.0)
CONSTANT = max(LENGTHS)  # C of the sum over a constant: the padded width of the whole batch, the same on every rank
MAX_NORM = 0.05  # the right gradient's norm is .0874: it is clipped


class Rows(NamedTuple):
    """Some answers of the toy, their tokens below each other."""

    index: list[int]  # which of the eight
    X: Tensor  # [tokens, 4]
    row: Tensor  # [tokens] the answer of a token, 0 to len(index) - 1
    lengths: Tensor  # [rows]

    @property
    def tokens(self) -> int:
        return len(self.X)

    @property
    def width(self) -> int:
        """The longest answer: what these rows would be padded to."""
        return int(self.lengths.max()) if len(self.lengths) else 0


@functools.cache
def features() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(T, FEATURES, dtype=torch.float64, generator=generator) for T in LENGTHS)


def rows(index: list[int]) -> Rows:
    """These answers of the toy; none for an empty list."""
    X = torch.cat([torch.zeros(0, FEATURES, dtype=torch.float64), *(features()[i] for i in index)])
    lengths = torch.tensor([LENGTHS[i] for i in index], dtype=torch.int64)
    return Rows(index, X, torch.arange(len(index)).repeat_interleave(lengths), lengths)


def of_rank(rank: int, ranks: int) -> list[int]:
    return list(range(len(LENGTHS))[share(len(LENGTHS), rank, ranks)])


def micro_batches(index: list[int], count: int) -> list[list[int]]:
    return [index[m::count] for m in range(count)]
