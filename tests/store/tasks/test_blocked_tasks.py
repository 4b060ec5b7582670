"""A stage of `pipelines.task` that blocks its process at one task: the task is set aside, and the next load continues."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from rftdata import Buffer
from tests.store.tasks.test_task_pipeline import ROWS, write
from tests.support.command_line import impatient_rft
from tests.support.models import make_unopened_model
from tests.support.preloaded import PreloadedCall
from tests.support.waiting import PATIENCE_S

# Other tasks need next to none of it, on any machine.
LIMIT_S = 2
# Sleeps in C for one task; the second stage compares tasks with each other, so the whole set is one batch.
RULES = """
import ctypes
import re

from operators.base import Operator, StageOutcome


def stuck(row):
    if row["prompt"] == "How much is 2 plus 2?":
        ctypes.CDLL(None).sleep(600)
    return True


def backtracks(row):
    return re.match(r"(a+)+$", "a" * 80 + "b") is None


class Compares(Operator):
    rowwise = False

    def apply(self, table):
        return StageOutcome.keep_all(table.num_rows)
"""


def load(config: Path, *verb: str) -> subprocess.CompletedProcess[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with PreloadedCall(impatient_rft, *(verb or ("tasks", "load")), str(config), **pipes) as process:
        said, errors = process.communicate(timeout=PATIENCE_S)
    return subprocess.CompletedProcess(process.args, process.returncode, said, errors)


def configured(buffer: Buffer, folder: Path, function: str, *more: str) -> Path:
    (folder / "rules.py").write_text(RULES)
    write(folder, ROWS[:5])
    raw = {
        "run": {"name": "r"},
        "buffer": {"uri": buffer.config.uri, "segments": buffer.config.segments},
        "model": {"path": "./model"},
        "algorithm": {"name": "grpo"},
        "explorer": {"reward": ["exact_match"]},
        "trainer": {"batch_groups": 2, "learning_rate": 0.001},
        "steps": 1,
        "tasks": [{"name": "sums", "source": "sums.jsonl"}],
        "pipelines": {"task": [{f"./rules.py:{function}": {"run": {"timeout_s": LIMIT_S}}}, *more]},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.mark.parametrize("more", [[], ["./rules.py:Compares"]])
def test_the_task_that_blocks_is_excluded_and_the_next_load_continues(
    buffer: Buffer, tmp_path: Path, more: list[str]
) -> None:
    path = configured(buffer, tmp_path, "stuck", *more)
    first = load(path)
    assert first.returncode == 1 and "and could not be stopped within 0.5 s more" in first.stderr
    assert "tasks: sums: task 3 is excluded; repeat the command to continue with the others" in first.stderr
    second = load(path)
    assert second.returncode == 0, second.stderr
    write(tmp_path, ROWS[:6])
    third = load(path)
    assert third.returncode == 0, third.stderr
    rows = buffer.sql("SELECT task_id, status::text AS s FROM rft.task ORDER BY 1").to_pylist()
    assert [row["s"] for row in rows] == ["active", "active", "excluded", "active", "active", "active"]
    (reason,) = buffer.sql("SELECT reason FROM rft.task_verdict WHERE task_id = 3")["reason"].to_pylist()
    assert reason.startswith("the stage blocks its process: ") and "did not return for" in reason


def test_a_run_states_which_stage_held_the_interpreters_lock(buffer: Buffer, tmp_path: Path) -> None:
    (make_unopened_model(tmp_path / "model") / "config.json").write_text("{}")
    done = load(configured(buffer, tmp_path, "backtracks"), "run")
    assert done.returncode == 1
    assert f"did not return within {LIMIT_S} s, and no other thread of the process could run" in done.stderr
    assert "in backtracks" in done.stderr
