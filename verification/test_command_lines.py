"""Every command of README.txt is run, every refusal has a case, and Ctrl-C never damages a result.

The commands are taken from README.txt as printed, given to a shell that expands them, and run in a temporary copy of the
lab; trainings are cut to three iterations. To stay quick, a command runs in a forked child of this process, where torch is
already imported, with sys.argv, folder and streams of its own; what depends on a fresh process runs in one.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import itertools
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Callable, NamedTuple, Sequence
from unittest import mock
from xml.etree import ElementTree

import torch

import plot_results
import ppo_chain
import rl_lab
import token_objectives

LAB = Path(rl_lab.__file__).resolve().parent
README = (LAB / "README.txt").read_text(encoding="utf-8")
PROGRAMS = {
    "rl_lab.py": rl_lab,
    "ppo_chain.py": ppo_chain,
    "token_objectives.py": token_objectives,
    "plot_results.py": plot_results,
}

if shutil.which("bash") is None or not hasattr(os, "fork"):
    raise unittest.SkipTest("commands are expanded by bash and run in forked children; this system lacks one of them")


def setUpModule() -> None:
    # A forked child has no copies of torch's worker threads and would wait for them for ever.
    global _threads
    _threads = torch.get_num_threads()
    torch.set_num_threads(1)
    import matplotlib.backends.backend_svg  # noqa: F401  once here instead of once in every child


def tearDownModule() -> None:
    torch.set_num_threads(_threads)


# ------------------------------------------------------------------------------------------ running commands


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


class Running:
    """A command in a forked child; `entry` is what it runs, `prepare` may change the child first (limits, user)."""

    def __init__(
        self, argv: Sequence[str], folder: Path, entry: Callable[[], object], prepare=None, stderr: int | None = None
    ):
        self.streams = [tempfile.TemporaryFile("w+") for _ in range(2)]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else the child would write what is waiting a second time
        # Ctrl-C that comes before the command has begun is not for the test code of the child: hold it back until then.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: see setUpModule
            self.pid = os.fork()
        if self.pid == 0:
            os._exit(self._child(list(argv), folder, entry, prepare, stderr))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

    def _child(self, argv, folder, entry, prepare, stderr) -> int:
        code = 0
        try:
            os.chdir(folder)
            os.dup2(self.streams[0].fileno(), 1)
            os.dup2(self.streams[1].fileno() if stderr is None else stderr, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)
            sys.argv = argv
            sys.path.insert(0, str(folder))
            signal.signal(signal.SIGINT, signal.default_int_handler)
            # A test may have started multiprocessing's helpers: they are no children of this process.
            forkserver._forkserver.__init__()
            resource_tracker._resource_tracker.__init__()
            if prepare:
                prepare()
            entry()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
            code = 1
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, AttributeError):
                stream.flush()
        return code

    def interrupt(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGINT)

    def finish(self) -> Outcome:
        _, status = os.waitpid(self.pid, 0)
        texts = []
        for stream in self.streams:
            stream.seek(0)
            texts.append(stream.read())
            stream.close()
        return Outcome(os.waitstatus_to_exitcode(status), *texts)


def as_script(arguments: Sequence[str]) -> Callable[[], object]:
    """What `python ARGUMENTS` does after its own start: a file, or -m with a module, runs as __main__."""
    if arguments[0] == "-m":
        return lambda: runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    return lambda: runpy.run_path(arguments[0], run_name="__main__")


def start_script(arguments: Sequence[str], folder: Path, **options) -> Running:
    """`python -B ARGUMENTS` in `folder`."""
    arguments = [argument for argument in arguments if argument != "-B"]
    argv = arguments[2:] if arguments[0] == "-m" else arguments
    argv = [arguments[1], *argv] if arguments[0] == "-m" else argv
    run = as_script(arguments)

    def entry() -> None:
        if arguments[0] == "-m":
            sys.modules.pop(arguments[1], None)  # a test may have imported it; a new process would not have
        run()

    return Running(argv, folder, entry, **options)


def run_main(program: str, *arguments: object, folder: Path | None = None, **options) -> Outcome:
    """The program's main as its __main__ block calls it, in a forked child, without compiling the file again."""
    module = PROGRAMS[program]
    argv = [program, *map(str, arguments)]
    return Running(argv, folder or LAB, lambda: module.run_command(module.main), **options).finish()


