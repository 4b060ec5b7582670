"""Compaction: files of ended writers are merged, cut and removed, while writers write, readers read, and processes are killed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import rftdata
from rftcore.cli import run_command
from rftdata import Buffer, Run
from rftdata.config import BufferConfig
from rftdata.errors import SegmentFileClosedError
from rftdata.maintenance.verification import verify
from rftdata.segments.base import SegmentAddress
from rftdata.segments.compaction import (
    BackgroundCompaction,
    CompactionReport,
    Compactor,
    Move,
    close_files,
    commit_moves,
)
from rftdata.segments.posix import PosixSegmentStore
from rftdata.segments.reader import SegmentReader
from tests.support.preloaded import PreloadedCall
from tests.support.store_roles import own_group
from tests.support.waiting import PATIENCE_S, wait_until

STEPS = ("close", "copy", "sync", "move", "moved", "retire", "remove", "forget", "cut")


@pytest.fixture
def run(buffer: Buffer) -> Run:
    return buffer.create_run(name="import", config={}, seed=1, steps=1, pipeline_version="p1")


def folder(buffer: Buffer) -> Path:
    return Path(buffer.config.segments or "")


def on_disk(buffer: Buffer) -> set[str]:
    return {path.name for path in folder(buffer).iterdir()}


def orphan(buffer: Buffer, owner: str | None = None) -> Path:
    """The file that a writer killed before its first commit would leave."""
    assert isinstance(buffer.segments, PosixSegmentStore) and buffer.segments.owner
    return folder(buffer) / f"{owner or buffer.segments.owner}-host-1-0.arrows"


def write_files(buffer: Buffer, run: Run, num: int, *, start: int = 0) -> None:
    """One file per writer, two segments in each."""
    for i in range(start, start + num):
        with buffer.writer(run) as writer:
            for part in "ab":
                writer.insert(own_group(task_key=f"{i}{part}"))


def addresses(buffer: Buffer) -> dict[int, SegmentAddress]:
    return {address.segment_id: address for address, _ in buffer.reader.all_addresses()}


def experiences(buffer: Buffer) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = buffer.sql(
        "SELECT experience_id, segment_id, segment_row FROM rft.experience ORDER BY 1"
    ).to_pylist()
    return rows


def arrays(buffer: Buffer) -> list[list[int]]:
    """Token arrays of everything stored, read as a process that starts now reads them."""
    reader = SegmentReader(buffer.database, PosixSegmentStore(folder(buffer)))
    places = [(row["segment_id"], row["segment_row"]) for row in experiences(buffer)]
    found: list[list[int]] = reader.take(places, ["token_ids"])["token_ids"].to_pylist()
    return found


def compact(buffer: Buffer, grace_s: float = 0.0, **options: Any) -> CompactionReport:
    reports: list[CompactionReport] = []

    def done() -> bool:
        report = Compactor(buffer.database, buffer.segments, grace_s=grace_s, **options).run()
        reports.extend([report] if report is not None else [])
        return bool(reports)

    wait_until(done)  # the server may take a moment to see that one before was killed
    return reports[0]


def test_small_files_of_writers_that_have_ended_become_one_and_no_address_of_an_experience_changes(
    buffer: Buffer, run: Run
) -> None:
    write_files(buffer, run, 5)
    rows, contents, before = experiences(buffer), arrays(buffer), addresses(buffer)
    report = compact(buffer)
    assert (report.files_merged, report.segments_moved, report.files_removed) == (5, 10, 5)
    assert report.bytes_moved == report.bytes_freed == sum(address.length_bytes for address in before.values())
    after = addresses(buffer)
    assert len(on_disk(buffer)) == 1 == len({address.uri for address in after.values()})
    assert {i: a.checksum for i, a in after.items()} == {i: a.checksum for i, a in before.items()}
    assert experiences(buffer) == rows and arrays(buffer) == contents
    assert list(verify(buffer)) == []
    again = compact(buffer)
    assert not again.did_something, "one file is not merged with itself"


def test_a_live_writers_file_is_left_alone_however_long_it_was_silent(buffer: Buffer, run: Run) -> None:
    write_files(buffer, run, 2)
    with buffer.writer(run) as writer:
        writer.insert(own_group(task_key="live"))
        (live,) = on_disk(buffer) - {a.uri for a in list(addresses(buffer).values())[:-1]}
        os.utime(folder(buffer) / live, (0, 0))
        assert compact(buffer).files_merged == 2
        assert live in on_disk(buffer)
        writer.insert(own_group(task_key="on"))
        assert on_disk(buffer) >= {live}
    assert list(verify(buffer)) == []


def test_a_file_that_was_written_to_within_the_grace_is_left_alone(buffer: Buffer, run: Run) -> None:
    """Its writer may run on another host, whose lock is not visible here."""
    write_files(buffer, run, 3)
    orphan(buffer).write_bytes(b"not committed yet")
    before = on_disk(buffer)
    assert not compact(buffer, grace_s=3600).did_something
    assert on_disk(buffer) == before


def test_a_writer_that_was_assumed_dead_continues_in_a_new_file(buffer: Buffer, run: Run) -> None:
    """On a filesystem without locks a writer may be silent for longer than the grace, and write again."""
    import fcntl

    with buffer.writer(run) as writer:
        writer.insert(own_group(task_key="a"))
        fcntl.flock(writer._store.appender._file, fcntl.LOCK_UN)  # type: ignore[attr-defined]
        write_files(buffer, run, 1)
        first = {address.uri for address in addresses(buffer).values()}
        assert compact(buffer).files_removed == 2
        writer.insert(own_group(task_key="b"))
        assert not first & {address.uri for address in addresses(buffer).values()}
    assert len(arrays(buffer)) == 8 and list(verify(buffer)) == []


def test_an_orphan_whose_writer_is_alive_costs_a_new_file_and_no_row(buffer: Buffer, run: Run) -> None:
    """It is collected between the append and the commit: the commit is refused, and the batch goes to another file."""
    import fcntl

    with buffer.database.connection() as held, buffer.writer(run) as writer:
        held.execute("BEGIN")
        held.execute("SELECT rft.take_lock('plan', %s)", [run.run_id])
        answer = writer.submit(own_group())
        wait_until(lambda: writer._store.appender._offset > 0)  # type: ignore[attr-defined]
        fcntl.flock(writer._store.appender._file, fcntl.LOCK_UN)  # type: ignore[attr-defined]
        assert compact(buffer).orphans_removed == 1 and on_disk(buffer) == set()
        held.execute("COMMIT")
        assert len(answer.result()) == 1
    assert len(arrays(buffer)) == 2 and list(verify(buffer)) == []


def test_bytes_beyond_the_committed_length_are_cut_off_and_files_without_a_commit_removed(
    buffer: Buffer, run: Run
) -> None:
    write_files(buffer, run, 1)
    (name,) = on_disk(buffer)
    size = (folder(buffer) / name).stat().st_size
    with (folder(buffer) / name).open("ab") as file:
        file.write(b"a writer died here")
    orphan(buffer).write_bytes(b"12345")
    report = compact(buffer)
    assert (report.files_cut, report.orphans_removed, report.bytes_freed) == (1, 1, 18 + 5)
    assert on_disk(buffer) == {name} and (folder(buffer) / name).stat().st_size == size
    assert list(verify(buffer)) == []
    assert not compact(buffer).did_something


def test_files_of_another_buffer_in_the_same_folder_are_no_orphans(buffer: Buffer, run: Run) -> None:
    write_files(buffer, run, 2)
    others = orphan(buffer, owner="0" * 12)
    others.write_bytes(b"12345")
    assert compact(buffer).orphans_removed == 0 and others.exists()


def test_files_stay_for_their_grace_after_their_segments_moved(buffer: Buffer, run: Run) -> None:
    write_files(buffer, run, 3)
    old = addresses(buffer)
    for path in folder(buffer).iterdir():
        os.utime(path, (0, 0))
    report = compact(buffer, grace_s=3600)
    assert (report.files_merged, report.files_removed, report.files_waiting) == (3, 0, 3)
    for address in old.values():
        assert buffer.segments.read(address, verify=True).num_rows == 2, (
            "who looked the address up before still finds it"
        )
    buffer.sql("UPDATE rft.segment_file SET retired_at = now() - interval '3601 s' WHERE retired_at IS NOT NULL")
    assert compact(buffer, grace_s=3600).files_removed == 3
    assert len(on_disk(buffer)) == 1


def test_arrays_that_are_mapped_stay_readable_when_their_file_is_removed(buffer: Buffer, run: Run) -> None:
    write_files(buffer, run, 2)
    segment_id = min(addresses(buffer))
    mapped = buffer.reader.batches([segment_id])[segment_id]
    compact(buffer)
    assert mapped.column("token_ids").to_pylist() == [[5, 6, 7, 8, 9]] * 2


def test_an_address_looked_up_before_a_move_is_looked_up_again(buffer: Buffer, run: Run) -> None:
    write_files(buffer, run, 2)
    stale = addresses(buffer)
    compact(buffer)
    for address in stale.values():
        assert buffer.reader.read(address).num_rows == 2


def test_a_reader_that_races_compactions_in_a_loop_never_fails(buffer: Buffer, run: Run) -> None:
    """Without any grace: files vanish between the look-up of an address and its use."""
    write_files(buffer, run, 3)
    stop, errors, rounds = threading.Event(), list[BaseException](), [0]

    def read() -> None:
        try:
            while not stop.is_set():
                assert {tuple(row) for row in arrays(buffer)} == {(5, 6, 7, 8, 9)}
                rounds[0] += 1
        except BaseException as error:  # noqa: BLE001 - reported below
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    compactor, moved = Compactor(buffer.database, buffer.segments, grace_s=0), 0
    deadline = time.monotonic() + PATIENCE_S
    turns = itertools.count()
    try:
        while (turn := next(turns)) < 25 or (rounds[0] <= 3 and not errors):
            assert time.monotonic() < deadline, rounds
            write_files(buffer, run, 1, start=10 + turn)
            report = compactor.run()
            assert report is not None
            moved += report.segments_moved
    finally:
        stop.set()
        thread.join()
    assert errors == [] and moved > 25 * 10
    assert list(verify(buffer)) == []


def test_a_file_that_mostly_holds_unused_segments_is_rewritten(buffer: Buffer, run: Run) -> None:
    with buffer.writer(run) as writer:
        writer.insert(own_group(task_key="dead", rewards=[0.0] * 20))
        writer.insert(own_group(task_key="alive"))
    dead, alive = sorted(addresses(buffer))
    with contextlib.closing(buffer.segments.appender()) as appender, buffer.database.transaction() as connection:
        origin = addresses(buffer)[dead]
        copy = appender.append_bytes(buffer.segments.read_bytes(origin), 20)
        appender.sync()
        assert commit_moves(connection, [Move(origin, copy)]) == {dead}
    report = compact(buffer)
    assert report.segments_moved >= 1 and list(verify(buffer)) == []
    assert addresses(buffer)[alive].uri != origin.uri and origin.uri not in on_disk(buffer)


def test_of_two_moves_of_a_segment_the_first_wins(buffer: Buffer, run: Run) -> None:
    write_files(buffer, run, 1)
    first, second = addresses(buffer).values()
    with contextlib.closing(buffer.segments.appender()) as one, contextlib.closing(buffer.segments.appender()) as two:
        moves = [Move(first, appender.append_bytes(buffer.segments.read_bytes(first), 2)) for appender in (one, two)]
        for appender in (one, two):
            appender.sync()
        with buffer.database.transaction() as connection:
            assert commit_moves(connection, moves[:1]) == {first.segment_id}
        with buffer.database.transaction() as connection:
            assert commit_moves(connection, moves[1:]) == set()
    assert addresses(buffer)[first.segment_id].uri == moves[0].copy.uri
    assert addresses(buffer)[second.segment_id] == second


def test_segments_do_not_move_to_a_file_that_was_closed(buffer: Buffer, run: Run) -> None:
    write_files(buffer, run, 1)
    first, second = addresses(buffer).values()
    with contextlib.closing(buffer.segments.appender()) as appender:
        for origin, closed in ((first, False), (second, True)):
            move = Move(origin, appender.append_bytes(buffer.segments.read_bytes(origin), 2))
            appender.sync()
            if closed:
                close_files(buffer.database, [move.copy.uri])
                with pytest.raises(SegmentFileClosedError), buffer.database.transaction() as connection:
                    commit_moves(connection, [move])
            else:
                with buffer.database.transaction() as connection:
                    commit_moves(connection, [move])
    assert addresses(buffer)[second.segment_id] == second and list(verify(buffer)) == []


def test_a_live_writers_file_can_be_rewritten_on_demand(buffer: Buffer, run: Run) -> None:
    with buffer.writer(run) as writer:
        writer.insert(own_group(task_key="a"))
        (name,) = on_disk(buffer)
        report = Compactor(buffer.database, buffer.segments).rewrite([name])
        assert report is not None and report.files_merged == 1
        writer.insert(own_group(task_key="b"))
    assert name not in {address.uri for address in addresses(buffer).values()}
    assert len(arrays(buffer)) == 4 and list(verify(buffer)) == []


def test_a_damaged_segment_is_left_where_it_is_and_reported(buffer: Buffer, run: Run) -> None:
    write_files(buffer, run, 2)
    address = addresses(buffer)[1]
    path = folder(buffer) / address.uri
    content = bytearray(path.read_bytes())
    content[address.offset_bytes + 100] ^= 1
    path.write_bytes(content)
    compactor = Compactor(buffer.database, buffer.segments, grace_s=0)
    report = compactor.run()
    assert report is not None and report.segments_moved == 3 and report.files_removed == 1
    assert len(report.damaged) == 1 and "segment 1 " in report.damaged[0]
    assert address.uri in on_disk(buffer) and addresses(buffer)[1] == address
    (problem,) = verify(buffer)
    assert "segment 1 " in problem and "experiences 1-2" in problem
    again = compactor.run()
    assert again is not None and again.damaged == [], "reported once"


def test_one_compaction_works_at_a_time(buffer: Buffer, run: Run) -> None:
    write_files(buffer, run, 2)
    inner: list[CompactionReport | None] = []

    def on_step(step: str) -> None:
        inner.append(Compactor(buffer.database, buffer.segments, grace_s=0).run())

    compact(buffer, on_step=on_step)
    assert set(inner) == {None}
    assert list(verify(buffer)) == []


def test_the_background_merges_what_a_run_leaves_and_outlives_errors(buffer: Buffer, run: Run) -> None:
    write_files(buffer, run, 9)
    with BackgroundCompaction(buffer.database, buffer.segments, grace_s=0, every_s=0.01) as background:
        wait_until(lambda: background.progress.get("files_removed", 0) >= 9)
        folder(buffer).rename(folder(buffer).with_name("away"))
        wait_until(lambda: "last_compaction_error" in background.progress)
        folder(buffer).with_name("away").rename(folder(buffer))
        write_files(buffer, run, 8, start=20)
        wait_until(lambda: background.progress["files_removed"] >= 9 + 8)
    assert list(verify(buffer)) == [] and len(arrays(buffer)) == 36 + 32


def compact_up_to(config: BufferConfig, step: str) -> None:
    """Compact, and end this process at a step as kill -9 does."""

    def on_step(reached: str) -> None:
        if reached == step:
            os.kill(os.getpid(), signal.SIGKILL)

    with rftdata.open(config) as buffer:
        Compactor(buffer.database, buffer.segments, grace_s=0, on_step=on_step).run()


@pytest.mark.parametrize("step", STEPS)
def test_a_compaction_killed_at_any_step_loses_nothing_and_the_next_one_cleans_up(
    buffer: Buffer, run: Run, step: str
) -> None:
    write_files(buffer, run, 1 if step == "cut" else 2)  # one file is not merged
    with (folder(buffer) / addresses(buffer)[1].uri).open("ab") as file:
        file.write(b"beyond the committed length")
    orphan(buffer).write_bytes(b"12345")
    contents = arrays(buffer)
    with PreloadedCall(compact_up_to, buffer.config, step, stderr=subprocess.PIPE, text=True) as process:
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGKILL, errors
    assert list(verify(buffer)) == [] and arrays(buffer) == contents
    write_files(buffer, run, 1, start=7)
    compact(buffer)
    compact(buffer)
    assert list(verify(buffer)) == [] and arrays(buffer)[: len(contents)] == contents
    assert on_disk(buffer) == {address.uri for address in addresses(buffer).values()}
    assert len(on_disk(buffer)) == 1


def test_rft_db_compact_states_what_it_did(
    buffer: Buffer, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RFT_SEGMENTS", str(folder(buffer)))
    write_files(buffer, run, 3)
    assert run_command(["db", "compact", "--json", "--buffer", buffer.config.uri]) == 0
    assert json.loads(capsys.readouterr().out)["files_merged"] == 0, "an hour's grace by default"
    assert run_command(["db", "compact", "--grace", "0", "--json", "--buffer", buffer.config.uri]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["files_merged"], report["files_removed"], report["files_waiting"]) == (3, 3, 0)
    assert run_command(["db", "compact", "--buffer", buffer.config.uri]) == 0
    assert "0 files merged" in capsys.readouterr().out
