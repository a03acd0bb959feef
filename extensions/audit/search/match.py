"""What one hypothesis for a loss is, in words, and how it compares with a declared row."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from extensions.audit.tolerance import SETTING, SHOWN
from extensions.objectives import CHOICES, NUMBERS, ROWS, Row

Extra = tuple[dict, float, "str | None"]
"""An entropy or critic term beside the policy loss: its fields, its amount, the mistake in it."""


@dataclass(frozen=True)
class Match:
    """One hypothesis that reproduces what was reported. fields: choices and numbers under the names of Row."""

    fields: dict
    mistakes: tuple[str, ...] = ()
    factor: float = 1.0
    by: str = "value"  # "gradient and value", "gradient", "value"
    residual: float | None = None  # relative, of the gradient
    gap: float | None = None  # reported minus recomputed loss
    remarks: tuple[str, ...] = ()
    order: tuple = ()
    weak: bool = False  # a number was solved that the recording should hold

    def label(self) -> str:
        return describe(self.fields) + (f", times {self.factor:.6g}" if abs(self.factor - 1) > SHOWN else "")


@dataclass
class LossResult:
    matches: list[Match] = field(default_factory=list)  # without a mistake, best first
    mistakes: list[Match] = field(default_factory=list)  # with one, best first
    tried: int = 0
    nearest: Match | None = None  # smallest residual when nothing matches
    proportional: Match | None = None  # the gradient fits up to a factor that nothing recorded explains
    proportional_mistake: Match | None = None  # the same, of a form with a mistake that has the value too
    chance: float = 0.0  # expected number of matches by accident among the values compared
    zero: bool = False  # the reported loss is 0 within rounding: its value tells nothing
    remarks: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def describe(fields: dict) -> str:
    """The choices of a hypothesis in one line."""
    f = fields
    if "value_loss" in f and "ratio" not in f and "kl" not in f:
        parts = [
            f"value loss {f['value_loss']}"
            + (f" clip {f['value_clip']:g}" if "value_clip" in f else "")
            + f" times {f.get('value_coef', 1):g}"
        ]
    elif f.get("token_losses"):
        parts = ["token losses as recorded"]
    elif f.get("ratio") == "none":
        parts = ["A l (no ratio)"]
    else:
        text = f"{f.get('ratio', 'token')} ratio, {f.get('surrogate', 'clip')}"
        if "clip_low" in f:
            text += f" -{f['clip_low']:g}/+{f['clip_high']:g}"
        if "ratio_cap" in f and f.get("surrogate") in ("dual_clip", "capped_clip"):
            text += f" c {f['ratio_cap']:g}"
        parts = [text]
    if f.get("off_policy_rows") == "drop":
        parts.append(f"answers with A < 0 and lag above {f['off_policy_threshold']:g} dropped")
    if f.get("reduction"):
        text = f["reduction"].replace("_", " ")
        if f["reduction"] == "sum_over_budget":
            text += f" {f['budget']:g}"
        if f.get("rows_counted") == "nonempty":
            text += " (non-empty rows)"
        if f.get("accumulation") == "divide":
            text += " / accumulation steps"
        parts.append(text)
    if f.get("kl", "none") != "none":
        text = f"+ {f.get('kl_coef', 0):.4g} {f['kl']}"
        text += " times ratio" if f.get("kl_weight") == "ratio" else ""
        text += " with the gradient of k2" if f.get("kl_gradient") == "k2" else ""
        text += " to the old policy" if f.get("kl_anchor") == "old" else ""
        parts.append(text)
    if f.get("entropy_coef"):
        parts.append(f"- {f['entropy_coef']:g} entropy")
    if f.get("value_coef") and "ratio" in f:
        parts.append(
            f"+ {f['value_coef']:g} value loss {f['value_loss']}"
            + (f" clip {f['value_clip']:g}" if "value_clip" in f else "")
        )
    return ", ".join(parts)


def _unique(matches: list[Match]) -> list[Match]:
    seen, kept = set(), []
    for match in matches:
        key = (tuple(sorted((k, str(v)) for k, v in match.fields.items())), match.mistakes, round(match.factor, 9))
        if key not in seen:
            seen.add(key)
            kept.append(match)
    return kept


LOSS_DEFAULTS = {"kl": "none", "accumulation": "none", "off_policy_rows": "keep"}
"""What a match means by a field that it leaves out."""
_BANDED = tuple(name for name in CHOICES["surrogate"] if "clip_low" in NUMBERS.get(("surrogate", name), ()))


def against(fields: dict, declared: dict) -> list[str]:
    """Names of the declared choices that a match contradicts. A choice without effect in either is not compared."""
    full = {**LOSS_DEFAULTS, **fields}
    names = differing(full, declared)
    if full.get("token_losses"):
        return [name for name in names if name == "reduction"]
    if declared.get("window_unknown") and full.get("reduction") in ("mean_over_tokens", "mean_over_window"):
        names = [name for name in names if name != "reduction"]
    if full.get("surrogate") not in _BANDED:
        names = [name for name in names if name not in ("clip_low", "clip_high")]
    if full["kl"] == "none" and declared.get("kl", "none") == "none":
        names = [name for name in names if not name.startswith("kl")]
    return names


def differing(fields: dict, declared: dict) -> list[str]:
    """Names that both hold with unequal values; numbers are equal within a thousandth."""
    out = []
    for name in declared.keys() & fields.keys():
        got, wanted = fields[name], declared[name]
        if isinstance(wanted, float) and isinstance(got, (int, float)):
            same = got == wanted or math.isclose(got, wanted, rel_tol=SETTING)
        else:
            same = got == wanted
        if not same:
            out.append(name)
    return sorted(out, key=list(declared).index)


_SETTABLE = frozenset(
    "clip_low clip_high kl_coef ratio_cap value_coef value_clip value_loss entropy_coef off_policy_threshold tau_positive "
    "tau_negative".split()
)


def rows_with(fields: dict) -> list[str]:
    """Named rows of the table whose loss part makes the choices of a match (constants that a user sets are not compared)."""
    if "value_loss" in fields and "ratio" not in fields:  # the critic alone
        return [name for name, row in ROWS.items() if row.value_coef and _has_critic(row, fields)]
    return [name for name, row in ROWS.items() if _makes(row, fields)]


def _has_critic(row: Row, fields: dict) -> bool:
    return row.value_loss == fields["value_loss"] and fields.get("reduction") in (
        None,
        row.reduction,
        "mean_over_tokens" if row.reduction == "mean_over_window" else row.reduction,
    )


def _makes(row: Row, fields: dict) -> bool:
    if any(name not in fields for name in row.loss_extras):  # a correction or a selection that the match does not make
        return False
    kl = row.kl if row.kl_place == "loss" else "none"
    if fields.get("kl", "none") == "none":
        if row.kl_in_loss:  # a row's KL may be listed and off: its coefficient is 0 until it is set
            return False
    elif kl != fields["kl"]:
        return False
    for name, value in fields.items():
        if name in _SETTABLE or name.startswith("kl") and fields.get("kl", "none") == "none" or not hasattr(row, name):
            continue
        own = kl if name == "kl" else getattr(row, name)
        if name == "surrogate" and fields.get("ratio") == "none":
            continue
        if name == "reduction" and own == "mean_over_window" and value == "mean_over_tokens":
            continue  # the window may be this batch
        if own != value:
            return False
    return fields.get("off_policy_rows", "keep") == row.off_policy_rows or "off_policy_rows" not in fields
