"""Every formula of the lab against an independent, slow definition.

One TestCase per atom, in the order of rl_lab.py; then the optimiser, the task and the three methods of rl_lab.py, the
chain, the token objectives, and the curves of plot_results.py. Test names say what kind of proof they are:

    definition   the docstring's formula in plain Python: double sums, loops, enumeration, the math module
    gradient     finite differences in float64, and which arguments must not receive a gradient
    identity     what must not change, or must change in a known way
    extremes     logits of +-1e4, -inf on forbidden actions, NaN in unused slots, float32
    refusals     every bad input that the docstring promises to refuse, with the words of the error

A test with a `draw` runs on many random shapes; a failure prints the seed, and Draw(seed) repeats it.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
import re
import statistics
import subprocess
import sys
import unittest
import warnings
from fractions import Fraction
from pathlib import Path
from typing import Callable

import numpy as np
import torch
from torch import Tensor

import plot_results
import ppo_chain
import rl_lab
import token_objectives
from rl_lab import (
    Adam,
    BanditSettings,
    Pairs,
    action_logps,
    categorical_kl,
    clip_fraction,
    clipped_policy_loss,
    clipped_value_loss,
    descend,
    dpo_loss,
    evaluate,
    gae,
    group_advantages,
    groups_without_spread,
    importance_ratio,
    kl_estimates,
    make_task,
    preference_probability,
    reinforce_loss,
    response_logps,
    response_token_logps,
    reuse_batch,
    td_residuals,
    zero_variance_probability,
)
from test_rl_lab import Case, f64, flags, leaf, setUpModule, tearDownModule  # noqa: F401  (the last two: one thread)
from token_objectives import mean_over_tokens, mean_per_response

INF, NAN = math.inf, math.nan
BOTH = (torch.float64, torch.float32)
HALF = (torch.float16, torch.bfloat16)

# ------------------------------------------------------------------------------------------ tools


class Draw:
    """Random shapes and numbers from one local generator."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def whole(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def number(self, low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), dtype=torch.float64, generator=self.generator).item()

    def shape(self) -> tuple[int, ...]:
        """Zero to two leading axes."""
        return tuple(self.whole(1, 4) for _ in range(self.whole(0, 2)))

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def flags(self, *shape: int, share: float = 0.5) -> Tensor:
        return torch.rand(shape, generator=self.generator) < share

    def below(self, bound: int, *shape: int) -> Tensor:
        return torch.randint(bound, shape, generator=self.generator)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator)

    def mask(self, rows: int, slots: int) -> Tensor:
        """At least one slot set in each row."""
        mask = self.flags(rows, slots)
        mask[torch.arange(rows), self.below(slots, rows)] = True
        return mask


def on_random_cases(count: int) -> Callable:
    """Run a test method `count` times, each time with a Draw of its own."""

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def run(self: unittest.TestCase) -> None:
            for seed in range(count):
                with self.subTest(seed=seed):
                    test(self, Draw(seed))

        return run

    return decorate


def elementwise(rule: Callable[..., float], *tensors: Tensor) -> Tensor:
    """`rule` on plain floats, element by element."""
    numbers = [rule(*row) for row in zip(*(tensor.flatten().tolist() for tensor in tensors))]
    return torch.tensor(numbers, dtype=torch.float64).reshape(tensors[0].shape)


def rowwise(rule: Callable, *tensors: Tensor) -> Tensor:
    """`rule` on plain lists, one list per tensor holding its last axis; it returns a number or a list."""
    rows = zip(*(tensor.reshape(-1, tensor.shape[-1]).tolist() for tensor in tensors))
    results = torch.tensor([rule(*row) for row in rows], dtype=torch.float64)
    return results.reshape(tensors[0].shape[:-1] + results.shape[1:])


def softmax(logits: list[float]) -> list[float]:
    """exp(z_a) / sum_b exp(z_b), for numbers that need no care."""
    weights = [math.exp(z) for z in logits]
    return [weight / sum(weights) for weight in weights]


