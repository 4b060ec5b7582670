"""The workflow `tools`: calls, results and the chat stay token for token what was sampled, in every format."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rftcore.engines.base import Decoding
from rftcore.failures import InfrastructureError
from rftcore.tools import Tool
from rftcore.tools.calls import ToolCall
from rftcore.tools.chat_template import format_of, tool_template
from rftcore.tools.formats import FORMATS
from rftcore.tools.tool_boxes import ToolBoxes, tools_of_rollout
from rftcore.workflows.limits import Limits
from rftcore.workflows.task import Model, Score, Task, Turn
from rftcore.workflows.tools import check_args, check_model, tools
from rftdata.errors import ConfigError
from tests.support.chat_tokenizers import chat_tokenizer
from tests.unit.workflows.test_session import Spy, check

TASK = Task(1, "sums", "one", "What is 17 + 25?", "42")

KIT = '''
"""Tools that the test calls."""

from rftcore.tools import InfrastructureError


async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
    """
    return a + b


async def lose() -> None:
    """Lose a connection."""
    raise InfrastructureError("gone")
'''


def written(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    return FORMATS[name].render([ToolCall(tool, arguments) for tool, arguments in calls], "")


def play(folder: Path, template: str | None, answers: list[str], limits: Limits | None = None, **args: Any) -> Model:
    """A rollout in which the model gives these answers."""
    (folder / "kit.py").write_text(KIT)
    spy = Spy(chat_tokenizer(template))
    spy.will_answer(*answers)
    model = Model(spy, Decoding(), limits=limits or Limits())

    async def score(turn: Turn, task: Task) -> Score:
        return Score(float(task.answer in turn.response))

    async def rollout() -> Score:
        boxes = ToolBoxes(folder)
        with tools_of_rollout(boxes):
            given = {"tools": ["./kit.py:add", "./kit.py:lose"], **args}
            found = await tools(TASK, model, score, **given)
        boxes.close()
        return found

    asyncio.run(rollout())
    check(spy, model.sequences())
    return model


@pytest.mark.parametrize(
    ("template", "name"),
    [("qwen2_5", "hermes"), ("qwen3", "hermes"), ("llama3_1", "llama_json"), ("gemma3", "text"), (None, "text")],
)
def test_a_rollout_calls_tools_until_an_answer_without_calls(template: str | None, name: str, tmp_path: Path) -> None:
    answers = [written(name, ("add", {"a": 17, "b": 25})), "It is 42."]
    args = {"format": "text"} if name == "text" else {}
    model = play(tmp_path, template, answers, **args)
    [sequence] = model.sequences()
    assert sequence.response.endswith("It is 42.") or "It is 42." in sequence.response
    assert sequence.num_turns == 2, "no turn is rendered again"
    assert "Add two numbers." in sequence.prompt
    *_, called, result, last = sequence.messages or []
    if name == "text":
        assert result == {"role": "user", "content": "RESULT add\n42"}
    else:
        assert called["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 17, "b": 25}}
        assert (result["role"], result["content"]) == ("tool", "42")
        assert model.turns[0].tool_calls == [ToolCall("add", {"a": 17, "b": 25})]
    assert last["content"] == "It is 42."
    assert sequence.metrics.pop("tool_seconds") >= 0
    assert sequence.metrics == {"tool_calls": 1, "tool_errors": 0}


@pytest.mark.parametrize("template", ["qwen2_5", "llama3_1", "gemma3"])
def test_a_malformed_call_is_answered_with_its_error(template: str, tmp_path: Path) -> None:
    name = {"qwen2_5": "hermes", "llama3_1": "llama_json", "gemma3": "text"}[template]
    broken = written(name, ("add", {"a": 17, "b": 25})).replace("25", "25,,")
    model = play(tmp_path, template, [broken, "42"], format=name)
    [sequence] = model.sequences()
    *_, answer, result, last = sequence.messages or []
    assert answer["content"] == broken
    assert "invalid JSON" in result["content"]
    assert last["content"] == "42"
    assert sequence.metrics["tool_errors.invalid_call"] == 1
    assert sequence.num_turns == 2


def test_several_calls_of_one_answer_have_a_result_each(tmp_path: Path) -> None:
    calls = written("hermes", ("add", {"a": 1, "b": 2}), ("sub", {}), ("add", {"a": "x", "b": 2}))
    model = play(tmp_path, "qwen2_5", [calls, "42"])
    results = [message for message in model.turns[1].messages if message["role"] == "tool"]
    assert results[0]["content"] == "3"
    assert [json.loads(result["content"])["error"][:15] for result in results[1:]] == [
        "there is no too",
        "a: Input should",
    ]


def test_a_template_of_single_calls_gets_several_as_text(tmp_path: Path) -> None:
    calls = written("llama_json", ("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4}))
    model = play(tmp_path, "llama3_1", [calls, "42"])
    [sequence] = model.sequences()
    *_, answer, first, second, _ = sequence.messages or []
    assert answer == {"role": "assistant", "content": calls}
    assert (first["content"], second["content"]) == ("3", "7")


def test_a_rollout_ends_after_its_calls_are_used_up_and_at_a_limit_with_what_there_is(tmp_path: Path) -> None:
    call = written("hermes", ("add", {"a": 1, "b": 2}))
    model = play(tmp_path, "qwen2_5", [call] * 9, max_calls=2)
    assert len(model.turns) == 3, "two calls, and an answer in which a further one is not made"
    model = play(tmp_path, "qwen2_5", [call] * 9, Limits(max_turns=2))
    assert (len(model.turns), model.stop_reason) == (2, "max_turns")
    assert model.sequences()[0].metrics["tool_calls"] == 2


def test_a_failure_outside_fails_the_rollout(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match="gone"):
        play(tmp_path, "qwen2_5", [written("hermes", ("lose", {}))])


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("qwen2_5", ("hermes", True, True)),
        ("qwen3", ("hermes", True, True)),
        ("llama3_1", ("llama_json", False, True)),
        ("deepseek_r1_distill", ("tools, calls",)),
        ("gemma3", ("tools, calls, results",)),
        ("phi3_5", ("tools, calls, results",)),
        (None, ("tools, calls, results",)),
    ],
)
def test_a_template_is_asked_what_it_does_with_tools(template: str | None, found: tuple[Any, ...]) -> None:
    tokenizer = chat_tokenizer(template)
    probed = tool_template(tokenizer)
    if len(found) > 1:
        assert probed.format is not None
        assert (probed.format.name, probed.writes_several, probed.writes_lone_results) == found
        check_model(tokenizer)
    else:
        says = f"cannot carry tools: it leaves out {found[0]}.*format: text"
        for name in (None, "hermes"):
            with pytest.raises(ConfigError, match=says):
                check_model(tokenizer, format=name)
        check_model(tokenizer, format="text")


def test_a_template_with_a_format_of_its_own_needs_a_name() -> None:
    from copy import copy

    tokenizer = copy(chat_tokenizer("qwen2_5"))
    tokenizer.chat_template = tokenizer.chat_template.replace("<tool_call>", "[[").replace("</tool_call>", "]]")
    with pytest.raises(
        ConfigError, match=r"in a format that is not known.*hermes, glm, harmony, gemma, llama_json, pythonic, text"
    ):
        format_of(tokenizer)
    assert format_of(tokenizer, "hermes").name == "hermes"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"tools": ["./kit.py:sub"]}, "has no 'sub'"),
        ({"tools": []}, "at least one tool"),
        ({"tools": ["./kit.py:add"], "format": "xml"}, "unknown format of tool calls.*'xml'"),
        ({"tools": ["./kit.py:add"], "max_calls": -1}, "max_calls is not valid"),
        ({"tools": ["./kit.py:add"], "timeout_s": 0}, "timeout_s is not valid"),
        ({"tools": ["./kit.py:add"], "timeout_s": float("inf")}, "timeout_s is not valid"),
        ({"tools": ["./kit.py:add"], "timeout_s": float("nan")}, "timeout_s is not valid"),
    ],
)
def test_settings_that_are_not_valid_are_refused(args: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "kit.py").write_text(KIT)
    check_args(tmp_path, tools=["./kit.py:add"])
    with pytest.raises(ConfigError, match=says):
        check_args(tmp_path, **args)


def test_a_workflow_of_one_s_own_gives_tools_to_one_answer() -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    spy = Spy(chat_tokenizer("qwen2_5"))
    spy.will_answer(written("hermes", ("add", {"a": 1, "b": 2})))
    model = Model(spy, Decoding())
    turn = asyncio.run(model.chat([{"role": "user", "content": "1 + 2?"}], tools=[Tool.of(add)]))
    assert turn.tool_calls == [ToolCall("add", {"a": 1, "b": 2})]
    assert "Add two numbers." in turn.sequence.prompt
