"""TRPO with a network in a Gymnasium environment: the step against a dense Fisher matrix, the limit kept, the command."""

import contextlib
import io
import json
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch

import plot_results
from extensions.gymnasium_ppo import environments
from extensions.trust_region import command
from extensions.trust_region.environment import COLUMNS, TrustRegionTrainer, mean_kl, run_of, step_on_batch, surrogate
from extensions.trust_region.figure import draw_environment
from extensions.trust_region.step import conjugate_gradients, fisher_products
from rl_lab import FileProblem
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)

try:
    environments.import_gymnasium()
except FileProblem:
    HAS_GYMNASIUM = False
else:
    HAS_GYMNASIUM = True

SMALL = dict(steps=1024, rollout_rows=128, environments=2, hidden=4, seed=3)


def first_batch(env: str = "CartPole-v1", **more):
    """A small policy and its first rollout, advantages standardised over it."""
    trainer = TrustRegionTrainer(run_of(env, **{**SMALL, **more}))
    kept = {}
    with mock.patch.object(TrustRegionTrainer, "update", lambda self, batch, where: kept.update(batch=batch) or stop()):
        with contextlib.suppress(StopIteration):
            trainer.advance()
    return trainer, kept["batch"]


def stop():
    raise StopIteration


@unittest.skipUnless(HAS_GYMNASIUM, environments.MISSING)
class StepOfANetwork(unittest.TestCase):
    def test_products_and_solution_equal_the_dense_fisher_matrix(self):
        """F of the mean KL, by torch's own Hessian over all weights of the actor; F v and (F + 0.1 I)^-1 g at 1e-10."""
        for env in ("CartPole-v1", "Pendulum-v1"):
            trainer, batch = first_batch(env)
            policy = trainer.policy
            leaves = policy.actor_leaves
            shapes = [leaf.shape for leaf in leaves]
            gradients = torch.autograd.grad(mean_kl(policy, batch), leaves, create_graph=True)
            flat = torch.cat([g.flatten() for g in gradients])
            dense = torch.stack(
                [torch.cat([h.flatten() for h in torch.autograd.grad(entry, leaves, retain_graph=True)]) for entry in flat]
            )

            def parts(vector):
                return [p.reshape(s) for p, s in zip(vector.split([s.numel() for s in shapes]), shapes)]

            v = torch.randn(len(flat), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            product = fisher_products(mean_kl(policy, batch), leaves)
            got = torch.cat([x.flatten() for x in product(parts(v))])
            with self.subTest(env=env):
                self.assertLess((got - dense @ v).abs().max() / (dense @ v).abs().max(), 1e-10, "F v by double backward")
                g = torch.cat([x.flatten() for x in torch.autograd.grad(surrogate(policy, batch), leaves)])
                damped = lambda x: [a + 0.1 * b for a, b in zip(product(x), x)]  # noqa: E731
                x = torch.cat([a.flatten() for a in conjugate_gradients(damped, parts(g), 200)])
                wanted = torch.linalg.solve(dense + 0.1 * torch.eye(len(dense), dtype=torch.float64), g)
                self.assertLess((x - wanted).norm() / wanted.norm(), 1e-10, "(F + damping I)^-1 g by conjugate gradients")
                self.assertLess(dense.diagonal().min(), 1e-3)  # unused directions are what the damping is for
            trainer.close()

    def test_a_step_stays_inside_delta_and_gains(self):
        """Without the line search the first batch's full step may leave delta; what is taken never does, and it gains."""
        for delta in (0.001, 0.01, 0.1):
            trainer, batch = first_batch(delta=delta)
            before = surrogate(trainer.policy, batch).item()
            step = step_on_batch(trainer.policy, batch, trainer.run.settings)
            with self.subTest(delta=delta):
                self.assertTrue(step.moved)
                self.assertLessEqual(mean_kl(trainer.policy, batch).item(), delta)
                self.assertAlmostEqual(surrogate(trainer.policy, batch).item() - before, step.gain, 12)
                self.assertGreater(step.gain, 0)
            trainer.close()

    def test_the_critic_is_untouched_by_the_step_and_the_actor_by_the_critic(self):
        trainer, batch = first_batch()
        critic = [leaf.clone() for leaf in trainer.policy.critic_leaves]
        step_on_batch(trainer.policy, batch, trainer.run.settings)
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(critic, trainer.policy.critic_leaves)))
        actor = [leaf.clone() for leaf in trainer.policy.actor_leaves]
        trainer.train_critic(batch, "here")
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(actor, trainer.policy.actor_leaves)))
        self.assertFalse(all(torch.equal(a, b) for a, b in zip(critic, trainer.policy.critic_leaves)))
        trainer.close()

    def test_every_update_of_a_run_keeps_the_limit_and_repeats(self):
        histories = []
        for _ in range(2):
            trainer = TrustRegionTrainer(run_of("CartPole-v1", **SMALL))
            while not trainer.finished:
                trainer.advance()
            histories.append(trainer.history)
            trainer.close()
        self.assertEqual(histories[0], histories[1])
        self.assertEqual(tuple(histories[0][0]), COLUMNS)
        self.assertLessEqual(max(row["kl_old_current"] for row in histories[0]), 0.01)
        self.assertGreater(max(row["full_kl"] for row in histories[0]), 0.009, "the full steps use what is allowed")


@unittest.skipUnless(HAS_GYMNASIUM, environments.MISSING)
class CommandWithAnEnvironment(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def run_it(self, *arguments: str) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            command.main([*arguments])
        return out.getvalue()

    def test_files_and_figure(self):
        flags = ["--env", "CartPole-v1", "--steps", "512", "--rollout-rows", "128", "--environments", "2"]
        text = self.run_it(*flags, "--output", str(self.folder / "a"), "--plot", str(self.folder / "a.svg"))
        self.assertIn("0 above delta 0.01", text)
        document = json.loads((self.folder / "a" / "trpo.json").read_text())
        self.assertEqual(document["trust_region"]["above_delta"], 0)
        self.assertEqual({"mean_return", "std_return", "episodes", "deterministic"} - set(document["evaluation"]), set())
        (curves,) = plot_results.read_folder(self.folder / "a")
        self.assertEqual((curves.kind, curves.method), ("environment", "trpo"))
        titles = [axis.get_title() for axis in draw_environment([curves]).axes]
        self.assertIn("trpo: 0 of 2 updates above delta (black)", titles)

    def test_flags_of_the_other_mode_are_refused(self):
        for arguments, words in (
            (["--output", "x"], "argument --output: needs --env"),
            (["--env", "CartPole-v1", "--task", "bandit"], "argument --task: not allowed with --env"),
            (["--env", "CartPole-v1", "--json", "x.json"], "argument --json: not allowed with --env"),
            (["--env", "CartPole-v1", "--beside", "x"], "argument --beside: is drawn by --plot"),
            (["--env", "NoSuch-v0"], "argument --env"),
        ):
            error = io.StringIO()
            with self.subTest(arguments=arguments), self.assertRaises(SystemExit) as ended, contextlib.redirect_stderr(error):
                command.main(arguments)
            self.assertEqual(ended.exception.code, 2)
            self.assertIn(words, error.getvalue())
