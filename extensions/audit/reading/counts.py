"""1 / kappa as a count times recorded factors. A count that is not recorded and cannot be counted stays a number."""

from __future__ import annotations

from itertools import product

import numpy as np

from extensions.audit.reading.facts import Facts

NAMED_WITHIN = 4e-5  # relative


def counts(f: Facts) -> dict[str, float]:
    """Name -> number, of everything in the recording that a mean may be taken over."""
    mask, arrays, number = f.mask, f.recording.arrays, f.recording.number
    rows, width = mask.shape
    made = {
        "answers": rows,
        "counted tokens": int(mask.sum()),
        "answers with a token": int(mask.any(1).sum()),
        "1": 1,
        "slots (answers x width)": rows * width,
        "width": width,
    }
    recorded = arrays["mask"]
    if (recorded.sum(), recorded.any(1).sum()) != (mask.sum(), mask.any(1).sum()):
        made["tokens of the recorded mask"] = int(recorded.sum())
    if number("num_items_in_batch"):
        made["num_items_in_batch"] = number("num_items_in_batch")
    if number("global_batch_size"):
        made["global_batch_size"] = number("global_batch_size")
    if number("budget"):
        made["answers x budget"] = rows * number("budget")
        made["answers with a token x budget"] = mask.any(1).sum() * number("budget")
        made["budget"] = number("budget")
    if "attention_mask" in arrays:
        made["tokens of the attention mask"] = int(arrays["attention_mask"].sum())
    if "group_ids" in arrays:
        made["prompts"] = len(np.unique(arrays["group_ids"]))
    if "micro_batch_ids" in arrays:
        made["micro-batches"] = len(np.unique(arrays["micro_batch_ids"]))
    kept = (f.g != 0).any(1).sum()
    if kept != rows:
        made["answers with a gradient"] = int(kept)
        made["tokens of answers with a gradient"] = int(mask[(f.g != 0).any(1)].sum())
    with_gradient = int((f.g != 0).sum())
    if with_gradient != made["counted tokens"]:
        made["tokens with a gradient"] = with_gradient
    return {name: float(value) for name, value in made.items() if value}


def recorded_factors(f: Facts) -> dict[str, float]:
    number = f.recording.number
    made = {name: number(name) for name in ("accumulation_steps", "world_size", "steps_per_generation") if (number(name) or 1) != 1}
    return made


def named(value: float, f: Facts) -> list[str]:
    """Every way of writing value as a count times recorded factors; simplest first. Empty: none."""
    factors = recorded_factors(f)
    found = []
    for powers in product((0, 1, -1), repeat=len(factors)):
        scale = float(np.prod([v**p for v, p in zip(factors.values(), powers)]))
        text = "".join(f" {'x' if p > 0 else '/'} {n}" for n, p in zip(factors, powers) if p)
        for name, count in counts(f).items():
            if abs(count * scale - value) <= NAMED_WITHIN * abs(value):
                found.append((sum(map(abs, powers)) + (name == "1"), name + text))
    return [name for _, name in sorted(found, key=lambda x: x[0])][:6]
