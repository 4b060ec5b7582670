"""Conversion of values to what PostgreSQL's text and jsonb can hold.

Sampled texts may contain NUL or half surrogates, and numbers NaN or infinity, which no text or jsonb column accepts. NUL and surrogates
become U+FFFD, numbers that are not finite become null.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np

_ENCODE = json.JSONEncoder(allow_nan=False).encode
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def storable(value: Any) -> Any:
    """Return the value without NUL, half surrogates, NaN and infinity, which models do sample, for text and jsonb."""
    if isinstance(value, str):
        # ASCII is the common case, and checking it needs no scan.
        if value.isascii() and "\x00" not in value:
            return value
        return _SURROGATE.sub("\ufffd", value).replace("\x00", "\ufffd")
    if isinstance(value, np.generic):
        return storable(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {storable(str(key)): storable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [storable(item) for item in value]
    return value


def jsonb_bytes(value: Any) -> bytes:
    """Return the binary form of a jsonb value for COPY: a version byte and the text."""
    if value == {}:
        return b"\x01{}"
    try:
        encoded = _ENCODE(value)
    except (TypeError, ValueError):  # numpy's numbers, NaN and infinity
        return b"\x01" + json.dumps(storable(value)).encode()
    if "\\u0000" in encoded or "\\ud" in encoded:  # possibly NUL or half a surrogate
        encoded = json.dumps(storable(value))
    return b"\x01" + encoded.encode()
