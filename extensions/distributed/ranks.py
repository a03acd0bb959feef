"""Where ranks come from: processes of this machine that this program starts and watches, or those of torchrun.

    with Ranks(4) as ranks:                      four processes, gloo on 127.0.0.1, any free port
        results = ranks.run(job, *arguments)     job(rank: Rank, *arguments) in each; the results in the order of ranks

    torchrun --standalone --nproc-per-node 4 -m ...      the same job:  with torchrun_rank() as rank: job(rank)

`job` is a function of a module, as the processes import it. A process that dies, raises, or does not answer in time ends
all of them, and RankProblem says which one it was. The engine is torch.distributed and torch.multiprocessing.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing

from extensions.distributed.watch import DEAD, RankProblem, Watch

HOST = "127.0.0.1"
TIMEOUT = 15.0  # seconds a rank waits for another one
START_TIMEOUT = 60.0  # the same, while ranks are started
GRACE = 1.0  # seconds in which a death that explains a failure may still be noticed


@dataclass
class Rank:
    """What a job knows about where it runs."""

    rank: int
    ranks: int
    watch: Watch
    groups: dict[int, dist.ProcessGroup | None] = field(default_factory=dict)

    @property
    def group(self) -> dist.ProcessGroup:
        return dist.group.WORLD

    def group_of(self, size: int) -> dist.ProcessGroup | None:
        """The group of ranks 0 to size - 1, made once; every rank calls it. None for a rank that is not in it."""
        if size == self.ranks:
            return self.group
        if size not in self.groups:
            made = dist.new_group(list(range(size)))
            self.groups[size] = made if self.rank < size else None
        return self.groups[size]


def _connect(store: dist.Store, rank: int, ranks: int, timeout: float) -> Rank:
    of_this_machine = os.environ.get("LOCAL_WORLD_SIZE", str(ranks)) == str(ranks)  # torchrun says how many
    if of_this_machine and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # or gloo asks the name of this machine for its address
    torch.set_num_threads(1)
    watch = Watch(dist.PrefixStore("watch", store), rank, ranks, START_TIMEOUT)
    watch.meet("the start")  # on a busy machine one rank imports torch long before another
    watch.timeout = timeout
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("gloo", store),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout),
    )
    return Rank(rank, ranks, watch)


# ------------------------------------------------------------------------------------------ processes started here


def _serve(rank: int, ranks: int, port: int, timeout: float, pipes: Sequence[Connection]) -> None:
    """What each process does: connect, then one job after another until None comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends its ranks
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    pipe = pipes[rank]
    store = dist.TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=START_TIMEOUT))
    here = _connect(store, rank, ranks, timeout)
    pipe.send_bytes(pickle.dumps(("done", None)))
    with contextlib.suppress(EOFError):  # the parent is gone
        while (asked := pickle.loads(pipe.recv_bytes())) is not None:
            job, arguments = asked
            try:
                answer = "done", job(here, *arguments)
            except RankProblem as problem:
                answer = "problem", str(problem)
            except Exception as problem:
                here.watch.leave(f"by {type(problem).__name__}: {problem}")
                answer = "raised", f"{type(problem).__name__}: {problem}"
            pipe.send_bytes(pickle.dumps(answer))
    here.watch.close()
    os._exit(0)  # the parent asked for it: nothing is left to tidy, and gloo's threads need no farewell


def _start_method() -> str:
    """forkserver on Linux: torch is imported once and not by each rank, which is most of what a start costs. Else spawn."""
    if sys.platform != "linux":
        return "spawn"
    # What DistributedDataParallel would import in every rank when the first one is made.
    multiprocessing.set_forkserver_preload(["extensions.distributed.ranks", "torch._dynamo"])
    with _deaf_to_ctrl_c():
        multiprocessing.forkserver.ensure_running()
    return "forkserver"


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """A process started inside ignores Ctrl-C from its first moment, also while it imports; its parent ends it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_with_the_parent() -> None:
    """A rank whose parent was killed, or interrupted while it started ranks, would wait for the others."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


