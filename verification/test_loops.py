"""The loops, repeated by a slow second implementation, and the helpers around them: files, tables, flags.

The replays share nothing with the lab but torch's random draws. Everything else is plain Python numbers: softmax, gradients
in closed form, gradient clip, Adam, early stop, counters, every column and trace. A loop that counts, orders, refreshes,
detaches or measures anything at another moment gives other numbers in some row of some case.
"""

import contextlib
import dataclasses
import io
import json
import math
import os
import statistics
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch

import ppo_chain
import rl_lab
import token_objectives as tokens
from ppo_chain import ChainSettings, train_chain
from rl_lab import BanditSettings, FileProblem, LabParser, Range, train
from test_rl_lab import Case, f64, setUpModule, tearDownModule  # noqa: F401  (the last two: one thread)

# ------------------------------------------------------------------------------------------ the second implementation

# The documented defaults, written again: a changed default in the lab is another run.
UPDATE = dict(
    seed=7,
    steps=120,
    learning_rate=0.08,
    max_gradient_norm=1.0,
    clip_epsilon=0.2,
    max_updates=4,
    kl_stop=0.05,
    value_weight=0.5,
)
BANDIT = dict(
    UPDATE,
    ppo_samples=128,
    ppo_kl_beta=0.02,
    dpo_beta=0.5,
    preference_flips=0,
    group_size=8,
    online_batch_prompts=16,
    grpo_kl_weight=0.02,
)
CHAIN = dict(UPDATE, gae_lambda=0.95, gamma=1.0, episodes=64)
TABLE = [[1.0, 0.2, -0.5], [-0.5, 1.0, 0.2], [0.2, -0.5, 1.0], [1.0, -0.5, 0.2]]
TERMINAL = {1: [1.0, 0.0], 2: [0.2, 0.0]}


def log_softmax(logits):
    top = max(logits)
    total = top + math.log(sum(math.exp(z - top) for z in logits))
    return [z - total for z in logits]


def softmax(logits):
    return [math.exp(logp) for logp in log_softmax(logits)]


def kl(p_logits, q_logits):
    return sum(math.exp(p) * (p - q) for p, q in zip(log_softmax(p_logits), log_softmax(q_logits)))


def entropy(logits):
    return -sum(math.exp(logp) * logp for logp in log_softmax(logits))


def copied(rows):
    return [list(row) for row in rows]


class SlowAdam:
    """Adam on a list of numbers; gradients are first scaled to a norm of at most `max_norm`."""

    def __init__(self, count, rate, max_norm):
        self.rate, self.max_norm, self.time = rate, max_norm, 0
        self.mean, self.square = [0.0] * count, [0.0] * count

    def move(self, numbers, gradient):
        norm = math.sqrt(sum(g * g for g in gradient))
        scale = min(1.0, self.max_norm / norm) if norm else 1.0
        self.time += 1
        moved = []
        for i, (x, g) in enumerate(zip(numbers, gradient)):
            self.mean[i] = 0.9 * self.mean[i] + 0.1 * scale * g
            self.square[i] = 0.999 * self.square[i] + 0.001 * (scale * g) ** 2
            mean, square = self.mean[i] / (1 - 0.9**self.time), self.square[i] / (1 - 0.999**self.time)
            moved.append(x - self.rate * mean / (math.sqrt(square) + 1e-8))
        return moved, norm


def surrogate(policy, samples, epsilon):
    """Mean clipped loss over samples (state, action, old logp, advantage), its gradient, and the share outside the band."""
    gradient = [[0.0] * len(row) for row in policy]
    loss = outside = 0.0
    for state, action, old_logp, advantage in samples:
        ratio = math.exp(log_softmax(policy[state])[action] - old_logp)
        loss -= min(ratio * advantage, min(max(ratio, 1 - epsilon), 1 + epsilon) * advantage) / len(samples)
        outside += (ratio < 1 - epsilon or ratio > 1 + epsilon) / len(samples)
        flat = ratio > 1 + epsilon if advantage > 0 else ratio < 1 - epsilon
        if not flat:
            for a, p in enumerate(softmax(policy[state])):
                gradient[state][a] -= ratio * advantage * ((a == action) - p) / len(samples)
    return loss, gradient, outside


class Replay:
    """Common part of the replays: policy and critic, one Adam for both, and the updates on one batch."""

    def __init__(self, settings, shape, critic_size):
        self.settings = settings
        self.policy, self.critic = [[0.0] * shape[1] for _ in range(shape[0])], [0.0] * critic_size
        self.adam = SlowAdam(shape[0] * shape[1] + critic_size, settings["learning_rate"], settings["max_gradient_norm"])
        self.generator = torch.Generator().manual_seed(settings["seed"])
        self.history, self.updates = [], 0

    def choose(self, rows, count):
        """`count` actions for each row of logits, drawn by the generator."""
        probability = torch.tensor([softmax(row) for row in rows], dtype=torch.float64)
        return torch.multinomial(probability, count, replacement=True, generator=self.generator).tolist()

    def actor_critic(self, samples, targets):
        """PPO's loss on (state, action, old logp, advantage) and value targets: loss, both gradients, diagnostics."""
        loss, of_policy, outside = surrogate(self.policy, samples, self.settings["clip_epsilon"])
        of_critic = [0.0] * len(self.critic)
        value_loss = 0.0
        for (state, *_), target in zip(samples, targets):
            error = self.critic[state] - target
            value_loss += error**2 / len(samples)
            of_critic[state] += self.settings["value_weight"] * 2 * error / len(samples)
        total = loss + self.settings["value_weight"] * value_loss
        return total, of_policy, of_critic, dict(value_loss=value_loss, clip_fraction=outside)

    def reuse(self, loss, drift, most):
        """Updates until `most` or until the drift from the first policy is too large: the last one's row, all policies."""
        policies = [copied(self.policy)]
        for count in range(1, most + 1):
            value, of_policy, of_critic, diagnostics = loss()
            width = len(self.policy[0])
            numbers, norm = self.adam.move(sum(self.policy, []) + self.critic, sum(of_policy, []) + of_critic)
            cells = len(self.policy) * width
            self.policy = [numbers[i : i + width] for i in range(0, cells, width)]
            self.critic = numbers[cells:]
            policies.append(copied(self.policy))
            self.updates += 1
            stopped = count < most and drift(policies[0], self.policy) > self.settings["kl_stop"]
            if stopped:
                break
        return dict(loss=value, gradient_norm=norm, **diagnostics, stopped_early=int(stopped)), policies


class BanditReplay(Replay):
    """train("ppo" | "dpo" | "grpo") again."""

    def __init__(self, algorithm, table, settings):
        super().__init__(settings, (len(table), len(table[0])), len(table) if algorithm == "ppo" else 0)
        self.algorithm, self.table, self.samples_seen, self.pairs_seen = algorithm, table, 0, 0
        self.zero = copied(self.policy)
        self.clean = []
        for context, row in enumerate(table):
            for first in range(len(row)):
                for second in range(first + 1, len(row)):
                    if row[first] != row[second]:
                        better, worse = (first, second) if row[first] > row[second] else (second, first)
                        self.clean.append([context, better, worse])
        order = torch.randperm(len(self.clean), generator=torch.Generator().manual_seed(settings["seed"])).tolist()
        self.flipped = sorted(order[: settings["preference_flips"]])
        self.training = [[c, w, b] if i in self.flipped else [c, b, w] for i, (c, b, w) in enumerate(self.clean)]
        names = {
            "ppo": ("value_loss", "clip_fraction", "stopped_early"),
            "dpo": (),
            "grpo": ("clip_fraction", "zero_group_fraction", "stopped_early"),
        }
        self.record(0, self.policy, dict.fromkeys(("loss", "gradient_norm", *names[algorithm]), 0))
        for step in range(1, settings["steps"] + 1):
            row, policies, batch = getattr(self, algorithm)()
            self.record(step, policies[0], row)
            if step == 1:
                self.trace = self.trace_of(batch, policies)

    def mean_kl(self, first, second):
        return statistics.fmean(map(kl, first, second))

    def margins(self, policy, pairs):
        return [log_softmax(policy[c])[b] - log_softmax(policy[c])[w] for c, b, w in pairs]

    def pair_loss(self, policy, pairs):
        return statistics.fmean(math.log1p(math.exp(-self.settings["dpo_beta"] * h)) for h in self.margins(policy, pairs))

    def record(self, step, old, update):
        probabilities = [softmax(row) for row in self.policy]
        row = {
            "step": step,
            "expected_reward": statistics.fmean(
                sum(p * r for p, r in zip(*rows)) for rows in zip(probabilities, self.table)
            ),
            "optimal_action_probability": statistics.fmean(
                sum(p for p, r in zip(*rows) if r == max(rows[1])) for rows in zip(probabilities, self.table)
            ),
            "entropy": statistics.fmean(map(entropy, self.policy)),
            "kl_old_current": self.mean_kl(old, self.policy),
            "kl_current_reference": self.mean_kl(self.policy, self.zero),
            "loss": update["loss"],
            "gradient_norm": update["gradient_norm"],
            "optimizer_steps": self.updates,
            "sampled_actions": self.samples_seen,
            "pair_presentations": self.pairs_seen,
        }
        own = {name: value for name, value in update.items() if name not in row}
        if self.algorithm == "dpo":
            own = {"dpo_training_loss": self.pair_loss(self.policy, self.training)}
            own["dpo_original_loss"] = self.pair_loss(self.policy, self.clean)
        self.history.append({**row, **own})

    def ppo(self):
        contexts = torch.randint(len(self.table), (self.settings["ppo_samples"],), generator=self.generator).tolist()
        batch = []
        for x, (a,) in zip(contexts, self.choose([self.policy[x] for x in contexts], 1)):
            old_logp = log_softmax(self.policy[x])[a]
            shaped = self.table[x][a] - self.settings["ppo_kl_beta"] * (old_logp + math.log(len(self.table[x])))
            batch.append(
                dict(
                    context=x,
                    action=a,
                    reward=self.table[x][a],
                    old_logp=old_logp,
                    shaped_return=shaped,
                    old_value=self.critic[x],
                    advantage=shaped - self.critic[x],
                )
            )
        samples = [(b["context"], b["action"], b["old_logp"], b["advantage"]) for b in batch]
        targets = [b["shaped_return"] for b in batch]
        self.samples_seen += len(batch)
        return *self.reuse(lambda: self.actor_critic(samples, targets), self.mean_kl, self.settings["max_updates"]), batch

    def grpo(self):
        size = self.settings["group_size"]
        prompts = torch.randint(len(self.table), (self.settings["online_batch_prompts"],), generator=self.generator).tolist()
        batch, zero_groups = [], 0
        for group, (x, actions) in enumerate(zip(prompts, self.choose([self.policy[x] for x in prompts], size))):
            rewards = [self.table[x][a] for a in actions]
            mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
            zero_groups += len(set(rewards)) == 1
            for a, reward in zip(actions, rewards):
                advantage = 0.0 if len(set(rewards)) == 1 else (reward - mean) / (std + 1e-8)
                batch.append(
                    dict(
                        context=x,
                        action=a,
                        reward=reward,
                        old_logp=log_softmax(self.policy[x])[a],
                        group=group,
                        group_mean=mean,
                        group_std=std,
                        advantage=advantage,
                    )
                )
        samples = [(b["context"], b["action"], b["old_logp"], b["advantage"]) for b in batch]
        weight = self.settings["grpo_kl_weight"]

        def loss():
            value, gradient, outside = surrogate(self.policy, samples, self.settings["clip_epsilon"])
            for x in prompts:
                gap = kl(self.policy[x], self.zero[x])
                value += weight * gap / len(prompts)
                for a, logp in enumerate(log_softmax(self.policy[x])):
                    gradient[x][a] += weight * math.exp(logp) * (logp + math.log(len(self.table[x])) - gap) / len(prompts)
            return value, gradient, [], dict(clip_fraction=outside, zero_group_fraction=zero_groups / len(prompts))

        self.samples_seen += len(batch)
        return *self.reuse(loss, self.mean_kl, self.settings["max_updates"]), batch

    def dpo(self):
        def loss():
            beta, gradient = self.settings["dpo_beta"], copied(self.zero)
            for (c, better, worse), h in zip(self.training, self.margins(self.policy, self.training)):
                slope = -beta / (1 + math.exp(beta * h)) / len(self.training)
                gradient[c][better] += slope
                gradient[c][worse] -= slope
            return self.pair_loss(self.policy, self.training), gradient, [], {}

        self.pairs_seen += len(self.training)
        return *self.reuse(loss, self.mean_kl, 1), self.training

    def trace_of(self, batch, policies):
        if self.algorithm != "dpo":
            rows = [dict(sample) for sample in batch[:8]]
            for row in rows:
                x, a = row["context"], row["action"]
                row["ratio_after_each_update"] = [math.exp(log_softmax(p[x])[a] - row["old_logp"]) for p in policies[1:]]
            return rows
        rows = []
        for c, better, worse in batch:
            row = dict(
                context=c,
                chosen=better,
                rejected=worse,
                reward_chosen=self.table[c][better],
                reward_rejected=self.table[c][worse],
            )
            for moment, policy in zip(("before", "after"), policies):
                logp = log_softmax(policy[c])
                row[f"chosen_logp_{moment}"], row[f"rejected_logp_{moment}"] = logp[better], logp[worse]
                row[f"margin_{moment}"] = logp[better] - logp[worse]
            rows.append(row)
        return rows


