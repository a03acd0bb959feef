"""extensions/gymnasium_ppo against stable-baselines3: the same rollouts, the same advantages, the same update.

    python -m pip install -r verification/requirements.txt
    python -B -m unittest -v verification.test_environments

Skipped where a package is absent or has another version than verification/requirements.txt names. stable-baselines3 steps the
environments, fills its RolloutBuffer and runs its own `train`; our collector repeats its actions on environments of the same
seeds, and our update repeats its mini-batches from the same weights. Its networks are float32, which sets the tolerance.

Two other public rules for time limits are stated as formulas and bound to what they differ by: CleanRL's and rsl_rl's.
"""

from __future__ import annotations

import unittest

import numpy as np
import torch

from extensions.gymnasium_ppo.boundaries import Steps, advantages_of
from extensions.gymnasium_ppo.environments import Collector, Rollout, make_environments
from extensions.gymnasium_ppo.policy import Policy
from extensions.gymnasium_ppo.settings import run_of
from extensions.gymnasium_ppo.update import Batch, descend_flat, gradient_of, ppo_loss
from rl_lab import Adam
from verification.test_peers import PeerTest, needs

GAMMA, LAM = 0.97, 0.9
SINGLE = 1e-5
"""Relative to the largest number compared: rounding of float32 networks, rewards and buffers."""

CASES = {"CartPole-v1": 15, "Pendulum-v1": 20}  # environment -> time limit, short enough to be met several times
ENVIRONMENTS, ROWS, SEED = 3, 64, 5


def sb3_model(env: str, **options):
    """stable-baselines3's PPO after one rollout of its own."""
    import gymnasium
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.vec_env import DummyVecEnv

    def make():
        return gymnasium.make(env, max_episode_steps=CASES[env])

    settings = dict(n_steps=ROWS, batch_size=ROWS, gamma=GAMMA, gae_lambda=LAM, seed=SEED, device="cpu") | options
    model = PPO("MlpPolicy", DummyVecEnv([make] * ENVIRONMENTS), **settings)
    model.set_logger(Logger(None, []))
    _, callback = model._setup_learn(10**6, None)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, ROWS)
    return model


def our_policy(model, spaces) -> Policy:
    """Our networks with stable-baselines3's weights."""
    policy = Policy(spaces.observation_size, spaces.action_size, spaces.continuous, 64, torch.Generator())
    theirs = dict(model.policy.named_parameters())
    names = [f"mlp_extractor.{{}}_net.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")]
    heads = {"policy": ["action_net.weight", "action_net.bias"], "value": ["value_net.weight", "value_net.bias"]}
    order = [name.format("policy") for name in names] + heads["policy"] + ["log_std"] * spaces.continuous
    order += [name.format("value") for name in names] + heads["value"]
    assert sorted(order) == sorted(theirs), "a parameter of theirs has no place in ours"
    with torch.no_grad():
        policy.flat.copy_(torch.cat([theirs[name].double().flatten() for name in order]))
    policy.sb3_order = order
    return policy


def flat_of(model, order: list[str], gradient: bool = False) -> torch.Tensor:
    parameters = dict(model.policy.named_parameters())
    return torch.cat([(p.grad if gradient else p.detach()).double().flatten() for p in (parameters[n] for n in order)])


def our_rollout(env: str, model, actions: np.ndarray) -> tuple[Rollout, Policy]:
    """The same seeds and actions through our collector, and our policy with the same weights."""
    environments, spaces = make_environments(env, ENVIRONMENTS, "same-step", CASES[env])
    collector = Collector(environments, spaces, "same-step", range(SEED, SEED + ENVIRONMENTS))
    taken = actions if spaces.continuous else actions[..., 0].astype(int)
    rollout = collector.collect(ROWS, lambda row, observations: taken[row])
    environments.close()
    return rollout, our_policy(model, spaces)


def steps_of(rollout: Rollout, policy: Policy) -> Steps:
    with torch.no_grad():
        values = [policy.values(torch.from_numpy(o)).numpy() for o in (rollout.observations, rollout.next_observations)]
    columns = (rollout.rewards, *values, rollout.terminated, rollout.truncated, rollout.valid)
    return Steps(*(torch.from_numpy(column).T for column in columns))


