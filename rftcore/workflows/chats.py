"""Trainable sequences of chats with given answers: exactly the tokens of the assistant's turns count in the loss.

The tokens are those that the model would see and sample. The text before an answer is rendered with the chat template's generation
prompt and tokenized separately, then the answer with its end token, then the text before the next answer. One sequence holds all
turns, so the template must render a chat as the beginning of every longer one. Other templates are refused, because their answers
cannot be found in the longer text, and the model would be trained on other tokens than it is prompted with.

The end token of an answer is the first special token that the template writes after its content. If it writes none, and for
models without a template (contents are concatenated), only the last answer ends, with the tokenizer's end token.

A single answer (`written_sequence`) is rendered in the same way. Templates of reasoning models may not render it behind their own generation
prompt, or leave a part of it out. It then follows the generation prompt unchanged, with the end token that the template writes after answers.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rftcore.workflows.chat_encoding import ChatEncoder, Message, chat_encoder, content_text
from rftdata.errors import ConfigError, ModelError
from rftdata.experience import TURNS as TURNS_ARRAY
from rftdata.experience import Sequence

TURNS = ("all", "last")


@dataclass(frozen=True)
class _Answer:
    """A turn of the assistant.

    Attributes:
        before: text between the previous answer, or the beginning, and this one.
        text: the answer, without its end token.
        end: text of its end token; empty if the template writes none.
    """

    before: str
    text: str
    end: str


def assistant_turns(messages: list[Message]) -> list[int]:
    """Return the indices of the assistant's turns in a chat."""
    return [place for place, message in enumerate(messages) if message["role"] == "assistant"]


def chat_sequence(tokenizer: Any, messages: list[Message], *, start: int = 0, turns: str = "all") -> Sequence:
    """Return a trainable sequence of a chat up to its last answer, without log-probabilities. Each answer that is trained on is a turn.

    Args:
        start: index of the first message that may be trained on; earlier answers are examples.
        turns: `all` trains on every answer from there on, `last` only on the last one.

    Raises:
        ConfigError: the chat template refuses the chat, changes an answer, or renders the beginning of a chat differently
            when the chat continues.
        ModelError: the tokenizer has no end token.
    """
    places = [place for place in assistant_turns(messages) if place >= start]
    assert places, "the caller checks that there is an answer"
    if turns == "last":
        places = places[-1:]
    encoder = chat_encoder(tokenizer)
    is_plain, chat = encoder.is_plain, encoder.marked(messages, with_answers=False)
    answers = list(_plain_answers(messages, places) if is_plain else _rendered_answers(encoder, chat.messages, places))
    token_ids: list[int] = []
    counts: list[bool] = []
    bounds: list[tuple[int, int, int]] = []
    for number, answer in enumerate(answers):
        # A template writes the special tokens itself; without one the tokenizer adds its own at the beginning.
        before = (
            tokenizer.encode(answer.before)
            if is_plain and number == 0
            else encoder.encoded(answer.before, chat).token_ids
        )
        answer_ids = tokenizer.encode(answer.text + answer.end, add_special_tokens=False)
        if not answer.end and number == len(answers) - 1:
            answer_ids = [*answer_ids, _end_token(tokenizer)]
        token_ids += [*before, *answer_ids]
        bounds.append((len(token_ids) - len(answer_ids), len(token_ids), number))
        counts += [False] * len(before) + [True] * len(answer_ids)
    num_prompt_tokens = counts.index(True)
    mask = counts[num_prompt_tokens:]
    # An empty answer without an end token may stand before the first token that counts.
    turns_K3 = np.maximum(np.array(bounds, np.int32), [num_prompt_tokens, num_prompt_tokens, 0], dtype=np.int32)
    texts = [chat.read(text) for answer in answers for text in (answer.before, answer.text, answer.end)]
    return Sequence(
        prompt=texts[0],
        response="".join(texts[1:-1]),
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens,
        finish_reason="stop",
        loss_mask=None if all(mask) else mask,
        messages=messages[: places[-1] + 1],
        arrays={TURNS_ARRAY: turns_K3} if len(answers) > 1 else {},
    )


