"""Thirty public configurations, rewritten as facts, go through the whole report; every default stays known."""

from __future__ import annotations

import json
import unittest
from pathlib import Path

from extensions.settings import detect, settings_of
from extensions.settings.files import Found
from extensions.settings.report import document, text
from extensions.settings.trainers import TRAINERS
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)

EXAMPLES = json.loads((Path(__file__).parent / "examples.json").read_text(encoding="utf-8"))


class Examples(unittest.TestCase):
    def test_thirty_public_configurations(self):
        self.assertGreaterEqual(sum(map(len, EXAMPLES.values())), 30)
        for trainer, examples in EXAMPLES.items():
            for values in examples:
                settings = settings_of(Found(dict(values)), TRAINERS[trainer])
                self.assertIn("Findings", text(settings), values)
                json.dumps(document(settings), allow_nan=False)

    def test_the_trainer_is_told_from_the_keys(self):
        for trainer in ("verl.ppo", "openrlhf.ppo", "trl.KTOConfig"):
            for values in EXAMPLES[trainer]:
                self.assertEqual(detect(Found(dict(values))).name, trainer)


if __name__ == "__main__":
    unittest.main()
