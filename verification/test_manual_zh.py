"""reference/README.zh.txt, the Chinese manual, says nothing that README.txt does not say: no command, no number, no name.

What is taken from the Chinese text, and what it is compared with:

    scope     A heading ends in （README 3.2、6）: the parts of README.txt that its text speaks of ("3.2"; a whole section,
              "6"; "0", what stands before section 1). A heading without one keeps the chapter's; one in a paragraph adds.
    command   An indented line, or what follows 命令：, that begins with python, python3, source, bash, pip or from; lines
              ending in a backslash are joined. It equals an indented line of README.txt or text in backquotes there, up to
              the N of `--section N`, which may be any section of the worked examples.
    quoted    Text in backquotes stands in README.txt; text in double quotes there or in a message of the programs.
    number    Outside commands, names (k1, A_0) and references to sections: the numbers of a sentence (to 。 or ；)
              stand in one paragraph of the scope, one beside the other, in this order; or in README.txt 3.1's row of a
              worked example that the Chinese section runs. A table row has the first word and numbers of one line there.
    formula   After 公式：, each stretch of the text between Chinese characters stands in README.txt's section 6.
    name      A dotted name is a function or a test that exists; each entry of README.txt's section 6 stands, with its
              function and its test, in the Chinese section of the same number.

Chinese numerals are not numbers here: facts are written in digits. A check that never fails would prove nothing: the last
class changes every number and every command of the manual, one at a time, and counts what is seen.
"""

from __future__ import annotations

import importlib
import itertools
import re
import unittest
from functools import lru_cache
from pathlib import Path
from typing import Iterator, NamedTuple

import rl_lab
from extensions.audit.say.wide import columns, is_wide
from verification import claims

LAB = Path(rl_lab.__file__).resolve().parent
MANUAL = LAB / "reference" / "README.zh.txt"
WIDEST = 100
MOST_UNSEEN = 0.06  # of the numbers: single digits whose changed value stands in the same part of README.txt as well

NUMBER = re.compile(r"(?<![\w.])(?:(?<![^\s(\[,=（、，：])-)?\d+(?:\.\d+)*(?![\w])")
COMMAND = re.compile(r"(python3?|source|bash|pip|from) ")
SCOPE = re.compile(r"（README ([\d.、]+)）")
HEADING = re.compile(r"(\d+(?:\.\d+)?|[A-D](?:\.\d+)?)  (\S.*)")
DOTTED = re.compile(r"\b(?:rl_lab|ppo_chain|token_objectives|plot_results|extensions|verification|test_rl_lab)(?:\.\w+)+")


# ------------------------------------------------------------------------------------------ README.txt


@lru_cache
def readme() -> str:
    return (LAB / "README.txt").read_text(encoding="utf-8")


@lru_cache
def readme_parts() -> dict[str, str]:
    """README.txt by number: "0", "3" (all of section 3), "3.2" (that part alone)."""
    parts = {"0": ""}
    section = part = "0"
    for line in readme().splitlines(keepends=True):
        if heading := re.match(r"(\d+)  [A-Z]", line):
            section = part = heading[1]
        elif heading := re.match(rf"({section}\.\d+)  \S", line):
            part = heading[1]
            line = line[len(part) :]
        for name in {section, part}:
            parts[name] = parts.get(name, "") + line
    return parts


@lru_cache
def readme_commands() -> frozenset[str]:
    """Indented lines and backquoted text of README.txt, with one space for each run of spaces."""
    lines = [line for line in readme().splitlines() if line.startswith("    ")]
    return frozenset(flat(text) for text in [*lines, *re.findall(r"`([^`]+)`", flat(readme()))])


Numbers = tuple[str, ...]


@lru_cache
def passages(part: str) -> tuple[Numbers, ...]:
    """The numbers of each paragraph of a part of README.txt, in order; the table of worked examples is left to `atoms`."""
    text = readme_parts()[part].replace("\n".join(_atom_lines()), "")
    return tuple(tuple(NUMBER.findall(paragraph)) for paragraph in re.split(r"\n\s*\n", text))


@lru_cache
def rows(part: str) -> tuple[tuple[str, Numbers], ...]:
    """(first word, numbers) of each line of a part of README.txt."""
    return tuple((first_word(line), tuple(NUMBER.findall(line))) for line in readme_parts()[part].splitlines())


