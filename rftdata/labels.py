"""Correction of rewards: set, import, undo, history.

A change is an UPDATE of `rft.experience.reward`, exactly as a person would write it in SQL. The trigger `rft.record_labels`
(sql/migrations/versions/0001_initial/12_label.sql) writes the labels and reopens their groups (`rft.reopen_groups` in 08_group.sql), so the
pipeline decides on them again before they are drawn.

This module adds the batch: one transaction, one author, one id by which all of it can be undone. Undoing is itself a batch of labels, so
nothing is ever removed from the history. A row is restored only while the batch's reward is the current one: undoing an earlier label never
overwrites a later one.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from rftdata.buffer import Buffer
from rftdata.errors import QueryError
from rftdata.postgres.database import Connection, Row, execute, fetch
from rftdata.postgres.values import storable

Source = Literal["set", "import", "undo"]  # of rft.label_source
_UNDO = re.compile(r"^undo of label batch (\d+)")


@dataclass(frozen=True)
class LabelBatch:
    """The result of one batch.

    Attributes:
        label_batch_id: id for undoing it.
        num_changed: rows whose reward or finality changed.
        num_unchanged: rows that already had this reward and finality; they got no label.
        overruled: rows that an undo left unchanged because they were labelled again later.
        num_answered: open questions about the rows, which setting a reward answers, even the same one.
    """

    label_batch_id: int
    num_changed: int
    num_unchanged: int
    overruled: tuple[int, ...] = ()
    num_answered: int = 0


@dataclass(frozen=True)
class RewardLabel:
    """A reward to set for one experience."""

    experience_id: int
    reward: float | None
    final: bool = False
    reason: str | None = None


def set_rewards(
    buffer: Buffer, rewards: Mapping[int, float], *, author: str, reason: str | None = None, final: bool = False
) -> LabelBatch:
    """Set rewards in one transaction and one batch.

    Args:
        rewards: experience_id -> reward.
        author: who gives the rewards; stored together with the database's session user.
        reason: the reason; stored with every label.
        final: whether the rewards bypass reward shaping.

    Raises:
        QueryError: an experience does not exist, or a reward is not a finite number; nothing is written.
    """
    labels = [RewardLabel(key, value, final, reason) for key, value in rewards.items()]
    return apply(buffer, labels, author=author, source="set")


def apply(buffer: Buffer, labels: Sequence[RewardLabel], *, author: str, source: Source) -> LabelBatch:
    """Write rewards as one batch; like `set_rewards`, with a reason and finality per row, and the source that the labels name."""
    _check(labels)
    with buffer.database.transaction() as connection:
        _lock(connection, [label.experience_id for label in labels])
        return _write(connection, labels, author, source)


def import_rewards(
    buffer: Buffer, file: Path, *, author: str, reason: str | None = None, final: bool = False
) -> LabelBatch:
    """Set rewards from a CSV, JSONL or Parquet file with columns experience_id, reward and, optionally, reason.

    Args:
        reason: for rows without their own.

    Raises:
        QueryError: unreadable file, missing or double column, a row without id or reward, an id twice, an unknown id; nothing is written.
    """
    table = _read(file)
    missing = [name for name in ("experience_id", "reward") if name not in table.column_names]
    if missing:
        raise QueryError(
            f"{file} lacks the column {' and '.join(missing)}",
            value=", ".join(table.column_names),
            allowed="experience_id, reward and, optionally, reason",
            todo="rename the columns",
        )
    if twice := sorted({name for name in table.column_names if table.column_names.count(name) > 1}):
        raise QueryError(f"{file} has two columns {twice[0]}", todo="remove one of them")
    labels = []
    for number, row in enumerate(table.to_pylist(), 1):
        try:
            key, value = _id(row["experience_id"]), _number(row["reward"])
        except (TypeError, ValueError) as error:
            raise QueryError(
                f"row {number} of {file} has no usable experience_id and reward",
                value=f"{row['experience_id']}, {row['reward']}",
                allowed="a whole number and a number",
                todo="correct the row",
            ) from error
        if not math.isfinite(value):
            raise QueryError(
                f"row {number} of {file} has a reward for experience {key} that is not a finite number",
                value=value,
                allowed="a finite number",
                todo="correct the row; nothing was written",
            )
        labels.append(RewardLabel(key, value, final, _reason(row.get("reason")) or reason))
    return apply(buffer, labels, author=author, source="import")


def _id(value: object) -> int:
    # int() alone also takes 1_0, digits of other scripts, true, and numbers that no id has.
    if not re.fullmatch(r"[0-9]{1,18}", str(value)):
        raise ValueError(value)
    return int(str(value))


def _number(value: Any) -> float:
    if isinstance(value, bool) or (isinstance(value, str) and ("_" in value or not value.isascii())):
        raise ValueError(value)
    return float(value)


def _reason(value: object) -> str | None:
    """Convert a cell to a reason. A column of reasons may have been read as numbers or dates, and an empty cell as NaN."""
    missing = value is None or (isinstance(value, float) and math.isnan(value))
    return None if missing else storable(str(value).strip()) or None


def undo(buffer: Buffer, label_batch_id: int, *, author: str, reason: str | None = None) -> LabelBatch:
    """Restore the reward that every row of a batch had before, as a new batch.

    Rows labelled again since keep the later label and are listed in `overruled`.

    Raises:
        QueryError: the batch does not exist.
    """
    note = f"undo of label batch {label_batch_id}" + (f": {reason}" if reason else "")
    with buffer.database.transaction() as connection:
        batch = fetch(connection, "label_batch", label_batch_id=label_batch_id)
        if not batch:
            raise QueryError(
                "unknown label batch",
                value=label_batch_id,
                todo="`rft label history` lists the newest batches",
            )
        keys = sorted({row["experience_id"] for row in batch})
        _lock(connection, keys)
        earlier = fetch(connection, "label_histories", experience_ids=keys)
        labels, overruled = [], []
        for key, rows in groupby(earlier, key=lambda row: row["experience_id"]):
            before = _before(list(rows), label_batch_id)
            if before is None:
                overruled.append(key)
            else:
                labels.append(RewardLabel(key, before[0], before[1], note))
        done = _write(connection, labels, author, "undo")
    return LabelBatch(done.label_batch_id, done.num_changed, done.num_unchanged, tuple(overruled))


def history(
    buffer: Buffer, experience_id: int | None = None, label_batch_id: int | None = None, limit: int = 1000
) -> list[Row]:
    """Return labels, newest first, of one experience, of one batch, or all."""
    return buffer.database.fetch(
        "label_history", experience_id=experience_id, label_batch_id=label_batch_id, limit=limit
    )


def batches(buffer: Buffer, limit: int = 20) -> list[Row]:
    """Return the newest label batches of all authors."""
    return buffer.database.fetch("label_batches", limit=limit)


def _check(labels: Sequence[RewardLabel]) -> None:
    seen: set[int] = set()
    for label in labels:
        if label.reward is None or not math.isfinite(label.reward):
            raise QueryError(
                f"the reward of experience {label.experience_id} is not a finite number",
                value=label.reward,
                allowed="a finite number",
                todo="correct it; nothing was written",
            )
        if label.experience_id in seen:
            raise QueryError(
                "an experience is labelled twice in one batch", value=label.experience_id, todo="keep one of its rows"
            )
        seen.add(label.experience_id)


def _lock(connection: Connection, keys: Sequence[int]) -> None:
    groups = {
        row["experience_id"]: row["group_id"]
        for row in fetch(connection, "label_lock_experiences", experience_ids=list(keys))
    }
    unknown = sorted(set(keys) - groups.keys())
    if unknown:
        shown = ", ".join(map(str, unknown[:10])) + (f" and {len(unknown) - 10} more" if len(unknown) > 10 else "")
        raise QueryError(f"unknown experience {shown}", todo="correct the ids; nothing was written")
    execute(connection, "lock_groups_and_reviews", group_ids=sorted(set(groups.values())))


def _write(connection: Connection, labels: Sequence[RewardLabel], author: str, source: Source) -> LabelBatch:
    # The planner must look rows up by their keys, however few there were at the last ANALYZE, and join the list of changed rows by hashing.
    fetch(connection, "plan_by_index")
    fetch(connection, "allow_hash_joins")
    batch = int(fetch(connection, "begin_label_batches", num=1)[0]["label_batch_id"])
    ids = [label.experience_id for label in labels]
    asked = int(fetch(connection, "count_open_reviews", experience_ids=ids)[0]["n"])
    changed = 0
    # The trigger takes the reason from a setting, so rows with one reason are written together.
    for reason, rows in groupby(sorted(labels, key=lambda o: o.reason or ""), key=lambda o: o.reason or ""):
        same = list(rows)
        fetch(connection, "label_settings", author=author, reason=reason, source=source, label_batch_id=str(batch))
        changed += execute(
            connection,
            "label_set_rewards",
            experience_ids=[o.experience_id for o in same],
            rewards=[o.reward for o in same],
            finals=[o.final for o in same],
        )
    if asked:
        # The trigger has answered the questions about rows with a new reward. Setting the current reward again is an answer, too.
        execute(connection, "answer_reviews", experience_ids=ids)
    return LabelBatch(batch, changed, len(labels) - changed, num_answered=asked)


def num_open_reviews(buffer: Buffer, run_id: int) -> int:
    """Return the number of a run's questions that wait for a person."""
    return int(buffer.database.fetch("num_open_reviews", run_id=run_id)[0]["n"])


