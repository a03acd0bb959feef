"""Every trap has a planted case, which names it, and a clean twin, which does not; hostile files end in one line."""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import unittest
from pathlib import Path

import torch

from extensions.settings import TRAPS, detect, findings_of, read_settings, settings_of
from extensions.settings.command import main
from extensions.settings.files import Found
from extensions.settings.ledger import Model, models_held, resident
from extensions.settings.meaning import ACTOR as A
from extensions.settings.trainers import TRAINERS
from extensions.tiny_lm.model import VOCABULARY, Decoder
from rl_lab import FileProblem
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)

GRPO, DPO, CPO, VERL, ORLHF, SB3 = "trl.GRPOConfig", "trl.DPOConfig", "trl.CPOConfig", "verl.ppo", "openrlhf.ppo", "sb3.PPO"
V = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 8, A + "ppo_micro_batch_size_per_gpu": 1}
N, EST, SAMPLES = "actor_rollout_ref.rollout.n", "algo.advantage.estimator", "rollout.n_samples_per_prompt"
# name, trainer, what walks into it, what changes to step out (None takes the key away)
PLANTED = [
    ("dr_grpo_keeps_std", GRPO, {"loss_type": "dr_grpo"}, {"scale_rewards": "none"}),
    ("dapo_is_only_a_denominator", GRPO, {"loss_type": "dapo", "num_iterations": 2}, {"epsilon_high": 0.28}),
    ("cispo_cap_below_one", GRPO, {"loss_type": "cispo"}, {"epsilon_high": 5.0}),
    ("clip_without_effect", GRPO, {"epsilon": 0.1}, {"num_iterations": 2}),
    ("sequence_ratio_on_policy", GRPO, {"importance_sampling_level": "sequence", "loss_type": "grpo"}, {"num_iterations": 2}),
    ("no_reference", GRPO, {}, {"beta": 0.04}),
    ("kl_times_ratio", GRPO, {"beta": 0.04}, {"use_bias_correction_kl": False}),
    ("truncated_sampling_with_correction", GRPO, {"use_vllm": True, "top_p": 0.9}, {"top_p": 1.0}),
    ("temperature_not_one", GRPO, {"temperature": 0.6}, {"temperature": 1.0}),
    ("long_answers_are_dropped", GRPO, {"use_vllm": True}, {"vllm_importance_sampling_mode": "token_truncate"}),
    ("depends_on_micro_batches", GRPO, {"loss_type": "bnpo", "gradient_accumulation_steps": 2}, {"loss_type": "dapo"}),
    ("small_group", GRPO, {"num_generations": 2}, {"num_generations": 8}),
    ("batch_does_not_divide", GRPO, {"num_generations": 8, "per_device_train_batch_size": 6}, {"per_device_train_batch_size": 8}),
    ("dropped_rows_still_count", GRPO, {"mask_truncated_completions": True}, {"mask_truncated_completions": False}),
    ("prompt_without_template", GRPO, {"prompt_form": "text"}, {"prompt_form": "messages"}),
    ("luspo_without_sequence_ratio", GRPO, {"loss_type": "luspo"}, {"importance_sampling_level": "sequence"}),
    ("sequence_ratio_with_token_mean", GRPO, {"importance_sampling_level": "sequence"}, {"loss_type": "grpo"}),
    ("label_smoothing_ignored", DPO, {"label_smoothing": 0.1}, {"loss_type": ["robust"]}),
    ("ipo_of_means", DPO, {"loss_type": ["ipo"]}, {"loss_type": ["sigmoid"]}),
    ("beta_and_loss", DPO, {"beta": 0.5}, {"beta": 0.1}),
    ("simpo_adds_nll", CPO, {"loss_type": "simpo"}, {"cpo_alpha": 0.0}),
    ("unknown_key", GRPO, {"num_iteration": 2}, {"num_iteration": None, "num_iterations": 2}),
    ("key_is_not_read", GRPO, {"sapo_temperature_neg": 1.1}, {"loss_type": "sapo"}),
    ("clip_ratio_alone", VERL, V | {A + "clip_ratio": 0.3}, {A + "clip_ratio_low": 0.3, A + "clip_ratio_high": 0.3}),
    ("dual_clip_always", VERL, V, {A + "clip_ratio_c": 10.0}),
    ("default_estimator_is_gae", VERL, {N: 8}, {"algorithm.adv_estimator": "grpo"}),
    ("grpo_is_a_token_mean", VERL, V, {A + "loss_agg_mode": "seq-mean-token-mean"}),
    ("denominator_is_padded_width", VERL, V | {A + "loss_agg_mode": "seq-mean-token-sum-norm"}, {A + "loss_scale_factor": 512}),
    ("group_of_one", VERL, V | {N: 1}, {N: 8}),
    ("group_of_one", ORLHF, {EST: "group_norm"}, {SAMPLES: 8}),
    ("kl_twice", VERL, V | {A + "use_kl_loss": True, "algorithm.use_kl_in_reward": True}, {"algorithm.use_kl_in_reward": False}),
    ("grad_clip_is_not_read", VERL, V | {A + "grad_clip": 0.5}, {A + "optim.clip_grad": 0.5}),
    ("clip_grad_is_zero", VERL, V | {A + "optim.clip_grad": 0.0}, {A + "optim.clip_grad": 1.0}),
    ("gamma_and_lambda_are_one", VERL, {"algorithm.adv_estimator": "gae"}, {"algorithm.lam": 0.95}),
    ("reward_clip_after_baseline", ORLHF, {EST: "group_norm", SAMPLES: 8, "reward.clip_range": [-1, 1]}, {EST: "gae"}),
    ("filter_by_mean", ORLHF, {EST: "group_norm", SAMPLES: 8, "algo.dynamic_filtering_enable": True}, {"algo.dynamic_filtering_enable": False}),
    ("last_mini_batch_is_smaller", SB3, {"n_steps": 100, "batch_size": 64}, {"batch_size": 50}),
    ("no_target_kl", SB3, {}, {"target_kl": 0.02}),
    ("standardised_per_mini_batch", SB3, {}, {"normalize_advantage": False}),
    ("vec_normalize_has_its_own_gamma", SB3, {"gamma": 0.9, "vec_normalize.gamma": 0.99}, {"vec_normalize.gamma": 0.9}),
]  # fmt: skip


