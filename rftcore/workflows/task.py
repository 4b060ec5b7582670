"""Objects that workflows and rewards receive: the task, the model, and the turns that it recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Unpack

import xxhash

from rftcore.engines.base import Decoding, Generation, PromptTooLongError
from rftcore.engines.token_reports import context_of_answer
from rftcore.other_models.models import NO_MODELS, OtherModel, OtherModels
from rftcore.tools.chat_template import answer_parser, content_parser
from rftcore.tools.tool import Tool
from rftcore.workflows.chat_encoding import MESSAGES_ALONE, Message, TemplateInput, content_text, copied
from rftcore.workflows.chats import chat_sequence, written_sequence
from rftcore.workflows.limits import NO_LIMITS, Allowance, LimitReachedError, Limits
from rftcore.workflows.prompts import Prompts
from rftcore.workflows.sampling import SamplingChanges, changed
from rftcore.workflows.session import Prompt, Session
from rftcore.workflows.turn import TokenValues, Turn
from rftdata.errors import RftError
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


# A token with this log-probability or more was the only one that the structure of an answer allowed.
_CERTAIN = -1e-6


@dataclass(frozen=True)
class Task:
    """One row of rft.task.

    Attributes:
        prompt: text, or chat messages.
        answer: the right answer as text; None if the source has none.
        metadata: all other columns of the source.
        seed: 31 bits, for environments: equal for all rollouts of a group, another for each group. In an evaluation it depends on the task
            alone.
        rollout_index: place of the rollout in its group, from 0.
    """

    task_id: int
    taskset: str
    task_key: str
    prompt: Any
    answer: str | None
    metadata: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    rollout_index: int = 0

    @property
    def rollout_seed(self) -> int:
        """31 bits, another for each rollout of a group, and the same when a rollout is begun again."""
        return _seed(self.seed, self.rollout_index)

    @classmethod
    def from_row(cls, row: Mapping[str, Any], *seed_of: int) -> Task:
        """Return the task of a row with task_id, taskset, task_key and payload.

        Args:
            seed_of: what the task's seed depends on besides the task.
        """
        payload = row["payload"]
        return cls(
            row["task_id"],
            row["taskset"],
            row["task_key"],
            payload["prompt"],
            payload.get("answer"),
            payload.get("metadata") or {},
            _seed(row["taskset"], row["task_key"], *seed_of),
        )


def _seed(*parts: object) -> int:
    return xxhash.xxh3_64_intdigest(repr(parts).encode()) & 0x7FFFFFFF


@dataclass(frozen=True)
class TokenRewards:
    """Rewards of single tokens, returned by a reward function: one number for each of `turn.response_token_ids`."""

    values: TokenValues


@dataclass(frozen=True)
class Score:
    """A reward and its parts by function.

    Attributes:
        reward: of the rollout: what selectors and evaluations read.
        by_role: rewards of roles, each for the experiences of that role; the others have `reward`.
    """

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    by_role: Mapping[str, float] = field(default_factory=dict)

    def of_role(self, role: str | None) -> float:
        """Return the reward of a role's experiences."""
        return self.reward if role is None else self.by_role.get(role, self.reward)


