"""What the tests run on ranks: a job is a function of a module, so that the processes can import it."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from extensions.distributed import cost, mistakes, rules
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
                    rank.watch.leave(f"after update {update}: its own KL {own:g} is above {limit:g}")
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


# ------------------------------------------------------------------------------------------ rules, by hand numbers

TOKEN_MEANS = {
    "right": lambda S, n, totals, engine: rules.mean_over_tokens(S, totals, engine),
    "mean of means": lambda S, n, totals, engine: S / n,
    "forgot W": lambda S, n, totals, engine: S / totals.tokens,
}


def token_means(rank: Rank, A: list[float], T: list[int]) -> dict[str, float] | None:
    """One answer a rank, A_r and T_r tokens with unit gradients: the gradient after DDP's mean, for right and wrong."""
    group = rank.group_of(len(A))
    if group is None:
        return None
    totals = rules.count(T[rank.rank], 1, 1, group)
    got = {}
    for name, loss in TOKEN_MEANS.items():
        w = torch.ones((), dtype=torch.float64, requires_grad=True)
        loss(-A[rank.rank] * T[rank.rank] * w, T[rank.rank], totals, rules.Engine(group)).backward()
        got[name] = rules.gather(w.grad, group).mean().item()
    return got


def own_part(rank: Rank, values: list, counts: list[int]) -> list:
    """This rank's part of a list that is dealt out by counts."""
    first = sum(counts[: rank.rank])
    return values[first : first + counts[rank.rank]]


def group_advantages(rank: Rank, R: list[float], ids: list[int], counts: list[int], local: bool) -> list[float]:
    own = torch.tensor(own_part(rank, R, counts), dtype=torch.float64)
    of = torch.tensor(own_part(rank, ids, counts), dtype=torch.int64)
    return rules.group_advantages(own, of, None if local else rank.group).tolist()


def whiten(rank: Rank, x: list[float], counts: list[int]) -> list[float]:
    return rules.whiten(torch.tensor(own_part(rank, x, counts), dtype=torch.float64), group=rank.group).tolist()


def moments_of_all(rank: Rank, x: list[float], counts: list[int]) -> tuple[float, ...]:
    return tuple(rules.moments_of_all(torch.tensor(own_part(rank, x, counts), dtype=torch.float64), group=rank.group))


def clipped(rank: Rank, gradients: list[list[float]], before: bool) -> list[float] | None:
    """The mean over two ranks, clipped to norm 1 before or after."""
    group = rank.group_of(len(gradients))
    if group is None:
        return None
    w = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    w.grad = torch.tensor(gradients[rank.rank], dtype=torch.float64)
    if before:
        rules.clip_after_reduction([w], 1.0)
    rules.reduce_gradients([w], group)
    w.grad /= len(gradients)
    if not before:
        rules.clip_after_reduction([w], 1.0)
    return w.grad.tolist()


def decisions(rank: Rank, kl: list[float], tokens: list[int], limit: float) -> tuple[bool, str, float]:
    """stop, the bits of the KL, and the mean of all."""
    stop = rules.kl_stop(kl[rank.rank], tokens[rank.rank], limit, rank.group)
    return stop.stop, stop.kl.hex(), rules.logged_mean(kl[rank.rank], tokens[rank.rank], rank.group)


def reduced_with_a_missing_gradient(rank: Rank) -> tuple[list[float], list[float]]:
    """Only rank 0 has a gradient in b, and only the others one in a."""
    a, b = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    (b if rank.rank == 0 else a).grad = torch.full((2,), float(rank.rank + 1))
    rules.reduce_gradients([a, b], rank.group)
    return a.grad.tolist(), b.grad.tolist()


def reductions_of_ddp(rank: Rank, M: int, no_sync: bool) -> list[int]:
    """Bytes of every reduction that DDP makes in M backward passes of a model of 6 float64 parameters."""
    model = DistributedDataParallel(torch.nn.Linear(6, 1, bias=False, dtype=torch.float64), process_group=rank.group)
    seen: list[int] = []

    def hook(state, bucket):
        seen.append(bucket.buffer().nbytes)
        return default_hooks.allreduce_hook(rank.group, bucket)

    model.register_comm_hook(None, hook)
    for m in range(M):
        with model.no_sync() if no_sync and m < M - 1 else contextlib.nullcontext():
            model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
    return seen


def calls_of_rules(rank: Rank, load: cost.Load) -> dict[str, list]:
    return {name: cost.counted(name, load, rank.group) for name in cost.UPDATES}


def complaints(rank: Rank) -> list[str]:
    """What every rank says to counts of 0, a count below 0 on rank 1, and one number to whiten."""
    said = []
    for call in (
        lambda: rules.count(0, 2, 1, rank.group),
        lambda: rules.count(5, -1 if rank.rank == 1 else 1, 1, rank.group),
        lambda: rules.whiten(torch.ones(1 if rank.rank == 2 else 0, dtype=torch.float64), group=rank.group),
    ):
        try:
            call()
            said.append("no complaint")
        except ValueError as problem:
            said.append(str(problem))
    return said
