"""Calls that are JSON objects with a name and arguments, as in the formats `hermes` and `llama_json`."""

from __future__ import annotations

from typing import Any

from rftcore.tools.calls import Call, CallError, ToolCall


def named_call(value: dict[str, Any], number: int, arguments_key: str) -> Call:
    """Return the call of a decoded object.

    Args:
        arguments_key: name of the arguments in the format; `arguments` and `parameters` are both read.
    """
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return CallError("invalid_call", 'a call needs the "name" of a tool', number)
    found = [key for key in ("arguments", "parameters") if key in value]
    if len(found) != 1:
        return CallError("invalid_call", f'the call of {name} needs "{arguments_key}", a JSON object', number)
    arguments = value[found[0]]
    if not isinstance(arguments, dict):
        return CallError("invalid_call", f'"{found[0]}" of the call of {name} must be a JSON object', number)
    return ToolCall(name, arguments, number)


def outside(pieces: list[str]) -> str:
    """Return what an answer contains beside its calls."""
    return "\n".join(stripped for piece in pieces if (stripped := piece.strip()))


def too_many(number: int) -> CallError:
    """Return the error for what follows the last call that is read."""
    return CallError("too_many_calls", f"the answer has more than {number} calls; the others were not read", number)
