"""The stack between a policy and the arm: u = C(s, a).

    a (a wanted displacement of the hand, m)
      -> planner      joint targets by damped least squares
      -> MPC          joint path over the horizon under speed and acceleration limits: a Reference with time and validity
      -> manager      interpolates; refuses what is stale
      -> WBC          joint velocities under speed and position limits
      -> integrator   q + dt dq
    u (the displacement that the hand made, m)

The stack belongs to the environment: the policy sampled a, and its ratio stays that of a. What goes wrong has a name and a safe
behaviour (SAFE): the arm stops, or holds the last good path to its end; no command outside the limits leaves the stack.
"""

from __future__ import annotations

import time
from typing import Callable, NamedTuple

import numpy as np

from extensions.control import qp
from extensions.control.arm import Arm
from extensions.control.mpc import Condensed, Model, condense, plan
from extensions.control.qp import Problem, Solution
from extensions.control.reference import EXPIRED, FRESH, Reference, ReferenceManager
from extensions.control.wbc import Task, velocity_step

# What goes wrong -> what the stack does. "hold": follow the last good reference while it is valid; "stop": velocity 0.
SAFE = {
    "infeasible plan": "hold",
    "unfinished plan": "hold",
    "solver time-out": "hold",
    "solver error": "hold",
    "state not finite": "stop",
    "action not finite": "hold",
    "expired reference": "stop",
    "missing reference": "stop",
}
OF_STATUS = {qp.INFEASIBLE: "infeasible plan", qp.UNFINISHED: "unfinished plan", qp.TIMED_OUT: "solver time-out"}


class Settings(NamedTuple):
    """Times in s. The policy acts every `period`; the WBC runs `ticks` times in it."""

    period: float = 0.1
    ticks: int = 5
    horizon: int = 5  # steps of `period` that the MPC looks ahead
    valid_for: float = 0.25
    solver_seconds: float = 0.05
    damping: float = 0.05  # of the planner's least squares: no wild joint targets near a stretched arm


class Executed(NamedTuple):
    """One policy step of the loop: what a buffer stores beside a and its log-probability."""

    u: np.ndarray  # [2], displacement that the hand made
    correction: float  # |u - a|
    margin: float  # distance of the nearest joint to its limit, rad
    status: str  # of the MPC
    events: tuple[str, ...]  # names in SAFE that occurred
    age: float  # of the reference at the end, s
    latency: float  # of the MPC, s of wall clock: logged, never used
    q: np.ndarray


class Stack:
    """C(s, a) for one arm. `solver`: any function of a Problem (see solvers)."""

    def __init__(
        self, arm: Arm = Arm(), settings: Settings = Settings(), solver: Callable[[Problem], Solution] | None = None
    ):
        self.arm, self.settings = arm, settings
        self.solver = solver or (lambda problem: qp.active_set(problem, seconds=settings.solver_seconds))
        self.condensed = self._model()
        self.reset(np.zeros(3))

    def _model(self) -> Condensed:
        """Three joints as double integrators: states (q, qd), inputs qdd."""
        dt, three = self.settings.period, np.eye(3)
        A = np.block([[three, dt * three], [np.zeros((3, 3)), three]])
        B = np.concatenate([dt * dt / 2 * three, dt * three])
        Q = np.diag([1.0] * 3 + [0.02] * 3)
        low, high = np.full(6, -np.inf), np.full(6, np.inf)
        low[3:], high[3:] = -self.arm.speed, self.arm.speed
        limits = dict(u_low=-self.arm.acceleration, u_high=self.arm.acceleration, x_low=low, x_high=high)
        return condense(Model(A, B, Q, 1e-3 * three, 5 * Q, self.settings.horizon, **limits))

    def reset(self, q: np.ndarray, now: float = 0.0) -> None:
        self.q, self.qd, self.now = q.astype(float), np.zeros(3), now
        self.manager = ReferenceManager()

    def joint_target(self, a: np.ndarray) -> np.ndarray:
        """q + J' (J J' + damping^2 I)^-1 a, inside the joint limits: where the hand would have moved by a."""
        J = self.arm.jacobians(self.q)[-1]
        step = J.T @ np.linalg.solve(J @ J.T + self.settings.damping**2 * np.eye(2), a)
        return np.clip(self.q + step, self.arm.q_low, self.arm.q_high)

    def replan(self, a: np.ndarray) -> tuple[str, str | None, float]:
        """Plan a joint path and offer it to the manager -> (solver status, event or None, seconds it took)."""
        if not np.isfinite(a).all():
            return "not run", "action not finite", 0.0
        target = np.concatenate([self.joint_target(a), np.zeros(3)])
        started = time.perf_counter()
        try:
            planned = plan(self.condensed, np.concatenate([self.q, self.qd]), target, self.solver)
        except (ValueError, ArithmeticError, np.linalg.LinAlgError):
            return "error", "solver error", time.perf_counter() - started
        latency = time.perf_counter() - started
        if not np.isfinite(planned.x).all():
            return "error", "solver error", latency
        if not planned.solution.usable:
            return planned.solution.status, OF_STATUS.get(planned.solution.status, "unfinished plan"), latency
        times = self.now + self.settings.period * np.arange(self.settings.horizon + 1)
        self.manager.offer(Reference(self.now, self.now + self.settings.valid_for, times, planned.x[:, :3]))
        return planned.solution.status, None, latency

    def step(self, a: np.ndarray) -> Executed:
        """Execute one policy step of length `period`."""
        before, events = self.arm.hand(self.q), []
        if np.isfinite(self.q).all():
            status, event, latency = self.replan(np.asarray(a, dtype=float))
        else:
            status, event, latency = "not run", "state not finite", 0.0
        events += [event] if event else []
        dt = self.settings.period / self.settings.ticks
        age = np.inf
        for _ in range(self.settings.ticks):
            command, why, age = self._command(dt)
            events += [why] if why and why not in events else []
            # The WBC's box holds the limits; clipping again costs nothing and does not depend on any solver.
            command = np.clip(command, -self.arm.speed, self.arm.speed)
            if np.isfinite(self.q).all():
                self.q = np.clip(self.q + dt * command, self.arm.q_low, self.arm.q_high)
                self.qd = command
            self.now += dt
        u = self.arm.hand(self.q) - before
        correction = float(np.linalg.norm(u - a))
        return Executed(u, correction, self.arm.margin(self.q), status, tuple(events), age, latency, self.q.copy())

    def _command(self, dt: float) -> tuple[np.ndarray, str | None, float]:
        """Joint velocities for one tick -> (command, event or None, age of the reference)."""
        still = np.zeros(3)
        if not np.isfinite(self.q).all():
            return still, "state not finite", np.inf
        given = self.manager.at(self.now)
        if given.status != FRESH:
            return still, "expired reference" if given.status == EXPIRED else "missing reference", given.age
        wanted = given.velocity + (given.value - self.q) / self.settings.period
        solution = velocity_step(self.arm, self.q, [Task(np.eye(3), wanted)], dt)
        if not (solution.usable and np.isfinite(solution.x).all()):
            return still, "solver error", given.age
        return solution.x, None, given.age
