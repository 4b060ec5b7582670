"""`rft pipeline replay --workers N`: the batches of one replay, decided on by several processes of a Ray cluster.

The process that starts them lists the batches and gives each to the next process that is idle. Batches consist of the same groups as in one process,
and a batch does not depend on the one before, so the verdicts are the same. There is one exception: whether a group that fails alone in its
batch is set aside, or ends the replay, depends on the batch before. Such a batch is decided again once that is known.

A process that is killed is replaced, and its batch is given to another. If it was killed between storing a batch and reporting it, the other finds
the verdicts stored and adds none.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

import rftdata
from operators.chain.stage import StageError
from rftcore.config.run import RunConfig
from rftcore.launch import cluster
from rftcore.launch.cluster import Seats
from rftcore.launch.deaths import ProcessWatch
from rftcore.launch.launcher import reachable
from rftcore.launch.threads import thread_environment
from rftcore.pipeline.replay import Replayed, Replayer, batches, checked_name
from rftcore.resolved import ResolvedRun
from rftcore.run.placement import Placement
from rftdata.errors import RftError, RoleFailedError
from rftdata.pipeline.versions import replaying
from rftdata.run import Run
from rftdata.user_code import blocked_process
from rftdata.workers.live_workers import record_exited_workers

MAX_LOST = 5
_LOOK_S = 1.0


class ReplayProcess:
    """One process of a replay."""

    @ray.method
    def open(self, config: RunConfig, run_id: int, version: str) -> None:
        """Open buffer and chain.

        Raises:
            RftError: that is not possible.
        """
        report = functools.partial(print, file=sys.stderr, flush=True)
        buffer = rftdata.open(config.buffer, create=False, application="rft pipeline", report=report)
        run = buffer.find_run(run_id)
        blocked_process.report_to(run.folder)
        self._buffer, self._replayer = buffer, Replayer(ResolvedRun(config), buffer, run, version)

    @ray.method
    def identity(self) -> tuple[str, int, str, str]:
        """See `Role`."""
        return cluster.identity()

    @ray.method
    def decide(self, group_ids: list[int], patient: bool) -> Replayed:
        """See `Replayer`."""
        return self._replayer.decide(group_ids, patient=patient)

    @ray.method
    def close(self) -> None:
        """Leave the run."""
        self._replayer.__exit__(None, None, None)
        self._buffer.close()


_ReplayActor = ray.remote(max_restarts=0, max_task_retries=0)(ReplayProcess)


@dataclass
class _Member:
    """A started process, and the batch that it decides on.

    Attributes:
        watch: observes its end; None until it has answered.
    """

    name: str
    actor: Any
    identity: Any
    call: Any
    batch: int | None = None
    watch: ProcessWatch | None = None


@dataclass
class _Batches:
    """The batches of a replay.

    Attributes:
        waiting: numbers of those that no process has.
        passed: of each that is done, whether the stages did not fail on everything.
        alone: batches of one group that failed, which are decided again after the batch before.
        retried: those that were, or will be.
    """

    groups: list[list[int]]
    waiting: deque[int] = field(default_factory=deque)
    passed: dict[int, bool] = field(default_factory=dict)
    alone: set[int] = field(default_factory=set)
    retried: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.waiting.extend(range(len(self.groups)))

    def take(self) -> tuple[int, bool] | None:
        """Take the next batch that can be decided on; return it and whether a failure raises."""
        for number in sorted(self.alone):
            if number - 1 in self.passed:
                self.alone.remove(number)
                return number, not self.passed[number - 1]
        return (self.waiting.popleft(), True) if self.waiting else None

    def is_undecided_alone(self, number: int) -> bool:
        """Return whether it depends on the batch before what the failure of a batch means, and that was not known yet."""
        return len(self.groups[number]) == 1 and number > 0 and number not in self.retried

    def give_back(self, number: int) -> None:
        """Let another process decide on a batch."""
        if number in self.retried:
            self.alone.add(number)
        else:
            self.waiting.appendleft(number)

    def retry(self, number: int) -> None:
        """Decide on a batch of one group again, after the one before."""
        self.retried.add(number)
        self.alone.add(number)


def replay_on_cluster(
    resolved: ResolvedRun, run: Run, version: str | None, num_workers: int, report: Callable[[Replayed], None]
) -> Replayed:
    """Decide on every sealed group of a run under another version, in several processes of the cluster; see `replay`.

    Raises:
        RoleFailedError: a stage blocked a process, or processes are killed again and again.
        RftError: as for `replay`.
    """
    name = checked_name(resolved.experience_chain, run, version)
    with replaying(run, name):
        cut = _Batches(list(batches(run, name, resolved.config.pipelines.batch_groups)))
        if not cut.groups:
            return Replayed(name)
        cluster.start_cluster()
        try:
            return _Crew(resolved.config, run, name, min(num_workers, len(cut.groups)), cut, report).work()
        finally:
            cluster.stop_cluster()
            record_exited_workers(run)


class _Crew:
    """The processes of a replay and what they have done."""

    def __init__(
        self,
        config: RunConfig,
        run: Run,
        version: str,
        num_workers: int,
        cut: _Batches,
        report: Callable[[Replayed], None],
    ) -> None:
        self._config, self._run, self._version = reachable(config), run, version
        self._cut, self._report = cut, report
        self._done, self._num_lost = Replayed(version), 0
        machines = tuple(cluster.machines())
        names = [f"worker {number}" for number in range(num_workers)]
        self._seats = Seats(
            Placement(machines, (), False, {name: at % len(machines) for at, name in enumerate(names)}), None
        )
        self._members = [self._start(name) for name in names]

    def work(self) -> Replayed:
        """Give out the batches until all are decided on."""
        while len(self._cut.passed) < len(self._cut.groups):
            ended, _ = ray.wait([member.call for member in self._members if member.call is not None], timeout=_LOOK_S)
            for member in self._members:
                if member.watch is None and ray.wait([member.identity], timeout=0)[0]:
                    member.watch = _watch(member)
                if member.call in ended:
                    self._take_answer(member)
            for member in self._members:
                if member.call is None and (taken := self._cut.take()) is not None:
                    member.batch, patient = taken
                    member.call = member.actor.decide.remote(self._cut.groups[member.batch], patient)
        ray.wait(
            [member.actor.close.remote() for member in self._members], num_returns=len(self._members), timeout=10.0
        )
        return self._done

    def _start(self, name: str) -> _Member:
        environment = {**thread_environment(1), **cluster.python_path()}
        actor = _ReplayActor.options(runtime_env={"env_vars": environment}, **self._seats.options(name)).remote()
        opened = actor.open.remote(self._config, self._run.run_id, self._version)
        return _Member(name, actor, actor.identity.remote(), opened)

    def _take_answer(self, member: _Member) -> None:
        """Take the result of a process; replace it if it has died.

        Raises:
            RftError: what the process raised.
        """
        call, number, member.call, member.batch = member.call, member.batch, None, None
        try:
            found = ray.get(call)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, StageError) and number is not None and self._cut.is_undecided_alone(number):
                self._cut.retry(number)
                return
            raise cause if isinstance(cause, RftError) else error from None
        except RayError as error:
            self._replace(member, number, error)
            return
        if number is not None:
            self._cut.passed[number] = found.has_passed
            self._done.add(found)
            self._report(self._done)

    def _replace(self, member: _Member, number: int | None, error: RayError) -> None:
        watch = member.watch or _watch(member)
        named = None if watch is None else (self._run.folder, watch.pid, watch.host, watch.pid_space)
        if named is not None and (report := blocked_process.read_report(*named)) is not None:
            blocked_process.report_path(*named).unlink(missing_ok=True)
            raise RoleFailedError(
                f"{report[0]}, which ended {member.name} of the replay",
                todo="start the replay again: it continues after it",
            )
        self._num_lost += 1
        why = (watch or ProcessWatch("", 0)).death(str(error))
        if self._num_lost > MAX_LOST:
            raise RoleFailedError(
                f"{self._num_lost} processes of the replay ended, the last of them ({member.name}) {why}",
                todo="start the replay again: it continues where it stopped",
            )
        if number is not None:
            self._cut.give_back(number)
        self._members[self._members.index(member)] = self._start(member.name)


def _watch(member: _Member) -> ProcessWatch | None:
    """Return the watch of a process that has answered; None if it ended before."""
    try:
        return ProcessWatch(*ray.get(member.identity, timeout=0))
    except RayError:
        return None
