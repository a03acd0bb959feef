"""The table of advantages: baselines and scales on one prompt, two prompts in one batch, and every row of objectives.ROWS.

A new estimator is an entry in ESTIMATORS (through a Row where one says it, else a rule of its own); a new row of the
objectives table appears by itself. All is on-policy; the reference is that of the case, or the policy itself.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Callable, Iterable, Iterator, NamedTuple

import numpy as np

from extensions.estimators.enumerate import Outcomes, multisets
from extensions.estimators.line import Line, line_of
from extensions.estimators.policy import Case, best_baseline, expected_reward, policy_gradient
from extensions.estimators.sampled import Drawn, Rule, row_gradients, rule_gradients, truth_of, two_prompt_gradients
from extensions.estimators.through import EXACT, verdict
from extensions.objectives import ROWS, Row

OFFSET = 0.5  # of the critic that is wrong everywhere by the same amount

# ------------------------------------------------------------------------------------------ rules that no row has


def constant(baseline: Callable[[Case], float]) -> Callable[[Case], Rule]:
    """A_i = R_i - b, b a number that is known before anything is drawn."""
    return lambda case: lambda R: R - baseline(case)


def J_of(case: Case) -> float:
    return expected_reward(case.p, case.R)


def others(R: np.ndarray) -> np.ndarray:
    """The mean of the other rewards of the group, (M, G)."""
    return (R.sum(axis=1, keepdims=True) - R) / (R.shape[1] - 1)


def shrunk(case: Case) -> Rule:
    """A_i = R_i - (mean of the others + J) / 2: half-way to a mean over many prompts, which is J here."""
    return lambda R: R - (others(R) + J_of(case)) / 2


def median(case: Case) -> Rule:
    return lambda R: R - np.median(R, axis=1, keepdims=True)


_GRPO = replace(ROWS["dr_grpo"], scale="group_std", std_eps=0.0)

ESTIMATORS: dict[str, Row | Callable[[Case], Rule]] = {
    "no baseline": ROWS["reinforce"],
    "V = J": constant(J_of),
    f"V = J + {OFFSET}": constant(lambda case: J_of(case) + OFFSET),
    "best constant b*": constant(lambda case: best_baseline(case.p, case.R)),
    "greedy answer's reward": ROWS["remax"],
    "group mean": ROWS["dr_grpo"],
    "leave-one-out": replace(ROWS["rloo"], kl="none", kl_coef=0.0),
    "leave-one-out, shrunk": shrunk,
    "group median": median,
    "/ std, ddof 0": _GRPO,
    "/ std, ddof 1": replace(_GRPO, std_ddof=1),
    "/ (std + 0.1)": replace(_GRPO, std_eps=0.1),
    "/ std, A cut to 1": replace(_GRPO, reward_clip="after_baseline", reward_limit=1.0),
    "/ mean": replace(_GRPO, scale="group_mean"),
    "group mean, mixed only": replace(ROWS["dr_grpo"], group_filter="spread"),
    "/ std, mixed only": replace(_GRPO, group_filter="spread"),
    "batch std, no group": replace(_GRPO, baseline="none", scale="batch_std"),
    "group mean, batch std": replace(_GRPO, scale="batch_std"),
}
"""Estimator -> the row that says it, or what makes a rule (rewards [M, G] -> advantages) of a case."""

PAIRED = 3  # largest group where a batch holds two: every pair of groups is a batch of its own
ALONE = replace(_GRPO, singleton="raw")
TWO_PROMPTS = ("leave-one-out", "group mean", "/ std, ddof 0", "batch std, no group", "group mean, batch std")


class Estimate(NamedTuple):
    """One estimator on one case: what it gives for every outcome, and what it should give on average."""

    name: str
    row: str | None  # in objectives.ROWS
    drawn: Drawn
    truth: np.ndarray


def estimates(
    case: Case, refused: dict[str, str] | None = None, outcomes: Outcomes | None = None, rows: bool = True
) -> Iterator[Estimate]:
    """Every estimator of one prompt that can be evaluated on the case, one after the other.

    The groups come from case.b (or are `outcomes` of it); without `rows`, ESTIMATORS alone. The rows of objectives.ROWS meet
    the reference, the others do without. `refused` receives the name of what cannot be evaluated, with the reason.
    """
    outcomes = multisets(case.b, case.group_size) if outcomes is None else outcomes
    plain = replace(case, reference=None)
    for name, what in (*ESTIMATORS.items(), *(ROWS.items() if rows else ())):
        of = case if name in ROWS else plain
        try:
            if isinstance(what, Row):
                check_suited(what, case)
                drawn, truth = row_gradients(what, of, outcomes), truth_of(what, of)
            else:
                drawn, truth = rule_gradients(what(case), case, outcomes), policy_gradient(case.p, case.R)
        except ValueError as problem:
            if refused is not None:
                refused[name] = str(problem).removeprefix(f"{name}: ")
        else:
            yield Estimate(name, _row_name(name, what), drawn, truth)


def check_suited(row: Row, case: Case) -> None:
    """Raises ValueError for a row that says itself that it is not meant for such rewards."""
    if row.scale == "group_mean" and min(case.rewards) < 0:
        raise ValueError("divides by the mean reward of the group: for rewards that are not negative")


def _row_name(name: str, what: Row | Callable) -> str | None:
    if name in ROWS:
        return name
    return what.name if isinstance(what, Row) and ROWS.get(what.name) == what else None


def two_prompts(case: Case, refused: dict[str, str] | None = None) -> Iterator[Estimate]:
    """The TWO_PROMPTS estimators on a batch of two prompts: vectors (2K,), the first K of them the case's own."""
    plain = replace(case, reference=None, behaviour=None, group_size=min(case.group_size, PAIRED))
    for name in TWO_PROMPTS:
        shown = two_prompt_name(name, plain.group_size)
        try:
            drawn, truth = two_prompt_gradients(ESTIMATORS[name], plain)
        except ValueError as problem:
            if refused is not None:
                refused[shown] = str(problem)
        else:
            yield Estimate(shown, None, drawn, truth)


