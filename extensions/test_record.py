"""Recording: what is written, that training stays as it was, and that the audit reads the files. No trainer is needed."""

from __future__ import annotations

import contextlib
import io
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import rl_lab
from extensions.audit import audit, parse_declared, read_recording
from extensions.record import config_numbers, gradients, record, record_loss, record_loss_function, save
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def stored(self, *parts: str) -> dict[str, np.ndarray]:
        with np.load(self.folder.joinpath(*parts), allow_pickle=False) as file:
            return dict(file)

    @contextlib.contextmanager
    def said(self, *words: str, lines: int = 1):
        err = io.StringIO()
        with contextlib.redirect_stderr(err):
            yield
        self.assertEqual(err.getvalue().count("\n"), lines, err.getvalue())
        for word in words:
            self.assertIn(word, err.getvalue())


class Save(Folder):
    def test_tensors_numbers_and_text(self):
        half = torch.tensor([1.0, 2.5], dtype=torch.bfloat16, requires_grad=True)
        save(
            self.folder / "new" / "a.npz", logps=half, beta=0.5, uid=np.array(["p", "q"], dtype=object), ref_logps=None,
            mask=torch.tensor([True, False]),
        )
        made = self.stored("new", "a.npz")
        self.assertEqual(sorted(made), ["beta", "logps", "mask", "uid"], "None is left out")
        self.assertEqual((made["logps"].dtype, made["logps"].tolist()), (np.float32, [1.0, 2.5]))
        self.assertEqual((made["uid"].tolist(), float(made["beta"])), (["p", "q"], 0.5))

    def test_what_cannot_be_written_is_refused_and_leaves_the_old_file(self):
        save(self.folder / "a.npz", loss=1.0)
        for error, name, value in ((TypeError, "a.npz", object()), (TypeError, "a.npz", [{}]), (ValueError, "a.pt", 2.0)):
            with self.assertRaises(error):
                save(self.folder / name, loss=value)
        with self.assertRaises(rl_lab.FileProblem):
            save(self.folder / "a.npz" / "b.npz", loss=2.0)
        self.assertEqual(float(self.stored("a.npz")["loss"]), 1.0)
        self.assertEqual([path.name for path in self.folder.iterdir()], ["a.npz"], "no partial file is left")


class Gradients(unittest.TestCase):
    def test_by_hand(self):
        """L = (2 l0 + 3 l1) / 2: slopes 1 and 1.5. An entropy that L does not read has slope 0; a mask has none."""
        logps, entropies = (torch.tensor([[-1.0, -2.0]], requires_grad=True) for _ in range(2))
        loss = (logps * torch.tensor([2.0, 3.0])).sum() / 2
        made = gradients(loss, {"log_prob": logps, "entropies": entropies, "mask": torch.ones(1, 2), "beta": 0.1})
        self.assertEqual(sorted(made), ["dloss_dentropies", "dloss_dlog_prob"])
        self.assertEqual(made["dloss_dlog_prob"].tolist(), [[1.0, 1.5]], "d/dl of (2 l0 + 3 l1) / 2 is (1, 1.5)")
        self.assertEqual(made["dloss_dentropies"].tolist(), [[0.0, 0.0]])
        loss.backward()
        self.assertEqual(logps.grad.tolist(), [[1.0, 1.5]], "once, by backward(): recording adds nothing to .grad")

    def test_a_loss_of_other_tensors_is_refused(self):
        logps = torch.tensor([[-1.0]], requires_grad=True)
        for loss, words in ((torch.tensor(1.0), "not detached"), ((logps * 1).detach().requires_grad_() * 2, "not depend")):
            with self.assertRaisesRegex(ValueError, words):
                gradients(loss.sum(), {"logps": logps})


def verl_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None):
    """verl's clipped loss with its dual clip, and the mean over all ranks' tokens: sum / batch_num_tokens * dp_size."""
    ratio = (log_prob - old_log_prob).clamp(-20, 20).exp()
    clipped = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    losses = torch.maximum(-advantages * ratio, -advantages * clipped)
    losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * config.clip_ratio_c), losses)
    count = config.global_batch_info["batch_num_tokens"]
    return (losses * response_mask).sum() / count * config.global_batch_info["dp_size"], {"pg_clipfrac": 0.0}


def without_minimum(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None):
    """The usual slip: only the clipped term, without the minimum of both."""
    ratio = (log_prob - old_log_prob).exp().clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    return (-advantages * ratio * response_mask).sum() / config.global_batch_info["batch_num_tokens"], {}


