"""The table of preferences: DPO and its relatives on pairs of answers, their gradients, optima, and what noise does.

Pairs: two different answers, each drawn from the policy that sampled, labelled by Bradley-Terry on the rewards, P(i
above j) = sigmoid(R_i - R_j). Every (chosen, rejected) is an outcome. The policy p stands at its reference unless the
case gives one. The truth is the population gradient: minus d E[DPO loss] / d logits, the direction of descent.

Every row of PREFERENCE_ROWS that reads pairs is evaluated through evaluate_preference, so a new row there is a line
here. Two answers with a known share of right labels decide what beta does: the step from the reference grows with beta, the optimum
shrinks with it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from extensions import objectives
from extensions.estimators import shared_features
from extensions.estimators.enumerate import multisets
from extensions.estimators.line import Line, line_of
from extensions.estimators.policy import Case, scores
from extensions.estimators.through import told
from extensions.objectives import PREFERENCE_ROWS, PreferenceRow

BATCHES = (1, 2, 4)
MOST = 50_000  # outcomes of a batch; a larger one has no line
NOISE = (0.1, 0.3)  # chance that a label is exchanged
RIGHT = 0.8  # of the labels, where two answers are compared
BETAS = (0.1, 0.5, 1.0, 2.0)
DPO = PREFERENCE_ROWS["dpo"]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class Pairs(NamedTuple):
    """Every ordered pair of different answers: which is chosen, which rejected, and the chance of that outcome."""

    chosen: np.ndarray  # (M,)
    rejected: np.ndarray  # (M,)
    chances: np.ndarray  # (M,) sum one


def pairs_of(case: Case, flipped: float = 0.0) -> Pairs:
    """The pairs of a case; `flipped` is the chance that a label is exchanged. Equal answers make no pair."""
    chosen, rejected = (index.ravel() for index in np.nonzero(~np.eye(len(case.p), dtype=bool)))
    right = sigmoid(case.R[chosen] - case.R[rejected])
    both = case.b[chosen] * case.b[rejected]
    chances = both * ((1 - flipped) * right + flipped * (1 - right))
    return Pairs(chosen, rejected, chances / chances.sum())


def reference_of(case: Case) -> np.ndarray:
    return case.p if case.r is None else case.r


def contributions(row: PreferenceRow, p: np.ndarray, r: np.ndarray, chosen: np.ndarray, rejected: np.ndarray) -> np.ndarray:
    """(M, K): the descent direction of each pair by itself, answers of one token; through evaluate_preference.

    The loss is a mean over pairs, so its gradient times M is each pair's own.
    """
    log_p, log_r = np.log(p), np.log(r)
    data = objectives.make_preferences(
        chosen_logps=log_p[chosen], rejected_logps=log_p[rejected], ref_chosen_logps=log_r[chosen],
        ref_rejected_logps=log_r[rejected], answer_lengths=np.ones(2 * len(chosen), dtype=int),
        pair_weights=np.ones(len(chosen)),
    )  # fmt: skip
    slope = objectives.evaluate_preference(row, data).dloss_dlogps.numpy().ravel()
    up, down = np.split(-slope * len(chosen), 2)
    return up[:, None] * scores(p)[chosen] + down[:, None] * scores(p)[rejected]


def compares_pairs(row: PreferenceRow) -> bool:
    """Whether a pair's gradient is its own: labelled answers are no pairs, and a sorted loss looks at its batch."""
    loss = objectives.PREFERENCE_LOSSES[row.loss]
    return not row.of_labels and not loss.sorts


def population(case: Case, row: PreferenceRow = DPO, flipped: float = 0.0) -> np.ndarray:
    """(K,): minus the gradient of the expected loss of one pair."""
    pairs = pairs_of(case, flipped)
    return pairs.chances @ contributions(row, case.p, reference_of(case), pairs.chosen, pairs.rejected)


def row_lines(case: Case) -> list[Line]:
    """Every preference row that reads pairs, one pair, against the population gradient of DPO."""
    pairs, truth = pairs_of(case), population(case)
    made = []
    for name, row in PREFERENCE_ROWS.items():
        if compares_pairs(row):
            each = contributions(row, case.p, reference_of(case), pairs.chosen, pairs.rejected)
            made.append(told(name, each, pairs.chances, truth, name, row.loss))
    return made


def left_out() -> dict[str, str]:
    """Preference rows without a line, each with the reason."""
    labels, sorts = "reads labelled answers, not pairs", "compares ranks in its batch: one pair is not an estimator of it"
    return {name: labels if row.of_labels else sorts for name, row in PREFERENCE_ROWS.items() if not compares_pairs(row)}


