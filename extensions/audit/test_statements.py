"""What the audit may not say: false statements, each tested as a whole kind."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import numpy as np
import torch

from extensions.audit import audit, parse_declared, read_recording, recording_from
from extensions.audit.checks.advice import advice_left
from extensions.audit.proof.truth import CAPTURES, load, manifest
from extensions.audit.say.report import printed
from extensions.audit.testing import audited
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)

ROOT = Path(__file__).resolve().parents[2]


def trainer_batch(rows: int = 8, width: int = 6, seed: int = 3) -> dict[str, torch.Tensor]:
    """A batch of a later pass whose ratios leave the band on both sides."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=generator, dtype=torch.float64) * 2 - 0.2
    new = (old + 0.4 * torch.randn(rows, width, generator=generator, dtype=torch.float64)).clamp(max=-0.01)
    mask = torch.arange(width) < torch.tensor([2, 6, 3, 5, 4, 6, 1, 3])[:rows, None]
    A = torch.randn(rows, generator=generator, dtype=torch.float64)
    return {"logps": new, "old_logps": old, "mask": mask, "advantages": A}


def with_loss(batch: dict, loss_of, factor: float = 1.0) -> dict:
    """The batch with the loss of per-token losses loss_of(r, A, l), a mean over tokens, and autograd's gradient."""
    l = batch["logps"].clone().requires_grad_(True)
    r = (l - batch["old_logps"]).exp()
    each = loss_of(r, batch["advantages"][:, None].expand_as(l), l)
    loss = factor * each[batch["mask"]].mean()
    (gradient,) = torch.autograd.grad(loss, l)
    return {**batch, "loss": loss.detach(), "dloss_dlogps": gradient, "clip_low": 0.2, "clip_high": 0.2}


def right(r, A, l):
    return -torch.minimum(r * A, r.clamp(0.8, 1.2) * A)


def without_min(r, A, l):
    return -r.clamp(0.8, 1.2) * A


def of_no_family(r, A, l):
    """A loss that no row of the table has: its slope grows with the token's own probability."""
    return -A * l.exp().sin() * r.sqrt()


class Gradient(unittest.TestCase):
    def test_nothing_found_is_not_a_disagreement(self):
        # Recorded, and nothing to compare it with: null in JSON, and words that blame nobody.
        report = audited(with_loss(trainer_batch(), of_no_family))
        self.assertIn("not_reproduced", report.named())
        self.assertIsNone(report.as_json()["gradient"]["agrees"])
        self.assertIn("recorded, and not checked: nothing to compare it with", printed(report, "batch.npz"))
        pairs = load("trl_dpo_sigmoid.npz")
        pairs["dloss_dlogps"] = pairs["dloss_dlogps"] ** 3
        self.assertIsNone(audited(pairs).as_json()["gradient"]["agrees"])

    def test_right_and_mistaken_gradients_are_told_apart(self):
        self.assertIs(audited(with_loss(trainer_batch(), right)).gradient["agrees"], True)
        report = audited(with_loss(trainer_batch(), without_min))
        self.assertIs(report.gradient["agrees"], False)
        self.assertIn("clip_without_min", report.named())

    def test_no_gradient_says_not_recorded(self):
        batch = with_loss(trainer_batch(), right)
        del batch["dloss_dlogps"]
        self.assertIn("Gradient\n  not recorded", printed(audited(batch), "batch.npz"))


