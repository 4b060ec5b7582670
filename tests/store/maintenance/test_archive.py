"""Archived runs: queries read Parquet files and the database together, nothing changes meanwhile, and restoring returns every byte."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import ml_dtypes
import numpy as np
import psycopg
import pyarrow.parquet as pq
import pytest

import rftdata
from rftcore.cli import run_command
from rftdata import exchange, failpoints, labels
from rftdata.attempts.stored_selection import select
from rftdata.config import BufferConfig
from rftdata.errors import ArchivedError, BufferUnavailableError, ConflictError, FencedError, QueryError, RftError
from rftdata.exchange.pairs import export_pairs
from rftdata.maintenance import archive as archiving
from rftdata.maintenance import archive_writing, backup, purge
from rftdata.maintenance.archive import archive
from rftdata.maintenance.restore_run import restore_run
from rftdata.maintenance.verification import verify
from rftdata.pipeline.queue import claim_sealed_groups, sample_groups
from rftdata.pipeline.records import Verdicts, concatenated, dropped, kept
from rftdata.pipeline.verdicts import commit_verdicts
from rftdata.pipeline.versions import replaying
from rftdata.query import archived
from rftdata.query import arrays as query_arrays
from rftdata.segments.compaction import Compactor
from tests.support.preloaded import PreloadedCall
from tests.support.secret_rows import secret_group
from tests.support.store_roles import Roles, own_group, tokens
from tests.support.waiting import PATIENCE_S, wait_until

RESPONSES = ["", "one, two", 'a "quoted"\nanswer', "Ünïcode 'single'", "\\N", "a\r\nb,,", "NULL"]
# Query, whether it reads what lies in the archive.
QUERIES = {
    "select * exclude (segment_id, segment_row) from experience order by experience_id": True,
    "select count(*) as n, sum(reward) as r, max(run) as run from experience": False,
    "select run, avg(len(token_ids)) as t, sum(list_sum(behavior_logprobs)) as p from experience group by run order by run": True,
    "select experience_id, token_rewards, teacher_logprobs from experience where token_rewards is not null order by 1": True,
    "select experience_id from experience where response = 'one, two' or metrics like '%7%' order by 1": True,
    "select experience_id, prompt from experience where run = 'old' and reward > 0 order by 1": True,
    "select e.experience_id, p.prompt from experience e join group_prompt p using (group_id) where length(e.response) > 3 order by all": True,
    "select group_id, response, reward from group_baseline order by 1": True,
    "select experience_id, score_key, scores from score order by 1, 2": True,
    "select state, dropped_by, count(*) as n from v_experience group by all order by all": False,
    "select experience_id, response, messages from v_experience order by 1": True,
}


def sequence(number: int) -> rftdata.Sequence:
    """Awkward values: texts of `RESPONSES`, arrays that only some rows have, of types that Arrow and Parquet lack, of any shape."""
    arrays: dict[str, Any] = {"response": np.arange(3, dtype=np.uint8)}  # the name of a column
    if number % 3:
        arrays["token_rewards"] = np.full(number % 5, number, np.float32)
    if number % 4 == 0:
        arrays["teacher_logprobs"] = np.full((2, 3), -number, ml_dtypes.bfloat16)
        arrays["image"] = np.full((number % 2 + 1, 2, 2), number % 250, np.uint8)
    return tokens(
        float(number % 2),
        prompt=f"prompt {number // 4}",
        response=RESPONSES[number % len(RESPONSES)],
        arrays=arrays,
        token_ids=list(range(5 + number % 7)),
        behavior_logprobs=list(np.linspace(-1, 0, 2 + number % 7)),
        metrics={"n": number},
        reward_parts={"accuracy": 0.1 * number},
        policy_spans=[(3, 1), (4, 2)] if number % 2 else [],
        messages=[{"role": "user", "content": f"prompt {number // 4}"}] if number % 5 == 0 else None,
    )


def fill(buffer: rftdata.Buffer, name: str, num_groups: int = 12) -> rftdata.Run:
    """A run with groups in several segments, verdicts, scores, labels, draws and a baseline, which has ended."""
    run = buffer.create_run(name=name, config={}, seed=1, steps=9, pipeline_version="p1")
    with buffer.attempt(run) as attempt:
        for step in (0, 1):
            attempt.publish(step, method="memory", uri=f"/weights/{step}", num_bytes=1, checksum="0")
    for first in range(0, num_groups, 4):
        with buffer.writer(run) as writer:
            for key in range(first, min(first + 4, num_groups)):
                rollouts = [rftdata.Rollout(i, "ok", float(i % 2), [sequence(4 * key + i)]) for i in range(4)]
                writer.insert(
                    rftdata.Group(
                        rollouts, source="import", taskset="sums", task_key=f"{name} {key}", payload={"answer": "7"}
                    )
                )
            writer.insert(secret_group(f"{name} secret {first}"))
    worker = buffer.database.fetch(
        "insert_worker", run_id=run.run_id, role="pipeline", host="here", pid=1, pid_space="", pid_started=0
    )[0]["worker_id"]
    batch = claim_sealed_groups(run, worker, count=100, lease_s=60)
    assert batch is not None
    table = batch.table.select(["experience_id", "group_id"])
    decided = concatenated([kept(table.slice(4)), dropped(table.slice(0, 4), "gate", "because")])
    commit_verdicts(run, worker, "p1", batch, Verdicts(decided))
    buffer.sql(
        "INSERT INTO rft.score (experience_id, score_key, stage, scores, error) SELECT experience_id, 'k', 'judge',"
        " jsonb_build_object('said', response, 'n', 0.1), NULLIF(response, '') FROM rft.experience WHERE run_id = %s",
        [run.run_id],
    )
    buffer.sql("UPDATE rft.worker SET stopped_at = clock_timestamp()")
    with buffer.attempt(run) as attempt:
        for step in (1, 2):
            attempt.draw(step, 2, ["token_ids"])
        attempt.commit_checkpoint(2, "c2")
    first = buffer.sql("SELECT min(experience_id) AS i FROM rft.experience WHERE run_id = %s", [run.run_id])["i"][
        0
    ].as_py()
    buffer.sql("UPDATE rft.experience SET reward = 0.25 WHERE experience_id = %s", [first + 30])
    purge.purge(buffer, f"experience_id = {first + 1}", reason="asked to", author="ada")
    run.end("finished", "done")
    return run


@pytest.fixture
def filled(buffer: rftdata.Buffer) -> rftdata.Buffer:
    fill(buffer, "old")
    fill(buffer, "live", num_groups=4)
    return buffer


def catalogue(buffer: rftdata.Buffer) -> dict[str, list[str]]:
    """Every row of every table as text; of segments without their address, which restoring changes, and without when something was archived."""
    names = buffer.sql(
        "SELECT relname::text AS t FROM pg_class WHERE relnamespace = 'rft'::regnamespace AND relkind = 'r'"
    )
    found = {}
    for name in names["t"].to_pylist():
        changing = {"segment": "{file_id,offset_bytes}", "buffer": "{archived_at}"}.get(name)
        row = f"to_jsonb(x) - '{changing}'::text[]" if changing else "x"
        if name not in ("segment_file", "lock"):
            found[name] = buffer.sql(f"SELECT ({row})::text AS r FROM rft.{name} x ORDER BY 1").to_pydict().get("r", [])
    return found


def arrays(buffer: rftdata.Buffer) -> dict[int, str]:
    """A digest of the bytes of every segment."""
    stored = ((address, num_rows) for address, num_rows in buffer.reader.all_addresses())
    return {a.segment_id: hashlib.sha256(buffer.segments.read_bytes(a).to_pybytes()).hexdigest() for a, _ in stored}


def answers(buffer: rftdata.Buffer, text: str) -> list[dict[str, Any]]:
    with buffer.query(text) as reader:
        rows: list[dict[str, Any]] = json.loads(json.dumps(reader.read_all().to_pylist(), default=str))
    return rows


def test_a_restored_run_equals_the_original_to_the_byte(filled: rftdata.Buffer) -> None:
    before, bytes_before = catalogue(filled), arrays(filled)
    done = archive(filled, "old", author="ada")
    assert (done.num_groups, done.num_experiences) == (15, 54)
    assert done.file_bytes == sum(file.stat().st_size for file in filled.archives.all_files())
    archived = catalogue(filled)
    assert archived != before and len(arrays(filled)) < len(bytes_before)
    for table in ("experience", "rollout", "verdict", "draw", "label", "rollout_group", "train_step", "run"):
        assert len(archived[table]) == len(before[table]), table
    assert not any("quoted" in row or "Mallory" in row for row in archived["score"] if "old" in row)
    restored = restore_run(filled, "old")
    assert (restored.num_experiences, restored.num_segments, restored.array_bytes) == (54, 15, done.array_bytes)
    assert catalogue(filled) == before
    assert arrays(filled) == bytes_before
    assert list(verify(filled)) == [] and filled.archives.all_files() == []
    with pytest.raises(QueryError, match="'old' is not archived"):
        restore_run(filled, "old")


def test_a_query_reads_the_archive_and_the_database_as_one(filled: rftdata.Buffer) -> None:
    before = {text: answers(filled, text) for text in QUERIES}
    assert all(before.values())
    archive(filled, "old", author="ada")
    for text, rows in before.items():
        assert answers(filled, text) == rows, text
    for file in filled.archives.all_files():
        file.unlink()
    for text, needs_files in QUERIES.items():
        if not needs_files:
            assert answers(filled, text) == before[text]
            continue
        with pytest.raises(RftError, match=r"archive file .* is missing"):
            answers(filled, text)
    archive(filled, "live", author="ada")
    with pytest.raises(
        QueryError, match=r"would read about [\d,]+ bytes, the last of them from experience \(18 rows\)"
    ):
        filled.query("select avg(len(token_ids)) from experience", run="live", limit_bytes=400)
    restore_run(filled, "live")
    live = "select experience_id, response, token_ids from experience order by 1"
    with filled.query(live, run="live") as reader:  # which needs no archive
        assert reader.read_all().num_rows == 18


def test_a_scan_reads_the_archive_and_the_database_as_one(
    filled: rftdata.Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs whose experiences alternate, in row groups of one segment. One row group at a time fits in memory."""
    parallel = [filled.create_run(name=name, config={}, seed=1, steps=9, pipeline_version="p1") for name in ("x", "y")]
    for key in range(3):
        for run in parallel:
            with filled.writer(run) as writer:
                rollouts = [rftdata.Rollout(i, "ok", 1.0, [sequence(4 * key + i)]) for i in range(4)]
                writer.insert(
                    rftdata.Group(rollouts, source="import", taskset="sums", task_key=f"{key}", payload={"answer": "7"})
                )
    fork = filled.fork("old", name="fork", step=0, keep_rollouts=True)
    for run in (*parallel, fork):
        run.end("finished", "done")
    monkeypatch.setattr(archive_writing, "_GROUP_BYTES", 1)
    monkeypatch.setattr(archived, "_HELD_BYTES", 1)
    monkeypatch.setattr(query_arrays, "_TOKENS_AT_ONCE", 50)
    columns = filled.sql("SELECT * FROM rft.v_experience LIMIT 1").column_names
    scans: list[dict[str, Any]] = [
        {"columns": [*columns, "token_ids", "loss_mask", "behavior_logprobs", "token_rewards", "teacher_logprobs"]},
        {"columns": ["teacher_logprobs", "reward"], "where": "reward > 0 AND taskset = 'sums'"},
        {"columns": ["token_ids", "experience_id"], "run": "x"},
        {"columns": ["response"], "share": (1, 2)},
        {"columns": ["experience_id", "reward", "state"]},
        {"columns": ["prompt"], "where": "false"},
    ]

    def scanned(**arguments: Any) -> str:
        with filled.scan(**arguments) as reader:
            return str([reader.schema, *reader.read_all().to_pylist()])

    before = [scanned(**arguments) for arguments in scans]
    for name in ("fork", "old", "x"):
        archive(filled, name, author="ada")
        assert [scanned(**arguments) for arguments in scans] == before, name
    for file in filled.archives.folder.glob("experience/*/*"):
        column, data = pq.ParquetFile(file).metadata.row_group(0).column(0), file.read_bytes()
        last = column.dictionary_page_offset + column.total_compressed_size - 1
        file.write_bytes(data[:last] + bytes([data[last] ^ 1]) + data[last + 1 :])
    with pytest.raises(QueryError, match="a file of an archived run is damaged"):
        scanned(**scans[0])
    for file in filled.archives.all_files():
        file.unlink()
    assert scanned(**scans[4]) == before[4]  # which needs no file
    with pytest.raises(RftError, match=r"archive file .* is missing"):
        filled.scan(["response"])


