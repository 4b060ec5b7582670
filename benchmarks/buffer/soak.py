"""Whether the buffer stays as fast, small and correct in use as at the beginning.

Two runs are used at once, each part by a process: four producers that write at a capped rate, two consumers that draw and commit checkpoints,
one process that relabels experiences, the pipeline worker that decides on relabelled groups, and one that applies retention. Retention keeps the
arrays and texts of the newest experiences (as many as are written in a tenth of the time) and purges the others. Every few seconds a sample is
taken: throughput, time of a write, dead rows, bytes on disk and private memory. At the end, everything written must have been drawn exactly once.
Bytes of purged arrays stay on disk for an hour (docs/how-to/purge-and-retention.md) and are counted separately. The exit code is 1 if anything was
wrong.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.buffer.soak_processes import RUNS, consume, guarded, open_buffer, produce, retain, review
from benchmarks.harness.arguments import argument_parser, integer, positive, scratch_folder
from benchmarks.harness.report import exit_on_sigterm, say, write
from rftdata import Buffer
from rftdata.maintenance.verification import verify
from rftdata.run import NO_PIPELINE

_PRODUCERS_A_RUN = 2
_START_S, _DRAIN_S, _QUIET_S = 120.0, 120.0, 60.0
# Tables whose rows change; the others only grow.
_HOT = ("experience", "rollout_group", "worklist", "task_stat", "segment_file", "worker", "run", "run_attempt")


class Soak:
    """Producers, consumers, a reviewer and retention in one folder.

    Args:
        seconds: for how long producers write.
        rate: experiences a second, all producers together.
        every_s: between two samples.
    """

    def __init__(self, folder: Path, *, seconds: float, rate: float, every_s: float, seed: int) -> None:
        self.folder, self.seconds, self.rate, self.every_s, self.seed = folder, seconds, rate, every_s, seed
        self.samples: list[dict[str, Any]] = []
        self.keep = max(1000, round(rate * seconds / 10))
        self.totals = dict.fromkeys(("ready", "written", "drawn", "relabelled", "purged"), 0)
        self.errors: list[str] = []
        self._seen: list[tuple[str, float, int, Any]] = []
        context = multiprocessing.get_context("spawn")
        self._events = context.Queue()
        self._go, self._no_more, self._end = context.Event(), context.Event(), context.Event()
        self._context = context

    def run(self) -> dict[str, Any]:
        """Run the processes for the time; return the results."""
        with open_buffer(str(self.folder)) as buffer:
            for run in RUNS:
                buffer.create_run(name=run, config={}, seed=0, steps=10**6, pipeline_version=NO_PIPELINE)
            processes = self._start()
            try:
                deadline = time.monotonic() + _START_S
                while self.totals["ready"] < len(processes) and not self.errors:
                    self._listen(time.monotonic() + 0.1)
                    if time.monotonic() > deadline:
                        self.errors.append(
                            f"{self.totals['ready']} of {len(processes)} processes were up after {_START_S:.0f} s"
                        )
                self._go.set()
                started = time.monotonic()
                while time.monotonic() < started + self.seconds and not self.errors:
                    self._sample(buffer, started, processes)
                self._no_more.set()
                self._drain(processes)
            finally:
                self._end.set()
                self._go.set()
                self._no_more.set()
                for process in processes.values():
                    process.join(10)
                    process.kill()
            return self._results(buffer)

    def _start(self) -> dict[str, Any]:
        folder, rate = str(self.folder), self.rate / (len(RUNS) * _PRODUCERS_A_RUN)
        duties: dict[str, tuple[Any, ...]] = {"reviewer": (review, folder, self.seed, self._end)}
        for number, run in enumerate(RUNS * _PRODUCERS_A_RUN):
            duties[f"producer {number}"] = (produce, folder, run, number, rate, self.seed, self._go, self._no_more)
        duties["retention"] = (retain, folder, self.keep, max(2.0, self.seconds / 60), self._end)
        for run in RUNS:
            duties[f"consumer {run}"] = (consume, folder, run, self._end)
        processes = {
            name: self._context.Process(target=guarded, args=(*duty, self._events), name=name, daemon=True)
            for name, duty in duties.items()
        }
        for process in processes.values():
            process.start()
        return processes

    def _listen(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            try:
                event = self._events.get(timeout=left)
            except queue.Empty:
                return
            if event[0] == "error":
                self.errors.append(event[3])
                return
            self.totals[event[0]] += event[2]
            self._seen.append(event)

    def _sample(self, buffer: Buffer, started: float, processes: dict[str, Any]) -> None:
        begun, self._seen = time.monotonic(), []
        self._listen(begun + self.every_s)
        seconds = time.monotonic() - begun
        times = sorted(spent for what, _, _, spent in self._seen if what == "written")
        tables = {
            row["relname"]: row
            for row in buffer.sql(
                "SELECT relname::text, n_live_tup AS live, n_dead_tup AS dead FROM pg_stat_user_tables WHERE schemaname = 'rft'"
            ).to_pylist()
        }
        self.samples.append(
            {
                "at_s": time.monotonic() - started,
                "written_per_s": sum(num for what, _, num, _ in self._seen if what == "written") / seconds,
                "drawn_per_s": sum(num for what, _, num, _ in self._seen if what == "drawn") / seconds,
                "waiting": self.totals["written"] - self.totals["drawn"],
                "write_ms_p50": 1000 * statistics.median(times) if times else None,
                "write_ms_max": 1000 * times[-1] if times else None,
                "dead_rows": sum(tables[name]["dead"] for name in _HOT),
                "database_bytes": buffer.sql("SELECT pg_database_size(current_database()) AS n")["n"][0].as_py(),
                "segment_bytes": sum(512 * file.stat().st_blocks for file in _segments(self.folder)),
                "segment_bytes_purged": buffer.database.fetch("ranges_left")[0]["num_bytes"],
                "purged": self.totals["purged"],
                "memory_bytes": {name: _private_memory(process.pid) for name, process in processes.items()},
                "load": os.getloadavg()[0],
            }
        )
        last = self.samples[-1]
        say(
            f"{last['at_s']:.0f} s: {last['written_per_s']:.0f} written/s, {last['drawn_per_s']:.0f} drawn/s,"
            f" {last['dead_rows']} dead rows, load {last['load']:.1f}"
        )

    def _drain(self, processes: dict[str, Any]) -> None:
        for name, process in processes.items():
            if name.startswith("producer"):
                process.join(_DRAIN_S)
        deadline = time.monotonic() + _DRAIN_S
        while (self.totals["drawn"] < self.totals["written"] or not self._events.empty()) and not self.errors:
            self._listen(time.monotonic() + 0.5)
            if time.monotonic() > deadline:
                self.errors.append(
                    f"{self.totals['drawn']} of {self.totals['written']} experiences drawn {_DRAIN_S:.0f} s after the last write"
                )
        self._listen(time.monotonic() + 1.0)  # a surplus draw would arrive now

    def _wait_for_other_sessions(self, buffer: Buffer) -> None:
        """Wait until no other session remains for which VACUUM would keep dead rows: sessions of ended processes, and autovacuum."""
        deadline = time.monotonic() + _QUIET_S
        others = (
            "SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            " AND (backend_type = 'client backend' OR backend_xmin IS NOT NULL)"
        )
        while buffer.sql(others).num_rows and time.monotonic() < deadline:
            time.sleep(0.1)

    def _results(self, buffer: Buffer) -> dict[str, Any]:
        (row,) = buffer.sql(
            "SELECT (SELECT count(*) FROM rft.experience) AS stored, count(*) AS drawn, count(DISTINCT experience_id) AS once,"
            " (SELECT count(*) FROM rft.label) AS labels, (SELECT count(*) FROM rft.v_purged) AS purged FROM rft.draw"
        ).to_pylist()
        self._wait_for_other_sessions(buffer)
        for table in _HOT:
            # Without INDEX_CLEANUP, VACUUM keeps the dead items of a table that has few of them, and ANALYZE counts them.
            buffer.sql(f"VACUUM (ANALYZE, INDEX_CLEANUP ON) rft.{table}")
        buffer.sql("SELECT pg_stat_force_next_flush()")
        dead = buffer.sql(
            "SELECT coalesce(sum(n_dead_tup), 0)::bigint AS n FROM pg_stat_user_tables WHERE relname = ANY (%s)",
            [list(_HOT)],
        )
        once = row["stored"] == row["drawn"] == row["once"] == self.totals["written"]
        if not once and not self.errors:
            self.errors.append(f"not exactly once: {row}, written {self.totals['written']}")
        self.errors += list(verify(buffer))
        last = self.samples[-1] if self.samples else {}
        return {
            "seconds": self.seconds,
            "rate": self.rate,
            "ok": not self.errors,
            "errors": self.errors,
            "exactly_once": once,
            "experiences": row["stored"],
            "labels": row["labels"],
            "kept": self.keep,
            "purged": row["purged"],
            "written_per_s": _thirds([s["written_per_s"] for s in self.samples]),
            "drawn_per_s": _thirds([s["drawn_per_s"] for s in self.samples]),
            "write_ms_p50": _thirds([s["write_ms_p50"] for s in self.samples if s["write_ms_p50"] is not None]),
            "most_dead_rows": max((s["dead_rows"] for s in self.samples), default=0),
            "dead_rows_after_vacuum": dead["n"][0].as_py(),
            "database_bytes_an_experience": last.get("database_bytes", 0) / max(row["stored"], 1),
            "segment_bytes_an_experience": sum(f.stat().st_size for f in _segments(self.folder))
            / max(row["stored"], 1),
            "segment_bytes_without_purged": _thirds(
                [s["segment_bytes"] - s["segment_bytes_purged"] for s in self.samples]
            ),
            "segment_files": len(_segments(self.folder)),
            "memory_bytes": {
                name: _thirds([s["memory_bytes"][name] for s in self.samples if s["memory_bytes"][name]])
                for name in last.get("memory_bytes", {})
            },
            "samples": self.samples,
        }


def _segments(folder: Path) -> list[Path]:
    return [file for file in (folder / "buffer" / "segments").glob("*") if file.is_file()]


def _private_memory(pid: int | None) -> int | None:
    """Return the bytes of anonymous memory of a process. Mapped segments are files, which the kernel may drop."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    kib = next((line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:")), None)
    return None if kib is None else int(kib) * 1024


