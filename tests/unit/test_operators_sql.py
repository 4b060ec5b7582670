"""A sql stage keeps what its query returns, sees nothing but the batch, and is checked before it runs."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.build import build_chain
from operators.stage import StageError
from rftdata.errors import ConfigError
from tests.batches import batch_of_groups


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
        ("SELECT 1; SELECT 2", r"not one SELECT"),
        ("DELETE FROM batch", r"not one SELECT"),
        ("SET threads = 4", r"not one SELECT"),
        ("INSTALL httpfs", r"not one SELECT"),
        ("COPY batch TO 'stolen.csv'", r"not one SELECT"),
        ("ATTACH 'other.db'", r"not one SELECT"),
        ("SELECT 1::BIGINT AS experience_id FROM read_text('/etc/hostname')", r"file system operations are disabled"),
        ("SELECT 1::BIGINT AS experience_id FROM 'x.parquet'", r"file system operations are disabled"),
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
