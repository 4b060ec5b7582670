"""Data-Juicer's image operators on images among an experience's arrays."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from operators.base import StageContext
from operators.chain.build import build_chain
from operators.chain.chain import Chain
from operators.chain.stage import StageError
from operators.data_juicer.images import read_images
from operators.data_juicer.runtime import select
from rftdata.errors import ConfigError, OperatorError
from rftdata.pipeline.task_batches import TASK_BATCH_SCHEMA
from tests.support.batches import batch_of_groups, stored

Arrays = dict[int, Any]
RNG = np.random.default_rng(0)


def reader(arrays: Arrays, asked: list[tuple[list[int], str]] | None = None) -> Any:
    def read(ids: Sequence[int], name: str) -> list[NDArray[Any] | None]:
        if asked is not None:
            asked.append((list(ids), name))
        return [arrays.get(key) for key in ids]

    return read


def on_arrays(stage: Any, arrays: Arrays, asked: list[Any] | None = None) -> Chain:
    chain = build_chain([stage])
    chain.prepare(StageContext(read_arrays=reader(arrays, asked)))
    return chain


def noise(*shape: int) -> NDArray[np.uint8]:
    return RNG.integers(0, 255, shape, dtype=np.uint8)


def image_file(width: int, height: int, kind: str) -> NDArray[np.uint8]:
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(noise(height, width, 3)).save(content, kind)
    return np.frombuffer(content.getvalue(), np.uint8)


# Of each layout: an image twice as wide as it is high.
LAYOUTS: list[NDArray[Any]] = [
    noise(10, 20),
    noise(10, 20, 3),
    noise(10, 20, 4),
    noise(10, 20, 1),
    noise(3, 10, 20),
    noise(1, 10, 20, 3),
    noise(1, 3, 10, 20),
    RNG.random((10, 20, 3), dtype=np.float32),
    RNG.random((3, 10, 20)) > 0.5,
    image_file(20, 10, "PNG"),
    image_file(20, 10, "JPEG"),
]


@pytest.mark.parametrize("array", LAYOUTS, ids=lambda array: f"{array.dtype}{list(array.shape)}")
def test_every_layout_of_an_image_is_read(array: NDArray[Any]) -> None:
    chain = on_arrays({"image_shape_filter": {"image_key": "arrays.pixels"}}, {100: array})
    (scores,) = chain.run(batch_of_groups([1])).scores
    assert scores.table["dj_image_width"].to_pylist() == [[20]]
    assert scores.table["dj_image_height"].to_pylist() == [[10]]


def test_pixels_arrive_as_they_are() -> None:
    from PIL import Image

    array = noise(2, 5, 7, 3)
    names, files = read_images(reader({7: array}), [7, 8], "pixels")
    assert names == [["pixels/7/0", "pixels/7/1"], []]
    assert [np.asarray(Image.open(io.BytesIO(file))).tolist() for file in files[0]] == array.tolist()
    _, (scaled,) = read_images(reader({7: array[0] / 255}), [7], "pixels")
    assert np.asarray(Image.open(io.BytesIO(scaled[0]))).tolist() == array[0].tolist()


def test_filters_decide_by_all_images_of_an_experience() -> None:
    arrays = {100: noise(10, 90, 3), 101: noise(20, 20, 3), 102: noise(2, 20, 25, 3)}  # and none of the fourth
    asked: list[Any] = []
    ratio = {"image_aspect_ratio_filter": {"image_key": "arrays.pixels", "min_ratio": 0.5, "max_ratio": 2}}
    chain = on_arrays(ratio, arrays, asked)
    table = batch_of_groups([1] * 4)
    result = chain.run(table)
    assert result.decisions["reason"][0].as_py().startswith("image_aspect_ratio_filter: aspect_ratios is [9]")
    assert result.decisions["kept"].to_pylist() == [False, True, True, True]
    assert result.scores[0].table["dj_aspect_ratios"].to_pylist() == [[9], [1], [1.25, 1.25], []]
    assert asked == [([100, 101, 102, 103], "pixels")]
    # Arrays do not change: with stored statistics they are not read again.
    other = on_arrays(
        {"image_aspect_ratio_filter": {**ratio["image_aspect_ratio_filter"], "max_ratio": 10}}, arrays, asked
    )
    assert other.run(table, stored_scores=stored(result.scores)).decisions["kept"].to_pylist() == [True] * 4
    assert len(asked) == 1
    sizes = on_arrays({"image_size_filter": {"image_key": "arrays.pixels", "min_size": "1kb"}}, arrays)
    assert sizes.run(table).decisions["kept"].to_pylist() == [True, True, True, True]
    small = on_arrays({"image_size_filter": {"image_key": "arrays.pixels", "min_size": "1mb"}}, arrays)
    assert small.run(table).decisions["kept"].to_pylist() == [False, False, False, True]


def test_another_array_is_another_score() -> None:
    keys = [
        build_chain([{"image_shape_filter": {"image_key": f"arrays.{name}"}}]).score_keys[0] for name in ("a", "b", "a")
    ]
    assert keys[0] == keys[2] != keys[1]


def test_parts_that_run_at_the_same_time_read_their_own_rows() -> None:
    arrays = {100 + row: noise(5 + row, 5 + row) for row in range(20)}
    asked: list[Any] = []
    stage = {"image_shape_filter": {"image_key": "arrays.pixels", "run": {"batch_rows": 6, "concurrency": 3}}}
    result = on_arrays(stage, arrays, asked).run(batch_of_groups([1] * 20))
    assert result.scores[0].table["dj_image_width"].to_pylist() == [[5 + row] for row in range(20)]
    assert sorted(len(ids) for ids, _ in asked) == [2, 6, 6, 6]


def test_a_deduplicator_drops_the_same_image() -> None:
    # The package needs a torchvision that fits the installed torch.
    pytest.importorskip("imagededup.methods", exc_type=ImportError)
    first, other = noise(64, 64, 3), noise(64, 64, 3)
    chain = on_arrays({"image_deduplicator": {"image_key": "arrays.pixels"}}, {100: first, 101: other, 102: first})
    same = "duplicate of an earlier row of the batch (image_deduplicator)"
    assert chain.run(batch_of_groups([1] * 4)).decisions["reason"].to_pylist() == [None, None, same, None]


def test_rows_of_one_image_each_are_hashed_one_by_one() -> None:
    """Data-Juicer takes a row of nothing but lists of one length for a batch of its own."""
    from data_juicer.ops.base_op import Deduplicator

    class SameBytes(Deduplicator):  # type: ignore[misc]
        def compute_hash(self, sample: dict[str, Any]) -> dict[str, Any]:
            return {**sample, "hash": b"".join(sample["image_bytes"]).hex()}

        def process(self, dataset: Any, show_num: int = 0) -> Any:
            seen: set[str] = set()
            return dataset.filter(lambda row: not (row["hash"] in seen or seen.add(row["hash"]))), {}  # type: ignore[func-returns-value]

    arrays = {7: noise(4, 4), 8: noise(4, 4)}
    arrays[9] = arrays[7]
    names, files = read_images(reader(arrays), [7, 8, 9], "pixels")
    kept, left = select(SameBytes(), "deduplicator", {"images": names, "image_bytes": files}, 3)
    assert kept == {0, 1}
    assert left["images"] == [["pixels/7/0"], ["pixels/8/0"]] and "image_bytes" not in left


def test_an_array_that_no_experience_has_is_said(caplog: pytest.LogCaptureFixture) -> None:
    chain = on_arrays({"image_shape_filter": {"image_key": "arrays.pixles"}}, {})
    with caplog.at_level(logging.WARNING):
        assert chain.run(batch_of_groups([1, 1])).decisions["kept"].to_pylist() == [True, True]
    assert "none of 2 experiences has an array 'pixles'" in caplog.text


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((5, 5, 6), np.uint8), r"its shape is \[5, 5, 6\]"),
        (np.zeros((2, 2, 2, 2, 3), np.uint8), r"its shape is \[2, 2, 2, 2, 3\]"),
        (np.zeros((4, 5), np.int64), r"its type is int64"),
        (np.full((4, 5, 3), -1.5), r"its values lie from -1.5 to -1.5"),
        (np.zeros(9, np.uint8), r"its bytes are not an image file"),
    ],
)
def test_an_array_that_is_no_image_is_refused(array: NDArray[Any], message: str) -> None:
    with pytest.raises(
        OperatorError, match=rf"the array 'x' of experience 7 is not an image: {message}.*; allowed: \[height"
    ):
        read_images(reader({7: array}), [7], "x")


def test_without_a_buffer_there_are_no_arrays() -> None:
    chain = build_chain([{"image_shape_filter": {"image_key": "arrays.pixels"}}])
    with pytest.raises(StageError, match=r"no buffer here to read arrays from \(got 'pixels'\)"):
        chain.run(batch_of_groups([1]))


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"image_blur_mapper": {"image_key": "arrays.pixels"}}, r"it changes images, but arrays stay as they were"),
        (
            {"image_shape_filter": {"image_key": "arrays.pixels", "mode": "ray"}},
            r"arrays are read in the pipeline worker only",
        ),
        ({"image_shape_filter": {"image_key": "pixels"}}, r"image_key is not a column of the batch \(got 'pixels'\)"),
        ({"video_resolution_filter": {"video_key": "arrays.film"}}, r"video_key is not a column of the batch"),
    ],
)
def test_what_cannot_read_arrays_is_refused_when_the_chain_is_built(stage: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_chain([stage])


def test_tasks_have_no_arrays() -> None:
    with pytest.raises(ConfigError, match=r"tasks have no arrays.*image_key: metadata.images"):
        build_chain([{"image_shape_filter": {"image_key": "arrays.pixels"}}], schema=TASK_BATCH_SCHEMA)
