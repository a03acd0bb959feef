"""Which objective gives the reported loss and gradient: every choice of the table, its usual constants, and named edits.

A loss of this family is sum_it w_i (-J_it) + coef * sum_it w_i k_it: J a surrogate with slope G = dJ/dl, k a KL estimate
with slope H, w_i one weight a row. So one hypothesis is a form of J, a form of k, and a row of weights; J, k and their
slopes are computed once, and weights are tried on row sums. With a recorded gradient g the two scalars of

    g = factor * (-w G) + factor * coef * w H

are solved by least squares over the tokens, and then explained: a factor of 1 is the row itself, 1/2 a division too many.
Without a gradient the value alone is compared, with coefficients from a list of those that trainers use. The best match is
computed again by objectives.evaluate itself, whose formulas are the ones this search borrows.

Mistakes are tried one at a time and only where no combination of plain choices fits (or a declared row does not).

A large batch is worked through in pieces of rows of like length, and gradients are compared on some of its rows first: every
number that decides (the value, the denominators) is that of the whole batch.
"""

from __future__ import annotations

import math
from typing import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

import rl_lab
from extensions.audit.read.recording import Recording
from extensions.audit.search.digest import Target
from extensions.audit.search.edits import mistaken_specs, without_far_rows
from extensions.audit.search.forms import (
    CLIP_PAIRS,
    Form,
    Spec,
    build_batch,
    clip_pairs,
    plain_choices,
    plain_spec,
    seen_thresholds,
)
from extensions.audit.read.masks import mask_edits
from extensions.audit.search.match import Extra, LossResult, _unique, against
from extensions.audit.search.screen import Screen
from extensions.audit.tolerance import GRADIENT
from extensions.objectives import Batch

ENTROPY_COEFS = (0.01, 0.001, 0.005, 0.02, 0.05, 0.1, 0.002, 0.003, 0.0005, 0.0001)
VALUE_COEFS = (0.5, 1.0, 0.1, 0.25)
VALUE_CLIPS = (0.2, 0.5, 0.1, 0.3, 0.4, 0.6, 1.0)


# ------------------------------------------------------------------------------------------ extras: entropy and critic


def value_forms(recording: Recording, mask: Tensor) -> Iterator[tuple[dict, Tensor, Tensor, str | None]]:
    """Squared errors of the critic: fields, value and slope per token, mistake."""
    arrays = recording.arrays
    V, G = (torch.where(mask, torch.as_tensor(arrays[name]), 0.0) for name in ("vpreds", "returns"))
    yield {"value_loss": "square"}, (V - G).square(), 2 * (V - G), None
    if "values" not in arrays:
        return
    V0 = torch.where(mask, torch.as_tensor(arrays["values"]), 0.0)
    for width in dict.fromkeys([w for w in (recording.number("value_clip"), *VALUE_CLIPS) if w]):
        clipped = V0 + (V - V0).clamp(-width, width)
        inside = (V - V0).abs() <= width
        larger = rl_lab.clipped_value_loss(V, V0, G, width)
        slope = torch.where(larger == (V - G).square(), 2 * (V - G), 0.0)
        yield {"value_loss": "clip_max", "value_clip": width}, larger, slope, None
        slope = torch.where(inside, 2 * (clipped - G), 0.0)
        yield {"value_loss": "clip_replace", "value_clip": width}, (clipped - G).square(), slope, None
        smaller = torch.minimum((V - G).square(), (clipped - G).square())
        slope = torch.where(smaller == (V - G).square(), 2 * (V - G), 0.0)
        yield {"value_loss": "clip_max", "value_clip": width}, smaller, slope, "value_min_for_max"


def extra_terms(recording: Recording, mask: Tensor) -> list[Extra]:
    """Entropy and critic terms that may stand beside the policy loss: ({}, 0) first, then coefficients in use.

    Recorded gradients with respect to entropies and vpreds fix the coefficients instead.
    """
    arrays = recording.arrays
    counted = float(mask.sum())
    entropy: list[Extra] = [({}, 0.0, None)]
    if "entropies" in arrays:
        mean = float(torch.where(mask, torch.as_tensor(arrays["entropies"]), 0.0).sum()) / counted
        coefs = list(ENTROPY_COEFS)
        if "dloss_dentropies" in arrays:
            coefs = [-float(torch.as_tensor(arrays["dloss_dentropies"])[mask].sum())]
            coefs = [float(f"{coefs[0]:.5g}")] if abs(coefs[0]) > 1e-12 else []
            entropy = entropy if not coefs else []
        entropy += [({"entropy_coef": c}, -c * mean, None if c > 0 else "entropy_sign") for c in coefs]
        if "dloss_dentropies" not in arrays:
            entropy += [({"entropy_coef": c}, c * mean, "entropy_sign") for c in ENTROPY_COEFS]
    critic: list[Extra] = [({}, 0.0, None)]
    if "vpreds" in arrays and "returns" in arrays:
        gradient = arrays.get("dloss_dvpreds")
        for fields, value, slope, mistake in value_forms(recording, mask):
            mean = float(torch.where(mask, value, 0.0).sum()) / counted
            coefs = VALUE_COEFS
            if gradient is not None:
                g, s = torch.as_tensor(gradient)[mask], slope[mask] / counted
                coef = float((g * s).sum() / (s * s).sum()) if bool((s != 0).any()) else 0.0
                if not coef or float((g - coef * s).norm()) > GRADIENT * float(g.norm()):
                    continue
                coefs = (float(f"{coef:.5g}"),)
            critic += [({**fields, "value_coef": c}, c * mean, mistake) for c in coefs]
        if gradient is not None and len(critic) > 1:
            critic = critic[1:]
    return [({**a[0], **b[0]}, a[1] + b[1], a[2] or b[2]) for a in entropy for b in critic if not (a[2] and b[2])]


