"""A DPO step in which chosen and rejected both lose probability: three answers whose logits share features.

Logits are phi theta, phi [3, F] the features of the answers. Along one step of DPO theta moves by a positive number c
times phi_c - phi_r (c chosen, r rejected), so that

    d log p_i / dc = (phi_i - E_p phi) . (phi_c - phi_r)

On a table phi is the identity, and this is 1 - p_c + p_r > 0 for the chosen answer and -(1 + p_c - p_r) < 0 for the
rejected: the chosen one always gains. With shared features it need not. A new example is an entry in EXAMPLES.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from extensions import objectives
from extensions.estimators.line import Line, line_of
from extensions.estimators.policy import scores
from extensions.objectives import PREFERENCE_ROWS, PreferenceRow

START = (0.4, 0.3, 0.3)
CHOSEN, REJECTED = 0, 1
STEPS, RATE = 20, 0.5


@dataclass(frozen=True)
class Example:
    """Features of three answers, (3, F), and what they show."""

    features: tuple[tuple[float, ...], ...]
    shows: str

    @property
    def phi(self) -> np.ndarray:
        return np.array(self.features)


EXAMPLES: dict[str, Example] = {
    "table": Example(((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)), "chosen rises, rejected falls, whatever p"),
    "both fall": Example(((1.0, 0.0), (1.2, 0.1), (0.0, 1.0)), "chosen and rejected fall, the third gains"),
    "both rise": Example(((1.0, 0.0), (0.9, 0.3), (0.0, 1.0)), "chosen and rejected rise, the third loses"),
}


def derivative(phi: np.ndarray, p: np.ndarray, chosen: int = CHOSEN, rejected: int = REJECTED) -> np.ndarray:
    """(3,): d log p_i per unit of step along phi_chosen - phi_rejected."""
    return (phi - p @ phi) @ (phi[chosen] - phi[rejected])


def parameters_for(phi: np.ndarray, p: np.ndarray) -> np.ndarray:
    """theta (F,) with softmax(phi theta) = p, the shortest one. Raises ValueError where these features cannot give p."""
    centred = phi - phi.mean(axis=0)
    wanted = np.log(p) - np.log(p).mean()
    theta = np.linalg.lstsq(centred, wanted, rcond=None)[0]
    if not np.allclose(centred @ theta, wanted, atol=1e-9):
        raise ValueError(f"features of shape {phi.shape} cannot give the probabilities {p}")
    return theta


def run(
    phi: np.ndarray, p: np.ndarray, steps: int = STEPS, rate: float = RATE, row: PreferenceRow = PREFERENCE_ROWS["dpo"]
) -> np.ndarray:
    """(steps + 1, 3): the probabilities before and after each SGD step on one pair, reference p, on the engine's loss."""
    features = torch.from_numpy(phi)
    theta = torch.from_numpy(parameters_for(phi, p)).requires_grad_()
    reference, pair = torch.from_numpy(np.log(p)), [CHOSEN, REJECTED]
    made = [p]
    for _ in range(steps):
        logps = (features @ theta).log_softmax(-1)[pair].unsqueeze(1)
        data = objectives.make_preferences(
            logps=logps.detach(), mask=torch.ones(2, 1, dtype=torch.bool), ref_logps=reference[pair].unsqueeze(1)
        )
        loss = objectives.loss_to_backpropagate(objectives.evaluate_preference(row, data), logps)
        theta = (theta - rate * torch.autograd.grad(loss, theta)[0]).detach().requires_grad_()
        made.append((features @ theta).softmax(-1).detach().numpy())
    return np.array(made)


def one_step(phi: np.ndarray, p: np.ndarray, row: PreferenceRow = PREFERENCE_ROWS["dpo"]) -> np.ndarray:
    """(3,): d log p_i / d rate of a step of the row's loss from the reference p, over the loss's own slope in the margin.

    For a loss of the margin this is `derivative`; here it comes from the gradient that evaluate_preference gives.
    """
    log_p = np.log(p)
    data = objectives.make_preferences(
        chosen_logps=log_p[[CHOSEN]], rejected_logps=log_p[[REJECTED]],
        ref_chosen_logps=log_p[[CHOSEN]], ref_rejected_logps=log_p[[REJECTED]],
    )  # fmt: skip
    slope = -objectives.evaluate_preference(row, data).dloss_dscores.numpy()
    step_of_theta = slope @ (scores(p)[[CHOSEN, REJECTED]] @ phi) / slope[0]
    return scores(p) @ phi @ step_of_theta


def lines() -> list[Line]:
    """d log p of the three answers in one DPO step: on a table, and with shared features. The truth is `derivative`.

    The meaning ends with where STEPS steps of size RATE have taken START.
    """
    p = np.array(START)
    made = []
    for name, example in EXAMPLES.items():
        after = "/".join(f"{x:.3f}" for x in run(example.phi, p)[-1])
        line = line_of(f"d log p in one DPO step: {name}", one_step(example.phi, p)[None], [1.0],
                       derivative(example.phi, p), "dpo")  # fmt: skip
        made.append(replace(line, meaning=f"{example.shows}; {STEPS} steps: {after}"))
    return made
