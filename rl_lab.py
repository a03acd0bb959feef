"""The atoms of PPO, DPO and GRPO, and three small trainings that are built from nothing else.

Reading order: atoms (pure functions on tensors), the bandit (the task), training, files, command line.

Letters: B batch rows, A actions, T time steps or token positions, G answers to one prompt, V vocabulary, C contexts;
`[..., T]` means any leading axes. `old` is the policy that produced the samples; it stays fixed while its batch is
reused. `reference` is the policy to stay near; it never changes. A `*_loss` is minimised. Loss atoms return one value
per sample or token: the caller writes the reduction. float16 and bfloat16 are computed in float32 and wider ones as they
are; a result has the dtype of the arguments.

Same as the papers: the clipped surrogate (PPO, arXiv 1707.06347), GAE (arXiv 1506.02438), the DPO loss (arXiv
2305.18290), group advantages (GRPO in DeepSeekMath, arXiv 2402.03300). Simplified: one-step episodes, a table of logits
for a policy, the exact KL where the papers estimate it. Left out: entropy bonus, value clipping in training, advantage
standardisation in PPO.
"""

from __future__ import annotations

import os
import signal
import sys


def end_before_the_start(number: int, frame: object) -> None:
    """What Ctrl-C and SIGTERM do while a command is still importing, most of a short run: end it with one line."""
    os.write(2, b"interrupted before anything was started\n")
    os._exit(128 + number)