def run_process(arguments: Sequence[object], folder: Path, **environment: str) -> Outcome:
    """`python ARGUMENTS` in a process of its own, with one thread: this machine may be busy with other tests."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return Outcome(done.returncode, done.stdout, done.stderr)


def call_main(program: str, *arguments: object) -> Outcome:
    """The same in this process: for what ends before anything is computed."""
    module, out, err = PROGRAMS[program], io.StringIO(), io.StringIO()
    code = 0
    with mock.patch.object(sys, "argv", [program, *map(str, arguments)]):
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                if program == "plot_results.py":
                    try:
                        module.main()
                    except module.PlotProblem as problem:
                        sys.exit(f"{program}: error: {problem}")
                else:
                    module.run_command(module.main)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
                err.write(f"{end.code}\n" if isinstance(end.code, str) else "")
    return Outcome(code, out.getvalue(), err.getvalue())


class CommandCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="rl-lab-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name).resolve()

    def assertRefused(self, outcome: Outcome, code: int, *words: str) -> None:
        """Ended with `code`, wrote nothing to stdout and one line to stderr that holds all `words`."""
        self.assertEqual(outcome.code, code, outcome)
        self.assertEqual(outcome.out, "")
        self.assertEqual(outcome.err.count("\n"), 1, outcome.err)
        self.assertIn(": error: ", outcome.err)
        for word in words:
            self.assertIn(word, outcome.err)

    def files(self, folder: Path | None = None) -> dict[str, bytes]:
        """Every file below a folder, by relative name."""
        folder = folder or self.folder
        return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ------------------------------------------------------------------------------------------ the commands of README.txt


def printed_commands() -> list[str]:
    """The commands of README.txt in order: indented lines, a `for ... done` loop as one."""
    commands, loop = [], []
    for line in README.splitlines():
        text = line.strip()
        if loop:
            loop.append(text)
            if text == "done":
                commands.append("\n".join(loop))
                loop = []
        elif (
            line.startswith("    ")
            and re.match(r"(python3?|bash|source|for|pip|cd) ", text)
            and not line.startswith("     ")
        ):
            if text.startswith("for "):
                loop = [text]
            else:
                commands.append(text)
    assert not loop, f"README.txt: a loop without done: {loop}"
    return commands


def expand(command: str) -> list[list[str]]:
    """The argument lists with which a shell would call `python` for this command; nothing is run."""
    listing = r"python() { printf '%s\0' " + '"$@"' + r"; printf '\0'; }" + "\n" + command
    done = subprocess.run(["bash", "-c", listing], capture_output=True, text=True, check=True)
    assert not done.stderr, done.stderr
    return [call.split("\0") for call in done.stdout.split("\0\0") if call]


def shortened(arguments: list[str]) -> list[str]:
    """The same command with three iterations where it trains, and some of the tests where it tests."""
    script = next(argument for argument in arguments if not argument.startswith("-"))
    if script in ("rl_lab.py", "ppo_chain.py") and "atoms" not in arguments:
        if "--steps" in arguments:
            at = arguments.index("--steps")
            arguments = arguments[:at] + arguments[at + 2 :]
        return [*arguments, "--steps", "3"]
    if script == "unittest" and "test_rl_lab.py" in arguments:
        return [*arguments, "-k", "PolicyObjectives"]
    if script == "extensions.tiny_lm" and "--help" not in arguments:
        few = ["--evaluation-prompts", "32", "--dpo-prompts", "16", "--demonstrations", "4"]
        return [*arguments, "--steps", "1", *few]
    return arguments


def option(arguments: Sequence[str], flag: str) -> str | None:
    return arguments[arguments.index(flag) + 1] if flag in arguments else None


class ReadmeCommands(CommandCase):
    def setUp(self):
        super().setUp()
        for name in (*PROGRAMS, "test_rl_lab.py", "requirements.txt", "README.txt"):
            shutil.copy(LAB / name, self.folder)
        for name in ("reference", "verification", "extensions"):
            (self.folder / name).symlink_to(LAB / name)

    def test_every_printed_command_runs(self):
        done = set()
        started = []  # two run at a time; a figure waits for the trainings before it

        def check_started(leave: int) -> None:
            while len(started) > leave:
                command, child = started.pop(0)
                with self.subTest(" ".join(command)):
                    self.check_one(command, child.finish())

        # README.txt's first job stands before its first figure, but is set up with an environment: it is run here without.
        for command in ["python -B rl_lab.py --algorithm all --output results", *printed_commands(), *self.help_examples()]:
            if not command.startswith(("python ", "for ")):
                continue
            calls = expand(command)
            self.assertTrue(calls, command)
            for arguments in calls:
                if tuple(arguments) in done or arguments in (["-B", "-m", "unittest"], ["-m", "unittest"]):
                    continue  # the last is the run this test is part of; see test_the_two_lines_at_the_top
                done.add(tuple(arguments))
                draws = "plot_results.py" in arguments
                check_started(leave=0 if draws and not all("plot_results.py" in earlier for earlier, _ in started) else 1)
                started.append((arguments, start_script(shortened(arguments), self.folder)))
        check_started(leave=0)
        self.assertGreater(len(done), 20)
        # Only now: two commands share the folder, and one may be writing while the other is checked.
        self.assertEqual([path.name for path in self.folder.rglob("*results*.partial")], [])

    def check_one(self, arguments: list[str], outcome: Outcome) -> None:
        """That a command ended well, and that the files it promises are there and whole."""
        if "unittest" in arguments:
            self.assertEqual(outcome.code, 0, outcome)
            self.assertRegex(outcome.err, r"Ran \d+ tests? in [\d.]+s\n\nOK\n$")
            self.assertNotIn("Ran 0 tests", outcome.err)
            return
        self.assertEqual((outcome.code, outcome.err), (0, ""))
        self.assertTrue(outcome.out.strip())
        for path in self.expected_files(arguments):
            self.assertTrue(path.is_file(), path)
            self.assertGreater(path.stat().st_size, 100)
            if path.suffix == ".csv":
                self.assertEqual(len(path.read_text().splitlines()), 1 + 4)
            elif path.suffix == ".json":
                json.loads(path.read_text())
            else:
                assert_figure(self, path)

    def expected_files(self, arguments: list[str]) -> list[Path]:
        output = option(arguments, "--output") or option(arguments, "--plot")
        if output is None:
            return []
        if "extensions.tiny_lm" in arguments:
            algorithms = [option(arguments, "--algorithm")]
            algorithms = ["sft", "ppo", "dpo", "online-dpo", "grpo", "rloo"] if algorithms == ["all"] else algorithms
            return [self.folder / output / f"{a}.json" for a in algorithms]
        if "rl_lab.py" in arguments:
            algorithms = [option(arguments, "--algorithm")]
            algorithms = ["ppo", "dpo", "grpo"] if algorithms == ["all"] else algorithms
        elif "ppo_chain.py" in arguments:
            algorithms = ["ppo_chain"]
        else:
            return [self.folder / output]
        folders = [output + suffix for suffix in self.suffixes_of_lists(arguments)]
        if option(arguments, "--seeds"):
            seeds = rl_lab.parse_seeds(option(arguments, "--seeds"))
            folders = [f"{folder}/seed-{seed}" for folder in folders for seed in seeds]
        return [self.folder / f / f"{a}.{kind}" for f in folders for a in algorithms for kind in ("csv", "json")]

    def suffixes_of_lists(self, arguments: list[str]) -> list[str]:
        """What the folders of a command's runs are called behind --output: "-g2", "-g4" for --group-size 2,4."""
        for flag, name in (("--group-size", "g"), ("--preference-flips", "flips"), ("--gae-lambda", "lambda")):
            values = (option(arguments, flag) or "").split(",")
            if len(values) > 1:
                return [f"-{name}{value}" for value in values]
        return [""]

    def help_examples(self) -> list[str]:
        lines = [line.strip() for program in PROGRAMS for line in call_main(program, "--help").out.splitlines()]
        examples = [line for line in lines if line.startswith("python ")]
        self.assertGreaterEqual(len(examples), 4 + 3 + 1 + 4)
        return examples

    def test_nothing_that_looks_like_a_command_is_missed(self):
        commands = printed_commands()
        calls = [line.strip() for line in README.splitlines() if re.match(r" +python3? ", line)]
        inside = "\n".join(commands)
        for call in calls:
            if " FILE" not in call:  # the reader's own file
                self.assertIn(call, inside)
        for program in PROGRAMS:
            self.assertIn(f"python -B {program} ", inside)
        # Taken, and run or checked here: python and for (run), python3 -m venv, bash, source (the tests below).
        self.assertEqual({command.split()[0] for command in commands}, {"python", "python3", "bash", "source"})
        self.assertEqual({c for c in commands if c.startswith("source")}, {"source .venv/bin/activate"})

    def test_the_two_lines_at_the_top(self):
        lines = [command for command in printed_commands() if command.startswith("python3 ")]
        (other_index,) = [line for line in lines if "--extra-index-url" in line]  # needs a host that tests do not ask
        lines.remove(other_index)
        self.assertEqual(len(lines), 3)
        self.assertTrue(other_index.startswith(lines[0].split(" && .venv/bin/python -B")[0]))
        setup, last = zip(*(line.rsplit(" && ", 1) for line in lines))
        self.assertEqual(set(setup), {"python3 -m venv .venv && .venv/bin/python -m pip install -r requirements.txt"})
        with self.subTest("the main job, in a process of its own, gives the table that README.txt prints"):
            main_job = re.sub(r"^\.venv/bin/python ", "", last[0]).split()
            done = run_process(main_job, self.folder)
            self.assertEqual((done.code, done.err), (0, ""))
            names = {f"{a}.{kind}" for a in ("ppo", "dpo", "grpo") for kind in ("csv", "json")}
            self.assertEqual({path.name for path in (self.folder / "results").iterdir()}, names)
            printed = README[README.index("    method ") :].splitlines()[:5]
            table = done.out[done.out.index("method ") :].splitlines()[:5]
            self.assertEqual(table[0].split(), printed[0].split())
            for got, wanted in zip(table[1:], printed[1:]):
                got, wanted = got.split(), wanted.split()
                self.assertEqual((got[0], got[-3:]), (wanted[0], wanted[-3:]))
                for x, y in zip(
                    re.findall(r"\d\.\d+", " ".join(got)), re.findall(r"\d\.\d+", " ".join(wanted)), strict=True
                ):
                    self.assertAlmostEqual(float(x), float(y), delta=0.01)
            with self.subTest("the bytes are those of the same training in another process, and on their own"):
                alone = rl_lab.csv_text(rl_lab.train("dpo").history)
                self.assertEqual((self.folder / "results" / "dpo.csv").read_text(), alone)
        with self.subTest("the tests, as the landing check takes them"):
            self.assertEqual(last[1], ".venv/bin/python -B -m unittest")
            self.assertIn("python -B -m unittest", printed_commands())
            check = LAB / ".ci" / "run"
            if check.exists():  # a copy without hidden files is still a lab
                (pattern,) = re.findall(r"^test_line='([^']+)'$", check.read_text(encoding="utf-8"), re.MULTILINE)
                self.assertEqual([line.strip() for line in README.splitlines() if re.search(pattern, line)], [lines[1]])
        with self.subTest("the audit of a shipped recording"):
            done = start_script(re.sub(r"^\.venv/bin/python ", "", last[2]).split(), self.folder).finish()
            self.assertEqual((done.code, done.err), (0, ""))
            self.assertIn("token ratio, clip -0.2/+0.2, mean per response", done.out)
        with self.subTest("19 tests in the acceptance suite"):
            suite = unittest.defaultTestLoader.loadTestsFromName("test_rl_lab")
            self.assertEqual(suite.countTestCases(), 19)
            self.assertIn('"Ran 19 tests" and OK', README)

    def test_regenerate_runs_the_printed_commands(self):
        (self.folder / "reference").unlink()
        (self.folder / "reference").mkdir()
        shutil.copy(LAB / "reference" / "regenerate.sh", self.folder / "reference")
        shims, log = self.folder / "bin", self.folder / "log"
        shims.mkdir()
        (shims / "python").write_text(f'#!/bin/sh\necho "$@" >> {log}\necho printed\n')
        (shims / "python").chmod(0o755)
        (command,) = [command for command in printed_commands() if command.startswith("bash ")]
        environment = {**os.environ, "PATH": f"{shims}:{os.environ['PATH']}", "TMPDIR": str(self.folder)}
        done = subprocess.run(["bash", "-c", command], cwd=self.folder, capture_output=True, text=True, env=environment)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        regenerated = log.read_text().splitlines()
        printed = {" ".join(call) for c in printed_commands() if c.startswith(("python ", "for ")) for call in expand(c)}

        def without_folders(call: str) -> str:
            return re.sub(rf"({re.escape(str(self.folder))}/[^/ ]+|reference)/", "", call)

        trainings = [without_folders(call) for call in regenerated if "plot_results" not in call]
        self.assertEqual(len(trainings), 1 + 1 + 2 + 1 + 1 + 1 + 1)
        for call in trainings:
            # The chain at 0.95 has its lambda in the folder's name here, so that the three stand side by side.
            call = call.replace("results-chain-lambda0.95", "results-chain")
            self.assertIn(call, printed)
        kept = {path.stem for path in (LAB / "reference" / "printed").iterdir()}
        self.assertEqual({path.stem for path in (self.folder / "reference" / "printed").iterdir()}, kept)

    def test_the_numbers_printed_beside_the_commands_are_those_of_reference(self):
        def last_row(folder: str, name: str) -> dict[str, str]:
            with open(LAB / "reference" / folder / f"{name}.csv", newline="") as file:
                return list(csv.DictReader(file))[-1]

        def rows_after(header: str, count: int) -> list[list[str]]:
            return [line.split() for line in README[README.index(header) :].splitlines()[1 : count + 1]]

        for algorithm, *cells in rows_after("    method   expected reward", 4)[1:]:
            row = last_row("results", algorithm)
            wanted = [
                f"{float(row[name]):.4f}"
                for name in ("expected_reward", "optimal_action_probability", "kl_current_reference")
            ]
            self.assertEqual(cells[:3], wanted)
            self.assertEqual(
                cells[-3:], [row[name] for name in ("sampled_actions", "pair_presentations", "optimizer_steps")]
            )
        for flips, training, original, reward, *_ in rows_after("    flips  training loss", 4):
            row = last_row(f"results-dpo-flips{flips}", "dpo")
            wanted = [f"{float(row[name]):.6f}" for name in ("dpo_training_loss", "dpo_original_loss")]
            self.assertEqual([training, original, reward], [*wanted, f"{float(row['expected_reward']):.4f}"])
        for size, prompts, reward, share in rows_after("    g   prompts  expected reward", 4):
            with open(LAB / "reference" / f"results-grpo-g{size}" / "grpo.csv", newline="") as file:
                history = list(csv.DictReader(file))
            shares = [float(row["zero_group_fraction"]) for row in history[1:]]
            self.assertEqual(int(prompts) * int(size), 128)
            self.assertEqual([reward, share], [f"{float(history[-1]['expected_reward']):.4f}", f"{sum(shares) / 120:.4f}"])
        (chain,) = re.findall(r"from 0\.3 to ([\d.]+) \(lambda 0\.95\), ([\d.]+) \(0\), ([\d.]+) \(1\)", README)
        for lam, printed in zip(("0.95", "0", "1"), chain):
            self.assertEqual(printed, f"{float(last_row(f'results-chain-lambda{lam}', 'ppo_chain')['expected_return']):.4f}")


