"""What to call backward() on, so that N ranks with M micro-batches take the step that one process would take.

A new rule is a function here; how it goes wrong is an entry of MISTAKES in mistakes.py.

Letters: W ranks, M micro-batches of a rank, S the sum of a micro-batch's token losses (its numerator), n its counted tokens,
b its rows; N = sum n and B = sum b over all micro-batches of all ranks.

The one rule behind all of them: numerators and counts are summed over everything, and divided once. Counts are known before
the first backward(), so each micro-batch can divide by the number of all:

    gradient wanted       sum over ranks and micro-batches of  dS / N
    DDP hands over        (1/W) sum over ranks of  sum over micro-batches of  d loss
    so                    loss = S W / N                      no division by M anywhere

A `group` is a torch.distributed process group, dist.group.WORLD for all ranks. None means this process alone: no rule
communicates then, and each is the formula of one process. Every function with a group is a collective: every rank calls
it, a rank that has nothing with empty tensors. What is wrong with one rank's data raises on every rank, after
the data were exchanged: a rank that raised before would leave the others waiting.

Sources: verl core_algos.agg_loss (sum / batch_num_tokens * dp_size), TRL GRPOTrainer (loss_type dapo), transformers
average_tokens_across_devices; Chan, Golub and LeVeque 1979 for the combined moments.
"""

from __future__ import annotations

import math
from typing import Iterable, Iterator, NamedTuple, Sequence, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Item = TypeVar("Item")
Group = "dist.ProcessGroup | Counted | None"


class Collective(NamedTuple):
    """One collective as a rank called it."""

    name: str  # all_gather, all_reduce
    bytes: int  # what this rank put in


class Counted:
    """A process group that remembers what was called on it: hand it to a rule in place of the group (see cost.py)."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.calls: list[Collective] = []


def _counted(group: Group, name: str, tensor: Tensor) -> dist.ProcessGroup | None:
    if not isinstance(group, Counted):
        return group
    group.calls.append(Collective(name, tensor.nbytes))
    return group.group


def world_size(group: Group) -> int:
    """W; 1 without a group."""
    group = group.group if isinstance(group, Counted) else group
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: Group) -> int:
    """This process's number in the group; 0 without one."""
    group = group.group if isinstance(group, Counted) else group
    return 0 if group is None else dist.get_rank(group)


# ------------------------------------------------------------------------------------------ the two collectives


def gather(tensor: Tensor, group: Group = None) -> Tensor:
    """The same tensor of every rank, [W, ...] in the order of ranks. Equal shapes. Gradient: none.

    Sums of a few numbers are made from this and not from an all-reduce: every rank adds the same numbers in the same order,
    so that all ranks have the same bits and take the same branch.
    """
    tensor = tensor.detach().contiguous()
    inner = _counted(group, "all_gather", tensor)
    if inner is None:
        return tensor.unsqueeze(0)
    parts = [torch.empty_like(tensor) for _ in range(world_size(inner))]
    dist.all_gather(parts, tensor, group=inner)
    return torch.stack(parts)


def reduce_gradients(parameters: Iterable[Tensor], group: Group = None) -> None:
    """The hand-written reduction: every .grad becomes the SUM over ranks, in place, in one all-reduce.

    A parameter without a gradient (an empty rank) joins with zeros. Losses for it are made with Engine(averages=False).
    """
    parameters = [p for p in parameters if p.requires_grad]
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    flat = torch.cat([p.grad.flatten() for p in parameters])
    inner = _counted(group, "all_reduce", flat)
    if inner is None:
        return
    dist.all_reduce(flat, group=inner)
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad.copy_(part.view_as(p))


# ------------------------------------------------------------------------------------------ what to call backward on


class Engine(NamedTuple):
    """What happens to a gradient between backward() and the optimiser: said once, so that no rule has to guess."""

    group: Group = None
    averages: bool = True  # DDP and FSDP take the mean over ranks; False: a SUM, as reduce_gradients
    divides_by: int = 1  # by what the framework divides each loss itself: its accumulation steps M (accelerate), or 1

    @property
    def factor(self) -> int:
        """What undoes it: (W if the engine averages) * divides_by."""
        return (world_size(self.group) if self.averages else 1) * self.divides_by