def test_other_programs_read_the_files_without_this_package(filled: rftdata.Buffer) -> None:
    expected = answers(
        filled,
        "select experience_id, run, prompt, response, reward, token_ids from experience where run = 'old' order by 1",
    )
    archive(filled, "old", author="ada")
    found = duckdb.sql(
        "SELECT experience_id, run, prompt, response, reward, token_ids FROM read_parquet($files, hive_partitioning = true, union_by_name = true)"
        " WHERE NOT purged ORDER BY 1",
        params={"files": str(filled.archives.folder / "experience" / "**" / "*.parquet")},
    ).fetchall()
    assert [tuple(row.values()) for row in expected if row["token_ids"] is not None] == found
    kept_as_bytes = duckdb.sql(
        "SELECT count(*), count(data) FROM read_parquet($files)",
        params={"files": str(filled.archives.folder / "segment" / "**" / "*.parquet")},
    ).fetchall()
    assert kept_as_bytes == [(15, 0)]


def interrupted(buffer: rftdata.Buffer, verb: str, failpoint: str) -> None:
    """Archive or restore the run `old` in another process, which is killed at a failpoint."""
    with PreloadedCall(move, buffer.config, verb, failpoint, stderr=subprocess.PIPE, text=True) as process:
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -9, errors


def move(config: BufferConfig, verb: str, failpoint: str) -> None:
    failpoints.arm(failpoint)
    with rftdata.open(config) as buffer:
        archive(buffer, "old", author="ada") if verb == "archive" else restore_run(buffer, "old")


