"""Batches of twelve further programs: every one is reproduced by a named row, value and gradient, without the program."""

from __future__ import annotations

import json
import unittest
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch


from extensions import objectives
from extensions.objectives import PREFERENCE_ROWS, ROWS, evaluate, evaluate_preference, make_batch, make_preferences
from extensions.objectives.oracle import check_close
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)

FOLDER = Path(__file__).parent / "captures"
TOLERANCE = 1e-5  # of the largest number: the programs compute in float32

# Recording -> the row that it is. Numbers that the recording states are set in the row.
LOSSES = {
    "areal_dual_clip": "dual_clip@areal-1.0.4",
    "areal_rejection_token_mask": "rejection@areal-1.0.4",
    "areal_sapo": "sapo@areal-1.0.4",
    "cleanrl_ppo_total": "ppo@cleanrl-fe8d8a0",
    "liger_dapo_given_is_ratio": "dapo@liger-0.8.5",
    "openinstruct_dapo_kl_ratio_k1": "dapo@open-instruct-e6c3044",
    "openrlhf_group_norm_cliphigher": "grpo@openrlhf-3c3be62",
    "openrlhf_gspo_rloo": "gspo@openrlhf-0.11.2",
    "openrlhf_tis_token_clip": "tis@openrlhf-0.11.2",
    "openrlhf_value_clip": "ppo@openrlhf-0.11.2",
    "prime_default_dppo_square": "dppo@prime-rl-559b447",
    "rlgames_ppo_total": "ppo@rl_games-1.6.5",
    "slime_grpo_kl_entropy": "grpo@slime-624b824",
    "slime_gspo_opsm": "gspo@slime-624b824",
    "tinygrpo": "grpo@tiny-grpo-eafedd7",
    "trlx_ppo_with_value": "ppo@trlx-3340c2f",
}
ADVANTAGES = {
    **{name: row for name, row in LOSSES.items() if name not in ("areal_rejection_token_mask", "areal_sapo")},
    "openrlhf_gae_kl_reward": "ppo@openrlhf-0.11.2",
    "slime_reinforce_pp_whitened": "reinforce_pp@slime-624b824",
}
PAIRS = {
    "liger_apo_zero": "apo_zero",
    "liger_cpo_smoothed": "cpo@liger-0.8.5",
    "liger_kto": "kto",
    "openrlhf_cdpo": "cdpo",
}
ENVIRONMENTS = ("cleanrl_gae", "rlgames_gae")
NUMBERS = ("clip_low", "clip_high", "ratio_cap", "value_clip", "gamma", "lam")
ARRAYS = {
    **{name: name for name in ("logps", "old_logps", "ref_logps", "mask", "rewards", "group_ids", "entropies", "values",
                               "vpreds", "returns", "token_level_rewards")},
    "rollout_logps": "sampler_logps",
    "rollout_log_probs": "sampler_logps",
    "vllm_is_ratio": "sampler_weights",
}  # fmt: skip


def recorded(name: str) -> dict[str, np.ndarray]:
    """The arrays of a recording, float32 widened."""
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as stored:
        return {key: stored[key].astype(np.float64) if stored[key].dtype == np.float32 else stored[key] for key in stored}


def row_and_arrays(name: str, row_name: str) -> tuple[objectives.Row, dict, dict[str, np.ndarray]]:
    held = recorded(name)
    row = replace(ROWS[row_name], **{number: float(held[number]) for number in NUMBERS if number in held})
    row = replace(row, kl_coef=float(held["beta"])) if "beta" in held else row
    given = {wanted: held[theirs] for theirs, wanted in ARRAYS.items() if theirs in held}
    if "num_items_in_batch" in held:
        given["window_tokens"] = float(held["num_items_in_batch"])
    # A recording of the critic or of the advantages alone has no policy.
    given.setdefault("logps", given.get("old_logps", np.zeros(held["mask"].shape) if "mask" in held else None))
    return row, given, held