def review_queue(buffer: Buffer, run_id: int | None, limit: int) -> list[Row]:
    """Return the questions that wait for a person, of one run or of all (None), the most urgent first."""
    return buffer.database.fetch("review_queue", run_id=run_id, count=limit)


def _before(labels: Sequence[Row], batch: int) -> tuple[float | None, bool] | None:
    """Return the reward and finality a row had before `batch`, or None if a later label counts instead.

    `labels` are one experience's, oldest first. They form a stack: an undo removes its target from the top, and every other label goes on
    top. The newest may always be undone; undoing an undo restores its target's reward. A reason alone does not identify an undo, since any
    author may write such a sentence, so an undo must also restore what its target replaced.
    """
    first = {label["label_batch_id"]: i for i, label in reversed(list(enumerate(labels)))}

    def replaced(of: int) -> tuple[float | None, bool]:
        i = first[of]
        return labels[i]["old_value"], bool(i and labels[i - 1]["final"])

    stack: list[int] = []
    for label in labels:
        undone = _UNDO.match(label["reason"] or "")
        restores = stack and (label["new_value"], label["final"]) == replaced(stack[-1])
        if undone and restores and stack[-1] == int(undone[1]):
            stack.pop()
        elif not stack or stack[-1] != label["label_batch_id"]:
            stack.append(label["label_batch_id"])
    if labels[-1]["label_batch_id"] != batch and (not stack or stack[-1] != batch):
        return None
    return replaced(batch)


