"""What an operator chain decides on a batch of sealed groups, and what becomes of rows on which a stage fails.

A batch on which a stage raises is halved until the groups are found that do it, so the others cost few extra passes. In a group
that fails alone the rows are tried one by one: those that fail alone are set aside, dropped with the error as their reason, and the
rest of the group is decided without them. A group that fails only as a whole is set aside as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from operators.base import CreatedGroup, CreatedTask
from operators.chain import Chain, ChainResult
from operators.stage import Known, StageError, StageRun, StageScores
from rftdata.claims import SealedBatch
from rftdata.verdicts import Decision, NewTask, Question, Score, StageCount, Verdicts

_MAX_REASON = 500


@dataclass
class Decided:
    """What is to be stored: verdicts and what goes with them, and groups that stages made."""

    verdicts: Verdicts
    created: list[CreatedGroup] = field(default_factory=list)


@dataclass
class _Collected:
    """Results of parts of a batch."""

    decisions: list[Decision] = field(default_factory=list)
    runs: list[StageRun] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    created: list[CreatedTask | CreatedGroup] = field(default_factory=list)

    def add(self, table: pa.Table, result: ChainResult, chain: Chain) -> None:
        groups = dict(zip(table["experience_id"].to_pylist(), table["group_id"].to_pylist(), strict=True))
        self.decisions += [
            Decision(group_id=groups[row["experience_id"]], **row) for row in result.decisions.to_pylist()
        ]
        self.runs += result.stages
        errors = {stage.score_key: stage.operator.error_column for stage in chain.stages if stage.score_key}
        self.scores += [row for scored in result.scores for row in _score_rows(scored, errors[scored.score_key])]
        self.questions += [
            Question(
                row.experience_id, row.group_id, row.review.name, row.review.question, row.review.timeout_s, row.review.otherwise
            )
            for row in result.waiting
        ]  # fmt: skip
        self.created += result.created

    def set_aside(self, table: pa.Table, error: StageError) -> None:
        stage = error.run.stage if error.run else "chain"
        reason = f"the stage failed: {error.what}"[:_MAX_REASON]
        ids = zip(table["experience_id"].to_pylist(), table["group_id"].to_pylist(), strict=True)
        self.decisions += [Decision(key, group_id, False, stage, reason) for key, group_id in ids]


def decide(chain: Chain, batch: SealedBatch, known: Known | None = None) -> Decided:
    """Verdicts on every experience of a batch, what each stage did, and what else is to be stored.

    Args:
        known: scores that are stored already.
    """
    found = _Collected()
    _decide(chain, batch.table, known or {}, found)
    tasks = [made for made in found.created if isinstance(made, CreatedTask)]
    return Decided(
        Verdicts(
            found.decisions + batch.failed, [_count(run) for run in found.runs], found.scores, found.questions,
            [
                NewTask(task.taskset, task.task_key, task.payload, {**task.features, "parent_experience_id": task.parent_id})
                for task in tasks
            ],
        ),
        [made for made in found.created if isinstance(made, CreatedGroup)],
    )  # fmt: skip


def _decide(chain: Chain, table: pa.Table, known: Known, found: _Collected) -> None:
    try:
        found.add(table, chain.run(table, known=known), chain)
    except StageError as error:
        found.runs += [run for run in (*error.stages, error.run) if run]
        groups = np.unique(table["group_id"].to_numpy())
        if len(groups) > 1:
            for half in np.array_split(groups, 2):
                _decide(chain, table.filter(pc.is_in(table["group_id"], pa.array(half))), known, found)
        else:
            _without_poison(chain, table, known, found, error)


def _without_poison(chain: Chain, table: pa.Table, known: Known, found: _Collected, error: StageError) -> None:
    """Decide on a group that fails: without the rows that fail alone, or else not at all."""
    fails = [_fails_alone(chain, table.slice(row, 1), known) for row in range(table.num_rows)]
    rest = table.filter(pa.array([failure is None for failure in fails]))
    if rest.num_rows in (0, table.num_rows):
        found.set_aside(table, error)
        return
    try:
        result = chain.run(rest, known=known)
    except StageError as other:
        found.set_aside(table, other)
        return
    found.add(rest, result, chain)
    for row, failure in enumerate(fails):
        if failure is not None:
            found.set_aside(table.slice(row, 1), failure)


def _fails_alone(chain: Chain, row: pa.Table, known: Known) -> StageError | None:
    try:
        chain.run(row, min_group_size=1, known=known)
    except StageError as error:
        return error
    return None


def _score_rows(scored: StageScores, error_column: str | None) -> list[Score]:
    rows = []
    for row in scored.table.to_pylist():
        key = row.pop("experience_id")
        rows.append(Score(key, scored.score_key, scored.stage, row, row.get(error_column) if error_column else None))
    return rows


def _count(run: StageRun) -> StageCount:
    return StageCount(
        run.index, run.stage, run.rows_in, run.rows_kept, run.rows_dropped, run.rows_created, run.seconds, run.error
    )
