"""Prompts as they are stored: a text once per group, with the messages that its chats begin with.

The messages of an experience are those of its prompt and then its own. A prompt's are the longest beginning that all chats of its group and
text have in common, without the last message of any. Own ones are not stored where they are the response as one plain message of the
assistant. `rft.chat` joins the two, so every chat is read as it was written. Prompts and messages are compared as the bytes that are
stored: in Python 1, 1.0 and true are equal, in JSON they are three values.

A digest names a prompt within its group. The primary key refuses a second text with the same digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile

from rftdata.experience import Sequence as Experience
from rftdata.postgres.binary_copy import NULL, binary, group_prompt_row, text
from rftdata.postgres.values import jsonb_bytes

_DIGEST_BYTES = 16


class Prompts:
    """The prompts of one write.

    Attributes:
        rows: of rft.group_prompt, for COPY; complete once `of_group` was called for every group.
    """

    def __init__(self) -> None:
        self.rows: list[bytes] = []

    def of_group(self, group_id: int, experiences: Sequence[Experience]) -> list[tuple[bytes, bytes]]:
        """Take the prompts of all experiences of a group; the fields `prompt_digest` and `response_messages` of each."""
        prompts = [text(e.prompt) for e in experiences]
        chats = [_all_but_the_last(e) for e in experiences]
        shared: dict[bytes, list[bytes]] = {}
        for prompt, chat in zip(prompts, chats, strict=True):
            if chat is not None:
                shared[prompt] = _common_beginning(shared.get(prompt, chat), chat)
        digests: dict[tuple[bytes, bool], bytes] = {}
        fields = []
        for e, prompt, chat in zip(experiences, prompts, chats, strict=True):
            key = prompt, chat is not None
            if key not in digests:
                digests[key] = self._add(group_id, prompt, NULL if chat is None else _array(shared[prompt]))
            fields.append((digests[key], _own_messages(e, chat, len(shared.get(prompt, ())))))
        return fields

    def _add(self, group_id: int, prompt: bytes, messages: bytes) -> bytes:
        digest = binary(blake2b(prompt + messages, digest_size=_DIGEST_BYTES).digest())
        self.rows.append(group_prompt_row(group_id, digest, prompt, messages))
        return digest


def _all_but_the_last(e: Experience) -> list[bytes] | None:
    """The messages that a prompt may have; None where there is no chat. An imported file may have something else in its place."""
    return [jsonb_bytes(message)[1:] for message in e.messages[:-1]] if isinstance(e.messages, list) else None


def _common_beginning(some: list[bytes], others: list[bytes]) -> list[bytes]:
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False))]


def _own_messages(e: Experience, chat: list[bytes] | None, num_shared: int) -> bytes:
    """The field `response_messages`."""
    if e.messages is None:
        return NULL
    if chat is None:
        return binary(jsonb_bytes(e.messages))
    if len(chat) == num_shared and e.messages[-1:] == [{"role": "assistant", "content": e.response}]:
        return NULL
    return _array([*chat[num_shared:], *(jsonb_bytes(message)[1:] for message in e.messages[-1:])])


def _array(messages: list[bytes]) -> bytes:
    """A jsonb field with an array of encoded messages."""
    return binary(b"\x01[" + b",".join(messages) + b"]")
