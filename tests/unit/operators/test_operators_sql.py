"""A sql stage keeps what its query returns, sees nothing but the batch, and is checked before it runs."""

from __future__ import annotations

import contextlib
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.chain.build import build_chain
from operators.chain.stage import StageError
from operators.sql.sandbox import open_sandbox
from rftdata.errors import ConfigError
from tests.support.batches import batch_of_groups


def kept(table: pa.Table, args: object) -> list[int]:
    result = build_chain([{"sql": args}], require_reward=False).run(table).decisions
    return [row["experience_id"] for row in result.to_pylist() if row["kept"]]


def test_rows_missing_from_the_result_are_dropped_with_the_query_as_reason() -> None:
    result = (
        build_chain([{"sql": "SELECT *\n  FROM batch WHERE reward > 0.5"}]).run(batch_of_groups([0, 1, 1])).decisions
    )
    assert result["kept"].to_pylist() == [False, True, True]
    assert result["reason"][0].as_py() == "not in the result of SELECT * FROM batch WHERE reward > 0.5"


def test_the_reason_can_be_given() -> None:
    args = {"query": "SELECT experience_id FROM batch WHERE reward > 0.5", "reason": "too little reward"}
    assert (
        build_chain([{"sql": args}]).run(batch_of_groups([0, 1])).decisions["reason"].to_pylist()[0]
        == "too little reward"
    )


def test_the_order_of_the_result_does_not_matter() -> None:
    query = "SELECT * REPLACE (reward * 10 AS reward) FROM batch ORDER BY experience_id DESC"
    assert build_chain([{"sql": query}]).run(batch_of_groups([1, 2, 3])).decisions["reward"].to_pylist() == [10, 20, 30]


def test_a_new_column_is_there_for_later_stages() -> None:
    chain = build_chain(
        [
            {"sql": "SELECT *, length(response) AS num_characters FROM batch"},
            {"sql": "FROM batch WHERE num_characters > 3"},
        ]
    )
    assert chain.run(batch_of_groups([0, 1], response=["abc", "abcd"])).decisions["kept"].to_pylist() == [False, True]


def test_whole_numbers_become_rewards() -> None:
    query = "SELECT experience_id, 1::INTEGER AS reward FROM batch"
    assert build_chain([{"sql": query}]).run(batch_of_groups([0, 1])).decisions["reward"].to_pylist() == [1.0, None]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (
            "SELECT nope FROM batch",
            r"stage 1 of the pipeline \(sql\): .*\"nope\" not found.*columns of batch: experience_id, ",
        ),
        ("SELEC 1", r"stage 1 .*syntax error at or near \"SELEC\""),
        ("SELECT reward FROM batch", r"must have the column experience_id"),
        ("SELECT *, reward * 2 AS reward FROM batch", r"a column twice \(got 'reward'\).*REPLACE"),
        (
            "SELECT * REPLACE ('abc' AS reward) FROM batch",
            r"makes reward something other than a number \(got 'string'\)",
        ),
        ("SELECT * REPLACE ([1.0] AS priority) FROM batch", r"makes priority something other than a number"),
        ("SELECT 1; SELECT 2", r"not one SELECT"),
        ("DELETE FROM batch", r"not one SELECT"),
        ("SET threads = 4", r"not one SELECT"),
        ("INSTALL httpfs", r"not one SELECT"),
        ("COPY batch TO 'stolen.csv'", r"not one SELECT"),
        ("ATTACH 'other.db'", r"not one SELECT"),
        ("SELECT 1::BIGINT AS experience_id FROM read_text('/etc/hostname')", r"file system operations are disabled"),
        (
            "SELECT 1::BIGINT AS experience_id FROM 'x.parquet'",
            r"file system operations are disabled .*; give it the file as a table \(tables: .*\(allow: \{files:",
        ),
        ("SELECT 1::BIGINT AS experience_id FROM glob('/*')", r"file system operations are disabled"),
        ("SELECT 1::BIGINT AS experience_id FROM read_csv('http://localhost/x.csv')", r"disabled"),
    ],
)
def test_a_query_that_cannot_work_is_refused_when_the_chain_is_built(query: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_chain([{"sql": query}])


def test_a_query_does_not_see_variables_of_this_program() -> None:
    secret = pa.table({"experience_id": [1]})
    assert secret.num_rows
    with pytest.raises(ConfigError, match="Table with name secret does not exist"):
        build_chain([{"sql": "FROM secret"}])


def test_files_stay_closed_while_a_batch_runs(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("100")
    # Built from the data, so that only the run can find out.
    query = f"SELECT b.* FROM batch b, read_text('{tmp_path}/' || b.response) t"
    with pytest.raises((ConfigError, StageError)):
        build_chain([{"sql": query}]).run(batch_of_groups([1], response=["secret.txt"]))


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (
            "SELECT * REPLACE (experience_id + 1 AS experience_id) FROM batch",
            r"an experience_id that is not in the batch",
        ),
        ("FROM batch UNION ALL FROM batch", r"more than once \(got 10[01]\)"),
        ("SELECT * REPLACE (group_id + 1 AS group_id) FROM batch", r"changes group_id"),
        ("SELECT * REPLACE (CAST(response AS DOUBLE) AS reward) FROM batch", r"stage 1 .*Could not convert string"),
        ("SELECT NULL::BIGINT AS experience_id FROM batch", r"an experience_id that is not in the batch"),
    ],
)
def test_a_result_that_is_not_a_decision_on_the_batch_is_refused(query: str, message: str) -> None:
    chain = build_chain([{"sql": query}])
    with pytest.raises(StageError, match=message):
        chain.run(batch_of_groups([0, 1]))


