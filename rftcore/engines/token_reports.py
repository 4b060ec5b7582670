"""Reports of the tokens that an open request has sampled so far, for callers that show an answer while it grows.

A listener subscribes for its task and the tasks that begin there, and gets the new tokens of each of their requests in the event loop of the requests.
An engine that computes whole answers reports nothing. What was reported is the beginning of the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Sequence
from contextvars import Context, ContextVar

from rftcore.engines.base import Decoding

Listener = Callable[[int, Sequence[int], Decoding], None]
"""Receives the number of an answer among those of its caller, its new tokens, and the sampling parameters of its request."""

_listener: ContextVar[Listener | None] = ContextVar("token_listener", default=None)
_number: ContextVar[int] = ContextVar("answer_number", default=0)


def listen_to_tokens(listener: Listener | None) -> None:
    """Report tokens of requests that the current task opens from now on; None ends that."""
    _listener.set(listener)


def context_of_answer(number: int) -> Context:
    """Return a copy of the current context for one of several answers to a chat."""
    context = contextvars.copy_context()
    context.run(_number.set, number)
    return context


def report_tokens(token_ids: Sequence[int], decoding: Decoding) -> None:
    """Report tokens of an answer of the current task that no engine samples now, because they were sampled earlier."""
    listener = _listener.get()
    if listener is not None and token_ids:
        listener(_number.get(), token_ids, decoding)


class TokenReport:
    """The reports on one request. Made in the request's event loop."""

    def __init__(self, listener: Listener, decoding: Decoding) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener, self._number, self._decoding = listener, _number.get(), decoding
        self.num_reported = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Report new tokens; called in any thread."""
        self.num_reported += len(token_ids)
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the request with it
            self._loop.call_soon_threadsafe(self._listener, self._number, token_ids, self._decoding)


def token_report(decoding: Decoding) -> TokenReport | None:
    """Return what reports on a request of the current task; None if nothing listens."""
    listener = _listener.get()
    return None if listener is None else TokenReport(listener, decoding)
