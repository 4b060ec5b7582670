"""The Ray cluster that this process is connected to: its machines, and the GPUs reserved on them.

Ray reserves GPUs (`rftcore.run.placement`), starts processes and watches them; it transports no experiences and no weights. With the address
`local`, as in Ray itself, a cluster of this machine is started, which ends with this process, as do its actors, however this process ends.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from typing import Any, NamedTuple, TypedDict

import ray
from ray.exceptions import AuthenticationError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rftcore.launch.exits import ProcessWatch, RoleExitError
from rftcore.launch.ray_cluster import internals
from rftcore.run.placement import Machine, Placement
from rftdata.errors import ConfigError
from rftdata.processes import pid_space

# Other jobs of a cluster may end meanwhile.
_RESERVE_S = 60.0
# Ray's word for a cluster that it starts itself.
_LOCAL = "local"
# Processes of the local cluster, which Ray starts once per process.
_started: list[int] = []


class _LocalCluster(TypedDict, total=False):
    """Settings of a local cluster."""

    num_cpus: int
    include_dashboard: bool
    object_store_memory: int


def start_cluster() -> str:
    """Connect to the configured cluster or start a local one; return which, for a message."""
    address = configured_address()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    for name, value in internals.VARIABLES.items():
        os.environ.setdefault(name, value)
    local: _LocalCluster = (
        {}
        if address
        else {
            "num_cpus": max(len(os.sched_getaffinity(0)), 4),
            "include_dashboard": False,
            "object_store_memory": 128 * 2**20,
        }
    )
    # "local" instead of None, because None joins any cluster that is still running on this machine.
    try:
        _probe(address)
        with internals.separate_sessions() as started, internals.without_unused_processes():
            ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **local)
    except (OSError, AuthenticationError) as error:
        if not address:
            raise
        raise ConfigError(
            f"the Ray cluster that RAY_ADDRESS names cannot be joined: {str(error).splitlines()[0]}",
            value=address,
            todo="check that it runs (`ray status`); if it asks for a token, set RAY_AUTH_MODE=token and put the token into "
            "~/.ray/auth_token or RAY_AUTH_TOKEN; without RAY_ADDRESS everything runs on this machine, without Ray",
        ) from error
    _started.extend(started)
    internals.suppress_error_reports()
    return f"Ray cluster at {address}" if address else "a local Ray cluster"


def stop_cluster() -> None:
    """Disconnect from the cluster; a local one ends."""
    ray.shutdown()
    internals.kill_agents(_started)
    _started.clear()


def _probe(address: str | None) -> None:
    """Raise an OSError if nothing listens at an address, because Ray itself tries for minutes."""
    host, _, port = (address or "").rpartition(":")
    if port.isdigit() and "://" not in host:
        socket.create_connection((host, int(port)), timeout=10).close()


def configured_address() -> str | None:
    """Return the address of a cluster that others have started; None if there is none, or `RAY_ADDRESS` asks for a local one."""
    address = os.environ.get("RAY_ADDRESS")
    return None if address == _LOCAL else address or None


def machines() -> list[Machine]:
    """Return the machines of the cluster; the first is this one, if it belongs to the cluster."""
    here = ray.get_runtime_context().get_node_id()
    return [Machine(_name(node), int(node["Resources"].get("GPU", 0))) for node in _nodes(here)]


def reserve(placement: Placement, *, timeout_s: float = _RESERVE_S) -> PlacementGroup | None:
    """Reserve the GPUs of a run; None without any. They are free again when this process disconnects.

    Raises:
        ConfigError: the cluster has not so many GPUs free.
    """
    if not placement.bundles:
        return None
    sizes = [bundle.num_gpus for bundle in placement.bundles]
    reserved: PlacementGroup = placement_group(
        [{"GPU": float(size)} for size in sizes], strategy="STRICT_PACK" if placement.is_together else "PACK"
    )
    if not reserved.wait(timeout_s):
        remove_placement_group(reserved)
        raise ConfigError(
            f"the GPUs of the cluster are in use: {timeout_s:.0f} s were not enough to get bundles of {', '.join(map(str, sizes))} GPUs"
            + (" on one machine" if placement.is_together else ""),
            value=f"{int(ray.available_resources().get('GPU', 0))} free",
            allowed=f"{sum(sizes)} or more",
            todo="wait until other jobs of the cluster have ended (`ray status`), or use fewer GPUs",
        )
    return reserved


class ActorOptions:
    """Ray's options for the process of each role.

    Args:
        placement: where the roles are.
        reserved: the GPUs of its bundles; None without any.
    """

    def __init__(self, placement: Placement, reserved: PlacementGroup | None) -> None:
        self._placement, self._reserved = placement, reserved
        self._nodes = [node["NodeID"] for node in _nodes(ray.get_runtime_context().get_node_id())]

    def of_role(self, role: str) -> dict[str, Any]:
        """Return the options of a role's actor. CPUs are not reserved, because on a small machine roles alternate.

        A role without GPUs reserves a byte, because Ray places an actor that reserves nothing on any node, whatever its soft affinity.
        """
        number = self._placement.bundle_of(role)
        if number is not None and self._reserved is not None:
            bundle = PlacementGroupSchedulingStrategy(self._reserved, placement_group_bundle_index=number)
            share = self._placement.bundles[number].gpus_of_role
            return {"num_cpus": 0, "num_gpus": share, "scheduling_strategy": bundle}
        machine = self._placement.without_gpu.get(role)
        # Soft: if the machine has left the cluster, another one takes its place.
        node = "DEFAULT" if machine is None else NodeAffinitySchedulingStrategy(self._nodes[machine], soft=True)
        return {"num_cpus": 0, "num_gpus": 0, "memory": 1, "scheduling_strategy": node}


class ProcessIdentity(NamedTuple):
    """What another process needs to watch this one.

    Attributes:
        log: the file that it writes its errors to; empty if there is none.
        pid_space: where its id counts.
    """

    host: str
    pid: int
    log: str
    pid_space: str


def identity() -> ProcessIdentity:
    """Return the identity of this process."""
    log = os.readlink("/proc/self/fd/2") if os.path.isdir("/proc/self/fd") else ""
    return ProcessIdentity(socket.gethostname(), os.getpid(), log if os.path.isfile(log) else "", pid_space())


def watch_process(identity: ProcessIdentity) -> ProcessWatch:
    """Return a watch over a process of the cluster."""
    return ProcessWatch(
        identity.host, identity.pid, identity.log, identity.pid_space, ignored_lines=internals.LOG_MARKS
    )


def exit_error(watch: ProcessWatch | None, error: RayError) -> RoleExitError:
    """Describe how a process of the cluster ended, with Ray's report where its machine does not know."""
    return (watch or ProcessWatch("", 0)).exit_error(internals.exit_cause(str(error)))


def python_path() -> dict[str, str]:
    """Return the variable with which plug-ins next to the configuration, and a checkout that is not installed, can be imported elsewhere."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _nodes(first: str) -> list[dict[str, Any]]:
    """Return the machines of the cluster, the one with a given id first, the others by their addresses."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return sorted(alive, key=lambda node: (node["NodeID"] != first, node["NodeManagerAddress"], node["NodeID"]))


def _name(node: dict[str, Any]) -> str:
    return str(node.get("NodeManagerHostname") or node["NodeManagerAddress"])
