"""Damaged and hostile files for everything that reads one: batches, reward tables, results, settings, logs, checkpoints.

Whatever the file, its reader ends within its time and memory with an answer or one line; nothing in the file is run.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

import rl_lab
from extensions.read import read_arrays
from verification.fuzz import child, damage
from verification.fuzz.case import Failure, Kind
from verification.fuzz.child import Command
from verification.fuzz.lines import broken, left_behind, stamp

SECONDS = 10.0  # of computing, for a file of at most a megabyte
READING = 24, 8 * 2**20  # a reader may hold this many times the file, and this much more
ALLOCATORS = 16 * 2**20  # what a process takes beside: code that is loaded late, pages half used
WORKING = 400 * 2**20  # what a command may hold beside the contents: its search, its figure


class Target(NamedTuple):
    """Something that reads a file: its command, the whole files to begin with, the words, where the file is put."""

    command: str
    files: Callable[[], dict[str, bytes]]
    words: Callable[[str], tuple[tuple[str, ...], ...]]  # file name -> ways to hand it over
    place: str = "{name}"
    weight: float = 1.0


def of_reader() -> Command:
    """extensions.read alone, which promises the tightest bound."""

    def main() -> None:
        read_arrays(Path(sys.argv[1]))

    return Command("extensions.read", (), str(child.LAB / "extensions" / "read" / "__main__.py"), lambda: rl_lab.run_command(main), None, False)


@functools.cache
def checkpoints() -> dict[str, bytes]:
    command = child.commands()["extensions.gymnasium_ppo"]
    with tempfile.TemporaryDirectory() as folder:
        words = "--steps 64 --rollout-rows 16 --environments 2 --evaluation-episodes 1 --stop-after 1 --output .".split()
        child.start(command, words, Path(folder), Path(folder), seconds=60).finish()
        made = Path(folder, "checkpoint.npz")
        return {"checkpoint.npz": made.read_bytes()} if made.exists() else {}


TARGETS = {
    "reader": Target("extensions.read", damage.batches, lambda name: ((name,),), weight=3),
    "audit": Target(
        "extensions.audit", damage.batches,
        lambda name: ((name,), (name, "--json", "out.json"), (name, "--declared", "grpo"), (name, "--declared", "dpo", "--set", "beta=0.1")),
        weight=4,
    ),
    "objectives": Target(
        "extensions.objectives", damage.batches,
        lambda name: (("--batch", name), ("--batch", name, "--objective", "grpo"), ("--batch", name, "--objective", "dpo")),
        weight=3,
    ),
    "table": Target(
        "rl_lab.py", lambda: damage.TABLES,
        lambda name: tuple(("--steps", "1", "--reward-table", name, "--algorithm", method) for method in ("all", "ppo", "dpo", "grpo")),
        weight=1.5,
    ),
    "plots": Target(
        "plot_results.py", lambda: damage.CURVES, lambda name: (("--input", "runs", "--output", "out.svg"),), "runs/{name}", weight=1.5
    ),
    "settings": Target(
        "extensions.settings", lambda: damage.SETTINGS,
        lambda name: ((name,), (name, "--json", "out.json"), (name, "--paper", "grpo"), (name, "--trainer", "trl.GRPOConfig"), (name, "--versus", name)),
        weight=3,
    ),
    "why": Target("extensions.why", lambda: damage.LOGS, lambda name: ((name,), (name, "--json", "out.json"), (name, "--beta", "0.1")), weight=2),
    "checkpoint": Target("extensions.gymnasium_ppo", checkpoints, lambda name: (("--resume", "--output", "runs"),), "runs/{name}", weight=0.5),
}  # fmt: skip
SPECIAL = ("fifo", "device", "folder", "missing", "link to itself", "empty", "sparse", "unreadable", "link")
NAMES = ("a\nb{s}", "n\udcff{s}", "é漢{s}", "a\x1b[31m{s}", "-{s}", "--x{s}", "r$\\frac${s}", " {s}", "x" * 200 + "{s}", "{{0}}{s}", "%s{s}", "{s}", "a{s}.gz", "a.npz", "a.pt", "a.jsonl", "a.yaml", "a.NPZ", "a")  # fmt: skip


class FileCase(NamedTuple):
    target: str
    base: str  # the whole file that is damaged
    damages: tuple[tuple[str, int], ...]  # name of a damage, and its own seed
    name: str  # of the file that is handed over
    words: int  # which way
    special: str = ""
    content: bytes | None = None  # while a failing case is made small


def content_of(case: FileCase) -> bytes:
    if case.content is not None:
        return case.content
    data = TARGETS[case.target].files().get(case.base, b"")
    for name, seed in case.damages:
        data = damage.damaged(name, seed, data)
    return data


def draw(rng: random.Random) -> FileCase:
    commands = child.commands()
    known = [name for name, target in TARGETS.items() if target.command in (*commands, "extensions.read")]
    target = rng.choices(known, [TARGETS[name].weight for name in known])[0]
    base = rng.choice(list(TARGETS[target].files()) or [""])
    usual = damage.damages_for(Path(base).suffix)
    damages = []
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        one = rng.choice(usual if rng.random() < 0.7 else damage.OF_BYTES)
        damages.append((one.__name__, rng.randrange(2**32)))
    if rng.random() < 0.02:
        damages = []
    name = base
    if target not in ("checkpoint", "plots") and rng.random() < 0.05:
        name = rng.choice(NAMES).format(s=Path(base).suffix)
    ways = len(TARGETS[target].words(name))
    special = rng.choice(SPECIAL) if rng.random() < 0.02 else ""
    return FileCase(target, base, tuple(damages), name, rng.randrange(ways), special)


def put(case: FileCase, work: Path) -> int:
    """Lay out the folder -> bytes of the file."""
    path = work / TARGETS[case.target].place.format(name=case.name)
    path.parent.mkdir(exist_ok=True)
    if case.target == "plots" and path.suffix == ".json":  # beside a whole CSV
        path.with_suffix(".csv").write_bytes(damage.CURVES["ppo.csv"])
    if case.special == "fifo":
        os.mkfifo(path)
    elif case.special == "device":
        path.symlink_to("/dev/zero")
    elif case.special == "folder":
        path.mkdir()
    elif case.special == "link to itself":
        path.symlink_to(path.name)
    elif case.special == "empty":
        path.touch()
    elif case.special == "sparse":
        path.touch()
        os.truncate(path, 20 * 2**30)
    elif case.special != "missing":
        data = content_of(case)
        path.write_bytes(data)
        if case.special == "unreadable":
            path.chmod(0)
        elif case.special == "link":
            path.rename(path.with_name("real"))
            path.symlink_to("real")
        return len(data)
    return 0


def judge(case: FileCase, folder: Path) -> Failure | None:
    target = TARGETS[case.target]
    command = of_reader() if case.target == "reader" else child.commands()[target.command]
    work, streams = folder / "work", folder / "streams"
    for place in (work, streams):
        place.mkdir()
    size = put(case, work)
    before = {name: stamp(work / name) for name in child.names_in(work)}
    times, more = READING
    memory = times * size + more + (ALLOCATORS if case.target == "reader" else WORKING)
    end = child.start(command, target.words(case.name)[case.words], work, streams, seconds=SECONDS + 5).finish()
    after = {name: stamp(work / name) for name in child.names_in(work)}
    seconds = SECONDS * max(1.0, size / 1e6)
    failure = broken(command, end, "file", seconds, memory) or left_behind(command, end, work, before, after)
    if failure is None and "run\n" in end.out.splitlines(keepends=True):
        return Failure("something was run", command.name, "a payload in the file was called")
    if failure is None and case.target == "reader" and end.code == 2:
        return Failure("exit status", command.name, "2 for a file problem")
    return failure


def show(case: FileCase) -> str:
    target = TARGETS[case.target]
    words = " ".join(map(ascii, target.words(case.name)[case.words]))
    if case.special and case.special not in ("link", "unreadable"):
        return f"{target.command} {words}  # the file is: {case.special}"
    data = content_of(case)
    how = " then ".join(name for name, _ in case.damages) or "as it is"
    text = f"{target.command} {words}  # {case.base}: {how}; {len(data)} bytes"
    return text + (f": {data!r}" if len(data) <= 300 else f" beginning {data[:80]!r}")


def simpler(case: FileCase) -> Iterator[FileCase]:
    """Fewer damages, a plain name, fewer bytes."""
    if case.name != case.base and case.base:
        yield case._replace(name=case.base)
    if case.words:
        yield case._replace(words=0)
    if case.special:
        yield case._replace(special="")
        return
    if case.content is None:
        for place in range(len(case.damages)):
            yield case._replace(damages=case.damages[:place] + case.damages[place + 1 :])
    data = content_of(case)
    if Path(case.base).suffix in (".npz", ".pt", ".npy") or len(data) > 100_000:
        return  # an archive that lost bytes is refused before what failed is reached
    step = max(1, len(data) // 2)
    while step:
        for start in range(0, len(data), step):
            yield case._replace(content=data[:start] + data[start + step :])
        step //= 2


KIND = Kind("files", draw, judge, show, simpler, slice=30, turn=15)
