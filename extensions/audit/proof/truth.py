"""The shipped captures, and what each one was computed with, from its manifest entry."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from extensions.audit.declared import Declared
from extensions.objectives import ROWS

CAPTURES = Path(__file__).parents[1] / "captures"
INF = math.inf


def manifest() -> list[dict]:
    lines = (CAPTURES / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry for entry in map(json.loads, lines) if (CAPTURES / entry["file"]).exists()]


def load(file: str) -> dict[str, np.ndarray]:
    with np.load(CAPTURES / file, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


# ------------------------------------------------------------------------------------------ what each capture is


@dataclass(frozen=True)
class Truth:
    """What the trainer of a capture computes, from its configuration alone."""

    row: str
    ratio: str = "token"
    surrogate: str = "clip"
    low: float = 0.2
    high: float = 0.2
    cap: float = 3.0
    kl: str = "none"
    beta: float = 0.0
    kl_weight: str = "none"
    reduction: str = "mean_per_response"
    rows_counted: str = "all"
    accumulation: int = 1
    divides: bool = False  # the returned loss is divided by the accumulation steps
    window: float | None = None
    budget: float | None = None
    entropy_coef: float = 0.0
    off_policy: float | None = None
    advantage: tuple[tuple[str, object], ...] = ()  # fields of the row's advantage part that the configuration changes

    def fields(self) -> dict:
        made = {"ratio": self.ratio, "reduction": self.reduction, "kl": self.kl}
        if self.ratio != "none":
            made["surrogate"] = self.surrogate
        if self.surrogate in ("clip", "dual_clip", "cispo") and self.ratio != "none":
            made |= {"clip_low": self.low, "clip_high": self.high}
        if self.kl != "none":
            made |= {"kl_coef": self.beta, "kl_weight": self.kl_weight}
        if self.off_policy is not None:
            made["off_policy_rows"] = "drop"
        return made

    def numbers(self) -> dict[str, float]:
        """What an engineer would set: the trainer's configuration."""
        made = {"accumulation_steps": float(self.accumulation)}
        if self.surrogate in ("clip", "dual_clip"):
            made |= {"clip_low": self.low, "clip_high": self.high}
        if self.kl != "none":
            made["beta"] = self.beta
        if self.budget:
            made["budget"] = self.budget
        return made

    def declared(self) -> Declared:
        row = ROWS[self.row]
        changes: dict = {"ratio": self.ratio, "surrogate": self.surrogate, "reduction": self.reduction}
        if self.surrogate in ("clip", "dual_clip", "cispo"):
            changes |= {"clip_low": self.low, "clip_high": self.high}
        changes |= {"kl": self.kl if self.kl != "none" else row.kl, "kl_coef": self.beta}
        if self.kl != "none":
            changes |= {"kl_weight": self.kl_weight, "kl_place": "loss"}
        if row.kl_place == "reward":
            changes = {k: v for k, v in changes.items() if not k.startswith("kl")}
        if self.off_policy is not None:
            changes |= {"off_policy_rows": "drop", "off_policy_threshold": self.off_policy}
        changes |= {"entropy_coef": self.entropy_coef} if self.entropy_coef else {}
        changes |= dict(self.advantage)
        changes["accumulation"] = "divide" if self.divides else "none"
        return Declared(replace(row, **changes), ("clip_low", "clip_high"))


TRL_REDUCTIONS = {
    "grpo": "mean_per_response",
    "sapo": "mean_per_response",
    "bnpo": "mean_over_tokens",
    "dapo": "mean_over_window",
    "cispo": "mean_over_window",
    "vespo": "mean_over_window",
    "dr_grpo": "sum_over_budget",
    "luspo": "sum_per_response",
}
VERL_REDUCTIONS = {
    "token-mean": "mean_over_tokens",
    "token-sum": "sum_over_tokens",
    "seq-mean-token-sum": "sum_per_response",
    "seq-mean-token-sum-norm": "sum_over_width",
    "seq-mean-token-mean": "mean_per_response",
}


def truth_of(entry: dict, arrays: dict) -> Truth | None:
    """The right answer for a capture that holds a policy loss; None for the other kinds."""
    config, kind = entry["config_effective"], entry["kind"]
    if kind == "grpo":
        loss = config["loss_type"]
        is_sequence = config["importance_sampling_level"] == "sequence"
        name = {"grpo": "gspo"}.get(loss, loss) if is_sequence else loss
        steps = entry["capture"]["current_gradient_accumulation_steps"]
        made = Truth(
            f"{name}@trl-1.16.0",
            ratio="sequence_mean" if is_sequence else "token",
            low=config["epsilon"],
            high=config["epsilon_high"],
            reduction=TRL_REDUCTIONS[loss],
            accumulation=steps,
            divides=TRL_REDUCTIONS[loss] != "mean_over_window",
            window=float(arrays["num_items_in_batch"]) * steps / config["steps_per_generation"],
            budget=float(config["max_completion_length"]),
            entropy_coef=config["entropy_coef"],
            off_policy=config["off_policy_mask_threshold"],
        )
        scale = {"group": "group_std", "batch": "batch_std_of_raw_rewards", "none": "none"}[config["scale_rewards"]]
        made = replace(made, advantage=(("scale", scale), ("std_ddof", 1), ("std_eps", 1e-4)))
        if config["multi_objective_aggregation"] == "normalize_then_sum":
            made = replace(made, row="gdpo@trl-1.16.0", advantage=())
        if loss in ("sapo", "vespo"):
            made = replace(made, surrogate=loss)
        if loss == "cispo":
            made = replace(made, surrogate="cispo", low=INF, high=config["epsilon_high"] - 1)
        if config["beta"]:
            made = replace(
                made, kl="k3", beta=config["beta"], kl_weight="ratio" if config["use_bias_correction_kl"] else "none"
            )
        return made
    if kind == "rloo":
        return Truth(
            "rloo@trl-1.16.0",
            ratio="sequence_product",
            low=config["epsilon"],
            high=config["epsilon_high"],
            accumulation=entry["capture"]["current_gradient_accumulation_steps"],
        )
    if kind == "policy_loss":
        mode = entry["config"]["loss_mode"]
        if mode not in ("vanilla", "gspo", "cispo", "gpg"):
            return None
        low, high = config["clip_ratio_low"], config["clip_ratio_high"]
        made = Truth(
            {"vanilla": "grpo"}.get(mode, mode) + "@verl-0.9.1",
            low=low,
            high=high,
            reduction=VERL_REDUCTIONS[config["loss_agg_mode"]],
            rows_counted="nonempty",
        )
        made = replace(
            made,
            **{
                "vanilla": {"surrogate": "dual_clip"},
                "gspo": {"ratio": "sequence_mean_token"},
                "cispo": {"surrogate": "cispo"},
                "gpg": {"ratio": "none", "surrogate": "plain"},
            }[mode],
        )
        window = config["global_batch_info"]
        if window.get("batch_num_tokens"):
            made = replace(made, reduction="mean_over_window", window=window["batch_num_tokens"] / window.get("dp_size", 1))
        return made
    if kind == "ppo" and "rho" in arrays:
        return Truth(
            "ppo@rlax-0.1.9", low=entry["config"]["epsilon"], high=entry["config"]["epsilon"], reduction="mean_over_tokens"
        )
    return None