class OracleCase(Case):
    def assertGradient(self, function: Callable, *inputs: Tensor) -> None:
        """Autograd equals central differences for every output and every input."""
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        self.assertTrue(torch.autograd.gradcheck(function, leaves, eps=1e-6, atol=1e-7, rtol=1e-5))

    def assertGradientOnlyTo(self, names: str, atom: Callable, **arguments) -> None:
        """Of all floating arguments, just those in `names` are connected to the result."""
        tracked = {
            name: value.detach().clone().requires_grad_()
            for name, value in arguments.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        results = atom(**{**arguments, **tracked})
        connected = [r.sum() for r in (results if isinstance(results, tuple) else (results,)) if r.requires_grad]
        gradients = (
            torch.autograd.grad(sum(connected), tracked.values(), allow_unused=True) if connected else [None] * len(tracked)
        )
        reached = {name for name, gradient in zip(tracked, gradients) if gradient is not None}
        self.assertEqual(reached, set(names.split()))

    def assertRefusesWrongTensors(self, atom: Callable, **good) -> None:
        """Another type, another kind of number, or [..., 1] in any one tensor argument is refused by name."""
        atom(**good)
        tensors = {name: value for name, value in good.items() if isinstance(value, Tensor)}
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                kind, others = "floating", (tensor.long(), tensor.bool(), tensor.to(torch.complex64))
            elif tensor.dtype == torch.bool:
                kind, others = "bool", (tensor.long(), tensor.double())
            else:
                kind, others = "integer", (tensor.double(), tensor.bool(), tensor.to(torch.complex64))
            for other in (tensor.tolist(), None, *others):
                got = other.dtype if isinstance(other, Tensor) else type(other).__name__
                with self.subTest(argument=name, got=got):
                    article = "an" if kind == "integer" else "a"
                    noun = "dtype" if isinstance(other, Tensor) else "torch.Tensor"
                    with self.assertRaisesRegex(TypeError, rf"^{name}: got (dtype )?{got}, wanted {article} {kind} {noun}"):
                        atom(**{**good, name: other})
            for other, words in self.tensors_without_plain_numbers(tensor):
                with self.subTest(argument=name, got=words), self.assertRaisesRegex(TypeError, rf"^{name}: got .*{words}"):
                    atom(**{**good, name: other})
            if len(tensors) > 1:
                shape_words = rf"(?=.*\b{name}\b)(shapes differ: got|\w+: got shape) .*wanted"
                with self.subTest(argument=name, got="[..., 1]"), self.assertRaisesRegex(ValueError, shape_words):
                    atom(**{**good, name: tensor.unsqueeze(-1)})

    @staticmethod
    def tensors_without_plain_numbers(tensor: Tensor) -> list[tuple[Tensor, str]]:
        """The same tensor in forms that torch has and arithmetic has not, each with a word of the refusal."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch announces changes of sparse and of quantized tensors
            others = [(tensor.to("meta"), "a meta tensor"), (tensor.to_sparse(), "a sparse_coo tensor")]
            others.append((torch.nested.nested_tensor([tensor.reshape(-1)]), "a nested tensor"))
            for name in ("float8_e4m3fn", "float8_e5m2"):
                if hasattr(torch, name):
                    others.append((tensor.to(getattr(torch, name)), name))
            quantized = torch.quantize_per_tensor(tensor.float().reshape(tensor.shape), 1.0, 0, torch.quint8)
        return [*others, (quantized, "quint8")]

    def assertRefused(self, atom: Callable, good: dict, *bad: tuple[dict, type[Exception], str]) -> None:
        """`good` is accepted; with each of the changes in `bad` it is refused with that error and those words."""
        atom(**good)
        for changes, error, words in bad:
            with self.subTest(refused=words), self.assertRaisesRegex(error, words):
                atom(**{**good, **changes})

    def assertRefusesNumbers(self, atom: Callable, good: dict, name: str, wanted: str, outside: tuple[float, ...]) -> None:
        """Numbers outside the range, non-finite ones, and what is no plain number; `wanted`: the range in words."""
        no_float = ({name: 10**400}, ValueError, rf"^{name}: got a number that no float holds, wanted a finite")
        self.assertRefused(atom, good, no_float)
        no_numbers = ("0.5", True, None, f64(0.5), 1j)
        self.assertRefused(
            atom,
            good,
            *(
                ({name: x}, ValueError, rf"^{name}: got {x}, wanted a finite number {wanted}$")
                for x in (*outside, NAN, INF, -INF)
            ),
            *(({name: x}, TypeError, rf"^{name}: got {type(x).__name__}, wanted a plain number") for x in no_numbers),
        )


# ------------------------------------------------------------------------------------------ atoms: policy gradient


class ActionLogps(OracleCase):
    def draw(self, draw: Draw) -> tuple[Tensor, Tensor]:
        shape, actions = draw.shape(), draw.whole(1, 6)
        return draw.normal(*shape, actions, scale=3), draw.below(actions, *shape)

    @on_random_cases(20)
    def test_definition(self, draw):
        logits, actions = self.draw(draw)
        wanted = torch.tensor(
            [
                math.log(softmax(row)[a])
                for row, a in zip(logits.reshape(-1, logits.shape[-1]).tolist(), actions.flatten().tolist())
            ],
            dtype=torch.float64,
        ).reshape(actions.shape)
        self.assertClose(action_logps(logits, actions), wanted)
        for dtype in (torch.int32, torch.uint8):
            self.assertClose(action_logps(logits, actions.to(dtype)), wanted)
        single = action_logps(logits.float(), actions)
        self.assertEqual(single.dtype, torch.float32)
        self.assertClose(single, wanted, atol=1e-5)

    @on_random_cases(10)
    def test_gradient(self, draw):
        logits, actions = self.draw(draw)
        self.assertGradient(lambda z: action_logps(z, actions), logits)
        self.assertGradientOnlyTo("logits", action_logps, logits=logits, actions=actions)

    @on_random_cases(10)
    def test_identity(self, draw):
        count, rows = draw.whole(2, 6), draw.whole(1, 5)
        logits, actions = draw.normal(rows, count, scale=3), draw.below(count, rows)
        logp = action_logps(logits, actions)
        all_actions = torch.stack([action_logps(logits, torch.full((rows,), a)) for a in range(count)])
        self.assertClose(all_actions.exp().sum(dim=0), [1.0] * rows)  # probabilities of all actions
        self.assertClose(action_logps(logits + draw.normal(rows, 1), actions), logp)  # a constant per row
        order = draw.order(count)
        self.assertClose(action_logps(logits[:, order], order.argsort()[actions]), logp)  # actions renamed
        order = draw.order(rows)
        self.assertClose(action_logps(logits[order], actions[order]), logp[order])  # rows in another order

    def test_extremes(self):
        for dtype in BOTH:
            with self.subTest(dtype=dtype):
                logits = torch.tensor([[1e4, -1e4], [-1e4, 1e4], [1e4, 1e4]], dtype=dtype, requires_grad=True)
                logp = action_logps(logits, torch.tensor([1, 1, 0]))
                self.assertClose(logp, [-2e4, 0, -math.log(2)], atol=1e-6)
                # d logp / d z = one_hot - p; p = (1, 0), (0, 1), (1/2, 1/2).
                self.assertClose(torch.autograd.grad(logp.sum(), logits)[0], [[-1, 1], [0, 0], [0.5, -0.5]])
        with self.subTest("a forbidden action takes no probability and receives no gradient"):
            logits = leaf(0.3, -INF, 1.2)
            logp = action_logps(logits, torch.tensor(2))
            self.assertClose(logp, math.log(softmax([0.3, 1.2])[1]))
            gradient = torch.autograd.grad(logp, logits)[0]
            self.assertClose(gradient, [-softmax([0.3, 1.2])[0], 0, softmax([0.3, 1.2])[0]])
            self.assertEqual(action_logps(logits, torch.tensor(1)).item(), -INF)
        with self.subTest("no rows"):
            self.assertEqual(action_logps(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)).shape, (0,))

    def test_extremes_every_whole_number_dtype(self):
        """Also where the number of actions is none of the dtype's own: 300 in uint8 would be 44."""
        largest = dict(uint8=200, int8=100, int16=299, uint16=299, uint32=299, uint64=299)
        for name, action in largest.items():
            if hasattr(torch, name):
                with self.subTest(name):
                    actions = torch.tensor([action]).to(getattr(torch, name))
                    self.assertClose(action_logps(torch.zeros(1, 300).double(), actions), [-math.log(300)])
                    self.assertEqual(response_token_logps(
                        torch.zeros(1, 2, 300), torch.tensor([[0, action]]).to(getattr(torch, name)), flags([0, 1]).bool()
                    )[0].shape, (1, 1))  # fmt: skip

    def test_refusals(self):
        good = {"logits": torch.zeros(1, 2, 3), "actions": torch.tensor([[0, 2]])}
        self.assertRefusesWrongTensors(action_logps, **good)
        self.assertRefused(
            action_logps,
            good,
            (
                {"logits": f64(0).squeeze()},
                ValueError,
                r"^logits: got shape \(\), wanted at least 1 on the last axis, the actions",
            ),
            ({"logits": torch.zeros(1, 2, 0)}, ValueError, r"^logits: got shape \(1, 2, 0\), wanted at least 1"),
            (
                {"actions": torch.tensor([[0]])},
                ValueError,
                r"^actions: got shape \(1, 1\), wanted \(1, 2\), the shape of logits",
            ),
            ({"actions": torch.tensor([[0, 3]])}, ValueError, "^actions: got numbers from 0 to 3, wanted 0 to 2"),
            ({"actions": torch.tensor([[-1, 0]])}, ValueError, "^actions: got numbers from -1 to 0, wanted 0 to 2"),
            *(
                ({"logits": torch.tensor([[[0.0, 0, 0], row]])}, ValueError, r"^logits: the row at index \[0, 1\] is no")
                for row in ([NAN, 0, 0], [INF, 0, 0], [-INF, -INF, -INF])
            ),
        )


class ReinforceLoss(OracleCase):
    @on_random_cases(10)
    def test_definition_and_gradient(self, draw):
        shape = draw.shape()
        logp, returns = draw.normal(*shape), draw.normal(*shape)
        self.assertClose(reinforce_loss(logp, returns), elementwise(lambda l, r: -l * r, logp, returns))
        self.assertGradient(lambda l: reinforce_loss(l, returns), logp)
        self.assertGradientOnlyTo("logp", reinforce_loss, logp=logp, returns=returns)

    @on_random_cases(10)
    def test_identity_its_expectation_is_minus_the_policy_gradient(self, draw):
        count = draw.whole(2, 6)
        logits, rewards, baseline = draw.normal(count).requires_grad_(), draw.normal(count), draw.number(-5, 5)
        expected_return = sum(p * r for p, r in zip(logits.softmax(-1), rewards))
        wanted = -torch.autograd.grad(expected_return, logits, retain_graph=True)[0]
        for returns in (rewards, rewards - baseline):
            # Every action of the policy, weighted by its probability, in place of samples.
            losses = reinforce_loss(action_logps(logits.expand(count, count), torch.arange(count)), returns)
            weighted = (logits.softmax(-1).detach() * losses).sum()
            self.assertClose(torch.autograd.grad(weighted, logits, retain_graph=True)[0], wanted)

    def test_extremes(self):
        for dtype in BOTH:
            logp = torch.tensor([-1e4, -1e4], dtype=dtype, requires_grad=True)
            loss = reinforce_loss(logp, torch.tensor([1e4, -1e4], dtype=dtype))
            self.assertClose(loss, [1e8, -1e8])
            self.assertClose(torch.autograd.grad(loss.sum(), logp)[0], [-1e4, 1e4])

    def test_refusals(self):
        good = dict(logp=f64(-1, -2), returns=f64(1, 2))
        self.assertRefusesWrongTensors(reinforce_loss, **good)
        self.assertRefused(
            reinforce_loss,
            good,
            ({"returns": f64(1, NAN)}, ValueError, r"^returns: got nan at index \[1\]"),
            ({"logp": f64(-1, NAN)}, ValueError, r"^logp, returns: got logp nan, returns 2.0 at index \[1\]"),
            # An action of probability 0 cannot have been sampled: -inf * 0 is no loss.
            (dict(logp=f64(-1, -INF), returns=f64(1, 0)), ValueError, r"got logp -inf, returns 0.0 at index \[1\]"),
        )


# ------------------------------------------------------------------------------------------ atoms: time


class Steps:
    """A random series [..., T] of steps with both flags; what follows a termination is NaN, since nobody may read it."""

    def __init__(self, draw: Draw, shape: tuple[int, ...], steps: int | None = None):
        shape = (*shape, steps or draw.whole(1, 9))
        self.rewards, self.values = draw.normal(*shape), draw.normal(*shape)
        self.terminated = draw.flags(*shape, share=0.25)
        self.boundary = self.terminated | draw.flags(*shape, share=0.25)
        self.next_values = draw.normal(*shape).masked_fill(self.terminated, NAN)
        self.gamma, self.lam = draw.number(0, 1), draw.number(0, 1)

    def arguments(self) -> dict:
        return dict(vars(self))


def td_definition(reward: float, value: float, next_value: float, terminated: bool, gamma: float) -> float:
    return reward + (0.0 if terminated else gamma * next_value) - value


class TdResiduals(OracleCase):
    @on_random_cases(15)
    def test_definition(self, draw):
        steps = Steps(draw, draw.shape())
        tensors = steps.rewards, steps.values, steps.next_values, steps.terminated
        wanted = elementwise(lambda *numbers: td_definition(*numbers, steps.gamma), *tensors)
        self.assertClose(td_residuals(*tensors, steps.gamma), wanted)
        single = td_residuals(*(x.float() for x in tensors[:3]), steps.terminated, steps.gamma)
        self.assertEqual(single.dtype, torch.float32)
        self.assertClose(single, wanted, atol=1e-5)
        # gamma defaults to 1.
        self.assertClose(td_residuals(*tensors), elementwise(lambda *numbers: td_definition(*numbers, 1.0), *tensors))

    @on_random_cases(5)
    def test_identity(self, draw):
        steps, shift = Steps(draw, (3,)), draw.number(-5, 5)
        tensors = [steps.rewards, steps.values, steps.next_values, steps.terminated]
        right = td_residuals(*tensors, steps.gamma)
        self.assertClose(td_residuals(steps.rewards + shift, *tensors[1:], steps.gamma), right + shift)
        # gamma 0 looks at no later value; gamma 1 does not see the height of the critic where nothing ended.
        self.assertClose(td_residuals(*tensors, 0.0), steps.rewards - steps.values)
        raised = td_residuals(steps.rewards, steps.values + shift, steps.next_values + shift, steps.terminated, 1.0)
        self.assertClose(raised, td_residuals(*tensors, 1.0) - shift * steps.terminated.double())
        for part in (slice(0, 1), slice(1, 3)):
            self.assertClose(td_residuals(*(x[part] for x in tensors), steps.gamma), right[part])

    def test_no_gradient(self):
        steps = Steps(Draw(0), (2,))
        arguments = {name: value for name, value in steps.arguments().items() if name not in ("boundary", "lam")}
        self.assertGradientOnlyTo("", td_residuals, **arguments)

    def test_refusals(self):
        good = dict(rewards=f64(0, 1), values=f64(0, 0), next_values=f64(0, 0), terminated=flags(0, 1))
        self.assertRefusesWrongTensors(td_residuals, **good)
        self.assertRefusesNumbers(td_residuals, good, "gamma", "of at least 0 and at most 1", (-0.1, 1.1))
        self.assertRefused(
            td_residuals,
            good,
            ({"rewards": f64(0, NAN)}, ValueError, r"^rewards: got nan at index \[1\].*failed reward computation"),
            ({"values": f64(INF, 0)}, ValueError, r"^values: got inf at index \[0\].*critic that has diverged"),
            ({"values": f64(0, NAN)}, ValueError, r"^values: got nan at index \[1\]"),
            ({"next_values": f64(NAN, 0)}, ValueError, r"^next_values: got nan at index \[0\].*unset value at a time limit"),
            ({name: f64(0).squeeze().to(value.dtype) for name, value in good.items()}, ValueError, "^rewards: .*time steps"),
            ({name: value[:0] for name, value in good.items()}, ValueError, r"^rewards: got shape \(0,\).*the time steps"),
            (dict(rewards=f64(0, 1e308), values=f64(0, -1e308)), ValueError, r"^td residual: got inf at index \[1\]"),
        )


class Gae(OracleCase):
    @staticmethod
    def double_sum(rewards, values, next_values, terminated, boundary, gamma, lam) -> list[float]:
        """A_t = sum_{k >= t} (gamma lam)^(k - t) delta_k, as far as the first boundary at or after t."""
        steps = range(len(rewards))
        deltas = [td_definition(*step, gamma) for step in zip(rewards, values, next_values, terminated)]
        return [sum((gamma * lam) ** (k - t) * deltas[k] for k in steps if k >= t and not any(boundary[t:k])) for t in steps]

    @on_random_cases(40)
    def test_definition(self, draw):
        steps = Steps(draw, draw.shape())
        tensors = steps.rewards, steps.values, steps.next_values, steps.terminated, steps.boundary
        wanted = rowwise(lambda *series: self.double_sum(*series, steps.gamma, steps.lam), *tensors)
        advantages, returns = gae(**steps.arguments())
        self.assertClose(advantages, wanted)
        self.assertClose(returns, wanted + steps.values)
        single = gae(*(x.float() for x in tensors[:3]), *tensors[3:], steps.gamma, steps.lam)
        for got, right in zip(single, (wanted, wanted + steps.values)):
            self.assertEqual(got.dtype, torch.float32)
            self.assertClose(got, right, atol=1e-4)
        # gamma defaults to 1 and lam to 0.95.
        self.assertClose(gae(*tensors)[0], rowwise(lambda *series: self.double_sum(*series, 1.0, 0.95), *tensors))

    @on_random_cases(6)
    def test_definition_of_long_series(self, draw):
        """The docstring's loop, row by row, for series that gae sums in blocks of steps, and for few rows."""
        for rows, count in (((20,), 150), ((3,), 150), ((20,), 64), ((20,), 65), ((2, 3), 20), ((4, 5), 20), ((4, 5), 3)):
            steps = Steps(draw, rows, count)

            def loop(rewards, values, next_values, terminated, boundary) -> list[float]:
                deltas = [td_definition(*step, steps.gamma) for step in zip(rewards, values, next_values, terminated)]
                sums, following = [], 0.0
                for delta, end in zip(reversed(deltas), reversed(boundary)):
                    following = delta + steps.gamma * steps.lam * (0 if end else following)
                    sums.insert(0, following)
                return sums

            tensors = steps.rewards, steps.values, steps.next_values, steps.terminated, steps.boundary
            with self.subTest(rows=rows, steps=count):
                advantages, returns = gae(**steps.arguments())
                wanted = rowwise(loop, *tensors)
                self.assertClose(advantages, wanted)
                self.assertClose(returns, wanted + steps.values)

    @on_random_cases(15)
    def test_definition_as_the_average_of_k_step_advantages(self, draw):
        """Equation 16 of the paper, for one episode: (1 - lam) sum_k lam^(k-1) A^(k), the longest one with what is left."""
        count, gamma, lam = draw.whole(1, 8), draw.number(0, 1), draw.number(0, 1)
        rewards, values, terminated = draw.normal(count).tolist(), draw.normal(count + 1).tolist(), draw.whole(0, 1)
        bootstrap = [*values[:-1], 0.0 if terminated else values[-1]]
        wanted = []
        for t in range(count):
            longest = count - t
            k_step = [
                sum(gamma**i * rewards[t + i] for i in range(k)) + gamma**k * bootstrap[t + k] - values[t]
                for k in range(1, longest + 1)
            ]
            weights = [(1 - lam) * lam ** (k - 1) for k in range(1, longest)] + [lam ** (longest - 1)]
            wanted.append(sum(weight * advantage for weight, advantage in zip(weights, k_step)))
        last = torch.arange(count) == count - 1
        got, _ = gae(f64(*rewards), f64(*values[:-1]), f64(*values[1:]), last & bool(terminated), last, gamma, lam)
        self.assertClose(got, wanted)

    @on_random_cases(15)
    def test_identity_limits(self, draw):
        steps = Steps(draw, draw.shape())
        arguments = steps.arguments()
        one_step = {name: value for name, value in arguments.items() if name not in ("boundary", "lam")}
        self.assertClose(gae(**{**arguments, "lam": 0.0})[0], td_residuals(**one_step))
        self.assertClose(gae(**{**arguments, "gamma": 0.0})[1], steps.rewards)
        everywhere = {**arguments, "boundary": torch.ones_like(steps.boundary)}
        self.assertClose(gae(**everywhere)[0], td_residuals(**one_step))
        # lam 1: the discounted return, with the last next_value where the episode was only cut, whatever the critic says.
        steps = Steps(draw, (), steps=7)
        values, ends = steps.values.tolist(), steps.boundary.tolist()
        next_values = [steps.next_values[t].item() if ends[t] or t == 6 else values[t + 1] for t in range(7)]
        discounted, following = [0.0] * 7, 0.0
        for t in reversed(range(7)):
            after = (0.0 if steps.terminated[t] else next_values[t]) if ends[t] or t == 6 else following
            discounted[t] = following = steps.rewards[t].item() + steps.gamma * after
        arguments = {**steps.arguments(), "next_values": f64(*next_values), "lam": 1.0}
        advantages, returns = gae(**arguments)
        self.assertClose(returns, discounted)
        self.assertClose(advantages, f64(*discounted) - steps.values)

    @on_random_cases(15)
    def test_identity_split_join_and_order(self, draw):
        steps = Steps(draw, (4,), steps=6)
        arguments = steps.arguments()
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        numbers = {"gamma": steps.gamma, "lam": steps.lam}
        right = gae(**arguments)
        order = draw.order(4)
        for got, wanted in zip(gae(**{n: x[order] for n, x in tensors.items()}, **numbers), right):
            self.assertClose(got, wanted[order])  # rows in another order
        for row in range(4):
            for leading in ((), (1,), (1, 1)):  # a row alone, with and without leading axes of one
                alone = gae(**{n: x[row].reshape(*leading, 6) for n, x in tensors.items()}, **numbers)
                self.assertClose(alone[0], right[0][row].reshape(*leading, 6))
        with self.subTest("rows laid end to end, each closed by a boundary"):
            closed = {**tensors, "boundary": tensors["boundary"] | (torch.arange(6) == 5)}
            joined = gae(**{n: x.flatten() for n, x in closed.items()}, **numbers)
            self.assertClose(joined[0].reshape(4, 6), gae(**closed, **numbers)[0])
            for changed in ("rewards", "values", "next_values"):  # the last row cannot be seen from the others
                other = {n: x.flatten().clone() for n, x in closed.items()}
                other[changed][18:] += 3
                self.assertClose(gae(**other, **numbers)[0][:18], joined[0][:18])
        with self.subTest("appended steps after a boundary"):
            closed = {n: torch.cat([x, x[:, :3]], dim=1) for n, x in tensors.items()}
            closed["boundary"][:, 5] = True
            self.assertClose(
                gae(**closed, **numbers)[0][:, :6], gae(**{n: x[:, :6] for n, x in closed.items()}, **numbers)[0]
            )

    def test_identity_a_row_alone_is_the_row_of_a_batch_to_the_last_bit(self):
        """In every dtype and for every way of summing: few steps, few rows, blocks of steps."""
        for dtype, count in itertools.product((*BOTH, *HALF), (1, 2, 8, 9, 64, 200)):
            steps = Steps(Draw(count), (40,), count)
            tensors = {name: x for name, x in steps.arguments().items() if isinstance(x, Tensor)}
            tensors = {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}
            batch = gae(**tensors, gamma=0.99, lam=0.95)
            for leading in (slice(7, 8), 7, slice(7, 12)):
                for all_rows, alone in zip(batch, gae(**{n: x[leading] for n, x in tensors.items()}, gamma=0.99, lam=0.95)):
                    with self.subTest(dtype=dtype, steps=count, rows=leading):
                        self.assertEqual(alone.dtype, dtype)
                        self.assertTrue(torch.equal(alone, all_rows[leading]))
            for result in batch:
                self.assertTrue(result.is_contiguous())

    def test_identity_the_arguments_stay_as_they_are_in_any_memory_order(self):
        for rows, count in ((40, 200), (3, 200), (40, 2), (40, 1)):
            steps = Steps(Draw(rows), (rows,), count)
            arguments = {n: x.t().contiguous().t() if isinstance(x, Tensor) else x for n, x in steps.arguments().items()}
            before = {n: x.clone() for n, x in arguments.items() if isinstance(x, Tensor)}
            for got, wanted in zip(gae(**arguments), gae(**steps.arguments())):
                self.assertTrue(torch.equal(got, wanted))
            for name, x in before.items():
                self.assertTrue(torch.allclose(arguments[name].double(), x.double(), rtol=0, atol=0, equal_nan=True), name)

    @on_random_cases(10)
    def test_identity_shift_and_scale(self, draw):
        steps, shift = Steps(draw, draw.shape()), draw.number(-3, 3)
        arguments = steps.arguments()
        right, _ = gae(**arguments)
        # A constant c in every reward adds c (1 + gamma lam + ...) over the steps that are left.
        left, _ = gae(torch.ones_like(right), *[torch.zeros_like(right)] * 2, *[steps.boundary] * 2, steps.gamma, steps.lam)
        self.assertClose(gae(**{**arguments, "rewards": steps.rewards + shift})[0], right + shift * left)
        scaled = {n: arguments[n] * shift for n in ("rewards", "values", "next_values")}
        for got, wanted in zip(gae(**{**arguments, **scaled}), gae(**arguments)):
            self.assertClose(got, wanted * shift)

    def test_no_gradient(self):
        for shape in ((), (2,)):
            self.assertGradientOnlyTo("", gae, **Steps(Draw(0), shape).arguments())

    def test_extremes(self):
        for dtype in BOTH:
            for leading in ((), (2,)):
                rewards = torch.full((*leading, 3), 1e4, dtype=dtype)
                values, end = -rewards, flags(0, 0, 1).expand(rewards.shape)
                # delta = (1e4 - 1e4 + 1e4, same, 1e4 + 1e4); lam 1: sums from the back.
                got, _ = gae(rewards, values, values.masked_fill(end, NAN), end, end, gamma=1.0, lam=1.0)
                self.assertClose(got, torch.tensor([4e4, 3e4, 2e4]).expand(rewards.shape))
        with self.subTest("no rows"):
            nothing, no_flags = torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)
            self.assertEqual(gae(nothing, nothing, nothing, no_flags, no_flags)[0].shape, (0, 3))

    def test_refusals(self):
        good = dict(rewards=f64(0, 1), values=f64(0, 0), next_values=f64(0, 0), terminated=flags(0, 1), boundary=flags(0, 1))
        self.assertRefusesWrongTensors(gae, **good)
        self.assertRefusesNumbers(gae, good, "gamma", "of at least 0 and at most 1", (-0.1, 1.1))
        self.assertRefusesNumbers(gae, good, "lam", "of at least 0 and at most 1", (-0.1, 1.1))
        self.assertRefused(
            gae,
            good,
            ({"boundary": flags(0, 0)}, ValueError, r"^boundary: got False at index \[1\] where terminated.*exchanged"),
            ({"rewards": f64(NAN, 0)}, ValueError, "^rewards: got nan"),
            ({"values": f64(NAN, 0)}, ValueError, "^values: got nan"),
            ({"next_values": f64(NAN, 0)}, ValueError, "^next_values: got nan"),
            ({name: value[:0] for name, value in good.items()}, ValueError, r"^rewards: got shape \(0,\).*the time steps"),
            (dict(terminated=flags(1), boundary=flags(1)), ValueError, "^shapes differ: got rewards"),
        )
        # Finite numbers whose residual is not: 1e308 + 1e308 overflows, and 0 * inf would cross the boundary as NaN.
        overflow = dict(rewards=f64(0, 1e308), values=f64(0, -1e308), terminated=flags(1, 1), boundary=flags(1, 1))
        self.assertRefused(gae, good, (overflow, ValueError, r"^td residual: got inf at index \[1\]"))

    def test_refusals_of_sums_that_overflow(self):
        """The step of the overflow is named, never one of an episode that was over before: 0 * inf would be NaN there."""
        for dtype, large in ((torch.float64, 1e308), (torch.float32, 3e38), (torch.float16, 6e4), (torch.bfloat16, 3e38)):
            rewards = torch.tensor([1, large, large], dtype=dtype)  # large + large is too large; the first episode is 1
            for rows, where in ((None, [1]), (2, [0, 1]), (20, [0, 1])):
                shape = (3,) if rows is None else (rows, 3)
                zeros, ends = torch.zeros(shape, dtype=dtype), flags(1, 0, 1).expand(shape)
                words = rf"^advantages: got inf at index {re.escape(str(where))}, wanted finite sums; likely .*{dtype}"
                with self.subTest(dtype=dtype, rows=rows), self.assertRaisesRegex(ValueError, words):
                    gae(rewards.expand(shape), zeros, zeros, ends, ends, 1.0, 1.0)
            long = torch.zeros(20, 100, dtype=dtype)
            long[:, 60:] = large
            ends = torch.zeros(20, 100, dtype=torch.bool)
            ends[:, 50] = True
            with self.subTest("blocks of steps", dtype=dtype), self.assertRaisesRegex(ValueError, r"at index \[0, 98\]"):
                gae(long, torch.zeros_like(long), torch.zeros_like(long), ends, ends, 1.0, 1.0)
        # delta = (1e308 - 1e308, 1e308): A_0 = 1e308 is a number, A_0 + V_0 = 2e308 is none.
        with self.assertRaisesRegex(ValueError, r"^returns: got inf at index \[0\]"):
            gae(f64(1e308, 1e308), f64(1e308, 0), f64(0, 0), flags(0, 1), flags(0, 1), 1.0, 1.0)
        half = [torch.tensor([x], dtype=torch.float16) for x in (4e4, -3e4, 0)]  # A = 7e4 overflows, A + V = 4e4 does not
        with self.assertRaisesRegex(ValueError, r"^advantages: got inf at index \[0\]"):
            gae(*half, flags(1), flags(1))
        two_axes = f64([[1, 1, 1], [1, 1, 1]], [[1, 1e308, 1e308], [1, 1, 1]])
        ends = flags(1, 0, 1).expand(2, 2, 3)
        with self.assertRaisesRegex(ValueError, r"^advantages: got inf at index \[1, 0, 1\]"):
            gae(two_axes, 0 * two_axes, 0 * two_axes, ends, ends, 1.0, 1.0)


# ------------------------------------------------------------------------------------------ atoms: ratio and clipping


class ImportanceRatio(OracleCase):
    @on_random_cases(10)
    def test_definition_and_gradient(self, draw):
        shape = draw.shape()
        logp, old_logp = draw.normal(*shape), draw.normal(*shape)
        self.assertClose(
            importance_ratio(logp, old_logp), elementwise(lambda l, o: math.exp(l) / math.exp(o), logp, old_logp)
        )
        self.assertGradient(lambda l: importance_ratio(l, old_logp), logp)
        self.assertGradientOnlyTo("logp", importance_ratio, logp=logp, old_logp=old_logp)

    @on_random_cases(10)
    def test_identity(self, draw):
        count = draw.whole(2, 6)
        logits, old_logits = draw.normal(2, count, scale=2)
        every = torch.arange(count)
        logp, old_logp = (action_logps(z.expand(count, count), every) for z in (logits, old_logits))
        # E_old[rho] = 1 and E_old[rho f] = E_current[f], with all actions enumerated.
        ratio, f = importance_ratio(logp, old_logp), draw.normal(count)
        self.assertClose((old_logp.exp() * ratio).sum(), 1)
        self.assertClose((old_logp.exp() * ratio * f).sum(), (logp.exp() * f).sum())
        self.assertClose(importance_ratio(old_logp, logp) * ratio, [1] * count)
        # Equal policies: exactly 1; the gradient is that of logp, also when one tensor is given twice.
        tracked = logp.clone().requires_grad_()
        ratio = importance_ratio(tracked, tracked)
        self.assertEqual(ratio.tolist(), [1.0] * count)
        self.assertEqual(torch.autograd.grad(ratio.sum(), tracked)[0].tolist(), [1.0] * count)

    def test_extremes(self):
        for dtype in BOTH:
            with self.subTest(dtype=dtype):
                logp = torch.tensor([1e4, -1e4, -INF, 80.0], dtype=dtype, requires_grad=True)
                ratio = importance_ratio(logp, torch.zeros_like(logp))
                largest = torch.finfo(dtype).max / math.e
                self.assertTrue(0.9 * largest < ratio[0].item() < 1.1 * largest)
                self.assertEqual(ratio[1:3].tolist(), [0, 0])
                self.assertClose(ratio[3] / math.exp(80), 1, atol=1e-5)
                gradient = torch.autograd.grad(ratio.sum(), logp)[0]
                self.assertEqual(gradient[:3].tolist(), [0, 0, 0])

    def test_refusals(self):
        self.assertRefusesWrongTensors(importance_ratio, logp=f64(-1, -2), old_logp=f64(-1, -2))