class ChainReplay(Replay):
    """train_chain again."""

    def __init__(self, settings):
        super().__init__(settings, (3, 2), 3)
        self.samples_seen = 0
        names = ("loss", "value_loss", "gradient_norm", "clip_fraction", "stopped_early")
        self.record(0, 0.0, dict.fromkeys(names, 0))
        for step in range(1, settings["steps"] + 1):
            batch = self.sample()
            visited = [b["state"] for b in batch]

            def drift(old, current, visited=visited):
                return statistics.fmean(kl(old[s], current[s]) for s in visited)

            samples = [
                (b["state"], b["action"], log_softmax(self.policy[b["state"]])[b["action"]], b["advantage"]) for b in batch
            ]
            targets = [b["lambda_return"] for b in batch]
            row, policies = self.reuse(lambda: self.actor_critic(samples, targets), drift, settings["max_updates"])
            self.samples_seen += len(batch)
            self.record(step, drift(policies[0], self.policy), row)
            if step == 1:
                self.trace = batch[:8]

    def sample(self):
        """Complete episodes as rows of the trace. Two steps need no loop:

        A_1 = r - V(s_1), A_0 = gamma V(s_1) - V(0) + gamma lam A_1.
        """
        gamma, lam = self.settings["gamma"], self.settings["gae_lambda"]
        (first,) = self.choose([self.policy[0]], self.settings["episodes"])
        second = self.choose([self.policy[1 + a] for a in first], 1)
        rows = []
        for episode, (a, (b,)) in enumerate(zip(first, second)):
            state, here, there = 1 + a, self.critic[0], self.critic[1 + a]
            last = TERMINAL[state][b] - there
            start = gamma * there - here + gamma * lam * last
            common = dict(episode=episode)
            rows.append(
                dict(
                    common,
                    t=0,
                    state=0,
                    action=a,
                    reward=0.0,
                    old_value=here,
                    next_value=there,
                    terminated=False,
                    boundary=False,
                    advantage=start,
                    lambda_return=start + here,
                )
            )
            rows.append(
                dict(
                    common,
                    t=1,
                    state=state,
                    action=b,
                    reward=TERMINAL[state][b],
                    old_value=there,
                    next_value=0.0,
                    terminated=True,
                    boundary=True,
                    advantage=last,
                    lambda_return=last + there,
                )
            )
        return rows

    def record(self, step, drift, update):
        p = [softmax(row) for row in self.policy]
        self.history.append(
            {
                "step": step,
                "expected_return": sum(p[0][a] * p[1 + a][b] * TERMINAL[1 + a][b] for a in range(2) for b in range(2)),
                "probability_state_1": p[0][0],
                "value_start": self.critic[0],
                "entropy": statistics.fmean(map(entropy, self.policy)),
                "kl_old_current": drift,
                "loss": update["loss"],
                "value_loss": update["value_loss"],
                "gradient_norm": update["gradient_norm"],
                "clip_fraction": update["clip_fraction"],
                "stopped_early": update["stopped_early"],
                "optimizer_steps": self.updates,
                "sampled_actions": self.samples_seen,
            }
        )


# ------------------------------------------------------------------------------------------ the loops


class LoopCase(Case):
    def assertRowsMatch(self, got, wanted, tolerance=1e-9):
        """Same keys in the same order, same kinds of numbers, numbers equal to the tolerance."""
        self.assertEqual(len(got), len(wanted))
        for i, (row, other) in enumerate(zip(got, wanted)):
            self.assertEqual(list(row), list(other), f"row {i}")
            for name in other:
                a, b = (x if isinstance(x, list) else [x] for x in (row[name], other[name]))
                self.assertEqual(len(a), len(b), f"row {i}, {name}")
                for x, y in zip(a, b):
                    self.assertIs(type(x), type(y) if y or isinstance(y, bool) else type(x), f"row {i}, {name}")
                    self.assertLess(abs(x - y), tolerance * max(1, abs(y)), f"row {i}, {name}: {x} against {y}")


# Each case moves some settings away from their defaults and from each other, and reaches both sides of clip and stop.
TIES = [[1.0, 1.0, 0.0, -1.0], [0.5, 0.0, 0.5, 0.25]]
BANDIT_CASES = {
    "as documented": (TABLE, dict(steps=12)),
    "the stop after one update": (TABLE, dict(steps=3, learning_rate=0.5, seed=3)),
    "the stop after some updates": (TABLE, dict(steps=6, learning_rate=0.15, kl_stop=0.03, seed=4)),
    "narrow clip, small norm": (TIES, dict(steps=8, clip_epsilon=0.05, max_gradient_norm=0.02, max_updates=6, seed=5)),
    "heavy anchors": (
        TIES,
        dict(
            steps=8, ppo_kl_beta=0.5, grpo_kl_weight=1.5, value_weight=2.0, dpo_beta=3.0, max_updates=3, kl_stop=9.0, seed=6
        ),
    ),
    "other sizes": (
        TABLE,
        dict(steps=4, ppo_samples=17, group_size=3, online_batch_prompts=5, preference_flips=5, max_updates=1, seed=0),
    ),
    "flips": (TIES, dict(steps=9, preference_flips=2, learning_rate=0.3, kl_stop=9.0, seed=2)),
}
CHAIN_CASES = {
    "as documented": dict(steps=12),
    "discount and short memory": dict(steps=6, gamma=0.9, gae_lambda=0.3, episodes=10, seed=1),
    "the stop": dict(steps=6, learning_rate=0.2, kl_stop=0.02, gae_lambda=1.0, seed=2),
    "no bootstrap of the first step's sum": dict(
        steps=6, gae_lambda=0.0, value_weight=2.0, max_updates=7, kl_stop=5.0, seed=3
    ),
    "narrow clip, small norm": dict(steps=8, clip_epsilon=0.03, max_gradient_norm=0.04, seed=5),
}


