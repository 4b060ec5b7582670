"""Openings to play from, and games of random moves to imitate. Boards that are rotations or mirror images of each other have the same split key."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # the rules are beside this file
import tic_tac_toe as rules

TURNED, MIRRORED = (6, 3, 0, 7, 4, 1, 8, 5, 2), (2, 1, 0, 5, 4, 3, 8, 7, 6)


def openings(max_moves: int = 4, games: int = 1) -> Iterator[dict[str, Any]]:
    """Yield every board of at most `max_moves` moves on which the game is not over.

    Args:
        games: how often each board occurs; a program that plays against the policy moves differently in each.
    """
    boards = [rules.EMPTY]
    for num_moves in range(max_moves + 1):
        for board, number in product(boards, range(games)):
            yield {
                "task_key": f"{board}/{number}",
                "question": rules.written(board),
                "split_key": symmetric(board),
                "features": {"moves": num_moves},
            }
        following = {rules.after(board, move) for board in boards for move in rules.moves(board)}
        boards = sorted(board for board in following if not rules.over(board))


def games(size: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the moves of one player in games of random moves, as chats."""
    generator = random.Random(seed)
    for number in range(size):
        board, chats = rules.EMPTY, {"x": [], "o": []}
        while not rules.over(board):
            player, move = rules.to_move(board), generator.choice(rules.moves(board))
            chats[player] += [
                {"role": "user", "content": f"{player}\n{rules.written(board)}"},
                {"role": "assistant", "content": move},
            ]
            board = rules.after(board, move)
        yield {"messages": chats["xo"[number % 2]]}


def symmetric(board: str) -> str:
    """Return one text for a board and its rotations and mirror images."""
    signs, found = "".join("." if cell.isdigit() else cell for cell in board), []
    for _ in range(4):
        signs = "".join(signs[place] for place in TURNED)
        found += [signs, "".join(signs[place] for place in MIRRORED)]
    return min(found)
