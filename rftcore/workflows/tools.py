"""Workflow in which the policy calls tools: an answer, its calls, their results, until an answer without calls."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rftcore.tools.chat_template import format_of
from rftcore.tools.formats import tool_format
from rftcore.tools.settings import ToolLimits
from rftcore.tools.tool_boxes import ToolSettings, open_tools
from rftcore.workflows.limits import LimitReachedError
from rftcore.workflows.single_turn import chat_messages
from rftcore.workflows.task import Model, Score, Scorer, Task
from rftcore.workflows.tool_dialogue import ToolDialogue
from rftdata.errors import ConfigError


async def tools(
    task: Task,
    model: Model,
    score: Scorer,
    *,
    tools: Sequence[Any],
    format: str | None = None,
    system: str | None = None,
    template: str | None = None,
    describe: bool = True,
    template_args: Mapping[str, Any] | None = None,
    max_calls: int = 32,
    max_calls_per_turn: int = 8,
    timeout_s: float = 30.0,
    max_chars: int = 4096,
    processes: int = 8,
) -> Score:
    """Let the policy call tools until an answer has no calls, or a limit is reached. The reward functions see the last turn.

    Each turn has metrics with the sums so far: `tool_calls`, `tool_errors`, `tool_errors.KIND` and `tool_seconds`.

    Args:
        tools: functions (`./file.py:function`, or a mapping with `tool` and its limits) and MCP servers (mappings with `mcp`).
        format: format of calls, hermes, glm, harmony, gemma, llama_json, pythonic or text; by default that of the model's chat template.
        system: system message; an empty one keeps a chat template from adding its own.
        template: the question, with `{prompt}`, `{answer}` and `{metadata[…]}` filled in from the task.
        describe: with `format: text`, whether the system message describes the tools; false for a model that was trained to use them.
        template_args: further variables of the chat template, such as `enable_thinking`.
        max_calls: calls of a rollout; the model reads errors for further ones, and the rollout ends with its next answer.
        max_calls_per_turn: calls of an answer; the model reads errors for further ones.
        timeout_s: longest call, for tools that name no other limit.
        max_chars: longest result, for tools that name no other limit; a longer one is cut in the middle.
        processes: maximum number of processes for plain functions in an explorer.
    """
    settings = _settings(tools, timeout_s, max_chars, max_calls_per_turn, processes)
    async with open_tools(settings, task) as session:
        dialogue = ToolDialogue(model.tokenizer, session.box.schemas, format)
        messages = chat_messages(task, dialogue.system(system, describe=describe), None, template)
        try:
            while True:
                turn = await model.chat(
                    messages, tools=dialogue.schemas, parse=dialogue.parse, template_args=template_args
                )
                calls, left = dialogue.calls(turn.response), max_calls - session.num_calls
                results = await session.run(calls, num_left=left) if calls and left > 0 else []
                turn.sequence.metrics |= session.metrics()
                if not results:
                    break
                texts = [(result.call_id, result.name, result.text) for result in results]
                messages += [turn.message, *dialogue.results(turn.message, texts)]
        except LimitReachedError:
            if not model.turns:
                raise
    return await score(model.turns[-1], task)


def check_args(base_dir: Path, **args: Any) -> None:
    """Refuse tools that do not load, and another mistake in the workflow's settings. MCP servers are not asked.

    Raises:
        ConfigError, PluginError: the reason.
    """
    given = inspect.signature(tools).bind(None, None, None, **args)
    given.apply_defaults()
    values = given.arguments
    for name, least in (("max_calls", 0), ("max_calls_per_turn", 1), ("processes", 1)):
        value = values[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"workflow_args.{name} is not valid", value=value, allowed=f"{least} or more")
    if values["format"] is not None:
        tool_format(values["format"])
    names = ("tools", "timeout_s", "max_chars", "max_calls_per_turn", "processes")
    _settings(*(values[name] for name in names)).box(base_dir).close()


def check_model(tokenizer: Any, *, format: str | None = None, **_: Any) -> None:
    """Refuse a model whose chat template cannot carry tools.

    Raises:
        ConfigError: the reason, with the alternative.
    """
    format_of(tokenizer, format)


tools.check_args = check_args  # type: ignore[attr-defined]  # functions declare no attributes
tools.check_model = check_model  # type: ignore[attr-defined]


def _settings(
    tools: Sequence[Any], timeout_s: float, max_chars: int, max_calls_per_turn: int, processes: int
) -> ToolSettings:
    return ToolSettings(tools, _limits(timeout_s, max_chars), max_calls_per_turn, processes)


def _limits(timeout_s: object, max_chars: object) -> ToolLimits:
    """Return the limits of tools that name none.

    Raises:
        ConfigError: they are not valid.
    """
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or not 0 < timeout_s < math.inf:
        raise ConfigError("workflow_args.timeout_s is not valid", value=timeout_s, allowed="a finite number above 0")
    if not isinstance(max_chars, int) or isinstance(max_chars, bool) or max_chars < 100:
        raise ConfigError("workflow_args.max_chars is not valid", value=max_chars, allowed="100 or more")
    return ToolLimits(timeout_s=timeout_s, max_chars=max_chars)
