"""Settings files as flat keys: YAML, JSON, TOML, key=value lines or a shell command, and Python read by ast.

Nothing is executed and nothing is constructed but plain values. A hostile file ends in a FileProblem of one line: more than
MAX_BYTES, nested deeper than MAX_DEPTH, more than MAX_KEYS values once its aliases are spread out, or a tag that would
build an object. A new format is a function from text to `Found` and an entry in READERS.
"""

from __future__ import annotations

import ast
import collections
import json
import math
import operator
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

from rl_lab import FileProblem

MAX_BYTES = 300_000
MAX_DEPTH = 30
MAX_KEYS = 5_000
MAX_TOKENS = 40_000  # of a Python file: some 4,000 lines; the tree of each token takes about half a kilobyte
MAX_LINE = 20_000  # characters; no settings file has longer ones

# Call in a Python file -> the trainer whose settings it holds.
PYTHON_CALLS = {
    **{f"{name}Config": f"trl.{name}Config" for name in ("GRPO", "DPO", "KTO", "RLOO", "CPO", "ORPO")},
    "PPO": "sb3.PPO",
    "A2C": "sb3.A2C",
}
# Calls that stand beside them -> the keys of theirs that are read, each with the name it gets.
PYTHON_NEIGHBOURS = {
    "make_vec_env": {"n_envs": "n_envs"},
    "VecNormalize": {"gamma": "vec_normalize.gamma"},
}


@dataclass
class Found:
    """What a file says: flat keys with plain values, the trainer it names if it names one, and what to tell the reader."""

    values: dict[str, object] = field(default_factory=dict)
    trainer: str | None = None
    notes: list[str] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)  # key -> the expression that is no constant


def plain(text: str) -> object:
    """The value that a word of a command line means: number, True, False, None, list, or the text itself."""
    stripped = text.strip()
    words = {"true": True, "false": False, "none": None, "null": None, "~": None}
    if stripped.lower() in words:
        return words[stripped.lower()]
    if re.fullmatch(r"[+-]?(\d+)(_\d+)*", stripped) and len(stripped) < 30:
        return int(stripped)
    try:
        number = float(stripped) if len(stripped) < 60 else math.nan
        if math.isfinite(number):
            return number
    except ValueError:
        pass
    if stripped[:1] in ("[", "(", "{", "'", '"') and len(stripped) < 2_000:
        for parse in (ast.literal_eval, json.loads):
            try:
                value = parse(stripped)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
            return list(value) if isinstance(value, (tuple, set)) else value
        if stripped.startswith("[") and stripped.endswith("]"):
            return [plain(part) for part in stripped[1:-1].split(",") if part.strip()]
    return stripped


def flatten(tree: object, prefix: str = "") -> dict[str, object]:
    """{a.b.c: value} of nested mappings. Raises FileProblem beyond MAX_DEPTH or MAX_KEYS (aliases count each time)."""
    made: dict[str, object] = {}
    pending = [(tree, prefix, 0)]
    while pending:
        node, name, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise FileProblem(f"nested deeper than {MAX_DEPTH} levels; that is no settings file")
        if isinstance(node, dict) and (node or not name):
            # A key such as actor.lr in a nested file means the same as the nested form.
            pending += [(value, f"{name}.{key}" if name else str(key), depth + 1) for key, value in reversed(node.items())]
        else:
            made[name] = _leaf(node)
        if len(made) + len(pending) > MAX_KEYS:
            raise FileProblem(f"holds more than {MAX_KEYS} values once its aliases are spread out; that is no settings file")
    return made


def _leaf(node: object) -> object:
    if isinstance(node, (list, tuple, set)):
        items = list(node)
        if len(items) > MAX_KEYS:
            raise FileProblem(f"holds a list of more than {MAX_KEYS} values; that is no settings file")
        simple = all(isinstance(item, (str, int, float, bool, type(None))) for item in items)
        return [plain(item) if isinstance(item, str) else item for item in items] if simple else f"<{len(items)} values>"
    if isinstance(node, str):
        return plain(node)
    return node if isinstance(node, (int, float, bool, type(None))) else str(node)


