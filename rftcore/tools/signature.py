"""What the model reads of a Python function, and how its arguments are checked: from the signature and a docstring in Google style.

Arguments are JSON, compared strictly with the types: a text is never taken for a number, nor a number for a text or a truth value. A whole
number is a valid `float`; what JSON has no type for (dates, enumerations, sets, models of pydantic) is read from its usual form in JSON.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from rftdata.errors import ConfigError

CONTEXT = "ctx"
"""Name of the parameter that gets a `ToolContext`, and that the model does not see."""

_ARGS = re.compile(r"^(?:Args|Arguments|Parameters):\s*$")
_SECTION = re.compile(r"^[A-Z][A-Za-z ]*:\s*$")
_ARG = re.compile(r"^(?P<name>\*{0,2}\w+)(?:\s*\([^)]*\))?:\s*(?P<text>.*)$")
_MOST_ERRORS = 5


class InvalidArgumentsError(ValueError):
    """Arguments that do not fit the parameters of a tool; its message says which, for the model."""


@dataclass(frozen=True)
class Signature:
    """The parameters of a function.

    Attributes:
        description: what the function does, without the sections of its docstring.
        parameters: JSON schema of an object.
        takes_context: whether it has the parameter `ctx`.
    """

    description: str
    parameters: dict[str, Any]
    takes_context: bool
    _model: type[BaseModel]
    _names: dict[str, str]

    def values(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the function's arguments, of its types; those that are left out keep their defaults.

        Raises:
            InvalidArgumentsError: they do not fit.
        """
        try:
            found = self._model.model_validate_json(json.dumps(arguments), strict=True)
        except ValidationError as error:
            raise InvalidArgumentsError(_described(error)) from None
        return {self._names[field]: getattr(found, field) for field in found.model_fields_set}


def signature_of(function: Callable[..., Any], name: str) -> Signature:
    """Return the parameters of a function.

    Args:
        name: of the tool, for messages.

    Raises:
        ConfigError: it has no docstring, or a parameter that no schema describes.
    """
    description, described = docstring_parts(inspect.getdoc(function) or "")
    if not description:
        raise ConfigError(
            f"the tool {name!r} has no docstring", todo="write one: the model reads what the tool does in it"
        )
    types = _types(function, name)
    parameters = list(inspect.signature(function).parameters.values())
    takes_context = any(parameter.name == CONTEXT for parameter in parameters)
    parameters = [parameter for parameter in parameters if parameter.name != CONTEXT]
    unknown = [each for each in described if each not in {p.name for p in parameters} and each != CONTEXT]
    if unknown:
        raise ConfigError(
            f"the docstring of the tool {name!r} describes a parameter that the function does not have",
            value=unknown[0],
            allowed=", ".join(p.name for p in parameters) or "no parameter",
        )
    fields = {
        f"p{number}": (_type(parameter, types, name), _field(parameter, described.get(parameter.name)))
        for number, parameter in enumerate(parameters)
    }
    try:
        model = create_model(
            name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **typing.cast(Any, fields)
        )
        schema = _without_titles(model.model_json_schema())
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        raise ConfigError(
            f"a parameter of the tool {name!r} has a type that no JSON schema describes: {str(error).splitlines()[0]}",
            allowed="str, int, float, bool, list, dict, Literal, enumerations, dataclasses, models of pydantic and unions of them",
        ) from error
    names = {field: parameter.name for field, parameter in zip(fields, parameters, strict=True)}
    schema.setdefault("properties", {})
    return Signature(description, schema, takes_context, model, names)


def docstring_parts(text: str) -> tuple[str, dict[str, str]]:
    """Return the description of a docstring in Google style, without its sections, and the texts of its arguments."""
    description: list[str] = []
    arguments: dict[str, str] = {}
    section, indent, last = "", 0, ""
    for line in text.expandtabs().splitlines():
        stripped = line.strip()
        if not line.startswith(" ") and _SECTION.match(stripped):
            section, indent, last = stripped, 0, ""
        elif not section:
            description.append(stripped)
        elif _ARGS.match(section) and stripped:
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            begin = _ARG.match(stripped) if depth <= indent else None
            if begin is not None:
                last = begin["name"].lstrip("*")
                arguments[last] = begin["text"]
            elif last:
                arguments[last] = f"{arguments[last]} {stripped}".strip()
    return "\n".join(description).strip(), arguments


def _types(function: Callable[..., Any], name: str) -> dict[str, Any]:
    target = function if inspect.isroutine(function) else type(function).__call__
    try:
        return typing.get_type_hints(target, include_extras=True)
    except Exception as error:
        raise ConfigError(
            f"the types of the tool {name!r} cannot be read: {type(error).__name__}: {error}",
            todo="import what its annotations name",
        ) from error


def _type(parameter: inspect.Parameter, types: dict[str, Any], name: str) -> Any:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise ConfigError(
            f"the tool {name!r} has a parameter that cannot be given by its name",
            value=str(parameter),
            todo="give each parameter a name and a type",
        )
    if parameter.name not in types:
        raise ConfigError(
            f"the parameter {parameter.name!r} of the tool {name!r} has no type",
            todo=f"annotate it, as in `{parameter.name}: str`",
        )
    return types[parameter.name]


def _field(parameter: inspect.Parameter, description: str | None) -> Any:
    default = ... if parameter.default is parameter.empty else parameter.default
    return Field(default, alias=parameter.name, description=description or None)


def _without_titles(schema: Any, *, of_names: bool = False) -> Any:
    """Return a schema without the titles that pydantic adds.

    Args:
        of_names: whether the keys of the mapping are the user's.
    """
    if isinstance(schema, list):
        return [_without_titles(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value
        if key in ("default", "enum", "const", "examples") and not of_names
        else _without_titles(value, of_names=key in ("properties", "$defs") and not of_names)
        for key, value in schema.items()
        if of_names or key != "title"
    }


def _described(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_input=False, include_context=False)
    parts = []
    for each in found[:_MOST_ERRORS]:
        place = ".".join(map(str, each["loc"]))
        parts.append(f"{place}: {each['msg']}" if place else each["msg"])
    if len(found) > _MOST_ERRORS:
        parts.append(f"and {len(found) - _MOST_ERRORS} more")
    return "; ".join(parts)
