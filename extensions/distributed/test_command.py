"""The command as a user calls it: alone, under torchrun, with wrong flags, and when a rank dies."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from extensions.distributed import command, mistakes
from extensions.distributed.ranks import HOST
from rl_lab import FileProblem

TOP = Path(__file__).resolve().parents[2]
LIMIT = 120  # seconds for a whole program on a busy machine


def call(*arguments):
    """Exit status, stdout and stderr of the command in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command.main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
            err.write("" if isinstance(end.code, int) else f"{end.code}\n")
    return code, out.getvalue(), err.getvalue()


def started(*words: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-B", *words], cwd=TOP, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


class Alone(unittest.TestCase):
    def test_table_and_json(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "new" / "distributed.json"
            code, out, err = call("--json", path)
            self.assertEqual((code, err), (0, ""))
            document = json.loads(path.read_text(encoding="utf-8"))
        self.assertEqual([row["rule"] for row in document["rows"]], list(mistakes.NAMES))
        for row in document["rows"]:
            self.assertEqual(set(row), {"rule", "ranks", "micro_batches", "relative_error", "cosine"})
            self.assertEqual((row["ranks"], row["micro_batches"]), (2, 2))
        self.assertLess(document["rows"][0]["relative_error"], mistakes.AGREES)
        self.assertRegex(out, "(?m)^mean_of_means +5.64 +-0.0175  S / n / M")
        self.assertRegex(out, "(?m)^right +same +1.0000$")
        self.assertLessEqual(max(map(len, out.replace(str(path), "").splitlines())), 80)

    def test_more_ranks_than_prompts_and_other_wrong_flags(self):
        for arguments, words in (
            (("--ranks", 9), "argument --ranks: got '9', wanted a whole number from 1 to 8"),
            (("--ranks", 0), "--ranks"),
            (("--micro-batches", "two"), "got 'two', wanted a whole number from 1 to 8"),
            (("--grid", "--ranks", 2), "--grid"),
            (("--port", 70000), "--port: got '70000'"),
        ):
            code, out, err = call(*arguments)
            self.assertEqual((code, out, len(err.splitlines())), (2, "", 1), err)
            self.assertIn(words, err)

    def test_a_port_in_use(self):
        with socket.socket() as taken:
            taken.bind((HOST, 0))
            taken.listen()
            code, _, err = call("--port", taken.getsockname()[1])
        self.assertEqual((code, len(err.splitlines())), (1, 1), err)
        self.assertRegex(err, "port [0-9]+ of 127.0.0.1 is in use")

    def test_a_file_that_cannot_be_written_is_found_before_the_ranks_start(self):
        with self.assertRaisesRegex(FileProblem, "cannot be written"):
            command.main(["--json", "/dev/null/x.json"])

    def test_a_gradient_of_zero_has_no_cosine(self):
        row = mistakes.Measured("local_whitening", 8, 1, 1.0, float("nan"))
        self.assertEqual(command.angle(row.cosine, 4), "none")
        self.assertIsNone(command.as_json([row], [])["rows"][0]["cosine"])


class AsAProgram(unittest.TestCase):
    def test_under_torchrun(self):
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "extensions.distributed"]
        with started(*words, "--micro-batches", "1") as program:
            out, err = program.communicate(timeout=LIMIT)
        self.assertEqual(program.returncode, 0, err)
        self.assertEqual(out.count("mean_of_means"), 1, "rank 0 prints, and no other")
        self.assertRegex(out, "(?m)^mean_of_means +0.1405 +0.9960")


if __name__ == "__main__":
    unittest.main()
