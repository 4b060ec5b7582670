"""What `rft run` was asked for, and the two ways of doing it: in this process, or in processes that are started again."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import rftdata
from rftcore.config.run import RunConfig
from rftcore.garbage import large_imports
from rftcore.launch.automatic_resume import follow_parent, keep_running
from rftcore.launch.start_phases import StartPhases
from rftdata.errors import ConfigError
from rftdata.reports.progress import Progress

if TYPE_CHECKING:
    from rftcore.launch.launcher import Launcher
    from rftcore.launch.preparation import GoBack


@dataclass(frozen=True)
class Continuation:
    """Whether and from where a stored run is continued.

    Attributes:
        resume: continue a stored run.
        at_step: the checkpoint to go back to; None for the newest.
        keep_rollouts: use the groups of later steps.
        fork: name of the run that begins there; None for the stored run itself.

    Raises:
        ConfigError: the options contradict each other.
    """

    resume: bool = False
    at_step: int | None = None
    keep_rollouts: bool = False
    fork: str | None = None

    def __post_init__(self) -> None:
        if self.goes_back and not self.resume:
            raise ConfigError(
                "--at-step and --fork begin from a stored run", todo="write `rft run --resume RUN --at-step N`"
            )
        if self.keep_rollouts and not self.goes_back:
            raise ConfigError(
                "--keep-rollouts is only allowed when a run goes back",
                todo="name the step: --at-step N, or omit it",
            )
        if self.fork is not None and not self.fork.strip():
            raise ConfigError("the fork needs a name", value=repr(self.fork), todo="write --fork NAME")

    @property
    def goes_back(self) -> bool:
        """Whether it begins at an earlier step or in a new run."""
        return self.at_step is not None or self.fork is not None

    def go_back(self) -> GoBack | None:
        """Return where the run goes back to; None if it continues where it ended."""
        from rftcore.launch.preparation import GoBack

        return GoBack(self.at_step, self.keep_rollouts, self.fork) if self.goes_back else None

    def arguments(self) -> list[str]:
        """Return the options of `rft run` that name it."""
        return [
            *(["--resume"] if self.resume else []),
            *([f"--at-step={self.at_step}"] if self.at_step is not None else []),
            *(["--keep-rollouts"] if self.keep_rollouts else []),
            *([f"--fork={self.fork}"] if self.fork is not None else []),
        ]


@dataclass(frozen=True)
class RunRequest:
    """What `rft run` was asked for.

    Attributes:
        stages: configurations of the file's stages, or the only one.
        file: the configuration file; None if the stored configuration of a run is used.
        name: the run to continue; None for the newest of the configuration's name.
        settings: options that change the configuration.
        plain: print lines on a terminal too.
        studio: show pages on the buffer beside the run.

    Raises:
        ConfigError: a run is named beside a file with several stages.
    """

    stages: Sequence[RunConfig]
    file: Path | None
    name: str | None
    continuation: Continuation
    settings: Sequence[str]
    plain: bool
    studio: bool = False

    def __post_init__(self) -> None:
        if len(self.stages) > 1 and (self.name is not None or self.continuation.goes_back):
            raise ConfigError(
                "the file has stages, and the command names one of their runs",
                todo="omit the file: `rft run --resume RUN`; `rft run FILE --resume` continues the chain",
            )

    def arguments(self) -> list[str]:
        """Return the arguments of `rft run` that make this request."""
        return self._arguments(self.name, self.continuation)

    def resume_arguments(self, name: str) -> list[str]:
        """Return the arguments of `rft run` that resume the run of a name, or the first stage that has not finished."""
        return self._arguments(name if len(self.stages) == 1 else None, Continuation(resume=True))

    def _arguments(self, name: str | None, continuation: Continuation) -> list[str]:
        targets = [str(target) for target in (self.file, name) if target is not None]
        return [
            *targets,
            *continuation.arguments(),
            *self.settings,
            *(["--plain"] if self.plain else []),
            *(["--studio"] if self.studio else []),
        ]

    def num_steps(self, name: str) -> int:
        """Return the trained steps of a run, and those of the stages before it."""
        with rftdata.open(self.stages[0].buffer, create=False, application="rft run") as buffer:
            run, steps = buffer.find_run(name), 0
            while True:
                steps += Progress(run).snapshot().step
                if run.parent_run_id is None or len(self.stages) == 1:
                    return steps
                run = buffer.find_run(run.parent_run_id)


def run_here(request: RunRequest) -> int:
    """Run it in this process; return the exit code."""
    phases = StartPhases("modules are imported", of_process=True)
    follow_parent()
    stages, continuation = request.stages, request.continuation
    with _launcher(stages) as launcher, ExitStack() as stack:
        with large_imports():  # beside those of the launcher's processes
            from rftcore.launch import staged_runs, supervisor
            from rftcore.launch.studio_beside import StudioBeside
            from rftcore.launch.terminal.views import open_view

        view = stack.enter_context(open_view(plain=request.plain))
        if request.studio:
            stack.enter_context(StudioBeside(stages[0].buffer, view))
        if len(stages) > 1:
            return staged_runs.run_stages(stages, launcher, resume=continuation.resume, view=view)
        return supervisor.run(
            stages[0],
            launcher,
            resume=continuation.resume,
            name=request.name,
            go_back=continuation.go_back(),
            view=view,
            phases=phases,
        )


def _launcher(configs: Sequence[RunConfig]) -> Launcher:
    """Return the Ray cluster if `RAY_ADDRESS` is set, otherwise this machine, which forks and is therefore opened before threads start.

    Args:
        configs: of the runs whose roles will be started.
    """
    if os.environ.get("RAY_ADDRESS"):
        from rftcore.launch.ray_cluster.launcher import RayLauncher

        return RayLauncher()
    with large_imports():
        from rftcore.launch.local_processes.launcher import LocalLauncher

    return LocalLauncher(configs)


def run_until_final(request: RunRequest, report: Callable[[str], None]) -> int:
    """Run it in another process, and resume the run after ends that are not the user's; return the exit code.

    Args:
        report: receives a line for each resumption.
    """
    return keep_running(request.arguments(), request.resume_arguments, request.num_steps, report)
