"""Checks that need no search: the batch in words, its inputs, the reported metrics, and what only looks like a mistake.

Each check reads the arrays it names and stays silent without them. A finding says the numbers it saw and the rows.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from extensions.audit.catalogue import Finding, finding
from extensions.audit.checks.advice import unread_words
from extensions.audit.checks.consistency import CONSISTENCY, first_pass_places
from extensions.audit.read.recording import Recording
from extensions.audit.search.level import in_level_group
from extensions.audit.read.masks import last_counted
from extensions.audit.tolerance import LOG_PROBABILITY, RATIO


# ------------------------------------------------------------------------------------------ the batch in words


def describe_batch(recording: Recording, counts: dict, words: list[str]) -> None:
    """Fill the counts of the JSON report and the sentences of the printed one."""
    a = recording.arrays
    mask = a.get("mask")
    if mask is not None:
        rows, width = mask.shape
        lengths = mask.sum(1)
        counts |= {
            "rows": rows,
            "width": width,
            "counted_tokens": int(mask.sum()),
            "shortest": int(lengths.min()),
            "longest": int(lengths.max()),
            "empty_rows": int((lengths == 0).sum()),
        }
        words.append(
            f"{rows} answers, {mask.sum()} counted tokens in {rows} x {width} slots, "
            f"lengths {lengths.min()} to {lengths.max()}"
        )
        if width > 1 and (lengths < width).any() and (lengths > 0).any():
            real = mask[lengths > 0]
            left, right = bool((~real[:, 0]).any()), bool((~real[:, -1]).any())
            side = "left and right" if left and right else "left" if left else "right"
            padded = f"{side} padded"
            if (lengths == 0).any():
                padded += f", {(lengths == 0).sum()} rows without a counted token"
            words.append(padded)
        if len(set(lengths.tolist())) == 1 and rows > 1 and width > 1:
            words.append("all answers are equally long: per-response and token means agree on this batch")
    generation = "gen_group_ids" in a
    ids = a.get("gen_group_ids", a.get("group_ids"))
    if ids is not None:
        sizes = np.unique(ids, return_counts=True)[1]
        counts |= {"groups": len(sizes), "smallest_group": int(sizes.min()), "largest_group": int(sizes.max())}
        size = f"of {sizes[0]}" if len(set(sizes.tolist())) == 1 else f"of {sizes.min()} to {sizes.max()}"
        words.append(
            f"{len(sizes)} group{'s' * (len(sizes) != 1)} {size}"
            + (" in the generation batch this micro-batch was cut from" if generation else "")
            + ("" if _contiguous(ids) else ", not standing together")
        )
    if "chosen_logps" in a:
        counts["pairs"] = int(a["chosen_logps"].size)
        words.append(f"{counts['pairs']} pairs of a chosen and a rejected answer")
    elif "labels" in a:
        counts["labelled"] = int(a["labels"].size)
        words.append(f"{a['labels'].size} labelled answers, {int(a['labels'].sum())} desirable")
    if mask is None and "rewards" in a:
        words.append(f"a rollout of shape {a['rewards'].shape}")
        counts["steps"] = int(a["rewards"].size)
    old, new = a.get("old_logps"), a.get("logps")
    if old is not None and new is not None and mask is not None and old.shape == mask.shape == new.shape and mask.any():
        with np.errstate(all="ignore"):
            moved = np.abs(new - old)[mask]
            ratio = np.exp(np.clip((new - old)[mask], -50, 50))
        counts["largest_log_ratio"] = float(np.nanmax(moved)) if np.isfinite(moved).any() else None
        words.append(
            "every ratio is 1: a first pass"
            if not moved.any()
            else f"ratios {np.nanmin(ratio):.4g} to {np.nanmax(ratio):.4g}: a later pass"
        )
    reported = [
        n
        for n in ("advantages", "loss", "dloss_dlogps", "dloss_dvpreds", "kl", "clip_fraction", "returns")
        if n in recording
    ]
    words.append(f"reported: {', '.join(reported) or 'nothing'}")
    if recording.renamed:
        words.append(
            "read as: " + ", ".join(f"{name} = {canonical}" for name, canonical in sorted(recording.renamed.items()))
        )
    if recording.unread:
        words.append(unread_words(recording))


def _contiguous(ids: np.ndarray) -> bool:
    return len(np.unique(ids)) == 1 + int((ids[1:] != ids[:-1]).sum()) if len(ids) else True


# ------------------------------------------------------------------------------------------ inputs


def input_findings(recording: Recording) -> list[Finding]:
    out: list[Finding] = []
    for check in (
        _finite,
        _positive_logps,
        _mask_shape,
        _eos,
        _groups,
        _ratios,
        _grid,
        _widths,
        _reset_rows,
        _scores,
        _logs,
        *CONSISTENCY,
    ):
        out += check(recording)
    return out


def _finite(recording: Recording) -> list[Finding]:
    a, mask = recording.arrays, recording.get("mask")
    out = []
    if mask is None:
        return out
    bad, where = [], np.zeros(len(mask), dtype=bool)
    for name in (
        "logps",
        "old_logps",
        "ref_logps",
        "entropies",
        "values",
        "vpreds",
        "loss_mat",
        "advantages",
        "dloss_dlogps",
    ):
        if name in a and a[name].shape == mask.shape:
            outside = ~np.isfinite(a[name]) & ~mask
            if outside.any():
                bad.append(name)
                where |= outside.any(1)
    if bad:
        loss = recording.number("loss")
        severity = "mistake" if loss is not None and not math.isfinite(loss) else "warning"
        text = f"{', '.join(bad)}" + (
            f"; the reported loss is {loss}" if severity == "mistake" else "; harmless only if they are selected away"
        )
        out.append(finding("nonfinite_in_masked_slots", severity, text + ".", np.flatnonzero(where)))
    return out


def _positive_logps(recording: Recording) -> list[Finding]:
    if "ratio" in recording.arrays:
        return []
    out, rows, names, largest = [], set(), [], 0.0
    for name in ("logps", "old_logps", "ref_logps"):
        value = recording.get(name)
        if value is None or value.ndim != 2:
            continue
        with np.errstate(all="ignore"):
            above = value > LOG_PROBABILITY
        if above.any():
            names.append(name)
            rows |= set(np.flatnonzero(above.any(1)).tolist())
            largest = max(largest, float(value[above].max()))
    if names and _may_be_densities(recording):
        out.append(finding("log_density_above_0", "note", f"{', '.join(names)} up to {largest:.4g}.", sorted(rows)))
    elif names:
        out.append(finding("positive_logps", "mistake", f"{', '.join(names)} up to {largest:.4g}.", sorted(rows)))
    return out


_OF_LANGUAGE = ("completion_ids", "input_ids", "group_ids", "logits", "chosen_logps", "prompt_lengths", "eos_id", "pad_id")
_OF_ENVIRONMENT = ("terminated", "truncated", "boundary", "episode_starts", "last_values", "next_values", "env_rewards")


def _may_be_densities(recording: Recording) -> bool:
    """Samples of an environment, whose actions may be real numbers: one per row, or beside the flags of episodes."""
    if any(name in recording for name in _OF_LANGUAGE):
        return False
    logps = recording.get("logps")  # a batch of advantages alone has none
    return logps is not None and logps.shape[1] == 1 or any(name in recording for name in _OF_ENVIRONMENT)


def _mask_shape(recording: Recording) -> list[Finding]:
    mask = recording.get("mask")
    if mask is None or mask.shape[1] < 3:
        return []
    holes = (np.diff(mask.astype(np.int8), axis=1) == 1).sum(1) + mask[:, 0] > 1
    if not holes.any() or "tool_mask" in recording.arrays:
        return []
    return [finding("mask_not_contiguous", "note", f"{holes.sum()} of {len(mask)} rows.", np.flatnonzero(holes))]


def _eos(recording: Recording) -> list[Finding]:
    """The token right after an answer's last counted one is EOS, and the answer counts none."""
    a, mask, ids = recording.arrays, recording.get("mask"), recording.get("completion_ids")
    if mask is None or ids is None or mask.shape[1] < 2:
        return []
    last = last_counted(mask)
    after = np.zeros_like(mask)
    after[:, 1:] = last[:, :-1]
    rows = np.flatnonzero(after.any(1))
    if not len(rows):
        return []
    following = ids[after]
    ends_with = ids[last & ~mask[:, -1:]]
    known = a.get("eos_id")
    if known is not None:
        known = known.reshape(-1)
    elif (
        "pad_id" in recording.numbers
        and len(np.unique(ends_with)) > 1
        and not (ids[mask] == recording.numbers["pad_id"]).any()
    ):
        known = np.array([])
    if known is None or not known.size:
        return []
    # A longer EOS than one token cannot be seen here; an answer cut by the length limit has no slot after its end.
    dropped = np.isin(following, known) & ~np.array([np.isin(ids[row][mask[row]], known).any() for row in rows])
    if "lengths" in a:
        dropped &= a["lengths"][rows] > mask.sum(1)[rows]
    if not dropped.any():
        return []
    return [
        finding(
            "eos_dropped",
            "mistake",
            f"In {dropped.sum()} of {len(rows)} short answers the next token is EOS (id "
            f"{int(following[dropped][0])}) and is not counted.",
            rows[dropped],
        )
    ]


