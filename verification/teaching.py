"""Does the guide's suite say what is wrong? Known mistakes are put into the lab one by one; the first message is shown.

    python -m verification.teaching                  every edit: what is planted, and what the suite says first
    python -m verification.teaching --only clip      those whose name holds the word

Each edit is a topic of `HAND_WRITTEN` (hand_written_mutants.py), where its text stands; here stands the cause that the first
message must name. To add one, add a line to EDITS. An edit is

    named        the first failing test names the cause in words
    failed       a test fails, but its first message does not name the cause
    NOT SEEN     the 19 tests pass

Exit status 1 when an edit is not named. The suite runs in a process forked from one that has torch loaded already, stops at
the first failure, and reads a temporary copy of the lab.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import signal
import sys
import tempfile
import unittest
from pathlib import Path
from typing import NamedTuple, Sequence

import torch  # noqa: F401  loaded before the fork, so that an edit does not pay for it

from verification.hand_written_mutants import HAND_WRITTEN

ROOT = Path(__file__).resolve().parent.parent
FILES = (*HAND_WRITTEN, "test_rl_lab.py")
TIME_LIMIT = 120  # seconds for one edit: the whole suite takes a few

EDITS: dict[str, str] = {
    # topic of HAND_WRITTEN -> regular expression for the cause, searched in the first failing test's message
    "TD: bootstrap from a terminal state": r"V\(next\) is used after a real end",
    "TD: truncation taken as an end": "time limit is taken as a real end",
    "GAE: recursion cut by terminated": "stopped by `terminated` only",
    "GAE: gamma once only": "without gamma in the recursion",
    "GAE: lambda ignored": "without lambda",
    "GAE: returns without the value": "without adding V back",
    "clip: no minimum": "without the minimum",
    "clip: sign": "wrong sign",
    "ratio: inverted": "ratio is inverted",
    "ratio: old policy not detached": "old_logp is not detached",
    "PPO: old policy refreshed": "old is refreshed at every update",
    "GRPO: old policy refreshed": "old is refreshed at every update",
    "KL: arguments exchanged": "in the other direction",
    "k3: direction": "turned round",
    "DPO: no reference": "without the reference",
    "DPO: infinite at far margins": r"log\(sigmoid\(x\)\)",
    "DPO: beta outside": "beta outside",
    "groups: sample standard deviation": "sample standard deviation",
    "groups: mean of all groups": "over all prompts",
    "GRPO: one group": "over all prompts",
    "GRPO: KL pushes away": "KL is subtracted",
    "PPO: KL paid out": "paid out instead of charged",
    "gradient clip: never": "gradient clipping is off",
    "update: no stop": "KL stop is off",
    "tokens: mask follows the row": "one step late",
    "tokens: logits shifted too": "logits are shifted too",
    "tokens: mean for a sum": "mean over all positions in place of the sum",
    "per response: divided by the width": "padded width divides",
    "over tokens: padding counts": "padding is counted in the denominator",
    "sequence GRPO: old policy refreshed": "old is refreshed",
    "sequence GRPO: KL pushes away": "KL is subtracted",
    "sequence DPO: sides exchanged": "chosen and rejected are exchanged",
    "DPO training: reference refreshed": "reference follows the policy",
    "DPO training: clean labels": "clean labels are trained on",
    "chain: first steps, then second steps": "first steps are stacked before all second steps",
    "chain: lambda ignored": "lambda is ignored",
    "PPO: critic not trained": "critic is not trained",
}


class Verdict(NamedTuple):
    """What the suite said of one edit. `message` is empty where nothing failed."""

    topic: str
    test: str
    message: str

    @property
    def named(self) -> bool:
        return bool(re.search(EDITS[self.topic], self.message))

    def __str__(self) -> str:
        mark = "named   " if self.named else "failed  " if self.message else "NOT SEEN"
        lines = [f"{mark}  {self.topic}"]
        if self.message:
            lines += [f"          {self.test}", *(f"            {line}" for line in self.message.strip().splitlines())]
        return "\n".join(lines)


def edited(topic: str) -> tuple[str, str]:
    """The file that an edit changes, and its text with the edit. Raises ValueError when the text moved."""
    for file, rows in HAND_WRITTEN.items():
        for name, before, after in rows:
            if name == topic:
                source = (ROOT / file).read_text(encoding="utf-8")
                if source.count(before) != 1:
                    raise ValueError(
                        f"{file}: {topic}: the text occurs {source.count(before)} times, wanted once: {before!r}"
                    )
                return file, source.replace(before, after)
    raise ValueError(f"{topic!r}: not a topic of HAND_WRITTEN")


class FirstFailure(unittest.TestResult):
    """Stops at the first failure or error, subtests included, and keeps its test and its message."""

    first: tuple[str, str] | None = None

    def keep(self, test, problem) -> None:
        if self.first is None:
            kind, value, _ = problem
            text = str(value) if issubclass(kind, AssertionError) else f"{kind.__name__}: {value}"
            self.first = (test.id(), text)
            self.stop()

    def addFailure(self, test, err):
        self.keep(test, err)

    def addError(self, test, err):
        self.keep(test, err)

    def addSubTest(self, test, subtest, err):
        if err is not None:
            self.keep(subtest, err)


def suite_says(folder: Path) -> tuple[str, str]:
    """The first failing test of the copy in `folder` and its message (in this process: call it in a fork)."""
    sys.dont_write_bytecode = True
    sys.path[0] = str(folder)
    os.chdir(folder)
    for name in [name for name in sys.modules if f"{name}.py" in FILES]:
        del sys.modules[name]
    result = FirstFailure()
    result.failfast = True  # unittest then leaves a test at its first failing subtest, too
    unittest.defaultTestLoader.loadTestsFromName("test_rl_lab").run(result)
    return result.first or ("", "")


def try_edit(topic: str, folder: Path) -> Verdict:
    """Put one edit into the copy of the lab in `folder`, run the suite on it in a fork, and take the edit back."""
    file, text = edited(topic)
    (folder / file).write_text(text, encoding="utf-8")
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        try:
            os.close(reading)
            signal.alarm(TIME_LIMIT)
            sys.stdout = sys.stderr = io.StringIO()
            said = "\0".join(suite_says(folder))
        except BaseException as problem:
            said = f"import\0{type(problem).__name__}: {problem}"
        with os.fdopen(writing, "w", encoding="utf-8") as pipe:
            pipe.write(said)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        test, _, message = pipe.read().partition("\0")
    _, status = os.waitpid(process, 0)
    shutil.copy(ROOT / file, folder / file)
    return Verdict(topic, test, message if status == 0 else f"the suite ended by signal {os.WTERMSIG(status)}")


def try_all(topics: Sequence[str]) -> list[Verdict]:
    """A verdict for each topic, in order; a line of progress where a person watches."""
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="teaching-") as name:
        folder = Path(name)
        for file in FILES:
            shutil.copy(ROOT / file, folder / file)
        for number, topic in enumerate(topics, 1):
            if sys.stderr.isatty():
                print(f"\r\033[K{number} of {len(topics)}: {topic}", end="", file=sys.stderr, flush=True)
            verdicts.append(try_edit(topic, folder))
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
    return verdicts


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m verification.teaching", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--only", metavar="WORD", default="", help="only the edits whose name holds this word")
    only = parser.parse_args(argv).only
    topics = [topic for topic in EDITS if only in topic]
    if not topics:
        parser.error(f"--only: no edit's name holds {only!r}; the names: {', '.join(EDITS)}")
    verdicts = try_all(topics)
    print("\n".join(map(str, verdicts)))
    named, seen = sum(v.named for v in verdicts), sum(bool(v.message) for v in verdicts)
    print(
        f"\n{len(verdicts)} edits: {named} named by their cause, {seen - named} failed otherwise, {len(verdicts) - seen} not seen"
    )
    sys.exit(0 if named == len(verdicts) else 1)


if __name__ == "__main__":
    main()
