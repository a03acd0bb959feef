"""Lines of Chinese and English text: how many columns a terminal gives them, and where they may break.

The standard library's textwrap breaks at spaces and counts characters. Chinese has no spaces, and its characters take two
columns each. A line may break at a space and on either side of a wide character, except that closing punctuation never
begins a line and opening punctuation never ends one.
"""

from __future__ import annotations

import unicodedata

_CLOSING = "，。；：、！？）】》”’"
_OPENING = "（【《“‘"


def is_wide(character: str) -> bool:
    """Whether a terminal gives the character two columns (Unicode East Asian Width: wide or fullwidth)."""
    return unicodedata.east_asian_width(character) in "WF"


def columns(text: str) -> int:
    """The columns that a line of text takes in a terminal; combining marks take none."""
    return sum(0 if unicodedata.combining(c) else 2 if is_wide(c) else 1 for c in text)


def _pieces(text: str) -> list[str]:
    """The text cut at every place where a line may break; a run of spaces is one piece."""
    pieces: list[str] = []
    for character in text:
        last = pieces[-1][-1] if pieces else " "
        if character == " ":
            is_joined = bool(pieces) and last == " "
        elif last == " ":
            is_joined = False
        else:
            is_joined = character in _CLOSING or last in _OPENING or not (is_wide(character) or is_wide(last))
        if is_joined:
            pieces[-1] += character
        else:
            pieces.append(character)
    return pieces


def wrap_wide(text: str, width: int, initial_indent: str = "", subsequent_indent: str = "") -> list[str]:
    """textwrap.wrap by columns instead of characters: no line is wider than `width`, but for one long English word."""
    lines, line = [], initial_indent
    is_empty = True
    for piece in _pieces(" ".join(text.split())):
        if not is_empty and piece != " " and columns(line + piece) > width:
            lines.append(line.rstrip())
            line, is_empty = subsequent_indent, True
        if is_empty and piece == " ":
            continue
        line, is_empty = line + piece, False
    return [*lines, line.rstrip()] if not is_empty else lines
