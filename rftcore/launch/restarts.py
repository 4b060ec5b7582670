"""Restarts of roles whose process ended early.

The buffer records the work of explorers and pipeline workers, so another process can continue it. If a process was killed, crashed or lost its
machine, its role is restarted after a pause, which doubles with every end before the role has finished anything. After `MAX_IN_A_ROW` such ends,
or `MAX_PER_HOUR` ends within an hour, it is not restarted any more. A trainer is not restarted: the run ends, and continues from a checkpoint.

A process that a user's function blocked leaves a report (`rftdata.user_code.blocked_process`). Its first sentence is shown, the whole report becomes
the error of its worker, and its claims are released at once. A blocked role is restarted up to `MAX_BLOCKED_PER_HOUR` times within an hour,
whatever other restarts it had, and up to `MAX_FUTILE` times within `FUTILE_S` seconds while it finishes nothing. A blocked trainer is restarted up to
`MAX_FUTILE` times at one step. After that the run ends with the sentence.

The buffer sets aside groups and evaluations on which several processes crashed (`release_lost_claims`), so one bad task does not use up the
restarts. These count as finished. An explorer is therefore restarted at most `MAX_FRUITLESS` times while no rollout succeeds, which is
enough to set bad tasks aside once, but not to try every task.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rftcore.launch.exits import RoleExitError
from rftcore.launch.launcher import RoleProcess
from rftdata.errors import BufferUnavailableError
from rftdata.reports.progress import last_step
from rftdata.run import Run
from rftdata.user_code import blocked_process
from rftdata.workers.finished_work import num_finished, num_finished_by, num_succeeded
from rftdata.workers.live_workers import end_worker, record_exited_workers

MAX_BLOCKED_PER_HOUR = 10
MAX_FUTILE = 3
FUTILE_S = 60.0
MAX_FRUITLESS = 5
MAX_IN_A_ROW = 4
MAX_PER_HOUR = 30
_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_HOUR_S = 3600.0


@dataclass
class _History:
    """Restarts of one role.

    Attributes:
        num_restarts: all of them.
        futile: times of the restarts of a blocked role since it last finished anything.
        finished, succeeded, last_step: what the run had at the last restart; -1 if unknown.
        num_fruitless: restarts of a blocked explorer since a rollout last succeeded.
        num_stuck: restarts of a blocked trainer at the same step.
        blocked: times of the restarts of a blocked role within the last hour.
        ends: times at which its processes ended without being blocked, within the last hour.
        num_in_a_row: number of its last processes that finished nothing.
    """

    num_restarts: int = 0
    futile: list[float] = field(default_factory=list)
    finished: int = -1
    num_fruitless: int = 0
    num_stuck: int = 0
    last_step: int = -1
    succeeded: int = -1
    blocked: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    num_in_a_row: int = 0


class Restarts:
    """Decides which roles of a run are restarted.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._histories: dict[str, _History] = {}

    def record(self, process: RoleProcess, error: RoleExitError) -> str | None:
        """Record the end of a process and release what it had claimed.

        Returns:
            What blocked it; None if it ended for another reason.
        """
        watch = process.watch
        if watch is None:  # it ended before its id was known
            return None
        report = blocked_process.read_report(self._run.folder, watch.pid, watch.host, watch.pid_space)
        text = f"the process {error}" if report is None else "\n".join(report)
        with contextlib.suppress(BufferUnavailableError):  # the claims are released when the lease ends
            crashed = report is not None or error.crashed
            end_worker(self._run, watch.host, watch.pid, text, pid_space=watch.pid_space, crashed=crashed)
            record_exited_workers(self._run)
        if report is None:
            return None
        with contextlib.suppress(OSError):
            blocked_process.report_path(self._run.folder, watch.pid, watch.host, watch.pid_space).unlink()
        return report[0]

    def allows(self, process: RoleProcess) -> bool:
        """Return whether a blocked role may be restarted once more, and count the restart."""
        history = self._histories.setdefault(process.name, _History())
        now, finished = time.monotonic(), _count_or_unknown(lambda: num_finished(self._run, process.role))
        if finished != history.finished:
            history.futile.clear()
        history.finished = finished
        history.futile = [at for at in history.futile if now - at < FUTILE_S]
        history.blocked = [at for at in history.blocked if now - at < _HOUR_S]
        if process.role == "explorer":
            succeeded = _count_or_unknown(lambda: num_succeeded(self._run))
            history.num_fruitless = history.num_fruitless + 1 if succeeded == history.succeeded else 0
            history.succeeded = succeeded
        if process.role == "trainer":
            step = _count_or_unknown(lambda: last_step(self._run))
            history.num_stuck = history.num_stuck + 1 if step == history.last_step else 0
            history.last_step = step
        if (
            history.num_stuck >= MAX_FUTILE
            or len(history.blocked) >= MAX_BLOCKED_PER_HOUR
            or len(history.futile) >= MAX_FUTILE
            or history.num_fruitless >= MAX_FRUITLESS
        ):
            return False
        history.num_restarts += 1
        history.blocked.append(now)
        history.futile.append(now)
        return True

    def pause_s(self, process: RoleProcess) -> float | None:
        """Count the end of a role's process, and return the pause before its restart; None if its processes ended too often."""
        history = self._histories.setdefault(process.name, _History())
        now = time.monotonic()
        history.ends = [*(at for at in history.ends if now - at < _HOUR_S), now]
        history.num_in_a_row = 0 if self.has_worked(process) else history.num_in_a_row + 1
        if history.num_in_a_row >= MAX_IN_A_ROW or len(history.ends) > MAX_PER_HOUR:
            return None
        history.num_restarts += 1
        pause: float = _PAUSE_S * 2 ** max(0, history.num_in_a_row - 1)
        return min(pause, _LONGEST_PAUSE_S)

    def exit_counts(self, process: RoleProcess) -> str:
        """Return why a role is not restarted: how often its processes ended."""
        history = self._histories[process.name]
        if history.num_in_a_row >= MAX_IN_A_ROW:
            return f"{history.num_in_a_row} processes in a row ended before they had finished anything"
        return f"{len(history.ends)} processes ended within an hour"

    def has_worked(self, process: RoleProcess) -> bool:
        """Return whether a process finished a group or an evaluation before it ended."""
        watch = process.watch
        return (
            watch is not None
            and _count_or_unknown(lambda: num_finished_by(self._run, watch.host, watch.pid, watch.pid_space)) > 0
        )

    def has_run_ended(self) -> bool:
        """Return whether the run has ended; False if the database does not answer."""
        try:
            return self._run.refreshed().has_ended
        except BufferUnavailableError:
            return False

    def may_roles_leave(self) -> bool:
        """Return whether roles may exit: the run has ended or was asked to stop, or the database does not answer."""
        try:
            run = self._run.refreshed()
        except BufferUnavailableError:
            return True
        return run.has_ended or run.stop_requested

    def count(self, process: RoleProcess) -> int:
        """Return how often a role was restarted."""
        return self._histories.setdefault(process.name, _History()).num_restarts


def _count_or_unknown(count: Callable[[], int]) -> int:
    try:
        return count()
    except BufferUnavailableError:
        return -1  # compares as if nothing had been finished
