"""One layout for every recorded array, (N, T), and shapes checked against each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from extensions.read.names import ROW_ARRAYS, TOKEN_ARRAYS
from rl_lab import FileProblem

if TYPE_CHECKING:
    from extensions.audit.read.recording import Recording


def arrange(recording: Recording) -> None:
    """Bring the arrays of a recording that is being made into one layout, (N, T), and check their shapes.

    Raises rl_lab.FileProblem.
    """
    arrays = recording.arrays
    _logps_from_ratios(recording)
    lead_name = next((n for n in ("logps", "loss_mat", "vpreds", "token_level_rewards", "mask") if n in arrays), None)
    is_environment = "logps" not in arrays and any(name in arrays for name in ("last_values", "next_values", "terminated"))
    _check_small_arrays(arrays)
    if lead_name is None or is_environment:
        return
    lead = arrays[lead_name]
    if lead.ndim == 1:
        # N samples of one token each, as an environment's minibatch has them.
        for name in (*TOKEN_ARRAYS, "advantages", "advantages_raw"):
            if name in arrays and arrays[name].ndim == 1:
                arrays[name] = arrays[name][:, None]
        lead = lead[:, None]
    if lead.ndim != 2:
        raise FileProblem(f"{lead_name}: got shape {lead.shape}, wanted (N, T)")
    rows, width = lead.shape
    _check_rows_and_tokens(arrays, rows, width)
    _place_ids(recording, rows, width)
    _place_masks(recording, rows, width)
    _check_others(arrays, rows, width)
    _check_generation(arrays)


def _logps_from_ratios(recording: Recording) -> None:
    arrays = recording.arrays
    if "ratio" not in arrays or "logps" in arrays:
        return
    with np.errstate(all="ignore"):
        arrays["logps"] = np.log(arrays["ratio"])
    if not np.isfinite(arrays["logps"]).all():
        raise FileProblem("ratio: wanted numbers above 0")
    arrays["old_logps"] = np.zeros_like(arrays["logps"])
    recording.remarks.append("ratios were recorded, not log-probabilities: taken as log-ratios against 0")
    if "dloss_dratio" in arrays and arrays["dloss_dratio"].shape != arrays["ratio"].shape:
        raise FileProblem(
            f"dloss_dratio: got shape {arrays['dloss_dratio'].shape}, wanted {arrays['ratio'].shape} as ratio"
        )
    if "dloss_dratio" in arrays:
        arrays["dloss_dlogps"] = arrays["dloss_dratio"] * arrays["ratio"]


def _check_rows_and_tokens(arrays: dict[str, np.ndarray], rows: int, width: int) -> None:
    for name in TOKEN_ARRAYS:
        if name in arrays and arrays[name].shape != (rows, width):
            raise FileProblem(
                f"{name}: got shape {arrays[name].shape}, wanted {(rows, width)} as the other per-token arrays"
                + _broadcast_hint(arrays[name].shape, (rows, width))
            )
    for name in ROW_ARRAYS:
        if name in arrays and arrays[name].shape == (rows, 1) and name != "seq_logps":
            raise FileProblem(
                f"{name}: got shape {arrays[name].shape}, wanted ({rows},); against ({rows},) it would broadcast to "
                f"({rows}, {rows})"
            )
        if name in arrays and arrays[name].shape != (rows,):
            raise FileProblem(f"{name}: got shape {arrays[name].shape}, wanted ({rows},), one a row")
    if "advantages" in arrays:
        shape = arrays["advantages"].shape
        if shape == (rows, 1):
            arrays["advantages"] = arrays["advantages"][:, 0]
        elif shape not in ((rows,), (rows, width)):
            raise FileProblem(
                f"advantages: got shape {shape}, wanted ({rows},) or {(rows, width)}" + _broadcast_hint(shape, (rows,))
            )
    if "sampler_weights" in arrays and arrays["sampler_weights"].shape not in ((rows,), (rows, 1), (rows, width)):
        raise FileProblem(
            f"sampler_weights: got shape {arrays['sampler_weights'].shape}, wanted ({rows},), ({rows}, 1) or {(rows, width)}"
        )


def _place_ids(recording: Recording, rows: int, width: int) -> None:
    """Token ids of the answers alone, as wide as logps."""
    arrays = recording.arrays
    for name in ("completion_ids", "input_ids"):
        if name in arrays and arrays[name].ndim != 2:
            raise FileProblem(f"{name}: got shape {arrays[name].shape}, wanted (N, T)")
        if name in arrays and arrays[name].shape[0] != rows:
            raise FileProblem(f"{name}: got {arrays[name].shape[0]} rows, wanted {rows}")
    if "completion_ids" not in arrays and "input_ids" in arrays and arrays["input_ids"].shape == (rows, width):
        arrays["completion_ids"] = arrays["input_ids"]
    elif "input_ids" in arrays and "completion_ids" not in arrays and arrays["input_ids"].shape[1] > width:
        arrays["completion_ids"] = arrays["input_ids"][:, -width:]
    if "completion_ids" in arrays and arrays["completion_ids"].shape != (rows, width):
        recording.remarks.append(
            f"completion_ids {arrays['completion_ids'].shape} do not fit logps {(rows, width)}: not used"
        )
        del arrays["completion_ids"]


def _place_masks(recording: Recording, rows: int, width: int) -> None:
    """The response mask, whatever it was recorded as; attention_mask beside it."""
    arrays = recording.arrays
    if "attention_mask" in arrays:
        attention = arrays["attention_mask"]
        if attention.ndim != 2 or attention.shape[0] != rows or attention.shape[1] < width:
            raise FileProblem(f"attention_mask: got shape {attention.shape}, wanted {rows} rows of {width} or more")
        # verl and TRL keep prompt and response in one mask: the response is the tail.
        arrays["attention_mask"] = attention[:, attention.shape[1] - width :]
    if "mask" not in arrays:
        if "lengths" in arrays:
            if (arrays["lengths"] < 0).any() or (arrays["lengths"] > width).any():
                raise FileProblem(f"lengths: wanted numbers from 0 to {width}")
            arrays["mask"] = np.arange(width) < arrays["lengths"][:, None]
            recording.remarks.append("no mask recorded: taken from lengths, right padded")
        else:
            arrays["mask"] = np.ones((rows, width), dtype=bool)
            if width > 1:
                recording.remarks.append("no mask recorded: every slot is taken as counted; record mask (rows x tokens)")
    if "tool_mask" in arrays:
        # 1 on the model's own tokens, as TRL has it: tokens that a tool wrote are in the answer and not in the loss.
        arrays.setdefault("attention_mask", arrays["mask"])
        arrays["mask"] = arrays["mask"] & arrays["tool_mask"]
        recording.remarks.append("counted tokens: mask and tool_mask both set")


def _check_others(arrays: dict[str, np.ndarray], rows: int, width: int) -> None:
    for name in ("rewards_per_func",):
        if name in arrays and (arrays[name].ndim != 2 or arrays[name].shape[0] != rows):
            raise FileProblem(f"{name}: got shape {arrays[name].shape}, wanted ({rows}, F)")
    if "kl" in arrays and arrays["kl"].shape not in ((rows, width), (rows,)):
        raise FileProblem(f"kl: got shape {arrays['kl'].shape}, wanted a number, ({rows},) or {(rows, width)}")
    for name in ("logits", "ref_logits"):
        if name in arrays and arrays[name].shape[:-1] != (rows, width):
            raise FileProblem(f"{name}: got shape {arrays[name].shape}, wanted {(rows, width)} + (V,)")
    if "labels" in arrays and len(arrays["labels"]) != rows:
        raise FileProblem(f"labels: got {len(arrays['labels'])}, wanted {rows}, one a row")
    if "chosen_logps" in arrays and "logps" in arrays and width > 1 and 2 * len(arrays["chosen_logps"]) != rows:
        raise FileProblem(
            f"logps: got {rows} rows, wanted {2 * len(arrays['chosen_logps'])}: the chosen answers, then the rejected ones"
        )
    if "reset_rows" in arrays and arrays["reset_rows"].shape[0] != rows:
        raise FileProblem(f"reset_rows: got shape {arrays['reset_rows'].shape}, wanted {rows} rows")
    if "advantages_raw" in arrays and arrays["advantages_raw"].shape not in ((rows,), (rows, 1), (rows, width)):
        raise FileProblem(f"advantages_raw: got shape {arrays['advantages_raw'].shape}, wanted ({rows},) or {(rows, width)}")


def _check_generation(arrays: dict[str, np.ndarray]) -> None:
    """Arrays of the generation batch that a micro-batch was cut from."""
    generation = [n for n in ("gen_rewards", "gen_group_ids", "gen_lengths", "gen_kl", "gen_advantages") if n in arrays]
    if "gen_rewards_per_func" in arrays and generation and len(arrays["gen_rewards_per_func"]) != len(arrays[generation[0]]):
        raise FileProblem(
            f"gen_rewards_per_func: got {len(arrays['gen_rewards_per_func'])} rows, wanted {len(arrays[generation[0]])}"
        )
    for name in generation:
        if arrays[name].ndim != 1 or len(arrays[name]) != len(arrays[generation[0]]):
            raise FileProblem(
                f"{name}: got shape {arrays[name].shape}, wanted ({len(arrays[generation[0]])},) as {generation[0]}"
            )
    if generation and "row_ids" in arrays:
        low, high = arrays["row_ids"].min(), arrays["row_ids"].max()
        if low < 0 or high >= len(arrays[generation[0]]):
            raise FileProblem(f"row_ids: got numbers from {low} to {high}, wanted 0 to {len(arrays[generation[0]]) - 1}")


def _check_small_arrays(arrays: dict[str, np.ndarray]) -> None:
    """Arrays that belong to no row of tokens: pairs, logs, weights."""
    for names in (
        (
            "chosen_logps",
            "rejected_logps",
            "ref_chosen_logps",
            "ref_rejected_logps",
            "chosen_lengths",
            "rejected_lengths",
            "dloss_dchosen_logps",
            "dloss_drejected_logps",
        ),
        ("labels", "kl_seq_logps", "ref_kl_seq_logps"),
        ("log_values", "log_windows"),
    ):
        sizes = {name: arrays[name].shape for name in names if name in arrays}
        if len({math.prod(shape) for shape in sizes.values()}) > 1:
            raise FileProblem(
                f"shapes differ: {', '.join(f'{name} {shape}' for name, shape in sizes.items())}; wanted one length"
            )
        for name in sizes:
            arrays[name] = arrays[name].reshape(-1)
    if "log_steps" in arrays and arrays["log_steps"].ndim > 2:
        raise FileProblem(f"log_steps: got shape {arrays['log_steps'].shape}, wanted (steps,) or (steps, metrics)")
    for name in ("rewards_per_func", "gen_rewards_per_func"):
        weights = arrays.get("reward_weights")
        if name in arrays and (arrays[name].ndim != 2 or weights is not None and weights.shape != arrays[name].shape[1:]):
            raise FileProblem(f"{name}: got shape {arrays[name].shape}, wanted rows x F, with reward_weights (F,)")


def _broadcast_hint(got: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    if len(got) == 2 and (got[0] == 1 or got[1] == 1) or len(got) == len(wanted) == 2 and got == wanted[::-1]:
        return "; likely a transposed array, or one that would broadcast"
    return ""