class TimesAFactor(unittest.TestCase):
    def test_a_mistake_times_any_factor_keeps_its_name(self):
        def max_for_min(r, A, l):
            return -torch.maximum(r * A, r.clamp(0.8, 1.2) * A)

        for factor in (3.7, 0.31):
            for name, loss in (("clip_without_min", without_min), ("max_for_min", max_for_min)):
                with self.subTest(name, factor=factor):
                    report = audited(with_loss(trainer_batch(), loss, factor))
                    self.assertIn(name, report.named())
                    self.assertIn("unexplained_factor", report.named())
                    self.assertNotIn("0.0 % off", printed(report, "batch.npz"))

    def test_a_right_loss_times_a_factor_is_no_mistake(self):
        report = audited(with_loss(trainer_batch(), right, 3.7))
        self.assertEqual(report.named(), ["unexplained_factor"])
        self.assertEqual(report.worst(), "warning")

    def test_far_fits_are_not_printed(self):
        text = printed(audited(with_loss(trainer_batch(), of_no_family)), "batch.npz")
        self.assertNotIn("nearest gradient", text)

    def test_an_accumulated_window_is_no_sum_for_mean(self):
        # 2 micro-batches, 4 per generation batch: this trainer's mean is twice the mean over the micro-batch's tokens. With
        # 4 rows, 2 times 2 steps is their number, too: a sum over rows, divided by the steps, is the same number.
        for rows, steps, generation in ((4, 2, 4), (8, 4, 2)):
            batch = with_loss(trainer_batch(rows), right, 2.0)
            report = audited({**batch, "accumulation_steps": steps, "steps_per_generation": generation}, "bnpo")
            with self.subTest(rows=rows):
                self.assertEqual([f.name for f in report.findings if f.severity != "note"], [])


class Severity(unittest.TestCase):
    def test_a_right_loss_outside_the_table_is_no_mistake_against_a_declaration(self):
        report = audited(with_loss(trainer_batch(), of_no_family), "grpo@trl-1.16.0")
        self.assertIn("declared_not_seen", report.named())
        self.assertEqual(report.worst(), "warning")

    def test_a_gradient_whose_value_does_not_fit_is_not_clip_without_min(self):
        batch = with_loss(trainer_batch(), without_min)
        batch["loss"] = batch["loss"] + 0.5
        report = audited(batch)
        self.assertNotIn("clip_without_min", report.named())
        self.assertIsNot(report.worst(), "mistake")

    def test_densities_above_1_are_no_mistake(self):
        # A Gaussian with a standard deviation of 0.1 has density 3.99 at its mean: log 1.38.
        report = audited({"logps": [1.38, 0.5, -2.0], "old_logps": [1.3, 0.4, -2.0], "loss": 0.1})
        self.assertIn("log_density_above_0", report.named())
        self.assertNotIn("positive_logps", report.named())
        tokens = {"logps": [[1.38, -0.5]], "mask": [[1, 1]], "completion_ids": [[3, 4]]}
        self.assertIn("positive_logps", audited(tokens).named())

    def test_a_declared_eps_off_every_list(self):
        # A group of two: rewards 1 and 0, mean 0.5, sample std 0.7071; eps 0.05 gives +-0.5 / 0.7571 = +-0.66042.
        batch = {"logps": [[-1.0]] * 2, "mask": [[1]] * 2, "rewards": [1.0, 0.0], "group_ids": [0, 0]}
        batch["advantages"] = [0.5 / (0.5**0.5 + 0.05), -0.5 / (0.5**0.5 + 0.05)]
        report = audited(batch, "grpo@trl-1.16.0", ("std_eps=0.05",))
        self.assertEqual([f.name for f in report.findings if f.severity != "note"], [])
        self.assertIn("std_eps_differs", audited({**batch, "advantages": [0.5 / (0.5**0.5 + 1e-3)] * 1 + [-0.5 / (0.5**0.5 + 1e-3)]}, "grpo@trl-1.16.0").named())  # fmt: skip

    def test_an_edge_of_the_clip_to_float32_rounding(self):
        # One token of 131,072 sits on the edge 1.2 within the rounding of a float32 log-probability: either branch is right.
        generator = torch.Generator().manual_seed(1)
        old = -torch.rand(4096, 32, generator=generator, dtype=torch.float64) - 0.5
        batch = {
            "logps": (old + 0.2 * torch.randn(old.shape, generator=generator, dtype=torch.float64)).clamp(max=-0.01),
            "old_logps": old,
            "mask": torch.ones(old.shape, dtype=torch.bool),
            "advantages": torch.randn(4096, generator=generator, dtype=torch.float64).abs(),
        }
        for off, wrong in ((1e-8, False), (1e-3, True)):
            batch["logps"][1, 0] = old[1, 0] + np.log(1.2) + off
            made = with_loss(batch, right)
            made["logps"] = made["logps"].clone()
            made["logps"][1, 0] -= 2 * off  # what is stored lies on the other side of the edge
            with self.subTest(off=off):
                self.assertEqual("gradient_differs_in_rows" in audited(made).named(), wrong)


