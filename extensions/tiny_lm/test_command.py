"""The command: files, messages, what is refused."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from extensions import tiny_lm
from extensions.tiny_lm import MISTAKES, Stage, TinySettings, command
from extensions.tiny_lm.task import VERIFIERS
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)


def run_main(*arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command.main(list(arguments))
            status = 0
        except SystemExit as end:
            status = end.code
    return status, out.getvalue(), err.getvalue()


QUICK = ("--evaluation-prompts", "20", "--steps", "2", "--group-prompts", "2", "--group-size", "2", "--evaluate-every", "1")


class CommandLine(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.output = Path(folder.name)

    def test_bad_flags_exit_2_with_one_line(self):
        for wanted, arguments in (
            ("--algorithm", ["--algorithm", "pg"]),
            ("--group-size: got '1'", ["--group-size", "1"]),
            ("--kl: got '-1'", ["--kl", "-1"]),
            ("--steps: got '2.5'", ["--steps", "2.5"]),
            ("--objective: got 'grpp'", ["--algorithm", "grpo", "--objective", "grpp"]),
            ("--objective: dapo trains", ["--algorithm", "ppo", "--objective", "dapo"]),
            ("--objective: name one --algorithm", ["--objective", "dapo"]),
            ("--mistake: name one --algorithm", ["--mistake", "dropout"]),
            ("--mistake: dropout makes no difference to sft", ["--algorithm", "sft", "--mistake", "dropout"]),
            ("--public-tests: the verifier exact has none", ["--algorithm", "grpo", "--public-tests", "4"]),
            ("--verifier: sft learns from right answers", ["--algorithm", "sft", "--verifier", "subset"]),
            ("--kl: the objective dr_grpo", ["--algorithm", "grpo", "--objective", "dr_grpo", "--kl", "0.1"]),
            ("unrecognized arguments", ["--seeed", "7"]),
        ):
            status, out, err = run_main("--output", str(self.output), *arguments)
            with self.subTest(wanted):
                self.assertEqual((status, out, err.count("\n")), (2, "", 1))
                self.assertIn(wanted, err)
        self.assertEqual(list(self.output.iterdir()), [])

    def test_files_of_a_run_can_be_read_back(self):
        status, out, _ = run_main("--algorithm", "grpo", "--output", str(self.output), "--demonstrations", "8", *QUICK)
        self.assertEqual(status, 0)
        self.assertIn("sampled accuracy", out)
        self.assertEqual(
            sorted(path.name for path in self.output.iterdir()), ["grpo-samples.jsonl", "grpo.csv", "grpo.json"]
        )
        with open(self.output / "grpo.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual([row["step"] for row in rows], ["0", "1", "2"])
        self.assertTrue(all(math.isfinite(float(row["sampled_accuracy"])) for row in rows))
        document = json.loads((self.output / "grpo.json").read_text())
        self.assertEqual((document["config"]["steps"], document["config"]["kl"]), (2, 0.005))
        self.assertEqual(document["objective"]["name"], "grpo")
        records = [json.loads(line) for line in (self.output / "grpo-samples.jsonl").read_text().splitlines()]
        self.assertEqual({(record["moment"], record["split"]) for record in records},
                         {(moment, split) for moment in ("before", "after") for split in ("held-out", "training")})

    def test_an_interrupted_run_leaves_the_old_files(self):
        names = [path.name for path in tiny_lm.paths_of(self.output, "grpo").values()]
        for name in names:
            (self.output / name).write_text("old")
        update, calls = Stage.update, []

        def interrupted(stage: Stage, *arguments) -> float:
            calls.append(stage.algorithm)
            if calls.count("grpo") == 3:
                raise KeyboardInterrupt
            return update(stage, *arguments)

        with mock.patch.object(Stage, "update", interrupted), self.assertRaises(KeyboardInterrupt):
            command.main(["--algorithm", "grpo", "--output", str(self.output), "--demonstrations", "8", *QUICK])
        self.assertEqual(calls.count("grpo"), 3)
        self.assertEqual(sorted(path.name for path in self.output.iterdir()), sorted(names))
        self.assertEqual({path.read_text() for path in self.output.iterdir()}, {"old"})

    def test_help_names_every_verifier_and_mistake(self):
        status, out, _ = run_main("--help")
        self.assertEqual(status, 0)
        for name in (*VERIFIERS, *MISTAKES):
            self.assertIn(name, out)

    def test_remarks_are_those_of_the_run(self):
        before = {"reward": 0.9, "sampled_accuracy": 0.5, "greedy_accuracy": 0.8}

        def remarks(algorithm="grpo", steps=60, **after) -> str:
            settings = TinySettings(steps=steps)
            run = tiny_lm.TrainingRun(algorithm, "subset", None, settings, None, [before, before | after], [], None, None)
            return "\n".join(command.remarks(run))

        self.assertIn("learned what is checked", remarks(reward=1.0, sampled_accuracy=0.1))
        self.assertEqual(remarks(), "")  # the gap was there before: nothing was learned
        self.assertEqual(remarks(reward=1.0, sampled_accuracy=0.55), "")
        self.assertIn("12 pairs learned by heart", remarks("dpo", pair_accuracy=1.0, greedy_accuracy=0.2, pairs=12))
        self.assertEqual(remarks("dpo", pair_accuracy=1.0, greedy_accuracy=0.9, pairs=12), "")
        self.assertIn("the policy never moved", remarks("ppo", steps=10))
        self.assertEqual(remarks("ppo", steps=11), "")


if __name__ == "__main__":
    unittest.main()
