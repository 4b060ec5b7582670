"""`Buffer.query`: what it returns equals the same query over full tables; it reads only what is needed, within limits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rftdata
from rftcore.cli import run_command
from rftdata.errors import ArchivedError, ConfigError, QueryError, SegmentCorruptError
from rftdata.maintenance.archive import archive
from rftdata.query.catalogue import tables
from tests.store.segments.test_damage import flip, segments
from tests.support.waiting import wait_until

REWARDS = [0.0, 1.0, -0.5, None, 0.25, 1.0]
RESPONSES = ["", "one, two", 'a "quoted"\nanswer', "Ünïcode 'single'", "\\N", "a\r\nb,,", "NULL"]
NUM_GROUPS, GROUP_SIZE = 12, 4


def fill(buffer: rftdata.Buffer) -> None:
    """Two runs with awkward values: empty texts, quotes, newlines, rewards that are NULL, arrays that only some rows have."""
    number = 0
    for name in ("first", 'the "second"'):
        run = buffer.create_run(name=name, config={"steps": 1}, seed=1, steps=1, pipeline_version="v1")
        with buffer.writer(run) as writer:
            for key in range(NUM_GROUPS):
                rollouts = []
                for index in range(GROUP_SIZE):
                    number += 1
                    reward = REWARDS[number % len(REWARDS)]
                    arrays = {"token_rewards": np.full(3, number, np.float32)} if number % 3 else {}
                    sequence = rftdata.Sequence(
                        token_ids=np.arange(number % 7 + 4, dtype=np.int32),
                        num_prompt_tokens=2,
                        prompt=f"prompt {key}",
                        response=RESPONSES[number % len(RESPONSES)],
                        reward=reward,
                        metrics={"n": number},
                        arrays=arrays,
                        finish_reason="stop" if number % 2 else "length",
                    )
                    rollouts.append(rftdata.Rollout(index, "ok", reward, [sequence]))
                writer.insert(
                    rftdata.Group(
                        rollouts, source="import", taskset="sums", task_key=f"task-{key}", payload={"answer": str(key)}
                    )
                )


def full_tables(buffer: rftdata.Buffer, connection: duckdb.DuckDBPyConnection) -> None:
    """Register every row and every array of the tables of these tests, read by `Buffer.sql` and `Buffer.arrays`."""
    known = tables(buffer.database)
    for name in ("v_experience", "task", "run", "rollout"):
        columns = ", ".join(f'"{c}"::text' if kind == "jsonb" else f'"{c}"' for c, kind in known[name].items())
        rows = buffer.sql(f'SELECT {columns} FROM rft."{name}"')
        for i, field in enumerate(rows.schema):
            if pa.types.is_null(field.type):
                kind = {"bigint": "int64", "integer": "int64", "double precision": "float64"}.get(
                    known[name][field.name]
                )
                rows = rows.set_column(i, field.name, rows.column(i).cast(kind or "string"))
        if name == "v_experience":
            ids = rows["experience_id"].to_pylist()
            for array, kind in (
                ("token_ids", pa.int32()),
                ("loss_mask", pa.uint8()),
                ("behavior_logprobs", pa.float32()),
                ("token_rewards", pa.float32()),
            ):
                rows = rows.append_column(array, pa.array(buffer.arrays(ids, array), pa.list_(kind)))
        connection.register("experience" if name == "v_experience" else name, rows)


@pytest.fixture
def filled(buffer: rftdata.Buffer) -> rftdata.Buffer:
    fill(buffer)
    return buffer


numbers = st.sampled_from(["0", "1", "-0.5", "0.25", "NULL", "'nan'::double"])
texts = st.sampled_from(
    ["''", "'one, two'", "'Ü'", "'NULL'", "'stop'", "'a \"quoted\"\nanswer'", "'first'", "'the \"second\"'", "NULL"]
)
operators = st.sampled_from(["=", "<>", "<", ">=", "is distinct from"])
simple = st.one_of(
    st.builds("{} {} {}".format, st.sampled_from(["reward", "reward_sampled", "reward_shaped"]), operators, numbers),
    st.builds(
        "{} {} {}".format, st.sampled_from(["experience_id", "run_id", "policy_step"]), operators, st.integers(-1, 100)
    ),
    st.builds(
        "{} {} {}".format, st.sampled_from(["response", "finish_reason", "source", "run", "metrics"]), operators, texts
    ),
    st.builds("{} in ({}, {})".format, st.sampled_from(["response", "run", "outcome"]), texts, texts),
    st.builds("reward in ({}, {})".format, numbers, numbers),
    st.builds(
        "{} is {}null".format,
        st.sampled_from(["reward", "policy_step", "token_rewards", "token_ids"]),
        st.sampled_from(["", "not "]),
    ),
    st.builds("len(token_ids) {} {}".format, operators, st.integers(3, 9)),
    st.builds("response like '{}%'".format, st.sampled_from(["a", "o", ""])),
    st.just("created_at > timestamptz '2020-01-01 00:00:00+00'"),
)
conditions = st.recursive(
    simple,
    lambda inner: st.one_of(
        st.builds("({} and {})".format, inner, inner),
        st.builds("({} or {})".format, inner, inner),
        st.builds("(not {})".format, inner),
    ),
    max_leaves=5,
)
SHAPES = [
    "select experience_id, reward, response, len(token_ids) as n, token_rewards from experience where {0}",
    "select count(*) as n, sum(reward) as r, sum(list_sum(token_ids)) as t from experience where {0}",
    "select run, finish_reason, count(*) as n, min(response) as r from experience where {0} group by all",
    (
        "select a.experience_id, b.experience_id as other, b.metrics from (from experience where {0}) a"
        " join (from experience where {1}) b on a.group_id = b.group_id and a.turn_index = b.turn_index"
    ),
    (
        "with good as (select * from experience where {0}) select task_key, task.payload, count(*) as n from good join task using (task_key)"
        " where task_id > 2 group by all"
    ),
    (
        "select experience_id, rank() over (partition by group_id order by reward desc nulls last, experience_id) as place, loss_mask"
        " from experience where {0}"
    ),
    "select *, token_rewards as t from experience where {0} and experience_id in (select experience_id from experience where {1})",
    "select experience_id, token_ids from experience where {0} order by experience_id desc limit 3 offset 1",
    (
        "select r.name, o.outcome, (select count(*) from experience e where e.group_id = o.group_id and e.rollout_index = o.rollout_index and {0}) as n"
        " from rollout o, run r where r.run_id = 1"
    ),
]


def canonical(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(row, default=str) for row in rows)


@pytest.mark.parametrize("archived", [False, True])
def test_what_a_query_returns_equals_the_same_query_over_full_tables(filled: rftdata.Buffer, archived: bool) -> None:
    filled.find_run("first").end("finished", "done")
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        full_tables(filled, connection)
        if archived:
            archive(filled, "first", author="ada")

        @settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
        @given(st.sampled_from(SHAPES), conditions, conditions)
        def compare(shape: str, one: str, other: str) -> None:
            query = shape.format(one, other)
            try:
                expected = connection.sql(query).to_arrow_table().to_pylist()
            except duckdb.Error:
                with pytest.raises(QueryError):
                    filled.query(query).read_all()
                return
            assert canonical(filled.query(query).read_all().to_pylist()) == canonical(expected), query

        compare()


def test_the_parts_of_rewards_are_rows_also_those_of_archived_runs(buffer: rftdata.Buffer) -> None:
    run = buffer.create_run(name="first", config={"steps": 1}, seed=1, steps=1, pipeline_version="v1")
    parts = [{"right": 1.0, './b.py:f."x"': -0.5}, {"right": 0.0}, {}]
    with buffer.writer(run) as writer:
        rollouts = [
            rftdata.Rollout(
                index,
                "ok",
                1.0,
                [
                    rftdata.Sequence(
                        token_ids=[1, 2],
                        num_prompt_tokens=1,
                        prompt="?",
                        response="!",
                        reward=1.0,
                        reward_parts=one,
                        finish_reason="stop",
                    )
                ],
            )
            for index, one in enumerate(parts)
        ]
        writer.insert(rftdata.Group(rollouts, source="import", taskset="sums", task_key="a", payload={}))
    expected = [(0, './b.py:f."x"', -0.5), (0, "right", 1.0), (1, "right", 0.0)]

    def rows(table: pa.Table) -> list[tuple[Any, ...]]:
        assert {(row["run"], row["taskset"], row["reward"]) for row in table.to_pylist()} == {("first", "sums", 1.0)}
        return sorted((row["rollout_index"], row["name"], row["value"]) for row in table.to_pylist())

    assert rows(buffer.sql("SELECT * FROM rft.v_reward_part")) == expected
    assert rows(buffer.query("from reward_part").read_all()) == expected
    run.end("finished", "done")
    archive(buffer, "first", author="ada")
    assert rows(buffer.query("from reward_part").read_all()) == expected


def test_a_query_reads_only_the_rows_and_columns_that_it_needs(filled: rftdata.Buffer) -> None:
    """The arrays of the second run are damaged, so a query that would read them fails."""
    bad = segments(filled)[-1]
    flip(filled, bad, bad["length_bytes"] - 40)
    assert filled.query("select count(*) as n, max(response) as r from experience").read_all()["n"].to_pylist() == [96]
    for condition in (
        "run = 'first'",
        "run in ('first', 'third')",
        f"experience_id < {bad['rows'][0]}",
        "reward = 7",
        "len(metrics) = 0 and reward = 7",
    ):
        filled.query(f"select sum(list_sum(token_ids)) from experience where {condition}").read_all()
    filled.query("select sum(list_sum(token_ids)) from experience", run="first").read_all()
    with pytest.raises(SegmentCorruptError) as caught:
        filled.query("select sum(list_sum(token_ids)) from experience").read_all()
    assert list(caught.value.experience_ids) == bad["rows"]


def test_a_query_continues_without_damaged_rows_and_names_them(
    filled: rftdata.Buffer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = segments(filled)[0], segments(filled)[-1]
    flip(filled, bad, bad["length_bytes"] - 40)
    monkeypatch.setenv("RFT_SEGMENTS", str(filled.config.segments))
    text = "select experience_id, len(token_ids) as n from experience order by 1"
    command = ["query", "--json", "--buffer", filled.config.uri, text]
    assert run_command(command) == 1
    assert f"experiences {bad['rows'][0]}-{bad['rows'][-1]}" in capsys.readouterr().err
    assert run_command([*command, "--skip-damaged"]) == 0
    out, err = capsys.readouterr()
    assert (
        {row["experience_id"] for row in json.loads(out)} == set(range(1, 97)) - set(bad["rows"]) >= set(good["rows"])
    )
    assert err.count("left out: ") == 1 and f"experiences {bad['rows'][0]}-{bad['rows'][-1]}" in err


def test_a_query_over_its_limit_is_refused_before_it_reads(
    filled: rftdata.Buffer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    filled.sql("ANALYZE")
    bad = segments(filled)[0]
    flip(filled, bad, bad["length_bytes"] - 40)  # reading it would be a different error
    monkeypatch.setenv("RFT_SEGMENTS", str(filled.config.segments))
    command = ["query", "--buffer", filled.config.uri, "--limit-bytes", "6000"]
    assert run_command([*command, "select sum(list_sum(token_ids)) from experience"]) == 2
    err = capsys.readouterr().err
    assert "would read about" in err and "experience (96 rows)" in err and "6,000 (--limit-bytes)" in err
    assert run_command([*command, "select count(*) from experience"]) == 0
    # Each scan is within the limit, both together are not.
    twice = "select count(*) from experience a join experience b on a.response = b.response where a.reward is not null"
    with pytest.raises(QueryError, match="would read about"):
        filled.query(twice, limit_bytes=1500)
    filled.query("select max(response) from experience where reward is not null", limit_bytes=1500).read_all()
    filled.query(twice, limit_bytes=100_000).read_all()


def test_all_scans_of_a_query_see_one_moment(filled: rftdata.Buffer) -> None:
    reader = filled.query(
        "select experience_id, reward from experience union all select experience_id, reward from experience"
    )
    filled.sql("UPDATE rft.experience SET reward = 9")
    assert 9 not in reader.read_all()["reward"].to_pylist()


def test_a_result_that_is_not_read_to_its_end_leaves_no_session(filled: rftdata.Buffer) -> None:
    query = "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'"
    before = filled.sql(query)["n"].to_pylist()
    filled.query("select * from experience limit 2").read_all()
    reader = filled.query("select * from experience")
    del reader
    wait_until(lambda: filled.sql(query)["n"].to_pylist() <= before, "as many sessions as before, or fewer")


_IN_LITTLE_MEMORY = """
import functools, resource, sys
import duckdb
import rftdata
from rftdata.config import BufferConfig

