"""A step over ranks and micro-batches: each mistake planted in several splits is named, or is honestly a tie where it hides.

The planted losses are written as a trainer writes them, one number a micro-batch, and differentiated by autograd; nothing
here uses the denominators that the audit compares with.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from extensions.audit import parse_declared
from extensions.audit.command import main
from extensions.audit.say.report import Report
from extensions.audit.step import verdict
from extensions.audit.catalogue import STEP_MISTAKES
from extensions.audit.step.folder import read_step
from extensions.audit.step.verdict import audit_step
from extensions.record import save
from rl_lab import FileProblem
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)

SPLITS = ((1, 1), (1, 2), (2, 1), (2, 2), (3, 2))
LENGTHS = (10, 2, 3, 7, 5, 1, 9, 4, 6, 8, 2, 5)


def loss_of(mistake: str, tokens: torch.Tensor, mask: torch.Tensor, about: dict, kind: str, averaged: bool) -> torch.Tensor:
    """What a rank calls backward on for one micro-batch, as a trainer writes it.

    about: W, M, N, B (step), n_r, b_r (rank), budget. Averaging gives 1/W later, so a right loss multiplies by W.
    """
    W, M = about["W"], about["M"]
    times = W if averaged else 1
    if kind == "tokens":
        total, own, rank, step = tokens[mask].sum(), mask.sum(), about["n_r"], about["N"]
    elif kind == "answers":
        total, own, rank, step = (tokens * mask).sum(1).div(mask.sum(1)).sum(), len(mask), about["b_r"], about["B"]
    else:
        C = about["budget"]
        total, own, rank, step = tokens[mask].sum(), len(mask) * C, about["b_r"] * C, about["B"] * C
    if mistake == "right":
        return total * times / step
    if mistake == "mean_of_means":
        return total / own / M
    if mistake == "local_count":
        return total / rank
    if mistake == "forgot_world_size":
        return total / step if averaged else total / step / W
    if mistake == "double_division":
        return total * times / step / M
    if mistake == "no_micro_division":
        return total / own
    assert mistake == "local_padded_width"
    return total * times / (about["B"] * mask.shape[1])


def planted(mistake, W, M, kind="tokens", averaged=True, lengths=LENGTHS, budget=12) -> list[dict[str, np.ndarray]]:
    """The files of one step of 12 answers, every file padded to its own longest answer."""
    draw = torch.Generator().manual_seed(11)
    lengths = torch.tensor(lengths)
    A = torch.randn(12, generator=draw, dtype=torch.float64)
    old = -2 + 0.2 * torch.randn(12, 12, generator=draw, dtype=torch.float64)
    new = old + 0.25 * torch.randn(12, 12, generator=draw, dtype=torch.float64)
    files, per = [], 12 // (W * M)
    for rank in range(W):
        of_rank = lengths[rank * per * M : (rank + 1) * per * M]
        for micro in range(M):
            rows = slice((rank * M + micro) * per, (rank * M + micro + 1) * per)
            mask = torch.arange(12) < lengths[rows, None]
            mask = mask[:, : int(lengths[rows].max())]
            width = mask.shape[1]
            logps = new[rows, :width].clone().requires_grad_()
            ratio, own = (logps - old[rows, :width]).exp(), A[rows, None]
            tokens = -torch.minimum(ratio * own, ratio.clamp(0.8, 1.2) * own)
            about = dict(W=W, M=M, N=int(lengths.sum()), B=12, n_r=int(of_rank.sum()), b_r=per * M, budget=budget)
            loss = loss_of(mistake, tokens, mask, about, kind, averaged)
            loss.backward()
            files.append(
                dict(
                    logps=logps, old_logps=old[rows, :width], mask=mask, advantages=A[rows], loss=loss,
                    dloss_dlogps=logps.grad, rank=rank, world_size=W, micro_batch=micro, accumulation_steps=M,
                    clip_low=0.2, clip_high=0.2,
                    **({"budget": budget} if kind == "constant" else {}),
                )
            )
    return files


class StepTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def write(self, files: list[dict]) -> None:
        for old in self.folder.iterdir():
            old.unlink()
        for file in files:
            save(self.folder / f"rank{file['rank']}_mb{file['micro_batch']}.npz", **file)

    def step(self, files: list[dict], row: str | None, averaged: bool = True, whole: bool = False):
        """The report; the audit of each file alone is left out (it has tests of its own) unless `whole`."""
        self.write(files)
        declared, numbers = parse_declared(row, ())
        with contextlib.nullcontext() if whole else mock.patch.object(verdict, "audit", lambda *_: Report()):
            return audit_step(read_step(self.folder), declared, numbers, averaged)



class Denominators(StepTest):
    def assert_named_or_tied(self, mistake, W, M, kind, averaged, lengths=LENGTHS):
        wrong, right = (planted(name, W, M, kind, averaged, lengths) for name in (mistake, "right"))
        differs = any(
            float((a["dloss_dlogps"] - b["dloss_dlogps"]).norm()) > 1e-9 * float(b["dloss_dlogps"].norm())
            for a, b in zip(wrong, right)
        )
        report = self.step(wrong, self.row(kind), averaged)
        about = f"{mistake}, {W} x {M}, {kind}, averaged {averaged}: {report.lines}"
        if differs:
            self.assertIs(report.agrees, False, about)
            self.assertIn(mistake, report.fits, about)
            self.assertEqual(report.findings[0].severity, "mistake")
            said = report.findings[0].name == mistake or mistake in report.findings[0].evidence
            self.assertTrue(said, about)
        else:
            self.assertIs(report.agrees, True, about)
            self.assertEqual(report.named(), [], about)
            self.assertIn("cannot tell from this split", " ".join(report.lines), about)
            self.assertIn(mistake.replace("_", " "), " ".join(report.lines), about)
        return differs

    def row(self, kind: str) -> str:
        return {"tokens": "dapo@trl-1.16.0", "answers": "grpo", "constant": "dr_grpo@trl-1.16.0"}[kind]

    def test_every_mistake_in_every_split(self):
        names = ("mean_of_means", "local_count", "forgot_world_size", "double_division", "no_micro_division")
        for averaged in (True, False):
            for kind in ("tokens", "answers", "constant"):
                for name in names + (("local_padded_width",) if kind == "constant" else ()):
                    with self.subTest(name, kind=kind, averaged=averaged):
                        seen = [self.assert_named_or_tied(name, W, M, kind, averaged) for W, M in SPLITS]
                        self.assertFalse(seen[0] and name != "local_padded_width", "1 x 1: nothing to get wrong")
                        # With as many answers in each file, a count of answers is the same everywhere: then it is a tie.
                        if kind == "tokens" or name not in ("mean_of_means", "local_count"):
                            self.assertTrue(any(seen), "a mistake that no split shows proves nothing")

    def test_right_steps_are_right(self):
        for averaged in (True, False):
            for kind in ("tokens", "answers", "constant"):
                for W, M in SPLITS:
                    with self.subTest(kind=kind, W=W, M=M, averaged=averaged):
                        report = self.step(planted("right", W, M, kind, averaged), self.row(kind), averaged)
                        self.assertIs(report.agrees, True)
                        self.assertEqual(report.findings, [])
                        self.assertLess(report.relative_error, 1e-12)

    def test_ranks_of_one_length_hide_the_mean_of_means(self):
        self.assertFalse(self.assert_named_or_tied("mean_of_means", 2, 2, "tokens", True, (4,) * 12))

    def test_two_ranks_by_hand(self):
        """A 1 and -1 on answers of 10 and 100 tokens, r = 1: right is -1/110 a token, a mean of means -1/(2 * 10)."""
        files = []
        for rank, (length, A) in enumerate(((10, 1.0), (100, -1.0))):
            shape = (1, length)
            files.append(
                dict(
                    logps=np.full(shape, -1.0), old_logps=np.full(shape, -1.0), mask=np.ones(shape),
                    advantages=np.array([A]), loss=-A, dloss_dlogps=np.full(shape, -A / length), rank=rank,
                    world_size=2, micro_batch=0, accumulation_steps=1,
                )
            )
        report = self.step(files, "dapo@trl-1.16.0")
        self.assertEqual([round(s.denominator, 9) for s in report.solved], [20.0, 200.0], "W * T_r = 2 * 10 and 2 * 100")
        self.assertEqual(report.named(), ["mean_of_means"])

    def test_what_backward_brought_counts(self):
        """A framework that halves the loss of two micro-batches: dloss_dlogps looks right, backward_dlogps does not."""
        files = planted("right", 1, 2)
        halved = [file | {"backward_dlogps": file["dloss_dlogps"] / 2} for file in files]
        self.assertEqual(self.step(halved, "dapo@trl-1.16.0").named(), ["double_division"])

    def test_a_row_whose_trainer_takes_micro_batch_means_is_warned_of(self):
        """TRL's bnpo is a mean of means by design: exit 0, and the sentence says that the split changes the objective."""
        report = self.step(planted("mean_of_means", 2, 2), "bnpo@trl-1.16.0")
        self.assertEqual([(f.name, f.severity) for f in report.findings], [("mean_of_means", "warning")])

    def test_a_share_of_the_generation_batch_is_a_convention(self):
        """TRL's dapo, one generation batch of 100 tokens for two steps: each divides by 100 / 2, whatever its own tokens are."""
        files = planted("right", 1, 1)
        N = sum(LENGTHS)
        more = dict(num_items_in_batch=100, steps_per_generation=2, dloss_dlogps=files[0]["dloss_dlogps"] * N / 50)
        report = self.step([files[0] | more], "dapo@trl-1.16.0")
        self.assertEqual(report.named(), [])
        self.assertIn("share of the generation batch", " ".join(report.lines))
        report = self.step([files[0] | more | {"num_items_in_batch": 90}], "dapo@trl-1.16.0")
        self.assertEqual(report.named(), ["step_not_reproduced"])

    def test_sum_where_mean_was_declared_is_no_silence(self):
        report = self.step(planted("right", 2, 2, averaged=False), "dapo@trl-1.16.0", averaged=True)
        self.assertEqual(report.named(), ["forgot_world_size"], "averaging a loss that was made for a sum")

    def test_a_gradient_of_something_else_is_not_named(self):
        files = planted("right", 2, 2)
        files[1]["dloss_dlogps"] = files[1]["dloss_dlogps"] * 1.37
        self.assertEqual(self.step(files, "dapo@trl-1.16.0").named(), ["step_not_reproduced"])