def _thirds(values: Sequence[float]) -> dict[str, float | None]:
    """Return the medians of the first and the last third, and their ratio."""
    third = len(values) // 3
    if not third:
        return {"first": None, "last": None, "ratio": None}
    first, last = statistics.median(values[:third]), statistics.median(values[-third:])
    return {"first": first, "last": last, "ratio": last / first if first else None}


def plot(results: dict[str, Any], file: Path) -> None:
    """Write a picture of the samples over time."""
    from matplotlib.figure import Figure

    samples = results["samples"]
    minutes = [s["at_s"] / 60 for s in samples]
    figure = Figure(figsize=(9, 9), layout="constrained")
    rates, times, sizes, memory = figure.subplots(4, 1, sharex=True)
    rates.plot(minutes, [s["written_per_s"] for s in samples], label="written")
    rates.plot(minutes, [s["drawn_per_s"] for s in samples], label="drawn", linestyle="--")
    rates.set(
        ylabel="experiences/s",
        ylim=(0, None),
        title=f"{results['experiences']:,} experiences, {results['labels']:,} labels",
    )
    times.plot(minutes, [s["write_ms_p50"] for s in samples], label="write of 64, median")
    times.plot(minutes, [s["load"] * 10 for s in samples], label="load of the machine × 10", linestyle=":")
    times.set(ylabel="ms", ylim=(0, None))
    sizes.plot(minutes, [s["database_bytes"] / 2**20 for s in samples], label="database")
    sizes.plot(minutes, [s["segment_bytes"] / 2**20 for s in samples], label="segments")
    sizes.plot(
        minutes,
        [(s["segment_bytes"] - s["segment_bytes_purged"]) / 2**20 for s in samples],
        label="segments without purged arrays",
    )
    sizes.plot(minutes, [s["dead_rows"] / 100 for s in samples], label="dead rows / 100", linestyle=":")
    sizes.set(ylabel="MiB")
    for name in results["memory_bytes"]:
        memory.plot(minutes, [(s["memory_bytes"][name] or 0) / 2**20 for s in samples], label=name, linewidth=1)
    memory.set(ylabel="own memory, MiB", xlabel="minutes", ylim=(0, None))
    for axes in (rates, times, sizes, memory):
        axes.legend(loc="lower right", fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser("soak", __doc__)
    parser.add_argument("--minutes", type=positive, default=30.0)
    parser.add_argument("--rate", type=positive, default=200.0, help="experiences a second, all producers together")
    parser.add_argument("--every", type=positive, help="seconds between two samples, by default a 120th of the time")
    parser.add_argument("--seed", type=integer(0), default=0)
    parser.add_argument("--plot", type=Path, help="write a picture of the samples (PNG)")
    options = parser.parse_args(arguments)
    exit_on_sigterm()
    seconds = options.minutes * 60
    with scratch_folder(options) as folder:
        try:
            every_s = options.every or max(2.0, seconds / 120)
            results = Soak(folder, seconds=seconds, rate=options.rate, every_s=every_s, seed=options.seed).run()
        finally:
            with open_buffer(str(folder)) as buffer:
                if buffer.server:
                    buffer.server.stop()
    if options.plot:
        plot(results, options.plot)
    write(options, results)
    return 0 if results["ok"] else 1
