"""Batches of tasks for the stages of a task pipeline.

For stages, a batch looks like one of experiences: `experience_id` and `group_id` are the task's id, and every task is a separate
group. Stages see the task as given by the source, without changes by earlier versions, so a version decides the same
whenever it runs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rftdata.postgres.database import Database, Row

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
        "prompt": [_prompt_text(payload["prompt"]) for payload in payloads],
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


def _prompt_text(prompt: Any) -> str:
    """Return the prompt as the query task_batch shows it."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        return "\n".join(str(turn.get("content")) for turn in prompt if isinstance(turn, dict))
    return json.dumps(prompt)
