"""Writing again after an answer was lost, a connection cut or a flush failed: stored once, or not at all."""

from __future__ import annotations

import errno
import os
import resource
import threading
import uuid
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psycopg
import psycopg.errors
import pytest

from rftdata import Buffer, Group, Run
from rftdata.errors import BufferUnavailableError, FencedError, RftError
from rftdata.maintenance.verification import verify
from rftdata.postgres.database import Connection, Cursor, send
from rftdata.writing import batch_store
from rftdata.writing.write_batch import WriteBatch
from rftdata.writing.writer import Writer
from tests.store.pipeline.test_review_locks import wait_for_waiting
from tests.store.writing.test_writer import counts
from tests.support.lossy_line import LossyLine
from tests.support.store_roles import Roles, own_group
from tests.support.waiting import PATIENCE_S, wait_until


@pytest.fixture
def run(buffer: Buffer) -> Run:
    return buffer.create_run(name="import", config={}, seed=1, steps=1, pipeline_version="p1")


def together(buffer: Buffer, run: Run, num_groups: int) -> Writer:
    """A writer that waits until it has so many groups of two, and stores them in one transaction."""
    return Writer(buffer.database, buffer.segments, run.run_id, linger_ms=1000 * PATIENCE_S, max_rows=2 * num_groups)


def stored(buffer: Buffer) -> list[int]:
    found: list[int] = buffer.sql("SELECT group_id FROM rft.rollout_group ORDER BY 1")["group_id"].to_pylist()
    return found


def test_a_retry_after_a_lost_answer_inserts_once(line: LossyLine, through: Buffer, buffer: Buffer, run: Run) -> None:
    with through.writer(run) as writer:
        with line.losing_one("rft.write_receipt"):
            written = writer.insert(own_group(task_key="a"), own_group(task_key="b"))
        written += writer.insert(own_group(task_key="c"))
    assert stored(buffer) == written
    found = counts(buffer)
    assert (found["experience"], found["rollout"], found["write_receipt"], found["task_observation"]) == (6, 6, 2, 3)
    assert list(verify(buffer)) == []


def test_what_was_stored_together_is_stored_once_while_answers_are_lost_as_long_as_retries_last(
    line: LossyLine, through: Buffer, buffer: Buffer, run: Run
) -> None:
    """The transaction of two requests was committed, and no later try learns of it."""
    with together(through, run, 2) as writer:
        with line.losing(lambda statements: any("rft.write_receipt" in text for text in statements)):
            answers = [writer.submit(own_group(task_key=key)) for key in "ab"]
            for answer in answers:
                assert isinstance(answer.exception(), BufferUnavailableError)
        assert line.num_lost > 1
    assert len(stored(buffer)) == 2
    assert list(verify(buffer)) == []


def test_a_writer_that_closes_still_retries(line: LossyLine, through: Buffer, buffer: Buffer, run: Run) -> None:
    writer = together(through, run, 3)
    answers = [writer.submit(own_group(task_key=key)) for key in "ab"]
    with line.losing_one("rft.write_receipt"):
        answers.append(writer.submit(own_group(task_key="c")))
        writer.close()
    assert [i for answer in answers for i in answer.result()] == stored(buffer)
    assert list(verify(buffer)) == []


