"""Comments: what people write to each other about an experience, a rollout, a group or a task, or about labelling it with a kind.

Comments are append-only, and those about one target are a thread. The rules are the database's (sql/migrations/versions/0004_labels/45_comment.sql): an
account that has not answered a blind question about the target sees none but its own, by psql as on a page.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from rftdata.annotations.kinds import LabelTarget
from rftdata.buffer import Buffer
from rftdata.limits import check_integer, check_json
from rftdata.postgres.database import records


@dataclass(frozen=True)
class Comment:
    """A comment; fields as in `rft.comment`."""

    comment_id: int
    target: LabelTarget
    target_id: int
    kind: str | None
    comment: str
    author: str
    session_user_name: str
    made_at: datetime.datetime


def add_comment(
    buffer: Buffer,
    target: LabelTarget,
    target_id: int,
    comment: str,
    *,
    author: str,
    kind: str | None = None,
    key: str | None = None,
) -> int:
    """Store a comment and return its id.

    Args:
        kind: the kind of label, if the comment is about labelling the target with it.
        key: of the request; a repeated one stores nothing and returns the first id.

    Raises:
        QueryError: an unknown target or kind, an empty or too long text, or an account that may not comment; nothing is stored.
        PurgedError, ArchivedError: the target was purged, or its run is archived; nothing is stored.
    """
    check_integer(f"the id of the {target}", target_id)
    for name, value in (("comment", comment), ("author", author), ("kind", kind), ("key", key)):
        check_json(f"the {name} of the comment", value)
    given = {"target": target, "target_id": target_id, "comment": comment, "author": author, "kind": kind, "key": key}
    stored = buffer.database.fetch("add_comment", **given) or buffer.database.fetch("comment_of_key", key=key)
    return int(stored[0]["comment_id"])


def comments(buffer: Buffer, target: LabelTarget, target_id: int, *, limit: int = 1000) -> list[Comment]:
    """Return the newest comments on a target that this account may see, the oldest of them first."""
    return records(Comment, buffer.database.fetch("comments", target=target, target_id=target_id, limit=limit))


def num_comments(buffer: Buffer, target: LabelTarget, target_ids: Sequence[int]) -> dict[int, int]:
    """Return how many comments on each target this account may see; targets without any are missing."""
    rows = buffer.database.fetch("num_comments", target=target, target_ids=list(target_ids))
    return {row["target_id"]: row["num"] for row in rows}
