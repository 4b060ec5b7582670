"""A stage that blocks its process forever: the process reports it and ends, and its successor does not end in the same way."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rftcore.cli import run_command
from rftcore.config.run import load_config
from rftcore.pipeline.blocking_group import with_blocking_report
from rftcore.resolved import ResolvedRun
from rftdata import Buffer
from rftdata.user_code import blocked_process
from tests.support.command_line import impatient_rft
from tests.support.models import make_unopened_model
from tests.support.preloaded import Preloaded, PreloadedCall
from tests.support.store_roles import Roles, own_group, two_sealed_groups
from tests.support.waiting import PATIENCE_S, wait_until

# Other rows need next to none of it, on any machine.
LIMIT_S = 2
# Sleeps in C for one experience, loops in Python for another, and holds the interpreter's lock for a third.
RULES = """
import ctypes
import re


def stuck(row, sleeps_on=0, loops_on=0, backtracks_on=0):
    if row["experience_id"] == backtracks_on:
        re.match(r"(a+)+$", "a" * 80 + "b")
    if row["experience_id"] == sleeps_on:
        ctypes.CDLL(None).sleep(600)
    while row["experience_id"] == loops_on:
        pass
    return True
"""


@pytest.fixture
def roles(buffer: Buffer) -> Roles:
    """Groups 1 to 4 of two experiences each (1 to 8), sealed."""
    roles = two_sealed_groups(buffer)
    with buffer.writer(roles.run) as writer:
        writer.insert(*[own_group(task_key=key) for key in ("two", "three")])
    return roles


@pytest.fixture
def config(buffer: Buffer, roles: Roles, tmp_path: Path) -> Any:
    """Write the run's configuration with one stage; the run trains on its verdicts."""
    make_unopened_model(tmp_path)
    (tmp_path / "rules.py").write_text(RULES)

    def write(**args: Any) -> Path:
        raw = {
            "run": {"name": "roles"},
            "buffer": {"uri": buffer.config.uri, "segments": buffer.config.segments},
            "model": {"path": str(tmp_path)},
            "tasks": [{"name": "t", "source": "t.jsonl"}],
            "explorer": {"reward": ["exact_match"]},
            "pipelines": {"experience": [{"./rules.py:stuck": {**args, "run": {"timeout_s": LIMIT_S}}}]},
            "algorithm": {"name": "grpo", "group_size": 2},
            "trainer": {"batch_groups": 2, "learning_rate": 0.001},
            "steps": 4,
        }
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(raw))
        version = ResolvedRun(load_config(path)).experience_chain.version
        buffer.sql("UPDATE rft.run SET pipeline_version = %s", [version])
        return path

    return write


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a command; what a failed test leaves of it is ended."""
    started: list[subprocess.Popen[str]] = []

    def start(
        config: Path, *options: str, verb: tuple[str, ...] = ("process",), gives_up_soon: bool = True
    ) -> subprocess.Popen[str]:
        arguments = (*verb, str(config), *options)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        # Python code has the usual time to end.
        process = PreloadedCall(impatient_rft, *arguments, **pipes) if gives_up_soon else Preloaded(arguments, **pipes)
        started.append(process)
        return process

    yield start
    for process in started:
        with process:
            process.kill()


def verdicts(buffer: Buffer) -> dict[int, tuple[bool, str | None]]:
    rows = buffer.sql("SELECT experience_id, kept, reason FROM rft.verdict ORDER BY 1").to_pylist()
    return {row["experience_id"]: (row["kept"], row["reason"]) for row in rows}


def test_a_worker_ends_with_a_report_and_the_next_decides_on_the_rest(
    buffer: Buffer, roles: Roles, config: Any, start: Start
) -> None:
    path = config(sleeps_on=3, loops_on=6)
    first = start(path)
    said, _ = first.communicate(timeout=PATIENCE_S)
    assert first.returncode == blocked_process.EXIT_CODE, said
    report = blocked_process.read_report(roles.run.folder, first.pid)
    assert report is not None
    sentence, stack = report
    assert (
        f"stage 1 of the pipeline (./rules.py:stuck) on 8 rows (1 to 8) did not return for experience 3 within {LIMIT_S} s"
        in sentence
    )
    assert "could not be stopped" in sentence and "in stuck" in stack
    # The group of the row is set aside, and the others are no suspects.
    found = verdicts(buffer)
    assert {key: kept for key, (kept, _) in found.items()} == {3: False, 4: False}
    assert "did not return for experience 3" in str(found[3][1]) and "rules.py, line 10, in stuck" in str(found[3][1])
    assert buffer.sql("SELECT max(num_lost) AS n FROM rft.worklist")["n"].to_pylist() == [0]

    second = start(path, gives_up_soon=False)
    wait_until(lambda: len(verdicts(buffer)) == 8, "verdicts on all rows", process=second, pause_s=0.2)
    buffer.database.run("finish_run", run_id=roles.run_id, status="finished", outcome="the test is over")
    said, _ = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 0, said
    found = verdicts(buffer)
    # A loop in Python takes its own row alone, and no process.
    assert {key for key, (kept, _) in found.items() if kept} >= {1, 2, 7, 8} and not found[6][0]
    assert f"did not return for experience 6 within {LIMIT_S} s" in str(found[6][1])
    # A process that was not blocked leaves no report.
    assert not blocked_process.report_path(roles.run.folder, second.pid).exists()


def test_a_preview_and_a_replay_end_with_the_stack_and_the_next_replay_continues(
    buffer: Buffer, roles: Roles, config: Any, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(sleeps_on=3)
    replays = start(path, "--version", "other", verb=("pipeline", "replay"))
    said, _ = replays.communicate(timeout=PATIENCE_S)
    assert replays.returncode != 0
    assert f"did not return for experience 3 within {LIMIT_S} s and could not be stopped" in said and "in stuck" in said
    assert set(verdicts(buffer)) == {3, 4}
    assert run_command(["pipeline", "replay", str(path), "--version", "other", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_kept"] == 6

    path = config(loops_on=3)
    assert run_command(["pipeline", "preview", str(path), "--rows", "8", "--run", "roles"]) == 1
    error = capsys.readouterr().err
    assert f"did not return for experience 3 within {LIMIT_S} s" in error and "Stack of the function" in error


@pytest.mark.parametrize("verb", [("pipeline", "preview"), ("process",)], ids=["preview", "worker"])
def test_a_regular_expression_that_holds_the_interpreters_lock_ends_the_process_with_sentence_and_stack(
    buffer: Buffer, roles: Roles, config: Any, start: Start, verb: tuple[str, ...]
) -> None:
    process = start(config(backtracks_on=3), verb=verb)
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert (
        f"rft: stage 1 of the pipeline (./rules.py:stuck) on 8 rows (1 to 8) did not return within {LIMIT_S} s, and no other thread"
        in said
    )
    assert "rules.py" in said and "in stuck" in said
    report = blocked_process.read_report(roles.run.folder, process.pid)
    assert (report is None) == (verb != ("process",))  # a worker keeps it for the one that follows, and for `rft run`
    assert verdicts(buffer) == {}


def test_a_group_on_which_several_workers_ended_is_set_aside_with_the_report_of_one(
    buffer: Buffer, roles: Roles
) -> None:
    buffer.sql("UPDATE rft.worklist SET num_lost = 4 WHERE item_id = 2 AND consumer = 'pipeline'")
    buffer.sql("UPDATE rft.worklist SET available = false WHERE item_id <> 2 AND consumer = 'pipeline'")
    batch = roles.claim_sealed()
    assert batch is not None and batch.group_ids == [2]
    folder = roles.run.folder
    assert set(with_blocking_report(batch, roles.run).failed["reason"].to_pylist()) == {
        "4 pipeline workers crashed while they decided on it"
    }

    # Of a role by hand; then of one of `rft run`, which moves the report into the database. Those on other rows are of no use.
    report = blocked_process.report_path(folder, 4711, "another-host")
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(
        "stage 1 of the pipeline (slow) on 2 rows (3 to 4) did not return within 9 s".ljust(200) + "\nThread 1\n"
    )
    (reason,) = set(with_blocking_report(batch, roles.run).failed["reason"].to_pylist())
    assert reason.endswith("stage 1 of the pipeline (slow) on 2 rows (3 to 4) did not return within 9 s")
    for rows in ("4 to 3) in the newest", "1 to 8) in a batch"):
        worker = buffer.database.fetch(
            "insert_worker", run_id=roles.run_id, role="pipeline", host="here", pid=1, pid_space="", pid_started=0
        )[0]
        buffer.database.run(
            "stop_worker",
            worker_id=worker["worker_id"],
            error=f"stage 1 of the pipeline (slow) on 2 rows ({rows}\nstack",
        )
    (reason,) = set(with_blocking_report(batch, roles.run).failed["reason"].to_pylist())
    assert reason.endswith("in the newest")
