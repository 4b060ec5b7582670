"""The format `harmony` of gpt-oss: an answer is a row of messages, each with a channel, and a call is one that is addressed to a function.

    <|channel|>analysis<|message|>Two numbers.<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>

The recipient may also stand before the channel. The text of the channel `analysis` is thoughts. That of the others is the content.
"""

from __future__ import annotations

import re

from rftcore.tools.calls import MAX_CALLS, Call, CallError, Parsed, ToolCall
from rftcore.tools.formats.json_text import InvalidJsonError, decoded_object, written
from rftcore.tools.formats.named_calls import outside, too_many
from rftcore.tools.formats.thoughts import after_thoughts
from rftcore.tools.formats.unfinished import before_marks

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MARKS = (_START, _CHANNEL, _MESSAGE)
_FINAL = f"{_CHANNEL}final{_MESSAGE}"
_MARK = re.compile("|".join(map(re.escape, (_START, *_ENDS))))
_TO = re.compile(r"(?:^|\s)to=([^\s<]+)")
_IN_CHANNEL = re.compile(r"<\|channel\|>\s*([A-Za-z]*)")
_FUNCTIONS = "functions."


def parse(text: str) -> Parsed:
    """Return content, thoughts and calls of an answer. A text without messages is the content."""
    place = after_thoughts(text, _MARKS)
    if text.find(_MESSAGE, place) < 0:
        return Parsed(text)
    contents, thoughts, calls = [text[:place]], list[str](), list[Call]()
    while (message := text.find(_MESSAGE, place)) >= 0:
        header, begin = text[place:message], message + len(_MESSAGE)
        mark = _MARK.search(text, begin)
        end = len(text) if mark is None else mark.start()
        recipient = _TO.search(header.rpartition(_START)[2])
        if recipient is not None:
            if len(calls) == MAX_CALLS:
                calls.append(too_many(MAX_CALLS))
                break
            call, end = _call(recipient[1], text, begin, end, len(calls))
            calls.append(call)
        elif _channel(header) == "analysis":
            thoughts.append(text[begin:end])
        else:
            contents.append(text[begin:end])
        place = _after_mark(text, end)
    return Parsed(outside(contents), calls, thoughts=outside(thoughts))


def _call(recipient: str, text: str, begin: int, end: int, number: int) -> tuple[Call, int]:
    """Return the call whose arguments begin at a place, and their end.

    Args:
        end: the place of the next mark, which is within the arguments if one of them contains the text of a mark.
    """
    name = recipient.removeprefix(_FUNCTIONS)
    try:
        first = begin + len(text[begin:end]) - len(text[begin:end].lstrip())
        arguments, found = decoded_object(text, first)
    except InvalidJsonError as error:
        return CallError("invalid_call", f"the call of {name}: {error}", number), end
    rest = _MARK.search(text, found)
    end = len(text) if rest is None else rest.start()
    if left := text[found:end].strip():
        return CallError("invalid_call", f"{left[:20]!r} follows the JSON object of the call of {name}", number), end
    return ToolCall(name, arguments, number), end


def _channel(header: str) -> str:
    found = _IN_CHANNEL.search(header.rpartition(_START)[2])
    return "" if found is None else found[1]


def _after_mark(text: str, place: int) -> int:
    """Return the place after the end of a message; that of the next beginning if the end is missing."""
    return next((place + len(end) for end in _ENDS if text.startswith(end, place)), place)


def certain(text: str) -> str:
    """Return the part of the content of an unfinished answer that no further text changes: up to the end of the channel `final`."""
    head, found, content = text.partition(_FINAL)
    last = head.rfind(_MESSAGE)
    is_open = last >= 0 and _MARK.search(head, last) is None  # its text goes on
    if not found or is_open or after_thoughts(text, _MARKS) or _TO.search(head.rpartition(_START)[2]):
        return ""
    before = "" if last < 0 else parse(head).content
    return "\n".join(filter(None, (before, before_marks(content, ("<|",)))))


def render(calls: list[ToolCall], content: str = "") -> str:
    """Return an answer with these calls, without the beginning that the chat template writes before an answer."""
    parts = [f"{_CHANNEL}{'commentary' if calls else 'final'}{_MESSAGE}{content}"] if content else []
    parts += [
        f"{_CHANNEL}commentary to={_FUNCTIONS}{call.name} <|constrain|>json{_MESSAGE}{written(call.arguments)}<|call|>"
        for call in calls
    ]
    return f"{_START}assistant".join(
        f"{part}<|end|>" if place == 0 and content and calls else part for place, part in enumerate(parts)
    )
