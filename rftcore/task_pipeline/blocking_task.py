"""Handling of a task at which a stage of `pipelines.task` blocks its process forever.

The process ends. If the task is known, because the stage names it or has only one task, it is excluded first, so that the next load
continues with the other tasks. It is tried again when the stages change, or with `rft tasks score`. A task on which a stage raises costs an
error each time, but this one costs the process.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator

import pyarrow as pa

from rftdata.errors import TimeLimitError
from rftdata.pipeline.records import SET_ASIDE, Verdicts, dropped
from rftdata.pipeline.task_verdicts import BLOCKED, TaskBatch
from rftdata.user_code.blocked_process import report_or_print
from rftdata.user_code.time_limits import when_blocked

_MAX_REASON = 500
_ONE_ROW = re.compile(r" on 1 row \((\d+)\)")


@contextlib.contextmanager
def setting_aside(taskset: str, batch: TaskBatch, store: Callable[[Verdicts], object]) -> Iterator[None]:
    """If a stage blocks the process in this block, store that the task is excluded, and end the process with the error.

    Args:
        store: receives the verdict, in another thread.
    """

    def end(error: TimeLimitError) -> None:
        try:
            task_id = _culprit(batch.table["experience_id"].to_pylist(), error)
            if task_id is not None:
                task = pa.table({"experience_id": [task_id], "group_id": [task_id]})
                store(Verdicts(dropped(task, SET_ASIDE, f"{BLOCKED}{error.what}"[:_MAX_REASON])))
                said = f"tasks: {taskset}: task {task_id} is excluded; repeat the command to continue with the others\n"
                os.write(2, said.encode())
        finally:
            report_or_print(error)

    with when_blocked(end):
        yield


def _culprit(task_ids: Collection[int], error: TimeLimitError) -> int | None:
    """Return the blocking task; None if it is not known."""
    if error.subject in task_ids:
        return int(str(error.subject))
    found = _ONE_ROW.search(error.what)
    return int(found[1]) if found is not None and int(found[1]) in task_ids else None
