"""The format `hermes`: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, of Hermes, Qwen and others."""

from __future__ import annotations

from rftcore.tools.calls import MAX_CALLS, Call, CallError, Parsed, ToolCall
from rftcore.tools.formats.json_text import InvalidJsonError, decoded_object, written
from rftcore.tools.formats.named_calls import named_call, outside, too_many
from rftcore.tools.formats.places import after_malformed, after_space
from rftcore.tools.formats.thoughts import after_thoughts

_BEGIN, _END = "<tool_call>", "</tool_call>"


def parse(text: str) -> Parsed:
    """Return the content and the calls of an answer. The end of the last call may be missing."""
    place = after_thoughts(text)
    pieces, calls = [text[:place]], list[Call]()
    while (begin := text.find(_BEGIN, place)) >= 0:
        pieces.append(text[place:begin])
        if len(calls) == MAX_CALLS:
            return Parsed(outside(pieces), [*calls, too_many(MAX_CALLS)])
        call, place = _call(text, begin + len(_BEGIN), len(calls))
        calls.append(call)
    return Parsed(outside([*pieces, text[place:]]) if calls else text, calls)


def _call(text: str, start: int, number: int) -> tuple[Call, int]:
    """Return the call after its beginning, and the place after its end."""
    first = after_space(text, start)
    try:
        value, end = decoded_object(text, first)
    except InvalidJsonError as error:
        return CallError("invalid_call", str(error), number), after_malformed(text, start, _BEGIN, _END)
    end = after_space(text, end)
    if end < len(text) and not text.startswith(_END, end):
        what = f"{text[end : end + 20]!r} follows the JSON object in place of {_END}"
        return CallError("invalid_call", what, number), after_malformed(text, end, _BEGIN, _END)
    return named_call(value, number, "arguments"), end + len(_END)


def render(calls: list[ToolCall], content: str = "") -> str:
    """Return an answer with these calls."""
    parts = [content] if content else []
    parts += [f"{_BEGIN}\n{written({'name': c.name, 'arguments': c.arguments})}\n{_END}" for c in calls]
    return "\n".join(parts)
