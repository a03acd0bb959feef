"""The printed report and --list in Chinese: headings, what each finding means, advice. Evidence stays in English.

Evidence is made of the batch's numbers and of the names of objectives, arrays and options, which have no Chinese form.
"""

from __future__ import annotations

from extensions.audit.catalogue import MISTAKES, NOTES, Finding
from extensions.audit.catalogue_zh import MISTAKES_ZH, NOTES_ZH, Chinese
from extensions.audit.checks.advice import record_items
from extensions.audit.say.report import Language, rows_shown
from extensions.audit.say.wide import wrap_wide
from extensions.audit.words_zh import OTHER_ADVICE_ZH, RECORD_ITEMS_ZH, RECORD_NEXT_ZH, WORDS_ZH

WIDTH = 116
LIST_WIDTH = 110


def word(text: str) -> str:
    return WORDS_ZH.get(text) or RECORD_NEXT_ZH.get(text, text)


def entry(name: str) -> Chinese:
    return MISTAKES_ZH[name] if name in MISTAKES_ZH else NOTES_ZH[name]


def advice(name: str, text: str) -> str:
    """The advice of a finding in Chinese; a list that was shortened to what is still missing is put together again."""
    if name in MISTAKES and text == MISTAKES[name].advice:
        return MISTAKES_ZH[name].advice
    if text in OTHER_ADVICE_ZH or not text.startswith("record "):
        return OTHER_ADVICE_ZH.get(text, text)
    items, tail = record_items(text)
    return "请记录 " + "、".join(RECORD_ITEMS_ZH.get(item, item) for item in items) + tail.replace(": ", "：")


def evidence(f: Finding) -> str:
    """The finding's evidence without the catalogue's English sentence."""
    what = MISTAKES[f.name].what if f.name in MISTAKES else NOTES[f.name]
    return f.evidence.removeprefix(f"{what}.").strip()


def finding_lines(f: Finding) -> list[str]:
    heading, what, _ = entry(f.name)
    lines = wrap_wide(f"{f.name}（{heading}）：{what}。", WIDTH, f"  {word(f.severity)}  ", "    ")
    lines += wrap_wide(evidence(f), WIDTH, "    ", "    ")
    lines += [f"    {word('rows')}：{rows_shown(f)}"] if f.rows else []
    lines += wrap_wide(f"{word('change')}：{advice(f.name, f.advice)}", WIDTH, "    ", "      ") if f.advice else []
    return lines


def listed_lines(name: str) -> list[str]:
    heading, what, change = entry(name)
    lines = [f"{name}（{heading}）", *wrap_wide(what, LIST_WIDTH, "    ", "    ")]
    return lines + (wrap_wide(f"{word('change')}：{change}", LIST_WIDTH, "    ", "      ") if change else [])


CHINESE = Language(word=word, finding_lines=finding_lines, listed_lines=listed_lines)
