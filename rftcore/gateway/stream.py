"""`Stream`: the events of a streamed answer for one client, in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rftcore.gateway.completion import Completion, head
from rftcore.gateway.errors import ApiError

_DONE = b"data: [DONE]\n\n"


class Stream:
    """What one client has received of the answers of its request.

    Args:
        model: its name for the program.
        num: of answers.
    """

    def __init__(self, model: str, num: int) -> None:
        self._head = head("chat.completion.chunk", model)
        self._sent: list[str | None] = [None] * num

    @property
    def has_begun(self) -> bool:
        """Whether there were events, after which errors can only be events."""
        return any(sent is not None for sent in self._sent)

    def parts(self, shown: Sequence[str]) -> Iterator[bytes]:
        """Yield the events with what is new of each answer."""
        for index, text in enumerate(shown):
            sent = self._sent[index] or ""
            if len(text) > len(sent):
                delta = {**self._role(index), "content": text[len(sent) :]}
                self._sent[index] = text
                yield self._choice(index, delta)

    def rest(self, completion: Completion, *, with_usage: bool) -> Iterator[bytes]:
        """Yield the events up to the end of the stream.

        Args:
            with_usage: whether the last one has the usage.
        """
        for index, choice in enumerate(completion.choices):
            message, sent = choice["message"], self._sent[index] or ""
            delta = self._role(index)
            if message["content"] != sent or delta:
                delta["content"] = message["content"] and message["content"][len(sent) :]
            if "tool_calls" in message:
                delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
            self._sent[index] = message["content"] or ""
            if delta or choice["logprobs"] is not None:
                yield self._choice(index, delta, logprobs=choice["logprobs"])
            yield self._choice(index, {}, reason=choice["finish_reason"])
        if with_usage:
            yield _event({**self._head, "choices": [], "usage": completion.usage})
        yield _DONE

    def error(self, error: ApiError) -> bytes:
        """Return the event with which a stream ends that cannot go on."""
        return _event(error.body)

    def _role(self, index: int) -> dict[str, Any]:
        return {"role": "assistant"} if self._sent[index] is None else {}

    def _choice(
        self, index: int, delta: dict[str, Any], *, reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return _event({**self._head, "choices": [choice]})


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"
