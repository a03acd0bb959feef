"""What an objective reads: a checked and cleaned batch of answers. A new array is a field of Batch and a line in a tuple."""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import Mapping

import numpy as np
import torch
from torch import Tensor

from extensions.objectives.choices import Row

INF = math.inf

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


PER_TOKEN = ("old_logps", "ref_logps", "token_level_rewards", "values", "next_values", "vpreds", "returns", "entropies")
PER_TOKEN_FLAGS = ("terminated", "boundary")
PER_ROW = ("rewards", "reward_baselines")
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
    known = {field.name for field in dataclasses.fields(Batch)}
    for name in arrays:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise TypeError(f"make_batch: unknown array {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    logps = floating("logps", logps, dtype)
    one_token_rows = logps.dim() == 1
    if one_token_rows:
        logps = logps.unsqueeze(1)
        mask = np.ones(len(logps), dtype=bool) if mask is None else mask
    if logps.dim() != 2 or not logps.numel():
        raise ValueError(f"logps: got shape {tuple(logps.shape)}, wanted (N, T) with N and T at least 1")
    if mask is None:
        raise ValueError("mask: missing; wanted a bool array that is True on counted response tokens, EOS included")

    def per_token(name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.unsqueeze(1) if one_token_rows and tensor.dim() == 1 else tensor
        if tensor.shape != logps.shape:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, wanted {tuple(logps.shape)}, the shape of logps")
        return tensor

    mask = per_token("mask", boolean("mask", mask))
    has_tokens = mask.any(dim=1)
    if not allow_empty_rows and not has_tokens.all():
        row = int((~has_tokens).nonzero()[0])
        raise ValueError(f"mask: row {row} has no counted token; drop the row, mend the mask, or pass allow_empty_rows=True")
    if not has_tokens.any():
        raise ValueError("mask: no row has a counted token")
    unused = ~mask
    made: dict[str, object] = {"logps": _cleaned("logps", logps, unused), "mask": mask}
    rows = len(logps)
    for name, value in arrays.items():
        if value is None:
            continue
        if name in PER_TOKEN:
            made[name] = _cleaned(name, per_token(name, floating(name, value, logps.dtype)), unused)
        elif name in PER_TOKEN_FLAGS:
            made[name] = per_token(name, boolean(name, value))
        elif name in PER_ROW:
            made[name] = shaped(name, floating(name, value, logps.dtype), (rows,), "one number a row")
            if name == "reward_baselines" and not made[name].isfinite().all():
                raise ValueError(f"{name}: row {int((~made[name].isfinite()).nonzero()[0])} is not finite")
        elif name in ("group_ids", "row_ids"):
            made[name] = shaped(name, integer(name, value), (rows,), "one whole number a row")
        elif name == "advantages":
            given = floating(name, value, logps.dtype)
            if given.shape not in ((rows,), logps.shape):
                raise ValueError(f"advantages: got shape {tuple(given.shape)}, wanted ({rows},) or {tuple(logps.shape)}")
            given = given.unsqueeze(1) if given.dim() == 1 else given
            made[name] = _cleaned(name, given, unused if given.shape == mask.shape else ~has_tokens.unsqueeze(1))
        elif name in ("logits", "ref_logits"):
            scores = floating(name, value, logps.dtype)
            if scores.dim() != 3 or scores.shape[:2] != logps.shape:
                raise ValueError(f"{name}: got shape {tuple(scores.shape)}, wanted {tuple(logps.shape)} + (V,)")
            made[name] = scores.masked_fill(unused.unsqueeze(2), 0.0)
            # -inf is a forbidden token. A sum shows the others at once: NaN and inf survive it.
            if not made[name].sum().item() < INF and (made[name].isnan() | (made[name] == INF)).any():
                raise ValueError(f"{name}: got NaN or inf where the mask is set, wanted finite numbers or -inf")
        elif name in ("gen_group_ids", "gen_lengths"):
            made[name] = integer(name, value)
        elif name in ("rewards_per_func", "reward_weights") or name in GENERATION:
            made[name] = floating(name, value, logps.dtype)
        else:  # the numbers of the window
            made[name] = float(value)
            if not 0 < made[name] < INF:
                raise ValueError(f"{name}: got {value!r}, wanted a finite number above 0")
            if name == "accumulation_steps":
                made[name] = int(value)
                if made[name] != value:
                    raise ValueError(f"{name}: got {value!r}, wanted a whole number")
    if num_items_in_batch is not None:
        steps = made.get("accumulation_steps", 1)
        made["window_tokens"] = max(float(num_items_in_batch), 1.0) / num_processes * steps / steps_per_generation
    _check_generation(made)
    _check_reward_parts(made, rows)
    return Batch(**made)


def floating(name: str, value, dtype: torch.dtype | None) -> Tensor:
    tensor = torch.as_tensor(value).detach()
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
