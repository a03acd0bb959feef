"""The trust-region step on one softmax over a few answers, where all of it is known exactly: the oracle of `step`.

J(p) = sum_a p_a R_a. At p: gradient with respect to the logits g = p (R - J), Fisher matrix F = diag(p) - p p'. Then

    F^+ g = R - J                     up to a constant that changes no probability
    x' F x = Var_p(R)
    new policy = p exp(eta R) / Z     an exponential tilt, eta = sqrt(2 delta / Var_p R)

so that on a table the natural step needs no solver at all. Probabilities p [A] and rewards [A] are float64.
"""

from __future__ import annotations

import math
from typing import Callable, NamedTuple

import torch
from torch import Tensor

from extensions.trust_region.step import kl_old_current, trust_region_step

REWARDS = (1.0, 0.2, -0.5)
STARTS = {"uniform": (1 / 3, 1 / 3, 1 / 3), "0.5, 0.3, 0.2": (0.5, 0.3, 0.2)}
DELTA = 0.01
DAMPING = 0.1  # Spinning Up's, for the examples that show what damping does


def f64(numbers) -> Tensor:
    return torch.as_tensor(numbers, dtype=torch.float64)


def expected_reward(p: Tensor, rewards: Tensor) -> Tensor:
    """J = sum_a p_a R_a."""
    return (p * rewards).sum(dim=-1)


def dense_fisher(p: Tensor) -> Tensor:
    """F = diag(p) - p p', the Hessian of KL(p || q) with respect to the logits of q at q = p. [A] -> [A, A]."""
    return torch.diag(p) - torch.outer(p, p)


def policy_gradient(p: Tensor, rewards: Tensor) -> Tensor:
    """d J / d logits = p (R - J). [A] -> [A]."""
    return p * (rewards - expected_reward(p, rewards))


def variance(p: Tensor, rewards: Tensor) -> float:
    """Var_p(R) = x' F x of the natural direction."""
    return (p * (rewards - expected_reward(p, rewards)).square()).sum().item()


def tilted(p: Tensor, rewards: Tensor, eta: float) -> Tensor:
    """p exp(eta R) / Z: the natural step with eta, exactly."""
    return (p.log() + eta * rewards).softmax(dim=-1)


def moved_along(p: Tensor, direction: Tensor, length: float) -> Tensor:
    """softmax(logits + length * direction)."""
    return (p.log() + length * direction).softmax(dim=-1)


def kl(p: Tensor, q: Tensor) -> float:
    """KL(p || q)."""
    return kl_old_current(p.log(), q.log()).item()


def gain(p: Tensor, q: Tensor, rewards: Tensor) -> float:
    """J(q) - J(p)."""
    return (expected_reward(q, rewards) - expected_reward(p, rewards)).item()


def solve(function: Callable[[float], float], low: float, high: float) -> float:
    """The root of an increasing function in [low, high], by bisection to the last bit."""
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return middle
        low, high = (middle, high) if function(middle) < 0 else (low, middle)


def eta_at(p: Tensor, rewards: Tensor, delta: float) -> float:
    """The eta whose tilt has KL(p || new) = delta exactly; the quadratic model gives sqrt(2 delta / Var) only."""
    return solve(lambda eta: kl(p, tilted(p, rewards, eta)) - delta, 0.0, 100.0)


def best_at(p: Tensor, rewards: Tensor, delta: float) -> Tensor:
    """The best of all policies with KL(p || q) = delta: q = c p / (lam - R), lam above the largest reward.

    From the Lagrangian of max sum q R with KL(p || q) <= delta and sum q = 1: d/dq gives R + mu p / q = lam.
    """

    def at(lam: float) -> Tensor:
        q = p / (lam - rewards)
        return q / q.sum()

    top = rewards.max().item()
    return at(top + 1 / solve(lambda s: kl(p, at(top + 1 / s)) - delta, 1e-9, 1e9))


