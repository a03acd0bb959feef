"""A reader's own advantage rule or loss, put through the enumeration as the known estimators are.

    rule(rewards [G]) -> advantages [G]                               g = (1/G) sum A_i s_i
    loss(logps [G], old_logps [G], ref_logps [G], rewards [G]) -> ()  g = -sum_i (d loss / d logps_i) s_i

Which of the two it is says the number of its arguments. Tensors are torch float64; one call is one group, an answer is one
token. The function runs in this process, as the reader's own code. What it must be is checked: shapes, finite numbers, the
same result for the same call. A function that treats the order of the answers in some way is right here too, as long as all
ordered groups are few enough (ORDERED); beyond that it is refused.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace
from typing import Callable, Iterator, NamedTuple

import numpy as np
import torch

from extensions.estimators.advantages import estimates
from extensions.estimators.enumerate import Outcomes, check_count, multisets, tuples
from extensions.estimators.line import Line, line_of
from extensions.estimators.policy import Case, policy_gradient, scores
from extensions.estimators.through import verdict

ORDERED = 300  # ordered groups that are all tried; more are taken without order, which is then checked
CALLS = 200_000  # groups that a function is called for at most
SAME = 1e-6  # two estimators are the same if they differ by less, of the largest gradient, in every group
ARGUMENTS = {1: "rule", 4: "loss"}


class Own(NamedTuple):
    """A function of the reader's, its name as given, and what it is."""

    name: str
    function: Callable
    kind: str  # of ARGUMENTS


def load(text: str) -> Own:
    """MODULE:FUNCTION, imported as Python would from here. Raises ValueError, one line, for what is not such a function."""
    module_name, colon, function_name = text.partition(":")
    if not (module_name and colon and function_name):
        raise ValueError(f"--of: got {text!r}, wanted MODULE:FUNCTION, such as my_rules:advantages")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as problem:
        raise ValueError(f"--of: {module_name} cannot be imported ({type(problem).__name__}: {problem})") from problem
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"--of: {module_name} has no function {function_name}")
    return Own(text, function, _kind(text, function))


def _kind(name: str, function: Callable) -> str:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as problem:
        raise ValueError(f"--of: {name} does not say its arguments; wrap it in a def") from problem
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    count = sum(p.kind in positional and p.default is p.empty for p in parameters)
    if count not in ARGUMENTS:
        wanted = "1 (rewards) or 4 (logps, old_logps, ref_logps, rewards)"
        raise ValueError(f"--of: {name} takes {count} arguments without a default, wanted {wanted}")
    return ARGUMENTS[count]


def gradients(own: Own, case: Case) -> tuple[np.ndarray, Outcomes]:
    """What the function gives for every group, (M, K), and the groups. Raises ValueError as `slopes`."""
    in_order = case.answers**case.group_size <= ORDERED
    outcomes = (tuples if in_order else multisets)(case.b, case.group_size)
    count = len(outcomes.members)
    if count > CALLS:
        raise ValueError(f"--of: {count:,} groups to call it for, wanted at most {CALLS:,}: lower the group size")
    check_count(count, case.answers, "the group size")
    s, made = scores(case.p), np.empty((count, case.answers))
    for k, group in enumerate(outcomes.members):
        of_answers = slopes(own, case, group)
        if not np.array_equal(of_answers, slopes(own, case, group)):
            raise ValueError(f"--of: {own.name} gives two results for one group: it draws random numbers or keeps a state")
        if not in_order:
            turned = slopes(own, case, group[::-1])[::-1]
            if np.abs(turned - of_answers).max() > SAME * np.abs(of_answers).max():
                raise ValueError(f"--of: {own.name} depends on the order of the answers: lower the group size, so that all "
                                 f"orders can be tried (at most {ORDERED})")  # fmt: skip
        made[k] = of_answers @ s[group]
    return made, outcomes


def slopes(own: Own, case: Case, group: np.ndarray) -> np.ndarray:
    """What multiplies each answer's score, (G,): A_i / G, or -d loss / d logps_i.

    Raises ValueError, one line, for a function that fails, a wrong shape, numbers that are not finite, a loss without a
    gradient.
    """
    def of(numbers: np.ndarray) -> torch.Tensor:
        return torch.tensor(numbers[group], dtype=torch.float64)

    rewards = of(case.R)
    if own.kind == "rule":
        return _called(own, rewards).detach().numpy() / len(group)
    logps = of(np.log(case.p)).requires_grad_()
    reference = case.p if case.r is None else case.r
    loss = _called(own, logps, of(np.log(case.b)), of(np.log(reference)), rewards)
    if not loss.requires_grad:
        raise ValueError(f"--of: {own.name}: the loss has no gradient at logps; likely .item(), .detach() or numpy")
    (slope,) = torch.autograd.grad(loss, logps, allow_unused=True)
    if slope is None:
        raise ValueError(f"--of: {own.name}: the loss does not depend on logps")
    if not slope.isfinite().all():
        on = f"on rewards {case.R[group].tolist()}"
        raise ValueError(f"--of: {own.name}: the gradient {on} is {slope.tolist()}, wanted finite numbers")
    return -slope.numpy()


