"""What travels between the buffer and a pipeline: batches of sealed groups, and what was decided on them.

Each fact has one record from the stage that makes it to the table that stores it. What there is one of per experience is a column of an
Arrow table, so that nothing is copied row by row on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rftdata.postgres.values import storable

SET_ASIDE = "pipeline"
"""Stage name of experiences that were dropped before any stage saw them."""

BATCH_SCHEMA = pa.schema(
    [
        ("experience_id", pa.int64()), ("group_id", pa.int64()), ("rollout_index", pa.int32()), ("turn_index", pa.int32()),
        ("task_id", pa.int64()), ("taskset", pa.string()), ("answer", pa.string()), ("prompt", pa.string()),
        ("response", pa.string()), ("reward", pa.float64()), ("reward_sampled", pa.float64()),
        ("num_prompt_tokens", pa.int32()), ("num_response_tokens", pa.int32()), ("finish_reason", pa.string()),
        ("metrics", pa.string()), ("source", pa.string()), ("messages", pa.string()), ("reward_parts", pa.string()),
        ("metadata", pa.string()), ("features", pa.string()), ("parent_id", pa.int64()), ("staleness", pa.int32()),
        ("labelled", pa.bool_()), ("reviews", pa.string()), ("group_size", pa.int32()),
    ]
)  # fmt: skip
"""What stages may read of an experience. `metrics`, `messages`, `reward_parts`, `metadata` and `features` (the last two of its task) are
JSON texts. `staleness`: trainer steps between the newest policy and that of its oldest token. `labelled`: whether a person or
judge changed the reward, of it or of what it was copied from. `reviews`: JSON object, the answer to every question asked about it:
waiting, pass or drop."""

DECISION_SCHEMA = pa.schema(
    [
        pa.field("experience_id", pa.int64(), nullable=False),
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("kept", pa.bool_(), nullable=False),
        ("stage", pa.string()),
        ("reason", pa.string()),
        ("reward", pa.float64()),
        pa.field("priority", pa.float64(), nullable=False),
    ]
)
"""What a chain decided on an experience (or task). `stage` and `reason`: who dropped it and why, null where it is kept. `reward`: what
stages made of it, null where none changed it and where it is dropped."""


def kept(table: pa.Table) -> pa.Table:
    """Decisions that keep every row of a table with experience_id and group_id."""
    return _decided(table, True, None, None)


def dropped(table: pa.Table, stage: str, reason: str | Sequence[str]) -> pa.Table:
    """Decisions that drop every row of a table with experience_id and group_id, for one reason or one each."""
    return _decided(table, False, stage, reason)


def _decided(table: pa.Table, is_kept: bool, stage: str | None, reason: str | Sequence[str] | None) -> pa.Table:
    num_rows = table.num_rows
    reasons = pa.array([reason] * num_rows if isinstance(reason, str | None) else reason, pa.string())
    columns = [
        table["experience_id"], table["group_id"], pa.array([is_kept] * num_rows), pa.array([stage] * num_rows, pa.string()), reasons,
        pa.nulls(num_rows, pa.float64()), pa.array([0.0] * num_rows, pa.float64()),
    ]  # fmt: skip
    return pa.table(columns, schema=DECISION_SCHEMA)


def concatenated(tables: Iterable[pa.Table], schema: pa.Schema = DECISION_SCHEMA) -> pa.Table:
    """The rows of all tables; none where there is no table."""
    return pa.concat_tables([schema.empty_table(), *tables]).combine_chunks()


@dataclass
class SealedBatch:
    """Whole sealed groups as stages see them.

    Attributes:
        table: experiences of rollouts with outcome ok.
        group_ids: the groups claimed; one may have no such experience.
        label_cuts: the newest label of each group, or answer to a question about it, at the time of reading.
        failed: decisions on what stages never see: experiences of rollouts that failed or of groups that were screened out.
        first_key: least sort_key of the groups.
    """

    table: pa.Table
    group_ids: list[int]
    label_cuts: dict[int, int] = field(default_factory=dict)
    failed: pa.Table = field(default_factory=DECISION_SCHEMA.empty_table)
    first_key: int = 0

    def set_aside(self, reason: str) -> SealedBatch:
        """The same groups with every experience dropped before any stage sees it."""
        failed = concatenated([self.failed, dropped(self.table, SET_ASIDE, reason)])
        return replace(self, table=self.table.slice(0, 0), failed=failed)


@dataclass(frozen=True)
class StageRun:
    """One stage over one batch: a row of `operator_run`. Stages count from 1; 0 and n+1 are the chain's own rules."""

    stage: str
    index: int
    rows_in: int
    rows_kept: int
    rows_dropped: int
    seconds: float
    rows_created: int = 0
    error: str | None = None


class KnownScore(NamedTuple):
    """A stored score, and the digest of what it was scored by."""

    input_digest: int
    scores: Mapping[str, Any]


