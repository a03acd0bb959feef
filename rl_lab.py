"""The atoms of PPO, DPO and GRPO, and three small trainings that are built from nothing else.

Reading order: atoms (pure functions on tensors), the bandit (the task), training, files, command line.

Letters: B batch rows, A actions, T time steps or token positions, G answers to one prompt, V vocabulary, C contexts;
`[..., T]` means any leading axes. `old` is the policy that produced the samples; it stays fixed while its batch is
reused. `reference` is the policy to stay near; it never changes. A `*_loss` is minimised. Loss atoms return one value
per sample or token: the caller writes the reduction.

Same as the papers: the clipped surrogate (PPO, arXiv 1707.06347), GAE (arXiv 1506.02438), the DPO loss (arXiv
2305.18290), group advantages (GRPO in DeepSeekMath, arXiv 2402.03300). Simplified: one-step episodes, a table of logits
for a policy, the exact KL where the papers estimate it. Left out: entropy bonus, value clipping in training, advantage
standardisation in PPO.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import io
import itertools
import json
import math
import numbers
import os
import platform
import statistics
import sys
import tempfile
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


_KINDS = {
    "floating": lambda dtype: dtype.is_floating_point,
    "bool": lambda dtype: dtype == torch.bool,
    "integer": lambda dtype: not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool),
}


def _check_kind(kind: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, wanted a {kind} torch.Tensor")
        if not _KINDS[kind](tensor.dtype):
            raise TypeError(f"{name}: got dtype {tensor.dtype}, wanted a {kind} dtype; convert it where it is made")


def _check_same_shape(**tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        got = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"shapes differ: got {got}, wanted one shape; likely a [B, 1] that would broadcast against [B]")


def _check_last_axis(name: str, tensor: Tensor, at_least: int, meaning: str) -> None:
    if tensor.dim() == 0 or tensor.shape[-1] < at_least:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, wanted at least {at_least} on the last axis, {meaning}")


def _check_finite(name: str, used: Tensor, likely: str) -> None:
    if not torch.isfinite(used).all():
        where = (~torch.isfinite(used)).nonzero()[0].tolist()
        raise ValueError(f"{name}: got {used[tuple(where)].item()} at index {where}, wanted finite numbers; likely {likely}")


def _check_number(name: str, value: float, low: float, high: float = math.inf, *, above: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: got {type(value).__name__}, wanted a plain number")
    if not (low < value if above else low <= value) or not value <= high or math.isinf(value):
        upper = "" if math.isinf(high) else f" and at most {high:g}"
        bound = f"{'above' if above else 'of at least'} {low:g}{upper}"
        raise ValueError(f"{name}: got {value!r}, wanted a finite number {bound}")


# ------------------------------------------------------------------------------------------ atoms: policy gradient


def action_logps(logits: Tensor, actions: Tensor) -> Tensor:
    """Log-probability of each taken action under a softmax policy.

    logp = z_a - log sum_b exp(z_b), computed by log_softmax; log(softmax(z)) loses the small probabilities.

    logits [..., A] floating (-inf marks an action that is not allowed), actions [...] integer -> [...].
    Gradient: to logits. Raises TypeError for a wrong dtype, ValueError for a wrong shape or an action outside 0..A-1.
    """
    _check_kind("floating", logits=logits)
    _check_kind("integer", actions=actions)
    _check_last_axis("logits", logits, 1, "the actions")
    if logits.shape[:-1] != actions.shape:
        raise ValueError(
            f"actions: got shape {tuple(actions.shape)}, wanted {tuple(logits.shape[:-1])}, the shape of logits without "
            "its last axis"
        )
    if actions.numel() and not 0 <= int(actions.min()) <= int(actions.max()) < logits.shape[-1]:
        raise ValueError(
            f"actions: got numbers from {int(actions.min())} to {int(actions.max())}, wanted 0 to {logits.shape[-1] - 1}"
        )
    return logits.log_softmax(dim=-1).gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)


def reinforce_loss(logp: Tensor, returns: Tensor) -> Tensor:
    """REINFORCE, per sample: -logp * returns.

    The mean of its gradient over samples of the current policy estimates minus the gradient of the expected return.
    `returns` may have a baseline subtracted that does not depend on the sampled action: the expectation stays the same.

    logp [...], returns [...] floating -> [...]. Gradient: to logp only. Raises TypeError, ValueError (shapes differ, a
    return that is not finite). Source: Williams 1992; Sutton et al. 1999.
    """
    _check_kind("floating", logp=logp, returns=returns)
    _check_same_shape(logp=logp, returns=returns)
    _check_finite("returns", returns, "a failed reward computation")
    return -(logp * returns.detach())


# ------------------------------------------------------------------------------------------ atoms: time


def td_residuals(rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, gamma: float = 1.0) -> Tensor:
    """One-step TD residual: delta_t = r_t + gamma * (0 if terminated_t else V(next_t)) - V(s_t).

    `next_values` is the value of the true next observation, before any reset; where `terminated` is set it is not read
    and may hold anything. A time limit is not a termination.

    rewards, values, next_values [..., T] floating, terminated [..., T] bool, gamma in [0, 1] -> [..., T].
    Gradient: none. Raises TypeError, ValueError (shapes, gamma, a non-finite number that would be used).
    """
    _check_kind("floating", rewards=rewards, values=values, next_values=next_values)
    _check_kind("bool", terminated=terminated)
    _check_same_shape(rewards=rewards, values=values, next_values=next_values, terminated=terminated)
    _check_last_axis("rewards", rewards, 1, "the time steps")
    _check_number("gamma", gamma, 0.0, 1.0)
    with torch.no_grad():
        bootstrap = next_values.masked_fill(terminated, 0.0)
        _check_finite("rewards", rewards, "a failed reward computation")
        _check_finite("values", values, "a critic that has diverged")
        _check_finite("next_values", bootstrap, "a critic that has diverged, or an unset value at a time limit")
        return rewards + gamma * bootstrap - values


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

    A_t = delta_t + gamma * lam * (0 if boundary_t else A_{t+1}), delta_t from td_residuals; returns_t = A_t + V(s_t).

    Two flags, since they answer two questions: `terminated` stops the bootstrap (nothing comes after), `boundary` stops
    the recursion (the next row belongs to another episode). An ordinary step sets neither, a real end both, a time limit
    or a cut buffer only `boundary`. lam = 0 gives one-step TD; lam = 1 gives the discounted return minus the value.

    rewards, values, next_values [..., T] floating, terminated, boundary [..., T] bool, gamma and lam in [0, 1]
    -> (advantages [..., T], returns [..., T]). The last axis is time; leading axes are a batch.
    Gradient: none. Raises TypeError, ValueError (as td_residuals; a residual that overflows; terminated without boundary).
    Source: arXiv 1506.02438 equations 11-16; the paper has one episode and no flags.
    """
    deltas = td_residuals(rewards, values, next_values, terminated, gamma)
    _check_kind("bool", boundary=boundary)
    _check_same_shape(terminated=terminated, boundary=boundary)
    _check_number("lam", lam, 0.0, 1.0)
    if (terminated & ~boundary).any():
        where = (terminated & ~boundary).nonzero()[0].tolist()
        raise ValueError(
            f"boundary: got False at index {where} where terminated is True, wanted True: an episode that ended is over; "
            "likely the two flags were exchanged"
        )
    _check_finite("td residual", deltas, "rewards or values near the largest number of their dtype")
    # Multiplying by 0 at a boundary is a selection here, since every residual is finite.
    carries = (~boundary).to(deltas.dtype) * (gamma * lam)
    advantages = []
    following = 0.0
    for delta, carry in zip(reversed(_by_time(deltas)), reversed(_by_time(carries))):
        following = delta + carry * following
        advantages.append(following)
    advantages.reverse()
    if isinstance(following, float):
        advantages = deltas.new_tensor(advantages).reshape(deltas.shape)
    else:
        advantages = torch.stack(advantages).movedim(0, -1)
    return advantages, advantages + values.detach()


