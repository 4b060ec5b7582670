"""Membership of one process in the group of a transfer, by any backend."""

from __future__ import annotations

from collections.abc import Callable

from torch._C._distributed_c10d import TCPStore

from rftcore.sync.transfer.group import TransferGroup, always_wanted
from rftcore.sync.transfer.ipc_group import IpcGroup
from rftcore.sync.transfer.plan import TransferPlan


class GroupMember:
    """A process that sends or receives, and keeps its group while the members stay the same.

    Attributes:
        group: the group; None outside one.
    """

    def __init__(self) -> None:
        self.group: TransferGroup | None = None

    def join(
        self,
        plan: TransferPlan,
        rank: int,
        store: TCPStore | None = None,
        check: Callable[[], None] = always_wanted,
    ) -> TransferGroup:
        """Return the plan's group, which is formed unless this process is in it.

        Args:
            store: where the group meets, in the process that opened it.
            check: see `TransferGroup`.

        Raises:
            GroupError: a member did not come.
        """
        if self.group is None or self.group.group_id != plan.group_id:
            self.leave()
            place = (plan.host, plan.port) if store is None else store
            if plan.backend == "ipc":
                self.group = IpcGroup(place, plan.group_id, rank, plan.num_ranks, plan.timeout_s, check=check)
            else:
                self.group = TransferGroup(
                    plan.backend, place, plan.group_id, rank, plan.num_ranks, plan.timeout_s, check
                )
        return self.group

    def leave(self) -> None:
        """Leave the group, if there is one."""
        if self.group is not None:
            self.group.abort()
            self.group = None