def assert_figure(case: unittest.TestCase, path: Path) -> None:
    """The file is whole: XML, or begins and ends as its format does."""
    drawn = path.read_bytes()
    if path.suffix == ".svg":
        case.assertEqual(ElementTree.fromstring(drawn).tag, "{http://www.w3.org/2000/svg}svg")
    elif path.suffix == ".png":
        case.assertEqual((drawn[:8], drawn[-8:-4]), (b"\x89PNG\r\n\x1a\n", b"IEND"))
    else:
        case.assertEqual((drawn[:5], drawn.strip()[-5:]), (b"%PDF-", b"%%EOF"))


class Help(CommandCase):
    def test_help_says_what_a_newcomer_needs(self):
        needed = {
            "rl_lab.py": ("CPU", "OUTPUT/{ppo,dpo,grpo}.csv", "trains nothing", "JSON list of rows", "default results"),
            "ppo_chain.py": ("CPU", "OUTPUT/ppo_chain.csv", "default results-chain", "0 one step, 1 all"),
            "token_objectives.py": ("JSON", "default results-tokens.json"),
            "plot_results.py": ("CSV", ".svg, .png or .pdf", "draw the formulas instead of results"),
        }
        for program, words in needed.items():
            with self.subTest(program):
                outcome = call_main(program, "--help")
                self.assertEqual((outcome.code, outcome.err), (0, ""))
                self.assertTrue(outcome.out.startswith(f"usage: {program} "))
                self.assertRegex(outcome.out, r"\nexamples?:\n  python -B " + program)
                for word in words:
                    self.assertIn(word, re.sub(r"\s+", " ", outcome.out))
        for program, settings in (("rl_lab.py", rl_lab.BanditSettings()), ("ppo_chain.py", ppo_chain.ChainSettings())):
            shown = re.sub(r"\s+", " ", call_main(program, "--help").out)
            for name, flag in flags_of(type(settings)).items():
                with self.subTest(program, flag=flag):
                    # The flag, its meaning and its default.
                    self.assertRegex(
                        shown, rf"{flag} [NX] [^-].*?; default {re.escape(format(getattr(settings, name), 'g'))} "
                    )


