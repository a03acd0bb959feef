"""Signals at random moments of a run: every result stays the old one or becomes the new one, whole.

SIGINT and SIGTERM end a run with one line, exit 130 and 143, and leave no partial file and no new empty folder. SIGKILL may
leave partial files; the next run removes them. The moment is not repeated exactly: `--case` tries the same plan again.
"""

from __future__ import annotations

import collections
import functools
import os
import random
import re
import signal
import tempfile
import time
from pathlib import Path
from typing import Iterator, NamedTuple

from verification.fuzz import child, lines
from verification.fuzz.case import Failure, Kind
from verification.fuzz.lines import not_whole

SECONDS = 60.0
OLD = b"the earlier result\n"


class Run(NamedTuple):
    command: str
    words: str
    weight: float = 1.0


RUNS = {
    "bandit": Run("rl_lab.py", "--steps 12 --output out", 3),
    "seeds": Run("rl_lab.py", "--steps 4 --seeds 0-5 --algorithm grpo --output new/out", 2),
    "list": Run("rl_lab.py", "--steps 8 --algorithm dpo --preference-flips 0,3 --output out", 2),
    "chain": Run("ppo_chain.py", "--steps 8 --output new/out", 2),
    "tokens": Run("token_objectives.py", "--output out.json"),
    "figure": Run("plot_results.py", "--input results --output new/out.svg", 2),
    "png": Run("plot_results.py", "--input results --output out.png"),
    "audit": Run("extensions.audit", "good.npz --json out.json"),
    "objectives": Run("extensions.objectives", "--plot out.svg", 0.7),
    "settings": Run("extensions.settings", "train.py --fail-on never --json out.json", 0.5),
    "why": Run("extensions.why", "log.jsonl --json out.json", 0.5),
    "trust region": Run("extensions.trust_region", "--steps 2 --json out.json --plot out.svg"),
    "control": Run("extensions.control", "--train --updates 1 --episodes 2 --passes 1 --output out --json out.json --plot out.svg", 0.7),
    "gymnasium": Run(
        "extensions.gymnasium_ppo",
        "--steps 6 --rollout-rows 16 --environments 2 --evaluation-episodes 1 --time-limit 20 --output out",
    ),
    "tiny_lm": Run("extensions.tiny_lm", "--algorithm sft --steps 2 --demonstrations 4 --evaluation-prompts 10 --output out", 0.7),
}
VOLATILE = re.compile(rb'"(seconds[a-z_]*|latency)": [-+.\de]+')  # wall-clock numbers, which no two runs share
MANY_STATES = ("checkpoint.npz",)  # written several times in a run: any whole one will do
SIGNALS = {number.name: number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)}
HITS: dict[str, int] = collections.Counter()


class Interrupt(NamedTuple):
    run: str
    signal: str
    moment: float  # share of the time that the run takes; below 0: so many milliseconds after its first partial file
    again: float | None  # seconds after which the signal comes a second time
    old: bool  # earlier results stand there
    anew: bool  # in a new Python, imports included


def draw(rng: random.Random) -> Interrupt:
    known = [name for name, run in RUNS.items() if run.command in child.commands()]
    moment = rng.choice((rng.uniform(0, 1.1), rng.uniform(0.7, 1.05), -rng.choice((0.01, 0.3, 1, 3))))
    again = rng.choice((None, None, None, rng.uniform(0, 0.02)))
    run = rng.choices(known, [RUNS[name].weight for name in known])[0]
    return Interrupt(run, rng.choice(list(SIGNALS)), moment, again, rng.random() < 0.7, rng.random() < 0.15)


class Finished(NamedTuple):
    """What an undisturbed run writes, and how long it takes."""

    files: dict[str, bytes]
    seconds: float


@functools.cache
def undisturbed(name: str, anew: bool) -> Finished:
    with tempfile.TemporaryDirectory() as folder:
        work, streams = Path(folder, "work"), Path(folder, "streams")
        work.mkdir()
        streams.mkdir()
        lines.lay_out(work)
        before = child.names_in(work)
        begin = time.monotonic()
        end = started(name, work, streams, anew).finish()
        seconds = time.monotonic() - begin
        if end.code:
            raise RuntimeError(f"{RUNS[name]}: exit {end.code} without an interrupt: {end.err[-300:]}")
        return Finished({made: (work / made).read_bytes() for made in sorted(child.names_in(work) - before)}, seconds)


def started(name: str, work: Path, streams: Path, anew: bool) -> child.Started:
    command, words = child.commands()[RUNS[name].command], RUNS[name].words.split()
    start = child.start_anew if anew else child.start
    return start(command, words, work, streams, seconds=SECONDS)


