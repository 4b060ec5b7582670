"""The groups of a file: rows that belong together, and the groups that are stored for them.

`grouped` finds the rows, `group_of` builds the group. Neither checks what `checked_group` checks, so that a file that is read twice, first
to check it and then to store it, is checked once.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rftdata.errors import QueryError, RftError
from rftdata.exchange.columns import REQUIRED, REQUIRED_OF_EXPERIENCE, Row, unpacked
from rftdata.exchange.formats import read
from rftdata.exchange.row_checks import OF_GROUP, OF_ROLLOUT, check_group_columns, check_row
from rftdata.experience import AbandonedTry, Baseline, Group, Rollout, Sequence
from rftdata.experience_checks import validate
from rftdata.origin import GroupOrigin, LabelRecord, SequenceOrigin
from rftdata.segments.codec import check_further_arrays

Origin = tuple[str, int, str]  # buffer id, run id and run name
Placed = tuple[str, Row]  # a row and its place, for messages


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


def checked_group(rows: list[Placed], prefix: str) -> Group:
    """Build a group from its rows, after checking everything that storing it requires.

    Args:
        prefix: prefix for the taskset's name.

    Raises:
        QueryError: what is wrong, and where.
    """
    rollouts: dict[int, Row] = {}
    experience_ids: set[int] = set()
    place, first = rows[0]
    try:
        check_group_columns(first, prefix)
        for row_place, row in rows:
            place = row_place
            check_row(row)
            _check_same("group", OF_GROUP, first, row)
            _check_same("rollout", OF_ROLLOUT, rollouts.setdefault(row["rollout_index"], row), row)
            if row["experience_id"] in experience_ids:
                raise RftError("the column experience_id has the id of an earlier row", value=row["experience_id"])
            if row["experience_id"] is not None:
                experience_ids.add(row["experience_id"])
        place = rows[0][0]
        group = group_of(rows, prefix, {})
        validate((group,))
        check_further_arrays([s for rollout in group.rollouts for s in rollout.sequences if s.arrays])
    except RftError as error:
        raise bad_row(place, " ".join(str(error).split())) from error
    return group


def _check_same(whose: str, names: tuple[str, ...], first: Row, row: Row) -> None:
    """Refuse a row that contradicts the first one of its group or rollout: only the first one's values are stored."""
    if first is row:
        return
    for name in names:
        if first[name] != row[name] and (first[name] == first[name] or row[name] == row[name]):  # NaN equals NaN
            raise RftError(
                f"the column {name} differs from the first row of its {whose}",
                value=reprlib.repr(row[name]),
                allowed=reprlib.repr(first[name]),
            )


def group_of(rows: list[Placed], prefix: str, batches: Mapping[int, int]) -> Group:
    """Build a group from rows that were checked.

    Args:
        batches: ids in this buffer of label batches; missing ones keep their own.
    """
    first = rows[0][1]
    rollouts: dict[int, Rollout] = {}
    for _, row in rows:
        index = row["rollout_index"]
        if index not in rollouts:
            # Renumbered: a partly exported group becomes a smaller group.
            rollouts[index] = Rollout(
                len(rollouts),
                row["outcome"],
                row["rollout_reward"],
                seconds=float(row["seconds"]),
                error=row["error"],
                stop_reason=row["stop_reason"],
                tries=[AbandonedTry(**tried) for tried in _json(row["tries"] or "[]")],
            )
        if row["experience_id"] is not None:
            rollouts[index].sequences.append(_sequence(row, batches))
    origin = GroupOrigin(
        buffer_id=first["buffer_id"],
        origin_run_id=first["run_id"],
        origin_run=first["run"],
        origin_group_id=first["group_id"],
        explore_step=first["explore_step"],
        group_size=first["group_size"],
    )
    return Group(
        list(rollouts.values()),
        source="import",
        taskset=prefix + first["taskset"],
        task_key=first["task_key"],
        payload=_json(first["task_payload"]),
        origin=origin,
        baseline=_baseline(first["baseline"]),
    )


def _baseline(text: str | None) -> Baseline | None:
    return None if text is None else Baseline(**json.loads(text))


def _sequence(row: Row, batches: Mapping[int, int]) -> Sequence:
    prompt = row["num_prompt_tokens"]
    labels = tuple(LabelRecord(**label).renumbered(batches) for label in row["labels"])
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
        reward_final=row["reward_final"],
        turn_rewards=None if row["turn_rewards"] is None else tuple(row["turn_rewards"]),
        labels=labels,
        annotations=tuple(
            {**a, "label_batch_id": batches.get(a["label_batch_id"], a["label_batch_id"])}
            for a in _json(row["annotations"] or "[]")
        ),
        comments=tuple(_json(row["comments"] or "[]")),
        edit=None if row["edit"] is None else {**json.loads(row["edit"]), "buffer_id": row["buffer_id"]},
    )
    return Sequence(
        row["prompt"],
        row["response"],
        row["token_ids"],
        prompt,
        row["finish_reason"],
        reward=row["reward_sampled"],
        behavior_logprobs=row["behavior_logprobs"][prompt:],
        loss_mask=row["loss_mask"][prompt:],
        policy_spans=[(span["start"], span["policy_version_id"]) for span in row["policy_spans"]],
        reward_parts=_json(row["reward_parts"]),
        metrics=_json(row["metrics"]),
        messages=None if row["messages"] is None else json.loads(row["messages"]),
        arrays={array["name"]: unpacked(array) for array in row["arrays"]},
        turn_index=row["turn_index"],
        fork=row["fork"],
        role=row["role"],
        origin=origin,
    )


def _json(text: str) -> Any:
    return {} if text == "{}" else [] if text == "[]" else json.loads(text)


def bad_row(place: str, what: str, todo: str = "correct the file; nothing was imported") -> QueryError:
    return QueryError(f"{place}: {what.rstrip('.')}", todo=todo)
