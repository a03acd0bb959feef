"""The engine: evaluate(row, batch) puts the steps together and returns the loss with its gradient in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from extensions.objectives.advantages import advantages_and_targets, counted_mask, kept_rows
from extensions.objectives.batch import Batch, required, sampling_logps
from extensions.objectives.choices import Row
from extensions.objectives.critic import VALUE_LOSSES, value_loss_and_slope
from extensions.objectives.kl import exact_kl, kl_estimate
from extensions.objectives.pairs import PreferenceEvaluation
from extensions.objectives.reduction import row_weights
from extensions.objectives.sampler import Correction, sampler_correction
from extensions.objectives.selection import selected
from extensions.objectives.surrogates import SURROGATES, Ratio, Surrogate, compute_ratio


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What evaluate returns. (N, T) unless stated, 0 in unused slots; nothing carries a graph.

    The losses and gradients are there at once; what explains them is computed when it is first read.

    Three fractions of the counted tokens, which are three different things: a ratio may be outside the band while the
    unclipped branch is chosen (r = 1.5, A = -1), the clipped branch may be chosen while the gradient stays (CISPO), and a
    gradient may be 0 without any clip (A = 0).
    """

    loss: Tensor  # () = policy_loss + kl_loss + value_loss + entropy_loss + nll_loss
    policy_loss: Tensor  # () sum(weights * token_losses)
    kl_loss: Tensor  # () coefficient and reduction included; 0 without the term, as the next two
    value_loss: Tensor  # ()
    entropy_loss: Tensor  # ()
    nll_loss: Tensor  # ()
    dloss_dlogps: Tensor  # gradient of `loss`, in closed form
    dloss_dvpreds: Tensor | None
    dloss_dentropies: Tensor | None
    dloss_dlogits: Tensor | None  # (N, T, V): the part of an exact KL, beside dloss_dlogps
    kl: Tensor | None  # KL_t before weight and coefficient; None without a KL term in the loss
    kept: Tensor  # (N,) bool: rows that the group filter left in the batch
    _row: Row
    _batch: Batch
    _advantages: Tensor  # this and the next three (N, T), or (N, 1) for one number per answer
    _ratio: Ratio
    _surrogate: Surrogate
    _policy_gradient: Tensor
    _row_weights: Tensor  # (N, 1)
    _mask: Tensor  # (N, T) bool: tokens that filters and corrections have left

    def _fraction(self, chosen: Tensor) -> float:
        return int(torch.count_nonzero(chosen & self._mask)) / int(torch.count_nonzero(self._mask))

    @cached_property
    def advantages(self) -> Tensor:
        return _used(self._advantages, self._batch.mask)

    @cached_property
    def ratios(self) -> Tensor:
        return _used(self._ratio.value, self._batch.mask)

    @cached_property
    def token_losses(self) -> Tensor:
        """-J."""
        return _used(-self._surrogate.value, self._mask)

    @cached_property
    def weights(self) -> Tensor:
        """What the reduction multiplies each token's loss by."""
        return self._mask * self._row_weights

    @cached_property
    def _branch(self) -> Tensor:
        clipped = torch.zeros((), dtype=torch.bool)
        if self._surrogate.effective is not None:
            clipped = self._surrogate.effective != self._ratio.value
        return (clipped | self._ratio.cut) & (self._advantages != 0) & self._mask

    @cached_property
    def flat(self) -> Tensor:
        """bool: tokens whose policy gradient the clip has removed."""
        return self._branch & (self._policy_gradient == 0)

    @cached_property
    def ratio_outside_fraction(self) -> float:
        """Ratio outside [1 - low, 1 + high], whatever A; 0 where the row has no band of ratios."""
        row, r = self._row, self._ratio.value
        if row.ratio == "sequence_mean_of_clipped":
            log_ratio = self._batch.logps - sampling_logps(self._batch)
            return self._fraction((log_ratio < -row.clip_low) | (log_ratio > row.clip_high))
        if not SURROGATES[row.surrogate].has_band:
            return 0.0
        return self._fraction((r < 1 - row.clip_low) | (r > 1 + row.clip_high))

    @cached_property
    def clipped_branch_fraction(self) -> float:
        """The clipped branch was chosen: J is not the unclipped one."""
        return self._fraction(self._branch)

    @cached_property
    def zero_gradient_fraction(self) -> float:
        """The policy term's gradient is exactly 0, for whatever reason."""
        return self._fraction(self._policy_gradient == 0)

    @cached_property
    def kl_mean(self) -> float | None:
        """Mean of `kl` over counted tokens."""
        return None if self.kl is None else self.kl.sum().item() / int(torch.count_nonzero(self._mask))


