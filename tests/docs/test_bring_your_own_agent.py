"""The agent of the page runs as it stands there, and its settings are valid."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import yaml

from rftcore.engines.base import Decoding
from rftcore.explorer.rehearsal import StandIn
from rftcore.explorer.rollout_slots import RolloutSlots
from rftcore.explorer.rollouts import RolloutRunner
from rftcore.programs.hosts import ProgramHosts
from rftcore.workflows import WORKFLOWS, check_workflow_args
from rftcore.workflows.task import Score, Task, Turn
from rftdata.config import TasksetConfig
from tests.support.models import make_character_tokenizer
from tests.support.waiting import PATIENCE_S

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "bring-your-own-agent.md").read_text()
BLOCKS: list[dict[str, Any]] = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


async def no_score(turn: Turn, task: Task) -> Score:
    return Score(0.0)


def test_the_agent_of_the_page_asks_twice(tmp_path: Path) -> None:
    [(name, source)] = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / name).write_text(source)
    explorer = BLOCKS[0]["explorer"]

    async def run() -> Any:
        hosts = ProgramHosts(tmp_path)
        runner = RolloutRunner(
            engine=StandIn(make_character_tokenizer(), "42"),  # type: ignore[no-untyped-call]
            workflow=WORKFLOWS.load(explorer["workflow"], tmp_path),
            workflow_args=explorer["workflow_args"],
            scorer=no_score,  # type: ignore[arg-type]
            timeout_s=PATIENCE_S,
            source="explorer",
            slots=RolloutSlots(1, 1),
            programs=hosts,
        )
        try:
            return await runner.rollout(Task(1, "sums", "one", "17 + 25?", "42"), 0, Decoding())
        finally:
            await hosts.close_all()

    found = asyncio.run(run())
    assert (found.error, found.reward) == (None, 1.0)
    assert found.sequences[0].reward_parts == {"program": 1.0, "turns": 2.0}
    assert sum(sequence.num_turns for sequence in found.sequences) == 2


def test_the_settings_of_the_page_fit_their_workflows() -> None:
    for block in BLOCKS:
        explorer = block["explorer"]
        workflow = WORKFLOWS.load(explorer["workflow"])
        check_workflow_args(explorer["workflow"], workflow, 3, explorer["workflow_args"])
        for taskset in block.get("tasks", ()):
            TasksetConfig(**taskset)
