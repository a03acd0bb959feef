"""Recorded batches from files, safely: formats -> arrays, and the one table of names that arrays may have.

    from extensions.read import read_arrays

    arrays = read_arrays("batch.npz")        # name in the file -> array; .npz, .pt, .safetensors, .jsonl

Both the audit and `extensions.objectives --batch` read through here. A new format is a function beside its relatives and a
line in files.READERS; a new name is an entry of names.FIELDS.
"""

import rl_lab  # noqa: F401  (first: it answers Ctrl-C while torch loads)
from extensions.read.files import SUFFIXES, read_arrays
from extensions.read.names import CANONICAL, FIELDS, Field, did_you_mean, roles

__all__ = ["CANONICAL", "FIELDS", "SUFFIXES", "Field", "did_you_mean", "read_arrays", "roles"]