class Pairs(StepTest):
    def files(self, sizes, divide) -> list[dict]:
        """DPO, beta .5, one rank a file: loss = sum of -log sigmoid(beta D) over its pairs, divided by divide(pairs)."""
        draw = torch.Generator().manual_seed(3)
        files = []
        for rank, P in enumerate(sizes):
            logps = (-1 - torch.rand(2 * P, 4, generator=draw, dtype=torch.float64)).requires_grad_()
            ref = -1 - torch.rand(2 * P, 4, generator=draw, dtype=torch.float64)
            (c, r), (ref_c, ref_r) = logps.sum(1).chunk(2), ref.sum(1).chunk(2)
            loss = -torch.nn.functional.logsigmoid(0.5 * (c - r - ref_c + ref_r)).sum() / divide(P)
            loss.backward()
            sums = dict(chosen_logps=c, rejected_logps=r, ref_chosen_logps=ref_c, ref_rejected_logps=ref_r)
            files.append(
                dict(
                    logps=logps, ref_logps=ref, mask=np.ones((2 * P, 4)), beta=0.5, loss=loss, dloss_dlogps=logps.grad,
                    rank=rank, world_size=len(sizes), micro_batch=0, accumulation_steps=1, **sums,
                )
            )
        return files

    def test_pairs_of_unequal_ranks(self):
        """Ranks of 1 and 3 pairs, averaged: right divides each rank's sum by 4 / 2; a mean a rank divides by 1 and 3."""
        for row in ("dpo", None):
            right = self.step(self.files((1, 3), lambda P: 4 / 2), row)
            self.assertEqual((right.agrees, right.kind, right.findings), (True, "pairs", []))
            wrong = self.step(self.files((1, 3), lambda P: P), row)
            self.assertEqual([round(s.denominator, 6) for s in wrong.solved], [2.0, 6.0])
            self.assertEqual(wrong.named(), ["mean_of_means"])
        hidden = self.step(self.files((2, 2), lambda P: P), "dpo")
        self.assertIs(hidden.agrees, True, "equal ranks: the mean of means is the mean")
        self.assertIn("mean of means", " ".join(hidden.lines))