# ------------------------------------------------------------------------------------------ the search


def make_target(recording: Recording) -> Target:
    gradient = recording.get("dloss_dlogps")
    mask = torch.as_tensor(recording.arrays["mask"])
    if gradient is not None:
        gradient = torch.as_tensor(gradient)
    return Target(recording.number("loss"), gradient, recording.eps, extra_terms(recording, mask))


NEED_THE_VALUE = ("clip_without_min", "missing_stop_gradient")
"""Mistakes whose gradient is that of another objective: a recorded value that they do not give rules them out."""


def search_loss(
    recording: Recording, advantages: np.ndarray | None, *, look_for_mistakes: bool = True, declared: dict | None = None
) -> LossResult:
    """All hypotheses for the reported loss and gradient of a rollout, with these advantages (None: A = 1, a likelihood)."""
    result = LossResult()
    target = make_target(recording)
    if target.loss is None and target.gradient is None:
        result.missing.append("loss, and dloss_dlogps with it: torch.autograd.grad(loss, logps)")
        return result
    if "logps" not in recording.arrays and "loss_mat" not in recording.arrays:
        result.missing.append("logps (rows x tokens)")
        return result
    _leave_out_what_is_not_finite(target, result)
    if target.loss is None and target.gradient is None:
        return result
    search = _Search(recording, advantages, target, result, declared)
    first = search.screen()
    if first is None:
        return result
    forms = first.digest(search.specs(first.batch))
    search.plain(first, forms)
    result.zero = _is_zero(search.target, first)
    if look_for_mistakes and search.is_unexplained():
        search.mistakes(first, forms)
    _keep_the_best(result, search.target)
    return result


def _leave_out_what_is_not_finite(target: Target, result: LossResult) -> None:
    if target.gradient is not None and not bool(torch.isfinite(target.gradient).all()):
        bad = (~torch.isfinite(target.gradient)).any(1).nonzero().flatten().tolist()
        result.remarks.append(f"dloss_dlogps is not finite in rows {bad[:10]}; the gradient is left out of the search")
        target.gradient = None
    if target.loss is not None and not math.isfinite(target.loss):
        result.remarks.append(f"the reported loss is {target.loss}")
        target.loss = None


