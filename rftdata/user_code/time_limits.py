"""Time limits for functions that may never return: stages, task sources, rewards, queries.

`call` runs a function in the thread that calls it, so objects that belong to a thread keep working. One watcher thread stops what
exceeds its limit, in three steps:

1. It takes the stack, interrupts what registered with `interruptible` (a DuckDB query), and raises an exception in the thread, which
   ends Python code. `call` then raises `TimeLimitError`.
2. A function that still does not return after `GRACE_S` is blocked in C, or catches everything. The process cannot go on: the handler
   of `when_blocked` reports it and ends the process.
3. C code that holds the interpreter's lock (a regular expression that backtracks) stops the watcher, too. `faulthandler`, whose timer
   needs no lock, then writes the stacks behind a sentence that was written beforehand, and exits with 1.

Always: the exception of a call is raised inside that call or not at all. It is raised at most once, only under the lock under which the
call also ends, and a pending one is cleared there. Standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

from rftdata.errors import TimeLimitError
from rftdata.user_code.async_raise import raise_in
from rftdata.user_code.blocked import report_or_print
from rftdata.user_code.frames import user_stack

DEFAULT_S = 600.0
"""The limit of a stage, and of a task source for its next row, where the configuration sets none."""
LOADING_S = 300.0
"""The limit for what a plug-in does before its first call: imports, its constructor, `prepare`."""
FILE_S = 30.0
"""What a command that waits little leaves a file of the user's, which may import large packages."""
HEADER_BYTES = 1024
"""Length of the sentence that stands at the beginning of a file of stacks, with the blanks behind it."""
GRACE_S = 5.0
"""What a function has after its limit to end by the exception that is raised in it."""

_HEARTBEAT_S = 1.0
_IDLE_S = 5.0
# The timer without the lock fires this much later than the watcher would act, and is set again about as often.
_SLACK_S = 4.0
_HANDLER_S = 60.0
_AGAIN_S = 0.25

T = TypeVar("T")


class _Expired(BaseException):
    """Raised in the thread of a call that exceeds its limit; each call has a subclass of its own."""


class _Cap(NamedTuple):
    """What `at_most` lowers limits to."""

    seconds: float
    where: str
    loading_s: float


class Limited:
    """One call under a limit.

    A function that works on one item after the other sets `noun`, `items` and, while it runs, `position`; the error then names the item
    at which it was.

    Attributes:
        noun, items: what the items are, such as experiences, and the id of each.
        position: where in `items` it is.
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
        """The error of a call that has exceeded its limit."""
        subject = self.items[self.position] if self.position < len(self.items) else None
        where = "" if subject is None else f" for {self.noun} {subject}"
        place = f"; it was at {self.place}" if self.place else ""
        after = f" and could not be stopped within {GRACE_S:g} s more" if self.is_blocked else ""
        capped = f"{self.cap} waits {self.timeout_s:g} s at most, and a run {self.own_s:g} s" if self.cap else None
        return TimeLimitError(
            f"{self.what} did not return{where} within {self.timeout_s:g} s{after}{place}", allowed=capped,
            todo="correct it" if self.cap else "correct it, or raise its timeout_s", stack=self.stack, blocked=self.is_blocked, subject=subject,
            num_done=self.position,
        )  # fmt: skip


def call(function: Callable[[], T], timeout_s: float, what: str, *, cap: bool = True, loading: bool = False) -> T:
    """Run a function, for so many seconds at most.

    Args:
        what: names it for people, with the rows or the task: the subject of the error's sentence.
        cap: whether `at_most` lowers the limit.
        loading: it imports a file of the user's: `at_most` has a limit of its own for that.

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
        # The exception may have been raised at the first instruction of `_end`. It is raised once, so now it ends.
        _end(limited)
        if limited.signal is None or isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        if isinstance(error, _Expired) and not isinstance(error, limited.signal):
            raise  # the limit of a call around this one
        raise limited.error() from None
    if limited.signal is not None:
        raise limited.error()  # it caught the exception, or returned at the last moment
    return result


@contextlib.contextmanager
def interruptible(interrupt: Callable[[], None]) -> Iterator[None]:
    """Register what stops the C code that runs within, such as `connection.interrupt`; it must be quick and callable by any thread."""
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
    """The innermost call under a limit in this thread."""
    calls = _calls.get(threading.get_ident())
    return calls[-1] if calls else None


@contextlib.contextmanager
def at_most(seconds: float, where: str, *, loading_s: float = FILE_S) -> Iterator[None]:
    """Lower the limits of this process to so many seconds; lower ones stay, and so do those of calls with `cap=False`.

    Args:
        where: what lowers it, for the error's sentence, such as `rft check`.
        loading_s: the limit for the import of a user's file where it is more than `seconds`.
    """
    global _cap
    before, _cap = _cap, _Cap(seconds, where, max(seconds, loading_s))
    try:
        yield
    finally:
        _cap = before


def lowered(timeout_s: float) -> float:
    """A limit as `at_most` lowers it, for what enforces it by itself, such as PostgreSQL's `statement_timeout`."""
    return timeout_s if _cap is None else min(timeout_s, _cap.seconds)


@contextlib.contextmanager
def when_blocked(handler: Callable[[TimeLimitError], object]) -> Iterator[None]:
    """Within, let a handler report a call that cannot be stopped and end the process.

    Without a handler, a process that has joined a run reports to it, and any other prints the error (`rftdata.user_code.blocked`).

    The watcher thread calls it while the blocked thread is still where it was. It has a minute, and the process exits with 1 where it
    returns or fails.
    """
    global _handler
    before, _handler = _handler, handler
    try:
        yield
    finally:
        _handler = before


