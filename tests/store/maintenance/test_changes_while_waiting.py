"""Whatever a maintenance verb decided before a wait is decided again after it: each verb is stopped at its waits, and the world changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from rftdata import Buffer, exchange, labels
from rftdata.config import BufferConfig, RetentionConfig
from rftdata.errors import ArchivedError, ConflictError, QueryError, RftError
from rftdata.maintenance import backup, purge, retention
from rftdata.maintenance.archive import archive
from rftdata.maintenance.restore_run import restore_run
from rftdata.maintenance.states import correct_states, wrong_states
from rftdata.maintenance.verification import verify
from rftdata.segments.base import SegmentAddress
from rftdata.segments.compaction import Compactor, lock_moves
from tests.support.store_roles import own_group, selecting
from tests.support.waiting import wait_until

BLOCKED = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


@pytest.fixture
def runs(buffer: Buffer) -> Buffer:
    """Finished runs a and b, of two groups each, with experiences 1 to 4 and 5 to 8 of rewards 0 and 1."""
    for name in ("a", "b"):
        run = buffer.create_run(name=name, config={}, seed=1, steps=3, pipeline_version="none", mode="train")
        with buffer.writer(run) as writer:
            writer.insert(own_group(task_key=f"{name}1"), own_group(task_key=f"{name}2"))
        run.end("finished", "for the test")
    buffer.sql("UPDATE rft.rollout_group SET status = 'ready'")
    return buffer


@contextlib.contextmanager
def stopped(
    buffer: Buffer, verb: Callable[[], Any], *holds: str
) -> Iterator[tuple[Future[Any], psycopg.Connection[Any]]]:
    """Let a verb run until it waits for locks of an open transaction; it continues when the transaction commits at the end of the block."""
    with ThreadPoolExecutor(1) as threads, psycopg.connect(buffer.config.uri) as holder:
        for statement in holds:
            holder.execute(statement)  # type: ignore[call-overload]
        future = threads.submit(verb)
        wait_until(lambda: future.done() or buffer.sql(BLOCKED).num_rows, "a verb that waits")
        assert not future.done(), future.result()
        yield future, holder


@contextlib.contextmanager
def stopped_before_its_turn(buffer: Buffer, verb: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Let a verb run until it waits for the end of a compaction, which is at the end of the block."""
    with ThreadPoolExecutor(1) as threads, lock_moves(buffer.database) as mine:
        assert mine
        future = threads.submit(verb)
        wait_until(lambda: future.done() or buffer.sql(BLOCKED).num_rows, "a verb that waits")
        assert not future.done(), future.result()
        yield future


def kept(buffer: Buffer) -> list[int]:
    query = "SELECT experience_id FROM rft.experience WHERE experience_id NOT IN (SELECT experience_id FROM rft.v_purged) ORDER BY 1"
    ids: list[int] = buffer.sql(query)["experience_id"].to_pylist()
    return ids


def resume(buffer: Buffer, name: str) -> None:
    """What `rft run --resume` does: more steps, and an attempt."""
    run = buffer.find_run(name)
    run.continue_with({}, steps=9, pipeline_version="none")
    with buffer.attempt(run):
        pass


# What happens to run a while retention is about to purge everything, and what it then must keep.
EVENTS: dict[str, tuple[Callable[[Buffer], object], list[int]]] = {
    "nothing": (lambda buffer: None, []),
    "a label": (lambda buffer: labels.set_rewards(buffer, {1: 0.5}, author="bo"), [1, 2]),
    "a pair": (
        lambda buffer: buffer.sql("INSERT INTO rft.preference_pair (chosen_id, rejected_id) VALUES (2, 1)"),
        [1, 2],
    ),
    "a run that goes on": (lambda buffer: resume(buffer, "a"), [1, 2, 3, 4]),
    "a selection": (
        lambda buffer: selecting(buffer, "SELECT experience_id FROM rft.experience WHERE experience_id = 3", "s"),
        [3, 4],
    ),
}


def everything_goes(buffer: Buffer) -> retention.RetentionResult:
    return retention.apply(buffer, RetentionConfig(max_experiences=0), author="ada")