class BanditLoops(LoopCase):
    def test_every_row_and_trace_is_repeated_by_hand(self):
        for name, (table, changes) in BANDIT_CASES.items():
            for algorithm in ("ppo", "dpo", "grpo"):
                if algorithm == "dpo" and table is TABLE:
                    changes = {**changes, "steps": 2}
                with self.subTest(name, algorithm=algorithm):
                    seen = []
                    run = train(
                        algorithm, reward_table=torch.tensor(table, dtype=torch.float64), on_step=seen.append, **changes
                    )
                    replay = BanditReplay(algorithm, table, {**BANDIT, **changes})
                    # DPO pushes the middle action of three up and down alike: its gradient is a rounding residue of 1e-17.
                    # Adam, dividing by sqrt(v) + 1e-8, lets it grow within a few steps to digits that count: compare few.
                    tolerance = 1e-6 if algorithm == "dpo" and table is TABLE else 1e-9
                    self.assertRowsMatch(run.history, replay.history, tolerance)
                    self.assertRowsMatch(run.first_batch_trace, replay.trace, tolerance)
                    self.assertClose(run.policy, replay.policy, atol=tolerance)
                    self.assertFalse(run.policy.requires_grad)
                    self.assertEqual(seen, run.history)
                    self.assertEqual(run.algorithm, algorithm)
                    self.assertEqual(dataclasses.asdict(run.settings), {**BANDIT, **changes})
                    if algorithm == "dpo":
                        self.assertEqual(run.task.clean_pairs.rows(), replay.clean)
                        self.assertEqual(run.task.training_pairs.rows(), replay.training)
                        self.assertEqual(run.task.flipped_pair_indices, replay.flipped)
                    else:  # a method that compares no pairs does not make them
                        self.assertEqual(run.task[2:], (None, None, None))
                    self.assertEqual(run.task.reference.tolist(), replay.zero)

    def test_the_cases_reach_what_they_are_there_for(self):
        rows = {}
        for name, (table, changes) in BANDIT_CASES.items():
            for algorithm in ("ppo", "grpo"):
                rows[name, algorithm] = BanditReplay(algorithm, table, {**BANDIT, **changes}).history[1:]
        for algorithm in ("ppo", "grpo"):
            self.assertEqual({r["stopped_early"] for r in rows["the stop after one update", algorithm][:1]}, {1})
            updates = [r["optimizer_steps"] for r in rows["the stop after some updates", algorithm]]
            self.assertTrue(any(1 < b - a < 4 for a, b in zip([0, *updates], updates)), updates)
            clipped = [r["clip_fraction"] for r in rows["narrow clip, small norm", algorithm]]
            self.assertTrue(any(0 < c < 1 for c in clipped))
            self.assertTrue(any(r["gradient_norm"] > 0.02 for r in rows["narrow clip, small norm", algorithm]))
        self.assertTrue(any(0 < r["zero_group_fraction"] < 1 for r in rows["other sizes", "grpo"]))

    def test_a_drift_of_exactly_the_limit_does_not_stop(self):
        for algorithm in ("ppo", "grpo"):
            drift = train(algorithm, steps=1, max_updates=1).history[1]["kl_old_current"]
            at_limit = train(algorithm, steps=1, max_updates=2, kl_stop=drift).history[1]
            below = train(algorithm, steps=1, max_updates=2, kl_stop=drift * (1 - 1e-9)).history[1]
            self.assertEqual((at_limit["optimizer_steps"], at_limit["stopped_early"]), (2, 0))
            self.assertEqual((below["optimizer_steps"], below["stopped_early"]), (1, 1))

    def test_the_trace_of_huge_rewards(self):
        trace = train("grpo", reward_table=f64(1e200, 0.0).unsqueeze(0), steps=1, seed=1).first_batch_trace
        wins = sum(row["reward"] > 0 for row in trace)
        self.assertIn(wins, range(1, 8))
        for row in trace:  # mean w/8, variance w/8 (1 - w/8), in units of 1e200
            self.assertAlmostEqual(row["group_mean"] / 1e200, wins / 8, places=14)
            self.assertAlmostEqual(row["group_std"] / 1e200, math.sqrt(wins / 8 * (1 - wins / 8)), places=14)

    def test_tables_of_other_kinds(self):
        whole = train("ppo", reward_table=torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float32), steps=2)
        self.assertEqual((whole.policy.dtype, whole.task.rewards.dtype), (torch.float64, torch.float64))
        equal = train("grpo", reward_table=f64(3.0, 3.0).unsqueeze(0), steps=2)
        self.assertEqual({row["zero_group_fraction"] for row in equal.history[1:]}, {1.0})
        self.assertEqual({row["gradient_norm"] for row in equal.history}, {0.0})

    def test_refusals(self):
        table = torch.tensor(TABLE, dtype=torch.float64)
        cases = (
            ("sarsa", {}, ValueError, "algorithm: got 'sarsa', wanted one of ppo, dpo, grpo"),
            ("ppo", dict(reward_table=table.long()), TypeError, "reward_table: got dtype torch.int64"),
            ("ppo", dict(reward_table=table[0]), ValueError, r"reward_table: got shape \(3,\), wanted \[C, A\]"),
            ("ppo", dict(reward_table=table[:0]), ValueError, r"reward_table: got shape \(0, 3\), wanted \[C, A\]"),
            ("ppo", dict(reward_table=table[:, :1]), ValueError, r"reward_table: got shape \(4, 1\), wanted at least 2"),
            ("ppo", dict(reward_table=table / 0), ValueError, "reward_table: got inf at index"),
            ("dpo", dict(reward_table=table * 0), ValueError, "no context has two different rewards"),
            ("ppo", dict(kl_stop=0.0), ValueError, "kl_stop: got 0.0, wanted a number above 0 up to 1000000.0"),
            ("dpo", dict(preference_flips=13), ValueError, "got 13, wanted a whole number from 0 to 12"),
        )
        for algorithm, arguments, error, words in cases:
            with self.subTest(words), self.assertRaisesRegex(error, words):
                train(algorithm, **arguments)
        for algorithm in ("ppo", "grpo"):
            train(algorithm, reward_table=table * 0, steps=1)  # only DPO needs preferences
        with self.assertRaisesRegex(FloatingPointError, "^ppo, step 1: loss is inf"):
            train("ppo", reward_table=table * 1e200, steps=1)