def batch_lines(case: Case) -> list[Line]:
    """Batches of several pairs: no baseline, no group, so the mean does not depend on how many there are.

    A size with more than MOST outcomes is left out.
    """
    pairs, truth = pairs_of(case), population(case)
    each = contributions(DPO, case.p, reference_of(case), pairs.chosen, pairs.rejected)
    made = []
    for size in BATCHES:
        if math.comb(len(each) + size - 1, size) > MOST:
            continue
        members, chances = multisets(pairs.chances, size)
        made.append(told(f"dpo, batch of {size}", each[members].mean(axis=1), chances, truth, "dpo", "no group"))
    return made


def noise_lines(case: Case) -> list[Line]:
    """Labels exchanged with chance e; cdpo and robust are told the right e. The truth is DPO's on clean labels."""
    truth, made = population(case), []
    for e in NOISE:
        pairs = pairs_of(case, e)
        for name in ("dpo", "cdpo", "robust", "ipo"):
            row = PREFERENCE_ROWS[name]
            row = replace(row, label_smoothing=e) if name in ("cdpo", "robust") else row
            each = contributions(row, case.p, reference_of(case), pairs.chosen, pairs.rejected)
            used = name if PREFERENCE_ROWS[name] == row else None
            # IPO's squared loss has another size than DPO's at every label: its own clean gradient is what noise takes from.
            own = population(case, row) if name == "ipo" else truth
            made.append(told(f"{name}, {e:.0%} of labels exchanged", each, pairs.chances, own, used))
    return made


# ------------------------------------------------------------------------------------------ two answers: what beta does


def dpo_optimum(right: float, beta: float) -> float:
    """h* = logit(P) / beta: where P sigmoid(-beta h) = (1 - P) sigmoid(beta h). h = D, the margin of log-ratios."""
    return math.log(right / (1 - right)) / beta


def ipo_optimum(right: float, beta: float) -> float:
    """h* = (2 P - 1) / (2 beta): the mean of the targets +-1 / (2 beta)."""
    return (2 * right - 1) / (2 * beta)


OPTIMA = {"dpo": dpo_optimum, "ipo": ipo_optimum}


def kl_to_half(h: float) -> float:
    """KL(p || (1/2, 1/2)) of two answers at margin h, p = sigmoid(h): log 2 - entropy."""
    p, q = 1 / (1 + math.exp(-h)), 1 / (1 + math.exp(h))
    return math.log(2) + p * math.log(p) + q * math.log(q)


def margin_slopes(row: PreferenceRow, h: float) -> np.ndarray:
    """(2,): d loss / d h at margin h, label right and label wrong, through evaluate_preference; reference (1/2, 1/2)."""
    # log p = log sigmoid(+-h); the reference's log-probabilities are equal, so D is h where the label is right, else -h.
    log_p = -np.log1p(np.exp(np.array([-h, h])))
    half = np.log([0.5, 0.5])
    data = objectives.make_preferences(
        chosen_logps=log_p, rejected_logps=log_p[::-1].copy(), ref_chosen_logps=half, ref_rejected_logps=half,
        answer_lengths=np.ones(4, dtype=int),
    )  # fmt: skip
    slope = 2 * objectives.evaluate_preference(row, data).dloss_dscores.numpy()
    # A loss of D alone: its slope in the chosen score is that in D, and D = h or -h.
    return slope[:2] * np.array([1.0, -1.0])


def beta_lines() -> list[Line]:
    """One step from the reference against the optimum, RIGHT of the labels right, two answers, reference (1/2, 1/2).

    DPO: step (2 P - 1) / 2 * beta, optimum logit(P) / beta: the step grows with beta, the optimum and its KL shrink with it.
    IPO: step (2 P - 1) / beta and optimum (2 P - 1) / (2 beta) both shrink.
    """
    chances, made = np.array([RIGHT, 1 - RIGHT]), []
    for name, optimum in OPTIMA.items():
        for beta in BETAS:
            row = replace(PREFERENCE_ROWS[name], beta=beta)
            each = -margin_slopes(row, 0.0)[:, None]
            truth = [(2 * RIGHT - 1) / 2 * beta] if name == "dpo" else [(2 * RIGHT - 1) / beta]
            best = optimum(RIGHT, beta)
            used = name if PREFERENCE_ROWS[name] == row else None
            line = line_of(f"{name}, beta {beta:g}: first step of h", each, chances, truth, used)
            meaning = f"h from 0: step {line.mean[0]:.3g}, optimum {best:.4f} with KL {kl_to_half(best):.6f}"
            made.append(replace(line, meaning=meaning))
    return made


def table(case: Case) -> list[Line]:
    """Rows on one pair, batches, noisy labels, both sides of beta, and DPO steps on a table and with shared features."""
    return row_lines(case) + batch_lines(case) + noise_lines(case) + beta_lines() + shared_features.lines()
