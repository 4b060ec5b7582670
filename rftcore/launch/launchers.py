"""The choice of what starts the roles of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rftcore.config.run import RunConfig
from rftcore.launch.launcher import Launcher


def open_launcher(configs: Sequence[RunConfig]) -> Launcher:
    """Return the Ray cluster if `RAY_ADDRESS` is set, otherwise this machine. Call it first: this machine forks.

    Args:
        configs: of the runs whose roles will be started.
    """
    if os.environ.get("RAY_ADDRESS"):
        from rftcore.launch.ray_cluster.launcher import RayLauncher

        return RayLauncher()
    from rftcore.launch.local_processes.launcher import LocalLauncher

    return LocalLauncher(configs)
