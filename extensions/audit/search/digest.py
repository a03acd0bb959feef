"""What was reported, a form that has met the batch, and a hypothesis that is being explained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Sequence

import torch
from torch import Tensor

from extensions.audit.search.forms import Form, Spec
from extensions.audit.search.match import Extra
from extensions.audit.search.pieces import Part
from extensions.audit.tolerance import COARSE, GRADIENT, NOTHING, VALUE

if TYPE_CHECKING:
    from extensions.audit.search.screen import Screen


@dataclass
class Target:
    """What was reported."""

    loss: float | None
    gradient: Tensor | None  # (N, T)
    eps: float
    extras: list[Extra] = field(default_factory=list)  # entropy and critic: fields, loss, mistake

    @property
    def gradient_tolerance(self) -> float:
        return max(GRADIENT, 4 * self.eps if self.eps > COARSE else 0)

    def value_tolerance(self, size):
        """A float32 sum of terms of this total size; half precision is as coarse as its own grid."""
        return max(VALUE, 2 * self.eps if self.eps > COARSE else 0) * size + NOTHING


class Digest:
    """A form of J (as a loss: -J) or of the KL that has met the batch: its row sums, and its slopes on the compared rows."""

    def __init__(self, index: int, spec: Spec, screen: "Screen", sign: float):
        self.index, self.fields, self.mistake = index, spec.fields, spec.mistake
        self._spec, self._screen, self._sign, self._sums = spec, screen, sign, None
        self.slope: Tensor | None = None
        if screen.sample is not None:
            form = spec.make(screen.sample.batch)
            self.slope = None if form.slope is None else sign * form.slope
            if (
                len(screen.parts) == 1
                and len(screen.sample.rows) == len(screen.batch.mask)
                and screen.sample.batch is screen.parts[0].batch
            ):
                self._take([(screen.parts[0], form)])

    def _take(self, forms: Sequence[tuple[Part, Form]]) -> None:
        sums = torch.zeros(len(self._screen.batch.mask), dtype=torch.float64)
        sizes = torch.zeros_like(sums)
        for part, form in forms:
            sums[part.rows], sizes[part.rows] = self._sign * form.value.sum(1), form.value.abs().sum(1)
        self._sums = sums, sizes

    @property
    def sums(self) -> Tensor:
        """Sum over each row's tokens, (N,)."""
        if self._sums is None:
            self._take([(part, self._spec.make(part.batch)) for part in self._screen.parts])
        return self._sums[0]

    @property
    def sizes(self) -> Tensor:
        """Sum of the absolute values, (N,)."""
        return self.sums is not None and self._sums[1]


@dataclass
class Fit:
    """A hypothesis that reproduces the numbers, while its factor and its coefficient are being explained."""

    fields: dict
    mistakes: list[str]
    factor: float
    residual: float | None
    value: float  # recomputed loss, without entropy and critic
    span: float  # sum of the absolute terms
    extra: Extra | None  # the entropy and critic terms that the value was compared with
    remarks: list[str] = field(default_factory=list)
    weak: bool = False

    def solved(self, fields: dict, words: str) -> "Fit":
        """The same with a denominator in it that was solved for."""
        remarks = [*self.remarks, f"{words}, solved, not recorded"]
        return Fit(fields, [], 1.0, self.residual, self.value, self.span, self.extra, remarks, weak=True)
