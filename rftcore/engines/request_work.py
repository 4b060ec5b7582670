"""Reports of whether an engine works on a request, for the time limit of the request's rollout.

A request may wait in the engine for others to end, for room in the KV cache, or for weights. None of these waits should count against the limit
on the rollout's time. A limit subscribes for its task and the tasks that begin there; the engine then reports on each of their requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextvars import ContextVar

Follower = Callable[[int, int], None]
"""Receives changes of two numbers, in the event loop of the requests: requests that wait in the engine, and requests it works on."""

_follower: ContextVar[Follower | None] = ContextVar("request_follower", default=None)


def follow_requests(follower: Follower | None) -> None:
    """Report requests that the current task opens from now on; None ends that."""
    _follower.set(follower)


class RequestWork:
    """The state of one open request: it waits until the engine reports otherwise. Opened and closed in the request's event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._follower = _follower.get()
        self._is_open = True
        self._is_worked_on = False
        self._report(1, 0)

    def set_worked_on(self, value: bool) -> None:
        """Report that the engine works on the request, or stopped; called in any thread."""
        if self._follower is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the request with it
                self._loop.call_soon_threadsafe(self._change, value)

    def close(self) -> None:
        """Report that the request ended."""
        self._is_open = False
        self._report(*((0, -1) if self._is_worked_on else (-1, 0)))

    def _change(self, value: bool) -> None:
        if self._is_open and value != self._is_worked_on:
            self._is_worked_on = value
            self._report(*((-1, 1) if value else (1, -1)))

    def _report(self, waiting: int, worked_on: int) -> None:
        if self._follower is not None:
            self._follower(waiting, worked_on)
