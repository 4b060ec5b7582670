"""The built-in environments, with the packages that they adapt."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
import reasoning_gym

from rftcore.environments import Environment, Step, load_environment
from rftcore.environments.results import Results
from rftcore.environments.sql_questions import LEVELS, question
from rftcore.workflows.task import Task
from rftdata.errors import ConfigError, PluginError

GAMES = {"frozen_lake": {"size": 4}, "taxi": {}, "cliff_walking": {}, "blackjack": {}}


def task(prompt: str = "", answer: str | None = None, **metadata: Any) -> Task:
    return Task(1, "games", "one", prompt, answer, metadata)


def made(name: str, **args: Any) -> Environment:
    return load_environment(name)(**args)


def step(environment: Environment, action: str, role: str = "agent") -> Step:
    return Results(environment.roles).step(environment.step(action, role))


@pytest.mark.parametrize("name", GAMES)
def test_toy_text_games_are_deterministic_and_end(name: str) -> None:
    words = load_environment(name).words  # type: ignore[attr-defined]

    def played(seed: int) -> list[Any]:
        game, choice = made(name, max_steps=30, **GAMES[name]), random.Random(1)
        assert game.deterministic
        found: list[Any] = [game.reset(task(), seed)]
        while len(found) == 1 or not found[-1].ended:
            found.append(step(game, f"I go {choice.choice(words)}."))
        game.close()
        return found

    assert played(5) == played(5) != played(6) or name == "cliff_walking"
    assert len(played(5)) <= 31


def test_an_answer_without_one_word_changes_nothing_and_counts() -> None:
    lake = made("frozen_lake", max_steps=2)
    start = lake.reset(task(), 1)
    for action, truncated in (("left or right?", False), ("leftover", True)):
        found = step(lake, action)
        assert found.observation.text.startswith("Answer with one of the words left, down, right, up.")
        assert (found.state, found.truncated) == (start.state, truncated)  # type: ignore[union-attr]


def test_a_lake_of_the_task_is_crossed() -> None:
    lake = made("frozen_lake", size=5)
    seen = lake.reset(task(environment_args={"desc": ["SF", "HG"]}), 1)
    assert seen.text.endswith("\n@F\nHG")  # type: ignore[union-attr]
    first, last = step(lake, "RIGHT"), step(lake, "down")
    assert (first.state, first.reward, last.reward, last.terminated) == ("S@\nHG", 0.0, 1.0, True)
    with pytest.raises(ConfigError, match="size of a frozen lake"):
        made("frozen_lake", size=1).reset(task(), 1)


def test_reasoning_gym_scores_each_attempt_and_the_rewards_are_the_best_score() -> None:
    entry = reasoning_gym.create_dataset("basic_arithmetic", seed=1, size=1)[0]
    attempts = made("reasoning_gym", attempts=3, retry_factor=0.5)
    asked = task(entry["question"], entry["answer"], generator="basic_arithmetic", **entry["metadata"])
    assert attempts.reset(asked, 1).text == entry["question"]  # type: ignore[union-attr]
    wrong, right = step(attempts, "no idea"), step(attempts, entry["answer"])
    assert "you have 2 more attempts" in wrong.observation.text and not wrong.ended
    assert right.terminated and wrong.reward + right.reward == pytest.approx(0.5)
    with pytest.raises(ConfigError, match="does not come from reasoning_gym"):
        made("reasoning_gym").reset(task(), 1)


def test_generated_questions_are_answered_by_their_own_query_in_any_form() -> None:
    texts = set()
    for seed in range(40):
        asked = question(seed, (LEVELS[seed % 3],))
        assert asked == question(seed, (LEVELS[seed % 3],))
        environment = made("sql", levels=[LEVELS[seed % 3]])
        assert asked.text in environment.reset(task(), seed).text  # type: ignore[union-attr]
        found = step(environment, f"The query:\n```sql\nSELECT * FROM ({asked.query}) ORDER BY 1 DESC;\n```")
        assert found.terminated and found.reward == 1.0, found
        texts.add(asked.text)
        environment.close()
    assert len(texts) > 30


@pytest.mark.parametrize(
    ("query", "seen"),
    [
        ("SELEC 1", "Parser Error"),
        ("SELECT no FROM t", "Binder Error"),
        ("SELECT 1; SELECT 2", "only one SELECT is allowed"),
        ("DROP TABLE t", "only one SELECT is allowed"),
        ("SET threads = 4", "only one SELECT is allowed"),
        ("COPY t TO '/tmp/t.csv'", "only one SELECT is allowed"),
        ("SELECT * FROM read_text('/etc/passwd')", "disabled by configuration"),
        ("SELECT * FROM glob('/*')", "disabled by configuration"),
        ("WITH n AS (INSERT INTO t VALUES (9) RETURNING *) SELECT * FROM n", "Error"),
        ("SELECT sum(a.range * b.range) FROM range(1000000) a, range(1000000) b", "took longer than 0.3 s"),
        ("SELECT repeat('x', 1000000000)", "Out of Memory"),
        ("SELECT range FROM range(20000)", "(more than 10,000 rows)"),
        ("SELECT repeat('y', 100) AS y", "y" * 79 + "…"),
    ],
)
def test_wrong_and_hostile_queries_are_observations_and_change_nothing(query: str, seen: str) -> None:
    own = task(
        "How many?", "SELECT count(*) FROM t", database="CREATE TABLE t (n INTEGER); INSERT INTO t VALUES (1), (2)"
    )
    environment = made("sql", timeout_s=0.3, max_queries=2)
    assert "How many?" in environment.reset(own, 1).text  # type: ignore[union-attr]
    found = step(environment, query)
    assert seen in found.observation.text and "You have 1 more" in found.observation.text and not found.ended
    assert step(environment, "SELECT 2.0").reward == 1.0
    environment.close()


def test_two_players_of_textarena_are_roles_with_rewards_at_the_end() -> None:
    game = made("textarena", game="TicTacToe-v0")
    assert game.roles == ("player_0", "player_1")
    seen = Results(game.roles).observation(game.reset(task(), 1))
    assert seen.role == "player_0" and "Tic Tac Toe" in seen.text
    for move in ("[4]", "[0]", "four", "[3]", "[1]"):
        seen = step(game, move, seen.role).observation
    assert seen.role == "player_0" and "Player 1: [1]" in seen.text and "Player 0: [3]" not in seen.text
    last = step(game, "[5]", seen.role)
    assert last.terminated and last.rewards_by_role("player_0") == {"player_0": 1.0, "player_1": -1.0}
    with pytest.raises(ConfigError, match="did you mean 'TicTacToe-v0'"):
        made("textarena", game="TicTacTo-v0")
    other = made("textarena", game="TicTacToe-v0")
    other.reset(task(), 1)
    with pytest.raises(ValueError, match="the turn of player_0, not of player_1"):
        other.step("[0]", "player_1")


def test_one_player_of_textarena_is_the_agent() -> None:
    game = made("textarena", game="GuessTheNumber-v0", num_players=1)
    assert game.roles == ("agent",)
    game.reset(task(), 1)
    assert not step(game, "[99]").ended


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.delitem(sys.modules, "rftcore.environments.toy_text", raising=False)
    with pytest.raises(PluginError, match=r"needs the package gymnasium.*pip install 'rftdata\[agents\]'"):
        load_environment("taxi")