def _by_time(series: Tensor) -> Sequence:
    """The time steps of [..., T] in order: plain floats for a single series (ten times faster), else tensor rows."""
    if series.numel() == series.shape[-1]:
        return series.flatten().tolist()
    return series.movedim(-1, 0).contiguous().unbind(0)


# ------------------------------------------------------------------------------------------ atoms: ratio and clipping


def importance_ratio(logp: Tensor, old_logp: Tensor) -> Tensor:
    """Probability ratio of current to old policy at the same state and action: rho = exp(logp - old_logp).

    The exponent stops just below the logarithm of the dtype's largest number (708.8 in float64, 87.7 in float32), so that
    the branch a clip does not take cannot overflow and turn a zero gradient into NaN (0 * inf). Above that cap the ratio is
    constant and has no gradient.

    logp, old_logp [...] floating -> [...]. Gradient: to logp only; old_logp is detached here, so that a caller who
    forgot cannot cancel the gradient. Raises TypeError, ValueError (shapes differ).
    """
    _check_kind("floating", logp=logp, old_logp=old_logp)
    _check_same_shape(logp=logp, old_logp=old_logp)
    log_ratio = logp - old_logp.detach()
    return log_ratio.clamp(max=math.log(torch.finfo(log_ratio.dtype).max) - 1).exp()


def clipped_policy_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, epsilon: float = 0.2) -> Tensor:
    """PPO-Clip, per sample: -min(rho * A, clip(rho, 1 - epsilon, 1 + epsilon) * A), rho = exp(logp - old_logp).

    Flat where the policy has already moved far enough in the direction that A asks for (rho > 1 + epsilon with A > 0,
    rho < 1 - epsilon with A < 0); elsewhere d loss / d logp = -rho * A, however far rho is, up to the cap of
    importance_ratio. It does not hold rho inside the band, and it is no trust region.

    logp, old_logp, advantages [...] floating, epsilon > 0 -> [...]. Gradient: to logp only.
    Raises TypeError, ValueError (shapes, epsilon). Source: arXiv 1707.06347 equation 7, negated.
    """
    _check_kind("floating", logp=logp, old_logp=old_logp, advantages=advantages)
    _check_same_shape(logp=logp, old_logp=old_logp, advantages=advantages)
    _check_number("epsilon", epsilon, 0.0, above=True)
    advantages = advantages.detach()
    ratio = importance_ratio(logp, old_logp)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon) * advantages)


def clip_fraction(logp: Tensor, old_logp: Tensor, epsilon: float = 0.2) -> Tensor:
    """Share of samples whose ratio lies outside [1 - epsilon, 1 + epsilon], whatever the sign of the advantage.

    It is not the share of samples that lost their gradient: rho = 1.5 with A = -1 is outside and keeps gradient 1.5.

    logp, old_logp [...] floating, epsilon > 0 -> scalar in [0, 1]. Gradient: none. Raises TypeError, ValueError.
    """
    _check_number("epsilon", epsilon, 0.0, above=True)
    ratio = importance_ratio(logp, old_logp).detach()
    return ((ratio < 1 - epsilon) | (ratio > 1 + epsilon)).to(ratio.dtype).mean()


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, epsilon: float = 0.2) -> Tensor:
    """Value regression with PPO's optional clip, per sample.

    max((V - R)^2, (V_old + clip(V - V_old, -epsilon, epsilon) - R)^2): the larger of the two, without a factor 1/2.
    The trainings of this lab use the plain square; this atom is here because trainers ship it.

    values, old_values, returns [...] floating, epsilon > 0 (in units of the value) -> [...]. Gradient: to values only.
    Raises TypeError, ValueError. Source: the OpenAI baselines PPO2 code; the paper does not mention it.
    """
    _check_kind("floating", values=values, old_values=old_values, returns=returns)
    _check_same_shape(values=values, old_values=old_values, returns=returns)
    _check_number("epsilon", epsilon, 0.0, above=True)
    old_values, returns = old_values.detach(), returns.detach()
    clipped_values = old_values + (values - old_values).clamp(-epsilon, epsilon)
    return torch.maximum((values - returns).square(), (clipped_values - returns).square())


# ------------------------------------------------------------------------------------------ atoms: KL


def categorical_kl(logits: Tensor, reference_logits: Tensor) -> Tensor:
    """Exact KL(logits || reference) between two softmax distributions: sum_a p_a * (log p_a - log q_a).

    p = softmax(logits), q = softmax(reference_logits); an action of probability 0 contributes 0. Infinite where p puts
    weight on an action that q forbids (-inf). Not symmetric: swapping the arguments gives another number.

    logits, reference_logits [..., A] floating -> [...] in nats. Gradient: to logits only.
    Raises TypeError, ValueError (shapes differ).
    """
    _check_kind("floating", logits=logits, reference_logits=reference_logits)
    _check_same_shape(logits=logits, reference_logits=reference_logits)
    _check_last_axis("logits", logits, 1, "the actions")
    logp = logits.log_softmax(dim=-1)
    probability = logp.exp()
    gap = (logp - reference_logits.detach().log_softmax(dim=-1)).masked_fill(probability == 0, 0.0)
    return (probability * gap).sum(dim=-1)


