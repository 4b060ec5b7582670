"""Which stored run a configuration goes on with, how it ends, and the places it is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from rftcore.config import RunConfig, parse_config
from rftcore.launch.closing import buffer_option
from rftcore.launch.prepare import find_resumable, join_run, stored_config
from rftcore.launch.supervisor import _reachable
from rftdata import Buffer
from rftdata.errors import QueryError


def configured(name: str, buffer: Buffer, model: Path | str = "none") -> RunConfig:
    return parse_config(
        {
            "run": {"name": name}, "buffer": {"uri": buffer.config.uri, "segments": buffer.config.segments},
            "model": {"path": str(model)}, "tasks": [{"name": "t", "source": "./none.py:none"}],
            "algorithm": {"name": "sft", "group_size": 1}, "explorer": {}, "trainer": {}, "steps": 1,
        },
        Path(), "the test",
    )  # fmt: skip


def store(buffer: Buffer, name: str) -> str:
    """A run of that configured name; the name it got."""
    config = stored_config(configured(name, buffer))
    return str(buffer.create_run(name=name, config=config, seed=1, steps=1, pipeline_version="p")["name"])


def test_a_configuration_goes_on_with_its_own_newest_run(buffer: Buffer) -> None:
    assert [store(buffer, "exp") for _ in range(2)] == ["exp", "exp-2"]
    assert find_resumable(configured("exp", buffer), buffer, None)["name"] == "exp-2"


def test_an_experiment_whose_name_looks_numbered_is_another_one(buffer: Buffer, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):  # a model's folder, to be joined but not opened
        (tmp_path / name).touch()
    assert [store(buffer, name) for name in ("exp", "exp-1", "exp-7")] == ["exp", "exp-1", "exp-7"]
    assert find_resumable(configured("exp", buffer), buffer, None)["name"] == "exp"
    joined = join_run(configured("exp", buffer, tmp_path), None)
    joined.buffer.close()
    assert joined.row["name"] == "exp"


def test_a_run_that_was_stored_without_a_configuration_is_known_by_its_name(buffer: Buffer) -> None:
    for name in ("mine", "mine-3"):
        buffer.create_run(name=name, config={}, seed=1, steps=1, pipeline_version="p")
    assert find_resumable(configured("mine", buffer), buffer, None)["name"] == "mine"
    with pytest.raises(QueryError, match="no such run"):
        find_resumable(configured("yours", buffer), buffer, None)


def test_a_run_that_has_finished_stays_so(buffer: Buffer) -> None:
    run_id = buffer.find_run(store(buffer, "exp"))["run_id"]
    assert buffer.database.run("finish_run", run_id=run_id, status="interrupted", outcome="stopped") == 1
    assert buffer.database.run("finish_run", run_id=run_id, status="finished", outcome="1 step done") == 1
    assert buffer.database.run("finish_run", run_id=run_id, status="failed", outcome="too late") == 0
    assert buffer.find_run(run_id)["outcome"] == "1 step done"


def test_processes_started_elsewhere_find_buffer_and_segments(
    buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = configured("exp", buffer)
    relative = config.buffer.model_copy(update={"uri": "./buffer", "segments": "arrays"})
    places = _reachable(config.model_copy(update={"buffer": relative})).buffer
    assert (places.uri, places.segments) == (str(tmp_path / "buffer"), str(tmp_path / "arrays"))
    remote = config.buffer.model_copy(update={"uri": "postgresql://there/db", "segments": None})
    assert _reachable(config.model_copy(update={"buffer": remote})).buffer == remote


def test_the_commands_at_the_end_name_the_buffer_unless_they_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RFT_BUFFER", raising=False)
    assert buffer_option(str(tmp_path / "buffer")) == ""
    assert buffer_option("/elsewhere/buffer") == " --buffer /elsewhere/buffer"
    assert buffer_option("/else where/buffer") == " --buffer '/else where/buffer'"
    monkeypatch.setenv("RFT_BUFFER", "/elsewhere/buffer")
    assert buffer_option("/elsewhere/buffer") == ""
    assert buffer_option(str(tmp_path / "buffer")) == f" --buffer {tmp_path / 'buffer'}"
