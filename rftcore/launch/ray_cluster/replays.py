"""`rft pipeline replay --workers N`: a replay by several processes of a Ray cluster.

The process that starts them lists the batches and gives each to the next idle process. Batches consist of the same groups as in one process, and
are independent of each other, so the verdicts are the same. There is one exception: whether a group that fails alone in its batch is set aside,
or ends the replay, depends on the batch before. Such a batch is decided again once the result of that batch is known.

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
from rftcore.launch.exits import ProcessWatch
from rftcore.launch.launcher import reachable
from rftcore.launch.ray_cluster import cluster
from rftcore.launch.ray_cluster.cluster import ActorOptions, ProcessIdentity
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
    def identity(self) -> ProcessIdentity:
        """See `cluster.identity`."""
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
class _Worker:
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
        waiting: numbers of the batches that no process has.
        passed: whether stages succeeded on some row, for each batch that is done.
        alone: batches of one failed group, which are decided again after the batch before.
        retried: batches that were, or will be, decided again.
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
        """Return whether the meaning of a batch's failure depends on the batch before, which was not known yet."""
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
        batches_left = _Batches(list(batches(run, name, resolved.config.pipelines.batch_groups)))
        if not batches_left.groups:
            return Replayed(name)
        cluster.start_cluster()
        try:
            return _Workers(
                resolved.config, run, name, min(num_workers, len(batches_left.groups)), batches_left, report
            ).work()
        finally:
            cluster.stop_cluster()
            record_exited_workers(run)


class _Workers:
    """The processes of a replay and what they have done."""

    def __init__(
        self,
        config: RunConfig,
        run: Run,
        version: str,
        num_workers: int,
        batches_left: _Batches,
        report: Callable[[Replayed], None],
    ) -> None:
        self._config, self._run, self._version = reachable(config), run, version
        self._batches, self._report = batches_left, report
        self._done, self._num_lost = Replayed(version), 0
        machines = tuple(cluster.machines())
        names = [f"worker {number}" for number in range(num_workers)]
        self._actor_options = ActorOptions(
            Placement(machines, (), False, {name: at % len(machines) for at, name in enumerate(names)}), None
        )
        self._workers = [self._start(name) for name in names]

    def work(self) -> Replayed:
        """Give out the batches until all are decided on."""
        while len(self._batches.passed) < len(self._batches.groups):
            ended, _ = ray.wait([worker.call for worker in self._workers if worker.call is not None], timeout=_LOOK_S)
            for worker in self._workers:
                if worker.watch is None and ray.wait([worker.identity], timeout=0)[0]:
                    worker.watch = _watch(worker)
                if worker.call in ended:
                    self._take_answer(worker)
            for worker in self._workers:
                if worker.call is None and (taken := self._batches.take()) is not None:
                    worker.batch, patient = taken
                    worker.call = worker.actor.decide.remote(self._batches.groups[worker.batch], patient)
        ray.wait(
            [worker.actor.close.remote() for worker in self._workers], num_returns=len(self._workers), timeout=10.0
        )
        return self._done

    def _start(self, name: str) -> _Worker:
        environment = {**thread_environment(1), **cluster.python_path()}
        actor = _ReplayActor.options(
            runtime_env={"env_vars": environment}, **self._actor_options.of_role(name)
        ).remote()
        opened = actor.open.remote(self._config, self._run.run_id, self._version)
        return _Worker(name, actor, actor.identity.remote(), opened)

    def _take_answer(self, worker: _Worker) -> None:
        """Take the result of a process; replace the process if it has ended.

        Raises:
            RftError: what the process raised.
        """
        call, number, worker.call, worker.batch = worker.call, worker.batch, None, None
        try:
            decided = ray.get(call)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, StageError) and number is not None and self._batches.is_undecided_alone(number):
                self._batches.retry(number)
                return
            raise cause if isinstance(cause, RftError) else error from None
        except RayError as error:
            self._replace(worker, number, error)
            return
        if number is not None:
            self._batches.passed[number] = decided.has_passed
            self._done.add(decided)
            self._report(self._done)

    def _replace(self, worker: _Worker, number: int | None, error: RayError) -> None:
        watch = worker.watch or _watch(worker)
        named = None if watch is None else (self._run.folder, watch.pid, watch.host, watch.pid_space)
        if named is not None and (report := blocked_process.read_report(*named)) is not None:
            blocked_process.report_path(*named).unlink(missing_ok=True)
            raise RoleFailedError(
                f"{report[0]}, which ended {worker.name} of the replay",
                todo="start the replay again: it continues after it",
            )
        self._num_lost += 1
        why = cluster.exit_error(watch, error)
        if self._num_lost > MAX_LOST:
            raise RoleFailedError(
                f"{self._num_lost} processes of the replay ended, the last of them ({worker.name}) {why}",
                todo="start the replay again: it continues where it stopped",
            )
        if number is not None:
            self._batches.give_back(number)
        self._workers[self._workers.index(worker)] = self._start(worker.name)


def _watch(worker: _Worker) -> ProcessWatch | None:
    """Return the watch of a process that has answered; None if it ended before."""
    try:
        return cluster.watch_process(ray.get(worker.identity, timeout=0))
    except RayError:
        return None