def first_word(line: str) -> str:
    """The name with which a row begins; empty where it begins with a number, a Chinese character or nothing."""
    return (re.match(r"\s*(\(?[A-Za-z]\w*\)?)(?=\s)", line) or ["", ""])[1]


def _atom_lines() -> list[str]:
    return readme_parts()["3.1"].split("What each section gives:\n")[1].splitlines()


@lru_cache
def atoms() -> dict[str, Numbers]:
    """README.txt 3.1's table: the numbers of each section of the worked examples. Two columns, read one below the other."""
    found: list[list[str]] = []
    for half in [line[4:51] for line in _atom_lines()] + [line[51:] for line in _atom_lines()]:
        if re.match(r"\d\.\d  ", half):
            found.append([])
        if half.strip():
            found[-1] += NUMBER.findall(half)
    return {section: tuple(numbers) for section, *numbers in found}


@lru_cache
def messages() -> str:
    """The source of the programs, where their messages stand."""
    return flat(" ".join(path.read_text(encoding="utf-8") for path in sorted(LAB.glob("*.py"))))


@lru_cache
def atom_sections() -> tuple[str, ...]:
    return tuple(dict.fromkeys(example.section for example in rl_lab.worked_examples()))


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


# ------------------------------------------------------------------------------------------ the manual


class Block(NamedTuple):
    """Lines between two blank lines, in the section and the scope in which they stand."""

    section: str
    scope: tuple[str, ...]
    lines: tuple[str, ...]


def blocks(manual: str) -> list[Block]:
    found, section, chapter, scope = [], "", (), ()
    for is_text, group in itertools.groupby(manual.splitlines(), key=lambda line: bool(line.strip())):
        lines = tuple(group)
        if not is_text:
            continue
        if heading := HEADING.match(lines[0]):
            section = heading[1]
            own = tuple(SCOPE.findall(lines[0])[-1].split("、")) if SCOPE.search(lines[0]) else ()
            if "." not in section:
                chapter = own
            scope = own or chapter
            found.append(Block(section, scope, (heading[2],)))  # the title, without its number
            lines = lines[1:]
        if lines:
            added = tuple(part for text in SCOPE.findall("".join(lines)) for part in text.split("、"))
            found.append(Block(section, scope + added, lines))
    return found


def joined(block: Block) -> Iterator[str]:
    """The block's lines, those that end in a backslash put together with the next."""
    waiting = ""
    for line in block.lines:
        line = waiting + (line.strip() if waiting else line)
        waiting = line[:-1].rstrip() + " " if line.endswith("\\") else ""
        if not waiting:
            yield line
    assert not waiting, f"section {block.section}: a backslash on the last line of a block"


def split(block: Block) -> tuple[list[str], list[str]]:
    """(commands, the other lines) of a block."""
    commands, others, after_label = [], [], False
    for line in joined(block):
        text = SCOPE.sub("", line).strip()
        is_labelled = after_label or text.startswith("命令：")
        after_label = text == "命令："
        text = text.removeprefix("命令：").strip()
        if (is_labelled or line.startswith("    ")) and COMMAND.match(text):
            commands.append(flat(text))
        elif text:
            others.append(line)
    return commands, others


def said(line: str) -> str:
    """A line without what is no number of its own: scope marks, references to sections, dotted names, list numbers."""
    line = SCOPE.sub(" ", line)
    line = re.sub(r"第 [\d.]+ 节", " ", line)
    line = re.sub(r"https?://\S+", " ", line)
    return re.sub(r"^\d+\. ", " ", DOTTED.sub(" ", line))


def sentences(block: Block) -> Iterator[tuple[str, bool]]:
    """(text, whether it is a row of a table): the block's rows, and its other text cut at 。 and ；."""
    text, is_labelled = "", False
    for line in split(block)[1]:
        if is_contents(line):
            continue
        if line.startswith("    ") and not is_labelled:
            yield line, True
            continue
        is_label = bool(re.match(r"\w{2}：", line))
        is_labelled = is_label or is_labelled and line.startswith("      ")
        text += ("。" if is_label else "") + said(line).strip() + " "
    yield from ((sentence, False) for sentence in re.split("[。；]", text))


def is_within(numbers: Numbers, passage: Numbers) -> bool:
    """Whether the numbers stand in the passage in this order, one beside the other."""
    return any(passage[at : at + len(numbers)] == numbers for at in range(len(passage)))


