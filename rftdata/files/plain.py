"""Plain files inside a folder, by names that are stored in the database.

An account that must not touch other files may write such a row, so a name never leads out of its folder: it has no `..` and no absolute
path, and neither the file nor a folder on the way to it may be a symbolic link. Links are refused by the system when it opens the file, so
that nothing can be swapped between a check and its use. The folder itself is the owner's setting and may be a link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rftdata.errors import RftError

# As in the domain rft.file_name.
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_IN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def is_file_name(name: str) -> bool:
    """Return whether a name is a plain name of a file."""
    return _FILE_NAME.fullmatch(name) is not None


def file_name(text: str) -> str:
    """Return a text, such as the name of a host, as part of a plain name."""
    return _UNSAFE.sub("-", text)


def check_file_name(name: str) -> None:
    """Refuse a name that is not a plain name of a file.

    Raises:
        RftError: the name could lead out of its folder.
    """
    if not is_file_name(name):
        raise _not_plain(name, "letters, digits and ._-, without a folder")


def check_path(path: str) -> None:
    """Refuse a relative path that leaves its folder, or is not written in the shortest way.

    Raises:
        RftError: the path could lead out of its folder.
    """
    if not path or "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise _not_plain(path, "a path below its folder, without . and ..")


def _not_plain(name: str, allowed: str) -> RftError:
    return RftError(
        "a row of the database names a file that cannot be one of the buffer",
        value=name,
        allowed=allowed,
        todo="nothing was read or changed; find out who wrote the row, and run `rft doctor`",
    )


def open_plain(folder: Path, path: str, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """Open a plain file below a folder; return its descriptor.

    Raises:
        RftError: the path leads out of the folder.
        OSError: the file cannot be opened. A link has the errno ELOOP, and what is not a file EINVAL.
    """
    with _parent(folder, path) as (parent, name):
        # Without O_NONBLOCK, opening a named pipe would wait for its other end.
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=parent)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file", path)
    return descriptor


def open_file(folder: Path, path: str) -> IO[bytes]:
    """Open a plain file below a folder for reading; raises as `open_plain` does."""
    return os.fdopen(open_plain(folder, path), "rb")


def create_file(folder: Path, path: str) -> IO[bytes]:
    """Create a plain file below a folder for writing; it must not exist. Raises as `open_plain` does."""
    return os.fdopen(open_plain(folder, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")


def plain_size(folder: Path, path: str) -> int:
    """Return the size of a plain file below a folder in bytes; raises as `open_plain` does."""
    return plain_status(folder, path).st_size


def plain_status(folder: Path, path: str) -> os.stat_result:
    """Return the file system's facts about a plain file below a folder; raises as `open_plain` does."""
    with _parent(folder, path) as (parent, name):
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "it is a symbolic link", path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a plain file", path)
    return status


def unlink_plain(folder: Path, path: str) -> None:
    """Remove a file below a folder; of a link, only the link itself. Raises as `open_plain` does."""
    with _parent(folder, path) as (parent, name):
        os.unlink(name, dir_fd=parent)


def paths_below(folder: Path, depth: int) -> Iterator[str]:
    """Yield the paths of all entries exactly `depth` folders below a folder, which need not exist; links are not followed."""
    try:
        with os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in entries:
        if not depth:
            yield entry.name
        elif entry.is_dir(follow_symlinks=False):
            for path in paths_below(folder / entry.name, depth - 1):
                yield f"{entry.name}/{path}"


@contextlib.contextmanager
def _parent(folder: Path, path: str) -> Iterator[tuple[int, str]]:
    """Yield a descriptor of the folder that holds a path's last part, and that part."""
    check_path(path)
    *folders, name = path.split("/")
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in folders:
            descriptor, above = os.open(part, _IN_FOLDER, dir_fd=descriptor), descriptor
            os.close(above)
        yield descriptor, name
    finally:
        os.close(descriptor)
