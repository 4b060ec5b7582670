"""What an explorer reports of its engine when it acknowledges an offer of weights.

Importing this module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Reception:
    """How an engine takes weights from the trainer.

    Attributes:
        dtype: type of its weights, in which they are sent.
        in_float32: names in the model's checkpoint of the weights that it keeps in float32 although `dtype` is another.
        device: `cpu`, or the id of its GPU; several with commas.
        num_ranks: number of its processes, each of which is a member of the group.
        kv_cache: what running requests do when weights change; see `SyncConfig.kv_cache`.
    """

    dtype: str
    device: str
    num_ranks: int
    kv_cache: Literal["recompute", "keep"] = "recompute"
    in_float32: tuple[str, ...] = ()
