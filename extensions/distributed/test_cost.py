"""What an update sends, counted on the rules themselves, against the formulas in cost.py."""

from __future__ import annotations

import textwrap
import unittest

from extensions.distributed import cost, fixtures
from extensions.distributed.cost import Load
from extensions.distributed.rules import Collective
from extensions.distributed.testing import RANKS, run

# The table of cost.py: name and bytes of each collective, from R, T, M, P.
FORMULAS = {
    "counts": lambda R, T, M, P: [("all_gather", 24)],
    "mean over tokens": lambda R, T, M, P: [("all_gather", 24), ("all_reduce", 8 * P)],
    "gradient, reduced once": lambda R, T, M, P: [("all_reduce", 8 * P)],
    "gradient, reduced in each backward": lambda R, T, M, P: [("all_reduce", 8 * P)] * M,
    "group statistics": lambda R, T, M, P: [("all_gather", 8), ("all_gather", 24 * R)],
    "whitening": lambda R, T, M, P: [("all_gather", 24)],
    "clipping": lambda R, T, M, P: [],
    "KL stop": lambda R, T, M, P: [("all_gather", 16)],
    "logged mean": lambda R, T, M, P: [("all_gather", 16)],
}


class Cost(unittest.TestCase):
    def test_formulas(self):
        self.assertEqual(set(FORMULAS), set(cost.UPDATES))
        for load in (Load(), Load(8, 40, 2, 10), Load(4, 80, 2, 10), Load(4, 40, 6, 10), Load(4, 40, 2, 99)):
            for name, formula in FORMULAS.items():
                self.assertEqual(cost.counted(name, load), formula(*load), f"{name} at {load}")

    def test_ranks_call_what_was_counted_without_them(self):
        load = Load(3, 7, 2, 5)
        for calls in run(fixtures.calls_of_rules, load):
            self.assertEqual(calls, {name: cost.counted(name, load) for name in cost.UPDATES})

    def test_no_sync_saves_reductions_of_ddp(self):
        # 6 parameters of 8 bytes.
        self.assertEqual(run(fixtures.reductions_of_ddp, 3, False), [[48, 48, 48]] * RANKS)
        self.assertEqual(run(fixtures.reductions_of_ddp, 3, True), [[48]] * RANKS)

    def test_model_of_time(self):
        # Ring of 4 ranks, 8 bytes, 2 bytes/s, 1 s a message: 6 messages and 2 * 3/4 * 8 / 2 = 6 s.
        network = cost.Network(bytes_per_second=2.0, latency=1.0)
        self.assertEqual(cost.seconds(Collective("all_reduce", 8), 4, network), 12.0)
        self.assertEqual(cost.seconds(Collective("all_gather", 8), 4, network), 2 + 3 * 8 / 2)
        self.assertEqual(cost.seconds(Collective("all_reduce", 8), 1, network), 0.0)

    def test_the_table_in_the_docstring_is_the_computed_one(self):
        self.assertIn(textwrap.indent(cost.scale_table(), "    "), cost.__doc__)
        for ranks in cost.SCALES:
            whole = cost.seconds(Collective("all_reduce", int(14e9)), ranks)
            counts = [cost.counted(name, Load(rows=64)) for name in ("counts", "group statistics", "whitening", "KL stop")]
            exact = sum(cost.seconds(call, ranks) for calls in counts for call in calls)
            self.assertLess(exact, 1e-3 * whole, "all exact statistics together against the gradient")


if __name__ == "__main__":
    unittest.main()
