"""Compared and labelled answers: a row of choices, the data, and its evaluation. The losses are in preference_losses.py."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from extensions.objectives.batch import boolean, floating, integer, make_batch, shaped
from extensions.objectives.preference_losses import LOSSES
from extensions.objectives.table import INF, Choice, Field, Number, plain_choices

_SFT_COEF = Number("sft_coef", 0.0, 0, INF, "+ sft_coef * the NLL of the chosen answers")

_FIELDS: dict[str, Field | Number] = {
    "loss": Field("sigmoid", LOSSES),
    "score": Field("sum", plain_choices(
        sum="score of an answer: sum over its tokens", mean="score of an answer: mean over its tokens"
    )),
    "reference": Field("used", plain_choices(
        used="u, v = score under the policy - score under the reference", unused="u, v = score under the policy"
    )),
    "divergence": Field("reverse_kl", {
        "reverse_kl": Choice("u stays", lambda u: (u, torch.ones_like(u))),
        "forward_kl": Choice("1 - exp(-u)", lambda u: (1 - torch.exp(-u), torch.exp(-u))),
        "js": Choice("log 2 + log sigmoid(u)", lambda u: (math.log(2) + F.logsigmoid(u), torch.sigmoid(-u))),
    }),
    "pair_weight": Field("none", {
        "none": Choice("every pair weighs the same"),
        "wpo": Choice("min(1, exp(mean_t l of chosen + mean_t l of rejected)), without gradient"),
        "given": Choice("a weight as the data hold it", needs=("pair_weights",)),
    }),
    "sft_reduction": Field("mean_over_tokens", plain_choices(
        mean_over_tokens="NLL: mean over all tokens of chosen answers",
        mean_per_response="NLL: mean over chosen answers of the mean over tokens",
        sum_per_response="NLL: mean over chosen answers of the sum over tokens",
    )),
    "beta": Number("beta", 0.1, 0, INF),
    "sft_coef": _SFT_COEF,
    "tail_weight": Number("tail_weight", 1.0, 0, INF, "weight of tokens beyond the shorter length of a pair"),
}  # fmt: skip
_NUMBERS: dict[str, Number] = {name: made for name, made in _FIELDS.items() if isinstance(made, Number)} | {
    number.name: number for loss in LOSSES.values() for number in loss.numbers
}
PREFERENCE_FIELDS: dict[str, Field] = {name: made for name, made in _FIELDS.items() if isinstance(made, Field)}
PREFERENCE_CHOICES: dict[str, dict[str, str]] = {
    name: {value: choice.formula for value, choice in field.choices.items()} for name, field in PREFERENCE_FIELDS.items()
}
PREFERENCE_LOSSES = LOSSES


def _row_fields() -> list[tuple]:
    made: list[tuple] = [("name", "str"), ("source", "str", ""), ("differs", "str", "")]
    made += [(name, "str", field.default) for name, field in PREFERENCE_FIELDS.items()]
    return made + [(name, "float", number.default) for name, number in _NUMBERS.items()]


# A dataclass calls __post_init__ only if it had one when it was made; PreferenceRow's takes the place of this one.
_RowFields = dataclasses.make_dataclass(
    "_RowFields", _row_fields(), frozen=True, namespace={"__post_init__": lambda row: None}
)


class PreferenceRow(_RowFields):
    """One preference loss, a mean over pairs: u is the score of the chosen answer, v of the rejected one, D = u - v.

    name, source, differs, then the fields of PREFERENCE_CHOICES, beta, sft_coef, tail_weight and the numbers of the losses.
    Raises ValueError for a name outside PREFERENCE_CHOICES, a number out of range, or choices that exclude each other.
    """

    def __post_init__(self) -> None:
        for field, allowed in PREFERENCE_CHOICES.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{self.name}, {field}: got {getattr(self, field)!r}, wanted one of {', '.join(allowed)}")
        for field, number in _NUMBERS.items():
            value, low = getattr(self, field), number.low
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not low <= value < INF or math.isinf(value) or (field == "beta" and not value):
                wanted = "above 0" if field == "beta" else f"of at least {low:g}"
                raise ValueError(f"{self.name}, {field}: got {value!r}, wanted a finite number {wanted}")
        most = 0.5 if self.loss == "robust" else 1.0
        if not 0 <= self.label_smoothing < most:
            raise ValueError(
                f"{self.name}, label_smoothing: got {self.label_smoothing!r}, wanted at least 0 and below {most}"
            )
        if self.loss == "exo" and self.label_smoothing == 0:
            raise ValueError(f"{self.name}, label_smoothing: got 0, wanted above 0: exo takes its logarithm")
        loss, maps = LOSSES[self.loss], self.divergence != "reverse_kl"
        needs_pairs = maps or self.sft_coef or self.tail_weight != 1 or self.pair_weight != "none"
        for excluded, reason in (
            (loss.sorts_gaps and maps, f"{self.loss} sorts gaps, not scores: divergence reverse_kl"),
            (loss.sorts and self.pair_weight != "none", f"{self.loss} compares ranks, not pairs: pair_weight none"),
            (self.of_labels and needs_pairs, f"{self.loss} has no pairs: no divergence, sft_coef, pair_weight, tail_weight"),
            (
                loss.takes_odds and (maps or self.reference == "used"),
                f"{self.loss} takes odds, which need reference unused",
            ),
        ):
            if excluded:
                raise ValueError(f"{self.name}: {reason}")

    @property
    def of_labels(self) -> bool:
        """Whether it reads labelled answers instead of pairs."""
        return LOSSES[self.loss].of_labels

    @property
    def numbers(self) -> tuple[str, ...]:
        """The numbers that have an effect in this row."""
        own = tuple(number.name for number in LOSSES[self.loss].numbers)
        more = [name for name in ("sft_coef", "tail_weight") if getattr(self, name) != _NUMBERS[name].default]
        return ("beta", *own, *more)

    @property
    def needs(self) -> tuple[str, ...]:
        """What the data must hold: paired or labelled answers, a reference, mismatched answers, lengths, weights."""
        loss = LOSSES[self.loss]
        wanted = ["labels"] if loss.of_labels else ["pairs"]
        wanted += ["ref_logps"] if self.reference == "used" else []
        wanted += ["answer_lengths"] if loss.reads_lengths else []
        wanted += ["pair_weights"] if self.pair_weight == "given" else []
        return (*wanted, *(name for name in loss.needs if name not in wanted))


@dataclass(frozen=True, eq=False)
class Preferences:
    """Token log-probabilities of answers that were compared or labelled. Build it with make_preferences."""

    logps: Tensor  # (2P, T): P chosen answers, then their P rejected ones; KTO (N, T)
    mask: Tensor  # the same shape, bool
    are_pairs: bool  # False: labelled answers that belong to no pair
    ref_logps: Tensor | None = None
    labels: Tensor | None = None  # (N,) bool: desirable; KTO
    answer_lengths: Tensor | None = None  # (2P,) counted tokens; without token arrays only if it was given
    pair_weights: Tensor | None = None  # (P,) a weight of each pair as the trainer holds it
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
    answer_lengths=None,
    pair_weights=None,
    chosen_logps=None,
    rejected_logps=None,
    ref_chosen_logps=None,
    ref_rejected_logps=None,
    dtype: torch.dtype | None = None,
) -> Preferences:
    """Check preference data: token arrays (2P, T), chosen first; or one number per answer, chosen_logps (P,) and so on.

    With whole-answer numbers every answer counts as one token, so per-token means need the token arrays, and what reads
    lengths needs answer_lengths (2P,).
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
            per_row[name] = shaped(name, floating(name, value, made.logps.dtype), (rows,), "one number per row")
            if not per_row[name].isfinite().all():
                raise ValueError(f"{name}: row {int((~per_row[name].isfinite()).nonzero()[0])} is not finite")
    if pair_weights is not None:
        weights = floating("pair_weights", pair_weights, made.logps.dtype)
        per_row["pair_weights"] = shaped("pair_weights", weights, (rows // 2,), "one number per pair")
    if answer_lengths is not None:
        lengths = integer("answer_lengths", answer_lengths)
        per_row["answer_lengths"] = shaped("answer_lengths", lengths, (rows,), "one whole number per row")
    elif made.logps.shape[1] > 1:
        per_row["answer_lengths"] = made.lengths
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

    loss = mean over pairs of weight * f(u, v) + sft_coef * NLL of the chosen answers;
    d loss / d l_t = (1/P) df/du * h'(u) * (weight of the token in the score), h the divergence's map.
    loss_to_backpropagate takes the result too. Raises ValueError if the data lack what the row needs.
    """
    for name in row.needs:
        present = data.are_pairs if name == "pairs" else getattr(data, name) is not None
        if not present:
            raise ValueError(f"{row.name}: the data have no {name}; this row needs {', '.join(row.needs)}")
    token_weight = _token_weights(row, data)
    score = (data.logps * token_weight).sum(dim=1)
    reference = (data.ref_logps * token_weight).sum(dim=1) if row.reference == "used" else torch.zeros_like(score)

    entry = LOSSES[row.loss]
    if entry.of_labels:
        losses, slope, margins = entry(row, score - reference, data)
        slope = slope / len(losses)
    else:
        mapped, mapped_slope = PREFERENCE_FIELDS["divergence"].choices[row.divergence](score - reference)
        if entry.sorts_gaps:
            losses, slope_u, slope_v, margins = entry(row, score.chunk(2), reference.chunk(2))
        else:
            more = (data.answer_lengths,) if entry.reads_lengths else ()
            losses, slope_u, slope_v, margins = entry(row, *mapped.chunk(2), *more)
        weight = _pair_weights(row, data, len(losses))
        losses, slope = losses * weight, torch.cat([slope_u * weight, slope_v * weight]) * mapped_slope / len(losses)
    loss, gradient = losses.mean(), slope.unsqueeze(1) * token_weight
    if row.sft_coef:
        weights = _sft_weights(row, data.mask, data.logps.dtype)
        loss = loss - (weights * data.logps).sum()
        gradient = gradient - weights
    return PreferenceEvaluation(loss, losses, margins, gradient, slope)


def _token_weights(row: PreferenceRow, data: Preferences) -> Tensor:
    """What a token weighs in the score of its answer, the shape of logps."""
    lengths = data.mask.sum(dim=1, keepdim=True)
    weights = data.mask.to(data.logps.dtype)
    if row.tail_weight != 1:
        shorter = torch.minimum(*lengths.chunk(2)).repeat(2, 1)
        weights = torch.where(data.mask.cumsum(dim=1) > shorter, row.tail_weight * weights, weights)
    return weights / lengths if row.score == "mean" else weights


def _pair_weights(row: PreferenceRow, data: Preferences, pairs: int) -> Tensor:
    """(P,), without gradient."""
    if row.pair_weight == "given":
        return data.pair_weights
    if row.pair_weight == "none":
        return torch.ones(pairs, dtype=data.logps.dtype)
    mean = data.logps.sum(dim=1) / data.mask.sum(dim=1)
    return sum(mean.chunk(2)).exp().clamp(max=1)


def _sft_weights(row: PreferenceRow, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """sft_coef times what the NLL gives to each token of a chosen answer, 0 for the rejected ones."""
    chosen = mask.clone()
    chosen[len(chosen) // 2 :] = False
    count = {
        "mean_over_tokens": chosen.sum(),
        "mean_per_response": len(mask) // 2 * chosen.sum(dim=1, keepdim=True).clamp(min=1),
        "sum_per_response": len(mask) // 2,
    }[row.sft_reduction]
    return row.sft_coef * chosen.to(dtype) / count
