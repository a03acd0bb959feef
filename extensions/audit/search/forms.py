"""The forms that a loss may take: ratios, surrogates, KL terms, reductions, and the named edits of each.

A form is a function from a batch to the value of J (or of the KL) and its slope, token by token. The plain ones are
objectives.evaluate itself with every token weighing 1; the mistaken ones are written out here, formula beside name. Which
forms are worth trying is read off the whole batch once (`Traits`), so that they can be evaluated on parts of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Callable, Iterator, NamedTuple

import numpy as np
import torch
from torch import Tensor

from extensions.audit.read.recording import Recording
from extensions.audit.reading.digits import round_between
from extensions.objectives import Batch, Row, evaluate, make_batch

INF = math.inf
CLIP_PAIRS = ((0.2, 0.2), (0.2, 0.28), (0.1, 0.1), (0.3, 0.3), (0.2, 0.3), (0.4, 0.4), (3e-4, 4e-4))
CAPS = (3.0, 10.0)
KL_COEFS = (0.04, 0.001, 0.01, 0.02, 0.05, 0.1, 0.005, 0.002, 0.2, 0.5, 1.0, 0.0001, 0.0005)
OFF_POLICY_THRESHOLDS = (0.5, 0.1, 0.05, 0.02, 0.01, 1.0, 2.0)


class Form(NamedTuple):
    """One way of writing J, or a KL term, on one batch: value and slope per token, 0 outside the mask."""

    value: Tensor
    slope: Tensor | None  # None: no gradient at all


class Spec(NamedTuple):
    """A form before it meets a batch: its choices under the names of Row, the mistake in it, and how it is computed."""

    fields: dict
    mistake: str | None
    make: Callable[[Batch], Form]


@dataclass(frozen=True)
class Traits:
    """What decides which forms can differ, read off the whole batch."""

    has_old: bool
    moved: bool  # some ratio is not 1
    largest_ratio: float
    has_reference: bool  # and it is not the policy itself
    wide_kl: bool  # some |l - lr| or |l - l0| is above 2
    along_time: Tensor | None  # (T,) as many answers as positions: their advantages, as if they stood along time
    has_logits: bool

    @staticmethod
    def of(batch: Batch) -> "Traits":
        A, is_square = batch.advantages, batch.mask.shape[0] == batch.mask.shape[1]
        l, old, ref = batch.logps, batch.old_logps, batch.ref_logps
        gaps = [(l - x) for x in (old, ref) if x is not None]
        return Traits(
            old is not None,
            old is not None and not torch.equal(l, old),
            1.0 if old is None else float((l - old).max().clamp(max=600).exp()),
            ref is not None and not torch.equal(l, ref),
            any(float(gap.abs().max()) > 2 for gap in gaps),
            A[:, 0] if is_square and A is not None and A.shape[1] == 1 else None,
            batch.logits is not None and batch.ref_logits is not None,
        )


# ------------------------------------------------------------------------------------------ the batch and its edits


def build_batch(recording: Recording, mask: np.ndarray | None = None, advantages=None, **overrides) -> Batch:
    """The recording as an objectives.Batch, under another mask if given. Raises ValueError as make_batch."""
    arrays = recording.arrays
    mask = arrays["mask"] if mask is None else mask
    given = {name: arrays[name] for name in ("old_logps", "ref_logps", "entropies") if name in arrays}
    for name in ("logits", "ref_logits"):
        if "logits" in arrays and "ref_logits" in arrays:
            given[name] = arrays[name]
    given |= overrides
    lead = given.pop("logps", arrays.get("logps"))
    lead = np.zeros(mask.shape) if lead is None else lead
    return make_batch(
        logps=lead,
        mask=mask,
        advantages=advantages,
        allow_empty_rows=True,
        dtype=torch.float64,
        **window(recording),
        **given,
    )


def window(recording: Recording) -> dict:
    """window_tokens, window_rows, accumulation_steps, budget, from the recorded counts."""
    number = recording.number
    steps = int(max(number("accumulation_steps", 1), 1))
    ranks = max(number("world_size", 1), 1)
    made: dict = {"accumulation_steps": steps}
    if number("num_items_in_batch"):
        made["window_tokens"] = number("num_items_in_batch") / ranks * steps / max(number("steps_per_generation", steps), 1)
    if number("window_tokens"):
        made["window_tokens"] = number("window_tokens")
    if number("global_batch_size"):
        made["window_rows"] = number("global_batch_size") / ranks
    if number("budget"):
        made["budget"] = number("budget")
    return {name: value for name, value in made.items() if value > 0}


# ------------------------------------------------------------------------------------------ forms of J


def clip_pairs(recording: Recording) -> list[tuple[float, float]]:
    low, high = recording.number("clip_low"), recording.number("clip_high")
    pairs = list(CLIP_PAIRS)
    if low is not None or high is not None:
        low = high if low is None else low
        pairs.insert(0, (low, low if high is None else high))
    return list(dict.fromkeys(pairs))


def plain_spec(fields: dict) -> Spec:
    """J and its slope for one row of choices: what the engine returns when every token weighs 1."""
    row = Row("hypothesis", baseline="given", reduction="sum_over_tokens", **fields)

    def make(batch: Batch) -> Form:
        result = evaluate(row, replace(batch, ref_logps=None))
        return Form(-result.token_losses, -result.dloss_dlogps)

    return Spec(fields, None, make)


def plain_choices(recording: Recording, batch: Batch, gradient: Tensor | None) -> Iterator[dict]:
    """Every ratio and surrogate of the table with the constants that trainers use, likeliest first."""
    pairs = clip_pairs(recording)
    pairs += [pair for pair in seen_bounds(batch, gradient) if pair not in pairs]
    if batch.old_logps is None:
        pairs = pairs[:1]
    caps = list(dict.fromkeys([c for c in (recording.number("ratio_cap"), *CAPS) if c]))

    def clip(pair: tuple[float, float]) -> dict:
        return {"clip_low": pair[0], "clip_high": pair[1]}

    has_logps = bool(batch.logps.any()) or batch.old_logps is not None
    if has_logps:
        for pair in pairs:
            yield {"ratio": "token", "surrogate": "clip", **clip(pair)}
        for pair in pairs:
            for cap in caps[:1] if recording.number("ratio_cap") is None else caps:
                yield {"ratio": "token", "surrogate": "dual_clip", **clip(pair), "ratio_cap": cap}
        if recording.number("ratio_cap"):
            yield {"ratio": "token", "surrogate": "capped_clip", **clip(pairs[0]), "ratio_cap": caps[0]}
        for ratio in ("sequence_mean", "sequence_product", "sequence_mean_token"):
            for pair in pairs:
                yield {"ratio": ratio, "surrogate": "clip", **clip(pair)}
        for ratio in ("token", "sequence_mean", "sequence_product"):
            yield {"ratio": ratio, "surrogate": "plain"}
    yield {"ratio": "none", "surrogate": "plain"}
    if not has_logps:
        return
    tops = [(INF, -0.8), (INF, 4.0), (1.0, 4.0), (1.0, 0.28), (INF, 0.2), (INF, 0.28), (INF, 1.0), (INF, 2.0), (INF, 3.0)]
    if recording.number("clip_high") is not None:
        tops += [(INF, recording.number("clip_high") - 1)]
    for pair in dict.fromkeys([*pairs[:3], *tops]):
        yield {"ratio": "token", "surrogate": "cispo", **clip(pair)}
    yield {"ratio": "token", "surrogate": "sapo", "tau_positive": 1.0, "tau_negative": 1.05}
    yield {"ratio": "token", "surrogate": "vespo"}
    for surrogate, bands in (("dppo_tv", ((0.15, 0.15), (0.2, 0.2))), ("dppo_kl", ((0.05, 0.05), (0.2, 0.2)))):
        for pair in dict.fromkeys([*bands, *pairs[:1]]):
            yield {"ratio": "token", "surrogate": surrogate, **clip(pair), "ratio_cap": caps[0]}
    for pair in dict.fromkeys([(0.4, 0.4), *pairs[:1]]):
        yield {"ratio": "sequence_mean_of_clipped", "surrogate": "plain", **clip(pair)}
    if batch.old_logps is not None:
        lag = (batch.old_logps - batch.logps).sum(1) / batch.lengths.clamp(min=1)
        lag = lag[(batch.advantages < 0).any(1) & (batch.lengths > 0)]
        for threshold in dict.fromkeys([*seen_thresholds(batch, gradient), *OFF_POLICY_THRESHOLDS]):
            if bool((lag > threshold).any()):
                yield {
                    "ratio": "token",
                    "surrogate": "clip",
                    **clip(pairs[0]),
                    "off_policy_rows": "drop",
                    "off_policy_threshold": threshold,
                }


def seen_bounds(batch: Batch, gradient: Tensor | None) -> list[tuple[float, float]]:
    """Clip widths read off a recorded gradient: between the last ratio that keeps it and the first that loses it."""
    if gradient is None or batch.old_logps is None or batch.ref_logps is not None:
        return []
    g, mask = gradient, batch.mask
    r = (batch.logps - batch.old_logps).exp()
    A = batch.advantages.expand_as(r)
    flat = (g == 0) & mask & (A != 0)
    sides = []
    for sign, cut in ((1, flat & (A > 0) & (r > 1)), (-1, flat & (A < 0) & (r < 1))):
        kept = (g != 0) & mask & (A * sign > 0)
        distance = sign * (r - 1)
        if not cut.any():
            sides.append(None)
            continue
        beyond = float(distance[cut].min())
        below = float(distance[kept & (distance < beyond)].max()) if (kept & (distance < beyond)).any() else 0.0
        sides.append(round_between(max(below, 0.0), beyond))
    if sides == [None, None] or not all(side is None or side > 0 for side in sides):
        return []
    high, low = sides
    return [(high if low is None else low, low if high is None else high)]


def seen_thresholds(batch: Batch, gradient: Tensor | None) -> list[float]:
    """A lag beyond which answers with A < 0 have lost their whole gradient."""
    if gradient is None or batch.old_logps is None:
        return []
    A = batch.advantages.expand_as(batch.logps)
    lag = (batch.old_logps - batch.logps).sum(1) / batch.lengths.clamp(min=1)
    negative = ((A < 0) & batch.mask).any(1)
    silent = negative & (gradient == 0).all(1)
    loud = negative & ~silent
    if not silent.any() or not loud.any() or lag[silent].min() <= lag[loud].max():
        return []
    return [round_between(float(lag[loud].max()), float(lag[silent].min()))]
