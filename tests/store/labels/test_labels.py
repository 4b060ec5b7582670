"""Labels: one batch is one transaction and one undo; undoing a batch does not overwrite later labels."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

import rftdata
from rftdata import labels
from rftdata.errors import QueryError
from tests.support.stored_run import StoredRun


@pytest.fixture
def ids(buffer: rftdata.Buffer) -> list[int]:
    """Four experiences with rewards 0, 0, 1, 1."""
    run = StoredRun(buffer)
    run.attempt()
    run.group(0, [0.0, 0.0])
    run.group(0, [1.0, 1.0])
    return run.experiences()


def rewards(buffer: rftdata.Buffer) -> list[float]:
    return buffer.sql("SELECT reward FROM rft.experience ORDER BY experience_id")["reward"].to_pylist()


def test_a_label_records_author_time_reason_and_the_replaced_reward(buffer: rftdata.Buffer, ids: list[int]) -> None:
    batch = labels.set_rewards(buffer, {ids[0]: 0.5}, author="ada", reason="units were right", final=True)
    (label,) = labels.history(buffer, ids[0])
    assert rewards(buffer) == [0.5, 0.0, 1.0, 1.0]
    assert (label["old_value"], label["new_value"], label["final"]) == (0.0, 0.5, True)
    assert (label["author"], label["reason"], label["source"]) == ("ada", "units were right", "set")
    assert label["label_batch_id"] == batch.label_batch_id
    assert label["session_user_name"] != "ada"


def test_a_reward_that_stands_already_gets_no_label(buffer: rftdata.Buffer, ids: list[int]) -> None:
    batch = labels.set_rewards(buffer, {ids[0]: 0.0, ids[1]: 1.0}, author="ada")
    assert (batch.num_changed, batch.num_unchanged) == (1, 1)
    assert labels.history(buffer, ids[0]) == []


def test_what_was_sampled_is_kept(buffer: rftdata.Buffer, ids: list[int]) -> None:
    labels.set_rewards(buffer, {ids[0]: 1.0}, author="ada")
    assert buffer.sql("SELECT reward_sampled AS r FROM rft.experience ORDER BY experience_id")["r"].to_pylist() == [
        0.0,
        0.0,
        1.0,
        1.0,
    ]


@pytest.mark.parametrize("bad", [{10**9: 1.0}, {1: float("nan")}, {1: float("inf")}])
def test_a_batch_with_one_bad_row_writes_nothing(buffer: rftdata.Buffer, ids: list[int], bad: dict[int, float]) -> None:
    with pytest.raises(QueryError):
        labels.set_rewards(buffer, {ids[1]: 1.0, **bad}, author="ada")
    assert rewards(buffer) == [0.0, 0.0, 1.0, 1.0]
    assert labels.batches(buffer) == []


def test_undo_restores_rewards_and_finality_as_a_new_batch(buffer: rftdata.Buffer, ids: list[int]) -> None:
    labels.set_rewards(buffer, {ids[0]: 0.2}, author="ada", final=True)
    second = labels.set_rewards(buffer, {ids[0]: 0.9, ids[1]: 0.9}, author="bob")
    undone = labels.undo(buffer, second.label_batch_id, author="carol", reason="wrong file")
    assert rewards(buffer) == [0.2, 0.0, 1.0, 1.0]
    newest = labels.history(buffer, ids[0])[0]
    assert newest["final"] and newest["reason"] == f"undo of label batch {second.label_batch_id}: wrong file"
    assert (undone.num_changed, undone.overruled) == (2, ())


def test_undo_leaves_rows_that_were_labelled_again(buffer: rftdata.Buffer, ids: list[int]) -> None:
    first = labels.set_rewards(buffer, {ids[0]: 0.5, ids[1]: 0.5}, author="ada")
    labels.set_rewards(buffer, {ids[1]: 0.7}, author="bob")
    undone = labels.undo(buffer, first.label_batch_id, author="ada")
    assert rewards(buffer) == [0.0, 0.7, 1.0, 1.0]
    assert undone.overruled == (ids[1],)


def test_undo_of_the_older_batch_is_possible_once_the_newer_is_undone(buffer: rftdata.Buffer, ids: list[int]) -> None:
    first = labels.set_rewards(buffer, {ids[0]: 0.5}, author="ada")
    second = labels.set_rewards(buffer, {ids[0]: 0.7}, author="bob")
    labels.undo(buffer, second.label_batch_id, author="bob")
    labels.undo(buffer, first.label_batch_id, author="ada")
    assert rewards(buffer)[0] == 0.0


def test_the_same_value_from_another_author_is_another_label(buffer: rftdata.Buffer, ids: list[int]) -> None:
    first = labels.set_rewards(buffer, {ids[0]: 1.0}, author="ada")
    labels.set_rewards(buffer, {ids[0]: 0.0}, author="bob")
    labels.set_rewards(buffer, {ids[0]: 1.0}, author="carol")
    undone = labels.undo(buffer, first.label_batch_id, author="ada")
    assert rewards(buffer)[0] == 1.0
    assert undone.overruled == (ids[0],)


def test_an_undo_can_be_undone(buffer: rftdata.Buffer, ids: list[int]) -> None:
    first = labels.set_rewards(buffer, {ids[0]: 0.5}, author="ada")
    undone = labels.undo(buffer, first.label_batch_id, author="bob")
    labels.undo(buffer, undone.label_batch_id, author="ada")
    assert rewards(buffer)[0] == 0.5


def test_a_reason_that_reads_like_an_undo_is_none(buffer: rftdata.Buffer, ids: list[int]) -> None:
    first = labels.set_rewards(buffer, {ids[0]: 0.5}, author="ada")
    reason = f"undo of label batch {first.label_batch_id} is not enough, half of it was right"
    second = labels.set_rewards(buffer, {ids[0]: 0.7}, author="bob", reason=reason)
    third = labels.set_rewards(buffer, {ids[0]: 0.9}, author="carol")
    labels.undo(buffer, third.label_batch_id, author="carol")
    undone = labels.undo(buffer, second.label_batch_id, author="bob")
    assert undone.overruled == ()
    assert rewards(buffer)[0] == 0.5


def test_a_batch_written_in_plain_sql_can_be_undone(buffer: rftdata.Buffer, ids: list[int]) -> None:
    buffer.sql("UPDATE rft.experience SET reward = reward + 1")
    (batch,) = labels.batches(buffer)
    assert (batch["num_labels"], batch["source"]) == (4, "sql")
    labels.undo(buffer, batch["label_batch_id"], author="ada")
    assert rewards(buffer) == [0.0, 0.0, 1.0, 1.0]


def test_undoing_an_unknown_batch_is_an_error(buffer: rftdata.Buffer, ids: list[int]) -> None:
    with pytest.raises(QueryError, match="rft label history"):
        labels.undo(buffer, 10**6, author="ada")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_file_of_labels_is_one_batch_with_a_reason_for_each_row(
    buffer: rftdata.Buffer, ids: list[int], tmp_path: Path, kind: str
) -> None:
    file = tmp_path / f"labels.{kind}"
    if kind == "csv":
        file.write_text(f"experience_id,reward,reason\n{ids[0]},0.25,first\n{ids[1]},0.75,\n")
    elif kind == "jsonl":
        file.write_text(
            f'{{"experience_id": {ids[0]}, "reward": 0.25, "reason": "first"}}\n'
            f'{{"experience_id": {ids[1]}, "reward": 0.75, "reason": null}}\n'
        )
    else:
        pyarrow.parquet.write_table(
            pa.table({"experience_id": ids[:2], "reward": [0.25, 0.75], "reason": ["first", None]}), file
        )
    batch = labels.import_rewards(buffer, file, author="ada", reason="second look")
    assert rewards(buffer)[:2] == [0.25, 0.75]
    found = {row["experience_id"]: row["reason"] for row in labels.history(buffer, label_batch_id=batch.label_batch_id)}
    assert found == {ids[0]: "first", ids[1]: "second look"}


@pytest.mark.parametrize(
    ("reasons", "found"),
    [
        ([7, 7], ["7", "7"]),
        ([7, None], ["7", "second look"]),
        ([0.5, float("nan")], ["0.5", "second look"]),
        (["  ", ""], ["second look", "second look"]),
        ([None, None], ["second look", "second look"]),
        ([True, None], ["True", "second look"]),
        (["a\x00b", "c"], ["a\ufffdb", "c"]),
    ],
)
def test_reasons_need_not_be_text(
    buffer: rftdata.Buffer, ids: list[int], tmp_path: Path, reasons: list[object], found: list[str]
) -> None:
    file = tmp_path / "labels.parquet"
    pyarrow.parquet.write_table(pa.table({"experience_id": ids[:2], "reward": [0.25, 0.75], "reason": reasons}), file)
    labels.import_rewards(buffer, file, author="ada", reason="second look")
    assert [labels.history(buffer, key)[0]["reason"] for key in ids[:2]] == found


def test_a_csv_column_of_numbers_with_holes_keeps_its_text_as_reasons(
    buffer: rftdata.Buffer, ids: list[int], tmp_path: Path
) -> None:
    (tmp_path / "labels.csv").write_text(f"experience_id,reward,reason\n{ids[0]},0.25,007\n{ids[1]},0.75,\n")
    labels.import_rewards(buffer, tmp_path / "labels.csv", author="ada")
    assert [labels.history(buffer, key)[0]["reason"] for key in ids[:2]] == ["007", None]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("id,reward\n1,1\n", "lacks the column experience_id"),
        ("experience_id,reward\n{0},1\n{0},0\n", "labelled twice"),
        ("experience_id,reward\n{0},1\n{1},\n", "row 2"),
        ("experience_id,reward\n{0},good\n", "row 1"),
        ("experience_id,reward,reward\n{0},1,0\n", "two columns reward"),
        ("experience_id,reward\n{0},1_0\n", "row 1"),
        ("experience_id,reward\n0_{0},1\n", "row 1"),
        ("experience_id,reward\n٣,1\n", "row 1"),
        ("experience_id,reward\n{0}99999999999999999999,1\n", "row 1"),
        ("experience_id,reward\n{0},true\n", "row 1"),
        (
            'experience_id,reward,reason\n{0},1,fine\n{1},1,"half',
            r"row 2 of .*labels\.csv is not CSV: unexpected end of data",
        ),
        ('experience_id,reward,reason\n{0},1,"half\n{1},1,fine\n', r"row 1 of .*labels\.csv is not CSV"),
        ('experience_id,reward,reason\n\n{0},1,"a"b\n', r"row 1 of .*labels\.csv is not CSV"),
        ('experience_id,"reward\n{0},1\n', r"the header of .*labels\.csv is not CSV"),
    ],
)
def test_a_file_with_a_mistake_is_refused_whole(
    buffer: rftdata.Buffer, ids: list[int], tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "labels.csv"
    file.write_text(text.format(*ids))
    with pytest.raises(QueryError, match=says):
        labels.import_rewards(buffer, file, author="ada")
    assert rewards(buffer) == [0.0, 0.0, 1.0, 1.0]


def test_a_reason_in_quotes_may_have_lines_and_quotes(buffer: rftdata.Buffer, ids: list[int], tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text(
        f'experience_id,reward,reason\n{ids[0]},0.25,"one\n""two"", three"\n{ids[1]},0.75,\n'
    )
    labels.import_rewards(buffer, tmp_path / "labels.csv", author="ada")
    assert {row["reason"] for row in labels.history(buffer)} == {None, 'one\n"two", three'}


@pytest.mark.parametrize("name", ["missing.csv", "labels.xlsx"])
def test_a_file_that_cannot_be_read_reports_it(buffer: rftdata.Buffer, tmp_path: Path, name: str) -> None:
    with pytest.raises(QueryError, match=name):
        labels.import_rewards(buffer, tmp_path / name, author="ada")
