"""Commands on a long history, each beside a limit of the same machine: a plain read of the same bytes, COPY of the same rows, or the start of `rft`."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from benchmarks.harness.report import say
from benchmarks.harness.rft import command, environment
from rftdata import Buffer

_COPIED = ("experience", "group_prompt", "rollout", "rollout_group", "verdict", "draw", "task")


def measure_commands(buffer: Buffer, folder: Path) -> list[dict[str, Any]]:
    """Return one row for each command: its seconds, and those of its limit; megabytes written, where it writes a file."""
    run = buffer.sql("SELECT name FROM rft.run ORDER BY run_id DESC LIMIT 1")["name"][0].as_py()
    experience = buffer.sql("SELECT max(experience_id) AS id FROM rft.experience")["id"][0].as_py()
    step = buffer.sql("SELECT max(trainer_step) AS step FROM rft.checkpoint")["step"][0].as_py()
    exported, saved = folder / "all.parquet", folder / "backup"
    read, copy, start = partial(_read_segments, buffer), partial(_copy_rows, buffer), partial(_rft, "--version")
    at = ["--buffer", str(buffer.folder)]
    commands: list[tuple[str, list[str], str, Callable[[], float], Path | None]] = [
        (
            "rft export",
            ["export", str(exported), *at],
            "read of the segments and COPY of the rows",
            lambda: read() + copy(),
            exported,
        ),
        (
            "rft db backup",
            ["db", "backup", str(saved), *at],
            "read of the segments and COPY of the rows",
            lambda: read() + copy(),
            saved,
        ),
        ("rft pairs build --dry-run", ["pairs", "build", run, "--dry-run", *at], "COPY of the rows", copy, None),
        ("rft status", ["status", run, *at], "rft --version", start, None),
        ("rft report", ["report", run, "--json", *at], "rft --version", start, None),
        ("rft lineage EXPERIENCE", ["lineage", str(experience), *at], "rft --version", start, None),
        (
            "rft lineage --checkpoint STEP",
            ["lineage", "--checkpoint", str(step), "--run", run, *at],
            "rft --version",
            start,
            None,
        ),
        ("rft doctor", ["doctor", *at], "read of the segments", read, None),
    ]
    rows = []
    for name, arguments, limit, limit_of, written in commands:
        limit_seconds, seconds = limit_of(), _rft(*arguments)
        size = sum(file.stat().st_size for file in _files(written)) / 1e6 if written else None
        times = {"seconds": seconds, "limit": limit, "limit_seconds": limit_seconds, "ratio": seconds / limit_seconds}
        rows.append({"command": name, **times, "megabytes": size})
        say(f"{seconds:8.2f} s  {limit_seconds:8.2f} s for {limit}  {name}")
    return rows


def _rft(*arguments: str) -> float:
    started = time.perf_counter()
    subprocess.run(command(*arguments), env=environment(), check=True, capture_output=True)
    return time.perf_counter() - started


def _files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def _read_segments(buffer: Buffer) -> float:
    assert buffer.folder is not None
    started = time.perf_counter()
    for path in (buffer.folder / "segments").glob("*"):
        with path.open("rb") as file:
            while file.read(2**24):
                pass
    return time.perf_counter() - started


def _copy_rows(buffer: Buffer) -> float:
    started = time.perf_counter()
    with psycopg.connect(buffer.database.uri, autocommit=True) as connection:
        for table in _COPIED:
            with connection.cursor().copy(
                sql.SQL("COPY rft.{} TO STDOUT (FORMAT BINARY)").format(sql.Identifier(table))
            ) as copy:
                for _ in copy:
                    pass
    return time.perf_counter() - started
