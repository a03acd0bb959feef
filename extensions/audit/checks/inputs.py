"""Checks that need no search: the batch in words, its inputs, the reported metrics, and what only looks like a mistake.

Each check reads the arrays it names and stays silent without them. A finding says the numbers it saw and the rows.
"""

from __future__ import annotations

import math

import numpy as np
import torch

import rl_lab
from extensions.audit.search.advantages import in_level_group
from extensions.audit.catalogue import Finding, finding
from extensions.audit.read.recording import Recording
from extensions.audit.search.forms import last_counted, mask_edits

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
        words.append(f"not read: {', '.join(sorted(map(str, recording.unread))[:12])}")


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
            above = value > 1e-4
        if above.any():
            names.append(name)
            rows |= set(np.flatnonzero(above.any(1)).tolist())
            largest = max(largest, float(value[above].max()))
    if names:
        out.append(finding("positive_logps", "mistake", f"{', '.join(names)} up to {largest:.4g}.", sorted(rows)))
    return out


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
    if step == 0 and np.abs(gap).max(initial=0) > 1e-3:
        share = 100 * (np.abs(gap) > 1e-3).mean()
        text = f"Ratios {np.exp(gap.min()):.6g} to {np.exp(gap.max()):.6g}, {share:.0f} % of the tokens off 1."
        for name, neutral in (("temperature", 1), ("top_k", 0)):
            if recording.number(name, neutral) not in (neutral, 0):
                text += f" {name} {recording.number(name):g} is recorded: the sampler's distribution is not the trainer's."
        out.append(
            finding(
                "first_pass_ratio_not_one",
                "warning",
                text,
                np.flatnonzero((np.abs(np.where(mask, new - old, 0)) > 1e-3).any(1)),
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


# ------------------------------------------------------------------------------------------ reported metrics


def metric_findings(recording: Recording, lines: list[str]) -> list[Finding]:
    out: list[Finding] = []
    for check in (_kl_metric, _shaped_rewards, _clip_metric, _sequence_sums, _entropy_metric):
        out += check(recording, lines)
    return out


def _near(reported, computed, eps: float) -> bool:
    reported, computed = np.asarray(reported, dtype=float), np.asarray(computed, dtype=float)
    if reported.shape != computed.shape or not np.isfinite(computed).all():
        return False
    return bool(
        (
            np.abs(reported - computed)
            <= max(3e-6, 2 * eps) * max(1.0, float(np.abs(computed).max()) if computed.size else 1)
        ).all()
    ) and (computed.size > 1 or abs(float(reported) - float(computed)) <= max(2e-5, 4 * eps) * abs(float(computed)) + 1e-9)


def _kl_metric(recording: Recording, lines: list[str]) -> list[Finding]:
    """A reported KL, per token or as one number: which estimator, which direction, which anchor, and its gradient."""
    a, mask = recording.arrays, recording.get("mask")
    array, number = a.get("kl"), recording.number("kl")
    if mask is None or (array is None and number is None) or not mask.any():
        return []
    with np.errstate(all="ignore"):
        return _kl_named(recording, lines, a, mask, array, number)


def _kl_named(recording, lines, a, mask, array, number) -> list[Finding]:
    candidates: list[tuple[str, str | None, np.ndarray, np.ndarray | None]] = []
    if "logits" in a and "ref_logits" in a:
        p, q = (torch.as_tensor(a[n]).double() for n in ("logits", "ref_logits"))
        if p.shape == q.shape:
            candidates.append(("exact KL(policy || ref)", None, rl_lab.categorical_kl(p, q).numpy(), None))
            candidates.append(("exact KL(ref || policy)", "kl_direction", rl_lab.categorical_kl(q, p).numpy(), None))
    pairs = [("ref", a.get("logps"), a.get("ref_logps")), ("old", a.get("old_logps"), a.get("logps"))]
    if "ref_logps" in a and "old_logps" in a:
        pairs.append(("ref, of the old policy", a["old_logps"], a["ref_logps"]))
    for anchor, l, lr in pairs:
        if l is None or lr is None or l.shape != mask.shape:
            continue
        d = np.where(mask, l - lr, 0.0)
        title = {"ref": "of the policy to the reference", "old": "of the old policy to the current one"}.get(
            anchor, "of the old policy to the reference"
        )
        R = np.exp(np.clip(-d, -20, 5))
        k3 = np.minimum(np.exp(np.clip(-d, -20, 20)) + np.clip(d, -20, 20) - 1, np.inf)
        candidates += [
            (f"k1 {title}", None, d, np.ones_like(d)),
            (f"k3 {title}", None, np.exp(-d) + d - 1, 1 - np.exp(-d)),
            (f"k3 {title}, cut at 10", None, np.minimum(k3, 10.0), np.where(k3 > 10, 0.0, 1 - np.exp(-d))),
            (f"k2 {title}", None, d * d / 2, d),
            (f"|d| {title}", None, np.abs(d), np.sign(d)),
        ]
        if anchor == "ref":
            ratio = np.exp(np.where(mask, a["logps"] - a["old_logps"], 0.0)) if "old_logps" in a else None
            if ratio is not None:
                candidates.append((f"k3 times the ratio, {title}", None, ratio * (np.exp(-d) + d - 1), None))
                lengths = np.maximum(mask.sum(1, keepdims=True), 1)
                whole = np.exp(np.where(mask, a["logps"] - a["old_logps"], 0.0).sum(1, keepdims=True) / lengths) * mask
                candidates.append((f"k3 times the answer's ratio, {title}", None, whole * (np.exp(-d) + d - 1), None))
            candidates += [
                ("k1 with the sign turned", "kl_sign", -d, -np.ones_like(d)),
                ("k3 with the policies exchanged", "kl_direction", np.exp(d) - d - 1, np.exp(d) - 1),
                ("k3 with the ratio in place of the log-ratio", "kl_ratio_for_log_ratio", np.exp(R) - R - 1, None),
            ]
    matched = []
    for name, mistake, value, slope in candidates:
        value = np.where(mask, value, 0.0)
        if array is not None and array.shape == mask.shape:
            shapes = [("per token", np.where(mask, array, 0.0), value)]
        elif array is not None:
            shapes = [
                ("summed over each answer", array, value.sum(1)),
                ("mean over each answer", array, value.sum(1) / np.maximum(mask.sum(1), 1)),
            ]
        else:
            per_row = value.sum(1) / np.maximum(mask.sum(1), 1)
            shapes = [
                ("mean over tokens", number, value.sum() / mask.sum()),
                ("mean of the answers' means", number, per_row.mean()),
                ("mean of the answers' sums", number, value.sum(1).mean()),
                ("mean over all slots", number, value.mean()),
            ]
        for how, reported, computed in shapes:
            if (
                _near(reported, computed, recording.eps)
                and float(np.abs(computed).max() if np.ndim(computed) else abs(computed)) > 1e-9
            ):
                matched.append((name, mistake, how, slope))
    out = []
    right = [m for m in matched if m[1] is None]
    if right:
        name, _, how, slope = right[0]
        text = f"kl: {name}, {how}"
        g = a.get("dkl_dlogps")
        if g is not None and slope is not None:
            d = np.where(mask, a["logps"] - a["ref_logps"], 0.0) if "ref_logps" in a else None
            if _near(np.where(mask, g, 0), np.where(mask, slope, 0), recording.eps):
                text += ", with its own gradient"
            elif d is not None and _near(np.where(mask, g, 0), d, recording.eps):
                text += ", with the gradient of k2"
            else:
                text += "; its gradient is another one"
        others = list(dict.fromkeys(f"{m[0]}, {m[2]}" for m in right[1:]))[:3]
        lines.append(text + (f"; or {'; or '.join(others)}" if others else ""))
    elif matched:
        for name, mistake, how, _ in {m[1]: m for m in matched}.values():
            lines.append(f"kl: {name}, {how}")
            out.append(finding(mistake, "mistake", f"The reported kl is {name}, {how}."))
    elif number is not None or array is not None:
        lines.append("kl: none of the estimators gives it")
    # The sign of k1 on a small sample.
    base = a.get("ref_logps", a.get("old_logps"))
    if "logps" in a and base is not None and base.shape == mask.shape:
        d = (a["old_logps"] - a["logps"] if "ref_logps" not in a else a["logps"] - base)[mask]
        k1, k3 = float(d.mean()), float((np.exp(-d) + d - 1).mean())
        if number is not None and number < 0 and k1 < 0 < k3 and np.isfinite(k3):
            out.append(
                finding(
                    "negative_k1",
                    "note",
                    f"k1 {k1:.4g}, k3 {k3:.4g} over {d.size} tokens: an early stop on k1 > limit would not fire.",
                    advice="",
                )
            )
    return out


def _shaped_rewards(recording: Recording, lines: list[str]) -> list[Finding]:
    """Rewards of each token = scores - coef * (l0 - lr): the coefficient, and its sign."""
    a, mask = recording.arrays, recording.get("mask")
    names = ("token_level_scores", "token_level_rewards", "old_logps", "ref_logps")
    if mask is None or any(name not in a or a[name].shape != mask.shape for name in names):
        return []
    scores, rewards, old, ref = (a[name][mask] for name in names)
    k1, taken = old - ref, scores - rewards
    if not (np.isfinite(k1).all() and np.isfinite(taken).all()) or not (k1 != 0).any():
        return []
    coef = float(k1 @ taken / (k1 @ k1))
    if np.abs(taken - coef * k1).max() > 1e-5 * max(1.0, float(np.abs(taken).max())):
        lines.append("token_level_rewards: not the scores less a multiple of the KL (k1)")
        return []
    lines.append(f"token_level_rewards: scores less {coef:.4g} times k1 of the policy that sampled")
    if coef < -1e-9:
        return [finding("kl_sign", "mistake", f"token_level_rewards add {-coef:.4g} times k1 to the scores.")]
    return []


def _clip_metric(recording: Recording, lines: list[str]) -> list[Finding]:
    a, mask, reported = recording.arrays, recording.get("mask"), recording.number("clip_fraction")
    if reported is None or mask is None or "logps" not in a or "old_logps" not in a or not mask.any():
        return []
    low, high = recording.number("clip_low", 0.2), recording.number("clip_high", recording.number("clip_low", 0.2))
    with np.errstate(all="ignore"):
        r = np.exp(np.where(mask, a["logps"] - a["old_logps"], 0.0))
    A = a.get("advantages")
    A = np.zeros(mask.shape) if A is None else A[:, None] * np.ones(mask.shape) if A.ndim == 1 else A
    definitions = {
        "ratio outside the band, whatever A": ((r < 1 - low) | (r > 1 + high)) & mask,
        "clipped branch chosen (A > 0 above, A < 0 below)": ((r < 1 - low) & (A < 0) | (r > 1 + high) & (A > 0)) & mask,
        "ratio above the band": (r > 1 + high) & mask,
        "ratio below the band": (r < 1 - low) & mask,
    }
    for name, chosen in definitions.items():
        for how, value in (("of the counted tokens", chosen.sum() / mask.sum()), ("of all slots", chosen.sum() / mask.size)):
            if abs(reported - value) < 1e-5:
                lines.append(f"clip fraction: {name}, share {how}")
                if name.startswith("ratio outside") or name.startswith("clipped branch"):
                    return []
                return [finding("clip_fraction_differs", "note", f"Reported {reported:.4g}: {name}, {how}.")]
    lines.append("clip fraction: none of the definitions gives it (are clip_low and clip_high the trainer's?)")
    return []


def _sequence_sums(recording: Recording, lines: list[str]) -> list[Finding]:
    """Reported log-probabilities of whole answers against the sum over counted tokens, and over edited masks."""
    a, mask = recording.arrays, recording.get("mask")
    if mask is None or "logps" not in a or a["logps"].shape != mask.shape:
        return []
    reported = a.get("seq_logps")
    if reported is None and "chosen_logps" in a and 2 * a["chosen_logps"].size == len(mask) and "rejected_logps" in a:
        reported = np.concatenate([a["chosen_logps"].reshape(-1), a["rejected_logps"].reshape(-1)])
    if reported is None or reported.shape != (len(mask),):
        return []

    def sums(chosen: np.ndarray) -> np.ndarray:
        return np.where(chosen, np.where(np.isfinite(a["logps"]), a["logps"], 0.0), 0.0).sum(1)

    tolerance = 2e-5 * max(1.0, float(np.abs(reported).max()))
    if np.abs(sums(mask) - reported).max() <= tolerance:
        lines.append("log-probability of an answer: sum over its counted tokens")
        return []
    if np.abs(sums(mask) / np.maximum(mask.sum(1), 1) - reported).max() <= tolerance:
        lines.append("log-probability of an answer: mean over its counted tokens")
        return []
    names = [name for name, edit in mask_edits(recording).items() if np.abs(sums(edit) - reported).max() <= tolerance]
    out = []
    for name in names:
        edit = mask_edits(recording)[name]
        rows = np.flatnonzero((edit != mask).any(1))
        others = f" Cannot tell from: {', '.join(n for n in names if n != name)}." if len(names) > 1 else ""
        lines.append(f"log-probability of an answer: reproduced with {name.replace('_', ' ')}")
        out.append(
            finding(
                name,
                "mistake",
                f"The reported sum of row {rows[0]} is {reported[rows[0]]:.6g}, and {sums(mask)[rows[0]]:.6g} over the "
                "recorded "
                f"mask.{others}",
                rows,
            )
        )
    if not names:
        lines.append("log-probability of an answer: not the sum over its counted tokens")
    return out


def _entropy_metric(recording: Recording, lines: list[str]) -> list[Finding]:
    """An entropy loss is minus the entropy: with the wrong sign, loss += coef * it pushes entropy down."""
    reported, mask = recording.number("reported_entropy_loss"), recording.get("mask")
    if reported is None or mask is None or not mask.any():
        return []
    a = recording.arrays
    entropies = a["entropies"][mask].mean() if "entropies" in a and a["entropies"].shape == mask.shape else None
    estimate = -a["logps"][mask].mean() if "logps" in a and a["logps"].shape == mask.shape else None
    for words, entropy in (("the entropies", entropies), ("-logps", estimate)):
        if entropy is None or not np.isfinite(entropy) or entropy == 0:
            continue
        if abs(reported + entropy) <= 1e-5 * abs(entropy):
            lines.append(f"entropy loss: minus the mean of {words}")
            return []
        if abs(reported - entropy) <= 1e-5 * abs(entropy):
            return [
                finding("entropy_sign", "mistake", f"The reported entropy loss {reported:.6g} is plus the mean of {words}.")
            ]
    return []


# ------------------------------------------------------------------------------------------ not a mistake


def not_mistakes(recording: Recording, result, has_gradient: bool) -> list[Finding]:
    """A loss of 0: healthy, or without a signal. Says why it is fine."""
    if not result.zero or "logps" not in recording.arrays:
        return []
    a, mask = recording.arrays, recording.arrays["mask"]
    A = a.get("advantages")
    if A is None:
        return []
    if has_gradient:
        norm = float(np.linalg.norm(a["dloss_dlogps"])) if "dloss_dlogps" in a else 0.0
        size = f"The gradient has norm {norm:.4g}"
    else:
        # Without a recorded gradient: what the first match would send back.
        norm = float(np.abs(A).max())
        size = f"No gradient recorded; advantages reach {norm:.4g}"
    if norm > 1e-9:
        return [finding("loss_zero_healthy", "note", f"{size}; advantages sum to {float(np.sum(A)):.2g}.", advice="")]
    if not np.abs(A).max() > 0:
        return [
            finding(
                "no_signal",
                "note",
                f"{size}; all {mask.shape[0]} advantages are 0.",
                advice="watch the share of groups with spread",
            )
        ]
    return []


def pair_findings(recording: Recording, result) -> list[Finding]:
    """Margins and accuracy as logged, and the cases that only look wrong."""
    out = []
    margins, beta = result.margins, result.beta
    reported, accuracy = recording.number("margin"), recording.number("accuracy")
    if margins is not None and len(margins):
        mean = float(margins.mean())
        if reported is not None and mean:
            factor = reported / mean
            if beta and abs(factor - beta * beta) <= 1e-4 * beta * beta and beta != 1:
                out.append(
                    finding(
                        "beta_twice",
                        "mistake",
                        f"The logged margin {reported:.6g} is beta squared ({beta * beta:g}) times the mean "
                        f"log-ratio margin {mean:.6g}.",
                    )
                )
        share = float((margins > 0).double().mean())
        if (accuracy if accuracy is not None else share) < 0.5 and bool((margins != 0).any()):
            out.append(
                finding(
                    "low_accuracy",
                    "warning" if share == 0 and len(margins) > 3 else "note",
                    f"{100 * share:.0f} % of {len(margins)} margins are positive."
                    + (f" Reported accuracy {accuracy:g}." if accuracy is not None else ""),
                    np.flatnonzero((margins <= 0).numpy()),
                )
            )
        if not bool((margins != 0).any()) and not any(m.mistakes for m in result.mistakes):
            out.append(
                finding(
                    "loss_zero_healthy",
                    "note",
                    "Every margin is 0: policy and reference are equal, as at the first step (loss log 2 for DPO). "
                    "At a later step the reference would be live.",
                    advice="record a later step to be sure that the reference is frozen",
                )
            )
    if result.prompt_cancels:
        out.append(
            finding("prompt_cancels", "note", "Margins over prompt and answer equal those over the answer.", advice="")
        )
    return out
