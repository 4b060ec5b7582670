"""Metrics of an optimizer update from what its micro-batches add to them, and of a step from those of its updates."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from rftcore.trainer.network.routing import ROUTING, routing_metrics
from rftcore.trainer.network.sharding import Grid


def totals(sums: dict[str, Tensor], grid: Grid) -> dict[str, float]:
    """Return the sums of all ranks as metrics; the host waits once for the device.

    Args:
        sums: of this rank, numbers by the metric's name, and `ROUTING`.
    """
    flat = grid.add_up(torch.cat([value.float().flatten() for value in sums.values()])).cpu()
    found = dict(zip(sums, flat.split([value.numel() for value in sums.values()]), strict=True))
    routing = found.pop(ROUTING, None)
    metrics = {name: value.item() for name, value in found.items()}
    return metrics if routing is None else metrics | routing_metrics(*routing.view_as(sums[ROUTING]))


def means(updates: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the updates that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for update in updates:
        for name, value in update.items():
            values[name].append(value)
    return {name: sum(each) / len(each) for name, each in values.items()}
