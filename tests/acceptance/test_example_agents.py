"""The examples in which a model acts over several turns, run for a few steps by their own configurations with a random model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import CHECKOUT, Rft, report, rows

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

EXAMPLES = CHECKOUT / "examples"
FEW = [
    "explorer.engine=transformers",
    "steps=2",
    "algorithm.group_size=2",
    "trainer.batch_groups=3",
    "trainer.checkpoint_every=2",
    "pipelines.experience=[]",  # a random model fails at everything
    "eval={every: 2}",
]


def small_model(example: str, folder: Path) -> Path:
    """Write the random model of an example."""
    words = (EXAMPLES / example / "words.txt").read_text().split()
    command = [sys.executable, EXAMPLES / "small_chat_model.py", folder / "model", *words]
    subprocess.run([*command, "--hidden-size", "64", "--layers", "1"], check=True, capture_output=True)
    return folder / "model"


def options(model: Path, *more: str) -> list[str]:
    return [part for override in (f"model.path={model}", *more) for part in ("--set", override)]


def check_step_rewards(buffer: Path, run: str) -> list[int]:
    """Check that the rewards of the turns add up to that of the rollout; return the numbers of turns."""
    found = rows(
        buffer,
        f"""select e.rollout_id, max(r.reward) as reward, count(*) as num_turns, sum(t.reward) as step_rewards
            from rft.v_experience e join rft.rollout r using (rollout_id) join rft.turn_reward t using (experience_id)
            where e.run = '{run}' group by 1""",
    )
    assert found and all(row["step_rewards"] == pytest.approx(row["reward"]) for row in found)
    return [row["num_turns"] for row in found]


def test_a_walk_on_the_frozen_lake_is_an_experience_with_a_reward_for_each_step(rft: Rft, tmp_path: Path) -> None:
    model, buffer, lake = small_model("frozen_lake", tmp_path), tmp_path / "buffer", EXAMPLES / "frozen_lake"
    walks = "tasks=[{name: walks, source: './tasks.py:walks', args: {size: 60}}]"
    rft(
        "run",
        lake / "sft.yaml",
        "--plain",
        "--buffer",
        buffer,
        *options(model, walks, "steps=2", "trainer.batch_groups=8"),
    )
    assert report(rft, buffer, "lake-sft")["status"] == "finished"
    rft("run", lake / "grpo.yaml", "--plain", "--buffer", buffer, *options(model, *FEW))
    assert report(rft, buffer, "lake-grpo")["status"] == "finished"
    assert max(check_step_rewards(buffer, "lake-grpo")) == 8
    assert rows(buffer, "select count(*) as n from rft.experience where fork is not null") == [{"n": 0}]
    # The nearest goals first.
    tried = rows(
        buffer,
        "select (features ->> 'distance')::int as n from rft.rollout_group join rft.task using (task_id) join rft.run using (run_id)"
        " where name = 'lake-grpo'",
    )
    assert {row["n"] for row in tried} == {1}
    EmbeddedServer(buffer).stop()