def _check_quotes(file: Path) -> None:
    """Refuse quotes that do not end, or end before their value does. Arrow accepts both, and reads what follows a missing quote as a reason."""
    number = 0  # that of the header
    with file.open(encoding="utf-8-sig", errors="replace", newline="") as opened:
        try:
            for fields in csv.reader(opened, strict=True):
                number += bool(fields)
        except csv.Error as error:
            where = f"row {number} of {file}" if number else f"the header of {file}"
            raise QueryError(
                f"{where} is not CSV: {error}",
                allowed='a value in quotes ends with one, and a quote within it is written ""',
                todo="correct the row, or copy the whole file again; nothing was written",
            ) from error


def _read(file: Path) -> pa.Table:
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.read_table(file)
        if file.suffix in (".jsonl", ".ndjson"):
            import pyarrow.json

            return pyarrow.json.read_json(file)
        if file.suffix == ".csv":
            import pyarrow.csv

            _check_quotes(file)
            # Values as written: 007 is a reason and not the number 7, and nan is a wrong reward and not a missing one.
            options = pyarrow.csv.ConvertOptions(column_types={"reason": pa.string()}, null_values=[""])
            parsing = pyarrow.csv.ParseOptions(newlines_in_values=True)
            return pyarrow.csv.read_csv(file, parse_options=parsing, convert_options=options)
    except (OSError, pa.ArrowInvalid) as error:
        raise QueryError(
            f"{file} cannot be read: {' '.join(str(error).split())}", todo="correct the path or the file"
        ) from error
    raise QueryError(
        "labels are not read from this kind of file",
        value=str(file),
        allowed=".csv, .jsonl, .parquet",
        todo="convert it",
    )
