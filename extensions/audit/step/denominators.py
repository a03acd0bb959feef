"""What each rank and micro-batch divided by, and the mistakes whose denominators those are.

W ranks, M micro-batches a rank; q the count of a micro-batch (tokens, answers, pairs, or answers times a constant), q_r of
its rank, Q of the whole step; A = W where the ranks' gradients are averaged, 1 where they are summed. One token's gradient
is slope / D, D including the averaging:

    right              Q                    sums first, one division by the count of the step
    mean_of_means      A M q                every micro-batch its own mean, then the mean of those
    local_count        A q_r                the rank's count for the step's
    forgot_world_size  W Q                  the step's count under an average over ranks (or /W again beside a sum)
    double_division    M Q                  divided by the number of micro-batches once more
    no_micro_division  A q                  micro-batch means added up
    local_padded_width B T_rm               the padded width of the micro-batch for the constant of the step

Where two give the same D in every file, this split cannot tell them apart. A new one is an entry of DENOMINATORS, with its
words in STEP_MISTAKES of catalogue.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, NamedTuple, Sequence

import numpy as np
import torch

from extensions.audit.search.forms import build_batch
from extensions.audit.search.pairs import build
from extensions.audit.step.folder import Part
from extensions.audit.tolerance import NOTHING
from extensions.objectives import PreferenceRow, Row, evaluate, evaluate_preference

SAME = 1e-4
"""Two denominators are equal: what a solved factor of a float32 gradient allows."""
SHAPE = 1e-4
"""A file's gradient is a multiple of the objective's: norm of the rest over its norm."""

class Counts(NamedTuple):
    """One kind of count: of each file, of its rank, of the step."""

    own: np.ndarray
    of_rank: np.ndarray
    total: float
    ranks: int
    micro_batches: np.ndarray  # of each file's rank
    averaged: bool

    @property
    def over_ranks(self) -> int:
        return self.ranks if self.averaged else 1


DENOMINATORS: dict[str, Callable[[Counts], np.ndarray]] = {
    "right": lambda c: np.full(len(c.own), c.total),
    "mean_of_means": lambda c: c.over_ranks * c.micro_batches * c.own,
    "local_count": lambda c: c.over_ranks * c.of_rank,
    "forgot_world_size": lambda c: np.full(len(c.own), c.ranks * c.total),
    "double_division": lambda c: c.micro_batches * c.total,
    "no_micro_division": lambda c: c.over_ranks * c.own,
}

KINDS = {
    "mean_over_tokens": "tokens",
    "mean_over_window": "tokens",
    "mean_of_micro_batch_means": "tokens",
    "mean_per_response": "answers",
    "sum_per_response": "answers, tokens summed",
    "sum_over_budget": "constant",
    "sum_over_width": "constant",
}
"""Reduction of a row -> what its denominator counts."""


def counts_of(parts: Sequence[Part], kind: str, averaged: bool) -> Counts:
    masks = [part.recording.arrays["mask"] for part in parts]
    own = np.array([float(mask.sum() if kind == "tokens" else len(mask)) for mask in masks])
    own = own / 2 if kind == "pairs" else own
    if kind == "constant":
        own = own * budget_of(parts)
    ranks = np.array([part.rank for part in parts])
    of_rank = np.array([own[ranks == rank].sum() for rank in ranks])
    micro = np.array([float((ranks == rank).sum()) for rank in ranks])
    return Counts(own, of_rank, float(own.sum()), len(set(ranks.tolist())), micro, averaged)


def budget_of(parts: Sequence[Part]) -> float:
    """The constant of the step: recorded, else the largest width that any file is padded to."""
    known = [part.recording.number("budget") for part in parts]
    return float(known[0] if known[0] else max(part.recording.arrays["mask"].shape[1] for part in parts))


def hypotheses(parts: Sequence[Part], kind: str, averaged: bool) -> dict[str, np.ndarray]:
    """Name -> the denominator of each file."""
    counts = counts_of(parts, kind, averaged)
    made = {name: formula(counts) for name, formula in DENOMINATORS.items()}
    if kind == "constant":
        widths = np.array([float(part.recording.arrays["mask"].shape[1]) for part in parts])
        made["local_padded_width"] = counts.total / budget_of(parts) * widths
    if kind == "tokens" and all("num_items_in_batch" in part.recording.numbers for part in parts):
        made[RECORDED_WINDOW] = np.array([_recorded_window(part) for part in parts])
    return made


RECORDED_WINDOW = "recorded_window"
"""The share of a generation batch that a step is by number of micro-batches, not by its own tokens: TRL's dapo where one
generation batch feeds several steps. No mistake: the trainer's own convention."""


def _recorded_window(part: Part) -> float:
    number = part.recording.number
    steps = number("accumulation_steps", 1)
    return number("num_items_in_batch") * steps / number("steps_per_generation", steps)


def numerators(row: Row, part: Part, kind: str, advantages: np.ndarray) -> np.ndarray:
    """d(sum over the file, undivided)/dlogps of a row, (N, T): each answer a mean over its tokens for kind answers."""
    reduction = "mean_per_response" if kind == "answers" else "sum_over_tokens"
    plain = replace(row, reduction=reduction, accumulation="none", baseline="given", scale="none", value_coef=0.0)
    batch = build_batch(part.recording, advantages=advantages)
    times = len(batch.mask) if kind == "answers" else 1
    return times * evaluate(plain, batch).dloss_dlogps.numpy()


def pair_numerators(row: PreferenceRow, part: Part) -> np.ndarray:
    """The same of a loss of pairs: d(sum over the pairs)/dlogps, (2P, T). Raises ValueError for a loss that mixes pairs."""
    if row.sft_coef or row.loss in ("aot", "aot_unpaired") or row.of_labels:
        raise ValueError(f"{row.name}: its loss is no mean over pairs that are independent of each other")
    data = build(part.recording)
    return len(data.logps) / 2 * evaluate_preference(row, data).dloss_dlogps.numpy()


def recorded(part: Part, ranks: int, averaged: bool) -> np.ndarray | None:
    """What the step has of each token's gradient: what backward() brought, over the ranks where those are averaged."""
    arrays = part.recording.arrays
    gradient = arrays.get("backward_dlogps", arrays.get("dloss_dlogps"))
    if gradient is not None and "chosen_logps" in arrays:  # padding zeroed before the sum: a slope that reaches no parameter
        gradient = np.where(~arrays["mask"] & (arrays["logps"] == 0), 0.0, gradient)
    return None if gradient is None else gradient / (ranks if averaged else 1)


class Solved(NamedTuple):
    """denominator: NaN where the file has no gradient; rest: how much of the gradient is no multiple of the objective's."""

    denominator: float
    rest: float


def solve(gradient: np.ndarray, slopes: np.ndarray) -> Solved:
    """D and what is left of gradient = slopes / D by least squares."""
    size, own = float((slopes * slopes).sum()), float(np.linalg.norm(gradient))
    if size == 0 or own <= NOTHING:
        return Solved(float("nan"), 0.0 if size == 0 and own <= NOTHING else 1.0)
    factor = float((gradient * slopes).sum()) / size
    rest = float(np.linalg.norm(gradient - factor * slopes)) / own
    return Solved(1 / factor if factor else float("inf"), rest)


def same(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Where two denominators are equal; a file without gradient agrees with every one."""
    return np.isnan(one) | (np.abs(one - other) <= SAME * np.abs(other))


def clipped(gradient: torch.Tensor | np.ndarray, norm: float) -> np.ndarray:
    """The gradient at most this long."""
    length = float(np.linalg.norm(gradient))
    return gradient * min(1.0, norm / length) if length else gradient
