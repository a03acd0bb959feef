"""Every choice of extensions.objectives against hand-worked numbers, autograd, finite differences and real trainers."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import itertools
import json
import math
import os
import statistics
import tempfile
import unittest
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from unittest import mock

import numpy as np
import torch

import rl_lab
from extensions import objectives, objectives_report
from extensions.objectives import PREFERENCE_ROWS, ROWS, evaluate, evaluate_preference, make_batch, make_preferences
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)

CAPTURES = Path(objectives.__file__).parent / "captures"


@lru_cache
def recordings() -> dict[str, dict]:
    """Manifest row of every recorded batch, by file name."""
    lines = (CAPTURES / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    return {entry["file"]: entry for entry in map(json.loads, lines)}


def arrays_of(file: str) -> dict[str, np.ndarray]:
    """A recorded batch; float32 widened, so that all difference to the recording is the trainer's own rounding."""
    with np.load(CAPTURES / file, allow_pickle=False) as stored:
        return {
            name: stored[name].astype(np.float64) if stored[name].dtype == np.float32 else stored[name] for name in stored
        }


BATCH_ARRAYS = (
    "logps mask old_logps ref_logps rewards group_ids entropies rewards_per_func reward_weights gen_rewards "
    "gen_rewards_per_func gen_group_ids gen_lengths gen_kl row_ids"
).split()


def trl_grpo(entry: dict, arrays: dict) -> tuple[objectives.Row, objectives.Batch]:
    """The row that a TRL GRPOTrainer configuration means, and its batch."""
    config = entry["config_effective"]
    is_sequence = config["importance_sampling_level"] == "sequence"
    name = {"grpo": "gspo"}.get(config["loss_type"], config["loss_type"]) if is_sequence else config["loss_type"]
    name = "gdpo" if config["multi_objective_aggregation"] == "normalize_then_sum" else name
    row = ROWS[f"{name}@trl-1.16.0"]
    clip = (
        {"clip_high": config["epsilon_high"] - 1}
        if name == "cispo"
        else {"clip_low": config["epsilon"], "clip_high": config["epsilon_high"]}
    )
    row = replace(
        row,
        **clip,
        ratio="sequence_mean" if is_sequence else "token",
        scale=row.scale
        if name == "gdpo"
        else {"group": "group_std", "batch": "batch_std_of_raw_rewards", "none": "none"}[config["scale_rewards"]],
        kl_coef=config["beta"],
        kl_weight="ratio" if config["use_bias_correction_kl"] else "none",
        entropy_coef=config["entropy_coef"],
    )
    if config["off_policy_mask_threshold"] is not None:
        row = replace(row, off_policy_rows="drop", off_policy_threshold=config["off_policy_mask_threshold"])
    if row.entropy_coef:
        row = replace(row, accumulation="divide")
    batch = make_batch(
        **{name: arrays[name] for name in BATCH_ARRAYS if name in arrays},
        budget=config["max_completion_length"],
        accumulation_steps=entry["capture"]["current_gradient_accumulation_steps"],
        steps_per_generation=config["steps_per_generation"],
        num_items_in_batch=arrays["num_items_in_batch"],
        allow_empty_rows=config["mask_truncated_completions"],
    )
    return row, batch


def trl_rloo(entry: dict, arrays: dict) -> tuple[objectives.Row, objectives.Batch]:
    config = entry["config_effective"]
    row = replace(
        ROWS["rloo@trl-1.16.0"], kl_coef=config["beta"], clip_low=config["epsilon"], clip_high=config["epsilon_high"]
    )
    return row, make_batch(**{name: arrays[name] for name in BATCH_ARRAYS if name in arrays})


VERL_LOSSES = {
    "vanilla": "grpo",
    "gspo": "gspo",
    "cispo": "cispo",
    "gpg": "gpg",
    "dro": "dro",
    "geo_mean": "geo_mean",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
}
VERL_REDUCTIONS = {
    "token-mean": "mean_over_window",
    "token-sum": "sum_over_tokens",
    "seq-mean-token-sum": "sum_per_response",
    "seq-mean-token-sum-norm": "sum_over_width",
    "seq-mean-token-mean": "mean_per_response",
}


def verl_window(config: dict) -> dict:
    """verl's global counts, as one rank sees them."""
    ranks = config.get("dp_size", 1)
    window = {}
    if config.get("batch_num_tokens"):
        window = {"window_tokens": config["batch_num_tokens"] / ranks, "window_rows": config["global_batch_size"] / ranks}
    return window


def verl_loss(entry: dict, arrays: dict) -> tuple[objectives.Row, objectives.Batch]:
    config = entry["config_effective"]
    loss = entry["config"]["loss_mode"]
    row = replace(ROWS[VERL_LOSSES[loss] + "@verl-0.9.1"], baseline="given", scale="none")
    if loss != "geo_mean":
        row = replace(row, reduction=VERL_REDUCTIONS[config["loss_agg_mode"]])
    row = replace(row, clip_low=config["clip_ratio_low"], clip_high=config["clip_ratio_high"])
    return row, make_batch(
        **{name: arrays[name] for name in ("logps", "old_logps", "mask", "advantages")},
        **verl_window(config["global_batch_info"]),
    )


def check_close(test: unittest.TestCase, got, wanted, tolerance: float, what: str) -> None:
    """Largest difference at most `tolerance` times the largest wanted number; the message names the quantity."""
    got, wanted = (np.asarray(x.detach() if isinstance(x, torch.Tensor) else x, dtype=np.float64) for x in (got, wanted))
    test.assertEqual(got.shape, wanted.shape, what)
    scale = np.abs(wanted).max() if wanted.size else 0.0
    test.assertLessEqual(np.abs(got - wanted).max(initial=0.0), tolerance * max(scale, 1e-12), what)


