"""What a trap is, and the numbers it makes: the row as configured beside the row as meant, on the small batch."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Callable, NamedTuple

import torch
from torch import Tensor

from extensions.objectives import (
    Batch,
    PreferenceRow,
    Preferences,
    Row,
    evaluate,
    evaluate_preference,
    small_batch,
    small_preferences,
)
from extensions.settings.arithmetic import BatchWords
from extensions.settings.meaning import Meaning
from extensions.settings.trainers import Settings

SEVERITIES = ("note", "warning", "mistake")


class Case(NamedTuple):
    """What a trap looks at."""

    settings: Settings
    meaning: Meaning
    words: BatchWords

    @property
    def row(self) -> Row | PreferenceRow | None:
        return self.meaning.row

    @property
    def on_policy(self) -> bool:
        """Whether every ratio is 1: one update per batch of samples."""
        return bool(self.words.numbers.get("ratio_is_one"))


Said = str | Callable[[Case], str]


@dataclass(frozen=True)
class Trap:
    """One way to configure something else than was meant.

    A new trap is one of these in a table of traps_*.py, with a planted case and a clean twin in test_traps.py.
    """

    number: int  # of the list of traps in README.txt; 0: one of ours
    name: str
    methods: tuple[str, ...]  # of TRAINERS
    when: Callable[[Case], bool]
    words: Said  # what the settings mean
    change: Said  # what to write instead
    source: str
    severity: Said = "warning"
    meant: Callable[[Case], Row | PreferenceRow] | None = None  # the row as it was meant
    number_made: Callable[[Case], tuple[str, dict[str, float]]] | None = None  # another number, with its sentence


@dataclass(frozen=True)
class Finding:
    name: str
    severity: str
    words: str
    change: str
    source: str
    keys: tuple[str, ...] = ()
    number: dict[str, float] | None = None
    number_words: str = ""

    def as_json(self) -> dict:
        return {
            "name": self.name, "severity": self.severity, "words": self.words, "change": self.change, "source": self.source,
            "number": self.number, "number_words": self.number_words, "keys": list(self.keys),
        }  # fmt: skip


@functools.lru_cache
def small() -> tuple[Batch, Preferences]:
    batch, _ = small_batch()
    return batch, small_preferences(batch)


def evaluated(row: Row | PreferenceRow, batch: Batch | None = None) -> tuple[float, Tensor]:
    """Loss and gradient with respect to the log-probabilities on the small batch."""
    if isinstance(row, PreferenceRow):
        result = evaluate_preference(row, small()[1])
    else:
        result = evaluate(row, small()[0] if batch is None else batch)
    return float(result.loss), result.dloss_dlogps


def cosine(a: Tensor, b: Tensor) -> float:
    size = float(a.norm() * b.norm())
    return float((a * b).sum()) / size if size else math.nan


def compared(row: Row | PreferenceRow, meant: Row | PreferenceRow, batch: Batch | None = None) -> tuple[str, dict[str, float]]:
    """Loss, gradient norm and cosine of what is configured and what was meant, as a sentence and as numbers."""
    (loss, gradient), (loss_meant, gradient_meant) = evaluated(row, batch), evaluated(meant, batch)
    angle = cosine(gradient, gradient_meant)
    made = {
        "loss": loss, "loss_meant": loss_meant, "gradient_norm": float(gradient.norm()),
        "gradient_norm_meant": float(gradient_meant.norm()), "cosine": None if math.isnan(angle) else angle,
    }  # fmt: skip
    text = (
        f"loss {loss:.6f} (as meant {loss_meant:.6f}), gradient norm {made['gradient_norm']:.6f} "
        f"({made['gradient_norm_meant']:.6f}), cosine of the gradients " + ("none" if math.isnan(angle) else f"{angle:.6f}")
    )
    return text, made


def said(text: Said, case: Case) -> str:
    return text if isinstance(text, str) else text(case)


def number_of(trap: Trap, case: Case) -> tuple[str, dict[str, float] | None]:
    if trap.number_made is not None:
        return trap.number_made(case)
    if trap.meant is not None and case.row is not None:
        return compared(case.row, trap.meant(case))
    return "", None


def first_pass(batch: Batch) -> Batch:
    """The small batch with the policy that sampled as the current one: every ratio is 1."""
    import dataclasses

    return dataclasses.replace(batch, logps=batch.old_logps)


def silent_share(group: int, success: float) -> float:
    """Chance that the answers of a group are all right or all wrong: q^G + (1 - q)^G."""
    return success**group + (1 - success) ** group


def temperature_numbers(temperature: float) -> tuple[float, float]:
    """Sampler p^(1/T) normalised, p = (.5, .25, .15, .1): KL(sampler || p) and the variance of p / sampler under it."""
    p = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64)
    q = p ** (1 / temperature) / (p ** (1 / temperature)).sum()
    ratio = p / q
    return float((q * (q / p).log()).sum()), float((q * ratio.square()).sum() - 1)
