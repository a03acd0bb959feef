"""The table of off-policy corrections: answers come from another policy than the one that learns.

p learns, b sampled, w = p / b, s = d log p / d logits, A = R - J known (no group, so that only the correction is
seen). The truth is d J / d logits = E_b[w A s]. One sampled answer in each outcome; a mean of n has 1/n of the
variance.

The ladder (none, IS, TIS, masked, self-normalised) and every different ratio and surrogate of objectives.ROWS go
through objectives.evaluate: a new row there is a line here. A cap or a band of the ladder is an entry in CAPS; a
sampler correction that stands in front of a surrogate, one in CROSSED.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Iterator

import numpy as np

from extensions.estimators.enumerate import multisets
from extensions.estimators.line import Line
from extensions.estimators.policy import Case, expected_reward, policy_gradient, scores
from extensions.estimators.sequences import S1, Sequences, tempered
from extensions.estimators.through import EXACT, QUIET, only, same, slopes, told
from extensions.objectives import NUMBERS, ROWS, Row

CAPS = (1.0, 1.5, 2.0)
MASKS = (1.5, 2.0, 3.0)
SEQUENCE_CAPS = (1.2, 1.5)
TEMPERATURE = 0.7  # of the sampler of whole answers
MOST = 50_000  # outcomes of a self-normalised mean; more draws have no line
FAR = 10.0  # a limit of |log ratio| this large cuts nothing that is looked at here

NONE = Row("no correction", ratio="none", surrogate="plain", **QUIET)
IS = Row("IS", surrogate="plain", **QUIET)
_WEIGHTED = replace(IS, ratio="none", sampler_correction="token")  # w is a constant in front of A log p

CROSSED: dict[str, dict[str, object]] = {
    "no weight": {},
    "IS": {"sampler_correction": "token"},
    "TIS 1.2": {"sampler_correction": "token", "sampler_bound": "capped", "sampler_high": 1.2},
    "masked 1.2": {"sampler_correction": "token", "sampler_drop": "ratio", "sampler_drop_high": 1.2},
}
"""What stands in front of the surrogate for sampler against trainer, beside the ratio of trainer against policy."""
CROSSED_SURROGATES = ("clip", "dual_clip", "cispo", "sapo")


def tis(cap: float) -> Row:
    """w = min(p / b, cap), without gradient."""
    return replace(_WEIGHTED, sampler_bound="capped", sampler_high=cap)


def masked(most: float) -> Row:
    """w = p / b up to `most`, 0 above."""
    return replace(_WEIGHTED, sampler_drop="ratio", sampler_drop_high=most)


def ladder() -> dict[str, tuple[Row, str]]:
    """Name -> row and what an answer contributes."""
    return {
        "none": (NONE, "A s"),
        "IS": (IS, "w A s"),
        **{f"TIS, cap {cap:g}": (tis(cap), f"min(w, {cap:g}) A s") for cap in CAPS},
        **{f"masked above {most:g}": (masked(most), f"w A s, 0 where w > {most:g}") for most in MASKS},
    }


def contributions(row: Row, p: np.ndarray, b: np.ndarray, A: np.ndarray) -> np.ndarray:
    """(K, K): the ascent direction -d loss / d logits of each answer, drawn from b, advantage A.

    A row that weighs sampler against trainer takes b as the sampler, and p has not moved yet; else b is the old policy.
    """
    old = np.log(p if weighs_sampler(row) else b)
    return -slopes(row, np.log(p), old_logps=old, sampler_logps=np.log(b), advantages=A)[:, None] * scores(p)


def weighs_sampler(row: Row) -> bool:
    return row.sampler_correction != "none" or row.sampler_drop != "none"


def self_normalised(case: Case, A: np.ndarray, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """sum w_i A_i s_i / sum w_i over `draws` answers: every outcome (M, K), and the chances. Biased by about 1/draws."""
    p, b = case.p, case.b
    members, chances = multisets(b, draws)
    w = (p / b)[members]
    shares = (w / w.sum(axis=1, keepdims=True)).ravel()
    row, flat = replace(IS, ratio="none", sampler_correction="given"), members.ravel()
    slope = slopes(row, np.log(p)[flat], advantages=A[flat], sampler_weights=shares)
    return -(slope[:, None] * scores(p)[flat]).reshape(*members.shape, -1).sum(axis=1), chances


def effective_share(p: np.ndarray, b: np.ndarray) -> float:
    """(E_b w)^2 / E_b w^2 = 1 / (1 + chi2(p || b)): how many answers of p one of b is worth. 1 where b = p."""
    return float(1 / (p**2 / b).sum())


# ------------------------------------------------------------------------------------------ rows of the objectives table


def settings(row: Row) -> tuple:
    """What steps 3 and 4 of a row are made of: its choices, and the numbers that they read."""
    fields = ("ratio", "surrogate", "off_policy_rows", "sampler_correction", "sampler_bound", "sampler_drop",
              "sampler_drop_level", "sampler_place")  # fmt: skip
    read = {n for field in fields for n in NUMBERS.get((field, getattr(row, field)), ())}
    limits = [limit if abs(limit) < FAR else None for limit in (row.log_ratio_min, row.log_ratio_max)]
    return tuple((f, getattr(row, f)) for f in (*fields, *sorted(read))) + tuple(limits)


def different_rows() -> Iterator[Row]:
    """The first row of each kind of ratio and surrogate, without rows that choose tokens or are handed their weights."""
    seen = {settings(row) for row, _ in ladder().values()}
    for row in ROWS.values():
        key = settings(row)
        if key not in seen and row.sampler_correction != "given" and row.token_selection == "all":
            seen.add(key)
            yield row


def row_like(wanted: Row) -> str | None:
    """The first row of the table whose ratio and surrogate are those of `wanted`, on all tokens."""
    everywhere = (row for row in ROWS.values() if row.token_selection == row.kl_tokens == "all")
    return next((row.name for row in everywhere if settings(row) == settings(wanted)), None)


def described(row: Row) -> str:
    """What a row does about the policy that sampled, in few words: "clip 0.2 0.28", or its weight "token w, capped 2"."""
    made = []
    for field in ("sampler_bound", "sampler_drop") if weighs_sampler(row) else ("surrogate",):
        choice = row.choices[field]
        numbers = [f"{getattr(row, number.name):.3g}" for number in choice.numbers]
        kept = "keeps " if field == "sampler_drop" else ""
        made += [] if getattr(row, field) in ("as_is", "none") else [" ".join([kept + getattr(row, field), *numbers])]
    return ", ".join([f"{row.sampler_correction} w", *made] if weighs_sampler(row) else made)


def crossed(case: Case) -> list[Line]:
    """Three policies: b samples, o = sqrt(p b) / Z is the trainer's old one; o / b is weighed, p / o is the ratio."""
    p, b = case.p, case.b
    o = np.sqrt(p * b) / np.sqrt(p * b).sum()
    A, truth = case.R - expected_reward(p, case.R), policy_gradient(p, case.R)
    made = []
    for weight, fields in CROSSED.items():
        for surrogate in ("plain", *CROSSED_SURROGATES):
            row = Row(surrogate, surrogate=surrogate, **QUIET, **fields)
            slope = slopes(row, np.log(p), old_logps=np.log(o), sampler_logps=np.log(b), advantages=A)
            formula = "sampler, trainer, policy"
            made.append(told(f"{weight} of o/b, {surrogate} of p/o", -slope[:, None] * scores(p), b, truth, formula=formula))
    return made


