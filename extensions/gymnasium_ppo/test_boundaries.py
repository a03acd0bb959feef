"""Ends of episodes: exact numbers of the five mistakes, and three autoreset modes that must give the same transitions."""

from __future__ import annotations

import unittest

import numpy as np
import torch

from extensions.gymnasium_ppo.boundaries import (
    MISTAKES,
    Steps,
    advantages_of,
    constant_reward_toy,
    garbage_toy,
    kept_rows,
    late_mask_toy,
    off_share,
    staircase_toy,
    toy_table,
)
from extensions.gymnasium_ppo.environments import AUTORESET
from extensions.gymnasium_ppo.fixtures import first_transitions, needs_gymnasium, scripted_rollout

EXACT = 1e-12
GAMMA, LAM = 0.97, 0.9


def steps_of(rows: list[tuple]) -> Steps:
    """Rows (reward, value, next value, terminated, truncated, valid) of one environment."""
    columns = list(zip(*rows))
    return Steps(
        *(torch.tensor([column], dtype=torch.float64) for column in columns[:3]),
        *(torch.tensor([column], dtype=torch.bool) for column in columns[3:]),
    )


class ExactNumbers(unittest.TestCase):
    """Reward 1 for ever, V = 1 / (1 - gamma): every right advantage is 0, so that a mistake shows as its own number."""

    def test_the_right_rule_is_zero_on_every_toy_with_the_true_value(self):
        toys = [constant_reward_toy(0.98, 500, after=7), staircase_toy()]
        for toy, gamma in zip(toys, (0.98, 0.9)):
            wrong = advantages_of(toy, gamma, 0.95)[0].abs().max().item()
            self.assertLess(wrong, 1e-11, "r + gamma V(next) - V(s) = 0 with the true V, also at a time limit")

    def test_one_done(self):
        """Last step: 1 - V = -gamma / (1 - gamma); k steps earlier (gamma lambda)^k times as much."""
        for gamma, limit, last, earlier, share in (
            (0.98, 500, -49.0, -11.7271, 0.130),
            (0.9, 200, -9.0, -0.3923, 0.145),
            (0.99, 200, -99.0, -29.0276, 0.375),
        ):
            with self.subTest(gamma=gamma):
                wrong = advantages_of(constant_reward_toy(gamma, limit), gamma, 0.95, "one-done")[0]
                self.assertAlmostEqual(wrong[0, -1].item(), last, delta=1e-10)
                self.assertAlmostEqual(wrong[0, -21].item(), earlier, delta=5e-5)
                self.assertAlmostEqual(wrong[0, -21].item(), last * (gamma * 0.95) ** 20, delta=1e-10)
                self.assertAlmostEqual(off_share(wrong, 1 / (1 - gamma)), share, delta=1e-12)

    def test_no_bootstrap_is_wrong_at_the_cut_only(self):
        toy = constant_reward_toy(0.98, 50, after=10)
        wrong = advantages_of(toy, 0.98, 0.95, "no-bootstrap")[0][0]
        self.assertAlmostEqual(wrong[-1].item(), -49.0, delta=1e-10)
        self.assertLess(wrong[:50].abs().max().item(), 1e-10, "the time limit inside the buffer is bootstrapped")

    def test_reset_value(self):
        """V(first) in place of V(final): 0.9 * 7.29 - 9 = -2.439; V(s_t) in its place, rsl_rl's rule: 0.9 * 9 - 9 = -0.9."""
        toy = staircase_toy()
        self.assertAlmostEqual(advantages_of(toy, 0.9, 0.95, "reset-value")[0][0, 2].item(), -2.439, delta=EXACT)
        rsl_rl = toy._replace(next_values=torch.where(toy.truncated, toy.values, toy.next_values))
        self.assertAlmostEqual(advantages_of(rsl_rl, 0.9, 0.95)[0][0, 2].item(), -0.9, delta=EXACT)
        constant = constant_reward_toy(0.98, 5, after=5)
        unseen = advantages_of(constant, 0.98, 0.95, "reset-value")[0].abs().max().item()
        self.assertLess(unseen, 1e-11, "where V is the same everywhere, neither rule shows: that toy proves nothing here")

    def test_mask_late(self):
        """Right: 1 - 5 = -4; one row late: 1 + 100 - 5 = 96."""
        right, late = (advantages_of(late_mask_toy(), 1.0, 0.0, name)[0][0].tolist() for name in (None, "mask-late"))
        self.assertEqual((right[1], late[1]), (-4.0, 96.0))

    def test_garbage_rows(self):
        """Reward 0 and V on both sides: A = gamma V - V = -1. One garbage row to n steps."""
        for length, share in ((9, 0.1), (200, 1 / 201)):
            toy = garbage_toy(0.98, length, episodes=4)
            advantages = advantages_of(toy, 0.98, 0.95)[0]
            self.assertLess(advantages[toy.valid].abs().max().item(), 1e-11, "garbage must not reach a real row")
            np.testing.assert_allclose(advantages[~toy.valid], -1.0, atol=1e-11)
            self.assertEqual(kept_rows(toy.valid).double().mean().item(), 1 - (~toy.valid).double().mean().item())
            kept = kept_rows(toy.valid, "garbage-rows")
            self.assertAlmostEqual((kept & ~toy.valid).double().mean().item(), share, delta=EXACT)

    def test_the_printed_table_names_every_mistake_and_each_number_differs(self):
        table = toy_table()
        self.assertEqual({row[0] for row in table}, set(MISTAKES))
        for mistake, where, right, wrong in table:
            self.assertGreater(abs(right - wrong), 0.004, f"{mistake}, {where}: right and wrong agree, the toy shows nothing")

    def test_unknown_mistake_is_refused(self):
        with self.assertRaisesRegex(ValueError, "mistake: got 'x', wanted one of one-done"):
            advantages_of(late_mask_toy(), 1.0, 0.0, "x")


