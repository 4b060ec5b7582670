"""Mappers: the columns they change or add, the tags they set, and the tasks they create."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from operators.base import CreatedTask
from operators.data_juicer import runtime
from operators.data_juicer.base import JuicerOperator, JuicerOutcome
from operators.data_juicer.columns import Plan, column_of, plain
from operators.data_juicer.runtime import META, ROW, STATS, Samples
from rftdata.errors import OperatorError

_NOTHING: tuple[Any, ...] = (None, "", [], {})


def mapped(stage: JuicerOperator, samples: Samples, table: pa.Table) -> JuicerOutcome:
    """Run a mapper on rows.

    Raises:
        OperatorError: it changed the number of rows of experiences.
    """
    num_rows, is_task = table.num_rows, "task_key" in table.column_names
    marks = {ROW: list(range(num_rows))} if is_task else {}
    result = runtime.process(stage.op, {**samples, **marks}, num_rows, tags=stage.facts.tags)
    rows = list(result.pop(ROW, range(num_rows)))
    lengths = {len(values) for name, values in result.items() if name in samples} or {num_rows}
    if lengths != {num_rows} or rows != list(range(num_rows)):
        if not is_task:
            raise OperatorError(
                f"{stage.name} made {max(lengths)} rows of {num_rows}",
                allowed="on experiences, mappers that give one row for one row",
                todo="use it on tasks (pipelines.task), where each row becomes a task",
            )
        return JuicerOutcome(*_made_tasks(stage.name, stage.plan, samples, result, rows, table))
    return JuicerOutcome(None, _changed(stage, samples, result, table))


def _changed(stage: JuicerOperator, samples: Samples, result: Samples, table: pa.Table) -> dict[str, pa.Array]:
    """Return the columns that a mapper changed or added."""
    columns = {}
    for source in stage.plan.sources:
        values = result.get(source.name) if source.name in samples else None
        if values is not None and list(values) != samples[source.name]:
            columns[source.column] = source.write(table, list(values))
    metas = result.get(META, [])
    for name, column in stage.plan.made.items():
        if column.name in stage.scores or any(name in meta for meta in metas):
            columns[column.name] = column_of([plain(meta.get(name)) for meta in metas], column.type)
    if stage.error_column:
        empty = [all(plain(meta.get(name)) in _NOTHING for name in stage.plan.made) for meta in metas]
        columns[stage.error_column] = pa.array(
            ["the endpoint gave nothing" if bad else None for bad in empty], pa.string()
        )
    own = {*samples, META, STATS}
    for name in result.keys() - own if stage.writes is None else ():
        columns[name] = _new_column([plain(value) for value in result[name]])
    return columns


def _new_column(values: list[Any]) -> pa.Array:
    """Return a column that a mapper added under its own name."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array(
            [value if isinstance(value, str | None) else json.dumps(value) for value in values], pa.string()
        )


def _made_tasks(
    name: str, plan: Plan, samples: Samples, result: Samples, rows: Sequence[int], table: pa.Table
) -> tuple[list[str | None], dict[str, pa.Array], list[CreatedTask]]:
    """Return reasons, changed columns and new tasks of a mapper that changed the number of rows.

    A task with several result rows, or none, is dropped; a task with a single result row continues as that row.

    Args:
        rows: for each row of `result`, the row of `table` it comes from.
    """
    made: dict[int, list[int]] = {row: [] for row in range(table.num_rows)}
    for position, row in enumerate(rows):
        made[row].append(position)
    sources = [source for source in plan.sources if source.name in samples]
    kept = {source.name: list(samples[source.name]) for source in sources}
    reasons: list[str | None] = [None] * table.num_rows
    created: list[CreatedTask] = []
    metas: Sequence[Mapping[str, Any]] = result.get(META) or ()
    for row, positions in made.items():
        if len(positions) == 1:
            for key in kept:
                kept[key][row] = result[key][positions[0]]
            continue
        reasons[row] = f"{name} made {len(positions)} tasks of it" if positions else f"{name} made nothing of it"
        parent = table.slice(row, 1).to_pylist()[0]
        for number, position in enumerate(positions):
            values = {source.column: result[source.name][position] for source in sources if not source.path}
            tags = {tag: plain(value) for tag, value in metas[position].items() if tag in plan.made} if metas else {}
            created.append(_task({**parent, **values}, f"{parent['task_key']}/{name}/{number}", tags))
    changed = [source for source in sources if kept[source.name] != samples[source.name]]
    return reasons, {source.column: source.write(table, kept[source.name]) for source in changed}, created


def _task(row: Mapping[str, Any], key: str, tags: Mapping[str, Any]) -> CreatedTask:
    """Return a task like its parent; its metadata has the tags that the operator gave this row."""
    payload = {name: row[name] for name in ("prompt", "answer") if row.get(name) is not None}
    if row.get("metadata") or tags:
        payload["metadata"] = {**json.loads(row.get("metadata") or "{}"), **tags}
    return CreatedTask(str(row.get("taskset") or ""), key, payload, row["experience_id"])
