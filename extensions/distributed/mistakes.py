"""The right rules and the usual mistakes, each as the steps of one rank on the toy, measured against one process.

A new mistake is an entry of MISTAKES, a new right rule one of RIGHTS; a mistake names the right rule it should have been.
What one process computes stands in one_process, written without the rules.

A mistake is measured on W ranks with M micro-batches each: relative error |g - g1| / |g1| and cosine of the gradient g that
reaches the optimiser against g1 of one process with one batch. Each mistake has a split in which it cannot be seen.
"""

from __future__ import annotations

import math
from typing import Callable, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from extensions.distributed import rules, toy
from extensions.distributed.rules import Engine, Group, Totals

SPLITS = (1, 2, 4)  # ranks and micro-batches of the grid
AGREES = 1e-12  # relative error up to which two gradients are the same: rounding in float64


class Micro(NamedTuple):
    """What a rule may look at when it makes the loss of one micro-batch."""

    S: Tensor  # () sum of token losses, with its graph
    per_response: Tensor  # () sum over rows of (1/T_i) sum of token losses
    n: int  # counted tokens
    b: int  # rows
    width: int  # padded width
    M: int
    of_rank: int  # tokens of all micro-batches of this rank
    totals: Totals
    engine: Engine


class Rule(NamedTuple):
    """A way to take the step."""

    what: str  # formula, for readers
    loss: Callable[[Micro], Tensor]
    equals: str = "mean over tokens"  # what it should be: a kind of one_process
    advantages: Callable[[list[int], toy.Rows, Group], Tensor] | None = None  # of this rank's rows; None: the toy's
    reduction: str = "ddp"  # "sum": SUM all-reduce by hand
    framework_divides: bool = False  # the framework divides every loss by M
    clip: str = "never"  # or before, after the reduction


def at_least_one(n: int) -> int:
    """An empty micro-batch has S = 0: any denominator but 0 does."""
    return max(n, 1)


# ------------------------------------------------------------------------------------------ the rules


def token_mean(m: Micro) -> Tensor:
    return rules.mean_over_tokens(m.S, m.totals, m.engine)


def rewards_of(index: list[int]) -> tuple[Tensor, Tensor]:
    every = torch.tensor(toy.REWARDS, dtype=torch.float64), torch.tensor(toy.PROMPTS)
    return tuple(column[index] for column in every)


def group_advantages(index: list[int], held: toy.Rows, group: Group) -> Tensor:
    return rules.group_advantages(*rewards_of(index), group)


def whitened(index: list[int], held: toy.Rows, group: Group) -> Tensor:
    """The toy's advantages, whitened over tokens; one number per row, as all tokens of an answer have the same."""
    A = torch.tensor(toy.ADVANTAGES, dtype=torch.float64)[index]
    white = rules.whiten(A[held.row], group=group)
    first = held.lengths.cumsum(0) - held.lengths
    return white[first]


RIGHTS: dict[str, Rule] = {
    "mean over tokens": Rule("S W / N, DDP", token_mean),
    "mean over tokens, SUM": Rule("S / N, SUM all-reduce", token_mean, reduction="sum"),
    "mean over tokens, framework": Rule("S W M / N, DDP, the framework divides by M", token_mean, framework_divides=True),
    "mean per response": Rule(
        "(W / B) sum_i (1/T_i) S_i, DDP",
        lambda m: rules.mean_per_response(m.per_response, m.totals, m.engine),
        "mean per response",
    ),
    "sum over a constant": Rule(
        "S W / (B C), DDP",
        lambda m: rules.sum_over_constant(m.S, m.totals, toy.CONSTANT, m.engine),
        "sum over a constant",
    ),
    "sums": Rule("S W, DDP", lambda m: rules.sums(m.S, m.engine), "sums"),
    "group statistics": Rule("statistics by prompt id over all ranks", token_mean, "group statistics", group_advantages),
    "whitening": Rule("mean and std of all tokens of all ranks", token_mean, "whitening", whitened),
    "clipping": Rule("clipped after the reduction", token_mean, "clipping", clip="after"),
}
MISTAKES: dict[str, Rule] = {
    "mean_of_means": Rule(
        "S / n / M: a mean of means",
        lambda m: m.S / at_least_one(m.n) / m.M,
    ),
    "local_count": Rule(
        "S / the tokens of this rank",
        lambda m: m.S / at_least_one(m.of_rank),
    ),
    "forgot_world_size": Rule(
        "S / N: DDP divides by W once more",
        lambda m: m.S / m.totals.tokens,
    ),
    "double_division": Rule(
        "S W / N / M: N counts them already",
        lambda m: token_mean(m) / m.M,
    ),
    "no_micro_division": Rule(
        "S / n: means added up",
        lambda m: m.S / at_least_one(m.n),
    ),
    "local_group_statistics": Rule(
        "a prompt on this rank alone",
        token_mean,
        "group statistics",
        lambda index, held, group: group_advantages(index, held, None),
    ),
    "local_whitening": Rule(
        "tokens of this rank alone",
        token_mean,
        "whitening",
        # One token has no spread; a trainer's std of it is NaN, or 0 and a guard: nothing is left of the row either way.
        lambda index, held, group: whitened(index, held, None) if held.tokens > 1 else torch.zeros(len(index)).double(),
    ),
    "clip_before_reduce": Rule(
        "ranks clip, then average", token_mean, "clipping", clip="before"
    ),
    "local_padded_width": Rule(
        "S W / (B C), C the own padded width",
        lambda m: rules.sum_over_constant(m.S, m.totals, at_least_one(m.width), m.engine),
        "sum over a constant",
    ),
}
NAMES = ("right", *MISTAKES)


