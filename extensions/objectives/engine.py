"""The engine: evaluate(row, batch) puts the steps together and returns the loss with its gradient in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from extensions.objectives.advantages import advantages_and_targets, kept_rows, sampling_logps
from extensions.objectives.batch import Batch, required
from extensions.objectives.choices import Row
from extensions.objectives.critic import value_loss_and_slope
from extensions.objectives.pairs import PreferenceEvaluation
from extensions.objectives.reduction import accumulation_divisor, row_weights
from extensions.objectives.surrogates import SURROGATES, Ratio, Surrogate, compute_ratio, exact_kl, kl_estimate

@dataclass(frozen=True, eq=False)
class Evaluation:
    """What evaluate returns. (N, T) unless stated, 0 in unused slots; nothing carries a graph.

    The losses and gradients are there at once; what explains them is computed when it is first read.

    Three fractions of the counted tokens, which are three different things: a ratio may be outside the band while the
    unclipped branch is chosen (r = 1.5, A = -1), the clipped branch may be chosen while the gradient stays (CISPO), and a
    gradient may be 0 without any clip (A = 0).
    """

    loss: Tensor  # () = policy_loss + kl_loss + value_loss + entropy_loss
    policy_loss: Tensor  # () sum(weights * token_losses)
    kl_loss: Tensor  # () coefficient and reduction included; 0 without the term, as the next two
    value_loss: Tensor  # ()
    entropy_loss: Tensor  # ()
    dloss_dlogps: Tensor  # gradient of `loss`, in closed form
    dloss_dvpreds: Tensor | None
    dloss_dentropies: Tensor | None
    dloss_dlogits: Tensor | None  # (N, T, V): the part of an exact KL, beside dloss_dlogps
    kl: Tensor | None  # KL_t before weight and coefficient; None without a KL term in the loss
    kept: Tensor  # (N,) bool: rows that the group filter left in the batch
    _row: Row
    _batch: Batch
    _advantages: Tensor  # this and the next three (N, T), or (N, 1) for one number an answer
    _ratio: Ratio
    _surrogate: Surrogate
    _policy_gradient: Tensor
    _row_weights: Tensor  # (N, 1)

    @cached_property
    def _mask(self) -> Tensor:
        return self._batch.mask & self.kept.unsqueeze(1)

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
        if row.surrogate not in ("clip", "dual_clip", "capped_clip", "cispo"):
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


@torch.no_grad()
def evaluate(row: Row, batch: Batch) -> Evaluation:
    """One objective on one batch: loss, closed-form gradient, and what happened on the way.

    loss = -sum_t w_t J_t + kl_coef * sum_t u_t k_t (+ critic, - entropy), w and u the weights of the reductions,
    d loss / d l_t = -(d log r / d l_t) * w_t dJ_t / d log r - w_t dJ_t / dl + kl_coef * u_t dk_t / dl_t,
    a ratio of the whole answer passing the sum over its tokens to each of them.

    Gradient: none; `dloss_dlogps` is the gradient, see loss_to_backpropagate. Advantages, old and reference
    log-probabilities are constants. Raises ValueError as compute_advantages, or if the batch lacks an array the row reads.
    """
    kept = kept_rows(row, batch)
    mask = batch.mask if row.group_filter == "none" else batch.mask & kept.unsqueeze(1)
    l, l0 = batch.logps, sampling_logps(batch)
    used = mask.to(l.dtype)
    lengths = used.sum(dim=1, keepdim=True)
    advantages, targets = advantages_and_targets(row, batch, mask)

    ratio = compute_ratio(row, l, l0, lengths, advantages)
    J = SURROGATES[row.surrogate](row, ratio.value, advantages, l, l0)
    if row.off_policy_rows == "drop":
        lag = (l0 - l).sum(dim=1, keepdim=True) / lengths.clamp(min=1)
        dropped = (advantages < 0) & (lag > row.off_policy_threshold)
        J = Surrogate(*(part if part is None or part is J.effective else torch.where(dropped, 0.0, part) for part in J))

    of_row = row_weights(row, batch, row.reduction, lengths, kept)
    weighing = Weighing(used, lengths, -of_row)
    policy_loss = weighing.total(J.value)
    gradient = weighing.of_tokens(J.slope_logp) if J.slope_log_ratio is None else weighing.through(ratio, J.slope_log_ratio)
    policy_gradient = gradient

    kl = dloss_dlogits = None
    kl_loss = value_loss = entropy_loss = torch.zeros((), dtype=l.dtype)
    if row.kl_in_loss:
        slope_of_logits = None
        if row.kl == "exact":
            required(row, batch, "logits"), required(row, batch, "ref_logits")
            kl, slope_of_logits = exact_kl(batch, mask)
            slope = torch.zeros_like(kl)
        else:
            kl, slope = kl_estimate(row, l, l0 if row.kl_anchor == "old" else required(row, batch, "ref_logps"))
        reduction = row.reduction if row.kl_reduction == "same" else row.kl_reduction
        weighing_kl = Weighing(used, lengths, row.kl_coef * row_weights(row, batch, reduction, lengths, kept))
        r = ratio.value if row.kl_weight == "ratio" else 1.0
        kl_loss = weighing_kl.total(r * kl)
        gradient = gradient + weighing_kl.of_tokens(r * slope)
        if row.kl_weight == "ratio":  # d (r k) = r dk + k r d log r
            gradient = gradient + weighing_kl.through(ratio, r * kl)
        if slope_of_logits is not None:
            dloss_dlogits = weighing_kl.of_tokens(r * torch.ones_like(kl)).unsqueeze(2) * slope_of_logits
        kl = kl * used

    dloss_dvpreds = dloss_dentropies = None
    if row.value_loss != "none" and row.value_coef:
        targets = batch.returns if batch.returns is not None else targets
        if targets is None:
            raise ValueError(f"{row.name}: the critic has no target: the batch has neither returns nor values")
        old_values = None if row.value_loss == "square" else required(row, batch, "values")
        errors, slope = value_loss_and_slope(row, required(row, batch, "vpreds"), old_values, targets)
        weighing_values = Weighing(used, lengths, row.value_coef * of_row)
        value_loss, dloss_dvpreds = weighing_values.total(errors), weighing_values.of_tokens(slope)
    if row.entropy_coef:
        share = torch.full_like(lengths, -row.entropy_coef / (float(lengths.sum()) * accumulation_divisor(row, batch)))
        weighing_entropies = Weighing(used, lengths, share)
        entropy_loss = weighing_entropies.total(required(row, batch, "entropies"))
        dloss_dentropies = weighing_entropies.weights

    return Evaluation(
        loss=policy_loss + kl_loss + value_loss + entropy_loss,
        policy_loss=policy_loss,
        kl_loss=kl_loss,
        value_loss=value_loss,
        entropy_loss=entropy_loss,
        dloss_dlogps=gradient,
        dloss_dvpreds=dloss_dvpreds,
        dloss_dentropies=dloss_dentropies,
        dloss_dlogits=dloss_dlogits,
        kl=kl,
        kept=kept,
        _row=row,
        _batch=batch,
        _advantages=advantages,
        _ratio=ratio,
        _surrogate=J,
        _policy_gradient=policy_gradient,
        _row_weights=of_row,
    )


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
