"""extensions/record.py in real trainers of the pinned TRL: what it writes, audited, is what the trainer was set to do.

    python -m pip install -r verification/requirements.txt
    python -B -m unittest -v verification.test_audit_recipes

A smallest real GRPO, RLOO, DPO or KTO trainer trains for a few steps under `record`, and each file it wrote is audited. A
mistake planted in a subclass must be named, and recording must not change the training. Skipped where TRL is absent or has
another version. The wrapper for verl is tested on a loss function of verl's shape in extensions/test_record.py: verl does
not install on a machine without a GPU.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import unittest
from pathlib import Path

import numpy as np
import torch

from extensions.audit import audit, parse_declared, read_recording
from extensions.audit.step.folder import read_step
from extensions.audit.step.verdict import audit_step
from extensions.record import record
from verification.test_peers import needs, tiny_model, tokenizer, undisturbed

QUIET = dict(
    use_cpu=True, bf16=False, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True
)
ANSWERS = {
    "DPO": {"prompt": ["w1 w2", "w3"], "chosen": [" w4 w5", " w6"], "rejected": [" w7", " w8 w9 w9"]},
    "KTO": {
        "prompt": ["w1 w2", "w3", "w1", "w2"], "completion": [" w4 w5", " w6", " w7", " w8 w9 w9"],
        "label": [True, False, False, True],
    },
}


class RecordTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def run(self, result=None):
        self.quiet = io.StringIO()  # trainers print progress bars and metrics
        with undisturbed(torch.float32), contextlib.redirect_stdout(self.quiet), contextlib.redirect_stderr(self.quiet):
            return super().run(result)

    def trained(self, kind: str, change=lambda same: same, recorded=True, every=1, logits=False, **options):
        """A trainer after a few steps. change: trainer class -> the class to record."""
        import trl

        trainer_class = change(getattr(trl, f"{kind}Trainer"))
        if recorded:
            trainer_class = record(trainer_class, self.folder / "recorded", every, logits=logits)
        trainer = (offline if kind in ANSWERS else online)(kind, trainer_class, str(self.folder), options)
        trainer.train()
        self.assertNotIn("record:", self.quiet.getvalue())
        return trainer

    def files(self) -> list[Path]:
        return sorted((self.folder / "recorded").rglob("*.npz"))

    def audited(self, path: Path, row: str, *settings: str):
        declared, numbers = parse_declared(row, settings)
        return audit(read_recording(path), declared, numbers)

    def assert_declared(self, path: Path, row: str, *settings: str):
        """Nothing to find, the gradient agrees, and the row is among those of the best match."""
        report = self.audited(path, row, *settings)
        self.assertEqual([f.name for f in report.findings if f.severity != "note"], [], path.name)
        self.assertIs(report.gradient["agrees"], True)
        if not settings:
            self.assertIn(row, report.loss["matches"][0]["rows"])
        return report


def online(kind: str, trainer_class: type, folder: str, options: dict):
    import trl
    from datasets import Dataset

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
    return trainer_class(
        policy,
        lambda completions, **_: [float(len(set(completion.split()))) for completion in completions],
        args=getattr(trl, f"{kind}Config")(**settings | options),
        train_dataset=Dataset.from_dict({"prompt": ["w1 w2", "w3", "w4 w5 w6", "w7"]}),
        processing_class=tokenizer(),
    )


def offline(kind: str, trainer_class: type, folder: str, options: dict):
    import datasets
    import trl

    datasets.disable_progress_bars()
    settings = dict(QUIET, output_dir=folder, beta=0.5, per_device_train_batch_size=2, max_steps=3, learning_rate=0.05)
    return trainer_class(
        tiny_model(1).float(),
        ref_model=tiny_model(2).float(),
        args=getattr(trl, f"{kind}Config")(**settings | options),
        train_dataset=datasets.Dataset.from_dict(ANSWERS[kind]),
        processing_class=tokenizer(),
    )


@needs("trl", "transformers", "datasets", "tokenizers")
class Grpo(RecordTest):
    def test_default_loss_on_a_second_pass(self):
        self.trained("GRPO", num_iterations=2)
        report = self.assert_declared(self.files()[1], "dapo@trl-1.16.0")
        self.assertIn(report.loss["matches"][0]["reduction"], ("mean_over_window", "mean_over_tokens"))
        self.assertTrue(report.advantages["matches"], "the advantages are checked too: rewards and groups are recorded")

    def test_kl_and_a_wider_clip(self):
        self.trained("GRPO", num_iterations=2, beta=0.04, epsilon_high=0.28, loss_type="grpo")
        report = self.assert_declared(self.files()[1], "grpo@trl-1.16.0")
        best = report.loss["matches"][0]
        self.assertEqual((best["kl"], best["kl_weight"], best["reduction"]), ("k3", "ratio", "mean_per_response"))
        self.assertEqual((best["clip_high"], best["kl_coef"]), (0.28, 0.04))

    def test_accumulation(self):
        self.trained("GRPO", gradient_accumulation_steps=2, loss_type="bnpo", per_device_train_batch_size=4)
        self.assertEqual([path.name for path in self.files()], ["rank0_mb0.npz", "rank0_mb1.npz"] * 2)
        for path in self.files():
            report = self.assert_declared(path, "bnpo@trl-1.16.0")
            self.assertEqual(report.loss["matches"][0].get("accumulation"), "divide")

    def test_a_step_of_two_micro_batches(self):
        for loss_type, named in (("dapo", []), ("bnpo", ["mean_of_means"])):
            with self.subTest(loss_type):
                self.trained("GRPO", gradient_accumulation_steps=2, loss_type=loss_type, per_device_train_batch_size=4)
                declared, numbers = parse_declared(f"{loss_type}@trl-1.16.0", ())
                report = audit_step(read_step(self.files()[-1].parent), declared, numbers)
                self.assertEqual((report.named(), report.agrees), (named, not named), report.lines)
                self.assertNotEqual(report.worst(), "mistake")

    def test_cispo_cap_is_one_more_than_clip_high(self):
        self.trained("GRPO", loss_type="cispo", epsilon_high=1.2, num_iterations=2)
        best = self.assert_declared(self.files()[1], "cispo@trl-1.16.0", "clip_high=0.2").loss["matches"][0]
        self.assertAlmostEqual(best["clip_high"], 0.2)

    def test_entropy_bonus_and_cap(self):
        self.trained("GRPO", entropy_coef=0.01, delta=2.0, num_iterations=2)
        best = audit(read_recording(self.files()[1])).loss["matches"][0]
        self.assertEqual((best["entropy_coef"], best["ratio_cap"]), (0.01, 2.0))

    def test_what_was_not_configured_is_found(self):
        # The twin that must fail: the same file declared as another objective.
        self.trained("GRPO", num_iterations=2, loss_type="grpo")
        report = self.audited(self.files()[1], "dr_grpo@trl-1.16.0")
        self.assertIn("mistake", {f.severity for f in report.findings})

    def test_mistakes_planted_in_a_subclass_are_named(self):
        def twice(trainer_class):
            class Wrong(trainer_class):
                def _compute_loss(self, model, inputs):
                    return super()._compute_loss(model, inputs) / 2

            return Wrong

        def negated(trainer_class):
            class Wrong(trainer_class):
                def _generate_and_score_completions(self, inputs):
                    output = super()._generate_and_score_completions(inputs)
                    return output | {"advantages": -output["advantages"]}

            return Wrong

        def all_slots(trainer_class):
            class Wrong(trainer_class):
                def _compute_loss(self, model, inputs):
                    every_slot = torch.ones_like(inputs["completion_mask"])
                    return super()._compute_loss(model, inputs | {"completion_mask": every_slot})

            return Wrong

        for change, name in ((twice, "extra_division"), (negated, "advantage_sign"), (all_slots, "padding_counted")):
            with self.subTest(name):
                self.trained("GRPO", change, loss_type="grpo", num_iterations=2)
                report = self.audited(self.files()[1], "grpo@trl-1.16.0")
                self.assertIn(name, [f.name for f in report.findings if f.severity == "mistake"])

    def test_every_and_logits(self):
        self.trained("GRPO", every=2, logits=True, max_steps=3, beta=0.04)
        self.assertEqual([path.parent.name for path in self.files()], ["step_000000", "step_000002"])
        made = read_recording(self.files()[0]).arrays
        logits, ids = torch.as_tensor(made["logits"]), torch.as_tensor(made["completion_ids"])
        ours = logits.log_softmax(2).gather(2, ids[..., None])[..., 0]
        off = np.abs(ours.numpy() - made["logps"])[made["mask"]].max()
        self.assertLess(off, 1e-5, "log softmax of the recorded logits at the recorded ids gives the recorded logps")

    def test_training_is_the_same_with_and_without(self):
        options = dict(num_iterations=2, beta=0.04, max_steps=3)
        for kind in ("GRPO", "RLOO", "DPO", "KTO"):
            with self.subTest(kind):
                one, two = (
                    self.trained(kind, recorded=recorded, logits=recorded, **options if kind not in ANSWERS else {})
                    for recorded in (True, False)
                )
                for (name, a), b in zip(one.model.named_parameters(), two.model.parameters()):
                    self.assertTrue(torch.equal(a, b), name)


@needs("trl", "transformers", "datasets", "tokenizers")
class Rloo(RecordTest):
    def test_kl_in_the_reward_and_accumulation(self):
        self.trained(
            "RLOO", num_iterations=2, gradient_accumulation_steps=2, per_device_train_batch_size=4, max_steps=2,
        )
        for path in self.files():
            report = self.assert_declared(path, "rloo@trl-1.16.0")
            self.assertTrue(report.advantages["matches"])
            arrays = read_recording(path).arrays
            if arrays["dloss_dlogps"].any():
                off = arrays["backward_dlogps"] - arrays["dloss_dlogps"] / 2
                self.assertLess(np.abs(off).max(), 1e-8, "transformers divides RLOO's loss by the accumulation steps")
        report = audit_step(read_step(self.files()[-1].parent), *parse_declared("rloo@trl-1.16.0", ()))
        self.assertIs(report.agrees, True, report.lines)


@needs("trl", "transformers", "datasets", "tokenizers")
class Preferences(RecordTest):
    def test_pairs(self):
        for loss_type, row in (("sigmoid", "dpo"), ("hinge", "hinge"), ("ipo", "ipo_mean")):
            with self.subTest(loss_type):
                self.trained("DPO", loss_type=loss_type)
                self.assert_declared(self.files()[-1], row)

    def test_a_step_of_two_micro_batches(self):
        self.trained("DPO", gradient_accumulation_steps=2, per_device_train_batch_size=1)
        report = audit_step(read_step(self.files()[-1].parent), *parse_declared("dpo", ()))
        self.assertIs(report.agrees, True, report.lines)
        self.assertIsNone(report.worst() if report.worst() != "note" else None)

    def test_reference_log_probabilities_from_the_data(self):
        self.trained("DPO", precompute_ref_log_probs=True)
        self.assert_declared(self.files()[-1], "dpo")

    def test_tail_weight(self):
        self.trained("DPO", ld_alpha=0.5)
        self.assertIn("ld_dpo", audit(read_recording(self.files()[-1])).loss["matches"][0]["rows"])

    def test_labels(self):
        self.trained("KTO", desirable_weight=1.5, gradient_accumulation_steps=2)
        report = self.assert_declared(self.files()[-1], "kto", "desirable_weight=1.5")
        self.assertAlmostEqual(report.loss["matches"][0]["desirable_weight"], 1.5, places=3)

    def test_a_mistake_planted_in_a_subclass_is_named(self):
        def squared(trainer_class):
            class Wrong(trainer_class):
                def _compute_loss(self, *args):
                    self.beta = self.beta**2
                    try:
                        return super()._compute_loss(*args)
                    finally:
                        self.beta = self.args.beta

            return Wrong

        self.trained("DPO", squared)
        report = self.audited(self.files()[-1], "dpo")
        self.assertEqual({f.name for f in report.findings if f.severity == "mistake"}, {"beta_twice"})


if __name__ == "__main__":
    unittest.main()
