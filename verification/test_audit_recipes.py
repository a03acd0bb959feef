"""The recording recipes of extensions/audit/recipes.py, run as they stand against the pinned TRL.

    python -m pip install -r verification/requirements.txt
    python -B -m unittest -v verification.test_audit_recipes

The printed text is executed, a smallest real trainer trains for a few steps with it, and the file that the recipe
wrote is audited: what the audit names must be what the trainer was configured to do. Skipped where TRL is absent or has
another version. The verl recipe is not run: verl does not install on a machine without a GPU.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import textwrap
import unittest
from pathlib import Path

import numpy as np
import torch

from extensions.audit import audit, parse_declared
from extensions.audit.read.recording import read_recording
from extensions.audit.recipes import RECIPES
from verification.test_peers import needs, tiny_model, tokenizer, undisturbed


def recipe(class_name: str) -> str:
    """The indented block of the text that defines this class."""
    lines = RECIPES.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"    class {class_name}("))
    block = []
    for line in lines[start:]:
        if line and not line.startswith("    "):
            break
        block.append(line)
    return textwrap.dedent("\n".join(block))


class RecipeTest(unittest.TestCase):
    def run(self, result=None):
        folder = os.getcwd()
        quiet = io.StringIO()  # trainers print progress bars and metrics
        with undisturbed(torch.float32), tempfile.TemporaryDirectory() as temporary:
            os.chdir(temporary)
            try:
                with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
                    return super().run(result)
            finally:
                os.chdir(folder)

    def recording_class(self, base: type, class_name: str) -> type:
        names = {base.__name__: base, "np": np, "torch": torch}
        exec(recipe(class_name), names)  # the printed text itself: that is what is under test
        return names[class_name]


QUIET = dict(
    use_cpu=True, bf16=False, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True
)


@needs("trl", "transformers", "datasets", "tokenizers")
class GrpoRecipe(RecipeTest):
    def trained(self, **options):
        """The audit of the last batch of a short training, declared as what it was configured to be."""
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        with tempfile.TemporaryDirectory() as folder:
            policy = tiny_model(1).float()
            tiny_model(2).float().save_pretrained(folder)
            policy.config._name_or_path = folder
            settings = dict(
                QUIET,
                output_dir=folder,
                per_device_train_batch_size=8,
                num_generations=4,
                max_completion_length=8,
                max_steps=2,
                learning_rate=0.05,
            )
            trainer = self.recording_class(GRPOTrainer, "RecordingGRPOTrainer")(
                policy,
                lambda completions, **_: [float(len(set(completion.split()))) for completion in completions],
                args=GRPOConfig(**settings | options),
                train_dataset=Dataset.from_dict({"prompt": ["w1 w2", "w3", "w4 w5 w6", "w7"]}),
                processing_class=tokenizer(),
            )
            trainer.train()
        return read_recording(Path("batch.npz"))

    def assert_declared(self, recording, row: str, *settings: str):
        declared, numbers = parse_declared(row, settings)
        report = audit(recording, declared, numbers)
        self.assertEqual([f for f in report.findings if f.severity != "note"], [])
        self.assertIs(report.gradient["agrees"], True)
        return report

    def test_default_loss_on_a_second_pass(self):
        recording = self.trained(num_iterations=2)
        self.assertIn("old_logps", recording.arrays)
        report = self.assert_declared(recording, "dapo@trl-1.16.0")
        self.assertIn(report.loss["matches"][0]["reduction"], ("mean_over_window", "mean_over_tokens"))

    def test_kl_and_a_wider_clip(self):
        recording = self.trained(num_iterations=2, beta=0.04, epsilon_high=0.28, loss_type="grpo")
        self.assertIn("ref_logps", recording.arrays)
        report = self.assert_declared(recording, "grpo@trl-1.16.0")
        best = report.loss["matches"][0]
        self.assertEqual((best["kl"], best["kl_weight"], best["reduction"]), ("k3", "ratio", "mean_per_response"))
        self.assertEqual((best["clip_high"], best["kl_coef"]), (0.28, 0.04))

    def test_accumulation(self):
        recording = self.trained(gradient_accumulation_steps=2, loss_type="bnpo", per_device_train_batch_size=4)
        report = self.assert_declared(recording, "bnpo@trl-1.16.0")
        self.assertEqual(report.loss["matches"][0].get("accumulation"), "divide")

    def test_what_was_not_configured_is_found(self):
        # The twin that must fail: the same file declared as another objective.
        recording = self.trained(num_iterations=2, loss_type="grpo")
        declared, numbers = parse_declared("dr_grpo@trl-1.16.0", ())
        report = audit(recording, declared, numbers)
        self.assertIn("mistake", {f.severity for f in report.findings})


@needs("trl", "transformers", "datasets", "tokenizers")
class DpoRecipe(RecipeTest):
    def trained(self, **options):
        import datasets
        from trl import DPOConfig, DPOTrainer

        datasets.disable_progress_bars()
        rows = {"prompt": ["w1 w2", "w3"], "chosen": [" w4 w5", " w6"], "rejected": [" w7", " w8 w9 w9"]}
        with tempfile.TemporaryDirectory() as folder:
            settings = dict(
                QUIET,
                output_dir=folder,
                beta=0.5,
                per_device_train_batch_size=2,
                max_steps=3,
                learning_rate=0.05,
            )
            trainer = self.recording_class(DPOTrainer, "RecordingDPOTrainer")(
                tiny_model(1).float(),
                ref_model=tiny_model(2).float(),
                args=DPOConfig(**settings | options),
                train_dataset=datasets.Dataset.from_dict(rows),
                processing_class=tokenizer(),
            )
            trainer.train()
        return read_recording(Path("pairs.npz"))

    def test_pairs(self):
        for loss_type, row in (("sigmoid", "dpo"), ("hinge", "hinge"), ("ipo", "ipo_mean")):
            with self.subTest(loss_type):
                recording = self.trained(loss_type=loss_type)
                declared, numbers = parse_declared(row, ())
                report = audit(recording, declared, numbers)
                self.assertEqual([f for f in report.findings if f.severity == "mistake"], [])
                self.assertIs(report.gradient["agrees"], True)
                self.assertIn(row, report.loss["matches"][0]["rows"])


if __name__ == "__main__":
    unittest.main()
