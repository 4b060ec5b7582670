"""Workflow that runs a program of the user for each rollout: any program that talks to OpenAI's interface, in any language."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rftcore.gateway import GatewaySession, SessionSettings
from rftcore.programs.function import AGENT_FUNCTIONS
from rftcore.programs.hosts import ProgramHosts, open_programs
from rftcore.programs.process import Program, Report, run_program
from rftcore.programs.result import ProgramResult, read_result
from rftcore.tools.formats import tool_format
from rftcore.workflows.limits import LimitReachedError
from rftcore.workflows.task import Model, Score, Scorer, Task
from rftdata.errors import ConfigError, RftError

SAMPLING = ("run", "program")


async def agent(
    task: Task,
    model: Model,
    score: Scorer,
    *,
    command: Sequence[str] | None = None,
    function: str | None = None,
    env: Mapping[str, str] | None = None,
    model_name: str = "policy",
    sampling: str = "run",
    format: str | None = None,
    template_args: Mapping[str, Any] | None = None,
    end_s: float = 10.0,
) -> Score:
    """Run the program, and return the reward that it reports plus those of the reward functions, which see the last turn.

    The program finds the model with OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, the task as JSON on its standard input and in the file RFT_TASK, and
    its seed in RFT_SEED. It reports by the file RFT_RESULT or by its last line of output: `{"reward": 1.0, "parts": {"name": 0.5}}`. It runs in the folder of
    the configuration file, and ends with the rollout, together with all that it has started.

    Args:
        command: the program and its arguments; no shell reads them.
        function: in place of a command, the path of a Python function `f(task: dict)`, plain or async, that returns the reward, such a dict, or None. It runs
            in a process of its own.
        env: further variables of the program's environment.
        model_name: name of the model for the program; `*` answers to every name.
        sampling: whose temperature, top_p and top_k are used, `run` (those of explorer.*) or `program` (those of each request).
        format: format of calls of tools, hermes, glm, harmony, gemma, llama_json, pythonic or text; by default that of the model's chat template.
        template_args: further variables of the chat template, such as `enable_thinking`.
        end_s: seconds that the program gets to end by itself after a limit of the rollout.
    """
    settings = SessionSettings(model_name, sampling, format, dict(template_args or {}))  # type: ignore[arg-type]  # checked
    async with open_programs() as hosts:
        result = await _result(hosts, task, model, settings, command, function, env or {}, end_s)
    if not model.turns:
        raise RftError("the program ended before the model's first answer", todo="let it use OPENAI_BASE_URL")
    judged = await score(model.turns[-1], task)
    if result.reward is None and not judged.parts:
        raise RftError(
            "the program reported no reward, and there are no reward functions",
            todo='let it write {"reward": 1.0} to the file RFT_RESULT, or set explorer.reward',
        )
    own = result.parts if result.reward is None else {"program": result.reward, **result.parts}
    return Score((result.reward or 0.0) + judged.reward, {**own, **judged.parts})


async def _result(
    hosts: ProgramHosts,
    task: Task,
    model: Model,
    settings: SessionSettings,
    command: Sequence[str] | None,
    function: str | None,
    env: Mapping[str, str],
    end_s: float,
) -> ProgramResult:
    argv = (
        list(command)
        if command
        else [sys.executable, "-m", "rftcore.programs.function", str(function), str(hosts.base_dir)]
    )
    folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="rft-agent-")
    try:
        async with hosts.place():
            with hosts.session(model, settings) as (session, url):
                text = json.dumps(task_json(task))
                given = {**os.environ, **env, **_variables(task, settings, session.key, url, Path(folder))}
                await asyncio.to_thread(Path(given["RFT_TASK"]).write_text, text)
                report = await _report(Program(argv, hosts.base_dir, given, text), session, end_s)
        if report.refused is not None:
            raise ConfigError("workflow_args.command cannot be started", value=argv, todo=report.refused)
        file, limit = Path(given["RFT_RESULT"]), model.stop_reason if model.turns else None
        if limit is None:
            return await asyncio.to_thread(read_result, file, report)
        return await asyncio.to_thread(_after_limit, file, report, limit)
    finally:
        await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))


def _after_limit(file: Path, report: Report, limit: str) -> ProgramResult:
    """Return the result of a program that a limit of the rollout has stopped, however it ended.

    Raises:
        LimitReachedError: it has no reward.
    """
    try:
        result = read_result(file, replace(report, code=0))
    except Exception as error:
        raise LimitReachedError(limit, f"a limit of the rollout was reached: {error}") from error
    if result.reward is None:
        raise LimitReachedError(limit, "a limit of the rollout was reached, and the program reported no reward")
    return result


async def _report(program: Program, session: GatewaySession, end_s: float) -> Report:
    """Run a program to its end, at most until `end_s` after a limit of the rollout.

    Raises:
        ConfigError, ModelError, EngineStoppedError: the run cannot continue.
    """
    limit = asyncio.ensure_future(session.limit_reached.wait())
    try:
        async with run_program(program) as running:
            await asyncio.wait((running.report, session.failed, limit), return_when=asyncio.FIRST_COMPLETED)
            if limit.done():
                await asyncio.wait((running.report, session.failed), timeout=end_s, return_when=asyncio.FIRST_COMPLETED)
            if session.failed.done():
                session.failed.result()
        return running.report.result()
    finally:
        limit.cancel()


def task_json(task: Task) -> dict[str, Any]:
    """Return a task as programs receive it."""
    return {
        "taskset": task.taskset,
        "task_key": task.task_key,
        "prompt": task.prompt,
        "answer": task.answer,
        "metadata": task.metadata,
        "seed": task.seed,
        "rollout_index": task.rollout_index,
        "rollout_seed": task.rollout_seed,
    }


def _variables(task: Task, settings: SessionSettings, key: str, url: str, folder: Path) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": "policy" if settings.model == "*" else settings.model,
        "RFT_TASK": str(folder / "task.json"),
        "RFT_RESULT": str(folder / "result.json"),
        "RFT_SEED": str(task.seed),
        "RFT_ROLLOUT_SEED": str(task.rollout_seed),
    }


def check_args(
    base_dir: Path,
    *,
    command: Sequence[str] | None = None,
    function: str | None = None,
    env: Mapping[str, str] | None = None,
    model_name: str = "policy",
    sampling: str = "run",
    format: str | None = None,
    template_args: Mapping[str, Any] | None = None,
    end_s: float = 10.0,
) -> None:
    """Refuse a program that cannot be started, and another mistake in the workflow's settings.

    Raises:
        ConfigError, PluginError: the reason.
    """
    if bool(command) == bool(function):
        raise ConfigError(
            "workflow_args: the workflow agent needs a program",
            value={"command": command, "function": function},
            allowed="either command, a list of texts, or function, the path of a Python function",
        )
    check_texts("env", dict(env or {}))
    check_endpoint(model_name, sampling, format, end_s)
    if function is not None:
        AGENT_FUNCTIONS.load(function, base_dir)
        return
    if not isinstance(command, list | tuple) or not all(isinstance(part, str) and part for part in command):
        raise ConfigError(
            "workflow_args.command is not valid", value=command, allowed="a list of texts; no shell reads it"
        )
    program = command[0]
    found = shutil.which(program if os.sep not in program else str(base_dir / program))
    if found is None:
        raise ConfigError(
            "workflow_args.command: the program does not exist, or is not executable",
            value=program,
            allowed="a name that PATH finds, or a path relative to the configuration file",
        )


agent.check_args = check_args  # type: ignore[attr-defined]  # functions declare no attributes


def check_texts(name: str, values: Mapping[Any, Any]) -> None:
    """Refuse settings that are no texts by name.

    Raises:
        ConfigError: which.
    """
    for key, value in values.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ConfigError(f"workflow_args.{name} is not valid", value={key: value}, allowed="texts by name")


def check_endpoint(model_name: object, sampling: object, format: str | None, end_s: object) -> None:
    """Refuse settings of the endpoint.

    Raises:
        ConfigError: the reason.
    """
    if not isinstance(model_name, str) or not model_name:
        raise ConfigError("workflow_args.model_name is not valid", value=model_name, allowed="a name, or '*'")
    if sampling not in SAMPLING:
        raise ConfigError("workflow_args.sampling is not valid", value=sampling, allowed=", ".join(SAMPLING))
    if format is not None:
        tool_format(format)
    if not isinstance(end_s, int | float) or isinstance(end_s, bool) or end_s < 0:
        raise ConfigError("workflow_args.end_s is not valid", value=end_s, allowed="0 or more")
