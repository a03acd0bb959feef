"""A planar arm with three joints on a fixed base: where its hand is, how it moves, and which torques a motion needs.

Joint angles q [3] are relative; absolute angle theta_k = q_1 + ... + q_k. A point mass sits at the end of each link, so that

    position of mass i   p_i = sum_(k<=i) l_k (cos theta_k, sin theta_k)
    M(q) = sum_i m_i J_i' J_i,   tau = M(q) qdd + sum_i m_i J_i' (a_i + (0, g)),   a_i the acceleration of mass i at qdd = 0

Angles in rad, lengths in m, masses in kg, torques in N m.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

GRAVITY = 9.81


class Arm(NamedTuple):
    """Lengths and masses of the links, limits of the joints."""

    lengths: np.ndarray = np.array([0.5, 0.4, 0.3])
    masses: np.ndarray = np.array([1.5, 1.0, 0.5])
    q_low: np.ndarray = np.array([-2.5, -2.5, -2.5])
    q_high: np.ndarray = np.array([2.5, 2.5, 2.5])
    speed: np.ndarray = np.array([1.5, 1.5, 2.0])
    acceleration: np.ndarray = np.array([6.0, 6.0, 8.0])
    torque: np.ndarray = np.array([40.0, 20.0, 8.0])

    def jacobians(self, q: np.ndarray) -> np.ndarray:
        """d p_i / d q_j for every mass: [3 masses, 2, 3 joints]. The last one is the hand's."""
        theta = np.cumsum(q)
        along = self.lengths[:, None] * np.stack([-np.sin(theta), np.cos(theta)], axis=1)  # d p of link k / d theta_k
        rows = np.zeros((3, 2, 3))
        for mass in range(3):
            for joint in range(mass + 1):
                rows[mass, :, joint] = along[joint : mass + 1].sum(axis=0)
        return rows

    def hand(self, q: np.ndarray) -> np.ndarray:
        """Position of the hand [2]."""
        theta = np.cumsum(q)
        return self.lengths @ np.stack([np.cos(theta), np.sin(theta)], axis=1)

    def mass_matrix(self, q: np.ndarray) -> np.ndarray:
        """M(q) [3, 3], symmetric and positive definite."""
        J = self.jacobians(q)
        return np.einsum("i,iaj,iak->jk", self.masses, J, J)

    def bias(self, q: np.ndarray, qd: np.ndarray) -> np.ndarray:
        """What the torques must give besides M qdd: centrifugal, Coriolis and gravity terms [3]."""
        theta, rate = np.cumsum(q), np.cumsum(qd)
        inward = -(self.lengths * rate**2)[:, None] * np.stack([np.cos(theta), np.sin(theta)], axis=1)
        acceleration = np.cumsum(inward, axis=0) + np.array([0.0, GRAVITY])
        return np.einsum("i,iaj,ia->j", self.masses, self.jacobians(q), acceleration)

    def torques(self, q: np.ndarray, qd: np.ndarray, qdd: np.ndarray) -> np.ndarray:
        """tau = M(q) qdd + bias(q, qd) [3]."""
        return self.mass_matrix(q) @ qdd + self.bias(q, qd)

    def margin(self, q: np.ndarray) -> float:
        """Distance of the nearest joint to its limit, in rad; negative beyond it."""
        return float(min((q - self.q_low).min(), (self.q_high - q).min()))
