"""The one registry of tables: name -> function(case) -> list of Line. A new table is an entry in TABLES."""

from __future__ import annotations

import importlib
from typing import Callable

from extensions.estimators.line import Line
from extensions.estimators.policy import BINARY, E1, KL, OFF_POLICY, Case

Table = Callable[[Case], list[Line]]


def _table_of(module: str) -> Table:
    """`table` of a module of this folder, read when it is first called."""

    def table(case: Case) -> list[Line]:
        return importlib.import_module(f"extensions.estimators.{module}").table(case)

    return table


TABLES: dict[str, Table] = {
    "advantages": _table_of("advantages"),
    "binary": _table_of("binary"),
    "kl": _table_of("kl"),
    "off-policy": _table_of("off_policy"),
    "lengths": _table_of("lengths"),
    "sampler": _table_of("sampler"),
    "dpo": _table_of("preference"),
    "gae": _table_of("gae"),
    "passes": _table_of("passes"),
}

# What a table shows when the reader gives no numbers of their own.
DEFAULT_CASES: dict[str, Case] = {name: E1 for name in TABLES} | {"binary": BINARY, "kl": KL, "off-policy": OFF_POLICY}
