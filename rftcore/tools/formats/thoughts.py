"""Thoughts of a model, in which nothing is a call."""

from __future__ import annotations

import re

_BEGIN, _END = "<think>", "</think>"
# A call may contain the text in an argument, but no line of a call ends with it: JSON and literals of Python write line breaks as `\n`.
_END_OF_LINE = re.compile(r"</think>(?=[ \t]*(?:\n|\Z))")


def after_thoughts(text: str) -> int:
    """Return where the answer begins after the thoughts: 0 without thoughts, its length if the thoughts do not end.

    The template may have written the beginning of the thoughts, so that only their end is in the text.
    """
    end = _END_OF_LINE.search(text)
    if end is not None:
        return end.end()
    if not text.lstrip().startswith(_BEGIN):
        return 0
    place = text.find(_END)
    return len(text) if place < 0 else place + len(_END)
