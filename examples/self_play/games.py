"""Tic-tac-toe for a policy that plays both sides, and for one that plays against a program."""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the rules are beside this file
import tic_tac_toe as rules

from rftcore.environments import Environment, Observation, Step
from rftcore.workflows.task import Task

OTHER = {"x": "o", "o": "x"}


def results(board: str) -> dict[str, float]:
    """Return both players' rewards at the end of a game: 1 wins, -1 loses, 0 draws."""
    won = rules.winner(board)
    return {"x": 0.0, "o": 0.0} if won is None else {won: 1.0, OTHER[won]: -1.0}


class SelfPlay(Environment):
    """A game between two roles. A move that is not a free cell ends it, with -1 for its player alone."""

    roles = ("x", "o")
    deterministic = True

    async def reset(self, task: Task, seed: int) -> Observation:
        self._board = rules.read(task.prompt)
        return self._observation()

    async def step(self, action: str, role: str = "agent") -> Step:
        move = action.strip()
        if move not in rules.moves(self._board):
            return Step(
                self._observation(), rewards={role: -1.0, OTHER[role]: 0.0}, terminated=True, info={"illegal": True}
            )
        self._board = rules.after(self._board, move)
        if rules.over(self._board):
            return Step(self._observation(), rewards=results(self._board), terminated=True)
        return Step(self._observation())

    def _observation(self) -> Observation:
        return Observation(rules.seen(self._board), role=rules.to_move(self._board), state=self._board)


class AgainstProgram(Environment):
    """A game against a program that moves at random, or perfectly (minimax, at random among the best moves).

    Args:
        opponent: `random` or `minimax`.
    """

    deterministic = True

    def __init__(self, opponent: str) -> None:
        self._choices = {"random": rules.moves, "minimax": rules.best_moves}[opponent]

    async def reset(self, task: Task, seed: int) -> Observation:
        self._generator = random.Random(seed)
        self._board = rules.read(task.prompt)
        self._player = rules.to_move(self._board)
        return self._observation()

    async def step(self, action: str, role: str = "agent") -> Step:
        move = action.strip()
        if move not in rules.moves(self._board):
            return Step(self._observation(), reward=-1.0, terminated=True, info={"illegal": True})
        self._board = rules.after(self._board, move)
        if not rules.over(self._board):
            self._board = rules.after(self._board, self._generator.choice(list(self._choices(self._board))))
        if rules.over(self._board):
            return Step(self._observation(), reward=results(self._board)[self._player], terminated=True)
        return Step(self._observation())

    def _observation(self) -> Observation:
        return Observation(rules.seen(self._board), state=self._board)