class RecordedTrainers(unittest.TestCase):
    """Every recorded batch is reproduced by a named row. float32: to 1e-5 of the size of the terms; float64: to 1e-6."""

    TOLERANCE = 1e-5

    def files(self, *kinds: str) -> list[tuple[str, dict, dict]]:
        chosen = [(file, entry, arrays_of(file)) for file, entry in recordings().items() if entry["kind"] in kinds]
        self.assertTrue(chosen)
        return chosen

    def check_policy(self, file: str, row: objectives.Row, batch: objectives.Batch, arrays: dict) -> None:
        result = evaluate(row, batch)
        size = max(abs(arrays["loss"]), float((result.weights * result.token_losses).abs().sum()))
        self.assertLessEqual(abs(result.loss.item() - arrays["loss"]), self.TOLERANCE * size, f"{file}: loss")
        check_close(
            self, result.dloss_dlogps, arrays["dloss_dlogps"].reshape(batch.logps.shape), self.TOLERANCE, f"{file}: gradient"
        )
        for name in ("dloss_dentropies", "dloss_dvpreds"):
            if name in arrays and np.abs(arrays[name]).any():
                wanted = arrays[name].reshape(batch.logps.shape)
                check_close(self, getattr(result, name), wanted, self.TOLERANCE, f"{file}: {name}")
        wanted = arrays["advantages"].reshape(len(batch.mask), -1) * np.asarray(batch.mask)
        check_close(self, result.advantages, wanted, self.TOLERANCE, f"{file}: advantages")

    def test_trl_grpo(self):
        for file, entry, arrays in self.files("grpo"):
            self.check_policy(file, *trl_grpo(entry, arrays), arrays)

    def test_trl_rloo(self):
        for file, entry, arrays in self.files("rloo"):
            self.check_policy(file, *trl_rloo(entry, arrays), arrays)

    def test_verl_policy_losses(self):
        for file, entry, arrays in self.files("policy_loss"):
            self.check_policy(file, *verl_loss(entry, arrays), arrays)

    def test_clip_fractions_that_trainers_report(self):
        """TRL's region_mean and verl's pg_clipfrac are the clipped branch, not the ratio outside the band."""
        for file, entry, arrays in self.files("grpo", "policy_loss"):
            reported = entry["reported"]
            if "clip_ratio/region_mean" in reported and entry["config_effective"]["importance_sampling_level"] == "token":
                row, batch = trl_grpo(entry, arrays)
                # With the advantages as recorded: where rewards are all equal TRL's are a rounding error and not 0.
                given = torch.as_tensor(arrays["advantages"]).unsqueeze(1)
                result = evaluate(objectives_report.with_given_advantages(row), replace(batch, advantages=given))
                name = "clip_ratio/region_mean"
            elif entry["config"].get("loss_mode") in ("cispo", "dppo_tv", "dppo_kl"):
                result, name = evaluate(*verl_loss(entry, arrays)), "actor/pg_clipfrac"
            else:
                continue
            self.assertAlmostEqual(result.clipped_branch_fraction, reported[name], 6, file)

    def test_stable_baselines3_and_rlax_losses(self):
        for file, entry, arrays in self.files("ppo"):
            if "rho" in arrays:
                row = replace(
                    ROWS["ppo@rlax-0.1.9"], clip_low=entry["config"]["epsilon"], clip_high=entry["config"]["epsilon"]
                )
                batch = make_batch(logps=np.log(arrays["rho"]), old_logps=0 * arrays["rho"], advantages=arrays["advantages"])
                # rlax differentiates by the ratio: d / d log r = r d / dr
                self.check_policy(file, row, batch, arrays | {"dloss_dlogps": arrays["dloss_drho"] * arrays["rho"]})
                continue
            config = entry["config_effective"]
            row = replace(
                ROWS["ppo@sb3-2.9.2"],
                clip_low=config["clip_range"],
                clip_high=config["clip_range"],
                value_coef=config["vf_coef"],
                entropy_coef=config["ent_coef"],
            )
            if config["clip_range_vf"] is not None:
                row = replace(row, value_loss="clip_replace", value_clip=config["clip_range_vf"])
            batch = make_batch(
                advantages=arrays["advantages_raw"],
                values=arrays["old_values"],
                **{name: arrays[name] for name in ("logps", "old_logps", "returns", "vpreds", "entropies")},
            )
            self.check_policy(file, row, batch, arrays)

    def test_verl_advantages(self):
        names = {
            "grpo_vectorized": "grpo",
            "gae": "ppo",
            "reinforce_plus_plus": "reinforce_pp",
            "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
        }
        for file, entry, arrays in self.files("advantage"):
            config = entry["config"]
            row = ROWS[names.get(config["adv_estimator"], config["adv_estimator"]) + "@verl-0.9.1"]
            row = replace(row, gamma=config.get("gamma", row.gamma), lam=config.get("lam", row.lam))
            batch = make_batch(
                logps=0 * arrays["token_level_rewards"],
                **{
                    name: arrays[name]
                    for name in ("mask", "token_level_rewards", "group_ids", "values", "reward_baselines")
                    if name in arrays
                },
            )
            wanted = arrays["advantages"] * arrays["mask"]
            check_close(self, objectives.compute_advantages(row, batch), wanted, self.TOLERANCE, file)
            if config["adv_estimator"] == "gae":
                targets = objectives.gae_over_tokens(row, batch)[1]
                check_close(self, targets, arrays["returns"] * arrays["mask"], self.TOLERANCE, f"{file}: returns")

    def test_verl_reductions(self):
        for file, entry, arrays in self.files("reduction"):
            config = entry["config"]
            factor = config.get("loss_scale_factor")
            reduction = "sum_over_budget" if factor else VERL_REDUCTIONS[config["loss_agg_mode"]]
            batch = make_batch(
                logps=arrays["loss_mat"],
                mask=arrays["mask"],
                budget=factor,
                allow_empty_rows="empty" in file,
                **verl_window(config),
            )
            weights = objectives.reduction_weights(ROWS["grpo@verl-0.9.1"], batch, reduction) * batch.mask
            check_close(self, weights, arrays["dloss_dloss_mat"], self.TOLERANCE, f"{file}: gradient")
            check_close(self, (weights * batch.logps).sum(), arrays["loss"], self.TOLERANCE, f"{file}: loss")

    def test_verl_kl_estimators(self):
        for file, entry, arrays in self.files("kl"):
            penalty = entry["config"]["kl_penalty"]
            row = replace(
                ROWS["grpo_kl@verl-0.9.1"],
                kl=penalty.rstrip("+"),
                kl_gradient="k2" if "+" in penalty else "own",
                **({} if penalty.startswith("k3") else {"kl_log_limit": math.inf, "kl_limit": math.inf}),
            )
            kl, slope = objectives.kl_estimate(row, torch.as_tensor(arrays["logps"]), torch.as_tensor(arrays["ref_logps"]))
            check_close(self, kl.numpy() * arrays["mask"], arrays["kl"] * arrays["mask"], self.TOLERANCE, f"{file}: value")
            check_close(
                self, slope.numpy() * arrays["mask"], arrays["dkl_dlogps"] * arrays["mask"], self.TOLERANCE, f"{file}: slope"
            )

    def test_verl_value_losses_and_reward_shaping(self):
        for file, entry, arrays in self.files("value_loss"):
            config = entry["config"]
            row = replace(
                ROWS["ppo@verl-0.9.1"],
                baseline="given",
                scale="none",
                value_clip=config["cliprange_value"],
                reduction=VERL_REDUCTIONS[config["loss_agg_mode"]],
            )
            batch = make_batch(
                logps=0 * arrays["values"],
                advantages=0 * arrays["values"],
                **{name: arrays[name] for name in ("mask", "values", "vpreds", "returns")},
            )
            result = evaluate(row, batch)
            check_close(self, result.value_loss, arrays["loss"], self.TOLERANCE, f"{file}: loss")
            check_close(self, result.dloss_dvpreds, arrays["dloss_dvpreds"], self.TOLERANCE, f"{file}: gradient")
        ((file, entry, arrays),) = self.files("reward")
        row = replace(ROWS["reinforce_pp"], kl_coef=entry["config"]["kl_ratio"])
        batch = make_batch(
            logps=arrays["old_logps"],
            token_level_rewards=arrays["token_level_scores"],
            **{name: arrays[name] for name in ("mask", "old_logps", "ref_logps")},
        )
        wanted = arrays["token_level_rewards"] * arrays["mask"]
        check_close(self, objectives.token_rewards(row, batch), wanted, self.TOLERANCE, file)

    def test_gae_of_stable_baselines3_torchrl_and_rlax(self):
        row = replace(ROWS["ppo"], value_loss="none")
        for file, entry, arrays in self.files("gae"):
            config = entry["config"] | entry["config_effective"]
            gamma = config.get("gamma", config.get("gamma_inside_discounts"))
            lam = next(config[name] for name in ("gae_lambda", "lmbda", "lambda_") if name in config)
            if file.startswith("sb3"):
                rewards, values, terminated, truncated, ends = (
                    arrays[name].T for name in ("env_rewards", "values", "terminated", "truncated", "terminal_values")
                )
                following = np.concatenate([values[:, 1:], arrays["last_values"][:, None]], axis=1)
                data = [rewards, values, np.where(truncated, ends, following), terminated, terminated | truncated]
                wanted = arrays["advantages"].T, arrays["returns"].T
            elif file.startswith("torchrl"):
                done, terminated = arrays["done"][..., 0], arrays["terminated"][..., 0]
                terminated = done if "done_only" in file else terminated
                data = [*(arrays[name][..., 0] for name in ("rewards", "values", "next_values")), terminated, done]
                wanted = tuple(arrays[name][..., 0] if name in arrays else None for name in ("advantages", "returns"))
            else:
                next_values = arrays["next_values"] if "next_values" in arrays else arrays["values"][1:]
                # A lambda-return does not depend on the value of the state it starts from, only on later ones.
                values = np.concatenate([[0.0], next_values[:-1]]) if "next_values" in arrays else arrays["values"][:-1]
                data = [
                    x[None] for x in (arrays["rewards"], values, next_values, arrays["terminated"], arrays["terminated"])
                ]
                wanted = tuple(arrays[name][None] if name in arrays else None for name in ("advantages", "returns"))
            data[-1] = data[-1].copy()
            data[-1][:, -1] = True  # the end of the buffer
            named = dict(zip(("token_level_rewards", "values", "next_values", "terminated", "boundary"), data))
            batch = make_batch(logps=0 * data[0], mask=np.ones(data[0].shape, dtype=bool), **named)
            got = objectives.gae_over_tokens(replace(row, gamma=gamma, lam=lam), batch)
            for name, ours, theirs in zip(("advantages", "returns"), got, wanted):
                if theirs is not None:
                    tolerance = 1e-6 if entry["arrays"]["rewards"]["dtype"] == "float64" else self.TOLERANCE
                    check_close(self, ours, theirs, tolerance, f"{file}: {name}")

    DPO_ROWS = {"sigmoid": "dpo", "exo_pair": "exo", "bco_pair": "bco"}

    def test_trl_preferences(self):
        for file, entry, arrays in self.files("dpo", "kto"):
            config = entry["config_effective"]
            data = {name: arrays[name] for name in ("logps", "mask", "ref_logps")}
            if entry["kind"] == "kto":
                row = replace(
                    PREFERENCE_ROWS["kto"],
                    beta=config["beta"],
                    desirable_weight=config["desirable_weight"],
                    undesirable_weight=config["undesirable_weight"],
                )
                data |= {name: arrays[name] for name in ("labels", "kl_seq_logps", "ref_kl_seq_logps")}
                data["labels"] = data["labels"] != 0
            else:
                loss = config["loss_type"][0]
                row = replace(PREFERENCE_ROWS[self.DPO_ROWS.get(loss, loss)], beta=config["beta"])
                # TRL reads label_smoothing for these four only
                smoothing = config["label_smoothing"] if row.loss in ("robust", "exo", "aot", "aot_unpaired") else 0.0
                row = replace(
                    row,
                    label_smoothing=smoothing,
                    tail_weight=config["ld_alpha"] or 1.0,
                    divergence={"reverse_kl": "reverse_kl", "forward_kl": "forward_kl", "js_divergence": "js"}[
                        config["f_divergence_type"]
                    ],
                    sft_coef=config["loss_weights"][1] if "sft" in config["loss_type"] else 0.0,
                )
            result = evaluate_preference(row, make_preferences(**data))
            check_close(self, result.loss, arrays["loss"], self.TOLERANCE, f"{file}: loss")
            # TRL sums stored zeros over the prompt too, so its gradient is set there; only counted tokens mean something.
            wanted = arrays["dloss_dlogps"] * arrays["mask"]
            check_close(self, result.dloss_dlogps, wanted, self.TOLERANCE, f"{file}: gradient")

    def test_every_recording_is_used(self):
        kinds = {
            "grpo",
            "rloo",
            "policy_loss",
            "ppo",
            "advantage",
            "reduction",
            "kl",
            "value_loss",
            "reward",
            "gae",
            "dpo",
            "kto",
        }
        self.assertEqual({entry["kind"] for entry in recordings().values()}, kinds)
        self.assertEqual({path.name for path in CAPTURES.glob("*.npz")}, set(recordings()))

    def test_recordings_tell_conventions_apart(self):
        """The wrong row must not pass: wrong divisor, wrong clip, wrong KL weight, wrong reduction."""
        for file, wrong in (
            ("trl_grpo_grpo_pass2.npz", {"std_ddof": 0}),
            ("trl_grpo_grpo_pass2.npz", {"std_eps": 1e-2}),
            ("trl_grpo_grpo_pass2.npz", {"reduction": "mean_over_tokens"}),
            ("trl_grpo_grpo_pass2_cliphigher_beta_rho_kl.npz", {"clip_high": 0.2}),
            ("trl_grpo_grpo_pass2_cliphigher_beta_rho_kl.npz", {"kl_weight": "none"}),
            ("trl_grpo_dapo_accum2_mb0.npz", {"reduction": "mean_over_tokens"}),
            ("trl_grpo_grpo_mask_truncated.npz", {"rows_counted": "nonempty"}),
            ("trl_grpo_dr_grpo_scale_none_long_budget_pass2.npz", {"reduction": "sum_over_width"}),
            ("trl_grpo_gspo_wide_pass2_beta.npz", {"ratio": "sequence_mean_token"}),
        ):
            arrays = arrays_of(file)
            row, batch = trl_grpo(recordings()[file], arrays)
            with self.subTest(file=file, wrong=wrong), self.assertRaises(AssertionError):
                self.check_policy(file, replace(row, **wrong), batch, arrays)


# ------------------------------------------------------------------------------------------ a slow oracle


def slow_advantages(row: objectives.Row, rewards: list[float], groups: list[int], lengths: list[int]) -> list[float]:
    """Outcome advantages by the statistics module, one answer at a time. All groups have two answers or more."""
    spread = {0: statistics.pstdev, 1: statistics.stdev}[row.std_ddof]

    def guarded(x: float, std: float) -> float:
        return {
            "add": lambda: x / (std + row.std_eps),
            "inside": lambda: x / math.sqrt(std**2 + row.std_eps),
            "floor": lambda: x / max(std, row.std_eps),
            "floor_variance": lambda: x / math.sqrt(max(std**2, row.std_eps)),
        }[row.std_guard]()

    advantages = []
    for i, reward in enumerate(rewards):
        mates = [j for j in range(len(rewards)) if groups[j] == groups[i]]
        ranked = sorted((rewards[j] for j in mates), reverse=True)
        baseline = {
            "none": lambda: reward,
            "group_mean": lambda: reward - statistics.mean(rewards[j] for j in mates),
            "leave_one_out": lambda: reward - statistics.mean(rewards[j] for j in mates if j != i),
            "length_weighted_mean": lambda: (
                reward - sum(lengths[j] * rewards[j] for j in mates) / sum(lengths[j] for j in mates)
            ),
            "best_minus_second": lambda: ranked[0] - ranked[1] if reward == ranked[0] else 0.0,
        }[row.baseline]()
        if row.scale == "group_std":
            baseline = guarded(baseline, spread([rewards[j] for j in mates]))
        advantages.append(baseline)
    if row.scale == "batch_std_of_raw_rewards":
        advantages = [guarded(x, spread(rewards)) for x in advantages]
    if row.scale == "batch_std":
        mean = statistics.mean(advantages)
        advantages = [guarded(x - mean, spread(advantages)) for x in advantages]
    return advantages


