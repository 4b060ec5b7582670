"""What a slow reward costs the sampling: 64 rollouts in flight, and how long the engine takes for all of their responses.

`rft bench slow_rewards` prints JSON. Rounds are interleaved; each compares a reward that takes a second, asleep or computing, with one
that returns at once, on the same engine. A ratio of 1 means that sampling does not notice. Calling the functions in the event loop
would take 64 seconds, whatever the engine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from rftcore.engines.base import Decoding, EngineConfig, Generation
from rftcore.engines.transformers_engine import TransformersEngine
from rftcore.explorer.rollouts import RolloutRunner
from rftcore.explorer.scorer import Scorer
from rftcore.explorer.workflow_loop import WorkflowLoop
from rftcore.rewards import load_rewards
from rftcore.workflows.single_turn import single_turn
from rftcore.workflows.task import Task
from tests.support.models import make_tiny_model

NUM_ROLLOUTS = 64
REWARDS = """
import time

def quick(turn, task):
    return 1.0

def sleeps(turn, task):
    time.sleep(1)
    return 1.0

def computes(turn, task):
    ends = time.monotonic() + 1
    while time.monotonic() < ends:
        pass
    return 1.0
"""


class Timed(TransformersEngine):
    """Notes when each response was finished."""

    finished: list[float]

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        generation = await super().generate(prompt_token_ids, decoding)
        self.finished.append(time.perf_counter())
        return generation


def sampling_seconds(engine: Timed, reward: str, folder: Path) -> float:
    """Seconds until the last of the responses was sampled, the rollouts begun all at once."""
    scorer = Scorer(load_rewards([f"./rewards.py:{reward}"], folder), folder)
    runner = RolloutRunner(
        engine=engine,
        workflow=single_turn,
        workflow_args={},
        scorer=scorer,
        timeout_s=600.0,
        source="explorer",
        slots=asyncio.Semaphore(2 * NUM_ROLLOUTS),
    )
    loop = WorkflowLoop(block_timeout_s=60.0)
    decoding = Decoding(max_tokens=200)

    async def run() -> float:
        await loop.run(runner.rollout(Task(0, "t", "warm", "0+0=", None), 0, decoding))  # starts the first process
        engine.finished = []
        started = time.perf_counter()
        tasks = [Task(n, "t", str(n), f"{n}+1=", None) for n in range(NUM_ROLLOUTS)]
        await asyncio.gather(*(loop.run(runner.rollout(task, 0, decoding)) for task in tasks))
        return max(engine.finished) - started

    try:
        return asyncio.run(run())
    finally:
        loop.close()
        scorer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rewards.py").write_text(REWARDS)
        engine = Timed(make_tiny_model(folder / "model"), EngineConfig(dtype="float32", max_num_seqs=NUM_ROLLOUTS))
        engine.finished = []
        found = [
            {reward: sampling_seconds(engine, reward, folder) for reward in ("quick", "sleeps", "computes")}
            for _ in range(rounds)
        ]
        engine.close()
    result = {"cores": os.cpu_count(), "num_rollouts": NUM_ROLLOUTS, "rounds": rounds}
    for reward in ("quick", "sleeps", "computes"):
        seconds = [one[reward] for one in found]
        result[f"{reward}_sampling_s"] = round(statistics.median(seconds), 3)
        result[f"{reward}_ratio"] = round(statistics.median(one[reward] / one["quick"] for one in found), 2)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