def found(trainer: str, values: dict) -> list:
    return findings_of(settings_of(Found({key: value for key, value in values.items() if value is not None}), TRAINERS[trainer]))


class Traps(unittest.TestCase):
    def test_every_planted_trap_is_named_and_its_twin_is_silent(self):
        for name, trainer, trap, cure in PLANTED:
            named = {finding.name for finding in found(trainer, trap)}
            self.assertIn(name, named, f"{trainer} {trap}: the trap was not named")
            named = {finding.name for finding in found(trainer, trap | cure)}
            self.assertNotIn(name, named, f"{trainer} {trap | cure}: the clean twin is not silent")

    def test_every_trap_is_planted(self):
        self.assertEqual({trap.name for trap in TRAPS} - {name for name, *_ in PLANTED}, set())

    def test_a_number_is_the_engine_s(self):
        """dr_grpo with the std: the cosine to what was meant is below 1, and at 1 if nothing differs."""
        (finding,) = [f for f in found(GRPO, {"loss_type": "dr_grpo"}) if f.name == "dr_grpo_keeps_std"]
        self.assertLess(finding.number["cosine"], 1 - 1e-6)
        (finding,) = [f for f in found(GRPO, {"num_generations": 2}) if f.name == "small_group"]
        self.assertAlmostEqual(finding.number["silent_groups"], 0.18**2 + 0.82**2)
        (finding,) = [f for f in found(VERL, V | {N: 1}) if f.name == "group_of_one"]
        self.assertAlmostEqual(finding.number["advantage"], 2 / (1 + 1e-6))
        (finding,) = [f for f in found(VERL, V | {A + "loss_agg_mode": "seq-mean-token-sum-norm"}) if "padded" in f.name]
        self.assertAlmostEqual(finding.number["gradient_norm"], 2 * finding.number["gradient_norm_padded"])


