"""What stages that ask a model share: their arguments, questions with answers that are read, a memory of both.

A question goes to the endpoint once per process, whoever asks it (`Asker` remembers). An answer that cannot be read is asked
for once more, with what was wrong with it; after that it is an error of the row. Answers with errors are not remembered.
"""

from __future__ import annotations

import hashlib
import json
import os
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
from rftdata.errors import ConfigError

_REMEMBERED = 100_000
OF_EXPERIENCES = frozenset({"messages", "source"})
"""Columns that batches of tasks do not have, and that a stage does without there."""


class AskingConfig(StageConfig):
    """Arguments of every stage that asks.

    `endpoint`: `policy` (the run's own model), or a server by the keys below; `budget`: the most it may spend in a run,
    across restarts and workers, by the keys below; `max_tokens`: longest answer; `temperature`: 0 takes the likeliest token; `seed`: of
    the sampling (a policy takes none).
    """

    endpoint: AnyEndpoint
    budget: Budget = Field(default_factory=BudgetConfig)
    max_tokens: int = Field(default=512, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    seed: int | None = 0


class MalformedAnswer(ValueError):
    """An answer that cannot be read; says what is wrong with it."""


@dataclass(frozen=True)
class Question:
    """A chat, and how its answer is read.

    Attributes:
        read: the value in an answer's text; raises `MalformedAnswer`.
    """

    chat: Chat
    read: Callable[[str], Any]

    @property
    def key(self) -> bytes:
        """The same for the same question."""
        text = json.dumps([list(self.chat.messages), self.chat.schema], sort_keys=True)
        return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True)
class Answer:
    """What was read, or why there is nothing."""

    value: Any = None
    error: str | None = None


class Asker:
    """Questions to an endpoint; for several threads.

    Args:
        endpoint: answers.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._answers: dict[bytes, Future[Answer]] = {}
        self._lock = threading.Lock()

    def ask(self, questions: Sequence[Question], of: str = "") -> list[Answer]:
        """An answer per question, in order.

        Args:
            of: names the weights that answer, where they change: what others answered is not remembered for them.
        """
        keys = [question.key + of.encode() for question in questions]
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
            found = self._answers_to(list(mine.values()))
        except BaseException as error:
            self._forget(mine)
            for key in mine:
                waited[key].set_exception(error)
            raise
        self._forget([key for key, answer in zip(mine, found, strict=True) if answer.error is not None])
        for key, answer in zip(mine, found, strict=True):
            waited[key].set_result(answer)
        return [waited[key].result() for key in keys]

    def close(self) -> None:
        """Close the endpoint."""
        self._endpoint.close()

    def _forget(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._answers.pop(key, None)
            surplus = len(self._answers) - _REMEMBERED
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
        shown = " ".join(reply.text.split())[:200]
        return Answer(error=f"malformed answer: {error}{cut}: {shown!r}")


def _once_more(chat: Chat, text: str, problem: str | None) -> Chat:
    complaint = f"This cannot be read ({(problem or '').partition(': ')[2][:80]}). Answer again, in the form asked for and with nothing else."
    return Chat(
        [*chat.messages, {"role": "assistant", "content": text}, {"role": "user", "content": complaint}], chat.schema
    )


def without_thoughts(text: str) -> str:
    """A text without what a reasoning model thought before it answered."""
    return re.sub(r"<think>.*?(</think>|\Z)", "", text, flags=re.DOTALL).strip()


def json_object(text: str, key: str) -> dict[str, Any] | None:
    """The JSON object that a text is or ends with, where it has `key`; None otherwise.

    An object with other words after it may be one that the answer speaks of, and one inside another is a part of it.
    """
    decoder = json.JSONDecoder()
    end = len(text.rstrip("`*. \t\r\n"))  # a code fence, or a point, may close the answer
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
    """A number, or a text that is one; None for all else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None


def chat(system: str | None, user: str, schema: Mapping[str, Any] | None = None) -> Chat:
    """A chat of one question."""
    messages = [{"role": "system", "content": system}] if system else []
    return Chat([*messages, {"role": "user", "content": user}], schema)


class AskingOperator(Operator):
    """A stage that asks a model; `ask` works between `prepare` and `close`.

    Attributes:
        counted_as: what its spending is counted under, below its name in the chain and unless the budget has a name.
    """

    # Each of its calls has a limit of its own (`endpoint.timeout_s`); this is for what would still not end.
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
        """An answer per question."""
        assert self._asker is not None, "prepare() comes first"
        return self._asker.ask(questions, self.depends_on() or "")

    def depends_on(self) -> str | None:
        """The run's model and its weights, where that is asked: it learns."""
        if self.config.endpoint != "policy":
            return ""
        context = self._context
        if context is None or context.policy_version is None:
            return None
        return f"{context.model_path}@{context.policy_version()}"

    def spec(self) -> dict[str, Any]:
        """Without what only says how calls are made, and without the budget: neither changes a score."""
        spec: dict[str, Any] = self.config.model_dump(mode="json", exclude={"budget", "endpoint"})
        endpoint = self.config.endpoint
        return {**spec, "endpoint": endpoint.identity() if hasattr(endpoint, "identity") else endpoint}


def open_endpoint(
    config: EndpointConfig | Literal["policy"], context: StageContext, sampling: Sampling, meter: Meter
) -> Endpoint:
    """Open what a stage asks.

    Raises:
        ConfigError: no policy here, or the variable with the key is not set.
        PluginError: the HTTP client is not installed.
    """
    if config == "policy":
        return PolicyEndpoint(context, sampling, meter)
    key = None
    if config.api_key_env is not None:
        key = os.environ.get(config.api_key_env)
        if not key:
            raise ConfigError(
                f"the environment variable {config.api_key_env}, which endpoint.api_key_env names, is not set",
                todo=f"export {config.api_key_env}=… for the process that runs the pipeline",
            )
    from operators.llm.openai import OpenAIEndpoint

    return OpenAIEndpoint(config, key, sampling, meter)
