"""Send chats to an OpenAI-compatible server (`POST /chat/completions`), many concurrently, over one pool of connections.

The requests run in an event loop in its own thread. Any number of a stage's threads can therefore ask at once and share the limits:
those of `Server`, and the budget.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from operators.llm.endpoint import Chat, EndpointConfig, Meter, Reply, Sampling, estimated_tokens, tokens_of
from operators.llm.server import Failure, Server
from rftdata.pipeline.budget import Usage

T = TypeVar("T")


@dataclass(frozen=True)
class _Answer:
    reply: Reply
    prompt_tokens: int
    response_tokens: int


class OpenAIEndpoint:
    """One server.

    Args:
        config: its address, and how it is called.
        sampling: how answers are sampled.
        meter: allows and counts every request.

    Raises:
        PluginError: httpx is not installed.
        ConfigError: the environment variable with the key is not set.
    """

    def __init__(self, config: EndpointConfig, sampling: Sampling, meter: Meter) -> None:
        self._config, self._sampling, self._meter = config, sampling, meter
        self._structured = config.structured != "never"
        self._num_in_flight = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True)
        self._thread.start()
        try:
            self._server: Server = self._wait_for(self._open())
        except BaseException:
            self._end_loop()
            raise

    async def _open(self) -> Server:
        self._call_ended = asyncio.Condition()
        return Server(self._config)

    def ask(self, chats: Sequence[Chat]) -> list[Reply]:
        """Return a reply per chat; thread-safe."""

        async def all_of_them() -> list[Reply]:
            return await asyncio.gather(*(self._ask_one(chat) for chat in chats))

        return self._wait_for(all_of_them())

    async def reply(self, chat: Chat) -> Reply:
        """Return the reply to a chat, for a caller in another event loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._ask_one(chat), self._loop))

    def close(self) -> None:
        """Close the connections and stop the thread."""
        if not self._loop.is_closed():
            self._wait_for(self._server.close())
            self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _ask_one(self, chat: Chat) -> Reply:
        reply = await self._server.persist(lambda: self._try(chat))
        if isinstance(reply, Reply):
            return reply
        times = f" ({reply.tries} tries)" if reply.tries > 1 else ""
        return Reply(error=f"{reply.error}{times}")

    async def _try(self, chat: Chat) -> Reply | Failure:
        while True:
            reserved = await self._reserve(chat)
            if reserved is None:
                return Reply(error=await asyncio.to_thread(self._meter.used_up, chat), over_budget=True)
            with_schema = chat.schema is not None and self._structured
            outcome = await self._send(chat, reserved, with_schema)
            if isinstance(outcome, _Answer):
                return outcome.reply
            if not (with_schema and self._config.structured == "auto" and _refuses_schema(outcome)):
                return outcome
            # Servers without structured output refuse the request in various words; without the schema they may accept it.
            self._structured = False

    async def _reserve(self, chat: Chat) -> Usage | None:
        """Reserve the call's share of the budget. While other calls run, wait for reservations that they return."""
        while True:
            async with self._call_ended:
                in_flight = self._num_in_flight
                reserved = await asyncio.to_thread(self._meter.reserve, chat)
                if reserved is not None:
                    self._num_in_flight += 1
                    return reserved
                if not in_flight:
                    return None
                await self._call_ended.wait()

    async def _send(self, chat: Chat, reserved: Usage, with_schema: bool) -> _Answer | Failure:
        outcome: _Answer | Failure = Failure("interrupted", again=False, billed=True)
        try:
            answer = await self._server.post("/chat/completions", self._body(chat, with_schema))
            outcome = answer if isinstance(answer, Failure) else _read(answer, chat)
        finally:
            if isinstance(outcome, _Answer):
                await asyncio.to_thread(self._meter.settle, reserved, outcome.prompt_tokens, outcome.response_tokens)
            elif not outcome.billed:
                await asyncio.to_thread(self._meter.settle, reserved, 0, 0)
            async with self._call_ended:
                self._num_in_flight -= 1
                self._call_ended.notify_all()
        return outcome

    def _body(self, chat: Chat, with_schema: bool) -> dict[str, Any]:
        sampling = self._sampling
        body: dict[str, Any] = {
            "model": self._config.model,
            "messages": list(chat.messages),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if with_schema:
            schema = {"name": "answer", "strict": True, "schema": chat.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return {**body, **self._config.extra}


def _refuses_schema(failure: Failure) -> bool:
    words = ("response_format", "schema", "structured", "guided", "grammar", "extra")
    return failure.status in (400, 422, 501) and any(word in failure.error.lower() for word in words)


def _read(body: str, chat: Chat) -> _Answer | Failure:
    try:
        answer = json.loads(body)
        choice = answer["choices"][0]
        text = choice["message"]["content"]
        if text is not None and not isinstance(text, str):
            raise TypeError("content is not a text")
    except (ValueError, LookupError, TypeError) as error:
        what = f"the server's answer is not a chat completion ({type(error).__name__}): {' '.join(body.split())[:200]}"
        return Failure(what, again=True, billed=True)
    usage = answer.get("usage")
    reply = Reply(text or "", None, choice.get("finish_reason") == "length")
    return _Answer(
        reply,
        _count(usage, "prompt_tokens", estimated_tokens(chat)),
        _count(usage, "completion_tokens", tokens_of(reply.text)),
    )


def _count(usage: object, key: str, otherwise: int) -> int:
    """Return a server's token count, if it sends one."""
    value = usage.get(key) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and value >= 0 else otherwise
