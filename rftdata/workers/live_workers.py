"""The processes of a run that have not left, and the ends of those that could not record their own."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import partial

from rftdata.postgres.database import execute, records
from rftdata.processes import has_ended, is_here, process_lives
from rftdata.run import Run
from rftdata.user_code import blocked_process
from rftdata.workers.leases import release_lost_claims


@dataclass(frozen=True, kw_only=True)
class LiveWorker:
    """A process that has not left; `beats` is true if it sent a heartbeat within the last 15 s."""

    worker_id: int
    role: str
    host: str
    pid: int
    pid_space: str
    pid_started: int
    beats: bool


def live_workers(run: Run) -> list[LiveWorker]:
    """Return the processes of a run that have not left."""
    return records(LiveWorker, run.database.fetch("live_workers", run_id=run.run_id))


def record_exited_workers(run: Run) -> int:
    """Record workers of this machine whose process has exited, and release what they held; return their number."""
    exited = [
        row.worker_id for row in live_workers(run) if has_ended(row.host, row.pid, row.pid_space, row.pid_started)
    ]
    for worker_id in exited:
        stop = partial(run.database.run, "stop_worker", worker_id=worker_id, error="the process is gone")
        run.database.ride_out(stop)
    run.database.ride_out(lambda: release_lost_claims(run))
    return len(exited)


def record_blocked_workers(run: Run) -> None:
    """Record workers of this machine that were blocked, have exited, and had no supervisor.

    A process exits after its report. So does one of another container of this name, or of this container before it was started again.
    Called before this process reports to the run's folder, because a later process may have the same number.
    """
    for host, space, pid in blocked_process.reports(run.folder):
        if host != socket.gethostname() or (is_here(host, space) and pid != os.getpid() and process_lives(pid)):
            continue
        report = blocked_process.read_report(run.folder, pid, host, space)
        if report is not None:
            end = partial(end_worker, run, host, pid, "\n".join(report), pid_space=space, crashed=True)
            run.database.ride_out(end)


def end_worker(run: Run, host: str, pid: int, error: str, *, pid_space: str, crashed: bool) -> None:
    """Store why a process ended.

    Args:
        pid_space: see `rftdata.processes.pid_space`.
        crashed: whether its work may be the reason. Work that several processes crashed on is set aside.
    """
    process = {"run_id": run.run_id, "host": host, "pid": pid, "pid_space": pid_space}
    with run.database.transaction() as connection:
        execute(connection, "lock_workers_of_process", **process)
        execute(connection, "end_worker_of_process", **process, error=error, crashed=crashed)