# ------------------------------------------------------------------------------------------ wrong flags: exit 2


def flags_of(settings_class: type) -> dict[str, str]:
    return {
        field.name: field.metadata["flag"] or "--" + field.name.replace("_", "-")
        for field in settings_class.__dataclass_fields__.values()
    }


class WrongFlags(CommandCase):
    def test_every_setting_out_of_range(self):
        for program, settings_class in (("rl_lab.py", rl_lab.BanditSettings), ("ppo_chain.py", ppo_chain.ChainSettings)):
            for name, flag in flags_of(settings_class).items():
                allowed = settings_class.__dataclass_fields__[name].metadata["allowed"]
                below = allowed.low if allowed.above else allowed.low - 1
                wrong = [below, allowed.high + 1, "nan", "inf", "-inf", "many", "", "0x8", "1,many", ","]
                wrong += ["1.5", "1e2"] if allowed.kind is int else []
                for value in map(str, wrong):
                    with self.subTest(program, flag=flag, value=value):
                        outcome = call_main(program, f"{flag}={value}", "--output", self.folder / "never")
                        self.assertRefused(outcome, 2, f"argument {flag}: got {value!r}, wanted a ", "--help")
                        # The range itself, with both ends.
                        self.assertRegex(
                            outcome.err, rf"(from|above) {re.escape(str(allowed.low))} .*to {re.escape(str(allowed.high))} "
                        )
                with self.subTest(program, flag=flag, value="missing"):
                    self.assertRefused(call_main(program, flag), 2, f"argument {flag}: expected one argument")
        self.assertEqual(self.files(), {})

    def test_other_wrong_flags(self):
        some = self.folder / "some.json"
        some.write_text("[[1, 0], [0, 1], [0.5, 0.5]]")  # two pairs; the third row has no preference
        cases = (
            ("rl_lab.py", ("--algorithm", "sarsa"), "argument --algorithm", "'sarsa'", "grpo"),
            ("rl_lab.py", ("--algorithm",), "argument --algorithm", "expected one argument"),
            ("rl_lab.py", ("--seeds", "5-2"), "argument --seeds", "'5-2'", "0-19"),
            ("rl_lab.py", ("--seeds", "a"), "argument --seeds", "'a'", "0-19"),
            ("rl_lab.py", ("--seeds", "1-2-3"), "argument --seeds", "'1-2-3'"),
            ("rl_lab.py", ("--seeds", "0-5000"), "argument --seeds", "'0-5000'", "1000"),
            ("rl_lab.py", ("--seeds", ""), "argument --seeds", "''"),
            ("rl_lab.py", ("--seeds", "0-99999999999999999999"), "argument --seeds"),
            ("rl_lab.py", ("--seeds", "0-3", "--seed", "5"), "--seeds", "--seed 5"),
            ("rl_lab.py", ("--preference-flips", "13"), "argument --preference-flips: got 13", "from 0 to 12"),
            ("rl_lab.py", ("--preference-flips", "3", "--reward-table", some), "--preference-flips: got 3", "from 0 to 2"),
            ("rl_lab.py", ("--reward-table",), "argument --reward-table"),
            ("rl_lab.py", ("--output",), "argument --output"),
            ("rl_lab.py", ("--step", "3"), "--step"),  # no abbreviations: a later flag could change what they mean
            ("rl_lab.py", ("results",), "results"),
            ("rl_lab.py", ("--gae-lambda", "1"), "--gae-lambda"),
            ("ppo_chain.py", ("--group-size", "4"), "--group-size"),
            ("ppo_chain.py", ("--lambda", "1"), "--lambda"),
            ("token_objectives.py", ("--steps", "3"), "--steps"),
            ("token_objectives.py", ("--output",), "argument --output"),
            ("plot_results.py", (), "--output"),
            ("plot_results.py", ("--output", "x.svg"), "--input", "--atoms"),
            ("plot_results.py", ("--atoms",), "--output"),
            ("plot_results.py", ("--input", "x"), "--output"),
            ("plot_results.py", ("--input", "--output", "x.svg"), "argument --input"),
            ("plot_results.py", ("--input", "x", "--atoms", "--output", "x.svg"), "--atoms", "--input"),
            ("plot_results.py", ("--atoms", "--output", "x.jpg"), "argument --output: got 'x.jpg'", ".svg, .png, .pdf"),
            ("plot_results.py", ("--atoms", "--output", "figure"), "argument --output: got 'figure'", ".svg, .png, .pdf"),
            ("plot_results.py", ("--atoms", "--outp", "x.svg"), "--output"),
        )
        for program, arguments, *words in cases:
            with self.subTest(program, arguments=arguments):
                if "--output" not in arguments and program == "rl_lab.py":
                    arguments = (*arguments, "--output", self.folder / "never") if "results" not in arguments else arguments
                self.assertRefused(call_main(program, *arguments), 2, *map(str, words))
        self.assertEqual(list(self.files()), ["some.json"])

    def test_as_a_program(self):
        outcome = start_script([str(LAB / "ppo_chain.py"), "--gae-lambda", "1.5"], self.folder).finish()
        self.assertRefused(outcome, 2, "--gae-lambda: got '1.5'", "from 0 to 1")
        self.assertEqual(list(self.folder.iterdir()), [])


# ------------------------------------------------------------------------------------------ file problems: exit 1


def as_another_user() -> None:
    """In a child: give up the rights of the superuser, who may read and write everything."""
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)


def with_file_size_limit(size: int) -> Callable[[], None]:
    """In a child: writing more than `size` bytes into one file fails, as on a full disk."""

    def limit() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return limit


