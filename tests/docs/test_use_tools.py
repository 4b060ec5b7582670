"""The code of the page on tools runs as it stands there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rftcore.engines.base import Decoding
from rftcore.environments import EnvironmentHosts
from rftcore.explorer.rollout_slots import RolloutSlots
from rftcore.explorer.rollouts import RolloutRunner
from rftcore.explorer.scorer import Scorer
from rftcore.rewards import load_rewards
from rftcore.tools.calls import ErrorKind, ToolCall
from rftcore.tools.formats import FORMATS
from rftcore.tools.tool_boxes import ToolBoxes
from rftcore.workflows import WORKFLOWS
from rftcore.workflows.task import Task
from rftdata.experience import Rollout
from tests.support.chat_tokenizers import chat_tokenizer
from tests.support.waiting import PATIENCE_S
from tests.unit.workflows.test_session import Spy

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "use-tools.md").read_text()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python blocks of the page, under the names that their first lines give."""
    folder = tmp_path_factory.mktemp("page")
    for name, block in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE, re.DOTALL):
        (folder / name).write_text(block)
    return folder


def played(files: Path, workflow: str, answers: list[str], answer: str, **arguments: Any) -> Rollout:
    spy = Spy(chat_tokenizer("qwen3"))
    spy.will_answer(*answers)

    async def run() -> Rollout:
        runner = RolloutRunner(
            engine=spy,  # type: ignore[arg-type]  # it samples, and has no weights
            workflow=WORKFLOWS.load(workflow, files),
            workflow_args=arguments,
            scorer=Scorer(load_rewards(["exact_match"], files), files),
            timeout_s=PATIENCE_S,
            source="explorer",
            slots=RolloutSlots(1, 1),
            environments=EnvironmentHosts(files, max_environments=1),
            tools=ToolBoxes(files),
        )
        rollout = await runner.rollout(Task(1, "shop", "one", "Two pears and a melon?", answer), 0, Decoding())
        assert runner.tools is not None and runner.environments is not None
        runner.tools.close()
        await asyncio.to_thread(runner.environments.close)
        return rollout

    return asyncio.run(run())


def calls(*found: tuple[str, dict[str, Any]]) -> str:
    return FORMATS["hermes"].render([ToolCall(name, arguments) for name, arguments in found], "")


def test_the_tools_of_the_page(files: Path) -> None:
    (block,) = re.findall(r"```yaml\n# config.yaml\n(.*?)```", PAGE, re.DOTALL)
    explorer = yaml.safe_load(block)["explorer"]
    answers = [
        calls(("price", {"fruit": "pear", "amount": 2}), ("price", {"fruit": "melon"}), ("price", {"fruit": "plum"})),
        calls(("remember", {"note": "8 cents"}), ("remember", {"note": "11 cents"})),
        "19",
    ]
    rollout = played(files, explorer["workflow"], answers, "19", **explorer["workflow_args"])
    assert (rollout.outcome, rollout.reward) == ("ok", 1.0), rollout.error
    [sequence] = rollout.sequences
    results = [message["content"] for message in sequence.messages or [] if message["role"] == "tool"]
    assert results[:2] == ["8", "11"] and "fruit: Input should be 'apple', 'pear' or 'melon'" in results[2]
    assert results[3:] == ['["8 cents"]', '["8 cents","11 cents"]']
    assert (sequence.metrics["tool_calls"], sequence.metrics["tool_errors"]) == (5, 1)


def test_the_workflow_of_the_page(files: Path) -> None:
    rollout = played(files, "./dice.py:game", [calls(("roll", {"sides": 1}), ("roll", {"sides": 1})), "2"], "2")
    assert (rollout.outcome, rollout.reward, rollout.num_turns) == ("ok", 1.0, 2), rollout.error


def test_the_environment_of_the_page(files: Path) -> None:
    answers = [calls(("add", {"amount": 1}), ("add", {"amount": "2"})), calls(("add", {"amount": 2}))]
    rollout = played(files, "environment", answers, "3", environment="./counter.py:Counter")
    assert (rollout.outcome, rollout.reward) == ("ok", 1.0), rollout.error
    seen = [message["content"] for message in rollout.sequences[0].messages or [] if message["role"] == "tool"]
    assert seen == ["1", "Use the tool add."]


def test_the_tables_name_every_kind_of_error_and_every_format() -> None:
    for name in (*ErrorKind.__args__, *FORMATS):  # type: ignore[attr-defined]  # of a Literal
        assert f"| `{name}` |" in PAGE