def kl_estimates(logp: Tensor, ref_logp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three per-sample estimates of KL(current || reference) from samples of the current policy.

    With d = logp - ref_logp: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (the form in the GRPO paper).
    Averaged over samples of the current policy, k1 and k3 equal the KL; k2 does not. k3 and k2 are never negative, k1
    may be. Samples of any other policy (an old one, say) give other averages. As a loss with the samples held fixed the
    mean gradients are: k1 zero, k2 that of KL(current || reference), k3 that of KL(reference || current).

    logp, ref_logp [...] floating -> three [...] in nats. Gradient: to logp only. Raises TypeError, ValueError.
    Source: arXiv 2402.03300 equation 4 (k3); Schulman's note on approximating KL divergence.
    """
    _check_kind("floating", logp=logp, ref_logp=ref_logp)
    _check_same_shape(logp=logp, ref_logp=ref_logp)
    log_ratio = logp - ref_logp.detach()
    return log_ratio, log_ratio.square() / 2, torch.expm1(-log_ratio) + log_ratio


# ------------------------------------------------------------------------------------------ atoms: preferences


def preference_probability(reward_chosen: Tensor, reward_rejected: Tensor) -> Tensor:
    """Bradley-Terry: P(chosen preferred) = sigmoid(reward_chosen - reward_rejected).

    Only the difference matters: two bad answers are compared like two good ones.

    reward_chosen, reward_rejected [...] floating -> [...] in [0, 1]. Gradient: to both.
    Raises TypeError, ValueError (shapes differ, a reward that is not finite). Source: Bradley and Terry 1952.
    """
    _check_kind("floating", reward_chosen=reward_chosen, reward_rejected=reward_rejected)
    _check_same_shape(reward_chosen=reward_chosen, reward_rejected=reward_rejected)
    _check_finite("reward_chosen", reward_chosen, "a failed reward model")
    _check_finite("reward_rejected", reward_rejected, "a failed reward model")
    return torch.sigmoid(reward_chosen - reward_rejected)


def dpo_loss(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float) -> Tensor:
    """DPO, per pair: -log sigmoid(beta * h), h = (chosen - ref_chosen) - (rejected - ref_rejected).

    Each argument is the log-probability of a whole answer: the sum over its tokens, not the mean (a mean is another
    objective). At policy = reference the loss is log 2 and the gradient is -beta/2 to chosen, +beta/2 to rejected. The
    loss asks h to grow; the probability of the chosen answer may still fall.

    chosen, rejected, ref_chosen, ref_rejected [...] floating, beta > 0 -> [...]. Gradient: to chosen and rejected.
    Raises TypeError, ValueError (shapes, beta). Source: arXiv 2305.18290 equation 7.
    """
    _check_kind("floating", chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    _check_same_shape(chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    _check_number("beta", beta, 0.0, above=True)
    margin = (chosen - ref_chosen.detach()) - (rejected - ref_rejected.detach())
    # logsigmoid is linear for very negative margins; log(sigmoid(.)) would give -inf there.
    return -F.logsigmoid(beta * margin)


# ------------------------------------------------------------------------------------------ atoms: groups


def groups_without_spread(rewards: Tensor) -> Tensor:
    """Whether all rewards of a group are equal, up to a few units in the last place.

    True where max - min <= 8 * machine epsilon * max|R|: sums such as 0.1 + 0.2 and 0.3 count as equal.

    rewards [..., G] floating -> [...] bool. Gradient: none. Raises TypeError, ValueError (no group, non-finite rewards).
    """
    _check_kind("floating", rewards=rewards)
    _check_last_axis("rewards", rewards, 1, "the answers to one prompt")
    _check_finite("rewards", rewards, "a failed verifier or reward model")
    low, high = rewards.aminmax(dim=-1)
    return high - low <= 8 * torch.finfo(rewards.dtype).eps * torch.maximum(low.abs(), high.abs())


def group_advantages(rewards: Tensor, eps: float = 1e-8) -> Tensor:
    """GRPO's advantage within each group: A_i = (R_i - mean(R)) / (std(R) + eps).

    std is the population standard deviation (divisor G). A group without spread gets exactly zero. `eps` only guards
    the division; it has nothing to do with the clip. Groups are rows: rewards of different prompts never mix. The mean
    contains R_i itself and std is random, so this is a relative rule, not an action-independent baseline.

    rewards [..., G] floating and finite, G >= 2, eps >= 0 -> [..., G]. Gradient: none.
    Raises TypeError, ValueError (a group of one, non-finite rewards). Source: arXiv 2402.03300 section 4.1, which
    leaves the divisor of std and the guard open; public trainers differ in both.
    """
    equal = groups_without_spread(rewards)
    _check_last_axis("rewards", rewards, 2, "the answers to one prompt: one answer has nothing to be compared with")
    _check_number("eps", eps, 0.0)
    with torch.no_grad():
        scaled, unit = _in_units_of_the_largest(rewards)
        centred = scaled - scaled.mean(dim=-1, keepdim=True)
        std = centred.square().mean(dim=-1, keepdim=True).sqrt()
        return torch.where(equal.unsqueeze(-1), torch.zeros_like(centred), centred / (std + eps / unit))


def _in_units_of_the_largest(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards over a power of two near each group's largest, and that unit. Exact; squares neither overflow nor vanish."""
    _, exponent = torch.frexp(rewards.abs().amax(dim=-1, keepdim=True))
    unit = torch.ldexp(torch.ones_like(rewards[..., :1]), exponent - 1)
    return rewards / unit, unit


def zero_variance_probability(probabilities: Tensor, group_size: int) -> Tensor:
    """Chance that G independent draws all give the same outcome: sum_a p_a^G.

    For a success probability p this is p^G + (1 - p)^G; for three equally likely actions 3^(1 - G).

    probabilities [..., A] floating, each row summing to 1, group_size a whole number >= 1 -> [...].
    Gradient: to probabilities. Raises TypeError, ValueError.
    """
    _check_kind("floating", probabilities=probabilities)
    _check_last_axis("probabilities", probabilities, 1, "the outcomes")
    _check_number("group_size", group_size, 1)
    if group_size != int(group_size):
        raise ValueError(f"group_size: got {group_size!r}, wanted a whole number")
    too_far = (probabilities.detach().sum(dim=-1) - 1).abs() > 1e-5
    if not (probabilities >= 0).all() or too_far.any():
        raise ValueError("probabilities: wanted no negative number and rows that sum to 1; likely logits were given")
    return probabilities.pow(group_size).sum(dim=-1)


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
    predicts; a row without a response token).
    """
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
    low, high = (int(bound) for bound in input_ids.aminmax()) if input_ids.numel() else (0, 0)
    if low < 0 or high >= logits.shape[-1]:
        raise ValueError(
            f"input_ids: got ids from {low} to {high}, wanted 0 to {logits.shape[-1] - 1}; likely labels with -100 were "
            "passed, or the tokenizer does not belong to the model"
        )
    valid = response_mask[:, 1:]
    # Only the rows of scored positions are normalised: prompt and padding cost neither time nor memory.
    scored = F.pad(valid, (0, 1)).flatten().nonzero().squeeze(1)
    scored_logits = logits.flatten(0, 1).index_select(0, scored)
    scored_logps = action_logps(scored_logits, input_ids[:, 1:][valid])
    token_logps = scored_logps.new_zeros(valid.shape).masked_scatter(valid, scored_logps)
    return token_logps, valid


def response_logps(logits: Tensor, input_ids: Tensor, response_mask: Tensor) -> Tensor:
    """Log-probability of each whole response: the sum of response_token_logps over its tokens.

    log pi(y | x) = sum_t log pi(y_t | x, y_<t). This is the score that DPO compares.

    Arguments, gradient and errors as response_token_logps -> [B].
    """
    token_logps, _ = response_token_logps(logits, input_ids, response_mask)
    return token_logps.sum(dim=-1)


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


def setting(default: float, allowed: Range, meaning: str, group: str, flag: str | None = None) -> dataclasses.Field:
    """One field of a settings class, with all that the command line needs to offer it."""
    return dataclasses.field(default=default, metadata=dict(allowed=allowed, meaning=meaning, group=group, flag=flag))


class Settings:
    """Base of the settings classes: refuses values outside their range with the name, the value and the range."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, allowed = getattr(self, field.name), field.metadata["allowed"]
            if not allowed.holds(value):
                raise ValueError(f"{field.name}: got {value!r}, wanted {allowed}")


