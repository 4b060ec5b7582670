"""Runs tests written as Python code against functions that are elsewhere: in the sandbox of the model's code, reached by messages.

Values arrive as copies of plain types (`plain_values`). Every result of a test goes to the caller with the nonce of this run.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import functools
import importlib
import inspect
import json
import os
import sys
import threading
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from rftcore.sandbox.inner.plain_values import decode, encode, read_message, write_message

reads, writes = os.fdopen(3, "rb"), os.fdopen(4, "wb")
error_classes: dict[str, type[BaseException]] = {}
asking = threading.Lock()


class Remote:
    """An object of the model's code. It equals nothing but itself, whatever its own `__eq__` says."""

    def __init__(self, number: int, kind: str) -> None:
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_kind", kind)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return ask("call", self, list(arguments), named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ask("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        ask("set", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return ask("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        ask("put", self, key, value)

    def __len__(self) -> int:
        return int(ask("length", self))

    def __iter__(self) -> Iterator[Any]:
        iterator = ask("iterator", self)
        while found := ask("next", iterator):
            yield found[0][1]

    def __bool__(self) -> bool:
        return bool(ask("truth", self))

    def __str__(self) -> str:
        return str(ask("text", self))

    def __repr__(self) -> str:
        return str(ask("representation", self))

    def __instancecheck__(self, value: Any) -> bool:
        return bool(ask("isinstance", value, self))

    def __enter__(self) -> Any:
        return ask("enter", self)

    def __exit__(self, *error: Any) -> None:
        ask("exit", self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and bool(self._number == other._number)

    def __hash__(self) -> int:
        return hash(self._number)


def own_reference(value: Any) -> dict[str, Any]:
    if isinstance(value, Remote):
        return {"type": "object", "number": value._number}
    raise TypeError(
        f"a test cannot pass a {type(value).__name__} to the code: only plain values, and the code's own objects"
    )


def remote(value: dict[str, Any]) -> Any:
    if "raises" in value:
        return error_class(value["raises"])
    return Remote(value["number"], value["class"])


def error_class(names: list[str]) -> type[BaseException]:
    """Return the class of an error by the names of its bases, the built-in one where there is one."""
    for place, name in enumerate(names):
        found = getattr(builtins, name, None)
        if isinstance(found, type) and issubclass(found, BaseException):
            for own in reversed(names[:place]):
                found = error_classes.setdefault(own, type(own, (found,), {}))
            return found
    return Exception


def request(message: dict[str, Any]) -> Any:
    with asking:
        write_message(writes, json.dumps({"ask": message}).encode())
        data = read_message(reads)
    if data is None:
        raise SystemExit("the caller has gone")
    answer = json.loads(data)
    if "error" not in answer:
        return decode(answer["value"], remote)
    kind = error_class(answer["raises"])
    try:
        error = kind(answer["error"])
    except Exception:  # noqa: BLE001 - the class is one that the code names
        error = RuntimeError(answer["error"])
    # Such as SystemExit; the others would end a loop of the test over map or zip.
    if not isinstance(error, Exception) or isinstance(error, (StopIteration, StopAsyncIteration)):
        error = RuntimeError(f"the code raised {answer['raises'][0]}: {answer['error']}")
    raise error


def ask(does: str, *given: Any) -> Any:
    return request({"do": does, "given": [encode(each, own_reference) for each in given]})


def used_names(code: str) -> tuple[set[str], set[str], set[str]]:
    """Return the names that tests use, those that they import from elsewhere, and modules of the standard library that they use."""
    used, imported, bases = set(), set(), set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and getattr(node, "module", None) != "solution":
            imported |= {each.asname or each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            bases.add(node.value.id)
    return used, imported, bases & sys.stdlib_module_names


def scope(code: str, loaded: dict[str, Any], entry_point: str | None) -> dict[str, Any]:
    """Return the names in which tests run. A name of the code never takes the place of a built-in one."""
    module: Any = types.ModuleType("solution")
    fetched: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in fetched:
            fetched[name] = ask("attribute", Remote(-1, "module"), name)
        return fetched[name]

    module.__getattr__ = get
    used, own, modules = used_names(code)
    free = [name for name in loaded["names"] if not hasattr(builtins, name) and name not in own | modules]
    module.__all__ = free
    sys.modules["solution"] = module
    names: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    names |= {name: importlib.import_module(name) for name in modules}
    for name, imported in loaded["modules"].items():
        if name in used - own - modules and imported.partition(".")[0] in sys.stdlib_module_names:
            names[name] = importlib.import_module(imported)
    for name in free:
        if name in used:
            names[name] = get(name)
    if entry_point:
        names[entry_point] = names["candidate"] = get(entry_point)
    return names


def cases(code: str, names: dict[str, Any], entry_point: str | None) -> list[tuple[str, Callable[[], Any]]]:
    """Run the code of tests, and return the tests that it defines by name; one that runs the code alone if it defines none."""
    before = dict(names)
    exec(compile(code, "tests.py", "exec"), names)
    own = {name: value for name, value in names.items() if name not in before or before[name] is not value}
    found: list[tuple[str, Callable[[], Any]]] = [
        (name, value)
        for name, value in own.items()
        if name.startswith("test") and isinstance(value, types.FunctionType)
    ]
    for name, value in own.items():
        if isinstance(value, type) and issubclass(value, unittest.TestCase):
            for test in unittest.defaultTestLoader.loadTestsFromTestCase(value):
                if isinstance(test, unittest.TestCase):
                    found.append((test.id(), unittest.TestSuite([test]).debug))  # with the fixtures of its class
        elif (
            isinstance(value, type) and value.__module__ == "tests" and name.startswith("Test")
        ):  # as pytest collects it
            methods = [each for each in vars(value) if each.startswith("test")]
            found += [(f"{name}.{each}", functools.partial(call_method, value, each)) for each in methods]
    if entry_point and isinstance(own.get("check"), types.FunctionType):
        found.append(("check", lambda: own["check"](names[entry_point])))
    return found or [("tests", lambda: None)]


def call_method(of: type, name: str) -> Any:
    return getattr(of(), name)()


def outcome(function: Callable[[], Any]) -> str | None:
    try:
        result = function()
        if inspect.iscoroutine(result):
            asyncio.run(result)
    except BaseException as error:  # noqa: BLE001 - a test fails by any error
        return error_text(error)
    return None


def error_text(error: BaseException) -> str:
    try:
        text = str(error)[:300]
    except BaseException:  # noqa: BLE001 - such as of a number with too many digits
        text = ""
    return f"{type(error).__name__}: {text}"


def main() -> None:
    given = json.loads(read_message(reads) or b"")
    nonce = given["nonce"]

    def report(**values: Any) -> None:
        with asking:
            write_message(writes, json.dumps({"nonce": nonce, **values}).encode())

    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of this process
    vars(unittest)["main"] = lambda *given, **named: None  # the cases run all the same
    for place, code in enumerate(given["tests"]):
        try:
            names = scope(code, given["loaded"], given["entry_point"])
            found = cases(code, names, given["entry_point"])
        except BaseException as error:  # noqa: BLE001
            report(names=[f"tests {place + 1}"])
            report(test=f"tests {place + 1}", failure=error_text(error))
            continue
        numbered = [(name if len(given["tests"]) == 1 else f"{place + 1} {name}", function) for name, function in found]
        report(names=[name for name, _ in numbered])
        for name, function in numbered:
            report(test=name, failure=outcome(function))
    report(done=True)


if __name__ == "__main__":
    main()
