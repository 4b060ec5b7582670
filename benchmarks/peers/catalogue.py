"""Stores that the buffer is compared with: a module and requirements of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """Store to measure.

    Attributes:
        module: contains `STORE`.
        what: description in the results.
        durable: whether writes survive a power cut.
        requirements: to install; none for stores that run in this environment.
        share: of the samples that rftdata gets, so that slow peers finish.
    """

    module: str
    what: str
    durable: bool
    requirements: tuple[str, ...] = ()
    share: float = 1.0


OURS = Peer("benchmarks.peers.rftdata_buffer", "the buffer, embedded PostgreSQL and fsync'ed Arrow segments", True)
BARE = Peer("benchmarks.buffer.bare_layout", "a bare prototype of the same layout, without its contracts", True)

# A release with a CPU build: no peer uses a GPU.
_TORCH = "torch==2.13.0"
# Trinity-RFT does not require what its PostgreSQL URLs need. It requires verl, which needs numpy 1, and newer releases of pyarrow do not
# run with numpy 1, though they do not declare it.
TRINITY_REQUIREMENTS = ("trinity-rft==0.6.0", "asyncpg", "sqlalchemy[asyncio]", "pyarrow<22", _TORCH)
PEERS = {
    "trinity_sql": Peer(
        "benchmarks.peers.trinity_sql",
        "Trinity-RFT 0.6.0, SQL storage on the same PostgreSQL",
        True,
        TRINITY_REQUIREMENTS,
        0.125,
    ),
    "trinity_queue": Peer(
        "benchmarks.peers.trinity_queue",
        "Trinity-RFT 0.6.0, queue in a Ray actor, with its JSONL file",
        False,
        TRINITY_REQUIREMENTS,
        0.25,
    ),
    "transfer_queue": Peer(
        "benchmarks.peers.transfer_queue",
        "TransferQueue 0.1.11, in RAM",
        False,
        ("TransferQueue==0.1.11", _TORCH),
        0.25,
    ),
    "reverb": Peer(
        "benchmarks.peers.reverb_queue",
        "Reverb 0.14.0, queue in RAM",
        False,
        ("dm-reverb==0.14.0", "tensorflow-cpu==2.15.1"),
        0.25,
    ),
    "ray_object_store": Peer(
        "benchmarks.peers.ray_object_store",
        "Ray 2.60.0, objects in shared memory",
        False,
        ("ray==2.60.0", "numpy>=2.1"),
    ),
}
