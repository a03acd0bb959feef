"""Run the suite, as `python -m unittest` does, in fresh environments, one for each Python and torch, and print a table.

    python -m verification.versions --list
    python -m verification.versions
    python -m verification.versions --python /usr/bin/python3.12 --torch 2.13.0 2.14.1

Each row of the table is one virtual environment that pip filled from the index, ran the suite and was deleted; the versions
in it are what its interpreter reported. A row that could not be set up says so and why: nothing stands for a run but a run.

On Linux the index's own torch brings its GPU libraries, about 3 GB to download and 6 GB on disk, and cannot be imported
without them (libcudnn.so is missing then), so they are installed too, although the lab never uses them. Where pip finds a
CPU build first (--find-links, PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL), it takes that one. Downloads are shared among the rows
and deleted at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple, Sequence

from rl_lab import FileProblem, LabParser, format_table, run_command

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
PINNED_TORCH = next(line.split("==")[1] for line in REQUIREMENTS if line.startswith("torch=="))
OTHER_TORCH = ("2.9.1", "2.14.1")
OLDEST_PYTHON = (3, 10)
FREE_GB_WANTED = 12

REPORT_VERSIONS = """
import json, platform, torch, numpy, matplotlib
print(json.dumps([platform.python_version(), torch.__version__, numpy.__version__, matplotlib.__version__]))
"""

# unittest's own "Ran N tests" counts skipped classes in some releases of Python and not in others (3.12.1 does not).
RUN_SUITE = """
import sys, unittest

class Result(unittest.TextTestResult):
    passed = 0

    def addSuccess(self, test):
        super().addSuccess(test)
        self.passed += 1

runner = unittest.TextTestRunner(resultclass=Result)
program = unittest.main(module=None, argv=["suite", *sys.argv[1:]], testRunner=runner, exit=False)
print(f"\\npassed {program.result.passed}")
"""


class Interpreter(NamedTuple):
    path: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return ".".join(map(str, self.version))


class Row(NamedTuple):
    """One environment of the table; the versions are those the environment itself reported."""

    python: str
    torch: str
    numpy: str = "-"
    matplotlib: str = "-"
    passed: str = "-"
    seconds: str = "-"
    result: str = "not run"


def interpreter(path: str) -> Interpreter:
    """The Python at `path`, asked for its version. Raises FileProblem when it cannot be run or is too old."""
    try:
        answer = subprocess.run(
            [path, "-c", "import platform; print(platform.python_version())"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise FileProblem(f"--python {path}: cannot be run ({problem})") from problem
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", answer.stdout)
    if answer.returncode or not numbers:
        raise FileProblem(f"--python {path}: is no Python interpreter that runs")
    found = Interpreter(path, tuple(map(int, numbers.groups())))
    if found.version < OLDEST_PYTHON:
        raise FileProblem(f"--python {path}: is Python {found}, wanted {'.'.join(map(str, OLDEST_PYTHON))} or newer")
    return found


def installed_interpreters() -> list[Interpreter]:
    """The Python of this process and, for each other minor version, the newest that PATH or pyenv has."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    paths = [str(path) for path in sorted(pyenv.glob("3.*/bin/python3"))]
    paths += [path for minor in range(OLDEST_PYTHON[1], 30) if (path := shutil.which(f"python3.{minor}"))]
    newest = {}
    for path in paths:
        try:
            found = interpreter(path)
        except FileProblem:
            continue
        newest[found.version[:2]] = max(newest.get(found.version[:2], found), found, key=lambda python: python.version)
    newest[sys.version_info[:2]] = Interpreter(sys.executable, tuple(sys.version_info[:3]))
    return [newest[minor] for minor in sorted(newest)]


def suite() -> list[str]:
    """The test modules of a row: all that `python -m unittest` finds."""
    paths = sorted(ROOT.glob("test_*.py"))
    paths += [path for folder in ("verification", "extensions") for path in sorted((ROOT / folder).rglob("test_*.py"))]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]


def run(command: Sequence[str], scratch: Path, seconds: int) -> subprocess.CompletedProcess:
    """A command at the top level of the lab, which leaves no bytecode or caches there."""
    environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1", MPLBACKEND="Agg", MPLCONFIGDIR=str(scratch / "matplotlib"))
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        environment.pop(name, None)
    try:
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no end after {seconds} seconds")