def send(case: Interrupt, process: child.Started, work: Path, seconds: float) -> bool:
    """Wait for the moment and send the signal; whether the run had not ended before."""
    begin = time.monotonic()
    if case.moment < 0:
        while not process.ended() and not any(name.endswith(".partial") for name in child.names_in(work)):
            time.sleep(0.0002)
        time.sleep(-case.moment / 1000)
    else:
        while time.monotonic() - begin < case.moment * seconds and not process.ended():
            time.sleep(0.001)
    if process.ended():
        return False
    process.send(SIGNALS[case.signal])
    if case.again is not None:
        time.sleep(case.again)
        process.send(SIGNALS[case.signal])
    return True


def judge(case: Interrupt, folder: Path) -> Failure | None:
    work, streams = folder / "work", folder / "streams"
    for place in (work, streams):
        place.mkdir()
    lines.lay_out(work)
    new = undisturbed(case.run, case.anew)
    if case.old:
        for name in new.files:
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_bytes(OLD)
    before = names_and_folders(work)
    process = started(case.run, work, streams, case.anew)
    hit = send(case, process, work, new.seconds)
    end = process.finish()
    HITS[case.signal if hit and end.code else "ended before"] += 1
    return (
        ended_badly(case, end)
        or damaged(case, work, new, before, end.code == 0)
        or (tidied(case, work, folder, new) if case.signal == "SIGKILL" and hit else None)
    )


def fails(rule: str, case: Interrupt, detail: str) -> Failure:
    return Failure(rule, f"{RUNS[case.run].command} {case.signal}", detail)


def ended_badly(case: Interrupt, end: child.End) -> Failure | None:
    number = SIGNALS[case.signal]
    wanted = (0, -number) if number == signal.SIGKILL else (0, 128 + number)
    if child.TRACEBACK in end.err:
        return fails("traceback", case, f"{child.place_of(end.err)}: {end.err[-300:]!r}")
    if end.code not in wanted:
        return fails("exit status", case, f"{end.code}, wanted one of {wanted}; stderr {end.err[-200:]!r}")
    if end.code > 0 and not re.fullmatch(r"interrupted[^\n]*\n", end.err):
        return fails("not one line", case, f"stderr {end.err[-300:]!r}")
    return None


def names_and_folders(work: Path) -> set[str]:
    return child.names_in(work) | {os.path.relpath(place, work) for place, _, _ in os.walk(work)}


def damaged(case: Interrupt, work: Path, new: Finished, before: set[str], finished: bool) -> Failure | None:
    """Whether each file is the old or the new one, and nothing else is there."""
    for name, content in new.files.items():
        path = work / name
        if not path.exists():
            if case.old or finished:
                return fails("a file is gone", case, f"{name}: gone; finished {finished}")
            continue
        found = path.read_bytes()
        is_new = VOLATILE.sub(b"", found) == VOLATILE.sub(b"", content)
        if path.name in MANY_STATES and found != OLD:
            is_new = not_whole_archive(path) is None
        if not is_new and (finished or not case.old or found != OLD):
            return fails("half a file", case, f"{name}: {len(found)} bytes, neither the old nor the new ones ({not_whole(path)})")
    there = names_and_folders(work)
    known = before | set(new.files) | {str(parent) for name in new.files for parent in Path(name).parents}
    strays = sorted(there - known)
    if case.signal != "SIGKILL" and strays:
        return fails("partial file", case, f"left {strays[:3]}")
    empty = [name for name in there - before if (work / name).is_dir() and not any((work / name).iterdir())]
    if case.signal != "SIGKILL" and empty:
        return fails("empty folder", case, f"left {sorted(empty)[:3]}")
    return None


def not_whole_archive(path: Path) -> str | None:
    import zipfile

    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip()
    except zipfile.BadZipFile as problem:
        return str(problem)


def tidied(case: Interrupt, work: Path, folder: Path, new: Finished) -> Failure | None:
    """After a kill: the next run writes everything and removes what the dead one left."""
    streams = folder / "again"
    streams.mkdir()
    end = started(case.run, work, streams, False).finish()
    left = [name for name in child.names_in(work) if name.endswith(".partial")]
    if end.code or left:
        return fails("partial file", case, f"the run after the kill: exit {end.code}, still there {left[:3]}; {end.err[-200:]!r}")
    return damaged(case, work, new, child.names_in(work), True)


def show(case: Interrupt) -> str:
    run = RUNS[case.run]
    when = f"{-case.moment:g} ms after the first partial file" if case.moment < 0 else f"after {case.moment:.0%} of its time"
    twice = "" if case.again is None else f", again after {case.again * 1000:.0f} ms"
    place = f"{'over earlier results' if case.old else 'in an empty folder'}{', a new Python' if case.anew else ''}"
    return f"{run.command} {run.words}  # {case.signal} {when}{twice}; {place}"


def simpler(case: Interrupt) -> Iterator[Interrupt]:
    if case.again is not None:
        yield case._replace(again=None)
    if case.anew:
        yield case._replace(anew=False)


def more() -> str:
    """How many of the signals found a command at work."""
    return f"interrupts: {', '.join(f'{number} {name}' for name, number in sorted(HITS.items()))}" if HITS else ""


KIND = Kind("interrupts", draw, judge, show, simpler, slice=0, turn=10, more=more)