def slow_loss(
    row: objectives.Row, batch: objectives.Batch, logps: torch.Tensor, A: torch.Tensor, kept: list[int]
) -> torch.Tensor:
    """The loss as its formula reads, token by token with autograd and explicit stop-gradients; policy and KL term."""
    rows = [(i, [t for t in range(batch.mask.shape[1]) if batch.mask[i, t]]) for i in kept]
    tokens = sum(len(used) for _, used in rows)
    counted = [used for _, used in rows if used or row.rows_counted == "all"]
    B = len(counted) if batch.window_rows is None else batch.window_rows

    def weight(reduction: str, length: int) -> float:
        return {
            "mean_per_response": lambda: 1 / B / (length + row.length_eps),
            "mean_over_tokens": lambda: 1 / tokens,
            "mean_over_window": lambda: 1 / (batch.window_tokens or tokens),
            "sum_per_response": lambda: 1 / B,
            "sum_over_budget": lambda: 1 / B / batch.budget,
            "sum_over_width": lambda: 1 / B / batch.mask.shape[1],
            "sum_over_tokens": lambda: 1.0,
        }[reduction]() / (batch.accumulation_steps if row.accumulation == "divide" else 1)

    def cut(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(row.log_ratio_min, row.log_ratio_max)

    total = torch.zeros((), dtype=logps.dtype)
    for i, used in rows:
        log_ratios = {t: logps[i, t] - batch.old_logps[i, t] for t in used}
        mean = sum(log_ratios.values()) / len(used)
        if row.ratio == "sequence_mean_of_clipped":
            clipped = [
                x
                if A[i, t] == 0
                else torch.minimum(x * A[i, t].sign(), x.clamp(-row.clip_low, row.clip_high) * A[i, t].sign())
                * A[i, t].sign()
                for t, x in log_ratios.items()
            ]
            mean = sum(clipped) / len(used)
        for t in used:
            a, l, l0 = A[i, t], logps[i, t], batch.old_logps[i, t]
            r = {
                "token": lambda: cut(log_ratios[t]).exp(),
                "sequence_mean": lambda: cut(mean).exp(),
                "sequence_product": lambda: cut(sum(log_ratios.values())).exp(),
                "sequence_mean_token": lambda: cut(mean.detach() + l - l.detach()).exp(),
                "sequence_mean_of_clipped": lambda: mean.exp(),
                "none": lambda: None,
            }[row.ratio]()
            low, high = 1 - row.clip_low, 1 + row.clip_high
            clip = lambda: torch.minimum(r * a, r.clamp(low, high) * a)  # noqa: E731

            def vespo():
                w = sum(log_ratios.values()).detach().exp()
                k, lam = (
                    (row.vespo_k_positive, row.vespo_lam_positive)
                    if a >= 0
                    else (row.vespo_k_negative, row.vespo_lam_negative)
                )
                return w**k * math.exp(lam) * (-lam * w).exp() * a * l

            def dppo(distance):
                beyond = distance > row.clip_high and l > l0 if a > 0 else distance > row.clip_low and l < l0
                return 0 * l if beyond else r.detach().clamp(max=row.ratio_cap) * a * l

            p, p0 = l.exp().item(), l0.exp().item()
            J = (
                a * l
                if row.ratio == "none"
                else {
                    "plain": lambda: r * a,
                    "clip": clip,
                    "dual_clip": lambda: torch.maximum(clip(), row.ratio_cap * a) if a < 0 else clip(),
                    "capped_clip": lambda: torch.minimum(r.clamp(max=row.ratio_cap) * a, r.clamp(low, high) * a),
                    "cispo": lambda: r.detach().clamp(low, high) * a * l,
                    "sapo": lambda: (
                        4 / (tau := row.tau_positive if a > 0 else row.tau_negative) * torch.sigmoid(tau * (r - 1)) * a
                    ),
                    "vespo": vespo,
                    "dppo_tv": lambda: dppo(abs(p - p0)),
                    "dppo_kl": lambda: dppo(p0 * math.log(p0 / p) + (1 - p0) * math.log((1 - p0) / (1 - p))),
                }[row.surrogate]()
            )
            if row.off_policy_rows == "drop" and a < 0 and -sum(log_ratios.values()) / len(used) > row.off_policy_threshold:
                J = 0 * l
            total = total - weight(row.reduction, len(used)) * J
            if row.kl_in_loss and row.kl != "exact":
                d = l - (l0 if row.kl_anchor == "old" else batch.ref_logps[i, t])
                kl = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() + d - 1, "abs": d.abs()}[row.kl]
                if row.kl_gradient == "k2":
                    kl = kl.detach() + d**2 / 2 - (d**2 / 2).detach()
                kl = kl * r if row.kl_weight == "ratio" else kl
                reduction = row.reduction if row.kl_reduction == "same" else row.kl_reduction
                total = total + row.kl_coef * weight(reduction, len(used)) * kl
    return total


@lru_cache
def small_batch() -> objectives.Batch:
    return objectives_report.small_batch()[0]


def combinations_of_choices() -> list[objectives.Row]:
    """Rows that no one named: every ratio with every surrogate it may have, then every KL, weight and reduction."""
    base = replace(ROWS["grpo"], name="combination", kl="none", kl_coef=0.0)
    rows = []
    for ratio in objectives.CHOICES["ratio"]:
        for surrogate in objectives.CHOICES["surrogate"]:
            try:
                rows.append(replace(base, ratio=ratio, surrogate=surrogate))
            except ValueError:
                continue
    rows += [replace(row, baseline="given", scale="none") for row in rows]
    for kl in ("k1", "k2", "k3", "abs"):
        for weight, gradient, anchor in itertools.product(("none", "ratio"), ("own", "k2"), ("reference", "old")):
            for ratio in ("token", "sequence_mean"):
                rows.append(
                    replace(base, ratio=ratio, kl=kl, kl_coef=0.3, kl_weight=weight, kl_gradient=gradient, kl_anchor=anchor)
                )
    for reduction in objectives.CHOICES["reduction"]:
        rows.append(replace(base, reduction=reduction, accumulation="divide"))
        rows.append(replace(base, kl="k3", kl_coef=0.3, kl_reduction=reduction, length_eps=1e-3))
    rows.append(replace(base, off_policy_rows="drop", off_policy_threshold=-0.3))
    rows.append(replace(base, log_ratio_min=-0.1, log_ratio_max=0.5))
    rows.append(replace(base, ratio="sequence_mean", log_ratio_min=-0.1, log_ratio_max=0.2))
    rows.append(replace(base, surrogate="capped_clip", ratio_cap=1.1))
    return rows


