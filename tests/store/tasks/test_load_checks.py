"""`rft tasks load` reports all mistakes at once: in sources, stages, rewards and workflow, with and without a buffer."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rftcore.cli import run_command
from rftdata import Buffer


@pytest.mark.parametrize("exists", [False, True], ids=["new buffer", "existing buffer"])
def test_all_mistakes_are_reported_at_once(
    buffer: Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str], exists: bool
) -> None:
    place = {"uri": buffer.config.uri, "segments": buffer.config.segments} if exists else {"uri": str(tmp_path / "new")}
    file = tmp_path / "run.yaml"
    raw = {
        "run": {"name": "wrong"},
        "buffer": place,
        "model": {"path": "nowhere"},
        "tasks": [{"name": "one", "source": "absent.jsonl"}, {"name": "two", "source": "missing.jsonl"}],
        "pipelines": {"task": [{"drop_evrything": {}}]},
        "algorithm": {"name": "grpo"},
        "explorer": {"reward": "./unwritten.py:score", "workflow": "./unwritten.py:play"},
        "trainer": {},
        "steps": 1,
    }
    file.write_text(yaml.safe_dump(raw))
    assert run_command(["tasks", "load", str(file)]) == 2
    printed = capsys.readouterr().err
    for wrong in ("absent.jsonl", "missing.jsonl", "'drop_evrything'", "the reward's file", "the workflow's file"):
        assert wrong in printed, printed
    assert "5 things are wrong" in printed, "each once"
    assert not (tmp_path / "new").exists()
