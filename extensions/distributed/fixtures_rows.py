"""Objectives on a batch that is split over ranks and micro-batches, and on one process: what the tests compare."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Callable, Iterable
from unittest import mock

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from extensions.distributed import mistakes, rules, shards
from extensions.distributed.ranks import Rank
from extensions.distributed.rules import Engine
from extensions.distributed.shards import RowOnRanks, check_row, pairs_on_ranks, take
from extensions.objectives import (
    PREFERENCE_ROWS,
    ROWS,
    Batch,
    Preferences,
    evaluate,
    evaluate_preference,
    loss_to_backpropagate,
    make_batch,
)

LENGTHS = (2, 6, 4, 3, 5, 2, 1, 6, 3, 2, 4, 5)
PROMPTS = (0, 1, 2) * 4  # scattered: every split of the rows splits the groups
REWARDS = (1.0, 0.2, 0.5, 0.0, 0.4, 0.5, 0.3, 1.0, 0.5, 0.0, 0.0, 0.5)  # equal for prompt 2: a group filter takes it out
N, WIDTH, VOCABULARY, FEATURES = len(LENGTHS), max(LENGTHS), 5, 3
LEARNING_RATE = 0.1


class Policy(torch.nn.Module):
    """Logits and values linear in fixed features: few parameters, shared by all rows."""

    def __init__(self, seed: int = 3, scale: float = 1.0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        draw = {"generator": generator, "dtype": torch.float64}
        self.weight = torch.nn.Parameter(scale * torch.randn(FEATURES, VOCABULARY, **draw))
        self.value = torch.nn.Parameter(torch.randn(FEATURES, **draw))

    def forward(self, features: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """features (b, T, F), ids (b, T) -> logps, vpreds, entropies (b, T) and logits (b, T, V)."""
        logits = features @ self.weight
        logp = logits.log_softmax(dim=-1)
        return {
            "logps": logp.gather(2, ids.unsqueeze(2)).squeeze(2),
            "vpreds": features @ self.value,
            "entropies": -(logp.exp() * logp).sum(dim=-1),
            "logits": logits,
        }


@functools.cache
def whole_batch() -> tuple[Batch, Tensor, Tensor]:
    """Twelve answers to three prompts; their features (N, T, F) and ids (N, T)."""
    generator = torch.Generator().manual_seed(4)
    features = torch.randn(N, WIDTH, FEATURES, generator=generator, dtype=torch.float64)
    ids = torch.randint(VOCABULARY, (N, WIDTH), generator=generator)
    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS).unsqueeze(1)
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    with torch.no_grad():
        now, old, ref = (Policy(seed, scale)(features, ids) for seed, scale in ((3, 1.0), (3, 0.8), (5, 0.5)))
    values = now["vpreds"] + 0.1
    batch = make_batch(
        **now,
        mask=mask,
        old_logps=old["logps"],
        ref_logps=ref["logps"],
        ref_logits=ref["logits"],
        rewards=rewards,
        group_ids=torch.tensor(PROMPTS),
        reward_baselines=torch.full_like(rewards, 0.3),
        values=values,
        advantages=torch.where(mask, rewards.unsqueeze(1) - values, 0.0),
        budget=7,
    )
    return batch, features, ids


def covered_rows() -> list[str]:
    """Every named row that RowOnRanks does not refuse and that the batch has the arrays for."""
    batch, *_ = whole_batch()
    names = []
    for name, row in ROWS.items():
        try:
            check_row(row)
        except ValueError:
            continue
        if all(getattr(batch, need) is not None for need in row.needs):
            names.append(name)
    return names


def one_process_loss(name: str, policy: Callable) -> Tensor:
    """The row on the joined batch, with its graph."""
    if name in PREFERENCE_ROWS:
        data, live = pairs(range(N // 2), policy)
        return loss_to_backpropagate(evaluate_preference(PREFERENCE_ROWS[name], data), live)
    batch, features, ids = whole_batch()
    live = policy(features, ids)
    mask = batch.mask
    masks = {key: mask.unsqueeze(2) if value.dim() == 3 else mask for key, value in live.items()}
    now = {key: torch.where(masks[key], value.detach(), 0.0) for key, value in live.items()}
    return loss_to_backpropagate(evaluate(ROWS[name], replace(batch, **now)), **live)


def pairs(which: Iterable[int], policy: Callable) -> tuple[Preferences, Tensor]:
    """Pairs i = answer i, chosen, and answer i + N/2, rejected; and their log-probabilities with their graph."""
    batch, features, ids = whole_batch()
    rows = torch.tensor([*which, *(i + N // 2 for i in which)], dtype=torch.int64)
    live = policy(features[rows], ids[rows])["logps"]
    mask = batch.mask[rows]
    now = torch.where(mask, live.detach(), 0.0)
    data = Preferences(
        now, mask, True, batch.ref_logps[rows], answer_lengths=batch.lengths[rows],
        pair_weights=1 + 0.1 * rows[: len(rows) // 2].double(),
    )  # fmt: skip
    return data, live


def losses_of_rank(name: str, policy: Callable, engine: Engine, M: int) -> list[Tensor]:
    """What this rank calls backward() on, one for each micro-batch; `nothing` is part of each."""
    W, rank = rules.world_size(engine.group), rules.rank_in(engine.group)
    if name in PREFERENCE_ROWS:
        own = list(range(N // 2))[rules.share(N // 2, rank, W)]
        step = pairs_on_ranks(PREFERENCE_ROWS[name], len(own), engine, M)
        batches = [own[m::M] for m in range(M)]
        return [nothing(policy) + (step.loss(*pairs(batch, policy)) if batch else 0.0) for batch in batches]
    batch, features, ids = whole_batch()
    own = torch.arange(N)[rules.share(N, rank, W)]
    step = RowOnRanks(ROWS[name], take(batch, own), engine, M)
    losses = []
    for m in range(M):
        rows = torch.arange(len(own))[m::M]
        loss = step.loss(rows, **policy(features[own[rows]], ids[own[rows]]))
        losses.append(nothing(policy) + (0.0 if loss is None else loss))
    return losses


def nothing(policy: Callable) -> Tensor:
    """A loss of 0 that gives every parameter a gradient, as DDP wants: also the critic's, which most rows do not read."""
    live = policy(torch.zeros(0, WIDTH, FEATURES, dtype=torch.float64), torch.zeros(0, WIDTH, dtype=torch.int64))
    return live["logps"].sum() + live["vpreds"].sum()


