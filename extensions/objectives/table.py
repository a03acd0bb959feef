"""What a table of choices is made of: a number with its range, a choice with its formula and function, a field of a row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable, NamedTuple

INF = math.inf


@dataclass(frozen=True)
class Number:
    """A number that a choice reads: it becomes a field of Row, with its default and its range."""

    name: str
    default: float
    low: float
    high: float
    meaning: str = ""
    is_whole: bool = False


@dataclass(frozen=True)
class Choice:
    """One value of a field: its formula for the reader, and what computes it."""

    formula: str
    function: Callable | None = None  # None: the step that reads the field knows what to do
    numbers: tuple[Number, ...] = ()  # numbers that only rows with this choice read
    needs: tuple[str, ...] = ()  # arrays of the batch that it reads, besides those of every row

    def __call__(self, *arguments):
        return self.function(*arguments)


@dataclass(frozen=True)
class SurrogateChoice(Choice):
    """A surrogate: function(row, r, A, l, l0) -> Surrogate. This one entry is all that a new one needs."""

    words: str = ""  # what it does, for somebody who does not read formulas
    has_band: bool = False  # the ratio is held against [1 - clip_low, 1 + clip_high]
    ratios: tuple[str, ...] | None = None  # ratios it can be used with; None: all that are a ratio
    because: str = ""  # why no others


class Field(NamedTuple):
    """A text field of Row: what it is when nobody says, and what it may be."""

    default: str
    choices: dict[str, Choice]


def plain_choices(**formulas: str) -> dict[str, Choice]:
    """Choices that are nothing but their formulas: the step that reads them decides."""
    return {name: Choice(formula) for name, formula in formulas.items()}


# Numbers that several choices read. What only one entry reads stands in that entry.
CLIP_LOW = Number("clip_low", 0.2, 0, INF, "the band of ratios begins at 1 - this")
CLIP_HIGH = Number("clip_high", 0.2, -1, INF, "the band of ratios ends at 1 + this")
RATIO_CAP = Number("ratio_cap", 3.0, 0, INF, "c")
GAMMA = Number("gamma", 1.0, 0, 1, "discount of a later token")
STD_DDOF = Number("std_ddof", 0, 0, 1, "0 population, 1 sample", is_whole=True)
STD_EPS = Number("std_eps", 1e-8, 0, INF, "guard of a division by std")
KL_COEF = Number("kl_coef", 0.0, 0, INF, "coefficient of the KL")
VALUE_COEF = Number("value_coef", 0.0, 0, INF, "weight of the critic's loss")
VALUE_CLIP = Number("value_clip", 0.2, 0, INF, "c of the critic's clip")
