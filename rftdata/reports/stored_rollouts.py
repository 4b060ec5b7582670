"""Stored rollouts as a person reads them: facts, texts, rewards with their labels, and arrays, also of purged and archived experiences.

The texts and arrays of archived runs are read from their files. Those of purged experiences are missing, with the author and the reason of
the purge.
"""

from __future__ import annotations

import datetime
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rftdata.buffer import Buffer
from rftdata.errors import QueryError
from rftdata.limits import check_integer
from rftdata.postgres.database import Database, records
from rftdata.reports.lineage import PurgeRecord, Use, purge_of, uses

_COLUMNS = (
    "experience_id",
    "turn_index",
    "num_turns",
    "fork",
    "role",
    "source",
    "state",
    "dropped_by",
    "dropped_because",
    "prompt",
    "response",
    "messages",
    "reward_sampled",
    "reward",
    "reward_shaped",
    "reward_parts",
    "metrics",
    "finish_reason",
    "policy_version_min",
    "policy_version_max",
    "policy_step",
    "num_prompt_tokens",
    "num_response_tokens",
    "num_trained_tokens",
    "parent_id",
    "created_at",
)
_ARRAYS = ("token_ids", "loss_mask", "behavior_logprobs", "token_rewards", "turns")
_JSON = ("messages", "reward_parts", "metrics")


@dataclass(frozen=True, kw_only=True)
class StoredLabel:
    """A change of a reward; fields as in `rft.label`. `turn`: whose reward it is; None for that of the experience."""

    turn: int | None
    old_value: float | None
    new_value: float | None
    author: str
    source: str
    reason: str | None
    final: bool
    labelled_at: datetime.datetime


@dataclass(frozen=True, kw_only=True)
class StoredAnnotation:
    """An annotation that stands; fields as in `rft.v_annotation`."""

    annotation_id: int
    kind: str
    value: Any
    source: str
    author: str
    confidence: float | None
    reason: str | None
    made_at: datetime.datetime


@dataclass(frozen=True, kw_only=True)
class StoredTurnReward:
    """The reward of a turn; fields as in `rft.turn_reward`."""

    turn: int
    reward_sampled: float
    reward: float


@dataclass(frozen=True, kw_only=True)
class StoredExperience:
    """An experience; fields as in `rft.v_experience`, and its arrays.

    Attributes:
        token_ids, loss_mask, behavior_logprobs, token_rewards, turns: as lists; None if purged, or without the array.
        uses: steps that trained on it.
        purge: its purge; None if it was not purged.
    """

    experience_id: int
    turn_index: int
    num_turns: int
    fork: str | None
    role: str | None
    source: str
    state: str
    dropped_by: str | None
    dropped_because: str | None
    prompt: str
    response: str
    messages: Any
    reward_sampled: float | None
    reward: float | None
    reward_shaped: float | None
    reward_parts: dict[str, Any]
    metrics: dict[str, Any]
    finish_reason: str
    policy_version_min: int | None
    policy_version_max: int | None
    policy_step: int | None
    num_prompt_tokens: int
    num_response_tokens: int
    num_trained_tokens: int
    parent_id: int | None
    created_at: datetime.datetime
    token_ids: list[int] | None
    loss_mask: list[float] | None
    behavior_logprobs: list[float] | None
    token_rewards: list[float] | None
    turns: list[int] | None
    turn_rewards: list[StoredTurnReward] = field(default_factory=list)
    labels: list[StoredLabel] = field(default_factory=list)
    annotations: list[StoredAnnotation] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    purge: PurgeRecord | None = None


@dataclass(frozen=True, kw_only=True)
class StoredTry:
    """A try of a rollout that was given up; fields as in `rft.v_rollout_try`. `chats`: empty if purged."""

    error: str
    chats: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class StoredRollout:
    """A rollout with its experiences; fields as in `rft.rollout`, with its group, run and task.

    Attributes:
        reward: as it was sampled.
        experience_ids: all that are stored of it; `experiences` has those that were asked for.
    """

    rollout_id: int
    group_id: int
    run_id: int
    run: str
    taskset: str | None
    task_key: str | None
    answer: str | None
    explore_step: int
    group_size: int
    rollout_index: int
    outcome: str
    stop_reason: str | None
    reward: float | None
    num_turns: int
    seconds: float
    error: str | None
    tries: list[StoredTry]
    experience_ids: list[int]
    experiences: list[StoredExperience] = field(default_factory=list)
    annotations: list[StoredAnnotation] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class StoredGroup:
    """A group; fields as in `rft.v_group`. `rollouts` have no experiences."""

    group_id: int
    run: str
    run_id: int
    taskset: str
    task_key: str
    answer: str | None
    explore_step: int
    group_size: int
    state: str
    closed_reason: str | None
    num_ok: int
    num_failed: int
    mean_reward: float | None
    std_reward: float | None
    baseline_reward: float | None
    rollout_ids: list[int]
    rollouts: list[StoredRollout] = field(default_factory=list)
    annotations: list[StoredAnnotation] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class StoredAnswer:
    """An answer of an evaluation; fields as in `rft.v_evaluation_answer`."""

    evaluation_id: int
    run: str
    taskset: str
    task_key: str
    decoding: str
    trainer_step: int
    num_answers: int
    answer_index: int
    answer: str | None
    reward: float
    reward_parts: dict[str, Any]
    metrics: dict[str, Any]
    outcome: str
    stop_reason: str | None
    error: str | None
    num_turns: int
    num_response_tokens: int
    finish_reason: str
    seconds: float | None
    response: str
    chats: list[dict[str, Any]]


