"""Workflows that are plain functions: each rollout in a thread of its own, with a model and a score that it calls without await."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rftcore.explorer.failures import place, user_frames
from rftcore.explorer.workflow_loop import BlockedError, leave_behind, thread_stack
from rftcore.workflows.chats import Message
from rftcore.workflows.task import Model, Score, Scorer, Task, Turn
from rftdata.user_code.async_raise import raise_in

T = TypeVar("T")


class PlainModel:
    """The policy as a plain workflow sees it: as `Model`, but `chat` returns the turn."""

    def __init__(self, model: Model, calls: _Calls) -> None:
        self._model = model
        self._calls = calls

    @property
    def turns(self) -> list[Turn]:
        """The answers so far."""
        return self._model.turns

    def chat(self, messages: list[Message]) -> Turn:
        """Answer a chat; see `Model.chat`."""
        return self._calls.wait(self._model.chat(messages))

    def write(self, messages: list[Message], response: str) -> Turn:
        """Record an answer that was given and not sampled; see `Model.write`."""
        return self._model.write(messages, response)

    def write_chat(self, messages: list[Message], *, start: int = 0, turns: str = "all") -> Turn:
        """Record a chat whose answers are given; see `Model.write_chat`."""
        return self._model.write_chat(messages, start=start, turns=turns)


class _Calls:
    """What a thread asks of the event loop: one thing at a time, ended with the rollout."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pending: concurrent.futures.Future[Any] | None = None
        self._ended = False

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        self._pending = pending = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        if self._ended:
            pending.cancel()
        return pending.result()

    def end(self) -> None:
        self._ended = True
        if self._pending is not None:
            self._pending.cancel()


async def run_plain(
    workflow: Callable[..., Any], task: Task, model: Model, score: Scorer, arguments: dict[str, Any]
) -> Any:
    """What a plain workflow returns; cancelled, it is asked to end by an exception.

    The thread of one that does not end by it is left behind, see `leave_behind`.
    """
    calls, done = _Calls(), concurrent.futures.Future[Any]()

    def scored(turn: Turn, task: Task) -> Score:
        return calls.wait(score(turn, task))

    def run() -> None:
        # The exception may come a moment too late, when the workflow has returned.
        with contextlib.suppress(BlockedError):
            try:
                result = workflow(task, PlainModel(model, calls), scored, **arguments)
            except BaseException as error:  # noqa: BLE001 - who waits for the future gets it
                done.set_exception(error)
            else:
                done.set_result(result)

    # In this context: what the thread asks for belongs to this rollout.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="workflow", daemon=True)
    thread.start()
    try:
        # Shielded: a future that was cancelled could not take the thread's result any more.
        return await asyncio.shield(asyncio.wrap_future(done))
    except asyncio.CancelledError as error:
        error.add_note(place(user_frames(thread_stack(thread))))
        calls.end()
        if not done.done():
            raise_in(thread.ident or 0, BlockedError)
            leave_behind(thread)
        raise
