"""The records exchanged between the buffer and a pipeline: batches of sealed groups, and decisions on them.

Each fact has one record from the stage that creates it to the table that stores it. Values with one entry per experience are columns of
an Arrow table, so that they are not copied row by row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rftdata.pipeline.scores import StageScores
from rftdata.postgres.values import storable

SET_ASIDE = "pipeline"
"""Stage name of experiences that were dropped before any stage saw them."""

BATCH_SCHEMA = pa.schema(
    [
        ("experience_id", pa.int64()),
        ("group_id", pa.int64()),
        ("rollout_index", pa.int32()),
        ("turn_index", pa.int32()),
        ("task_id", pa.int64()),
        ("taskset", pa.string()),
        ("answer", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("reward", pa.float64()),
        ("reward_sampled", pa.float64()),
        ("num_prompt_tokens", pa.int32()),
        ("num_response_tokens", pa.int32()),
        ("num_trained_tokens", pa.int32()),
        ("num_turns", pa.int32()),
        ("role", pa.string()),
        ("finish_reason", pa.string()),
        ("metrics", pa.string()),
        ("source", pa.string()),
        ("messages", pa.string()),
        ("reward_parts", pa.string()),
        ("metadata", pa.string()),
        ("features", pa.string()),
        ("parent_id", pa.int64()),
        ("staleness", pa.int32()),
        ("labelled", pa.bool_()),
        ("reviews", pa.string()),
        ("group_size", pa.int32()),
    ]
)
"""The columns of an experience that stages may read. `metrics`, `messages`, `reward_parts`, `metadata` and `features` (the last two of its
task) are JSON texts. `num_trained_tokens`: response tokens of answers, without what the environment wrote between them.
`role`: that the policy played; null where the workflow has only one. `staleness`:
trainer steps between the newest policy and that of its oldest token. `labelled`: whether a person or
judge changed the reward, of the experience or of the one it was copied from. `reviews`: JSON object, the answer to every question asked
about it: waiting, pass or drop."""

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
"""The decision of a chain on an experience (or task). `stage` and `reason`: the stage that dropped it and why; null if kept. `reward`: as
changed by stages; null if no stage changed it or if it is dropped."""


def kept(table: pa.Table) -> pa.Table:
    """Return decisions that keep every row of a table with experience_id and group_id."""
    return _decided(table, True, None, None)


def dropped(table: pa.Table, stage: str, reason: str | Sequence[str]) -> pa.Table:
    """Return decisions that drop every row of a table with experience_id and group_id, for one reason or one each."""
    return _decided(table, False, stage, reason)


def _decided(table: pa.Table, is_kept: bool, stage: str | None, reason: str | Sequence[str] | None) -> pa.Table:
    num_rows = table.num_rows
    reasons = pa.array([reason] * num_rows if isinstance(reason, str | None) else reason, pa.string())
    columns = [
        table["experience_id"],
        table["group_id"],
        pa.array([is_kept] * num_rows),
        pa.array([stage] * num_rows, pa.string()),
        reasons,
        pa.nulls(num_rows, pa.float64()),
        pa.array([0.0] * num_rows, pa.float64()),
    ]
    return pa.table(columns, schema=DECISION_SCHEMA)


def concatenated(tables: Iterable[pa.Table], schema: pa.Schema = DECISION_SCHEMA) -> pa.Table:
    """Return the rows of all tables; an empty table if there are none."""
    return pa.concat_tables([schema.empty_table(), *tables]).combine_chunks()


@dataclass
class SealedBatch:
    """Whole sealed groups as stages see them.

    Attributes:
        table: experiences of rollouts with outcome ok.
        group_ids: the claimed groups; a group may have no such experience.
        label_cuts: for each group the newest label, or answer to a question about it, at the time of reading.
        failed: decisions on experiences that stages never see: those of failed rollouts or of screened-out groups.
        first_key: smallest sort_key of the groups.
    """

    table: pa.Table
    group_ids: list[int]
    label_cuts: dict[int, int] = field(default_factory=dict)
    failed: pa.Table = field(default_factory=DECISION_SCHEMA.empty_table)
    first_key: int = 0

    def set_aside(self, reason: str) -> SealedBatch:
        """Return the same groups with every experience dropped before any stage sees it."""
        failed = concatenated([self.failed, dropped(self.table, SET_ASIDE, reason)])
        return replace(self, table=self.table.slice(0, 0), failed=failed)


@dataclass(frozen=True)
class StageRun:
    """One stage on one batch: a row of `operator_run`. Stages count from 1; 0 and n+1 are the chain's own rules."""

    stage: str
    index: int
    rows_in: int
    rows_kept: int
    rows_dropped: int
    seconds: float
    rows_created: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Panel:
    """Several people who answer a review with annotations of a kind, and the rule that decides from them.

    Attributes:
        kind: bool, number or choice, about an experience.
        wanted: how many accounts must annotate.
        rule: majority, mean, all or adjudicated; see `rft.answer_rule`.
        least: a number passes if it is at least this; true is 1.
        passing: choices that pass.
    """

    kind: str
    wanted: int = 1
    rule: str = "majority"
    least: float = 0.5
    passing: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Review:
    """A stage's question to a person about a row.

    Attributes:
        name: of the question. An experience is asked each name once; an existing question stays as it was.
        question: the text for the person.
        timeout_s: seconds, at most ten years, after which `otherwise` is the answer.
        otherwise: pass or drop.
        panel: who answers, if annotations do; None: one person, by an answer or a reward.
    """

    name: str
    question: str
    timeout_s: float
    otherwise: str
    panel: Panel | None = None


