"""Files and names that must survive a power loss."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from pathlib import Path

_KEEP_SIZE, _PUNCH_HOLE = 1, 2


def sync_path(path: Path) -> None:
    """Flush a file's bytes, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder and those above it that are missing; every new name is on the disk when this returns."""
    missing = [one for one in (path, *path.parents) if not one.is_dir()]
    for one in reversed(missing):
        one.mkdir(exist_ok=True)
        sync_path(one.parent)


def probe_folder(path: Path) -> None:
    """Find out whether a folder can be made or, where it is there, written; leaves nothing behind.

    Permission bits do not tell: root passes them all, and some file systems take no folders at all.

    Raises:
        OSError: why not.
    """
    missing = [one for one in (path, *path.parents) if not one.exists()]
    if not missing:
        os.rmdir(tempfile.mkdtemp(prefix=".rft-probe-", dir=path))
        return
    try:
        missing[-1].mkdir()
    except FileExistsError:
        if not missing[-1].is_dir():
            raise
        probe_folder(path)  # another process has made it meanwhile
        return
    with contextlib.suppress(OSError):  # another process has put something into it meanwhile
        missing[-1].rmdir()


def write_whole(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file so that a crash leaves the old one, none or the new one, never half of it."""
    draft = path.with_name(f"{path.name}.unfinished")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
        file.write(text)
    sync_path(draft)
    draft.replace(path)
    sync_path(path.parent)


def give_back(descriptor: int, offset: int, length: int) -> bool:
    """Give a file's range back to the file system, where it can; the range reads as zeros, the file keeps its length."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        done: int = libc.fallocate(
            descriptor, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_longlong(offset), ctypes.c_longlong(length)
        )
    except (OSError, AttributeError):
        return False  # not Linux
    return done == 0
