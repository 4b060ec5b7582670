"""Formats of tool calls in answers of a model: pure functions between an answer and its calls. One file each, listed in this table.

For every format, any text parses in linear time without an exception, and `parse(render(calls)) == calls`. What begins like a call and is
none is a `CallError` that says why, which the model reads in place of a result. Nothing in the thoughts of a model (`<think>…</think>`) is a
call. What a format cannot write, such as the mark that ends a text within that text, is named in its module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rftcore.tools.calls import Parsed, ToolCall
from rftcore.tools.formats import gemma, glm, harmony, hermes, llama_json, pythonic, text
from rftcore.tools.formats.unfinished import before_marks
from rftdata.errors import ConfigError


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls.

    Attributes:
        parse: returns the content and the calls of an answer.
        render: returns the answer with given calls and content.
        marks: texts with which calls begin; in front of the first of them, an unfinished answer is content.
        in_template: whether the chat template describes the tools and writes the calls and results.
        by_schema: whether `parse` also takes the schemas of the tools, because the type of a value is not written.
        thoughts: key of the thoughts in messages, as the chat templates of the format name it; empty if thoughts stay in the content.
        channel: in place of `marks`, what returns the content of an unfinished answer.
    """

    name: str
    parse: Callable[..., Parsed]
    render: Callable[[list[ToolCall], str], str]
    marks: tuple[str, ...] = ()
    in_template: bool = True
    by_schema: bool = False
    thoughts: str = ""
    channel: Callable[[str], str] | None = None

    def parsed(self, answer: str, schemas: Sequence[Mapping[str, Any]]) -> Parsed:
        """Return the content and the calls of an answer of a chat with these tools."""
        return self.parse(answer, schemas) if self.by_schema else self.parse(answer)

    def certain(self, answer: str) -> str:
        """Return the beginning of the content of an unfinished answer, which no further text changes but for the space around it."""
        return before_marks(answer, self.marks) if self.channel is None else self.channel(answer)


FORMATS: dict[str, ToolFormat] = {
    each.name: each
    for each in (
        ToolFormat("hermes", hermes.parse, hermes.render, ("<tool_call>",)),
        ToolFormat("glm", glm.parse, glm.render, ("<tool_call>",), by_schema=True),
        ToolFormat("harmony", harmony.parse, harmony.render, thoughts="thinking", channel=harmony.certain),
        ToolFormat("gemma", gemma.parse, gemma.render, ("<|tool_call>", "<|channel>"), thoughts="reasoning"),
        ToolFormat("llama_json", llama_json.parse, llama_json.render, ("<|python_tag|>", "{")),
        ToolFormat("pythonic", pythonic.parse, pythonic.render, ("<|python_tag|>", "[")),
        ToolFormat("text", text.parse, text.render, ("CALL",), in_template=False),
    )
}


def tool_format(name: str) -> ToolFormat:
    """Return a format by its name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in FORMATS:
        raise ConfigError("unknown format of tool calls", value=name, allowed=", ".join(FORMATS))
    return FORMATS[name]
