"""The command: worked examples, the table, a row explained, a reader's file, the figure."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import os
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import numpy as np
import torch

import rl_lab
from extensions import objectives
from extensions.objectives import PREFERENCE_ROWS, ROWS, command, evaluate, figure, worked
from extensions.objectives.oracle import CAPTURES, small_batch
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)


class CommandLine(unittest.TestCase):
    def run_main(self, *arguments: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            command.main(list(arguments))
        return printed.getvalue()

    def test_worked_examples_agree(self):
        examples = worked.worked_examples()
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
            self.assertIn(f"{name}\n  source   {row.source}", objectives.explain(row, small_batch()))
        for name, row in PREFERENCE_ROWS.items():
            data = objectives.small_preferences(small_batch())
            self.assertIn(f"{name}\n  source   {row.source}", objectives.explain_preference(row, data))
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
            with open(Path(folder) / "one.npz", "wb") as file:
                np.save(file, np.zeros(3))
            np.savez(Path(folder) / "both.npz", logps=np.zeros((2, 3)), per_token_logps=np.ones((2, 3)))
            for path, message in (
                (Path(folder) / "none.npz", "No such file"),
                (text, "not a whole zip archive"),
                (pickled, "Python objects; they are never unpickled"),
                (odd, "wanted at least logps and mask"),
                (short, "logps: got nan at row 0, position 0"),
                (Path(folder) / "one.npz", "one array without a name"),
                (Path(folder), "not a regular file"),
                (Path(folder) / "both.npz", "logps and per_token_logps both mean logps"),
            ):
                with self.subTest(path=path.name), self.assertRaisesRegex(rl_lab.FileProblem, message):
                    self.run_main("--batch", str(path))
        # Names as another trainer has them, and a .pt file, are read as the audit reads them.
        arrays = dict(np.load(CAPTURES / "trl_grpo_grpo_pass2.npz"))
        with tempfile.TemporaryDirectory() as folder:
            names = {"logps": "per_token_logps", "mask": "completion_mask", "old_logps": "old_per_token_logps"}
            renamed = {names.get(name, name): torch.as_tensor(value) for name, value in arrays.items()}
            torch.save(renamed, Path(folder) / "batch.pt")
            line = next(x for x in self.run_main("--batch", f"{folder}/batch.pt").splitlines() if x.startswith("grpo@trl"))
            self.assertIn("-0.094331", line)
        with self.assertRaisesRegex(rl_lab.FileProblem, "grpo also needs old_logps"):
            self.run_main("--batch", str(CAPTURES / "trl_kto_default.npz"), "--objective", "grpo")

    def test_a_file_problem_names_the_command(self):
        """A package's command is told under the package's name, a file's under its own: never __main__.py."""
        for argv, name in (("lab/extensions/objectives/__main__.py", "python -m extensions.objectives"), ("lab/a.py", "a.py")):
            with mock.patch.object(sys, "argv", [argv]), self.assertRaises(SystemExit) as stopped:
                rl_lab.run_command(lambda: self.run_main("--batch", "no-such-file.npz"))
            self.assertEqual(stopped.exception.code, f"{name}: error: --batch no-such-file.npz: No such file or directory")

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
        curves = figure.gradient_curves(1.0, np.array([0.5, 1.2, 1.3]))
        np.testing.assert_allclose(curves["clip"], [-0.5, -1.2, 0.0])
        np.testing.assert_allclose(curves["cispo"], [-0.8, -1.2, -1.28])
        weights = figure.weight_curves(np.array([10, 100]), budget=50)
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