def written_sequence(tokenizer: Any, messages: list[Message], response: str) -> Sequence:
    """Return a trainable sequence of an answer that no engine sampled: with the end token, without log-probabilities.

    Raises:
        ModelError: the tokenizer has no end token, and the template writes none.
        Exception: see `ChatEncoder.prompt`.
    """
    chat = [*messages, {"role": "assistant", "content": response}]
    with contextlib.suppress(ConfigError):
        return chat_sequence(tokenizer, chat, turns="last")
    encoder = chat_encoder(tokenizer)
    prompt = encoder.prompt(messages)
    end = _end_after(encoder, messages)
    response_ids = tokenizer.encode(response + end, add_special_tokens=False)
    return Sequence(
        prompt=prompt.text,
        response=response,
        token_ids=[*prompt.token_ids, *response_ids, *([] if end else [_end_token(tokenizer)])],
        num_prompt_tokens=len(prompt.token_ids),
        finish_reason="stop",
        messages=chat,
    )


def _end_after(encoder: ChatEncoder, messages: list[Message]) -> str:
    """Return the text of the end token that the template writes after an answer in a chat; empty if it writes none, or no answer."""
    try:
        end, _ = encoder.ends_of_answers(messages)
    except Exception:  # noqa: BLE001 - a template is a program and may raise anything
        return ""
    return next((token for token in encoder.special_tokens if end.endswith(token)), "")


def _end_token(tokenizer: Any) -> int:
    if tokenizer.eos_token_id is None:
        raise ModelError(
            "the model's tokenizer has no end token, and its chat template writes none after an answer",
            todo="set eos_token in its tokenizer_config.json",
        )
    return int(tokenizer.eos_token_id)


def _plain_answers(messages: list[Message], places: list[int]) -> Iterator[_Answer]:
    done = 0
    for place in places:
        yield _Answer("".join(map(content_text, messages[done:place])), content_text(messages[place]), "")
        done = place + 1


def _rendered_answers(encoder: ChatEncoder, messages: list[Message], places: list[int]) -> Iterator[_Answer]:
    done = ""
    for place in places:
        asked = _render(encoder, messages[:place], add_generation_prompt=True)
        answered = _render(encoder, messages[: place + 1], add_generation_prompt=False)
        if not asked.startswith(done):
            raise ConfigError(
                f"the model's chat template renders the chat up to an earlier answer differently when message {place + 1} is generated, so "
                "that one sequence cannot hold both answers",
                todo="train on the last answer only: explorer.workflow_args: {turns: last}",
            )
        if not answered.startswith(asked):
            raise ConfigError(
                f"the model's chat template renders the chat before message {place + 1} differently when that answer follows, so the "
                "answer's tokens cannot be distinguished from the prompt's",
                todo="use a model whose chat template only appends, or replace its chat template",
            )
        text, end = _split_end_token(
            answered[len(asked) :], content_text(messages[place]), encoder.special_tokens, place
        )
        yield _Answer(asked[len(done) :], text, end)
        done = asked + text + end


def _split_end_token(rendered: str, content: str, specials: list[str], place: int) -> tuple[str, str]:
    """Split what the template writes for an answer into the answer and its end token."""
    wanted = content if content in rendered else content.strip()  # templates may trim
    if wanted not in rendered:
        raise ConfigError(
            f"the model's chat template changes the answer in message {place + 1}",
            value=rendered[:200],
            todo="correct the answer (for example, remove markup that the template removes), or use another chat template",
        )
    stops = [match.start() + len(wanted) for match in re.finditer(f"(?={re.escape(wanted)})", rendered)]
    # A template may write the same words before the answer; after it there are only special tokens and space.
    stop = next((stop for stop in stops if not _remove_all(specials, rendered[stop:]).strip()), stops[0])
    ends = [(rendered.find(token, stop), -len(token), token) for token in specials]
    position, _, end = min((each for each in ends if each[0] >= 0), default=(stop, 0, ""))
    return rendered[:position], end


def _remove_all(tokens: list[str], text: str) -> str:
    for token in tokens:
        text = text.replace(token, "")
    return text


def _render(encoder: ChatEncoder, messages: list[Message], *, add_generation_prompt: bool) -> str:
    try:
        return encoder.render(messages, add_generation_prompt=add_generation_prompt)
    except Exception as error:  # a template is a program and may raise anything
        raise ConfigError(
            f"the model's chat template refuses the first {len(messages)} messages of the chat: {type(error).__name__}: {error}",
            value=[message["role"] for message in messages],
            todo="correct the order of the roles, or remove the row",
        ) from error
