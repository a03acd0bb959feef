"""Which files are read, and how damaged and hostile ones are refused."""

from __future__ import annotations

import json
import tempfile
import unittest
from pathlib import Path

import numpy as np
import torch

from extensions.audit import audit
from extensions.audit.proof.damaged import _Hostile, survive
from extensions.audit.proof.truth import load
from extensions.audit.read.recording import read_recording, recording_from
from extensions.audit.say.report import printed
from extensions.read.names import ALIASES
from rl_lab import FileProblem
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)


class Reading(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def test_damaged_files(self):
        outcome = survive(120, self.folder)
        refused = sum(kinds["refused"] for kinds in outcome.values())
        self.assertGreater(refused, 53)
        self.assertEqual(outcome["objects"]["audited"], 0)
        self.assertEqual(outcome["lying_header"]["audited"], 0)
        self.assertEqual(outcome["bomb"]["audited"], 0)

    def test_a_small_file_does_not_become_a_large_array(self):
        # 3 MB of zeros in 3 kB, allowed as flags, would be 24 MB as numbers.
        path = self.folder / "zeros.npz"
        np.savez_compressed(path, mask=np.ones((3000, 1000), dtype=bool), loss=0.5)
        self.assertEqual(read_recording(path).arrays["mask"].shape, (3000, 1000))
        np.savez_compressed(path, logps=np.zeros((3000, 1000), dtype=np.int8), loss=0.5)
        with self.assertRaisesRegex(FileProblem, "would become 24000008, wanted at most"):
            read_recording(path)

    def test_a_reading_whose_tie_has_no_ratio(self):
        """Log-probabilities a thousand times too large: the tied readings have another gate, without the bound's quantity."""
        arrays = load("verl_loss_gspo_wide.npz")
        arrays["logps"] = arrays["logps"] * 1000.0
        np.savez(self.folder / "wide.npz", **arrays)
        self.assertTrue(printed(audit(read_recording(self.folder / "wide.npz")), "wide.npz"))

    def test_numbers_at_the_end_of_their_range(self):
        """A beta whose square overflows or is 0 is not tried squared; positive log-probabilities beside no `logps`."""
        for beta in (1e300, 1e-300):
            arrays = load("trl_dpo_sigmoid.npz") | {"beta": np.float64(beta)}
            self.assertTrue(printed(audit(recording_from(arrays)), "beta.npz"))
        arrays = load("verl_rewards_with_kl.npz")
        self.assertNotIn("logps", recording_from(arrays).arrays)
        arrays["ref_logps"] = np.abs(arrays["ref_logps"]) + 1.0
        found = {finding.name for finding in audit(recording_from(arrays)).findings}
        self.assertIn("positive_logps", found)

    def test_the_trap_works(self):
        # What the hostile files carry would write the file that survive() looks for.
        import pickle

        path = str(self.folder / "run")
        pickle.loads(pickle.dumps(_Hostile(path)))
        self.assertTrue(Path(path).exists())

    def test_every_format_gives_the_same_report(self):
        arrays = load("trl_grpo_grpo_pass2.npz")
        arrays = {name: arrays[name] for name in ("logps", "old_logps", "mask", "advantages", "loss", "dloss_dlogps")}
        np.savez(self.folder / "a.npz", **arrays)
        torch.save(
            {name: torch.as_tensor(np.ascontiguousarray(value)) for name, value in arrays.items()}, self.folder / "a.pt"
        )
        lines = []
        for row in range(len(arrays["mask"])):
            entry = {name: arrays[name][row].tolist() for name in ("logps", "old_logps", "dloss_dlogps")}
            lines.append(
                json.dumps(
                    {
                        **entry,
                        "mask": arrays["mask"][row].astype(int).tolist(),
                        "advantages": float(arrays["advantages"][row]),
                        "loss": float(arrays["loss"]),
                    }
                )
            )
        (self.folder / "a.jsonl").write_text("\n".join(lines))
        names = ["a.npz", "a.pt", "a.jsonl"]
        try:
            from safetensors.torch import save_file
        except ImportError:
            (self.folder / "a.safetensors").write_bytes(b"x" * 20)
            with self.assertRaisesRegex(FileProblem, "needs the package safetensors"):
                read_recording(self.folder / "a.safetensors")
        else:
            save_file(
                {name: torch.as_tensor(np.ascontiguousarray(value)) for name, value in arrays.items()},
                self.folder / "a.safetensors",
            )
            names.append("a.safetensors")
        for name in names:
            report = audit(read_recording(self.folder / name))
            self.assertEqual(report.loss["matches"][0]["reduction"], "mean_per_response", name)
            self.assertTrue(report.gradient["agrees"], name)

    def test_names_of_trainers(self):
        verl = {
            "log_prob": [[-1.0, -2.0]],
            "old_log_probs": [[-1.1, -2.0]],
            "response_mask": [[1, 1]],
            "uid": np.array(["a"]),
            "advantages": [[1.0, 1.0]],
        }
        recording = recording_from({name: np.asarray(value) for name, value in verl.items()})
        self.assertEqual(set(recording.arrays), {"logps", "old_logps", "mask", "group_ids", "advantages"})
        seen = [name for name, others in ALIASES.items() for name in (name, *others)]
        self.assertEqual(len(seen), len(set(seen)), "one name for two arrays")

    def test_errors_say_what_was_wanted(self):
        for arrays, words in (
            ({"logps": np.zeros((2, 3)), "old_logps": np.zeros((3, 2))}, "old_logps: got shape"),
            ({"logps": np.zeros((2, 3)), "mask": np.full((2, 3), 7)}, "wanted 0 and 1"),
            ({"logps": np.zeros((2, 3)) + 1j}, "wanted numbers"),
            ({"nothing": np.zeros(3)}, "none of these names is known"),
            ({"logps": np.zeros((0, 3))}, "an array of nothing"),
            ({"loss": np.zeros(3)}, "wanted one number"),
        ):
            with self.assertRaisesRegex(FileProblem, words):
                recording_from(arrays)
