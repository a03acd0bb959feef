"""The command: what it prints and writes, wrong input in one line, and the disputes of README.txt, each by its number."""

import contextlib
import dataclasses
import io
import json
import re
import tempfile
import unittest
from pathlib import Path

from extensions.estimators import policy
from extensions.estimators.command import main, merged
from extensions.estimators.line import Line
from extensions.estimators.tables import DEFAULT_CASES, TABLES
from extensions.estimators.testing import NumberCase
from extensions.objectives import ROWS
from extensions.objectives.rows_pairs import PREFERENCE_ROWS

README = Path(__file__).with_name("README.txt")


def output_of(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(a) for a in arguments])
            code = 0
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()


class Printed(NumberCase):
    def test_a_table_of_the_readers_own_numbers(self):
        code, out, err = output_of("--table", "advantages", "--probabilities", "0.9,0.07,0.03", "--rewards", "1,0.2,-0.5",
                                   "--group-size", "8")  # fmt: skip
        self.assertEqual((code, err), (0, ""))
        self.assertIn("p 0.9,0.07,0.03; R 1,0.2,-0.5; G 8", out)
        part = out[out.index("\nV = J\n") :]
        self.assertIn("tr Cov 0.018517", part[:200])

    def test_lines_fit_eighty_columns(self):
        for name in TABLES:
            _, out, _ = output_of("--table", name)
            self.assertLessEqual(max(map(len, out.splitlines())), 80, name)

    def test_equal_numbers_become_one_line_and_no_name_is_lost(self):
        lines = TABLES["advantages"](DEFAULT_CASES["advantages"])
        shown = [name for line, others in merged(lines) for name in (line.estimator, *others)]
        self.assertEqual(sorted(shown), sorted(line.estimator for line in lines))
        self.assertLess(len(list(merged(lines))), len(lines) / 2)

    def test_a_reference_alone_goes_to_the_tables_with_as_many_answers(self):
        code, out, err = output_of("--reference", "0.2,0.3,0.5")
        self.assertEqual((code, err), (0, ""))
        self.assertIn("p 0.7,0.2,0.1; R 1,0.2,-0.5; G 4; reference 0.2,0.3,0.5", out)
        self.assertIn("p 0.1,0.9; R 1,0; G 8\n", out)

    def test_what_cannot_be_evaluated_is_said(self):
        _, out, _ = output_of("--table", "advantages")
        flat = " ".join(out.split())
        self.assertIn("left out: / mean, maxrl: divides by the mean reward of the group", flat)

    def test_power(self):
        code, out, _ = output_of("--power", "0.0078")
        self.assertEqual(code, 0)
        self.assertIn("90410 answers of each", out)
        self.assertNotIn("=====\nadvantages", out)
        self.assertLessEqual(max(map(len, out.splitlines())), 80)


