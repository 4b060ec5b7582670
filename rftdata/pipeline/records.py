"""What travels between the buffer and a pipeline: batches of sealed groups, and what was decided on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pyarrow as pa

SET_ASIDE = "pipeline"
"""Stage name of experiences that were dropped before any stage saw them."""


@dataclass
class SealedBatch:
    """Whole sealed groups as stages see them.

    Attributes:
        table: experiences of rollouts with outcome ok.
        group_ids: the groups claimed; one may have no such experience.
        label_cuts: the newest label of each group, or answer to a question about it, at the time of reading.
        failed: what stages never see: experiences of rollouts that failed or of groups that were screened out, decided here.
        first_key: least sort_key of the groups.
    """

    table: pa.Table
    group_ids: list[int]
    label_cuts: dict[int, int] = field(default_factory=dict)
    failed: list[Decision] = field(default_factory=list)
    first_key: int = 0

    def set_aside(self, reason: str) -> SealedBatch:
        """The same groups with every experience dropped before any stage sees it."""
        ids = zip(self.table["experience_id"].to_pylist(), self.table["group_id"].to_pylist(), strict=True)
        dropped = [Decision(key, group_id, False, SET_ASIDE, reason) for key, group_id in ids]
        return replace(self, table=self.table.slice(0, 0), failed=self.failed + dropped)


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


@dataclass(frozen=True)
class Decision:
    """What the chain decided on one experience; `reward` is the shaped one, None where no stage shaped it."""

    experience_id: int
    group_id: int
    kept: bool
    stage: str | None = None
    reason: str | None = None
    priority: float = 0.0
    reward: float | None = None


@dataclass(frozen=True)
class StageCount:
    """One stage over one batch, for `operator_run`."""

    index: int
    stage: str
    rows_in: int
    rows_kept: int
    rows_dropped: int
    rows_created: int
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class Score:
    """What a scoring stage found out about an experience.

    Attributes:
        error: why there is no score.
        input_digest: of what it was scored by; None: it is never used again.
    """

    experience_id: int
    score_key: str
    stage: str
    scores: dict[str, Any]
    error: str | None = None
    input_digest: int | None = None


class KnownScore(NamedTuple):
    """A stored score, and the digest of what it was scored by."""

    input_digest: int
    scores: Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """What a person is asked about an experience; `otherwise` (pass or drop) is the answer after `timeout_s`, at most ten years.

    A question that was asked before stays as it was: another `otherwise` or timeout under its name changes nothing.
    """

    experience_id: int
    group_id: int
    name: str
    question: str
    timeout_s: float
    otherwise: str


@dataclass(frozen=True)
class NewTask:
    """A task that a stage made; nothing happens where its key exists."""

    taskset: str
    task_key: str
    payload: Mapping[str, Any]
    features: Mapping[str, Any]


@dataclass
class Verdicts:
    """What a pipeline worker stores about a batch.

    Attributes:
        decisions: on every experience of the groups that do not wait.
        stages: what each stage did.
        scores: computed now.
        questions: asked now or before, and not answered; their groups wait.
        tasks: new ones.
    """

    decisions: Sequence[Decision]
    stages: Sequence[StageCount] = ()
    scores: Sequence[Score] = ()
    questions: Sequence[Question] = ()
    tasks: Sequence[NewTask] = field(default_factory=tuple)
