"""Annotations: written in batches, read as they stand, with their history.

A batch is one statement in one transaction. The database validates each row, finds what it supersedes and reopens groups (the triggers of
rft.annotation). This module locks the targets of a batch first, in one order, so that two batches wait for each other instead of deadlocking.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rftdata.annotations.kinds import LabelTarget
from rftdata.buffer import Buffer
from rftdata.errors import QueryError
from rftdata.labels import LabelBatch
from rftdata.limits import check_integer, check_json
from rftdata.postgres.database import Connection, Row, execute, fetch

Source = Literal["human", "judge", "rule", "import", "adjudication"]


@dataclass(frozen=True)
class Annotation:
    """A value to store.

    Attributes:
        target_id: id of the experience, rollout, group or task, as the kind says.
        value: as the type of the kind requires; see `rft docs label`.
        seconds: how long the author took.
        shown: what the author was shown, for example the order of answers.
        confidence: from 0 to 1.
        model: of a judge.
        kind_version: the version that the author saw; it is refused if the kind was changed since. None: the newest.
        key: of the request; a repeated one stores nothing. Unique for the database account.
        author, source: None: those of the batch.
    """

    kind: str
    target_id: int
    value: Any
    reason: str | None = None
    seconds: float | None = None
    shown: Any = None
    confidence: float | None = None
    model: str | None = None
    kind_version: int | None = None
    key: str | None = None
    author: str | None = None
    source: Source | None = None


@dataclass(frozen=True)
class AnnotationBatch:
    """The result of a batch.

    Attributes:
        label_batch_id: id for undoing it; of a batch that was stored before, the earlier id.
        annotation_ids: one for each given annotation, in their order.
        num_superseded: annotations in whose place new ones stand.
        num_repeated: annotations whose key was stored before.
        num_unchanged: of an import, annotations that stand already.
    """

    label_batch_id: int
    annotation_ids: tuple[int, ...]
    num_superseded: int = 0
    num_repeated: int = 0
    num_unchanged: int = 0


def annotate(
    buffer: Buffer,
    annotations: Sequence[Annotation],
    *,
    author: str,
    source: Source = "human",
    skip_unchanged: bool = False,
) -> AnnotationBatch:
    """Store annotations in one transaction and one batch. While the database restarts, a batch is repeated if all its annotations have keys.

    Args:
        author, source: of annotations that name none.
        skip_unchanged: store no annotation whose value and reason stand already, by the same author; of several by one author about one target, only the
            last one counts.

    Raises:
        QueryError: an unknown kind or target, a value that the kind does not accept, an account without the right; nothing is written.
        ConflictError: the kind was changed or retired, or another transaction was in the way; nothing is written.
        PurgedError, ArchivedError: the target was purged, or its run is archived; nothing is written.
    """
    if not annotations:
        raise QueryError("a batch has no annotation", todo="give at least one")
    for a in annotations:
        _check(a)
    rows = sorted(range(len(annotations)), key=lambda i: (annotations[i].kind, annotations[i].target_id, i))
    named = [
        replace(annotations[i], author=annotations[i].author or author, source=annotations[i].source or source)
        for i in rows
    ]

    def store() -> AnnotationBatch:
        with buffer.database.transaction() as connection:
            return _write(connection, named, author, skip_unchanged)

    can_be_repeated = all(a.key is not None for a in annotations)
    batch = buffer.database.ride_out(store) if can_be_repeated else store()
    ids = dict(zip(rows, batch.annotation_ids, strict=True))
    return replace(batch, annotation_ids=tuple(ids[i] for i in range(len(annotations))))


def _check(a: Annotation) -> None:
    """Refuse what no column can hold; everything else is the database's to check."""
    what = f'"{a.kind}" of {a.target_id}'
    check_integer(f"the id of {what}", a.target_id)
    for name in ("kind", "value", "shown", "reason", "model", "key", "author"):
        check_json(f"the {name} of {what}", getattr(a, name))


def lock_targets(connection: Connection, kinds: Sequence[str], target_ids: Sequence[int]) -> None:
    """Lock the targets of annotations of one transaction, before the first is written."""
    fetch(connection, "plan_by_index")
    execute(connection, "lock_annotations", kinds=list(kinds), target_ids=list(target_ids))


