"""Thoughts of a model, in which nothing is a call."""

from __future__ import annotations

import re
from collections.abc import Iterable

_BEGIN, _END = "<think>", "</think>"
# A call may contain the text in an argument, but no line of a call ends with it: JSON and literals of Python write line breaks as `\n`.
_END_OF_LINE = re.compile(r"</think>(?=[ \t]*(?:\n|\Z))")


def after_thoughts(text: str, marks: Iterable[str] = (), values: tuple[str, str] | None = None) -> int:
    """Return where the answer begins after the thoughts: 0 without thoughts, its length if the thoughts do not end.

    The template may have written the beginning of the thoughts, so that only their end is in the text.

    Args:
        marks: of a format whose templates begin no thoughts: after the first of them no thoughts end that the text does not begin.
        values: beginning and end of values of the format that may contain lines that end with `</think>`.
    """
    is_begun = text.lstrip().startswith(_BEGIN)
    end = _end_of_line(text, values)
    if end is not None and (is_begun or not any(text.find(mark, 0, end.start()) >= 0 for mark in marks)):
        return end.end()
    if not is_begun:
        return 0
    place = text.find(_END)
    return len(text) if place < 0 else place + len(_END)


def _end_of_line(text: str, values: tuple[str, str] | None) -> re.Match[str] | None:
    """Return the first end of thoughts that ends a line and stands in no value."""
    place = 0
    while (end := _END_OF_LINE.search(text, place)) is not None and values is not None:
        begins, ends = values
        close = text.find(ends, end.end())
        is_inside = text.rfind(begins, place, end.start()) > text.rfind(ends, place, end.start())
        if not is_inside or close < 0 or text.find(begins, end.end(), close) >= 0:
            break
        place = close
    return end
