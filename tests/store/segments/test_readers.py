"""Misbehaving readers: training continues beside each of them, and claims do not scan rows that a snapshot retains."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from rftdata import Buffer
from rftdata.pipeline.queue import SealedQueue
from rftdata.pipeline.records import BATCH_SCHEMA
from rftdata.postgres.database import queries
from tests.support.beside_readers import READERS, Loop, beside, experiences, prepare
from tests.support.store_roles import Roles, own_group
from tests.support.waiting import wait_until

_ROWS = 2000


@pytest.mark.parametrize("reader", READERS)
def test_training_continues(buffer: Buffer, reader: str) -> None:
    """Every group that is written is decided on and drawn, in its step, while the reader is there."""
    made = experiences(64)
    stored = prepare(buffer, made, _ROWS)
    loop = Loop(buffer, made)
    with beside(reader, buffer.database.uri, stored) as said:
        if reader == "select":
            fetching = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'FETCH%'"
            wait_until(lambda: buffer.sql(fetching).num_rows, "it reads")
        loop.run(6)
    assert {name: len(seconds) for name, seconds in loop.seconds.items()} == {"write": 6, "verdict": 6, "draw": 6}
    drawn = buffer.sql("SELECT count(*) AS n, count(DISTINCT experience_id) AS once FROM rft.draw").to_pylist()
    assert drawn == [{"n": 6 * 256, "once": 6 * 256}]
    if reader == "select":
        assert said["rows_read"] > 0
    if reader == "update":
        assert said["rows"] == _ROWS and 0 <= said["hot_share"] <= 1 and said["wal_bytes"] > 0
        labels = buffer.sql("SELECT count(DISTINCT experience_id) AS n FROM rft.label").to_pylist()
        assert labels == [{"n": _ROWS}], "every change is on record"


def pages_touched(connection: psycopg.Connection[Any], query: str, **parameters: Any) -> int:
    """Buffers that a query reads; it is run and rolled back."""
    with connection.transaction(force_rollback=True):
        (row,) = connection.execute(
            "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + queries()[query], parameters
        ).fetchall()
    plan = (json.loads(row[0]) if isinstance(row[0], str) else row[0])[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


@pytest.mark.parametrize(
    "statistics", [pytest.param(False, id="old statistics"), pytest.param(True, id="new statistics")]
)
def test_a_claim_does_not_pass_over_what_a_snapshot_keeps(buffer: Buffer, statistics: bool) -> None:
    """Whatever the server knows of the queue: it counts rows of full and of empty queues, when it wants."""
    roles = Roles(buffer)
    queue = SealedQueue(roles.run, roles.worker_id, lease_s=60, look_back_s=3600)
    with psycopg.connect(buffer.config.uri) as lunch, psycopg.connect(buffer.config.uri, autocommit=True) as client:
        lunch.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        lunch.execute("SELECT count(*) FROM rft.run")
        for i in range(20):
            roles.insert(*[own_group(task_key=str(j)) for j in range(100 * i, 100 * i + 100)])
            batch = queue.claim(100)
            assert batch is not None and len(batch.group_ids) == 100
            roles.commit(batch)
        (last,) = roles.insert(own_group(task_key="last"))
        client.execute("ALTER TABLE rft.worklist SET (autovacuum_enabled = false)")
        if statistics:
            client.execute("ANALYZE rft.worklist")
        options = {"run_id": roles.run_id, "worker_id": roles.worker_id, "count": 100, "lease_s": 60, "suspects": False}
        from_start = pages_touched(client, "claim_sealed_groups", from_key=0, **options)
        from_hint = pages_touched(client, "claim_sealed_groups", from_key=batch.first_key, **options)
        of_one = {
            query: pages_touched(client, query, run_id=roles.run_id, worker_id=roles.worker_id, group_ids=[last])
            for query in ("still_claimed", "finish_pipeline_items", "wait_for_answers")
        }
        returned = pages_touched(client, "end_waiting", run_id=roles.run_id)
    assert from_hint < from_start / 3, (from_hint, from_start)
    assert max(returned, *of_one.values()) < from_start / 3, (returned, of_one, from_start)


def test_groups_that_come_back_before_others_are_found(buffer: Buffer) -> None:
    roles = Roles(buffer)
    first, *_ = roles.insert(*[own_group(task_key=str(i)) for i in range(12)])
    patient = SealedQueue(roles.run, roles.worker_id, lease_s=60, look_back_s=3600)
    eager = SealedQueue(roles.run, roles.worker_id, lease_s=60, look_back_s=0)
    for _ in range(2):
        batch = patient.claim(4)
        assert batch is not None and len(batch.group_ids) == 4
        roles.commit(batch)
    buffer.sql("UPDATE rft.experience SET reward = 0.5 WHERE group_id = %s", [first])
    batch = patient.claim(4)
    assert batch is not None and first not in batch.group_ids, "it stands before the place where the last claim began"
    found = eager.claim(4)
    assert found is not None and found.group_ids == [first]


def test_a_worker_without_other_work_finds_a_group_before_its_last_one_at_once(buffer: Buffer) -> None:
    """Groups of a step end in another order than they were planned in; on-policy, the trainer waits for each of them."""
    roles = Roles(buffer)
    first, *_ = roles.insert(*[own_group(task_key=str(i)) for i in range(8)])
    queue = SealedQueue(roles.run, roles.worker_id, lease_s=60, look_back_s=3600)
    for _ in range(2):
        batch = queue.claim(4)
        assert batch is not None
        roles.commit(batch)
    buffer.sql("UPDATE rft.experience SET reward = 0.5 WHERE group_id = %s", [first])
    found = queue.claim(4)
    assert found is not None and found.group_ids == [first]
    assert queue.claim(4) is None


def test_the_newest_label_is_found_by_index_right_after_many_were_written(buffer: Buffer) -> None:
    """Statistics lag behind a large relabelling; the plan must not pass every label for every experience."""
    roles = Roles(buffer)
    groups = roles.insert(own_group(rewards=[0.0] * 50))
    buffer.sql(
        "INSERT INTO rft.label (experience_id, author, label_batch_id)"
        " SELECT 1000 + n, 'a person', 1 FROM generate_series(1, 30000) AS n"
    )
    with psycopg.connect(buffer.config.uri, autocommit=True) as client:
        touched = pages_touched(
            client, "batch_of_groups", group_ids=groups, columns=BATCH_SCHEMA.names, as_sealed=False
        )
    # About 20 for an experience, its prompt among them; all labels are more than 300.
    assert touched < 50 * 25