@dataclasses.dataclass(frozen=True)
class UpdateSettings(Settings):
    """What the bandit and the chain share: the run and how a batch becomes updates. Defaults are the reference run."""

    seed: int = setting(7, Range(int, 0, 2**63 - 1), "seed of the local random generator", "run")
    steps: int = setting(120, Range(int, 1, 100_000), "outer iterations; 3 only checks that the command works", "run")
    learning_rate: float = setting(0.08, Range(float, 0, 100, above=True), "Adam learning rate", "update")
    max_gradient_norm: float = setting(1.0, Range(float, 0, 1e6, above=True), "gradient norm is clipped to this", "update")
    clip_epsilon: float = setting(0.2, Range(float, 0, 1, above=True), "half width of the ratio band", "update")
    max_updates: int = setting(4, Range(int, 1, 1000), "most updates on one batch of samples", "update")
    kl_stop: float = setting(
        0.05, Range(float, 0, 1e6, above=True), "KL(old || current) above this ends the batch's updates", "update"
    )
    value_weight: float = setting(0.5, Range(float, 0, 1e6), "PPO: weight of the critic's squared error", "update")


@dataclasses.dataclass(frozen=True)
class BanditSettings(UpdateSettings):
    """Every number of the three bandit trainings."""

    ppo_samples: int = setting(128, Range(int, 1, 1_000_000), "context-action pairs sampled per iteration", "PPO")
    ppo_kl_beta: float = setting(
        0.02, Range(float, 0, 1e6), "weight of the sampled KL to the reference in the reward", "PPO"
    )
    dpo_beta: float = setting(0.5, Range(float, 0, 1e6, above=True), "scale of the preference margin", "DPO")
    preference_flips: int = setting(0, Range(int, 0, 1_000_000), "exchange chosen and rejected in this many pairs", "DPO")
    group_size: int = setting(8, Range(int, 2, 4096), "actions sampled for each drawn prompt", "GRPO")
    online_batch_prompts: int = setting(16, Range(int, 1, 4096), "prompts drawn per iteration", "GRPO", "--grpo-prompts")
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
    """What is learned, fixed before the first sample."""

    rewards: Tensor  # [C, A]
    reference: Tensor  # [C, A] logits of the policy to stay near
    clean_pairs: Pairs  # in the order of the reward table
    training_pairs: Pairs  # the same with some pairs flipped
    flipped_pair_indices: list[int]


def preference_pairs(rewards: Tensor) -> Pairs:
    """All pairs of one context whose rewards differ, the better action as chosen.

    rewards [C, A] -> P pairs. The 4x3 table gives 12; equal rewards make no preference.
    """
    rows = [
        (context, first, second) if row[first] > row[second] else (context, second, first)
        for context, row in enumerate(rewards.tolist())
        for first, second in itertools.combinations(range(len(row)), 2)
        if row[first] != row[second]
    ]
    return Pairs(*torch.tensor(rows, dtype=torch.long).reshape(-1, 3).unbind(dim=1))


def make_task(rewards: Tensor, settings: BanditSettings) -> Task:
    """The task with `preference_flips` pairs exchanged once, drawn by the seed. Raises ValueError for too many flips."""
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
    return Task(rewards, torch.zeros_like(rewards), clean, training, flipped.tolist())


def evaluate(policy: Tensor, old: Tensor, task: Task) -> dict[str, float]:
    """Exact metrics of a policy: contexts count equally, actions are summed over, nothing is sampled.

    expected_reward = mean_x sum_a p(a|x) R(x, a); optimal_action_probability sums over all best actions of a context;
    entropy and both KLs (old || current, current || reference) are in nats.
    """
    with torch.no_grad():
        probability = policy.softmax(dim=-1)
        best = task.rewards == task.rewards.amax(dim=-1, keepdim=True)
        return {
            "expected_reward": (probability * task.rewards).sum(dim=-1).mean().item(),
            "optimal_action_probability": (probability * best).sum(dim=-1).mean().item(),
            "entropy": torch.special.entr(probability).sum(dim=-1).mean().item(),
            "kl_old_current": categorical_kl(old, policy).mean().item(),
            "kl_current_reference": categorical_kl(policy, task.reference).mean().item(),
        }


