"""Arrays go from the mapped file into the caller's memory in one copy, and only the columns asked for."""

from __future__ import annotations

import gc
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from rftcore.trainer.batches.padding import PackedColumns, pad_batch
from rftdata import Buffer, Group, Rollout
from rftdata.attempts.batch import Batch
from tests.support.store_roles import Roles, tokens

_TOKENS = 20_000
_GROUPS = 8


@pytest.fixture
def batch(buffer: Buffer) -> Batch:
    """16 experiences of 20,000 tokens with log-probabilities and token rewards: 4.2 MB of arrays in one segment."""
    roles = Roles(buffer, batch_groups=_GROUPS, offset=1)
    rng = np.random.default_rng(0)

    def group(key: int) -> Group:
        rollouts = [
            Rollout(
                index,
                "ok",
                1.0,
                [
                    tokens(
                        1.0,
                        token_ids=rng.integers(0, 150_000, _TOKENS, dtype=np.int32),
                        num_prompt_tokens=10,
                        behavior_logprobs=-rng.random(_TOKENS - 10, dtype=np.float32),
                        arrays={"token_rewards": rng.random(_TOKENS, dtype=np.float32)},
                    )
                ],
            )
            for index in range(2)
        ]
        return Group(rollouts, taskset="long", task_key=str(key))

    roles.insert(*[group(i) for i in range(_GROUPS)])
    roles.decide()
    attempt = roles.attempt()
    drawn = attempt.draw(1, _GROUPS, ["token_ids", "behavior_logprobs", "token_rewards"], timeout_s=5)
    attempt.close()
    assert drawn is not None and len(drawn) == 2 * _GROUPS
    return drawn


def mapped_from_a_file(array: np.ndarray[Any, Any], path: Path) -> bool:
    """Whether an array's memory is a mapping of this file, by the kernel's own list."""
    first, last = array.__array_interface__["data"][0], array.__array_interface__["data"][0] + array.nbytes
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, _, rest = line.partition(" ")
        start, _, end = span.partition("-")
        if int(start, 16) <= first and last <= int(end, 16):
            return rest.endswith(f" {path}")
    return False


def test_what_is_read_from_is_the_mapped_file(buffer: Buffer, batch: Batch) -> None:
    (file,) = Path(buffer.config.segments or "").glob("*.arrows")
    for column in batch.columns:
        views = batch.arrays(column)
        assert len(views) == len(batch)
        for view in views:
            assert view is not None and not view.flags.writeable and not view.flags.owndata
            assert mapped_from_a_file(view, file.resolve())
    assert not mapped_from_a_file(np.ones(1000), file.resolve())


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize(
    ("column", "dtype"),
    [
        ("token_ids", torch.int64),
        ("token_ids", torch.int32),
        ("behavior_logprobs", torch.float32),
        ("token_rewards", torch.float32),
    ],
)
def test_one_copy_from_the_file_into_a_tensor(batch: Batch, layout: str, column: str, dtype: torch.dtype) -> None:
    """While a column is scattered, numpy, Python, Arrow and torch each allocate less than a tenth of its memory."""
    num = 2 * _GROUPS
    shape = (num * _TOKENS,) if layout == "packed" else (num, _TOKENS + 5)
    tensor = torch.full(shape, -7, dtype=dtype, pin_memory=torch.cuda.is_available())
    scatter = batch.packed if layout == "packed" else batch.padded
    view = tensor.numpy()
    views = batch.arrays(column)  # the readers of the columns are made before
    payload = sum(one.nbytes for one in views if one is not None)
    pool = pa.default_memory_pool()
    gc.collect()
    before = pool.bytes_allocated()
    tracemalloc.start()
    try:
        returned = scatter(column, view)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert returned is view and np.shares_memory(returned, tensor.numpy())
    assert peak < payload / 10, "numpy reports its memory to tracemalloc: a copy in between would show"
    assert pool.bytes_allocated() - before < payload / 10
    for index, one in enumerate(views):
        assert one is not None
        found = tensor[index * _TOKENS :][:_TOKENS] if layout == "packed" else tensor[index, :_TOKENS]
        assert torch.equal(found, torch.from_numpy(one.copy()).to(dtype))
    if layout == "padded":
        assert (tensor[:, _TOKENS:] == 0).all()


def test_a_copy_in_between_would_be_noticed(batch: Batch) -> None:
    tracemalloc.start()
    try:
        np.concatenate(batch.arrays("token_ids"))  # type: ignore[arg-type]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak >= 2 * _GROUPS * _TOKENS * 4


def test_only_columns_asked_for_are_decoded(buffer: Buffer, batch: Batch) -> None:
    batch.packed("token_ids")
    assert {name for _, name in buffer.reader._columns} == {"token_ids"}


def test_arrow_allocates_nothing_for_the_arrays_of_a_segment(buffer: Buffer, batch: Batch) -> None:
    """Also when a process reads a segment for the first time, checksum and all."""
    from rftdata.segments.posix import PosixSegmentStore
    from rftdata.segments.reader import SegmentReader

    (segment_id,) = {address.segment_id for address, _ in buffer.reader.all_addresses()}
    reader = SegmentReader(buffer.database, PosixSegmentStore(Path(buffer.config.segments or "")))
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    tracemalloc.start()
    try:
        readers = reader.columns([segment_id], "token_ids")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert readers[segment_id] is not None
    assert peak < 400_000 and pool.bytes_allocated() - before < 100_000


def test_the_trainers_own_batch_is_filled_straight_from_the_file(batch: Batch) -> None:
    """Its memory is torch's; beside it only masks of a byte per token are made, not the tokens again."""
    offsets = batch.offsets
    for column in ("token_ids", "behavior_logprobs"):
        batch.arrays(column)
    lengths = np.diff(offsets)
    mask = np.ones(int(offsets[-1]), np.uint8)
    gc.collect()
    tracemalloc.start()
    try:
        made = pad_batch(
            PackedColumns(
                token_ids=(partial(batch.padded, "token_ids"), offsets),
                loss_mask=(mask, offsets),
                behavior_logprobs=(partial(batch.padded, "behavior_logprobs"), offsets),
                rewards=batch.rows["reward"].to_pylist(),
                group_ids=batch.rows["group_id"].to_pylist(),
                rollout_index=batch.rows["rollout_index"].to_pylist(),
            )
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    num_tokens = int(offsets[-1])
    assert peak < 3 * num_tokens < num_tokens * made.behavior_logprobs_BT.element_size()
    assert made.token_ids_BT.shape == (len(batch), lengths.max())
    assert torch.equal(made.token_ids_BT.flatten(), torch.from_numpy(batch.packed("token_ids").astype(np.int64)))
    expected = torch.from_numpy(batch.packed("behavior_logprobs")).reshape(made.token_ids_BT.shape).clone()
    expected[:, 0] = 0  # nothing predicts the first token
    assert torch.equal(made.behavior_logprobs_BT, expected)
    assert made.token_ids_BT.is_pinned() == torch.cuda.is_available()
