"""The cost of long-running readers and writers for a run: the loop of write, verdict and draw beside each of them.

`rft bench readers [--rounds N] [--steps N] [--rows N]` runs the loop with

- baseline: no other session;
- snapshot: a transaction with a snapshot held open, idle, all the time;
- select: `SELECT *` over every experience, again and again;
- update: an UPDATE of `--rows` rewards in one statement, once; with its seconds, WAL and share of HOT updates.

Each time in a fresh buffer that already holds `--rows` experiences of another run. One step of the loop writes 64 groups of 4, decides
on them and draws them. JSON on stdout: steps a second of each quarter of the loop, milliseconds of each part, the ratio
to the baseline of the same round, and what a claim of the pipeline costs at the end, from the beginning of its queue and from the hint.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

import rftdata
from benchmarks.workload import make_samples
from rftdata import Buffer, Group, Rollout
from rftdata import Sequence as Experience
from rftdata.pipeline.queue import SealedQueue
from rftdata.pipeline.records import Verdicts, kept
from rftdata.pipeline.verdicts import commit_verdicts
from rftdata.postgres.database import queries
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

    def claim_costs(self) -> dict[str, dict[str, float]]:
        """Milliseconds and pages of claiming the groups of one more step, the server's figures; nothing is claimed."""
        with self.buffer.writer(self._run) as writer:
            writer.insert(*as_groups(self._experiences, _GROUPS, _GROUP_SIZE, first=0))
        rows = self.buffer.sql(
            "SELECT min(sort_key) AS key FROM rft.worklist WHERE available AND consumer = 'pipeline/' || %s",
            [self._run_id],
        )
        found = {}
        for name, from_key in (("from_start", 0), ("from_hint", rows["key"][0].as_py())):
            parameters = {
                "run_id": self._run_id,
                "worker_id": 0,
                "count": _GROUPS,
                "lease_s": 60,
                "from_key": from_key,
                "suspects": False,
            }
            plans = [explained(self.buffer, "claim_sealed_groups", parameters) for _ in range(5)]
            found[name] = {
                "ms": statistics.median(plan["Execution Time"] for plan in plans),
                "pages": statistics.median(
                    plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"] for plan in plans
                ),
            }
        return found

    def _decide(self) -> None:
        batch = self._queue.claim(_GROUPS)
        assert batch is not None and len(batch.group_ids) == _GROUPS, "not every group written can be decided on"
        commit_verdicts(self._run, self._worker_id, "keep all", batch, Verdicts(kept(batch.table)))


