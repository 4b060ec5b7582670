"""Formats of tool calls in answers of a model: pure functions between an answer and its calls. One file each, listed in this table.

For every format, any text parses in linear time without an exception, and `parse(render(calls)) == calls`. What begins like a call and is
none is a `CallError` that says why, which the model reads in place of a result. Nothing in the thoughts of a model (`<think>…</think>`) is a
call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rftcore.tools.calls import Parsed, ToolCall
from rftcore.tools.formats import hermes, llama_json, pythonic, text
from rftdata.errors import ConfigError


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls.

    Attributes:
        parse: returns the content and the calls of an answer.
        render: returns the answer with given calls and content.
        in_template: whether the chat template describes the tools and writes the calls and results.
    """

    name: str
    parse: Callable[[str], Parsed]
    render: Callable[[list[ToolCall], str], str]
    in_template: bool = True


FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat("hermes", hermes.parse, hermes.render),
    "llama_json": ToolFormat("llama_json", llama_json.parse, llama_json.render),
    "pythonic": ToolFormat("pythonic", pythonic.parse, pythonic.render),
    "text": ToolFormat("text", text.parse, text.render, in_template=False),
}


def tool_format(name: str) -> ToolFormat:
    """Return a format by its name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in FORMATS:
        raise ConfigError("unknown format of tool calls", value=name, allowed=", ".join(FORMATS))
    return FORMATS[name]
