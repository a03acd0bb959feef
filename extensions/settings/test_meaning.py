"""Every recorded batch whose settings are known: settings -> row -> the loss and the gradient that the trainer had."""

from __future__ import annotations

import json
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from extensions import objectives
from extensions.objectives import Row, evaluate, evaluate_preference, make_batch, make_preferences, with_given_advantages
from extensions.objectives.oracle import arrays_of, recordings
from extensions.settings import findings_of, meaning, read_settings, settings_of
from extensions.settings.files import Found
from extensions.settings.meaning import ACTOR, Refused, verl_kl
from extensions.settings.trainers import TRAINERS
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)

TOLERANCE = 1e-5
TRAINER_OF_KIND = {"grpo": "trl.GRPOConfig", "rloo": "trl.RLOOConfig", "dpo": "trl.DPOConfig", "kto": "trl.KTOConfig"}
BATCH_ARRAYS = (
    "logps mask old_logps ref_logps rewards group_ids entropies rewards_per_func reward_weights gen_rewards "
    "gen_rewards_per_func gen_group_ids gen_lengths gen_kl row_ids"
).split()


def from_file(values: dict, trainer: str):
    """The settings after a way through a file, as a user's come."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.json"
        path.write_text(json.dumps(values), encoding="utf-8")
        return settings_of(read_settings(path), TRAINERS[trainer])


def verl_names(config: dict) -> dict:
    """A manifest holds the arguments of verl's functions; these are the keys of its settings files for them."""
    places = {"loss_mode": ACTOR + "policy_loss.loss_mode", "adv_estimator": "algorithm.adv_estimator", "gamma": "algorithm.gamma",
              "lam": "algorithm.lam", "cliprange_value": "critic.cliprange_value", "policy_loss": ACTOR + "policy_loss",
              "norm_adv_by_std_in_grpo": "algorithm.norm_adv_by_std_in_grpo"}  # fmt: skip
    skipped = ("global_batch_info", "dp_size", "batch_num_tokens", "global_batch_size")
    return {places.get(key, ACTOR + key): value for key, value in config.items() if key not in skipped}


def window(config: dict) -> dict:
    info = config.get("global_batch_info", config)
    if not info.get("batch_num_tokens"):
        return {}
    return {"window_tokens": info["batch_num_tokens"] / info["dp_size"], "window_rows": info["global_batch_size"] / info["dp_size"]}


