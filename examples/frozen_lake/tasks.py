"""Lakes to cross, and walks to imitate. Lakes with the same goal and holes have the same split key, whatever the start."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # the lake is beside this file
from lake import MOVES, Lake


def lakes(
    size: int, seed: int = 0, sides: tuple[int, ...] = (3, 4), distances: tuple[int, int] = (1, 6)
) -> Iterator[dict[str, Any]]:
    """Yield `size` different lakes, with every distance from start to goal equally often.

    Args:
        sides: cells along a side, one of these at random.
        distances: the smallest and the largest number of moves to the goal.
    """
    generator, seen = random.Random(seed), set()
    for _ in range(size):
        wanted = generator.randint(*distances)
        while (lake := _lake(generator, generator.choice(sides), wanted)) is None or str(lake) in seen:
            pass
        seen.add(str(lake))
        yield {
            "question": str(lake),
            "split_key": str(replace(lake, walker=lake.goal)),
            "features": {"distance": wanted, "side": lake.size},
        }


def _lake(generator: random.Random, side: int, wanted: int) -> Lake | None:
    """Return a random lake with about a quarter of holes, or None if no start is that far from its goal."""
    cells = [(r, c) for r in range(side) for c in range(side)]
    goal, *holes = generator.sample(cells, 1 + generator.randint(side - 2, side))
    lake = Lake(side, goal, goal, frozenset(holes))
    starts = [cell for cell, moves in lake.distances().items() if moves == wanted]
    return replace(lake, walker=generator.choice(starts)) if starts else None


def walks(size: int, seed: int = 0, skill: float = 0.0, max_moves: int = 8, **lake: Any) -> Iterator[dict[str, Any]]:
    """Yield chats to imitate: each move is one of a shortest way with probability `skill`, else any of the four."""
    generator = random.Random(seed)
    for task in lakes(size, seed, **lake):
        place, chat = Lake.read(task["question"]), []
        while len(chat) < 2 * max_moves and place.walker != place.goal and place.walker not in place.holes:
            move = generator.choice(place.shortest_moves() if generator.random() < skill else list(MOVES))
            chat += [{"role": "user", "content": place.seen()}, {"role": "assistant", "content": move}]
            place = place.moved(move)
        yield {"messages": chat, "split_key": task["split_key"], "features": task["features"]}
