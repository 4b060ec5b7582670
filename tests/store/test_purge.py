"""Purging: text and arrays are gone for good, everything else still tells what happened."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import psycopg
import pytest

import rftdata
from rftcore.cli import run_command
from rftdata import Buffer, Group, Rollout, exchange, labels, purge, retention, segments, selection
from rftdata.arrays import emptied, encode, purged_rows
from rftdata.compaction import Compactor
from rftdata.config import RetentionConfig
from rftdata.database import Row
from rftdata.errors import (
    BufferUnavailableError,
    DiskFullError,
    PurgedError,
    QueryError,
    RftError,
    SelectionChangedError,
)
from rftdata.posix_segments import PosixSegmentStore
from rftdata.segments import SegmentAddress
from tests.store_roles import Roles, own_group, tokens

SECRET = "the patient's name is Mallory"
# As bytes in a segment, and as text in a table.
MARK = np.frombuffer(SECRET.encode(), dtype=np.uint8)


def secret_group(task_key: str, rewards: tuple[float, ...] = (0.0, 1.0)) -> Group:
    rollouts = [
        Rollout(i, "ok", r, [tokens(
            r, prompt=SECRET, response=f"{SECRET}!", messages=[{"role": "user", "content": SECRET}], arrays={"image": MARK},
            metrics={"entropy": 0.5, "said": SECRET}, reward_parts={"accuracy": r},
        )])
        for i, r in enumerate(rewards)
    ]  # fmt: skip
    return Group(rollouts, source="import", taskset="mine", task_key=task_key, payload={"question": SECRET})


@pytest.fixture
def stored(buffer: Buffer) -> Buffer:
    """A run without stages: one group with the secret, and one without, in one segment."""
    buffer.create_run(name="r", config={}, seed=1, steps=3, pipeline_version="none")
    with buffer.writer("r") as writer:
        writer.insert(secret_group("secret"), own_group(task_key="plain"))
    return buffer


def all_ids(buffer: Buffer) -> list[int]:
    found: list[int] = buffer.sql("SELECT experience_id FROM rft.experience ORDER BY 1")["experience_id"].to_pylist()
    return found


def erase_at_once(buffer: Buffer) -> None:
    with buffer.database.connection() as connection:
        connection.execute("UPDATE rft.retired_range SET retired_at = retired_at - interval '1 day'")
    purge.erase(buffer)


def files_hold(buffer: Buffer, text: bytes) -> list[str]:
    folder = Path(str(buffer.config.segments))
    return [file.name for file in sorted(folder.iterdir()) if text in file.read_bytes()]


def test_text_and_arrays_are_gone_and_the_rest_stays(stored: Buffer) -> None:
    before = stored.read_arrays(all_ids(stored)[2:], ["token_ids", "behavior_logprobs", "loss_mask", "policy_spans"])
    assert files_hold(stored, SECRET.encode()) != []
    done = purge.purge(stored, "task_key = 'secret'", reason="asked to", author="ada")
    assert (done.num_experiences, done.num_tasks) == (2, 1)
    rows = stored.sql("SELECT * FROM rft.experience ORDER BY experience_id").to_pylist()
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
    assert list(stored.verify()) == []
    audit = stored.sql("SELECT * FROM rft.v_purged ORDER BY experience_id").to_pylist()
    assert [(row["experience_id"], row["reason"], row["author"], row["selection"]) for row in audit] == [
        (i, "asked to", "ada", "task_key = 'secret'") for i in all_ids(stored)[:2]
    ]


def test_with_its_tasks_no_row_of_the_database_holds_the_text(stored: Buffer) -> None:
    task = stored.sql("SELECT task_id FROM rft.task WHERE task_key = 'secret'")["task_id"].to_pylist()
    for statement in (
        "UPDATE rft.task SET source_payload = payload, source_features = payload WHERE task_id = %s",
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
    purge.vacuum(stored, rewrite=True)
    tables = stored.sql(
        "SELECT relname::text AS t FROM pg_class WHERE relnamespace = 'rft'::regnamespace AND relkind = 'r'"
    )
    for table in tables["t"].to_pylist():
        found = stored.sql(f"SELECT count(*) AS n FROM rft.{table} x WHERE x::text LIKE '%Mallory%'")
        assert found["n"].to_pylist() == [0], table
    assert stored.sql("SELECT status::text AS s FROM rft.task WHERE task_key = 'secret'")["s"].to_pylist() == [
        "excluded"
    ]


def test_rewritten_tables_hold_no_byte_of_it_on_disk(stored: Buffer) -> None:
    def on_disk() -> bool:
        paths = stored.sql(
            "SELECT current_setting('data_directory') || '/' || pg_relation_filepath(c.oid) AS p FROM pg_class c"
            " WHERE c.oid IN ('rft.experience'::regclass, (SELECT reltoastrelid FROM pg_class WHERE oid = 'rft.experience'::regclass))"
        )["p"].to_pylist()
        stored.sql("CHECKPOINT")
        return any(SECRET.encode() in Path(path).read_bytes() for path in paths)

    assert on_disk()
    purge.purge(stored, "task_key = 'secret'", reason="asked to", author="ada")
    purge.vacuum(stored, rewrite=True)
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
        ["query", "--buffer", stored.config.uri, "--json", "select prompt, len(token_ids) as n from experience"]
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
        assert SECRET in stored.sql("SELECT prompt FROM rft.experience ORDER BY 1 DESC")["prompt"].to_pylist()
        attempt.record_step(1, batch, wait_seconds=0, train_seconds=0, publish_seconds=0, metrics={})
        purge.purge(stored, f"experience_id = {drawn[0]}", reason="x", author="ada")
    # No checkpoint was committed: a new attempt would draw step 1 again.
    labels.set_rewards(stored, {drawn[0]: 0.5, drawn[1]: 0.25}, author="bo")
    with stored.attempt("r") as attempt:
        again = attempt.draw(1, 1, timeout_s=5)
        assert again is not None and not set(again.rows["experience_id"].to_pylist()) & set(drawn)
        assert attempt.draw(2, 1, timeout_s=0.1) is None


def test_a_step_that_a_checkpoint_covers_is_done_though_nobody_recorded_it(stored: Buffer) -> None:
    with stored.attempt("r") as attempt:
        batch = attempt.draw(1, 1, timeout_s=5)
        assert batch is not None
        attempt.commit_checkpoint(1, "checkpoint-1")
        ids = batch.rows["experience_id"].to_pylist()
        assert purge.purge(stored, f"experience_id = {ids[0]}", reason="x", author="ada").num_experiences == 1


def test_a_batch_in_hand_says_which_row_was_purged(stored: Buffer) -> None:
    with stored.attempt("r") as attempt:
        batch = attempt.draw(1, 1, timeout_s=5)
        assert batch is not None
        attempt.record_step(1, batch, wait_seconds=0, train_seconds=0, publish_seconds=0, metrics={})
        purge.purge(stored, "task_key = 'secret'", reason="x", author="ada")
        with pytest.raises(PurgedError, match="was purged after step 1 drew it"):
            batch.packed("token_ids")


def test_a_reader_elsewhere_follows_the_segment_before_its_old_bytes_go(
    stored: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rftdata.open(stored.config) as elsewhere:
        plain = all_ids(stored)[2:]
        before = elsewhere.read_arrays(plain, ["token_ids"])
        purge.purge(stored, "task_key = 'secret'", reason="x", author="ada")
        assert elsewhere.read_arrays(plain, ["token_ids"]) == before  # the old bytes are still there
        monkeypatch.setattr("rftdata.batch.ADDRESS_MAX_AGE_S", 0.0)
        erase_at_once(stored)
        assert elsewhere.read_arrays(plain, ["token_ids"]) == before
        with pytest.raises(PurgedError):
            elsewhere.read_arrays(all_ids(stored)[:1], ["token_ids"])
    assert purge.GRACE_S >= 5 * segments.ADDRESS_MAX_AGE_S


def test_old_bytes_wait_for_readers_unless_nobody_else_is_there(stored: Buffer) -> None:
    purge.purge(stored, "task_key = 'secret'", reason="x", author="ada")
    waiting = purge.erase(stored)
    assert waiting.num_ranges == 0 and waiting.num_ranges_left == 1
    with (
        psycopg.connect(stored.config.uri, application_name="a notebook"),
        pytest.raises(BufferUnavailableError, match=r"a notebook.*leave --now away"),
    ):
        purge.erase(stored, now=True)
    assert files_hold(stored, SECRET.encode()) != []
    done = purge.erase(stored, now=True)
    assert (done.num_ranges, done.num_ranges_left) == (1, 0) and done.num_bytes > len(MARK)
    assert files_hold(stored, SECRET.encode()) == []


def test_a_second_purge_of_a_segment_leaves_nothing_either(stored: Buffer) -> None:
    first, second, *rest = all_ids(stored)
    purge.purge(stored, f"experience_id = {first}", reason="one", author="ada")
    purge.purge(stored, f"experience_id IN ({first}, {second})", reason="two", author="ada")
    erase_at_once(stored)
    assert files_hold(stored, SECRET.encode()) == []
    assert list(stored.verify()) == []
    assert stored.sql("SELECT num_experiences FROM rft.purge ORDER BY 1")["num_experiences"].to_pylist() == [1, 1]
    assert stored.read_arrays(rest, ["token_ids"]).num_rows == 2
    again = purge.purge(stored, f"experience_id = {first}", reason="three", author="ada")
    assert (again.purge_id, again.num_experiences, again.num_purged_before) == (None, 0, 1)


def copy_group(buffer: Buffer, task_key: str) -> list[int]:
    """Copies of a group's experiences in another run that share the arrays."""
    run = buffer.create_run(name="copy", config={}, seed=1, steps=3, pipeline_version="none")
    with buffer.writer(run) as writer:
        writer.insert(own_group(task_key="twin"))
    with buffer.database.transaction() as connection:
        connection.execute("SET LOCAL rft.purge = 'the test makes copies of them'")
        connection.execute(
            "UPDATE rft.experience e SET segment_id = o.segment_id, segment_row = o.segment_row, prompt = o.prompt"
            " FROM rft.v_experience o, rft.v_experience n WHERE n.experience_id = e.experience_id AND e.run_id = %s"
            " AND o.task_key = %s AND o.rollout_index = n.rollout_index",
            [run["run_id"], task_key],
        )
    found: list[int] = buffer.sql(
        "SELECT experience_id FROM rft.experience WHERE run_id = %s ORDER BY 1", [run["run_id"]]
    )["experience_id"].to_pylist()
    return found


