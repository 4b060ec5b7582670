"""Chats as the pages show them: one part per text, thought, tool call and tool result."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

_THINKING = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ChatPart:
    """A part of a chat.

    Attributes:
        role: of the message.
        kind: what it is.
        text: as the model, the tool or the person wrote it.
        name: of the tool; None for other parts.
    """

    role: str
    kind: Literal["text", "thinking", "call", "result"]
    text: str
    name: str | None = None


def chat_parts(messages: Any, prompt: str | None, response: str | None) -> list[ChatPart]:
    """Return the parts of a chat; of a plain prompt and response if there is none."""
    if not isinstance(messages, list):
        messages = [{"role": "user", "content": prompt or ""}, {"role": "assistant", "content": response or ""}]
    return [part for message in messages if isinstance(message, dict) for part in _parts(message)]


def _parts(message: dict[str, Any]) -> Iterator[ChatPart]:
    role = str(message.get("role", "?"))
    thinking = message.get("reasoning_content") or message.get("reasoning") or message.get("thinking")
    if isinstance(thinking, str) and thinking.strip():
        yield ChatPart(role, "thinking", thinking)
    text = _text(message.get("content"))
    if role == "tool":
        yield ChatPart(role, "result", text, str(message["name"]) if message.get("name") else None)
        return
    begin = 0
    for found in _THINKING.finditer(text) if role == "assistant" else ():
        if text[begin : found.start()].strip():
            yield ChatPart(role, "text", text[begin : found.start()])
        yield ChatPart(role, "thinking", found[1].strip())
        begin = found.end()
    calls = message.get("tool_calls") if isinstance(message.get("tool_calls"), list) else []
    if text[begin:].strip() or not (begin or calls):
        yield ChatPart(role, "text", text[begin:].lstrip("\n") if begin else text)
    for call in calls or []:
        function = call.get("function", call) if isinstance(call, dict) else {}
        arguments = function.get("arguments", "")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False, indent=2)
        yield ChatPart(role, "call", arguments, str(function.get("name", "?")))


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(
            _text(each.get("text", f"[{each.get('type', '?')}]")) if isinstance(each, dict) else str(each)
            for each in content
        )
    return "" if content is None else str(content)