class Details(LoopCase):
    """Single decisions of the atoms that only a case made for them shows."""

    def test_refusals_name_all_that_is_compared(self):
        for shapes in ((1, 2, 2), (2, 1, 2), (2, 2, 1)):
            logp, old_logp, advantages = (torch.zeros(n, dtype=torch.float64) for n in shapes)
            words = r"logp \(%d,\), old_logp \(%d,\), advantages \(%d,\)" % shapes
            with self.assertRaisesRegex(ValueError, words):
                rl_lab.clipped_policy_loss(logp, old_logp, advantages)
        nothing, flag = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.bool)
        with self.assertRaisesRegex(
            ValueError, r"^rewards: got shape \(0,\), wanted at least 1 on the last axis, the time steps"
        ):
            rl_lab.td_residuals(nothing, nothing, nothing, flag)

    def test_spread_is_measured_against_the_larger_reward(self):
        # 128 eps max|R| = 128 eps (9/16 + 40 eps) lies just above the spread 72 eps; 128 eps min|R| lies just below it.
        eps = torch.finfo(torch.float64).eps
        low, high = 9 / 16 - 32 * eps, 9 / 16 + 40 * eps
        self.assertEqual(high - low, 72 * eps)
        for rewards in (f64(low, high), f64(-high, -low)):
            self.assertTrue(rl_lab.groups_without_spread(rewards))
        self.assertFalse(rl_lab.groups_without_spread(f64(low, high + eps / 2)))

    def test_probabilities_may_miss_one_by_rounding_only(self):
        # |sum - 1| <= 1e-5
        for off, good in ((0.0, True), (0.99e-5, True), (-0.99e-5, True), (1.01e-5, False), (-1.01e-5, False)):
            probabilities = f64(0.25, 0.75 + off)
            with self.subTest(off=off):
                if good:
                    rl_lab.zero_variance_probability(probabilities, 2)
                else:
                    with self.assertRaisesRegex(ValueError, "rows that sum to 1"):
                        rl_lab.zero_variance_probability(probabilities, 2)

    def test_adam_takes_any_iterable(self):
        parameters = [torch.zeros(2, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]
        rl_lab.Adam(iter(parameters), 0.1).step([torch.ones(2, dtype=torch.float64), -torch.ones(1, dtype=torch.float64)])
        self.assertClose(torch.cat(parameters), [-0.1, -0.1, 0.1], atol=1e-8)

    def test_no_pairs_are_still_whole_numbers(self):
        pairs = rl_lab.preference_pairs(torch.ones(2, 3, dtype=torch.float64))
        self.assertEqual([(tuple(column.shape), column.dtype) for column in pairs], [((0,), torch.int64)] * 3)
        self.assertEqual(pairs.rows(), [])


class ChainLoops(LoopCase):
    def test_every_row_and_trace_is_repeated_by_hand(self):
        for name, changes in CHAIN_CASES.items():
            with self.subTest(name):
                seen = []
                run = train_chain(on_step=seen.append, **changes)
                replay = ChainReplay({**CHAIN, **changes})
                self.assertRowsMatch(run.history, replay.history)
                self.assertRowsMatch(run.first_rollout_trace, replay.trace)
                self.assertClose(run.policy, replay.policy, atol=1e-9)
                self.assertClose(run.critic, replay.critic, atol=1e-9)
                self.assertFalse(run.policy.requires_grad or run.critic.requires_grad)
                self.assertEqual(seen, run.history)
                self.assertEqual(dataclasses.asdict(run.settings), {**CHAIN, **changes})

    def test_the_cases_reach_what_they_are_there_for(self):
        self.assertTrue(any(r["stopped_early"] for r in ChainReplay({**CHAIN, **CHAIN_CASES["the stop"]}).history))
        narrow = ChainReplay({**CHAIN, **CHAIN_CASES["narrow clip, small norm"]}).history[1:]
        self.assertTrue(any(0 < r["clip_fraction"] < 1 for r in narrow))

    def test_a_non_finite_loss_names_the_step(self):
        with mock.patch.object(ppo_chain, "TERMINAL_REWARDS", ppo_chain.TERMINAL_REWARDS * 1e200):
            with self.assertRaisesRegex(FloatingPointError, "^ppo_chain, step 1: loss is inf"):
                train_chain(steps=1)

    def test_broken_twins_are_told_apart(self):
        """The replay with one mistake of the loop each: some row differs, so that the comparison above can fail."""

        class OldPolicyRefreshed(BanditReplay):
            def actor_critic(self, samples, targets):
                fresh = [(s, a, log_softmax(self.policy[s])[a], advantage) for s, a, _, advantage in samples]
                return super().actor_critic(fresh, targets)

        class EvaluationBeforeTheUpdate(BanditReplay):
            def record(self, step, old, update):
                after, self.policy = self.policy, copied(old)
                super().record(step, old, update)
                self.policy = after

        class DriftReversed(BanditReplay):
            def mean_kl(self, first, second):
                return super().mean_kl(second, first)

        run = train("ppo", steps=3)
        for twin in (OldPolicyRefreshed, EvaluationBeforeTheUpdate, DriftReversed):
            with self.subTest(twin.__name__), self.assertRaises(AssertionError):
                self.assertRowsMatch(run.history, twin("ppo", TABLE, {**BANDIT, "steps": 3}).history)


class TokenCheck(LoopCase):
    """run_check, with the 5x5 table worked out by hand: all logits zero, so every token has log-probability -log 5."""

    def test_every_number_of_the_result(self):
        result = tokens.run_check()
        log5 = math.log(5)
        self.assertEqual(
            result["config"],
            dict(learning_rate=0.1, dpo_beta=0.5, clip_epsilon=0.2, kl_weight=0.02, group_eps=1e-8, eos_id=4, pad_id=4),
        )
        self.assertEqual(list(result), ["config", "sequences", "eos_mask_mistake", "dpo", "grpo"])
        chosen, rejected = result["sequences"]["chosen"], result["sequences"]["rejected"]
        self.assertEqual(list(result["sequences"]), ["chosen", "rejected"])
        self.assertEqual((chosen["input_ids"], chosen["response_mask"]), ([0, 1, 2, 4, 4], [0, 0, 1, 1, 0]))
        self.assertEqual((rejected["input_ids"], rejected["response_mask"]), ([0, 1, 3, 3, 4], [0, 0, 1, 1, 1]))
        self.assertEqual((chosen["scored_positions"], rejected["scored_positions"]), ([1, 2], [1, 2, 3]))
        self.assertClose(chosen["token_logps"], [-log5] * 2)
        self.assertClose(rejected["token_logps"], [-log5] * 3)
        mistake = result["eos_mask_mistake"]
        self.assertEqual((mistake["kept_tokens"], mistake["right_tokens"]), ([1, 2], [2, 3]))
        self.assertEqual(mistake["dropped_positions"], [[3], [4]])
        self.assertClose(mistake["response_logps"], [-log5, -2 * log5])
        self.assertClose(mistake["right_response_logps"], [-2 * log5, -3 * log5])

        # DPO: d loss / d h = -.5 * .5. Table rows scored: chosen 1->2, 2->4; rejected 1->3, 3->3, 3->4.
        # d h / d row = sum over chosen (onehot - 1/5) - sum over rejected (onehot - 1/5).
        slope = [[0.0] * 5 for _ in range(5)]
        for sign, steps in ((1, [(1, 2), (2, 4)]), (-1, [(1, 3), (3, 3), (3, 4)])):
            for row, target in steps:
                for token in range(5):
                    slope[row][token] += sign * ((token == target) - 0.2)
        norm = math.sqrt(sum(x * x for row in slope for x in row))
        table = [[0.1 * 0.25 * x for x in row] for row in slope]
        logp = [log_softmax(row) for row in table]
        reference_margin = -2 * log5 + 3 * log5  # two tokens against three
        margin = logp[1][2] + logp[2][4] - logp[1][3] - logp[3][3] - logp[3][4] - reference_margin
        dpo = result["dpo"]
        self.assertClose([dpo["loss_before"], dpo["margin_before"]], [math.log(2), 0.0])
        self.assertClose(dpo["gradient_norm"], 0.25 * norm)
        self.assertClose([dpo["margin_after"], dpo["loss_after"]], [margin, math.log1p(math.exp(-0.5 * margin))])

        # GRPO: A = (+-.5) / (.5 + 1e-8); loss mean of per-response means, KL and its gradient zero at the reference.
        advantage = 0.5 / (0.5 + 1e-8)
        gradient = [[0.0] * 5 for _ in range(5)]
        for sign, steps in ((1, [(1, 2), (2, 4)]), (-1, [(1, 3), (3, 3), (3, 4)])):
            for row, target in steps:
                for token in range(5):
                    gradient[row][token] -= sign * advantage * ((token == target) - 0.2) / len(steps) / 2
        table = [[-0.1 * x for x in row] for row in gradient]
        logp = [log_softmax(row) for row in table]
        loss = 0.0
        for sign, steps in ((1, [(1, 2), (2, 4)]), (-1, [(1, 3), (3, 3), (3, 4)])):
            for row, target in steps:
                ratio = math.exp(logp[row][target] + log5)
                self.assertLess(abs(ratio - 1), 0.2)
                loss += (-sign * advantage * ratio + 0.02 * kl(table[row], [0.0] * 5)) / len(steps) / 2
        grpo = result["grpo"]
        self.assertEqual(grpo["rewards"], [1.0, 0.0])
        self.assertClose(grpo["advantages"], [advantage, -advantage])
        self.assertClose(
            [grpo["loss_before"], grpo["loss_after"], grpo["mean_over_tokens_before"]], [0, loss, advantage / 5]
        )
        self.assertClose(grpo["gradient_norm"], math.sqrt(sum(x * x for row in gradient for x in row)))

    def test_losses_away_from_the_reference_and_no_stray_gradient(self):
        generator = torch.Generator().manual_seed(0)
        table, old, reference = torch.randn(3, 5, 5, dtype=torch.float64, generator=generator)
        ids, mask = tokens.INPUT_IDS, tokens.RESPONSE_MASK
        steps = ([(1, 2), (2, 4)], [(1, 3), (3, 3), (3, 4)])
        t, o, r = table.tolist(), old.tolist(), reference.tolist()
        per_response, per_token = [], []
        for sign, rows in zip((1, -1), steps):
            values = []
            for row, target in rows:
                ratio = math.exp(log_softmax(t[row])[target] - log_softmax(o[row])[target])
                advantage = sign * 0.5 / (0.5 + 1e-8)
                values.append(-min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage) + 0.02 * kl(t[row], r[row]))
            per_response.append(statistics.fmean(values))
            per_token += values
        self.assertClose(tokens.grpo_sequence_loss(table, old, reference, ids, mask), statistics.fmean(per_response))
        over_tokens = tokens.grpo_sequence_loss(table, old, reference, ids, mask, tokens.mean_over_tokens)
        self.assertClose(over_tokens, statistics.fmean(per_token))
        sums = [[sum(log_softmax(x[row])[target] for row, target in rows) for rows in steps] for x in (t, r)]
        margin = (sums[0][0] - sums[1][0]) - (sums[0][1] - sums[1][1])
        self.assertClose(tokens.preference_margin(table, reference, ids, mask), margin)
        self.assertClose(tokens.dpo_sequence_loss(table, reference, ids, mask), math.log1p(math.exp(-0.5 * margin)))
        tracked = [x.clone().requires_grad_() for x in (table, reference)]
        gradients = torch.autograd.grad(tokens.preference_margin(*tracked, ids, mask), tracked, allow_unused=True)
        self.assertGreater(gradients[0].norm().item(), 0)
        self.assertIsNone(gradients[1])

    def test_prompts_are_compared(self):
        ids, mask = tokens.INPUT_IDS, tokens.RESPONSE_MASK
        tokens.check_same_prompt(ids, mask)
        later, other, start = mask.clone(), ids.clone(), ids.clone()
        later[1, 2], other[1, 1], start[1, 0] = False, 3, 3
        for name, arguments in (("lengths", (ids, later)), ("last token", (other, mask)), ("first token", (start, mask))):
            with (
                self.subTest(name),
                self.assertRaisesRegex(ValueError, r"prompts of lengths \[2, [23]\].* wanted one prompt"),
            ):
                tokens.check_same_prompt(*arguments)
        tokens.check_same_prompt(torch.cat([ids, ids + 1], dim=1), torch.cat([mask, mask], dim=1))  # answers may differ

    def test_reductions_refuse_what_they_cannot_average(self):
        values, valid = torch.ones(2, 3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.bool)
        empty = valid.clone()
        empty[1] = False
        for reduction in (tokens.mean_per_response, tokens.mean_over_tokens):
            self.assertClose(reduction(values, valid), 1)
            for words, arguments in (
                ("wanted one shape", (values[0], valid[0])),
                ("wanted one shape", (values, valid[:, :2])),
                ("wanted one shape", (values, valid.double())),
                ("row 1 has no valid token", (values, empty)),
            ):
                with self.subTest(words, reduction=reduction.__name__), self.assertRaisesRegex(ValueError, words):
                    reduction(*arguments)


# ------------------------------------------------------------------------------------------ settings and flags

# field, flag, default, kind, low, high, low itself excluded, group
RUN = (
    ("seed", "--seed", 7, int, 0, 2**63 - 1, False, "run"),
    ("steps", "--steps", 120, int, 1, 100_000, False, "run"),
    ("learning_rate", "--learning-rate", 0.08, float, 0, 100, True, "update"),
    ("max_gradient_norm", "--max-gradient-norm", 1.0, float, 0, 1e6, True, "update"),
    ("clip_epsilon", "--clip-epsilon", 0.2, float, 0, 1, True, "update"),
    ("max_updates", "--max-updates", 4, int, 1, 1000, False, "update"),
    ("kl_stop", "--kl-stop", 0.05, float, 0, 1e6, True, "update"),
    ("value_weight", "--value-weight", 0.5, float, 0, 1e6, False, "update"),
)
FLAGS = {
    BanditSettings: (
        *RUN,
        ("ppo_samples", "--ppo-samples", 128, int, 1, 1_000_000, False, "PPO"),
        ("ppo_kl_beta", "--ppo-kl-beta", 0.02, float, 0, 1e6, False, "PPO"),
        ("dpo_beta", "--dpo-beta", 0.5, float, 0, 1e6, True, "DPO"),
        ("preference_flips", "--preference-flips", 0, int, 0, 1_000_000, False, "DPO"),
        ("group_size", "--group-size", 8, int, 2, 4096, False, "GRPO"),
        ("online_batch_prompts", "--grpo-prompts", 16, int, 1, 4096, False, "GRPO"),
        ("grpo_kl_weight", "--grpo-kl-weight", 0.02, float, 0, 1e6, False, "GRPO"),
    ),
    ChainSettings: (
        *RUN,
        ("gae_lambda", "--gae-lambda", 0.95, float, 0, 1, False, "GAE"),
        ("gamma", "--gamma", 1.0, float, 0, 1, False, "GAE"),
        ("episodes", "--episodes", 64, int, 1, 100_000, False, "rollout"),
    ),
}


