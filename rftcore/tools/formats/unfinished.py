"""The part of an unfinished text that may be shown, because nothing that follows can make something else of it."""

from __future__ import annotations

from collections.abc import Iterable


def before_marks(text: str, marks: Iterable[str]) -> str:
    """Return a text up to the first of some marks, without an end that may be the beginning of one."""
    end = len(text)
    for mark in marks:
        found = text.find(mark, 0, end)
        if found >= 0:
            end = found
    return text[: min((_before_beginning(text, end, mark) for mark in marks), default=end)]


def _before_beginning(text: str, end: int, mark: str) -> int:
    """Return where the longest beginning of a mark begins that ends a text."""
    start = max(0, end - len(mark) + 1)
    while (start := text.find(mark[0], start, end)) >= 0:
        if mark.startswith(text[start:end]):
            return start
        start += 1
    return end
