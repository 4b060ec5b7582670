"""Ray cluster of a peer, without the parts that take CPU time while others are measured."""

from __future__ import annotations

import os
from typing import Any

import ray

NAMESPACE = "benchmark"
_OBJECT_STORE_BYTES = 1 << 30

# Read when the cluster starts: no worker processes before one is needed.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
os.environ.setdefault("RAY_enable_worker_prestart", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def start(address: dict[str, Any]) -> dict[str, Any]:
    """Start the cluster; return the address with that of its head."""
    # "local": without an address Ray joins any cluster that runs on this machine.
    context = ray.init(
        "local",
        num_cpus=8,
        num_gpus=0,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        namespace=NAMESPACE,
        log_to_driver=False,
    )
    return {**address, "ray": context.address_info["gcs_address"]}


def connect(address: dict[str, Any]) -> None:
    """Connect this process to the cluster."""
    ray.init(address=address["ray"], namespace=NAMESPACE, log_to_driver=False)
