"""Purging rows that are also used elsewhere: copies, forks, files under compaction, selections, pairs."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import pytest

import rftdata
from rftdata import Buffer
from rftdata.errors import (
    PurgedError,
    QueryError,
    SelectionChangedError,
)
from rftdata.maintenance import erasure, purge
from rftdata.maintenance.verification import verify
from rftdata.segments.compaction import Compactor
from tests.store.maintenance.test_retention import kept, retained
from tests.support.secret_rows import SECRET, all_ids, erase_at_once, files_hold, secret_group, store_secret
from tests.support.store_roles import own_group, selecting
from tests.support.waiting import wait_until


@pytest.fixture
def stored(buffer: Buffer) -> Buffer:
    return store_secret(buffer)


def copy_group(buffer: Buffer, task_key: str) -> list[int]:
    """Copies of a group's experiences in another run that share the arrays."""
    run = buffer.create_run(name="copy", config={}, seed=1, steps=3, pipeline_version="none")
    with buffer.writer(run) as writer:
        writer.insert(own_group(task_key="twin"))
    with buffer.database.transaction() as connection:
        connection.execute("SET LOCAL rft.purge = 'the test makes copies of them'")
        connection.execute(
            "UPDATE rft.experience e SET parent_id = o.experience_id, segment_id = o.segment_id, segment_row = o.segment_row"
            " FROM rft.v_experience o, rft.v_experience n WHERE n.experience_id = e.experience_id AND e.run_id = %s"
            " AND o.task_key = %s AND o.rollout_index = n.rollout_index",
            [run.run_id, task_key],
        )
        connection.execute(
            "UPDATE rft.group_prompt p SET prompt = o.prompt FROM rft.v_experience o, rft.experience e"
            " WHERE e.group_id = p.group_id AND e.run_id = %s AND o.task_key = %s",
            [run.run_id, task_key],
        )
    found: list[int] = buffer.sql(
        "SELECT experience_id FROM rft.experience WHERE run_id = %s ORDER BY 1", [run.run_id]
    )["experience_id"].to_pylist()
    return found


def test_copies_that_share_arrays_go_with_them_and_retention_spares_what_is_copied(stored: Buffer) -> None:
    copies = copy_group(stored, "secret")
    ids = all_ids(stored)
    assert retained(stored, max_experiences=len(copies)) == ({"max_experiences 2": 2}, 0)
    assert kept(stored) == [*ids[:2], *copies]  # only the plain group is purged
    assert purge.purge(stored, "task_key = 'secret'", reason="x", author="ada").num_experiences == 4
    assert kept(stored) == []
    assert stored.sql("SELECT DISTINCT prompt FROM rft.v_experience")["prompt"].to_pylist() == ["[purged]"]
    assert list(verify(stored)) == []


def test_a_fork_is_purged_with_its_parent(stored: Buffer) -> None:
    fork = stored.fork("r", name="fork", step=0, keep_rollouts=True)
    ids = all_ids(stored)
    assert len(ids) == 8
    assert purge.purge(stored, "task_key = 'secret' AND run = 'r'", reason="x", author="ada").num_experiences == 4
    assert len(kept(stored)) == 4
    assert stored.sql("SELECT count(*) AS n FROM rft.v_experience WHERE prompt LIKE '%Mallory%'")["n"].to_pylist() == [
        0
    ]
    again = stored.fork("r", name="again", step=0, keep_rollouts=True)
    copied = "SELECT count(*) AS n FROM rft.experience WHERE run_id = %s"
    assert [stored.sql(copied, [run.run_id])["n"][0].as_py() for run in (fork, again)] == [4, 2]
    erasure.erase(stored, now=True)
    assert files_hold(stored, SECRET.encode()) == []
    assert list(verify(stored)) == []


def test_writers_continue_in_the_file_that_is_purged_from(stored: Buffer) -> None:
    with stored.writer("r") as writer:
        writer.insert(secret_group("early"))
        purge.purge(stored, "prompt LIKE '%Mallory%'", reason="x", author="ada")
        writer.insert(own_group(task_key="late"))
        erase_at_once(stored)
        writer.insert(own_group(task_key="later"))
    assert files_hold(stored, SECRET.encode()) == []
    assert list(verify(stored)) == []
    assert stored.read_arrays(all_ids(stored)[-4:], ["token_ids"])["token_ids"].to_pylist() == [[5, 6, 7, 8, 9]] * 4


