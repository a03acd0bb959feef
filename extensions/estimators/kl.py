"""The table of KL: each form as a value, in the loss, times the ratio and in the reward, on new and on old samples.

Forms and places are those of the objectives table (KLS); a new form there is a line here. A further use is an entry in USES.

d = log p - log r at the sampled answer, p the policy that learns, r the reference, b the policy that sampled; k(d) an
estimate with slope k'(d). What one answer contributes to the gradient of the loss, with score s = d log p / d logits:

    in the loss        k'(d) s              the sample is held, and carries no gradient of its own
    times the ratio    rho (k'(d) + k(d)) s    rho = p / b, gradient through rho
    in the reward      rho k(log b - log r) s  the reward falls by k of the policy that sampled

The truth is d KL(p || r) / d logits = E_p[d s]. Hence, sample by sample while b = p: k2 in the loss = k1 in the reward = k3
times the ratio = d s, and k1 times the ratio = (d + 1) s. k3 in the loss is (1 - 1/e^d) s, whose mean is p - r: the gradient
of the other KL, KL(r || p).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from extensions.estimators import policy
from extensions.estimators.line import Line
from extensions.estimators.policy import Case, scores
from extensions.estimators.sequences import S1, Sequences
from extensions.estimators.through import QUIET, named, on_answers, only, told
from extensions.objectives import KLS, ROWS, Row

FORMS = tuple(form for form in KLS if form != "none")

# Where a cut is shown: small enough to cut something on a policy of three answers, beside what a trainer really sets.
LOG_CUT = 1.0
GAUSSIAN_SHIFTS = (0.1, 1.0)
NODES = 60  # of the quadrature; the integrands are exp(mu x) times polynomials


class Use(NamedTuple):
    """A place for an estimate: the fields of Row that say it, and a formula of what an answer contributes."""

    fields: dict[str, str]
    formula: str
    exact: bool  # whether the exact KL of all answers can stand there


USES: dict[str, Use] = {
    "in the loss": Use({"kl_place": "loss", "kl_weight": "none", "kl_gradient": "own"}, "k' s, sample held", True),
    "times the ratio": Use({"kl_place": "loss", "kl_weight": "ratio", "kl_gradient": "own"}, "rho (k' + k) s", True),
    "in the reward": Use({"kl_place": "reward"}, "rho k s", False),
    "as a score": Use({"kl_place": "loss", "kl_weight": "none", "kl_gradient": "score"}, "sg[k] s", False),
}


def kl_row(form: str, use: str, **fields) -> Row:
    """The choices of step 5 alone, coefficient 1, in front of a policy term that is 0."""
    # A KL in the reward reaches the gradient through the advantage, so there the baseline may not be "given".
    baseline = {"baseline": "none", "surrogate": "plain"} if use == "in the reward" else {}
    return Row("KL alone", **QUIET | {"kl": form, "kl_coef": 1.0} | USES[use].fields | baseline | fields)


def name_of(form: str, use: str) -> str | None:
    """The first row of the objectives table that has this KL at this place, against the reference, uncut."""
    plain = {"kl_anchor": "reference", "kl_tokens": "all", "kl_log_limit": np.inf, "kl_limit": np.inf}
    return named(kl=form, **USES[use].fields, **plain)


def _arrays(logps: np.ndarray, old: np.ndarray, ref: np.ndarray) -> dict[str, np.ndarray]:
    nothing = np.zeros(len(logps))
    return {"old_logps": old, "ref_logps": ref, "advantages": nothing, "rewards": nothing}


def contributions(row: Row, p: np.ndarray, b: np.ndarray, r: np.ndarray) -> np.ndarray:
    """(K, K): what each answer contributes to d loss / d logits, drawn from b, through objectives.evaluate."""
    K, log_p, log_r = len(p), np.log(p), np.log(r)
    logits = {"logits": np.tile(log_p, (K, 1, 1)), "ref_logits": np.tile(log_r, (K, 1, 1))}
    result = on_answers(row, log_p, **_arrays(log_p, np.log(b), log_r), **logits)
    made = result.dloss_dlogps.numpy() * scores(p)
    return made if result.dloss_dlogits is None else made + result.dloss_dlogits[:, 0].numpy()


def values(form: str, p: np.ndarray, r: np.ndarray) -> np.ndarray:
    """(K,): the estimate at each answer, as objectives.evaluate reports it."""
    K, log_p, log_r = len(p), np.log(p), np.log(r)
    logits = {"logits": np.tile(log_p, (K, 1, 1)), "ref_logits": np.tile(log_r, (K, 1, 1))}
    return on_answers(kl_row(form, "in the loss"), log_p, **_arrays(log_p, log_p, log_r), **logits).kl.numpy().ravel()


def reference_of(case: Case) -> np.ndarray:
    """The case's reference; without one, the uniform distribution."""
    return np.full(len(case.p), 1 / len(case.p)) if case.r is None else case.r


