"""Roles as Ray actors: one process each, on the cluster that `RAY_ADDRESS` names."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from rftcore.config.run import RunConfig
from rftcore.garbage import collect_rarely
from rftcore.launch.exits import RoleExitError
from rftcore.launch.launcher import Launcher, RoleProcess, RoleTask, role_tasks, run_role
from rftcore.launch.ray_cluster import cluster
from rftcore.launch.ray_cluster.cluster import ActorOptions, ProcessIdentity
from rftcore.launch.ray_cluster.watch import STOP_S, ClusterWatch
from rftcore.launch.threads import Threads
from rftcore.resolved import ResolvedRun
from rftcore.run.placement import Machine, Placement
from rftdata.run import Run


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


class Role:
    """The process of one role; it only runs the role's `main`."""

    @ray.method
    def identity(self) -> ProcessIdentity:
        """See `cluster.identity`."""
        return cluster.identity()

    @ray.method
    def run(self, role: str, config: RunConfig, run: str, options: dict[str, Any]) -> int:
        """Run a role to its end."""
        collect_rarely()
        return run_role(role, config, run, options)


# Not a decorator, because type checkers take a decorated class for the class itself.
RoleActor = ray.remote(max_restarts=0, max_task_retries=0)(Role)


class RayLauncher(Launcher):
    """Actors of a Ray cluster."""

    name = "Ray cluster"
    stop_s = STOP_S

    def __init__(self) -> None:
        self._watch: ClusterWatch | None = None

    def prepare(self, config: RunConfig) -> None:
        """Do nothing: the cluster is joined when the run is stored."""

    def start(self) -> str:
        return cluster.start_cluster()

    def machines(self) -> list[Machine]:
        return cluster.machines()

    def start_roles(
        self, resolved: ResolvedRun, run: Run, threads: Threads, placement: Placement
    ) -> list[RoleActorProcess]:
        """See `Launcher`.

        Raises:
            ConfigError: see `cluster.reserve`.
        """
        self._watch = ClusterWatch(is_local=cluster.configured_address() is None)
        actor_options = ActorOptions(placement, cluster.reserve(placement))
        return [_start(task, actor_options) for task in role_tasks(resolved, run.name, threads)]

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
            lost = RoleExitError(f"was lost with the Ray cluster: {' '.join(str(error).split())[:200]}")
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
        cluster.stop_cluster()

    def close(self) -> None:
        self.stop()


def _watch(process: RoleActorProcess) -> None:
    """Watch the process of a role as soon as its id is known."""
    if process.watch is None and ray.wait([process.identity], timeout=0)[0]:
        with contextlib.suppress(RayError):  # it ended before it answered
            process.watch = cluster.watch_process(ray.get(process.identity))


def _error(process: RoleActorProcess) -> BaseException | None:
    """Return the error of a role that has ended; None if it succeeded."""
    try:
        ray.get(process.done)
    except RayTaskError as error:
        return error.cause if isinstance(error.cause, BaseException) else error
    except RayError as error:
        return cluster.exit_error(process.watch, error)
    except Exception as error:  # noqa: BLE001 - the boundary: every error is reported with the role name
        return error
    return None


def _start(task: RoleTask, actor_options: ActorOptions) -> RoleActorProcess:
    environment = {**task.environment, **cluster.python_path()}
    actor = RoleActor.options(runtime_env={"env_vars": environment}, **actor_options.of_role(task.name)).remote()
    return RoleActorProcess(
        name=task.name,
        role=task.role,
        start=lambda: _start(task, actor_options),
        actor=actor,
        identity=actor.identity.remote(),
        done=actor.run.remote(task.role, task.config, task.run, task.options),
    )