class AdvantagesOfTheStep(StepTest):
    def files(self, rewards, groups, local: bool, scale: str) -> list[dict]:
        """Two ranks of half the rows each; advantages from whole groups or batch, or from each rank's part."""
        R, ids = np.array(rewards), np.array(groups)
        half = len(R) // 2
        parts = [slice(0, half), slice(half, None)]

        def rule(R, ids):
            if scale == "batch":
                return (R - R.mean()) / (R.std(ddof=1) + 1e-8)
            mean = np.array([R[ids == i].mean() for i in ids])
            std = np.array([R[ids == i].std() for i in ids])
            return (R - mean) / (std + 1e-8)

        whole = rule(R, ids)
        return [
            dict(
                mask=np.ones((half, 2)), rewards=R[part], group_ids=ids[part], rank=rank, world_size=2, micro_batch=0,
                advantages=rule(R[part], ids[part]) if local else whole[part], logps=np.full((half, 2), -1.0),
            )
            for rank, part in enumerate(parts)
        ]

    def test_group_split_over_two_ranks(self):
        """R = 1 0 0 0, split 2 + 2: halves give 1 -1 0 0, the whole group 1.7321 -.5774 -.5774 -.5774."""
        rewards, groups = [1.0, 0.0, 0.5, 0.0, 0.0, 0.2, 1.0, 0.7], [0, 0, 1, 1, 0, 0, 1, 1]
        local = self.step(self.files(rewards, groups, True, "group"), "grpo")
        self.assertEqual(local.named(), ["local_group_statistics"])
        self.assertEqual(self.step(self.files(rewards, groups, False, "group"), "grpo").named(), [])

    def test_groups_that_are_whole_on_their_rank_hide_it(self):
        report = self.step(self.files([1.0, 0.0, 0.5, 0.1, 0.3, 0.9], [0, 0, 0, 1, 1, 1], True, "group"), "grpo")
        self.assertEqual(report.named(), [])
        self.assertIn("cannot tell local_group_statistics", " ".join(report.lines))

    def test_whitening_over_one_rank(self):
        rewards = [1.0, 1.0, 1.0, -1.0, -1.0, 2.0, -0.5, 0.3, 0.7, 0.1]
        for local in (True, False):
            files = self.files(rewards, list(range(10)), local, "batch")
            for file in files:
                del file["group_ids"]
            report = self.step(files, None)
            self.assertEqual(report.named(), ["local_whitening"] if local else [])


