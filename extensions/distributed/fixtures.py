"""What the tests run on ranks: a job is a function of a module, so that the processes can import it."""

from __future__ import annotations

import os
import signal
import time

import torch
from torch.nn.parallel import DistributedDataParallel

from extensions.distributed import mistakes, rules
from extensions.distributed.ranks import Rank

UPDATES = 3


def grid_of_mistakes(rank: Rank) -> tuple[list[mistakes.Measured], list[mistakes.Measured]]:
    groups = {size: rank.group_of(size) for size in mistakes.SPLITS}
    return mistakes.grid({size: group for size, group in groups.items() if group is not None}, mistakes.SPLITS)


def run_updates(rank: Rank, kl: list[list[float]], by_all: bool, limit: float = 0.02) -> int:
    """Updates with a KL stop. kl[rank][update]: KL sum over the rank's 10 tokens. Returns how many updates were made."""
    weight = torch.nn.Parameter(torch.ones(2))
    for update in range(UPDATES):
        with rank.watch.collectives(f"update {update + 1}"):
            own = kl[rank.rank][update] / 10
            stop = rules.kl_stop(10 * own, 10, limit, rank.group).stop if by_all else own > limit
            if stop:
                if not by_all:
                    rank.watch.leave(f"after update {update}: its own KL {own:g} is above {limit:g}; all must stop by the reduced KL")
                return update
            weight.grad = torch.ones(2)
            rules.reduce_gradients([weight], rank.group)
    return UPDATES


def accumulate(rank: Rank, batches: list[list[list[float]]], filled: bool) -> list[float]:
    """Token mean of x*w over micro-batches of numbers, reduced in each backward as DDP does without no_sync."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False, dtype=torch.float64), process_group=rank.group)
    own = [torch.tensor(batch, dtype=torch.float64).reshape(-1, 1) for batch in batches[rank.rank]]
    with rank.watch.collectives("update 1"):
        totals = rules.count(sum(map(len, own)), len(own), len(own), rank.group)
        for m, batch in enumerate(rules.padded(own, totals) if filled else own):
            rank.watch.at(f"update 1, micro-batch {m + 1} of {totals.micro_batches if filled else len(own)}")
            batch = torch.zeros(0, 1, dtype=torch.float64) if batch is None else batch
            loss = rules.mean_over_tokens(model(batch).sum(), totals, rules.Engine(rank.group))
            loss.backward()
    rank.watch.meet("update 2")
    return model.module.weight.grad.flatten().tolist()


def dies(rank: Rank, which: int, number: int) -> None:
    """One rank gets a signal between two updates."""
    rank.watch.meet("update 1")
    if rank.rank == which:
        os.kill(os.getpid(), number)
    rank.watch.meet("update 2")


def dies_in_a_collective(rank: Rank, which: int) -> None:
    with rank.watch.collectives("update 1"):
        if rank.rank == which:
            os.kill(os.getpid(), signal.SIGKILL)
        rules.logged_mean(1.0, 1, rank.group)


def sleeps(rank: Rank, which: int, seconds: float) -> None:
    rank.watch.at("scoring")
    if rank.rank == which:
        time.sleep(seconds)
    rank.watch.meet("update 1")


def raises(rank: Rank, which: int) -> None:
    if rank.rank == which:
        raise ValueError("reward server said no")
    rank.watch.meet("update 1")


def other_flags(rank: Rank, flags: list[str]) -> None:
    rank.watch.agree("flags", flags[rank.rank])


def refuses_data(rank: Rank, rewards: list[list[float]]) -> str:
    """The message that each rank gets for a reward that is not finite on one of them."""
    own = torch.tensor(rewards[rank.rank], dtype=torch.float64)
    try:
        rules.group_statistics(own, torch.zeros(len(own), dtype=torch.int64), rank.group)
    except ValueError as problem:
        return str(problem)
    return "no complaint"
