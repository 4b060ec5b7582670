"""Samples and mixtures: the same whole groups every time, in the requested shares."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from operators.chain.build import build_chain
from operators.groups import hashed
from rftdata.errors import ConfigError
from tests.support.batches import batch_of_groups
from tests.unit.operators.test_operators_experience import outcome, reasons


def groups_kept(name: str, args: object, table: pa.Table) -> list[int]:
    kept = table.filter(outcome(name, args, table).reasons.is_null())["group_id"]
    return sorted(set(kept.to_pylist()))


def test_a_fraction_of_the_groups_stays_whole() -> None:
    table = batch_of_groups(*[[0, 1]] * 2000)
    kept = groups_kept("sample", {"fraction": 0.25}, table)
    # 2000 independent decisions: the deviation is 19.
    assert 420 < len(kept) < 580
    found = reasons("sample", {"fraction": 0.25}, table)
    assert found[::2] == found[1::2]
    assert next(filter(None, found)) == "not in the sample of 0.25 of the groups"


def test_a_sample_is_the_same_in_every_batch_and_part_of_a_larger_one() -> None:
    table = batch_of_groups(*[[0, 1]] * 200)
    small = groups_kept("sample", {"fraction": 0.2}, table)
    assert groups_kept("sample", {"fraction": 0.2}, table.slice(200)) == [group for group in small if group >= 100]
    assert set(small) < set(groups_kept("sample", {"fraction": 0.4}, table))
    assert small != groups_kept("sample", {"fraction": 0.2, "seed": 1}, table)


def test_the_hash_is_the_same_on_every_machine() -> None:
    # splitmix64's finaliser of 1 + 7 · 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019, worked out with Python's integers.
    state = (1 + 7 * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    assert int(hashed(np.array([1]), 7)[0]) == state ^ (state >> 31)


def test_rows_and_groups_up_to_a_number() -> None:
    table = batch_of_groups([0] * 4, [0] * 4, [0] * 4, taskset=["a"] * 8 + ["b"] * 4)
    kept = [reason is None for reason in reasons("sample", {"max_rows": 3, "per": "group"}, table)]
    assert [sum(kept[at : at + 4]) for at in (0, 4, 8)] == [3, 3, 3]
    assert sum(reason is None for reason in reasons("sample", {"max_rows": 5}, table)) == 5
    assert len(groups_kept("sample", {"max_groups": 2}, table)) == 2
    of_each = groups_kept("sample", {"max_groups": 1, "per": "taskset"}, table)
    assert len(of_each) == 2
    assert 2 in of_each
    dropped = [reason for reason in reasons("sample", {"max_groups": 1, "per": "taskset"}, table) if reason]
    assert dropped == ["beyond the first 1 groups of the taskset, in the order of the sample"] * 4


def test_shares_of_tasksets_hold_and_as_many_groups_as_possible_stay() -> None:
    table = batch_of_groups(*[[0, 1]] * 12, taskset=["a"] * 4 + ["b"] * 12 + ["c"] * 8)
    # Of a 2 groups, of b 6, of c 4; at 1 : 1 two of each stay.
    found = reasons("mix", {"shares": {"a": 1, "b": 1}}, table)
    assert [sum(reason is None for reason in part) for part in (found[:4], found[4:16], found[16:])] == [4, 4, 0]
    assert set(found) == {None, "the batch has more of taskset b than its share", "taskset c has no share"}
    found = reasons("mix", {"shares": {"a": 1, "b": 3}, "others": "keep"}, table)
    assert found == [None] * 24


def test_a_kind_that_is_not_there_has_no_part() -> None:
    table = batch_of_groups(*[[0, 1]] * 4, source=["human"] * 2 + ["explorer"] * 6)
    found = reasons("mix", {"by": "source", "shares": {"human": 1, "explorer": 2, "import": 5}}, table)
    assert [reason is None for reason in found[::2]].count(True) == 3


def test_groups_without_a_kind_go_as_others_say() -> None:
    table = batch_of_groups([0, 1], [0, 1], taskset=[None, None, "a", "a"])
    assert reasons("mix", {"shares": {"a": 1}}, table) == ["taskset null has no share"] * 2 + [None] * 2
    assert reasons("mix", {"shares": {"a": 1}, "others": "keep"}, table) == [None] * 4
    assert reasons("mix", {"shares": {"z": 1}}, table)[2] == "taskset a has no share"
    assert len(outcome("mix", {"shares": {"a": 1}}, batch_of_groups()).reasons) == 0


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"sample": {}}, r"give one of fraction, max_groups and max_rows, not none"),
        ({"sample": {"fraction": 0.5, "max_rows": 3}}, r"not fraction and max_rows"),
        ({"sample": {"fraction": 1.5}}, r"the key 'fraction' is wrong"),
        ({"sample": {"max_groups": 2, "per": "group"}}, r"max_groups counts groups of a batch or of a taskset"),
        ({"mix": {"shares": {}}}, r"the key 'shares' is wrong"),
        ({"mix": {"shares": {"a": 0}}}, r"the share of 'a' is 0, not a positive number"),
    ],
)
def test_wrong_arguments_are_refused(stage: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_chain([stage])