class Close(PeerTest):
    default_dtype = torch.float32

    def assert_close(self, ours: np.ndarray, theirs: np.ndarray, what: str) -> None:
        ours, theirs = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
        gap, scale = np.abs(ours - theirs).max(), max(1.0, np.abs(theirs).max())
        self.assertLess(gap, SINGLE * scale, f"{what}: the largest difference is {gap:.3g} at a scale of {scale:.3g}")


@needs("stable-baselines3", "gymnasium")
class SameRollouts(Close):
    """Advantages and returns of stable-baselines3's buffer, time limits included. Its rewards differ: it pays them in."""

    def test_advantages_and_returns_equal_the_buffer(self):
        for env in CASES:
            with self.subTest(env=env):
                model = sb3_model(env)
                buffer = model.rollout_buffer
                rollout, policy = our_rollout(env, model, buffer.actions)
                self.assertTrue(rollout.truncated.sum() > 3, "no time limit was met: nothing is proven")
                self.assert_close(rollout.observations, buffer.observations, "observations")
                steps = steps_of(rollout, policy)
                self.assert_close(steps.values.T, buffer.values, "values")
                advantages, returns = advantages_of(steps, GAMMA, LAM)
                self.assert_close(advantages.T, buffer.advantages, "advantages")
                self.assert_close(returns.T, buffer.returns, "returns")

                limit = rollout.truncated & ~rollout.terminated
                paid = rollout.rewards + GAMMA * limit * steps.next_values.T.numpy()
                self.assert_close(paid, buffer.rewards, "reward + gamma V(final) at a time limit")
                self.assertGreater(np.abs(rollout.rewards - buffer.rewards)[limit].max(), 1e-4, "raw rewards must differ")

    def test_every_mistake_at_boundaries_is_seen(self):
        model = sb3_model("CartPole-v1")
        rollout, policy = our_rollout("CartPole-v1", model, model.rollout_buffer.actions)
        steps = steps_of(rollout, policy)
        for mistake in ("one-done", "no-bootstrap", "reset-value", "mask-late"):
            wrong = advantages_of(steps, GAMMA, LAM, mistake)[0].T.numpy()
            self.assertGreater(np.abs(wrong - model.rollout_buffer.advantages).max(), 1e-2, mistake)

    def test_differs_cleanrl_takes_a_time_limit_for_an_end(self):
        """ppo.py @04d2c47: next_done = terminated or truncated; 1 - next_done stops bootstrap and recursion: our one-done."""
        model = sb3_model("CartPole-v1")
        rollout, policy = our_rollout("CartPole-v1", model, model.rollout_buffer.actions)
        steps = steps_of(rollout, policy)
        done = (rollout.terminated | rollout.truncated).astype(float)
        values, after = steps.values.T.numpy(), steps.next_values.T.numpy()
        cleanrl, following = np.zeros_like(rollout.rewards), 0.0
        for t in reversed(range(ROWS)):
            next_value = values[t + 1] if t + 1 < ROWS else after[t]  # the buffer's next row, or the last observation
            delta = rollout.rewards[t] + GAMMA * next_value * (1 - done[t]) - values[t]
            cleanrl[t] = following = delta + GAMMA * LAM * (1 - done[t]) * following
        np.testing.assert_allclose(cleanrl, advantages_of(steps, GAMMA, LAM, "one-done")[0].T, atol=1e-12)
        limit = rollout.truncated & ~rollout.terminated
        right = advantages_of(steps, GAMMA, LAM)[0].T.numpy()
        np.testing.assert_allclose((right - cleanrl)[limit], GAMMA * after[limit], atol=1e-12)

    def test_differs_rsl_rl_bootstraps_from_the_state_before_the_limit(self):
        """rsl_rl adds gamma V(s_t) to the reward at a time-out: wrong by gamma (V(s_t) - V(final)) there (rsl_rl#151)."""
        model = sb3_model("Pendulum-v1")
        rollout, policy = our_rollout("Pendulum-v1", model, model.rollout_buffer.actions)
        steps = steps_of(rollout, policy)
        limit = (rollout.truncated & ~rollout.terminated).T
        values, after = steps.values.numpy(), steps.next_values.numpy()
        paid = torch.from_numpy(steps.rewards.numpy() + GAMMA * np.where(limit, values, 0.0))
        rsl_rl = advantages_of(steps._replace(rewards=paid), GAMMA, LAM, "one-done")[0].numpy()
        right = advantages_of(steps, GAMMA, LAM)[0].numpy()
        np.testing.assert_allclose((rsl_rl - right)[limit], GAMMA * (values - after)[limit], atol=1e-12)
        self.assertGreater(np.abs(values - after)[limit].max(), 1e-3)


