"""Models to ask: an OpenAI-compatible server, or the run's own policy.

Both return a reply for each of a list of chats, in order. A failed call is a reply with an error, never an exception; the stage decides
what it means for a row. Calls run concurrently, temporary failures are retried, and no request is sent that the budget does not allow.

Secrets: the configuration names an environment variable (`api_key_env`). Its value is read when the endpoint is opened. It is in
no configuration, specification or log, and is removed from a server's messages about failed calls.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator, model_validator

from operators.base import Messages, StageConfig, StageContext, check_plain
from rftdata.config_errors import parse_section
from rftdata.errors import ConfigError
from rftdata.pipeline.budget import Limits, Usage, UsageLedger

_CHARACTERS_PER_TOKEN = 3
"""Less than the average of tokenizers for most texts, so that token counts are overestimated rather than underestimated."""


@dataclass(frozen=True)
class Chat:
    """A request: messages up to a user's, and the JSON schema that the answer should have."""

    messages: Messages
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Reply:
    """The response to a chat: a text, or the reason why there is none.

    Attributes:
        over_budget: whether it was not asked because the budget allows no further call.
    """

    text: str = ""
    error: str | None = None
    cut_off: bool = False
    over_budget: bool = False


@dataclass(frozen=True)
class Sampling:
    """Settings with which an answer is sampled; `temperature` 0 and a seed make it repeatable if the server respects them."""

    max_tokens: int
    temperature: float
    seed: int | None


class Endpoint(Protocol):
    """A model that answers chats."""

    def ask(self, chats: Sequence[Chat]) -> list[Reply]:
        """Return a reply per chat."""

    def close(self) -> None:
        """Close connections."""


