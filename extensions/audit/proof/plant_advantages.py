"""Mistakes planted into the advantages of answers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Iterator

import numpy as np

from extensions.audit.declared import Declared
from extensions.audit.proof.plant_loss import Plant, Planted, _recorded, naive_loss
from extensions.audit.proof.truth import truth_of
from extensions.objectives import ROWS


# ---- advantages


def _group_rule(rewards: np.ndarray, ids: np.ndarray, kind: str, ddof: int, eps: float) -> np.ndarray:
    """Group advantages as a trainer writes them, in float32 and group by group."""
    rewards = rewards.astype(np.float32)
    out = np.zeros_like(rewards)
    for group in np.unique(ids):
        chosen = ids == group
        members = rewards[chosen]
        present = np.isfinite(members)
        mean = members[present].mean(dtype=np.float32) if present.any() else np.float32(0)
        values = np.where(present, members - mean, 0)
        if kind == "leave_one_out" and present.sum() > 1:
            values = values * np.float32(present.sum() / (present.sum() - 1))
        if kind == "group_std":
            count = present.sum()
            std = math.sqrt(float((values.astype(np.float64) ** 2).sum()) / max(count - ddof, 1)) if count > ddof else 0.0
            values = values / np.float32(std + eps)
        out[chosen] = values
    return out.astype(np.float32)


def advantage_plants(entry: dict, arrays: dict) -> Iterator[Planted]:
    """Mistakes of the group statistics in one capture with rewards and groups."""
    kind, config = entry["kind"], entry["config_effective"]
    rule = None
    if (
        kind == "grpo"
        and config["multi_objective_aggregation"] == "sum_then_normalize"
        and config["scale_rewards"] in ("group", "none")
    ):
        rule = ("group_std", 1, 1e-4) if config["scale_rewards"] == "group" else ("centre", 1, 0.0)
        name = {"group": "grpo@trl-1.16.0", "none": "dr_grpo@trl-1.16.0"}[config["scale_rewards"]]
    elif kind == "advantage" and entry["config"]["adv_estimator"] in ("grpo", "grpo_vectorized", "rloo"):
        rule = ("leave_one_out", 1, 0.0) if entry["config"]["adv_estimator"] == "rloo" else ("group_std", 1, 1e-6)
        name = {"rloo": "rloo@verl-0.9.1"}.get(entry["config"]["adv_estimator"], "grpo@verl-0.9.1")
    if rule is None:
        return
    generation = "gen_rewards" in arrays
    rewards = arrays["gen_rewards"] if generation else arrays["rewards"]
    ids = arrays["gen_group_ids"] if generation else arrays["group_ids"]
    counts = np.unique(ids, return_counts=True)[1]
    if counts.min() < 2 or len(counts) < 2 or not np.isfinite(rewards).all():
        return
    rows = arrays["row_ids"] if generation else np.arange(len(rewards))
    t = truth_of(entry, arrays)
    mask = arrays["mask"]

    def recorded(
        mistake: str, made: np.ndarray, right: np.ndarray, *, reward=rewards, group=ids, declared=None, needs_declared=False
    ) -> Iterator[Planted]:
        if float(np.abs(made - right).max()) <= 1e-4 * max(1.0, float(np.abs(right).max())) or not np.isfinite(made).all():
            return
        out = dict(arrays)
        for key in (
            "rewards_per_func",
            "reward_weights",
            "gen_rewards_per_func",
            "gen_advantages",
            "token_level_rewards",
            "returns",
            "dloss_dentropies",
        ):
            out.pop(key, None)
        out["rewards"], out["group_ids"] = reward[rows].astype(np.float32), group[rows]
        if generation:
            out["gen_rewards"], out["gen_group_ids"] = reward.astype(np.float32), group
        out["advantages"] = made[rows] if kind == "grpo" else np.where(mask, made[rows][:, None], 0).astype(np.float32)
        if t is not None:
            out = _recorded(out, *naive_loss(Plant(t, out)))
        yield Planted(
            entry["file"][:-4],
            mistake,
            out,
            declared or (t.declared() if t is not None else Declared(ROWS[name])),
            t.numbers() if t is not None else {},
            True,
            True,
            needs_declared,
            is_loss=False,
        )

    right = _group_rule(rewards, ids, *rule)
    yield from recorded("groups_pooled", _group_rule(rewards, np.zeros_like(ids), *rule), right)
    yield from recorded("advantage_sign", -right, right)
    if rule[0] == "group_std":
        yield from recorded(
            "population_for_sample_std", _group_rule(rewards, ids, rule[0], 0, rule[2]), right, needs_declared=True
        )
        other = replace(ROWS[name], std_ddof=0)
        if t is not None:
            other = replace(t.declared().row, std_ddof=0, scale="group_std", std_eps=rule[2])
        population = _group_rule(rewards, ids, rule[0], 0, rule[2])
        yield from recorded(
            "sample_for_population_std",
            right,
            population,
            declared=Declared(other, ("clip_low", "clip_high")),
            needs_declared=True,
        )
    if len(set(counts.tolist())) == 1:
        order = np.random.default_rng(3).permutation(len(ids))
        mixed, scores = ids[order], rewards[order]
        by_place = np.arange(len(ids)) // counts[0]
        yield from recorded(
            "groups_assumed_contiguous",
            _group_rule(scores, by_place, *rule),
            _group_rule(scores, mixed, *rule),
            reward=scores,
            group=mixed,
        )
    if counts.min() > 2:
        holes = rewards.astype(np.float64).copy()
        holes[np.flatnonzero(ids == ids[0])[0]] = np.nan
        yield from recorded(
            "missing_reward_counted",
            _group_rule(np.nan_to_num(holes), ids, *rule),
            _group_rule(holes, ids, *rule),
            reward=holes,
        )
    if rule[0] == "group_std":
        level = rewards.astype(np.float32).copy()
        chosen = ids == ids[0]
        level[chosen] = np.float32(0.1)
        right_level = _group_rule(level, ids, *rule)
        made = right_level.copy()
        # What float32 leaves of equal rewards, over a std of the same size: a mean one ulp off.
        off = np.float32(0.1) - np.nextafter(np.float32(0.1), np.float32(1))
        made[chosen] = off / (abs(off) + np.float32(1e-9))
        yield from recorded("roundoff_std", made, right_level, reward=level)
