"""Time limits of user functions: where the limit of a stage, a task source, a reward or a query is kept.

A stage's limit is its `timeout_s`; `DEFAULT_S` applies if none is configured. `call` runs a function under its limit in the calling thread,
so objects that belong to a thread keep working. One watcher thread stops calls that exceed their limit, in three steps:

1. It records the stack, calls the interrupts registered with `interruptible` (for a DuckDB query), and raises an exception in the thread,
   which ends Python code. `call` then raises `TimeLimitError`.
2. A function that does not return within another `GRACE_S` is blocked in C, or catches everything. The process cannot continue: the
   handler of `when_blocked` reports it and ends the process.
3. C code that holds the interpreter's lock (a backtracking regular expression) stops the watcher, too. A timer that needs no lock
   (`rftdata.user_code.held_lock_timer`) then writes the stacks and ends the process.

The exception of a call is raised inside that call or not at all. It is raised at most once, under the same lock under which the
call ends, and a pending one is cleared there. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, NoReturn, TypeVar

from rftdata.errors import TimeLimitError
from rftdata.user_code import held_lock_timer
from rftdata.user_code.async_raise import raise_in
from rftdata.user_code.blocked_process import report_or_print
from rftdata.user_code.frames import user_stack

DEFAULT_S = 600.0
"""Limit of a stage, and of a task source for its next row, if none is configured."""
LOADING_S = 300.0
"""Limit for everything a plug-in does before its first call: imports, constructor, `prepare`."""
FILE_S = 30.0
"""Minimum time for importing a user's file, which may import large packages, under commands with lower time limits."""
GRACE_S = 5.0
"""Time that a function has after its limit to end by the exception raised in it."""

_HEARTBEAT_S = 1.0
_IDLE_S = 5.0
_HANDLER_S = 60.0
_AGAIN_S = 0.25

T = TypeVar("T")


class _Expired(BaseException):
    """Raised in the thread of a call that exceeds its limit; each call has its own subclass."""


class _Cap(NamedTuple):
    """The limits that `at_most` sets."""

    seconds: float
    where: str
    loading_s: float


class Limited:
    """One call under a limit.

    A function that processes one item after the other sets `noun`, `items` and, while it runs, `position`; the error then names the
    current item.

    Attributes:
        noun, items: the kind of items, such as experiences, and the id of each.
        position: index of the current item in `items`.
    """

    def __init__(self, timeout_s: float, what: str, *, cap: bool = True, loading: bool = False) -> None:
        self.noun = ""
        self.items: Sequence[object] = ()
        self.position = 0
        self.what = what
        self.own_s = timeout_s
        self.timeout_s = timeout_s
        self.cap: str | None = None
        if _cap is not None and cap and timeout_s > (capped_s := _cap.loading_s if loading else _cap.seconds):
            self.timeout_s, self.cap = capped_s, _cap.where
        self.thread_id = threading.get_ident()
        self.deadline = 0.0
        self.is_running = self.is_blocked = False
        self.signal: type[_Expired] | None = None
        self.interrupts: list[Callable[[], None]] = []
        self.stack = self.place = ""

    def error(self) -> TimeLimitError:
        """Return the error of a call that has exceeded its limit."""
        subject = self.items[self.position] if self.position < len(self.items) else None
        where = "" if subject is None else f" for {self.noun} {subject}"
        place = f"; it was at {self.place}" if self.place else ""
        after = f" and could not be stopped within {GRACE_S:g} s more" if self.is_blocked else ""
        capped = f"{self.cap} waits {self.timeout_s:g} s at most, and a run {self.own_s:g} s" if self.cap else None
        return TimeLimitError(
            f"{self.what} did not return{where} within {self.timeout_s:g} s{after}{place}",
            allowed=capped,
            todo="correct it" if self.cap else "correct it, or raise its timeout_s",
            stack=self.stack,
            blocked=self.is_blocked,
            subject=subject,
            num_done=self.position,
        )


