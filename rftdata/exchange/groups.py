"""The groups of a file: rows that belong together, and what they are when they are stored.

`grouped` finds the rows, `group_of` builds the group. Neither checks what `check_group` checks, so that a file that is read twice, first to
check it and then to store it, is checked once.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rftdata.errors import QueryError, RftError
from rftdata.exchange.columns import REQUIRED, REQUIRED_OF_EXPERIENCE, Row, unpacked
from rftdata.exchange.formats import read
from rftdata.experience import (
    SOURCES,
    Baseline,
    Group,
    GroupOrigin,
    LabelRecord,
    Rollout,
    Sequence,
    SequenceOrigin,
    check_reward,
    validate,
)
from rftdata.segments.codec import check_further_arrays

Origin = tuple[str, int, str]  # buffer id, run id and run name
Placed = tuple[str, Row]  # a row and its place, for messages
_REFUSALS = (RftError, ValueError, TypeError, KeyError, AttributeError)


def grouped(path: Path) -> Iterator[list[Placed]]:
    """Yield the rows of one group after the other.

    Raises:
        QueryError: a required value is missing, or the rows of a group are not adjacent.
    """
    seen: set[tuple[str, int]] = set()
    rows: list[Placed] = []
    for place, row in read(path):
        required = REQUIRED if row["experience_id"] is None else (*REQUIRED, *REQUIRED_OF_EXPERIENCE)
        missing = [name for name in required if row[name] is None]
        if missing:
            raise bad_row(place, f"the row has no {', '.join(missing[:5])}")
        key = (row["buffer_id"], row["group_id"])
        if rows and key != (rows[0][1]["buffer_id"], rows[0][1]["group_id"]):
            yield rows
            rows = []
        if not rows:
            if key in seen:
                raise bad_row(
                    place, f"rows of group {key[1]} are not adjacent", "sort the file by buffer_id and group_id"
                )
            seen.add(key)
        rows.append((place, row))
    if rows:
        yield rows


def origin_of(row: Row) -> Origin:
    return str(row["buffer_id"]), int(row["run_id"]), str(row["run"])


def group_of(rows: list[Placed], prefix: str, batches: Mapping[int, int]) -> Group:
    """Build a group from its rows.

    Args:
        batches: ids in this buffer of label batches; missing ones keep their own.

    Raises:
        QueryError: a value is not valid for its column.
    """
    place, first = rows[0]
    try:
        rollouts: dict[int, Rollout] = {}
        for row_place, row in rows:
            place = row_place
            index = int(row["rollout_index"])
            if index not in rollouts:
                # Renumbered: a partly exported group becomes a smaller group.
                rollouts[index] = Rollout(
                    len(rollouts),
                    row["outcome"],
                    row["rollout_reward"],
                    seconds=float(row["seconds"]),
                    error=row["error"],
                )
            if row["experience_id"] is not None:
                rollouts[index].sequences.append(_sequence(row, batches))
        place = rows[0][0]
        origin = GroupOrigin(
            buffer_id=first["buffer_id"],
            origin_run_id=first["run_id"],
            origin_run=first["run"],
            origin_group_id=first["group_id"],
            explore_step=first["explore_step"],
            group_size=first["group_size"],
        )
        return Group(
            list(rollouts.values()), source="import", taskset=prefix + first["taskset"], task_key=first["task_key"],
            payload=_json(first["task_payload"]), origin=origin, baseline=_baseline(first["baseline"]),
        )  # fmt: skip
    except _REFUSALS as error:
        raise bad_row(place, " ".join(str(error).split())) from error


def check_group(rows: list[Placed], group: Group) -> None:
    """Refuse a group that the writer would refuse, or that no exported file has.

    Raises:
        QueryError: what is wrong, and where.
    """
    place, first = rows[0]
    try:
        uuid.UUID(first["buffer_id"])
        for name, value in (("task_payload", group.payload), ("task_features", json.loads(first["task_features"]))):
            if not isinstance(value, dict):
                raise ValueError(f"{name} is not a JSON object")
        for row_place, row in rows:
            place = row_place
            if row["experience_id"] is not None:
                _check_origin(row)
        place = rows[0][0]
        validate((group,))
        check_further_arrays([s for rollout in group.rollouts for s in rollout.sequences if s.arrays])
    except _REFUSALS as error:
        raise bad_row(place, " ".join(str(error).split())) from error


def _check_origin(row: Row) -> None:
    if row["source"] not in SOURCES:
        raise RftError("an experience has an unknown source", value=row["source"], allowed=", ".join(SOURCES))
    check_reward(row["reward"])


def _baseline(text: str | None) -> Baseline | None:
    return None if text is None else Baseline(**json.loads(text))


def _sequence(row: Row, batches: Mapping[int, int]) -> Sequence:
    prompt = int(row["num_prompt_tokens"])
    labels = tuple(
        LabelRecord(**{**label, "label_batch_id": batches.get(label["label_batch_id"], label["label_batch_id"])})
        for label in row["labels"]
    )
    origin = SequenceOrigin(
        origin_experience_id=row["experience_id"],
        origin_parent_id=row["parent_id"],
        policy_version_min=row["policy_version_min"],
        policy_version_max=row["policy_version_max"],
        policy_step=row["policy_step"],
        sampled_at=row["created_at"],
        earlier=_json(row["earlier"]),
        source=row["source"],
        reward=row["reward"],
        reward_final=bool(row["reward_final"]),
        labels=labels,
    )
    for name in ("loss_mask", "behavior_logprobs"):
        if len(row[name]) != len(row["token_ids"]):
            raise RftError(
                f"{name} must have one value per token", value=len(row[name]), allowed=str(len(row["token_ids"]))
            )
    return Sequence(
        row["prompt"], row["response"], row["token_ids"], prompt, row["finish_reason"], reward=row["reward_sampled"],
        behavior_logprobs=row["behavior_logprobs"][prompt:], loss_mask=row["loss_mask"][prompt:],
        policy_spans=[(span["start"], span["policy_version_id"]) for span in row["policy_spans"]], reward_parts=_json(row["reward_parts"]),
        metrics=_json(row["metrics"]), messages=None if row["messages"] is None else json.loads(row["messages"]),
        arrays={array["name"]: unpacked(array) for array in row["arrays"]}, origin=origin,
    )  # fmt: skip


def _json(text: str) -> Any:
    return {} if text == "{}" else [] if text == "[]" else json.loads(text)


def bad_row(place: str, what: str, todo: str = "correct the file; nothing was imported") -> QueryError:
    return QueryError(f"{place}: {what.rstrip('.')}", todo=todo)
