"""A rollout as text for a terminal or a pipe: its messages by role, and its tokens with their loss mask.

What is trained on has a bar at its left, so it is recognised without colours. On a terminal, lines are wrapped to its width; in a pipe they
stay whole. Control characters of texts are shown as escapes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.text import Text

from rftcore.reporting.console import OutputConsole
from rftcore.reporting.visible_text import visible

BAR = "┃"
"""The mark of what is trained on."""
_TRAINED, _ROLE, _DIM = "green", "bold", "dim"
_LEAST_WIDTH = 20

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True)
class ShownTurn:
    """A turn of a sequence: its number in the rollout, its first token, the token after its last, and its own reward if it has one."""

    number: int
    start: int
    end: int
    step_reward: float | None = None


@dataclass(frozen=True, kw_only=True)
class ShownSequence:
    """A sequence to show.

    Attributes:
        heading: names it.
        facts: lines about it.
        messages: its chat; None if it has none.
        token_ids: None if they are not stored.
        loss_mask, logprobs: of the response tokens; None: all are trained on, and no policy sampled them.
    """

    heading: str
    facts: Sequence[str]
    messages: Sequence[Any] | None
    prompt: str
    response: str
    token_ids: Sequence[int] | None
    num_prompt_tokens: int
    loss_mask: Sequence[float] | None
    logprobs: Sequence[float] | None
    turns: Sequence[ShownTurn]

    def is_trained(self, place: int) -> bool:
        """Return whether a token is trained on."""
        number = place - self.num_prompt_tokens
        return number >= 0 and (self.loss_mask is None or bool(self.loss_mask[number]))

    def logprob(self, place: int) -> float | None:
        """Return the log-probability with which a token was sampled; None if no policy sampled it."""
        number = place - self.num_prompt_tokens
        if number < 0 or self.logprobs is None or math.isnan(self.logprobs[number]):
            return None
        return float(self.logprobs[number])


class RolloutPrinter:
    """Prints rollouts.

    Args:
        decode: returns the text of tokens, special ones included; None to print their ids.
        each_token: print a line for each token instead of their text.
    """

    def __init__(self, decode: Decode | None, *, each_token: bool = False) -> None:
        self._console = OutputConsole()
        self._decode = decode
        self._each_token = each_token

    def line(self, text: str, style: str = "") -> None:
        """Print a line, wrapped on a terminal."""
        for part in self._wrapped(visible(text), 0):
            self._print(Text(part, style))

    def sequence(self, shown: ShownSequence) -> None:
        """Print a sequence."""
        self.line(shown.heading, _ROLE)
        for fact in shown.facts:
            self.line(f"  {fact}")
        self._messages(shown)
        self._tokens(shown)

    def _messages(self, shown: ShownSequence) -> None:
        chat = shown.messages
        if not isinstance(chat, Sequence) or not all(isinstance(message, dict) for message in chat):
            self._block("prompt", shown.prompt, trained=False)
            self._block("response", shown.response, trained=True)
            return
        turns = _turns_of_messages(chat, shown.turns)
        for place, message in enumerate(chat):
            turn = turns.get(place)
            title = str(message.get("role", "?")) + _named(message)
            if turn is not None:
                title += f" · turn {turn.number}" if len(shown.turns) > 1 or turn.number else ""
                title += "" if turn.step_reward is None else f" · step reward {turn.step_reward:g}"
            self._block(title, message_text(message), trained=turn is not None)

    def _block(self, title: str, text: str, *, trained: bool) -> None:
        style, mark = (_TRAINED, BAR) if trained else ("", " ")
        self._print(Text.assemble((f"{mark} ", style), (visible(title), f"{_ROLE} {style}".strip())))
        for part in self._wrapped(visible(text), 4):
            self._print(Text(f"{mark}   {part}", style))

    def _tokens(self, shown: ShownSequence) -> None:
        ids = shown.token_ids
        if ids is None:
            return
        num_trained = sum(map(shown.is_trained, range(len(ids))))
        after = len(ids) - shown.num_prompt_tokens
        self.line(
            f"{len(ids)} tokens: {shown.num_prompt_tokens} of the prompt and {after} after it, {num_trained} of them trained on ({BAR})",
            _DIM,
        )
        for trained, places in groupby(range(len(ids)), shown.is_trained):
            stretch = list(places)
            if self._each_token:
                for place in stretch:
                    self._token(shown, place, trained=trained)
            else:
                self._stretch([ids[place] for place in stretch], stretch[0], trained=trained)

    def _stretch(self, ids: Sequence[int], start: int, *, trained: bool) -> None:
        text = visible(self._text(ids)).replace("\n", "\\n\n").removesuffix("\n")
        style, mark = (_TRAINED, BAR) if trained else ("", " ")
        for number, part in enumerate(self._wrapped(text, 8)):
            self._print(Text.assemble((f"{start if number == 0 else '':>5} ", _DIM), (f"{mark} {part}", style)))

    def _token(self, shown: ShownSequence, place: int, *, trained: bool) -> None:
        assert shown.token_ids is not None
        token, logprob = shown.token_ids[place], shown.logprob(place)
        style, mark = (_TRAINED, BAR) if trained else ("", " ")
        text = "" if self._decode is None else visible(repr(self._decode([token]))[1:-1])
        sampled = "" if logprob is None else f"{logprob:.3f}"
        self._print(Text.assemble((f"{place:>5} ", _DIM), (f"{mark} {token:>7} {sampled:>8}  {text}", style)))

    def _text(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids)) if self._decode is None else self._decode(ids)

    def _wrapped(self, text: str, indent: int) -> Iterator[str]:
        """Yield the lines of a text, with room for what stands before them."""
        for line in text.split("\n"):
            if self._console.is_terminal:
                width = max(self._console.width - indent, _LEAST_WIDTH)
                yield from (
                    (part.plain for part in Text(line).wrap(self._console, width, overflow="fold")) if line else [""]
                )
            else:
                yield line

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


def message_text(message: dict[str, Any]) -> str:
    """Return the content of a message, and the tools that it calls, as text."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [
            part.get("text", f"[{part.get('type', 'part')}]") if isinstance(part, dict) else str(part)
            for part in content
        ]
        content = "\n".join(map(str, parts))
    calls = message.get("tool_calls")
    called = [_call_text(call) for call in calls] if isinstance(calls, list) else []
    return "\n".join([*([str(content)] if content not in (None, "") else []), *called])


