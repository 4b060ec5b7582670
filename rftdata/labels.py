"""Correction of rewards: set, import, undo, history.

A change is an UPDATE of `rft.experience.reward` or `rft.turn_reward.reward`, exactly as a person would write it in SQL. Triggers
(`rft.record_labels` and `rft.record_turn_labels` in sql/migrations/versions/0003_agents/03_turn_reward.sql) write the labels and reopen
their groups (`rft.reopen_groups` in 0001_initial/08_group.sql), so the pipeline decides on them again before they are drawn.

This module adds the batch: one transaction, one author, one id by which all of it can be undone. Undoing is itself a batch of labels, so
nothing is ever removed from the history. A row is restored only while the batch's reward is the current one: undoing an earlier label never
overwrites a later one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from rftdata.buffer import Buffer
from rftdata.errors import QueryError
from rftdata.label_files import read_rewards
from rftdata.limits import LARGEST_REWARD
from rftdata.origin import undo_reason, undone_batch
from rftdata.postgres.database import Connection, Row, execute, fetch

Source = Literal["set", "import", "undo"]  # of rft.label_source
Key = tuple[int, int | None]  # experience and turn; None for the reward of the experience


@dataclass(frozen=True)
class LabelBatch:
    """The result of one batch.

    Attributes:
        label_batch_id: id for undoing it.
        num_changed: rows whose reward or finality changed.
        num_unchanged: rows that already had this reward and finality; they got no label.
        overruled: rows that an undo left unchanged because they were labelled again later.
        overruled_turns: the same for rewards of turns: experience and turn of each.
        num_answered: open questions about the rows, which setting a reward answers, even the same one.
        num_annotations: annotations that an undo undid.
        overruled_annotations: annotations that an undo left, because others superseded them later.
    """

    label_batch_id: int
    num_changed: int
    num_unchanged: int
    overruled: tuple[int, ...] = ()
    overruled_turns: tuple[tuple[int, int], ...] = ()
    num_answered: int = 0
    num_annotations: int = 0
    overruled_annotations: tuple[int, ...] = ()


@dataclass(frozen=True)
class RewardLabel:
    """A reward to set for one experience, or for one of its turns."""

    experience_id: int
    reward: float | None
    final: bool = False
    reason: str | None = None
    turn: int | None = None

    @property
    def key(self) -> Key:
        return self.experience_id, self.turn

    @property
    def name(self) -> str:
        return f"experience {self.experience_id}" + ("" if self.turn is None else f", turn {self.turn}")


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


def set_turn_rewards(
    buffer: Buffer, rewards: Mapping[tuple[int, int], float], *, author: str, reason: str | None = None
) -> LabelBatch:
    """Set rewards of turns in one transaction and one batch. The rewards of their experiences stay as they are.

    Args:
        rewards: (experience_id, number of the turn in its rollout) -> reward.
        author, reason: as for `set_rewards`.

    Raises:
        QueryError: an experience or a turn of it does not exist, no rewards of its turns were recorded, or a reward is not a finite number;
            nothing is written.
    """
    labels = [RewardLabel(key, value, reason=reason, turn=turn) for (key, turn), value in rewards.items()]
    return apply(buffer, labels, author=author, source="set")


def set_rollout_reward(
    buffer: Buffer, rollout_id: int, reward: float, *, author: str, reason: str | None = None, final: bool = False
) -> LabelBatch:
    """Set the reward of all experiences of a rollout. In statistics of tasks it is one trial, however many there are.

    Raises:
        QueryError: the rollout does not exist or has no experience, or the reward is not a finite number; nothing is written.
    """
    rows = buffer.database.fetch_by_index("experiences_of_rollout", rollout_id=rollout_id)
    if not rows:
        raise QueryError(
            "the rollout does not exist, or has no experience", value=rollout_id, todo="rft.v_experience has rollout_id"
        )
    rewards = {int(row["experience_id"]): reward for row in rows}
    return set_rewards(buffer, rewards, author=author, reason=reason, final=final)


def apply(buffer: Buffer, labels: Sequence[RewardLabel], *, author: str, source: Source) -> LabelBatch:
    """Write rewards as one batch; like `set_rewards`, with a reason and finality per row, and the source that the labels name."""
    _check(labels)  # before a connection is taken
    with buffer.database.transaction() as connection:
        lock(connection, [label.key for label in labels])
        return write(connection, labels, author=author, source=source)


def import_rewards(
    buffer: Buffer, file: Path, *, author: str, reason: str | None = None, final: bool = False
) -> LabelBatch:
    """Set rewards from a CSV, JSONL or Parquet file with columns experience_id, reward and, optionally, turn and reason.

    A row with a turn sets the reward of that turn alone.

    Args:
        reason: for rows without their own.

    Raises:
        QueryError: unreadable file, missing or double column, a row without id or reward, an id twice, an unknown id; nothing is written.
    """
    labels = [
        RewardLabel(row.experience_id, row.reward, final, row.reason or reason, row.turn) for row in read_rewards(file)
    ]
    return apply(buffer, labels, author=author, source="import")


def undo(buffer: Buffer, label_batch_id: int, *, author: str, reason: str | None = None) -> LabelBatch:
    """Restore the reward that every row of a batch had before, and the annotations that stood, as a new batch.

    Rows labelled again since keep the later label and are listed in `overruled`, those of annotations in `overruled_annotations`.

    Raises:
        QueryError: the batch does not exist.
    """
    with buffer.database.transaction() as connection:
        return undo_in(connection, label_batch_id, author=author, reason=reason)


def undo_in(connection: Connection, label_batch_id: int, *, author: str, reason: str | None = None) -> LabelBatch:
    """Undo a batch in the transaction of the caller; like `undo`."""
    note = undo_reason(label_batch_id, reason)
    batch = fetch(connection, "label_batch", label_batch_id=label_batch_id)
    annotated = fetch(connection, "annotations_of_batch", label_batch_id=label_batch_id)
    if not batch and not annotated:
        raise QueryError(
            "unknown label batch",
            value=label_batch_id,
            todo="`rft label history` lists the newest batches",
        )
    keys = {(row["experience_id"], row["turn"]) for row in batch}
    lock(connection, list(keys))
    earlier = fetch(connection, "label_histories", experience_ids=sorted({key for key, _ in keys}))
    labels, overruled, overruled_turns = [], [], []
    for (key, turn), rows in groupby(earlier, key=lambda row: (row["experience_id"], row["turn"])):
        if (key, turn) not in keys:
            continue
        before = _before(list(rows), label_batch_id)
        if before is not None:
            labels.append(RewardLabel(key, before[0], before[1], note, turn))
        elif turn is None:
            overruled.append(key)
        else:
            overruled_turns.append((key, turn))
    done = write(connection, labels, author=author, source="undo")
    undone = _undo_annotations(connection, annotated, label_batch_id, author, reason, done) if annotated else []
    return replace(
        done,
        overruled=tuple(overruled),
        overruled_turns=tuple(overruled_turns),
        num_answered=0,
        num_annotations=sum(not row["is_overruled"] for row in undone),
        overruled_annotations=tuple(row["undone_id"] for row in undone if row["is_overruled"]),
    )


def _undo_annotations(
    connection: Connection, annotated: Sequence[Row], of_batch: int, author: str, reason: str | None, done: LabelBatch
) -> list[Row]:
    kinds, targets = [row["kind"] for row in annotated], [row["target_id"] for row in annotated]
    execute(connection, "lock_annotations", kinds=kinds, target_ids=targets)
    fetch(
        connection, "label_settings", author=author, reason="", source="undo", label_batch_id=str(done.label_batch_id)
    )
    return fetch(connection, "undo_annotations", label_batch_id=of_batch, words=reason)


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
    seen: set[Key] = set()
    for label in labels:
        if label.reward is None or not abs(label.reward) < LARGEST_REWARD:
            raise QueryError(
                f"the reward of {label.name} is not a finite number",
                value=label.reward,
                allowed=f"a finite number, between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}",
                todo="correct it; nothing was written",
            )
        if label.final and label.turn is not None:
            raise QueryError(
                "the reward of a turn cannot be final: pipelines shape rewards of whole experiences alone",
                value=label.name,
                todo="leave out final, or the turn",
            )
        if label.key in seen:
            what = "an experience" if label.turn is None else "a turn"
            shown = label.experience_id if label.turn is None else label.name
            raise QueryError(f"{what} is labelled twice in one batch", value=shown, todo="keep one of its rows")
        seen.add(label.key)


def lock(connection: Connection, keys: Sequence[Key]) -> None:
    """Lock experiences, then rewards of turns, then their groups and reviews, as every change of them does."""
    fetch(connection, "plan_by_index")
    experience_ids = sorted({key for key, turn in keys if turn is None})
    turns = sorted((key, turn) for key, turn in keys if turn is not None)
    groups: dict[Key, int] = {
        (row["experience_id"], None): row["group_id"]
        for row in fetch(connection, "label_lock_experiences", experience_ids=experience_ids)
    }
    if unknown := sorted(set(experience_ids) - {key for key, _ in groups}):
        raise QueryError(f"unknown experience {_first_of(unknown)}", todo="correct the ids; nothing was written")
    if turns:
        named = {"experience_ids": [key for key, _ in turns], "turns": [turn for _, turn in turns]}
        groups |= {
            (row["experience_id"], row["turn"]): row["group_id"]
            for row in fetch(connection, "label_lock_turns", **named)
        }
        _refuse_unknown_turns(connection, [key for key in turns if key not in groups])
    execute(connection, "lock_groups_and_reviews", group_ids=sorted(set(groups.values())))


def _first_of(names: Sequence[object]) -> str:
    return ", ".join(map(str, names[:10])) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _refuse_unknown_turns(connection: Connection, missing: Sequence[tuple[int, int]]) -> None:
    if not missing:
        return
    key, turn = missing[0]
    rows = fetch(connection, "turns_of_experience", experience_id=key)
    if not rows:
        raise QueryError(f"unknown experience {key}", todo="correct the ids; nothing was written")
    if not rows[0]["turns"]:
        raise QueryError(
            f"no rewards of turns are stored for experience {key}",
            todo="its workflow must record them (turn.record(step_reward=…)); if it did before schema 0003, run `rft doctor --repair`; nothing was written",
        )
    raise QueryError(
        f"experience {key} has no turn {turn}",
        value=turn,
        allowed=_first_of(rows[0]["turns"]),
        todo="correct the turns; nothing was written",
    )


def write(connection: Connection, labels: Sequence[RewardLabel], *, author: str, source: Source) -> LabelBatch:
    """Write rewards as one batch, in a transaction that has locked them (`lock`).

    Raises:
        QueryError: a reward is not a finite number, or a row is labelled twice.
    """
    if source != "undo":  # which may restore that there was no reward
        _check(labels)
    # The planner must look rows up by their keys, however few there were at the last ANALYZE, and join the list of changed rows by hashing.
    fetch(connection, "plan_by_index")
    fetch(connection, "allow_hash_joins")
    batch = int(fetch(connection, "begin_label_batches", num=1)[0]["label_batch_id"])
    ids = [label.experience_id for label in labels]
    asked = int(fetch(connection, "count_open_reviews", experience_ids=ids)[0]["n"])
    changed = 0
    # The trigger takes the reason from a setting, so rows with one reason are written together.
    for (reason, is_turn), rows in groupby(sorted(labels, key=_statement), key=_statement):
        same = list(rows)
        fetch(connection, "label_settings", author=author, reason=reason, source=source, label_batch_id=str(batch))
        which: dict[str, Any] = {"experience_ids": [o.experience_id for o in same], "rewards": [o.reward for o in same]}
        if is_turn:
            changed += execute(connection, "label_set_turn_rewards", turns=[o.turn for o in same], **which)
        else:
            changed += execute(connection, "label_set_rewards", finals=[o.final for o in same], **which)
    if asked:
        # The trigger has answered the questions about rows with a new reward. Setting the current reward again is an answer, too.
        execute(connection, "answer_reviews", experience_ids=ids)
    return LabelBatch(batch, changed, len(labels) - changed, num_answered=asked)


def _statement(label: RewardLabel) -> tuple[str, bool]:
    return label.reason or "", label.turn is not None


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
        undone = undone_batch(label["reason"])
        restores = stack and (label["new_value"], label["final"]) == replaced(stack[-1])
        if restores and stack[-1] == undone:
            stack.pop()
        elif not stack or stack[-1] != label["label_batch_id"]:
            stack.append(label["label_batch_id"])
    if labels[-1]["label_batch_id"] != batch and (not stack or stack[-1] != batch):
        return None
    return replaced(batch)
