"""Loading of tasks. Tasks are stored once: new tasks of a source are added, and stored ones keep their ids, scores and history.

A source is read again if it may have changed (see `sources.Fingerprint`). Stored tasks stay comparable: once a group was planned
for a task of the set, or the set was part of an evaluation, a task with different content is refused, never silently kept or
changed. Additions of a task pipeline or a person are not part of that content. A task that was removed from its source stays, and
new tasks never exceed `limit`. Rows are streamed from the source to the database (COPY), whatever their number.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from psycopg.types.json import Jsonb

from rftdata.config import TasksetConfig
from rftdata.errors import TaskSourceError
from rftdata.limits import check_json
from rftdata.postgres.database import Connection, Database, Row, copy_rows, execute, fetch
from rftdata.postgres.locks import Lock, holding
from rftdata.tasks.rows import Reading, read_tasks
from rftdata.tasks.sources import Fingerprint, fingerprint

_UNSET = object()
_COLUMNS = [("position", "int8"), ("task_key", "text"), ("payload", "jsonb"), ("features", "jsonb")]


class TaskCheck(Protocol):
    """A caller's requirements on the tasks of a source; either method raises a TaskSourceError to refuse them."""

    def see(self, task: Mapping[str, Any]) -> None:
        """Check the next task of `read_tasks`."""

    def refuse_all(self) -> None:
        """Refuse the source after its last task, if no task is acceptable."""


def load_taskset(
    database: Database, config: TasksetConfig, base_dir: Path, *, pending: bool = False, check: TaskCheck | None = None
) -> int:
    """Load a taskset; return its number of tasks. Prints to stderr which rows were left out, and which tasks left the source.

    Args:
        base_dir: folder from which relative paths in the source start.
        pending: new tasks wait for the verdict of a task pipeline before they can be selected. If false, tasks that still wait
            for a verdict become selectable.
        check: called with every task, before any is stored.

    Raises:
        TaskSourceError: the source is unreadable, a column is missing, no task is left, the name belongs to another source, tasks
            changed after they were used, or `check` refuses.
    """
    known = _stored_taskset(database, config)
    now = fingerprint(config, base_dir)
    if known is not None and _matches_source(known, now):
        if not pending:
            database.run("activate_pending_tasks", taskset=config.name)
        return int(known["num_tasks"])
    reading = Reading()
    with contextlib.ExitStack() as locks, database.transaction() as connection:
        execute(connection, "stage_tasks")
        tasks = _CountedTasks(read_tasks(config, base_dir, database, reading), check)
        copy_rows(connection, "staged_task", _COLUMNS, tasks.rows())
        if not tasks.number:
            raise no_task(config, reading)
        if check is not None:
            check.refuse_all()
        execute(connection, "analyze_staged_tasks")
        # Waits for a task pipeline that is deciding on the set; a later one waits until these rows are stored.
        locks.enter_context(holding(database, Lock("taskset", object=config.name), wait_s=math.inf))
        _replace_changed(connection, config.name)
        num_over = _merge(connection, config, "pending" if pending else "active")
        if not pending:
            execute(connection, "activate_pending_tasks", taskset=config.name)
        whole = config.limit is None or tasks.number < config.limit
        execute(connection, "mark_left_tasks", taskset=config.name, whole=whole)
        counts = fetch(connection, "count_tasks", taskset=config.name)[0]
        num_tasks = int(counts["n"])
        check_json(f"the arguments of the taskset {config.name!r}", _arguments(config))
        execute(
            connection,
            "save_taskset",
            taskset=config.name,
            source=config.source,
            args=Jsonb({**_arguments(config), "digest": now.digest}),
            num_tasks=num_tasks,
        )
    for sentence in _sentences(config, reading, num_over, counts["num_left"]):
        print(f"tasks: {config.name}: {sentence}", file=sys.stderr, flush=True)
    return num_tasks


def _merge(connection: Connection, config: TasksetConfig, status: str) -> int:
    """Add new tasks up to the set's limit; return how many rows are left out because of it."""
    if config.limit is None:
        execute(connection, "merge_tasks", taskset=config.name, status=status, room=None)
        return 0
    counts = fetch(connection, "count_room", taskset=config.name)[0]
    room = max(config.limit - int(counts["num_stored"]), 0)
    execute(connection, "merge_tasks", taskset=config.name, status=status, room=room)
    return max(int(counts["num_new"]) - room, 0)


def no_task(config: TasksetConfig, reading: Reading) -> TaskSourceError:
    """Return the error for a source that was read and contains no task."""
    splits = f": {reading.splits.sentence()}" if reading.splits.num_tasks else ""
    return TaskSourceError(
        f"the taskset {config.name!r} has no task{splits}",
        value=config.source,
        todo="check its split, limit and arguments",
    )


