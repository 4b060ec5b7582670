"""`ToolCall` and `CallError`: what an answer of the model asks of tools, as a parser reads it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

MAX_CALLS = 64
"""Calls that a parser reads in one answer. What follows is one error, so that parsing takes linear time."""

ErrorKind = Literal[
    "invalid_call", "unknown_tool", "invalid_arguments", "too_many_calls", "exception", "timeout", "crash"
]
"""Why a call gives an error: its text is no call; no tool has its name; its arguments do not fit the schema; the answer has more calls than
allowed; the tool raised, took too long, or ended its process."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        arguments: JSON values by the names of the parameters. They are not yet compared with the tool's schema.
        number: place among the calls of the answer, from 0.
    """

    name: str
    arguments: dict[str, Any]
    number: int = 0

    @property
    def call_id(self) -> str:
        """Identifies the call within its answer; nine letters and digits, which is what chat templates with identifiers require."""
        return f"call{self.number:05d}"

    def as_message(self) -> dict[str, Any]:
        """Return the entry of `tool_calls` in an assistant's message; its arguments are a mapping, as chat templates expect."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


@dataclass(frozen=True)
class CallError:
    """A part of an answer that begins like a call and is none, or a call that cannot be made.

    Attributes:
        text: what is wrong, for the model.
        number: place among the calls of the answer, from 0.
    """

    kind: ErrorKind
    text: str
    number: int = 0

    @property
    def call_id(self) -> str:
        """As of `ToolCall`."""
        return f"call{self.number:05d}"


Call = ToolCall | CallError


@dataclass(frozen=True)
class Parsed:
    """An answer of the model.

    Attributes:
        content: what is no call.
        calls: in their order.
        thoughts: those that the format keeps apart from the content; None if it keeps none apart.
    """

    content: str
    calls: list[Call] = field(default_factory=list)
    thoughts: str | None = None

    @property
    def is_valid(self) -> bool:
        """Whether no call is malformed."""
        return all(isinstance(call, ToolCall) for call in self.calls)

    def message(self, answer: str, thoughts_key: str = "") -> dict[str, Any]:
        """Return the assistant's message of the answer. One with a malformed call is a message without calls, whose content is the answer.

        Args:
            answer: the text that was parsed.
            thoughts_key: key of thoughts that are apart from the content; empty leaves them out.
        """
        if not self.is_valid or not (self.calls or self.thoughts is not None):
            return {"role": "assistant", "content": answer}
        found: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.thoughts and thoughts_key:
            found[thoughts_key] = self.thoughts
        if self.calls:
            found["tool_calls"] = [call.as_message() for call in self.calls if isinstance(call, ToolCall)]
        return found


def tool_calls_of(message: dict[str, Any]) -> Iterable[ToolCall]:
    """Yield the calls of an assistant's message."""
    for number, entry in enumerate(message.get("tool_calls") or ()):
        function = entry["function"]
        yield ToolCall(function["name"], function["arguments"], number)