@dataclass(frozen=True)
class Question:
    """A row about which a person is asked. Its group is decided once the question is answered or its deadline has passed."""

    experience_id: int
    group_id: int
    stage: str
    review: Review


@dataclass(frozen=True)
class CreatedTask:
    """A new task that a stage created from an experience or task.

    Attributes:
        task_key: stable: the same input gives the same key, and an existing key is not created again.
        payload: prompt, answer and metadata, as in `rft.task`.
        parent_id: the experience (or task) from which it was created.
        stage: name of the stage that created it, set by the chain.
    """

    taskset: str
    task_key: str
    payload: Mapping[str, Any]
    parent_id: int
    features: Mapping[str, Any] = field(default_factory=dict)
    stage: str = ""


@dataclass(frozen=True)
class CreatedAnswer:
    """One answer of a created group: a chat without its last turn, the response, its reward, and numbers stored with it."""

    messages: Sequence[Mapping[str, Any]]
    response: str
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CreatedGroup:
    """New experiences that answer one task, stored as a group of source `synthesis` that goes through the pipeline itself.

    Attributes:
        task: the task they answer; None for the task of the parent.
        parent_id: the experience from which they were created.
        key: stable, for a group without a new task: there is one group per parent and key.
    """

    task: CreatedTask | None
    parent_id: int
    answers: Sequence[CreatedAnswer]
    key: str = ""


@dataclass
class Verdicts:
    """The decisions of a chain on a batch, and everything stored with them.

    Attributes:
        decisions: one row per experience with `DECISION_SCHEMA`, except for groups that wait for a person.
        stages: one entry per stage run.
        scores: computed in this batch.
        questions: questions to people; their groups wait.
        created: new tasks and experiences.
        failed: experiences that were set aside because a stage raised on them; `decisions` includes them.
    """

    decisions: pa.Table = field(default_factory=DECISION_SCHEMA.empty_table)
    stages: list[StageRun] = field(default_factory=list)
    scores: list[StageScores] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    created: list[CreatedTask | CreatedGroup] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)

    def add(self, other: Verdicts) -> None:
        """Add the verdicts on another part of the batch."""
        self.decisions = concatenated([self.decisions, other.decisions])
        self.stages += other.stages
        self.scores += other.scores
        self.questions += other.questions
        self.created += other.created
        self.failed |= other.failed

    @property
    def tasks(self) -> list[CreatedTask]:
        """The new tasks in `created`."""
        return [made for made in self.created if isinstance(made, CreatedTask)]

    @property
    def groups(self) -> list[CreatedGroup]:
        """The new experiences in `created`."""
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
