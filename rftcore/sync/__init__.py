"""How new weights travel from the trainer to the engines: methods by name.

The trainer's side of a method is a `Publisher` (`base.py`); the engine's side is `Engine.load_weights(uri, ...)`, which
reads the `uri` that the publisher returned and the trainer wrote to the `policy_version` row.
"""

from __future__ import annotations

from rftcore.sync.base import Publisher
from rftdata.plugins import Registry

METHODS = Registry[type[Publisher]]("sync method", {
    "memory": "rftcore.sync.publishers:MemoryPublisher",
    "checkpoint": "rftcore.sync.publishers:FolderPublisher",
})  # fmt: skip
