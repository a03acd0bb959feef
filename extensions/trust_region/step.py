"""One trust-region step, written out: gradient, Fisher-vector product, conjugate gradients, step length, line search.

Maximise the surrogate L(theta) while mean KL(old || theta) <= delta. At theta = old, with g the gradient of L and F the Hessian
of the mean KL (the Fisher matrix):

    x    = F^+ g                                  by conjugate gradients, from products F v alone
    step = sqrt(2 delta / x' F x) * x             the quadratic model of the KL is then exactly delta
    theta = old + shrink^k * step                 the first k whose surrogate gains and whose true KL is at most delta

Differs from the paper (arXiv 1502.05477): F v comes from differentiating the exact KL twice on all states of the batch, not on
a tenth of them. `parameters` are differentiable tensors; functions return lists of tensors like them.
"""

from __future__ import annotations

import math
from typing import Callable, NamedTuple, Sequence

import torch
from torch import Tensor

Vectors = list[Tensor]

# Where the conjugate gradients stop: the squared residual relative to the squared right side.
RESIDUAL = 1e-26


def kl_old_current(old_logits: Tensor, logits: Tensor) -> Tensor:
    """KL(old || current) = sum_a p_old (log p_old - log p_current), per row.

    old_logits, logits [..., A] floating -> [...] in nats. Gradient: to `logits` only, the second argument. (The atom
    rl_lab.categorical_kl sends its gradient to the first: there the policy that learns stands in front.) Zero with zero
    gradient at equality; its Hessian there is diag(p) - p p'.
    """
    old_logp = old_logits.detach().log_softmax(dim=-1)
    old = old_logp.exp()
    gap = (old_logp - logits.log_softmax(dim=-1)).masked_fill(old == 0, 0.0)
    return (old * gap).sum(dim=-1)


def fisher_products(mean_kl: Tensor, parameters: Sequence[Tensor]) -> Callable[[Vectors], Vectors]:
    """v -> F v, F the Hessian of `mean_kl`: the gradient of (gradient of the KL) . v, so F itself is never built.

    mean_kl: a scalar with a graph to `parameters`, taken where current = old. Its gradient, which every product needs, is
    taken once. Raises RuntimeError of torch where there is no graph.
    """
    gradients = torch.autograd.grad(mean_kl, parameters, create_graph=True)
    return lambda vector: list(torch.autograd.grad(dot(gradients, vector), parameters, retain_graph=True))


def fisher_vector_product(mean_kl: Tensor, parameters: Sequence[Tensor], vector: Vectors, damping: float = 0.0) -> Vectors:
    """(F + damping I) v by `fisher_products`, for one vector."""
    return damped(fisher_products(mean_kl, parameters), damping)(vector)


def damped(product: Callable[[Vectors], Vectors], damping: float) -> Callable[[Vectors], Vectors]:
    """v -> F v + damping v."""
    return lambda vector: [moved + damping * v for moved, v in zip(product(vector), vector)]


def conjugate_gradients(product: Callable[[Vectors], Vectors], right: Vectors, steps: int = 10) -> Vectors:
    """x with product(x) = right, for a symmetric product that is not negative, in at most `steps` products.

    Starts at 0, so that x stays in the span of right, F right, F^2 right ...: where F is singular (adding a constant to all
    logits changes nothing) and `right` lies in its range, x is F^+ right. Exact after as many steps as F has different
    eigenvalues; stops early once the squared residual is RESIDUAL of the squared right side.
    """
    x = [torch.zeros_like(b) for b in right]
    residual, direction = [b.clone() for b in right], [b.clone() for b in right]
    squared = start = least = dot(residual, residual).item()
    best = x
    for _ in range(steps):
        if squared <= RESIDUAL * start:
            break
        moved = product(direction)
        curvature = dot(direction, moved).item()
        if curvature <= 0:  # rounding, or a direction in which the policy does not change
            break
        length = squared / curvature
        x = [a + length * d for a, d in zip(x, direction)]
        residual = [r - length * m for r, m in zip(residual, moved)]
        last, squared = squared, dot(residual, residual).item()
        if squared < least:  # once rounding is all that is left, further steps make it worse
            least, best = squared, x
        direction = [r + squared / last * d for r, d in zip(residual, direction)]
    return best


class Step(NamedTuple):
    """What one trust-region step did."""

    accepted: bool  # the full step, before any shrinking
    shrinks: int  # how often it was shrunk; with `moved` False: in vain
    moved: bool
    full_kl: float  # KL(old || new) of the full step
    full_gain: float
    kl_old_current: float  # of the step that was taken
    gain: float  # surrogate after minus surrogate before
    length: float  # sqrt(2 delta / x'Fx)
    residual: float  # |(F + damping I) x - g| / |g|: what the conjugate gradients left


def trust_region_step(
    surrogate: Callable[[], Tensor],
    mean_kl: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    delta: float = 0.01,
    damping: float = 0.0,
    cg_steps: int = 10,
    shrink: float = 0.8,
    tries: int = 10,
) -> Step:
    """Move `parameters` by one trust-region step, in place; leave them as they were where no try is accepted.

    surrogate() -> scalar to maximise; mean_kl() -> mean KL(old || current), a scalar. Both are functions of `parameters`, which
    are at `old` when this is called. The length comes from F without damping, so that damping changes the direction only.
    A gradient of 0 moves nothing. Raises ValueError for delta <= 0, damping < 0, or shrink outside (0, 1).
    Source: arXiv 1502.05477, appendix C; defaults of the line search as Spinning Up (.8, ten tries).
    """
    if not (delta > 0 and damping >= 0 and 0 < shrink < 1):
        raise ValueError(
            f"delta {delta}, damping {damping}, shrink {shrink}: wanted delta > 0, damping >= 0, 0 < shrink < 1"
        )
    before = surrogate()
    gradient = list(torch.autograd.grad(before, parameters))
    fisher = fisher_products(mean_kl(), parameters)
    x = conjugate_gradients(damped(fisher, damping), gradient, cg_steps)
    moved = fisher(x)
    curvature = dot(x, moved).item()
    if not curvature > 0:
        return Step(False, 0, False, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    left = [m + damping * a - b for m, a, b in zip(moved, x, gradient)]
    residual = math.sqrt((dot(left, left) / dot(gradient, gradient)).item())
    length = math.sqrt(2 * delta / curvature)
    old = [p.detach().clone() for p in parameters]
    before = before.item()

    def at(scale: float) -> tuple[float, float]:
        with torch.no_grad():
            for p, start, d in zip(parameters, old, x):
                p.copy_(start + scale * length * d)
            return mean_kl().item(), surrogate().item() - before

    full_kl, full_gain = kl_now, gain = at(1.0)
    for shrinks in range(tries + 1):
        if gain > 0 and kl_now <= delta:
            return Step(shrinks == 0, shrinks, True, full_kl, full_gain, kl_now, gain, length, residual)
        if shrinks < tries:
            kl_now, gain = at(shrink ** (shrinks + 1))
    with torch.no_grad():
        for p, start in zip(parameters, old):
            p.copy_(start)
    return Step(False, tries, False, full_kl, full_gain, 0.0, 0.0, length, residual)


def dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """The inner product over all tensors."""
    return sum((a * b).sum() for a, b in zip(left, right))
