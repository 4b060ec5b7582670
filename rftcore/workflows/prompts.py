"""How the chats of rollouts become prompts: rendered once for rollouts that begin alike, and continued with their thoughts or without."""

from __future__ import annotations

import contextlib
from typing import Any, Literal

from rftcore.workflows.chat_encoding import MESSAGES_ALONE, PROBE_ANSWER, ChatEncoder, Encoded, Message, TemplateInput
from rftdata.errors import ConfigError

Thoughts = Literal["template", "tool_cycle", "all"]
"""When a chat continues with the tokens of its answers although the template would leave out their thoughts: never, while only tools have written
since, or always."""

_NEW = "b5d2e817"
_ANSWER: Message = {"role": "assistant", "content": PROBE_ANSWER}
# Chats that end with an answer; a template may refuse some.
_BEFORE: tuple[list[Message], ...] = (
    [{"role": "user", "content": "a"}, _ANSWER],
    [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}, _ANSWER],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        _ANSWER,
    ],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"<think>\nb\n</think>\n\n{PROBE_ANSWER}"}],
)


class Prompts:
    """`ChatEncoder.prompt` for rollouts that begin alike, such as those of a group: equal chats are rendered once.

    Rendering takes longer than everything else that an explorer does for a short answer.

    Args:
        thoughts: of earlier answers, whether they stay in the chat.
    """

    def __init__(self, thoughts: Thoughts = "template") -> None:
        self._thoughts = thoughts
        self._rendered: dict[str, Encoded] = {}

    def continued(
        self,
        encoder: ChatEncoder,
        messages: list[Message],
        num_known: int,
        last_token: int | None,
        given: TemplateInput = MESSAGES_ALONE,
        text: str = "",
    ) -> Encoded | None:
        """Return what follows a sampled answer up to the next one, or None if the chat must be rendered again; see `ChatEncoder.continued`."""
        between = encoder.continued(messages, num_known, last_token, given, text)
        new = messages[num_known:]
        stays = self._thoughts == "all" or (
            self._thoughts == "tool_cycle" and all(message.get("role") == "tool" for message in new)
        )
        return encoder.suffix(new, last_token, given) if between is None and stays else between

    def rewriting_roles(self, encoder: ChatEncoder) -> list[str]:
        """Return the roles of messages before which thoughts are taken out of an earlier answer, of user and tool.

        A chat that is continued by such a message is rendered again. Roles that the template refuses are left out.
        """
        thoughtful = {"role": "assistant", "content": f"<think>\n{PROBE_ANSWER}\n</think>\n\n{PROBE_ANSWER}"}
        found = []
        for role in () if encoder.is_plain else ("user", "tool"):
            chat = [{"role": "user", "content": "a"}, thoughtful, {"role": role, "content": "b"}]
            with contextlib.suppress(Exception):
                found += [role] if self.continued(encoder, chat, 2, None, text=thoughtful["content"]) is None else []
        return found

    def rendered(self, encoder: ChatEncoder, messages: list[Message], given: TemplateInput = MESSAGES_ALONE) -> Encoded:
        """Return what `encoder.prompt` returns.

        Args:
            encoder: the same in each call.
        """
        # Objects of a workflow, which its template may know, have no text that distinguishes them.
        if not all(map(_is_plain_data, (messages, given.tools, dict(given.arguments)))):
            return encoder.prompt(messages, given)
        key = (
            repr(messages) + given.key
        )  # unlike JSON, it distinguishes tuples from lists, and True from "true" as a key
        if key not in self._rendered:
            self._rendered[key] = encoder.prompt(messages, given)
        found = self._rendered[key]
        return Encoded(found.text, list(found.token_ids))


def refuse_opaque(encoder: ChatEncoder) -> None:
    """Refuse a chat template with which answers cannot stay in the chat as they were sampled (`explorer.thoughts: all`).

    What it writes after an answer must be the same whatever the chat before it.

    Raises:
        ConfigError: it is not, or the template refuses or leaves out a user's message after an answer.
    """
    if encoder.is_plain:
        return
    user, tool = (
        {found for before in _BEFORE if (found := _suffix(encoder, before, role)) is not None}
        for role in ("user", "tool")
    )
    if len(user) != 1 or _NEW not in "".join(user) or len(tool) > 1:
        raise ConfigError(
            "explorer.thoughts: all continues every chat with the tokens that were sampled, and the model's chat template does not allow it: what it writes"
            " after an answer depends on the chat before it",
            value="all",
            allowed="template, tool_cycle",
            todo="set explorer.thoughts: template, with which the chat is rendered again where the template changes it",
        )


def _suffix(encoder: ChatEncoder, before: list[Message], role: str) -> str | None:
    found = encoder.suffix([{"role": role, "content": _NEW}], None, before=before)
    return None if found is None else found.text


def _is_plain_data(value: Any) -> bool:
    """Return whether `repr` distinguishes a value from every other one."""
    if type(value) in (list, tuple):
        return all(map(_is_plain_data, value))
    if type(value) is dict:
        return all(_is_plain_data(key) and _is_plain_data(item) for key, item in value.items())
    return type(value) in (str, int, float, bool, type(None))