def test_a_kill_at_any_point_loses_nothing_and_the_command_can_be_repeated(filled: rftdata.Buffer) -> None:
    points = [name for name in failpoints.FAILPOINTS if name.startswith(("archive.", "restore."))]
    assert len(points) == 8
    before, bytes_before = catalogue(filled), arrays(filled)
    questions = list(QUERIES)[::3]
    expected = [answers(filled, text) for text in questions]
    for point in points:
        verb, _, place = point.partition(".")
        if verb == "restore":
            archive(filled, "old", author="ada")
        interrupted(filled, verb, point)
        assert [answers(filled, text) for text in questions] == expected, point
        whole = (verb == "archive") == (place != "moved")
        if verb == "restore":
            whole = place in ("moved", "removed")
        assert (len(arrays(filled)) == len(bytes_before)) == whole, point
        findings = list(verify(filled))
        assert len(findings) == (0 if point in ("archive.moved", "restore.appended", "restore.moving") else 1), findings
        if point == "archive.written":  # given up in place of repeated
            assert restore_run(filled, "old").num_experiences == 0
        elif verb == "archive" and place != "moved":
            archive(filled, "old", author="ada")
        if point != "archive.written":
            restore_run(filled, "old")
        assert (catalogue(filled), arrays(filled)) == (before, bytes_before), point
        assert list(verify(filled)) == [] and filled.archives.all_files() == []


