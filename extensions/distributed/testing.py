"""One set of four processes that all tests of this folder share: starting them is most of what such a test costs."""

from __future__ import annotations

import atexit
from typing import Callable

from extensions.distributed.ranks import Ranks
from extensions.distributed.watch import RankProblem

RANKS = 4
LIMIT = 300.0  # seconds for one job on a busy machine

_sets: list[Ranks] = []


def run(job: Callable, *arguments: object) -> list:
    """job(rank, *arguments) on each of the four, which start with the first job and after one that failed."""
    if not _sets:
        _sets.append(Ranks(RANKS))
        atexit.register(_sets[0].close)
    try:
        return _sets[0].run(job, *arguments, timeout=LIMIT)
    except RankProblem:
        atexit.unregister(_sets.pop().close)
        raise
