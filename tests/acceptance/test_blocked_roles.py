"""A role blocked by user code is restarted, a killed process is reported in one line, and awaited reviews are named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rftcore.launch.restarts import MAX_BLOCKED_PER_HOUR, MAX_FUTILE
from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import Rft, rft_environment, rows
from tests.support.models import make_tiny_model
from tests.support.preloaded import Preloaded
from tests.support.waiting import PATIENCE_S, printed_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CONFIG = """
run: {{name: blocked, seed: 1}}
model: {{path: {model}}}
tasks: [{{name: t, source: "./tasks.py:questions"}}]
selector: {{type: shuffle}}
pipelines:
  experience: [{stage}]
algorithm: {{name: sft, group_size: 1}}
explorer: {{engine: none, workflow: "{workflow}", max_refill: 64, claim_groups: 4, block_timeout_s: 6}}
trainer: {{batch_groups: 4, checkpoint_every: 100, autocast: none}}
sampling: {{max_staleness: 100}}
steps: {steps}
"""
TASKS = """
def questions():
    return ({"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(1000))
"""
# The workflow waits inside C code, where no exception reaches it; the stages report as a time limit does.
BLOCKING = """
import time
from pathlib import Path

from operators.base import Operator, StageOutcome
from rftcore.workflows import WORKFLOWS
from rftdata.user_code.blocked_process import end_blocked_process

HERE = Path(__file__).parent
demonstration = WORKFLOWS.load("demonstration", HERE)


def is_first(what, value):
    try:
        with open(HERE / what, "x") as file:
            file.write(value)
    except FileExistsError:
        return (HERE / what).read_text() == value
    return True


async def walk(task, model, scorer, **arguments):
    if is_first("task", task.task_key):  # the first task that is tried, whenever it is tried
        time.sleep(3600)
    return await demonstration(task, model, scorer, **arguments)


def once(row):
    if not (HERE / "row").exists() and is_first("row", str(row["experience_id"])):
        end_blocked_process("the stage 'once' blocks on 4 experiences", "File once.py, line 3")
    return True


class Stuck(Operator):
    def prepare(self, context):
        end_blocked_process("the stage 'stuck' blocks while it is prepared", "File stuck.py, line 5")

    def apply(self, table):
        return StageOutcome.keep_all(table.num_rows)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    make_tiny_model(tmp_path / "model", num_layers=1)
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "blocking.py").write_text(BLOCKING)
    yield tmp_path
    if (tmp_path / "buffer" / "postgres").exists():
        EmbeddedServer(tmp_path / "buffer").stop()


def start(folder: Path, stage: str, *, steps: int, workflow: str = "demonstration") -> subprocess.Popen[str]:
    (folder / "config.yaml").write_text(
        CONFIG.format(model=folder / "model", stage=stage, steps=steps, workflow=workflow)
    )
    return Preloaded(
        ["run", folder / "config.yaml", "--plain", "--buffer", folder / "buffer"],
        env=rft_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def workers(folder: Path, role: str) -> list[dict[str, Any]]:
    return rows(folder / "buffer", f"select pid, error from rft.worker where role = '{role}' order by worker_id")


def test_a_role_that_user_code_blocks_is_started_again_and_the_run_finishes(folder: Path, rft: Rft) -> None:
    process = start(folder, "./blocking.py:once: {}", steps=3, workflow="./blocking.py:walk")
    output = printed_by(process)
    assert process.returncode == 0, output
    task = (folder / "task").read_text()
    sentence = r"a workflow blocks its event loop for \d+ s and cannot be stopped \(blocking\.py, line 24, in walk\)"
    for number in (1, 2, 3):
        assert re.search(rf"{sentence}; the explorer is started again \({number}\)", output), output
    assert "the stage 'once' blocks on 4 experiences; the pipeline is started again (1)" in output
    assert "raylet" not in output and "3 of 3" in output

    # The group that took three explorers along ended with failed rollouts; the stacks are with the workers.
    failed = rows(
        folder / "buffer",
        "select distinct error, task_key from rft.rollout join rft.rollout_group using (group_id) join rft.task using (task_id)"
        " where outcome = 'failed'",
    )
    assert [row["task_key"] for row in failed] == [task]
    assert re.fullmatch(f"the explorer did not survive this group 3 times: {sentence}", failed[0]["error"])
    *ended, newest = [worker["error"] for worker in workers(folder, "explorer")]
    assert len(ended) == 3 and newest is None
    assert all(re.match(sentence, error) and "    time.sleep(3600)\n" in error for error in ended), "with the stack"
    assert not list((folder / "buffer" / "runs" / "blocked" / "stacks").glob("*.blocked.txt"))
    assert re.search(sentence, " ".join(rft("status", "--all", "--buffer", folder / "buffer").stdout.split()))


def test_a_role_that_is_blocked_again_and_again_ends_the_run(folder: Path) -> None:
    process = start(folder, "./blocking.py:Stuck: {}", steps=3)
    output = printed_by(process)
    assert process.returncode == 1, output
    sentence = "the stage 'stuck' blocks while it is prepared"
    said = re.search(
        rf"the pipeline of the run 'blocked' was blocked again after (\d+) restarts: {sentence}; "
        "continue from the last checkpoint: rft run --resume blocked",
        output,
    )
    assert said, output
    # More than the fewest, where a start takes so long that they are not within a minute.
    assert MAX_FUTILE <= int(said[1]) <= MAX_BLOCKED_PER_HOUR
    assert len(workers(folder, "pipeline")) == int(said[1]) + 1
    (run,) = rows(folder / "buffer", "select status::text as status, outcome from rft.run")
    assert run["status"] == "failed" and sentence in run["outcome"]


def test_a_wait_for_reviews_is_named_and_a_killed_process_is_reported_in_a_line(folder: Path, rft: Rft) -> None:
    process = start(folder, "human_review: {timeout: 1 h, otherwise: pass}", steps=3)
    try:
        _see_reviews_and_kill(folder, rft, process)
    finally:
        process.kill()


def _see_reviews_and_kill(folder: Path, rft: Rft, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    wanted = "trainer waits for the review of groups 1, 2, 3 and 1 more for step 1: `rft label queue --run blocked"
    read = ""
    for line in process.stdout:
        read += line
        if wanted in line:
            break
    assert wanted in read
    shown = " ".join(rft("status", "--buffer", folder / "buffer").stdout.split())
    assert "waits for the review of groups 1, 2, 3 and 1 more for step 1: `rft label queue" in shown

    os.kill(workers(folder, "trainer")[0]["pid"], signal.SIGKILL)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    (reported,) = [line for line in output.splitlines() if line.startswith("rft: ")]
    assert "the trainer of the run 'blocked' was killed by signal 9, possibly for lack of memory (process " in reported
    assert "rft run --resume blocked" in reported and len(reported) < 400
    assert "raylet" not in output and "ActorDied" not in output
    assert workers(folder, "trainer")[0]["error"].startswith("the process was killed by signal 9")