def test_an_archived_run_is_not_changed_and_what_needs_it_names_the_command(
    filled: rftdata.Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = filled.sql(
        "SELECT experience_id FROM rft.experience JOIN rft.run USING (run_id) WHERE name = 'old' ORDER BY 1"
    )["experience_id"].to_pylist()
    archive(filled, "old", author="ada")
    now = catalogue(filled)
    todo = r"rft restore-run old"
    refused = [
        lambda: archive(filled, "old", author="ada"),
        lambda: filled.read_arrays(ids[:2], ["token_ids"]),
        lambda: filled.attempt("old"),
        lambda: filled.rewind("old", 0),
        lambda: filled.fork("old", name="new", step=0, keep_rollouts=True),
        lambda: filled.writer("old").insert(own_group()),
        lambda: exchange.export(filled, tmp_path / "out.parquet", runs=["old"]),
        lambda: exchange.export(filled, tmp_path / "out.parquet"),
        lambda: purge.purge(filled, f"experience_id = {ids[3]}", reason="asked to", author="ada"),
        lambda: labels.set_rewards(filled, {ids[3]: 0.5}, author="ada"),
        lambda: select(filled.database, f"SELECT {ids[3]} AS experience_id", include_dropped=True),
        lambda: filled.sql("UPDATE rft.experience SET reward = 9 WHERE experience_id = %s", [ids[3]]),
        lambda: filled.find_run("old").continue_with({}, steps=10, pipeline_version="p1"),
        lambda: next(iter(replaying(filled.find_run("old"), "p2").gen)),
        lambda: sample_groups(filled.find_run("old"), 10, 1),
        lambda: export_pairs(filled.find_run("old"), tmp_path / "pairs.jsonl"),
    ]
    for request in refused:
        with pytest.raises(RftError, match=todo):
            request()
    assert catalogue(filled) == now and list(tmp_path.glob("*.parquet")) == []
    assert filled.sql(
        "SELECT prompt, response FROM rft.v_experience WHERE experience_id = %s", [ids[3]]
    ).to_pylist() == [dict.fromkeys(("prompt", "response"), "[archived: rft restore-run old]")]
    monkeypatch.setenv("RFT_SEGMENTS", str(filled.config.segments))
    assert run_command(["lineage", str(ids[30]), "--buffer", filled.config.uri]) == 0
    assert "archived with the run 'old'" in capsys.readouterr().out
    labels.set_rewards(filled, {max(ids) + 2: 0.5}, author="ada")  # of a live run


# What processes record about themselves, and what archiving, purging and administration write.
_NOT_OF_A_RUN = {
    "attempt_history",
    "endpoint_usage",
    "shared_device",
    "label_permission",
    "lock",
    "weight_receiver",
    "weight_receipt",
    "worker",
    "worker_span",
    "evaluation_answer",
    "archive",
    "archive_file",
    "archived_segment",
    "purged_experience",
    "selection",
}
COPY = """
INSERT INTO rft.{table} ({names}) SELECT {values}
FROM rft.{table} x CROSS JOIN LATERAL jsonb_populate_record(NULL::rft.{table},
    to_jsonb(x) || jsonb_build_object('is_newest', false, 'times_sampled', NULL, {changes})) r
WHERE x.{condition} LIMIT 1"""
OF_OLD = {
    "run_id": "run_id = 1",
    "group_id": "group_id IN (SELECT group_id FROM rft.rollout_group WHERE run_id = 1)",
    "experience_id": "experience_id IN (SELECT experience_id FROM rft.experience WHERE run_id = 1)",
    "attempt_id": "attempt_id IN (SELECT attempt_id FROM rft.run_attempt WHERE run_id = 1)",
}


def test_every_table_with_rows_of_a_run_refuses_those_of_an_archived_one(filled: rftdata.Buffer) -> None:
    tables = filled.sql(
        "SELECT c.relname::text AS name, array_agg(DISTINCT a.attname::text) FILTER (WHERE a.attgenerated = '') AS columns,"
        " bool_or(g.tgname IS NOT NULL) AS refuses,"
        " coalesce((SELECT array_agg(DISTINCT k.attname::text) FROM pg_index i JOIN pg_attribute k ON k.attrelid = c.oid AND k.attnum = ANY (i.indkey)"
        "  WHERE i.indrelid = c.oid AND i.indisunique AND k.atttypid IN ('bigint'::regtype, 'integer'::regtype)), '{}') AS keys"
        " FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped"
        " LEFT JOIN pg_trigger g ON g.tgrelid = c.oid AND g.tgname IN ('archived_' || c.relname || '_insert', c.relname || '_archived')"
        " WHERE c.relnamespace = 'rft'::regnamespace AND c.relkind = 'r' GROUP BY c.oid, c.relname"
    ).to_pylist()
    of_runs = {row["name"] for row in tables if OF_OLD.keys() & set(row["columns"])}
    assert of_runs - {row["name"] for row in tables if row["refuses"]} - {"run"} <= _NOT_OF_A_RUN
    archive(filled, "old", author="ada")
    copies = {}
    for row in tables:
        route = next((name for name in OF_OLD if name in row["columns"]), None)
        keys = sorted({*row["keys"]} - {route, "attempt_id"})
        if row["refuses"] and route and keys:
            changes = ", ".join(f"'{key}', x.{key} + 1000000" for key in keys)
            if filled.sql(f"SELECT 1 AS n FROM rft.{row['name']} WHERE {OF_OLD[route]} LIMIT 1").num_rows:
                copies[row["name"]] = COPY.format(
                    table=row["name"],
                    names=", ".join(row["columns"]),
                    values=", ".join(f"r.{name}" for name in row["columns"]),
                    changes=changes,
                    condition=OF_OLD[route],
                )
    assert {
        "experience",
        "rollout",
        "verdict",
        "draw",
        "task_observation",
        "checkpoint",
        "label",
    } <= copies.keys()
    for name, copy in copies.items():
        with pytest.raises(RftError, match=f"is archived: INSERT of rft.{name} is refused"):
            filled.sql(copy)
    assert list(verify(filled)) == []
    restore_run(filled, "old")
    filled.sql(copies["task_observation"])


@pytest.mark.parametrize(
    ("table", "statement"),
    [
        ("draw", f"DELETE FROM rft.draw WHERE {OF_OLD['attempt_id']}"),
        ("draw", f"UPDATE rft.draw SET times_sampled = NULL WHERE {OF_OLD['attempt_id']}"),
        ("batch", f"DELETE FROM rft.batch WHERE {OF_OLD['attempt_id']}"),
        ("verdict", f"UPDATE rft.verdict SET is_newest = false WHERE {OF_OLD['group_id']}"),
        ("rollout_group", f"UPDATE rft.rollout_group SET trainable = false WHERE {OF_OLD['run_id']}"),
        # The better answer is of a live run.
        (
            "preference_pair",
            "INSERT INTO rft.preference_pair (chosen_id, rejected_id) SELECT max(experience_id), 1 FROM rft.experience",
        ),
    ],
)
def test_verdicts_draws_and_pairs_of_an_archived_run_stay(filled: rftdata.Buffer, table: str, statement: str) -> None:
    archive(filled, "old", author="ada")
    now = catalogue(filled)
    with pytest.raises(RftError, match=f"is archived: (INSERT|UPDATE|DELETE) of rft.{table} is refused"):
        filled.sql(statement)
    assert catalogue(filled) == now


def test_archiving_ends_the_claims_of_lost_processes(buffer: rftdata.Buffer) -> None:
    roles = Roles(buffer)
    with roles.attempt():
        roles.plan()
    claimed = roles.claim()
    late = roles.result(claimed[0], [1.0] * claimed[0].group_size)
    roles.run.end("interrupted", "its machine was lost")
    buffer.sql("UPDATE rft.worker SET stopped_at = now()")
    archive(buffer, "roles", author="ada")
    assert buffer.sql("SELECT 1 AS n FROM rft.rollout_group WHERE status = 'claimed'").num_rows == 0
    now = catalogue(buffer)
    with buffer.writer(roles.run) as writer:
        with pytest.raises(ArchivedError):
            writer.insert(late)
        assert catalogue(buffer) == now and list(verify(buffer)) == []
        restore_run(buffer, "roles")
        with pytest.raises(FencedError):
            writer.insert(late)


def test_an_insert_that_began_before_archiving_is_in_the_archive_or_prevents_it(filled: rftdata.Buffer) -> None:
    waits = "SELECT 1 AS n FROM pg_locks WHERE relation = 'rft.archive'::regclass AND NOT granted"
    with ThreadPoolExecutor() as pool:
        with filled.database.transaction() as connection:
            connection.execute(
                "INSERT INTO rft.score (experience_id, score_key, stage, scores) VALUES (2, 'late', 'judge', '{}')"
            )
            command = pool.submit(archive, filled, "old", author="ada")
            wait_until(lambda: filled.sql(waits).num_rows or command.done())
        with pytest.raises(ConflictError, match="rows of the run 'old' changed while its archive was written"):
            command.result(PATIENCE_S)
    assert list(verify(filled)) == [] and filled.archives.all_files() == []


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO rft.score (experience_id, score_key, stage, scores) VALUES (2, 'late', 'judge', '{}')",
        "UPDATE rft.rollout_group SET trainable = false WHERE group_id = 1",
        "INSERT INTO rft.preference_pair (chosen_id, rejected_id) VALUES (2, 1)",
    ],
)
def test_a_transaction_with_a_snapshot_older_than_an_archive_changes_nothing_of_it(
    filled: rftdata.Buffer, level: str, statement: str
) -> None:
    def change(before: str) -> None:
        with filled.database.transaction() as connection:
            connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
            connection.execute(before)
            if not filled.archives.all_files():
                archive(filled, "old", author="ada")
            connection.execute(statement)

    with pytest.raises(ConflictError, match="a run was archived after the snapshot of this transaction"):
        change("SELECT count(*) FROM rft.archive")
    assert list(verify(filled)) == []
    with pytest.raises(RftError, match='run "old" is archived'):
        change("SELECT 1")


