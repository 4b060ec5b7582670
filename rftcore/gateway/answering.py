"""The open and the answered requests of a session, so that a request that a client sends again is answered by the first one.

Clients send a request again when its answer comes late or its connection is lost. A second sample would be a turn that the program never asked for. A
repetition is known by its `Idempotency-Key`, or by the counter of OpenAI's clients (`x-stainless-retry-count` above 0) and an equal body.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from rftcore.gateway.completion import Completion
from rftcore.gateway.errors import ApiError
from rftcore.gateway.parts import Parts
from rftcore.workflows.task import Turn

RETRY_S = 60.0
"""How long a request without a client waits for its repetition. OpenAI's clients pause for 8 s at most."""


@dataclass(frozen=True)
class Answered:
    """What was sampled for a request."""

    completion: Completion
    turns: list[Turn]
    with_usage: bool


class Answering:
    """A request that is being answered, or has been.

    Args:
        digest: of its body.
        parts: of the answers while they are sampled; None if the answer is not a stream.
    """

    def __init__(self, digest: bytes, task: asyncio.Task[Answered], parts: Parts | None = None) -> None:
        self.digest, self.task, self.parts = digest, task, parts
        self.is_delivered = False
        self.num_clients = 0
        self._abandoned: asyncio.TimerHandle | None = None

    @property
    def can_be_repeated(self) -> bool:
        """Whether a repetition is answered by it. A failed request has sampled nothing, so it is tried again."""
        return not self.task.done() or not (self.task.cancelled() or self.task.exception())

    def attach(self) -> None:
        """Count a client that waits for the answer."""
        self.num_clients += 1
        if self._abandoned is not None:
            self._abandoned.cancel()
            self._abandoned = None

    def detach(self, *, delivered: bool) -> None:
        """Count off a client. Without one, the answer is awaited for a while, in case that the request comes again."""
        self.num_clients -= 1
        self.is_delivered |= delivered
        if self.num_clients == 0 and not self.task.done():
            self._abandoned = asyncio.get_running_loop().call_later(RETRY_S, self.task.cancel)


class Requests:
    """The requests of one session."""

    def __init__(self) -> None:
        self._all: dict[Answering, str | None] = {}  # with their keys
        self._by_key: dict[str, Answering] = {}

    def submit(
        self,
        body: bytes,
        parts: Parts | None,
        answer: Callable[[], Coroutine[Any, Any, Answered]],
        begin: Callable[[Coroutine[Any, Any, Answered]], asyncio.Task[Answered]],
        *,
        key: str | None = None,
        num_retries: int = 0,
    ) -> Answering:
        """Return the request with this body that a repetition repeats, or begin to answer a new one.

        Args:
            parts: see `Answering`.
            answer: answers the request.
            begin: begins a task.
            key: the header `Idempotency-Key`.
            num_retries: the header `x-stainless-retry-count`.

        Raises:
            ApiError: the key is that of another body.
        """
        digest = hashlib.sha256(body).digest()
        earlier = self._earlier(digest, key, num_retries)
        if earlier is not None:
            return earlier
        found = Answering(digest, begin(answer()), parts)
        self._all[found] = key
        if key is not None:
            self._by_key[key] = found
        found.task.add_done_callback(lambda _: self._forget_failed(found))
        return found

    def _forget_failed(self, ended: Answering) -> None:
        """Forget a request that has failed, so that a program that repeats refused requests fills no memory."""
        if ended.can_be_repeated:
            return
        key = self._all.pop(ended, None)
        if key is not None and self._by_key.get(key) is ended:
            del self._by_key[key]

    def cancel(self) -> None:
        """Cancel open requests."""
        for each in list(self._all):
            each.task.cancel()

    @property
    def delivered_turns(self) -> list[Turn]:
        """The turns that a program has read."""
        return [turn for each in self._all if each.is_delivered for turn in each.task.result().turns]

    def _earlier(self, digest: bytes, key: str | None, num_retries: int) -> Answering | None:
        if key is not None and key in self._by_key:
            found = self._by_key[key]
            if found.digest != digest:
                raise ApiError(400, "the Idempotency-Key is that of another request", code="idempotency_error")
            return found if found.can_be_repeated else None
        if num_retries <= 0:
            return None
        same = [each for each in self._all if each.digest == digest and each.can_be_repeated]
        # First a request whose client is gone, so that equal requests that run at once are each repeated by their own.
        return min(same, key=lambda each: (each.num_clients > 0, each.is_delivered), default=None)
