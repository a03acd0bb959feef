"""The list of mutants still fits the source, and a few of them are really run and really caught.

Running all mutants is a command of its own: `python -m verification.mutations`.
"""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from verification import mutations


class Teeth(unittest.TestCase):
    CAUGHT = ("clip: maximum", "groups: sample standard deviation")
    HOLE = "value clip: minimum"  # the tests chosen below say nothing of it

    @classmethod
    def setUpClass(cls):
        cls.sources = mutations.read_sources()
        cls.mutants = mutations.all_mutants(
            cls.sources
        )  # refuses a hand-written change whose text is not there exactly once
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        command = [sys.executable, "-m", "verification.mutations", "--only", *cls.CAUGHT, cls.HOLE]
        command += ["--tests", "test_rl_lab.PolicyObjectives", "--output", str(Path(cls.folder.name) / "results.jsonl")]
        cls.running = subprocess.Popen(
            command, cwd=mutations.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )  # beside the other tests of this class
        cls.addClassCleanup(cls.running.communicate)

    def test_every_mutant_is_another_program(self):
        self.assertEqual(
            {m.topic for m in self.mutants if m.topic}, {t for rows in mutations.HAND_WRITTEN.values() for t, *_ in rows}
        )
        self.assertEqual(len({m.key for m in self.mutants}), len(self.mutants))
        for mutant in self.mutants:
            changed = mutant.apply(self.sources[mutant.file])
            self.assertNotEqual(changed, self.sources[mutant.file], mutant.key)
        for mutant in self.mutants[::200]:  # the command itself refuses one that is no program
            compile(mutant.apply(self.sources[mutant.file]), mutant.file, "exec")

    def test_every_listed_equivalent_is_still_a_mutant_and_has_a_reason(self):
        """Those of a function that was changed since are dropped with a notice; that is no failure."""
        keys = {mutant.key for mutant in self.mutants}
        listed = json.loads(mutations.EQUIVALENT.read_text(encoding="utf-8"))
        everything = [key for group in listed["groups"] for key in group["mutants"]]
        self.assertEqual(len(everything), len(set(everything)))
        self.assertEqual(set(map(mutations.place_of, everything)), set(listed["functions"]))
        equivalents = mutations.read_equivalents(self.sources)
        self.assertEqual([key for key in equivalents.reasons if key not in keys], [])
        for group in listed["groups"]:
            self.assertGreater(len(group["reason"].split()), 3)
            self.assertTrue(group["mutants"])

    def test_a_changed_function_drops_its_equivalents_and_no_other(self):
        before = "def f(x):\n    return max(x, 0)\n\n\ndef g(x):\n    return max(x, 0)\n"
        listed = {"functions": {**mutations.function_stamps("f.py", before), "h.py f": "as it was"}}
        listed["groups"] = [{"reason": "so it is here", "mutants": ["f.py f: 0 -> 1", "f.py g: 0 -> 1", "h.py f: 0 -> 1"]}]
        changes = (
            (before, []),
            (before.replace("def g", "# a word\n\ndef g").replace("f(x):", 'f(x):\n    """What it does."""'), []),
            (before.replace("max(x, 0)", "max(\n        x, 0\n    )"), []),
            ("\n\nimport sys\n" + before + "def h(x):\n    return 0\n", []),
            (before.replace("return max(x, 0)", "return max(x, 0, 0)", 1), ["f.py f: 0 -> 1"]),
            (before.partition("def g")[0], ["f.py g: 0 -> 1"]),
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "equivalent.json"
            with mock.patch.object(mutations, "EQUIVALENT", path):
                for after, dropped in changes:
                    with self.subTest(after=after):
                        path.write_text(json.dumps(listed), encoding="utf-8")
                        found = mutations.read_equivalents({"f.py": after})
                        self.assertEqual(list(found.dropped), dropped)
                        self.assertEqual(len(found.reasons), 2 - len(dropped))
                        self.assertEqual(found.notice().count("changed since"), len(dropped))
                        mutations.restamp({"f.py": after})
                        again = mutations.read_equivalents({"f.py": after})
                        self.assertEqual(again.notice(), "")
                        self.assertEqual(json.loads(path.read_text())["groups"][0]["mutants"][-1], "h.py f: 0 -> 1")

    def test_files_of_an_extension_and_the_tests_that_are_meant_for_them(self):
        file = "extensions/trust_region/step.py"
        own = ["extensions.trust_region.test_environment", "extensions.trust_region.test_trust_region"]
        self.assertEqual(mutations.test_modules([file]), own)
        self.assertIn("test_rl_lab", mutations.test_modules(["rl_lab.py"]))
        of_the_audit = mutations.test_modules(["extensions/audit/search/loss.py"])
        self.assertLess({"verification.test_audit_table", "extensions.audit.test_captures"}, set(of_the_audit))
        self.assertFalse(any(name.startswith("extensions.objectives") for name in of_the_audit))
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            files = [str(mutations.ROOT / name) for name in (file, "test_rl_lab.py")]
            mutations.main(["--list", "--sample", "60", "--files", *files])
        self.assertEqual(len(set(out.getvalue().splitlines())), 60)
        self.assertEqual({line.partition(":")[0] for line in out.getvalue().splitlines()}, {file})

    def test_mechanical_mutants_of_a_small_source(self):
        source = (
            '"""Doc."""\nLIMIT = 2\n\n\ndef f(x, y: int = 0.5):\n    """Doc."""\n    if x < LIMIT and not y:\n'
            '        raise ValueError(f"{x} {1 + 1}")\n    print("a", 3)\n    return max(x - y, g(x, key="a b"), key=True)\n'
        )
        found = {(m.line, m.text) for m in mutations.mechanical_mutants("f.py", source)}
        wanted = {
            (2, "3"),
            (2, "1"),
            (5, "1.0"),
            (7, "(x < LIMIT or not y)"),
            (7, "(not y)"),
            (7, "(x < LIMIT)"),
            (7, "(x <= LIMIT)"),
            (7, "(x >= LIMIT)"),
            (7, "y"),
            (7, "not (x < LIMIT and (not y))"),
            (8, "pass"),
            (9, "pass"),
            (10, "min"),
            (10, "(x - y)"),
            (10, "max(g(x, key='a b'), x - y, key=True)"),
            (10, "max(x - y, g(x, key='a b'))"),
            (10, "(x + y)"),
            (10, "x"),
            (10, "g(x)"),
            (10, "False"),
        }
        self.assertEqual(found, wanted)

    def test_a_text_that_moved_is_noticed(self):
        name = "token_objectives.py"
        for broken in ("", self.sources[name] * 2):
            with self.assertRaisesRegex(ValueError, "wanted once"):
                mutations.hand_written_mutants(name, broken)

    def test_mutants_are_run_and_caught_and_a_hole_is_told(self):
        out, err = self.running.communicate()
        self.assertEqual(self.running.returncode, 1, err)
        for topic in self.CAUGHT:
            self.assertRegex(out, rf"killed +rl_lab.py:\d+  {topic}: .*\n +by test_rl_lab.PolicyObjectives.test_")
        self.assertRegex(out, rf"SURVIVED +rl_lab.py:\d+  {self.HOLE}: ")
        self.assertRegex(out, r"\ntotal +2 +0 +1 +0\n$")

    def test_bad_flags(self):
        for arguments, words in (
            (["--jobs", "0"], "--jobs: got 0"),
            (["--only", "no such mutant"], "no mutant contains"),
            (["--sample", "0"], "--sample: got 0"),
            (["--files", "nothing.py"], "--files: nothing.py: wanted a Python file"),
        ):
            err = io.StringIO()
            with self.assertRaises(SystemExit) as stop, contextlib.redirect_stderr(err):
                mutations.main(arguments)
            self.assertEqual(stop.exception.code, 2)
            self.assertIn(words, err.getvalue())


if __name__ == "__main__":
    unittest.main()
