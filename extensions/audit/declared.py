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

from extensions.audit.read.recording import Recording
from extensions.audit.search.match import Match
from extensions.objectives import PREFERENCE_ROWS, ROWS, PreferenceRow, Row
from extensions.read.names import CANONICAL, NUMBERS


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
        if row.baseline == "gae" or row.credit == "reward_to_go":
            fields |= {"gamma": float(row.gamma)} | ({"lam": float(row.lam)} if row.baseline == "gae" else {})
        return {} if row.baseline == "given" and row.scale == "none" else fields


ADVANTAGE_DEFAULTS = {"credit": "outcome", "reward_parts": "sum_then_normalise", "scale": "none"}


def parse_declared(name: str | None, settings: Sequence[str]) -> tuple[Declared | None, dict[str, float]]:
    """--declared ROW and --set key=value -> the row with its fields set, and numbers for the recording.

    A key is a field of the declared row, or a number of a recording under any of its names; where it is both, as beta, it is
    set in both, and a value that is no number is the field's. Raises ValueError for an unknown name, a value that does not
    fit, and a key that is given twice.
    """
    known = {**ROWS, **PREFERENCE_ROWS}
    if name is not None and name not in known:
        raise ValueError(f"--declared: got {name!r}, wanted a row of the table{_near(name, known)}")
    row = known.get(name) if name else None
    fields = {f.name: f.type for f in dataclasses.fields(row) if f.name not in _WORDS} if row is not None else {}
    numbers: dict[str, float] = {}
    changes: dict[str, object] = {}
    given: dict[str, str] = {}
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign or not key:
            raise ValueError(f"--set: got {setting!r}, wanted key=value")
        role = _ROLE_OF_FIELD.get(key, CANONICAL.get(key, key))
        if role in given:
            raise ValueError(f"--set: {given[role]!r} and {setting!r} set the same number twice")
        given[role] = setting
        is_field = key in fields
        is_number = role in NUMBERS and not (is_field and fields[key] not in ("int", "float"))
        if is_field and isinstance(row, PreferenceRow) and key != "beta":
            is_number = False  # gamma is SimPO's margin there, not a discount
        if not is_field and not is_number:
            raise ValueError(f"--set: {key!r} is no number of a recording" + _no_field(key, fields))
        if is_field:
            changes[key] = _value_of_field(row, key, fields[key], text)
        if is_number:
            numbers[role] = _number(key, text)
            if role == "beta" and isinstance(row, Row):
                changes["kl_coef"] = numbers[role]
    if row is not None and changes:
        try:
            row = _named_as_in_the_table(replace(row, **changes), known)
        except ValueError as problem:
            raise ValueError(f"--set: {problem}") from problem
    return (Declared(row, tuple(changes)) if row is not None else None), numbers


_WORDS = ("name", "source", "differs")
"""Fields of a row that are text about it."""
_ROLE_OF_FIELD = {"kl_coef": "beta"}


def _named_as_in_the_table(row: Row | PreferenceRow, known: dict) -> Row | PreferenceRow:
    """dpo with loss=ipo is the row ipo: the name follows the choices of a preference row."""
    if not isinstance(row, PreferenceRow):
        return row
    choices = [f.name for f in dataclasses.fields(row) if f.type == "str" and f.name not in _WORDS]

    def same(other) -> bool:
        return isinstance(other, PreferenceRow) and all(getattr(other, name) == getattr(row, name) for name in choices)

    if same(known[row.name]):
        return row
    return replace(row, name=next((name for name, other in known.items() if same(other)), f"{row.name} with --set"))


def _near(name: str, known) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    return f"; near: {', '.join(near)}" if near else "; python -m extensions.objectives --list names them"


def _no_field(key: str, fields: dict) -> str:
    near = difflib.get_close_matches(key, [*fields, *CANONICAL], n=3)
    text = " and no field of the declared row" if fields else "; fields of a row need --declared"
    return text + (f"; near: {', '.join(near)}" if near else "")


def _value_of_field(row: Row | PreferenceRow, key: str, kind: str, text: str) -> object:
    """The text as this field of the row takes it: a number, a whole number, or one of the words in the table."""
    if kind == "float":
        return _number(key, text)
    if kind == "int":
        value = _number(key, text)
        if value != int(value):
            raise ValueError(f"--set {key}: got {text!r}, wanted a whole number")
        return int(value)
    if kind == "bool":
        words = {"true": True, "1": True, "false": False, "0": False}
        if text.lower() not in words:
            raise ValueError(f"--set {key}: got {text!r}, wanted true or false")
        return words[text.lower()]
    return text


def _number(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ValueError(f"--set {key}: got {text!r}, wanted a number")
    return value