def _write(
    connection: Connection, annotations: Sequence[Annotation], author: str, skip_unchanged: bool
) -> AnnotationBatch:
    lock_targets(connection, [a.kind for a in annotations], [a.target_id for a in annotations])
    ids: dict[int, int] = {}
    last = {_person(a): i for i, a in enumerate(annotations)} if skip_unchanged else {}
    if skip_unchanged:
        unchanged = fetch(connection, "unchanged_annotations", **_columns(annotations))
        ids = {row["place"] - 1: row["annotation_id"] for row in unchanged if row["place"] - 1 in last.values()}
    batch = int(fetch(connection, "begin_label_batches", num=1)[0]["label_batch_id"])
    fetch(connection, "label_settings", author=author, reason="", source="set", label_batch_id=str(batch))
    outdated = [i for i, a in enumerate(annotations) if last.get(_person(a), i) != i]
    new = [i for i in range(len(annotations)) if i not in ids and i not in outdated]
    stored = fetch(connection, "annotate", **_columns([annotations[i] for i in new]))
    left, repeated = stored[::-1], list[int]()
    for i in new:
        # The statement returns its rows in the given order, without those whose key was stored before.
        if left and left[-1]["key"] == annotations[i].key:
            ids[i] = left.pop()["annotation_id"]
        else:
            repeated.append(i)
    if repeated:
        keys = [annotations[i].key for i in repeated]
        first = {row["key"]: row for row in fetch(connection, "annotations_by_key", keys=keys)}
        ids |= {i: first[annotations[i].key]["annotation_id"] for i in repeated}
        if not stored:
            batch = first[keys[0]]["label_batch_id"]
    ids |= {i: ids[last[_person(annotations[i])]] for i in outdated}
    return AnnotationBatch(
        batch,
        tuple(ids[i] for i in range(len(annotations))),
        num_superseded=sum(row["supersedes"] is not None for row in stored),
        num_repeated=len(repeated),
        num_unchanged=len(annotations) - len(new),
    )


def _person(a: Annotation) -> tuple[object, ...]:
    """Return what one annotation stands for: its kind and target, and who says it."""
    return a.kind, a.target_id, a.author, a.source


def _columns(annotations: Sequence[Annotation]) -> dict[str, list[Any]]:
    names = ("kind", "target_id", "confidence", "model", "kind_version", "key", "author", "source")
    columns: dict[str, list[Any]] = {f"{name}s": [getattr(a, name) for a in annotations] for name in names}
    columns["words"] = [a.reason for a in annotations]
    columns["seconds"] = [a.seconds for a in annotations]
    columns["json_values"] = [json.dumps(a.value) for a in annotations]
    columns["shown"] = [None if a.shown is None else json.dumps(a.shown) for a in annotations]
    return columns


def standing(
    buffer: Buffer,
    *,
    kind: str | None = None,
    target_id: int | None = None,
    group_id: int | None = None,
    limit: int = 10_000,
) -> list[Row]:
    """Return annotations that stand (`rft.v_annotation`), newest first, only of a kind, a target or a group if one is named."""
    return buffer.database.fetch("standing_annotations", kind=kind, target_id=target_id, group_id=group_id, limit=limit)


def history(
    buffer: Buffer,
    *,
    kind: str | None = None,
    target: LabelTarget | None = None,
    target_id: int | None = None,
    label_batch_id: int | None = None,
    limit: int = 1000,
) -> list[Row]:
    """Return all annotations, newest first, superseded and undone ones too."""
    return buffer.database.fetch(
        "annotation_history",
        kind=kind,
        target=target,
        target_id=target_id,
        label_batch_id=label_batch_id,
        limit=limit,
    )


def undo_key(buffer: Buffer, key: str, *, author: str, reason: str | None = None) -> LabelBatch:
    """Undo the annotation that this account stored under a key, as a new batch.

    Raises:
        QueryError: this account stored nothing under the key.
    """
    with buffer.database.transaction() as connection:
        batch = int(fetch(connection, "begin_label_batches", num=1)[0]["label_batch_id"])
        fetch(connection, "label_settings", author=author, reason="", source="undo", label_batch_id=str(batch))
        rows = fetch(connection, "undo_annotation_of_key", key=key, words=reason)
        if not rows:
            raise QueryError("this account stored no annotation under the key", value=key)
        overruled = tuple(row["undone_id"] for row in rows if row["is_overruled"])
    return LabelBatch(batch, 0, 0, num_annotations=len(rows) - len(overruled), overruled_annotations=overruled)