Known = Mapping[str, Mapping[int, KnownScore]]
"""Scores stored already: score key -> experience_id (or task_id) -> score."""


@dataclass(frozen=True)
class StageScores:
    """What a stage computed now.

    Attributes:
        table: `experience_id` and its score columns, one row per experience.
        input_digests: of what each of them was scored by (see `operators.chain.input_digests`); null: the score is never used again.
        error_column: the score column that says why a row has no score; None: each has one.
    """

    stage: str
    score_key: str
    table: pa.Table
    input_digests: pa.Array
    error_column: str | None = None

    def rows(self) -> Iterator[tuple[int, dict[str, Any], str | None, int | None]]:
        """(experience_id, scores, error, input digest) of each row."""
        for row, digest in zip(self.table.to_pylist(), self.input_digests.to_pylist(), strict=True):
            key = row.pop("experience_id")
            yield key, row, row.get(self.error_column) if self.error_column else None, digest


def remember(known: dict[str, dict[int, KnownScore]], scores: Iterable[StageScores]) -> None:
    """Add scores to those that are known; not what ended in an error, nor what is never used again."""
    for found in scores:
        for key, row, error, digest in found.rows():
            if digest is not None and error is None:
                known.setdefault(found.score_key, {})[key] = KnownScore(digest, row)


@dataclass(frozen=True)
class Review:
    """What a stage asks a person about a row.

    Attributes:
        name: of the question; an experience is asked each once. One that was asked before stays as it was.
        question: for the person.
        timeout_s: after so many seconds, at most ten years, `otherwise` is the answer.
        otherwise: pass or drop.
    """

    name: str
    question: str
    timeout_s: float
    otherwise: str


@dataclass(frozen=True)
class Question:
    """A row that a person is asked about; its group is decided once that is answered or too late."""

    experience_id: int
    group_id: int
    stage: str
    review: Review


@dataclass(frozen=True)
class CreatedTask:
    """A new task that a stage made of an experience or task.

    Attributes:
        task_key: stable: the same input makes the same key, and a key that exists already is not made again.
        payload: prompt, answer and metadata, as in `rft.task`.
        parent_id: the experience (or task) it was made of.
        stage: name of the stage that made it; the chain fills it in.
    """

    taskset: str
    task_key: str
    payload: Mapping[str, Any]
    parent_id: int
    features: Mapping[str, Any] = field(default_factory=dict)
    stage: str = ""


@dataclass(frozen=True)
class CreatedAnswer:
    """One answer of a created group: a chat without its last turn, the response, its reward, and numbers to be stored with it."""

    messages: Sequence[Mapping[str, Any]]
    response: str
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CreatedGroup:
    """New experiences, answers to one task; stored as a group of source `synthesis` that goes through the pipeline itself.

    Attributes:
        task: what they answer; None: the task of the experience they were made of.
        parent_id: the experience they were made of.
        key: stable, for a group without a task of its own: of one parent and key there is one group.
    """

    task: CreatedTask | None
    parent_id: int
    answers: Sequence[CreatedAnswer]
    key: str = ""


@dataclass
class Verdicts:
    """What a chain decided on a batch, and what is stored with it.

    Attributes:
        decisions: one row per experience with `DECISION_SCHEMA`, but for groups that wait for a person.
        stages: what each stage did.
        scores: computed now.
        questions: what people are asked; their groups wait.
        created: new tasks and experiences.
        failed: experiences that were set aside since a stage raised on them; their decisions are there, too.
    """

    decisions: pa.Table = field(default_factory=DECISION_SCHEMA.empty_table)
    stages: list[StageRun] = field(default_factory=list)
    scores: list[StageScores] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    created: list[CreatedTask | CreatedGroup] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)

    def add(self, other: Verdicts) -> None:
        """Take what was decided on another part of the batch."""
        self.decisions = concatenated([self.decisions, other.decisions])
        self.stages += other.stages
        self.scores += other.scores
        self.questions += other.questions
        self.created += other.created
        self.failed |= other.failed

    @property
    def tasks(self) -> list[CreatedTask]:
        """The new tasks among what was created."""
        return [made for made in self.created if isinstance(made, CreatedTask)]

    @property
    def groups(self) -> list[CreatedGroup]:
        """The new experiences among what was created."""
        return [made for made in self.created if isinstance(made, CreatedGroup)]


def as_stored(values: pa.Array) -> pa.Array:
    """Return values as the database will return them (no NaN or infinity, no NUL in texts), so that later stages see the same on every run."""
    kind = values.type
    if pa.types.is_floating(kind):
        return pc.if_else(pc.fill_null(pc.is_finite(values), False), values, pa.scalar(None, kind))
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return values
    if pa.types.is_string(kind) and not pc.any(pc.match_substring(values, "\x00")).as_py():
        return values
    return pa.array([storable(value) for value in values.to_pylist()], kind)
