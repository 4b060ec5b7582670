"""Files and folders that must survive a power loss."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rftdata.errors import ConflictError

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_DRAFT_MARK = ".rft-draft"


def sync_path(path: Path) -> None:
    """Flush a file's bytes, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents; all new names are on disk on return."""
    missing = [one for one in (path, *path.parents) if not one.is_dir()]
    for one in reversed(missing):
        one.mkdir(exist_ok=True)
        sync_path(one.parent)


def probe_folder(path: Path) -> None:
    """Check that a folder can be created or, if it exists, written; leaves nothing behind.

    Permission bits are not enough: root passes all of them, and some file systems accept no folders at all.

    Raises:
        OSError: the folder cannot be created or written.
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
        probe_folder(path)  # another process has created it meanwhile
        return
    with contextlib.suppress(OSError):  # another process has written into it meanwhile
        missing[-1].rmdir()


def write_whole(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file so that a crash leaves the old file, no file or the new file, never a partial one."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            file.write(text)
        sync_path(draft)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


@contextlib.contextmanager
def draft_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder on the file system of a path: the caller renames it, or a file of it, to the path. The rest is removed at the end.

    It is in `NAME.unfinished`. A marker there tells the draft of a killed process, which is removed, from any other folder, which stays as it is.
    A process that writes holds a lock of `NAME.unfinished` (flock).

    Raises:
        ConflictError: another process is writing to this path, or `NAME.unfinished` is no draft.
    """
    place = path.with_name(f"{path.name}.unfinished")
    place.mkdir(exist_ok=True)
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = _is_open(descriptor, place)
        except BlockingIOError:
            held = False
        if not held:
            raise ConflictError(
                f"another process is writing {path}", todo="wait until it has finished, or choose another name"
            )
        if not (place / _DRAFT_MARK).exists() and any(place.iterdir()):
            raise ConflictError(
                f"{path} cannot be written, because the folder {place} is there, and no interrupted command has left it",
                todo="rename or remove that folder, or choose another name",
            )
        (place / _DRAFT_MARK).touch()
        draft = place / "draft"
        if draft.is_dir():
            shutil.rmtree(draft)
        try:
            draft.mkdir()
            yield draft
        finally:
            shutil.rmtree(place, ignore_errors=True)
    finally:
        os.close(descriptor)


def _is_open(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def punch_hole(descriptor: int, offset: int, length: int) -> bool:
    """Release a file's range to the file system if it supports that; the range then reads as zeros, and the length stays."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        done: int = libc.fallocate(
            descriptor, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_longlong(offset), ctypes.c_longlong(length)
        )
    except (OSError, AttributeError):
        return False  # not Linux
    return done == 0
