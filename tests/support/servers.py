"""The embedded PostgreSQL servers that a test session started, in its own processes or in those of the commands it tried.

Such a server outlives its starter by design. All inherit an environment variable, by which the end of the session finds them.
"""

from __future__ import annotations

import os
import secrets
import signal

import psutil

_MARK = "RFT_TEST_SESSION"
_STOP_S = 30.0


def mark_session() -> None:
    """Name the session to everything that it starts; a process of a session keeps the name it inherits."""
    os.environ.setdefault(_MARK, secrets.token_hex(8))


def started() -> list[psutil.Process]:
    """The first process of each server of the session that runs."""
    return [process for process in psutil.process_iter() if _is_of_session(process)]


def _is_of_session(process: psutil.Process) -> bool:
    try:
        if process.name() != "postgres" or process.environ().get(_MARK) != os.environ[_MARK]:
            return False
        parent = process.parent()
        return parent is None or parent.name() != "postgres"
    except psutil.Error:  # it has ended, or is another user's
        return False


def stop(processes: list[psutil.Process]) -> list[psutil.Process]:
    """End servers and their sessions; those that do not end in time."""
    for process in processes:
        try:
            process.send_signal(signal.SIGINT)  # PostgreSQL's fast shutdown
        except psutil.NoSuchProcess:
            continue
    return psutil.wait_procs(processes, timeout=_STOP_S)[1]
