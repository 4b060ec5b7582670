"""Roles as Ray actors: one process each, on a local cluster of this machine or on a configured one.

Ray places and watches processes; it transports no experiences and no weights. `RAY_ADDRESS` names a cluster. Without it a local one is
started, which ends with this process, as do its actors, however this process ends.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypedDict

import ray
from ray._private.node import Node
from ray.exceptions import AuthenticationError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rftcore.config import RunConfig
from rftcore.garbage import collect_rarely, large_imports
from rftcore.launch.deaths import ProcessWatch
from rftcore.launch.threads import Threads, thread_environment
from rftcore.resolved import ResolvedRun
from rftdata.errors import ConfigError


@dataclass(kw_only=True)
class RoleProcess:
    """A started role.

    Attributes:
        name: name of the process in messages.
        role: explorer, pipeline or trainer.
        start: starts the same role in another process.
        actor: its Ray actor.
        identity: the call that returns its host and process id.
        done: the call that ends when the role does.
        watch: observes the end of the process; None until `identity` is answered.
    """

    name: str
    role: str
    start: Callable[[], RoleProcess] = field(repr=False)
    actor: Any
    identity: Any
    done: Any
    watch: ProcessWatch | None = None


class Role:
    """The process of one role; it only runs the role's `main`."""

    @ray.method
    def identity(self) -> tuple[str, int]:
        """Return the host and id of this process."""
        return socket.gethostname(), os.getpid()

    @ray.method
    def run(self, role: str, config: RunConfig, run: str, options: dict[str, Any]) -> int:
        """Run a role to its end."""
        collect_rarely()
        if role == "explorer":
            with large_imports():
                from rftcore.explorer.role import main as explore

            return explore(config, run, **options)
        if role == "pipeline":
            with large_imports():
                from rftcore.pipeline.role import main as process

            return process(config, run, **options)
        with large_imports():
            from rftcore.trainer.role import main as train

        return train(config, run, **options)


# Not a decorator, because type checkers take a decorated class for the class itself.
RoleActor = ray.remote(max_restarts=0, max_task_retries=0)(Role)


class _LocalCluster(TypedDict, total=False):
    """Settings of a local cluster."""

    num_cpus: int
    include_dashboard: bool
    object_store_memory: int


def start_cluster() -> str:
    """Connect to the configured cluster or start a local one; return which, for a message."""
    address = os.environ.get("RAY_ADDRESS")
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
            "~/.ray/auth_token or RAY_AUTH_TOKEN; without RAY_ADDRESS `rft run` starts a local cluster",
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


def start_roles(resolved: ResolvedRun, run: str, threads: Threads) -> list[RoleProcess]:
    """Start every role of the run's mode."""
    config = resolved.config
    gpus = _gpu_shares(config)
    processes = []
    if config.has_explorer:
        environment = resolved.engine_class.process_environment(resolved.engine(0)) | thread_environment(
            threads.explorer
        )
        for index in range(config.explorer.num_explorers):
            name = "explorer" if config.explorer.num_explorers == 1 else f"explorer {index}"
            processes.append(_start(name, "explorer", config, run, environment, gpus[0], {"index": index}))
    if config.sampling.source is None:
        # One machine after the other. Ray's own spreading counts what actors reserve, and these reserve nothing.
        nodes, num_workers = _nodes(), config.pipelines.workers
        for index in range(num_workers):
            name = "pipeline" if num_workers == 1 else f"pipeline {index}"
            node = nodes[index % len(nodes)] if num_workers > 1 else None
            processes.append(_start(name, "pipeline", config, run, thread_environment(1), 0, {}, node))
    processes.append(_start("trainer", "trainer", config, run, thread_environment(threads.trainer), gpus[1], {}))
    return processes


def ended_roles(
    processes: list[RoleProcess], *, timeout_s: float
) -> tuple[list[RoleProcess], list[tuple[RoleProcess, BaseException | None]]]:
    """Wait for a short time; return the running roles, and the ended roles with the errors of those that failed."""
    ended, _ = ray.wait([process.done for process in processes], num_returns=len(processes), timeout=timeout_s)
    running: list[RoleProcess] = []
    errors: list[tuple[RoleProcess, BaseException | None]] = []
    for process in processes:
        _watch(process)
        if process.done in ended:
            errors.append((process, _error(process)))
        else:
            running.append(process)
    return running, errors


def _watch(process: RoleProcess) -> None:
    """Watch the process of a role as soon as its id is known."""
    if process.watch is None and ray.wait([process.identity], timeout=0)[0]:
        with contextlib.suppress(RayError):  # it ended before it answered
            process.watch = ProcessWatch(*ray.get(process.identity))


def _error(process: RoleProcess) -> BaseException | None:
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


def kill(processes: list[RoleProcess]) -> None:
    """Kill roles that did not end by themselves."""
    for process in processes:
        with contextlib.suppress(RayError):  # it, or the whole cluster, has already ended
            ray.kill(process.actor, no_restart=True)


def stop_cluster() -> None:
    """Disconnect from the cluster; a local one ends."""
    ray.shutdown()


def _start(
    name: str, role: str, config: RunConfig, run: str, environment: dict[str, str], gpus: float, options: dict[str, Any],
    node: str | None = None,
) -> RoleProcess:  # fmt: skip
    # Plug-ins next to the configuration, and a checkout that is not installed, must be importable in the process too.
    environment = {**environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    placed = "DEFAULT" if node is None else NodeAffinitySchedulingStrategy(node, soft=False)

    def start() -> RoleProcess:
        # CPUs are not reserved, because on a small machine roles take turns.
        actor = RoleActor.options(
            num_cpus=0, num_gpus=gpus, runtime_env={"env_vars": environment}, scheduling_strategy=placed
        ).remote()
        return RoleProcess(
            name=name,
            role=role,
            start=start,
            actor=actor,
            identity=actor.identity.remote(),
            done=actor.run.remote(role, config, run, options),
        )

    return start()


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


def _nodes() -> list[str]:
    """Return the ids of the cluster's machines."""
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def _gpu_shares(config: RunConfig) -> tuple[float, float]:
    """Return the GPUs of each explorer and of the trainer.

    A trainer of several GPUs has them to itself. Otherwise each role has one, or an equal share if there are fewer than roles.

    Raises:
        ConfigError: the trainer's GPUs leave none to the explorers.
    """
    gpus, num_explorers = int(ray.cluster_resources().get("GPU", 0)), config.explorer.num_explorers
    trainer = config.trainer.num_gpus or 1
    if trainer == 1 or gpus == 0:  # without GPUs, ranks are processes on the CPU
        share = _share(gpus, num_explorers + 1)
        return share, share
    left = gpus - trainer
    if left < (1 if config.has_explorer else 0):
        raise ConfigError(
            "trainer.num_gpus leaves no GPU to the explorers"
            if left == 0
            else "trainer.num_gpus is more than there are GPUs",
            value=trainer,
            allowed=f"up to {gpus - 1 if config.has_explorer else gpus} of {gpus}",
        )
    return _share(left, num_explorers), trainer


def _share(gpus: int, num_roles: int) -> float:
    """Return one GPU, or the share of one so that as many roles as necessary fit on each."""
    return 1.0 / math.ceil(num_roles / gpus) if gpus else 0.0
