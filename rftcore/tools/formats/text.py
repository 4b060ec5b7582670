"""The format `text`, for models whose chat template knows no tools: a call is a line `CALL name {"argument": value}`.

The tools are described in the system message. Results are messages of the user, `RESULT name` and the text in the next line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from rftcore.tools.calls import MAX_CALLS, Call, CallError, Parsed, ToolCall
from rftcore.tools.formats.json_text import InvalidJsonError, decoded_object, written
from rftcore.tools.formats.named_calls import outside, too_many
from rftcore.tools.formats.thoughts import after_thoughts

_BEGIN = re.compile(r"^CALL[ \t]+(?P<name>[^\s{]+)[ \t]*", re.MULTILINE)
_END_OF_LINE = re.compile(r"[ \t]*(?:\n|\Z)")


def parse(text: str) -> Parsed:
    """Return the content and the calls of an answer."""
    place = after_thoughts(text)
    pieces, calls = [text[:place]], list[Call]()
    while (begin := _BEGIN.search(text, place)) is not None:
        pieces.append(text[place : begin.start()])
        if len(calls) == MAX_CALLS:
            return Parsed(outside(pieces), [*calls, too_many(MAX_CALLS)])
        call, place = _call(text, begin, len(calls))
        calls.append(call)
    return Parsed(outside([*pieces, text[place:]]) if calls else text, calls)


def _call(text: str, begin: re.Match[str], number: int) -> tuple[Call, int]:
    try:
        arguments, end = decoded_object(text, begin.end())
    except InvalidJsonError as error:
        line_end = text.find("\n", begin.end())
        return CallError("invalid_call", str(error), number), len(text) if line_end < 0 else line_end
    if _END_OF_LINE.match(text, end) is None:
        line_end = text.find("\n", end)
        what = f"{text[end : end + 20]!r} follows the JSON object in its line"
        return CallError("invalid_call", what, number), len(text) if line_end < 0 else line_end
    return ToolCall(begin["name"], arguments, number), end


def render(calls: list[ToolCall], content: str = "") -> str:
    """Return an answer with these calls."""
    lines = [f"CALL {call.name} {written(call.arguments)}" for call in calls]
    return "\n".join([content, *lines] if content else lines)


def describe(schemas: Iterable[Mapping[str, Any]]) -> str:
    """Return the part of the system message that explains the tools and the format.

    Args:
        schemas: of the tools.
    """
    lines = [
        "To use a tool, write a line of this form and nothing after it:",
        'CALL name {"argument": value}',
        "Tools:",
    ]
    for schema in schemas:
        function = schema["function"]
        parameters = function.get("parameters") or {}
        described = written({name: _shown(each) for name, each in (parameters.get("properties") or {}).items()})
        lines.append(f"- {function['name']} {described}: {' '.join(function.get('description', '').split())}")
    return "\n".join(lines)


def _shown(parameter: Mapping[str, Any]) -> str:
    kind = parameter.get("type", "any value")
    text = kind if isinstance(kind, str) else " or ".join(map(str, kind))
    if "enum" in parameter:
        text = " or ".join(map(written, parameter["enum"]))
    if "default" in parameter:
        text += f", default {written(parameter['default'])}"
    return f"{text}; {parameter['description']}" if parameter.get("description") else text


def result(name: str, text: str) -> str:
    """Return the user's message with a result."""
    return f"RESULT {name}\n{text}"
