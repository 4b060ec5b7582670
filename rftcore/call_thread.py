"""Thread for calls that may never return, such as a collective after the death of a rank; see `rftcore.stuck_threads`."""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable
from typing import Any

from rftcore import stuck_threads


class CallThread:
    """Runs one function at a time. `select` and `poll` find it readable once the function has ended."""

    def __init__(self, name: str) -> None:
        self._functions: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._outcome: tuple[Any, BaseException | None] = (None, None)
        self._ended, self._write_end = os.pipe()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._ended

    def start(self, function: Callable[[], Any]) -> None:
        """Begin a call; `result` returns its value."""
        self._functions.put(function)

    @property
    def has_ended(self) -> bool:
        """Whether `result` would return at once."""
        waits = select.poll()  # not `select`, which takes no number above 1023
        waits.register(self._ended, select.POLLIN)
        return bool(waits.poll(0))

    def result(self) -> Any:
        """Wait for the end of the call; return its value or raise its error."""
        os.read(self._ended, 1)
        value, error = self._outcome
        self._outcome = (None, None)
        if error is not None:
            raise error
        return value

    def leave(self, timeout_s: float) -> None:
        """End the thread; if its call does not end in time, abandon it."""
        self._functions.put(None)
        if stuck_threads.leave(self._thread, timeout_s):
            os.close(self._ended)
            os.close(self._write_end)

    def _work(self) -> None:
        while (function := self._functions.get()) is not None:
            try:
                self._outcome = (function(), None)
            except BaseException as error:  # noqa: BLE001 - raised again by `result`
                self._outcome = (None, error)
            del function  # what it refers to may be large
            os.write(self._write_end, b".")
