"""What a durable write, a draw and the way between them cost, beside a bare prototype, other stores and the limits of this machine.

Each round runs every measurement of every store. Within a measurement the stores run one after the other, so a noisy machine is noisy for all.
Figures are medians, least and greatest of the rounds; ratios compare within a round.

- write: batches of 256 or 64 experiences from one producer process or four, until each write has returned.
- end to end: producers write batches of 256, a consumer process takes 256 at a time and decodes three arrays; every experience arrives once
  (compared by key).
- latency: from the return of a write to its arrays in the consumer, with pauses between writes.

The first run that needs a peer installs it into an environment of its own. A peer that cannot be installed or fails has its error in the results.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import rftdata
from benchmarks.buffer.program import KINDS, StoreProgram
from benchmarks.harness.arguments import argument_parser, integer, names, scratch_folder
from benchmarks.harness.report import exit_on_sigterm, say, spread, write
from benchmarks.peers.catalogue import BARE, OURS, PEERS

_PACED_WRITES = 40
_PEERS_PACED_WRITES = 6


def limits(folder: Path) -> dict[str, float]:
    """Measure flushed writes of the size of one batch, a small flush, and a copy of memory."""
    block = os.urandom(2 * 2**20)
    path = folder / "limit"
    with open(path, "wb", buffering=0) as file:

        def flushed(content: bytes) -> None:
            file.write(content)
            os.fdatasync(file.fileno())

        large = [_seconds(lambda: flushed(block)) for _ in range(24)]
        small = [_seconds(lambda: flushed(b"x" * 4096)) for _ in range(50)]
    path.unlink()
    source = np.frombuffer(block * 32, np.uint8)
    target = np.empty_like(source)
    copy = min(_seconds(lambda: np.copyto(target, source)) for _ in range(5))
    return {
        "flushed_write_bytes_per_s": len(block) / statistics.median(large),
        "flush_ms_p50": 1000 * statistics.median(small),
        "memcpy_bytes_per_s": source.nbytes / copy,
    }


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(rounds: int, num: int, folder: Path, peers: Sequence[str], kinds: Sequence[str]) -> dict[str, Any]:
    """Run every measurement of every store, `rounds` times."""
    with rftdata.open(str(folder / "buffer")) as buffer:
        address = {"uri": buffer.database.uri, "folder": str(folder)}
        known = {"rftdata": OURS, "bare_layout": BARE, **PEERS}
        stores = []
        try:
            _recycle_log(buffer)
            for name in ["rftdata", "bare_layout", *peers]:
                say(f"starting {name}")
                stores.append(StoreProgram(name, known[name], address, num))
                stores[-1].warm_up()
            machine, load = [], []
            for number in range(rounds):
                load.append(os.getloadavg()[0])
                say(f"round {number + 1} of {rounds}, load {load[-1]:.1f}")
                for kind in kinds:
                    for store in stores:
                        store.measure(kind)
                machine.append(limits(folder))
            for store in stores:
                store.measure_latency(
                    _PACED_WRITES if store.name in ("rftdata", "bare_layout") else _PEERS_PACED_WRITES
                )
        finally:
            for store in stores:
                store.close()
            if buffer.server:
                buffer.server.stop()
    return summary(stores, machine, load)


def _recycle_log(buffer: rftdata.Buffer) -> None:
    """Let the server write its first gigabyte: until then it fills every file of its log with zeros before use."""
    with buffer.database.connection() as connection:
        connection.execute(
            "SELECT pg_logical_emit_message(false, 'rft', repeat(' ', 1048576)) FROM generate_series(1, 1100)"
        )
        connection.execute("CHECKPOINT")


def summary(
    stores: Sequence[StoreProgram], machine: Sequence[dict[str, float]], load: Sequence[float]
) -> dict[str, Any]:
    """Return medians with least and greatest; ratios compare within a round."""
    ours, *others = stores
    return {
        "load": list(load),
        "limits": {name: spread([one[name] for one in machine]) for name in machine[0]},
        "results": _results(ours, machine),
        "peers": {
            store.name: {
                **_results(store, machine),
                "ours_compared": {kind: _ratio(ours, store, kind) for kind in store.figures},
            }
            for store in others
        },
    }


def _results(store: StoreProgram, machine: Sequence[dict[str, float]]) -> dict[str, Any]:
    disk = [
        written / limit["flushed_write_bytes_per_s"] for written, limit in zip(store.bytes_per_s, machine) if written
    ]
    medians = {kind: spread(values) for kind, values in store.figures.items()}
    return {
        "what": store.peer.what,
        "version": store.version,
        "durable": store.peer.durable,
        "error": store.error or ("; ".join(f"{kind}: {text}" for kind, text in store.failures.items()) or None),
        "write_experiences_per_s": medians.get("write_256", {}).get("median"),
        "end_to_end_experiences_per_s": medians.get("end_to_end", {}).get("median"),
        "commit_to_batch_ms_p50": statistics.median(store.delays) if store.delays else None,
        "commit_to_batch_ms_p99": float(np.percentile(store.delays, 99)) if store.delays else None,
        "fraction_of_disk_bandwidth": statistics.median(disk) if disk and store.peer.durable else None,
        "experiences_a_measurement": store.num,
        "figures": medians,
    }


def _ratio(ours: StoreProgram, other: StoreProgram, kind: str) -> dict[str, float | None]:
    pairs = zip(ours.figures.get(kind, []), other.figures.get(kind, []))
    return spread([a / b if a and b else None for a, b in pairs])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser("buffer", __doc__)
    parser.add_argument("--rounds", type=integer(), default=5)
    parser.add_argument(
        "--samples", type=integer(1024), default=4096, help="experiences a measurement, a multiple of 1024"
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--peers", type=names(*PEERS), default=[*PEERS], help=f"some of {', '.join(PEERS)}")
    chosen.add_argument("--skip-peers", action="store_true", help="rftdata and the bare layout only")
    parser.add_argument("--kinds", type=names(*KINDS), default=[*KINDS], help=f"some of {', '.join(KINDS)}")
    options = parser.parse_args(arguments)
    if options.samples % 1024:
        parser.error(f"argument --samples: {options.samples} is not a multiple of 1024")
    exit_on_sigterm()
    peers = [] if options.skip_peers else options.peers
    with scratch_folder(options) as folder:
        write(options, measure(options.rounds, options.samples, folder, peers, options.kinds))
    return 0
