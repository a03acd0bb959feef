"""How large a file's contents may become."""

from __future__ import annotations

import zipfile
import zlib
import tokenize
from pathlib import Path

import numpy as np
import torch

from rl_lab import FileProblem

Array = np.ndarray | torch.Tensor
"""What a reader returns for one name: a numpy array; a torch tensor where numpy has no such type (bfloat16)."""
MOST_TIMES = 24
"""Padding of zeros folds to a tenth, and float32 doubles on reading: contents may take this many times the file."""
SPARE_BYTES = 8 * 2**20
"""... and this much more, so that a small file may hold a much padded batch."""


def limit(size: int) -> int:
    """Bytes that a file of this size may become."""
    return SPARE_BYTES + MOST_TIMES * size


def refuse_above(needed: int, size: int) -> None:
    """Raise FileProblem for contents that would take far more than their file."""
    if needed > limit(size):
        raise FileProblem(f"{size} bytes would become {needed}, wanted at most {limit(size)}; refused")


def bytes_in_use(value: Array) -> int:
    """Bytes of an array once its numbers take 8 bytes each, as they do here."""
    cells = value.numel() if isinstance(value, torch.Tensor) else value.size
    is_flag = value.dtype in (torch.bool, np.dtype(bool))
    return cells * (1 if is_flag else max(8, value.dtype.itemsize))


ZIP_PROBLEMS = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    OverflowError,
    RuntimeError,
    NotImplementedError,
    SyntaxError,
    RecursionError,
    AttributeError,
    UnicodeError,
    tokenize.TokenError,
)
"""What zipfile and the .npy header parser raise on damaged input (lzma's and bz2's own errors are OSError and EOFError)."""


def open_zip(path: Path, size: int) -> zipfile.ZipFile:
    """The archive, once the sizes that it claims have been found to be in proportion. Raises FileProblem."""
    try:
        archive = zipfile.ZipFile(path)
    except ZIP_PROBLEMS as problem:
        raise FileProblem("not a whole zip archive; truncated, or another format under this suffix") from problem
    unfolded = sum(max(member.file_size, 0) for member in archive.infolist())
    if unfolded > limit(size):
        archive.close()
        raise FileProblem(f"would unfold from {size} to {unfolded} bytes; refused")
    return archive