def last_error(text: str) -> str:
    """The line of pip's or Python's output that names the problem."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    return next((line for line in reversed(lines) if re.match(r"ERROR|\w*Error:", line)), lines[-1])[:150]


def run_row(python: Interpreter, torch_version: str, scratch: Path) -> tuple[Row, str]:
    """Set up one environment, run the suite in it, delete it. Returns the row and what failed, as unittest printed it."""
    environment = scratch / "environment"
    planned = Row(str(python), torch_version)
    free = shutil.disk_usage(scratch).free / 1e9
    if free < FREE_GB_WANTED:
        return planned._replace(result=f"not run: {free:.0f} GB free, {FREE_GB_WANTED} wanted"), ""
    try:
        made = run([python.path, "-m", "venv", str(environment)], scratch, 300)
        if made.returncode:
            return planned._replace(result=f"not run: {last_error(made.stderr + made.stdout)}"), ""
        inside = str(environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
        packages = [f"torch=={torch_version}", *(line for line in REQUIREMENTS if not line.startswith("torch=="))]
        pip = [inside, "-m", "pip", "install", "--cache-dir", str(scratch / "downloads"), "--no-input", *packages]
        installed = run(pip, scratch, 3600)
        if installed.returncode:
            return planned._replace(result=f"not run: {last_error(installed.stderr)}"), ""
        versions = run([inside, "-c", REPORT_VERSIONS], scratch, 300)
        if versions.returncode:
            return planned._replace(result=f"not run: {last_error(versions.stderr)}"), ""
        start = time.monotonic()
        tested = run([inside, "-B", "-c", RUN_SUITE, *suite()], scratch, 1800)
        count = re.search(r"^passed (\d+)$", tested.stdout, re.MULTILINE)
        verdict = re.search(r"^(OK|FAILED).*$", tested.stderr, re.MULTILINE)
        row = Row(
            *json.loads(versions.stdout.splitlines()[-1]),
            passed=count.group(1) if count else "0",
            seconds=f"{time.monotonic() - start:.0f}",
            result=verdict.group(0) if verdict else f"FAILED: {last_error(tested.stderr)}",
        )
        return row, "" if row.result.startswith("OK") else tested.stderr
    finally:
        shutil.rmtree(environment, ignore_errors=True)


def build_parser() -> LabParser:
    parser = LabParser(
        prog="python -m verification.versions",
        description="Run the suite in fresh environments for several Python and torch versions; print what was really run.",
        epilog="Without --python and --torch: each Python found here with torch " + PINNED_TORCH + " (requirements.txt),\n"
        f"and this Python with torch {', '.join(OTHER_TORCH)}.",
    )
    parser.add_argument("--list", action="store_true", help="show the plan and end")
    parser.add_argument("--python", nargs="+", metavar="PATH", help="interpreters; default: those of PATH and pyenv")
    parser.add_argument("--torch", nargs="+", type=release, metavar="VERSION", help="torch releases; each with every Python")
    return parser


def release(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d+\.\d+", text):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a release such as {PINNED_TORCH}")
    return text


def main(argv: Sequence[str] | None = None) -> None:
    arguments = build_parser().parse_args(argv)
    pythons = [interpreter(path) for path in arguments.python] if arguments.python else installed_interpreters()
    if arguments.python or arguments.torch:
        plan = [(python, torch) for python in pythons for torch in arguments.torch or [PINNED_TORCH]]
    else:
        plan = [(python, PINNED_TORCH) for python in pythons]
        plan += [(python, torch) for python in pythons if python.path == sys.executable for torch in OTHER_TORCH]

    if arguments.list:
        rows = [[str(python), torch, python.path] for python, torch in plan]
        print(format_table(["python", "torch", "interpreter"], rows))
        print(f"\nIn each: {', '.join(suite())}")
        return

    rows, failed = [], False
    with tempfile.TemporaryDirectory(prefix="lab-versions-") as folder:
        for number, (python, torch) in enumerate(plan, 1):
            print(f"{number}/{len(plan)}  Python {python}, torch {torch} ...", file=sys.stderr, flush=True)
            row, failure = run_row(python, torch, Path(folder))
            print(f"{failure}     {row.result}", file=sys.stderr, flush=True)
            rows.append(row)
            failed = failed or bool(failure)
    print(f"{platform.system()} {platform.machine()}; in each environment: {', '.join(suite())}\n")
    print(format_table([name for name in Row._fields], rows))
    if failed or not any(row.result.startswith("OK") for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    run_command(main)