class ClippedPolicyLoss(OracleCase):
    @staticmethod
    def by_cases(logp: float, old_logp: float, advantage: float, epsilon: float) -> tuple[float, float]:
        """Loss and d loss / d logp, without min and clip: is the ratio beyond the edge that A pushes towards?"""
        ratio = math.exp(logp - old_logp)
        if advantage > 0 and ratio > 1 + epsilon:
            return -(1 + epsilon) * advantage, 0.0
        if advantage < 0 and ratio < 1 - epsilon:
            return -(1 - epsilon) * advantage, 0.0
        return -ratio * advantage, -ratio * advantage

    @on_random_cases(30)
    def test_definition_and_gradient(self, draw):
        shape, epsilon = (*draw.shape(), 4), draw.number(0.05, 1.5)
        logp, old_logp, advantages = draw.normal(*shape), draw.normal(*shape), draw.normal(*shape)
        advantages.masked_fill_(draw.flags(*shape, share=0.1), 0.0)
        tensors = logp, old_logp, advantages
        tracked = logp.clone().requires_grad_()
        loss = clipped_policy_loss(tracked, old_logp, advantages, epsilon)
        self.assertClose(loss, elementwise(lambda *x: self.by_cases(*x, epsilon)[0], *tensors))
        slope = elementwise(lambda *x: self.by_cases(*x, epsilon)[1], *tensors)
        self.assertClose(torch.autograd.grad(loss.sum(), tracked)[0], slope)
        self.assertGradient(lambda l: clipped_policy_loss(l, old_logp, advantages, epsilon), logp)
        self.assertGradientOnlyTo("logp", clipped_policy_loss, logp=logp, old_logp=old_logp, advantages=advantages)
        # epsilon defaults to 0.2.
        self.assertClose(clipped_policy_loss(*tensors), elementwise(lambda *x: self.by_cases(*x, 0.2)[0], *tensors))
        single = clipped_policy_loss(*(x.float() for x in tensors), epsilon)
        self.assertEqual(single.dtype, torch.float32)
        self.assertClose(single, loss.detach(), atol=1e-4)

    @on_random_cases(10)
    def test_identity(self, draw):
        rows, epsilon = draw.whole(2, 9), draw.number(0.05, 0.9)
        logp, old_logp, advantages = draw.normal(3, rows)
        loss = clipped_policy_loss(logp, old_logp, advantages, epsilon)
        # Pessimistic: never below the loss without a clip, and equal to it when the band is wide enough.
        unclipped = -importance_ratio(logp, old_logp) * advantages
        self.assertTrue((loss >= unclipped - 1e-12).all())
        self.assertClose(clipped_policy_loss(logp, old_logp, advantages, 1e6), unclipped)
        # Ratio 1: value -A and the gradient of REINFORCE, whatever epsilon is.
        tracked = logp.clone().requires_grad_()
        first_pass = clipped_policy_loss(tracked, tracked, advantages, epsilon)
        self.assertClose(first_pass, -advantages)
        of_reinforce = torch.autograd.grad(reinforce_loss(tracked, advantages).sum(), tracked)[0]
        self.assertClose(torch.autograd.grad(first_pass.sum(), tracked)[0], of_reinforce)
        # Only the difference of the log-probabilities matters; A scales; rows do not mix.
        self.assertClose(clipped_policy_loss(logp + 7, old_logp + 7, advantages, epsilon), loss)
        self.assertClose(clipped_policy_loss(logp, old_logp, 3 * advantages, epsilon), 3 * loss)
        order = draw.order(rows)
        self.assertClose(clipped_policy_loss(logp[order], old_logp[order], advantages[order], epsilon), loss[order])

    def test_extremes(self):
        for dtype in BOTH:
            with self.subTest(dtype=dtype):
                logp = torch.tensor([1e4, -1e4, -1e4, 1e4, -1e4], dtype=dtype, requires_grad=True)
                advantages = torch.tensor([1.0, -1.0, 1.0, 0.0, 0.0], dtype=dtype)
                loss = clipped_policy_loss(logp, torch.zeros_like(logp), advantages)
                self.assertClose(loss, [-1.2, 0.8, 0, 0, 0], atol=1e-6)
                self.assertEqual(torch.autograd.grad(loss.sum(), logp)[0].tolist(), [0] * 5)
                far = clipped_policy_loss(
                    torch.tensor(1e4, dtype=dtype), torch.tensor(0.0, dtype=dtype), -torch.ones((), dtype=dtype)
                )
                self.assertTrue(far > 1e37 and far.isfinite())
        with self.subTest("NaN in one row stays in that row"):
            loss = clipped_policy_loss(f64(-1, -1, -1), f64(NAN, -1, -1), f64(1, NAN, 1))
            self.assertEqual(loss.isnan().tolist(), [True, True, False])

    def test_refusals(self):
        good = dict(logp=f64(-1, -2), old_logp=f64(-1, -2), advantages=f64(1, -1))
        self.assertRefusesWrongTensors(clipped_policy_loss, **good)
        self.assertRefusesNumbers(clipped_policy_loss, good, "epsilon", "above 0", (0, 0.0, -0.2))
        single = {name: x.float() for name, x in good.items()}
        too_wide = ({"epsilon": 1e39}, ValueError, "^epsilon: got 1e\\+39, wanted a number that torch.float32 holds")
        self.assertRefused(clipped_policy_loss, single, too_wide)
        self.assertClose(clipped_policy_loss(**good, epsilon=2**70), [-1, 1])  # a whole number too wide for int64


class ClipFraction(OracleCase):
    @on_random_cases(15)
    def test_definition(self, draw):
        shape, epsilon = draw.shape(), draw.number(0.05, 0.9)
        logp, old_logp = draw.normal(*shape, scale=0.5), draw.normal(*shape, scale=0.5)

        def share(epsilon: float) -> float:
            ratios = [math.exp(l - o) for l, o in zip(logp.flatten().tolist(), old_logp.flatten().tolist())]
            return sum(abs(ratio - 1) > epsilon for ratio in ratios) / len(ratios)

        self.assertClose(clip_fraction(logp, old_logp, epsilon), share(epsilon))
        self.assertClose(clip_fraction(logp, old_logp), share(0.2))
        self.assertGradientOnlyTo("", clip_fraction, logp=logp, old_logp=old_logp)

    @on_random_cases(5)
    def test_identity(self, draw):
        logp, old_logp = draw.normal(2, 12)
        whole, order = clip_fraction(logp, old_logp), draw.order(12)
        self.assertClose(clip_fraction(logp[order], old_logp[order]), whole)
        parts = [clip_fraction(logp[part], old_logp[part]) for part in (slice(0, 5), slice(5, 12))]
        self.assertClose((5 * parts[0] + 7 * parts[1]) / 12, whole)
        self.assertEqual(clip_fraction(logp, logp).item(), 0)

    def test_extremes(self):
        # Ratios 2, 0.5 with epsilon 1 and 0.5: both edges belong to the band (exp(log 2) and exp(-log 2) are exact).
        two = f64(2.0).log()
        self.assertEqual([two.exp().item(), (-two).exp().item()], [2.0, 0.5])
        self.assertEqual([clip_fraction(two, 0 * two, 1.0).item(), clip_fraction(-two, 0 * two, 0.5).item()], [0, 0])
        self.assertEqual([clip_fraction(two, 0 * two, 0.99).item(), clip_fraction(-two, 0 * two, 0.49).item()], [1, 1])
        for dtype in BOTH:
            far = torch.tensor([1e4, -1e4, 0.0, -INF], dtype=dtype)
            share = clip_fraction(far, torch.zeros_like(far))
            self.assertEqual((share.dtype, share.item()), (dtype, 0.75))

    def test_refusals(self):
        good = dict(logp=f64(-1, -2), old_logp=f64(-1, -2))
        self.assertRefusesWrongTensors(clip_fraction, **good)
        self.assertRefusesNumbers(clip_fraction, good, "epsilon", "above 0", (0, -0.2))
        self.assertRefused(
            clip_fraction,
            good,
            ({"logp": f64(NAN, 0)}, ValueError, r"^logp, old_logp: got logp nan, old_logp -1.0 at index \[0\].*a mask"),
            (dict(logp=f64(-INF, 0), old_logp=f64(-INF, 0)), ValueError, r"got logp -inf, old_logp -inf at index \[0\]"),
            (dict(logp=f64(), old_logp=f64()), ValueError, r"^logp: got shape \(0,\), wanted at least one sample"),
        )


class ClippedValueLoss(OracleCase):
    @staticmethod
    def by_cases(value: float, old_value: float, target: float, epsilon: float) -> float:
        if abs(value - old_value) <= epsilon:
            return (value - target) ** 2
        held = old_value + epsilon if value > old_value else old_value - epsilon
        return max((value - target) ** 2, (held - target) ** 2)

    @on_random_cases(20)
    def test_definition_and_gradient(self, draw):
        shape, epsilon = (*draw.shape(), 3), draw.number(0.05, 2)
        values, old_values, returns = draw.normal(*shape), draw.normal(*shape), draw.normal(*shape)
        tensors = values, old_values, returns
        self.assertClose(clipped_value_loss(*tensors, epsilon), elementwise(lambda *x: self.by_cases(*x, epsilon), *tensors))
        self.assertClose(clipped_value_loss(*tensors), elementwise(lambda *x: self.by_cases(*x, 0.2), *tensors))
        self.assertGradient(lambda v: clipped_value_loss(v, old_values, returns, epsilon), values)
        self.assertGradientOnlyTo("values", clipped_value_loss, values=values, old_values=old_values, returns=returns)

    @on_random_cases(10)
    def test_identity(self, draw):
        values, old_values, returns = draw.normal(3, draw.whole(1, 8))
        square = (values - returns).square()
        self.assertTrue((clipped_value_loss(values, old_values, returns) >= square).all())
        self.assertClose(clipped_value_loss(values, old_values, returns, 1e6), square)
        # Where V = V_old the two branches agree: the plain square and its gradient 2 (V - R).
        tracked = values.clone().requires_grad_()
        loss = clipped_value_loss(tracked, values, returns)
        self.assertClose(loss, square)
        self.assertClose(torch.autograd.grad(loss.sum(), tracked)[0], 2 * (values - returns))
        shift = draw.number(-5, 5)
        shifted = clipped_value_loss(values + shift, old_values + shift, returns + shift)
        self.assertClose(shifted, clipped_value_loss(values, old_values, returns))

    def test_extremes(self):
        for dtype in BOTH:
            values = torch.tensor([1e4, -1e4], dtype=dtype, requires_grad=True)
            loss = clipped_value_loss(values, torch.zeros_like(values), torch.zeros_like(values))
            self.assertClose(loss, [1e8, 1e8])
            self.assertClose(torch.autograd.grad(loss.sum(), values)[0], [2e4, -2e4])
            # Target far on the other side of the old value: the clipped branch is larger and flat.
            loss = clipped_value_loss(values, torch.zeros_like(values), torch.tensor([1e4, -1e4], dtype=dtype))
            self.assertClose(loss, [(1e4 - 0.2) ** 2] * 2, atol=8)
            self.assertEqual(torch.autograd.grad(loss.sum(), values)[0].tolist(), [0, 0])

    def test_refusals(self):
        good = dict(values=f64(1, 2), old_values=f64(1, 2), returns=f64(1, 2))
        self.assertRefusesWrongTensors(clipped_value_loss, **good)
        self.assertRefusesNumbers(clipped_value_loss, good, "epsilon", "above 0", (0, -0.2))
        single = {name: x.float() for name, x in good.items()}
        largest = torch.finfo(torch.float32).max
        self.assertClose(clipped_value_loss(**single, epsilon=largest), [0, 0])
        with self.assertRaisesRegex(ValueError, "^epsilon: got .*, wanted a number that torch.float32 holds"):
            clipped_value_loss(**single, epsilon=1.01 * largest)


# ------------------------------------------------------------------------------------------ atoms: KL


def kl_definition(logits: list[float], reference_logits: list[float]) -> float:
    """sum_a p_a log(p_a / q_a) over the actions that p can take."""
    pairs = zip(softmax(logits), softmax(reference_logits))
    return math.fsum(p * math.log(p / q) for p, q in pairs if p > 0)


class CategoricalKl(OracleCase):
    @on_random_cases(20)
    def test_definition_and_gradient(self, draw):
        shape = (*draw.shape(), draw.whole(1, 6))
        logits, reference_logits = draw.normal(*shape, scale=2), draw.normal(*shape, scale=2)
        wanted = rowwise(kl_definition, logits, reference_logits)
        self.assertClose(categorical_kl(logits, reference_logits), wanted)
        single = categorical_kl(logits.float(), reference_logits.float())
        self.assertEqual(single.dtype, torch.float32)
        self.assertClose(single, wanted, atol=1e-4)
        self.assertGradient(lambda z: categorical_kl(z, reference_logits), logits)
        self.assertGradientOnlyTo("logits", categorical_kl, logits=logits, reference_logits=reference_logits)

    @on_random_cases(15)
    def test_identity(self, draw):
        rows, count = draw.whole(1, 4), draw.whole(2, 6)
        p, q = draw.normal(2, rows, count)
        kl = categorical_kl(p, q)
        self.assertTrue((kl > 0).all())
        tracked = p.clone().requires_grad_()
        itself = categorical_kl(tracked, p)
        self.assertClose(itself, [0] * rows)
        self.assertClose(torch.autograd.grad(itself.sum(), tracked)[0], torch.zeros_like(p))
        self.assertTrue(((kl - categorical_kl(q, p)).abs() > 1e-9).all())  # not symmetric
        self.assertClose(categorical_kl(p + draw.normal(rows, 1), q + draw.normal(rows, 1)), kl)
        order = draw.order(count)
        self.assertClose(categorical_kl(p[:, order], q[:, order]), kl)
        # Two independent choices: the KLs add. Logits of the pair (a, b) are z_a + z'_b.
        p2, q2 = draw.normal(2, rows, 3)
        joint = [(a.unsqueeze(2) + b.unsqueeze(1)).flatten(1) for a, b in ((p, p2), (q, q2))]
        self.assertClose(categorical_kl(*joint), kl + categorical_kl(p2, q2))
        # E_p[log p - log q] and H(p, q) - H(p), through the other atoms.
        every = torch.arange(count).unsqueeze(1).expand(count, rows)
        logp, logq = (action_logps(z.expand(count, rows, count), every) for z in (p, q))
        self.assertClose((logp.exp() * kl_estimates(logp, logq)[0]).sum(dim=0), kl)
        forbidden = torch.full((rows, 1), -INF, dtype=torch.float64)
        self.assertClose(categorical_kl(torch.cat([p, forbidden], 1), torch.cat([q, forbidden], 1)), kl)

    def test_extremes(self):
        for dtype in BOTH:
            with self.subTest(dtype=dtype):
                p = torch.tensor([1e4, -1e4, 0.0], dtype=dtype, requires_grad=True)
                kl = categorical_kl(p, -p)  # p certain of action 0, to which q gives log-probability -2e4
                self.assertClose(kl, 2e4)
                self.assertClose(torch.autograd.grad(kl, p)[0], [0, 0, 0])
                # A forbidden action: p = (1/2, 1/2, 0) against three equal actions, then against a q that forbids it too.
                p = torch.tensor([0.0, 0.0, -INF], dtype=dtype, requires_grad=True)
                for q, wanted in (([0.0, 0.0, 0.0], math.log(1.5)), ([0.0, 0.0, -INF], 0.0), ([1e4, 1e4, -1e4], 0.0)):
                    kl = categorical_kl(p, torch.tensor(q, dtype=dtype))
                    self.assertClose(kl, wanted, atol=1e-6)
                    self.assertClose(torch.autograd.grad(kl, p)[0], [0, 0, 0], atol=1e-6)
                # Weight on an action that q forbids: infinite.
                self.assertEqual(categorical_kl(torch.zeros(3, dtype=dtype), p.detach()).item(), INF)
        # Only one action: nothing to choose.
        self.assertEqual(categorical_kl(f64(3), f64(-2)).item(), 0)

    def test_refusals(self):
        self.assertRefusesWrongTensors(categorical_kl, logits=f64(1, 2), reference_logits=f64(1, 2))
        scalar, empty = f64(0).squeeze(), f64()
        self.assertRefused(
            categorical_kl,
            dict(logits=f64(1, 2), reference_logits=f64(1, 2)),
            ({"logits": f64(1, 2, 3)}, ValueError, r"logits \(3,\), reference_logits \(2,\)"),
            (dict(logits=scalar, reference_logits=scalar), ValueError, r"^logits: got shape \(\).*the actions"),
            (dict(logits=empty, reference_logits=empty), ValueError, r"^logits: got shape \(0,\).*the actions"),
            *(
                ({name: f64(0, bad)}, ValueError, r"^logits or reference_logits: the row at index \[\] is no distribution")
                for name in ("logits", "reference_logits")
                for bad in (NAN, INF)
            ),
        )
        with self.assertRaisesRegex(ValueError, r"logits \(3,\), reference_logits \(4,\), .*likely one was cut"):
            categorical_kl(torch.zeros(3), torch.zeros(4))
        with self.assertRaisesRegex(ValueError, r"logits \(3, 1\), reference_logits \(3,\), .*likely a \[B, 1\]"):
            categorical_kl(torch.zeros(3, 1), torch.zeros(3))


