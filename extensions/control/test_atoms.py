"""Riccati, quadratic programs, MPC and the arm against closed forms, simulation, packaged solvers and finite differences."""

import importlib.util
import unittest

import numpy as np

from extensions.control import qp, solvers, wbc, worked
from extensions.control.arm import Arm
from extensions.control.mpc import Model, condense, plan
from extensions.control.qp import INFEASIBLE, SOLVED, TIMED_OUT, UNFINISHED, Problem, active_set, kkt_residual
from extensions.control.riccati import double_integrator, riccati_step, solve_riccati

HAVE_PEERS = all(importlib.util.find_spec(name) for name in ("qpsolvers", "quadprog", "scipy"))
PEERS = unittest.skipUnless(
    HAVE_PEERS, "qpsolvers and its solvers are not installed: pip install -r extensions/requirements.txt"
)


def random_mpc(generator: np.random.Generator, states_limited: bool) -> Problem:
    """A stable random model of 2 to 4 states, 1 or 2 inputs, horizon 4 to 8, and a state far enough for limits to bind."""
    n, m = generator.integers(2, 5), generator.integers(1, 3)
    A = generator.normal(size=(n, n))
    A *= 1.05 / np.abs(np.linalg.eigvals(A)).max()
    limits = dict(u_low=-np.ones(m), u_high=np.ones(m))
    if states_limited:
        limits |= dict(x_low=np.full(n, -8.0), x_high=np.full(n, 8.0))
    model = Model(
        A, generator.normal(size=(n, m)), np.eye(n), 0.1 * np.eye(m), 2 * np.eye(n), int(generator.integers(4, 9)), **limits
    )
    return condense(model).problem(3 * generator.normal(size=n))


class WorkedExamples(unittest.TestCase):
    def test_every_number_agrees(self):
        for section, make in worked.SECTIONS.items():
            for item in make():
                with self.subTest(item.title):
                    self.assertTrue(
                        item.agrees(), f"\n{section}: {item.title}: {item.formula}\n{item.text('got', 'wanted')}"
                    )


class Riccati(unittest.TestCase):
    def test_the_gain_is_optimal_on_a_long_horizon(self):
        """Without limits the condensed problem of 60 steps has the regulator's first input."""
        A, B = double_integrator(0.3)
        Q, R = np.diag([2.0, 0.1]), np.array([[0.5]])
        r = solve_riccati(A, B, Q, R)
        x0 = np.array([1.0, -2.0])
        free = plan(condense(Model(A, B, Q, R, Q, 60)), x0)
        np.testing.assert_allclose(free.u[0], -r.K @ x0, atol=1e-9)
        np.testing.assert_allclose(riccati_step(A, B, Q, R, r.P)[0], r.P, rtol=1e-13)

    @PEERS
    def test_scipy_agrees(self):
        from scipy.linalg import solve_discrete_are

        generator = np.random.default_rng(0)
        for _ in range(20):
            A, B = generator.normal(size=(4, 4)) * 0.7, generator.normal(size=(4, 2))
            r = solve_riccati(A, B, np.eye(4), np.eye(2))
            np.testing.assert_allclose(r.P, solve_discrete_are(A, B, np.eye(4), np.eye(2)), rtol=1e-9)

    def test_what_cannot_be_stabilised_is_refused(self):
        with self.assertRaisesRegex(ValueError, "does not settle"):
            solve_riccati(np.diag([1.5, 0.5]), np.array([[0.0], [1.0]]), np.eye(2), np.eye(1))


