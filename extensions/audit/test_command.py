"""The command: exit status, report, errors."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import unittest
from pathlib import Path

import numpy as np
import torch

from extensions.audit.catalogue import CATALOGUE, NOTES
from extensions.audit.command import main
from extensions.audit.proof.truth import CAPTURES, load
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)


class CommandLine(unittest.TestCase):
    def run_main(self, *arguments: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(list(arguments))
                status = 0
            except SystemExit as stop:
                status = stop.code or 0
        return status, out.getvalue(), err.getvalue()

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.clean = str(CAPTURES / "trl_grpo_grpo_pass2.npz")

    def wrong(self) -> str:
        arrays = load("trl_grpo_grpo_pass2.npz")
        arrays["dloss_dlogps"] = np.zeros_like(arrays["dloss_dlogps"])
        np.savez(self.folder / "wrong.npz", **arrays)
        return str(self.folder / "wrong.npz")

    def test_exit_status_and_report(self):
        status, out, _ = self.run_main(self.clean, "--json", str(self.folder / "report.json"))
        self.assertEqual(status, 0)
        for title in ("Batch", "Advantages", "Loss", "Gradient", "Findings"):
            self.assertIn(f"\n{title}\n", out)
        document = json.loads((self.folder / "report.json").read_text())
        self.assertEqual(document["loss"]["matches"][0]["reduction"], "mean_per_response")
        self.assertIs(document["gradient"]["agrees"], True)
        self.assertEqual(document["findings"], [])
        self.assertEqual(document["batch"]["rows"], 8)
        self.assertGreater(document["loss"]["tried"], 100)
        self.assertTrue(document["advantages"]["matches"])
        status, out, _ = self.run_main(self.wrong())
        self.assertEqual(status, 1)
        self.assertIn("ratio_detached", out)
        self.assertEqual(self.run_main(self.wrong(), "--fail-on", "never")[0], 0)

    def test_usage_and_file_errors_exit_2_in_one_line(self):
        for arguments, words in (
            ([], "BATCH"),
            ([str(self.folder / "none.npz")], "No such file"),
            ([self.clean, "--declared", "grop"], "near: "),
            ([self.clean, "--declared", "dpo"], "row for pairs"),
            ([self.clean, "--set", "clip_high"], "key=value"),
            ([self.clean, "--set", "clip_high=much"], "wanted a number"),
            ([self.clean, "--set", "colour=1"], "no number of a recording"),
            ([self.clean, "--declared", "grpo", "--set", "ratio=tokens"], "ratio: got 'tokens'"),
            ([self.clean, "--damaged", "5"], "--self-test"),
            ([self.clean, "--averaging", "sum"], "goes with a folder"),
            (["--fail-on", "note", self.clean], "invalid choice"),
        ):
            status, _, err = self.run_main(*arguments)
            self.assertEqual(status, 2, arguments)
            self.assertIn(words, err)
            self.assertEqual(err.count("\n"), 1, err)

    def test_same_bytes(self):
        first, second = (self.run_main(self.clean)[1] for _ in range(2))
        self.assertEqual(first, second)

    def test_help_and_list(self):
        status, out, _ = self.run_main("--help")
        self.assertEqual(status, 0)
        self.assertIn("old_log_probs", out)
        status, out, _ = self.run_main("--list")
        for name in (*CATALOGUE, *NOTES):
            self.assertIn(name, out)
        status, out, _ = self.run_main("--recipes")
        self.assertEqual(status, 0)
        for name in ("record(GRPOTrainer", "record_loss(", "record_loss_function(", "policy_loss_fn"):
            self.assertIn(name, out)

    def test_global_state_is_left_alone(self):
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), torch.get_default_dtype(), torch.get_num_threads()
        self.run_main(self.clean)
        after = torch.get_rng_state(), np.random.get_state()[1].tolist(), torch.get_default_dtype(), torch.get_num_threads()
        self.assertTrue(torch.equal(before[0], after[0]))
        self.assertEqual(before[1:], after[1:])
