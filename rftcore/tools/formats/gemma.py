"""The format `gemma` of Gemma 4: `<|tool_call>call:name{a:<|"|>text<|"|>,b:[1,true]}<tool_call|>`.

Texts stand between the token `<|"|>`, which none of them can contain; keys stand as they are or like texts. Thoughts stand in `<|channel>thought …<channel|>`.
Numbers are those of JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any

from rftcore.tools.calls import MAX_CALLS, Call, CallError, Parsed, ToolCall
from rftcore.tools.formats.json_text import InvalidJsonError, checked, decoded_value
from rftcore.tools.formats.named_calls import outside, too_many
from rftcore.tools.formats.places import after_malformed, after_space
from rftcore.tools.formats.thoughts import after_thoughts
from rftdata.limits import MAX_JSON_DEPTH

_BEGIN, _END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_THOUGHTS, _THOUGHTS_END = "<|channel>", "<channel|>"
_TO_TOOL = "<|tool_response>"
_NAME = re.compile(r"\s*call:\s*([^\s{}<>:,]+)\s*\{")
_BARE_KEY = re.compile(r"[^\s:,{}\[\]<>\"][^:,{}\[\]<>\"\n]{0,200}")
_BARE_VALUE = re.compile(r"[^,{}\[\]<>\"]{1,400}")
_WORDS = {"true": True, "false": False, "null": None, "None": None}


def parse(text: str) -> Parsed:
    """Return content, thoughts and calls of an answer. The end of the last call may be missing."""
    place = after_thoughts(text, (_THOUGHTS, _BEGIN))
    pieces, thoughts, calls = [text[:place]], list[str](), list[Call]()
    begin, thought = text.find(_BEGIN, place), text.find(_THOUGHTS, place)
    while begin >= 0 or thought >= 0:
        if thought >= 0 and (begin < 0 or thought < begin):
            pieces.append(text[place:thought])
            end = text.find(_THOUGHTS_END, thought)
            thoughts.append(_inner(text[thought + len(_THOUGHTS) : len(text) if end < 0 else end]))
            place = len(text) if end < 0 else end + len(_THOUGHTS_END)
            thought = text.find(_THOUGHTS, place)
            begin = text.find(_BEGIN, place) if begin >= 0 else -1
            continue
        pieces.append(text[place:begin])
        if len(calls) == MAX_CALLS:
            return Parsed(outside(pieces), [*calls, too_many(MAX_CALLS)], thoughts=outside(thoughts))
        call: Call
        try:
            call, place = _Arguments(text, begin + len(_BEGIN)).call(len(calls))
        except InvalidJsonError as error:
            call = CallError("invalid_call", str(error), len(calls))
            place = after_malformed(text, begin + len(_BEGIN), _BEGIN, _END)
        calls.append(call)
        begin = text.find(_BEGIN, place)
        if 0 <= thought < place:
            thought = text.find(_THOUGHTS, place)
    rest = text[place:].strip().removesuffix(_TO_TOOL) if calls else text[place:]
    if not calls and not thoughts:
        return Parsed(text)
    return Parsed(outside([*pieces, rest]), calls, thoughts=outside(thoughts))


def _inner(thought: str) -> str:
    return thought.removeprefix("thought").strip()


class _Arguments:
    """Reads one call from a place of a text.

    Raises, in every method, InvalidJsonError: the call is malformed.
    """

    def __init__(self, text: str, place: int) -> None:
        self._text, self._place = text, place

    def call(self, number: int) -> tuple[ToolCall, int]:
        """Return the call, and the place after its end."""
        named = _NAME.match(self._text, self._place)
        if named is None:
            raise InvalidJsonError(f"a call begins with call:name{{ and not with {self._excerpt()!r}")
        self._place = named.end()
        arguments = checked(self._mapping(0))
        self._skip_space()
        if self._place < len(self._text) and not self._takes(_END):
            raise InvalidJsonError(f"{self._excerpt()!r} follows the call of {named[1]} in place of {_END}")
        return ToolCall(named[1], arguments, number), self._place

    def _mapping(self, depth: int) -> dict[str, Any]:
        """Return the entries up to the closing brace."""
        found: dict[str, Any] = {}
        self._skip_space()
        if self._takes("}"):
            return found
        while True:
            key = self._key()
            if not self._takes(":"):
                raise InvalidJsonError(f"a colon was expected after the name {key[:40]!r}")
            found[key] = self._value(depth + 1)
            if self._takes("}"):
                return found
            if not self._takes(","):
                raise InvalidJsonError(f"a comma or }} was expected in place of {self._excerpt()!r}")

    def _list(self, depth: int) -> list[Any]:
        found: list[Any] = []
        self._skip_space()
        if self._takes("]"):
            return found
        while True:
            found.append(self._value(depth + 1))
            if self._takes("]"):
                return found
            if not self._takes(","):
                raise InvalidJsonError(f"a comma or ] was expected in place of {self._excerpt()!r}")

    def _key(self) -> str:
        self._skip_space()
        if self._text.startswith(_QUOTE, self._place):
            key = self._quoted()
            self._skip_space()
            return key
        bare = _BARE_KEY.match(self._text, self._place)
        if bare is None:
            raise InvalidJsonError(f"the name of an argument was expected in place of {self._excerpt()!r}")
        self._place = bare.end()
        return bare[0].strip()

    def _value(self, depth: int) -> Any:
        """Return a value; the space after it is skipped."""
        if depth > MAX_JSON_DEPTH:
            raise InvalidJsonError("an argument is nested too deeply")
        self._skip_space()
        if self._text.startswith(_QUOTE, self._place):
            value: Any = self._quoted()
        elif self._takes("{"):
            value = self._mapping(depth)
        elif self._takes("["):
            value = self._list(depth)
        else:
            value = self._bare()
        self._skip_space()
        return value

    def _bare(self) -> Any:
        bare = _BARE_VALUE.match(self._text, self._place)
        word = "" if bare is None else bare[0].strip()
        found = (_WORDS[word],) if word in _WORDS else decoded_value(word)
        if bare is None or found is None:
            raise InvalidJsonError(
                f"a value was expected in place of {self._excerpt()!r}; a text stands between {_QUOTE}"
            )
        self._place = bare.end()
        return found[0]

    def _quoted(self) -> str:
        begin = self._place + len(_QUOTE)
        end = self._text.find(_QUOTE, begin)
        if end < 0:
            raise InvalidJsonError(f"a text does not end with {_QUOTE}")
        self._place = end + len(_QUOTE)
        return self._text[begin:end]

    def _takes(self, mark: str) -> bool:
        if not self._text.startswith(mark, self._place):
            return False
        self._place += len(mark)
        return True

    def _skip_space(self) -> None:
        self._place = after_space(self._text, self._place)

    def _excerpt(self) -> str:
        return self._text[self._place : self._place + 20]


def render(calls: list[ToolCall], content: str = "") -> str:
    """Return an answer with these calls."""
    parts = [f"{_BEGIN}call:{call.name}{_written(call.arguments)}{_END}" for call in calls]
    return "".join([content, *parts])


def _written(value: Any) -> str:
    if isinstance(value, str):
        return f"{_QUOTE}{value}{_QUOTE}"
    if isinstance(value, dict):
        entries = (f"{key if _is_bare(key) else _written(key)}:{_written(item)}" for key, item in value.items())
        return f"{{{','.join(entries)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    return json.dumps(value)


def _is_bare(key: str) -> bool:
    return key.isascii() and key.isidentifier()
