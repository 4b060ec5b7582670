"""Several processes that train one model, used like one `Learner`.

The trainer's process is rank 0. It starts the other ranks, and calls every method in all of them with the same arguments, of which the
batch lies in memory that they share. In the methods the ranks meet in collectives, which hang if one of them is missing. So a thread
makes rank 0's own calls, while the caller's thread listens to the other ranks:

- an error of any rank, or its death, raises in the caller at once, even while the own call hangs;
- after any error the ranks are killed, and nothing can be called any more: the attempt ends, and the run continues from a checkpoint.

With one rank there are neither processes nor threads, and the learner is called directly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import TypeVar, cast

from torch._C._distributed_c10d import TCPStore

from rftcore.algorithms.algorithm import Algorithm
from rftcore.call_thread import CallThread
from rftcore.sync.device_names import device_id
from rftcore.sync.files.weights_stream import Layout, begin_file
from rftcore.sync.tensors import WireTensor
from rftcore.sync.transfer.group import GroupError, always_wanted
from rftcore.sync.transfer.plan import TransferPlan
from rftcore.sync.transfer.sender import Sent, TransferSender
from rftcore.trainer.batches.train_batch import TrainBatch
from rftcore.trainer.learner import Learner
from rftcore.trainer.processes.learner_arguments import LearnerArguments
from rftcore.trainer.processes.process_group import join_process_group, leave_process_group, open_rendezvous
from rftcore.trainer.processes.rank_process import RankProcess
from rftcore.trainer.processes.shared_batch import SharedBatchMemory
from rftdata.errors import DiskFullError, RftError, RoleFailedError

T = TypeVar("T")

# Errors of other ranks may be the consequence of a death that is about to be noticed.
_CAUSE_S = 1.0
_LEAVE_S = 10.0
_CHECK_S = 0.5
_STUCK_S = 1.0
# After the time limit of what a rank waits for.
_ANSWER_S = 2.0


class LearnerGroup:
    """The learner of `trainer.num_gpus` ranks; see `Learner` for the methods that it has, too.

    Args:
        arguments: of the learner in every rank.
        algorithm: rank 0's.

    Attributes:
        own: rank 0's learner; its methods are called through this object.

    Raises:
        RoleFailedError: another rank failed or died; every call may raise it.
        RftError: see `Learner`.
    """

    def __init__(self, arguments: LearnerArguments, algorithm: Algorithm) -> None:
        self.num_ranks = arguments.config.num_gpus or 1
        make = partial(arguments.learner, algorithm)
        self._sender = TransferSender()
        self._others: OtherRanks | None = None
        if self.num_ranks == 1:
            self.own = make()
            return
        rendezvous, self._store = open_rendezvous(self.num_ranks, arguments.config.num_threads)
        self._memory = SharedBatchMemory()
        self._others = OtherRanks(self.num_ranks, self._memory.fd)

        def join_and_make() -> Learner:
            join_process_group(rendezvous, 0, self._store)
            return make()

        self.own = self._others.call(join_and_make, "make", rendezvous, arguments)

    @property
    def algorithm(self) -> Algorithm:
        return self.own.algorithm

    @property
    def pids(self) -> list[int]:
        """The processes of the other ranks."""
        return [] if self._others is None else self._others.pids

    def kill_others(self) -> None:
        """Kill the processes of the other ranks, whatever they do; this object is then unusable."""
        if self._others is not None:
            self._others.kill()

    def update(self, batch: TrainBatch, step: int) -> dict[str, float]:
        with self.own.progress.step():  # of all ranks: in a step they wait for each other
            if self._others is None:
                return self.own.update(batch, step)
            return self._others.call(partial(self.own.update, batch, step), "update", self._memory.write(batch), step)

    def stuck_s(self) -> float:
        """Return the seconds since a step made progress; 0 outside one. Called in any thread."""
        return self.own.progress.stuck_s()

    def write_weights(self, places: Layout, tensors: tuple[WireTensor, ...], path: Path) -> None:
        """Write the weights as they are now into a file, each rank the rows that it holds.

        Args:
            places: of all tensors.
            tensors: see `weight_tensors`.

        Raises:
            DiskFullError, OSError: there is no space. The ranks can be called again.
        """
        begin_file(places, path)
        own = partial(self.own.write_weights, places, tensors, path)
        with self.own.progress.step():  # of all ranks, which have about as much to write
            if self._others is None:
                own()
            else:
                self._others.attempt(own, DiskFullError, "write_weights", places, tensors, path)

    @property
    def weight_group_id(self) -> int | None:
        """The group in which all ranks can send weights; None if they are in none."""
        return None if self._sender.group is None else self._sender.group.group_id

    def weight_devices(self) -> str:
        """Ids of the ranks' devices, with commas."""
        if self.own.device.type == "cpu" or self.num_ranks == 1:
            return ",".join([device_id(str(self.own.device))] * self.num_ranks)
        return ",".join(device_id(f"cuda:{rank}") for rank in range(self.num_ranks))

    def weight_tensors(self, adapters_alone: bool = False) -> tuple[WireTensor, ...]:
        """See `Learner.wire_tensors`."""
        return self.own.wire_tensors(adapters_alone)

    def send_weights(self, plan: TransferPlan, store: TCPStore, check: Callable[[], None] = always_wanted) -> Sent:
        """Send the weights as they are now into engines, each rank what it holds. After an error no rank is in the plan's group any more.

        Args:
            store: where the plan's group meets.
            check: called while engines are waited for; what it raises ends the transfer, and the other ranks.

        Raises:
            GroupError: a member of the group failed or did not come; the ranks are whole.
            RoleFailedError: a rank did not end within `plan.timeout_s` after this one had.
        """

        def own() -> Sent:
            return self._sender.send(plan, self.own.held_rows(plan), store, check)

        if self._others is None:
            return own()
        try:
            limit_s = plan.timeout_s + _ANSWER_S
            return self._others.attempt(own, GroupError, "send_weights", plan, limit_s=limit_s, check=check)
        except GroupError:
            self.leave_weight_group()
            raise

    def leave_weight_group(self) -> None:
        """Leave the engines' group, if the ranks are in one."""
        self._sender.leave()
        if self._others is not None and not self._others.ended:
            self._others.call(lambda: None, "leave_weight_group")

    def leave_device(self, to_host: bool) -> int:
        """See `Learner`; for one rank, because several share no device with an engine."""
        return self.own.leave_device(to_host)

    def to_device(self) -> None:
        self.own.to_device()

    def begin_checkpoint(self, folder: Path) -> None:
        with self.own.progress.step():
            self._call("begin_checkpoint", folder)

    @property
    def has_written_checkpoint(self) -> bool:
        """Whether a checkpoint was begun, and `end_checkpoint` would not wait."""
        return self.own.writer.has_written  # the first rank writes last

    def end_checkpoint(self) -> None:
        """Wait until the checkpoint that was begun is on disk.

        Raises:
            DiskFullError: no room; there is no folder then.
        """
        if self._others is None:
            self.own.writer.end()
        else:
            self._others.call(self.own.writer.end, "end_checkpoint")

    def load_checkpoint(self, folder: Path) -> None:
        self._call("load_checkpoint", folder)

    def save_pretrained(self, folder: Path) -> None:
        self._call("save_pretrained", folder)

    def check(self) -> None:
        """Raise if a rank has died since the last call."""
        if self._others is not None:
            self._others.check()

    def close(self) -> None:
        """End the other ranks, and leave a checkpoint that is not written yet."""
        if self._others is not None:
            self._others.close()
            self._memory.close()
        self.own.writer.leave()

    def _call(self, method: str, folder: Path) -> None:
        own = partial(getattr(self.own, method), folder)
        if self._others is None:
            own()
        else:
            self._others.call(own, method, folder)


