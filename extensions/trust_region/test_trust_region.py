"""The trust-region step against a dense Fisher matrix, against its closed form on a table, and in training."""

import contextlib
import io
import json
import math
import tempfile
import unittest
from pathlib import Path

import torch

from extensions.trust_region import command, table
from extensions.trust_region.figure import draw
from extensions.trust_region.step import (
    conjugate_gradients,
    dot,
    fisher_vector_product,
    kl_old_current,
    trust_region_step,
)
from extensions.trust_region.table import DELTA, REWARDS, STARTS, f64
from extensions.trust_region.training import METHODS, TASKS, train
from rl_lab import action_logps, categorical_kl

R = f64(REWARDS)


def dense_hessian(mean_kl, parameter):
    """The Hessian of a scalar function by torch itself, flat: the oracle of the products."""
    hessian = torch.autograd.functional.hessian(mean_kl, parameter.detach())
    return hessian.reshape(parameter.numel(), parameter.numel())


class NumberCase(unittest.TestCase):
    def assertClose(self, got, wanted, atol=1e-10, says=""):
        difference = (torch.as_tensor(got, dtype=torch.float64) - torch.as_tensor(wanted, dtype=torch.float64)).abs().max()
        self.assertLessEqual(float(difference), atol, f"\n{says}\n  got     {got}\n  wanted  {wanted}")


class Step(NumberCase):
    def random_batch(self, seed=0, rows=12, actions=4):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(5, actions, dtype=torch.float64, generator=generator)
        states = torch.randint(5, (rows,), generator=generator)
        taken = torch.randint(actions, (rows,), generator=generator)
        return logits, states, taken, torch.randn(rows, dtype=torch.float64, generator=generator)

    def test_kl_routes_its_gradient_to_the_current_policy(self):
        old, current = f64([0.5, 0.3, 0.2]).log().requires_grad_(), f64([0.2, 0.3, 0.5]).log().requires_grad_()
        kl = kl_old_current(old, current)
        self.assertClose(kl.detach(), categorical_kl(old, current).detach(), says="the atom's value, KL(old || current)")
        of_old, of_current = torch.autograd.grad(kl, [old, current], allow_unused=True)
        self.assertIsNone(of_old, "old is fixed: no gradient reaches it")
        self.assertClose(of_current, [0.2 - 0.5, 0.0, 0.5 - 0.2], says="d KL(old || current) / d logits = current - old")

    def test_fisher_vector_product_is_the_dense_matrix_times_the_vector(self):
        logits, states, _, _ = self.random_batch()
        parameter = logits.clone().requires_grad_()
        mean_kl = kl_old_current(logits[states], parameter[states]).mean()
        dense = dense_hessian(lambda x: kl_old_current(logits[states], x[states]).mean(), parameter)
        generator = torch.Generator().manual_seed(1)
        for damping in (0.0, 0.1):
            v = torch.randn(logits.shape, dtype=torch.float64, generator=generator)
            got = fisher_vector_product(mean_kl, [parameter], [v], damping)[0].flatten()
            self.assertClose(got, dense @ v.flatten() + damping * v.flatten(), says="(F + damping I) v by double backward")
        with self.subTest("on a table F = diag(p) - p p'"):
            p = f64([0.5, 0.3, 0.2])
            table_logits = p.log().requires_grad_()
            one = dense_hessian(lambda x: kl_old_current(p.log(), x), table_logits)
            self.assertClose(one, table.dense_fisher(p))

    def test_conjugate_gradients_solve_the_dense_system(self):
        logits, states, taken, advantages = self.random_batch(3)
        parameter = logits.clone().requires_grad_()
        mean_kl = kl_old_current(logits[states], parameter[states]).mean()
        gradient = torch.autograd.grad((action_logps(parameter[states], taken) * advantages).mean(), parameter)[0]
        dense = dense_hessian(lambda x: kl_old_current(logits[states], x[states]).mean(), parameter)
        for damping in (0.0, 0.1):
            x = conjugate_gradients(lambda v: fisher_vector_product(mean_kl, [parameter], v, damping), [gradient], 60)[0]
            wanted = torch.linalg.pinv(dense + damping * torch.eye(len(dense), dtype=torch.float64)) @ gradient.flatten()
            self.assertClose(x.flatten(), wanted, says=f"F^+ g, damping {damping}")
        with self.subTest("two tensors are one vector"):
            a, b = f64([3.0]), f64([[1.0], [2.0]])
            x = conjugate_gradients(lambda v: [2 * v[0], 4 * v[1]], [a, b])
            self.assertClose(torch.cat([t.flatten() for t in x]), [1.5, 0.25, 0.5])
            self.assertEqual(dot([a, b], [a, b]).item(), 14.0)

    def test_nothing_moves_without_a_gradient_or_an_accepted_try(self):
        p = f64([0.5, 0.3, 0.2]).log()
        for surrogate in (lambda x: (x.softmax(-1)).sum(), lambda x: -(x - p).abs().sum() + 0.0 * x.sum()):
            parameter = p.clone().requires_grad_()
            step = trust_region_step(
                lambda: surrogate(parameter), lambda: kl_old_current(p, parameter), [parameter], tries=3
            )
            self.assertFalse(step.moved)
            self.assertClose(parameter.detach(), p, atol=0)
        for wrong in ({"delta": 0.0}, {"damping": -1.0}, {"shrink": 1.0}):
            with self.assertRaisesRegex(ValueError, "wanted delta > 0"):
                trust_region_step(lambda: parameter.sum(), lambda: parameter.sum(), [parameter], **wrong)


