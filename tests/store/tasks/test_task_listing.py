"""Tasks on the command line: listed, shown by their scores, previewed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rftcore.cli import run_command
from rftcore.resolved import ResolvedRun
from rftcore.task_pipeline.pipeline import load_tasks, task_batches
from rftdata import Buffer
from rftdata.errors import ConfigError
from rftdata.tasks import list_tasksets, show_tasks
from tests.store.tasks.test_task_pipeline import (
    EASY,
    LEVELS,
    ROWS,
    configuration,
    count,
    write,
)


def test_tasks_are_listed_with_their_scores_and_shown_by_priority(buffer: Buffer, tmp_path: Path) -> None:
    write(tmp_path, ROWS)
    load_tasks(
        ResolvedRun(configuration(tmp_path, [LEVELS, EASY, {"task_priority": {"weights": {"difficulty": 1}}}])),
        buffer,
    )
    (row,) = list_tasksets(buffer.database)
    assert (row["active"], row["excluded"], row["pending"]) == (16, 4, 0)
    assert row["scores"] == {"difficulty": 0.375, "priority": 0.375}
    shown = show_tasks(buffer.database, "sums", order="priority", limit=5)
    assert [task["features"]["priority"] for task in shown] == [0.75] * 4 + [0.5]
    dropped = show_tasks(buffer.database, "sums", status="excluded")
    assert {task["stage"] for task in dropped} == {"sql"} and len(dropped) == 4
    with pytest.raises(ConfigError, match=r"no task of 'sums' has a number 'prio' .*allowed: difficulty, priority"):
        show_tasks(buffer.database, "sums", order="prio")
    with pytest.raises(ConfigError, match=r"unknown taskset \(got 'sum'\); allowed: sums"):
        show_tasks(buffer.database, "sum")


def test_the_command_line_loads_scores_lists_and_shows(
    buffer: Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_SEGMENTS", str(buffer.config.segments))
    write(tmp_path, ROWS)
    raw = configuration(tmp_path, [LEVELS, EASY, "task_priority"]).model_dump(mode="json")
    raw["buffer"]["segments"] = str(buffer.config.segments)
    (tmp_path / "c.yaml").write_text(json.dumps(raw))

    def rft(*arguments: str) -> str:
        assert run_command(["tasks", *arguments, "--buffer", buffer.database.uri]) == 0
        return capsys.readouterr().out

    assert "sums: 20 tasks, 4 of them excluded" in rft("load", str(tmp_path / "c.yaml"))
    rft("score", str(tmp_path / "c.yaml"))
    assert count(buffer, "rft.task_verdict") == 20  # decided again, and nothing differs
    assert json.loads(rft("list", "--json"))[0]["scores"]["difficulty"] == 0.375
    assert json.loads(rft("list", "--json"))[0]["args"].keys() >= {"prompt", "answer", "shares", "digest"}
    assert "shares" not in (listed := rft("list")) and "digest" not in listed
    shown = json.loads(rft("show", "sums", "--status", "excluded", "--limit", "1", "--json"))
    assert shown[0]["dropped"] == "sql: level 4 is too hard"
    assert "priority" in rft("show", "sums", "--order", "priority")
    assert run_command(["tasks", "show", "sums", "--status", "lost", "--buffer", buffer.database.uri]) == 2
    assert "allowed: active, excluded, pending" in capsys.readouterr().err


def test_the_list_of_sets_shows_what_somebody_gave_them_in_short_and_json_in_full(
    buffer: Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_BUFFER", buffer.config.uri)
    monkeypatch.setenv("RFT_SEGMENTS", str(buffer.config.segments))
    (tmp_path / "mine.py").write_text("def make(texts):\n    yield from ({'text': text} for text in texts)\n")
    texts = [f"How much is {i} plus {i}?" for i in range(9)]
    own = {"name": "own", "source": "./mine.py:make", "args": {"texts": texts}, "limit": 3, "prompt": "text"}
    load_tasks(
        ResolvedRun(configuration(tmp_path, [], tasks=[{**own, "args": {"texts": texts[:1]}, "name": "a"}, own])),
        buffer,
    )
    assert run_command(["tasks", "list"]) == 0
    listed = capsys.readouterr().out
    assert "texts: ['How much is 0 plus 0?'], limit" in listed and "plus 8" not in listed
    assert max(len(line) for line in listed.splitlines()) < 200
    assert run_command(["tasks", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[1]["args"]["args"] == {"texts": texts}


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_preview_shows_the_first_tasks_as_the_chain_sees_them(
    buffer: Buffer, tmp_path: Path, is_loaded: bool
) -> None:
    write(
        tmp_path,
        [{"question": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "level": 1}, *ROWS[1:]],
    )
    config = configuration(tmp_path, [LEVELS, EASY, "usage_frequency", "quality_score"])
    if is_loaded:
        load_tasks(ResolvedRun(configuration(tmp_path, [])), buffer)
    resolved = ResolvedRun(config)
    ((name, table),) = task_batches(resolved, buffer, 5)
    assert (name, table["experience_id"].to_pylist(), table.num_rows) == ("sums", [1, 2, 3, 4, 5], 5)
    assert table["prompt"].to_pylist()[:2] == ["a\nb", ROWS[1]["question"]]
    assert resolved.task_chain.run(table).decisions["kept"].to_pylist() == [True] * 4 + [False]
    assert count(buffer, "rft.task_verdict") == 0
    assert count(buffer, "rft.task") == (20 if is_loaded else 0)
