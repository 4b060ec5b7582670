"""Workflow that runs environments of the package verifiers unchanged. The package has a virtual environment of its own, beside this one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from rftcore.gateway import SessionSettings
from rftcore.programs.agent import check_endpoint
from rftcore.programs.hosts import open_programs
from rftcore.programs.verifiers_host import VerifiersHost, VerifiersSettings, episode_failure
from rftcore.workflows.limits import LimitReachedError
from rftcore.workflows.task import Model, Score, Scorer, Task, Turn
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

    Each agent of an environment with several is a role of the rollout, with chats, experiences and a reward of its own, unless another model was chosen for it.
    The rollout's reward is that of the first role that verifiers calls trainable; the answers of the others get the loss mask 0.
    If a limit ends the episode, each of these roles is rewarded by the reward functions alone.

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
    async with open_programs() as hosts:
        host_settings = VerifiersSettings(
            interpreter(python, hosts.base_dir), environment, dict(environment_args or {}), hosts.base_dir, start_s
        )
        host = await hosts.kept(("verifiers", host_settings.key), lambda: VerifiersHost.start(host_settings))
        settings = SessionSettings("policy", sampling, format, dict(template_args or {}), host.roles)  # type: ignore[arg-type]  # checked
        with hosts.session(model, settings) as (session, url):
            running = asyncio.ensure_future(host.run(data_of(task), url, settings.model))
            try:
                await asyncio.wait((running, session.failed), return_when=asyncio.FIRST_COMPLETED)
                if session.failed.done():
                    session.failed.result()
                episode = running.result()
            finally:
                running.cancel()
    return await _score(task, model, score, episode, list(host.roles.values()))


async def _score(task: Task, model: Model, score: Scorer, episode: Mapping[str, Any], roles: Sequence[str]) -> Score:
    """Return the score of a finished episode. Answers of agents that are not trained get the loss mask 0, also in an episode that a limit ended.

    Args:
        roles: those that the policy plays; empty for an environment with one agent.

    Raises:
        LimitReachedError: a limit of the rollout ended it before it was scored, and the last turn is what can be scored.
        FunctionFailedError, InfrastructureError, RftError: it failed.
    """
    traces = episode["traces"]
    errors = [*episode["errors"], *(error for trace in traces for error in trace["errors"])]
    if errors and (model.stop_reason is None or not model.turns):
        raise episode_failure(errors)
    if roles or not errors:
        _refuse_unassignable([trace["agent"] for trace in traces], roles)
    if roles:
        _leave_out(model, {trace["agent"] for trace in traces if trace["trainable"]}.intersection(roles))
    elif traces and not traces[0]["trainable"]:
        raise _nothing_trainable(traces)
    by_agent = {trace["agent"]: trace for trace in traces}
    if errors:
        what = f"a limit of the rollout was reached: {errors[-1]['message']}"
        found = await _score_by_role(task, model, score, by_agent, roles, is_scored=False)
        if not found.parts:  # there is one agent, or no reward function
            raise LimitReachedError(str(model.stop_reason), what)
        return found
    if not model.turns:
        raise RftError("the episode of verifiers ended before the model's first answer")
    if not traces:
        raise RftError("the episode of verifiers has no trace of an agent")
    if not roles:
        [trace] = traces
        judged = await _judged(task, score, trace, model.turns[-1])
        return Score(trace["reward"] + judged.reward, {**trace["rewards"], **judged.parts})
    found = await _score_by_role(task, model, score, by_agent, roles, is_scored=True)
    if not found.by_role:
        raise _nothing_trainable(traces)
    return found


def _refuse_unassignable(agents: Sequence[str], roles: Sequence[str]) -> None:
    """Refuse an episode of which it is not known whose trace a turn belongs to.

    Raises:
        RftError: an agent ran several times, or an environment with one agent has traces of several.
    """
    if len(set(agents)) < len(agents):
        raise RftError(
            "an agent of the verifiers environment ran several times in an episode, and its requests cannot be assigned to its runs",
            value=agents,
            todo="use an environment in which each agent runs once",
        )
    if not roles and len(agents) > 1:
        raise RftError(
            "the verifiers environment declares one agent, and its episode has several, whose requests cannot be told apart",
            value=agents,
            todo="declare each agent in the environment",
        )


def _leave_out(model: Model, trained: Set[str]) -> None:
    """Give the loss mask 0 to the answers of all other roles, and to those of no role."""
    for turn in model.turns:
        if turn.sequence.role not in trained:
            turn.sequence.loss_mask = [False] * len(turn.response_token_ids)


def _nothing_trainable(traces: Sequence[Mapping[str, Any]]) -> RftError:
    return RftError(
        "no agent of the verifiers environment that the model plays is trainable",
        value=[trace["agent"] for trace in traces],
    )


async def _score_by_role(
    task: Task,
    model: Model,
    score: Scorer,
    traces: Mapping[str, Mapping[str, Any]],
    roles: Sequence[str],
    *,
    is_scored: bool,
) -> Score:
    """Return the score of the roles that are trained and have answered.

    Args:
        is_scored: whether verifiers scored the episode. If not, the rewards are those of the reward functions alone.
    """
    by_role, parts = dict[str, float](), dict[str, float]()
    for agent, trace in traces.items() if is_scored else ():
        parts |= {agent: trace["reward"]} | {f"{agent}.{name}": value for name, value in trace["rewards"].items()}
    for role in roles:
        turns = [turn for turn in model.turns if turn.sequence.role == role]
        if turns and role in traces and traces[role]["trainable"]:
            judged = await _judged(task, score, traces[role], turns[-1])
            by_role[role] = judged.reward + (traces[role]["reward"] if is_scored else 0.0)
            parts |= {f"{role}.{name}": value for name, value in judged.parts.items()}
    return Score(next(iter(by_role.values()), 0.0), parts, by_role)


async def _judged(task: Task, score: Scorer, trace: Mapping[str, Any], turn: Turn) -> Score:
    """Return what the reward functions give to an agent's last turn, which gets the metrics of its trace."""
    values = {name: float(value) for name, value in trace["metrics"].items() if math.isfinite(value)}
    turn.sequence.metrics |= {f"verifiers.{name}": value for name, value in values.items()}
    return await score(turn, task)


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
