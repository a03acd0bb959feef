"""How the ratio enters a loss: one line a gate (slope, values it may belong to), one line a KL form, one line a row law.

A new gate, KL form or law is one entry in GATES, KL_FORMS or LAWS; every entry works with every other.
"""

from __future__ import annotations

from typing import Callable, NamedTuple

import numpy as np

from extensions.audit.reading.facts import Facts, Tokens


class Gate(NamedTuple):
    """slope: dJ/dl of an open token. values: name -> J of an open token. level: what a clip or cap cuts."""

    words: str
    slope: Callable[[Tokens], np.ndarray]
    values: dict[str, Callable[[Tokens], np.ndarray]]
    level: Callable[[Tokens], np.ndarray]
    mistake: str | None = None


def _exp(x):
    return np.exp(np.clip(x, -80, 80))


GATES: dict[str, Gate] = {
    "token": Gate(
        "token ratio r", lambda t: t.r * t.A, {"r A": lambda t: t.r * t.A, "sg[r] A l": lambda t: t.r * t.A * t.l},
        lambda t: t.r,
    ),
    "none": Gate(
        "no ratio", lambda t: t.A,
        {"A l": lambda t: t.A * t.l, "A": lambda t: t.A + 0 * t.l, "A (l - l0)": lambda t: t.A * t.d}, lambda t: t.r,
    ),
    "sequence_mean": Gate(
        "geometric mean of the answer's ratios", lambda t: _exp(t.mean_gap) * t.mean_A,
        {"r A": lambda t: _exp(t.mean_gap) * t.A}, lambda t: _exp(t.mean_gap),
    ),
    "sequence_mean_token": Gate(
        "geometric mean in value, token in gradient", lambda t: _exp(t.mean_gap) * t.A,
        {"r A": lambda t: _exp(t.mean_gap) * t.A, "sg[r] A l": lambda t: _exp(t.mean_gap) * t.A * t.l},
        lambda t: _exp(t.mean_gap),
    ),
    "sequence_product": Gate(
        "ratio of whole answers", lambda t: _exp(t.sum_gap) * t.mean_A * t.T,
        {"r A": lambda t: _exp(t.sum_gap) * t.A}, lambda t: _exp(t.sum_gap),
    ),
    "sequence_product_token": Gate(
        "ratio of whole answers as a weight on each token", lambda t: _exp(t.sum_gap) * t.A,
        {"r A": lambda t: _exp(t.sum_gap) * t.A, "sg[r] A l": lambda t: _exp(t.sum_gap) * t.A * t.l},
        lambda t: _exp(t.sum_gap),
    ),
    "inverse": Gate(
        "inverted ratio exp(l0 - l)", lambda t: -t.A / t.r, {"A / r": lambda t: t.A / t.r}, lambda t: 1 / t.r,
        "ratio_inverted",
    ),
    "token_score": Gate(
        "r A l with gradient through r", lambda t: t.r * (1 + t.l) * t.A, {"r A l": lambda t: t.r * t.A * t.l},
        lambda t: t.r, "missing_stop_gradient",
    ),
    "probability": Gate(
        "probability in place of its logarithm", lambda t: _exp(t.l) * t.A, {"p A": lambda t: _exp(t.l) * t.A},
        lambda t: _exp(t.l),
    ),
    "squared": Gate("squared ratio", lambda t: 2 * t.r**2 * t.A, {"r^2 A": lambda t: t.r**2 * t.A}, lambda t: t.r),
}
NEEDS_OLD = tuple(name for name in GATES if name not in ("none", "probability"))


class Form(NamedTuple):
    """A second term beside the policy's: slope dx/dl, values it may belong to (name -> x)."""

    words: str
    slope: Callable[[np.ndarray, Tokens], np.ndarray]
    values: dict[str, Callable[[np.ndarray, Tokens], np.ndarray]]
    mistake: str | None = None


def _k3(d):
    return _exp(-d) + d - 1


