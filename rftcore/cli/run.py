"""`rft run`: starts all roles on this machine, or on the Ray cluster of RAY_ADDRESS, and prints the final table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rftcore.cli.session import ConfigBufferOption, opened
from rftcore.garbage import large_imports
from rftdata.errors import ConfigError
from rftdata.uri import is_server, redacted

if TYPE_CHECKING:
    from rftcore.config.run import RunConfig

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="a.b=VALUE", help="Change one setting of the file; VALUE is read as YAML. Repeatable."
    ),
]
TargetsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="CONFIG RUN", help="A configuration file, or with --resume the name of a run, or both."),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Continue RUN (by default the newest run of the file or buffer).")
]
AtStepOption = Annotated[
    int | None,
    typer.Option(
        "--at-step", min=0, help="With --resume: go back to the checkpoint of this step, 0 for the initial weights."
    ),
]
KeepRolloutsOption = Annotated[
    bool, typer.Option("--keep-rollouts", help="With --at-step or --fork: use the groups of later steps.")
]
ForkOption = Annotated[
    str | None,
    typer.Option("--fork", metavar="NAME", help="With --resume: start a new run there; the old one is not changed."),
]
KeepRunningOption = Annotated[
    bool, typer.Option("--keep-running", help="Resume the run by itself after an end that is not the user's.")
]
PlainOption = Annotated[bool, typer.Option("--plain", help="Print lines instead of a live view, on a terminal too.")]


def run(
    targets: TargetsArgument = None,
    overrides: SetOption = None,
    resume: ResumeOption = False,
    at_step: AtStepOption = None,
    keep_rollouts: KeepRolloutsOption = False,
    fork: ForkOption = None,
    buffer: ConfigBufferOption = None,
    plain: PlainOption = False,
    keep_running: KeepRunningOption = False,
) -> None:
    """Run a configuration: explorers, pipeline and trainer, then the results.

    `rft run CONFIG` starts a new run. `rft run --resume`, `rft run --resume RUN` and `rft run CONFIG --resume [RUN]` continue
    a stored run from its last checkpoint; without CONFIG its stored configuration is used. `--at-step N` goes back to an
    earlier checkpoint. Later groups stay stored but are not used, unless `--keep-rollouts` keeps their rollouts. `--fork NAME`
    does the same in a new run.

    Ctrl-C, SIGTERM and SIGHUP interrupt the run in good order (exit codes 130, 143, 129); a second signal kills its processes.
    In both cases `--resume` continues from the last checkpoint.

    With `--keep-running` the run is a process of its own, and is resumed when it fails or is killed, after a growing pause. A finished run, a signal,
    a mistake that is found before it begins, an end before the first trained step, and five ends without a trained step in between are final.

    In CONFIG, `buffer.uri` is relative to the current folder (so that later commands find ./buffer); the files of
    tasks, rewards, workflows and models are relative to the file.
    """
    _check_going_back(resume, at_step, keep_rollouts, fork)
    file, name = split_targets(targets or [], resume)
    if file is None:
        name, config = stored_configuration(name, overrides, buffer)
        stages = [config]
    else:
        stages = stage_configurations(file, overrides, buffer)
    if keep_running:
        options = [
            *(["--resume"] if resume else []),
            *([f"--at-step={at_step}"] if at_step is not None else []),
            *(["--keep-rollouts"] if keep_rollouts else []),
            *([f"--fork={fork}"] if fork is not None else []),
        ]
        given = [
            *(f"--set={override}" for override in overrides or []),
            *([f"--buffer={buffer}"] if buffer else []),
            *(["--plain"] if plain else []),
        ]

        def later(stored: str) -> list[str]:
            # A chain of stages goes on in the first that has not finished.
            named = [stored] if len(stages) == 1 else []
            return [*([str(file)] if file else []), "--resume", *named, *given]

        raise typer.Exit(_keep_running(stages, [*(targets or []), *options, *given], later))
    # Imported after the configuration is checked, so that a mistake is reported at once.
    with large_imports():
        from rftcore.launch import stages as chain
        from rftcore.launch import supervisor
        from rftcore.launch.keep_running import follow_parent
        from rftcore.launch.launchers import open_launcher
        from rftcore.launch.preparation import GoBack
        from rftcore.launch.views import open_view

    follow_parent()
    go_back = GoBack(at_step, keep_rollouts, fork) if at_step is not None or fork is not None else None
    if len(stages) > 1:
        _refuse_one_of_many(name, go_back is not None)
    with open_launcher(stages) as launcher, open_view(plain=plain) as view:
        if len(stages) > 1:
            code = chain.run_stages(stages, launcher, resume=resume, view=view)
        else:
            code = supervisor.run(stages[0], launcher, resume=resume, name=name, go_back=go_back, view=view)
    raise typer.Exit(code)


def _keep_running(stages: list[RunConfig], first: list[str], later: Callable[[str], list[str]]) -> int:
    """Let another process run, and resume the run after ends that are not the user's; return the exit code."""
    import rftdata
    from rftcore.cli.output import warn
    from rftcore.launch.keep_running import keep_running
    from rftdata.reports.progress import Progress

    def num_steps(name: str) -> int:
        """Return the steps of a run, and those of the stages before it."""
        with rftdata.open(stages[0].buffer, create=False, application="rft run") as buffer:
            run, steps = buffer.find_run(name), 0
            while True:
                steps += Progress(run).snapshot().step
                if run.parent_run_id is None or len(stages) == 1:
                    return steps
                run = buffer.find_run(run.parent_run_id)

    return keep_running(first, later, num_steps, warn)


