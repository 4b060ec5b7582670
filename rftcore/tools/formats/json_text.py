"""JSON in answers of a model: decoded up to its end, never raising anything but `InvalidJsonError`."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from rftdata.limits import is_too_deep

_MAX_EXCERPT = 80
_SURROGATE = re.compile("[\ud800-\udfff]")


class InvalidJsonError(ValueError):
    """A text that is no JSON object; its message says why."""


def _refused(constant: str) -> float:
    raise InvalidJsonError(f"{constant} is not JSON")


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise InvalidJsonError(f"the number {text[:20]} is too large")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refused, parse_float=_number)


def decoded_object(text: str, start: int) -> tuple[dict[str, Any], int]:
    """Return the JSON object that begins at a place of a text, and its end.

    Raises:
        InvalidJsonError: there is no object, or not in JSON.
    """
    if not text.startswith("{", start):
        raise InvalidJsonError(f"a JSON object was expected in place of {text[start : start + _MAX_EXCERPT]!r}")
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise InvalidJsonError(f"invalid JSON: {error.msg} at character {error.pos - start}") from None
    except RecursionError:
        raise InvalidJsonError("invalid JSON: it is nested too deeply") from None
    except InvalidJsonError:
        raise
    except ValueError:  # a number of more digits than Python converts
        raise InvalidJsonError("invalid JSON: a number has too many digits") from None
    return checked(value), end


def decoded_value(text: str) -> tuple[Any] | None:
    """Return the JSON value that a text is; None if it is none."""
    try:
        return (_DECODER.decode(text),)
    except (ValueError, RecursionError):
        return None


def checked(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that can be stored.

    Raises:
        InvalidJsonError: they are nested too deeply, or contain half of a surrogate pair.
    """
    try:
        is_text = _SURROGATE.search(json.dumps(arguments, ensure_ascii=False)) is None
        is_deep = is_too_deep([{"tool_calls": [{"function": {"arguments": arguments}}]}])  # as it is stored
    except RecursionError:
        is_text, is_deep = True, True
    if is_deep:
        raise InvalidJsonError("invalid JSON: it is nested too deeply")
    if not is_text:
        raise InvalidJsonError("invalid JSON: half of a surrogate pair is no character")
    return arguments


def written(value: Any) -> str:
    """Return JSON as models write it: with spaces, and with characters as they are."""
    return json.dumps(value, ensure_ascii=False)
