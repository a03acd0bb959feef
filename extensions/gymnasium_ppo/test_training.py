"""Policies, normalisers, the loss and its gradient, the training loop, the checkpoint and the command."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from extensions.gymnasium_ppo import command, environments, files, training
from extensions.gymnasium_ppo.fixtures import needs_gymnasium
from extensions.gymnasium_ppo.normalise import ObservationNormaliser, RewardNormaliser, RunningMoments
from extensions.gymnasium_ppo.policy import Categorical, Gaussian, Policy, orthogonal
from extensions.gymnasium_ppo.settings import CHOICES, PRESETS, EnvironmentSettings, run_of
from extensions.gymnasium_ppo.training import COLUMNS, Trainer
from extensions.gymnasium_ppo.update import Batch, gradient_of, minibatches, ppo_loss, standardised
from rl_lab import FileProblem, clipped_policy_loss

SMALL = dict(environments=2, rollout_rows=16, epochs=2, batch_size=16, hidden=8, evaluation_episodes=2)
EXACT = dict(rtol=0, atol=1e-12)
FINITE_DIFFERENCE = dict(rtol=1e-5, atol=1e-7)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_batch(policy: Policy, rows: int, observation_size: int) -> Batch:
    """Rows with ratios off 1 and some of them clipped."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator(rows), dtype=torch.float64)

    observations = normal(rows, observation_size)
    with torch.no_grad():
        parameters = policy.parameters_at(observations)
        noise = policy.distribution.noise(1, rows, generator(1))[0]
        actions = torch.from_numpy(policy.act(observations.numpy(), noise))
        old = policy.distribution.logps(parameters, actions) + 0.3 * normal(rows)
        values = policy.values(observations)
    return Batch(observations, actions, parameters, old, values, normal(rows) + 1, normal(rows))


class Distributions(unittest.TestCase):
    def test_gaussian_by_hand(self):
        """Mean (1, 0), std (1, 2), raw action (3, 2): -4/2 - 0 - 1/2 - log 2 - log(2 pi) = -5.030994."""
        parameters = torch.tensor([[1.0, 0.0, 0.0, math.log(2)]], dtype=torch.float64)
        logp = Gaussian(2).logps(parameters, torch.tensor([[3.0, 2.0]], dtype=torch.float64))
        self.assertAlmostEqual(logp.item(), -2.5 - math.log(2) - math.log(2 * math.pi), places=12)
        self.assertAlmostEqual(logp.item(), -5.031024, places=5)
        self.assertAlmostEqual(Gaussian(2).entropy(parameters).item(), math.log(2) + 1 + math.log(2 * math.pi), places=12)

    def test_against_torch_distributions(self):
        old, current = (torch.randn(5, 6, generator=generator(s), dtype=torch.float64) for s in (1, 2))
        normal = [torch.distributions.Normal(p[:, :3], p[:, 3:].exp()) for p in (old, current)]
        categorical = [torch.distributions.Categorical(logits=p) for p in (old, current)]
        actions, choices = torch.randn(5, 3, generator=generator(3), dtype=torch.float64), torch.tensor([0, 5, 2, 1, 1])
        kl = torch.distributions.kl_divergence
        pairs = [
            (Gaussian(3).logps(current, actions), normal[1].log_prob(actions).sum(-1)),
            (Gaussian(3).entropy(current), normal[1].entropy().sum(-1)),
            (Gaussian(3).kl(old, current), kl(*normal).sum(-1)),
            (Categorical(6).logps(current, choices), categorical[1].log_prob(choices)),
            (Categorical(6).entropy(current), categorical[1].entropy()),
            (Categorical(6).kl(old, current), kl(*categorical)),
        ]
        for number, (ours, theirs) in enumerate(pairs):
            torch.testing.assert_close(ours, theirs, **EXACT, msg=lambda text: f"pair {number}: {text}")
        exchanged = Gaussian(3).kl(current, old) - Gaussian(3).kl(old, current)
        self.assertGreater(exchanged.abs().min().item(), 1e-3, "the comparison would not see KL's arguments exchanged")

    def test_samples_follow_the_distribution(self):
        """20,000 draws: shares within 0.02 of the softmax, mean and std within 0.03 (five standard errors and more)."""
        draws = 20_000
        logits = np.log([[0.5, 0.3, 0.2]])
        chosen = Categorical(3).act(logits, np.empty(0), Categorical(3).noise(draws, 1, generator())[:, 0])
        np.testing.assert_allclose(np.bincount(chosen) / draws, [0.5, 0.3, 0.2], atol=0.02)
        noise = Gaussian(2).noise(draws, 1, generator())[:, 0]
        actions = Gaussian(2).act(np.array([1.0, -1.0]), np.log([0.5, 1.0]), noise)
        np.testing.assert_allclose(actions.mean(0), [1, -1], atol=0.03)
        np.testing.assert_allclose(actions.std(0), [0.5, 1], atol=0.03)
        self.assertEqual(Categorical(3).act(logits, np.empty(0), None).tolist(), [0])
        self.assertEqual(Gaussian(2).act(np.array([[1.0, -1.0]]), np.log([0.5, 1.0]), None).tolist(), [[1.0, -1.0]])

    @needs_gymnasium
    def test_the_raw_action_is_scored_and_the_clipped_one_executed(self):
        """Box(-2, 2), mean 0, std 1, raw 5: executed 2; log p(5) = -13.418939, log p(2) = -2.918939 would be another action's."""
        space = environments.import_gymnasium().spaces.Box(-2, 2, (1,))
        _, continuous, write = environments.action_writer(space)
        self.assertTrue(continuous)
        self.assertEqual(write(np.array([[5.0], [-0.5]])).tolist(), [[2.0], [-0.5]])
        logp = Gaussian(1).logps(torch.zeros(1, 2, dtype=torch.float64), torch.tensor([[5.0]], dtype=torch.float64)).item()
        self.assertAlmostEqual(logp, -12.5 - 0.918939, places=6)


