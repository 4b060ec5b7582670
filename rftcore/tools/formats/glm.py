"""The format `glm` of GLM 4.5, 4.6, 4.7 and 5: `<tool_call>name<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`.

Up to GLM 4.6 a line break stands before each mark, from 4.7 on none; both are read. A text is written as it is, and every other value as JSON. So a
value is read by the schema of its parameter: as it is where only a text is allowed, and otherwise as JSON if it is JSON. A value without a schema is a
text if it is not JSON. A text cannot contain the mark that ends it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rftcore.tools.calls import MAX_CALLS, Call, CallError, Parsed, ToolCall
from rftcore.tools.formats.json_text import InvalidJsonError, checked, decoded_value, written
from rftcore.tools.formats.named_calls import outside, too_many
from rftcore.tools.formats.places import after_malformed, after_space
from rftcore.tools.formats.thoughts import after_thoughts

_BEGIN, _END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_DEFINED = ("$defs", "definitions")
_NAME = re.compile(r"\s*([^\s<>{}()\[\]\"']+)\s*")


def parse(text: str, schemas: Sequence[Mapping[str, Any]] = ()) -> Parsed:
    """Return the content and the calls of an answer. The end of the last call may be missing.

    Args:
        schemas: of the tools.
    """
    place = after_thoughts(text, values=(_VALUE, _VALUE_END))
    pieces, calls = [text[:place]], list[Call]()
    while (begin := text.find(_BEGIN, place)) >= 0:
        pieces.append(text[place:begin])
        if len(calls) == MAX_CALLS:
            return Parsed(outside(pieces), [*calls, too_many(MAX_CALLS)])
        try:
            call, place = _call(text, begin + len(_BEGIN), len(calls), schemas)
        except InvalidJsonError as error:
            call = CallError("invalid_call", str(error), len(calls))
            place = after_malformed(text, begin + len(_BEGIN), _BEGIN, _END)
        calls.append(call)
    return Parsed(outside([*pieces, text[place:]]) if calls else text, calls)


def _call(text: str, start: int, number: int, schemas: Sequence[Mapping[str, Any]]) -> tuple[Call, int]:
    """Return the call after its beginning, and the place after its end.

    Raises:
        InvalidJsonError: it is malformed.
    """
    named = _NAME.match(text, start)
    if named is None:
        raise InvalidJsonError(f"a call begins with the name of a tool, not with {text[start : start + 20]!r}")
    name, place = named[1], named.end()
    parameters, definitions = _parameters(name, schemas)
    arguments: dict[str, Any] = {}
    while text.startswith(_KEY, place):
        key, place = _until(text, place + len(_KEY), _KEY_END, name)
        place = after_space(text, place)
        if not text.startswith(_VALUE, place):
            raise InvalidJsonError(f"the argument {key.strip()!r} of {name} has no {_VALUE}")
        value, place = _until(text, place + len(_VALUE), _VALUE_END, name)
        arguments[key.strip()] = _read(value, parameters.get(key.strip()), definitions)
        place = after_space(text, place)
    if place < len(text) and not text.startswith(_END, place):
        raise InvalidJsonError(
            f"{text[place : place + 20]!r} stands in the call of {name} in place of {_KEY} or {_END}"
        )
    return ToolCall(name, checked(arguments), number), min(len(text), place + len(_END))


def _until(text: str, start: int, mark: str, name: str) -> tuple[str, int]:
    end = text.find(mark, start)
    if end < 0:
        raise InvalidJsonError(f"{mark} is missing in the call of {name}")
    return text[start:end], end + len(mark)


def _parameters(name: str, schemas: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the schemas of a tool's parameters, and the definitions to which they may refer."""
    for schema in schemas:
        function = schema["function"]
        if function["name"] == name:
            found = function.get("parameters") or {}
            given = [found.get(key) for key in ("properties", *_DEFINED)]
            properties, *definitions = [each if isinstance(each, Mapping) else {} for each in given]
            return properties, {
                f"#/{key}/{each}": value
                for key, of in zip(_DEFINED, definitions, strict=True)
                for each, value in of.items()
            }
    return {}, {}


def _read(text: str, schema: Any, definitions: Mapping[str, Any]) -> Any:
    types = _types(schema, definitions)
    if types == {"string"}:
        return text
    found = decoded_value(text)
    if found is None or ("string" in types and not types & _KINDS[type(found[0])]):
        return text
    values = _values(schema, definitions)
    return text if text in values and found[0] not in values else found[0]


_KINDS: dict[type, set[str]] = {
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}


def _types(schema: Any, definitions: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema allows; empty if it does not say.

    Args:
        definitions: by their references; those of a definition itself are not followed, as it may refer to itself.
    """
    if not isinstance(schema, Mapping):
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        return _types(definitions.get(reference), {})
    several = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(several, list):
        each = [_types(one, definitions) for one in several]
        return set().union(*each) if all(each) else set()
    if isinstance(required := schema.get("allOf"), list):
        stated = [types for one in required if (types := _types(one, definitions))]
        return set.intersection(*stated) if stated else set()
    found = schema.get("type")
    if isinstance(found, str | list):
        return {found} if isinstance(found, str) else set(map(str, found))
    return set().union(*(_KINDS[type(value)] for value in _values(schema, definitions)))


def _values(schema: Any, definitions: Mapping[str, Any]) -> list[Any]:
    """Return the values that a schema lists; empty if it lists none."""
    if isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str):
        schema = definitions.get(reference)
    if not isinstance(schema, Mapping):
        return []
    found = [schema["const"]] if "const" in schema else schema.get("enum")
    return found if isinstance(found, list) else []


def render(calls: list[ToolCall], content: str = "") -> str:
    """Return an answer with these calls, as GLM 4.5 and 4.6 write them."""
    parts = [content] if content else []
    for call in calls:
        arguments = [
            f"{_KEY}{key}{_KEY_END}\n{_VALUE}{value if isinstance(value, str) else written(value)}{_VALUE_END}\n"
            for key, value in call.arguments.items()
        ]
        parts.append(f"{_BEGIN}{call.name}\n{''.join(arguments)}{_END}")
    return "\n".join(parts)
