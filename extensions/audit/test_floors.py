"""The floors of the audit: a module imports only floors below its own, and nobody imports a command's __main__."""

from __future__ import annotations

import ast
import unittest
from pathlib import Path

HERE = Path(__file__).parent
FLOORS = ("read", "reading", "search", "checks", "say", "run", "step", "proof", "command")  # lowest first
BESIDE = {"tolerance": "read", "declared": "search", "catalogue": "search", "catalogue_zh": "search", "words_zh": "search", "recipes": "command"}  # files that share a floor


def floor_of(module: str) -> int | None:
    """The floor of extensions.audit.X...; None for the package itself and for what lies outside it."""
    parts = module.split(".")
    if parts[:2] != ["extensions", "audit"] or len(parts) < 3:
        return None
    name = BESIDE.get(parts[2], parts[2])
    return FLOORS.index(name) if name in FLOORS else None


def imported(source: str) -> list[str]:
    """Every module that this source imports, inside functions too; `from a import b` counts as a.b as well."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module != "__future__":
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def climbs(module: str, source: str) -> list[str]:
    """The imports of a higher floor, of the package's front door (a circle), or of a __main__."""
    own = floor_of(module)
    return [
        name
        for name in imported(source)
        if name.endswith("__main__") or own is not None and (name == "extensions.audit" or (floor_of(name) or 0) > own)
    ]


class Floors(unittest.TestCase):
    def test_imports_go_down_only(self):
        for path in sorted(HERE.rglob("*.py")):
            module = ".".join(("extensions", "audit", *path.relative_to(HERE).with_suffix("").parts))
            if not path.name.startswith(("test_", "__")) and path.name != "testing.py":
                with self.subTest(module):
                    self.assertIsNotNone(floor_of(module), "a module without a floor: give it one in FLOORS or BESIDE")
                    self.assertEqual(climbs(module, path.read_text(encoding="utf-8")), [])

    def test_a_climb_is_seen(self):
        search = "extensions.audit.search.loss"
        self.assertTrue(climbs(search, "def f():\n    from extensions.audit.say.report import Report\n"))
        self.assertTrue(climbs(search, "from extensions.audit import audit"))
        self.assertTrue(climbs(search, "import extensions.audit.__main__"))
        self.assertEqual(climbs(search, "from extensions.audit.read.recording import Recording"), [])


if __name__ == "__main__":
    unittest.main()
