"""Archived runs: Parquet files and the database answer as one, nothing changes meanwhile, and restoring gives every byte back."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import duckdb
import ml_dtypes
import numpy as np
import pytest

import rftdata
from rftdata.errors import QueryError, RftError
from rftdata.maintenance import purge
from rftdata.maintenance.archive import archive
from rftdata.maintenance.restore_run import restore_run
from rftdata.maintenance.verification import verify
from rftdata.pipeline.queue import claim_sealed_groups
from rftdata.pipeline.records import Verdicts, concatenated, dropped, kept
from rftdata.pipeline.verdicts import commit_verdicts
from tests.support.secret_rows import secret_group
from tests.support.store_roles import tokens

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
        float(number % 2), prompt=f"prompt {number // 4}", response=RESPONSES[number % len(RESPONSES)], arrays=arrays,
        token_ids=list(range(5 + number % 7)), behavior_logprobs=list(np.linspace(-1, 0, 2 + number % 7)), metrics={"n": number},
        reward_parts={"accuracy": 0.1 * number}, policy_spans=[(3, 1), (4, 2)] if number % 2 else [],
        messages=[{"role": "user", "content": f"prompt {number // 4}"}] if number % 5 == 0 else None,
    )  # fmt: skip


def fill(buffer: rftdata.Buffer, name: str, num_groups: int = 12) -> rftdata.Run:
    """A run with groups in several segments, verdicts, scores, labels, draws and a baseline, which has ended."""
    run = buffer.create_run(name=name, config={}, seed=1, steps=9, pipeline_version="p1")
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
    worker = buffer.database.fetch("insert_worker", run_id=run.run_id, role="pipeline", host="here", pid=1)[0][
        "worker_id"
    ]
    batch = claim_sealed_groups(run, worker, count=100, lease_s=60)
    assert batch is not None
    table = batch.table.select(["experience_id", "group_id"])
    decided = concatenated([kept(table.slice(4)), dropped(table.slice(0, 4), "gate", "because")])
    commit_verdicts(run, worker, "p1", batch, Verdicts(decided))
    buffer.sql(
        "INSERT INTO rft.score (experience_id, score_key, stage, scores, error) SELECT experience_id, 'k', 'judge',"
        " jsonb_build_object('said', response, 'n', 0.1), NULLIF(response, '') FROM rft.experience WHERE run_id = %s", [run.run_id],
    )  # fmt: skip
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
    """Every row of every table as text; of segments without their address, which restoring changes."""
    names = buffer.sql(
        "SELECT relname::text AS t FROM pg_class WHERE relnamespace = 'rft'::regnamespace AND relkind = 'r'"
    )
    found = {}
    for name in names["t"].to_pylist():
        row = "to_jsonb(x) - '{file_id,offset_bytes}'::text[]" if name == "segment" else "x"
        if name != "segment_file":
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
    live = "select experience_id, response, token_ids from experience order by 1"
    with filled.query(live, run="live") as reader:  # which needs no archive
        assert reader.read_all().num_rows == 18


def test_other_programs_read_the_files_without_this_package(filled: rftdata.Buffer) -> None:
    expected = answers(
        filled,
        "select experience_id, run, prompt, response, reward, token_ids from experience where run = 'old' order by 1",
    )
    archive(filled, "old", author="ada")
    found = duckdb.sql(
        "SELECT experience_id, run, prompt, response, reward, token_ids FROM read_parquet($files, hive_partitioning = true, union_by_name = true)"
        " WHERE NOT purged ORDER BY 1", params={"files": str(filled.archives.folder / "experience" / "**" / "*.parquet")},
    ).fetchall()  # fmt: skip
    assert [tuple(row.values()) for row in expected if row["token_ids"] is not None] == found
    kept_as_bytes = duckdb.sql(
        "SELECT count(*), count(data) FROM read_parquet($files)",
        params={"files": str(filled.archives.folder / "segment" / "**" / "*.parquet")},
    ).fetchall()
    assert kept_as_bytes == [(15, 0)]
