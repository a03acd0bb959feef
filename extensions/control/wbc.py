"""Whole-body control: several tasks for one body, at the level of velocities and at that of forces.

A task asks for J dq = v. Two ways to rank tasks: a weighted sum, in which a task is only expensive to miss, and a hierarchy, in
which the next task moves in the null space of the ones before and cannot disturb them. A controller of velocities solves for
joint velocities alone: that it tracks perfectly says nothing of friction, balance or torque, which are checked here apart.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

import numpy as np

from extensions.control.arm import GRAVITY, Arm
from extensions.control.qp import Problem, Solution, active_set, projected_gradient

# Regularisation of the velocity step: which of several exact joint motions is taken.
SMALL = 1e-6
# A singular value below this part of the largest counts as 0: a direction that a task cannot move any more.
LOST = 1e-9


class Task(NamedTuple):
    """J dq = v, with a weight that only a weighted sum reads."""

    J: np.ndarray
    v: np.ndarray
    weight: float = 1.0


class Weighted(NamedTuple):
    dq: np.ndarray
    condition: float  # of the normal matrix: the price of a large weight


def weighted(tasks: Sequence[Task]) -> Weighted:
    """argmin sum_i w_i |J_i dq - v_i|^2, by its normal equations."""
    normal = sum(task.weight * task.J.T @ task.J for task in tasks)
    right = sum(task.weight * task.J.T @ task.v for task in tasks)
    return Weighted(np.linalg.solve(normal, right), float(np.linalg.cond(normal)))


def hierarchy(tasks: Sequence[Task]) -> np.ndarray:
    """Tasks in strict order: dq += N (J N)^+ (v - J dq), N the projector on the null space of all tasks before."""
    n = tasks[0].J.shape[1]
    dq, N = np.zeros(n), np.eye(n)
    for task in tasks:
        inverse = np.linalg.pinv(task.J @ N, rcond=LOST)
        dq = dq + N @ inverse @ (task.v - task.J @ dq)
        N = N - inverse @ (task.J @ N)
    return dq


def velocity_step(arm: Arm, q: np.ndarray, tasks: Sequence[Task], dt: float) -> Solution:
    """Joint velocities under speed and position limits: min sum w |J dq - v|^2 + small |dq|^2 over the box.

    -speed <= dq <= speed and q_low <= q + dt dq <= q_high. It knows no force.
    """
    normal = sum(task.weight * task.J.T @ task.J for task in tasks) + SMALL * np.eye(len(q))
    right = sum(task.weight * task.J.T @ task.v for task in tasks)
    low = np.maximum(-arm.speed, (arm.q_low - q) / dt)
    high = np.minimum(arm.speed, (arm.q_high - q) / dt)
    low, high = np.minimum(low, high), np.maximum(low, high)
    free = np.linalg.solve(normal, right)
    if (low <= free).all() and (free <= high).all():
        problem = Problem(normal, -right)
        return Solution(free, "solved", float(np.abs(normal @ free - right).max()), 0, problem.value(free))
    return projected_gradient(Problem(normal, -right, low=low, high=high), tolerance=1e-10, most_iterations=20_000)


def acceleration_step(arm: Arm, q: np.ndarray, qd: np.ndarray, wanted: np.ndarray) -> Solution:
    """Joint accelerations nearest to `wanted` [3] that the torque limits allow: |M qdd + bias| <= torque."""
    M, bias = arm.mass_matrix(q), arm.bias(q, qd)
    G = np.concatenate([M, -M])
    h = np.concatenate([arm.torque - bias, arm.torque + bias])
    return active_set(Problem(2 * np.eye(len(q)), -2 * wanted, G, h))


class Demand(NamedTuple):
    """What a motion needs beside what there is."""

    name: str
    needs: float
    available: float

    @property
    def met(self) -> bool:
        return self.needs <= self.available


def contact_demands(acceleration: float, friction: float, height: float, half_foot: float) -> list[Demand]:
    """A point mass at `height` m over a flat foot, accelerated sideways by `acceleration` m/s^2, its height kept.

    The ground pushes with m g upwards and m a sideways: |a| <= mu g, and the centre of pressure moves by h a / g, which must stay
    under the foot. Model: cart and table (linear inverted pendulum); nothing of the arm's own dynamics is in it.
    """
    return [
        Demand("friction: acceleration, m/s^2", abs(acceleration), friction * GRAVITY),
        Demand("balance: centre of pressure, m", height * abs(acceleration) / GRAVITY, half_foot),
    ]


def torque_demands(arm: Arm, q: np.ndarray, qd: np.ndarray, qdd: np.ndarray) -> list[Demand]:
    """Torque of each joint for a motion, beside its limit."""
    tau = arm.torques(q, qd, qdd)
    return [Demand(f"torque of joint {i + 1}, N m", abs(t), limit) for i, (t, limit) in enumerate(zip(tau, arm.torque))]