def test_compaction_and_purge_take_turns_and_leave_no_copy_of_purged_rows(stored: Buffer) -> None:
    with stored.writer("r") as writer:
        writer.insert(secret_group("other"))  # a second file
    purging = Thread(
        target=lambda: purge.purge(stored, "prompt LIKE '%Mallory%'", reason="x", author="ada"), daemon=True
    )
    waited: list[bool] = []

    def on_step(step: str) -> None:
        if step == "sync":  # the copies are written, and no row names them yet
            purging.start()
            waiting = (
                "SELECT 1 AS x FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
                " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            )
            wait_until(lambda: stored.sql(waiting).num_rows, "the purge waits", pause_s=0.01)
        if step == "moved" and not waited:
            waited.append(purging.is_alive() and kept(stored) == all_ids(stored))

    report = Compactor(stored.database, stored.segments, grace_s=0.0, on_step=first_of_each_step(on_step)).run()
    purging.join()
    assert waited == [True] and report is not None and report.segments_moved == 2
    assert files_hold(stored, SECRET.encode()) != []
    erasure.erase(stored, now=True)
    assert files_hold(stored, SECRET.encode()) == []
    assert list(verify(stored)) == []


def first_of_each_step(on_step: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that is called for the first time of every step only."""
    seen: set[str] = set()

    def first(step: str) -> None:
        if step not in seen:
            seen.add(step)
            on_step(step)

    return first


def test_files_that_compaction_retired_before_go_with_what_was_purged_and_not_under_a_reader(stored: Buffer) -> None:
    with stored.writer("r") as writer:
        writer.insert(own_group(task_key="other"))

    def stop(step: str) -> None:
        if step == "remove":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Compactor(stored.database, stored.segments, grace_s=0.0, on_step=stop).run()
    purge.purge(stored, "task_key = 'secret'", reason="x", author="ada")
    with rftdata.open(stored.config) as elsewhere:
        plain = all_ids(stored)[2:]
        before = elsewhere.read_arrays(plain, ["token_ids"])
        report = Compactor(stored.database, stored.segments, grace_s=0.0).run()
        assert report is not None and report.files_removed == 0 and report.files_waiting > 0
        assert elsewhere.read_arrays(plain, ["token_ids"]) == before
    assert files_hold(stored, SECRET.encode()) != []
    erasure.erase(stored, now=True)
    assert files_hold(stored, SECRET.encode()) == []
    assert list(verify(stored)) == []


def test_a_stored_selection_outlives_a_purge_of_its_neighbours_and_names_what_was_purged_of_it(stored: Buffer) -> None:
    secret, _, *plain = all_ids(stored)
    sql = f"select experience_id from rft.experience where experience_id in ({plain[0]}, {plain[1]})"
    run = selecting(stored, sql, "plain")
    purge.purge(stored, f"experience_id = {secret}", reason="x", author="ada")  # a row of the same segment
    with stored.attempt(run) as attempt:
        assert attempt.draw(1, 1, timeout_s=5) is not None
        batch = attempt.draw(2, 1, timeout_s=5)
        assert batch is not None
        (drawn,) = batch.rows["experience_id"].to_pylist()
        attempt.release(batch)
        attempt.record_step(1, batch, wait_seconds=0, train_seconds=0, publish_seconds=0, metrics={})
        purge.purge(stored, f"experience_id = {drawn}", reason="the law", author="ada")
        with pytest.raises(PurgedError, match=rf"experience {drawn} of the run's stored selection was purged: the law"):
            attempt.draw(2, 1, timeout_s=5)
    with pytest.raises(SelectionChangedError, match=rf"experience {drawn} was purged"), stored.attempt(run):
        pass
    with pytest.raises(QueryError, match=rf"experience {drawn} was purged.*exclude such rows"):
        selecting(stored, sql, "again")


def test_pairs_of_what_was_purged_stand_no_more(stored: Buffer) -> None:
    first, second, third, fourth = all_ids(stored)
    stored.sql(
        "INSERT INTO rft.preference_pair (chosen_id, rejected_id) VALUES (%s, %s), (%s, %s)",
        [second, first, fourth, third],
    )
    purge.purge(stored, f"experience_id = {first}", reason="x", author="ada")
    assert stored.sql("SELECT stands FROM rft.v_pair ORDER BY pair_id")["stands"].to_pylist() == [False, True]
    with pytest.raises(QueryError, match=rf"names experience {first}, which was purged"):
        selecting(stored, "select pair_id from rft.preference_pair", "pairs")


def test_a_group_with_a_purged_row_is_neither_selected_nor_drawn(stored: Buffer) -> None:
    group = stored.sql("SELECT group_id FROM rft.experience ORDER BY experience_id LIMIT 1")["group_id"][0].as_py()
    first = all_ids(stored)[0]
    run = selecting(stored, f"select {group} as group_id", "groups")
    with stored.attempt(run) as attempt:
        purge.purge(stored, f"experience_id = {first}", reason="the law", author="ada")
        with pytest.raises(PurgedError, match=rf"experience {first} of the run's stored selection was purged: the law"):
            attempt.draw(1, 1, timeout_s=5)
    with pytest.raises(QueryError, match=rf"group {group} contains experience {first}, which was purged"):
        selecting(stored, f"select {group} as group_id", "again")