def _call_text(call: Any) -> str:
    """Return a call of a tool as `→ name(arguments)`."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    if not isinstance(function, dict) or "name" not in function:
        return f"→ {json.dumps(call, ensure_ascii=False, default=str)}"
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
    return f"→ {function['name']}({text})"


def _named(message: dict[str, Any]) -> str:
    """Return which tool a message is the result of, or which participant wrote it."""
    name = message.get("name") or message.get("tool_call_id")
    return f" {name}" if name else ""


def _turns_of_messages(chat: Sequence[dict[str, Any]], turns: Sequence[ShownTurn]) -> dict[int, ShownTurn]:
    """Return the turn of each message that is one: the last messages of the assistant."""
    answers = [place for place, message in enumerate(chat) if message.get("role") == "assistant"]
    num = min(len(answers), len(turns))
    return dict(zip(answers[len(answers) - num :], turns[len(turns) - num :], strict=True))


def number(value: float | None) -> str:
    """Return a reward as text."""
    return "none" if value is None else f"{value:g}"


def named(values: Mapping[str, Any]) -> str:
    """Return named numbers as text."""
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, int | float) else f"{name} {value}" for name, value in values.items()
    )


def finite(value: Any) -> Any:
    """Return a value for JSON, with None in place of what is not a number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [finite(each) for each in value]
    return value
