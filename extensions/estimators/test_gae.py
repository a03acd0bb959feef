"""GAE's lambda on the tree of two steps: finite differences, a sum written out, and the closed form of the bias."""

import unittest

import numpy as np
import torch

import rl_lab
from extensions.estimators import gae, policy
from extensions.estimators.gae import CRITICS, LAMBDAS, LEFT, REWARDS, estimate, table, trajectories, tree_gradient
from extensions.estimators.gae import values_of
from extensions.estimators.policy import E1
from extensions.estimators.testing import NumberCase


class Tree(NumberCase):
    def test_values_by_hand(self):
        self.assertClose(values_of(LEFT), [0.6 * 0.5 + 0.4 * 0.01, 0.5 * 1 + 0.5 * 0, 0.3 * 0.5 + 0.7 * -0.2])

    def test_gradient_is_the_finite_difference_of_J(self):
        slope = policy.finite_difference(gae.return_of_logits, np.log(LEFT / (1 - LEFT)))
        self.assertRelative(tree_gradient(), slope, formula="d J / d logit = reached * p (1-p) * (value left - value right)")

    def test_trajectories_are_all_and_their_scores_have_mean_zero(self):
        nodes, scores, chances = trajectories()
        self.assertClose(chances.sum(), 1.0)
        self.assertClose(chances, [0.3, 0.3, 0.12, 0.28])
        self.assertClose(np.einsum("k,ktn->tn", chances, scores), np.zeros((2, 3)), formula="E[s_t] = 0")
        self.assertClose(chances @ REWARDS.ravel(), values_of(LEFT)[0])


class Lambda(NumberCase):
    def mean(self, lam, critic):
        return trajectories()[2] @ estimate(lam, critic)

    def test_a_true_critic_is_unbiased_at_every_lambda_and_any_critic_at_lambda_one(self):
        for lam in LAMBDAS:
            self.assertClose(self.mean(lam, CRITICS["true"]), tree_gradient(), formula=f"lambda {lam}, V exact")
        for name, critic in CRITICS.items():
            self.assertClose(self.mean(1.0, critic), tree_gradient(), formula=f"lambda 1, critic {name}: a baseline")

    def test_bias_of_the_first_step_is_linear_in_lambda(self):
        V, critic = values_of(LEFT), CRITICS["wrong"]
        for lam in (0.0, 0.3, 0.95):
            gap = (1 - lam) * (critic[1] - critic[2]) + lam * (V[1] - V[2])
            formula = "p (1-p) [(1-lam) critic gap + lam value gap]"
            self.assertClose(self.mean(lam, critic)[0], 0.6 * 0.4 * gap, formula=formula)
            self.assertClose(self.mean(lam, critic)[1:], tree_gradient()[1:], formula="the last step has no bias")

    def test_the_wrong_critic_turns_the_first_step_round_at_lambda_zero(self):
        self.assertClose(self.mean(0.0, CRITICS["wrong"])[0], 0.24 * (0.2 - 0.4), mistake="lambda 0 read as lambda 1")
        self.assertGreater(tree_gradient()[0], 0)
        lines = {line.estimator: line for line in table(E1)}
        self.assertIn("the first step is pushed the wrong way", lines["lambda 0, critic wrong"].meaning)
        self.assertNotIn("wrong way", lines["lambda 0.95, critic wrong"].meaning)

    def test_advantages_are_those_of_the_atom(self):
        nodes, scores, chances = trajectories()
        rewards = torch.tensor(np.stack([np.zeros(4), REWARDS.ravel()], axis=1))
        values = torch.tensor(CRITICS["wrong"][nodes])
        ends = torch.tensor([[False, True]] * 4)
        following = torch.cat([values[:, 1:], torch.zeros(4, 1, dtype=values.dtype)], dim=1)
        A, _ = rl_lab.gae(rewards, values, following, ends, ends, 1.0, 0.8)
        wanted = np.einsum("kt,ktn->kn", A.numpy(), scores)
        self.assertClose(estimate(0.8, CRITICS["wrong"]), wanted, formula="g = sum_t A_t s_t", mistake="mean over tokens")

    def test_lambda_buys_less_bias_with_more_variance(self):
        """With the true critic the variance rises with lambda; with the wrong one the least error lies between 0 and 1."""
        lines = {line.estimator: line for line in table(E1)}
        spread = [lines[f"lambda {lam:g}, critic true"].trace_cov for lam in LAMBDAS]
        self.assertEqual(spread, sorted(spread))
        errors = [lines[f"lambda {lam:g}, critic wrong"].mse for lam in LAMBDAS]
        self.assertEqual(np.argmin(errors), LAMBDAS.index(0.5))
        bias = [abs(np.subtract(lines[f"lambda {lam:g}, critic wrong"].mean, tree_gradient())).max() for lam in LAMBDAS]
        self.assertEqual(bias, sorted(bias, reverse=True))


if __name__ == "__main__":
    unittest.main()
