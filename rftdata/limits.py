"""Checks of the names, texts and numbers that users give, against what PostgreSQL can hold.

A value is checked where it enters, so that its error names it. The server would name neither the argument nor the row.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections import abc
from typing import Any

import numpy as np

from rftdata.errors import QueryError

INT4 = (-(2**31), 2**31 - 1)
INT8 = (-(2**63), 2**63 - 1)
# The largest number of steps or groups that a user may name. The database adds two of them in a column of 32 bits.
MAX_COUNT = 10**9
# Trainers compute with float32, in which a greater number is infinite.
LARGEST_REWARD = 3.4e38
# Far more than data has, and less than what the interpreter's own limit allows from any depth of calls.
MAX_JSON_DEPTH = 300
# An index entry holds about 2,700 bytes, and a task is found by its taskset and key together. Stages derive keys from those of a source,
# which are shorter.
MAX_NAME_BYTES = 1000
_MAX_KEY_BYTES = 1600
# The name of a run is also that of its folder. With a number, which may be appended to it, it has up to 200 bytes.
_MAX_RUN_NAME_BYTES = 180
# Only JSON with one of these can have NUL, half a surrogate pair or a number that is not finite: 210 digits and an exponent of two are too much.
_SUSPICIOUS = re.compile(r"\\u0000|\\u[dD][89a-fA-F]|[eE]\+?\d{3}|\d{210}|NaN|Infinity")
_UNSTORABLE = re.compile(r"[\x00\ud800-\udfff]")
_NO_FOLDER = re.compile(r"[/\x00-\x1f\x7f]")


def is_storable(text: str) -> bool:
    """Return whether a text has neither NUL nor half surrogates, which no text or jsonb column accepts."""
    # ASCII is the common case, and checking it needs no scan.
    return "\x00" not in text if text.isascii() else _UNSTORABLE.search(text) is None


def may_be_unstorable(json_text: str) -> bool:
    """Return whether the values of a JSON text need `check_json`, which looks at each of them."""
    return _SUSPICIOUS.search(json_text) is not None


def replaced(text: str) -> str:
    """Return a text with U+FFFD in place of NUL and half surrogates."""
    return text if is_storable(text) else _UNSTORABLE.sub("\ufffd", text)


def check_integer(what: str, value: Any, limits: tuple[int, int] = INT8) -> None:
    """Refuse what is not a whole number within limits.

    Raises:
        QueryError: with the limits.
    """
    low, high = limits
    is_whole = hasattr(value, "__index__") and not isinstance(value, bool)
    if not is_whole or not low <= value <= high:
        raise QueryError(
            f"{what} is not valid",
            value=_abridged(value),
            allowed=f"a whole number from {low} to {high}",
            todo="correct it",
        )


def check_integers(what: str, values: Any) -> None:
    """Refuse what is not a sequence of whole numbers.

    Raises:
        QueryError: with the first value that is none.
    """
    _check_sequence(what, values, "a sequence of whole numbers, such as a list")
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu":
        return  # without a look at each
    for value in values:
        check_integer(f"a value of {what}", value)


def check_texts(what: str, values: Any) -> None:
    """Refuse what is not a sequence of texts; a single text is none.

    Raises:
        QueryError: with the first value that is none.
    """
    _check_sequence(what, values, "a sequence of texts, such as a list")
    for value in values:
        check_text(f"a value of {what}", value)


def _check_sequence(what: str, values: Any, allowed: str) -> None:
    is_one = isinstance(values, abc.Iterable) and isinstance(values, abc.Sized)
    check_kind(
        what, values, type(values) if is_one and not isinstance(values, str | bytes | abc.Mapping) else (), allowed
    )


def is_number(value: Any) -> bool:
    """Return whether a value is a number, or true or false, that trainers can compute with: neither NaN nor infinite in float32."""
    is_one = isinstance(value, int | float | np.integer | np.floating | np.bool_)
    return is_one and bool(-LARGEST_REWARD < value < LARGEST_REWARD)


def check_number(what: str, value: Any, least: float = 0.0) -> None:
    """Refuse what is not a finite number of at least `least`.

    Raises:
        QueryError: with what is allowed.
    """
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not is_number or not least <= value < math.inf:
        raise QueryError(
            f"{what} is not valid", value=_abridged(value), allowed=f"a number from {least:g}", todo="correct it"
        )


def check_kind(what: str, value: Any, kind: type | tuple[type, ...], allowed: str) -> None:
    """Refuse a value of another type.

    Args:
        allowed: the type, in words.

    Raises:
        QueryError: with the value and its type.
    """
    if not isinstance(value, kind):
        raise QueryError(
            f"{what} is not valid: it is of type {type(value).__name__}",
            value=_abridged(value),
            allowed=allowed,
            todo="correct it",
        )


def check_flag(what: str, value: Any) -> None:
    """Refuse what is neither true nor false.

    Raises:
        QueryError: with what is allowed.
    """
    check_kind(what, value, (bool, np.bool_), "True or False")


def check_text(what: str, value: Any, max_bytes: int | None = None) -> None:
    """Refuse a text that cannot be stored as it is.

    Raises:
        QueryError: it is not a text, has NUL or half a surrogate pair, or more bytes than `max_bytes`.
    """
    if not isinstance(value, str) or not is_storable(value):
        raise QueryError(
            f"{what} cannot be stored",
            value=_abridged(value),
            allowed="a text without NUL and half surrogate pairs",
            todo="correct it",
        )
    if max_bytes is not None and len(value.encode()) > max_bytes:
        raise QueryError(
            f"{what} is too long: {len(value):,} characters",
            value=_abridged(value),
            allowed=f"up to {max_bytes:,} bytes",
            todo="shorten it",
        )


def check_name(what: str, value: Any) -> None:
    """Refuse a name that cannot be stored and indexed as it is.

    Raises:
        QueryError: with what is allowed.
    """
    check_text(what, value, MAX_NAME_BYTES)


def check_run_name(value: Any) -> None:
    """Refuse what cannot be the name of a run and of its folder.

    Raises:
        QueryError: with what is allowed.
    """
    check_text("the name of a run", value, _MAX_RUN_NAME_BYTES)
    if value.strip() != value or value in ("", ".", "..") or _NO_FOLDER.search(value):
        raise QueryError(
            "the name of a run is not valid",
            value=value,
            allowed="the name of a folder: not empty, without slashes and control characters",
            todo="choose another name",
        )


def check_task_name(taskset: Any, task_key: Any) -> None:
    """Refuse a taskset and key by which a task cannot be stored.

    Raises:
        QueryError: with what is allowed.
    """
    check_name("the name of a taskset", taskset)
    check_text("the key of a task", task_key, _MAX_KEY_BYTES)


def is_too_deep(value: Any) -> bool:
    """Return whether a JSON value has more lists and objects in each other than are stored.

    The interpreter's own limit depends on what a process has imported.
    """
    open_ = [iter((value,))]
    while open_:
        for item in open_[-1]:
            if isinstance(item, dict | list | tuple):
                open_.append(iter(item.values() if isinstance(item, dict) else item))
                break
        else:
            open_.pop()
        if len(open_) > MAX_JSON_DEPTH + 1:
            return True
    return False


def refuse_too_deep(what: str, value: Any) -> None:
    """Refuse a JSON value that is nested too deeply.

    Raises:
        QueryError: with what is allowed.
    """
    if is_too_deep(value):
        raise QueryError(
            f"{what} is nested too deeply", allowed=f"up to {MAX_JSON_DEPTH} levels", todo="make it flatter"
        )


def check_json(what: str, value: Any, path: str = "") -> None:
    """Refuse a JSON value that jsonb cannot hold as it is.

    Raises:
        QueryError: it has NUL, half a surrogate pair, NaN or infinity, or is nested too deeply; the message names the place.
    """
    refuse_too_deep(what, value)
    _check_json(what, value, path)


def _check_json(what: str, value: Any, path: str) -> None:
    where = f"{what}, at {path}," if path else what
    if isinstance(value, str):
        check_text(where, value)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise QueryError(
                f"{where} is not a finite number", value=value, allowed="a number or null", todo="correct it"
            )
    elif isinstance(value, dict):
        for key, item in value.items():
            check_kind(f"a key of {where}", key, (str, int, float, type(None)), "a text")
            check_text(f"a key of {where}", str(key))
            _check_json(what, item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_json(what, item, f"{path}[{i}]")
    elif value is not None and not isinstance(value, int):
        check_kind(where, value, int, "null, a text, a number, true, false, a list or an object")


def _abridged(value: Any) -> Any:
    """Return a value for a message, abridged if it is long."""
    if isinstance(value, int) and value.bit_length() > 128:  # Python refuses to print numbers of thousands of digits
        return f"a number of {value.bit_length()} bits"
    return reprlib.repr(value) if isinstance(value, str | bytes | list | dict) and len(value) > 60 else value
