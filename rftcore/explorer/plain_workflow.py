"""Workflows that are plain functions: each rollout has a separate thread, with a model and a score that it calls without await."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rftcore.explorer.workflow_loop import BlockedError, leave_behind
from rftcore.failures import user_frames, user_line
from rftcore.other_models.models import OtherModel
from rftcore.workflows.chat_encoding import Message
from rftcore.workflows.task import Model, Score, Scorer, Task, Turn
from rftdata.user_code.async_raise import RunningCall

T = TypeVar("T")


class PlainModel:
    """The policy for a plain workflow: like `Model`, but `chat` returns the turn."""

    def __init__(self, model: Model, calls: _Calls) -> None:
        self._model = model
        self._calls = calls

    @property
    def turns(self) -> list[Turn]:
        """The answers so far."""
        return self._model.turns

    def chat(self, messages: list[Message], **options: Any) -> Turn:
        """Answer a chat; see `Model.chat`."""
        return self._calls.wait(self._model.chat(messages, **options))

    def chats(self, messages: list[Message], n: int, **options: Any) -> list[Turn]:
        """Answer a chat n times; see `Model.chats`."""
        return self._calls.wait(self._model.chats(messages, n, **options))

    def other(self, name: str) -> PlainOtherModel:
        """Return a model of `explorer.models`; see `Model.other`."""
        return PlainOtherModel(self._model.other(name), self._calls)

    def write(self, messages: list[Message], response: str, *, role: str | None = None) -> Turn:
        """Record an answer that is given instead of sampled; see `Model.write`."""
        return self._model.write(messages, response, role=role)

    def write_chat(self, messages: list[Message], *, start: int = 0, turns: str = "all") -> Turn:
        """Record a chat whose answers are given; see `Model.write_chat`."""
        return self._model.write_chat(messages, start=start, turns=turns)


class PlainOtherModel:
    """A model of `explorer.models` for a plain workflow: `chat` returns the answer."""

    def __init__(self, model: OtherModel, calls: _Calls) -> None:
        self._model = model
        self._calls = calls

    def chat(self, messages: list[Message]) -> str:
        """Return the answer to a chat; see `OtherModel.chat`."""
        return self._calls.wait(self._model.chat(messages))


class _Calls:
    """Calls of a workflow's threads into the event loop, ended with the rollout."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        # The rollout's context. A thread that the workflow starts has none, so its requests could not be assigned to the rollout.
        self._context = contextvars.copy_context()
        self._pending: set[concurrent.futures.Future[Any]] = set()
        self._ended = False

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        pending = self._context.copy().run(asyncio.run_coroutine_threadsafe, coroutine, self._loop)
        self._pending.add(pending)
        pending.add_done_callback(self._pending.discard)
        if self._ended:
            pending.cancel()
        return pending.result()

    def end(self) -> None:
        self._ended = True
        for pending in list(self._pending):
            pending.cancel()


async def run_plain(
    workflow: Callable[..., Any], task: Task, model: Model, score: Scorer, arguments: dict[str, Any]
) -> Any:
    """Return the result of a plain workflow. On cancellation, an exception asks it to end.

    If the workflow does not end, its thread is left behind; see `leave_behind`.
    """
    calls, call, done = _Calls(), RunningCall(), concurrent.futures.Future[Any]()

    def scored(turn: Turn, task: Task) -> Score:
        return calls.wait(score(turn, task))

    def run() -> None:
        try:
            result = call.run(lambda: workflow(task, PlainModel(model, calls), scored, **arguments))
        except BaseException as error:  # noqa: BLE001 - the future passes it on
            done.set_exception(error)
        else:
            done.set_result(result)

    # In this context, so that calls of the thread belong to this rollout.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="workflow", daemon=True)
    thread.start()
    try:
        # Shielded, because a cancelled future could not take the thread's result.
        result = asyncio.wrap_future(done)
        result.add_done_callback(
            lambda ended: ended.cancelled() or ended.exception()
        )  # not logged if nothing awaits it
        return await asyncio.shield(result)
    except asyncio.CancelledError as error:
        error.add_note(user_line(user_frames(call.stack())))
        calls.end()
        call.interrupt(BlockedError)
        leave_behind(call)
        raise
