"""The closed-form gradient against autograd on a slow oracle, for every row and for choices that no one named."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import torch

import rl_lab
from extensions import objectives
from extensions.objectives import ROWS, engine, evaluate, make_batch
from extensions.objectives.oracle import GradientCase, combinations_of_choices, small_batch
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)


class GradientInClosedForm(GradientCase):
    def test_every_named_row(self):
        for row in ROWS.values():
            if row.kl != "exact":
                self.assert_gradient_is_that_of_autograd(row)

    def test_a_limit_of_the_ratio_cuts_nothing_where_there_is_none(self):
        batch = small_batch()
        batch = replace(batch, old_logps=batch.logps - 30.0 * batch.mask.double())  # beyond the limit of 20
        result = evaluate(ROWS["gpg@verl-0.9.1"], batch)
        self.assertEqual(result.clipped_branch_fraction, 0.0)
        self.assert_gradient_is_that_of_autograd(ROWS["gpg@verl-0.9.1"], batch)

    def test_every_combination(self):
        batch = replace(small_batch(), accumulation_steps=3, window_tokens=31.0, window_rows=5.0)
        rows = combinations_of_choices()
        self.assertGreater(len(rows), 100)
        for row in rows:
            self.assert_gradient_is_that_of_autograd(row, batch)

    def test_finite_differences(self):
        """(L(l + h) - L(l - h)) / 2h for rows without a stop-gradient; the small batch stands on no kink."""
        batch, h = small_batch(), 1e-6
        # Advantages come from rewards and old quantities: moving l moves the loss and leaves them as they are.
        for name in (
            "ppo",
            "dual_clip",
            "grpo",
            "dr_grpo",
            "dapo",
            "gspo",
            "sapo",
            "reinforce",
            "rloo",
            "reinforce_pp",
            "reinforce_pp_baseline",
            "grpo@trl-1.16.0",
            "luspo@trl-1.16.0",
            "rloo@trl-1.16.0",
            "geo_mean@verl-0.9.1",
        ):
            row = ROWS[name]
            analytic = evaluate(row, batch).dloss_dlogps
            for i, t in ((0, 1), (1, 1), (1, 4), (3, 2), (4, 0), (5, 1)):
                shift = torch.zeros_like(batch.logps)
                shift[i, t] = h
                up, down = (evaluate(row, replace(batch, logps=batch.logps + sign * shift)).loss for sign in (1, -1))
                self.assertAlmostEqual(((up - down) / (2 * h)).item(), analytic[i, t].item(), 8, (name, i, t))

    def test_exact_kl(self):
        """grpo@lab: through the logits, dloss_dlogits and dloss_dlogps together are the gradient of the whole loss."""
        batch, ids = objectives.small_batch()
        logits = batch.logits.clone().requires_grad_()
        logps = rl_lab.action_logps(logits, ids)
        row = ROWS["grpo@lab"]
        result = evaluate(row, replace(batch, logps=logps.detach() * batch.mask))
        objectives.loss_to_backpropagate(result, logps, logits=logits).backward()
        other = batch.logits.clone().requires_grad_()
        other_logps = rl_lab.action_logps(other, ids)
        losses = rl_lab.clipped_policy_loss(other_logps, batch.old_logps, result.advantages)
        losses = losses + 0.02 * rl_lab.categorical_kl(other, batch.ref_logits)
        per_answer = (losses * batch.mask).sum(dim=1) / batch.lengths
        per_answer.mean().backward()
        used = batch.mask.unsqueeze(2)
        torch.testing.assert_close(logits.grad * used, other.grad * used, rtol=1e-10, atol=1e-13)
        self.assertAlmostEqual(result.loss.item(), per_answer.mean().item(), 12)

    def test_a_broken_twin_is_seen(self):
        """What the comparison is worth: one token's gradient off by one part in a million is caught."""
        row = ROWS["grpo"]
        with mock.patch.object(
            engine, "kl_estimate", lambda *a, real=objectives.kl_estimate: (real(*a)[0], real(*a)[1] * (1 + 1e-6))
        ):
            with self.assertRaises(AssertionError):
                self.assert_gradient_is_that_of_autograd(row)
        flipped = {"clip": lambda row, r, A, l, l0: objectives.bounded(r, A, 1 + row.clip_low, 1 - row.clip_high, math.inf)}
        with mock.patch.dict(objectives.SURROGATES, flipped), self.assertRaises(AssertionError):
            self.assert_gradient_is_that_of_autograd(ROWS["dapo"])  # clip_low and clip_high exchanged

    def test_loss_for_a_training_loop(self):
        """Value and gradient; NaN in unused slots; the critic's and the entropy's gradient; a missing tensor is an error."""
        batch = small_batch()
        row = replace(ROWS["ppo"], entropy_coef=0.1)
        result = evaluate(row, batch)
        made = {}
        for name in ("logps", "vpreds", "entropies"):
            made[name] = torch.where(batch.mask, getattr(batch, name), math.nan).requires_grad_()
        loss = objectives.loss_to_backpropagate(result, **made)
        self.assertAlmostEqual(loss.item(), result.loss.item(), 12)
        loss.backward()
        for name, tensor in made.items():
            torch.testing.assert_close(tensor.grad, getattr(result, f"dloss_d{name}"))
        with self.assertRaisesRegex(ValueError, "vpreds is missing"):
            objectives.loss_to_backpropagate(result, made["logps"])
        with self.assertRaisesRegex(ValueError, "logps: got shape"):
            objectives.loss_to_backpropagate(result, made["logps"][:2], vpreds=made["vpreds"], entropies=made["entropies"])
        with self.assertRaisesRegex(ValueError, "logps: got shape"):  # as many numbers in another order
            rows, width = batch.logps.shape
            other = {"vpreds": made["vpreds"], "entropies": made["entropies"]}
            objectives.loss_to_backpropagate(result, made["logps"].reshape(rows, width // 2, 2), **other)

    def test_the_critics_slope_is_that_of_autograd(self):
        """rl_lab.clipped_value_loss under autograd, on independent random numbers in both precisions. Inside the band
        V0 + (V - V0) rounds, so that the clipped square may be an ulp larger; a slope of 0 there is wrong by 2 |V - G|."""
        generator = torch.Generator().manual_seed(5)
        for dtype in (torch.float32, torch.float64):
            values, vpreds, targets = torch.randn(3, 20_000, generator=generator, dtype=dtype)
            vpreds.requires_grad_()
            for name in ("square", "clip_max", "clip_replace"):
                with self.subTest(name, dtype=dtype):
                    row = replace(ROWS["ppo"], value_loss=name, value_clip=0.5)
                    clipped = values + (vpreds - values).clamp(-row.value_clip, row.value_clip)
                    losses = {
                        "square": lambda: (vpreds - targets).square(),
                        "clip_max": lambda: rl_lab.clipped_value_loss(vpreds, values, targets, row.value_clip),
                        "clip_replace": lambda: (clipped - targets).square(),
                    }[name]()
                    (wanted,) = torch.autograd.grad(losses.sum(), vpreds)
                    if name == "clip_max":  # at a tie autograd gives half to each branch, which is the whole only in the band
                        inside = (vpreds - values).abs() < row.value_clip
                        wanted = torch.where(inside, 2 * (vpreds - targets), wanted)
                    got_losses, got = objectives.value_loss_and_slope(row, vpreds.detach(), values, targets)
                    torch.testing.assert_close(got_losses, losses.detach())
                    torch.testing.assert_close(got, wanted.detach())

    def test_the_entropy_term(self):
        """loss -= coef * mean entropy / accumulation steps: entropies 1, 2, 3 on three tokens, 0.3, 2 steps: -0.3 * 2 / 2."""
        batch = make_batch(
            logps=[[-1.0, -1.0], [-1.0, 0.0]],
            mask=[[True, True], [True, False]],
            advantages=[0.0, 0.0],
            entropies=[[1.0, 2.0], [3.0, 9.0]],
            accumulation_steps=2,
            dtype=torch.float64,
        )
        row = replace(ROWS["grpo"], baseline="given", scale="none", kl="none", entropy_coef=0.3)
        for accumulation, steps in (("divide", 2), ("none", 1)):
            result = evaluate(replace(row, accumulation=accumulation), batch)
            self.assertAlmostEqual(result.entropy_loss.item(), -0.6 / steps, 12)
            slope = [[-0.1 / steps, -0.1 / steps], [-0.1 / steps, 0.0]]
            torch.testing.assert_close(result.dloss_dentropies, torch.tensor(slope, dtype=torch.float64))

    def test_nothing_is_learned_from_constants(self):
        """No gradient reaches rewards, old or reference log-probabilities: make_batch detaches, evaluate builds no graph."""
        batch = small_batch()
        arrays = {
            name: getattr(batch, name).clone().requires_grad_() for name in ("logps", "old_logps", "ref_logps", "rewards")
        }
        result = evaluate(ROWS["grpo"], make_batch(**arrays, mask=batch.mask, group_ids=batch.group_ids))
        self.assertFalse(result.loss.requires_grad or result.dloss_dlogps.requires_grad or result.advantages.requires_grad)


if __name__ == "__main__":
    unittest.main()
