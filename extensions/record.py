"""Write what a trainer really computed into files that `python -m extensions.audit` reads.

    from extensions.record import record                       # PYTHONPATH=PATH/TO/LAB, or run from the lab
    trainer = record(GRPOTrainer, "recorded", every=10)(model, ...)       # TRL: GRPO, RLOO, DPO, KTO, or a subclass
    record_loss("recorded", loss, logps=logps, mask=mask, ..., step=step)         # any loop, before loss.backward()
    policy_loss_fn = record_loss_function(policy_loss_fn, "recorded")             # verl's shape of a loss function
    save("batch.npz", logps=logps, loss=loss, ...)                                # arrays that you have

Layout: FOLDER/step_000010/rank0_mb0.npz, one file a rank and micro-batch, with `rank`, `world_size`, `micro_batch`,
`accumulation_steps` and `step` inside; `python -m extensions.audit FOLDER/step_000010/` audits such a step as a whole.
Names are those of extensions/read/names.py (any alias of them too).

Gradients: every recorded tensor whose `dloss_d...` the table of names has and that requires a gradient gets it, by
torch.autograd.grad through the part of the graph between it and the loss (the model is not passed again, no parameter's
.grad changes). When backward() later brings another gradient to the log-probabilities (a division by the accumulation steps,
a scaled loss), the file gets it as `backward_dlogps`.

Training is not changed: no random number is drawn, no collective is called. A recording that fails says why in one line on
stderr, once a reason, and the training goes on; a wrong folder or a wrong class is an error before the training starts.

Where to change something: another trainer is an entry of record_trl.TRAINERS, another setting of a loss function's config
one of CONFIG_NAMES. Same as TRL 1.16.0 and verl 0.9.1, whose attributes and argument names are read here; neither is
imported.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

import rl_lab
from extensions.read.names import CANONICAL, FIELDS
from extensions.record_trl import TRAINERS, last_columns

__all__ = ["record", "record_loss", "record_loss_function", "save"]

WITH_GRADIENT = tuple(name for name in FIELDS if f"dloss_d{name}" in FIELDS)
"""Roles whose gradient the table of names has: logps, entropies, vpreds, ..."""


def save(path: str | Path, **arrays: Any) -> Path:
    """Write arrays, tensors and numbers as one .npz file, whole or not at all; None is left out. -> the path.

    bfloat16, which numpy lacks, becomes float32. Raises TypeError for a value that is no array of numbers or strings, and
    rl_lab.FileProblem where the file cannot be written.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"save: got {path.name!r}, wanted a name that ends in .npz")
    content = io.BytesIO()
    np.savez(content, **{name: _plain(name, value) for name, value in arrays.items() if value is not None})
    rl_lab.replace_files({path: content.getvalue()})
    return path


def _plain(name: str, value: Any) -> np.ndarray:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    value = np.asarray(value)
    if value.dtype.kind == "O" and value.size and all(isinstance(x, str) for x in value.flat):
        value = value.astype(str)  # ids of prompts, as verl keeps them
    if value.dtype.kind not in "fiubU":
        kind = type(value.flat[0]).__name__ if value.size else "nothing"
        raise TypeError(f"{name}: got {value.dtype} ({kind}), wanted numbers or strings")
    return value


# ------------------------------------------------------------------------------------------ gradients and files


