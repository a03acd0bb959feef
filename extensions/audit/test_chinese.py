"""--lang zh: every entry in both languages, and nothing but words changes."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import tempfile
import unittest
from pathlib import Path

from extensions.audit.catalogue import MISTAKES, NOTES, SEVERITIES, finding
from extensions.audit.catalogue_zh import MISTAKES_ZH, NOTES_ZH
from extensions.audit.checks.advice import record_items
from extensions.audit.command import LANGUAGES, list_mistakes, main
from extensions.audit.proof.table import all_plants
from extensions.audit.proof.truth import CAPTURES
from extensions.audit.read.recording import recording_from
from extensions.audit.run import audit
from extensions.audit.say.chinese import CHINESE, advice, entry, evidence
from extensions.audit.say.report import ENGLISH, Report, printed
from extensions.audit.say.wide import columns, is_wide, wrap_wide
from extensions.audit.words_zh import OTHER_ADVICE_ZH, RECORD_ITEMS_ZH, RECORD_NEXT_ZH, WORDS_ZH
from test_rl_lab import setUpModule, tearDownModule  # noqa: F401  (one thread)

HERE = Path(__file__).parent
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?")
METHODS = r"\b(?:NaN|EOS|DPO|GRPO|GSPO|IPO|RLOO|SimPO|ORPO|GAE|KL)\b"
CODE = re.compile(rf"[A-Za-z]+_\w+|\b[a-z]+\.[a-z]\w*|\w+\[[^\]]*\]|{METHODS}")
"""What is the same in every language: names with an underscore, attributes, slices, and the methods' names."""

NAME = re.compile(r"[A-Za-z_]\w*")
PLANTED = ("old_logps_recomputed", "extra_division", "roundoff_std", "smoothing_reversed", "value_min_for_max")
FAMILIES = (
    "trl_grpo_grpo_pass2.npz",
    "trl_dpo_sigmoid.npz",
    "sb3_gae_terminate_and_truncate.npz",
    "verl_value_loss_token_mean.npz",
)


def has_chinese(text: str) -> bool:
    return any("\u4e00" <= c <= "\u9fff" for c in text)


def english(name: str) -> tuple[str, str]:
    return tuple(MISTAKES[name]) if name in MISTAKES else (NOTES[name], "")


def disagreements(said: str, in_chinese: str) -> list[str]:
    """Code, names and numbers that one of the two texts has and the other lacks; {} placeholders would be such."""
    lost = [token for token in CODE.findall(said) if token not in in_chinese]
    lost += [token for token in CODE.findall(in_chinese) if token not in said]
    lost += sorted(set(NUMBER.findall(said)) ^ set(NUMBER.findall(in_chinese)))
    return lost + sorted(set(re.findall(r"\{\w*\}", said)) ^ set(re.findall(r"\{\w*\}", in_chinese)))


