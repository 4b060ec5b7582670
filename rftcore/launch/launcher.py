"""The interface of launchers, which start the roles of a run, and the supervisor's record of their processes.

There are two launchers: one starts processes of this machine (`rftcore.launch.local_processes`), the other actors of a Ray cluster
(`rftcore.launch.ray_cluster`). The supervisor uses either through `Launcher`, and neither does any of the run's work.
"""

from __future__ import annotations

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from rftcore.config.run import RunConfig
from rftcore.engines import ENGINES
from rftcore.engines.base import Engine, EngineConfig
from rftcore.garbage import large_imports
from rftcore.launch.exits import ProcessWatch
from rftcore.launch.threads import Threads, thread_environment
from rftcore.resolved import ResolvedRun
from rftcore.run.join import JoinedRun, join_run
from rftcore.run.placement import Machine, Placement, role_names
from rftdata.connection import with_segments
from rftdata.errors import RoleFailedError
from rftdata.run import Run

L = TypeVar("L", bound="Launcher")


@dataclass(frozen=True)
class Preparation:
    """What a new process does for its role while it has one thread: it needs neither the run nor the buffer.

    Attributes:
        modules: imported first.
        engine: the engine's class and settings, with which it prepares the process.
    """

    modules: tuple[str, ...] = ()
    engine: tuple[type[Engine], EngineConfig] | None = None

    def run(self) -> None:
        """Prepare this process. The role does again what fails, and reports the error."""
        with large_imports():
            for module in self.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(module)
        if self.engine is not None:
            engine_class, config = self.engine
            with contextlib.suppress(Exception):
                engine_class.prepare_process(config)


@dataclass(frozen=True)
class RoleTask:
    """What the process of a role does.

    Attributes:
        name: name of the process in messages.
        role: explorer, pipeline or trainer.
        run: name of the run that it joins.
        options: further arguments of the role's `main`.
        environment: variables that its process needs.
    """

    name: str
    role: str
    config: RunConfig
    run: str
    options: dict[str, Any]
    environment: dict[str, str]
    preparation: Preparation = Preparation()


@dataclass(kw_only=True, eq=False)
class RoleProcess:
    """A started role.

    Attributes:
        name: name of the process in messages.
        role: explorer, pipeline or trainer.
        start: starts the same role in another process.
        watch: observes the end of the process; None until its id is known.
    """

    name: str
    role: str
    start: Callable[[], RoleProcess] = field(repr=False)
    watch: ProcessWatch | None = None


class Launcher(ABC):
    """Starts the roles of runs, and watches and kills their processes. A context manager.

    Attributes:
        name: what the processes depend on, in messages.
        stop_s: for how long roles can still stop in good order after it is lost.
    """

    name: str
    stop_s: float

    @abstractmethod
    def prepare(self, config: RunConfig) -> None:
        """Begin beside the checks of a run what its roles need and takes long; wait for none of it, and raise nothing."""

    @abstractmethod
    def start(self) -> str:
        """Get ready to start roles; return what starts them, for a message."""

    @abstractmethod
    def machines(self) -> list[Machine]:
        """Return the machines on which roles can run; the first is this one if it is among them."""

    @abstractmethod
    def start_roles(
        self, resolved: ResolvedRun, run: Run, threads: Threads, placement: Placement
    ) -> Sequence[RoleProcess]:
        """Start every role of the run's mode where it is placed.

        Raises:
            ConfigError: its GPUs are in use.
        """

    @abstractmethod
    def ended_roles(
        self, processes: list[RoleProcess], *, timeout_s: float
    ) -> tuple[list[RoleProcess], list[tuple[RoleProcess, BaseException | None]]]:
        """Wait a short time; return the running roles, and the ended roles with the errors of those that failed."""

    @abstractmethod
    def kill(self, processes: Sequence[RoleProcess]) -> None:
        """Kill roles that did not end by themselves."""

    @abstractmethod
    def lost(self) -> str | None:
        """Return a sentence that follows `name`, if no role can be started or watched any more; None otherwise."""

    def refuse_lost(self) -> None:
        """Refuse to store a run whose roles could not be started.

        Raises:
            RoleFailedError: no role can be started any more.
        """
        if (lost := self.lost()) is not None:
            raise RoleFailedError(f"the {self.name} {lost}", todo="start the run again; nothing of it was stored")

    @abstractmethod
    def stop(self) -> None:
        """End what `start` began, with roles that still run; another run may start then."""

    @abstractmethod
    def close(self) -> None:
        """End the launcher, with roles that still run."""

    def __enter__(self: L) -> L:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def reachable(config: RunConfig) -> RunConfig:
    """Return the configuration with absolute paths of the buffer, for processes with another working directory."""
    places = {"uri": config.buffer.uri, "segments": with_segments(config.buffer).segments}
    absolute = {
        key: place if place is None or "://" in place else str(Path(place).resolve()) for key, place in places.items()
    }
    copy = config.model_copy(update={"buffer": config.buffer.model_copy(update=absolute)})
    copy._base_dir = config.base_dir
    return copy


def role_tasks(resolved: ResolvedRun, run: str, threads: Threads) -> Iterator[RoleTask]:
    """Yield what the processes of a run do, in the order in which they start."""
    config, names = resolved.config, role_names(resolved.config)
    if config.has_explorer:
        environment = resolved.engine_class.process_environment(resolved.engine(0))
        for index, name in enumerate(names["explorer"]):
            yield RoleTask(
                name,
                "explorer",
                config,
                run,
                {"index": index},
                environment | thread_environment(threads.explorer),
                _engine_preparation(resolved, index),
            )
    for name in names["pipeline"]:
        yield RoleTask(name, "pipeline", config, run, {}, thread_environment(1))
    for name in names["trainer"]:
        yield RoleTask(name, "trainer", config, run, {}, thread_environment(threads.trainer))


def has_built_in_engine(resolved: ResolvedRun) -> bool:
    """Return whether the run has an engine that is not the user's, which the checks load first."""
    return resolved.config.has_explorer and resolved.config.explorer.engine in ENGINES.builtins


def _engine_preparation(resolved: ResolvedRun, index: int) -> Preparation:
    if not has_built_in_engine(resolved):
        return Preparation()
    return Preparation(resolved.engine_class.imported_modules(), (resolved.engine_class, resolved.engine(index)))


def run_role(
    role: str,
    config: RunConfig,
    run: str,
    options: dict[str, Any],
    phases: Sequence[tuple[str, float]] = (),
    *,
    checks_packages: bool = True,
) -> int:
    """Run a role in this process to its end; return its exit code.

    Args:
        phases: the parts of its start until now, see `Worker`.
        checks_packages: see `join_run`.
    """

    def join() -> JoinedRun:
        return join_run(config, run, phases, checks_packages=checks_packages)

    if role == "explorer":
        with large_imports():
            from rftcore.explorer.role import main as explore

        return explore(join(), **options)
    if role == "pipeline":
        with large_imports():
            from rftcore.pipeline.role import main as process

        return process(join(), **options)
    if config.only_evaluates:
        from rftcore.explorer.evaluation_run import main as evaluate

        return evaluate(join(), **options)
    with large_imports():
        from rftcore.trainer.role import main as train

    return train(join(), **options)


def role_modules(configs: Sequence[RunConfig]) -> list[str]:
    """Return the modules of the roles of these runs."""
    explorer = ["rftcore.explorer.role"] if any(config.has_explorer for config in configs) else []
    if all(config.only_evaluates for config in configs):
        return [*explorer, "rftcore.explorer.evaluation_run"]
    return [*explorer, "rftcore.pipeline.role", "rftcore.trainer.role"]