def call(function: Callable[[], T], timeout_s: float, what: str, *, cap: bool = True, loading: bool = False) -> T:
    """Run a function under a time limit.

    Args:
        what: the call with its rows or task, as the subject of the error's sentence.
        cap: whether `at_most` lowers the limit.
        loading: whether the call imports a user's file, for which `at_most` has a separate limit.

    Raises:
        TimeLimitError: it took longer. Anything else is what the function raised.
    """
    limited = Limited(timeout_s, what, cap=cap, loading=loading)
    try:
        try:
            _begin(limited)
            result = function()
        finally:
            _end(limited)
    except BaseException as error:
        # The exception may have been raised at the first instruction of `_end`. It is raised only once, so `_end` now succeeds.
        _end(limited)
        if limited.signal is None or isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        if isinstance(error, _Expired) and not isinstance(error, limited.signal):
            raise  # the limit of a call around this one
        raise limited.error() from None
    if limited.signal is not None:
        raise limited.error()  # the function caught the exception, or returned at the last moment
    return result


@contextlib.contextmanager
def interruptible(interrupt: Callable[[], None]) -> Iterator[None]:
    """Register what stops the C code within the block, such as `connection.interrupt`; it must be quick and thread-safe."""
    limited = current()
    if limited is None:
        yield
        return
    limited.interrupts.append(interrupt)
    try:
        yield
    finally:
        with _lock:
            limited.interrupts.remove(interrupt)


def current() -> Limited | None:
    """Return the innermost call under a limit in this thread."""
    calls = _calls.get(threading.get_ident())
    return calls[-1] if calls else None


@contextlib.contextmanager
def at_most(seconds: float, where: str, *, loading_s: float = FILE_S) -> Iterator[None]:
    """Lower the limits of this process to `seconds`; lower limits stay, and those of calls with `cap=False`.

    Args:
        where: the reason, for the error's sentence, such as `rft check`.
        loading_s: limit for importing a user's file, if greater than `seconds`.
    """
    global _cap
    before, _cap = _cap, _Cap(seconds, where, max(seconds, loading_s))
    try:
        yield
    finally:
        _cap = before


def lowered(timeout_s: float) -> float:
    """Return a limit as lowered by `at_most`, for other enforcers such as PostgreSQL's `statement_timeout`."""
    return timeout_s if _cap is None else min(timeout_s, _cap.seconds)


@contextlib.contextmanager
def when_blocked(handler: Callable[[TimeLimitError], object]) -> Iterator[None]:
    """Within the block, let a handler report a call that cannot be stopped and end the process.

    Without a handler, a process that has joined a run reports to it, and any other prints the error (`rftdata.user_code.blocked_process`).

    The watcher thread calls the handler while the blocked thread is still blocked. It has a minute, and the process exits with 1 if it
    returns or fails.
    """
    global _handler
    before, _handler = _handler, handler
    try:
        yield
    finally:
        _handler = before


_lock = threading.Lock()
_calls: dict[int, list[Limited]] = {}
"""The calls of each thread that are running, the innermost last."""
_cap: _Cap | None = None
_handler: Callable[[TimeLimitError], object] | None = None
_watcher: threading.Thread | None = None
_wake = threading.Event()
_next_look = 0.0


def _begin(limited: Limited) -> None:
    with _lock:
        limited.deadline = time.monotonic() + limited.timeout_s
        limited.is_running = True
        _calls.setdefault(limited.thread_id, []).append(limited)
        held_lock_timer.write_sentence(
            f"{limited.what} did not return within {limited.timeout_s:g} s, and no other thread of the process could run"
        )
        _set_timer(time.monotonic())
        # Set again, since setting the timer takes a moment on a busy machine.
        limited.deadline = time.monotonic() + limited.timeout_s
        if _watcher is None:
            _start_watcher()
        elif limited.deadline < _next_look:
            _wake.set()


def _end(limited: Limited) -> None:
    """Stop watching a call. Afterwards its exception is no longer raised."""
    while True:
        with _lock:
            if not limited.is_running:
                return
            if not limited.is_blocked:
                _forget(limited)
                return
        time.sleep(_HANDLER_S)  # it is being reported as blocked, and then the process ends