def test_copies_that_share_arrays_go_with_them_and_retention_spares_what_is_copied(stored: Buffer) -> None:
    copies = copy_group(stored, "secret")
    ids = all_ids(stored)
    assert retained(stored, max_experiences=len(copies)) == ({"max_experiences 2": 2}, 0)
    assert kept(stored) == [*ids[:2], *copies]  # the plain group alone is gone
    assert purge.purge(stored, "task_key = 'secret'", reason="x", author="ada").num_experiences == 4
    assert kept(stored) == []
    assert stored.sql("SELECT DISTINCT prompt FROM rft.experience")["prompt"].to_pylist() == ["[purged]"]
    assert list(stored.verify()) == []


def test_a_fork_is_purged_with_its_parent(stored: Buffer) -> None:
    fork = stored.fork("r", name="fork", step=0, keep_rollouts=True)
    ids = all_ids(stored)
    assert len(ids) == 8
    assert purge.purge(stored, "task_key = 'secret' AND run = 'r'", reason="x", author="ada").num_experiences == 4
    assert len(kept(stored)) == 4
    assert stored.sql("SELECT count(*) AS n FROM rft.experience WHERE prompt LIKE '%Mallory%'")["n"].to_pylist() == [0]
    again = stored.fork("r", name="again", step=0, keep_rollouts=True)
    copied = "SELECT count(*) AS n FROM rft.experience WHERE run_id = %s"
    assert [stored.sql(copied, [run["run_id"]])["n"][0].as_py() for run in (fork, again)] == [4, 2]
    purge.erase(stored, now=True)
    assert files_hold(stored, SECRET.encode()) == []
    assert list(stored.verify()) == []


