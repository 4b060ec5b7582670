"""Tasks on their way through a task pipeline: batches of them for its stages, and what was decided, stored.

A batch looks like one of experiences to the stages: `experience_id` and `group_id` are the task's id, every task a group of its
own. Stages see what the source gave; what an earlier version made of it does not shine through, so a version decides the same
whenever it runs. Verdicts are appended; `rft.task` has status, features and texts as the verdict that stands wants them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from psycopg.types.json import Jsonb

from rftdata.errors import ConfigError, OperatorError
from rftdata.pipeline.records import KnownScore, StageCount
from rftdata.pipeline.verdicts import STAGE_FAILED
from rftdata.postgres.database import Connection, Database, Row, copy_rows, execute, fetch, storable

TASK_BATCH_SCHEMA = pa.schema(
    [
        ("experience_id", pa.int64()), ("group_id", pa.int64()), ("rollout_index", pa.int32()), ("task_id", pa.int64()),
        ("taskset", pa.string()), ("task_key", pa.string()), ("prompt", pa.string()), ("answer", pa.string()),
        ("metadata", pa.string()), ("features", pa.string()), ("reward", pa.float64()), ("attempts", pa.int64()),
        ("num_groups", pa.int64()), ("num_draws", pa.int64()), ("priority", pa.float64()),
    ]
)  # fmt: skip
"""What stages may read of a task. `prompt`: its text, of a chat its contents. `metadata` and `features` (of the source) are JSON texts.
`attempts` groups were observed over all runs, and `reward` is their mean reward; null before the first. `num_groups` groups were
tried, and drawn for training `num_draws` times. `priority` is 0 until a stage sets it."""

BLOCKED = "the stage blocks its process: "
"""How the reason of a task begins that is not decided on again by the same stages."""

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
        table: with the columns that were asked for.
        is_text: per row, whether the prompt is a text, which stages may change, and no chat.
    """

    table: pa.Table
    is_text: list[bool]


@dataclass(frozen=True)
class TaskDecision:
    """What a chain made of one task.

    Attributes:
        features: columns that stages added or changed.
        prompt, answer: the new texts where stages changed them.
        answer_changed: whether `answer` is one (it may be None).
    """

    task_id: int
    kept: bool
    stage: str | None
    reason: str | None
    features: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | None = None
    answer: str | None = None
    answer_changed: bool = False


@dataclass(frozen=True)
class MadeTask:
    """A task that a stage made of another; its features name both."""

    taskset: str
    task_key: str
    payload: Mapping[str, Any]
    features: Mapping[str, Any]
    parent_id: int
    stage: str


@dataclass(frozen=True)
class TaskScore:
    """What a scoring stage found out about a task; see `rftdata.pipeline.records.Score`."""

    task_id: int
    score_key: str
    stage: str
    scores: Mapping[str, Any]
    input_digest: int | None


def register_task_pipeline(database: Database, version: str, stages: Sequence[Mapping[str, Any]]) -> None:
    """Note which stages a version has, so that verdicts of long ago can be understood."""
    plain = storable(json.loads(json.dumps(list(stages), default=str)))
    database.fetch("register_pipeline", version=version, digest=version, stages=Jsonb(plain))


@contextmanager
def taskset_lock(database: Database, taskset: str) -> Iterator[None]:
    """Held while a set is decided on: another process that loads or decides on it waits."""
    connection = database.dedicated()
    try:
        execute(connection, "hold_taskset", taskset=taskset)
        yield
    finally:
        connection.close()


def undecided_tasks(
    database: Database, taskset: str, pipeline_version: str, *, again: bool = False, failed_too: bool = False
) -> list[int]:
    """Ids of the tasks whose standing verdict is of another version, ascending.

    Args:
        again: all tasks.
        failed_too: also those that are excluded because a stage failed on them.
    """
    row = database.fetch(
        "undecided_tasks", taskset=taskset, pipeline_version=pipeline_version, again=again,
        failure=f"{STAGE_FAILED}%" if failed_too else None,
    )[0]  # fmt: skip
    return list(row["task_ids"])


