"""Processes of `rft bench soak`. Each opens the buffer and reports its actions as events: kind, time, number, seconds."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable
from typing import Any

import rftdata
from benchmarks.harness.workload import GROUP_SIZE, make_samples
from benchmarks.peers.rftdata_buffer import COLUMNS, as_groups
from rftdata import Buffer
from rftdata.config import BufferConfig, RetentionConfig
from rftdata.maintenance import retention
from rftdata.pipeline.queue import claim_sealed_groups
from rftdata.pipeline.records import Verdicts, kept
from rftdata.pipeline.verdicts import commit_verdicts
from rftdata.processes import own_process
from rftdata.run import NO_PIPELINE

RUNS = ("left", "right")
BATCH = 64
_CHECKPOINT_EVERY = 20
_RELABELS = 4


def open_buffer(folder: str) -> Buffer:
    """Open the buffer of the soak."""
    return rftdata.open(BufferConfig(uri=f"{folder}/buffer", min_free_bytes=2**30))


def produce(folder: str, run: str, number: int, rate: float, seed: int, go: Any, stop: Any, events: Any) -> None:
    """Write batches at `rate` experiences a second until stopped."""
    with open_buffer(folder) as buffer, buffer.writer(run) as writer:
        events.put(("ready", time.monotonic(), 1, 0.0))
        go.wait()
        due, key = time.monotonic(), number * 10**7
        while not stop.wait(max(0.0, due - time.monotonic())):
            groups = as_groups(make_samples(BATCH, seed=seed + key, first_key=key))
            started = time.monotonic()
            writer.insert(*groups)
            events.put(("written", time.monotonic(), BATCH, time.monotonic() - started))
            key += BATCH
            # Writes that are late by more than a second are not caught up.
            due = max(due + BATCH / rate, time.monotonic() - 1.0)


def consume(folder: str, run: str, stop: Any, events: Any) -> None:
    """Draw batch after batch until stopped."""
    with open_buffer(folder) as buffer, buffer.attempt(run) as attempt:
        events.put(("ready", time.monotonic(), 1, 0.0))
        step = 1
        while (batch := attempt.draw(step, BATCH // GROUP_SIZE, COLUMNS, stop=stop.is_set)) is not None:
            for column in COLUMNS:
                batch.packed(column)
            events.put(("drawn", time.monotonic(), len(batch), 0.0))
            if step % _CHECKPOINT_EVERY == 0:
                attempt.commit_checkpoint(step, f"checkpoint-{step}")
            step += 1


def review(folder: str, seed: int, stop: Any, events: Any) -> None:
    """Correct some of the newest rewards every second, and decide again on groups that have not been drawn."""
    chance = random.Random(seed)
    with open_buffer(folder) as buffer:
        runs = [buffer.find_run(run) for run in RUNS]
        workers = {
            run.run_id: buffer.database.fetch("insert_worker", run_id=run.run_id, role="pipeline", **own_process())[0][
                "worker_id"
            ]
            for run in runs
        }
        events.put(("ready", time.monotonic(), 1, 0.0))
        due = time.monotonic()
        while not stop.wait(0.05):
            if time.monotonic() >= due:
                newest = buffer.sql("SELECT coalesce(max(experience_id), 0) AS id FROM rft.experience")["id"][0].as_py()
                ids = [max(1, newest - chance.randrange(500)) for _ in range(_RELABELS)]
                buffer.sql("UPDATE rft.experience SET reward = 1 - reward WHERE experience_id = ANY (%s)", [ids])
                events.put(("relabelled", time.monotonic(), len(set(ids)), 0.0))
                due += 1.0
            for run in runs:
                batch = claim_sealed_groups(run, workers[run.run_id], count=100, lease_s=60)
                if batch is not None:
                    verdicts = Verdicts(kept(batch.table))
                    commit_verdicts(run, workers[run.run_id], NO_PIPELINE, batch, verdicts)


def retain(folder: str, keep: int, every_s: float, stop: Any, events: Any) -> None:
    """Apply retention every `every_s` seconds, to labelled experiences too."""
    with open_buffer(folder) as buffer:
        events.put(("ready", time.monotonic(), 1, 0.0))
        while not stop.wait(every_s):
            started = time.monotonic()
            done, _ = retention.enforce(
                buffer, RetentionConfig(max_experiences=keep, keep_labelled=False), author="soak"
            )
            events.put(("purged", time.monotonic(), done.num_experiences, time.monotonic() - started))


def guarded(duty: Callable[..., None], *arguments: Any) -> None:
    """Run a duty; report an error, which ends the soak."""
    try:
        duty(*arguments)
    except Exception as error:  # noqa: BLE001 - any error is a result
        traceback.print_exc()
        arguments[-1].put(("error", time.monotonic(), 0, f"{duty.__name__}: {type(error).__name__}: {error}"))
