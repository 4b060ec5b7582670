"""Handling of a task at which a stage of `pipelines.task` blocks its process forever.

The process ends. If the task is known, because the stage names it or was called with one task, it is excluded first, so that the next load
continues with the other tasks. It is tried again when the stages change, or with `rft tasks score`. It is not tried at every load, as a task
on which a stage raises is, because each try ends the process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection

import pyarrow as pa

from operators.chain.blocking_rows import named_rows, setting_aside_blocking_rows
from operators.chain.stage import MAX_REASON
from rftdata.errors import TimeLimitError
from rftdata.pipeline.records import SET_ASIDE, Verdicts, dropped
from rftdata.pipeline.task_batches import TaskBatch
from rftdata.pipeline.task_verdicts import BLOCKED
from rftdata.user_code.blocked_process import report_or_print


def setting_aside_blocking_task(
    taskset: str, batch: TaskBatch, store: Callable[[Verdicts], object]
) -> contextlib.AbstractContextManager[None]:
    """If a stage blocks the process in this block, store that the task is excluded, and end the process with the error.

    Args:
        store: receives the verdict, in another thread.
    """

    def set_aside(error: TimeLimitError) -> None:
        task_id = _blocking_task(batch.table["experience_id"].to_pylist(), error)
        if task_id is not None:
            task = pa.table({"experience_id": [task_id], "group_id": [task_id]})
            store(Verdicts(dropped(task, SET_ASIDE, f"{BLOCKED}{error.what}"[:MAX_REASON])))
            sentence = f"tasks: {taskset}: task {task_id} is excluded; repeat the command to continue with the others\n"
            os.write(2, sentence.encode())

    return setting_aside_blocking_rows(set_aside, report_or_print)


def _blocking_task(task_ids: Collection[int], error: TimeLimitError) -> int | None:
    """Return the blocking task; None if it is not known."""
    if error.subject in task_ids:
        return int(str(error.subject))
    first, last = named_rows(error.what) or (None, None)
    return first if first == last and first in task_ids else None