def test_requests_whose_joint_transaction_may_be_committed_are_not_stored_alone(
    line: LossyLine, through: Buffer, buffer: Buffer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was committed. Every try that would have learned of it fails with the error of its own rollback."""

    def refused(connection: Connection, name: str, /, **parameters: Any) -> Cursor:
        if name == "insert_receipt" and line.num_lost:
            raise psycopg.errors.DeadlockDetected("deadlock detected")
        return send(connection, name, **parameters)

    monkeypatch.setattr(batch_store, "send", refused)
    with together(through, run, 2) as writer, line.losing_one("rft.write_receipt"):
        answers = [writer.submit(own_group(task_key=key)) for key in "ab"]
        for answer in answers:
            with pytest.raises(BufferUnavailableError, match="whether 2 groups were stored is unknown"):
                answer.result()
    assert len(stored(buffer)) == 2


def test_ids_of_a_try_that_was_rolled_back_are_not_those_of_the_writer_that_used_the_receipt_then(
    buffer: Buffer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt, steps = uuid.uuid4(), ["seal_groups", "plan_by_index"]
    other = Writer(buffer.database, buffer.segments, run.run_id)

    def interrupted(connection: Connection, name: str, /, **parameters: Any) -> Cursor:
        if steps and name == steps[0]:
            steps.pop(0)
            if steps:
                raise psycopg.errors.DeadlockDetected("deadlock detected")
            other.insert(own_group(), receipt=receipt)
        return send(connection, name, **parameters)

    monkeypatch.setattr(batch_store, "send", interrupted)
    with other, buffer.writer(run) as writer:
        assert writer.insert(own_group(), receipt=receipt) == []
    assert steps == [] and len(stored(buffer)) == 1


def broken(**changes: Any) -> Group:
    group = own_group(task_key="broken")
    for name, value in changes.items():
        subject = next(x for x in (group, group.rollouts[0], group.rollouts[0].sequences[0]) if hasattr(x, name))
        setattr(subject, name, value)
    return group


BROKEN = {
    "a number that is a text": broken(seconds="long"),
    "an id out of range": broken(parent_id=2**70),
    "an id that the database refuses": broken(policy_spans=[(3, 2**70)]),
    "no text": broken(response=None),
    "tokens out of range": broken(token_ids=[5, 6, 7, 8, 2**40]),
    "a payload that is no JSON": broken(payload={"answer": object()}),
    "a message that is no JSON": broken(messages=[{"role": object()}]),
    "a mask of texts": broken(loss_mask=["no", "yes"]),
}


@pytest.mark.parametrize("what", BROKEN)
def test_groups_that_cannot_be_stored_fail_alone(buffer: Buffer, run: Run, what: str) -> None:
    with together(buffer, run, 9) as writer:
        first = writer.submit(own_group(task_key="a"))
        refused = insert_soon(writer, BROKEN[what])
        last = writer.submit(own_group(task_key="b"))
    with pytest.raises(RftError, match=r"cannot be stored|is not valid|must be 32-bit"):
        refused.result()
    assert [*first.result(), *last.result()] == stored(buffer)
    assert list(verify(buffer)) == []


def insert_soon(writer: Writer, group: Group) -> Future[list[int]]:
    """The answer of a writer, which may refuse the group at once."""
    try:
        return writer.submit(group)
    except RftError as error:
        refused: Future[list[int]] = Future()
        refused.set_exception(error)
        return refused


def test_a_group_that_two_callers_hand_in_is_stored_as_often_as_it_can_be(buffer: Buffer) -> None:
    """A claimed one once; one without a claim twice, each with its own rollouts."""
    roles = Roles(buffer)
    with roles.attempt():
        roles.plan()
        claimed, mine = roles.result(roles.claim(1)[0], [0.0, 1.0]), own_group()
        with together(buffer, roles.run, 4) as writer:
            answers = [writer.submit(group) for group in (claimed, mine, claimed, mine)]
            assert isinstance(answers[2].exception(), FencedError)
            ids = [i for answer in (answers[0], answers[1], answers[3]) for i in answer.result()]
    rollouts = buffer.sql("SELECT group_id, count(*) AS n FROM rft.rollout GROUP BY 1 ORDER BY 1").to_pylist()
    assert rollouts == [{"group_id": i, "n": 2} for i in sorted(ids)] and len(set(ids)) == 3


def test_a_write_survives_a_connection_that_was_cut_before_the_commit(buffer: Buffer, run: Run) -> None:
    """The first try is killed on the server while it waits for a lock; the second stores everything."""
    with psycopg.connect(buffer.config.uri, autocommit=True) as other, buffer.writer(run) as writer:
        other.execute("BEGIN")
        other.execute("SELECT rft.take_lock('plan', %s)", [run.run_id])
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
    batch = WriteBatch([own_group()], uuid.uuid4())
    with Writer(buffer.database, buffer.segments, run.run_id) as writer:
        arrays = writer._store.begin_arrays(batch.sequences)
        thread = threading.Thread(target=lambda: writer._store.try_commit(batch, arrays))
        with buffer.database.transaction() as first:
            writer._store.write(first, batch, arrays)
            assigned = list(batch.group_ids)
            thread.start()
            wait_for_waiting(buffer, 1, behind=first.info.backend_pid)
            assert thread.is_alive()
        thread.join()
    assert batch.group_ids == assigned == stored(buffer)
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
        appender = writer._store.appender
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