# ------------------------------------------------------------------------------------------ whole answers


def prefix_weights(d: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """w_t = product of the token ratios up to t, (N, T), 0 beyond the end; d = l0 - ls (N, T)."""
    return np.where(mask, np.exp(np.cumsum(d, axis=1)), 0.0)


def sequence_rows() -> dict[str, tuple[Row, str]]:
    """Name -> row and formula; "given" is handed the prefix weights. GSPO's ratio is the geometric mean."""
    weighted = {
        "token IS": ({"sampler_correction": "token"}, "w_t A s_t"),
        "prefix IS": ({"sampler_correction": "given"}, "w_1 ... w_t A s_t"),
        "sequence IS": ({"sampler_correction": "product"}, "w_1 ... w_T A s"),
        "geometric": ({"sampler_correction": "geometric"}, "exp(mean log w) A s"),
    }
    made = {"none": (NONE, "A s")} | {name: (replace(NONE, **fields), says) for name, (fields, says) in weighted.items()}
    for cap in SEQUENCE_CAPS:
        for level in ("token", "product", "geometric"):
            bound = {"sampler_bound": "capped", "sampler_high": cap}
            name = f"{'sequence' if level == 'product' else level} TIS, cap {cap:g}"
            made[name] = (replace(NONE, sampler_correction=level, **bound), f"min(w, {cap:g}) A s")
    made["sequence masked above 1.5"] = (
        replace(NONE, sampler_correction="product", sampler_drop="ratio", sampler_drop_level="sum", sampler_drop_high=1.5),
        "w A s, 0 where w > 1.5",
    )
    for surrogate in CROSSED_SURROGATES:
        made[f"{surrogate} of token ratios"] = (Row(surrogate, surrogate=surrogate, **QUIET), "ratio in the surrogate")
        # Where the gradient runs through the answer's ratio, that stands at each of T tokens: their mean counts it once.
        once = {} if surrogate == "cispo" else {"reduction": "mean_per_response"}
        whole = Row(surrogate, surrogate=surrogate, ratio="sequence_product", **QUIET | once)
        made[f"{surrogate} of the answer's ratio"] = (whole, "ratio in the surrogate")
    gspo = Row("GSPO", ratio="sequence_mean", **QUIET)
    narrow, ratio = only(ROWS["gspo"], "34"), "exp(mean log w), summed over tokens"
    return made | {"GSPO, clip 0.2": (gspo, ratio), "GSPO, its own band": (narrow, ratio)}


def sequence_contributions(row: Row, world: Sequences, sampler: np.ndarray) -> np.ndarray:
    """(N, T V): ascent direction of each answer of the world, drawn from the rows `sampler` (T, V); A = R - J."""
    logps, drawn = world.logps, world.logps_under(sampler)
    old = logps if weighs_sampler(row) else drawn
    slope = slopes(row, logps, mask=world.mask, old_logps=old, sampler_logps=drawn, advantages=world.rewards - world.J,
                   sampler_weights=prefix_weights(logps - drawn, world.mask), window_rows=1)  # fmt: skip
    return -world.gradients(slope)


def sequence_lines(world: Sequences = S1, temperature: float = TEMPERATURE) -> list[Line]:
    """Answers of several tokens from a sampler at a temperature: where the product of ratios may be cut, and the price."""
    sampler = tempered(world.p, temperature)
    chances = np.exp(world.logps_under(sampler).sum(axis=1))
    made = []
    for name, (row, formula) in sequence_rows().items():
        of_row = sequence_contributions(row, world, sampler)
        made.append(told(f"S1 at T={temperature:g}: {name}", of_row, chances, world.policy_gradient, row_like(row), formula))
    return made


def table(case: Case) -> list[Line]:
    """Corrections of one answer of b, self-normalised ones of 2, G and 2 G, the rows' surrogates, and whole answers."""
    p, b = case.p, case.b
    A, truth = case.R - expected_reward(p, case.R), policy_gradient(p, case.R)
    single = [told(name, contributions(row, p, b, A), b, truth, row_like(row), formula)
              for name, (row, formula) in ladder().items()]  # fmt: skip
    for row in different_rows():
        single.append(told(row.name, contributions(only(row, "34"), p, b, A), b, truth, row.name, described(row)))
    of_is = next(line for line in single if line.estimator == "IS").mse
    made = [against(line, of_is) for line in single]
    for draws in sorted({2, case.group_size, 2 * case.group_size}):
        if math.comb(len(p) + draws - 1, draws) > MOST:
            continue
        outcomes, chances = self_normalised(case, A, draws)
        line = told(f"self-normalised, {draws} draws", outcomes, chances, truth, formula="sum w A s / sum w")
        made.append(against(line, of_is / draws))
    return made + crossed(case) + sequence_lines()


def against(line: Line, mse: float) -> Line:
    """The line with its error held against that of IS on as many answers."""
    if mse <= EXACT or same(line.mse, mse):
        return line
    return replace(line, meaning=f"{line.meaning}; MSE {line.mse / mse:.3g} x IS")
