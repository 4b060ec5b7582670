"""Environments, which policies act on. One file each, listed in `rftcore.environments.registry`.

An environment is a class with `reset`, `step` and `close` (`Environment`). The workflow `environment` lets the policy play an episode per
rollout; one's own workflows use `open_environment`. A plain environment has a process of its own, so it may compute, block and
use global state; an async one runs in the event loop of the workflows.
"""

from __future__ import annotations

from rftcore.environments.base import Environment, Observation, Step
from rftcore.environments.errors import EnvironmentFailedError, InfrastructureError
from rftcore.environments.handle import EnvironmentHandle, EnvironmentLimits
from rftcore.environments.hosts import EnvironmentHosts, environments_of_rollout, folder_of_rollout, open_environment
from rftcore.environments.registry import ENVIRONMENTS, check_environment, load_environment

__all__ = [
    "ENVIRONMENTS",
    "Environment",
    "EnvironmentFailedError",
    "EnvironmentHandle",
    "EnvironmentHosts",
    "InfrastructureError",
    "EnvironmentLimits",
    "Observation",
    "Step",
    "check_environment",
    "environments_of_rollout",
    "folder_of_rollout",
    "load_environment",
    "open_environment",
]
