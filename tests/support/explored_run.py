"""A run whose trainer is the test, and engines that answer when the test lets them: for tests of the explorer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rftdata
from rftcore.config.run import parse_config
from rftcore.engines.base import Decoding, Engine, Generation
from rftcore.explorer.role import Explorer
from rftcore.resolved import ResolvedRun
from rftcore.run.join import JoinedRun
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.evaluations import (
    plan_evaluations,
)
from rftdata.errors import EngineStoppedError, ModelError
from rftdata.workers.worker import Worker
from tests.support.models import make_character_tokenizer
from tests.support.waiting import PATIENCE_S

CONFIG: dict[str, Any] = {
    "run": {"name": "explored", "seed": 7},
    "model": {"path": "nowhere"},
    "tasks": [{"name": "train", "source": "none"}],
    "algorithm": {"name": "grpo", "group_size": 2},
    "trainer": {"batch_groups": 2},
    "steps": 4,
}


class OneAtATime(Engine):
    """Answers `2` to everything, one request after the other."""

    def __init__(self, seconds: float = 0.0, dies_at: int | None = None) -> None:
        self.tokenizer = make_character_tokenizer()
        self.policy_version_id = 0
        self.num_generated_tokens = 0
        self.loaded: list[str] = []
        self.asked = 0
        self._seconds = seconds
        self._dies_at = dies_at
        self._turn = asyncio.Lock()

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        self.asked += 1
        if self._dies_at is not None and self.asked >= self._dies_at:
            raise EngineStoppedError("the engine stopped: out of memory")
        async with self._turn:
            await asyncio.sleep(self._seconds)
        return Generation(self.tokenizer.encode("2"), [-0.5], "2", "stop", [(0, self.policy_version_id)])

    def load_weights(self, uri: str, policy_version_id: int, checksum: str | None = None) -> float:
        if not Path(uri).is_file():
            raise ModelError(f"the weights file {uri} does not exist")
        self.loaded.append(Path(uri).name)
        self.policy_version_id = policy_version_id
        return 0.0

    def close(self) -> None:
        pass


class Gated(OneAtATime):
    """Answers nothing before `is_open` is set."""

    is_open = False

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        self.asked += 1
        while not self.is_open:
            await asyncio.sleep(0.01)
        return Generation(self.tokenizer.encode("2"), [-0.5], "2", "stop", [(0, self.policy_version_id)])


class Sorted(OneAtATime):
    """Answers greedy requests and others only while they are let through."""

    answers_greedy = False
    answers_sampled = False

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        self.asked += decoding.temperature > 0
        while not (self.answers_sampled if decoding.temperature else self.answers_greedy):
            await asyncio.sleep(0.01)
        return Generation(self.tokenizer.encode("2"), [-0.5], "2", "stop", [(0, self.policy_version_id)])


class Run:
    """A run whose trainer is the test."""

    def __init__(self, buffer: rftdata.Buffer, folder: Path) -> None:
        self.buffer = buffer
        self.folder = folder
        self.run = buffer.create_run(name="explored", config={}, seed=7, steps=4, pipeline_version="p1")
        self.run_id: int = self.run.run_id
        for taskset in ("train", "validation"):
            buffer.sql(
                "INSERT INTO rft.task (taskset, task_key, payload)"
                """ SELECT %s, n::text, '{"prompt": "1+1=", "answer": "2"}' FROM generate_series(1, 8) AS n""",
                [taskset],
            )

    def publish(self, attempt: Attempt, step: int, name: str, *, exists: bool = True) -> int:
        if exists:
            (self.folder / name).write_text(name)
        return attempt.publish(step, method="memory", uri=str(self.folder / name), num_bytes=1, checksum=name)

    def ask(
        self, attempt: Attempt, version: int, name: str, *decodings: str, step: int = 0, num_answers: int = 1
    ) -> None:
        plan_evaluations(
            attempt,
            policy_version_id=version,
            trainer_step=step,
            purpose="validation",
            tasksets=["validation"],
            decodings=decodings or ["greedy"],
            uri=str(self.folder / name),
            checksum=name,
            num_answers=num_answers,
        )

    def explore(
        self,
        engine: Engine,
        until: Callable[[], bool],
        changes: dict[str, Any] | None = None,
        missing_weights_s: float = 10.0,
        **explorer: Any,
    ) -> None:
        """Run an explorer until something holds, then ask it to stop; `changes`: of other sections of the configuration."""
        section = {"reward": "exact_match", "engine_args": {"max_num_seqs": 1}, **explorer}
        config = parse_config({**CONFIG, "explorer": section, **(changes or {})}, self.folder, "test")

        async def explore() -> None:
            joined = JoinedRun(self.buffer, self.run, ResolvedRun(config))
            explorer = asyncio.create_task(
                Explorer(joined, worker, engine, missing_weights_s=missing_weights_s).explore()
            )
            deadline = time.monotonic() + PATIENCE_S
            while not until() and not explorer.done():
                assert time.monotonic() < deadline, self.evaluations()
                await asyncio.sleep(0.05)
            self.buffer.sql("UPDATE rft.run SET stop_requested = true WHERE run_id = %s", [self.run_id])
            await asyncio.wait_for(explorer, PATIENCE_S)

        with Worker(self.run, "explorer") as worker:
            asyncio.run(explore())

    def evaluations(self) -> list[dict[str, Any]]:
        return self.rows(
            "SELECT status::text AS status, mean_reward, error FROM rft.evaluation WHERE run_id = %s ORDER BY evaluation_id"
        )

    def all_answered(self) -> bool:
        return all(row["status"] == "done" for row in self.evaluations())

    def all_ended(self) -> bool:
        return all(row["status"] in ("done", "failed") for row in self.evaluations())

    def rows(self, query: str) -> list[dict[str, Any]]:
        return self.buffer.sql(query, [self.run_id]).to_pylist()


def outcomes(run: Run) -> dict[str, int]:
    rows = run.rows(
        "SELECT o.outcome::text AS outcome, count(*) AS n FROM rft.rollout o JOIN rft.rollout_group g USING (group_id)"
        " WHERE run_id = %s GROUP BY 1"
    )
    return {row["outcome"]: row["n"] for row in rows}
