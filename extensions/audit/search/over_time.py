"""Advantages over time in an environment: GAE, its two flags, and the mistakes that they invite."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Iterator

import numpy as np

from extensions.audit.read.recording import Recording
from extensions.audit.search.rules import GAMMAS, LAMS, AdvantageMatch, AdvantageResult
from extensions.audit.tolerance import COARSE, TERM


# ------------------------------------------------------------------------------------------ environments: time


@dataclass
class Timeline:
    """One layout, time last: rewards, values, values of the true next observation, and the two flags. (E, T)."""

    rewards: np.ndarray
    values: np.ndarray
    next_values: np.ndarray
    terminated: np.ndarray
    boundary: np.ndarray
    reported: dict[str, np.ndarray]
    has_both_flags: bool
    has_final_values: bool
    flagged: np.ndarray  # boundary as recorded, without the end of the buffer
    after_last: np.ndarray  # (E,) value after the last step
    paid: np.ndarray | None = None  # the rewards that the trainer went on with, where the environment's stand beside them
    gamma: float | None = None


def is_environment(recording: Recording) -> bool:
    arrays = recording.arrays
    return (
        ("rewards" in arrays or "env_rewards" in arrays)
        and ("values" in arrays or "next_values" in arrays)
        and any(
            name in arrays
            for name in ("last_values", "next_values", "terminated", "discounts", "boundary", "episode_starts")
        )
        and "logps" not in arrays
    )


def timeline(recording: Recording) -> tuple[Timeline | None, list[str]]:
    """Lay a recorded rollout out with time last. Returns what is missing, too."""
    a = {name: value for name, value in recording.arrays.items()}
    shape = a["values"].shape if "values" in a else a["next_values"].shape
    # (T, E) beside one last value for each environment; a column is one environment, not T environments of one step.
    time_first = len(shape) == 2 and ("last_values" in a and a["last_values"].size == shape[1] or shape[1] == 1 < shape[0])
    names = (
        "rewards",
        "env_rewards",
        "values",
        "next_values",
        "terminated",
        "truncated",
        "boundary",
        "terminal_values",
        "episode_starts",
        "advantages",
        "returns",
        "discounts",
    )

    def laid(name: str):
        value = a.get(name)
        if value is None:
            return None
        value = value.T if time_first and value.ndim == 2 else value
        return value if value.ndim == 2 else value.reshape(1, -1) if value.ndim == 1 else None

    x = {name: laid(name) for name in names}
    missing = []
    rewards = x["env_rewards"] if x["env_rewards"] is not None else x["rewards"]
    if rewards is None:
        return None, ["rewards"]
    E, T = rewards.shape
    values = x["values"]
    after = None
    if values is not None and values.shape == (E, T + 1):
        after, values = values[:, -1], values[:, :-1]
    if "last_values" in a and a["last_values"].size == E:
        after = a["last_values"].reshape(E)
    next_values = x["next_values"]
    if next_values is not None and values is None and x["returns"] is not None:
        values = np.zeros_like(next_values)
        values[:, 1:] = next_values[:, :-1]
    shapes = {name: value.shape for name, value in x.items() if value is not None} | {
        name: value.shape for name, value in (("values", values), ("next_values", next_values)) if value is not None
    }
    shapes |= {name: (E, T) if a[name].size == E else a[name].shape for name in ("last_dones", "last_values") if name in a}
    wrong = [f"{name} {shape}" for name, shape in shapes.items() if shape != (E, T)]
    if wrong:
        return None, [f"arrays of one shape {(E, T)}: got {', '.join(wrong)}"]
    if values is None:
        return None, ["values of the critic"]
    terminated, boundary, has_both, gamma = _two_flags(x, a, (E, T), missing)
    has_final = next_values is not None or x["terminal_values"] is not None
    if next_values is None:
        next_values = _values_after(values, after, terminated, boundary, x["terminal_values"], missing)
    if after is None:
        after = next_values[:, -1]
    flagged = boundary
    boundary = boundary.copy()
    boundary[:, -1] = True
    reported = {name: x[name] for name in ("advantages", "returns") if x[name] is not None}
    if not reported:
        missing.append("advantages or returns, as the loss used them")
    number = recording.number("gamma")
    return (
        Timeline(
            rewards,
            values,
            next_values,
            terminated,
            boundary,
            reported,
            has_both,
            has_final,
            flagged,
            after,
            x["rewards"] if x["env_rewards"] is not None else None,
            number if number is not None else gamma,
        ),
        missing,
    )


def _two_flags(x: dict, a: dict, shape: tuple[int, int], missing: list[str]) -> tuple:
    """terminated, boundary, whether two flags were recorded, and gamma where the discounts give it."""
    terminated, truncated, boundary = x["terminated"], x["truncated"], x["boundary"]
    discounts = x["discounts"]
    gamma = None
    if discounts is not None and discounts.shape == shape:
        terminated = discounts == 0 if terminated is None else terminated
        inside = discounts[discounts > 0]
        if inside.size and np.ptp(inside) < 1e-6:
            gamma = float(np.round(inside[0], 6))
    if boundary is None and x["episode_starts"] is not None and terminated is None:
        boundary = np.zeros(shape, dtype=bool)
        boundary[:, :-1] = x["episode_starts"][:, 1:]
        if "last_dones" in a:
            boundary[:, -1] = a["last_dones"].reshape(shape[0])
    has_both = terminated is not None and (truncated is not None or boundary is not None)
    if boundary is None:
        boundary = (terminated if terminated is not None else np.zeros(shape, bool)) | (
            truncated if truncated is not None else False
        )
    elif truncated is not None:
        boundary = boundary | truncated
    if terminated is None:
        terminated = boundary & ~truncated if truncated is not None else boundary
        missing.append("terminated and truncated as two flags (one flag was recorded)")
    boundary = boundary | terminated
    return terminated, boundary, has_both, gamma


def _values_after(values, after, terminated, boundary, terminal, missing: list[str]) -> np.ndarray:
    """The critic after each step: the next step's value, the last one's, and the final observation's where it is recorded."""
    next_values = np.zeros_like(values)
    next_values[:, :-1] = values[:, 1:]
    if after is None:
        missing.append("last_values: the value after the last step")
        after = np.zeros(len(values))
    next_values[:, -1] = after
    if terminal is not None:
        cut = boundary & ~terminated
        return np.where(cut & np.isfinite(terminal), terminal, next_values)
    if (boundary[:, :-1] & ~terminated[:, :-1]).any():
        missing.append("terminal_values: the value of the true final observation at each time limit (before the reset)")
    return next_values


