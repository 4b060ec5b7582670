"""Roles as processes of this machine, forked by a fork server, without Ray.

Explorers import their engine's packages from the beginning, before the run is checked. Where a run turns out to need other explorers than those, or
none, these processes are ended.

Bundles take the GPUs that `CUDA_VISIBLE_DEVICES` allows in order. A restarted role gets its GPUs again. The output of a role is in `logs/` of
the run's folder.
"""

from __future__ import annotations

import itertools
import os
import pickle
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rftcore.config.run import RunConfig
from rftcore.launch.exits import ExitCause, ProcessWatch, RoleExitError
from rftcore.launch.launcher import Launcher, RoleProcess, RoleTask, has_built_in_engine, role_modules, role_tasks
from rftcore.launch.local_processes.children import Preload
from rftcore.launch.local_processes.fork_server import Ended, ForkServer, Started
from rftcore.launch.local_processes.role_process import TERMINATED
from rftcore.launch.threads import Threads, divide_threads, thread_environment
from rftcore.resolved import ResolvedRun
from rftcore.run.gpus import local_gpus, this_machine
from rftcore.run.placement import Machine, Placement, place_run
from rftdata.errors import RftError
from rftdata.run import Run

# So long after it was killed, a role counts as ended even if the server does not report its end.
_END_S = 10.0


@dataclass(kw_only=True, eq=False)
class ForkedRole(RoleProcess):
    """A role that the fork server forks.

    Attributes:
        key: identifies it in the server's events.
        log: file with its output.
        end: how it ended; None while it runs.
        killed_at: when it was killed (monotonic seconds); None if it was not.
    """

    key: int
    log: Path
    end: Ended | None = None
    killed_at: float | None = None


class LocalLauncher(Launcher):
    """Processes of this machine.

    Args:
        configs: of the runs whose roles will be started.
    """

    name = "fork server"
    stop_s = 0.0  # they end with it

    def __init__(self, configs: Sequence[RunConfig]) -> None:
        # First, because no thread of ours runs yet, and because imports take as long as the preparation of a run.
        self._server = ForkServer(role_modules(configs), thread_environment(divide_threads().cores))
        self._keys = itertools.count()
        self._roles: dict[int, ForkedRole] = {}

    def prepare(self, config: RunConfig) -> None:
        resolved = ResolvedRun(config)
        try:
            if not has_built_in_engine(resolved):
                return
            tasks = self._tasks(resolved, "", divide_threads(), place_run(resolved, self.machines()))
        except RftError:  # the checks find it, too
            return
        self._server.preload(
            [Preload(t.role, t.environment, pickle.dumps(t.preparation)) for t in tasks if t.preparation.modules]
        )

    def start(self) -> str:
        return "this machine"

    def machines(self) -> list[Machine]:
        return [this_machine(len(local_gpus()))]

    def start_roles(self, resolved: ResolvedRun, run: Run, threads: Threads, placement: Placement) -> list[ForkedRole]:
        tasks = self._tasks(resolved, run.name, threads, placement)
        roles = [self._start(task, run.folder / "logs") for task in tasks]
        self._server.preload([])  # what still waits was preloaded for other roles than these
        return roles

    def ended_roles(
        self, processes: list[RoleProcess], *, timeout_s: float
    ) -> tuple[list[RoleProcess], list[tuple[RoleProcess, BaseException | None]]]:
        deadline = time.monotonic() + timeout_s
        while True:
            for event in self._server.events(max(0.0, deadline - time.monotonic())):
                self._take(event)
            ended = [process for process in processes if self._has_ended(process)]
            if ended or time.monotonic() >= deadline:
                return [process for process in processes if process not in ended], [(p, _error(p)) for p in ended]

    def kill(self, processes: Sequence[RoleProcess]) -> None:
        for process in processes:
            assert isinstance(process, ForkedRole)
            process.killed_at = process.killed_at or time.monotonic()
            self._server.kill(process.key)
            if process.watch is not None:  # at once, also while the server is suspended
                process.watch.kill()

    def lost(self) -> str | None:
        status = self._server.exit_status
        if status is None:
            return None
        how = f"was killed by signal {-status}" if status < 0 else f"exited with code {status}"
        line = f": {line}" if (line := self._server.last_line()) else ""
        return f"{how} (process {self._server.pid}), and the roles ended with it{line}"

    def stop(self) -> None:
        self.kill(list(self._roles.values()))
        deadline = time.monotonic() + _END_S
        while self._roles and self._server.exit_status is None and time.monotonic() < deadline:
            for event in self._server.events(deadline - time.monotonic()):
                self._take(event)

    def close(self) -> None:
        self._server.close()

    def _tasks(self, resolved: ResolvedRun, run: str, threads: Threads, placement: Placement) -> list[RoleTask]:
        devices = devices_of(placement, os.environ.get("CUDA_VISIBLE_DEVICES"))
        return [_on_devices(task, devices.get(task.name)) for task in role_tasks(resolved, run, threads)]

    def _start(self, task: RoleTask, logs: Path) -> ForkedRole:
        key, log = next(self._keys), logs / f"{task.name.replace(' ', '-')}.log"
        role = ForkedRole(
            name=task.name,
            role=task.role,
            start=lambda: self._start(task, logs),
            key=key,
            log=log,
        )
        self._roles[key] = role
        self._server.start(key, task, log)
        return role

    def _take(self, event: Started | Ended) -> None:
        role = self._roles[event.key]
        if isinstance(event, Started):
            role.watch = ProcessWatch(socket.gethostname(), event.pid, str(role.log))
        else:
            role.end = event
            del self._roles[event.key]

    def _has_ended(self, process: RoleProcess) -> bool:
        assert isinstance(process, ForkedRole)
        is_silent = process.killed_at is not None and time.monotonic() - process.killed_at > _END_S
        return process.end is not None or self._server.exit_status is not None or is_silent


def _error(process: RoleProcess) -> BaseException | None:
    """Return the error of a role that has ended; None if it succeeded."""
    assert isinstance(process, ForkedRole)
    end = process.end
    if end is None:
        return RoleExitError("was killed" if process.killed_at is not None else "ended with the fork server")
    if end.error is not None:
        if not isinstance(end.error, RftError):
            end.error.add_note(f"its log is {process.log}")
        return end.error
    if not end.status:
        return None
    assert process.watch is not None, "it has started"
    return process.watch.exit_error(ExitCause.TERMINATED if end.status == TERMINATED else None, status=end.status)


def devices_of(placement: Placement, visible: str | None) -> dict[str, str]:
    """Return `CUDA_VISIBLE_DEVICES` of each role with GPUs.

    Args:
        visible: that of this process; None if it is not set.
    """
    free = itertools.count() if visible is None else (name.strip() for name in visible.split(",") if name.strip())
    of_role: dict[str, str] = {}
    for bundle in placement.bundles:
        devices = ",".join(str(device) for device in itertools.islice(free, bundle.num_gpus))
        of_role |= dict.fromkeys(bundle.roles, devices)
    return of_role


def _on_devices(task: RoleTask, devices: str | None) -> RoleTask:
    """Return a role's task with its GPUs; unchanged without any."""
    if devices is None:
        return task
    return replace(task, environment={**task.environment, "CUDA_VISIBLE_DEVICES": devices})
