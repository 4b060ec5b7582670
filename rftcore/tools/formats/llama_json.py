"""The format `llama_json` of Llama 3: `{"name": …, "parameters": {…}}`, several of them separated by `;`, after `<|python_tag|>` or without it."""

from __future__ import annotations

import re

from rftcore.tools.calls import MAX_CALLS, Call, CallError, Parsed, ToolCall
from rftcore.tools.formats.json_text import InvalidJsonError, decoded_object, written
from rftcore.tools.formats.named_calls import named_call, outside, too_many
from rftcore.tools.formats.thoughts import after_thoughts

_TAG = "<|python_tag|>"
_BEGIN = re.compile(r'\{\s*"(?:name|type|function|parameters|arguments)"\s*:')
_BETWEEN = re.compile(r"[\s;]*")


def parse(text: str) -> Parsed:
    """Return the content and the calls of an answer. What follows the first malformed call is not read."""
    first = after_thoughts(text)
    tag = text.find(_TAG, first)
    begin = _BEGIN.search(text, first)
    if tag >= 0:
        before, place = text[:tag], tag + len(_TAG)
    elif begin is not None:
        before, place = text[: begin.start()], begin.start()
    else:
        return Parsed(text)
    calls: list[Call] = []
    while (place := _after(text, place)) < len(text):
        if calls and not text.startswith("{", place):
            break
        if len(calls) == MAX_CALLS:
            return Parsed(outside([before]), [*calls, too_many(MAX_CALLS)])
        try:
            value, place = decoded_object(text, place)
        except InvalidJsonError as error:
            return Parsed(outside([before]), [*calls, CallError("invalid_call", str(error), len(calls))])
        call = named_call(value, len(calls), "parameters")
        if tag < 0 and not calls and isinstance(call, CallError):
            return Parsed(text)  # an answer in JSON
        calls.append(call)
    return Parsed(outside([before, text[place:]]) if calls else text, calls)


def _after(text: str, place: int) -> int:
    found = _BETWEEN.match(text, place)
    return place if found is None else found.end()


def render(calls: list[ToolCall], content: str = "") -> str:
    """Return an answer with these calls."""
    if not calls:
        return content
    written_calls = "; ".join(written({"name": call.name, "parameters": call.arguments}) for call in calls)
    return f"{content}{_TAG}{written_calls}" if content else written_calls
