"""Objects that workflows and rewards receive: the task, the model, and the turns that it recorded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rftcore.engines.base import Decoding, Generation
from rftcore.workflows import inputs
from rftcore.workflows.chats import Message, chat_sequence, content_text, render_chat, written_sequence
from rftdata.experience import Array, Sequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenValues = list[float] | Array


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
class Turn:
    """One answer of the model.

    Attributes:
        messages: the chat before the answer.
        response: text without the special tokens that begin, end or fill a text; those that mark the calls of tools are in it.
        finish_reason: stop, length or abort.
        sequence: the part that is stored and trained on.
    """

    messages: list[Message]
    response: str
    finish_reason: str
    sequence: Sequence

    @property
    def response_token_ids(self) -> list[int]:
        """The tokens of the answer, with the end token if there is one."""
        return [int(token) for token in self.sequence.token_ids[self.sequence.num_prompt_tokens :]]

    def record(
        self,
        *,
        state: str | bytes | int | None = None,
        step_reward: float | None = None,
        token_rewards: TokenValues | None = None,
        teacher_logprobs: TokenValues | None = None,
    ) -> None:
        """Store inputs of algorithms with the turn, see `rftcore.workflows.inputs`; a repeated input replaces the earlier value.

        Args:
            state: state of the environment before the turn. Equal states are recognised by their hash, which is stored.
            step_reward: reward of the turn alone. The rollout's reward is not changed.
            token_rewards: one value per token of the response, in addition to the rollout's reward.
            teacher_logprobs: one value per token of the response, nats.

        Raises:
            RftError: a value of another type, or not one value per token.
        """
        num_prompt = self.sequence.num_prompt_tokens
        num_response = len(self.sequence.token_ids) - num_prompt
        arrays: dict[str, Array] = {}
        if state is not None:
            arrays["state_hash"] = inputs.state_hash(state)
        if step_reward is not None:
            arrays["step_reward"] = inputs.step_reward(step_reward)
        for name, values in (("token_rewards", token_rewards), ("teacher_logprobs", teacher_logprobs)):
            if values is not None:
                arrays[name] = inputs.token_array(name, values, num_prompt, num_response)
        self.sequence.arrays = {**self.sequence.arrays, **arrays}


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

    Args:
        sampler: an engine, or one rollout's view of it.
        decoding: sampling parameters.
    """

    def __init__(self, sampler: Sampler, decoding: Decoding) -> None:
        self._sampler = sampler
        self._decoding = decoding
        self.turns: list[Turn] = []

    async def chat(self, messages: list[Message]) -> Turn:
        """Answer a chat, rendered with the model's chat template; without one, the contents are concatenated."""
        text, prompt_ids = render_chat(self._sampler.tokenizer, messages)
        generation = await self._sampler.generate(prompt_ids, self._decoding)
        sequence = Sequence(
            prompt=text,
            response=generation.text,
            token_ids=prompt_ids + generation.token_ids,
            num_prompt_tokens=len(prompt_ids),
            finish_reason=generation.finish_reason,
            behavior_logprobs=generation.logprobs,
            policy_spans=[(len(prompt_ids) + start, version) for start, version in generation.version_spans],
            messages=[*messages, {"role": "assistant", "content": generation.text}],
        )
        return self._record(Turn(messages, generation.text, generation.finish_reason, sequence))

    def write(self, messages: list[Message], response: str) -> Turn:
        """Record an answer from another source (a demonstration), see `written_sequence`.

        Raises:
            ModelError: neither template nor tokenizer has an end token.
        """
        return self._record(
            Turn(messages, response, "stop", written_sequence(self._sampler.tokenizer, messages, response))
        )

    def write_chat(self, messages: list[Message], *, start: int = 0, turns: str = "all") -> Turn:
        """Record a chat with given answers (a demonstration), see `chat_sequence`. The turn's answer is the last one.

        Raises:
            ConfigError: the chat template does not fit the chat.
        """
        sequence = chat_sequence(self._sampler.tokenizer, messages, start=start, turns=turns)
        *before, last = sequence.messages or []
        return self._record(Turn(before, content_text(last), "stop", sequence))

    def _record(self, turn: Turn) -> Turn:
        self.turns.append(turn)
        return turn


Scorer = Callable[[Turn, Task], Coroutine[Any, Any, Score]]
AsyncWorkflow = Callable[..., Awaitable[Score]]
PlainWorkflow = Callable[..., Score]
Workflow = AsyncWorkflow | PlainWorkflow
