"""Who is missing: every wait of a rank has an end, and the sentence at the end names the rank that others waited for.

A collective that one rank never calls hangs the others, and what torch.distributed says after its time-out names no rank
("Timed out waiting 5000ms for recv operation to complete"). Here each rank writes into the store of torch.distributed

    place/RANK    what it is about to do: "update 3", or why it left: "left after update 2: its own KL is above the limit"
    beat/RANK     a number that a thread of it counts up; it stands still when the rank was killed or stopped

and all meet under one name before the collectives of an update: `meet`. Who is not there within the time-out is looked
up. A meeting is one set and a few checks of the store.

Errors: RankProblem, whose text is one line. Source of the store, its waits and time-outs: torch.distributed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import threading
import time
from datetime import timedelta
from typing import Iterable, Iterator, Sequence

import torch.distributed as dist

BEAT_SECONDS = 0.25
FIRST_PAUSE, LONGEST_PAUSE = 2e-4, 2e-2  # seconds between two looks for the others
LOOK_SECONDS = 0.5  # so often a waiting rank looks whether those it waits for have left
SILENT_SECONDS = 1.5  # a heart that stands still for this long belongs to no living rank
GLOO_WORDS = ("gloo", "pair closure", "closed by peer")  # in what a collective says that was left alone
DEAD = "was killed or stopped"
LEFT = "left "  # how a place begins that nobody leaves again


class RankProblem(Exception):
    """One rank holds up or contradicts the others; the text is one line that names it."""


class Watch:
    """What a rank tells the others about itself, and how it finds out about them.

    store: of torch.distributed, shared by all ranks; clone() of it serves the heartbeat, as a wait holds the store.
    timeout: seconds a rank waits for the others at one place. Ends its thread at close().
    """

    def __init__(self, store: dist.Store, rank: int, ranks: int, timeout: float):
        self.store, self.rank, self.ranks, self.timeout = store, rank, ranks, timeout
        self.store.set_timeout(timedelta(seconds=timeout))
        self.visits: dict[str, int] = {}
        self.stood_still: list[int] = []  # ranks that were found silent
        self._closed = threading.Event()
        self.store.set(f"process/{rank}", f"{os.getpid()} {platform.node()}")
        self.at("started")
        if ranks > 1:
            threading.Thread(target=self._beat, args=(store.clone(),), daemon=True).start()

    def _beat(self, store: dist.Store) -> None:
        with contextlib.suppress(RuntimeError):  # the store ends with the process that holds it
            while not self._closed.wait(BEAT_SECONDS):
                store.add(f"beat/{self.rank}", 1)

    def close(self) -> None:
        self._closed.set()

    # -------------------------------------------------------------------------------------- what this rank says

    def at(self, place: str) -> None:
        """Say what comes next."""
        self.place = place
        self.store.set(f"place/{self.rank}", place)

    def leave(self, why: str) -> None:
        """Say that this rank takes part no longer, and why: the others read it when they wait for it in vain."""
        self.at(f"{LEFT}{why}")

    # -------------------------------------------------------------------------------------- how ranks meet

    def meet(self, place: str) -> None:
        """Return when every rank is at this place, for example "update 3, micro-batch 2"; each rank calls it.

        Raises RankProblem after the time-out: who is not here, where it is instead, and whether it lives.
        """
        if self.ranks == 1:
            return
        self.at(place)
        visit = self.visits[place] = self.visits.get(place, 0) + 1
        keys = [f"met/{place}/{visit}/{rank}" for rank in range(self.ranks)]
        self.store.set(keys[self.rank], "here")
        if not self._all_there(keys):
            raise RankProblem(self._missing(place, [r for r, key in enumerate(keys) if not self.store.check([key])]))

    def agree(self, what: str, text: str) -> None:
        """Return when every rank has the same `text`, its flags for example. Raises RankProblem naming one that differs."""
        if self.ranks == 1:
            return
        self.store.set(f"said/{what}/{self.rank}", text)
        self.meet(what)
        said = [self.store.get(f"said/{what}/{rank}").decode() for rank in range(self.ranks)]
        for rank, other in enumerate(said):
            if other != said[0]:
                raise RankProblem(f"rank {rank} has other {what} than rank 0: {other}, not {said[0]}")

    @contextlib.contextmanager
    def collectives(self, place: str) -> Iterator[None]:
        """Meet, then run collectives; one that fails because a rank ended in between is said with its number."""
        self.meet(place)
        try:
            yield
        except RuntimeError as problem:
            if not any(word in str(problem) for word in GLOO_WORDS):
                raise
            raise RankProblem(self._missing(self.place, [])) from problem

    def _all_there(self, keys: Sequence[str]) -> bool:
        """Look for all keys until the time-out; when who is absent has left, no longer than LOOK_SECONDS."""
        # Asked again and again: the store's own wait writes warnings of its own when it ends in vain.
        started, pause, looked = time.monotonic(), FIRST_PAUSE, 0.0
        while not self.store.check(list(keys)):
            waited = time.monotonic() - started
            if waited > self.timeout:
                return False
            if waited > looked + LOOK_SECONDS:
                looked = waited
                absent = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                if any(place.startswith(LEFT) for place in self._places(absent)):
                    return False
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return True

    def _places(self, ranks: Iterable[int]) -> list[str]:
        return [self.store.get(f"place/{r}").decode() if self.store.check([f"place/{r}"]) else "" for r in ranks]

    # -------------------------------------------------------------------------------------- the sentence

    def silent(self) -> list[int]:
        """Ranks whose heart stands still: killed, stopped, or their machine is gone. Takes SILENT_SECONDS."""
        before = [self.store.add(f"beat/{rank}", 0) for rank in range(self.ranks)]
        time.sleep(SILENT_SECONDS)
        after = [self.store.add(f"beat/{rank}", 0) for rank in range(self.ranks)]
        self.stood_still = [r for r in range(self.ranks) if r != self.rank and before[r] == after[r]]
        return self.stood_still

    def end_silent(self) -> None:
        """Kill the ranks of this machine that were found silent: a stopped process answers no other signal."""
        for rank in self.stood_still:
            pid, host = self.store.get(f"process/{rank}").decode().split(" ", 1)
            if host == platform.node():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def _missing(self, place: str, absent: Sequence[int]) -> str:
        places = self._places(range(self.ranks))
        # Who said that it left needs no heartbeat.
        silent = [] if absent and all(places[rank].startswith(LEFT) for rank in absent) else self.silent()
        absent = absent or [r for r, where in enumerate(places) if where != place] or silent
        if not absent:
            return f"at {place!r} a collective failed although all ranks are there and live"  # one may die just now
        about = []
        for rank, where in ((rank, places[rank]) for rank in absent):
            if where.startswith(LEFT):
                about.append(f"rank {rank} {where}")
            elif rank in silent:
                about.append(f"rank {rank} {DEAD}{f' at {where!r}' if where else ' before it started'}")
            else:
                about.append(f"rank {rank} is still at {where!r}")
        return f"at {place!r} rank {self.rank} waited in vain, {self.timeout:g} s at most: {'; '.join(about)}"
