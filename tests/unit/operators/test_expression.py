"""A formula in a configuration: its values, what it reads, and what it must not do."""

from __future__ import annotations

import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from operators.sql.expression import Expression
from rftdata.errors import ConfigError, OperatorError
from tests.support.batches import batch_of_groups

METRICS = ['{"quality": 0.5, "ok": true}', '{"quality": "good"}', "{}", None, '{"a b/c": 2, "quality": "3"}']


def batch() -> pa.Table:
    table = batch_of_groups([0, 1, None], [2, 3], metrics=METRICS)
    return table.append_column("metadata", pa.array(['{"level": 3, "kind": "sum"}'] + ["{}"] * 4))


def values(text: str, type: pa.DataType | None = None) -> list[object]:
    expression, table = Expression(text, type), batch()
    expression.bind(table.schema)
    found: list[object] = expression.evaluate(table.select(sorted(expression.columns | {"experience_id"}))).to_pylist()
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("reward + 0.1 * num_response_tokens", [0.9, 1.9, None, 2.9, 3.9]),
        ("CASE WHEN reward > 1 THEN 1 ELSE reward END", [0, 1, None, 1, 1]),
        ("coalesce(reward, -1)", [0, 1, -1, 2, 3]),
        ("metrics.quality", [0.5, None, None, None, None]),
        ("metrics.ok", [1.0, None, None, None, None]),
        ('metrics."a b/c" * 2', [None, None, None, None, 4.0]),
        ("reward - avg(reward) OVER (PARTITION BY group_id)", [-0.5, 0.5, None, -0.5, 0.5]),
        ("count(*) OVER (PARTITION BY group_id)", [3, 3, 3, 2, 2]),
        ("row_number() OVER (ORDER BY experience_id DESC)", [5, 4, 3, 2, 1]),
        ("metadata.level::INT + 1", [4, None, None, None, None]),
        ("len(list_filter(string_split(response, ' '), lambda reward: length(reward) > 3))", [3] * 5),
        ("batch.reward -- the reward", [0, 1, None, 2, 3]),
        ("1", [1] * 5),
        ("1.5", [1.5] * 5),
        ("num_response_tokens // reward::INT", [None, 9, None, 4, 3]),
        ("num_response_tokens % (reward::INT - 1)", [0, None, None, 0, 1]),
        ("mod(7, 0)", [None] * 5),
        ("list_sum(list_transform([0, 2], lambda x: 7 // x))", [3] * 5),
    ],
)
def test_what_a_formula_gives(text: str, expected: list[float | None]) -> None:
    assert values(text) == pytest.approx(expected)


def test_texts_are_taken_as_they_are_written() -> None:
    assert values("metadata.kind = 'sum'") == [True, None, None, None, None]
    assert values("'two  spaces'") == ["two  spaces"] * 5
    assert values("json_extract_string(metrics, '$.quality')") == ["0.5", "good", None, None, "3"]


def test_a_text_in_a_column_of_numbers_is_no_number() -> None:
    metrics = [
        '{"x": "0.5"}',
        '{"x": "NaN"}',
        '{"x": "true"}',
        '{"x": -0.5}',
        '{"x": false}',
        '{"x": [1]}',
        '{"x": null}',
    ]
    table = batch_of_groups([0] * len(metrics), metrics=metrics)
    expression = Expression("metrics.x", pa.float64())
    expression.bind(table.schema)
    assert expression.evaluate(table).to_pylist() == [None, None, None, -0.5, 0.0, None, None]


def test_numbers_and_truth_values_become_the_type_asked_for() -> None:
    assert values("reward > 0", pa.float64()) == [0.0, 1.0, None, 1.0, 1.0]
    assert values("NULL", pa.float64()) == [None] * 5
    assert values("2", pa.float64()) == [2.0] * 5
    assert values("reward / 0", pa.float64())[1] == math.inf


def test_a_formula_states_which_columns_it_needs_and_whether_rows_stand_alone() -> None:
    formula = Expression("reward + metrics.quality * list_sum(list_transform([1], lambda x: x + 1))")
    assert (formula.columns, formula.rowwise) == ({"reward", "metrics"}, True)
    assert not Expression("max(reward) OVER ()").rowwise


@pytest.mark.parametrize(
    ("text", "type", "message"),
    [
        ("nope + 1", None, r"reads the column 'nope', which the batch does not have; allowed: experience_id, "),
        ("reward +", None, r"not an expression: syntax error"),
        ("", None, r"it is empty"),
        ("reward AS r", None, r"not an expression"),
        ("1) AS a, (2", None, r"more than one expression"),
        ("1) FROM batch; SELECT (2", None, r"not an expression|more than"),
        ("(SELECT max(reward) FROM batch)", None, r"a subquery cannot be used"),
        ("experience_id IN (SELECT 1)", None, r"a subquery cannot be used"),
        ("COLUMNS(*)", None, r"\* cannot be used"),
        ("$1", None, r"a parameter cannot be used"),
        ("max(reward)", None, r"is an aggregate and needs a window; write max\(…\) OVER \(PARTITION BY group_id\)"),
        ("unnest([reward, 2])", None, r"unnest\(\) makes several rows from one"),
        ("1 + generate_subscripts([1, 2], 1)", None, r"generate_subscripts\(\) makes several rows"),
        ("random()", None, r"another value every time"),
        ("now()", None, r"another value every time"),
        ("getenv('HOME')", None, r"getenv does not exist"),
        ("read_text('/etc/hostname')", None, r"DuckDB refuses"),
        ("length(reward)", None, r"DuckDB refuses 'length\(reward\)'"),
        ("response", pa.float64(), r"'response' is not a number \(got 'string'\)"),
        ("reward", pa.bool_(), r"'reward' is not a condition"),
        ("reward", pa.string(), r"'reward' is not a text"),
    ],
)
def test_a_formula_that_cannot_work_is_refused_before_anything_runs(
    text: str, type: pa.DataType | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Expression(text, type).bind(batch().schema)


def test_a_value_that_cannot_be_worked_out_names_the_formula() -> None:
    with pytest.raises(OperatorError, match=r"cannot evaluate 'response::INT': .*Could not convert"):
        values("response::INT")


def test_an_empty_batch_has_no_values() -> None:
    for text in ("reward + 1", "sum(reward) OVER ()", "1"):
        assert Expression(text, pa.float64()).evaluate(batch_of_groups()).to_pylist() == []


def test_threads_share_a_formula_and_processes_get_their_own() -> None:
    formula = Expression("reward * 2", pa.float64())
    tables = [batch_of_groups([float(number)] * 50) for number in range(16)]
    with ThreadPoolExecutor(4) as pool:
        assert [found[0].as_py() for found in pool.map(formula.evaluate, tables)] == [2.0 * n for n in range(16)]
    copy = pickle.loads(pickle.dumps(formula))
    assert copy.evaluate(tables[3]).to_pylist() == [6.0] * 50
    formula.close()
    assert formula.evaluate(tables[1]).to_pylist() == [2.0] * 50


def test_how_long_ago_something_was_differs_the_next_time() -> None:
    with pytest.raises(ConfigError, match=r"age\(\) gives another value every time"):
        Expression("age(TIMESTAMP '2000-01-01')::VARCHAR")
    assert Expression("age(TIMESTAMP '2001-01-01', TIMESTAMP '2000-01-01')::VARCHAR").columns == frozenset()