class Table(NumberCase):
    # From `uniform` and from (.5, .3, .2): Var_p R, eta, the new policy, KL(old || new), KL(new || old), gain, first order.
    KNOWN = {
        "uniform": (
            0.375555556, 0.230769231, (0.393883, 0.327483, 0.278634), 0.010013207, 0.010001166, 0.086728951, 0.086666667,
        ),
        "0.5, 0.3, 0.2": (
            0.350400000, 0.238909241, (0.563335, 0.279198, 0.157468), 0.009745307, 0.009472654, 0.080440425, 0.083713798,
        ),
    }  # fmt: skip

    def test_the_step_is_an_exponential_tilt(self):
        for name, start in STARTS.items():
            with self.subTest(name):
                variance, eta, new, kl, reverse, gain, first = self.KNOWN[name]
                step = table.natural_step(f64(start), R)
                self.assertClose(step.probabilities, new, 5e-7, "p exp(eta R) / Z")
                got = [step.variance, step.eta, step.kl_old_new, step.kl_new_old, step.gain, step.first_order_gain]
                self.assertClose(got, [variance, eta, kl, reverse, gain, first], 6e-10)
                # The same by hand from uniform: J = .7 / 3; Var = (1 + .04 + .25) / 3 - J^2 = .43 - .054444 = .375556.
                self.assertClose(step.eta, math.sqrt(2 * DELTA / step.variance))

    def test_one_start_is_rejected_and_one_accepted(self):
        uniform, other = (table.natural_step(f64(start), R) for start in STARTS.values())
        self.assertEqual((uniform.accepted, uniform.shrinks), (False, 1), "KL .010013 is just above delta .01")
        self.assertEqual((other.accepted, other.shrinks), (True, 0))
        taken = table.tilted(f64(STARTS["uniform"]), R, 0.8 * uniform.eta)
        self.assertClose(uniform.after_line_search["probabilities"], taken, says="shrunk once, by .8")
        for step in (uniform, other):
            self.assertLessEqual(step.after_line_search["kl_old_new"], DELTA)
            self.assertGreater(step.after_line_search["gain"], 0)

    def test_exact_policies_at_the_same_kl(self):
        known = {"uniform": (0.230617, 0.086671949, 0.086774390, 0.086671949),
                 "0.5, 0.3, 0.2": (0.242056, 0.081452266, 0.081545886, 0.080303268)}  # fmt: skip
        for name, start in STARTS.items():
            with self.subTest(name):
                p = f64(start)
                eta, tilt, best, plain = known[name]
                self.assertClose(table.eta_at(p, R, DELTA), eta, 5e-7)
                policies = (
                    table.tilted(p, R, table.eta_at(p, R, DELTA)), table.best_at(p, R, DELTA),
                    table.moved_along(p, g := table.policy_gradient(p, R), table.length_at(p, g, DELTA)),
                )  # fmt: skip
                self.assertClose([table.kl(p, q) for q in policies], [DELTA] * 3, 1e-14)
                self.assertClose([table.gain(p, q, R) for q in policies], [tilt, best, plain], 6e-10)
                generator = torch.Generator().manual_seed(0)
                for _ in range(50):  # no direction beats it
                    direction = torch.randn(3, dtype=torch.float64, generator=generator)
                    q = table.moved_along(p, direction, table.length_at(p, direction, DELTA))
                    self.assertLessEqual(table.gain(p, q, R), best + 1e-9)

    def test_wrong_versions_have_their_numbers(self):
        known = {"uniform": (0.010001166, 0.0, 0.010013207, 0.007703, 0.010013),
                 "0.5, 0.3, 0.2": (0.009472654, 0.0, 0.009745307, 0.007494, 0.009800)}  # fmt: skip
        for name, start in STARTS.items():
            with self.subTest(name):
                wrong = {m.name: m for m in table.mistakes(f64(start), R)}
                exchanged, live, unsearched, inside, outside = known[name]
                self.assertClose(wrong["KL arguments exchanged"].wrong, exchanged, 6e-10)
                self.assertClose(wrong["old not detached"].wrong, live, 1e-15)
                self.assertClose(wrong["no line search"].wrong, unsearched, 6e-10)
                self.assertClose(wrong["damping inside the root"].wrong, inside, 6e-7)
                self.assertClose(wrong["damping inside the root"].right, outside, 6e-7)
                for m in wrong.values():
                    if not (m.name == "no line search" and name != "uniform"):  # there the full step was right
                        self.assertGreater(abs(m.right - m.wrong), 1e-6, m.name)
        with self.subTest("without damping x'g is x'Fx"):
            for start in STARTS.values():
                same = {m.name: m for m in table.mistakes(f64(start), R, damping=1e-12)}["x'g for x'Fx"]
                self.assertClose(same.right, same.wrong, 1e-9)


