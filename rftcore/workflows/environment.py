"""Workflow in which the policy acts in an environment: an observation, an answer, an action, until the episode ends."""

from __future__ import annotations

import math
import re
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from rftcore.environments import check_environment, open_environment
from rftcore.environments.base import Step
from rftcore.environments.handle import EnvironmentHandle
from rftcore.tools.calls import ToolCall
from rftcore.tools.formats import tool_format
from rftcore.workflows.chat_encoding import Message
from rftcore.workflows.limits import LimitReachedError
from rftcore.workflows.task import Model, Score, Scorer, Task, Turn
from rftcore.workflows.tool_dialogue import ToolDialogue
from rftdata.errors import ConfigError, RftError

ACTIONS = ("text", "last_line", "regex")


async def environment(
    task: Task,
    model: Model,
    score: Scorer,
    *,
    environment: str,
    environment_args: Mapping[str, Any] | None = None,
    system: str | None = None,
    action: str = "text",
    pattern: str | None = None,
    format: str | None = None,
) -> Score:
    """Play one episode. The reward is the sum of the rewards of the steps, and of the reward functions, which see the last turn.

    If the environment has tools, each call of an answer is an action, in their order; an answer without calls is one, too.

    Each turn records the environment's state before it, if it has one, and the reward of the step that followed. The last turn's has the reward of the
    reward functions, too, so that the rewards of turns add up to that of the rollout. An episode that a limit ends keeps the rewards so far.

    Args:
        environment: a built-in environment, or the path of your own.
        environment_args: arguments of its constructor.
        system: system message; an empty one keeps a chat template from adding its own.
        action: what of an answer is the action: text (all of it, without the space around it), last_line, or regex (the last match of `pattern`,
            its first group if it has one; an answer without a match is passed on as it is).
        pattern: regular expression for `action: regex`.
        format: format of calls, if there are tools: hermes, glm, harmony, gemma, llama_json, pythonic or text; by default that of the chat template.
    """
    total = last = 0.0
    async with open_environment(environment, environment_args or {}) as opened:
        role = _only_role(opened)
        observation = await opened.reset(task, task.seed)
        state = observation.state
        dialogue = ToolDialogue(model.tokenizer, opened.tools, format) if opened.tools else None
        system = system if dialogue is None else dialogue.system(system)
        messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": observation.text})
        try:
            while True:
                turn = await _answer(model, messages, dialogue)
                calls = [] if dialogue is None else dialogue.valid_calls(turn.response)
                steps = await _steps(opened, calls or [action_of(turn.response, action, pattern)], role)
                last = math.fsum(step.rewards_by_role(role).get(role, 0.0) for step in steps)
                turn.record(state=state, step_reward=last)
                total += last
                if steps[-1].ended:
                    break
                messages += [turn.message, *_observations(turn, calls, steps, dialogue)]
                state = steps[-1].state
        except LimitReachedError:
            if not model.turns:
                raise
    if not model.turns:
        raise RftError(f"the environment {environment!r} ended before the first answer")
    judged = await score(model.turns[-1], task)
    if judged.parts:
        model.turns[-1].record(step_reward=last + judged.reward)
    return Score(total + judged.reward, {"environment": total, **judged.parts})


def _only_role(opened: EnvironmentHandle) -> str:
    if len(opened.roles) > 1:
        raise ConfigError(
            f"the environment {opened.name!r} has several roles",
            value=", ".join(opened.roles),
            todo="use `workflow: multi_agent`, or a workflow of your own",
        )
    return opened.roles[0]


def _answer(model: Model, messages: list[Message], dialogue: ToolDialogue | None) -> Coroutine[Any, Any, Turn]:
    if dialogue is None:
        return model.chat(messages)
    return model.chat(messages, tools=dialogue.schemas, parse=dialogue.parse)


async def _steps(opened: EnvironmentHandle, actions: Sequence[str | ToolCall], role: str) -> list[Step]:
    """Return the steps of the actions of one answer, up to the end of the episode."""
    steps: list[Step] = []
    for action in actions:
        steps.append(await opened.step(action, role))
        if steps[-1].ended:
            break
    return steps


def _observations(
    turn: Turn, calls: Sequence[ToolCall], steps: Sequence[Step], dialogue: ToolDialogue | None
) -> list[Message]:
    """Return the messages with what the environment answered."""
    texts = [step.observation.text for step in steps]
    if dialogue is None or not calls:
        return [{"role": "user", "content": texts[-1]}]
    found = [(call.call_id, call.name, text) for call, text in zip(calls, texts, strict=True)]
    return dialogue.results(turn.message, found)


def check_args(
    base_dir: Path,
    *,
    environment: str,
    environment_args: Mapping[str, Any] | None = None,
    system: str | None = None,
    action: str = "text",
    pattern: str | None = None,
    format: str | None = None,
) -> None:
    """Refuse an environment that does not load or does not accept its arguments, and another mistake in the workflow's settings.

    Raises:
        ConfigError, PluginError: the reason.
    """
    if action not in ACTIONS or (action == "regex") != (pattern is not None):
        raise ConfigError(
            "workflow_args: action and pattern do not fit together",
            value={"action": action, "pattern": pattern},
            allowed=f"{', '.join(ACTIONS)}; pattern with regex alone",
        )
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"workflow_args: pattern is not a regular expression: {error}", value=pattern) from error
    if format is not None:
        tool_format(format)
    check_environment(environment, environment_args or {}, base_dir)


environment.check_args = check_args  # type: ignore[attr-defined]  # functions declare no attributes


def action_of(answer: str, action: str, pattern: str | None) -> str:
    """Return the action in an answer."""
    text = answer.strip()
    if action == "last_line":
        return text.splitlines()[-1].strip() if text else ""
    if action == "regex":
        assert pattern is not None
        found = list(re.finditer(pattern, text, re.DOTALL))
        return (found[-1].group(found[-1].re.groups and 1) or "").strip() if found else text
    return text
