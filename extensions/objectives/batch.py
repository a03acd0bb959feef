"""What an objective reads: a checked and cleaned batch of answers. A new array is a field of Batch and a line in a tuple."""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Mapping

import numpy as np
import torch
from torch import Tensor

from extensions.objectives.table import INF

if TYPE_CHECKING:
    from extensions.objectives.choices import Row


@dataclass(frozen=True, eq=False)
class Batch:
    """What an objective reads: N answers, padded to T tokens. Build it with make_batch, which checks and cleans.

    Slots outside the mask hold 0, whatever they held before. `dataclasses.replace(batch, logps=...)` moves the policy and
    keeps the rest; pass logps through make_batch when they may hold anything in unused slots.
    """

    logps: Tensor  # (N, T) log-probability of each token, policy being updated
    mask: Tensor  # (N, T) bool: counted response tokens, the real EOS included
    old_logps: Tensor | None = None  # (N, T) policy that sampled; None: first pass, every ratio is 1
    ref_logps: Tensor | None = None  # (N, T) reference policy
    rewards: Tensor | None = None  # (N,) before any normalisation; NaN: missing
    group_ids: Tensor | None = None  # (N,) integer, equal for answers to the same prompt
    advantages: Tensor | None = None  # (N,) or (N, T), read by baseline "given"
    token_level_rewards: Tensor | None = None  # (N, T); without it the reward sits on the last counted token
    rewards_per_func: Tensor | None = None  # (N, F); NaN where a reward function gave none
    reward_weights: Tensor | None = None  # (F,)
    reward_baselines: Tensor | None = None  # (N,) reward of the greedy answer
    truncated: Tensor | None = None  # (N,) bool: the answer was cut off before its end
    sampler_logps: Tensor | None = None  # (N, T) under the program that drew the tokens, which is not the one that trains
    sampler_weights: Tensor | None = None  # (N,) or (N, T): a correction for that as the trainer holds it
    selected_tokens: Tensor | None = None  # (N, T) bool: read by token_selection "given"
    values: Tensor | None = None  # (N, T) critic when the batch was sampled: for GAE, and V0 of a value clip
    next_values: Tensor | None = None  # (N, T) with the two flags, for environments; else the next token's value
    terminated: Tensor | None = None  # (N, T) bool
    boundary: Tensor | None = None  # (N, T) bool
    vpreds: Tensor | None = None  # (N, T) critic being updated
    returns: Tensor | None = None  # (N, T) value targets; without them A + values, A as GAE or the batch gives it
    entropies: Tensor | None = None  # (N, T)
    logits: Tensor | None = None  # (N, T, V) policy being updated, for the exact KL
    ref_logits: Tensor | None = None  # (N, T, V)
    # The generation batch this micro-batch was cut from: advantages are computed over its M rows, then row_ids are taken.
    gen_rewards: Tensor | None = None  # (M,)
    gen_rewards_per_func: Tensor | None = None  # (M, F)
    gen_group_ids: Tensor | None = None  # (M,)
    gen_lengths: Tensor | None = None  # (M,)
    gen_kl: Tensor | None = None  # (M,) sum over the answer of l0 - lr
    row_ids: Tensor | None = None  # (N,) rows of the generation batch
    # What one optimiser step averages over, as this process sees it.
    window_tokens: float | None = None  # Nw of mean_over_window; None: this batch is the window
    window_rows: float | None = None  # B of the other reductions; None: the rows of this batch
    accumulation_steps: int = 1
    budget: float | None = None  # C of sum_over_budget

    @property
    def lengths(self) -> Tensor:
        """Counted tokens of each row, (N,)."""
        return self.mask.sum(dim=1)

    @property
    def from_generation(self) -> bool:
        """Whether rewards, and so advantages, are those of the generation batch: M rows, of which row_ids are here."""
        return self.row_ids is not None and self.gen_rewards is not None


PER_TOKEN = (
    "old_logps", "ref_logps", "sampler_logps", "token_level_rewards", "values", "next_values", "vpreds", "returns",
    "entropies",
)  # fmt: skip
PER_ROW = ("rewards", "reward_baselines")
PER_TOKEN_FLAGS = ("terminated", "boundary", "selected_tokens")
GENERATION = ("gen_rewards", "gen_rewards_per_func", "gen_group_ids", "gen_lengths", "gen_kl")


