"""The table of samplers: temperature, top-k, top-p and a share of greedy answers belong to the policy that samples.

The trainer takes log-probabilities of p, the sampler drew from another policy q made of p. An entry in SAMPLERS makes
q. Each is shown without a weight, with w = p / q (q renormalised: what was really drawn from), and with a truncated
weight. A sampler that reports raw log-probabilities, those before its temperature and cuts, gives w = 1: the line
without a weight. A = R - J; the truth is d J / d logits of p.

Answers that q never gives can be weighed by nothing: where q cuts support, w = p / q is the number p(kept) for every
kept answer of a top-k or top-p sampler, and the gradient stays biased.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Callable

import numpy as np

from extensions.estimators.line import Line
from extensions.estimators.off_policy import IS, NONE
from extensions.estimators.policy import Case, expected_reward, kl, policy_gradient, scores
from extensions.estimators.sequences import tempered
from extensions.estimators.through import named, slopes, told
from extensions.objectives import Row

TOKENS = 100  # of an answer, for what a ratio of every token becomes
WEIGHTED = replace(IS, ratio="none", sampler_correction="token")


def top_k(p: np.ndarray, k: int) -> np.ndarray:
    """The k likeliest answers, renormalised; of equals the first."""
    kept = np.argsort(-p, kind="stable")[:k]
    q = np.zeros_like(p)
    q[kept] = p[kept] / p[kept].sum()
    return q


def top_p(p: np.ndarray, mass: float) -> np.ndarray:
    """The fewest likeliest answers whose probabilities reach `mass`, renormalised (nucleus sampling, arXiv 1904.09751)."""
    total = np.cumsum(np.sort(p)[::-1])
    # A sum that misses the mass by a rounding error has reached it.
    return top_k(p, int(np.searchsorted(total, mass - 1e-12)) + 1)


def greedy_share(p: np.ndarray, share: float) -> np.ndarray:
    """With chance `share` the likeliest answer, else a draw from p."""
    return (1 - share) * p + share * np.eye(len(p))[p.argmax()]


TEMPERATURES = (0.6, 1.3)
SAMPLERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    **{f"temperature {T:g}": partial(tempered, temperature=T) for T in TEMPERATURES},
    "top-k 2": partial(top_k, k=2),
    "top-p 0.9": partial(top_p, mass=0.9),
    "top-p 0.7": partial(top_p, mass=0.7),
    "greedy share 0.25": partial(greedy_share, share=0.25),
    "greedy": partial(greedy_share, share=1.0),
}

CORRECTIONS: dict[str, tuple[Row, str]] = {
    "no weight": (NONE, "A s"),
    "w = p/q": (WEIGHTED, "p/q A s"),
    "p/q cut to 1": (replace(WEIGHTED, sampler_bound="capped", sampler_high=1.0), "min(p/q, 1) A s"),
}


def kept_mass(p: np.ndarray, q: np.ndarray) -> float:
    """Probability under p of what q can give: E_q[p / q], 1 without a cut."""
    return float(p[q > 0].sum())


def ratio_variance(p: np.ndarray, q: np.ndarray) -> float:
    """Var_q[p / q] of one token."""
    drawn = q > 0
    return float((p[drawn] ** 2 / q[drawn]).sum() - kept_mass(p, q) ** 2)


def contributions(row: Row, p: np.ndarray, q: np.ndarray, A: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ascent direction of every answer that q can give (M, K), and its chance; through objectives.evaluate."""
    drawn = q > 0
    slope = slopes(row, np.log(p[drawn]), sampler_logps=np.log(q[drawn]), advantages=A[drawn])
    return -slope[:, None] * scores(p)[drawn], q[drawn]


def table(case: Case) -> list[Line]:
    """Every sampler, with and without a weight. One sampled answer; a mean of G has 1/G of the variance."""
    p = case.p
    A, truth = case.R - expected_reward(p, case.R), policy_gradient(p, case.R)
    made = []
    for name, sampler in SAMPLERS.items():
        q = sampler(p)
        more = f"KL(q|p) {kl(q[q > 0], p[q > 0]):.3g}"
        if kept_mass(p, q) < 1 - 1e-12:
            more = f"keeps {kept_mass(p, q):.3g} of p"
        for correction, (row, formula) in CORRECTIONS.items():
            of_row, chances = contributions(row, p, q, A)
            known = named(**{field: getattr(row, field) for field in ("ratio", "surrogate", "sampler_correction")})
            made.append(told(f"{name}, {correction}", of_row, chances, truth, known, formula, more))
    return made + [tempered_line(case, T) for T in TEMPERATURES]


def tempered_line(case: Case, temperature: float) -> Line:
    """The trainer divides its logits by the temperature as well: q's own gradient, (e_a - q) / T at p's logits.

    Unbiased for J of q, the policy at that temperature, with A = R - J of q; held here against the gradient of J of p.
    """
    q = tempered(case.p, temperature)
    A = case.R - expected_reward(q, case.R)
    each = -slopes(NONE, np.log(q), advantages=A)[:, None] * scores(q) / temperature
    truth = policy_gradient(case.p, case.R)
    row = named(ratio="none", surrogate="plain", sampler_correction="none")
    return told(f"temperature {temperature:g} in the trainer too", each, q, truth, row, "A (e - q) / T", "exact for J of q")


def after_tokens(ratio: float, tokens: int = TOKENS) -> float:
    """The ratio of an answer whose every token has this ratio: ratio^tokens."""
    return math.exp(tokens * math.log(ratio))
