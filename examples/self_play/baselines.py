"""Print the mean result of random and of perfect play against the programs, on the test openings of rae.yaml.

Usage: python baselines.py

JSON on stdout, with standard errors: 1 is a win, 0 a draw, -1 a loss. From each opening 100 games are played.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

import tic_tac_toe as rules

from rftcore.config.run import load_config
from rftdata.tasks.rows import read_tasks

HERE = Path(__file__).resolve().parent
NUM_GAMES = 100
PROGRAMS: dict[str, Callable[[str], Sequence[str]]] = {"random": rules.moves, "minimax": rules.best_moves}


def main() -> None:
    (taskset, *_) = load_config(HERE / "rae.yaml").eval.test
    boards = sorted({rules.read(task["payload"]["prompt"]) for task in read_tasks(taskset, HERE)})
    generator, found = random.Random(0), {}
    for player, opponent in product(PROGRAMS, PROGRAMS):
        results = [
            mean(result(board, PROGRAMS[player], PROGRAMS[opponent], generator) for _ in range(NUM_GAMES))
            for board in boards
        ]
        found[f"{player} against {opponent}"] = [
            round(mean(results), 4),
            round(stdev(results) / sqrt(len(results)), 4),
        ]
    print(json.dumps({"openings": len(boards), "results": found}, indent=1))


def result(
    board: str,
    player: Callable[[str], Sequence[str]],
    opponent: Callable[[str], Sequence[str]],
    generator: random.Random,
) -> int:
    """Return the result of a game for the player who moves first."""
    sign = rules.to_move(board)
    while not rules.over(board):
        choices = (player if rules.to_move(board) == sign else opponent)(board)
        board = rules.after(board, generator.choice(list(choices)))
    won = rules.winner(board)
    return 0 if won is None else 1 if won == sign else -1


if __name__ == "__main__":
    main()