def value_lines(case: Case) -> list[Line]:
    """The estimate as a number to log: against KL(p || r), on samples of p and on samples of other policies."""
    p, r = case.p, reference_of(case)
    truth = np.array([policy.kl(p, r)])
    samplers = {"": p, ", samples of the reference": r} | {f", {name}": b for name, b in old_samples(case).items()}
    made = []
    for where, b in samplers.items():
        for form in FORMS:
            row, of_form = name_of(form, "in the loss"), values(form, p, r)[:, None]
            formula = "" if form == "exact" else f"k = {KLS[form].formula}"
            made.append(told(f"{form}, value{where}", of_form, b, truth, row, formula))
    return made


def old_samples(case: Case) -> dict[str, np.ndarray]:
    """The policy that sampled where it is not p: the case's, or the uniform one."""
    if case.behaviour is not None:
        return {"samples of b": case.b}
    return {"uniform samples": np.full(len(case.p), 1 / len(case.p))}


def gradient_lines(case: Case) -> list[Line]:
    """Every form at every place, against d KL(p || r), on samples of p and on old samples."""
    p, r = case.p, reference_of(case)
    truth, made = policy.kl_gradient(p, r), []
    for where, b in ({"": p} | {f", {name}": b for name, b in old_samples(case).items()}).items():
        for use, (_, formula, exact) in USES.items():
            for form in FORMS:
                if form == "exact" and not exact:
                    continue
                of_form = contributions(kl_row(form, use), p, b, r)
                made.append(told(f"{form} {use}{where}", of_form, b, truth, name_of(form, use), formula))
    return made


def clamped_lines(case: Case) -> list[Line]:
    """A cut of d or of k takes the gradient away exactly where the policy has gone furthest."""
    p, r = case.p, reference_of(case)
    truth, verl = policy.kl_gradient(p, r), ROWS["grpo_kl@verl-0.9.1"]
    made = []
    for name, row, cut in (
        ("k3 in the loss, as verl cuts", only(verl, "5", kl_coef=1.0), f"d +-{verl.kl_log_limit:g}, k {verl.kl_limit:g}"),
        (f"k2 in the loss, d in +-{LOG_CUT:g}", kl_row("k2", "in the loss", kl_log_limit=LOG_CUT), "no gradient where cut"),
        (f"k3 in the loss, d in +-{LOG_CUT:g}", kl_row("k3", "in the loss", kl_log_limit=LOG_CUT), "no gradient where cut"),
        (f"k1 in the reward, d in +-{LOG_CUT:g}", kl_row("k1", "in the reward", kl_log_limit=LOG_CUT), "cut value"),
    ):
        used = row.name if row.name in ROWS else None
        made.append(told(name, contributions(row, p, p, r), p, truth, used, cut))
    return made


# ------------------------------------------------------------------------------------------ whole answers


