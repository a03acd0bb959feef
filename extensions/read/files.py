"""A file that a user hands over -> its arrays, by the suffix. Every problem is a FileProblem of one line."""

from __future__ import annotations

from pathlib import Path

from extensions.read.jsonl import read_jsonl
from extensions.read.limits import Array, bytes_in_use, refuse_above
from extensions.read.npz import read_npz
from extensions.read.pt import read_pt
from rl_lab import FileProblem, one_line


def read_safetensors(path: Path, size: int) -> dict[str, Array]:
    """The tensors of a .safetensors file; needs that package."""
    try:
        from safetensors.torch import load_file
    except ImportError as problem:
        raise FileProblem("reading .safetensors needs the package safetensors; or record an .npz file") from problem
    try:
        return dict(load_file(path))
    except MemoryError:
        raise
    except Exception as problem:  # the package's own error type, and what its compiled half raises
        raise FileProblem("not a whole .safetensors file") from problem


READERS = {".npz": read_npz, ".pt": read_pt, ".safetensors": read_safetensors, ".jsonl": read_jsonl}
SUFFIXES = tuple(READERS)


def read_arrays(path: Path) -> dict[str, Array]:
    """The arrays of an .npz, .pt, .safetensors or .jsonl file under the names they have there.

    Nothing is executed, only a regular file is opened, and no size that a file claims is believed: contents that would take
    more than 24 times the file (plus 8 MB) are refused before they are unfolded. Raises rl_lab.FileProblem.
    """
    shown = one_line(path)
    try:
        if not Path(path).is_file():
            Path(path).stat()  # says why: no such file, too many links
            raise FileProblem(f"{shown}: not a regular file; wanted {', '.join(SUFFIXES)}")
        size = Path(path).stat().st_size
    except OSError as problem:
        raise FileProblem(f"{shown}: {problem.strerror}") from problem
    except (ValueError, RuntimeError) as problem:
        raise FileProblem(f"{shown}: not a usable file name ({one_line(problem)})") from problem
    if size == 0:
        raise FileProblem(f"{shown}: empty file; was the recording interrupted?")
    suffix = Path(path).suffix
    reader = READERS.get(suffix.lower())
    if reader is None:
        raise FileProblem(f"{shown}: suffix {suffix or '(none)'!r} is not known; wanted one of {', '.join(SUFFIXES)}")
    try:
        arrays = {one_line(name): value for name, value in reader(Path(path), size).items()}
        refuse_above(sum(map(bytes_in_use, arrays.values())), size)
        return arrays
    except FileProblem as problem:
        raise FileProblem(f"{shown}: {one_line(problem)}") from problem
    except MemoryError as problem:
        raise FileProblem(f"{shown}: does not fit into memory") from problem
    except OSError as problem:
        raise FileProblem(f"{shown}: {problem.strerror or 'cannot be read'}") from problem