class Totals(NamedTuple):
    """Counts over all micro-batches of all ranks."""

    tokens: int  # N
    rows: int  # B
    micro_batches: int  # the most that any rank has


def count(tokens: int, rows: int, micro_batches: int = 1, group: Group = None) -> Totals:
    """N = sum_r n_r, B = sum_r b_r, M = max_r M_r, from each rank's own counts. Call it before the first backward().

    tokens, rows: of all micro-batches of this rank. One all_gather of three whole numbers.
    Raises ValueError on every rank for a negative count or if no rank has a counted token.
    """
    each = gather(torch.tensor([tokens, rows, micro_batches], dtype=torch.int64), group)
    if (each < 0).any():
        rank = int((each < 0).any(dim=1).nonzero()[0])
        said = each[rank].tolist()
        raise ValueError(f"count: rank {rank} counts {said} tokens, rows and micro-batches, wanted none below 0")
    n, b, _ = each.sum(dim=0).tolist()
    if not n:
        raise ValueError(f"count: none of the {len(each)} rank(s) has a counted token: nothing to take a mean over")
    return Totals(n, b, int(each[:, 2].max()))


def mean_over_tokens(numerator: Tensor, totals: Totals, engine: Engine = Engine()) -> Tensor:
    """loss = S * factor / N, with factor = W under DDP: (1/N) sum over all tokens of all ranks.

    numerator: () S = sum of this micro-batch's token losses, with its graph. By hand: A = [1, -1], T = [10, 100] on two
    ranks, unit gradients: ((10 * 2/110) + (-100 * 2/110)) / 2 = -90/110. Gradient: through the numerator.
    """
    return numerator * (engine.factor / totals.tokens)


def mean_per_response(numerator: Tensor, totals: Totals, engine: Engine = Engine()) -> Tensor:
    """loss = S * factor / B with S = sum_i (1/T_i) sum_t x: (1/B) sum over all responses of their token means.

    T_i: counted tokens of the whole response. Gradient: through the numerator.
    """
    return numerator * (engine.factor / totals.rows)


def sum_over_constant(numerator: Tensor, totals: Totals, constant: float, engine: Engine = Engine()) -> Tensor:
    """loss = S * factor / (B C), C a number that is the same on all ranks and in all updates (Dr. GRPO's budget).

    The padded width of a micro-batch is no such number. Gradient: through the numerator.
    """
    return numerator * (engine.factor / (totals.rows * constant))


def sums(numerator: Tensor, engine: Engine = Engine()) -> Tensor:
    """loss = S * factor: the sum over all ranks, whatever the engine does. Gradient: through the numerator."""
    return numerator * engine.factor


def zero_loss(parameters: Iterable[Tensor]) -> Tensor:
    """A loss of 0 whose backward() gives every parameter a gradient of zeros: how an empty micro-batch joins.

    sum over parameters of the sum of no elements; not 0 * p, which is NaN where p is infinite. For a reduction by hand. Under
    DDP send a batch of no rows through the model instead: its forward takes part in collectives, too, and the other ranks
    would wait for it.
    """
    return torch.stack([p.flatten()[:0].sum() for p in parameters if p.requires_grad]).sum()


def padded(micro_batches: Sequence[Item], totals: Totals) -> Iterator[Item | None]:
    """This rank's micro-batches, then None up to the largest M: a rank with fewer takes zero_loss for the others.

    Every rank then calls backward() the same number of times, which engines that reduce in each of them rely on. Under DDP
    a batch of no rows stands in for None, see zero_loss.
    """
    yield from micro_batches
    for _ in range(totals.micro_batches - len(micro_batches)):
        yield None


def share(rows: int, rank: int, ranks: int) -> slice:
    """What rank r holds of `rows`: from r rows // W up to (r + 1) rows // W, neighbours, as even as whole numbers allow.

    Give it the number of prompts and multiply by the group size, so that no group is split.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank: got {rank} of {ranks} rank(s), wanted 0 to {ranks - 1}")
    return slice(rank * rows // ranks, (rank + 1) * rows // ranks)


# ------------------------------------------------------------------------------------------ statistics over all ranks


class GroupStatistics(NamedTuple):
    """Of the group each of this rank's rows belongs to, each [n] float64."""

    size: Tensor
    mean: Tensor
    std: Tensor  # 0 exactly where all rewards of the group are equal