def decidable_tasks(database: Database, taskset: str, *, leave_out_blocked_by: str | None = None) -> list[int]:
    """Ids of all tasks of a set but purged ones, and those that block a stage of this pipeline version, ascending."""
    row = database.fetch("decidable_tasks", taskset=taskset, version=leave_out_blocked_by, blocked=f"{BLOCKED}%")[0]
    return list(row["task_ids"])


def tasks_by_maker(database: Database, task_ids: Sequence[int]) -> dict[tuple[str, ...], list[int]]:
    """The same ids by the stages that made the tasks, and the tasks they made them of; () for those of the source."""
    rows = database.fetch("makers_of_tasks", task_ids=list(task_ids))
    makers = {row["task_id"]: tuple(row["made_by"]) for row in rows}
    found: dict[tuple[str, ...], list[int]] = {}
    for task_id in task_ids:
        found.setdefault(makers.get(task_id, ()), []).append(task_id)
    return found


class TaskReader:
    """Reads tasks of one set with the columns that the stages want.

    Args:
        columns: of `TASK_BATCH_SCHEMA`; the identity columns and `reward` are always there.
    """

    def __init__(self, database: Database, taskset: str, columns: Collection[str]) -> None:
        wanted = {*columns, "experience_id", "group_id", "rollout_index", "reward"} - {"priority"}
        self._database = database
        self._schema = pa.schema([column for column in TASK_BATCH_SCHEMA if column.name in wanted])
        # Counted over all runs at once and not for each batch: groups are not indexed by task.
        asked = sorted({_USAGE[name] for name in wanted & set(_USAGE) if name in columns})
        self._usage: dict[str, list[Row]] = {name: database.fetch(name, taskset=taskset) for name in asked}
        self._ids = {name: np.array([row["task_id"] for row in rows], np.int64) for name, rows in self._usage.items()}

    def read(self, task_ids: Sequence[int]) -> TaskBatch:
        """The tasks of these ids, in their order; purged ones are left out."""
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
        """Counts of tasks; 0, or null for a reward, where no run has tried them."""
        missing = None if column == "reward" else 0
        rows, known = self._usage.get(_USAGE[column], []), self._ids.get(_USAGE[column])
        if known is None or not len(known):
            return [missing] * len(ids)
        places = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        return [rows[place][column] if known[place] == key else missing for place, key in zip(places, ids)]


