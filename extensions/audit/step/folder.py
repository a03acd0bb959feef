"""The files of one optimiser step: rank0_mb0.npz, rank0_mb1.npz, ... -> recordings in order, and whether any is missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from extensions.audit.read.recording import Recording, read_recording
from extensions.read import SUFFIXES
from rl_lab import FileProblem, one_line

NAME = re.compile(r"rank(\d+)_(?:mb|micro_batch)(\d+)")


class Part(NamedTuple):
    """One file: what one rank did with one micro-batch."""

    name: str
    rank: int
    micro_batch: int
    recording: Recording


def read_step(folder: Path) -> list[Part]:
    """Every recording in the folder, ordered by rank and micro-batch; rank and micro_batch from inside, else from the name.

    Raises rl_lab.FileProblem: nothing to read, two files for one place, a file of the step missing, files of two steps.
    """
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and not path.name.startswith("."))
    if not paths:
        steps = sorted(path.name for path in folder.iterdir() if path.is_dir())
        hint = f"; it holds folders: audit one of them, {', '.join(steps[:3])}" if steps else ""
        raise FileProblem(f"{one_line(folder)}: no recording (rank0_mb0.npz, ...) in this folder{one_line(hint)}")
    parts = sorted((_part(path) for path in paths), key=lambda part: (part.rank, part.micro_batch))
    places = [(part.rank, part.micro_batch) for part in parts]
    for place in places:
        if places.count(place) > 1:
            raise FileProblem(f"{one_line(folder)}: two files for rank {place[0]}, micro-batch {place[1]}")
    _check_whole(folder, parts)
    return parts


def _part(path: Path) -> Part:
    recording, found = read_recording(path), NAME.search(path.stem)
    place = []
    for name, group in (("rank", 1), ("micro_batch", 2)):
        number = recording.number(name, float(found.group(group)) if found else None)
        if number is None or number != int(number):
            raise FileProblem(f"{one_line(path)}: no {name} inside, and none in the name; wanted a name as rank0_mb0.npz")
        place.append(int(number))
    return Part(path.name, place[0], place[1], recording)


def _check_whole(folder: Path, parts: list[Part]) -> None:
    for name in ("world_size", "accumulation_steps", "step"):
        seen = {part.recording.number(name) for part in parts} - {None}
        if len(seen) > 1 and name != "accumulation_steps":
            values = " and ".join(f"{value:g}" for value in sorted(seen))
            raise FileProblem(f"{one_line(folder)}: {name} is {values}: files of two steps?")
    ranks = int(parts[0].recording.number("world_size") or 1 + max(part.rank for part in parts))
    for rank in range(ranks):
        own = [part for part in parts if part.rank == rank]
        count = max((int(part.recording.number("accumulation_steps") or 1 + part.micro_batch) for part in own), default=1)
        missing = set(range(count)) - {part.micro_batch for part in own}
        if missing:
            raise FileProblem(
                f"{one_line(folder)}: rank{rank}_mb{min(missing)} is missing; wanted {ranks} ranks and, on rank {rank}, "
                f"{count} micro-batches (world_size and accumulation_steps inside)"
            )
    if max(part.rank for part in parts) >= ranks:
        raise FileProblem(f"{one_line(folder)}: rank {parts[-1].rank} of world_size {ranks}: files of two runs?")
