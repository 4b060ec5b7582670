"""Objects that workflows and rewards receive: the task, the model, and the turns that it recorded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rftcore.engines.base import Decoding, Generation
from rftcore.workflows.chat_encoding import Message, Prompts, content_text, copied
from rftcore.workflows.chats import chat_sequence, written_sequence
from rftcore.workflows.session import Session
from rftcore.workflows.turn import TokenValues, Turn
from rftdata.experience import Sequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Model",
    "PlainWorkflow",
    "AsyncWorkflow",
    "Sampler",
    "Score",
    "Scorer",
    "Task",
    "TokenRewards",
    "Turn",
    "Workflow",
]


@dataclass(frozen=True)
class Task:
    """One row of rft.task.

    Attributes:
        prompt: text, or chat messages.
        answer: the right answer as text; None if the source has none.
        metadata: all other columns of the source.
    """

    task_id: int
    taskset: str
    task_key: str
    prompt: Any
    answer: str | None
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Task:
        """Return the task of a row with task_id, taskset, task_key and payload."""
        payload = row["payload"]
        return cls(
            row["task_id"],
            row["taskset"],
            row["task_key"],
            payload["prompt"],
            payload.get("answer"),
            payload.get("metadata") or {},
        )


@dataclass(frozen=True)
class TokenRewards:
    """Rewards of single tokens, returned by a reward function: one number for each of `turn.response_token_ids`."""

    values: TokenValues


@dataclass(frozen=True)
class Score:
    """A reward and its parts by function."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)


class Sampler(Protocol):
    """Samples for a model: an engine, or one rollout's view of it."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        """Sample one response; see `Engine.generate`."""


class Model:
    """The policy as a workflow uses it; every answer is recorded as a turn.

    Messages are copied when a method is called, so the workflow may change its own list at any time.

    Args:
        sampler: an engine, or one rollout's view of it.
        decoding: sampling parameters.
        prompts: renders chats; rollouts of one group share it.
    """

    def __init__(self, sampler: Sampler, decoding: Decoding, prompts: Prompts | None = None) -> None:
        self._sampler = sampler
        self._decoding = decoding
        self._session = Session(prompts)

    @property
    def turns(self) -> list[Turn]:
        """The answers so far."""
        return self._session.turns

    def sequences(self) -> list[Sequence]:
        """Return what is stored of the turns so far: a sequence for each branch of their chats."""
        return self._session.sequences()

    def chat(self, messages: list[Message]) -> Coroutine[Any, Any, Turn]:
        """Answer a chat, rendered with the model's chat template; without one, the contents are concatenated.

        A chat that continues an earlier one is not rendered again: its prompt is the tokens of that turn, as they were sampled, and those of
        the new messages (`rftcore.workflows.session`).
        """
        return self._chat(copied(messages))

    async def _chat(self, messages: list[Message]) -> Turn:
        prompt = self._session.prompt(self._sampler.tokenizer, messages)
        generation = await self._sampler.generate(prompt.token_ids, self._decoding)
        num_prompt = len(prompt.token_ids)
        sequence = Sequence(
            prompt=prompt.text,
            response=generation.text,
            token_ids=prompt.token_ids + generation.token_ids,
            num_prompt_tokens=num_prompt,
            finish_reason=generation.finish_reason,
            behavior_logprobs=generation.logprobs,
            policy_spans=[(num_prompt + start, version) for start, version in generation.version_spans],
            messages=[*messages, {"role": "assistant", "content": generation.text}],
        )
        return self._session.add(Turn(copied(messages), generation.text, generation.finish_reason, sequence), prompt)

    def write(self, messages: list[Message], response: str) -> Turn:
        """Record an answer from another source (a demonstration), see `written_sequence`.

        Raises:
            ModelError: neither template nor tokenizer has an end token.
        """
        sequence = written_sequence(self._sampler.tokenizer, copied(messages), response)
        return self._session.add(Turn(copied(messages), response, "stop", sequence))

    def write_chat(self, messages: list[Message], *, start: int = 0, turns: str = "all") -> Turn:
        """Record a chat with given answers (a demonstration), see `chat_sequence`. The turn's answer is the last one.

        Raises:
            ConfigError: the chat template does not fit the chat.
        """
        sequence = chat_sequence(self._sampler.tokenizer, copied(messages), start=start, turns=turns)
        *before, last = copied(sequence.messages or [])
        return self._session.add(Turn(before, content_text(last), "stop", sequence))


Scorer = Callable[[Turn, Task], Coroutine[Any, Any, Score]]
AsyncWorkflow = Callable[..., Awaitable[Score]]
PlainWorkflow = Callable[..., Score]
Workflow = AsyncWorkflow | PlainWorkflow
