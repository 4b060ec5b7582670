"""Texts with placeholders, and the values of a row for them: its chat, its response, the right answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from operators.base import Messages
from rftdata.errors import ConfigError

_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_MARK = r"<([A-Za-z][\w-]*(?: \d+)?)>"
_FENCED = re.compile(rf"{_MARK}(.*?)</\1>", re.DOTALL)


class Template:
    """A text with placeholders `{name}`; other braces, as in JSON, stay as they are.

    Values between marks, as in `<answer>{response}</answer>`, cannot close the marks; see `fenced`.

    Attributes:
        names: names of its placeholders.
        marks: names of its marks.

    Args:
        text: the template.
        allowed: the known placeholders.
        required: placeholders that it must contain.

    Raises:
        ConfigError: a placeholder is unknown, or a required one is missing.
    """

    def __init__(self, text: str, allowed: Sequence[str], required: Sequence[str] = ()) -> None:
        self.text = text
        self.names = frozenset(_PLACEHOLDER.findall(text))
        self.marks = frozenset(mark.partition(" ")[0] for mark in re.findall(_MARK, text) if f"</{mark}>" in text)
        self._fenced = frozenset(name for _, within in _FENCED.findall(text) for name in _PLACEHOLDER.findall(within))
        unknown = sorted(self.names - set(allowed))
        placeholders = ", ".join(f"{{{name}}}" for name in allowed)
        if unknown:
            raise ConfigError(f"the template has an unknown placeholder {{{unknown[0]}}}", allowed=placeholders)
        missing = [name for name in required if name not in self.names]
        if missing:
            raise ConfigError(f"the template lacks the placeholder {{{missing[0]}}}", allowed=placeholders)

    def fill(self, values: Mapping[str, object]) -> str:
        """Return the text with values for placeholders; braces in a value stay as they are."""

        def value(match: re.Match[str]) -> str:
            text = str(values[match[1]])
            return fenced(text, self.marks) if match[1] in self._fenced else text

        return _PLACEHOLDER.sub(value, self.text)


def fenced(text: str, marks: Iterable[str]) -> str:
    """Escape marks in a text between marks: `&lt;` for their `<`, with or without a number, opening or closing."""
    names = "|".join(sorted(marks))
    return re.sub(rf"<(?=\s*/?\s*(?:{names})(?:\s+\d+)?\s*>)", "&lt;", text, flags=re.IGNORECASE) if names else text


PROMPT_COLUMNS = frozenset({"prompt", "messages"})
ROW_PLACEHOLDERS: Mapping[str, frozenset[str]] = {
    "prompt": PROMPT_COLUMNS,
    "question": PROMPT_COLUMNS,
    "response": frozenset({"response"}),
    "answer": frozenset({"answer"}),
}
"""Placeholders of a row, and the columns they need."""


def columns_of(names: Iterable[str]) -> frozenset[str]:
    """Return the columns that placeholders need."""
    return frozenset().union(*(ROW_PLACEHOLDERS.get(name, frozenset()) for name in names))


def row_values(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Return the values of a row for placeholders. A missing text is empty."""
    values = {}
    for name in names:
        if name in ("prompt", "question"):
            values[name] = _turns(chat_before(row), whole=name == "prompt")
        elif name in ROW_PLACEHOLDERS:
            values[name] = str(row.get(name) or "")
    return values


def chat_before(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the chat that the row's response answers; its prompt as a user's message if no chat is stored."""
    messages = json.loads(row["messages"]) if row.get("messages") else None
    if isinstance(messages, list) and len(messages) > 1:
        return messages[:-1]
    return [{"role": "user", "content": str(row.get("prompt") or "")}]


def question_of(chat: Messages) -> str:
    """Return the last message of a user in a chat."""
    return next((_text(turn) for turn in reversed(chat) if turn.get("role") == "user"), _text(chat[-1]))


def _turns(chat: Messages, whole: bool) -> str:
    if not whole:
        return question_of(chat)
    turns = [turn for turn in chat if _text(turn)]
    if len(turns) == 1:
        return _text(turns[0])
    return "\n\n".join(f"{turn.get('role', 'user')}: {_text(turn)}" for turn in turns)


def _text(turn: Mapping[str, Any]) -> str:
    content = turn.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
