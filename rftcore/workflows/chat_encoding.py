"""Encoding of chats: from messages to the tokens that the model reads, by its chat template.

Invariants:
- The text of users, tools and environments forges no special token. The text of a special token in a message is encoded as ordinary text
  (`encode_special_tokens` of the tokenizers library), everything else as usual. So are texts among the variables of the template. Answers of the
  assistant keep the special tokens that mark something within an answer, such as a call of a tool, but none that the template writes around
  messages. What still becomes a special token (a normalizer may make one of `<|END|>`) is refused.
- A chat is continued without being rendered again (`continued`) only if the template renders the earlier chat at the beginning of the longer
  one as it renders it alone, with the thoughts of its last answer. `suffix` asks nothing of the earlier chat.

Without a template the contents are concatenated. They are the whole input, written by the author of the workflow, and may contain special tokens.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from rftcore.workflows.special_tokens import marked_message, marked_value, ordinary_token_ids, pattern_of, texts_of
from rftdata.errors import RftError

Message = dict[str, Any]

# An answer that every template writes unchanged, and that is in no other message.
PROBE_ANSWER = "7f3a9c51"
_BEFORE: Sequence[Message] = ({"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE_ANSWER})
# First characters of two planes for private use: a character stands for each special token in the text of a message while it is rendered.
_MARKS = (0xF0000, 0x100000)
_ENDS_OF_THOUGHTS = ("</think>", "<channel|>")
_OF_TEXTS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True)
class TemplateInput:
    """What a chat template reads besides the messages.

    Attributes:
        tools: JSON schemas of the tools that the model may call; None without tools.
        arguments: further variables of the template, such as `enable_thinking`.
    """

    tools: list[dict[str, Any]] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Equal for inputs that a template renders alike."""
        return repr((self.tools, sorted(self.arguments.items()))) if self.tools or self.arguments else ""


MESSAGES_ALONE = TemplateInput()


@dataclass(frozen=True)
class Encoded:
    """A text and its tokens."""

    text: str
    token_ids: list[int]


