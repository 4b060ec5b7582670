"""Writing sealed groups: arrays to a durable segment first, then every row in one transaction.

A write batch carries a receipt made before its first try, so a retry after a lost answer inserts nothing. Groups that an
explorer claimed are written under their claim token: a writer whose claim passed to somebody else gets `FencedError` and
nothing of its batch is stored. Ids are taken from the sequences first, so that rows travel by binary COPY.
"""

from __future__ import annotations

import contextlib
import math
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from psycopg.types.json import Jsonb

from rftdata import wake
from rftdata.database import Connection, copy_rows, execute, fetch, storable
from rftdata.errors import BufferUnavailableError, ConflictError, FencedError, RftError
from rftdata.segments import SCHEMA, Appended, SegmentStore

if TYPE_CHECKING:
    from rftdata.database import Database

_RETRIES = 5
_RETRY_AFTER_S = 0.5
_OUTCOMES = ("ok", "failed", "timeout", "cancelled")
_SOURCES = ("explorer", "human", "import", "synthesis")


@dataclass
class Sequence:
    """One trainable sequence: a whole rollout, or one turn of it. T = prompt and response tokens.

    Attributes:
        prompt, response: as text.
        token_ids: [T].
        num_prompt_tokens: how many of them come before the response.
        behavior_logprobs: [T - num_prompt_tokens] nats, of the response tokens; None where nobody sampled (demonstrations).
        loss_mask: [T - num_prompt_tokens]; None trains on every response token.
        policy_spans: (index of the first token, policy_version_id), ascending; empty where no policy sampled.
        finish_reason: stop, length or abort.
        reward: of the sequence; None while awaited.
        reward_parts, metrics: named numbers.
        messages: the chat up to and including the response.
    """

    prompt: str
    response: str
    token_ids: list[int]
    num_prompt_tokens: int
    finish_reason: str
    reward: float | None = None
    behavior_logprobs: list[float] | None = None
    loss_mask: list[bool] | None = None
    policy_spans: list[tuple[int, int]] = field(default_factory=list)
    reward_parts: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    messages: list[dict[str, Any]] | None = None
    parent_id: int | None = None


@dataclass
class Rollout:
    """One try. A failed one keeps its error and the turns it had."""

    index: int
    outcome: str = "ok"
    reward: float | None = None
    sequences: list[Sequence] = field(default_factory=list)
    seconds: float = 0.0
    error: str | None = None


@dataclass
class Group:
    """All rollouts of one task.

    A claimed group names `group_id` and `claim_token`. A group of your own (an import, a person's) names the task
    instead: `taskset`, `task_key` and its `payload`; it is planned and sealed in one go.
    """

    rollouts: list[Rollout]
    group_id: int | None = None
    claim_token: int | None = None
    source: str = "explorer"
    taskset: str | None = None
    task_key: str | None = None
    payload: dict[str, Any] = field(default_factory=dict)


