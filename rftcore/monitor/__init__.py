"""Monitors by name, which show metrics outside the buffer.

A third party's monitor is named by `./file.py:Class`, a dotted path, or an entry point of group `rftdata.monitor`. It is
constructed with the run's name and the folder it may write to, and must implement `rftcore.monitor.base.Monitor`.
"""

from __future__ import annotations

from rftcore.monitor.base import Monitor
from rftdata.plugins import Registry

MONITORS = Registry[type[Monitor]](
    "monitor",
    {
        "tensorboard": "rftcore.monitor.tensorboard:TensorBoard",
    },
)

__all__ = ["MONITORS", "Monitor"]
