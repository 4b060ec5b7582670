"""The time limit of a rollout, which is suspended while the rollout waits for something with its own limit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType

_current: ContextVar[RolloutClock | None] = ContextVar("rollout_clock", default=None)


class RolloutClock:
    """An `asyncio.timeout` that can be suspended. An asynchronous context manager, for one event loop.

    Args:
        limit_s: seconds that the rollout may take.

    Raises:
        TimeoutError: the rollout took longer.
    """

    def __init__(self, limit_s: float) -> None:
        self._timeout = asyncio.timeout(limit_s)
        self._left_s = limit_s
        self._num_waits = 0
        self._counts = False

    @property
    def expired(self) -> bool:
        """Whether the limit was exceeded."""
        return self._timeout.expired()

    async def __aenter__(self) -> RolloutClock:
        await self._timeout.__aenter__()
        self._counts = True
        _current.set(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, stack: TracebackType | None
    ) -> None:
        self._counts = False
        _current.set(None)
        await self._timeout.__aexit__(kind, raised, stack)

    @contextmanager
    def _standing_still(self) -> Iterator[None]:
        now = asyncio.get_running_loop().time
        when = self._timeout.when()
        if when is not None and self._can_change():
            self._left_s = when - now()
            self._timeout.reschedule(None)
        self._num_waits += 1
        try:
            yield
        finally:
            self._num_waits -= 1
            if self._num_waits == 0 and self._can_change():
                self._timeout.reschedule(now() + self._left_s)

    def _can_change(self) -> bool:
        return self._counts and not self._timeout.expired()


@contextmanager
def clock_stands_still() -> Iterator[None]:
    """Exclude the time of this block from the limit of its rollout."""
    clock = _current.get()
    if clock is None:
        yield
        return
    with clock._standing_still():
        yield
