"""References between tables: enforced where that is cheap, compared by the doctor elsewhere."""

from __future__ import annotations

import pytest

from rftdata import Buffer
from rftdata.errors import QueryError
from rftdata.maintenance.verification import verify
from tests.support.store_roles import own_group


def test_a_row_that_refers_to_nothing_is_reported_and_keys_that_are_cheap_are_enforced(buffer: Buffer) -> None:
    run = buffer.create_run(name="r", config={}, seed=1, steps=1, pipeline_version="p")
    with buffer.writer(run) as writer:
        writer.insert(own_group())
    assert list(verify(buffer)) == []
    buffer.sql(
        "INSERT INTO rft.score (experience_id, score_key, stage, scores) VALUES (77, 'k', 's', '{}'), (78, 'k', 's', '{}')"
    )
    assert list(verify(buffer)) == ["2 rows of rft.score name what rft.experience does not have: experience_id 77"]
    with pytest.raises(QueryError, match="foreign key"):
        buffer.sql("INSERT INTO rft.worker (run_id, role, host, pid) VALUES (99, 'explorer', 'h', 1)")


def test_every_column_that_names_a_row_is_a_foreign_key_or_compared_by_the_doctor(buffer: Buffer) -> None:
    """Columns called like the key of another table. Those listed here hold keys of other buffers, or of rows that come and go."""
    exempt = {
        ("archive_file", "run_id"),
        ("endpoint_usage", "run_id"),
        ("experience", "segment_id"),
        ("experience_origin", "policy_version_id"),
        ("group_origin", "run_id"),
        ("purged_experience", "segment_id"),
        ("review", "run_id"),
        ("rollout_group", "attempt_id"),
        ("sampler_insert", "run_id"),
        ("archived_segment", "segment_id"),
        ("weight_receipt", "group_id"),
        ("weight_transfer", "group_id"),
        ("weight_transfer", "run_id"),
        ("weight_receiver", "run_id"),
        ("checkpoint", "run_id"),
        ("policy_version", "run_id"),
        ("train_step", "run_id"),
        ("task_observation", "attempt_id"),
        ("write_receipt", "run_id"),
        ("lock", "run_id"),
        ("operator_run", "worker_id"),
        ("run_model", "checkpoint_id"),
    }
    found = buffer.sql(
        "WITH key AS ("
        "  SELECT DISTINCT a.attname AS name FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid AND c.relnamespace = 'rft'::regnamespace"
        "  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = i.indkey[0] AND a.attidentity <> '' WHERE i.indisprimary)"
        " SELECT c.relname::text AS child, a.attname::text AS referring FROM pg_class c"
        " JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND a.attidentity = '' JOIN key k ON k.name = a.attname"
        " WHERE c.relnamespace = 'rft'::regnamespace AND c.relkind = 'r'"
        " AND NOT EXISTS (SELECT FROM pg_constraint f WHERE f.conrelid = c.oid AND f.contype = 'f' AND a.attnum = ANY (f.conkey))"
        " AND (c.relname, a.attname) NOT IN (SELECT u.child, u.referring FROM rft.unenforced_references() u)"
    ).to_pylist()
    assert {(row["child"], row["referring"]) for row in found} <= exempt
