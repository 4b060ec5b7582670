"""Trinity-RFT 0.6.0's experience operators on the experiences of the buffer benchmark, in its own environment. Arguments: ROWS ROUNDS.

Each call gets a new list of the same experiences, as in its pipeline. CPU seconds of the process: of the operator alone, and with reading the
experiences from the bytes in which its buffer stores and sends them.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import json
import statistics
import sys
import time
from importlib.metadata import version
from typing import Any

import torch
from trinity.buffer.operators.filters.reward_filter import DAPODynamicSamplingFilter, RewardFilter, RewardSTDFilter
from trinity.buffer.operators.mappers.reward_shaping_mapper import RewardShapingMapper
from trinity.common.experience import EID, Experience

from benchmarks.harness.workload import GROUP_SIZE, make_samples


def experiences(rows: int) -> list[Experience]:
    return [
        Experience(
            eid=EID(batch=0, task=s.group, run=s.key % GROUP_SIZE),
            tokens=torch.from_numpy(s.token_ids),
            logprobs=torch.from_numpy(s.logprobs[s.num_prompt_tokens :]),
            prompt_length=s.num_prompt_tokens,
            prompt_text=s.prompt,
            response_text=s.response,
            reward=s.reward,
            metrics={name: float(value) for name, value in s.metrics.items()},
            info=dict(s.metrics),
        )
        for s in make_samples(rows, seed=11)
    ]


def run(operator: Any, given: list[Experience]) -> None:
    found = operator.process(given)
    if inspect.iscoroutine(found):
        asyncio.run(found)


def main() -> None:
    rows, rounds = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    operators = {
        "reward_filter": RewardFilter(threshold=0.5),
        "reward_std_filter": RewardSTDFilter(),
        "dapo_dynamic_sampling": DAPODynamicSamplingFilter(metric_key="correct", correct_threshold=0.5),
        "reward_shaping_mapper": RewardShapingMapper([{"stats_key": "seconds", "op_type": "ADD", "weight": 0.1}]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in operators}
    given = experiences(rows)
    stored = Experience.serialize_many(given)
    reading: list[float] = []
    for number in range(rounds + 1):
        started = time.process_time()
        Experience.deserialize_many(stored)
        if number:
            reading.append(time.process_time() - started)
        for name, operator in operators.items():
            fresh = [copy.copy(one) for one in given]  # the mapper changes its input
            gc.collect()
            gc.disable()
            started = time.process_time()
            run(operator, fresh)
            spent = time.process_time() - started
            gc.enable()
            if number:  # the first round warms up
                seconds[name].append(spent)
    whole = {name: [a + b for a, b in zip(spent, reading)] for name, spent in seconds.items()}
    found = {"operators": figures(rows, seconds), "operators_with_objects": figures(rows, whole)}
    print(json.dumps({"version": version("trinity-rft"), **found}))


def figures(rows: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    found = {}
    for name, spent in seconds.items():
        rates = [round(rows / one) for one in spent]
        found[name] = {
            "rows_per_s_per_core": {"median": statistics.median(rates), "min": min(rates), "max": max(rates)},
            "us_per_row": round(1e6 * statistics.median(spent) / rows, 3),
        }
    return found


if __name__ == "__main__":
    main()
