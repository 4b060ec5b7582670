"""Answers in OpenAI's form."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rftcore.workflows.task import Turn


@dataclass(frozen=True)
class Completion:
    """The answers of one request.

    Attributes:
        choices: messages, reasons of their ends and log-probabilities, as in the body of a response.
        usage: numbers of tokens.
    """

    model: str
    choices: Sequence[dict[str, Any]]
    usage: dict[str, int]

    @classmethod
    def of(
        cls, model: str, turns: Sequence[Turn], messages: Sequence[dict[str, Any]], tokenizer: Any, *, logprobs: bool
    ) -> Completion:
        """Return the completion of turns with these messages."""
        num_prompt = turns[0].sequence.num_prompt_tokens
        num_sampled = sum(len(turn.sequence.token_ids) - turn.sequence.num_prompt_tokens for turn in turns)
        choices = [
            {
                "index": index,
                "message": message,
                "finish_reason": "tool_calls" if "tool_calls" in message else turn.finish_reason,
                "logprobs": {"content": _logprobs(turn, tokenizer), "refusal": None} if logprobs else None,
            }
            for index, (turn, message) in enumerate(zip(turns, messages, strict=True))
        ]
        return cls(
            model,
            choices,
            {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_sampled,
                "total_tokens": num_prompt + num_sampled,
            },
        )

    def body(self) -> bytes:
        """Return the body of a response."""
        choices = [{**choice, "message": {"refusal": None, **choice["message"]}} for choice in self.choices]
        return json.dumps({**head("chat.completion", self.model), "choices": choices, "usage": self.usage}).encode()


def head(kind: str, model: str) -> dict[str, Any]:
    """Return what a response or a chunk begins with.

    Args:
        kind: OpenAI's name of the object.
        model: its name for the program.
    """
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": None,
    }


def _logprobs(turn: Turn, tokenizer: Any) -> list[dict[str, Any]]:
    found = []
    values = turn.sequence.behavior_logprobs
    for token_id, logprob in zip(turn.response_token_ids, [] if values is None else values, strict=True):
        text = tokenizer.decode([token_id])
        data = None if "\ufffd" in text else list(text.encode())  # a part of a character
        found.append({"token": text, "logprob": float(logprob), "bytes": data, "top_logprobs": []})
    return found
