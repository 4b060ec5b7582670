"""Questions to a long history: PostgreSQL on the live buffer, beside DuckDB over a Parquet export of the same tables.

A buffer is filled with verdicts, draws, steps, checkpoints, evaluations and labels. Every question of docs/cookbook.md is asked once right after the
tables were written, and then three times. The limit is the same statement in DuckDB over Parquet files of the tables and views that it names. Both
answers must be equal.

    first_seconds   the first time, before the server has collected statistics
    seconds         median of three, after `ANALYZE`, which the server runs by itself within a minute of a large write
    duckdb_seconds  median of three over Parquet
    ratio           seconds / duckdb_seconds
    agrees          whether the answers are equal

`commands`: seconds of export, backup, pairs, status, report, lineage and doctor, beside a limit of the same machine (`limit`, `limit_seconds`), and
megabytes of the files that they wrote. Imports and scans are in `rft bench exchange`. The exit code is 1 if an answer differs.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq

import rftdata
from benchmarks.buffer.history_commands import measure_commands
from benchmarks.buffer.history_runs import add_run
from benchmarks.harness.arguments import argument_parser, integer, scratch_folder
from benchmarks.harness.report import say, write
from rftdata import Buffer
from rftdata.config import BufferConfig
from rftdata.reports.inspection import tables
from scripts.cookbook_answers import PAGE, QUESTION

_TIMES = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser("history", __doc__)
    parser.add_argument("--experiences", type=integer(), default=100_000, help="of all runs together")
    parser.add_argument("--runs", type=integer(), default=10)
    options = parser.parse_args(arguments)
    with scratch_folder(options) as folder:
        config = BufferConfig(uri=f"{folder}/buffer", min_free_bytes=2**30)
        with rftdata.open(config) as buffer:
            started = time.monotonic()
            for number in range(options.runs):
                add_run(buffer, number, options.experiences // options.runs)
                say(f"run {number + 1} of {options.runs}: {time.monotonic() - started:.0f} s")
            rows, commands = measure(buffer, folder), measure_commands(buffer, folder)
    write(options, {"questions": rows, "commands": commands})
    return int(not all(row["agrees"] for row in rows))


def measure(buffer: Buffer, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each question of the cookbook."""
    questions = [(found[1], found[2]) for found in QUESTION.finditer(PAGE.read_text(encoding="utf-8"))]
    first = {}
    for title, question in questions:
        first[title], _ = _timed(partial(buffer.sql, question))
    with psycopg.connect(buffer.database.uri, autocommit=True) as server:
        # Otherwise plans would depend on whether autovacuum has already analysed the tables.
        server.execute("ANALYZE")
    with duckdb.connect() as connection:
        _export(buffer, folder, connection, " ".join(question for _, question in questions))
        rows = []
        for title, question in questions:
            ours = [_timed(partial(buffer.sql, question)) for _ in range(_TIMES)]
            theirs = [_timed(partial(_answered, connection, question)) for _ in range(_TIMES)]
            seconds, duckdb_seconds = (statistics.median(taken for taken, _ in both) for both in (ours, theirs))
            rows.append(
                {
                    "question": title,
                    "first_seconds": first[title],
                    "seconds": seconds,
                    "duckdb_seconds": duckdb_seconds,
                    "ratio": seconds / duckdb_seconds,
                    "num_rows": ours[0][1].num_rows,
                    "agrees": _equal(ours[0][1], theirs[0][1]),
                }
            )
            say(f"{seconds:8.3f} s  {duckdb_seconds:8.3f} s in DuckDB  {title}")
    return rows


def _answered(connection: duckdb.DuckDBPyConnection, question: str) -> pa.Table:
    return connection.sql(question).to_arrow_table()


def _export(buffer: Buffer, folder: Path, connection: duckdb.DuckDBPyConnection, questions: str) -> None:
    """Write the tables that the questions name to Parquet, and make them views of DuckDB with the same names."""
    connection.execute("CREATE SCHEMA rft; SET integer_division = true")
    known = tables(buffer.database)
    runs = buffer.sql("SELECT run_id FROM rft.run")["run_id"].to_pylist()
    for name in sorted(set(re.findall(r"\brft\.(\w+)", questions))):
        parts = folder / name
        parts.mkdir()
        columns = ", ".join(f'"{column}"' + "::text" * (kind == "jsonb") for column, kind in known[name].items())
        # One run at a time, so that memory does not have to hold the texts of all runs.
        wheres = [f" WHERE run_id = {run}" for run in runs] if "run_id" in known[name] else [""]
        for number, where in enumerate(wheres):
            rows = buffer.sql(f"SELECT {columns} FROM rft.{name}{where}")
            if rows.num_rows:
                pq.write_table(rows, parts / f"{number}.parquet")
        connection.execute(f"CREATE VIEW rft.{name} AS FROM read_parquet('{parts}/*.parquet', union_by_name = true)")


def _timed(work: Callable[[], pa.Table]) -> tuple[float, pa.Table]:
    started = time.perf_counter()
    answer = work()
    return time.perf_counter() - started, answer


def _equal(ours: pa.Table, theirs: pa.Table) -> bool:
    """Compare answers; numbers may differ in their type and in the last digits."""
    return (
        ours.column_names == theirs.column_names
        and ours.num_rows == theirs.num_rows
        and all(
            _same(a, b)
            for name in ours.column_names
            for a, b in zip(ours[name].to_pylist(), theirs[name].to_pylist(), strict=True)
        )
    )


def _same(a: object, b: object) -> bool:
    try:
        return math.isclose(float(a), float(b), rel_tol=1e-6, abs_tol=1e-9)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return str(a) == str(b)
