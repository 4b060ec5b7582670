"""Texts of special tokens in the messages of a chat: found, replaced by marks while a chat template runs, and encoded as ordinary text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from rftdata.errors import RftError

_SCALARS = (int, float, bool, type(None))


def pattern_of(tokens: list[str]) -> re.Pattern[str] | None:
    """Return a pattern of the texts of tokens, the longest first, as one may contain another; None without any."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))) if tokens else None


def marked_message(
    message: dict[str, Any], pattern: re.Pattern[str] | None, marks: Mapping[str, str]
) -> dict[str, Any]:
    if pattern is None:
        return message
    marked: dict[str, Any] = marked_value(message, pattern, marks)
    role = message.get("role")
    # Templates compare and write roles, so a word is never changed.
    return {**marked, "role": role} if isinstance(role, str) and role.isidentifier() else marked


def marked_value(value: Any, pattern: re.Pattern[str], marks: Mapping[str, str]) -> Any:
    """Return a value of a message with marks in place of the texts of tokens.

    Raises:
        RftError: the text of an object contains a token.
    """
    if isinstance(value, str):
        return pattern.sub(lambda found: marks[found.group()], str.__str__(value))
    if isinstance(value, list):
        return [marked_value(item, pattern, marks) for item in value]
    if isinstance(value, tuple):
        return tuple(marked_value(item, pattern, marks) for item in value)
    if isinstance(value, dict):
        return {marked_value(key, pattern, marks): marked_value(item, pattern, marks) for key, item in value.items()}
    if type(value) not in _SCALARS and (found := pattern.search(f"{value!s}\n{value!r}")):
        raise RftError(
            f"a message contains the special token {found.group()!r} in an object of type {type(value).__name__}",
            todo="give the template a text, a list or a dict instead",
        )
    return value


def texts_of(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_of(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from texts_of(key)
            yield from texts_of(item)


def ordinary_token_ids(tokenizer: Any, text: str) -> list[int]:
    """Encode a text in which the tokenizer recognises no special token; an older tokenizer gets it in two halves."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "encode_special_tokens"):
        # A copy, because the setting would also hold for other threads.
        from tokenizers import Tokenizer

        plain = Tokenizer.from_str(backend.to_str())
        plain.encode_special_tokens = True
        return list(plain.encode(text, add_special_tokens=False).ids)
    half = len(text) // 2
    return [
        int(token) for part in (text[:half], text[half:]) for token in tokenizer.encode(part, add_special_tokens=False)
    ]