class Networks(unittest.TestCase):
    def test_orthogonal(self):
        for shape in ((4, 9), (9, 4), (5, 5)):
            matrix = orthogonal(shape, 2.0, generator())
            gram = matrix @ matrix.T if shape[0] <= shape[1] else matrix.T @ matrix
            torch.testing.assert_close(gram, 4 * torch.eye(min(shape), dtype=torch.float64), **EXACT)

    def test_numpy_and_torch_forward_agree_and_follow_the_flat_vector(self):
        for continuous in (False, True):
            policy = Policy(3, 2, continuous, 8, generator())
            for _ in range(2):
                observations = torch.randn(6, 3, generator=generator(1), dtype=torch.float64)
                outputs = policy.parameters_at(observations)[:, :2].detach().numpy()
                act = outputs if continuous else outputs.argmax(1)
                np.testing.assert_allclose(policy.act(observations.numpy(), None), act, atol=1e-12)
                policy.flat += 0.1 * torch.randn(policy.flat.shape, generator=generator(2), dtype=torch.float64)
            self.assertEqual(sum(leaf.numel() for leaf in policy.leaves), policy.flat.numel())

    def test_gradient_of_the_loss_by_finite_differences(self):
        """Central differences over the flat vector, both kinds of action, with every term of the loss switched on."""
        for continuous in (False, True):
            policy = Policy(3, 2, continuous, 4, generator())
            policy.flat += 0.3 * torch.randn(policy.flat.shape, generator=generator(3), dtype=torch.float64)
            batch = random_batch(policy, 12, 3)
            settings = run_of("x", entropy_weight=0.05, value_clip=0.1).settings
            gradient = gradient_of(ppo_loss(policy, batch, settings, True).total, policy)
            numeric = torch.zeros_like(gradient)
            for i in range(len(gradient)):
                ends = []
                for sign in (1, -1):
                    policy.flat[i] += sign * 1e-6
                    ends.append(ppo_loss(policy, batch, settings, True).total.item())
                    policy.flat[i] -= sign * 1e-6
                numeric[i] = (ends[0] - ends[1]) / 2e-6
            torch.testing.assert_close(gradient, numeric, **FINITE_DIFFERENCE)

    def test_loss_is_the_sum_of_its_named_parts(self):
        policy = Policy(3, 2, False, 4, generator())
        batch = random_batch(policy, 10, 3)
        settings = run_of("x", entropy_weight=0.05, value_weight=0.7).settings
        loss = ppo_loss(policy, batch, settings, False)
        surrogate = clipped_policy_loss(loss.logps, batch.old_logps, batch.advantages, 0.2).mean()
        square = (policy.values(batch.observations) - batch.returns).square().mean()
        torch.testing.assert_close(loss.total, surrogate + 0.7 * square - 0.05 * loss.entropy, **EXACT)

    def test_advantage_normalisation_is_what_its_name_says(self):
        """(1, 2, 3): mean 2, std with n - 1 is 1: (-1, 0, 1). One row alone stays: its std is not defined."""
        torch.testing.assert_close(
            standardised(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)), torch.tensor([-1.0, 0.0, 1.0]).double(),
            rtol=0, atol=1e-7,
        )  # fmt: skip
        self.assertEqual(standardised(torch.tensor([5.0])).item(), 5.0)
        used = torch.tensor([True, True, False])
        self.assertEqual(standardised(torch.tensor([1.0, 3.0, 99.0]), used)[:2].sign().tolist(), [-1, 1])

    def test_minibatches_hold_every_row_once_in_about_equal_parts(self):
        policy = Policy(3, 2, False, 4, generator())
        batch = random_batch(policy, 131, 3)._replace(returns=torch.arange(131.0))
        parts = list(minibatches(batch, 64, generator()))
        self.assertEqual(sorted(len(part.returns) for part in parts), [65, 66], "no remainder of 3 rows")
        self.assertEqual(sorted(torch.cat([part.returns for part in parts]).tolist()), list(range(131)))


