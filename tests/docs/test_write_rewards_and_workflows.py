"""The code of the pages on rewards and workflows runs as it stands there, on a model that answers what the page expects."""

from __future__ import annotations

import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rftcore.config.reward import RewardConfig
from rftcore.engines.base import Decoding
from rftcore.explorer.rehearsal import StandIn
from rftcore.explorer.rollout_slots import RolloutSlots
from rftcore.explorer.rollouts import RolloutRunner
from rftcore.explorer.scorer import Scorer
from rftcore.rewards import load_rewards
from rftcore.rewards.answered_rollout import AnsweredRollout
from rftcore.workflows import WORKFLOWS
from rftcore.workflows.inputs import PER_TOKEN, PER_TURN
from rftcore.workflows.task import Task, Turn
from rftdata.experience import Rollout, Sequence
from tests.support.models import make_character_tokenizer
from tests.support.waiting import PATIENCE_S

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
            timeout_s=PATIENCE_S,
            source="explorer",
            slots=RolloutSlots(1, 1),
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


def test_the_list_of_rewards_of_the_page(files: Path) -> None:
    (block,) = re.findall(
        r"```yaml\n(explorer:\n  reward:\n    - \./reward.*?)```", (PAGES / "write-a-reward.md").read_text(), re.DOTALL
    )
    rewards = [RewardConfig.model_validate(entry) for entry in yaml.safe_load(block)["explorer"]["reward"]]
    scorer = Scorer(load_rewards(rewards, files), files)
    try:
        score = asyncio.run(
            scorer(Turn([], "2, thanks", "stop", Sequence("1+1=", "2, thanks", [1, 2], 1, "stop")), TASK)
        )
    finally:
        scorer.close()
    assert (score.reward, score.parts) == (0.4, {"right": 0.0, "short": 0.2, "polite": 1.0})


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
    assert (rollout.outcome, rollout.reward, rollout.num_turns) == ("ok", reward, turns), rollout.error
    assert len(rollout.sequences) == 1, "each turn extends the one before"


def test_a_workflow_records_inputs_of_algorithms(files: Path) -> None:
    rollout = tried(files, "./maze.py:walk", "right")
    assert (rollout.outcome, rollout.reward) == ("ok", 3.0), rollout.error
    recorded = [sequence.arrays for sequence in rollout.sequences]
    assert len({int(arrays["state_hash"][0]) for arrays in recorded}) == 3
    assert [float(arrays["step_reward"][0]) for arrays in recorded] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("answer", "sampled"), [("2", [True]), ("3", [True, False])])
def test_a_workflow_lets_an_expert_answer_where_the_policy_fails(files: Path, answer: str, sampled: list[bool]) -> None:
    rollout = tried(files, "./guided.py:guided", answer)
    assert [sequence.behavior_logprobs is not None for sequence in rollout.sequences] == sampled, rollout.error


def test_a_reward_of_tokens(files: Path) -> None:
    scorer = Scorer(load_rewards(["./tokens.py:shaped"], files), files)
    turn = Turn([], "2", "stop", Sequence("1+1=", "2", [1, *range(10)], 1, "stop"))
    try:
        score = asyncio.run(scorer(turn, TASK))
    finally:
        scorer.close()
    assert score.reward == 1.0 and score.parts == {"right": 1.0, "late": pytest.approx(-0.2)}
    assert turn.sequence.arrays["token_rewards"].tolist() == pytest.approx([0] * 9 + [-0.1] * 2)


def test_a_reward_over_a_group(files: Path) -> None:
    scorer = Scorer(load_rewards(["./rare.py:rare"], files), files)
    turns = [Turn([], text, "stop", Sequence("?", text, [1, 2], 1, "stop")) for text in ("a", "b", "a")]
    try:
        scores = asyncio.run(
            scorer.score_group([AnsweredRollout(i, [turn], 0.0) for i, turn in enumerate(turns)], TASK)
        )
    finally:
        scorer.close()
    assert [score.parts for score in scores] == [{"rare": 0.5}, {"rare": 1.0}, {"rare": 0.5}]


def test_the_tables_name_every_field() -> None:
    text = (PAGES / "write-a-reward.md").read_text()
    for kind in (Turn, Task):
        for name in kind.__dataclass_fields__:
            assert f"| `{name}` |" in text, (kind.__name__, name)
    for name in AnsweredRollout.__dataclass_fields__:
        assert f"`{name}`" in text, name


def test_the_table_of_inputs_names_every_one() -> None:
    text = (PAGES / "write-a-workflow.md").read_text()
    arguments = [name for name in inspect.signature(Turn.record).parameters if name != "self"]
    for argument in arguments:
        assert f"| `{argument}` |" in text
    for array in (*PER_TOKEN, *PER_TURN):
        assert f"| `{array}` |" in text


def test_the_two_roles_are_rewarded_apart(files: Path) -> None:
    rollout = tried(files, "./review.py:review", "2")
    assert (rollout.outcome, rollout.error) == ("ok", None)
    # The answer is right, and the reviewer, who says 2 as well, has not said yes.
    assert [(s.role, s.reward) for s in rollout.sequences] == [("author", 1.0), ("reviewer", 0.0)]
