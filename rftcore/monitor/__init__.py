"""Where metrics go besides the buffer: monitors by name, and `open_monitors`, which makes those of a run.

A third party's monitor is named by `./file.py:Class`, a dotted path, or an entry point of group `rftdata.monitor`. It is
made with the run's name and the folder it may write to, and must implement `rftcore.monitor.base.Monitor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rftcore.monitor.base import Monitor
from rftdata.plugins import Registry

MONITORS = Registry[type[Monitor]]("monitor", {
    "tensorboard": "rftcore.monitor.tensorboard:TensorBoard",
})  # fmt: skip

__all__ = ["MONITORS", "Monitor", "open_monitors"]


def open_monitors(names: Sequence[str], run_name: str, folder: Path, base_dir: Path | None = None) -> list[Monitor]:
    """The monitors of a run, open.

    Args:
        names: as written in the configuration.
        run_name: the run's name.
        folder: the run's folder; each monitor writes below it.
        base_dir: folder that `./file.py:attr` is relative to.

    Raises:
        PluginError: a name that nobody knows or that does not load.
    """
    return [MONITORS.load(name, base_dir)(run_name, folder) for name in names]
