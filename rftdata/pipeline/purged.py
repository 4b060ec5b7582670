"""What a purge leaves of results that were computed before it: nothing that may quote a purged text.

Stages take seconds to minutes. A purge that commits meanwhile cannot remove their results, so the transaction that stores them asks again,
once it holds the locks for which purges wait: those of groups, or of tasks. A result of a stage may quote any row of its group.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from rftdata.pipeline.records import Question, SealedBatch, StageRun, Verdicts
from rftdata.pipeline.scores import StageScores
from rftdata.postgres.database import Connection, fetch

PURGED = "[purged]"
"""What stands where a text was removed."""


def without_purged_groups(connection: Connection, batch: SealedBatch, verdicts: Verdicts) -> tuple[Verdicts, int]:
    """Return what is left of verdicts on groups that the caller has locked, and the number of groups that were purged meanwhile."""
    purged = [row["group_id"] for row in fetch(connection, "purged_groups", group_ids=batch.group_ids)]
    if not purged:
        return verdicts, 0
    gone = pa.array(purged, pa.int64())
    ids = [
        table["experience_id"].filter(pc.is_in(table["group_id"], gone)).to_pylist()
        for table in (batch.table, batch.failed, verdicts.decisions)
    ]
    asked = [question for question in verdicts.questions if question.group_id not in purged]
    return _without({i for some in ids for i in some}, verdicts, asked), len(purged)


def without_purged_tasks(connection: Connection, verdicts: Verdicts) -> tuple[Verdicts, int]:
    """Return what is left of verdicts on tasks, which are locked, and the number of tasks that were purged meanwhile."""
    decided = {
        *verdicts.decisions["experience_id"].to_pylist(),
        *(task.parent_id for task in verdicts.tasks),
        *(i for found in verdicts.scores for i in found.table["experience_id"].to_pylist()),
    }
    there = {row["task_id"] for row in fetch(connection, "lock_tasks", task_ids=sorted(decided))}
    if not (purged := decided - there):
        return verdicts, 0
    return _without(purged, verdicts, verdicts.questions), len(purged)


def _without(purged: Collection[int], verdicts: Verdicts, questions: list[Question]) -> Verdicts:
    """Return verdicts without those on some rows, and without what was made of these. An error of a stage names no row."""
    gone = pa.array(sorted(purged), pa.int64())
    return replace(
        verdicts,
        decisions=verdicts.decisions.filter(pc.invert(pc.is_in(verdicts.decisions["experience_id"], gone))),
        stages=_without_errors(verdicts.stages),
        scores=[_scores_of_others(found, gone) for found in verdicts.scores],
        questions=questions,
        created=[made for made in verdicts.created if made.parent_id not in purged],
    )


def _without_errors(stages: Sequence[StageRun]) -> list[StageRun]:
    return [replace(stage, error=PURGED) if stage.error is not None else stage for stage in stages]


def _scores_of_others(found: StageScores, gone: pa.Array) -> StageScores:
    others = pc.invert(pc.is_in(found.table["experience_id"], gone))
    return replace(found, table=found.table.filter(others), input_digests=found.input_digests.filter(others))
