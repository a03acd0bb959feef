"""Files that a user hands over, read safely; and the one table of names."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import tempfile
import tracemalloc
import unittest
import warnings
import zipfile
from pathlib import Path

import numpy as np
import torch

from extensions.read import CANONICAL, FIELDS, did_you_mean, read_arrays, roles
from extensions.read.limits import limit
from extensions.read.named import named
from extensions.read.names import NUMBERS, ROW_ARRAYS, SECOND_ROLE, TOKEN_ARRAYS, table_text
from extensions.read.pt import _bytes_of
from rl_lab import FileProblem, one_line
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)


class Files(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def refused(self, path, words: str):
        with self.assertRaisesRegex(FileProblem, words) as caught:
            read_arrays(path)
        self.assertEqual(len(str(caught.exception).splitlines()), 1)
        str(caught.exception).encode("utf-8")  # can be printed

    def test_the_same_arrays_in_every_format(self):
        logps, mask = np.array([[-0.5, -1.5], [-0.25, 0.0]]), np.array([[1, 1], [1, 0]])
        np.savez(self.folder / "a.npz", logps=logps, mask=mask, loss=0.5)
        torch.save({"logps": torch.as_tensor(logps), "mask": mask.tolist(), "loss": 0.5}, self.folder / "a.pt")
        lines = '{"logps": [-0.5, -1.5], "mask": [1, 1], "loss": 0.5}\n{"logps": [-0.25, 0.0], "mask": [1, 0]}\n'
        (self.folder / "a.jsonl").write_text(lines)
        for suffix in ("npz", "pt", "jsonl"):
            with self.subTest(suffix):
                arrays = read_arrays(self.folder / f"a.{suffix}")
                np.testing.assert_array_equal(np.asarray(arrays["logps"]), logps)
                np.testing.assert_array_equal(np.asarray(arrays["mask"]), mask)
                self.assertEqual(float(arrays["loss"]), 0.5)

    def test_nested_lists_are_counted_and_never_unfolded(self):
        # 1000 references to a list of 1000 references to a list of 1000 numbers: 8 GB out of 15 kB.
        value = [1.0] * 1000
        for _ in range(2):
            value = [value] * 1000
        self.assertEqual(_bytes_of(value, "logps"), 8 * 1000**3)
        torch.save({"logps": value}, self.folder / "laugh.pt")
        self.refused(self.folder / "laugh.pt", "would unfold to 8000000000 bytes")
        torch.save({"logps": [value]}, self.folder / "deep.pt")
        self.refused(self.folder / "deep.pt", "nested more than 3 deep")
        torch.save({"uid": ["a" * 100_000] * 1000}, self.folder / "text.pt")
        self.refused(self.folder / "text.pt", "would unfold to 400000000 bytes")
        self.assertEqual(_bytes_of([[1, 2], [3]], "x"), 24)

    def test_short_lines_stay_in_proportion(self):
        """100,000 lines of 8 bytes: as dictionaries they took 43 MB of Python objects."""
        path = self.folder / "short.jsonl"
        path.write_bytes(b'{"a":1}\n' * 100_000)
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        read_arrays(path)
        self.assertLess(tracemalloc.get_traced_memory()[1], limit(path.stat().st_size))
        path.write_text('{"a":1,"s":"x"}\n{"s":"y","a":2}\n{"a":3,"s":"z"}\n')
        made = read_arrays(path)
        self.assertEqual((made["a"].tolist(), made["s"].tolist()), ([1, 2, 3], ["x", "y", "z"]))
        path.write_text('{"reward":1,"a":[1]}\n{"a":[2,3]}\n{"reward":3,"a":[]}\n')
        made = read_arrays(path)
        self.assertEqual(made["reward"].tolist()[::2], [1, 3])
        self.assertTrue(np.isnan(made["reward"][1]))
        self.assertEqual(made["mask"].tolist(), [[True, False], [True, True], [False, False]])
        for text, words in (
            ('{"a":1}\n{"b":1}\n', "line 2: a is missing"), ('\n{"a":[1]}\n{"a":2}\n', "line 3: a is no list"),
            ('{"a":1}\n{"a":null}\n', "line 2: a is missing"), ('{"a":["x"]}\n', "line 1: a holds something that is not a number"),
            ('{"a":"' + "x" * 5000 + '"}\n' + '{"a":"y"}\n' * 3000, "one text is 5000 long"),
        ):  # fmt: skip
            path.write_text(text)
            self.refused(path, words)

    def test_a_header_of_python_2_is_no_warning(self):
        path = self.folder / "old.npz"
        header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1L,), }\n"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("logps.npy", b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + bytes(8))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.assertEqual(read_arrays(path)["logps"].tolist(), [0.0])

    def test_another_protocol_is_no_warning(self):
        """torch.load warns of it, in three lines on stderr; an answer is an answer, a refusal one line."""
        path = self.folder / "four.pt"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps({"beta": 0.5, "logps": [[-0.5]]}, protocol=4))
            archive.writestr("archive/version", "3\n")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with contextlib.suppress(FileProblem):
                read_arrays(path)

    def test_an_index_of_many_instructions(self):
        whole = io.BytesIO()
        torch.save({"logps": torch.zeros(2, 3)}, whole)
        with zipfile.ZipFile(whole) as source, zipfile.ZipFile(self.folder / "memo.pt", "w") as copy:
            for name in source.namelist():
                data = source.read(name)
                if name.endswith("data.pkl"):
                    data = data[:2] + b"}q\x00" + b"h\x00" * 500_000 + data[2:]
                copy.writestr(name, data)
        self.refused(self.folder / "memo.pt", "more than 400000 instructions")

    def test_a_ragged_table_stays_in_proportion(self):
        rows = ["[" + ",".join(["0"] * 50_000) + "]"] + ["[0]"] * 9_999
        (self.folder / "ragged.jsonl").write_text("".join(f'{{"logps": {row}}}\n' for row in rows))
        size = (self.folder / "ragged.jsonl").stat().st_size
        self.assertGreater(8 * 50_000 * 10_000, limit(size))
        self.refused(self.folder / "ragged.jsonl", "padding would need 500000000 slots")

    def test_only_regular_files(self):
        os.symlink("self.npz", self.folder / "self.npz")
        self.refused(self.folder / "self.npz", "symbolic link")
        self.refused(self.folder, "not a regular file")
        self.refused(self.folder / "none.npz", "No such file")
        self.refused(f"{self.folder}/nul\0.npz", "not a usable file name|not a regular file")
        if hasattr(os, "mkfifo"):
            os.mkfifo(self.folder / "fifo.npz")
            self.refused(self.folder / "fifo.npz", "not a regular file")
        if Path("/dev/zero").exists():
            os.symlink("/dev/zero", self.folder / "zero.npz")
            self.refused(self.folder / "zero.npz", "not a regular file")

    def test_any_file_name(self):
        for name in (b"new\nline.npz", b"\xff\xfe.npz"):
            path = Path(os.fsdecode(os.path.join(os.fsencode(self.folder), name)))
            try:
                path.write_bytes(b"no archive")
            except OSError:
                continue  # a file system that takes only UTF-8
            with self.subTest(name):
                self.refused(path, "not a whole zip archive")
        self.assertEqual(one_line("a\nb\udcff"), "a\\nb\\udcff")

    def test_one_array_without_a_name(self):
        with open(self.folder / "plain.npz", "wb") as file:
            np.save(file, np.zeros(3))
        self.refused(self.folder / "plain.npz", "one array without a name")

    def test_names_inside_a_file_become_one_line(self):
        torch.save({"my\nname\udcff": torch.zeros(2), "loss": 1.0}, self.folder / "names.pt")
        self.assertIn("my\\nname\\udcff", read_arrays(self.folder / "names.pt"))


class Table(unittest.TestCase):
    def test_no_name_has_two_roles(self):
        seen: dict[str, str] = {}
        for field in FIELDS.values():
            for name in (field.name, *field.aliases):
                self.assertNotIn(name, seen, f"{name} is {seen.get(name)} and {field.name}")
                seen[name] = field.name
        for name, second in SECOND_ROLE.items():
            self.assertIn(second, FIELDS)
            self.assertNotEqual(CANONICAL[name], second)

    def test_names_as_further_programs_have_them(self):
        for role, names in {
            "logps": "per_token_logps log_prob newlogprob curr_logprobs pi_logprobs action_log_probs",
            "old_logps": "old_per_token_logps prox_logp prev_logprobs pi_old_logprobs old_action_log_probs b_logprobs",
            "ref_logps": "ref_log_prob base_action_log_probs reference_policy_logprobs ref_logprobs",
            "sampler_logps": "rollout_log_probs sampling_per_token_logps vllm_logprobs generation_logprobs inference_logprobs",
            "sampler_weights": "importance_sampling_ratio rollout_is_weights vllm_is_ratio",
            "mask": "completion_mask response_mask token_mask loss_mask response_masks",
            "kl_seq_logps": "policy_KL_logps",
            "dloss_dlogps": "dloss_dlog_prob dloss_dper_token_logps dloss_dnew_logprobs grad_logps",
            "dloss_dchosen_logps": "dloss_dpolicy_chosen_logps",
            "clip_high": "epsilon_high eps_clip_higher clip_ratio_high",
        }.items():
            for name in names.split():
                with self.subTest(name):
                    self.assertEqual(CANONICAL.get(name), role)

    def test_a_name_of_two_meanings_gives_way(self):
        self.assertEqual(roles(["logprobs"]), {"logps": ["logprobs"]})
        self.assertEqual(roles(["logprobs", "newlogprob"]), {"logps": ["newlogprob"], "old_logps": ["logprobs"]})
        self.assertEqual(roles(["values", "old_values"]), {"values": ["old_values"], "vpreds": ["values"]})

    def test_two_arrays_for_one_role(self):
        two = {"logps": np.zeros((2, 3)), "per_token_logps": np.ones((2, 3))}
        with self.assertRaisesRegex(FileProblem, "logps and per_token_logps both mean logps"):
            named(two)
        with self.assertRaisesRegex(FileProblem, "epsilon and epsilon_low both mean clip_low"):
            named({"epsilon": 0.2, "epsilon_low": 0.1})
        equal = named({"logps": np.zeros((2, 3)), "per_token_logps": np.zeros((2, 3)), "loss": 1.0})
        self.assertEqual(equal.remarks, ["logps and per_token_logps are equal: read once, as logps"])
        ids = named({"uid": np.array(["a", "a", "b"]), "index": np.array([7, 7, 3]), "loss": 1.0})  # the same groups
        self.assertEqual(ids.arrays["group_ids"].shape, (3,))
        with self.assertRaisesRegex(FileProblem, "both mean group_ids"):
            named({"uid": np.array(["a", "a", "b"]), "index": np.array([7, 3, 3])})

    def test_did_you_mean(self):
        for name, role in {
            "my_old": "old_logps",
            "old_log_probabilities": "old_logps",
            "advantage": "advantages",
            "respons_mask": "mask",
            "gradient_logps": "dloss_dlogps",
        }.items():
            with self.subTest(name):
                self.assertEqual(did_you_mean(name), role)
        self.assertIsNone(did_you_mean("xyzzy"))
        self.assertIn("negative", did_you_mean("neglogpacs"))
        self.assertNotEqual(did_you_mean("my_old", taken=["old_logps"]), "old_logps")

    def test_help_names_every_field_with_its_shape(self):
        text = table_text()
        for field in FIELDS.values():
            self.assertIn(f"{field.name}  ({field.shape})  {field.meaning}", text)
        self.assertIn("logps", TOKEN_ARRAYS)
        self.assertIn("rewards", ROW_ARRAYS)
        self.assertIn("loss", NUMBERS)


if __name__ == "__main__":
    unittest.main()
