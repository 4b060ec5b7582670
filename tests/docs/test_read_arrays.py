"""The page on arrays: its programs run on a buffer, and its tables name what there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rftdata
from rftdata.attempts.batch import Batch
from rftdata.postgres.embedded import EmbeddedServer
from rftdata.segments.codec import SCHEMA

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "read-arrays.md").read_text(encoding="utf-8")


def store(buffer: rftdata.Buffer) -> None:
    """Two answers of two lengths, the first with an image."""
    run = buffer.create_run(name="sums", config={}, seed=0, steps=1, pipeline_version="", mode="train")
    rollouts = []
    for index, (response, arrays) in enumerate([("3", {"image": np.zeros((4, 6), dtype=np.uint8)}), ("33", {})]):
        tokens = [ord(character) for character in "1+2=" + response]
        sequence = rftdata.Sequence(
            prompt="1+2=",
            response=response,
            token_ids=tokens,
            num_prompt_tokens=4,
            finish_reason="stop",
            reward=1.0 - index,
            behavior_logprobs=[-0.5] * len(response),
            arrays=arrays,
        )
        rollouts.append(rftdata.Rollout(index, "ok", sequence.reward, [sequence]))
    with buffer.writer(run) as writer:
        writer.insert(rftdata.Group(rollouts, taskset="sums", task_key="1+2", payload={"prompt": "1+2="}))


@pytest.fixture
def folder(server_folders: Path) -> Iterator[Path]:
    folder = server_folders / "arrays"
    with rftdata.open(str(folder / "buffer")) as buffer:
        store(buffer)
    yield folder
    EmbeddedServer(folder / "buffer").stop()


def test_the_programs_of_the_page_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    programs = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(programs) == 7
    for program in programs:
        exec(program, names)
    assert names["frame"]["logprob"].tolist() == pytest.approx([-0.5, -1.0])
    assert names["first_response"].tolist() == [ord("3")] and names["lengths"].tolist() == [5, 6]
    assert names["heights"] == [4]
    assert names["example"]["token_ids"].shape in [(5,), (6,)]
    assert [row["reward"] for row in names["stream"]] == [1.0, 0.0]
    assert names["table"].to_pylist() == [{"run": "sums", "tokens": 5.5}] and names["batch"].num_rows == 2


def test_the_tables_name_the_arrays_and_the_methods_there_are() -> None:
    assert all(f"| `{name}` |" in PAGE for name in SCHEMA.names)
    assert all(hasattr(Batch, name) for name in re.findall(r"`batch\.(\w+)\(", PAGE))
