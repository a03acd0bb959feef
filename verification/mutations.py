"""Mutants of the lab: does a test fail when a formula, a loop or a check of the source is broken?

    python -m verification.mutations                     every mutant, one job
    python -m verification.mutations --jobs 2            the same on two processes
    python -m verification.mutations --only hand         the hand-written list alone
    python -m verification.mutations --only Adam.step    mutants whose description contains the word
    python -m verification.mutations --list              print the mutants, run none
    python -m verification.mutations --files extensions/objectives/*.py --sample 200
                                                         200 of those of other files, with the tests of their folder

A mutant is the source with one place changed. Two kinds are made of rl_lab.py, ppo_chain.py and token_objectives.py:
`HAND_WRITTEN`, the mistakes that people make in PPO, DPO and GRPO; and mechanical ones, generated from the syntax tree
(`mechanical_mutants`): operators, comparisons, operands of `and`/`or`, numbers, truth values and names in quotes, calls
dropped or with two arguments exchanged, keyword arguments dropped, statements dropped, branches swapped.

Each is written into a temporary copy of the project, and test_rl_lab.py and verification/test_*.py (except the test of
this file) run on it in a process forked from one that has torch loaded already, quick tests first, up to the first
failure. A test that never calls the mutated function, itself or in a program it starts, is left out. A mutant is

    killed       some test failed (the table names it), or ran into its time limit
    equivalent   listed in equivalent_mutants.json with the reason why no output can differ; not run unless --equivalents.
                 Entries name function, change and occurrence; those of a function that was changed since are dropped with a
                 notice, and run. When they have been read again: --restamp
    SURVIVED     a hole in the tests: the command then exits with 1

How long: the tests run once on the unchanged source, half a minute, then about a second of computing goes to each mutant.
Measured on two busy cores: the 1,077 of the atoms with --tests verification.test_oracles took 12 minutes, 40 of
extensions/objectives 2 minutes. At that rate all 4,000 of the top level take an hour, the 8,300 of extensions/objectives two
and a half, the 18,000 of extensions/audit longer than a night's patience: there, --sample 200 tells how tight the net is.

Results go to a file line by line, so that an interrupted run goes on where it was; a change of the sources or tests makes
everything run anew, the test that killed a mutant the last time first.

Not mutated, as a class: docstrings, annotations, imports, what is inside a `raise`, a `print` or an f-string, help texts,
and strings with a blank: they are wording, which the reader judges.

Why not a tool: cosmic-ray 8.7 and mutmut 3.8 were looked at. Cosmic-ray starts a test command for each mutant, which loads
torch each time: seconds, where a forked mutant costs a fraction of one; and it drops no call. mutmut works inside functions
only (no settings, no tables) and needs pytest. Neither exchanges two arguments, the typical mistake with a KL. Generating
mutants with `ast` takes fewer lines than adapting either.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import copy
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import unittest
from collections import Counter
from pathlib import Path
from typing import Iterator, NamedTuple, Sequence

import torch  # noqa: F401  loaded before the fork, so that a mutant does not pay for it

from verification.hand_written_mutants import HAND_WRITTEN

ROOT = Path(__file__).resolve().parent.parent
FILES = tuple(HAND_WRITTEN)
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.json")


class Mutant(NamedTuple):
    """One change of one file: the bytes from `start` to `end` become `text`."""

    file: str
    line: int
    function: str  # innermost def around it as "Adam.step"; "" for what runs at import
    first_line: int  # of that def, decorators included; 0 at import
    before: str  # the statement, shortened around the change
    after: str
    change: str  # "Add -> Sub", "detach() dropped": what is done, without the text around it
    nth: int  # among the same changes of this function
    start: int
    end: int
    text: str
    topic: str = ""  # hand-written mutants

    @property
    def key(self) -> str:
        """The same for the same change, wherever the function stands in its file and however its lines are broken."""
        number = f" ({self.nth})" if self.nth > 1 else ""
        return f"{self.place}: {self.topic or self.change}{number}"

    @property
    def place(self) -> str:
        return f"{self.file} {self.function or 'module'}"

    def matches(self, words: str) -> bool:
        if words in ("hand", "mechanical"):
            return bool(self.topic) == (words == "hand")
        return words in f"{self} {self.key}"

    def apply(self, source: str) -> str:
        raw = source.encode()
        return (raw[: self.start] + self.text.encode() + raw[self.end :]).decode()

    def __str__(self) -> str:
        what = f"{self.topic}: " if self.topic else ""
        return f"{self.file}:{self.line}  {what}{self.before} -> {self.after}"


# ------------------------------------------------------------------------------------------ mechanical mutants

OPERATORS = {
    ast.Add: [ast.Sub], ast.Sub: [ast.Add], ast.Mult: [ast.Div], ast.Div: [ast.Mult], ast.Pow: [ast.Mult],
    ast.FloorDiv: [ast.Mult], ast.Mod: [ast.Mult], ast.BitAnd: [ast.BitOr], ast.BitOr: [ast.BitAnd],
    ast.Lt: [ast.LtE, ast.GtE], ast.LtE: [ast.Lt, ast.Gt], ast.Gt: [ast.GtE, ast.LtE], ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq], ast.NotEq: [ast.Eq], ast.Is: [ast.IsNot], ast.IsNot: [ast.Is], ast.In: [ast.NotIn],
    ast.NotIn: [ast.In], ast.And: [ast.Or], ast.Or: [ast.And],
}  # fmt: skip
NAMES = dict(
    min="max", max="min", minimum="maximum", maximum="minimum", amin="amax", amax="amin", sum="mean", mean="sum", any="all",
    all="any", zeros="ones", zeros_like="ones_like", ones_like="zeros_like", softmax="log_softmax", log_softmax="softmax",
)  # fmt: skip
MODULES = {name for name in sys.stdlib_module_names} | {"torch", "F"}
WORDING_KEYWORDS = {"help", "description", "epilog", "metavar"}


def is_wording(node: ast.AST) -> bool:
    """A string that is not one plain word: it is there to be read."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) != 1