class GradientInClosedForm(unittest.TestCase):
    def assert_gradient_is_that_of_autograd(self, row: objectives.Row, batch: objectives.Batch | None = None) -> None:
        batch = small_batch() if batch is None else batch
        result = evaluate(row, batch)
        logps = batch.logps.clone().requires_grad_()
        loss = slow_loss(row, batch, logps, result.advantages, result.kept.nonzero()[:, 0].tolist())
        (gradient,) = torch.autograd.grad(loss, logps)
        ours = result.loss - result.value_loss - result.entropy_loss - (result.kl_loss if row.kl == "exact" else 0)
        self.assertAlmostEqual(ours.item(), loss.item(), 11, row)
        torch.testing.assert_close(result.dloss_dlogps, gradient, rtol=1e-10, atol=1e-12, msg=lambda text: f"{row}\n{text}")

    def test_every_named_row(self):
        for row in ROWS.values():
            if row.kl != "exact":
                self.assert_gradient_is_that_of_autograd(row)

    def test_a_limit_of_the_ratio_cuts_nothing_where_there_is_none(self):
        batch = small_batch()
        batch = replace(batch, old_logps=batch.logps - 30.0 * batch.mask.double())  # beyond the limit of 20
        result = evaluate(ROWS["gpg@verl-0.9.1"], batch)
        self.assertEqual(result.clipped_branch_fraction, 0.0)
        self.assert_gradient_is_that_of_autograd(ROWS["gpg@verl-0.9.1"], batch)

    def test_every_combination(self):
        batch = replace(small_batch(), accumulation_steps=3, window_tokens=31.0, window_rows=5.0)
        rows = combinations_of_choices()
        self.assertGreater(len(rows), 100)
        for row in rows:
            self.assert_gradient_is_that_of_autograd(row, batch)

    def test_finite_differences(self):
        """(L(l + h) - L(l - h)) / 2h for rows without a stop-gradient; the small batch stands on no kink."""
        batch, h = small_batch(), 1e-6
        # V1 restarts its statistics nowhere: advantages come from old quantities, so moving l moves the loss alone.
        for name in (
            "ppo",
            "dual_clip",
            "grpo",
            "dr_grpo",
            "dapo",
            "gspo",
            "sapo",
            "reinforce",
            "rloo",
            "reinforce_pp",
            "reinforce_pp_baseline",
            "grpo@trl-1.16.0",
            "luspo@trl-1.16.0",
            "rloo@trl-1.16.0",
            "geo_mean@verl-0.9.1",
        ):
            row = ROWS[name]
            analytic = evaluate(row, batch).dloss_dlogps
            for i, t in ((0, 1), (1, 1), (1, 4), (3, 2), (4, 0), (5, 1)):
                shift = torch.zeros_like(batch.logps)
                shift[i, t] = h
                up, down = (evaluate(row, replace(batch, logps=batch.logps + sign * shift)).loss for sign in (1, -1))
                self.assertAlmostEqual(((up - down) / (2 * h)).item(), analytic[i, t].item(), 8, (name, i, t))

    def test_exact_kl(self):
        """grpo@lab: through the logits, dloss_dlogits and dloss_dlogps together are the gradient of the whole loss."""
        batch, ids = objectives_report.small_batch()
        logits = batch.logits.clone().requires_grad_()
        logps = rl_lab.action_logps(logits, ids)
        row = ROWS["grpo@lab"]
        result = evaluate(row, replace(batch, logps=logps.detach() * batch.mask))
        objectives.loss_to_backpropagate(result, logps, logits=logits).backward()
        other = batch.logits.clone().requires_grad_()
        other_logps = rl_lab.action_logps(other, ids)
        losses = rl_lab.clipped_policy_loss(other_logps, batch.old_logps, result.advantages)
        losses = losses + 0.02 * rl_lab.categorical_kl(other, batch.ref_logits)
        per_answer = (losses * batch.mask).sum(dim=1) / batch.lengths
        per_answer.mean().backward()
        used = batch.mask.unsqueeze(2)
        torch.testing.assert_close(logits.grad * used, other.grad * used, rtol=1e-10, atol=1e-13)
        self.assertAlmostEqual(result.loss.item(), per_answer.mean().item(), 12)

    def test_a_broken_twin_is_seen(self):
        """What the comparison is worth: one token's gradient off by one part in a million is caught."""
        row = ROWS["grpo"]
        with mock.patch.object(
            objectives, "kl_estimate", lambda *a, real=objectives.kl_estimate: (real(*a)[0], real(*a)[1] * (1 + 1e-6))
        ):
            with self.assertRaises(AssertionError):
                self.assert_gradient_is_that_of_autograd(row)
        flipped = dict(
            objectives.SURROGATES,
            clip=lambda row, r, A, l, l0: objectives.bounded(r, A, 1 + row.clip_low, 1 - row.clip_high, math.inf),
        )
        with mock.patch.object(objectives, "SURROGATES", flipped), self.assertRaises(AssertionError):
            self.assert_gradient_is_that_of_autograd(ROWS["dapo"])  # clip_low and clip_high exchanged

    def test_loss_for_a_training_loop(self):
        """Value and gradient; NaN in unused slots; the critic's and the entropy's gradient; a missing tensor is an error."""
        batch = small_batch()
        row = replace(ROWS["ppo"], entropy_coef=0.1)
        result = evaluate(row, batch)
        made = {}
        for name in ("logps", "vpreds", "entropies"):
            made[name] = torch.where(batch.mask, getattr(batch, name), math.nan).requires_grad_()
        loss = objectives.loss_to_backpropagate(result, **made)
        self.assertAlmostEqual(loss.item(), result.loss.item(), 12)
        loss.backward()
        for name, tensor in made.items():
            torch.testing.assert_close(tensor.grad, getattr(result, f"dloss_d{name}"))
        with self.assertRaisesRegex(ValueError, "vpreds is missing"):
            objectives.loss_to_backpropagate(result, made["logps"])
        with self.assertRaisesRegex(ValueError, "logps: got shape"):
            objectives.loss_to_backpropagate(result, made["logps"][:2], vpreds=made["vpreds"], entropies=made["entropies"])
        with self.assertRaisesRegex(ValueError, "logps: got shape"):  # as many numbers in another order
            rows, width = batch.logps.shape
            other = {"vpreds": made["vpreds"], "entropies": made["entropies"]}
            objectives.loss_to_backpropagate(result, made["logps"].reshape(rows, width // 2, 2), **other)

    def test_nothing_is_learned_from_constants(self):
        """No gradient reaches rewards, old or reference log-probabilities: make_batch detaches, evaluate builds no graph."""
        batch = small_batch()
        arrays = {
            name: getattr(batch, name).clone().requires_grad_() for name in ("logps", "old_logps", "ref_logps", "rewards")
        }
        result = evaluate(ROWS["grpo"], make_batch(**arrays, mask=batch.mask, group_ids=batch.group_ids))
        self.assertFalse(result.loss.requires_grad or result.dloss_dlogps.requires_grad or result.advantages.requires_grad)


class Advantages(unittest.TestCase):
    REWARDS, GROUPS, LENGTHS = [1.0, 0.0, 0.3, 0.2, -0.5, 1.0, 0.7], [7, 2, 7, 2, 2, 7, 7], [2, 6, 4, 3, 5, 2, 1]

    def batch(self, rewards=None, groups=None, **more) -> objectives.Batch:
        lengths = torch.tensor(self.LENGTHS)
        rewards = torch.tensor(self.REWARDS if rewards is None else rewards, dtype=torch.float64)
        groups = self.GROUPS if groups is None else groups
        lengths = lengths[: len(rewards)]
        mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
        return make_batch(
            logps=-torch.ones(mask.shape, dtype=torch.float64), mask=mask, rewards=rewards, group_ids=groups, **more
        )

    def of(self, row: objectives.Row, **more) -> list[float]:
        return objectives.compute_advantages(row, self.batch(**more))[:, 0].tolist()

    def assert_all_close(self, got, wanted, places=12):
        self.assertEqual(len(got), len(wanted))
        for x, y in zip(got, wanted):
            self.assertAlmostEqual(x, y, places)

    def test_against_the_statistics_module(self):
        """Groups of 4 and 3, interleaved; every baseline, scale, divisor and guard."""
        base = replace(ROWS["grpo"], kl="none")
        batch = self.batch()
        baselines = ("none", *objectives.GROUP_BASELINES)
        scales = ("none", "group_std", "batch_std_of_raw_rewards", "batch_std")
        for baseline, scale, ddof in itertools.product(baselines, scales, (0, 1)):
            for guard in objectives.CHOICES["std_guard"] if scale != "none" else ("add",):
                if (baseline, scale) == ("none", "group_std"):
                    continue  # refused, see test_rows_that_make_no_sense
                # 0.3 is above the smallest and below the largest std and variance here, so that both floors act somewhere.
                row = replace(base, baseline=baseline, scale=scale, std_ddof=ddof, std_guard=guard, std_eps=0.3)
                wanted = slow_advantages(row, self.REWARDS, self.GROUPS, self.LENGTHS)
                self.assert_all_close(objectives.compute_advantages(row, batch)[:, 0].tolist(), wanted)

    def test_grpo_is_the_atom(self):
        rewards = [1.0, 0.0, 0.5, 0.2, 0.0, 1.0]
        wanted = rl_lab.group_advantages(torch.tensor(rewards, dtype=torch.float64).view(2, 3)).flatten().tolist()
        self.assert_all_close(
            self.of(ROWS["dr_grpo"], rewards=rewards, groups=[0, 0, 0, 1, 1, 1]), [0.5, -0.5, 0, -0.2, -0.4, 0.6]
        )  # means 0.5 and 0.4
        self.assert_all_close(self.of(replace(ROWS["grpo"], kl="none"), rewards=rewards, groups=[0, 0, 0, 1, 1, 1]), wanted)

    def test_a_group_without_spread_gets_zero(self):
        """Also where rounding leaves a few ulps, also without a guard; a KL in the loss still has a gradient."""
        rewards = [0.1 + 0.2, 0.3, 0.1 + 0.2]
        row = replace(ROWS["grpo"], std_eps=0.0, kl="none")
        self.assertEqual(self.of(row, rewards=rewards, groups=[0, 0, 0]), [0.0, 0.0, 0.0])
        batch = self.batch(rewards=rewards, groups=[0, 0, 0])
        batch = replace(batch, ref_logps=batch.logps - 0.5 * batch.mask.double())
        result = evaluate(ROWS["grpo"], batch)
        self.assertEqual(result.policy_loss.item(), 0.0)
        self.assertGreater(result.dloss_dlogps.norm().item(), 0.0)
        self.assertEqual(result.zero_gradient_fraction, 1.0)  # of the policy term
        self.assertEqual(result.clipped_branch_fraction, 0.0)

    def test_groups_of_one(self):
        """verl: 2.0 stays 2.0, over 1 + 1e-6 where it is scaled (1.999998); rloo_vectorized: 0; elsewhere refused."""
        rewards, groups = [2.0, 1.0, 0.0], [5, 6, 6]
        self.assertAlmostEqual(self.of(ROWS["grpo@verl-0.9.1"], rewards=rewards, groups=groups)[0], 2 / (1 + 1e-6), 12)
        self.assertEqual(self.of(ROWS["rloo@verl-0.9.1"], rewards=rewards, groups=groups)[0], 2.0)
        self.assertEqual(self.of(ROWS["rloo_vectorized@verl-0.9.1"], rewards=rewards, groups=groups)[0], 0.0)
        with self.assertRaisesRegex(ValueError, "row 0 is alone in its group"):
            self.of(replace(ROWS["grpo"], kl="none"), rewards=rewards, groups=groups)

    def test_missing_rewards(self):
        """A NaN row takes no part in mean and std, and gets 0; without the choice it is refused with its row."""
        row = replace(ROWS["grpo"], kl="none", missing_reward="exclude", scale="none")
        got = self.of(row, rewards=[1.0, math.nan, 0.0, 4.0], groups=[0, 0, 0, 0])
        self.assert_all_close(got, [1 - 5 / 3, 0.0, -5 / 3, 4 - 5 / 3])
        with self.assertRaisesRegex(ValueError, "got nan at row 1"):
            self.of(replace(row, missing_reward="refuse"), rewards=[1.0, math.nan, 0.0, 4.0], groups=[0, 0, 0, 0])
        with self.assertRaisesRegex(ValueError, "got inf at row 2"):
            self.of(row, rewards=[1.0, 2.0, math.inf, 4.0], groups=[0, 0, 0, 0])
        with self.subTest("the group filter looks at the rewards that are there"):
            row = replace(row, group_filter="spread")
            rewards, groups = [1.0, math.nan, 1.0, 4.0, 2.0, math.nan, math.nan], [0, 0, 0, 1, 1, 2, 2]
            kept = objectives.kept_rows(row, self.batch(rewards, groups)).tolist()
            self.assertEqual(kept, [False, False, False, True, True, False, False])
            self.assert_all_close(self.of(row, rewards=rewards, groups=groups)[3:5], [1.0, -1.0])

    def test_reinforce_pp_counts_tokens_or_answers(self):
        """A' = +-0.5, lengths 1 and 3. Over tokens: mean (0.5 - 1.5)/4 = -0.25, var (0.75^2 + 3 * 0.25^2)/3 = 0.25, so
        0.75/0.5 = 1.5 and -0.25/0.5 = -0.5. Over answers (population): 0.5/0.5 = +-1."""
        mask = torch.tensor([[True, False, False], [True, True, True]])
        batch = make_batch(
            logps=-torch.ones(2, 3, dtype=torch.float64), mask=mask, rewards=np.array([1.0, 0.0]), group_ids=[0, 0]
        )
        by_token = objectives.compute_advantages(ROWS["reinforce_pp_baseline@verl-0.9.1"], batch)[:, 0].tolist()
        self.assert_all_close(by_token, [1.5, -0.5], 6)
        by_answer = objectives.compute_advantages(ROWS["reinforce_pp_baseline"], batch)[:, 0].tolist()
        self.assert_all_close(by_answer, [1.0, -1.0], 6)

    def test_kl_in_the_reward(self):
        """RLOO: R - 0.05 * sum_t(l0 - lr); REINFORCE++: each token carries its own KL. l0 - lr = 0.4 on every token."""
        batch = self.batch(rewards=[1.0, 0.0], groups=[0, 0])
        batch = replace(batch, old_logps=batch.logps, ref_logps=batch.logps - 0.4 * batch.mask.double())
        # lengths 2 and 6: 1 - 0.05 * 0.8 = 0.96 and -0.05 * 2.4 = -0.12; difference 1.08
        self.assert_all_close(objectives.compute_advantages(ROWS["rloo"], batch)[:, 0].tolist(), [1.08, -1.08])
        row = replace(ROWS["reinforce_pp"], scale="none", kl_coef=0.05)
        # to go: 1 - 0.05 * 0.4 * 2 = 0.96, then 0.98
        self.assert_all_close(objectives.compute_advantages(row, batch)[0, :2].tolist(), [0.96, 0.98])

    def test_reward_to_go_and_greedy_baseline(self):
        """gamma 0.5, rewards 1, 0, 2: 1 + 0 + 0.25 * 2 = 1.5, then 1, then 2; less the greedy 0.5. A hole is skipped."""
        mask = torch.tensor([[True, True, False, True]])
        batch = make_batch(
            logps=-torch.ones(1, 4, dtype=torch.float64),
            mask=mask,
            reward_baselines=np.array([0.5]),
            token_level_rewards=np.array([[1.0, 0.0, math.nan, 2.0]]),
        )
        row = replace(ROWS["remax"], gamma=0.5)
        self.assert_all_close(objectives.compute_advantages(row, batch)[0].tolist(), [1.0, 0.5, 0.0, 1.5])

    def test_gae_is_the_atom_and_skips_holes(self):
        """Reward 1 on the last token, V = 0.2, 0.4, 0.6, gamma = lam = 1: A = 1 - V. A hole in the mask changes nothing."""
        mask = torch.tensor([[True, False, True, True]])
        values = np.array([[0.2, math.nan, 0.4, 0.6]])
        batch = make_batch(logps=-torch.ones(1, 4, dtype=torch.float64), mask=mask, rewards=np.array([1.0]), values=values)
        row = replace(ROWS["ppo"], lam=1.0)
        self.assert_all_close(objectives.compute_advantages(row, batch)[0].tolist(), [0.8, 0.0, 0.6, 0.4])
        wanted = rl_lab.gae(
            *(torch.tensor(x, dtype=torch.float64) for x in ([0.0, 0, 1], [0.2, 0.4, 0.6], [0.4, 0.6, 0])),
            *[torch.tensor([False, False, True])] * 2,
            0.9,
            0.8,
        )[0]
        got = objectives.compute_advantages(replace(row, gamma=0.9, lam=0.8), batch)[0][mask[0]]
        self.assert_all_close(got.tolist(), wanted.tolist())

    def test_overlong_penalty(self):
        """Lmax 10, Lc 4: 0 up to 6; (6 - 8)/4 = -0.5; -1 from 10 on; and it reaches the reward of the row's answer."""
        penalty = objectives.soft_overlong_penalty(torch.tensor([1, 6, 8, 10, 12]), 10, 4)
        self.assertEqual(penalty.tolist(), [0.0, 0.0, -0.5, -1.0, -1.0])
        row = replace(ROWS["dr_grpo"], overlong="soft", overlong_max=6, overlong_cache=4)
        # lengths 2 and 6: penalties 0 and -1; rewards 0 and 0 become 0 and -1, centred +-0.5
        self.assert_all_close(self.of(row, rewards=[0.0, 0.0], groups=[0, 0]), [0.5, -0.5])

    def test_group_filter(self):
        """A group without spread leaves every denominator: the loss is that of the batch without it."""
        row = replace(ROWS["dapo"], overlong="none")
        rewards = [1.0, 0.0, 0.5, 0.5, 1.0, 0.0]
        whole = replace(self.batch(rewards=rewards, groups=[0, 0, 1, 1, 2, 2]), accumulation_steps=1)
        whole = replace(whole, old_logps=whole.logps - 0.1 * whole.mask.double())
        part = replace(self.batch(rewards=rewards[:2], groups=[0, 0]))
        for reduction in ("mean_per_response", "mean_over_tokens", "sum_per_response"):
            result = evaluate(replace(row, reduction=reduction), whole)
            rest = torch.tensor([0, 1, 4, 5])
            without = make_batch(
                logps=whole.logps[rest],
                old_logps=whole.old_logps[rest],
                mask=whole.mask[rest],
                rewards=whole.rewards[rest],
                group_ids=whole.group_ids[rest],
            )
            wanted = evaluate(replace(row, reduction=reduction), without)
            self.assertAlmostEqual(result.loss.item(), wanted.loss.item(), 14)
            torch.testing.assert_close(result.dloss_dlogps[rest], wanted.dloss_dlogps)
            self.assertFalse(result.dloss_dlogps[2:4].any())
        self.assertEqual(result.kept.tolist(), [True, True, False, False, True, True])
        self.assertIsNotNone(part)
        with self.assertRaisesRegex(ValueError, "leaves nothing"):
            evaluate(row, self.batch(rewards=[1.0, 1.0], groups=[0, 0]))
        with self.subTest("nor does it count in the batch's mean and std"):
            # [2, 1] alone: A = +-0.5; std of A 0.5, of R 0.5. With [1, 1] beside it the stds would be smaller.
            for scale, wanted in (("batch_std", 1.0), ("batch_std_of_raw_rewards", 1.0)):
                scaled = replace(row, scale=scale, std_eps=0.0)
                got = self.of(scaled, rewards=[1.0, 1.0, 2.0, 1.0], groups=[0, 0, 1, 1])
                self.assert_all_close(got[2:], [wanted, -wanted])

    def test_a_micro_batch_uses_its_generation_batch(self):
        """Advantages of the four generated answers, of which rows 3 and 0 are here: (0 - 0.5), (1 - 0.5)."""
        batch = self.batch(
            rewards=[0.0, 1.0],
            groups=[0, 0],
            gen_rewards=np.array([1.0, 0.0, 1.0, 0.0]),
            gen_group_ids=[4, 4, 4, 4],
            row_ids=[3, 0],
        )
        self.assert_all_close(objectives.compute_advantages(ROWS["dr_grpo"], batch)[:, 0].tolist(), [-0.5, 0.5])
        with self.subTest("rewards per token are those of the rows that are here, too"):
            batch = replace(batch, gen_rewards=torch.tensor([1.0, 9.0, 9.0, 3.0], dtype=torch.float64))
            rows = (ROWS["remax"], replace(ROWS["reinforce_pp"], scale="none", kl="none"), replace(ROWS["ppo"], lam=1.0))
            batch = replace(batch, reward_baselines=torch.zeros(2).double(), values=torch.zeros_like(batch.logps))
            for row in rows:  # without a critic, at gamma 1, every token's reward to go is the answer's
                self.assert_all_close(objectives.compute_advantages(row, batch)[:, 0].tolist(), [3.0, 1.0])


class SurrogatesAndKl(unittest.TestCase):
    def bandit(self, row: objectives.Row, ratios, advantages) -> objectives.Evaluation:
        """One token an answer, weight 1 each, at these ratios."""
        logps = torch.tensor(ratios, dtype=torch.float64).log()
        row = replace(
            row,
            baseline="given",
            scale="none",
            kl="none",
            kl_coef=0.0,
            group_filter="none",
            overlong="none",
            reduction="sum_over_tokens",
            value_loss="none",
        )
        return evaluate(
            row, make_batch(logps=logps - 1, old_logps=torch.full_like(logps, -1.0), advantages=np.array(advantages))
        )

    def test_clip_and_its_three_fractions(self):
        """r = 1.5, .5, 1.5, .5; A = 1, -1, -1, 1: J = 1.2, -.8, -1.5, .5, gradient 0, 0, 1.5, -.5. All four ratios are
        outside, two took the clipped branch. With A = 0 added: the gradient is 0 without any clip."""
        result = self.bandit(ROWS["grpo"], [1.5, 0.5, 1.5, 0.5, 1.0], [1.0, -1, -1, 1, 0])
        torch.testing.assert_close(-result.token_losses[:4, 0], torch.tensor([1.2, -0.8, -1.5, 0.5], dtype=torch.float64))
        torch.testing.assert_close(result.dloss_dlogps[:, 0], torch.tensor([0, 0, 1.5, -0.5, 0], dtype=torch.float64))
        self.assertEqual(result.flat[:, 0].tolist(), [True, True, False, False, False])
        fractions = result.ratio_outside_fraction, result.clipped_branch_fraction, result.zero_gradient_fraction
        self.assertEqual(fractions, (0.8, 0.4, 0.6))

    def test_cispo_clips_without_losing_a_gradient(self):
        """Weights clip(r) = 1.2 and 0.8 and 1: gradient -w A; two clipped branches, no zero gradient, nothing flat."""
        row = replace(ROWS["cispo"], clip_low=0.2, clip_high=0.2)
        result = self.bandit(row, [1.5, 0.5, 1.1], [1.0, -1, 1])
        torch.testing.assert_close(result.dloss_dlogps[:, 0], torch.tensor([-1.2, 0.8, -1.1], dtype=torch.float64))
        self.assertAlmostEqual(result.clipped_branch_fraction, 2 / 3)
        self.assertEqual((result.zero_gradient_fraction, int(result.flat.sum())), (0.0, 0))

    def test_cispo_of_trl_left_at_its_default(self):
        """epsilon_high = 0.2 without 1 +: every on-policy weight is 0.2, the gradient a fifth of dapo's."""
        batch = make_batch(
            logps=np.full((2, 2), -1.0), mask=np.ones((2, 2), dtype=bool), rewards=np.array([1.0, 0.0]), group_ids=[0, 0]
        )
        fifth = evaluate(ROWS["cispo@trl-1.16.0"], batch).dloss_dlogps
        torch.testing.assert_close(fifth * 5, evaluate(ROWS["dapo@trl-1.16.0"], batch).dloss_dlogps)

    def test_dual_clip(self):
        """r = 1, 5; A = 1, -1; c = 3: losses -1 and 3; flat beyond c. TRL's delta is the same while delta > 1 + high, and a
        smaller one lowers the top of A > 0."""
        result = self.bandit(ROWS["dual_clip"], [1.0, 5.0], [1.0, -1.0])
        self.assertEqual(result.token_losses[:, 0].tolist(), [-1.0, 3.0])
        self.assertEqual(result.dloss_dlogps[:, 0].tolist(), [-1.0, 0.0])
        ratios, advantages = [0.3, 0.9, 1.25, 2.0, 5.0] * 2, [1.0] * 5 + [-1.0] * 5
        dual, capped = (
            self.bandit(replace(ROWS["grpo"], surrogate=name), ratios, advantages) for name in ("dual_clip", "capped_clip")
        )
        torch.testing.assert_close(dual.dloss_dlogps, capped.dloss_dlogps)
        below = self.bandit(replace(ROWS["grpo"], surrogate="capped_clip", ratio_cap=1.1), [1.15, 1.15], [1.0, -1.0])
        torch.testing.assert_close(below.token_losses[:, 0], torch.tensor([-1.1, 1.15], dtype=torch.float64))
        wide = self.bandit(replace(ROWS["grpo"], surrogate="dual_clip", ratio_cap=1e9), ratios, advantages)
        torch.testing.assert_close(wide.dloss_dlogps, self.bandit(ROWS["grpo"], ratios, advantages).dloss_dlogps)

    def test_clip_higher(self):
        """low 0.2, high 0.28; r = 1.25 with A = 1 and r = 0.75 with A = -1: losses -1.25 and 0.8; exchanged: -1.2, 0.75."""
        result = self.bandit(ROWS["dapo"], [1.25, 0.75], [1.0, -1.0])
        torch.testing.assert_close(result.token_losses[:, 0], torch.tensor([-1.25, 0.8], dtype=torch.float64))

    def test_sapo(self):
        """At r = 1: value 2 / tau (2 and 1.90476), slope A. Beyond: 4 p (1 - p) r A, never 0."""
        result = self.bandit(ROWS["sapo"], [1.0, 1.0, 3.0], [1.0, -1.0, 1.0])
        p = 1 / (1 + math.exp(-2.0))
        wanted = torch.tensor([-2.0, 2 / 1.05, -4 * p], dtype=torch.float64)
        torch.testing.assert_close(result.token_losses[:, 0], wanted)
        torch.testing.assert_close(
            result.dloss_dlogps[:, 0], torch.tensor([-1.0, 1.0, -4 * p * (1 - p) * 3], dtype=torch.float64)
        )

    def test_gspo_forms_agree_while_the_advantage_is_one_per_answer(self):
        batch = small_batch()
        for low, high in ((3e-4, 4e-4), (0.2, 0.2), (5.0, 5.0)):
            first, second = (
                evaluate(replace(ROWS[name], clip_low=low, clip_high=high), batch) for name in ("gspo", "gspo_token")
            )
            self.assertAlmostEqual(first.loss.item(), second.loss.item(), 13)
            torch.testing.assert_close(first.dloss_dlogps, second.dloss_dlogps)
        given = {"baseline": "given", "scale": "none", "clip_low": 5.0, "clip_high": 5.0}
        first, second = (evaluate(replace(ROWS[name], **given), batch) for name in ("gspo", "gspo_token"))
        self.assertGreater((first.dloss_dlogps - second.dloss_dlogps).abs().max().item(), 1e-4)

    def test_ratio_levels(self):
        """Token ratios 2, 0.5, 1.5: geometric mean 1.5^(1/3), product 1.5."""
        batch = make_batch(
            logps=np.log([[2.0, 0.5, 1.5]]) - 2,
            old_logps=np.full((1, 3), -2.0),
            mask=np.ones((1, 3), dtype=bool),
            advantages=np.array([1.0]),
        )
        row = replace(ROWS["gspo"], baseline="given", scale="none")
        self.assertAlmostEqual(evaluate(row, batch).ratios[0, 1].item(), 1.5 ** (1 / 3), 12)
        self.assertAlmostEqual(evaluate(replace(row, ratio="sequence_product"), batch).ratios[0, 1].item(), 1.5, 12)

    def test_without_old_logps_it_is_a_first_pass(self):
        batch = replace(small_batch(), old_logps=None)
        result = evaluate(ROWS["grpo@trl-1.16.0"], batch)
        self.assertTrue((result.ratios[batch.mask] == 1).all())
        self.assertAlmostEqual(result.loss.item(), 0.0, 12)  # centred advantages, each answer one share
        self.assertGreater(result.dloss_dlogps.norm().item(), 0.1)

    def test_kl_estimators_in_value_and_gradient(self):
        """Exact expectations over 5 actions sampled from the policy, samples held fixed. Value: k1 and k3 give
        KL(pi || ref). Gradient: k1 gives 0, k2 that of KL(pi || ref), k3 that of KL(ref || pi). With the weight ratio,
        k1 and k3 give that of KL(pi || ref)."""
        z = torch.tensor([0.3, -0.4, 0.8, 0.1, -1.0], dtype=torch.float64).requires_grad_()
        ref = torch.tensor([0.5, 0.2, -0.3, -0.1, 0.4], dtype=torch.float64)
        forward, backward = rl_lab.categorical_kl(z, ref), None
        (to_reference,) = torch.autograd.grad(forward, z)
        q, p = ref.softmax(0), z.softmax(0).detach()
        backward = (q * (ref.log_softmax(0) - z.log_softmax(0))).sum()
        (from_reference,) = torch.autograd.grad(backward, z)
        jacobian = torch.eye(5, dtype=torch.float64) - p  # d log p_a / d z_b, rows a

        def expected(kl: str, weight: str = "none") -> tuple[float, torch.Tensor]:
            row = replace(
                ROWS["grpo"],
                baseline="given",
                scale="none",
                kl=kl,
                kl_coef=1.0,
                kl_weight=weight,
                reduction="sum_over_tokens",
            )
            batch = make_batch(logps=p.log(), ref_logps=ref.log_softmax(0), advantages=torch.zeros(5, dtype=torch.float64))
            result = evaluate(row, batch)
            return (p * result.kl[:, 0]).sum().item(), (p * result.dloss_dlogps[:, 0]) @ jacobian

        for kl in ("k1", "k3"):
            self.assertAlmostEqual(expected(kl)[0], forward.item(), 12)
        self.assertNotAlmostEqual(expected("k2")[0], forward.item(), 2)
        for kl, weight, gradient in (
            ("k1", "none", 0 * to_reference),
            ("k2", "none", to_reference),
            ("k3", "none", from_reference),
            ("k1", "ratio", to_reference),
            ("k3", "ratio", to_reference),
        ):
            torch.testing.assert_close(expected(kl, weight)[1], gradient, rtol=1e-10, atol=1e-12, msg=f"{kl} {weight}")

    def test_limits_of_the_kl(self):
        """verl: logarithm cut at 20, value at 10, both without gradient beyond; d = -3: e^3 - 4 = 16.1 is cut to 10."""
        row = ROWS["grpo_kl@verl-0.9.1"]
        kl, slope = objectives.kl_estimate(row, torch.tensor([-3.0, -1.0, -50.0]), torch.zeros(3))
        torch.testing.assert_close(kl, torch.tensor([10.0, math.e - 2, 10.0]))
        torch.testing.assert_close(slope, torch.tensor([0.0, 1 - math.e, 0.0]))

    def test_extremes_stay_finite(self):
        """A ratio that would overflow: the clip is flat, its gradient 0 and not NaN."""
        result = self.bandit(ROWS["grpo"], [1.0, 1.0], [1.0, 1.0])
        far = evaluate(
            replace(ROWS["bnpo"], baseline="given", scale="none"),
            make_batch(logps=np.array([0.0, -1e4]), old_logps=np.array([-1e4, 0.0]), advantages=np.array([1.0, -1.0])),
        )
        self.assertTrue(far.dloss_dlogps.isfinite().all() and far.loss.isfinite())
        self.assertEqual(far.flat[:, 0].tolist(), [True, True])
        self.assertEqual(result.dloss_dlogps[:, 0].tolist(), [-1.0, -1.0])


class Reductions(unittest.TestCase):
    def test_the_guides_case(self):
        """A = +1, -1; 2 and 3 tokens; ratio 1; losses -2/2 and 3/3: 0; (-2 + 3)/5 = 0.2; (-2 + 3)/2 = 0.5; /3 = 1/6; 1."""
        batch = make_batch(
            logps=np.full((2, 3), -1.0),
            mask=np.array([[1, 1, 0], [1, 1, 1]]) != 0,
            advantages=np.array([1.0, -1.0]),
            budget=3,
        )
        row = replace(ROWS["bnpo"], baseline="given", scale="none")
        for reduction, wanted in (
            ("mean_per_response", 0.0),
            ("mean_over_tokens", 0.2),
            ("mean_over_window", 0.2),
            ("sum_per_response", 0.5),
            ("sum_over_budget", 1 / 6),
            ("sum_over_width", 1 / 6),
            ("sum_over_tokens", 1.0),
        ):
            self.assertAlmostEqual(evaluate(replace(row, reduction=reduction), batch).loss.item(), wanted, 14, reduction)

    def test_one_token_answers_make_all_means_equal(self):
        batch = make_batch(
            logps=np.log([0.6, 0.3, 0.9]), old_logps=np.log([0.5, 0.5, 0.5]), advantages=np.array([1.0, -2.0, 0.5])
        )
        row = replace(ROWS["bnpo"], baseline="given", scale="none")
        means = ("mean_per_response", "mean_over_tokens", "mean_over_window", "sum_per_response", "sum_over_width")
        losses = {round(evaluate(replace(row, reduction=name), batch).loss.item(), 14) for name in means}
        self.assertEqual(len(losses), 1)

    def test_micro_batches_of_a_window_add_up(self):
        """TRL dapo: two micro-batches, each over the window's tokens, sum to the loss of the whole; bnpo's do not."""
        whole = small_batch()
        result = evaluate(ROWS["dapo@trl-1.16.0"], whole)

        def parts(name: str) -> float:
            total = 0.0
            for rows in (torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5])):
                part = make_batch(
                    **{n: getattr(whole, n)[rows] for n in ("logps", "old_logps", "mask", "rewards", "group_ids")},
                    num_items_in_batch=22,
                    accumulation_steps=2,
                    steps_per_generation=2,
                )
                total += evaluate(ROWS[name], part).loss.item()
            return total

        self.assertAlmostEqual(parts("dapo@trl-1.16.0"), result.loss.item(), 13)
        self.assertGreater(abs(parts("bnpo@trl-1.16.0") - result.loss.item()), 1e-3)

    def test_a_row_without_tokens(self):
        """TRL counts it in B, verl does not: 1/2 or 1 of the loss of the other row."""
        batch = make_batch(
            logps=np.full((2, 2), -1.0),
            mask=np.array([[True, True], [False, False]]),
            advantages=np.array([1.0, 1.0]),
            allow_empty_rows=True,
        )
        row = replace(ROWS["grpo"], baseline="given", scale="none", kl="none")
        self.assertEqual(evaluate(row, batch).loss.item(), -0.5)
        self.assertEqual(evaluate(replace(row, rows_counted="nonempty"), batch).loss.item(), -1.0)
        with self.subTest("and where a filter leaves only rows without tokens, it is said"):
            batch = make_batch(
                logps=np.full((4, 1), -1.0),
                mask=np.array([[True], [True], [False], [False]]),
                rewards=np.array([1.0, 1.0, 1.0, 0.0]),
                group_ids=[0, 0, 1, 1],
                allow_empty_rows=True,
            )
            with self.assertRaisesRegex(ValueError, "'mean_over_tokens' divides by 0: no row that is left"):
                evaluate(replace(ROWS["dapo"], overlong="none"), batch)

    def test_no_budget(self):
        batch = replace(small_batch(), budget=None)
        with self.assertRaisesRegex(ValueError, "no budget"):
            evaluate(ROWS["dr_grpo@trl-1.16.0"], batch)


