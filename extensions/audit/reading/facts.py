"""A recorded batch as flat arrays of its used tokens, with what is known of each answer: what every room here reads.

A `Facts` holds the whole batch under one mask; `Facts.tokens(index)` is a view of some of its slots. Fits run on a view of
a few thousand tokens and are confirmed on all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from extensions.audit.read.masks import mask_edits
from extensions.audit.read.recording import Recording

FLOAT32 = 2.0**-23
AGREES = 3e-5  # relative; how closely a float32 gradient repeats its formula
SAMPLE = 4000  # tokens that a fit is made on


@dataclass
class Facts:
    """logps and what stands beside them, (N, T) float64 or (N, 1) where one number an answer; g: the recorded gradient."""

    l: np.ndarray
    old: np.ndarray | None
    ref: np.ndarray | None
    A: np.ndarray
    g: np.ndarray
    mask: np.ndarray
    mask_name: str
    extras: dict[str, np.ndarray]
    recording: Recording
    tolerance: float = AGREES
    A_name: str = "advantages"  # which recorded array stands in for A
    A_rows: np.ndarray | None = None  # the row that each row's advantage belongs to, where it is not its own

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.maximum(self.mask.sum(1), 1).astype(float)

    @cached_property
    def used(self) -> np.ndarray:
        """Flat positions of slots that the mask counts or that have a gradient."""
        return np.flatnonzero((self.mask | (self.g != 0)).ravel())

    def row_sum(self, values: np.ndarray) -> np.ndarray:
        return np.where(self.mask, values, 0.0).sum(1)

    def row_mean(self, values: np.ndarray) -> np.ndarray:
        return self.row_sum(values) / self.lengths

    @cached_property
    def row_gap(self) -> np.ndarray:
        """sum_t (l - l0) of each answer."""
        return np.zeros(len(self.l)) if self.old is None else self.row_sum(self.l - self.old)

    @cached_property
    def row_A(self) -> np.ndarray:
        """Mean advantage of each answer's counted tokens."""
        return self.A[:, 0] if self.A.shape[1] == 1 else self.row_mean(self.A)

    def sample(self, most: int = SAMPLE) -> "Tokens":
        used = self.used
        if len(used) > most:
            used = np.sort(np.random.default_rng(0).choice(used, most, replace=False))
        return Tokens(self, used)

    def all(self) -> "Tokens":
        return Tokens(self, self.used)


class Tokens:
    """Some slots of a Facts, flat: every attribute is (n,)."""

    def __init__(self, facts: Facts, index: np.ndarray):
        self.facts, self.index = facts, index
        self.width = facts.l.shape[1]
        self.row = index // self.width
        self.position = index - self.row * self.width

    def take(self, array: np.ndarray) -> np.ndarray:
        """Values of an (N, T), (N, 1) or (N,) array at these slots."""
        if array.ndim == 1 or array.shape[1] == 1 and self.width > 1:
            return array.reshape(-1)[self.row]
        return array.ravel()[self.index]

    @cached_property
    def l(self):
        return self.take(self.facts.l)

    @cached_property
    def old(self):
        return self.l if self.facts.old is None else self.take(self.facts.old)

    @cached_property
    def A(self):
        return self.take(self.facts.A)

    @cached_property
    def g(self):
        return self.take(self.facts.g)

    @cached_property
    def counted(self):
        return self.take(self.facts.mask)

    @cached_property
    def d(self):
        """l - l0, 0 where no old policy was recorded."""
        return self.l - self.old

    @cached_property
    def r(self):
        return np.exp(np.minimum(self.d, 80.0))

    @cached_property
    def T(self):
        return self.facts.lengths[self.row]

    @cached_property
    def mean_gap(self):
        return (self.facts.row_gap / self.facts.lengths)[self.row]

    @cached_property
    def sum_gap(self):
        return self.facts.row_gap[self.row]

    @cached_property
    def mean_A(self):
        return self.facts.row_A[self.row]

    def anchor(self, name: str) -> np.ndarray:
        """l minus the log-probability under `ref`, `old` or a recorded sampler."""
        if name == "old":
            return self.d
        return self.l - self.take(self.facts.ref if name == "ref" else self.facts.extras[name])


ROLLOUT_NAMES = ("rollout", "sampl", "infer", "behav", "vllm", "sglang", "gen_logp")


def is_rollout(name: str, values: np.ndarray) -> bool:
    """Whether a recorded array is the sampler's own log-probabilities: the table of names says so, or its name and range do."""
    return name == "sampler_logps" or any(part in name.lower() for part in ROLLOUT_NAMES) and (values <= 1e-6).all() and (values < -1e-3).any()


def facts_from(recording: Recording, advantages: np.ndarray) -> list[Facts]:
    """One Facts per mask that the gradient allows: the recorded one, then its named edits."""
    arrays = recording.arrays
    g, mask = arrays["dloss_dlogps"], arrays["mask"]
    A = np.asarray(advantages, dtype=float)
    A = A[:, None] if A.ndim == 1 else A
    lead = arrays["logps"]
    extras = {}
    for name, value in {**getattr(recording, "extras", {}), **arrays}.items():
        if name in KNOWN or not np.issubdtype(np.asarray(value).dtype, np.floating):
            continue
        value = np.asarray(value, dtype=float)
        value = value[:, None] if value.ndim == 1 and len(value) == len(lead) and lead.shape[1] > 1 else value
        if value.ndim == 1 and lead.shape == (len(value), 1):
            value = value[:, None]
        if value.shape in (lead.shape, (len(lead), 1)) and np.isfinite(value[mask] if value.shape == lead.shape else value).all():
            extras[name] = np.nan_to_num(value)
    clean = lambda x: None if x is None else np.where(mask | (g != 0), np.nan_to_num(x, nan=0.0, neginf=-80, posinf=80), 0.0)
    tolerance = AGREES * max(recording.eps / FLOAT32, 1.0) if recording.eps < 1e-3 else 2e-2

    def made(name: str, counted: np.ndarray) -> Facts:
        return Facts(
            clean(lead), clean(arrays.get("old_logps")), clean(arrays.get("ref_logps")), np.nan_to_num(A), np.nan_to_num(g),
            counted, name, extras, recording, tolerance,
        )

    found = [made("recorded", mask)]
    alive = g != 0
    for name, edit in mask_edits(recording).items():
        gains = alive & ~mask
        if (alive & ~edit).any() or (gains.any() and not (gains & edit).any()):
            continue
        lost = mask & ~edit
        if gains.any() or (lost.any() and not alive[lost].any() and alive[edit].any()):
            found.append(made(name, edit))
    return found


KNOWN = set(
    "logps old_logps ref_logps mask advantages advantages_raw dloss_dlogps dloss_dvpreds dloss_dentropies dloss_dloss_mat "
    "dkl_dlogps loss_mat vpreds values returns token_level_rewards token_level_scores rewards reward_baselines entropies "
    "seq_logps ref_seq_logps kl logits ref_logits ratio dloss_dratio gen_rewards gen_advantages gen_kl "
    "rewards_per_func gen_rewards_per_func reward_weights".split()
)
"""Arrays with a role of their own: never taken for a weight."""