@pytest.mark.parametrize("event", EVENTS)
def test_retention_decides_again_once_it_holds_the_lock(runs: Buffer, event: str) -> None:
    happens, stays = EVENTS[event]
    with stopped_before_its_turn(runs, lambda: everything_goes(runs)) as done:
        happens(runs)
    assert [i for i in kept(runs) if i <= 4] == stays
    assert done.result().num_experiences == 8 - len(kept(runs)) and list(verify(runs)) == []
    if event != "nothing":
        assert done.result().num_protected == len(stays)


# The same, by transactions that are not committed when the purge wants the rows.
UNCOMMITTED = {
    "a label": ("UPDATE rft.experience SET reward = 0.5 WHERE experience_id = 1", [1, 2]),
    "a pair": ("INSERT INTO rft.preference_pair (chosen_id, rejected_id) VALUES (2, 1)", [1, 2]),
    "a run that goes on": (
        (
            "WITH begun AS (INSERT INTO rft.run_attempt (run_id, host, pid, lease_until) VALUES (1, 'h', 1, now() + interval '1 hour')"
            " RETURNING attempt_id) UPDATE rft.run SET status = 'running', current_attempt_id = attempt_id FROM begun WHERE run_id = 1"
        ),
        [1, 2, 3, 4],
    ),
}


@pytest.mark.parametrize("event", UNCOMMITTED)
def test_retention_decides_again_once_it_has_locked_the_rows(runs: Buffer, event: str) -> None:
    statement, stays = UNCOMMITTED[event]
    with stopped(runs, lambda: everything_goes(runs), statement) as (done, _):
        pass
    done.result()
    assert [i for i in kept(runs) if i <= 4] == stays and list(verify(runs)) == []


def negative(buffer: Buffer) -> purge.PurgeResult:
    return purge.purge(buffer, "reward = 0", runs=["a"], reason="asked to", author="ada")


def test_a_purge_evaluates_its_condition_again_when_it_is_its_turn(runs: Buffer) -> None:
    with stopped_before_its_turn(runs, lambda: negative(runs)) as done:
        labels.set_rewards(runs, {1: 1.0, 4: 0.0}, author="bo")
    assert done.result().num_experiences == 2 and kept(runs) == [1, 2, 5, 6, 7, 8]
    assert runs.sql("SELECT num_experiences AS n FROM rft.purge")["n"].to_pylist() == [2]


def test_a_purge_evaluates_its_condition_again_when_it_has_the_rows(runs: Buffer) -> None:
    with stopped(runs, lambda: negative(runs), "UPDATE rft.experience SET reward = 1 WHERE experience_id = 1") as (
        done,
        _,
    ):
        pass
    assert done.result().num_experiences == 1 and kept(runs) == [1, 2, 4, 5, 6, 7, 8] and list(verify(runs)) == []


@pytest.mark.parametrize("verb", ["purge", "retention"])
def test_experiences_archived_meanwhile_are_not_purged(runs: Buffer, verb: str) -> None:
    def begun() -> object:
        return negative(runs) if verb == "purge" else everything_goes(runs)

    with stopped_before_its_turn(runs, begun) as done:
        archive(runs, "a", author="ada")
    if verb == "purge":
        with pytest.raises(ArchivedError, match="nothing was purged"):
            done.result()
    else:
        assert done.result().num_experiences == 4
    assert [i for i in kept(runs) if i <= 4] == [1, 2, 3, 4] and list(verify(runs)) == []


def test_compaction_keeps_what_was_committed_to_a_file_that_it_closes(runs: Buffer) -> None:
    # The file looks like one without a writer; a commit to it is under way.
    file = runs.sql("SELECT file_id, uri, size_bytes FROM rft.segment_file ORDER BY 1 LIMIT 1").to_pylist()[0]
    compactor = Compactor(runs.database, runs.segments, grace_s=0)
    grows = f"UPDATE rft.segment_file SET size_bytes = size_bytes WHERE file_id = {file['file_id']}"
    with stopped(runs, compactor.run, grows) as (done, _):
        pass
    assert done.result().segments_moved >= 1
    runs.reader.forget()
    assert list(verify(runs)) == [] and len(runs.read_arrays(kept(runs), ["token_ids"])) == 8


