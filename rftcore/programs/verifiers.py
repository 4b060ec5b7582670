"""Workflow that runs environments of the package verifiers unchanged. The package has a virtual environment of its own, beside this one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rftcore.gateway import SessionSettings
from rftcore.programs.agent import check_endpoint
from rftcore.programs.hosts import open_programs
from rftcore.programs.verifiers_host import VerifiersHost, VerifiersSettings, episode_failure
from rftcore.workflows.limits import LimitReachedError
from rftcore.workflows.task import Model, Score, Scorer, Task
from rftdata.errors import ConfigError, RftError
from rftdata.tasks.verifiers import DATA_COLUMN, interpreter


async def verifiers(
    task: Task,
    model: Model,
    score: Scorer,
    *,
    environment: str,
    python: str,
    environment_args: Mapping[str, Any] | None = None,
    sampling: str = "run",
    format: str | None = None,
    template_args: Mapping[str, Any] | None = None,
    start_s: float = 300.0,
) -> Score:
    """Run an episode; its reward is that of verifiers, plus those of the reward functions, which see the last turn.

    The parts are verifiers' rewards without their weights, so that `reward` is not their sum. Metrics of verifiers are metrics of the last turn. One
    process per environment serves all rollouts of an explorer. Programs run on this host and without a shell, unless `environment_args` names another
    runtime or harness, or the environment's author did.

    Args:
        environment: id of a taskset that is installed beside verifiers, or name of a module in the folder of the configuration file.
        python: the interpreter of that virtual environment, relative to the configuration file.
        environment_args: its configuration, as verifiers' `[env]` has it: `{taskset: {…}, agent: {max_turns: 8, harness: {id: bash}}}`.
        sampling, format, template_args: as of the workflow `agent`.
        start_s: limit for loading the environment.
    """
    settings = SessionSettings("policy", sampling, format, dict(template_args or {}))  # type: ignore[arg-type]  # checked
    async with open_programs() as hosts:
        host_settings = VerifiersSettings(
            interpreter(python, hosts.base_dir), environment, dict(environment_args or {}), hosts.base_dir, start_s
        )
        host = await hosts.kept(("verifiers", host_settings.key), lambda: VerifiersHost.start(host_settings))
        with hosts.session(model, settings) as (session, url):
            running = asyncio.ensure_future(host.run(data_of(task), url, settings.model))
            try:
                await asyncio.wait((running, session.failed), return_when=asyncio.FIRST_COMPLETED)
                if session.failed.done():
                    session.failed.result()
                episode = running.result()
            finally:
                running.cancel()
    return await _score(task, model, score, episode)


async def _score(task: Task, model: Model, score: Scorer, episode: Mapping[str, Any]) -> Score:
    """Return the score of a finished episode.

    Raises:
        LimitReachedError: a limit of the rollout ended it before it was scored.
        FunctionFailedError, InfrastructureError, RftError: it failed.
    """
    traces = episode["traces"]
    errors = [*episode["errors"], *(error for trace in traces for error in trace["errors"])]
    if errors:
        if model.stop_reason is not None and model.turns:
            raise LimitReachedError(model.stop_reason, f"a limit of the rollout was reached: {errors[-1]['message']}")
        raise episode_failure(errors)
    if len(traces) != 1:
        raise RftError(
            "an episode of the verifiers environment has several traces, and its requests cannot be assigned to them",
            value=[trace["agent"] for trace in traces],
            todo="use an environment with one agent",
        )
    if not model.turns:
        raise RftError("the episode of verifiers ended before the model's first answer")
    [trace] = traces
    values = {name: float(value) for name, value in trace["metrics"].items() if math.isfinite(value)}
    model.turns[-1].sequence.metrics |= {f"verifiers.{name}": value for name, value in values.items()}
    judged = await score(model.turns[-1], task)
    return Score(trace["reward"] + judged.reward, {**trace["rewards"], **judged.parts})


def data_of(task: Task) -> Mapping[str, Any]:
    """Return verifiers' own data of a task.

    Raises:
        RftError: the task is of another source.
    """
    data = task.metadata.get(DATA_COLUMN)
    if not isinstance(data, Mapping):
        raise RftError(
            f"the task {task.task_key!r} of {task.taskset!r} has no data of verifiers",
            todo="set the taskset's source to verifiers:ENVIRONMENT",
        )
    return data


def check_task(task: Task, tokenizer: Any = None, **_: Any) -> None:
    """Refuse a task of another source.

    Raises:
        RftError: see `data_of`.
    """
    data_of(task)


def check_args(
    base_dir: Path,
    *,
    environment: str,
    python: str,
    environment_args: Mapping[str, Any] | None = None,
    sampling: str = "run",
    format: str | None = None,
    template_args: Mapping[str, Any] | None = None,
    start_s: object = 300.0,
) -> None:
    """Refuse settings with which no episode could run. The environment is not loaded.

    Raises:
        ConfigError: the reason.
    """
    interpreter(python, base_dir)
    check_endpoint("policy", sampling, format, 0)
    if not isinstance(environment_args or {}, Mapping):
        raise ConfigError("workflow_args.environment_args is not valid", value=environment_args, allowed="a mapping")
    if not isinstance(start_s, int | float) or isinstance(start_s, bool) or start_s <= 0:
        raise ConfigError("workflow_args.start_s is not valid", value=start_s, allowed="seconds above 0")


verifiers.check_args = check_args  # type: ignore[attr-defined]  # functions declare no attributes
verifiers.check_task = check_task  # type: ignore[attr-defined]