def gradients(loss: Tensor, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """dloss_dNAME for every NAME in tensors that requires a gradient and has one in the table; the graph stays whole.

    A tensor that the loss does not read has gradient 0. Raises ValueError for a loss that depends on none of them.
    """
    wanted = {
        name: value
        for name, value in tensors.items()
        if CANONICAL.get(name) in WITH_GRADIENT and isinstance(value, Tensor) and value.requires_grad
    }
    if not wanted:
        return {}
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise ValueError("the loss has no gradient: record it before backward(), not detached")
    found = torch.autograd.grad(loss, list(wanted.values()), retain_graph=True, allow_unused=True)
    if all(slope is None for slope in found):
        raise ValueError(f"the loss does not depend on the recorded {', '.join(wanted)}: was it computed from others?")
    return {
        f"dloss_d{name}": torch.zeros_like(value) if slope is None else slope
        for (name, value), slope in zip(wanted.items(), found)
    }


class Recorder:
    """One folder: which steps are recorded, where their files lie, and what becomes of a failure."""

    def __init__(self, folder: str | Path, every: int = 1, logits: bool = False):
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every: got {every!r}, wanted a whole number from 1")
        self.folder, self.every, self.logits = Path(folder), every, logits
        self.said: set[str] = set()
        rl_lab.check_writable([self.folder / "rank0_mb0.npz"], expected_bytes=20_000)

    def wants(self, step: int) -> bool:
        return step % self.every == 0

    @contextlib.contextmanager
    def attempt(self, versions: str = "") -> Iterator[None]:
        """What fails inside is said once, in one line, and does not stop the training."""
        try:
            yield
        except Exception as problem:
            reason = rl_lab.one_line(f"{type(problem).__name__}: {problem}")[:300]
            if reason not in self.said:
                self.said.add(reason)
                print(f"record: nothing recorded ({reason}){versions}; the training goes on", file=sys.stderr, flush=True)

    def write(self, loss: Tensor, place: Mapping[str, int], arrays: Mapping[str, Any], columns: int | None = None) -> Path:
        """One micro-batch: its arrays with the gradients of the loss, and what backward() brings to the log-probabilities.

        place: rank, world_size, micro_batch, accumulation_steps, step. columns: how many of the last columns belong to
        the text, where a model puts tokens of its own before it.
        """
        path = self.folder / f"step_{place['step']:06d}" / f"rank{place['rank']}_mb{place['micro_batch']}.npz"
        slopes = gradients(loss, arrays)
        contents = {**arrays, **slopes, "loss": loss, **place}
        if columns is not None:
            for name in filter(_is_token_wise, contents):
                contents[name] = last_columns(contents[name], columns)
        contents = {name: value.detach() if isinstance(value, Tensor) else value for name, value in contents.items()}
        save(path, **contents)
        lead = next((name for name in arrays if f"dloss_d{name}" in slopes and CANONICAL[name] == "logps"), None)
        if lead is not None:
            self._watch_backward(path, arrays[lead], slopes[f"dloss_d{lead}"], contents, columns)
        return path

    def _watch_backward(self, path: Path, logps: Tensor, slope: Tensor, contents: dict, columns: int | None) -> None:
        def hook(gradient: Tensor) -> None:
            handle.remove()
            with self.attempt():
                if not torch.equal(gradient, slope):
                    save(path, **contents, backward_dlogps=gradient if columns is None else last_columns(gradient, columns))

        handle = logps.register_hook(hook)


def _is_token_wise(name: str) -> bool:
    field = FIELDS.get(CANONICAL.get(name, ""))
    return field is not None and field.shape in ("N T", "N T V")


def own_rank() -> tuple[int, int]:
    """rank and world size of this process, (0, 1) where no process group runs."""
    group = torch.distributed
    if group.is_available() and group.is_initialized():
        return group.get_rank(), group.get_world_size()
    return 0, 1


# ------------------------------------------------------------------------------------------ any loop, any loss function


_RECORDERS: dict[tuple[str, int], Recorder] = {}


def record_loss(
    folder: str | Path,
    loss: Tensor,
    *,
    step: int,
    micro_batch: int = 0,
    accumulation_steps: int = 1,
    every: int = 1,
    **arrays: Any,
) -> Path | None:
    """Record one micro-batch of any loop, before loss.backward(): -> the file, None where nothing was recorded.

    step: optimiser step; only multiples of `every` are recorded. micro_batch: 0 .. accumulation_steps - 1 within it.
    arrays: under the names of extensions/read/names.py; logps must be the tensor that the loss was computed from (its
    gradient is taken), also vpreds and entropies where the loss has them. rank and world_size: torch.distributed's, unless
    they are given. Raises ValueError and rl_lab.FileProblem at the first call for a wrong folder or `every`; what fails
    later is said in one line, and the training goes on.
    """
    recorder = _RECORDERS.get((str(folder), every))
    if recorder is None:
        recorder = _RECORDERS[str(folder), every] = Recorder(folder, every)
    if not recorder.wants(step):
        return None
    rank, world_size = own_rank()
    place = {"rank": arrays.pop("rank", rank), "world_size": arrays.pop("world_size", world_size)}
    place |= {"micro_batch": micro_batch, "accumulation_steps": accumulation_steps, "step": step}
    with recorder.attempt():
        return recorder.write(loss, place, arrays)
    return None


CONFIG_NAMES = {
    "clip_ratio": ("clip_low", "clip_high"),
    "clip_ratio_low": ("clip_low",),
    "clip_ratio_high": ("clip_high",),
    "clip_ratio_c": ("ratio_cap",),
    "loss_scale_factor": ("budget",),
    "dp_size": ("world_size",),
    "batch_num_tokens": ("num_items_in_batch",),
    "global_batch_size": ("global_batch_size",),
}
"""What is read from a loss function's `config` and its `global_batch_info`: name there -> names here; later ones win."""


def record_loss_function(
    loss_fn: Callable, folder: str | Path, every: int = 1, accumulation_steps: int = 1, **more: Any
) -> Callable:
    """The same loss function, recording its arguments, its value and its gradient: verl's policy losses and their like.

    loss_fn(old_log_prob, log_prob, advantages, response_mask, ..., config=None) -> loss, or (loss, ...). Every argument
    whose name is in the table of names (extensions/read/names.py) is recorded, with the clip widths and global counts of
    `config`. accumulation_steps: calls an optimiser step. more: arrays and numbers that the function is not given; a value
    may be a function without arguments, asked at each recording (token_level_rewards, uid of the batch at hand).
    """
    recorder, signature, calls = Recorder(folder, every), inspect.signature(loss_fn), [0]

    def recording(*args: Any, **kwargs: Any) -> Any:
        result = loss_fn(*args, **kwargs)
        if not torch.is_grad_enabled():
            return result
        step, micro_batch = divmod(calls[0], accumulation_steps)
        calls[0] += 1
        if recorder.wants(step):
            with recorder.attempt():
                bound = signature.bind(*args, **kwargs).arguments
                given = {**bound, **bound.get("kwargs", {})}
                arrays = {name: value for name, value in given.items() if name in CANONICAL and value is not None}
                arrays |= config_numbers(given.get("config"))
                arrays |= {name: value() if callable(value) else value for name, value in more.items()}
                rank, world_size = own_rank()
                place = {"rank": rank, "world_size": int(arrays.pop("world_size", world_size))}
                place |= {"micro_batch": micro_batch, "accumulation_steps": accumulation_steps, "step": step}
                recorder.write(result[0] if isinstance(result, tuple) else result, place, arrays)
        return result

    return recording


def config_numbers(config: Any) -> dict[str, float]:
    """The numbers of CONFIG_NAMES that a config holds, an object or a mapping; its global_batch_info counts too."""
    made: dict[str, float] = {}

    def take(holder: Any) -> None:
        for name, roles in CONFIG_NAMES.items():
            value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
            if isinstance(value, (int, float, Tensor)) and not isinstance(value, bool):
                made.update(dict.fromkeys(roles, float(value)))

    for holder in (config, _item(config, "global_batch_info")):
        if holder is not None:
            take(holder)
    return made


def _item(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


# ------------------------------------------------------------------------------------------ TRL's trainers


def record(trainer_class: type, folder: str | Path, every: int = 1, *, logits: bool = False) -> type:
    """A subclass of a TRL trainer (GRPO, RLOO, DPO, KTO, or one derived from them) that records as it trains.

    every: optimiser steps 0, every, 2 every, ... are recorded, with all their micro-batches and on every rank. Where one
    batch is used for several passes (num_iterations), take a number that is no multiple of it: a first pass has every ratio
    at 1 and shows no clip. logits: a second forward pass without gradient stores the logits too (rows x tokens x
    vocabulary), before any temperature. Raises TypeError for another class, ValueError and rl_lab.FileProblem for a wrong
    `every` or folder.
    """
    if not isinstance(trainer_class, type):
        raise TypeError(f"record: got {trainer_class!r}, wanted a trainer class, before it is built")
    known = next((TRAINERS[one.__name__] for one in trainer_class.__mro__ if one.__name__ in TRAINERS), None)
    if known is None:
        raise TypeError(f"record: got {trainer_class.__name__}, wanted {', '.join(TRAINERS)} or a class derived from one")
    return type(f"Recording{trainer_class.__name__}", (known, trainer_class), {"recorder": Recorder(folder, every, logits)})
