"""Export, import and scan of whole buffers: seconds and experiences a second by number of experiences.

The buffer has groups of 8. Every fourth group is made of an experience of another group, and every eighth experience has a label of its own batch.
The buffer is exported to Parquet and imported into an empty one, and its arrays are scanned (`Buffer.scan`). Limits are measured on the same buffer:
binary COPY of the rows of `rft.experience` (`copy_out_s`, for export), COPY of these rows into an empty table with the same indexes (`copy_in_s`,
for import), and a plain read of the segment files (for scan). `export_cpu_s` and `import_cpu_s` are processor time of this process, which
depends less on other work of the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rftdata
from benchmarks.harness.arguments import argument_parser, integer, integers, scratch_folder
from benchmarks.harness.report import say, write
from benchmarks.harness.workload import GROUP_SIZE, make_samples
from benchmarks.peers.rftdata_buffer import as_sequence
from rftcore.garbage import collect_rarely
from rftdata import Buffer, Group, Rollout, exchange, labels

_AT_ONCE = 4000


def fill(buffer: Buffer, num: int, runs: int) -> None:
    """Store experiences, evenly over runs."""
    per_run = num // runs // GROUP_SIZE * GROUP_SIZE
    for run in range(runs):
        buffer.create_run(name=f"run{run}", config={}, seed=1, steps=1, pipeline_version="none")
        parent_id: int | None = None
        with buffer.writer(f"run{run}") as writer:
            for start in range(0, per_run, _AT_ONCE):
                found = _groups(run * per_run + start, min(_AT_ONCE, per_run - start), parent_id)
                for future in [writer.submit(group) for group in found]:
                    future.result()
                rows = buffer.sql("SELECT max(experience_id) AS newest FROM rft.experience")
                parent_id = rows["newest"][0].as_py()
    ids = buffer.sql("SELECT experience_id FROM rft.experience ORDER BY 1")["experience_id"].to_pylist()
    for some in range(0, len(ids), 8 * 32):
        for experience_id in ids[some : some + 8 * 4 : 8]:
            labels.set_rewards(buffer, {experience_id: 0.25}, author="bench")


def _groups(first: int, num: int, parent_id: int | None) -> list[Group]:
    samples = make_samples(num, seed=first, first_key=first)
    groups = []
    for place in range(0, num, GROUP_SIZE):
        is_made = parent_id is not None and place // GROUP_SIZE % 4 == 0
        rollouts = [
            Rollout(i, "ok", s.reward, [as_sequence(s, parent_id=parent_id if is_made else None)])
            for i, s in enumerate(samples[place : place + GROUP_SIZE])
        ]
        key = samples[place].group
        groups.append(Group(rollouts, source="human", taskset="bench", task_key=str(key), payload={"number": key}))
    return groups


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that some work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _copied_out(buffer: Buffer, file: Path) -> None:
    with (
        buffer.database.connection() as connection,
        connection.cursor() as cursor,
        cursor.copy("COPY rft.experience TO STDOUT (FORMAT BINARY)") as copy,
        file.open("wb") as out,
    ):
        out.writelines(copy)


def _read_segments(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            file.read_bytes()


def _copied_in(buffer: Buffer, file: Path) -> None:
    with buffer.database.connection() as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE copied (LIKE rft.experience INCLUDING GENERATED INCLUDING INDEXES)")
        with cursor.copy("COPY copied FROM STDIN (FORMAT BINARY)") as copy:
            copy.write(file.read_bytes())


def _scan(buffer: Buffer) -> None:
    for _ in buffer.scan(["experience_id", "reward", "token_ids", "loss_mask", "behavior_logprobs"]):
        pass


def measure(num: int, runs: int, folder: Path) -> dict[str, Any]:
    """Return the figures of one size."""
    file, rows = folder / "all.parquet", folder / "rows.bin"
    with rftdata.open(str(folder / "from")) as source:
        fill(source, num, runs)
        say(f"{num} experiences stored")
        before = time.process_time()
        export_s = timed(lambda: exchange.export(source, file))
        export_cpu_s = time.process_time() - before
        copy_out_s = timed(lambda: _copied_out(source, rows))
        segments = folder / "from" / "segments"
        read_s = min(timed(lambda: _read_segments(segments)) for _ in range(3))
        scan_s = min(timed(lambda: _scan(source)) for _ in range(3))
        segment_bytes = sum(file.stat().st_size for file in segments.rglob("*") if file.is_file())
        num = int(source.sql("SELECT count(*) AS n FROM rft.experience")["n"][0].as_py())
    say(f"exported in {export_s:.1f} s")
    with rftdata.open(str(folder / "to")) as target:
        before = time.process_time()
        import_s = timed(lambda: exchange.load(target, file))
        import_cpu_s = time.process_time() - before
        again_s = timed(lambda: exchange.load(target, file))
        copy_in_s = timed(lambda: _copied_in(target, rows))
    return {
        "experiences": num,
        "runs": runs,
        "file_bytes": file.stat().st_size,
        "export_s": round(export_s, 2),
        "export_per_s": round(num / export_s),
        "export_mb_per_s": round(file.stat().st_size / export_s / 1e6),
        "export_cpu_s": round(export_cpu_s, 2),
        "copy_out_s": round(copy_out_s, 2),
        "import_s": round(import_s, 2),
        "import_per_s": round(num / import_s),
        "import_cpu_s": round(import_cpu_s, 2),
        "import_again_s": round(again_s, 2),
        "copy_in_s": round(copy_in_s, 2),
        "scan_mb_per_s": round(segment_bytes / scan_s / 1e6),
        "read_segments_mb_per_s": round(segment_bytes / read_s / 1e6),
        "ratios": {
            "export_of_copy": round(export_s / copy_out_s, 2),
            "import_of_copy": round(import_s / copy_in_s, 2),
            "scan_of_read": round(scan_s / read_s, 2),
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser("exchange", __doc__)
    parser.add_argument("--sizes", type=integers(64), default=(3000, 25_000, 100_000), help="numbers of experiences")
    parser.add_argument("--runs", type=integer(), default=2)
    options = parser.parse_args(arguments)
    collect_rarely()  # as `rft import` and `rft export` do
    sizes = []
    for size in options.sizes:
        with scratch_folder(options) as folder:
            sizes.append(measure(size, options.runs, folder))
            say(str(sizes[-1]))
    write(options, {"sizes": sizes})
    return 0
