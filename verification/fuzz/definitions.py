"""Every atom by its definition, on wide numbers, and how far rounding may move what an atom gives.

Written from the docstrings, in numpy's longdouble (64 bits of fraction on x86), without stabilising tricks and without torch.
A definition takes the numbers as they are stored, and a `Form`: the numbers of the dtypes in which an atom computes and
answers. It returns `Answer(value, slack)` for each result, or raises Refused (the docstring promises a refusal) or Borderline
(rounding decides between an answer and a refusal).

`slack` is in units of the eps of the dtype that the atom computes in: the sum of what each rounded step can add. An error
bound, no guess: |got - value| <= STEPS * slack * eps + (one rounding to the dtype of the result). inf: nothing is compared.

A new atom is a function here and an entry of DEFINITIONS.
"""

from __future__ import annotations

from typing import Callable, NamedTuple

import numpy as np

WIDE = np.longdouble
STEPS = 8  # each formula is a handful of operations, each rounded to half an eps; exp, log and pow of torch to a few


class Refused(Exception):
    """The docstring promises a ValueError for these numbers."""


class Borderline(Exception):
    """Rounding decides whether these numbers are refused."""


class Form(NamedTuple):
    """The dtypes of a call: numbers of the one it computes in, and of the one it answers in."""

    eps: float
    largest: float  # of the one it computes in
    smallest: float  # smallest normal of the one it computes in
    eps_out: float
    largest_out: float
    smallest_out: float


class Answer(NamedTuple):
    value: np.ndarray
    slack: np.ndarray


def refuse_unless(condition: np.ndarray | bool) -> None:
    if not np.all(condition):
        raise Refused


def borderline_if(condition: np.ndarray | bool) -> None:
    if np.any(condition):
        raise Borderline