class RecordedSettings(unittest.TestCase):
    """settings -> row -> recorded loss to 1e-5 of the size of its terms, and the gradient to 1e-5 of its largest number."""

    def entries(self, kind: str, prefix: str):
        chosen = [(file, e, arrays_of(file)) for file, e in recordings().items() if e["kind"] == kind and file.startswith(prefix)]
        self.assertTrue(chosen, kind)
        return chosen

    def check(self, file: str, row: Row, batch, arrays: dict) -> None:
        result = evaluate(row, batch)
        size = max(abs(float(arrays["loss"])), float((result.weights * result.token_losses).abs().sum()))
        message = f"{file}: row {row.name}: loss {result.loss.item():.8f}, recorded {float(arrays['loss']):.8f}"
        self.assertLessEqual(abs(result.loss.item() - float(arrays["loss"])), TOLERANCE * size, message)
        self.close(result.dloss_dlogps, arrays["dloss_dlogps"].reshape(batch.logps.shape), f"{file}: gradient")

    def close(self, got, wanted, message: str) -> None:
        got, wanted = np.asarray(got, dtype=float), np.asarray(wanted, dtype=float)
        self.assertLessEqual(np.abs(got - wanted).max(), TOLERANCE * max(np.abs(wanted).max(), 1e-12), message)

    def test_trl_with_groups(self):
        for kind in ("grpo", "rloo"):
            for file, entry, arrays in self.entries(kind, "trl"):
                settings = from_file(entry["config"], TRAINER_OF_KIND[kind])
                row = meaning(settings).row
                mask = arrays["mask"] != 0
                extra = {"truncated": ~mask.any(axis=1)} if row.overlong == "mask" else {}
                if kind == "grpo":
                    steps = entry["capture"]["current_gradient_accumulation_steps"]
                    extra |= {"budget": settings.whole("max_completion_length"), "accumulation_steps": steps,
                              "steps_per_generation": settings.whole("steps_per_generation", steps),
                              "num_items_in_batch": arrays["num_items_in_batch"], "allow_empty_rows": not mask.any(axis=1).all()}
                batch = make_batch(**{name: arrays[name] for name in BATCH_ARRAYS if name in arrays}, **extra)
                self.check(file, row, batch, arrays)

    def test_trl_pairs_and_kto(self):
        for kind in ("dpo", "kto"):
            for file, entry, arrays in self.entries(kind, "trl"):
                row = meaning(from_file(entry["config"], TRAINER_OF_KIND[kind])).row
                data = {name: arrays[name] for name in ("logps", "mask", "ref_logps")}
                if kind == "kto":
                    data |= {name: arrays[name] for name in ("kl_seq_logps", "ref_kl_seq_logps")}
                    data["labels"] = arrays["labels"] != 0
                result = evaluate_preference(row, make_preferences(**data))
                self.close(result.loss, arrays["loss"], f"{file}: loss")
                self.close(result.dloss_dlogps, arrays["dloss_dlogps"] * arrays["mask"], f"{file}: gradient")

    def test_verl_policy_losses(self):
        for file, entry, arrays in self.entries("policy_loss", "verl"):
            row = meaning(from_file({"algorithm.adv_estimator": "grpo"} | verl_names(entry["config"]), "verl.ppo")).row
            batch = make_batch(**{name: arrays[name] for name in ("logps", "old_logps", "mask", "advantages")},
                               **window(entry["config"]))  # fmt: skip
            self.check(file, with_given_advantages(row), batch, arrays)

    def test_verl_advantages(self):
        for file, entry, arrays in self.entries("advantage", "verl"):
            row = meaning(from_file(verl_names(entry["config"]), "verl.ppo")).row
            names = ("mask", "token_level_rewards", "group_ids", "values", "reward_baselines")
            batch = make_batch(logps=0 * arrays["token_level_rewards"], **{name: arrays[name] for name in names if name in arrays})
            self.close(objectives.compute_advantages(row, batch), arrays["advantages"] * arrays["mask"], file)

    def test_verl_reductions_value_losses_and_kls(self):
        for file, entry, arrays in self.entries("reduction", "verl"):
            settings = from_file({"algorithm.adv_estimator": "grpo"} | verl_names(entry["config"]), "verl.ppo")
            row, factor = meaning(settings).row, settings.get(ACTOR + "loss_scale_factor")
            batch = make_batch(logps=arrays["loss_mat"], mask=arrays["mask"], budget=factor, allow_empty_rows=True,
                               **window(entry["config"]))  # fmt: skip
            weights = objectives.reduction_weights(row, batch, row.reduction) * batch.mask
            self.close((weights * batch.logps).sum(), arrays["loss"], f"{file}: loss")
        for file, entry, arrays in self.entries("value_loss", "verl"):
            row = replace(meaning(from_file(verl_names(entry["config"]), "verl.ppo")).row, baseline="given", scale="none")
            names = ("mask", "values", "vpreds", "returns")
            batch = make_batch(logps=0 * arrays["values"], advantages=0 * arrays["values"], **{n: arrays[n] for n in names})
            self.close(evaluate(row, batch).value_loss, arrays["loss"], f"{file}: loss")
        for file, entry, arrays in self.entries("kl", "verl"):
            row = replace(objectives.ROWS["grpo@verl-0.9.1"], **verl_kl(entry["config"]["kl_penalty"], 1.0, "loss"))
            kl, slope = objectives.kl_estimate(row, torch.as_tensor(arrays["logps"]), torch.as_tensor(arrays["ref_logps"]))
            self.close(kl.numpy() * arrays["mask"], arrays["kl"] * arrays["mask"], f"{file}: value")
            self.close(slope.numpy() * arrays["mask"], arrays["dkl_dlogps"] * arrays["mask"], f"{file}: slope")

    def test_stable_baselines3(self):
        for file, entry, arrays in self.entries("ppo", "sb3"):
            row = meaning(from_file(entry["config"], "sb3.PPO")).row
            batch = make_batch(advantages=arrays["advantages_raw"], values=arrays["old_values"],
                               **{n: arrays[n] for n in ("logps", "old_logps", "returns", "vpreds", "entropies")})  # fmt: skip
            self.check(file, row, batch, arrays)

    def test_clean_settings_have_no_finding_and_traps_are_named(self):
        """The recorded runs were made to be small: what is found in them must be a trap that is really there."""
        real = {
            "trl_dpo_sigmoid_label_smoothing_ignored.npz": {"label_smoothing_ignored"},
            "trl_grpo_dr_grpo_default_scale.npz": {"dr_grpo_keeps_std"},
            "trl_grpo_dr_grpo_accum2_mb0.npz": {"dr_grpo_keeps_std"},
            "trl_grpo_dr_grpo_accum2_mb1.npz": {"dr_grpo_keeps_std"},
            "trl_grpo_bnpo_accum2_mb0.npz": {"depends_on_micro_batches"},
            "trl_grpo_bnpo_accum2_mb1.npz": {"depends_on_micro_batches"},
            "trl_grpo_dapo_beta_pass2_n16.npz": {"dapo_is_only_a_denominator"},
            "trl_grpo_dapo_sequence_ratio_pass2.npz": {"dapo_is_only_a_denominator", "sequence_ratio_with_token_mean"},
            "trl_grpo_dapo_mask_truncated.npz": {"dropped_rows_still_count"},
            "trl_grpo_grpo_mask_truncated.npz": {"dropped_rows_still_count"},
            "trl_grpo_luspo_token_ratio_pass2.npz": {"luspo_without_sequence_ratio"},
        }
        for kind, trainer in TRAINER_OF_KIND.items():
            for file, entry, _ in self.entries(kind, "trl"):
                found = {f.name for f in findings_of(from_file(entry["config"], trainer)) if f.severity != "note"}
                self.assertEqual(found, real.get(file, set()), file)
        for file, entry, _ in self.entries("ppo", "sb3"):
            found = {f.name for f in findings_of(from_file(entry["config"] | {"n_envs": 3}, "sb3.PPO")) if f.severity != "note"}
            self.assertEqual(found, set(), file)


