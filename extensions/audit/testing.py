"""What the tests of the audit share."""

from __future__ import annotations

import numpy as np

from extensions.audit import Report, audit, parse_declared, recording_from


def audited(arrays: dict, declared: str | None = None, settings: tuple[str, ...] = ()) -> Report:
    """The report on these arrays, as the command would make it with --declared and --set."""
    row, numbers = parse_declared(declared, settings)
    return audit(recording_from({name: np.asarray(value) for name, value in arrays.items()}), row, numbers)
