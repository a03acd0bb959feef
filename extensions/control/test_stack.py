"""The stack's safe behaviours, the contracts, and PPO through the loop."""

import contextlib
import csv
import io
import json
import math
import tempfile
import unittest
from pathlib import Path

import numpy as np
import torch

from extensions.control import command, contract, nolimit, qp
from extensions.control.qp import Solution
from extensions.control.reference import EARLY, EXPIRED, FRESH, MISSING, Reference, ReferenceManager
from extensions.control.stack import SAFE, Stack
from extensions.control.training import ControlSettings, Policy, collect, contract_logps, train

START = np.array([0.3, 0.8, 0.6])
MOVE = np.array([-0.05, 0.04])


def answer(status: str, x: float):
    """A solver that returns this status and this number everywhere, whatever it is asked."""
    return lambda problem: Solution(np.full(len(problem.f), x), status, 0.0, 1, 0.0)


def raising(problem):
    raise np.linalg.LinAlgError("singular")


class References(unittest.TestCase):
    def setUp(self):
        self.reference = Reference(1.0, 2.0, np.array([1.0, 1.5, 2.5]), np.array([[0.0, 0], [1.0, 2], [3.0, 2]]))

    def test_interpolation_and_validity(self):
        manager = ReferenceManager()
        self.assertEqual(manager.at(0.0).status, MISSING)
        manager.offer(self.reference)
        given = manager.at(1.25)
        self.assertEqual((given.status, given.age), (FRESH, 0.25))
        np.testing.assert_allclose(given.value, [0.5, 1.0])
        np.testing.assert_allclose(given.velocity, [2.0, 4.0])
        self.assertEqual((manager.at(0.5).status, manager.at(2.0).status, manager.at(2.001).status), (EARLY, FRESH, EXPIRED))
        self.assertIsNone(manager.at(2.001).value, "an expired reference has no value to follow")

    def test_a_late_reference_does_not_replace_a_newer_one(self):
        manager = ReferenceManager()
        self.assertTrue(manager.offer(self.reference))
        self.assertFalse(manager.offer(self.reference._replace(time=0.5)))
        self.assertEqual((manager.late, manager.reference.time), (1, 1.0))

    def test_bad_references_are_refused(self):
        for change in (
            dict(values=np.array([[0.0, 0], [np.nan, 2], [3.0, 2]])), dict(times=np.array([1.0, 1.0, 2.0])),
            dict(valid_until=0.5), dict(times=np.array([1.0]), values=np.zeros((1, 2))),
        ):  # fmt: skip
            with self.assertRaisesRegex(ValueError, "reference: wanted"):
                ReferenceManager().offer(self.reference._replace(**change))