def _gae(r, v, vn, terminated, boundary, gamma, lam) -> np.ndarray:
    """The recursion of rl_lab.gae (a test compares them) without its refusals: mistakes need flags it would not take."""
    delta = r + gamma * np.where(terminated, 0.0, vn) - v
    out = np.zeros_like(delta)
    following = np.zeros(delta.shape[0])
    for t in range(delta.shape[1] - 1, -1, -1):
        following = delta[:, t] + gamma * lam * np.where(boundary[:, t], 0.0, following)
        out[:, t] = following
    return out


def _late(flags: np.ndarray) -> np.ndarray:
    """Step t reads the flag of t + 1; the last step keeps its own."""
    moved = flags.copy()
    moved[:, :-1] = flags[:, 1:]
    return moved


def _early(flags: np.ndarray) -> np.ndarray:
    moved = np.zeros_like(flags)
    moved[:, 1:] = flags[:, :-1]
    return moved


def time_edits(x: Timeline) -> Iterator[tuple[str, dict, np.ndarray]]:
    """Name, edited arrays, rows and steps concerned, for every mistake that changes something."""
    base = {"r": x.rewards, "v": x.values, "vn": x.next_values, "terminated": x.terminated, "boundary": x.boundary}
    cut = x.flagged & ~x.terminated  # time limits
    ends = np.zeros_like(x.boundary)
    ends[:, -1] = True
    cut_inside = cut & ~ends
    if cut.any():
        yield "one_flag_for_two", {**base, "terminated": x.terminated | cut}, cut
    if cut_inside.any():
        following = np.zeros_like(x.values)
        following[:, :-1] = x.values[:, 1:]
        following[:, -1] = x.after_last
        reset = np.where(cut_inside, following, x.next_values)
        if (reset != x.next_values).any():
            yield "reset_value_used", {**base, "vn": reset}, cut_inside
    inner = x.boundary & ~ends
    if inner.any():
        yield "leak_across_episodes", {**base, "boundary": ends}, inner
        only_terminal = x.terminated | ends
        if (only_terminal != x.boundary).any():
            yield "leak_across_episodes", {**base, "boundary": only_terminal}, inner & ~x.terminated
        for mover in (_late, _early):
            term, bound = mover(x.terminated), mover(x.flagged) | ends
            yield "shifted_flags", {**base, "terminated": term, "boundary": bound}, inner
            yield "shifted_flags", {**base, "terminated": term, "boundary": term | ends}, inner
            following = np.zeros_like(x.values)
            following[:, :-1] = x.values[:, 1:]
            following[:, -1] = x.after_last
            yield "shifted_flags", {**base, "terminated": term, "boundary": bound, "vn": following}, inner
    trimmed = x.next_values.copy()
    trimmed[:, -1] = x.values[:, -1]
    yield "last_bootstrap_trimmed", {**base, "vn": trimmed}, ends
    late = np.zeros_like(x.rewards)
    late[:, 1:] = x.rewards[:, :-1]
    yield "rewards_one_slot_late", {**base, "r": late}, np.ones_like(ends)


