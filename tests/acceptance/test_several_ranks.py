"""A trainer of two ranks on the CPU: kill -9 of one ends the attempt with a sentence, and `--resume` trains to the planned step.

Its weights go straight into the explorer's engine, by gloo.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rftdata.postgres.embedded import EmbeddedServer
from rftdata.processes import process_lives
from tests.support.command_line import Rft, report, rows
from tests.support.ranks import ranks_of
from tests.support.small_runs import RUN, settings, start
from tests.support.waiting import PATIENCE_S, wait_until
from tests.support.warm_up import Warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 10  # after the kill


@pytest.fixture
def buffer(server_folders: Path) -> Iterator[Path]:
    buffer = server_folders / "ranks" / "buffer"
    yield buffer
    EmbeddedServer(buffer).stop()


def wait_for_the_end_of(trainers: list[int]) -> None:
    """A local Ray cluster ends its processes just after `rft run`."""
    wait_until(
        lambda: not any(process_lives(pid) or ranks_of(pid) for pid in trainers), "the end of all ranks", pause_s=0.1
    )


def test_a_run_with_two_ranks_continues_after_kill_9_of_one(buffer: Path, warm: Warm, rft: Rft) -> None:
    # Without an end in sight, so that it is not finished before the kill. While the engine answers evaluations, weights are written as a file alone.
    options = settings(warm, "trainer.num_gpus=2", "sync.method=nccl", "steps=1000000", "eval.tasks=[]")
    process = start("run", "--plain", "--buffer", buffer, *options)
    wait_until(
        lambda: (buffer / "host").exists() and len(rows(buffer, "select * from rft.train_step")) >= 3,
        "three steps",
        process=process,
        pause_s=0.2,
    )
    trainers = rows(buffer, "select pid from rft.worker where role = 'trainer'")
    assert len(trainers) == 1, "the other rank is no worker of its own"
    ranks = ranks_of(trainers[0]["pid"])
    assert len(ranks) == 1
    os.kill(ranks[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0, output
    assert f"rank 1 of the trainer (pid {ranks[0]}) died: signal 9" in output, output
    assert f"rft run --resume {RUN}" in output and "Traceback" not in output, output
    wait_for_the_end_of([trainers[0]["pid"]])

    last = rows(buffer, "select max(trainer_step) as step from rft.v_train_step")[0]["step"] + STEPS
    rft("run", "--resume", "--plain", "--buffer", buffer, "--set", f"steps={last}")
    result = report(rft, buffer, RUN)
    assert (result["status"], result["steps"]["done"]) == ("finished", last)
    curve = rows(buffer, "select trainer_step from rft.v_train_step order by 1")
    assert [row["trainer_step"] for row in curve] == list(range(1, last + 1))
    trainers = rows(buffer, "select pid, error from rft.worker where role = 'trainer' order by worker_id")
    assert [row["error"] is None for row in trainers] == [False, True]
    wait_for_the_end_of([row["pid"] for row in trainers])
    # Each attempt has a group of its own. Only while the engine is not there yet, are weights written as a file alone.
    applied = rows(
        buffer,
        "select attempt_id, count(*) as n from rft.weight_transfer t join rft.weight_receipt r using (transfer_id)"
        " where r.status = 'applied' and t.status = 'ended' and t.error is null group by 1 order by 1",
    )
    assert len(applied) == 2 and applied[1]["n"] >= STEPS - 1, applied
