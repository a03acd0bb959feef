"""Later public bug reports, in small numbers: what is right stays clean, what is wrong is named by its cause."""

from __future__ import annotations

import unittest

import numpy as np
import torch
import torch.nn.functional as F

from extensions.audit.testing import audited
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)


def with_gradient(loss_of, x) -> tuple[float, np.ndarray]:
    leaf = torch.tensor(np.asarray(x, dtype=float), requires_grad=True)
    value = loss_of(leaf)
    return value.item(), torch.autograd.grad(value, leaf)[0].numpy()


def clip(l, old, A, width=0.2):
    r = torch.exp(l - torch.as_tensor(old))
    A = torch.as_tensor(A)
    return -torch.minimum(r * A, r.clamp(1 - width, 1 + width) * A)


class Case(unittest.TestCase):
    def assert_named(self, name: str, arrays: dict, severity: str = "mistake"):
        found = {f.name: f.severity for f in audited(arrays).findings}
        self.assertEqual(found.get(name), severity, f"{name}: wanted, got {found}")

    def assert_clean(self, arrays: dict):
        found = [f.name for f in audited(arrays).findings if f.severity != "note"]
        self.assertEqual(found, [], "a right recording")


def batch(seed: int = 11):
    """8 answers of 1 to 6 tokens in two groups, a later pass."""
    rng = np.random.default_rng(seed)
    old = rng.uniform(-2.4, -0.2, (8, 6)).round(2)
    new = np.minimum((old + rng.normal(0, 0.25, old.shape)).round(2), -0.01)
    mask = np.arange(6) < np.array([2, 6, 3, 5, 4, 6, 1, 3])[:, None]
    rewards = np.array([1.0, 0.0, 0.4, 0.7, 0.1, 0.9, 0.3, 0.6])
    A = np.concatenate([(r - r.mean()) / (r.std(ddof=1) + 1e-4) for r in (rewards[:4], rewards[4:])])
    common = {"logps": new, "old_logps": old, "mask": mask, "rewards": rewards, "group_ids": np.arange(8) // 4,
              "advantages": A, "clip_low": 0.2, "clip_high": 0.2}  # fmt: skip
    return {name: np.where(mask, x, 0.0) if name in ("logps", "old_logps") else x for name, x in common.items()}