def log_softmax(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """log softmax along the last axis and its slack; a row that is no distribution is refused by the caller."""
    top = z.max(axis=-1, keepdims=True)
    shifted = np.where(np.isneginf(z), -np.inf, z - np.where(np.isfinite(top), top, 0))
    total = np.exp(shifted).sum(axis=-1, keepdims=True)
    logs = shifted - np.log(total)
    slack = 1 + np.abs(np.where(np.isfinite(shifted), shifted, 0)) + np.log(total) + z.shape[-1] / 8
    return logs, slack


def is_distribution(z: np.ndarray) -> np.ndarray:
    """Rows of numbers or -inf, at least one of them a number."""
    return (np.isfinite(z) | np.isneginf(z)).all(axis=-1) & np.isfinite(z).any(axis=-1)


def action_logps(form: Form, logits, actions) -> list[Answer]:
    refuse_unless(is_distribution(logits))
    if actions.size:
        refuse_unless((0 <= actions) & (actions < logits.shape[-1]))
    logs, slack = log_softmax(logits)
    take = lambda table: np.take_along_axis(table, actions[..., None].astype(np.int64), -1)[..., 0]  # noqa: E731
    return [Answer(take(logs), take(slack))]


def reinforce_loss(form: Form, logp, returns) -> list[Answer]:
    refuse_unless(np.isfinite(returns))
    loss = -(logp * returns)
    refuse_unless(~np.isnan(loss))
    return [Answer(loss, np.abs(loss))]


def residuals(form: Form, rewards, values, next_values, terminated, gamma) -> Answer:
    used = np.where(terminated, 0, next_values)
    refuse_unless(np.isfinite(rewards) & np.isfinite(values) & np.isfinite(used))
    return Answer(rewards + gamma * used - values, np.abs(rewards) + gamma * np.abs(used) + np.abs(values))


def td_residuals(form: Form, rewards, values, next_values, terminated, gamma=1.0) -> list[Answer]:
    answer = residuals(form, rewards, values, next_values, terminated, WIDE(gamma))
    borderline_if(answer.slack > form.largest_out / 4)  # a sum on the way may overflow
    return [answer]


def gae(form: Form, rewards, values, next_values, terminated, boundary, gamma=1.0, lam=0.95) -> list[Answer]:
    refuse_unless(~terminated | boundary)
    delta, scale = residuals(form, rewards, values, next_values, terminated, WIDE(gamma))
    advantages, slack = np.zeros_like(delta), np.zeros_like(delta)
    following, following_slack = 0, 0
    for t in reversed(range(delta.shape[-1])):
        carry = WIDE(gamma) * WIDE(lam) * np.where(boundary[..., t], 0, 1)
        following = advantages[..., t] = delta[..., t] + carry * following
        following_slack = slack[..., t] = scale[..., t] + carry * (following_slack + np.abs(following))
    borderline_if(slack + np.abs(values) > form.largest_out / 4)
    return [Answer(advantages, slack), Answer(advantages + values, slack + np.abs(values))]


def ratio_of(form: Form, logp, old_logp) -> tuple[np.ndarray, np.ndarray]:
    """exp(logp - old_logp) up to the cap, and its slack."""
    d = logp - old_logp
    cap = np.log(WIDE(form.largest_out)) - 1
    ratio = np.exp(np.minimum(d, cap))  # NaN stays NaN
    moved = np.minimum(np.abs(np.where(np.isfinite(d), d, 0)), 1 / form.eps)
    off = np.exp(np.minimum(d + moved * form.eps, cap)) - ratio
    return ratio, np.nan_to_num(off / form.eps, nan=0, posinf=0) + ratio * (1 + cap)


def importance_ratio(form: Form, logp, old_logp) -> list[Answer]:
    ratio, slack = ratio_of(form, logp, old_logp)
    return [Answer(ratio, slack + form.smallest / form.eps)]


def clipped_policy_loss(form: Form, logp, old_logp, advantages, epsilon=0.2) -> list[Answer]:
    ratio, slack = ratio_of(form, logp, old_logp)
    low, high = 1 - WIDE(epsilon), 1 + WIDE(epsilon)
    loss = -np.minimum(ratio * advantages, np.clip(ratio, low, high) * advantages)
    size = np.abs(advantages)
    total = (slack + ratio + 1 + WIDE(epsilon)) * size + form.smallest * size / form.eps
    return [Answer(loss, np.where(np.isinf(advantages), np.inf, total))]


def clip_fraction(form: Form, logp, old_logp, epsilon=0.2) -> list[Answer]:
    refuse_unless(logp.size > 0)
    ratio, slack = ratio_of(form, logp, old_logp)
    refuse_unless(~np.isnan(ratio))
    low, high = 1 - WIDE(epsilon), 1 + WIDE(epsilon)
    outside = (ratio < low) | (ratio > high)
    room = (slack + high) * STEPS * form.eps
    unsure = (np.abs(ratio - low) <= room) | (np.abs(ratio - high) <= room)
    return [Answer(np.asarray(outside.mean(dtype=WIDE)), np.asarray(1 + unsure.mean(dtype=WIDE) / form.eps))]


def clipped_value_loss(form: Form, values, old_values, returns, epsilon=0.2) -> list[Answer]:
    moved = np.clip(values - old_values, -WIDE(epsilon), WIDE(epsilon))
    plain, clipped = values - returns, old_values + moved - returns
    loss = np.maximum(plain**2, clipped**2)
    size = np.abs(values) + np.abs(old_values) + np.abs(returns) + np.abs(moved)
    slack = loss + 2 * np.abs(clipped) * size + form.eps * size**2
    # An infinite value next to an infinite old value or return: which of inf and NaN, IEEE decides on the way.
    finite = np.isfinite(values) & np.isfinite(old_values) & np.isfinite(returns)
    some_nan = np.isnan(values) | np.isnan(old_values) | np.isnan(returns)
    overflows = size > form.largest / 4
    return [Answer(np.where(some_nan, np.nan, loss), np.where((finite & ~overflows) | some_nan, slack, np.inf))]


def categorical_kl(form: Form, logits, reference_logits) -> list[Answer]:
    refuse_unless(is_distribution(logits) & is_distribution(reference_logits))
    logp, slack_p = log_softmax(logits)
    logq, slack_q = log_softmax(reference_logits)
    p = np.exp(logp)
    gap = np.where(np.isneginf(logp), 0, logp - np.where(np.isneginf(logp), 0, logq))
    product = np.where(p == 0, 0, p * gap)
    size = np.where(np.isfinite(gap), np.abs(gap), 0)
    slack = p * (size * (1 + slack_p) + slack_p + slack_q) + form.smallest / form.eps * (1 + size)
    kl = product.sum(axis=-1)
    vanishes = np.isposinf(gap) & (p < 4 * form.smallest)  # whether p is 0 there is a matter of the dtype
    # A gap that overflows the dtype: inf, or 0 * inf where p vanishes.
    far = (np.abs(gap) > form.largest / 4) | vanishes
    return [Answer(kl, np.where(far.any(axis=-1), np.inf, slack.sum(axis=-1)))]


def kl_estimates(form: Form, logp, ref_logp) -> list[Answer]:
    d = logp - ref_logp
    size = np.abs(d)
    terms = [(-d) ** k / np.prod(np.arange(1, k + 1, dtype=WIDE)) for k in range(2, 26)]
    k3 = np.where(size < 0.5, np.sum(np.nan_to_num(terms, posinf=0, neginf=0), axis=0), np.exp(-d) - 1 + d)
    k3 = np.where(np.isneginf(d), np.inf, np.where(np.isnan(d), np.nan, k3))
    tiny = form.smallest / form.eps
    k2 = d * d / 2
    return [Answer(d, size), Answer(k2, 2 * k2 + tiny), Answer(k3, k3 + np.abs(np.expm1(-d)) * size + size * (size > 0.5) + tiny)]


def preference_probability(form: Form, reward_chosen, reward_rejected) -> list[Answer]:
    refuse_unless(np.isfinite(reward_chosen) & np.isfinite(reward_rejected))
    d = reward_chosen - reward_rejected
    p = 1 / (1 + np.exp(-d))
    return [Answer(p, p * (1 + np.minimum(np.abs(d), 200)) + form.smallest / form.eps)]


def dpo_loss(form: Form, chosen, rejected, ref_chosen, ref_rejected, beta) -> list[Answer]:
    h = (chosen - ref_chosen) - (rejected - ref_rejected)
    size = sum(np.abs(np.where(np.isfinite(score), score, 0)) for score in (chosen, rejected, ref_chosen, ref_rejected))
    borderline_if(size > form.largest / 4)  # inf - inf on the way
    borderline_if(np.isinf(h) & (beta < form.smallest))  # the dtype may take beta for 0, and 0 * inf is NaN
    refuse_unless(~np.isnan(h))
    loss = lambda x: np.where(x > 0, 0, -x) + np.log1p(np.exp(-np.abs(x)))  # noqa: E731
    x = WIDE(beta) * h
    room = STEPS * form.eps * WIDE(beta) * size + form.smallest
    moved = np.where(np.isfinite(x), loss(x - room) - loss(x + room), 0)
    borderline_if(np.isfinite(x) & (np.abs(x) > form.largest / 4))
    return [Answer(loss(x), loss(x) + moved / form.eps + form.smallest / form.eps)]


def spread(form: Form, rewards) -> tuple[np.ndarray, np.ndarray]:
    """Whether a group has no spread, and whether rounding decides that."""
    refuse_unless(np.isfinite(rewards))
    width = rewards.max(axis=-1) - rewards.min(axis=-1)
    limit = 128 * form.eps * np.abs(rewards).max(axis=-1)
    return width <= limit, (np.abs(width - limit) <= limit / 16) & (width > 0)


def groups_without_spread(form: Form, rewards) -> list[Answer]:
    equal, unsure = spread(form, rewards)
    return [Answer(equal.astype(WIDE), np.where(unsure, np.inf, 0))]


def group_advantages(form: Form, rewards, eps=1e-8) -> list[Answer]:
    refuse_unless(rewards.shape[-1] >= 2)
    equal, unsure = spread(form, rewards)
    largest = np.abs(rewards).max(axis=-1, keepdims=True)
    centred = rewards - rewards.mean(axis=-1, keepdims=True)
    std = np.sqrt((centred**2).mean(axis=-1, keepdims=True))
    divisor = np.where(equal[..., None] | (std + WIDE(eps) == 0), 1, std + WIDE(eps))
    advantages = np.where(equal[..., None], 0, centred / divisor)
    computed = np.finfo(np.float64).eps / form.eps  # in float64, whatever the dtype
    slack = (np.abs(advantages) + largest / divisor * (1 + np.abs(advantages)) * rewards.shape[-1] / 8) * computed
    return [Answer(advantages, np.where(unsure[..., None], np.inf, slack))]


def zero_variance_probability(form: Form, probabilities, group_size) -> list[Answer]:
    refuse_unless((probabilities >= 0) & np.isfinite(probabilities))
    off = np.abs(probabilities.sum(axis=-1) - 1)
    allowed = 1e-5 + form.eps_out + form.smallest_out * form.eps_out * probabilities.shape[-1]
    borderline_if(np.abs(off - allowed) < allowed / 16 + form.eps * probabilities.shape[-1])
    refuse_unless(off <= allowed)
    powers = probabilities ** WIDE(group_size)
    with np.errstate(divide="ignore", invalid="ignore"):
        steep = np.where(powers > 0, np.abs(WIDE(group_size) * np.log(probabilities)), 0)
    return [Answer(powers.sum(axis=-1), (powers * (1 + steep)).sum(axis=-1) + form.smallest / form.eps)]


def response_token_logps(form: Form, logits, input_ids, response_mask) -> list[Answer]:
    refuse_unless(~response_mask[:, :1])
    refuse_unless(response_mask.any(axis=1))
    if input_ids.size:
        refuse_unless((0 <= input_ids) & (input_ids < logits.shape[-1]))
    valid = response_mask[:, 1:]
    before = logits[:, :-1]
    refuse_unless(is_distribution(before) | ~valid)
    logs, slack = log_softmax(np.where(valid[..., None], before, 0))
    take = lambda table: np.take_along_axis(table, input_ids[:, 1:, None].astype(np.int64), -1)[..., 0]  # noqa: E731
    return [Answer(np.where(valid, take(logs), 0), np.where(valid, take(slack), 0)), Answer(valid.astype(WIDE), 0 * valid)]


def response_logps(form: Form, logits, input_ids, response_mask) -> list[Answer]:
    tokens, _ = response_token_logps(form, logits, input_ids, response_mask)
    size = np.where(np.isfinite(tokens.value), np.abs(tokens.value), 0)
    return [Answer(tokens.value.sum(axis=-1), tokens.slack.sum(axis=-1) + size.sum(axis=-1))]


DEFINITIONS: dict[str, Callable[..., list[Answer]]] = {
    function.__name__: function
    for function in (
        action_logps, reinforce_loss, td_residuals, gae, importance_ratio, clipped_policy_loss, clip_fraction,
        clipped_value_loss, categorical_kl, kl_estimates, preference_probability, dpo_loss, groups_without_spread,
        group_advantages, zero_variance_probability, response_token_logps, response_logps,
    )
}  # fmt: skip
