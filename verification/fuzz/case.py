"""What a kind of case is, what a failure is, and how a failing case is made small.

A case is drawn from its seed, its kind and its number alone, so `--seed S --only KIND --case N` makes it again.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple


class Failure(NamedTuple):
    """A promise that a case found broken."""

    rule: str  # which promise: "traceback", "value", "memory", ...
    where: str  # the atom, the command, or the line of the lab: failures of one rule at one place are one finding
    detail: str  # what was seen, and what was wanted

    @property
    def finding(self) -> tuple[str, str]:
        return self.rule, self.where


class Kind(NamedTuple):
    """One kind of case: how to draw one, to judge it in an empty folder, to show it, and to try simpler ones."""

    name: str
    draw: Callable[[random.Random], Any]
    judge: Callable[[Any, Path], Failure | None]
    show: Callable[[Any], str]
    simpler: Callable[[Any], Iterator[Any]]
    slice: int  # cases of this kind in the default suite, from number 0 on
    turn: float  # seconds before the next kind has its turn
    more: Callable[[], str] = str  # what the report adds about the cases of this kind


def case_of(kind: Kind, seed: int, number: int) -> Any:
    """Case `number` of a kind: the same one each time."""
    return kind.draw(random.Random(f"{seed} {kind.name} {number}"))


def shrink(kind: Kind, case: Any, failure: Failure, judged: Callable[[Any], Failure | None], seconds: float) -> tuple[Any, Failure]:
    """The simplest case found that breaks the same promise at the same place: simpler ones are taken as they come.

    Ends when no simpler case fails so, or when the time is over.
    """
    end = time.monotonic() + seconds
    progress = True
    while progress:
        progress = False
        for other in kind.simpler(case):
            if time.monotonic() > end:
                return case, failure
            seen = judged(other)
            if seen is not None and seen.finding == failure.finding:
                case, failure, progress = other, seen, True
                break
    return case, failure