def _sentences(config: TasksetConfig, reading: Reading, num_over: int, num_left: int) -> Iterator[str]:
    """Yield messages about a load."""
    yield from reading.sentences()
    if num_over:
        yield (
            f"with the stored tasks the limit of {config.limit:,} is reached; new rows of the source that are "
            f"left out: {num_over:,}"
        )
    if num_left:
        name = config.name.replace("'", "''")
        yield (
            f"tasks that are not in the source (any more): {num_left:,}; they stay, and may be selected until you exclude them: "
            f"UPDATE rft.task SET status = 'excluded' WHERE taskset = '{name}' AND left_source_at IS NOT NULL"
        )


def is_current(database: Database, config: TasksetConfig, base_dir: Path) -> bool:
    """Return whether the stored set matches its source, so that loading reads nothing.

    Raises:
        TaskSourceError: the buffer has another set with this name.
    """
    known = _stored_taskset(database, config)
    return known is not None and _matches_source(known, fingerprint(config, base_dir))


def _stored_taskset(database: Database, config: TasksetConfig) -> Row | None:
    """Return the stored set, or None."""
    rows = database.fetch("find_taskset", taskset=config.name)
    if not rows:
        return None
    stored = {key: value for key, value in rows[0]["args"].items() if key != "digest"}
    differences = [
        *_differences("source", rows[0]["source"], config.source),
        *_differences("", stored, _arguments(config)),
    ]
    if differences:
        raise TaskSourceError(
            f"the buffer already holds a taskset {config.name!r} from another source or with other arguments "
            f"(stored -> configured): {', '.join(differences)}",
            todo="restore what differs, give this one another name, or use another buffer",
        )
    return rows[0]


def _differences(key: str, stored: Any, asked: Any) -> Iterator[str]:
    """Yield `key: stored -> configured` for every argument that differs; arguments of a source by their path."""
    if isinstance(stored, dict) and isinstance(asked, dict):
        for name in sorted({*stored, *asked}):
            # The name in the configuration.
            called = "split_shares" if name == "shares" and not key else name
            yield from _differences(
                f"{key}.{called}" if key else called, stored.get(name, _UNSET), asked.get(name, _UNSET)
            )
    elif stored != asked:
        yield f"{key}: {_argument(stored)} -> {_argument(asked)}"


def _argument(value: Any) -> str:
    return "not set" if value is _UNSET or value is None else json.dumps(value, ensure_ascii=False)


def _arguments(config: TasksetConfig) -> dict[str, Any]:
    """Return the arguments that define a set in addition to its source, as stored: without a password, see TasksetConfig."""
    plain = config.model_dump(mode="json")
    args = {key: plain[key] for key in ("args", "split", "limit")}
    args |= {
        "prompt": config.prompt or "question",
        "answer": config.answer or "answer",
        "shares": plain["split_shares"],
    }
    return args | ({"split_key": config.split_key} if config.split_key is not None else {})


def _matches_source(known: Row, now: Fingerprint) -> bool:
    """Return whether the stored set still matches its source."""
    return not now.volatile and (now.unreachable or now.digest == known["args"].get("digest"))


class _CountedTasks:
    """Tasks on their way to the database, counted and checked."""

    def __init__(self, tasks: Iterable[dict[str, Any]], check: TaskCheck | None) -> None:
        self._tasks, self._check = tasks, check
        self.number = 0

    def rows(self) -> Iterator[tuple[Any, ...]]:
        for task in self._tasks:
            if self._check is not None:
                self._check.see(task)
            yield self.number, task["task_key"], task["payload"], task["features"]
            self.number += 1


def _replace_changed(connection: Connection, taskset: str) -> None:
    """Update stored tasks to their current content, unless the set was already used."""
    changed = fetch(connection, "changed_tasks", taskset=taskset)[0]
    if not changed["n"]:
        return
    if fetch(connection, "taskset_is_used", taskset=taskset)[0]["used"]:
        raise TaskSourceError(
            f"{changed['n']} of the tasks stored as {taskset!r} now differ from their source, but the set was "
            f"already used; for example task {changed['task_key']!r} was {_excerpt(changed['stored'])}",
            value=_excerpt(changed["now"]),
            todo="give the changed taskset another name, or restore its source",
        )
    execute(connection, "replace_tasks", taskset=taskset)


def _excerpt(payload: dict[str, Any]) -> str:
    text = json.dumps(payload, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:299]}…"
