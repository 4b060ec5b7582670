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
    # A random model fails at everything, so its entropy alone has a gradient.
    "pipelines.experience=[]",
    "algorithm.entropy={coef: 0.01}",
    "eval={every: 2}",
]
FEWER_GAMES = "eval={every: 2, tasks: [], test: []}"
FEWER_QUESTIONS = "tasks=[{name: questions, source: './tasks.py:questions', args: {first: 1, size: 20}}]"
FEWER_PRODUCTS = """eval.test=[
    {name: products-test, source: './tasks.py:products', args: {size: 6}},
    {name: products-test-without, source: './tasks.py:products', args: {size: 6}, workflow: single_turn},
]"""


def small_model(example: str, folder: Path) -> Path:
    """Write the random model of an example."""
    words = (EXAMPLES / example / "words.txt").read_text().split()
    command = [sys.executable, EXAMPLES / "small_chat_model.py", folder / "model", *words]
    subprocess.run([*command, "--hidden-size", "64", "--layers", "1"], check=True, capture_output=True)
    return folder / "model"


def options(model: Path, *more: str) -> list[str]:
    return [part for override in (f"model.path={model}", *more) for part in ("--set", override)]


def check_step_rewards(buffer: Path, run: str) -> list[int]:
    """Check that the rewards of the turns of each experience add up to its own; return the numbers of turns."""
    found = rows(
        buffer,
        f"""select e.experience_id, e.reward_sampled as reward, count(*) as num_turns, sum(t.reward_sampled) as step_rewards
            from rft.v_experience e join rft.turn_reward t using (experience_id) where e.run = '{run}' group by 1, 2""",
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


def test_both_sides_of_a_game_are_experiences_with_a_baseline_for_each_role(rft: Rft, tmp_path: Path) -> None:
    model, buffer, play = small_model("self_play", tmp_path), tmp_path / "buffer", EXAMPLES / "self_play"
    few = [each for each in FEW if not each.startswith("algorithm")]
    rft("run", play / "rae.yaml", "--plain", "--buffer", buffer, *options(model, *few, FEWER_GAMES))
    assert report(rft, buffer, "self-play-rae")["status"] == "finished"
    check_step_rewards(buffer, "self-play-rae")
    roles = rows(buffer, "select role, count(*) as n from rft.experience group by 1 order by 1")
    assert {row["role"] for row in roles} == {"x", "o"}
    kept = rows(buffer, "select distinct role from rft.role_baseline order by 1")
    assert [row["role"] for row in kept] == ["o", "x"]
    EmbeddedServer(buffer).stop()


def test_questions_are_asked_with_the_calculator_and_without(rft: Rft, tmp_path: Path) -> None:
    model, buffer, calculator = small_model("calculator", tmp_path), tmp_path / "buffer", EXAMPLES / "calculator"
    demonstrated = "tasks=[{name: demonstrations, source: './tasks.py:demonstrations', args: {size: 60}}]"
    arguments = options(model, demonstrated, "steps=1", "trainer.batch_groups=8")
    rft("run", calculator / "sft.yaml", "--plain", "--buffer", buffer, *arguments)
    (trained,) = rows(
        buffer, "select max(num_trained_tokens) as most, min(num_trained_tokens) as least from rft.experience"
    )
    # The call, its closing token, and the product; or the product alone.
    assert trained["most"] > 30 and trained["least"] < 9

    rft("run", calculator / "grpo.yaml", "--plain", "--buffer", buffer, *options(model, *FEW, FEWER_PRODUCTS))
    assert report(rft, buffer, "calculator-grpo")["status"] == "finished"
    sampled = rows(
        buffer, "select metrics ? 'tool_calls' as has_calls from rft.v_experience where run = 'calculator-grpo'"
    )
    assert len(sampled) >= 12 and all(row["has_calls"] for row in sampled)
    asked = rows(
        buffer,
        "select taskset, metrics ? 'tool_calls' as has_calls from rft.v_evaluation_answer where purpose = 'test'",
    )
    assert {(row["taskset"], row["has_calls"]) for row in asked} == {
        ("products-test", True),
        ("products-test-without", False),
    }
    EmbeddedServer(buffer).stop()


def test_queries_are_answered_by_the_database(rft: Rft, tmp_path: Path) -> None:
    model, buffer, agent = small_model("sql_agent", tmp_path), tmp_path / "buffer", EXAMPLES / "sql_agent"
    rft("run", agent / "grpo.yaml", "--plain", "--buffer", buffer, *options(model, *FEW, FEWER_QUESTIONS))
    assert report(rft, buffer, "sql-grpo")["status"] == "finished"
    assert set(check_step_rewards(buffer, "sql-grpo")) == {3}  # a random model uses all of its queries
    (error,) = rows(buffer, "select count(*) as n from rft.experience where response like '%That is not the answer%'")
    assert error["n"] >= 12
    EmbeddedServer(buffer).stop()
