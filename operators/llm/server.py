"""Calls to one OpenAI-compatible server: concurrent up to a limit, repeated after failures that may pass.

The limits apply to all calls together: concurrent requests, and the pause that a server asks for (Retry-After). A `Server` belongs to
one event loop.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from operators.llm.endpoint import EndpointConfig
from rftdata.errors import ConfigError, PluginError

T = TypeVar("T")

_MAY_PASS = frozenset({408, 409, 425, 429, *range(500, 600)})


@dataclass(frozen=True)
class Failure:
    """A try without an answer.

    Attributes:
        again: whether another try may succeed.
        wait_s: how long the server asked to wait.
        billed: whether the server may have processed it nevertheless.
        status: of the server's refusal; None without one.
        tries: how often it was tried.
    """

    error: str
    again: bool
    wait_s: float | None = None
    billed: bool = False
    status: int | None = None
    tries: int = 1


class Server:
    """One server; create, use and close it in one event loop.

    Args:
        config: its address, and how it is called.

    Raises:
        PluginError: httpx is not installed.
        ConfigError: the environment variable with the key is not set.
    """

    def __init__(self, config: EndpointConfig) -> None:
        self._config, self._key = config, _key(config)
        self._httpx = _httpx()
        self._not_before = 0.0
        self._free = asyncio.Semaphore(config.concurrency)
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        limits = self._httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency)
        self._client = self._httpx.AsyncClient(timeout=config.timeout_s, limits=limits, headers=headers)

    async def post(self, route: str, body: Mapping[str, Any]) -> str | Failure:
        """Send one request; return the text of the answer."""
        config = self._config
        try:
            # The client's own limits apply per read, so a server that sends a byte now and then would never exceed them.
            async with asyncio.timeout(config.timeout_s):
                response = await self._client.post(f"{config.url}{route}", json=body)
        except (TimeoutError, self._httpx.TimeoutException):
            return Failure(f"no answer within {config.timeout_s:g} s", again=True, billed=True)
        except self._httpx.HTTPError as error:
            return Failure(f"{type(error).__name__}: {error}", again=True)
        except Exception as error:  # noqa: BLE001 - a request that cannot be sent (a text that is not UTF-8) is data, too
            return Failure(f"{type(error).__name__}: {error}", again=False)
        if response.status_code == 200:
            return str(response.text)
        status, text = response.status_code, " ".join(response.text.split())[:200]
        wait_s = _retry_after(response.headers.get("retry-after"))
        return Failure(f"HTTP {status}: {text}", status in _MAY_PASS, wait_s, status=status)

    async def persist(self, attempt: Callable[[], Awaitable[T | Failure]]) -> T | Failure:
        """Return the result of the first attempt that succeeds, or the last failure; wait before each attempt as long as is asked for."""
        tries = 0
        async with self._free:
            while True:
                await self._pause()
                outcome = await attempt()
                if not isinstance(outcome, Failure):
                    return outcome
                tries += 1
                wait_s = self._wait_s(outcome, tries)
                if not outcome.again or tries > self._config.retries or wait_s is None:
                    return replace(outcome, error=self._without_key(outcome.error), tries=tries)
                if outcome.wait_s is None:
                    await asyncio.sleep(wait_s)
                else:
                    # A pause that the server asks for applies to all requests.
                    self._not_before = max(self._not_before, time.monotonic() + wait_s)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _pause(self) -> None:
        while (left := self._not_before - time.monotonic()) > 0:
            await asyncio.sleep(left)

    def _wait_s(self, failure: Failure, tries: int) -> float | None:
        """Return the pause before the next try; None if the server asks for a longer one than allowed."""
        if failure.wait_s is not None:
            return failure.wait_s if failure.wait_s <= self._config.max_wait_s else None
        # Up to a quarter longer at random, so that many clients do not retry in step.
        pause_s = self._config.backoff_s * 2.0 ** (tries - 1) * random.uniform(1.0, 1.25)
        return min(self._config.max_wait_s, pause_s)

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise PluginError(
            "asking a server needs the package httpx", todo="pip install 'rftdata[train]' or pip install httpx"
        ) from error
    return httpx


def _key(config: EndpointConfig) -> str | None:
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env)
    if not key:
        raise ConfigError(
            f"the environment variable {config.api_key_env}, which endpoint.api_key_env names, is not set",
            todo=f"export {config.api_key_env}=… for the process that asks the server",
        )
    return key


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