class Rule(unittest.TestCase):
    """Hand-worked rows, gamma 0.5, lambda 1."""

    def test_terminated_truncated_cut_and_both(self):
        """delta: end 2 - 1 = 1; limit 2 + 4/2 - 1 = 3; cut the same; both flags: terminated wins, 1."""
        for terminated, truncated, wanted in ((1, 0, 1.0), (0, 1, 3.0), (0, 0, 3.0), (1, 1, 1.0)):
            steps = steps_of([(0.0, 1.0, 1.0, 0, 0, 1), (2.0, 1.0, 4.0, terminated, truncated, 1)])
            advantages, returns = advantages_of(steps, 0.5, 1.0)
            self.assertEqual(advantages[0].tolist(), [-0.5 + 0.5 * wanted, wanted], "A_0 = 0 + 1/2 - 1 + A_1 / 2")
            self.assertEqual(returns[0].tolist(), [0.5 + 0.5 * wanted, 1 + wanted])

    def test_nothing_crosses_a_time_limit(self):
        rows = [(1.0, 0.0, 3.0, 0, 1, 1), (1.0, 7.0, 9.0, 0, 0, 1)]
        first = advantages_of(steps_of(rows), 0.5, 1.0)[0][0, 0].item()
        rows[1] = (1000.0, -7.0, 50.0, 1, 0, 1)
        self.assertEqual(advantages_of(steps_of(rows), 0.5, 1.0)[0][0, 0].item(), first)
        self.assertEqual(first, 2.5, "1 + 3 / 2 - 0")


@needs_gymnasium
class AutoresetModes(unittest.TestCase):
    """The same seeds and actions in the three modes: the same transitions, advantages and returns, bit for bit."""

    CASES = (("CartPole-v1", 0), ("CartPole-v1", 12), ("Pendulum-v1", 20), ("FrozenLake-v1", 0))  # environment, time limit

    def transitions(self, env: str, autoreset: str, limit: int):
        rollout = scripted_rollout(env, autoreset, environments=3, rows=120, time_limit=limit)
        self.assertGreater((rollout.terminated | rollout.truncated).sum(), 8, "too few ends to prove anything")
        return rollout

    def test_same_multiset_of_transitions_advantages_and_returns(self):
        for env, limit in self.CASES:
            seen = {}
            for mode in AUTORESET:
                rollout = first_transitions(self.transitions(env, mode, limit), 80)
                # Any critic will do: a value that tells observations apart.
                weights = np.random.default_rng(0).normal(size=rollout.observations.shape[-1])
                values, following = (np.tanh(o @ weights) for o in (rollout.observations, rollout.next_observations))
                columns = (rollout.rewards, values, following, rollout.terminated, rollout.truncated, rollout.valid)
                advantages, returns = advantages_of(Steps(*(torch.from_numpy(c).T for c in columns)), GAMMA, LAM)
                flat = [column.reshape(240, -1).astype(float) for column in rollout[:7]]
                table = np.concatenate([*flat, advantages.T.reshape(240, 1), returns.T.reshape(240, 1)], axis=1)
                seen[mode] = table[np.lexsort(table.T)]
            for mode in ("same-step", "disabled"):
                with self.subTest(env=env, limit=limit, mode=mode):
                    np.testing.assert_array_equal(
                        seen[mode], seen["next-step"],
                        err_msg=f"{env}: {mode} and next-step give other transitions; likely the final observation was lost",
                    )  # fmt: skip

    def test_a_time_limit_keeps_the_final_observation(self):
        """Pendulum never ends by itself: at the limit, next_observations is not the next row's observation."""
        for mode in AUTORESET:
            rollout = self.transitions("Pendulum-v1", mode, 20)
            ends = np.argwhere(rollout.truncated[:-2])
            self.assertFalse(rollout.terminated.any())
            for t, i in ends:
                later = rollout.observations[t + (2 if mode == "next-step" else 1), i]
                gap = np.abs(rollout.next_observations[t, i] - later).max()
                self.assertGreater(gap, 1e-6, f"{mode}: V(next) would be that of the reset observation")
                moved = np.abs(rollout.next_observations[t, i] - rollout.observations[t, i]).max()
                self.assertLess(moved, 1.5, f"{mode}: the final observation is one step of 0.05 s away")

    def test_garbage_rows_equal_episodes_ended_in_next_step_mode_only(self):
        for mode in AUTORESET:
            rollout = self.transitions("CartPole-v1", mode, 0)
            ended = int((rollout.terminated | rollout.truncated)[:-1].sum())
            self.assertEqual(int((~rollout.valid).sum()), ended if mode == "next-step" else 0, mode)
            self.assertEqual(len(rollout.episode_returns), int((rollout.terminated | rollout.truncated).sum()))
            self.assertEqual(rollout.episode_returns, [float(n) for n in rollout.episode_lengths], "CartPole pays 1 a step")

    def test_a_broken_collector_is_seen(self):
        """The twin that takes the reset observation for the next one: same-step without final_obs."""
        rollout = first_transitions(scripted_rollout("CartPole-v1", "same-step", 3, 120), 80)
        right = first_transitions(scripted_rollout("CartPole-v1", "next-step", 3, 120), 80)
        broken = rollout.next_observations.copy()
        broken[:-1] = np.where(rollout.terminated[:-1, :, None], rollout.observations[1:], broken[:-1])
        self.assertTrue(np.array_equal(rollout.next_observations, right.next_observations))
        self.assertFalse(np.array_equal(broken, right.next_observations))


if __name__ == "__main__":
    unittest.main()