def test_writers_go_on_in_the_file_that_is_purged_from(stored: Buffer) -> None:
    with stored.writer("r") as writer:
        writer.insert(secret_group("early"))
        purge.purge(stored, "prompt LIKE '%Mallory%'", reason="x", author="ada")
        writer.insert(own_group(task_key="late"))
        erase_at_once(stored)
        writer.insert(own_group(task_key="later"))
    assert files_hold(stored, SECRET.encode()) == []
    assert list(stored.verify()) == []
    assert stored.read_arrays(all_ids(stored)[-4:], ["token_ids"])["token_ids"].to_pylist() == [[5, 6, 7, 8, 9]] * 4


def test_a_disk_with_only_its_reserve_left_can_be_purged(stored: Buffer) -> None:
    assert isinstance(stored.segments, PosixSegmentStore)
    stored.segments.min_free_bytes = 2**62
    with stored.writer("r") as writer, pytest.raises(DiskFullError):
        writer.insert(own_group(task_key="late"))
    assert purge.purge(stored, "task_key = 'secret'", reason="x", author="ada").num_experiences == 2


def test_compaction_and_purge_take_turns_and_leave_no_copy_of_what_is_gone(stored: Buffer) -> None:
    with stored.writer("r") as writer:
        writer.insert(secret_group("other"))  # a second file
    purging = Thread(
        target=lambda: purge.purge(stored, "prompt LIKE '%Mallory%'", reason="x", author="ada"), daemon=True
    )
    waited: list[bool] = []

    def note(step: str) -> None:
        if step == "sync":  # the copies are written, and no row names them yet
            purging.start()
            waiting = "SELECT 1 AS x FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            while not stored.sql(waiting).num_rows:
                time.sleep(0.01)
        if step == "moved" and not waited:
            waited.append(purging.is_alive() and kept(stored) == all_ids(stored))

    report = Compactor(stored.database, stored.segments, grace_s=0.0, note=note_once(note)).run()
    purging.join()
    assert waited == [True] and report is not None and report.segments_moved == 2
    assert files_hold(stored, SECRET.encode()) != []
    purge.erase(stored, now=True)
    assert files_hold(stored, SECRET.encode()) == []
    assert list(stored.verify()) == []


