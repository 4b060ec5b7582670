"""Values of annotations as texts: what a person writes on a command line or into a cell of a table."""

from __future__ import annotations

import json
from typing import Any

from rftdata.annotations.kinds import LabelKind
from rftdata.errors import QueryError

_TEXTS = ("choice", "text", "edit")


def value_of_text(text: str, kind: LabelKind | None, where: str = "the value") -> Any:
    """Return the value that a text means: JSON, or for a choice, a text or an edit the words themselves.

    Args:
        kind: None for an unknown one, which the database refuses.
        where: names the text in errors.

    Raises:
        QueryError: the text is not JSON, and the type of the kind has no values that are words.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if kind is None or kind.type in _TEXTS:
            return {"response": text} if kind is not None and kind.type == "edit" else text
        raise QueryError(
            f"{where} is not JSON",
            value=text[:200],
            allowed=f"a value of the type {kind.type}, for example {_EXAMPLES[kind.type]}",
            todo="correct it; nothing was stored",
        ) from error
    if kind is not None and kind.type in ("choice", "text"):
        return value if isinstance(value, str) else text
    if kind is not None and kind.type == "edit":
        return value if isinstance(value, dict) else {"response": value if isinstance(value, str) else text}
    return value


_EXAMPLES = {
    "bool": "true",
    "number": "0.5",
    "tags": '["a", "b"]',
    "rubric": '{"clear": 2}',
    "ranking": '{"order": [[11], [12, 13]]}',
    "spans": '[{"start": 3, "end": 7, "unit": "token", "label": "wrong"}]',
    "turns": '[{"turn": 0, "value": -1}]',
}