def length_at(p: Tensor, direction: Tensor, delta: float) -> float:
    """How far to go along a direction for KL(p || new) = delta exactly."""
    return solve(lambda length: kl(p, moved_along(p, direction, length)) - delta, 0.0, 1000.0)


class NaturalStep(NamedTuple):
    """One full trust-region step on a table, and what the line search made of it."""

    start: list[float]
    variance: float
    eta: float
    probabilities: list[float]  # of the full step
    kl_old_new: float
    kl_new_old: float
    gain: float
    first_order_gain: float
    accepted: bool  # KL(old || new) <= delta, and a gain
    shrinks: int
    after_line_search: dict


def natural_step(start: Tensor, rewards: Tensor, delta: float = DELTA) -> NaturalStep:
    """`trust_region_step` on the logits of one softmax, exact expectations in place of samples."""
    logits = start.log().requires_grad_()
    old = start.log()
    step = trust_region_step(
        lambda: expected_reward(logits.softmax(-1), rewards), lambda: kl_old_current(old, logits), [logits], delta
    )
    full = tilted(start, rewards, step.length)
    taken = logits.detach().softmax(-1)
    return NaturalStep(
        start.tolist(), variance(start, rewards), step.length, full.tolist(), step.full_kl, kl(full, start), step.full_gain,
        step.length * variance(start, rewards), step.accepted, step.shrinks,
        {"probabilities": taken.tolist(), "kl_old_new": step.kl_old_current, "gain": step.gain},
    )  # fmt: skip


class Mistake(NamedTuple):
    """A wrong version of the step and the numbers that tell it from the right one, for one start."""

    name: str
    what: str
    quantity: str
    right: float
    wrong: float


def mistakes(start: Tensor, rewards: Tensor, delta: float = DELTA, damping: float = DAMPING) -> list[Mistake]:
    """Five usual mistakes with their numbers from `start`."""
    g, fisher = policy_gradient(start, rewards), dense_fisher(start)
    eta = math.sqrt(2 * delta / variance(start, rewards))
    new = tilted(start, rewards, eta)
    right_kl = kl(start, new)
    damped = torch.linalg.solve(fisher + damping * torch.eye(len(start), dtype=start.dtype), g)
    true_curvature, by_gradient = (damped @ fisher @ damped).item(), (damped @ g).item()
    plain, short = (kl(start, moved_along(start, damped, math.sqrt(2 * delta / c))) for c in (true_curvature, by_gradient))
    logits = start.log().requires_grad_()
    both_live = (logits.softmax(-1) * (logits.log_softmax(-1) - logits.log_softmax(-1))).sum()
    (slope,) = torch.autograd.grad(both_live, logits, create_graph=True)
    (curved,) = torch.autograd.grad((slope * rewards).sum(), logits)
    return [
        Mistake(
            "KL arguments exchanged", "the line search reads KL(new || old): the same F at old, another number beyond it",
            "KL of the full step", right_kl, kl(new, start),
        ),
        Mistake(
            "old not detached", "KL(current || current) is 0 everywhere: F v = 0, and there is no step",
            "x' F x", variance(start, rewards), (curved * rewards).sum().item(),
        ),
        Mistake(
            "no line search", "the full step is taken, whatever its true KL; the quadratic model promises delta",
            "KL of the step taken", natural_step(start, rewards, delta).after_line_search["kl_old_new"], right_kl,
        ),
        Mistake(
            "x'g for x'Fx", f"equal without damping; with {damping:g} x'g = x'(F + {damping:g}) x is larger, the step shorter",
            "curvature under the root", true_curvature, by_gradient,
        ),
        Mistake(
            "damping inside the root", f"the damped F sets the length, too: the step stays {'%.0f' % (100 * (1 - short / plain))} % "
            "inside the KL that was asked for", "KL of the full step", plain, short,
        ),
    ]  # fmt: skip