def note_once(note: Callable[[str], None]) -> Callable[[str], None]:
    """Tells of the first time of every step only."""
    told: set[str] = set()

    def first(step: str) -> None:
        if step not in told:
            told.add(step)
            note(step)

    return first


def test_files_that_compaction_retired_before_go_with_what_was_purged_and_not_under_a_reader(stored: Buffer) -> None:
    with stored.writer("r") as writer:
        writer.insert(own_group(task_key="other"))

    def stop(step: str) -> None:
        if step == "remove":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Compactor(stored.database, stored.segments, grace_s=0.0, note=stop).run()
    purge.purge(stored, "task_key = 'secret'", reason="x", author="ada")
    with rftdata.open(stored.config) as elsewhere:
        plain = all_ids(stored)[2:]
        before = elsewhere.read_arrays(plain, ["token_ids"])
        report = Compactor(stored.database, stored.segments, grace_s=0.0).run()
        assert report is not None and report.files_removed == 0 and report.files_waiting > 0
        assert elsewhere.read_arrays(plain, ["token_ids"]) == before
    assert files_hold(stored, SECRET.encode()) != []
    purge.erase(stored, now=True)
    assert files_hold(stored, SECRET.encode()) == []
    assert list(stored.verify()) == []


def selecting(buffer: Buffer, sql: str, name: str) -> Row:
    return buffer.create_run(
        name=name, config={}, seed=1, steps=9, pipeline_version="none", mode="train",
        selected=selection.select(buffer.database, sql),
    )  # fmt: skip


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
    with pytest.raises(QueryError, match=rf"experience {drawn} was purged.*leave such rows out"):
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


def test_killed_in_the_middle_every_experience_is_whole_or_purged_and_the_same_command_goes_on(stored: Buffer) -> None:
    with stored.writer("r") as writer:
        for i in range(60):
            writer.insert(secret_group(f"s{i}"))  # a segment each
    script = (
        "import sys, rftdata; from rftdata import purge; from rftdata.config import BufferConfig; purge._CHUNK_SEGMENTS = 1\n"
        "buffer = rftdata.open(BufferConfig(uri=sys.argv[1], segments=sys.argv[2], min_free_bytes=0))\n"
        "purge.purge(buffer, \"prompt LIKE '%Mallory%'\", reason='x', author='ada')"
    )
    process = subprocess.Popen([sys.executable, "-c", script, stored.config.uri, str(stored.config.segments)])
    while not stored.sql("SELECT 1 AS x FROM rft.purged_experience LIMIT 1").num_rows:
        assert process.poll() is None
        time.sleep(0.005)
    process.kill()
    process.wait()
    rows = stored.sql(
        "SELECT e.experience_id, e.prompt, x.experience_id IS NOT NULL AS purged FROM rft.experience e"
        " LEFT JOIN rft.purged_experience x USING (experience_id)"
    ).to_pylist()
    assert 0 < sum(row["purged"] for row in rows) < 122
    assert all((row["prompt"] == "[purged]") == row["purged"] for row in rows)
    assert list(stored.verify()) == []
    whole = [row["experience_id"] for row in rows if not row["purged"]]
    assert stored.read_arrays(whole, ["token_ids"]).num_rows == len(whole)
    assert purge.purge(stored, "prompt LIKE '%Mallory%'", reason="x", author="ada").num_experiences == len(whole) - 2
    erase_at_once(stored)
    assert files_hold(stored, SECRET.encode()) == []
    finished = stored.sql("SELECT finished_at IS NOT NULL AS f FROM rft.purge ORDER BY purge_id")["f"].to_pylist()
    assert finished == [False, True]