def _forget(limited: Limited) -> None:
    limited.is_running = False
    if limited.signal is not None:
        raise_in(limited.thread_id, None)
    calls = _calls[limited.thread_id]
    # Inner calls whose own end was interrupted end with this one.
    for inner in calls[calls.index(limited) :]:
        inner.is_running = False
    del calls[calls.index(limited) :]
    if not calls:
        del _calls[limited.thread_id]


def _start_watcher() -> None:
    global _watcher
    _watcher = threading.Thread(target=_watch, name="time limits", daemon=True)
    _watcher.start()


def _watch() -> None:
    """Check the calls once a second, and at the next deadline."""
    global _next_look
    last_active = time.monotonic()
    while True:
        with _lock:
            now = time.monotonic()
            running = [limited for calls in _calls.values() for limited in calls]
            for limited in running:
                if limited.signal is not None:
                    _interrupt(limited)  # a query that began just after the first time
                elif now >= limited.deadline:
                    _expire(limited)
            blocked = [limited for limited in running if _is_blocked(limited, now)]
            if blocked:
                blocked[0].is_blocked = True
            elif running:
                last_active = now
                _set_timer(now)
                _next_look = min(now + _HEARTBEAT_S, *(_next_step(limited) for limited in running))
            elif now - last_active < _IDLE_S:
                _next_look = now + _HEARTBEAT_S
            else:
                held_lock_timer.cancel()
                _next_look = float("inf")
        if blocked:
            _end_process(blocked[0])
        if _next_look == float("inf"):
            _wake.wait()
            last_active = time.monotonic()
        else:
            _wake.wait(max(_next_look - time.monotonic(), 0.0))
        _wake.clear()


def _next_step(limited: Limited) -> float:
    """Return when to check a call again; soon if it was interrupted."""
    if limited.signal is None:
        return limited.deadline
    return min(time.monotonic() + _AGAIN_S, limited.deadline + GRACE_S)


def _is_blocked(limited: Limited, now: float) -> bool:
    return limited.signal is not None and now >= limited.deadline + GRACE_S


def _expire(limited: Limited) -> None:
    """Ask a call to stop. The lock is held, so it is still running."""
    frame = sys._current_frames().get(limited.thread_id)
    if frame is not None:
        limited.stack, limited.place = user_stack(frame, below=call.__code__)
    limited.signal = type("_Expired", (_Expired,), {})
    # The grace period begins here, since the watcher itself may be late.
    limited.deadline = time.monotonic()
    _interrupt(limited)
    raise_in(limited.thread_id, limited.signal)


def _interrupt(limited: Limited) -> None:
    for interrupt in limited.interrupts:
        with contextlib.suppress(Exception):
            interrupt()


def _end_process(limited: Limited) -> NoReturn:
    try:
        # Reporting may need a lock that the blocked thread holds.
        held_lock_timer.exit_after(_HANDLER_S)
        handler = _handler or report_or_print
        handler(limited.error())
    except BaseException:  # noqa: BLE001 - the process ends in any case, with this message
        traceback.print_exc()
    finally:
        os._exit(1)


def _set_timer(now: float) -> None:
    """Let the timer fire later than the watcher acts on the last deadline of all calls; the lock is held."""
    last = max(limited.deadline for calls in _calls.values() for limited in calls)
    held_lock_timer.set_to(max(last, now) + GRACE_S + _HEARTBEAT_S, now)


def _after_fork_in_parent() -> None:
    _lock.release()
    _wake.set()


def _after_fork_in_child() -> None:
    """Start again, since only the forking thread exists."""
    global _lock, _watcher, _wake
    _lock, _wake, _watcher = threading.Lock(), threading.Event(), None
    _calls.clear()


# The timer registers its functions first, so this lock is taken before the timer's.
os.register_at_fork(
    before=lambda: _lock.acquire(), after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
