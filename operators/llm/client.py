"""The base of stages that ask a model: their arguments, questions with parsed answers, and a cache of both.

A question goes to the endpoint once per process, whichever stage asks it (`Asker` caches it). An answer that cannot be parsed is asked
for a second time, with the problem; after that it is an error of the row. Answers with errors are not cached.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field

from operators.base import Operator, StageConfig, StageContext
from operators.llm.endpoint import (
    AnyEndpoint,
    Budget,
    BudgetConfig,
    Chat,
    Endpoint,
    EndpointConfig,
    Meter,
    PolicyEndpoint,
    Reply,
    Sampling,
)

_MAX_CACHED = 100_000
OF_EXPERIENCES = frozenset({"messages", "source"})
"""Columns that batches of tasks lack; a stage does without them there."""


class AskingConfig(StageConfig):
    """Arguments of every stage that asks a model.

    `endpoint`: `policy` (the run's own model), or a server by the keys below; `budget`: the most it may spend in a run,
    across restarts and workers, by the keys below; `max_tokens`: longest answer; `temperature`: 0 takes the likeliest token; `seed`:
    seed of the sampling (a policy takes none).
    """

    endpoint: AnyEndpoint
    budget: Budget = Field(default_factory=BudgetConfig)
    max_tokens: int = Field(default=512, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    seed: int | None = 0


class MalformedAnswer(ValueError):
    """An answer that cannot be parsed; the message is the problem."""


@dataclass(frozen=True)
class Question:
    """A chat, and the parser of its answer.

    Attributes:
        read: parses an answer's text into its value; raises `MalformedAnswer`.
    """

    chat: Chat
    read: Callable[[str], Any]

    @property
    def key(self) -> bytes:
        """A digest that is equal for equal questions."""
        text = json.dumps([list(self.chat.messages), self.chat.schema], sort_keys=True)
        return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True)
class Answer:
    """A parsed value, or the reason why there is none."""

    value: Any = None
    error: str | None = None


class Asker:
    """Asks questions to an endpoint and caches the answers; thread-safe.

    Args:
        endpoint: the model to ask.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._answers: dict[bytes, Future[Answer]] = {}
        self._lock = threading.Lock()

    def ask(self, questions: Sequence[Question], weights: str = "") -> list[Answer]:
        """Return an answer per question, in order.

        Args:
            weights: name of the current weights, if they change. The cache does not mix answers of different weights.
        """
        keys = [question.key + weights.encode() for question in questions]
        waited: dict[bytes, Future[Answer]] = {}
        mine: dict[bytes, Question] = {}
        with self._lock:
            for key, question in zip(keys, questions, strict=True):
                if key not in waited:
                    if key not in self._answers:
                        mine[key] = question
                        self._answers[key] = Future()
                    waited[key] = self._answers[key]
        try:
            answers = self._answers_to(list(mine.values()))
        except BaseException as error:
            self._forget(mine)
            for key in mine:
                waited[key].set_exception(error)
            raise
        self._forget([key for key, answer in zip(mine, answers, strict=True) if answer.error is not None])
        for key, answer in zip(mine, answers, strict=True):
            waited[key].set_result(answer)
        return [waited[key].result() for key in keys]

    def close(self) -> None:
        """Close the endpoint."""
        self._endpoint.close()

    def _forget(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._answers.pop(key, None)
            surplus = len(self._answers) - _MAX_CACHED
            done = [key for key, future in self._answers.items() if future.done()][: max(0, surplus)]
            for key in done:
                del self._answers[key]

    def _answers_to(self, questions: Sequence[Question]) -> list[Answer]:
        if not questions:
            return []
        replies = self._endpoint.ask([question.chat for question in questions])
        answers = [_read(question, reply) for question, reply in zip(questions, replies, strict=True)]
        again = [
            place for place, answer in enumerate(answers) if answer.error is not None and replies[place].error is None
        ]
        if again:
            second = self._endpoint.ask(
                [_once_more(questions[place].chat, replies[place].text, answers[place].error) for place in again]
            )
            for place, reply in zip(again, second, strict=True):
                answer = _read(questions[place], reply)
                answers[place] = answer if reply.error is None else answers[place]
        return answers


def _read(question: Question, reply: Reply) -> Answer:
    if reply.error is not None:
        return Answer(error=reply.error)
    try:
        return Answer(question.read(without_thoughts(reply.text)))
    except MalformedAnswer as error:
        cut = ", and it was cut off at max_tokens" if reply.cut_off else ""
        excerpt = " ".join(reply.text.split())[:200]
        return Answer(error=f"malformed answer: {error}{cut}: {excerpt!r}")


def _once_more(chat: Chat, text: str, problem: str | None) -> Chat:
    complaint = f"This cannot be read ({(problem or '').partition(': ')[2][:80]}). Answer again, in the form asked for and with nothing else."
    return Chat(
        [*chat.messages, {"role": "assistant", "content": text}, {"role": "user", "content": complaint}], chat.schema
    )


def without_thoughts(text: str) -> str:
    """Return a text without the thoughts of a reasoning model."""
    return re.sub(r"<think>.*?(</think>|\Z)", "", text, flags=re.DOTALL).strip()


def json_object(text: str, key: str) -> dict[str, Any] | None:
    """Return the JSON object that a text is or ends with, if it has `key`; None otherwise.

    An object followed by other words may be a quotation, and one inside another is a part of it; both are ignored.
    """
    decoder = json.JSONDecoder()
    end = len(text.rstrip("`*. \t\r\n"))  # the answer may end with a code fence or a full stop
    place = text.find("{")
    while place >= 0:
        try:
            value, after = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            after = place + 1
        else:
            if after >= end:
                return value if key in value else None
        place = text.find("{", after)
    return None


def finite(value: object) -> float | None:
    """Return a number, also from a text; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None


def chat(system: str | None, user: str, schema: Mapping[str, Any] | None = None) -> Chat:
    """Return a chat of one question."""
    messages = [{"role": "system", "content": system}] if system else []
    return Chat([*messages, {"role": "user", "content": user}], schema)


class AskingOperator(Operator):
    """A stage that asks a model; `ask` may be called between `prepare` and `close`.

    Attributes:
        counted_as: name (after the stage's) under which its spending is counted, unless the budget has a name.
    """

    # Each call has its own limit (`endpoint.timeout_s`); this is a limit for calls that do not respect it.
    seconds_per_row = 60.0
    prepare_timeout_s = None  # a judge may be loaded in this process
    counted_as = ""
    _asker: Asker | None = None
    _context: StageContext | None = None

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        self.reads = (self.reads or frozenset()) - (OF_EXPERIENCES - set(schema.names))
        return super().validate_schema(schema)

    def prepare(self, context: StageContext) -> None:
        self._context = context
        if self._asker is None and self.config.endpoint is not None:
            sampling = Sampling(self.config.max_tokens, self.config.temperature, self.config.seed)
            name = f"{self.place.name}/{self.counted_as}"
            meter = Meter(name, self.config.budget, context.usage, self.config.max_tokens)
            self._asker = Asker(open_endpoint(self.config.endpoint, context, sampling, meter))

    def close(self) -> None:
        if self._asker is not None:
            self._asker.close()
            self._asker = None

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """Return an answer per question."""
        assert self._asker is not None, "call prepare() first"
        return self._asker.ask(questions, self.depends_on() or "")

    def depends_on(self) -> str | None:
        """Return the run's model and its current weights if they answer, since they change."""
        if self.config.endpoint != "policy":
            return ""
        context = self._context
        if context is None or context.policy_version is None:
            return None
        return f"{context.model_path}@{context.policy_version()}"

    def spec(self) -> dict[str, Any]:
        """Return the arguments without the budget and the way calls are made, since neither changes a score."""
        spec: dict[str, Any] = self.config.model_dump(mode="json", exclude={"budget", "endpoint"})
        endpoint = self.config.endpoint
        return {**spec, "endpoint": endpoint.identity() if hasattr(endpoint, "identity") else endpoint}


def open_endpoint(
    config: EndpointConfig | Literal["policy"], context: StageContext, sampling: Sampling, meter: Meter
) -> Endpoint:
    """Open the endpoint that a stage asks.

    Raises:
        ConfigError: there is no policy, or the variable with the key is not set.
        PluginError: the HTTP client is not installed.
    """
    if config == "policy":
        return PolicyEndpoint(context, sampling, meter)
    from operators.llm.openai import OpenAIEndpoint

    return OpenAIEndpoint(config, sampling, meter)