class _Setting(NamedTuple):
    """What the terms of the loss share: the row, its batch, and what is counted."""

    row: Row
    batch: Batch
    kept: Tensor  # (N,) bool
    mask: Tensor  # (N, T) bool
    used: Tensor  # (N, T) the mask as numbers
    lengths: Tensor  # (N, 1)
    l0: Tensor
    advantages: Tensor
    ratio: Ratio
    correction: Correction | None

    def weighing(self, reduction: str, factor: float) -> Weighing:
        of_row = row_weights(self.row, self.batch, reduction, self.lengths, self.kept)
        return Weighing(self.used, self.lengths, factor * of_row)

    def reduction(self, name: str) -> str:
        return self.row.reduction if name == "same" else name


class _Term(NamedTuple):
    """One term of the loss, and its gradient with respect to what it is a function of."""

    loss: Tensor
    gradient: Tensor | None = None


@torch.no_grad()
def evaluate(row: Row, batch: Batch) -> Evaluation:
    """One objective on one batch: loss, closed-form gradient, and what happened on the way.

    loss = -sum_t w_t J_t + kl_coef * sum_t u_t k_t (+ critic, - entropy, + NLL), w and u the weights of the reductions,
    d loss / d l_t = -(d log r / d l_t) * w_t dJ_t / d log r - w_t dJ_t / dl + kl_coef * u_t dk_t / dl_t,
    a ratio of the whole answer passing the sum over its tokens to each of them.

    Gradient: none; `dloss_dlogps` is the gradient, see loss_to_backpropagate. Advantages, old, sampler's and reference
    log-probabilities are constants. Raises ValueError as compute_advantages, or if the batch lacks an array the row reads.
    """
    kept = kept_rows(row, batch)
    mask = counted_mask(row, batch, kept)
    correction = sampler_correction(row, batch, mask)
    if correction is not None and row.sampler_dropped == "left_out":
        mask = mask & correction.kept
    advantages, targets = advantages_and_targets(row, batch, mask)
    used, l0 = mask.to(batch.logps.dtype), sampling_logps(batch)
    lengths = used.sum(dim=1, keepdim=True)
    ratio = compute_ratio(row, batch.logps, l0, lengths, advantages)
    setting = _Setting(row, batch, kept, mask, used, lengths, l0, advantages, ratio, correction)

    J, of_row, policy = _policy_term(setting)
    kl_term, kl, dloss_dlogits = _kl_term(setting)
    critic, entropy, nll = _critic_term(setting, targets), _entropy_term(setting), _nll_term(setting)
    gradient = policy.gradient
    for term in (kl_term, nll):
        gradient = gradient if term.gradient is None else gradient + term.gradient
    return Evaluation(
        loss=policy.loss + kl_term.loss + critic.loss + entropy.loss + nll.loss,
        policy_loss=policy.loss,
        kl_loss=kl_term.loss,
        value_loss=critic.loss,
        entropy_loss=entropy.loss,
        nll_loss=nll.loss,
        dloss_dlogps=gradient,
        dloss_dvpreds=critic.gradient,
        dloss_dentropies=entropy.gradient,
        dloss_dlogits=dloss_dlogits,
        kl=kl,
        kept=kept,
        _row=row,
        _batch=batch,
        _advantages=advantages,
        _ratio=ratio,
        _surrogate=J,
        _policy_gradient=policy.gradient,
        _row_weights=of_row,
        _mask=mask,
    )


