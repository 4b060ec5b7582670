"""Verdicts of task pipelines: which tasks are to be decided on, and the storage of what was decided.

Verdicts are appended. `rft.task` has the status, features and texts of the current verdict. `rftdata.pipeline.task_batches` reads the tasks
as stages see them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from psycopg.types.json import Jsonb

from rftdata.errors import OperatorError
from rftdata.pipeline.purged import without_purged_tasks
from rftdata.pipeline.records import Verdicts
from rftdata.pipeline.scores import TASK_SCORES
from rftdata.pipeline.verdicts import STAGE_FAILED, insert_stage_runs
from rftdata.postgres.database import Database, Row, copy_rows, execute, fetch
from rftdata.postgres.locks import Lock, holding
from rftdata.postgres.retry import ride_out
from rftdata.postgres.values import storable

BLOCKED = "the stage blocks its process: "
"""Prefix of the reason of a task that the same stages do not decide on again."""


@dataclass
class TaskChange:
    """The changes that stages made to a task.

    Attributes:
        features: columns that stages added or changed.
        texts: the new `prompt` and `answer` if stages changed them; an answer may be None.
    """

    features: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str | None] = field(default_factory=dict)


def register_task_pipeline(database: Database, version: str, stages: Sequence[Mapping[str, Any]]) -> None:
    """Store the stages of a version, so that old verdicts can be understood."""
    plain = storable(json.loads(json.dumps(list(stages), default=str)))
    ride_out(
        lambda: database.fetch(
            "register_pipeline", version=version, digest=version, stages=Jsonb(plain), label_kinds=[]
        )
    )


@contextmanager
def taskset_lock(database: Database, taskset: str) -> Iterator[None]:
    """Lock a set while it is decided on; other processes that load or decide on it wait."""
    with holding(database, Lock("taskset", object=taskset), wait_s=math.inf):
        yield


def undecided_tasks(
    database: Database, taskset: str, pipeline_version: str, *, again: bool = False, failed_too: bool = False
) -> list[int]:
    """Return the ids of tasks whose current verdict is of another version, ascending.

    Args:
        again: return all tasks.
        failed_too: include tasks excluded because a stage failed on them.
    """
    row = database.fetch(
        "undecided_tasks",
        taskset=taskset,
        pipeline_version=pipeline_version,
        again=again,
        failure=f"{STAGE_FAILED}%" if failed_too else None,
    )[0]
    return list(row["task_ids"])


def decidable_tasks(database: Database, taskset: str, *, leave_out_blocked_by: str | None = None) -> list[int]:
    """Return the ids of a set's tasks, ascending, without purged ones and those that block a stage of a given version."""
    row = database.fetch("decidable_tasks", taskset=taskset, version=leave_out_blocked_by, blocked=f"{BLOCKED}%")[0]
    return list(row["task_ids"])


def tasks_by_maker(database: Database, task_ids: Sequence[int]) -> dict[tuple[str, ...], list[int]]:
    """Group ids by the stages that created the tasks and their ancestors; () for tasks of the source."""
    rows = database.fetch("makers_of_tasks", task_ids=list(task_ids))
    makers = {row["task_id"]: tuple(row["made_by"]) for row in rows}
    found: dict[tuple[str, ...], list[int]] = {}
    for task_id in task_ids:
        found.setdefault(makers.get(task_id, ()), []).append(task_id)
    return found


def commit_task_verdicts(
    database: Database,
    taskset: str,
    pipeline_version: str,
    verdicts: Verdicts,
    changes: Mapping[int, TaskChange] | None = None,
) -> int:
    """Store verdicts, stage runs and created tasks in one transaction. Tasks created for this set wait for a verdict.

    Nothing of a task that was purged since it was read is stored; their number is returned.

    Args:
        changes: changes that stages made, by task id.

    Raises:
        OperatorError: a task that was already tried would get another prompt or answer.
    """
    columns = [
        ("task_id", "int8"),
        ("kept", "bool"),
        ("stage", "text"),
        ("reason", "text"),
        ("features", "jsonb"),
        ("prompt", "text"),
        ("answer", "text"),
        ("answer_changed", "bool"),
    ]
    with database.transaction() as connection:
        verdicts, num_purged = without_purged_tasks(connection, verdicts)
        rows = (_verdict_row(row, (changes or {}).get(row["experience_id"])) for row in verdicts.decisions.to_pylist())
        made = verdicts.tasks
        execute(connection, "stage_task_verdicts")
        copy_rows(connection, "staged_verdict", columns, rows)
        changed = fetch(connection, "tried_tasks_that_change")[0]
        if changed["n"]:
            raise OperatorError(
                f"the task pipeline changes the prompt or answer of {changed['n']} tasks of {taskset!r} that were already tried, "
                f"for example task {changed['task_id']}; its outcomes belong to the old text",
                todo="give the taskset another name, so that its tasks are loaded again, or do not change their texts",
            )
        execute(connection, "save_task_verdicts", pipeline_version=pipeline_version)
        insert_stage_runs(connection, pipeline_version, verdicts.stages, taskset=taskset)
        if made:
            execute(
                connection,
                "make_tasks_of_tasks",
                taskset=taskset,
                tasksets=[m.taskset or taskset for m in made],
                task_keys=[m.task_key for m in made],
                payloads=[json.dumps(storable(dict(m.payload))) for m in made],
                features=[json.dumps(storable(dict(m.features))) for m in made],
                parents=[m.parent_id for m in made],
                stages=[m.stage for m in made],
            )
        TASK_SCORES.store(connection, verdicts.scores)
    return num_purged


def _verdict_row(row: Row, change: TaskChange | None) -> tuple[Any, ...]:
    change = change or TaskChange()
    texts = change.texts if row["kept"] else {}
    return (
        row["experience_id"],
        row["kept"],
        row["stage"],
        storable(row["reason"]),
        storable(change.features),
        storable(texts.get("prompt")),
        storable(texts.get("answer")),
        "answer" in texts,
    )