def gather_rows(columns: Tensor, group: Group = None) -> tuple[Tensor, slice]:
    """The rows of all ranks below each other, and which of them are this rank's. columns [n_r, K], n_r may differ, and be 0.

    Two all_gathers: the counts, then the rows filled up to the largest count. No gradient.
    """
    counts = gather(torch.tensor(len(columns), dtype=torch.int64), group).tolist()
    filled = torch.zeros(max(counts), *columns.shape[1:], dtype=columns.dtype)
    filled[: len(columns)] = columns
    joined = torch.cat([rows[:n] for rows, n in zip(gather(filled, group), counts)])
    first = sum(counts[: rank_in(group)])
    return joined, slice(first, first + len(columns))


def group_statistics(rewards: Tensor, prompt_ids: Tensor, group: Group = None, ddof: int = 0) -> GroupStatistics:
    """Mean and std of the rewards to the same prompt, wherever its answers are: (prompt id, reward) gathered, then by id.

    mean_p = (1/G_p) sum_{i in p} R_i;  std_p = sqrt(sum_{i in p} (R_i - mean_p)^2 / (G_p - ddof)), 0 for one answer.
    rewards [n], prompt_ids [n] integer, any order; n may be 0. By hand: R = [1, 0, 0, 0] on two ranks: mean .25, std .4330,
    advantages [1.7321, -.5774, -.5774, -.5774]; each half alone would give [1, -1] and [0, 0].
    Gradient: none. Raises ValueError on every rank for a reward that is not finite, naming rank and row.
    """
    # One exchange for both: the bits of a float64 travel as a whole number.
    bits = rewards.detach().double().view(torch.int64)
    packed = torch.stack([prompt_ids.long(), bits, torch.full_like(bits, rank_in(group))], dim=1)
    rows, own = gather_rows(packed, group)
    ids, R = rows[:, 0], rows[:, 1].contiguous().view(torch.float64)
    if not R.isfinite().all():
        where = int((~R.isfinite()).nonzero()[0])
        rank, row = int(rows[where, 2]), where - int((rows[:, 2] < rows[where, 2]).sum())
        raise ValueError(f"rewards: got {R[where].item()} at row {row} of rank {rank}, wanted finite numbers")
    _, of, size = torch.unique(ids, return_inverse=True, return_counts=True)
    nothing = torch.zeros(len(size), dtype=torch.float64)
    mean = nothing.index_add(0, of, R) / size
    M2 = nothing.index_add(0, of, (R - mean[of]).square())
    std = (M2 / (size - ddof).clamp(min=1)).sqrt()
    # Equal rewards have no spread, also where their mean is not exactly representable.
    extremes = (nothing.scatter_reduce(0, of, R, way, include_self=False) for way in ("amax", "amin"))
    std = torch.where(torch.eq(*extremes), 0.0, std)
    of = of[own]
    return GroupStatistics(size[of].double(), mean[of], std[of])


def group_advantages(
    rewards: Tensor, prompt_ids: Tensor, group: Group = None, eps: float = 1e-8, ddof: int = 0
) -> Tensor:
    """A_i = (R_i - mean_p) / (std_p + eps) with group_statistics; 0 in a group without spread. [n] float64, no gradient."""
    of = group_statistics(rewards, prompt_ids, group, ddof)
    return torch.where(of.std > 0, (rewards.double() - of.mean) / (of.std + eps), 0.0)


class Moments(NamedTuple):
    """Enough to know the mean and variance of numbers that nobody has together."""

    count: float  # n
    mean: float
    M2: float  # sum of squared deviations from the mean