def variants(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What may stand in the place of `node`, each with a name that holds nothing of the text around it."""

    def changed(**fields: object) -> ast.AST:
        new = copy.copy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        return new

    def name_of(operator: ast.AST) -> str:
        return type(operator).__name__

    match node:
        case ast.BinOp() | ast.AugAssign() | ast.BoolOp():
            for other in OPERATORS.get(type(node.op), ()):
                yield f"{name_of(node.op)} -> {other.__name__}", changed(op=other())
            if isinstance(node, ast.BoolOp):
                for i in range(len(node.values)):
                    rest = node.values[:i] + node.values[i + 1 :]
                    what = f"operand {i + 1} of {name_of(node.op)} dropped"
                    yield what, changed(values=rest) if len(rest) > 1 else rest[0]
        case ast.Compare():
            for i, op in enumerate(node.ops):
                for other in OPERATORS[type(op)]:
                    yield f"{name_of(op)} -> {other.__name__}", changed(ops=[*node.ops[:i], other(), *node.ops[i + 1 :]])
        case ast.UnaryOp():
            yield f"{name_of(node.op)} dropped", node.operand
        case ast.IfExp():
            yield "branches exchanged", changed(body=node.orelse, orelse=node.body)
        case ast.Constant(value=bool(value)):
            yield f"{value} -> {not value}", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield from ((f"{value} -> {other}", ast.Constant(other)) for other in (value + 1, value - 1) if other >= 0)
        case ast.Constant(value=float(value)):
            other = 2 * value if value else 1.0
            yield f"{value} -> {other}", ast.Constant(other)
        case ast.Constant(value=str(value)) if not is_wording(node):
            yield f"{value!r} -> 'X'", ast.Constant("X")
        case ast.Name(id=name) if name in NAMES:
            yield f"{name} -> {NAMES[name]}", changed(id=NAMES[name])
        case ast.Attribute(attr=name) if name in NAMES:
            yield f"{name} -> {NAMES[name]}", changed(attr=NAMES[name])
        case ast.Call(func=func, args=args, keywords=keywords):
            called = f"{getattr(func, 'attr', getattr(func, 'id', 'call'))}()"
            of_module = isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id in MODULES
            if isinstance(func, ast.Attribute) and not of_module:
                yield f"{called} dropped", func.value
            elif args and not isinstance(args[0], ast.Starred) and not any(map(is_wording, args)):
                yield f"{called} dropped", args[0]
            if not any(is_wording(arg) or isinstance(arg, ast.Starred) for arg in args):
                for i in range(len(args) - 1):
                    exchanged = [*args[:i], args[i + 1], args[i], *args[i + 2 :]]
                    yield f"{called}: arguments {i + 1} and {i + 2} exchanged", changed(args=exchanged)
            for i, keyword in enumerate(keywords):
                if keyword.arg not in WORDING_KEYWORDS and keyword.arg is not None:
                    yield f"{called}: {keyword.arg}= dropped", changed(keywords=keywords[:i] + keywords[i + 1 :])
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Break() | ast.Continue() | ast.Return(value=None):
            yield f"{name_of(node)} dropped", ast.Pass()


def mechanical_mutants(file: str, source: str) -> list[Mutant]:
    """All one-place changes of a file, in the order of the file."""
    raw = source.encode()
    line_starts = [0]
    for line in raw.splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(line))
    found: list[Mutant] = []
    seen: Counter[tuple[str, str]] = Counter()

    def span(node: ast.AST) -> tuple[int, int]:
        return line_starts[node.lineno - 1] + node.col_offset, line_starts[node.end_lineno - 1] + node.end_col_offset

    def head(statement: ast.stmt) -> str:
        """A statement on one line, without the statements inside it."""
        new = copy.copy(statement)
        for name in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(getattr(new, name, None), list):
                setattr(new, name, [ast.Pass()] if name == "body" else [])
        if isinstance(new, ast.Try):
            new.finalbody = [ast.Pass()]
        return " ".join(ast.unparse(new).removesuffix("pass").split())

    def add(place: tuple, change: str, node: ast.AST, before: str, after: str, text: str) -> None:
        function, first_line = place
        seen[function, change] += 1
        told = (*shortened(before, after), change, seen[function, change])
        found.append(Mutant(file, node.lineno, function, first_line, *told, *span(node), text))

    def visit(node: ast.AST, place: tuple, statement: ast.stmt, replace) -> None:
        """`replace(new)` puts a node in the place of `node` in its parent, so that the statement can be printed with it."""
        if isinstance(node, ast.stmt):
            statement = node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            return
        if isinstance(node, (ast.expr, ast.stmt)):
            for change, new in variants(node):
                if ast.unparse(new) == ast.unparse(node):  # two equal arguments exchanged
                    continue
                before = head(statement)
                if isinstance(node, ast.stmt):
                    after = text = ast.unparse(new)
                else:
                    replace(new)
                    after = head(statement)
                    replace(node)
                    plain = isinstance(new, (ast.Constant, ast.Name, ast.Attribute, ast.Call, ast.Subscript))
                    text = ast.unparse(new) if plain else f"({ast.unparse(new)})"
                add(place, change, node, before, after, text)
        match node:
            case ast.JoinedStr() | ast.Raise() | ast.Import() | ast.ImportFrom():
                return
            case ast.Expr(value=ast.Constant()):
                return
            case ast.Try(body=[ast.Import(), *_]):
                return
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                return
            case ast.keyword(arg=name) if name in WORDING_KEYWORDS:
                return
            case ast.If(test=test) | ast.While(test=test):
                negated = f"not ({ast.unparse(test)})"
                add(place, "condition negated", test, head(node), head(node).replace(ast.unparse(test), negated, 1), negated)
            case ast.For(iter=iterable):
                empty = head(node).replace(ast.unparse(iterable), "()", 1)
                add(place, "loop emptied", iterable, head(node), empty, "()")
            case ast.comprehension(ifs=tests):
                for test in tests:
                    add(place, "condition of a comprehension dropped", test, ast.unparse(test), "True", "True")
            case ast.With(items=[ast.withitem(context_expr=ast.Call(func=ast.Attribute(attr="no_grad")) as call)]):
                text = "torch.enable_grad()"
                add(place, "no_grad -> enable_grad", call, head(node), f"with {text}:", text)
            case ast.FunctionDef(decorator_list=decorators):
                for decorator in decorators:
                    before, after = f"@{ast.unparse(decorator)} def {node.name}", f"def {node.name}"
                    add(place, "decorator dropped", decorator, before, after, "lambda f: f")
        inner = place
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name = f"{place[0]}.{node.name}".lstrip(".")
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            inner = (name, first if isinstance(node, ast.FunctionDef) else place[1])
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "bases", "targets", "target", "ops", "op", "ctx"):
                continue
            where = inner if field == "body" and isinstance(node, (ast.FunctionDef, ast.ClassDef)) else place
            if isinstance(value, ast.expr) or isinstance(value, (ast.keyword, ast.arguments)):
                visit(value, where, statement, lambda new, field=field: setattr(node, field, new))
            elif isinstance(value, list):
                for i, item in enumerate(value):
                    if isinstance(item, ast.AST):
                        visit(item, where, statement, lambda new, value=value, i=i: value.__setitem__(i, new))

    tree = ast.parse(source)
    for top in tree.body:
        visit(top, ("", 0), top, None)
    return found


def shortened(before: str, after: str, around: int = 40) -> tuple[str, str]:
    """Both texts without what they share, except for some characters around the difference."""
    same = len(os.path.commonprefix([before, after]))
    tail = len(os.path.commonprefix([before[same:][::-1], after[same:][::-1]]))
    low, high = max(0, same - around), max(0, tail - around)
    return tuple(("…" if low else "") + text[low : len(text) - high] + ("…" if high else "") for text in (before, after))


def hand_written_mutants(file: str, source: str) -> list[Mutant]:
    """The mutants of HAND_WRITTEN. Raises ValueError where the text to change does not occur exactly once."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    mutants = []
    for topic, before, after in HAND_WRITTEN.get(file, ()):
        if source.count(before) != 1:
            raise ValueError(f"{file}: {topic}: found {source.count(before)} times, wanted once: {before!r}")
        start = len(source[: source.index(before)].encode())
        line = source[: source.index(before)].count("\n") + 1
        around = max(
            (f for f in functions if f.body[0].lineno <= line <= f.end_lineno), key=lambda f: f.lineno, default=None
        )
        first = min([around.lineno, *(d.lineno for d in around.decorator_list)]) if around else 0
        flat = (" ".join(before.split()), " ".join(after.split()))
        name = around.name if around else ""
        end = start + len(before.encode())
        mutants.append(Mutant(file, line, name, first, *flat, "", 1, start, end, after, topic))
    return mutants


def read_sources(files: Sequence[str] = FILES) -> dict[str, str]:
    return {file: (ROOT / file).read_text(encoding="utf-8") for file in files}


def all_mutants(sources: dict[str, str]) -> list[Mutant]:
    """Hand-written ones first."""
    hand = [mutant for file, source in sources.items() for mutant in hand_written_mutants(file, source)]
    return hand + [mutant for file, source in sources.items() for mutant in mechanical_mutants(file, source)]


# ------------------------------------------------------------------------------------------ equivalent mutants


class _WithoutWording(ast.NodeTransformer):
    """What is not mutated may change without a new look at the equivalents: docstrings, messages, texts."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("") if is_wording(node) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant("")

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)


def function_stamps(file: str, source: str) -> dict[str, str]:
    """"FILE FUNCTION" -> a short hash of the function without its wording. Classes count as functions."""
    texts: dict[str, str] = {}

    def visit(nodes: Iterator[ast.AST], above: str) -> None:
        for node in nodes:
            name = above
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                name = f"{above}.{node.name}".lstrip(".")
                place = f"{file} {name}"
                texts[place] = texts.get(place, "") + ast.unparse(node)
            visit(ast.iter_child_nodes(node), name)

    tree = _WithoutWording().visit(ast.parse(source))
    visit(ast.iter_child_nodes(tree), "")
    rest = [node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    texts[f"{file} module"] = "".join(map(ast.unparse, rest))
    return {place: hashlib.sha256(text.encode()).hexdigest()[:8] for place, text in texts.items()}


def place_of(key: str) -> str:
    """The "FILE FUNCTION" that the key of a mutant begins with."""
    return key.partition(": ")[0]


class Equivalents(NamedTuple):
    """What equivalent_mutants.json holds of some files."""

    reasons: dict[str, str]  # key of a mutant -> why no output can differ
    dropped: dict[str, str]  # the same, of functions that were changed or are gone

    def notice(self) -> str:
        """One line per changed function; empty when all entries hold."""
        places = Counter(map(place_of, self.dropped))
        lines = [f"changed since its equivalents were listed: {place} ({n} of them run now)" for place, n in places.items()]
        return "\n".join([*lines, "Read them again, mend equivalent_mutants.json, then --restamp."] if lines else [])


def read_equivalents(sources: dict[str, str]) -> Equivalents:
    listed = json.loads(EQUIVALENT.read_text(encoding="utf-8"))
    stamps = {place: stamp for file, source in sources.items() for place, stamp in function_stamps(file, source).items()}
    equivalents = Equivalents({}, {})
    for group in listed["groups"]:
        for key in group["mutants"]:
            place = place_of(key)
            if place.split()[0] in sources:
                holds = listed["functions"].get(place) == stamps.get(place, "gone")
                (equivalents.reasons if holds else equivalents.dropped)[key] = group["reason"]
    return equivalents


def restamp(sources: dict[str, str]) -> str:
    """Note the functions of the listed equivalents as they are now; entries that are no mutants any more are taken out."""
    listed = json.loads(EQUIVALENT.read_text(encoding="utf-8"))
    stamps = {place: stamp for file, source in sources.items() for place, stamp in function_stamps(file, source).items()}
    keys, gone = {mutant.key for mutant in all_mutants(sources)}, 0
    for group in listed["groups"]:
        kept = [key for key in group["mutants"] if place_of(key).split()[0] not in sources or key in keys]
        gone += len(group["mutants"]) - len(kept)
        group["mutants"] = kept
    listed["groups"] = [group for group in listed["groups"] if group["mutants"]]
    places = sorted({place_of(key) for group in listed["groups"] for key in group["mutants"]})
    listed["functions"] = {place: stamps.get(place) or listed["functions"][place] for place in places}
    EQUIVALENT.write_text(json.dumps(listed, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return f"{len(places)} functions with equivalents noted as they are; {gone} entries that are no mutants now taken out"


# ------------------------------------------------------------------------------------------ running tests on a mutant


def make_copy(folder: Path, names: Sequence[str]) -> None:
    """A copy of the project; the tests are compiled once. The sources never are: a stale one could hide the next mutant."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__"))
    for name in names:
        path = folder / (name.replace(".", "/") + ".py")
        if path.exists():
            compileall.compile_file(path, quiet=2)


