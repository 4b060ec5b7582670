"""How the messages of a chat with tools are written: by the model's chat template, or in the format `text`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rftcore.tools.calls import Call, Parsed, ToolCall
from rftcore.tools.chat_template import answer_parser, format_of, tool_template
from rftcore.tools.formats import text
from rftcore.workflows.chat_encoding import Message


class ToolDialogue:
    """The chats of a model with tools.

    Args:
        tokenizer: of the model.
        schemas: of the tools.
        name: of the format of calls; None: that of the chat template.

    Raises:
        ConfigError: the chat template cannot carry tools, or the format is not known.
    """

    def __init__(self, tokenizer: Any, schemas: Sequence[dict[str, Any]], name: str | None = None) -> None:
        self._format = format_of(tokenizer, name)
        self._writes_lone_results = self._format.in_template and tool_template(tokenizer).writes_lone_results
        self._schemas = list(schemas)
        self.parse: Callable[[str], Message] = answer_parser(tokenizer, name, self._schemas)

    @property
    def schemas(self) -> list[dict[str, Any]] | None:
        """The tools for the chat template; None if the system message describes them."""
        return self._schemas if self._format.in_template else None

    def system(self, system: str | None, *, describe: bool = True) -> str | None:
        """Return the system message.

        Args:
            describe: whether it describes the tools where the chat template does not.
        """
        if self._format.in_template or not describe:
            return system
        described = text.describe(self._schemas)
        return f"{system}\n\n{described}" if system else described

    def parsed(self, answer: str) -> Parsed:
        """Return the content and the calls of an answer, malformed ones included."""
        return self._format.parsed(answer, self._schemas)

    def certain(self, answer: str) -> str:
        """Return the beginning of the content of an unfinished answer, see `ToolFormat.certain`."""
        return self._format.certain(answer)

    def calls(self, answer: str) -> list[Call]:
        """Return the calls of an answer, malformed ones included."""
        return self.parsed(answer).calls

    def valid_calls(self, answer: str) -> list[ToolCall]:
        """Return the calls of an answer that can be made."""
        return [call for call in self.calls(answer) if isinstance(call, ToolCall)]

    def results(self, message: Message, results: Sequence[tuple[str, str, str]]) -> list[Message]:
        """Return the messages with the results of an answer's calls.

        Args:
            message: the answer.
            results: identifier of the call, name of the tool, and text of each.
        """
        if not self._format.in_template:
            return [{"role": "user", "content": "\n".join(text.result(name, found) for _, name, found in results)}]
        if "tool_calls" not in message and not self._writes_lone_results:
            return [{"role": "user", "content": "\n".join(found for *_, found in results)}]
        return [
            {"role": "tool", "tool_call_id": call_id, "name": name, "content": found}
            for call_id, name, found in results
        ]