class Findings(unittest.TestCase):
    def test_two_findings_of_one_name_both_stay(self):
        report = audited({**with_loss(trainer_batch(), right), "clip_low": 0.3, "clip_high": 0.2, "ratio_cap": 0.5})
        self.assertEqual(report.named().count("clip_widths_unusual"), 2)

    def test_the_same_finding_twice_is_told_once(self):
        evidence = [(f.name, f.evidence) for f in audited(load("trl_grpo_grpo_pass2.npz")).findings]
        self.assertEqual(len(evidence), len(set(evidence)))

    def test_nothing_checked(self):
        batch = {"logps": [[-0.5, -0.7]], "my_old": [[-0.5, -0.6]], "mask": [[1, 1]]}
        report = audited(batch)
        self.assertEqual(report.named(), ["nothing_checked"])
        self.assertIn("my_old (did you mean old_logps?)", report.findings[0].evidence)
        for entry in manifest():
            with self.subTest(entry["file"]):
                self.assertNotIn("nothing_checked", audit(read_recording(CAPTURES / entry["file"])).named())

    def test_advice_asks_for_nothing_that_is_there(self):
        recording = recording_from({"gamma": 0.9, "lam": 0.8, "beta": 0.1})
        advice = "record gamma, lam, terminal_values and both flags"
        self.assertEqual(advice_left(advice, recording), "record terminal_values, both flags")
        self.assertEqual(advice_left("record beta", recording), "")
        self.assertEqual(advice_left("slice the mask: beta", recording), "slice the mask: beta")
        for file in ("trl_grpo_grpo_pass2.npz", "trl_dpo_sigmoid.npz"):
            arrays = load(file)
            arrays["loss"] = arrays["loss"] + 0.123
            report = audited(arrays)
            for text in (*report.missing, *(f.advice for f in report.findings)):
                for name in arrays:
                    self.assertNotRegex(text, rf"^record {name}\b|^{name}\b", f"{file} has {name}")

    def test_the_critic_alone_has_a_critics_rows(self):
        match = audit(read_recording(CAPTURES / "verl_value_loss_token_mean.npz")).as_json()["loss"]["matches"][0]
        self.assertIn("ppo@verl-0.9.1", match["rows"])
        self.assertNotIn("dapo", match["rows"])
        self.assertNotIn("cispo", match["rows"])

    def test_one_environment_as_a_column(self):
        # gamma 0.5, lambda 1, values 0, rewards 1, 2, 4 and an end: returns 1 + 2 / 2 + 4 / 4 = 3, 2 + 4 / 2 = 4, 4.
        flat = {"rewards": [1.0, 2, 4], "values": [0.0, 0, 0], "terminated": [0, 0, 1], "truncated": [0, 0, 0]}
        flat |= {"advantages": [3.0, 4, 4], "gamma": 0.5, "lam": 1.0}
        column = {name: np.asarray(v)[:, None] if np.ndim(v) else v for name, v in flat.items()}
        for batch in (flat, column):
            report = audited(batch)
            self.assertEqual([f.name for f in report.findings if f.severity != "note"], [])
            self.assertTrue(report.advantages["matches"])


