"""Edits of masks, pieces of a batch, parts of a sum."""

from __future__ import annotations

import functools
import math
import operator
import unittest

import numpy as np
import torch

from extensions.audit.read.recording import recording_from
from extensions.audit.search.edits import mistaken_specs
from extensions.audit.search.forms import Traits, round_between
from extensions.audit.search.level import in_level_group
from extensions.audit.read.masks import mask_edits, shifted
from extensions.audit.search.over_time import _gae
from extensions.audit.search.pieces import parts_of
from extensions.objectives import make_batch
from rl_lab import gae, groups_without_spread
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)

NAN = math.nan


class Pieces(unittest.TestCase):
    def test_the_recursion_over_time_is_the_labs(self):
        rng = np.random.default_rng(2)
        rewards, values, following = (rng.standard_normal((3, 7)) for _ in range(3))
        terminated = rng.random((3, 7)) < 0.2
        boundary = terminated | (rng.random((3, 7)) < 0.2)
        boundary[:, -1] = True
        numbers = [torch.as_tensor(x) for x in (rewards, values, following, terminated, boundary)]
        expected = gae(*numbers, 0.9, 0.8)[0].numpy()
        made = _gae(rewards, values, following, terminated, boundary, 0.9, 0.8)
        np.testing.assert_allclose(made, expected, atol=1e-12)

    def test_shifted(self):
        mask = np.array([[0, 1, 1, 0]], dtype=bool)
        self.assertEqual(shifted(mask, 1).astype(int).tolist(), [[0, 0, 1, 1]])
        self.assertEqual(shifted(mask, -1).astype(int).tolist(), [[1, 1, 0, 0]])

    def test_round_between(self):
        self.assertEqual(round_between(0.1713, 0.2311), 0.2)
        self.assertEqual(round_between(0.2771, 0.2846), 0.28)

    def test_level_groups(self):
        ids, rewards = np.array([0, 1, 0, 1, 2]), np.array([0.1, 1.0, 0.1, 0.0, 5.0])
        self.assertEqual(in_level_group(ids, rewards).tolist(), [True, False, True, False, False])
        self.assertEqual(
            in_level_group(ids, np.array([0.1, NAN, 0.1, 0.0, NAN])).tolist(), [True, False, True, False, False]
        )

    def test_a_reward_added_up_in_another_order_is_level(self):
        """1 and a hundred halves of eps: one by one after the 1 each is rounded away; added up first they are 50 eps."""
        eps = float(np.finfo(float).eps)
        parts = [1.0] + [eps / 2] * 100
        there, back = functools.reduce(operator.add, parts), functools.reduce(operator.add, parts[::-1])
        self.assertEqual((there, back), (1.0, 1 + 50 * eps))
        for other, level in ((back, True), (1 + 128 * eps, True), (1 + 130 * eps, False)):
            rewards = np.array([there, other, other])
            self.assertEqual(groups_without_spread(torch.as_tensor(rewards)).item(), level)
            self.assertEqual(
                in_level_group(np.zeros(3, dtype=int), rewards).tolist(), [level] * 3,
                f"{(other - there) / eps:g} eps apart: level is max - min <= 128 eps max|R|; likely a tolerance of its own",
            )  # fmt: skip

    def test_mask_edits_differ_from_the_mask(self):
        recording = recording_from({"logps": np.zeros((2, 4)), "mask": np.array([[1, 1, 0, 0], [1, 1, 1, 1]], dtype=bool)})
        for name, edit in mask_edits(recording).items():
            self.assertTrue((edit != recording.arrays["mask"]).any(), name)


class Parts(unittest.TestCase):
    """Large batches are looked at in pieces of rows."""

    def batch(self, rows: int):
        rng = np.random.default_rng(0)
        mask = np.arange(8) < np.array([2, 8, 3, 5, 2, 8, 3, 5])[:rows, None]
        logps = -rng.exponential(size=mask.shape)
        return make_batch(logps=logps, old_logps=logps + 0.1, mask=mask, advantages=rng.normal(size=rows))

    def test_pieces_hold_every_row_once_without_the_columns_that_none_of_them_counts(self):
        batch = self.batch(6)
        parts = parts_of(batch, slots=16)
        self.assertGreater(len(parts), 1)
        self.assertEqual(sorted(torch.cat([part.rows for part in parts]).tolist()), list(range(6)))
        self.assertLess(min(part.batch.mask.shape[1] for part in parts), 8)
        self.assertEqual(sum(int(part.batch.mask.sum()) for part in parts), int(batch.mask.sum()))

    def test_in_a_square_batch_advantages_may_stand_along_time_in_every_piece(self):
        batch = self.batch(8)
        recording = recording_from({"logps": batch.logps.numpy(), "mask": batch.mask.numpy()})
        specs = [s for s in mistaken_specs(recording, Traits.of(batch)) if s.mistake == "advantages_aligned_with_time"]
        self.assertTrue(specs)
        for spec in specs:
            whole = spec.make(batch).value
            for part in parts_of(batch, slots=16):
                torch.testing.assert_close(spec.make(part.batch).value, whole[part.rows])


if __name__ == "__main__":
    unittest.main()
