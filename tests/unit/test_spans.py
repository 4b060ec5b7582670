"""Spans of a worker: they follow one another without a gap, few are stored, and the seconds of each activity stay exact."""

from __future__ import annotations

import itertools
from collections import Counter

from rftdata.workers.spans import MOST_SPANS, Span, Spans


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def seconds(spans: list[Span]) -> dict[tuple[str, str | None], float]:
    found: Counter[tuple[str, str | None]] = Counter()
    for span in spans:
        found[span.activity, span.detail] += span.ended - span.started
    return dict(found)


def test_spans_follow_one_another_and_the_same_activity_extends_its_span() -> None:
    clock = Clock()
    spans = Spans(clock)
    for seconds_later, activity in ((2, "sampling"), (3, "sampling"), (1, "waiting")):
        clock.now += seconds_later
        spans.change(activity, "weights" if activity == "waiting" else None)
    clock.now += 5
    found = spans.pending()
    assert [(s.ordinal, s.activity, s.detail, s.started, s.ended) for s in found] == [
        (0, "starting", None, 100, 102),
        (1, "sampling", None, 102, 106),
        (2, "waiting", "weights", 106, 111),
    ]


def test_what_was_stored_is_not_stored_again_but_for_the_current_span() -> None:
    clock = Clock()
    spans = Spans(clock)
    clock.now += 1
    spans.change("training", None)
    spans.stored(spans.pending())
    clock.now += 1
    assert [(s.ordinal, s.started, s.ended) for s in spans.pending()] == [(1, 101, 102)]
    spans.change("publishing", None)
    clock.now += 1
    assert [(s.ordinal, s.started, s.ended) for s in spans.pending()] == [(1, 101, 102), (2, 102, 103)]


def test_many_changes_between_two_heartbeats_are_put_together_and_no_second_is_lost() -> None:
    clock = Clock()
    spans = Spans(clock)
    spans.stored(spans.pending())
    for number in range(50):
        clock.now += 0.01
        spans.change("deciding" if number % 2 else "waiting", None if number % 2 else "sealed groups")
    clock.now += 0.01
    first = spans.pending()
    # The span that the buffer has keeps its number, and so does what was offered to a database that may have stored it before it failed.
    assert [s.ordinal for s in first] == [0, 1, 2, 3]
    assert abs(sum(s.ended - s.started for s in first) - 0.51) < 1e-9
    assert abs(seconds(first)["waiting", "sealed groups"] - 0.25) < 1e-9
    for number in range(50):
        clock.now += 0.01
        spans.change("waiting" if number % 2 else "sampling", None)
    again = spans.pending()
    assert [(s.ordinal, s.activity) for s in again[:4]] == [(s.ordinal, s.activity) for s in first]
    assert len(again) <= 4 + MOST_SPANS
    assert abs(sum(s.ended - s.started for s in again) - 1.01) < 1e-9
    assert all(abs(a.ended - b.started) < 1e-9 for a, b in itertools.pairwise(again))