def _no_duplicates(notes: list[str]) -> Callable[[list], dict]:
    def pairs(items: list) -> dict:
        made: dict = {}
        for key, value in items:
            if key in made:
                notes.append(f"{key} is written twice; the last one counts")
            made[key] = value
        return made

    return pairs


def read_json(text: str) -> Found:
    found = Found()
    try:
        tree = json.loads(text, object_pairs_hook=_no_duplicates(found.notes))
    except ValueError as problem:
        raise FileProblem(f"is no JSON ({problem})") from None
    return _of_tree(tree, found)


def read_toml(text: str) -> Found:
    if sys.version_info < (3, 11):
        raise FileProblem("TOML needs Python 3.11 or newer; write the settings as YAML, JSON or key=value lines")
    import tomllib

    if re.search(rf"(?:[\w\"'-]+[ \t]*\.[ \t]*){{{MAX_DEPTH}}}", text):  # each level of a dotted key is held several times
        raise FileProblem(f"nested deeper than {MAX_DEPTH} levels; that is no settings file")
    try:
        return _of_tree(tomllib.loads(text), Found())
    except tomllib.TOMLDecodeError as problem:
        raise FileProblem(f"is no TOML ({problem})") from None


def read_yaml(text: str) -> Found:
    try:
        import yaml
    except ImportError:
        raise FileProblem(
            "YAML needs the package PyYAML (python -m pip install PyYAML==6.0.3); JSON, TOML, key=value and Python work without"
        ) from None
    found = Found()

    class Loader(yaml.SafeLoader):
        """The safe loader, with a bound on merged mappings and a word about keys written twice."""

        def flatten_mapping(self, node):
            super().flatten_mapping(node)
            if len(node.value) > MAX_KEYS:
                raise FileProblem(f"holds more than {MAX_KEYS} values once its merges are spread out; that is no settings file")

        def construct_mapping(self, node, deep=False):
            names = [key.value for key, _ in node.value if isinstance(key.value, str)]
            for name, times in collections.Counter(names).items():
                if times > 1 and name != "<<":
                    found.notes.append(f"{name} is written twice; the last one counts")
            return super().construct_mapping(node, deep)

    try:
        for number, _ in enumerate(yaml.parse(text)):  # one at a time: known before a tree is built
            if number > 4 * MAX_KEYS:
                raise FileProblem(f"holds more than {MAX_KEYS} values; that is no settings file")
        tree = yaml.load(text, Loader)  # noqa: S506  (a subclass of SafeLoader: plain values only)
    except (yaml.YAMLError, ValueError, TypeError) as problem:
        mark = getattr(problem, "problem_mark", None)
        said = getattr(problem, "problem", None) or str(problem).splitlines()[0]
        where = f", line {mark.line + 1}" if mark else ""
        raise FileProblem(f"is no YAML of plain values ({said[:120]}{where})") from None
    if isinstance(tree, list) and all(isinstance(item, str) and "=" in item for item in tree):
        return read_words([item for item in tree], found)
    return _of_tree(tree, found)


def _of_tree(tree: object, found: Found) -> Found:
    if not isinstance(tree, dict):
        raise FileProblem(f"holds {type(tree).__name__}, wanted keys with values")
    found.values = flatten(tree)
    return found


_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")
_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_][\w.@/-]*)\s*=(.*)", re.DOTALL)


