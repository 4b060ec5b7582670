"""Purging: texts and arrays are removed permanently, and everything else stays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from threading import Thread

import numpy as np
import psycopg
import pytest

import rftdata
from rftcore.cli import run_command
from rftdata import Buffer, exchange, labels
from rftdata.errors import (
    BufferUnavailableError,
    DiskFullError,
    PurgedError,
    QueryError,
    RftError,
)
from rftdata.maintenance import erasure, purge
from rftdata.maintenance.verification import verify
from rftdata.segments import base
from rftdata.segments.base import SegmentAddress
from rftdata.segments.codec import emptied, encode, purged_rows
from rftdata.segments.posix import PosixSegmentStore
from rftdata.segments.reader import SegmentReader
from tests.support.secret_rows import MARK, SECRET, all_ids, erase_at_once, files_hold, secret_group, store_secret
from tests.support.store_roles import own_group, tokens
from tests.support.waiting import wait_until

WAITING = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


@pytest.fixture
def stored(buffer: Buffer) -> Buffer:
    return store_secret(buffer)


def test_text_and_arrays_are_removed_and_the_rest_stays(stored: Buffer) -> None:
    before = stored.read_arrays(all_ids(stored)[2:], ["token_ids", "behavior_logprobs", "loss_mask", "policy_spans"])
    assert files_hold(stored, SECRET.encode()) != []
    done = purge.purge(stored, "task_key = 'secret'", reason="asked to", author="ada")
    assert (done.num_experiences, done.num_tasks) == (2, 1)
    rows = stored.sql("SELECT * FROM rft.v_experience ORDER BY experience_id").to_pylist()
    assert [(row["prompt"], row["response"], row["messages"]) for row in rows[:2]] == [
        ("[purged]", "[purged]", None)
    ] * 2
    assert [(row["reward"], row["num_prompt_tokens"], row["num_response_tokens"]) for row in rows[:2]] == [
        (0, 3, 2),
        (1, 3, 2),
    ]
    assert [row["metrics"] for row in rows[:2]] == [{"entropy": 0.5}] * 2
    assert rows[2]["prompt"] == "1 + 1 ="
    assert stored.read_arrays(all_ids(stored)[2:], before.column_names[1:]) == before
    erase_at_once(stored)
    assert files_hold(stored, SECRET.encode()) == []
    assert list(verify(stored)) == []
    audit = stored.sql("SELECT * FROM rft.v_purged ORDER BY experience_id").to_pylist()
    assert [(row["experience_id"], row["reason"], row["author"], row["selection"]) for row in audit] == [
        (i, "asked to", "ada", "task_key = 'secret'") for i in all_ids(stored)[:2]
    ]


def test_with_its_tasks_no_row_of_the_database_holds_the_text(stored: Buffer) -> None:
    task = stored.sql("SELECT task_id FROM rft.task WHERE task_key = 'secret'")["task_id"].to_pylist()
    for statement in (
        "UPDATE rft.task SET source_payload = payload, source_features = payload, manual_features = payload WHERE task_id = %s",
        (
            "INSERT INTO rft.task_verdict (task_id, pipeline_version, kept, stage, reason, prompt, answer, features)"
            " SELECT task_id, 'p', false, 's', payload::text, payload::text, payload::text, payload FROM rft.task WHERE task_id = %s"
        ),
        (
            "INSERT INTO rft.task_score (task_id, score_key, stage, input_digest, scores) SELECT task_id, 'k', 's', 0, payload FROM rft.task"
            " WHERE task_id = %s"
        ),
        (
            "INSERT INTO rft.operator_run (pipeline_version, stage_index, stage, rows_in, rows_kept, rows_dropped, rows_created, seconds,"
            " error, taskset) SELECT 'p', 0, 's', 1, 0, 1, 0, 0, payload::text, taskset FROM rft.task WHERE task_id = %s"
        ),
    ):
        stored.sql(statement, task)
    purge.purge(stored, "task_key = 'secret'", reason="asked to", author="ada", tasks_too=True)
    erasure.vacuum(stored, rewrite=True)
    tables = stored.sql(
        "SELECT relname::text AS t FROM pg_class WHERE relnamespace = 'rft'::regnamespace AND relkind = 'r'"
    )
    for table in tables["t"].to_pylist():
        found = stored.sql(f"SELECT count(*) AS n FROM rft.{table} x WHERE x::text LIKE '%Mallory%'")
        assert found["n"].to_pylist() == [0], table
    assert stored.sql("SELECT status::text AS s FROM rft.task WHERE task_key = 'secret'")["s"].to_pylist() == [
        "excluded"
    ]


def test_with_tasks_what_the_purge_itself_changed_is_not_chosen(stored: Buffer) -> None:
    """The second experience of the group gets a reason why it is not trained on, since its sibling was purged."""
    done = purge.purge(
        stored,
        "task_key = 'secret' AND (reward = 0 OR dropped_because IS NOT NULL)",
        reason="asked to",
        author="ada",
        tasks_too=True,
    )
    assert done.num_experiences == 1
    rows = stored.sql("SELECT reward, response FROM rft.v_experience ORDER BY experience_id").to_pylist()[:2]
    assert [row["response"] == "[purged]" for row in rows] == [True, False]


def test_rewritten_tables_hold_no_byte_of_it_on_disk(stored: Buffer) -> None:
    def on_disk() -> bool:
        paths = stored.sql(
            "SELECT current_setting('data_directory') || '/' || pg_relation_filepath(c.oid) AS p FROM pg_class c"
            " JOIN pg_class t ON t.oid IN ('rft.experience'::regclass, 'rft.group_prompt'::regclass) AND c.oid IN (t.oid, t.reltoastrelid)"
        )["p"].to_pylist()
        stored.sql("CHECKPOINT")
        return any(SECRET.encode() in Path(path).read_bytes() for path in paths)

    assert on_disk()
    purge.purge(stored, "task_key = 'secret'", reason="asked to", author="ada")
    erasure.vacuum(stored, rewrite=True)
    assert not on_disk()


def test_every_reader_refuses_or_skips_purged_arrays(
    stored: Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = all_ids(stored)
    purge.purge(stored, "task_key = 'secret'", reason="asked to", author="ada")
    with pytest.raises(PurgedError, match=rf"arrays of experience {ids[0]} were purged"):
        stored.read_arrays(ids, ["token_ids"])
    table = stored.read_arrays(ids, ["token_ids"], purged="null")
    assert [value and len(value) for value in table["token_ids"].to_pylist()] == [None, None, 5, 5]
    done = exchange.export(stored, tmp_path / "a.jsonl")
    assert (done.num_experiences, done.num_purged, done.num_groups) == (2, 2, 1)
    assert SECRET not in (tmp_path / "a.jsonl").read_text()
    monkeypatch.setenv("RFT_SEGMENTS", str(stored.config.segments))
    code = run_command(
        [
            "query",
            "--buffer",
            stored.config.uri,
            "--json",
            "select prompt, len(token_ids) as n from experience order by experience_id",
        ]
    )
    assert code == 0
    assert [row["n"] for row in json.loads(capsys.readouterr().out)] == [None, None, 5, 5]
    with pytest.raises(QueryError, match="everything chosen was purged"):
        exchange.export(stored, tmp_path / "b.jsonl", where="task_key = 'secret'")
    assert not (tmp_path / "b.jsonl").exists()


def test_a_purged_group_is_never_drawn_not_even_after_a_label_or_a_crash(stored: Buffer) -> None:
    with stored.attempt("r") as attempt:
        batch = attempt.draw(1, 1, timeout_s=5)
        assert batch is not None and len(batch) == 2
        drawn = batch.rows["experience_id"].to_pylist()
        # While its arrays are being read it cannot be purged.
        with pytest.raises(RftError, match=r"is in the batch that step 1 of run 'r' trains on.*not purged"):
            purge.purge(stored, f"experience_id = {drawn[0]}", reason="x", author="ada")
        assert SECRET in stored.sql("SELECT prompt FROM rft.v_experience ORDER BY 1 DESC")["prompt"].to_pylist()
        attempt.record_step(1, batch, wait_seconds=0, train_seconds=0, publish_seconds=0, metrics={})
        purge.purge(stored, f"experience_id = {drawn[0]}", reason="x", author="ada")
    # No checkpoint was committed: a new attempt would draw step 1 again.
    labels.set_rewards(stored, {drawn[0]: 0.5, drawn[1]: 0.25}, author="bo")
    with stored.attempt("r") as attempt:
        again = attempt.draw(1, 1, timeout_s=5)
        assert again is not None and not set(again.rows["experience_id"].to_pylist()) & set(drawn)
        assert attempt.draw(2, 1, timeout_s=0.1) is None


def test_a_step_that_a_checkpoint_covers_is_done_though_it_was_not_recorded(stored: Buffer) -> None:
    with stored.attempt("r") as attempt:
        batch = attempt.draw(1, 1, timeout_s=5)
        assert batch is not None
        attempt.commit_checkpoint(1, "checkpoint-1")
        ids = batch.rows["experience_id"].to_pylist()
        assert purge.purge(stored, f"experience_id = {ids[0]}", reason="x", author="ada").num_experiences == 1


def test_a_batch_in_hand_states_which_row_was_purged(stored: Buffer) -> None:
    with stored.attempt("r") as attempt:
        batch = attempt.draw(1, 1, timeout_s=5)
        assert batch is not None
        attempt.record_step(1, batch, wait_seconds=0, train_seconds=0, publish_seconds=0, metrics={})
        purge.purge(stored, "task_key = 'secret'", reason="x", author="ada")
        with pytest.raises(PurgedError, match="was purged after step 1 drew it"):
            batch.packed("token_ids")


def test_a_reader_elsewhere_follows_the_segment_before_its_old_bytes_go(stored: Buffer) -> None:
    with rftdata.open(stored.config) as elsewhere, rftdata.open(stored.config) as later:
        later.reader = SegmentReader(later.database, later.segments, max_age_s=0.0)
        plain = all_ids(stored)[2:]
        before = elsewhere.read_arrays(plain, ["token_ids"])
        assert later.read_arrays(plain, ["token_ids"]) == before
        purge.purge(stored, "task_key = 'secret'", reason="x", author="ada")
        assert elsewhere.read_arrays(plain, ["token_ids"]) == before  # the old bytes are still there
        erase_at_once(stored)
        assert later.read_arrays(plain, ["token_ids"]) == before
        with pytest.raises(PurgedError):
            later.read_arrays(all_ids(stored)[:1], ["token_ids"])
    assert erasure.GRACE_S >= 5 * base.ADDRESS_MAX_AGE_S


def test_old_bytes_wait_for_readers_unless_there_are_none(stored: Buffer) -> None:
    purge.purge(stored, "task_key = 'secret'", reason="x", author="ada")
    waiting = erasure.erase(stored)
    assert waiting.num_ranges == 0 and waiting.num_ranges_left == 1
    with (
        psycopg.connect(stored.config.uri, application_name="a notebook"),
        pytest.raises(BufferUnavailableError, match=r"a notebook.*omit --now"),
    ):
        erasure.erase(stored, now=True)
    assert files_hold(stored, SECRET.encode()) != []
    done = erasure.erase(stored, now=True)
    assert (done.num_ranges, done.num_ranges_left) == (1, 0) and done.num_bytes > len(MARK)
    assert files_hold(stored, SECRET.encode()) == []


def test_a_second_purge_of_a_segment_leaves_nothing_either(stored: Buffer) -> None:
    first, second, *rest = all_ids(stored)
    purge.purge(stored, f"experience_id = {first}", reason="one", author="ada")
    purge.purge(stored, f"experience_id IN ({first}, {second})", reason="two", author="ada")
    erase_at_once(stored)
    assert files_hold(stored, SECRET.encode()) == []
    assert list(verify(stored)) == []
    assert stored.sql("SELECT num_experiences FROM rft.purge ORDER BY 1")["num_experiences"].to_pylist() == [1, 1]
    assert stored.read_arrays(rest, ["token_ids"]).num_rows == 2
    again = purge.purge(stored, f"experience_id = {first}", reason="three", author="ada")
    assert (again.purge_id, again.num_experiences, again.num_purged_before) == (None, 0, 1)


def test_a_disk_with_only_its_reserve_left_can_be_purged(stored: Buffer) -> None:
    assert isinstance(stored.segments, PosixSegmentStore)
    stored.segments.min_free_bytes = 2**62
    with stored.writer("r") as writer, pytest.raises(DiskFullError):
        writer.insert(own_group(task_key="late"))
    assert purge.purge(stored, "task_key = 'secret'", reason="x", author="ada").num_experiences == 2


def test_killed_in_the_middle_every_experience_is_whole_or_purged_and_the_same_command_continues(
    stored: Buffer,
) -> None:
    with stored.writer("r") as writer:
        for i in range(60):
            writer.insert(secret_group(f"s{i}"))  # a segment each
    script = (
        "import sys, rftdata; from rftdata.maintenance import purge; from rftdata.config import BufferConfig; purge._CHUNK_SEGMENTS = 1\n"
        "buffer = rftdata.open(BufferConfig(uri=sys.argv[1], segments=sys.argv[2], min_free_bytes=0))\n"
        "purge.purge(buffer, \"prompt LIKE '%Mallory%'\", reason='x', author='ada')"
    )
    with psycopg.connect(stored.config.uri) as other:
        # At this group it waits, after some others.
        other.execute("SELECT FROM rft.rollout_group WHERE group_id = 30 FOR UPDATE")
        process = subprocess.Popen([sys.executable, "-c", script, stored.config.uri, str(stored.config.segments)])
        try:
            wait_until(lambda: stored.sql(WAITING).num_rows, "the purge is in the middle", process=process)
        finally:
            process.kill()
            process.wait()
    rows = stored.sql(
        "SELECT e.experience_id, e.prompt, x.experience_id IS NOT NULL AS purged FROM rft.v_experience e"
        " LEFT JOIN rft.purged_experience x USING (experience_id)"
    ).to_pylist()
    assert 0 < sum(row["purged"] for row in rows) < 122
    assert all((row["prompt"] == "[purged]") == row["purged"] for row in rows)
    assert list(verify(stored)) == []
    whole = [row["experience_id"] for row in rows if not row["purged"]]
    assert stored.read_arrays(whole, ["token_ids"]).num_rows == len(whole)
    assert purge.purge(stored, "prompt LIKE '%Mallory%'", reason="x", author="ada").num_experiences == len(whole) - 2
    erase_at_once(stored)
    assert files_hold(stored, SECRET.encode()) == []
    finished = stored.sql("SELECT finished_at IS NOT NULL AS f FROM rft.purge ORDER BY purge_id")["f"].to_pylist()
    assert finished == [True]  # one purge, which the second command completed


def test_a_relabel_during_a_purge_causes_no_deadlock_and_changes_no_fact(stored: Buffer) -> None:
    ids = all_ids(stored)
    thread = Thread(
        target=lambda: [labels.set_rewards(stored, dict.fromkeys(ids, x / 10), author="bo") for x in range(10)]
    )
    thread.start()
    purge.purge(stored, "task_key = 'secret'", reason="x", author="ada")
    thread.join()
    assert set(stored.sql("SELECT reward FROM rft.experience")["reward"].to_pylist()) == {0.9}
    for statement in (
        "UPDATE rft.experience SET response = 'x'",
        "UPDATE rft.group_prompt SET prompt = 'x'",
        "DELETE FROM rft.group_prompt",
        "UPDATE rft.rollout SET error = 'x'",
        "DELETE FROM rft.experience",
    ):
        with pytest.raises(QueryError, match=r"holds facts.*rft purge"):
            stored.sql(statement)


def test_lineage_still_names_the_checkpoints(
    stored: Buffer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with stored.attempt("r") as attempt:
        batch = attempt.draw(1, 1, timeout_s=5)
        assert batch is not None
        attempt.record_step(1, batch, wait_seconds=0, train_seconds=0, publish_seconds=0, metrics={})
        attempt.commit_checkpoint(1, "/checkpoints/1")
    monkeypatch.setenv("RFT_SEGMENTS", str(stored.config.segments))
    monkeypatch.setenv("RFT_BUFFER", stored.config.uri)
    monkeypatch.setenv("RFT_AUTHOR", "ada")
    assert run_command(["purge", "--where", "task_key = 'secret'", "--reason", "the law"]) == 0
    out = capsys.readouterr().out
    assert "2 experiences purged (purge 1)" in out and "--with-tasks" in out and "wait until no reader" in out
    assert run_command(["lineage", str(all_ids(stored)[0])]) == 0
    out = capsys.readouterr().out
    assert "purged by ada on 20" in out and "the law" in out and "/checkpoints/1" in out
    assert run_command(["purge", "--erase", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["erased"]["num_ranges_left"] == 1
    assert run_command(["purge", "--erase", "--rewrite-tables"]) == 0
    assert "20 tables with texts were rewritten" in capsys.readouterr().out
    assert run_command(["purge", "--erase", "--rewrite-tables", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_tables_rewritten"] == 20


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--where", "true"], "--where SQL --reason TEXT"),
        (["--reason", "x"], "--where SQL --reason TEXT"),
        (["--where", "true", "--reason", " "], "needs a reason"),
        (["--where", "rewad = 1", "--reason", "x"], 'column "rewad" does not exist'),
        (["--where", "reward = 99", "--reason", "x"], "no experience meets the condition"),
        (["--where", "true", "--reason", "x", "--run", "s"], "no such run"),
        (["--where", "true", "--reason", "x", "--erase"], "--where SQL --reason TEXT"),
    ],
)
def test_bad_purges_are_refused_and_purge_nothing(
    stored: Buffer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], what: str
) -> None:
    monkeypatch.setenv("RFT_SEGMENTS", str(stored.config.segments))
    code = run_command(["purge", *arguments, "--buffer", stored.config.uri])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "") and what in captured.err
    assert stored.sql("SELECT count(*) AS n FROM rft.purge")["n"].to_pylist() == [0]


def test_emptied_batches_hold_nothing_of_the_rows(buffer: Buffer) -> None:
    wide = tokens(1.0, 7, arrays={"a": np.arange(6, dtype=np.int16).reshape(2, 3), "mark": MARK})
    odd = tokens(1.0, 8, arrays={"a": np.array(3, dtype=np.int16), "mark": MARK[::-1].copy()})
    batch = encode([wide, odd, tokens(0.0)])
    left = emptied(emptied(batch, [0]), [2])
    assert purged_rows(left) == {0, 2}
    for name in batch.schema.names:
        assert left.column(name)[1] == batch.column(name)[1]
        assert not left.column(name)[0].as_py() and not left.column(name)[2].as_py()
    assert left.schema.remove_metadata() == batch.schema
    store = buffer.segments
    appender = store.appender()
    place = appender.append(left)
    appender.sync()
    appender.close()
    assert files_hold(buffer, MARK.tobytes()) == []
    read = store.read(
        SegmentAddress(
            segment_id=1,
            uri=place.uri,
            offset_bytes=place.offset_bytes,
            length_bytes=place.length_bytes,
            checksum=place.checksum,
        ),
        verify=True,
    )
    assert read == left and purged_rows(read) == {0, 2}