def source_batch(taskset: str, tasks: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Tasks of `read_tasks` as stages would see them, under ids from 1 and never tried; nothing is stored."""
    ids = list(range(1, len(tasks) + 1))
    payloads = [task["payload"] for task in tasks]
    values: dict[str, list[Any]] = {
        "experience_id": ids, "group_id": ids, "task_id": ids, "rollout_index": [0] * len(ids), "taskset": [taskset] * len(ids),
        "task_key": [task["task_key"] for task in tasks], "prompt": [_shown_prompt(payload["prompt"]) for payload in payloads],
        "answer": [payload["answer"] for payload in payloads], "metadata": [json.dumps(p["metadata"]) for p in payloads],
        "features": [json.dumps(task["features"]) for task in tasks], "reward": [None] * len(ids), "attempts": [0] * len(ids),
        "num_groups": [0] * len(ids), "num_draws": [0] * len(ids),
    }  # fmt: skip
    schema = pa.schema([column for column in TASK_BATCH_SCHEMA if column.name in values])
    return pa.table([pa.array(values[column.name], column.type) for column in schema], schema=schema)


def _shown_prompt(prompt: Any) -> str:
    """As the query task_batch shows it."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        return "\n".join(str(turn.get("content")) for turn in prompt if isinstance(turn, dict))
    return json.dumps(prompt)


def known_scores(database: Database, batch: TaskBatch, score_keys: Sequence[str]) -> dict[str, dict[int, KnownScore]]:
    """Scores that are stored for the tasks: score key -> task id -> score."""
    if not score_keys:
        return {}
    rows = database.fetch(
        "known_task_scores", task_ids=batch.table["experience_id"].to_pylist(), score_keys=list(score_keys)
    )  # fmt: skip
    known: dict[str, dict[int, KnownScore]] = {}
    for row in rows:
        known.setdefault(row["score_key"], {})[row["task_id"]] = KnownScore(row["input_digest"], row["scores"])
    return known


def commit_task_verdicts(
    database: Database, taskset: str, pipeline_version: str, decisions: Sequence[TaskDecision], stages: Sequence[StageCount],
    scores: Sequence[TaskScore] = (), made: Sequence[MadeTask] = (),
) -> None:  # fmt: skip
    """Store what was decided, what each stage did and what it made, in one transaction. Tasks made for this set wait for a verdict.

    Raises:
        OperatorError: a task that was tried already would get another prompt or answer.
    """
    columns = [
        ("task_id", "int8"), ("kept", "bool"), ("stage", "text"), ("reason", "text"), ("features", "jsonb"), ("prompt", "text"),
        ("answer", "text"), ("answer_changed", "bool"),
    ]  # fmt: skip
    rows = (
        (
            d.task_id, d.kept, d.stage, storable(d.reason), storable(dict(d.features)), storable(d.prompt), storable(d.answer),
            d.answer_changed,
        )
        for d in decisions
    )  # fmt: skip
    with database.transaction() as connection:
        execute(connection, "stage_task_verdicts")
        copy_rows(connection, "staged_verdict", columns, rows)
        changed = fetch(connection, "tried_tasks_that_change")[0]
        if changed["n"]:
            raise OperatorError(
                f"the task pipeline changes the prompt or answer of {changed['n']} tasks of {taskset!r} that were tried already, "
                f"task {changed['task_id']} for one: what is known of them would be about another text",
                todo="give the taskset another name, so that its tasks are loaded anew, or leave their texts as they are",
            )
        execute(connection, "save_task_verdicts", pipeline_version=pipeline_version)
        _insert_operator_runs(connection, taskset, pipeline_version, stages)
        if made:
            execute(
                connection, "make_tasks_of_tasks", taskset=taskset, tasksets=[m.taskset or taskset for m in made],
                task_keys=[m.task_key for m in made], payloads=[json.dumps(storable(dict(m.payload))) for m in made],
                features=[json.dumps(storable(dict(m.features))) for m in made], parents=[m.parent_id for m in made],
                stages=[m.stage for m in made],
            )  # fmt: skip
        if scores:
            execute(
                connection, "save_task_scores", task_ids=[s.task_id for s in scores], score_keys=[s.score_key for s in scores],
                stages=[s.stage for s in scores], scores=[json.dumps(storable(dict(s.scores))) for s in scores],
                input_digests=[s.input_digest for s in scores],
            )  # fmt: skip


def _insert_operator_runs(
    connection: Connection, taskset: str, pipeline_version: str, stages: Sequence[StageCount]
) -> None:
    columns = [
        ("taskset", "text"), ("pipeline_version", "text"), ("stage_index", "int4"), ("stage", "text"), ("rows_in", "int4"),
        ("rows_kept", "int4"), ("rows_dropped", "int4"), ("rows_created", "int4"), ("seconds", "float8"), ("error", "text"),
    ]  # fmt: skip
    rows = (
        (
            taskset, pipeline_version, s.index, s.stage, s.rows_in, s.rows_kept, s.rows_dropped, s.rows_created, s.seconds,
            storable(s.error),
        )
        for s in stages
    )  # fmt: skip
    copy_rows(connection, "rft.operator_run", columns, rows)


def show_tasks(
    database: Database, taskset: str, *, order: str | None = None, limit: int = 20, status: str | None = None
) -> list[Row]:
    """Tasks of a set with features and the verdict that stands: by id, or by a number among their features, highest first.

    Raises:
        ConfigError: no such taskset, or no task of it has that feature.
    """
    if not database.fetch("find_taskset", taskset=taskset):
        known = [row["taskset"] for row in database.fetch("list_tasksets")]
        raise ConfigError("the buffer has no such taskset", value=taskset, allowed=", ".join(known) or "none is loaded")
    if order is not None:
        names = [row["key"] for row in database.fetch("task_feature_names", taskset=taskset)]
        if order not in names:
            raise ConfigError(
                f"no task of {taskset!r} has a number {order!r} among its features", allowed=", ".join(names) or "none",
                todo="let a stage of pipelines.task compute it, and run `rft tasks load CONFIG`",
            )  # fmt: skip
    return database.fetch("show_tasks", taskset=taskset, feature=order or "", limit=limit, status=status)
