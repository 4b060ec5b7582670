"""The processes that a supervisor has started: what memory and disk they use, and how all of them are ended."""

from __future__ import annotations

import os
import signal

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
        waiting += _children(process)
    return total


def kill_children() -> None:
    """Kill all that this process, their subreaper, has below it, until nothing is left."""
    while True:
        for child in _children(os.getpid()):
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def disk_bytes(folder: str) -> int:
    """Return the size of all files below a folder, without following links."""
    total, waiting = 0, [folder]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError:
            continue
    return total


def _children(process: int) -> list[int]:
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