def make_batch(
    *,
    logps,
    mask=None,
    dtype: torch.dtype | None = None,
    allow_empty_rows: bool = False,
    num_items_in_batch: float | None = None,
    steps_per_generation: int = 1,
    num_processes: int = 1,
    **arrays,
) -> Batch:
    """Check arrays (numpy, torch or lists) with the names of Batch's fields, and set their unused slots to 0.

    logps (N, T), or (N,) for N answers of one token each (then every per-token array is (N,) too, and mask may be left
    out). Everything is computed in the dtype of logps, or in `dtype` if given. `num_items_in_batch`, the counted tokens of
    the generation batch, sets window_tokens = num_items_in_batch / num_processes * accumulation_steps /
    steps_per_generation.

    Raises TypeError for an unknown name or a wrong dtype; ValueError for a shape that differs, a row without a counted
    token (unless allow_empty_rows) or a non-finite number in a used slot, naming the row and the position. Unused slots
    may hold anything. Rewards are checked later: some rows of the table allow a missing one.
    """
    _check_names(arrays)
    logps = floating("logps", logps, dtype)
    one_token_rows = logps.dim() == 1
    if one_token_rows:
        logps = logps.unsqueeze(1)
        mask = np.ones(len(logps), dtype=bool) if mask is None else mask
    if logps.dim() != 2 or not logps.numel():
        raise ValueError(f"logps: got shape {tuple(logps.shape)}, wanted (N, T) with N and T at least 1")
    if mask is None:
        raise ValueError("mask: missing; wanted a bool array that is True on counted response tokens, EOS included")
    read = _Reader(logps, one_token_rows)
    read.mask = mask = read.token_flags("mask", mask)
    has_tokens = mask.any(dim=1)
    if not allow_empty_rows and not has_tokens.all():
        row = int((~has_tokens).nonzero()[0])
        raise ValueError(f"mask: row {row} has no counted token; drop the row, mend the mask, or pass allow_empty_rows=True")
    if not has_tokens.any():
        raise ValueError("mask: no row has a counted token")
    made: dict[str, object] = {"logps": _cleaned("logps", logps, ~mask), "mask": mask}
    made |= {name: getattr(read, _KINDS[name])(name, value) for name, value in arrays.items() if value is not None}
    if num_items_in_batch is not None:
        steps = made.get("accumulation_steps", 1)
        made["window_tokens"] = max(float(num_items_in_batch), 1.0) / num_processes * steps / steps_per_generation
    _check_generation(made)
    _check_reward_parts(made, len(logps))
    return Batch(**made)