class OtherRanks:
    """The processes of the other ranks, and the thread in which this one makes its calls.

    Args:
        num_ranks: this one included.
        memory_fd: the memory of the batches.

    Attributes:
        ended: whether the ranks have been ended, in good order or after an error.
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
        """Kill all ranks, from whichever thread."""
        for process in self._processes:
            process.kill()

    def call(self, own: Callable[[], T], method: str, *arguments: object) -> T:
        """Call a method in every rank; return when all have done it.

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
        """Like `call`, for a method that may fail in a way that leaves every rank whole.

        Args:
            failure: what it raises then.
            limit_s: longest wait for the other ranks after this one has ended; None for as long as they live.
            check: called during that wait; what it raises ends the ranks.

        Raises:
            RoleFailedError: also if the others did not end in that time.
            RftError: the failure, once all ranks have ended the call.
        """
        found: T | None = None
        self._tolerated, self._failures = (failure,), []
        try:
            with self._together(method, *arguments, limit_s=limit_s, check=check):
                try:
                    found = self._run(own)
                except failure as error:
                    self._failures.insert(0, error)
        finally:
            self._tolerated = ()
        if self._failures:
            raise self._failures[0]
        return cast(T, found)

    @contextmanager
    def _together(
        self, method: str, *arguments: object, limit_s: float | None = None, check: Callable[[], None] = always_wanted
    ) -> Iterator[None]:
        """Call a method in the other ranks while the block makes the same call with `_run`."""
        try:
            self.check()
            for process in self._processes:
                process.ask(method, arguments)
            yield
            started = time.monotonic()
            while any(process.busy for process in self._processes):
                left = None if limit_s is None else limit_s - (time.monotonic() - started)
                if left is not None and left <= 0:
                    raise self._silence(limit_s)
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
            # An error that this rank has, too, is the same in all; which rank is heard first is chance.
            if not isinstance(error, RoleFailedError) and wait([self._thread.fileno()], _CAUSE_S):
                self._thread.result()
            raise
        try:
            found: T = self._thread.result()
        except Exception as error:
            if (death := self._death()) is not None:
                raise death from error
            raise
        return found

    def check(self) -> None:
        """Raise a RoleFailedError if a rank has died, or has been ended after an error."""
        if self.ended:
            raise RoleFailedError("the ranks of the trainer were ended after an error")
        self._listen(timeout_s=0)

    def close(self) -> None:
        """End the ranks in good order if that is still possible."""
        try:
            if not self.ended:
                self._leave_together()
        finally:
            self._end()

    def _leave_together(self) -> None:
        deadline = time.monotonic() + _LEAVE_S
        with suppress(RftError):
            for process in self._processes:
                process.ask("leave", ())
            self._thread.start(leave_process_group)
            while any(process.busy for process in self._processes) and (left := deadline - time.monotonic()) > 0:
                self._listen(timeout_s=left)

    def _listen(self, own: CallThread | None = None, timeout_s: float | None = None) -> bool:
        """Wait until a rank answers or this one's call ends; return whether the call has ended.

        Raises:
            RoleFailedError, RftError: of the rank that failed.
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

    def _silence(self, limit_s: float | None) -> RoleFailedError:
        silent = [f"{process.rank} (pid {process.pid})" for process in self._processes if process.busy]
        return RoleFailedError(f"rank {', '.join(silent)} of the trainer did not answer within {limit_s:g} s")

    def _death(self) -> RftError | None:
        """Return why a rank died, if one has or does so soon; an error of another rank is then only a consequence."""
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
