"""Restarts of roles: how many are allowed, and what is recorded about the ended process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rftcore.launch.exits import ProcessWatch, RoleExitError
from rftcore.launch.launcher import RoleProcess
from rftcore.launch.restarts import (
    MAX_BLOCKED_PER_HOUR,
    MAX_FRUITLESS,
    MAX_FUTILE,
    MAX_IN_A_ROW,
    MAX_PER_HOUR,
    Restarts,
)
from rftdata import Buffer
from rftdata.processes import pid_space
from rftdata.user_code import blocked_process
from rftdata.workers.live_workers import record_blocked_workers
from tests.store.pipeline.test_pipeline_worker import rows
from tests.support.store_roles import Roles

HOST = os.uname().nodename


def role(name: str, watch: ProcessWatch | None = None) -> RoleProcess:
    """The supervisor's record of a role, without a process."""

    def start() -> RoleProcess:
        return role(name)

    return RoleProcess(name=name, role=name.split()[0], start=start, watch=watch)


@pytest.fixture
def roles(buffer: Buffer) -> Roles:
    return Roles(buffer, num_tasks=100, steps=100, batch_groups=1)


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_blocked_role_that_finishes_nothing_is_restarted_three_times(buffer: Buffer, roles: Roles) -> None:
    restarts = Restarts(roles.run)
    allowed = [restarts.allows(role("explorer 0")) for _ in range(MAX_FUTILE + 1)]
    assert allowed == [True] * MAX_FUTILE + [False]
    assert restarts.allows(role("explorer 1"))  # each role for itself
    assert restarts.count(role("explorer 0")) == MAX_FUTILE