def test_a_relabel_meanwhile_is_no_deadlock_and_facts_stay_facts(stored: Buffer) -> None:
    ids = all_ids(stored)
    thread = Thread(
        target=lambda: [labels.set_rewards(stored, dict.fromkeys(ids, x / 10), author="bo") for x in range(10)]
    )
    thread.start()
    purge.purge(stored, "task_key = 'secret'", reason="x", author="ada")
    thread.join()
    assert set(stored.sql("SELECT reward FROM rft.experience")["reward"].to_pylist()) == {0.9}
    for statement in (
        "UPDATE rft.experience SET prompt = 'x'",
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


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--where", "true"], "--where SQL --reason TEXT"),
        (["--reason", "x"], "--where SQL --reason TEXT"),
        (["--where", "true", "--reason", " "], "needs a reason"),
        (["--where", "rewad = 1", "--reason", "x"], 'column "rewad" does not exist'),
        (["--where", "reward = 99", "--reason", "x"], "holds for no experience"),
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
    read = store.read(SegmentAddress(1, place.uri, place.offset_bytes, place.length_bytes, place.checksum), verify=True)
    assert read == left and purged_rows(read) == {0, 2}


def retained(buffer: Buffer, **rules: Any) -> tuple[dict[str, int], int]:
    done = retention.apply(buffer, RetentionConfig.model_validate(rules), author="ada")
    return {text: part.num_experiences for text, part in done.purged.items()}, done.num_protected


@pytest.fixture
def aged(buffer: Buffer) -> Buffer:
    """A finished run of five groups of two, the oldest ten days old, the newest six, in two tasksets; the second oldest is labelled."""
    run = buffer.create_run(name="r", config={}, seed=1, steps=3, pipeline_version="none")
    for i in range(5):
        group = own_group(task_key=str(i))
        group.taskset = "odd" if i % 2 else "even"
        with buffer.writer(run) as writer:
            writer.insert(group)
    with buffer.database.transaction() as connection:
        connection.execute("SET LOCAL rft.purge = 'the test makes them old'")
        connection.execute(
            "UPDATE rft.experience SET created_at = now() - (11 - (experience_id + 1) / 2) * interval '1 day'"
        )
    buffer.sql("UPDATE rft.run SET status = 'finished'")
    labels.set_rewards(buffer, {3: 0.5}, author="bo")
    buffer.sql("UPDATE rft.rollout_group SET status = 'ready'")
    return buffer


def kept(buffer: Buffer) -> list[int]:
    found: list[int] = buffer.sql(
        "SELECT experience_id FROM rft.experience WHERE experience_id NOT IN (SELECT experience_id FROM rft.v_purged) ORDER BY 1"
    )["experience_id"].to_pylist()
    return found


def test_retention_by_age_keeps_what_is_labelled(aged: Buffer) -> None:
    assert retained(aged, max_age_days=7.5) == ({"max_age_days 7.5": 4}, 2)
    assert kept(aged) == [3, 4, 7, 8, 9, 10]
    assert aged.sql("SELECT DISTINCT kind::text AS k, reason FROM rft.v_purged").to_pylist() == [
        {"k": "retention", "reason": "retention: max_age_days 7.5"}
    ]
    assert retained(aged, max_age_days=7.5) == ({}, 2)
    assert retained(aged, max_age_days=7.5, keep_labelled=False) == ({"max_age_days 7.5": 2}, 0)


def test_retention_by_number_and_by_size_keeps_the_newest(aged: Buffer) -> None:
    assert retained(aged, max_experiences=7, keep_labelled=False) == ({"max_experiences 7": 4}, 0)
    assert kept(aged) == [5, 6, 7, 8, 9, 10]
    sizes = aged.database.fetch("retention_groups", keep_labelled=True, starting_run_id=None)
    assert retained(aged, max_bytes=int(sizes[0]["num_bytes"]))[0] == {f"max_bytes {sizes[0]['num_bytes']}": 4}
    assert kept(aged) == [9, 10]


def test_retention_spares_stored_selections_and_what_people_compared(aged: Buffer) -> None:
    run = selecting(aged, "select experience_id from rft.experience where experience_id = 1", "selecting")
    aged.sql("INSERT INTO rft.preference_pair (chosen_id, rejected_id) VALUES (6, 5)")
    assert retained(aged, max_experiences=0) == ({"max_experiences 0": 4}, 6)
    assert kept(aged) == [1, 2, 3, 4, 5, 6]
    aged.sql("UPDATE rft.run SET status = 'finished' WHERE run_id = %s", [run["run_id"]])
    assert retained(aged, max_experiences=0) == ({"max_experiences 0": 2}, 4)
    assert retained(aged, max_experiences=0, keep_labelled=False) == ({"max_experiences 0": 4}, 0)


def test_retention_of_one_taskset_leaves_the_others(aged: Buffer) -> None:
    assert retained(aged, tasksets={"even": {"max_experiences": 2}}) == ({"taskset even: max_experiences 2": 4}, 0)
    assert kept(aged) == [3, 4, 7, 8, 9, 10]


def test_retention_spares_what_may_still_be_trained_on(buffer: Buffer) -> None:
    roles = Roles(buffer, steps=3)
    with roles.attempt() as attempt:
        roles.work()
        roles.train(attempt, 1)
        attempt.commit_checkpoint(1, "/c/1")
        roles.work()
        roles.train(attempt, 2)
        roles.work()
        # Step 1 is in a checkpoint; step 2 is not, and step 3 is waiting.
        assert retained(buffer, max_experiences=0) == ({"max_experiences 0": 4}, 8)
    # The run was killed here: step 2 is drawn again, whole.
    with roles.attempt() as attempt:
        assert attempt.start_step == 1
        assert len(roles.train(attempt, 2)) == 2


def test_retention_spares_the_run_that_is_about_to_start(buffer: Buffer) -> None:
    runs = [
        buffer.create_run(name=name, config={}, seed=1, steps=3, pipeline_version="none", mode="train")
        for name in ("starts", "stored")
    ]
    for run in runs:
        with buffer.writer(run) as writer:
            writer.insert(own_group(task_key="a"), own_group(task_key="b"))
    rules = RetentionConfig(max_experiences=1)
    done = retention.apply(buffer, rules, author="ada", starting_run_id=runs[0]["run_id"])
    assert done.num_experiences == 4 and done.num_protected == 4
    assert kept(buffer) == [1, 2, 3, 4]
    assert retention.apply(buffer, rules, author="ada").num_experiences == 4


def test_retention_from_the_command_line(
    aged: Buffer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RFT_SEGMENTS", str(aged.config.segments))
    monkeypatch.setenv("RFT_BUFFER", aged.config.uri)
    assert run_command(["db", "retention"]) == 2
    assert "no retention rule" in capsys.readouterr().err
    assert run_command(["db", "retention", "--max-age-days", "-1"]) == 2
    assert "max_age_days" in capsys.readouterr().err
    assert run_command(["db", "retention", "--max-age-days", "7.5", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "4 experiences would be purged" in out and "2 over the limits stay" in out and len(kept(aged)) == 10
    aged.sql('UPDATE rft.run SET config = \'{"buffer": {"retention": {"max_age_days": 7.5}}}\'')
    assert run_command(["db", "retention", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["purged"]["max_age_days 7.5"]["num_experiences"] == 4 and len(kept(aged)) == 6


def test_a_run_that_starts_applies_the_rules_or_says_why_not(aged: Buffer, capsys: pytest.CaptureFixture[str]) -> None:
    from rftcore.launch.progress import LineView
    from rftcore.launch.supervisor import apply_retention

    view, run = LineView(), aged.find_run("r")
    apply_retention(None, aged, run, view)
    apply_retention(RetentionConfig(), aged, run, view)
    assert len(kept(aged)) == 10
    rules = RetentionConfig(max_age_days=7.5)
    apply_retention(rules, aged, run, view)
    assert "buffer.retention: 4 experiences purged" in capsys.readouterr().out and len(kept(aged)) == 6
    for file in Path(str(aged.config.segments)).iterdir():
        file.unlink()
    apply_retention(RetentionConfig(max_age_days=0.5), aged, run, view)
    assert "warning: buffer.retention is not applied: the folder of the segments" in capsys.readouterr().out
    assert len(kept(aged)) == 6
