"""Metrics of an optimizer update from the sums over its micro-batches, and of a step from the metrics of its updates."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from rftcore.trainer.network.routing import ROUTING, routing_metrics
from rftcore.trainer.network.sharding import Grid


def totals(sums: dict[str, Tensor], grid: Grid) -> dict[str, float]:
    """Add up the sums of all ranks and return them as metrics; the host waits once for the device.

    Args:
        sums: numbers of this rank, by the metric's name, and `ROUTING`.
    """
    flat = grid.add_up(torch.cat([value.float().flatten() for value in sums.values()])).cpu()
    summed = dict(zip(sums, flat.split([value.numel() for value in sums.values()]), strict=True))
    routing = summed.pop(ROUTING, None)
    metrics = {name: value.item() for name, value in summed.items()}
    return metrics if routing is None else metrics | routing_metrics(*routing.view_as(sums[ROUTING]))


def means(updates: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the updates that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for update in updates:
        for name, value in update.items():
            values[name].append(value)
    return {name: sum(each) / len(each) for name, each in values.items()}