class BadInput(unittest.TestCase):
    def setUp(self):
        self.arrays = {
            "logps": np.full((2, 3), -1.0),
            "mask": np.array([[True, True, False], [True, True, True]]),
            "old_logps": np.full((2, 3), -1.2),
            "rewards": np.array([1.0, 0.0]),
            "group_ids": np.array([0, 0]),
        }

    def test_unused_slots_change_nothing(self):
        """NaN and -inf outside the mask: same loss and gradient, and 0 there, for every row of the table."""
        clean = small_batch()
        spoiled = {}
        for number, name in enumerate(("logps", "old_logps", "ref_logps", "values", "vpreds", "entropies", "advantages")):
            spoiled[name] = torch.where(clean.mask, getattr(clean, name), (math.nan, -math.inf, math.inf)[number % 3])
        for name in ("logits", "ref_logits"):
            spoiled[name] = torch.where(clean.mask.unsqueeze(2), getattr(clean, name), math.nan)
        same = ("mask", "rewards", "group_ids", "reward_baselines", "rewards_per_func", "reward_weights", "budget")
        dirty = make_batch(**spoiled, **{name: getattr(clean, name) for name in same})
        for name, row in ROWS.items():
            one, two = evaluate(row, clean), evaluate(row, dirty)
            self.assertEqual(one.loss.item(), two.loss.item(), name)
            self.assertTrue(torch.equal(one.dloss_dlogps, two.dloss_dlogps), name)
            self.assertFalse(two.dloss_dlogps[~clean.mask].any(), name)

    def test_non_finite_in_a_used_slot(self):
        for name in ("logps", "old_logps"):
            self.arrays[name][1, 2] = math.nan
            with self.assertRaisesRegex(ValueError, f"{name}: got nan at row 1, position 2"):
                make_batch(**self.arrays)
            self.arrays[name][1, 2] = -1.0

    def test_shapes_dtypes_and_names(self):
        for wrong, error, message in (
            ({"old_logps": np.zeros((2, 1))}, ValueError, r"old_logps: got shape \(2, 1\), wanted \(2, 3\)"),
            ({"mask": np.ones((2, 3))}, TypeError, "mask: got dtype torch.float64, wanted bool"),
            ({"mask": None}, ValueError, "mask: missing"),
            ({"mask": np.array([[True, True, True], [False, False, False]])}, ValueError, "row 1 has no counted token"),
            ({"rewards": np.zeros((2, 1))}, ValueError, r"rewards: got shape \(2, 1\)"),
            ({"group_ids": np.array([0.0, 0.0])}, TypeError, "group_ids: got dtype torch.float64"),
            ({"old_logp": np.zeros((2, 3))}, TypeError, "did you mean 'old_logps'"),
            ({"logps": np.zeros((2, 3), dtype=int)}, TypeError, "logps: got dtype torch.int64"),
            ({"advantages": np.zeros(3)}, ValueError, r"advantages: got shape \(3,\)"),
            ({"accumulation_steps": 0}, ValueError, "accumulation_steps: got 0"),
            ({"row_ids": [0, 1]}, ValueError, "belong together"),
            ({"row_ids": [0, 9], "gen_rewards": np.zeros(4)}, ValueError, "row_ids: got numbers from 0 to 9"),
            ({"accumulation_steps": 2.7}, ValueError, "accumulation_steps: got 2.7, wanted a whole number"),
            ({"budget": math.inf}, ValueError, "budget: got inf"),
            ({"old_logps": np.ones((2, 3), dtype=bool)}, TypeError, "old_logps: got dtype torch.bool"),
            ({"reward_baselines": np.array([0.0, math.nan])}, ValueError, "reward_baselines: row 1 is not finite"),
            ({"logits": np.full((2, 3, 4), math.nan)}, ValueError, "logits: got NaN or inf"),
            ({"rewards_per_func": np.zeros((2, 2))}, ValueError, "with reward_weights None"),
            ({"rewards_per_func": np.zeros((7, 2)), "reward_weights": np.ones(2)}, ValueError, r"wanted \(2, F\)"),
            (
                {"gen_rewards_per_func": np.zeros((4, 2)), "gen_rewards": np.zeros(4), "row_ids": [0, 1]},
                ValueError,
                r"gen_rewards_per_func: got \(4, 2\) with reward_weights None",
            ),
        ):
            with self.subTest(wrong=wrong), self.assertRaisesRegex(error, message):
                make_batch(**(self.arrays | wrong))

    def test_a_forbidden_token_may_have_a_logit_of_minus_infinity(self):
        logits = np.zeros((2, 3, 4))
        logits[:, :, 1] = -math.inf
        kept = make_batch(**self.arrays, logits=logits).logits
        self.assertEqual(kept[:, :, 1].isinf().tolist(), self.arrays["mask"].tolist())

    def test_a_batch_that_lacks_what_the_row_reads(self):
        batch = make_batch(**self.arrays)
        for name, missing in (
            ("grpo", "ref_logps"),
            ("remax", "reward_baselines"),
            ("ppo", "values"),
            ("grpo@lab", "logits"),
            ("ppo@sb3-2.9.2", "advantages"),
        ):
            with self.subTest(name=name), self.assertRaisesRegex(ValueError, f"{name}: the batch has no {missing}"):
                evaluate(ROWS[name], batch)
        with self.assertRaisesRegex(ValueError, "no group_ids"):
            evaluate(ROWS["dr_grpo"], replace(batch, group_ids=None))
        with self.assertRaisesRegex(ValueError, "no rewards"):
            evaluate(ROWS["dr_grpo"], replace(batch, rewards=None))

    def test_rows_that_make_no_sense(self):
        for wrong, message in (
            ({"surrogate": "clpi"}, "surrogate: got 'clpi', wanted one of plain, clip"),
            ({"clip_low": -0.1}, "clip_low: got -0.1"),
            ({"std_ddof": 2}, "std_ddof: got 2"),
            ({"gamma": math.nan}, "gamma: got nan"),
            ({"ratio": "none"}, "without a ratio the surrogate is plain"),
            ({"credit": "reward_to_go"}, "reward_to_go has a baseline only"),
            ({"baseline": "given"}, "scaled by none or token_std"),
            ({"kl": "exact", "kl_place": "reward"}, "exact KL is that of the current policy"),
            ({"kl_place": "reward", "kl_weight": "ratio"}, "no gradient and no weight"),
            ({"kl_place": "reward", "kl_anchor": "old"}, "to itself it is 0"),
            ({"baseline": "none"}, "group_std needs a baseline of the group"),
            ({"baseline": "greedy"}, "group_std needs a baseline of the group"),
            (
                {"baseline": "none", "credit": "reward_to_go", "scale": "none", "reward_parts": "normalise_then_sum"},
                "one number an answer",
            ),
            ({"surrogate": "vespo", "ratio": "sequence_mean"}, "its own ratio of answers"),
        ):
            with self.subTest(wrong=wrong), self.assertRaisesRegex(ValueError, message):
                replace(ROWS["grpo"], **wrong)


