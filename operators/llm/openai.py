"""Send chats to an OpenAI-compatible server (`POST /chat/completions`), many concurrently, over one pool of connections.

The requests run in an event loop in its own thread. Any number of a stage's threads can therefore ask at once and share the limits:
concurrent requests, the budget, and the pause that a server asks for (Retry-After), which applies to all of them.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from operators.llm.endpoint import Chat, EndpointConfig, Meter, Reply, Sampling, estimated_tokens, tokens_of
from rftdata.errors import PluginError
from rftdata.pipeline.budget import Usage

T = TypeVar("T")

_MAY_PASS = frozenset({408, 409, 425, 429, *range(500, 600)})


@dataclass(frozen=True)
class _Failure:
    """A try without an answer.

    Attributes:
        again: whether another try may succeed.
        wait_s: how long the server asked to wait.
        billed: whether the server may have processed it nevertheless.
    """

    error: str
    again: bool
    wait_s: float | None = None
    billed: bool = False
    no_schema: bool = False


@dataclass(frozen=True)
class _Answer:
    reply: Reply
    prompt_tokens: int
    response_tokens: int


class OpenAIEndpoint:
    """One server.

    Args:
        config: its address, and how it is called.
        key: sent as bearer token; None: none is sent.
        sampling: how answers are sampled.
        meter: allows and counts every request.

    Raises:
        PluginError: httpx is not installed.
    """

    def __init__(self, config: EndpointConfig, key: str | None, sampling: Sampling, meter: Meter) -> None:
        try:
            import httpx
        except ImportError as error:
            raise PluginError(
                "asking a server needs the package httpx", todo="pip install 'rftdata[train]' or pip install httpx"
            ) from error
        self._config, self._key, self._sampling, self._meter = config, key, sampling, meter
        self._structured = config.structured != "never"
        self._not_before = 0.0
        self._num_flying = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True)
        self._thread.start()
        self._httpx = httpx
        self._client: Any = self._wait_for(self._open())

    async def _open(self) -> Any:
        config = self._config
        self._free = asyncio.Semaphore(config.concurrency)
        self._landed = asyncio.Condition()
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        limits = self._httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency)
        return self._httpx.AsyncClient(timeout=config.timeout_s, limits=limits, headers=headers)

    def ask(self, chats: Sequence[Chat]) -> list[Reply]:
        """Return a reply per chat; thread-safe."""

        async def all_of_them() -> list[Reply]:
            return await asyncio.gather(*(self._ask_one(chat) for chat in chats))

        return self._wait_for(all_of_them())

    def close(self) -> None:
        """Close the connections and stop the thread."""
        if not self._loop.is_closed():
            self._wait_for(self._client.aclose())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _ask_one(self, chat: Chat) -> Reply:
        tries = 0
        async with self._free:
            while True:
                await self._pause()
                reserved = await self._reserve(chat)
                if reserved is None:
                    return Reply(error=await asyncio.to_thread(self._meter.used_up, chat))
                found = await self._fly(chat, reserved)
                if isinstance(found, _Answer):
                    return found.reply
                if found.no_schema:
                    self._structured = False
                    continue
                tries += 1
                wait_s = self._wait_s(found, tries)
                if not found.again or tries > self._config.retries or wait_s is None:
                    times = f" ({tries} tries)" if tries > 1 else ""
                    return Reply(error=f"{self._without_key(found.error)}{times}")
                if found.wait_s is None:
                    await asyncio.sleep(wait_s)
                else:
                    # A pause that the server asks for applies to all requests.
                    self._not_before = max(self._not_before, time.monotonic() + wait_s)

    async def _pause(self) -> None:
        while (left := self._not_before - time.monotonic()) > 0:
            await asyncio.sleep(left)

    def _wait_s(self, failure: _Failure, tries: int) -> float | None:
        """Return the pause before the next try; None if the server asks for a longer one than allowed."""
        if failure.wait_s is not None:
            return failure.wait_s if failure.wait_s <= self._config.max_wait_s else None
        # Up to a quarter longer at random, so that many clients do not retry in step.
        pause_s = self._config.backoff_s * 2.0 ** (tries - 1) * random.uniform(1.0, 1.25)
        return min(self._config.max_wait_s, pause_s)

    async def _reserve(self, chat: Chat) -> Usage | None:
        """Reserve the call's share of the budget. While other calls run, wait for reservations that they return."""
        while True:
            async with self._landed:
                flying = self._num_flying
                reserved = await asyncio.to_thread(self._meter.reserve, chat)
                if reserved is not None:
                    self._num_flying += 1
                    return reserved
                if not flying:
                    return None
                await self._landed.wait()

    async def _fly(self, chat: Chat, reserved: Usage) -> _Answer | _Failure:
        found: _Answer | _Failure = _Failure("interrupted", again=False, billed=True)
        try:
            found = await self._post(chat)
        finally:
            if isinstance(found, _Answer):
                await asyncio.to_thread(self._meter.settle, reserved, found.prompt_tokens, found.response_tokens)
            elif not found.billed:
                await asyncio.to_thread(self._meter.settle, reserved, 0, 0)
            async with self._landed:
                self._num_flying -= 1
                self._landed.notify_all()
        return found

    async def _post(self, chat: Chat) -> _Answer | _Failure:
        config, with_schema = self._config, chat.schema is not None and self._structured
        try:
            # The client's own limits apply per read, so a server that sends a byte now and then would never exceed them.
            async with asyncio.timeout(config.timeout_s):
                response = await self._client.post(f"{config.url}/chat/completions", json=self._body(chat, with_schema))
        except (TimeoutError, self._httpx.TimeoutException):
            return _Failure(f"no answer within {config.timeout_s:g} s", again=True, billed=True)
        except self._httpx.HTTPError as error:
            return _Failure(f"{type(error).__name__}: {error}", again=True)
        except Exception as error:  # noqa: BLE001 - a request that cannot be sent (a text that is not UTF-8) is data, too
            return _Failure(f"{type(error).__name__}: {error}", again=False)
        if response.status_code != 200:
            return self._refusal(response, with_schema)
        return _read(response.text, chat)

    def _body(self, chat: Chat, with_schema: bool) -> dict[str, Any]:
        sampling = self._sampling
        body: dict[str, Any] = {
            "model": self._config.model, "messages": list(chat.messages), "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
        }  # fmt: skip
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if with_schema:
            schema = {"name": "answer", "strict": True, "schema": chat.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return {**body, **self._config.extra}

    def _refusal(self, response: Any, with_schema: bool) -> _Failure:
        status, text = response.status_code, " ".join(response.text.split())[:200]
        # Servers without structured output refuse the request in various words; without the schema they may accept it.
        no_schema = (
            with_schema and self._config.structured == "auto" and status in (400, 422, 501) and _speaks_of_schema(text)
        )
        return _Failure(
            f"HTTP {status}: {text}", status in _MAY_PASS, _retry_after(response.headers.get("retry-after")), no_schema=no_schema
        )  # fmt: skip

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _speaks_of_schema(text: str) -> bool:
    return any(
        word in text.lower() for word in ("response_format", "schema", "structured", "guided", "grammar", "extra")
    )


def _read(body: str, chat: Chat) -> _Answer | _Failure:
    try:
        answer = json.loads(body)
        choice = answer["choices"][0]
        text = choice["message"]["content"]
        if text is not None and not isinstance(text, str):
            raise TypeError("content is not a text")
    except (ValueError, LookupError, TypeError) as error:
        what = f"the server's answer is not a chat completion ({type(error).__name__}): {' '.join(body.split())[:200]}"
        return _Failure(what, again=True, billed=True)
    usage = answer.get("usage")
    reply = Reply(text or "", None, choice.get("finish_reason") == "length")
    return _Answer(
        reply, _count(usage, "prompt_tokens", estimated_tokens(chat)), _count(usage, "completion_tokens", tokens_of(reply.text))
    )  # fmt: skip


def _count(usage: object, key: str, otherwise: int) -> int:
    """Return a server's token count, if it sends one."""
    value = usage.get(key) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and value >= 0 else otherwise


def _retry_after(value: str | None) -> float | None:
    """Return the seconds that a server asks to wait: a number, or a date (RFC 9110, section 10.2.3)."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None