def wrong_numbers(block: Block, examples: tuple[str, ...] = ()) -> list[str]:
    """Sentences and rows of the block whose numbers README.txt does not have together, in order, in the block's scope.

    examples: the sections of the worked examples that the Chinese section runs.
    """
    known = [passage for part in block.scope for passage in passages(part)] + [atoms()[section] for section in examples]
    lines = [line for part in block.scope for line in rows(part)]
    found = []
    for text, is_row in sentences(block):
        numbers = tuple(NUMBER.findall(text))
        if not numbers:
            continue
        if is_row and (first_word(text) or len(numbers) > 1):
            fits = any((word, row[: len(numbers)]) == (first_word(text), numbers) for word, row in lines)
        else:
            fits = any(is_within(numbers, passage) for passage in known)
        if not fits:
            where = f"section {block.section}, README {'、'.join(block.scope)}"
            found.append(f"{where}: {', '.join(numbers)} in: {text.strip()}")
    return found


def examples_of(manual_blocks: list[Block]) -> dict[str, tuple[str, ...]]:
    """{Chinese section: the worked examples that its commands print}."""
    found: dict[str, tuple[str, ...]] = {}
    for block in manual_blocks:
        ran = tuple(name for command in split(block)[0] for name in re.findall(r"--section (\S+)$", command))
        found[block.section] = found.get(block.section, ()) + tuple(name for name in ran if name in atoms())
    return found


def is_contents(line: str) -> bool:
    return bool(re.match(r"     +(\d+|[A-D])  \S", line))


def wrong_commands(block: Block) -> list[str]:
    """Commands and quoted text of the block that README.txt does not have."""
    commands, others = split(block)
    found = []
    for command in commands:
        section = re.search(r" --section (\S+)$", command)
        if section and section[1] in atom_sections():
            command = command.replace(section[0], " --section 4.2")
        if command not in readme_commands():
            found.append(command)
    text = re.sub(r"\n *", " ", "\n".join(others))
    found += [quoted for quoted in re.findall(r"`([^`]+)`", text) if flat(quoted) not in flat(readme())]
    found += [q for q in re.findall(r'"([^"]+)"', text) if flat(q) not in flat(readme()) and flat(q) not in messages()]
    found += [flag for flag in re.findall(r"(?<!\S)--[a-z-]+", text) if flag not in readme()]
    return [f"section {block.section}: {text}" for text in found]


def wrong_formulas(block: Block) -> list[str]:
    """Stretches of formula text that README.txt's section 6 does not have; a line that goes on is indented by six spaces."""
    text = re.sub(r"\n {6}", " ", "\n".join(block.lines))
    known = flat(readme_parts()["6"])
    found = []
    for formula in re.findall(r"^公式：(.*)$", text, re.MULTILINE):
        for stretch in "".join("\n" if is_wide(c) else c for c in formula).splitlines():
            if flat(stretch) not in known:
                found.append(f"section {block.section}: {flat(stretch)}")
    return found


@lru_cache
def text_of_section(manual: str, section: str) -> str:
    return "\n".join(line for block in blocks(manual) if block.section == section for line in block.lines)


@lru_cache
def manual_text() -> str:
    return MANUAL.read_bytes().decode("utf-8")


def glossary(section: str) -> list[tuple[str, str]]:
    lines = [line.strip() for line in text_of_section(manual_text(), section).splitlines() if line.startswith("    ")]
    return [tuple(re.split(r"\s{2,}", line, maxsplit=1)) for line in lines]


# ------------------------------------------------------------------------------------------ tests