class PreferenceLosses(unittest.TestCase):
    def data(self) -> objectives.Preferences:
        return objectives_report.small_preferences(small_batch())

    def pairs(self, chosen, rejected, ref_chosen=0.0, ref_rejected=0.0) -> objectives.Preferences:
        sides = dict(
            chosen_logps=chosen, rejected_logps=rejected, ref_chosen_logps=ref_chosen, ref_rejected_logps=ref_rejected
        )
        return make_preferences(**{name: np.array([side], dtype=np.float64) for name, side in sides.items()})

    def oracle(self, row: objectives.PreferenceRow, data: objectives.Preferences, logps: torch.Tensor) -> torch.Tensor:
        """The formulas under autograd, answer by answer."""
        scores = []
        half = len(logps) // 2
        for i in range(len(logps)):
            used = [t for t in range(data.mask.shape[1]) if data.mask[i, t]]
            shared = min(int(data.mask[i].sum()), int(data.mask[(i + half) % len(logps)].sum()))
            terms = [
                (logps[i, t] - (data.ref_logps[i, t] if row.reference == "used" else 0))
                * (1 if n < shared else row.tail_weight)
                for n, t in enumerate(used)
            ]
            scores.append(sum(terms) / (len(used) if row.score == "mean" else 1))
        s = torch.stack(scores)
        s = {
            "reverse_kl": lambda: s,
            "forward_kl": lambda: 1 - 1 / s.exp(),
            "js": lambda: (2 * s.exp() / (1 + s.exp())).log(),
        }[row.divergence]()
        u, v = s[:half], s[half:]
        b, e, sig = row.beta, row.label_smoothing, torch.sigmoid
        q = sig(b * (u - v))
        smooth = lambda D: -(1 - e) * sig(b * D).log() - e * sig(-b * D).log()  # noqa: E731

        def kto():
            z0 = max(0.0, (data.kl_seq_logps - data.ref_kl_seq_logps).mean().item())
            return torch.stack(
                [
                    row.desirable_weight * (1 - sig(b * (x - z0)))
                    if good
                    else row.undesirable_weight * (1 - sig(b * (z0 - x)))
                    for x, good in zip(s, data.labels)
                ]
            )

        def aot():
            reference = s - torch.stack([(logps[i] * data.mask[i]).sum() for i in range(len(logps))])
            gap, reference_gap = (u - reference[:half]) - (v - reference[half:]), reference[half:] - reference[:half]
            return smooth(gap.sort().values - reference_gap.sort().values)

        losses = {
            "sigmoid": lambda: -q.log(),
            "cdpo": lambda: smooth(u - v),
            "robust": lambda: (-(1 - e) * q.log() + e * (1 - q).log()) / (1 - 2 * e),
            "ipo": lambda: (u - v - 1 / (2 * b)) ** 2,
            "hinge": lambda: torch.relu(1 - b * (u - v)),
            "exo": lambda: q * (q / (1 - e)).log() + (1 - q) * ((1 - q) / e).log(),
            "sppo_hard": lambda: (u - 0.5 / b) ** 2 + (v + 0.5 / b) ** 2,
            "bco": lambda: -sig(b * u).log() - sig(-b * v).log(),
            "aot": aot,
            "aot_unpaired": lambda: smooth(u.sort().values - v.sort().values),
            "simpo": lambda: -sig(b * (u - v) - row.gamma).log(),
            "orpo": lambda: -b * sig((u.exp() / (1 - u.exp())).log() - (v.exp() / (1 - v.exp())).log()).log(),
            "kto": kto,
        }[row.loss]()
        nll = -torch.cat([logps[i][data.mask[i]] for i in range(half)]).mean()
        return losses.mean() + row.sft_coef * nll

    def test_gradient_of_every_row(self):
        data = self.data()
        for name, named in PREFERENCE_ROWS.items():
            rows = [named, replace(named, beta=0.7, sft_coef=0.0 if named.loss == "kto" else 0.3)]
            if named.loss not in ("aot", "kto", "orpo"):
                rows += [replace(named, divergence=divergence) for divergence in objectives.PREFERENCE_CHOICES["divergence"]]
            for row in rows:
                logps = data.logps.clone().requires_grad_()
                loss = self.oracle(row, data, logps)
                (gradient,) = torch.autograd.grad(loss, logps)
                result = evaluate_preference(row, data)
                self.assertAlmostEqual(result.loss.item(), loss.item(), 11, name)
                torch.testing.assert_close(
                    result.dloss_dlogps, gradient, rtol=1e-9, atol=1e-12, msg=lambda text: f"{name}\n{text}"
                )
                back = data.logps.clone().requires_grad_()
                objectives.loss_to_backpropagate(result, back).backward()
                torch.testing.assert_close(back.grad, result.dloss_dlogps)

    def test_finite_differences(self):
        data, h = self.data(), 1e-6
        data = replace(data, logps=data.logps + 0.01 * torch.arange(6).unsqueeze(1) * data.mask)  # no two answers tie
        for name, row in PREFERENCE_ROWS.items():
            analytic = evaluate_preference(row, data).dloss_dlogps
            for i, t in ((0, 0), (2, 1), (3, 5), (5, 2)):
                shift = torch.zeros_like(data.logps)
                shift[i, t] = h
                up, down = (
                    evaluate_preference(row, replace(data, logps=data.logps + sign * shift)).loss for sign in (1, -1)
                )
                self.assertAlmostEqual(((up - down) / (2 * h)).item(), analytic[i, t].item(), 6, (name, i, t))

    def test_by_hand(self):
        """D = 2, beta 0.1, e = 0.1: -log sigmoid(0.2) = 0.598139; cDPO 0.9 * 0.598139 + 0.1 * 0.798139 = 0.618139; robust
        (0.9 * 0.598139 - 0.1 * 0.798139) / 0.8 = 0.573139; IPO (2 - 5)^2 = 9; hinge 1 - 0.2 = 0.8."""
        pairs = self.pairs(1.5, -0.5)
        for name, wanted in (("dpo", 0.598139), ("cdpo", 0.618139), ("robust", 0.573139), ("ipo", 9.0), ("hinge", 0.8)):
            self.assertAlmostEqual(evaluate_preference(PREFERENCE_ROWS[name], pairs).loss.item(), wanted, 6, name)

    def test_ipo_sums_and_means(self):
        """0.3 on four tokens, -0.3 on two, beta 0.5: sums (1.8 - 1)^2 = 0.64, means (0.6 - 1)^2 = 0.16."""
        data = make_preferences(
            logps=np.array([[0.3] * 4, [-0.3] * 4]) - 1,
            ref_logps=np.full((2, 4), -1.0),
            mask=np.array([[1, 1, 1, 1], [1, 1, 0, 0]]) != 0,
        )
        for name, wanted in (("ipo", 0.64), ("ipo_mean", 0.16)):
            self.assertAlmostEqual(
                evaluate_preference(replace(PREFERENCE_ROWS[name], beta=0.5), data).loss.item(), wanted, 12
            )

    def test_identities(self):
        """e = 0: cdpo and robust are dpo. SimPO with gamma 0 is DPO by means against a uniform reference."""
        data = self.data()
        dpo = evaluate_preference(PREFERENCE_ROWS["dpo"], data)
        for name in ("cdpo", "robust"):
            other = evaluate_preference(replace(PREFERENCE_ROWS[name], label_smoothing=0.0), data)
            torch.testing.assert_close(other.dloss_dlogps, dpo.dloss_dlogps)
        simpo = evaluate_preference(replace(PREFERENCE_ROWS["simpo"], gamma=0.0, beta=0.1), data)
        mean = evaluate_preference(PREFERENCE_ROWS["dpo_mean"], replace(data, ref_logps=-1.6 * data.mask.double()))
        torch.testing.assert_close(simpo.dloss_dlogps, mean.dloss_dlogps)
        far = evaluate_preference(replace(PREFERENCE_ROWS["dpo"], beta=1.0), self.pairs(-1e4, 0.0))
        self.assertEqual((far.loss.item(), far.dloss_dlogps.tolist()), (1e4, [[-1.0], [1.0]]))

    def test_padding_is_not_summed(self):
        """The third token of the chosen answer is padding: margin 0, loss log 2."""
        data = make_preferences(
            logps=np.array([[-1.0, -1, math.nan], [-2.0, -2, -2]]),
            ref_logps=np.array([[-1.0, -1, -1], [-2.0, -2, -2]]),
            mask=np.array([[1, 1, 0], [1, 1, 1]]) != 0,
        )
        self.assertAlmostEqual(evaluate_preference(PREFERENCE_ROWS["dpo"], data).loss.item(), math.log(2), 12)

    def test_bad_input(self):
        with self.assertRaisesRegex(ValueError, "wanted an even number"):
            make_preferences(logps=np.zeros((3, 2)), mask=np.ones((3, 2), dtype=bool))
        no_reference = make_preferences(logps=np.full((2, 2), -1.0), mask=np.ones((2, 2), dtype=bool))
        with self.assertRaisesRegex(ValueError, "dpo: the data have no ref_logps"):
            evaluate_preference(PREFERENCE_ROWS["dpo"], no_reference)
        with self.assertRaisesRegex(ValueError, "kto: the data have no labels"):
            evaluate_preference(PREFERENCE_ROWS["kto"], no_reference)
        labelled = make_preferences(logps=np.full((2, 2), -1.0), mask=np.ones((2, 2), dtype=bool), labels=[True, False])
        with self.assertRaisesRegex(ValueError, "simpo: the data have no pairs"):
            evaluate_preference(PREFERENCE_ROWS["simpo"], labelled)
        for wrong, message in (
            ({"beta": 0.0}, "beta: got 0.0, wanted a finite number above 0"),
            ({"beta": "0.1"}, "beta: got '0.1'"),
            ({"gamma": math.nan}, "gamma: got nan"),
            ({"sft_coef": -math.inf}, "sft_coef: got -inf"),
            ({"desirable_weight": -3}, "desirable_weight: got -3, wanted a finite number of at least 0"),
            ({"loss": "dpo"}, "loss: got 'dpo'"),
            ({"loss": "robust", "label_smoothing": 0.5}, "label_smoothing: got 0.5"),
            ({"loss": "exo"}, "exo takes its logarithm"),
            ({"loss": "aot", "divergence": "js"}, "aot sorts gaps"),
            ({"loss": "kto", "sft_coef": 0.1}, "kto has no pairs"),
            ({"loss": "kto", "tail_weight": 0.5}, "kto has no pairs"),
            ({"loss": "kto", "divergence": "js"}, "kto has no pairs"),
            ({"loss": "orpo"}, "reference unused"),
        ):
            with self.subTest(wrong=wrong), self.assertRaisesRegex(ValueError, message):
                replace(PREFERENCE_ROWS["dpo"], **wrong)

    def test_sides_that_do_not_match(self):
        three, one = np.full(3, -1.0), np.full(1, -1.0)
        pair = {"chosen_logps": one, "rejected_logps": one}
        for wrong, message in (
            ({}, "logps: missing"),
            ({"chosen_logps": three, "rejected_logps": one}, r"rejected_logps: got shape \(1,\), wanted \(3,\)"),
            ({"chosen_logps": one}, "rejected_logps: missing; wanted beside chosen_logps"),
            ({"rejected_logps": one}, "chosen_logps: missing; wanted beside rejected_logps"),
            ({**pair, "ref_chosen_logps": one}, "ref_rejected_logps: missing"),
            ({**pair, "logps": three}, "logps: given both"),
        ):
            with self.subTest(wrong=list(wrong)), self.assertRaisesRegex(ValueError, message):
                make_preferences(**wrong)