class LossFunction(Folder):
    def setUp(self):
        super().setUp()
        draw = torch.Generator().manual_seed(5)
        self.weight = (0.3 * torch.randn(6, 9, generator=draw, dtype=torch.float64)).requires_grad_()
        self.mask = torch.arange(9) < torch.tensor([9, 4, 7, 2, 5, 8])[:, None]
        self.old = -2 + 0.3 * torch.randn(6, 9, generator=draw, dtype=torch.float64)
        self.advantages = torch.randn(6, 1, generator=draw, dtype=torch.float64).expand(6, 9)
        info = {"dp_size": 1, "batch_num_tokens": int(self.mask.sum()), "global_batch_size": None}
        self.config = SimpleNamespace(
            clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0, global_batch_info=info
        )

    def call(self, function, **more):
        logps = torch.where(self.mask, self.old + self.weight, -1.0)
        return function(self.old, logps, self.advantages, self.mask, config=self.config, **more)

    def audited(self, *parts: str, declared: str | None = None):
        row, numbers = parse_declared(declared, ())
        return audit(read_recording(self.folder.joinpath(*parts)), row, numbers)

    def test_the_same_result_and_the_right_row(self):
        recording = record_loss_function(verl_loss, self.folder)
        loss, metrics = self.call(recording, loss_agg_mode="token-mean")
        self.assertEqual((loss.item(), metrics), (self.call(verl_loss)[0].item(), {"pg_clipfrac": 0.0}))
        report = self.audited("step_000000", "rank0_mb0.npz", declared="grpo@verl-0.9.1")
        self.assertEqual([f.name for f in report.findings if f.severity != "note"], [])
        self.assertIs(report.gradient["agrees"], True)
        best = report.loss["matches"][0]
        self.assertIn("grpo@verl-0.9.1", best["rows"])
        self.assertEqual((best["clip_low"], best["clip_high"], best["ratio_cap"]), (0.2, 0.28, 3.0))

    def test_a_planted_mistake_is_named(self):
        self.call(record_loss_function(without_minimum, self.folder))
        self.assertIn("clip_without_min", self.audited("step_000000", "rank0_mb0.npz", declared="grpo@verl-0.9.1").named())

    def test_steps_micro_batches_and_more_arrays(self):
        asked = []
        recording = record_loss_function(
            verl_loss, self.folder, every=2, accumulation_steps=2, uid=lambda: asked.append(1) or list("aabbcc")
        )
        for _ in range(6):
            self.call(recording)
        with torch.no_grad():
            self.call(recording)  # an evaluation is no micro-batch
        names = sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*.npz"))
        self.assertEqual(names, [f"step_00000{step}/rank0_mb{part}.npz" for step in (0, 2) for part in (0, 1)])
        made = self.stored("step_000002", "rank0_mb1.npz")
        place = {"step": 2, "micro_batch": 1, "accumulation_steps": 2, "rank": 0, "world_size": 1}
        self.assertEqual({name: int(made[name]) for name in place}, place)
        self.assertEqual((made["uid"].tolist(), len(asked)), (list("aabbcc"), 4))

    def test_config_of_both_shapes(self):
        wanted = {"clip_low": 0.2, "clip_high": 0.28, "ratio_cap": 3.0, "world_size": 1.0, "num_items_in_batch": 35.0}
        self.assertEqual(config_numbers(self.config), wanted)
        self.assertEqual(config_numbers(vars(self.config)), wanted)
        self.assertEqual(config_numbers({"clip_ratio": 0.1}), {"clip_low": 0.1, "clip_high": 0.1})
        self.assertEqual(config_numbers(None), {})


class Loop(Folder):
    def steps(self, recorded: bool, divide: float = 1.0) -> torch.Tensor:
        """Two steps of SGD on a table of logits; -> the table after them."""
        table = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
        actions, advantages = torch.tensor([[0], [3], [1]]), torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
        for step in range(2):
            logps = table.log_softmax(1).gather(1, actions)
            loss = -(advantages[:, None] * (logps - logps.detach()).exp()).mean()
            if recorded:
                record_loss(
                    self.folder, loss, step=step, logps=logps, old_logps=logps.detach(), advantages=advantages,
                    mask=torch.ones(3, 1), accumulation_steps=int(divide),
                )
            (loss / divide).backward()
            with torch.no_grad():
                table -= 0.5 * table.grad
                table.grad = None
        return table.detach()

    def test_training_is_the_same_with_and_without(self):
        self.assertTrue(torch.equal(self.steps(True), self.steps(False)))

    def test_what_backward_brought_is_kept_where_it_differs(self):
        """A / 3 is the slope of the loss; a loop that divides by 2 before backward() brings half of it."""
        self.steps(True, divide=2)
        made = self.stored("step_000001", "rank0_mb0.npz")
        self.assertLess(np.abs(made["dloss_dlogps"][:, 0] + np.array([1, -0.5, 2]) / 3).max(), 1e-15)
        self.assertLess(np.abs(made["backward_dlogps"] - made["dloss_dlogps"] / 2).max(), 1e-15)
        self.steps(True)
        self.assertNotIn("backward_dlogps", self.stored("step_000001", "rank0_mb0.npz"))

    def test_a_failure_is_said_once_and_the_training_goes_on(self):
        wanted = self.steps(True)
        for step in (0, 1):
            path = self.folder / f"step_00000{step}" / "rank0_mb0.npz"
            path.unlink()
            path.mkdir()
        with self.said("nothing recorded", "step_000000", "the training goes on", lines=2):
            self.assertTrue(torch.equal(self.steps(True), wanted))
        with self.said(lines=0):
            self.assertTrue(torch.equal(self.steps(True), wanted))

    def test_a_detached_loss_is_said(self):
        logps = torch.zeros(1, 1, requires_grad=True)
        with self.said("not detached"):
            self.assertIsNone(record_loss(self.folder, logps.sum().detach(), step=0, logps=logps))
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_wrong_arguments_are_errors_before_the_training(self):
        loss = torch.zeros(1, 1, requires_grad=True).sum()
        for every in (0, -1, 1.5, True):
            with self.assertRaisesRegex(ValueError, "every: got"):
                record_loss(self.folder, loss, step=0, every=every)
        (self.folder / "file").write_text("")
        with self.assertRaises(rl_lab.FileProblem):
            record_loss_function(verl_loss, self.folder / "file")
        for wrong in (dict, unittest.TestCase):
            with self.assertRaisesRegex(TypeError, "GRPOTrainer"):
                record(wrong, self.folder)
        with self.assertRaisesRegex(TypeError, "before it is built"):
            record(wrong(), self.folder)


if __name__ == "__main__":
    unittest.main()
