"""Rollouts a second of an explorer whose environments are slow: a number of rollouts that follows the engine's load, beside a fixed number.

An explorer claims groups of four from a PostgreSQL buffer, and stores them. A rollout has `--turns` answers. Each is followed by a step of its
environment that takes `--step-s` on average (half to one and a half times of it) and computes nothing. The engine computes nothing, either:
it answers `--sequences` requests at a time, in `--answer-s` each. So all times are waits, and the processor of this machine hardly matters.

`fixed` has two rollouts for each sequence of the engine (`explorer.max_rollouts`), whatever they wait for; `adaptive` is the default. `ratio` is
adaptive over fixed, and `engine` the share of the engine's sequences that were in use from the first claim to the last commit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rftdata
from benchmarks.harness.arguments import argument_parser, integer, kept_folder, positive
from benchmarks.harness.report import say, write
from rftcore.config.run import RunConfig, parse_config
from rftcore.engines.base import Decoding, Engine, EngineConfig, Generation
from rftcore.explorer.role import Explorer
from rftcore.resolved import ResolvedRun
from rftcore.run.join import JoinedRun
from rftcore.workflows.task import Model, Score, Scorer, Task
from rftdata.workers.worker import Worker

GROUP_SIZE = 4
_SYSTEMS = ("fixed", "adaptive")


class WaitingEngine(Engine):
    """Answers some requests at a time, each after a fixed time."""

    def __init__(self, model_path: str | Path, config: EngineConfig | None = None, policy_version_id: int = 0) -> None:
        from transformers import AutoTokenizer

        self.config = config or EngineConfig()
        self.tokenizer = AutoTokenizer.from_pretrained(str(model_path))
        self.policy_version_id = policy_version_id
        self.num_generated_tokens = 0
        self.answer_s = 0.0
        self.busy_s = 0.0
        self._sequences = asyncio.Semaphore(self.config.max_num_seqs)

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        async with self._sequences:
            await asyncio.sleep(self.answer_s)
            self.busy_s += self.answer_s
        self.num_generated_tokens += 1
        token_id = int(self.tokenizer.encode("a", add_special_tokens=False)[0])
        return Generation([token_id], [-1.0], "a", "length", [(0, self.policy_version_id)])

    def load_weights(self, uri: str, policy_version_id: int, checksum: str | None = None) -> float:
        self.policy_version_id = policy_version_id
        return 0.0

    def close(self) -> None:
        """Do nothing."""


async def play(task: Task, model: Model, score: Scorer, *, turns: int, step_s: float) -> Score:
    """Answer, wait for the environment, and go on."""
    messages = [{"role": "user", "content": task.prompt}]
    for _ in range(turns):
        turn = await model.chat(messages)
        await asyncio.sleep(step_s * random.uniform(0.5, 1.5))
        messages += [{"role": "assistant", "content": turn.response}, {"role": "user", "content": "go on"}]
    return Score(float(random.random() < 0.5))


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    with kept_folder(options) as folder:
        from tests.support.models import make_tiny_model

        make_tiny_model(folder / "model", hidden_size=32, num_layers=1)
        rows: list[dict[str, Any]] = []
        with rftdata.open(str(folder / "buffer")) as buffer:
            for system in _SYSTEMS:
                rows.append({"system": system, **_explore(buffer, folder, system, options)})
                say(json.dumps(rows[-1]))
        fixed, adaptive = (row["rollouts_per_s"] for row in rows)
        write(options, {"rows": rows, "ratio": round(adaptive / fixed, 2)})
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser("slow_environments", __doc__)
    parser.add_argument("--sequences", type=integer(), default=8, help="requests that the engine answers at once")
    parser.add_argument("--answer-s", type=positive, default=0.5, help="seconds of an answer")
    parser.add_argument("--step-s", type=positive, default=2.0, help="mean seconds of a step of the environment")
    parser.add_argument("--turns", type=integer(), default=4, help="answers of a rollout")
    parser.add_argument("--groups", type=integer(), default=48, help="groups of four rollouts")
    return parser.parse_args(arguments)


def _config(folder: Path, system: str, options: argparse.Namespace) -> RunConfig:
    here = Path(__file__).resolve()
    explorer = {
        "engine": f"{here}:WaitingEngine",
        "engine_args": {"max_num_seqs": options.sequences},
        "workflow": f"{here}:play",
        "workflow_args": {"turns": options.turns, "step_s": options.step_s},
        "max_refill": 0,
        "claim_groups": max(1, 2 * options.sequences // GROUP_SIZE),
        **({"max_rollouts": 2 * options.sequences} if system == "fixed" else {}),
    }
    text = {
        "run": {"name": system, "seed": 1},
        "model": {"path": str(folder / "model")},
        "tasks": [{"name": system, "source": "none"}],
        "algorithm": {"name": "grpo", "group_size": GROUP_SIZE},
        "explorer": explorer,
        "trainer": {"batch_groups": options.groups},
        "steps": 1,
    }
    return parse_config(text, folder, "rft bench slow_environments")


def _explore(buffer: rftdata.Buffer, folder: Path, system: str, options: argparse.Namespace) -> dict[str, Any]:
    """Sample and store all groups of a run; return its speed."""
    resolved = ResolvedRun(_config(folder, system, options))
    run = buffer.create_run(name=system, config={}, seed=1, steps=1, pipeline_version="none")
    buffer.sql(
        "INSERT INTO rft.task (taskset, task_key, payload) SELECT %s, n::text, jsonb_build_object('prompt', n::text) FROM generate_series(1, %s) AS n"
        " ON CONFLICT DO NOTHING",
        [system, options.groups],
    )
    engine = WaitingEngine(resolved.model_folder, resolved.engine(0))
    engine.answer_s = options.answer_s
    with buffer.attempt(run) as attempt:
        engine.policy_version_id = attempt.publish(0, method="memory", uri="/weights/0", num_bytes=1, checksum="0")
        with Worker(run, "explorer") as worker:
            explorer = Explorer(JoinedRun(buffer, run, resolved), worker, engine)
            seconds, most = asyncio.run(_sample(explorer, buffer, options))
    num = options.groups * GROUP_SIZE
    return {
        "rollouts_per_s": round(num / seconds, 2),
        "seconds": round(seconds, 1),
        "engine": round(engine.busy_s / (seconds * options.sequences), 3),
        "most_rollouts": most,
    }


async def _sample(explorer: Explorer, buffer: rftdata.Buffer, options: argparse.Namespace) -> tuple[float, int]:
    """Explore until all groups are stored; return the seconds, and the largest number of rollouts at a time."""
    run_id, most, started = explorer.run.run_id, 0, time.monotonic()
    task = asyncio.create_task(explorer.explore())
    while not task.done():
        await asyncio.wait([task], timeout=0.1)
        most = max(most, explorer.runners.slots.num_running)
        query = "SELECT count(*) AS n FROM rft.experience WHERE run_id = %s"
        stored = await asyncio.to_thread(buffer.sql, query, [run_id])
        if stored["n"][0].as_py() >= options.groups * GROUP_SIZE:
            break
    seconds = time.monotonic() - started
    buffer.sql("UPDATE rft.run SET stop_requested = true WHERE run_id = %s", [run_id])
    await task
    return seconds, most
