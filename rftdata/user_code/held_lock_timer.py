"""The timer that ends a process whose interpreter lock is held for good, so that no Python code can run.

`faulthandler` implements it in C without the lock: when it fires, it appends the stacks of all threads to a file and exits with 1. The
file begins with a sentence that was written in advance; nothing follows the sentence as long as nothing is blocked.

A process has one such timer. `rftdata.user_code.time_limits` sets it for the calls that it watches, and `hand_over` leaves it to other code.
Standard library only.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from pathlib import Path

HEADER_BYTES = 1024
"""Length of the sentence at the beginning of a file of stacks, including the blanks that follow it."""
SLACK_S = 4.0
"""The timer fires this much later than the earliest time asked for, and is set again about as often."""

_lock = threading.Lock()
_report: int | None = None
_is_handed_over = False
_fires_at = 0.0
"""When the timer fires; 0 if it is not set."""


def report_stacks_to(path: Path | None) -> None:
    """Set the file for the stacks; None: standard error."""
    global _report
    with _lock:
        if _report is not None:
            os.close(_report)
            _report = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _report = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.lseek(_report, HEADER_BYTES, os.SEEK_SET)
        _cancel()


def write_sentence(sentence: str) -> None:
    """Write the sentence that precedes the stacks, if they go to a file."""
    with _lock:
        if _report is not None:
            line = " ".join(sentence.split()).encode()[: HEADER_BYTES - 1]
            os.pwrite(_report, line.ljust(HEADER_BYTES - 1) + b"\n", 0)


def set_to(earliest: float, now: float) -> None:
    """Let the timer fire within `SLACK_S` after `earliest` (a monotonic time, in seconds) unless it is set again.

    Setting it starts a thread, so a timer that fires only a little late is kept.
    """
    global _fires_at
    with _lock:
        if not _is_handed_over and not earliest <= _fires_at <= earliest + SLACK_S:
            _fires_at = earliest + SLACK_S
            faulthandler.dump_traceback_later(_fires_at - now, exit=True, file=_file())


def cancel() -> None:
    """Cancel the timer, if it is set."""
    with _lock:
        _cancel()


def exit_after(seconds: float) -> None:
    """Let the timer fire after `seconds` in any case, because this process is about to end."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=_file())


def hand_over() -> None:
    """Stop setting and cancelling the timer here, because other code of this process uses `faulthandler`."""
    global _is_handed_over
    with _lock:
        _cancel()
        _is_handed_over = True


def take_back() -> None:
    """Resume using the timer, which the other code has cancelled."""
    global _is_handed_over
    with _lock:
        _is_handed_over = False


def _file() -> int:
    return 2 if _report is None else _report


def _cancel() -> None:
    global _fires_at
    if _fires_at:
        faulthandler.cancel_dump_traceback_later()
        _fires_at = 0.0


def _before_fork() -> None:
    """Cancel the timer: a forked child lacks its thread, and would wait for it when setting its own."""
    _lock.acquire()
    _cancel()


def _after_fork_in_child() -> None:
    global _lock, _report
    _lock, _report = threading.Lock(), None


os.register_at_fork(before=_before_fork, after_in_parent=lambda: _lock.release(), after_in_child=_after_fork_in_child)