class Values(unittest.TestCase):
    def test_a_value_that_the_trainer_does_not_take_is_named(self):
        for trainer, values in (
            ("trl.GRPOConfig", {"loss_type": "gpro"}),
            ("trl.GRPOConfig", {"scale_rewards": "std"}),
            ("trl.DPOConfig", {"loss_type": ["sigmoid", "simpo"]}),
            ("verl.ppo", {ACTOR + "loss_agg_mode": "mean", "algorithm.adv_estimator": "grpo"}),
            ("openrlhf.ppo", {"algo.advantage.estimator": "grpo"}),
        ):
            with self.assertRaises(Refused) as caught:
                meaning(settings_of(Found(values), TRAINERS[trainer]))
            self.assertRegex(str(caught.exception), "|".join(key.split(".")[-1] for key in values))

    def test_numbers_that_no_float_and_no_whole_number_is(self):
        for value, words in ((10**400, "wanted a number"), (float("inf"), "wanted a whole number"), (1e300, "at most 1e.15"), (float("nan"), "whole number")):
            settings = settings_of(Found({"num_generations": value}), TRAINERS["trl.GRPOConfig"])
            with self.subTest(str(value)[:10]), self.assertRaisesRegex(ValueError, f"num_generations: got .*{words}") as caught:
                settings.whole("num_generations")
            self.assertLess(len(str(caught.exception)), 120)

    def test_every_trainer_and_name_gives_a_row_that_evaluates(self):
        batch, _ = objectives.small_batch()
        tables = {
            "trl.GRPOConfig": [("loss_type", name) for name in ("grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")],
            "verl.ppo": [("algorithm.adv_estimator", name) for name in objectives_of_verl()],
            "openrlhf.ppo": [("algo.advantage.estimator", name) for name in ("gae", "group_norm", "dr_grpo", "rloo", "reinforce",
                             "reinforce_baseline", "flash_reinforce")],
        }  # fmt: skip
        for trainer, pairs in tables.items():
            for key, name in pairs:
                row = meaning(settings_of(Found({key: name}), TRAINERS[trainer])).row
                self.assertTrue(evaluate(row, batch).loss.isfinite(), (trainer, name))


def objectives_of_verl() -> list[str]:
    from extensions.settings.meaning import VERL_ADVANTAGES

    return list(VERL_ADVANTAGES)


if __name__ == "__main__":
    unittest.main()
