"""`rft run`: starts all roles on this machine, or on the Ray cluster of RAY_ADDRESS, and prints the final table."""

from __future__ import annotations

from typing import Annotated

import typer

from rftcore.cli.configuration import SetOption, split_targets, stage_configurations, stored_configuration
from rftcore.cli.session import ConfigBufferOption

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
    bool, typer.Option("--keep-running", help="Resume the run automatically after an end that you did not ask for.")
]
PlainOption = Annotated[bool, typer.Option("--plain", help="Print lines instead of a live view, on a terminal too.")]
StudioOption = Annotated[
    bool, typer.Option("--studio", help="Show pages on the buffer in a browser while the run lasts, see `rft studio`.")
]


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
    studio: StudioOption = False,
    digest: Annotated[str | None, typer.Option("--digest", hidden=True)] = None,
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

    With `--studio` the run prints the address of its pages (see `rft studio`). The run never waits for them.

    In CONFIG, `buffer.uri` is relative to the current folder (so that later commands find ./buffer); the files of
    tasks, rewards, workflows and models are relative to the file.
    """
    from rftcore.cli.output import warn
    from rftcore.launch.run_request import Continuation, RunRequest, run_here, run_until_final

    continuation = Continuation(resume, at_step, keep_rollouts, fork)
    file, name = split_targets(targets or [], resume)
    if file is None:
        name, config = stored_configuration(name, overrides, buffer)
        stages = [config]
    else:
        stages = stage_configurations(file, overrides, buffer, digest)
    settings = [*(f"--set={override}" for override in overrides or []), *([f"--buffer={buffer}"] if buffer else [])]
    request = RunRequest(stages, file, name, continuation, settings, plain, studio)
    raise typer.Exit(run_until_final(request, warn) if keep_running else run_here(request))
