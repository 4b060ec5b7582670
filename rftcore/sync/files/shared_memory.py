"""Folders for weights in shared memory, each locked by the process that publishes there.

Shared memory outlives a killed process, and counts as used memory of the machine until it is removed. A publishing process
therefore locks its folder, and the system releases the lock when the process ends. The publisher also removes unlocked folders,
including those of other runs, since a killed run may never be resumed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from rftcore.sync.files.weights_file import ATTEMPT_PREFIX, folder_of_attempt

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class HeldFolder:
    """A folder that exists until it is released, or this process ends.

    Attributes:
        path: the folder.
        lock: descriptor of the locked folder.
    """

    path: Path
    lock: int

    def release(self) -> None:
        """Remove the folder and its contents."""
        _remove(self.path)
        os.close(self.lock)


def hold_folder(run_name: str, attempt_id: int, num_bytes: int, root: Path = SHARED_MEMORY) -> HeldFolder | None:
    """Create and lock this attempt's folder in shared memory; return None if less than `num_bytes` is free there.

    Removes what earlier attempts of the run, and killed processes of any run of this user, left there.
    """
    if not (root.is_dir() and os.access(root, os.W_OK)):
        return None
    parent = root / f"rftdata-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    if parent.stat().st_uid != os.getuid():
        return None
    _remove_abandoned(parent)
    folder = folder_of_attempt(parent / run_name.replace("/", "_"), attempt_id)
    if shutil.disk_usage(root).free < num_bytes:
        return None
    while True:
        # Another process that removes unlocked folders may run between any two of these lines.
        with contextlib.suppress(FileNotFoundError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = _lock(folder, fcntl.LOCK_SH)
            if _is_folder(folder, lock):
                return HeldFolder(folder, lock)
            os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"*/{ATTEMPT_PREFIX}*"):
        try:
            lock = _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # locked, or removed
            continue
        _remove(folder)
        os.close(lock)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # another attempt is in there
        folder.parent.rmdir()


def _lock(folder: Path, operation: int) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, operation)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _is_folder(folder: Path, descriptor: int) -> bool:
    present, held = folder.stat(), os.fstat(descriptor)
    return (present.st_dev, present.st_ino) == (held.st_dev, held.st_ino)
