"""Task pipelines: batches of tasks for the stages, and the storage of verdicts.

For stages, a batch looks like one of experiences: `experience_id` and `group_id` are the task's id, and every task is a separate
group. Stages see the task as given by the source, without changes by earlier versions, so a version decides the same
whenever it runs. Verdicts are appended. `rft.task` has the status, features and texts of the current verdict.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from psycopg.types.json import Jsonb

from rftdata.errors import ConfigError, OperatorError
from rftdata.pipeline.records import StageScores, StoredScore, Verdicts
from rftdata.pipeline.verdicts import STAGE_FAILED, insert_stage_runs
from rftdata.postgres.database import Connection, Database, Row, copy_rows, execute, fetch, records
from rftdata.postgres.locks import Lock, holding
from rftdata.postgres.retry import ride_out
from rftdata.postgres.values import storable

TASK_BATCH_SCHEMA = pa.schema(
    [
        ("experience_id", pa.int64()),
        ("group_id", pa.int64()),
        ("rollout_index", pa.int32()),
        ("task_id", pa.int64()),
        ("taskset", pa.string()),
        ("task_key", pa.string()),
        ("prompt", pa.string()),
        ("answer", pa.string()),
        ("metadata", pa.string()),
        ("features", pa.string()),
        ("reward", pa.float64()),
        ("attempts", pa.int64()),
        ("num_groups", pa.int64()),
        ("num_draws", pa.int64()),
        ("priority", pa.float64()),
    ]
)
"""The columns of a task that stages may read. `prompt`: its text, or the contents of a chat. `metadata` and `features` (of the source) are
JSON texts. `attempts` groups were observed over all runs, and `reward` is their mean reward; null before the first. `num_groups` groups were
sampled, and drawn for training `num_draws` times. `priority` is 0 until a stage sets it."""

BLOCKED = "the stage blocks its process: "
"""Prefix of the reason of a task that the same stages do not decide on again."""

_USAGE = {
    "reward": "task_outcomes",
    "attempts": "task_outcomes",
    "num_groups": "task_groups",
    "num_draws": "task_draws",
}
_PORTION = 10_000


@dataclass(frozen=True)
class TaskBatch:
    """Tasks for the stages.

    Attributes:
        table: with the requested columns.
        is_text: per row, whether the prompt is a text, which stages may change, instead of a chat.
    """

    table: pa.Table
    is_text: list[bool]


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
    ride_out(lambda: database.fetch("register_pipeline", version=version, digest=version, stages=Jsonb(plain)))


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


class TaskReader:
    """Reads tasks of one set with the columns that the stages need.

    Args:
        columns: of `TASK_BATCH_SCHEMA`, None for all; the identity columns and `reward` are always included.
    """

    def __init__(self, database: Database, taskset: str, columns: Collection[str] | None) -> None:
        columns = TASK_BATCH_SCHEMA.names if columns is None else columns
        wanted = {*columns, "experience_id", "group_id", "rollout_index", "reward"} - {"priority"}
        self._database = database
        self._schema = pa.schema([column for column in TASK_BATCH_SCHEMA if column.name in wanted])
        # Counted over all runs at once instead of for each batch, because groups are not indexed by task.
        asked = sorted({_USAGE[name] for name in wanted & set(_USAGE) if name in columns})
        self._usage: dict[str, list[Row]] = {name: database.fetch(name, taskset=taskset) for name in asked}
        self._ids = {name: np.array([row["task_id"] for row in rows], np.int64) for name, rows in self._usage.items()}

    def read(self, task_ids: Sequence[int]) -> TaskBatch:
        """Return the tasks of these ids, in their order; purged ones are left out."""
        tables, is_text = [], []
        for start in range(0, len(task_ids), _PORTION):
            rows = self._database.fetch(
                "task_batch", task_ids=list(task_ids[start : start + _PORTION]), columns=self._schema.names
            )
            tables.append(self._table(rows))
            is_text += [bool(row["is_text"]) for row in rows]
        table = pa.concat_tables(tables) if tables else self._schema.empty_table()
        return TaskBatch(table.combine_chunks(), is_text)

    def _table(self, rows: list[Row]) -> pa.Table:
        ids = [row["task_id"] for row in rows]
        arrays = []
        for column in self._schema:
            values: Any
            if column.name in ("experience_id", "group_id"):
                values = ids
            elif column.name == "rollout_index":
                values = [0] * len(ids)
            elif column.name in _USAGE:
                values = self._used(column.name, ids)
            else:
                values = [row[column.name] for row in rows]
            arrays.append(pa.array(values, column.type))
        return pa.table(arrays, schema=self._schema)

    def _used(self, column: str, ids: list[int]) -> list[Any]:
        """Return counts of tasks; 0, or null for a reward, for tasks that no run has tried."""
        missing = None if column == "reward" else 0
        rows, known = self._usage.get(_USAGE[column], []), self._ids.get(_USAGE[column])
        if known is None or not len(known):
            return [missing] * len(ids)
        places = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        return [rows[place][column] if known[place] == key else missing for place, key in zip(places, ids)]


def source_batch(taskset: str, tasks: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return tasks of `read_tasks` as stages would see them, with ids from 1 and never tried; stores nothing."""
    ids = list(range(1, len(tasks) + 1))
    payloads = [task["payload"] for task in tasks]
    values: dict[str, list[Any]] = {
        "experience_id": ids,
        "group_id": ids,
        "task_id": ids,
        "rollout_index": [0] * len(ids),
        "taskset": [taskset] * len(ids),
        "task_key": [task["task_key"] for task in tasks],
        "prompt": [_shown_prompt(payload["prompt"]) for payload in payloads],
        "answer": [payload["answer"] for payload in payloads],
        "metadata": [json.dumps(p["metadata"]) for p in payloads],
        "features": [json.dumps(task["features"]) for task in tasks],
        "reward": [None] * len(ids),
        "attempts": [0] * len(ids),
        "num_groups": [0] * len(ids),
        "num_draws": [0] * len(ids),
    }
    schema = pa.schema([column for column in TASK_BATCH_SCHEMA if column.name in values])
    return pa.table([pa.array(values[column.name], column.type) for column in schema], schema=schema)


