"""Exceptions that one thread raises in another. Standard library only."""

from __future__ import annotations

import ctypes
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def raise_in(thread_id: int, exception: type[BaseException] | None) -> None:
    """Raise an exception in a thread at its next Python instruction; None cancels one that is still pending.

    It does not interrupt a C function. The caller ensures that the thread still runs the code that is meant: the identifier of a
    thread is reused after its end.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread_id), ctypes.py_object(exception) if exception else None
    )


class RunningCall:
    """A call in which other threads raise exceptions while it runs, and never after its end.

    An exception is raised under the lock under which the call ends, and one that is still pending is cleared there. So it reaches neither
    the code after the call nor another thread with the same identifier.

    Attributes:
        has_ended: whether the call has returned or raised.
    """

    def __init__(self) -> None:
        self.has_ended = False
        self._lock = threading.Lock()
        self._thread_id: int | None = None

    def run(self, function: Callable[[], T]) -> T:
        """Call a function in this thread, once, and return its result; an exception that `interrupt` raised may replace the result."""
        own_id = threading.get_ident()
        with self._lock:
            self._thread_id = own_id
        try:
            try:
                return function()
            finally:
                # No function is called before the lock is held, so that no exception is raised on the way to it.
                with self._lock:
                    self._thread_id, self.has_ended = None, True
                raise_in(own_id, None)
        except BaseException:
            with self._lock:  # an exception may still have been raised in the lines above, and another one since
                self._thread_id, self.has_ended = None, True
            raise_in(own_id, None)
            raise

    def interrupt(self, exception: type[BaseException] | None) -> None:
        """Raise an exception in the call if it is running; None cancels one that is still pending."""
        with self._lock:
            if self._thread_id is not None:
                raise_in(self._thread_id, exception)

    def stack(self) -> traceback.StackSummary:
        """Return the frames of the call's thread, outermost first; none if the call is not running."""
        with self._lock:
            frame = None if self._thread_id is None else sys._current_frames().get(self._thread_id)
            return traceback.StackSummary() if frame is None else traceback.extract_stack(frame)