class Rollouts(Case):
    def recorded(self, b: dict, loss_of, **more) -> dict:
        loss, gradient = with_gradient(loss_of, b["logps"])
        return {**b, "loss": loss, "dloss_dlogps": gradient, **more}

    def test_rows_with_the_advantage_of_another_row(self):
        b = batch()
        m, order = torch.tensor(b["mask"]), [0, 4, 1, 5, 2, 6, 3, 7]  # dealt out to ranks, and not collected that way

        def loss_of(A):
            return lambda l: ((clip(l, b["old_logps"], A[:, None]) * m).sum(1) / m.sum(1)).mean()

        self.assert_clean(self.recorded(b, loss_of(b["advantages"])))
        self.assert_named("advantages_of_other_rows", self.recorded(b, loss_of(b["advantages"][order])))

    def test_standardised_between_the_two_products(self):
        rng = np.random.default_rng(12)
        old, raw = rng.uniform(-1.8, -0.2, (16, 1)), rng.normal(0.2, 0.5, (16, 1))
        A = (raw - raw.mean()) / (raw.std(ddof=1) + 1e-8)
        b = {"logps": old + rng.normal(0, 0.3, old.shape), "old_logps": old, "mask": np.ones((16, 1), bool),
             "advantages": A[:, 0], "advantages_raw": raw[:, 0], "clip_low": 0.2, "clip_high": 0.2}  # fmt: skip

        def loss_of(first):
            def f(l):
                r = torch.exp(l - torch.tensor(old))
                return -torch.minimum(r * torch.tensor(first), r.clamp(0.8, 1.2) * torch.tensor(A)).mean()

            return f

        self.assert_clean(self.recorded(b, loss_of(A)))
        self.assert_named("advantages_mixed_in_products", self.recorded(b, loss_of(raw)))

    def test_each_part_of_an_action_is_clipped(self):
        """Two parts of + 0.15, A 1: the product's ratio e^.3 = 1.35 is clipped to 1.2; e^.15 = 1.16 twice is not."""
        rng = np.random.default_rng(8)
        old = rng.uniform(-1.5, -0.2, (10, 3))
        A = rng.normal(0, 1, 10)
        b = {"logps": old + rng.normal(0.02, 0.12, old.shape), "old_logps": old, "mask": np.ones((10, 3), bool),
             "advantages": A, "clip_low": 0.2, "clip_high": 0.2}  # fmt: skip

        def joint(l):
            return clip(l.sum(1), old.sum(1), A).mean()

        def parts(l):
            d = l - torch.tensor(old)
            held = d.clamp(np.log(0.8), np.log(1.2)).sum(1).exp()
            return -torch.minimum(d.sum(1).exp() * torch.tensor(A), held * torch.tensor(A)).mean()

        self.assertEqual([f.name for f in audited(self.recorded(b, joint)).findings if f.severity == "mistake"], [])
        self.assert_named("clip_part_by_part", self.recorded(b, parts))

    def test_the_tokens_of_the_generation_batch_for_a_step(self):
        """6 micro-batches a generation of 153 tokens, 2 a step: 51 tokens is right, 153 is 3 times too small."""
        b = batch()
        m = torch.tensor(b["mask"])
        for tokens, per_generation, steps, generation in ((51, 6, 2, 153), (153, 6, 2, 153), (62, 2, 4, 62)):
            loss_of = lambda l: (clip(l, b["old_logps"], b["advantages"][:, None]) * m).sum() / tokens  # noqa: B023, E731
            arrays = self.recorded(b, loss_of, num_items_in_batch=generation, accumulation_steps=steps,
                                   steps_per_generation=per_generation)  # fmt: skip
            with self.subTest(tokens=tokens):
                if tokens == 51:
                    self.assert_clean(arrays)
                else:
                    self.assert_named("generation_tokens_for_step", arrays)

    def test_a_path_without_the_sampler_correction(self):
        b, rng = batch(), np.random.default_rng(7)
        m = torch.tensor(b["mask"])
        sampler = np.where(b["mask"], b["old_logps"] + rng.normal(-0.2, 0.3, (8, 6)), 0.0)
        w = torch.tensor(np.minimum(np.exp(b["old_logps"] - sampler), 2.0))
        A = b["advantages"][:, None]
        corrected = self.recorded(b, lambda l: (w * clip(l, b["old_logps"], A) * m).sum() / m.sum(), sampler_logps=sampler)
        plain = self.recorded(b, lambda l: (clip(l, b["old_logps"], A) * m).sum() / m.sum(), sampler_logps=sampler)
        self.assert_clean(corrected)
        self.assertTrue(audited(corrected).reading["complete"])
        self.assert_named("sampler_correction_absent", plain, "note")

    def test_kl_summed_over_padding(self):
        b = batch()
        l = np.where(b["mask"], b["logps"], -1.3)
        ref = np.where(b["mask"], np.minimum(l - np.random.default_rng(1).normal(0, 0.5, l.shape).round(2), -0.01), -0.9)
        d = l - ref
        arrays = {"logps": l, "ref_logps": ref, "mask": b["mask"]}
        self.assert_clean({**arrays, "kl": np.where(b["mask"], d, 0).sum(1).mean()})
        self.assert_named("padding_counted", {**arrays, "kl": d.sum(1).mean()})  # -.4 more a padded slot

    def test_first_ratios_are_off_beside_borders(self):
        """Ratios of a first pass that leave 1 at every border of an episode, and nowhere else first: a recurrent state."""
        done = np.zeros(24, bool)
        done[[2, 9, 17]] = True
        old = np.random.default_rng(2).uniform(-2, -0.1, 24)
        off = np.zeros(24)
        off[[2, 3, 9, 10, 11, 17]] = 0.2
        b = {"old_logps": old, "logps": old + off, "mask": np.ones(24, bool), "advantages": np.ones(24), "pass_index": 0,
             "boundary": done}  # fmt: skip
        said = next(f for f in audited(b).findings if f.name == "first_pass_ratio_not_one")
        self.assertIn("All 3 stretches of them begin at a border", said.evidence)
        elsewhere = {**b, "logps": old + np.roll(off, 4)}
        said = next(f for f in audited(elsewhere).findings if f.name == "first_pass_ratio_not_one")
        self.assertNotIn("border", said.evidence)

    def test_a_packed_row_counts_the_first_token_of_its_second_answer(self):
        b = {"logps": [[-1.0, -2.0, -0.5, -0.7, -1.1, -0.2]], "segment_ids": [[0, 0, 0, 1, 1, 1]], "loss": 0.9}
        self.assert_named("packed_border_counted", {**b, "mask": [[0, 1, 1, 1, 1, 1]]})
        self.assertNotIn("packed_border_counted", audited({**b, "mask": [[0, 1, 1, 0, 1, 1]]}).named())


