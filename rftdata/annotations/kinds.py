"""Kinds of labels: which values they have, what they are about, and how they changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from psycopg.types.json import Jsonb

from rftdata.buffer import Buffer
from rftdata.errors import QueryError
from rftdata.limits import check_json
from rftdata.postgres.database import Connection, Row, fetch

LabelType = Literal["bool", "number", "choice", "tags", "rubric", "text", "edit", "ranking", "spans", "turns"]
LabelTarget = Literal["experience", "rollout", "group", "task"]
LabelLevel = Literal["nominal", "ordinal", "interval"]


@dataclass(frozen=True)
class LabelKind:
    """A kind of label, as in `rft.label_kind`.

    Attributes:
        spec: limits of its values; which keys it has depends on the type.
        level: how values are compared; None: as usual for the type.
        blind: an account sees the annotations of others only after its own.
        reopens: an annotation returns its group to the pipeline, if the chain of its run reads the kind.
        version: None for one that is to be defined; the database assigns it.
    """

    kind: str
    type: LabelType
    target: LabelTarget = "experience"
    spec: Mapping[str, Any] = field(default_factory=dict)
    level: LabelLevel | None = None
    blind: bool = False
    reopens: bool = False
    instruction: str = ""
    version: int | None = None


def refuse_other_target(where: str, kind: LabelKind, target: object) -> None:
    """Refuse a label of a file that is about something else than its kind; ids of experiences and groups alone look alike.

    Args:
        target: what the file names; None if it names nothing.

    Raises:
        QueryError: with both.
    """
    if target is not None and target != kind.target:
        raise QueryError(
            f"{where} is about a target of the kind {target}, and labels of {kind.kind} are about another",
            value=target,
            allowed=kind.target,
            todo="remove the label, or give it where such a target is shown; nothing was stored",
        )


def define_kinds(buffer: Buffer, kinds: Sequence[LabelKind], *, author: str) -> list[LabelKind]:
    """Define kinds, all or none; return those that got a new version. A definition that changes nothing adds none.

    Raises:
        QueryError: a specification does not fit its type, a name is not allowed, or the type or target of a known kind differs.
    """
    if not kinds:
        return []
    for kind in kinds:
        check_json(f"the specification of {kind.kind}", kind.spec)
    with buffer.database.transaction() as connection:
        return [made for kind in kinds for made in _define(connection, kind, author)]


def _define(connection: Connection, kind: LabelKind, author: str) -> list[LabelKind]:
    rows = fetch(
        connection,
        "define_label_kind",
        kind=kind.kind,
        type=kind.type,
        target=kind.target,
        spec=Jsonb(dict(kind.spec)),
        level=kind.level,
        blind=kind.blind,
        reopens=kind.reopens,
        instruction=kind.instruction,
        author=author,
    )
    return [_kind(row) for row in rows]


def kinds(buffer: Buffer) -> list[LabelKind]:
    """Return the kinds to label with: of each the newest version that is not retired."""
    return [_kind(row) for row in buffer.database.fetch("label_kinds")]


def kind_versions(buffer: Buffer, kind: str) -> list[Row]:
    """Return all versions of a kind, newest first, retired ones too.

    Raises:
        QueryError: there is no such kind.
    """
    rows = buffer.database.fetch("label_kind_versions", kind=kind)
    if not rows:
        raise _unknown(buffer, kind)
    return rows


def retire_kind(buffer: Buffer, kind: str) -> int:
    """Retire all versions of a kind, so that nothing can be labelled with it; return their number. Its annotations stay.

    Raises:
        QueryError: there is no such kind.
    """
    if not buffer.database.fetch("label_kind_versions", kind=kind):
        raise _unknown(buffer, kind)
    return buffer.database.run("retire_label_kind", kind=kind)


def _unknown(buffer: Buffer, kind: str) -> QueryError:
    known = ", ".join(found.kind for found in kinds(buffer))
    return QueryError(
        "there is no such kind of label", value=kind, allowed=known or None, todo="`rft label kind list` has all"
    )


def _kind(row: Row) -> LabelKind:
    names = ("kind", "type", "target", "spec", "level", "blind", "reopens", "instruction", "version")
    return LabelKind(**{name: row[name] for name in names})
