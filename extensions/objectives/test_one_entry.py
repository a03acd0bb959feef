"""A new surrogate is one entry: a copy of the lab with that entry alone evaluates, explains, lists and declares it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

LAB = Path(__file__).parents[2]

ENTRY = '''
    "tethered": SurrogateChoice("J = r A - pull (r - 1)^2",
        lambda row, r, A, l, l0: Surrogate(r * A - row.pull * (r - 1) ** 2, slope_log_ratio=r * A - 2 * row.pull * (r - 1) * r),
        (CLIP_LOW, CLIP_HIGH, Number("pull", 0.5, 0, 10, "how hard the ratio is drawn to 1")), has_band=True,
        ratios=("token", "sequence_mean"), because="tethered needs a ratio with a gradient",
        words="a spring in place of the clip"),
'''

# r = 1.5, A = 1, pull 0.3: J = 1.5 - 0.3 * 0.25 = 1.425; slope 1.5 - 2 * 0.3 * 0.5 * 1.5 = 1.05; r = 1 - nothing is pulled.
SCRIPT = """
import contextlib, io, math, torch
from dataclasses import asdict, replace
from extensions import objectives
from extensions.objectives import CHOICES, NUMBERS, RANGES, ROWS, STEPS, Row, command, evaluate, explain, make_batch
from extensions.audit.declared import parse_declared

row = replace(ROWS["dr_grpo"], name="mine", baseline="given", surrogate="tethered", pull=0.3, reduction="sum_over_tokens")
batch = make_batch(logps=[math.log(1.5) - 2, -2.0], old_logps=[-2.0, -2.0], advantages=[1.0, 1.0], dtype=torch.float64)
result = evaluate(row, batch)
assert abs(result.loss.item() + 1.425 + 1) < 1e-12, result.loss
assert abs(result.dloss_dlogps[0, 0].item() + 1.05) < 1e-12 and abs(result.dloss_dlogps[1, 0].item() + 1) < 1e-12
assert result.ratio_outside_fraction == 0.5

assert Row("default").pull == 0.5 and asdict(row)["pull"] == 0.3
assert NUMBERS["surrogate", "tethered"] == ("clip_low", "clip_high", "pull") and RANGES["pull"] == (0, 10)
assert "pull" in dict(STEPS)["4  surrogate J, maximised"]
for wrong, word in (({"pull": -1}, "pull: got -1"), ({"ratio": "none"}, "without a ratio"),
                    ({"ratio": "sequence_product"}, "tethered needs a ratio")):
    try:
        replace(row, **wrong)
    except ValueError as problem:
        assert word in str(problem), problem
    else:
        raise AssertionError(wrong)

text = explain(row, batch)
assert "tethered: J = r A - pull (r - 1)^2" in text and "pull             0.3" in text, text
with contextlib.redirect_stdout(io.StringIO()) as printed:
    command.main(["--list"])
assert "J = r A - pull (r - 1)^2" in printed.getvalue() and "a spring in place of the clip" in printed.getvalue()

declared, _ = parse_declared("grpo", ["surrogate=tethered", "pull=0.3", "clip_low=0.1"])
assert declared.row.surrogate == "tethered" and declared.row.pull == 0.3

class Nothing:
    numbers = {}
    number = staticmethod(lambda name, default=None: default)
    get = staticmethod(lambda name: None)

assert declared.loss_fields(Nothing)["clip_low"] == 0.1
print("all of it")
"""


class OneEntry(unittest.TestCase):
    def test_a_surrogate_with_its_own_number_is_one_entry(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(LAB / "extensions", Path(folder, "extensions"), ignore=shutil.ignore_patterns("*.npz", "test_*"))
            path = Path(folder, "extensions", "objectives", "surrogates.py")
            head, start, rest = path.read_text(encoding="utf-8").partition("SURROGATES: dict[str, SurrogateChoice] = {")
            self.assertTrue(start)
            path.write_text(head + start + ENTRY + rest, encoding="utf-8")
            environment = {**os.environ, "PYTHONPATH": str(LAB), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [sys.executable, "-c", SCRIPT], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
            )
            self.assertEqual((done.returncode, done.stdout), (0, "all of it\n"), done.stderr)


if __name__ == "__main__":
    unittest.main()