def quiet(function, *arguments):
    """(exit code or None, stdout, stderr) of a function that may exit."""
    out, err = io.StringIO(), io.StringIO()
    code = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            function(*arguments)
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


class SettingsAndFlags(unittest.TestCase):
    def test_every_setting_its_default_range_and_flag(self):
        for settings_class, rows in FLAGS.items():
            self.assertEqual([field.name for field in dataclasses.fields(settings_class)], [row[0] for row in rows])
            parser = LabParser(prog="lab")
            rl_lab.add_settings(parser, settings_class)
            defaults = parser.parse_args([])
            self.assertEqual(rl_lab.chosen_settings(defaults, settings_class), {row[0]: row[2] for row in rows})
            help_text = " ".join(parser.format_help().split())
            for name, flag, default, kind, low, high, above, group in rows:
                with self.subTest(settings_class.__name__, flag=flag):
                    smallest = math.nextafter(low, math.inf) if above else low
                    beyond = (
                        (high + 1, low - 1) if kind is int else (math.nextafter(high, math.inf), math.nextafter(low, -1))
                    )
                    beyond += (low,) if above else ()
                    for value in (kind(smallest), kind(high), default):
                        self.assertEqual(getattr(settings_class(**{name: value}), name), value)
                        parsed = getattr(parser.parse_args([flag, repr(value)]), name)
                        self.assertEqual((parsed, type(parsed)), (value, kind))
                    no_number = (2.5,) if kind is int else ()
                    for value in (*beyond, *no_number, "x", True, None, math.nan):
                        with self.assertRaisesRegex(
                            ValueError, f"^{name}: got .*, wanted a {'whole ' * (kind is int)}number"
                        ):
                            settings_class(**{name: value})
                        code, _, message = quiet(parser.parse_args, [f"{flag}={value}"])
                        self.assertEqual(code, 2)
                        self.assertRegex(message, rf"^lab: error: argument {flag}: got '{value}', wanted a .*number.*\n$")
                    metavar = "N" if kind is int else "X"
                    self.assertRegex(help_text, rf"{flag} {metavar} [^-].*?; default {default:g}\b")
            groups = [g.title for g in parser._action_groups if g.title in {row[-1] for row in rows}]
            self.assertEqual(groups, list(dict.fromkeys(row[-1] for row in rows)))
            for group in parser._action_groups:
                if group.title in groups:
                    self.assertEqual(
                        [a.dest for a in group._group_actions], [row[0] for row in rows if row[-1] == group.title]
                    )

    def test_ranges(self):
        self.assertEqual(str(Range(int, 1, 9)), "a whole number from 1 to 9")
        self.assertEqual(str(Range(float, 0, 2.5)), "a number from 0 to 2.5")
        self.assertEqual(str(Range(float, 0, 2.5, above=True)), "a number above 0 up to 2.5")
        whole, real, above = Range(int, 1, 3), Range(float, 0, 1), Range(float, 0, 1, above=True)
        self.assertEqual(
            [whole.holds(x) for x in (0, 1, 3, 4, 2.0, True, "1", None)], [False, True, True, False] + [False] * 4
        )
        self.assertEqual(
            [real.holds(x) for x in (-0.1, 0, 0.5, 1, 1.1, True, "1", None)], [False, True, True, True] + [False] * 4
        )
        self.assertEqual([above.holds(x) for x in (0, 1e-9, 1, 1.1)], [False, True, True, False])

    def test_settings_are_frozen(self):
        for settings_class in FLAGS:
            with self.assertRaises(dataclasses.FrozenInstanceError):
                settings_class().steps = 3

    def test_parsers(self):
        parser = LabParser(prog="lab", description="a\n  b")
        parser.add_argument("--steps", type=int)
        self.assertIn("a\n  b", parser.format_help())
        self.assertEqual(quiet(parser.parse_args, ["--st", "3"])[0], 2)
        code, out, err = quiet(parser.parse_args, ["--steps", "x"])
        self.assertEqual((code, out, err), (2, "", "lab: error: argument --steps: invalid int value: 'x' (see --help)\n"))

    def test_seeds(self):
        good = {
            "0-3": [0, 1, 2, 3],
            "0,7,19": [0, 7, 19],
            "5": [5],
            "3,1-3,0": [3, 1, 2, 0],
            "4-4": [4],
            "0-999": list(range(1000)),
        }
        for text, seeds in good.items():
            self.assertEqual(rl_lab.parse_seeds(text), seeds)
        largest = 2**63 - 1
        self.assertEqual(rl_lab.parse_seeds(f"{largest - 1}-{largest}"), [largest - 1, largest])
        wrong = ("", "3-1", "1,3-2", "a", "1-2-3", "1,,2", "-1", "1.5", "0-1000", "0-99999999999999999999999", "1-")
        for text in (*wrong, f"{largest + 1}", f"0,{largest}-{largest + 1}"):
            with (
                self.subTest(text),
                self.assertRaisesRegex(rl_lab.argparse.ArgumentTypeError, "wanted seeds such as") as caught,
            ):
                rl_lab.parse_seeds(text)
            self.assertTrue(caught.exception.__suppress_context__)


# ------------------------------------------------------------------------------------------ files


