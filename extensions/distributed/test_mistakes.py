"""The right rules equal one process over {1, 2, 4}^2; each mistake has its number, and a split that hides it."""

from __future__ import annotations

import functools
import unittest

from extensions.distributed import fixtures, fixtures_rows, mistakes, toy
from extensions.distributed.mistakes import AGREES, SPLITS
from extensions.distributed.testing import run

# name -> (relative error, cosine) at (W, M) = (1,2), (2,1), (2,2), (4,2), to their printed digits; found independently of
# this program, by plain sums over the toy.
KNOWN = {
    "mean_of_means": ((".2332", ".9816"), (".1405", ".9960"), ("5.640", "-.0175"), ("4.197", "-.0357")),
    "local_count": (("0", "1"), (".1405", ".9960"), (".1405", ".9960"), (".7184", ".9522")),
    "forgot_world_size": (("0", "1"), (".5", "1"), (".5", "1"), (".75", "1")),
    "double_division": ((".5", "1"), ("0", "1"), (".5", "1"), (".5", "1")),
    "no_micro_division": (("1.264", ".9816"), (".1405", ".9960"), ("11.13", "-.0175"), ("8.178", "-.0357")),
}
KNOWN_SPLITS = ((1, 2), (2, 1), (2, 2), (4, 2))


@functools.cache
def measured():
    return run(fixtures.grid_of_mistakes)


def table():
    """All lines of the grid, from rank 0, which is in every group: (rule, W, M) -> line."""
    rows, rights = measured()[0]
    return {(row.rule, row.ranks, row.micro_batches): row for row in rows}, rights


def half_of_last_digit(text: str) -> float:
    return 0.5 * 10.0 ** -len(text.partition(".")[2])


class Toy(unittest.TestCase):
    def test_every_right_rule_is_one_process(self):
        _, rights = table()
        self.assertEqual(len(rights), len(mistakes.RIGHTS) * len(SPLITS) ** 2)
        for row in rights:
            self.assertLess(row.relative_error, AGREES, f"{row}: wanted the gradient of one process")
            self.assertGreater(row.cosine, 1 - AGREES)

    def test_mistakes_have_their_numbers(self):
        rows, _ = table()
        for name, values in KNOWN.items():
            for split, (error, cosine) in zip(KNOWN_SPLITS, values):
                got = rows[(name, *split)]
                self.assertLessEqual(abs(got.relative_error - float(error)), half_of_last_digit(error) + AGREES, got)
                self.assertLessEqual(abs(got.cosine - float(cosine)), half_of_last_digit(cosine) + AGREES, got)

    def test_every_mistake_shows_somewhere_and_hides_somewhere(self):
        rows, _ = table()
        for name in mistakes.MISTAKES:
            errors = {(W, M): rows[(name, W, M)].relative_error for W in SPLITS for M in SPLITS}
            self.assertLess(errors[1, 1], AGREES, f"{name}: one rank with one micro-batch proves nothing")
            self.assertGreater(errors[2, 2], 0.01, f"{name}: 2 x 2 shows every mistake")

    def test_which_splits_hide_which(self):
        rows, _ = table()
        splits = ((1, 2), (2, 1))
        hidden = {name: {s for s in splits if rows[(name, *s)].relative_error < AGREES} for name in mistakes.MISTAKES}
        of_ranks, of_micro_batches = {(1, 2)}, {(2, 1)}
        self.assertEqual(hidden, {
            "mean_of_means": set(), "no_micro_division": set(), "local_padded_width": set(),
            "double_division": of_micro_batches,
            **dict.fromkeys(("local_count", "forgot_world_size", "local_group_statistics", "local_whitening",
                             "clip_before_reduce"), of_ranks),
        })  # fmt: skip

    def test_all_ranks_hold_the_same_gradient(self):
        of_rank_0, _ = table()
        for rows, _ in measured():
            for row in rows:
                self.assertEqual(row, of_rank_0[(row.rule, row.ranks, row.micro_batches)])

    def test_what_the_toy_is(self):
        self.assertEqual((len(toy.LENGTHS), sum(toy.LENGTHS)), (8, 200))
        self.assertAlmostEqual(mistakes.one_process("mean over tokens").norm().item(), 0.0874, delta=5e-5)
        self.assertEqual(toy.micro_batches(toy.of_rank(1, 2), 2), [[4, 6], [5, 7]])


class Objectives(unittest.TestCase):
    NAMED = ["ppo", "grpo", "dapo", "dr_grpo", "rloo", "dpo"]

    def test_named_rows_are_one_process_over_the_grid(self):
        for errors in run(fixtures_rows.errors_over_the_grid, self.NAMED):
            for name, error in errors.items():
                self.assertLess(error, AGREES, f"{name}: loss and gradient over ranks and micro-batches")

    def test_every_covered_row_is_one_process(self):
        names = fixtures_rows.covered_rows()
        self.assertGreater(len(names), 60)
        for name, error in run(fixtures_rows.errors_of_rows, [*names, "ipo", "cdpo"], 2)[0].items():
            self.assertLess(error, AGREES, f"{name}: 2 ranks, 2 micro-batches")

    def test_twins_that_look_at_one_rank_are_caught(self):
        for twin, error in run(fixtures_rows.errors_of_twins, 2)[0].items():
            self.assertGreater(error, 1e-3, f"{twin} over one rank alone, and the comparison does not see it")

    def test_parameters_after_twenty_steps(self):
        after = run(fixtures_rows.parameters_after, self.NAMED, 2, 20)
        for name in self.NAMED:
            wanted = after[0][f"{name}, one process"]
            for rank in range(2):
                error = (after[rank][name] - wanted).abs().max().item()
                self.assertLess(error, AGREES, f"{name}, rank {rank} of 2, 2 micro-batches, 20 steps of SGD under DDP")

    def test_rows_that_are_not_covered_say_why(self):
        from extensions.distributed.shards import check_row
        from extensions.objectives import ROWS

        for name, words in (("dr_grpo@verl-0.9.1", "sum_over_width"), ("top_entropy", "token_selection 'top_entropy'")):
            with self.assertRaisesRegex(ValueError, words):
                check_row(ROWS[name])


if __name__ == "__main__":
    unittest.main()