class Advantages(Case):
    def test_the_spread_of_the_others_is_zero(self):
        """Rewards 1 0 0 0: the others of the first agree, and (1 - 0) / (0 + 1e-6) is a million."""
        rewards, groups = np.array([1, 0, 0, 0, 0.5, 1, 0, 0.2]), np.arange(8) // 4

        def rule(skip: bool) -> np.ndarray:
            made = np.zeros(8)
            for i in range(8):
                others = rewards[(groups == groups[i]) & (np.arange(8) != i)]
                std = others.std(ddof=1)
                made[i] = (rewards[i] - others.mean()) / (1.0 if skip and std == 0 else std + 1e-6)
            return made

        common = {"mask": np.ones((8, 2), bool), "rewards": rewards, "group_ids": groups}
        self.assert_clean({**common, "advantages": rule(True)})
        self.assert_named("std_of_others_is_zero", {**common, "advantages": rule(False)})

    def test_gae_over_the_tokens_of_a_tool(self):
        """Policy, policy, tool, tool, policy: a step in time is a token of the policy, so the third's next value is the fifth's."""
        mask = np.array([[1, 1, 0, 0, 1, 0], [1, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 0, 0, 1, 1, 0]], bool)
        rng = np.random.default_rng(3)
        values, score = rng.normal(0.4, 0.3, mask.shape).round(1), np.array([1.0, 0.0, 0.6, 1.5])
        rewards = np.zeros(mask.shape)
        for i, row in enumerate(mask):
            rewards[i, np.flatnonzero(row)[-1]] = score[i]

        def gae(steps: np.ndarray) -> np.ndarray:
            made = np.zeros(mask.shape)
            for i, row in enumerate(steps):
                following = carried = 0.0
                for t in np.flatnonzero(row)[::-1]:
                    carried = rewards[i, t] + 0.9 * following - values[i, t] + 0.9 * 0.8 * carried
                    made[i, t], following = carried, values[i, t]
            return np.where(mask, made, 0.0)

        span = np.array([[1, 1, 1, 1, 1, 0], [1] * 6, [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]], bool)
        common = {"mask": mask, "values": values, "gamma": 0.9, "lam": 0.8, "rewards": score, "token_level_rewards": rewards}
        self.assert_clean({**common, "advantages": gae(mask)})
        self.assert_named("tool_tokens_in_gae", {**common, "advantages": gae(span)})

    def rollout(self, rewards, cut, final, boundary_value=True):
        """GAE gamma 0.9, lambda 0.8 of (T, E) arrays; rewards hold what was paid at a time limit."""
        rng = np.random.default_rng(20)
        V, last = rng.normal(0, 1, rewards.shape).round(2), rng.normal(0, 1, rewards.shape[1]).round(2)
        A, carried = np.zeros(rewards.shape), np.zeros(rewards.shape[1])
        for t in range(len(rewards) - 1, -1, -1):
            go = ~cut[t]
            carried = rewards[t] + 0.9 * (last if t == len(rewards) - 1 else V[t + 1]) * go - V[t] + 0.72 * go * carried
            A[t] = carried
        return {"values": V, "last_values": last, "terminated": np.zeros(cut.shape, bool), "truncated": cut,
                "terminal_values": np.where(cut, final, 0.0), "gamma": 0.9, "lam": 0.8, "rewards": rewards,
                "advantages": A, "returns": A + V}  # fmt: skip

    def test_a_time_limit_of_one_environment_pays_all(self):
        rng = np.random.default_rng(21)
        env, final = rng.uniform(0, 1, (6, 3)).round(1), rng.normal(1, 1, (6, 3)).round(2)
        cut = np.zeros((6, 3), bool)
        cut[2, 1] = cut[4, 0] = True
        right = self.rollout(env + 0.9 * final * cut, cut, final)
        wrong = self.rollout(env + 0.9 * final * cut.any(1, keepdims=True), cut, final)
        self.assert_clean({**right, "env_rewards": env})
        self.assert_named("bootstrap_beyond_time_limit", {**wrong, "env_rewards": env})

    def test_targets_beside_right_advantages(self):
        """No match of one recorded array hides another: returns standardised, constant or negated advantages beside them."""
        rng = np.random.default_rng(22)
        cut = np.zeros((6, 2), bool)
        right = self.rollout(rng.uniform(0, 3, (6, 2)).round(1), cut, np.zeros((6, 2)))
        G, A = right["returns"], right["advantages"]
        self.assert_clean(right)
        self.assert_clean({**right, "advantages": (A - A.mean()) / A.std()})
        self.assert_named("returns_standardised", {**right, "returns": (G - G.mean()) / G.std()}, "warning")
        self.assert_named("returns_do_not_fit", {**right, "returns": 0 * G})
        self.assert_named("advantage_sign", {**right, "advantages": -A})

    def test_normalised_rewards_beside_those_of_the_environment(self):
        rng = np.random.default_rng(23)
        env, cut = rng.uniform(0, 3, (6, 2)).round(1), np.zeros((6, 2), bool)
        self.assert_clean({**self.rollout(env / 1.7, cut, 0 * env), "env_rewards": env})