def _check_names(arrays: Mapping[str, object]) -> None:
    known = {field.name for field in dataclasses.fields(Batch)}
    for name in arrays:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise TypeError(f"make_batch: unknown array {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


class _Reader:
    """Reads one array by its kind; every method takes its name and value and returns what Batch holds."""

    def __init__(self, logps: Tensor, one_token_rows: bool):
        self.shape, self.rows, self.dtype, self.one_token_rows = logps.shape, len(logps), logps.dtype, one_token_rows
        self.mask: Tensor

    def _per_token(self, name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.unsqueeze(1) if self.one_token_rows and tensor.dim() == 1 else tensor
        if tensor.shape != self.shape:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, wanted {tuple(self.shape)}, the shape of logps")
        return tensor

    def token_numbers(self, name: str, value) -> Tensor:
        return _cleaned(name, self._per_token(name, floating(name, value, self.dtype)), ~self.mask)

    def token_flags(self, name: str, value) -> Tensor:
        return self._per_token(name, boolean(name, value))

    def row_rewards(self, name: str, value) -> Tensor:
        return shaped(name, floating(name, value, self.dtype), (self.rows,), "one number per row")

    def row_numbers(self, name: str, value) -> Tensor:
        made = self.row_rewards(name, value)
        if not made.isfinite().all():
            raise ValueError(f"{name}: row {int((~made.isfinite()).nonzero()[0])} is not finite")
        return made

    def row_ids(self, name: str, value) -> Tensor:
        return shaped(name, integer(name, value), (self.rows,), "one whole number per row")

    def row_flags(self, name: str, value) -> Tensor:
        return shaped(name, boolean(name, value), (self.rows,), "True or False per row")

    def either(self, name: str, value) -> Tensor:
        """One number a row, which becomes (N, 1), or one per token."""
        given = floating(name, value, self.dtype)
        if given.shape not in ((self.rows,), self.shape):
            raise ValueError(f"{name}: got shape {tuple(given.shape)}, wanted ({self.rows},) or {tuple(self.shape)}")
        given = given.unsqueeze(1) if given.dim() == 1 else given
        unused = ~self.mask if given.shape == self.shape else ~self.mask.any(dim=1, keepdim=True)
        return _cleaned(name, given, unused)

    def scores(self, name: str, value) -> Tensor:
        scores = floating(name, value, self.dtype)
        if scores.dim() != 3 or scores.shape[:2] != self.shape:
            raise ValueError(f"{name}: got shape {tuple(scores.shape)}, wanted {tuple(self.shape)} + (V,)")
        made = scores.masked_fill(~self.mask.unsqueeze(2), 0.0)
        # -inf is a forbidden token. A sum shows the others at once: NaN and inf survive it.
        if not made.sum().item() < INF and (made.isnan() | (made == INF)).any():
            raise ValueError(f"{name}: got NaN or inf where the mask is set, wanted finite numbers or -inf")
        return made

    def whole_numbers(self, name: str, value) -> Tensor:
        return integer(name, value)

    def numbers(self, name: str, value) -> Tensor:
        return floating(name, value, self.dtype)

    def count(self, name: str, value) -> float:
        made = float(value)
        if not 0 < made < INF:
            raise ValueError(f"{name}: got {value!r}, wanted a finite number above 0")
        return made

    def whole_count(self, name: str, value) -> int:
        made = int(self.count(name, value))
        if made != value:
            raise ValueError(f"{name}: got {value!r}, wanted a whole number")
        return made


_KINDS = {
    **dict.fromkeys(PER_TOKEN, "token_numbers"),
    **dict.fromkeys(PER_TOKEN_FLAGS, "token_flags"),
    **dict.fromkeys(("group_ids", "row_ids"), "row_ids"),
    **dict.fromkeys(("advantages", "sampler_weights"), "either"),
    **dict.fromkeys(("logits", "ref_logits"), "scores"),
    **dict.fromkeys(("gen_group_ids", "gen_lengths"), "whole_numbers"),
    **dict.fromkeys(("rewards_per_func", "reward_weights", "gen_rewards", "gen_rewards_per_func", "gen_kl"), "numbers"),
    **dict.fromkeys(("window_tokens", "window_rows", "budget"), "count"),
    **dict.fromkeys(PER_ROW, "row_numbers"),
    "rewards": "row_rewards",  # NaN: missing
    "truncated": "row_flags",
    "accumulation_steps": "whole_count",
}


def floating(name: str, value, dtype: torch.dtype | None) -> Tensor:
    # A list of Python floats holds doubles; torch alone would round them to float32 on the way.
    tensor = torch.as_tensor(np.asarray(value) if isinstance(value, (list, tuple, float)) else value).detach()
    if dtype is None and not tensor.is_floating_point():
        raise TypeError(f"{name}: got dtype {tensor.dtype}, wanted floating point numbers")
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, wanted real numbers")
    return tensor if dtype is None else tensor.to(dtype)


def boolean(name: str, value) -> Tensor:
    tensor = torch.as_tensor(value)
    if tensor.dtype != torch.bool:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, wanted bool; write `!= 0` where it is made if it holds 0 and 1")
    return tensor


def integer(name: str, value) -> Tensor:
    tensor = torch.as_tensor(value)
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, wanted whole numbers")
    return tensor.long()


def shaped(name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str) -> Tensor:
    if tensor.shape != shape:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, wanted {shape}, {meaning}")
    return tensor


def _cleaned(name: str, tensor: Tensor, unused: Tensor) -> Tensor:
    """The array with 0 in unused slots; refuses a used slot that is not finite, naming row and position."""
    cleaned = tensor.masked_fill(unused, 0.0)
    # One sum instead of a test of every number: NaN and inf survive a sum. A sum that merely overflows is looked at again.
    if not math.isfinite(cleaned.sum().item()) and not torch.isfinite(cleaned).all():
        row, position = (~torch.isfinite(cleaned)).nonzero()[0].tolist()
        raise ValueError(
            f"{name}: got {cleaned[row, position].item()} at row {row}, position {position}, where the mask is set; wanted "
            "finite numbers; likely a mask that covers padding, or a diverged model"
        )
    return cleaned


def _check_generation(made: Mapping[str, object]) -> None:
    given = [name for name in GENERATION if name in made]
    if bool(given) != ("row_ids" in made):
        raise ValueError("row_ids and the gen_ arrays belong together: got one without the other")
    if given:
        sizes = {name: len(made[name]) for name in given}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"gen_ arrays: got lengths {sizes}, wanted one length")
        low, high = (int(bound) for bound in made["row_ids"].aminmax())
        if low < 0 or high >= sizes[given[0]]:
            raise ValueError(f"row_ids: got numbers from {low} to {high}, wanted 0 to {sizes[given[0]] - 1}")


def _check_reward_parts(made: Mapping[str, object], rows: int) -> None:
    weights = made.get("reward_weights")
    for name, length in (("rewards_per_func", rows), ("gen_rewards_per_func", None)):
        if name in made:
            parts = made[name]
            if parts.dim() != 2 or length not in (None, len(parts)) or weights is None or weights.shape != parts.shape[1:]:
                got = f"{tuple(parts.shape)} with reward_weights {None if weights is None else tuple(weights.shape)}"
                wanted = f"({'M' if length is None else length}, F) with reward_weights (F,)"
                raise ValueError(f"{name}: got {got}, wanted {wanted}")


def required(row: Row, batch: Batch, name: str) -> Tensor:
    value = getattr(batch, name)
    if value is None:
        raise ValueError(f"{row.name}: the batch has no {name}, which this row reads; it reads {', '.join(row.needs)}")
    return value


def sampling_logps(batch: Batch) -> Tensor:
    """l0: old_logps, or logps on a first pass."""
    return batch.logps if batch.old_logps is None else batch.old_logps