def gradient(loss: Tensor, policy: Policy) -> Tensor:
    parts = torch.autograd.grad(loss, list(policy.parameters()), allow_unused=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(policy.parameters(), parts)])


def error_of_gradient(name: str, group: object, M: int) -> float:
    """|g - g1| / |g1|, g the SUM over ranks and micro-batches, or the error of the loss, whichever is worse."""
    policy = Policy()
    wanted = one_process_loss(name, policy)
    own = sum(losses_of_rank(name, policy, Engine(group, averages=False), M))
    g1, g = gradient(wanted, policy), gradient(own, policy)
    total = rules.gather(torch.cat([own.detach().reshape(1), g]), group).sum(dim=0)
    of_loss = abs(total[0] - wanted.detach()) / max(1.0, abs(wanted.item()))
    return max(of_loss.item(), ((total[1:] - g1).norm() / g1.norm()).item())


def errors_over_the_grid(rank: Rank, names: list[str]) -> dict[str, float]:
    """Row -> the worst error over {1, 2, 4} ranks and micro-batches that this rank took part in."""
    groups = [rank.group_of(size) for size in mistakes.SPLITS if size <= rank.ranks]
    return {
        name: max(error_of_gradient(name, group, M) for group in groups if group is not None for M in mistakes.SPLITS)
        for name in names
    }


def errors_of_rows(rank: Rank, names: list[str], M: int) -> dict[str, float]:
    """The same on two ranks alone."""
    group = rank.group_of(2)
    return {} if group is None else {name: error_of_gradient(name, group, M) for name in names}


def errors_of_twins(rank: Rank, M: int) -> dict[str, float]:
    """What the comparison of two ranks says when something is taken over each rank alone: "row: what" -> error."""
    group = rank.group_of(2)
    if group is None:
        return {}
    gather = shards.with_generation
    twins = {
        ("ppo", "count"): (rules, "count", lambda *counts_and_group: rules.Totals(*counts_and_group[:3])),
        ("grpo", "with_generation"): (shards, "with_generation", lambda row, batch, group: gather(row, batch, None)),
        ("reinforce_pp", "moments_of_all"): (rules, "moments_of_all", lambda x, mask, group: rules.moments(x, mask)),
    }
    errors = {}
    for (name, what), (module, attribute, broken) in twins.items():
        with mock.patch.object(module, attribute, broken):
            errors[f"{name}: {what}"] = error_of_gradient(name, group, M)
    return errors


def trained(name: str, group: object, M: int, steps: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """All parameters after SGD steps under a real DistributedDataParallel; group None: one process, one batch."""
    policy = Policy()
    engine = Engine(group)
    model = policy if group is None else DistributedDataParallel(policy, process_group=group)
    optimizer = torch.optim.SGD(policy.parameters(), lr=LEARNING_RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        if group is None:
            one_process_loss(name, model).backward()
        else:
            # Losses first, one backward of their sum: DDP then reduces once.
            sum(losses_of_rank(name, model, engine, M)).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


def parameters_after(rank: Rank, names: list[str], M: int, steps: int) -> dict[str, Tensor]:
    """Row -> all parameters after training on two ranks; on rank 0 also "row, one process"."""
    group = rank.group_of(2)
    after = {} if group is None else {name: trained(name, group, M, steps) for name in names}
    return after | ({f"{name}, one process": trained(name, None, 1, steps) for name in names} if not rank.rank else {})
