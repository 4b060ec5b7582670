"""Roles whose process died: recorded in the buffer, and started again where a function of the user had blocked the process.

Such a process leaves a report (`rftdata.user_code.blocked`). Its first sentence is shown, the whole of it becomes the error of its worker, and
what it had claimed is released at once. A role is started again `MAX_RESTARTS` times in a life of the run, and `MAX_FUTILE` times within
`FUTILE_S` seconds while the role finishes nothing; then the run ends with the sentence. Groups and evaluations on which
several processes crashed are set aside by the buffer itself (`release_lost_claims`), so one bad task does not use the restarts up. That counts
as finished; an explorer is therefore started again at most `MAX_FRUITLESS` times while no rollout succeeds: long enough to
set bad tasks aside once, not to try every task.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rftcore.launch.cluster import RoleProcess
from rftcore.launch.deaths import RoleDiedError
from rftdata.errors import BufferUnavailableError
from rftdata.run import Run
from rftdata.user_code import blocked
from rftdata.workers import end_worker, mark_dead_workers, num_finished, num_succeeded

MAX_RESTARTS = 10
MAX_FUTILE = 3
FUTILE_S = 60.0
MAX_FRUITLESS = 5


@dataclass
class _History:
    """Restarts of one role: how many, when those were after which it has finished nothing, and how many since a rollout succeeded."""

    num_restarts: int = 0
    futile: list[float] = field(default_factory=list)
    finished: int = -1
    num_fruitless: int = 0
    succeeded: int = -1


class Restarts:
    """Decides which roles of a run are started again.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._histories: dict[str, _History] = {}

    def record(self, process: RoleProcess, error: RoleDiedError) -> str | None:
        """Record the end of a process and release what it had claimed.

        Returns:
            What blocked it; None where it died of something else.
        """
        if process.watch is None:  # it died before it was known
            return None
        report = blocked.read_report(self._run.folder, process.watch.pid, process.watch.host)
        text = f"the process {error}" if report is None else "\n".join(report)
        with contextlib.suppress(BufferUnavailableError):  # its lease releases the claims
            crashed = report is not None or error.crashed
            end_worker(self._run, process.watch.host, process.watch.pid, text, crashed=crashed)
            mark_dead_workers(self._run)
        if report is None:
            return None
        with contextlib.suppress(OSError):
            blocked.report_path(self._run.folder, process.watch.pid, process.watch.host).unlink()
        return report[0]

    def allows(self, process: RoleProcess) -> bool:
        """Whether a role that was blocked is started once more; counts the restart."""
        history = self._histories.setdefault(process.name, _History())
        now, finished = time.monotonic(), _known(lambda: num_finished(self._run, process.role))
        if finished != history.finished:
            history.futile.clear()
        history.finished = finished
        history.futile = [at for at in history.futile if now - at < FUTILE_S]
        if process.role == "explorer":
            succeeded = _known(lambda: num_succeeded(self._run))
            history.num_fruitless = history.num_fruitless + 1 if succeeded == history.succeeded else 0
            history.succeeded = succeeded
        if (
            history.num_restarts >= MAX_RESTARTS
            or len(history.futile) >= MAX_FUTILE
            or history.num_fruitless >= MAX_FRUITLESS
        ):
            return False
        history.num_restarts += 1
        history.futile.append(now)
        return True

    def count(self, process: RoleProcess) -> int:
        """How often a role was started again."""
        return self._histories.setdefault(process.name, _History()).num_restarts


def _known(count: Callable[[], int]) -> int:
    try:
        return count()
    except BufferUnavailableError:
        return -1  # not known: as if nothing had been finished