class _Search:
    """The two passes over one recording: plain choices, then named edits of them."""

    def __init__(self, recording: Recording, advantages, target: Target, result: LossResult, declared: dict | None):
        self.recording, self.result, self.declared = recording, result, declared
        self.loss_mat = recording.get("loss_mat")
        self.advantages = np.ones(len(recording.arrays["mask"])) if advantages is None else advantages
        self.target = target
        if self.loss_mat is not None:
            gradient = recording.get("dloss_dloss_mat")
            self.target = Target(target.loss, None if gradient is None else torch.as_tensor(gradient), recording.eps)

    def screen(self, mask=None, mistake: str | None = None) -> Screen | None:
        """The batch under this mask, ready to be compared with; None where it cannot be one."""
        given = {} if self.loss_mat is None else {"logps": self.loss_mat}
        try:
            batch = build_batch(self.recording, mask, self.advantages, **given)
        except (ValueError, TypeError) as problem:
            if mistake is None:
                self.result.remarks.append(str(problem))
            return None
        return Screen(self.recording, batch, self.target, self.result, mistake, self.declared)

    def specs(self, batch: Batch) -> list[Spec]:
        if self.loss_mat is not None:
            return [Spec({"token_losses": True}, None, lambda b: Form(-b.logps, -b.mask.to(torch.float64)))]
        return [plain_spec(fields) for fields in plain_choices(self.recording, batch, self.target.gradient)]

    def plain(self, first: Screen, forms: Sequence) -> None:
        first.try_forms(forms)
        if first.rows is None and not self.result.matches:
            # A second look only where the first found nothing: more hypotheses mean more matches by accident.
            first.use_extras, first.solve_budget, first.phase = len(self.target.extras) > 1, first.batch.budget is None, 1
            if first.use_extras or first.solve_budget:
                first.try_forms(forms)

    def is_unexplained(self) -> bool:
        """Whether no plain choice, or none that was declared, gives the numbers without a solved one."""
        matches = self.result.matches
        sure = [match for match in matches if not match.weak and match.by != "gradient"]
        fits = [match for match in matches if self.declared is None or not against(match.fields, self.declared)]
        return not sure and not (fits and self.target.loss is None) or not fits

    def mistakes(self, first: Screen, forms: Sequence) -> None:
        pairs, by_value = clip_pairs(self.recording)[:2], first.rows is None

        def worth(candidates: Sequence) -> list:
            return [c for c in candidates if not by_value or likely(c.fields, self.declared, pairs)]

        first.use_extras, first.phase = len(self.target.extras) > 1, 2
        first.try_forms(worth(forms), with_factors=True)
        # Beside an edit, an entropy term is looked for only where one is declared: else it is one guess too many.
        first.use_extras, with_extras = False, bool((self.declared or {}).get("entropy_coef"))
        if self.loss_mat is None:
            self.edited_forms(first, forms, worth, with_extras)
        for name, mask in mask_edits(self.recording).items():
            edited = self.screen(mask, name)
            if edited is not None:
                edited.phase, edited.use_extras = 2, with_extras
                specs = [spec for spec in self.specs(edited.batch) if likely(spec.fields, self.declared, pairs)]
                edited.try_forms(edited.digest(specs))

    def edited_forms(self, first: Screen, forms: Sequence, worth: Callable, with_extras: bool) -> None:
        """Edits of the KL term, of the ratio and of the clip."""
        if first.batch.ref_logps is not None:
            clipped = [d for d in worth(forms) if d.fields.get("surrogate") in ("clip", "plain", "dual_clip")]
            first.try_forms(clipped, with_factors=True, kl="mistaken")
        edits = list(mistaken_specs(self.recording, first.traits, self.declared))
        known = (self.declared or {}).get("off_policy_threshold")
        thresholds = [known] if known else seen_thresholds(first.batch, self.target.gradient)
        edits += [without_far_rows(spec, threshold) for spec in edits for threshold in thresholds]
        first.use_extras = with_extras
        first.try_forms(first.digest(worth(edits)))


def _keep_the_best(result: LossResult, target: Target) -> None:
    """What has gradient and value puts aside what has the gradient alone; each hypothesis once, best first."""
    if any(match.by != "gradient" for match in result.matches):
        result.matches = [match for match in result.matches if match.by != "gradient"]
    elif any(match.by == "gradient and value" for match in result.mistakes):
        result.matches = []  # both have the gradient, and the mistake has the value as well
    if any(match.by != "gradient" for match in result.mistakes):
        result.mistakes = [match for match in result.mistakes if match.by != "gradient"]
    elif target.loss is not None:
        result.mistakes = [m for m in result.mistakes if not set(m.mistakes) & set(NEED_THE_VALUE)]
    result.mistakes = _unique(sorted(result.mistakes, key=lambda match: match.order))
    result.matches = _unique(sorted(result.matches, key=lambda match: match.order))


def likely(fields: dict, declared: dict | None, pairs: Sequence[tuple[float, float]]) -> bool:
    """Whether a form is worth an edit of its mask, or any edit when only a value was recorded.

    The declared one is, else the common ones.
    """
    if fields.get("token_losses"):
        return True
    if declared is not None:
        if "ratio" not in declared:
            return True
        return fields.get("ratio") == declared["ratio"] and (
            declared["ratio"] == "none" or fields.get("surrogate") == declared.get("surrogate")
        )
    common = (
        fields.get("ratio") == "none"
        or fields.get("surrogate") in ("clip", "dual_clip", "cispo", "sapo")
        or fields.get("surrogate") == "plain"
        and fields.get("ratio") == "token"
    )
    return (
        common
        and fields.get("off_policy_rows") != "drop"
        and (
            fields.get("surrogate") == "cispo"
            or (fields.get("clip_low"), fields.get("clip_high")) in (*pairs, CLIP_PAIRS[0], CLIP_PAIRS[6], (None, None))
        )
    )


def _is_zero(target: Target, screen: Screen) -> bool:
    if target.loss is None:
        return False
    typical = float(screen.batch.advantages.abs().mean()) if screen.batch.advantages is not None else 1.0
    return abs(target.loss) <= 1e-6 * max(typical, 1e-3)
