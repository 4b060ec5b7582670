"""The games of the examples: shortest ways, perfect play, and episodes."""

from __future__ import annotations

import asyncio
import importlib
import random
import sys
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rftcore.environments import Step, open_environment
from rftcore.workflows.task import Task

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def module(example: str, name: str) -> ModuleType:
    """Import a module of an example under a name that no other example shares."""
    sys.path.insert(0, str(EXAMPLES / example))
    try:
        sys.modules.pop(name, None)
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def played(name: str, args: dict[str, Any], prompt: str, *actions: str) -> list[Step]:
    """Return the steps of an episode."""

    async def play() -> list[Step]:
        async with open_environment(f"{EXAMPLES}/{name}", args) as environment:
            role = (await environment.reset(Task(1, "taskset", "key", prompt, None), 0)).role
            steps = []
            for action in actions:
                steps.append(await environment.step(action, role))
                role = steps[-1].observation.role
            return steps

    return asyncio.run(play())


def crosses(lake: Any, walk: tuple[str, ...]) -> bool:
    for move in walk:
        lake = lake.moved(move)
        if lake.walker in lake.holes:
            return False
    return lake.walker == lake.goal


def test_no_walk_crosses_a_lake_in_fewer_moves_than_the_shortest_way() -> None:
    lake = module("frozen_lake", "lake")
    for task in module("frozen_lake", "tasks").lakes(30, seed=3, sides=(3,), distances=(1, 4)):
        start, length = lake.Lake.read(task["question"]), task["features"]["distance"]
        assert str(start) == task["question"]
        firsts = {walk[0] for walk in product(lake.MOVES, repeat=length) if crosses(start, walk)}
        assert firsts == set(start.shortest_moves())
        assert not any(crosses(start, walk) for walk in product(lake.MOVES, repeat=length - 1))


def test_a_walker_sees_the_cells_around_it_and_gets_1_for_the_step_onto_the_goal() -> None:
    steps = played("frozen_lake/lake.py:FrozenLake", {}, "@.H\n..G\n...", "up", "right", "down", "right")
    assert [step.observation.text for step in steps[:3]] == ["#.#.\nv>>", "#..H\nv>", "...G\n>"]
    assert [(step.reward, step.ended) for step in steps] == [(0.0, False)] * 3 + [(1.0, True)]
    (fallen,) = played("frozen_lake/lake.py:FrozenLake", {}, "@H\n.G", "right")
    assert (fallen.reward, fallen.terminated) == (0.0, True)
    late = played("frozen_lake/lake.py:FrozenLake", {"max_moves": 2}, "@.\n.G", "up", "dance")
    assert [step.truncated for step in late] == [False, True]


def test_perfect_play_draws_against_itself_and_never_loses() -> None:
    rules, generator = module("self_play", "tic_tac_toe"), random.Random(1)
    assert rules.value(rules.EMPTY) == 0
    for game in range(60):
        board, perfect = rules.EMPTY, "xo"[game % 2]
        while not rules.over(board):
            choices = rules.best_moves(board) if rules.to_move(board) == perfect else rules.moves(board)
            board = rules.after(board, generator.choice(list(choices)))
        assert rules.winner(board) in (None, perfect)


@pytest.mark.parametrize(
    ("moves", "rewards"),
    [
        ("14253", {"x": 1.0, "o": -1.0}),
        ("125463798", {"x": 0.0, "o": 0.0}),
        ("11", {"o": -1.0, "x": 0.0}),  # the cell is taken
    ],
)
def test_both_players_are_rewarded_at_the_end_of_a_game(moves: str, rewards: dict[str, float]) -> None:
    *before, last = played("self_play/games.py:SelfPlay", {}, "123\n456\n789", *moves)
    assert not any(step.ended or step.rewards for step in before)
    assert last.terminated and dict(last.rewards) == rewards


def test_a_perfect_program_punishes_a_mistake() -> None:
    (replied,) = played("self_play/games.py:AgainstProgram", {"opponent": "minimax"}, "xx3\n4oo\n789", "7")
    assert (replied.reward, replied.terminated, replied.observation.state) == (-1.0, True, "xx3ooox89")