def read_lines(text: str) -> Found:
    """key=value lines, a hydra override list, or a shell command with key=value words and --flag value pairs.

    A line NAME=value on its own is a shell variable where the text uses $NAME, and a setting where it does not.
    """
    found, variables, words = Found(), {}, []
    used = set(re.findall(r"\$\{?(\w+)", text))
    text = text.replace("\r\n", "\n").replace("\\\n", " ")
    for line in text.split("\n"):
        line = line.strip()
        if not line or line.startswith(("#", ";", "//", "[")):
            continue
        line = re.sub(r"^([\w.@/-]+)\s+=\s+", r"\1=", line)
        line = _substituted(line, variables)
        try:
            parts = shlex.split(line, comments=True)
        except ValueError:
            parts = line.split()
        if len(parts) >= 2 and parts[0] == "export":
            parts = parts[1:]
        if len(parts) == 1 and (made := _ASSIGNMENT.fullmatch(parts[0])) and made[1] in used:
            variables[made[1]] = made[2]
            continue
        words += parts
        if len(words) > MAX_KEYS:
            raise FileProblem(f"holds more than {MAX_KEYS} words; that is no settings file")
    return read_words(words, found)


def read_words(words: list[str], found: Found) -> Found:
    """Settings of a command line's words: a.b=c, +a.b=c, --flag=value, --flag value, and --switch as True."""
    waiting: list[str] = [*words]
    while waiting:
        word = waiting.pop(0)
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            values = [value] if equals else []
            while not equals and waiting and not _is_flag(waiting[0]) and not _OVERRIDE.fullmatch(waiting[0]):
                values.append(waiting.pop(0))
            given = True if not values else plain(values[0]) if len(values) == 1 else [plain(item) for item in values]
        elif made := _OVERRIDE.fullmatch(word):
            key, given = made[1], plain(made[2])
        else:
            continue  # the program's name and what else stands in a command
        key = key if key.islower() or "." in key else key.replace("-", "_")
        if key in found.values:
            found.notes.append(f"{key} is written twice; the last one counts")
        found.values[key] = given
    if not found.values:
        raise FileProblem("holds no key=value, no --flag and no nested keys")
    return found


def _is_flag(word: str) -> bool:
    return word.startswith("--") and len(word) > 2 or word in ("&&", "|", ";", "\\")


def _substituted(line: str, variables: dict[str, str]) -> str:
    """$NAME, ${NAME}, ${NAME:-default} and $((arithmetic)) of numbers in their places; each once, so nothing grows."""

    def value(match: re.Match) -> str:
        name = match[1] or match[3]
        made = variables.get(name, match[2] if match[2] is not None else match[0])
        return made[:200]

    line = re.sub(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)", value, line)[: MAX_LINE]
    return re.sub(r"\$\(\(([^()$]{1,80})\)\)", lambda match: _arithmetic(match[1]), line)


_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}