def test_a_run_that_is_not_done_is_not_archived(filled: rftdata.Buffer) -> None:
    for change, undo, what in (
        (
            "UPDATE rft.run SET status = 'running'",
            "UPDATE rft.run SET status = 'finished'",
            r"'old' has not ended \(got 'running'\)",
        ),
        (
            "UPDATE rft.worker SET stopped_at = NULL, heartbeat_at = clock_timestamp() + interval '1 h'",
            "UPDATE rft.worker SET stopped_at = clock_timestamp()",
            "pipeline 1 on here works for it",
        ),
        (
            (
                "INSERT INTO rft.review (experience_id, group_id, run_id, name, question, otherwise, deadline)"
                " SELECT experience_id, group_id, run_id, 'q', 'good?', 'pass', rft.clock() + interval '1 day' FROM rft.experience ORDER BY 1 LIMIT 3"
            ),
            "UPDATE rft.review SET answer = 'pass'",
            "3 questions about experiences of the run 'old' wait",
        ),
    ):
        filled.sql(change)
        with pytest.raises(QueryError, match=what):
            archive(filled, "old", author="ada")
        filled.sql(undo)
    selected = select(filled.database, "SELECT experience_id FROM rft.experience WHERE experience_id BETWEEN 20 AND 40")
    filled.create_run(name="next", config={}, seed=1, steps=2, pipeline_version="p1", mode="train", selected=selected)
    with pytest.raises(
        QueryError, match=r"runs that have not ended train on experiences of the run 'old' \(got 'next'\)"
    ):
        archive(filled, "old", author="ada")
    assert catalogue(filled)["archive"] == [] and filled.archives.all_files() == []