KL_FORMS: dict[str, Form] = {
    "k3": Form("exp(-d) + d - 1", lambda d, t: 1 - _exp(-d), {"k3": lambda d, t: _k3(d)}),
    "k2": Form("d^2 / 2", lambda d, t: d, {"k2": lambda d, t: d**2 / 2, "k3": lambda d, t: _k3(d), "k1": lambda d, t: d,
                                           "k1 l (score)": lambda d, t: d * t.l, "abs": lambda d, t: abs(d)}),
    "k1": Form("d", lambda d, t: 1 + 0 * d, {"k1": lambda d, t: d}),
    "abs": Form("|d|", lambda d, t: np.sign(d), {"abs": lambda d, t: abs(d)}),
    "k3 times ratio": Form("r (exp(-d) + d - 1)", lambda d, t: t.r * (_k3(d) + 1 - _exp(-d)), {"r k3": lambda d, t: t.r * _k3(d)}),
    "k1 times ratio": Form("r d", lambda d, t: t.r * (d + 1), {"r k1": lambda d, t: t.r * d}),
    "k2 times ratio": Form("r d^2 / 2", lambda d, t: t.r * (d + d**2 / 2), {"r k2": lambda d, t: t.r * d**2 / 2}),
    "k3 times sg[ratio]": Form("sg[r] k3", lambda d, t: t.r * (1 - _exp(-d)), {"r k3": lambda d, t: t.r * _k3(d)}),
    "k2 times sg[ratio]": Form("sg[r] d^2 / 2", lambda d, t: t.r * d, {"r k2": lambda d, t: t.r * d**2 / 2, "r k3": lambda d, t: t.r * _k3(d),
                                                                         "r k1": lambda d, t: t.r * d}),
    "k3 times answer's ratio": Form("rho k3", lambda d, t: _exp(t.mean_gap) * (1 - _exp(-d) + t.mean_of(_k3)), {"rho k3": lambda d, t: _exp(t.mean_gap) * _k3(d)}),
    "k3 times sg[answer's ratio]": Form("sg[rho] k3", lambda d, t: _exp(t.mean_gap) * (1 - _exp(-d)), {"rho k3": lambda d, t: _exp(t.mean_gap) * _k3(d)}),
    "k3 of -d": Form("exp(d) - d - 1", lambda d, t: _exp(d) - 1, {"k3 of -d": lambda d, t: _exp(d) - d - 1}, "kl_direction"),
    "k3 with its score": Form("k3 exp(l - sg l)", lambda d, t: 1 - _exp(-d) + _k3(d), {"k3": lambda d, t: _k3(d)}),
    "k2 with its score": Form("d^2 / 2 exp(l - sg l)", lambda d, t: d + d**2 / 2, {"k2": lambda d, t: d**2 / 2}),
    "k1 with its score": Form("d exp(l - sg l)", lambda d, t: 1 + d, {"k1": lambda d, t: d}),
    "k3 score": Form("sg[k3] l", lambda d, t: _k3(d), {"k3 l": lambda d, t: _k3(d) * t.l}),
    "ratio": Form("exp(d)", lambda d, t: _exp(d), {"exp(d)": lambda d, t: _exp(d)}, "kl_ratio_for_log_ratio"),
    "inverse ratio": Form("exp(-d)", lambda d, t: -_exp(-d), {"exp(-d)": lambda d, t: _exp(-d)}, "kl_ratio_for_log_ratio"),
}

LIKELIHOOD: dict[str, Form] = {
    "nll": Form("- l on every counted token", lambda d, t: -1 + 0 * t.l, {"-l": lambda d, t: -t.l}),
    "nll where A > 0": Form("- l where A > 0", lambda d, t: -1.0 * (t.A > 0), {"-l": lambda d, t: -t.l * (t.A > 0)}),
    "offset of A": Form("A shifted by a constant", lambda d, t: -t.r, {"-r": lambda d, t: -t.r}),
}

def group_tokens(facts: Facts, ids: np.ndarray | None) -> np.ndarray | None:
    if ids is None or len(ids) != len(facts.l):
        return None
    inverse = np.unique(ids, return_inverse=True)[1].reshape(-1)
    return np.maximum(np.bincount(inverse, facts.mask.sum(1))[inverse], 1.0)


def _attended(facts: Facts) -> np.ndarray | None:
    attention = facts.recording.arrays.get("attention_mask")
    return None if attention is None else np.maximum(attention.sum(1), 1.0)


LAWS: dict[str, tuple[str, Callable[[Facts], np.ndarray | None]]] = {
    "equal": ("every token weighs the same", lambda f: np.ones(len(f.l))),
    "1/T": ("an answer's tokens share its weight: 1 / T_i", lambda f: 1 / f.lengths),
    "T": ("an answer weighs T_i times T_i", lambda f: f.lengths),
    "1/T^2": ("1 / T_i^2", lambda f: f.lengths**-2.0),
    "1/sqrt T": ("1 / sqrt(T_i)", lambda f: f.lengths**-0.5),
    "1/(T + 1)": ("1 / (T_i + 1)", lambda f: 1 / (f.lengths + 1)),
    "1/tokens of the prompt's group": ("answers to one prompt share its weight by tokens",
        lambda f: _over(group_tokens(f, f.recording.arrays.get("group_ids")))),
    "1/tokens of the micro-batch": ("1 / tokens of the micro-batch",
        lambda f: _over(group_tokens(f, f.recording.arrays.get("micro_batch_ids")))),
    "1/attention tokens": ("1 / tokens of the attention mask", lambda f: _over(_attended(f))),
}


def _over(x):
    return None if x is None else 1 / x
