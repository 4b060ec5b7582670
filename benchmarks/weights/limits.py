"""Limits of a machine for `rft bench weights`: a copy of one big buffer, and torch's own broadcast of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import statistics
import time
from pathlib import Path


def measure_limits(num_bytes: int, num_ranks: int, threads: int, on_gpu: bool, repeats: int, output: Path) -> None:
    """Measure a copy of a buffer, and a broadcast of it among `num_ranks` processes; write both to `output`."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    arguments = (num_bytes, num_ranks, max(1, threads // num_ranks), on_gpu, repeats, port)
    others = [
        context.Process(target=_broadcast, args=(rank, *arguments, os.getpid()), daemon=True)
        for rank in range(1, num_ranks)
    ]
    for process in others:
        process.start()
    copy = _copy_seconds(num_bytes, threads, on_gpu, repeats)
    broadcast = _broadcast(0, *arguments, None)
    for process in others:
        process.join()
    found = {
        "num_bytes": num_bytes,
        "num_ranks": num_ranks,
        "backend": "nccl" if on_gpu else "gloo",
        "copy": None if copy is None else ("peer" if on_gpu else "memory"),
        "copy_seconds": copy,
        "broadcast_seconds": broadcast,
        "copy_gb_per_s": None if copy is None else num_bytes / copy / 1e9,
        "broadcast_gb_per_s": num_bytes / broadcast / 1e9,
    }
    output.write_text(json.dumps(found))


def _copy_seconds(num_bytes: int, threads: int, on_gpu: bool, repeats: int) -> float | None:
    """Return the median seconds of a copy to another GPU, or within the memory of a host; None on a single GPU."""
    import torch

    if on_gpu and torch.cuda.device_count() < 2:
        return None
    torch.set_num_threads(threads)
    source = torch.ones(num_bytes, dtype=torch.uint8, device="cuda:0" if on_gpu else "cpu")
    target = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda:1" if on_gpu else "cpu")
    taken = []
    for _ in range(1 + repeats):
        started = time.perf_counter()
        target.copy_(source)
        if on_gpu:
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def _broadcast(
    rank: int, num_bytes: int, num_ranks: int, threads: int, on_gpu: bool, repeats: int, port: int, parent: int | None
) -> float:
    """Return the median seconds of a broadcast from rank 0, until the last rank has received it."""
    if parent is not None:
        from rftcore.parent_process import end_with_parent

        end_with_parent(parent)
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(threads)
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    store = TCPStore("127.0.0.1", port, num_ranks, is_master=rank == 0)
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=num_ranks, device_id=device if on_gpu else None
    )
    buffer = torch.full((num_bytes,), rank, dtype=torch.uint8, device=device)
    taken = []
    for _ in range(1 + repeats):
        dist.barrier()
        started = time.perf_counter()
        dist.broadcast(buffer, 0)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64, device=device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        taken.append(seconds.item())
    dist.destroy_process_group()
    return statistics.median(taken[1:])
