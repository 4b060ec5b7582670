"""`GatewaySession`: the endpoint of one rollout. Its requests are calls of the rollout's model."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import secrets
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from pydantic_core import from_json

from rftcore.engines.answer_text import AnswerText
from rftcore.engines.token_reports import listen_to_tokens
from rftcore.gateway.answering import Answered, Answering, Requests
from rftcore.gateway.chat_request import ChatRequest, chat_request
from rftcore.gateway.completion import Completion
from rftcore.gateway.errors import ApiError, api_error, session_closed
from rftcore.gateway.parts import Parts
from rftcore.gateway.transcript import Transcript
from rftcore.tools.chat_template import channel_format, content_parser
from rftcore.workflows.chat_encoding import Message
from rftcore.workflows.limits import LimitReachedError
from rftcore.workflows.task import Model, Turn
from rftcore.workflows.tool_dialogue import ToolDialogue
from rftdata.errors import ConfigError, EngineStoppedError, ModelError

logger = logging.getLogger(__name__)

ANY_MODEL = "*"
_OF_THE_RUN = (ConfigError, ModelError, EngineStoppedError)


@dataclass(frozen=True)
class SessionSettings:
    """How the requests of a program are answered.

    Attributes:
        model: name of the model for the program; `*` answers to every name.
        sampling: whose temperature, top_p and top_k are used: those of the run, so that evaluations are greedy and rollouts explore as configured, or those
            of each request.
        format: of calls of tools, see `ToolDialogue`.
        template_args: further variables of the chat template; a request may add to them.
        roles: names that also stand for the model, each for a role of the rollout.
    """

    model: str = "policy"
    sampling: Literal["run", "program"] = "run"
    format: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)

    @property
    def models(self) -> list[str]:
        """The names of the model."""
        return [*self.roles] or ["policy" if self.model == ANY_MODEL else self.model]

    def has(self, name: str) -> bool:
        """Return whether a name stands for the model."""
        return self.model in (ANY_MODEL, name) or name in self.roles


class GatewaySession:
    """The requests of one rollout, for the event loop of its model. Made in a task of the rollout, so that its requests count as the rollout's.

    Attributes:
        key: opens the session; it cannot be guessed.
        failed: gets the error of a request after which the run cannot continue.
        limit_reached: set once a limit of the rollout has refused a request.
    """

    def __init__(self, model: Model, settings: SessionSettings) -> None:
        self.key = f"rft-{secrets.token_urlsafe(32)}"
        self.settings = settings
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failed.add_done_callback(
            lambda ended: ended.cancelled() or ended.exception()
        )  # not logged if it is not awaited
        self.limit_reached = asyncio.Event()
        self._model = model
        self._messages: list[Message] = []  # of the answers to this session's requests
        self._transcript = Transcript(model.tokenizer, settings.format)
        self._requests = Requests()
        self._context = contextvars.copy_context()
        self._is_closed = False

    def submit(self, body: bytes, *, key: str | None = None, num_retries: int = 0) -> Answering:
        """Begin to answer the body of a request, or return the request that it repeats.

        Args:
            key, num_retries: see `Requests.submit`.

        Raises:
            ApiError: the rollout has ended, or the request is not valid.
        """
        if self._is_closed:
            raise session_closed()
        request = chat_request(_decoded(body))
        if not self.settings.has(request.model):
            names = " or ".join(map(repr, self.settings.models))
            what = f"The model {request.model!r} does not exist; the rollout's model is {names}"
            raise ApiError(404, what, param="model", code="model_not_found")
        parts = Parts(request.model, self._text, request.n or 1) if request.stream else None
        return self._requests.submit(
            body, parts, lambda: self._answer(request, parts), self._begin, key=key, num_retries=num_retries
        )

    def close(self) -> None:
        """Refuse further requests and cancel open ones. An answer to them that no program has read is stored, but not trained."""
        if self._is_closed:
            return
        self._is_closed = True
        self._requests.cancel()
        own = {id(message) for message in self._messages}
        read = {id(turn) for turn in self._requests.delivered_turns}
        for turn in self._model.turns:
            if id(turn.parsed) in own and id(turn) not in read:
                turn.sequence.loss_mask = [False] * len(turn.response_token_ids)

    def _begin(self, answering: Coroutine[Any, Any, Answered]) -> asyncio.Task[Answered]:
        # In the rollout's context: its clock is suspended while the engine lets the request wait.
        return asyncio.get_running_loop().create_task(answering, context=self._context.copy())

    @cached_property
    def _text(self) -> AnswerText:
        return AnswerText(self._model.tokenizer)

    async def _answer(self, request: ChatRequest, parts: Parts | None) -> Answered:
        try:
            return await self._sampled(request, parts)
        except _OF_THE_RUN as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise ApiError(503, str(error), code="engine_stopped", kind="server_error") from error
        except Exception as error:
            if isinstance(error, LimitReachedError):
                self.limit_reached.set()
            answer = api_error(error)
            if answer.status == 500:
                logger.exception("a request of a program could not be answered")
            raise answer from error

    async def _sampled(self, request: ChatRequest, parts: Parts | None) -> Answered:
        schemas = [tool.schema_for_template for tool in request.tools or ()]
        dialogue = self._transcript.dialogue(schemas) if schemas else None
        messages = self._transcript.incoming(request.messages, dialogue)
        may_call = dialogue is not None and request.tool_choice != "none"
        options = {**self._options(request), **self._tool_options(dialogue, may_call=may_call)}
        n = request.n or 1
        if parts is not None:
            channels = channel_format(self._model.tokenizer)
            form = dialogue if dialogue is not None and may_call else channels
            parts.begin(None if form is None else form.certain)
            listen_to_tokens(parts.listen)
        turns = (
            [await self._model.chat(messages, **options)] if n == 1 else await self._model.chats(messages, n, **options)
        )
        if any(turn.finish_reason == "abort" for turn in turns):
            raise ApiError(503, "the engine was closed", code="engine_stopped", kind="server_error")
        self._record(request, turns)
        shown = [""] * n if parts is None else parts.close()
        told = [
            self._transcript.outgoing(turn, dialogue if may_call else None, begun)
            for turn, begun in zip(turns, shown, strict=True)
        ]
        completion = Completion.of(request.model, turns, told, self._model.tokenizer, logprobs=bool(request.logprobs))
        return Answered(completion, turns, request.with_usage)

    def _options(self, request: ChatRequest) -> dict[str, Any]:
        """Return the arguments of `model.chat` without those of tools."""
        options: dict[str, Any] = {
            "role": self.settings.roles.get(request.model),
            "stop": request.stop or None,
            "max_tokens": request.longest,
            "response_format": request.response_format,
            "template_args": {**self.settings.template_args, **(request.chat_template_kwargs or {})},
        }
        if self.settings.sampling == "program":
            options |= {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
        return options

    def _tool_options(self, dialogue: ToolDialogue | None, *, may_call: bool) -> dict[str, Any]:
        if dialogue is not None and may_call:
            parse = dialogue.parse
        else:
            parse = content_parser(self._model.tokenizer) or _as_content

        def read(answer: str) -> Message:
            self._messages.append(message := parse(answer))
            return message

        return {"tools": None if dialogue is None else dialogue.schemas, "parse": read}

    def _record(self, request: ChatRequest, turns: list[Turn]) -> None:
        """Record sampling parameters that the program asked for and did not get."""
        if self.settings.sampling == "program":
            return
        asked = {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
        found = {f"requested_{name}": float(value) for name, value in asked.items() if value is not None}
        for turn in turns:
            turn.sequence.metrics |= found


def _as_content(answer: str) -> dict[str, Any]:
    return {"role": "assistant", "content": answer}


def _decoded(body: bytes) -> Any:
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from None
