"""Ends an explorer whose engine hangs, so that another process takes its place with current weights.

A GPU that stops answering, a deadlock, or a message from a peer that never comes keep the engine's thread inside native code, where no
exception reaches it. A thread of its own looks how long the engine has been at one piece of work. Beyond the limit it reports the stack and
ends the process, as for user code that blocks (`rftdata.user_code.blocked_process`). An engine that reads weights from a slow disk is at work as long as
something arrives. The claims are released at once, and nothing is mislabelled,
because groups are stored whole. An engine that computes, however slowly, ends one step after the other and is left alone. Where native code
also holds the interpreter's lock, no thread runs, and the watch of workflows ends the process (`workflow_loop`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import psutil

from rftcore.engines.base import Engine
from rftcore.run.hang_watch import HangWatch
from rftdata.user_code.blocked_process import end_blocked_process

_READ_BYTES, _READ_FAULTS = 1 << 18, 16
_MAJOR_FAULTS = 9  # place of majflt behind the name in /proc/PID/stat, see proc(5)


def watch_engine(engine: Engine, limit_s: float, end: Callable[[str, str], None]) -> HangWatch:
    """Watch an engine.

    Args:
        limit_s: seconds that one piece of work may take, or reading weights without anything arriving.
        end: receives a sentence and the stack of an engine that hangs; it should end the process.
    """
    sentence = f"its engine hangs: one step or change of weights took more than {limit_s:g} s (explorer.hang_s)"
    return HangWatch(_Stuck(engine).seconds, limit_s, lambda: end(sentence, engine.stack()))


class _Stuck:
    """How long an engine has been at one piece of work in which nothing arrives from a disk."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._arrivals, self._at_arrival_s = engine, _Arrivals(), 0.0

    def seconds(self) -> float:
        """Return the seconds; called by the watching thread alone."""
        stuck_s = self._engine.stuck_s()
        # Another piece of work has begun, or more of this one's file has come.
        if stuck_s < self._at_arrival_s:
            self._at_arrival_s = 0.0
        if self._engine.reads_weights and self._arrivals.have_come():
            self._at_arrival_s = stuck_s
        return stuck_s - self._at_arrival_s


class _Arrivals:
    """What the processes of an engine have read from disks: by reads, and of mapped files by page faults that had to wait for one."""

    def __init__(self) -> None:
        self._last = (0, 0)

    def have_come(self) -> bool:
        """Return whether more than other threads may have read has come since the last call."""
        last, self._last = self._last, self._so_far()
        return self._last[0] - last[0] >= _READ_BYTES or self._last[1] - last[1] >= _READ_FAULTS

    def _so_far(self) -> tuple[int, int]:
        """Return bytes and number of page faults."""
        num_bytes = num_faults = 0
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            with contextlib.suppress(psutil.Error, OSError):
                num_bytes += process.io_counters().read_bytes
                stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8")
                num_faults += int(stat.rpartition(")")[2].split()[_MAJOR_FAULTS])
        return num_bytes, num_faults


def end_hanging_process(sentence: str, stack: str) -> NoReturn:
    """End this process and those of a divided engine, which would keep their GPUs."""
    for process in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            process.kill()
    end_blocked_process(sentence, stack)
