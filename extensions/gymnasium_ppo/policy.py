"""Networks and distributions: an actor and a critic of two hidden layers, categorical or Gaussian actions. Float64.

A new kind of action is one class beside `Categorical` and `Gaussian`.

All parameters lie in one flat vector, and the layers are views of it: the optimizer moves one tensor, and a method that needs
the whole vector (a natural gradient, a checkpoint) finds it in `Policy.flat`. The actor's part comes first.

Letters: D numbers of an observation, A choices or numbers of an action; `[..., X]` any leading axes.
"""

from __future__ import annotations

import math
from typing import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_lab import action_logps, categorical_kl

HIDDEN_GAIN, ACTOR_GAIN, CRITIC_GAIN = math.sqrt(2), 0.01, 1.0
"""Gains of the orthogonal weights; biases start at 0 (as in the PPO2 baselines, stable-baselines3 and CleanRL)."""


class Categorical:
    """Softmax over A choices. Its parameters are the logits [..., A]."""

    continuous = False

    def __init__(self, size: int):
        self.outputs = size
        self.extra = 0  # parameters that no observation moves

    def parameters(self, outputs: Tensor, extra: Tensor) -> Tensor:
        return outputs

    def logps(self, parameters: Tensor, actions: Tensor) -> Tensor:
        """log p(a) [...] of integer actions [...]. Gradient: to the parameters."""
        return action_logps(parameters, actions)

    def entropy(self, parameters: Tensor) -> Tensor:
        """-sum_a p_a log p_a [...]. Gradient: to the parameters."""
        logps = parameters.log_softmax(dim=-1)
        return -(logps.exp() * logps).sum(dim=-1)

    def kl(self, old: Tensor, current: Tensor) -> Tensor:
        """Exact KL(old || current) [...]. Gradient: to the first argument only, as rl_lab.categorical_kl."""
        return categorical_kl(old, current)

    def noise(self, rows: int, count: int, generator: torch.Generator) -> np.ndarray:
        """Gumbel noise [rows, count, A]: the largest of logit + noise is a sample of the softmax."""
        uniform = torch.rand(rows, count, self.outputs, generator=generator, dtype=torch.float64)
        return (-(-uniform.clamp_min(1e-300).log()).log()).numpy()

    def act(self, outputs: np.ndarray, extra: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        """Actions [N] from the network's outputs [N, A]; without noise the likeliest."""
        return (outputs if noise is None else outputs + noise).argmax(axis=-1)


class Gaussian:
    """Independent normal numbers. Its parameters are mean and log standard deviation [..., 2 A]; the latter is one vector that
    no observation moves. The log-probability is that of the raw action: clipping to the limits belongs to the environment."""

    continuous = True

    def __init__(self, size: int):
        self.outputs = self.extra = size

    def parameters(self, outputs: Tensor, extra: Tensor) -> Tensor:
        return torch.cat([outputs, extra.expand_as(outputs)], dim=-1)

    def logps(self, parameters: Tensor, actions: Tensor) -> Tensor:
        """sum_i -((a_i - m_i) / s_i)^2 / 2 - log s_i - log(2 pi) / 2 [...], actions [..., A]. Gradient: to the parameters."""
        mean, log_std = parameters.chunk(2, dim=-1)
        scaled = (actions - mean) * (-log_std).exp()
        return (-0.5 * scaled.square() - log_std).sum(dim=-1) - 0.5 * math.log(2 * math.pi) * self.outputs

    def entropy(self, parameters: Tensor) -> Tensor:
        """sum_i log s_i + (1 + log(2 pi)) / 2 [...]. Gradient: to the parameters."""
        return parameters[..., self.outputs :].sum(dim=-1) + 0.5 * (1 + math.log(2 * math.pi)) * self.outputs

    def kl(self, old: Tensor, current: Tensor) -> Tensor:
        """Exact KL(old || current) [...]: sum_i log(s/s0) + (s0^2 + (m0 - m)^2) / (2 s^2) - 1/2. Gradient: to both."""
        (old_mean, old_log_std), (mean, log_std) = old.chunk(2, dim=-1), current.chunk(2, dim=-1)
        variance = (2 * log_std).exp()
        terms = log_std - old_log_std + ((2 * old_log_std).exp() + (old_mean - mean).square()) / (2 * variance) - 0.5
        return terms.sum(dim=-1)

    def noise(self, rows: int, count: int, generator: torch.Generator) -> np.ndarray:
        """Standard normal numbers [rows, count, A]."""
        return torch.randn(rows, count, self.outputs, generator=generator, dtype=torch.float64).numpy()

    def act(self, outputs: np.ndarray, extra: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        """Raw actions [N, A] from the means [N, A]; without noise the means."""
        return outputs if noise is None else outputs + np.exp(extra) * noise


class Policy:
    """Actor and critic with separate networks D -> hidden -> hidden -> outputs, tanh between.

    actor_leaves, critic_leaves: the tensors that gradients are asked for, in the order of `flat`: weight and bias of each
    layer, then (Gaussian) the log standard deviation as the last of the actor's.
    """

    def __init__(self, observation_size: int, action_size: int, continuous: bool, hidden: int, generator: torch.Generator):
        self.distribution = (Gaussian if continuous else Categorical)(action_size)
        extra = [(self.distribution.extra,)] if continuous else []
        actor = layer_shapes(observation_size, hidden, self.distribution.outputs) + extra
        critic = layer_shapes(observation_size, hidden, 1)
        sizes = [math.prod(shape) for shape in actor + critic]
        self.flat = torch.zeros(sum(sizes), dtype=torch.float64)
        leaves = [part.view(shape) for part, shape in zip(self.flat.split(sizes), actor + critic)]
        for network, last_gain in ((leaves[:6], ACTOR_GAIN), (leaves[len(actor) :], CRITIC_GAIN)):
            for weight, gain in zip(network[0:6:2], (HIDDEN_GAIN, HIDDEN_GAIN, last_gain)):
                weight.copy_(orthogonal(weight.shape, gain, generator))
        # The views in NumPy share the memory, too: acting needs no autograd, and a call of NumPy costs a third of torch's.
        self._numpy = [leaf.numpy() for leaf in leaves[: len(actor)]]
        self.leaves = [leaf.requires_grad_() for leaf in leaves]
        self.actor_leaves, self.critic_leaves = self.leaves[: len(actor)], self.leaves[len(actor) :]

    def parameters_at(self, observations: Tensor) -> Tensor:
        """The distribution's parameters [..., X] at observations [..., D]. Gradient: to actor_leaves."""
        return self.distribution.parameters(network(observations, self.actor_leaves), self.actor_leaves[-1])

    def values(self, observations: Tensor) -> Tensor:
        """V(s) [...] at observations [..., D]. Gradient: to critic_leaves."""
        return network(observations, self.critic_leaves).squeeze(-1)

    def act(self, observations: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        """Actions at observations [N, D]; `noise` is one row of distribution.noise, None for the likeliest action."""
        w1, b1, w2, b2, w3, b3, *extra = self._numpy
        outputs = np.tanh(np.tanh(observations @ w1.T + b1) @ w2.T + b2) @ w3.T + b3
        return self.distribution.act(outputs, extra[0] if extra else None, noise)


def layer_shapes(inputs: int, hidden: int, outputs: int) -> list[tuple[int, ...]]:
    """Weight and bias of three layers."""
    return [(hidden, inputs), (hidden,), (hidden, hidden), (hidden,), (outputs, hidden), (outputs,)]


def network(inputs: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    """Two hidden layers of tanh, then a linear one: [..., D] -> [..., outputs]."""
    w1, b1, w2, b2, w3, b3 = leaves[:6]
    return F.linear(torch.tanh(F.linear(torch.tanh(F.linear(inputs, w1, b1)), w2, b2)), w3, b3)


def orthogonal(shape: Sequence[int], gain: float, generator: torch.Generator) -> Tensor:
    """A random matrix with orthonormal rows or columns, whichever are fewer, times gain."""
    rows, columns = shape
    normal = torch.randn(max(rows, columns), min(rows, columns), generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(normal)
    q = q * r.diagonal().sign()  # makes the draw uniform over the orthogonal matrices
    return gain * (q if rows >= columns else q.T)
