"""How new weights travel from the trainer to the engines: methods by name.

The trainer's side of a method is a `Publisher` (`base.py`); the engine's side is `Engine.load_weights(uri, ...)`, which
reads the `uri` that the publisher returned and the trainer wrote to the `policy_version` row.
"""

from __future__ import annotations

METHODS: dict[str, str] = {
    "memory": "rftcore.sync.publishers:MemoryPublisher",
    "checkpoint": "rftcore.sync.publishers:FolderPublisher",
}
