"""The chats of one rollout as a tree of turns, token for token.

A turn that continues the chat of an earlier one has that turn's tokens, exactly as they were sampled, at the beginning of its prompt. Messages
only propose which turn is continued. Whether one turn extends another is decided by their tokens: its prompt must begin with all tokens of
the other, prompt and answer. So what is trained is what was sampled, whatever the template or the workflow does.

A sequence is stored for each branch. The first turn that extends another one joins its sequence. A later one, and a turn that extends none,
begins a sequence of its own with the cause (`rft.fork`). Every sampled token is therefore in the loss of exactly one sequence, and in the prompts
of the branches that begin after it. A turn neither continues nor extends one of another role: each role has chats and sequences of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from rftcore.workflows.chat_encoding import MESSAGES_ALONE, Message, TemplateInput, chat_encoder
from rftcore.workflows.inputs import PER_TOKEN, PER_TURN
from rftcore.workflows.prompts import Prompts
from rftcore.workflows.turn import Turn
from rftdata.errors import RftError
from rftdata.experience import TURNS, Array, Sequence

_Key = tuple[str, str, str]


@dataclass(frozen=True)
class Prompt:
    """The model's input for a turn.

    Attributes:
        continues: number of the turn whose chat it continues, extended or rendered again; None if it continues none.
        given_key: of what the chat template read besides the messages.
    """

    text: str
    token_ids: list[int]
    continues: int | None = None
    given_key: str = ""


@dataclass(eq=False)
class _Node:
    """A turn in the tree.

    Attributes:
        number: among the nodes.
        first_turn: number of the turn in its rollout; a written chat may have several from there on.
        prompt: None for a turn that no policy sampled, which extends none and is extended by none.
        extended: the turn whose tokens begin its prompt.
        next: the first turn that extends it.
    """

    number: int
    first_turn: int
    turn: Turn
    chat: list[_Key]
    prompt: Prompt | None
    extended: _Node | None = None
    next: _Node | None = None

    @property
    def role(self) -> str | None:
        return self.turn.sequence.role


class Session:
    """The turns of one rollout.

    Args:
        prompts: renders chats; rollouts that begin alike may share it.
    """

    def __init__(self, prompts: Prompts | None = None) -> None:
        self._nodes: list[_Node] = []
        self._prompts = Prompts() if prompts is None else prompts

    @property
    def turns(self) -> list[Turn]:
        return [node.turn for node in self._nodes]

    @property
    def has_sampled(self) -> bool:
        """Whether the policy has answered."""
        return any(node.prompt is not None for node in self._nodes)

    def prompt(
        self,
        tokenizer: Any,
        messages: list[Message],
        given: TemplateInput = MESSAGES_ALONE,
        role: str | None = None,
    ) -> Prompt:
        """Return the input for a chat: the tokens of the turn that it continues and those of the new messages, or the rendered chat.

        Args:
            tokenizer: of the model.
            given: what the chat template reads besides the messages; only turns with the same can be continued.
            role: the role that answers; only its turns can be continued.

        Raises:
            RftError, Exception: see `ChatEncoder.prompt`.
        """
        node, encoder = self._continued(_keys(messages), given.key, role), chat_encoder(tokenizer)
        if node is not None:
            known = node.turn.sequence
            text = known.prompt + known.response
            last_token = int(known.token_ids[-1]) if len(known.token_ids) > known.num_prompt_tokens else None
            between = self._prompts.continued(encoder, messages, len(node.chat), last_token, given, text)
            if between is not None:
                return Prompt(text + between.text, [*known.token_ids, *between.token_ids], node.number, given.key)
        # No other rollout asks for a chat with this one's answers.
        rendered = self._prompts.rendered(encoder, messages, given) if node is None else encoder.prompt(messages, given)
        return Prompt(rendered.text, rendered.token_ids, None if node is None else node.number, given.key)

    def add(self, turn: Turn, prompt: Prompt | None = None) -> Turn:
        """Record a turn.

        Args:
            prompt: None for an answer that no policy sampled.
        """
        last = self._nodes[-1] if self._nodes else None
        first_turn = 0 if last is None else last.first_turn + last.turn.sequence.num_turns
        node = _Node(len(self._nodes), first_turn, turn, _keys([*turn.messages, turn.message]), prompt)
        if prompt is not None:
            node.extended = self._extended_by(prompt, node.role)
            if node.extended is not None and node.extended.next is None:
                node.extended.next = node
        self._nodes.append(node)
        return turn

    def sequences(self) -> list[Sequence]:
        """Return a sequence for each branch, in the order of their first turns.

        Raises:
            RftError: a turn of a chat of several turns has an array that `Turn.record` does not know.
        """
        return [
            replace(_joined(list(_row(node))), turn_index=node.first_turn, fork=self._fork(node), role=node.role)
            for node in self._nodes
            if not _joins(node)
        ]

    def _continued(self, chat: list[_Key], given_key: str, role: str | None) -> _Node | None:
        """Return the turn with the longest chat that this one begins with, the latest of several."""
        found: _Node | None = None
        for node in self._nodes:
            if node.prompt is None or node.prompt.given_key != given_key or node.turn.finish_reason == "abort":
                continue
            if node.role != role or chat[: len(node.chat)] != node.chat:
                continue
            if found is None or len(node.chat) >= len(found.chat):
                found = node
        return found

    def _extended_by(self, prompt: Prompt, role: str | None) -> _Node | None:
        """Return the turn with the most tokens, of those whose tokens begin the prompt; the latest of several."""
        of_role = [node for node in self._nodes if node.role == role]
        by_tokens = sorted(of_role, key=lambda node: (len(node.turn.sequence.token_ids), node.number), reverse=True)
        for node in by_tokens:
            known = node.turn.sequence.token_ids
            # The tokens of a turn without an answer also begin the prompts of others that answer the same chat.
            is_empty = len(known) == node.turn.sequence.num_prompt_tokens and node.number != prompt.continues
            if node.prompt is not None and not is_empty and prompt.token_ids[: len(known)] == known:
                return node
        return None

    def _fork(self, node: _Node) -> str | None:
        """Return why a turn that joins no sequence begins one."""
        earlier = [o for o in self._nodes[: node.number] if o.prompt is not None and o.role == node.role]
        if node.prompt is None or not earlier:
            return None
        continues = None if node.prompt.continues is None else self._nodes[node.prompt.continues]
        if continues is not None and _num_tokens(node.extended) < _num_tokens(continues):
            return "template"
        if node.extended is not None:
            return "branch"
        asked = node.chat[:-1]
        if any(asked == other.chat[:-1] for other in earlier):
            return "branch"
        shared = max(_num_shared(asked, other.chat) for other in earlier)
        answers = {other.chat[-1] for other in earlier}
        if answers.intersection(asked) or any(role != "system" for role, *_ in asked[:shared]):
            return "history"
        return "separate"


def _num_tokens(node: _Node | None) -> int:
    return 0 if node is None else len(node.turn.sequence.token_ids)


def _joins(node: _Node) -> bool:
    return node.extended is not None and node.extended.next is node


def _row(node: _Node | None) -> Iterable[_Node]:
    while node is not None:
        yield node
        node = node.next


def _joined(nodes: list[_Node]) -> Sequence:
    """Return the sequence of turns that extend one another."""
    sequences = [node.turn.sequence for node in nodes]
    if len(nodes) == 1:
        return _numbered(sequences[0], nodes[0].first_turn)
    first, last = sequences[0], sequences[-1]
    start, num = first.num_prompt_tokens, len(last.token_ids) - first.num_prompt_tokens
    logprobs, mask = np.full(num, np.nan, np.float32), np.zeros(num, np.bool_)
    for s in sequences:
        stretch = slice(s.num_prompt_tokens - start, len(s.token_ids) - start)
        logprobs[stretch] = s.behavior_logprobs
        mask[stretch] = True if s.loss_mask is None else s.loss_mask
    bounds = [
        (s.num_prompt_tokens, len(s.token_ids), node.first_turn) for s, node in zip(sequences, nodes, strict=True)
    ]
    return Sequence(
        prompt=first.prompt,
        response=_response(nodes),
        token_ids=last.token_ids,
        num_prompt_tokens=start,
        finish_reason=last.finish_reason,
        behavior_logprobs=logprobs,
        loss_mask=mask,
        policy_spans=[span for s in sequences for span in s.policy_spans],
        metrics={
            name: value for s in sequences for name, value in s.metrics.items()
        },  # of one name, that of the last turn
        messages=last.messages,
        arrays={TURNS: np.array(bounds, np.int32), **_arrays(sequences)},
    )


def _numbered(sequence: Sequence, first_turn: int) -> Sequence:
    """Return a sequence whose turns, if it is a written chat of several, are numbered in the rollout."""
    if TURNS not in sequence.arrays:
        return sequence
    turns = np.add(sequence.arrays[TURNS], [0, 0, first_turn], dtype=np.int32)
    return replace(sequence, arrays={**sequence.arrays, TURNS: turns})


def _response(nodes: list[_Node]) -> str:
    """Return the text after the first prompt: the answers, and what stands between them."""
    text = nodes[0].turn.response
    for before, node in pairwise(nodes):
        known, prompt = before.turn.sequence, node.turn.sequence.prompt
        text += prompt.removeprefix(known.prompt + known.response) + node.turn.response
    return text


def _arrays(sequences: list[Sequence]) -> dict[str, Array]:
    """Return the arrays of turns as those of their sequence. A token that has no value gets 0 as its reward, NaN as its log-probability."""
    names = sorted({name for s in sequences for name in s.arrays})
    unknown = [name for name in names if name not in PER_TOKEN and name not in PER_TURN]
    if unknown:
        raise RftError(
            "a turn of a chat of several turns has an array that cannot be joined with those of the others",
            value=unknown[0],
            allowed=", ".join((*PER_TOKEN, *PER_TURN)),
            todo="record it with turn.record(…), or ask each question in a chat of its own",
        )
    found: dict[str, Array] = {}
    for name in names:
        if name in PER_TURN:
            if all(name in s.arrays for s in sequences):
                found[name] = np.concatenate([s.arrays[name] for s in sequences])
            continue
        values = np.full(len(sequences[-1].token_ids), np.nan if name == "teacher_logprobs" else 0.0, PER_TOKEN[name])
        values[: sequences[0].num_prompt_tokens] = 0.0
        for s in sequences:
            if name in s.arrays:
                values[s.num_prompt_tokens : len(s.token_ids)] = s.arrays[name][s.num_prompt_tokens :]
        found[name] = values
    return found


def _keys(messages: list[Message]) -> list[_Key]:
    """Return what identifies each message: its role, its content, and further entries, of an answer only its calls.

    Templates strip answers, so the space around an answer does not count.
    """
    return [(str(message["role"]), _text_of(message), _further(message)) for message in messages]


def _text_of(message: Message) -> str:
    content = message.get("content")
    return repr(content.strip() if message["role"] == "assistant" and isinstance(content, str) else content)


def _further(message: Message) -> str:
    if message["role"] == "assistant":
        return repr(calls) if (calls := message.get("tool_calls")) else ""
    entries = [(repr(key), repr(value)) for key, value in message.items() if key not in ("role", "content")]
    return repr(sorted(entries)) if entries else ""


def _num_shared(one: list[_Key], other: list[_Key]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