class FileProblems(CommandCase):
    def assertNeverTrains(self):
        """From here on a training that starts fails the test."""
        for name in ("rl_lab.train", "ppo_chain.train_chain", "token_objectives.run_check"):
            patch = mock.patch(name, side_effect=AssertionError("trained before the file problem was found"))
            patch.start()
            self.addCleanup(patch.stop)

    def test_reward_tables(self):
        self.assertNeverTrains()
        tables = {
            "empty file": ("", "not JSON"),
            "not JSON": ("1, 0\n0, 1\n", "not JSON"),
            "not UTF-8": (b"\xff\xfe[[1, 0]]", "not JSON"),
            "too deep": ("[" * 5000, "not JSON"),
            "much too deep": ("[" * 100_000, "list of rows"),
            "too many digits": ("[[" + "9" * 5000 + ", 1]]", "not JSON"),
            "an object": ('{"rewards": [[1, 0]]}', "list of rows"),
            "a number": ("1", "list of rows"),
            "no rows": ("[]", "list of rows"),
            "a row, not a list of rows": ("[1, 0]", "list of rows"),
            "an empty row": ("[[]]", "row 0"),
            "one action": ("[[1], [0]]", "two or more actions"),
            "rows of unequal length": ("[[1, 0], [1]]", "row 1 has 1"),
            "a word": ('[[1, "high"]]', "'high'"),
            "null": ("[[1, null]]", "None"),
            "a truth value": ("[[1, true]]", "True"),
            "a nested list": ("[[1, [0]]]", "a list of 1"),
            "NaN": ("[[1, NaN]]", "nan"),
            "infinity": ("[[1, 0], [-Infinity, 0]]", "row 1"),
            "beyond a float": ("[[1e999, 0]]", "inf"),
            "an integer beyond a float": ("[[1" + "0" * 400 + ", 0]]", "finite"),
        }
        path = self.folder / "table.json"
        for name, (content, words) in tables.items():
            with self.subTest(name):
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
                outcome = call_main("rl_lab.py", "--reward-table", path, "--output", self.folder / "never")
                self.assertRefused(outcome, 1, f"--reward-table {path}", words)
        path.write_text("[[1, 1], [0.5, 0.5]]")
        for algorithm in ("dpo", "all"):
            with self.subTest("no preferences", algorithm=algorithm):
                outcome = call_main(
                    "rl_lab.py", "--algorithm", algorithm, "--reward-table", path, "--output", self.folder / "never"
                )
                self.assertRefused(outcome, 1, str(path), "no pairs for dpo")
        for name, missing, words in (
            ("missing", self.folder / "nowhere.json", "No such file"),
            ("a folder", self.folder, "directory"),
            ("below a file", path / "deeper.json", "Not a directory"),
            ("a name that is too long", self.folder / ("n" * 300), "too long"),
        ):
            with self.subTest(name):
                outcome = call_main("rl_lab.py", "--reward-table", missing, "--output", self.folder / "never")
                self.assertRefused(outcome, 1, f"--reward-table {missing}", words)
        self.assertEqual([path.name for path in self.folder.iterdir()], ["table.json"])

    def test_outputs_that_cannot_be_written(self):
        self.assertNeverTrains()
        file = self.folder / "file"
        file.write_text("kept")
        (self.folder / "folder" / "dpo.csv").mkdir(parents=True)
        (self.folder / "folder" / "ppo_chain.json").mkdir()
        (self.folder / "folder" / "figure.svg").mkdir()
        long_name = self.folder / ("n" * 300)
        for program, output, words in (
            ("rl_lab.py", file, "exists"),
            ("rl_lab.py", file / "below", "Not a directory"),
            ("rl_lab.py", self.folder / "folder", "dpo.csv"),
            ("rl_lab.py", long_name, "too long"),
            ("ppo_chain.py", file, "exists"),
            ("ppo_chain.py", self.folder / "folder", "ppo_chain.json"),
            ("ppo_chain.py", long_name, "too long"),
            ("token_objectives.py", self.folder / "folder", "regular file"),
            ("token_objectives.py", file / "below.json", "cannot be written"),
            ("token_objectives.py", long_name, "too long"),
            ("token_objectives.py", Path(os.devnull), "regular file"),
        ):
            with self.subTest(program, output=output):
                self.assertRefused(call_main(program, "--output", output), 1, words)
        for output, words in (
            (self.folder / "folder" / "figure.svg", "regular file"),
            (file / "below.svg", "cannot be written"),
            (self.folder / ("n" * 300 + ".svg"), "too long"),
        ):
            with self.subTest("plot_results.py", output=output), mock.patch.object(plot_results, "draw_atoms", small_figure):
                self.assertRefused(call_main("plot_results.py", "--atoms", "--output", output), 1, words)
        self.assertEqual(self.files(), {"file": b"kept"})

    def test_a_name_that_only_the_partial_file_makes_too_long(self):
        self.assertRefused(call_main("token_objectives.py", "--output", self.folder / ("n" * 250)), 1, "too long")
        with mock.patch.object(plot_results, "draw_atoms", small_figure):
            outcome = call_main("plot_results.py", "--atoms", "--output", self.folder / ("n" * 246 + ".svg"))
            self.assertRefused(outcome, 1, "too long")
        self.assertEqual(self.files(), {})

    def test_rights(self):
        self.folder.chmod(0o755)
        table, closed, hidden = self.folder / "table.json", self.folder / "closed", self.folder / "hidden"
        table.write_text("[[1, 0]]")
        table.chmod(0)
        closed.mkdir(mode=0o555)
        hidden.mkdir(mode=0)
        for program, arguments, words in (
            ("rl_lab.py", ("--reward-table", table), "Permission denied"),
            ("rl_lab.py", ("--output", closed), "Permission denied"),
            ("rl_lab.py", ("--output", closed / "new"), "Permission denied"),
            ("rl_lab.py", ("--output", hidden), "Permission denied"),
            ("ppo_chain.py", ("--output", closed), "Permission denied"),
            ("token_objectives.py", ("--output", closed / "tokens.json"), "Permission denied"),
            ("token_objectives.py", ("--output", hidden / "tokens.json"), "Permission denied"),
        ):
            with self.subTest(program, arguments=arguments):
                outcome = run_main(program, *arguments, folder=self.folder, prepare=as_another_user)
                self.assertRefused(outcome, 1, str(arguments[1]).removesuffix("/tokens.json"), words)
        hidden.chmod(0o755)

    def test_a_full_disk(self):
        for program, output, name in (
            ("rl_lab.py", "results", "results/ppo.csv"),
            ("ppo_chain.py", "results", "results/ppo_chain.csv"),
            ("token_objectives.py", "tokens.json", "tokens.json"),
        ):
            with self.subTest(program):
                target = self.folder / name
                target.parent.mkdir(exist_ok=True)
                target.write_text("earlier")
                before = self.files()
                # 2 kB a file: found out before training, since the expected size is tried.
                outcome = run_main(program, "--output", output, folder=self.folder, prepare=with_file_size_limit(2000))
                self.assertRefused(outcome, 1, "cannot be written", "File too large")
                self.assertEqual(self.files(), before)

        with self.subTest("the disk fills up while the results are written"):
            texts = {self.folder / "results" / name: "x" * 5000 for name in ("ppo.csv", "new.json")}

            def fill() -> None:
                rl_lab.run_command(lambda: rl_lab.replace_files(texts))

            before = self.files()
            outcome = Running(["rl_lab.py"], self.folder, fill, with_file_size_limit(2000)).finish()
            self.assertRefused(outcome, 1, "File too large", "earlier results were left as they were")
            self.assertEqual(self.files(), before)
        with self.subTest("a figure"):
            (self.folder / "figure.svg").write_text("earlier")
            before = self.files()

            def draw() -> None:
                plot_results.draw_atoms = small_figure
                plot_results.main(["--atoms", "--output", "figure.svg"])

            outcome = Running(["plot_results.py"], self.folder, draw, with_file_size_limit(2000)).finish()
            self.assertEqual(outcome.code, 1)
            self.assertIn("PlotProblem: figure.svg: cannot be written (File too large)", outcome.err)
            self.assertEqual(self.files(), before)

    def test_a_loss_that_is_not_finite(self):
        table = self.folder / "huge.json"
        table.write_text("[[1e308, -1e308], [1, 0]]")
        output = self.folder / "results"
        self.assertEqual(run_main("rl_lab.py", "--algorithm", "all", "--steps", 1, "--output", output).code, 0)
        before = self.files()
        with self.subTest("ppo fails first in a run of all three: nothing is replaced"):
            outcome = run_main("rl_lab.py", "--reward-table", table, "--output", output)
            self.assertRefused(outcome, 1, "ppo, step 1: loss is ", "rewards or --learning-rate")
        spoilt = {
            "loss": lambda value, policy: value * math.nan,
            # Nothing is added to the value, but the slope of the root at 0 is infinite.
            "gradient_norm": lambda value, policy: value + (policy - policy.detach()).sum().sqrt(),
        }
        for (quantity, spoil), algorithm in itertools.product(spoilt.items(), rl_lab.METHODS):
            method, calls = rl_lab.METHODS[algorithm], iter(range(100))

            def loss_that_fails_in_step_3(policy, *arguments):
                value, diagnostics = method.loss(policy, *arguments)
                return (spoil(value, policy) if next(calls) >= 2 else value), diagnostics

            with self.subTest(quantity, algorithm=algorithm):
                once = ("--max-updates", 1) if method.reuses_batch else ()
                with mock.patch.dict(rl_lab.METHODS, {algorithm: method._replace(loss=loss_that_fails_in_step_3)}):
                    outcome = call_main("rl_lab.py", "--algorithm", algorithm, *once, "--output", output)
                self.assertRefused(outcome, 1, f"{algorithm}, step 3: {quantity} is ", "rewards or --learning-rate")
        self.assertEqual(self.files(), before)

    def test_nobody_to_print_to(self):
        with self.subTest("standard output is full"):
            full = Path("/dev/full")
            if full.exists():

                def redirect() -> None:
                    os.dup2(os.open(full, os.O_WRONLY), 1)

                for arguments in (
                    ("rl_lab.py", "--algorithm", "atoms"),
                    ("token_objectives.py", "--output", self.folder / "t.json"),
                ):
                    outcome = run_main(*arguments, prepare=redirect)
                    self.assertRefused(outcome, 1, os.strerror(errno.ENOSPC))
                drawing = [str(LAB / "plot_results.py"), "--atoms", "--output", "t.svg"]
                outcome = start_script(drawing, self.folder, prepare=redirect).finish()
                self.assertRefused(outcome, 1, os.strerror(errno.ENOSPC))
        with self.subTest("standard output is closed"):
            outcome = run_main("rl_lab.py", "--algorithm", "atoms", prepare=lambda: setattr(sys, "stdout", None))
            self.assertEqual(outcome, Outcome(0, "", ""))
        with self.subTest("standard error is closed"):
            arguments = ("--algorithm", "dpo", "--steps", 1, "--output", self.folder / "quiet")
            outcome = run_main("rl_lab.py", *arguments, prepare=lambda: setattr(sys, "stderr", None))
            self.assertEqual(outcome.code, 0)
            self.assertTrue((self.folder / "quiet" / "dpo.csv").exists())


