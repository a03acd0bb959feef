"""Losses of compared or labelled answers: DPO and its relatives. A new one is one entry in LOSSES.

An entry's function takes the row and two scores per pair, u of the chosen answer and v of the rejected one (P,), each less
the reference's score where the row uses one. It returns the losses, their slopes in u and v, and the margin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import rl_lab
from extensions.objectives.surrogates import choose
from extensions.objectives.table import INF, Choice, Number

if TYPE_CHECKING:
    from extensions.objectives.pairs import PreferenceRow, Preferences


class Scored(NamedTuple):
    """A loss per pair, its slopes, and the margin D that it is a function of."""

    losses: Tensor
    slope_u: Tensor
    slope_v: Tensor
    margin: Tensor


@dataclass(frozen=True)
class PreferenceLoss(Choice):
    """One loss: function(row, u, v) -> Scored."""

    of_labels: bool = False  # labelled answers instead of pairs: function(row, u, data) -> losses, slope, margin
    sorts: bool = False  # compares ranks, so that a loss belongs to no pair of its own
    sorts_gaps: bool = False  # reads policy and reference apart: function(row, (u, v), (reference u, reference v))
    reads_lengths: bool = False  # function(row, u, v, lengths of the answers (2P,))
    takes_odds: bool = False  # scores are log-probabilities themselves: no reference, no divergence


def _of_margin(losses: Tensor, slope: Tensor, margin: Tensor) -> Scored:
    return Scored(losses, slope, -slope, margin)


def sigmoid_loss(row: PreferenceRow, u: Tensor, v: Tensor) -> Scored:
    """-log sigmoid(beta D), slope in D: -beta sigmoid(-beta D)."""
    nothing = torch.zeros_like(u)
    losses = rl_lab.dpo_loss(u, v, nothing, nothing, row.beta)
    return _of_margin(losses, -row.beta * torch.sigmoid(-row.beta * (u - v)), u - v)


def smoothed_loss(row: PreferenceRow, u: Tensor, v: Tensor) -> Scored:
    """-(1 - e) log sigmoid(beta D) - e log sigmoid(-beta D), slope in D: beta (sigmoid(beta D) - (1 - e))."""
    return _smoothed(row, u - v)


def _smoothed(row: PreferenceRow, margin: Tensor) -> Scored:
    e, z = row.label_smoothing, row.beta * margin
    losses = -(1 - e) * F.logsigmoid(z) - e * F.logsigmoid(-z)
    return _of_margin(losses, row.beta * (torch.sigmoid(z) - (1 - e)), margin)


def robust_loss(row: PreferenceRow, u: Tensor, v: Tensor) -> Scored:
    """(-(1 - e) log s(z) + e log s(-z)) / (1 - 2 e), z = beta D; slope -beta ((1 - e) s(-z) + e s(z)) / (1 - 2 e)."""
    e, z = row.label_smoothing, row.beta * (u - v)
    losses = (-(1 - e) * F.logsigmoid(z) + e * F.logsigmoid(-z)) / (1 - 2 * e)
    slope = -row.beta * ((1 - e) * torch.sigmoid(-z) + e * torch.sigmoid(z)) / (1 - 2 * e)
    return _of_margin(losses, slope, u - v)


def ipo_loss(row: PreferenceRow, u: Tensor, v: Tensor) -> Scored:
    """(D - 1 / (2 beta))^2: a regression of the margin to a finite target, not DPO with a penalty."""
    error = u - v - 1 / (2 * row.beta)
    return _of_margin(error.square(), 2 * error, u - v)


def hinge_loss(row: PreferenceRow, u: Tensor, v: Tensor) -> Scored:
    """max(0, 1 - beta D), slope -beta below the hinge and 0 above."""
    gap = 1 - row.beta * (u - v)
    return _of_margin(gap.clamp(min=0), choose(gap > 0, -row.beta, 0.0, u.dtype), u - v)


def exo_loss(row: PreferenceRow, u: Tensor, v: Tensor) -> Scored:
    """KL(q || 1 - e), q = sigmoid(beta D); slope beta q (1 - q) (log(q / (1 - e)) - log((1 - q) / e))."""
    e, z = row.label_smoothing, row.beta * (u - v)
    q = torch.sigmoid(z)
    win, lose = F.logsigmoid(z) - math.log1p(-e), F.logsigmoid(-z) - math.log(e)
    return _of_margin(q * win + (1 - q) * lose, row.beta * q * (1 - q) * (win - lose), u - v)


def sppo_hard_loss(row: PreferenceRow, u: Tensor, v: Tensor) -> Scored:
    """(u - 1 / (2 beta))^2 + (v + 1 / (2 beta))^2: both answers move to a fixed score."""
    win, lose = u - 0.5 / row.beta, v + 0.5 / row.beta
    return Scored(win.square() + lose.square(), 2 * win, 2 * lose, u - v)


def bco_loss(row: PreferenceRow, u: Tensor, v: Tensor) -> Scored:
    """-log sigmoid(beta u) - log sigmoid(-beta v): two classifications instead of a comparison."""
    losses = -F.logsigmoid(row.beta * u) - F.logsigmoid(-row.beta * v)
    return Scored(losses, -row.beta * torch.sigmoid(-row.beta * u), row.beta * torch.sigmoid(row.beta * v), u - v)


def nca_loss(row: PreferenceRow, u: Tensor, v: Tensor) -> Scored:
    """-log s(beta u) - log s(-beta u) / 2 - log s(-beta v) / 2: u is also held back, so that it does not run away."""
    b, z_u, z_v = row.beta, row.beta * u, row.beta * v
    losses = -F.logsigmoid(z_u) - 0.5 * F.logsigmoid(-z_u) - 0.5 * F.logsigmoid(-z_v)
    slope_u = -b * torch.sigmoid(-z_u) + 0.5 * b * torch.sigmoid(z_u)
    return Scored(losses, slope_u, 0.5 * b * torch.sigmoid(z_v), u - v)


def _bell(b: float, x: Tensor) -> Tensor:
    """d sigmoid(b x) / dx = b s(b x) s(-b x)."""
    return b * torch.sigmoid(b * x) * torch.sigmoid(-b * x)


def apo_zero_loss(row: PreferenceRow, u: Tensor, v: Tensor) -> Scored:
    """1 - s(beta u) + s(beta v): the chosen answer up, the rejected one down."""
    losses = 1 - torch.sigmoid(row.beta * u) + torch.sigmoid(row.beta * v)
    return Scored(losses, -_bell(row.beta, u), _bell(row.beta, v), u - v)


def apo_down_loss(row: PreferenceRow, u: Tensor, v: Tensor) -> Scored:
    """s(beta u) + 1 - s(beta (u - v)): both down, the rejected answer further."""
    losses = torch.sigmoid(row.beta * u) + 1 - torch.sigmoid(row.beta * (u - v))
    apart = _bell(row.beta, u - v)
    return Scored(losses, _bell(row.beta, u) - apart, apart, u - v)


def discopop_loss(row: PreferenceRow, u: Tensor, v: Tensor) -> Scored:
    """(1 - m) * -log s(z) + m exp(-z), m = s(z / tau), z = beta D; slope in z by the product rule."""
    z = row.beta * (u - v)
    m, logistic, exponential = torch.sigmoid(z / row.discopop_tau), -F.logsigmoid(z), torch.exp(-z)
    slope = -(1 - m) * torch.sigmoid(-z) - m * exponential + m * (1 - m) / row.discopop_tau * (exponential - logistic)
    return _of_margin((1 - m) * logistic + m * exponential, row.beta * slope, u - v)


def dpop_loss(row: PreferenceRow, u: Tensor, v: Tensor) -> Scored:
    """-log s(beta (D - lambda max(0, -u))): the chosen answer may not fall below the reference for free."""
    z = row.beta * (u - v - row.dpop_lambda * (-u).clamp(min=0))
    slope = -row.beta * torch.sigmoid(-z)
    return Scored(-F.logsigmoid(z), slope * (1 + row.dpop_lambda * (u < 0).to(u.dtype)), -slope, u - v)


def rdpo_loss(row: PreferenceRow, u: Tensor, v: Tensor, lengths: Tensor) -> Scored:
    """-log s(beta D + alpha (T_chosen - T_rejected)): a pair that length alone explains teaches less."""
    chosen, rejected = lengths.to(u.dtype).chunk(2)
    z = row.beta * (u - v) + row.length_alpha * (chosen - rejected)
    return _of_margin(-F.logsigmoid(z), -row.beta * torch.sigmoid(-z), u - v)


def simpo_loss(row: PreferenceRow, u: Tensor, v: Tensor) -> Scored:
    """-log sigmoid(beta D - gamma), slope in D: -beta sigmoid(gamma - beta D); e weighs the exchanged pair."""
    e, z = row.label_smoothing, row.beta * (u - v) - row.gamma
    losses = -(1 - e) * F.logsigmoid(z) - e * F.logsigmoid(-z)
    return _of_margin(losses, row.beta * (torch.sigmoid(z) - (1 - e)), u - v)


def orpo_loss(row: PreferenceRow, u: Tensor, v: Tensor) -> Scored:
    """-beta log sigmoid(O), O = odds(u) - odds(v), odds(s) = s - log(1 - e^s), d odds / ds = 1 / (1 - e^s)."""
    odds = u - torch.log(-torch.expm1(u)) - (v - torch.log(-torch.expm1(v)))
    slope = -row.beta * torch.sigmoid(-odds)
    return Scored(-row.beta * F.logsigmoid(odds), slope / -torch.expm1(u), -slope / -torch.expm1(v), odds)


def aot(row: PreferenceRow, policy: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]) -> Scored:
    """Smoothed DPO on D_(k) = k-th smallest policy gap - k-th smallest reference gap; slopes return to the pairs by rank."""
    gaps, order = torch.sort(policy[0] - policy[1])
    losses, slope, _, margin = _smoothed(row, gaps - torch.sort(reference[0] - reference[1]).values)
    per_pair = torch.zeros_like(slope).scatter(0, order, slope)
    return Scored(losses, per_pair, -per_pair, margin)


def aot_unpaired_loss(row: PreferenceRow, u: Tensor, v: Tensor) -> Scored:
    """Smoothed DPO on D_(k) = k-th smallest u - k-th smallest v."""
    (sorted_u, order_u), (sorted_v, order_v) = torch.sort(u), torch.sort(v)
    losses, slope, _, margin = _smoothed(row, sorted_u - sorted_v)
    nothing = torch.zeros_like(slope)
    return Scored(losses, nothing.scatter(0, order_u, slope), -nothing.scatter(0, order_v, slope), margin)


def kto(row: PreferenceRow, u: Tensor, data: Preferences) -> tuple[Tensor, Tensor, Tensor]:
    """weight (1 - sigmoid(s beta (u - z0))), s = +1 desirable and -1 not; slope -s weight beta p (1 - p).

    z0 = max(0, mean of the mismatched answers' u) estimates a KL and carries no gradient. (N,) each.
    """
    return _labelled(row, u, data, (data.kl_seq_logps - data.ref_kl_seq_logps).mean().clamp(min=0))


def kto_apo(row: PreferenceRow, u: Tensor, data: Preferences) -> tuple[Tensor, Tensor, Tensor]:
    """As kto without a KL point: z0 = 0."""
    return _labelled(row, u, data, torch.zeros((), dtype=u.dtype))


def _labelled(row: PreferenceRow, u: Tensor, data: Preferences, z0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sign = choose(data.labels, 1.0, -1.0, u.dtype)
    weight = choose(data.labels, row.desirable_weight, row.undesirable_weight, u.dtype)
    p = torch.sigmoid(sign * row.beta * (u - z0))
    return weight * (1 - p), -sign * weight * row.beta * p * (1 - p), u - z0


_E = Number("label_smoothing", 0.0, 0, 1, "e")
_GAMMA = Number("gamma", 0.0, -1e308, 1e308, "SimPO's target margin")
_WEIGHTS = (Number("desirable_weight", 1.0, 0, INF), Number("undesirable_weight", 1.0, 0, INF))
_LABELS = ("labels", "ref_logps")

LOSSES: dict[str, PreferenceLoss] = {
    "sigmoid": PreferenceLoss("-log sigmoid(beta D)", sigmoid_loss),
    "cdpo": PreferenceLoss("-(1 - e) log sigmoid(beta D) - e log sigmoid(-beta D)", smoothed_loss, (_E,)),
    "robust": PreferenceLoss("(-(1 - e) log sigmoid(beta D) + e log sigmoid(-beta D)) / (1 - 2 e)", robust_loss, (_E,)),
    "ipo": PreferenceLoss("(D - 1 / (2 beta))^2", ipo_loss),
    "hinge": PreferenceLoss("max(0, 1 - beta D)", hinge_loss),
    "exo": PreferenceLoss("KL(Bernoulli(sigmoid(beta D)) || Bernoulli(1 - e))", exo_loss, (_E,)),
    "sppo_hard": PreferenceLoss("(u - 1 / (2 beta))^2 + (v + 1 / (2 beta))^2", sppo_hard_loss),
    "bco": PreferenceLoss("-log sigmoid(beta u) - log sigmoid(-beta v)", bco_loss),
    "nca": PreferenceLoss("-log sigmoid(beta u) - log sigmoid(-beta u) / 2 - log sigmoid(-beta v) / 2", nca_loss),
    "apo_zero": PreferenceLoss("1 - sigmoid(beta u) + sigmoid(beta v)", apo_zero_loss),
    "apo_down": PreferenceLoss("sigmoid(beta u) + 1 - sigmoid(beta D)", apo_down_loss),
    "discopop": PreferenceLoss("(1 - m) * -log sigmoid(z) + m exp(-z), z = beta D, m = sigmoid(z / tau)", discopop_loss,
        (Number("discopop_tau", 0.05, 1e-6, INF, "tau"),)),
    "dpop": PreferenceLoss("-log sigmoid(beta (D - lambda max(0, -u)))", dpop_loss,
        (Number("dpop_lambda", 50.0, 0, INF, "lambda"),)),
    "rdpo": PreferenceLoss("-log sigmoid(beta D + alpha (T_chosen - T_rejected))", rdpo_loss,
        (Number("length_alpha", 0.01, -INF, INF, "alpha"),), reads_lengths=True),
    "aot": PreferenceLoss("cdpo on D = sorted policy gaps - sorted reference gaps", aot, (_E,), sorts=True, sorts_gaps=True),
    "aot_unpaired": PreferenceLoss("cdpo on D = sorted u - sorted v", aot_unpaired_loss, (_E,), sorts=True),
    "simpo": PreferenceLoss("-log sigmoid(beta D - gamma), or cdpo of beta D - gamma", simpo_loss, (_GAMMA, _E)),
    "orpo": PreferenceLoss("-beta log sigmoid(odds(u) - odds(v)), odds(s) = s - log(1 - exp(s))", orpo_loss,
        takes_odds=True),
    "kto": PreferenceLoss(
        "weight (1 - sigmoid(+-beta (u - z0))), z0 = max(0, mean of mismatched u) without gradient", kto, _WEIGHTS,
        (*_LABELS, "kl_seq_logps", "ref_kl_seq_logps"), of_labels=True),
    "kto_apo": PreferenceLoss("weight (1 - sigmoid(+-beta u)): kto without a KL point", kto_apo, _WEIGHTS, _LABELS,
        of_labels=True),
}  # fmt: skip
