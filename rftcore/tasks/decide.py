"""What a chain decides on a batch of tasks, and what becomes of tasks on which a stage fails.

A batch on which a stage raises is halved until the tasks are found that do it; those are excluded with the error as their reason. Where
stages compare tasks, the set is decided on without the tasks that fail alone. A task at which a stage exceeds its time limit is excluded
at once where the stage names it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from operators.base import CreatedGroup, UnavailableError
from operators.chain.chain import Chain, ChainResult
from operators.chain.stage import StageError
from rftcore.pipeline.decide import NUM_LATE_FIRST, late_row, without_row
from rftcore.tasks.changes import Changes
from rftdata.errors import OperatorError, time_limit_behind
from rftdata.pipeline.records import StageCount
from rftdata.pipeline.tasks import MadeTask, TaskBatch, TaskDecision, TaskScore, known_scores
from rftdata.postgres.database import Database

_PROBES = 8
"""So many tasks of a batch are tried alone before it is halved: a stage that is down would be asked about every one in vain."""
_LATE_PROBES = 3
"""The same for a stage that exceeds its time limit, since each may take the limit."""


def decide_batch(chain: Chain, database: Database, batch: TaskBatch, *, rowwise: bool, is_first: bool) -> DecidedTasks:
    """Decide on a batch; `is_first`: this version has decided on no task of the set before."""
    decided = DecidedTasks()
    try:
        _decide(chain, database, batch, decided)
    except StageError as error:
        rest, failure = _without_late_tasks(chain, database, batch, decided, error)
        if failure is not None and rowwise:
            _divide(chain, database, rest, decided, failure)
        elif failure is not None:
            _leave_out(chain, database, rest, decided)
        if is_first and decided.num_failed == batch.table.num_rows:
            raise  # the stage itself is wrong, not a task
    return decided


@dataclass
class DecidedTasks:
    """What is to be stored of a batch of tasks."""

    decisions: list[TaskDecision] = field(default_factory=list)
    stages: list[StageCount] = field(default_factory=list)
    scores: list[TaskScore] = field(default_factory=list)
    made: list[MadeTask] = field(default_factory=list)
    num_failed: int = 0

    def fail(self, batch: TaskBatch, error: StageError) -> None:
        """Exclude tasks on which a stage raised."""
        self.stages += [_count(run) for run in error.stages]
        self.fail_alone(batch, error)

    def fail_alone(self, batch: TaskBatch, error: StageError) -> None:
        """Exclude tasks of a batch whose other tasks pass the stages again, and are counted then."""
        stage = error.run.stage if error.run else "chain"
        task_ids = batch.table["experience_id"].to_pylist()
        self.decisions += [TaskDecision(task_id, False, stage, error.reason) for task_id in task_ids]
        self.stages += [_count(error.run)] if error.run else []
        self.num_failed += len(task_ids)


def _decide(chain: Chain, database: Database, batch: TaskBatch, decided: DecidedTasks) -> None:
    changes = Changes(batch)
    known = known_scores(database, batch, chain.score_keys)
    try:
        result = chain.run(batch.table, 1, known=known, watch=changes.watch)
    except StageError as error:
        if not isinstance(error.__cause__, UnavailableError):
            raise
        # No task does it. Halves would be asked about in vain, and all be excluded.
        raise UnavailableError(error.what, value=error.value, todo=error.todo) from error
    _refuse(result)
    decided.decisions += changes.decisions(result)
    decided.stages += [_count(run) for run in result.stages]
    decided.scores += _scores(chain, result)
    decided.made += changes.made


def _without_late_tasks(
    chain: Chain, database: Database, batch: TaskBatch, decided: DecidedTasks, error: StageError
) -> tuple[TaskBatch, StageError | None]:
    """Exclude the tasks at which a stage exceeds its time limit, one after the other, and decide on the others.

    Returns:
        What is not decided on, and the error: where a stage fails otherwise, or on the first task each time, so that it may fail on all.
    """
    num_first = 0
    while (row := late_row(batch.table, error)) is not None and num_first < NUM_LATE_FIRST:
        limit = time_limit_behind(error)
        num_first = 0 if limit is not None and limit.num_done else num_first + 1
        decided.fail_alone(_part(batch, row, row + 1), error)
        is_text = [*batch.is_text[:row], *batch.is_text[row + 1 :]]
        batch = TaskBatch(without_row(batch.table, row), is_text)
        if not is_text:
            return batch, None
        try:
            _decide(chain, database, batch, decided)
            return batch, None
        except StageError as other:
            error = other
    return batch, error


def _divide(chain: Chain, database: Database, batch: TaskBatch, decided: DecidedTasks, error: StageError) -> None:
    """Both halves of a batch that fails; a task that fails alone is the one that does it, and is excluded."""
    if _each_fails(chain, database, batch, error):
        decided.fail(batch, error)
        return
    for half in _halves(batch):
        try:
            _decide(chain, database, half, decided)
        except StageError as failed:
            _divide(chain, database, half, decided, failed)


def _leave_out(chain: Chain, database: Database, batch: TaskBatch, decided: DecidedTasks) -> None:
    """Decide on a set whose stages compare tasks without those that fail alone.

    Raises:
        StageError: it fails without them, too.
    """
    failing: set[int] = set()
    for part, error in _failing(chain, database, batch):
        decided.fail(part, error)
        failing.update(part.table["experience_id"].to_pylist())
    stays = [task_id not in failing for task_id in batch.table["experience_id"].to_pylist()]
    if any(stays):
        table = batch.table.filter(pa.array(stays)).combine_chunks()
        _decide(chain, database, TaskBatch(table, list(itertools.compress(batch.is_text, stays))), decided)


def _failing(chain: Chain, database: Database, batch: TaskBatch) -> Iterator[tuple[TaskBatch, StageError]]:
    """Tasks on which a stage raises though there is no other, in parts with one error."""
    try:
        _decide(chain, database, batch, DecidedTasks())
    except StageError as error:
        if _each_fails(chain, database, batch, error):
            yield batch, error
        else:
            for half in _halves(batch):
                yield from _failing(chain, database, half)


def _each_fails(chain: Chain, database: Database, batch: TaskBatch, error: StageError) -> bool:
    """Whether every task of a batch that fails does it alone; of many tasks, every one of some that are spread over them."""
    rows = batch.table.num_rows
    probes = _PROBES if time_limit_behind(error) is None else _LATE_PROBES
    return rows == 1 or (
        rows > 2 * _PROBES
        and all(
            any(_failing(chain, database, _part(batch, place, place + 1)))
            for place in range(0, rows, -(-rows // probes))
        )
    )


def _halves(batch: TaskBatch) -> Iterator[TaskBatch]:
    rows = batch.table.num_rows
    yield _part(batch, 0, rows // 2)
    yield _part(batch, rows // 2, rows)


def _part(batch: TaskBatch, start: int, end: int) -> TaskBatch:
    return TaskBatch(batch.table.slice(start, end - start).combine_chunks(), batch.is_text[start:end])


def _refuse(result: ChainResult) -> None:
    if result.waiting:
        raise OperatorError(
            f"{_place(result, result.waiting[0].stage)} waits for a person, which tasks cannot",
            todo="exclude tasks by hand: UPDATE rft.task SET status = 'excluded' WHERE …",
        )
    if any(isinstance(made, CreatedGroup) for made in result.created):
        raise OperatorError(
            "a stage of pipelines.task makes experiences, which only pipelines.experience stores",
            todo="move the stage there",
        )


def _place(result: ChainResult, stage: str) -> str:
    index = next((run.index for run in result.stages if run.stage == stage), 0)
    return f"stage {index} of pipelines.task ({stage})"


def _count(run: Any) -> StageCount:
    return StageCount(
        run.index, run.stage, run.rows_in, run.rows_kept, run.rows_dropped, run.rows_created, run.seconds, run.error
    )


def _scores(chain: Chain, result: ChainResult) -> list[TaskScore]:
    errors = {stage.score_key: stage.operator.error_column for stage in chain.stages if stage.score_key}
    scores = []
    for found in result.scores:
        failed = errors[found.score_key]
        for row, digest in zip(found.table.to_pylist(), found.input_digests.to_pylist(), strict=True):
            if failed is None or row.get(failed) is None:  # a call that failed is made again
                scores.append(TaskScore(row.pop("experience_id"), found.score_key, found.stage, row, digest))
    return scores
