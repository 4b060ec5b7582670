"""What a durable write, a draw and the way between them cost, beside the bare layout and the limits of this machine.

`rft bench buffer [--rounds N] [--samples N]` runs all measurements once a round, interleaved, so that a noisy machine is noisy for
all; medians, least and greatest of the rounds, and the ratios of each round. JSON on stdout.

- write: one producer, batches of 256 and of 64 experiences, durable on return.
- end to end: one producer writes batches of 256, one consumer in a process of its own draws 256 at a time and packs three arrays;
  every experience arrives once (counted).
- latency: from the return of a write to the arrays in the consumer's hands, writes paced.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import rftdata
from benchmarks.bare_layout import BareLayout
from benchmarks.workload import GROUP_SIZE, Sample, make_samples
from rftdata import Buffer, Group, Rollout
from rftdata import Sequence as Experience
from rftdata.errors import RftError

_BATCH = 256
_COLUMNS = ("token_ids", "loss_mask", "behavior_logprobs")
_PACED_WRITES = 40


def as_groups(samples: Sequence[Sample]) -> list[Group]:
    """The samples as the buffer takes them."""
    groups = []
    for start in range(0, len(samples), GROUP_SIZE):
        rollouts = [
            Rollout(
                index,
                "ok",
                s.reward,
                [
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
                ],
            )
            for index, s in enumerate(samples[start : start + GROUP_SIZE])
        ]
        groups.append(Group(rollouts, source="import", taskset="benchmark", task_key=str(samples[start].group)))
    return groups


class Bench:
    """Both stores on one embedded PostgreSQL in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.buffer: Buffer = rftdata.open(str(folder / "buffer"))
        self.bare = BareLayout(self.buffer.database.uri, folder / "bare")
        self.bare.create()
        self._runs = 0
        self._keys = 0

    def samples(self, num: int) -> list[Sample]:
        """Samples that were not used before."""
        made = make_samples(num, seed=self._keys, first_key=self._keys)
        self._keys += num
        return made

    def new_run(self) -> str:
        """A run without stages: what is written can be drawn."""
        self._runs += 1
        row = self.buffer.create_run(name=f"run{self._runs}", config={}, seed=0, steps=10**6, pipeline_version="none")
        return str(row["name"])

    def write(self, samples: list[Sample], batch: int) -> float:
        """Experiences a second."""
        batches = [as_groups(samples[i : i + batch]) for i in range(0, len(samples), batch)]
        with self.buffer.writer(self.new_run()) as writer:
            return len(samples) / _seconds(lambda: [writer.insert(*groups) for groups in batches])

    def write_bare(self, samples: list[Sample], batch: int) -> float:
        batches = [samples[i : i + batch] for i in range(0, len(samples), batch)]
        return len(samples) / _seconds(lambda: [self.bare.write(one) for one in batches])

    def end_to_end(self, samples: list[Sample]) -> float:
        """Experiences a second from the first write to the last array packed."""
        run = self.new_run()
        batches = [as_groups(samples[i : i + _BATCH]) for i in range(0, len(samples), _BATCH)]
        with (
            _consumer(_consume, str(self.folder / "buffer"), run, len(samples)) as answers,
            self.buffer.writer(run) as writer,
        ):
            started = time.monotonic()
            for groups in batches:
                writer.insert(*groups)
            return len(samples) / (answers.get()["at"] - started)

    def end_to_end_bare(self, samples: list[Sample]) -> float:
        self.bare.create()
        with _consumer(_consume_bare, self.buffer.database.uri, self.folder / "bare", len(samples)) as answers:
            started = time.monotonic()
            for i in range(0, len(samples), _BATCH):
                self.bare.write(samples[i : i + _BATCH])
            return len(samples) / (answers.get()["at"] - started)

    def latency_ms(self, samples: list[Sample]) -> list[float]:
        """From the return of each paced write to its arrays packed."""
        run = self.new_run()
        batches = [as_groups(samples[i : i + _BATCH]) for i in range(0, len(samples), _BATCH)]
        with (
            _consumer(_consume, str(self.folder / "buffer"), run, len(samples)) as answers,
            self.buffer.writer(run) as writer,
        ):
            written = [_paced(lambda groups=groups: writer.insert(*groups)) for groups in batches]
            return _differences(written, answers.get()["times"])

    def latency_ms_bare(self, samples: list[Sample]) -> list[float]:
        self.bare.create()
        with _consumer(_consume_bare, self.buffer.database.uri, self.folder / "bare", len(samples)) as answers:
            written = [
                _paced(lambda i=i: self.bare.write(samples[i : i + _BATCH])) for i in range(0, len(samples), _BATCH)
            ]
            return _differences(written, answers.get()["times"])

    def close(self) -> None:
        self.bare.close()
        self.buffer.close()
        if self.buffer.server:
            self.buffer.server.stop()