# ------------------------------------------------------------------------------------------ three methods

# Each method is a way to make a batch from the old policy (detached, then fixed while it is reused) and a loss on it.
# A loss returns what is minimised, and how to measure the diagnostics of that update: only those of an iteration's last
# update are asked for.


class Rollout(NamedTuple):
    """Sampled actions of the old policy; every shape is [N] (PPO) or [B, G] (GRPO: B prompts, G answers each)."""

    contexts: Tensor
    actions: Tensor
    rewards: Tensor
    old_logp: Tensor
    advantages: Tensor
    old_values: Tensor | None = None  # PPO
    value_targets: Tensor | None = None  # PPO


def sample_ppo(policy: Tensor, critic: Tensor, task: Task, settings: BanditSettings, generator: torch.Generator) -> Rollout:
    """One PPO batch: R_shaped = R - ppo_kl_beta * (log pi_old - log pi_ref), A = R_shaped - V_old(x).

    An episode is one step, so the advantage needs no recursion over time; `ppo_chain.py` has the case that does.
    """
    with torch.no_grad():
        contexts = torch.randint(len(task.rewards), (settings.ppo_samples,), generator=generator)
        logits = policy[contexts]
        actions = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(1)
        rewards = task.rewards[contexts, actions]
        old_logp = action_logps(logits, actions)
        reference_logp = action_logps(task.reference[contexts], actions)
        shaped_returns = rewards - settings.ppo_kl_beta * (old_logp - reference_logp)
        old_values = critic[contexts]
        return Rollout(contexts, actions, rewards, old_logp, shaped_returns - old_values, old_values, shaped_returns)


def ppo_loss(
    policy: Tensor, critic: Tensor, batch: Rollout, task: Task | None, settings: UpdateSettings
) -> tuple[Tensor, dict]:
    """mean(clipped policy loss) + value_weight * mean((V - value_target)^2). `task` is not read."""
    logp = action_logps(policy[batch.contexts], batch.actions)
    policy_loss = clipped_policy_loss(logp, batch.old_logp, batch.advantages, settings.clip_epsilon).mean()
    value_loss = (critic[batch.contexts] - batch.value_targets).square().mean()
    return policy_loss + settings.value_weight * value_loss, {
        "value_loss": lambda: value_loss,
        "clip_fraction": lambda: clip_fraction(logp, batch.old_logp, settings.clip_epsilon),
    }


def sample_grpo(policy: Tensor, critic: None, task: Task, settings: BanditSettings, generator: torch.Generator) -> Rollout:
    """One GRPO batch: B prompts drawn uniformly with replacement, G actions for each, advantages within each row."""
    with torch.no_grad():
        prompts = torch.randint(len(task.rewards), (settings.online_batch_prompts,), generator=generator)
        probability = policy[prompts].softmax(dim=-1)
        actions = torch.multinomial(probability, settings.group_size, replacement=True, generator=generator)
        contexts = prompts.unsqueeze(1).expand_as(actions)
        rewards = task.rewards[contexts, actions]
        return Rollout(contexts, actions, rewards, action_logps(policy[contexts], actions), group_advantages(rewards))


def grpo_loss(policy: Tensor, critic: None, batch: Rollout, task: Task, settings: BanditSettings) -> tuple[Tensor, dict]:
    """mean(clipped policy loss) + grpo_kl_weight * mean KL(current || reference) at the drawn prompts.

    An answer is one action, so the mean over tokens and the mean over answers are the same number.
    """
    logp = action_logps(policy[batch.contexts], batch.actions)
    policy_loss = clipped_policy_loss(logp, batch.old_logp, batch.advantages, settings.clip_epsilon).mean()
    prompts = batch.contexts[:, 0]
    kl_current_reference = categorical_kl(policy[prompts], task.reference[prompts]).mean()
    return policy_loss + settings.grpo_kl_weight * kl_current_reference, {
        "clip_fraction": lambda: clip_fraction(logp, batch.old_logp, settings.clip_epsilon),
        "zero_group_fraction": lambda: groups_without_spread(batch.rewards).double().mean(),
    }


def offline_pairs(policy: Tensor, critic: None, task: Task, settings: BanditSettings, generator: torch.Generator) -> Pairs:
    """DPO's batch: the same training pairs in every iteration; nothing is sampled."""
    return task.training_pairs


