"""Long-running readers and writers beside the loop of write, verdict and draw.

- baseline: no other session;
- snapshot: a transaction with a snapshot held open, idle;
- select: `SELECT *` over every experience, repeated;
- update: an UPDATE of all rewards of a run in one statement, once.

A step of the loop writes 64 groups of 4, decides on them and draws them.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg

from benchmarks.harness.workload import make_samples
from rftdata import Buffer, Group, Rollout
from rftdata import Sequence as Experience
from rftdata.pipeline.queue import SealedQueue
from rftdata.pipeline.records import Verdicts, kept
from rftdata.pipeline.verdicts import commit_verdicts
from rftdata.processes import own_process

READERS = ("baseline", "snapshot", "select", "update")
_GROUPS, _GROUP_SIZE = 64, 4
_COLUMNS = ("token_ids", "loss_mask", "behavior_logprobs")
_PREPARED = 2048


class Loop:
    """Writer, pipeline and trainer of one run, one after the other."""

    def __init__(self, buffer: Buffer, experiences: Sequence[Experience]) -> None:
        self.buffer = buffer
        self._experiences = experiences
        self._run = buffer.create_run(name="loop", config={}, seed=0, steps=10**6, pipeline_version="keep all")
        self._run_id = self._run.run_id
        worker = buffer.database.fetch(
            "insert_worker",
            run_id=self._run_id,
            role="pipeline",
            **own_process(),
        )
        self._worker_id: int = worker[0]["worker_id"]
        self._queue = SealedQueue(self._run, self._worker_id, lease_s=60)
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def run(self, steps: int) -> None:
        """That many steps; every experience written is decided on and drawn in the step that wrote it."""
        with self.buffer.writer(self._run) as writer, self.buffer.attempt(self._run) as attempt:
            for step in range(1, steps + 1):
                started = time.perf_counter()
                writer.insert(*as_groups(self._experiences, _GROUPS, _GROUP_SIZE, first=step * _GROUPS))
                written = time.perf_counter()
                self._decide()
                decided = time.perf_counter()
                batch = attempt.draw(step, _GROUPS, _COLUMNS, timeout_s=60)
                assert batch is not None and len(batch) == _GROUPS * _GROUP_SIZE, f"step {step} drew too little"
                for column in _COLUMNS:
                    batch.packed(column)
                drawn = time.perf_counter()
                for name, value in (
                    ("write", written - started),
                    ("verdict", decided - written),
                    ("draw", drawn - decided),
                ):
                    self.seconds[name].append(value)

    def _decide(self) -> None:
        batch = self._queue.claim(_GROUPS)
        assert batch is not None and len(batch.group_ids) == _GROUPS, "not every group written can be decided on"
        commit_verdicts(self._run, self._worker_id, "keep all", batch, Verdicts(kept(batch.table)))


def as_groups(experiences: Sequence[Experience], groups: int, size: int, *, first: int) -> list[Group]:
    """Groups of the prepared experiences, over and over."""
    return [
        Group(
            [
                Rollout(index, "ok", e.reward, [e])
                for index in range(size)
                for e in [experiences[((first + number) * size + index) % len(experiences)]]
            ],
            source="import",
            taskset="benchmark",
            task_key=str((first + number) % 1000),
        )
        for number in range(groups)
    ]


def experiences(num: int = _PREPARED) -> list[Experience]:
    """Of 8 KB on average: see `benchmarks.harness.workload`."""
    return [
        Experience(
            prompt=s.prompt,
            response=s.response,
            token_ids=s.token_ids,
            num_prompt_tokens=s.num_prompt_tokens,
            finish_reason="stop",
            reward=s.reward,
            behavior_logprobs=s.logprobs[s.num_prompt_tokens :],
            metrics=s.metrics,
        )
        for s in make_samples(num, seed=5)
    ]


def prepare(buffer: Buffer, made: Sequence[Experience], rows: int) -> int:
    """Store `rows` experiences of a run of their own; its id."""
    run = buffer.create_run(name="stored", config={}, seed=0, steps=1, pipeline_version="none")
    with buffer.writer(run) as writer:
        for first in range(0, rows // _GROUP_SIZE, 256):
            groups = min(256, rows // _GROUP_SIZE - first)
            writer.insert(*as_groups(made, groups, _GROUP_SIZE, first=first))
    with buffer.database.connection() as connection:
        connection.execute("VACUUM ANALYZE rft.experience")
        connection.execute("CHECKPOINT")
    return run.run_id


def _hold_snapshot(uri: str, run_id: int, ready: Any, stop: Any, answers: Any) -> None:
    with psycopg.connect(uri) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT count(*) FROM rft.run").fetchone()
        ready.set()
        stop.wait()
        answers.put({})


def _select_all(uri: str, run_id: int, ready: Any, stop: Any, answers: Any) -> None:
    rows = 0
    with psycopg.connect(uri, autocommit=True) as connection:
        ready.set()
        while not stop.is_set():
            with connection.transaction(), connection.cursor(name="everything") as cursor:
                cursor.itersize = 10_000
                for _ in cursor.execute("SELECT * FROM rft.experience"):
                    rows += 1
                    if stop.is_set():
                        break
    answers.put({"rows_read": rows})


def _update_rewards(uri: str, run_id: int, ready: Any, stop: Any, answers: Any) -> None:
    with psycopg.connect(uri, autocommit=True) as connection:

        def counted() -> tuple[int, int, int]:
            row = connection.execute(
                "SELECT n_tup_upd, n_tup_hot_upd, pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint"
                " FROM pg_stat_user_tables WHERE schemaname = 'rft' AND relname = 'experience'"
            ).fetchone()
            assert row is not None
            return row

        before = counted()
        ready.set()
        started = time.perf_counter()
        updated = connection.execute(
            "UPDATE rft.experience SET reward = 1 - reward WHERE run_id = %s", [run_id]
        ).rowcount
        seconds = time.perf_counter() - started
        after = counted()
        # Statistics of a session come with a delay.
        while after[0] - before[0] < updated:
            connection.execute("SELECT pg_stat_force_next_flush()")
            after = (*counted()[:2], after[2])
    answers.put(
        {
            "rows": updated,
            "seconds": seconds,
            "rows_per_s": updated / seconds,
            "hot_share": (after[1] - before[1]) / (after[0] - before[0]),
            # Includes what the loop wrote meanwhile.
            "wal_bytes": after[2] - before[2],
            "wal_bytes_per_row": (after[2] - before[2]) / updated,
        }
    )


_TARGETS: dict[str, Callable[..., None]] = {
    "snapshot": _hold_snapshot,
    "select": _select_all,
    "update": _update_rewards,
}


@contextmanager
def beside(reader: str, uri: str, run_id: int) -> Iterator[dict[str, Any]]:
    """Run a reader in a separate process during the block; its own figures are in the yielded dictionary afterwards."""
    said: dict[str, Any] = {}
    if reader == "baseline":
        yield said
        return
    context = multiprocessing.get_context("spawn")
    ready, stop, answers = context.Event(), context.Event(), context.Queue()
    process = context.Process(target=_TARGETS[reader], args=(uri, run_id, ready, stop, answers), daemon=True)
    process.start()
    try:
        while not ready.wait(0.1):
            assert process.is_alive(), f"the process of {reader} ended early"
        yield said
        stop.set()
        said |= answers.get(timeout=600)
        process.join(30)
    finally:
        process.kill()
