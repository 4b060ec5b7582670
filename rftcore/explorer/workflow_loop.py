"""The event loop of workflows, in a separate, watched thread.

The explorer's own loop claims, stores and loads weights, and must not wait for a user's code. Async workflows and rewards share this
loop, so that they can also share their clients. Code that blocks the loop (a call that does not await) also stops the other rollouts.
`rft status` shows that. Beyond a limit an exception is raised in the blocking code, and its rollout fails. Code that no
exception reaches (a wait inside C code) ends the process, which reports the stack; the run continues with another process.
"""

from __future__ import annotations

import asyncio
import faulthandler
import math
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from rftcore.failures import as_traceback, user_frames, user_line
from rftdata.user_code import held_lock_timer
from rftdata.user_code.async_raise import RunningCall

T = TypeVar("T")

_TICK_S = 0.25
# Shorter pauses, such as a garbage collection or a busy machine, are not reported.
NOTICEABLE_S = 2.0
_GRACE_S = 5.0
_CLOSE_S = 10.0
_LAST_S = 2.0
_ASK_AGAIN_S = 1.0
# Tolerance that distinguishes C code holding the interpreter's lock from a busy machine or a briefly suspended process.
_LOCK_SLACK_S = 15.0
_PUT_OFF_S = 2.0


TO_UNBLOCK = (
    "call it with `await asyncio.to_thread(…)`, or make the workflow a plain function (`rft docs write-a-workflow`)"
)


class BlockedError(BaseException):
    """Raised in code that blocks its thread for too long. It is not an Exception, so that loops that catch those end too."""


class WorkflowLoop:
    """Runs coroutines in a watched thread.

    Args:
        block_timeout_s: code that blocks the loop for longer is stopped.
        report: file for the stacks when code holds the interpreter's lock and no thread can run; the process then ends.
        on_blocking: receives the place in the code and the seconds of a noticeable block, repeatedly while it lasts, then "".
        on_stuck: receives a sentence and the stack of code that cannot be stopped. It should end the process.
        max_left: number of plain workflows' threads that may be left running. Each may compute, and more would slow the engine.
    """

    def __init__(
        self,
        block_timeout_s: float,
        on_blocking: Callable[[str], None] = lambda _: None,
        on_stuck: Callable[[str, str], None] = lambda *_: None,
        report: Path | None = None,
        max_left: int = 8,
    ) -> None:
        self._block_timeout_s, self._max_left = block_timeout_s, max_left
        self._on_blocking, self._on_stuck = on_blocking, on_stuck
        self._loop = asyncio.new_event_loop()
        self._ticked = time.monotonic()
        self._tick_lock = threading.Lock()
        self._closed = threading.Event()
        self._asked_left_at = 0.0
        self._report = None if report is None else _LockWatch(report, block_timeout_s + _LOCK_SLACK_S)
        self._call = RunningCall()
        self._thread = threading.Thread(target=self._call.run, args=(self._run,), name="workflows", daemon=True)
        self._thread.start()
        self._watcher = threading.Thread(target=self._watch, name="workflow watch", daemon=True)
        self._watcher.start()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and return its result; cancelling the caller cancels it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def call(self, function: Callable[[], None]) -> None:
        """Schedule a call of a function in the loop."""
        self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Cancel running coroutines and end the loop."""
        self._closed.set()
        self._loop.call_soon_threadsafe(self._loop.create_task, self._cancel_all())
        self._thread.join(_CLOSE_S)  # blocking code is left behind with its daemon thread
        self._watcher.join()
        if self._report is not None:
            self._report.end()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if closing := asyncio.all_tasks() - {asyncio.current_task()}:  # the async environments of cancelled rollouts
            await asyncio.wait(closing, timeout=_LAST_S)
        self._loop.stop()

    def _look_at_left_calls(self, now: float) -> None:
        if now - self._asked_left_at < _ASK_AGAIN_S:
            return
        self._asked_left_at = now
        with _left_lock:
            _left[:] = [call for call in _left if not call.has_ended]
            left = list(_left)
        for call in left:
            call.interrupt(BlockedError)
        if len(left) > self._max_left:
            frames = user_frames(left[0].stack())
            sentence = (
                f"{len(left)} rollouts of a plain workflow were timed out and cannot be stopped{user_line(frames)}"
            )
            self._on_stuck(sentence, as_traceback(frames, sentence))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._tick)
        while True:
            try:
                self._loop.run_forever()
                break
            except (SystemExit, KeyboardInterrupt, BlockedError):
                # A task's SystemExit or KeyboardInterrupt is already data: asyncio also stores it as the task's result, with which its
                # rollout fails. A BlockedError that comes after its code has returned belongs to no rollout.
                continue
        self._loop.close()

    def _tick(self) -> None:
        try:
            with self._tick_lock:
                self._ticked = time.monotonic()
                self._call.interrupt(None)  # a BlockedError that was not raised in time must not reach another rollout
        finally:  # a late BlockedError may be raised here
            self._loop.call_later(_TICK_S, self._tick)

    def _watch(self) -> None:
        stopped_at: float | None = None
        noticed = False
        while not self._closed.wait(_TICK_S):
            now = time.monotonic()
            if self._report is not None:
                self._report.put_off(now)
            self._look_at_left_calls(now)
            ticked = self._ticked
            seconds = now - ticked
            if seconds < NOTICEABLE_S:
                if noticed:
                    self._on_blocking("")
                noticed, stopped_at = False, None
                continue
            frames = user_frames(self._call.stack())
            noticed = True
            self._on_blocking(f"{seconds:.0f} s{user_line(frames)}")
            if stopped_at is not None and now - stopped_at > _GRACE_S:
                sentence = (
                    f"a workflow blocks its event loop for {seconds:.0f} s and cannot be stopped{user_line(frames)}"
                )
                self._on_stuck(sentence, as_traceback(frames, f"{sentence}; {TO_UNBLOCK}"))
            elif stopped_at is None and seconds > self._block_timeout_s:
                with self._tick_lock:
                    if self._ticked == ticked:
                        stopped_at = now
                        self._call.interrupt(BlockedError)


_left: list[RunningCall] = []
_left_lock = threading.Lock()


class _LockWatch:
    """Ends the process with a report if none of its threads has run for a while, because C code holds the interpreter's lock.

    The timer is that of faulthandler, which needs no lock. It is reset as long as the watching thread runs.

    Args:
        path: the report. Its first line is written now, and the stacks follow when the timer fires.
        timeout_s: longest time without a running thread.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._path, self._timeout_s = path, timeout_s
        self._put_off_at = -math.inf
        held_lock_timer.hand_over()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)
        self._file.write(
            f"a workflow or an async reward kept the interpreter's lock for {timeout_s:.0f} s, so that no other code of the explorer could "
            "run\n".encode()
        )
        self.put_off(time.monotonic())

    def put_off(self, now: float) -> None:
        """Reset the timer; called by a running thread."""
        if now - self._put_off_at > _PUT_OFF_S:
            self._put_off_at = now
            faulthandler.dump_traceback_later(self._timeout_s, exit=True, file=self._file)

    def end(self) -> None:
        """Stop watching, and remove the report."""
        faulthandler.cancel_dump_traceback_later()
        held_lock_timer.take_back()
        self._file.close()
        self._path.unlink(missing_ok=True)


def leave_behind(call: RunningCall) -> None:
    """Raise `BlockedError` in a plain workflow again and again until it ends."""
    with _left_lock:
        _left.append(call)
