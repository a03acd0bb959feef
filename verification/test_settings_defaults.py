"""The defaults that extensions/settings holds are those of the installed trainers (peers environment)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import unittest
from pathlib import Path

from extensions.settings.make_defaults import FOLDER, VERSIONS, document, text_of


class Defaults(unittest.TestCase):
    def test_defaults_of_installed_trainers(self):
        for package in ("trl", "stable_baselines3"):
            spec = importlib.util.find_spec(package)
            if spec is None:
                self.skipTest(f"{package} is not installed: python -m pip install -r verification/requirements.txt")
            self.assertEqual(importlib.metadata.version(package.replace("_", "-")), VERSIONS[package])
            made = text_of(document(package, Path(spec.origin).parents[1]))
            self.assertEqual(made, (FOLDER / f"{package}.json").read_text(encoding="utf-8"), f"{package}: run make_defaults")


if __name__ == "__main__":
    unittest.main()
