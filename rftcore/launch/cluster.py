"""Roles as Ray actors: one process each, on the cluster that `RAY_ADDRESS` names.

Ray reserves GPUs (`rftcore.run.placement`), starts processes and watches them; it transports no experiences and no weights. With the address
`local`, as in Ray itself, a cluster of this machine is started, which ends with this process, as do its actors, however this process ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import ray
from ray._private.node import Node
from ray.exceptions import AuthenticationError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rftcore.config.run import RunConfig
from rftcore.garbage import collect_rarely
from rftcore.launch.cluster_watch import STOP_S, ClusterWatch
from rftcore.launch.deaths import ProcessWatch, RoleDiedError
from rftcore.launch.launcher import Launcher, RoleProcess, RoleTask, role_tasks, run_role
from rftcore.launch.threads import Threads
from rftcore.resolved import ResolvedRun
from rftcore.run.placement import Machine, Placement
from rftdata.errors import ConfigError
from rftdata.processes import pid_space
from rftdata.run import Run

# Other jobs of a cluster may end meanwhile.
_RESERVE_S = 60.0
# Ray's word for a cluster that it starts itself.
_LOCAL = "local"


@dataclass(kw_only=True, eq=False)
class RoleActorProcess(RoleProcess):
    """A role in an actor.

    Attributes:
        actor: its Ray actor.
        identity: the call that returns its host, process id, log file and where the id counts, which `watch` needs.
        done: the call that ends when the role does.
    """

    actor: Any
    identity: Any
    done: Any


def identity() -> tuple[str, int, str, str]:
    """Return the host and id of this process, the file that it writes its errors to (empty if there is none), and where its id counts."""
    log = os.readlink("/proc/self/fd/2") if os.path.isdir("/proc/self/fd") else ""
    return socket.gethostname(), os.getpid(), log if os.path.isfile(log) else "", pid_space()


class Role:
    """The process of one role; it only runs the role's `main`."""

    @ray.method
    def identity(self) -> tuple[str, int, str, str]:
        """See `identity`."""
        return identity()

    @ray.method
    def run(self, role: str, config: RunConfig, run: str, options: dict[str, Any]) -> int:
        """Run a role to its end."""
        collect_rarely()
        return run_role(role, config, run, options)


# Not a decorator, because type checkers take a decorated class for the class itself.
RoleActor = ray.remote(max_restarts=0, max_task_retries=0)(Role)


class _LocalCluster(TypedDict, total=False):
    """Settings of a local cluster."""

    num_cpus: int
    include_dashboard: bool
    object_store_memory: int


def start_cluster() -> str:
    """Connect to the configured cluster or start a local one; return which, for a message."""
    address = _given_address()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Each role runs in a process with its own variables. The idle processes that Ray would start in advance, one per core, are never used.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
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
        with _processes_apart(), _without_unused_processes():
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
    _print_no_errors()
    return f"Ray cluster at {address}" if address else "a local Ray cluster"


def _print_no_errors() -> None:
    """Suppress Ray's paragraph about each process that ends, since `rft run` reports it in one sentence."""
    import ray._private.worker as driver

    if hasattr(driver, "print_to_stdstream"):  # this process prints nothing else with it: log_to_driver is off
        driver.print_to_stdstream = lambda *_, **__: None


def _probe(address: str | None) -> None:
    """Raise an OSError if nothing listens at an address, because Ray itself tries for minutes."""
    host, _, port = (address or "").rpartition(":")
    if port.isdigit() and "://" not in host:
        socket.create_connection((host, int(port)), timeout=10).close()


def _given_address() -> str | None:
    """Return the address of a cluster that others have started; None if there is none, or `RAY_ADDRESS` asks for a local one."""
    address = os.environ.get("RAY_ADDRESS")
    return None if address == _LOCAL else address or None