class Captured(unittest.TestCase):
    def test_every_recording_has_a_row(self):
        names = {json.loads(line)["file"] for line in (FOLDER / "manifest.jsonl").read_text(encoding="utf-8").splitlines()}
        self.assertEqual(names, {path.name for path in FOLDER.glob("*.npz")})
        self.assertEqual({f"{name}.npz" for name in (*LOSSES, *ADVANTAGES, *PAIRS, *ENVIRONMENTS)}, names)

    def test_losses(self):
        """The loss and every gradient that was recorded, with the advantages as recorded."""
        for name, row_name in LOSSES.items():
            row, given, held = row_and_arrays(name, row_name)
            row = objectives.with_given_advantages(row)
            given["advantages"] = held["advantages"] if "advantages" in held else np.zeros(len(given["logps"]))
            result = evaluate(row, make_batch(**given))
            with self.subTest(name, row=row_name):
                check_close(self, result.loss, held["loss"], TOLERANCE, f"{name}: loss")
                slopes = [key for key in held if key.startswith("dloss_d")]
                self.assertTrue(slopes)
                for key in slopes:
                    check_close(self, getattr(result, key).reshape(held[key].shape), held[key], TOLERANCE, f"{name}: {key}")

    def test_advantages(self):
        for name, row_name in ADVANTAGES.items():
            row, given, held = row_and_arrays(name, row_name)
            if "advantages_raw" in held:
                row, given["advantages"] = replace(row, baseline="given"), held["advantages_raw"]
            if not {"rewards", "token_level_rewards", "advantages_raw"} & set(held):
                continue
            batch = make_batch(**given)
            wanted = np.broadcast_to(held["advantages"].reshape(len(batch.mask), -1), batch.mask.shape)
            with self.subTest(name, row=row_name):
                got = objectives.compute_advantages(row, batch)
                check_close(self, got, np.where(batch.mask, wanted, 0.0), TOLERANCE, f"{name}: advantages")
                if row.baseline == "gae" and "returns" in held:
                    returns = objectives.gae_over_tokens(row, batch)[1]
                    check_close(self, returns, held["returns"] * held["mask"], TOLERANCE, f"{name}: returns")

    def test_pairs(self):
        for name, row_name in PAIRS.items():
            held = recorded(name)
            row = replace(PREFERENCE_ROWS[row_name], beta=float(held["beta"]))
            keys = ("chosen_logps", "rejected_logps", "ref_chosen_logps", "ref_rejected_logps", "labels", "kl_seq_logps",
                    "ref_kl_seq_logps")  # fmt: skip
            given = {key: held[key] for key in keys if key in held}
            if "seq_logps" in held:
                given |= {"logps": held["seq_logps"], "ref_logps": held["ref_seq_logps"]}
            result = evaluate_preference(row, make_preferences(**given))
            slopes = [held[key] for key in ("dloss_dchosen_logps", "dloss_drejected_logps", "dloss_dseq_logps") if key in held]
            with self.subTest(name, row=row_name):
                check_close(self, result.loss, held["loss"], TOLERANCE, f"{name}: loss")
                check_close(self, result.dloss_dscores, np.concatenate(slopes), TOLERANCE, f"{name}: gradient")

    def test_environments(self):
        """GAE of two programs with (T, environments): CleanRL's flag belongs to the observation, rl_games' to the step."""
        for name in ENVIRONMENTS:
            held = {key: torch.as_tensor(value.T.copy() if value.ndim == 2 else value) for key, value in recorded(name).items()}
            if name == "cleanrl_gae":
                ends = torch.cat([held["episode_starts"][:, 1:], held["last_dones"].unsqueeze(1)], dim=1)
            else:
                ends = held["done"]
            next_values = torch.cat([held["values"][:, 1:], held["last_values"].unsqueeze(1)], dim=1)
            boundary = ends.clone()
            boundary[:, -1] = True
            batch = make_batch(
                logps=torch.zeros_like(held["values"]),
                mask=torch.ones_like(ends),
                token_level_rewards=held["rewards"],
                values=held["values"],
                next_values=next_values,
                terminated=ends,
                boundary=boundary,
            )
            row = replace(ROWS["ppo"], gamma=float(held["gamma"]), lam=float(held["lam"]))
            advantages, returns = objectives.gae_over_tokens(row, batch)
            with self.subTest(name):
                check_close(self, advantages, held["advantages"], TOLERANCE, f"{name}: advantages")
                check_close(self, returns, held["returns"], TOLERANCE, f"{name}: returns")

    def test_a_neighbour_does_not_pass(self):
        """What the tolerance is worth: the same row without its correction, or with another guard, is far off."""
        for name, changes in (
            ("openrlhf_tis_token_clip", {"sampler_bound": "as_is"}),
            ("areal_rejection_token_mask", {"sampler_dropped": "left_out"}),
            ("prime_default_dppo_square", {"surrogate": "dppo_tv", "ratio_cap": 1.0}),
            ("slime_grpo_kl_entropy", {"entropy_reduction": "mean_over_tokens"}),
        ):
            row, given, held = row_and_arrays(name, LOSSES[name])
            row = replace(objectives.with_given_advantages(row), **changes)
            result = evaluate(row, make_batch(**given, advantages=held["advantages"]))
            self.assertGreater(abs(result.loss.item() / held["loss"] - 1), 10 * TOLERANCE, name)


if __name__ == "__main__":
    unittest.main()
