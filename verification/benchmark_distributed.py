"""Wall time of one update of a small network on 1, 2 and 4 ranks of this machine, as a ratio to one process.

    python -m verification.benchmark_distributed

One batch of 4096 tokens, split over ranks; float32, one thread a rank. Computation is divided by the ranks (up to the cores
there are), the exchange is added: what is left is the speed-up. `counts`, `whitening` and `group statistics` are the price
of exact statistics, each an exchange of its own. All in this run, in turn, so that a change of the machine's speed meets all.
"""

from __future__ import annotations

import os
import statistics
import time

import torch
from torch.nn.parallel import DistributedDataParallel

from extensions.distributed import rules
from extensions.distributed.ranks import Rank, Ranks
from rl_lab import format_table

SIZES = (1, 2, 4)
TOKENS, WIDTH, ROWS = 4096, 512, 64
REPEATS = 21


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(),
        torch.nn.Linear(WIDTH, 1),
    )


def update(model: torch.nn.Module, x: torch.Tensor, group: object) -> None:
    totals = rules.count(len(x), ROWS, 1, group)
    model.zero_grad()
    rules.mean_over_tokens(model(x).square().sum(), totals, rules.Engine(group)).backward()


def timed(what) -> float:
    started = time.perf_counter()
    what()
    return time.perf_counter() - started


def measure(rank: Rank) -> dict[str, list[float]]:
    """Seconds of each part at each size, on this rank."""
    torch.set_num_threads(1)
    groups = {size: rank.group_of(size) for size in SIZES}
    plain, seconds = network(), {}
    models = {
        size: DistributedDataParallel(network(), process_group=group) for size, group in groups.items() if group is not None
    }
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    for repeat in range(REPEATS):
        rank.watch.meet(f"round {repeat}, one process")
        if rank.rank == 0:
            seconds.setdefault("one process", []).append(timed(lambda: update(plain, x, None)))
        for size, model in models.items():
            group = groups[size]
            own = x[rules.share(TOKENS, rules.rank_in(group), size)]
            parts = {
                "update": lambda: update(model, own, group),
                "counts": lambda: rules.count(len(own), ROWS, 1, group),
                "whitening": lambda: rules.whiten(own[:, 0], group=group),
                "group statistics": lambda: rules.group_statistics(own[:ROWS, 0], torch.arange(ROWS) // 8, group),
            }
            for name, part in parts.items():
                rules.count(1, 1, 1, group)  # all start together
                seconds.setdefault(f"{name} {size}", []).append(timed(part))
        rank.watch.meet(f"round {repeat}, the end")
    return seconds


def main() -> None:
    with Ranks(max(SIZES)) as ranks:
        seconds = {name: statistics.median(times[3:]) for name, times in ranks.run(measure)[0].items()}
    alone = seconds["one process"]
    parameters = sum(p.numel() for p in network().parameters())
    print(f"{os.cpu_count()} cores, {parameters} parameters, {TOKENS} tokens; one process: {1e3 * alone:.1f} ms an update")
    names = ("update", "counts", "whitening", "group statistics")
    rows = [[name, *(f"{seconds[f'{name} {size}'] / alone:.3f}" for size in SIZES)] for name in names]
    print(format_table(["time / update of one process", *(f"{size} rank(s)" for size in SIZES)], rows))


if __name__ == "__main__":
    main()
