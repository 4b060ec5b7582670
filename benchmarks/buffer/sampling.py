"""What a draw costs by sampling policy and size of the buffer.

For every size of `--rows`, a buffer is filled with so many experiences in groups of 8, with real rows and every index (arrays and short texts
are shared: 10 million take about 8 GB). For every policy it draws batches of 256 experiences: the call of `attempt.draw` (claim, draw, rows,
durable commit), then decoding three arrays into padded buffers, then new priorities for the groups of the batch. Milliseconds: least, p50 and
p99; `commit` is the smallest durable transaction of this machine at the same time. `pages_per_draw` and `log_bytes_per_draw` are the database's
own counts for a draw, which do not depend on other work of the machine.

With `--group-size 1` every experience is an item of its own: 256 claims a draw, and as many items as rows.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import rftdata
from benchmarks.harness.arguments import argument_parser, integer, integers, names, scratch_folder
from benchmarks.harness.report import say, write
from benchmarks.harness.workload import make_samples
from benchmarks.peers.rftdata_buffer import as_groups
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.sampling import SamplingConfig

_BATCH = 256
_COLUMNS = ("token_ids", "loss_mask", "behavior_logprobs")
_TASKSETS = [f"set{i}" for i in range(4)]
_WARM_UP = 12
_EXPLAINED = 9

POLICIES: dict[str, dict[str, Any]] = {
    "fifo": {},
    "newest": {"order": "newest"},
    "uniform": {"order": "uniform"},
    "prioritized": {"order": "prioritized"},
    "rank": {"order": "rank"},
    "prioritized_formula": {
        "order": "prioritized",
        "max_times_sampled": 0,
        "priority": {"formula": "priority / (1 + times_sampled)"},
    },
    "uniform_reuse": {"order": "uniform", "max_times_sampled": 0, "cooldown_steps": 3},
    "mixture": {"mixture": [{"source": "import", "ratio": 3, "order": "uniform"}, {"source": "human", "ratio": 1}]},
    "stratified": {"stratify": "taskset"},
    "rate_limited": {"max_times_sampled": 0, "order": "uniform", "samples_per_insert": {"ratio": 8}},
}


def queries() -> dict[str, str]:
    """Return the statements of the file beside this one, by name."""
    blocks = re.split(r"^-- name: ", Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: body for name, _, body in (block.partition("\n") for block in blocks[1:])}


class Bench:
    """A buffer with one run of each size."""

    def __init__(self, folder: Path, group_size: int) -> None:
        self.buffer = rftdata.open(str(folder / "buffer"))
        self.group_size = group_size
        self._queries = queries()
        self._next_group = 1_000_000
        self._execute("tasks")
        samples = self.buffer.create_run(name="samples", config={}, seed=0, steps=1, pipeline_version="none")
        self._samples_run_id = samples.run_id
        with self.buffer.writer(samples) as writer:
            writer.insert(*as_groups(make_samples(_BATCH, seed=0)))

    def fill(self, rows: int) -> int:
        """Create a run with so many experiences; return its id. Nothing is flushed until the end."""
        run = self.buffer.create_run(
            name=f"rows{rows}", config={}, seed=7, steps=10**6, pipeline_version="none", mode="train"
        )
        num = rows // self.group_size
        values = {
            "run_id": run.run_id,
            "first": self._next_group,
            "num": num,
            "group_size": self.group_size,
            "samples_run_id": self._samples_run_id,
        }
        self._next_group += num
        self._set_fsync("off")
        for name in ("groups", "prompts", "rollouts", "experiences", "worklist"):
            started = time.perf_counter()
            self._execute(name, **values)
            say(f"{rows:,} experiences: {name} filled in {time.perf_counter() - started:.0f} s")
        for statement in (
            "VACUUM (ANALYZE) rft.rollout_group, rft.rollout, rft.experience, rft.worklist",
            "CHECKPOINT",
        ):
            self._execute_text(statement)
        self._set_fsync("on")
        return run.run_id

    def measure(self, run_id: int, policy: dict[str, Any], num_draws: int) -> dict[str, Any]:
        """Measure milliseconds of draws, decoding, priorities and a bare commit, alternately."""
        sampling = SamplingConfig.model_validate({"max_staleness": 10**6, **policy})
        started = time.perf_counter()
        attempt = self.buffer.attempt(run_id, sampling=sampling, tasksets=_TASKSETS)
        start_seconds = time.perf_counter() - started
        self._execute_text("VACUUM (ANALYZE) rft.worklist")
        self._execute_text("CHECKPOINT")
        times: dict[str, list[float]] = {"draw": [], "decode": [], "set_priorities": [], "commit": []}
        with attempt:
            for step in range(1, _WARM_UP + 1):
                self._draw(attempt, step, {name: [] for name in times})
            work = [self._work(attempt, step) for step in range(_WARM_UP + 1, _WARM_UP + _EXPLAINED + 1)]
            for step in range(_WARM_UP + _EXPLAINED + 1, _WARM_UP + _EXPLAINED + num_draws + 1):
                if not self._draw(attempt, step, times):
                    break  # a small buffer is used up
        ratio = statistics.median(times["draw"]) / statistics.median(times["commit"]) if times["draw"] else None
        return {
            "num_draws": len(times["draw"]),
            "draw_of_commit": ratio,
            "seconds_to_apply_the_policy": round(start_seconds, 2),
            **{f"{name}_ms": _percentiles(values) for name, values in times.items() if values},
            **{f"{name}_per_draw": statistics.median(one[name] for one in work) for name in work[0]},
            "load": os.getloadavg()[0],
        }

    def _draw(self, attempt: Attempt, step: int, times: dict[str, list[float]]) -> bool:
        """Draw and decode like a trainer; return False if there was no full batch."""
        with _timed(times["draw"]):
            batch = attempt.draw(step, _BATCH // self.group_size, _COLUMNS, timeout_s=0)
        if batch is None or len(batch) < _BATCH:
            times["draw"].pop()
            return False
        with _timed(times["decode"]):
            for column in _COLUMNS:
                batch.padded(column)
        priorities = {group: 0.01 + group % 97 / 97 for group in batch.rows["group_id"].to_pylist()}
        with _timed(times["set_priorities"]):
            attempt.set_priorities(priorities)
        with _timed(times["commit"]):
            self._execute("touch", run_id=attempt.run.run_id)
        return True

    def _work(self, attempt: Attempt, step: int) -> dict[str, float]:
        """Return the pages that the database reads and the log that it writes for a draw."""
        values = {
            "run_id": attempt.run.run_id,
            "attempt_id": attempt.attempt_id,
            "step": step,
            "num_groups": _BATCH // self.group_size,
        }
        with self.buffer.database.connection() as connection:
            (row,) = connection.execute(self._queries["explained_draw"], values).fetchall()
        plan = row["QUERY PLAN"][0]["Plan"]
        return {"pages": plan["Shared Hit Blocks"] + plan["Shared Read Blocks"], "log_bytes": plan["WAL Bytes"]}

    def sizes(self, run_id: int) -> dict[str, Any]:
        rows: list[dict[str, Any]] = self.buffer.sql(self._queries["sizes"], {"run_id": run_id}).to_pylist()
        return rows[0]

    def close(self) -> None:
        self.buffer.close()
        if self.buffer.server:
            self.buffer.server.stop()

    def _execute(self, name: str, **values: Any) -> None:
        with self.buffer.database.connection() as connection:
            connection.execute(self._queries[name], values or None)

    def _execute_text(self, statement: str) -> None:
        with self.buffer.database.connection() as connection:
            connection.execute(statement)

    def _set_fsync(self, value: str) -> None:
        self._execute_text(f"ALTER SYSTEM SET fsync = {value}")
        self._execute_text("SELECT pg_reload_conf()")


@contextmanager
def _timed(times: list[float]) -> Iterator[None]:
    """Append the milliseconds of the block."""
    started = time.perf_counter()
    yield
    times.append(1000 * (time.perf_counter() - started))


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99])
    return {"min": round(min(values), 3), "p50": round(float(p50), 3), "p99": round(float(p99), 3)}


def measure(
    sizes: Sequence[int], policies: Sequence[str], num_draws: int, group_size: int, folder: Path
) -> dict[str, Any]:
    """Measure every policy at every size."""
    results: dict[str, Any] = {}
    bench = Bench(folder, group_size)
    try:
        for rows in sizes:
            run_id = bench.fill(rows)
            found = results[str(rows)] = {"sizes": bench.sizes(run_id), "policies": {}}
            for name in policies:
                found["policies"][name] = bench.measure(run_id, POLICIES[name], num_draws)
                say(f"{rows:,} experiences, {name}: {json.dumps(found['policies'][name])}")
    finally:
        bench.close()
    return {"group_size": group_size, "batch": _BATCH, "rows": results}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser("sampling", __doc__)
    parser.add_argument("--rows", type=integers(4 * _BATCH), default=(10_000, 1_000_000), help="experiences, by size")
    parser.add_argument("--policies", type=names(*POLICIES), default=[*POLICIES], help=f"some of {', '.join(POLICIES)}")
    parser.add_argument("--draws", type=integer(), default=300, help="draws measured for each policy")
    parser.add_argument("--group-size", type=integer(), default=8, help="experiences of a group; must divide 256")
    options = parser.parse_args(arguments)
    if _BATCH % options.group_size:
        parser.error(f"argument --group-size: {options.group_size} does not divide {_BATCH}")
    with scratch_folder(options) as folder:
        write(options, measure(options.rows, options.policies, options.draws, options.group_size, folder))
    return 0
