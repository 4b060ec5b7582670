"""The processes that run an explorer's plain reward functions.

The first starts with the first call. More start, up to a limit, while calls wait for a free one, so quick functions use one
process and slow ones several. A process in which a call exceeded its time limit is replaced.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rftcore.explorer.reward_process import RewardProcess
from rftcore.explorer.reward_value import CheckedValue
from rftcore.explorer.rollout_clock import clock_suspended
from rftcore.workflows.task import Task, Turn
from rftdata.errors import EngineStoppedError

_CROWDED_S = 0.3


class RewardProcesses:
    """Calls rewards, from any event loop, with any number of concurrent calls.

    Args:
        names: rewards as named in the configuration.
        base_dir: folder of the configuration file.
        timeout_s: a call that takes longer fails; waiting for a free process does not count.
        limit: the setting with that value, for messages.
        max_processes: maximum number of processes.
    """

    def __init__(self, names: list[str], base_dir: Path, timeout_s: float, limit: str, max_processes: int) -> None:
        self._names, self._base_dir, self._timeout_s, self._limit = names, base_dir, timeout_s, limit
        self._idle: queue.LifoQueue[RewardProcess] = queue.LifoQueue()
        self._processes: set[RewardProcess] = set()
        self._closed = False
        self._starting = threading.Lock()
        # One thread per process, which waits for its answers.
        self._threads = ThreadPoolExecutor(max_processes, thread_name_prefix="reward")

    async def call(self, name: str, turn: Turn, task: Task) -> CheckedValue:
        """Return the result of a reward.

        Raises:
            FunctionFailedError, RftError: see `RewardProcess.call`.
        """
        with clock_suspended():  # the call has its own limit, and may wait for others
            return await asyncio.wrap_future(self._threads.submit(self._call, name, turn, task))

    def close(self) -> None:
        """End the processes; running calls fail."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self._processes):
            process.kill()
        self._threads.shutdown(wait=True)  # running calls end now
        while not self._idle.empty():
            self._idle.get().close()

    def _call(self, name: str, turn: Turn, task: Task) -> CheckedValue:
        process = self._take()
        try:
            return process.call(name, turn, task, self._timeout_s, self._limit)
        finally:
            if process.usable:
                self._idle.put(process)
            else:
                self._drop(process)

    def _take(self) -> RewardProcess:
        with self._starting:  # one after the other, because the start of the first may serve all waiting calls
            while True:
                try:
                    process = self._idle.get(timeout=_CROWDED_S if self._processes else 0.001)
                except queue.Empty:
                    return self._start()
                if process.is_alive():
                    return process
                self._drop(process)  # it ended between two calls, for example for lack of memory

    def _start(self) -> RewardProcess:
        process = RewardProcess()
        self._processes.add(process)
        try:
            if self._closed:
                raise EngineStoppedError("the explorer is stopping, so no more rewards are computed")
            process.load(self._names, self._base_dir)
        except BaseException:
            self._drop(process)
            raise
        return process

    def _drop(self, process: RewardProcess) -> None:
        self._processes.discard(process)
        process.close()