def moments(x: Tensor, mask: Tensor | None = None) -> Moments:
    """n, mean and M2 = sum (x - mean)^2 of the counted entries; 0, 0, 0 of none. x [...], mask [...] bool."""
    x = (x if mask is None else x[mask]).detach().double()
    if not x.numel():
        return Moments(0.0, 0.0, 0.0)
    mean = x.mean()
    return Moments(float(x.numel()), mean.item(), (x - mean).square().sum().item())


def combine(parts: Sequence[Moments]) -> Moments:
    """n = sum n_r;  mean = sum n_r mean_r / n;  M2 = sum M2_r + sum n_r (mean_r - mean)^2.

    Sums of x and x^2 would do on paper; their difference loses all digits where the mean is large.
    """
    n = math.fsum(part.count for part in parts)
    if not n:
        return Moments(0.0, 0.0, 0.0)
    mean = math.fsum(part.count * part.mean for part in parts) / n
    return Moments(n, mean, math.fsum(part.M2 + part.count * (part.mean - mean) ** 2 for part in parts))


def moments_of_all(x: Tensor, mask: Tensor | None = None, group: Group = None) -> Moments:
    """`combine` over the ranks: one all_gather of three numbers, however many entries there are."""
    each = gather(torch.tensor(moments(x, mask), dtype=torch.float64), group)
    return combine([Moments(*part) for part in each.tolist()])


def whiten(x: Tensor, mask: Tensor | None = None, group: Group = None, ddof: int = 1, eps: float = 1e-8) -> Tensor:
    """(x - mean) / (std + eps) with mean and std = sqrt(M2 / (n - ddof)) over all ranks; 0 outside the mask.

    By hand: [1, 1, 1, -1, -1] and [2, -.5]: mean 2.5/7, M2 = 8.3571, std = sqrt(8.3571/6) = 1.1802; the second rank has
    [1.3920, -.7263], and by its own two numbers [.7071, -.7071]. Dtype as x, no gradient.
    Raises ValueError on every rank for fewer than ddof + 1 entries or one that is not finite.
    """
    of = moments_of_all(x, mask, group)
    if of.count <= ddof or not math.isfinite(of.M2):
        got = f"{of.count:.0f} entries over all ranks with squares {of.M2}"
        raise ValueError(f"whiten: got {got}, wanted at least {ddof + 1} entries, all finite")
    white = (x.detach() - of.mean) / (math.sqrt(of.M2 / (of.count - ddof)) + eps)
    return white if mask is None else torch.where(mask, white, 0.0)


# ------------------------------------------------------------------------------------------ after the backward


def clip_after_reduction(parameters: Iterable[Tensor], max_norm: float) -> float:
    """g <- g * min(1, c / |g|), in place; returns |g| before. Call it when .grad is the reduced gradient, on every rank.

    |g| over all parameters. Then all ranks hold the same g and scale alike, and nothing is exchanged. By hand: (3, 4) and
    (.3, -.4) with c = 1: mean (1.65, 1.8), |g| = 2.4418, clipped (.6757, .7372); each clipped first: (.45, .2).
    With sharded gradients (FSDP) |g|^2 must itself be summed over ranks; this function has whole gradients.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = math.sqrt(math.fsum(g.double().square().sum().item() for g in gradients))
    if norm > max_norm:
        for g in gradients:
            g.mul_(max_norm / norm)
    return norm


class Stop(NamedTuple):
    """What all ranks decided."""

    stop: bool
    kl: float  # of all ranks


def kl_stop(kl_sum: float | Tensor, tokens: int, limit: float, group: Group = None) -> Stop:
    """stop = (sum_r KL_r / sum_r n_r > limit): one answer for all ranks, or some would leave and others wait for ever.

    kl_sum: sum over this rank's counted tokens of a KL estimate; tokens: how many. A KL that is NaN stops all.
    """
    kl = logged_mean(kl_sum, tokens, group)
    return Stop(not kl <= limit, kl)


def logged_mean(total: float | Tensor, n: float, group: Group = None) -> float:
    """sum_r total_r / sum_r n_r, what a log should say; the mean of the ranks' means is another number. NaN for n = 0."""
    each = gather(torch.tensor([float(total), float(n)], dtype=torch.float64), group)
    total, n = (math.fsum(column) for column in each.T.tolist())
    return total / n if n else math.nan