def pair_logps(policy: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Log-probability of the chosen and of the rejected action of each pair. policy [C, A] -> [P], [P]."""
    logits = policy[pairs.contexts]
    return action_logps(logits, pairs.chosen), action_logps(logits, pairs.rejected)


def pairs_loss(policy: Tensor, critic: None, pairs: Pairs, task: Task, settings: BanditSettings) -> tuple[Tensor, dict]:
    """mean(DPO loss) over the pairs, against the task's reference. The update has no diagnostics of its own."""
    loss = dpo_loss(*pair_logps(policy, pairs), *pair_logps(task.reference, pairs), settings.dpo_beta).mean()
    return loss, {}


def evaluate_pairs(policy: Tensor, task: Task, settings: BanditSettings) -> dict[str, float]:
    """DPO loss of a policy on the labels that are trained on, and on the unflipped ones."""
    with torch.no_grad():
        return {
            "dpo_training_loss": pairs_loss(policy, None, task.training_pairs, task, settings)[0].item(),
            "dpo_original_loss": pairs_loss(policy, None, task.clean_pairs, task, settings)[0].item(),
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
    rows = rows_of(columns)[:samples]
    ratios = [importance_ratio(action_logps(p[batch.contexts], batch.actions), batch.old_logp) for p in policies[1:]]
    for row, after_each_update in zip(rows, torch.stack([ratio.flatten() for ratio in ratios], dim=1).tolist()):
        row["ratio_after_each_update"] = after_each_update
    return rows


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


class Method(NamedTuple):
    """What tells one training from another."""

    make_batch: Callable
    loss: Callable
    trace: Callable
    cost_column: str
    own_columns: tuple[str, ...]
    has_critic: bool = False


METHODS = {
    "ppo": Method(
        sample_ppo,
        ppo_loss,
        trace_rollout,
        "sampled_actions",
        ("value_loss", "clip_fraction", "stopped_early"),
        has_critic=True,
    ),
    "dpo": Method(offline_pairs, pairs_loss, trace_pairs, "pair_presentations", ("dpo_training_loss", "dpo_original_loss")),
    "grpo": Method(
        sample_grpo, grpo_loss, trace_rollout, "sampled_actions", ("clip_fraction", "zero_group_fraction", "stopped_early")
    ),
}


# ------------------------------------------------------------------------------------------ training


class Adam:
    """Adam with bias correction, the rule of torch.optim.Adam (tested equal), written out.

    m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p = p - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps).

    Written out for one reason: constructing any torch.optim class imports a second package tree, which takes about as
    long as importing torch and longer than all three trainings. Source: arXiv 1412.6980 algorithm 1.
    """

    def __init__(
        self, parameters: Sequence[Tensor], lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ):
        self.parameters, self.lr, self.betas, self.eps = list(parameters), lr, betas, eps
        self.means = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.squares = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.steps = 0

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        """Move every parameter once; `gradients` in the order of the parameters."""
        self.steps += 1
        beta1, beta2 = self.betas
        correction1, correction2 = 1 - beta1**self.steps, 1 - beta2**self.steps
        for parameter, gradient, mean, square in zip(self.parameters, gradients, self.means, self.squares):
            mean.lerp_(gradient, 1 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            denominator = (square.sqrt() / math.sqrt(correction2)).add_(self.eps)
            parameter.addcdiv_(mean, denominator, value=-self.lr / correction1)


def descend(loss: Tensor, optimizer: Adam, max_gradient_norm: float, where: str) -> float:
    """One update: backward, scale the gradient to a norm of at most `max_gradient_norm`, Adam step.

    Returns the norm over all parameters before scaling. Raises FloatingPointError, naming `where` and the quantity, when
    the loss or the norm is not finite; the parameters are then as before.
    """
    gradients = torch.autograd.grad(loss, optimizer.parameters)
    norm = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients])).item()
    for quantity, value in (("loss", loss.item()), ("gradient_norm", norm)):
        if not math.isfinite(value):
            raise FloatingPointError(f"{where}: {quantity} is {value}; rewards or --learning-rate are likely too large")
    if norm > max_gradient_norm:
        gradients = [gradient * (max_gradient_norm / norm) for gradient in gradients]
    optimizer.step(gradients)
    return norm


class BatchUpdates(NamedTuple):
    """What the updates on one batch did; `update` describes the last of them, at the parameters before it."""

    count: int
    update: dict[str, float]
    policies: list[Tensor]  # before the first update, then after each


def reuse_batch(
    loss: Callable[[], tuple[Tensor, dict[str, Callable[[], Tensor]]]],
    kl_old_current: Callable[[Tensor, Tensor], Tensor],
    policy: Tensor,
    optimizer: Adam,
    max_updates: int,
    settings: UpdateSettings,
    where: str,
) -> BatchUpdates:
    """Up to `max_updates` updates on one fixed batch, which `loss` holds; its old log-probabilities stay as they are.

    After an update, KL(old || current) above `kl_stop` prevents the next one; it cannot undo the step that crossed it.
    """
    policies = [policy.detach().clone()]
    for count in range(1, max_updates + 1):
        value, diagnostics = loss()
        norm = descend(value, optimizer, settings.max_gradient_norm, where)
        policies.append(policy.detach().clone())
        stopped_early = count < max_updates and kl_old_current(policies[0], policies[-1]).item() > settings.kl_stop
        if stopped_early:
            break
    update = {"loss": value.item(), "gradient_norm": norm, "stopped_early": int(stopped_early)}
    update.update((name, measure().item()) for name, measure in diagnostics.items())
    return BatchUpdates(count, update, policies)


class TrainingRun(NamedTuple):
    """What a training leaves behind: one row per iteration, the trace of its first batch, the final logits."""

    algorithm: str
    settings: BanditSettings
    task: Task
    history: list[dict[str, float]]
    first_batch_trace: list[dict]
    policy: Tensor


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
    if algorithm not in METHODS:
        raise ValueError(f"algorithm: got {algorithm!r}, wanted one of {', '.join(METHODS)}")
    settings = BanditSettings(**settings)
    method = METHODS[algorithm]
    _check_kind("floating", reward_table=reward_table)
    if reward_table.dim() != 2 or not len(reward_table):
        raise ValueError(f"reward_table: got shape {tuple(reward_table.shape)}, wanted [C, A], one row a context")
    _check_last_axis("reward_table", reward_table, 2, "the actions")
    _check_finite("reward_table", reward_table, "a failed reward computation")
    task = make_task(reward_table.double(), settings)
    is_dpo = algorithm == "dpo"
    if is_dpo and not len(task.clean_pairs.contexts):
        raise ValueError("reward_table: no context has two different rewards, so DPO has no pairs to learn from")

    policy = torch.zeros_like(task.rewards).requires_grad_()
    critic = torch.zeros(len(task.rewards), dtype=policy.dtype).requires_grad_() if method.has_critic else None
    optimizer = Adam([policy] if critic is None else [policy, critic], settings.learning_rate)
    generator = torch.Generator().manual_seed(settings.seed)
    counts = {"optimizer_steps": 0, "sampled_actions": 0, "pair_presentations": 0}
    history: list[dict[str, float]] = []

    def record(step: int, old: Tensor, update: dict[str, float]) -> None:
        row = {"step": step, **evaluate(policy, old, task), **update, **counts}
        if is_dpo:
            row.update(evaluate_pairs(policy, task, settings))
        history.append({name: row[name] for name in COMMON_COLUMNS + method.own_columns})
        if on_step:
            on_step(history[-1])

    record(0, policy.detach(), dict.fromkeys(("loss", "gradient_norm", *method.own_columns), 0))
    for step in range(1, settings.steps + 1):
        batch = method.make_batch(policy, critic, task, settings, generator)
        updates = reuse_batch(
            lambda: method.loss(policy, critic, batch, task, settings),
            lambda old, current: categorical_kl(old, current).mean(),
            policy,
            optimizer,
            1 if is_dpo else settings.max_updates,
            settings,
            f"{algorithm}, step {step}",
        )
        counts["optimizer_steps"] += updates.count
        counts[method.cost_column] += batch.contexts.numel()
        record(step, updates.policies[0], updates.update)
        if step == 1:
            first_batch_trace = method.trace(batch, task, updates.policies)
    return TrainingRun(algorithm, settings, task, history, first_batch_trace, policy.detach())


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
        "4.2", "its gradient", "d loss / d logp = -rho A, or 0 where the clip is flat", "the same four rows",
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