def search_time(recording: Recording) -> AdvantageResult:
    """GAE (advantages) or lambda-returns of an environment's rollout, with two flags; mistakes where that does not fit."""
    result = AdvantageResult()
    x, missing = timeline(recording)
    result.missing += missing
    if x is None or not x.reported:
        return result
    numbers = [x.rewards, x.values, *x.reported.values()]
    if not all(np.isfinite(array).all() for array in numbers) or not np.isfinite(x.next_values[~x.terminated]).all():
        result.remarks.append("rewards, values or advantages are not finite")
        return result
    x.next_values = np.where(np.isfinite(x.next_values), x.next_values, 0.0)
    result.checked = True
    base = {"r": x.rewards, "v": x.values, "vn": x.next_values, "terminated": x.terminated, "boundary": x.boundary}
    _compare_over_time(recording, x, base, result)
    if not result.matches and x.paid is not None:
        # Normalised or clipped rewards; then rewards into which the value at a time limit was paid.
        changed = {**base, "r": x.paid}
        _compare_over_time(recording, x, changed, result, words="on `rewards`, not on `env_rewards`")
        if not result.matches:
            ended = {**changed, "terminated": x.terminated | (x.flagged & ~x.terminated)}
            _compare_over_time(recording, x, ended, result, words="the value at a time limit stands in `rewards`")
    if not result.matches:
        for name, arrays, where in time_edits(x):
            if any((arrays[k] != base[k]).any() for k in base):
                _compare_over_time(recording, x, arrays, result, name, where)
        _reward_minus_value(x, result)
    if result.matches:
        result.unfit = _unfit(recording, x, result.matches)
    return result


def _rounding(recording: Recording, reported: np.ndarray) -> float:
    return TERM * max(1.0, float(np.abs(reported).max())) * (1 if recording.eps < COARSE else recording.eps / 1e-6)


def _compare_over_time(
    recording: Recording, x: Timeline, arrays: dict, result: AdvantageResult, mistake=None, where=None, words: str = ""
) -> None:
    """Every gamma and lambda on these arrays; what fits becomes a match, or a mistake."""
    gammas = dict.fromkeys([g for g in (x.gamma, *GAMMAS) if g is not None])
    lams = dict.fromkeys([lam for lam in (recording.number("lam"), *LAMS) if lam is not None])
    rows = () if where is None else tuple(np.flatnonzero(where.any(1)).tolist())
    steps = [] if where is None else np.argwhere(where)[:6].tolist()
    words = words if where is None else "row, step: " + ", ".join(f"({e}, {t})" for e, t in steps)
    for gamma, lam in itertools.product(gammas, lams):
        result.tried += 1
        A = _gae(**arrays, gamma=gamma, lam=lam)
        made = {"advantages": A, "returns": A + x.values}
        gaps = {name: float(np.abs(made[name] - reported).max()) for name, reported in x.reported.items()}
        fits = tuple(name for name, gap in gaps.items() if gap <= _rounding(recording, x.reported[name]))
        if fits:
            fields = {"baseline": "gae", "gamma": gamma, "lam": lam, "scale": "none"}
            match = AdvantageMatch(
                fields, (mistake,) if mistake else (), gaps[fits[0]], rows, words, fits[0], fits, made
            )
            (result.mistakes if mistake else result.matches).append(match)


def _reward_minus_value(x: Timeline, result: AdvantageResult) -> None:
    if "advantages" not in x.reported:
        return
    result.tried += 1
    gap = float(np.abs(x.rewards - x.values - x.reported["advantages"]).max())
    if gap <= TERM * max(1.0, float(np.abs(x.rewards).max())):
        fields = {"baseline": "gae", "gamma": 0.0, "lam": 0.0, "scale": "none"}
        result.mistakes.append(AdvantageMatch(fields, ("reward_minus_value",), gap))


def _unfit(recording: Recording, x: Timeline, matches: list[AdvantageMatch]) -> dict[str, tuple[str, str, str]]:
    """Reported array that no match gives -> (finding, severity, evidence); standardised advantages are no finding.

    reported = slope made + level is solved by least squares; made is of the first match, which gives the other array.
    A mistake where it is certain (turned round, or the same number everywhere), else a warning.
    """
    found = {}
    for name in x.reported.keys() - {name for match in matches for name in match.fits}:
        made, reported = matches[0].made[name], x.reported[name]
        slope, level = np.polyfit(made.ravel(), reported.ravel(), 1) if np.ptp(made) > 0 else (0.0, float(reported.mean()))
        straight = float(np.abs(slope * made + level - reported).max()) <= _rounding(recording, reported)
        words = f"{name} of step 0 are {reported[0, 0]:.6g}, from {matches[0].label()} {made[0, 0]:.6g}"
        if straight and slope > 0 and abs(slope - 1) + abs(level) > TERM:
            if name == "returns":
                evidence = f"{words}: all are {slope:.6g} times that {level:+.6g}."
                found[name] = ("returns_standardised", "warning", evidence)
        elif straight and slope < 0 and name == "advantages":
            found[name] = ("advantage_sign", "mistake", f"{words}.")
        else:
            found[name] = (f"{name}_do_not_fit", "mistake" if straight else "warning", f"{words}.")
    return found