# ------------------------------------------------------------------------------------------ same command, same bytes


class SameBytes(CommandCase):
    def test_same_command_same_bytes_other_seed_other_bytes(self):
        commands = {
            "rl_lab.py": ("--algorithm", "all", "--steps", 3, "--preference-flips", 2),
            "ppo_chain.py": ("--steps", 3),
        }
        for program, arguments in commands.items():
            with self.subTest(program):
                printed = {}
                for name, seed in (("first", 5), ("second", 5), ("other", 6)):
                    outcome = run_main(program, *arguments, "--seed", seed, "--output", name, folder=self.folder)
                    self.assertEqual((outcome.code, outcome.err), (0, ""))
                    printed[name] = outcome.out.replace(name, "")
                first, second, other = (self.files(self.folder / name) for name in ("first", "second", "other"))
                self.assertEqual((first, printed["first"]), (second, printed["second"]))
                for name in first:
                    self.assertNotEqual(first[name], other[name])
        with self.subTest("token_objectives.py"):
            for name in ("a.json", "b.json"):
                self.assertEqual(run_main("token_objectives.py", "--output", name, folder=self.folder).code, 0)
            self.assertEqual(self.files()["a.json"], self.files()["b.json"])

    def test_seeds_are_the_single_runs(self):
        options = ("--algorithm", "grpo", "--steps", 2)
        outcome = run_main("rl_lab.py", *options, "--seeds", "3-4,0", "--output", "many", folder=self.folder)
        self.assertEqual((outcome.code, outcome.err), (0, ""))
        self.assertIn("medians over 3 seeds, 2 iterations", outcome.out)
        self.assertEqual({path.name for path in (self.folder / "many").iterdir()}, {"seed-0", "seed-3", "seed-4"})
        for seed in (0, 3, 4):
            run_main("rl_lab.py", *options, "--seed", seed, "--output", "one", folder=self.folder)
            self.assertEqual(self.files(self.folder / "many" / f"seed-{seed}"), self.files(self.folder / "one"))


# ------------------------------------------------------------------------------------------ importing


class Importing(CommandCase):
    def test_importing_prints_nothing_and_leaves_everything_as_it_was(self):
        modules = [Path(name).stem for name in PROGRAMS]
        for folder in ("verification", "extensions"):
            modules += [
                ".".join(path.relative_to(LAB).with_suffix("").parts)
                for path in sorted((LAB / folder).rglob("*.py"))
                if not path.stem.startswith(("test_", "__init__"))
            ]
        code = f"""
import sys
sys.argv = ["program", "--no-such-flag"]
import random, numpy, torch

def state():
    return (sys.argv, random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist(),
            torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled())

torch.set_num_threads(2)
before = state()
import importlib
for name in {modules!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as missing:
        # What compares with other libraries may need them; what belongs to the lab may not be missing.
        if missing.name.split(".")[0] in ("rl_lab", "extensions", "verification", "matplotlib") or "." not in name:
            raise
    after = state()
    if after != before:
        sys.exit(f"importing {{name}} changed " + str([(x, y) for x, y in zip(before, after) if x != y])[:300])
    if sys.exc_info() != (None, None, None):
        sys.exit(name)
"""
        self.assertEqual(run_process(["-B", "-c", code], LAB), Outcome(0, "", ""))

    def test_training_leaves_global_state_as_it_was(self):
        torch.manual_seed(3)

        def state():
            return (
                torch.get_rng_state().tolist(),
                torch.get_default_dtype(),
                torch.get_num_threads(),
                torch.is_grad_enabled(),
            )

        before = state()
        rl_lab.train("ppo", steps=1), rl_lab.train("dpo", steps=1, preference_flips=3), rl_lab.train("grpo", steps=1)
        ppo_chain.train_chain(steps=1), token_objectives.run_check(), rl_lab.worked_examples()
        self.assertEqual(state(), before)


# ------------------------------------------------------------------------------------------ Ctrl-C