def _groups(recording: Recording) -> list[Finding]:
    a = recording.arrays
    ids, rewards = (a.get(f"gen_{n}", a.get(n)) for n in ("group_ids", "rewards"))
    if ids is None:
        return []
    out = []
    values, inverse, sizes = np.unique(ids, return_inverse=True, return_counts=True)
    alone = np.flatnonzero(sizes[inverse] == 1)
    if len(alone) and len(values) > 0:
        advantages = a.get("advantages")
        broken = advantages is not None and not np.isfinite(advantages).all()
        out.append(
            finding(
                "group_of_one",
                "mistake" if broken else "warning",
                f"{(sizes == 1).sum()} of {len(values)} groups"
                + ("; advantages are not finite: a sample std of one value." if broken else "."),
                alone if "gen_group_ids" not in a else (),
            )
        )
    if rewards is not None and rewards.shape == ids.shape:
        level = in_level_group(ids, rewards)
        compared = int((sizes > 1).sum())
        if level.any():
            count = len(np.unique(ids[level]))
            out.append(
                finding(
                    "equal_groups",
                    "note",
                    f"{count} of {compared} groups ({100 * count / compared:.0f} %)"
                    + (": none gives a gradient." if count == compared else "."),
                    advice="",
                )
            )
    return out


def _ratios(recording: Recording) -> list[Finding]:
    a, mask = recording.arrays, recording.get("mask")
    old, new, step = a.get("old_logps"), a.get("logps"), recording.number("pass_index")
    if mask is None or old is None or new is None or step is None or old.shape != mask.shape:
        return []
    with np.errstate(all="ignore"):
        gap = (new - old)[mask]
    if not np.isfinite(gap).all():
        return []
    out = []
    if step == 0 and np.abs(gap).max(initial=0) > RATIO:
        share = 100 * (np.abs(gap) > RATIO).mean()
        text = f"Ratios {np.exp(gap.min()):.6g} to {np.exp(gap.max()):.6g}, {share:.0f} % of the tokens off 1."
        for name, neutral in (("temperature", 1), ("top_k", 0)):
            if recording.number(name, neutral) not in (neutral, 0):
                text += f" {name} {recording.number(name):g} is recorded: the sampler's distribution is not the trainer's."
        text += first_pass_places(recording, np.abs(np.where(mask, new - old, 0)) > RATIO)
        out.append(
            finding(
                "first_pass_ratio_not_one",
                "warning",
                text,
                np.flatnonzero((np.abs(np.where(mask, new - old, 0)) > RATIO).any(1)),
            )
        )
    if step >= 1 and not np.abs(gap).any():
        out.append(finding("old_logps_equal_logps", "warning", f"Pass {step:g}: all {gap.size} ratios are exactly 1."))
    return out