class Writer:
    """Writes groups of one run; threads take turns."""

    def __init__(self, database: Database, store: SegmentStore, run_id: int) -> None:
        self._database = database
        self._appender = store.appender()
        self._file_ids: dict[str, int] = {}
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self.run_id = run_id

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._appender.close()

    def insert(self, *groups: Group) -> list[int]:
        """Store whole groups; returns their ids once rows and arrays are durable.

        Raises:
            FencedError: a group's claim passed to another worker; nothing was stored.
            DiskFullError: no room; nothing was stored.
            RftError: rows that cannot be stored (lengths that do not match, a reward that is not a finite number).
        """
        _validate(groups)
        with self._lock:
            sequences = [sequence for group in groups for rollout in group.rollouts for sequence in rollout.sequences]
            appended = self._appender.append(_encode(sequences)) if sequences else None
            unplanned = [group for group in groups if group.group_id is None]
            try:
                ids = self._write_once(list(groups), unplanned, appended)
            except BaseException:
                for group in unplanned:
                    group.group_id = group.claim_token = None
                raise
        # The groups are stored: a wake-up that is lost now costs a poll interval, not the answer.
        with contextlib.suppress(BufferUnavailableError):
            wake.notify(self._database, wake.SEALED)
        return ids

    def _write_once(self, groups: list[Group], unplanned: list[Group], appended: Appended | None) -> list[int]:
        """Write under one receipt, again and again while the database cannot be reached."""
        receipt = uuid.uuid4()
        for last_try in [False] * _RETRIES + [True]:
            try:
                with self._database.transaction() as connection:
                    # A lost answer: the ids given in the try before are those that were stored.
                    if not fetch(connection, "find_receipt", receipt=receipt):
                        self._write(connection, groups, unplanned, appended, receipt)
                break
            except (BufferUnavailableError, ConflictError):
                if last_try or self._closed.wait(_RETRY_AFTER_S):
                    raise
        return [int(group.group_id or 0) for group in groups]

    def _write(
        self,
        connection: Connection,
        groups: list[Group],
        unplanned: list[Group],
        appended: Appended | None,
        receipt: uuid.UUID,
    ) -> None:
        if unplanned:
            execute(connection, "wait_for_plan_lock", run_id=self.run_id)
            for group in unplanned:
                self._adopt(connection, group)
        group_ids = [int(group.group_id or 0) for group in groups]
        self._lock_groups(connection, groups, group_ids)
        segment_id = self._insert_segment(connection, appended) if appended else 0
        self._insert_rows(connection, groups, segment_id)
        execute(connection, "observe_groups", group_ids=group_ids)
        execute(connection, "seal_groups", group_ids=group_ids)
        num_experiences = sum(len(rollout.sequences) for group in groups for rollout in group.rollouts)
        execute(
            connection,
            "insert_receipt",
            receipt=receipt,
            run_id=self.run_id,
            num_groups=len(groups),
            num_experiences=num_experiences,
        )

    def _lock_groups(self, connection: Connection, groups: list[Group], group_ids: list[int]) -> None:
        tokens = [group.claim_token for group in groups]
        rows = fetch(connection, "lock_claimed_groups", group_ids=group_ids, claim_tokens=tokens)
        sizes = {row["group_id"]: row["group_size"] for row in rows}
        for group_id, group in zip(group_ids, groups, strict=True):
            if group_id not in sizes:
                raise FencedError(
                    f"group {group_id} is no longer held by this worker",
                    todo="drop the result: another worker does the group again",
                )
            if len(group.rollouts) != sizes[group_id]:
                raise RftError(
                    f"group {group_id} is written with another number of rollouts than planned", value=len(group.rollouts),
                    allowed=str(sizes[group_id]), todo="record those that failed with their outcome",
                )  # fmt: skip

    def _adopt(self, connection: Connection, group: Group) -> None:
        task_id = fetch(
            connection, "upsert_task", taskset=storable(group.taskset), task_key=storable(group.task_key),
            payload=Jsonb(storable(group.payload)),
        )[0]["task_id"]  # fmt: skip
        row = fetch(
            connection,
            "adopt_group",
            run_id=self.run_id,
            task_id=task_id,
            group_size=len(group.rollouts),
            source=group.source,
        )[0]
        group.group_id, group.claim_token = row["group_id"], row["claim_token"]

    def _insert_segment(self, connection: Connection, appended: Appended) -> int:
        end = appended.offset_bytes + appended.length_bytes
        file_id = self._file_ids.get(appended.uri)
        if file_id is None or not execute(connection, "grow_segment_file", file_id=file_id, size_bytes=end):
            file_id = fetch(connection, "insert_segment_file", uri=appended.uri, size_bytes=end)[0]["file_id"]
            self._file_ids[appended.uri] = file_id
        row = fetch(
            connection, "insert_segment", file_id=file_id, offset_bytes=appended.offset_bytes,
            length_bytes=appended.length_bytes, num_rows=appended.num_rows, checksum=appended.checksum,
        )[0]  # fmt: skip
        return int(row["segment_id"])

    def _insert_rows(self, connection: Connection, groups: list[Group], segment_id: int) -> None:
        rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
        experiences = [
            (group, rollout, i, sequence) for group, rollout in rollouts for i, sequence in enumerate(rollout.sequences)
        ]
        ids = fetch(connection, "reserve_ids", rollouts=len(rollouts), experiences=len(experiences))[0]
        rollout_ids = {
            id(rollout): rollout_id for (_, rollout), rollout_id in zip(rollouts, ids["rollouts"], strict=True)
        }
        copy_rows(
            connection, "rft.rollout", _ROLLOUT_COLUMNS,
            (
                (rollout_ids[id(r)], g.group_id, r.index, r.outcome, r.reward, len(r.sequences), r.seconds, storable(r.error))
                for g, r in rollouts
            ),
        )  # fmt: skip
        places = zip(ids["experiences"], range(len(experiences)), experiences, strict=True)
        copy_rows(
            connection, "rft.experience", _EXPERIENCE_COLUMNS,
            (
                _experience_row(i, self.run_id, segment_id, row, rollout_ids[id(r)], g, turn, s)
                for i, row, (g, r, turn, s) in places
            ),
        )  # fmt: skip