def enter(folder: Path) -> None:
    """Make this process import from the copy in `folder` and leave its temporary files beside it (call it in a fork)."""
    scratch = folder.parent / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    sys.dont_write_bytecode = True
    os.environ.update(PYTHONDONTWRITEBYTECODE="1", TMPDIR=str(scratch), OMP_NUM_THREADS="1")
    tempfile.tempdir = None
    os.chdir(folder)
    sys.path[0] = str(folder)
    for name in [name for name in sys.modules if name.split(".")[0] == "verification"]:
        del sys.modules[name]


def load_tests(names: Sequence[str]) -> dict[str, unittest.TestCase]:
    """The single tests of the named modules, by their id."""

    def flat(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
        for item in suite:
            if isinstance(item, unittest.TestSuite):
                yield from flat(item)
            else:
                yield item

    return {test.id(): test for test in flat(unittest.TestLoader().loadTestsFromNames(names))}


def run_one(test: unittest.TestCase, last_class: dict[str, type]) -> bool:
    """Whether a test passes. `last_class`: of each module, the class that ran last; filled here.

    Quick tests of all modules come first, and some share what a module computed once: what setUpModule made is therefore
    kept until the process ends. unittest has no public way to say so.
    """
    result = unittest.TestResult()
    module = type(test).__module__
    result._testRunEntered = True  # not the outermost suite: it tears nothing down at its end
    result._previousTestClass = last_class.get(module)
    last_class[module] = type(test)
    try:
        unittest.TestSuite([test]).run(result)
    except BaseException:  # even Ctrl-C or an exit that a mutant lets through is a failure of its test
        return False
    return result.wasSuccessful()


class Baseline(NamedTuple):
    """The tests on the unchanged source."""

    seconds: dict[str, float]
    calls: dict[
        str, list[str]
    ]  # functions that a test or an earlier one of its module calls, as "file:first line"; "*": programs
    at_import: list[str]  # functions that importing calls: a mutant of them concerns every test
    failing: list[str]  # these prove nothing and are left out


def measure_baseline(folder: Path, names: Sequence[str], sources: dict[str, str]) -> Baseline:
    """Run all tests on the unchanged copy (in this process: call it in a fork)."""
    seconds: dict[str, float] = {}
    calls: dict[str, list[str]] = {}
    failing: list[str] = []
    current: set[str] = set()
    files = {str(folder / file): file for file in sources}

    def trace(frame, event, argument):
        code = frame.f_code
        if code.co_filename in files:
            current.add(f"{files[code.co_filename]}:{code.co_firstlineno}")

    def audit(event: str, arguments: tuple) -> None:
        if event in ("subprocess.Popen", "os.fork"):
            current.add("*")

    sys.addaudithook(audit)
    enter(folder)
    sys.settrace(trace)
    tests = load_tests(names)
    sys.settrace(None)
    at_import = sorted(current)
    last_class: dict[str, type] = {}
    for test in tests.values():
        if type(test).__module__ not in last_class:
            current.clear()
        started = time.perf_counter()
        sys.settrace(trace)
        passed = run_one(test, last_class)
        sys.settrace(None)
        if not passed:
            failing.append(test.id())
            continue
        seconds[test.id()] = time.perf_counter() - started
        calls[test.id()] = sorted(current)
    return Baseline(seconds, calls, at_import, failing)


def chosen_tests(mutant: Mutant, baseline: Baseline, first: Sequence[str]) -> list[str]:
    """The tests that can notice the mutant: likely killers first, then by their time."""
    place = f"{mutant.file}:{mutant.first_line}"
    able = [
        name for name in baseline.seconds
        if not mutant.first_line or place in baseline.at_import or {place, "*"} & set(baseline.calls[name])
    ]  # fmt: skip
    rank = {name: position for position, name in reversed(list(enumerate(first)))}
    return sorted(able, key=lambda name: (rank.get(name, len(rank)), baseline.seconds[name]))


def find_killer(folder: Path, names: Sequence[str], ids: Sequence[str], baseline: Baseline, report) -> None:
    """Run tests up to the first failure and report its name, or None (in this process: call it in a fork)."""
    enter(folder)
    tests: dict[str, unittest.TestCase] = {}
    last_class: dict[str, type] = {}
    for name in ids:
        if name not in tests:
            try:
                tests.update(load_tests([next(module for module in names if name.startswith(module))]))
            except BaseException as problem:
                return report(f"import ({type(problem).__name__})")
            if name not in tests:  # unittest puts a test that fails in the place of a module that cannot be imported
                return report("import")
        # Computing time, so that a busy machine kills nothing; and the longest wait, for a test whose child hangs. A test
        # that found everything computed by an earlier one when it was measured needs more than it did then.
        limit = 20 + 10 * baseline.seconds[name]
        timers = ((signal.ITIMER_PROF, signal.SIGPROF, limit), (signal.ITIMER_REAL, signal.SIGALRM, 5 * limit))
        for timer, number, seconds in timers:
            signal.signal(number, lambda *_: (report(f"{name} (time limit)"), os._exit(0)))
            signal.setitimer(timer, seconds)
        passed = run_one(tests[name], last_class)
        for timer, *_ in timers:
            signal.setitimer(timer, 0)
        if not passed:
            return report(name)
    report(None)


def in_fork(action, result: Path) -> int:
    """Start `action(report)` in a quiet process group of its own, where `report(x)` writes x to the file -> process id."""
    result.unlink(missing_ok=True)
    process = os.fork()
    if process:
        return process
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):  # a run in the background ignores Ctrl-C, which tests send
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, 2**30))

        def report(value: object) -> None:
            partial = result.with_suffix(".partial")
            partial.write_text(json.dumps(value))
            partial.rename(result)

        action(report)
    except BaseException as problem:
        result.write_text(json.dumps({"problem": f"{type(problem).__name__}: {problem}"}))
    finally:
        os._exit(0)


