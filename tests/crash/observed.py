"""`rft run` whose roles note what the buffer acknowledges to them (`witness`): python -c "from tests.crash.observed import main; main()" run …

Everything else is the product's own: command, supervisor, Ray, roles.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray

from rftcore.command import main as rft
from rftcore.config.run import RunConfig
from rftcore.launch.ray_cluster import launcher

FOLDER = "RFT_CRASH_WITNESS"
"""Variable of the environment with the folder of the notes."""


class ObservedRole(launcher.Role):
    """The process of one role, with a witness."""

    @ray.method
    def run(self, role: str, config: RunConfig, run: str, options: dict[str, Any]) -> int:
        from tests.crash.witness import Witness, observe

        index = options.get("index")
        observe(Witness(Path(os.environ[FOLDER]), role if index is None else f"{role}-{index}"))
        return super().run(role, config, run, options)


def main() -> None:
    """Run the command line."""
    launcher.RoleActor = ray.remote(max_restarts=0, max_task_retries=0)(ObservedRole)
    rft()