class SafeBehaviour(unittest.TestCase):
    def run_stack(self, stack: Stack, steps: int, a=MOVE):
        """Steps from START; checks that nothing leaves the limits in any of them."""
        arm, results = stack.arm, []
        for _ in range(steps):
            before = stack.q
            results.append(stack.step(a))
            self.assertTrue((np.abs(stack.q - before) <= arm.speed * stack.settings.period + 1e-9).all(), "a wild command")
            self.assertGreaterEqual(arm.margin(stack.q), -1e-12)
        return results

    def test_in_order_it_moves_as_asked(self):
        stack = Stack()
        stack.reset(START)
        results = self.run_stack(stack, 10)
        self.assertEqual({result.events for result in results}, {()})
        u = results[-1].u
        self.assertGreater(u @ MOVE / np.linalg.norm(u) / np.linalg.norm(MOVE), 0.98, "the hand moves where it was asked to")
        self.assertLess(np.linalg.norm(u), np.linalg.norm(MOVE), "slower than asked: each plan ends at rest")

    def test_a_solver_that_fails_after_a_while_holds_and_then_stops(self):
        for solver, event in (
            (answer(qp.INFEASIBLE, 2.14e9), "infeasible plan"), (answer(qp.TIMED_OUT, 0.0), "solver time-out"),
            (answer(qp.UNFINISHED, 7.0), "unfinished plan"), (raising, "solver error"), (answer(qp.SOLVED, math.nan), "solver error"),
        ):  # fmt: skip
            with self.subTest(event):
                stack = Stack()
                stack.reset(START)
                self.run_stack(stack, 5)
                stack.solver = solver
                failing = self.run_stack(stack, 5)
                self.assertEqual(SAFE[event], "hold")
                self.assertTrue(all(event in result.events for result in failing))
                self.assertGreater(np.linalg.norm(failing[0].u), 0.01, "holds the last good path while it is valid")
                self.assertEqual(np.linalg.norm(failing[-1].u), 0.0, "then it stops")
                self.assertIn("expired reference", failing[-1].events)
                self.assertEqual(SAFE["expired reference"], "stop")

    def test_a_solver_that_lies_is_bounded_by_the_limits(self):
        stack = Stack(solver=answer(qp.SOLVED, 2.14e9))
        stack.reset(START)
        self.run_stack(stack, 10)

    def test_no_plan_from_the_start_and_numbers_that_are_not_finite(self):
        stack = Stack(solver=answer(qp.INFEASIBLE, 0.0))
        stack.reset(START)
        (result,) = self.run_stack(stack, 1)
        self.assertIn("missing reference", result.events)
        np.testing.assert_array_equal(stack.q, START)
        stack = Stack()
        stack.reset(START)
        self.run_stack(stack, 3)
        self.assertEqual(stack.step(np.array([np.nan, 0.0])).events, ("action not finite",))
        stack.q = np.array([np.nan, 0.0, 0.0])
        result = stack.step(MOVE)
        self.assertEqual(result.events, ("state not finite",))
        self.assertTrue(np.isnan(stack.q[0]), "nothing is invented for a state that is not known")
        with self.subTest("every event has a behaviour"):
            self.assertEqual(set(SAFE.values()), {"hold", "stop"})

    def test_an_action_of_any_size_stays_inside_the_limits(self):
        stack = Stack()
        stack.reset(START)
        for a in (np.array([100.0, -100.0]), np.array([-1e6, 1e6]), np.array([0.0, 5.0])):
            self.run_stack(stack, 4, a)


class Contracts(unittest.TestCase):
    def test_exact_numbers_against_samples(self):
        generator = np.random.default_rng(0)
        a = generator.normal(contract.MEAN, contract.SPREAD, 400_000)
        u = contract.executed(a)
        for name in ("sampled", "executed", "capg"):
            exact = contract.exact(name)
            ratio = np.exp(contract.log_ratio(name, a, contract.NEW_MEAN))
            self.assertLess(abs(ratio.mean() - exact.ratio_mean), 4 * ratio.std() / len(a) ** 0.5, name)
            for reward, function in contract.REWARDS.items():
                terms = function(u) * contract.score(name, a)
                self.assertLess(abs(terms.mean() - exact.gradients[reward]), 4 * terms.std() / len(a) ** 0.5)
                self.assertAlmostEqual(terms.var(), exact.variances[reward], delta=0.03 * terms.var())
        mixed = np.exp(contract.log_ratio("mixed", a, contract.MEAN)) > contract.BAND
        self.assertAlmostEqual(mixed.mean(), contract.share_above_band("mixed"), delta=4 * 0.41 / len(a) ** 0.5)

    def test_only_the_sampled_action_and_the_distribution_of_u_give_the_true_gradient(self):
        for reward, function in contract.REWARDS.items():
            true = contract.true_gradient(function)
            for name in ("sampled", "capg"):
                self.assertAlmostEqual(contract.exact(name).gradients[reward], true, 9)
            self.assertGreater(abs(contract.exact("executed").gradients[reward] - true), 0.05)

    def test_the_mixed_mean_grows_by_the_same_for_every_spread(self):
        window = [contract.mixed_mean_within(k) for k in (4, 6, 8)]
        self.assertAlmostEqual(window[2] - window[1], window[1] - window[0], 12)
        self.assertIsNone(contract.exact("mixed").ratio_mean)

    def test_the_policys_clipped_distribution_is_that_of_the_table(self):
        policy = Policy(0)
        with torch.no_grad():
            for parameter in policy.actor:
                parameter.zero_()
            policy.actor[-1].fill_(contract.MEAN)
            policy.log_spread.fill_(math.log(contract.SPREAD))
        points = torch.tensor([[-1.0, 0.3], [1.0, 1.0], [0.2, -0.4]], dtype=torch.float64)
        got = policy.logp_of_clipped(torch.zeros(3, 5, dtype=torch.float64), points)
        wanted = contract.log_probability_of_executed(points.numpy(), contract.MEAN).sum(-1)
        np.testing.assert_allclose(got.detach().numpy(), wanted, atol=1e-12)