def explained(buffer: Buffer, query: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the server's plan and timing of a query, which is rolled back."""
    with buffer.database.connection() as connection, connection.transaction(force_rollback=True):
        row = connection.execute("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + queries()[query], parameters).fetchone()
        assert row is not None
        (plan,) = row["QUERY PLAN"]
        return dict(plan)


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
    """Of 8 KB on average: see `benchmarks.workload`."""
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
            # The loop's own writes meanwhile are in it; `update_alone` has none.
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


@contextmanager
def fresh_buffer(folder: Path) -> Iterator[Buffer]:
    with tempfile.TemporaryDirectory(prefix="readers-", dir=folder, ignore_cleanup_errors=True) as place:
        os.chmod(place, 0o755)  # the database may run as another user
        buffer = rftdata.open(str(Path(place) / "buffer"))
        try:
            yield buffer
        finally:
            buffer.close()
            if buffer.server:
                buffer.server.stop()


def measure_one(
    reader: str, folder: Path, made: Sequence[Experience], steps: int, rows: int, fillfactor: int | None
) -> dict[str, Any]:
    """The loop beside one reader, in a buffer of its own."""
    with fresh_buffer(folder) as buffer:
        if fillfactor is not None:
            buffer.sql(f"ALTER TABLE rft.experience SET (fillfactor = {fillfactor})")
        run_id = prepare(buffer, made, rows)
        loop = Loop(buffer, made)
        with beside(reader, buffer.database.uri, run_id) as said:
            loop.run(steps)
            claims = loop.claim_costs()
        result: dict[str, Any] = {"loop": _speeds(loop.seconds, steps), reader: said, **claims}
        if reader == "update":
            with beside(reader, buffer.database.uri, run_id) as alone:
                pass
            result["update_alone"] = alone
        return result


def _speeds(seconds: dict[str, list[float]], steps: int) -> dict[str, Any]:
    totals = [sum(parts) for parts in zip(*seconds.values(), strict=True)]
    quarter = max(1, steps // 4)
    quarters = [totals[i * quarter : (i + 1) * quarter] for i in range(4)]
    return {
        "steps_per_s": steps / sum(totals),
        "steps_per_s_by_quarter": [len(part) / sum(part) for part in quarters],
        "ms": {name: 1000 * statistics.median(values) for name, values in seconds.items()},
        "ms_last_quarter": {name: 1000 * statistics.median(values[-quarter:]) for name, values in seconds.items()},
    }


def measure(
    rounds: int, steps: int, rows: int, folder: Path, readers: Sequence[str] = READERS, fillfactor: int | None = None
) -> dict[str, Any]:
    """Every reader in every round, interleaved."""
    made = experiences()
    results: dict[str, list[dict[str, Any]]] = {reader: [] for reader in readers}
    for number in range(rounds):
        for reader in readers:
            print(f"round {number + 1} of {rounds}: {reader}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
            results[reader].append(measure_one(reader, folder, made, steps, rows, fillfactor))
    return summary(results, steps, rows)


def summary(results: dict[str, list[dict[str, Any]]], steps: int, rows: int) -> dict[str, Any]:
    """Medians over the rounds; ratios are of the same round."""

    def median(reader: str, of: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(of(one) for one in results[reader])

    def last(one: dict[str, Any]) -> float:
        return float(one["loop"]["steps_per_s_by_quarter"][-1])

    def parts(reader: str, key: str) -> dict[str, float]:
        return {
            part: statistics.median(one["loop"][key][part] for one in results[reader])
            for part in ("write", "verdict", "draw")
        }

    found: dict[str, Any] = {}
    for reader, rounds in results.items():
        found[reader] = {
            "steps_per_s": median(reader, lambda one: one["loop"]["steps_per_s"]),
            "steps_per_s_last_quarter": median(reader, last),
            "ms": parts(reader, "ms"),
            "ms_last_quarter": parts(reader, "ms_last_quarter"),
            **{
                kind: {name: statistics.median(one[kind][name] for one in rounds) for name in rounds[0][kind]}
                for kind in rounds[0]
                if kind != "loop" and rounds[0][kind]
            },
        }
    ratios = {
        reader: {
            "steps_per_s": [
                one["loop"]["steps_per_s"] / base["loop"]["steps_per_s"]
                for one, base in zip(rounds, results["baseline"], strict=True)
            ],
            "last_quarter": [last(one) / last(base) for one, base in zip(rounds, results["baseline"], strict=True)],
        }
        for reader, rounds in results.items()
        if reader != "baseline" and "baseline" in results
    }
    return {
        "load": list(os.getloadavg()),
        "workload": {"steps": steps, "groups": _GROUPS, "group_size": _GROUP_SIZE, "stored_rows": rows},
        "readers": found,
        "ratios_to_baseline": ratios,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="rft bench readers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="steps of the loop")
    parser.add_argument(
        "--rows", type=int, default=100_000, help="experiences stored before, and rewards updated; a multiple of 4"
    )
    parser.add_argument("--readers", nargs="+", choices=READERS, default=READERS)
    parser.add_argument("--fillfactor", type=int, choices=range(10, 101), metavar="PERCENT", help="of rft.experience")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    options = parser.parse_args(arguments)
    if options.rows % _GROUP_SIZE or options.rows < _GROUP_SIZE or options.rounds < 1 or options.steps < 4:
        parser.error("--rows must be a positive multiple of 4, --rounds at least 1, --steps at least 4")
    folder = options.folder or Path(tempfile.gettempdir())
    print(
        json.dumps(
            measure(options.rounds, options.steps, options.rows, folder, options.readers, options.fillfactor), indent=2
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