class KlEstimates(OracleCase):
    @on_random_cases(10)
    def test_definition_and_gradient(self, draw):
        shape = draw.shape()
        logp, ref_logp = draw.normal(*shape), draw.normal(*shape)
        rules = (
            lambda l, r: l - r,
            lambda l, r: 0.5 * (l - r) ** 2,
            lambda l, r: math.exp(r) / math.exp(l) - 1 - (r - l),
        )
        for estimate, rule in zip(kl_estimates(logp, ref_logp), rules):
            self.assertClose(estimate, elementwise(rule, logp, ref_logp))
        self.assertGradient(lambda l: kl_estimates(l, ref_logp), logp)
        self.assertGradientOnlyTo("logp", kl_estimates, logp=logp, ref_logp=ref_logp)

    @on_random_cases(15)
    def test_identity_averages_and_mean_gradients(self, draw):
        """Both sentences of the docstring, with all actions enumerated in place of samples."""
        count = draw.whole(2, 6)
        logits, reference_logits = draw.normal(count).requires_grad_(), draw.normal(count)
        every = torch.arange(count)
        logp, ref_logp = (action_logps(z.expand(count, count), every) for z in (logits, reference_logits))
        held_fixed = logp.detach().exp()
        k1, k2, k3 = ((held_fixed * estimate).sum() for estimate in kl_estimates(logp, ref_logp))
        exact = kl_definition(logits.tolist(), reference_logits.tolist())
        self.assertClose(k1, exact)
        self.assertClose(k3, exact)
        self.assertGreater(abs(k2.item() - exact), 1e-6)
        # d KL(p || q) / d z_a = p_a (log p_a - log q_a - KL); d KL(q || p) / d z_a = p_a - q_a.
        p, q = softmax(logits.tolist()), softmax(reference_logits.tolist())
        forward = [p_a * (math.log(p_a / q_a) - exact) for p_a, q_a in zip(p, q)]
        backward = [p_a - q_a for p_a, q_a in zip(p, q)]
        for mean, wanted in ((k1, [0] * count), (k2, forward), (k3, backward)):
            self.assertClose(torch.autograd.grad(mean, logits, retain_graph=True)[0], wanted)
        with self.subTest("samples of another policy average to something else"):
            of_reference = (ref_logp.exp() * kl_estimates(logp, ref_logp)[2]).sum().item()
            self.assertGreater(abs(of_reference - exact), 1e-6)

    @on_random_cases(5)
    def test_identity_signs_and_small_differences(self, draw):
        logp, ref_logp = draw.normal(200), draw.normal(200)
        for dtype in BOTH:
            for size in (1.0, 1e-3, 1e-9):
                k1, k2, k3 = kl_estimates((size * logp).to(dtype), (size * ref_logp).to(dtype))
                self.assertTrue((k2 >= 0).all() and (k3 >= 0).all())
                self.assertTrue((k1 < 0).any() and (k1 > 0).any())
        # k3 = d^2 / 2 - d^3 / 6 + ...: no digits are lost to exp(-d) - 1.
        d = torch.tensor([1e-3, -1e-3, 1e-6, -1e-6], dtype=torch.float64)
        k3 = kl_estimates(d, torch.zeros_like(d))[2]
        self.assertClose(k3 / (d**2 / 2 - d**3 / 6 + d**4 / 24), [1] * 4, atol=1e-9)
        self.assertEqual([estimate.abs().max().item() for estimate in kl_estimates(logp, logp)], [0, 0, 0])

    def test_identity_k3_keeps_its_digits(self):
        """Value and slope, to a few units in the last place, for any d: exp(-d) - 1 + d in exact fractions.

        In float32 the plain formula gives 0 for |d| = 1e-5, and 1 - (exp(-d) - 1 + 1) loses as many digits of the slope.
        """
        sizes = [sign * 10.0**power * part for power in range(-18, 1) for part in (1, 3.7) for sign in (1, -1)]
        sizes += [0.5, -0.5, 0.4999, -0.5001]
        for dtype in BOTH:
            d = torch.tensor(sizes, dtype=dtype, requires_grad=True)
            k3 = kl_estimates(d, torch.zeros_like(d))[2]
            slope = torch.autograd.grad(k3.sum(), d)[0]
            for x, value, gradient in zip(d.tolist(), k3.tolist(), slope.tolist()):
                exact = sum(Fraction(-x) ** n / math.factorial(n) for n in range(2, 40))
                exact_slope = -sum(Fraction(-x) ** n / math.factorial(n) for n in range(1, 40))
                with self.subTest(dtype=dtype, d=x):
                    self.assertLess(abs(Fraction(value) / exact - 1), 8 * torch.finfo(dtype).eps)
                    self.assertLess(abs(Fraction(gradient) / exact_slope - 1), 8 * torch.finfo(dtype).eps)
        d = f64(0.0, 0.3, -0.3, 2.0, -2.0).requires_grad_()
        self.assertTrue(torch.autograd.gradgradcheck(lambda l: kl_estimates(l, torch.zeros_like(l))[2], d))

    def test_extremes(self):
        for dtype in BOTH:
            with self.subTest("a NaN stays in its slot; an impossible action is infinitely far", dtype=dtype):
                logp = torch.tensor([NAN, -1.0, -INF, -1.0], dtype=dtype)
                k1, k2, k3 = kl_estimates(logp, torch.tensor([-1.0, -1.0, -1.0, -INF], dtype=dtype))
                self.assertEqual(k3[1:].tolist(), [0, INF, INF])
                self.assertEqual([k.isnan().tolist() for k in (k1, k2, k3)], [[True, False, False, False]] * 3)
            with self.subTest("half of a square that overflows", dtype=dtype):
                far = 1.5 * math.sqrt(torch.finfo(dtype).max)
                k2 = kl_estimates(torch.tensor(far, dtype=dtype), torch.tensor(-0.0, dtype=dtype))[1]
                self.assertTrue(k2.isinf())  # 1.5^2 / 2 > 1
                k2 = kl_estimates(torch.tensor(far / 1.2, dtype=dtype), torch.tensor(-0.0, dtype=dtype))[1]
                self.assertClose(k2 / torch.finfo(dtype).max, 1.25**2 / 2, atol=1e-5)
            logp = torch.tensor([0.0, -80.0], dtype=dtype, requires_grad=True)
            k1, k2, k3 = kl_estimates(logp, torch.tensor([-1e4, 0.0], dtype=dtype))
            self.assertClose(k1, [1e4, -80])
            self.assertClose(k2, [5e7, 3200])
            self.assertClose(k3[0], 1e4 - 1, atol=1e-3)
            self.assertClose(k3[1] / (math.exp(80) - 81), 1, atol=1e-5)
            self.assertTrue(torch.autograd.grad(k3.sum(), logp)[0].isfinite().all())

    def test_refusals(self):
        self.assertRefusesWrongTensors(kl_estimates, logp=f64(-1, -2), ref_logp=f64(-1, -2))


# ------------------------------------------------------------------------------------------ atoms: preferences


class PreferenceProbability(OracleCase):
    @on_random_cases(10)
    def test_definition_and_gradient(self, draw):
        shape = draw.shape()
        chosen, rejected = draw.normal(*shape, scale=3), draw.normal(*shape, scale=3)
        wanted = elementwise(lambda c, r: math.exp(c) / (math.exp(c) + math.exp(r)), chosen, rejected)
        self.assertClose(preference_probability(chosen, rejected), wanted)
        self.assertGradient(preference_probability, chosen, rejected)
        names = dict(reward_chosen=chosen, reward_rejected=rejected)
        self.assertGradientOnlyTo("reward_chosen reward_rejected", preference_probability, **names)

    @on_random_cases(5)
    def test_identity(self, draw):
        a, b, c = draw.normal(3, 6)
        p = preference_probability(a, b)
        self.assertClose(p + preference_probability(b, a), [1] * 6)
        self.assertClose(preference_probability(a + 9, b + 9), p)
        self.assertEqual(preference_probability(a, a).tolist(), [0.5] * 6)
        odds = [x / (1 - x) for x in (p, preference_probability(b, c), preference_probability(a, c))]
        self.assertClose(odds[0] * odds[1] / odds[2], [1] * 6)  # a chain of comparisons

    def test_extremes(self):
        for dtype in BOTH:
            chosen = torch.tensor([1e4, -1e4], dtype=dtype, requires_grad=True)
            p = preference_probability(chosen, torch.zeros_like(chosen))
            self.assertEqual(p.tolist(), [1, 0])
            self.assertEqual(torch.autograd.grad(p.sum(), chosen)[0].tolist(), [0, 0])

    def test_refusals(self):
        good = dict(reward_chosen=f64(1, 2), reward_rejected=f64(1, 2))
        self.assertRefusesWrongTensors(preference_probability, **good)
        for name in good:
            infinite = ({name: f64(INF, 1)}, ValueError, rf"^{name}: got inf at index")
            self.assertRefused(preference_probability, good, infinite)


class DpoLoss(OracleCase):
    @on_random_cases(15)
    def test_definition_and_gradient(self, draw):
        shape, beta = draw.shape(), draw.number(0.05, 2)
        four = [draw.normal(*shape, scale=2) for _ in range(4)]

        def definition(chosen, rejected, ref_chosen, ref_rejected):
            """-log of the Bradley-Terry probability with rewards beta log(pi / pi_ref)."""
            rewards = [
                beta * math.log(math.exp(x) / math.exp(ref)) for x, ref in ((chosen, ref_chosen), (rejected, ref_rejected))
            ]
            return -math.log(math.exp(rewards[0]) / (math.exp(rewards[0]) + math.exp(rewards[1])))

        wanted = elementwise(definition, *four)
        self.assertClose(dpo_loss(*four, beta), wanted)
        single = dpo_loss(*(x.float() for x in four), beta)
        self.assertEqual(single.dtype, torch.float32)
        self.assertClose(single, wanted, atol=1e-4)
        self.assertGradient(lambda c, r: dpo_loss(c, r, *four[2:], beta), *four[:2])
        names = dict(zip(("chosen", "rejected", "ref_chosen", "ref_rejected"), four))
        self.assertGradientOnlyTo("chosen rejected", dpo_loss, **names, beta=beta)

    @on_random_cases(10)
    def test_identity(self, draw):
        beta = draw.number(0.05, 2)
        chosen, rejected, ref_chosen, ref_rejected = draw.normal(4, 5)
        loss = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta)
        margin = (chosen - ref_chosen) - (rejected - ref_rejected)
        # Exchanged answers: log(1 + e^-x) - log(1 + e^x) = -x.
        self.assertClose(loss - dpo_loss(rejected, chosen, ref_rejected, ref_chosen, beta), -beta * margin)
        # A prompt that adds the same to all four changes nothing.
        self.assertClose(dpo_loss(*(x + 3 for x in (chosen, rejected, ref_chosen, ref_rejected)), beta), loss)
        likelihood = preference_probability(beta * (chosen - ref_chosen), beta * (rejected - ref_rejected))
        self.assertClose(loss, -likelihood.log())
        # At the reference: log 2, gradients -beta/2 and beta/2.
        tracked = [x.clone().requires_grad_() for x in (chosen, rejected)]
        start = dpo_loss(*tracked, chosen, rejected, beta)
        self.assertClose(start, [math.log(2)] * 5)
        gradients = torch.autograd.grad(start.sum(), tracked)
        self.assertClose(gradients[0], [-beta / 2] * 5)
        self.assertClose(gradients[1], [beta / 2] * 5)
        # beta to 0: log 2 - beta h / 2 + beta^2 h^2 / 8; beta large: beta max(-h, 0).
        small = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, 1e-4)
        self.assertClose(small, math.log(2) - 1e-4 * margin / 2 + 1e-8 * margin**2 / 8, atol=1e-14)
        self.assertClose(dpo_loss(chosen, rejected, ref_chosen, ref_rejected, 1e6) / 1e6, (-margin).clamp(min=0), atol=1e-6)

    def test_extremes(self):
        for dtype in BOTH:
            with self.subTest(dtype=dtype):
                chosen = torch.tensor([-1e4, 1e4], dtype=dtype, requires_grad=True)
                zero = torch.zeros_like(chosen)
                loss = dpo_loss(chosen, zero, zero, zero, 0.5)
                self.assertClose(loss, [5000, 0])  # beta |h|, and nothing
                self.assertClose(torch.autograd.grad(loss.sum(), chosen)[0], [-0.5, 0])

    def test_refusals(self):
        good = dict(chosen=f64(-1), rejected=f64(-1), ref_chosen=f64(-1), ref_rejected=f64(-1), beta=0.1)
        self.assertRefusesWrongTensors(dpo_loss, **good)
        self.assertRefusesNumbers(dpo_loss, good, "beta", "above 0", (0, 0.0, -0.1))
        scores = {name: x.float() for name, x in good.items() if name != "beta"}
        too_large = ({"beta": 1e39}, ValueError, "^beta: got 1e\\+39, wanted a number that torch.float32 holds")
        self.assertRefused(dpo_loss, {**scores, "beta": 0.1}, too_large)
        nan = r"^chosen, rejected, ref_chosen, ref_rejected: got .* at index \[0\], which give NaN; likely a forward pass"
        self.assertRefused(
            dpo_loss,
            good,
            *(({name: f64(NAN)}, ValueError, nan) for name in scores),
            (dict(chosen=f64(-INF), rejected=f64(-INF)), ValueError, nan),
            (dict(zip(scores, (f64(-1e308), f64(-1e308), f64(1e308), f64(1e308)))), ValueError, nan),
        )


# ------------------------------------------------------------------------------------------ atoms: groups


