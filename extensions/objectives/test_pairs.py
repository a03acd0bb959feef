"""Preference losses against autograd on their formulas, by hand, and at extremes."""

from __future__ import annotations

import math
import unittest
from dataclasses import replace

import numpy as np
import torch

from extensions import objectives
from extensions.objectives import PREFERENCE_ROWS, evaluate_preference, make_preferences
from extensions.objectives.oracle import small_batch
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)


class PreferenceLosses(unittest.TestCase):
    def data(self) -> objectives.Preferences:
        return objectives.small_preferences(small_batch())

    def pairs(self, chosen, rejected, ref_chosen=0.0, ref_rejected=0.0) -> objectives.Preferences:
        sides = dict(
            chosen_logps=chosen, rejected_logps=rejected, ref_chosen_logps=ref_chosen, ref_rejected_logps=ref_rejected
        )
        return make_preferences(**{name: np.array([side], dtype=np.float64) for name, side in sides.items()})

    def oracle(self, row: objectives.PreferenceRow, data: objectives.Preferences, logps: torch.Tensor) -> torch.Tensor:
        """The formulas under autograd, answer by answer."""
        scores = []
        half = len(logps) // 2
        for i in range(len(logps)):
            used = [t for t in range(data.mask.shape[1]) if data.mask[i, t]]
            shared = min(int(data.mask[i].sum()), int(data.mask[(i + half) % len(logps)].sum()))
            terms = [
                (logps[i, t] - (data.ref_logps[i, t] if row.reference == "used" else 0))
                * (1 if n < shared else row.tail_weight)
                for n, t in enumerate(used)
            ]
            scores.append(sum(terms) / (len(used) if row.score == "mean" else 1))
        s = torch.stack(scores)
        s = {
            "reverse_kl": lambda: s,
            "forward_kl": lambda: 1 - 1 / s.exp(),
            "js": lambda: (2 * s.exp() / (1 + s.exp())).log(),
        }[row.divergence]()
        u, v = s[:half], s[half:]
        b, e, sig = row.beta, row.label_smoothing, torch.sigmoid
        q, T = sig(b * (u - v)), data.mask.sum(dim=1).double()
        smooth = lambda D: -(1 - e) * sig(b * D).log() - e * sig(-b * D).log()  # noqa: E731

        def kto():
            z0 = max(0.0, (data.kl_seq_logps - data.ref_kl_seq_logps).mean().item())
            return torch.stack(
                [
                    row.desirable_weight * (1 - sig(b * (x - z0)))
                    if good
                    else row.undesirable_weight * (1 - sig(b * (z0 - x)))
                    for x, good in zip(s, data.labels)
                ]
            )

        def aot():
            reference = s - torch.stack([(logps[i] * data.mask[i]).sum() for i in range(len(logps))])
            gap, reference_gap = (u - reference[:half]) - (v - reference[half:]), reference[half:] - reference[:half]
            return smooth(gap.sort().values - reference_gap.sort().values)

        losses = {
            "sigmoid": lambda: -q.log(),
            "cdpo": lambda: smooth(u - v),
            "robust": lambda: (-(1 - e) * q.log() + e * (1 - q).log()) / (1 - 2 * e),
            "ipo": lambda: (u - v - 1 / (2 * b)) ** 2,
            "hinge": lambda: torch.relu(1 - b * (u - v)),
            "exo": lambda: q * (q / (1 - e)).log() + (1 - q) * ((1 - q) / e).log(),
            "sppo_hard": lambda: (u - 0.5 / b) ** 2 + (v + 0.5 / b) ** 2,
            "bco": lambda: -sig(b * u).log() - sig(-b * v).log(),
            "aot": aot,
            "aot_unpaired": lambda: smooth(u.sort().values - v.sort().values),
            "nca": lambda: -sig(b * u).log() - 0.5 * sig(-b * u).log() - 0.5 * sig(-b * v).log(),
            "apo_zero": lambda: 1 - sig(b * u) + sig(b * v),
            "apo_down": lambda: sig(b * u) + 1 - q,
            "discopop": lambda: (
                (m := sig(b * (u - v) / row.discopop_tau)) * (-b * (u - v)).exp() - (1 - m) * q.log()
            ),
            "dpop": lambda: -sig(b * (u - v - row.dpop_lambda * torch.relu(-u))).log(),
            "rdpo": lambda: -sig(b * (u - v) + row.length_alpha * (T[:half] - T[half:])).log(),
            "kto_apo": lambda: torch.stack(
                [
                    row.desirable_weight * (1 - sig(b * x)) if good else row.undesirable_weight * (1 - sig(-b * x))
                    for x, good in zip(s, data.labels)
                ]
            ),
            "simpo": lambda: -(1 - e) * sig(b * (u - v) - row.gamma).log() - e * sig(row.gamma - b * (u - v)).log(),
            "orpo": lambda: -b * sig((u.exp() / (1 - u.exp())).log() - (v.exp() / (1 - v.exp())).log()).log(),
            "kto": kto,
        }[row.loss]()
        if row.pair_weight == "wpo":
            means = [logps[i][data.mask[i]].mean().item() for i in range(len(logps))]
            losses = torch.stack([min(1.0, math.exp(means[i] + means[i + half])) * x for i, x in enumerate(losses)])
        if row.pair_weight == "given":
            losses = losses * data.pair_weights
        answers = [-logps[i][data.mask[i]] for i in range(half)]
        nll = {
            "mean_over_tokens": lambda: torch.cat(answers).mean(),
            "mean_per_response": lambda: sum(answer.mean() for answer in answers) / half,
            "sum_per_response": lambda: sum(answer.sum() for answer in answers) / half,
        }[row.sft_reduction]()
        return losses.mean() + row.sft_coef * nll

    def test_gradient_of_every_row(self):
        data = self.data()
        for name, named in PREFERENCE_ROWS.items():
            rows = [named, replace(named, beta=0.7, sft_coef=0.0 if named.of_labels else 0.3)]
            if not named.of_labels:
                rows += [replace(named, sft_coef=0.3, sft_reduction=r) for r in objectives.PREFERENCE_CHOICES["sft_reduction"]]
            if not named.of_labels and not named.loss.startswith("aot"):
                rows += [replace(named, pair_weight=weight) for weight in objectives.PREFERENCE_CHOICES["pair_weight"]]
            if named.loss == "simpo":
                rows.append(replace(named, label_smoothing=0.1))
            # Without a reference u is a log-probability of -10 and exp(-u) overflows in the naive formula.
            if named.loss not in ("aot", "kto", "kto_apo", "orpo") and not named.name.startswith("cpo"):
                rows += [replace(named, divergence=divergence) for divergence in objectives.PREFERENCE_CHOICES["divergence"]]
            for row in rows:
                logps = data.logps.clone().requires_grad_()
                loss = self.oracle(row, data, logps)
                (gradient,) = torch.autograd.grad(loss, logps)
                result = evaluate_preference(row, data)
                self.assertAlmostEqual(result.loss.item(), loss.item(), 11, name)
                torch.testing.assert_close(
                    result.dloss_dlogps, gradient, rtol=1e-9, atol=1e-12, msg=lambda text: f"{name}\n{text}"
                )
                back = data.logps.clone().requires_grad_()
                objectives.loss_to_backpropagate(result, back).backward()
                torch.testing.assert_close(back.grad, result.dloss_dlogps)

    def test_finite_differences(self):
        data, h = self.data(), 1e-6
        data = replace(data, logps=data.logps + 0.01 * torch.arange(6).unsqueeze(1) * data.mask)  # no two answers tie
        for name, row in PREFERENCE_ROWS.items():
            if row.pair_weight == "wpo":
                continue  # its weight is a constant that a finite difference would move
            analytic = evaluate_preference(row, data).dloss_dlogps
            for i, t in ((0, 0), (2, 1), (3, 5), (5, 2)):
                shift = torch.zeros_like(data.logps)
                shift[i, t] = h
                up, down = (
                    evaluate_preference(row, replace(data, logps=data.logps + sign * shift)).loss for sign in (1, -1)
                )
                self.assertAlmostEqual(((up - down) / (2 * h)).item(), analytic[i, t].item(), 6, (name, i, t))

    def test_by_hand(self):
        """D = 2, beta 0.1, e = 0.1: -log sigmoid(0.2) = 0.598139; cDPO 0.9 * 0.598139 + 0.1 * 0.798139 = 0.618139; robust
        (0.9 * 0.598139 - 0.1 * 0.798139) / 0.8 = 0.573139; IPO (2 - 5)^2 = 9; hinge 1 - 0.2 = 0.8."""
        pairs = self.pairs(1.5, -0.5)
        for name, wanted in (("dpo", 0.598139), ("cdpo", 0.618139), ("robust", 0.573139), ("ipo", 9.0), ("hinge", 0.8)):
            self.assertAlmostEqual(evaluate_preference(PREFERENCE_ROWS[name], pairs).loss.item(), wanted, 6, name)

    def test_later_losses_by_hand(self):
        """u = 2, v = -1, beta 0.5: s(1) = 0.731059, s(0.5) = 0.622459, s(1.5) = 0.817574. apo_zero 1 - s(1) + s(-0.5) =
        0.646482; apo_down s(1) + 1 - s(1.5) = 0.913484; nca -log s(1) - log s(-1) / 2 - log s(0.5) / 2 = 1.206931;
        dpop with u = -2: D - lambda 2 = -1 - 2 lambda. rdpo: lengths 3 and 1, alpha 0.1: -log s(1.5 + 0.2) = 0.167786."""
        pairs = self.pairs(2.0, -1.0)
        for name, wanted in (("apo_zero", 0.646482), ("apo_down", 0.913484), ("nca", 1.206931)):
            got = evaluate_preference(replace(PREFERENCE_ROWS[name], beta=0.5), pairs).loss.item()
            self.assertAlmostEqual(got, wanted, 6, name)
        fallen = self.pairs(-2.0, -1.0)
        row = replace(PREFERENCE_ROWS["dpop"], beta=0.5, dpop_lambda=1.0)
        self.assertAlmostEqual(evaluate_preference(row, fallen).loss.item(), math.log1p(math.exp(1.5)), 12)
        self.assertEqual(evaluate_preference(row, pairs).loss, evaluate_preference(replace(row, loss="sigmoid"), pairs).loss)
        row = replace(PREFERENCE_ROWS["rdpo"], beta=0.5, length_alpha=0.1)
        self.assertAlmostEqual(
            evaluate_preference(row, replace(pairs, answer_lengths=torch.tensor([3, 1]))).loss.item(), 0.167786, 6
        )
        with self.assertRaisesRegex(ValueError, "rdpo: the data have no answer_lengths"):
            evaluate_preference(row, pairs)

    def test_discopop_by_hand(self):
        """z = 0: m = 1/2, (log 2 + 1) / 2 = 0.846574; slope in z -(1/2)(1/2) - 1/2 + (1/4) / 0.05 (1 - log 2) = 0.784264."""
        result = evaluate_preference(replace(PREFERENCE_ROWS["discopop"], beta=1.0), self.pairs(0.0, 0.0))
        self.assertAlmostEqual(result.loss.item(), (math.log(2) + 1) / 2, 12)
        self.assertAlmostEqual(result.dloss_dscores[0].item(), -0.75 + 5 * (1 - math.log(2)), 12)

    def test_weights_of_pairs(self):
        """WPO: per-token means -0.5 and -1: weight exp(-1.5), and no gradient through it; a given weight multiplies alike."""
        logps = np.array([[-0.5, -0.5], [-1.0, -1.0]])
        data = make_preferences(logps=logps, ref_logps=logps, mask=np.ones((2, 2), dtype=bool), pair_weights=[0.25])
        for weight, factor in (("none", 1.0), ("wpo", math.exp(-1.5)), ("given", 0.25)):
            result = evaluate_preference(replace(PREFERENCE_ROWS["dpo"], pair_weight=weight), data)
            self.assertAlmostEqual(result.loss.item(), factor * math.log(2), 12)
            self.assertAlmostEqual(result.dloss_dlogps[0, 0].item(), -0.05 * factor, 12)
        dense = make_preferences(logps=-logps, ref_logps=-logps, mask=np.ones((2, 2), dtype=bool))  # exp(1.5), held at 1
        self.assertAlmostEqual(evaluate_preference(PREFERENCE_ROWS["wpo"], dense).loss.item(), math.log(2), 12)
        with self.assertRaisesRegex(ValueError, "no pair_weights"):
            evaluate_preference(replace(PREFERENCE_ROWS["dpo"], pair_weight="given"), replace(data, pair_weights=None))

    def test_ipo_sums_and_means(self):
        """0.3 on four tokens, -0.3 on two, beta 0.5: sums (1.8 - 1)^2 = 0.64, means (0.6 - 1)^2 = 0.16."""
        data = make_preferences(
            logps=np.array([[0.3] * 4, [-0.3] * 4]) - 1,
            ref_logps=np.full((2, 4), -1.0),
            mask=np.array([[1, 1, 1, 1], [1, 1, 0, 0]]) != 0,
        )
        for name, wanted in (("ipo", 0.64), ("ipo_mean", 0.16)):
            self.assertAlmostEqual(
                evaluate_preference(replace(PREFERENCE_ROWS[name], beta=0.5), data).loss.item(), wanted, 12
            )

    def test_identities(self):
        """e = 0: cdpo and robust are dpo. SimPO with gamma 0 is DPO by means against a uniform reference."""
        data = self.data()
        dpo = evaluate_preference(PREFERENCE_ROWS["dpo"], data)
        for name in ("cdpo", "robust"):
            other = evaluate_preference(replace(PREFERENCE_ROWS[name], label_smoothing=0.0), data)
            torch.testing.assert_close(other.dloss_dlogps, dpo.dloss_dlogps)
        simpo = evaluate_preference(replace(PREFERENCE_ROWS["simpo"], gamma=0.0, beta=0.1), data)
        mean = evaluate_preference(PREFERENCE_ROWS["dpo_mean"], replace(data, ref_logps=-1.6 * data.mask.double()))
        torch.testing.assert_close(simpo.dloss_dlogps, mean.dloss_dlogps)
        far = evaluate_preference(replace(PREFERENCE_ROWS["dpo"], beta=1.0), self.pairs(-1e4, 0.0))
        self.assertEqual((far.loss.item(), far.dloss_dlogps.tolist()), (1e4, [[-1.0], [1.0]]))

    def test_padding_is_not_summed(self):
        """The third token of the chosen answer is padding: margin 0, loss log 2."""
        data = make_preferences(
            logps=np.array([[-1.0, -1, math.nan], [-2.0, -2, -2]]),
            ref_logps=np.array([[-1.0, -1, -1], [-2.0, -2, -2]]),
            mask=np.array([[1, 1, 0], [1, 1, 1]]) != 0,
        )
        self.assertAlmostEqual(evaluate_preference(PREFERENCE_ROWS["dpo"], data).loss.item(), math.log(2), 12)

    def test_bad_input(self):
        with self.assertRaisesRegex(ValueError, "wanted an even number"):
            make_preferences(logps=np.zeros((3, 2)), mask=np.ones((3, 2), dtype=bool))
        no_reference = make_preferences(logps=np.full((2, 2), -1.0), mask=np.ones((2, 2), dtype=bool))
        with self.assertRaisesRegex(ValueError, "dpo: the data have no ref_logps"):
            evaluate_preference(PREFERENCE_ROWS["dpo"], no_reference)
        with self.assertRaisesRegex(ValueError, "kto: the data have no labels"):
            evaluate_preference(PREFERENCE_ROWS["kto"], no_reference)
        labelled = make_preferences(logps=np.full((2, 2), -1.0), mask=np.ones((2, 2), dtype=bool), labels=[True, False])
        with self.assertRaisesRegex(ValueError, "simpo: the data have no pairs"):
            evaluate_preference(PREFERENCE_ROWS["simpo"], labelled)
        for wrong, message in (
            ({"beta": 0.0}, "beta: got 0.0, wanted a finite number above 0"),
            ({"beta": "0.1"}, "beta: got '0.1'"),
            ({"gamma": math.nan}, "gamma: got nan"),
            ({"sft_coef": -math.inf}, "sft_coef: got -inf"),
            ({"desirable_weight": -3}, "desirable_weight: got -3, wanted a finite number of at least 0"),
            ({"loss": "dpo"}, "loss: got 'dpo'"),
            ({"loss": "robust", "label_smoothing": 0.5}, "label_smoothing: got 0.5"),
            ({"loss": "exo"}, "exo takes its logarithm"),
            ({"loss": "aot", "divergence": "js"}, "aot sorts gaps"),
            ({"loss": "kto", "sft_coef": 0.1}, "kto has no pairs"),
            ({"loss": "kto", "tail_weight": 0.5}, "kto has no pairs"),
            ({"loss": "kto", "divergence": "js"}, "kto has no pairs"),
            ({"loss": "kto_apo", "pair_weight": "wpo"}, "kto_apo has no pairs"),
            ({"loss": "aot", "pair_weight": "wpo"}, "aot compares ranks"),
            ({"discopop_tau": 0.0}, "discopop_tau: got 0.0"),
            ({"loss": "orpo"}, "reference unused"),
        ):
            with self.subTest(wrong=wrong), self.assertRaisesRegex(ValueError, message):
                replace(PREFERENCE_ROWS["dpo"], **wrong)

    def test_sides_that_do_not_match(self):
        three, one = np.full(3, -1.0), np.full(1, -1.0)
        pair = {"chosen_logps": one, "rejected_logps": one}
        for wrong, message in (
            ({}, "logps: missing"),
            ({"chosen_logps": three, "rejected_logps": one}, r"rejected_logps: got shape \(1,\), wanted \(3,\)"),
            ({"chosen_logps": one}, "rejected_logps: missing; wanted beside chosen_logps"),
            ({"rejected_logps": one}, "chosen_logps: missing; wanted beside rejected_logps"),
            ({**pair, "ref_chosen_logps": one}, "ref_rejected_logps: missing"),
            ({**pair, "logps": three}, "logps: given both"),
        ):
            with self.subTest(wrong=list(wrong)), self.assertRaisesRegex(ValueError, message):
                make_preferences(**wrong)


if __name__ == "__main__":
    unittest.main()