def test_a_change_while_the_files_are_written_is_noticed(
    filled: rftdata.Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = archiving.write_archive

    def relabelled(*given: Any) -> Any:
        written = real(*given)
        filled.sql("UPDATE rft.experience SET reward = 0.75 WHERE experience_id = 4")
        return written

    monkeypatch.setattr(archiving, "write_archive", relabelled)
    with pytest.raises(ConflictError, match="rows of the run 'old' changed while its archive was written"):
        archive(filled, "old", author="ada")
    assert list(verify(filled)) == [] and filled.archives.all_files() == []

    def taken_over(*given: Any) -> Any:  # as by another command, after the connection with the lock was lost
        written = real(*given)
        filled.sql("UPDATE rft.archive SET started_at = started_at + interval '1 s'")
        return written

    monkeypatch.setattr(archiving, "write_archive", taken_over)
    with pytest.raises(ConflictError, match="rows of the run 'old' changed while its archive was written"):
        archive(filled, "old", author="ada")
    assert catalogue(filled)["archive"] != [] != filled.archives.all_files()  # they are the other command's
    restore_run(filled, "old")
    assert answers(filled, "select reward, response from experience where experience_id = 4")[0]["reward"] == 0.75


def test_forks_are_archived_before_the_run_whose_arrays_they_use_and_restored_after_it(filled: rftdata.Buffer) -> None:
    fork = filled.fork("old", name="fork", step=0, keep_rollouts=True)
    fork.end("finished", "done")
    before, bytes_before = catalogue(filled), arrays(filled)
    expected = [answers(filled, text) for text in QUERIES]
    with pytest.raises(QueryError, match=r"forks use the arrays of the run 'old' .*archive these first: fork"):
        archive(filled, "old", author="ada")
    assert archive(filled, "fork", author="ada").array_bytes == 0  # the segments are the other run's
    archive(filled, "old", author="ada")
    assert [answers(filled, text) for text in QUERIES] == expected
    with pytest.raises(
        ArchivedError, match="'fork' shares arrays with archived runs: old; first `rft restore-run old`"
    ):
        restore_run(filled, "fork")
    restore_run(filled, "old")
    restore_run(filled, "fork")
    assert (catalogue(filled), arrays(filled)) == (before, bytes_before)


def test_a_back_up_is_restored_beside_the_arrays_of_the_saved_buffer(
    filled: rftdata.Buffer, empty_uri: str, tmp_path: Path
) -> None:
    """So the two share the folder of archives, whose files are named after the buffer. A file with other content stays as it is."""
    archive(filled, "old", author="ada")
    backup.back_up(filled, tmp_path / "backup")
    target = BufferConfig(uri=empty_uri, segments=str(filled.archives.folder.parent / "restored"))
    with backup.restore(tmp_path / "backup", target) as restored:
        assert restored.archives.folder == filled.archives.folder and list(verify(restored)) == []
    with psycopg.connect(empty_uri, autocommit=True) as connection:
        connection.execute("DROP SCHEMA rft CASCADE")
    shutil.rmtree(target.segments or "")
    file = filled.archives.all_files()[0]
    file.write_bytes(b"another")
    missing = filled.archives.all_files()[-1]
    missing.unlink()
    with pytest.raises(QueryError, match="an archive file with other content is in the way"):
        backup.restore(tmp_path / "backup", target)
    assert file.read_bytes() == b"another" and not missing.exists()
    # Nothing of it is left, so the same command succeeds without the obstacle.
    with psycopg.connect(empty_uri) as connection:
        assert connection.execute("SELECT to_regnamespace('rft')").fetchone() == (None,)
    assert list(Path(target.segments or "").iterdir()) == []
    file.unlink()
    with backup.restore(tmp_path / "backup", target) as restored:
        assert list(verify(restored)) == []


def test_a_backup_whose_archive_is_damaged_leaves_a_buffer_with_its_rights(
    filled: rftdata.Buffer, empty_uri: str, tmp_path: Path
) -> None:
    archive(filled, "old", author="ada")
    backup.back_up(filled, tmp_path / "backup")
    damaged = next(file for file in (tmp_path / "backup" / "archives").rglob("*.parquet"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    target = BufferConfig(uri=empty_uri, segments=str(tmp_path / "new" / "segments"))
    with pytest.raises(RftError, match=r"the backup is damaged: the archive file .* does not match its checksum"):
        backup.restore(tmp_path / "backup", target)
    with rftdata.open(target) as restored:
        may = restored.sql("SELECT has_table_privilege('rft_reader', 'rft.run', 'SELECT') AS may")
        assert may["may"].to_pylist() == [True]
        assert all("archive file" in problem for problem in verify(restored))


def test_a_restore_into_a_folder_that_fails_leaves_no_folder(
    filled: rftdata.Buffer, tmp_path: Path, server_folders: Path
) -> None:
    backup.back_up(filled, tmp_path / "backup")
    (tmp_path / "backup" / "rft.dump").write_bytes(b"nothing")
    folder = server_folders / "failed"
    with pytest.raises(BufferUnavailableError, match="pg_restore failed"):
        backup.restore(tmp_path / "backup", BufferConfig(uri=str(folder)))
    assert not folder.exists()


def test_doctor_backup_and_compaction_know_archives(filled: rftdata.Buffer, empty_uri: str, tmp_path: Path) -> None:
    before, bytes_before = catalogue(filled), arrays(filled)
    expected = [answers(filled, text) for text in QUERIES]
    archive(filled, "old", author="ada")
    num_files = len(filled.archives.all_files())
    Compactor(filled.database, filled.segments, grace_s=0, alone=True).run()
    held = sum(file.stat().st_size for file in Path(str(filled.config.segments)).iterdir())
    assert held < filled.sql("SELECT sum(length_bytes)::bigint AS n FROM rft.archived_segment")["n"][0].as_py()
    manifest = backup.back_up(filled, tmp_path / "backup")
    assert manifest.num_archive_files == num_files
    with backup.restore(
        tmp_path / "backup", BufferConfig(uri=empty_uri, segments=str(tmp_path / "new" / "segments"))
    ) as new:
        assert [answers(new, text) for text in QUERIES] == expected
        restore_run(new, "old")
        assert (catalogue(new), arrays(new)) == (before, bytes_before)
    damaged, missing = filled.archives.files_of(1)[:2]
    data = damaged.read_bytes()
    damaged.write_bytes(data[:500] + bytes([data[500] ^ 1]) + data[501:])
    missing.unlink()
    (missing.parent / missing.name.replace("00001", "99999")).write_bytes(b"")
    findings = list(verify(filled))
    assert [f"{damaged} does not match its checksum" in findings[0], f"{missing} is missing" in findings[1]] == [
        True,
        True,
    ], findings
    assert len(findings) == 3 and "is of no archive" in findings[2]
    with pytest.raises(RftError, match="does not match its checksum"):
        restore_run(filled, "old")
    with pytest.raises(RftError, match=r"does not match its checksum|is missing"):
        backup.back_up(filled, tmp_path / "other")


def test_the_commands(
    filled: rftdata.Buffer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_SEGMENTS", str(filled.config.segments))
    uri = filled.config.uri
    assert run_command(["archive", "old", "--rewrite-tables", "--buffer", uri]) == 0
    assert "old: 54 experiences of 15 groups are in" in capsys.readouterr().out
    assert (
        run_command(
            ["query", "select count(response) as n from experience where response like '%two%'", "--buffer", uri]
        )
        == 0
    )
    for verb in ("report", "status"):  # which need nothing of the files
        assert run_command([verb, "old", "--buffer", uri]) == 0
    assert "archived: `rft restore-run old" in capsys.readouterr().out
    assert run_command(["archive", "live", "--json", "--buffer", uri]) == 0
    assert json.loads(capsys.readouterr().out)["num_experiences"] == 18
    assert run_command(["archive", "nothing", "--buffer", uri]) == 2
    assert run_command(["restore-run", "old", "--buffer", uri]) == 0
    assert "54 experiences are in the database again (15 segments" in capsys.readouterr().out
    assert run_command(["restore-run", "old", "--buffer", uri]) == 2


def test_a_restored_run_whose_files_cannot_be_removed_is_reported_as_whole(filled: rftdata.Buffer) -> None:
    before = catalogue(filled)
    archive(filled, "old", author="ada")
    first = filled.archives.all_files()[0]
    obstacle = first.with_name(first.name.replace("00000", "99999"))
    obstacle.mkdir()
    with pytest.raises(RftError, match="'old' is whole in the database, but files of its archive cannot be removed"):
        restore_run(filled, "old")
    assert (
        filled.query("select count(response) as n from experience where run = 'old'").read_all()["n"][0].as_py() == 54
    )
    obstacle.rmdir()
    restore_run(filled, "old")
    assert filled.archives.all_files() == [] and catalogue(filled) == before


def test_a_full_disk_leaves_a_whole_run_and_no_file(filled: rftdata.Buffer) -> None:
    script = (
        "import resource, signal, sys, rftdata\n"
        "from rftdata.config import BufferConfig\n"
        "from rftdata.maintenance.archive import archive\n"
        "buffer = rftdata.open(BufferConfig(uri=sys.argv[1], segments=sys.argv[2], min_free_bytes=0))\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (12000, 12000))\n"  # a file that grows beyond is an error of the disk
        "archive(buffer, 'old', author='ada')\n"
    )
    command = [sys.executable, "-c", script, filled.config.uri, str(filled.config.segments)]
    before = catalogue(filled)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "the folder of the archives cannot be written: " in done.stderr, done.stderr
    assert catalogue(filled) == before and filled.archives.all_files() == [] and list(verify(filled)) == []


def test_a_damaged_file_is_an_error_that_names_it_and_never_another_answer(filled: rftdata.Buffer) -> None:
    question = "select experience_id, response, token_ids from experience where run = 'old' order by 1"
    expected = answers(filled, question)
    archive(filled, "old", author="ada")
    file = next(path for path in filled.archives.files_of(1) if path.parent.parent.name == "experience")
    data = file.read_bytes()
    errors = []
    for place in range(4, len(data) - 4, len(data) // 40):
        file.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
        try:
            assert answers(filled, question) == expected
        except RftError as error:
            errors.append(str(error))
    # About ten of the forty changes are noticed. The others are in bytes that the query does not read, and where these lie differs with ids and times.
    assert errors and all(str(file) in error for error in errors)