OPERATORS = {"<": float.__lt__, "<=": float.__le__, ">": float.__gt__, ">=": float.__ge__, "=": float.__eq__}


@settings(max_examples=60, deadline=None)
@given(
    rewards=st.lists(st.one_of(st.none(), st.integers(-3, 3).map(lambda n: n / 2)), min_size=1, max_size=12),
    comparison=st.sampled_from(sorted(OPERATORS)),
    bound=st.integers(-3, 3).map(lambda n: n / 2),
    tokens=st.integers(0, 12),
)
def test_a_filter_in_sql_keeps_what_the_same_predicate_in_python_keeps(
    rewards: list[float | None], comparison: str, bound: float, tokens: int
) -> None:
    table = batch_of_groups(rewards, num_response_tokens=list(range(len(rewards))))
    expected = [
        100 + row
        for row, reward in enumerate(rewards)
        if (reward is not None and OPERATORS[comparison](reward, bound)) or row > tokens
    ]
    assert kept(table, f"FROM batch WHERE reward {comparison} {bound} OR num_response_tokens > {tokens}") == expected


# Reference tables, and what is allowed


@pytest.fixture
def references(tmp_path: Path) -> Path:
    pa.parquet.write_table(pa.table({"response": ["a", "c"], "weight": [2.0, 3.0]}), tmp_path / "weights.parquet")
    (tmp_path / "blocked.csv").write_text("response\nb\n")
    (tmp_path / "more.jsonl").write_text('{"response": "c"}\n')
    return tmp_path


def test_reference_tables_are_joined_by_name(references: Path) -> None:
    stage = {
        "query": "SELECT b.* REPLACE (b.reward * w.weight AS reward) FROM batch b LEFT JOIN weights w USING (response) "
        "ANTI JOIN blocked USING (response) ANTI JOIN more USING (response)",
        "tables": {"weights": "weights.parquet", "blocked": "blocked.csv", "more": "more.jsonl"},
    }
    table = batch_of_groups([1, 1, 1], response=["a", "b", "c"])
    result = build_chain([{"sql": stage}], references).run(table).decisions
    assert result["kept"].to_pylist() == [True, False, False]
    assert result["reward"].to_pylist() == [2.0, None, None]


def test_a_reference_table_is_part_of_the_version_by_its_content(references: Path) -> None:
    stage = {"sql": {"query": "FROM batch ANTI JOIN blocked USING (response)", "tables": {"blocked": "blocked.csv"}}}
    before = build_chain([stage], references).version
    assert build_chain([stage], references).version == before
    (references / "blocked.csv").write_text("response\nb\nc\n")
    assert build_chain([stage], references).version != before


def test_the_files_of_reference_tables_stay_closed_to_the_query(references: Path) -> None:
    stage = {
        "query": f"FROM batch WHERE response IN (SELECT response FROM '{references}/blocked.csv')",
        "tables": {"blocked": "blocked.csv"},
    }
    with pytest.raises(ConfigError, match="file system operations are disabled"):
        build_chain([{"sql": stage}], references)


