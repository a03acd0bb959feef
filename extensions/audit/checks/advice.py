"""Advice that never asks for what is there, and a word on arrays that nothing reads."""

from __future__ import annotations

import re

from extensions.audit.read.recording import Recording
from extensions.read.names import CANONICAL, did_you_mean

_WORD = re.compile(r"[A-Za-z_][A-Za-z_/0-9]*")


def advice_left(advice: str, recording: Recording) -> str:
    """The advice without the names of what was recorded; empty where nothing is left of it.

    Only a list after "record" is shortened ("record gamma, lam and both flags"); other advice is returned as it is.
    """
    if not advice.startswith("record "):
        return advice
    items, tail = record_items(advice)
    left = [item for item in items if not _is_recorded(item, recording)]
    if not left:
        return ""
    if len(left) == len(items):
        return advice
    return "record " + ", ".join(left) + tail


def record_items(advice: str) -> tuple[list[str], str]:
    """The items of the list after "record", and what follows them from a colon on."""
    head, sep, tail = advice.removeprefix("record ").partition(":")
    return re.split(r",? and |, (?![^(]*\))|; ", head), sep + tail


def _is_recorded(item: str, recording: Recording) -> bool:
    """Whether an item of a list starts with the name of something that the recording holds."""
    word = _WORD.match(item.removeprefix("the settings (").strip())
    return word is not None and CANONICAL.get(word.group()) in (*recording.arrays, *recording.numbers)


def unread_words(recording: Recording) -> str:
    """Which arrays nothing reads, and the role that each one may have."""
    out = []
    for name in sorted(recording.unread)[:12]:
        near = did_you_mean(name, [*recording.arrays, *recording.numbers])
        out.append(f"{name}" + (f" (did you mean {near}?)" if near else ""))
    more = f" and {len(recording.unread) - 12} more" if len(recording.unread) > 12 else ""
    return "not read: " + ", ".join(out) + more
