"""Named tensors as the ranks of a trainer send them, without a learner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from rftcore.sync.tensors import HeldRows, Part, WireTensor
from rftcore.sync.transfer.group import always_wanted
from rftcore.sync.transfer.plan import TransferPlan
from rftcore.sync.transfer.sender import Sent, TransferSender

Tensors = Sequence[tuple[str, Tensor]]


def divided(num_rows: int, num_ranks: int) -> list[tuple[int, int]]:
    """The rows of each rank, (first, number), as FSDP2 shards them: the last ranks may have fewer, or none."""
    share = -(-num_rows // num_ranks)
    return [(min(rank * share, num_rows), max(0, min(share, num_rows - rank * share))) for rank in range(num_ranks)]


def wire(tensors: Tensors, num_ranks: int = 1, tied: Mapping[str, str] | None = None) -> tuple[WireTensor, ...]:
    """What the ranks of a trainer send of these tensors.

    Args:
        tied: from the name of a tensor to that of an earlier one with the same values.
    """
    found = []
    for name, tensor in tensors:
        rows = enumerate(divided(len(tensor) if tensor.ndim else 1, num_ranks))
        same_as = (tied or {}).get(name)
        parts = () if same_as else tuple(Part(rank, first, count) for rank, (first, count) in rows if count)
        found.append(WireTensor(name, tuple(tensor.shape), parts, same_as))
    return tuple(found)


def held(
    tensors: Iterable[tuple[str, Tensor]], rank: int = 0, num_ranks: int = 1, tied: Iterable[str] = ()
) -> Iterator[HeldRows]:
    """What a rank holds of them."""
    for name, tensor in tensors:
        if name in tied:
            continue
        first, count = divided(len(tensor) if tensor.ndim else 1, num_ranks)[rank]
        yield HeldRows(name, first, tensor[first : first + count] if tensor.ndim else tensor)


class OneRank:
    """A trainer of one rank; see `WeightSource`."""

    num_ranks = 1

    def __init__(self) -> None:
        self._sender = TransferSender()

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """The weights as they are now."""
        raise NotImplementedError

    @property
    def weight_group_id(self) -> int | None:
        return None if self._sender.group is None else self._sender.group.group_id

    def weight_devices(self) -> str:
        return "cpu"

    def weight_tensors(self, adapters_alone: bool = False) -> tuple[WireTensor, ...]:
        return wire(list(self.tensors()))

    def send_weights(self, plan: TransferPlan, store: TCPStore, check: Callable[[], None] = always_wanted) -> Sent:
        return self._sender.send(plan, held(self.tensors()), store, check)

    def leave_weight_group(self) -> None:
        self._sender.leave()