def test_files_and_folders_can_be_opened_by_name_and_no_others(references: Path) -> None:
    table = batch_of_groups([1, 1, 1], response=["a", "b", "c"])
    query = f"FROM batch SEMI JOIN '{references}/{{}}' USING (response)"

    def kept(name: str, *allowed: str) -> list[bool]:
        stage = {"sql": {"query": query.format(name), "allow": {"files": list(allowed)}}}
        found: list[bool] = build_chain([stage], references).run(table).decisions["kept"].to_pylist()
        return found

    assert kept("blocked.csv", "blocked.csv") == [False, True, False]
    assert kept("weights.parquet", ".") == [True, False, True]
    with pytest.raises(ConfigError, match="file system operations are disabled"):
        kept("weights.parquet", "blocked.csv")
    with pytest.raises(ConfigError, match="file system operations are disabled"):
        kept("../secret.csv", ".")
    with pytest.raises(ConfigError, match=r"allowed file or folder does not exist \(got 'nowhere'"):
        kept("blocked.csv", "nowhere")


@pytest.mark.parametrize(
    "query",
    [
        "SELECT 1::BIGINT AS experience_id FROM read_csv('https://localhost/x.csv')",
        "SELECT 1::BIGINT AS experience_id FROM read_parquet('s3://bucket/x.parquet')",
        "SELECT 1::BIGINT AS experience_id, getenv('HOME') AS home",
        "SELECT 1::BIGINT AS experience_id FROM sniff_csv('/etc/passwd')",
        "SELECT 1::BIGINT AS experience_id FROM read_json('/etc/passwd')",
        "SELECT 1::BIGINT AS experience_id FROM sqlite_scan('x.db', 't')",
        "SELECT 1::BIGINT AS experience_id FROM parquet_metadata('x.parquet')",
        "SELECT 1::BIGINT AS experience_id FROM query('COPY batch TO ''stolen.csv''')",
        "COPY (SELECT 1) TO '/tmp/stolen.csv'",
        "LOAD httpfs",
        "PRAGMA enable_external_access",
        "CREATE SECRET (TYPE s3)",
        "CALL pragma_version()",
        "EXPORT DATABASE 'stolen'",
        "SET VARIABLE x = 1",
    ],
)
def test_there_is_no_way_out_of_the_sandbox(query: str) -> None:
    with pytest.raises(ConfigError):
        build_chain([{"sql": query}])


def test_the_sandbox_cannot_be_opened_from_within() -> None:
    for statement in ("SET enable_external_access = true", "SET allowed_paths = ['/etc/passwd']", "LOAD httpfs"):
        with contextlib.closing(open_sandbox()) as connection, pytest.raises(duckdb.Error):
            connection.execute(statement)


