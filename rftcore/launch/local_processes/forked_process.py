"""What a forked process changes about itself: its files, its limits, and how it exits."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import resource
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rftcore import stuck_threads

_OPEN_FILES = 65536


def exit_after(work: Callable[[], None]) -> NoReturn:
    """Do the work of a forked process and exit as the interpreter would, without returning to what its parent was doing."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        stuck_threads.set_exit_code(code)
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def open_log(log: Path) -> int:
    """Open the log file; return the null device if that is not possible."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def close_files(kept: Sequence[int]) -> None:
    """Close the inherited files, because the other ends of pipes wait for that."""
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *kept}:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def redirect(output: int) -> None:
    """Make standard input empty, and standard output and errors a file."""
    os.dup2(nothing := os.open(os.devnull, os.O_RDONLY), 0)
    os.close(nothing)
    print_to(output)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - they stay open as long as the process
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_Log(number, "w", closefd=False)),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        for number in (1, 2)
    )


def print_to(output: int) -> None:
    """Make standard output and errors another file, for the streams of this process that exist and for its children."""
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)


class _Log(io.FileIO):
    """The output file of a process, which a full disk must not end."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def raise_file_limit() -> None:
    """Raise the limit of open files, which shells set for commands that open a few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
