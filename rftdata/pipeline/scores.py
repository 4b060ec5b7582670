"""Scores: what stages that score computed for rows, stored so that later versions of a chain use them again.

Scores of experiences are in `rft.score`, those of tasks in `rft.task_score`. The tables have the same columns and the same rules, and this
module alone reads and writes them. A score is found again by its key (the stage, its arguments, and the earlier stages that change what it
reads) while the digest of its input is the same. A score that ended in an error is stored with it, and computed again.

They are two tables because they live for different times: scores of experiences are archived with their run, copied by a fork and emptied by
a purge, and those of tasks are deleted with the texts of the task.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
from psycopg.types.json import Jsonb

from rftdata.postgres.database import Connection, Database, execute
from rftdata.postgres.values import storable


class StoredScore(NamedTuple):
    """A stored score, and the digest of its input."""

    input_digest: int
    scores: Mapping[str, Any]


StoredScores = Mapping[str, Mapping[int, StoredScore]]
"""Stored scores: score key -> experience_id (or task_id) -> score."""


@dataclass(frozen=True)
class StageScores:
    """The scores that a stage computed in this batch.

    Attributes:
        table: `experience_id` (of tasks: their `task_id`) and its score columns, one row per experience.
        input_digests: digest of each row's input (see `operators.chain.input_digests`); null: the score is never reused.
        error_column: the score column with the reason why a row has no score; None: every row has one.
    """

    stage: str
    score_key: str
    table: pa.Table
    input_digests: pa.Array
    error_column: str | None = None

    def rows(self) -> Iterator[tuple[int, dict[str, Any], str | None, int | None]]:
        """Yield (experience_id, scores, error, input digest) of each row."""
        for row, digest in zip(self.table.to_pylist(), self.input_digests.to_pylist(), strict=True):
            key = row.pop("experience_id")
            yield key, row, row.get(self.error_column) if self.error_column else None, digest


@dataclass(frozen=True)
class ScoreTable:
    """A table of scores, by the named queries that read and write it."""

    read_query: str
    write_query: str

    def read(
        self, database: Database, score_keys: Sequence[str], row_ids: Sequence[int]
    ) -> dict[str, dict[int, StoredScore]]:
        """Return stored scores: score key -> row id -> score. Scores that ended in an error are left out."""
        stored: dict[str, dict[int, StoredScore]] = {}
        if score_keys:
            for row in database.fetch_by_index(self.read_query, score_keys=list(score_keys), row_ids=list(row_ids)):
                score = StoredScore(row["input_digest"], row["scores"])
                stored.setdefault(row["score_key"], {})[row["row_id"]] = score
        return stored

    def store(self, connection: Connection, scores: Sequence[StageScores]) -> None:
        """Write scores, replacing those of the same key."""
        newest = {
            (row_id, found.score_key): (found.stage, values, error, digest)
            for found in scores
            for row_id, values, error, digest in found.rows()
        }
        if newest:
            execute(
                connection,
                self.write_query,
                row_ids=[row_id for row_id, _ in newest],
                score_keys=[score_key for _, score_key in newest],
                stages=[stage for stage, *_ in newest.values()],
                scores=[Jsonb(storable(values)) for _, values, _, _ in newest.values()],
                errors=[storable(error) for _, _, error, _ in newest.values()],
                input_digests=[digest for *_, digest in newest.values()],
            )


EXPERIENCE_SCORES = ScoreTable("stored_scores", "store_scores")
TASK_SCORES = ScoreTable("stored_task_scores", "store_task_scores")


def remember(stored: dict[str, dict[int, StoredScore]], scores: Iterable[StageScores]) -> None:
    """Add scores to the stored ones, except those that ended in an error or are never reused."""
    for found in scores:
        for row_id, values, error, digest in found.rows():
            if digest is not None and error is None:
                stored.setdefault(found.score_key, {})[row_id] = StoredScore(digest, values)
