"""Small policies on which everything is known: probabilities, score vectors, J, its gradient, and finite differences.

A new worked policy is an entry in CASES. Letters: K answers to one prompt, p [K] the policy, R [K] the rewards, r [K] the
reference, b [K] the policy that sampled (behaviour), G answers in a group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable, Sequence

import numpy as np

SUM_TOLERANCE = 1e-6  # probabilities read from a command line are rounded; beyond this they are not a distribution

LARGEST_GROUP = 1000  # binomials of more overflow a double


@dataclass(frozen=True)
class Case:
    """One prompt: K answers with their probabilities and rewards, and the size of a group.

    reference: None where nobody gave one (a table then says what it takes).
    behaviour: None means that the policy itself sampled.
    Raises ValueError, one line that names the flag, for unequal lengths, probabilities that are not positive or do not sum
    to one, rewards that are not finite, a group_size outside 1 to LARGEST_GROUP.
    """

    probabilities: tuple[float, ...]
    rewards: tuple[float, ...]
    group_size: int = 4
    reference: tuple[float, ...] | None = None
    behaviour: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        answers = len(self.probabilities)
        if answers < 2:
            raise ValueError(f"--probabilities: got {answers} number, wanted at least two answers")
        if len(self.rewards) != answers:
            raise ValueError(f"--rewards: got {len(self.rewards)} numbers for {answers} probabilities, wanted as many")
        if not all(math.isfinite(x) for x in self.rewards):
            raise ValueError(f"--rewards: got {shown(self.rewards)}, wanted finite numbers")
        for name in ("probabilities", "reference", "behaviour"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, distribution(f"--{name}", given, answers))
        if not 1 <= self.group_size <= LARGEST_GROUP:
            raise ValueError(f"--group-size: got {self.group_size}, wanted 1 to {LARGEST_GROUP}")

    @property
    def answers(self) -> int:
        return len(self.probabilities)

    @property
    def p(self) -> np.ndarray:
        return np.array(self.probabilities)

    @property
    def R(self) -> np.ndarray:
        return np.array(self.rewards, dtype=float)

    @property
    def r(self) -> np.ndarray | None:
        return None if self.reference is None else np.array(self.reference)

    @property
    def b(self) -> np.ndarray:
        """The policy that sampled: behaviour, or p."""
        return self.p if self.behaviour is None else np.array(self.behaviour)


def shown(numbers: Sequence[float]) -> str:
    return ",".join(f"{x:g}" for x in numbers)


def distribution(flag: str, numbers: Sequence[float], answers: int) -> tuple[float, ...]:
    """The numbers, divided by their sum; ValueError unless they are `answers` positive numbers that sum to one."""
    if len(numbers) != answers:
        raise ValueError(f"{flag}: got {len(numbers)} numbers, wanted {answers}, one per answer")
    if not all(0 < x < math.inf for x in numbers):
        raise ValueError(f"{flag}: got {shown(numbers)}, wanted each above 0: an answer of chance 0 has no logit")
    total = math.fsum(numbers)
    if abs(total - 1) > SUM_TOLERANCE:
        raise ValueError(f"{flag}: the numbers sum to {total:.9g}, wanted 1")
    return tuple(x / total for x in numbers)


_REWARDS = (1.0, 0.2, -0.5)
E1 = Case((0.5, 0.3, 0.2), _REWARDS)
E2 = Case((1 / 3, 1 / 3, 1 / 3), _REWARDS)
E3 = Case((0.9, 0.07, 0.03), _REWARDS)
BINARY = Case((0.1, 0.9), (1.0, 0.0), group_size=8)
KL = Case((0.7, 0.2, 0.1), _REWARDS, reference=(0.3, 0.3, 0.4))
OFF_POLICY = Case(E1.probabilities, _REWARDS, behaviour=(0.2, 0.3, 0.5))
CASES: dict[str, Case] = {"E1": E1, "E2": E2, "E3": E3, "binary": BINARY, "KL": KL, "off-policy": OFF_POLICY}


def scores(p: np.ndarray) -> np.ndarray:
    """s_a = d log p_a / d logits = e_a - p, as rows (K, K); sum_a p_a s_a = 0."""
    return np.eye(len(p)) - p


def expected_reward(p: np.ndarray, R: np.ndarray) -> float:
    """J = sum_a p_a R_a."""
    return float(p @ R)


def policy_gradient(p: np.ndarray, R: np.ndarray) -> np.ndarray:
    """d J / d logits = p (R - J), (K,)."""
    return p * (R - p @ R)


def kl(p: np.ndarray, q: np.ndarray) -> float:
    """KL(p || q) = sum_a p_a log(p_a / q_a), nats."""
    return float(p @ np.log(p / q))


def kl_gradient(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """d KL(p || q) / d logits of p = p (log(p / q) - KL), (K,)."""
    d = np.log(p / q)
    return p * (d - p @ d)


def reverse_kl_gradient(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """d KL(q || p) / d logits of p = p - q, (K,)."""
    return p - q


def entropy_gradient(p: np.ndarray) -> np.ndarray:
    """d H(p) / d logits = -p (log p + H), (K,)."""
    return -kl_gradient(p, np.ones_like(p))


def best_baseline(p: np.ndarray, R: np.ndarray) -> float:
    """b* = sum p |s|^2 R / sum p |s|^2: the constant with the least variance of (R - b) s."""
    weights = p * (scores(p) ** 2).sum(axis=1)
    return float(weights @ R / weights.sum())


def constant_baseline_variance(p: np.ndarray, R: np.ndarray, b: float, group_size: int) -> float:
    """tr Cov of (1/G) sum (R_i - b) s_i = (1/G) (sum p (R - b)^2 |s|^2 - |grad J|^2)."""
    gradient = policy_gradient(p, R)
    return float((p * (R - b) ** 2 @ (scores(p) ** 2).sum(axis=1) - gradient @ gradient) / group_size)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def finite_difference(function: Callable[[np.ndarray], float], at: np.ndarray, step: float = 0.02) -> np.ndarray:
    """The gradient of a scalar function of an array, by central differences extrapolated three times (Richardson).

    D(h) = (f(x + h) - f(x - h)) / 2h = f' + c2 h^2 + c4 h^4 + ...; halving h and combining, (4^k D(h/2) - D(h)) / (4^k - 1),
    removes one power at a time. Good to about 1e-12 of a smooth function of order one.
    """
    gradient = np.zeros_like(at, dtype=float)
    for index in np.ndindex(at.shape):
        unit = np.zeros_like(at, dtype=float)
        unit[index] = 1.0
        row = [(function(at + h * unit) - function(at - h * unit)) / (2 * h) for h in (step, step / 2, step / 4, step / 8)]
        for power in (4.0, 16.0, 64.0):
            row = [(power * fine - coarse) / (power - 1) for coarse, fine in zip(row, row[1:])]
        gradient[index] = row[0]
    return gradient
