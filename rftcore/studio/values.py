"""Values of labels, from the fields of a form: the database validates them, this module only reads what a form can hold."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from rftcore.studio.numbers import number_from, whole_from
from rftdata.annotations import LabelKind
from rftdata.errors import QueryError

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

Fields = Mapping[str, str]


def value_from(kind: LabelKind, fields: Fields) -> Any:
    """Return the value that a form gives for a kind.

    Raises:
        QueryError: a field is missing, or not what its type needs.
    """
    return _READERS[kind.type](kind, fields)


def _field(fields: Fields, name: str = "value") -> str:
    value = fields.get(name, "")
    if not value.strip():
        raise QueryError("nothing was chosen or entered", value=name, todo="choose or enter something")
    return value


def _bool(_: LabelKind, fields: Fields) -> bool:
    return _field(fields) == "true"


def _number(_: LabelKind, fields: Fields) -> float:
    return number_from(_field(fields))


def _text(_: LabelKind, fields: Fields) -> str:
    return _field(fields)


def _edit(_: LabelKind, fields: Fields) -> dict[str, str]:
    # A form sends line breaks as two characters.
    return {"response": _field(fields).replace("\r\n", "\n")}


def _tags(_: LabelKind, fields: Fields) -> list[str]:
    chosen = [name.removeprefix("tag.") for name, value in fields.items() if name.startswith("tag.") and value]
    own = [word.strip() for word in fields.get("own", "").split(",") if word.strip()]
    return list(dict.fromkeys([*chosen, *own]))


def _rubric(kind: LabelKind, fields: Fields) -> dict[str, float]:
    return {name: number_from(_field(fields, f"criterion.{name}")) for name in kind.spec["criteria"]}


def _turns(_: LabelKind, fields: Fields) -> list[dict[str, Any]]:
    given = {name.removeprefix("turn."): value for name, value in fields.items() if name.startswith("turn.") and value}
    return [{"turn": whole_from(turn), "value": number_from(value)} for turn, value in given.items()]


def _ranking(_: LabelKind, fields: Fields) -> dict[str, list[list[int]]]:
    """Read letters, which name the answers in the order in which they were shown."""
    shown = list_from(_field(fields, "shown"))
    try:
        return {
            "order": [
                [int(shown[_LETTERS.index(letter)]) for letter in tie] for tie in list_from(_field(fields, "order"))
            ]
        }
    except (IndexError, TypeError, ValueError, KeyError) as error:
        raise QueryError("this is not an order of the answers that were shown", value=fields.get("order")) from error


def _spans(_: LabelKind, fields: Fields) -> Any:
    return json_from(fields.get("spans") or "[]")


def list_from(text: str) -> list[Any]:
    """Return a list that a page sends back as JSON.

    Raises:
        QueryError: it is none.
    """
    value = json_from(text or "[]")
    if not isinstance(value, list):
        raise QueryError("a field of the form is damaged", value=text[:100], todo="load the page again")
    return value


def json_from(text: str) -> Any:
    """Return a value that a page sends back as JSON.

    Raises:
        QueryError: it is none, or has numbers that are not finite.
    """
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise QueryError("a field of the form is damaged", value=text[:100], todo="load the page again") from error


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


_READERS: dict[str, Callable[[LabelKind, Fields], Any]] = {
    "bool": _bool,
    "number": _number,
    "choice": _text,
    "text": _text,
    "edit": _edit,
    "tags": _tags,
    "rubric": _rubric,
    "turns": _turns,
    "ranking": _ranking,
    "spans": _spans,
}