def _called(own: Own, *arguments: torch.Tensor) -> torch.Tensor:
    """The function's result, checked: (G,) of a rule, () of a loss. Rewards are its last argument."""
    rewards = arguments[-1].clone()
    try:
        made = own.function(*arguments)
    except Exception as problem:
        said = f"{type(problem).__name__}: {problem}"
        raise ValueError(f"--of: {own.name} fails on rewards {rewards.tolist()}: {said}") from problem
    try:
        made = torch.as_tensor(made)
    except Exception as problem:
        raise ValueError(f"--of: {own.name} returns {type(made).__name__}, wanted numbers") from problem
    wanted = () if own.kind == "loss" else tuple(rewards.shape)
    if tuple(made.shape) != wanted:
        says = "one loss" if own.kind == "loss" else "one advantage an answer"
        raise ValueError(f"--of: {own.name} returns shape {tuple(made.shape)}, wanted {wanted}, {says}")
    if made.is_complex():
        raise ValueError(f"--of: {own.name} returns complex numbers")
    if not made.isfinite().all():
        likely = "; likely a division by a std of 0" if len(set(rewards.tolist())) == 1 else ""
        got = f"returns {made.tolist()} on rewards {rewards.tolist()}"
        raise ValueError(f"--of: {own.name} {got}, wanted finite numbers{likely}")
    return made.to(torch.float64)


class Verdict(NamedTuple):
    """The reader's line, the known ones beside it, and what it equals."""

    line: Line
    known: list[Line]
    same: list[str]  # group by group the same
    multiple: dict[str, float]  # group by group the same up to this factor
    same_mean: list[str]  # another estimator with the same expected gradient


def compared(own: Own, case: Case) -> Verdict:
    """The function's line beside the estimators of the table of advantages, and every estimator and row that it equals."""
    made, outcomes = gradients(own, case)
    truth = policy_gradient(case.p, case.R)
    line = line_of(own.name, made, outcomes.probabilities, truth)
    known, same, multiple, same_mean = [], [], {}, []
    for e in estimates(case, outcomes=outcomes):
        other = line_of(e.name, e.drawn.vectors, e.drawn.probabilities, truth, e.row)
        if e.name != e.row:
            known.append(replace(other, meaning=verdict(other, truth)))
        factor = factor_between(made, e.drawn.vectors)
        if factor is not None and abs(factor - 1) <= SAME:
            same.append(e.name)
        elif factor is not None:
            multiple[e.name] = factor
        elif np.abs(np.subtract(line.mean, other.mean)).max() <= SAME * np.abs(other.mean).max():
            same_mean.append(e.name)
    line = replace(line, meaning=verdict(line, truth))
    return Verdict(line, known, same, multiple, same_mean)


def factor_between(made: np.ndarray, known: np.ndarray) -> float | None:
    """c where made = c known in every group; None where there is no such number, or it would be 0."""
    if made.shape != known.shape:
        return None
    size, largest = float((known**2).sum()), float(np.abs(made).max())
    if not size or not largest:
        return 1.0 if size == largest == 0 else None
    factor = float((made * known).sum() / size)
    return factor if np.abs(made - factor * known).max() <= SAME * largest else None


def sentences(verdict_: Verdict) -> Iterator[str]:
    """What it equals, for a reader."""
    if verdict_.same:
        yield f"In every group the same as: {', '.join(verdict_.same)}."
    by_factor: dict[float, list[str]] = {}
    for name, factor in verdict_.multiple.items():
        by_factor.setdefault(float(f"{factor:.6g}"), []).append(name)
    for factor, names in by_factor.items():
        yield f"In every group {factor:g} times: {', '.join(names)}."
    if verdict_.same_mean:
        yield f"Another estimator with the same expected gradient: {', '.join(verdict_.same_mean)}."
    if not (verdict_.same or verdict_.multiple or verdict_.same_mean):
        yield "No known estimator is the same, in any group or in the mean."