def _paced(write: Callable[[], object]) -> float:
    time.sleep(0.05)
    write()
    return time.monotonic()


def _differences(written: list[float], read: list[float]) -> list[float]:
    return [1000 * (after - before) for before, after in zip(written, read, strict=True)]


def _consume(uri: str, run: str, num: int, ready: Any, answers: Any) -> None:
    with rftdata.open(uri) as buffer, buffer.attempt(run) as attempt:
        attempt.draw(1, 1, timeout_s=0)  # connections are made before the clock runs
        _import_lazily()
        ready.set()
        seen, times, step = 0, [], 1
        while seen < num:
            batch = attempt.draw(step, _BATCH // GROUP_SIZE, _COLUMNS)
            assert batch is not None and len(batch) == _BATCH, "a batch is short"
            for column in _COLUMNS:
                batch.packed(column)
            seen, step = seen + len(batch), step + 1
            times.append(time.monotonic())
        (row,) = buffer.sql("SELECT count(*) AS all, count(DISTINCT experience_id) AS once FROM rft.draw JOIN rft.run_attempt"
                            " USING (attempt_id) WHERE run_id = %s", [attempt.run_id]).to_pylist()  # fmt: skip
        assert row["all"] == row["once"] == num, f"{row} of {num}"
        answers.put({"at": times[-1], "times": times})


def _import_lazily() -> None:
    """What pyarrow imports (pandas) when it first makes a table: a second that is no part of a draw."""
    pa.Table.from_pylist([{"x": 1}])


def _consume_bare(uri: str, folder: Path, num: int, ready: Any, answers: Any) -> None:
    bare = BareLayout(uri, folder)
    listener = bare.listen()
    _import_lazily()
    ready.set()
    seen: set[int] = set()
    times: list[float] = []
    while len(seen) < num:
        rows = bare.claim(_BATCH)
        if not rows:
            for _ in listener.notifies(timeout=0.25, stop_after=1):
                pass
            continue
        bare.read(rows)
        seen |= {row[0] for row in rows}
        times.append(time.monotonic())
    answers.put({"at": times[-1], "times": times})


class _Answers:
    """What a consumer process sends back."""

    def __init__(self, process: Any, queue: Any) -> None:
        self._process, self._queue = process, queue

    def get(self) -> dict[str, Any]:
        """Its answer.

        Raises:
            RftError: it ended without one.
        """
        while True:
            with contextlib.suppress(queue.Empty):
                answer: dict[str, Any] = self._queue.get(timeout=0.2)
                return answer
            if not self._process.is_alive():
                raise RftError("the consumer process ended early", value=self._process.exitcode)


@contextmanager
def _consumer(target: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    context = multiprocessing.get_context("spawn")
    ready, answers = context.Event(), context.Queue()
    process = context.Process(target=target, args=(*arguments, ready, answers), daemon=True)
    process.start()
    try:
        while not ready.wait(0.1):
            if not process.is_alive():
                raise RftError("the consumer process ended early", value=process.exitcode)
        yield _Answers(process, answers)
        process.join(30)
    finally:
        process.kill()


def limits(folder: Path) -> dict[str, float]:
    """What the machine gives: flushed writes of the size of one batch, a small flush, copying memory."""
    block = os.urandom(2 * 2**20)
    path = folder / "limit"
    with open(path, "wb", buffering=0) as file:
        times = []
        for _ in range(24):
            times.append(_seconds(lambda: (file.write(block), os.fdatasync(file.fileno()))))
        small = []
        for _ in range(50):
            small.append(_seconds(lambda: (file.write(b"x" * 4096), os.fdatasync(file.fileno()))))
    path.unlink()
    source = np.frombuffer(block * 32, np.uint8)
    target = np.empty_like(source)
    copy = min(_seconds(lambda: np.copyto(target, source)) for _ in range(5))
    return {
        "flushed_write_bytes_per_s": len(block) / statistics.median(times),
        "flush_ms_p50": 1000 * statistics.median(small),
        "memcpy_bytes_per_s": source.nbytes / copy,
    }


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(rounds: int, num: int, folder: Path) -> dict[str, Any]:
    """All measurements, `rounds` times."""
    bench = Bench(folder)
    figures: dict[str, list[float]] = {}
    delays: dict[str, list[float]] = {"ours": [], "bare": []}
    mean_bytes = statistics.mean(s.num_bytes for s in make_samples(256, seed=1))
    try:
        bench.write(bench.samples(_BATCH), _BATCH)  # plans, pages and connections are warm in the first round too
        bench.write_bare(bench.samples(_BATCH), _BATCH)
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
            for name, value in {
                "write_256": bench.write(bench.samples(num), 256),
                "bare_write_256": bench.write_bare(bench.samples(num), 256),
                "write_64": bench.write(bench.samples(num // 2), 64),
                "bare_write_64": bench.write_bare(bench.samples(num // 2), 64),
                "end_to_end": bench.end_to_end(bench.samples(num)),
                "bare_end_to_end": bench.end_to_end_bare(bench.samples(num)),
                **limits(folder),
            }.items():
                figures.setdefault(name, []).append(value)
        paced = _PACED_WRITES * _BATCH
        delays["ours"] += bench.latency_ms(bench.samples(paced))
        delays["bare"] += bench.latency_ms_bare(bench.samples(paced))
    finally:
        bench.close()
    return summary(figures, delays, mean_bytes)


def summary(figures: dict[str, list[float]], delays: dict[str, list[float]], mean_bytes: float) -> dict[str, Any]:
    """Medians with least and greatest; ratios are of the same round."""

    def ratio(name: str, to: str) -> dict[str, float]:
        return _spread([a / b for a, b in zip(figures[name], figures[to], strict=True)])

    def latency(values: list[float]) -> dict[str, float]:
        return {"p50": statistics.median(values), "p99": float(np.percentile(values, 99))}

    disk = [w * mean_bytes / b for w, b in zip(figures["write_256"], figures["flushed_write_bytes_per_s"], strict=True)]
    return {
        "load": list(os.getloadavg()),
        "results": {
            "write_experiences_per_s": statistics.median(figures["write_256"]),
            "end_to_end_experiences_per_s": statistics.median(figures["end_to_end"]),
            "commit_to_batch_ms_p50": latency(delays["ours"])["p50"],
            "commit_to_batch_ms_p99": latency(delays["ours"])["p99"],
            "fraction_of_disk_bandwidth": statistics.median(disk),
        },
        "peers": {
            "bare_layout": {
                "write_experiences_per_s": statistics.median(figures["bare_write_256"]),
                "end_to_end_experiences_per_s": statistics.median(figures["bare_end_to_end"]),
                "commit_to_batch_ms_p50": latency(delays["bare"])["p50"],
                "commit_to_batch_ms_p99": latency(delays["bare"])["p99"],
            }
        },
        "ratios_to_bare_layout": {
            "write_256": ratio("write_256", "bare_write_256"),
            "write_64": ratio("write_64", "bare_write_64"),
            "end_to_end": ratio("end_to_end", "bare_end_to_end"),
        },
        "figures": {name: _spread(values) for name, values in figures.items()},
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="rft bench buffer", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=4096, help="experiences a measurement, a multiple of 512")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    options = parser.parse_args(arguments)
    if options.samples % 512 or options.samples < 512 or options.rounds < 1:
        parser.error("--samples must be a positive multiple of 512, --rounds at least 1")
    with tempfile.TemporaryDirectory(prefix="rft-bench-", dir=options.folder, ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)  # the database may run as another user
        print(json.dumps(measure(options.rounds, options.samples, Path(folder)), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