def stored_answers(buffer: Buffer, evaluation_id: int, task_key: str | None) -> list[StoredAnswer]:
    """Return the answers to a question of an evaluation.

    Raises:
        QueryError: the evaluation has no answer to such a task; the message names the tasks with the lowest rewards.
    """
    check_integer("evaluation_id", evaluation_id)
    database = buffer.database
    rows = database.fetch("answers_to_show", evaluation_id=evaluation_id, task_key=task_key)
    if not rows:
        keys = [row["task_key"] for row in database.fetch("questions_to_show", evaluation_id=evaluation_id)]
        if not keys:
            raise _unknown("evaluation", evaluation_id, "rft.evaluation_answer")
        raise QueryError(
            f"evaluation {evaluation_id} has no answers to this task" if task_key else "no task is named",
            value=task_key,
            allowed=f"those with the lowest rewards are {', '.join(keys)}",
            todo=f"`rft show --evaluation {evaluation_id} --task {keys[0]}` shows one",
        )
    return records(StoredAnswer, rows)


def stored_experience(buffer: Buffer, experience_id: int) -> StoredRollout:
    """Return the rollout of an experience with that experience alone.

    Raises:
        QueryError: the experience does not exist.
    """
    check_integer("experience_id", experience_id)
    rows = buffer.database.fetch("rollout_of_experience", experience_id=experience_id)
    if not rows:
        raise _unknown("experience", experience_id, "rft.experience")
    [rollout] = _facts(buffer.database, [rows[0]["rollout_id"]])
    rollout.experiences.extend(_experiences(buffer, [experience_id]))
    return rollout


def stored_rollout(buffer: Buffer, rollout_id: int) -> StoredRollout:
    """Return a rollout with its experiences.

    Raises:
        QueryError: the rollout does not exist.
    """
    check_integer("rollout_id", rollout_id)
    found = _facts(buffer.database, [rollout_id])
    if not found:
        raise _unknown("rollout", rollout_id, "rft.rollout")
    [rollout] = found
    rollout.experiences.extend(_experiences(buffer, rollout.experience_ids))
    return rollout


def stored_group(buffer: Buffer, group_id: int) -> StoredGroup:
    """Return a group with its rollouts.

    Raises:
        QueryError: the group does not exist.
    """
    check_integer("group_id", group_id)
    rows = buffer.database.fetch("group_to_show", group_id=group_id)
    if not rows:
        raise _unknown("group", group_id, "rft.rollout_group")
    rollouts = _facts(buffer.database, rows[0]["rollout_ids"])
    annotations = _annotations(buffer.database, "group", [group_id])[group_id]
    return records(StoredGroup, [{**rows[0], "rollouts": rollouts, "annotations": annotations}])[0]


def _facts(database: Database, rollout_ids: Sequence[int]) -> list[StoredRollout]:
    """Return rollouts without their experiences."""
    rows = database.fetch("rollouts_to_show", rollout_ids=list(rollout_ids))
    annotations = _annotations(database, "rollout", rollout_ids)
    return records(
        StoredRollout,
        [
            {
                **row,
                "tries": records(StoredTry, row["tries"]),
                "experiences": [],
                "annotations": annotations[row["rollout_id"]],
            }
            for row in rows
        ],
    )


def _annotations(database: Database, target: str, ids: Sequence[int]) -> dict[int, list[StoredAnnotation]]:
    found: dict[int, list[StoredAnnotation]] = defaultdict(list)
    for row in database.fetch("annotations_to_show", target=target, target_ids=list(ids)):
        found[row.pop("target_id")] += records(StoredAnnotation, [row])
    return found


def _experiences(buffer: Buffer, experience_ids: Sequence[int]) -> list[StoredExperience]:
    if not experience_ids:
        return []
    labels: dict[int, list[StoredLabel]] = defaultdict(list)
    for row in buffer.database.fetch("labels_to_show", experience_ids=list(experience_ids)):
        labels[row.pop("experience_id")] += records(StoredLabel, [row])
    annotations = _annotations(buffer.database, "experience", experience_ids)
    of_turns: dict[int, list[StoredTurnReward]] = defaultdict(list)
    for row in buffer.database.fetch("turn_rewards_to_show", experience_ids=list(experience_ids)):
        of_turns[row.pop("experience_id")] += records(StoredTurnReward, [row])
    ids = ", ".join(map(str, experience_ids))
    with buffer.scan([*_COLUMNS, *_ARRAYS], f"experience_id IN ({ids})") as reader:
        rows = {row["experience_id"]: row for batch in reader for row in batch.to_pylist()}
    return [
        StoredExperience(
            **{name: _parsed(name, value) for name, value in rows[key].items()},
            turn_rewards=of_turns[key],
            labels=labels[key],
            annotations=annotations[key],
            uses=uses(buffer.database, key),
            purge=purge_of(buffer.database, key),
        )
        for key in experience_ids
    ]


def _parsed(name: str, value: Any) -> Any:
    """Return a value of a scan, in which JSON is text."""
    return json.loads(value) if name in _JSON and isinstance(value, str) else value


def _unknown(what: str, value: int, table: str) -> QueryError:
    newest = f'rft sql "select max({what}_id) from {table}"'
    return QueryError(f"unknown {what}", value=value, todo=f"`{newest}` shows the newest")