class Clip(StepTest):
    def files(self, taken, own=((3.0, 4.0), (0.3, -0.4)), norm=1.0):
        files = planted("right", 2, 1)
        more = dict(step_gradient=np.array(taken), max_grad_norm=norm)
        return [file | more | dict(rank_gradient=np.array(g)) for file, g in zip(files, own)]

    def test_by_hand(self):
        """(3, 4) and (.3, -.4), norm 1: mean (1.65, 1.8), clipped (.675725, .737154); clipped first (.45, .2)."""
        row = "dapo@trl-1.16.0"
        self.assertEqual(self.step(self.files((0.45, 0.2)), row).named(), ["clip_before_reduce"])
        length = np.hypot(1.65, 1.8)
        report = self.step(self.files((1.65 / length, 1.8 / length)), row)
        self.assertEqual(report.named(), [])
        self.assertIn("after the reduction", " ".join(report.lines))
        report = self.step(self.files((1.65, 1.8), norm=10.0), row)
        self.assertIn("cannot tell clip_before_reduce", " ".join(report.lines), "nothing is clipped: both orders agree")


class FolderAndCommand(StepTest):
    def run_main(self, *arguments: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main([str(self.folder), *arguments])
                status = 0
            except SystemExit as stop:
                status = stop.code or 0
        return status, out.getvalue(), err.getvalue()

    def test_the_command_with_and_without_a_declared_row(self):
        path = self.folder / "report.json"
        self.write(planted("right", 2, 2))
        status, out, err = self.run_main("--declared", "dapo@trl-1.16.0")
        self.assertEqual((status, err), (0, ""))
        self.assertIn("add up to the objective on the joined batch", out)
        status, out, _ = self.run_main("--json", str(path))
        self.assertEqual(status, 0, out)
        document = json.loads(path.read_text())
        self.assertIs(document["step"]["agrees"], True)
        self.assertEqual(len(document["files"]), 4)
        self.assertEqual(document["findings"], [])
        self.write(planted("mean_of_means", 2, 2))
        status, out, _ = self.run_main("--declared", "dapo@trl-1.16.0")
        self.assertEqual(status, 1)
        self.assertIn("MISTAKE  mean_of_means", out)
        status, out, _ = self.run_main()
        self.assertEqual(status, 0, "undeclared it may be the trainer's convention: a warning")
        self.assertIn("WARNING  mean_of_means", out)

    def test_folders_that_are_no_step(self):
        files = planted("right", 2, 2)
        for change, words in (
            (lambda f: f[:3], "rank1_mb1 is missing"),
            (lambda f: [x | {"step": i} for i, x in enumerate(f)], "files of two steps"),
            (lambda f: [x | {"world_size": 1} for x in f], "files of two runs"),
        ):
            self.write(change(files))
            status, _, err = self.run_main()
            self.assertEqual((status, err.count("\n")), (2, 1), err)
            self.assertIn(words, err)
        self.write([])
        (self.folder / "step_000003").mkdir()
        self.assertIn("audit one of them, step_000003", self.run_main()[2])
        (self.folder / "step_000003").rmdir()

    def test_rank_and_micro_batch_from_the_name(self):
        files = planted("right", 2, 1)
        for file in files:
            name = f"rank{file.pop('rank')}_mb{file.pop('micro_batch')}.npz"
            save(self.folder / name, **file)
        self.assertEqual([(p.rank, p.micro_batch) for p in read_step(self.folder)], [(0, 0), (1, 0)])
        save(self.folder / "other.npz", **files[0])
        with self.assertRaisesRegex(FileProblem, "no rank inside"):
            read_step(self.folder)

    def test_every_mistake_of_the_step_has_words(self):
        for name, mistake in STEP_MISTAKES.items():
            self.assertTrue(mistake.what and mistake.advice, name)


if __name__ == "__main__":
    unittest.main()
