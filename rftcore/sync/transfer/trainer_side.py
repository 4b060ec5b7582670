"""Trainer's side of a transfer into live engines: offer a version, form the group of those that take it, send, and collect how it ended.

Who takes part is decided anew for every version, so explorers may join, leave or die at any time. The group is formed again only when its members have
changed or one of them failed. `rftcore.sync.fallback` decides what is sent, when it is sent again, and when it is written as a file instead.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from rftcore.sync.addresses import LOOPBACK, own_address
from rftcore.sync.device_names import choose_backend
from rftcore.sync.tensors import AdaptersConfig, WireTensor, fingerprint, to_json
from rftcore.sync.transfer.group import GroupError, always_wanted, open_store
from rftcore.sync.transfer.plan import ADAPTERS_DTYPE, TransferPlan
from rftcore.sync.transfer.sender import Sent
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.transfers import Offers, Receipt
from rftdata.config import SyncConfig
from rftdata.failpoints import failpoint
from rftdata.processes import is_here

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

logger = logging.getLogger(__name__)

_MIB = 1 << 20


class WeightSource(Protocol):
    """The ranks of a trainer, which send together.

    Attributes:
        num_ranks: number of ranks.
        weight_group_id: id of the group in which all of them are; None if they are in none.
    """

    num_ranks: int

    @property
    def weight_group_id(self) -> int | None: ...

    def weight_devices(self) -> str:
        """Return the ids of the ranks' devices, with commas."""

    def weight_tensors(self, adapters_alone: bool) -> tuple[WireTensor, ...]:
        """Return the tensors that they send, all weights or adapters alone; always the same ones."""

    def send_weights(self, plan: TransferPlan, store: TCPStore, check: Callable[[], None] = always_wanted) -> Sent:
        """Send the weights as they are now, each rank what it holds. After an error no rank is in the group.

        Args:
            check: called during waits; what it raises ends them.

        Raises:
            GroupError: a member of the group failed or did not come.
        """

    def leave_weight_group(self) -> None:
        """Leave the group, if there is one."""


@dataclass(frozen=True)
class TransferResult:
    """How one transfer ended.

    Attributes:
        sent: what was sent; None if the transfer failed, or no explorer took part.
        was_applied: whether an engine has the whole version.
        missing: workers that took part and have not applied the version.
    """

    sent: Sent | None = None
    was_applied: bool = False
    missing: set[int] = field(default_factory=set)


class LiveTransfers:
    """Sends versions to live engines.

    Args:
        attempt: the attempt that holds the run.
        offers: where explorers read what is offered.
        source: the ranks that have the weights.
        report_route: receives how weights travel and why, whenever a group is formed.
        adapters: peft's configuration, if adapters travel alone.

    Attributes:
        in_float32: names of weights that engines keep in float32, of those that took part last.
    """

    def __init__(
        self,
        attempt: Attempt,
        config: SyncConfig,
        offers: Offers,
        source: WeightSource,
        report_route: Callable[[str], None],
        adapters: AdaptersConfig | None,
    ) -> None:
        self._attempt = attempt
        self._config = config
        self._offers = offers
        self._source = source
        self._report_route = report_route
        self._adapters = adapters
        self._members: list[int] = []
        self._address = ("", 0)
        self._tensors: tuple[WireTensor, ...] = ()
        self.in_float32: tuple[str, ...] = ()

    def send(self, version: int, waiting: set[int]) -> TransferResult:
        """Offer a version and send it once to the explorers that acknowledge.

        Args:
            waiting: workers whose acknowledgements are waited for.

        Raises:
            FencedError: another attempt holds the run.
        """
        if not self._tensors:
            self._tensors = self._source.weight_tensors(self._adapters is not None)
        transfer_id = self._offers.offer(version, to_json(self._tensors), fingerprint(self._tensors), self._adapters)
        failpoint("trainer.weights_offered")
        self._await_acknowledgements(transfer_id, waiting)
        members, left_out = _members(self._offers.close(transfer_id), self._adapters is not None)
        if not members:
            self._source.leave_weight_group()
            self._offers.end(transfer_id, error="no explorer acknowledged in time")
            return TransferResult()
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
        return TransferResult(sent, len(missing) < len(outcomes), missing)

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
            self._report_route(f"{what}into {len(members)} live engines by {self._backend}: {reason}")
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
            GroupError: members on other machines, or in other containers, cannot reach this machine.
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
    """Return the explorers that take part, and for each other one the reason why not.

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
