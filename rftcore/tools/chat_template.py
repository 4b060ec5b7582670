"""What a model's chat template does with tools, found by rendering probes: templates are programs, and many drop silently what they do not know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from rftcore.tools.calls import Parsed, ToolCall
from rftcore.tools.formats import FORMATS, ToolFormat, tool_format
from rftcore.tools.tool import function_schema
from rftdata.errors import ConfigError

TO_USE_TEXT = (
    "set workflow_args: {format: text}, with which the system message describes the tools and calls are lines of text"
)

_SCHEMA = function_schema(
    "probe_tool",
    "It is a probe.",
    {"type": "object", "properties": {"place": {"type": "string", "description": "a probe"}}, "required": ["place"]},
)
_CALL = ToolCall("probe_tool", {"place": "pr0be"})
_RESULT = "pr0be result"
# Of formats that resemble each other, the one that marks calls most clearly is first.
_DETECTABLE = ("hermes", "glm", "harmony", "gemma", "pythonic", "llama_json")


@dataclass(frozen=True)
class ToolTemplate:
    """A chat template's way with tools.

    Attributes:
        missing: what it does not render.
        format: the format in which it writes calls; None if it is none of `FORMATS`.
        writes_several: whether an answer may have several calls.
        writes_lone_results: whether a result may follow an answer that has no call, as after a malformed one.
        special_tokens: their texts, the longest first.
    """

    missing: tuple[str, ...]
    format: ToolFormat | None = None
    writes_several: bool = False
    writes_lone_results: bool = False
    special_tokens: tuple[str, ...] = ()

    def message(self, parsed: Parsed, answer: str) -> dict[str, Any]:
        """Return the assistant's message of an answer, with its calls if the template can write them."""
        if len(parsed.calls) > 1 and not self.writes_several:
            return {"role": "assistant", "content": answer}
        thoughts = "" if self.format is None else self.format.thoughts
        message = parsed.message(answer, thoughts)
        if "tool_calls" in message:  # the template writes the tokens that mark them
            message["content"] = _without(self.special_tokens, message["content"]).strip()
            if thoughts and message["content"]:  # such templates write no text between the thoughts and a call
                message[thoughts] = "\n".join(filter(None, (message.get(thoughts), message["content"])))
                message["content"] = ""
        return message


def tool_template(tokenizer: Any) -> ToolTemplate:
    """Return what the chat template of a tokenizer does with tools; it is probed once."""
    found = _PROBED.get(tokenizer)
    if found is None:
        found = _PROBED[tokenizer] = _probed(tokenizer)
    return found


_PROBED: WeakKeyDictionary[Any, ToolTemplate] = WeakKeyDictionary()


def format_of(tokenizer: Any, name: str | None = None) -> ToolFormat:
    """Return the format of a model's calls.

    Args:
        name: as configured; None: the one in which the chat template writes calls.

    Raises:
        ConfigError: the chat template cannot carry tools, or the format is not known.
    """
    chosen = None if name is None else tool_format(name)
    if chosen is not None and not chosen.in_template:
        return chosen
    template = tool_template(tokenizer)
    if template.missing:
        raise ConfigError(
            f"the model's chat template cannot carry tools: it leaves out {', '.join(template.missing)}",
            todo=TO_USE_TEXT,
        )
    if chosen is None and template.format is None:
        names = [each.name for each in FORMATS.values() if each.in_template]
        raise ConfigError(
            "the model's chat template writes calls of tools in a format that is not known",
            allowed=", ".join(FORMATS),
            todo=f"name the format that the model was trained on (workflow_args: {{format: {names[0]}}}), or {TO_USE_TEXT}",
        )
    return chosen or template.format  # type: ignore[return-value]  # one of them is there


def answer_parser(
    tokenizer: Any, name: str | None = None, schemas: Sequence[Mapping[str, Any]] = ()
) -> Callable[[str], dict[str, Any]]:
    """Return what reads an answer as a message, with its calls apart from the content.

    Args:
        name: as of `format_of`.
        schemas: of the tools.

    Raises:
        ConfigError: see `format_of`.
    """
    tool_format = format_of(tokenizer, name)
    if not tool_format.in_template:
        return lambda answer: {"role": "assistant", "content": answer}
    template = tool_template(tokenizer)
    return lambda answer: template.message(tool_format.parsed(answer, schemas), answer)


def channel_format(tokenizer: Any) -> ToolFormat | None:
    """Return the format of the chat template if it keeps thoughts apart from the content, as those of gpt-oss and Gemma 4 do, with tools and without."""
    found = tool_template(tokenizer).format
    return found if found is not None and found.thoughts else None


def content_parser(tokenizer: Any) -> Callable[[str], dict[str, Any]] | None:
    """Return what reads an answer that may call no tool as a message; None if the content is the answer."""
    found = channel_format(tokenizer)
    if found is None:
        return None

    def read(answer: str) -> dict[str, Any]:
        parsed = found.parse(answer)
        return {"role": "assistant", "content": answer} if parsed.calls else parsed.message(answer, found.thoughts)

    return read


def _probed(tokenizer: Any) -> ToolTemplate:
    if getattr(tokenizer, "chat_template", None) is None:
        return ToolTemplate(("tools", "calls", "results"))

    def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        try:
            return str(
                tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=False)
            )
        except Exception:  # noqa: BLE001 - a template refuses what it does not know with errors of any class
            return ""

    asked = [{"role": "user", "content": "a"}]
    called = [*asked, Parsed("", [_CALL]).message("")]
    result = {"role": "tool", "tool_call_id": _CALL.call_id, "name": _CALL.name, "content": _RESULT}
    writes = {
        "tools": _SCHEMA["function"]["description"] in render(asked, [_SCHEMA]),
        "calls": all(text in render(called, None) for text in (_CALL.name, _CALL.arguments["place"])),
        "results": _RESULT in render([*called, result], [_SCHEMA]),
    }
    missing = tuple(name for name, is_written in writes.items() if not is_written)
    if missing:
        return ToolTemplate(missing)
    again = ToolCall(_CALL.name, {"place": "an0ther"}, 1)
    several = [*asked, Parsed("", [_CALL, again]).message("")]
    lone = [*asked, {"role": "assistant", "content": "b"}, result]
    special = tuple(sorted({*map(str, tokenizer.all_special_tokens)} - {""}, key=len, reverse=True))
    return ToolTemplate(
        (),
        _format(render(asked, None), render(called, None), special),
        writes_several="an0ther" in render(several, [_SCHEMA]),
        writes_lone_results=_RESULT in render(lone, [_SCHEMA]),
        special_tokens=special,
    )


def _format(asked: str, called: str, special: Sequence[str]) -> ToolFormat | None:
    """Return the format in which the call in a rendered chat parses, with nothing but the template's frame around it."""
    answer = called.removeprefix(asked)
    for name in _DETECTABLE:
        parsed = FORMATS[name].parsed(answer, [_SCHEMA])
        if parsed.calls == [_CALL] and not set(_without(special, parsed.content)) - _LETTERS:
            return FORMATS[name]
    return None


def _without(tokens: Sequence[str], text: str) -> str:
    for token in tokens:
        text = text.replace(token, "")
    return text


_LETTERS = {*"abcdefghijklmnopqrstuvwxyz_-/<>|\n \t"}
"""What the frame of an answer is made of, such as `<|im_start|>assistant`. Other formats leave brackets, quotes or backticks around a call."""