def test_the_network_needs_an_extension_that_is_never_installed_from_here() -> None:
    with contextlib.closing(duckdb.connect()) as connection:
        found = connection.execute(
            "SELECT installed FROM duckdb_extensions() WHERE extension_name = 'httpfs'"
        ).fetchone()
    if found == (True,):
        pytest.skip("httpfs is installed here")
    stage = {"sql": {"query": "FROM batch", "allow": {"network": True}}}
    with pytest.raises(
        ConfigError, match=r"extension httpfs does not load: .*install it once: duckdb -c 'INSTALL httpfs'"
    ):
        build_chain([stage])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"tables": {"batch": "blocked.csv"}}, r"'batch' cannot be the name of a reference table"),
        ({"tables": {"a b": "blocked.csv"}}, r"'a b' cannot be the name of a reference table"),
        ({"tables": {"blocked": "nowhere.csv"}}, r"the file does not exist \(got .*nowhere.csv"),
        ({"tables": {"blocked": "blocked.xlsx"}}, r"this file format is not supported"),
        (
            {"query": "FROM batch JOIN weights USING (nope)", "tables": {"weights": "weights.parquet"}},
            r"columns of batch: experience_id, .*; of weights: response, weight; correct the query",
        ),
        ({"allow": {"disk": True}}, r"no key 'allow.disk'; allowed: files, network"),
    ],
)
def test_wrong_references_are_refused_when_the_chain_is_built(
    references: Path, args: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_chain([{"sql": {"query": "FROM batch", **args}}], references)


# What a query is given, and what is taken from it


@pytest.mark.parametrize(
    ("query", "reads", "writes"),
    [
        ("FROM batch WHERE reward > 0", {"reward"}, set()),
        ("SELECT * FROM batch ORDER BY num_response_tokens LIMIT 3;", {"num_response_tokens"}, set()),
        ("SELECT b.* REPLACE (b.REWARD - 1 AS reward) FROM batch b", {"reward"}, {"reward"}),
        ("SELECT *, length(response) AS n FROM batch -- texts", {"response"}, {"n"}),
        ("SELECT * EXCLUDE (prompt) FROM batch WHERE source = 'x'", {"prompt", "source"}, set()),
        ("SELECT experience_id, reward * 2 AS priority FROM batch", {"reward", "priority"}, {"priority"}),
        (
            "FROM batch WHERE reward > (SELECT avg(b.reward) FROM batch b WHERE b.taskset = batch.taskset)",
            {"reward", "taskset"},
            set(),
        ),
        ("FROM batch QUALIFY row_number() OVER (PARTITION BY prompt ORDER BY reward) = 1", {"prompt", "reward"}, set()),
        ("FROM batch SEMI JOIN (SELECT 'a' AS response) USING (response)", None, None),
        ("SELECT COLUMNS(*) FROM batch", None, None),
        ("FROM batch ORDER BY ALL LIMIT 3", None, None),
        ("FROM batch WHERE reward >= 0 ORDER BY 4 DESC LIMIT 1", None, None),
        ("SELECT DISTINCT ON (4) * FROM batch WHERE reward >= 0", None, None),
        ("FROM batch WHERE reward >= #4", None, None),
        ("SELECT experience_id, reward + #4 AS reward FROM batch", None, None),
        ("SELECT experience_id, reward FROM batch ORDER BY 2 LIMIT 4", {"reward"}, {"reward"}),
        ("SELECT * RENAME (reward AS quality) FROM batch", None, None),
        ("SELECT experience_id, batch::VARCHAR AS everything FROM batch", None, None),
        ("WITH b AS (FROM batch) FROM b", None, None),
        ("FROM batch UNION DISTINCT FROM batch", None, None),
    ],
)
def test_a_query_gets_the_columns_it_looks_at_and_gives_those_it_changes(
    query: str, reads: set[str] | None, writes: set[str] | None
) -> None:
    (stage,) = build_chain([{"sql": query}]).stages
    identity = {"experience_id", "group_id", "rollout_index"}
    assert stage.operator.reads == (None if reads is None else reads | identity)
    assert stage.operator.writes == writes


@pytest.mark.parametrize(
    "query",
    [
        "FROM batch WHERE reward >= 0 ORDER BY 4 DESC LIMIT 1",
        "SELECT DISTINCT ON (4) * FROM batch WHERE reward >= 0 ORDER BY 4 DESC",
        "FROM batch WHERE reward >= 0 AND #4 = 9",
    ],
)
def test_a_column_by_its_place_is_that_of_the_whole_batch(query: str) -> None:
    batch = batch_of_groups([0.0, 3.0, 2.0, 1.0], turn_index=[9, 1, 1, 1])
    with contextlib.closing(duckdb.connect()) as connection:
        wanted = {row[0] for row in connection.register("batch", batch).execute(query).fetchall()}
    decisions = build_chain([{"sql": query}]).run(batch).decisions.to_pylist()
    kept = {row["experience_id"] for row in decisions if row["kept"]}
    assert len(kept) == len(wanted) and 100 in kept & wanted


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("now()", "now"),
        ("get_current_timestamp()", "get_current_timestamp"),
        ("current_timestamp", "current_timestamp"),
        ("current_date", "current_date"),
        ("age(TIMESTAMP '2000-01-01')", "age"),
        ("ago(INTERVAL 1 DAY)", "ago"),
        ("current_setting('memory_limit')", "current_setting"),
        ("uuidv7()", "uuidv7"),
        ("(SELECT max(value) FROM duckdb_settings())", "duckdb_settings"),
        ("(SELECT x FROM query('SELECT now() AS x'))", "query"),
    ],
)
def test_what_differs_the_next_time_cannot_be_asked_for(word: str, named: str) -> None:
    query = f"SELECT *, {word}::VARCHAR AS x FROM batch"
    with pytest.raises(ConfigError, match=rf"stage 1 .*\(sql\): {named} gives another answer every time"):
        build_chain([{"sql": query}])


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM batch USING SAMPLE 20% (bernoulli)",
        "SELECT * FROM batch USING SAMPLE 10 ROWS",
        "SELECT * FROM batch WHERE experience_id IN (SELECT experience_id FROM batch TABLESAMPLE 30%)",
    ],
)
def test_a_sample_without_a_seed_is_refused(query: str) -> None:
    with pytest.raises(ConfigError, match="a sample without a seed is another one every time"):
        build_chain([{"sql": query}])


