"""A command in a process of its own: how it ends, what it prints, how much memory and time it takes, what it leaves.

Forked from this process, where torch is loaded already; a share of the cases starts Python anew. POSIX only.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Callable, NamedTuple, Sequence

import matplotlib.backends.backend_agg  # noqa: F401  loaded before the fork, so that a child does not pay for it
import matplotlib.backends.backend_pdf  # noqa: F401
import matplotlib.backends.backend_svg  # noqa: F401
import matplotlib.figure  # noqa: F401
import torch

import plot_results
import ppo_chain
import rl_lab
import token_objectives

LAB = Path(rl_lab.__file__).resolve().parent
ADDRESS_SPACE = 6 * 2**30  # bytes beyond those of this process: a case that wants more gets a MemoryError, not the machine
WALL = 120.0  # seconds: what has not ended by then waits for something
TRACEBACK = "Traceback (most recent call last)"


class Command(NamedTuple):
    """A command of the lab: what the user types, the words that Python sees, and what runs."""

    name: str
    words: tuple[str, ...]  # after `python`
    program: str  # sys.argv[0]
    run: Callable[[], object]
    module: object  # that has build_parser, or main alone
    findings: bool  # exit 1 says that something was found


def _top_level(module) -> Command:
    name = Path(module.__file__).name
    path = str(LAB / name)
    if module is plot_results:  # ends its commands itself
        return Command(name, (path,), path, lambda: runpy.run_path(path, run_name="__main__"), module, False)
    return Command(name, (path,), path, lambda: rl_lab.run_command(module.main), module, False)


@functools.cache
def commands() -> dict[str, Command]:
    """Every command: the four programs, and each folder of extensions/ with a __main__.py that can be imported here."""
    found = {}
    for module in (rl_lab, ppo_chain, token_objectives, plot_results):
        found[Path(module.__file__).name] = _top_level(module)
    for path in sorted((LAB / "extensions").glob("*/__main__.py")):
        name = f"extensions.{path.parent.name}"
        try:
            main = importlib.import_module(f"{name}.__main__").main
        except ImportError:
            continue  # a package of extensions/requirements.txt is missing
        module = sys.modules[main.__module__]
        has_findings = "--fail-on" in module.build_parser()._option_string_actions
        run = functools.partial(rl_lab.run_command, main, problem_status=2 if has_findings else 1)
        found[name] = Command(name, ("-m", name), str(path), run, module, has_findings)
    return found


class End(NamedTuple):
    code: int  # negative: the signal that ended it
    out: str
    err: str
    seconds: float  # of computing
    memory: int  # bytes beyond what this process holds itself
    waited: bool  # it had to be ended after WALL seconds


class Started:
    """A command that runs. `send` a signal, `finish` for its End."""

    def __init__(self, pid: int, streams: Path, base: int, process: subprocess.Popen | None = None):
        self.pid, self.streams, self.base, self.process = pid, streams, base, process
        self.begin = time.monotonic()
        self.status = None

    def send(self, number: int) -> None:
        if not self.ended():
            os.kill(self.pid, number)

    def ended(self) -> bool:
        if self.status is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.status = status, usage
                if self.process is not None:
                    self.process.returncode = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def finish(self, wall: float = WALL) -> End:
        pause, waited = 0.001, False
        while not self.ended():
            if time.monotonic() - self.begin > wall and not waited:
                waited = True
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
        status, usage = self.status
        texts = []
        for name in ("out", "err"):
            path = self.streams / name
            texts.append(path.read_text(encoding="utf-8", errors="replace") if path.exists() else "")
        noted = self.streams / "memory"
        memory = int(noted.read_text()) if noted.exists() else max(0, usage.ru_maxrss * 1024 - self.base)
        return End(os.waitstatus_to_exitcode(status), *texts, usage.ru_utime + usage.ru_stime, memory, waited)


def resident() -> int:
    """Bytes that this process holds now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def own_memory() -> dict[str, int]:
    """Of this process, in bytes: VmHWM, the most that it ever held; RssFile, of that code and files; RssAnon, the rest."""
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "RssFile", "RssAnon")}


def address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


OUTPUTS = ("file", "full", "closed pipe", "closed")


def _descriptor(out: str, streams: Path) -> int | None:
    if out == "closed":
        return None
    if out == "full":
        return os.open("/dev/full", os.O_WRONLY)
    if out == "closed pipe":
        read_end, write_end = os.pipe()
        os.close(read_end)
        return write_end
    return os.open(streams / "out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)


def _limits(space: int, seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def start(
    command: Command, words: Sequence[str], folder: Path, streams: Path, *, seconds: float, out="file", encoding="utf-8"
) -> Started:
    """Start a command in `folder`; what it prints goes into the folder `streams`."""
    torch.set_num_threads(1)  # a child has no copies of other threads
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    space, base = address_space() + ADDRESS_SPACE, resident()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])
        return Started(pid, streams, base)
    code = 70
    try:
        code = _in_child(command, words, folder, streams, space, seconds, out, encoding)
    finally:
        os._exit(code)


def _in_child(command, words, folder, streams, space, seconds, out, encoding) -> int:
    os.chdir(folder)
    given, errors = _descriptor(out, streams), os.open(streams / "err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(errors, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), encoding=encoding, errors="backslashreplace", write_through=True)
    sys.stdin = open(0, closefd=False)
    sys.stdout = None
    if given is None:
        os.close(1)
    else:
        os.dup2(given, 1)
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding=encoding)
    sys.argv = [command.program, *words]
    at_first = own_memory()["RssAnon"]
    _limits(space, seconds)
    if command.module is not plot_results:  # which sets its own; the others have this one since their first import
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, rl_lab.end_before_the_start)
    code = 0
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])
        command.run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError) as problem:  # what Python says when it cannot flush at its end
        print(f"Exception ignored: {problem!r}", file=sys.stderr)
        code = 120
    at_last = own_memory()  # code is loaded as it is first used and never let go: it is no part of what the command took
    (streams / "memory").write_text(str(max(0, at_last["VmHWM"] - at_last["RssFile"] - at_first)))
    return code


def start_anew(command: Command, words: Sequence[str], folder: Path, streams: Path, *, seconds: float) -> Started:
    """The same in a new Python, imports included."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(LAB), "PYTHONDONTWRITEBYTECODE": "1"}
    space = address_space() + ADDRESS_SPACE
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(open(streams / name[3:], "wb")) for name in ("stdout", "stderr")}
        process = subprocess.Popen(
            [sys.executable, *command.words, *words], cwd=folder, env=environment, stdin=subprocess.DEVNULL, **files,
            preexec_fn=lambda: _limits(space, seconds),
        )  # fmt: skip
    return Started(process.pid, streams, resident(), process)


def place_of(err: str) -> str:
    """The last line of the lab in a traceback, as file:line, and the exception."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', err)
    own = [f"{Path(file).relative_to(LAB)}:{line}" for file, line, _ in frames if file.startswith(f"{LAB}/")]
    own = [place for place in own if not place.startswith("verification/fuzz")]
    last = err.strip().splitlines()[-1]
    return f"{own[-1] if own else 'outside the lab'} {last.split(':')[0][:60]}"


def names_in(folder: Path) -> set[str]:
    return {os.path.relpath(os.path.join(place, name), folder) for place, _, names in os.walk(folder) for name in names}
