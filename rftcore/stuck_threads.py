"""Threads in calls that may never return, such as a collective after the death of a member.

A thread cannot be ended from outside. The caller abandons a call that hangs, and goes on to end the process. The interpreter's shutdown could
wait for the hanging thread, or crash because of it. The process therefore exits without that shutdown, after the functions of `atexit`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading

_stuck: list[threading.Thread] = []
_exit_code = 1


def leave(thread: threading.Thread, timeout_s: float) -> bool:
    """Wait for the end of a daemon thread; abandon it and return false if that takes longer than `timeout_s`."""
    thread.join(timeout_s)
    if thread.is_alive():
        _stuck.append(thread)
        return False
    return True


def set_exit_code(code: int) -> None:
    """Set the exit code of this process, which is about to end. Without a call it is 1 if a thread is stuck."""
    global _exit_code
    _exit_code = code


def _end_without_stuck_threads() -> None:
    if any(thread.is_alive() for thread in _stuck):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_code)


# Registered on import, before the functions that must run first.
atexit.register(_end_without_stuck_threads)
