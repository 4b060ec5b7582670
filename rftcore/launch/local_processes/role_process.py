"""The process of a role, which the fork server forks: for a task, or before its task is known, to import what the role needs.

The output of a role is in its log file. A process that waits for a task keeps its output, which the log gets with the task.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import IO

from rftcore.imported_packages import apply_environment
from rftcore.launch.launcher import RoleTask, run_role
from rftcore.launch.local_processes import forked_process
from rftcore.launch.start_phases import StartPhases
from rftcore.parent_process import end_with_parent
from rftdata.errors import RftError

TERMINATED = 128 + signal.SIGTERM
"""Exit code of a role that SIGTERM ended."""
_IMPORTING = "modules are imported"
_JOINING = "the run is joined"
_PR_SET_NAME = 15
# As Ray does for its workers: for lack of memory the system kills a role, which can be restarted, rather than the database.
_OOM_SCORE = "500"


def run(result: Connection, server: int, task_bytes: bytes) -> None:
    """Run a role in its forked process.

    Args:
        result: receives the error that it raises.
        server: process id of the fork server.
        task_bytes: a pickled `RoleTask` and the path of its log.
    """
    phases = StartPhases(_JOINING)
    os.setsid()
    end_with_parent(server)
    task, log = pickle.loads(task_bytes)
    forked_process.redirect(forked_process.open_log(log))
    forked_process.close_files([result.fileno()])
    _print_header(task)
    _handle_signals()
    _apply(task.environment)
    if task.preparation.modules:
        phases.begin(_IMPORTING)
        task.preparation.run()
        phases.begin(_JOINING)
    _run(result, task, phases)


@dataclass(frozen=True)
class Given:
    """What a process has from the fork server before it has a task.

    Attributes:
        task_file: will have the task.
        is_written: receives a message once it has.
        output: what the process prints until then. It is empty once the log has that.
    """

    task_file: IO[bytes]
    is_written: Connection
    output: IO[bytes]


def preload(
    result: Connection,
    server: int,
    given: Given,
    preparation: bytes,
    environment: Mapping[str, str],
) -> None:
    """Prepare the process for its role, wait for a task, and run it.

    Args:
        result, server: see `run`.
        preparation: a pickled `Preparation`.
        environment: variables of the task.
    """
    phases = StartPhases(_IMPORTING)
    os.setsid()
    end_with_parent(server)
    forked_process.redirect(os.dup(given.output.fileno()))
    kept = (result, given.is_written, given.task_file, given.output)
    forked_process.close_files([file.fileno() for file in kept])
    _handle_signals()
    _apply(environment)
    pickle.loads(preparation).run()
    phases.begin("the run is checked and stored")
    try:
        given.is_written.recv_bytes()
    except (EOFError, OSError):  # the server has ended
        return
    phases.begin(_JOINING)
    given.task_file.seek(0)
    task, log = pickle.loads(given.task_file.read())
    _move_output(given.output, task, log)
    _apply(task.environment)
    _run(result, task, phases)


def _move_output(output: IO[bytes], task: RoleTask, log: Path) -> None:
    """Print to the log from now on, and copy what the process has printed so far."""
    sys.stdout.flush()
    sys.stderr.flush()
    output.seek(0)
    printed = output.read()
    forked_process.print_to(forked_process.open_log(log))
    _print_header(task)
    sys.stdout.write(printed.decode(errors="replace"))
    sys.stdout.flush()
    with output:
        output.truncate(0)


def _print_header(task: RoleTask) -> None:
    print(f"== {task.name}: process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S %z')} ==", flush=True)


def _handle_signals() -> None:
    # Handlers that do nothing, rather than ignored signals, which children of a role would inherit.
    for number, handler in ((signal.SIGTERM, _terminate), (signal.SIGINT, _ignore), (signal.SIGHUP, _ignore)):
        signal.signal(number, handler)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE, encoding="utf-8")


def _apply(environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    apply_environment()


def _run(result: Connection, task: RoleTask, phases: StartPhases) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"rft {task.name}"[:15].encode())
    try:
        code = run_role(task.role, task.config, task.run, task.options, phases.begun(), checks_packages=False)
    except _TerminatedError:
        raise
    except BaseException as error:  # noqa: BLE001 - the boundary: the supervisor reports every error with the role's name
        if isinstance(error, SystemExit):
            error = RuntimeError(f"sys.exit({error.code!r}) was called")
        with contextlib.suppress(OSError):
            result.send_bytes(pickled(error))
        if not isinstance(error, RftError):
            traceback.print_exc()
        code = 1
    sys.exit(code)


class _TerminatedError(SystemExit):
    """SIGTERM arrived. It ends a role like an error, so that the role leaves the run and releases its claims."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _TerminatedError(TERMINATED)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: `rft run` receives the signal too, and asks the roles to stop."""


def pickled(error: BaseException) -> bytes:
    """Return an error for the parent: pickled, if possible, and as text."""
    text = f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
    try:
        return pickle.dumps((pickle.dumps(error), text))
    except Exception:  # noqa: BLE001 - a user's exception may fail to pickle in any way
        return pickle.dumps((b"", text))
