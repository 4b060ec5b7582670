"""The processes that run plain functions of the user.

The first starts with the first call. More start, up to a limit, while calls wait for a free one, so quick functions use one
process and slow ones several. A process in which a call exceeded its time limit is replaced. A process gets several calls of quick
functions at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rftcore.user_functions.function_process import Answer, FunctionProcess, Functions, Question
from rftdata.errors import EngineStoppedError

_CROWDED_S = 0.3
# Calls that a process gets at a time: as many as it is expected to answer in this time, so that none waits long behind another.
_AT_A_TIME_S = 0.01
_MOST_AT_A_TIME = 32
_WEIGHT_OF_NEWEST = 0.3


@dataclass(frozen=True, eq=False)
class _Call:
    question: Question
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]
    asked_at: float = field(default_factory=time.monotonic)


class FunctionProcesses:
    """Calls functions, from any event loop, with any number of concurrent calls. Waiting for a free process does not count as time of a call."""

    def __init__(self, functions: Functions, max_processes: int) -> None:
        self._functions, self._max_processes = functions, max_processes
        self._changed = threading.Condition()
        self._waiting: deque[_Call] = deque()
        self._seconds: dict[str, float] = {}  # of a call, by function
        self._threads: list[threading.Thread] = []  # one per process
        self._processes: set[FunctionProcess] = set()
        self._num_starting = self._num_idle = 0
        self._started_at = -math.inf  # end of the last start of a process
        self._looks_at = -math.inf
        self._closed = False

    async def call(self, question: Question) -> Any:
        """Return the result of a function.

        Raises:
            FunctionFailedError: the function raised, took too long or ended its process.
            RftError: the function raised it.
        """
        loop = asyncio.get_running_loop()
        call = _Call(question, loop, loop.create_future())
        with self._changed:
            if self._closed:
                raise self._stopping()
            self._waiting.append(call)
            self._changed.notify()
            if not self._threads:
                self._add_thread()
            self._look_later(loop)
        return await call.answer

    def close(self) -> None:
        """End the processes; running calls fail."""
        with self._changed:
            self._closed = True
            for call in self._waiting:
                _deliver([(call, Answer(self._stopping(), 0.0))])
            self._waiting.clear()
            for process in self._processes:
                process.kill()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()  # running calls end now

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look in a while whether calls wait. The loop may end before that; the next call then plans another look."""
        now = time.monotonic()
        if now > self._looks_at:
            self._looks_at = now + _CROWDED_S
            loop.call_later(_CROWDED_S, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._changed:
            if not self._waiting or self._closed:
                return
            # The start of a process may serve all waiting calls.
            waits_since = max(self._waiting[0].asked_at, self._started_at)
            if self._num_starting == 0 and time.monotonic() - waits_since >= _CROWDED_S and self._has_room():
                self._add_thread()
            self._looks_at = -math.inf
            self._look_later(loop)

    def _has_room(self) -> bool:
        return len(self._threads) < self._max_processes

    def _add_thread(self) -> None:
        self._num_starting += 1
        thread = threading.Thread(target=self._work, name=self._functions.kind, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        """Serve calls with one process, until the end."""
        process: FunctionProcess | None = None
        try:
            with self._changed:
                self._num_starting -= 1
            while calls := self._next_calls():
                # It may have ended between two calls, for example for lack of memory.
                if process is None or not process.usable or not process.is_alive():
                    self._drop(process)
                    process = None
                    try:
                        process = self._start()
                    except Exception as error:  # noqa: BLE001 - the callers get it
                        _deliver([(call, Answer(error, 0.0)) for call in calls])
                        continue
                self._serve(process, calls)
        finally:
            self._drop(process)

    def _next_calls(self) -> list[_Call]:
        """Wait for calls; return none at the end."""
        calls: list[_Call] = []
        with self._changed:
            while not calls:
                self._num_idle += 1
                while not self._waiting and not self._closed:
                    self._changed.wait()
                self._num_idle -= 1
                if self._closed:
                    return []
                seconds = 0.0
                while self._waiting and len(calls) < _MOST_AT_A_TIME:
                    seconds += self._seconds.get(self._waiting[0].question.name, math.inf)
                    if calls and seconds > _AT_A_TIME_S:
                        break
                    call = self._waiting.popleft()
                    if not call.answer.done():  # cancelled
                        calls.append(call)
        return calls

    def _serve(self, process: FunctionProcess, calls: list[_Call]) -> None:
        """Answer calls. Those behind a slow one, or one that ended the process, wait for another process."""
        left = deque(calls)
        try:
            for answers, num_withdrawn in process.call([call.question for call in calls]):
                answered = [(left.popleft(), answer) for answer in answers]
                for call, answer in answered:
                    self._record(call.question.name, answer.seconds)
                _deliver(answered)
                self._take_back([left.pop() for _ in range(num_withdrawn)])
        except Exception as error:  # noqa: BLE001 - a call without an answer would wait forever
            process.kill()
            if left:
                _deliver([(left.popleft(), Answer(error, 0.0))])
            self._take_back(list(reversed(left)))

    def _take_back(self, calls: list[_Call]) -> None:
        """Let calls, the last first, wait for another process; start one if no other is idle."""
        if not calls:
            return
        with self._changed:
            if self._closed:
                _deliver([(call, Answer(self._stopping(), 0.0)) for call in calls])
                return
            self._waiting.extendleft(calls)
            self._changed.notify(len(calls))
            if self._num_idle == 0 and self._num_starting == 0 and self._has_room():
                self._add_thread()

    def _record(self, name: str, seconds: float) -> None:
        known = self._seconds.get(name, seconds)
        self._seconds[name] = max(seconds, known + _WEIGHT_OF_NEWEST * (seconds - known))

    def _start(self) -> FunctionProcess:
        with self._changed:
            if self._closed:
                raise self._stopping()
            process = FunctionProcess()
            self._processes.add(process)
            self._num_starting += 1
        try:
            process.load(self._functions)
        except BaseException:
            self._drop(process)
            raise
        finally:
            with self._changed:
                self._num_starting -= 1
                self._started_at = time.monotonic()
        return process

    def _drop(self, process: FunctionProcess | None) -> None:
        if process is not None:
            with self._changed:
                self._processes.discard(process)
            process.close()

    def _stopping(self) -> EngineStoppedError:
        return EngineStoppedError(f"the explorer is stopping, so no {self._functions.kind} is called any more")


def _deliver(answered: Iterable[tuple[_Call, Answer]]) -> None:
    """Give answers to the calls that wait for them, once for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Call, Answer]]] = {}
    for call, answer in answered:
        by_loop.setdefault(call.loop, []).append((call, answer))
    for loop, answers in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed, and its calls with it
            loop.call_soon_threadsafe(_set_answers, answers)


def _set_answers(answered: list[tuple[_Call, Answer]]) -> None:
    for call, (value, _) in answered:
        if call.answer.done():
            continue
        if isinstance(value, Exception):
            call.answer.set_exception(value)
        else:
            call.answer.set_result(value)
