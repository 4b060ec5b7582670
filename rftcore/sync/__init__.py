"""Synchronization of weights: from the trainer into the engines.

As files: a method in `METHODS` is a `Publisher` (`base.py`), which the trainer uses. The engine calls `Engine.load_weights(uri, ...)` with the
`uri` that the publisher returned and the trainer stored in the `policy_version` row.

Straight into live engines (`sync.method: nccl` or `auto`): `transfer/trainer_side` and `transfer/explorer_side` agree by rows of the buffer who takes
part, and `transfer/sender` and `transfer/receiver` move the tensors. `fallback` decides which versions are sent, and which become files.
"""

from __future__ import annotations

from rftcore.sync.base import Publisher
from rftdata.plugins import Registry

METHODS = Registry[type[Publisher]](
    "sync method",
    {
        "memory": "rftcore.sync.files.publishers:MemoryPublisher",
        "checkpoint": "rftcore.sync.files.publishers:FolderPublisher",
    },
)
