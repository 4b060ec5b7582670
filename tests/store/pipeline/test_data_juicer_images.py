"""Images in segments as a pipeline's stages see them: read by the worker, only where a stage names their array."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rftcore.cli import run_command
from rftdata import Buffer
from rftdata.errors import QueryError
from rftdata.experience import Group, Rollout
from tests.support.store_roles import tokens

CONFIG = """
run: {name: images}
buffer: {uri: "%(uri)s", segments: "%(segments)s"}
model: {path: tiny}
tasks: [{name: mine, source: none.jsonl}]
pipelines:
  experience:
    - image_shape_filter: {image_key: arrays.pixels, min_width: %(min_width)d}
    - image_aspect_ratio_filter: {image_key: arrays.pixels, max_ratio: 3}
    - sql: "FROM batch WHERE len(dj_image_width) < 2"
algorithm: {name: grpo, group_size: 4}
explorer: {engine: none}
trainer: {batch_groups: 1, learning_rate: 0.001}
steps: 4
"""


def image(height: int, width: int) -> Any:
    return np.random.default_rng(height * width).integers(0, 255, (height, width, 3), dtype=np.uint8)


@pytest.fixture
def experiences(buffer: Buffer) -> list[int]:
    run = buffer.create_run(name="images", config={}, seed=1, steps=9, pipeline_version="v1", mode="train")
    arrays: list[dict[str, Any]] = [
        {"pixels": image(20, 30)},
        {"pixels": image(20, 90)},
        {"pixels": image(8, 8)},
        {"pixels": np.stack([image(20, 20)] * 2)},
        {},
    ]
    rollouts = [Rollout(i, "ok", float(i), [tokens(float(i), arrays=a)]) for i, a in enumerate(arrays)]
    with buffer.writer(run) as writer:
        writer.insert(Group(rollouts, source="import", taskset="mine", task_key="one"))
    found = buffer.sql("SELECT experience_id FROM rft.experience ORDER BY experience_id")["experience_id"].to_pylist()
    buffer.sql(
        "INSERT INTO rft.verdict (experience_id, group_id, pipeline_version, kept)"
        " SELECT experience_id, group_id, 'v1', true FROM rft.experience ON CONFLICT DO NOTHING"
    )
    return [int(key) for key in found]


def test_arrays_of_experiences_come_in_their_shapes(buffer: Buffer, experiences: list[int]) -> None:
    found = buffer.arrays(experiences[::-1], "pixels")
    shapes = [None if array is None else array.shape for array in found]
    assert shapes == [None, (2, 20, 20, 3), (8, 8, 3), (20, 90, 3), (20, 30, 3)]
    assert found[-1] is not None and found[-1].tobytes() == image(20, 30).tobytes()
    assert buffer.arrays(experiences, "nothing") == [None] * 5
    with pytest.raises(QueryError, match="unknown experience"):
        buffer.arrays([10**9], "pixels")


def test_image_filters_decide_on_images_in_segments(
    buffer: Buffer,
    experiences: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RFT_BUFFER", buffer.config.uri)
    monkeypatch.setenv("RFT_SEGMENTS", str(buffer.config.segments))

    def replay(version: str, min_width: int) -> dict[str, Any]:
        file = tmp_path / f"{version}.yaml"
        values = {"uri": buffer.config.uri, "segments": buffer.config.segments, "min_width": min_width}
        file.write_text(CONFIG % values)
        assert run_command(["pipeline", "replay", str(file), "--version", version, "--json"]) == 0
        done: dict[str, Any] = json.loads(capsys.readouterr().out)
        return done

    done = replay("first", 10)
    assert (done["num_kept"], done["dropped_by"]) == (
        2,
        {"image_shape_filter": 1, "image_aspect_ratio_filter": 1, "sql": 1},
    )
    rows = buffer.sql(
        "SELECT stage, reason FROM rft.verdict WHERE pipeline_version = 'first' ORDER BY experience_id"
    ).to_pylist()
    assert [row["stage"] for row in rows] == [None, "image_aspect_ratio_filter", "image_shape_filter", "sql", None]
    assert "image_width is [8]" in rows[2]["reason"]
    scores = buffer.sql(
        "SELECT experience_id, scores::text AS s FROM rft.score WHERE stage = 'image_shape_filter' ORDER BY 1"
    )["s"].to_pylist()
    assert [json.loads(one)["dj_image_width"] for one in scores] == [[30], [90], [8], [20, 20], []]
    assert replay("second", 1)["dropped_by"] == {"image_aspect_ratio_filter": 1, "sql": 1}