class Ranks:
    """`count` processes that run jobs together. Use it in a `with`; after a RankProblem they are gone.

    port: of the store on 127.0.0.1; 0 takes any that is free. timeout: seconds a rank waits for another one.
    Raises RankProblem if the port is in use or a process does not come up.
    """

    def __init__(self, count: int, port: int = 0, timeout: float = TIMEOUT):
        self.count, self.timeout = count, timeout
        try:
            self.store = dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False)
        except RuntimeError as problem:
            if "EADDRINUSE" not in str(problem):
                raise
            raise RankProblem(f"port {port} of {HOST} is in use; without a port any free one is taken") from None
        # Its lines about ending processes are said in one sentence here.
        logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
        method = _start_method()
        context = torch.multiprocessing.get_context(method)
        self.pipes, theirs = zip(*(context.Pipe() for _ in range(count)))
        self.processes = torch.multiprocessing.start_processes(
            _serve,
            (count, self.store.port, timeout, theirs),
            nprocs=count,
            join=False,
            daemon=True,
            start_method=method,
        )
        for end in theirs:
            end.close()
        try:
            self._answers("start", START_TIMEOUT)
        except KeyboardInterrupt:
            self.close(kill=True)
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *about: object) -> None:
        self.close(kill=kind is not None)

    def run(self, job: Callable, *arguments: object, timeout: float | None = None) -> list:
        """job(rank, *arguments) on every rank; their results. `timeout`: seconds for the job, waits inside are shorter.

        Raises RankProblem, all processes ended, if one died, raised, or did not answer.
        """
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):  # a dead process is found below
                pipe.send_bytes(pickle.dumps((job, arguments)))
        return self._answers(getattr(job, "__name__", "job"), timeout)

    def _answers(self, job: str, timeout: float | None) -> list:
        answers: dict[int, object] = {}
        ends = None if timeout is None else time.monotonic() + timeout
        while len(answers) < self.count:
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            left = None if ends is None else max(0.0, ends - time.monotonic())
            ready = wait([*waiting, *self.processes.sentinels], left)
            if not ready:
                names = ", ".join(map(str, waiting.values()))
                self._fail(f"no answer from rank {names} within {timeout:g} s ({job})")
            for pipe in [one for one in ready if one in waiting]:
                try:
                    kind, answer = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._fail(self._death(job) or f"rank {waiting[pipe]} closed its connection ({job})")
                if kind == "done":
                    answers[waiting[pipe]] = answer
                elif kind == "raised":
                    self._fail(f"rank {waiting[pipe]}: {answer}")
                else:
                    self._fail((DEAD in answer or "collective failed" in answer) and self._death(job) or answer)
            if not any(one in waiting for one in ready):
                self._fail(self._death(job) or f"a process ended ({job})")
        return [answers[rank] for rank in range(self.count)]

    def _death(self, job: str) -> str | None:
        """Which process died and of what, if one did within the grace."""
        wait(self.processes.sentinels, GRACE)
        for rank, process in enumerate(self.processes.processes):
            code = process.exitcode
            if code is not None:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                return f"rank {rank} {how} ({job}); the others were ended"
        return None

    def _fail(self, sentence: str) -> None:
        self.close(kill=True)
        raise RankProblem(" ".join(sentence.split()))

    def close(self, kill: bool = False) -> None:
        """End all processes: asked to, or killed where they may hang in a collective."""
        for process, pipe in zip(self.processes.processes, self.pipes):
            with contextlib.suppress(OSError):
                process.kill() if kill else pipe.send_bytes(pickle.dumps(None))
        for process in self.processes.processes:
            process.join(0.0 if kill else GRACE)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self.pipes:
            pipe.close()


# ------------------------------------------------------------------------------------------ processes of torchrun


def torchrun_ranks() -> int:
    """How many ranks torchrun has started, of which this process is one; 0 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 0)) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def speak_once(parser: argparse.ArgumentParser) -> None:
    """Of torchrun's ranks, which all have the same flags, only rank 0 says what is wrong with them; all end with 2."""
    if torchrun_ranks() and os.environ.get("RANK", "0") != "0":
        parser.error = lambda message: parser.exit(2)


@contextlib.contextmanager
def torchrun_rank(timeout: float = TIMEOUT) -> Iterator[Rank]:
    """This process as one of torchrun's ranks. A RankProblem leaves one line on stderr, from the first rank that sees it."""
    store, rank, ranks = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    here = None
    try:
        here = _connect(store, rank, ranks, timeout)
        yield here
        here.watch.meet("the end")
    except RankProblem as problem:
        if here is not None:
            here.watch.end_silent()
        # All ranks notice; the first one speaks.
        first = here is None or here.watch.store.add("spoken", 1) == 1
        raise SystemExit(f"rank {rank}: {' '.join(str(problem).split())}" if first else 1) from None
    except Exception as problem:
        if here is not None:
            here.watch.leave(f"by {type(problem).__name__}: {problem}")
        raise
    finally:
        if here is not None:
            here.watch.close()
        if dist.is_initialized() and threading.current_thread() is threading.main_thread():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
