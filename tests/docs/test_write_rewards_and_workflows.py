"""The code of the pages on rewards and workflows runs as it stands there, on a model that answers what the page expects."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from rftcore.engines.base import Decoding
from rftcore.explorer.rehearsal import StandIn
from rftcore.explorer.rollouts import RolloutRunner
from rftcore.explorer.scorer import Scorer
from rftcore.rewards import load_rewards
from rftcore.workflows import WORKFLOWS
from rftcore.workflows.task import Task, Turn
from rftdata.experience import Rollout, Sequence
from tests.support.models import make_character_tokenizer

PAGES = Path(__file__).resolve().parents[2] / "docs" / "how-to"
TASK = Task(1, "sums", "one", "1+1=", "2")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python blocks of both pages, under the names that their first lines give."""
    folder = tmp_path_factory.mktemp("pages")
    for page in ("write-a-reward.md", "write-a-workflow.md"):
        for name, block in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", (PAGES / page).read_text(), re.DOTALL):
            (folder / name).write_text(block)
    return folder


def tried(files: Path, workflow: str, answer: str, **arguments: Any) -> Rollout:
    engine = StandIn(make_character_tokenizer(), answer)  # type: ignore[no-untyped-call]
    function = WORKFLOWS.load(workflow, files)

    async def run() -> Rollout:
        scorer = Scorer(load_rewards(["exact_match"], files), files)
        runner = RolloutRunner(
            engine=engine,
            workflow=function,
            workflow_args=arguments,
            scorer=scorer,
            timeout_s=30.0,
            source="explorer",
            slots=asyncio.Semaphore(1),
        )
        return await runner.rollout(TASK, 0, Decoding())

    return asyncio.run(run())


def test_the_reward_of_the_page(files: Path) -> None:
    scorer = Scorer(load_rewards(["./reward.py:score"], files), files)
    try:
        score = asyncio.run(scorer(Turn([], " 2", "stop", Sequence("1+1=", " 2", [1, 2], 1, "stop")), TASK))
    finally:
        scorer.close()
    assert (score.reward, score.parts) == (1.2, {"right": 1.0, "short": 0.2})


@pytest.mark.parametrize(
    ("workflow", "answer", "reward", "turns"),
    [
        ("./flow.py:solve", "2", 1.0, 2),
        ("./guess.py:guess", "2", 1.0, 1),
        ("./guess.py:guess", "3", 0.0, 3),
        ("./tool.py:with_python", "2", 1.0, 2),
    ],
)
def test_the_workflows_of_the_page(files: Path, workflow: str, answer: str, reward: float, turns: int) -> None:
    rollout = tried(files, workflow, answer)
    assert (rollout.outcome, rollout.reward, len(rollout.sequences)) == ("ok", reward, turns), rollout.error


def test_the_tables_name_every_field() -> None:
    text = (PAGES / "write-a-reward.md").read_text()
    for kind in (Turn, Task):
        for name in kind.__dataclass_fields__:
            assert f"| `{name}` |" in text, (kind.__name__, name)
