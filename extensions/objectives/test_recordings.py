"""Real trainers, recorded: every batch in captures is reproduced by a row, loss and gradient, without the trainer."""

from __future__ import annotations

import math
import unittest
from dataclasses import replace

import numpy as np
import torch

from extensions import objectives
from extensions.objectives import PREFERENCE_ROWS, ROWS, evaluate, evaluate_preference, make_batch, make_preferences
from extensions.objectives.oracle import CAPTURES, arrays_of, check_close, recordings
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)

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
                result = evaluate(objectives.with_given_advantages(row), replace(batch, advantages=given))
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


if __name__ == "__main__":
    unittest.main()
