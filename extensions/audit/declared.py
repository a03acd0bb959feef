"""What the user says the trainer follows: --declared ROW and --set key=value.

A declaration is a row of the objectives table with some fields set. It is compared with what the search found in the words
of a match, so it is put into those words here, and a choice that has no effect on this recording is left out.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass, replace
from typing import Sequence

import numpy as np

from extensions.audit.read.recording import CANONICAL, NUMBERS, Recording
from extensions.audit.search.match import Match
from extensions.objectives import PREFERENCE_ROWS, ROWS, PreferenceRow, Row


@dataclass(frozen=True)
class Declared:
    """The row a user says the trainer follows, and its choices in the words of a match."""

    row: Row | PreferenceRow
    set_fields: tuple[str, ...] = ()

    @property
    def is_pairs(self) -> bool:
        return isinstance(self.row, PreferenceRow)

    def loss_fields(self, recording: Recording) -> dict:
        """The loss part under the names of Match.fields; what has no effect is left out."""
        row = self.row
        fields: dict = {"ratio": row.ratio, "reduction": row.reduction}
        if row.ratio != "none":
            fields["surrogate"] = row.surrogate
            if row.reads("clip_low"):
                low = recording.number("clip_low", row.clip_low) if "clip_low" not in self.set_fields else row.clip_low
                high = recording.number("clip_high", row.clip_high) if "clip_high" not in self.set_fields else row.clip_high
                if row.surrogate == "cispo":
                    low, high = row.clip_low, row.clip_high
                fields |= {"clip_low": float(low), "clip_high": float(high)}
        if row.entropy_coef:
            fields["entropy_coef"] = row.entropy_coef
        if row.off_policy_rows == "drop":
            fields |= {"off_policy_rows": "drop", "off_policy_threshold": row.off_policy_threshold}
        if row.reduction == "mean_over_window" and "num_items_in_batch" not in recording.numbers:
            fields["window_unknown"] = True  # a mean over any number of tokens may be it
        coef = recording.number("beta", row.kl_coef) if "kl_coef" not in self.set_fields else row.kl_coef
        reference, logps = recording.get("ref_logps"), recording.get("logps")
        is_visible = reference is None or logps is None or not np.array_equal(reference, logps)
        if row.kl != "none" and row.kl_place == "loss" and coef and not is_visible:
            pass  # policy and reference are equal: the term is 0 with gradient 0, whatever it is
        elif row.kl != "none" and row.kl_place == "loss" and coef:
            fields |= {"kl": row.kl, "kl_coef": float(coef), "kl_weight": row.kl_weight, "kl_gradient": row.kl_gradient}
        else:
            fields["kl"] = "none"
        if row.accumulation == "divide" and recording.number("accumulation_steps", 1) > 1:
            fields["accumulation"] = "divide"
        return fields

    def advantage_fields(self) -> dict:
        row = self.row
        fields = {"baseline": row.baseline, "scale": row.scale, "credit": row.credit, "reward_parts": row.reward_parts}
        if row.scale != "none":
            fields |= {"std_ddof": row.std_ddof, "std_eps": float(row.std_eps), "std_guard": row.std_guard}
        return {} if row.baseline == "given" and row.scale == "none" else fields


ADVANTAGE_DEFAULTS = {"credit": "outcome", "reward_parts": "sum_then_normalise", "scale": "none"}


def parse_declared(name: str | None, settings: Sequence[str]) -> tuple[Declared | None, dict[str, float]]:
    """--declared ROW and --set key=value -> the row with its fields set, and numbers for the recording.

    Raises ValueError for an unknown name or a value that does not fit.
    """
    numbers: dict[str, float] = {}
    changes: dict[str, object] = {}
    known = {**ROWS, **PREFERENCE_ROWS}
    if name is not None and name not in known:
        import difflib

        near = difflib.get_close_matches(name, known, n=3)
        raise ValueError(
            f"--declared: got {name!r}, wanted a row of the table"
            + (f"; near: {', '.join(near)}" if near else "; python -m extensions.objectives --list names them")
        )
    row = known.get(name) if name else None
    types = {f.name: f.type for f in dataclasses.fields(row)} if row is not None else {}
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign or not key:
            raise ValueError(f"--set: got {setting!r}, wanted key=value")
        canonical = CANONICAL.get(key, key)
        used = False
        if key in types and key not in ("name", "source", "differs"):
            value: object = text
            if types[key] in ("float", "int"):
                value = _number(key, text)
                value = int(value) if types[key] == "int" else value
            changes[key] = value
            used = True
        if canonical in NUMBERS:
            numbers[canonical] = _number(key, text)
            used = True
        if canonical == "beta" and row is not None and isinstance(row, Row):
            changes["kl_coef"] = _number(key, text)
        if key == "kl_coef":
            numbers["beta"] = _number(key, text)
        if not used:
            raise ValueError(
                f"--set: {key!r} is no number of a recording"
                + (" and no field of the declared row" if row else "; fields of a row need --declared")
            )
    if row is not None and changes:
        row = replace(row, **changes)
    return (Declared(row, tuple(changes)) if row is not None else None), numbers


def _number(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ValueError(f"--set {key}: got {text!r}, wanted a number")
    return value
