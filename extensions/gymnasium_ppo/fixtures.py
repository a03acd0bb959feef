"""What several of this folder's tests need."""

from __future__ import annotations

import importlib.util
import unittest

import numpy as np

from extensions.gymnasium_ppo.environments import MISSING, Collector, Rollout, make_environments

needs_gymnasium = unittest.skipUnless(importlib.util.find_spec("gymnasium"), MISSING)


class Scripted:
    """Actions that depend only on the environment and on how many transitions it has made: the same in every autoreset mode."""

    def __init__(self, environments: int, action_size: int, continuous: bool, seed: int = 3):
        random = np.random.default_rng(seed)
        shape = (environments, 2000)
        self.actions = random.normal(0, 2, (*shape, action_size)) if continuous else random.integers(action_size, size=shape)
        self.made = np.zeros(environments, dtype=int)
        self.collector: Collector | None = None

    def __call__(self, row: int, observations: np.ndarray) -> np.ndarray:
        chosen = self.actions[np.arange(len(self.made)), self.made]
        self.made += ~self.collector.resetting
        return chosen


def scripted_rollout(env: str, autoreset: str, environments: int, rows: int, time_limit: int = 0) -> Rollout:
    """A rollout of scripted actions; equal seeds and actions whatever the mode."""
    made, spaces = make_environments(env, environments, autoreset, time_limit)
    act = Scripted(environments, spaces.action_size, spaces.continuous)
    act.collector = Collector(made, spaces, autoreset, seeds=range(11, 11 + environments))
    rollout = act.collector.collect(rows, act)
    made.close()
    return rollout


def first_transitions(rollout: Rollout, count: int) -> Rollout:
    """The first `count` valid transitions of every environment, as if nothing else had been recorded."""
    columns = []
    for column in rollout[:7]:
        columns.append(np.stack([column[rollout.valid[:, i], i][:count] for i in range(rollout.valid.shape[1])], axis=1))
    return Rollout(*columns, [], [])