class Lane:
    """A copy of the project and the mutant that is being tried on it."""

    def __init__(self, folder: Path, sources: dict[str, str], names: Sequence[str]):
        self.folder, self.result, self.sources = folder / "project", folder / "result.json", sources
        make_copy(self.folder, names)
        for file, source in sources.items():
            (self.folder / file).write_text(source, encoding="utf-8")
        self.mutant: Mutant | None = None

    def start(self, mutant: Mutant, names, ids, baseline: Baseline) -> None:
        (self.folder / mutant.file).write_text(mutant.apply(self.sources[mutant.file]), encoding="utf-8")
        self.mutant, self.deadline = mutant, time.monotonic() + 60 + 10 * sum(baseline.seconds[name] for name in ids)
        self.process = in_fork(lambda report: find_killer(self.folder, names, ids, baseline, report), self.result)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)

    def stop(self) -> None:
        if self.mutant:
            self.kill()
            os.waitpid(self.process, 0)

    def finished(self) -> str | None | bool:
        """False while it runs; then the killer, or None."""
        done, _ = os.waitpid(self.process, os.WNOHANG)
        if not done:
            if time.monotonic() < self.deadline:
                return False
            self.kill()
            os.waitpid(self.process, 0)
        self.kill()  # programs that a test left behind
        (self.folder / self.mutant.file).write_text(self.sources[self.mutant.file], encoding="utf-8")
        self.mutant = None
        return json.loads(self.result.read_text()) if self.result.exists() else "the process died or ran out of time"


