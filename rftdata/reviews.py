"""Answers to the questions of `human_review`, one at a time, as a page asks them.

An answer names what its author saw: the newest label of the experience. It is stored only if that is still the newest and the question is
open, so an answer that is sent twice, or from two tabs, has its effect once, and no account overwrites what it has not seen. An
answer that is already stored is reported as repeated.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rftdata import labels
from rftdata.buffer import Buffer
from rftdata.errors import ConflictError, QueryError
from rftdata.postgres.database import Connection, Row, execute, fetch

Choice = Literal["pass", "drop"]


@dataclass(frozen=True, kw_only=True)
class ReviewAnswer:
    """An answer.

    Attributes:
        choice: `drop`: the experience is not trained on.
        reward: a new reward, which is an answer by itself; None to leave it. Only with `pass`.
        reason: stored with the new reward.
        seen_label_id: newest label of the experience when its author saw it; None if it had none.
    """

    review_id: int
    choice: Choice
    reward: float | None = None
    reason: str | None = None
    seen_label_id: int | None = None


@dataclass(frozen=True)
class AnswerReceipt:
    """What an answer did.

    Attributes:
        label_batch_id: the batch of the new reward; None if no reward was set.
        is_repeated: whether it was stored before.
    """

    review_id: int
    label_batch_id: int | None
    is_repeated: bool = False


@dataclass(frozen=True)
class QueuePlace:
    """A place in the order of the queue: that of the review that was seen last."""

    deadline: datetime.datetime
    review_id: int


def next_reviews(
    buffer: Buffer, count: int, *, after: QueuePlace | None = None, run_id: int | None = None
) -> list[Row]:
    """Return reviews that wait for a person, the most urgent first, without texts."""
    return buffer.database.fetch_by_index(
        "next_reviews",
        after_deadline=after and after.deadline,
        after_id=after and after.review_id,
        run_id=run_id,
        count=count,
    )


def claimed_reviews(buffer: Buffer, review_ids: Sequence[int]) -> list[Row]:
    """Return reviews that this account has claimed, without texts; those that do not exist are left out."""
    return buffer.database.fetch("claimed_reviews", review_ids=list(review_ids))


def problem_of_panel(
    buffer: Buffer, kind: str, rule: str | None, passing: Sequence[str] | None
) -> tuple[str | None, str | None]:
    """Return why annotations of a kind cannot answer reviews (None: they can), and the kinds that there are (None without any)."""
    (row,) = buffer.database.fetch("wrong_panel", kind=kind, rule=rule, passing=passing)
    return row["problem"], row["known"]


def review(buffer: Buffer, review_id: int) -> Row:
    """Return a review with its answer, the current reward and the newest label.

    Raises:
        QueryError: it does not exist.
    """
    with buffer.database.transaction() as connection:
        return _review(connection, review_id)


def progress(buffer: Buffer, run_id: int | None = None) -> Row:
    """Return how many reviews wait, and how many were answered by this account (`mine`) and by all (`answered`)."""
    return buffer.database.fetch("review_progress", run_id=run_id)[0]


def answer(buffer: Buffer, given: ReviewAnswer, *, author: str) -> AnswerReceipt:
    """Store an answer.

    Raises:
        ConflictError: another person has answered, or the reward has changed since; nothing is stored.
        QueryError: the review does not exist, its deadline has passed, or the reward is not a finite number.
    """
    if given.reward is not None and given.choice == "drop":
        raise QueryError(
            "an experience that is dropped gets no reward", value=given.reward, todo="leave out the reward"
        )
    with buffer.database.transaction() as connection:
        row = _locked(connection, given.review_id)
        if row["answer"] is not None:
            return _already_answered(connection, row, given)
        if row["is_late"]:
            raise QueryError(
                f"the deadline of review {given.review_id} has passed, and {row['otherwise']} applies",
                todo="a reward can still be corrected on the page of the experience",
            )
        if row["label_id"] != given.seen_label_id:
            raise _changed(connection, row)
        if given.reward is None:
            fetch(connection, "label_settings", author=author, reason=given.reason, source="set", label_batch_id=None)
            execute(connection, "answer_review", review_id=given.review_id, answer=given.choice)
            return AnswerReceipt(given.review_id, None)
        label = labels.RewardLabel(row["experience_id"], given.reward, reason=given.reason)
        batch = labels.write(connection, [label], author=author, source="set")
        return AnswerReceipt(given.review_id, batch.label_batch_id if batch.num_changed else None)


def newest_label_id(buffer: Buffer, experience_id: int) -> int | None:
    """Return the newest label of an experience or of its turns, for `set_seen_reward`; None without any."""
    found = buffer.database.fetch("newest_label", experience_id=experience_id)[0]["label_id"]
    return None if found is None else int(found)


def set_seen_reward(buffer: Buffer, label: labels.RewardLabel, seen_label_id: int | None, *, author: str) -> int | None:
    """Set the reward of an experience or a turn that its author has seen; return the batch, or None if it had this reward.

    Args:
        seen_label_id: the newest label of the experience or of its turns when its author saw it; None without any.

    Raises:
        ConflictError: a label was added since, unless it is the same one, sent before; nothing is stored.
        QueryError: the experience or the turn does not exist, or the reward is not a finite number.
    """
    with buffer.database.transaction() as connection:
        labels.lock(connection, [label.key])
        newest = fetch(connection, "newest_label", experience_id=label.experience_id)[0]
        if newest["label_id"] != seen_label_id:
            is_same = newest["is_own"] and (newest["turn"], newest["new_value"]) == (label.turn, label.reward)
            if not is_same:
                raise _changed(connection, newest)
            return int(newest["label_batch_id"])
        batch = labels.write(connection, [label], author=author, source="set")
        return batch.label_batch_id if batch.num_changed else None


def withdraw(buffer: Buffer, receipt: AnswerReceipt, *, author: str) -> None:
    """Undo one's own answer: the question is open again, with the reward from before.

    The database tells which reward the answer has set, so a receipt without a batch undoes it, too.

    Raises:
        ConflictError: another person has answered or set the reward since, or the answer is not that of the receipt; nothing is changed.
        QueryError: the answer was not one's own, its deadline has passed, or it set rewards of several experiences.
    """
    with buffer.database.transaction() as connection:
        row = _locked(connection, receipt.review_id)
        if row["answer"] is None:
            return  # withdrawn before
        if not row["is_own"]:
            raise ConflictError(
                f"review {receipt.review_id} was answered by {row['author']} since", todo="your answer no longer counts"
            )
        batch = _rewards_of_answer(connection, receipt)
        if batch is not None:
            done = labels.undo_in(connection, batch, author=author)
            if done.overruled:
                raise _changed(connection, row)
        else:
            fetch(connection, "label_settings", author=author, reason=None, source="undo", label_batch_id=None)
        execute(connection, "answer_review", review_id=receipt.review_id, answer=None)


def _rewards_of_answer(connection: Connection, receipt: AnswerReceipt) -> int | None:
    """Return the batch of rewards that an answer has set; None if it set no reward."""
    found = fetch(connection, "rewards_of_answer", review_id=receipt.review_id)
    batch = int(found[0]["label_batch_id"]) if found else None
    if receipt.label_batch_id not in (None, batch):
        raise ConflictError(
            f"review {receipt.review_id} was answered again since",
            value=receipt.label_batch_id,
            todo="look at it again, then undo the newer answer",
        )
    if found and found[0]["has_others"]:
        raise QueryError(
            f"review {receipt.review_id} was answered by rewards of several experiences",
            value=batch,
            todo=f"undo all of them: rft label undo {batch}",
        )
    return batch


def _locked(connection: Connection, review_id: int) -> Row:
    """Return a review, with its experience and its group locked, so that nothing that is checked can change."""
    experience = _review(connection, review_id)["experience_id"]
    labels.lock(connection, [(experience, None)])
    return _review(connection, review_id)


def _review(connection: Connection, review_id: int) -> Row:
    fetch(connection, "plan_by_index")
    rows = fetch(connection, "review_to_answer", review_id=review_id)
    if not rows:
        raise QueryError("there is no such review", value=review_id, todo="rft.v_review_queue lists those that wait")
    return rows[0]


def _already_answered(connection: Connection, row: Row, given: ReviewAnswer) -> AnswerReceipt:
    is_same = row["answer"] == given.choice and given.reward in (None, row["reward"])
    if not (row["is_own"] and is_same):
        raise ConflictError(
            f"review {row['review_id']} was answered by {row['author']} meanwhile: {row['answer']}",
            todo="nothing of yours was stored; the page of the experience shows its history",
        )
    newest = fetch(connection, "label_by", label_id=row["label_id"]) if row["label_id"] != given.seen_label_id else []
    return AnswerReceipt(row["review_id"], newest[0]["label_batch_id"] if newest else None, is_repeated=True)


def _changed(connection: Connection, row: Row) -> ConflictError:
    newest = fetch(connection, "label_by", label_id=row["label_id"])
    who = (
        f"{newest[0]['author']} has set its reward to {newest[0]['new_value']} since"
        if newest
        else "its reward has changed"
    )
    return ConflictError(
        f"experience {row['experience_id']} was not changed: {who}", todo="look at it again, then decide"
    )
