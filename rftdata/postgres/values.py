"""Conversion of values to what PostgreSQL's text and jsonb can hold, and of its jsonb to what Python can.

Sampled texts may contain NUL or half surrogates, and numbers NaN or infinity, which no text or jsonb column accepts. NUL and surrogates
become U+FFFD, numbers that are not finite become null.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import psycopg
from psycopg.adapt import AdaptersMap
from psycopg.types.json import set_json_loads

from rftdata.errors import QueryError
from rftdata.limits import MAX_JSON_DEPTH, refuse_too_deep, replaced

_ENCODE = json.JSONEncoder(allow_nan=False).encode
# Longer than any traceback; both ends are kept.
_MAX_RECORDED = 100_000


def storable(value: Any) -> Any:
    """Return the value without NUL, half surrogates, NaN and infinity, which models do sample, for text and jsonb.

    Raises:
        QueryError: it is nested more deeply than an import of it would accept.
    """
    if isinstance(value, dict | list | tuple):
        refuse_too_deep("a JSON value", value)
    return _storable(value)


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        return replaced(value)
    if isinstance(value, np.generic):
        return _storable(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {_storable(str(key)): _storable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(item) for item in value]
    return value


def recorded(value: Any) -> Any:
    """Return a text about an error or a state, or a list of such texts, so that storing it cannot fail: replaced as by `storable`, and cut.

    An error is recorded while another one is handled, and a lease or a claim depends on it. So its text must not raise a further error.
    """
    if isinstance(value, list | tuple):
        return [recorded(item) for item in value]
    if not isinstance(value, str):
        return value
    if len(value) > _MAX_RECORDED:
        half = _MAX_RECORDED // 2
        value = f"{value[:half]}\n[… {len(value) - 2 * half:,} characters left out …]\n{value[-half:]}"
    return replaced(value)


def jsonb_bytes(value: Any) -> bytes:
    """Return the binary form of a jsonb value for COPY: a version byte and the text.

    Raises:
        QueryError: see `storable`.
    """
    if value == {}:
        return b"\x01{}"
    try:
        encoded = _ENCODE(value)
    except (TypeError, ValueError, RecursionError):  # numpy's numbers, NaN and infinity; too deep
        return b"\x01" + json.dumps(storable(value)).encode()
    if encoded.count("[") + encoded.count("{") > MAX_JSON_DEPTH:  # only then it may be too deep
        refuse_too_deep("a JSON value", value)
    if "\\u0000" in encoded or "\\ud" in encoded:  # possibly NUL or half a surrogate
        encoded = json.dumps(storable(value))
    return b"\x01" + encoded.encode()


def _loads(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError:  # written by a person's UPDATE, since our own writers refuse it
        raise QueryError(
            "a JSON value in the database is nested too deeply to be read",
            allowed=f"up to {MAX_JSON_DEPTH} levels",
            todo=f"make it flatter by UPDATE; `where payload @? '$.**{{{MAX_JSON_DEPTH + 1}}}'` finds such tasks",
        ) from None


ADAPTERS = AdaptersMap(psycopg.adapters)
"""How values are converted in connections to buffers; the `context` of `psycopg.connect`."""
set_json_loads(_loads, ADAPTERS)