class Normalisers(unittest.TestCase):
    def test_moments_equal_those_of_all_rows_at_once(self):
        rows = np.random.default_rng(0).normal(3, 2, (50, 3))
        moments = RunningMoments(3)
        for part in (rows[:1], rows[1:20], rows[20:20], rows[20:]):
            moments.update(part)
        np.testing.assert_allclose(moments.mean, rows.mean(0), atol=1e-12)
        np.testing.assert_allclose(moments.variance, rows.var(0), atol=1e-12)

    def test_scaling_does_not_move_the_statistics(self):
        normaliser = ObservationNormaliser(2, active=True)
        self.assertEqual(normaliser(np.ones((3, 2))).tolist(), [[1, 1]] * 3, "before the first rollout nothing is scaled")
        normaliser.update(np.array([[0.0, 0.0], [2.0, 4.0]]))
        before = (normaliser.moments.count, normaliser.moments.mean.tolist())
        np.testing.assert_allclose(normaliser(np.array([[2.0, 4.0], [1e9, 2.0]])), [[1, 1], [10, 0]], atol=1e-7)
        self.assertEqual(before, (normaliser.moments.count, normaliser.moments.mean.tolist()))

    def test_rewards_are_divided_by_the_std_of_the_discounted_sum(self):
        """gamma 1/2, rewards 1, 1, then an end, 1: sums 1, 1.5, 1; std of (1, 1.5, 1) = 0.235702. The garbage row stays out."""
        normaliser = RewardNormaliser(1, 0.5, active=True)
        rewards, ended = np.array([[1.0], [1.0], [0.0], [1.0]]), np.array([[False], [True], [False], [False]])
        scaled = normaliser.scale(rewards, ended, np.array([[True], [True], [False], [True]]))
        np.testing.assert_allclose(scaled[:, 0], np.array([1, 1, 0, 1]) / np.std([1, 1.5, 1]), rtol=1e-6)