class EndpointConfig(StageConfig):
    """An OpenAI-compatible server.

    `url`: up to and including `/v1`; `model`: its name there; `api_key_env`: environment variable with the key; `name`: replaces url and
    model in the pipeline's version and the keys of scores, so that the same judge may move to another address; `concurrency`:
    concurrent requests; `timeout_s`: time limit of one request; `retries`: retries after a 408, 409, 425, 429, 5xx, a time-out or
    a broken connection; `backoff_s`: pause before the first retry, doubled each time; `max_wait_s`: longest pause, also
    when the server asks for a longer one; `structured`: send the JSON schema of the answer, `auto` stops at the first refusal;
    `extra`: further keys of the request, such as `top_p`.
    """

    url: str
    model: str = Field(min_length=1)
    api_key_env: str | None = None
    name: str | None = None
    concurrency: int = Field(default=16, ge=1, le=1024)
    timeout_s: float = Field(default=60.0, gt=0)
    retries: int = Field(default=4, ge=0, le=20)
    backoff_s: float = Field(default=0.5, gt=0)
    max_wait_s: float = Field(default=60.0, gt=0)
    structured: Literal["auto", "always", "never"] = "auto"
    extra: dict[str, Any] = Field(default_factory=dict)

    @field_validator("url")
    @classmethod
    def _plain_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.username or parts.password or parts.query:
            # Without the value: it may be a secret.
            raise ConfigError(
                "endpoint.url has a user, a password or a query in it",
                allowed="scheme, host, port and path",
                todo="put the key into an environment variable and name that in endpoint.api_key_env",
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("it is not an http:// or https:// address")
        return url.rstrip("/").removesuffix("/chat/completions")

    @field_validator("api_key_env")
    @classmethod
    def _name_of_a_variable(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(  # without the value: it may be the key itself
                "endpoint.api_key_env is not the name of an environment variable",
                todo="export the key in a variable and write the variable's name",
            )
        return name

    @field_validator("extra")
    @classmethod
    def _leaves_ours_alone(cls, extra: dict[str, Any]) -> dict[str, Any]:
        # max_tokens, too, because the budget reserves the stage's own value.
        ours = sorted({"model", "messages", "stream", "n", "response_format", "max_tokens"} & extra.keys())
        if ours:
            raise ValueError(f"{ours[0]!r} is set by the stage itself")
        check_plain(extra)
        return extra

    def identity(self) -> dict[str, Any]:
        """Return what determines its answers, for the specification of a stage: no call settings and no secrets."""
        where = {"name": self.name} if self.name else {"url": self.url, "model": self.model}
        return {**where, "structured": self.structured, "extra": self.extra}


class BudgetConfig(StageConfig):
    """The most that a stage may spend in a run, across restarts and workers.

    `max_calls`: requests, including retries; `max_tokens`: tokens of prompts and answers; `max_cost`: cost by `prompt_price` and
    `response_price`, both per million tokens; `name`: stages with the same name share one budget, others are counted under
    their own name in the pipeline (`llm_judge#2`).
    """

    max_calls: int | None = Field(default=None, ge=0)
    max_tokens: int | None = Field(default=None, ge=0)
    max_cost: float | None = Field(default=None, ge=0)
    prompt_price: float = Field(default=0.0, ge=0, description="Price of a million prompt tokens.")
    response_price: float = Field(default=0.0, ge=0, description="Price of a million answer tokens.")
    name: str | None = None

    @model_validator(mode="after")
    def _cost_needs_prices(self) -> BudgetConfig:
        if self.max_cost is not None and not (self.prompt_price or self.response_price):
            raise ValueError("max_cost needs prompt_price or response_price")
        return self

    def cost(self, prompt_tokens: int, response_tokens: int) -> float:
        """Return the cost of one call."""
        return (prompt_tokens * self.prompt_price + response_tokens * self.response_price) / 1e6

    def most(self, chat: Chat, max_tokens: int) -> Usage:
        """Return the most that a call may use, which it reserves."""
        tokens = estimated_tokens(chat)
        return Usage(1, tokens + max_tokens, self.cost(tokens, max_tokens))

    def check_allows(self, chat: Chat, max_tokens: int) -> None:
        """Refuse limits that are too small for any call, even for this one with empty placeholders.

        Raises:
            ConfigError: every call would be refused.
        """
        call = self.most(chat, max_tokens)
        for key, limit, takes in (("max_tokens", self.max_tokens, call.tokens), ("max_cost", self.max_cost, call.cost)):
            if limit is not None and limit < takes:
                raise ConfigError(
                    f"budget.{key} allows no call: each reserves the most it may use, {takes:.10g} even with empty placeholders"
                    f" ({call.tokens - max_tokens} tokens of the prompt, max_tokens {max_tokens} of the answer)",
                    value=limit,
                    todo=f"raise budget.{key}, or lower the stage's max_tokens",
                )


def _policy_or_server(value: object) -> object:
    if isinstance(value, str) and value != "policy":
        raise ConfigError(  # a value that is not a plain word is not repeated, since an address may contain a password
            "endpoint is not a model to ask",
            value=value if value.isidentifier() else None,
            allowed="policy, or a mapping with url and model",
            todo="write policy for the run's own model",
        )
    return value


def _nested(key: str, config_class: type[StageConfig]) -> BeforeValidator:
    """Return a validator for a mapping inside a stage's arguments, with the same error messages as the arguments themselves."""

    def validate(value: object) -> object:
        if isinstance(value, str | config_class):
            return value
        try:
            return parse_section(config_class, value)
        except ConfigError as error:
            raise ConfigError(
                f"{key}: {error.what}", value=error.value, allowed=error.allowed, todo=_hint(error)
            ) from error

    return BeforeValidator(validate)


def _hint(error: ConfigError) -> str | None:
    if "'api_key'" in error.what or "'key'" in error.what:
        return "a configuration must not contain keys: export the key and name the variable in api_key_env"
    return error.todo


AnyEndpoint = Annotated[
    Literal["policy"] | EndpointConfig, _nested("endpoint", EndpointConfig), BeforeValidator(_policy_or_server)
]
"""`policy`, or the keys of `EndpointConfig`."""
Budget = Annotated[BudgetConfig, _nested("budget", BudgetConfig)]


class Meter:
    """Reserves and counts what calls cost against one budget.

    Args:
        name: name of the budget in the ledger.
        budget: limits and prices.
        ledger: the counter.
        max_tokens: longest answer.
    """

    def __init__(self, name: str, budget: BudgetConfig, ledger: UsageLedger, max_tokens: int) -> None:
        self.name = budget.name or name
        self._budget = budget
        self._ledger = ledger
        self._limits = Limits(budget.max_calls, budget.max_tokens, budget.max_cost)
        self._max_tokens = max_tokens

    def reserve(self, chat: Chat) -> Usage | None:
        """Reserve the most that the call may cost and return it; None if the budget does not allow it."""
        amount = self._budget.most(chat, self._max_tokens)
        return amount if self._ledger.reserve(self.name, amount, self._limits) else None

    def settle(self, reserved: Usage, prompt_tokens: int, response_tokens: int) -> None:
        """Record what a call did cost."""
        cost = self._budget.cost(prompt_tokens, response_tokens)
        self._ledger.settle(self.name, reserved, Usage(1, prompt_tokens + response_tokens, cost))

    def used_up(self, chat: Chat) -> str:
        """Return the error message for a call that the budget refuses."""
        spent, limits, call = self._ledger.spent(self.name), self._limits, self._budget.most(chat, self._max_tokens)
        counted = [
            (used, limit, takes, unit)
            for used, limit, takes, unit in (
                (spent.calls, limits.max_calls, 1, "calls"),
                (spent.tokens, limits.max_tokens, call.tokens, "tokens"),
                (spent.cost, limits.max_cost, call.cost, "cost"),
            )
            if limit is not None
        ]
        gone = ", ".join(f"{used:.10g} of {limit:.10g} {unit}" for used, limit, _, unit in counted)
        takes = ", ".join(f"{takes:.10g} {unit}" for _, _, takes, unit in counted if unit != "calls")
        return f"the budget {self.name!r} allows no further call: {gone} are spent" + (
            f", and such a call may use {takes}" if takes else ""
        )


def estimated_tokens(chat: Chat) -> int:
    """Estimate the tokens of a chat, rather too high than too low."""
    return sum(tokens_of(str(message.get("content", ""))) + 8 for message in chat.messages) + 8


def tokens_of(text: str) -> int:
    """Estimate the tokens of a text."""
    return -(-len(text.encode(errors="replace")) // _CHARACTERS_PER_TOKEN)


class PolicyEndpoint:
    """The run's policy, through `StageContext.generate`. Tokens are estimated, since it returns no counts. Thread-safe."""

    def __init__(self, context: StageContext, sampling: Sampling, meter: Meter) -> None:
        if context.generate is None:
            raise ConfigError(
                "endpoint: policy needs the run's model, which is not available here",
                allowed="policy in the pipeline of a run with a model, or {url: …, model: …}",
                todo="name a server",
            )
        self._generate = context.generate
        self._sampling = sampling
        self._meter = meter
        self._num_in_flight = 0
        self._call_ended = threading.Condition()

    def ask(self, chats: Sequence[Chat]) -> list[Reply]:
        replies: dict[int, Reply] = {}
        waiting = list(enumerate(chats))
        # Settling returns the rest of a reservation, so that calls refused at first may fit.
        while waiting:
            granted = self._reserve(waiting)
            if not granted:
                break
            try:
                answers = self._answers(granted)
            finally:
                with self._call_ended:
                    self._num_in_flight -= len(granted)
                    self._call_ended.notify_all()
            for (place, _, _), reply in zip(granted, answers, strict=True):
                replies[place] = reply
            waiting = [(place, chat) for place, chat in waiting if place not in replies]
        refused = Reply(error=self._meter.used_up(waiting[0][1]), over_budget=True) if waiting else Reply()
        return [replies.get(place, refused) for place in range(len(chats))]

    def close(self) -> None:
        """Do nothing: the run owns its model."""

    def _reserve(self, waiting: Sequence[tuple[int, Chat]]) -> list[tuple[int, Chat, Usage]]:
        """Return the chats that the budget allows now. If it allows none, wait for reservations that other threads return."""
        with self._call_ended:
            while True:
                granted = [
                    (place, chat, held) for place, chat in waiting if (held := self._meter.reserve(chat)) is not None
                ]
                self._num_in_flight += len(granted)
                if granted or not self._num_in_flight:
                    return granted
                self._call_ended.wait()

    def _answers(self, granted: Sequence[tuple[int, Chat, Usage]]) -> list[Reply]:
        sampling = self._sampling
        answers: Sequence[str | Exception]
        try:
            answers = self._generate(
                [chat.messages for _, chat, _ in granted], sampling.max_tokens, sampling.temperature
            )
        except Exception as error:  # noqa: BLE001 - whatever fails in the engine, a failed call is data
            answers = [error] * len(granted)
        return [self._settled(chat, held, one) for (_, chat, held), one in zip(granted, answers, strict=True)]

    def _settled(self, chat: Chat, held: Usage, answer: str | Exception) -> Reply:
        if isinstance(answer, Exception):
            self._meter.settle(held, 0, 0)
            return Reply(error=f"the policy did not answer: {type(answer).__name__}: {answer}"[:500])
        self._meter.settle(held, estimated_tokens(chat), tokens_of(answer))
        return Reply(answer)
