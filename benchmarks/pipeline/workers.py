"""How fast pipeline workers are, from the queue of sealed groups to committed verdicts, and what further workers add.

Groups of 8 of the buffer benchmark's workload are written to a database. Processes share the queue; each claims, reads, decides and commits like
`rft process`. Factors compare with the first number of workers.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rftdata
from benchmarks.harness.arguments import argument_parser, integer, integers
from benchmarks.harness.report import write
from benchmarks.harness.workload import make_samples
from benchmarks.peers.rftdata_buffer import as_groups
from rftdata.config import BufferConfig
from rftdata.postgres.embedded import EmbeddedServer
from rftdata.processes import own_process

STAGES: list[dict[str, Any]] = [
    {"drop_truncated": {}},
    {"reward_threshold": {"min": -1}},
    {"sql": "SELECT * REPLACE (reward - 0.1 * (num_response_tokens > 512)::INT AS reward) FROM batch"},
    {"drop_zero_variance_groups": {}},
]
_NARROW = [stage for stage in STAGES if "sql" not in stage]
BATCH_GROUPS = 64


def measure(num_experiences: int = 8192, workers: Sequence[int] = (1, 2)) -> dict[str, Any]:
    """Return the experiences decided a second by each number of workers, with columnar stages alone and with SQL over all columns."""
    results: dict[str, Any] = {"num_experiences": num_experiences}
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as folder:
        server = EmbeddedServer(Path(folder) / "buffer")
        with rftdata.open(BufferConfig(uri=str(server.folder), min_free_bytes=0)) as buffer:
            for name, stages in (("columnar", _NARROW), ("with_sql", STAGES)):
                rates = {n: _round(buffer, f"{name} {n}", stages, n, num_experiences) for n in workers}
                for n, rate in rates.items():
                    results[f"{name}_{n}_workers_rows_per_s"] = round(rate, 1)
                    results[f"{name}_{n}_workers_factor"] = round(rate / rates[workers[0]], 2)
        server.stop()
    return results


def _round(buffer: rftdata.Buffer, name: str, stages: list[dict[str, Any]], workers: int, num: int) -> float:
    run = buffer.create_run(name=name, config={}, seed=1, steps=1, pipeline_version="benchmark")
    samples = make_samples(num, seed=1)
    with buffer.writer(run) as writer:
        for start in range(0, num, 1024):
            writer.insert(*as_groups(samples[start : start + 1024]))
    context = multiprocessing.get_context("spawn")
    barrier, seconds = context.Barrier(workers), context.Queue()
    config = (buffer.config.uri, buffer.config.segments)
    processes = [
        context.Process(target=_work, args=(config, run.run_id, stages, barrier, seconds)) for _ in range(workers)
    ]
    for process in processes:
        process.start()
    spans = [seconds.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    decided = buffer.sql(
        "SELECT count(*) AS n FROM rft.verdict JOIN rft.experience USING (experience_id) WHERE run_id = %s",
        [run.run_id],
    )["n"][0].as_py()
    if decided != num:
        raise RuntimeError(f"{decided} of {num} experiences were decided")
    seconds_of_all: float = max(end for _, end in spans) - min(start for start, _ in spans)
    return num / seconds_of_all


def _work(
    config: tuple[str, str | None], run_id: int, stages: list[dict[str, Any]], barrier: Any, seconds: Any
) -> None:
    """Decide on groups until the queue is empty."""
    from operators.chain.build import build_chain
    from rftcore.pipeline.group_decisions import decide_groups
    from rftdata.pipeline.queue import SealedQueue
    from rftdata.pipeline.scores import EXPERIENCE_SCORES
    from rftdata.pipeline.verdicts import commit_verdicts

    chain = build_chain(stages, min_group_size=2)
    chain.prepare()
    with rftdata.open(BufferConfig(uri=config[0], segments=config[1], min_free_bytes=0), create=False) as buffer:
        database = buffer.database
        worker = database.fetch("insert_worker", run_id=run_id, role="pipeline", **own_process())[0]["worker_id"]
        run = buffer.find_run(run_id)
        queue = SealedQueue(run, worker, lease_s=60.0, columns=chain.columns)
        barrier.wait()
        started = time.time()
        while (batch := queue.claim(BATCH_GROUPS)) is not None:
            stored_scores = EXPERIENCE_SCORES.read(database, chain.score_keys, batch.table["experience_id"].to_pylist())
            decided = decide_groups(chain, batch, stored_scores)
            commit_verdicts(run, worker, "benchmark", batch, decided)
        seconds.put((started, time.time()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser("pipeline_workers", __doc__)
    parser.add_argument("--workers", type=integers(), default=(1, 2), help="numbers of workers")
    parser.add_argument("--experiences", type=integer(8), default=8192, help="in the queue, for each number")
    options = parser.parse_args(arguments)
    write(options, measure(options.experiences, options.workers))
    return 0