def advice_in_the_code() -> set[str]:
    """Every text that say/ and checks/ give as advice in place of the catalogue's: advice=... and assignments to it."""
    found = set()
    for path in [*HERE.glob("say/*.py"), *HERE.glob("checks/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "advice":
                values = [node.value]
            elif isinstance(node, ast.Assign) and any("advice" in ast.dump(target) for target in node.targets):
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            else:
                continue
            found |= {v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)}
    return {text for text in found if text and " " in text}


def asked_for_in_the_code() -> set[str]:
    """Every text that is appended to a report's `missing`."""
    found = set()
    for path in HERE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("missing.append"):
                assert isinstance(node.args[0], ast.Constant), f"{path.name}: a text that cannot be looked up"
                found.add(node.args[0].value)
    return found


class Words(unittest.TestCase):
    def test_every_entry_has_both_languages(self):
        self.assertEqual(list(MISTAKES_ZH), list(MISTAKES), "catalogue_zh.py has other names, or another order")
        self.assertEqual(list(NOTES_ZH), list(NOTES))
        for name in (*MISTAKES, *NOTES):
            heading, what, change = entry(name)
            with self.subTest(name):
                self.assertTrue(has_chinese(heading) and has_chinese(what), "no Chinese")
                self.assertEqual(has_chinese(change), bool(english(name)[1]), "advice in one language only")
                self.assertLessEqual(columns(heading), 32, "a heading is a name, no sentence")
        headings = [entry(name).heading for name in (*MISTAKES, *NOTES)]
        self.assertEqual(len(set(headings)), len(headings), "two findings share a Chinese name")

    def test_code_names_and_numbers_agree(self):
        pairs = [(english(name)[k], entry(name)[k + 1]) for name in (*MISTAKES, *NOTES) for k in (0, 1)]
        for said, in_chinese in [*pairs, *OTHER_ADVICE_ZH.items(), *RECORD_ITEMS_ZH.items(), *RECORD_NEXT_ZH.items()]:
            with self.subTest(said):
                self.assertEqual(disagreements(said, in_chinese), [], in_chinese)

    def test_a_disagreement_is_seen(self):
        for said, in_chinese in (
            ("use mask[:, 1:]", "用 mask[:, :-1]"),
            ("pass old_logps", "传入旧对数概率"),
            ("at -12", "在 -13 处"),
            ("{count} rows", "{number} 行"),
            ("subtract the value", "用 GAE"),
        ):
            self.assertTrue(disagreements(said, in_chinese), said)

    def test_every_other_advice_is_there(self):
        self.assertEqual(advice_in_the_code(), set(OTHER_ADVICE_ZH))
        every = [*OTHER_ADVICE_ZH, *(mistake.advice for mistake in MISTAKES.values())]
        items = [item for text in every if text.startswith("record ") for item in record_items(text)[0]]
        self.assertEqual({item for item in items if not NAME.fullmatch(item)}, set(RECORD_ITEMS_ZH))

    def test_every_request_to_record_is_there(self):
        self.assertEqual(asked_for_in_the_code(), set(RECORD_NEXT_ZH))
        report = Report(missing=["logps (rows x tokens)", "num_items_in_batch"])
        self.assertIn("\n要判断更多，请记录\n  logps（行 x token）\n  num_items_in_batch", printed(report, "x", CHINESE))

    def test_a_shortened_list_is_put_together(self):
        self.assertEqual(advice("not_reproduced", "record terminal_values, both flags"), "请记录 terminal_values、两个标志")
        self.assertEqual(advice("beta_twice", "record beta"), "请记录 beta")
        self.assertEqual(advice("loss_sign", MISTAKES["loss_sign"].advice), MISTAKES_ZH["loss_sign"].advice)

    def test_every_fixed_word_is_one_that_is_printed(self):
        files = ("say/report.py", "say/loss.py", "command.py")
        source = "".join((HERE / name).read_text(encoding="utf-8") for name in files)
        for word in WORDS_ZH:
            self.assertTrue(f'"{word}' in source or f"'{word}'" in source or word in (*SEVERITIES, "rows", "change"), word)
            self.assertTrue(has_chinese(WORDS_ZH[word]))


class Output(unittest.TestCase):
    def run_main(self, *arguments: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(list(arguments))
                status = 0
            except SystemExit as stop:
                status = stop.code or 0
        return status, out.getvalue(), err.getvalue()

    def check_report(self, report: Report) -> None:
        """Every finding of a report, printed in both languages: Chinese words, the same names, numbers and rows."""
        for f in report.findings:
            lines = CHINESE.finding_lines(f)
            text, said = "\n".join(lines), " ".join(" ".join(ENGLISH.finding_lines(f)).split())
            with self.subTest(f.name, advice=f.advice):
                self.assertIn(f"{f.name}（", lines[0].strip())
                self.assertTrue(has_chinese(lines[0].split("（", 1)[1]), lines[0])
                self.assertIn(entry(f.name).heading, text.replace("\n    ", ""))
                if f.advice:
                    self.assertTrue(has_chinese(advice(f.name, f.advice)), f"no Chinese for {f.advice!r}")
                self.assertIn(" ".join(evidence(f).split()), said)
                self.assertEqual(evidence(f), f.evidence.removeprefix(english(f.name)[0] + ".").strip())
                self.assertNotIn(english(f.name)[0], " ".join(text.split()))
                for line in lines:
                    self.assertLessEqual(columns(line), 118 if " " in line.strip() else 200, line)

    def test_every_name_of_the_catalogue(self):
        report = Report()
        for name in (*MISTAKES, *NOTES):
            report.findings.append(finding(name, "mistake", "Seen in 3 of 8 rows, off by 0.25.", (1, 4)))
        self.check_report(report)

    def test_planted_mistakes_in_both_languages(self):
        """Batches of each family with a mistake planted, so that custom and shortened advice comes up as in real life."""
        names, seen = set(), set()
        for planted in all_plants(lambda file: file in FAMILIES):
            if planted.mistake in seen or planted.mistake not in PLANTED:
                continue
            seen.add(planted.mistake)
            report = audit(recording_from(planted.arrays), planted.declared, dict(planted.numbers))
            self.check_report(report)
            names |= set(report.named())
        self.assertTrue(names >= set(PLANTED), f"planted {PLANTED}, named {sorted(names)}")

    def test_a_report_keeps_its_numbers_and_its_json(self):
        with tempfile.TemporaryDirectory() as folder:
            texts, files = {}, {}
            for language in LANGUAGES:
                files[language] = Path(folder) / f"{language}.json"
                status, texts[language], err = self.run_main(
                    str(CAPTURES / FAMILIES[0]), "--declared", "dr_grpo", "--lang", language, "--json", str(files[language])
                )
                self.assertEqual((status, err), (1, ""))
            self.assertEqual(files["en"].read_bytes(), files["zh"].read_bytes())
        said, in_chinese = texts["en"], texts["zh"]
        self.assertEqual(NUMBER.findall(said), NUMBER.findall(in_chinese))
        for title in ("Batch", "Advantages", "Loss", "Gradient", "Findings"):
            self.assertIn(f"\n{title}\n", said)
            self.assertNotIn(f"\n{title}\n", in_chinese)
            self.assertIn(f"\n{WORDS_ZH[title]}\n", in_chinese)
        self.assertIn("错误  reduction_differs（归约方式与声明不同）：", in_chinese)
        self.assertIn("改法：改正归约方式，或声明实际使用的那一种", in_chinese)

    def test_english_is_the_default(self):
        clean = str(CAPTURES / FAMILIES[0])
        self.assertEqual(self.run_main(clean), self.run_main(clean, "--lang", "en"))
        self.assertFalse(has_chinese(self.run_main(clean)[1]))
        report = audit(recording_from({"rewards": [1.0, 1.0], "group_ids": [0, 0]}))
        self.assertEqual(printed(report, "x"), printed(report, "x", ENGLISH))

    def test_list(self):
        status, out, _ = self.run_main("--list", "--lang", "zh")
        self.assertEqual((status, out.rstrip("\n")), (0, list_mistakes(CHINESE)))
        for name in (*MISTAKES, *NOTES):
            self.assertIn(f"{name}（{entry(name).heading}）\n", out)
        self.assertIn("\n不是错误\n", out)
        self.assertLessEqual(max(map(columns, out.splitlines())), 112)

    def test_refusals(self):
        for arguments, words in (
            (["--lang", "fr", "--list"], "'fr'"),
            (["--lang", "zh", "--recipes"], "--lang"),
            (["--lang", "zh", "--self-test"], "--lang"),
        ):
            status, out, err = self.run_main(*arguments)
            self.assertEqual((status, out, err.count("\n")), (2, "", 1), err)
            self.assertIn(words, err)


class Wrapping(unittest.TestCase):
    def test_columns_by_hand(self):
        self.assertEqual(columns("loss 为 0"), 4 + 1 + 2 + 1 + 1)
        self.assertEqual(columns("（，）"), 6)
        self.assertTrue(is_wide("掩") and not is_wide("m"))

    def test_lines_break_by_columns(self):
        # 掩码晚 is 6 columns and fills the line; the comma would be the seventh and eighth and takes 晚 with it.
        self.assertEqual(wrap_wide("掩码晚，一", 6), ["掩码", "晚，一"])
        self.assertEqual(wrap_wide("用 mask 选", 7), ["用 mask", "选"])
        self.assertEqual(wrap_wide("一（二）", 5), ["一", "（二）"])  # brackets stay with what they hold, at 6 columns
        self.assertEqual(wrap_wide("甲乙丙", 6, "  ", "    "), ["  甲乙", "    丙"])
        self.assertEqual(wrap_wide("", 10), [])

    def test_nothing_is_lost(self):
        for name in (*MISTAKES, *NOTES):
            text = entry(name).what + entry(name).advice
            for width in (20, 41, 110):
                self.assertEqual("".join("".join(wrap_wide(text, width)).split()), "".join(text.split()))


if __name__ == "__main__":
    unittest.main()
