"""Any array of any type and shape beside the base columns: stored, drawn and read back exactly, copied once."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from rftdata import Buffer, Group, RftError, Rollout, Run
from rftdata.attempts.batch import Batch
from rftdata.errors import QueryError
from rftdata.maintenance.verification import verify
from rftdata.segments.codec import ColumnReader, encode
from tests.support.store_roles import tokens

DTYPES = st.one_of(
    st_numpy.integer_dtypes(endianness="="),
    st_numpy.unsigned_integer_dtypes(endianness="="),
    st_numpy.floating_dtypes(endianness="=", sizes=(16, 32, 64)),
    st_numpy.boolean_dtypes(),
)


@pytest.fixture
def run(buffer: Buffer) -> Run:
    return buffer.create_run(name="import", config={}, seed=1, steps=9, pipeline_version="none", mode="train")


def group(key: str, *arrays: dict[str, Any]) -> Group:
    rollouts = [Rollout(i, "ok", float(i), [tokens(float(i), arrays=a)]) for i, a in enumerate(arrays)]
    return Group(rollouts, source="import", taskset="mine", task_key=key)


def draw(buffer: Buffer, run: Run, columns: list[str], num_groups: int = 1) -> Batch:
    with buffer.attempt(run) as attempt:
        batch = attempt.draw(attempt.start_step + 1, num_groups, columns, timeout_s=5)
    assert batch is not None
    return batch


def same(found: Any, given: Any) -> bool:
    if given is None:
        return found is None
    given = np.asarray(given)
    return bool(found.dtype == given.dtype and found.shape == given.shape and found.tobytes() == given.tobytes())


def test_arrays_of_any_type_and_shape_come_back_exactly(buffer: Buffer, run: Run) -> None:
    rng = np.random.default_rng(0)
    kinds: list[dict[str, Any]] = [
        {
            "teacher_logprobs": rng.random(5, dtype=np.float32),
            "token_rewards": rng.random(5),
            "routed_experts": rng.integers(0, 64, (5, 3, 2), dtype=np.uint8),
            "image": rng.integers(0, 255, (4, 6, 3), dtype=np.uint8),
            "features": rng.random((2, 7)).astype(ml_dtypes.bfloat16),
            "scalar": np.float16(1.5),
        },
        {
            "teacher_logprobs": rng.random(5, dtype=np.float32),
            "image": rng.integers(0, 255, (9, 2, 3), dtype=np.uint8),
            "features": rng.random((0, 7)).astype(ml_dtypes.bfloat16),
            "attention": rng.random((5, 5)) > 0.5,
        },
        {},
    ]
    with buffer.writer(run) as writer:
        writer.insert(group("a", *kinds))
    names = sorted({name for kind in kinds for name in kind})
    batch = draw(buffer, run, names)
    for name in names:
        for found, kind in zip(batch.arrays(name), kinds, strict=True):
            assert same(found, kind.get(name)), name
    assert list(verify(buffer)) == []


@settings(max_examples=60)
@given(st.data())
def test_any_arrays_survive_encoding(data: st.DataObject) -> None:
    dtype = data.draw(DTYPES)
    shapes = st.one_of(st.none(), st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    rows = [
        None if shape is None else data.draw(st_numpy.arrays(dtype, shape))
        for shape in data.draw(st.lists(shapes, min_size=1, max_size=5))
    ]
    if all(row is None for row in rows):
        return
    reader = ColumnReader(encode([tokens(arrays={} if row is None else {"x": row}) for row in rows]), "x")
    for index, row in enumerate(rows):
        assert same(reader.row(index), row)


def test_an_array_with_one_value_per_token_is_packed_and_padded_like_the_base_columns(buffer: Buffer, run: Run) -> None:
    with buffer.writer(run) as writer:
        writer.insert(
            group("a", {"teacher": np.arange(5, dtype=np.float32)}, {"teacher": -np.arange(5, dtype=np.float32)})
        )
        writer.insert(group("b", {}))  # another segment, without it
    batch = draw(buffer, run, ["teacher", "image"], 2)
    assert batch.packed("teacher").tolist() == [0, 1, 2, 3, 4, 0, -1, -2, -3, -4, 0, 0, 0, 0, 0]
    assert batch.padded("teacher", fill=9).tolist()[2] == [9] * 5
    with pytest.raises(QueryError, match=r"unknown array .*image.*allowed: behavior_logprobs, .*teacher"):
        batch.arrays("image")


def test_an_array_that_is_not_per_token_is_not_packed(buffer: Buffer, run: Run) -> None:
    with buffer.writer(run) as writer:
        writer.insert(group("a", {"image": np.zeros((2, 2), np.uint8)}))
    with pytest.raises(QueryError, match="'image' of experience 1 does not have one value per token"):
        draw(buffer, run, ["image"]).packed("image")


def test_arrays_are_views_of_the_mapped_file_and_packing_copies_once(buffer: Buffer, run: Run) -> None:
    with buffer.writer(run) as writer:
        writer.insert(group("a", {"image": np.arange(400_000, dtype=np.uint16).reshape(4, -1)}))
    batch = draw(buffer, run, ["token_ids", "image"])
    (segment_id,) = buffer.sql("SELECT segment_id FROM rft.experience")["segment_id"].to_pylist()
    mapped = buffer.reader.batches([segment_id])[segment_id].column("image").values.to_numpy()
    (image,) = batch.arrays("image")
    assert image is not None and np.shares_memory(image, mapped) and not image.flags.writeable
    # Into memory of the caller's own type, without an array in between: the reader's rows are views, and `out` is what comes back.
    out = np.empty(5, np.int64)
    assert batch.packed("token_ids", out) is out
    rows = [values for values in batch.arrays("token_ids") if values is not None]
    assert all(not values.flags.owndata for values in rows)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([{"x": np.zeros(2, np.int8)}, {"x": np.zeros(2, np.int16)}], "different types .*int16, int8"),
        ([{"x": np.zeros(2, np.complex64)}], "cannot be stored .*complex64"),
        ([{"x": np.array(["a"])}], "cannot be stored"),
        ([{"token_ids": np.zeros(5)}], "cannot have this name"),
        ([{"x.shape": np.zeros(5)}], "cannot have this name"),
    ],
)
def test_arrays_that_cannot_be_stored_are_refused(
    buffer: Buffer, run: Run, arrays: list[dict[str, Any]], message: str
) -> None:
    with buffer.writer(run) as writer, pytest.raises(RftError, match=message):
        writer.insert(group("a", *arrays))
    assert buffer.sql("SELECT count(*) AS n FROM rft.experience")["n"].to_pylist() == [0]


def test_tokens_beyond_32_bits_are_refused(buffer: Buffer, run: Run) -> None:
    bad = Group(
        [Rollout(0, "ok", 1.0, [tokens(token_ids=[1, 2, 3, 4, 2**31])])], source="import", taskset="t", task_key="k"
    )
    with buffer.writer(run) as writer, pytest.raises(RftError, match="32-bit integers"):
        writer.insert(bad)


def test_log_probabilities_that_were_not_sampled_are_unknown_instead_of_zero(buffer: Buffer, run: Run) -> None:
    demonstration = Group(
        [Rollout(0, "ok", 1.0, [tokens(behavior_logprobs=None)])], source="human", taskset="t", task_key="k"
    )
    with buffer.writer(run) as writer:
        writer.insert(demonstration)
    found = draw(buffer, run, ["behavior_logprobs"]).packed("behavior_logprobs")
    assert found[:3].tolist() == [0, 0, 0] and np.isnan(found[3:]).all()


def test_without_stages_a_complete_group_is_ready_when_it_is_written_and_others_wait_for_the_pipeline(
    buffer: Buffer, run: Run
) -> None:
    failed = Group(
        [Rollout(0, "ok", 1.0, [tokens()]), Rollout(1, "failed", error="x")], source="import", taskset="t", task_key="f"
    )
    awaited = Group([Rollout(0, "ok", None, [tokens(None)])], source="import", taskset="t", task_key="w")
    with buffer.writer(run) as writer:
        ready, *others = writer.insert(group("a", {}, {}), failed, awaited)
    states = buffer.sql("SELECT group_id, status::text AS status FROM rft.rollout_group ORDER BY 1").to_pylist()
    assert {row["group_id"]: row["status"] for row in states} == {ready: "ready"} | dict.fromkeys(others, "sealed")
    # A label sends a ready group to the pipeline like any other, and a new attempt does not (its verdicts are not missing).
    with buffer.attempt(run):
        pass
    assert buffer.sql("SELECT count(*) AS n FROM rft.rollout_group WHERE status = 'ready'")["n"].to_pylist() == [1]
    buffer.sql("UPDATE rft.experience SET reward = 7 WHERE group_id = %s", [ready])
    assert buffer.sql("SELECT count(*) AS n FROM rft.rollout_group WHERE status = 'sealed'")["n"].to_pylist() == [3]
