"""Texts of results and errors as the model reads them: bounded, and without paths of the machine."""

from __future__ import annotations

import json
import os
import re
from functools import lru_cache

from pydantic_core import PydanticSerializationError, to_json

_MAX_ERROR_CHARS = 500
_PATH = re.compile(r"(?<![\w:/.])(/[^\s'\"`,;:()<>\[\]{}|/]+)((?:/[^\s'\"`,;:()<>\[\]{}|/]+)+)")


def result_text(value: object) -> str:
    """Return a result as text: a text as it is, everything else as JSON.

    Raises:
        TypeError: JSON cannot express it.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    try:
        return to_json(value).decode()
    except (PydanticSerializationError, ValueError, RecursionError):
        raise TypeError(
            f"the tool returned a value of type {type(value).__name__}, which JSON cannot express"
        ) from None


def cut_in_the_middle(text: str, max_chars: int) -> str:
    """Return a text of at most about so many characters: the beginning and the end of a longer one, and how much is missing."""
    if len(text) <= max_chars:
        return text
    first = max_chars // 2
    last = max_chars - first
    return f"{text[:first]}\n[{len(text) - max_chars} characters left out]\n{text[-last:]}"


def error_text(what: str) -> str:
    """Return an error as the model reads it: `{"error": …}`."""
    bounded = cut_in_the_middle(without_host_paths(what[: 4 * _MAX_ERROR_CHARS]), _MAX_ERROR_CHARS)
    return json.dumps({"error": bounded}, ensure_ascii=False)


def raised_text(error: BaseException) -> str:
    """Return type and message of an error that a tool raised."""
    try:
        return f"{type(error).__name__}: {error}".encode("utf-8", "replace").decode()
    except Exception:  # noqa: BLE001 - the message is made by a user's class
        return type(error).__name__


def without_host_paths(text: str) -> str:
    """Return a text with `…/name` in place of absolute paths that begin in a folder of this machine."""
    return _PATH.sub(_shortened, text)


def _shortened(found: re.Match[str]) -> str:
    first, rest = found.groups()
    return f"…/{rest.rpartition('/')[2]}" if _is_here(first) else found.group()


@lru_cache(maxsize=1024)
def _is_here(folder: str) -> bool:
    return os.path.lexists(folder)
