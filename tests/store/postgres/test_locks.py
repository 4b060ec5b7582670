"""Locks of the buffer: an account that may only read neither takes one nor delays others that take one."""

from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from rftdata import Buffer, exchange
from rftdata.errors import ConflictError
from rftdata.maintenance import purge
from rftdata.maintenance.archive import archive
from rftdata.postgres.database import Connection, Database, sql_folder
from rftdata.postgres.locks import Lock, holding
from rftdata.segments.compaction import Compactor, lock_moves
from tests.support.store_roles import Roles, own_group
from tests.support.waiting import wait_until

ADVISORY = "SELECT l.pid FROM pg_locks l JOIN pg_database d ON d.oid = l.database AND d.datname = current_database() WHERE locktype = 'advisory'"
# Every key that a lock of ours has had.
KEYS = (
    "SELECT pg_advisory_lock(hashtext('rft.' || k)) FROM unnest(ARRAY['run_names', 'join', 'migrate', 'compaction', 'archive']) k",
    "SELECT pg_advisory_lock(hashtext('rft.' || k), i) FROM unnest(ARRAY['plan', 'draw', 'import']) k CROSS JOIN generate_series(1, 9) i",
    "SELECT pg_advisory_lock(key) FROM rft.lock WHERE key IS NOT NULL",
)


@pytest.fixture
def roles(buffer: Buffer) -> Roles:
    return Roles(buffer, steps=3)


def everything(buffer: Buffer, roles: Roles, folder: Path) -> None:
    """Verbs that take locks, one after the other."""
    with buffer.joining():
        run = buffer.create_run(name="new", config={}, seed=1, steps=1, pipeline_version="none", mode="train")
    with buffer.writer(run) as writer:
        writer.insert(own_group())
    with roles.attempt() as attempt:
        roles.work()
        roles.train(attempt, 1)
    exchange.export(buffer, folder / "new.parquet", runs=["new"])
    exchange.load(buffer, folder / "new.parquet", run="copy")
    run.end("finished", "for the test")
    archive(buffer, "new", author="ada")
    assert Compactor(buffer.database, buffer.segments).run() is not None
    purge.purge(buffer, "run = 'copy'", reason="asked to", author="ada")


def test_advisory_locks_of_a_reader_stop_nothing(buffer: Buffer, roles: Roles, tmp_path: Path) -> None:
    with psycopg.connect(buffer.config.uri, autocommit=True) as reader:
        reader.execute("SET ROLE rft_reader")
        for statement in KEYS:
            reader.execute(statement)  # type: ignore[call-overload]
        with ThreadPoolExecutor(1) as threads:
            done = threads.submit(everything, buffer, roles, tmp_path)
            wait_until(done.done, "verbs that wait for no reader")
            done.result()


def test_a_reader_that_waits_for_a_holder_gets_no_lock(buffer: Buffer) -> None:
    with psycopg.connect(buffer.config.uri, autocommit=True) as reader, ThreadPoolExecutor(1) as threads:
        reader.execute("SET ROLE rft_reader")
        with holding(buffer.database, Lock("compaction")):
            taken = threads.submit(reader.execute, KEYS[2])  # type: ignore[arg-type]
            wait_until(lambda: buffer.sql(f"{ADVISORY} AND NOT granted").num_rows, "a reader that waits")
        taken.result()
        with lock_moves(buffer.database) as mine:
            assert mine


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT name FROM rft.lock FOR UPDATE",
        "SELECT name FROM rft.lock FOR KEY SHARE",
        "LOCK TABLE rft.lock IN ROW SHARE MODE",
        "INSERT INTO rft.lock (name) VALUES ('compaction')",
        "SELECT rft.take_lock('compaction')",
        "SELECT rft.try_lock('compaction')",
        "SELECT rft.hold_lock('compaction', 0, '', 'me', 7)",
        "COMMENT ON SCHEMA rft IS 'mine'",
        "SELECT run_id FROM rft.run FOR KEY SHARE",
    ],
)
@pytest.mark.parametrize("role", ["rft_reader", "rft_labeler"])
def test_only_accounts_that_write_take_locks(buffer: Buffer, role: str, statement: str) -> None:
    with psycopg.connect(buffer.config.uri, autocommit=True) as connection:
        connection.execute(f"SET ROLE {role}")  # type: ignore[call-overload]
        with pytest.raises(psycopg.errors.InsufficientPrivilege), connection.transaction():
            connection.execute(statement)  # type: ignore[call-overload]