def test_a_blocked_role_that_makes_progress_is_restarted_ten_times_an_hour(
    buffer: Buffer, roles: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("rftcore.launch.restarts.time", SimpleNamespace(monotonic=lambda: now))
    restarts, blocked_role = Restarts(roles.run), role("explorer")
    for _ in range(MAX_BLOCKED_PER_HOUR):  # ends for another reason do not count
        restarts.pause_s(blocked_role)
    allowed = []
    with roles.attempt() as attempt:
        for step in range(1, MAX_BLOCKED_PER_HOUR + 3):
            if step == MAX_BLOCKED_PER_HOUR + 2:
                now = 3600.0
            allowed.append(restarts.allows(blocked_role))
            roles.work()
            roles.train(attempt, step)
    assert allowed == [True] * MAX_BLOCKED_PER_HOUR + [False, True]


def test_an_explorer_whose_groups_are_all_set_aside_is_restarted_five_times(buffer: Buffer) -> None:
    """A group that was set aside counts as finished. A single bad task does not end the run, but a run in which every task blocks ends."""
    roles = Roles(buffer, num_tasks=100, batch_groups=1, max_refill=20)
    restarts, allowed = Restarts(roles.run), []
    with roles.attempt():
        for _ in range(MAX_FRUITLESS + 1):
            allowed.append(restarts.allows(role("explorer")))
            roles.plan()
            for _ in range(3):
                assert roles.claim()
                buffer.sql("UPDATE rft.worker SET stopped_at = now(), crashed = true")
                roles.database.fetch("release_lost_claims", run_id=roles.run_id)
                buffer.sql("UPDATE rft.worker SET stopped_at = NULL, crashed = false")
            roles.decide()
    assert roles.planned("status = 'planned'") == []
    assert allowed == [True] * MAX_FRUITLESS + [False]


def test_a_role_that_is_killed_before_it_finishes_anything_is_restarted_three_times_after_growing_pauses(
    buffer: Buffer, roles: Roles
) -> None:
    buffer.sql(f"UPDATE rft.worker SET host = '{HOST}', pid = 1, pid_space = '{pid_space()}'")
    restarts, killed = Restarts(roles.run), role("explorer 0", ProcessWatch(HOST, 1))
    assert [restarts.pause_s(killed) for _ in range(MAX_IN_A_ROW)] == [1, 2, 4, None]
    assert restarts.exit_counts(killed) == "4 processes in a row ended before they had finished anything"
    assert restarts.pause_s(role("explorer 1")) == 1  # each role for itself


def test_a_role_that_is_killed_after_it_finished_a_group_is_restarted_thirty_times_an_hour(
    buffer: Buffer, roles: Roles
) -> None:
    buffer.sql(f"UPDATE rft.worker SET host = '{HOST}', pid = 1, pid_space = '{pid_space()}'")
    restarts, killed = Restarts(roles.run), role("explorer", ProcessWatch(HOST, 1))
    assert not restarts.has_worked(killed)
    with roles.attempt():
        roles.plan()
        roles.work()
    assert restarts.has_worked(killed)
    assert not restarts.has_worked(role("explorer", ProcessWatch("another-host", 1)))
    assert [restarts.pause_s(killed) for _ in range(MAX_PER_HOUR + 1)] == [1] * MAX_PER_HOUR + [None]
    assert restarts.exit_counts(killed) == f"{MAX_PER_HOUR + 1} processes ended within an hour"


def test_the_report_of_a_blocked_process_becomes_its_error_and_its_claims_are_released_at_once(
    buffer: Buffer, roles: Roles
) -> None:
    pid = ended_process()
    folder = roles.run.folder
    report = blocked_process.report_path(folder, pid)
    report.parent.mkdir(parents=True)
    report.write_text("the workflow 'walk' blocks on task t/1\nFile walk.py, line 7\n")
    with roles.attempt():
        roles.plan()
        assert len(roles.claim()) == 1
        buffer.sql(f"UPDATE rft.worker SET host = '{HOST}', pid = {pid}, pid_space = '{pid_space()}'")
        restarts = Restarts(roles.run)
        # Another process may have found the worker gone before.
        buffer.sql("UPDATE rft.worker SET stopped_at = now(), error = 'the process is gone'")
        sentence = restarts.record(role("explorer", ProcessWatch(HOST, pid)), RoleExitError("exited with code 86"))
        assert sentence == "the workflow 'walk' blocks on task t/1"
        assert roles.planned("status = 'planned'") == [(0, 1)]
    stored = rows(buffer, "SELECT error, state, crashed FROM rft.worker")
    assert stored == [{"error": f"{sentence}\nFile walk.py, line 7\n", "state": "stopped", "crashed": True}]
    assert not Path(report).exists()


def test_the_report_of_a_process_with_the_same_id_on_another_host_is_ignored(buffer: Buffer, roles: Roles) -> None:
    folder = roles.run.folder
    for host in ("here", "there"):
        report = blocked_process.report_path(folder, 7, host)
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(f"the workflow of {host} blocks\nFile walk.py, line 7\n")
    said = Restarts(roles.run).record(role("explorer", ProcessWatch("there", 7)), RoleExitError("exited"))
    assert said == "the workflow of there blocks"
    assert list(blocked_process.reports(folder)) == [("here", pid_space(), 7)]


def test_the_end_of_a_process_that_was_not_blocked_is_recorded(buffer: Buffer, roles: Roles) -> None:
    pid = ended_process()
    buffer.sql(f"UPDATE rft.worker SET host = '{HOST}', pid = {pid}, pid_space = '{pid_space()}'")
    process = role("explorer", ProcessWatch(HOST, pid))
    assert Restarts(roles.run).record(process, RoleExitError("was killed by signal 9")) is None
    stored = rows(buffer, "SELECT error, crashed FROM rft.worker")
    assert stored == [{"error": "the process was killed by signal 9", "crashed": False}]


def test_a_fault_counts_against_the_group_that_the_process_had_claimed(buffer: Buffer, roles: Roles) -> None:
    pid = ended_process()
    with roles.attempt():
        roles.plan()
        assert len(roles.claim()) == 1
        buffer.sql(f"UPDATE rft.worker SET host = '{HOST}', pid = {pid}, pid_space = '{pid_space()}'")
        died = RoleExitError("was killed by signal 11", crashed=True)
        assert Restarts(roles.run).record(role("explorer", ProcessWatch(HOST, pid)), died) is None
    assert rows(buffer, "SELECT status::text, num_lost FROM rft.rollout_group") == [
        {"status": "planned", "num_lost": 1}
    ]


def test_a_role_by_hand_notes_what_an_earlier_one_reported_before_it_reports_itself(
    buffer: Buffer, roles: Roles
) -> None:
    folder, gone = roles.run.folder, ended_process()
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    for host, pid in ((HOST, gone), (HOST, os.getpid()), (HOST, living.pid), ("another-host", 3)):
        roles.database.fetch(
            "insert_worker",
            run_id=roles.run_id,
            role="explorer",
            host=host,
            pid=pid,
            pid_space=pid_space(),
            pid_started=0,
        )
        report = blocked_process.report_path(folder, pid, host)
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text("the workflow 'walk' blocks\nFile walk.py, line 7\n")
    record_blocked_workers(roles.run)
    living.communicate()
    crashed = rows(buffer, "SELECT host, pid, error FROM rft.worker WHERE crashed ORDER BY worker_id")
    error = "the workflow 'walk' blocks\nFile walk.py, line 7\n"
    assert crashed == [{"host": HOST, "pid": pid, "error": error} for pid in (gone, os.getpid())]