class ChatEncoder:
    """Renders and encodes the chats of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = added = tokenizer.added_tokens_decoder
        special = {str(token) for token in added.values() if token.special}
        self.special_tokens = sorted({*special, *tokenizer.all_special_tokens} - {""})
        self._special_ids = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        of_texts = {getattr(tokenizer, f"{name}_token", None) for name in _OF_TEXTS} | self._around_messages()
        self._in_texts = pattern_of(self.special_tokens)
        self._in_answers = pattern_of([token for token in self.special_tokens if token in of_texts])
        self._ordinary: dict[str, list[int]] = {}
        self._ends: dict[str, tuple[str, str]] = {}

    def _around_messages(self) -> set[str]:
        """Return the special tokens that the template writes around messages, such as those of roles."""
        found = set[str]()
        for chat in ([*_BEFORE, {"role": "user", "content": "b"}], [{"role": "system", "content": "b"}, *_BEFORE]):
            with contextlib.suppress(Exception):  # a template may refuse such a chat
                text = self.render(chat, add_generation_prompt=False)
                found |= {token for token in self.special_tokens if token in text}
        return found

    @property
    def is_plain(self) -> bool:
        """Whether the tokenizer has no chat template."""
        return self._tokenizer.chat_template is None

    def prompt(self, messages: list[Message], given: TemplateInput = MESSAGES_ALONE) -> Encoded:
        """Return the model's input for a chat.

        Raises:
            RftError: a message contains a special token that cannot be encoded as ordinary text.
            Exception: any error of the chat template, which is a program.
        """
        if self.is_plain:
            text = "".join(map(content_text, messages))
            return Encoded(text, [int(token) for token in self._tokenizer.encode(text)])
        chat = self.marked(messages, given)
        return self.encoded(self.render(chat.messages, chat.given, add_generation_prompt=True), chat)

    def continued(
        self,
        messages: list[Message],
        num_known: int,
        last_token: int | None,
        given: TemplateInput = MESSAGES_ALONE,
        text: str = "",
    ) -> Encoded | None:
        """Return what follows a sampled answer up to the next one, or None if the template renders the earlier chat differently.

        Args:
            messages: the whole chat; the answer is the last of the first `num_known` messages.
            last_token: of the answer. The template's end of an answer is left out of the tokens if this is its token.
            text: of the tokens up to the end of the answer. The template must write the thoughts of answers that are in it.

        Raises:
            RftError, Exception: as `prompt`.
        """
        if self.is_plain:
            return self.encoded("".join(map(content_text, messages[num_known:])), None)
        chat = self.marked(messages, given)
        whole = self.render(chat.messages, chat.given, add_generation_prompt=True)
        try:
            known = self.render(chat.messages[:num_known], chat.given, add_generation_prompt=False)
            end, rest = self.ends_of_answers(chat.messages[: num_known - 1], chat.given)
        except Exception:  # noqa: BLE001 - the template may refuse a chat that ends with an answer; the whole one is rendered instead
            return None
        if not known.endswith(end + rest) and messages[num_known - 1].get("tool_calls"):
            end, rest = self._end_of_calls(known), ""
        kept = known.removesuffix(rest)
        if not known.endswith(end + rest) or not whole.startswith(kept):
            return None
        if _leaves_out_thoughts(messages[:num_known], text, chat.read(kept)):
            return None
        return self._after_answer(end, whole[len(kept) :], chat, last_token)

    def suffix(
        self,
        messages: list[Message],
        last_token: int | None,
        given: TemplateInput = MESSAGES_ALONE,
        before: Sequence[Message] = _BEFORE,
    ) -> Encoded | None:
        """Return what the template writes after an answer if these messages follow, whatever the chat before them; None if it refuses them.

        Args:
            messages: new ones, after the answer.
            last_token: see `continued`.
            before: a chat that ends with `PROBE_ANSWER`.

        Raises:
            RftError: as `prompt`.
        """
        chat = self.marked([*before, *messages], given)
        try:
            whole = self.render(chat.messages, chat.given, add_generation_prompt=True)
            end, _ = self.ends_of_answers(list(before[:-1]), given)
        except Exception:  # noqa: BLE001 - the template refuses such a chat; the caller renders the whole one
            return None
        _, found, after = whole.partition(PROBE_ANSWER)
        if not found or not after.startswith(end):
            return None
        return self._after_answer(end, after.removeprefix(end), chat, last_token)

    def _after_answer(self, end: str, rendered: str, chat: MarkedChat, last_token: int | None) -> Encoded:
        """Return the end of an answer and what follows it; without the end's tokens if the answer has them.

        Args:
            rendered: what the template wrote after the end.
        """
        between = self.encoded(rendered, chat)
        end_ids = self.encoded(end, None).token_ids
        closing = [] if not end_ids or last_token == end_ids[-1] else end_ids
        token_ids = closing + between.token_ids
        # Without an end of answers, an answer ends with the token that begins the next message, such as GLM's of the user.
        is_sampled = not end_ids and last_token in self._special_ids and token_ids[:1] == [last_token]
        return Encoded(end + between.text, token_ids[1:] if is_sampled else token_ids)

    def _end_of_calls(self, rendered: str) -> str:
        """Return the special token with which a rendered answer with calls ends, another one than that of texts; empty without one."""
        return max((token for token in self.special_tokens if rendered.endswith(token)), key=len, default="")

    def ends_of_answers(self, messages: list[Message], given: TemplateInput = MESSAGES_ALONE) -> tuple[str, str]:
        """Return what the template writes after an answer: the text of its end, up to the first special token, and the rest.

        Raises:
            RftError: the template changes the answer.
            Exception: any error of the chat template.
        """
        if given.key not in self._ends:
            probe = [*messages, {"role": "assistant", "content": PROBE_ANSWER}]
            before, found, after = self.render(probe, given, add_generation_prompt=False).rpartition(PROBE_ANSWER)
            if not found:
                raise RftError("the model's chat template changes an answer", value=before[:200])
            places = [(after.find(token), -len(token)) for token in self.special_tokens if token in after]
            place, length = min(places, default=(0, 0))
            self._ends[given.key] = after[: place - length], after[place - length :]
        return self._ends[given.key]

    def render(
        self, messages: list[Message], given: TemplateInput = MESSAGES_ALONE, *, add_generation_prompt: bool
    ) -> str:
        """Return what the chat template writes.

        Raises:
            Exception: any error of the chat template, which is a program.
        """
        return str(
            self._tokenizer.apply_chat_template(
                messages,
                tools=given.tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **given.arguments,
            )
        )

    def marked(
        self, messages: list[Message], given: TemplateInput = MESSAGES_ALONE, *, with_answers: bool = True
    ) -> MarkedChat:
        """Return a chat for the template, with a mark in place of the text of each special token.

        Args:
            with_answers: whether special tokens that begin, end or fill texts, and those that the template writes around messages, are also
                marked in answers of the assistant. Sampled answers contain them as ordinary text only.

        Raises:
            RftError: the chat leaves no characters for marks, or the text of an object contains a special token.
        """
        texts = "".join((*texts_of(messages), *texts_of(given.tools), *texts_of(dict(given.arguments))))
        for first in _MARKS:
            marks = {token: chr(first + number) for number, token in enumerate(self.special_tokens)}
            if not marks or re.search(f"[{chr(first)}-{chr(first + len(marks) - 1)}]", texts) is None:
                break
        else:
            raise RftError("a chat contains characters of both planes for private use", value=texts[:100])
        in_answers = self._in_answers if with_answers else None
        return MarkedChat(
            [
                marked_message(message, in_answers if _is_answer(message) else self._in_texts, marks)
                for message in messages
            ],
            given if self._in_texts is None else _marked_input(given, self._in_texts, marks),
            {mark: token for token, mark in marks.items()},
        )

    def encoded(self, rendered: str, chat: MarkedChat | None) -> Encoded:
        """Encode what the template wrote: special tokens are its own, and what was marked is ordinary text.

        Args:
            chat: the rendered one; None for text without marks.

        Raises:
            RftError: the tokenizer cannot encode the text of a special token as ordinary text, or makes one of another text.
        """
        token_ids: list[int] = []
        pieces = [(rendered, False)] if chat is None else chat.pieces(rendered)
        for text, is_marked in pieces:
            found = (
                self._as_ordinary_text(text) if is_marked else self._tokenizer.encode(text, add_special_tokens=False)
            )
            if chat is not None and not is_marked:
                self._refuse_made(text, found)
            token_ids += [int(token) for token in found]
        return Encoded("".join(text for text, _ in pieces), token_ids)

    def _refuse_made(self, text: str, token_ids: list[int]) -> None:
        """Refuse more special tokens than have their text in the encoded text."""
        made = self._special_ids - {self._tokenizer.unk_token_id}
        num_written = 0 if self._in_texts is None else len(self._in_texts.findall(text))
        found = [int(token) for token in token_ids if token in made]
        if len(found) > num_written:
            names = sorted({str(self._added.get(token, token)) for token in found})
            raise RftError(
                f"a message contains text that the model's tokenizer encodes as a special token, one of {', '.join(names)}",
                value=text[-200:],
                todo="remove texts from the message that resemble special tokens, for example in other letters",
            )

    def _as_ordinary_text(self, token: str) -> list[int]:
        if token not in self._ordinary:
            found = ordinary_token_ids(self._tokenizer, token)
            if self._special_ids & set(found) - {self._tokenizer.unk_token_id}:
                raise RftError(
                    f"a message contains the text of the special token {token!r}, which the model's tokenizer cannot encode as ordinary text",
                    todo="remove it from the text, or use a model with a fast tokenizer (tokenizer.json)",
                )
            self._ordinary[token] = found
        return self._ordinary[token]


def _marked_input(given: TemplateInput, pattern: re.Pattern[str], marks: Mapping[str, str]) -> TemplateInput:
    return TemplateInput(marked_value(given.tools, pattern, marks), marked_value(dict(given.arguments), pattern, marks))


@dataclass(frozen=True)
class MarkedChat:
    """A chat whose messages contain no special token.

    Attributes:
        messages: with marks, characters that stand for special tokens.
        given: likewise.
        tokens: the text of each mark.
    """

    messages: list[Message]
    given: TemplateInput
    tokens: dict[str, str]

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """Return the parts of a rendered text, and whether each is the text of a token that a mark stands for."""
        if not self.tokens:
            return [(text, False)]
        parts = re.split(f"([{min(self.tokens)}-{max(self.tokens)}])", text)
        return [(self.tokens.get(part, part), part in self.tokens) for part in parts if part]

    def read(self, text: str) -> str:
        """Return a rendered text with the texts of tokens in place of their marks."""
        return "".join(part for part, _ in self.pieces(text))


def chat_encoder(tokenizer: Any) -> ChatEncoder:
    """Return the encoder of a tokenizer, which is made once."""
    found = _ENCODERS.get(tokenizer)
    if found is None:
        found = _ENCODERS[tokenizer] = ChatEncoder(tokenizer)
    return found


_ENCODERS: WeakKeyDictionary[Any, ChatEncoder] = WeakKeyDictionary()


def copied(messages: Iterable[Message]) -> list[Message]:
    """Return a copy of a chat with all its lists, tuples and dicts; other values are shared. Texts of derived types become plain ones."""
    return [_copied(message) for message in messages]


def content_text(message: Message) -> str:
    """Return the text of a message, or the joined text parts of a content in parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def _copied(value: Any) -> Any:
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, dict):
        return {_copied(key): _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return tuple(map(_copied, value)) if type(value) is tuple else value


def _is_answer(message: Message) -> bool:
    return message.get("role") == "assistant"


def _leaves_out_thoughts(messages: list[Message], text: str, rendered: str) -> bool:
    """Return whether a rendered chat lacks thoughts of an answer that a text has; white space does not count."""
    texts = [content_text(message) for message in messages if _is_answer(message)]
    answers = [text.rpartition(end) for text in texts for end in _ENDS_OF_THOUGHTS]
    thoughts = ["".join((before + end).split()) for before, end, _ in answers if end]
    if not thoughts:
        return False
    text, rendered = "".join(text.split()), "".join(rendered.split())
    return any(each in text and each not in rendered for each in thoughts)
