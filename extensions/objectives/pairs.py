"""Preference losses: DPO and its relatives, KTO. A new one is a line in PREFERENCE_CHOICES and in PREFERENCE_LOSSES."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import rl_lab
from extensions.objectives.batch import boolean, floating, make_batch, shaped
from extensions.objectives.surrogates import choose

INF = math.inf

# fmt: off
PREFERENCE_CHOICES: dict[str, dict[str, str]] = {
    "loss": {
        "sigmoid": "-log sigmoid(beta D)",
        "cdpo": "-(1 - e) log sigmoid(beta D) - e log sigmoid(-beta D)",
        "robust": "(-(1 - e) log sigmoid(beta D) + e log sigmoid(-beta D)) / (1 - 2 e)",
        "ipo": "(D - 1 / (2 beta))^2",
        "hinge": "max(0, 1 - beta D)",
        "exo": "KL(Bernoulli(sigmoid(beta D)) || Bernoulli(1 - e))",
        "sppo_hard": "(u - 1 / (2 beta))^2 + (v + 1 / (2 beta))^2",
        "bco": "-log sigmoid(beta u) - log sigmoid(-beta v)",
        "aot": "cdpo on D = sorted policy gaps - sorted reference gaps",
        "aot_unpaired": "cdpo on D = sorted u - sorted v",
        "simpo": "-log sigmoid(beta D - gamma)",
        "orpo": "-beta log sigmoid(odds(u) - odds(v)), odds(s) = s - log(1 - exp(s))",
        "kto": "weight (1 - sigmoid(+-beta (u - z0))), z0 = max(0, mean of mismatched u) without gradient",
    },
    "score": {
        "sum": "score of an answer: sum over its tokens",
        "mean": "score of an answer: mean over its tokens",
    },
    "reference": {
        "used": "u, v = score under the policy - score under the reference",
        "unused": "u, v = score under the policy",
    },
    "divergence": {
        "reverse_kl": "u stays",
        "forward_kl": "1 - exp(-u)",
        "js": "log 2 + log sigmoid(u)",
    },
}
# fmt: on


@dataclass(frozen=True)
class PreferenceRow:
    """One preference loss, a mean over pairs: u is the score of the chosen answer, v of the rejected one, D = u - v.

    Raises ValueError for a name outside PREFERENCE_CHOICES, a number out of range, or choices that exclude each other.
    """

    name: str
    source: str = ""
    differs: str = ""
    loss: str = "sigmoid"
    score: str = "sum"
    reference: str = "used"
    divergence: str = "reverse_kl"
    beta: float = 0.1
    label_smoothing: float = 0.0  # e
    gamma: float = 0.0  # SimPO's target margin
    sft_coef: float = 0.0  # + sft_coef * mean over the chosen tokens of -l
    tail_weight: float = 1.0  # weight of tokens beyond the shorter length of a pair
    desirable_weight: float = 1.0  # KTO
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        for field, allowed in PREFERENCE_CHOICES.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{self.name}, {field}: got {getattr(self, field)!r}, wanted one of {', '.join(allowed)}")
        for field, low in _PREFERENCE_LOWEST.items():
            value = getattr(self, field)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not low <= value < INF or (field == "beta" and not value):
                wanted = "above 0" if field == "beta" else f"of at least {low:g}"
                raise ValueError(f"{self.name}, {field}: got {value!r}, wanted a finite number {wanted}")
        most = 0.5 if self.loss == "robust" else 1.0
        if not 0 <= self.label_smoothing < most:
            raise ValueError(
                f"{self.name}, label_smoothing: got {self.label_smoothing!r}, wanted at least 0 and below {most}"
            )
        if self.loss == "exo" and self.label_smoothing == 0:
            raise ValueError(f"{self.name}, label_smoothing: got 0, wanted above 0: exo takes its logarithm")
        maps = self.divergence != "reverse_kl"
        for excluded, reason in (
            (self.loss == "aot" and maps, "aot sorts gaps, not scores: divergence reverse_kl"),
            (self.loss == "kto" and (maps or self.sft_coef or self.tail_weight != 1), "kto has no pairs: no divergence, "
             "sft_coef or tail_weight"),
            (self.loss == "orpo" and (maps or self.reference == "used"), "orpo takes odds, which need reference unused"),
        ):  # fmt: skip
            if excluded:
                raise ValueError(f"{self.name}: {reason}")

    @property
    def needs(self) -> tuple[str, ...]:
        """What the data must hold: paired or labelled answers, a reference, mismatched answers."""
        if self.loss == "kto":
            return ("labels", "ref_logps", "kl_seq_logps", "ref_kl_seq_logps")
        return ("pairs", "ref_logps") if self.reference == "used" else ("pairs",)


_PREFERENCE_LOWEST = {
    "beta": 0.0,
    "label_smoothing": 0.0,
    "gamma": -1e308,
    "sft_coef": 0.0,
    "tail_weight": 0.0,
    "desirable_weight": 0.0,
    "undesirable_weight": 0.0,
}


@dataclass(frozen=True, eq=False)
class Preferences:
    """Token log-probabilities of answers that were compared or labelled. Build it with make_preferences."""

    logps: Tensor  # (2P, T): P chosen answers, then their P rejected ones; KTO (N, T)
    mask: Tensor  # the same shape, bool
    are_pairs: bool  # False: labelled answers that belong to no pair
    ref_logps: Tensor | None = None
    labels: Tensor | None = None  # (N,) bool: desirable; KTO
    kl_seq_logps: Tensor | None = None  # (N,) policy's log-probability of mismatched answers; KTO
    ref_kl_seq_logps: Tensor | None = None  # (N,) the reference's


def make_preferences(
    *,
    logps=None,
    mask=None,
    ref_logps=None,
    labels=None,
    kl_seq_logps=None,
    ref_kl_seq_logps=None,
    chosen_logps=None,
    rejected_logps=None,
    ref_chosen_logps=None,
    ref_rejected_logps=None,
    dtype: torch.dtype | None = None,
) -> Preferences:
    """Check preference data: token arrays (2P, T), chosen first; or one number an answer, chosen_logps (P,) and so on.

    With whole-answer numbers every answer counts as one token, so per-token means need the token arrays.
    Raises TypeError and ValueError as make_batch, for a side without the other, and for an odd number of rows without
    labels.
    """
    pairs = _both_sides("chosen_logps", chosen_logps, "rejected_logps", rejected_logps)
    ref_pairs = _both_sides("ref_chosen_logps", ref_chosen_logps, "ref_rejected_logps", ref_rejected_logps)
    for name, whole, sides in (("logps", logps, pairs), ("ref_logps", ref_logps, ref_pairs)):
        if whole is not None and sides is not None:
            raise ValueError(f"{name}: given both as one array and as chosen and rejected; wanted one of the two")
    logps, ref_logps = (whole if sides is None else sides for whole, sides in ((logps, pairs), (ref_logps, ref_pairs)))
    if logps is None:
        raise ValueError("logps: missing; wanted logps with mask, or chosen_logps and rejected_logps")
    made = make_batch(logps=logps, mask=mask, ref_logps=ref_logps, dtype=dtype)
    rows = len(made.logps)
    if labels is None and rows % 2:
        raise ValueError(f"logps: got {rows} rows, wanted an even number: the chosen answers, then the rejected ones")
    per_row = {}
    for name, value in (("kl_seq_logps", kl_seq_logps), ("ref_kl_seq_logps", ref_kl_seq_logps)):
        if value is not None:
            per_row[name] = shaped(name, floating(name, value, made.logps.dtype), (rows,), "one number a row")
            if not per_row[name].isfinite().all():
                raise ValueError(f"{name}: row {int((~per_row[name].isfinite()).nonzero()[0])} is not finite")
    if labels is not None:
        per_row["labels"] = shaped("labels", boolean("labels", labels), (rows,), "True where the answer is desirable")
    return Preferences(made.logps, made.mask, labels is None, made.ref_logps, **per_row)


def _both_sides(chosen_name: str, chosen, rejected_name: str, rejected) -> Tensor | None:
    """Chosen and rejected answers below each other, or None where neither is given."""
    if chosen is None and rejected is None:
        return None
    for name, side, other in ((chosen_name, chosen, rejected_name), (rejected_name, rejected, chosen_name)):
        if side is None:
            raise ValueError(f"{name}: missing; wanted beside {other}")
    chosen, rejected = torch.as_tensor(chosen), torch.as_tensor(rejected)
    if chosen.shape != rejected.shape:
        got, wanted = tuple(rejected.shape), tuple(chosen.shape)
        raise ValueError(f"{rejected_name}: got shape {got}, wanted {wanted}, as {chosen_name} has")
    return torch.cat([chosen, rejected])


@dataclass(frozen=True, eq=False)
class PreferenceEvaluation:
    """What evaluate_preference returns; nothing carries a graph."""

    loss: Tensor  # ()
    losses: Tensor  # (P,) per pair, KTO (N,) per answer; without the SFT term
    margins: Tensor  # (P,) D; KTO (N,) u - z0
    dloss_dlogps: Tensor  # shape of logps, 0 in unused slots
    dloss_dscores: Tensor  # (2P,) or (N,): gradient with respect to each answer's score, without the SFT term


@torch.no_grad()
def evaluate_preference(row: PreferenceRow, data: Preferences) -> PreferenceEvaluation:
    """One preference loss and its closed-form gradient with respect to every token's log-probability.

    loss = mean over pairs of f(u, v) + sft_coef * token mean of -l over chosen answers;
    d loss / d l_t = (1/P) df/du * h'(u) * (weight of the token in the score), h the divergence's map.
    loss_to_backpropagate takes the result too. Raises ValueError if the data lack what the row needs.
    """
    for name in row.needs:
        present = data.are_pairs if name == "pairs" else getattr(data, name) is not None
        if not present:
            raise ValueError(f"{row.name}: the data have no {name}; this row needs {', '.join(row.needs)}")
    mask = data.mask
    lengths = mask.sum(dim=1, keepdim=True)
    token_weight = mask.to(data.logps.dtype)
    if row.tail_weight != 1:
        shorter = torch.minimum(*lengths.chunk(2)).repeat(2, 1)
        token_weight = torch.where(mask.cumsum(dim=1) > shorter, row.tail_weight * token_weight, token_weight)
    if row.score == "mean":
        token_weight = token_weight / lengths
    score = (data.logps * token_weight).sum(dim=1)
    if row.reference == "used":
        reference = (data.ref_logps * token_weight).sum(dim=1)
    else:
        reference = torch.zeros_like(score)

    if row.loss == "kto":
        losses, slope, margins = kto(row, score - reference, data)
        slope = slope / len(losses)
    else:
        mapped, mapped_slope = _divergence(row, score - reference)
        if row.loss == "aot":
            losses, slope_u, slope_v, margins = aot(row, score.chunk(2), reference.chunk(2))
        else:
            losses, slope_u, slope_v, margins = PREFERENCE_LOSSES[row.loss](row, *mapped.chunk(2))
        slope = torch.cat([slope_u, slope_v]) * mapped_slope / len(losses)
    loss = losses.mean()
    gradient = slope.unsqueeze(1) * token_weight
    if row.sft_coef:
        chosen = mask.clone()
        chosen[len(chosen) // 2 :] = False
        loss = loss - row.sft_coef * data.logps[chosen].mean()
        gradient = gradient - row.sft_coef * chosen.to(gradient.dtype) / chosen.sum()
    return PreferenceEvaluation(loss, losses, margins, gradient, slope)


def _divergence(row: PreferenceRow, u: Tensor) -> tuple[Tensor, Tensor]:
    """h(u) and h'(u): the score map of an f-divergence, h(log t) = f'(t) up to a constant."""
    if row.divergence == "forward_kl":
        return 1 - torch.exp(-u), torch.exp(-u)
    if row.divergence == "js":
        return math.log(2) + F.logsigmoid(u), torch.sigmoid(-u)
    return u, torch.ones_like(u)


# Each takes the row, u and v (P,), and returns the losses with their slopes in u and v, and the margin D.


def _of_margin(losses: Tensor, slope: Tensor, margin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return losses, slope, -slope, margin


def sigmoid_loss(row: PreferenceRow, u: Tensor, v: Tensor):
    """-log sigmoid(beta D), slope in D: -beta sigmoid(-beta D)."""
    nothing = torch.zeros_like(u)
    losses = rl_lab.dpo_loss(u, v, nothing, nothing, row.beta)
    return _of_margin(losses, -row.beta * torch.sigmoid(-row.beta * (u - v)), u - v)


def smoothed_loss(row: PreferenceRow, u: Tensor, v: Tensor):
    """-(1 - e) log sigmoid(beta D) - e log sigmoid(-beta D), slope in D: beta (sigmoid(beta D) - (1 - e))."""
    return _smoothed(row, u - v)


def _smoothed(row: PreferenceRow, margin: Tensor):
    e, z = row.label_smoothing, row.beta * margin
    losses = -(1 - e) * F.logsigmoid(z) - e * F.logsigmoid(-z)
    return _of_margin(losses, row.beta * (torch.sigmoid(z) - (1 - e)), margin)


def robust_loss(row: PreferenceRow, u: Tensor, v: Tensor):
    """(-(1 - e) log s(z) + e log s(-z)) / (1 - 2 e), z = beta D; slope -beta ((1 - e) s(-z) + e s(z)) / (1 - 2 e)."""
    e, z = row.label_smoothing, row.beta * (u - v)
    losses = (-(1 - e) * F.logsigmoid(z) + e * F.logsigmoid(-z)) / (1 - 2 * e)
    slope = -row.beta * ((1 - e) * torch.sigmoid(-z) + e * torch.sigmoid(z)) / (1 - 2 * e)
    return _of_margin(losses, slope, u - v)


def ipo_loss(row: PreferenceRow, u: Tensor, v: Tensor):
    """(D - 1 / (2 beta))^2: a regression of the margin to a finite target, not DPO with a penalty."""
    error = u - v - 1 / (2 * row.beta)
    return _of_margin(error.square(), 2 * error, u - v)


def hinge_loss(row: PreferenceRow, u: Tensor, v: Tensor):
    """max(0, 1 - beta D), slope -beta below the hinge and 0 above."""
    gap = 1 - row.beta * (u - v)
    return _of_margin(gap.clamp(min=0), choose(gap > 0, -row.beta, 0.0, u.dtype), u - v)


def exo_loss(row: PreferenceRow, u: Tensor, v: Tensor):
    """KL(q || 1 - e), q = sigmoid(beta D); slope beta q (1 - q) (log(q / (1 - e)) - log((1 - q) / e))."""
    e, z = row.label_smoothing, row.beta * (u - v)
    q = torch.sigmoid(z)
    win, lose = F.logsigmoid(z) - math.log1p(-e), F.logsigmoid(-z) - math.log(e)
    return _of_margin(q * win + (1 - q) * lose, row.beta * q * (1 - q) * (win - lose), u - v)


def sppo_hard_loss(row: PreferenceRow, u: Tensor, v: Tensor):
    """(u - 1 / (2 beta))^2 + (v + 1 / (2 beta))^2: both answers move to a fixed score."""
    win, lose = u - 0.5 / row.beta, v + 0.5 / row.beta
    return win.square() + lose.square(), 2 * win, 2 * lose, u - v


def bco_loss(row: PreferenceRow, u: Tensor, v: Tensor):
    """-log sigmoid(beta u) - log sigmoid(-beta v): two classifications instead of a comparison."""
    losses = -F.logsigmoid(row.beta * u) - F.logsigmoid(-row.beta * v)
    return losses, -row.beta * torch.sigmoid(-row.beta * u), row.beta * torch.sigmoid(row.beta * v), u - v


def simpo_loss(row: PreferenceRow, u: Tensor, v: Tensor):
    """-log sigmoid(beta D - gamma), slope in D: -beta sigmoid(gamma - beta D)."""
    z = row.beta * (u - v) - row.gamma
    return _of_margin(-F.logsigmoid(z), -row.beta * torch.sigmoid(-z), u - v)


def orpo_loss(row: PreferenceRow, u: Tensor, v: Tensor):
    """-beta log sigmoid(O), O = odds(u) - odds(v), odds(s) = s - log(1 - e^s), d odds / ds = 1 / (1 - e^s)."""
    odds = u - torch.log(-torch.expm1(u)) - (v - torch.log(-torch.expm1(v)))
    slope = -row.beta * torch.sigmoid(-odds)
    return -row.beta * F.logsigmoid(odds), slope / -torch.expm1(u), -slope / -torch.expm1(v), odds


def aot(row: PreferenceRow, policy: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]):
    """Smoothed DPO on D_(k) = k-th smallest policy gap - k-th smallest reference gap; slopes return to the pairs by rank."""
    gaps, order = torch.sort(policy[0] - policy[1])
    losses, slope, _, margin = _smoothed(row, gaps - torch.sort(reference[0] - reference[1]).values)
    per_pair = torch.zeros_like(slope).scatter(0, order, slope)
    return losses, per_pair, -per_pair, margin


def aot_unpaired_loss(row: PreferenceRow, u: Tensor, v: Tensor):
    """Smoothed DPO on D_(k) = k-th smallest u - k-th smallest v."""
    (sorted_u, order_u), (sorted_v, order_v) = torch.sort(u), torch.sort(v)
    losses, slope, _, margin = _smoothed(row, sorted_u - sorted_v)
    nothing = torch.zeros_like(slope)
    return losses, nothing.scatter(0, order_u, slope), -nothing.scatter(0, order_v, slope), margin


def kto(row: PreferenceRow, u: Tensor, data: Preferences) -> tuple[Tensor, Tensor, Tensor]:
    """weight (1 - sigmoid(s beta (u - z0))), s = +1 desirable and -1 not; slope -s weight beta p (1 - p).

    z0 = max(0, mean of the mismatched answers' u) estimates a KL and carries no gradient. (N,) each.
    """
    z0 = (data.kl_seq_logps - data.ref_kl_seq_logps).mean().clamp(min=0)
    sign = choose(data.labels, 1.0, -1.0, u.dtype)
    weight = choose(data.labels, row.desirable_weight, row.undesirable_weight, u.dtype)
    p = torch.sigmoid(sign * row.beta * (u - z0))
    return weight * (1 - p), -sign * weight * row.beta * p * (1 - p), u - z0


PREFERENCE_LOSSES = {
    "sigmoid": sigmoid_loss,
    "cdpo": smoothed_loss,
    "robust": robust_loss,
    "ipo": ipo_loss,
    "hinge": hinge_loss,
    "exo": exo_loss,
    "sppo_hard": sppo_hard_loss,
    "bco": bco_loss,
    "aot_unpaired": aot_unpaired_loss,
    "simpo": simpo_loss,
    "orpo": orpo_loss,
}
