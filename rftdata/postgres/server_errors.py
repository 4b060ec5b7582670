"""Errors of an embedded server: a folder that cannot be used, a full disk, a program that failed."""

from __future__ import annotations

import contextlib
from pathlib import Path

from rftdata.errors import BufferUnavailableError, DiskFullError


def unusable(folder: Path, error: OSError) -> BufferUnavailableError:
    """Return the error of a folder that cannot be created or written."""
    where = f" ({error.filename})" if error.filename and Path(error.filename) != folder else ""
    return BufferUnavailableError(
        f"the buffer's folder cannot be created or written: {error.strerror}{where}",
        value=str(folder),
        todo="correct buffer.uri",
    )


def full(folder: Path, who: str) -> DiskFullError:
    """Return the error of a full disk.

    Args:
        who: the program that could not write.
    """
    return DiskFullError(
        f"the disk of {folder} is full: {who} could not write", todo="free some space and run the command again"
    )


def does_not_start(folder: Path, log: Path, program: str, text: str) -> DiskFullError | BufferUnavailableError:
    """Return the error of a failed program, with the end of its output and of the server's log."""
    logged = ""
    with contextlib.suppress(OSError):
        logged = log.read_text()[-2000:]
    if "No space left on device" in text + logged:
        return full(folder, program)
    last = " ".join((text + logged).split())[-600:]
    return BufferUnavailableError(
        f"the embedded PostgreSQL in {folder} does not start: {program} reported: {last}",
        todo=f"see {log}; `rft doctor` checks the installation",
    )