def _arithmetic(text: str) -> str:
    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise ValueError

    try:
        return str(value(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return text


def read_python(text: str) -> Found:
    """Keyword arguments of the first call in PYTHON_CALLS, and what its neighbours say. Names that a constant was given to
    at the top of a file or function count as that constant; anything else is listed as not readable."""
    if sum(1 for _ in re.finditer(r"\w+|[^\w\s]", text)) > MAX_TOKENS:
        raise FileProblem(f"holds more than {MAX_TOKENS} words and signs; wanted the file that makes the settings alone")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as problem:
        said = (str(problem) or "nested too deep").splitlines()[0][:80]
        raise FileProblem(f"is no Python that can be parsed ({said})") from None
    found, constants, calls = Found(), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = node.value
        if isinstance(node, ast.Call):
            calls.append((_name_of(node.func), node))
    chosen = [(name, call) for name, call in calls if name in PYTHON_CALLS]
    if not chosen:
        raise FileProblem(f"calls none of {', '.join(PYTHON_CALLS)}")
    chosen.sort(key=lambda pair: pair[1].lineno)
    name, call = chosen[0]
    found.trainer = PYTHON_CALLS[name]
    if len(chosen) > 1:
        others = ", ".join(f"{other} in line {node.lineno}" for other, node in chosen[1:4])
        found.notes.append(f"read: {name} in line {call.lineno}; not read: {others}")
    _keywords(call, constants, found)
    for other, node in calls:
        if other in PYTHON_NEIGHBOURS and found.trainer.startswith("sb3"):
            beside = Found()
            _keywords(node, constants, beside)
            wanted = PYTHON_NEIGHBOURS[other]
            found.values |= {wanted[key]: value for key, value in beside.values.items() if key in wanted}
            if other == "VecNormalize":
                found.values.setdefault("vec_normalize.gamma", 0.99)
    if (prompt := _prompt_form(tree)) is not None:
        found.values["prompt_form"] = prompt
    return found


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def _keywords(call: ast.Call, constants: dict[str, ast.expr], found: Found) -> None:
    pairs: list[tuple[str, ast.expr]] = []
    for keyword in call.keywords:
        if keyword.arg is not None:
            pairs.append((keyword.arg, keyword.value))
            continue
        spread = constants.get(keyword.value.id) if isinstance(keyword.value, ast.Name) else keyword.value
        if isinstance(spread, ast.Dict) and all(isinstance(key, ast.Constant) for key in spread.keys):
            pairs += [(str(key.value), value) for key, value in zip(spread.keys, spread.values)]
        else:
            found.unreadable[f"**{ast.unparse(keyword.value)[:40]}"] = "no dictionary of constants"
    for key, node in pairs:
        node = constants.get(node.id, node) if isinstance(node, ast.Name) else node
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
            found.unreadable[key] = ast.unparse(node)[:60]
            continue
        found.values[key] = _leaf(value) if not isinstance(value, (str, dict)) else value


def _prompt_form(tree: ast.AST) -> str | None:
    """Whether a dictionary with the key "prompt" holds a list of messages or a text; None where the file has none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values):
                if isinstance(key, ast.Constant) and key.value == "prompt":
                    if isinstance(value, ast.List):
                        return "messages"
                    if isinstance(value, (ast.JoinedStr, ast.BinOp)) or (
                        isinstance(value, ast.Constant) and isinstance(value.value, str)
                    ):
                        return "text"
    return None


READERS: dict[str, Callable[[str], Found]] = {
    ".yaml": read_yaml,
    ".yml": read_yaml,
    ".json": read_json,
    ".toml": read_toml,
    ".py": read_python,
    **{suffix: read_lines for suffix in (".sh", ".txt", ".env", ".cfg", ".ini", ".args")},
}


def reader_for(path: Path, text: str) -> Callable[[str], Found]:
    """By the file's name; a name that says nothing, by its first characters."""
    if path.suffix.lower() in READERS:
        return READERS[path.suffix.lower()]
    if text.lstrip().startswith("{"):
        return read_json
    if re.search(r"^\s*(import|from)\s+\w+", text, re.MULTILINE):
        return read_python
    return read_yaml if re.search(r"^\s*[\w.-]+:(\s|$)", text, re.MULTILINE) else read_lines


def read_text(path: Path) -> str:
    """The text of a small file. Raises FileProblem for what is missing, no file, too large or no UTF-8."""
    try:
        if not path.is_file():
            raise FileProblem(f"{path}: {'is no regular file' if path.exists() else 'no such file'}")
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise FileProblem(f"{path}: is larger than {MAX_BYTES // 1000} kB; that is no settings file")
        text = raw.decode("utf-8-sig")
    except OSError as problem:
        raise FileProblem(f"{path}: cannot be read ({problem.strerror})") from None
    except UnicodeDecodeError:
        raise FileProblem(f"{path}: is no UTF-8 text") from None
    if max(map(len, text.splitlines()), default=0) > MAX_LINE:
        raise FileProblem(f"{path}: has a line of more than {MAX_LINE} characters; that is no settings file")
    return text


def read_settings(path: Path) -> Found:
    """The settings of a file. Raises FileProblem of one line for everything that can be wrong with it."""
    text = read_text(path)
    try:
        found = reader_for(path, text)(text)
    except FileProblem as problem:
        raise FileProblem(f"{path}: {problem}") from None
    except (RecursionError, MemoryError):
        raise FileProblem(f"{path}: nested too deep to be a settings file") from None
    if not found.values:
        raise FileProblem(f"{path}: holds no settings")
    return found
