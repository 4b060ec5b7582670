"""The trainer's side of weights that go straight into live engines (`sync.method` nccl or auto): offer a version, form the group of those that take
it, send, and collect what became of it.

Who takes part is decided anew for every version, so explorers may join, leave or die at any time. The group is formed again only when its members have
changed or one of them failed. Engines that were left in the middle are offered the version again, and so are those that missed it, as while they stored
a batch or answered an evaluation, when they ask for it. What cannot be sent to them is written as a file, once, by another method.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from rftcore.sync.addresses import LOOPBACK, own_address
from rftcore.sync.base import LIVE_URI, Publication
from rftcore.sync.device_names import choose_backend
from rftcore.sync.transfer.group import GroupError, always_wanted, open_store
from rftcore.sync.transfer.plan import (
    ADAPTERS_DTYPE,
    AdaptersConfig,
    TransferPlan,
    WireTensor,
    fingerprint,
    to_json,
)
from rftcore.sync.transfer.transfer import Sent
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.transfers import Offers, Receipt
from rftdata.config import SyncConfig
from rftdata.errors import RoleFailedError
from rftdata.failpoints import failpoint
from rftdata.processes import is_here

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

logger = logging.getLogger(__name__)

_TRIES = 3
_MIB = 1 << 20


class WeightSource(Protocol):
    """The ranks of a trainer, which send together.

    Attributes:
        num_ranks: of the trainer.
        weight_group_id: the group in which all of them are; None if they are in none.
    """

    num_ranks: int

    @property
    def weight_group_id(self) -> int | None: ...

    def weight_devices(self) -> str:
        """Ids of the ranks' devices, with commas."""

    def weight_tensors(self, adapters_alone: bool) -> tuple[WireTensor, ...]:
        """What they send, all weights or adapters alone; the same as long as they live."""

    def send_weights(self, plan: TransferPlan, store: TCPStore, check: Callable[[], None] = always_wanted) -> Sent:
        """Send the weights as they are now, each rank what it holds; after an error no rank is in the group any more.

        Args:
            check: called during waits; what it raises ends them.

        Raises:
            GroupError: a member of the group failed or did not come.
        """

    def leave_weight_group(self) -> None:
        """Leave the group, if there is one."""


