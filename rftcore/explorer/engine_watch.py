"""Ends an explorer whose engine hangs, so that another process takes its place with current weights.

A GPU that stops answering, a deadlock, or a missing message from a peer keeps the engine's thread inside native code, where no exception
reaches it. A separate thread measures how long the engine takes for one piece of work. Beyond the limit it reports the stack and ends the
process, as for user code that blocks (`rftdata.user_code.blocked_process`). The claims are released at once, and no rollout is recorded as
failed, because groups are stored whole. An engine that reads weights from a slow disk may take longer as long as data arrives. An engine that
computes slowly still ends one step after the other, and is left alone. Where native code also holds the interpreter's lock, no thread runs,
and the watch of workflows ends the process (`workflow_loop`).
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
_MAJOR_FAULTS = 9  # position of majflt after the name in /proc/PID/stat, see proc(5)


def watch_engine(engine: Engine, limit_s: float, end: Callable[[str, str], None]) -> HangWatch:
    """Watch an engine.

    Args:
        limit_s: longest duration of one piece of work, or of reading weights while no data arrives.
        end: receives a sentence and the stack of a hanging engine; it should end the process.
    """
    sentence = f"its engine hangs: one step or change of weights took more than {limit_s:g} s (explorer.hang_s)"
    return HangWatch(_Stuck(engine).seconds, limit_s, lambda: end(sentence, engine.stack()))


class _Stuck:
    """Measures how long an engine has been at one piece of work while no data arrives from a disk."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._arrivals, self._at_arrival_s = engine, _Arrivals(), 0.0

    def seconds(self) -> float:
        """Return the seconds. Only the watching thread calls it."""
        stuck_s = self._engine.stuck_s()
        # Another piece of work has begun.
        if stuck_s < self._at_arrival_s:
            self._at_arrival_s = 0.0
        if self._engine.reads_weights and self._arrivals.have_come():
            self._at_arrival_s = stuck_s
        return stuck_s - self._at_arrival_s


class _Arrivals:
    """Counts what the processes of an engine read from disks: bytes, and page faults of mapped files that wait for a disk."""

    def __init__(self) -> None:
        self._last = (0, 0)

    def have_come(self) -> bool:
        """Return whether more data has arrived since the last call than other threads may have read."""
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
    """End this process and those of its engine, with the processes that these have started, which would keep their GPUs."""
    for engine in multiprocessing.active_children():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(engine.pid)
            for each in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.Error):
                    each.kill()
    end_blocked_process(sentence, stack)
