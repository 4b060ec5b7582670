"""Everything of Ray that this package relies on without a documented interface.

Each entry names what was read, and what happens if another release of Ray differs. `tests/unit/launch/test_ray_internals.py` compares the entries
with the installed Ray. No other module reaches into Ray.

| relies on | read in Ray | if it differs |
| --- | --- | --- |
| `Node.start_monitor`, `start_log_monitor` and `start_api_server` start one process each | 2.60.0, `_private/node.py` | local clusters start slower |
| `worker.print_to_stdstream` prints the errors of other processes | 2.60.0, `_private/worker.py` | Ray's paragraphs appear among our messages |
| Ray's processes are started with a `preexec_fn` | 2.60.0, `_private/services.py` | Ctrl-C ends the roles instead of asking them to stop |
| the agents of a raylet are in its process group | 2.60.0, observed | they outlive a killed head for about a minute |
| `RAY_prestart_worker_first_driver` | 2.60.0, variables of the raylet | one idle process per core |
| `RAY_gcs_rpc_server_reconnect_timeout_s`, 60 s by default | 2.60.0, variables of the raylet | roles get less time to stop without the head |
| texts of the reports about processes that ended | 2.60.0, raylet and GCS server | the cause is reported as unknown |
| marks in the logs of its processes | 2.60.0, `_private/ray_constants.py` | they appear among the last lines of a log |
"""

from __future__ import annotations

import contextlib
import os
import signal
from array import array
from collections.abc import Iterator
from pathlib import Path

from ray._private import worker
from ray._private.node import Node

from rftcore.launch.exits import ExitCause

READ_IN = "2.60.0"
UNUSED_PROCESSES = ("start_monitor", "start_log_monitor", "start_api_server")
PRINTS_ERRORS = "print_to_stdstream"
# Each role runs in a process with its own variables. The idle processes that Ray would start in advance, one per core, are never used.
VARIABLES = {"RAY_prestart_worker_first_driver": "0"}
# Seconds after which Ray's library ends a process that has lost the head.
RECONNECT_VARIABLE, RECONNECT_S = "RAY_gcs_rpc_server_reconnect_timeout_s", 60.0
LOG_MARKS = (":actor_name:", ":job_id:", ":task_name:")
REPORTS = {
    "running low on memory": ExitCause.LOW_MEMORY,
    "SIGTERM": ExitCause.TERMINATED,
    "node has": ExitCause.MACHINE_LOST,
}


def exit_cause(report: str) -> ExitCause | None:
    """Return the cause that Ray reports for the end of a process; None if it reports none."""
    return next((cause for text, cause in REPORTS.items() if text in report), None)


def suppress_error_reports() -> None:
    """Suppress Ray's paragraph about each process that ends, since `rft run` reports it in one sentence."""
    if hasattr(worker, PRINTS_ERRORS):  # this process prints nothing else with it: log_to_driver is off
        setattr(worker, PRINTS_ERRORS, lambda *_, **__: None)


@contextlib.contextmanager
def without_unused_processes() -> Iterator[None]:
    """Start a local cluster without the autoscaler, the log monitor and the server of the dashboard.

    A run uses none of them, and `ray.init` has no settings for this. Each is a Python process that imports Ray, which takes about a
    second of a core, and `ray.init` waits for the server. A release of Ray without these methods starts what it wants.
    """
    with contextlib.ExitStack() as restored:
        for name in UNUSED_PROCESSES:
            if hasattr(Node, name):
                restored.callback(setattr, Node, name, getattr(Node, name))
                setattr(Node, name, lambda *_, **__: None)
        yield


@contextlib.contextmanager
def separate_sessions() -> Iterator[list[int]]:
    """Run the processes that start in this block in sessions of their own; at its end the yielded list has the ids of these processes.

    A signal to the process group of `rft run` (Ctrl-C, `timeout`, a closed terminal) is meant for `rft run`, which asks the roles to
    stop. Ray's processes would end at once and take the roles with them.
    """
    started: list[int] = []
    receives, sends = os.pipe()
    os.set_blocking(receives, False)  # a process without `exec` keeps its copy of the other end open
    is_active = True

    def leave_session() -> None:
        if is_active:
            os.setsid()
            os.write(sends, array("i", [os.getpid()]).tobytes())

    # Runs in every process that Ray starts, because Ray passes a `preexec_fn` to `subprocess`, which then forks in Python.
    os.register_at_fork(after_in_child=leave_session)
    try:
        yield started
    finally:
        is_active = False
        with contextlib.suppress(BlockingIOError):  # no process was started
            started += array("i", os.read(receives, 4096))
        os.close(receives)
        os.close(sends)


def kill_agents(started: list[int]) -> None:
    """Kill what processes that have ended left in their process groups: the agents of a raylet.

    An agent whose raylet was killed tries for 60 s to report this to the head, although the head has ended too.

    Args:
        started: ids that `separate_sessions` collected.
    """
    for pid in started:
        if not Path(f"/proc/{pid}").exists():  # the kernel gives no other process the id of a group that has members
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
