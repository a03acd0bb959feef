"""TRPO with a network: the Fisher products against a dense matrix, and training inside delta."""

import contextlib
import io
import json
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch

from extensions.gymnasium_ppo import Batch, Policy
from extensions.gymnasium_ppo.environments import MISSING
from extensions.gymnasium_ppo.fixtures import needs_gymnasium
from extensions.trust_region import command
from extensions.trust_region.environment import COLUMNS, TrustRegionTrainer, mean_kl, run_of, step_on_batch, surrogate
from extensions.trust_region.step import conjugate_gradients, damped, fisher_products

SMALL = dict(environments=2, rollout_rows=32, hidden=8, evaluation_episodes=2)
TOLERANCE, DAMPING = 1e-10, 0.1


def policy_and_batch(continuous: bool, rows: int = 24) -> tuple[Policy, Batch]:
    generator = torch.Generator().manual_seed(4)
    policy = Policy(3, 2, continuous, 4, generator)
    policy.flat += 0.4 * torch.randn(policy.flat.shape, generator=generator, dtype=torch.float64)
    seen = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        parameters = policy.parameters_at(seen)
        noise = policy.distribution.noise(1, rows, generator)[0]
        actions = torch.from_numpy(policy.act(seen.numpy(), noise))
        logps, values = policy.distribution.logps(parameters, actions), policy.values(seen)
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    return policy, Batch(seen, actions, parameters, logps, values, advantages, values)


def dense_fisher(policy: Policy, batch: Batch) -> torch.Tensor:
    """E[score score'], exact over the actions: mean over states of J' F_s J, J = d (distribution's parameters) / d theta.

    Categorical: F_s = diag(p) - p p'. Gaussian (mean, log std): F_s = diag(1 / s^2, 2). No second derivative is taken.
    """
    rows = []
    for state in policy.parameters_at(batch.observations):
        gradients = [torch.autograd.grad(x, policy.actor_leaves, retain_graph=True, allow_unused=True, materialize_grads=True)
                     for x in state]  # fmt: skip
        jacobian = torch.stack([torch.cat([g.flatten() for g in one]) for one in gradients])
        if policy.distribution.continuous:
            inverse = (-2 * state.detach()[2:]).exp()
            of_state = torch.diag(torch.cat([inverse, torch.full_like(inverse, 2.0)]))
        else:
            p = state.detach().softmax(-1)
            of_state = torch.diag(p) - torch.outer(p, p)
        rows.append(jacobian.T @ of_state @ jacobian)
    return torch.stack(rows).mean(0)


def flat(vectors) -> torch.Tensor:
    return torch.cat([v.flatten() for v in vectors])


class Network(unittest.TestCase):
    def test_double_backward_and_conjugate_gradients_equal_the_dense_fisher(self):
        for continuous in (False, True):
            with self.subTest(continuous=continuous):
                policy, batch = policy_and_batch(continuous)
                gradient = list(torch.autograd.grad(surrogate(policy, batch), policy.actor_leaves))
                products, dense = fisher_products(mean_kl(policy, batch), policy.actor_leaves), dense_fisher(policy, batch)
                gap = (flat(products(gradient)) - dense @ flat(gradient)).abs().max().item()
                self.assertLess(gap, TOLERANCE, "F v by double backward = mean J' F_s J v")
                x = flat(conjugate_gradients(damped(products, DAMPING), gradient, 200))
                wanted = torch.linalg.solve(dense + DAMPING * torch.eye(len(dense), dtype=torch.float64), flat(gradient))
                self.assertLess((x - wanted).abs().max().item(), TOLERANCE, "x = (F + damping I)^-1 g")
                twin = flat(products(gradient)) + DAMPING * flat(gradient)  # damping taken for a part of F
                self.assertGreater((twin - dense @ flat(gradient)).abs().max().item(), 1e-4)

    def test_a_step_moves_the_actor_alone_and_stays_inside(self):
        for continuous in (False, True):
            policy, batch = policy_and_batch(continuous)
            actor, critic = flat(policy.actor_leaves).detach().clone(), flat(policy.critic_leaves).detach().clone()
            before = surrogate(policy, batch).item()
            step = step_on_batch(policy, batch, run_of("x").settings)
            self.assertTrue(step.moved)
            self.assertGreater(surrogate(policy, batch).item(), before)
            self.assertLessEqual(mean_kl(policy, batch).item(), 0.01)
            self.assertFalse(torch.equal(flat(policy.actor_leaves), actor))
            self.assertTrue(torch.equal(flat(policy.critic_leaves), critic))


@needs_gymnasium
class Training(unittest.TestCase):
    def test_every_step_stays_inside_delta_and_the_full_step_would_not(self):
        for env in ("CartPole-v1", "Pendulum-v1"):
            trainer = TrustRegionTrainer(run_of(env, **SMALL, steps=64 * 8))
            self.addCleanup(trainer.close)
            while not trainer.finished:
                trainer.advance()
            self.assertEqual(tuple(trainer.history[0]), COLUMNS)
            self.assertLessEqual(max(row["kl_old_current"] for row in trainer.history), 0.01, "KL(old || new) <= delta")
            self.assertGreater(max(row["full_kl"] for row in trainer.history), 0.01, "without the line search delta is broken")

    def test_files_repeat_the_run(self):
        with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()) as out:
            folder, figure = Path(name) / "run", Path(name) / "f.svg"
            arguments = [f"--{key.replace('_', '-')}={value}" for key, value in SMALL.items()]
            command.main(["--env", "CartPole-v1", "--steps", "128", "--output", str(folder), "--plot", str(figure), *arguments])
            document = json.loads((folder / "trpo.json").read_text())
            self.assertEqual(run_of(**document["config"]), run_of("CartPole-v1", steps=128, **SMALL))
            self.assertEqual(document["trust_region"]["above_delta"], 0)
            self.assertIn("0 above delta 0.01", out.getvalue())
            self.assertIn("without its line search", figure.read_text())


class Flags(unittest.TestCase):
    def refused(self, *arguments: str) -> str:
        err = io.StringIO()
        with contextlib.redirect_stderr(err), self.assertRaises(SystemExit) as stop:
            command.main(list(arguments))
        self.assertEqual((stop.exception.code, err.getvalue().count("\n")), (2, 1))
        return err.getvalue()

    def test_flags_of_the_other_mode_are_refused(self):
        self.assertIn("--gamma: needs --env", self.refused("--gamma", "0.9"))
        self.assertIn("--samples: not allowed with --env", self.refused("--env", "CartPole-v1", "--samples", "3"))
        self.assertIn("--seeds: not allowed", self.refused("--env", "CartPole-v1", "--seeds", "0-1", "--seed", "3"))

    def test_without_gymnasium_one_sentence(self):
        with mock.patch.dict("sys.modules", {"gymnasium": None}):
            self.assertIn(MISSING, self.refused("--env", "CartPole-v1"))


if __name__ == "__main__":
    unittest.main()