@pytest.mark.parametrize("sample", ["USING SAMPLE 30% (bernoulli, 7)", "TABLESAMPLE reservoir(30%) REPEATABLE (7)"])
def test_a_sample_with_a_seed_is_the_same_every_time(sample: str) -> None:
    chain = build_chain([{"sql": f"SELECT * FROM batch {sample}"}])
    kept = [chain.run(batch_of_groups(*[[0.0, 1.0]] * 100)).decisions["kept"].to_pylist() for _ in range(5)]
    assert 20 < sum(kept[0]) < 120 and kept == [kept[0]] * 5


def test_random_numbers_are_seeded_and_a_column_may_have_the_name_of_a_time() -> None:
    query = "SELECT *, uuid()::VARCHAR AS a, random() AS b, age(TIMESTAMP '2001-01-01', TIMESTAMP '2000-01-01')::VARCHAR AS c FROM batch"
    chain = build_chain([{"sql": query}, {"tag": {"columns": {"x": "a || b || c"}}}])
    first, second = (chain.run(batch_of_groups([0, 1])).scores[0].table for _ in range(2))
    assert first.equals(second) and len(set(first["x"].to_pylist())) == 2
    stages = [{"sql": "SELECT *, 'noon' AS localtime FROM batch"}, {"sql": "FROM batch WHERE localtime = 'noon'"}]
    assert build_chain(stages).run(batch_of_groups([0, 1])).decisions["kept"].to_pylist() == [True, True]


def test_times_are_those_of_utc() -> None:
    query = "SELECT *, to_timestamp(0)::VARCHAR AS x FROM batch"
    chain = build_chain([{"sql": query}, {"tag": {"columns": {"z": "x || date_part('hour', to_timestamp(0))"}}}])
    (scores,) = chain.run(batch_of_groups([0])).scores
    assert scores.table["z"].to_pylist() == ["1970-01-01 00:00:00+000"]
    with contextlib.closing(open_sandbox()) as connection:
        for either in (connection, connection.cursor()):  # formulas are evaluated by cursors
            assert either.execute("SELECT current_setting('TimeZone')").fetchall() == [("UTC",)]


def test_a_query_has_so_much_memory_and_no_disk() -> None:
    with contextlib.closing(open_sandbox()) as connection:
        names = ("memory_limit", "max_temp_directory_size", "temp_directory", "secret_directory")
        values = [connection.execute("SELECT current_setting(?)", [name]).fetchall()[0][0] for name in names]
        assert values == ["1.8 GiB", "0 bytes", "", "/nonexistent"]


@pytest.mark.parametrize(
    "query", ["FROM batch WHERE reward > 0.5", "SELECT * REPLACE (upper(response) AS response) FROM batch"]
)
def test_columns_that_a_query_leaves_alone_are_there_for_later_stages(query: str) -> None:
    chain = build_chain([{"sql": query}, {"sql": "SELECT *, response || prompt AS tail FROM batch"}])
    found: list[pa.Table] = []
    chain.run(
        batch_of_groups([0, 1], response=["a", "b"]), watch=lambda stage, before, after, outcome: found.append(after)
    )
    expected = ["bWhat is 2 + 2?"] if "WHERE" in query else ["AWhat is 2 + 2?", "BWhat is 2 + 2?"]
    assert found[1]["tail"].to_pylist() == expected
    assert set(found[1].column_names) == {*batch_of_groups([0]).column_names, "priority", "tail"}