def test_modules(files: Sequence[str] = FILES) -> list[str]:
    """The tests that are meant for these files: of the top level, test_rl_lab and the modules of verification/ (without the
    test of this file); of an extension, the tests in its folder and the modules of verification/ that name it."""
    top_level = bool(set(files) & set(FILES))
    extensions = {file.split("/")[1] for file in files if file.startswith("extensions/")}
    modules = ["test_rl_lab"] if top_level else []
    for path in sorted((ROOT / "verification").glob("test_*.py")):
        if path.stem != "test_teeth" and (top_level or any(f"_{name}_" in path.stem for name in extensions)):
            modules.append(f"verification.{path.stem}")
    beside = sorted(path for name in extensions for path in (ROOT / "extensions" / name).rglob("test_*.py"))
    return modules + [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in beside]


def digest(names: Sequence[str], sources: dict[str, str]) -> str:
    """Of everything a result depends on."""
    tests = [ROOT / f"{name.replace('.', '/')}.py" for name in names]
    parts = [" ".join((*names, *sources)), *sources.values(), *(p.read_text(encoding="utf-8") for p in tests if p.exists())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def read_records(path: Path) -> list[dict]:
    """Whole lines of an earlier run; a last line that was cut off by an interruption is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def try_mutants(
    mutants: Sequence[Mutant], sources: dict[str, str], names: Sequence[str], jobs: int, output: Path, fresh: bool = False
) -> dict[str, str | None]:
    """Key of each mutant -> the test that killed it, or None. Raises ValueError when the unchanged source fails."""
    stamp = digest(names, sources)
    records = read_records(output)
    known = {r["mutant"]: r["killed_by"] for r in records if r.get("digest") == stamp and "mutant" in r and not fresh}
    earlier = {r["mutant"]: r["killed_by"] for r in records if r.get("killed_by")}
    results = {mutant.key: known[mutant.key] for mutant in mutants if mutant.key in known}
    waiting = [mutant for mutant in mutants if mutant.key not in results]
    if not waiting:
        return results
    output.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-"))
        file = stack.enter_context(open(output, "a", encoding="utf-8"))

        def save(record: dict) -> None:
            file.write(json.dumps({"digest": stamp, **record}) + "\n")
            file.flush()

        lanes = []
        for number in range(jobs):
            folder = Path(scratch) / str(number)
            folder.mkdir()
            lanes.append(Lane(folder, sources, names))
            stack.callback(lanes[-1].stop)
        stored = next((r["baseline"] for r in records if r.get("digest") == stamp and "baseline" in r), None)
        if stored is None:
            print("running the tests on the unchanged source ...", file=sys.stderr, flush=True)
            lane = lanes[0]
            measure = lambda report: report(measure_baseline(lane.folder, names, sources)._asdict())  # noqa: E731
            os.waitpid(in_fork(measure, lane.result), 0)
            stored = json.loads(lane.result.read_text())
            if "problem" in stored:
                raise ValueError(stored["problem"])
            save({"baseline": stored})
        baseline = Baseline(**stored)
        for name in baseline.failing:
            print(f"left out, since it fails on the unchanged source: {name}", file=sys.stderr)

        last_killers: dict[str, list[str]] = {}
        started, total = time.monotonic(), len(waiting)
        waiting.reverse()
        while waiting or any(lane.mutant for lane in lanes):
            for lane in lanes:
                mutant = lane.mutant
                if mutant:
                    killer = lane.finished()
                    if killer is False:
                        continue
                    if killer == "import (SyntaxError)":
                        raise ValueError(f"not a program: {mutant}")
                    results[mutant.key] = killer
                    save({"mutant": mutant.key, "killed_by": killer})
                    if killer:
                        nearby = last_killers.setdefault(f"{mutant.file}:{mutant.first_line}", [])
                        nearby[:] = [killer, *(name for name in nearby if name != killer)][:8]
                    else:
                        print(f"\rsurvived  {mutant}", file=sys.stderr)
                    done = total - len(waiting) - sum(lane.mutant is not None for lane in lanes)
                    if sys.stderr.isatty() or done % 50 == 0:
                        rate = (time.monotonic() - started) / max(1, done)
                        print(f"\r{done}/{total}  {rate:.2f} s each, {rate * (total - done) / 60:.0f} min left   ",
                              end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)  # fmt: skip
                if waiting:
                    mutant = waiting.pop()
                    nearby = last_killers.get(f"{mutant.file}:{mutant.first_line}", [])
                    first = [name for name in (earlier.get(mutant.key), *nearby) if name]
                    lane.start(mutant, names, chosen_tests(mutant, baseline, first), baseline)
            time.sleep(0.01)
    return results


# ------------------------------------------------------------------------------------------ command line


def table(
    mutants: Sequence[Mutant], results: dict[str, str | None], reasons: dict[str, str], everything: bool
) -> tuple[str, int]:
    """The table and the number of survivors. Killed mechanical mutants are counted; `everything` lists them too."""
    lines: list[str] = []
    counts: Counter[tuple[str, str]] = Counter()
    for mutant in mutants:
        kind = "hand-written" if mutant.topic else mutant.file
        killer = results.get(mutant.key)
        if killer:
            state = "killed"
        elif mutant.key in reasons:
            state = "equivalent"
        else:
            state = "SURVIVED" if mutant.key in results else "not run"
        counts[kind, state] += 1
        if state == "killed" and (everything or mutant.topic):
            lines.append(f"killed      {mutant}\n            by {killer}")
        elif state == "killed" and mutant.key in reasons:
            lines.append(f"killed, though listed as equivalent: {mutant}\n            by {killer}")
        elif state == "equivalent":
            lines.append(f"equivalent  {mutant}\n            {reasons[mutant.key]}")
        elif state == "SURVIVED":
            lines.append(f"SURVIVED    {mutant}\n            in {mutant.function or 'module'}")
    states = ("killed", "equivalent", "SURVIVED", "not run")
    kinds = dict.fromkeys("hand-written" if mutant.topic else mutant.file for mutant in mutants)
    width = max(20, *(len(kind) for kind in kinds))
    rows = [f"{'':{width}}" + "".join(f"{state:>12}" for state in states)]
    for kind in kinds:
        rows.append(f"{kind:{width}}" + "".join(f"{counts[kind, state]:12}" for state in states))
    totals = (sum(n for (_, s), n in counts.items() if s == state) for state in states)
    rows.append(f"{'total':{width}}" + "".join(f"{total:12}" for total in totals))
    return "\n".join([*lines, "", *rows]), sum(n for (_, s), n in counts.items() if s == "SURVIVED")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m verification.mutations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    only_help = "'hand', 'mechanical', or words that the mutant's line contains; several: any of them"
    parser.add_argument("--only", nargs="+", metavar="WORDS", help=only_help)
    files_help = f"sources to mutate, inside the project; default {' '.join(FILES)}"
    parser.add_argument("--files", nargs="+", metavar="FILE", default=list(FILES), help=files_help)
    parser.add_argument(
        "--tests", nargs="+", metavar="MODULE",
        help="test modules; default test_rl_lab and verification.test_*, for extensions the tests in their folder",
    )  # fmt: skip
    restamp_help = "note the functions of the listed equivalents as they are now"
    parser.add_argument("--restamp", action="store_true", help=restamp_help)
    sample_help = "run only N of them, evenly spread: the hand-written ones too"
    parser.add_argument("--sample", type=int, metavar="N", help=sample_help)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants tried at a time; default 1")
    parser.add_argument("--equivalents", action="store_true", help="run the listed equivalent mutants too")
    parser.add_argument("--list", action="store_true", help="print the mutants and run none")
    parser.add_argument(
        "--all", action="store_true", help="list killed mechanical mutants too, with the test that killed them"
    )
    parser.add_argument("--fresh", action="store_true", help="forget the results of an earlier run")
    default = Path(tempfile.gettempdir()) / "rl-lab-mutants.jsonl"
    parser.add_argument(
        "--output", type=Path, default=default, metavar="FILE", help=f"results, line by line; default {default}"
    )
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.jobs <= 64:
        parser.error(f"argument --jobs: got {arguments.jobs}, wanted a whole number from 1 to 64")
    if arguments.sample is not None and arguments.sample < 1:
        parser.error(f"argument --sample: got {arguments.sample}, wanted a whole number above 0")

    files = []
    for file in arguments.files:
        path = Path(file).resolve()
        if not path.is_file() or path.suffix != ".py" or not path.is_relative_to(ROOT):
            parser.error(f"argument --files: {file}: wanted a Python file inside {ROOT.name}/")
        if not path.name.startswith("test_"):  # what a glob brings along
            files.append(path.relative_to(ROOT).as_posix())
    sources = read_sources(list(dict.fromkeys(files)))
    if arguments.restamp:
        print(restamp(sources))
        return
    equivalents = read_equivalents(sources)
    reasons, notice = equivalents.reasons, equivalents.notice()
    if notice:
        print(notice, file=sys.stderr)
    mutants = all_mutants(sources)
    for words in arguments.only or ():
        if not any(mutant.matches(words) for mutant in mutants):
            parser.error(f"argument --only: no mutant contains {words!r}; see --list")
    if arguments.only:
        mutants = [mutant for mutant in mutants if any(map(mutant.matches, arguments.only))]
    if arguments.sample:
        count = min(arguments.sample, len(mutants))
        mutants = [mutants[number * len(mutants) // count] for number in range(count)]
    if arguments.list:
        print("\n".join(map(str, mutants)))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # either way, leave nothing behind
    run = [mutant for mutant in mutants if arguments.equivalents or mutant.key not in reasons]
    names = arguments.tests or test_modules(list(sources))
    if not names:
        parser.error("argument --files: no tests stand beside these files; name some with --tests")
    try:
        results = try_mutants(run, sources, names, arguments.jobs, arguments.output, arguments.fresh)
    except ValueError as problem:
        sys.exit(f"verification.mutations: error: {problem}")
    except KeyboardInterrupt:
        sys.exit(f"\ninterrupted; the same command goes on from {arguments.output}")
    text, survivors = table(mutants, results, reasons, arguments.all)
    print(text)
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