def test_no_query_uses_an_advisory_lock_with_a_fixed_key() -> None:
    found = {file.name for file in sql_folder().rglob("*.sql") if re.search(r"pg_(try_)?advisory", file.read_text())}
    assert found == {"40_lock.sql", "locks.sql"}


def test_a_lock_is_held_by_one_and_free_again_after_its_end(buffer: Buffer) -> None:
    with (
        holding(buffer.database, Lock("x")) as first,
        holding(buffer.database, Lock("x")) as second,
        holding(buffer.database, Lock("y")) as other,
    ):
        assert (first, other) == (None, None) and second is not None and "process" in second
    with holding(buffer.database, Lock("x")) as again:
        assert again is None


@pytest.mark.parametrize("known", [True, False])
def test_trying_does_not_wait_for_a_holder_even_at_the_first_use_of_a_name(buffer: Buffer, known: bool) -> None:
    """A try that waited would end with an error after the time limit of its statement."""
    if known:
        buffer.sql("SELECT rft.take_lock('new')")
    with psycopg.connect(buffer.config.uri, autocommit=True) as other:
        other.execute("SET statement_timeout = '60s'")
        other.execute("SET lock_timeout = '77s'")
        with buffer.database.transaction() as holder:
            holder.execute("SELECT rft.take_lock('new')")
            assert other.execute("SELECT rft.try_lock('new')").fetchone() == (False,)
            assert other.execute("SELECT rft.try_lock('newer'), current_setting('lock_timeout')").fetchone() == (
                True,
                "77s",
            )
        with other.transaction():
            assert other.execute("SELECT rft.try_lock('new'), rft.try_lock('newest')").fetchone() == (True, True)
            assert other.execute("SHOW lock_timeout").fetchone() == ("77s",)
            with buffer.database.transaction() as late:
                answers = [
                    list(row.values())
                    for row in late.execute("SELECT rft.try_lock('new') AS a, rft.try_lock('newest') AS b")
                ]
            assert answers == [[False, False]]


def test_the_lock_of_a_process_that_was_killed_is_free(buffer: Buffer) -> None:
    with holding(buffer.database, Lock("x")):
        buffer.sql("SELECT pg_terminate_backend(pid) FROM rft.lock WHERE name = 'x'")
        with holding(buffer.database, Lock("x"), wait_s=math.inf) as held_by:
            assert held_by is None


def test_waiting_ends_with_the_holder(buffer: Buffer) -> None:
    def hold() -> str | None:
        with holding(buffer.database, Lock("x"), wait_s=math.inf) as held_by:
            return held_by

    with ThreadPoolExecutor(4) as threads:
        with holding(buffer.database, Lock("x")):
            waiting = [threads.submit(hold) for _ in range(4)]
            wait_until(lambda: buffer.sql(f"{ADVISORY} AND NOT granted").num_rows == 4, "four that wait")
        assert [future.result() for future in waiting] == [None] * 4


def test_the_error_names_the_holder(buffer: Buffer, roles: Roles) -> None:
    with (
        holding(buffer.database, Lock("archive")),
        pytest.raises(ConflictError, match=r"archiving or restoring .*: .*, process \d+"),
    ):
        archive(buffer, roles.run.run_id, author="ada")


def test_an_import_holds_the_locks_of_all_its_runs_on_one_connection(
    buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may have more runs than the server allows connections."""
    opened: list[Database] = []

    def dedicated(database: Database) -> Connection:
        opened.append(database)
        return open_one(database)

    for name in "abc":
        with buffer.writer(buffer.create_run(name=name, config={}, seed=1, steps=1, pipeline_version="p")) as writer:
            writer.insert(own_group(task_key=name))
    open_one = Database.dedicated
    monkeypatch.setattr(Database, "dedicated", dedicated)
    numbers = []
    for runs in (["a"], ["b", "c"]):
        exchange.export(buffer, tmp_path / f"{runs[0]}.jsonl", runs=runs)
        opened.clear()
        exchange.load(buffer, tmp_path / f"{runs[0]}.jsonl", run=f"copy of {runs[0]}" if len(runs) == 1 else None)
        numbers.append(len(opened))
    assert numbers[0] == numbers[1]


def test_of_several_locks_all_are_held_or_none(buffer: Buffer) -> None:
    database = buffer.database
    with holding(database, Lock("b")), holding(database, Lock("a"), Lock("b"), Lock("c")) as held_by:
        assert held_by is not None
        with holding(database, Lock("a"), Lock("c")) as held_by:
            assert held_by is None
            for name in "abc":
                with holding(database, Lock(name)) as held_by:
                    assert held_by is not None
    with holding(database, Lock("a"), Lock("b"), Lock("c")) as held_by:
        assert held_by is None
