"""Files that commands read and write, and how commands end: links, modes, leftovers, strange names, signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

import plot_results
import ppo_chain
import rl_lab
import token_objectives
from rl_lab import FileProblem, check_writable, read_regular_file, replace_files
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)
from verification.test_loops import quiet

LAB = Path(rl_lab.__file__).resolve().parent
BYTES_NAME = os.fsdecode(b"name\xff")

if os.name == "nt":
    raise unittest.SkipTest("links, modes, pipes and signals are those of a POSIX system")


class FolderCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name).resolve()

    def names(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))


# ------------------------------------------------------------------------------------------ reading


class Reading(FolderCase):
    def test_a_regular_file_of_bounded_size(self):
        path = self.folder / "file"
        path.write_bytes(b"12345")
        self.assertEqual(read_regular_file(path, 5), b"12345")
        self.assertEqual(read_regular_file(str(path), 6), b"12345")
        with self.assertRaisesRegex(FileProblem, "file: holds 5 bytes; wanted at most 4"):
            read_regular_file(path, 4)
        (self.folder / "link").symlink_to(path)
        self.assertEqual(read_regular_file(self.folder / "link", 5), b"12345")

    def test_nothing_else_is_opened(self):
        os.mkfifo(self.folder / "fifo")
        (self.folder / "loop").symlink_to(self.folder / "loop")
        (self.folder / "zero").symlink_to("/dev/zero")
        with mock.patch("builtins.open", side_effect=AssertionError("opened")):
            for name, words in (
                ("fifo", "is a pipe or a device; wanted a regular file"),
                ("zero", "is a pipe or a device"),
                ("", "is a directory"),
                ("nowhere", "No such file"),
                ("loop", "symbolic links"),
                ("n" * 300, "too long"),
                ("a\0b", "not a usable file name"),
            ):
                with self.subTest(name), self.assertRaisesRegex(FileProblem, words):
                    read_regular_file(str(self.folder / name), 100)

    def test_a_file_that_is_exchanged_or_grows_meanwhile(self):
        path, fifo = self.folder / "file", self.folder / "fifo"
        path.write_bytes(b"12345")
        os.mkfifo(fifo)
        about = os.stat(path)
        with mock.patch.object(rl_lab.os, "stat", return_value=about):  # what stood there when it was asked
            with self.assertRaisesRegex(FileProblem, "is a pipe or a device"):
                read_regular_file(fifo, 100)
        with mock.patch.object(rl_lab.os, "fstat", return_value=about):
            path.write_bytes(b"1" * 50)
            with mock.patch.object(rl_lab.os, "stat", return_value=about):
                with self.assertRaisesRegex(FileProblem, "grows beyond 10 bytes"):
                    read_regular_file(path, 10)

    def test_reward_tables_that_are_no_files_or_too_large(self):
        os.mkfifo(self.folder / "fifo")
        large = self.folder / "large"
        large.write_bytes(b"")
        os.truncate(large, rl_lab.REWARD_TABLE_BYTES + 1)
        hostile = self.folder / "hostile"
        hostile.write_text("[" + "[]," * 400_000 + "[]]")
        for path, words in (
            ("/dev/zero", "is a pipe or a device"),
            (self.folder / "fifo", "is a pipe or a device"),
            (large, "holds 10000001 bytes; wanted at most 10000000"),
            (hostile, "wanted a JSON list of rows"),
        ):
            with self.subTest(words), self.assertRaisesRegex(FileProblem, f"^--reward-table {path}: {words}"):
                rl_lab.read_reward_table(path)


# ------------------------------------------------------------------------------------------ writing


class Writing(FolderCase):
    def elsewhere(self) -> Path:
        """A folder on another file system, where there is one."""
        place = "/dev/shm" if Path("/dev/shm").is_dir() and os.access("/dev/shm", os.W_OK) else None
        if place is None or os.stat(place).st_dev == os.stat(self.folder).st_dev:
            self.skipTest("no second file system here")
        folder = tempfile.TemporaryDirectory(dir=place)
        self.addCleanup(folder.cleanup)
        return Path(folder.name)

    def test_a_link_to_another_file_system(self):
        real = self.elsewhere() / "ppo.json"
        real.write_text("old")
        (self.folder / "ppo.json").symlink_to(real)
        replace_files({self.folder / "ppo.csv": "new", self.folder / "ppo.json": "new"})
        self.assertEqual((real.read_text(), (self.folder / "ppo.json").is_symlink()), ("new", True))
        self.assertEqual([path.name for path in real.parent.iterdir()], ["ppo.json"])
        self.assertEqual(self.names(), ["ppo.csv", "ppo.json"])

    def test_the_message_says_which_files_are_new(self):
        paths = [self.folder / name for name in ("a.csv", "b.csv", "c.csv")]
        for path in paths:
            path.write_text("old")
        real = os.replace

        def fails_at_the_third(source, target):
            if Path(target).name == "c.csv":
                raise OSError(5, "Input/output error")
            real(source, target)

        words = r"c\.csv: Input/output error; already new: .*a\.csv, .*b\.csv; the others were left as they were"
        with mock.patch.object(rl_lab.os, "replace", fails_at_the_third), self.assertRaisesRegex(FileProblem, words):
            replace_files(dict.fromkeys(paths, "new"))
        self.assertEqual([path.read_text() for path in paths], ["new", "new", "old"])
        self.assertEqual(self.names(), ["a.csv", "b.csv", "c.csv"])

    def test_a_mode_is_kept_and_never_wider_for_a_moment(self):
        path = self.folder / "a.csv"
        for mode in (0o600, 0o640, 0o664):
            path.write_text("old")
            path.chmod(mode)
            seen = []
            real = os.fsync
            with mock.patch.object(rl_lab.os, "fsync", lambda n: (seen.append(os.fstat(n).st_mode), real(n))):
                replace_files({path: "new"})
            self.assertEqual(stat.S_IMODE(path.stat().st_mode), mode)
            self.assertEqual(stat.S_IMODE(seen[0]) & ~mode & 0o077, 0)
        before = os.umask(0o027)
        self.addCleanup(os.umask, before)
        replace_files({self.folder / "new.csv": "new"})
        self.assertEqual(stat.S_IMODE((self.folder / "new.csv").stat().st_mode), 0o640)

    def test_a_read_only_result_is_said(self):
        path = self.folder / "a.csv"
        path.write_text("kept")
        path.chmod(0o400)
        for attempt in (lambda: check_writable([path], 10), lambda: replace_files({path: "new"})):
            with self.assertRaisesRegex(FileProblem, "a.csv: is read-only; make it writable or choose another --output"):
                attempt()
        self.assertEqual((path.read_text(), self.names()), ("kept", ["a.csv"]))

    def test_partials_of_dead_processes_go_those_of_the_living_stay(self):
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        kept = [f".a.csv.{os.getppid()}.partial", ".a.csv.1.partial", ".a.csv.x.partial", "a.csv.9.partial", ".a.9.partial.b"]
        kept += [f".a.csv.{10**30}.partial"]
        for name in (*kept, f".a.csv.{gone.pid}.partial", f".other.json.{gone.pid}.partial"):
            (self.folder / name).write_text("half")
        (self.folder / f".folder.{gone.pid}.partial").mkdir()
        replace_files({self.folder / "a.csv": "new"})
        self.assertEqual(self.names(), sorted({*kept, f".folder.{gone.pid}.partial", "a.csv"}))  # the parent may be 1

    def test_a_folder_made_for_nothing_is_removed_again(self):
        deep = self.folder / "new" / "deeper"
        with mock.patch.object(rl_lab.tempfile, "TemporaryFile", side_effect=OSError(28, "No space left on device")):
            with self.assertRaisesRegex(FileProblem, "nothing was changed"):
                check_writable([deep / "a.csv"], 10)
        self.assertEqual(self.names(), [])
        for problem in (OSError(28, "No space left on device"), KeyboardInterrupt()):
            with mock.patch.object(rl_lab.os, "fsync", side_effect=problem):
                with self.assertRaises((FileProblem, KeyboardInterrupt)):
                    replace_files({deep / "a.csv": "new", self.folder / "other" / "b.csv": "new"})
            self.assertEqual(self.names(), [])

    def test_files_and_the_folder_that_names_them_are_synced(self):
        synced = []
        with mock.patch.object(rl_lab.os, "fsync", lambda n: synced.append(stat.S_ISDIR(os.fstat(n).st_mode))):
            replace_files({self.folder / "a" / "x": "1", self.folder / "b" / "y": "2"})
        self.assertEqual(synced, [False, False, True, True])

    def test_names_that_are_no_names(self):
        (self.folder / "loop").symlink_to(self.folder / "loop")
        for name, words in (("loop", "symbolic links"), ("n" * 256, "too long"), ("a\0b", "not a usable file name")):
            for attempt in (lambda p: check_writable([p], 10), lambda p: replace_files({p: "x"})):
                with self.subTest(name), self.assertRaisesRegex(FileProblem, words):
                    attempt(self.folder / name)
        self.assertEqual(self.names(), ["loop"])


class Figures(FolderCase):
    """plot_results imports nothing of the lab: its writer is a twin, held to the same rules."""

    def test_one_file_whole(self):
        target = self.folder / "figure.svg"
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        for name in (f".figure.svg.{gone.pid}.partial", f".figure.svg.{os.getppid()}.partial"):
            (self.folder / name).write_text("half")
        target.write_text("old")
        target.chmod(0o600)
        plot_results.write_whole(target, b"new")
        self.assertEqual((target.read_text(), stat.S_IMODE(target.stat().st_mode)), ("new", 0o600))
        self.assertEqual(self.names(), sorted([f".figure.svg.{os.getppid()}.partial", "figure.svg"]))
        target.chmod(0o400)
        with self.assertRaisesRegex(FileExistsError, "is read-only"):
            plot_results.write_whole(target, b"newer")
        with mock.patch.object(plot_results.os, "fsync", side_effect=KeyboardInterrupt), self.assertRaises(KeyboardInterrupt):
            plot_results.write_whole(self.folder / "new" / "deeper" / "figure.svg", b"new")
        self.assertFalse((self.folder / "new").exists())
        plot_results.write_whole(self.folder / "new" / "deeper" / "figure.svg", b"new")
        self.assertEqual((self.folder / "new" / "deeper" / "figure.svg").read_text(), "new")


# ------------------------------------------------------------------------------------------ names in messages


class Names(FolderCase):
    def test_one_line(self):
        self.assertEqual(rl_lab.one_line("a\nb\tc\r\x1b[1m\x00é漢" + BYTES_NAME), r"a\nb\tc\r\x1b[1m\x00é漢name\udcff")

    def test_every_message_is_one_line(self):
        for name in ("new\nline", BYTES_NAME, "a\x1b[31mb"):
            out = self.folder / name
            with mock.patch("sys.argv", ["rl_lab.py"]):
                for main, arguments in (
                    (rl_lab.main, ["--steps", "1", "--reward-table", str(out / "t.json")]),
                    (rl_lab.main, ["--algorithm", str(out)]),
                    (ppo_chain.main, ["--steps", str(out)]),
                    (ppo_chain.main, [str(out)]),
                ):
                    code, printed, err = quiet(rl_lab.run_command, lambda: main(arguments))
                    message = err if code == 2 else str(code)
                    self.assertEqual((printed, message.count("\n")), ("", int(code == 2)), message)
                    message.encode()
                for main, arguments in (
                    (ppo_chain.main, ["--steps", "1", "--output", str(out)]),
                    (token_objectives.main, ["--output", f"{out}.json"]),
                ):
                    code, printed, err = quiet(rl_lab.run_command, lambda: main(arguments))
                    self.assertEqual((code, err), (None, ""))
                    printed.encode()
                    self.assertNotIn(name, printed)

    def test_a_name_must_be_one(self):
        for main in (rl_lab.main, ppo_chain.main, token_objectives.main):
            for name in ("", "a\0b"):
                code, _, err = quiet(main, ["--output", name])
                self.assertEqual((code, err.count("\n")), (2, 1))
                self.assertIn("argument --output: got ", err)

    def test_a_problem_is_named_for_what_it_is(self):
        with mock.patch("sys.argv", ["folder/lab.py"]):
            for problem, words in (
                (OSError(36, "File name too long", "x\ny"), r"lab.py: error: x\ny: File name too long"),
                (OSError(5, "Input/output error"), "lab.py: error: Input/output error"),
            ):
                self.assertEqual(quiet(rl_lab.run_command, mock.Mock(side_effect=problem))[0], words)
        with mock.patch("sys.argv", ["/lab/extensions/audit/__main__.py"]):
            code, _, _ = quiet(rl_lab.run_command, mock.Mock(side_effect=FileProblem("gone")))
            self.assertEqual(code, "python -m extensions.audit: error: gone")


# ------------------------------------------------------------------------------------------ ending


class Ending(FolderCase):
    """Processes of their own. `torch.py` in the folder is found before torch: a moment of the import to choose."""

    def start(self, *arguments: object, **environment: str) -> subprocess.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}

        def heed_signals() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

        command = [sys.executable, "-B", *map(str, arguments)]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return subprocess.Popen(command, cwd=self.folder, env=environment, preexec_fn=heed_signals, **pipes)

    def test_while_importing(self):
        extensions = sorted(path.parent.name for path in (LAB / "extensions").glob("*/__main__.py"))
        self.assertIn("audit", extensions)
        commands = [[LAB / name] for name in ("rl_lab.py", "ppo_chain.py", "token_objectives.py", "plot_results.py")]
        commands += [["-m", f"extensions.{extensions[0]}"], ["-m", "extensions.tiny_lm"]]
        started = []
        for number in (signal.SIGINT, signal.SIGTERM):
            place = self.folder / number.name
            place.mkdir()
            for module in ("torch", "numpy"):  # whichever comes first; a handler that raises could be caught there
                text = f"import os\ntry:\n    os.kill(os.getpid(), {number:d})\nexcept BaseException:\n    raise ImportError\n"
                (place / f"{module}.py").write_text(text)
            for command in commands:
                started.append((number, command, self.start(*command, PYTHONPATH=f"{place}{os.pathsep}{LAB}")))
        for number, command, process in started:
            with self.subTest(number.name, command=command):
                out, err = process.communicate(timeout=60)
                self.assertEqual((process.returncode, out), (128 + number, ""), err)
                self.assertRegex(err, r"\Ainterrupted(: no figure was changed| before anything was started)\n\Z")

    def test_every_extension_ends_by_run_command(self):
        """The handler that waits during the imports is taken down there."""
        for path in sorted((LAB / "extensions").glob("*/__main__.py")):
            with self.subTest(path.parent.name):
                texts = [other.read_text(encoding="utf-8") for other in path.parent.glob("*.py")]
                self.assertTrue(any("run_command(" in text for text in texts))

    def test_sigterm_ends_as_ctrl_c_does(self):
        process = self.start(LAB / "rl_lab.py", "--seeds", "0-999", "--steps", "40", "--output", "results")
        first = self.folder / "results" / "seed-0" / "grpo.json"
        try:
            deadline = time.monotonic() + 120
            while not first.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        self.assertEqual((process.returncode, out), (143, ""), err)
        self.assertEqual(err, "interrupted by SIGTERM: every file is whole, the earlier one or the new one\n")
        self.assertFalse([name for name in self.names() if "partial" in name])
        for path in self.folder.rglob("*.json"):
            json.loads(path.read_text())

    def test_signals_inside_and_outside(self):
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        seen = []

        def main():
            seen.append(signal.getsignal(signal.SIGTERM))
            signal.raise_signal(signal.SIGTERM)

        code, out, err = quiet(rl_lab.run_command, main)
        self.assertEqual((code, out, "by SIGTERM" in err), (143, "", True))
        self.assertNotIn(seen[0], (signal.SIG_DFL, signal.SIG_IGN))
        self.assertEqual({number: signal.getsignal(number) for number in before}, before)
        with mock.patch.object(rl_lab.signal, "getsignal", return_value=signal.SIG_IGN):  # started to survive: it does
            quiet(rl_lab.run_command, lambda: seen.append(None))
        self.assertEqual({number: signal.getsignal(number) for number in before}, before)


if __name__ == "__main__":
    unittest.main()
