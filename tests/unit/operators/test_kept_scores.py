"""Stored scores are used again for the same input and for no other; freshly computed scores are the reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.base import Messages, StageContext
from operators.chain.build import build_chain
from operators.chain.chain import Chain
from operators.chain.input_digests import input_digests
from tests.support.batches import batch_of_groups, stored


def set_column(table: pa.Table, name: str, values: Sequence[object]) -> pa.Table:
    place = table.column_names.index(name)
    return table.set_column(place, name, pa.array(values, table.schema.field(name).type))


def the_same_as_anew(chain: Chain, table: pa.Table, known: Any) -> bool:
    return chain.run(table, stored_scores=known).decisions.equals(chain.run(table).decisions)


def test_a_score_of_a_column_that_looks_across_rows_is_not_used_for_other_rows() -> None:
    chain = build_chain(
        [
            {"sql": "SELECT *, row_number() OVER (ORDER BY num_response_tokens)::INT AS rank FROM batch"},
            {"tag": {"columns": {"top": "rank <= 2"}}},
            {"sql": "SELECT * FROM batch WHERE top"},
        ]
    )
    table = batch_of_groups([0, 1], [0, 1], num_response_tokens=[1, 2, 3, 4])
    known = stored(chain.run(table).scores)
    assert chain.run(table, stored_scores=known).scores == []
    alone = table.slice(2, 2)  # a label sent the second group back
    assert chain.run(alone, stored_scores=known).decisions["kept"].to_pylist() == [True, True]
    assert the_same_as_anew(chain, alone, known)


PAIRWISE = {"pairwise_judge": {"endpoint": "policy"}}
TABLE = batch_of_groups(
    [0.0, 1.0, 1.0], [0.0, 0.0, 1.0], response=list("abcdef"), messages=[None] * 6, metadata=[None] * 6
)


def policy_chain(*stages: dict[str, Any], asked: list[str], version: str | None = "1") -> Chain:
    def generate(chats: Sequence[Messages], max_tokens: int, temperature: float) -> list[str]:
        asked.extend(str(chat[-1]["content"]) for chat in chats)
        return ['{"winner": "1"}' for _ in chats]

    chain = build_chain([*stages, PAIRWISE])
    chain.prepare(StageContext(generate=generate, policy_version=None if version is None else lambda: version))
    return chain


def test_a_score_among_siblings_is_not_used_where_others_are_left() -> None:
    whole, asked = policy_chain(asked=[]), list[str]()
    known = stored(whole.run(TABLE).scores)
    fewer = policy_chain({"reward_threshold": {"min": 0.5}}, asked=asked)
    (found,) = fewer.run(TABLE, stored_scores=known).scores
    assert found.table["experience_id"].to_pylist() == [101, 102, 105] and len(asked) == 2
    # Those that are left in another way are the same siblings.
    again = policy_chain({"sql": "SELECT * FROM batch WHERE reward > 0"}, asked=[])
    assert again.run(TABLE, stored_scores=stored([found])).scores == []


def test_the_same_group_scorer_twice_keeps_the_scores_of_either_place() -> None:
    chain = build_chain([{"pass_rate": {}}, {"reward_threshold": {"min": 0.5}}, {"pass_rate": {}}])
    result = chain.run(TABLE)
    assert [found.table["pass_rate"].to_pylist() for found in result.scores] == [
        [2 / 3] * 3 + [1 / 3] * 3,
        [1.0, 1.0, 1.0],
    ]
    assert chain.run(TABLE, stored_scores=stored(result.scores)).scores == []


@pytest.mark.parametrize(
    ("column", "expression", "values"),
    [
        ("answer", "answer = '4'", ["4", "5", "4", "4", "4", "4"]),
        ("metadata", "metadata.level = 'hard'", ['{"level": "hard"}', *[None] * 5]),
        ("reward", "reward > 0.5", [1.0, 1.0, 1.0, 0.0, 0.0, 1.0]),
    ],
)
def test_a_score_of_a_column_that_was_corrected_is_computed_again(
    column: str, expression: str, values: list[object]
) -> None:
    chain = build_chain([{"tag": {"columns": {"fits": expression}}}, {"threshold": {"column": "fits", "min": 1}}])
    known = stored(chain.run(TABLE).scores)
    corrected = set_column(TABLE, column, values)
    changed = [a != b for a, b in zip(values, TABLE[column].to_pylist(), strict=True)]
    (found,) = chain.run(corrected, stored_scores=known).scores
    assert found.table.num_rows == sum(changed) and the_same_as_anew(chain, corrected, known)
    assert chain.run(set_column(TABLE, "finish_reason", ["length"] * 6), stored_scores=known).scores == []


def test_a_file_that_a_query_may_read_is_part_of_what_it_decides(tmp_path: Path) -> None:
    (tmp_path / "lists").mkdir()

    def chain(word: str) -> Chain:
        (tmp_path / "words.csv").write_text(f"w\n{word}\n")
        (tmp_path / "lists" / "more.csv").write_text(f"w\n{word}\n")
        query = "SELECT * REPLACE (response || (SELECT w FROM read_csv('{}')) AS response) FROM batch"
        files = {"allow": {"files": ["words.csv", "lists"]}, "query": query.format(tmp_path / "words.csv")}
        stages = [{"sql": files}, {"tag": {"columns": {"n": "length(response)"}}}]
        return build_chain(stages, tmp_path)

    first = chain("four")
    version, known = first.version, stored(first.run(TABLE).scores)
    second = chain("seventeen")
    assert second.version != version
    assert second.run(TABLE, stored_scores=known).scores[0].table["n"].to_pylist() == [10] * 6
    (tmp_path / "words.csv").write_text("w\nfour\n")
    same = build_chain([{"sql": second.stages[0].operator.config.model_dump()}], tmp_path)
    versions = [same.version]
    (tmp_path / "lists" / "more.csv").write_text("w\nfour\n")
    versions.append(build_chain([{"sql": second.stages[0].operator.config.model_dump()}], tmp_path).version)
    assert versions[0] != versions[1]


def test_what_the_policy_said_is_used_while_its_weights_are_the_same() -> None:
    asked: list[str] = []
    first = policy_chain(asked=asked)
    known = stored(first.run(TABLE).scores)
    num_asked = len(asked)
    assert policy_chain(asked=asked).run(TABLE, stored_scores=known).scores == [] and len(asked) == num_asked
    (found,) = policy_chain(asked=asked, version="2").run(TABLE, stored_scores=known).scores
    assert found.table.num_rows == 6 and len(asked) == 2 * num_asked
    unknown = policy_chain(asked=asked, version=None)
    (found,) = unknown.run(TABLE, stored_scores=known).scores
    assert found.table.num_rows == 6 and stored([found]) == {}


def test_a_judge_does_not_remember_what_other_weights_said() -> None:
    versions, asked = ["1"], list[str]()

    def generate(chats: Sequence[Messages], max_tokens: int, temperature: float) -> list[str]:
        asked.extend(str(chat[-1]["content"]) for chat in chats)
        return ['{"winner": "1"}' for _ in chats]

    chain = build_chain([PAIRWISE])
    chain.prepare(StageContext(generate=generate, policy_version=lambda: versions[0]))
    chain.run(TABLE)
    num_asked = len(asked)
    chain.run(TABLE)
    assert len(asked) == num_asked
    versions[0] = "2"
    chain.run(TABLE)
    assert len(asked) == 2 * num_asked


def digests(*, rowwise: bool = True, **columns: pa.Array) -> list[int]:
    num_rows = len(next(iter(columns.values())))
    identity = {
        "group_id": [row // 2 for row in range(num_rows)],
        "rollout_index": [row % 2 for row in range(num_rows)],
    }
    found: list[int] = input_digests(pa.table({**identity, **columns}), rowwise=rowwise).to_pylist()
    return found


texts = st.lists(st.one_of(st.none(), st.text(max_size=3)), min_size=1, max_size=8)
numbers = st.lists(st.one_of(st.none(), st.floats(), st.sampled_from([0.0, 1.0])), min_size=1, max_size=8)


@given(st.one_of(texts.map(lambda v: pa.array(v, pa.string())), numbers.map(lambda v: pa.array(v, pa.float64()))))
def test_digests_are_equal_where_values_are(values: pa.Array) -> None:
    found = digests(x=values)
    shown = [repr(value + 0.0 if isinstance(value, float) else value) for value in values.to_pylist()]
    assert [[a == b for b in found] for a in found] == [[a == b for b in shown] for a in shown]


@given(numbers.map(lambda v: pa.array(v, pa.float64())), st.integers(0, 7))
def test_a_digest_does_not_depend_on_the_rows_around_it(values: pa.Array, start: int) -> None:
    padded = pa.concat_arrays([pa.array([7.0] * start, pa.float64()), values])
    names = pa.array([str(value) for value in padded.to_pylist()])
    tail = {"x": padded.slice(start), "y": names.slice(start), "z": padded.is_null().slice(start)}
    copied = {name: pa.array(column.to_pylist(), column.type) for name, column in tail.items()}
    assert digests(**tail) == digests(**copied)


def test_null_is_no_value_and_columns_are_distinguished() -> None:
    nothing, empty = pa.array([None, None], pa.string()), pa.array(["", ""])
    assert not set(digests(x=nothing)) & set(digests(x=empty))
    assert digests(x=pa.nulls(2)) == digests(x=nothing)  # a query may give a column of nulls another type
    assert digests(x=pa.array([1, 2], pa.int32())) == digests(x=pa.array([1, 2], pa.int64()))
    assert digests(x=empty, y=nothing) != digests(x=nothing, y=empty)
    assert digests(x=pa.array([[1], [2]])) != digests(x=pa.array([[1], [3]]))


def test_of_a_group_every_row_and_its_place_counts() -> None:
    first = digests(rowwise=False, x=pa.array(["a", "b", "a", "b"]))
    assert first[0] == first[2] and first[1] == first[3] and first[0] != first[1]
    assert not set(first[:2]) & set(digests(rowwise=False, x=pa.array(["b", "a"])))
    assert not set(first[:2]) & set(digests(rowwise=False, x=pa.array(["a"])))
    other = digests(rowwise=False, x=pa.array(["a", "b", "a", "c"]))
    assert other[:2] == first[:2] and not set(other[2:]) & set(first)


def test_digests_stay_what_they_are_since_they_are_stored() -> None:
    columns = {"x": pa.array(["four", None]), "y": pa.array([0.5, 2.0]), "z": pa.array([True, False])}
    assert digests(**columns) == [-7563488948810099477, -6036494047540442950]
    assert digests(rowwise=False, **columns) == [103269595915137138, 5812395445303519646]