class TheTable(unittest.TestCase):
    def test_every_choice_has_a_function_and_a_formula(self):
        choices = objectives.CHOICES
        self.assertEqual(set(choices["surrogate"]), set(objectives.SURROGATES))
        self.assertEqual(set(choices["std_guard"]), set(objectives.GUARDS))
        self.assertEqual(set(objectives.GROUP_BASELINES), set(objectives.BASELINES))
        self.assertEqual(set(objectives.PREFERENCE_CHOICES["loss"]), {*objectives.PREFERENCE_LOSSES, "kto", "aot"})
        fields = set(objectives.Row.__dataclass_fields__)
        self.assertLessEqual(set(choices), fields)
        for (field, value), numbers in objectives.NUMBERS.items():
            self.assertIn(value, choices[field])
            self.assertLessEqual(set(numbers), fields)

    def test_every_value_of_every_choice_is_used_by_a_test(self):
        """By a named row, or by a combination that the gradient test visits; two are tested by name alone."""
        rows = [*ROWS.values(), *combinations_of_choices()]
        for field, values in objectives.CHOICES.items():
            unused = set(values) - {getattr(row, field) for row in rows}
            self.assertLessEqual(unused, {"floor_variance", "batch_std_of_raw_rewards", "clip_replace"}, field)

    def test_rows_are_plain_records(self):
        for name, row in (ROWS | PREFERENCE_ROWS).items():
            self.assertEqual(row.name, name)
            self.assertTrue(row.source and row.differs, name)
            self.assertEqual(type(row)(**dataclasses.asdict(row)), row)
            self.assertIsInstance(hash(row), int)

    def test_needs_are_what_evaluate_reads(self):
        """With exactly what `needs` names each row evaluates; without one of them it says so."""
        batch = small_batch()
        for name, row in ROWS.items():
            held = {n: getattr(batch, n) for n in row.needs}
            if name == "ppo@sb3-2.9.2":
                held["values"] = batch.values
            evaluate(row, make_batch(logps=batch.logps, mask=batch.mask, **held))
            for missing in set(row.needs) - {"old_logps"}:
                with self.subTest(name=name, missing=missing), self.assertRaisesRegex(ValueError, missing):
                    evaluate(
                        row,
                        make_batch(
                            logps=batch.logps, mask=batch.mask, **{n: v for n, v in held.items() if n != missing}
                        )
                        if missing != "rewards"
                        else replace(batch, rewards=None, rewards_per_func=None),
                    )

    def test_a_new_row_is_one_entry(self):
        """The example of the module's docstring."""
        mine = replace(
            ROWS["grpo"], name="my_grpo", clip_high=0.28, reduction="mean_over_tokens", source="...", differs="..."
        )
        with mock.patch.dict(ROWS, {"my_grpo": mine}):
            self.assertIs(objectives_report.row_named("my_grpo"), mine)
            self.assertIn("my_grpo", objectives_report.family_table(small_batch()))
        GradientInClosedForm("assert_gradient_is_that_of_autograd").assert_gradient_is_that_of_autograd(mine)

    def test_nothing_global_moves(self):
        state, threads, dtype = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
        objectives_report.family_table(objectives_report.small_batch()[0])
        self.assertTrue(torch.equal(state, torch.get_rng_state()))
        self.assertEqual((threads, dtype), (torch.get_num_threads(), torch.get_default_dtype()))

    def test_float32_stays_float32(self):
        batch = make_batch(
            **{n: getattr(small_batch(), n).float() for n in ("logps", "old_logps", "ref_logps", "rewards")},
            mask=small_batch().mask,
            group_ids=small_batch().group_ids,
        )
        result = evaluate(ROWS["grpo"], batch)
        self.assertEqual((result.loss.dtype, result.dloss_dlogps.dtype), (torch.float32, torch.float32))
        check_close(self, result.dloss_dlogps, evaluate(ROWS["grpo"], small_batch()).dloss_dlogps, 1e-5, "float32 gradient")