def _grid(recording: Recording) -> list[Finding]:
    mask = recording.get("mask")
    out = []
    for name in ("old_logps", "logps", "ref_logps"):
        value = recording.get(name)
        if value is None or mask is None or value.shape != mask.shape or "ratio" in recording.arrays:
            continue
        used = value[mask]
        used = used[np.isfinite(used) & (used != 0)]
        if name in recording.low_precision:
            out.append(name)
        elif used.size and (np.frexp(used)[0] * 32 % 1 != 0).any():  # hand-written numbers such as -1.25 need few bits
            on_grid = torch.as_tensor(used).to(torch.bfloat16).double().numpy() == used
            if on_grid.all():
                out.append(name)
    if not out:
        return []
    return [finding("stored_in_bf16", "warning", f"{', '.join(out)}.")]


def _widths(recording: Recording) -> list[Finding]:
    low, high, cap = (recording.number(n) for n in ("clip_low", "clip_high", "ratio_cap"))
    out = []
    if low is not None and high is not None and 0 < high < low < 1:
        out.append(
            finding("clip_widths_unusual", "warning", f"clip_high {high:g} is below clip_low {low:g}: are they exchanged?")
        )
    if cap is not None and 0 < cap <= 1:
        out.append(
            finding(
                "clip_widths_unusual",
                "warning",
                f"ratio_cap {cap:g} is not above 1: tokens with A < 0 lose their gradient at once.",
            )
        )
    return out


