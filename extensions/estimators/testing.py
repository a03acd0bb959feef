"""What the tests of this folder share: a comparison whose failure shows formula, got, wanted and the likely mistake."""

from __future__ import annotations

import unittest

import numpy as np

FROM_FINITE_DIFFERENCES = 1e-10  # relative to the length of the gradient
FROM_CLOSED_FORM = 1e-12  # of numbers of order one
AS_PRINTED = 5.01e-7  # half a unit of the sixth decimal, in which the reference numbers are written


class NumberCase(unittest.TestCase):
    def assertClose(self, got, wanted, atol=FROM_CLOSED_FORM, formula="", mistake=""):
        got, wanted = np.asarray(got, dtype=float), np.asarray(wanted, dtype=float)
        self.assertEqual(got.shape, wanted.shape, f"\n{formula}\n  got     {got}\n  wanted  {wanted}")
        far = float(np.abs(got - wanted).max())
        says = f"\n  {formula}\n  got     {got}\n  wanted  {wanted}\n  apart   {far:.3g}, at most {atol:g}"
        self.assertLessEqual(far, atol, says + (f"\n  likely  {mistake}" if mistake else ""))

    def assertRelative(self, got, wanted, rtol=FROM_FINITE_DIFFERENCES, formula="", mistake=""):
        length = float(np.linalg.norm(wanted))
        self.assertClose(got, wanted, rtol * length, formula, mistake)
