"""The forms of unit tests in a task, and their checks."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rftdata.errors import RftError

FORMS = (
    "Python code (asserts, test functions, or check(candidate)) as a text or a list of texts; a list of {input: …, output: …}; a list of"
    " {args: […], expected: …}; or {inputs: […], outputs: […], fn_name: …}"
)


@dataclass(frozen=True)
class ProgramTest:
    """The code is a program: what it prints for an input."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class CallTest:
    """The code has a function: what it returns."""

    function: str
    expected: Any
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CodeTests:
    """Tests that are Python code.

    Attributes:
        codes: each with a scope of its own.
        entry_point: the function that they call `candidate`, or by its name; None if they use the code's own names.
    """

    codes: tuple[str, ...]
    entry_point: str | None


UnitTests = list[ProgramTest] | list[CallTest] | CodeTests


def unit_tests(value: Any, entry_point: str | None) -> UnitTests:
    """Return the tests of a task.

    Args:
        value: in one of `FORMS`, or JSON of it.
        entry_point: the function that is tested.

    Raises:
        RftError: they have no such form, or there are none.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError):  # a text of Python code may begin so, too
            value = json.loads(value)
    if isinstance(value, str) and value.strip():
        return CodeTests((_parsed(value, entry_point),), entry_point)
    if isinstance(value, Mapping) and {"inputs", "outputs"} <= value.keys():
        value = _pairs(value)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise _refused(value)
    if all(isinstance(each, str) for each in value):
        return CodeTests(tuple(_parsed(each, entry_point) for each in value), entry_point)
    if all(isinstance(each, Mapping) and {"input", "output"} <= each.keys() for each in value):
        return [ProgramTest(_text(each["input"]), _text(each["output"])) for each in value]
    if all(isinstance(each, Mapping) and "expected" in each for each in value):
        return [_call(each, entry_point) for each in value]
    raise _refused(value)


def _pairs(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tests of a pair of lists, as data sets of programming contests have them."""
    inputs, outputs, function = value["inputs"], value["outputs"], value.get("fn_name")
    if len(inputs) != len(outputs):
        raise RftError(f"the unit tests have {len(inputs)} inputs and {len(outputs)} outputs", todo="correct the task")
    if function is None:
        return [{"input": given, "output": expected} for given, expected in zip(inputs, outputs, strict=True)]
    return [
        {"function": function, "args": given, "expected": expected}
        for given, expected in zip(inputs, outputs, strict=True)
    ]


def _call(test: Mapping[str, Any], entry_point: str | None) -> CallTest:
    unknown = test.keys() - {"function", "args", "kwargs", "expected"}
    function = test.get("function") or entry_point
    if unknown or not function:
        raise RftError(
            f"a unit test has the key {min(unknown)}" if unknown else "a unit test names no function",
            value=dict(test),
            allowed="function, args, kwargs and expected",
            todo="correct the task, or name the column of the function's name in the reward's entry_point",
        )
    return CallTest(str(function), test["expected"], test.get("args", ()), test.get("kwargs") or {})


def _text(value: Any) -> str:
    """Return lines of a program's input or output as one text."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _parsed(code: str, entry_point: str | None) -> str:
    try:
        tree = ast.parse(code, "tests.py")
        compile(tree, "tests.py", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RftError(f"the unit tests are no Python code: {error}", allowed=FORMS, todo="correct the task") from error
    if entry_point is None and _defines_check(tree) and not _names(tree, "check"):
        raise RftError(
            "the unit tests define check and do not call it, so that any code would pass",
            todo="name the column of the function's name in the reward's entry_point",
        )
    return code


def _defines_check(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)


def _names(tree: ast.Module, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))


def _refused(value: Any) -> RftError:
    shown = value if value is None else f"{type(value).__name__} {str(value)[:100]}"
    return RftError(
        "the unit tests of the task have no form that can be run", value=shown, allowed=FORMS, todo="correct the task"
    )
