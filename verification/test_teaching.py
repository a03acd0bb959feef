"""The guide's suite names the cause of a mistake in its first message: tried on the quick ones; all of them by
`python -m verification.teaching`.
"""

import os
import unittest

from verification import teaching

CENTRAL = (  # the mistakes that the guide itself warns of, and those that the suite once let through
    "PPO: old policy refreshed",
    "GRPO: old policy refreshed",
    "GRPO: KL pushes away",
    "gradient clip: never",
)
IN_A_LONG_TRAINING = ("PPO:", "GRPO:", "DPO training:", "update:", "gradient clip:", "chain: lambda")  # left to the command


@unittest.skipUnless(hasattr(os, "fork"), "the edits are tried in forked processes, which this system does not have")
class Teaching(unittest.TestCase):
    def test_the_first_message_names_the_cause(self):
        quick = [topic for topic in teaching.EDITS if not topic.startswith(IN_A_LONG_TRAINING)]
        self.assertGreaterEqual(len(quick), 24)
        for verdict in teaching.try_all([*quick, *CENTRAL]):
            with self.subTest(verdict.topic):
                self.assertTrue(verdict.named, f"\n{verdict}\nwanted the words {teaching.EDITS[verdict.topic]!r}")

    def test_every_edit_still_fits_the_source(self):
        for topic in teaching.EDITS:
            teaching.edited(topic)
        with self.assertRaisesRegex(ValueError, "not a topic"):
            teaching.edited("no such edit")

    def test_a_message_that_says_nothing_is_not_taken_as_named(self):
        for message in ("", "Tensor-likes are not close!"):
            self.assertFalse(teaching.Verdict("clip: no minimum", "test", message).named)


if __name__ == "__main__":
    unittest.main()
