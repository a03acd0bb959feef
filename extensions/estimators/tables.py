"""The one registry of tables: name -> function(case) -> list of Line. A new table is an entry in TABLES."""

from __future__ import annotations

from typing import Callable

from extensions.estimators import advantages, binary, gae, kl, lengths, off_policy, passes, preference, sampler
from extensions.estimators.line import Line
from extensions.estimators.policy import BINARY, E1, KL, OFF_POLICY, Case

Table = Callable[[Case], list[Line]]

TABLES: dict[str, Table] = {
    "advantages": advantages.table,
    "binary": binary.table,
    "kl": kl.table,
    "off-policy": off_policy.table,
    "lengths": lengths.table,
    "sampler": sampler.table,
    "dpo": preference.table,
    "gae": gae.table,
    "passes": passes.table,
}

# What a table shows when the reader gives no numbers of their own.
DEFAULT_CASES: dict[str, Case] = {name: E1 for name in TABLES} | {"binary": BINARY, "kl": KL, "off-policy": OFF_POLICY}