class Files(NumberCase):
    def test_json_has_every_table_with_the_columns_of_a_line(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "out.json"
            self.assertEqual(output_of("--json", path)[0], 0)
            document = json.loads(path.read_text())
        self.assertEqual(set(document), {name.replace("-", "_") for name in TABLES})
        columns = {field.name for field in dataclasses.fields(Line)}
        self.assertLessEqual({"estimator", "row", "mean", "cosine", "scale", "trace_cov", "mse"}, columns)
        for name, lines in document.items():
            self.assertTrue(lines, name)
            for line in lines:
                self.assertEqual(set(line), columns)
                self.assertTrue(line["row"] is None or line["row"] in ROWS | PREFERENCE_ROWS, line)
                truth_is_zero = line["scale"] is None
                self.assertTrue(truth_is_zero or line["mse"] >= line["trace_cov"] - 1e-12, line)

    def test_figure(self):
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError:
            self.skipTest("matplotlib is not installed")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "out.svg"
            code, out, _ = output_of("--table", "kl", "--plot", path)
            self.assertEqual(code, 0)
            self.assertIn("<svg", path.read_text()[:2000])
            two = Path(folder) / "two.svg"
            own = ("--probabilities", "0.3,0.7", "--rewards", "1,0")
            self.assertEqual(output_of("--table", "binary", *own, "--plot", two)[0], 0)


class BadInput(NumberCase):
    def test_ends_with_2_and_one_line_that_names_the_flag(self):
        own = ("--probabilities", "0.5,0.5", "--rewards", "1,0")
        bad = {
            "--probabilities: the numbers sum to 0.9, wanted 1": ("--probabilities", "0.5,0.4", "--rewards", "1,0"),
            "--rewards: got 3 numbers for 2 probabilities": ("--probabilities", "0.5,0.5", "--rewards", "1,0,2"),
            "--probabilities: wants --rewards beside it": ("--probabilities", "0.5,0.5"),
            "--rewards: wants --probabilities beside it": ("--rewards", "0.5,0.5"),
            "--probabilities: got 'a'": ("--probabilities", "a", "--rewards", "1"),
            "--group-size: got 1, wanted at least 2: leave-one-out": ("--table", "advantages", "--group-size", "1"),
            "--reference: got 2 numbers, wanted 3": ("--reference", "0.5,0.5"),
            "--behaviour: got 1,0, wanted each above 0": (*own, "--behaviour", "1,0"),
            "outcomes to enumerate, wanted at most 5,000,000: lower the group size": (
                "--table", "advantages", "--probabilities", ",".join(["0.1"] * 10), "--rewards", ",".join("1234567890"),
                "--group-size", "20",
            ),
            "--power: got '0', wanted a number above 0": ("--power", "0"),
            "--power: the true gradient is 0": ("--power", "0.1", "--probabilities", "0.5,0.5", "--rewards", "1,1"),
            "--table: invalid choice": ("--table", "nothing"),
            "--of: got 'x', wanted MODULE:FUNCTION": ("--of", "x"),
            "--of: no_such_module cannot be imported": ("--of", "no_such_module:f"),
        }  # fmt: skip
        for says, arguments in bad.items():
            with self.subTest(says):
                code, _, err = output_of(*arguments)
                self.assertEqual(code, 2)
                self.assertIn(says, err)
                self.assertEqual(err.count("\n"), 1, "one line")


class Disputes(NumberCase):
    """README.txt decides each dispute by one number that a command prints; here it is computed again."""

    def line(self, table, estimator, **case):
        of = dataclasses.replace(DEFAULT_CASES[table], **case)
        return next(line for line in TABLES[table](of) if line.estimator == estimator)

    def test_every_number_is_in_the_manual(self):
        loo2, J2 = (self.line("advantages", name, group_size=2).trace_cov for name in ("leave-one-out", "V = J"))
        E3 = policy.E3.probabilities
        none, J = (self.line("advantages", n, probabilities=E3, group_size=8).trace_cov for n in ("no baseline", "V = J"))
        numbers = {
            "centring": (self.line("advantages", "group mean").scale, 0.75, "0.750000"),
            "two rollouts": (self.line("binary", "q=0.1 G=2: / std, ddof 0").scale, 1.0, "1.0000"),
            "price of two rollouts": (loo2 / J2, 3.449, "3.45"),
            "k3 in the loss": (self.line("kl", "k3 in the loss").cosine, 0.969919, "0.969919"),
            "k3 in the reward": (self.line("kl", "k3 in the reward").cosine, -0.578441, "-0.578441"),
            "critic": (J / none, 7.53, "7.53"),
            "per-response mean": (self.line("lengths", "G=2: std, per-response mean (GRPO)").cosine, 0.952605, "0.952605"),
        }
        manual = README.read_text()
        for name, (got, wanted, printed) in numbers.items():
            with self.subTest(name):
                decimals = 10.0 ** -len(printed.split(".")[1])
                self.assertClose(got, wanted, max(0.51 * decimals, 5e-7))
                self.assertClose(float(printed), got, 0.51 * decimals)
                self.assertIn(printed, manual)

    def test_truncation_is_biased_and_nearer(self):
        lines = {line.estimator: line for line in TABLES["off-policy"](DEFAULT_CASES["off-policy"])}
        capped = [line for name, line in lines.items() if re.search(r"1\.5", name) and abs(line.mse - 0.064596) < 1e-6]
        self.assertTrue(capped, "TIS with cap 1.5 is in the table")
        self.assertLess(capped[0].cosine, 1 - 1e-3)
        self.assertLess(capped[0].mse, 0.110734, "less error than the unbiased weight")
        clipped = [line for line in lines.values() if abs((line.cosine or 0) - 0.502991) < 1e-6]
        self.assertTrue(clipped, "PPO's clip far from the sampler")
        manual = README.read_text()
        for printed in ("0.996569", "0.064596", "0.110734", "0.502991"):
            self.assertIn(printed, manual)

    def test_help_says_that_own_code_runs_here(self):
        code, out, _ = output_of("--help")
        self.assertEqual(code, 0)
        self.assertIn("RUNS IN THIS PROCESS", " ".join(out.split()))


if __name__ == "__main__":
    unittest.main()
