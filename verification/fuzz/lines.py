"""Random command lines of every command, made from its own parser: right ones, wrong ones, strange ones.

Whatever the line, a command ends within its time and memory, with exit status 0, 1 or 2, without a traceback; a refusal is one
line on stderr; exit 2 changes nothing; no partial file stays; what it wrote is whole.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import random
import re
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Iterator, NamedTuple
from unittest import mock

import rl_lab
from verification.fuzz import child
from verification.fuzz.case import Failure, Kind
from verification.fuzz.child import Command, End

SECONDS = 60.0  # of computing: lists of settings and several methods may take some
MEMORY = rl_lab.MEMORY_LIMIT + 2**28
SHARE_ANEW = 0.02  # of the lines start Python anew
LONG = {"--self-test"}  # minutes of work by design

# Flags that keep a training short; later ones on the same line may change them again.
SHORT = {
    "rl_lab.py": ("--steps", "2"),
    "ppo_chain.py": ("--steps", "2"),
    "extensions.control": ("--updates", "1", "--episodes", "2", "--passes", "1"),
    "extensions.gymnasium_ppo": ("--steps", "64", "--rollout-rows", "16", "--environments", "2", "--evaluation-episodes", "1"),
    "extensions.tiny_lm": ("--steps", "1", "--demonstrations", "4", "--evaluation-prompts", "10", "--dpo-prompts", "64"),
    "extensions.trust_region": ("--steps", "2"),
}
RARE = {"extensions.tiny_lm": 0.15, "extensions.gymnasium_ppo": 0.3, "extensions.control": 0.5}  # they take seconds

FIXTURES = ("good.npz", "pairs.npz", "table.json", "results", "seeds", "settings.json", "train.py", "run.sh", "log.jsonl", "empty")
NAMES = (
    *FIXTURES, *(f"missing.{suffix}" for suffix in ("npz", "pt", "jsonl", "json", "yaml", "svg", "png", "pdf", "csv")),
    "out", "new/deeper/out", "out.json", "out.svg", "out.png", "out.pdf", "new/out.svg", "results/ppo.csv", "fifo", "zero.npz", "loop",
    "/dev/null", "/dev/full", "/dev/zero", "/dev/stdin", "/", "..", ".", "", "a\nb", "é漢", "n\udcff", "n\udcff.npz", "a\x1b[31mb", "a\0b",
    "x" * 300, "x" * 300 + ".svg", "r$\\frac$.svg", "-", "good.npz/x", "read-only.json", "~", "$HOME", "out.SVG", " ", "out.",
)  # fmt: skip
WORDS = (
    "", "--", "-", "-1", "0", "1", "nan", "inf", "-inf", "1e999", "1e-400", "٣", "1_000", " 7", "7 ", "0x10", "1e3", "1" + "0" * 30,
    "9" * 5000, "x" * 5000, "a\nb", "é漢", "\udcff", "\0", "=", "a=b", "=b", "a=", "@file", "--help", "-h", "None", "True", "[]", "{}", "0,1",
    ",", "1,", "0-", "5-2", "0-5", "0-1e3", "0-99999999999", "1,1", "0.5", "1e-8", "\u2028", "%s", "%d%", "{0}", "${HOME}",
)  # fmt: skip
BY_METAVAR = {  # what a flag of this kind usually takes
    "N": ("1", "2", "3", "4", "5", "8", "0", "-1"),
    "X": ("0.5", "0.1", "1", "0.9", "1e-3", "0", "1e-300", "1e300", "100"),
    "A-B": ("0-1", "0", "1,2", "0,0", "3-2", "0-1,1"),
    "S": ("4.2", "2", "9.9"),
    "KEY=VALUE": ("beta=0.1", "loss=grpo", "beta=x", "n_envs=8", "kl_coef=0.2", "clip_high=nan", "learning_rate=1e-6", "std_ddof=1.7"),
    "ROW": ("grpo", "dpo", "ppo", "dapo@trl-1.16.0", "dr_grpo", "nothing"),
    "NAME": ("grpo", "dpo", "gspo", "dapo", "ipo", "nothing"),
    "OTHER": ("ipo", "grpo", "dapo", "kto", "nothing"),
    "FILE|ROW": ("dapo", "settings.json", "train.py", "missing.yaml", "results"),
    "LINE_OR_FILE": ("log.jsonl", "{'loss': 0.0, 'kl': 0.1}", "results", "results/ppo.csv", "loss=1", "{", "nothing", "{'loss': nan}"),
    "ID": ("CartPole-v1", "Pendulum-v1", "Nothing-v0", "CartPole", "Acrobot-v1"),
    "PARAMS,LAYERS,HIDDEN,VOCAB[,HEADS]": ("7e9,32,4096,152064,32", "1,1,1,1", "0,0,0,0", "7e9", "nan,1,1,1", "1e300,1,1,1"),
    "PARAMS": ("1e6", "7e9", "0", "nan"),
    "B": ("0.04", "0", "nan", "-1"),
}
LARGE = ("--group-size=4096", "--grpo-prompts=4096", "--ppo-samples=1000000", "--steps=100000", "--seeds=0-999", "--preference-flips=1000000")


class Line(NamedTuple):
    command: str
    words: tuple[str, ...]
    out: str = "file"
    encoding: str = "utf-8"
    anew: bool = False


@functools.cache
def parser_of(command: Command) -> argparse.ArgumentParser:
    """The parser of a command; of one that builds it inside main, as it stands when it begins to parse."""
    if hasattr(command.module, "build_parser"):
        return command.module.build_parser()
    seen = []

    def stop(parser, *rest):
        seen.append(parser)
        raise SystemExit

    with mock.patch.object(argparse.ArgumentParser, "parse_args", stop), mock.patch.object(rl_lab.LabParser, "parse_args", stop):
        with contextlib.suppress(SystemExit):
            command.module.main([])
    return seen[0]


@functools.cache
def fixtures() -> tempfile.TemporaryDirectory:
    """A folder with a whole file of each kind that a command reads, made once."""
    folder = tempfile.TemporaryDirectory(prefix="fuzz-fixtures-")
    place, captures = Path(folder.name), child.LAB / "extensions" / "audit" / "captures"
    shutil.copy(captures / "trl_grpo_grpo_pass2.npz", place / "good.npz")
    shutil.copy(captures / "trl_dpo_sigmoid.npz", place / "pairs.npz")
    (place / "table.json").write_text("[[1, 0.2], [0, 1]]")
    (place / "settings.json").write_text('{"num_generations": 8, "beta": 0.04, "loss_type": "dapo"}')
    (place / "train.py").write_text("from trl import GRPOConfig\nargs = GRPOConfig(beta=0.04, num_generations=4)\n")
    (place / "run.sh").write_text("python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8\n")
    (place / "log.jsonl").write_text('{"loss": 0.0, "kl": 0.1, "reward_std": 0.3}\n' * 3)
    (place / "read-only.json").write_text("{}")
    (place / "read-only.json").chmod(0o400)
    (place / "empty").mkdir()
    before = os.getcwd()
    with contextlib.redirect_stdout(io.StringIO()):
        rl_lab.main(["--steps", "3", "--output", str(place / "results")])
        rl_lab.main(["--steps", "2", "--algorithm", "ppo", "--seeds", "0-1", "--output", str(place / "seeds")])
    os.chdir(before)
    return folder


def lay_out(folder: Path) -> None:
    shutil.copytree(fixtures().name, folder, dirs_exist_ok=True)
    os.mkfifo(folder / "fifo")
    (folder / "zero.npz").symlink_to("/dev/zero")
    (folder / "loop").symlink_to("loop")


# ------------------------------------------------------------------------------------------ drawing


def word_for(rng: random.Random, action: argparse.Action) -> str:
    if rng.random() < 0.08:
        return rng.choice(WORDS)
    if action.choices:
        return str(rng.choice(list(action.choices)))
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if metavar in BY_METAVAR:
        return rng.choice(BY_METAVAR[metavar])
    if metavar in ("DIR", "FILE", "OUT", "BATCH", "CSV", "FOLDER"):
        usual = {"DIR": ("out", "results"), "OUT": ("out.json",), "BATCH": ("good.npz", "pairs.npz")}.get(metavar, FIXTURES)
        if "--plot" in action.option_strings or (metavar == "FILE" and "--output" in action.option_strings):
            usual = ("out.svg", "out.png", "out.json", "new/out.svg")
        return rng.choice(usual if rng.random() < 0.6 else NAMES)
    return rng.choice(WORDS)


def draw(rng: random.Random) -> Line:
    commands = child.commands()
    weights = [RARE.get(name, 1.0) for name in commands]
    name = rng.choices(list(commands), weights)[0]
    actions = [a for a in parser_of(commands[name])._actions if not LONG & set(a.option_strings)]
    positional = [action for action in actions if not action.option_strings]
    flags = [action for action in actions if action.option_strings and "--help" not in action.option_strings]
    chosen = rng.sample(flags, min(len(flags), rng.choice((0, 1, 1, 2, 2, 3, 4))))
    chosen += [action for action in flags if action.required and action not in chosen and rng.random() < 0.9]
    groups = []
    if name == "plot_results.py" and rng.random() < 0.9:
        groups.append(["--input", *rng.choice((["results"], ["seeds"], ["results", "results"]))])
    for action in chosen:
        flag = rng.choice(action.option_strings)
        if action.nargs == 0:
            groups.append([flag])
            continue
        values = [word_for(rng, action) for _ in range(rng.choice((1, 1, 2)) if action.nargs == "+" else 1)]
        groups.append([f"{flag}={values[0]}", *values[1:]] if rng.random() < 0.3 else [flag, *values])
    groups += [[word_for(rng, action)] for action in positional if rng.random() < 0.95]
    if rng.random() < 0.04:
        groups.append([rng.choice(("--help", "-h", "--nothing", "--stepz=3", "-x", "--output", *LARGE, *WORDS))])
    rng.shuffle(groups)
    words = [*SHORT.get(name, ()), *(word for group in groups for word in group)]
    out, encoding = "file", "utf-8"
    if rng.random() < 0.08:
        out = rng.choice(child.OUTPUTS)
    if rng.random() < 0.08:
        encoding = rng.choice(("ascii", "latin-1"))
    anew = rng.random() < SHARE_ANEW and out == "file" and encoding == "utf-8" and not any("\0" in word for word in words)
    return Line(name, tuple(words), out, encoding, anew)


# ------------------------------------------------------------------------------------------ judging


def judge(line: Line, folder: Path) -> Failure | None:
    command = child.commands()[line.command]
    work, streams = folder / "work", folder / "streams"
    for place in (work, streams):
        place.mkdir()
    lay_out(work)
    before = {name: stamp(work / name) for name in child.names_in(work)}
    if line.anew:
        end = child.start_anew(command, line.words, work, streams, seconds=SECONDS).finish()
    else:
        end = child.start(command, line.words, work, streams, seconds=SECONDS, out=line.out, encoding=line.encoding).finish()
    after = {name: stamp(work / name) for name in child.names_in(work)}
    return broken(command, end, line.out, SECONDS, MEMORY) or left_behind(command, end, work, before, after, line.out)


def stamp(path: Path) -> tuple:
    about = os.lstat(path)
    return about.st_ino, about.st_size, about.st_mtime_ns


NOTES = ("note: no installed font",)  # on stderr beside a success


def broken(command: Command, end: End, out: str, seconds: float, memory: int) -> Failure | None:
    """What every end of a command promises, whatever it was asked."""
    fails = lambda rule, detail, where=command.name: Failure(rule, where, detail)  # noqa: E731
    if child.TRACEBACK in end.err:
        return fails("traceback", end.err.strip().splitlines()[-1][:300], f"{command.name} {child.place_of(end.err)}")
    if end.waited:
        return fails("hang", f"had not ended after {child.WALL:g} s; wanted an end")
    if end.seconds > seconds:
        return fails("time", f"computed for {end.seconds:.1f} s, wanted at most {seconds:g}")
    if end.memory > memory:
        return fails("memory", f"took {end.memory / 1e6:.0f} MB, wanted at most {memory / 1e6:.0f}")
    if end.code not in (0, 1, 2):
        return fails("exit status", f"{end.code}, wanted 0, 1 or 2; stderr {end.err[:200]!r}")
    said = [text for text in re.split(r"[\n\r]", end.err) if text]
    if end.code == 0 and said and not all(text.startswith(NOTES) for text in said):
        return fails("words beside a success", end.err[:300])
    is_finding = command.findings and end.code == 1
    if is_finding and (said or out in ("full", "closed pipe") or (out == "file" and not end.out)):
        return fails("exit 1 without a finding", f"stdout to {out}; stderr {end.err[:200]!r}")
    if end.code and not is_finding and len(said) != 1 and not (out == "closed pipe" and not said):
        return fails("not one line", f"exit {end.code}, {len(said)} lines on stderr: {end.err[:300]!r}")
    if "an error inside the audit" in end.err:
        return fails("own error", end.err[:300], f"{command.name} {end.err.partition('audit (')[2][:60].partition(':')[0]}")
    if end.code and "\n" in end.err.rstrip("\n"):
        return fails("not one line", end.err[:300])
    return None


def left_behind(command: Command, end: End, work: Path, before: dict, after: dict, out: str = "file") -> Failure | None:
    """Partial files, changes by a refused line, results that are not whole."""
    changed = sorted(name for name in after if after[name] != before.get(name))
    partials = [name for name in after if name.endswith(".partial")]
    if partials:
        return Failure("partial file", command.name, f"left {partials[:3]}")
    gone = sorted(set(before) - set(after))
    refused = end.code == 2 and out == "file"  # what was written before the printing failed stays
    if gone or (refused and changed):
        return Failure("changed by a refusal", command.name, f"exit {end.code}, new {changed[:3]}, gone {gone[:3]}")
    for name in changed:
        problem = not_whole(work / name)
        if problem:
            return Failure("half a file", command.name, f"{name[:80]!r}: {problem}")
    return None


def not_whole(path: Path) -> str | None:
    """What is wrong with a result file, or None."""
    suffix = path.suffix.lower()

    def no_number(text: str) -> None:
        raise ValueError(f"{text} is no JSON")

    data = path.read_bytes()
    if data.startswith(b"{\n"):  # --json with any name
        suffix = ".json"
    try:
        if suffix == ".json":
            json.loads(data, parse_constant=no_number)
        elif suffix == ".jsonl":
            for text in data.splitlines():
                json.loads(text, parse_constant=no_number)
        elif suffix == ".csv":
            rows = data.decode().splitlines()
            if not data.endswith(b"\n") or len({row.count(",") for row in rows}) != 1:
                return "rows of different lengths, or cut"
        elif suffix in (".svg", ".png", ".pdf"):
            ends = {".svg": b"</svg>\n", ".png": b"IEND\xaeB`\x82", ".pdf": b"%%EOF\n"}
            if not data.endswith(ends[suffix]):
                return "is cut"
    except ValueError as problem:
        return str(problem)[:200]
    return None


# ------------------------------------------------------------------------------------------ showing, shrinking


def show(line: Line) -> str:
    words = " ".join(shlex.quote(word) if word.isprintable() and len(word) < 60 else f"$'{ascii(word)[1:-1][:60]}'" for word in line.words)
    module = line.command if line.command.endswith(".py") else f"-m {line.command}"
    notes = [f"stdout {line.out}"] * (line.out != "file") + [line.encoding] * (line.encoding != "utf-8") + ["a new Python"] * line.anew
    return f"python {module} {words}" + (f"  # {', '.join(notes)}" if notes else "")


def simpler(line: Line) -> Iterator[Line]:
    """Fewer words, plain streams, shorter words."""
    for count in (3, 2, 1):
        for place in range(len(line.words) - count + 1):
            yield line._replace(words=line.words[:place] + line.words[place + count :])
    for plain in (line._replace(anew=False), line._replace(out="file"), line._replace(encoding="utf-8")):
        if plain != line:
            yield plain
    for place, word in enumerate(line.words):
        for shorter in (word[: len(word) // 2], word[len(word) // 2 :], word[1:], word[:-1]):
            if 0 < len(shorter) < len(word) and len(word) < 400:
                yield line._replace(words=(*line.words[:place], shorter, *line.words[place + 1 :]))


KIND = Kind("lines", draw, judge, show, simpler, slice=10, turn=15)