class LiveWeights:
    """Publishes one version after the other.

    Args:
        attempt: holds the run.
        source: of the weights.
        write_file: writes the weights as they are now as a file.
        report: told how weights travel and why, whenever that changes.
        adapters: peft's configuration, if adapters travel alone.

    Attributes:
        publication: of the last version.
        in_float32: names of weights that engines keep in float32, of those that took part last.
        first_sent_step: the step after which weights went straight into an engine for the first time; None before.
        live_since: the step from which on no version has been written as a file, so that engines have what was sent; None if the last has a file.
    """

    def __init__(
        self,
        attempt: Attempt,
        config: SyncConfig,
        source: WeightSource,
        write_file: Callable[[str], Publication],
        report: Callable[[str], None] = lambda choice: None,
        adapters: AdaptersConfig | None = None,
    ) -> None:
        self._attempt = attempt
        self._config = config
        self._source = source
        self._write_file = write_file
        self._report = report
        self._adapters = adapters
        self._offers = Offers(attempt)
        self._members: list[int] = []
        self._address = ("", 0)
        self._tensors: tuple[WireTensor, ...] = ()
        self._name = ""
        self._choice = ""
        self._step = 0
        self._num_repeats = 0  # of the last version, for explorers that missed it
        self.in_float32: tuple[str, ...] = ()
        self.first_sent_step: int | None = None
        self.live_since: int | None = None
        self.publication = Publication("", 0, "")

    def publish(self, step: int) -> int:
        """Publish the weights after `step` as a new version: to the engines that are there, or as a file if there are none.

        Returns:
            The policy_version_id.

        Raises:
            FencedError: another attempt holds the run.
        """
        self._step, self._name, self._num_repeats = step, f"step-{step:06d}", 0
        receivers = self._offers.ready_receivers()
        waiting = set(receivers)
        if not receivers or not self._may_send(receivers):
            self.publication, self.live_since = self._write_file(self._name), None
            return self._announce(step, self._config.file_method)
        self.publication = Publication(LIVE_URI, 0, "")
        version = self._announce(step, "nccl")
        for _ in range(_TRIES):
            # Engines that a transfer left in the middle do not sample until they have all of it.
            waiting = self._transfer(version, waiting) & set(self._offers.ready_receivers())
            if not waiting:
                break
        self._locate_sent(version)
        if self._config.check_weights:
            self.as_file(version)
        self.serve_missed(version)
        return version

    def is_missed(self, policy_version_id: int) -> bool:
        """Return whether an explorer has missed the last version, which is in no file."""
        return self.publication.uri == LIVE_URI and self._offers.is_file_wanted(policy_version_id)

    def serve_missed(self, policy_version_id: int) -> None:
        """Send the last version again to explorers that have missed it and ask for it now; write it as a file if they do not take it so either."""
        while self.is_missed(policy_version_id):
            late = self._offers.late_receivers(policy_version_id)
            if not late or self._num_repeats == _TRIES or not self._may_send(self._offers.ready_receivers()):
                logger.info(
                    "an explorer missed policy version %d, which is written as a file for it", policy_version_id
                )
                self.as_file(policy_version_id)
                return
            self._num_repeats += 1
            logger.info("an explorer missed policy version %d, which is sent again", policy_version_id)
            before = self.publication
            self._transfer(policy_version_id, late)
            if before.checksum:
                self.publication = before  # the row's, whatever type the late ones were sent
            else:
                self._locate_sent(policy_version_id)

    def as_file(self, policy_version_id: int) -> Publication:
        """Return the last version as a file, which is written unless it exists."""
        if self.publication.uri == LIVE_URI:
            self.publication, self.live_since = self._write_file(self._name), None
            self._locate(policy_version_id)
        return self.publication

    def close(self) -> None:
        """Leave the group."""
        with suppress(RoleFailedError):  # a rank that has died is in no group
            self._source.leave_weight_group()
        self._offers.leave()

    def _may_send(self, receivers: dict[int, str]) -> bool:
        """Whether weights go into the engines, and not into a file; a choice for files is logged when it changes."""
        if self._config.method == "nccl":
            return True
        backend, reason = choose_backend(self._source.weight_devices(), [*receivers.values()])
        if backend in ("nccl", "ipc"):
            return True
        self._choose(f"through files ({self._config.file_method}): {reason}")
        return False

    def _choose(self, choice: str) -> None:
        if choice != self._choice:
            logger.info("weights go %s", choice)
            self._choice = choice
            self._report(choice)

    def _announce(self, step: int, method: str) -> int:
        found = self.publication
        return self._attempt.publish(
            step, method=method, uri=found.uri, num_bytes=found.num_bytes, checksum=found.checksum
        )

    def _locate(self, version: int) -> None:
        found = self.publication
        self._offers.locate(version, uri=found.uri, num_bytes=found.num_bytes, checksum=found.checksum)

    def _locate_sent(self, version: int) -> None:
        if self.publication.checksum:
            self._locate(version)
            self.live_since = self._step if self.live_since is None else self.live_since

    def _transfer(self, version: int, waiting: set[int]) -> set[int]:
        """Offer and send once; return the members that have not applied the version."""
        if not self._tensors:
            self._tensors = self._source.weight_tensors(self._adapters is not None)
        transfer_id = self._offers.offer(version, to_json(self._tensors), fingerprint(self._tensors), self._adapters)
        failpoint("trainer.weights_offered")
        self._await_acknowledgements(transfer_id, waiting)
        members, left_out = _members(self._offers.close(transfer_id), self._adapters is not None)
        if not members:
            self._source.leave_weight_group()
            self._offers.end(transfer_id, error="no explorer acknowledged in time")
            return set()
        sent: Sent | None = None
        error: str | None = None
        try:
            plan = self._form(transfer_id, members, left_out)
            failpoint("trainer.weights_members_fixed")
            sent = self._source.send_weights(plan, self._store, self._attempt.check)
        except GroupError as failure:
            logger.warning("transfer %d failed: %s", transfer_id, str(failure))
            error = str(failure)
        outcomes = self._await_outcomes(transfer_id, {member.worker_id for member in members})
        missing = {outcome.worker_id for outcome in outcomes if outcome.status != "applied"}
        failpoint("trainer.weights_sent")
        if missing:
            self._source.leave_weight_group()
            error = error or next((o.error for o in outcomes if o.error), "a member did not answer in time")
        num_bytes, seconds = (None, None) if sent is None else (sent.num_bytes, sent.seconds)
        self._offers.end(transfer_id, num_bytes=num_bytes, send_seconds=seconds, error=error)
        # Engines may have all of it although another one broke the transfer off at its end.
        if self.first_sent_step is None and len(missing) < len(outcomes):
            self.first_sent_step = self._step
        if sent is not None:
            self.publication = Publication(LIVE_URI, sent.num_bytes, sent.checksum)
        return missing

    def _await_acknowledgements(self, transfer_id: int, waiting: set[int]) -> None:
        deadline = time.monotonic() + self._config.acknowledge_s
        while time.monotonic() < deadline:
            if waiting <= {receipt.worker_id for receipt in self._offers.receipts(transfer_id)}:
                return
            self._offers.wait(0.25)
            waiting &= set(self._offers.ready_receivers())

    def _await_outcomes(self, transfer_id: int, members: set[int]) -> list[Receipt]:
        """Return the members' receipts when all have ended, or no more will."""
        deadline = time.monotonic() + self._config.timeout_s
        while True:
            receipts = [r for r in self._offers.receipts(transfer_id) if r.worker_id in members]
            is_open = any(receipt.status == "acknowledged" and receipt.alive for receipt in receipts)
            if not is_open or time.monotonic() > deadline:
                return receipts
            self._offers.wait(0.25)
            self._offers.ready_receivers()  # notices processes that have exited

    def _form(self, transfer_id: int, members: list[Receipt], left_out: dict[int, str]) -> TransferPlan:
        """Fix group and ranks: the group that is there if the members are in it, a new one otherwise."""
        ids = [member.worker_id for member in members]
        group_id = self._source.weight_group_id
        if group_id is None or ids != self._members or any(member.group_id != group_id for member in members):
            self._source.leave_weight_group()
            host = self._meeting_place(members)
            self._store = open_store(host, self._config.timeout_s)
            self._members, self._address, group_id = ids, (host, self._store.port), transfer_id
            self._backend, reason = choose_backend(self._source.weight_devices(), [member.device for member in members])
            what = "" if self._adapters is None else "adapters alone, "
            self._choose(f"{what}into {len(members)} live engines by {self._backend}: {reason}")
        self.in_float32 = self._in_float32(members)
        ranks, num_ranks = {}, self._source.num_ranks
        for member in members:
            ranks[member.worker_id] = num_ranks
            num_ranks += member.num_ranks
        host, port = self._address
        plan = TransferPlan(
            transfer_id=transfer_id,
            group_id=group_id,
            backend=self._backend,
            host=host,
            port=port,
            num_ranks=num_ranks,
            first_rank=0,
            tensors=self._tensors,
            dtype=members[0].dtype if self._adapters is None else ADAPTERS_DTYPE,
            bucket_bytes=self._config.bucket_mib * _MIB,
            timeout_s=self._config.timeout_s,
            adapters=self._adapters,
            in_float32=self.in_float32,
        )
        self._offers.begin(
            transfer_id,
            ranks,
            left_out,
            group_id=group_id,
            backend=self._backend,
            address=f"{host}:{port}",
            num_ranks=num_ranks,
            dtype=plan.dtype,
            in_float32=[*plan.in_float32],
            bucket_bytes=plan.bucket_bytes,
        )
        return plan

    def _meeting_place(self, members: list[Receipt]) -> str:
        """Return the address at which a new group meets.

        Raises:
            GroupError: members on other machines, or in other containers, cannot reach this one.
        """
        # Another container, even one of this host's name, has a loopback interface of its own.
        if all(is_here(member.host, member.pid_space) for member in members):
            return LOOPBACK
        try:
            return self._config.address or own_address(self._attempt.run.server_address())
        except OSError as error:
            raise GroupError(
                f"explorers on other machines, or in other containers, do not know where to reach the trainer: {error}",
                value=socket.gethostname(),
                todo="set sync.address to an address of this machine",
            ) from error

    def _in_float32(self, members: list[Receipt]) -> tuple[str, ...]:
        """Return the tensors that any member keeps in float32; the loaders of the others round them as the trainer would."""
        if self._adapters is not None:
            return ()
        names = {name for member in members for name in member.in_float32}
        return tuple(tensor.name for tensor in self._tensors if tensor.same_as is None and tensor.name in names)


def _members(receipts: list[Receipt], any_dtype: bool) -> tuple[list[Receipt], dict[int, str]]:
    """Return the explorers that take part, and the reasons of the others.

    Args:
        any_dtype: false leaves engines out that need another type on the wire.
    """
    alive = [receipt for receipt in receipts if receipt.alive]
    left_out = {
        receipt.worker_id: f"its engine is {receipt.dtype}, that of explorer {alive[0].worker_id} is {alive[0].dtype}"
        for receipt in alive
        if not any_dtype and receipt.dtype != alive[0].dtype
    }
    return [receipt for receipt in alive if receipt.worker_id not in left_out], left_out