class Interrupted(CommandCase):
    LINE = re.compile(r"[^\n]*interrupted[^\n]*\n")

    def assertOldOrNew(self, old: dict[str, bytes], new: dict[str, bytes]) -> int:
        """Every file is the earlier one or the one of a whole run, and there is no other; -> how many are new."""
        now = self.files(self.folder / "results")
        self.assertEqual(set(now), set(old))
        for name, content in now.items():
            self.assertIn(content, (old[name], new[name]), name)
        return sum(content == new[name] for name, content in now.items())

    def test_at_random_moments(self):
        for program, options, count in (("rl_lab.py", ("--algorithm", "all", "--seeds", "0-2"), 8), ("ppo_chain.py", (), 3)):
            run_main(program, *options, "--steps", 1, "--output", "results", folder=self.folder)
            old = self.files(self.folder / "results")
            begin = time.perf_counter()
            self.assertEqual(run_main(program, *options, "--steps", 12, "--output", "new", folder=self.folder).code, 0)
            duration = time.perf_counter() - begin
            new = self.files(self.folder / "new")
            self.assertFalse(set(old.items()) & set(new.items()))
            generator = random.Random(program)
            codes = []
            for part in range(count):
                shutil.rmtree(self.folder / "results")
                for name, content in old.items():
                    path = self.folder / "results" / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)
                with self.subTest(program, part=part):
                    child = self.start(program, *options, "--steps", 12, "--output", "results")
                    time.sleep(duration * (part + generator.random()) / count)
                    child.interrupt()
                    outcome = child.finish()
                    replaced = self.assertOldOrNew(old, new)
                    codes.append(outcome.code)
                    if outcome.code == 0 or outcome.out:  # it was through, or printing, before the signal came
                        self.assertEqual(replaced, len(new))
                    if outcome.code:
                        self.assertEqual(outcome.code, 130)
                        self.assertRegex(outcome.err, rf"\A{self.LINE.pattern}\Z")
                    if replaced:  # seeds that were through are saved: the line may not deny it
                        self.assertNotIn("nothing of this run was saved", outcome.err)
            self.assertIn(130, codes)
            shutil.rmtree(self.folder / "results")
            shutil.rmtree(self.folder / "new")

    def start(self, program: str, *arguments: object) -> Running:
        module = PROGRAMS[program]

        def main() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            module.main()

        return Running([program, *map(str, arguments)], self.folder, lambda: module.run_command(main))

    def test_while_files_are_written(self):
        paths = [self.folder / "results" / name for name in ("ppo.csv", "ppo.json", "dpo.csv")]
        old, new = {p.name: f"old {p.name}".encode() for p in paths}, {p.name: f"new {p.name}".encode() for p in paths}
        (self.folder / "results").mkdir()
        moments = 0
        for function in ("fsync", "replace"):
            for moment in range(len(paths)):
                for name, content in old.items():
                    (self.folder / "results" / name).write_bytes(content)
                calls = iter(range(100))
                real = getattr(os, function)

                def interrupted(*arguments):
                    if next(calls) == moment:
                        raise KeyboardInterrupt
                    return real(*arguments)

                with self.subTest(function, moment=moment), mock.patch.object(os, function, interrupted):
                    with self.assertRaises(KeyboardInterrupt):
                        rl_lab.replace_files({path: new[path.name].decode() for path in paths})
                    self.assertEqual(self.assertOldOrNew(old, new), moment if function == "replace" else 0)
                    moments += 1
        self.assertEqual(moments, 6)

    def test_a_process_of_its_own(self):
        # A hundred seeds go through the same tensors and are saved together; then come the next hundred.
        command = [sys.executable, "-B", LAB / "rl_lab.py", "--seeds", "0-999", "--steps", "20", "--output", "results"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

        def heed_interrupts() -> None:  # a suite that was started in the background would hand down that they are ignored
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        process = subprocess.Popen(command, cwd=self.folder, env=environment, preexec_fn=heed_interrupts, **pipes)
        first = self.folder / "results" / "seed-0" / "grpo.json"
        try:
            deadline = time.monotonic() + 60
            while not first.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
        self.assertEqual((process.returncode, out), (130, ""), err)
        self.assertRegex(err, rf"\A{self.LINE.pattern}\Z")
        for name, content in self.files().items():
            self.assertNotIn("partial", name)
            if name.endswith(".csv"):
                self.assertEqual(content.count(b"\n"), 22)
            else:
                json.loads(content)
        self.assertFalse((self.folder / "results" / "seed-999" / "ppo.csv").exists())

    def test_while_torch_is_loading(self):
        # A torch that is interrupted as soon as it is imported, found before the real one.
        (self.folder / "torch.py").write_text("raise KeyboardInterrupt\n")
        for program in ("rl_lab.py", "ppo_chain.py", "token_objectives.py"):
            with self.subTest(program):
                outcome = run_process(["-B", LAB / program], self.folder, PYTHONPATH=str(self.folder))
                self.assertEqual((outcome.code, outcome.out), (130, ""))
                self.assertRegex(outcome.err, rf"\A{self.LINE.pattern}\Z")

    def test_a_figure(self):
        (self.folder / "figure.svg").write_text("earlier")

        def interrupted_drawing() -> None:
            from matplotlib.figure import Figure

            Figure.savefig = mock.Mock(side_effect=KeyboardInterrupt)

        command = [str(LAB / "plot_results.py"), "--atoms", "--output", "figure.svg"]
        outcome = start_script(command, self.folder, prepare=interrupted_drawing).finish()
        self.assertEqual((outcome.code, outcome.out), (130, ""))
        self.assertRegex(outcome.err, rf"\A{self.LINE.pattern}\Z")
        self.assertEqual(self.files(), {"figure.svg": b"earlier"})


class Progress(CommandCase):
    def test_only_on_a_terminal(self):
        import pty

        for program, options, lines in (
            ("rl_lab.py", ("--seeds", "0-1"), ("ppo   2 seeds  step 3/3  expected reward 0.", "grpo  2 seeds  step 3/3")),
            ("ppo_chain.py", (), ("chain  step 3/3  expected return 0.",)),
        ):
            arguments = (*options, "--steps", 3, "--output", "results")
            with self.subTest(program, terminal=False):
                silent = run_main(program, *arguments, folder=self.folder)
                self.assertEqual((silent.code, silent.err), (0, ""))
            with self.subTest(program, terminal=True):
                ours, childs = pty.openpty()
                outcome = run_main(program, *arguments, folder=self.folder, stderr=childs)
                os.close(childs)
                shown = b""
                with contextlib.suppress(OSError):  # the end of a terminal is an error on Linux
                    while part := os.read(ours, 4096):
                        shown += part
                os.close(ours)
                self.assertEqual(outcome.out, silent.out)
                for line in lines:
                    self.assertIn(line, shown.decode())
                self.assertNotIn(b"\n", shown)  # one line, kept up to date, and cleared at the end
                self.assertRegex(shown.decode(), r"\r +\r$")


# ------------------------------------------------------------------------------------------ figures


def small_figure():
    figure, _ = plot_results.new_figure(1, panel_size=(2, 1))
    return figure


def write_run(folder: Path, name: str, columns: dict[str, Sequence[float]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    (folder / name).write_text("\n".join(lines) + "\n")


class Figures(CommandCase):
    COLUMNS = {"step": [0, 1, 2], "expected_reward": [0.2, 0.5, 0.9], "loss": [0, 9, 9], "entropy": [1.1, 0.8, 0.1]}

    def test_columns_are_read_by_name(self):
        for name, order in (("a", ("step", "expected_reward", "loss")), ("b", ("loss", "expected_reward", "step"))):
            write_run(self.folder / name, "ppo.csv", {column: self.COLUMNS[column] for column in order})
        drawn = []
        for name in ("a", "b"):
            outcome = call_main("plot_results.py", "--input", self.folder / name, "--output", self.folder / "figure.svg")
            self.assertEqual(outcome, Outcome(0, f"wrote {self.folder / 'figure.svg'}\n", ""))
            drawn.append((self.folder / "figure.svg").read_bytes())
        self.assertEqual(drawn[0], drawn[1])
        with self.subTest("a figure of other numbers is another figure"):
            write_run(self.folder / "b", "ppo.csv", {**self.COLUMNS, "expected_reward": [0.2, 0.5, 0.8]})
            call_main("plot_results.py", "--input", self.folder / "b", "--output", self.folder / "figure.svg")
            self.assertNotEqual((self.folder / "figure.svg").read_bytes(), drawn[0])

    def test_formats(self):
        for suffix in (".svg", ".png", ".pdf", ".SVG"):
            with self.subTest(suffix), mock.patch.object(plot_results, "draw_atoms", small_figure):
                path = self.folder / "new folder" / f"figure{suffix}"
                self.assertEqual(call_main("plot_results.py", "--atoms", "--output", path).out, f"wrote {path}\n")
                if suffix != ".SVG":
                    assert_figure(self, path)
                first = path.read_bytes()
                call_main("plot_results.py", "--atoms", "--output", path)
                self.assertEqual(path.read_bytes(), first)

    def test_seeds_become_a_median_and_a_band(self):
        rewards = [[0.2, r, 2 * r] for r in (0.1, 0.4, 0.3, 0.2, 0.5)]
        for seed, values in enumerate(rewards):
            write_run(self.folder / "many" / f"seed-{seed}", "grpo.csv", {"step": [0, 1, 2], "expected_reward": values})
        (curves,) = plot_results.read_folder(self.folder / "many")
        self.assertEqual((curves.kind, curves.method, curves.columns["expected_reward"].shape), ("bandit", "grpo", (5, 3)))
        figure = plot_results.draw_curves([curves])
        (axis,) = [axis for axis in figure.axes if axis.lines]
        self.assertEqual(axis.lines[0].get_ydata().tolist(), [0.2, 0.3, 0.6])
        (band,) = axis.collections
        # Of five sorted values the 5 % quantile lies 0.2 of the way from the first to the second: 0.1 + 0.2 * 0.1.
        heights = band.get_paths()[0].vertices[:, 1]
        self.assertAlmostEqual(min(heights[band.get_paths()[0].vertices[:, 0] == 1]), 0.12)
        self.assertAlmostEqual(max(heights[band.get_paths()[0].vertices[:, 0] == 1]), 0.48)
        self.assertEqual(figure.get_supxlabel(), "iteration; band: 5-95 % of the seeds")
        self.assertEqual([text.get_text() for text in figure.legends[0].texts], ["grpo (median of 5 seeds)"])
        with self.subTest("one run has no band"):
            write_run(self.folder / "one", "grpo.csv", {"step": [0, 1], "expected_reward": [0.2, 0.3]})
            figure = plot_results.draw_curves(plot_results.read_folder(self.folder / "one"))
            self.assertEqual([len(axis.collections) for axis in figure.axes if axis.lines], [0])
            self.assertEqual(figure.get_supxlabel(), "iteration")
            self.assertEqual([text.get_text() for text in figure.legends[0].texts], ["grpo"])
        with self.subTest("beside several seeds, one run is called neither median nor band"):
            both = plot_results.draw_curves([curves, *plot_results.read_folder(self.folder / "one")])
            labels = [text.get_text() for text in both.legends[0].texts]
            self.assertEqual([label.endswith("(median of 5 seeds)") for label in labels], [True, False])

    def test_several_folders_are_labelled(self):
        for name in ("left", "right"):
            write_run(self.folder / name, "ppo.csv", self.COLUMNS)
        write_run(self.folder / "right", "dpo.csv", {**self.COLUMNS, "dpo_training_loss": [0.7, 0.6, 0.5]})
        folders = [self.folder / "left", self.folder / "right"]
        figure = plot_results.draw_curves([curves for folder in folders for curves in plot_results.read_folder(folder)])
        labels = [text.get_text() for text in figure.legends[0].texts]
        self.assertEqual(set(labels), {"ppo left", "ppo right", "dpo right"})
        titles = [axis.get_title() for axis in figure.axes if axis.lines]
        self.assertEqual(titles, ["expected reward", "entropy (nats)", "DPO loss on the training labels"])
        with self.subTest("one folder is labelled by method only, and given twice is drawn once"):
            figure = plot_results.draw_curves(plot_results.read_folder(folders[1]))
            self.assertEqual({text.get_text() for text in figure.legends[0].texts}, {"ppo", "dpo"})
            with mock.patch.object(
                plot_results, "draw_curves", side_effect=lambda curves: self.assertEqual(len(curves), 2) or small_figure()
            ):
                call_main("plot_results.py", "--input", folders[1], folders[1], "--output", self.folder / "x.svg")

    def test_inputs_that_cannot_be_drawn(self):
        figure = self.folder / "figure.svg"
        figure.write_text("earlier")
        csv_files = {
            "no step": ("iteration,expected_reward\n0,1\n", "wanted a header with a column `step`"),
            "empty": ("", "wanted a header with a column `step`"),
            "header only": ("step,expected_reward\n", "at least one row"),
            "a word": ("step,expected_reward\n0,0.2\n1,high\n", "line 3, column expected_reward: got 'high'"),
            "a missing cell": ("step,expected_reward\n0,0.2\n1\n", "line 3, column expected_reward: got None"),
            "too many cells": ("step,expected_reward\n0,0.2\n1,0.3,0.4\n", "line 3"),
            "columns of something else": ("step,accuracy\n0,1\n", "none of the columns"),
            "a column twice": ("step,expected_reward,expected_reward\n0,0.2,0.3\n", "names a column twice"),
            "no number to draw": ("step,expected_reward\n0,inf\n", "column expected_reward holds an infinite number"),
            "no step to draw": ("step,expected_reward\n0,0.2\n1e300,0.3\n", "column step holds a number above 1e+15"),
            "not UTF-8": (b"step,expected_reward\n0,\xff\n", "cannot be read as text"),
        }
        for name, (content, words) in csv_files.items():
            with self.subTest(name):
                path = self.folder / name / "ppo.csv"
                path.parent.mkdir()
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
                self.assertRefused(
                    call_main("plot_results.py", "--input", path.parent, "--output", figure), 1, str(path.parent), words
                )
        (self.folder / "nothing here").mkdir()
        write_run(self.folder / "unequal" / "seed-0", "ppo.csv", {"step": [0, 1], "expected_reward": [0.2, 0.3]})
        write_run(self.folder / "unequal" / "seed-1", "ppo.csv", {"step": [0, 2], "expected_reward": [0.2, 0.3]})
        write_run(self.folder / "good", "ppo.csv", self.COLUMNS)
        for folder, words in (
            ("nowhere", "is not a folder; run rl_lab.py"),
            ("figure.svg", "is not a folder"),
            ("nothing here", "holds no CSV file"),
            ("unequal", "seeds of ppo differ"),
        ):
            with self.subTest(folder):
                path = self.folder / folder
                self.assertRefused(call_main("plot_results.py", "--input", path, "--output", figure), 1, str(path), words)
                outcome = call_main("plot_results.py", "--input", self.folder / "good", path, "--output", figure)
                self.assertRefused(outcome, 1, str(path), words)
        with self.subTest("matplotlib is missing"), mock.patch.dict(sys.modules, {"matplotlib.figure": None}):
            outcome = call_main("plot_results.py", "--input", self.folder / "good", "--output", figure)
            self.assertRefused(outcome, 1, "matplotlib is not installed", "pip install -r requirements.txt")
        self.assertEqual(figure.read_text(), "earlier")

    def test_nan_leaves_a_gap_and_is_no_error(self):
        write_run(self.folder / "run", "ppo.csv", {"step": [0, 1, 2], "expected_reward": [0.2, math.nan, 0.4]})
        figure = plot_results.draw_curves(plot_results.read_folder(self.folder / "run"))
        (axis,) = [axis for axis in figure.axes if axis.lines]
        self.assertTrue(math.isnan(axis.lines[0].get_ydata()[1]))


if __name__ == "__main__":
    unittest.main()