# Enums travel as text: both have the same binary form.
_ROLLOUT_COLUMNS = (
    ("rollout_id", "int8"), ("group_id", "int8"), ("rollout_index", "int4"), ("outcome", "text"), ("reward", "float8"),
    ("num_turns", "int4"), ("seconds", "float8"), ("error", "text"),
)  # fmt: skip
_EXPERIENCE_COLUMNS = (
    ("experience_id", "int8"), ("run_id", "int8"), ("group_id", "int8"), ("rollout_id", "int8"), ("turn_index", "int4"),
    ("source", "text"), ("parent_id", "int8"), ("prompt", "text"), ("response", "text"), ("messages", "jsonb"),
    ("reward_sampled", "float8"), ("reward", "float8"), ("reward_parts", "jsonb"), ("metrics", "jsonb"),
    ("policy_version_min", "int8"), ("policy_version_max", "int8"), ("num_prompt_tokens", "int4"),
    ("num_response_tokens", "int4"), ("finish_reason", "text"), ("segment_id", "int8"), ("segment_row", "int4"),
)  # fmt: skip


def _experience_row(
    experience_id: int,
    run_id: int,
    segment_id: int,
    segment_row: int,
    rollout_id: int,
    group: Group,
    turn: int,
    s: Sequence,
) -> tuple[Any, ...]:
    versions = [version for _, version in s.policy_spans]
    return (
        experience_id, run_id, group.group_id, rollout_id, turn, group.source, s.parent_id, storable(s.prompt),
        storable(s.response), None if s.messages is None else storable(s.messages), s.reward, s.reward, storable(s.reward_parts),
        storable(s.metrics), min(versions, default=None), max(versions, default=None), s.num_prompt_tokens,
        len(s.token_ids) - s.num_prompt_tokens, storable(s.finish_reason), segment_id, segment_row,
    )  # fmt: skip


def _encode(sequences: list[Sequence]) -> pa.RecordBatch:
    def over_tokens(sequence: Sequence, values: list[Any]) -> list[Any]:
        return [0] * sequence.num_prompt_tokens + values

    def rows() -> Iterator[dict[str, Any]]:
        for s in sequences:
            num_response = len(s.token_ids) - s.num_prompt_tokens
            mask = [True] * num_response if s.loss_mask is None else s.loss_mask
            yield {
                "token_ids": s.token_ids,
                "loss_mask": over_tokens(s, [int(m) for m in mask]),
                "behavior_logprobs": over_tokens(s, s.behavior_logprobs or [0.0] * num_response),
                "policy_spans": [{"start": start, "policy_version_id": version} for start, version in s.policy_spans],
            }

    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for row in rows():
        for name, value in row.items():
            columns[name].append(value)
    return pa.record_batch([pa.array(columns[name], SCHEMA.field(name).type) for name in SCHEMA.names], schema=SCHEMA)


def _validate(groups: tuple[Group, ...]) -> None:
    claimed = [group.group_id for group in groups if group.group_id is not None]
    if len(set(claimed)) < len(claimed):
        raise RftError("a group is given twice", value=sorted(claimed), todo="write each group once")
    for group in groups:
        if group.group_id is None and (group.taskset is None or group.task_key is None):
            raise RftError(
                "a group needs either group_id and claim_token, or taskset and task_key", todo="name its task"
            )
        if group.source not in _SOURCES:
            raise RftError("a group has an unknown source", value=group.source, allowed=", ".join(_SOURCES))
        if (
            sorted(rollout.index for rollout in group.rollouts) != list(range(len(group.rollouts)))
            or not group.rollouts
        ):
            raise RftError(
                "a group's rollouts must be numbered from 0, one after the other",
                value=[r.index for r in group.rollouts],
            )
        for rollout in group.rollouts:
            if rollout.outcome not in _OUTCOMES:
                raise RftError("a rollout has an unknown outcome", value=rollout.outcome, allowed=", ".join(_OUTCOMES))
            _check_reward(rollout.reward)
            for sequence in rollout.sequences:
                _validate_sequence(sequence)


def _validate_sequence(s: Sequence) -> None:
    if not 0 <= s.num_prompt_tokens <= len(s.token_ids):
        raise RftError(
            "a sequence cannot have so many prompt tokens",
            value=s.num_prompt_tokens,
            allowed=f"0 to {len(s.token_ids)}",
        )
    num_response = len(s.token_ids) - s.num_prompt_tokens
    for name in ("behavior_logprobs", "loss_mask"):
        values = getattr(s, name)
        if values is not None and len(values) != num_response:
            raise RftError(
                f"{name} must have one value per response token", value=len(values), allowed=str(num_response)
            )
    starts = [start for start, _ in s.policy_spans]
    if starts != sorted(set(starts)) or any(not 0 <= start < len(s.token_ids) for start in starts):
        raise RftError(
            "policy_spans must begin at ascending tokens of the sequence",
            value=s.policy_spans,
            allowed=f"0 to {len(s.token_ids) - 1}",
        )
    _check_reward(s.reward)


def _check_reward(reward: float | None) -> None:
    if reward is not None and not math.isfinite(reward):
        raise RftError(
            "a reward is not a finite number",
            value=reward,
            todo="give None while it is awaited, or record the rollout as failed",
        )
