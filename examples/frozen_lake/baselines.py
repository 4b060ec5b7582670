"""Print how often random moves, and moves of a shortest way, cross the lakes of a taskset of grpo.yaml.

Usage: python baselines.py [--taskset lakes-test] [--max-moves 8]

JSON on stdout: success by distance with standard errors, and the number of lakes. A random policy walks each lake 200 times.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from lake import MOVES, Lake

from rftcore.config.run import load_stages
from rftdata.tasks.rows import read_tasks

HERE = Path(__file__).resolve().parent
NUM_WALKS = 200
Policy = Callable[[Lake, random.Random], str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--taskset", default="lakes-test")
    parser.add_argument("--max-moves", type=int, default=8)
    options = parser.parse_args()
    tasks = lakes_of(options.taskset)
    policies: dict[str, tuple[Policy, int]] = {
        "random": (lambda lake, generator: generator.choice(list(MOVES)), NUM_WALKS),
        "shortest path": (lambda lake, generator: lake.shortest_moves()[0], 1),
    }
    found = {name: rates(tasks, *policy, options.max_moves) for name, policy in policies.items()}
    print(json.dumps({"taskset": options.taskset, "lakes": len(tasks), "policies": found}, indent=1))


def lakes_of(taskset: str) -> list[dict[str, Any]]:
    """Return the tasks of a taskset of grpo.yaml."""
    stage = load_stages(HERE / "grpo.yaml")[-1]
    found = {each.name: each for each in (*stage.tasks, *stage.eval.tasks, *stage.eval.test)}
    return list(read_tasks(found[taskset], HERE))


def rates(tasks: list[dict[str, Any]], policy: Policy, num_walks: int, max_moves: int) -> dict[str, list[float]]:
    """Return the mean rate of success over lakes and its standard error, by distance and for all lakes together."""
    generator, by_distance = random.Random(0), defaultdict(list)
    for task in tasks:
        lake = Lake.read(task["payload"]["prompt"])
        rate = mean(crossed(lake, policy, generator, max_moves) for _ in range(num_walks))
        for group in ("all", str(int(task["features"]["distance"]))):
            by_distance[group].append(rate)
    return {
        group: [round(mean(each), 4), round(stdev(each) / sqrt(len(each)), 4)]
        for group, each in sorted(by_distance.items())
    }


def crossed(lake: Lake, policy: Policy, generator: random.Random, max_moves: int) -> float:
    """Return 1 if a policy reaches the goal, else 0."""
    for _ in range(max_moves):
        lake = lake.moved(policy(lake, generator))
        if lake.walker == lake.goal:
            return 1.0
        if lake.walker in lake.holes:
            return 0.0
    return 0.0


if __name__ == "__main__":
    main()