class Training(NumberCase):
    def test_every_accepted_step_stays_inside_delta_and_the_others_do_not(self):
        drifts = {}
        for method in METHODS:
            run = train(method, steps=40)
            self.assertGreater(run.history[-1]["expected_reward"], 0.98, method)
            drifts[method] = [row["kl_old_current"] for row in run.history]
        self.assertLessEqual(max(drifts["trpo"]), DELTA, "KL(old || new) <= delta after every accepted step")
        self.assertGreater(max(drifts["ppo-clip"]), 3 * DELTA, "the clip does not know delta")
        self.assertGreater(max(drifts["ppo-kl"]), 3 * DELTA, "the penalty corrects itself after the fact")
        self.assertLess(max(drifts["ppo-kl"][5:]), DELTA)

    def test_the_chain_learns_inside_delta(self):
        run = train("trpo", "chain", steps=25)
        self.assertGreater(run.history[-1]["expected_return"], 0.98)
        self.assertLessEqual(max(row["kl_old_current"] for row in run.history), DELTA)

    def test_the_penalty_doubles_and_halves(self):
        history = train("ppo-kl", steps=30).history
        for before, after in zip(history[1:], history[2:]):
            drift = before["kl_old_current"]
            factor = 2 if drift > 1.5 * DELTA else 0.5 if drift < DELTA / 1.5 else 1
            self.assertEqual(after["beta"], factor * before["beta"], f"KL {drift}, delta {DELTA}")

    def test_same_seed_same_numbers(self):
        for method in METHODS:
            self.assertEqual(train(method, steps=3).history, train(method, steps=3).history)
        self.assertNotEqual(train("trpo", steps=2).history, train("trpo", steps=2, seed=8).history)
        self.assertRegex(repr(train("trpo", steps=2)), "^<trpo on the bandit, 2 steps: expected_reward 0")
        for arguments in (("trpo-2",), ("trpo", "bandits")):
            with self.assertRaisesRegex(ValueError, "wanted one of"):
                train(*arguments)


class Command(unittest.TestCase):
    def call(self, *arguments):
        out, err, code = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                command.main(list(map(str, arguments)))
            except SystemExit as stop:
                code = stop.code
        return code, out.getvalue(), err.getvalue()

    def test_json_and_figure(self):
        with tempfile.TemporaryDirectory() as name:
            report, figure = Path(name) / "t.json", Path(name) / "t.svg"
            code, out, _ = self.call("--steps", 3, "--json", report, "--plot", figure)
            self.assertEqual(code, 0)
            self.assertIn("0.010013207   rejected", out)
            self.assertIn("trpo", out)
            document = json.loads(report.read_text())
            self.assertEqual([step["accepted"] for step in document["natural_step"]], [False, True])
            self.assertEqual(len(document["trainings"][0]["history"]), 4)
            self.assertTrue(figure.read_bytes().startswith(b"<?xml"))

    def test_only_the_worked_steps(self):
        code, out, _ = self.call("--no-training", "--delta", 0.05)
        self.assertEqual((code, "Trained" in out, "delta 0.05" in out), (0, False, True))

    def test_wrong_flags(self):
        for arguments, words in (
            (("--delta", 0), "got '0', wanted a number from 1e-09 to 10"),
            (("--task", "cartpole"), "invalid choice"),
            (("--plot", "x.svg", "--no-training"), "--plot"),
            (("--plot", "x.jpg"), ".svg"),
        ):
            with self.subTest(arguments):
                code, _, err = self.call(*arguments)
                self.assertEqual((code, len(err.splitlines())), (2, 1), err)
                self.assertIn(words, err)

    def test_the_figure_names_who_stays_inside(self):
        runs = [train(method, steps=8) for method in METHODS]
        titles = [axis.get_title() for axis in draw(runs).axes]
        self.assertIn("trpo: 0 of 8 updates above delta (black)", titles)
        self.assertEqual(set(TASKS), {"bandit", "chain"})


if __name__ == "__main__":
    unittest.main()