class Files(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def test_csv_and_json_text(self):
        self.assertEqual(
            rl_lab.csv_text([dict(step=0, loss=0.1), dict(step=1, loss=1 / 3)]), "step,loss\n0,0.1\n1,0.3333333333333333\n"
        )
        document = dict(
            name="x",
            none=None,
            empty=[],
            numbers=[1, 2.5],
            table=[[1.0, 0.5], [0.0, 1.0]],
            rows=[{"a": 1}],
            config={"seed": 7, "list": [1]},
        )
        self.assertEqual(rl_lab.csv_text([dict(step=0)]), "step\n0\n")
        text = rl_lab.json_text(document)
        self.assertEqual(
            text,
            '{\n  "name": "x",\n  "none": null,\n  "empty": [],\n  "numbers": [1, 2.5],\n'
            '  "table": [\n    [1.0, 0.5],\n    [0.0, 1.0]\n  ],\n  "rows": [\n    {"a": 1}\n  ],\n'
            '  "config": {\n    "seed": 7,\n    "list": [1]\n  }\n}\n',
        )
        self.assertEqual(json.loads(text), document)
        for bad in (math.nan, math.inf):
            with self.assertRaises(ValueError):
                rl_lab.json_text({"loss": bad})

    def test_files_are_replaced_whole(self):
        first, second = self.folder / "a.csv", self.folder / "b.json"
        first.write_text("old")
        events = []
        with (
            mock.patch.object(rl_lab.os, "fsync", lambda number: events.append(("fsync", os.fstat(number).st_size))),
            mock.patch.object(
                rl_lab.os, "replace", lambda a, b, replace=os.replace: (events.append(Path(b).name), replace(a, b))
            ),
        ):
            rl_lab.replace_files({first: "naïve\n", second: "two"})
        # Everything is on the disk before anything is renamed; the folder, which holds the names, comes last.
        self.assertEqual(events[:4], [("fsync", len("naïve\n".encode())), ("fsync", 3), "a.csv", "b.json"])
        self.assertEqual([event[0] for event in events[4:]], ["fsync"])
        self.assertEqual((first.read_bytes(), second.read_bytes()), ("naïve\n".encode(), b"two"))
        self.assertEqual(sorted(os.listdir(self.folder)), ["a.csv", "b.json"])

    def test_files_are_utf8_with_plain_line_ends_on_every_system(self):
        path = self.folder / "a.csv"
        rl_lab.replace_files({path: "naïve\n"})
        self.assertEqual(path.read_bytes(), b"na\xc3\xafve\n")
        rl_lab.replace_files({path: b"\x00\xff"})  # bytes are taken as they are
        self.assertEqual(path.read_bytes(), b"\x00\xff")

    def test_a_failure_leaves_all_as_it_was(self):
        first = self.folder / "a.csv"
        first.write_text("old")
        (self.folder / "plain").write_text("x")
        with self.assertRaisesRegex(
            FileProblem, r"plain/b\.csv: (Not a directory|File exists); earlier results were left as they were"
        ):
            rl_lab.replace_files({first: "new", self.folder / "plain" / "b.csv": "new"})
        (self.folder / "plain").unlink()
        self.assertEqual(first.read_text(), "old")
        self.assertEqual(os.listdir(self.folder), ["a.csv"])
        with mock.patch.object(rl_lab.os, "fsync", side_effect=OSError(28, "No space left on device")):
            with self.assertRaisesRegex(FileProblem, r"a\.csv: No space left on device"):
                rl_lab.replace_files({first: "new"})
        self.assertEqual((first.read_text(), os.listdir(self.folder)), ("old", ["a.csv"]))
        with mock.patch.object(rl_lab.os, "replace", side_effect=KeyboardInterrupt), self.assertRaises(KeyboardInterrupt):
            rl_lab.replace_files({first: "new"})
        self.assertEqual((first.read_text(), os.listdir(self.folder)), ("old", ["a.csv"]))

    def test_a_name_too_long_for_its_partial_file(self):
        with self.assertRaisesRegex(FileProblem, r"cannot be written \(File name too long\); nothing was changed"):
            rl_lab.replace_files({self.folder / ("x" * 250): "new"})
        self.assertEqual(os.listdir(self.folder), [])

    def test_partial_files_stay_beside_their_target_and_hidden(self):
        seen = []
        with mock.patch.object(rl_lab.os, "replace", lambda a, b: seen.append((Path(a), Path(b)))):
            rl_lab.replace_files({self.folder / "a.csv": "x"})
        self.assertEqual(seen, [(self.folder / f".a.csv.{os.getpid()}.partial", (self.folder / "a.csv").resolve())])
        self.assertEqual(os.listdir(self.folder), [])

    def test_a_link_keeps_pointing_where_it_did(self):
        real, link = self.folder / "real.csv", self.folder / "link.csv"
        real.write_text("old")
        link.symlink_to(real)
        rl_lab.replace_files({link: "new"})
        self.assertTrue(link.is_symlink())
        self.assertEqual(real.read_text(), "new")

    def test_writable_is_found_out_before(self):
        deep = self.folder / "new" / "deeper"
        rl_lab.check_writable([deep / "a.csv", deep / "a.json"], expected_bytes=10)
        rl_lab.check_writable([deep / "a.csv"], expected_bytes=10)
        self.assertEqual(os.listdir(self.folder), [])  # nothing is made to find out
        deep.mkdir(parents=True)
        (self.folder / "plain").write_text("x")
        rl_lab.check_writable([self.folder / "plain"], expected_bytes=10)  # a file that is there is replaced later
        for path, words in (
            (self.folder / ("x" * 300), r"cannot be written \(File name too long\); nothing was changed"),
            (deep, "exists and is not a regular file; choose another --output"),
            (
                self.folder / "plain" / "a.csv",
                r"plain: cannot be written \((File exists|Not a directory)\); nothing was changed",
            ),
        ):
            with self.subTest(words), self.assertRaisesRegex(FileProblem, words):
                rl_lab.check_writable([deep / "a.csv", path], expected_bytes=10)

    def test_the_disk_is_tried_with_the_expected_size_in_each_folder(self):
        probes = []

        class Probe(io.BytesIO):
            def __init__(self, dir):
                super().__init__()
                self.dir = dir

            def close(self):
                probes.append((self.dir, len(self.getvalue())))
                super().close()

        paths = [self.folder / "a" / "1", self.folder / "a" / "2", self.folder / "b" / "1", self.folder / "c" / "d" / "1"]
        for path in paths[:3]:
            path.parent.mkdir(exist_ok=True)
        with mock.patch.object(rl_lab.tempfile, "TemporaryFile", Probe):
            rl_lab.check_writable(paths, expected_bytes=1234)
        # A folder that is missing is tried where it would be made, and not made.
        self.assertEqual(probes, [(self.folder / "a", 1234), (self.folder / "b", 1234), (self.folder, 1234)])
        self.assertEqual(sorted(os.listdir(self.folder)), ["a", "b"])
        with mock.patch.object(rl_lab.tempfile, "TemporaryFile", side_effect=OSError(28, "No space left on device")):
            with self.assertRaisesRegex(FileProblem, r"cannot be written \(No space left on device\)"):
                rl_lab.check_writable(paths, expected_bytes=1)

    def test_reward_tables(self):
        path = self.folder / "table.json"
        path.write_text("[[1, 0.5, -2], [0, 1, 1e300]]", encoding="utf-8")
        table = rl_lab.read_reward_table(path)
        self.assertEqual((table.tolist(), table.dtype), ([[1.0, 0.5, -2.0], [0.0, 1.0, 1e300]], torch.float64))
        path.write_text(f"[[0, {sys.float_info.max!r}], [0, -{sys.float_info.max!r}]]")
        self.assertEqual(rl_lab.read_reward_table(path)[0, 1].item(), sys.float_info.max)
        for text, words in (
            ("[[1, 2]", "not JSON"),
            ("[" * 5000, "not JSON"),
            ("[" * 100_000, "wanted a JSON list of rows"),
            ("{}", "wanted a JSON list of rows"),
            ("3", "wanted a JSON list of rows"),
            ("[]", "wanted a JSON list of rows"),
            ("[[1, 2], 3]", "wanted a JSON list of rows"),
            ("[3, [1, 2]]", "wanted a JSON list of rows"),
            ("[[1], [2]]", "row 0 has 1 numbers and row 0 has 1"),
            ("[[]]", "row 0 has 0 numbers"),
            ("[[1, 2], [1, 2, 3]]", "row 1 has 3 numbers and row 0 has 2; .*two or more actions"),
            ("[[1, 2], [1, true]]", "row 1 holds True; wanted finite numbers"),
            ('[[1, "2"]]', "row 0 holds '2'; wanted finite numbers"),
            (f'[[1, "{"y" * 99}"]]', f"row 0 holds '{'y' * 39}; wanted finite numbers"),
            ("[[1, null]]", "row 0 holds None"),
            ("[[1, NaN]]", "row 0 holds nan"),
            ("[[1, Infinity]]", "row 0 holds inf"),
            ("[[1, -Infinity]]", "row 0 holds -inf"),
            (f"[[1, {10**400}]]", "row 0 holds 1000"),
        ):
            path.write_text(text)
            with (
                self.subTest(words, text=text[:30]),
                self.assertRaisesRegex(FileProblem, f"--reward-table .*table.json: .*{words}"),
            ):
                rl_lab.read_reward_table(path)
        path.write_bytes(b"\xff\xfe[[1, 2]]")
        with self.assertRaisesRegex(FileProblem, "not JSON"):
            rl_lab.read_reward_table(path)
        with self.assertRaisesRegex(FileProblem, "No such file or directory"):
            rl_lab.read_reward_table(self.folder / "none.json")

    def test_documents(self):
        for algorithm in ("ppo", "dpo", "grpo"):
            run = train(algorithm, steps=2, preference_flips=2)
            document = rl_lab.run_document(run)
            pairs = (
                ["flipped_pair_indices", "clean_preference_pairs", "training_preference_pairs"] if algorithm == "dpo" else []
            )
            names = [
                "algorithm",
                "config",
                "reward_table",
                "software",
                "initial_metrics",
                "final_metrics",
                *pairs,
                "first_batch_trace",
            ]
            self.assertEqual(list(document), names)
            self.assertEqual(document["algorithm"], algorithm)
            self.assertEqual(document["config"], {**BANDIT, "steps": 2, "preference_flips": 2})
            self.assertEqual(document["reward_table"], TABLE)
            self.assertEqual((document["initial_metrics"], document["final_metrics"]), (run.history[0], run.history[2]))
            self.assertEqual(document["first_batch_trace"], run.first_batch_trace)
            if pairs:
                replay = BanditReplay("dpo", TABLE, {**BANDIT, "steps": 1, "preference_flips": 2})
                self.assertEqual([document[name] for name in pairs], [replay.flipped, replay.clean, replay.training])
        system = os.uname()
        versions = dict(python=sys.version.split()[0], torch=torch.__version__, system=f"{system.sysname} {system.machine}")
        self.assertEqual(document["software"], versions)


# ------------------------------------------------------------------------------------------ what is printed


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Printing(unittest.TestCase):
    def setUp(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def test_tables_are_aligned(self):
        self.assertEqual(
            rl_lab.format_table(["a", "bb", "c"], [["long", "1", "22"], ["x", "333", ""]]),
            "a      bb   c\nlong    1  22\nx     333",
        )

    def test_progress_is_one_line_on_a_terminal_only(self):
        with mock.patch.object(sys, "stderr", io.StringIO()):
            self.assertIsNone(rl_lab.progress_line("ppo", 5, "expected_reward"))
        for steps, shown in (
            (2, [0, 1, 2]),
            (199, list(range(200))),
            (200, list(range(0, 201, 2))),
            (305, [*range(0, 305, 3), 305]),
        ):
            with mock.patch.object(sys, "stderr", Terminal()) as stream:
                show = rl_lab.progress_line("ppo", steps, "expected_reward")
                for step in range(steps + 1):
                    show({"step": step, "expected_reward": step / 8})
                texts = [f"ppo  step {s}/{steps}  expected reward {s / 8:.4f} " for s in shown]
                cleared = f"\r{' ' * len(texts[-1])}\r"
                self.assertEqual(stream.getvalue(), "".join("\r" + text for text in texts) + cleared)
        with mock.patch.object(sys, "stderr", Terminal()) as stream:  # of several runs, the median
            rl_lab.progress_line("ppo", 9, "loss")([{"step": 1, "loss": loss} for loss in (5.0, 1.0, 2.0)])
            self.assertEqual(stream.getvalue(), "\rppo  step 1/9  loss 2.0000 ")

    def test_progress_is_flushed(self):
        stream = mock.Mock(wraps=Terminal())
        with mock.patch.object(sys, "stderr", stream):
            rl_lab.progress_line("ppo", 3, "loss")({"step": 0, "loss": 0.0})
        stream.flush.assert_called()

    def test_commands_end_in_one_line(self):
        def fails_with(problem):
            def main():
                raise problem

            return main

        with mock.patch.object(sys, "argv", ["folder/lab.py"]):
            for problem in (FileProblem("disk full"), FloatingPointError("loss is nan")):
                self.assertEqual(quiet(rl_lab.run_command, fails_with(problem)), (f"lab.py: error: {problem}", "", ""))
            code, out, words = quiet(rl_lab.run_command, fails_with(KeyboardInterrupt()))
            self.assertEqual((code, out), (130, ""))
            self.assertRegex(words, "^interrupted: .*\n$")
            with mock.patch.object(sys, "stderr", Terminal()) as stream, self.assertRaises(SystemExit):
                rl_lab.run_command(fails_with(KeyboardInterrupt()))
            self.assertEqual(stream.getvalue(), "\n" + words)  # below the progress line
            with self.assertRaises(ZeroDivisionError):  # a mistake of ours keeps its traceback
                rl_lab.run_command(fails_with(ZeroDivisionError()))
        self.assertEqual(quiet(rl_lab.run_command, lambda: print("fine")), (None, "fine\n", ""))
        with mock.patch.object(sys, "stdout", None):  # a program without standard output
            rl_lab.run_command(lambda: None)

    def test_commands_compute_in_one_thread(self):
        torch.set_num_threads(2)
        rl_lab.run_command(lambda: self.assertEqual(torch.get_num_threads(), 1))

    def test_terminals(self):
        self.assertTrue(rl_lab.is_terminal(Terminal()))
        self.assertFalse(rl_lab.is_terminal(io.StringIO()))
        self.assertFalse(rl_lab.is_terminal(None))

    def exit_of_command_printing_to(self, open_output):
        """What run_command exits with when standard output is the file that `open_output` opens; in a process of its own."""
        reader, writer = os.pipe()
        process = os.fork()
        if not process:
            try:
                os.dup2(open_output(), 1)
                sys.stdout = os.fdopen(1, "w")
                try:
                    rl_lab.run_command(lambda: print("x"))
                    answer = None
                except SystemExit as stop:
                    # Standard output now leads to the null device: what is still buffered goes there without an error.
                    sys.stdout.flush()
                    answer = [stop.code, os.fstat(1).st_rdev == os.stat(os.devnull).st_rdev]
                os.write(writer, json.dumps(answer).encode())
            finally:
                os._exit(0)
        os.close(writer)
        os.waitpid(process, 0)
        with os.fdopen(reader) as answer:
            return json.loads(answer.read())

    def test_a_closed_pipe_is_no_error_message(self):
        def pipe_without_reader():
            reader, writer = os.pipe()
            os.close(reader)
            return writer

        self.assertEqual(self.exit_of_command_printing_to(pipe_without_reader), [1, True])

    @unittest.skipUnless(Path("/dev/full").exists(), "needs /dev/full")
    def test_a_full_disk_behind_standard_output_is_told(self):
        with mock.patch.object(sys, "argv", ["folder/lab.py"]):
            message, silent = self.exit_of_command_printing_to(lambda: os.open("/dev/full", os.O_WRONLY))
        self.assertEqual((message, silent), ("lab.py: error: cannot print (No space left on device)", True))

    def test_readable(self):
        numbers = {0.25: "0.2500", -999_999.0: "-999999.0000", 1e6: "1e+06", -1.5e6: "-1.5e+06"}
        self.assertEqual([rl_lab.readable(number) for number in numbers], list(numbers.values()))

    def test_summary(self):
        runs = [
            train(algorithm, steps=3, seed=seed, group_size=2) for algorithm in ("ppo", "dpo", "grpo") for seed in (0, 1, 5)
        ]

        def median(of, name, row=-1):
            return statistics.median(run.history[row][name] for run in of)

        lines = rl_lab.summary(runs).splitlines()
        self.assertEqual(lines[0].split(), "method expected reward P(best) KL to reference samples pairs updates".split())
        self.assertEqual(lines[1].split(), "(start) 0.2333 0.3333 0.0000 0 0 0".split())
        self.assertEqual(len(lines), 11)
        self.assertLessEqual(max(map(len, lines)), 80)
        for line, start in zip(lines[2:5], (0, 3, 6)):
            of = runs[start : start + 3]
            cells = [runs[start].algorithm]
            for name in ("expected_reward", "optimal_action_probability", "kl_current_reference"):
                cells.append(f"{median(of, name):.4f}")
            cells += [f"{median(of, name):.0f}" for name in ("sampled_actions", "pair_presentations", "optimizer_steps")]
            self.assertEqual(line.split(), cells)
        dpo, grpo = runs[3:6], runs[6:]
        losses = [
            f"{median(dpo, name, 0):.6f} -> {median(dpo, name):.6f}" for name in ("dpo_training_loss", "dpo_original_loss")
        ]
        share = statistics.median(statistics.fmean(row["zero_group_fraction"] for row in run.history[1:]) for run in grpo)
        self.assertEqual(
            lines[5:10],
            [
                "",
                f"dpo: loss on its training labels {losses[0]}",
                f"     on the original labels    {losses[1]}",
                f"grpo: mean share of groups without reward difference {share:.4f}",
                "Expected reward: -0.5000 is always the worst action, 1.0000 always the best.",
            ],
        )
        self.assertIn("it ranks none", lines[10])
        self.assertIn("it ranks none", rl_lab.summary(runs[:6]))
        self.assertNotIn("ranks none", rl_lab.summary(runs[:3]))
        # Means over contexts of the best and of the worst: (1 + 3) / 2 and (0 + 2) / 2.
        other = train("ppo", steps=1, reward_table=torch.tensor([[1.0, 0.0], [2.0, 3.0]], dtype=torch.float64))
        self.assertIn("1.0000 is always the worst action, 2.0000 always the best.", rl_lab.summary([other]))

    def test_worked_examples_agree_and_disagreement_shows(self):
        examples = rl_lab.worked_examples()
        self.assertEqual(len(examples), 19)
        for example in examples:
            with self.subTest(example.title):
                self.assertTrue(example.agrees())
                self.assertEqual(len(example.result), len(example.expected))
                for x, y in zip(example.result, example.expected):
                    self.assertEqual((type(x), type(y)), (float, float))
                    self.assertLess(abs(x - y), 10.0**-example.digits)
                    self.assertEqual(math.copysign(1, x), 1 if x == 0 else math.copysign(1, x))
        self.assertFalse(examples[0]._replace(expected=[-1.098613, -1000.0]).agrees())
        self.assertTrue(examples[0]._replace(expected=[-1.0986123, -1000.0]).agrees())
        by_title = {example.title.split(":")[0]: example for example in examples}
        dpo = by_title["DPO at policy = reference"]
        self.assertEqual(dpo.expected, [0.6931, -0.25, 0.25])
        self.assertAlmostEqual(dpo.result[0], math.log(2), places=14)
        for x, y in zip(
            by_title["token log-probabilities after the causal shift"].result, (0, -math.log(5), -math.log(5), 0)
        ):
            self.assertAlmostEqual(x, y, places=14)
        broken = [examples[0]._replace(expected=[0.0, 0.0]), *examples[1:]]
        with mock.patch.object(rl_lab, "worked_examples", lambda: broken):
            _, out, _ = quiet(rl_lab.print_worked_examples)
        self.assertEqual((out.count("DIFFER"), out.count("agree\n")), (1, 18))
        self.assertIn("18 of 19 agree.", out)


# ------------------------------------------------------------------------------------------ the commands, in this process


class Commands(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        sizes = []
        real = rl_lab.check_writable
        for module in (rl_lab, ppo_chain, tokens):
            patch = mock.patch.object(
                module,
                "check_writable",
                lambda paths, expected_bytes: (sizes.append((list(paths), expected_bytes)), real(paths, expected_bytes)),
            )
            patch.start()
            self.addCleanup(patch.stop)
        self.probes = sizes

    def test_one_run(self):
        out = self.folder / "o"
        code, printed, err = quiet(rl_lab.main, ["--algorithm", "all", "--steps", "3", "--seed", "5", "--output", str(out)])
        self.assertEqual((code, err), (None, ""))
        runs = [train(algorithm, steps=3, seed=5) for algorithm in ("ppo", "dpo", "grpo")]
        self.assertEqual(
            sorted(os.listdir(out)), sorted(f"{a}.{kind}" for a in ("ppo", "dpo", "grpo") for kind in ("csv", "json"))
        )
        for run in runs:
            self.assertEqual((out / f"{run.algorithm}.csv").read_text(), rl_lab.csv_text(run.history))
            self.assertEqual((out / f"{run.algorithm}.json").read_text(), rl_lab.json_text(rl_lab.run_document(run)))
        files = "\n".join(f"  {out / a}.csv" for a in ("ppo", "dpo", "grpo"))
        end = f"Files, each with a .json beside it:\n{files}\n"
        self.assertEqual(printed, f"seed 5, 3 iterations\n\n{rl_lab.summary(runs)}\n{end}")
        # Room for 1000 bytes a row is asked for; a row takes less.
        self.assertEqual([size for _, size in self.probes], [103_000])
        self.assertEqual(len(self.probes[0][0]), 6)
        rows = (out / "ppo.csv").read_text().splitlines()
        self.assertLess(max(map(len, rows)), 1000)

    def test_one_algorithm_and_defaults(self):
        for algorithm in ("ppo", "dpo", "grpo"):
            out = self.folder / algorithm
            code, printed, _ = quiet(rl_lab.main, ["--algorithm", algorithm, "--steps", "2", "--output", str(out)])
            self.assertIsNone(code)
            self.assertTrue(printed.startswith("seed 7, 2 iterations\n"))
            self.assertEqual(sorted(os.listdir(out)), [f"{algorithm}.csv", f"{algorithm}.json"])
        parsed = rl_lab.build_parser().parse_args([])
        self.assertEqual(
            (parsed.algorithm, parsed.output, parsed.seeds, parsed.reward_table), ("all", Path("results"), None, None)
        )
        self.assertEqual(rl_lab.build_parser().parse_args(["--algorithm", "atoms"]).algorithm, "atoms")
        self.assertEqual(quiet(rl_lab.main, ["--algorithm", "sarsa"])[0], 2)
        self.assertIn("rl_lab.py --algorithm atoms\n", rl_lab.build_parser().format_help())
        self.assertIn("--preference-flips N", rl_lab.build_parser().format_help())

    def test_several_seeds(self):
        out = self.folder / "o"
        code, printed, _ = quiet(rl_lab.main, ["--algorithm", "all", "--steps", "2", "--seeds", "3,1", "--output", str(out)])
        self.assertIsNone(code)
        runs = [train(algorithm, steps=2, seed=seed) for algorithm in ("ppo", "dpo", "grpo") for seed in (3, 1)]
        for run in runs:
            path = out / f"seed-{run.settings.seed}" / f"{run.algorithm}.csv"
            self.assertEqual(path.read_text(), rl_lab.csv_text(run.history))
            self.assertEqual(json.loads(path.with_suffix(".json").read_text())["config"]["seed"], run.settings.seed)
        self.assertEqual(sorted(os.listdir(out)), ["seed-1", "seed-3"])
        files = "\n".join(f"  {out / 'seed-N' / a}.csv" for a in ("ppo", "dpo", "grpo"))
        end = f"Files, each with a .json beside it:\n{files}\n"
        self.assertEqual(printed, f"medians over 2 seeds, 2 iterations\n\n{rl_lab.summary(runs)}\n{end}")
        for main in (rl_lab.main, ppo_chain.main):
            for seed in ("3", "7"):  # 7 is the default: given is given
                code, _, err = quiet(main, ["--seeds", "1-2", "--seed", seed, "--output", str(out)])
                self.assertEqual(code, 2)
                self.assertIn(f"argument --seeds: not allowed with --seed {seed}", err)

    def test_progress_goes_to_the_terminal(self):
        with mock.patch.object(sys, "stderr", Terminal()) as stream, contextlib.redirect_stdout(io.StringIO()):
            rl_lab.main(["--algorithm", "ppo", "--steps", "2", "--seeds", "1", "--output", str(self.folder / "o")])
            ppo_chain.main(["--steps", "2", "--output", str(self.folder / "c")])
        self.assertIn("\rppo   seed 1  step 2/2  expected reward 0.", stream.getvalue())
        self.assertIn("\rchain  step 2/2  expected return 0.", stream.getvalue())

    def test_reward_tables_and_flips(self):
        table = self.folder / "table.json"
        table.write_text("[[1, 0], [0, 1], [0.5, 0.5]]")
        out = self.folder / "o"
        code, printed, _ = quiet(
            rl_lab.main,
            [
                "--algorithm",
                "dpo",
                "--steps",
                "2",
                "--reward-table",
                str(table),
                "--preference-flips",
                "1",
                "--output",
                str(out),
            ],
        )
        self.assertIsNone(code)
        saved = json.loads((out / "dpo.json").read_text())
        self.assertEqual(saved["reward_table"], [[1, 0], [0, 1], [0.5, 0.5]])
        self.assertEqual((len(saved["flipped_pair_indices"]), len(saved["clean_preference_pairs"])), (1, 2))
        code, _, err = quiet(rl_lab.main, ["--reward-table", str(table), "--preference-flips", "3", "--output", str(out)])
        self.assertEqual(code, 2)
        self.assertRegex(err, r"error: argument --preference-flips: got 3, wanted a whole number from 0 to 2, the number")
        table.write_text("[[1, 1]]")
        for algorithm in ("dpo", "all"):
            with self.assertRaisesRegex(FileProblem, "no context has two different rewards"):
                rl_lab.main(["--algorithm", algorithm, "--reward-table", str(table), "--output", str(self.folder / "none")])
        self.assertFalse((self.folder / "none").exists())
        self.assertIsNone(
            quiet(rl_lab.main, ["--algorithm", "ppo", "--steps", "1", "--reward-table", str(table), "--output", str(out)])[0]
        )

    def test_atoms_train_nothing(self):
        os_listdir = os.listdir(self.folder)
        for flag, value in (("--output", "o"), ("--steps", "3"), ("--seeds", "0-1"), ("--reward-table", "t"), ("--seed", "7")):
            code, _, err = quiet(rl_lab.main, ["--algorithm", "atoms", flag, value])
            self.assertEqual(code, 2)
            self.assertIn(f"argument {flag}: --algorithm atoms ", err)
        code, printed, _ = quiet(rl_lab.main, ["--algorithm", "atoms"])
        self.assertEqual((code, os.listdir(self.folder)), (None, os_listdir))
        self.assertIn("19 of 19 agree.", printed)
        self.assertNotIn("DIFFER", printed)
        self.assertIn("3.1  log-probability of an action\n     formula   logp = z_a", printed)
        self.assertIn("     result    -1.098612, -1000.000000\n     expected  -1.098612, -1000.000000   agree\n\n", printed)

    def test_chain(self):
        out = self.folder / "o"
        code, printed, _ = quiet(
            ppo_chain.main, ["--steps", "3", "--seed", "2", "--gae-lambda", "0.5", "--gamma", "0.9", "--output", str(out)]
        )
        self.assertIsNone(code)
        run = train_chain(steps=3, seed=2, gae_lambda=0.5, gamma=0.9)
        table = (out / "ppo_chain.csv").read_text()
        self.assertEqual(table, rl_lab.csv_text(run.history))
        self.assertEqual([line.split(",")[0] for line in table.splitlines()[1:3]], ["0", "1"])  # not 0.0
        saved = json.loads((out / "ppo_chain.json").read_text())
        self.assertEqual(
            list(saved), ["config", "reward_table", "software", "initial_metrics", "final_metrics", "first_rollout_trace"]
        )
        self.assertEqual(saved["config"], {**CHAIN, "steps": 3, "seed": 2, "gae_lambda": 0.5, "gamma": 0.9})
        self.assertEqual(saved["reward_table"], [[1.0, 0.0], [0.2, 0.0]])
        self.assertEqual((saved["initial_metrics"], saved["final_metrics"]), (run.history[0], run.history[3]))
        self.assertEqual(saved["first_rollout_trace"], run.first_rollout_trace)
        self.assertEqual(saved["software"], rl_lab.software())
        self.assertEqual(self.probes, [([out / "ppo_chain.csv", out / "ppo_chain.json"], 51_500)])
        before, after = run.history[0], run.history[3]
        names = {
            "expected return": "expected_return",
            "P(state 1)": "probability_state_1",
            "V(start)": "value_start",
            "entropy": "entropy",
        }
        rows = [[name, f"{before[n]:.4f}", f"{after[n]:.4f}"] for name, n in names.items()]
        table = rl_lab.format_table(["", "before", "after"], rows)
        self.assertTrue(printed.startswith(ppo_chain.explain_trace(run)))
        self.assertEqual(
            printed.removeprefix(ppo_chain.explain_trace(run)).splitlines(),
            [
                "",
                "",
                "seed 2, 3 iterations",
                "",
                *table.splitlines(),
                "",
                "The best possible return is 1 (undiscounted).",
                "V(start) is the critic's estimate of it and may exceed it.",
                "Cost: 384 sampled actions, 12 updates.",
                "",
                "Files, each with a .json beside it:",
                f"  {out / 'ppo_chain.csv'}",
            ],
        )

    def test_default_folders(self):
        def folder_of(module, argv, name):
            with mock.patch.object(module, "check_writable", side_effect=FileProblem("seen")) as check:
                with self.assertRaisesRegex(FileProblem, "seen"):
                    module.main(argv)
            paths = check.call_args.args[0]
            self.assertEqual({path.name if module is tokens else path.parent.name for path in paths}, {name})

        folder_of(rl_lab, [], "results")
        folder_of(ppo_chain, [], "results-chain")
        folder_of(tokens, [], "results-tokens.json")

    def test_explained_episode(self):
        """The printed arithmetic is that of the first rewarded episode, from a critic that is no longer zero."""

        def row(episode, t, state, action, reward, old_value, next_value, advantage):
            return dict(
                episode=episode,
                t=t,
                state=state,
                action=action,
                reward=reward,
                old_value=old_value,
                next_value=next_value,
                terminated=bool(t),
                boundary=bool(t),
                advantage=advantage,
                lambda_return=advantage + old_value,
            )

        trace = [
            row(0, 0, 0, 0, 0.5, 0.25, 0.5, 1.0),
            row(0, 1, 1, 1, 0.0, 0.5, 0.0, -0.5),
            row(1, 0, 0, 1, 0.125, 0.25, 0.75, 0.6125),
            row(1, 1, 2, 0, 2.0, 0.75, 0.0, 1.25),
        ]
        run = ppo_chain.ChainRun(ChainSettings(gamma=0.5, gae_lambda=0.9), [], trace, None, None)
        lines = ppo_chain.explain_trace(run).splitlines()
        self.assertEqual(lines[:2], ["First batch, before any update (the critic is still zero):", ""])
        self.assertEqual(list(ppo_chain.TRACE_HEADS), list(trace[0]))
        self.assertEqual(lines[2].split(), "episode t state action reward V(s) V(next) ends cut A A+V".split())
        self.assertEqual(lines[5].split(), "1 0 0 1 0.125 0.25 0.75 no no 0.6125 0.8625".split())
        self.assertEqual(lines[6].split(), "1 1 2 0 2 0.75 0 yes yes 1.25 2".split())
        self.assertEqual(
            lines[9:],
            [
                "Episode 1, backwards:",
                "  A_1 = delta_1 = r_1 - V(s_1) = 2 - 0.75 = 1.25",
                # delta_0 = .125 + .5 * .75 - .25 = .25
                "  A_0 = delta_0 + gamma * lambda * A_1 = 0.25 + 0.5 * 0.9 * 1.25 = 0.6125",
                "  with delta_0 = r_0 + gamma * V(s_1) - V(s_0)",
            ],
        )
        unrewarded = run._replace(first_rollout_trace=trace[:2], settings=ChainSettings(gae_lambda=0.0))
        lines = ppo_chain.explain_trace(unrewarded).splitlines()
        self.assertEqual(lines[7], "Episode 0, backwards:")
        self.assertTrue(lines[11].startswith("  With lambda 0 the first step learns only after"))

    def test_token_report(self):
        path = self.folder / "t.json"
        code, printed, _ = quiet(tokens.main, ["--output", str(path)])
        self.assertIsNone(code)
        saved, result = json.loads(path.read_text()), tokens.run_check()
        self.assertEqual(list(saved), ["config", "software", "sequences", "eos_mask_mistake", "dpo", "grpo"])
        self.assertEqual(saved, {**result, "software": rl_lab.software()})
        self.assertEqual(printed, tokens.report(result) + f"\n\nFile: {path}\n")
        self.assertEqual(self.probes, [([path], 10_000)])
        self.assertLess(path.stat().st_size, 10_000)
        lines = [line.split() for line in printed.splitlines()]
        for wanted in (
            "chosen: log-probability of the response -3.218876",
            "position id token mask scored by logp",
            "0 0 BOS 0 - -",
            "1 1 prompt 0 - -",
            "2 2 good 1 logits[1] -1.609438",
            "3 4 EOS 1 logits[2] -1.609438",
            "4 4 PAD 0 - -",
            "rejected: log-probability of the response -4.828314",
            "2 3 bad 1 logits[1] -1.609438",
            "3 3 bad 1 logits[2] -1.609438",
            "4 4 EOS 1 logits[3] -1.609438",
            "loss before loss after gradient norm",
            "DPO 0.693147 0.668435 0.500000",
            "GRPO 0.000000 -0.017285 0.414997",
            "chosen rejected",
            "response tokens, mask & (ids != EOS) 1 2",
            "response tokens, right mask 2 3",
            "response logp, mask & (ids != EOS) -1.609438 -3.218876",
            "response logp, right mask -3.218876 -4.828314",
            "GRPO loss before",
            "mean per response, (-1 + 1) / 2 (the GRPO paper) 0.000000",
            "mean over tokens, (-2 + 3) / 5 (DAPO) 0.200000",
        ):
            self.assertIn(wanted.split(), lines)

    def test_reports_are_the_recorded_ones(self):
        """reference/printed holds what the README's commands print; these two are the same on every machine."""
        printed = Path(rl_lab.__file__).resolve().parent / "reference" / "printed"
        _, atoms, _ = quiet(rl_lab.main, ["--algorithm", "atoms"])
        recorded = (printed / "atoms.txt").read_text(encoding="utf-8")
        self.assertIn(atoms.strip(), recorded)
        self.assertIn(tokens.report(tokens.run_check()).strip(), (printed / "tokens.txt").read_text(encoding="utf-8"))


if __name__ == "__main__":
    unittest.main()
