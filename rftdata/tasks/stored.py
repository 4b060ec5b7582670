"""Stored tasksets: what the buffer has of each, for people, for checks before a run, and for stages that compare with a set."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from rftdata.errors import ConfigError
from rftdata.postgres.database import Database, Row, records


def taskset_texts(database: Database, taskset: str) -> pa.Table:
    """Return `task_key`, `prompt` and `answer` (texts) of a set's tasks, in the order in which they were stored.

    Raises:
        ConfigError: the buffer has no such set, or the set has no task.
    """
    rows = database.fetch("taskset_texts", taskset=taskset)
    if not rows:
        known = ", ".join(row["taskset"] for row in list_tasksets(database))
        raise ConfigError("the buffer has no task of this set", value=taskset, allowed=known or "none is loaded yet")
    names = ("task_key", "prompt", "answer")
    return pa.table({name: pa.array([row[name] for row in rows], pa.string()) for name in names})


@dataclass(frozen=True, kw_only=True)
class Unanswered:
    """Tasks of a set that can be selected, how many of them have no answer or a blank one, and the keys of the first of these."""

    num_tasks: int
    num_lacking: int
    task_keys: list[str]


def tasks_without_answer(database: Database, taskset: str, num_keys: int) -> Unanswered:
    """Count the tasks of a set that have no answer; with up to `num_keys` of their keys."""
    rows = database.fetch("tasks_without_answer", taskset=taskset, num_keys=num_keys)
    return records(Unanswered, rows)[0]


def list_tasksets(database: Database) -> list[Row]:
    """Return the tasksets of the buffer, with the number of selectable tasks and the means of their scores."""
    return database.fetch("list_tasksets")


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


def all_have_number(database: Database, taskset: str, key: str) -> bool:
    """Whether a set has tasks to select, and each of them this feature as a number."""
    numbers = database.fetch("task_numbers", taskset=taskset, key=key)[0]["numbers"]
    return bool(numbers) and all(number is not None for number in numbers)


def set_by_hand(database: Database, taskset: str, key: str) -> dict[str, bool]:
    """Keys of the tasks whose feature a person set, and whether it is a number."""
    found: dict[str, bool] = database.fetch("features_by_hand", taskset=taskset, key=key)[0]["are_numbers"]
    return found