# By default one for each core of the machine, and each has a stack and a batch of rows.
duckdb.connect = functools.partial(duckdb.connect, config={"threads": 2})
with rftdata.open(BufferConfig(uri=sys.argv[1], segments=sys.argv[2], min_free_bytes=0)) as buffer:
    buffer.query("select max(length(response)), max(len(token_ids)) from experience where experience_id = 1").read_all()
    used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData:")) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + int(sys.argv[3]),) * 2)
    [row] = buffer.query(f"select {sys.argv[4]} as chars, sum(len(token_ids)) as tokens from experience").read_all().to_pylist()
    print(row["chars"], row["tokens"])
"""


def test_a_scan_of_more_than_the_memory_succeeds(buffer: rftdata.Buffer) -> None:
    chars, tokens, rows = 500_000, 2_000, 1024
    run = buffer.create_run(name="large", config={}, seed=1, steps=1, pipeline_version="v1")
    noise = np.random.default_rng(1)
    with buffer.writer(run) as writer:
        for key in range(rows // 8):
            sequences = [
                rftdata.Sequence(
                    token_ids=np.full(tokens, key, np.int32),
                    num_prompt_tokens=2,
                    prompt="p",
                    response=noise.bytes(chars // 2).hex(),
                    finish_reason="stop",
                )
                for _ in range(8)
            ]
            rollouts = [rftdata.Rollout(i, "ok", 1.0, [sequence]) for i, sequence in enumerate(sequences)]
            writer.insert(rftdata.Group(rollouts, source="import", taskset="t", task_key=str(key)))
    allowed = 400 * 2**20
    assert chars * rows > 1.2 * allowed
    # Arrow's own allocator reserves a gigabyte at once, and the system's an area for each thread.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1"}

    def scan(chars: str) -> subprocess.CompletedProcess[str]:
        # The stacks of threads count as memory, and libraries start one for each core of the machine.
        command = [
            "sh",
            "-c",
            'ulimit -s 1024; exec "$@"',
            "sh",
            sys.executable,
            "-c",
            _IN_LITTLE_MEMORY,
            buffer.config.uri,
            str(buffer.config.segments),
            str(allowed),
            chars,
        ]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    done = scan("sum(length(response))")
    assert (done.returncode, done.stdout.split()) == (0, [str(chars * rows), str(tokens * rows)]), done.stderr
    assert scan("length(string_agg(response))").returncode != 0, (
        "the limit would be met by a query that needs all texts at once"
    )


@pytest.mark.parametrize(
    "where", [None, "reward > 0 -- the good ones", "run = 'first' AND experience_id % 3 = 0", "false"]
)
def test_a_scan_returns_what_a_query_returns_in_order(filled: rftdata.Buffer, where: str | None) -> None:
    columns = ["response", "reward", "loss_mask", "run", "token_ids", "token_rewards", "experience_id"]
    condition = (where or "true").split(" --")[0]
    expected = filled.query(f"SELECT {', '.join(columns)} FROM experience WHERE {condition} ORDER BY experience_id")
    assert filled.scan(columns, where).read_all().to_pylist() == expected.read_all().to_pylist()
    ids = filled.sql(f"SELECT experience_id FROM rft.v_experience WHERE {condition} ORDER BY 1")
    found = filled.scan(["token_ids"], where).read_all()
    expected_ids = ids["experience_id"].to_pylist() if ids.num_rows else []
    assert found["token_ids"].to_pylist() == [array.tolist() for array in filled.arrays(expected_ids, "token_ids")]  # type: ignore[union-attr]


def test_shares_of_a_scan_have_every_row_once(filled: rftdata.Buffer) -> None:
    everything = filled.scan(["experience_id"]).read_all()["experience_id"].to_pylist()
    for count in (2, 3):
        parts = [
            filled.scan(["experience_id", "token_ids"], share=(i, count)).read_all()["experience_id"].to_pylist()
            for i in range(count)
        ]
        assert sorted(id for part in parts for id in part) == everything and all(parts[:2])


def test_a_scan_refuses_what_it_cannot_do(filled: rftdata.Buffer) -> None:
    for columns, where, what in (
        (["token_id"], None, "did you mean 'token_ids'"),
        (["reward"], "rewad > 1", 'column "rewad" does not exist'),
        (["reward"], "true); DROP TABLE rft.draw; SELECT (1", "multiple commands"),
        (["reward"], "rft.purge_texts(ARRAY[1], 1, false) IS NULL", "read-only transaction"),
        (["reward"], "1 / (experience_id - experience_id) = 1", "division by zero"),
    ):
        with pytest.raises(QueryError, match=re.escape(what)):
            filled.scan(columns, where).read_all()
    with pytest.raises(ConfigError, match="share"):
        filled.scan(["reward"], share=(2, 2))
    filled.find_run("first").end("finished", "done")
    archive(filled, "first", author="ada")
    with pytest.raises(ArchivedError, match="'first' is archived, and the condition reads one of its texts"):
        filled.scan(["token_ids"], "length(response) > 3")
    assert (
        filled.scan(["token_ids"], "response IS NOT NULL", run='the "second"').read_all().num_rows
        == NUM_GROUPS * GROUP_SIZE
    )
