"""`Transcript`: the chats of a session between their two forms, OpenAI's messages and those of the model's chat template.

An answer that a program sends back is recognised, and takes the form in which it was sampled. So the tokens of a chat stay those of its answers, whatever
clients do with empty fields, identifiers of calls or the spelling of arguments.
"""

from __future__ import annotations

import json
import secrets
from collections import ChainMap
from collections.abc import MutableMapping, Sequence
from typing import Any

from rftcore.gateway.chat_request import AssistantMessage, ChatMessage, Content, SystemMessage, ToolMessage
from rftcore.gateway.errors import ApiError
from rftcore.gateway.parts import continued
from rftcore.tools.calls import ToolCall
from rftcore.tools.chat_template import channel_format
from rftcore.tools.formats.json_text import InvalidJsonError, decoded_object
from rftcore.workflows.chat_encoding import Message, copied
from rftcore.workflows.task import Turn
from rftcore.workflows.tool_dialogue import ToolDialogue

_Calls = MutableMapping[str, tuple[str, str]]
"""Calls by OpenAI's identifier: that of the template, and the name of the tool."""


class Transcript:
    """The messages of one session.

    Args:
        tokenizer: of the model.
        format: of calls of tools, see `ToolDialogue`.
    """

    def __init__(self, tokenizer: Any, format: str | None = None) -> None:
        self._tokenizer, self._format = tokenizer, format
        self._answers: dict[str, Message] = {}
        self._calls: _Calls = {}  # those of this session's answers

    def dialogue(self, schemas: Sequence[dict[str, Any]]) -> ToolDialogue:
        """Return how a chat with these tools is written.

        Raises:
            ConfigError: the model's chat template cannot carry tools.
        """
        return ToolDialogue(self._tokenizer, schemas, self._format)

    def incoming(self, messages: Sequence[ChatMessage], dialogue: ToolDialogue | None) -> list[Message]:
        """Return a chat for the model.

        Args:
            dialogue: of the request's tools; None without tools.

        Raises:
            ApiError: the arguments of a call are no JSON object, or a result belongs to no call.
            ConfigError: see `dialogue`.
        """
        chat: list[Message] = []
        calls = ChainMap[str, tuple[str, str]]({}, self._calls)  # with those that the program has written itself
        answered: set[str] = set()  # the calls of the last answer
        place = 0
        while place < len(messages):
            message = messages[place]
            if isinstance(message, ToolMessage):
                dialogue = self.dialogue(()) if dialogue is None else dialogue
                end = next(
                    (i for i in range(place, len(messages)) if not isinstance(messages[i], ToolMessage)), len(messages)
                )
                _refuse_strangers(messages[place:end], place, answered)
                chat += _results(messages[place:end], chat, dialogue, calls)
                place = end
                continue
            answered = (
                {call.id for call in message.tool_calls or ()} if isinstance(message, AssistantMessage) else set()
            )
            chat.append(
                self._answer(message, place, calls) if isinstance(message, AssistantMessage) else _told(message)
            )
            place += 1
        if dialogue is not None:
            _describe_tools(chat, dialogue)
        return chat

    def outgoing(self, turn: Turn, dialogue: ToolDialogue | None, shown: str = "") -> dict[str, Any]:
        """Return the message of an answer, and remember it.

        Args:
            dialogue: of the tools that the answer may call; None if it may call none.
            shown: what a stream has shown of its content.

        Raises:
            ApiError: the content does not begin with what was shown.
        """
        parsed = None if dialogue is None else dialogue.parsed(turn.response)
        calls = [] if parsed is None else [call for call in parsed.calls if isinstance(call, ToolCall)]
        if parsed is None or not calls or len(calls) < len(parsed.calls):
            # Of formats with channels, the content is without thoughts.
            found: dict[str, Any] = {"role": "assistant", "content": turn.message["content"]}
        else:
            found = {"role": "assistant", "content": parsed.content or None}
            found["tool_calls"] = [self._call(call) for call in calls]
        if shown:
            contents = (found["content"] or "", self._content(turn.response) if parsed is None else parsed.content)
            found["content"] = next((text for each in contents if (text := continued(shown, each)) is not None), None)
            if found["content"] is None:
                what = (
                    "the text of the finished answer does not begin with the text that was streamed; ask without stream"
                )
                raise ApiError(500, what, code="stream_changed", kind="server_error")
        self._answers[_key(AssistantMessage.model_validate(found))] = turn.message
        return found

    def _content(self, answer: str) -> str:
        """Return the content of an answer that may call no tool, but has the text of a call."""
        channels = channel_format(self._tokenizer)
        return "" if channels is None else channels.parse(answer).content

    def _call(self, call: ToolCall) -> dict[str, Any]:
        # Clients use identifiers of calls as keys of a whole chat.
        name = f"call_{secrets.token_hex(12)}"
        self._calls[name] = call.call_id, call.name
        function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        return {"id": name, "type": "function", "function": function}

    def _answer(self, message: AssistantMessage, place: int, calls: _Calls) -> Message:
        known = self._answers.get(_key(message))
        if known is not None:
            return copied([known])[0]
        found: Message = {"role": "assistant", "content": _text(message.content)}
        if message.tool_calls:
            found["tool_calls"] = [
                _foreign_call(message, place, number, calls) for number in range(len(message.tool_calls))
            ]
        return found