def _nothing(s: _Setting) -> _Term:
    return _Term(torch.zeros((), dtype=s.batch.logps.dtype))


def _policy_term(s: _Setting) -> tuple[Surrogate, Tensor, _Term]:
    """-sum w J: J itself, the weight of a token of each row (N, 1), and the term."""
    row, l = s.row, s.batch.logps
    J = SURROGATES[row.surrogate](row, s.ratio.value, s.advantages, l, s.l0)
    if row.off_policy_rows == "drop":
        lag = (s.l0 - l).sum(dim=1, keepdim=True) / s.lengths.clamp(min=1)
        J = J.where(1.0 - ((s.advantages < 0) & (lag > row.off_policy_threshold)).to(l.dtype))
    chosen = selected(row, row.token_selection, s.batch, s.advantages, s.mask)
    J = J if chosen is None else J.where(chosen.to(l.dtype))
    J = J if s.correction is None else J.where(s.correction.weight)
    weighing = s.weighing(row.reduction, -1.0)
    if J.slope_log_ratio is None:
        gradient = weighing.of_tokens(J.slope_logp)
    else:
        gradient = weighing.through(s.ratio, J.slope_log_ratio)
    return J, -weighing.of_row, _Term(weighing.total(J.value), gradient)


def _kl_term(s: _Setting) -> tuple[_Term, Tensor | None, Tensor | None]:
    """+ coef * sum u k: the term, k_t (N, T) and the gradient at the logits of an exact KL."""
    row, batch = s.row, s.batch
    if not row.kl_in_loss:
        return _nothing(s), None, None
    slope_of_logits = dloss_dlogits = None
    if row.kl == "exact":
        required(row, batch, "logits"), required(row, batch, "ref_logits")
        kl, slope_of_logits = exact_kl(batch, s.mask)
        slope = torch.zeros_like(kl)
    else:
        anchor = s.l0 if row.kl_anchor == "old" else required(row, batch, "ref_logps")
        kl, slope = kl_estimate(row, batch.logps, anchor)
    weighing = s.weighing(s.reduction(row.kl_reduction), row.kl_coef)
    factor = _kl_factor(s)
    weight = factor
    if row.kl_weight == "ratio":
        weight = s.ratio.value if factor is None else s.ratio.value * factor
    weighted = kl if weight is None else weight * kl
    gradient = weighing.of_tokens(slope if weight is None else weight * slope)
    if row.kl_weight == "ratio":  # d (r k) = r dk + k r d log r
        gradient = gradient + weighing.through(s.ratio, weighted)
    if slope_of_logits is not None:
        per_token = torch.ones_like(kl) if weight is None else weight * torch.ones_like(kl)
        dloss_dlogits = weighing.of_tokens(per_token).unsqueeze(2) * slope_of_logits
    return _Term(weighing.total(weighted), gradient), kl * s.used, dloss_dlogits


def _kl_factor(s: _Setting) -> Tensor | None:
    """What a selection of tokens and a correction inside the KL make of a token's KL; None for nothing."""
    chosen = selected(s.row, s.row.kl_tokens, s.batch, s.advantages, s.mask)
    factor = None if chosen is None else chosen.to(s.used.dtype)
    if s.correction is None or s.row.sampler_place != "loss":
        return factor
    return s.correction.weight if factor is None else factor * s.correction.weight


def _critic_term(s: _Setting, targets: Tensor | None) -> _Term:
    row, batch = s.row, s.batch
    if row.value_loss == "none" or not row.value_coef:
        return _nothing(s)
    targets = batch.returns if batch.returns is not None else targets
    if targets is None:
        raise ValueError(f"{row.name}: the critic has no target: the batch has neither returns nor values")
    old_values = required(row, batch, "values") if "values" in VALUE_LOSSES[row.value_loss].needs else None
    errors, slope = value_loss_and_slope(row, required(row, batch, "vpreds"), old_values, targets)
    weighing = s.weighing(row.reduction, row.value_coef)
    return _Term(weighing.total(errors), weighing.of_tokens(slope))


