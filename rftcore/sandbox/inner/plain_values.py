"""Values as JSON, between a model's code and its tests. A value of a plain type travels as a copy, any other object stays where it is, as a number.

Subclasses of plain types travel as these, so that none of their methods (such as an `__eq__` that always agrees) reaches a test.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import IO, Any

_CONTAINERS: tuple[tuple[str, Any], ...] = (("tuple", tuple), ("set", set), ("frozenset", frozenset))
_SETS = ("set", "frozenset")
_SCALARS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, lambda value: int.__add__(value, 0)),
    (float, float.__float__),
    (str, str.__str__),
)
_MOST_DEPTH = 200
_LONG_BITS = 10_000  # Python writes no longer number in decimal


def encode(value: Any, reference: Callable[[Any], Any], depth: int = 0) -> Any:
    """Return a value as JSON.

    Args:
        reference: returns the JSON of an object of no plain type, or raises.
    """
    if depth > _MOST_DEPTH:
        raise ValueError("a value is too deeply nested")
    kind = type(value)
    if kind is int and value.bit_length() > _LONG_BITS:
        return {"type": "int", "text": hex(value)}
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [encode(each, reference, depth + 1) for each in list.__iter__(value)]
    if isinstance(value, dict):
        items = [[encode(part, reference, depth + 1) for part in item] for item in dict.items(value)]
        return {"type": "dict", "items": items}
    for name, plain in _CONTAINERS:
        if isinstance(value, plain):
            return {"type": name, "items": [encode(each, reference, depth + 1) for each in plain.__iter__(value)]}
    if isinstance(value, (bytes, bytearray)):
        return {"type": "bytes", "text": base64.b64encode(bytes(memoryview(value))).decode()}
    if kind is range:
        return {"type": "range", "items": [value.start, value.stop, value.step]}
    if kind is complex:
        return {"type": "complex", "items": [value.real, value.imag]}
    for plain, converted in _SCALARS:
        if isinstance(value, plain):
            return encode(converted(value), reference, depth)
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), reference, depth + 1)
    return reference(value)


def decode(value: Any, referred: Callable[[dict[str, Any]], Any], *, hashes: bool = True) -> Any:
    """Return the value of JSON.

    Args:
        referred: returns the object of a reference, or raises.
        hashes: whether sets and keys other than texts are made. Their author can choose them with equal hashes, so that it takes hours.
            Where they are not, `referred` returns what takes their place.
    """
    if isinstance(value, list):
        return [decode(each, referred, hashes=hashes) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if not hashes and (
        kind in _SETS or (kind == "dict" and not all(isinstance(key, str) for key, _ in value["items"]))
    ):
        return referred(value)
    if kind == "dict":
        return {
            decode(key, referred, hashes=hashes): decode(item, referred, hashes=hashes) for key, item in value["items"]
        }
    for name, plain in _CONTAINERS:
        if kind == name:
            return plain(decode(each, referred, hashes=hashes) for each in value["items"])
    if kind == "int":
        return int(value["text"], 16)
    if kind == "bytes":
        return base64.b64decode(value["text"])
    if kind == "range":
        return range(*value["items"])
    if kind == "complex":
        return complex(*value["items"])
    return referred(value)


def read_message(file: IO[bytes]) -> bytes | None:
    """Return the next message's bytes from a file that is read unbuffered; None at the end."""
    head = _exactly(file, 4)
    return None if head is None else _exactly(file, int.from_bytes(head, "big"))


def write_message(file: IO[bytes], data: bytes) -> None:
    """Write a message of bytes."""
    file.write(len(data).to_bytes(4, "big") + data)
    file.flush()


def _exactly(file: IO[bytes], length: int) -> bytes | None:
    data = file.read(length)
    return data if len(data) == length else None
