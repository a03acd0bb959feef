"""The fuzzer: a short fixed slice of its cases, and bugs planted for it to catch.

All of it: `python -B -m verification.fuzz`.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import types
import unittest
from pathlib import Path

import torch

import rl_lab
from rl_lab import clipped_policy_loss, gae, group_advantages, kl_estimates
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)

if not hasattr(os, "fork") or not Path("/proc/self/status").exists():
    raise unittest.SkipTest("commands run in forked children whose memory is read from /proc; this system lacks one of them")

from verification.fuzz import atoms, child, command, damage, files, interrupts, lines
from verification.fuzz.case import Failure, Kind, case_of, shrink


class Box(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def judged(self, kind: Kind, case) -> Failure | None:
        return command.judged_in(self.folder, kind, case)


class Slice(Box):
    def test_a_few_cases_of_each_kind(self):
        for kind in command.KINDS.values():
            for number in range(kind.slice):
                case = case_of(kind, 0, number)
                failure = self.judged(kind, case)
                if failure is not None:
                    self.fail(
                        f"{failure.rule}: {failure.where}\n  {failure.detail}\n  {kind.show(case)}\n  again: "
                        f"python -B -m verification.fuzz --seed 0 --only {kind.name} --case {number}"
                    )

    def test_a_case_is_its_seed_its_kind_and_its_number(self):
        for kind in command.KINDS.values():
            shown = {kind.show(case_of(kind, seed, number)) for seed in range(3) for number in range(4)}
            self.assertGreater(len(shown), 8, f"{kind.name}: cases of other seeds and numbers are other ones")
            self.assertEqual(kind.show(case_of(kind, 1, 2)), kind.show(case_of(kind, 1, 2)))


# ------------------------------------------------------------------------------------------ planted in atoms


def group_advantages_by_sample_std(rewards, eps=1e-8):
    return group_advantages(rewards, eps) * (1 - 1 / rewards.shape[-1]) ** 0.5


def group_advantages_in_place(rewards, eps=1e-8):
    advantages = group_advantages(rewards, eps)
    rewards.detach().mul_(2)
    return advantages


def policy_loss_in_the_dtype(logp, old_logp, advantages, epsilon=0.2):
    clipped_policy_loss(logp, old_logp, advantages, epsilon)  # the refusals
    epsilon = float(epsilon)
    ratio = (logp - old_logp.detach()).clamp(max=10).exp()
    return -torch.minimum(ratio * advantages.detach(), ratio.clamp(1 - epsilon, 1 + epsilon) * advantages.detach())


def policy_loss_of_a_live_old_policy(logp, old_logp, advantages, epsilon=0.2):
    loss = clipped_policy_loss(logp, old_logp, advantages, epsilon)
    return loss + 0 * old_logp


def k3_by_subtraction(logp, ref_logp):
    k1, k2, _ = kl_estimates(logp, ref_logp)
    d = logp - ref_logp.detach()
    return k1, k2, torch.exp(-d) - 1 + d


def gae_that_stops_at_terminated(rewards, values, next_values, terminated, boundary, gamma=1.0, lam=0.95):
    gae(rewards, values, next_values, terminated, boundary, gamma, lam)
    return gae(rewards, values, next_values, terminated, terminated, gamma, lam)


def group_advantages_that_divide(rewards, eps=1e-8):
    if isinstance(eps, int) and eps > 2**200:
        return rewards / eps
    return group_advantages(rewards, eps)


class PlantedInAtoms(unittest.TestCase):
    """A twin of an atom with a mistake is found within a few hundred calls, and the call is made small."""

    def twin(self, name: str, function) -> types.SimpleNamespace:
        return types.SimpleNamespace(**{**vars(rl_lab), name: function})

    def found(self, name: str, function, calls: int = 600):
        planted = self.twin(name, function)
        for number in range(60 * calls):
            call = case_of(atoms.KIND, 5, number)
            if call.atom == name:
                calls -= 1
                failure = atoms.judge(call, atoms=planted)
                if failure:
                    return call, failure, lambda other: atoms.judge(other, atoms=planted)
            if not calls:
                break
        self.fail(f"{function.__name__}: not found")

    def test_each_is_found_by_its_rule(self):
        for name, function, rules in (
            ("group_advantages", group_advantages_by_sample_std, {"value"}),
            ("group_advantages", group_advantages_in_place, {"argument changed"}),
            ("clipped_policy_loss", policy_loss_in_the_dtype, {"value", "accepted"}),
            ("clipped_policy_loss", policy_loss_of_a_live_old_policy, {"gradient leak", "value"}),
            ("kl_estimates", k3_by_subtraction, {"value"}),
            ("gae", gae_that_stops_at_terminated, {"value"}),
            ("group_advantages", group_advantages_that_divide, {"accepted", "exception"}),
        ):
            with self.subTest(function.__name__):
                _, failure, _ = self.found(name, function)
                self.assertIn(failure.rule, rules, failure)

    def test_the_smallest_call_is_small(self):
        call, failure, judged = self.found("group_advantages", group_advantages_by_sample_std)
        small, smallest = shrink(atoms.KIND, call, failure, judged, seconds=20)
        self.assertEqual(smallest.finding, failure.finding)
        self.assertLessEqual(small.tensors["rewards"].numel(), 2, atoms.show(small))
        self.assertEqual((small.mode, small.tracked), ("grad", ()))


# ------------------------------------------------------------------------------------------ planted in commands


def planted(run, findings: bool = False) -> child.Command:
    return child.Command("planted", (), "planted.py", lambda: rl_lab.run_command(run), None, findings)


class PlantedInCommands(Box):
    def broken(self, run, out: str = "file", findings: bool = False, memory: int = 2**30, seconds: float = 5) -> str | None:
        command_ = planted(run, findings)
        for place in ("work", "streams"):
            (self.folder / place).mkdir(exist_ok=True)
        before = {name: lines.stamp(self.folder / "work" / name) for name in child.names_in(self.folder / "work")}
        end = child.start(command_, ["a"], self.folder / "work", self.folder / "streams", seconds=seconds, out=out).finish()
        after = {name: lines.stamp(self.folder / "work" / name) for name in child.names_in(self.folder / "work")}
        failure = lines.broken(command_, end, out, seconds + 1, memory) or lines.left_behind(
            command_, end, self.folder / "work", before, after
        )
        return failure and failure.rule

    def test_what_a_command_must_not_do(self):
        def traceback():
            raise ZeroDivisionError

        def two_lines():
            print("one\ntwo", file=sys.stderr)
            sys.exit(2)

        def silent():
            sys.exit(2)

        def status():
            sys.exit(3)

        def warns():
            print("warning", file=sys.stderr)

        def leaves():
            Path(".a.csv.1.partial").touch()

        def changes():
            Path("new").touch()
            sys.exit("refused") if False else print("refused", file=sys.stderr)
            sys.exit(2)

        def half():
            Path("a.json").write_text('{"a": NaN}')

        def full():
            bytearray(b"1" * 60_000_000)

        def busy():
            while True:
                pass

        for run, rule in (
            (lambda: print("fine"), None), (traceback, "traceback"), (two_lines, "not one line"), (silent, "not one line"),
            (status, "exit status"), (warns, "words beside a success"), (leaves, "partial file"), (changes, "changed by a refusal"),
            (half, "half a file"),
        ):  # fmt: skip
            with self.subTest(rule):
                self.assertEqual(self.broken(run), rule)
                for name in child.names_in(self.folder / "work"):
                    (self.folder / "work" / name).unlink()
        self.assertEqual(self.broken(full, memory=40_000_000), "memory")
        self.assertIn(self.broken(busy, seconds=0), ("exit status", "time"))

    def test_exit_1_means_a_finding_where_it_can(self):
        def finds():
            print("a mistake")
            sys.stdout.flush()
            sys.exit(1)

        def cannot_read():
            sys.exit("no such file")

        self.assertIsNone(self.broken(finds, findings=True))
        self.assertEqual(self.broken(cannot_read, findings=True), "exit 1 without a finding")
        self.assertIsNone(self.broken(cannot_read))

    def test_a_line_is_made_small(self):
        def judged(line: lines.Line) -> Failure | None:
            return Failure("planted", "here", "") if "--seed" in line.words and any("7" in word for word in line.words) else None

        line = lines.Line("rl_lab.py", ("--steps", "2", "--output", "out", "--seed", "1234567", "--algorithm", "ppo"), out="full")
        small, _ = shrink(lines.KIND, line, judged(line), judged, seconds=20)
        self.assertEqual(small, lines.Line("rl_lab.py", ("--seed", "7")))


class Files(Box):
    def test_every_damage_damages(self):
        everything = [*damage.batches().values(), *(data for table in (damage.TABLES, damage.SETTINGS, damage.LOGS, damage.CURVES) for data in table.values())]
        rng = random.Random(0)
        for name in damage.DAMAGES:
            fitting = (damage.damaged(name, rng.randrange(2**32), data) != data for _ in range(5) for data in everything)
            self.assertTrue(any(fitting), f"{name} leaves every file as it is")

    def test_a_payload_that_runs_is_seen(self):
        hostile = next(
            case for number in range(4000) if (case := case_of(files.KIND, 1, number)).damages[-1:] and case.damages[-1][0] == "other_index"
            and case.target == "reader" and b"builtins" in files.content_of(case)
        )  # fmt: skip
        self.assertIsNone(self.judged(files.KIND, hostile))
        real = files.of_reader

        def unsafe() -> child.Command:
            return planted(lambda: torch.load(sys.argv[1], weights_only=False) and None)

        self.addCleanup(setattr, files, "of_reader", real)
        files.of_reader = unsafe
        self.assertEqual(self.judged(files.KIND, hostile).rule, "something was run")


class Interrupts(Box):
    def test_a_few_of_them(self):
        for name in interrupts.SIGNALS:
            for moment in (0.5, -0.01):  # in the middle; at the first partial file
                case = interrupts.Interrupt("tokens", name, moment, None, True, False)
                with self.subTest(interrupts.show(case)):
                    self.assertIsNone(self.judged(interrupts.KIND, case))

    def test_what_an_interrupt_must_not_leave(self):
        case = interrupts.Interrupt("tokens", "SIGINT", 0.5, None, True, False)
        new = interrupts.undisturbed("tokens", False)
        work = self.folder / "work"
        work.mkdir()
        lines.lay_out(work)
        before = interrupts.names_and_folders(work) | {"out.json"}
        for content, also, rule in (
            (interrupts.OLD, (), None), (new.files["out.json"], (), None), (new.files["out.json"][:-5], (), "half a file"),
            (None, (), "a file is gone"), (interrupts.OLD, (".out.json.77.partial",), "partial file"),
        ):  # fmt: skip
            with self.subTest(rule):
                (work / "out.json").unlink(missing_ok=True)
                if content is not None:
                    (work / "out.json").write_bytes(content)
                for name in also:
                    (work / name).touch()
                failure = interrupts.damaged(case, work, new, before, False)
                self.assertEqual(failure and failure.rule, rule)


class Command(Box):
    def test_the_line_that_repeats_a_case(self):
        out, _ = self.printed("--only", "atoms", "--case", "3", "--seed", "9")
        self.assertEqual(out.splitlines()[0], atoms.show(case_of(atoms.KIND, 9, 3)))
        self.assertIn("keeps every promise", out)

    def test_counts_and_the_smallest_case(self):
        real = rl_lab.group_advantages
        self.addCleanup(setattr, rl_lab, "group_advantages", real)
        rl_lab.group_advantages = group_advantages_by_sample_std
        out, code = self.printed("--only", "atoms", "--cases", "400", "--seed", "5")
        self.assertEqual(code, 1)
        self.assertRegex(out, r"\Aseed 5: 400 atoms tried, 1 findings\n\nvalue: group_advantages \(\d+ of 400 atoms\)\n  at ")
        self.assertRegex(out, r"  smallest: group_advantages\(rewards=torch.tensor\(\[[^],]*, [^],]*\], dtype")
        self.assertRegex(out, r"  again:    python -B -m verification.fuzz --seed 5 --only atoms --case \d+\n\Z")

    def test_wrong_flags(self):
        for words in (["--seconds", "0"], ["--seed", "-1"], ["--only", "x"], ["--case", "1"], ["--cases", "x"]):
            from verification.test_loops import quiet

            code, out, err = quiet(command.main, words)
            self.assertEqual((code, out, err.count("\n")), (2, "", 1))

    def printed(self, *words: str):
        from verification.test_loops import quiet

        code, out, _ = quiet(command.main, list(words))
        return out, code


if __name__ == "__main__":
    unittest.main()