@needs_gymnasium
class Training(unittest.TestCase):
    def trained(self, env: str = "CartPole-v1", updates: int = 3, **given) -> Trainer:
        trainer = Trainer(run_of(env, **SMALL | dict(steps=32 * updates) | given))
        self.addCleanup(trainer.close)
        while not trainer.finished:
            trainer.advance()
        return trainer

    def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(self):
        cases = (("CartPole-v1", mode, {}) for mode in environments.AUTORESET)
        normalised = dict(normalise_observations=1, normalise_rewards=1, time_limit=10)
        for env, mode, given in (*cases, ("Pendulum-v1", "same-step", normalised), ("FrozenLake-v1", "next-step", {})):
            with self.subTest(env=env, mode=mode), tempfile.TemporaryDirectory() as folder:
                whole = self.trained(env, 4, autoreset=mode, **given)
                half = Trainer(whole.run)
                self.addCleanup(half.close)
                for _ in range(2):
                    half.advance()
                files.save_checkpoint(Path(folder), half)
                resumed = files.restored(Path(folder))
                self.addCleanup(resumed.close)
                while not resumed.finished:
                    resumed.advance()
                self.assertEqual(json.dumps(resumed.history), json.dumps(whole.history))
                self.assertEqual(files.checkpoint_bytes(resumed), files.checkpoint_bytes(whole))
                self.assertEqual(resumed.evaluate(False), whole.evaluate(False))

    def test_a_checkpoint_without_one_of_its_parts_would_be_seen(self):
        """Each array matters: a run resumed without it differs. A twin that forgets Adam's moments, the noise, a statistic."""
        whole = self.trained("Pendulum-v1", 3, normalise_observations=1, normalise_rewards=1)
        half = Trainer(whole.run)
        self.addCleanup(half.close)
        half.advance()
        fresh = Trainer(whole.run)
        self.addCleanup(fresh.close)
        for name in ("adam_means", "generator", "observation_mean", "reward_variance", "parameters"):
            resumed = Trainer(whole.run)
            self.addCleanup(resumed.close)
            resumed.restore({**half.arrays(), name: fresh.arrays()[name].copy()})
            resumed.advance()
            resumed.advance()
            self.assertNotEqual(json.dumps(resumed.history[-1]), json.dumps(whole.history[-1]), f"{name} made no difference")

    def test_evaluation_leaves_the_training_as_it_was_and_uses_other_seeds(self):
        run = run_of("CartPole-v1", **SMALL | dict(steps=64, normalise_observations=1))
        plain, evaluated = Trainer(run), Trainer(run)
        for trainer in (plain, evaluated):
            self.addCleanup(trainer.close)
            trainer.advance()
        statistics = evaluated.arrays()
        first, again = evaluated.evaluate(True), evaluated.evaluate(True)
        self.assertEqual(first, again)
        for name, array in evaluated.arrays().items():
            np.testing.assert_array_equal(array, statistics[name], err_msg=f"{name}: an evaluation must not move it")
        self.assertEqual(plain.advance(), evaluated.advance())
        seeds = [set(training.seeds_for(0, purpose, 100)) for purpose in (0, 1)]
        self.assertFalse(seeds[0] & seeds[1])
        self.assertTrue({"mean_return", "std_return", "episodes", "deterministic"} <= first.keys())
        self.assertIs(first["deterministic"], True)
        self.assertIs(evaluated.evaluate(False)["deterministic"], False)

    def test_first_pass_ratio_is_one_and_kl_zero(self):
        """Old log-probabilities come from the weights that acted: with a vanishing step nothing is clipped."""
        row = self.trained(updates=1, learning_rate=1e-12).history[0]
        self.assertEqual(row["clip_fraction"], 0.0)
        self.assertLess(abs(row["kl_old_current"]), 1e-12)

    def test_kl_stop_ends_the_updates(self):
        free, stopped = (self.trained(updates=1, learning_rate=0.1, kl_stop=limit).history[0] for limit in (0.0, 1e-6))
        self.assertEqual((free["optimizer_steps"], free["stopped_early"]), (4, 0), "2 epochs of 2 mini-batches")
        self.assertEqual((stopped["optimizer_steps"], stopped["stopped_early"]), (1, 1))

    def test_schedule(self):
        for schedule, wanted in (("linear", [1e-3, 2e-3 / 3, 1e-3 / 3]), ("constant", [1e-3] * 3)):
            rates = [row["learning_rate"] for row in self.trained(schedule=schedule, learning_rate=1e-3).history]
            np.testing.assert_allclose(rates, wanted, rtol=1e-12)

    def test_every_choice_and_mistake_changes_the_numbers(self):
        given = dict(time_limit=8, learning_rate=1e-2)
        right = json.dumps(self.trained(**given).history)
        for name, choice in CHOICES.items():
            for value in list(choice.values)[1:]:
                self.assertNotEqual(json.dumps(self.trained(**given, **{name: value}).history), right, f"{name} {value}")
        for mistake in command.MISTAKES:
            changed = json.dumps(self.trained(**given, boundary_mistake=mistake).history)
            self.assertNotEqual(changed, right, f"{mistake} changes nothing")

    def test_it_learns(self):
        """CartPole: the mean return of recent episodes at least doubles within 8,000 steps (22 at the start; 60 and more)."""
        trainer = Trainer(run_of("CartPole-v1", steps=8192, evaluation_episodes=5))
        self.addCleanup(trainer.close)
        while not trainer.finished:
            trainer.advance()
        self.assertGreater(trainer.evaluate(True)["mean_return"], 100, "random is about 22; likely a sign or the old log-probs")

    def test_presets_are_valid_and_settings_win_over_them(self):
        for env in PRESETS:
            run_of(env)
        self.assertEqual(run_of("Pendulum-v1", gamma=0.5).settings.gamma, 0.5)
        self.assertEqual(run_of("Other-v0").settings, EnvironmentSettings())
        with self.assertRaisesRegex(ValueError, "boundary_mistake: garbage-rows needs autoreset next-step"):
            run_of("CartPole-v1", boundary_mistake="garbage-rows", autoreset="disabled")

    def test_unsupported_environments_are_refused_by_name(self):
        for env, reason in (("Blackjack-v1", "observations are Tuple"), ("NoSuch-v3", "cannot be made")):
            with self.assertRaisesRegex(ValueError, f"{env} .*{reason}"):
                Trainer(run_of(env))
        spaces = environments.import_gymnasium().spaces
        with self.assertRaisesRegex(ValueError, "actions are MultiDiscrete"):
            environments.action_writer(spaces.MultiDiscrete([2, 2]))
        self.assertEqual(environments.action_writer(spaces.Discrete(3, start=5))[2](np.array([0, 2])).tolist(), [5, 7])
        size, read = environments.observation_reader(spaces.Discrete(3, start=5))
        self.assertEqual((size, read(np.array([5, 7])).tolist()), (3, [[1, 0, 0], [0, 0, 1]]))


