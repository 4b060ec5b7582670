"""Archiving and restoring finished runs: seconds, bytes before and after, and memory, beside a plain copy of the same bytes.

A buffer is filled like that of `rft bench history`. All runs but the last are archived one after the other, the freed space is returned to the disk,
questions are asked about live and archived runs together, and all runs are restored.

    archive_seconds, restore_seconds   of each run; archiving includes reading the files again and comparing them
    copy_seconds                       the limit: COPY of the experiences of all runs, and a copy of the segment files with fsync
    ratio                              seconds of archiving all runs / copy_seconds
    bytes                              of the database, the segments and the archives: before, while archived, and after restoring
    left_bytes                         of the largest tables while archived
    questions                          seconds of `rft query`, before and while archived
    peak_mib                           largest memory, without mapped files, of the processes that archive and restore, one for each run

The exit code is 1 if an answer differs, or if a restored run differs from the original.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg

import rftdata
from benchmarks.buffer.history_runs import add_run
from benchmarks.harness.arguments import argument_parser, integer, scratch_folder
from benchmarks.harness.report import say, write
from rftdata import Buffer
from rftdata.config import BufferConfig
from rftdata.maintenance.archive import CHANGED_TABLES
from rftdata.maintenance.erasure import vacuum
from rftdata.segments.compaction import Compactor

QUESTIONS = (
    "select run, count(*) as n, sum(reward) as r from experience group by run order by run",
    "select count(*) as n from experience where reward = 1",
    "select avg(len(token_ids)) as n from experience",
    "select run, avg(length(response)) as n from experience group by run order by run",
)
# A separate program, because this one has already needed memory to fill the buffer.
_PROGRAM = """
import re, sys, time, rftdata
from rftdata.maintenance.archive import archive
from rftdata.maintenance.restore_run import restore_run
with rftdata.open(sys.argv[1]) as buffer:
    started = time.perf_counter()
    done = archive(buffer, sys.argv[3], author="benchmark") if sys.argv[2] == "archive" else restore_run(buffer, sys.argv[3])
    seconds, status = time.perf_counter() - started, open("/proc/self/status").read()
    peak, mapped = (int(re.search(name + ":\\s*(\\d+)", status)[1]) for name in ("VmHWM", "RssFile"))
    print(seconds, (peak - mapped) // 1024, done, sep=chr(10))
"""
# Everything that an archive removes, and how segments are stored.
_DIGEST = """
    SELECT (SELECT md5(string_agg(md5(e::text), '' ORDER BY experience_id)) FROM rft.experience e)
        || (SELECT md5(string_agg(md5(p::text), '' ORDER BY group_id, prompt_digest)) FROM rft.group_prompt p)
        || (SELECT md5(string_agg(concat(segment_id, checksum, num_rows, created_at), '' ORDER BY segment_id)) FROM rft.segment) AS digest"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser("archive", __doc__)
    parser.add_argument("--experiences", type=integer(), default=100_000, help="stored experiences")
    parser.add_argument("--runs", type=integer(), default=10, help="runs that they belong to")
    options = parser.parse_args(arguments)
    with (
        scratch_folder(options) as folder,
        rftdata.open(BufferConfig(uri=f"{folder}/buffer", min_free_bytes=2**30)) as buffer,
    ):
        for number in range(options.runs):
            add_run(buffer, number, options.experiences // options.runs)
            buffer.find_run(f"run-{number}").end("finished", "all steps are done")
        buffer.sql("UPDATE rft.worker SET stopped_at = clock_timestamp()")
        buffer.sql("VACUUM ANALYZE")
        result = measure(buffer, options.runs)
    write(options, result)
    return int(not (result["restored_exactly"] and all(row["agrees"] for row in result["questions"])))


def measure(buffer: Buffer, num_runs: int) -> dict[str, Any]:
    """Archive all runs but the last, or the only run, and restore them."""
    names = [f"run-{number}" for number in range(max(1, num_runs - 1))]
    digest = buffer.sql(_DIGEST)["digest"][0].as_py()
    before = [_ask(buffer, text) for text in QUESTIONS]
    copy_seconds, sizes = _copy_seconds(buffer), {"before": _sizes(buffer)}
    archived = [_seconds_and_mib(buffer, "archive", name) for name in names]
    vacuum(buffer, rewrite=True, tables=CHANGED_TABLES)
    Compactor(buffer.database, buffer.segments, grace_s=0, alone=True).run()
    sizes["archived"] = _sizes(buffer)
    left = buffer.sql(
        "SELECT relname::text AS name, pg_total_relation_size(oid) AS size FROM pg_class WHERE relnamespace = 'rft'::regnamespace"
        " AND relkind = 'r' ORDER BY 2 DESC LIMIT 6"
    ).to_pylist()
    during = [_ask(buffer, text) for text in QUESTIONS]
    restored = [_seconds_and_mib(buffer, "restore", name) for name in names]
    sizes["restored"] = _sizes(buffer)
    return {
        "archive_seconds": [seconds for seconds, _ in archived],
        "restore_seconds": [seconds for seconds, _ in restored],
        "copy_seconds": copy_seconds,
        "ratio": sum(seconds for seconds, _ in archived) / copy_seconds,
        "bytes": sizes,
        "left_bytes": {row["name"]: row["size"] for row in left},
        "questions": [
            {"question": text, "before_seconds": a, "archived_seconds": b, "agrees": was == now}
            for text, (a, was), (b, now) in zip(QUESTIONS, before, during, strict=True)
        ],
        "restored_exactly": buffer.sql(_DIGEST)["digest"][0].as_py() == digest,
        "peak_mib": {"archive": max(mib for _, mib in archived), "restore": max(mib for _, mib in restored)},
    }


def _ask(buffer: Buffer, text: str) -> tuple[float, Any]:
    started = time.perf_counter()
    with buffer.query(text) as reader:
        rows = reader.read_all().to_pylist()
    return time.perf_counter() - started, rows


def _seconds_and_mib(buffer: Buffer, verb: str, name: str) -> tuple[float, int]:
    """Archive or restore a run in a process of its own; return its time without the start, and its largest memory."""
    command = [sys.executable, "-c", _PROGRAM, str(buffer.folder), verb, name]
    seconds, mib, done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    say(f"{float(seconds):8.2f} s  {mib} MiB  {done}")
    return float(seconds), int(mib)


def _copy_seconds(buffer: Buffer) -> float:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=buffer.folder) as folder:
        with (
            psycopg.connect(buffer.database.uri) as connection,
            connection.cursor().copy("COPY rft.experience TO STDOUT (FORMAT BINARY)") as copy,
            open(f"{folder}/rows", "wb") as rows,
        ):
            rows.writelines(copy)
        for file in sorted((Path(str(buffer.folder)) / "segments").iterdir()):
            shutil.copyfile(file, f"{folder}/{file.name}")
        for name in os.listdir(folder):
            with open(f"{folder}/{name}", "rb") as copied:
                os.fsync(copied.fileno())
    return time.perf_counter() - started


def _sizes(buffer: Buffer) -> dict[str, int]:
    return {
        "database": buffer.sql("SELECT pg_database_size(current_database()) AS size")["size"][0].as_py(),
        "segments": sum(file.stat().st_size for file in (Path(str(buffer.folder)) / "segments").iterdir()),
        "archives": sum(file.stat().st_size for file in buffer.archives.all_files()),
    }
