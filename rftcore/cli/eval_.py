"""`rft eval`: any model or checkpoint on any tasks, without a trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rftcore.cli.configuration import SetOption, configuration
from rftcore.cli.roles import ConfigArgument
from rftcore.cli.run import PlainOption
from rftcore.cli.session import ConfigBufferOption
from rftdata.errors import ConfigError

if TYPE_CHECKING:
    from rftcore.config.run import RunConfig


def eval_(
    config: ConfigArgument,
    overrides: SetOption = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            metavar="RUN[@STEP]",
            help="Evaluate this checkpoint of a run of the buffer; STEP is a number, best or last.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="PATH", help="Evaluate this folder or Hugging Face id.")
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            metavar="NAME|FILE",
            help="A taskset of the configuration, a file, or another source; repeatable. The held-out ones of the configuration by default.",
        ),
    ] = None,
    num_answers: Annotated[int, typer.Option("--answers", min=1, metavar="N", help="Answers to each question.")] = 1,
    decoding: Annotated[
        str | None,
        typer.Option("--decoding", metavar="greedy|sampled", help="greedy by default, sampled with several answers."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the run that stores the answers.")
    ] = None,
    buffer: ConfigBufferOption = None,
    plain: PlainOption = False,
) -> None:
    """Evaluate a model: answer the questions of tasksets with the workflow, the rewards and the engine of a configuration.

    The model is that of the configuration (model.path), or a checkpoint of a run, or any folder. Every answer is stored, with its turns, in a run of
    its own that only evaluates (mode eval). `rft report` shows mean@n, pass@k and best@k with standard errors, and `rft report RUN OTHER` compares two
    runs question by question.

    Ctrl-C interrupts it; `rft run --resume NAME` asks for the missing answers alone. The exit code is not 0 if all answers to a taskset fail.
    """
    from rftcore.launch.run_request import Continuation, RunRequest, run_here
    from rftcore.run.evaluated_model import EvaluationRequest

    if checkpoint is not None and model is not None:
        raise ConfigError("two models are named", value=[checkpoint, model], todo="omit --checkpoint or --model")
    if decoding not in (None, "greedy", "sampled"):
        raise ConfigError("unknown decoding", value=decoding, allowed="greedy, sampled")
    settings = configuration(config, overrides, buffer)
    request = EvaluationRequest(
        model=_folder_of(settings, checkpoint) if checkpoint is not None else model,
        tasks=tasks or [],
        num_answers=num_answers,
        decoding=decoding,  # type: ignore[arg-type]  # checked above
        name=name,
    )
    evaluated = request.configuration(settings)
    raise typer.Exit(run_here(RunRequest([evaluated], config, None, Continuation(), [], plain)))


def _folder_of(config: RunConfig, checkpoint: str) -> str:
    import rftdata
    from rftcore.cli.output import warn
    from rftcore.run.evaluated_model import checkpoint_folder

    with rftdata.open(config.buffer, create=False, application="rft eval", report=warn) as opened:
        return checkpoint_folder(opened, checkpoint)