class GroupsWithoutSpread(OracleCase):
    @on_random_cases(15)
    def test_definition(self, draw):
        shape = (*draw.shape(), draw.whole(1, 5))
        rewards = draw.below(2, *shape).double()  # 0 and 1: ties are common
        wanted = [len(set(row)) == 1 for row in rewards.reshape(-1, shape[-1]).tolist()]
        for scaled in (rewards, 1e6 * rewards - 3, 1e-9 * rewards, rewards.float()):
            got = groups_without_spread(scaled)
            self.assertEqual(got.shape, shape[:-1])
            self.assertEqual(got.flatten().tolist(), wanted)

    @on_random_cases(10)
    def test_identity_rounding_is_no_spread(self, draw):
        """The same parts added in another order for each answer: the sums differ by more than 8 units in the last place."""
        for dtype in BOTH:
            for count, offset in ((5, 0.0), (12, 0.0), (100, 0.0), (12, 3.0)):
                parts = torch.rand(count, dtype=torch.float64, generator=draw.generator).to(dtype)
                parts = torch.cat([parts, torch.tensor([offset, -offset], dtype=dtype)])  # that cancels
                sums = torch.stack([functools.reduce(torch.add, parts[draw.order(len(parts))]) for _ in range(6)])
                with self.subTest(dtype=dtype, parts=count, offset=offset):
                    self.assertTrue(groups_without_spread(sums).item(), sums)
                    self.assertEqual(group_advantages(sums).tolist(), [0.0] * 6)

    def test_identity_tenths_added_in_different_ways(self):
        for dtype, count in itertools.product(BOTH, (3, 10, 100, 1000)):
            tenth = torch.tensor(0.1, dtype=dtype)
            one_by_one = functools.reduce(torch.add, [tenth] * count)
            one_tenth_of_them = functools.reduce(torch.add, [tenth] * max(1, count // 10))
            in_parts = functools.reduce(torch.add, [one_tenth_of_them] * min(count, 10))
            rewards = torch.stack([one_by_one, in_parts, count * tenth])
            with self.subTest(dtype=dtype, tenths=count):
                self.assertEqual(group_advantages(rewards).tolist(), [0.0] * 3)

    @on_random_cases(10)
    def test_identity_where_the_tolerance_lies(self, draw):
        for dtype in (*BOTH, *HALF):
            # Half precision: its own neighbours differ by 1000 times the tolerance, which is that of float32.
            eps, scale = torch.finfo(dtype).eps, 2.0 ** draw.whole(-10, 10)  # a power of two: the gap is exact
            gaps = {0: True, 1: False} if dtype in HALF else {0: True, 1: True, 128: True, 129: False, 999: False}
            for gap, equal in gaps.items():
                for sign in (1, -1):
                    pair = (sign * scale * torch.tensor([1.0, 1.0 + gap * eps], dtype=torch.float64)).to(dtype)
                    self.assertEqual(groups_without_spread(pair).item(), equal, (dtype, gap))
                    if gap:  # the mean is rounded, to a 129th of such a spread
                        self.assertClose(group_advantages(pair, eps=0.0).abs(), [float(not equal)] * 2, atol=0.01)

    def test_identity_real_differences_survive(self):
        for dtype in (*BOTH, *HALF):
            near_one, scores, whole = [0.95, 1, 0.97, 0.99], [4, 4.2, 4.1, 4.25], [100, 101, 102, 103]
            for rewards in (near_one, scores, whole, [-2.5, -2.6, -2.4]):
                stored = torch.tensor(rewards, dtype=dtype)
                wanted = stored.double() - stored.double().mean()
                wanted = wanted / wanted.square().mean().sqrt()
                with self.subTest(dtype=dtype, rewards=rewards):
                    self.assertFalse(groups_without_spread(stored).item())
                    self.assertClose(group_advantages(stored), wanted, atol=2 * torch.finfo(dtype).eps + 1e-5)
        self.assertFalse(groups_without_spread(torch.tensor([1.0, 1.0001])).item())

    def test_extremes(self):
        cases = (
            ([0.0, 0.0], True), ([0.0, -0.0], True), ([0.0, 1e-300], False), ([1e-300, 2e-300], False),
            ([1e4, -1e4], False), ([-1e4, -1e4], True), ([5.0], True), ([0.1 + 0.2, 0.3], True),
            ([5e-324, 0.0], False), ([5e-324, 1e-323], False), ([1.7e308, -1.7e308], False), ([1.7e308, 1.7e308], True),
        )  # fmt: skip
        for rewards, equal in cases:
            self.assertEqual(groups_without_spread(f64(*rewards)).item(), equal, rewards)

    def test_refusals(self):
        self.assertRefusesWrongTensors(groups_without_spread, rewards=f64(0, 1))
        self.assertRefused(groups_without_spread, {"rewards": f64(0, 1)}, *GroupAdvantages.BAD_REWARDS)


class GroupAdvantages(OracleCase):
    BAD_REWARDS = (
        ({"rewards": f64(0, NAN)}, ValueError, r"^rewards: got nan at index \[1\].*failed verifier or reward model"),
        ({"rewards": f64(-INF, 0)}, ValueError, r"^rewards: got -inf at index \[0\]"),
        ({"rewards": f64(1).squeeze()}, ValueError, r"^rewards: got shape \(\).*the answers to one prompt"),
        ({"rewards": f64()}, ValueError, r"^rewards: got shape \(0,\).*the answers to one prompt"),
    )

    @on_random_cases(20)
    def test_definition(self, draw):
        shape = (*draw.shape(), draw.whole(2, 6))
        rewards = draw.below(3, *shape).double() if draw.whole(0, 1) else draw.normal(*shape)

        def definition(group: list[float], eps: float) -> list[float]:
            mean, std = statistics.fmean(group), statistics.pstdev(group)
            return [(reward - mean) / (std + eps) if std else 0.0 for reward in group]

        for eps in (0.0, 1e-4, 0.5):
            self.assertClose(group_advantages(rewards, eps), rowwise(lambda group: definition(group, eps), rewards))
        wanted = rowwise(lambda group: definition(group, 1e-8), rewards)
        self.assertClose(group_advantages(rewards), wanted)
        single = group_advantages(rewards.float())
        self.assertEqual(single.dtype, torch.float32)
        self.assertClose(single, wanted, atol=1e-4)
        self.assertGradientOnlyTo("", group_advantages, rewards=rewards)

    @on_random_cases(10)
    def test_identity(self, draw):
        groups, size = draw.whole(1, 4), draw.whole(2, 6)
        rewards = draw.normal(groups, size)
        advantages = group_advantages(rewards, eps=0.0)
        self.assertClose(advantages.mean(dim=1), [0] * groups)
        self.assertClose(advantages.square().mean(dim=1), [1] * groups)  # divisor G
        # Relative to the group: shift and positive scale drop out, a sign change turns it round.
        self.assertClose(group_advantages(rewards + draw.normal(groups, 1), eps=0.0), advantages, atol=1e-10)
        self.assertClose(group_advantages(rewards * draw.number(0.1, 10), eps=0.0), advantages)
        self.assertClose(group_advantages(-rewards, eps=0.0), -advantages)
        order, columns = draw.order(groups), draw.order(size)
        self.assertClose(group_advantages(rewards[order][:, columns], eps=0.0), advantages[order][:, columns])
        for row in range(groups):  # prompts never mix
            self.assertClose(group_advantages(rewards[row], eps=0.0), advantages[row])
        # Two answers: +1 and -1, however close they are.
        self.assertClose(group_advantages(rewards[:, :2], eps=0.0), (rewards[:, :2] - rewards[:, :2].flip(1)).sign())
        # A large eps leaves the centred reward, scaled.
        centred = rewards - rewards.mean(dim=1, keepdim=True)
        self.assertClose(1e9 * group_advantages(rewards, eps=1e9), centred, atol=1e-7)

    def test_extremes(self):
        for dtype in BOTH:
            for equal in ([0.0] * 3, [1e4] * 3, [-1e4] * 3, [0.7, 0.7, 0.7]):
                for eps in (0.0, 1e-8):
                    self.assertEqual(group_advantages(torch.tensor(equal, dtype=dtype), eps).tolist(), [0] * 3)
            self.assertClose(group_advantages(torch.tensor([1e4, -1e4, 1e4, -1e4], dtype=dtype)), [1, -1, 1, -1], atol=1e-6)
        self.assertEqual(group_advantages(f64(0.1 + 0.2, 0.3), eps=0.0).tolist(), [0, 0])
        self.assertEqual(group_advantages(torch.zeros(0, 4)).shape, (0, 4))

    def test_extremes_at_the_ends_of_each_dtype(self):
        """The largest and the smallest numbers there are, where a unit, its inverse or a difference leaves the dtype."""
        for dtype in (*BOTH, *HALF):
            limits = torch.finfo(dtype)
            smallest = limits.smallest_normal * limits.eps
            ends = (0, limits.max), (-limits.max, limits.max), (0, smallest), (smallest, 2 * smallest), (-smallest, 0)
            for low, high in ends:
                rewards = torch.tensor([low, high, high, low], dtype=dtype)
                with self.subTest(dtype=dtype, low=low, high=high):
                    self.assertEqual(group_advantages(rewards, eps=0).tolist(), [-1, 1, 1, -1])
        self.assertClose(group_advantages(f64(1.7e308, 0, 0.85e308), eps=0.0), [math.sqrt(1.5), -math.sqrt(1.5), 0])
        self.assertClose(group_advantages(f64(5e-324, 1e-323, 0), eps=0.0), [0, math.sqrt(1.5), -math.sqrt(1.5)])

    def test_extremes_any_finite_scale(self):
        """Squares of huge rewards overflow and squares of tiny ones vanish; the advantages do neither."""
        for dtype, sizes in ((torch.float64, (1e-200, 1e160, 1e307)), (torch.float32, (1e-30, 1e25, 1e37))):
            for size in sizes:
                with self.subTest(dtype=dtype, size=size):
                    for low, high in ((1.0, 3.0), (0.0, 1.0), (-5.0, 5.0), (-1.0, 0.0)):
                        rewards = size * torch.tensor([low, high, high, low], dtype=dtype)
                        self.assertClose(group_advantages(rewards, eps=0.0), [-1, 1, 1, -1], atol=1e-6)

    def test_refusals(self):
        good = {"rewards": f64(0, 1)}
        self.assertRefusesWrongTensors(group_advantages, **good)
        alone = (
            {"rewards": f64(1).unsqueeze(0)},
            ValueError,
            r"^rewards: got shape \(1, 1\), wanted at least 2.*one answer has nothing",
        )
        self.assertRefused(group_advantages, good, alone, *self.BAD_REWARDS)
        self.assertRefusesNumbers(group_advantages, good, "eps", "of at least 0", (-1e-8,))
        self.assertClose(group_advantages(f64(0, 2), eps=2**70), [-(2.0**-70), 2.0**-70], atol=1e-30)


class ZeroVarianceProbability(OracleCase):
    @on_random_cases(12)
    def test_definition_by_enumeration_of_all_groups(self, draw):
        shape, size = (*draw.shape(), draw.whole(1, 4)), draw.whole(1, 5)
        probabilities = draw.normal(*shape).softmax(dim=-1)

        def definition(row: list[float]) -> float:
            groups = itertools.product(range(len(row)), repeat=size)
            return sum(math.prod(row[outcome] for outcome in group) for group in groups if len(set(group)) == 1)

        self.assertClose(zero_variance_probability(probabilities, size), rowwise(definition, probabilities))
        self.assertGradient(lambda p: zero_variance_probability(p, size), probabilities)
        self.assertGradientOnlyTo("probabilities", zero_variance_probability, probabilities=probabilities, group_size=size)

    @on_random_cases(6)
    def test_definition_by_the_groups_of_group_advantages(self, draw):
        """The chance that group_advantages is all zero, over every group of distinct rewards."""
        probabilities, rewards, size = draw.normal(3).softmax(-1), draw.normal(3), draw.whole(2, 5)
        groups = torch.cartesian_prod(*[torch.arange(3)] * size)
        weights = probabilities[groups].prod(dim=1)
        without_signal = (group_advantages(rewards[groups]) == 0).all(dim=1)
        self.assertClose(weights[without_signal].sum(), zero_variance_probability(probabilities, size))

    def test_identity(self):
        for size in range(1, 9):
            for p in (0.0, 0.2, 0.5, 0.99, 1.0):
                self.assertClose(zero_variance_probability(f64(p, 1 - p), size), p**size + (1 - p) ** size)
            for count in (1, 2, 3, 5):
                uniform = torch.full((count,), 1 / count, dtype=torch.float64)
                self.assertClose(zero_variance_probability(uniform, size), count ** (1.0 - size))
        self.assertEqual(zero_variance_probability(torch.tensor([1.0, 0.0]), 4096).item(), 1.0)
        self.assertEqual(zero_variance_probability(f64(0.5, 0.5), 10**30).item(), 0.0)
        for dtype in (torch.float32, *HALF):  # a softmax is accepted in its own rounding, however long
            for count in (8, 1000, 100_000):
                rows = Draw(count).normal(20, count).softmax(-1).to(dtype)
                self.assertEqual(zero_variance_probability(rows, 8).dtype, dtype)
        # A million shares of 1e-6 are 1.0133e-6 each in float16, whose smallest number is 6e-8.
        many = torch.full((1, 1_000_000), 1e-6, dtype=torch.float16)
        self.assertEqual(zero_variance_probability(many, 2).item(), torch.tensor(1e-6).half().item())
        with self.assertRaisesRegex(ValueError, "likely logits"):
            zero_variance_probability(torch.tensor([0.5, 0.51], dtype=torch.float16), 2)

    def test_refusals(self):
        good = dict(probabilities=f64(0.3, 0.7), group_size=3)
        self.assertRefusesWrongTensors(zero_variance_probability, **good)
        self.assertRefusesNumbers(zero_variance_probability, good, "group_size", "of at least 1", (0, -2, 0.5))
        single = {"group_size": 1e39, "probabilities": torch.tensor([0.3, 0.7])}
        self.assertRefused(zero_variance_probability, good, (single, ValueError, "^group_size: got 1e\\+39.*float32"))
        half = ({"group_size": 2.5}, ValueError, "^group_size: got 2.5, wanted a whole number$")
        self.assertRefused(zero_variance_probability, good, half)
        self.assertRefused(
            zero_variance_probability,
            good,
            *(({"probabilities": f64(*bad)}, ValueError, "^probabilities: wanted .*sum to 1; likely logits were given")
              for bad in ((0.3, 0.6), (1.3, -0.3), (0, 0), (NAN, 1))),
            ({"probabilities": f64(1).squeeze()}, ValueError, "^probabilities: got shape .*the outcomes"),
            ({"probabilities": f64()}, ValueError, "^probabilities: got shape .*the outcomes"),
        )  # fmt: skip
        one_bad_row = ({"probabilities": f64([0.5, 0.5], [0.5, 0.4])}, ValueError, "^probabilities: wanted .*sum to 1")
        self.assertRefused(zero_variance_probability, good, one_bad_row)


# ------------------------------------------------------------------------------------------ atoms: token sequences


class Sequences:
    """Random logits [B, T, V], ids [B, T] and a response mask [B, T]."""

    def __init__(self, draw: Draw):
        rows, length, self.vocabulary = draw.whole(1, 4), draw.whole(2, 7), draw.whole(2, 6)
        self.logits = draw.normal(rows, length, self.vocabulary, scale=2)
        self.ids = draw.below(self.vocabulary, rows, length)
        self.mask = torch.cat([torch.zeros(rows, 1, dtype=torch.bool), draw.mask(rows, length - 1)], dim=1)

    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.logits, self.ids, self.mask

    def by_loops(self) -> list[list[float]]:
        """The score of each token at t >= 1 under the logits one position before it; 0 where the mask is not set."""
        rows, length = self.ids.shape
        scores = [[0.0] * (length - 1) for _ in range(rows)]
        for b in range(rows):
            for t in range(1, length):
                if self.mask[b, t]:
                    scores[b][t - 1] = math.log(softmax(self.logits[b, t - 1].tolist())[self.ids[b, t]])
        return scores


class ResponseTokenLogps(OracleCase):
    @on_random_cases(20)
    def test_definition(self, draw):
        batch = Sequences(draw)
        for dtype, atol in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            token_logps, valid = response_token_logps(batch.logits.to(dtype), batch.ids, batch.mask)
            self.assertEqual(token_logps.dtype, dtype)
            self.assertClose(token_logps, batch.by_loops(), atol=atol)
            self.assertEqual(valid.tolist(), [row[1:] for row in batch.mask.tolist()])
        self.assertClose(response_token_logps(batch.logits, batch.ids.int(), batch.mask)[0], batch.by_loops())

    @on_random_cases(10)
    def test_gradient(self, draw):
        batch = Sequences(draw)
        self.assertGradient(lambda z: response_token_logps(z, batch.ids, batch.mask)[0], batch.logits)
        # The row of logits before each response token receives one_hot - p, every other row exactly nothing.
        logits = batch.logits.clone().requires_grad_()
        gradient = torch.autograd.grad(response_token_logps(logits, batch.ids, batch.mask)[0].sum(), logits)[0]
        wanted = torch.zeros_like(gradient)
        for b, t in batch.mask.nonzero().tolist():
            wanted[b, t - 1] = -f64(*softmax(batch.logits[b, t - 1].tolist()))
            wanted[b, t - 1, batch.ids[b, t]] += 1
        self.assertClose(gradient, wanted)

    @on_random_cases(10)
    def test_identity(self, draw):
        batch = Sequences(draw)
        logits, ids, mask = batch.all()
        rows = len(ids)
        token_logps, valid = response_token_logps(logits, ids, mask)
        order = draw.order(rows)
        self.assertClose(response_token_logps(logits[order], ids[order], mask[order])[0], token_logps[order])
        for b in range(rows):  # split into rows
            self.assertClose(
                response_token_logps(logits[b : b + 1], ids[b : b + 1], mask[b : b + 1])[0], token_logps[b : b + 1]
            )
        # Padding: appended after the row, it adds zeros; put before the row, it moves them.
        padding = (
            torch.full((rows, 3, logits.shape[2]), NAN, dtype=torch.float64),
            draw.below(2, rows, 3),
            torch.zeros(rows, 3).bool(),
        )
        for sign, wanted_slots in ((1, slice(None, -3)), (-1, slice(3, None))):
            padded = response_token_logps(
                *(torch.cat((x, pad)[::sign], dim=1) for x, pad in zip((logits, ids, mask), padding))
            )
            self.assertClose(padded[0][:, wanted_slots], token_logps)
            self.assertEqual(padded[1][:, wanted_slots].tolist(), valid.tolist())
            self.assertEqual(padded[1].sum(), valid.sum())
            self.assertClose(padded[0].sum(), token_logps.sum())
        # Which tokens the prompt and the padding hold is not looked at; a constant per row of logits drops out.
        other_ids = torch.where(mask, ids, draw.below(batch.vocabulary, *ids.shape))
        self.assertClose(response_token_logps(logits, other_ids, mask)[0], token_logps)
        self.assertClose(response_token_logps(logits + draw.normal(*ids.shape, 1), ids, mask)[0], token_logps)

    @on_random_cases(10)
    def test_extremes_unused_slots_are_never_read(self, draw):
        batch = Sequences(draw)
        used = torch.cat([batch.mask[:, 1:], torch.zeros(len(batch.ids), 1, dtype=torch.bool)], dim=1).unsqueeze(-1)
        clean = batch.logits.clone().requires_grad_()
        loss = response_token_logps(clean, batch.ids, batch.mask)[0].sum()
        wanted = torch.autograd.grad(loss, clean)[0]
        for filler in (NAN, INF, -INF):
            poisoned = batch.logits.masked_fill(~used, filler).requires_grad_()
            token_logps, _ = response_token_logps(poisoned, batch.ids, batch.mask)
            self.assertClose(token_logps, batch.by_loops())
            self.assertTrue(torch.equal(torch.autograd.grad(token_logps.sum(), poisoned)[0], wanted))

    def test_extremes(self):
        ids, mask = torch.tensor([[0, 1, 2]]), flags(0, 1, 1).unsqueeze(0)
        for dtype in BOTH:
            # Token 1 under (1e4, -1e4, 0): -2e4. Token 2 with token 0 forbidden, equal to token 1: -log 2.
            logits = torch.tensor([[[1e4, -1e4, 0], [-INF, 0, 0], [0, 0, 0]]], dtype=dtype, requires_grad=True)
            token_logps, _ = response_token_logps(logits, ids, mask)
            self.assertClose(token_logps, [[-2e4, -math.log(2)]], atol=1e-6)
            gradient = torch.autograd.grad(token_logps.sum(), logits)[0]
            self.assertClose(gradient, [[[-1, 1, 0], [0, -0.5, 0.5], [0, 0, 0]]], atol=1e-6)

    def test_extremes_no_rows(self):
        nothing = torch.zeros(0, 3, dtype=torch.long)
        token_logps, valid = response_token_logps(torch.zeros(0, 3, 1), nothing, nothing.bool())
        self.assertEqual((token_logps.shape, valid.shape), ((0, 2), (0, 2)))
        self.assertEqual(response_logps(torch.zeros(0, 3, 1), nothing, nothing.bool()).shape, (0,))

    def test_refusals(self):
        for bad in ([NAN, 0.0], [INF, 0.0], [-INF, -INF]):  # at a position that is used
            logits = torch.tensor([[[0.0, 0.0], bad, [0.0, 0.0]]])
            with self.subTest(bad=bad), self.assertRaisesRegex(ValueError, r"^logits: the row at index \[0, 1\] is no dist"):
                response_token_logps(logits, torch.tensor([[0, 1, 1]]), flags([0, 1, 1]))
        good = dict(
            logits=torch.zeros(2, 3, 4),
            input_ids=torch.tensor([[0, 1, 2], [0, 3, 1]]),
            response_mask=flags(0, 1, 1).repeat(2, 1),
        )
        first, empty = good["response_mask"].clone(), good["response_mask"].clone()
        first[1, 0], empty[1] = True, False
        for atom in (response_token_logps, response_logps):
            self.assertRefusesWrongTensors(atom, **good)
            self.assertRefused(
                atom,
                good,
                ({"logits": torch.zeros(2, 3)}, ValueError, r"^logits: got shape \(2, 3\), wanted \[B, T, V\]"),
                (
                    {"logits": torch.zeros(2, 2, 4)},
                    ValueError,
                    r"^input_ids: got shape \(2, 3\), wanted \(2, 2\).*unshifted",
                ),
                (
                    {"input_ids": good["input_ids"][:, 1:]},
                    ValueError,
                    r"^input_ids: got shape \(2, 2\).*pass all three unshifted",
                ),
                (
                    {"response_mask": first[:, 1:]},
                    ValueError,
                    r"^response_mask: got shape \(2, 2\).*pass all three unshifted",
                ),
                ({"response_mask": first}, ValueError, "^response_mask: row 1 is set at position 0"),
                ({"response_mask": empty}, ValueError, "^response_mask: row 1 has no response token"),
                (
                    {"input_ids": good["input_ids"] + 1},
                    ValueError,
                    "^input_ids: got ids from 1 to 4, wanted 0 to 3.*tokenizer",
                ),
                (
                    {"input_ids": good["input_ids"] - 100},
                    ValueError,
                    "^input_ids: got ids from -100 to -97, wanted 0 to 3.*-100",
                ),
            )
        with self.subTest("also in the prompt, where an id is not scored"), self.assertRaisesRegex(ValueError, "-100"):
            response_token_logps(**{**good, "input_ids": torch.tensor([[-100, 1, 2], [0, 3, 1]])})


class ResponseLogps(OracleCase):
    @on_random_cases(15)
    def test_definition_and_gradient(self, draw):
        batch = Sequences(draw)
        self.assertClose(response_logps(*batch.all()), [math.fsum(row) for row in batch.by_loops()])
        self.assertGradient(lambda z: response_logps(z, batch.ids, batch.mask), batch.logits)

    @on_random_cases(5)
    def test_identity_probabilities_of_all_answers_sum_to_one(self, draw):
        vocabulary, length = draw.whole(2, 3), draw.whole(1, 4)
        answers = torch.cartesian_prod(*[torch.arange(vocabulary)] * length).reshape(-1, length)
        ids = torch.cat([torch.zeros(len(answers), 1, dtype=torch.long), answers], dim=1)
        logits = draw.normal(vocabulary, vocabulary)[ids]  # the next token depends on this one
        mask = (torch.arange(length + 1) > 0).expand(ids.shape)
        self.assertClose(response_logps(logits, ids, mask).exp().sum(), 1)


# ------------------------------------------------------------------------------------------ atoms: every dtype


class EveryDtype(OracleCase):
    """Each atom on numbers stored in each dtype, against itself in float64 on the same stored numbers."""

    @staticmethod
    def calls(draw: Draw) -> dict[str, tuple[Callable, dict[str, Tensor], dict]]:
        """Of each atom its floating arguments, in float64, and the others."""
        shape = (3, 8)
        logp, other, third, fourth = (-draw.normal(*shape).abs() for _ in range(4))
        numbers, near = draw.normal(3, *shape), logp + draw.normal(*shape, scale=0.01)
        batch, actions = Sequences(draw), draw.below(8, 3)
        sixteenths = f64(1, 1, 2, 4, 1, 3, 2, 2) / 16  # every dtype holds them, so that they sum to 1 in each
        terminated = draw.flags(3, 40, share=0.05)
        ends = dict(terminated=terminated, boundary=terminated | draw.flags(3, 40, share=0.05))
        scores = dict(chosen=9 * logp, rejected=9 * other, ref_chosen=9 * third, ref_rejected=9 * fourth)
        td = dict(zip(("rewards", "values", "next_values"), draw.normal(3, 3, 40)))
        tokens = dict(input_ids=batch.ids, response_mask=batch.mask)
        return {
            "action_logps": (action_logps, dict(logits=3 * numbers[0]), dict(actions=actions)),
            "reinforce_loss": (reinforce_loss, dict(logp=logp, returns=numbers[0]), {}),
            "td_residuals": (td_residuals, td, dict(terminated=terminated, gamma=0.99)),
            "gae": (gae, td, dict(ends, gamma=0.99, lam=0.95)),
            "importance_ratio": (importance_ratio, dict(logp=logp, old_logp=other), {}),
            "clipped_policy_loss": (clipped_policy_loss, dict(logp=logp, old_logp=other, advantages=numbers[0]), {}),
            "clip_fraction": (clip_fraction, dict(logp=logp, old_logp=other), {}),
            "clipped_value_loss": (
                clipped_value_loss, dict(values=numbers[0], old_values=numbers[1], returns=numbers[2]), {},
            ),
            "categorical_kl": (categorical_kl, dict(logits=numbers[0], reference_logits=numbers[1]), {}),
            "kl_estimates": (kl_estimates, dict(logp=logp, ref_logp=near), {}),
            "preference_probability": (
                preference_probability, dict(reward_chosen=numbers[0], reward_rejected=numbers[1]), {},
            ),
            "dpo_loss": (
                dpo_loss, scores, {"beta": 0.1},
            ),
            "groups_without_spread": (groups_without_spread, dict(rewards=numbers[0]), {}),
            "group_advantages": (group_advantages, dict(rewards=numbers[0]), {}),
            "zero_variance_probability": (
                zero_variance_probability, dict(probabilities=sixteenths[draw.order(8)].expand(3, 8)), {"group_size": 4},
            ),
            "response_token_logps": (response_token_logps, dict(logits=batch.logits), tokens),
            "response_logps": (response_logps, dict(logits=batch.logits), tokens),
        }  # fmt: skip

    @staticmethod
    def results_and_slopes(atom: Callable, floating: dict[str, Tensor], others: dict) -> list[Tensor]:
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in floating.items()}
        results = atom(**leaves, **others)
        results = results if isinstance(results, tuple) else (results,)
        connected = [result.sum() for result in results if result.requires_grad]
        slopes = torch.autograd.grad(connected, list(leaves.values()), allow_unused=True) if connected else ()
        return [result.detach() for result in results] + [slope for slope in slopes if slope is not None]

    def test_the_table_names_every_atom(self):
        source = ast.parse(Path(rl_lab.__file__).read_text(encoding="utf-8"))
        names = [getattr(node, "name", "") for node in source.body]
        atoms = source.body[names.index("action_logps") : names.index("response_logps") + 1]
        public = {n.name for n in atoms if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")}
        self.assertEqual(set(self.calls(Draw(0))), public)

    @on_random_cases(5)
    def test_definition_in_every_dtype(self, draw):
        """One rounding of the result, beside that of the arithmetic in float32; the result has the dtype of the numbers."""
        for name, (atom, floating, others) in self.calls(draw).items():
            for dtype in (torch.float32, *HALF):
                stored = {key: tensor.to(dtype) for key, tensor in floating.items()}
                got = self.results_and_slopes(atom, stored, others)
                wanted = self.results_and_slopes(atom, {key: tensor.double() for key, tensor in stored.items()}, others)
                self.assertEqual(len(got), len(wanted))
                for mine, right in zip(got, wanted):
                    with self.subTest(atom=name, dtype=dtype):
                        self.assertEqual(mine.dtype, torch.bool if right.dtype == torch.bool else dtype)
                        rtol = 0.75 * torch.finfo(dtype).eps + 2e-6
                        torch.testing.assert_close(mine.double(), right.double(), rtol=rtol, atol=3e-6)

    def test_mixed_dtypes_answer_in_the_wider_one(self):
        for first, second, wanted in (
            (torch.float16, torch.bfloat16, torch.float32),
            (torch.float32, torch.float64, torch.float64),
            (torch.bfloat16, torch.float32, torch.float32),
        ):
            loss = reinforce_loss(torch.tensor([-1.0], dtype=first), torch.tensor([2.0], dtype=second))
            self.assertEqual((loss.dtype, loss.item()), (wanted, 2.0))

    def test_half_precision_sums_and_small_differences(self):
        """Numbers that are lost where arithmetic is done in the half precision itself."""
        for dtype in HALF:
            eps = torch.finfo(dtype).eps
            with self.subTest("2,000 steps of reward 1: (1 - 0.999^2000) / 0.001 = 864.8, and not 256", dtype=dtype):
                for rows in (1, 2, 20):
                    one, none = torch.ones(rows, 2000, dtype=dtype), torch.zeros(rows, 2000, dtype=torch.bool)
                    advantages, _ = gae(one, 0 * one, 0 * one, none, none, gamma=0.999, lam=1.0)
                    self.assertClose(advantages[:, 0], [(1 - 0.999**2000) / 0.001] * rows, atol=eps * 865)
            with self.subTest("k3 of d = 0.001 is d^2 / 2, and its slope d", dtype=dtype):
                d = torch.tensor([1e-3, -1e-3], dtype=dtype, requires_grad=True)
                k3 = kl_estimates(d, torch.zeros_like(d))[2]
                self.assertClose(k3 / (d.double() ** 2 / 2), [1, 1], atol=0.13 if dtype == torch.float16 else 1e-2)
                self.assertClose(torch.autograd.grad(k3.sum(), d)[0] / d, [1, 1], atol=2 * eps)
            with self.subTest("the score of 500 tokens is their sum in float32, rounded once", dtype=dtype):
                draw = Draw(1)
                logits, ids = draw.normal(2, 501, 50, scale=3).to(dtype), draw.below(50, 2, 501)
                mask = (torch.arange(501) > 0).expand(2, -1)
                exact = response_logps(logits.double(), ids, mask)
                self.assertTrue(torch.equal(response_logps(logits, ids, mask), exact.to(dtype)))
                for vocabulary in range(2, 40):  # equal tokens: each would be rounded to the same side
                    level = torch.zeros(1, 101, vocabulary, dtype=dtype)
                    scores = response_logps(level, torch.zeros(1, 101).long(), mask[:1, :101])
                    self.assertEqual(scores.item(), torch.tensor(-100 * math.log(vocabulary)).to(dtype).item())
            with self.subTest("the cap of the ratio is that of the dtype: no inf", dtype=dtype):
                far = torch.tensor([50.0 if dtype == torch.float16 else 1e4], dtype=dtype, requires_grad=True)
                loss = clipped_policy_loss(far, torch.zeros_like(far), -torch.ones_like(far))
                self.assertTrue(loss.isfinite().all() and importance_ratio(far, 0 * far).isfinite().all())
                self.assertEqual(torch.autograd.grad(loss.sum(), far)[0].item(), 0)
            with self.subTest("a clip so wide that it never acts", dtype=dtype):
                logp = torch.tensor([1.0], dtype=dtype)
                self.assertClose(clipped_policy_loss(logp, 0 * logp, -logp, epsilon=1e6), [math.e], atol=2 * eps)

    def test_no_atom_depends_on_the_default_dtype(self):
        calls = self.calls(Draw(3))
        before = torch.get_default_dtype()
        try:
            for dtype in (torch.float32, torch.float64):
                right = {}
                for default in (torch.float32, torch.float64, *HALF):
                    torch.set_default_dtype(default)
                    for name, (atom, floating, others) in calls.items():
                        stored = {key: tensor.to(dtype) for key, tensor in floating.items()}
                        got = [(x.dtype, x.tolist()) for x in self.results_and_slopes(atom, stored, others)]
                        with self.subTest(atom=name, dtype=dtype, default=default):
                            self.assertEqual(str(got), str(right.setdefault(name, got)))
        finally:
            torch.set_default_dtype(before)


class AnotherInterpreter(OracleCase):
    def test_nothing_depends_on_the_default_dtype_or_on_docstrings(self):
        """Every worked example and some steps of every training, in a process with another default, run with -OO."""
        program = (
            "import torch\n"
            "torch.set_default_dtype(torch.float16)\n"
            "import rl_lab\n"
            "print([example.result for example in rl_lab.worked_examples()])\n"
            "print([rl_lab.train(name, steps=2).history for name in ('ppo', 'dpo', 'grpo')])\n"
        )
        command, folder = [sys.executable, "-OO", "-B", "-c", program], Path(rl_lab.__file__).parent
        finished = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        self.assertEqual(finished.stderr, "")
        examples = [example.result for example in rl_lab.worked_examples()]
        histories = [rl_lab.train(name, steps=2).history for name in ("ppo", "dpo", "grpo")]
        self.assertEqual(finished.stdout.splitlines(), [repr(examples), repr(histories)])


# ------------------------------------------------------------------------------------------ reductions


def losses_and_mask(draw: Draw) -> tuple[Tensor, Tensor, list[list[float]]]:
    """Token values [B, T], NaN where unused, the mask, and the used values as lists."""
    mask = draw.mask(draw.whole(1, 4), draw.whole(1, 6))
    values = draw.normal(*mask.shape)
    return values.masked_fill(~mask, NAN), mask, [row[used].tolist() for row, used in zip(values, mask)]


class Reductions(OracleCase):
    """mean_per_response and mean_over_tokens of token_objectives.py."""

    DEFINITIONS = {
        mean_per_response: lambda rows: sum(sum(row) / len(row) for row in rows) / len(rows),
        mean_over_tokens: lambda rows: sum(sum(row) for row in rows) / sum(len(row) for row in rows),
    }
    WEIGHTS = {
        mean_per_response: lambda mask: mask.double() / mask.sum(dim=1, keepdim=True) / len(mask),
        mean_over_tokens: lambda mask: mask.double() / mask.sum(),
    }

    @on_random_cases(20)
    def test_definition_and_gradient(self, draw):
        values, mask, rows = losses_and_mask(draw)
        for reduction, definition in self.DEFINITIONS.items():
            with self.subTest(reduction.__name__):
                self.assertClose(reduction(values, mask), definition(rows))
                single = reduction(values.float(), mask)
                self.assertEqual(single.dtype, torch.float32)
                self.assertClose(single, definition(rows), atol=1e-5)
                for filler in (NAN, INF, -INF, 0.0):  # unused slots: no gradient, whatever they hold
                    tracked = values.masked_fill(~mask, filler).requires_grad_()
                    (gradient,) = torch.autograd.grad(reduction(tracked, mask), tracked)
                    self.assertClose(gradient, self.WEIGHTS[reduction](mask))
                self.assertGradient(lambda x: reduction(x, mask), values.nan_to_num())

    @on_random_cases(10)
    def test_identity(self, draw):
        values, mask, rows = losses_and_mask(draw)
        order, slots = draw.order(len(mask)), draw.order(mask.shape[1])
        for reduction in self.DEFINITIONS:
            with self.subTest(reduction.__name__):
                right = reduction(values, mask)
                self.assertClose(reduction(torch.ones_like(values), mask), 1)
                self.assertClose(reduction(values[order][:, slots], mask[order][:, slots]), right)
                padding = torch.full((len(mask), 2), NAN, dtype=torch.float64)
                self.assertClose(reduction(torch.cat([values, padding], 1), torch.cat([mask, padding > 0], 1)), right)
                self.assertClose(reduction(3 * values + 2, mask), 3 * right + 2)
                self.assertClose(reduction(torch.cat([values, values]), torch.cat([mask, mask])), right)
        # Split and joined: a mean of parts weighs each part by what the reduction counts, responses or tokens.
        parts = [(values[b : b + 1], mask[b : b + 1]) for b in range(len(mask))]
        tokens = [len(row) for row in rows]
        self.assertClose(sum(mean_per_response(*part) for part in parts) / len(parts), mean_per_response(values, mask))
        by_tokens = sum(n * mean_over_tokens(*part) for n, part in zip(tokens, parts)) / sum(tokens)
        self.assertClose(by_tokens, mean_over_tokens(values, mask))
        # Equal lengths: one number. Unequal lengths: two, which is why both have names.
        full = torch.ones_like(mask)
        self.assertClose(mean_per_response(values.nan_to_num(), full), mean_over_tokens(values.nan_to_num(), full))

    def test_identity_they_differ_on_unequal_lengths(self):
        values, mask = f64(1, 0, 0, 0, 0, 0).reshape(2, 3), flags(1, 0, 0, 1, 1, 1).reshape(2, 3)
        self.assertClose(mean_per_response(values, mask), 1 / 2)
        self.assertClose(mean_over_tokens(values, mask), 1 / 4)

    def test_refusals(self):
        values, mask = f64(1, 2, 3, 4).reshape(2, 2), flags(1, 0, 1, 1).reshape(2, 2)
        for reduction in self.DEFINITIONS:
            self.assertRefused(
                reduction,
                dict(token_values=values, valid=mask),
                ({"valid": mask.long()}, ValueError, r"wanted one shape \[B, T\] and a bool mask"),
                ({"valid": mask[:, :1]}, ValueError, r"valid \(2, 1\).*wanted one shape \[B, T\]"),
                (dict(token_values=values[0], valid=mask[0]), ValueError, r"token_values \(2,\).*wanted one shape \[B, T\]"),
                ({"valid": flags(1, 1, 0, 0).reshape(2, 2)}, ValueError, "^valid: row 1 has no valid token to average over"),
            )


# ------------------------------------------------------------------------------------------ rl_lab.py: optimiser


class AdamRule(OracleCase):
    @on_random_cases(6)
    def test_definition_is_torch_optim_adam(self, draw):
        shapes = [(3,), (2, 4), ()]
        lr, betas, eps = draw.number(1e-3, 0.5), (draw.number(0, 0.99), draw.number(0.5, 0.9999)), 10 ** draw.number(-10, -2)
        mine = [draw.normal(*shape).requires_grad_() for shape in shapes]
        theirs = [parameter.detach().clone().requires_grad_() for parameter in mine]
        ours, torchs = Adam(mine, lr, betas, eps), torch.optim.Adam(theirs, lr=lr, betas=betas, eps=eps)
        for step in range(60):
            scale = (1.0, 1e-6, 1e6, 0.0)[step % 4]
            gradients = [draw.normal(*shape, scale=scale) for shape in shapes]
            ours.step(gradients)
            for parameter, gradient in zip(theirs, gradients):
                parameter.grad = gradient.clone()
            torchs.step()
            for got, wanted in zip(mine, theirs):
                self.assertClose(got, wanted.detach())

    def test_definition_defaults(self):
        mine, theirs = leaf(1.0, -2.0), leaf(1.0, -2.0)
        ours, torchs = Adam([mine], 0.08), torch.optim.Adam([theirs], lr=0.08)
        for step in range(200):
            gradient = f64(math.sin(step), 1e-8 * step)  # the second one makes eps matter
            ours.step([gradient])
            theirs.grad = gradient
            torchs.step()
        self.assertClose(mine, theirs.detach())

    def test_definition_by_loops(self):
        """Algorithm 1 of the paper on one number, in plain floats."""
        beta1, beta2, lr, eps, m, v, wanted = 0.8, 0.95, 0.1, 1e-3, 0.0, 0.0, 0.5
        parameter = leaf(wanted)
        optimizer = Adam([parameter], lr, (beta1, beta2), eps)
        for t in range(1, 50):
            g = math.cos(t) / t
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            wanted -= lr * (m / (1 - beta1**t)) / (math.sqrt(v / (1 - beta2**t)) + eps)
            optimizer.step([f64(g)])
            self.assertClose(parameter, [wanted])

    def test_identity_the_first_step_has_the_size_of_the_learning_rate(self):
        parameter = leaf(0, 0, 0, 0)
        Adam([parameter], 0.08).step([f64(5, -1e-3, 1e6, 0)])
        self.assertClose(parameter, [-0.08, 0.08, -0.08, 0], atol=1e-6)
        self.assertTrue(parameter.requires_grad)


class RecordingOptimizer:
    """In Adam's place: keeps the gradients that it is given."""

    def __init__(self, *parameters: Tensor):
        self.parameters, self.received = list(parameters), None

    def step(self, gradients: list[Tensor]) -> None:
        self.received = gradients


class Descend(OracleCase):
    @on_random_cases(12)
    def test_definition(self, draw):
        """A linear loss has its coefficients as gradient, so the norm and the scaling are known beforehand."""
        shapes = [(3,), (2, 2), ()]
        parameters = [draw.normal(*shape).requires_grad_() for shape in shapes]
        coefficients = [draw.normal(*shape) for shape in shapes]
        loss = sum((p * c).sum() for p, c in zip(parameters, coefficients))
        norm = math.sqrt(sum(x * x for c in coefficients for x in c.flatten().tolist()))
        limit = norm * draw.number(0.2, 2)
        optimizer = RecordingOptimizer(*parameters)
        self.assertClose(descend(loss, optimizer, limit, "here"), norm)
        for received, coefficient in zip(optimizer.received, coefficients):
            self.assertClose(received, coefficient * min(1, limit / norm))

    def test_identity_at_the_limit_nothing_is_scaled(self):
        parameter = leaf(0, 0)
        optimizer = RecordingOptimizer(parameter)
        self.assertEqual(descend((parameter * f64(3, 4)).sum(), optimizer, 5.0, "here"), 5.0)
        self.assertEqual(optimizer.received[0].tolist(), [3, 4])
        self.assertEqual(descend((parameter * f64(0, 0)).sum(), optimizer, 5.0, "here"), 0.0)
        self.assertEqual(optimizer.received[0].tolist(), [0, 0])

    def test_identity_nothing_is_said(self):
        """A loss that is handed on as a tensor where a number is wanted makes torch warn on stderr, once per process."""
        parameter = leaf(1, 2)
        torch.set_warn_always(True)
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                descend(parameter.square().sum(), RecordingOptimizer(parameter), 5.0, "here")
        finally:
            torch.set_warn_always(False)
        self.assertEqual([str(warning.message) for warning in said], [])

    def test_identity_one_adam_step_on_the_scaled_gradient(self):
        mine, theirs = leaf(1, 2), leaf(1, 2)
        ours, torchs = Adam([mine], 0.08), torch.optim.Adam([theirs], lr=0.08)
        for _ in range(30):
            loss, same = (10 * p.square().square().sum() for p in (mine, theirs))
            norm = descend(loss, ours, 1.0, "here")
            torchs.zero_grad()
            same.backward()
            self.assertClose(theirs.grad.norm(), norm)
            theirs.grad /= max(1.0, norm)
            torchs.step()
            self.assertClose(mine, theirs.detach())
            self.assertIsNone(mine.grad)

    def test_refusals_leave_parameters_and_optimizer_as_they_were(self):
        cases = {
            "loss is nan": lambda p: (p * NAN).sum(),
            "loss is inf": lambda p: p.sum() + INF,
            "loss is -inf": lambda p: p.sum() - INF,
            "gradient_norm is inf": lambda p: (p[0] - 1).sqrt() + 0 * p.sum(),  # slope of sqrt at 0
            "gradient_norm is nan": lambda p: p.sum() + (0 * p).sqrt().sum(),  # inf * 0
        }
        for words, loss in cases.items():
            with self.subTest(words):
                parameter, other = leaf(1.0, 2.0), leaf(3.0)
                optimizer = Adam([parameter, other], 0.1)
                descend(parameter.sum() + other.sum(), optimizer, 1.0, "first")
                parameter.data.copy_(f64(1.0, 2.0))
                before = [x.tolist() for x in (parameter, other, *optimizer.means, *optimizer.squares)]
                with self.assertRaisesRegex(FloatingPointError, f"^ppo, step 3: {words}; .*learning-rate"):
                    descend(loss(parameter) + other.sum(), optimizer, 1.0, "ppo, step 3")
                self.assertEqual([x.tolist() for x in (parameter, other, *optimizer.means, *optimizer.squares)], before)
                self.assertEqual(optimizer.steps, 1)


class ReuseBatch(OracleCase):
    def run_batch(self, max_updates: int, kl_stop: float):
        policy = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
        weights, seen = Draw(1).normal(2, 3), []

        def loss():
            value = -(policy.softmax(-1) * weights).sum()
            seen.append(value.item())
            return value, {"first_logit": lambda: policy.detach()[0, 0]}

        def kl(old, current):
            return categorical_kl(old, current).mean()

        settings = BanditSettings(kl_stop=kl_stop)
        updates = reuse_batch(loss, kl, policy, Adam([policy], 0.1), max_updates, settings, "here")
        return updates, seen, policy

    def test_definition_the_update_that_crosses_the_limit_is_the_last(self):
        free, _, _ = self.run_batch(6, kl_stop=1e5)
        drift = [
            statistics.fmean(kl_definition(old, new) for old, new in zip(free.policies[0].tolist(), after.tolist()))
            for after in free.policies[1:]
        ]
        self.assertEqual(drift, sorted(drift))
        self.assertEqual((free.count, free.update["stopped_early"]), (6, 0))
        for crossing in range(6):
            limit = (drift[crossing] + (drift[crossing - 1] if crossing else 0.0)) / 2
            updates, seen, policy = self.run_batch(6, kl_stop=limit)
            self.assertEqual(updates.count, crossing + 1)
            # The sixth update is the last in any case: crossing there stops nothing early.
            self.assertEqual(updates.update["stopped_early"], int(crossing < 5))
            self.assertEqual(len(seen), crossing + 1)
            self.assertEqual(updates.update["loss"], seen[-1])  # at the parameters before the last update
            self.assertEqual(len(updates.policies), crossing + 2)
            self.assertEqual(updates.policies[0].abs().max(), 0)
            self.assertTrue(torch.equal(updates.policies[-1], policy.detach()))
            for got, wanted in zip(updates.policies, free.policies):
                self.assertTrue(torch.equal(got, wanted))

    def test_definition_the_limit_is_compared_with_old_against_latest(self):
        policy, compared = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True), []

        def kl(old, latest):
            compared.append((old.clone(), latest.clone()))
            return f64(0.25 if len(compared) < 3 else 0.2500001)

        settings = BanditSettings(kl_stop=0.25)  # a KL at the limit goes on, one above it ends
        updates = reuse_batch(lambda: (policy[0, 0], {}), kl, policy, Adam([policy], 0.1), 9, settings, "here")
        self.assertEqual((updates.count, updates.update["stopped_early"]), (3, 1))
        for number, (old, latest) in enumerate(compared, start=1):
            self.assertTrue(torch.equal(old, updates.policies[0]))
            self.assertTrue(torch.equal(latest, updates.policies[number]))

    def test_no_gradient_in_what_is_kept(self):
        updates, _, _ = self.run_batch(2, kl_stop=1e5)
        self.assertFalse(any(policy.requires_grad for policy in updates.policies))


# ------------------------------------------------------------------------------------------ rl_lab.py: task, methods


def random_task(draw: Draw, **settings) -> tuple[rl_lab.Task, BanditSettings]:
    """A task of random size with a reference that is not uniform; some rewards are equal."""
    settings = BanditSettings(**settings)
    rewards = draw.below(4, draw.whole(1, 4), draw.whole(2, 4)).double() / 2 - 0.5
    rewards[0, 0] = 9.0  # at least one preference
    task = make_task(rewards, settings)
    return task._replace(reference=draw.normal(*rewards.shape)), settings


class Evaluate(OracleCase):
    @on_random_cases(15)
    def test_definition_by_enumeration(self, draw):
        task, _ = random_task(draw)
        policy, old = draw.normal(2, *task.rewards.shape)
        wanted = dict.fromkeys(evaluate(policy, old, task), 0.0)
        contexts = task.rewards.tolist()
        for x, rewards in enumerate(contexts):
            p = softmax(policy[x].tolist())
            for a, probability in enumerate(p):
                wanted["expected_reward"] += probability * rewards[a] / len(contexts)
                wanted["optimal_action_probability"] += probability * (rewards[a] == max(rewards)) / len(contexts)
                wanted["entropy"] -= probability * math.log(probability) / len(contexts)
            wanted["kl_old_current"] += kl_definition(old[x].tolist(), policy[x].tolist()) / len(contexts)
            wanted["kl_current_reference"] += kl_definition(policy[x].tolist(), task.reference[x].tolist()) / len(contexts)
        self.assertEqual(len(wanted), 5)
        for name, value in evaluate(policy.requires_grad_(), old, task).items():
            self.assertIsInstance(value, float)
            self.assertAlmostEqual(value, wanted[name], delta=1e-12, msg=name)

    @on_random_cases(5)
    def test_identity(self, draw):
        task, _ = random_task(draw)
        policy = draw.normal(*task.rewards.shape)
        right = evaluate(policy, policy, task)
        self.assertEqual(right["kl_old_current"], 0)
        raised = evaluate(policy, policy, task._replace(rewards=task.rewards + 2))
        self.assertClose(raised["expected_reward"], right["expected_reward"] + 2)
        order = draw.order(len(policy))  # contexts in another order
        moved = evaluate(
            policy[order], policy[order], task._replace(rewards=task.rewards[order], reference=task.reference[order])
        )
        for name in right:
            self.assertClose(moved[name], right[name])

    def test_extremes(self):
        task = make_task(f64(1, 0, -1).unsqueeze(0), BanditSettings())
        for certain in ([1e4, -1e4, -1e4], [0, -INF, -INF]):
            metrics = evaluate(f64(*certain).unsqueeze(0), task.reference, task)
            self.assertClose(metrics["expected_reward"], 1)
            self.assertClose(metrics["optimal_action_probability"], 1)
            self.assertClose(metrics["entropy"], 0)
            self.assertClose(metrics["kl_current_reference"], math.log(3))


class PreferencePairs(OracleCase):
    @on_random_cases(10)
    def test_definition_by_enumeration(self, draw):
        task, _ = random_task(draw)
        wanted = {
            (x, a, b)
            for x, rewards in enumerate(task.rewards.tolist())
            for a, b in itertools.permutations(range(len(rewards)), 2)
            if rewards[a] > rewards[b]
        }
        rows = [tuple(row) for row in task.clean_pairs.rows()]
        self.assertEqual((len(rows), set(rows)), (len(wanted), wanted))
        self.assertEqual(task.training_pairs.rows(), task.clean_pairs.rows())
        self.assertEqual(make_task(task.rewards, BanditSettings()).reference.abs().max(), 0)

    @on_random_cases(10)
    def test_flips_exchange_exactly_those_pairs(self, draw):
        rewards, flips, seed = draw.normal(3, 4), draw.whole(0, 18), draw.whole(0, 99)
        task = make_task(rewards, BanditSettings(preference_flips=flips, seed=seed))
        self.assertEqual(len(set(task.flipped_pair_indices)), flips)
        self.assertEqual(task.flipped_pair_indices, sorted(task.flipped_pair_indices))
        for index, (clean, training) in enumerate(zip(task.clean_pairs.rows(), task.training_pairs.rows())):
            exchanged = [clean[0], clean[2], clean[1]]
            self.assertEqual(training, exchanged if index in task.flipped_pair_indices else clean)

    def test_refusals(self):
        with self.assertRaisesRegex(ValueError, "^preference_flips: got 13, wanted a whole number from 0 to 12"):
            make_task(rl_lab.REWARDS, BanditSettings(preference_flips=13))


class SampledBatches(OracleCase):
    """sample_ppo and sample_grpo: every recorded number follows from the sampled context and action."""

    @on_random_cases(8)
    def test_definition_ppo_shaped_return_and_advantage(self, draw):
        beta = draw.number(0, 0.5)
        task, settings = random_task(draw, ppo_samples=draw.whole(1, 30), ppo_kl_beta=beta)
        policy, critic = draw.normal(*task.rewards.shape), draw.normal(len(task.rewards))
        batch = rl_lab.sample_ppo(policy.requires_grad_(), critic.requires_grad_(), task, settings, draw.generator)
        self.assertEqual({tuple(x.shape) for x in batch}, {(settings.ppo_samples,)})
        self.assertFalse(any(x.requires_grad for x in batch))
        for i, (x, a) in enumerate(zip(batch.contexts.tolist(), batch.actions.tolist())):
            p, q = softmax(policy[x].tolist())[a], softmax(task.reference[x].tolist())[a]
            shaped = task.rewards[x, a].item() - beta * (math.log(p) - math.log(q))
            self.assertClose(batch.rewards[i], task.rewards[x, a])
            self.assertClose(batch.old_logp[i], math.log(p))
            self.assertClose(batch.value_targets[i], shaped)
            self.assertClose(batch.old_values[i], critic[x].detach())
            self.assertClose(batch.advantages[i], shaped - critic[x].item())

    @on_random_cases(8)
    def test_definition_grpo_advantages_within_each_row(self, draw):
        task, settings = random_task(draw, online_batch_prompts=draw.whole(1, 9), group_size=draw.whole(2, 6))
        policy = draw.normal(*task.rewards.shape).requires_grad_()
        batch = rl_lab.sample_grpo(policy, None, task, settings, draw.generator)
        self.assertIsNone(batch.value_targets)
        for x in batch[:5]:
            self.assertEqual(x.shape, (settings.online_batch_prompts, settings.group_size))
            self.assertFalse(x.requires_grad)
        for contexts, actions, rewards, old_logp, advantages in zip(*(x.tolist() for x in batch[:5])):
            self.assertEqual(len(set(contexts)), 1)  # one prompt a row
            p = softmax(policy[contexts[0]].tolist())
            self.assertEqual(rewards, [task.rewards[contexts[0], a].item() for a in actions])
            self.assertClose(old_logp, [math.log(p[a]) for a in actions])
            mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
            self.assertClose(advantages, [(r - mean) / (std + 1e-8) if std else 0.0 for r in rewards])

    def test_identity_what_is_sampled_is_what_is_scored(self):
        """Frequencies of 40000 draws lie within five standard errors of uniform contexts times the policy."""
        draw = Draw(5)
        task, settings = random_task(draw, ppo_samples=40_000, online_batch_prompts=4096, group_size=10)
        policy, critic = draw.normal(*task.rewards.shape), torch.zeros(len(task.rewards), dtype=torch.float64)
        expected = torch.tensor([softmax(row) for row in policy.tolist()]) / len(policy)
        for sample in (rl_lab.sample_ppo, rl_lab.sample_grpo):
            batch = sample(policy, critic, task, settings, draw.generator)
            actions_of_context = [batch.actions[batch.contexts == x] for x in range(len(policy))]
            counts = torch.stack([actions.bincount(minlength=policy.shape[1]) for actions in actions_of_context])
            given_context = expected * len(policy)
            drawn = counts.sum(dim=1, keepdim=True)
            error = (given_context * (1 - given_context) / drawn).sqrt()
            self.assertTrue(((counts / drawn - given_context).abs() < 5 * error).all())
            contexts = batch.contexts if batch.contexts.dim() == 1 else batch.contexts[:, 0]
            share = contexts.bincount(minlength=len(policy)) / len(contexts)
            self.assertTrue(((share - 1 / len(policy)).abs() < 5 * (0.25 / len(contexts)) ** 0.5).all())


class MethodLosses(OracleCase):
    """ppo_loss, grpo_loss and pairs_loss as sums over samples, in plain Python."""

    @on_random_cases(10)
    def test_definition_ppo(self, draw):
        task, settings = random_task(draw, ppo_samples=draw.whole(1, 12), value_weight=draw.number(0, 2), clip_epsilon=0.3)
        shape = task.rewards.shape
        old, policy, critic = draw.normal(*shape), draw.normal(*shape), draw.normal(shape[0])
        batch = rl_lab.sample_ppo(old, draw.normal(shape[0]), task, settings, draw.generator)
        policy_loss = value_loss = outside = 0.0
        for x, a, old_logp, advantage, target in zip(
            *(t.tolist() for t in (batch.contexts, batch.actions, batch.old_logp, batch.advantages, batch.value_targets))
        ):
            logp = math.log(softmax(policy[x].tolist())[a])
            policy_loss += ClippedPolicyLoss.by_cases(logp, old_logp, advantage, 0.3)[0] / settings.ppo_samples
            value_loss += (critic[x].item() - target) ** 2 / settings.ppo_samples
            outside += (abs(math.exp(logp - old_logp) - 1) > 0.3) / settings.ppo_samples
        loss, diagnostics = rl_lab.ppo_loss(policy, critic, batch, task, settings)
        self.assertClose(loss, policy_loss + settings.value_weight * value_loss)
        self.assertClose(diagnostics["value_loss"](), value_loss)
        self.assertClose(diagnostics["clip_fraction"](), outside)
        self.assertGradient(lambda p, c: rl_lab.ppo_loss(p, c, batch, task, settings)[0], policy, critic)

    @on_random_cases(10)
    def test_definition_grpo(self, draw):
        prompts, size = draw.whole(1, 5), draw.whole(2, 5)
        task, settings = random_task(
            draw, online_batch_prompts=prompts, group_size=size, grpo_kl_weight=draw.number(0, 2), clip_epsilon=0.3
        )
        old, policy = draw.normal(2, *task.rewards.shape)
        batch = rl_lab.sample_grpo(old, None, task, settings, draw.generator)
        policy_loss = kl = outside = zero_groups = 0.0
        for contexts, actions, rewards, old_logps, advantages in zip(*(t.tolist() for t in batch[:5])):
            x = contexts[0]
            kl += kl_definition(policy[x].tolist(), task.reference[x].tolist()) / prompts
            zero_groups += (len(set(rewards)) == 1) / prompts
            for a, old_logp, advantage in zip(actions, old_logps, advantages):
                logp = math.log(softmax(policy[x].tolist())[a])
                policy_loss += ClippedPolicyLoss.by_cases(logp, old_logp, advantage, 0.3)[0] / (prompts * size)
                outside += (abs(math.exp(logp - old_logp) - 1) > 0.3) / (prompts * size)
        loss, diagnostics = rl_lab.grpo_loss(policy, None, batch, task, settings)
        self.assertClose(loss, policy_loss + settings.grpo_kl_weight * kl)
        self.assertClose(diagnostics["clip_fraction"](), outside)
        self.assertClose(diagnostics["zero_group_fraction"](), zero_groups)
        self.assertGradient(lambda p: rl_lab.grpo_loss(p, None, batch, task, settings)[0], policy)

    @on_random_cases(10)
    def test_definition_dpo(self, draw):
        task, settings = random_task(draw, dpo_beta=draw.number(0.1, 2), preference_flips=1)
        policy = draw.normal(*task.rewards.shape)

        def definition(pairs: Pairs) -> float:
            total = 0.0
            for x, chosen, rejected in pairs.rows():
                p, q = softmax(policy[x].tolist()), softmax(task.reference[x].tolist())
                odds = (p[chosen] / q[chosen] / (p[rejected] / q[rejected])) ** settings.dpo_beta
                total += math.log(1 + 1 / odds)
            return total / len(pairs.rows())

        loss, diagnostics = rl_lab.pairs_loss(policy, None, task.training_pairs, task, settings)
        self.assertClose(loss, definition(task.training_pairs))
        self.assertEqual(diagnostics, {})
        self.assertGradient(lambda p: rl_lab.pairs_loss(p, None, task.training_pairs, task, settings)[0], policy)
        both = rl_lab.evaluate_pairs(policy, task, settings)
        self.assertClose(both["dpo_training_loss"], definition(task.training_pairs))
        self.assertClose(both["dpo_original_loss"], definition(task.clean_pairs))
        self.assertTrue(rl_lab.offline_pairs(policy, None, task, settings, draw.generator) is task.training_pairs)

    def test_identity_the_mean_ppo_gradient_is_that_of_the_regularised_return(self):
        """All context-action pairs, each as often as the policy takes it, in place of samples: the first update ascends
        J(policy) - beta KL(policy || reference)."""
        draw = Draw(2)
        task, settings = random_task(draw)
        policy = draw.normal(*task.rewards.shape).requires_grad_()
        beta, (count, size) = 0.3, policy.shape
        contexts, actions = torch.cartesian_prod(torch.arange(count), torch.arange(size)).unbind(1)
        old_logp = action_logps(policy.detach()[contexts], actions)
        shaped = task.rewards.flatten() - beta * (old_logp - action_logps(task.reference[contexts], actions))
        logp = action_logps(policy[contexts], actions)
        loss = (old_logp.exp() * clipped_policy_loss(logp, old_logp, shaped)).sum() / count
        goal = (policy.softmax(-1) * task.rewards).sum() / count - beta * categorical_kl(policy, task.reference).mean()
        self.assertClose(torch.autograd.grad(loss, policy)[0], -torch.autograd.grad(goal, policy)[0])


# ------------------------------------------------------------------------------------------ ppo_chain.py


class Chain(OracleCase):
    @on_random_cases(8)
    def test_definition_expected_return_over_all_routes(self, draw):
        policy = draw.normal(3, 2)
        p = [softmax(row) for row in policy.tolist()]
        rewards = ppo_chain.TERMINAL_REWARDS.tolist()
        routes = itertools.product(range(2), range(2))
        wanted = sum(p[0][first] * p[1 + first][second] * rewards[first][second] for first, second in routes)
        self.assertClose(ppo_chain.expected_return(policy), wanted)
        self.assertGradient(ppo_chain.expected_return, policy)

    @on_random_cases(5)
    def test_definition_transitions(self, draw):
        policy, critic, episodes = draw.normal(3, 2).requires_grad_(), draw.normal(3).requires_grad_(), draw.whole(1, 20)
        steps = ppo_chain.sample_episodes(policy, critic, episodes, draw.generator)
        self.assertFalse(any(x.requires_grad for x in steps))
        p = [softmax(row) for row in policy.tolist()]
        rows = list(zip(*(x.tolist() for x in steps)))
        self.assertEqual(len(rows), 2 * episodes)
        for first, second in zip(rows[::2], rows[1::2]):
            state = 1 + first[1]
            self.assertEqual((first[0], second[0]), (0, state))
            self.assertEqual((first[2], second[2]), (0.0, ppo_chain.TERMINAL_REWARDS[state - 1, second[1]].item()))
            self.assertEqual((first[3], second[3]), (critic[0].item(), critic[state].item()))
            self.assertEqual((first[4], second[4]), (critic[state].item(), 0.0))
            self.assertEqual((first[5:7], second[5:7]), ((False, False), (True, True)))
            self.assertClose([first[7], second[7]], [math.log(p[0][first[1]]), math.log(p[state][second[1]])])

    def test_identity_what_is_sampled_is_what_is_scored(self):
        """Frequencies of 20000 episodes lie within five standard errors of the policy, state by state."""
        draw = Draw(0)
        policy, critic = draw.normal(3, 2), draw.normal(3)
        steps = ppo_chain.sample_episodes(policy, critic, 20_000, draw.generator)
        for state, row in enumerate(policy.tolist()):
            actions = steps.actions[steps.states == state].double()
            probability = softmax(row)[1]
            error = math.sqrt(probability * (1 - probability) / len(actions))
            self.assertLess(abs(actions.mean().item() - probability), 5 * error, f"state {state}")

    @on_random_cases(5)
    def test_definition_kl_at_visited_states(self, draw):
        old, current, states = draw.normal(3, 2), draw.normal(3, 2), draw.below(3, 7)
        wanted = statistics.fmean(kl_definition(old[s].tolist(), current[s].tolist()) for s in states.tolist())
        self.assertClose(ppo_chain.kl_at_visited_states(old, current, states), wanted)

    def test_identity_the_mean_gae_gradient_is_the_policy_gradient(self):
        """lambda 1 and any critic: all four routes, weighted by their probability, ascend the expected return."""
        draw = Draw(3)
        policy, critic = draw.normal(3, 2).requires_grad_(), draw.normal(3)
        total = 0.0
        for first, second in itertools.product(range(2), range(2)):
            states, actions = torch.tensor([0, 1 + first]), torch.tensor([first, second])
            end, rewards = flags(0, 1), f64(0, ppo_chain.TERMINAL_REWARDS[first, second].item())
            advantages, _ = gae(
                rewards, critic[states], torch.cat([critic[states][1:], f64(NAN)]), end, end, gamma=1.0, lam=1.0
            )
            logp = action_logps(policy[states], actions)
            total = total + logp.sum().exp().detach() * reinforce_loss(logp, advantages).sum()
        wanted = -torch.autograd.grad(ppo_chain.expected_return(policy), policy)[0]
        self.assertClose(torch.autograd.grad(total, policy)[0], wanted)


# ------------------------------------------------------------------------------------------ token_objectives.py


class TokenLosses(OracleCase):
    """dpo_sequence_loss and grpo_sequence_loss on random tables, token by token."""

    ids, mask = token_objectives.INPUT_IDS, token_objectives.RESPONSE_MASK

    def scored(self, row: int) -> list[tuple[int, int]]:
        """(previous token, token) of each response token."""
        tokens = self.ids[row].tolist()
        return [(tokens[t - 1], tokens[t]) for t in range(1, 5) if self.mask[row, t]]

    @on_random_cases(6)
    def test_definition_and_gradient_dpo(self, draw):
        table, reference = draw.normal(2, 5, 5)

        def score(of: Tensor, row: int) -> float:
            return math.fsum(math.log(softmax(of[previous].tolist())[token]) for previous, token in self.scored(row))

        margin = (score(table, 0) - score(reference, 0)) - (score(table, 1) - score(reference, 1))
        self.assertClose(token_objectives.preference_margin(table, reference, self.ids, self.mask), margin)
        margin_of = functools.partial(token_objectives.preference_margin, input_ids=self.ids, mask=self.mask)
        self.assertGradientOnlyTo("table", margin_of, table=table, reference=reference)
        objective = functools.partial(token_objectives.dpo_sequence_loss, input_ids=self.ids, mask=self.mask)
        self.assertClose(objective(table, reference), math.log(1 + math.exp(-0.5 * margin)))
        self.assertGradient(lambda t: objective(t, reference), table)
        self.assertGradientOnlyTo("table", objective, table=table, reference=reference)

    @on_random_cases(6)
    def test_definition_and_gradient_grpo(self, draw):
        table, old, reference = draw.normal(3, 5, 5, scale=0.5)
        token_losses = []
        for row, advantage in enumerate((1 / (1 + 2e-8), -1 / (1 + 2e-8))):  # rewards 1 and 0: mean 1/2, std 1/2
            token_losses.append([])
            for previous, token in self.scored(row):
                logp, old_logp = (math.log(softmax(of[previous].tolist())[token]) for of in (table, old))
                kl = kl_definition(table[previous].tolist(), reference[previous].tolist())
                token_losses[-1].append(ClippedPolicyLoss.by_cases(logp, old_logp, advantage, 0.2)[0] + 0.02 * kl)
        objective = functools.partial(token_objectives.grpo_sequence_loss, input_ids=self.ids, mask=self.mask)
        for reduction, definition in Reductions.DEFINITIONS.items():
            self.assertClose(objective(table, old, reference, reduction=reduction), definition(token_losses))
            self.assertGradient(lambda t: objective(t, old, reference, reduction=reduction), table)
        self.assertClose(objective(table, old, reference), Reductions.DEFINITIONS[mean_per_response](token_losses))
        self.assertGradientOnlyTo("table", objective, table=table, old=old, reference=reference)

    @on_random_cases(3)
    def test_extremes_unused_rows_are_never_read(self, draw):
        """Rows BOS and EOS of the table score no response token: what they hold changes neither loss nor gradient."""
        tables = draw.normal(3, 5, 5, scale=0.5)
        dpo = functools.partial(token_objectives.dpo_sequence_loss, input_ids=self.ids, mask=self.mask)
        grpo = functools.partial(token_objectives.grpo_sequence_loss, input_ids=self.ids, mask=self.mask)
        for objective, count in ((dpo, 2), (grpo, 3)):
            clean = tables[0].clone().requires_grad_()
            right = objective(clean, *tables[1:count])
            wanted = torch.autograd.grad(right, clean)[0]
            for poisoned, filler in itertools.product(range(count), (NAN, -INF)):
                with self.subTest(objective=objective.func.__name__, argument=poisoned, filler=filler):
                    arguments = [table.clone() for table in tables[:count]]
                    arguments[poisoned][[token_objectives.BOS, token_objectives.EOS]] = filler
                    arguments[0].requires_grad_()
                    loss = objective(*arguments)
                    self.assertClose(loss, right.detach())
                    self.assertClose(torch.autograd.grad(loss, arguments[0])[0], wanted)

    def test_refusals(self):
        table = torch.zeros(5, 5, dtype=torch.float64)
        ids, mask = self.ids.clone(), self.mask.clone()
        ids[1, 1], mask[1, 1] = token_objectives.GOOD, True
        for changed_ids, changed_mask in ((ids, self.mask), (self.ids, mask)):
            with self.assertRaisesRegex(ValueError, "wanted one prompt"):
                token_objectives.dpo_sequence_loss(table, table, changed_ids, changed_mask)
            with self.assertRaisesRegex(ValueError, "wanted one prompt"):
                token_objectives.grpo_sequence_loss(table, table, table, changed_ids, changed_mask)


class SgdStep(OracleCase):
    @on_random_cases(3)
    def test_definition(self, draw):
        weights, table = draw.normal(2, 3, 3)
        before = table.clone()
        step = token_objectives.sgd_step(lambda t: (weights * t.square()).sum(), table)
        gradient = 2 * weights * before
        self.assertClose(step.table_after, before - 0.1 * gradient)
        self.assertClose(step.gradient_norm, math.sqrt(sum(g * g for g in gradient.flatten().tolist())))
        self.assertClose(step.loss_before, (weights * before.square()).sum())
        self.assertClose(step.loss_after, (weights * step.table_after.square()).sum())
        self.assertTrue(torch.equal(table, before))
        self.assertFalse(table.requires_grad or step.table_after.requires_grad)


# ------------------------------------------------------------------------------------------ plot_results.py


class WholeCheck(OracleCase):
    def test_it_starts_from_a_table_of_zeros(self):
        """To the last bit, since results-tokens.json is compared by bytes: equal logits of 1 give other last digits."""
        zeros, ids, mask = torch.zeros(5, 5, dtype=torch.float64), token_objectives.INPUT_IDS, token_objectives.RESPONSE_MASK
        report = token_objectives.run_check()
        for name, loss in (
            ("dpo", lambda t: token_objectives.dpo_sequence_loss(t, zeros, ids, mask)),
            ("grpo", lambda t: token_objectives.grpo_sequence_loss(t, zeros, zeros, ids, mask)),
        ):
            step = token_objectives.sgd_step(loss, zeros)
            for field in ("loss_before", "loss_after", "gradient_norm"):
                self.assertEqual(report[name][field], getattr(step, field), (name, field))


class PlottedFormulas(OracleCase):
    """plot_results.py imports nothing of the lab: its copies of five formulas are held to the atoms here."""

    def test_clipped_surrogate(self):
        ratio = np.linspace(0.01, 3, 60)
        logp = torch.from_numpy(ratio).log()
        for advantage, epsilon in itertools.product((1.0, -1.0, 2.5), (0.1, 0.2, 0.7)):
            loss = clipped_policy_loss(logp, torch.zeros_like(logp), torch.full_like(logp, advantage), epsilon)
            self.assertClose(plot_results.clipped_surrogate(ratio, advantage, epsilon), -loss)
        default = clipped_policy_loss(logp, torch.zeros_like(logp), torch.ones_like(logp))
        self.assertClose(plot_results.clipped_surrogate(ratio, 1.0), -default)

    @on_random_cases(5)
    def test_kl_statistics_and_exact_kl(self, draw):
        shape = (*draw.shape(), draw.whole(2, 4))
        policy, reference = draw.normal(*shape).softmax(-1), draw.normal(shape[-1]).softmax(-1)
        exact = plot_results.exact_kl(policy.numpy(), reference.numpy())
        self.assertClose(exact, categorical_kl(policy.log(), reference.log().expand(shape)))
        estimates = kl_estimates(policy.log(), reference.log().expand(shape))
        drawn = plot_results.kl_statistics(policy.numpy(), reference.numpy())
        self.assertEqual(list(drawn), ["k1", "k2", "k3"])
        for (mean, std), estimate in zip(drawn.values(), estimates):
            right_mean = (policy * estimate).sum(-1)
            self.assertClose(mean, right_mean)
            # var = E[k^2] - E[k]^2, the other way round.
            self.assertClose(std**2, (policy * estimate.square()).sum(-1) - right_mean.square(), atol=1e-10)

    def test_gae_weights(self):
        # A residual of 1 in the last of six steps, and what gae gives the step l before it.
        for gamma, lam in itertools.product((1.0, 0.9, 0.0), (1.0, 0.95, 0.0)):
            end = torch.arange(6) == 5
            zero = torch.zeros(6, dtype=torch.float64)
            advantages, _ = gae(end.double(), zero, zero, end, end, gamma=gamma, lam=lam)
            self.assertClose(plot_results.gae_weights(lam, 6, gamma), advantages.flip(0))
        self.assertClose(plot_results.gae_weights(0.95, 3), [1, 0.95, 0.9025])

    def test_equal_group_probability(self):
        success = np.linspace(0, 1, 21)
        both = torch.from_numpy(np.stack([success, 1 - success], axis=-1))
        for size in (1, 2, 5, 16):
            self.assertClose(plot_results.equal_group_probability(success, size), zero_variance_probability(both, size))


# ------------------------------------------------------------------------------------------ the tests themselves


class BrokenTwins(OracleCase):
    """The tools above notice what they are for."""

    def test_a_wrong_gradient_is_noticed(self):
        with self.assertRaises(RuntimeError):
            self.assertGradient(lambda l: importance_ratio(l.detach(), f64(0, 0)) + 0 * l, f64(0.1, 0.2))

    def test_an_undetached_argument_is_noticed(self):
        def undetached_wrong(logp, old_logp):
            return (logp - old_logp).exp()

        with self.assertRaises(AssertionError):
            self.assertGradientOnlyTo("logp", undetached_wrong, logp=f64(-1), old_logp=f64(-2))

    def test_global_random_state_is_untouched(self):
        torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].tolist()
        draw = Draw(0)
        draw.mask(3, 4), draw.normal(2), draw.order(5)
        self.assertGradient(lambda x: x.square(), draw.normal(3))
        self.assertTrue(torch.equal(torch.get_rng_state(), torch_state))
        self.assertEqual(np.random.get_state()[1].tolist(), numpy_state)


if __name__ == "__main__":
    unittest.main()
