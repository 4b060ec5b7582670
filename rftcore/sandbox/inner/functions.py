"""Loads a model's code and does with it what messages ask: calls, attributes, items. It knows no test and no expected value."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable
from typing import IO, Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, FOLDER)

from rftcore.sandbox.inner.plain_values import decode, encode, read_message, write_message  # noqa: E402

objects: dict[int, Any] = {}


def reference(value: Any) -> dict[str, Any]:
    """Keep an object and return its number."""
    number = len(objects)
    objects[number] = value
    found: dict[str, Any] = {"type": "object", "number": number, "class": type(value).__name__}
    if isinstance(value, type) and issubclass(value, BaseException):
        found["raises"] = [each.__name__ for each in value.__mro__]
    return found


def referred(value: dict[str, Any]) -> Any:
    """Return the object of a number."""
    return objects[value["number"]]


def load() -> dict[str, Any]:
    """Import the code; return the names that it defines, those of imported modules apart."""
    specification = importlib.util.spec_from_file_location("solution", os.path.join(FOLDER, "solution.py"))
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["solution"] = module
    specification.loader.exec_module(module)
    objects[-1] = module
    public = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    modules = {name: value.__name__ for name, value in public.items() if isinstance(value, types.ModuleType)}
    return {"names": [name for name in public if name not in modules], "modules": modules}


_ACTIONS: dict[str, Callable[..., Any]] = {
    "set": setattr,
    "item": lambda of, key: of[key],
    "put": lambda of, key, value: of.__setitem__(key, value),
    "length": len,
    "iterator": iter,
    "text": str,
    "representation": repr,
    "truth": bool,
    "isinstance": isinstance,
    "enter": lambda of: of.__enter__(),
    "exit": lambda of: of.__exit__(None, None, None),
}


def perform(message: dict[str, Any]) -> Any:
    """Do what a message asks, and return the result."""
    does = message["do"]
    if does == "load":
        return load()
    given = [decode(each, referred) for each in message["given"]]
    if does == "call":
        return given[0](*given[1], **given[2])
    if does == "attribute":
        return getattr(given[0], given[1])
    if does == "next":
        return list(zip([0], given[0]))  # empty at the end
    return _ACTIONS[does](*given)


def serve(reads: IO[bytes], writes: IO[bytes]) -> None:
    """Answer messages until they end."""
    while (data := read_message(reads)) is not None:
        try:
            answer = {"value": encode(perform(json.loads(data)), reference)}
        except BaseException as error:  # noqa: BLE001 - the code may raise anything, and a test decides what it means
            answer = {"error": str(error)[:2000], "raises": [each.__name__ for each in type(error).__mro__]}
        write_message(writes, json.dumps(answer).encode())


if __name__ == "__main__":
    sys.setrecursionlimit(5000)
    serve(os.fdopen(3, "rb"), os.fdopen(4, "wb"))