def _reset_rows(recording: Recording) -> list[Finding]:
    rows, mask = recording.get("reset_rows"), recording.get("mask")
    if rows is None or not rows.any():
        return []
    flagged = rows.reshape(len(rows), -1).any(1)
    if mask is not None and len(mask) == len(flagged):
        flagged = flagged & mask.any(1)
    if not flagged.any():
        return []
    return [finding("reset_rows_counted", "mistake", f"{flagged.sum()} of {len(flagged)} rows.", np.flatnonzero(flagged))]


def _scores(recording: Recording) -> list[Finding]:
    """An outcome score that does not sit on the last counted token."""
    dense, mask = recording.get("token_level_rewards"), recording.get("mask")
    if dense is None or mask is None or dense.shape != mask.shape or not np.isfinite(dense).all():
        return []
    single = (dense != 0).sum(1) == 1
    if not single.any() or ((dense != 0).sum(1) > 1).any() or mask.shape[1] < 2:
        return []
    outside = single & ((dense != 0) & ~mask).any(1)
    early = single & ((dense != 0) & mask & ~last_counted(mask)).any(1)
    if outside.any():
        return [
            finding(
                "score_on_wrong_token",
                "mistake",
                f"{outside.sum()} of {single.sum()} scores sit in an unused slot and are lost.",
                np.flatnonzero(outside),
            )
        ]
    if early.sum() > 0.5 * single.sum():
        return [
            finding(
                "score_on_wrong_token",
                "warning",
                f"{early.sum()} of {single.sum()} scores sit before the last counted token.",
                np.flatnonzero(early),
            )
        ]
    return []


def _logs(recording: Recording) -> list[Finding]:
    a, out = recording.arrays, []
    steps = a.get("log_steps")
    if steps is not None:
        columns = steps.reshape(len(steps), -1)
        step = np.diff(columns[:, 0])
        if (columns != columns[:, :1]).any():
            row = int(np.flatnonzero((columns != columns[:, :1]).any(1))[0])
            out.append(
                finding(
                    "log_steps_not_increasing",
                    "warning",
                    f"Metrics of one step carry different step numbers: {columns[row].tolist()} in row {row}.",
                )
            )
        elif (step <= 0).any() or len(set(step.tolist())) > 1:
            out.append(
                finding(
                    "log_steps_not_increasing",
                    "warning",
                    f"Steps {columns[:8, 0].tolist()}: wanted one row a step, evenly spaced.",
                )
            )
    values, windows, logged = a.get("log_values"), a.get("log_windows"), recording.number("logged_mean")
    if values is not None and windows is not None and logged is not None and values.shape == windows.shape:
        flat = float(values.mean())
        by_window = float(np.mean([values[windows == w].mean() for w in np.unique(windows)]))
        tolerance = 1e-6 * max(1.0, abs(flat), abs(by_window))
        if abs(logged - flat) <= tolerance < abs(flat - by_window):
            out.append(
                finding(
                    "flat_log_mean",
                    "mistake",
                    f"Logged {logged:.6g} is the flat mean; the mean of the window means is {by_window:.6g}.",
                )
            )
    return out