def _check_going_back(resume: bool, at_step: int | None, keep_rollouts: bool, fork: str | None) -> None:
    if not resume and (at_step is not None or fork is not None):
        raise ConfigError(
            "--at-step and --fork begin from a stored run", todo="write `rft run --resume RUN --at-step N`"
        )
    if keep_rollouts and at_step is None and fork is None:
        raise ConfigError(
            "--keep-rollouts is only allowed when a run goes back",
            todo="name the step: --at-step N, or omit it",
        )
    if fork is not None and not fork.strip():
        raise ConfigError("the fork needs a name", value=repr(fork), todo="write --fork NAME")


def _refuse_one_of_many(name: str | None, goes_back: bool) -> None:
    if name is not None or goes_back:
        raise ConfigError(
            "the file has stages, and the command names one of their runs",
            todo="omit the file: `rft run --resume RUN`; `rft run FILE --resume` continues the chain",
        )


def split_targets(targets: list[str], resume: bool) -> tuple[Path | None, str | None]:
    """Return CONFIG and RUN from the positional arguments."""
    rest = list(targets)
    file = None
    if rest and (not resume or Path(rest[0]).suffix in (".yaml", ".yml") or Path(rest[0]).is_file()):
        file = Path(rest.pop(0))
    name = rest.pop(0) if rest and resume else None
    if rest:
        raise ConfigError(
            "too many arguments", value=" ".join(targets), allowed="CONFIG, or --resume with [CONFIG] [RUN]"
        )
    if file is None and not resume:
        raise ConfigError(
            "no configuration file is given", todo="write `rft run CONFIG`, or `rft run --resume` to continue a run"
        )
    return file, name


def configuration(file: Path, overrides: list[str] | None, buffer_uri: str | None) -> RunConfig:
    """Return the configuration of a file with overrides applied.

    Raises:
        ConfigError: the file is invalid, or --buffer and --set name two buffers.
    """
    from rftcore.config.run import load_config

    return load_config(file, _with_buffer(overrides, buffer_uri))


def stage_configurations(file: Path, overrides: list[str] | None, buffer_uri: str | None) -> list[RunConfig]:
    """Return the configurations of a file's stages, with overrides applied to all; a file without stages is a single stage.

    Raises:
        ConfigError: the file is invalid, or --buffer and --set name two buffers.
    """
    from rftcore.config.run import load_stages

    return load_stages(file, _with_buffer(overrides, buffer_uri))


def _with_buffer(overrides: list[str] | None, buffer_uri: str | None) -> list[str]:
    changes = list(overrides or [])
    if buffer_uri:
        _refuse_two_buffers(changes, buffer_uri)
        changes.append(f"buffer.uri={json.dumps(buffer_uri)}")
    return changes


def stored_configuration(
    name: str | None, overrides: list[str] | None, buffer_uri: str | None
) -> tuple[str, RunConfig]:
    """Return the name of a stored run and its configuration, with the buffer in which it was found."""
    from rftcore.cli.session import find_buffer
    from rftcore.config.run import apply_override, parse_config
    from rftcore.launch.preparation import named_resumable

    found = find_buffer(buffer_uri)
    _refuse_two_buffers(overrides or [], found)
    with opened(found, "rft run", schema="migrate") as buffer:
        run = named_resumable(buffer, name)
    raw = dict(run.config)
    base_dir = Path(raw.pop("base_dir", "."))
    for override in overrides or []:
        apply_override(raw, override)
    # The stored address lacks the password, and the folder may have moved since.
    raw["buffer"] = {**raw.get("buffer", {}), "uri": found}
    return run.name, parse_config(raw, base_dir, f"the stored configuration of run {run.name!r}")


def _refuse_two_buffers(overrides: list[str], uri: str) -> None:
    """Refuse a --set that names another buffer than `uri`, because one of the two would be ignored."""
    from rftcore.config.run import apply_override

    changes: dict[str, Any] = {}
    for override in overrides:
        apply_override(changes, override)
    section = changes.get("buffer")
    asked = section.get("uri") if isinstance(section, dict) else None
    if asked is not None and _place(str(asked)) != _place(uri):
        raise ConfigError(
            "two buffers are named",
            value=[redacted(str(asked)), redacted(uri)],
            todo="omit --set buffer.uri or --buffer",
        )


def _place(uri: str) -> str:
    return uri if is_server(uri) else str(Path(uri).resolve())