class QuadraticPrograms(unittest.TestCase):
    def test_200_random_mpc_problems_satisfy_the_optimality_conditions(self):
        generator = np.random.default_rng(1)
        statuses = {SOLVED: 0, INFEASIBLE: 0}
        for number in range(200):
            problem = random_mpc(generator, states_limited=number % 2 == 1)
            solution = active_set(problem)
            statuses[solution.status] += 1
            if solution.usable:
                self.assertLessEqual(solution.residual, 1e-9 * (1 + np.abs(problem.f).max()))
                if problem.G is None:
                    other = qp.projected_gradient(problem)
                    np.testing.assert_allclose(other.x, solution.x, atol=1e-8)
        self.assertGreater(statuses[SOLVED], 120)

    @PEERS
    def test_quadprog_agrees_on_200_random_mpc_problems_and_on_which_have_no_solution(self):
        generator = np.random.default_rng(1)
        for number in range(200):
            problem = random_mpc(generator, states_limited=number % 2 == 1)
            own, peer = active_set(problem), solvers.packaged("quadprog", problem)
            self.assertEqual(own.status, peer.status, number)
            if own.usable:
                np.testing.assert_allclose(own.x, peer.x, atol=1e-9, err_msg=str(number))

    @PEERS
    def test_every_packaged_solver_says_infeasible_and_solves_the_standard_problems(self):
        for name in solvers.PACKAGED:
            with self.subTest(name):
                self.assertEqual(solvers.solver(name)(worked.infeasible()).status, INFEASIBLE)
                for problem, constant, optimum in qp.hock_schittkowski().values():
                    solution = solvers.solver(name)(problem)
                    self.assertEqual(solution.status, SOLVED)
                    self.assertAlmostEqual(solution.objective + constant, optimum, 8)
        status, x = solvers.raw_osqp_answer(worked.infeasible())
        self.assertEqual(status, "primal infeasible")
        self.assertGreater(x[0], 1e9, "OSQP's x of a problem without a solution is finite and wild: ask the status first")

    def test_equalities_boxes_and_what_has_no_solution(self):
        # min x^2 + y^2 with x + y = 2, x <= .5: x = .5, y = 1.5; multipliers by hand: gradient (1, 3) = 3 (1, 1) - 2 (1, 0).
        two = dict(H=2 * np.eye(2), f=np.zeros(2), E=np.ones((1, 2)), e=np.array([2.0]))
        solution = active_set(Problem(**two, high=np.array([0.5, np.inf])))
        np.testing.assert_allclose(solution.x, [0.5, 1.5], atol=1e-12)
        self.assertLess(solution.residual, 1e-12)
        for infeasible in (
            Problem(**two, high=np.array([0.5, 1.0])),
            worked.infeasible(),
            Problem(np.eye(1), np.zeros(1), low=np.array([2.0]), high=np.array([1.0])),
        ):
            self.assertEqual(active_set(infeasible).status, INFEASIBLE)
            self.assertFalse(active_set(infeasible).usable)
        box = Problem(np.eye(1), np.zeros(1), low=np.array([2.0]), high=np.array([1.0]))
        self.assertEqual(qp.projected_gradient(box).status, INFEASIBLE)

    def test_limits_of_time_and_steps_are_statuses(self):
        problem = random_mpc(np.random.default_rng(5), False)
        self.assertEqual(active_set(problem, seconds=-1).status, TIMED_OUT)
        self.assertEqual(active_set(problem, most_iterations=1).status, UNFINISHED)
        self.assertEqual(qp.projected_gradient(problem, most_iterations=3).status, UNFINISHED)

    def test_the_residual_judges_any_x(self):
        problem = qp.hock_schittkowski()["HS35"][0]
        right = active_set(problem).x
        self.assertLess(kkt_residual(problem, right), 1e-12)
        for wrong in (right + 1e-3, np.zeros(3), np.array([1.0, 1.0, 0.5]), np.full(3, np.nan)):
            self.assertGreater(kkt_residual(problem, wrong), 1e-4)

    def test_bad_problems_are_refused(self):
        H, f = np.eye(2), np.zeros(2)
        for words, problem in (
            ("symmetric", Problem(np.array([[1.0, 1], [0, 1]]), f)),
            ("not positive definite", Problem(np.diag([1.0, 0.0]), f)),
            ("not finite", Problem(H, np.array([np.nan, 0]))),
            ("shapes do not fit", Problem(H, f, G=np.ones((1, 3)), h=np.ones(1))),
            ("shapes do not fit", Problem(H, f, E=np.ones((1, 2)))),
            ("none of them NaN", Problem(H, f, low=np.array([np.nan, 0]))),
        ):
            with self.subTest(words), self.assertRaisesRegex(ValueError, words):
                active_set(problem)
        with self.assertRaisesRegex(ValueError, "box only"):
            qp.projected_gradient(qp.hock_schittkowski()["HS35"][0])


class Prediction(unittest.TestCase):
    def test_condensing_is_the_simulation(self):
        generator = np.random.default_rng(2)
        A, B = generator.normal(size=(3, 3)) * 0.6, generator.normal(size=(3, 2))
        Q, R, P = np.diag([1.0, 2, 3]), np.diag([0.5, 0.1]), 4 * np.eye(3)
        condensed = condense(Model(A, B, Q, R, P, 5))
        x0, target, U = generator.normal(size=3), generator.normal(size=3), generator.normal(size=10)

        def cost(U):
            x, total = x0, 0.0
            for k, u in enumerate(U.reshape(5, 2)):
                total += (x - target) @ Q @ (x - target) * (k > 0) + u @ R @ u
                x = A @ x + B @ u
            return total + (x - target) @ P @ (x - target)

        problem = condensed.problem(x0, target)
        difference = cost(U) - cost(np.zeros(10))
        self.assertAlmostEqual(problem.value(U), difference, 9, "U'HU/2 + f'U is the cost but for a constant")


