"""The environment and the workflow of the page run as they stand there, on a model that always walks."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rftcore.engines.base import Decoding
from rftcore.environments import ENVIRONMENTS, EnvironmentHosts, EnvironmentLimits
from rftcore.explorer.rehearsal import StandIn
from rftcore.explorer.rollout_slots import RolloutSlots
from rftcore.explorer.rollouts import RolloutRunner
from rftcore.workflows import WORKFLOWS
from rftcore.workflows.environment import check_args
from rftcore.workflows.task import Score, Task, Turn
from tests.support.models import make_character_tokenizer
from tests.support.waiting import PATIENCE_S

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "write-an-environment.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("page")
    for name, block in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE, re.DOTALL):
        (found / name).write_text(block)
    return found


async def no_score(turn: Turn, task: Task) -> Score:
    return Score(0.0)


def arguments() -> dict[str, Any]:
    (block,) = re.findall(r"```yaml\n(explorer:.*?)```", PAGE, re.DOTALL)
    found: dict[str, Any] = yaml.safe_load(block)["explorer"]["workflow_args"]
    return found


@pytest.mark.parametrize(("workflow", "num_sequences"), [("environment", 1), ("./climb.py:climb", 4)])
def test_the_policy_walks_up_the_stairs_of_the_page(folder: Path, workflow: str, num_sequences: int) -> None:
    hosts = EnvironmentHosts(folder)
    runner = RolloutRunner(
        engine=StandIn(make_character_tokenizer(), "I go.\nwalk" if workflow == "environment" else "walk"),  # type: ignore[no-untyped-call]
        workflow=WORKFLOWS.load(workflow, folder),
        workflow_args=arguments() if workflow == "environment" else {},
        scorer=no_score,  # type: ignore[arg-type]
        timeout_s=PATIENCE_S,
        source="explorer",
        slots=RolloutSlots(1, 1),
        environments=hosts,
        environment_limits=EnvironmentLimits(),
    )
    try:
        rollout = asyncio.run(runner.rollout(Task(1, "stairs", "one", "Go up.", None, seed=1), 0, Decoding()))
    finally:
        hosts.close()
    assert (rollout.outcome, rollout.error, rollout.reward, rollout.num_turns) == ("ok", None, 1.0, 4)
    assert len(rollout.sequences) == num_sequences
    assert [float(reward) for s in rollout.sequences for reward in s.arrays["step_reward"]] == [0.0, 0.0, 0.0, 1.0]


def test_the_configuration_of_the_page_is_valid_and_the_table_complete(folder: Path) -> None:
    check_args(folder, **arguments())
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGE.partition("## Built-in environments")[2], re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"\w+", row)} - {"environment"} == set(ENVIRONMENTS.builtins)