def two_prompt_name(name: str, group_size: int) -> str:
    return f"two prompts, G={group_size}: {name}"


def alone(case: Case) -> Estimate:
    """A group of one whose answer keeps its reward: no baseline at all, one answer instead of G."""
    drawn = row_gradients(ALONE, replace(case, reference=None), multisets(case.p, 1))
    return Estimate("group of one, raw", None, drawn, policy_gradient(case.p, case.R))


def table(case: Case) -> list[Line]:
    """What a baseline and a scale do to the expected gradient and to its variance.

    Raises ValueError for a group of one, where leave-one-out has no others.
    """
    return lines_and_left_out(case)[0]


def lines_and_left_out(
    case: Case, on_estimate: Callable[[str], None] | None = None
) -> tuple[list[Line], dict[str, str]]:
    """The lines of `table`, and what cannot be evaluated on this case, each with the reason.

    on_estimate is called with the name of every estimator that is done, at the end with "".
    """
    if case.group_size < 2:
        raise ValueError(f"--group-size: got {case.group_size}, wanted at least 2: leave-one-out needs another answer")
    case, refused = replace(case, behaviour=None), {}
    told = on_estimate or (lambda name: None)
    lines = [*_lines(itertools.chain(_telling(estimates(case, refused), told), [alone(case)]), "V = J")]
    paired = two_prompt_name(TWO_PROMPTS[0], min(case.group_size, PAIRED))
    lines += _lines(_telling(two_prompts(case, refused), told), paired)
    told("")
    return lines, refused


def _telling(made: Iterable[Estimate], told: Callable[[str], None]) -> Iterator[Estimate]:
    for e in made:
        told(e.name)
        yield e


def _lines(made: Iterable[Estimate], beside: str) -> Iterator[Line]:
    """Lines of one gradient; the variances are held against that of the estimator `beside`."""
    lines = [(line_of(e.name, e.drawn.vectors, e.drawn.probabilities, e.truth, e.row), e.truth, e.drawn.draws_for_one)
             for e in made]  # fmt: skip
    other = next((made for made, *_ in lines if made.estimator == beside), None)
    for made, truth, draws in lines:
        says = [verdict(made, truth), "" if other is None else noise(made, other)]
        if draws > 1 + EXACT:
            says.append(f"{draws:.4g} groups drawn for one used")
        yield replace(made, meaning="; ".join(part for part in says if part))


def noise(made: Line, beside: Line) -> str:
    """The variance of a line after its scale is divided out, since a learning rate does that, against another line's."""
    if not made.scale or not beside.trace_cov or made.estimator == beside.estimator or abs(made.scale) < EXACT:
        return ""
    times = (made.trace_cov / made.scale**2) / (beside.trace_cov / beside.scale**2)
    return f"variance at equal scale {times:.3g} times that of {beside.estimator}"