if os.path.basename((sys.argv or [""])[0]) in ("rl_lab.py", "ppo_chain.py", "token_objectives.py"):
    for _number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(_number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(_number, end_before_the_start)  # until run_command takes over

import argparse
import contextlib
import csv
import dataclasses
import functools
import io
import itertools
import json
import math
import numbers
import platform
import re
import stat
import statistics
import tempfile
import threading
from pathlib import Path
from typing import Callable, NamedTuple, Sequence

try:
    import torch
    import torch.nn.functional as F
    from torch import Tensor
except KeyboardInterrupt:
    # The import takes most of a short run: Ctrl-C there deserves the same one line as later on.
    print("interrupted before anything was started", file=sys.stderr)
    sys.exit(130)
except ModuleNotFoundError as problem:
    if __name__ != "__main__" or problem.name != "torch":
        raise
    sys.exit("rl_lab.py: error: torch is not installed for this Python; enter the environment (README.txt, section 1) first")

# ------------------------------------------------------------------------------------------ refusing bad input


_DTYPES = {
    "floating": ("float16", "bfloat16", "float32", "float64"),
    "bool": ("bool",),
    "integer": ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
}
_HALF = {torch.float16, torch.bfloat16}
# An older torch has no uint16, uint32, uint64. Float8, complex and quantized dtypes are in no list, so they are refused.
_KINDS = {kind: {getattr(torch, name) for name in names if hasattr(torch, name)} for kind, names in _DTYPES.items()}


def _check_kind(kind: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        is_tensor = isinstance(tensor, Tensor)
        if not is_tensor or tensor.dtype not in _KINDS[kind]:
            got = f"dtype {tensor.dtype}" if is_tensor else type(tensor).__name__
            choices = f"dtype ({', '.join(_DTYPES[kind])}); convert it where it is made" if is_tensor else "torch.Tensor"
            raise TypeError(f"{name}: got {got}, wanted {'an' if kind == 'integer' else 'a'} {kind} {choices}")
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested:
            what = "meta" if tensor.is_meta else "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise TypeError(f"{name}: got a {what} tensor, wanted a dense one that holds its numbers")


def _check_same_shape(**tensors: Tensor) -> None:
    shapes = [tensor.shape for tensor in tensors.values()]
    if shapes.count(shapes[0]) < len(shapes):
        got = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        without_ones = {tuple(size for size in shape if size != 1) for shape in shapes}
        likely = "a [B, 1] that would broadcast against [B]" if len(without_ones) == 1 else "one was cut, shifted or padded"
        raise ValueError(f"shapes differ: got {got}, wanted one shape; likely {likely}")


def _check_last_axis(name: str, tensor: Tensor, at_least: int, meaning: str) -> None:
    if tensor.dim() == 0 or tensor.shape[-1] < at_least:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, wanted at least {at_least} on the last axis, {meaning}")


def _all_finite(tensor: Tensor) -> bool:
    """A finite sum proves it in one pass; only where the sum is not (it may have overflowed) each number is looked at."""
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def _check_finite(name: str, used: Tensor, likely: str) -> None:
    if not _all_finite(used):
        where = (~torch.isfinite(used)).nonzero()[0].tolist()
        raise ValueError(f"{name}: got {used[tuple(where)].item()} at index {where}, wanted finite numbers; likely {likely}")


def _check_not_nan(result: Tensor, likely: str, **inputs: Tensor) -> None:
    """Refuse a NaN in an elementwise result, with the numbers that it comes from."""
    is_nan = result.isnan()
    if is_nan.any():
        where = is_nan.nonzero()[0].tolist()
        got = ", ".join(f"{name} {tensor[tuple(where)].item()}" for name, tensor in inputs.items())
        raise ValueError(f"{', '.join(inputs)}: got {got} at index {where}, which give NaN; likely {likely}")


def _check_number(
    name: str, value: float, low: float, high: float = math.inf, *, above: bool = False, dtype: torch.dtype | None = None
) -> float:
    """-> the number as a float. `dtype`: of the tensors that it is combined with, which must be able to hold it."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: got {type(value).__name__}, wanted a plain number")
    got = ""
    try:
        number = float(value)
    except OverflowError:
        number, got = math.inf, "a number that no float holds"
    if not (low < number if above else low <= number) or not number <= high or number == math.inf:
        upper = "" if math.isinf(high) else f" and at most {high:g}"
        bound = f"{'above' if above else 'of at least'} {low:g}{upper}"
        raise ValueError(f"{name}: got {got or repr(value)}, wanted a finite number {bound}")
    if dtype is not None and number > torch.finfo(dtype).max:
        raise ValueError(f"{name}: got {value!r}, wanted a number that {dtype} holds, at most {torch.finfo(dtype).max:g}")
    return number


def _widened(**tensors: Tensor) -> tuple[torch.dtype, list[Tensor]]:
    """Floating tensors of one shape: the dtype that an atom answers in, theirs, and the tensors in the one it computes in.

    float16 and bfloat16 are for storage: their spacing (0.1 % and 0.8 %) would swallow small differences and long sums. So
    everything is computed in float32 or wider, from the numbers as they are stored, and rounded once, at the end.
    """
    _check_kind("floating", **tensors)
    _check_same_shape(**tensors)
    dtypes = {tensor.dtype for tensor in tensors.values()}
    dtype = functools.reduce(torch.promote_types, dtypes)
    wide = torch.float32 if dtype in _HALF else dtype
    return dtype, [tensor if tensor.dtype == wide else tensor.to(wide) for tensor in tensors.values()]


# ------------------------------------------------------------------------------------------ atoms: policy gradient


def action_logps(logits: Tensor, actions: Tensor) -> Tensor:
    """Log-probability of each taken action under a softmax policy.

    logp = z_a - log sum_b exp(z_b), computed by log_softmax; log(softmax(z)) loses the small probabilities.

    logits [..., A] floating (-inf marks an action that is not allowed: its log-probability is -inf), actions [...] integer
    -> [...]. Gradient: to logits.
    Raises TypeError for a wrong dtype; ValueError for a wrong shape, an action outside 0..A-1, or a row of logits that is
    no distribution (a NaN, a +inf, or no action allowed).
    """
    dtype, (logits,) = _widened(logits=logits)
    _check_kind("integer", actions=actions)
    _check_last_axis("logits", logits, 1, "the actions")
    if logits.shape[:-1] != actions.shape:
        raise ValueError(
            f"actions: got shape {tuple(actions.shape)}, wanted {tuple(logits.shape[:-1])}, the shape of logits without "
            "its last axis"
        )
    actions = actions.long()
    if actions.numel() and not 0 <= actions.min() <= actions.max() < logits.shape[-1]:
        raise ValueError(
            f"actions: got numbers from {actions.min()} to {actions.max()}, wanted 0 to {logits.shape[-1] - 1}"
        )
    logps = _logps_of(logits, actions)
    _check_distributions("logits", logps)
    return logps.to(dtype)


def _logps_of(logits: Tensor, actions: Tensor) -> Tensor:
    return logits.log_softmax(dim=-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def _check_distributions(name: str, computed: Tensor) -> None:
    """Refuse rows of logits that are no distribution, which show as NaN in what was computed from them."""
    is_nan = computed.isnan()
    if is_nan.any():
        where = is_nan.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: the row at index {where} is no distribution, wanted numbers or -inf and at least one action allowed; "
            "likely a NaN, a +inf, or every action masked"
        )


def reinforce_loss(logp: Tensor, returns: Tensor) -> Tensor:
    """REINFORCE, per sample: -logp * returns.

    The mean of its gradient over samples of the current policy estimates minus the gradient of the expected return.
    `returns` may have a baseline subtracted that does not depend on the sampled action: the expected gradient stays the
    same, its variance changes.

    logp [...], returns [...] floating -> [...]. Gradient: to logp only. Raises TypeError, ValueError (shapes differ, a
    return that is not finite, a log-probability that gives NaN). Source: Williams 1992; Sutton et al. 1999.
    """
    dtype, (logp, returns) = _widened(logp=logp, returns=returns)
    _check_finite("returns", returns, "a failed reward computation")
    loss = -(logp * returns.detach())
    likely = "a forward pass that failed, or an action of probability 0, which cannot have been sampled"
    _check_not_nan(loss, likely, logp=logp, returns=returns)
    return loss.to(dtype)


# ------------------------------------------------------------------------------------------ atoms: time


def td_residuals(rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, gamma: float = 1.0) -> Tensor:
    """One-step TD residual: delta_t = r_t + gamma * (0 if terminated_t else V(next_t)) - V(s_t).

    `next_values` is the value of the true next observation, before any reset; where `terminated` is set it is not read
    and may hold anything. A time limit is not a termination.

    rewards, values, next_values [..., T] floating, terminated [..., T] bool, gamma in [0, 1] -> [..., T].
    Gradient: none. Raises TypeError, ValueError (shapes, gamma, a non-finite number that would be used, a residual that
    overflows).
    """
    dtype, (rewards, values, next_values) = _widened(rewards=rewards, values=values, next_values=next_values)
    _check_kind("bool", terminated=terminated)
    _check_same_shape(rewards=rewards, terminated=terminated)
    _check_last_axis("rewards", rewards, 1, "the time steps")
    gamma = _check_number("gamma", gamma, 0.0, 1.0)
    deltas = _residuals(rewards.detach(), values.detach(), next_values.detach(), terminated, gamma).to(dtype)
    if not _all_finite(deltas):  # only now, since it takes time: which number is to blame
        _check_finite("rewards", rewards, "a failed reward computation")
        _check_finite("values", values, "a critic that has diverged")
        used = torch.where(terminated, rewards, next_values)
        _check_finite("next_values", used, "a critic that has diverged, or an unset value at a time limit")
        _check_finite("td residual", deltas, f"rewards or values near the largest number of {dtype}")
    return deltas


def _residuals(rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, gamma: float) -> Tensor:
    """gamma * (0 if terminated else next_values) + rewards - values; in one piece of memory, which is quick to fill."""
    bootstrap = next_values.masked_fill(terminated, 0.0)
    return bootstrap.mul_(gamma).add_(rewards).sub_(values)


def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    boundary: Tensor,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, and the lambda-returns that a critic regresses on.

    A_t = delta_t + gamma * lam * (0 if boundary_t else A_{t+1}), delta_t from td_residuals; returns_t = A_t + V(s_t). From
    the last step to the first:

        following = 0
        for delta, boundary in reversed(steps):
            following = delta + gamma * lam * (0 if boundary else following)

    Two flags, since they answer two questions: `terminated` stops the bootstrap (nothing comes after), `boundary` stops
    the recursion (the next row belongs to another episode). An ordinary step sets neither, a real end both, a time limit
    or a cut buffer only `boundary`. lam = 0 gives one-step TD; lam = 1 gives the discounted return minus the value.

    rewards, values, next_values [..., T] floating, terminated, boundary [..., T] bool, gamma and lam in [0, 1]
    -> (advantages [..., T], returns [..., T]). The last axis is time; leading axes are a batch, and each row is computed
    as if it were alone, to the last bit. Series of more than 8 steps are summed in float64, whatever the dtype.
    Gradient: none. Raises TypeError, ValueError (as td_residuals; an advantage or a return that overflows its dtype;
    terminated without boundary). Source: arXiv 1506.02438 equations 11-16; the paper has one episode and no flags.
    """
    dtype, wide = _widened(rewards=rewards, values=values, next_values=next_values)
    _check_kind("bool", terminated=terminated, boundary=boundary)
    _check_same_shape(rewards=rewards, terminated=terminated, boundary=boundary)
    _check_last_axis("rewards", rewards, 1, "the time steps")
    gamma, lam = _check_number("gamma", gamma, 0.0, 1.0), _check_number("lam", lam, 0.0, 1.0)
    if not torch.equal(terminated | boundary, boundary):
        where = (terminated & ~boundary).nonzero()[0].tolist()
        raise ValueError(
            f"boundary: got False at index {where} where terminated is True, wanted True: an episode that ended is over; "
            "likely the two flags were exchanged"
        )
    rewards, values, next_values = (tensor.detach() for tensor in wide)
    deltas = _residuals(rewards, values, next_values, terminated, gamma)
    sums = _discounted_sums(deltas, boundary, gamma * lam)
    advantages, returns = sums.to(dtype), (sums + values).to(dtype)
    if not (_all_finite(returns) and (dtype == sums.dtype or _all_finite(advantages))):
        # Only now, since it takes time: which number of the input is bad, or which sum overflows.
        td_residuals(rewards, values, next_values, terminated, gamma)
        _check_sums("advantages", advantages)
        _check_sums("returns", returns)
    return advantages, returns


# Which way of summing is the fastest, all of them giving the same bits: up to so many time steps as they stand; up to so
# many rows as plain Python floats; else so many time steps at a time, which fit the cache, each in one piece of memory.
_FEW_STEPS, _FEW_ROWS, _BLOCK_OF_STEPS = 8, 16, 64


def _discounted_sums(deltas: Tensor, boundary: Tensor, discount: float) -> Tensor:
    """following = delta + discount * (0 if boundary else following), from the last step to the first. [..., T].

    Multiplying by a carry of 0 at a boundary is a selection as long as all sums are finite; `gae` refuses others. Long
    series are summed in float64, and both ways round the same product and the same sum. May overwrite `deltas`.
    """
    steps = deltas.shape[-1]
    if steps <= _FEW_STEPS:
        if steps == 1:
            return deltas
        sums = deltas.unbind(-1)
        _accumulate(sums[:-1], _carries(deltas, boundary, discount).unbind(-1)[:-1], sums[-1])
        return deltas
    rows, ends = deltas.reshape(-1, steps), boundary.reshape(-1, steps)
    if len(rows) <= _FEW_ROWS:
        carries = _carries(rows.double(), ends, discount)
        carries[:, -1] = 0.0  # so rows laid end to end are one series
        sums, following = [], 0.0
        for delta, carry in zip(reversed(rows.flatten().tolist()), reversed(carries.flatten().tolist())):
            following = delta + carry * following
            sums.append(following)
        return deltas.new_tensor(sums[::-1]).reshape(deltas.shape)
    following = 0.0
    for start in reversed(range(0, steps, _BLOCK_OF_STEPS)):
        part = slice(start, start + _BLOCK_OF_STEPS)
        sums, cut = (tensor.contiguous().t().contiguous() for tensor in (rows[:, part].double(), ends[:, part]))
        following = _accumulate(sums.unbind(), _carries(sums, cut, discount).unbind(), following)
        rows[:, part] = sums.t().contiguous()
    return rows.reshape(deltas.shape)


def _carries(like: Tensor, boundary: Tensor, discount: float) -> Tensor:
    return torch.full_like(like, discount).masked_fill_(boundary, 0.0)


def _accumulate(deltas: Sequence[Tensor], carries: Sequence[Tensor], following: Tensor | float) -> Tensor:
    """The recursion in place, one tensor per time step: each sum comes to stand where its residual stood. -> the first."""
    for delta, carry in zip(reversed(deltas), reversed(carries)):
        following = delta.add_(carry.mul_(following))
    return following


def _check_sums(name: str, sums: Tensor) -> None:
    """As _check_finite, but names the step where a sum overflowed, which is the last one in time: it runs backwards."""
    bad = (~torch.isfinite(sums)).nonzero()
    if len(bad):
        where = bad[(bad[:, :-1] == bad[0, :-1]).all(dim=1)][-1].tolist()
        likely = f"rewards or values near the largest number of {sums.dtype}"
        raise ValueError(f"{name}: got {sums[tuple(where)].item()} at index {where}, wanted finite sums; likely {likely}")


# ------------------------------------------------------------------------------------------ atoms: ratio and clipping


def importance_ratio(logp: Tensor, old_logp: Tensor) -> Tensor:
    """Probability ratio of current to old policy at the same state and action: rho = exp(logp - old_logp).

    The exponent stops just below the logarithm of the dtype's largest number (708.8 in float64, 87.7 in float32 and
    bfloat16, 10.1 in float16), so that the branch a clip does not take cannot overflow and turn a zero gradient into NaN
    (0 * inf). Above that cap the ratio is constant and has no gradient.

    logp, old_logp [...] floating -> [...]. Gradient: to logp only; old_logp is detached here, so that a caller who
    forgot cannot cancel the gradient. A logp of -inf (an action that is masked by now) has ratio 0. A NaN stays in its
    slot, so that a mask which selects can leave it out. Raises TypeError, ValueError (shapes differ).
    """
    dtype, (logp, old_logp) = _widened(logp=logp, old_logp=old_logp)
    return _capped_ratio(logp, old_logp, dtype).to(dtype)


def _capped_ratio(logp: Tensor, old_logp: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(logp - old_logp), at most a e-th part of the largest number of `dtype`."""
    log_ratio = logp - old_logp.detach()
    return log_ratio.clamp(max=math.log(torch.finfo(dtype).max) - 1).exp()


def clipped_policy_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, epsilon: float = 0.2) -> Tensor:
    """PPO-Clip, per sample: -min(rho * A, clip(rho, 1 - epsilon, 1 + epsilon) * A), rho = exp(logp - old_logp).

    Flat where the policy has already moved far enough in the direction that A asks for (rho > 1 + epsilon with A > 0,
    rho < 1 - epsilon with A < 0); elsewhere d loss / d logp = -rho * A, however far rho is, up to the cap of
    importance_ratio. It does not hold rho inside the band, and it is no trust region.

    logp, old_logp, advantages [...] floating, epsilon > 0 -> [...]. Gradient: to logp only. A NaN stays in its slot, so that
    a mask which selects can leave it out. Raises TypeError, ValueError (shapes, epsilon). Source: arXiv 1707.06347
    equation 7, negated.
    """
    dtype, (logp, old_logp, advantages) = _widened(logp=logp, old_logp=old_logp, advantages=advantages)
    epsilon = _check_number("epsilon", epsilon, 0.0, above=True, dtype=logp.dtype)
    advantages = advantages.detach()
    ratio = _capped_ratio(logp, old_logp, dtype)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon) * advantages).to(dtype)


def clip_fraction(logp: Tensor, old_logp: Tensor, epsilon: float = 0.2) -> Tensor:
    """Share of samples whose ratio lies outside [1 - epsilon, 1 + epsilon], whatever the sign of the advantage.

    It is not the share of samples that lost their gradient: rho = 1.5 with A = -1 is outside and keeps gradient 1.5.

    logp, old_logp [...] floating, at least one sample, epsilon > 0 -> scalar in [0, 1]. Gradient: none.
    Raises TypeError, ValueError (shapes, epsilon, log-probabilities whose difference is NaN, no sample).
    """
    dtype, (logp, old_logp) = _widened(logp=logp, old_logp=old_logp)
    epsilon = _check_number("epsilon", epsilon, 0.0, above=True)
    if not logp.numel():
        raise ValueError(f"logp: got shape {tuple(logp.shape)}, wanted at least one sample: nothing has no share")
    ratio = _capped_ratio(logp, old_logp, dtype).detach()
    _check_not_nan(ratio, "slots that a mask should have left out", logp=logp, old_logp=old_logp)
    outside = (ratio < 1 - epsilon) | (ratio > 1 + epsilon)
    return outside.to(ratio.dtype).mean().to(dtype)


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, epsilon: float = 0.2) -> Tensor:
    """Value regression with PPO's optional clip, per sample.

    max((V - R)^2, (V_old + clip(V - V_old, -epsilon, epsilon) - R)^2): the larger of the two, without a factor 1/2.
    The trainings of this lab use the plain square; this atom is here because trainers ship it.

    values, old_values, returns [...] floating, epsilon > 0 (in units of the value) -> [...]. Gradient: to values only.
    A NaN stays in its slot. Raises TypeError, ValueError (shapes, epsilon). Source: the OpenAI baselines PPO2 code; the
    paper does not mention it.
    """
    dtype, (values, old_values, returns) = _widened(values=values, old_values=old_values, returns=returns)
    epsilon = _check_number("epsilon", epsilon, 0.0, above=True, dtype=values.dtype)
    old_values, returns = old_values.detach(), returns.detach()
    clipped_values = old_values + (values - old_values).clamp(-epsilon, epsilon)
    return torch.maximum((values - returns).square(), (clipped_values - returns).square()).to(dtype)


# ------------------------------------------------------------------------------------------ atoms: KL


def categorical_kl(logits: Tensor, reference_logits: Tensor) -> Tensor:
    """Exact KL(logits || reference) between two softmax distributions: sum_a p_a * (log p_a - log q_a).

    p = softmax(logits), q = softmax(reference_logits); an action of probability 0 contributes 0. Infinite where p puts
    weight on an action that q forbids (-inf). Not symmetric: swapping the arguments gives another number.

    logits, reference_logits [..., A] floating -> [...] in nats. Gradient: to logits only.
    Raises TypeError, ValueError (shapes differ; a row that is no distribution: a NaN, a +inf, or no action allowed).
    """
    dtype, (logits, reference_logits) = _widened(logits=logits, reference_logits=reference_logits)
    _check_last_axis("logits", logits, 1, "the actions")
    logp = logits.log_softmax(dim=-1)
    probability = logp.exp()
    gap = (logp - reference_logits.detach().log_softmax(dim=-1)).masked_fill(probability == 0, 0.0)
    kl = (probability * gap).sum(dim=-1)
    _check_distributions("logits or reference_logits", kl)
    return kl.to(dtype)


def kl_estimates(logp: Tensor, ref_logp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three per-sample estimates of KL(current || reference) from samples of the current policy.

    With d = logp - ref_logp: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (the form in the GRPO paper).
    Averaged over samples of the current policy, k1 and k3 equal the KL; k2 does not. k3 and k2 are never negative, k1
    may be. Samples of any other policy (an old one, say) give other averages. As a loss with the samples held fixed the
    mean gradients are: k1 zero, k2 that of KL(current || reference), k3 that of KL(reference || current).

    logp, ref_logp [...] floating -> three [...] in nats. Gradient: to logp only. Values and gradients keep their digits for
    any d, also where exp(-d) - 1 and d cancel. A NaN stays in its slot. Raises TypeError, ValueError (shapes differ).
    Source: arXiv 2402.03300 equation 4 (k3); Schulman's note on approximating KL divergence.
    """
    dtype, (logp, ref_logp) = _widened(logp=logp, ref_logp=ref_logp)
    log_ratio = logp - ref_logp.detach()
    estimates = log_ratio, log_ratio * (log_ratio / 2), _ExpMinusTangent.apply(-log_ratio)
    return tuple(estimate.to(dtype) for estimate in estimates)


class _ExpMinusTangent(torch.autograd.Function):
    """exp(x) - 1 - x, the height of the exponential above its tangent at 0, and its slope exp(x) - 1, to full precision.

    Near 0 the difference expm1(x) - x would lose digits, all of them below |x| = 1e-7 in float32. The series does not:
    x^2 / 2 * (1 + x/3 (1 + x/4 (1 + ...))); up to |x| = 1/2 its term 14 is below the rounding of float64.
    """

    @staticmethod
    def forward(context, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        near = x.clamp(-0.5, 0.5)
        series = torch.ones_like(near)
        for term in range(15, 2, -1):
            series = series.mul_(near).div_(term).add_(1)
        far = torch.expm1(x) - x.clamp(max=torch.finfo(x.dtype).max)  # where x is +inf, the exponential wins
        return torch.where(near == x, series.mul_(near).mul_(near / 2), far)

    @staticmethod
    def backward(context, slope: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        return slope * torch.expm1(x)


# ------------------------------------------------------------------------------------------ atoms: preferences


def preference_probability(reward_chosen: Tensor, reward_rejected: Tensor) -> Tensor:
    """Bradley-Terry: P(chosen preferred) = sigmoid(reward_chosen - reward_rejected).

    Only the difference matters: two bad answers are compared like two good ones.

    reward_chosen, reward_rejected [...] floating -> [...] in [0, 1]. Gradient: to both.
    Raises TypeError, ValueError (shapes differ, a reward that is not finite). Source: Bradley and Terry 1952.
    """
    dtype, (reward_chosen, reward_rejected) = _widened(reward_chosen=reward_chosen, reward_rejected=reward_rejected)
    _check_finite("reward_chosen", reward_chosen, "a failed reward model")
    _check_finite("reward_rejected", reward_rejected, "a failed reward model")
    return torch.sigmoid(reward_chosen - reward_rejected).to(dtype)


def dpo_loss(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float) -> Tensor:
    """DPO, per pair: -log sigmoid(beta * h), h = (chosen - ref_chosen) - (rejected - ref_rejected).

    Each argument is the log-probability of a whole answer: the sum over its tokens, not the mean (a mean is another
    objective). At policy = reference the loss is log 2 and the gradient is -beta/2 to chosen, +beta/2 to rejected. The
    loss asks h to grow; the probability of the chosen answer may still fall.

    chosen, rejected, ref_chosen, ref_rejected [...] floating, beta > 0 -> [...]. Gradient: to chosen and rejected.
    Raises TypeError, ValueError (shapes, beta, log-probabilities whose margin h is NaN). Source: arXiv 2305.18290
    equation 7.
    """
    scores = dict(chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    dtype, (chosen, rejected, ref_chosen, ref_rejected) = _widened(**scores)
    beta = _check_number("beta", beta, 0.0, above=True, dtype=chosen.dtype)
    margin = (chosen - ref_chosen.detach()) - (rejected - ref_rejected.detach())
    scaled = beta * margin
    _check_not_nan(scaled, "a forward pass that failed, or answers that two of the four call impossible", **scores)
    # logsigmoid is linear for very negative margins; log(sigmoid(.)) would give -inf there.
    return -F.logsigmoid(scaled).to(dtype)


# ------------------------------------------------------------------------------------------ atoms: groups


# Two sums of the same n rewards of one sign, added in different orders, differ by at most (n - 1) eps times the sum. So 128
# stands for 129 parts of one sign, or for 17 parts that cancel down to an eighth.
SPREAD_TOLERANCE = 128


def groups_without_spread(rewards: Tensor) -> Tensor:
    """Whether all rewards of a group are equal, up to the rounding of a sum.

    True where max - min <= 128 eps max|R|: a reward that is added up from parts, in another order for each answer, counts
    as equal (2.8e-14 of the largest reward in float64, 1.5e-5 in float32); a difference that was meant is larger. float16
    and bfloat16 have the eps of float32, in which their rewards were computed: they keep so few digits that a difference
    which is left is a real one, and only equal numbers count as equal.

    Parts that cancel to nearly nothing (0.1 + 0.2 - 0.3 beside 0) leave a spread that no rule on the sums can tell from a
    real one: round such rewards where they are made.

    rewards [..., G] floating -> [...] bool. Gradient: none. Raises TypeError, ValueError (no group, non-finite rewards).
    """
    _, (rewards,) = _widened(rewards=rewards)
    _check_last_axis("rewards", rewards, 1, "the answers to one prompt")
    _check_finite("rewards", rewards, "a failed verifier or reward model")
    scaled, _ = _in_units_of_the_largest(rewards.detach())
    low, high = scaled.aminmax(dim=-1)
    return high - low <= SPREAD_TOLERANCE * torch.finfo(rewards.dtype).eps * torch.maximum(low.abs(), high.abs())


def group_advantages(rewards: Tensor, eps: float = 1e-8) -> Tensor:
    """GRPO's advantage within each group: A_i = (R_i - mean(R)) / (std(R) + eps).

    std is the population standard deviation (divisor G). A group without spread (groups_without_spread) gets exactly zero.
    `eps` only guards the division; it has nothing to do with the clip. Groups are rows: rewards of different prompts never
    mix. The mean contains R_i itself and std is random, so this is a relative rule, not an action-independent baseline.

    rewards [..., G] floating and finite, G >= 2, eps >= 0 -> [..., G]. Gradient: none. Computed in float64.
    Raises TypeError, ValueError (a group of one, non-finite rewards, eps). Source: arXiv 2402.03300 section 4.1, which
    leaves the divisor of std and the guard open; public trainers differ in both.
    """
    equal = groups_without_spread(rewards)
    _check_last_axis("rewards", rewards, 2, "the answers to one prompt: one answer has nothing to be compared with")
    eps = _check_number("eps", eps, 0.0)
    with torch.no_grad():
        scaled, unit = _in_units_of_the_largest(rewards.double())
        centred = scaled - scaled.mean(dim=-1, keepdim=True)
        std = centred.square().mean(dim=-1, keepdim=True).sqrt()
        guard = torch.full_like(unit, eps) / unit  # torch computes eps / unit as eps * (1 / unit), which may overflow
        advantages = torch.where(equal.unsqueeze(-1), torch.zeros_like(centred), centred / (std + guard))
        return advantages.to(rewards.dtype)


def _in_units_of_the_largest(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards over a power of two near each group's largest, and that unit. Exact; squares neither overflow nor vanish."""
    _, exponent = torch.frexp(rewards.abs().amax(dim=-1, keepdim=True))
    unit = torch.ldexp(torch.ones_like(rewards[..., :1]), exponent - 1)
    return rewards / unit, unit


def zero_variance_probability(probabilities: Tensor, group_size: int) -> Tensor:
    """Chance that G independent draws all give the same outcome: sum_a p_a^G.

    For a success probability p this is p^G + (1 - p)^G; for three equally likely actions 3^(1 - G).

    probabilities [..., A] floating, each row summing to 1, group_size a whole number >= 1 -> [...].
    Gradient: to probabilities. Raises TypeError, ValueError (group_size, a negative probability, a row whose sum is off by
    more than 1e-5 and the rounding of its dtype).
    """
    dtype, (probabilities,) = _widened(probabilities=probabilities)
    _check_last_axis("probabilities", probabilities, 1, "the outcomes")
    size = _check_number("group_size", group_size, 1, dtype=probabilities.dtype)
    if size != int(size):
        raise ValueError(f"group_size: got {group_size!r}, wanted a whole number")
    stored = torch.finfo(dtype)  # each probability was rounded: by eps of itself, or by the smallest number there is
    tolerance = 1e-5 + stored.eps + stored.smallest_normal * stored.eps * probabilities.shape[-1]
    too_far = (probabilities.detach().sum(dim=-1) - 1).abs() > tolerance
    if not (probabilities >= 0).all() or too_far.any():
        raise ValueError("probabilities: wanted no negative number and rows that sum to 1; likely logits were given")
    return probabilities.pow(size).sum(dim=-1).to(dtype)


# ------------------------------------------------------------------------------------------ atoms: token sequences


def response_token_logps(logits: Tensor, input_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each response token of a causal language model, and which positions count.

    The logits at position t predict the token at t + 1, so
    token_logps[:, t] = log_softmax(logits[:, t])[input_ids[:, t + 1]] where response_mask[:, t + 1], else 0, and
    valid = response_mask[:, 1:]: the mask follows the target token.

    `response_mask` marks the tokens the policy wrote: prompt False, padding False, the real EOS True (also where EOS and
    PAD share an id: `ids != EOS` would drop it), tool output False. Logits of unused positions are never read: NaN or
    -inf there changes neither value nor gradient.

    logits [B, T, V] floating, input_ids [B, T] integer, response_mask [B, T] bool -> (token_logps [B, T-1], valid
    [B, T-1] bool). Gradient: to logits, at used positions only.
    Raises TypeError; ValueError (shapes; an id outside the vocabulary; a mask that is set at position 0, which nothing
    predicts; a row without a response token; used logits that are no distribution).
    """
    token_logps, valid = _token_logps(logits, input_ids, response_mask)
    return token_logps.to(logits.dtype), valid


def _token_logps(logits: Tensor, input_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """As response_token_logps, in float32 or wider."""
    _check_kind("floating", logits=logits)
    _check_kind("integer", input_ids=input_ids)
    _check_kind("bool", response_mask=response_mask)
    if logits.dim() != 3:
        raise ValueError(f"logits: got shape {tuple(logits.shape)}, wanted [B, T, V]")
    for name, tensor in (("input_ids", input_ids), ("response_mask", response_mask)):
        if tensor.shape != logits.shape[:2]:
            raise ValueError(
                f"{name}: got shape {tuple(tensor.shape)}, wanted {tuple(logits.shape[:2])}, the [B, T] of logits; "
                "likely one of them was shifted already: pass all three unshifted"
            )
    if response_mask[:, :1].any():
        row = int(response_mask[:, 0].nonzero()[0])
        raise ValueError(f"response_mask: row {row} is set at position 0, which no earlier position predicts")
    if not response_mask.any(dim=1).all():
        row = int((~response_mask.any(dim=1)).nonzero()[0])
        raise ValueError(f"response_mask: row {row} has no response token; drop the row or mend the mask")
    input_ids = input_ids.long()  # also from unsigned ids, which have no minimum
    low, high = (int(bound) for bound in input_ids.aminmax()) if input_ids.numel() else (0, 0)
    if low < 0 or high >= logits.shape[-1]:
        raise ValueError(
            f"input_ids: got ids from {low} to {high}, wanted 0 to {logits.shape[-1] - 1}; likely labels with -100 were "
            "passed, or the tokenizer does not belong to the model"
        )
    valid = response_mask[:, 1:]
    # Only the rows of scored positions are normalised: prompt and padding cost neither time nor memory.
    scored = F.pad(valid, (0, 1)).flatten().nonzero().squeeze(1)
    _, (scored_logits,) = _widened(logits=logits.flatten(0, 1).index_select(0, scored))
    scored_logps = _logps_of(scored_logits, input_ids[:, 1:][valid])
    token_logps = scored_logps.new_zeros(valid.shape).masked_scatter(valid, scored_logps)
    _check_distributions("logits", token_logps)
    return token_logps, valid


def response_logps(logits: Tensor, input_ids: Tensor, response_mask: Tensor) -> Tensor:
    """Log-probability of each whole response: the sum of response_token_logps over its tokens.

    log pi(y | x) = sum_t log pi(y_t | x, y_<t). This is the score that DPO compares.

    Arguments, gradient and errors as response_token_logps -> [B]. A sum over hundreds of tokens is rounded once: in float16
    and bfloat16 it still has a spacing of 1 and 8 at -2000, so differences of such scores need float32 logits.
    """
    token_logps, _ = _token_logps(logits, input_ids, response_mask)
    return token_logps.sum(dim=-1).to(logits.dtype)


# ------------------------------------------------------------------------------------------ settings

# A setting is written once: the dataclass field is the keyword of `train`, the command-line flag, the range check and the
# entry in the saved configuration.


class Range(NamedTuple):
    """The numbers a setting may take: whole or real, from `low` (or above it) to `high`."""

    kind: type
    low: float
    high: float
    above: bool = False

    def __str__(self) -> str:
        noun = "a whole number" if self.kind is int else "a number"
        return f"{noun} {'above' if self.above else 'from'} {self.low} {'up ' if self.above else ''}to {self.high}"

    def holds(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.kind is int else (int, float)):
            return False
        return (self.low < value if self.above else self.low <= value) and value <= self.high


def setting(
    default: float, allowed: Range, meaning: str, group: str, flag: str | None = None, short: str | None = None
) -> dataclasses.Field:
    """One field of a settings class, with all that the command line needs to offer it.

    `flag` where it is not the field's name, `short` the name of a value in folder names and tables where it is not the flag.
    """
    meta = dict(allowed=allowed, meaning=meaning, group=group, flag=flag, short=short)
    return dataclasses.field(default=default, metadata=meta)


def flag_of(field: dataclasses.Field) -> str:
    """The command-line flag of a setting."""
    return field.metadata["flag"] or "--" + field.name.replace("_", "-")


def short_name(field: dataclasses.Field) -> str:
    """How folder names and tables call a setting."""
    return field.metadata["short"] or flag_of(field)[2:]


class Settings:
    """Base of the settings classes: refuses values outside their range with the name, the value and the range."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, allowed = getattr(self, field.name), field.metadata["allowed"]
            if not allowed.holds(value):
                raise ValueError(f"{field.name}: got {value!r}, wanted {allowed}")


# The fields of a class are exactly what its reader reads: `--algorithm dpo` refuses --clip-epsilon, which DPOSettings lacks.
# Defaults are the reference run.


@dataclasses.dataclass(frozen=True)
class RunSettings(Settings):
    """What every training reads."""

    seed: int = setting(7, Range(int, 0, 2**63 - 1), "seed of the local random generator", "run")
    steps: int = setting(120, Range(int, 1, 100_000), "outer iterations; 3 only checks that the command works", "run")
    learning_rate: float = setting(0.08, Range(float, 0, 100, above=True), "Adam learning rate", "update")
    max_gradient_norm: float = setting(1.0, Range(float, 0, 1e6, above=True), "gradient norm is clipped to this", "update")


@dataclasses.dataclass(frozen=True)
class ReuseSettings(RunSettings):
    """For a training that makes several updates on one batch of samples."""

    clip_epsilon: float = setting(0.2, Range(float, 0, 1, above=True), "half width of the ratio band", "update")
    max_updates: int = setting(4, Range(int, 1, 1000), "most updates on one batch of samples", "update")
    kl_stop: float = setting(
        0.05, Range(float, 0, 1e6, above=True), "KL(old || current) above this ends the batch's updates", "update"
    )


@dataclasses.dataclass(frozen=True)
class UpdateSettings(ReuseSettings):
    """For a training with a critic: PPO on the bandit and on the chain."""

    value_weight: float = setting(0.5, Range(float, 0, 1e6), "PPO: weight of the critic's squared error", "update")


@dataclasses.dataclass(frozen=True)
class PPOSettings(UpdateSettings):
    """What PPO on the bandit reads."""

    ppo_samples: int = setting(128, Range(int, 1, 1_000_000), "context-action pairs sampled per iteration", "PPO")
    ppo_kl_beta: float = setting(
        0.02, Range(float, 0, 1e6), "weight of the sampled KL to the reference in the reward", "PPO"
    )


@dataclasses.dataclass(frozen=True)
class DPOSettings(RunSettings):
    """What DPO reads."""

    dpo_beta: float = setting(0.5, Range(float, 0, 1e6, above=True), "scale of the preference margin", "DPO")
    preference_flips: int = setting(
        0, Range(int, 0, 1_000_000), "exchange chosen and rejected in this many pairs", "DPO", short="flips"
    )


@dataclasses.dataclass(frozen=True)
class GRPOSettings(ReuseSettings):
    """What GRPO reads."""

    group_size: int = setting(8, Range(int, 2, 4096), "actions sampled for each drawn prompt", "GRPO", short="g")
    online_batch_prompts: int = setting(
        16, Range(int, 1, 4096), "prompts drawn per iteration", "GRPO", "--grpo-prompts", "prompts"
    )
    grpo_kl_weight: float = setting(
        0.02, Range(float, 0, 1e6), "weight of the exact KL to the reference in the loss", "GRPO"
    )


# ------------------------------------------------------------------------------------------ the bandit

REWARDS = torch.tensor(
    [[1.0, 0.2, -0.5], [-0.5, 1.0, 0.2], [0.2, -0.5, 1.0], [1.0, -0.5, 0.2]], dtype=torch.float64
)
"""Reward of each action (column) in each context (row)."""

COMMON_COLUMNS = (
    "step",
    "expected_reward",
    "optimal_action_probability",
    "entropy",
    "kl_old_current",
    "kl_current_reference",
    "loss",
    "gradient_norm",
    "optimizer_steps",
    "sampled_actions",
    "pair_presentations",
)


class Pairs(NamedTuple):
    """Preferences as three columns of P whole numbers: in this context the chosen action is preferred to the rejected."""

    contexts: Tensor
    chosen: Tensor
    rejected: Tensor

    def rows(self) -> list[list[int]]:
        """`[context, chosen, rejected]` for each pair."""
        return torch.stack(self, dim=1).tolist()


class Task(NamedTuple):
    """What is learned, fixed before the first sample. Of S runs side by side only the pairs differ: columns [S, P]."""

    rewards: Tensor  # [C, A]
    reference: Tensor  # [C, A] logits of the policy to stay near
    clean_pairs: Pairs | None = None  # in the order of the reward table; None for a method that compares no pairs
    training_pairs: Pairs | None = None  # the same with some pairs flipped
    flipped_pair_indices: list[int] | None = None


def count_pairs(rewards: Tensor) -> int:
    """How many pairs preference_pairs gives, without making them: all pairs of a context but the ties."""
    contexts, actions = rewards.shape
    ordered = rewards.sort(dim=1).values
    begins = torch.ones_like(ordered, dtype=torch.bool)  # a run of equal rewards
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    equal = begins.flatten().cumsum(0).bincount()  # how long each run is
    return (contexts * actions * (actions - 1) - int((equal * (equal - 1)).sum())) // 2


def preference_pairs(rewards: Tensor) -> Pairs:
    """All pairs of one context whose rewards differ, the better action as chosen.

    rewards [C, A] -> P pairs. The 4x3 table gives 12; equal rewards make no preference.
    """
    first, second = torch.triu_indices(rewards.shape[1], rewards.shape[1], 1)
    contexts, pair = (rewards[:, first] != rewards[:, second]).nonzero(as_tuple=True)
    first, second = first[pair], second[pair]
    first_is_better = rewards[contexts, first] > rewards[contexts, second]
    chosen, rejected = torch.where(first_is_better, first, second), torch.where(first_is_better, second, first)
    return Pairs(contexts, chosen, rejected)


def make_task(rewards: Tensor, settings: DPOSettings, with_pairs: bool = True) -> Task:
    """The task with `preference_flips` pairs exchanged once, drawn by the seed. Raises ValueError for too many flips."""
    reference = torch.zeros_like(rewards)
    if not with_pairs:
        return Task(rewards, reference)
    clean = preference_pairs(rewards)
    pairs = len(clean.contexts)
    if settings.preference_flips > pairs:
        raise ValueError(
            f"preference_flips: got {settings.preference_flips}, wanted a whole number from 0 to {pairs}, the number of "
            "preference pairs"
        )
    generator = torch.Generator().manual_seed(settings.seed)
    flipped = torch.randperm(pairs, generator=generator)[: settings.preference_flips].sort().values
    is_flipped = torch.zeros(pairs, dtype=torch.bool)
    is_flipped[flipped] = True
    training = Pairs(
        clean.contexts,
        torch.where(is_flipped, clean.rejected, clean.chosen),
        torch.where(is_flipped, clean.chosen, clean.rejected),
    )
    return Task(rewards, reference, clean, training, flipped.tolist())


def evaluate(policy: Tensor, old: Tensor, task: Task) -> dict[str, float]:
    """Exact metrics of a policy: contexts count equally, actions are summed over, nothing is sampled.

    expected_reward = mean_x sum_a p(a|x) R(x, a); optimal_action_probability sums over all best actions of a context;
    entropy and both KLs (old || current, current || reference) are in nats.

    policy, old [C, A] logits -> numbers; [S, C, A], S runs side by side -> lists of S numbers.
    """
    with torch.no_grad():
        probability = policy.softmax(dim=-1)
        best = task.rewards == task.rewards.amax(dim=-1, keepdim=True)
        of_each_context = {
            "expected_reward": (probability * task.rewards).sum(dim=-1),
            "optimal_action_probability": (probability * best).sum(dim=-1),
            "entropy": torch.special.entr(probability).sum(dim=-1),
            "kl_old_current": categorical_kl(old, policy),
            "kl_current_reference": categorical_kl(policy, task.reference.expand_as(policy)),
        }
        return {name: values.mean(dim=-1).tolist() for name, values in of_each_context.items()}


# ------------------------------------------------------------------------------------------ runs side by side

# Seeds of one training share no number, so S of them go through the same tensors with one more axis in front: policy
# [S, C, A], batch [S, N], loss [S]. One run has no such axis. Each run keeps its own generator, and with it its own draws.

Generators = torch.Generator | Sequence[torch.Generator]


def draw(sample: Callable[..., Tensor], generators: Generators, *arguments: Tensor) -> Tensor:
    """`sample(generator, *arguments)`; for several runs, of each with its own generator and its part of the arguments."""
    if isinstance(generators, torch.Generator):
        return sample(generators, *arguments)
    return torch.stack([sample(*of_run) for of_run in zip(generators, *arguments)])


def in_context(table: Tensor, contexts: Tensor, cell: int = 1) -> Tensor:
    """The entry of each context: table [C, A], contexts [...] -> [..., A]; of S runs, table [S, C, A], contexts [S, ...].

    `cell` is the number of axes of an entry: 1 for a row of logits, 0 for a value.
    """
    if table.dim() == 1 + cell:
        return table[contexts]
    first = torch.arange(0, table.shape[0] * table.shape[1], table.shape[1])  # of each run, in the tables put end to end
    return table.flatten(0, 1)[contexts + per_run(first, contexts)]


def per_run(numbers: float | Tensor, like: Tensor) -> float | Tensor:
    """One number, or [S] with one for each run, in a shape that multiplies `like`, [...] or [S, ...]."""
    if not isinstance(numbers, Tensor):
        return numbers
    return numbers.reshape(numbers.shape + (1,) * (like.dim() - numbers.dim()))


def of_run(batch: NamedTuple, run: int) -> NamedTuple:
    """The part of one run in a batch of several."""
    return batch._make(None if column is None else column[run] for column in batch)


# ------------------------------------------------------------------------------------------ three methods

# Each method is a way to make a batch from the old policy (detached, then fixed while it is reused) and a loss on it.
# A loss returns what is minimised, and how to measure the diagnostics of that update: only those of an iteration's last
# update are asked for.


class Rollout(NamedTuple):
    """Sampled actions of the old policy; every shape is [N] (PPO) or [B, G] (GRPO: B prompts, G answers each).

    Several runs side by side have one more axis in front.
    """

    contexts: Tensor
    actions: Tensor
    rewards: Tensor
    old_logp: Tensor
    advantages: Tensor | None = None
    old_values: Tensor | None = None  # PPO
    value_targets: Tensor | None = None  # PPO


def sample_ppo(policy: Tensor, critic: Tensor, task: Task, settings: PPOSettings, generator: Generators) -> Rollout:
    """One PPO batch: R_shaped = R - ppo_kl_beta * (log pi_old - log pi_ref), A = R_shaped - V_old(x).

    An episode is one step, so the advantage needs no recursion over time; `ppo_chain.py` has the case that does.
    """
    size, contexts_of_task = (settings.ppo_samples,), len(task.rewards)
    with torch.no_grad():
        contexts = draw(lambda own: torch.randint(contexts_of_task, size, generator=own), generator)
        logits = in_context(policy, contexts)
        actions = draw(lambda own, p: torch.multinomial(p, 1, generator=own), generator, logits.softmax(dim=-1)).squeeze(-1)
        rewards = task.rewards[contexts, actions]
        old_logp = action_logps(logits, actions)
        reference_logp = action_logps(task.reference[contexts], actions)
        shaped_returns = rewards - settings.ppo_kl_beta * (old_logp - reference_logp)
        old_values = in_context(critic, contexts, cell=0)
        return Rollout(contexts, actions, rewards, old_logp, shaped_returns - old_values, old_values, shaped_returns)


def ppo_loss(
    policy: Tensor, critic: Tensor, batch: Rollout, task: Task | None, settings: UpdateSettings
) -> tuple[Tensor, dict]:
    """mean(clipped policy loss) + value_weight * mean((V - value_target)^2). `task` is not read."""
    logp = action_logps(in_context(policy, batch.contexts), batch.actions)
    policy_loss = clipped_policy_loss(logp, batch.old_logp, batch.advantages, settings.clip_epsilon).mean(dim=-1)
    value_loss = (in_context(critic, batch.contexts, cell=0) - batch.value_targets).square().mean(dim=-1)
    return policy_loss + settings.value_weight * value_loss, {
        "value_loss": lambda: value_loss,
        "clip_fraction": lambda: clip_fraction_of_each_run(logp, batch.old_logp, settings.clip_epsilon, 1),
    }


def clip_fraction_of_each_run(logp: Tensor, old_logp: Tensor, epsilon: float, axes: int) -> Tensor:
    """clip_fraction over the last `axes` axes: a number, or of several runs one for each."""
    if logp.dim() == axes:
        return clip_fraction(logp, old_logp, epsilon)
    ratio = importance_ratio(logp, old_logp).detach()
    return (ratio != ratio.clamp(min=1 - epsilon, max=1 + epsilon)).double().flatten(-axes).mean(dim=-1)


def sample_grpo(policy: Tensor, critic: None, task: Task, settings: GRPOSettings, generator: Generators) -> Rollout:
    """One GRPO batch: B prompts drawn uniformly with replacement, G actions for each, advantages within each row."""
    groups = sample_groups(policy, task, settings, generator)
    return groups._replace(advantages=group_advantages(groups.rewards))


def sample_groups(policy: Tensor, task: Task, settings: GRPOSettings, generator: Generators) -> Rollout:
    """Groups of G answers to B drawn prompts, [B, G], without advantages yet."""
    size, contexts_of_task = (settings.online_batch_prompts,), len(task.rewards)

    def sample_actions(own: torch.Generator, probability: Tensor) -> Tensor:
        return torch.multinomial(probability, settings.group_size, replacement=True, generator=own)

    with torch.no_grad():
        prompts = draw(lambda own: torch.randint(contexts_of_task, size, generator=own), generator)
        actions = draw(sample_actions, generator, in_context(policy, prompts).softmax(dim=-1))
        contexts = prompts.unsqueeze(-1).expand_as(actions)
        rewards = task.rewards[contexts, actions]
        return Rollout(contexts, actions, rewards, action_logps(in_context(policy, contexts), actions))


def grpo_loss(policy: Tensor, critic: None, batch: Rollout, task: Task, settings: GRPOSettings) -> tuple[Tensor, dict]:
    """mean(clipped policy loss) + grpo_kl_weight * mean KL(current || reference) at the drawn prompts.

    An answer is one action, so the mean over tokens and the mean over answers are the same number.
    """
    logp = action_logps(in_context(policy, batch.contexts), batch.actions)
    policy_loss = clipped_policy_loss(logp, batch.old_logp, batch.advantages, settings.clip_epsilon).mean(dim=(-2, -1))
    prompts = batch.contexts[..., 0]
    kl_current_reference = categorical_kl(in_context(policy, prompts), task.reference[prompts]).mean(dim=-1)
    return policy_loss + settings.grpo_kl_weight * kl_current_reference, {
        "clip_fraction": lambda: clip_fraction_of_each_run(logp, batch.old_logp, settings.clip_epsilon, 2),
        "zero_group_fraction": lambda: groups_without_spread(batch.rewards).double().mean(dim=-1),
    }


def offline_pairs(policy: Tensor, critic: None, task: Task, settings: DPOSettings, generator: Generators) -> Pairs:
    """DPO's batch: the same training pairs in every iteration; nothing is sampled."""
    return task.training_pairs


def pair_logps(policy: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Log-probability of the chosen and of the rejected action of each pair. policy [C, A] -> [P], [P]."""
    logits = in_context(policy, pairs.contexts)
    return action_logps(logits, pairs.chosen), action_logps(logits, pairs.rejected)


def pairs_loss(policy: Tensor, critic: None, pairs: Pairs, task: Task, settings: DPOSettings) -> tuple[Tensor, dict]:
    """mean(DPO loss) over the pairs, against the task's reference. The update has no diagnostics of its own."""
    loss = dpo_loss(*pair_logps(policy, pairs), *pair_logps(task.reference, pairs), settings.dpo_beta).mean(dim=-1)
    return loss, {}


def evaluate_pairs(policy: Tensor, task: Task, settings: DPOSettings) -> dict[str, float]:
    """DPO loss of a policy on the labels that are trained on, and on the unflipped ones. Shapes as `evaluate`."""
    with torch.no_grad():
        return {
            "dpo_training_loss": pairs_loss(policy, None, task.training_pairs, task, settings)[0].tolist(),
            "dpo_original_loss": pairs_loss(policy, None, task.clean_pairs, task, settings)[0].tolist(),
        }


def trace_rollout(batch: Rollout, task: Task, policies: Sequence[Tensor], samples: int = 8) -> list[dict]:
    """The first samples of a batch, from data to update. `policies`: the old one, then one after each update."""
    columns = dict(context=batch.contexts, action=batch.actions, reward=batch.rewards, old_logp=batch.old_logp)
    if batch.value_targets is None:
        columns["group"] = torch.arange(len(batch.rewards)).unsqueeze(1).expand_as(batch.rewards)
        scaled, unit = _in_units_of_the_largest(batch.rewards)
        columns["group_mean"] = (scaled.mean(dim=1, keepdim=True) * unit).expand_as(batch.rewards)
        columns["group_std"] = (scaled.std(dim=1, correction=0, keepdim=True) * unit).expand_as(batch.rewards)
    else:
        columns.update(shaped_return=batch.value_targets, old_value=batch.old_values)
    columns["advantage"] = batch.advantages
    first = {name: column.flatten()[:samples] for name, column in columns.items()}
    logps = [action_logps(policy[first["context"]], first["action"]) for policy in policies[1:]]
    ratios = torch.stack([importance_ratio(logp, first["old_logp"]) for logp in logps], dim=1)
    return [{**row, "ratio_after_each_update": ratio} for row, ratio in zip(rows_of(first), ratios.tolist())]


def trace_pairs(pairs: Pairs, task: Task, policies: Sequence[Tensor]) -> list[dict]:
    """Every preference pair, from data to update: log-probabilities and margin before and after the first update."""
    rewards = task.rewards[pairs.contexts]
    columns = dict(context=pairs.contexts, chosen=pairs.chosen, rejected=pairs.rejected)
    columns["reward_chosen"] = rewards.gather(1, pairs.chosen.unsqueeze(1)).squeeze(1)
    columns["reward_rejected"] = rewards.gather(1, pairs.rejected.unsqueeze(1)).squeeze(1)
    ref_chosen, ref_rejected = pair_logps(task.reference, pairs)
    for moment, policy in zip(("before", "after"), policies):
        chosen, rejected = pair_logps(policy, pairs)
        columns[f"chosen_logp_{moment}"], columns[f"rejected_logp_{moment}"] = chosen, rejected
        columns[f"margin_{moment}"] = (chosen - ref_chosen) - (rejected - ref_rejected)
    return rows_of(columns)


def rows_of(columns: dict[str, Tensor]) -> list[dict]:
    """Equally shaped tensors as one dict per element, in flat order."""
    return [dict(zip(columns, values)) for values in zip(*(column.flatten().tolist() for column in columns.values()))]


def document_of_pairs(run: TrainingRun) -> dict:
    """What DPO adds to its JSON: the pairs, before and after the exchange."""
    return {
        "flipped_pair_indices": run.task.flipped_pair_indices,
        "clean_preference_pairs": run.task.clean_pairs.rows(),
        "training_preference_pairs": run.task.training_pairs.rows(),
    }


def last(column: str) -> Callable[[TrainingRun], float]:
    """A measure of a run: a column of its last row."""
    return lambda run: run.history[-1][column]


def mean_share_without_spread(run: TrainingRun) -> float:
    """Mean over the iterations of the share of groups whose answers all got the same reward."""
    return statistics.fmean(row["zero_group_fraction"] for row in run.history[1:])


def note_of_losses(runs: Sequence[TrainingRun]) -> str:
    """DPO's line below the summary: its loss on both kinds of labels."""
    training, original = (
        f"{median_of(runs, name, 0):.6f} -> {median_of(runs, name):.6f}" for name in ("dpo_training_loss", "dpo_original_loss")
    )
    return f"dpo: loss on its training labels {training}\n     on the original labels    {original}"


def note_of_groups(runs: Sequence[TrainingRun]) -> str:
    """GRPO's line below the summary: how often there was nothing to compare."""
    share = statistics.median(map(mean_share_without_spread, runs))
    return f"grpo: mean share of groups without reward difference {share:.4f}"


def median_of(runs: Sequence[TrainingRun], column: str, row: int = -1) -> float:
    """The median over runs of a column in one row, the last one by default."""
    return statistics.median(run.history[row][column] for run in runs)


class Method(NamedTuple):
    """All that tells one training from another: a new method is one entry in METHODS.

    `settings` is the class with the fields that it reads; they become its flags. `measures` is what tables of several runs
    show of it, and how it is printed; `note` adds a line below the summary.
    """

    make_batch: Callable  # policy, critic, task, settings, generator(s) -> batch
    loss: Callable  # policy, critic, batch, task, settings -> loss, diagnostics of the update
    trace: Callable  # batch, task, policies -> rows
    settings: type[RunSettings]
    cost_column: str
    batch_size: Callable[[RunSettings, int], int]  # settings, number of preference pairs -> samples in a batch
    own_columns: tuple[str, ...]
    measures: dict[str, tuple[Callable[[TrainingRun], float], str]]
    has_critic: bool = False
    compares_pairs: bool = False
    reuses_batch: bool = True
    evaluate: Callable | None = None  # policy, task, settings -> own columns that are evaluated, not taken from the update
    document: Callable[[TrainingRun], dict] = lambda run: {}
    note: Callable[[Sequence[TrainingRun]], str] | None = None


_REWARD = {"expected reward": (last("expected_reward"), ".4f")}

METHODS = {
    "ppo": Method(
        sample_ppo,
        ppo_loss,
        trace_rollout,
        PPOSettings,
        "sampled_actions",
        lambda settings, pairs: settings.ppo_samples,
        ("value_loss", "clip_fraction", "stopped_early"),
        {**_REWARD, "P(best)": (last("optimal_action_probability"), ".4f"), "critic loss": (last("value_loss"), ".4f")},
        has_critic=True,
    ),
    "dpo": Method(
        offline_pairs,
        pairs_loss,
        trace_pairs,
        DPOSettings,
        "pair_presentations",
        lambda settings, pairs: pairs,
        ("dpo_training_loss", "dpo_original_loss"),
        {
            "training loss": (last("dpo_training_loss"), ".6f"),
            "original-label loss": (last("dpo_original_loss"), ".6f"),
            **_REWARD,
        },
        compares_pairs=True,
        reuses_batch=False,
        evaluate=evaluate_pairs,
        document=document_of_pairs,
        note=note_of_losses,
    ),
    "grpo": Method(
        sample_grpo,
        grpo_loss,
        trace_rollout,
        GRPOSettings,
        "sampled_actions",
        lambda settings, pairs: settings.online_batch_prompts * settings.group_size,
        ("clip_fraction", "zero_group_fraction", "stopped_early"),
        {**_REWARD, "groups without spread": (mean_share_without_spread, ".4f")},
        note=note_of_groups,
    ),
}


@functools.cache
def _joined(classes: tuple[type[RunSettings], ...]) -> type[RunSettings]:
    made = type("BanditSettings", classes[::-1], {"__doc__": "Every number of the bandit trainings.", "__module__": __name__})
    return dataclasses.dataclass(frozen=True)(made)


def bandit_settings() -> type[RunSettings]:
    """One class with the settings of every method in METHODS, in their order."""
    return _joined(tuple(dict.fromkeys(method.settings for method in METHODS.values())))


BanditSettings = bandit_settings()


# ------------------------------------------------------------------------------------------ training


class Adam:
    """Adam with bias correction, the rule of torch.optim.Adam (tested equal), written out.

    m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p = p - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps).

    Written out for two reasons: constructing any torch.optim class imports a second package tree, which takes about as long
    as importing torch and longer than all three trainings; and of several runs side by side, some may have to wait.
    Source: arXiv 1412.6980 algorithm 1.
    """

    def __init__(
        self, parameters: Sequence[Tensor], lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ):
        self.parameters, self.lr, self.betas, self.eps = list(parameters), lr, betas, eps
        self.means = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.squares = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.steps: int | Tensor = 0

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], moving: Tensor | None = None) -> None:
        """Move every parameter once; `gradients` in the order of the parameters.

        `moving` [S] bool: of S runs side by side, the first axis of every parameter, only these move and count the step.
        """
        state = [*self.parameters, *self.means, *self.squares]
        before = [] if moving is None else [x.clone() for x in state]
        self.steps = self.steps + (1 if moving is None else moving.long())
        beta1, beta2 = self.betas
        rate = self._of_each_count(lambda t: self.lr / (1 - beta1**t))
        root = self._of_each_count(lambda t: math.sqrt(1 - beta2**t))
        for parameter, gradient, mean, square in zip(self.parameters, gradients, self.means, self.squares):
            mean.lerp_(gradient, 1 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            denominator = (square.sqrt() / per_run(root, square)).add_(self.eps)
            parameter.sub_(mean * per_run(rate, mean) / denominator)
        for x, earlier in zip(state, before):
            x.copy_(torch.where(per_run(moving, x), x, earlier))

    def _of_each_count(self, number: Callable[[int], float]) -> float | Tensor:
        """A number that depends on the steps taken; of several runs [S], from the steps of each."""
        if isinstance(self.steps, int):
            return number(self.steps)
        return torch.tensor([number(t) for t in self.steps.tolist()], dtype=torch.float64)


def descend(
    loss: Tensor,
    optimizer: Adam,
    max_gradient_norm: float,
    where: str | Callable[[int], str],
    moving: Tensor | None = None,
) -> float | Tensor:
    """One update: backward, scale the gradient to a norm of at most `max_gradient_norm`, Adam step.

    Returns the norm over all parameters before scaling. Raises FloatingPointError, naming `where` and the quantity, when
    the loss or the norm is not finite; the parameters are then as before.

    A loss [S] is that of S runs side by side: each has its own norm, which is scaled and returned, and only those of
    `moving` take part. `where` then names a run by its number.
    """
    gradients = torch.autograd.grad(loss, optimizer.parameters, torch.ones_like(loss))
    norm = torch.linalg.vector_norm(torch.cat([gradient.flatten(loss.dim()) for gradient in gradients], dim=-1), dim=-1)
    for quantity, value in (("loss", loss.detach()), ("gradient_norm", norm)):
        if not torch.isfinite(value if moving is None else value[moving]).all():
            wrong = ~torch.isfinite(value) if moving is None else ~torch.isfinite(value) & moving
            run = int(wrong.flatten().nonzero()[0])
            name = where(run) if callable(where) else where
            got = value.flatten()[run].item()
            raise FloatingPointError(f"{name}: {quantity} is {got}; rewards or --learning-rate are likely too large")
    if (norm > max_gradient_norm).any():
        scale = torch.where(norm > max_gradient_norm, max_gradient_norm / norm.double(), 1.0)
        scale = scale if loss.dim() else scale.item()
        gradients = [gradient * per_run(scale, gradient) for gradient in gradients]
    optimizer.step(gradients, moving) if loss.dim() else optimizer.step(gradients)
    return norm if loss.dim() else norm.item()


class BatchUpdates(NamedTuple):
    """What the updates on one batch did; `update` describes the last of them, at the parameters before it.

    Of several runs side by side, counts and numbers are lists with one entry a run.
    """

    count: int | list[int]
    update: dict[str, float] | dict[str, list[float]]
    policies: list[Tensor]  # before the first update, then after each; a run that has stopped stays as it was


def reuse_batch(
    loss: Callable[[], tuple[Tensor, dict[str, Callable[[], Tensor]]]],
    kl_old_current: Callable[[Tensor, Tensor], Tensor],
    policy: Tensor,
    optimizer: Adam,
    max_updates: int,
    settings: RunSettings,
    where: str | Callable[[int], str],
) -> BatchUpdates:
    """Up to `max_updates` updates on one fixed batch, which `loss` holds; its old log-probabilities stay as they are.

    After an update, KL(old || current) above `kl_stop` prevents the next one; it cannot undo the step that crossed it.
    Of several runs side by side (a loss [S]), each stops by its own KL.
    """
    policies = [policy.detach().clone()]
    update: dict[str, Tensor] = {}
    moving = None
    for number in range(1, max_updates + 1):
        value, diagnostics = loss()
        if moving is None:
            moving = torch.ones(value.shape, dtype=torch.bool)
            count = torch.zeros(value.shape, dtype=torch.long)
        norm = descend(value, optimizer, settings.max_gradient_norm, where, moving if moving.dim() else None)
        policies.append(policy.detach().clone())
        count += moving
        stopped_early = torch.zeros_like(moving)
        if number < max_updates:
            stopped_early = (kl_old_current(policies[0], policies[-1]) > settings.kl_stop).reshape(moving.shape)
        ended = moving & (stopped_early | (count == max_updates))
        if ended.any():
            measured = {"loss": value.detach(), "gradient_norm": torch.as_tensor(norm, dtype=torch.float64), "stopped_early": stopped_early.long()}
            measured.update((name, measure().detach()) for name, measure in diagnostics.items())
            update = {name: torch.where(ended, now, update.get(name, now)) for name, now in measured.items()}
        moving = moving & ~ended
        if not moving.any():
            break
    return BatchUpdates(count.tolist(), {name: numbers.tolist() for name, numbers in update.items()}, policies)


class TrainingRun(NamedTuple):
    """What a training leaves behind: one row per iteration, the trace of its first batch, the final logits."""

    algorithm: str
    settings: RunSettings
    task: Task
    history: list[dict[str, float]]
    first_batch_trace: list[dict]
    policy: Tensor

    def __repr__(self) -> str:
        first, end = self.history[0]["expected_reward"], self.history[-1]["expected_reward"]
        seed, steps = self.settings.seed, self.settings.steps
        return f"<{self.algorithm}, seed {seed}, {steps} iterations: expected reward {first:.4f} -> {end:.4f}>"


OnStep = Callable[[dict[str, float]], None]


def train(
    algorithm: str, *, reward_table: Tensor = REWARDS, on_step: OnStep | None = None, **settings: float
) -> TrainingRun:
    """Train one policy, a table of logits that starts at zero, with "ppo", "dpo" or "grpo".

    Each iteration: make a batch from the current policy, which becomes `old`; up to `max_updates` updates on it (DPO:
    one), until the exact KL(old || current), mean over contexts, exceeds `kl_stop`; then evaluate. `on_step` is called
    with each row of the history.

    reward_table [C, A] floating, used as float64; settings: the fields of BanditSettings. Uses one local generator: same
    arguments, same numbers, and no global random state is read or moved.
    Raises ValueError for an unknown algorithm, a setting out of range, a malformed table or one without preferences for
    DPO; TypeError for a table that is not floating or a setting that does not exist; FloatingPointError when a loss or
    gradient is not finite.
    """
    seed = settings.pop("seed", RunSettings.seed)
    show = on_step and (lambda rows: on_step(rows[0]))
    (run,) = train_seeds(algorithm, [seed], reward_table=reward_table, on_step=show, **settings)
    return run


def train_seeds(
    algorithm: str,
    seeds: Sequence[int],
    *,
    reward_table: Tensor = REWARDS,
    on_step: Callable[[list[dict[str, float]]], None] | None = None,
    **settings: float,
) -> list[TrainingRun]:
    """`train` for several seeds at once, through the same tensors: a hundred take five to nine times as long as one.

    Each run has its own generator, batch, gradient norm, Adam state and KL stop; its numbers are those of `train` with that
    seed up to rounding (1e-12). `on_step` is called with the rows of one iteration, one for each seed.
    Raises as `train`; a loss or gradient that is not finite ends all runs, and the error names the seed.
    """
    if algorithm not in METHODS:
        raise ValueError(f"algorithm: got {algorithm!r}, wanted one of {', '.join(METHODS)}")
    of_seed = [bandit_settings()(**settings, seed=seed) for seed in seeds]
    rewards = checked_reward_table(reward_table)
    method, shared = METHODS[algorithm], of_seed[0]
    pairs = count_pairs(rewards) if method.compares_pairs else 0
    if method.compares_pairs and not pairs:
        raise ValueError(f"reward_table: no context has two different rewards, so {algorithm} has no pairs to learn from")
    tasks = [make_task(rewards, own, method.compares_pairs) for own in of_seed]

    alone = len(seeds) == 1
    task = tasks[0] if alone else side_by_side(tasks)
    policy = torch.zeros(*() if alone else (len(seeds),), *rewards.shape, dtype=torch.float64).requires_grad_()
    critic = torch.zeros(policy.shape[:-1], dtype=torch.float64).requires_grad_() if method.has_critic else None
    optimizer = Adam([policy] if critic is None else [policy, critic], shared.learning_rate)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    generators = generators[0] if alone else generators
    histories: list[list[dict[str, float]]] = [[] for _ in seeds]
    counts = {"optimizer_steps": torch.zeros(policy.shape[:-2], dtype=torch.long), "sampled_actions": 0, "pair_presentations": 0}

    def record(step: int, old: Tensor, update: dict) -> None:
        columns = {"step": step, **evaluate(policy, old, task), **update, **counts}
        columns["optimizer_steps"] = counts["optimizer_steps"].tolist()
        if method.evaluate:
            columns.update(method.evaluate(policy, task, shared))
        rows = rows_of_runs({name: columns[name] for name in COMMON_COLUMNS + method.own_columns}, len(seeds))
        for history, row in zip(histories, rows):
            history.append(row)
        if on_step:
            on_step(rows)

    record(0, policy.detach(), dict.fromkeys(("loss", "gradient_norm", *method.own_columns), 0))
    for step in range(1, shared.steps + 1):
        batch = method.make_batch(policy, critic, task, shared, generators)
        updates = reuse_batch(
            lambda: method.loss(policy, critic, batch, task, shared),
            lambda old, current: categorical_kl(old, current).mean(dim=-1),
            policy,
            optimizer,
            shared.max_updates if method.reuses_batch else 1,
            shared,
            name_of_step(algorithm, seeds, step),
        )
        counts["optimizer_steps"] += torch.tensor(updates.count)
        counts[method.cost_column] += batch.contexts.numel() // len(seeds)
        record(step, updates.policies[0], updates.update)
        if step == 1:
            traces = first_traces(method, batch, tasks, updates)
    policies = policy.detach().unsqueeze(0) if alone else policy.detach()
    return [TrainingRun(algorithm, *of_run) for of_run in zip(of_seed, tasks, histories, traces, policies)]


def checked_reward_table(reward_table: Tensor) -> Tensor:
    """A reward table in float64, refused when it is none: see `train`."""
    _check_kind("floating", reward_table=reward_table)
    if reward_table.dim() != 2 or not len(reward_table):
        raise ValueError(f"reward_table: got shape {tuple(reward_table.shape)}, wanted [C, A], one row a context")
    _check_last_axis("reward_table", reward_table, 2, "the actions")
    _check_finite("reward_table", reward_table, "a failed reward computation")
    return reward_table.double()


def side_by_side(tasks: Sequence[Task]) -> Task:
    """Tasks that differ in their pairs as one, with pair columns [S, P]."""
    if tasks[0].clean_pairs is None:
        return tasks[0]
    clean, training = (Pairs(*map(torch.stack, zip(*pairs))) for pairs in zip(*(task[2:4] for task in tasks)))
    return tasks[0]._replace(clean_pairs=clean, training_pairs=training)


def rows_of_runs(columns: dict, runs: int) -> list[dict]:
    """Columns that hold a list, one entry a run, or one value for all, as one row for each run."""
    lists = [values if isinstance(values, list) else [values] * runs for values in columns.values()]
    return [dict(zip(columns, values)) for values in zip(*lists)]


def name_of_step(program: str, seeds: Sequence[int], step: int) -> str | Callable[[int], str]:
    """How an error calls an iteration; of several runs, by the number of the run."""
    if len(seeds) == 1:
        return f"{program}, step {step}"
    return lambda run: f"{program}, seed {seeds[run]}, step {step}"


def first_traces(method: Method, batch: Rollout | Pairs, tasks: Sequence[Task], updates: BatchUpdates) -> list[list[dict]]:
    """The trace of the first batch, for each run."""
    if len(tasks) == 1:
        return [method.trace(batch, tasks[0], updates.policies)]
    return [
        method.trace(of_run(batch, run), task, [policies[run] for policies in updates.policies[: updates.count[run] + 1]])
        for run, task in enumerate(tasks)
    ]


# ------------------------------------------------------------------------------------------ the atoms, number by number


class WorkedExample(NamedTuple):
    """One atom on inputs small enough to check by hand, beside the number the guide gives (or its arithmetic)."""

    section: str
    title: str
    formula: str
    inputs: str
    result: list[float]
    expected: list[float]
    digits: int = 6

    def agrees(self) -> bool:
        """Whether result and expected are the same to the printed digits."""
        return self._printed(self.result) == self._printed(self.expected)

    def text(self, result: str, expected: str) -> str:
        """Formula, inputs, and both columns of numbers under the given names, indented below a title."""
        lines = [("formula", self.formula), ("inputs", self.inputs), (result, self._printed(self.result))]
        lines.append((expected, f"{self._printed(self.expected)}   {'agree' if self.agrees() else 'DIFFER'}"))
        return "\n".join(f"     {name:<8}  {words}" for name, words in lines)

    def _printed(self, numbers: Sequence[float]) -> str:
        return ", ".join(f"{x:.{self.digits}f}" for x in numbers)


def worked_examples() -> list[WorkedExample]:
    """The guide's worked numbers, in its order: atoms on hand-sized inputs. Every result comes from calling an atom."""

    def tensor(*numbers: float, grad: bool = False) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64, requires_grad=grad)

    examples = []

    def show(section, title, formula, inputs, result, expected, digits=6):
        result = result.flatten().tolist() if isinstance(result, Tensor) else result
        # Adding 0.0 turns -0.0 into 0.0, which would print a sign that means nothing.
        examples.append(WorkedExample(section, title, formula, inputs, [x + 0.0 for x in result], expected, digits))

    show(
        "3.1", "log-probability of an action", "logp = z_a - log sum_b exp(z_b)",
        "logits [0, 0, 0], action 0; logits [1000, 0], action 1",
        [action_logps(tensor(0, 0, 0), torch.tensor(0)).item(), action_logps(tensor(1000, 0), torch.tensor(1)).item()],
        [-math.log(3), -1000.0],
    )
    logp = tensor(-1.0, grad=True)
    loss = reinforce_loss(logp, tensor(2.0))
    show(
        "3.1", "REINFORCE loss and its gradient", "loss = -logp * return; d loss / d logp = -return", "logp -1, return 2",
        [loss.item(), torch.autograd.grad(loss.sum(), logp)[0].item()], [2.0, -2.0],
    )
    show(
        "3.2", "advantage over a baseline", "A = return - V(s): the TD residual of a step that ends its episode",
        "returns [6, 3], usual values [8, 1]",
        td_residuals(tensor(6, 3), tensor(8, 1), tensor(0, 0), torch.tensor([True, True])), [-2.0, 2.0],
    )
    end = torch.tensor([False, False, True])
    advantages, _ = gae(tensor(0, 0, 1), tensor(0, 0, 0), tensor(0, 0, 0), end, end, gamma=1.0, lam=1.0)
    show(
        "3.3", "GAE: a final reward reaches every earlier step", "A_t = delta_t + gamma lam A_{t+1}, cut at a boundary",
        "rewards [0, 0, 1], values 0, gamma = lam = 1", advantages, [1.0, 1.0, 1.0],
    )
    cut, never = torch.tensor([False, True]), torch.tensor([False, False])
    advantages, _ = gae(tensor(0, 0), tensor(0.5, 0.4), tensor(0.4, 0.7), never, cut, gamma=1.0, lam=1.0)
    show(
        "3.3", "GAE at a time limit: bootstrap goes on, recursion stops",
        "delta_1 = 0 + 0.7 - 0.4, delta_0 = 0 + 0.4 - 0.5",
        "rewards [0, 0], values [0.5, 0.4], next values [0.4, 0.7], boundary at 1, never terminated",
        advantages, [0.2, 0.3],
    )
    show(
        "3.4", "importance ratio", "rho = exp(logp - old_logp)", "probability 0.6 now, 0.5 when sampled",
        importance_ratio(tensor(0.6).log(), tensor(0.5).log()), [1.2],
    )
    p, q = tensor(0.5, 0.5), tensor(0.9, 0.1)
    show(
        "3.6", "exact KL, both directions", "KL(p || q) = sum_a p_a (log p_a - log q_a)", "p = [0.5, 0.5], q = [0.9, 0.1]",
        torch.stack([categorical_kl(p.log(), q.log()), categorical_kl(q.log(), p.log())]),
        [0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)],
    )
    policy, reference = tensor(0.7, 0.2, 0.1), tensor(0.3, 0.3, 0.4)
    exact = 0.7 * math.log(0.7 / 0.3) + 0.2 * math.log(0.2 / 0.3) + 0.1 * math.log(0.1 / 0.4)
    k1, _, k3 = kl_estimates(policy.log(), reference.log())
    show(
        "3.6", "KL estimates k1 and k3, averaged under the policy", "d = logp - ref_logp; k1 = d; k3 = exp(-d) - 1 + d",
        "policy [0.7, 0.2, 0.1], reference [0.3, 0.3, 0.4]; expected: the exact KL",
        [(policy * k1).sum().item(), (policy * k3).sum().item()], [exact, exact],
    )
    ratios, advantages = tensor(1.5, 0.5, 1.5, 0.5), tensor(1, -1, -1, 1)
    logp = ratios.log().requires_grad_()
    loss = clipped_policy_loss(logp, torch.zeros_like(logp), advantages)
    show(
        "4.2", "clipped objective (minus the loss)", "min(rho A, clip(rho, 0.8, 1.2) A)",
        "ratios [1.5, 0.5, 1.5, 0.5], advantages [1, -1, -1, 1]", -loss, [1.2, -0.8, -1.5, 0.5],
    )
    show(
        "4.2", "gradient of the loss (minus the objective's)", "d loss / d logp = -rho A, or 0 where the clip is flat",
        "the same four rows",
        torch.autograd.grad(loss.sum(), logp)[0], [0.0, 0.0, 1.5, -0.5],
    )
    show(
        "4.2", "clip fraction", "share of ratios outside [0.8, 1.2]; two of the four still have a gradient",
        "the same four rows", clip_fraction(logp, torch.zeros_like(logp)), [1.0],
    )
    end = torch.tensor([False, True])
    advantages, _ = gae(tensor(0, 1), tensor(0, 0), tensor(0, 0), end, end, gamma=1.0, lam=0.95)
    show(
        "4.5", "GAE on the two-step chain", "A_1 = 1, A_0 = gamma lam A_1",
        "rewards [0, 1], critic zero, gamma 1, lambda 0.95", advantages, [0.95, 1.0],
    )
    show(
        "5.1", "Bradley-Terry preference", "P = sigmoid(reward_chosen - reward_rejected)", "rewards 1 and 0.2",
        preference_probability(tensor(1.0), tensor(0.2)), [1 / (1 + math.exp(-0.8))],
    )
    chosen, rejected = tensor(-2.0, grad=True), tensor(-2.0, grad=True)
    loss = dpo_loss(chosen, rejected, tensor(-2.0), tensor(-2.0), beta=0.5)
    gradients = torch.autograd.grad(loss.sum(), [chosen, rejected])
    show(
        "5.3", "DPO at policy = reference: loss, gradient to chosen, to rejected",
        "-log sigmoid(beta h), h = 0: log 2, -beta/2, beta/2",
        "all log-probabilities -2, beta 0.5", [loss.item(), *(g.item() for g in gradients)], [0.6931, -0.25, 0.25], 4,
    )
    show(
        "5.3", "DPO loss falls while the chosen answer's probability falls",
        "h = log(0.3 / 0.4) - log(0.1 / 0.3) = log 2.25",
        "chosen 0.4 -> 0.3, rejected 0.3 -> 0.1, beta 1",
        dpo_loss(tensor(0.3).log(), tensor(0.1).log(), tensor(0.4).log(), tensor(0.3).log(), beta=1.0), [0.3677], 4,
    )
    show(
        "6.1", "group advantages", "A_i = (R_i - mean) / (population std + 1e-8)", "groups [0, 0, 1, 1] and [5, 5, 5, 5]",
        group_advantages(torch.stack([tensor(0, 0, 1, 1), tensor(5, 5, 5, 5)])), [-1.0, -1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0],
    )
    theta = tensor(0.0, grad=True)
    both = torch.cat([theta, tensor(0.0)]).log_softmax(dim=-1)
    loss = clipped_policy_loss(both, both.detach(), tensor(1, -1)).mean()
    show(
        "6.3", "a loss of 0 with a gradient", "loss = 1 - 2 sigmoid(theta): 0 at theta = 0, slope -0.5",
        "two answers of probability 1/2, advantages [1, -1]",
        [loss.item(), torch.autograd.grad(loss, theta)[0].item()], [0.0, -0.5],
    )
    third = tensor(1 / 3, 1 / 3, 1 / 3)
    show(
        "6.3", "chance of a group without spread", "sum_a p_a^G",
        "success 0.99, G = 8; three equal actions, G = 2 and G = 8",
        [zero_variance_probability(p, g).item() for p, g in ((tensor(0.99, 0.01), 8), (third, 2), (third, 8))],
        [0.922745, 1 / 3, 0.000457],
    )
    ids = torch.tensor([[0, 1, 2, 4, 4]])
    mask = torch.tensor([[False, False, True, True, False]])
    token_logps, _ = response_token_logps(torch.zeros(1, 5, 5, dtype=torch.float64), ids, mask)
    show(
        "7.1", "token log-probabilities after the causal shift", "logits at t score the token at t + 1: rows 1 and 2 here",
        "[prompt, prompt, answer, EOS, PAD], mask [0, 0, 1, 1, 0], 5 equal logits",
        token_logps, [0.0, -math.log(5), -math.log(5), 0.0],
    )
    return examples


def print_worked_examples(section: str | None = None) -> None:
    """The report of `--algorithm atoms`: all of it, or one section of the guide."""
    examples = [example for example in worked_examples() if section in (None, example.section)]
    for example in examples:
        print(f"{example.section}  {example.title}\n{example.text('result', 'expected')}\n")
    agreeing = sum(example.agrees() for example in examples)
    print(f"{agreeing} of {len(examples)} agree. Section numbers are those of the guide; nothing was trained.")


# ------------------------------------------------------------------------------------------ files

# Every file that a user hands over is read by `read_regular_file`, every result is written by `replace_files`.


class FileProblem(Exception):
    """A file or folder that cannot be read or written as asked: the command prints the message and exits with 1."""


def one_line(text: object) -> str:
    """Any text or file name as one line that can be printed: a newline becomes \\n, a byte that is no UTF-8 \\udcff."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def read_regular_file(path: str | os.PathLike, limit: int) -> bytes:
    """The bytes of a regular file that holds at most `limit` of them; nothing is read from any other.

    Raises FileProblem: no such file, a folder, a pipe (it could wait for ever), a device (it may never end), too large.
    """

    def check(about: os.stat_result) -> None:
        if not stat.S_ISREG(about.st_mode):
            kind = "a directory" if stat.S_ISDIR(about.st_mode) else "a pipe or a device"
            raise FileProblem(f"{path}: is {kind}; wanted a regular file")
        if about.st_size > limit:
            raise FileProblem(f"{path}: holds {about.st_size} bytes; wanted at most {limit}")

    def open_without_waiting(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    try:
        check(os.stat(path))  # before it is opened: opening a pipe waits, opening a device may do something
        with open(path, "rb", opener=open_without_waiting) as file:
            check(os.fstat(file.fileno()))  # it may have been exchanged since
            content = file.read(limit + 1)
    except OSError as problem:
        raise FileProblem(f"{path}: {problem.strerror or problem}") from problem
    except ValueError as problem:  # a NUL in the name
        raise FileProblem(f"{path}: not a usable file name ({problem})") from problem
    if len(content) > limit:
        raise FileProblem(f"{path}: grows beyond {limit} bytes while it is read")
    return content


def check_writable(paths: Sequence[Path], expected_bytes: int) -> None:
    """Find out before a long computation whether its files can be written. Makes nothing, no missing folder either.

    Raises FileProblem for a path that is no regular file, a read-only file, a folder that cannot be made or written, a full
    disk.
    """
    targets = [_replaceable_target(path) for path in paths]
    for folder in dict.fromkeys(target.parent for target in targets):
        try:
            # A missing folder is tried where it would be made: another run may need it just when this one removes it.
            place = next(one for one in (folder, *folder.parents) if one.exists())
            if not place.is_dir():
                reason = "File exists" if place == folder else "Not a directory"
                raise FileProblem(f"{folder}: cannot be written ({reason}); nothing was changed")
            with tempfile.TemporaryFile(dir=place) as probe:
                probe.write(b"0" * expected_bytes)
        except OSError as problem:
            raise FileProblem(f"{folder}: cannot be written ({problem.strerror}); nothing was changed") from problem


def replace_files(contents: dict[Path, str | bytes]) -> None:
    """Write all files: each whole beside its target, then all renamed over theirs. Makes the folders that are missing.

    A failure or an interrupt while writing leaves every file as it was; between two renames, each is the old one or the new
    one. A path that is a link keeps pointing where it did, a file that was there keeps its mode; all is synced to the disk.
    Raises FileProblem when the disk is full or a folder or file is not writable, and says which files are new by then. No
    partial file and no new empty folder remains; those of runs that were killed are removed.
    """
    targets = {path: _replaceable_target(path) for path in contents}
    partials = {target: target.with_name(f".{target.name}.{os.getpid()}.partial") for target in targets.values()}
    folders = dict.fromkeys(target.parent for target in partials)
    made: list[Path] = []
    renamed: list[Path] = []
    path = None
    try:
        for path, target in targets.items():
            made += _make_folder(target.parent)
        for folder in folders:
            _remove_stale_partials(folder)
        for path, content in contents.items():
            _write_synced(partials[targets[path]], content, like=targets[path])
        for path, target in targets.items():
            os.replace(partials[target], target)
            renamed.append(path)
    except OSError as problem:
        new = f"already new: {', '.join(map(str, renamed))}; the others" if renamed else "earlier results"
        raise FileProblem(f"{path}: {problem.strerror}; {new} were left as they were") from problem
    finally:
        _discard(partials.values(), made)
    for folder in folders:  # the renaming itself
        with contextlib.suppress(OSError):  # not every system can open a folder
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _replaceable_target(path: Path) -> Path:
    """The file that a result becomes: `path`, or what it links to. Raises FileProblem if that cannot be replaced."""
    try:
        target = Path(os.path.realpath(path))
        for name in (target, target.with_name(f".{target.name}.{os.getpid()}.partial")):
            try:
                about = os.stat(name)
            except (FileNotFoundError, NotADirectoryError):
                continue  # a folder that cannot be made is found out later
            if not stat.S_ISREG(about.st_mode):
                raise FileProblem(f"{path}: exists and is not a regular file; choose another --output")
            if not about.st_mode & 0o222 or not os.access(name, os.W_OK):
                raise FileProblem(f"{path}: is read-only; make it writable or choose another --output")
    except OSError as problem:  # a name that is too long, a link to itself, a folder that may not be entered
        raise FileProblem(f"{path}: cannot be written ({problem.strerror}); nothing was changed") from problem
    except ValueError as problem:  # a NUL in the name
        raise FileProblem(f"{path}: not a usable file name ({problem})") from problem
    return target


def _write_synced(partial: Path, content: str | bytes, like: Path) -> None:
    """Write one file to the disk, with the mode of `like` if that exists: never more readable, not even for a moment."""
    mode = stat.S_IMODE(os.stat(like).st_mode) if like.exists() else None
    with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, 0o666 if mode is None else 0o600)) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    if mode is not None:
        os.chmod(partial, mode)


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder with its parents; -> those that were missing, the deepest first. A failure leaves none of them."""
    missing = list(itertools.takewhile(lambda one: not one.exists(), (folder, *folder.parents)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except BaseException:
        _remove_empty(missing)
        raise
    return missing


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # something is in it
            folder.rmdir()


def _discard(partials: Sequence[Path], folders: Sequence[Path]) -> None:
    """Remove what a writing leaves: partial files that were not renamed, new folders that stayed empty."""
    try:
        for partial in partials:
            with contextlib.suppress(OSError):  # renamed by now, or its name was too long to exist
                partial.unlink()
        _remove_empty(sorted(folders, key=lambda folder: -len(folder.parts)))
    except KeyboardInterrupt:
        _discard(partials, folders)
        raise


def _remove_stale_partials(folder: Path) -> None:
    """Remove the partial files of processes that are gone: a killed run could not do it."""
    if os.name == "nt":  # there os.kill(pid, 0) is no question but an order
        return
    for entry in list(os.scandir(folder)):
        process = re.fullmatch(r"\..+\.(\d+)\.partial", entry.name)
        if process and entry.is_file(follow_symlinks=False):
            with contextlib.suppress(PermissionError, OverflowError):  # it lives; no such number
                try:
                    os.kill(int(process[1]), 0)
                except ProcessLookupError:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(entry.path)


def csv_text(rows: Sequence[dict[str, float]]) -> str:
    """A header and one line per row; numbers with all their digits."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def json_text(document: dict) -> str:
    """JSON with one line per setting, table row or trace record, so that it can be read as it is."""

    def block(opening: str, items: Sequence[str], closing: str, indent: str) -> str:
        return f"{opening}\n" + ",\n".join(f"{indent}  {item}" for item in items) + f"\n{indent}{closing}"

    dumps = json.JSONEncoder(allow_nan=False).encode
    entries = []
    for key, value in document.items():
        if isinstance(value, dict):
            text = block("{", [f"{dumps(name)}: {dumps(item)}" for name, item in value.items()], "}", "  ")
        elif isinstance(value, list) and value and isinstance(value[0], (list, dict)):
            text = block("[", [dumps(item) for item in value], "]", "  ")
        else:
            text = dumps(value)
        entries.append(f"{dumps(key)}: {text}")
    return block("{", entries, "}", "") + "\n"


def software() -> dict[str, str]:
    """Versions that can move the last digits of a result."""
    system = f"{platform.system()} {platform.machine()}"
    return {"python": platform.python_version(), "torch": torch.__version__, "system": system}


REWARD_TABLE_BYTES = 10_000_000  # a million rewards written with all their digits take twice that


def read_reward_table(path: Path) -> Tensor:
    """A reward table from a JSON list of rows: one row a context, two or more finite numbers in each, equally many.

    -> [C, A] float64. Raises FileProblem. Memory stays below 24 times the file.
    """
    wanted = "wanted a JSON list of rows such as [[1, 0.2], [0, 1]]"
    try:
        text = read_regular_file(path, REWARD_TABLE_BYTES)
        # A list takes about 100 bytes, however short it is written; the shortest row of a table, "[1,0],", has 6 characters.
        if b"{" in text or 97 * text.count(b"[") > 18 * len(text) + 4_000_000:
            raise FileProblem(f"{path}: {wanted}")
        rows = json.loads(text.decode("utf-8"))
        del text
    except FileProblem as problem:
        raise FileProblem(f"--reward-table {problem}") from problem
    except (ValueError, RecursionError) as problem:
        raise FileProblem(f"--reward-table {path}: not JSON ({problem})") from problem
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
        raise FileProblem(f"--reward-table {path}: {wanted}")
    for number, row in enumerate(rows):
        if len(row) != len(rows[0]) or len(row) < 2:
            raise FileProblem(
                f"--reward-table {path}: row {number} has {len(row)} numbers and row 0 has {len(rows[0])}; {wanted} "
                "with two or more actions, equally many in each row"
            )
        for reward in row:
            if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not abs(reward) <= sys.float_info.max:
                raise FileProblem(f"--reward-table {path}: row {number} holds {_start_of(reward)}; wanted finite numbers")
    return torch.tensor(rows, dtype=torch.float64)


def _start_of(value: object) -> str:
    """The first 40 characters of what was read, without writing out all of a large value."""
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)[:40]


def run_document(run: TrainingRun) -> dict:
    """What OUTPUT/ALGORITHM.json holds: enough to repeat the run and to follow its first batch."""
    return {
        "algorithm": run.algorithm,
        "config": dataclasses.asdict(run.settings),
        "reward_table": run.task.rewards.tolist(),
        "software": software(),
        "initial_metrics": run.history[0],
        "final_metrics": run.history[-1],
        **METHODS[run.algorithm].document(run),
        "first_batch_trace": run.first_batch_trace,
    }


# ------------------------------------------------------------------------------------------ command line


class _Remembered(argparse._StoreAction):
    """Stores a value, and that it was given."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        super().__call__(parser, namespace, values, option_string)
        namespace.given |= {self.dest}


class LabParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and whose flags cannot be abbreviated.

    After parsing, `given` holds the names of the options with a value that stood on the command line. `flags_elsewhere`,
    {flag: program}, are flags of other programs, for the hint to somebody who types one of them here.
    """

    def __init__(self, *, flags_elsewhere: dict[str, str] | None = None, **arguments: object):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **arguments)
        self.flags_elsewhere = flags_elsewhere or {}
        self.register("action", None, _Remembered)
        self.register("action", "store", _Remembered)
        self.set_defaults(given=frozenset())

    def parse_args(self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None):
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown[0].split('=')[0])}")
        return arguments

    def _hint(self, flag: str) -> str:
        """What somebody who typed an unknown flag may have meant."""
        if flag in self.flags_elsewhere:
            return f"; {flag} is a flag of {self.flags_elsewhere[flag]}"
        import difflib  # only for somebody who needs it

        near = difflib.get_close_matches(flag, [*self._option_string_actions, *self.flags_elsewhere], n=1)
        if not near or not flag.startswith("--"):
            return ""
        return f"; did you mean {near[0]}{f' of {self.flags_elsewhere[near[0]]}' if near[0] in self.flags_elsewhere else ''}?"

    def _get_values(self, action: argparse.Action, arg_strings: list[str]):
        if action.option_strings and "--" in arg_strings and set(arg_strings) == {"--"}:
            # `--flag=--`: argparse would take the value for the end of the flags and hand over an empty list.
            self.error(f"argument {'/'.join(action.option_strings)}: got '--', wanted a value")
        return super()._get_values(action, arg_strings)

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {one_line(message)} (see --help)\n")


def path_argument(text: str) -> Path:
    """The type of an argument that names a file or a folder."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a file name")
    return Path(text)


def add_settings(parser: argparse.ArgumentParser, settings_class: type[Settings], lists: bool = False) -> None:
    """One flag for each field of a settings class, in the groups the fields name.

    With `lists`, each but the seed also takes several values (2,4,8), one for each run: see `variants_of`.
    """

    def parse(field: dataclasses.Field) -> Callable[[str], float | list[float]]:
        allowed = field.metadata["allowed"]
        several = lists and field.name != "seed"

        def checked(text: str) -> float | list[float]:
            parts = text.split(",") if several else [text]
            try:
                values = [allowed.kind(part) for part in parts]
            except ValueError:
                values = []
            if not values or not all(map(allowed.holds, values)):
                other = " (several seeds: --seeds)" if lists and "," in text and not several else ""
                raise argparse.ArgumentTypeError(f"got {text!r}, wanted {allowed}{other}")
            return values if len(values) > 1 else values[0]

        return checked

    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in dataclasses.fields(settings_class):
        meta = field.metadata
        if meta["group"] not in groups:
            groups[meta["group"]] = parser.add_argument_group(meta["group"])
        groups[meta["group"]].add_argument(
            flag_of(field),
            dest=field.name,
            type=parse(field),
            default=field.default,
            metavar="N" if meta["allowed"].kind is int else "X",
            help=f"{meta['meaning']}; default {field.default:g}",
        )


def chosen_settings(arguments: argparse.Namespace, settings_class: type[Settings]) -> dict[str, float]:
    """The settings among the parsed arguments, as keywords for the settings class."""
    return {field.name: getattr(arguments, field.name) for field in dataclasses.fields(settings_class)}


class Variant(NamedTuple):
    """One of the runs that lists of settings ask for: what varies, by short name, and all settings."""

    varied: dict[str, float]
    settings: dict[str, float]

    def folder(self, output: Path) -> Path:
        """OUTPUT, or beside it OUTPUT-g4 for a group size of 4."""
        name = "".join(f"-{name}{value:g}" for name, value in self.varied.items())
        return output.with_name(output.name + name) if name else output

    def labels(self) -> list[str]:
        """What varies, for a line of text."""
        return [f"{name} {value:g}" for name, value in self.varied.items()]


def variants_of(parser: LabParser, arguments: argparse.Namespace, settings_class: type[Settings]) -> list[Variant]:
    """The runs that the settings among the arguments ask for: one, or one for each value of a list.

    Several lists go together value by value, so they have the same length. The first one whose values all differ names the
    runs. Ends the command with status 2 for lists of different lengths, and for two runs of the same settings.
    """
    settings = chosen_settings(arguments, settings_class)
    fields = {field.name: field for field in dataclasses.fields(settings_class)}
    lists = {name: values for name, values in settings.items() if isinstance(values, list)}
    if not lists:
        return [Variant({}, settings)]
    lengths = {flag_of(fields[name]): len(values) for name, values in lists.items()}
    if len(set(lengths.values())) > 1:
        got = ", ".join(f"{length} for {flag}" for flag, length in lengths.items())
        parser.error(f"lists go together value by value: got {got} values, wanted equally many")
    runs = [dict(zip(lists, values)) for values in zip(*lists.values())]
    if any(run in runs[:number] for number, run in enumerate(runs)):
        parser.error(f"{' and '.join(lengths)}: the same run twice")
    naming = next(([name] for name, values in lists.items() if len(set(values)) == len(values)), list(lists))
    return [Variant({short_name(fields[name]): run[name] for name in naming}, {**settings, **run}) for run in runs]


def parse_seeds(text: str) -> list[int]:
    """"0-19", "0,7,19" or a mix -> the seeds in order, each once. Raises argparse.ArgumentTypeError."""
    try:
        parts = [part.split("-") for part in text.split(",")]
        ranges = [range(int(part[0]), int(part[-1]) + 1) for part in parts if len(part) <= 2]
        if len(ranges) != len(parts) or not all(ranges) or sum(map(len, ranges)) > 1000:
            raise ValueError
        if any(not 0 <= seeds[-1] < 2**63 for seeds in ranges):
            raise ValueError
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted seeds such as 0-19 or 0,7,19, at most 1000") from None
    return list(dict.fromkeys(itertools.chain(*ranges)))


def is_terminal(stream: io.TextIOBase | None) -> bool:
    """Whether a standard stream is a terminal; a closed one is None."""
    return stream is not None and stream.isatty()


def progress_line(label: str, steps: int, metric: str) -> Callable[[dict[str, float] | list[dict[str, float]]], None] | None:
    """A callback that keeps one line on stderr up to date, and clears it at the end; None where stderr is no terminal.

    It takes a row of the history, or the rows of several runs, of which it shows the median.
    """
    if not is_terminal(sys.stderr):
        return None

    def show(rows: dict[str, float] | list[dict[str, float]]) -> None:
        rows = rows if isinstance(rows, list) else [rows]
        step = rows[0]["step"]
        if step % max(1, steps // 100) == 0 or step == steps:
            number = statistics.median(row[metric] for row in rows)
            text = f"{label}  step {step:.0f}/{steps}  {metric.replace('_', ' ')} {readable(number)} "
            print(f"\r{text}" + f"\r{' ' * len(text)}\r" * (step == steps), end="", file=sys.stderr, flush=True)

    return show


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned for reading: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    lines = []
    for first, *others in (header, *rows):
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:]))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def readable(number: float) -> str:
    """Four decimals, or powers of ten where those would fill the line."""
    return f"{number:.4f}" if abs(number) < 1e6 else f"{number:.4g}"


class Terminated(KeyboardInterrupt):
    """SIGTERM (from timeout, a service manager, kill): ends a command as Ctrl-C does."""


def run_command(main: Callable[[], None], problem_status: int = 1) -> None:
    """Run a command; what a user can cause ends in one line on stderr: exit 1 for a problem, 130 for Ctrl-C, 143 for SIGTERM.

    `problem_status` is 2 where 1 says that the command found something.
    """

    def end(text: str | None) -> None:
        if problem_status == 1:
            sys.exit(text or 1)
        if text and sys.stderr is not None:
            print(text, file=sys.stderr)
        sys.exit(problem_status)

    # The lab's tensors are a few hundred numbers: waking a second thread for them costs more than it computes, and on a busy
    # machine thirty times more.
    torch.set_num_threads(1)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # none, or not a text file
            stream.reconfigure(errors="backslashreplace")  # a file name need not be text that the terminal can show
    try:
        with _ending_by_signal():
            _run_and_flush(main)
    except (FileProblem, FloatingPointError) as problem:
        end(f"{_program()}: error: {one_line(problem)}")
    except KeyboardInterrupt as interrupt:
        by, status = (" by SIGTERM", 143) if isinstance(interrupt, Terminated) else ("", 130)
        if sys.stderr is not None:
            below_the_progress_line = "\n" if is_terminal(sys.stderr) else ""
            with contextlib.suppress(OSError):
                print(f"{below_the_progress_line}interrupted{by}: every file is whole, the earlier one or the new one",
                      file=sys.stderr, flush=True)  # fmt: skip
        sys.exit(status)
    except MemoryError:
        end(f"{_program()}: error: not enough memory")
    except RuntimeError as problem:
        if "allocate memory" not in str(problem):  # torch's way to say it
            raise
        end(f"{_program()}: error: not enough memory")
    except OSError as problem:
        if not _is_of_the_output(problem):
            about = f"{problem.filename}: " if problem.filename else ""
            end(f"{_program()}: error: {one_line(about)}{problem.strerror or one_line(problem)}")
        # A full disk behind `> file`; what is left in the buffer must not fail again at exit. When the reader of our output
        # (head, less) went away, what it did not want is not an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        end(None if isinstance(problem, BrokenPipeError) else f"{_program()}: error: cannot print ({problem.strerror})")


def _run_and_flush(main: Callable[[], None]) -> None:
    """Run, and print what waits in the buffer, also after --help: what goes wrong then can still be said."""
    end = None
    try:
        main()
    except SystemExit as asked:
        end = asked
    if sys.stdout is not None:
        sys.stdout.flush()
    if end is not None:
        raise end


def _program() -> str:
    """The running program as a user calls it: rl_lab.py, or python -m extensions.audit."""
    path = Path(sys.argv[0])
    return f"python -m {path.parent.parent.name}.{path.parent.name}" if path.name == "__main__.py" else path.name


def _is_of_the_output(problem: OSError) -> bool:
    """Whether printing failed: the problem names no file, and what is left in the buffer cannot be printed either."""
    if isinstance(problem, BrokenPipeError):
        return True
    if problem.filename is not None or sys.stdout is None:
        return False
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return getattr(sys.stdout, "write_through", False)  # python -u: nothing is left in a buffer


@contextlib.contextmanager
def _ending_by_signal():
    """Inside, Ctrl-C raises KeyboardInterrupt and SIGTERM Terminated, unless the caller arranged something else."""

    def terminate(number: int, frame: object) -> None:
        raise Terminated

    def is_ours(handler: object) -> bool:  # rl_lab's, or its twin in extensions/__init__.py
        return getattr(handler, "__name__", "") == end_before_the_start.__name__

    before = {}
    wanted = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: terminate}
    try:
        for number, handler in wanted.items():
            earlier = signal.getsignal(number)
            if threading.current_thread() is threading.main_thread() and (earlier == signal.SIG_DFL or is_ours(earlier)):
                before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, handler in before.items():  # a process of its own has nothing left to do but to end
            signal.signal(number, signal.SIG_IGN if is_ours(handler) else handler)


DESCRIPTION = """\
Train three small policies on a bandit of four contexts and three actions,
on the CPU, in seconds. Writes OUTPUT/{ppo,dpo,grpo}.csv (one row an
iteration) and .json (settings, pairs, first batch), and prints a summary.
--algorithm atoms trains nothing: it prints the guide's worked numbers with
their formulas.

A setting takes a list, too: --preference-flips 0,3,6,12 makes four runs, in
OUTPUT-flips0, OUTPUT-flips3, ..., and prints one table. Several lists go
together value by value."""

EXAMPLES = """\
examples:
  python -B rl_lab.py --algorithm atoms
  python -B rl_lab.py --algorithm all --output results
  python -B rl_lab.py --algorithm grpo --seed 19 --group-size 4 --output g4
  python -B rl_lab.py --algorithm dpo --preference-flips 0,3,6,12
  python -B rl_lab.py --algorithm grpo --group-size 4,16 --grpo-prompts 32,8
  python -B rl_lab.py --algorithm all --seeds 0-19 --output results-seeds"""

FLAGS_OF_THE_CHAIN = dict.fromkeys(("--gae-lambda", "--gamma", "--episodes"), "ppo_chain.py")


def build_parser() -> LabParser:
    parser = LabParser(description=DESCRIPTION, epilog=EXAMPLES, flags_elsewhere=FLAGS_OF_THE_CHAIN)
    parser.add_argument(
        "--algorithm", choices=("atoms", *METHODS, "all"), default="all", help=f"what to run; default all ({', '.join(METHODS)})"
    )
    parser.add_argument(
        "--output", type=path_argument, default=Path("results"), metavar="DIR", help="folder to write; default results"
    )
    parser.add_argument("--section", metavar="S", help="with --algorithm atoms: one section of the guide, such as 4.2")
    add_seeds(parser)
    parser.add_argument(
        "--reward-table", type=path_argument, metavar="FILE", help="JSON list of rows (contexts) of rewards (actions)"
    )
    add_settings(parser, bandit_settings(), lists=True)
    return parser


def add_seeds(parser: LabParser) -> None:
    parser.add_argument(
        "--seeds", type=parse_seeds, metavar="A-B", help="run several seeds (0-19, or 0,7,19), each into OUTPUT/seed-N/"
    )


def check_seeds_given_once(parser: LabParser, arguments: argparse.Namespace) -> None:
    if arguments.seeds and "seed" in arguments.given:
        parser.error(f"argument --seeds: not allowed with --seed {arguments.seed}; give the seeds once")


def summary(runs: Sequence[TrainingRun]) -> str:
    """Before and after, and what it cost; several seeds of a method become medians."""
    columns = {
        "expected reward": "expected_reward",
        "P(best)": "optimal_action_probability",
        "KL to reference": "kl_current_reference",
    }
    costs = {"samples": "sampled_actions", "pairs": "pair_presentations", "updates": "optimizer_steps"}
    rows = [["(start)", *(readable(runs[0].history[0][name]) for name in columns.values()), *("0" for _ in costs)]]
    notes = []
    for algorithm, of_method in itertools.groupby(runs, key=lambda run: run.algorithm):
        of_method = list(of_method)
        after = [readable(median_of(of_method, name)) for name in columns.values()]
        rows.append([algorithm, *after, *(f"{median_of(of_method, name):.0f}" for name in costs.values())])
        if METHODS[algorithm].note:
            notes.append(METHODS[algorithm].note(of_method))
    rewards = runs[0].task.rewards
    best, worst = rewards.amax(dim=1).mean().item(), rewards.amin(dim=1).mean().item()
    notes.append(f"Expected reward: {readable(worst)} is always the worst action, {readable(best)} always the best.")
    if len(rows) > 2:
        notes.append("Methods differ in data and updates: this checks each of them, it ranks none.")
    return "\n".join([format_table(["method", *columns, *costs], rows), "", *notes])


def table_of_variants(variants: Sequence[Variant], runs: Sequence[Sequence[TrainingRun]]) -> str:
    """One table a method: a row for each variant, with the settings that vary and the method's measures (medians of seeds).

    A method that reads nothing of what varies is the same in every folder: it is named, without a table.
    """
    tables, unmoved = [], []
    fields = dataclasses.fields(bandit_settings())
    varied = [field for field in fields if len({variant.settings[field.name] for variant in variants}) > 1]
    for algorithm in dict.fromkeys(run.algorithm for run in runs[0]):
        read = {field.name for field in dataclasses.fields(METHODS[algorithm].settings)}
        if not any(field.name in read for field in varied):
            unmoved.append(algorithm)
            continue
        rows = []
        for variant, of_variant in zip(variants, runs):
            own = [run for run in of_variant if run.algorithm == algorithm]
            measured = METHODS[algorithm].measures.values()
            numbers = (format(statistics.median(map(measure, own)), digits) for measure, digits in measured)
            rows.append([*(f"{variant.settings[field.name]:g}" for field in varied), *numbers])
        heads = [short_name(field) for field in varied]
        tables.append(f"{algorithm}\n" + format_table([*heads, *METHODS[algorithm].measures], rows))
    if unmoved:
        tables.append(f"Nothing that varies is read by {', '.join(unmoved)}: the same in every folder.")
    return "\n\n".join(tables)


def list_of_files(folders: Sequence[Path], names: Sequence[str], seeds: Sequence[int] | None) -> str:
    """The end of a report: which files were written, one a line."""
    written = [folder / "seed-N" if seeds else folder for folder in folders]
    lines = [f"  {one_line(folder / name)}.csv" for folder in written for name in names]
    return "\n".join(["Files, each with a .json beside it:", *lines])


def title(variants: Sequence[Variant], seed: int, seeds: Sequence[int] | None) -> str:
    """The first line of a report: which runs it shows."""
    steps = dict.fromkeys(variant.settings["steps"] for variant in variants)
    of = f"medians over {len(seeds)} seeds" if seeds else f"seed {seed}"
    return f"{of}, {', '.join(map(str, steps))} iterations"


def name_of_seeds(seeds: Sequence[int]) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"


MEMORY_LIMIT = 2_000_000_000  # bytes that the commands plan to use at most
BYTES_OF_A_ROW = 1500  # of a history: a dict of fourteen numbers, and its line of CSV
SEEDS_TOGETHER = 100  # beyond that, more of them save no time


def planned_bytes(method: Method, settings: RunSettings, rewards: Tensor) -> int:
    """About how much memory one run takes beside its history: the tensors of an update on one batch, and its JSON."""
    contexts, actions = rewards.shape
    pairs = count_pairs(rewards) if method.compares_pairs else 0
    batch = method.batch_size(settings, pairs)
    # Of each sample: its logits, their log-probabilities and gradients with copies on the way, and its own columns. The policy
    # with Adam's state and the policies after each update. The trace and the JSON of each pair.
    numbers = batch * (8 * actions + 30) + (20 + settings.max_updates) * contexts * actions
    return 8 * numbers + 3000 * pairs


def check_history_memory(rows: int) -> int:
    """The bytes that histories of so many rows take. Raises FileProblem when they are more than MEMORY_LIMIT."""
    needed = BYTES_OF_A_ROW * rows
    if needed > MEMORY_LIMIT:
        raise FileProblem(
            f"--steps: {rows} iterations in all would take about {needed / 1e9:.1f} GB of memory; at most "
            f"{MEMORY_LIMIT / 1e9:g} GB are used"
        )
    return needed


def check_memory(algorithms: Sequence[str], variants: Sequence[Variant], seeds: int, rewards: Tensor) -> int:
    """How many seeds may go through the same tensors. Raises FileProblem when the runs need more memory than MEMORY_LIMIT."""
    together = min(seeds, SEEDS_TOGETHER)
    history = check_history_memory(sum(variant.settings["steps"] for variant in variants) * seeds * len(algorithms))
    for variant in variants:
        settings = bandit_settings()(**variant.settings)
        for algorithm in algorithms:
            one = planned_bytes(METHODS[algorithm], settings, rewards)
            if one + history > MEMORY_LIMIT:
                raise FileProblem(
                    f"{algorithm} on a table of {len(rewards)} x {rewards.shape[1]} with these settings would take about "
                    f"{(one + history) / 1e9:.1f} GB of memory; at most {MEMORY_LIMIT / 1e9:g} GB are used"
                )
            together = max(1, min(together, int(MEMORY_LIMIT / 2 / one)))
    return together


def check_flags(parser: LabParser, arguments: argparse.Namespace, algorithms: Sequence[str]) -> None:
    """End the command with status 2 for a flag that nothing would read, and for a seed given twice."""
    check_seeds_given_once(parser, arguments)
    readers = {name: {field.name for field in dataclasses.fields(METHODS[name].settings)} for name in METHODS}
    for field in dataclasses.fields(bandit_settings()):
        if field.name in arguments.given and not any(field.name in readers[name] for name in algorithms):
            reading = ", ".join(name for name in METHODS if field.name in readers[name])
            parser.error(f"argument {flag_of(field)}: --algorithm {arguments.algorithm} does not read it (read by {reading})")
    for name in ("output", "seeds", "reward_table"):
        if name in arguments.given and not algorithms:
            flag = "--" + name.replace("_", "-")
            parser.error(f"argument {flag}: --algorithm {arguments.algorithm} trains nothing and writes nothing")


def check_pairs(
    parser: LabParser, algorithms: Sequence[str], variants: Sequence[Variant], rewards: Tensor, path: Path | None
) -> None:
    """End the command for a table without pairs, and for more exchanged pairs than there are."""
    compared = [name for name in algorithms if METHODS[name].compares_pairs]
    if not compared:
        return
    pairs = count_pairs(rewards)
    if not pairs:
        raise FileProblem(f"--reward-table {path}: no context has two different rewards: no pairs for {', '.join(compared)}")
    for variant in variants:
        if variant.settings["preference_flips"] > pairs:
            parser.error(
                f"argument --preference-flips: got {variant.settings['preference_flips']}, wanted a whole number from 0 to "
                f"{pairs}, the number of preference pairs"
            )


def result_paths(folder: Path, algorithm: str, seed: int | None) -> tuple[Path, Path]:
    """The CSV and the JSON of a run; `seed` where there are several."""
    folder = folder if seed is None else folder / f"seed-{seed}"
    return folder / f"{algorithm}.csv", folder / f"{algorithm}.json"


def train_and_write(
    variant: Variant, algorithms: Sequence[str], seeds: Sequence[int], rewards: Tensor, output: Path, several: bool
) -> list[TrainingRun]:
    """Train every algorithm with these seeds, write their files together, -> the runs, algorithm by algorithm."""
    settings = {name: value for name, value in variant.settings.items() if name != "seed"}
    texts, runs = {}, []
    for algorithm in algorithms:
        label = "  ".join([f"{algorithm:4}", *variant.labels(), *[name_of_seeds(seeds)] * several])
        show = progress_line(label, settings["steps"], "expected_reward")
        for run in train_seeds(algorithm, seeds, reward_table=rewards, on_step=show, **settings):
            paths = result_paths(variant.folder(output), algorithm, run.settings.seed if several else None)
            texts.update(zip(paths, (csv_text(run.history), json_text(run_document(run)))))
            runs.append(run)
    replace_files(texts)
    return runs


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    algorithms = {"all": tuple(METHODS), "atoms": ()}.get(arguments.algorithm, (arguments.algorithm,))
    check_flags(parser, arguments, algorithms)
    sections = list(dict.fromkeys(example.section for example in worked_examples())) if arguments.section else ()
    if arguments.section and algorithms:
        parser.error("--section: only with --algorithm atoms")
    if arguments.section and arguments.section not in sections:
        parser.error(f"--section: got {arguments.section!r}, wanted one of {', '.join(sections)}")
    if not algorithms:
        print_worked_examples(arguments.section)
        return
    variants = variants_of(parser, arguments, bandit_settings())
    rewards = read_reward_table(arguments.reward_table) if arguments.reward_table else REWARDS
    check_pairs(parser, algorithms, variants, rewards, arguments.reward_table)
    seeds = arguments.seeds or [arguments.seed]
    together = check_memory(algorithms, variants, len(seeds), rewards)
    folders = [variant.folder(arguments.output) for variant in variants]
    named = arguments.seeds or [None]
    places = itertools.product(folders, algorithms, named)
    longest = max(variant.settings["steps"] for variant in variants)
    check_writable([path for place in places for path in result_paths(*place)], expected_bytes=1000 * (longest + 100))

    runs = []
    for variant in variants:
        groups = (seeds[first : first + together] for first in range(0, len(seeds), together))
        parts = [
            train_and_write(variant, algorithms, group, rewards, arguments.output, bool(arguments.seeds)) for group in groups
        ]
        runs.append(sorted(itertools.chain(*parts), key=lambda run: algorithms.index(run.algorithm)))

    print(title(variants, arguments.seed, arguments.seeds) + "\n")
    print(summary(runs[0]) if len(variants) == 1 else table_of_variants(variants, runs) + "\n")
    print(list_of_files(folders, algorithms, arguments.seeds))


if __name__ == "__main__":
    run_command(main)
