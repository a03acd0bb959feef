"""A rank that leaves, hangs, dies or differs: all end, soon, with a sentence that names it. Real processes, short time-outs.

No test looks at a clock: where a rank would hang for ever, that the call returns is what is tested.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import unittest
from concurrent.futures import ThreadPoolExecutor

from extensions.distributed import fixtures
from extensions.distributed.ranks import HOST, Ranks
from extensions.distributed.watch import RankProblem

TIMEOUT = 2.0  # seconds a rank waits for another one
LIMIT = 60.0  # seconds the parent waits for a job


BATCHES = [[[1.0, 2.0], [3.0]], [[4.0]]]  # of two ranks; the token mean of x w has the gradient (1 + 2 + 3 + 4) / 4 = 2.5
KL = [[0.1, 0.1, 0.1], [0.1, 0.5, 0.1]]  # sum over the 10 tokens of each of two ranks, at three updates
FLAGS = ["--micro-batches 2", "--micro-batches 4"]
# Each ends its ranks: they run side by side, as most of their time is waiting. name -> ranks, job, arguments.
CASES = {
    "leaves": (2, fixtures.run_updates, KL, False),
    "unequal": (2, fixtures.accumulate, BATCHES, False),
    "killed": (3, fixtures.dies, 1, signal.SIGKILL),
    "killed in a collective": (3, fixtures.dies_in_a_collective, 2),
    "stopped": (2, fixtures.dies, 1, signal.SIGSTOP),
    "slow": (2, fixtures.sleeps, 1, 60.0),
    "raises": (2, fixtures.raises, 1),
    "other flags": (2, fixtures.other_flags, FLAGS),
}


def sentence_of(count, job, *arguments):
    """What a job ends with; all its processes are gone then."""
    ranks = Ranks(count, timeout=TIMEOUT)
    try:
        with ranks:
            results = ranks.run(job, *arguments, timeout=LIMIT)
    except RankProblem as problem:
        alive = [process.pid for process in ranks.processes.processes if process.is_alive()]
        return str(problem) + (f"; LEFT BEHIND: {alive}" if alive else "")
    return f"no RankProblem: {results}"


class Failures(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with ThreadPoolExecutor(len(CASES)) as pool:
            cls.sentences = dict(zip(CASES, pool.map(lambda case: sentence_of(*case), CASES.values())))

    def check(self, case, pattern):
        self.assertRegex(self.sentences[case], pattern)
        self.assertNotRegex(self.sentences[case], "no RankProblem|LEFT BEHIND|\n")

    def test_a_rank_that_leaves_by_its_own_kl(self):
        self.check("leaves", "rank 1 left after update 1: its own KL 0.05 is above 0.02")

    def test_all_stop_by_the_reduced_kl(self):
        # After one update (.1 + .5) / 20 = .03 > .02, although rank 0 alone has .01.
        with Ranks(2, timeout=TIMEOUT) as ranks:
            self.assertEqual(ranks.run(fixtures.run_updates, KL, True, timeout=LIMIT), [1, 1])

    def test_unequal_micro_batches(self):
        self.check("unequal", "rank 0 is still at 'update 1, micro-batch 2 of 2'|rank 1 is still at 'update 2'")
        with self.subTest("filled up with steps of no rows"), Ranks(2, timeout=TIMEOUT) as ranks:
            self.assertEqual(ranks.run(fixtures.accumulate, BATCHES, True, timeout=LIMIT), [[2.5], [2.5]])

    def test_an_empty_shard_joins_with_zeros(self):
        # Rank 1 holds nothing: (1 + 2 + 3) / 3 = 2.
        with Ranks(2, timeout=TIMEOUT) as ranks:
            self.assertEqual(ranks.run(fixtures.accumulate, [[[1.0, 2.0], [3.0]], []], True, timeout=LIMIT), [[2.0], [2.0]])

    def test_a_killed_rank(self):
        self.check("killed", "rank 1 was killed by SIGKILL")
        self.check("killed in a collective", "rank 2 was killed by SIGKILL")

    def test_a_stopped_rank_has_no_heartbeat(self):
        self.check("stopped", "rank 1 was killed or stopped at 'update 1'")

    def test_a_slow_rank_is_said_to_live(self):
        self.check("slow", "rank 1 is still at 'scoring'")

    def test_ctrl_c_ends_all(self):
        # A shell's background job starts with SIGINT ignored.
        self.addCleanup(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
        ranks = Ranks(2, timeout=TIMEOUT)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        with self.assertRaises(KeyboardInterrupt), ranks:
            timer.start()
            ranks.run(fixtures.sleeps, 0, 60.0, timeout=LIMIT)
        self.assertEqual([process.is_alive() for process in ranks.processes.processes], [False, False])

    def test_a_rank_that_raises(self):
        self.check("raises", "rank 1: ValueError: reward server said no")

    def test_other_flags(self):
        self.check("other flags", "rank 1 has other flags than rank 0: --micro-batches 4, not --micro-batches 2")

    def test_no_answer_at_all(self):
        with self.assertRaisesRegex(RankProblem, "no answer from rank 0 within 0.5 s"), Ranks(1, timeout=TIMEOUT) as ranks:
            ranks.run(fixtures.sleeps, 0, 60.0, timeout=0.5)

    def test_bad_data_on_one_rank_is_refused_by_all(self):
        # A rank that raised before the exchange would leave the other one waiting.
        with Ranks(2, timeout=TIMEOUT) as ranks:
            said = ranks.run(fixtures.refuses_data, [[1.0, 2.0], [1.0, float("nan")]], timeout=LIMIT)
        self.assertEqual(said, ["rewards: got nan at row 1 of rank 1, wanted finite numbers"] * 2)

    def test_a_port_in_use(self):
        with socket.socket() as taken:
            taken.bind((HOST, 0))
            taken.listen()
            with self.assertRaisesRegex(RankProblem, f"port {taken.getsockname()[1]} of 127.0.0.1 is in use"):
                Ranks(2, port=taken.getsockname()[1])


if __name__ == "__main__":
    unittest.main()
