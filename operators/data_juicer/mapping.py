"""A mapper at work: what it changed, the tags it found, the columns it added, and the tasks it made."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from operators.data_juicer import runtime
from operators.data_juicer.base import Found, JuicerOperator
from operators.data_juicer.columns import column_of, plain
from operators.data_juicer.making import made_tasks
from operators.data_juicer.runtime import META, ROW, STATS, Samples
from operators.data_juicer.source import meta_type
from rftdata.errors import OperatorError

_NOTHING: tuple[Any, ...] = (None, "", [], {})


def mapped(stage: JuicerOperator, samples: Samples, table: pa.Table) -> Found:
    """What a mapper makes of rows.

    Raises:
        OperatorError: it made other rows of experiences.
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
                todo="use it on tasks (pipelines.task), where each becomes a task",
            )
        return Found(*made_tasks(stage.name, stage.plan, samples, result, rows, table))
    return Found(None, _changed(stage, samples, result, table))


def _changed(stage: JuicerOperator, samples: Samples, result: Samples, table: pa.Table) -> dict[str, pa.Array]:
    """Columns that a mapper changed or added."""
    columns = {}
    for source in stage.plan.sources:
        values = result.get(source.name) if source.name in samples else None
        if values is not None and list(values) != samples[source.name]:
            columns[source.column] = source.write(table, list(values))
    metas = result.get(META, [])
    for name, column in stage.plan.made.items():
        if column in stage.scores or any(name in meta for meta in metas):
            columns[column] = column_of([plain(meta.get(name)) for meta in metas], meta_type(name))
    if stage.error_column:
        empty = [all(plain(meta.get(name)) in _NOTHING for name in stage.plan.made) for meta in metas]
        columns[stage.error_column] = pa.array(
            ["the endpoint gave nothing" if bad else None for bad in empty], pa.string()
        )
    known = {*samples, META, STATS}
    for name in result.keys() - known if stage.writes is None else ():
        columns[name] = _new_column([plain(value) for value in result[name]])
    return columns


def _new_column(values: list[Any]) -> pa.Array:
    """A column that a mapper added under a name of its own."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array(
            [value if isinstance(value, str | None) else json.dumps(value) for value in values], pa.string()
        )
