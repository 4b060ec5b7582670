"""Descriptions of how a process ended that is not our child."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rftcore.launch.exits import ExitCause, ProcessWatch, RoleExitError, _collected_status
from tests.support.waiting import PATIENCE_S, wait_until

# A parent that collects its child at once, as Ray does, and prints the child's number.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=sys.stdin)
print(child.pid, flush=True)
child.wait()
"""
UNKNOWN = "ended without an error, possibly killed for lack of memory"


@contextmanager
def grandchild(program: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None and parent.stdin is not None
    with parent:
        yield int(parent.stdout.readline()), parent
        parent.stdin.close()


def kernel_reports() -> bool:
    """Return whether this kernel reports the status of a reaped process."""
    child = subprocess.Popen(["true"])
    pidfd = os.pidfd_open(child.pid)
    try:
        child.wait()
        return _collected_status(pidfd) is not None
    finally:
        os.close(pidfd)


def exit_of(watch: ProcessWatch) -> RoleExitError:
    """Return how a process ended that is about to end; the watch itself waits two seconds at most, which a busy machine may exceed."""
    found: list[RoleExitError] = []

    def is_known() -> bool:
        found.append(watch.exit_error())
        return str(found[-1]) != UNKNOWN

    wait_until(is_known, "the status of the process")
    return found[-1]


needs_status = pytest.mark.skipif(not kernel_reports(), reason="this kernel does not report how other processes ended")


@needs_status
@pytest.mark.parametrize(
    ("number", "sentence", "crashed"),
    [
        (signal.SIGKILL, "was killed by signal 9, possibly for lack of memory (process {pid})", False),
        (signal.SIGSEGV, "was killed by signal 11 (Segmentation fault, process {pid})", True),
        (signal.SIGRTMIN + 3, "was killed by signal 37 (Real-time signal 3, process {pid})", False),
    ],
)
def test_the_signal_is_named(number: int, sentence: str, crashed: bool) -> None:
    with grandchild("input()") as (pid, _):
        watch = ProcessWatch(os.uname().nodename, pid)
        os.kill(pid, number)
        error = exit_of(watch)
        assert (str(error), error.crashed) == (sentence.format(pid=pid), crashed)


@needs_status
def test_the_exit_code_is_named() -> None:
    with grandchild("input(); import os; os._exit(7)") as (pid, parent):
        watch = ProcessWatch(os.uname().nodename, pid)
        assert parent.stdin is not None
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert str(exit_of(watch)) == f"exited with code 7 (process {pid})"


def test_the_launcher_names_the_cause_for_a_process_of_another_machine() -> None:
    elsewhere = ProcessWatch("another-host", 1)
    low_memory = elsewhere.exit_error(ExitCause.LOW_MEMORY)
    assert str(low_memory) == "was killed by Ray because its machine ran low on memory" and low_memory.crashed
    assert str(elsewhere.exit_error(ExitCause.TERMINATED)) == "was ended by SIGTERM"
    assert str(elsewhere.exit_error(ExitCause.MACHINE_LOST)).startswith("was lost with its machine")
    assert str(elsewhere.exit_error()) == UNKNOWN


def test_a_process_is_killed_without_ray_and_only_while_it_runs() -> None:
    with grandchild("import sys; sys.stdin.read()") as (pid, parent):
        watch = ProcessWatch(socket.gethostname(), pid)
        watch.kill()
        assert parent.wait(PATIENCE_S) == 0
        assert not kernel_reports() or "killed by signal 9" in str(exit_of(watch))
        watch.kill()
        ProcessWatch("elsewhere", os.getpid()).kill()


def test_the_last_lines_of_the_log_are_shown_without_lines_of_the_launcher(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    log.write_text(":job_id:01\n" + "".join(f"line {number}\n" for number in range(40)) + ":task_name:run\n\n")
    here = ProcessWatch(os.uname().nodename, 1, str(log), ignored_lines=(":job_id:", ":task_name:"))
    assert here.log_tail().splitlines() == [f"its log ({log}) ends with:", *(f"line {n}" for n in range(25, 40))]
    assert ProcessWatch("another-host", 1, str(log)).log_tail() == f"its log is {log} on another-host"
    container = ProcessWatch(os.uname().nodename, 1, str(log), "another")
    assert container.log_tail() == f"its log is {log} on {os.uname().nodename}"
    log.write_text(":job_id:01\n")
    assert here.log_tail() == ""
