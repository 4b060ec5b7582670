"""The process group of the trainer's ranks: gloo between CPUs, NCCL between GPUs.

The ranks meet at a store in the process of rank 0, which listens on the loopback interface, on a port that the system chooses.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from rftcore.trainer.network.sharding import TIMEOUT
from rftdata.errors import ConfigError

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Rendezvous:
    """The place where the ranks meet.

    Attributes:
        host, port: of the store.
        num_ranks: on all machines.
        num_threads: CPU threads of each rank.
    """

    host: str
    port: int
    num_ranks: int
    num_threads: int


def open_rendezvous(num_ranks: int, num_threads: int | None = None) -> tuple[Rendezvous, TCPStore]:
    """Open a rendezvous for ranks of this machine; return also its store, which must live as long as the ranks.

    Args:
        num_threads: CPU threads to divide among the ranks; None for the number of this process.
    """
    with socket.socket() as listener:
        listener.bind((_LOOPBACK, 0))
        listener.listen(num_ranks)
        port = listener.getsockname()[1]
        store = TCPStore(
            _LOOPBACK,
            port,
            is_master=True,
            timeout=TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return Rendezvous(_LOOPBACK, port, num_ranks, max(1, (num_threads or torch.get_num_threads()) // num_ranks)), store


def join_process_group(rendezvous: Rendezvous, rank: int, store: TCPStore | None = None) -> None:
    """Join the group of all ranks, in the thread that trains. On a machine with GPUs, rank n uses GPU n.

    Args:
        store: the store of the rendezvous, for rank 0; None for the others, which connect to it.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
    """
    torch.set_num_threads(rendezvous.num_threads)
    backend, device = "gloo", None
    if torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
        if rendezvous.num_ranks > num_gpus:
            raise ConfigError(
                "trainer.num_gpus is more than this machine has",
                value=rendezvous.num_ranks,
                allowed=f"up to {num_gpus}",
            )
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    if store is None:
        store = TCPStore(rendezvous.host, rendezvous.port, timeout=TIMEOUT, wait_for_workers=False)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=rendezvous.num_ranks, timeout=TIMEOUT, device_id=device
    )


def leave_process_group() -> None:
    """Leave the group; all ranks call this together."""
    if dist.is_initialized():
        dist.destroy_process_group()
