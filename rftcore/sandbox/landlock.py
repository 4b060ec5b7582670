"""Landlock: which paths a process may read and write, without namespaces. The kernel keeps the rules for all that the process starts."""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Sequence

from rftcore.sandbox import kernel

# Bits of accesses to files (linux/landlock.h).
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_FIRST_VERSION = (1 << 13) - 1
_FILE_ACCESSES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2
_TCP = 3  # bind, connect
NEEDED_VERSION = 6
"""The first version that keeps signals and abstract sockets within the sandbox."""


def restrict_paths(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Restrict this process to some paths; it needs no_new_privs.

    Args:
        readable: may be read and executed.
        writable: may also be written.

    Raises:
        OSError: the kernel has no Landlock, or too old a one.
    """
    version = kernel.landlock_version()
    if version < NEEDED_VERSION:
        raise OSError(errno.ENOSYS, f"Landlock has version {version}, and {NEEDED_VERSION} is needed")
    handled = _FIRST_VERSION | _REFER | _TRUNCATE | _IOCTL_DEV
    ruleset = kernel.landlock_ruleset(struct.pack("QQQ", handled, _TCP, _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS))
    try:
        for paths, access in ((readable, _EXECUTE | _READ_FILE | _READ_DIR), (writable, handled)):
            for path in paths:
                _allow(ruleset, path, access)
        kernel.landlock_restrict(ruleset)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(file).st_mode):
            access &= _FILE_ACCESSES
        kernel.landlock_allow(ruleset, access, file)
    finally:
        os.close(file)
