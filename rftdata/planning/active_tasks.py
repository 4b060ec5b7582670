"""The active tasks of tasksets and their features as arrays, read again only after changes, since there may be millions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rftdata.errors import TaskSourceError
from rftdata.postgres.database import Connection, fetch
from rftdata.selectors.base import Floats, Ids

_MANY_CHANGES = 256


@dataclass
class _TasksAtStamp:
    """The active tasks of a set when its number of changes was `stamp`."""

    stamp: int
    task_ids: Ids
    features: dict[str, Floats] = field(default_factory=dict)


class ActiveTasks:
    """The active tasks as known to one process."""

    def __init__(self) -> None:
        self._tasks: dict[str, _TasksAtStamp] = {}

    def task_ids(self, connection: Connection, taskset: str) -> Ids:
        """Return the ids, ascending; the same array object as long as nothing has changed.

        Raises:
            TaskSourceError: the taskset has no active task.
        """
        found = fetch(connection, "active_tasks_stamp", taskset=taskset)[0]
        if found["num_rows"] > _MANY_CHANGES:
            fetch(connection, "compact_task_changes", taskset=taskset)
        known = self._tasks.get(taskset)
        if known is None or known.stamp != found["stamp"]:
            known = self._read(connection, taskset)
        return known.task_ids

    def features(self, connection: Connection, taskset: str, keys: Sequence[str]) -> tuple[Ids, dict[str, Floats]]:
        """Return the ids, and one number per id for each key.

        Raises:
            TaskSourceError: a task lacks such a number; names the task.
        """
        known = self._tasks[taskset]
        missing = [key for key in keys if key not in known.features]
        while missing:
            row = fetch(connection, "task_numbers", taskset=taskset, key=missing[0])[0]
            if row["stamp"] != known.stamp:  # tasks have changed since their ids were read
                known = self._read(connection, taskset)
            else:
                known.features[missing[0]] = self._numbers(
                    connection, taskset, missing[0], known.task_ids, row["numbers"]
                )
            missing = [key for key in keys if key not in known.features]
        return known.task_ids, {key: known.features[key] for key in keys}

    def _read(self, connection: Connection, taskset: str) -> _TasksAtStamp:
        row = fetch(connection, "active_task_ids", taskset=taskset)[0]
        if not row["task_ids"]:
            raise TaskSourceError(
                f"the taskset {taskset!r} has no active task",
                todo="load it with `rft tasks load`, or activate some of its tasks",
            )
        known = self._tasks[taskset] = _TasksAtStamp(row["stamp"], np.array(row["task_ids"], dtype=np.int64))
        return known

    def _numbers(
        self, connection: Connection, taskset: str, key: str, task_ids: Ids, numbers: list[float | None]
    ) -> Floats:
        values = np.array(numbers, dtype=np.float64)  # None becomes NaN
        without = np.flatnonzero(~np.isfinite(values))
        if len(without):
            task = fetch(connection, "task_features", task_id=int(task_ids[without[0]]))[0]
            raise TaskSourceError(
                f"the selector of the taskset {taskset!r} needs the feature {key!r}, which is not a number for {len(without)} of its tasks; "
                f"the first is task {task['task_key']!r}",
                value=task["features"],
                todo="give every task the number (column `features` of its source, or rft.task.features), or name another feature",
            )
        return values
