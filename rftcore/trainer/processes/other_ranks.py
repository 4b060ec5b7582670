"""The other ranks of the trainer, and calls that all ranks make together.

In the methods of a learner the ranks meet in collectives, which hang if one of them is missing. So a thread makes the calls of this
process, rank 0, while the caller's thread listens to the other ranks:

- an error of any rank, or its death, raises in the caller at once, even while this process's own call hangs;
- after any error the ranks are killed, and nothing can be called any more: the attempt ends, and the run continues from a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from typing import TypeVar, cast

from rftcore.call_thread import CallThread
from rftcore.sync.transfer.group import always_wanted
from rftcore.trainer.processes.process_group import leave_process_group
from rftcore.trainer.processes.rank_process import RankProcess
from rftdata.errors import RftError, RoleFailedError

T = TypeVar("T")

# An error of another rank may follow from a death that is about to be noticed.
_CAUSE_S = 1.0
_LEAVE_S = 10.0
_CHECK_S = 0.5
_STUCK_S = 1.0


class OtherRanks:
    """The processes of the other ranks, and the thread in which this rank makes its calls.

    Args:
        num_ranks: number of ranks, this one included.
        memory_fd: file of the memory of the batches.

    Attributes:
        ended: whether the ranks have been ended, in order or after an error.
    """

    def __init__(self, num_ranks: int, memory_fd: int) -> None:
        self.ended = False
        self._tolerated: tuple[type[RftError], ...] = ()
        self._failures: list[RftError] = []
        self._processes = [RankProcess(rank, memory_fd) for rank in range(1, num_ranks)]
        self._thread = CallThread("rank 0")

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def kill(self) -> None:
        """Kill all ranks; any thread may call this."""
        for process in self._processes:
            process.kill()

    def call(self, own: Callable[[], T], method: str, *arguments: object) -> T:
        """Call a method in every rank; return when all have returned.

        Args:
            own: the call in this rank.

        Raises:
            RoleFailedError: another rank died, or failed where this one did not.
            BaseException: what the call in this rank raised.
        """
        with self._together(method, *arguments):
            return self._run(own)

    def attempt(
        self,
        own: Callable[[], T],
        failure: type[RftError],
        method: str,
        *arguments: object,
        limit_s: float | None = None,
        check: Callable[[], None] = always_wanted,
    ) -> T:
        """Call a method that may fail in a way after which every rank can be called again.

        Args:
            failure: the class of such an error.
            limit_s: longest wait for the other ranks after this one has ended; None for as long as they live.
            check: called during that wait; an error that it raises ends the ranks.

        Raises:
            RoleFailedError: also if the others did not end in that time.
            RftError: the failure, once all ranks have ended the call.
        """
        result: T | None = None
        self._tolerated, self._failures = (failure,), []
        try:
            with self._together(method, *arguments, limit_s=limit_s, check=check):
                try:
                    result = self._run(own)
                except failure as error:
                    self._failures.insert(0, error)
        finally:
            self._tolerated = ()
        if self._failures:
            raise self._failures[0]
        return cast(T, result)

    @contextmanager
    def _together(
        self, method: str, *arguments: object, limit_s: float | None = None, check: Callable[[], None] = always_wanted
    ) -> Iterator[None]:
        """Call a method in the other ranks while the block makes the same call with `_run`."""
        try:
            self.check()
            for process in self._processes:
                process.call(method, arguments)
            yield
            started = time.monotonic()
            while any(process.busy for process in self._processes):
                left = None if limit_s is None else limit_s - (time.monotonic() - started)
                if left is not None and left <= 0:
                    raise self._no_answer(limit_s)
                check()
                self._listen(timeout_s=left if left is None else min(left, _CHECK_S))
        except BaseException:
            self._end()
            raise

    def _run(self, own: Callable[[], T]) -> T:
        """Make this rank's call, within `_together`."""
        self._thread.start(own)
        try:
            while not self._listen(self._thread):
                pass
        except RftError as error:
            # If this rank has an error, too, all ranks have the same one, and any may answer first.
            if not isinstance(error, RoleFailedError) and wait([self._thread.fileno()], _CAUSE_S):
                self._thread.result()
            raise
        try:
            result: T = self._thread.result()
        except Exception as error:
            if (death := self._death()) is not None:
                raise death from error
            raise
        return result

    def check(self) -> None:
        """Raise a RoleFailedError if a rank has died, or has been ended after an error."""
        if self.ended:
            raise RoleFailedError("the ranks of the trainer were ended after an error")
        self._listen(timeout_s=0)

    def close(self) -> None:
        """End the ranks, in order if that is still possible."""
        try:
            if not self.ended:
                self._leave_together()
        finally:
            self._end()

    def _leave_together(self) -> None:
        deadline = time.monotonic() + _LEAVE_S
        with suppress(RftError):
            for process in self._processes:
                process.call("leave", ())
            self._thread.start(leave_process_group)
            while any(process.busy for process in self._processes) and (left := deadline - time.monotonic()) > 0:
                self._listen(timeout_s=left)

    def _listen(self, own: CallThread | None = None, timeout_s: float | None = None) -> bool:
        """Wait until a rank answers or this rank's call ends; return whether the call has ended.

        Raises:
            RoleFailedError, RftError: another rank failed.
        """
        connections = [process.connection for process in self._processes]
        ready = wait([*connections, *([] if own is None else [own.fileno()])], timeout_s)
        answers = [process.answer() for process in self._processes if process.connection in ready]
        for error in answers:
            if isinstance(error, self._tolerated):
                self._failures.append(error)
            elif error is not None:
                raise self._death() or error
        return own is not None and own.fileno() in ready

    def _no_answer(self, limit_s: float | None) -> RoleFailedError:
        silent = [f"{process.rank} (pid {process.pid})" for process in self._processes if process.busy]
        return RoleFailedError(f"rank {', '.join(silent)} of the trainer did not answer within {limit_s:g} s")

    def _death(self) -> RftError | None:
        """Return why a rank died, if one has or soon does; an error of another rank then follows from that."""
        deadline = time.monotonic() + _CAUSE_S
        while True:
            for process in self._processes:
                if process.death is not None:
                    return process.death
            busy = [process for process in self._processes if process.busy]
            if not busy:
                return None
            ready = wait([process.connection for process in busy], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            for process in busy:
                if process.connection in ready:
                    process.answer()

    def _end(self) -> None:
        if self.ended:
            return
        self.ended = True
        self.kill()
        for process in self._processes:
            process.await_end()
        self._thread.leave(_STUCK_S)