def report_stacks_to(path: Path | None) -> None:
    """Name the file for stacks of a process whose lock is held for good; None: standard error.

    The file begins with a sentence on the call that runs, and is empty behind it as long as nothing is blocked.
    """
    global _report
    with _lock:
        if _report is not None:
            os.close(_report)
            _report = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _report = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.lseek(_report, HEADER_BYTES, os.SEEK_SET)
        _disarm()


def hand_over_timer() -> None:
    """From now on the timer of `faulthandler` belongs to other code of this process: here it is neither set nor cancelled any more."""
    global _is_handed_over
    with _lock:
        _disarm()
        _is_handed_over = True


def take_back_timer() -> None:
    """The other code needs the timer no more, and has cancelled it."""
    global _is_handed_over
    with _lock:
        _is_handed_over = False


_lock = threading.Lock()
_calls: dict[int, list[Limited]] = {}
"""The calls of each thread that are running, the innermost last."""
_cap: _Cap | None = None
_handler: Callable[[TimeLimitError], object] | None = None
_report: int | None = None
_watcher: threading.Thread | None = None
_wake = threading.Event()
_next_look = 0.0
_is_handed_over = False
_fires_at = 0.0
"""When the timer without the lock fires; 0: it is not set."""


def _begin(limited: Limited) -> None:
    with _lock:
        limited.deadline = time.monotonic() + limited.timeout_s
        limited.is_running = True
        _calls.setdefault(limited.thread_id, []).append(limited)
        if _report is not None:
            held = f"{limited.what} did not return within {limited.timeout_s:g} s, and no other thread of the process could run"
            line = " ".join(held.split()).encode()[: HEADER_BYTES - 1]
            os.pwrite(_report, line.ljust(HEADER_BYTES - 1) + b"\n", 0)
        _arm(time.monotonic())
        # Again: setting the timer takes a moment on a busy machine.
        limited.deadline = time.monotonic() + limited.timeout_s
        if _watcher is None:
            _start_watcher()
        elif limited.deadline < _next_look:
            _wake.set()


def _end(limited: Limited) -> None:
    """Take a call out of those that are watched. Afterwards its exception is not raised any more."""
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
    # Calls inside this one whose own end was cut short end with it.
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
    """Look at the calls, as often as the next deadline needs it and once a second."""
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
                _arm(now)
                _next_look = min(now + _HEARTBEAT_S, *(_next_step(limited) for limited in running))
            elif now - last_active < _IDLE_S:
                _next_look = now + _HEARTBEAT_S
            else:
                _disarm()
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
    """When to look at a call again; one that was interrupted, soon."""
    if limited.signal is None:
        return limited.deadline
    return min(time.monotonic() + _AGAIN_S, limited.deadline + GRACE_S)


def _is_blocked(limited: Limited, now: float) -> bool:
    return limited.signal is not None and now >= limited.deadline + GRACE_S


def _expire(limited: Limited) -> None:
    """Ask a call to stop; the lock is held, so it is still running."""
    frame = sys._current_frames().get(limited.thread_id)
    if frame is not None:
        limited.stack, limited.place = user_stack(frame, below=call.__code__)
    limited.signal = type("_Expired", (_Expired,), {})
    # The grace counts from here: the watcher itself may have come late.
    limited.deadline = time.monotonic()
    _interrupt(limited)
    raise_in(limited.thread_id, limited.signal)


def _interrupt(limited: Limited) -> None:
    for interrupt in limited.interrupts:
        with contextlib.suppress(Exception):
            interrupt()


def _end_process(limited: Limited) -> NoReturn:
    try:
        # Reporting may meet a lock that the blocked thread holds.
        faulthandler.dump_traceback_later(_HANDLER_S, exit=True, file=2 if _report is None else _report)
        handler = _handler or report_or_print
        handler(limited.error())
    except BaseException:  # noqa: BLE001 - the process ends in any case, and says why
        traceback.print_exc()
    finally:
        os._exit(1)


def _arm(now: float) -> None:
    """Let the timer without the lock fire after the last deadline of all calls, if nothing sets it again; the lock is held.

    Setting it starts a thread, so one that fires only a little late stays.
    """
    global _fires_at
    last = max(limited.deadline for calls in _calls.values() for limited in calls)
    earliest = max(last, now) + GRACE_S + _HEARTBEAT_S
    if not _is_handed_over and not earliest <= _fires_at <= earliest + _SLACK_S:
        _fires_at = earliest + _SLACK_S
        faulthandler.dump_traceback_later(_fires_at - now, exit=True, file=2 if _report is None else _report)


def _disarm() -> None:
    global _fires_at
    if _fires_at:
        faulthandler.cancel_dump_traceback_later()
        _fires_at = 0.0


def _before_fork() -> None:
    """Stop the timer: a forked child has no thread of it, and would wait for it when it sets its own."""
    _lock.acquire()
    _disarm()


def _after_fork_in_parent() -> None:
    _lock.release()
    _wake.set()


def _after_fork_in_child() -> None:
    """Start again: only the thread that forked is there."""
    global _lock, _watcher, _wake, _report
    _lock, _wake, _watcher, _report = threading.Lock(), threading.Event(), None, None
    _calls.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
