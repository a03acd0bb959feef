"""Mistakes planted into the advantages of an environment."""

from __future__ import annotations

from typing import Iterator

import numpy as np

from extensions.audit.proof.plant_loss import Planted
from extensions.audit.read.recording import recording_from
from extensions.audit.search.over_time import is_environment


# ---- time


def time_plants(entry: dict, arrays: dict) -> Iterator[Planted]:
    """Mistakes of flags, bootstraps and slots in one rollout of an environment, in plain loops over time."""
    from extensions.audit.search.over_time import timeline

    recording = recording_from(arrays)
    if not is_environment(recording):
        return
    x, missing = timeline(recording)
    if (
        x is None
        or missing
        or "done_only" in entry["file"]
        or "td_lambda" in entry["file"]
        or "lambda_returns" in entry["file"]
    ):
        return
    config = entry["config_effective"] | entry["config"]
    gamma = config.get("gamma", config.get("gamma_inside_discounts", 0.99))
    lam = config.get("gae_lambda", config.get("lmbda", config.get("lambda_", 0.95)))
    E, T = x.rewards.shape

    def run(mistake: str | None) -> np.ndarray:
        out = np.zeros((E, T), dtype=np.float32)
        for e in range(E):
            following = 0.0
            for step in reversed(range(T)):
                at = step
                if mistake == "shifted_flags" and step + 1 < T:
                    at = step + 1
                terminated, over = bool(x.terminated[e, at]), bool(x.flagged[e, at]) or step == T - 1
                next_value = x.next_values[e, step]
                cut = bool(x.flagged[e, step]) and not bool(x.terminated[e, step])
                if mistake == "one_flag_for_two" and cut:
                    terminated = True
                if mistake == "reset_value_used" and cut and step + 1 < T:
                    next_value = x.values[e, step + 1]
                if mistake == "leak_across_episodes":
                    over = step == T - 1
                if mistake == "last_bootstrap_trimmed" and step == T - 1:
                    next_value = x.values[e, step]
                reward = x.rewards[e, step]
                if mistake == "rewards_one_slot_late":
                    reward = x.rewards[e, step - 1] if step else 0.0
                delta = reward + (0.0 if terminated else gamma * next_value) - x.values[e, step]
                following = delta + (0.0 if over else gamma * lam * following)
                out[e, step] = following
                if mistake == "reward_minus_value":
                    out[e, step] = reward - x.values[e, step]
        return out

    right = run(None)
    for mistake in (
        "one_flag_for_two",
        "shifted_flags",
        "reset_value_used",
        "leak_across_episodes",
        "last_bootstrap_trimmed",
        "rewards_one_slot_late",
        "reward_minus_value",
    ):
        made = run(mistake)
        if float(np.abs(made - right).max()) <= 1e-4:
            continue
        shape = arrays["advantages"].shape if "advantages" in arrays else arrays["returns"].shape
        laid = made.T if shape == (T, E) and E != 1 else made.reshape(shape)
        out = {name: value for name, value in arrays.items() if name not in ("returns", "advantages", "dones_as_terminated")}
        out["advantages"] = np.ascontiguousarray(laid)
        # lambda 0 hides the recursion: two mistakes may then be one and the same number.
        yield Planted(entry["file"][:-4], mistake, out, None, {}, True, True, is_loss=False)
