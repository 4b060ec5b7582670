"""The time limit of a rollout, which counts the time that the rollout takes, not the time that it waits.

The clock is suspended while the rollout's requests wait in the engine (for others to end, for room in the KV cache, for weights), while
it waits for something with its own limit, and while the engine sleeps. So a limit means the same under load as for a single rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType

from rftcore.engines.request_work import follow_requests

_current: ContextVar[RolloutClock | None] = ContextVar("rollout_clock", default=None)


class RolloutClocks:
    """The running clocks of one event loop, which can be suspended together."""

    def __init__(self) -> None:
        self._running: set[RolloutClock] = set()
        self._is_suspended = False

    def set_suspended(self, value: bool) -> None:
        """Suspend all clocks, including those that begin later, or resume them; called in their event loop."""
        if value == self._is_suspended:
            return
        self._is_suspended = value
        for clock in self._running:
            clock.suspend() if value else clock.resume()

    def begin(self, clock: RolloutClock) -> None:
        """Add a clock that begins to run."""
        self._running.add(clock)
        if self._is_suspended:
            clock.suspend()

    def end(self, clock: RolloutClock) -> None:
        """Remove a clock."""
        self._running.discard(clock)


class RolloutClock:
    """An `asyncio.timeout` that can be suspended. An asynchronous context manager, for one event loop.

    Args:
        limit_s: seconds that the rollout may take.
        clocks: the clocks that are suspended together with it.
        stop: called at the limit; returns whether the rollout ends by itself now, with what it has.
        close_s: further seconds for that.

    Raises:
        TimeoutError: the rollout took longer.
    """

    def __init__(
        self,
        limit_s: float,
        clocks: RolloutClocks,
        *,
        stop: Callable[[], bool] = lambda: False,
        close_s: float = 0.0,
    ) -> None:
        self._timeout = asyncio.timeout(None)
        self._clocks = clocks
        self._stop, self._close_s = stop, close_s
        self._alarm: asyncio.TimerHandle | None = None
        self._left_s = limit_s
        self._num_waits = 0
        self._counts = self._is_closing = False
        self._num_requests_waiting = self._num_requests_worked_on = 0
        self._waits_for_engine = False

    @property
    def expired(self) -> bool:
        """Whether the limit was exceeded."""
        return self._timeout.expired()

    async def __aenter__(self) -> RolloutClock:
        await self._timeout.__aenter__()
        self._counts = True
        self._set_alarm()
        self._clocks.begin(self)
        _current.set(self)
        follow_requests(self._follow)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, stack: TracebackType | None
    ) -> None:
        self._counts = False
        self._clear_alarm()
        self._clocks.end(self)
        _current.set(None)
        follow_requests(None)
        await self._timeout.__aexit__(kind, raised, stack)

    def suspend(self) -> None:
        """Stop the time until `resume` has been called as often."""
        self._clear_alarm()
        self._num_waits += 1

    def resume(self) -> None:
        """End one suspension."""
        self._num_waits -= 1
        if self._num_waits == 0:
            self._set_alarm()

    @property
    def is_suspended(self) -> bool:
        """Whether the time is suspended."""
        return self._num_waits > 0

    def _follow(self, waiting: int, worked_on: int) -> None:
        self._num_requests_waiting += waiting
        self._num_requests_worked_on += worked_on
        waits = self._num_requests_waiting > 0 and self._num_requests_worked_on == 0
        if waits != self._waits_for_engine:
            self._waits_for_engine = waits
            self.suspend() if waits else self.resume()

    def _set_alarm(self) -> None:
        if self._counts and self._timeout.when() is None:
            self._alarm = asyncio.get_running_loop().call_later(self._left_s, self._reach_limit)

    def _clear_alarm(self) -> None:
        if self._alarm is not None:
            self._left_s = max(0.0, self._alarm.when() - asyncio.get_running_loop().time())
            self._alarm.cancel()
            self._alarm = None

    def _reach_limit(self) -> None:
        self._alarm = None
        if not self._is_closing and self._stop():
            self._is_closing, self._left_s = True, self._close_s
            self._set_alarm()
        else:
            self._timeout.reschedule(asyncio.get_running_loop().time())


@contextmanager
def clock_suspended() -> Iterator[None]:
    """Exclude the time of this block from the limit of its rollout."""
    clock = _current.get()
    if clock is None:
        yield
        return
    clock.suspend()
    try:
        yield
    finally:
        clock.resume()