class PlanarArm(unittest.TestCase):
    def setUp(self):
        self.arm, generator = Arm(), np.random.default_rng(3)
        self.q, self.qd, self.qdd = generator.uniform(-1, 1, 3), *generator.normal(size=(2, 3))

    def test_jacobian_is_the_derivative_of_the_hand(self):
        for joint in range(3):
            h = 1e-6 * np.eye(3)[joint]
            slope = (self.arm.hand(self.q + h) - self.arm.hand(self.q - h)) / 2e-6
            np.testing.assert_allclose(self.arm.jacobians(self.q)[-1][:, joint], slope, atol=1e-9)

    def test_torques_are_lagranges(self):
        """d/dt dL/dqd - dL/dq with L = qd' M qd / 2 - sum m g y, by finite differences."""
        arm, h = self.arm, 1e-5

        def potential(q):
            theta = np.cumsum(q)
            return 9.81 * arm.masses @ np.cumsum(arm.lengths * np.sin(theta))

        def lagrangian(q, qd):
            return qd @ arm.mass_matrix(q) @ qd / 2 - potential(q)

        def momentum(t):
            q, qd = self.q + t * self.qd + t * t / 2 * self.qdd, self.qd + t * self.qdd
            return arm.mass_matrix(q) @ qd

        slope = np.array(
            [(lagrangian(self.q + d, self.qd) - lagrangian(self.q - d, self.qd)) / (2 * h) for d in h * np.eye(3)]
        )
        wanted = (momentum(h) - momentum(-h)) / (2 * h) - slope
        np.testing.assert_allclose(arm.torques(self.q, self.qd, self.qdd), wanted, atol=1e-7)

    def test_velocity_step_keeps_its_limits_and_is_exact_where_it_may(self):
        J = self.arm.jacobians(self.q)[-1]
        slow = wbc.velocity_step(self.arm, self.q, [wbc.Task(J, np.array([0.05, -0.02]))], 0.02)
        np.testing.assert_allclose(J @ slow.x, [0.05, -0.02], atol=1e-4)
        fast = wbc.velocity_step(self.arm, self.q, [wbc.Task(J, np.array([50.0, 20.0]))], 0.02)
        self.assertTrue(fast.usable and (np.abs(fast.x) <= self.arm.speed + 1e-12).all())
        edge = self.arm.q_high - 0.001
        near = wbc.velocity_step(self.arm, edge, [wbc.Task(np.eye(3), np.ones(3))], 0.02)
        self.assertTrue((edge + 0.02 * near.x <= self.arm.q_high + 1e-9).all(), "no step over a joint limit")

    def test_acceleration_step_keeps_the_torque_limits(self):
        small = wbc.acceleration_step(self.arm, self.q, self.qd, np.zeros(3))
        np.testing.assert_allclose(small.x, 0, atol=1e-9)
        large = wbc.acceleration_step(self.arm, self.q, self.qd, np.array([400.0, -300.0, 500.0]))
        tau = self.arm.torques(self.q, self.qd, large.x)
        self.assertTrue(large.usable and (np.abs(tau) <= self.arm.torque + 1e-8).all())

    def test_a_velocity_controller_tracks_what_no_motor_can_do(self):
        """The kinematic step tracks to 1e-4; the same motion reversed within 10 ms needs more torque, friction and foot than exist."""
        J, wanted = self.arm.jacobians(self.q)[-1], np.array([0.3, 0.1])
        dq = wbc.velocity_step(self.arm, self.q, [wbc.Task(J, wanted)], 0.01).x
        np.testing.assert_allclose(J @ dq, wanted, atol=1e-3)
        demands = wbc.torque_demands(self.arm, self.q, dq, -2 * dq / 0.01)
        demands += wbc.contact_demands(np.linalg.norm(2 * wanted / 0.01), friction=0.5, height=0.8, half_foot=0.1)
        unmet = [demand.name for demand in demands if not demand.met]
        self.assertTrue(any("torque" in name for name in unmet) and any("friction" in name for name in unmet), demands)
        self.assertTrue(all(demand.met for demand in wbc.contact_demands(1.0, 0.5, 0.8, 0.1)))


if __name__ == "__main__":
    unittest.main()
