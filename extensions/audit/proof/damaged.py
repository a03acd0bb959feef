"""Truncated, random, wrong and hostile files: every one must end in one clear line."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import random
import struct
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Iterator

import numpy as np
import torch

import rl_lab
from extensions.audit.declared import Declared
from extensions.audit.proof.truth import CAPTURES, load, manifest
from extensions.audit.read.recording import read_recording
from extensions.audit.run import audit
from extensions.audit.say.report import printed
from extensions.audit.search.pairs import is_preference
from extensions.objectives import PREFERENCE_ROWS, ROWS


# ------------------------------------------------------------------------------------------ damaged files


class _Hostile:
    """Unpickled, it would write a file: if that file appears, something was run."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return exec, (f"with open({self.path!r}, 'w') as file: file.write('run')",)


def damaged_files(count: int, folder: Path, seed: int = 0) -> Iterator[tuple[Path, str]]:
    """Files to be refused (or audited) without a traceback, one after another. `folder/run` must never appear."""
    rng = random.Random(seed)
    numbers = np.random.default_rng(seed)
    entries = manifest()
    bytes_of = {entry["file"]: (CAPTURES / entry["file"]).read_bytes() for entry in entries}
    files = sorted(bytes_of)
    trap = str(folder / "run")

    def npz(arrays: dict, compressed: bool = True) -> bytes:
        stream = io.BytesIO()
        (np.savez_compressed if compressed else np.savez)(stream, **arrays)
        return stream.getvalue()

    def base() -> dict:
        return load(rng.choice(files))

    def truncated() -> tuple[str, bytes]:
        data = bytes_of[rng.choice(files)]
        return ".npz", data[: rng.randrange(len(data))]

    def flipped() -> tuple[str, bytes]:
        data = bytearray(bytes_of[rng.choice(files)])
        for _ in range(rng.randrange(1, 40)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return ".npz", bytes(data)

    def noise() -> tuple[str, bytes]:
        return rng.choice((".npz", ".pt", ".jsonl", ".safetensors")), rng.randbytes(rng.randrange(0, 3000))

    def wrong_shape() -> tuple[str, bytes]:
        arrays = base()
        for name in rng.sample(sorted(arrays), min(len(arrays), rng.randrange(1, 4))):
            value = arrays[name]
            arrays[name] = rng.choice(
                (
                    lambda: value.reshape(-1)[: rng.randrange(0, value.size + 1)],
                    lambda: np.stack([value, value]),
                    lambda: value.T,
                    lambda: value[..., None],
                    lambda: np.zeros((0,) + value.shape, value.dtype),
                    lambda: np.broadcast_to(value, (3,) + value.shape),
                )
            )()
        return ".npz", npz(arrays)

    def bad_numbers() -> tuple[str, bytes]:
        arrays = base()
        for name in rng.sample(sorted(arrays), min(len(arrays), rng.randrange(1, 4))):
            value = arrays[name]
            if value.dtype.kind == "f" and value.size:
                value = value.copy()
                flat = value.reshape(-1)
                flat[numbers.integers(0, flat.size, size=max(1, flat.size // rng.choice((1, 5, 50))))] = rng.choice(
                    (np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-30, 0.0)
                )
                arrays[name] = value
            elif value.dtype.kind in "iu":
                arrays[name] = value + rng.choice((10**12, -(10**12), 2**40))
        return ".npz", npz(arrays)

    def wrong_dtype() -> tuple[str, bytes]:
        arrays = base()
        name = rng.choice(sorted(arrays))
        with np.errstate(all="ignore"):
            import warnings

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                arrays[name] = arrays[name].astype(rng.choice(("U5", "S3", "c16", "i1", "u8", "f2", "?", "M8[s]")))
        return ".npz", npz(arrays)

    def missing_names() -> tuple[str, bytes]:
        arrays = base()
        for name in rng.sample(sorted(arrays), rng.randrange(0, len(arrays) + 1)):
            del arrays[name]
        if rng.random() < 0.3:
            arrays[rng.choice(("logps", "mask", "loss", "advantages", "x", "../x", "", "rewards"))] = (
                numbers.standard_normal(rng.randrange(1, 9))
            )
        return ".npz", npz(arrays)

    def swapped_names() -> tuple[str, bytes]:
        arrays = base()
        names = sorted(arrays)
        shuffled = names[:]
        rng.shuffle(shuffled)
        return ".npz", npz({new: arrays[old] for new, old in zip(names, shuffled)})

    def objects() -> tuple[str, bytes]:
        arrays = base()
        arrays[rng.choice(("logps", "mask", "rewards", "uid", "extra"))] = np.array([_Hostile(trap), {"a": 1}], dtype=object)
        return ".npz", npz(arrays)

    def hostile_pt() -> tuple[str, bytes]:
        stream = io.BytesIO()
        kind = rng.randrange(5)
        if kind == 0:
            torch.save({"logps": torch.ones(2, 3), "mask": _Hostile(trap)}, stream)
        elif kind == 1:
            torch.save(_Hostile(trap), stream)
        elif kind == 2:
            torch.save({"logps": torch.ones(1).expand(10**6, 10**6)}, stream)
        elif kind == 3:
            return ".pt", pickle.dumps(_Hostile(trap))
        else:
            torch.save(
                {"logps": torch.ones(4, 5), "mask": torch.ones(4, 5, dtype=torch.bool), "loss": torch.tensor(1.0)}, stream
            )
            data = bytearray(stream.getvalue())
            for _ in range(rng.randrange(1, 10)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            return ".pt", bytes(data)
        return ".pt", stream.getvalue()

    def lying_header() -> tuple[str, bytes]:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
            shape = rng.choice(((10**12,), (10**6, 10**6), (-1,), (2, -3), (0, 10**9), (3,)))
            header = str(
                {"descr": rng.choice(("<f8", "|O", "<c16", "<U1000000000", "|V0")), "fortran_order": False, "shape": shape}
            ).encode()
            header += b" " * (64 - (len(header) + 11) % 64) + b"\n"
            body = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + rng.randbytes(rng.randrange(64))
            archive.writestr("logps.npy", body)
            archive.writestr("mask.npy", rng.randbytes(40))
        return ".npz", stream.getvalue()

    def bomb() -> tuple[str, bytes]:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            archive.writestr("logps.npy", bytes(80 * 2**20))
        return rng.choice((".npz", ".pt")), stream.getvalue()

    bombs = [bomb()]

    def json_lines() -> tuple[str, bytes]:
        rows = []
        for _ in range(rng.randrange(1, 6)):
            T = rng.randrange(0, 6)
            entry: dict = {
                "logps": [-rng.random() for _ in range(T)],
                "old_logps": [-rng.random() for _ in range(T)],
                "rewards": rng.random(),
                "group_ids": rng.choice(("a", "b")),
                "advantages": rng.random(),
                "loss": rng.choice((0.5, 0.5, 0.7)),
            }
            change = rng.randrange(9)
            if change == 0:
                entry.pop(rng.choice(sorted(entry)))
            elif change == 1:
                entry[rng.choice(sorted(entry))] = rng.choice((None, "text", [], {}, [[1]], 10**400, [None], True, -1e999))
            rows.append(json.dumps(entry))
        text = "\n".join(rows)
        change = rng.randrange(6)
        if change == 0:
            text = text[: rng.randrange(len(text))]
        elif change == 1:
            text = text.replace(",", rng.choice((";", ",,", "")), 1)
        elif change == 2:
            text = "[" * 100_000
        elif change == 3:
            text += '\n{"logps": [' + ",".join(["0"] * 5000) + "]}" + '\n{"logps": [0]}' * 300
        return ".jsonl", text.encode()

    makers = (
        truncated,
        flipped,
        noise,
        wrong_shape,
        bad_numbers,
        wrong_dtype,
        missing_names,
        swapped_names,
        objects,
        hostile_pt,
        lying_header,
        json_lines,
    )
    for number in range(count):
        maker = makers[number % len(makers)] if number % 97 else None
        suffix, data = bombs[0] if maker is None else maker()
        path = folder / f"damaged{suffix}"
        path.write_bytes(data)
        yield path, "bomb" if maker is None else maker.__name__


def survive(count: int, folder: Path, seed: int = 0, progress: bool = False) -> dict[str, dict[str, int]]:
    """Read, audit and report damaged files: {kind: {"refused": n, "audited": n}}. AssertionError for anything else.

    Every other file is audited against a declared row.
    """
    outcome: dict[str, dict[str, int]] = {}
    rows = {True: Declared(PREFERENCE_ROWS["dpo"]), False: Declared(ROWS["grpo@trl-1.16.0"])}
    for number, (path, kind) in enumerate(damaged_files(count, folder, seed)):
        if progress and sys.stderr.isatty() and number % 50 == 0:
            print(f"\r{number}/{count} ", end="", file=sys.stderr, flush=True)
        kinds = outcome.setdefault(kind, {"refused": 0, "audited": 0})
        try:
            recording = read_recording(path)
            report = audit(recording, rows[is_preference(recording)] if number % 2 else None)
            rl_lab.json_text(report.as_json())
            printed(report, path.name)
            kinds["audited"] += 1
        except rl_lab.FileProblem as problem:
            if "\n" in str(problem) or not str(problem):
                raise AssertionError(f"not one line: {problem!r}") from problem
            kinds["refused"] += 1
        except Exception as problem:
            kept = Path(tempfile.gettempdir()) / f"audit-failed-{os.getpid()}-{number}{path.suffix}"
            kept.write_bytes(path.read_bytes())
            raise AssertionError(
                f"file {number} ({kind}, kept as {kept}) ended in {type(problem).__name__}: {problem}"
            ) from problem
        if (folder / "run").exists():
            raise AssertionError(f"file {number} ({kind}) ran what it carried")
    return outcome


def peak_memory() -> float:
    """Largest memory of this process so far, MB; NaN where the system does not say (Windows)."""
    try:
        import resource
    except ImportError:
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def run_damaged(count: int) -> bool:
    before = peak_memory()
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = survive(count, Path(folder), progress=True)
        except AssertionError as problem:
            print(f"failed: {problem}")
            return False
    print(
        rl_lab.format_table(
            ["kind of damage", "clear error", "audited"],
            [[k, str(v["refused"]), str(v["audited"])] for k, v in outcome.items()],
        )
    )
    print(f"{count} files, no traceback, nothing run, peak memory {peak_memory() - before:.0f} MB above the start")
    return True