class Manual(unittest.TestCase):
    def setUp(self):
        self.text = manual_text()
        self.blocks = blocks(self.text)

    def test_encoding_and_width(self):
        self.assertFalse(self.text.startswith("\ufeff"), "a byte order mark: write UTF-8 without one")
        self.assertNotIn("\r", self.text)
        self.assertNotIn("\t", self.text)
        self.assertNotIn("\ufffd", self.text, "the sign of a character that was lost in a wrong decoding")
        for number, line in enumerate(self.text.splitlines(), 1):
            self.assertLessEqual(columns(line), WIDEST, f"line {number}: a Chinese character takes two columns: {line}")
            self.assertEqual(line, line.rstrip(), f"line {number} ends in spaces")

    def test_every_scope_is_a_part_of_readme(self):
        for block in self.blocks:
            self.assertTrue(block.scope or not block.section or block.section[0] == "A" or block.section[0] == "C", block)
            for part in block.scope:
                self.assertIn(part, readme_parts(), f"section {block.section}: README.txt has no part {part}")

    def test_every_number_stands_in_readme(self):
        examples = examples_of(self.blocks)
        wrong = [text for block in self.blocks for text in wrong_numbers(block, examples[block.section])]
        self.assertEqual(wrong, [], "numbers that README.txt does not have in that part:\n" + "\n".join(wrong))

    def test_every_command_stands_in_readme(self):
        commands = [command for block in self.blocks for command in split(block)[0]]
        self.assertGreater(len(set(commands)), 40)
        wrong = [text for block in self.blocks for text in wrong_commands(block)]
        self.assertEqual(wrong, [], "commands or quoted text that README.txt does not have:\n" + "\n".join(wrong))
        opening = readme()[: readme().index("\n1  SETTING UP")]
        for line in re.findall(r"^    ((?:python|source) .*)$", opening, re.MULTILINE):
            self.assertIn(line, commands, "one of the commands to begin with is missing")

    def test_every_formula_stands_in_readme_with_its_function_and_its_test(self):
        wrong = [text for block in self.blocks for text in wrong_formulas(block)]
        self.assertEqual(wrong, [], "formulas that README.txt's section 6 does not have:\n" + "\n".join(wrong))
        for entry in claims.formulas(readme()):
            section = text_of_section(self.text, entry.section)
            with self.subTest(entry.section, formula=entry.formula):
                for name in (*entry.functions, entry.test):
                    self.assertIn(name, section, f"{name} is missing in the Chinese section {entry.section}")

    def test_every_name_exists(self):
        names = set(DOTTED.findall("\n".join(line for line in self.text.splitlines() if not COMMAND.match(line.strip()))))
        self.assertGreater(len(names), 40)
        for name in sorted(names):
            if not name.endswith((".py", ".txt")):
                with self.subTest(name):
                    self.assertTrue(name_exists(name), f"there is no {name}")
        for path in re.findall(r"(?<![\w/.])(?:extensions|reference|verification)/[\w./-]*\w", self.text):
            self.assertTrue((LAB / path).exists(), f"there is no {path}")

    def test_contents_and_references_are_headings(self):
        headings = dict(HEADING.match(line).groups() for line in self.text.splitlines() if HEADING.match(line))
        contents = [line for line in self.text.splitlines() if is_contents(line)]
        entries = re.findall(r"(?:^|  )(\d+|[A-D])  (\S.*?)(?=\s{2}|$)", "\n".join(contents), re.MULTILINE)
        self.assertEqual(
            {number: title for number, title in entries},
            {number: SCOPE.sub("", title).strip() for number, title in headings.items() if "." not in number},
        )
        for number in re.findall(r"第 ([\d.]+) 节", self.text) + re.findall(r"附录 ([A-D])", self.text):
            self.assertIn(number, headings, f"a reference to section {number}, which does not exist")

    def test_guide_sections_are_in_order(self):
        numbers = [tuple(map(int, block.section.split("."))) for block in self.blocks if block.section[:1].isdigit()]
        self.assertEqual(numbers, sorted(numbers))
        self.assertEqual({n[0] for n in numbers}, set(range(1, 12)))

    def test_glossary_is_the_same_both_ways(self):
        forth, back = glossary("A.1"), glossary("A.2")
        self.assertGreater(len(forth), 50)
        self.assertEqual(set(forth), {(chinese, english) for english, chinese in back})
        self.assertEqual(len(dict(forth)), len(forth), "a Chinese term stands twice")
        self.assertEqual(len(dict(back)), len(back), "an English term stands twice")
        self.assertEqual([e for e, _ in back], sorted((e for e, _ in back), key=str.lower))
        body = re.sub(r"\s", "", self.text[: self.text.index("\nA  ")] + self.text[self.text.index("\nB  ") :])
        sources = [LAB / "README.txt", *LAB.glob("*.py"), *LAB.glob("extensions/*/README.txt")]
        english_text = flat(" ".join(path.read_text(encoding="utf-8") for path in sources)).lower()
        for chinese, english in forth:
            self.assertTrue(chinese.replace(" ", "") in body, f"{chinese} is explained and never used")
            self.assertTrue(english.lower() in english_text, f"{english} is a word that the lab never uses")

    def test_every_exercise_has_a_command_and_an_answer(self):
        exercises = sorted({block.section for block in self.blocks if block.section.startswith("C.")})
        self.assertGreaterEqual(len(exercises), 10)
        for number in exercises:
            mine = [block for block in self.blocks if block.section == number]
            self.assertTrue(any(split(block)[0] for block in mine), f"{number}: no command")
            self.assertIn("答案：", text_of_section(self.text, number), f"{number}: no answer")

    def test_readme_table_of_sections_is_what_the_atoms_give(self):
        """README.txt 3.1: each number of a section's row is one that `--section` computes, and none is left out."""
        self.assertEqual(tuple(atoms()), atom_sections())
        for section, numbers in atoms().items():
            got = [round(x, e.digits) for e in rl_lab.worked_examples() if e.section == section for x in e.result]
            self.assertEqual([float(number) for number in numbers], got, f"README.txt 3.1, row {section}")


