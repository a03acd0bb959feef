"""What test_ranks runs on real processes: two of the four that extensions.distributed shares among its tests."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from extensions.distributed.ranks import Rank
from extensions.tiny_lm import train
from extensions.tiny_lm.fixtures import SMALL
from extensions.tiny_lm.model import Decoder, Split, _drawn

QUIET = SimpleNamespace(meet=lambda place: None)  # the other two ranks have no part in the training


def pair_of(rank: Rank) -> SimpleNamespace | None:
    """This process as one of two ranks; None for the others."""
    group = rank.group_of(2)
    return None if group is None else SimpleNamespace(rank=rank.rank, ranks=2, group=group, watch=QUIET)


def trained(rank: Rank, start: Decoder, trainings: list[tuple[str, int]], objective: str | None = None) -> list | None:
    """(algorithm, steps) -> parameters by name and the history, of training on two ranks."""
    pair = pair_of(rank)
    if pair is None:
        return None
    return [outcome(start, name, steps, objective, pair) for name, steps in trainings]


def outcome(start: Decoder, algorithm: str, steps: int, objective: str | None = None, rank: object = None) -> tuple:
    more = {} if objective is None else {"objective": objective}
    run = train(algorithm, start, rank=rank, steps=steps, **more, **SMALL)
    return {name: value.detach() for name, value in run.policy.named_parameters()}, run.history


def drawn(rank: Rank, probabilities: torch.Tensor, unit: int) -> torch.Tensor | None:
    """Tokens of all rows, each of two ranks having drawn its own."""
    pair = pair_of(rank)
    if pair is None:
        return None
    split = Split(pair.group, unit)
    generator = torch.Generator().manual_seed(3)
    own = probabilities[split.own(len(probabilities))]
    return split.join(_drawn(own, generator, split, len(probabilities)))