class Loop(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.settings = ControlSettings(episodes=4)
        cls.policy = Policy(0)
        cls.buffer = collect(Stack(), cls.policy, cls.settings, np.random.default_rng(0))

    def test_the_buffer_keeps_a_and_u_apart(self):
        b = self.buffer
        np.testing.assert_allclose(b.correction, torch.linalg.vector_norm(b.u - b.a, dim=-1), atol=1e-12)
        self.assertGreater(b.correction.mean(), 0.05)
        again = self.policy.logp(b.observations, b.a).detach()
        np.testing.assert_allclose(b.old_logp, again, atol=1e-12, err_msg="log pi_old is that of the sampled a")
        self.assertTrue((b.margin > 0).all() and (b.failures == 0).all() and (b.stale == 0).all())

    def test_first_pass_ratio_is_one_but_for_the_mixed_contract(self):
        for name in contract.CONTRACTS:
            stored, current = contract_logps(name, self.policy, self.buffer)
            ratio = (current() - stored).exp().detach()
            if name == "mixed":
                self.assertGreater((ratio > 1.2).double().mean(), 0.1, "not 1, although nothing has changed")
            else:
                np.testing.assert_allclose(ratio, 1, atol=1e-12, err_msg=name)

    def test_training_moves_in_the_right_direction_and_repeats(self):
        right = train("sampled", updates=8, episodes=6)
        self.assertGreater(right.history[-1]["mean_reward"], right.history[0]["mean_reward"])
        self.assertEqual(train("sampled", updates=2, episodes=2).history, train("sampled", updates=2, episodes=2).history)
        self.assertEqual({row["first_ratio_above_band"] for row in right.history}, {0.0})

    def test_no_objective_adds_a_constraint(self):
        for outcome in nolimit.outcomes(updates=60):
            with self.subTest(outcome.objective):
                self.assertGreater(outcome.a_outside, 0.9, "the objective moved the policy past the limit")
                self.assertEqual(outcome.u_outside, 0.0, "and the stack kept the limit")


class Command(unittest.TestCase):
    def call(self, *arguments):
        out, err, code = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                command.main(list(map(str, arguments)))
            except SystemExit as stop:
                code = stop.code
        return code, out.getvalue(), err.getvalue()

    def test_training_files_and_json(self):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            code, out, err = self.call(
                "--train", "--updates", 1, "--episodes", 1, "--output", folder / "run", "--json", folder / "c.json", "--plot", folder / "c.svg"
            )  # fmt: skip
            self.assertEqual((code, err), (0, ""))
            rows = list(csv.DictReader(io.StringIO((folder / "run" / "sampled.csv").read_text())))
            self.assertEqual(len(rows), 1)
            report = json.loads((folder / "c.json").read_text())
            self.assertAlmostEqual(report["riccati"]["P"][0][1], math.sqrt(5) / 2)
            self.assertAlmostEqual(report["mpc"]["objective"], -242.7185550534, 8)
            self.assertAlmostEqual(report["qp"]["HS35"], 1 / 9)
            self.assertEqual(report["infeasible"]["status"], "infeasible")
            self.assertIsNone(report["contract"]["mixed"]["ratio_mean"])
            self.assertIn("goals reached", out)

    def test_the_examples_end_in_agreement(self):
        code, out, _ = self.call()
        self.assertEqual(code, 0)
        self.assertIn("26 of 26 agree", out)
        self.assertIn("infeasible", out)

    def test_wrong_flags(self):
        for arguments, words in (
            (("--output", "x"), "--output: only with --train"),
            (("--train", "--solver", "projected-gradient"), "takes a box only"),
            (("--solver", "simplex"), "invalid choice"),
            (("--updates", 0), "wanted a whole number from 1"),
        ):
            with self.subTest(arguments):
                code, _, err = self.call(*arguments)
                self.assertEqual((code, len(err.splitlines())), (2, 1), err)
                self.assertIn(words, err)


if __name__ == "__main__":
    unittest.main()
