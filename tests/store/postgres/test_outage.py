"""A database that restarts during work: the work continues, and nothing is done twice."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest

import rftdata
from rftdata import Buffer
from rftdata.errors import BufferUnavailableError, ConflictError
from rftdata.maintenance.verification import verify
from rftdata.pipeline.queue import claim_sealed_groups
from rftdata.planning.claims import claim_groups
from rftdata.postgres import notify, retry
from rftdata.postgres.database import queries, reads
from rftdata.postgres.embedded import EmbeddedServer
from rftdata.workers.worker import Worker
from tests.support.store_roles import LEASE_S, Roles, own_group
from tests.support.waiting import PATIENCE_S, wait_until


@pytest.fixture(scope="module")
def own(server_folders: Path) -> Iterator[EmbeddedServer]:
    """A server that a test may stop."""
    server = EmbeddedServer(server_folders / "restarts")
    yield server
    server.stop()


@pytest.fixture
def restarting(own: EmbeddedServer) -> Iterator[Buffer]:
    with rftdata.open(str(own.folder)) as buffer:
        # As a replica, whose triggers do not refuse it.
        buffer.sql(
            "DO $$ BEGIN SET LOCAL session_replication_role = replica; EXECUTE (SELECT 'TRUNCATE ' || string_agg(oid::regclass::text, ', ')"
            " FROM pg_class WHERE relnamespace = 'rft'::regnamespace AND relkind = 'r' AND relname NOT IN ('buffer', 'schema_version')); END $$"
        )
        yield buffer


@contextlib.contextmanager
def down(server: EmbeddedServer, seconds: float = 1.5) -> Iterator[None]:
    """The server is stopped when the block begins, and comes back after some seconds."""
    server.stop()

    def start() -> None:
        time.sleep(seconds)
        server.start()

    thread = threading.Thread(target=start)
    thread.start()
    yield
    thread.join()


class Refusing:
    """Stands in the place of a stopped server, and closes every connection.

    Attributes:
        num_tries: connections so far.
    """

    def __init__(self, server: EmbeddedServer) -> None:
        self.num_tries = 0
        self._path = server.socket_dir / ".s.PGSQL.5432"
        server.socket_dir.mkdir(exist_ok=True)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(self._path))
        self._listening.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._listening.accept()[0].close()
                self.num_tries += 1

    def close(self) -> None:
        self._path.unlink()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


def test_a_connection_is_tried_again_at_a_steady_pace_until_the_server_is_back(
    own: EmbeddedServer, restarting: Buffer
) -> None:
    """However long it is away, and however many connections to it were idle. With pauses that double there is no dozen tries in these minutes."""
    with rftdata.open(str(own.folder), patience_s=PATIENCE_S) as buffer:
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(buffer.database.connection())
        own.stop()
        refusing = Refusing(own)
        answered: list[Any] = []
        asking = threading.Thread(target=lambda: answered.extend(buffer.database.fetch("buffer_id")))
        asking.start()
        wait_until(lambda: refusing.num_tries >= 24, "two dozen tries")
        refusing.close()
        own.start()
        asking.join()
    assert len(answered) == 1


@pytest.mark.slow
def test_every_role_continues_through_a_restart_between_any_two_of_its_steps(
    own: EmbeddedServer, restarting: Buffer
) -> None:
    roles = Roles(restarting, steps=2)
    with roles.attempt() as attempt:
        with down(own):
            assert roles.plan() == 2
        with down(own):
            claimed = claim_groups(
                roles.run, roles.worker_id, policy_step=0, last_step=0, count=9, lease_s=LEASE_S, held=[]
            )
        with down(own):
            ids = roles.insert(*[roles.result(group, [0.0, 1.0]) for group in claimed])
        with down(own):
            sealed = claim_sealed_groups(roles.run, roles.worker_id, count=9, lease_s=LEASE_S)
        assert sealed is not None and sorted(sealed.group_ids) == sorted(ids)
        with down(own):
            assert roles.commit(sealed) == sorted(ids)
        with down(own):
            batch = attempt.draw(1, 2, timeout_s=PATIENCE_S)
        assert batch is not None and len(batch) == 4
        with down(own):
            attempt.release(batch)
        with down(own):
            batch = attempt.draw(1, 2, timeout_s=PATIENCE_S)
            assert batch is not None
        with down(own):
            roles.publish(attempt, 1)
        with down(own):
            attempt.record_step(1, batch, wait_seconds=0, train_seconds=0, publish_seconds=0, metrics={})
        with down(own):
            attempt.commit_checkpoint(1, "/c/1")
        with down(own):
            attempt.finish("done")
        with down(own):
            attempt.close()
    assert restarting.find_run(roles.run_id).status == "finished"
    counts = restarting.sql(
        "SELECT (SELECT count(*) FROM rft.policy_version WHERE attempt_id = %(a)s) AS versions,"
        " (SELECT count(*) FROM rft.checkpoint WHERE attempt_id = %(a)s) AS checkpoints,"
        " (SELECT count(*) FROM rft.draw WHERE attempt_id = %(a)s) AS draws,"
        " (SELECT count(*) FROM rft.experience WHERE run_id = %(r)s) AS experiences",
        {"a": attempt.attempt_id, "r": roles.run_id},
    ).to_pylist()
    assert counts == [{"versions": 2, "checkpoints": 1, "draws": 4, "experiences": 4}]


def test_waiting_and_beating_workers_survive_a_restart_of_the_database(own: EmbeddedServer, restarting: Buffer) -> None:
    roles = Roles(restarting)
    with roles.attempt() as attempt, Worker(roles.run, "trainer") as worker:
        drawn: list[Any] = []
        waiting = threading.Thread(target=lambda: drawn.append(attempt.draw(1, 2, timeout_s=PATIENCE_S)))
        waiting.start()
        with down(own):
            assert not worker.should_stop()
            worker.set_state("waits")
        roles.work()
        waiting.join()
        assert len(drawn[0]) == 4
        before = restarting.sql("SELECT heartbeat_at FROM rft.worker ORDER BY worker_id DESC LIMIT 1")["heartbeat_at"][
            0
        ]
        newest = "SELECT heartbeat_at FROM rft.worker ORDER BY worker_id DESC LIMIT 1"
        wait_until(lambda: restarting.sql(newest)["heartbeat_at"][0] != before, "a heartbeat", pause_s=0.2)


def test_a_listener_is_notified_again_after_a_restart(own: EmbeddedServer, restarting: Buffer) -> None:
    listener = notify.Listener(restarting.database, notify.READY)
    assert listener.wait()  # it has begun to listen
    own.stop()
    assert not listener.wait(0.1)
    own.start()
    wait_until(lambda: listener.wait(0.1), "it listens again")
    notify.notify(restarting.database, notify.READY)
    assert listener.wait(PATIENCE_S)
    listener.close()


def test_a_writer_that_is_handed_groups_all_the_while_loses_and_doubles_none(
    own: EmbeddedServer, restarting: Buffer
) -> None:
    run = restarting.create_run(name="w", config={}, seed=1, steps=1, pipeline_version="none")
    acknowledged: list[int] = []
    ended = threading.Event()

    def write() -> None:
        with restarting.writer(run) as writer:
            while not ended.is_set():
                acknowledged.extend(writer.insert(own_group(task_key=str(len(acknowledged)))))

    def wait_for_more() -> None:
        """Until it writes: of two groups more, one was begun after this."""
        before = len(acknowledged)
        wait_until(lambda: len(acknowledged) >= before + 2 or not thread.is_alive(), "more groups", pause_s=0.01)

    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(3):
        wait_for_more()
        with down(own, 0.3):
            pass
    wait_for_more()
    ended.set()
    thread.join()
    stored = restarting.sql("SELECT group_id FROM rft.rollout_group WHERE run_id = %s ORDER BY 1", [run.run_id])
    assert stored["group_id"].to_pylist() == acknowledged and len(acknowledged) > 3
    assert restarting.sql("SELECT count(*) AS n FROM rft.experience WHERE run_id = %s", [run.run_id])[
        "n"
    ].to_pylist() == [2 * len(acknowledged)]
    assert list(verify(restarting)) == []


@pytest.mark.slow
def test_a_database_that_stays_unavailable_is_an_error_in_the_end(own: EmbeddedServer, restarting: Buffer) -> None:
    run = restarting.create_run(name="w", config={}, seed=1, steps=1, pipeline_version="none")
    with rftdata.open(str(own.folder), patience_s=1.0) as hasty:
        own.stop()
        with pytest.raises(BufferUnavailableError, match="cannot be used"):
            hasty.find_run(run.run_id)
    own.start()
    assert restarting.find_run(run.run_id).name == run.name


def test_what_is_no_outage_is_not_tried_again() -> None:
    calls: list[int] = []

    def refused() -> None:
        calls.append(1)
        raise BufferUnavailableError("no") from psycopg.errors.InvalidPassword("password authentication failed")

    def conflict() -> None:
        calls.append(1)
        raise ConflictError("deadlock")

    for action in (refused, conflict):
        with pytest.raises((BufferUnavailableError, ConflictError)):
            retry.ride_out(action)
    assert len(calls) == 2


# Of functions that PostgreSQL calls volatile, those that neither change nor lock anything.
_HARMLESS = {"clock_timestamp", "random"}
_CALL = re.compile(r"([a-z_][a-z0-9_.]*)\s*\(")


def called(text: str, known: Mapping[str, tuple[str, str]]) -> set[str]:
    """The known functions that an SQL text calls, directly or through functions of the schema rft."""
    found: set[str] = set()
    texts = [text]
    while texts:
        bare = re.sub(r"--[^\n]*|'(?:[^']|'')*'", "", texts.pop())
        new = {name.removeprefix("pg_catalog.") for name in _CALL.findall(bare)} & known.keys() - found
        found |= new
        texts += [known[name][1] for name in new if name.startswith("rft.")]
    return found


@pytest.fixture
def functions(buffer: Buffer) -> dict[str, tuple[str, str]]:
    """Volatility and body of every function, by name; those of the schema rft with the schema."""
    query = """
        SELECT CASE n.nspname WHEN 'rft' THEN 'rft.' ELSE '' END || p.proname AS name, max(p.provolatile::text) AS volatility, string_agg(p.prosrc, ' ') AS body
        FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname IN ('rft', 'pg_catalog') GROUP BY 1"""
    with buffer.database.connection() as connection:
        return {row["name"]: (row["volatility"], row["body"]) for row in connection.execute(query)}


def test_queries_marked_as_reads_change_and_lock_nothing(buffer: Buffer, functions: dict[str, tuple[str, str]]) -> None:
    """Each is carried out in a read-only transaction, which refuses writes and locks of rows, and leaves no lock that a read does not take."""
    locks = "SELECT locktype, mode FROM pg_locks WHERE pid = pg_backend_pid() AND mode NOT IN ('AccessShareLock', 'ExclusiveLock')"
    refused = {}
    with buffer.database.connection() as connection:
        views = "SELECT 'rft.' || relname AS name, pg_get_viewdef(oid) AS body FROM pg_class WHERE relnamespace = 'rft'::regnamespace AND relkind = 'v'"
        texts = {name: queries()[name] for name in sorted(reads())}
        for name, text in texts.items() | {(row["name"], row["body"]) for row in connection.execute(views)}:
            volatile = {each for each in called(text, functions) if functions[each][0] == "v"} - _HARMLESS
            if volatile:
                refused[name] = f"calls {volatile}"
        for name, text in texts.items():
            try:
                with connection.transaction():
                    connection.execute("SET TRANSACTION READ ONLY")
                    connection.execute(text, dict.fromkeys(re.findall(r"%\((\w+)\)s", text)))
                    if taken := connection.execute(locks).fetchall():
                        refused[name] = f"takes {taken}"
            except psycopg.Error as error:
                refused[name] = str(error)
    assert refused == {}


@pytest.mark.parametrize(
    "text",
    [
        "SELECT pg_advisory_xact_lock(1)",
        "SELECT pg_notify('rft_run', '')",
        "SELECT nextval('rft.label_batch_id_seq')",
        "SELECT set_config('rft.purge', 'x', false)",
        "SELECT rft.rebuild_task_stat(1)",
    ],
)
def test_the_check_of_reads_finds_functions_that_lock_or_change(
    functions: dict[str, tuple[str, str]], text: str
) -> None:
    assert {name for name in called(text, functions) if functions[name][0] == "v"} - _HARMLESS


def test_only_a_query_marked_as_read_is_repeated(buffer: Buffer) -> None:
    """What draws, claims, fences or wakes carries no mark; what roles ask in their loops does."""
    unmarked = {
        "draw_groups",
        "claim_groups",
        "reopen_stale_groups",
        "begin_label_batches",
        "fence",
        "lock_run",
        "notify",
        "drawn_selected_state",
    }
    assert unmarked <= queries().keys() - reads()
    assert {"run_state", "newest_policy", "segment_addresses", "open_evaluations", "live_workers"} <= reads()