def name_exists(name: str) -> bool:
    if claims.test_exists(name):
        return True
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part, None)
        return found is not None
    return False


class BrokenTwins(unittest.TestCase):
    """The same manual with one number or one command changed: the checks above are seen to fail."""

    def setUp(self):
        self.blocks = blocks(manual_text())

    def problems_of(self, block: Block, changed: Block) -> list[str]:
        """What the checks say of the block's section when `changed` stands in its place."""
        section = [changed if b is block else b for b in self.blocks if b.section == block.section]
        examples = examples_of(section)[block.section]
        checks = (lambda b: wrong_numbers(b, examples), wrong_commands, wrong_formulas)
        return [text for b in section for check in checks for text in check(b)]

    def test_a_changed_number_is_seen(self):
        """Last digit plus 1, every number of the manual in turn. Only a single digit may pass, if both stand there."""
        seen, missed = 0, []
        for block in self.blocks:
            for at, line in enumerate(block.lines):
                if is_contents(line):
                    continue
                for match in NUMBER.finditer(line):
                    number = match[0]
                    other = f"{number[:-1]}{(int(number[-1]) + 1) % 10}"
                    changed = line[: match.start()] + other + line[match.end() :]
                    if said(changed) == said(line):
                        continue  # the number of a section, which has a test of its own
                    lines = (*block.lines[:at], changed, *block.lines[at + 1 :])
                    if self.problems_of(block, block._replace(lines=lines)):
                        seen += 1
                    else:
                        missed.append((block.section, number, line.strip()))
        text = "\n".join(map(str, missed))
        self.assertEqual([m for m in missed if len(m[1].strip("-")) > 1], [], f"numbers that nothing holds:\n{text}")
        self.assertGreater(seen, 300)
        self.assertLess(len(missed) / (seen + len(missed)), MOST_UNSEEN, f"{len(missed)} of {seen + len(missed)}:\n{text}")

    def test_a_changed_command_is_seen(self):
        """Every command without its last word, with another flag, and with another number."""
        tried = 0
        for block in self.blocks:
            for command in split(block)[0]:
                line = "    " + command
                twins = {line.rpartition(" ")[0], line.replace(" --", " --x-", 1), re.sub(r"\d(?=\D*$)", "9", line)}
                for twin in twins - {line}:
                    if COMMAND.match(twin.strip()) and not twin.endswith("--section 9"):
                        tried += 1
                        found = wrong_commands(Block(block.section, block.scope, (twin,)))
                        self.assertTrue(found, f"passes: {twin}")
        self.assertGreater(tried, 100)

    def test_other_mistakes_are_seen(self):
        scope = ("3.1", "3.6", "6")
        for check, line in (
            (wrong_formulas, "公式：rho = exp(old_logp - logp)"),
            (wrong_commands, '"No module named tensorflow"：先安装它。'),
            (wrong_commands, "运行 `python -B rl_lab.py --all`。"),
            (wrong_commands, "加上 --group-length 就行。"),
            (wrong_numbers, "    4                32    0.9992                 0.9620"),
            (wrong_numbers, "全部 15360 个动作，更新 120 次。"),
        ):
            with self.subTest(line):
                self.assertTrue(check(Block("6.5", scope, (line,))))
        for name in ("rl_lab.gea", "test_rl_lab.Gae.test_nothing", "extensions.objectives.nothing"):
            self.assertFalse(name_exists(name), name)
        for text in ("新" * 51, "a" * 101):
            self.assertGreater(columns(text), WIDEST)


if __name__ == "__main__":
    unittest.main()
