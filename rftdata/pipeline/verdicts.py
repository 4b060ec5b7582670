"""Verdicts on sealed groups, stored in one transaction with scores, questions to people and new tasks.

A group that was relabelled since its worker claimed it is left out: it stays in the worklist to be decided again. Nothing of a group that was
purged since is stored. A group with an open question waits until it is answered or its deadline has passed, by the database's clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from psycopg.types.json import Jsonb

from rftdata.errors import ConflictError, FencedError
from rftdata.failpoints import failpoint
from rftdata.pipeline.purged import without_purged_groups
from rftdata.pipeline.records import CreatedTask, Question, SealedBatch, StageRun, Verdicts
from rftdata.pipeline.scores import EXPERIENCE_SCORES
from rftdata.postgres import notify
from rftdata.postgres.database import Connection, Database, copy_rows, execute, fetch
from rftdata.postgres.retry import ride_out
from rftdata.postgres.values import storable
from rftdata.run import Run

STAGE_FAILED = "the stage failed: "
"""Prefix of a verdict's reason when a stage raised."""


@dataclass(frozen=True)
class Committed:
    """What became of the groups of a batch.

    Attributes:
        decided: the groups that have verdicts now.
        num_purged: number of groups that were purged since they were claimed.
    """

    decided: list[int]
    num_purged: int


def commit_verdicts(
    run: Run,
    worker_id: int,
    pipeline_version: str,
    batch: SealedBatch,
    verdicts: Verdicts,
    *,
    tries: int = 5,
) -> Committed:
    """Store verdicts and make the groups ready, or close those that lost every experience; groups with open questions wait.

    Args:
        tries: number of times the transaction is tried if it conflicts with others.

    Raises:
        FencedError: the run now has another pipeline; nothing was stored.
        ConflictError: all tries conflicted with other transactions; nothing was stored.
    """
    for last_try in [False] * (tries - 1) + [True]:
        try:
            committed = ride_out(lambda: _commit_verdicts(run, worker_id, pipeline_version, batch, verdicts))
            break
        except ConflictError:  # the database aborted the transaction in favour of another: nothing was stored
            if last_try:
                raise
    notify.notify(run.database, notify.READY)
    return committed


def _commit_verdicts(
    run: Run, worker_id: int, pipeline_version: str, batch: SealedBatch, verdicts: Verdicts
) -> Committed:
    """Store verdicts in one transaction. A repetition finds its items gone, and stores the stages once."""
    run_id = run.run_id
    with run.database.transaction() as connection:
        _check_pipeline(connection, run_id, pipeline_version)
        execute(connection, "lock_groups", group_ids=batch.group_ids)
        verdicts, num_purged = without_purged_groups(connection, batch, verdicts)
        held = {
            row["group_id"]
            for row in fetch(connection, "still_claimed", run_id=run_id, worker_id=worker_id, group_ids=batch.group_ids)
        }
        asked = held & {question.group_id for question in verdicts.questions}
        EXPERIENCE_SCORES.store(connection, verdicts.scores)
        ask(connection, run_id, [question for question in verdicts.questions if question.group_id in held])
        make_tasks(connection, verdicts.tasks)
        done = held - asked
        mine = verdicts.decisions.filter(pc.is_in(verdicts.decisions["group_id"], pa.array(sorted(done), pa.int64())))
        insert_verdicts(connection, pipeline_version, batch.label_cuts, mine)
        kept: dict[int, float] = {}
        dropped: dict[int, set[str]] = {group_id: set() for group_id in done}
        for row in mine.select(["group_id", "kept", "stage", "reason", "priority"]).to_pylist():
            if row["kept"]:
                kept[row["group_id"]] = max(row["priority"], kept.get(row["group_id"], -math.inf))
            else:
                dropped[row["group_id"]].add(f"{row['stage']}: {row['reason']}")
        closed = sorted(done - kept.keys())
        execute(connection, "finish_pipeline_items", run_id=run_id, group_ids=sorted(done))
        execute(
            connection,
            "close_groups",
            group_ids=closed,
            reasons=[_closed_reason(dropped[group_id]) for group_id in closed],
        )
        ready_groups(connection, kept)
        if held:
            insert_stage_runs(connection, pipeline_version, verdicts.stages, run_id=run_id, worker_id=worker_id)
        failpoint("pipeline.decided")
    failpoint("pipeline.committed")
    return Committed(sorted(done), num_purged)


def ready_groups(connection: Connection, priorities: dict[int, float]) -> None:
    """Make groups drawable; `priorities` by group id."""
    execute(connection, "ready_groups", group_ids=list(priorities), priorities=list(priorities.values()))


def check_pipeline(run: Run, pipeline_version: str) -> None:
    """Refuse to work for a run that trains on the verdicts of another pipeline version, before anything is claimed.

    Raises:
        FencedError: the versions differ.
    """

    def check() -> None:
        with run.database.transaction() as connection:
            _check_pipeline(connection, run.run_id, pipeline_version)

    ride_out(check)


