"""What a durable write, a draw and the way between them cost, beside a bare prototype, other stores and the limits of this machine.

`rft bench buffer [--rounds N] [--samples N] [--peers NAME,… | --skip-peers]` runs every measurement of every store once a round, the
stores one after the other within a measurement, so that a noisy machine is noisy for all. Medians, least and greatest of the
rounds; ratios are of the same round. JSON on stdout, progress on stderr.

- write: batches of 256 or 64 experiences from one producer process or four; each write has returned.
- end to end: producers write batches of 256, a consumer in a process of its own takes 256 at a time and decodes three arrays; every
  experience arrives once (compared by key).
- latency: from the return of a write to its arrays in the consumer's hands, writes paced.

Peers are installed into environments of their own by the first run that needs them; one that cannot be installed or does not do
what is asked of it has its error in the results.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import rftdata
from benchmarks.peers import BARE, OURS, PEERS
from benchmarks.program import KINDS, StoreProgram

_PACED_WRITES = 40
_PEERS_PACED_WRITES = 6


def limits(folder: Path) -> dict[str, float]:
    """What the machine gives: flushed writes of the size of one batch, a small flush, copying memory."""
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


def measure(rounds: int, num: int, folder: Path, names: Sequence[str], kinds: Sequence[str]) -> dict[str, Any]:
    """Every measurement of every store, `rounds` times."""
    with rftdata.open(str(folder / "buffer")) as buffer:
        address = {"uri": buffer.database.uri, "folder": str(folder)}
        known = {"rftdata": OURS, "bare_layout": BARE, **PEERS}
        stores = []
        try:
            _recycle_log(buffer)
            for name in ["rftdata", "bare_layout", *names]:
                _say(f"starting {name}")
                stores.append(StoreProgram(name, known[name], address, num))
                stores[-1].warm_up()
            machine, load = [], []
            for number in range(rounds):
                load.append(os.getloadavg()[0])
                _say(f"round {number + 1} of {rounds}, load {load[-1]:.1f}")
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
    """Let the server have written its first gigabyte: until then it fills every file of its log with zeros before it uses it."""
    with buffer.database.connection() as connection:
        connection.execute(
            "SELECT pg_logical_emit_message(false, 'rft', repeat(' ', 1048576)) FROM generate_series(1, 1100)"
        )
        connection.execute("CHECKPOINT")


def summary(
    stores: Sequence[StoreProgram], machine: Sequence[dict[str, float]], load: Sequence[float]
) -> dict[str, Any]:
    """Medians with least and greatest; ratios are of the same round."""
    ours, *others = stores
    return {
        "load": list(load),
        "cores": os.cpu_count(),
        "limits": {name: _spread([one[name] for one in machine]) for name in machine[0]},
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
    medians = {kind: _spread(values) for kind, values in store.figures.items()}
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
    return _spread([a / b if a and b else None for a, b in pairs])


def _spread(values: Sequence[float | None]) -> dict[str, float | None]:
    found = [value for value in values if value is not None]
    if not found:
        return {"median": None, "min": None, "max": None}
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="rft bench buffer", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=4096, help="experiences a measurement, a multiple of 1024")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--peers", default=",".join(PEERS), metavar="NAME,…", help=f"which of {', '.join(PEERS)}; all by default"
    )
    chosen.add_argument("--skip-peers", action="store_true", help="ours and the bare layout only")
    parser.add_argument(
        "--kinds", default=",".join(KINDS), metavar="NAME,…", help=f"which of {', '.join(KINDS)}; all by default"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers and processes are ended on the way out
    names = [] if options.skip_peers else [name for name in options.peers.split(",") if name]
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        parser.error(f"no such peer: {unknown[0]}; there are {', '.join(PEERS)}")
    kinds = options.kinds.split(",")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        parser.error(f"no such measurement: {unknown[0]}; there are {', '.join(KINDS)}")
    if options.samples % 1024 or options.samples < 1024 or options.rounds < 1:
        parser.error("--samples must be a positive multiple of 1024, --rounds at least 1")
    with tempfile.TemporaryDirectory(prefix="rft-bench-", dir=options.folder, ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)  # the database may run as another user
        print(json.dumps(measure(options.rounds, options.samples, Path(folder), names, kinds), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