def sequence_contributions(row: Row, world: Sequences, reference: np.ndarray) -> np.ndarray:
    """(N, T V): what each answer contributes, on samples of the policy itself; reference rows (T, V)."""
    N = len(world.answers)
    logps, refs = world.logps, world.logps_under(reference)
    logits = {"logits": np.tile(np.log(world.p), (N, 1, 1)), "ref_logits": np.tile(np.log(reference), (N, 1, 1))}
    result = on_answers(row, logps, mask=world.mask, **_arrays(logps, logps, refs), **logits)
    made = world.gradients(result.dloss_dlogps.numpy())
    return made if result.dloss_dlogits is None else made + result.dloss_dlogits.numpy().reshape(N, -1)


def sequence_lines(world: Sequences = S1) -> list[Line]:
    """Answers of several tokens, uniform reference: a sum of token KLs has the right value and a part of the gradient.

    What an early token does to the states that follow is missing from every KL in the loss; a KL in the reward has it.
    """
    reference = np.full_like(world.p, 1 / world.p.shape[1])
    truth, made = world.kl_gradient(reference), []
    for form, use in (("exact", "in the loss"), ("k2", "in the loss"), ("k3", "in the loss"), ("k3", "times the ratio"),
                      ("k1", "in the reward"), ("k3", "in the reward")):  # fmt: skip
        of_form = sequence_contributions(kl_row(form, use), world, reference)
        part = "sum over the answer" if use == "in the reward" else "sum of token KLs"
        made.append(told(f"S1: {form} {use}", of_form, world.chances, truth, name_of(form, use), part))
    return made


# ------------------------------------------------------------------------------------------ Gaussians


class Spread(NamedTuple):
    """An estimate's bias and standard deviation, both divided by the KL."""

    bias: float
    deviation: float


def schulman(mu: float) -> dict[str, Spread]:
    """Schulman's table (2020) in closed form: samples of q = N(0, 1), KL(q || p) for p = N(mu, 1), KL = mu^2 / 2.

    d = log q - log p = mu^2 / 2 - mu x is N(mu^2 / 2, mu^2), and exp(-d) = p / q has variance exp(mu^2) - 1. So
    sd k1 = mu;  k2 has mean (mu^4 / 4 + mu^2) / 2 and variance (2 mu^4 + mu^6) / 4;  var k3 = exp(mu^2) - 1 - mu^2.
    """
    kl = mu**2 / 2
    return {
        "k1": Spread(0.0, mu / kl),
        "k2": Spread(((mu**4 / 4 + mu**2) / 2 - kl) / kl, (2 * mu**4 + mu**6) ** 0.5 / 2 / kl),
        "k3": Spread(0.0, (np.expm1(mu**2) - mu**2) ** 0.5 / kl),
    }


def gaussian_lines() -> list[Line]:
    """The same table from the estimators themselves, by quadrature: each value over the KL, so that the truth is 1."""
    x, weights = np.polynomial.hermite_e.hermegauss(NODES)
    chances = weights / weights.sum()
    made = []
    for mu in GAUSSIAN_SHIFTS:
        d = mu**2 / 2 - mu * x
        for form in schulman(mu):
            k = KLS[form](torch.from_numpy(d))[0].numpy() / (mu**2 / 2)
            name, row = f"N(0,1) | N({mu:g},1): {form}, value / KL", name_of(form, "in the loss")
            line = told(name, k[:, None], chances, [1.0], row)
            deviation = f"standard deviation {line.trace_cov**0.5:.4f} KL"
            made.append(replace(line, meaning=f"{line.meaning}; {deviation}"))
    return made


def table(case: Case) -> list[Line]:
    """Values and gradients of one sampled answer; a mean of G has 1/G of the variance. Without a reference it is uniform."""
    return value_lines(case) + gradient_lines(case) + clamped_lines(case) + sequence_lines() + gaussian_lines()