class Unchanged(unittest.TestCase):
    def test_the_recording_is_left_as_it_is(self):
        for file, declared, settings in (
            ("trl_dpo_sigmoid.npz", "dpo", ("beta=0.1",)),
            ("trl_grpo_grpo_pass2.npz", "grpo", ("clip_high=0.28", "accumulation_steps=2")),
            ("sb3_gae_terminate.npz", None, ("gamma=0.9",)),
        ):
            files = [entry["file"] for entry in manifest() if entry["file"].startswith(file.removesuffix(".npz"))]
            recording = read_recording(CAPTURES / files[0])
            before = copy.deepcopy(recording)
            audit(recording, *parse_declared(declared, settings))
            with self.subTest(file):
                self.assertEqual(recording.numbers, before.numbers)
                self.assertEqual(recording.remarks, before.remarks)
                self.assertEqual(list(recording.arrays), list(before.arrays))
                for name, value in before.arrays.items():
                    np.testing.assert_array_equal(recording.arrays[name], value)


class Set(unittest.TestCase):
    def test_a_word_a_whole_number_and_a_key_given_twice(self):
        row, numbers = parse_declared("dpo", ["loss=ipo"])
        self.assertEqual((row.row.loss, row.row.name, numbers), ("ipo", "ipo", {}))
        for settings, words in (
            (["std_ddof=1.7"], "whole number"),
            (["beta=0.1", "beta=0.2"], "twice"),
            (["kl_coef=0.2", "beta=0.1"], "twice"),
            (["clip_low=0.2", "epsilon_low=0.1"], "twice"),
            (["reduction=mean_of_nothing"], "wanted one of"),
            (["clip_hihg=0.2"], "near: clip_high"),
        ):
            with self.subTest(settings), self.assertRaisesRegex(ValueError, words):
                parse_declared("grpo", settings)
        self.assertEqual(parse_declared("simpo", ["gamma=1.4"])[1], {})  # SimPO's margin is no discount
        self.assertEqual(parse_declared("grpo", ["kl_coef=0.2"])[0].row.kl_coef, 0.2)


class Status(unittest.TestCase):
    """Exit 1 is a finding, and nothing else is."""

    def start(self, *arguments: str, cwd: Path = ROOT, code: str = "", **streams) -> subprocess.Popen:
        program = ["-c", code] if code else ["-m", "extensions.audit"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([sys.executable, "-B", *program, *arguments], cwd=cwd, env=environment, **streams)

    def test_streams_errors_of_ours_and_any_folder(self):
        clean = str(CAPTURES / "trl_grpo_grpo_pass2.npz")
        broken = (
            "import sys, extensions.audit.command as c\n"
            "def bad(*a): raise KeyError('a bug of ours')\n"
            "c.audit = bad\n"
            f"c.main([{clean!r}])"
        )
        pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with tempfile.TemporaryDirectory() as folder:
            by_path = [sys.executable, "-B", str(ROOT / "extensions" / "audit"), clean]
            elsewhere = subprocess.Popen(by_path, cwd=folder, **pipe)
            ours = self.start(code=broken, **pipe)
            closed_read, closed_write = os.pipe()
            os.close(closed_read)
            closed = self.start("--list", stdout=closed_write, stderr=subprocess.PIPE, text=True)
            os.close(closed_write)
            full = None
            if Path("/dev/full").exists():
                with open("/dev/full", "w") as stream:
                    full = self.start(clean, stdout=stream, stderr=subprocess.PIPE, text=True)
            out, err = elsewhere.communicate()
            self.assertEqual((elsewhere.returncode, err), (0, ""))
            self.assertIn("Findings\n  none", out)
            out, err = ours.communicate()
            self.assertEqual(ours.returncode, 2)
            self.assertRegex(err, r"an error inside the audit \(KeyError at .*a bug of ours.*please report it")
            self.assertNotIn("do not fit", err)
            self.assertEqual(len(err.splitlines()), 1)
            closed.communicate()
            self.assertEqual(closed.returncode, 2)
            if full is not None:
                _, err = full.communicate()
                self.assertEqual(full.returncode, 2)
                self.assertRegex(err, "cannot print")


if __name__ == "__main__":
    unittest.main()
