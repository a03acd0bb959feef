"""The .npz format, read without numpy's own loader: nothing is unpickled, and no size that a header claims is believed."""

from __future__ import annotations

import io
import math
import warnings
import zipfile
from pathlib import Path

import numpy as np

from extensions.read.limits import ZIP_PROBLEMS, open_zip
from rl_lab import FileProblem


def read_npz(path: Path, size: int) -> dict[str, np.ndarray]:
    """The arrays of an .npz file; pickles, and members that are no .npy, are refused."""
    with open(path, "rb") as file:
        if file.read(6) == b"\x93NUMPY":
            raise FileProblem('one array without a name (.npy); write numpy.savez("batch.npz", logps=..., mask=...)')
    with open_zip(path, size) as archive:
        arrays = {}
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            try:
                with archive.open(member) as stream:
                    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                        raise FileProblem(f"{name!r} is compressed in a way numpy does not write")
                    arrays[name] = _npy_array(name, stream.read())
            except FileProblem:
                raise
            except ZIP_PROBLEMS as problem:
                raise FileProblem(f"array {name!r} is damaged or not in .npy form") from problem
    return arrays


def _npy_array(name: str, data: bytes) -> np.ndarray:
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read_header is None:
        raise FileProblem(f"array {name!r}: .npy version {version}, wanted 1.0 or 2.0")
    with warnings.catch_warnings():  # of a header written by Python 2: it is read, or refused below
        warnings.simplefilter("ignore")
        shape, fortran, dtype = read_header(stream)
    if dtype.hasobject:
        raise FileProblem(f"array {name!r} holds Python objects; they are never unpickled: store numbers or strings")
    count = math.prod(shape)
    start = stream.tell()
    if any(extent < 0 for extent in shape) or count * dtype.itemsize != len(data) - start:
        raise FileProblem(
            f"array {name!r}: its header claims shape {shape} of {dtype}, its data are {len(data) - start} bytes"
        )
    if count and not dtype.itemsize:
        raise FileProblem(f"array {name!r}: dtype {dtype} holds nothing")
    return np.frombuffer(data, dtype, count, start).reshape(shape, order="F" if fortran else "C")