class Pairs(Case):
    def test_kl_pairs_that_are_the_rows_own_answers(self):
        """KTO with 5 rows reversed: the middle row meets itself, and z0 = mean of d becomes the row's own d."""
        seq, ref = np.array([-9.0, -12.0, -7.0, -10.0, -8.0]), np.array([-10.5, -14.5, -6.0, -11.0, -8.5])
        kl, ref_kl = np.array([-13.0, -9.5, -12.0, -10.5, -11.0]), np.array([-13.2, -9.9, -11.7, -10.9, -11.1])
        labels = np.array([True, False, True, False, True])

        def recorded(kl, ref_kl):
            z0 = max((kl - ref_kl).mean(), 0.0)
            d, y = torch.tensor(seq - ref), torch.tensor(labels)
            value = torch.where(y, 1 - torch.sigmoid(0.5 * (d - z0)), 1 - torch.sigmoid(0.5 * (z0 - d))).mean().item()
            return {"seq_logps": seq, "ref_seq_logps": ref, "labels": labels, "kl_seq_logps": kl, "ref_kl_seq_logps": ref_kl,
                    "beta": 0.5, "loss": value}  # fmt: skip

        self.assert_clean(recorded(kl, ref_kl))
        kl[2], ref_kl[2] = seq[2], ref[2]
        self.assert_named("kl_pair_is_own_answer", recorded(kl, ref_kl))

    def test_eos_leaves_the_sum_and_stays_in_the_length(self):
        rng = np.random.default_rng(5)
        lengths = np.array([3, 4, 2, 5, 2, 3])
        mask = np.arange(5) < lengths[:, None]
        l = np.where(mask, -rng.uniform(0.1, 2.0, mask.shape).round(1), 0.0)
        without = mask & (np.arange(5) < lengths[:, None] - 1)

        def recorded(over, by):
            def loss_of(x):
                s = torch.where(torch.tensor(over), x, 0.0).sum(1) / torch.tensor(by)
                return -F.logsigmoid(2.0 * (s[:3] - s[3:]) - 1.0).mean()

            loss, gradient = with_gradient(loss_of, l)
            s = np.where(over, l, 0).sum(1) / by
            return {"logps": l, "mask": mask, "chosen_logps": s[:3], "rejected_logps": s[3:], "beta": 2.0, "loss": loss,
                    "dloss_dlogps": gradient, "chosen_lengths": lengths[:3], "rejected_lengths": lengths[3:]}  # fmt: skip

        self.assert_clean(recorded(mask, lengths))
        self.assert_named("length_of_other_tokens", recorded(without, lengths))

    def test_odds_with_another_constant(self):
        """log(1.0001 - p) for log(1 - p): at p = e^-.0003 the log-odds are 7.82 for 8.11. Any constant is solved."""
        l = np.array([[-0.0004, -0.0002, 0], [-0.003, -0.001, -0.002], [-0.2, -0.5, 0], [-0.7, -0.1, -0.3]])
        mask = l != 0
        n = torch.tensor(mask.sum(1))

        def recorded(c):
            def loss_of(x):
                s = torch.where(torch.tensor(mask), x, 0.0).sum(1) / n
                odds = s - torch.log(c - 1 - torch.expm1(s))
                nll = -torch.where(torch.tensor(mask[:2]), x[:2], 0.0).sum() / n[:2].sum()
                return nll - 0.1 * F.logsigmoid(odds[:2] - odds[2:]).mean()

            loss, gradient = with_gradient(loss_of, l)
            s = l.sum(1) / mask.sum(1)
            return {"logps": l, "mask": mask, "chosen_logps": s[:2], "rejected_logps": s[2:], "beta": 0.1, "loss": loss,
                    "dloss_dlogps": gradient, "chosen_lengths": n[:2], "rejected_lengths": n[2:]}  # fmt: skip

        self.assert_clean(recorded(1.0))
        for c in (1.0001, 1.00037):
            self.assert_named("odds_constant", recorded(c))
            self.assertIn(f"log({c:g} - p)", " ".join(f.evidence for f in audited(recorded(c)).findings))
