"""Activities of a worker over time: spans of one activity each, without gaps, from the worker's start to its last heartbeat."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Activity = Literal[
    "starting",
    "waiting",
    "asleep",
    "sampling",
    "evaluating",
    "transferring",
    "checking",
    "deciding",
    "replaying",
    "drawing",
    "compiling",
    "training",
    "publishing",
    "checkpointing",
    "recording",
    "watching",
    "working",
]
# If a worker changes its activity more often between two heartbeats, the spans of that time are merged, so that rows stay few.
MOST_SPANS = 8


@dataclass(frozen=True, kw_only=True)
class Span:
    """A period of one activity.

    Attributes:
        ordinal: counts the worker's spans.
        detail: what it waited for, or a part of its start; None for other work.
        started, ended: seconds of the process's monotonic clock.
    """

    ordinal: int
    activity: Activity
    detail: str | None
    started: float
    ended: float


class Spans:
    """The spans of a worker that the buffer does not have yet; for any thread.

    Args:
        clock: seconds, monotonic.
        phases: what the process did before: parts of its start with the times of `clock` at which they began.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, phases: Sequence[tuple[str, float]] = ()) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._closed: list[Span] = []
        now = clock()
        ends = [*(begun for _, begun in phases), now][1:]
        for ordinal, ((detail, begun), ended) in enumerate(zip(phases, ends, strict=True)):
            self._closed.append(Span(ordinal=ordinal, activity="starting", detail=detail, started=begun, ended=ended))
        self._open = Span(ordinal=len(phases), activity="starting", detail=None, started=now, ended=now)
        self._last_offered = 0  # spans up to this one may be in the buffer, and keep their numbers

    def change(self, activity: Activity, detail: str | None) -> None:
        """Begin a span, unless the current one has the same activity and detail."""
        with self._lock:
            if (activity, detail) == (self._open.activity, self._open.detail):
                return
            now = self._clock()
            self._closed.append(replace(self._open, ended=now))
            self._open = Span(ordinal=self._open.ordinal + 1, activity=activity, detail=detail, started=now, ended=now)

    def pending(self) -> list[Span]:
        """Return the spans to store, in order: those since the last `stored`, and the current one up to now."""
        with self._lock:
            new = [span for span in self._closed if span.ordinal > self._last_offered]
            if len(new) > MOST_SPANS:
                self._closed[-len(new) :] = condensed(new)
                self._open = replace(self._open, ordinal=self._closed[-1].ordinal + 1)
            self._open = replace(self._open, ended=self._clock())
            self._last_offered = self._open.ordinal
            return [*self._closed, self._open]

    def stored(self, spans: list[Span]) -> None:
        """Forget spans that were stored, except the current one."""
        last = spans[-1].ordinal
        with self._lock:
            self._closed = [span for span in self._closed if span.ordinal >= last]


def condensed(spans: list[Span]) -> list[Span]:
    """Return one span for each activity and detail, with the same sum of seconds, one after another in the same time."""
    seconds: dict[tuple[Activity, str | None], float] = {}
    for span in spans:
        key = (span.activity, span.detail)
        seconds[key] = seconds.get(key, 0.0) + span.ended - span.started
    merged, started = list[Span](), spans[0].started
    for number, ((activity, detail), length) in enumerate(seconds.items()):
        merged.append(
            Span(
                ordinal=spans[0].ordinal + number,
                activity=activity,
                detail=detail,
                started=started,
                ended=started + length,
            )
        )
        started += length
    return merged
