"""Recorded arrays checked against each other: each says something about the other that needs no search.

To add such a check: a function from a recording to findings, and its name in CONSISTENCY.
"""

from __future__ import annotations

import numpy as np

from extensions.audit.catalogue import Finding, finding
from extensions.audit.read.recording import Recording
from extensions.audit.tolerance import ADVANTAGE, NOTHING, SUM_OVER_ANSWER, TERM

MOST_SHOWN = 6
FAR = 100.0
"""Times the largest reward: an advantage that no spread of the rewards can give."""


def _bootstraps(recording: Recording) -> list[Finding]:
    """rewards - env_rewards is gamma V(final observation) where an environment was cut off, and 0 where it was not."""
    names = ("rewards", "env_rewards", "truncated", "terminal_values")
    if not all(name in recording for name in names) or recording.number("gamma") is None:
        return []
    rewards, env, truncated, final = (recording.arrays[name] for name in names)
    if not rewards.shape == env.shape == truncated.shape == final.shape or rewards.ndim != 2:
        return []
    added, cut = rewards - env, truncated.astype(bool)
    size = TERM * max(1.0, float(np.abs(rewards).max()))
    if not cut.any() or (np.abs(added - recording.number("gamma") * final)[cut] > size).any():
        return []
    beyond = (np.abs(added) > size) & ~cut
    if not beyond.any():
        return []
    # Steps of one moment share a row or a column of the rollout, whichever way it was laid out.
    together = (beyond <= cut.any(1, keepdims=True)).all() or (beyond <= cut.any(0, keepdims=True)).all()
    words = ", each at a step where another environment was cut off" if together else ""
    evidence = f"rewards and env_rewards differ at {beyond.sum()} steps that are not truncated{words}: " + _places(beyond)
    return [finding("bootstrap_beyond_time_limit", "mistake" if together else "warning", evidence)]


def _places(where: np.ndarray) -> str:
    shown = [f"({', '.join(map(str, place))})" for place in np.argwhere(where)[:MOST_SHOWN].tolist()]
    return f"at {', '.join(shown)}" + (" and more." if where.sum() > MOST_SHOWN else ".")


def _kl_pairs(recording: Recording) -> list[Finding]:
    """KTO's KL pairs put a prompt beside the answer to another one: such a pair is no row of the batch itself."""
    pairs, ref_pairs = recording.get("kl_seq_logps"), recording.get("ref_kl_seq_logps")
    own, ref_own = _sums(recording, "seq_logps", "logps"), _sums(recording, "ref_seq_logps", "ref_logps")
    if any(x is None for x in (pairs, ref_pairs, own, ref_own)) or not len(pairs) == len(ref_pairs) == len(own) == len(ref_own):
        return []
    size = SUM_OVER_ANSWER * max(1.0, float(np.abs(own).max()))
    same = (np.abs(pairs - own) <= size) & (np.abs(ref_pairs - ref_own) <= size)
    if not same.any():
        return []
    d = pairs - ref_pairs
    evidence = f"{same.sum()} of {len(same)} pairs are the row's own answer; z0 is max(mean, 0) of them: {max(d.mean(), 0):.6g}"
    evidence += f", {max(d[~same].mean(), 0):.6g} without these." if (~same).any() else "."
    return [finding("kl_pair_is_own_answer", "mistake", evidence, np.flatnonzero(same))]


def _sums(recording: Recording, name: str, tokens: str) -> np.ndarray | None:
    """A recorded log-probability of whole answers, (N,), or the sum of its tokens'."""
    if name in recording:
        return recording.arrays[name].reshape(-1)
    x, mask = recording.get(tokens), recording.get("mask")
    return None if x is None or mask is None or x.shape != mask.shape else np.where(mask, x, 0.0).sum(1)


def _packed_borders(recording: Recording) -> list[Finding]:
    """Where several answers share a row, the first token of each is predicted by nothing that belongs to it."""
    segments, mask = recording.get("segment_ids"), recording.get("mask")
    if segments is None or mask is None or segments.shape != mask.shape:
        return []
    opens = np.zeros_like(mask)
    opens[:, 1:] = segments[:, 1:] != segments[:, :-1]
    counted = opens & mask
    if not counted.any():
        return []
    evidence = f"{counted.sum()} counted tokens open another answer of their row: {_places(counted)}"
    return [finding("packed_border_counted", "mistake", evidence, np.flatnonzero(counted.any(1)))]


def first_pass_places(recording: Recording, off: np.ndarray) -> str:
    """What the counted tokens whose first-pass ratio is not 1 have in common, in words; empty if nothing is seen. off (N, T)."""
    mask = recording.arrays["mask"]
    runs = mask.reshape(-1) & off.reshape(-1)
    for name in ("boundary", "episode_starts", "segment_ids", "terminated"):
        border = _borders(recording, name, off.shape)
        if border is None or not border.any():
            continue
        starts = np.flatnonzero(runs & ~np.concatenate([[False], runs[:-1]]))
        near = border[starts] | np.concatenate([[False], border[:-1]])[starts]
        if len(starts) and near.all() and runs.mean() < 1:
            return (
                f" All {len(starts)} stretches of them begin at a border ({name}): a recurrent state is reset one step off, "
                "or what belongs to another episode is read."
            )
    last = mask & ~np.roll(mask, -1, axis=1) if mask.shape[1] > 1 else mask
    if mask.shape[1] > 1 and (off & mask == last & mask).all():
        return " They are the last counted token of every answer: the end token is scored otherwise."
    if mask.shape[1] > 1 and (off.any(1) != mask.any(1)).any() and (off & mask)[off.any(1)].sum() == mask[off.any(1)].sum():
        return " Whole answers are off and the others are exact: their padding, their packing or their policy is another one."
    return ""


def _borders(recording: Recording, name: str, shape: tuple) -> np.ndarray | None:
    """Flags in the order of the counted slots, flattened, True where something ends or begins; None where not recorded."""
    x = recording.get(name)
    if x is None or x.size != int(np.prod(shape)):
        return None
    x = x.reshape(-1)
    return np.concatenate([[False], x[1:] != x[:-1]]) if name == "segment_ids" else x.astype(bool)


def _far_advantages(recording: Recording) -> list[Finding]:
    """An advantage of thousands where the others of the group agree: it was divided by a std of 0 plus a guard."""
    A, rewards, ids, mask = (recording.get(name) for name in ("advantages", "rewards", "group_ids", "mask"))
    if any(x is None for x in (A, rewards, ids, mask)) or not len(A) == len(rewards) == len(ids) or rewards.ndim != 1:
        return []
    one = A if A.ndim == 1 else np.where(mask, A, 0.0)[np.arange(len(A)), mask.argmax(1)]
    far = np.zeros(len(one), dtype=bool)
    for i in np.flatnonzero(np.isfinite(one) & (np.abs(one) > FAR * max(float(np.abs(rewards).max()), NOTHING))):
        others = rewards[(ids == ids[i]) & (np.arange(len(ids)) != i)]
        far[i] = len(others) > 1 and np.ptp(others) <= ADVANTAGE * max(1.0, float(np.abs(others).max()))
    if not far.any():
        return []
    evidence = f"|A| up to {np.abs(one[far]).max():.3g}, where the others of the group have one reward and no spread."
    return [finding("std_of_others_is_zero", "mistake", evidence, np.flatnonzero(far))]


CONSISTENCY = (_bootstraps, _kl_pairs, _packed_borders, _far_advantages)
