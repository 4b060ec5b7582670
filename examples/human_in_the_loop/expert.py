"""A scripted person: knows the rule, sees what the pages show, and answers as fast as the pages let it.

It decides on each item from the question and the answers in the page alone. It never opens a held-out question: pages show what a run sampled.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable

import httpx
from studio_pages import StudioPages

_PAUSE_S = 0.1


def right(question: str) -> str:
    """Return the right answer, which anyone can find who looks at the question."""
    return "".join(sorted(question.strip().rstrip(">")))


def review(pages: StudioPages, is_over: Callable[[], bool]) -> dict[str, int]:
    """Answer reviews as they come, until the run is over; return how many rewards were kept and corrected."""
    counts = {"kept": 0, "corrected": 0}
    while not is_over():
        # The studio ends with the run, perhaps between two requests.
        with contextlib.suppress(httpx.TransportError):
            for item in pages.reviews():
                is_right = item.answers == [right(item.question)]
                pages.answer("/review", item, choice="pass", **({} if is_right else {"reward": "0"}))
                counts["kept" if is_right else "corrected"] += 1
        time.sleep(_PAUSE_S)
    return counts


def edit(pages: StudioPages, kind: str) -> int:
    """Write the right answer in place of each that is asked about; return their number."""
    count = 0
    for item in pages.claimed(kind):
        pages.answer(f"/label/{kind}", item, value=right(item.question))
        count += 1
    return count


def rank(pages: StudioPages, kind: str) -> int:
    """Put right answers before wrong ones in each group that is asked about; return their number."""
    count = 0
    for item in pages.claimed(kind):
        tiers: tuple[list[str], list[str]] = ([], [])
        for letter, answer in zip("ABCDEFGHI", item.answers, strict=False):
            tiers[answer != right(item.question)].append(letter)
        pages.answer(f"/label/{kind}", item, order=json.dumps([tier for tier in tiers if tier]))
        count += 1
    return count
