"""Reported metrics against what the recording gives: KL, clip fraction, sums over answers, entropy, shaped rewards."""

from __future__ import annotations

import numpy as np
import torch

import rl_lab
from extensions.audit.catalogue import Finding, finding
from extensions.audit.read.recording import Recording
from extensions.audit.read.masks import mask_edits
from extensions.audit.tolerance import LOGGED, METRIC, NOTHING, SUM_OVER_ANSWER


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
            <= max(METRIC, 2 * eps) * max(1.0, float(np.abs(computed).max()) if computed.size else 1)
        ).all()
    ) and (computed.size > 1 or abs(float(reported) - float(computed)) <= max(SUM_OVER_ANSWER, 4 * eps) * abs(float(computed)) + NOTHING)


def _kl_metric(recording: Recording, lines: list[str]) -> list[Finding]:
    """A reported KL, per token or as one number: which estimator, which direction, which anchor, and its gradient."""
    a, mask = recording.arrays, recording.get("mask")
    array, number = a.get("kl"), recording.number("kl")
    if mask is None or (array is None and number is None) or not mask.any():
        return []
    with np.errstate(all="ignore"):
        return _kl_named(recording, lines, a, mask, array, number)


def _kl_named(recording, lines, a, mask, array, number) -> list[Finding]:
    """Which estimator, between which policies, averaged how, gives the reported KL; and its sign on a small sample."""
    matched = _kl_matches(_kl_candidates(a, mask), recording, mask, array, number)
    out = []
    if not matched and number is not None:
        matched = _kl_over_padding(a, mask, number, recording.eps)
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
    return out + _negative_k1(a, mask, number)


def _kl_over_padding(a: dict, mask: np.ndarray, number: float, eps: float) -> list[tuple]:
    """The estimators with whatever the unused slots hold taken in, as _kl_matches returns them."""
    l, lr = a.get("logps"), a.get("ref_logps")
    if l is None or lr is None or l.shape != mask.shape or mask.all() or not (np.isfinite(l) & np.isfinite(lr)).all():
        return []
    d, found = l - lr, []
    for name, value in (("k1", d), ("k2", d * d / 2), ("k3", np.exp(-d) + d - 1)):
        for how, computed in (
            ("mean of the answers' sums", value.sum(1).mean()),
            ("mean over tokens", value.sum() / mask.sum()),
            ("mean over all slots", value.mean()),
        ):
            if _near(number, computed, eps):
                found.append((f"{name} of the policy to the reference", "padding_counted", f"{how}, padding taken in", None))
    return found


def _kl_candidates(a: dict, mask: np.ndarray) -> list[tuple[str, str | None, np.ndarray, np.ndarray | None]]:
    """Words, the mistake in it, value per token, slope per token: every estimator between every two recorded policies."""
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
    return candidates


def _kl_matches(candidates, recording: Recording, mask: np.ndarray, array, number) -> list[tuple]:
    """(words, mistake, how it was averaged, slope) of the candidates that give the reported KL."""
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
                and float(np.abs(computed).max() if np.ndim(computed) else abs(computed)) > NOTHING
            ):
                matched.append((name, mistake, how, slope))
    return matched


def _negative_k1(a: dict, mask: np.ndarray, number) -> list[Finding]:
    """The sign of k1 on a small sample."""
    out = []
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
    if np.abs(taken - coef * k1).max() > LOGGED * max(1.0, float(np.abs(taken).max())):
        lines.append("token_level_rewards: not the scores less a multiple of the KL (k1)")
        return []
    lines.append(f"token_level_rewards: scores less {coef:.4g} times k1 of the policy that sampled")
    if coef < -NOTHING:
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
            if abs(reported - value) < LOGGED:
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

    tolerance = SUM_OVER_ANSWER * max(1.0, float(np.abs(reported).max()))
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
        if abs(reported + entropy) <= LOGGED * abs(entropy):
            lines.append(f"entropy loss: minus the mean of {words}")
            return []
        if abs(reported - entropy) <= LOGGED * abs(entropy):
            lines.append(f"entropy loss: plus the mean of {words}")
            pushed = recording.get("dloss_dentropies")
            evidence = f"The log named an entropy loss, {reported:.6g}, is plus the mean of {words}"
            if pushed is not None and np.isfinite(pushed).all() and pushed[mask].sum() > 0:
                return [finding("entropy_sign", "mistake", f"{evidence}, and the loss rises with it.")]
            if pushed is not None:
                return []  # the gradient says that the loss falls with the entropy: only the log's name is unlucky
            evidence += ": right if the loss subtracts it, as many trainers do."
            return [finding("entropy_sign", "warning", evidence, advice="record dloss_dentropies, which decides it")]
    return []