class CommandLine(unittest.TestCase):
    def run_main(self, *arguments: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            objectives_report.main(list(arguments))
        return printed.getvalue()

    def test_worked_examples_agree(self):
        examples = objectives_report.worked_examples()
        self.assertGreaterEqual(len(examples), 14)
        for example in examples:
            self.assertTrue(example.agrees(), example)

    def test_the_table_has_every_row_and_the_numbers_of_evaluate(self):
        text = self.run_main()
        lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
        for name, row in ROWS.items():
            self.assertIn(f"{evaluate(row, small_batch()).loss.item():.6f}", lines[name])
        for name in PREFERENCE_ROWS:
            self.assertIn(name, lines)
        self.assertIn("EOS and PAD share id 4", text)
        self.assertNotIn("left out", text)
        self.assertEqual(text, self.run_main())

    def test_one_row_and_its_difference(self):
        text = self.run_main("--objective", "grpo", "--versus", "dr_grpo")
        for part in (
            "arXiv 2402.03300",
            "A / std(R of the group)",
            "d loss / d logp",
            "grpo against dr_grpo",
            "sum_per_response: (1/B) sum_i sum_t x",
            "cosine of the two gradients",
        ):
            self.assertIn(part, text)
        for name, row in ROWS.items():
            self.assertIn(f"{name}\n  source   {row.source}", objectives_report.explain(row, small_batch()))
        for name, row in PREFERENCE_ROWS.items():
            data = objectives_report.small_preferences(small_batch())
            self.assertIn(f"{name}\n  source   {row.source}", objectives_report.explain_preference(row, data))
        self.assertIn("(D - 1 / (2 beta))^2", self.run_main("--objective", "dpo", "--versus", "ipo"))

    def test_list_names_everything(self):
        text = self.run_main("--list")
        for name in (*ROWS, *PREFERENCE_ROWS, *objectives.NOT_EXPRESSED, *objectives.CHOICES):
            self.assertIn(name, text)

    def test_readers_batch(self):
        text = self.run_main("--batch", str(CAPTURES / "trl_grpo_grpo_pass2.npz"))
        line = next(line for line in text.splitlines() if line.startswith("grpo@trl-1.16.0"))
        self.assertIn("-0.094331", line)  # what TRL reported for this batch
        self.assertIn("not read: completion_ids", text)
        text = self.run_main("--batch", str(CAPTURES / "trl_dpo_sigmoid.npz"), "--objective", "dpo")
        self.assertIn("loss     0.570100", text)
        text = self.run_main("--batch", str(CAPTURES / "verl_loss_gpg.npz"))  # advantages and no rewards
        self.assertIn("0.485999", next(line for line in text.splitlines() if line.startswith("gpg@verl-0.9.1 *")))

    def test_files_that_do_not_fit(self):
        with tempfile.TemporaryDirectory() as folder:
            text, pickled, odd, short = (Path(folder) / name for name in ("a.npz", "b.npz", "c.npz", "d.npz"))
            text.write_text("no archive")
            np.savez(pickled, logps=np.array([{}], dtype=object))
            np.savez(odd, rewards=np.zeros(3))
            np.savez(short, logps=np.full((2, 3), math.nan), mask=np.ones((2, 3), dtype=bool))
            for path, message in (
                (Path(folder) / "none.npz", "No such file"),
                (text, "not an .npz file"),
                (pickled, "plain arrays"),
                (odd, "wanted at least logps and mask"),
                (short, "logps: got nan at row 0, position 0"),
            ):
                with self.subTest(path=path.name), self.assertRaisesRegex(rl_lab.FileProblem, message):
                    self.run_main("--batch", str(path))
        with self.assertRaisesRegex(rl_lab.FileProblem, "grpo also needs old_logps"):
            self.run_main("--batch", str(CAPTURES / "trl_kto_default.npz"), "--objective", "grpo")

    def test_wrong_flags_exit_with_2(self):
        for arguments, message in (
            (["--objective", "gpro"], "near: "),
            (["--versus", "grpo"], "together with --objective"),
            (["--objective", "dpo", "--versus", "grpo"], "read different data"),
            (["--plot", "x.jpg"], "x.jpg"),
        ):
            with self.subTest(arguments=arguments), contextlib.redirect_stderr(io.StringIO()) as printed:
                with self.assertRaises(SystemExit) as stopped:
                    self.run_main(*arguments)
                self.assertEqual(stopped.exception.code, 2)
                self.assertIn(message, printed.getvalue())
                self.assertEqual(printed.getvalue().count("\n"), 1)

    def test_curves_of_the_figure(self):
        """clip is -r until 1.28, then 0 (A = 1); weights are one over the length only for mean_per_response."""
        curves = objectives_report.gradient_curves(1.0, np.array([0.5, 1.2, 1.3]))
        np.testing.assert_allclose(curves["clip"], [-0.5, -1.2, 0.0])
        np.testing.assert_allclose(curves["cispo"], [-0.8, -1.2, -1.28])
        weights = objectives_report.weight_curves(np.array([10, 100]), budget=50)
        self.assertAlmostEqual(weights["mean_per_response"][0] / weights["mean_per_response"][1], 10)
        self.assertEqual(len(set(weights["mean_over_tokens"])), 1)

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib draws the figure")
    def test_figure(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "figure.svg"
            self.assertIn(f"wrote {path}", self.run_main("--plot", str(path)))
            drawn = path.read_bytes()
            self.assertTrue(drawn.startswith(b"<?xml") and len(drawn) > 20_000)
            self.assertFalse([name for name in os.listdir(folder) if name != "figure.svg"])
            (Path(folder) / "folder.svg").mkdir()
            with self.assertRaisesRegex(rl_lab.FileProblem, "not a regular file"):
                self.run_main("--plot", str(Path(folder) / "folder.svg"))


if __name__ == "__main__":
    unittest.main()