class RayLauncher(Launcher):
    """Actors of a Ray cluster."""

    name = "Ray cluster"
    stop_s = STOP_S

    def __init__(self) -> None:
        self._watch: ClusterWatch | None = None

    def start(self) -> str:
        return start_cluster()

    def machines(self) -> list[Machine]:
        return machines()

    def start_roles(
        self, resolved: ResolvedRun, run: Run, threads: Threads, placement: Placement
    ) -> list[RoleActorProcess]:
        """See `Launcher`.

        Raises:
            ConfigError: see `reserve`.
        """
        self._watch = ClusterWatch(is_local=_given_address() is None)
        seats = Seats(placement, reserve(placement))
        return [_start(task, seats) for task in role_tasks(resolved, run.name, threads)]

    def ended_roles(
        self, processes: list[RoleProcess], *, timeout_s: float
    ) -> tuple[list[RoleProcess], list[tuple[RoleProcess, BaseException | None]]]:
        actors = [process for process in processes if isinstance(process, RoleActorProcess)]
        try:
            done, _ = ray.wait([actor.done for actor in actors], num_returns=len(actors), timeout=timeout_s)
            for actor in actors:
                _watch(actor)
            ended = [actor for actor in actors if actor.done in done]
            return [actor for actor in actors if actor not in ended], [(actor, _error(actor)) for actor in ended]
        except RayError as error:
            lost = RoleDiedError(f"was lost with the Ray cluster: {' '.join(str(error).split())[:200]}")
            return [], [(process, lost) for process in processes]

    def kill(self, processes: Sequence[RoleProcess]) -> None:
        is_lost = self.lost() is not None
        for process in processes:
            if is_lost and process.watch is not None:
                process.watch.kill()  # those of other machines end with their raylet
            elif isinstance(process, RoleActorProcess):
                with contextlib.suppress(RayError):  # it, or the whole cluster, has already ended
                    ray.kill(process.actor, no_restart=True)

    def lost(self) -> str | None:
        return None if self._watch is None else self._watch.lost()

    def stop(self) -> None:
        self._watch = None
        stop_cluster()

    def close(self) -> None:
        self.stop()


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


class Seats:
    """Ray's options for the process of each role.

    Args:
        placement: where the roles are.
        reserved: the GPUs of its bundles; None without any.
    """

    def __init__(self, placement: Placement, reserved: PlacementGroup | None) -> None:
        self._placement, self._reserved = placement, reserved
        self._nodes = [node["NodeID"] for node in _nodes(ray.get_runtime_context().get_node_id())]

    def options(self, role: str) -> dict[str, Any]:
        """Return the options of a role's actor. CPUs are not reserved, because on a small machine roles take turns.

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


def python_path() -> dict[str, str]:
    """Return the variable with which plug-ins next to the configuration, and a checkout that is not installed, can be imported elsewhere."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _watch(process: RoleActorProcess) -> None:
    """Watch the process of a role as soon as its id is known."""
    if process.watch is None and ray.wait([process.identity], timeout=0)[0]:
        with contextlib.suppress(RayError):  # it ended before it answered
            process.watch = ProcessWatch(*ray.get(process.identity))


def _error(process: RoleActorProcess) -> BaseException | None:
    """Return the error of a role that has ended; None if it succeeded."""
    try:
        ray.get(process.done)
    except RayTaskError as error:
        return error.cause if isinstance(error.cause, BaseException) else error
    except RayError as error:
        return (process.watch or ProcessWatch("", 0)).death(str(error))
    except Exception as error:  # noqa: BLE001 - the boundary: every error is reported with the role name
        return error
    return None


def stop_cluster() -> None:
    """Disconnect from the cluster; a local one ends."""
    ray.shutdown()


def _start(task: RoleTask, seats: Seats) -> RoleActorProcess:
    environment = {**task.environment, **python_path()}
    actor = RoleActor.options(runtime_env={"env_vars": environment}, **seats.options(task.name)).remote()
    return RoleActorProcess(
        name=task.name,
        role=task.role,
        start=lambda: _start(task, seats),
        actor=actor,
        identity=actor.identity.remote(),
        done=actor.run.remote(task.role, task.config, task.run, task.options),
    )


@contextlib.contextmanager
def _processes_apart() -> Iterator[None]:
    """Run processes started here in separate sessions.

    A signal to the process group of `rft run` (Ctrl-C, `timeout`, a closed terminal) is meant for `rft run`, which asks the roles to
    stop. Ray's processes would end at once and take the roles with them.
    """
    apart = True

    def leave_session() -> None:
        if apart:
            os.setsid()

    # Runs in every process that Ray starts, because Ray passes a `preexec_fn` to `subprocess`, which then forks in Python.
    os.register_at_fork(after_in_child=leave_session)
    try:
        yield
    finally:
        apart = False


@contextlib.contextmanager
def _without_unused_processes() -> Iterator[None]:
    """Start a local cluster without the autoscaler, the log monitor and the server of the dashboard.

    A run uses none of them, and `ray.init` has no settings for this. Each is a Python process that imports Ray, which takes about a
    second of a core, and `ray.init` waits for the server. A release of Ray without these methods starts what it wants.
    """
    unused = [name for name in ("start_monitor", "start_log_monitor", "start_api_server") if hasattr(Node, name)]
    with contextlib.ExitStack() as restored:
        for name in unused:
            restored.callback(setattr, Node, name, getattr(Node, name))
            setattr(Node, name, lambda *_, **__: None)
        yield


def _nodes(first: str) -> list[dict[str, Any]]:
    """Return the machines of the cluster, the one with a given id first, the others by their addresses."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return sorted(alive, key=lambda node: (node["NodeID"] != first, node["NodeManagerAddress"], node["NodeID"]))


def _name(node: dict[str, Any]) -> str:
    return str(node.get("NodeManagerHostname") or node["NodeManagerAddress"])
