"""Control groups: limits on the memory and the number of processes of a whole sandbox, in version 1 or 2 of the kernel's interface."""

from __future__ import annotations

import contextlib
import errno
import os
import time

_REMOVE_S = 1.0
_PREFIX = "rft-sandbox"


class ControlGroup:
    """The group of one sandbox.

    Args:
        name: of its folders.
        memory_bytes, processes: limits of the group.

    Raises:
        OSError: this process may not make one, or the kernel has none.
    """

    def __init__(self, name: str, memory_bytes: int, processes: int) -> None:
        parents = _parents()
        self._unified = parents["memory"] == parents["pids"]
        self._memory, self._pids = (os.path.join(parents[kind], name) for kind in ("memory", "pids"))
        self._folders = sorted({self._memory, self._pids})
        made = []
        try:
            for folder in self._folders:
                os.mkdir(folder)
                made.append(folder)
            _write(self._pids, "pids.max", processes)
            if self._unified:
                _write(self._memory, "memory.max", memory_bytes)
                _write_if_there(self._memory, "memory.swap.max", 0)
                _write_if_there(self._memory, "memory.oom.group", 1)
            else:
                _write(self._memory, "memory.limit_in_bytes", memory_bytes)
                _write_if_there(self._memory, "memory.memsw.limit_in_bytes", memory_bytes)
        except OSError:
            for folder in made:
                os.rmdir(folder)
            raise

    def enter(self) -> None:
        """Move this process into the group."""
        for folder in self._folders:
            _write(folder, "cgroup.procs", os.getpid())

    def out_of_memory(self) -> bool:
        """Return whether the kernel has ended a process for the limit of memory."""
        text = _read(self._memory, "memory.events" if self._unified else "memory.oom_control")
        return any(line.split()[1] != "0" for line in text.splitlines() if line.startswith("oom_kill "))

    def peak_bytes(self) -> int | None:
        """Return the most memory that was in use; None if the kernel does not count it."""
        text = _read(self._memory, "memory.peak" if self._unified else "memory.max_usage_in_bytes").strip()
        return int(text) if text else None

    def remove(self) -> None:
        """Remove the group, whose processes have ended."""
        until = time.monotonic() + _REMOVE_S
        for folder in self._folders:
            while True:
                try:
                    os.rmdir(folder)
                    break
                except OSError as error:
                    if error.errno != errno.EBUSY or time.monotonic() > until:
                        break
                    time.sleep(0.005)


def group_name(process: int) -> str:
    """Return a name for a group of a supervisor; a number of a process means one in its namespace."""
    return f"{_PREFIX}-{_process_namespace()}-{process}-{time.monotonic_ns()}"


def remove_left_groups() -> None:
    """Remove the groups of supervisors that were killed. The kernel refuses it while processes are in one."""
    try:
        folders = set(_parents().values())
    except OSError:
        return
    for folder in folders:
        for name in os.listdir(folder):
            prefix, _, owner = name.partition(f"-{_process_namespace()}-")
            process = owner.partition("-")[0]
            if prefix == _PREFIX and process.isdigit() and not os.path.exists(f"/proc/{process}"):
                with contextlib.suppress(OSError):
                    os.rmdir(os.path.join(folder, name))


def _process_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _parents() -> dict[str, str]:
    """Return the folder in which a group can be made, by controller."""
    mounts = _mounts()
    found: dict[str, str] = {}
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        lines = [line.rstrip("\n").split(":", 2) for line in file]
    for _, controllers, path in lines:
        for kind in ("memory", "pids"):
            if kind in controllers.split(",") and kind in mounts:
                found[kind] = _below(mounts[kind], path)
    if len(found) == 2:
        return found
    for _, controllers, path in lines:
        if not controllers and "" in mounts and (parent := _delegating(_below(mounts[""], path), mounts[""])):
            return {"memory": parent, "pids": parent}
    raise OSError(errno.ENOENT, "no control groups for memory and pids that this process may make groups in")


def _delegating(folder: str, top: str) -> str | None:
    """Return the nearest group whose children may have limits of memory and processes."""
    while folder.startswith(top):
        enabled = _read(folder, "cgroup.subtree_control").split()
        if {"memory", "pids"} <= set(enabled) and os.access(folder, os.W_OK):
            return folder
        folder = os.path.dirname(folder)
    return None


def _below(mounted: str, path: str) -> str:
    """Return the folder of a group; the mount itself if the group is outside what is mounted here."""
    folder = os.path.normpath(mounted + path)
    return folder if os.path.isdir(folder) else mounted


def _mounts() -> dict[str, str]:
    """Return where each controller is mounted; version 2 by an empty name."""
    found: dict[str, str] = {}
    with open("/proc/self/mounts", encoding="utf-8") as file:
        for line in file:
            _, target, kind, options, *_ = line.split(" ")
            if kind == "cgroup2":
                found[""] = target
            elif kind == "cgroup":
                found.update(dict.fromkeys(options.split(","), target))
    return found


def _read(folder: str, name: str) -> str:
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def _write(folder: str, name: str, value: int) -> None:
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        file.write(str(value))


def _write_if_there(folder: str, name: str, value: int) -> None:
    if os.path.exists(os.path.join(folder, name)):
        _write(folder, name, value)