def _entropy_term(s: _Setting) -> _Term:
    if not s.row.entropy_coef:
        return _nothing(s)
    weighing = s.weighing(s.reduction(s.row.entropy_reduction), -s.row.entropy_coef)
    return _Term(weighing.total(required(s.row, s.batch, "entropies")), weighing.weights)


def _nll_term(s: _Setting) -> _Term:
    """+ coef * mean over the counted tokens of good answers of -l; 0 without a good answer."""
    row = s.row
    if row.nll == "none" or not row.nll_coef:
        return _nothing(s)
    measure = s.advantages if row.nll == "positive_advantage" else required(row, s.batch, "rewards").unsqueeze(1)
    good = (measure > 0).expand_as(s.mask) & s.mask
    weights = row.nll_coef * good.to(s.used.dtype) / max(int(good.sum()), 1)
    return _Term(-(weights * s.batch.logps).sum(), -weights)


class Weighing:
    """The sum over counted tokens of weight * x, and its gradients. x is (N, T), or (N, 1) of whole answers."""

    def __init__(self, used: Tensor, lengths: Tensor, of_row: Tensor):
        self.used, self.of_row, self.whole = used, of_row, of_row * lengths

    @cached_property
    def weights(self) -> Tensor:
        return self.used * self.of_row

    def of_tokens(self, slope: Tensor) -> Tensor:
        """weight * slope at every token."""
        return self.used * (self.of_row * slope) if slope.shape[1] == 1 else self.weights * slope

    def total(self, x: Tensor) -> Tensor:
        """sum(weight * x); what an answer's tokens share meets the sum of their weights."""
        return (self.whole * x).sum() if x.shape[1] == 1 else (self.weights * x).sum()

    def through(self, ratio: Ratio, slope: Tensor) -> Tensor:
        """The gradient at every token's log-probability where dx / d log r = slope."""
        if not ratio.of_answer:
            return self.of_tokens(slope if isinstance(ratio.share, float) else slope * ratio.share)
        of_answer = self.whole * slope if slope.shape[1] == 1 else (self.weights * slope).sum(dim=1, keepdim=True)
        return self.used * (of_answer * ratio.share)


def _used(values: Tensor, mask: Tensor) -> Tensor:
    """(N, 1) or (N, T) -> (N, T) with 0 in unused slots."""
    return values.expand_as(mask).masked_fill(~mask, 0.0)


def loss_to_backpropagate(
    result: Evaluation | PreferenceEvaluation,
    logps: Tensor,
    *,
    vpreds: Tensor | None = None,
    entropies: Tensor | None = None,
    logits: Tensor | None = None,
) -> Tensor:
    """A scalar whose value is result.loss and whose gradient is the closed form: the row as a loss in a training loop.

    value + sum(dloss_dlogps * (logps - sg[logps])), and the same for vpreds, entropies and logits where the row has a
    critic, an entropy term or an exact KL. Each tensor is the one the batch was made from, with its graph; what it holds in
    unused slots is not read.

    Gradient: to the tensors given. Raises ValueError if one that the row differentiates is missing, or for a wrong shape.
    """
    total = result.loss
    for name, given in (("logps", logps), ("vpreds", vpreds), ("entropies", entropies), ("logits", logits)):
        slope = getattr(result, f"dloss_d{name}", None)
        if slope is None:
            continue
        if given is None:
            raise ValueError(f"loss_to_backpropagate: {name} is missing, and this row has a gradient for it")
        if given.shape != slope.shape and (*given.shape, 1) != slope.shape:  # (N,) for (N, 1): answers of one token
            raise ValueError(f"{name}: got shape {tuple(given.shape)}, wanted {tuple(slope.shape)}")
        live = torch.where(slope != 0, given.reshape(slope.shape), 0.0)
        total = total + (slope.to(live.dtype) * (live - live.detach())).sum()
    return total
