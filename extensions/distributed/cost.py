"""What one update sends: collectives and bytes of each rule, counted on the rules themselves, and what that means at scale.

A new rule is an entry of UPDATES; `counted` runs it with Counted groups and looks at what was called.

What a rank puts in, in bytes; W ranks, M micro-batches, R rows of the rank with the most, T tokens, P parameters of 8 bytes:

    rule                                collectives     bytes a rank puts in    grows with
    counts N, B, M                      1 all_gather    24                      nothing
    token mean, per response, constant  the counts, then the gradient           P
    gradient, reduced once              1 all_reduce    8 P                     P
    gradient, reduced in each backward  M all_reduce    8 P M                   P M    (no_sync() saves this, and only this)
    group statistics                    2 all_gather    8 + 24 R                R
    whitening over tokens               1 all_gather    24                      nothing (all advantages would be 8 T)
    clipping after the reduction        none            0                       -
    KL stop, a logged mean              1 all_gather    16                      nothing

An all_gather of b bytes brings each rank W b, a ring all_reduce of b bytes moves 2 (W - 1) / W b in and out of each: the
first grows with W, the second hardly. No rule sends anything that grows with T.

At scale, by `seconds` below: 7e9 parameters, gradients of 2 bytes, 50 GB/s in and out of each rank, 10 microseconds a
message, 64 rows a rank. Assumptions, not measurements; what they cannot change is the order of magnitude between the lines.

    part of an update       8 ranks   64 ranks  1024 ranks
    gradient, reduced once   0.49 s     0.55 s      0.58 s
    counts                  3e-05 s    6e-05 s    0.0001 s
    group statistics        6e-05 s  0.00012 s   0.00023 s
    whitening               3e-05 s    6e-05 s    0.0001 s
    KL stop                 3e-05 s    6e-05 s    0.0001 s

So the gradient dominates at every size, 14 GB against a few kB, and all exact counts and statistics together are below a
thousandth of it: local ones save nothing. At 1024 ranks the ring's 2 (W - 1) messages are 0.02 s of the 0.58.
"""

from __future__ import annotations

import math
from typing import Callable, NamedTuple

import torch

from extensions.distributed import rules
from extensions.distributed.rules import Collective, Counted
from rl_lab import format_table


class Load(NamedTuple):
    """The size of one rank's update."""

    rows: int = 4  # R
    tokens: int = 40  # T of this rank
    micro_batches: int = 2  # M
    parameters: int = 10  # P, float64


def _gradient(group: Counted, load: Load) -> None:
    weight = torch.nn.Parameter(torch.zeros(load.parameters, dtype=torch.float64))
    rules.reduce_gradients([weight], group)


def _in_each_backward(group: Counted, load: Load) -> None:
    for _ in range(load.micro_batches):
        _gradient(group, load)


def _token_mean(group: Counted, load: Load) -> None:
    rules.count(load.tokens, load.rows, load.micro_batches, group)
    _gradient(group, load)


def _group_statistics(group: Counted, load: Load) -> None:
    rules.group_statistics(torch.zeros(load.rows), torch.arange(load.rows), group)


def _clip(group: Counted, load: Load) -> None:
    rules.clip_after_reduction([torch.nn.Parameter(torch.zeros(load.parameters))], 1.0)


UPDATES: dict[str, Callable[[Counted, Load], None]] = {
    "counts": lambda group, load: rules.count(load.tokens, load.rows, load.micro_batches, group),
    "mean over tokens": _token_mean,
    "gradient, reduced once": _gradient,
    "gradient, reduced in each backward": _in_each_backward,
    "group statistics": _group_statistics,
    "whitening": lambda group, load: rules.whiten(torch.arange(float(load.tokens)), group=group),
    "clipping": _clip,
    "KL stop": lambda group, load: rules.kl_stop(0.0, load.tokens, 1.0, group),
    "logged mean": lambda group, load: rules.logged_mean(0.0, load.tokens, group),
}


def counted(rule: str, load: Load, group: object = None) -> list[Collective]:
    """The collectives that a rule of UPDATES calls for this load, in order, with the bytes that this rank puts in."""
    watched = Counted(group)
    UPDATES[rule](watched, load)
    return watched.calls


# ------------------------------------------------------------------------------------------ at scale, on paper


class Network(NamedTuple):
    """Assumptions about a cluster."""

    bytes_per_second: float = 50e9  # in and out of each rank
    latency: float = 10e-6  # seconds a message


def seconds(collective: Collective, ranks: int, network: Network = Network()) -> float:
    """Time of one collective by the usual model, a message costing latency + bytes / bandwidth.

    all_reduce, ring: 2 (W - 1) latency + 2 (W - 1)/W b / bandwidth. all_gather, recursive doubling: log2(W) latency +
    (W - 1) b / bandwidth. Source: Thakur, Rabenseifner and Gropp 2005.
    """
    if ranks == 1:
        return 0.0
    b, (bandwidth, latency) = collective.bytes, network
    if collective.name == "all_reduce":
        return 2 * (ranks - 1) * latency + 2 * (ranks - 1) / ranks * b / bandwidth
    return math.ceil(math.log2(ranks)) * latency + (ranks - 1) * b / bandwidth


PARAMETERS, BYTES_OF_A_GRADIENT, ROWS = 7e9, 2, 64
SCALES = (8, 64, 1024)


def scale_table() -> str:
    """Seconds of each part of an update at SCALES ranks, with the assumptions above."""
    load = Load(rows=ROWS)
    parts = {
        "gradient, reduced once": [Collective("all_reduce", int(PARAMETERS * BYTES_OF_A_GRADIENT))],
        **{name: counted(name, load) for name in ("counts", "group statistics", "whitening", "KL stop")},
    }
    rows = [
        [name, *(f"{sum(seconds(call, ranks) for call in calls):.2g} s" for ranks in SCALES)]
        for name, calls in parts.items()
    ]
    return format_table(["part of an update", *(f"{ranks} ranks" for ranks in SCALES)], rows)