# ------------------------------------------------------------------------------------------ one rank's step


def gradient(rule: Rule, group: Group, M: int) -> Tensor:
    """The gradient that reaches the optimiser on every rank of the group, (4,); each rank calls it.

    A real DistributedDataParallel reduces where the rule is about DDP, a hand-written all-reduce where it is about SUM.
    """
    W, rank = rules.world_size(group), rules.rank_in(group)
    index = toy.of_rank(rank, W)
    held = toy.rows(index)
    make = rule.advantages or (lambda index, held, group: torch.tensor(toy.ADVANTAGES, dtype=torch.float64)[index])
    advantages = dict(zip(index, make(index, held, group)))
    batches = [toy.rows(rows) for rows in toy.micro_batches(index, M)]
    totals = rules.count(held.tokens, len(index), M, group)
    by_hand = group is None or rule.reduction == "sum" or rule.clip == "before"
    engine = Engine(group, averages=rule.reduction == "ddp", divides_by=M if rule.framework_divides else 1)

    scores = torch.nn.Linear(toy.FEATURES, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(scores.weight)
    model = scores if by_hand else DistributedDataParallel(scores, process_group=group)
    for m, batch in enumerate(batches):
        if not by_hand:
            model.require_backward_grad_sync = m == M - 1  # what no_sync() sets: reduce once, after the last
        A = torch.stack([advantages[i] for i in batch.index] or [torch.zeros((), dtype=torch.float64)])
        losses = -A[batch.row] * model(batch.X).squeeze(1)
        per_response = (losses / batch.lengths[batch.row]).sum()
        micro = Micro(
            losses.sum(), per_response, batch.tokens, len(batch.index), batch.width, M, held.tokens, totals, engine
        )
        (rule.loss(micro) / (M if rule.framework_divides else 1)).backward()
    if rule.clip == "before":
        rules.clip_after_reduction(scores.parameters(), toy.MAX_NORM)
    if by_hand:
        rules.reduce_gradients(scores.parameters(), group)
        scores.weight.grad /= W if engine.averages else 1
    if rule.clip == "after":
        rules.clip_after_reduction(scores.parameters(), toy.MAX_NORM)
    return scores.weight.grad.flatten().clone()


# ------------------------------------------------------------------------------------------ one process


def _gradient_of(weights: list[float]) -> Tensor:
    """sum_i weight_i * d(sum of the token losses of answer i) for A_i = 1: -sum of its features."""
    return -sum(weight * X.sum(dim=0) for weight, X in zip(weights, toy.features()))


def one_process(kind: str) -> Tensor:
    """The gradient of a right rule (what a Rule `equals`) on one process with the whole batch, in plain sums, (4,)."""
    A, T = list(toy.ADVANTAGES), list(toy.LENGTHS)
    N, B = sum(T), len(T)
    if kind == "mean per response":
        return _gradient_of([a / (B * t) for a, t in zip(A, T)])
    if kind in ("sum over a constant", "sums"):
        return _gradient_of([a / (B * toy.CONSTANT if kind != "sums" else 1) for a in A])
    if kind == "group statistics":
        groups = {p: [r for r, q in zip(toy.REWARDS, toy.PROMPTS) if q == p] for p in toy.PROMPTS}
        mean = {p: sum(rewards) / len(rewards) for p, rewards in groups.items()}
        std = {p: math.sqrt(sum((r - mean[p]) ** 2 for r in rewards) / len(rewards)) for p, rewards in groups.items()}
        A = [(r - mean[p]) / (std[p] + 1e-8) for r, p in zip(toy.REWARDS, toy.PROMPTS)]
    if kind == "whitening":
        mean = sum(a * t for a, t in zip(A, T)) / N
        std = math.sqrt(sum(t * (a - mean) ** 2 for a, t in zip(A, T)) / (N - 1))
        A = [(a - mean) / (std + 1e-8) for a in A]
    g = _gradient_of([a / N for a in A])
    return g * (toy.MAX_NORM / g.norm()).clamp(max=1) if kind == "clipping" else g


class Measured(NamedTuple):
    """One line of the table."""

    rule: str
    ranks: int
    micro_batches: int
    relative_error: float
    cosine: float


def measured(name: str, rule: Rule, group: Group, M: int) -> Measured:
    """|g - g1| / |g1| and g.g1 / (|g| |g1|); a cosine of a gradient that is 0 is NaN."""
    g, g1 = gradient(rule, group, M), one_process(rule.equals)
    cosine = max(-1.0, min(1.0, (g @ g1 / (g.norm() * g1.norm())).item())) if g.norm() else math.nan
    return Measured(name, rules.world_size(group), M, ((g - g1).norm() / g1.norm()).item(), cosine)


def measure_all(group: Group, M: int) -> tuple[list[Measured], list[Measured]]:
    """The fixed names on this split, `right` being the worst of the right rules; then the right rules one by one."""
    rights = [measured(name, rule, group, M) for name, rule in RIGHTS.items()]
    worst = max(rights, key=lambda one: one.relative_error)
    right = worst._replace(rule="right", cosine=min(one.cosine for one in rights))
    return [right, *(measured(name, rule, group, M) for name, rule in MISTAKES.items())], rights


def grid(groups: dict[int, dist.ProcessGroup | None], splits: tuple[int, ...]) -> tuple[list[Measured], list[Measured]]:
    """measure_all for each group {ranks: group} that this process is in, and each number of micro-batches."""
    rows, rights = [], []
    for group in groups.values():
        for M in splits:
            these, right = measure_all(group, M)
            rows += these
            rights += right
    return rows, rights
