"""The time limit of a rollout, which counts the time that the rollout takes, not the time that it waits its turn.

The clock is suspended while the rollout's requests wait in the engine (for others to end, for room in the KV cache, for weights), while
it waits for something with its own limit, and while the engine sleeps. Under load a limit therefore means what it means for one rollout alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType

from rftcore.engines.request_work import follow_requests

_current: ContextVar[RolloutClock | None] = ContextVar("rollout_clock", default=None)


class RolloutClocks:
    """The running clocks of one event loop, which can be suspended together."""

    def __init__(self) -> None:
        self._running: set[RolloutClock] = set()
        self._stand_still = False

    def stand_still(self, value: bool) -> None:
        """Suspend all clocks, also those that begin later, or let them go on; called in their event loop."""
        if value == self._stand_still:
            return
        self._stand_still = value
        for clock in self._running:
            clock.suspend() if value else clock.go_on()

    def begin(self, clock: RolloutClock) -> None:
        """Add a clock that begins to run."""
        self._running.add(clock)
        if self._stand_still:
            clock.suspend()

    def end(self, clock: RolloutClock) -> None:
        """Remove a clock."""
        self._running.discard(clock)


class RolloutClock:
    """An `asyncio.timeout` that can be suspended. An asynchronous context manager, for one event loop.

    Args:
        limit_s: seconds that the rollout may take.
        clocks: with which it is suspended.

    Raises:
        TimeoutError: the rollout took longer.
    """

    def __init__(self, limit_s: float, clocks: RolloutClocks) -> None:
        self._timeout = asyncio.timeout(limit_s)
        self._clocks = clocks
        self._left_s = limit_s
        self._num_waits = 0
        self._counts = False
        self._num_requests_waiting = self._num_requests_worked_on = 0
        self._waits_for_engine = False

    @property
    def expired(self) -> bool:
        """Whether the limit was exceeded."""
        return self._timeout.expired()

    async def __aenter__(self) -> RolloutClock:
        await self._timeout.__aenter__()
        self._counts = True
        self._clocks.begin(self)
        _current.set(self)
        follow_requests(self._follow)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, stack: TracebackType | None
    ) -> None:
        self._counts = False
        self._clocks.end(self)
        _current.set(None)
        follow_requests(None)
        await self._timeout.__aexit__(kind, raised, stack)

    def suspend(self) -> None:
        """Stop the time until as many calls of `go_on`."""
        when = self._timeout.when()
        if when is not None and self._can_change():
            self._left_s = when - asyncio.get_running_loop().time()
            self._timeout.reschedule(None)
        self._num_waits += 1

    def go_on(self) -> None:
        """End one suspension."""
        self._num_waits -= 1
        if self._num_waits == 0 and self._can_change():
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._left_s)

    @property
    def stands_still(self) -> bool:
        """Whether the time is suspended."""
        return self._num_waits > 0

    def _follow(self, waiting: int, worked_on: int) -> None:
        self._num_requests_waiting += waiting
        self._num_requests_worked_on += worked_on
        waits = self._num_requests_waiting > 0 and self._num_requests_worked_on == 0
        if waits != self._waits_for_engine:
            self._waits_for_engine = waits
            self.suspend() if waits else self.go_on()

    def _can_change(self) -> bool:
        return self._counts and not self._timeout.expired()


@contextmanager
def clock_stands_still() -> Iterator[None]:
    """Exclude the time of this block from the limit of its rollout."""
    clock = _current.get()
    if clock is None:
        yield
        return
    clock.suspend()
    try:
        yield
    finally:
        clock.go_on()