@needs_gymnasium
class Command(unittest.TestCase):
    ARGUMENTS = [part for name, value in SMALL.items() for part in ("--" + name.replace("_", "-"), str(value))]

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def run_main(self, *arguments: str) -> tuple[str, str, int]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                command.main(list(arguments))
                code = 0
            except SystemExit as exit:
                code = exit.code
        return out.getvalue(), err.getvalue(), code

    def test_files_and_resume(self):
        one, two = self.folder / "one", self.folder / "two"
        base = [*self.ARGUMENTS, "--steps", "128"]
        printed, _, code = self.run_main(*base, "--output", str(one))
        self.assertEqual(code, 0)
        self.assertIn("CartPole-v1, seed 0: 4 updates, 128 steps", printed)
        printed, _, _ = self.run_main(*base, "--output", str(two), "--stop-after", "1")
        self.assertIn("stopped after update 1 of 4", printed)
        self.assertEqual([path.name for path in two.iterdir()], ["checkpoint.npz"])
        self.run_main("--resume", "--output", str(two))
        for name in ("ppo.csv", "ppo.json", "checkpoint.npz"):
            self.assertEqual((one / name).read_bytes(), (two / name).read_bytes(), name)
        header = (one / "ppo.csv").read_text().splitlines()[0]
        self.assertEqual(header, ",".join(COLUMNS))
        document = json.loads((one / "ppo.json").read_text())
        self.assertEqual(run_of(**document["config"]), run_of("CartPole-v1", **SMALL, steps=128), "JSON repeats the run")
        self.assertEqual(document["evaluation"]["episodes"], 2)
        self.assertFalse(document["evaluation_sampled"]["deterministic"])

    def test_broken_checkpoints_are_one_line_and_run_nothing(self):
        self.run_main(*self.ARGUMENTS, "--steps", "32", "--output", str(self.folder))
        path = self.folder / "checkpoint.npz"
        good = dict(np.load(path))
        pickled = np.array([print], dtype=object)
        for text, alter in (
            ("holds Python objects", {"parameters": pickled}),
            ("cannot be resumed", {"parameters": np.zeros(3)}),
            ("cannot be resumed", {"adam_means": np.full_like(good["adam_means"], np.nan)}),
            ("cannot be resumed", {"current_observations": good["current_observations"] + 1}),
            ("cannot be resumed", {"actions_taken": good["actions_taken"][1:]}),
            ("format 9", {"header": np.frombuffer(b'{"format": 9}', dtype=np.uint8)}),
            ("is no checkpoint", {"header": np.frombuffer(b"[]", dtype=np.uint8)}),
        ):
            np.savez(path, **{**good, **alter})
            with self.subTest(alter=list(alter)), self.assertRaisesRegex(FileProblem, text):
                files.restored(self.folder)
        config = json.loads(good["header"].tobytes())
        config["config"]["steps"] = 64
        header = np.frombuffer(json.dumps(config).encode(), dtype=np.uint8)
        np.savez(path, **{**good, "header": header, "parameters": np.full_like(good["parameters"], 1.7e308)})
        with self.assertRaises(FloatingPointError):
            self.run_main("--resume", "--output", str(self.folder))
        np.savez_compressed(path, **{**good, "parameters": np.zeros(10**7)})  # 80 MB in 80 kB
        with self.assertRaisesRegex(FileProblem, "would unfold from"):
            files.restored(self.folder)
        path.write_bytes(b"PK nothing")
        with self.assertRaisesRegex(FileProblem, "not a whole zip archive"):
            files.restored(self.folder)
        path.unlink()
        os.mkfifo(path)
        with self.assertRaisesRegex(FileProblem, "not a regular file"):
            files.restored(self.folder)
        path.unlink()
        foreign = json.loads(good["header"].tobytes())
        foreign["config"]["env"] = "some_module:Env-v0"
        np.savez(path, **{**good, "header": np.frombuffer(json.dumps(foreign).encode(), dtype=np.uint8)})
        with self.assertRaisesRegex(FileProblem, "names a module to import"):
            files.restored(self.folder)

    def test_wrong_flags_exit_2_and_name_the_flag(self):
        for arguments, text in (
            (["--env", "Blackjack-v1"], "--env: Blackjack-v1 is not supported"),
            (["--gamma", "2"], "--gamma: got '2', wanted a number from 0 to 1"),
            (["--resume", "--gamma", "0.5"], "--gamma: not allowed with --resume"),
            (["--boundary-mistake", "garbage-rows", "--autoreset", "disabled"], "--boundary-mistake: garbage-rows needs"),
            (["--seeds", "0-2", "--seed", "4"], "--seeds: not allowed with --seed 4"),
            (["--stop-after", "0"], "--stop-after: got 0"),
        ):
            _, err, code = self.run_main(*arguments, "--output", str(self.folder))
            self.assertEqual((code, err.count("\n")), (2, 1), arguments)
            self.assertIn(text, err)

    def test_toy_prints_every_exact_number(self):
        printed, _, code = self.run_main("--toy")
        self.assertEqual(code, 0)
        for number in ("-49.0000", "-11.7271", "-9.0000", "-0.3923", "-99.0000", "-29.0276", "0.1300", "0.1450", "0.3750",
                       "-2.4390", "96.0000", "-4.0000", "-1.0000", "0.1000", "0.0050"):  # fmt: skip
            self.assertIn(number, printed)

    def test_help_names_presets_and_mistakes(self):
        text = command.build_parser().format_help()
        for name in (*PRESETS, *command.MISTAKES, *CHOICES):
            self.assertIn(name.replace("_", "-"), text)

    def test_figure(self):
        import plot_results

        self.run_main(*self.ARGUMENTS, "--seeds", "0,1", "--steps", "128", "--output", str(self.folder))
        with contextlib.redirect_stdout(io.StringIO()):
            plot_results.main(["--input", str(self.folder), "--output", str(self.folder / "curves.svg")])
        self.assertIn("episode return", (self.folder / "curves.svg").read_text())


class WithoutGymnasium(unittest.TestCase):
    def test_one_sentence(self):
        with mock.patch.dict("sys.modules", {"gymnasium": None}), self.assertRaises(FileProblem) as caught:
            command.main(["--env", "CartPole-v1"])
        self.assertEqual(str(caught.exception), environments.MISSING)


if __name__ == "__main__":
    unittest.main()
