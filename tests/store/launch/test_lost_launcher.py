"""A launcher that ends before the run is stored leaves no run behind."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml

from rftdata import Buffer
from tests.support.command_line import rft_command, rft_environment
from tests.support.models import make_unopened_model
from tests.support.waiting import PATIENCE_S

# `rft run` reads it, and its only child then is the fork server.
TASKS = """
import os, signal, time
from pathlib import Path


def questions():
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            is_child = f"PPid:\\t{os.getpid()}\\n" in status.read_text()
        except OSError:
            continue
        if is_child:
            os.kill(int(status.parent.name), signal.SIGKILL)
    yield {"question": "1+1=", "answer": "2"}
"""


def test_a_fork_server_that_is_killed_during_the_checks_leaves_no_run(buffer: Buffer, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    raw = {
        "run": {"name": "lost"},
        "buffer": {"uri": buffer.config.uri, "segments": buffer.config.segments},
        "model": {"path": str(make_unopened_model(tmp_path / "model"))},
        "tasks": [{"name": "t", "source": "./tasks.py:questions"}],
        "algorithm": {"name": "grpo", "group_size": 2},
        "explorer": {"engine": "transformers", "reward": "exact_match"},
        "trainer": {},
        "steps": 1,
    }
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    done = subprocess.run(
        rft_command("run", "--plain", tmp_path / "run.yaml"),
        env=rft_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "the fork server was killed by signal 9" in done.stderr and "start the run again" in done.stderr
    assert buffer.runs() == []
