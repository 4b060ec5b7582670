"""Explorer's side of a transfer into a live engine: acknowledge an offer, take the weights, and report how it ended.

An explorer acknowledges only when it is ready to take the weights at once, and its engine samples on until the members of the group are
known. If it misses a version it asks for the file.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from rftcore.sync.tensors import AdaptersConfig, TensorShapes, WireTensor, from_json, shapes_of
from rftcore.sync.transfer.plan import TransferPlan
from rftcore.sync.transfer.reception import Reception
from rftdata.attempts.policies import PolicyVersion, newest_policy
from rftdata.attempts.transfers import Answers, Receipt, Transfer
from rftdata.config import SyncConfig
from rftdata.errors import EngineStoppedError, ModelError, RftError
from rftdata.failpoints import failpoint
from rftdata.run import Run

logger = logging.getLogger(__name__)

Refuse = Callable[[TensorShapes, AdaptersConfig | None], None]


@dataclass(frozen=True)
class Outcome:
    """How an offer ended.

    Attributes:
        checksum: checksum of the weights that are in the engine now; None if they are not those that were offered.
        was_sent: whether the transfer began, so that the old weights may be gone.
        pause_seconds: time for which the engine did not sample.
    """

    checksum: str | None = None
    was_sent: bool = False
    pause_seconds: float = 0.0


class LiveReceiver:
    """Takes weights for one engine.

    Args:
        reception: how the engine takes weights; None for an engine that loads files only.
        receive: `Engine.receive_weights`.
        refuse: `Engine.refuse_unfit`.
    """

    def __init__(
        self,
        run: Run,
        worker_id: int,
        config: SyncConfig,
        reception: Reception | None,
        receive: Callable[[TransferPlan, int], str],
        refuse: Refuse = lambda tensors, adapters: None,
    ) -> None:
        self._run = run
        self._answers = Answers(run, worker_id)
        self._config = config
        self._reception = reception
        self._receive = receive
        self._refuse = refuse
        self._sent_by = 0  # the attempt whose tensors these are
        self._tensors: tuple[WireTensor, ...] = ()
        self._adapters: AdaptersConfig | None = None
        self._group_id: int | None = None
        self._state: tuple[bool, int | None] | None = None

    def set_ready(self, ready: bool) -> None:
        """Report whether the engine can take weights now, so that the trainer need not wait for it."""
        self._set_state(ready and self._reception is not None, None if self._state is None else self._state[1])

    def wait(self, timeout_s: float) -> None:
        """Wait until the trainer has done something, or the time is over."""
        self._answers.wait(timeout_s)

    def take(self, policy: PolicyVersion, stop: Callable[[], bool]) -> Outcome:
        """Take a version that is offered.

        Blocks until the transfer has ended. Without an offer, or after a failure, it returns; a further offer may come, or the file.

        Args:
            stop: called while the trainer forms the group; true ends the wait.
        """
        version = policy.policy_version_id
        if self._reception is None:
            self._set_state(False, version)
            return Outcome()
        transfer = self._answers.newest(version)
        if transfer is None and policy.method == "nccl":
            return Outcome()  # the offer follows
        if transfer is None or transfer.status != "offered":
            self._set_state(True, version)
            return Outcome()
        self._look_up_tensors(transfer.attempt_id)
        try:
            self._refuse(shapes_of(self._tensors), self._adapters)
        except ModelError as error:
            # In a group it would fail for all members. The file leads to the same error, which ends this explorer.
            logger.warning("policy version %d: %s", version, str(error))
            self._set_state(True, version)
            return Outcome()
        self._answers.acknowledge(
            transfer.transfer_id,
            host=socket.gethostname(),
            device=self._reception.device,
            dtype=self._reception.dtype,
            in_float32=self._reception.in_float32,
            num_ranks=self._reception.num_ranks,
            group_id=self._group_id,
            kv_cache=self._reception.kv_cache,
        )
        failpoint("explorer.weights_acknowledged")
        plan = self._await_group(transfer.transfer_id, version, stop)
        return Outcome() if plan is None else self._apply(plan, version)

    def is_offered(self, policy: PolicyVersion) -> bool:
        """Return whether the trainer offers a version right now."""
        transfer = None if self._reception is None else self._answers.newest(policy.policy_version_id)
        return transfer is not None and transfer.status == "offered"

    def leave(self) -> None:
        """Report that this explorer takes no further weights."""
        self._set_state(False, None)
        self._answers.leave()

    def _await_group(self, transfer_id: int, version: int, stop: Callable[[], bool]) -> TransferPlan | None:
        """Return the plan once the group is fixed; None if the trainer went on without this explorer."""
        deadline = time.monotonic() + self._config.acknowledge_s + self._config.timeout_s
        while time.monotonic() < deadline:
            # In this order: the group is fixed in the transaction that gives this explorer a rank in it.
            own = self._answers.own(transfer_id)
            transfer = self._answers.newest(version)
            if transfer is None or own is None or transfer.transfer_id != transfer_id:
                break
            if own.status == "failed" or transfer.status == "ended" or not self._is_newest(version) or stop():
                break
            if own.first_rank is not None:
                return self._plan(transfer, own)
            self._answers.wait(0.25)
        self._set_state(True, version)
        return None

    def _look_up_tensors(self, attempt_id: int) -> None:
        if self._sent_by != attempt_id:
            tensors, self._adapters = self._answers.tensors(attempt_id)
            self._sent_by, self._tensors = attempt_id, from_json(tensors)

    def _is_newest(self, version: int) -> bool:
        """Return whether no other trainer has taken over the run and published since."""
        policy = newest_policy(self._run)
        return policy is not None and policy.policy_version_id == version

    def _plan(self, transfer: Transfer, own: Receipt) -> TransferPlan:
        assert transfer.group_id and transfer.backend and transfer.address and transfer.num_ranks
        assert transfer.dtype and transfer.bucket_bytes and own.first_rank
        host, _, port = transfer.address.rpartition(":")
        return TransferPlan(
            transfer_id=transfer.transfer_id,
            group_id=transfer.group_id,
            backend=transfer.backend,
            host=host,
            port=int(port),
            num_ranks=transfer.num_ranks,
            first_rank=own.first_rank,
            tensors=self._tensors,
            dtype=transfer.dtype,
            bucket_bytes=transfer.bucket_bytes,
            timeout_s=self._config.timeout_s,
            adapters=self._adapters,
            in_float32=tuple(transfer.in_float32 or ()),
        )

    def _apply(self, plan: TransferPlan, version: int) -> Outcome:
        started = time.monotonic()
        try:
            checksum = self._receive(plan, version)
        except EngineStoppedError:
            raise
        except RftError as error:
            logger.warning("policy version %d: %s", version, str(error))
            self._group_id = None
            pause_seconds = time.monotonic() - started
            self._answers.end(plan.transfer_id, "failed", pause_seconds=pause_seconds, error=str(error))
            return Outcome(None, True, pause_seconds)
        failpoint("explorer.weights_loaded")
        self._group_id = plan.group_id
        pause_seconds = time.monotonic() - started
        # In this order: the trainer looks for explorers that still ask for the version as soon as it knows the outcome.
        self._set_state(True, None)
        self._answers.end(plan.transfer_id, "applied", pause_seconds=pause_seconds)
        return Outcome(checksum, True, pause_seconds)

    def _set_state(self, ready: bool, wanted_version: int | None) -> None:
        if (ready, wanted_version) != self._state:
            device = "" if self._reception is None else self._reception.device
            self._answers.set_state(device=device, ready=ready, wanted_version=wanted_version)
            self._state = (ready, wanted_version)
