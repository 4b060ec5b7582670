"""How new weights get from the trainer into the engines.

As files: the trainer's side of a method in `METHODS` is a `Publisher` (`base.py`). The engine's side is `Engine.load_weights(uri, ...)`, which
reads the `uri` that the publisher returned and the trainer stored in the `policy_version` row.

Straight into live engines (`sync.method: nccl`): `trainer_side` and `explorer_side` meet by rows, `transfer` moves the tensors over a
`transfer_group`. Files remain for engines that miss a version, and for evaluations.
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
