"""The schema of a tool comes from a function's types and docstring; arguments are compared strictly with it."""

from __future__ import annotations

import datetime
import enum
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from rftcore.tools import Tool, ToolContext
from rftcore.tools.signature import InvalidArgumentsError
from rftcore.tools.tool import refuse_equal_names
from rftdata.errors import ConfigError


class Colour(enum.Enum):
    RED = "red"


class Place(BaseModel):
    title: str
    at: tuple[float, float]


def search(
    query: str,
    ctx: ToolContext,
    top: int = 3,
    *,
    kind: Literal["news", "all"] = "all",
    json: Annotated[float, Field(ge=0)] = 0.5,
    near: Place | None = None,
) -> list[str]:
    """Search the library.

    It knows titles only.

    Args:
        query: words of the title,
            separated by spaces
        top (int): most results
        ctx: the rollout

    Returns:
        titles
    """
    ctx.state["query"] = query
    return [f"{query}, {top}, {kind}, {json}, {near}"]


def test_the_schema_has_types_descriptions_and_defaults_without_the_context() -> None:
    tool = Tool.of(search)
    assert (tool.name, tool.description) == ("search", "Search the library.\n\nIt knows titles only.")
    properties = tool.parameters["properties"]
    assert properties["query"] == {"type": "string", "description": "words of the title, separated by spaces"}
    assert properties["top"] == {"type": "integer", "default": 3, "description": "most results"}
    assert properties["kind"] == {"type": "string", "enum": ["news", "all"], "default": "all"}
    assert properties["json"] == {"type": "number", "minimum": 0, "default": 0.5}
    assert "title" in tool.parameters["$defs"]["Place"]["properties"], "a parameter of this name stays"
    assert set(properties) == {"query", "top", "kind", "json", "near"}
    assert tool.parameters["required"] == ["query"]
    assert tool.parameters["additionalProperties"] is False
    assert tool.schema["function"]["parameters"] == tool.parameters


def test_arguments_become_values_of_the_types() -> None:
    context = ToolContext(None, 0)
    found = Tool.of(search).call({"query": "a", "json": 1, "near": {"title": "b", "at": [1, 2.5]}}, context)
    assert found == ["a, 3, all, 1.0, title='b' at=(1.0, 2.5)"]
    assert context.state == {"query": "a"}

    def on(day: datetime.date, colour: Colour) -> str:
        """Look at a day."""
        return f"{day.year} {colour.name}"

    assert Tool.of(on).call({"day": "2026-11-27", "colour": "red"}, context) == "2026 RED"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "query: Field required"),
        ({"query": 1}, "query: Input should be a valid string"),
        ({"query": "a", "top": "3"}, "top: Input should be a valid integer"),
        ({"query": "a", "top": 3.0}, "top: Input should be a valid integer"),
        ({"query": "a", "top": True}, "top: Input should be a valid integer"),
        ({"query": "a", "kind": "old"}, "kind: Input should be 'news' or 'all'"),
        ({"query": "a", "json": -1}, "json: Input should be greater than or equal to 0"),
        ({"query": "a", "ctx": {}}, "ctx: Extra inputs are not permitted"),
        ({"query": "a", "near": {"title": "b", "at": [1, "2"]}}, "near.at.1: Input should be a valid number"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgumentsError, match=says.replace(".", r"\.")):
        Tool.of(search).call(arguments, ToolContext(None, 0))


def variable(*words: str) -> None:
    """Do it."""


def keywords(**words: str) -> None:
    """Do it."""


def positional(word: str, /) -> None:
    """Do it."""


def untyped(word) -> None:  # type: ignore[no-untyped-def]
    """Do it."""


def silent(word: str) -> None: ...


def mistaken(word: str) -> None:
    """Do it.

    Args:
        ward: a word
    """


def strange(word: threading.Lock) -> None:  # type: ignore[name-defined]  # noqa: F821
    """Do it."""


class _NoSchema:
    pass


def opaque(word: _NoSchema) -> None:
    """Do it."""


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (variable, "cannot be given by its name.*words"),
        (keywords, "cannot be given by its name.*words"),
        (positional, "cannot be given by its name.*word"),
        (untyped, "parameter 'word' of the tool 'untyped' has no type"),
        (silent, "no docstring"),
        (mistaken, "does not have.*ward"),
        (strange, "types of the tool 'strange' cannot be read.*threading"),
        (opaque, "a type that no JSON schema describes"),
        (lambda: None, "name of a tool is not valid"),
        (3, "must be a function"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused(function: Callable[..., Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Tool.of(function)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"two tools have one name.*'search'"):
        refuse_equal_names(["search", "add", "search"])
