"""The event loop in which workflows run: in a thread of its own, and watched.

The explorer's own loop claims, stores and takes weights; it must not wait for a user's code. Async workflows and rewards share this
loop, so that clients they keep can be shared, too. One that blocks it (a call that does not await) stops the other rollouts as long.
That is shown in `rft status`. Beyond a limit an exception is raised in the code that blocks, and its rollout fails. Code that no
exception reaches (a wait inside C code) ends the process, which reports the stack; the run goes on with another.
"""

from __future__ import annotations

import asyncio
import faulthandler
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from rftcore.explorer.failures import as_traceback, place, user_frames
from rftdata.user_code import time_limits
from rftdata.user_code.async_raise import raise_in

T = TypeVar("T")

_TICK_S = 0.25
# A shorter pause is no reason to say anything: a garbage collection, a busy machine.
NOTICEABLE_S = 2.0
_GRACE_S = 5.0
_CLOSE_S = 10.0
_ASK_AGAIN_S = 1.0
# C code that keeps the interpreter's lock is told from a busy machine and from a process that was halted for a moment.
_LOCK_SLACK_S = 15.0
_PUT_OFF_S = 2.0


TO_UNBLOCK = (
    "call it by `await asyncio.to_thread(…)`, or make the workflow a plain function (`rft docs write-a-workflow`)"
)


class BlockedError(BaseException):
    """Raised in code that blocks its thread for too long; no Exception, so that a loop which catches those ends, too."""


class WorkflowLoop:
    """Runs coroutines in a watched thread.

    Args:
        block_timeout_s: code that blocks the loop for longer is stopped.
        report: where the stacks go when code holds the interpreter's lock, so that no thread can act: the process ends then.
        on_blocking: is given the place in the code and the seconds of a noticeable block, again and again while it lasts; then "".
        on_stuck: is given a sentence and the stack of code that cannot be stopped. It should end the process.
        max_left: so many threads of plain workflows may be left that no exception ends. Each may compute, and more would slow the engine.
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
        self._closed = threading.Event()
        self._asked_left_at = 0.0
        self._report = None if report is None else _LockWatch(report, block_timeout_s + _LOCK_SLACK_S)
        self._thread = threading.Thread(target=self._run, name="workflows", daemon=True)
        self._thread.start()
        self._watcher = threading.Thread(target=self._watch, name="workflow watch", daemon=True)
        self._watcher.start()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that runs in the loop; cancelling the caller cancels it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def close(self) -> None:
        """Cancel what still runs and end the loop."""
        self._closed.set()
        self._loop.call_soon_threadsafe(self._loop.create_task, self._cancel_all())
        self._thread.join(_CLOSE_S)  # code that blocks is left behind with its daemon thread
        self._watcher.join()
        if self._report is not None:
            self._report.end()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._loop.stop()

    def _look_at_left_threads(self, now: float) -> None:
        if now - self._asked_left_at < _ASK_AGAIN_S:
            return
        self._asked_left_at = now
        with _left_lock:
            _left[:] = [thread for thread in _left if thread.is_alive()]
            alive = list(_left)
        for thread in alive:
            raise_in(thread.ident or 0, BlockedError)
        if len(alive) > self._max_left:
            frames = user_frames(thread_stack(alive[0]))
            sentence = f"{len(alive)} rollouts of a plain workflow were timed out and cannot be stopped{place(frames)}"
            self._on_stuck(sentence, as_traceback(frames, sentence))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._tick)
        while True:
            try:
                self._loop.run_forever()
                break
            except BaseException:  # noqa: BLE001 - a user's sys.exit() in a task, or BlockedError a moment too late
                continue
        self._loop.close()

    def _tick(self) -> None:
        try:
            self._ticked = time.monotonic()
        finally:  # a BlockedError that comes too late may be raised here
            self._loop.call_later(_TICK_S, self._tick)

    def _watch(self) -> None:
        stopped_at: float | None = None
        noticed = False
        while not self._closed.wait(_TICK_S):
            now = time.monotonic()
            if self._report is not None:
                self._report.put_off(now)
            self._look_at_left_threads(now)
            seconds = now - self._ticked
            if seconds < NOTICEABLE_S:
                if stopped_at is not None:
                    raise_in(
                        self._thread.ident or 0, None
                    )  # one that was not raised any more must not meet another rollout
                if noticed:
                    self._on_blocking("")
                noticed, stopped_at = False, None
                continue
            frames = user_frames(thread_stack(self._thread))
            noticed = True
            self._on_blocking(f"{seconds:.0f} s{place(frames)}")
            if stopped_at is not None and now - stopped_at > _GRACE_S:
                sentence = f"a workflow blocks its event loop for {seconds:.0f} s and cannot be stopped{place(frames)}"
                self._on_stuck(sentence, as_traceback(frames, f"{sentence}; {TO_UNBLOCK}"))
            elif stopped_at is None and seconds > self._block_timeout_s:
                stopped_at = now
                raise_in(self._thread.ident or 0, BlockedError)


_left: list[threading.Thread] = []
_left_lock = threading.Lock()


class _LockWatch:
    """Ends the process with a report where no thread of it has run for a while: C code holds the interpreter's lock.

    The timer is that of faulthandler, which needs no lock. It is put off as long as the thread that watches can run.

    Args:
        path: the report; its first line is written now, and the stacks follow when the timer fires.
        timeout_s: how long no thread may run.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._path, self._timeout_s = path, timeout_s
        self._put_off_at = -math.inf
        time_limits.hand_over_timer()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)
        self._file.write(
            f"a workflow or an async reward kept the interpreter's lock for {timeout_s:.0f} s, and nothing else of the explorer could "
            "run\n".encode()
        )
        self.put_off(time.monotonic())

    def put_off(self, now: float) -> None:
        """Fire later; called by a thread that could run."""
        if now - self._put_off_at > _PUT_OFF_S:
            self._put_off_at = now
            faulthandler.dump_traceback_later(self._timeout_s, exit=True, file=self._file)

    def end(self) -> None:
        """Watch no more, and leave no report."""
        faulthandler.cancel_dump_traceback_later()
        time_limits.take_back_timer()
        self._file.close()
        self._path.unlink(missing_ok=True)


def leave_behind(thread: threading.Thread) -> None:
    """A plain workflow's thread that should end by a `BlockedError`: it is raised again until it does."""
    with _left_lock:
        _left.append(thread)


def thread_stack(thread: threading.Thread) -> traceback.StackSummary:
    """The frames of another thread, outermost first; none where it has ended."""
    frame = sys._current_frames().get(thread.ident or -1)
    return traceback.StackSummary() if frame is None else traceback.extract_stack(frame)