def print_worked_examples() -> None:
    """The report of `--algorithm atoms`."""
    examples = worked_examples()
    for example in examples:
        print(f"{example.section}  {example.title}\n{example.text('result', 'expected')}\n")
    agreeing = sum(example.agrees() for example in examples)
    print(f"{agreeing} of {len(examples)} agree. Section numbers are those of the guide; nothing was trained.")


# ------------------------------------------------------------------------------------------ files


class FileProblem(Exception):
    """A file or folder that cannot be read or written as asked: the command prints the message and exits with 1."""


def check_writable(paths: Sequence[Path], expected_bytes: int) -> None:
    """Find out before a long computation whether its files can be written. Creates missing folders.

    Raises FileProblem for a path that is no regular file, a folder that cannot be made or written, a full disk.
    """
    for path in paths:
        try:
            is_something_else = path.exists() and not path.is_file()
        except OSError as problem:  # a name that is too long, a folder that may not be entered
            raise FileProblem(f"{path}: cannot be written ({problem.strerror}); nothing was changed") from problem
        if is_something_else:
            raise FileProblem(f"{path}: exists and is not a regular file; choose another --output")
    for folder in dict.fromkeys(path.parent for path in paths):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(b"0" * expected_bytes)
        except OSError as problem:
            raise FileProblem(f"{folder}: cannot be written ({problem.strerror}); nothing was changed") from problem


def replace_files(texts: dict[Path, str | bytes]) -> None:
    """Write all files: each whole beside its target, then all renamed over theirs. Text becomes UTF-8, bytes stay.

    A failure or Ctrl-C while writing leaves every file as it was; between two renames, each is the old one or the new one.
    Raises FileProblem when the disk is full or the folder is not writable; no partial file remains.
    """
    partials = {path: path.with_name(f".{path.name}.{os.getpid()}.partial") for path in texts}
    try:
        for path, text in texts.items():
            with open(partials[path], "wb") as file:
                file.write(text.encode() if isinstance(text, str) else text)
                file.flush()
                os.fsync(file.fileno())
        for path in texts:
            os.replace(partials[path], path.resolve())
    except OSError as problem:
        raise FileProblem(f"{path}: {problem.strerror}; earlier results were left as they were") from problem
    finally:
        for partial in partials.values():
            with contextlib.suppress(OSError):  # renamed by now, or its name was too long to exist
                partial.unlink()


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

    def dumps(value: object) -> str:
        return json.dumps(value, allow_nan=False)

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


def read_reward_table(path: Path) -> Tensor:
    """A reward table from a JSON list of rows: one row a context, two or more finite numbers in each, equally many.

    -> [C, A] float64. Raises FileProblem.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise FileProblem(f"--reward-table {path}: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:
        raise FileProblem(f"--reward-table {path}: not JSON ({problem})") from problem
    wanted = "wanted a JSON list of rows such as [[1, 0.2], [0, 1]]"
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
                raise FileProblem(f"--reward-table {path}: row {number} holds {repr(reward)[:40]}; wanted finite numbers")
    return torch.tensor(rows, dtype=torch.float64)


def run_document(run: TrainingRun) -> dict:
    """What OUTPUT/ALGORITHM.json holds: enough to repeat the run and to follow its first batch."""
    document = {
        "algorithm": run.algorithm,
        "config": dataclasses.asdict(run.settings),
        "reward_table": run.task.rewards.tolist(),
        "software": software(),
        "initial_metrics": run.history[0],
        "final_metrics": run.history[-1],
    }
    if run.algorithm == "dpo":
        document["flipped_pair_indices"] = run.task.flipped_pair_indices
        document["clean_preference_pairs"] = run.task.clean_pairs.rows()
        document["training_preference_pairs"] = run.task.training_pairs.rows()
    return {**document, "first_batch_trace": run.first_batch_trace}


# ------------------------------------------------------------------------------------------ command line


class LabParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and whose flags cannot be abbreviated."""

    def __init__(self, **arguments: object):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **arguments)

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


def add_settings(parser: argparse.ArgumentParser, settings_class: type[Settings]) -> None:
    """One flag for each field of a settings class, in the groups the fields name."""

    def parse(field: dataclasses.Field) -> Callable[[str], float]:
        def checked(text: str) -> float:
            allowed = field.metadata["allowed"]
            try:
                value = allowed.kind(text)
            except ValueError:
                value = None
            if value is None or not allowed.holds(value):
                raise argparse.ArgumentTypeError(f"got {text!r}, wanted {allowed}")
            return value

        return checked

    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in dataclasses.fields(settings_class):
        meta = field.metadata
        if meta["group"] not in groups:
            groups[meta["group"]] = parser.add_argument_group(meta["group"])
        groups[meta["group"]].add_argument(
            meta["flag"] or "--" + field.name.replace("_", "-"),
            dest=field.name,
            type=parse(field),
            default=field.default,
            metavar="N" if meta["allowed"].kind is int else "X",
            help=f"{meta['meaning']}; default {field.default:g}",
        )


def chosen_settings(arguments: argparse.Namespace, settings_class: type[Settings]) -> dict[str, float]:
    """The settings among the parsed arguments, as keywords for the settings class."""
    return {field.name: getattr(arguments, field.name) for field in dataclasses.fields(settings_class)}


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