def _shown_prompt(prompt: Any) -> str:
    """Return the prompt as the query task_batch shows it."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        return "\n".join(str(turn.get("content")) for turn in prompt if isinstance(turn, dict))
    return json.dumps(prompt)


def read_stored_task_scores(
    database: Database, task_ids: Sequence[int], score_keys: Sequence[str]
) -> dict[str, dict[int, StoredScore]]:
    """Return stored scores of the tasks: score key -> task id -> score."""
    stored: dict[str, dict[int, StoredScore]] = {}
    if score_keys:
        for row in database.fetch("stored_task_scores", task_ids=list(task_ids), score_keys=list(score_keys)):
            score = StoredScore(row["input_digest"], row["scores"])
            stored.setdefault(row["score_key"], {})[row["task_id"]] = score
    return stored


def commit_task_verdicts(
    database: Database,
    taskset: str,
    pipeline_version: str,
    verdicts: Verdicts,
    changes: Mapping[int, TaskChange] | None = None,
) -> None:
    """Store verdicts, stage runs and created tasks in one transaction. Tasks created for this set wait for a verdict.

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
    rows = (_verdict_row(row, (changes or {}).get(row["experience_id"])) for row in verdicts.decisions.to_pylist())
    made = verdicts.tasks
    with database.transaction() as connection:
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
        _save_scores(connection, verdicts.scores)


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


def _save_scores(connection: Connection, scores: Sequence[StageScores]) -> None:
    """Store scores, except those that ended in an error, whose calls are made again."""
    newest = {
        (key, found.score_key): (found.stage, values, digest)
        for found in scores
        for key, values, error, digest in found.rows()
        if error is None
    }
    if newest:
        execute(
            connection,
            "save_task_scores",
            task_ids=[key for key, _ in newest],
            score_keys=[key for _, key in newest],
            stages=[stage for stage, _, _ in newest.values()],
            scores=[json.dumps(storable(values)) for _, values, _ in newest.values()],
            input_digests=[digest for *_, digest in newest.values()],
        )


@dataclass(frozen=True, kw_only=True)
class TasksetState:
    """Number of a set's tasks by status, and of excluded ones by stage (or `by hand`)."""

    num_tasks: int
    active: int
    excluded: int
    dropped_by: dict[str, int] | None


def taskset_state(database: Database, taskset: str) -> TasksetState:
    """Return the state of a set after its task pipeline and changes by hand."""
    return records(TasksetState, database.fetch("taskset_verdicts", taskset=taskset))[0]


def show_tasks(
    database: Database, taskset: str, *, order: str | None = None, limit: int = 20, status: str | None = None
) -> list[Row]:
    """Return tasks of a set with features and current verdict, by id or by a numeric feature, highest first.

    Raises:
        ConfigError: the taskset does not exist, or no task of it has that feature.
    """
    if not database.fetch("find_taskset", taskset=taskset):
        known = [row["taskset"] for row in database.fetch("list_tasksets")]
        raise ConfigError("unknown taskset", value=taskset, allowed=", ".join(known) or "none is loaded")
    if order is not None:
        names = [row["key"] for row in database.fetch("task_feature_names", taskset=taskset)]
        if order not in names:
            raise ConfigError(
                f"no task of {taskset!r} has a number {order!r} among its features",
                allowed=", ".join(names) or "none",
                todo="let a stage of pipelines.task compute it, and run `rft tasks load CONFIG`",
            )
    return database.fetch("show_tasks", taskset=taskset, feature=order or "", limit=limit, status=status)
