"""FrozenLake as text: walk over the ice to the goal, one move per turn, and into no hole. Nothing is slippery.

A lake is written as lines of cells: `@` the walker, `G` the goal, `H` a hole, `.` ice.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from rftcore.environments import Environment, Observation, Step
from rftcore.workflows.task import Task

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
Cell = tuple[int, int]


@dataclass(frozen=True)
class Lake:
    """A square lake and where the walker stands; row and column count from 0."""

    size: int
    walker: Cell
    goal: Cell
    holes: frozenset[Cell]

    @classmethod
    def read(cls, text: str) -> Lake:
        """Return the lake that `str` wrote."""
        lines = text.split("\n")
        cells = {(r, c): sign for r, line in enumerate(lines) for c, sign in enumerate(line)}
        (walker,), (goal,) = ([cell for cell, sign in cells.items() if sign == wanted] for wanted in "@G")
        return cls(len(lines), walker, goal, frozenset(cell for cell, sign in cells.items() if sign == "H"))

    def __str__(self) -> str:
        cells = [(r, c) for r in range(self.size) for c in range(self.size)]
        signs = ["@" if cell == self.walker else self._sign(cell) for cell in cells]
        return "\n".join("".join(signs[start : start + self.size]) for start in range(0, len(signs), self.size))

    def moved(self, move: str) -> Lake:
        """Return the lake after a move; at the edge, and for any other word than a move, the walker stays."""
        row, column = (place + step for place, step in zip(self.walker, MOVES.get(move, (0, 0)), strict=True))
        inside = 0 <= row < self.size and 0 <= column < self.size
        return replace(self, walker=(row, column)) if inside else self

    def seen(self) -> str:
        """Return what the walker sees: the cells above, below, left and right of it (`#` is the edge), and the way to the goal as arrows,
        over ice and holes alike."""
        around = [self.moved(move) for move in MOVES]
        cells = "".join("#" if near == self else self._sign(near.walker) for near in around)
        down, right = (goal - place for goal, place in zip(self.goal, self.walker, strict=True))
        return f"{cells}\n{'v' * down}{'^' * -down}{'>' * right}{'<' * -right}"

    def distances(self) -> dict[Cell, int]:
        """Return the number of moves from each cell to the goal, by breadth-first search; cells without a way are left out."""
        found, waiting = {self.goal: 0}, deque([self.goal])
        while waiting:
            cell = waiting.popleft()
            for move in MOVES:
                near = replace(self, walker=cell).moved(move).walker
                if near not in found and near not in self.holes:
                    found[near] = found[cell] + 1
                    waiting.append(near)
        return found

    def shortest_moves(self) -> list[str]:
        """Return the moves that begin a shortest way."""
        away = self.distances()
        return [move for move in MOVES if away.get(self.moved(move).walker, self.size**2) < away[self.walker]]

    def _sign(self, cell: Cell) -> str:
        return "G" if cell == self.goal else "H" if cell in self.holes else "."


class FrozenLake(Environment):
    """An episode on the lake of a task: a reward of 1 for the step onto the goal. A hole ends it, and so does the last move.

    Args:
        max_moves: number of moves after which the episode ends.
    """

    deterministic = True

    def __init__(self, max_moves: int = 8) -> None:
        self._moves_left = max_moves

    async def reset(self, task: Task, seed: int) -> Observation:
        self._lake = Lake.read(task.prompt)
        return self._observation()

    async def step(self, action: str, role: str = "agent") -> Step:
        self._lake = self._lake.moved(action.strip())
        self._moves_left -= 1
        crossed = self._lake.walker == self._lake.goal
        return Step(
            self._observation(),
            reward=float(crossed),
            terminated=crossed or self._lake.walker in self._lake.holes,
            truncated=self._moves_left == 0,
        )

    def _observation(self) -> Observation:
        return Observation(self._lake.seen(), state=str(self._lake))
