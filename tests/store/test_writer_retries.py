"""Writing again after an answer was lost, a connection cut or a flush failed: stored once, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import threading
import uuid
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from rftdata import Buffer, Run
from rftdata.config import BufferConfig
from rftdata.errors import BufferUnavailableError
from rftdata.maintenance.verification import verify
from rftdata.postgres.database import Database
from rftdata.segments.posix import PosixSegmentStore
from rftdata.writing.writer import Writer, _Ids
from tests.store.test_review_locks import wait_for_waiting
from tests.store.test_writer import counts
from tests.support.store_roles import own_group
from tests.support.waiting import wait_until


@pytest.fixture
def run(buffer: Buffer) -> Run:
    return buffer.create_run(name="import", config={}, seed=1, steps=1, pipeline_version="p1")


class LosesOneAnswer:
    """Passes bytes between a client and the server, and cuts the line when the commit of a write batch is answered, once.

    The server has committed, the client cannot know: the case that receipts are for.
    """

    def __init__(self, server_uri: str) -> None:
        place = conninfo_to_dict(server_uri)
        self._server = f"{place['host']}/.s.PGSQL.{place['port']}"
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.uri = make_conninfo(
            server_uri, host="127.0.0.1", port=self._listening.getsockname()[1], gssencmode="disable"
        )
        self.writing = False
        self.lost = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client = self._listening.accept()[0]
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._server)
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pass_on, args=[source, sink, source is server], daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError), source:
            while data := source.recv(65536):
                self.writing |= not answers and b"INSERT INTO rft.write_receipt" in data
                if answers and self.writing and not self.lost and b"COMMIT\0" in data:
                    self.lost += 1
                    break
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


def test_a_retry_after_a_lost_answer_inserts_once(database_uri: str, tmp_path: Path) -> None:
    line = LosesOneAnswer(database_uri)
    segments = PosixSegmentStore(tmp_path / "segments")
    direct = Database(database_uri)
    buffer = Buffer(BufferConfig(uri=database_uri), direct, None, segments)
    run = buffer.create_run(name="import", config={}, seed=1, steps=1, pipeline_version="p1")
    through = Database(line.uri)
    with Writer(through, segments, run.run_id) as writer:
        written = writer.insert(own_group(task_key="a"), own_group(task_key="b"))
        assert line.lost == 1
        written += writer.insert(own_group(task_key="c"))
    assert buffer.sql("SELECT group_id FROM rft.rollout_group ORDER BY 1")["group_id"].to_pylist() == written
    stored = counts(buffer)
    assert (stored["experience"], stored["rollout"], stored["write_receipt"], stored["task_observation"]) == (
        6,
        6,
        2,
        3,
    )
    assert list(verify(buffer)) == []
    through.close()
    direct.close()
    line.close()


def test_a_write_survives_a_connection_that_was_cut_before_the_commit(buffer: Buffer, run: Run) -> None:
    """The first try is killed on the server while it waits for a lock; the second stores everything."""
    with psycopg.connect(buffer.config.uri, autocommit=True) as other, buffer.writer(run) as writer:
        other.execute("BEGIN")
        other.execute("SELECT rft.take_lock(%s)", [f"plan/{run.run_id}"])
        written: list[int] = []
        thread = threading.Thread(target=lambda: written.extend(writer.insert(own_group())))
        thread.start()
        waiting = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        wait_until(lambda: other.execute(waiting).rowcount or not thread.is_alive(), "the writer waits", pause_s=0.01)
        other.execute("COMMIT")
        thread.join()
    assert len(written) == 1
    assert counts(buffer) == {
        **dict.fromkeys(("rollout_group", "segment", "write_receipt", "task_observation"), 1),
        "rollout": 2,
        "experience": 2,
    }


def test_a_retry_waits_for_a_first_try_that_is_still_being_committed(buffer: Buffer, run: Run) -> None:
    """The connection broke while the server was working: the second try must not store the batch beside the first."""
    groups, receipt, given = [own_group()], uuid.uuid4(), _Ids()
    with Writer(buffer.database, buffer.segments, run.run_id) as writer:
        arrays = writer._helper.submit(
            writer._store_arrays, [s for g in groups for r in g.rollouts for s in r.sequences]
        )

        def retry() -> None:
            with buffer.database.transaction() as connection:
                writer._write(connection, groups, arrays, receipt, given)

        thread = threading.Thread(target=retry)
        with buffer.database.transaction() as first:
            writer._write(first, groups, arrays, receipt, given)
            stored = dict(given.groups)
            thread.start()
            wait_for_waiting(buffer, 1, behind=first.info.backend_pid)
            assert thread.is_alive()
        thread.join()
    assert given.groups == stored
    assert (counts(buffer)["experience"], counts(buffer)["rollout_group"]) == (2, 1)


def test_arrays_that_could_not_be_flushed_are_never_committed(
    buffer: Buffer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed fsync the kernel may say that all is well: asking again would lose the data unnoticed."""
    flush, failures = os.fdatasync, [OSError(errno.EIO, os.strerror(errno.EIO))]

    def fails_once(descriptor: int) -> None:
        if failures:
            raise failures.pop()
        flush(descriptor)

    monkeypatch.setattr(os, "fdatasync", fails_once)
    with buffer.writer(run) as writer:
        with pytest.raises(BufferUnavailableError, match="cannot be written"):
            writer.insert(own_group(task_key="a"))
        assert failures == [] and set(counts(buffer).values()) == {0}
        writer.insert(own_group(task_key="b"))
    assert counts(buffer)["experience"] == 2
    assert list(verify(buffer)) == []


def test_a_file_that_could_not_be_opened_leaves_no_wrong_offset_behind(buffer: Buffer, run: Run) -> None:
    folder = Path(buffer.config.segments or "")
    with buffer.writer(run) as writer:
        writer.insert(own_group(task_key="a"))
        appender = writer._appender
        appender._give_up()  # as after a failed flush
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            # One descriptor is left: the file opens, its folder does not.
            free = os.dup(0)
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))
            with pytest.raises(BufferUnavailableError, match="cannot be written"):
                appender._open()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        writer.insert(own_group(task_key="b"))
    assert list(verify(buffer)) == []
    assert {row["uri"] for row in buffer.sql("SELECT uri FROM rft.segment_file").to_pylist()} == set(os.listdir(folder))