class Files(unittest.TestCase):
    def read(self, name: str, text: str):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_text(text, encoding="utf-8")
            return read_settings(path)

    def test_one_run_in_every_format(self):
        texts = {
            "a.yaml": "loss_type: grpo\nbeta: 4e-2\nnum_generations: 4\n",
            "a.json": '{"loss_type": "grpo", "beta": 0.04, "num_generations": 4}',
            "a.txt": "loss_type=grpo\nbeta = 0.04\nnum_generations=4 # answers\n",
            "a.sh": "BETA=0.04\ntrl grpo --loss_type grpo --beta $BETA \\\n  --num_generations $((2 * 2))\n",
            "a.py": 'G = 4\nargs = GRPOConfig(loss_type="grpo", beta=0.04, num_generations=G)\n',
        }
        if sys.version_info >= (3, 11):
            texts["a.toml"] = 'loss_type = "grpo"\nbeta = 0.04\nnum_generations = 4\n'
        for name, text in texts.items():
            try:
                made = self.read(name, text)
            except FileProblem as problem:
                if "PyYAML" in str(problem):
                    continue
                raise
            self.assertEqual(made.values, {"loss_type": "grpo", "beta": 0.04, "num_generations": 4}, name)
            self.assertEqual(detect(made).name, GRPO, name)

    def test_hostile_files_end_in_one_line_and_run_nothing(self):
        laughs = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
        merges = "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12))
        maps = "a0: &a0 {x: 1, y: 2}\n" + "".join(f"a{i}: &a{i} {{p: *a{i - 1}, q: *a{i - 1}, r: *a{i - 1}}}\n" for i in range(1, 12))
        cases = {
            "merges.yaml": merges, "maps.yaml": maps, "tag.yaml": "a: !!python/object/apply:os.system ['touch hacked']\n",
            "deep.yaml": "[" * 3000, "deep.json": "[" * 200_000, "line.json": '{"a": "' + "x" * 10_000_000 + '"}',
            "deep.py": "x = " + "(" * 5000, "unary.py": "x = " + "-" * 15_000 + "1", "code.py": "raise SystemExit('ran')",
            "many.yaml": "".join(f"a{i}: 1\n" for i in range(25_000)), "dots.toml": ".".join("a" * 5000) + " = 1\n",
            "long.py": "GRPOConfig(beta=0.1)\n" + "x=1\n" * 20_000, "nul.yaml": "a: \x00", "empty.yaml": "", "list.json": "[1, 2]", "bad.json": "{", "bad.toml": "a = ",
        }  # fmt: skip
        for name, text in cases.items():
            with self.assertRaises(FileProblem, msg=name) as caught:
                self.read(name, text)
            self.assertNotIn("\n", str(caught.exception), name)
        self.assertFalse(Path("hacked").exists())
        try:  # shared lists are one value each: nothing is spread out
            self.assertLess(len(self.read("laughs.yaml", laughs).values), 20)
        except FileProblem as problem:
            self.assertNotIn("\n", str(problem))
        made = self.read("call.py", "GRPOConfig(beta=__import__('os').system('touch hacked'), epsilon=0.1)")
        self.assertEqual((made.values, list(made.unreadable)), ({"epsilon": 0.1}, ["beta"]))
        self.assertFalse(Path("hacked").exists())


class Ledger(unittest.TestCase):
    def test_bytes_are_those_that_torch_holds_for_tiny_lm(self):
        """Actor and critic of tiny_lm after one step of Adam: weights, gradients and both moments, to the byte."""
        for outputs, method in ((VOCABULARY, "grpo"), (1, "ppo")):
            model = Decoder(outputs, torch.Generator().manual_seed(0))
            optimizer = torch.optim.Adam(model.parameters())
            ids = torch.ones(2, 6, dtype=torch.long)
            model(ids, torch.ones(2, 6, dtype=torch.bool)).sum().backward()
            optimizer.step()
            parameters = list(model.parameters())
            moments = [t for p in parameters for key, t in optimizer.state[p].items() if key != "step"]
            count = sum(p.numel() for p in parameters)
            held = resident(Model(count, 2, 64, outputs, 4, 6, method=method, sequences=2, bytes=4))
            for what, tensors in (("weights", parameters), ("gradients", [p.grad for p in parameters]), ("optimizer", moments)):
                name = f"{'actor' if method == 'grpo' else 'critic'} {what}"
                self.assertEqual(held[name], sum(t.numel() * t.element_size() for t in tensors), name)

    def test_how_many_models_is_a_choice(self):
        sizes = (1e9, 24, 2048, 32000, 16, 1024)
        self.assertEqual(models_held(Model(*sizes, method="ppo")), 4)
        self.assertEqual(models_held(Model(*sizes, method="grpo")), 2)
        shared = Model(*sizes, method="ppo", shared_critic=True, no_reward_model=True, cached_reference=True)
        self.assertEqual(models_held(shared), 1)

    def test_sixteen_bytes_a_parameter(self):
        """arXiv 1910.02054 section 3.1: 2 + 2 + 12 bytes, so 120 GB for 7.5e9 parameters."""
        held = resident(Model(7.5e9, 32, 4096, 50257, 32, 1024))
        self.assertAlmostEqual(sum(held[f"actor {part}"] for part in ("weights", "gradients", "optimizer")) / 1e9, 120)


class Command(unittest.TestCase):
    def test_exit_statuses(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a.json"
            for text, flags, status in (
                ('{"loss_type": "dr_grpo"}', ["--trainer", GRPO], 1), ('{"loss_type": "dr_grpo"}', ["--trainer", GRPO, "--fail-on", "never"], 0),
                ('{"num_generations": 8}', ["--json", str(Path(folder) / "o.json")], 0), ("{", [], 2), ('{"beta": "x", "num_generations": 8}', [], 2),
                ('{"num_generations": 8, "loss_type": "gpro"}', [], 2), ('{"num_generations": 8}', ["--versus", "nothing"], 2),
                ('{"num_generations": 8}', ["--model", "1,2"], 2), ('{"num_generations": 8}', ["--paper", "dapo"], 0),
            ):  # fmt: skip
                path.write_text(text, encoding="utf-8")
                got, out, err = 0, io.StringIO(), io.StringIO()
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                    try:
                        main([str(path), *flags])
                    except SystemExit as stop:
                        got = stop.code
                self.assertEqual(got, status, (text, flags, err.getvalue()))


if __name__ == "__main__":
    unittest.main()
