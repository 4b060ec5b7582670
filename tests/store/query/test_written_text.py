"""SQL that a person writes is one complete expression, which reads only; nothing of it reaches beyond its place in a statement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest

from rftdata import Buffer, exchange
from rftdata.attempts.stored_selection import select
from rftdata.errors import QueryError
from rftdata.maintenance import purge
from tests.support.store_roles import own_group
from tests.support.waiting import wait_until

INCOMPLETE = [
    "reward < -1) OR (reward > 0.5",
    "true) OR (true",
    "true) OR true --",
    "true) OR true /*",
    "true /* ",
    "true) OR ($$ ) $$ = '",
    "$$ true",
    "$a$ true) OR (true",
    "'",
    '"reward',
    "true;",
    "true; SELECT 1",
    "true) ; DELETE FROM rft.label ; --",
    "true)",
    "(true",
    "true) UNION SELECT group_id, experience_id FROM rft.experience WHERE (true",
    "true GROUP BY group_id",
    "true ORDER BY 1",
    "true LIMIT 1",
    "true FOR UPDATE",
    "true) FOR UPDATE --",
    "",
    "  ",
    "-- nothing",
    "true, false",
    "count(*) > 0",
    "$1",
    "E'\\') OR (true --",
    "]",
    "true) IS NULL OR (true",
    "WHERE true",
    "EXISTS (SELECT FROM rft.run FOR UPDATE)",
    "ANALYZE true",
]
COMPLETE = [
    "reward > 0.5 -- a comment",
    "/* a comment */ reward > 0.5",
    "reward > 0.5 AND response <> ') OR (true'",
    "reward > 0.5 AND response <> $$)$$",
    "reward > 0.5 AND response <> E'\\')'",
    "(reward) > (0.5)",
    "experience_id IN (SELECT experience_id FROM rft.experience WHERE reward > 0.5)",
    "reward > 0.5 AND response NOT LIKE '%s{}'",
]

Verb = Callable[[Buffer, str, Path], list[int]]


def exported(buffer: Buffer, where: str, folder: Path) -> list[int]:
    exchange.export(buffer, folder / "a.parquet", runs=["a"], where=where)
    found = duckdb.execute("SELECT experience_id FROM read_parquet(?) ORDER BY 1", [str(folder / "a.parquet")])
    return [row[0] for row in found.fetchall()]


def purged(buffer: Buffer, where: str, _: Path) -> list[int]:
    purge.purge(buffer, where, runs=["a"], reason="asked to", author="ada")
    ids: list[int] = buffer.sql("SELECT experience_id FROM rft.v_purged ORDER BY 1")["experience_id"].to_pylist()
    return ids


def scanned(buffer: Buffer, where: str, _: Path) -> list[int]:
    columns = ["experience_id", "taskset", "token_ids"]
    ids: list[int] = buffer.scan(columns, where, run="a").read_all()["experience_id"].to_pylist()
    return ids


VERBS: dict[str, Verb] = {"export": exported, "purge": purged, "scan": scanned}


@pytest.fixture
def two_runs(buffer: Buffer) -> Buffer:
    """Runs a and b with a group of two experiences each, of rewards 0 and 1."""
    for name in ("a", "b"):
        run = buffer.create_run(name=name, config={}, seed=1, steps=1, pipeline_version="none", mode="train")
        with buffer.writer(run) as writer:
            writer.insert(own_group(task_key=name))
    return buffer


@pytest.mark.parametrize("verb", VERBS)
def test_a_condition_cannot_leave_its_parentheses(two_runs: Buffer, tmp_path: Path, verb: str) -> None:
    for where in INCOMPLETE:
        with pytest.raises(QueryError, match="the condition cannot be used"):
            pytest.fail(f"{where!r} was accepted: {VERBS[verb](two_runs, where, tmp_path)}")
    assert not (tmp_path / "a.parquet").exists()
    assert two_runs.sql("SELECT purge_id FROM rft.purge").num_rows == 0


@pytest.mark.parametrize("verb", ["export", "scan"])
@pytest.mark.parametrize("where", COMPLETE)
def test_a_complete_condition_applies_only_to_the_named_run(
    two_runs: Buffer, tmp_path: Path, verb: str, where: str
) -> None:
    assert VERBS[verb](two_runs, where, tmp_path) == [2]


def test_a_purge_applies_only_to_the_named_run(two_runs: Buffer, tmp_path: Path) -> None:
    assert purged(two_runs, "reward > 0.5 OR true -- all", tmp_path) == [1, 2]


SELECTIONS = {
    "the lock of a row": "SELECT experience_id FROM rft.experience FOR UPDATE",
    "a weaker lock of a row": "SELECT experience_id FROM rft.experience FOR KEY SHARE",
    "the lock of a row in a subquery": "SELECT experience_id FROM (SELECT * FROM rft.experience FOR SHARE) e",
    "a change": "WITH gone AS (DELETE FROM rft.label RETURNING 1) SELECT experience_id FROM rft.experience",
    "an option of EXPLAIN": "ANALYZE SELECT experience_id FROM rft.experience",
    "a second query": "SELECT experience_id FROM rft.experience) a, (SELECT 1 AS one",
    "the end of the query": "SELECT experience_id FROM rft.experience) AS selected --",
    "an open string": "SELECT experience_id FROM rft.experience WHERE response <> '",
    "a second statement": "SELECT experience_id FROM rft.experience; SELECT 1",
}


@pytest.mark.parametrize("what", SELECTIONS)
def test_a_selection_is_one_query_without_locks_and_changes(two_runs: Buffer, what: str) -> None:
    with pytest.raises(QueryError, match=r"sampling\.source"):
        select(two_runs.database, SELECTIONS[what])


def test_a_text_leaves_neither_settings_nor_locks_behind(two_runs: Buffer, tmp_path: Path) -> None:
    spoils = "set_config('rft.clock_shift', '1 hour', false) <> '' AND pg_advisory_lock(7) IS NOT NULL"
    for verb in (exported, scanned):
        assert len(verb(two_runs, spoils, tmp_path)) == 2
        (tmp_path / "a.parquet").unlink(missing_ok=True)
    select(two_runs.database, f"SELECT experience_id FROM rft.experience WHERE {spoils}")
    held = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = 7"
    wait_until(lambda: not two_runs.sql(held).num_rows, "the end of the connections that took the lock")
    clocks = [two_runs.sql("SELECT rft.clock() < now() + interval '1 minute' AS same")["same"] for _ in range(8)]
    assert all(clock.to_pylist() == [True] for clock in clocks)


WRITES = {
    "COPY": "COPY (SELECT 1) TO '{}'",
    "ATTACH": "ATTACH '{}'",
    "EXPORT": "EXPORT DATABASE '{}'",
    "EXPLAIN ANALYZE": "EXPLAIN ANALYZE COPY (SELECT 1) TO '{}'",
    "INSTALL": "INSTALL httpfs",
    "SET": "SET memory_limit = '1GB'",
    "PRAGMA": "PRAGMA memory_limit = '1GB'",
    "CREATE": "CREATE TABLE t AS SELECT 1 AS a",
    "CALL": "CALL pragma_version()",
    "USE": "USE memory.rft",
    "DROP": "DROP VIEW rft.run",
    "CREATE OR REPLACE": "CREATE OR REPLACE VIEW rft.run AS SELECT 1 AS a",
    "PREPARE": "PREPARE p AS SELECT 1",
    "two": "SELECT 1; SELECT 2",
    "none": "",
    "INSERT": "INSERT INTO run SELECT * FROM run",
}
READS = {
    "read_text": "SELECT * FROM read_text('{}')",
    "a name of a file": "SELECT * FROM '{}'",
    "glob": "SELECT * FROM glob('{}')",
    "read_blob": "SELECT * FROM read_blob('{}')",
    "sniff_csv": "FROM sniff_csv('{}')",
    "a variable of Python": "SELECT * FROM known",
    "settings": "SELECT getenv('HOME')",
    "a text that is run": "SELECT * FROM query('COPY (SELECT 1) TO ''{}''')",
    "parquet": "SELECT * FROM parquet_metadata('{}')",
}


@pytest.mark.parametrize("text", [*WRITES.values(), *READS.values()], ids=[*WRITES, *READS])
def test_a_query_of_duckdb_reads_the_tables_and_nothing_else(buffer: Buffer, tmp_path: Path, text: str) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(QueryError):
        buffer.query(text.replace("{}", str(secret))).read_all()
    with pytest.raises(QueryError):
        buffer.query(text.replace("{}", str(tmp_path / "new"))).read_all()
    assert secret.read_text() == "a\n1\n" and sorted(tmp_path.rglob("*")) == before
    assert not Path("new").exists()


@pytest.mark.parametrize(
    "text",
    [
        "SELECT 1",
        "FROM run",
        "TABLE run",
        "VALUES (1)",
        "WITH a AS (SELECT 1) SELECT * FROM a",
        "DESCRIBE experience",
        "SUMMARIZE run",
        "SHOW TABLES",
        "EXPLAIN SELECT * FROM run",
        "SELECT now() - created_at, strftime(created_at, '%Y') FROM run",
        "SELECT '{\"a\": 1}'::json ->> 'a'",
        "SELECT created_at AT TIME ZONE 'Europe/Berlin' FROM run",
        "PIVOT (SELECT * FROM run) ON status USING count(*)",
    ],
)
def test_queries_of_duckdb_that_read(buffer: Buffer, text: str) -> None:
    buffer.query(text).read_all()