class Sampler(Protocol):
    """Samples for a model: an engine, or one rollout's view of it."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        """Sample one response; see `Engine.generate`."""


@dataclass(frozen=True)
class _Request:
    """One call of `Model.chat`."""

    messages: list[Message]
    decoding: Decoding
    given: TemplateInput
    parse: Callable[[str], Message] | None
    role: str | None
    train: bool


class Model:
    """The policy as a workflow uses it; every answer is recorded as a turn.

    Messages are copied when a method is called, so the workflow may change its own list at any time.

    Args:
        sampler: an engine, or one rollout's view of it.
        decoding: sampling parameters.
        prompts: renders chats; rollouts of one group share it.
        limits: of the rollout.
        others: models that the workflow may ask besides.
    """

    def __init__(
        self,
        sampler: Sampler,
        decoding: Decoding,
        prompts: Prompts | None = None,
        limits: Limits = NO_LIMITS,
        others: OtherModels = NO_MODELS,
    ) -> None:
        self._sampler = sampler
        self._decoding = decoding
        self._allowance = Allowance(limits)
        self._others = others
        self._session = Session(prompts)
        self._open: set[asyncio.Task[Generation]] = set()
        self._begun: set[asyncio.Future[None]] = set()

    @property
    def turns(self) -> list[Turn]:
        """The answers so far."""
        return self._session.turns

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self._sampler.tokenizer

    @property
    def stop_reason(self) -> str | None:
        """The limit that was reached, one of `STOP_REASONS`; None while there is none."""
        return self._allowance.stop_reason

    def other(self, name: str) -> OtherModel:
        """Return a model of `explorer.models`, which is not trained: `await model.other("judge").chat(messages)` is its answer, a text.

        Raises:
            ConfigError: there is none of this name.
        """
        return self._others[name]

    def sequences(self) -> list[Sequence]:
        """Return what is stored of the turns so far: a sequence for each branch of their chats."""
        return self._session.sequences()

    def chat(
        self,
        messages: list[Message],
        *,
        tools: Iterable[Tool | dict[str, Any]] | None = None,
        parse: Callable[[str], Message] | None = None,
        template_args: Mapping[str, Any] | None = None,
        role: str | None = None,
        train: bool = True,
        **sampling: Unpack[SamplingChanges],
    ) -> Coroutine[Any, Any, Turn]:
        """Answer a chat, rendered with the model's chat template; without one, the contents are concatenated.

        A chat that continues an earlier one is not rendered again: its prompt is the tokens of that turn, as they were sampled, and those of
        the new messages (`rftcore.workflows.session`).

        Args:
            tools: tools that the answer may call, or their JSON schemas, for the chat template. `turn.tool_calls` are the calls.
            parse: returns the answer as a message, with calls of tools apart from the content; by default in the format of the chat template
                if there are tools, and otherwise without the thoughts if the template keeps them apart, as those of gpt-oss and Gemma 4 do.
            template_args: further variables of the chat template, such as `enable_thinking`.
            role: the role in which the policy answers, such as a player of a game. Each role has chats and experiences of its own.
            train: False stores the answer with the loss mask 0, such as that of a simulated user.
            sampling: changes of the sampling parameters, see `SamplingChanges`.

        Raises:
            LimitReachedError: the rollout has no turns, tokens or time left, or the chat has no room in the context.
            RftError: a parameter is not valid, or the prompt does not fit into the context and the rollout has no answer.
            ConfigError: the chat template cannot carry tools.
        """
        given = MESSAGES_ALONE
        schemas = [tool.schema if isinstance(tool, Tool) else tool for tool in tools or ()]
        if schemas or template_args:
            given = TemplateInput(copied(schemas) or None, copied([dict(template_args or {})])[0])
        if parse is None:
            parse = answer_parser(self.tokenizer, schemas=schemas) if schemas else content_parser(self.tokenizer)
        return self._chat(_Request(copied(messages), changed(self._decoding, sampling), given, parse, role, train))

    async def chats(self, messages: list[Message], n: int, **options: Any) -> list[Turn]:
        """Answer a chat n times, each a branch of its own; options as for `chat`.

        Raises:
            LimitReachedError: a limit allows fewer answers. Those that have begun are finished before, and kept as turns.
            RftError: see `chat`; of several errors, that of the first answer.
        """
        if n < 1:
            raise RftError("model.chats needs a number of answers", value=n, allowed="1 or more")
        loop = asyncio.get_running_loop()
        requests = [
            loop.create_task(self.chat(messages, **options), context=context_of_answer(number)) for number in range(n)
        ]
        try:
            return await asyncio.gather(*requests)
        except LimitReachedError:
            await asyncio.wait(requests)
            raise
        finally:
            for request in requests:
                request.cancel()

    def stop(self, reason: str, what: str) -> bool:
        """End the rollout by a limit: open requests raise it, and so does every later one; return whether an open request was ended.

        Without a finished answer nothing is ended, because there would be nothing to keep.
        """
        if not self._open or not self._session.has_sampled:
            return False
        self._allowance.reached = LimitReachedError(reason, what)
        for generation in self._open:
            generation.cancel()
        return True

    async def finish_open(self) -> None:
        """Wait for the requests that a workflow has left open."""
        while self._begun:
            await asyncio.wait(self._begun)

    async def _chat(self, request: _Request) -> Turn:
        ended = asyncio.get_running_loop().create_future()
        self._begun.add(ended)
        try:
            return await self._answered(request)
        except PromptTooLongError as error:
            self._begun.discard(ended)
            if not self._session.has_sampled:
                await self.finish_open()
            if not self._session.has_sampled:
                raise
            raise self._allowance.fill_chat(error.what) from error
        finally:
            self._begun.discard(ended)
            ended.set_result(None)

    async def _answered(self, request: _Request) -> Turn:
        max_tokens = await self._allowance.begin_turn(request.decoding.max_tokens)
        num_sampled, is_refused = 0, False
        try:
            prompt = self._session.prompt(self._sampler.tokenizer, request.messages, request.given, request.role)
            generation = await self._generation(prompt.token_ids, replace(request.decoding, max_tokens=max_tokens))
            num_sampled = len(generation.token_ids)
        except Exception:
            is_refused = True
            raise
        finally:
            self._allowance.end_turn(max_tokens, num_sampled, is_refused=is_refused)
        return self._session.add(_turn(request, prompt, generation), prompt)

    async def _generation(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        generation = asyncio.ensure_future(self._sampler.generate(prompt_token_ids, decoding))
        self._open.add(generation)
        try:
            return await generation
        except asyncio.CancelledError:
            task, reached = asyncio.current_task(), self._allowance.reached
            if reached is not None and generation.cancelled() and not (task is not None and task.cancelling()):
                raise reached from None
            generation.cancel()
            raise
        finally:
            self._open.discard(generation)

    def write(self, messages: list[Message], response: str, *, role: str | None = None) -> Turn:
        """Record an answer from another source (a demonstration), see `written_sequence`.

        Args:
            role: as in `chat`.

        Raises:
            ModelError: neither template nor tokenizer has an end token.
        """
        sequence = replace(written_sequence(self._sampler.tokenizer, copied(messages), response), role=role)
        return self._session.add(Turn(copied(messages), response, "stop", sequence))

    def write_chat(self, messages: list[Message], *, start: int = 0, turns: str = "all") -> Turn:
        """Record a chat with given answers (a demonstration), see `chat_sequence`, each of them a turn. What is returned has the last answer.

        Raises:
            ConfigError: the chat template does not fit the chat.
        """
        sequence = chat_sequence(self._sampler.tokenizer, copied(messages), start=start, turns=turns)
        *before, last = copied(sequence.messages or [])
        return self._session.add(Turn(before, content_text(last), "stop", sequence))


def _turn(request: _Request, prompt: Prompt, generation: Generation) -> Turn:
    num_prompt = len(prompt.token_ids)
    turn = Turn(
        copied(request.messages),
        generation.text,
        generation.finish_reason,
        Sequence(
            prompt=prompt.text,
            response=generation.text,
            token_ids=prompt.token_ids + generation.token_ids,
            num_prompt_tokens=num_prompt,
            finish_reason=generation.finish_reason,
            behavior_logprobs=generation.logprobs,
            loss_mask=_loss_mask(request, generation),
            policy_spans=[(num_prompt + start, version) for start, version in generation.version_spans],
            role=request.role,
        ),
        None if request.parse is None else request.parse(generation.text),
    )
    turn.sequence.messages = [*request.messages, turn.message]
    return turn


def _loss_mask(request: _Request, generation: Generation) -> list[bool] | None:
    if not request.train:
        return [False] * len(generation.token_ids)
    return None if request.decoding.structure is None else _choices(generation.logprobs)


def _choices(logprobs: list[float]) -> list[bool] | None:
    """Return which tokens of a structured answer the policy chose: where only one was allowed, it had no choice to learn from."""
    chosen = [logprob < _CERTAIN for logprob in logprobs]
    return None if all(chosen) else chosen


Scorer = Callable[[Turn, Task], Coroutine[Any, Any, Score]]
AsyncWorkflow = Callable[..., Awaitable[Score]]
PlainWorkflow = Callable[..., Score]
Workflow = AsyncWorkflow | PlainWorkflow
