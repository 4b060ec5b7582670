"""What is said of rows that a Data-Juicer operator drops, and the tasks that it makes of one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from operators.base import CreatedTask
from operators.data_juicer.columns import Plan, plain
from operators.data_juicer.runtime import META, Samples
from operators.data_juicer.source import DATA_KEYS


def reasons_of(op: Any, name: str, args: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], str]:
    """What to say of a dropped row: the statistic against the bound it broke, as in `text_len 3 < min_len 10`."""
    bounds = {
        key: value
        for key, value in vars(op).items()
        if key.startswith(("min_", "max_")) and isinstance(value, int | float) and not isinstance(value, bool)
    }
    lower = [(f"< {key} {_number(value)}", value) for key, value in bounds.items() if key.startswith("min_")]
    upper = [(f"> {key} {_number(value)}", value) for key, value in bounds.items() if key.startswith("max_")]
    wanted = ", ".join(f"{key} {value}" for key, value in (args or bounds).items() if key not in DATA_KEYS)

    def reason(stats: Mapping[str, Any]) -> str:
        if len(stats) == 1:
            ((statistic, value),) = stats.items()
            if isinstance(value, int | float):
                for bound, limit in lower:
                    if value < limit:
                        return f"{statistic} {_number(value)} {bound}"
                for bound, limit in upper:
                    if value > limit:
                        return f"{statistic} {_number(value)} {bound}"
        found = ", ".join(
            f"{key} is {_number(value)}" for key, value in stats.items() if isinstance(value, int | float | str | list)
        )
        return f"{name}: {found or 'its condition is false'}" + (f" ({wanted})" if wanted else "")

    return reason


def _number(value: object) -> str:
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list):
        return "[" + ", ".join(_number(inner) for inner in value) + "]"
    if isinstance(value, float):
        return f"{int(value)}" if value.is_integer() and abs(value) < 1e15 else f"{value:.6g}"
    return str(value)


def made_tasks(
    name: str, plan: Plan, samples: Samples, result: Samples, rows: Sequence[int], table: pa.Table
) -> tuple[list[str | None], dict[str, pa.Array], list[CreatedTask]]:
    """Reasons, changed columns and new tasks, of a mapper that made other rows than it was given.

    A task that it made several of, or nothing, is dropped; one that it made a single row of goes on as that.

    Args:
        rows: for each row of `result` the row of `table` that it was made of.
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
        given = table.slice(row, 1).to_pylist()[0]
        for number, position in enumerate(positions):
            values = {source.column: result[source.name][position] for source in sources if not source.path}
            tags = {tag: plain(value) for tag, value in metas[position].items() if tag in plan.made} if metas else {}
            created.append(_task({**given, **values}, f"{given['task_key']}/{name}/{number}", tags))
    changed = [source for source in sources if kept[source.name] != samples[source.name]]
    return reasons, {source.column: source.write(table, kept[source.name]) for source in changed}, created


def _task(row: Mapping[str, Any], key: str, tags: Mapping[str, Any]) -> CreatedTask:
    """A task like the one it was made of; its metadata has the tags that the operator gave this row of several."""
    payload = {name: row[name] for name in ("prompt", "answer") if row.get(name) is not None}
    if row.get("metadata") or tags:
        payload["metadata"] = {**json.loads(row.get("metadata") or "{}"), **tags}
    return CreatedTask(str(row.get("taskset") or ""), key, payload, row["experience_id"])
