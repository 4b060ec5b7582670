"""Questions to several people: targets to label with a kind, claimed by lease, with known answers among them and decisions where people disagree.

The rules are the database's (sql/migrations/versions/0004_labels/, decision 0061): an account holds at most one lease of a question, leases and answers
together never exceed the number of people that a question wants, and a lease that is not renewed ends by the clock. A person is an account.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from psycopg.types.json import Jsonb

from rftdata.buffer import Buffer
from rftdata.errors import QueryError
from rftdata.postgres.database import Row, execute, fetch

Order = Literal["given", "uncertainty", "disagreement"]
REVIEWS = ""
"""The queue of reviews without a kind."""


@dataclass(frozen=True)
class Claim:
    """A question that the account holds until `leased_until`."""

    question_id: int
    review_id: int | None
    target_id: int
    leased_until: datetime.datetime


def ask(
    buffer: Buffer,
    kind: str,
    target_ids: Sequence[int],
    *,
    author: str,
    wanted: int = 1,
    deadline: datetime.datetime | None = None,
    order: Order = "given",
) -> int:
    """Ask people to label targets, `wanted` accounts each; return the number of targets.

    Args:
        order: of the queue. uncertainty: first what a judge's newest annotation is least confident of; disagreement: first those about which
            the annotations so far, of people and judges, differ most.

    Raises:
        QueryError: there is no such kind or target; nothing is stored.
    """
    ids = list(dict.fromkeys(target_ids))
    priorities = dict.fromkeys(ids, 0.0)
    if order != "given":
        rows = buffer.database.fetch("doubts", kind=kind, target_ids=ids)
        priorities |= {row["target_id"]: row[order] for row in rows}
    return buffer.database.run(
        "ask_people",
        kind=kind,
        target_ids=ids,
        priorities=[priorities[target_id] for target_id in ids],
        wanted=wanted,
        deadline=deadline,
        author=author,
    )


def claim(
    buffer: Buffer, queue: str, num: int = 1, *, run_id: int | None = None, holding: Sequence[int] = ()
) -> list[Claim]:
    """Lease the next questions of a queue (a kind, or `REVIEWS`), and renew those in `holding`; skipped ones come last.

    Questions that the account holds already, in another tab perhaps, are returned again unless they are in `holding`.
    """
    rows = buffer.database.fetch("claim_questions", queue=queue, num=num, run_id=run_id, holding=list(holding))
    return [Claim(**row) for row in rows]


def renew(buffer: Buffer, question_ids: Sequence[int]) -> list[int]:
    """Extend leases of questions that an open page shows; return those that the account still holds."""
    return [row["question_id"] for row in buffer.database.fetch("renew_questions", question_ids=list(question_ids))]


def release(buffer: Buffer, question_ids: Sequence[int]) -> int:
    """End leases, so that others can claim the questions; return their number."""
    return int(buffer.database.fetch("release_questions", question_ids=list(question_ids))[0]["n"])


def skip(buffer: Buffer, question_id: int, *, is_skipped: bool = True) -> bool:
    """Move a question to the end of the account's queue, or back to its place, which leases it if it is free; return whether it was moved."""
    rows = buffer.database.fetch("skip_question", question_id=question_id, is_skipped=is_skipped)
    return bool(rows[0]["is_done"])


def skipped(buffer: Buffer, queue: str, *, run_id: int | None = None) -> list[Row]:
    """Return the open questions of a queue that the account has skipped, the newest first: `question_id` and `target_id`."""
    return buffer.database.fetch("skipped_questions", queue=queue, run_id=run_id)


def disagreements(buffer: Buffer, kind: str, *, run_id: int | None = None, limit: int = 50) -> list[Row]:
    """Return targets about which people's annotations differ and that are not decided on, with all answers."""
    return buffer.database.fetch("disagreements", kind=kind, run_id=run_id, limit=limit)


def adjudicate(buffer: Buffer, kind: str, target_id: int, value: Any, *, author: str, reason: str | None = None) -> int:
    """Decide on a target: an annotation of the source adjudication, and gold; return the annotation's id. Needs the rights of `rft_worker`."""
    with buffer.database.transaction() as connection:
        batch = int(fetch(connection, "begin_label_batches", num=1)[0]["label_batch_id"])
        fetch(connection, "label_settings", author=author, reason="", source="set", label_batch_id=str(batch))
        rows = fetch(connection, "adjudicate", kind=kind, target_id=target_id, value=Jsonb(value), words=reason)
    return int(rows[0]["annotation_id"])


def add_gold(buffer: Buffer, kind: str, values: Mapping[int, Any], *, author: str, rate: float | None = None) -> None:
    """Store known answers by target, and, if `rate` is given, how often the queue hands them out (a share from 0 to 0.5).

    Raises:
        QueryError: a value or a target does not fit the kind, or the rate is out of range; nothing is stored.
    """
    if rate is not None and not 0 <= rate <= 0.5:
        raise QueryError("the rate of known answers is out of range", value=rate, allowed="0 to 0.5")
    with buffer.database.transaction() as connection:
        if values:
            execute(
                connection,
                "add_gold",
                kinds=[kind] * len(values),
                target_ids=list(values),
                json_values=[json.dumps(value) for value in values.values()],
                author=author,
            )
        if rate is not None:
            execute(connection, "set_gold_rate", kind=kind, rate=rate)


def permit(
    buffer: Buffer,
    account: str,
    *,
    author: str,
    kind: str | None = None,
    run_id: int | None = None,
    taskset: str | None = None,
) -> None:
    """Limit an account to what its permissions cover, and permit it a kind (`reward`: rewards), a run or a taskset; None: all of them."""
    buffer.database.run("permit_labels", account=account, kind=kind, run_id=run_id, taskset=taskset, author=author)


def has_questions(buffer: Buffer, kind: str) -> bool:
    """Return whether people were asked for labels of a kind."""
    return bool(buffer.database.fetch("has_questions", kind=kind)[0]["has_questions"])


def may_judge(buffer: Buffer) -> bool:
    """Return whether this account decides on labels that disagree: that of a worker or of the owner."""
    return bool(buffer.database.fetch("may_judge")[0]["may_judge"])