@needs("stable-baselines3", "gymnasium")
class SameUpdate(Close):
    """stable-baselines3's `train` and ours on its mini-batches, from the same weights: loss, gradient, parameters."""

    OPTIONS = {
        "as shipped": dict(),
        "entropy bonus": dict(ent_coef=0.03),
        "raw advantages": dict(normalize_advantage=False),
        "narrow band": dict(clip_range=0.02, learning_rate=3e-3),
    }

    def compare(self, env: str, options: dict, alter=None) -> None:
        model = sb3_model(env, n_epochs=2, **options)
        buffer, seen, get = model.rollout_buffer, [], model.rollout_buffer.get
        _, policy = our_rollout(env, model, buffer.actions)

        def recorded(size):
            for data in get(size):
                seen.append(data)
                yield data

        buffer.get = recorded
        model.train()
        self.assertEqual(len(seen), 2 * ENVIRONMENTS, "two epochs of mini-batches")
        given = dict(
            entropy_weight=options.get("ent_coef", 0.0), clip_epsilon=options.get("clip_range", 0.2),
            learning_rate=options.get("learning_rate", 3e-4),
        )  # fmt: skip
        settings = run_of(env, **given | (alter or {})).settings
        optimizer = Adam([policy.flat], settings.learning_rate, eps=settings.adam_epsilon)
        normalise = options.get("normalize_advantage", True)
        for data in seen:
            actions = data.actions.double() if policy.distribution.continuous else data.actions.flatten().long()
            columns = (data.old_log_prob, data.old_values, data.advantages, data.returns)
            unused = torch.zeros(len(actions), 1)
            batch = Batch(data.observations.double(), actions, unused, *(c.double().flatten() for c in columns))
            loss = ppo_loss(policy, batch, settings, normalise)
            gradient = gradient_of(ppo_loss(policy, batch, settings, normalise).total, policy)
            descend_flat(loss.total, policy, optimizer, settings.max_gradient_norm, env)
        norm = torch.linalg.vector_norm(gradient).item()
        clipped = gradient * min(1.0, settings.max_gradient_norm / norm)
        self.assert_close(loss.total.item(), model.logger.name_to_value["train/loss"], "loss of the last mini-batch")
        self.assert_close(clipped, flat_of(model, policy.sb3_order, gradient=True), "gradient of the last mini-batch")
        self.assert_close(policy.flat, flat_of(model, policy.sb3_order), "parameters after two epochs")

    def test_loss_gradient_and_parameters(self):
        for env in CASES:
            for name, options in self.OPTIONS.items():
                with self.subTest(env=env, options=name):
                    self.compare(env, options)

    def test_the_comparison_sees_another_setting(self):
        for alter in (dict(value_weight=0.25), dict(clip_epsilon=0.1), dict(adam_epsilon=1e-2), dict(entropy_weight=0.01)):
            with self.subTest(alter=alter), self.assertRaises(AssertionError):
                self.compare("CartPole-v1", dict(clip_range=0.02, learning_rate=3e-3), alter)

    def test_differs_the_clipped_value_loss(self):
        """Ours: max of plain and clipped square (PPO2 baselines, CleanRL); theirs: the clipped square alone."""
        with self.assertRaisesRegex(AssertionError, "loss of the last mini-batch|gradient|parameters"):
            self.compare("CartPole-v1", dict(clip_range_vf=0.001), dict(value_clip=0.001))


if __name__ == "__main__":
    unittest.main()