def _check_pipeline(connection: Connection, run_id: int, pipeline_version: str) -> None:
    run = fetch(connection, "pipeline_of_run", run_id=run_id)[0]
    if run["pipeline_version"] != pipeline_version:
        raise FencedError(
            f"the run {run['name']!r} trains on verdicts of another pipeline version than this worker's",
            value=pipeline_version,
            allowed=run["pipeline_version"],
            todo="restart this pipeline worker with the run's current configuration",
        )


def _closed_reason(reasons: set[str]) -> str:
    return "dropped by " + "; ".join(sorted(reasons)[:3]) if reasons else "no rollout of the group succeeded"


def insert_verdicts(
    connection: Connection, pipeline_version: str, label_cuts: Mapping[int, int], decisions: pa.Table
) -> None:
    """Append verdicts; `label_cuts` has, per group, the newest label or answer that they take into account.

    The caller holds locks on the groups.
    """
    execute(
        connection,
        "supersede_verdicts",
        experience_ids=decisions["experience_id"].to_pylist(),
        pipeline_version=pipeline_version,
    )
    columns = [
        ("experience_id", "int8"),
        ("group_id", "int8"),
        ("pipeline_version", "text"),
        ("kept", "bool"),
        ("stage", "text"),
        ("reason", "text"),
        ("priority", "float8"),
        ("reward", "float8"),
        ("label_cut", "int8"),
    ]
    rows = (
        (
            d["experience_id"],
            d["group_id"],
            pipeline_version,
            d["kept"],
            d["stage"],
            storable(d["reason"]),
            d["priority"],
            d["reward"],
            label_cuts[d["group_id"]],
        )
        for d in decisions.to_pylist()
    )
    copy_rows(connection, "rft.verdict", columns, rows)


def insert_stage_runs(
    connection: Connection,
    pipeline_version: str,
    stages: Sequence[StageRun],
    *,
    run_id: int | None = None,
    worker_id: int | None = None,
    taskset: str | None = None,
) -> None:
    """Store the stage runs on experiences of a run, or on tasks of a set."""
    columns = [
        ("run_id", "int8"),
        ("worker_id", "int8"),
        ("taskset", "text"),
        ("pipeline_version", "text"),
        ("stage_index", "int4"),
        ("stage", "text"),
        ("rows_in", "int4"),
        ("rows_kept", "int4"),
        ("rows_dropped", "int4"),
        ("rows_created", "int4"),
        ("seconds", "float8"),
        ("error", "text"),
    ]
    rows = (
        (
            run_id,
            worker_id,
            taskset,
            pipeline_version,
            s.index,
            s.stage,
            s.rows_in,
            s.rows_kept,
            s.rows_dropped,
            s.rows_created,
            s.seconds,
            storable(s.error),
        )
        for s in stages
    )
    copy_rows(connection, "rft.operator_run", columns, rows)


def ask(connection: Connection, run_id: int, questions: Sequence[Question]) -> None:
    """Store questions that were not asked before, and let their groups wait for the first deadline."""
    if not questions:
        return
    panels = [question.review.panel for question in questions]
    execute(
        connection,
        "ask_questions",
        run_id=run_id,
        experience_ids=[q.experience_id for q in questions],
        group_ids=[q.group_id for q in questions],
        names=[q.review.name for q in questions],
        questions=[storable(q.review.question) for q in questions],
        timeouts=[q.review.timeout_s for q in questions],
        otherwise=[q.review.otherwise for q in questions],
        kinds=[panel and panel.kind for panel in panels],
        wanted=[panel.wanted if panel else 1 for panel in panels],
        rules=[panel and panel.rule for panel in panels],
        least=[panel and panel.least for panel in panels],
        passing=[Jsonb(list(panel.passing)) if panel and panel.passing else None for panel in panels],
    )
    execute(connection, "wait_for_answers", run_id=run_id, group_ids=sorted({q.group_id for q in questions}))


def add_features(database: Database, task: CreatedTask) -> None:
    """Add the features of a new task to the existing one, unless the task or its parent was purged meanwhile."""
    values = {
        "taskset": task.taskset,
        "task_key": storable(task.task_key),
        "features": Jsonb(storable(_features(task))),
    }

    def add() -> None:
        with database.transaction() as connection:
            execute(connection, "lock_parents", experience_ids=[task.parent_id])
            if not fetch(connection, "purged_among", experience_ids=[task.parent_id]):
                execute(connection, "add_features", **values)

    ride_out(add)


def task_of_experience(database: Database, experience_id: int) -> tuple[str, str] | None:
    """Return taskset and key of the task that an experience attempted; None if the experience does not exist."""
    rows = database.fetch("task_of_experience", experience_id=experience_id)
    return (rows[0]["taskset"], rows[0]["task_key"]) if rows else None


def make_tasks(connection: Connection, tasks: Sequence[CreatedTask]) -> None:
    """Store tasks created from experiences; those with existing keys stay unchanged."""
    if tasks:
        execute(
            connection,
            "insert_tasks",
            tasksets=[t.taskset for t in tasks],
            task_keys=[storable(t.task_key) for t in tasks],
            payloads=[Jsonb(storable(dict(t.payload))) for t in tasks],
            features=[Jsonb(storable(_features(t))) for t in tasks],
        )


def _features(task: CreatedTask) -> dict[str, Any]:
    """Return the features of a task with the experience from which it was created."""
    return {**task.features, "parent_experience_id": task.parent_id}
