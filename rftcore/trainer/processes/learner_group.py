"""Several processes that train one model, used like one `Learner`.

The trainer's process is rank 0. It starts the other ranks, and calls every method in all of them with the same arguments; the batch lies
in memory that all of them share. `rftcore.trainer.processes.other_ranks` describes what happens when a rank fails.

With one rank there are neither processes nor threads, and the learner is called directly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from rftcore.algorithms.algorithm import Algorithm
from rftcore.sync.device_names import device_id
from rftcore.sync.files.weights_stream import Layout, begin_file
from rftcore.sync.tensors import WireTensor
from rftcore.sync.transfer.group import GroupError, always_wanted
from rftcore.sync.transfer.plan import TransferPlan
from rftcore.sync.transfer.sender import Sent, TransferSender
from rftcore.trainer.batches.train_batch import TrainBatch
from rftcore.trainer.learner import Learner
from rftcore.trainer.processes.other_ranks import OtherRanks
from rftcore.trainer.processes.process_group import join_process_group, open_rendezvous
from rftcore.trainer.processes.rank_arguments import RankArguments
from rftcore.trainer.processes.shared_batch import SharedBatchMemory
from rftcore.trainer.step.compilation import CompiledPart
from rftdata.errors import DiskFullError

# After the time limit of what a rank waits for.
_ANSWER_S = 2.0


class LearnerGroup:
    """The learner of `trainer.num_gpus` ranks. See `Learner` for methods of the same name.

    Args:
        arguments: of every rank.
        algorithm: of rank 0.

    Attributes:
        own: the learner of rank 0. Call its methods through this object, so that all ranks call them.

    Raises:
        RoleFailedError: another rank failed or died; every call may raise it.
        RftError: see `Learner`.
    """

    def __init__(self, arguments: RankArguments, algorithm: Algorithm) -> None:
        config = arguments.learner.config
        self.num_ranks = config.num_gpus or 1
        self._sender = TransferSender()
        self._others: OtherRanks | None = None
        if self.num_ranks == 1:
            self.own = Learner(arguments.learner, algorithm)
            return
        rendezvous, self._store = open_rendezvous(self.num_ranks, config.num_threads)
        self._memory = SharedBatchMemory()
        self._others = OtherRanks(self.num_ranks, self._memory.fd)

        def join_and_make() -> Learner:
            join_process_group(rendezvous, 0, self._store)
            return Learner(arguments.learner, algorithm)

        self.own = self._others.call(join_and_make, "make", rendezvous, arguments)

    @property
    def algorithm(self) -> Algorithm:
        return self.own.algorithm

    @property
    def pids(self) -> list[int]:
        """The processes of the other ranks."""
        return [] if self._others is None else self._others.pids

    def kill_others(self) -> None:
        """Kill the processes of the other ranks at once; this object is then unusable."""
        if self._others is not None:
            self._others.kill()

    def update(self, batch: TrainBatch, step: int) -> dict[str, float]:
        with self.own.progress.step():  # for all ranks, which wait for each other within a step
            if self._others is None:
                return self.own.update(batch, step)
            return self._others.call(partial(self.own.update, batch, step), "update", self._memory.write(batch), step)

    def compile(self, part: CompiledPart) -> None:
        """Compile one of `own.compilation.parts` in all ranks."""
        with self.own.progress.step():
            if self._others is None:
                self.own.compilation.compile(part)
            else:
                self._others.call(partial(self.own.compilation.compile, part), "compile", part)

    def stuck_s(self) -> float:
        """Return the seconds since a step made progress; 0 outside one. Called in any thread."""
        return self.own.progress.stuck_s()

    def write_weights(self, places: Layout, tensors: tuple[WireTensor, ...], path: Path) -> None:
        """Write the current weights into a file; each rank writes the rows that it holds.

        Args:
            places: of all tensors.
            tensors: see `weight_tensors`.

        Raises:
            DiskFullError, OSError: no space. The ranks can be called again.
        """
        begin_file(places, path)
        own = partial(self.own.write_weights, places, tensors, path)
        with self.own.progress.step():  # for all ranks, which have about as much to write
            if self._others is None:
                own()
            else:
                self._others.attempt(own, DiskFullError, "write_weights", places, tensors, path)

    @property
    def weight_group_id(self) -> int | None:
        """Id of the group in which all ranks can send weights; None if they are in none."""
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
        """Send the current weights into engines; each rank sends the rows that it holds. After an error no rank is in the plan's group any more.

        Args:
            store: the meeting place of the plan's group.
            check: called while waiting for engines; an error that it raises ends the transfer, and the other ranks.

        Raises:
            GroupError: a member of the group failed or did not join. The ranks can be called again.
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
        """See `Learner`. For one rank only: several ranks share no device with an engine."""
        return self.own.leave_device(to_host)

    def to_device(self) -> None:
        self.own.to_device()

    def begin_checkpoint(self, folder: Path) -> None:
        with self.own.progress.step():
            self._call("begin_checkpoint", folder)

    @property
    def has_written_checkpoint(self) -> bool:
        """Whether a checkpoint was begun and is written, so that `end_checkpoint` would not wait."""
        return self.own.writer.has_written  # the first rank writes last

    def end_checkpoint(self) -> None:
        """Wait until the checkpoint that was begun is on disk.

        Raises:
            DiskFullError: no room; no folder is left.
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
        """End the other ranks, and leave an unfinished checkpoint as a draft."""
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
