"""`rft try`: run the workflow of a configuration on a few tasks, without a run, and show what happens."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rftcore.cli.configuration import SetOption, configuration
from rftcore.cli.roles import ConfigArgument
from rftcore.cli.session import ConfigBufferOption, JsonOption
from rftdata.errors import ConfigError

if TYPE_CHECKING:
    from rftcore.config.run import RunConfig
    from rftcore.explorer.rehearsal import Trial
    from rftcore.reporting.rollout_text import Decode
    from rftcore.reporting.tried_rollout import TriedRollout
    from rftcore.resolved import ResolvedRun
    from rftcore.workflows.task import Task
    from rftdata.config import TasksetConfig


def try_(
    config: ConfigArgument,
    overrides: SetOption = None,
    num_tasks: Annotated[int, typer.Option("--tasks", min=1, metavar="N", help="Tasks of each taskset.")] = 2,
    num_rollouts: Annotated[int, typer.Option("--rollouts", min=1, metavar="N", help="Rollouts of each task.")] = 1,
    taskset: Annotated[
        str | None,
        typer.Option("--taskset", metavar="NAME", help="Only this taskset; one of the evaluations is allowed, too."),
    ] = None,
    with_stand_in: Annotated[
        bool,
        typer.Option("--rehearse", help="Answer with each task's right answer instead of the model, within seconds."),
    ] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show a line for each token, with its id and its log-probability.")
    ] = False,
    buffer: ConfigBufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Try a workflow: run it on a few tasks with the configuration's engine and rewards, and show what happens.

    It shows the chat by role, calls of tools, the tokens with their loss mask, the rewards with their parts, and errors with the stack of your own
    code. Nothing is stored, and no buffer is created. Stages of pipelines.task are not applied to the tasks.

    The exit code is 1 if a rollout fails.
    """
    from rftcore.cli.output import print_json, warn
    from rftcore.reporting.rollout_text import RolloutPrinter
    from rftcore.reporting.tried_rollout import json_of_tried, print_tried
    from rftcore.resolved import ResolvedRun
    from rftcore.run.defaults import with_defaults

    settings, chosen = with_defaults(configuration(config, overrides, buffer))
    if chosen:
        warn(chosen)
    resolved = ResolvedRun(settings)
    tasks = _tasks(settings, taskset, num_tasks)
    with _output_to_stderr():
        attempt = _rehearsed if with_stand_in else _sampled
        tried, decode = attempt(resolved, tasks, num_rollouts)
    if as_json:
        print_json([json_of_tried(one) for one in tried])
    else:
        printer = RolloutPrinter(decode, each_token=tokens)
        for one in tried:
            print_tried(printer, one)
            printer.line("")
    failed = sum(one.rollout.outcome != "ok" for one in tried)
    if failed:
        warn(f"{failed} of {len(tried)} rollouts failed")
        raise typer.Exit(1)


def _tasks(config: RunConfig, name: str | None, count: int) -> list[Task]:
    """Return the first tasks of each trained taskset, or of one set.

    Raises:
        ConfigError: the configuration has no such set.
        TaskSourceError: a source cannot be read.
    """
    from rftcore.workflows.task import Task

    known = [*config.tasks, *config.eval.tasks, *config.eval.test]
    chosen = config.tasks or known if name is None else [each for each in known if each.name == name]
    if not chosen:
        raise ConfigError(
            "the configuration has no taskset to try" if name is None else "unknown taskset",
            value=name,
            allowed=", ".join(each.name for each in known),
            todo="add one under tasks" if name is None else None,
        )
    return [
        Task.from_row({"task_id": 0, "taskset": each.name, **row}, config.run.seed)
        for each in chosen
        for row in _rows(config, each, count)
    ]


def _rows(config: RunConfig, taskset: TasksetConfig, count: int) -> list[dict[str, Any]]:
    """Return the first tasks of a source; one that queries the buffer needs an existing buffer."""
    import rftdata
    from rftdata.tasks import read_tasks
    from rftdata.tasks.query import asks_buffer

    if not asks_buffer(taskset):
        return list(islice(read_tasks(taskset, config.base_dir), count))
    with rftdata.open(config.buffer, create=False, schema="check", application="rft try") as buffer:
        return list(islice(read_tasks(taskset, config.base_dir, buffer.database), count))


def _sampled(resolved: ResolvedRun, tasks: Sequence[Task], num_rollouts: int) -> tuple[list[TriedRollout], Decode]:
    """Return rollouts of the configuration's engine."""
    from rftcore.explorer.rehearsal import open_trial
    from rftcore.installation.packages import check_environment

    check_environment(resolved.config.explorer.engine)
    views = {task.taskset: resolved.for_taskset(task.taskset) for task in tasks}
    for view in views.values():
        view.workflow, view.rewards  # noqa: B018 - what does not load is reported before the engine starts
    engine_class, settings = resolved.engine_class, resolved.engine(0)
    os.environ.update(engine_class.process_environment(settings))
    engine = engine_class(resolved.model_folder, settings)
    try:
        tried = []
        for taskset, view in views.items():
            with open_trial(view, engine, num_slots=settings.max_num_seqs) as trial:
                asked = [task for task in tasks if task.taskset == taskset]
                tried += asyncio.run(_try_all(trial, asked, num_rollouts))
        return tried, _decode(engine.tokenizer)
    finally:
        engine.close()


def _rehearsed(resolved: ResolvedRun, tasks: Sequence[Task], num_rollouts: int) -> tuple[list[TriedRollout], Decode]:
    """Return rollouts of the stand-in for the engine."""
    from rftcore.checks.models import open_model
    from rftcore.explorer.rehearsal import LIMIT_S, StandIn, open_trial, stand_in_answer

    tokenizer = open_model(resolved).tokenizer
    tried = []
    for task in tasks:
        view = resolved.for_taskset(task.taskset)
        with open_trial(view, StandIn(tokenizer, stand_in_answer(task)), longest_s=LIMIT_S) as trial:
            tried += asyncio.run(_try_all(trial, [task], num_rollouts))
    return tried, _decode(tokenizer)


async def _try_all(trial: Trial, tasks: Sequence[Task], num_rollouts: int) -> list[TriedRollout]:
    from rftcore.reporting.tried_rollout import TriedRollout

    groups = await asyncio.gather(*(trial.rollouts(task, num_rollouts) for task in tasks))
    stacks = dict(trial.failures)
    return [
        TriedRollout(task=task, rollout=rollout, num_rollouts=num_rollouts, stack=stacks.get(rollout.error or "", ""))
        for task, rollouts in zip(tasks, groups, strict=True)
        for rollout in rollouts
    ]


def _decode(tokenizer: object) -> Decode:
    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))  # type: ignore[attr-defined]

    return decode


@contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Send to stderr what engines, workflows and rewards print meanwhile, so that it does not mix with what is shown."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
