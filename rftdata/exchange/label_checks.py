"""Checks of what people have said, as files of experiences have it: annotations, comments and edits.

The database checks the values of annotations (`check_imported_annotations`), since it has the rules of kinds.
"""

from __future__ import annotations

import datetime
from typing import Any

from rftdata.errors import RftError


def check_annotations(value: Any, text: str) -> None:
    """Refuse a parsed column `annotations` that is not a list of objects with a batch."""
    if not isinstance(value, list):
        raise RftError("the column annotations is no JSON list", value=text[:100])
    if not all(isinstance(a, dict) and type(a.get("label_batch_id")) is int for a in value):
        raise RftError("the column annotations has an item that is no object with a label_batch_id", value=text[:100])


def check_comments(value: Any, text: str) -> None:
    """Refuse a parsed column `comments` with what is no comment."""
    if not isinstance(value, list):
        raise RftError("the column comments is no JSON list", value=text[:100])
    for i, each in enumerate(value):
        if not _is_comment(each):
            raise RftError(
                f"the column comments: comment {i + 1} is not valid",
                value=str(each)[:100],
                allowed="an object with comment (up to 65536 bytes), author (up to 200), session_user_name, made_at, "
                "target (experience, rollout, group) and kind",
            )


def _is_comment(value: Any) -> bool:
    try:
        texts = [value[name] for name in ("comment", "author", "session_user_name")]
        datetime.datetime.fromisoformat(value["made_at"])
        sizes = [len(text.encode()) for text in texts]
        is_valid = 0 < sizes[0] <= 65536 and 0 < sizes[1] <= 200 and sizes[2] > 0
        return (
            is_valid and value["target"] in ("experience", "rollout", "group") and isinstance(value["kind"], str | None)
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def check_edit(value: Any) -> None:
    """Refuse a parsed column `edit` that is not an edit."""
    texts = ("kind", "source", "author", "session_user_name", "made_at")
    try:
        is_valid = 0 < value["parent_id"] < 2**63 and type(value["parent_id"]) is int and type(value["stands"]) is bool
        is_valid = is_valid and all(isinstance(value[name], str) for name in texts)
        datetime.datetime.fromisoformat(value["made_at"])
    except (KeyError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        names = ", ".join(texts)
        raise RftError("the column edit is not valid", allowed=f"an object with parent_id, stands, {names}")
