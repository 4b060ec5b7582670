"""Methods, by name, that transfer new weights from the trainer to the engines.

The trainer's side of a method is a `Publisher` (`base.py`). The engine's side is `Engine.load_weights(uri, ...)`, which
reads the `uri` that the publisher returned and the trainer stored in the `policy_version` row.
"""

from __future__ import annotations

from rftcore.sync.base import Publisher
from rftdata.plugins import Registry

METHODS = Registry[type[Publisher]]("sync method", {
    "memory": "rftcore.sync.publishers:MemoryPublisher",
    "checkpoint": "rftcore.sync.publishers:FolderPublisher",
})  # fmt: skip