def test_an_orphan_that_a_writer_names_at_this_moment_stays(runs: Buffer) -> None:
    with contextlib.closing(runs.segments.appender()) as appender:
        address = runs.database.fetch("all_segments")[0]
        address.pop("num_rows")
        uri = appender.append_bytes(runs.segments.read_bytes(SegmentAddress(**address)), 4).uri
        appender.sync()
    commits = f"INSERT INTO rft.segment_file (uri, size_bytes) VALUES ('{uri}', 1)"
    with stopped(runs, Compactor(runs.database, runs.segments, grace_s=0).clear, commits) as (done, _):
        pass
    assert done.result().orphans_removed == 0 and (Path(str(runs.config.segments)) / uri).exists()


@pytest.mark.parametrize("event", ["a label", "a run that goes on"])
def test_an_archive_checks_again_once_it_has_locked_the_rows(runs: Buffer, event: str) -> None:
    with stopped(runs, lambda: archive(runs, "a", author="ada"), UNCOMMITTED[event][0]) as (done, _):
        pass
    with pytest.raises((ConflictError, QueryError)):
        done.result()
    assert (
        runs.sql("SELECT run_id FROM rft.archive").num_rows == 0
        and runs.archives.all_files() == []
        and list(verify(runs)) == []
    )


def test_a_run_is_restored_once(runs: Buffer) -> None:
    archive(runs, "a", author="ada")
    hold = "SELECT FROM rft.run WHERE name = 'a' FOR UPDATE"
    with stopped(runs, lambda: restore_run(runs, "a"), hold) as (done, holder):
        holder.execute("UPDATE rft.archive SET status = 'restored'")
    with pytest.raises(RftError, match="was changed meanwhile"):
        done.result()


def test_a_backup_of_archives_that_are_restored_meanwhile_reports_it(runs: Buffer, tmp_path: Path) -> None:
    archive(runs, "a", author="ada")
    # pg_dump waits for a table; its snapshot is older than what follows.
    hold = "LOCK TABLE rft.import_file IN ACCESS EXCLUSIVE MODE"
    with stopped(runs, lambda: backup.back_up(runs, tmp_path / "backup"), hold) as (done, _):
        restore_run(runs, "a")
    with pytest.raises(ConflictError, match="the run 'a' was restored while the backup was written"):
        done.result()
    assert not (tmp_path / "backup").exists()


@pytest.mark.parametrize("event", ["compaction", "purge"])
def test_a_backup_copies_what_its_snapshot_refers_to(runs: Buffer, tmp_path: Path, event: str) -> None:
    hold = "LOCK TABLE rft.import_file IN ACCESS EXCLUSIVE MODE"
    compactor = Compactor(runs.database, runs.segments, grace_s=0, alone=True)
    with stopped(runs, lambda: backup.back_up(runs, tmp_path / "backup"), hold) as (done, _):
        if event == "purge":
            negative(runs)
        compactor.run()
        compactor.run()
    if event == "purge":
        with pytest.raises(ConflictError, match="were purged, while the backup was written"):
            done.result()
        return
    done.result()
    target = BufferConfig(uri=str(tmp_path / "restored"), min_free_bytes=0)
    with backup.restore(tmp_path / "backup", target) as restored:
        assert kept(restored) == kept(runs)


def test_an_export_leaves_out_experiences_purged_meanwhile(runs: Buffer, tmp_path: Path) -> None:
    hold = "LOCK TABLE rft.experience_origin IN ACCESS EXCLUSIVE MODE"
    with stopped(runs, lambda: exchange.export(runs, tmp_path / "a.parquet", runs=["a"]), hold) as (done, _):
        negative(runs)
    assert (done.result().num_experiences, done.result().num_purged) == (2, 2)


def test_repairing_states_waits_for_what_is_being_drawn(runs: Buffer) -> None:
    runs.sql("INSERT INTO rft.verdict (experience_id, group_id, pipeline_version, kept) VALUES (1, 1, 'none', true)")
    runs.sql("UPDATE rft.verdict SET is_newest = false")
    assert wrong_states(runs.database) != []
    hold = "SELECT FROM rft.run WHERE run_id = 1 FOR UPDATE"
    with stopped(runs, lambda: correct_states(runs.database), hold) as (done, holder):
        holder.execute(
            "INSERT INTO rft.verdict (experience_id, group_id, pipeline_version, kept) VALUES (1, 1, 'none', true)"
        )
    done.result()
    assert wrong_states(runs.database) == []