def progress_line(label: str, steps: int, metric: str) -> OnStep | None:
    """A callback that keeps one line on stderr up to date; None where stderr is not a terminal."""
    if not is_terminal(sys.stderr):
        return None

    def show(row: dict[str, float]) -> None:
        if row["step"] % max(1, steps // 100) == 0 or row["step"] == steps:
            text = f"\r{label}  step {row['step']:.0f}/{steps}  {metric.replace('_', ' ')} {row[metric]:.4f} "
            print(text, end="\n" if row["step"] == steps else "", file=sys.stderr, flush=True)

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


def run_command(main: Callable[[], None]) -> None:
    """Run a command; what a user can cause ends in one line on stderr: exit 1 for a problem, 130 for Ctrl-C."""
    # The lab's tensors are a few hundred numbers: waking a second thread for them costs more than it computes, and on a busy
    # machine thirty times more.
    torch.set_num_threads(1)
    try:
        main()
        if sys.stdout is not None:
            sys.stdout.flush()
    except (FileProblem, FloatingPointError) as problem:
        sys.exit(f"{Path(sys.argv[0]).name}: error: {problem}")
    except KeyboardInterrupt:
        below_the_progress_line = "\n" if is_terminal(sys.stderr) else ""
        print(f"{below_the_progress_line}interrupted: every file is whole, the earlier one or the new one", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output (head, less) went away; what it did not want is not an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as problem:  # a full disk behind `> file`; what is left in the buffer must not fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(f"{Path(sys.argv[0]).name}: error: cannot print ({problem.strerror})")


DESCRIPTION = """\
Train three small policies on a bandit of four contexts and three actions, on the CPU, in seconds.
Writes OUTPUT/{ppo,dpo,grpo}.csv (one row an iteration) and .json (settings, pairs, first batch), and
prints a summary. --algorithm atoms trains nothing: it prints the guide's worked numbers with their formulas."""

EXAMPLES = """\
examples:
  python -B rl_lab.py --algorithm atoms
  python -B rl_lab.py --algorithm all --output results
  python -B rl_lab.py --algorithm grpo --seed 19 --group-size 4 --output results-seed19-g4
  python -B rl_lab.py --algorithm dpo --preference-flips 6 --output results-dpo-flips6
  python -B rl_lab.py --algorithm all --seeds 0-19 --output results-seeds"""


def build_parser() -> LabParser:
    parser = LabParser(description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument(
        "--algorithm", choices=("atoms", *METHODS, "all"), default="all", help="what to run; default all (ppo, dpo, grpo)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("results"), metavar="DIR", help="folder to write; default results"
    )
    parser.add_argument(
        "--seeds", type=parse_seeds, metavar="A-B", help="run several seeds (0-19, or 0,7,19), each into OUTPUT/seed-N/"
    )
    parser.add_argument(
        "--reward-table", type=Path, metavar="FILE", help="JSON list of rows (contexts) of rewards (actions)"
    )
    add_settings(parser, BanditSettings)
    return parser


def summary(runs: Sequence[TrainingRun]) -> str:
    """Before and after, and what it cost; several seeds of a method become medians."""
    rows, notes = [], []
    for algorithm, of_method in itertools.groupby(runs, key=lambda run: run.algorithm):
        of_method = list(of_method)

        def median(name: str, row: int = -1) -> float:
            return statistics.median(run.history[row][name] for run in of_method)

        change = [
            f"{readable(median(name, 0))} -> {readable(median(name))}"
            for name in ("expected_reward", "optimal_action_probability", "kl_current_reference")
        ]
        cost = [f"{median(name):.0f}" for name in ("sampled_actions", "pair_presentations", "optimizer_steps")]
        rows.append([algorithm, *change, *cost])
        if algorithm == "dpo":
            losses = [f"{median(name, 0):.6f} -> {median(name):.6f}" for name in METHODS["dpo"].own_columns]
            notes.append(f"dpo: loss on its training labels {losses[0]}; on the original labels {losses[1]}")
        if algorithm == "grpo":
            shares = [statistics.fmean(row["zero_group_fraction"] for row in run.history[1:]) for run in of_method]
            notes.append(f"grpo: mean share of groups without reward difference {statistics.median(shares):.4f}")
    rewards = runs[0].task.rewards
    best, worst = rewards.amax(dim=1).mean().item(), rewards.amin(dim=1).mean().item()
    header = ["method", "expected reward", "P(best action)", "KL to reference", "samples", "pairs", "updates"]
    bounds = f"{readable(worst)} (always the worst action) and {readable(best)} (always the best)"
    notes.append(f"Expected reward lies between {bounds}.")
    if len(rows) > 1:
        notes.append("The methods use different data and numbers of updates: this checks each of them, it ranks none.")
    return "\n".join([format_table(header, rows), "", *notes])


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.algorithm == "atoms":
        print_worked_examples()
        return
    settings = chosen_settings(arguments, BanditSettings)
    if arguments.seeds and settings["seed"] != BanditSettings.seed:
        parser.error(f"argument --seeds: not allowed with --seed {settings['seed']}; give the seeds once")
    rewards = read_reward_table(arguments.reward_table) if arguments.reward_table else REWARDS
    try:
        task = make_task(rewards, BanditSettings(**settings))
    except ValueError as problem:
        parser.error(f"argument --preference-flips: {str(problem).removeprefix('preference_flips: ')}")
    algorithms = tuple(METHODS) if arguments.algorithm == "all" else (arguments.algorithm,)
    if "dpo" in algorithms and not len(task.clean_pairs.contexts):
        raise FileProblem(f"--reward-table {arguments.reward_table}: no context has two different rewards: no pairs for dpo")

    folders = {settings["seed"]: arguments.output}
    if arguments.seeds:
        folders = {seed: arguments.output / f"seed-{seed}" for seed in arguments.seeds}
    paths = {
        (algorithm, seed, kind): folder / f"{algorithm}.{kind}"
        for seed, folder in folders.items()
        for algorithm in algorithms
        for kind in ("csv", "json")
    }
    check_writable(list(paths.values()), expected_bytes=1000 * (settings["steps"] + 100))

    runs = []
    for seed in folders:
        texts = {}
        for algorithm in algorithms:
            label = f"{algorithm:4}" + (f"  seed {seed}" if arguments.seeds else "")
            on_step = progress_line(label, settings["steps"], "expected_reward")
            run = train(algorithm, reward_table=rewards, on_step=on_step, **{**settings, "seed": seed})
            texts[paths[algorithm, seed, "csv"]] = csv_text(run.history)
            texts[paths[algorithm, seed, "json"]] = json_text(run_document(run))
            runs.append(run)
        replace_files(texts)

    runs.sort(key=lambda run: algorithms.index(run.algorithm))
    if arguments.seeds:
        print(f"medians over {len(folders)} seeds, {settings['steps']} iterations\n")
    else:
        print(f"seed {settings['seed']}, {settings['steps']} iterations\n")
    print(summary(runs))
    written = arguments.output / "seed-N" if arguments.seeds else arguments.output
    print(f"Files: {', '.join(str(written / f'{algorithm}.csv') for algorithm in algorithms)} and .json beside each")


if __name__ == "__main__":
    run_command(main)
