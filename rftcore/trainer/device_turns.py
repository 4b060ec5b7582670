"""Device turns: when the trainer computes on a device that it shares with an engine (`explorer.sleep`).

Between its turns the trainer keeps weights and optimizer state in the memory of the host, or on the device (`trainer.offload`). It asks for a turn
once it has what it needs from the explorer: a batch, and the answers to evaluations, which need the device for longer than a turn lasts.
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
from rftdata.workers.device_turns import DeviceTurn
from rftdata.workers.worker import Worker

_WAIT_S = 0.5


def device_turns_of(config: RunConfig, attempt: Attempt, worker: Worker) -> TrainerDeviceTurns:
    """Return the device turns of a run's trainer, which takes them only on a device that it may share. A lost attempt ends the wait for one."""
    run = attempt.run
    shares = config.explorer.sleep and config.has_explorer and (config.trainer.num_gpus or 1) == 1
    turn = DeviceTurn(run, worker.worker_id, own_device(), attempt.check) if shares else None
    return TrainerDeviceTurns(run, worker, turn, offload=config.trainer.offload)


class TrainerDeviceTurns:
    """The device turns of one trainer.

    Args:
        turn: None where the trainer has the device to itself.
        offload: keep the learner's state in the memory of the host between turns.

    Attributes:
        learner: its state is moved between turns; None until it is built.
    """

    def __init__(self, run: Run, worker: Worker, turn: DeviceTurn | None, *, offload: bool) -> None:
        self._run, self._worker, self._turn, self._offload = run, worker, turn, offload
        self._has_turn = False
        self.learner: LearnerGroup | None = None

    def take(self, stop: Callable[[], bool], *, after_evaluations: bool = True) -> bool:
        """Begin a turn, unless it has begun; return False if `stop` ended the wait.

        Args:
            after_evaluations: whether pending evaluations are answered first.
        """
        if self._turn is None or (self._has_turn and self._turn.is_mine()):
            return True
        if self._has_turn:  # another worker took it while this process counted as dead
            self._leave_device()
        while after_evaluations and num_open_evaluations(self._run):
            self._worker.set_state("waits", "the explorer to answer evaluations")
            if stop():
                return False
            self._turn.wait(_WAIT_S)
        while not self._turn.take():
            self._worker.set_state("waits", "its turn on the device, which the explorer has")
            if stop():
                self._turn.waive()
                return False
            self._turn.wait(_WAIT_S)
        self._has_turn = True
        failpoint("trainer.device_turn_taken")
        if self._offload and self.learner is not None:
            self.learner.to_device()
        return True

    def free(self) -> None:
        """Free memory that only a step needs, before the engine takes memory for new weights."""
        if self._turn is not None and self._has_turn and self.learner is not None:
            self.learner.leave_device(False)

    def give(self) -> None:
        """End the turn, if it has begun."""
        if self._turn is None or not self._has_turn:
            return
        self._leave_device()
        failpoint("trainer.device_turn_ends")
        self._turn.give()

    def _leave_device(self) -> None:
        if self.learner is not None:
            self.learner.leave_device(self._offload)
        self._has_turn = False

    @contextlib.contextmanager
    def own(self, stop: Callable[[], bool]) -> Iterator[bool]:
        """Take a turn for the block, or keep the present one; yield False if `stop` ended the wait."""
        had = self._has_turn
        has_turn = self.take(stop, after_evaluations=False)
        try:
            yield has_turn
        finally:
            if not had:
                self.give()

    def leave(self) -> None:
        """Ask for no further turn."""
        if self._turn is not None:
            self._turn.leave()
