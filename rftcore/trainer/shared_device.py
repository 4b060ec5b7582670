"""The trainer's side of a device that it shares with an engine (`explorer.sleep`): when it computes there.

While the engine has the device, the trainer keeps weights and optimizer state in the memory of the host, or on the device (`trainer.offload`). It
asks for the device once it has what it needs from the explorer: a batch, and the answers to evaluations, which need the device for longer than
a step lasts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rftcore.config.run import RunConfig
from rftcore.sync.device_names import own_device
from rftcore.trainer.processes.learner_group import LearnerGroup
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.evaluations import num_open_evaluations
from rftdata.failpoints import failpoint
from rftdata.run import Run
from rftdata.workers.shared_device import SharedDevice
from rftdata.workers.worker import Worker

_WAIT_S = 0.5


def trainer_device_of(config: RunConfig, attempt: Attempt, worker: Worker) -> TrainerDevice:
    """Return the device of a run's trainer, which waits for it only where it may share it. A lost attempt ends the wait."""
    run = attempt.run
    shares = config.explorer.sleep and config.has_explorer and (config.trainer.num_gpus or 1) == 1
    device = SharedDevice(run, worker.worker_id, own_device(), attempt.check) if shares else None
    return TrainerDevice(run, worker, device, offload=config.trainer.offload)


class TrainerDevice:
    """The device of one trainer.

    Args:
        device: None where the trainer has it to itself.
        offload: keep the learner's state in the memory of the host while the engine has the device.

    Attributes:
        learner: its state is moved off the device and back; None until it is built.
    """

    def __init__(self, run: Run, worker: Worker, device: SharedDevice | None, *, offload: bool) -> None:
        self._run, self._worker, self._device, self._offload = run, worker, device, offload
        self._has_device = False
        self.learner: LearnerGroup | None = None

    @property
    def is_shared(self) -> bool:
        return self._device is not None

    def take(self, stop: Callable[[], bool], *, after_evaluations: bool = True) -> bool:
        """Take the device, unless the trainer has it; return False if `stop` ended the wait.

        Args:
            after_evaluations: whether pending evaluations are answered first.
        """
        if self._device is None or (self._has_device and self._device.is_mine()):
            return True
        if self._has_device:  # another worker took it while this process counted as dead
            self._leave_device()
        while after_evaluations and num_open_evaluations(self._run):
            self._worker.set_state("waits", "the explorer to answer evaluations")
            if stop():
                return False
            self._device.wait(_WAIT_S)
        while not self._device.take():
            self._worker.set_state("waits", "the device, which the explorer has")
            if stop():
                self._device.waive()
                return False
            self._device.wait(_WAIT_S)
        self._has_device = True
        failpoint("trainer.device_taken")
        if self._offload and self.learner is not None:
            self.learner.to_device()
        return True

    def free(self) -> None:
        """Free memory that only a step needs, before the engine takes memory for new weights."""
        if self._device is not None and self._has_device and self.learner is not None:
            self.learner.leave_device(False)

    def give(self) -> None:
        """Give the device, if the trainer has it."""
        if self._device is None or not self._has_device:
            return
        self._leave_device()
        failpoint("trainer.device_freed")
        self._device.give()

    def _leave_device(self) -> None:
        if self.learner is not None:
            self.learner.leave_device(self._offload)
        self._has_device = False

    @contextlib.contextmanager
    def own(self, stop: Callable[[], bool]) -> Iterator[bool]:
        """Take the device for the block, or keep it; yield False if `stop` ended the wait."""
        had = self._has_device
        has_device = self.take(stop, after_evaluations=False)
        try:
            yield has_device
        finally:
            if not had:
                self.give()

    def leave(self) -> None:
        """Stop asking for the device."""
        if self._device is not None:
            self._device.leave()
