"""Preview of a chain on a sample of stored groups or tasks: per stage, rows in, kept and dropped with reasons, and changed fields.

Nothing is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from operators.base import IDENTITY_COLUMNS, StageOutcome
from operators.chain.chain import Chain
from operators.chain.stage import Stage
from rftdata.errors import QueryError
from rftdata.pipeline.queue import read_groups, sample_groups
from rftdata.pipeline.records import SealedBatch
from rftdata.pipeline.scores import StoredScores
from rftdata.run import Run


@dataclass(frozen=True)
class Change:
    """A field of one row before and after a stage; `before` is None if the stage added the field."""

    experience_id: int
    column: str
    before: Any
    after: Any


@dataclass
class StagePreview:
    """The effect of one stage on the sample. Rows that it neither kept nor dropped wait for a person.

    Attributes:
        waiting: rows about which a person is asked, with the question.
        undecided: the other rows of these groups, which are decided on together with them.
    """

    index: int
    stage: str
    rows_in: int
    rows_kept: int
    dropped: list[tuple[int, str]] = field(default_factory=list)
    waiting: list[tuple[int, str]] = field(default_factory=list)
    undecided: list[int] = field(default_factory=list)
    changed: list[Change] = field(default_factory=list)
    num_created: int = 0


@dataclass
class Preview:
    """The sample, the effect of each stage, and the decision on each experience."""

    num_experiences: int
    num_groups: int
    stages: list[StagePreview]
    decisions: list[dict[str, Any]]


def read_sample(run: Run, chain: Chain, rows: int, seed: int = 0) -> SealedBatch:
    """Choose whole groups of a run with at least `rows` experiences together, or all; the choice depends on the seed.

    As in a replay, staleness is that at the time when a group was sealed.

    Raises:
        QueryError: the run has no such group.
    """
    chosen = sample_groups(run, rows, seed)
    if not chosen:
        raise QueryError(
            f"run {run.name!r} has no whole group of experiences yet",
            todo="wait until it has one, or name another with --run",
        )
    return read_groups(run.database, chosen, chain.columns, as_sealed=True)


def preview(chain: Chain, table: pa.Table, stored_scores: StoredScores | None = None) -> Preview:
    """Run a chain over a sample and record the effect of every stage.

    Args:
        table: whole groups, or tasks.
        stored_scores: computed in earlier calls, and not computed again.

    Raises:
        StageError: a stage raised.
    """
    stages: list[StagePreview] = []
    came_in: set[int] = set()

    def watch(stage: Stage, before: pa.Table, after: pa.Table, outcome: StageOutcome) -> None:
        came_in.update(before["experience_id"].to_pylist())
        stages.append(_stage(stage, before, after, outcome))

    result = chain.run(table, stored_scores=stored_scores, watch=watch)
    decisions = result.decisions.to_pylist()
    for seen in stages:
        # The chain's group rule drops rows in the name of the stage that left their group too small.
        dropped_ids = {key for key, _ in seen.dropped}
        seen.dropped += [
            (row["experience_id"], row["reason"])
            for row in decisions
            if row["stage"] == seen.stage and row["experience_id"] not in dropped_ids
        ]
    ran = {(seen.index, seen.stage): seen for seen in stages}
    for run in result.stages:
        if (run.index, run.stage) in ran:
            ran[run.index, run.stage].rows_kept = run.rows_kept
            continue
        # The chain's own rules: the group size is checked before the first stage (index 0) and after the last.
        dropped = [
            (row["experience_id"], row["reason"])
            for row in decisions
            if row["stage"] == run.stage and (row["experience_id"] in came_in) == (run.index > 0)
        ]
        stages.append(StagePreview(run.index, run.stage, run.rows_in, run.rows_kept, dropped))
    stages.sort(key=lambda seen: seen.index)
    return Preview(table.num_rows, pc.count_distinct(table["group_id"]).as_py(), stages, decisions)


def _stage(stage: Stage, before: pa.Table, after: pa.Table, outcome: StageOutcome) -> StagePreview:
    ids, groups = before["experience_id"].to_pylist(), before["group_id"].to_pylist()
    open_groups = {groups[row] for row in outcome.waiting}
    reasons = outcome.reasons.to_pylist()
    stays = outcome.reasons.is_null().to_pylist()
    seen = StagePreview(stage.index, stage.name, before.num_rows, before.num_rows)
    seen.dropped = [
        (key, reason)
        for key, group, reason in zip(ids, groups, reasons, strict=True)
        if reason is not None and group not in open_groups
    ]
    seen.undecided = [
        key
        for row, (key, group) in enumerate(zip(ids, groups, strict=True))
        if group in open_groups and row not in outcome.waiting
    ]
    seen.waiting = [(ids[row], review.question) for row, review in sorted(outcome.waiting.items())]
    seen.num_created = len(outcome.created)
    for name in sorted(set(outcome.columns) - IDENTITY_COLUMNS):
        is_new = name not in before.column_names
        old = [None] * before.num_rows if is_new else before[name].to_pylist()
        new = after[name].to_pylist()
        same = _same(before, after, name) if not is_new else [False] * before.num_rows
        for row in range(before.num_rows):
            if stays[row] and not same[row]:
                seen.changed.append(Change(ids[row], name, old[row], new[row]))
    return seen


def _same(before: pa.Table, after: pa.Table, name: str) -> list[bool]:
    """Return per row whether a column kept its value; null equals null, NaN equals NaN."""
    old, new = before[name].combine_chunks(), after[name].combine_chunks()
    if old.type != new.type or pa.types.is_nested(old.type):  # Arrow cannot compare lists
        return [a == b for a, b in zip(old.to_pylist(), new.to_pylist(), strict=True)]
    both_null = pc.and_(pc.is_null(old, nan_is_null=True), pc.is_null(new, nan_is_null=True))
    same: list[bool] = pc.or_(both_null, pc.fill_null(pc.equal(old, new), False)).to_pylist()
    return same
