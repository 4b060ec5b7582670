"""The threads of another process of this machine and the processor time that they use, from /proc, without any part of that process."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_RUNS_S = 0.02
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Thread:
    """A thread of a process.

    Attributes:
        state: a letter of proc(5), such as R (runs), S (sleeps) or T (suspended).
        used_s: processor time in seconds.
    """

    thread_id: int
    name: str
    state: str
    used_s: float


class ThreadTimes:
    """Compares the processor times of a process's threads between looks.

    A thread works if it used `_RUNS_S` between two looks. One that waits for the interpreter's lock wakes every 5 ms and uses far less.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._began = time.monotonic()
        self._first = self._last = _threads(pid)
        self._worked_at: dict[int, float] = {}

    @property
    def seconds(self) -> float:
        """The time since the first look."""
        return time.monotonic() - self._began

    def look(self) -> None:
        """Look again; between two looks there should be some tenths of a second."""
        now, at = _threads(self.pid), time.monotonic()
        self._worked_at |= {thread: at for thread in now if _used_s(thread, self._last, now) >= _RUNS_S}
        self._last = now

    def num_working(self, within_s: float) -> int:
        """Return the number of threads that worked within the last seconds."""
        now = time.monotonic()
        return sum(now - at <= within_s for at in self._worked_at.values())

    def threads(self) -> list[Thread]:
        """Return the threads at the last look with their times since the first: the main thread, then those that used the most."""
        used = [
            Thread(thread.thread_id, thread.name, thread.state, _used_s(thread.thread_id, self._first, self._last))
            for thread in self._last.values()
        ]
        return sorted(used, key=lambda thread: (thread.thread_id != self.pid, -thread.used_s))


def _used_s(thread_id: int, before: dict[int, Thread], now: dict[int, Thread]) -> float:
    return now[thread_id].used_s - (before[thread_id].used_s if thread_id in before else 0.0)


def _threads(pid: int) -> dict[int, Thread]:
    """Return the threads of a process by id; none if it has ended."""
    found = {}
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:  # the thread has ended
            continue
        before, _, rest = text.rpartition(")")
        fields, thread_id = rest.split(), int(file.parent.name)
        used_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        found[thread_id] = Thread(thread_id, before.partition("(")[2], fields[0], used_s)
    return found
