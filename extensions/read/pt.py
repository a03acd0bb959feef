"""The .pt format of torch.save: looked through opcode by opcode before torch.load(weights_only=True) sees it."""

from __future__ import annotations

import pickle
import pickletools
import warnings
from pathlib import Path

import numpy as np
import torch

from extensions.read.limits import ZIP_PROBLEMS, Array, limit, open_zip
from rl_lab import FileProblem

_PT_NAMES = {
    "torch._utils _rebuild_tensor_v2",
    "collections OrderedDict",
    "torch.serialization _get_layout",
    *(f"torch {kind}Storage" for kind in "Float Double Half BFloat16 Long Int Short Char Byte Bool".split()),
}


def read_pt(path: Path, size: int) -> dict[str, Array]:
    """The tensors, numbers and lists of numbers of a saved dict; anything that could run code is refused."""
    with open_zip(path, size) as archive:
        try:
            records = {member.filename: member.file_size for member in archive.infolist()}
            pickles = [name for name in records if name.rpartition("/")[2] == "data.pkl"]
            if len(pickles) != 1:
                raise FileProblem("not a file of torch.save (no data.pkl inside), or one from before PyTorch 1.6")
            claimed = _look_through(archive.read(pickles[0]))
        except FileProblem:
            raise
        except ZIP_PROBLEMS as problem:
            raise FileProblem("damaged: its index cannot be read") from problem
    folder = pickles[0].removesuffix("data.pkl") + "data/"
    for key, nbytes in claimed:
        if records.get(folder + key) != nbytes:
            raise FileProblem(f"storage {key!r} is {records.get(folder + key)} bytes, and the index claims {nbytes}")
    try:
        with warnings.catch_warnings():  # of an unusual protocol: what cannot be loaded is refused below
            warnings.simplefilter("ignore")
            loaded = torch.load(path, weights_only=True, map_location="cpu")
    except MemoryError:
        raise
    except Exception as problem:  # the loader raises whatever its C++ half meets; every kind means the same here
        raise FileProblem(
            "cannot be loaded as plain tensors (weights_only); damaged, or it holds other objects"
        ) from problem
    if not isinstance(loaded, dict):
        raise FileProblem(f"holds a {type(loaded).__name__}, wanted a dict of name: tensor")
    arrays: dict[str, Array] = {}
    left = limit(size)
    for name, value in loaded.items():
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided:
                raise FileProblem(f"tensor {name!r} has layout {value.layout}, wanted a dense one")
            arrays[str(name)] = value.detach()
        elif isinstance(value, (bool, int, float, list, tuple)):
            needed = _bytes_of(value, str(name))
            if needed > left:
                raise FileProblem(f"{name!r}: its lists would unfold to {needed} bytes; refused (store a tensor)")
            left -= needed
            arrays[str(name)] = _from_lists(value, str(name))
    return arrays


MOST_LEVELS = 3
"""Lists in lists in a list: (N, T, V)."""


def _bytes_of(value, name: str) -> int:
    """Bytes that nested lists become as an array, counted without unfolding: a list that is met again is not counted again."""
    counted: dict[int, tuple[int, int]] = {}  # id -> numbers in it, bytes of its largest cell

    def count(item, level: int) -> tuple[int, int]:
        if isinstance(item, str):
            return 1, 4 * len(item)
        if not isinstance(item, (list, tuple)):
            return 1, 8
        if level == MOST_LEVELS:
            raise FileProblem(f"{name!r}: lists nested more than {MOST_LEVELS} deep; store a tensor")
        if id(item) not in counted:
            inner = [count(piece, level + 1) for piece in item]
            counted[id(item)] = (sum(n for n, _ in inner), max((cell for _, cell in inner), default=8))
        return counted[id(item)]

    cells, cell = count(value, 0)
    return cells * cell


def _from_lists(value, name: str) -> np.ndarray:
    try:
        made = np.asarray(value)
    except (ValueError, OverflowError) as problem:
        raise FileProblem(f"{name!r}: a list that is no array of numbers or strings") from problem
    if made.dtype.hasobject:
        raise FileProblem(f"{name!r}: wanted numbers of 64 bits, or lists of them")
    return made


_STORAGE_BYTES = {
    "Float": 4,
    "Double": 8,
    "Half": 2,
    "BFloat16": 2,
    "Long": 8,
    "Int": 4,
    "Short": 2,
    "Char": 1,
    "Byte": 1,
    "Bool": 1,
}


MOST_INSTRUCTIONS = 400_000
"""Of a torch index. One of tensors needs about 40 for each of them; a list of numbers needs one or two for each number."""


def _look_through(data: bytes) -> list[tuple[str, int]]:
    """Storages that a torch index claims, (key, bytes). Reads the opcodes without running them.

    Raises FileProblem for any name outside _PT_NAMES, so that what the loader is given can only build plain tensors.
    """
    claimed: list[tuple[str, int]] = []
    pushed: list[object] = []  # what the last opcodes left on the stack, names and numbers only
    memo: dict[int, object] = {}
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if number > MOST_INSTRUCTIONS:
                raise FileProblem(f"its index has more than {MOST_INSTRUCTIONS} instructions; store numbers as tensors")
            if opcode.name in ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID"):
                raise FileProblem("its index builds objects: only plain tensors are loaded, nothing is run")
            if opcode.name == "GLOBAL" and argument not in _PT_NAMES:
                raise FileProblem(f"its index calls for {argument}: only plain tensors are loaded, nothing is run")
            if opcode.name in ("BINPUT", "LONG_BINPUT", "PUT"):
                memo[argument] = pushed[-1] if pushed else None
            elif opcode.name in ("BINGET", "LONG_BINGET", "GET"):
                pushed.append(memo.get(argument))
            elif opcode.name == "BINPERSID":
                # The tuple ("storage", type, key, device, number of elements) has just been built.
                marker, kind, key, _, elements = [value for value in pushed[-6:] if value is not None][-5:]
                size = _STORAGE_BYTES[kind.removeprefix("torch ").removesuffix("Storage")]
                if marker != "storage" or not isinstance(elements, int):
                    raise FileProblem("its index names a storage in an unknown way")
                claimed.append((key, elements * size))
            elif isinstance(argument, (str, int)) and opcode.name != "PROTO":
                pushed.append(argument)
            elif opcode.name == "TUPLE":
                pushed.append(None)  # so that a PUT after it does not remember the last number
    except FileProblem:
        raise
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, pickle.UnpicklingError, OverflowError) as problem:
        raise FileProblem("its index is damaged, or names a storage in an unknown way") from problem
    return claimed
