"""What `rftcore.launch.ray_cluster.internals` relies on is in the installed Ray."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from ray._private import ray_constants, services, worker
from ray._private.node import Node

from rftcore.launch.exits import ExitCause
from rftcore.launch.ray_cluster import internals


def differs(what: str) -> str:
    return (
        f"Ray {ray.__version__} differs from {internals.READ_IN}, which rftcore/launch/ray_cluster/internals.py was written for: {what}; "
        "the table in that file says what breaks: read this release, then change the entry and READ_IN"
    )


def calls(function: Callable[..., object], call: str) -> bool:
    return f"{call}(" in inspect.getsource(function)


def test_processes_that_runs_do_not_need_are_started_by_methods_of_the_node() -> None:
    for name in internals.UNUSED_PROCESSES:
        is_called = calls(Node.start_head_processes, f"self.{name}") or calls(Node.start_ray_processes, f"self.{name}")
        assert is_called, differs(f"a node does not call {name}")


def test_reports_about_ended_processes_are_printed_by_one_function() -> None:
    is_called = calls(worker.listen_error_messages, internals.PRINTS_ERRORS)
    assert is_called, differs(f"listen_error_messages does not call {internals.PRINTS_ERRORS}")


def test_processes_are_forked_in_python() -> None:
    has_hook = "preexec_fn=preexec_fn" in inspect.getsource(services.start_ray_process)
    assert has_hook, differs(
        "start_ray_process passes no preexec_fn, so that functions of os.register_at_fork are not called"
    )


def test_marks_of_logs_are_known() -> None:
    marks = {getattr(ray_constants, f"LOG_PREFIX_{name}") for name in ("ACTOR_NAME", "JOB_ID", "TASK_NAME")}
    assert marks == set(internals.LOG_MARKS), differs(f"logs are marked with {sorted(marks)}")


@pytest.mark.parametrize(
    "text", [*internals.VARIABLES, internals.RECONNECT_VARIABLE, "running low on memory", "SIGTERM", "node has died"]
)
def test_variables_and_reports_are_in_the_programs_of_ray(text: str) -> None:
    programs = Path(ray.__file__).parent / "core" / "src" / "ray"
    found = any(text.encode() in (programs / path).read_bytes() for path in ("raylet/raylet", "gcs/gcs_server"))
    assert found, differs(f"neither raylet nor gcs_server has the text {text!r}")


def test_the_cause_of_an_end_is_read_from_the_report() -> None:
    assert (
        internals.exit_cause("... 1 worker(s) were killed due to the node running low on memory ...")
        is ExitCause.LOW_MEMORY
    )
    assert internals.exit_cause("The process receives a SIGTERM.") is ExitCause.TERMINATED
    assert internals.exit_cause("The actor died because its node has died.") is ExitCause.MACHINE_LOST
    assert internals.exit_cause("Worker unexpectedly exits with a connection error code 2. End of file.") is None