def _foreign_call(message: AssistantMessage, place: int, number: int, calls: _Calls) -> dict[str, Any]:
    """Return a call that this session has not sampled, such as one of an example, and add it to the calls."""
    assert message.tool_calls is not None
    call = message.tool_calls[number]
    try:
        text = call.function.arguments.strip() or "{}"
        arguments, end = decoded_object(text, 0)
        if end < len(text):
            raise InvalidJsonError("more follows the JSON object")
    except InvalidJsonError as error:
        param = f"messages[{place}].tool_calls[{number}].function.arguments"
        raise ApiError(400, f"Invalid value for {param!r}: {error}", param=param, code="invalid_value") from None
    internal, _ = calls.get(call.id, (f"call{number:05d}", ""))
    calls[call.id] = internal, call.function.name
    return {"id": internal, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _refuse_strangers(messages: Sequence[ChatMessage], place: int, answered: set[str]) -> None:
    """Refuse results of calls that the answer before them does not have.

    Raises:
        ApiError: which.
    """
    for number, message in enumerate(messages, place):
        if isinstance(message, ToolMessage) and message.tool_call_id not in answered:
            param = f"messages[{number}].tool_call_id"
            what = f"Invalid value for {param!r}: the answer before it has no call with this id"
            raise ApiError(400, what, param=param, code="invalid_value")


def _results(
    messages: Sequence[ChatMessage], chat: list[Message], dialogue: ToolDialogue, calls: _Calls
) -> list[Message]:
    return dialogue.results(
        chat[-1],
        [
            (*calls[message.tool_call_id], _text(message.content))
            for message in messages
            if isinstance(message, ToolMessage)
        ],
    )


def _describe_tools(chat: list[Message], dialogue: ToolDialogue) -> None:
    """Let the system message describe the tools if the chat template does not."""
    has_system = bool(chat) and chat[0]["role"] == "system"
    given = chat[0]["content"] if has_system else None
    described = dialogue.system(given)
    if described is not None and described != given:
        chat[: int(has_system)] = [{"role": "system", "content": described}]


def _told(message: ChatMessage) -> Message:
    role = "system" if isinstance(message, SystemMessage) else message.role
    name = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": _text(message.content), **name}


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def _key(message: AssistantMessage) -> str:
    """Return what identifies an answer: its text without the space around it, and its calls."""
    calls = [(call.id, call.function.name, _canonical(call.function.arguments)) for call in message.tool_calls or ()]
    return json.dumps([_text(message.content).strip(), calls])


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
