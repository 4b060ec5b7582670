"""The processes that a supervisor has started: what memory and files they hold, and how all of them are ended."""

from __future__ import annotations

import contextlib
import os
import signal
import stat

_IN_MEMORY = ("RssAnon:", "RssShmem:")


def memory_bytes(first: int) -> int:
    """Return the memory of a process and all below it. Pages that several share count for each."""
    total, waiting = 0, [first]
    while waiting:
        process = waiting.pop()
        try:
            with open(f"/proc/{process}/status", encoding="utf-8", errors="replace") as file:
                total += sum(1024 * int(line.split()[1]) for line in file if line.startswith(_IN_MEMORY))
        except OSError:
            continue
        waiting += children(process)
    return total


def kill_children() -> None:
    """Kill all that this process, their subreaper, has below it, until nothing is left."""
    while True:
        for child in children(os.getpid()):
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def unlinked_bytes(first: int) -> int:
    """Return the size of files without a name that a process and all below it hold open, as far as they can be seen."""
    sizes, waiting = {}, [first]
    while waiting:
        process = waiting.pop()
        waiting += children(process)
        folder = f"/proc/{process}/fd"
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    found = os.stat(f"{folder}/{name}")
                    if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                        sizes[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())


def children(process: int) -> list[int]:
    """Return the children of a process."""
    try:
        tasks = os.listdir(f"/proc/{process}/task")
    except OSError:
        return []
    found: list[int] = []
    for task in tasks:
        try:
            with open(f"/proc/{process}/task/{task}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
        except OSError:
            continue
    return found
