"""A small world of whole answers: all 15 sequences, their scores, J, E[length], and their exact gradients.

A new world is a Sequences. Letters: N sequences, T positions, V tokens, the last token is the end (EOS); a row p_t
[V] of the policy for each position, with logits of its own, so a parameter vector has T * V numbers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

S1_ROWS = ((0.5, 0.3, 0.2), (0.4, 0.2, 0.4), (0.25, 0.25, 0.5))


def first_and_end(tokens: tuple[int, ...], eos: int) -> float:
    """1 where the answer begins with token 0 and ends by itself, else 0."""
    return float(tokens[0] == 0 and tokens[-1] == eos)


@dataclass(frozen=True)
class Sequences:
    """Every answer that rows (T, V) can give: it stops at EOS or after T tokens. Beyond its end arrays hold token 0."""

    rows: tuple[tuple[float, ...], ...] = S1_ROWS

    @cached_property
    def p(self) -> np.ndarray:
        """(T, V)"""
        return np.array(self.rows)

    @cached_property
    def answers(self) -> list[tuple[int, ...]]:
        positions, eos = len(self.rows), len(self.rows[0]) - 1
        made = []
        for length in range(1, positions + 1):
            for start in itertools.product(range(eos), repeat=length - 1):
                ends = range(eos + 1) if length == positions else (eos,)
                made += [(*start, last) for last in ends]
        return made

    @cached_property
    def lengths(self) -> np.ndarray:
        """(N,) tokens, EOS counted."""
        return np.array([len(answer) for answer in self.answers])

    @cached_property
    def mask(self) -> np.ndarray:
        """(N, T) bool"""
        return np.arange(len(self.rows)) < self.lengths[:, None]

    @cached_property
    def tokens(self) -> np.ndarray:
        """(N, T)"""
        width = len(self.rows)
        return np.array([answer + (0,) * (width - len(answer)) for answer in self.answers])

    @cached_property
    def rewards(self) -> np.ndarray:
        """(N,)"""
        return np.array([first_and_end(answer, self.p.shape[1] - 1) for answer in self.answers])

    @cached_property
    def logps(self) -> np.ndarray:
        """(N, T) log p_t(y_t), 0 beyond the end."""
        return self.logps_under(self.p)

    def logps_under(self, p: np.ndarray) -> np.ndarray:
        """(N, T) log-probabilities of the same answers under other rows (T, V); -inf for a token of chance 0."""
        with np.errstate(divide="ignore"):
            return np.where(self.mask, np.log(p)[np.arange(len(p)), self.tokens], 0.0)

    @cached_property
    def chances(self) -> np.ndarray:
        """(N,) sum one."""
        return np.exp(self.logps.sum(axis=1))

    @cached_property
    def token_scores(self) -> np.ndarray:
        """(N, T, V): d log p_t(y_t) / d logits of position t = e_{y_t} - p_t; 0 beyond the end."""
        return self.mask[..., None] * (np.eye(self.p.shape[1])[self.tokens] - self.p)

    @cached_property
    def scores(self) -> np.ndarray:
        """(N, T V): d log p(y) / d all logits. Each position has logits of its own, so the parts stand side by side."""
        return self.token_scores.reshape(len(self.answers), -1)

    def gradients(self, slopes: np.ndarray, answers: np.ndarray | None = None) -> np.ndarray:
        """(M, T V): sum_t slopes_t d log p_t / d logits, slopes (M, T) at the log-probabilities of `answers`, or all."""
        scores = self.token_scores if answers is None else self.token_scores[answers]
        return (slopes[..., None] * scores).reshape(len(slopes), -1)

    def expected(self, x: np.ndarray) -> float:
        """E[x] of one number per answer (N,)."""
        return float(self.chances @ x)

    def gradient_of_expected(self, x: np.ndarray) -> np.ndarray:
        """d E[x] / d logits = E[x s], (T V,), for an x (N,) that does not depend on the policy."""
        return (self.chances * x) @ self.scores

    @cached_property
    def J(self) -> float:
        return self.expected(self.rewards)

    @cached_property
    def policy_gradient(self) -> np.ndarray:
        return self.gradient_of_expected(self.rewards)

    def drift(self, direction: np.ndarray) -> float:
        """d E[length] along the unit step in `direction` (T V,), tokens; 0 for a direction of length 0."""
        length = float(np.linalg.norm(direction))
        return float(self.gradient_of_expected(self.lengths.astype(float)) @ direction) / length if length else 0.0

    def kl(self, reference: np.ndarray) -> float:
        """KL of whole answers to reference rows (T, V): E[sum_t (l_t - lr_t)]."""
        return self.expected((self.logps - self.logps_under(reference)).sum(axis=1))

    def kl_gradient(self, reference: np.ndarray) -> np.ndarray:
        """d KL / d logits = E[d s], d = sum_t (l_t - lr_t) of the whole answer; the term E[s] is 0."""
        return self.gradient_of_expected((self.logps - self.logps_under(reference)).sum(axis=1))

    def moved(self, logits_step: np.ndarray) -> Sequences:
        """The same world after a step in all logits (T V,)."""
        weights = self.p * np.exp(logits_step.reshape(self.p.shape))
        return replace(self, rows=tuple(map(tuple, weights / weights.sum(axis=1, keepdims=True))))


S1 = Sequences()


def tempered(p: np.ndarray, temperature: float) -> np.ndarray:
    """p^(1 / temperature), each row normalised: what a sampler at that temperature draws from. [..., V] -> [..., V]."""
    weights = p ** (1 / temperature)
    return weights / weights.sum(axis=-1, keepdims=True)
