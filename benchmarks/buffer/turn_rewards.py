"""Buffers of rollouts of several turns with a reward for each turn: what a person waits for, and whether it grows faster than the buffer.

For each number of experiences a buffer of its own is written through the writer, decided by a chain, drawn from, reported, relabelled by SQL, exported,
purged, verified, archived and restored. Each rollout is one experience, and each turn has a row of `rft.turn_reward`.

    seconds   of each operation, by number of experiences
    growth    seconds with the most experiences per seconds with the fewest, divided by the ratio of their numbers: above 1 it grows faster

`draw` and `draw_corrected` (after the labels) are medians of ten batches of 64 groups, `status` and `report` those of three commands. The others are done
once, on all experiences, except that one turn in `--turns` is relabelled and one group in a hundred is purged.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import rftdata
from benchmarks.harness.arguments import argument_parser, integer, integers, scratch_folder
from benchmarks.harness.report import say, write
from benchmarks.harness.rft import command, environment
from operators.chain.build import build_chain
from rftcore.pipeline.group_decisions import decide_groups
from rftdata import Buffer, Group, Rollout, exchange, labels
from rftdata import Sequence as Experience
from rftdata.attempts.attempt import Attempt
from rftdata.config import BufferConfig
from rftdata.experience import STEP_REWARD, TURNS
from rftdata.maintenance.archive import archive
from rftdata.maintenance.purge import purge
from rftdata.maintenance.restore_run import restore_run
from rftdata.pipeline.queue import SealedQueue
from rftdata.pipeline.scores import EXPERIENCE_SCORES
from rftdata.pipeline.verdicts import commit_verdicts
from rftdata.processes import own_process
from rftdata.run import Run

GROUP_SIZE, NUM_DRAWS, BATCH_GROUPS = 8, 10, 64
_GROUPS_AT_ONCE = 64
_TOKENS = 16
_STAGES: list[dict[str, Any]] = [{"drop_truncated": {}}, {"reward_threshold": {"min": -1}}]


def rollout(index: int, num_turns: int, numbers: np.random.Generator) -> Rollout:
    """Make a rollout of turns of 16 tokens, with observations of as many between them."""
    bounds = [(_TOKENS * (2 * turn + 1), _TOKENS * (2 * turn + 2), turn) for turn in range(num_turns)]
    sampled = np.zeros(bounds[-1][1], np.bool_)
    for start, end, _ in bounds:
        sampled[start:end] = True
    reward = float(index % 2)
    return Rollout(
        index,
        "ok",
        reward,
        [
            Experience(
                prompt="a question of about ten words that every rollout of the group answers",
                response="an answer, and what the environment says to it. " * num_turns,
                token_ids=numbers.integers(0, 50_000, len(sampled), np.int32),
                num_prompt_tokens=_TOKENS,
                finish_reason="stop",
                reward=reward,
                behavior_logprobs=np.where(sampled, np.float32(-0.5), np.float32(np.nan))[_TOKENS:],
                loss_mask=sampled[_TOKENS:],
                arrays={
                    TURNS: np.array(bounds, np.int32),
                    STEP_REWARD: numbers.integers(0, 2, num_turns).astype(np.float32),
                },
            )
        ],
        seconds=1.0,
    )


class Operations:
    """The operations on one buffer, each timed.

    Args:
        num: experiences.
    """

    def __init__(self, buffer: Buffer, folder: Path, num: int, num_turns: int) -> None:
        self._buffer, self._folder, self._num, self._num_turns = buffer, folder, num, num_turns
        self.seconds: dict[str, float] = {}

    def run(self) -> None:
        """Do all of them, in the order in which a run has them."""
        run = self._buffer.create_run(name="turns", config={}, seed=1, steps=10**6, pipeline_version="benchmark")
        self._timed("write", partial(self._write, run))
        self._timed("chain", partial(self._decide, run))
        with self._buffer.attempt(run) as attempt:
            self.seconds["draw"] = self._draw(attempt, 0)
            self._timed("relabel", self._relabel)
            self._timed("chain_again", partial(self._decide, run))
            self.seconds["draw_corrected"] = self._draw(attempt, NUM_DRAWS)
        for name in ("status", "report"):
            self.seconds[name] = statistics.median(self._rft(name, "turns") for _ in range(3))
        (batch,) = self._buffer.sql("SELECT max(label_batch_id) AS batch FROM rft.label_batch")["batch"].to_pylist()
        self._timed("undo", partial(labels.undo, self._buffer, batch, author="benchmark"))
        self._timed("export", partial(exchange.export, self._buffer, self._folder / "all.parquet"))
        self._timed("purge", partial(purge, self._buffer, "group_id % 100 = 0", reason="benchmark", author="benchmark"))
        self.seconds["doctor"] = self._rft("doctor")
        run.end("finished", "done")
        self._buffer.sql("UPDATE rft.worker SET stopped_at = clock_timestamp()")
        self._timed("archive", partial(archive, self._buffer, "turns", author="benchmark"))
        self._timed("restore", partial(restore_run, self._buffer, "turns"))

    def _timed(self, name: str, work: Callable[[], object]) -> None:
        started = time.perf_counter()
        work()
        self.seconds[name] = time.perf_counter() - started
        say(f"{self._num:9,} {name:14} {self.seconds[name]:8.2f} s")

    def _rft(self, *arguments: str) -> float:
        started = time.perf_counter()
        subprocess.run(
            command(*arguments, "--buffer", str(self._buffer.folder)),
            env=environment(),
            check=True,
            capture_output=True,
        )
        seconds = time.perf_counter() - started
        say(f"{self._num:9,} rft {arguments[0]:10} {seconds:8.2f} s")
        return seconds

    def _write(self, run: Run) -> None:
        numbers = np.random.default_rng(1)
        with self._buffer.writer(run) as writer:
            for first in range(0, self._num // GROUP_SIZE, _GROUPS_AT_ONCE):
                keys = range(first, min(first + _GROUPS_AT_ONCE, self._num // GROUP_SIZE))
                writer.insert(*(self._group(key, numbers) for key in keys))

    def _group(self, key: int, numbers: np.random.Generator) -> Group:
        rollouts = [rollout(index, self._num_turns, numbers) for index in range(GROUP_SIZE)]
        return Group(rollouts, source="import", taskset="benchmark", task_key=str(key % 5000), payload={"prompt": "?"})

    def _decide(self, run: Run) -> None:
        chain = build_chain(_STAGES, min_group_size=2)
        chain.prepare()
        database = self._buffer.database
        worker = database.fetch("insert_worker", run_id=run.run_id, role="pipeline", **own_process())[0]["worker_id"]
        queue = SealedQueue(run, worker, lease_s=60.0, columns=chain.columns)
        while (batch := queue.claim(BATCH_GROUPS)) is not None:
            scores = EXPERIENCE_SCORES.read(database, chain.score_keys, batch.table["experience_id"].to_pylist())
            commit_verdicts(run, worker, "benchmark", batch, decide_groups(chain, batch, scores))

    def _draw(self, attempt: Attempt, after: int) -> float:
        seconds = []
        for step in range(after + 1, after + NUM_DRAWS + 1):
            started = time.perf_counter()
            batch = attempt.draw(step, BATCH_GROUPS, ("token_ids", STEP_REWARD), timeout_s=60)
            assert batch is not None and batch.arrays(STEP_REWARD)
            seconds.append(time.perf_counter() - started)
            attempt.record_step(step, batch, wait_seconds=0, train_seconds=1, publish_seconds=0, metrics={"loss": 1.0})
        say(f"{self._num:9,} draw of {BATCH_GROUPS} groups {statistics.median(seconds):6.3f} s")
        return statistics.median(seconds)

    def _relabel(self) -> None:
        self._buffer.sql("UPDATE rft.turn_reward SET reward = 1 - reward WHERE turn = 1")


def measure(folder: Path, sizes: Sequence[int], num_turns: int) -> dict[str, Any]:
    """Return the seconds of each operation by number of experiences, and their growth."""
    seconds: dict[int, dict[str, float]] = {}
    for num in sizes:
        of_size = folder / str(num)
        of_size.mkdir()
        os.chmod(of_size, 0o755)  # the database may run as another user
        with rftdata.open(BufferConfig(uri=f"{of_size}/buffer", min_free_bytes=2**30)) as buffer:
            operations = Operations(buffer, of_size, num, num_turns)
            operations.run()
        seconds[num] = operations.seconds
    few, many = min(sizes), max(sizes)
    growth = {name: seconds[many][name] / seconds[few][name] / (many / few) for name in seconds[many]}
    return {
        "seconds": {
            name: {str(num): round(seconds[num][name], 3) for num in sizes} | {"growth": round(growth[name], 2)}
            for name in growth
        }
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser("turn_rewards", __doc__)
    parser.add_argument(
        "--experiences",
        type=integers(2 * NUM_DRAWS * BATCH_GROUPS * GROUP_SIZE),
        default=(50_000, 400_000),
        help="in each buffer",
    )
    parser.add_argument("--turns", type=integer(2), default=4, help="of each experience")
    options = parser.parse_args(arguments)
    with scratch_folder(options) as folder:
        write(options, measure(folder, options.experiences, options.turns))
    return 0
