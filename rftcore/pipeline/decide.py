"""What an operator chain decides on a batch of sealed groups, and what becomes of rows on which a stage fails.

When a stage raises, a few groups of the batch are tried by themselves, and if none passes, the rows of these groups. If no row
passes either, the stage is taken to be broken (a server that is away, a full disk), nothing is decided, and the caller tries
again later. Otherwise the batch is halved until the groups are found that do it. In a group that fails alone the rows are tried
one by one: those that fail alone are set aside, dropped with the error as their reason, and the rest of the group is decided
without them. A group that fails only as a whole is set aside as a whole.

Where a stage exceeds its time limit and names the row at which it was, that row is set aside at once: to look for it would take the
limit again and again. For the same reason fewer parts are tried alone before a stage that exceeds its limit is taken to be broken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from operators.base import CreatedGroup, CreatedTask
from operators.chain.chain import Chain, ChainResult
from operators.chain.stage import Known, StageError, StageRun, StageScores
from rftdata.errors import time_limit_behind
from rftdata.pipeline.records import Decision, KnownScore, NewTask, Question, Score, SealedBatch, StageCount, Verdicts

NUM_LATE_FIRST = 3
"""So many rows are set aside though a stage exceeds its limit on the first of what is left; then it may do so on all."""


@dataclass
class Decided:
    """What is to be stored: verdicts and what goes with them, and groups that stages made.

    Attributes:
        failed: experiences that were set aside since a stage raised on them.
    """

    verdicts: Verdicts
    created: list[CreatedGroup] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)


@dataclass
class _Collected:
    """Results of parts of a batch."""

    decisions: list[Decision] = field(default_factory=list)
    runs: list[StageRun] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    created: list[CreatedTask | CreatedGroup] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)
    known: dict[str, dict[int, KnownScore]] = field(default_factory=dict)

    def keep(self, scored: Iterable[StageScores], chain: Chain) -> None:
        """Take scores, also those of a pass that failed later on: no later pass computes them again."""
        errors = {stage.score_key: stage.operator.error_column for stage in chain.stages if stage.score_key}
        rows = [row for part in scored for row in _score_rows(part, errors[part.score_key])]
        self.scores += rows
        remember(self.known, rows)

    def add(self, table: pa.Table, result: ChainResult, chain: Chain) -> None:
        groups = dict(zip(table["experience_id"].to_pylist(), table["group_id"].to_pylist(), strict=True))
        self.decisions += [
            Decision(group_id=groups[row["experience_id"]], **row) for row in result.decisions.to_pylist()
        ]
        self.runs += result.stages
        self.keep(result.scores, chain)
        self.questions += [
            Question(
                row.experience_id, row.group_id, row.review.name, row.review.question, row.review.timeout_s, row.review.otherwise
            )
            for row in result.waiting
        ]  # fmt: skip
        self.created += result.created

    def halve(self, error: StageError) -> None:
        """Note the failure of what is tried again in parts. What other stages did is noted with the parts: rows count once."""
        self.runs += [error.run] if error.run else []

    def set_aside(self, table: pa.Table, error: StageError) -> None:
        self.runs += list(error.stages)
        self.set_rows_aside(table, error)

    def set_rows_aside(self, table: pa.Table, error: StageError) -> None:
        """Set aside rows of a table whose other rows pass the stages again, and are counted then."""
        self.halve(error)
        stage = error.run.stage if error.run else "chain"
        ids = list(zip(table["experience_id"].to_pylist(), table["group_id"].to_pylist(), strict=True))
        self.failed.update(key for key, _ in ids)
        self.decisions += [Decision(key, group_id, False, stage, error.reason) for key, group_id in ids]


def decide(chain: Chain, batch: SealedBatch, known: Known | None = None, *, patient: bool = False) -> Decided:
    """Verdicts on every experience of a batch, what each stage did, and what else is to be stored.

    Args:
        known: scores that are stored already.
        patient: raise where a stage fails on everything that is tried, rather than set everything aside.

    Raises:
        StageError: with `patient`, the stage's error.
    """
    found = _Collected(known={key: dict(scores) for key, scores in (known or {}).items()})
    try:
        found.add(batch.table, chain.run(batch.table, known=found.known), chain)
    except StageError as error:
        found.keep(error.scores, chain)
        rest, failure = _without_late_rows(chain, batch.table, found, error)
        if failure is not None:
            if patient and not _any_passes(chain, rest, found.known, failure):
                raise failure from failure.__cause__
            _decide_halves(chain, rest, found, failure)
    tasks = [made for made in found.created if isinstance(made, CreatedTask)]
    return Decided(
        Verdicts(
            found.decisions + batch.failed, [_count(run) for run in found.runs], newest(found.scores), found.questions,
            [new_task(task) for task in tasks],
        ),
        [made for made in found.created if isinstance(made, CreatedGroup)],
        found.failed,
    )  # fmt: skip


def newest(scores: Iterable[Score]) -> list[Score]:
    """Of scores of one experience by one stage, the last."""
    return list({(score.experience_id, score.score_key): score for score in scores}.values())


def remember(known: dict[str, dict[int, KnownScore]], scores: Iterable[Score]) -> None:
    """Add scores to those that are known; not what ended in an error, nor what is never used again."""
    for score in scores:
        if score.input_digest is not None and score.error is None:
            known.setdefault(score.score_key, {})[score.experience_id] = KnownScore(score.input_digest, score.scores)


def new_task(made: CreatedTask) -> NewTask:
    """A task that a stage made, as it is stored: it knows the experience it was made of."""
    return NewTask(made.taskset, made.task_key, made.payload, {**made.features, "parent_experience_id": made.parent_id})


def late_row(table: pa.Table, error: StageError) -> int | None:
    """The row at which a stage exceeded its time limit, where that is known."""
    limit = time_limit_behind(error)
    if limit is None or limit.subject is None:
        return None
    row: int = pc.index(table["experience_id"], pa.scalar(limit.subject, pa.int64())).as_py()
    return row if row >= 0 else None


def without_row(table: pa.Table, row: int) -> pa.Table:
    """The table without one of its rows."""
    return pa.concat_tables([table.slice(0, row), table.slice(row + 1)]).combine_chunks()


def _without_late_rows(
    chain: Chain, table: pa.Table, found: _Collected, error: StageError
) -> tuple[pa.Table, StageError | None]:
    """Set aside the rows at which a stage exceeds its time limit, one after the other, and decide on the others.

    Returns:
        What is not decided on, and the error: where a stage fails otherwise, or on the first row each time, so that it may fail on all.
    """
    num_first = 0
    while (row := late_row(table, error)) is not None and num_first < NUM_LATE_FIRST:
        limit = time_limit_behind(error)
        num_first = 0 if limit is not None and limit.num_done else num_first + 1
        if table.num_rows == 1 and num_first:
            return table, error
        found.set_rows_aside(table.slice(row, 1), error)
        table = without_row(table, row)
        if not table.num_rows:
            return table, None
        try:
            found.add(table, chain.run(table, known=found.known), chain)
            return table, None
        except StageError as other:
            found.keep(other.scores, chain)
            error = other
    return table, error


def _any_passes(chain: Chain, table: pa.Table, known: Known, error: StageError) -> bool:
    """Whether one of a few groups gets through by itself, or one of their rows: every group may have a row that fails."""
    groups = np.unique(table["group_id"].to_numpy())
    tried = groups[sorted({0, len(groups) // 2, len(groups) - 1})]
    if len(groups) > 1 and any(_error_of(chain, _groups(table, [group]), known, None) is None for group in tried):
        return True
    rows = _groups(table, tried)
    if time_limit_behind(error) is not None:  # each row may take the limit
        rows = pa.concat_tables([_groups(table, [group]).slice(0, 1) for group in tried])
    return any(_error_of(chain, rows.slice(row, 1), known, 1) is None for row in range(rows.num_rows))


def _decide_halves(chain: Chain, table: pa.Table, found: _Collected, error: StageError) -> None:
    """Decide on the two halves of what failed, or on a group without the rows that do it."""
    groups = np.unique(table["group_id"].to_numpy())
    if len(groups) == 1:
        _without_poison(chain, table, found, error)
        return
    found.halve(error)
    for half in np.array_split(groups, 2):
        part = _groups(table, half)
        try:
            found.add(part, chain.run(part, known=found.known), chain)
        except StageError as failed:
            found.keep(failed.scores, chain)
            _decide_halves(chain, part, found, failed)


def _groups(table: pa.Table, group_ids: Iterable[int]) -> pa.Table:
    return table.filter(pc.is_in(table["group_id"], pa.array(group_ids, pa.int64())))


def _without_poison(chain: Chain, table: pa.Table, found: _Collected, error: StageError) -> None:
    """Decide on a group that fails: without the rows that fail alone, or else not at all."""
    fails = [_error_of(chain, table.slice(row, 1), found.known, 1) for row in range(table.num_rows)]
    rest = table.filter(pa.array([failure is None for failure in fails]))
    if rest.num_rows in (0, table.num_rows):
        found.set_aside(table, error)
        return
    try:
        found.add(rest, chain.run(rest, known=found.known), chain)
    except StageError as other:
        found.set_aside(rest, other)
    for row, failure in enumerate(fails):
        if failure is not None:
            found.set_aside(table.slice(row, 1), failure)


def _error_of(chain: Chain, table: pa.Table, known: Known, min_group_size: int | None) -> StageError | None:
    try:
        chain.run(table, min_group_size, known=known)
    except StageError as error:
        return error
    return None


def _score_rows(scored: StageScores, error_column: str | None) -> list[Score]:
    rows = []
    for row, digest in zip(scored.table.to_pylist(), scored.input_digests.to_pylist(), strict=True):
        key = row.pop("experience_id")
        error = row.get(error_column) if error_column else None
        rows.append(Score(key, scored.score_key, scored.stage, row, error, digest))
    return rows


def _count(run: StageRun) -> StageCount:
    return StageCount(
        run.index, run.stage, run.rows_in, run.rows_kept, run.rows_dropped, run.rows_created, run.seconds, run.error
    )
